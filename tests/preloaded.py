"""A Python whose third-party imports are done: tests start whole programs in a tenth of a second
instead of five.

`preloaded_python()` is the path of an executable that takes what ``python`` takes (a script,
``-m``, ``-c``; after ``-I`` it is Python itself). It hands its arguments, environment, folder and
open descriptors to a server that has imported torch, lightning and hydra, and ends as the program
ended. The server forks a process for each program, which then is as new as any: nothing of this
repository was imported, `__main__`, `sys.path` and the random states are its own. Programs that it
starts by `sys.executable` are quick too. `preloaded_topt()` is another such path, whose programs
find all of `lightning_topt` imported, for tests of what programs do.

Four things differ from a new interpreter: the hash seed is the server's, variables that libraries
read while they are imported have no effect, a program cannot tell what it imports itself from what
was there, and it is over when its exit functions have run: to take down an interpreter with all
these libraries takes half a second. Tests of these start `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "PRELOADED_PYTHON"
ROOT = Path(__file__).parents[1]
HUGE, MADV_COLLAPSE = 2 << 20, 25
WITH_TOPT = "_topt"  # at the end of the path and of the address
LIBRARIES = (
    *(
        "torch",
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch.distributed.optim",
        "torch.distributed.run",
        "torch.distributed.algorithms.ddp_comm_hooks",
        "torch.utils.data",
        "torch.fx.experimental.proxy_tensor",
        "lightning.pytorch",
    ),
    *(
        "lightning.pytorch.demos.boring_classes",
        "torchmetrics",
        "hydra",
        "omegaconf",
        "numpy",
        "numba",
        "psutil",
    ),
    *("rich", "rich.console", "rich.table", "yaml", "xxhash", "sklearn.datasets"),
)
# those that need not be there
HF = ("bert", "clip", "convnext", "gpt2", "llama", "mixtral", "segformer", "t5", "vit", "whisper")
OTHERS = (*(f"transformers.models.{m}.modeling_{m}" for m in HF), "peft", "pytorch_optimizer")
# descriptors of a program are below, where they rest while they are put in their places above
HIGH = 500
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1:2] == ["-I"]:  # a light process, which imports none of the libraries
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = [number for number in map(int, os.listdir("/proc/self/fd")) if number < {high}]
open_files = []
for number in files:
    try:
        if os.get_inheritable(number):
            open_files.append(number)
    except OSError:  # of the listing itself
        pass
body = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), open_files]).encode()
socket.send_fds(server, [len(body).to_bytes(8, "big")], open_files)
server.sendall(body)
for number in {forwarded}:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
answer = server.recv(4)
status = int.from_bytes(answer, "big", signed=True) if answer else 70
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""

# ---- in the tests --------------------------------------------------------------------------------


def preloaded_python() -> str:
    """Return the path of the executable; the first call of a test run starts its server."""
    if ADDRESS not in os.environ:
        start_server()
    return os.environ[ADDRESS]


def preloaded_topt() -> str:
    """Return the path of the executable whose programs find `lightning_topt` imported."""
    return preloaded_python() + WITH_TOPT


def start_server() -> None:
    """Start a server, which imports when first asked and ends with this process; note where."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded")
    address, executable = Path(folder.name) / "server", Path(folder.name) / "python"
    names = {"python": sys.executable, "high": HIGH, "forwarded": [*map(int, FORWARDED)]}
    for end in ("", WITH_TOPT):
        client = Path(f"{executable}{end}")
        client.write_text(CLIENT.format(**names, address=f"{address}{end}"))
        client.chmod(0o755)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    environment.pop("PYTHONPATH", None)  # a program has what its own environment says
    # Libraries may lie where only this process looks for them.
    command = [sys.executable, __file__, str(address), str(executable), json.dumps(sys.path)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, cwd="/", env=environment, start_new_session=True
    )
    while not address.exists():
        assert server.poll() is None, "the server of preloaded interpreters did not start"
        time.sleep(0.002)
    os.environ[ADDRESS] = str(executable)
    atexit.register(_stop, server, folder, os.getpid())


