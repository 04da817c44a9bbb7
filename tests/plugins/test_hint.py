"""The hint against clocks that the phases of a step move on: every share is exact."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_topt.plugins import shared_updates
from lightning_topt.plugins.shared_updates import HINT_BATCHES, Hint, PhaseClock, better_hint
from tests.clock import Clock


@pytest.mark.parametrize(
    ("device", "phases", "memory", "cause", "share"),
    [
        # of a step: waits for data, for gradients, computing, update
        ("cpu", (5, 2, 2, 1), 0.5, "data", 0.5),
        ("cpu", (1, 4, 3, 2), 0.5, "exchange", 0.4),
        ("cpu", (1, 2, 4, 3), 0.5, "update", 0.3),
        ("cpu", (1, 1, 18, 1), 0.5, None, None),
        ("cuda", (2, 3, 2, 3), 0.5, "data", 0.2),  # other phases run after their calls returned
        ("cuda", (1, 4, 6, 4), 0.5, None, None),
        ("cuda", (5, 2, 2, 1), 0.95, "memory", 0.95),
    ],
)
def test_the_largest_share_is_named(monkeypatch, device, phases, memory, cause, share):
    wall, core, loaders = Clock(), Clock(), Clock()
    monkeypatch.setattr(shared_updates, "perf_counter", wall.perf_counter)
    monkeypatch.setattr(shared_updates, "thread_time", core.perf_counter)
    monkeypatch.setattr(shared_updates, "device_memory_bytes", lambda _, ranks: 400 // ranks)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=100 * memory))
    monkeypatch.setattr(shared_updates.psutil, "Process", lambda: process)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 100 * memory)
    for_data, for_gradients, computing, update = phases
    clock = PhaseClock(torch.device(device), lambda: loaders.now, how_updated="shared", ranks=4)

    def closure() -> None:
        with clock.backward():
            wall.now += for_gradients + computing
            core.now += computing

    for batch in range(HINT_BATCHES + 1):
        assert not clock.is_over
        clock.begin_batch()
        with clock.update(closure) as timed:
            timed()
            wall.now += update
        wall.now += for_data + (1000 if batch == 3 else 0)  # something else ran: left out
        loaders.now += for_data
    assert clock.is_over
    hint = clock.hint()
    if cause is None:
        assert hint is None
    else:
        assert (hint.cause, hint.share) == (cause, pytest.approx(share))


def test_what_compiled_blocks_saved_is_named_where_that_is_more() -> None:
    """By the share that an earlier fit has kept."""
    data = Hint("data", 0.2, "20% of a step")
    assert better_hint(data, 0.9) == data and better_hint(None, 0.99) is None
    assert better_hint(None, None) is None
    for hint in data, None:
        found = better_hint(hint, 0.7)
        assert found is not None and found.cause == "computation" and "0.70" in found.text
