"""Memory taken anew: what is counted against the page faults of a reduce-scatter, and what a fault
costs.
"""

from __future__ import annotations

import json
import mmap
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication.collectives import reduce_scatter_into
from lightning_topt.costs.sizes import gloo_workspace, reduced_bytes
from lightning_topt.costs.timers import measure_page_faults
from lightning_topt.execution.memory import return_freed_memory
from tests.preloaded import preloaded_python

SIZES = (1 << 22, 1 << 24, 3 << 23)  # one piece, two, three


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def taken_on_rank(rank: int) -> list[int] | None:
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if (huge.exists() and "[always]" in huge.read_text()) or not return_freed_memory(
        torch.device("cpu")
    ):
        return None
    counts = []
    for size in SIZES:
        whole, local = torch.ones(size // 4), torch.ones(size // 8)
        found = []
        for _ in range(5):
            dist.barrier()
            before = faults()
            reduce_scatter_into(local, whole)
            found.append(faults() - before)
        counts.append(sorted(found)[2])
    return counts


def test_a_reduce_scatter_takes_what_is_counted():
    """Given the flat buffer and the shards it takes gloo's pieces, for every piece of the
    tensor.
    """
    # In a process of its own: free memory that ranks inherit from a long run of tests would serve
    # gloo's pieces.
    imports = (
        f"import json; from tests.launch import run_ranks; from {__name__} import taken_on_rank"
    )
    code = f"{imports}; print(json.dumps(run_ranks(taken_on_rank, 2)[0]))"
    result = subprocess.run(
        [preloaded_python(), "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    counts = json.loads(result.stdout.splitlines()[-1])
    if counts is None:
        pytest.skip("the C library keeps freed memory, or a fault takes 2 MiB")
    for size, count in zip(SIZES, counts, strict=True):
        expected = (
            reduced_bytes(flat=size, shards=size / 2, workspace=gloo_workspace(size, world_size=2))
            - 1.5 * size
        )
        assert count * mmap.PAGESIZE == pytest.approx(expected, rel=0.1)


def test_small_buffers_stay_on_the_heap():
    assert reduced_bytes(flat=1000, shards=500, workspace=gloo_workspace(1000, world_size=2)) == 0
    # other backends have no pieces
    assert reduced_bytes(flat=1 << 20, shards=1 << 19, workspace=0) == 1.5 * (1 << 20)


def test_page_faults_cost_time_on_cpus_only():
    assert 0 <= measure_page_faults(torch.device("cpu")) < 1e-5  # seconds per byte
    assert measure_page_faults(torch.device("cuda", 0)) == 0.0
