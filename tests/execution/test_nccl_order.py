"""Short trainings of every kind where works wait for one another as over NCCL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from benchmarks.equality import Comparison, cell, compare
from benchmarks.pipelines import equality as pipelines
from benchmarks.tensor import equality as tensors
from lightning_topt.communication import BF16, TopK
from lightning_topt.communication import hook as exchange_hook
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from tests.communication import exchange_ranks
from tests.communication import test_local_steps as local
from tests.execution import test_mixed_plans as mixed
from tests.execution.pipeline import test_continuous_run as continuous
from tests.execution.pipeline.continuous_training import Case, Outcome, continuous_plan, train_all
from tests.execution.pipeline.stage_models import loss_of, make, plan_of, tokens
from tests.launch import run_ranks
from tests.nccl_twin import TWIN, is_under_way, share_device, wait_for_device

pytestmark = pytest.mark.usefixtures("one_thread")
SECONDS = 180  # of a wait; what hangs is an error then

# model and plan
PIPELINES = {
    "U-Net": "zbv 4",
    "GPT, dropout": "interleaved_zero_bubble 4",
    "ResNet": "1f1b 2 x data 2",
}
TENSORS = {"ViT": "ZeRO-2 x tensor 2 + accumulation + clipping", "conv": "tensor 4"}


def test_works_of_a_group_run_in_order_and_sends_wait_for_receives() -> None:
    found = run_ranks(in_order, 2, backend=TWIN, timeout_seconds=SECONDS)
    for is_early, received, error in found:
        assert not is_early and received == 7.0
        assert error
    assert any("imed out" in error for _, _, error in found)


def in_order(rank: int) -> tuple[bool, float, str]:
    """A send that is received late, and two that stand behind receives of one another."""
    other, tensor = 1 - rank, torch.full((1,), 7.0 * (1 - rank))
    is_early, error = False, ""
    if rank == 0:
        work = dist.isend(tensor, other)
        time.sleep(0.2)
        is_early = work.is_completed()
        work.wait()
    else:
        time.sleep(0.4)
        dist.recv(tensor, other)
    dist.barrier()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    works = [dist.irecv(torch.empty(1), other, group), dist.isend(tensor, other, group)]
    try:
        works[-1].wait()
    except RuntimeError as raised:
        error = str(raised)
    return is_early, float(tensor), error


def on_four_ranks(rank: int) -> tuple[Any, ...]:
    return (
        compared(rank, pipelines.COMPARISON, {p.name: p for p in pipelines.PLANS}, PIPELINES),
        compared(rank, tensors.COMPARISON, {p.name: p for p in tensors.PLANS}, TENSORS),
        train_all(rank, list(continuous.ORDERED.values())),
        mixed.train(rank, "one axis", "fused AdamW"),
    )


def compared(
    rank: int, comparison: Comparison[Any, Any], plans: dict[str, Any], names: dict[str, str]
) -> list[tuple[str, str, Any]]:
    cases = [(plans[plan], model) for model, plan in names.items()]
    return list(compare(rank, comparison=comparison, cases=cases))


@pytest.fixture(scope="module")
def four() -> list[tuple[Any, ...]]:
    return run_ranks(on_four_ranks, 4, timeout_seconds=SECONDS, backend=TWIN)


@pytest.mark.parametrize("kind", [0, 1])
def test_pipelines_and_tensor_groups_are_one_process(
    kind: int, four: list[tuple[Any, ...]]
) -> None:
    found = four[0][kind]
    assert len(found) == len((PIPELINES, TENSORS)[kind])
    for name, model, value in found:
        text = cell(value)
        assert text[0].isdigit() and "**" not in text, (name, model, value)


def test_asynchronous_pipelines_are_one_process(four: list[tuple[Any, ...]]) -> None:
    for index, case in enumerate(continuous.ORDERED.values()):
        continuous.assert_as_one_process(case, [found[2][index] for found in four])


def test_sharded_plans_are_one_process(four: list[tuple[Any, ...]]) -> None:
    expected, parameters, _ = mixed.one_process("fused AdamW")
    for *_, (record, _, released, _) in four:
        losses = [loss for loss, _, _ in record]
        assert losses == pytest.approx([loss for loss, _, _ in expected], rel=1e-5)
        mixed.assert_close(released, dict(parameters))


class Synced(torch.autograd.Function):
    """A mean over all ranks, also of its gradient, as SyncBatchNorm takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    backward = staticmethod(lambda _, gradient: Synced.forward(_, gradient))


