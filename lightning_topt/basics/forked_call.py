"""Run a function in a copy of this process, beside what the process goes on with.

    call = ForkedCall(lambda: search(request))
    while not call.is_ready():
        train_a_step()
    found = call.result()

The copy shares memory until one of the two writes to it, so it starts in milliseconds, whatever the
function refers to. It has this one thread alone: the function must not use devices, process groups
or locks that other threads may hold. POSIX only.

An isolated copy may run code of users: it has none of the files, sockets and screens that are open
here, and writes no others. Only what is kept for later processes is written from there
(`writable_files`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_NICENESS = 5  # training goes first


class ForkedCall(Generic[T]):
    """A call of `function` in a copy of this process; what it returns, or raises, is pickled.

    Args:
        function: takes no arguments.
        isolated: what it opens, writes and prints reaches nobody.

    Raises:
        OSError: no process can be made.
    """

    def __init__(self, function: Callable[[], T], *, isolated: bool = False) -> None:
        self._data = bytearray()
        self._read, write = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # of a fork beside other threads, from Python 3.12 on
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process = os.fork()
            except OSError:
                os.close(self._read)
                os.close(write)
                raise
        if self._process == 0:
            _run_as_child(function, write, parent, isolated=isolated)
        os.close(write)
        os.set_blocking(self._read, False)
        self._is_over = False

    def is_ready(self) -> bool:
        """Return whether the function has ended, without waiting."""
        while not self._is_over and self._has_data(0.0):
            # an empty part is the end of the pipe: the copy has ended
            part = os.read(self._read, 1 << 20)
            self._data += part
            if not part:
                self._end()
        return self._is_over

    def result(self, *, timeout_seconds: float = 60.0) -> T:
        """Return what the function returned, or raise what it raised.

        Raises:
            TimeoutError: nothing came of it for so many seconds.
            RuntimeError: its process was killed.
        """
        while not self.is_ready():
            # the limit is on silence, counted anew after each part
            if not self._has_data(timeout_seconds):
                self.kill()
                raise TimeoutError(
                    f"a search beside training has not ended within {timeout_seconds:.0f} s"
                )
        # errors of the function are sent, so its process was ended from outside
        if not self._data:
            raise RuntimeError(
                "the process of a search beside training was killed, perhaps for want of memory"
            )
        has_result, value = pickle.loads(bytes(self._data))
        if has_result:
            found: T = value
            return found
        raise value

    def _has_data(self, timeout_seconds: float) -> bool:
        """Wait for a part, or the end, of what the function returned."""
        poll = select.poll()  # select() knows only the first 1,024 descriptors of a process
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(1000 * timeout_seconds))

    def kill(self) -> None:
        """End the process, if it has not ended."""
        if not self._is_over:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._end()

    def _end(self) -> None:
        self._is_over = True
        os.close(self._read)
        with suppress(ChildProcessError):
            # else it would stay in the table of processes
            os.waitpid(self._process, 0)


def die_with(parent: int) -> None:
    """End this process when `parent`, which has forked it, ends (at once on Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # asked after prctl, which reports no end that came before it
    if os.getppid() != parent:  # it ended meanwhile
        os._exit(1)


def _run_as_child(
    function: Callable[[], object], write: int, parent: int, *, isolated: bool
) -> None:
    """Call `function`, send what comes of it, and end without cleaning up the parent's things."""
    try:
        # signals as in a new process; the end of the parent is the end of this one
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        die_with(parent)
        os.nice(_NICENESS)
        gc.disable()  # a collection would write to every object, and copy all memory
        if isolated:
            _isolate(write)
        try:
            answer = pickle.dumps((True, function()))
        except Exception as error:
            # Some errors cannot be made again from their pickle.
            try:
                answer = pickle.dumps((False, error))
                pickle.loads(answer)
            except Exception:
                answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
        # the parent reads while this writes: a pipe holds only some 64 KiB
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer)
    finally:
        # no handlers at exit, no flush of buffers: they are the parent's
        os._exit(0)


def _isolate(keep: int) -> None:
    """Replace all open files and sockets but `keep` by the null device.

    Every write to a file fails from then on: files may have no size.
    """
    # numbers stay taken: a later open must not get one that old code still writes to
    nothing = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for number in {0, 1, 2, *map(int, os.listdir(folder))} - {keep, nothing}:
        with suppress(OSError):  # that of the folder is closed by now
            os.dup2(nothing, number, inheritable=False)
    # with the signal ignored, a write fails with an error rather than ending the process
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # only the soft limit: `writable_files` raises it again
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))


@contextmanager
def writable_files() -> Iterator[None]:
    """Let files be written inside, in an isolated copy too."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != 0:
        yield
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