def _stop(server: subprocess.Popen[bytes], folder: Any, owner: int) -> None:
    if os.getpid() == owner:
        server.communicate()  # it ends when its input does
        folder.cleanup()


# ---- the server ----------------------------------------------------------------------------------


def serve(address: str) -> list[str] | None:
    """Fork for each program that is asked for. Returns its arguments in the process that is to run
    it, None at the end.

    The first that is to find `lightning_topt` imported gets a server of its own, forked from this
    one.
    """
    with_topt, listener = _listen(address + WITH_TOPT), _listen(address)
    search_path = list(sys.path[1:])
    listeners = [with_topt, listener]
    while 0 not in (ready := select.select([0, *listeners], [], [])[0]):
        _reap()
        try:
            import_libraries(tuple(json.loads(sys.argv[3])))
            if ready[0] is with_topt and listener in listeners:
                if os.fork() == 0:
                    listener.close()
                    listeners = [with_topt]
                    import_topt(tuple(json.loads(sys.argv[3])))
                    sys.argv[2] += WITH_TOPT
                else:
                    with_topt.close()  # it is the other's now, and ends with it
                    listeners = [listener]
                continue
        except Exception:
            # Nothing can run: this program fails, and later ones find no server.
            traceback.print_exc()
            raise SystemExit("the server of preloaded interpreters failed") from None
        connection, _ = ready[0].accept()
        if os.fork() == 0:
            with_topt.close(), listener.close()
            return _attend(connection, search_path)
        connection.close()
    _reap()
    return None


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(128)
    os.rename(address + ".new", address)  # who sees it can connect
    return listener


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@functools.cache
def import_libraries(search_path: tuple[str, ...]) -> None:
    """Import all libraries, which may lie where `search_path` says."""
    gc.disable()  # collections would take half of the time of imports
    with _found_on(search_path):
        for library in LIBRARIES:
            importlib.import_module(library)
        for library in OTHERS:
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
    load_for_forks()


def import_topt(search_path: tuple[str, ...]) -> None:
    """Import all modules of `lightning_topt`, of this repository."""
    gc.disable()
    with _found_on(search_path):
        sys.path.insert(0, str(ROOT))  # before an installed one
        package = importlib.import_module("lightning_topt")
        for module in pkgutil.walk_packages(package.__path__, "lightning_topt."):
            importlib.import_module(module.name)
        trace_once()
    load_for_forks()


def trace_once() -> None:
    """Fill the tables that the first trace of a process fills, in half a second: plans are made in
    forked processes.
    """
    torch = importlib.import_module("torch")
    # before fake tensors, beside which torch 2.14 with CUDA would start threads that forks lack
    torch.zeros((), requires_grad=True).backward()
    models = importlib.import_module("tests.models")
    model = models.GPT()  # of the shapes that most tests have, which are in the tables then
    importlib.import_module("lightning_topt.graph.capture").capture(model, models.batch_for(model))


