"""What a continuous run holds, carries back and saves, and what it refuses."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.execution.pipeline.continuous_training import CPU, adam, continuous_plan, sgd
from tests.execution.pipeline.stage_models import loss_of, make, tokens
from tests.launch import run_on_pool

WORLD = 3
BATCHES = tokens(40)


class Job:
    """An engine with a model and an optimizer, run minibatch by minibatch."""

    def __init__(
        self,
        plan: ParallelPlan,
        model: str = "chain",
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
        clip: float | None = None,
    ) -> None:
        self.model, self.clip = make(model), clip
        self.engine = Engine(plan, self.model, device=CPU)
        self.engine.apply(example=Example(loss_of, BATCHES[0]))
        self.optimizer = optimizer(self.model.parameters())
        self.engine.attach_optimizers([self.optimizer])
        self.run = self.engine.continuous
        self.norms: dict[int, float] = {}

    def train(
        self, first: int, last: int, *, step: Any = loss_of, drain: bool = True, **more: Any
    ) -> list[Any]:
        """Run minibatches, and drain; return what each turn knew."""
        turns = [
            self.turn(self.run.advance(BATCHES[i % 40], step, **more)) for i in range(first, last)
        ]
        return turns + [self.turn(turn) for turn in (self.run.drain() if drain else ())]

    def turn(self, turn: Any) -> Any:
        if turn.minibatch is not None and turn.completes:
            norm = None if self.clip is None else float(self.run.clip_norm(turn, self.clip))
            if norm is None or math.isfinite(norm):
                with self.run.update(turn):
                    self.optimizer.step()
            if norm is not None:
                self.norms[turn.minibatch] = norm
            self.optimizer.zero_grad()
        return (
            turn.minibatch,
            {index: loss.item() for index, loss in turn.losses.items()},
            turn.payload,
        )

    def state(self) -> Any:
        state = {"engine": self.engine.state_dict(), "run": self.run.state_dict()}
        return copy.deepcopy(state)

    def close(self) -> None:
        self.engine.release()


class Facts(NamedTuple):
    payloads: list[Any]
    without: list[Any]
    norms: dict[int, float]
    broken: dict[int, float]
    graphs: list[int]
    bytes: list[tuple[int, int]]
    objects: list[int]
    resumed: tuple[dict[str, Tensor], dict[str, Tensor]]


def facts(rank: int) -> Facts:
    return Facts(*_payloads(rank), *_nan(), *_held(), _resumed(rank))


SIZES = [0, 5, 1024, 5000, 1025, 20_000, 3]  # of payloads


def _payloads(rank: int) -> tuple[list[Any], list[Any]]:
    """Bytes of any number travel back with their minibatch; none are told from empty ones."""
    job, count = Job(continuous_plan(WORLD)), iter(range(100))

    def payload() -> tuple[bytes, Tensor]:
        index = next(count)
        elements = torch.full((SIZES[-1 - index],), index, dtype=torch.uint8)
        return bytes([index]) * SIZES[index], elements

    with_payload = job.train(0, 7, payload=payload)
    return with_payload, job.train(7, 12)


def _nan() -> tuple[dict[int, float], dict[int, float]]:
    """The loss of one minibatch is NaN; steps of such gradients are left out."""
    found = []
    for bad in (None, 5):
        job = Job(continuous_plan(WORLD, prediction="stash"), clip=0.2)
        for index in range(12):
            scale = float("nan") if index == bad else 1.0
            job.train(
                index,
                index + 1,
                step=lambda model, batch, s=scale: loss_of(model, batch) * s,
                drain=index == 11,
            )
        found.append(job.norms)
        job.close()
    return found[0], found[1]


def _held() -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Graphs that are there when a forward pass begins, bytes held, objects of the process."""
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
    graphs: list[int] = []

    def pack(tensor: Tensor) -> _Saved:
        alive.add(saved := _Saved(tensor.detach(), len(graphs)))
        return saved

    def step(model: Any, batch: Tensor) -> Tensor:
        graphs.append(len({each.minibatch for each in alive}))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return loss_of(model, batch)

    job = Job(continuous_plan(WORLD, prediction="stash"))
    job.train(0, 3, step=step)  # the trace of the step too
    gc.collect()
    assert not alive
    del graphs[:]
    job.train(0, 8, step=step)
    job.train(0, 8, drain=False)
    held, objects = [], []
    for _ in range(3):
        job.train(0, 8, drain=False)
        held.append(job.run.held_bytes)
        gc.collect()
        objects.append(len(gc.get_objects()))
    job.train(0, 1)
    held.append(job.run.held_bytes)
    return graphs, held, objects