class SyncedNet(nn.Sequential):
    """Collectives in the backward pass, between the buckets of an exchange."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = Synced.apply(layer(x))
        return x


def compresses(rank: int, is_cuda: bool, beside: bool) -> list[Tensor]:
    """Trained parameters by method; ranks find their entries after other times."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if is_cuda:
            patch.setattr(exchange_hook, "Streams", exchange_ranks.FakeStreams)
        if beside:
            share_device()
        for method in (BF16(), TopK(density=0.1), TopK(density=0.1, hierarchical=True)):
            model = SyncedNet(*exchange_ranks.make_model()) if beside else None
            settings = {"timeout_seconds": 20}
            topology = Topology(2, 1, rank) if beside else None
            ddp, exchange = exchange_ranks.wrap(
                method, model=model, topology=topology, settings=settings
            )
            if beside and rank:
                stages = exchange.exchange.stages

                def late(bucket: Any, stages: Any = stages) -> Any:
                    time.sleep(0.01)
                    return (yield from stages(bucket))

                exchange.exchange.stages = late  # type: ignore[method-assign]
            for _ in exchange_ranks.train(ddp, rank=rank, steps=range(4)):
                pass
            exchange_ranks.assert_equal_on_all_ranks(ddp)
            found += [parameter.detach() for parameter in ddp.parameters()]
            exchange.close()
    return found


def test_compression_in_a_thread_and_in_the_order_of_a_stream() -> None:
    in_thread, on_stream = (
        run_ranks(compresses, 2, is_cuda, False, timeout_seconds=SECONDS, backend=TWIN)[0]
        for is_cuda in (False, True)
    )
    assert all(map(torch.equal, in_thread, on_stream))


def test_compression_beside_collectives_of_the_backward_pass() -> None:
    """Issued by one thread, all groups of a device have one order on all ranks."""
    ranks = run_ranks(compresses, 2, True, True, timeout_seconds=SECONDS, backend=TWIN)
    assert all(map(torch.equal, *ranks))


def test_local_steps_are_one_process() -> None:
    method = local.LocalSteps(every=2)
    ranks = run_ranks(local.trained, local.RANKS, method, timeout_seconds=SECONDS, backend=TWIN)
    expected = torch.from_numpy(local.in_one_process(method)[0]).float()
    for parameters, *_ in ranks:
        torch.testing.assert_close(parameters, expected, rtol=0.0, atol=2e-6)


# ---- stages that wait for their devices, and fail ------------------------------------------------

WAITING = {
    "late, tied, other shapes": Case(
        "chain tied", continuous_plan(3, schedule="continuous_overlapped"), sizes=(8, 5, 5, 5, 8)
    ),
    "late, skips": Case("skips", continuous_plan(3, schedule="continuous_overlapped")),
    "skips": Case("skips", continuous_plan(3)),
}


# stages that are no neighbours exchange gradients, and drains leave iterations of the warm-up out
DRAINED = [
    Case("skips", continuous_plan(4, schedule="continuous_overlapped"), drain_every=every)
    for every in (4, 5)
]


class Found(NamedTuple):
    losses: list[float]
    evaluated: float
    trained: list[Outcome]
    groups: tuple[int, ...]  # at first, and when plans are released
    had_begun: bool
    seconds: float  # that a rank then waits which has failed


