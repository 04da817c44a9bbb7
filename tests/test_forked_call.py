"""A function in a copy of the process: its result, its error, and its end."""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lightning_topt.basics.forked_call import ForkedCall, ForkedTalk
from tests.preloaded import preloaded_topt


def test_the_result_comes_while_the_process_goes_on() -> None:
    values, gate = list(range(200_000)), os.pipe()
    call = ForkedCall(lambda: (os.read(gate[0], 1), values)[1])
    values[0] = -1  # the copy has its own
    os.write(gate[1], b"x")
    found = call.result()
    assert found[0] == 0 and len(found) == 200_000  # more than a pipe holds


def test_a_copy_asks_and_is_answered() -> None:
    def talks() -> Generator[str, int, int]:
        one = yield "one"
        two = yield "two"
        return one + two

    talk = ForkedTalk(talks, isolated=True)
    assert talk.next() == (False, "one")
    assert talk.next(1) == (False, "two")
    assert talk.next(2) == (True, 3)


class Picky(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no plan"), ValueError), (Picky("no", "plan"), RuntimeError)]
)
def test_an_error_is_raised_where_the_result_is_asked_for(
    error: Exception, kind: type[Exception]
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(kind, match="no plan"):
        ForkedCall(fails).result()


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        ForkedCall(lambda: lambda: None).result()


def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="was killed"):
        ForkedCall(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()


def test_waiting_has_an_end() -> None:
    with pytest.raises(TimeoutError, match="said nothing"):
        ForkedCall(lambda: time.sleep(600)).result(timeout_seconds=0.2)


ADD = """
from lightning_topt.basics.jit import kernel

@kernel
def add(a, b):
    return a + b
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_what_a_copy_compiles_is_kept_for_later_processes(
    tmp_path: Path, monkeypatch: Any, isolated: bool
) -> None:
    name = f"compiles_{isolated}"
    (tmp_path / f"{name}.py").write_text(ADD)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    found = ForkedCall(
        lambda: (module.add(1, 2), sum(module.add.stats.cache_misses.values())), isolated=isolated
    )
    assert found.result() == (3, 1)
    again = ForkedCall(
        lambda: (module.add(1, 2), sum(module.add.stats.cache_hits.values())), isolated=isolated
    )
    assert again.result() == (3, 1)


def test_what_an_isolated_copy_writes_reaches_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, new = (tmp_path / "kept.txt").open("a"), tmp_path / "new.txt"
    here, there = socket.socketpair()
    here.setblocking(False)

    def writes() -> tuple[str, bytes]:
        print("said", flush=True)
        os.write(2, b"said")
        kept.write("more")
        kept.flush()
        os.write(there.fileno(), b"sent")
        try:
            new.write_text("new")
        except OSError as error:
            return type(error).__name__, os.read(kept.fileno(), 1)
        return "written", b""

    assert ForkedCall(writes, isolated=True).result() == ("OSError", b"")
    assert (tmp_path / "kept.txt").read_text() == "" and not (new.exists() and new.read_text())
    assert capfd.readouterr() == ("", "")
    with pytest.raises(BlockingIOError):
        here.recv(1)
    for each in (kept, here, there):
        each.close()


def test_a_copy_of_a_process_whose_tensors_had_threads_can_compute() -> None:
    program = """
        import torch
        from lightning_topt.basics.forked_call import ForkedCall
        torch.set_num_threads(2)
        ones = torch.ones(1 << 20)
        ones.add_(1)
        print(ForkedCall(lambda: float(ones.add(1).sum()), isolated=True).result())
    """
    command = [preloaded_topt(), "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == str(3.0 * (1 << 20)), result.stderr


def test_what_an_isolated_copy_writes_to_shared_memory_stays_there(tmp_path: Path) -> None:
    counter, file = multiprocessing.Value("i", 1), tmp_path / "mapped"
    file.write_bytes(b"abc")
    mapped = mmap.mmap(os.open(file, os.O_RDWR), 3)

    def writes() -> tuple[int, bytes]:
        counter.value += 1
        mapped[:1] = b"x"
        return counter.value, mapped[:]

    assert ForkedCall(writes, isolated=True).result() == (2, b"xbc")
    assert counter.value == 1 and mapped[:] == file.read_bytes() == b"abc"
    assert ForkedCall(writes).result() == (2, b"xbc") and counter.value == 2
