"""Memory taken anew: what of it is counted, and what a page fault costs."""

from __future__ import annotations

import torch

from lightning_topt.costs.sizes import gloo_workspace, reduced_bytes
from lightning_topt.costs.timers import measure_page_faults


def test_small_buffers_stay_on_the_heap():
    assert reduced_bytes(flat=1000, shards=500, workspace=gloo_workspace(1000, world_size=2)) == 0
    # other backends have no pieces
    assert reduced_bytes(flat=1 << 20, shards=1 << 19, workspace=0) == 1.5 * (1 << 20)


def test_page_faults_cost_time_on_cpus_only():
    assert 0 <= measure_page_faults(torch.device("cpu")) < 1e-5  # seconds per byte
    assert measure_page_faults(torch.device("cuda", 0)) == 0.0
