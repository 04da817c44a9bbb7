"""A stage that fails ends the step on every rank, and every other rank says which it was."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication.rank_watch import PeerLostError, is_of_collective, watch_ranks
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from tests.execution.pipeline.stage_models import loss_of, make, plan_of, tokens
from tests.launch import free_port

WORLD, LIMIT = 3, 3.0


class Failing(nn.Module):
    """Does `what` in its third pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.passes = what, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and x.device.type == "cpu" and self.training:
            self.passes += 1
        if self.passes == 3 and self.what == "raises":
            raise ValueError("a label is out of range")
        if self.passes == 3 and self.what:
            os.kill(os.getpid(), getattr(signal, self.what))
        return x


def run(rank: int, schedule: str, what: str, where: str, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=limit)
    model = make("plain")
    model.get_submodule(where).add_module("failing", Failing(""))
    watch = watch_ranks()
    microbatches = 1 if schedule == "continuous" else 4
    engine = Engine(
        plan_of(WORLD, schedule, microbatches=microbatches), model, device=torch.device("cpu")
    )
    engine.apply(example=Example(loss_of, tokens(1)[0][:2]))
    assert watch is not None
    model.get_submodule(f"{where}.failing").what = what

    def step() -> None:
        if schedule == "continuous":
            for _ in range(20):  # the ranks go on until they need something of the one that fails
                engine.continuous.advance(tokens(1)[0], loss_of)
        else:
            engine.run_step(tokens(1)[0].split(2), loss_of)

    try:
        step()
    except Exception as error:
        first = str(error)
        if is_of_collective(error):
            queue.put((rank, type(error), first, str(watch.diagnose(error))))
            time.sleep(20)  # the test ends it
        watch.tell(error)
        with pytest.raises(RuntimeError, match="out of step"):
            step()
        queue.put((rank, type(error), first, ""))


RAISES = ("raises", "blocks.3", 1, "rank 1 ended with ValueError: a label is out of range")


@pytest.mark.parametrize(
    ("schedule", "what", "where", "lost", "says"),
    [
        ("1f1b", *RAISES),
        ("continuous", *RAISES),
        ("continuous", "SIGKILL", "blocks.3", 1, "rank 1 did not answer .*has ended"),
        ("1f1b", "SIGSTOP", "blocks.5", 2, "rank 2 did not answer .*is stopped"),
    ],
)
def test_the_rank_that_fails_is_named_by_all_others(
    schedule: str, what: str, where: str, lost: int, says: str
) -> None:
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=run, args=(rank, schedule, what, where, port, queue))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        expected = range(WORLD) if what == "raises" else sorted({0, 1, 2} - {lost})
        found = {}
        for _ in expected:
            assert queue._reader.poll(10 * LIMIT), "a rank still waits"  # type: ignore[attr-defined]
            rank, *rest = queue.get()
            found[rank] = rest
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert sorted(found) == list(expected)
    for rank, (kind, first, diagnosed) in found.items():
        if rank == lost:
            assert kind is ValueError and first == "a label is out of range"
            continue
        assert kind is PeerLostError and f"rank {rank} " in first
        assert "microbatch" in first or "minibatch" in first or "losses" in first
        assert re.match(says, diagnosed), diagnosed
    named = f"rank {lost} (stage {lost})" if schedule == "continuous" else f"rank {lost}"
    assert any(named in first for rank, (_, first, _) in found.items() if rank != lost)
