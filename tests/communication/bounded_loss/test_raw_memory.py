"""Records that Python and compiled code share; kernels kept on disk are those of today's files."""

from __future__ import annotations

import os

import numba
import numpy as np
import pytest

from lightning_topt.communication.bounded_loss.raw_memory import (
    forget_outdated_kernels,
    layout_of,
    record_at,
)
from lightning_topt.communication.bounded_loss.tables import make_tables, with_more_slots


class Row:
    count: int
    share: float


ROW = layout_of(Row)
row_at = record_at(ROW)


@numba.njit
def write(address, count):
    row = row_at(address)
    row.count += count
    row.share = row.count / 2


def test_both_sides_see_the_same_fields():
    rows = np.zeros(3, ROW)
    rows[1].count = 4
    write(rows.ctypes.data + ROW.itemsize, 3)
    assert rows.tolist() == [(0, 0.0), (7, 3.5), (0, 0.0)]
    assert rows[1].share == rows["share"][1] == 3.5


def test_fields_that_numpy_would_hide_are_refused():
    with pytest.raises(AssertionError, match="sum"):
        layout_of(type("Hidden", (), {"__annotations__": {"sum": "int"}}))


def test_more_slots_keep_the_old_ones_under_the_same_root():
    t = make_tables(world_size=2, slots=2, segments=3)
    t.slots[1].step, t.flows[1, 0, 3].count, t.scales[1] = 5, 7, 0.5
    grown = with_more_slots(t, 6)
    assert len(grown.slots) == 6 and grown.root is t.root
    assert (grown.slots[1].step, grown.flows[1, 0, 3].count, grown.scales[1]) == (5, 7, 0.5)
    assert t.root.slots == grown.slots.ctypes.data != t.slots.ctypes.data
    assert t.root.config == np.asarray(grown.config).ctypes.data


def test_kernels_go_when_any_file_changes(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for path in (first, second):
        path.write_text("x = 1\n")
    forget_outdated_kernels(tmp_path)
    kept = [
        tmp_path / "__pycache__" / name for name in ("first.f-1.py311.nbi", "first.f-1.py311.1.nbc")
    ]
    for path in kept:
        path.write_bytes(b"kernel")
    forget_outdated_kernels(tmp_path)
    assert all(path.exists() for path in kept)
    os.utime(second, ns=(1, 1))  # another file than the kernels'
    forget_outdated_kernels(tmp_path)
    assert not any(path.exists() for path in kept)
    kept[0].write_bytes(b"kernel")
    forget_outdated_kernels(tmp_path)
    assert kept[0].exists()