@contextlib.contextmanager
def _found_on(search_path: tuple[str, ...]) -> Iterator[None]:
    before = list(sys.path)
    sys.path += [path for path in search_path if path not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def load_for_forks() -> None:
    """Load what each forked process would load for itself, and leave all there is out of its
    garbage collections, which begin here.
    """
    target = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()  # as at the first call of a compiled function
    target.target_context.refresh()
    keep_entry_points()
    gc.collect()
    gc.freeze()  # forked processes need not copy the pages of these objects to count references
    gc.enable()
    collapse_pages()


def keep_entry_points() -> None:
    """Let Lightning look once for callbacks that other packages bring, where each Trainer opens the
    metadata of all that is installed: a hundredth of a second.
    """
    registry = importlib.import_module("lightning.fabric.utilities.registry")
    registry.entry_points = lambda group: _entry_points(tuple(sys.path), group)  # type: ignore[attr-defined]
    _entry_points(tuple(sys.path), "lightning.pytorch.callbacks_factory")


@functools.cache
def _entry_points(search_path: tuple[str, ...], group: str) -> Any:
    """Those of packages on `search_path`, which is ``sys.path``."""
    return importlib.metadata.entry_points(group=group)


def collapse_pages() -> None:
    """Put what is in memory into pages of 2 MiB, where the kernel does so (Linux 6.1): a fork and
    the end of its process then go through hundreds of pages, not a hundred thousand.

    Memory that is taken later comes in small pages, as ever.
    """
    maps, madvise = Path("/proc/self/maps"), ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines() if maps.exists() else []:
        addresses, mode, *_, last = line.split()
        if mode == "rw-p" and last in ("0", "[heap]"):  # 0 of no file
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _attend(connection: socket.socket, search_path: list[str]) -> list[str]:
    """Fork the program and tell its client how it ended; returns in the program alone."""
    header, files, _, _ = socket.recv_fds(connection, 8, HIGH)
    body, size = b"", int.from_bytes(header, "big")
    while len(body) < size:
        received = connection.recv(size - len(body))  # no more: signals may follow
        if not received:  # it was killed
            os._exit(0)
        body += received
    arguments, folder, environment, numbers = json.loads(body)
    program = os.fork()
    if program == 0:
        connection.close()
        _become(folder, environment, dict(zip(numbers, files, strict=True)), search_path)
        return arguments  # type: ignore[no-any-return]
    for file in (0, 1, 2, *files):
        os.close(file)
    descriptor = os.pidfd_open(program)
    while True:
        ready = select.select([connection, descriptor], [], [])[0]
        if descriptor in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            try:
                connection.sendall(status.to_bytes(4, "big", signed=True))
            finally:
                os._exit(0)
        for number in connection.recv(16) or bytes([signal.SIGKILL]):
            os.kill(program, number)


def _become(
    folder: str, environment: dict[str, str], files: dict[int, int], search_path: list[str]
) -> None:
    parked = {number: fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for number, file in files.items()}
    os.closerange(0, HIGH)
    for number, file in parked.items():
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *search_path]
    sys.executable = sys.argv[2]
    multiprocessing.set_executable(sys.executable)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    random.seed()
    sys.modules["numpy"].random.seed()


def run_program(arguments: list[str]) -> None:
    """Run a script, ``-m MODULE`` or ``-c CODE`` as `__main__`, as the interpreter does."""
    while arguments[0] in ("-B", "-u") or arguments[0].startswith("-W"):
        if arguments[0].startswith("-W"):  # which multiprocessing passes on
            warnings._setoption(arguments[0][2:])  # type: ignore[attr-defined]
        arguments = arguments[1:]
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    target, sys.argv = (arguments[1], ["-c", *arguments[2:]]) if kind else (arguments[0], arguments)
    assert not target.startswith("-"), f"the preloaded Python does not know the option {target}"
    sys.path.insert(
        0, {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.abspath(target)))
    )
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.modules.pop(target, None)  # it runs as `__main__`
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    if not kind:
        main.__file__ = target
    code = target if kind else Path(target).read_text()
    exec(compile(code, "<string>" if kind else target, "exec"), main.__dict__)


def end_program(status: int) -> None:
    """End as the interpreter does, up to where it would free every object there is."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it was closed, or nobody reads it
            stream.flush()
    os._exit(status)


def status_of(end: SystemExit) -> int:
    """The status that `sys.exit` asks for; what is no number is said."""
    if isinstance(end.code, int):
        return end.code & 0xFF
    if end.code is not None:
        print(end.code, file=sys.stderr)
    return int(end.code is not None)


if __name__ == "__main__":
    asked = serve(sys.argv[1])
    if asked is not None:
        try:
            run_program(asked)
        except SystemExit as end:
            end_program(status_of(end))
        except Exception:
            sys.excepthook(*sys.exc_info())
            end_program(1)
        end_program(0)