def device_waits() -> list[RemovableHandle]:
    """Wait for the device in forward passes, before updates and between iterations."""
    return [
        register_module_forward_hook(lambda *_: wait_for_device()),
        register_optimizer_step_pre_hook(lambda *_: wait_for_device()),
        register_optimizer_step_post_hook(lambda *_: wait_for_device()),
    ]


def drained(rank: int, cases: Sequence[Case], *, waits: bool) -> list[Outcome]:
    if waits:
        device_waits()
    return train_all(rank, cases)


def test_drains_in_the_warm_up_keep_the_order_of_gradients() -> None:
    """What is received is that of gloo, to the last bit: the order is another, the sums are not."""
    waiting, at_once = partial(drained, waits=True), partial(drained, waits=False)
    found = run_ranks(waiting, 4, DRAINED, timeout_seconds=SECONDS, backend=TWIN)[0]
    expected = run_ranks(at_once, 4, DRAINED, timeout_seconds=SECONDS)[0]
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        torch.testing.assert_close(one.state, other.state, rtol=0, atol=0)


def on_three_ranks(rank: int) -> Found:
    """Ranks wait for their devices in forward passes, before updates and between iterations."""
    hooks = device_waits()
    groups, data = [len(_world.pg_map)], tokens(8, 8)
    # With flush, dtypes that NCCL does not know, and messages that no step of training had.
    model = make("shortcut")
    engine = Engine(plan_of(3, "1f1b", microbatches=4), model, device=torch.device("cpu"))
    engine.apply(example=Example(loss_of, data[0][:2]))
    losses = [float(engine.run_step(batch.chunk(4), loss_of).mean()) for batch in data[:2]]
    model.eval()
    evaluated = float(engine.evaluate(data[0], loss_of))
    engine.release()
    engine.close()
    groups.append(len(_world.pg_map))
    trained = train_all(rank, list(WAITING.values()))
    groups.append(len(_world.pg_map))
    # Stages meet between iterations.
    model.train()
    for schedule in CONTINUOUS_SCHEDULES:
        engine = Engine(plan_of(3, schedule, microbatches=1), model, device=torch.device("cpu"))
        engine.apply(example=Example(loss_of, data[0]))
        engine.attach_optimizers([optimizer := torch.optim.SGD(model.parameters(), lr=0.01)])
        run = engine.continuous
        for batch in data:
            dist.barrier()
            if (result := run.advance(batch, loss_of, meets=True)).completes:
                with run.update(result):
                    optimizer.step()
            wait_for_device()
        for _ in run.drain():
            wait_for_device()
        engine.release()
        engine.close()
    groups.append(len(_world.pg_map))
    for hook in hooks:
        hook.remove()
    # User code fails between two iterations.
    engine = Engine(plan_of(3, "continuous", microbatches=1), model, device=torch.device("cpu"))
    engine.apply(example=Example(loss_of, data[0]))
    for batch in data[:5]:
        engine.continuous.advance(batch, loss_of)
    dist.barrier()
    had_begun = is_under_way()
    start = time.monotonic()
    engine.abort()
    wait_for_device()
    return Found(losses, evaluated, trained, tuple(groups), had_begun, time.monotonic() - start)


def test_stages_may_wait_for_their_devices_and_fail() -> None:
    ranks = run_ranks(on_three_ranks, 3, timeout_seconds=SECONDS, backend=TWIN)
    model, data = make("shortcut"), tokens(8, 8)
    losses = [float(loss_of(model, batch)) for batch in data[:2]]
    evaluated = float(loss_of(model.eval(), data[0]))
    for found in ranks:
        assert found.losses == pytest.approx(losses, rel=1e-5)
        assert found.evaluated == pytest.approx(evaluated, rel=1e-5)
        assert [len(each.losses) for each in found.trained] == [12] * len(WAITING)
        assert len(set(found.groups)) == 1, "groups that are left after a plan"
        assert found.seconds < 2
    assert any(found.had_begun for found in ranks)
