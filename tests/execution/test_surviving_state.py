"""States in memory: which one counts, on one machine and several, and when they go."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_topt.execution import surviving_state
from lightning_topt.execution.surviving_state import (
    FoundState,
    Place,
    SurvivingStates,
    find_newest,
)
from tests.launch import run_ranks


def state(value: float) -> dict[str, Any]:
    return {"tensor": torch.full((1000,), value), "more": {"step": [value]}}


def never() -> Any:
    raise AssertionError("the state is there")


@pytest.fixture
def states(tmp_path: Path) -> SurvivingStates:
    return SurvivingStates(tmp_path / "states")


def test_the_newest_state_of_a_fit_counts(states: SurvivingStates) -> None:
    assert states.newest(0) is None
    for place in (Place(0, 9, 9), Place(0, 10, 11), Place(0, 10, 10), Place(1, 100, 100)):
        states.write(place, lambda place=place: state(place.step + place.batches / 100))
    found = states.newest(0)
    assert found is not None and found[0] == Place(0, 10, 11)
    assert states.newest(2) is None


def test_one_of_a_machine_writes(states: SurvivingStates) -> None:
    states.write(Place(0, 1, 1), lambda: state(1))
    states.write(Place(0, 1, 1), never)


def test_an_error_leaves_nothing_and_the_next_one_writes(states: SurvivingStates) -> None:
    with pytest.raises(AssertionError):
        states.write(Place(0, 1, 1), never)
    assert states.newest(0) is None
    states.write(Place(0, 1, 1), lambda: state(1))
    assert states.newest(0) is not None


def _killed_while_it_writes(folder: Path) -> None:
    class Kills:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    SurvivingStates(folder).write(Place(0, 1, 1), lambda: {**state(1), "kills": Kills()})


def test_a_kill_while_a_state_is_written_leaves_the_one_before(states: SurvivingStates) -> None:
    states.write(Place(0, 0, 0), lambda: state(0))
    process = mp.get_context("fork").Process(target=_killed_while_it_writes, args=(states.folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found = states.newest(0)
    assert found is not None and found[0] == Place(0, 0, 0)
    states.write(Place(0, 1, 1), lambda: state(1))  # its lock is gone with it
    assert states.newest(0)[0] == Place(0, 1, 1)  # type: ignore[index]


def test_a_damaged_state_does_not_count(states: SurvivingStates) -> None:
    states.write(Place(0, 1, 1), lambda: state(1))
    states.write(Place(0, 2, 2), lambda: state(2))
    newest = states.newest(0)
    assert newest is not None
    content = bytearray(newest[1].read_bytes())
    content[100] ^= 1
    newest[1].write_bytes(content)
    assert states.newest(0)[0] == Place(0, 1, 1)  # type: ignore[index]
    newest[1].write_bytes(content[:-1])
    assert states.newest(0)[0] == Place(0, 1, 1)  # type: ignore[index]


def test_older_states_of_the_fit_are_removed(states: SurvivingStates) -> None:
    for place in (Place(0, 1, 1), Place(0, 3, 3), Place(1, 1, 1)):
        states.write(place, lambda: state(1))
    unfinished = states.folder / "0-000000000002-000000000002.unfinished"
    unfinished.write_bytes(b"of a process that was killed")
    states.remove_before(Place(0, 3, 3))
    left = sorted(path.name.split("-")[:2] for path in states.folder.glob("[0-9]*"))
    assert left == [["0", "000000000003"], ["1", "000000000001"]]
    assert states.newest(0)[0] == Place(0, 3, 3)  # type: ignore[index]


def test_a_folder_that_others_may_write_to_is_refused(states: SurvivingStates) -> None:
    states.folder.mkdir(mode=0o777)
    states.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="this user alone"):
        states.write(Place(0, 1, 1), never)
    assert states.newest(0) is None


def test_a_process_that_writes_for_too_long_is_not_waited_for(
    states: SurvivingStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surviving_state, "LOCK_SECONDS", 0.1)

    def write_again() -> Any:
        with pytest.raises(TimeoutError, match="must not communicate"):
            states.write(Place(0, 1, 1), never)
        return state(1)

    states.write(Place(0, 1, 1), write_again)
    assert states.newest(0) is not None


def _find(rank: int, folder: str, places: list[int | None]) -> Any:
    states = SurvivingStates(Path(folder) / str(rank))  # as of machines
    if places[rank] is not None:
        place = Place(0, places[rank], 0)
        states.write(place, lambda: {"large": torch.arange(9_000_000.0), **state(place.step)})
    found = find_newest(states, fit=0)
    if found is None:
        return None
    loaded = found.load()
    assert torch.equal(loaded["large"], torch.arange(9_000_000.0))
    return found.place.step, float(loaded["tensor"][0]), found.path.name


@pytest.mark.parametrize(
    ("places", "expected"),
    [([None, None, None], None), ([None, 4, 5], 5)],
)
def test_machines_go_on_from_the_newest_state_of_any(
    tmp_path: Path, places: list[int | None], expected: int | None
) -> None:
    results = run_ranks(_find, 3, str(tmp_path), places)
    assert len(set(results)) == 1
    if expected is None:
        assert results[0] is None
    else:
        assert results[0][:2] == (expected, expected)


def _find_of_two(rank: int, folder: str) -> Any:
    """Ranks 0 and 1 are on a machine, 2 and 3 on another, which has the state."""
    states = SurvivingStates(Path(folder) / str(rank // 2))
    if rank == 2:
        states.write(Place(0, 1, 1), lambda: {"state_dict": state(3), "other": [state(4)]})
    looked: list[int] = []
    newest = states.newest
    states.newest = lambda fit: looked.append(fit) or newest(fit)  # type: ignore[method-assign, func-returns-value]
    found = find_newest(states, fit=0)
    assert found is not None
    assert looked == [0] * (rank % 2 == 0)
    loaded = found.load()
    return (
        float(loaded["state_dict"]["tensor"][0]),
        float(loaded["other"][0]["tensor"][0]),
        found.received is not None,
    )


def test_the_first_rank_of_a_machine_looks_for_all_of_it(tmp_path: Path) -> None:
    has_it, lacks_it = (3.0, 4.0, False), (3.0, 4.0, True)
    assert run_ranks(_find_of_two, 4, str(tmp_path)) == [lacks_it] * 2 + [has_it] * 2


def test_what_was_loaded_outlives_its_file(states: SurvivingStates) -> None:
    states.write(Place(0, 1, 1), lambda: {"state_dict": state(3), "other": state(4)})
    newest = states.newest(0)
    assert newest is not None
    loaded = FoundState(*newest).load()
    states.remove_before(Place(0, 2, 2))
    assert not newest[1].exists()
    loaded["state_dict"]["tensor"] += 1
    loaded["other"]["tensor"] += 1
    assert (loaded["state_dict"]["tensor"][0], loaded["other"]["tensor"][0]) == (4, 5)


def test_the_folder_goes_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    try:
        states = SurvivingStates(tmp_path / "states", owner.pid)
        states.write(Place(0, 1, 1), lambda: state(1))
        removers = removers_of(states.folder)
        states.write(Place(0, 2, 2), lambda: state(2))
        assert len(removers) == 1
        assert removers_of(states.folder) == removers
        assert states.newest(0)[0] == Place(0, 2, 2)  # type: ignore[index]
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not states.folder.exists())


def test_a_folder_whose_owner_has_ended_goes_at_once(tmp_path: Path) -> None:
    owner = subprocess.Popen(["true"])
    owner.wait()
    states = SurvivingStates(tmp_path / "states", owner.pid)
    with contextlib.suppress(OSError):
        states.write(Place(0, 1, 1), lambda: state(1))
    wait_until(lambda: not states.folder.exists())


def removers_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()
