"""Measurements are made once per set-up, equal on all ranks, and cost at most a warning."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from lightning_topt.costs import measurements
from lightning_topt.costs import optimizer as optimizer_costs
from lightning_topt.costs.measurements import Entry, Measurements, load_entries, save_entries
from lightning_topt.costs.optimizer import time_updates
from tests.costs.graphs import cluster_of
from tests.costs.test_calibrate import graph
from tests.launch import run_ranks

SETUP = {"machines": ["a"], "world_size": 2}


def measured_updates(found, optimizer, module):
    times = time_updates(
        [optimizer],
        named_parameters=module.named_parameters(),
        device=torch.device("cpu"),
        known=found.known_updates,
    )
    return found.agree_on_updates(times)


@pytest.fixture
def counted(monkeypatch):
    """The names of what was measured; nothing waits for a calibration."""
    calls = []
    cluster = cluster_of(1, backend="gloo")
    monkeypatch.setattr(measurements, "calibrate", lambda **options: cluster)
    free = cluster.device.memory_bytes
    monkeypatch.setattr(measurements, "usable_memory_bytes", lambda *_, **__: free)

    def count(name, module=measurements, **options):
        real = getattr(module, name)

        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **{**kwargs, **options})

        monkeypatch.setattr(module, name, call)

    count("calibrate")
    count("measure_kernels", budget_seconds=30.0)  # it ends long before
    count("measure_kind", optimizer_costs, budget_seconds=0.0)
    return calls


def everything(directory, *, lines=None, optimizer=optim.AdamW, **options):
    progress = None if lines is None else lines.append
    found = Measurements.open(directory=directory, progress=progress, **options)
    module = nn.Linear(3, 2)
    updates = measured_updates(found, optimizer(module.parameters()), module)
    return found.cluster().to_dict(), found.kernel_seconds(graph()), updates


def test_a_second_start_measures_nothing_and_has_the_same_numbers(tmp_path, counted, monkeypatch):
    lines = []
    first = everything(tmp_path / "cache", lines=lines)
    assert counted == ["measure_kind", "measure_kind", "calibrate", "measure_kernels"]
    assert len(lines) == 2 and all(line.startswith("measuring ") for line in lines)
    assert everything(tmp_path / "cache", lines=lines) == first
    # but for what is free
    monkeypatch.setattr(measurements, "usable_memory_bytes", lambda *_, **__: 123)
    assert Measurements.open(directory=tmp_path / "cache").cluster().device.memory_bytes == 123
    assert len(counted) == 4 and len(lines) == 2
    (file,) = (tmp_path / "cache").glob("*.json")
    assert Measurements.open(directory=tmp_path / "cache").path == file
    assert (
        file.stat().st_mode & 0o777 == 0o600
        and (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    )
    # shapes by hash, no names
    assert "aten." not in file.read_text() and "AdamW" not in file.read_text()


def test_another_set_up_and_a_refresh_measure_again(tmp_path, counted, monkeypatch):
    everything(tmp_path)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    everything(tmp_path)
    assert len(counted) == 8
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    everything(tmp_path)
    assert len(counted) == 8
    assert Measurements.open(directory=tmp_path, refresh=True).cluster()
    assert counted[8:] == ["calibrate"]
    everything(tmp_path)  # kernels and updates of before the refresh are gone
    assert sorted(counted[9:]) == ["measure_kernels", "measure_kind", "measure_kind"]


def on_rank(rank, directory):
    lines = []
    measurements._CHANGED = 1e9  # whatever else runs on this machine
    measurements.calibrate = partial(measurements.calibrate, budget_seconds=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [everything(directory, lines=lines) for _ in range(2)]
    return results, lines


def test_ranks_have_the_same_numbers_and_rank_0_tells(tmp_path, short_measurements):
    (first, lines), (second, others) = run_ranks(on_rank, 2, tmp_path)
    assert first == second and first[0] == first[1]
    assert len(lines) == 2 and others == []
    assert first[0][0]["devices_per_node"] == 2 and len(first[0][1]) == 3


def changed_on_rank(rank, directory):
    """What a start says, and the seconds of an exchange before and after it, where those in the
    file are of a link that is much faster or slower.
    """
    measurements.calibrate = partial(measurements.calibrate, budget_seconds=0.1)
    told = []
    for factor in (1e-3, 1e3):
        found = Measurements.open(directory=directory)
        cluster = found.cluster()
        value = cluster.to_dict()
        for curve in value["collectives"]:
            curve["seconds"] = [factor * seconds for seconds in curve["seconds"]]
        found.entries[found._name("cluster")] = Entry(time.time(), value)
        found.save()
        torch.distributed.barrier()
        lines = []
        again = Measurements.open(directory=directory, progress=lines.append).cluster()
        seconds = [c.collectives["all_reduce", 2, 1].seconds[-1] for c in (cluster, again)]
        told.append((lines, seconds))
    return told


def test_a_link_that_has_changed_is_measured_again(tmp_path, short_measurements):
    first, second = run_ranks(changed_on_rank, 2, tmp_path)
    for (lines, seconds), (_, others) in zip(first, second, strict=True):
        assert seconds == others and seconds[0] / 100 < seconds[1] < 100 * seconds[0]
        assert len(lines) == 1 and "again, since exchanges take another time" in lines[0]


SPOILED = {
    "damaged": lambda file: file.write_text("{"),
    "nested": lambda file: file.write_text("[" * 100_000),
    "wrong types": lambda file: file.write_text(
        json.dumps({**json.loads(file.read_text()), "entries": [1]})
    ),
    "no share": lambda file: file.write_text(
        file.read_text().replace('"busy": 0.0', '"busy": "x"')
    ),
    "a link": lambda file: (
        file.rename(file.with_suffix(".other")),
        file.symlink_to(file.with_suffix(".other")),
    ),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "writable by others": lambda file: file.chmod(0o666),
    "folder writable by others": lambda file: file.parent.chmod(0o777),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_cannot_be_trusted_costs_a_warning(tmp_path, how):
    entries = {"kernel a": Entry(time.time(), 1.0)}
    save_entries(tmp_path, SETUP, entries)
    assert load_entries(tmp_path, SETUP) == entries
    (file,) = tmp_path.glob("*.json")
    SPOILED[how](file)
    with pytest.warns(UserWarning, match="not used"):
        assert load_entries(tmp_path, SETUP) == {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_entries(tmp_path, SETUP, entries)
    if how in ("a folder", "folder writable by others"):
        assert "cannot be kept" in str(caught[0].message)
    else:
        assert not caught and load_entries(tmp_path, SETUP) == entries and not file.is_symlink()


def test_values_that_are_no_measurements_are_measured_again(tmp_path, counted):
    first = everything(tmp_path)
    found = Measurements.open(directory=tmp_path)
    for wrong in (True, float("nan"), []):
        entries = {
            name: Entry(time.time(), wrong)
            for name in found.entries
            if not name.startswith("graph")
        }
        save_entries(tmp_path, found.setup, entries, merge=False)
        before = len(counted)
        again = everything(tmp_path)
        assert len(counted) == before + 4 and again[1].keys() == first[1].keys()


# ---- What was measured on a busy machine


@pytest.fixture
def machine(monkeypatch):
    """How busy it is (`share`), and how many calibrations there were (`count`)."""
    machine = SimpleNamespace(share=0.0, count=0)

    def calibrate(**options):
        machine.count += 1
        return replace(cluster_of(1, backend="gloo"), busy_share=machine.share)

    monkeypatch.setattr(measurements, "calibrate", calibrate)
    monkeypatch.setattr(measurements, "busy_share", lambda share, *, ranks: machine.share)
    return machine


def start(directory, *, lines=None, **options):
    progress = None if lines is None else lines.append
    found = Measurements.open(directory=directory, progress=progress, **options)
    found.cluster()
    return found


def test_what_a_busy_machine_gave_serves_for_an_hour(tmp_path, machine, monkeypatch):
    lines, hour = [], measurements.BUSY_AGE_SECONDS
    machine.share = 0.4
    for _ in range(2):
        assert start(tmp_path, lines=lines).busy_share == 0.4 and machine.count == 1
    assert "busy" not in lines[0] and lines[1] == lines[2] and "was busy" in lines[1]
    machine.share = 0.0
    monkeypatch.setattr(measurements, "BUSY_AGE_SECONDS", 0.0)
    quiet = start(tmp_path).entries
    assert machine.count == 2
    # and takes the place of nothing that a quiet machine gave, as by `topt calibrate`
    machine.share = 0.4
    monkeypatch.setattr(measurements, "BUSY_AGE_SECONDS", hour)
    again = start(tmp_path, refresh=True)
    assert machine.count == 3 and again.busy_share == 0.4
    assert load_entries(tmp_path, again.setup) == quiet


def test_old_entries_and_those_of_the_future_are_not_used(tmp_path):
    now = time.time()
    entries = {
        "old": Entry(now - 31 * 86400, 1.0),
        "new": Entry(now, 2.0),
        "future": Entry(now + 1e6, 3.0),
    }
    save_entries(tmp_path, SETUP, entries)
    assert load_entries(tmp_path, SETUP) == {"new": entries["new"]}
    (file,) = tmp_path.glob("*.json")
    os.utime(file, (0, 0))
    save_entries(tmp_path, {**SETUP, "world_size": 3}, {})
    assert not file.exists() and len(list(tmp_path.glob("*.json"))) == 1


def test_a_full_disk_costs_a_warning_and_leaves_the_old_file(tmp_path, monkeypatch):
    entries = {"kernel a": Entry(time.time(), 1.0)}
    save_entries(tmp_path, SETUP, entries)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measurements.json, "dump", full)
    with pytest.warns(UserWarning, match="No space left"):
        save_entries(tmp_path, SETUP, {"kernel b": Entry(time.time(), 1.0)})
    assert load_entries(tmp_path, SETUP) == entries and len(list(tmp_path.iterdir())) == 1
