"""Run a function in a copy of this process, which leaves nothing behind in this one.

    graph = ForkedCall(lambda: capture(module, batch)).result()

The copy shares memory until one of the two writes to it, so it starts in milliseconds, whatever the
function refers to. It has this one thread alone: the function must not use devices, process groups
or locks that other threads may hold. POSIX only.

A generator may ask this process for what it cannot do itself:

    talk = ForkedTalk(lambda: search(request))      # yields questions, returns a result
    said = talk.next()
    while not said.is_over:
        said = talk.next(answer_of(said.value))

An isolated copy may run code of users: it has none of the files, sockets and screens that are open
here, writes no others, and has memory that processes share as a copy. Only caches for later
processes are written from there (`writable_files`).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_MAP_FIXED = 0x10  # mmap(2)
_MOST_SHARED_BYTES = 1 << 30


class Said(NamedTuple):
    """What a copy said: a question, or, where it `is_over`, the result."""

    is_over: bool
    value: Any


class ForkedTalk:
    """A generator in a copy of this process; what it yields is answered here.

    Args:
        function: makes the generator.
        isolated: what it opens, writes and prints reaches nobody.

    Raises:
        OSError: no process can be made.
    """

    def __init__(
        self, function: Callable[[], Generator[Any, Any, Any]], *, isolated: bool = False
    ) -> None:
        self._connection, theirs = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # of a fork beside other threads, from Python 3.12 on
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process = os.fork()
            except OSError:
                self._connection.close()
                theirs.close()
                raise
        if self._process == 0:
            self._connection.close()
            _run_as_child(function, theirs, parent, isolated=isolated)
        theirs.close()
        self._has_begun = self._is_over = False

    def next(self, answer: object = None, *, timeout_seconds: float = 60.0) -> Said:
        """Return what the copy says next, to which the last question has this `answer`.

        Raises:
            TimeoutError: it said nothing for so many seconds.
            RuntimeError: its process was killed.
            Exception: what the generator raised.
        """
        try:
            if self._has_begun:
                self._connection.send_bytes(pickle.dumps(answer))
            self._has_begun = True
            if not self._connection.poll(timeout_seconds):
                self.kill()
                raise TimeoutError(
                    f"what runs in a copy of this process said nothing for {timeout_seconds:.0f} s"
                )
            # by plain pickle: torch would send tensors through files that a copy may not make
            word, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            # errors of the function are sent, so its process was ended from outside
            self.kill()
            raise RuntimeError(
                "a copy of this process was killed, perhaps for want of memory"
            ) from error
        if word != "asks":
            self.kill()
        if word == "fails":
            raise value
        return Said(word == "ends", value)

    def kill(self) -> None:
        """End the process, if it has not ended."""
        if self._is_over:
            return
        self._is_over = True
        self._connection.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):
            # else it would stay in the table of processes
            os.waitpid(self._process, 0)


class ForkedCall(Generic[T]):
    """A call of `function` in a copy of this process; what it returns, or raises, is pickled."""

    def __init__(self, function: Callable[[], T], *, isolated: bool = False) -> None:
        def call() -> Generator[None, None, T]:
            yield from ()
            return function()

        self._talk = ForkedTalk(call, isolated=isolated)

    def result(self, *, timeout_seconds: float = 60.0) -> T:
        """Return what the function returned, or raise what it raised. Raises as `ForkedTalk`."""
        result: T = self._talk.next(timeout_seconds=timeout_seconds).value
        return result

    def kill(self) -> None:
        """End the process, if it has not ended."""
        self._talk.kill()


def die_with(parent: int) -> None:
    """End this process when `parent`, which has forked it, ends (at once on Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # asked after prctl, which reports no end that came before it
    if os.getppid() != parent:  # it ended meanwhile
        os._exit(1)


def _run_as_child(
    function: Callable[[], Generator[Any, Any, Any]],
    connection: Connection[Any, Any],
    parent: int,
    *,
    isolated: bool,
) -> None:
    # Run the generator, send what it says, and end without cleaning up the parent's things
    try:
        # signals as in a new process; the end of the parent is the end of this one
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        die_with(parent)
        gc.disable()  # a collection would write to every object, and copy all memory
        # threads of OpenMP are not copied, and a kernel that waits for them never ends
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        if isolated:
            _isolate(connection.fileno())
        answer: Any = None
        try:
            questions = function()
            try:
                while True:
                    connection.send_bytes(pickle.dumps(("asks", questions.send(answer))))
                    answer = pickle.loads(connection.recv_bytes())
            except StopIteration as end:
                connection.send_bytes(pickle.dumps(("ends", end.value)))
        except Exception as error:  # also of a result that cannot be pickled
            connection.send_bytes(pickle.dumps(("fails", _sendable(error))))
    finally:
        # no handlers at exit, no flush of buffers: they are the parent's
        os._exit(0)


def _sendable(error: Exception) -> Exception:
    # The error, or one with its words where it cannot be made again from its pickle
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _isolate(keep: int) -> None:
    # Replace all open files and sockets but `keep` by the null device.
    # Every write to a file fails from then on: files may have no size
    # numbers stay taken: a later open must not get one that old code still writes to
    nothing = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for number in {0, 1, 2, *map(int, os.listdir(folder))} - {keep, nothing}:
        with suppress(OSError):  # that of the folder is closed by now
            os.dup2(nothing, number, inheritable=False)
    _copy_shared_memory()
    # with the signal ignored, a write fails with an error rather than ending the process
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # only the soft limit: `writable_files` raises it again
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))


def _copy_shared_memory() -> None:
    # Replace memory that is shared with other processes by copies of it (on Linux alone).
    # Raises MemoryError for more than a GiB
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as file:  # address range, permissions, offset, device, file
        regions = [line.split()[:2] for line in file]
    shared = [
        tuple(int(end, 16) for end in place.split("-"))
        for place, permissions in regions
        if permissions == "rw-s"
    ]
    if sum(end - start for start, end in shared) > _MOST_SHARED_BYTES:
        raise MemoryError("this process shares more memory with others than a copy may hold")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for start, end in shared:
        values = ctypes.string_at(start, end - start)
        place = libc.mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if place != start:
            raise OSError(ctypes.get_errno(), "shared memory cannot be copied")
        ctypes.memmove(start, values, len(values))


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
