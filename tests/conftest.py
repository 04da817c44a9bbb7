"""What every test leaves behind as it found it."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

# The process that gives out the tests imports this too, and has no use for torch.
from tests.preloaded import load_for_forks, preloaded_python, preloaded_topt, trace_once

ROOT = Path(__file__).parents[1]
# What compiles kernels, in a new checkout while the tests are collected.
COMPILES = (
    "from tests.launch import load_kernels; load_kernels()",
    "from tests.plan import test_pipelines as t; t.search_plans(t.make_request())",
)
# Tests of ranks and programs, longest first, come before all others: none of them is left when the
# other processes have nothing to do. What calls compiled kernels comes last in the second half,
# when the first half has compiled them.
FIRST = (
    *("foreign", "test_examples.py", "techniques", "execution"),
    *("cli", "plugins", "optim", "data"),
)
LAST = ("costs", "communication")
# Folders whose modules share ranks: new ones would do again what torch does once in each.
SHARE_RANKS = ("execution", "plugins")


def pytest_configure(config: pytest.Config) -> None:
    """Start the one server that all processes of this run share; it imports nothing until it is
    asked.

    Processes that tests spawn (workers of loaders, ranks of ``ddp_spawn``) are its programs too,
    and so are the processes of ``-n``: the libraries are imported once for all of them.
    """
    multiprocessing.set_executable(preloaded_python())
    gc.disable()  # collections take half of the time until all tests are found
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["executable"]  # for tests of a new interpreter
    elif getattr(config.option, "tx", None):
        config.option.tx = [f"popen//python={preloaded_topt()}"] * len(config.option.tx)
        with subprocess.Popen([preloaded_topt(), "-c", ""]):  # imports begin
            rewrite_tests(config)
        for code in COMPILES if not any((ROOT / "lightning_topt").rglob("*.nbi")) else ():
            config.add_cleanup(subprocess.Popen([preloaded_topt(), "-c", code], cwd=ROOT).wait)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of ``-n`` which Python it would be without the server."""
    node.workerinput["executable"] = sys.executable


def rewrite_tests(config: pytest.Config) -> None:
    """Compile the test files as pytest does: each process of ``-n`` would do it for itself."""
    state = config.stash[rewrite.assertstate_key]
    for path in [] if sys.dont_write_bytecode else Path(__file__).parent.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(path)
        compiled = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, compiled) is None:
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, compiled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the folders, and leave what is in them as it is."""
    places = {name: index - len(FIRST) for index, name in enumerate(FIRST)}
    places |= {name: index + 1 for index, name in enumerate(LAST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: places.get(item.path.relative_to(root).parts[0], 0))


def pytest_collection_finish() -> None:
    """A million objects of libraries and tests live as long as the run; ranks are forked from
    it. What a fit imports when it needs it is imported here, once.
    """
    package = importlib.import_module("lightning_topt")
    for module in pkgutil.walk_packages(package.__path__, "lightning_topt."):
        importlib.import_module(module.name)
    trace_once()
    load_for_forks()
    gc.set_threshold(20_000)  # with 700, a tenth of the time of ranks is theirs


def pytest_sessionfinish() -> None:
    """At its end this process would ask them to end, and Lightning's handlers do not."""
    if "tests.launch" in sys.modules:
        sys.modules["tests.launch"].end_pools()


@pytest.fixture(autouse=True, scope="module")
def what_is_there_is_frozen() -> None:
    """What earlier tests have left in memory costs a collection nothing, and ranks no copies."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment_is_put_back() -> Iterator[None]:
    """`seed_everything` and launchers of ranks write variables that later tests would read: seeds
    of samplers, or a LOCAL_RANK with which Lightning starts no ranks.
    """
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # pytest's own
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def compiled_functions_are_forgotten() -> Iterator[None]:
    """Ranks are forked from a process in which other tests may have compiled."""
    yield
    if "tests.launch" in sys.modules:
        sys.modules["tests.launch"].forget_compiled_functions()


@pytest.fixture(autouse=True, scope="module")
def pools_of_ranks_end_with_their_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """See `tests.launch.run_on_pool`; those of a folder whose modules share them end after it."""
    stay = request.path.relative_to(ROOT / "tests").parts[0] in SHARE_RANKS
    if "tests.launch" in sys.modules and not stay:
        sys.modules["tests.launch"].end_pools()
    yield
    if "tests.launch" in sys.modules and not stay:
        sys.modules["tests.launch"].end_pools()


@pytest.fixture(autouse=True, scope="session")
def measurements_are_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests of a session share measurements of this machine, and leave the user's alone."""
    session = tmp_path_factory.getbasetemp()
    caches = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "caches"
    caches.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches))
        # as many tests run as there are cores: all would measure again at each quiet moment
        calibrate = importlib.import_module("lightning_topt.costs.calibrate")
        patch.setattr(calibrate, "is_busy", lambda share, **_: False)
        yield


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calibrations in this process and its forks take small messages and little work."""
    calibrate: Any = importlib.import_module("lightning_topt.costs.calibrate")
    monkeypatch.setattr(calibrate, "SIZES", tuple(4 << shift for shift in (8, 12, 14, 18)))
    monkeypatch.setattr(calibrate, "_WORK_SECONDS", 1e-3)
    monkeypatch.setitem(calibrate._MATRIX_SIZES, "cpu", (64, 128))
    monkeypatch.setitem(calibrate._BYTES_MOVED, "cpu", 1 << 20)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let this process compute with one thread, as ranks do, to compare bit for bit with it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