class _Saved:
    def __init__(self, tensor: Tensor, minibatch: int) -> None:
        self.tensor, self.minibatch = tensor, minibatch


def _resumed(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole state of a run, and that of one which goes on from its drained middle."""
    plan = continuous_plan(WORLD, prediction="spectrain")
    first = Job(plan, "chain tied", optimizer=sgd, clip=0.2)
    first.train(0, 9)
    saved: list[Any] = [first.state()]
    torch.distributed.broadcast_object_list(saved, src=0)
    first.train(9, 20)
    undisturbed = {name: value.clone() for name, value in first.engine.module_state().items()}
    first.close()
    second = Job(plan, "chain tied", optimizer=sgd, clip=0.2)
    second.engine.load(saved[0]["engine"])
    second.run.load_state_dict(saved[0]["run"])
    second.train(9, 20)
    resumed = {name: value.clone() for name, value in second.engine.module_state().items()}
    second.close()
    return undisturbed, resumed


@pytest.fixture(scope="module")
def ranks() -> list[Facts]:
    return run_on_pool(facts, WORLD, timeout_seconds=240)


def test_payloads_come_with_their_minibatch(ranks: list[Facts]) -> None:
    for found in ranks:
        there = [
            (minibatch, payload[0], payload[1].numpy().tobytes())
            for minibatch, _, payload in found.payloads
            if minibatch is not None
        ]
        pairs = zip(SIZES, SIZES[::-1], strict=True)
        assert there == [
            (index, bytes([index]) * head, bytes([index]) * elements)
            for index, (head, elements) in enumerate(pairs)
        ]
        assert [payload for _, _, payload in found.without] == [None] * len(found.without)
        losses = [each for _, losses, _ in (*found.payloads, *found.without) for each in losses]
        assert losses == list(range(12))
    assert [minibatch for minibatch, _, _ in ranks[0].payloads] == [None, None, *range(7)]


def test_a_minibatch_without_a_finite_loss_changes_no_later_norm_to_one(ranks: list[Facts]) -> None:
    for found in ranks:
        assert math.isnan(found.broken[5])
        others = {index: norm for index, norm in found.broken.items() if index != 5}
        assert all(math.isfinite(norm) for norm in others.values()) and len(others) == 11
        assert {i: n for i, n in others.items() if i < 3} == {
            i: n for i, n in found.norms.items() if i < 3
        }


def test_what_is_held_does_not_grow(ranks: list[Facts]) -> None:
    for stage, found in enumerate(ranks):
        lag = WORLD - 1 - stage
        assert found.graphs == [min(index, lag) for index in range(8)]
        *steady, drained = found.bytes
        assert len(set(steady)) == 1
        assert max(found.objects[1:]) <= found.objects[0] + 20
        assert drained[0] == 0 and (steady[0][0] > 0) == (lag > 0)


def test_a_run_goes_on_from_a_drained_state_as_if_undisturbed(ranks: list[Facts]) -> None:
    undisturbed, resumed = ranks[0].resumed
    assert undisturbed.keys() == resumed.keys() and undisturbed
    for name, value in undisturbed.items():
        assert torch.equal(value, resumed[name]), name
