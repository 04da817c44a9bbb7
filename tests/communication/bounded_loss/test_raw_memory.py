"""Kernels kept on disk are those of today's files."""

from __future__ import annotations

import os

from lightning_topt.communication.bounded_loss.raw_memory import forget_outdated_kernels


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
