"""Passes of stages: autocast, no gradients, metrics, logs, hooks, checkpoints; their errors."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_topt.execution.pipeline import stage_pass as stage_pass_module
from lightning_topt.execution.pipeline.stage_pass import RandomOrder, StagePass
from lightning_topt.graph.capture import call_training_step
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import assign_calls
from tests.execution.pipeline.stages_in_turn import assert_same, run_plain, run_stages
from tests.execution.pipeline.test_stage_pass import microbatches
from tests.models import GPT, batch_for

GPT_STAGES = [["blocks.0"], ["blocks.1"], ["norm", "head"]]


class Chain(nn.Module):
    """Three linear layers; `flag` changes what steps do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.flag = True


def stage_pass(module: nn.Module, step: Any, batch: Any, stages: Any) -> StagePass:
    flow = trace_flow(module, step, batch, units=[block for stage in stages for block in stage])
    return StagePass(
        module,
        flow,
        assign_calls(flow, stages),
        units=[block for stage in stages for block in stage],
    )


@pytest.mark.parametrize("least", [0, 1 << 24])
def test_autocast(least, monkeypatch):
    monkeypatch.setattr(stage_pass_module, "LEAST_SHARED_BYTES", least)
    module = GPT(dropout=0.1)
    batches = microbatches(module, 2)
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    plain = run_plain(module, batches, context=context)
    got = run_stages(module, batches, GPT_STAGES, context=context)
    assert_same(got, plain)
    assert got.flow.calls[2].leaves[0].dtype == torch.float32  # residuals stay wide
    assert got.flow.calls[-1].leaves[0].dtype == torch.bfloat16


def saved_matrices(passes: StagePass, microbatch: int) -> set[int]:
    """Where the 16-bit matrices lie that the open passes of a microbatch keep for backward."""
    found: set[int] = set()
    for (_, index), state in passes._passes.items():
        nodes, seen = [edge.node for edge in state.edges.values() if index == microbatch], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            for name in ("_saved_weight", "_saved_mat2"):
                saved = getattr(node, name, None)
                if saved is not None and saved.dtype == torch.bfloat16 and saved.ndim == 2:
                    found.add(saved.data_ptr())
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_microbatches_in_flight_keep_one_cast_of_each_weight(shares, monkeypatch):
    monkeypatch.setattr(stage_pass_module, "LEAST_SHARED_BYTES", 0)
    module = Chain()
    batches = [(torch.randn(3, 4),) for _ in range(3)]

    def step(module: Any, batch: Any) -> Any:
        return module.c(module.b(module.a(batch[0]))).float().square().mean()

    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    flow = trace_flow(module, step, batches[0], units=["a", "b", "c"], forward_context=autocast)
    passes = StagePass(
        module,
        flow,
        assign_calls(flow, [["a", "b"], ["c"]]),
        units=["a", "b", "c"],
        shares_casts=shares,
    )
    for index, batch in enumerate(batches):
        with autocast():
            passes.forward(0, index, partial(step, module, batch), {})
    first, second = (saved_matrices(passes, index) for index in range(2))
    assert first and bool(first & second) is shares
    # once the graphs are gone no copy is left
    casts = passes._casts
    del passes
    gc.collect()
    assert casts is None or all(cast() is None for _, cast in casts._casts.values())


def test_a_weight_that_a_step_changes_is_not_shared(monkeypatch):
    """Each microbatch's backward has the cast of its own forward."""
    monkeypatch.setattr(stage_pass_module, "LEAST_SHARED_BYTES", 0)
    module = Chain()
    batches = [(torch.randn(3, 4),) for _ in range(3)]

    def step(module: Any, batch: Any) -> Any:
        with torch.no_grad():
            module.b.weight.mul_(0.5)
        return module.c(module.b(module.a(batch[0]))).float().square().mean()

    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    plain = run_plain(module, batches, step=step, context=context)
    stages = [["a", "b", "c"]]
    got = run_stages(module, batches, stages, step=step, context=context, poison=False)
    assert_same(got, plain)


def test_uneven_microbatches_draw_in_one_order():
    module = GPT(layers=2, dropout=0.2)
    sizes = [batch_for(module, 3), batch_for(module, 1), batch_for(module, 3)]
    plain = run_plain(module, sizes)
    units = [block for stage in GPT_STAGES for block in stage]
    order, losses = RandomOrder(), []
    flows = [trace_flow(module, call_training_step, batch, units=units) for batch in sizes]
    passes = [
        StagePass(module, flow, assign_calls(flow, GPT_STAGES), units=units, order=order)
        for flow in flows
    ]
    for _ in range(2):  # two steps, and stages in the order of microbatches
        torch.manual_seed(5)
        held: dict[Any, Tensor] = {}
        for stage in range(3):
            for index, batch in enumerate(sizes):
                received = {ref: t for (number, ref), t in held.items() if number == index}
                output = passes[index].forward(
                    stage, index, partial(call_training_step, module, batch), received
                )
                held |= {(index, ref): t for ref, t in output.sent.items()}
                if stage == 2:
                    losses.append(output.result.detach())
        assert torch.equal(torch.get_rng_state(), plain.random_state)
    for got, wanted in zip(losses, plain.losses * 2, strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_has_no_influence_gets_zeros():
    module = Chain()

    def step(module: Any, batch: Tensor) -> Tensor:
        x = module.a(batch)
        return module.b(x.detach()).sum()

    batch = torch.randn(2, 4)
    passes = stage_pass(module, step, batch, [["a"], ["b"]])
    sent = passes.forward(0, 0, lambda: step(module, batch), {}).sent
    loss = passes.forward(1, 0, lambda: step(module, batch), sent).result
    (made,) = passes.backward_input(1, 0, {}, loss=loss).values()
    assert torch.equal(made, torch.zeros(2, 4))
    assert module.b.weight.grad is None
    passes.backward_weight(1, 0)
    assert module.b.weight.grad is not None


def checked(module: Any, batch: Tensor) -> Tensor:
    return module.b(checkpoint(module.a, batch.requires_grad_(), use_reentrant=False)).sum()


def checked_inside(module: Any, batch: Tensor) -> Tensor:
    return module.b(checkpoint(module.c, module.a(batch), use_reentrant=False)).sum()


def checked_both(module: Any, batch: Tensor) -> Tensor:
    return checkpoint(lambda x: module.b(module.a(x).sin()).sin(), batch, use_reentrant=False).sum()


def test_checkpoints_of_single_blocks_run_and_those_of_several_are_refused():
    batches = [torch.randn(2, 4)]
    for split in (False, True):
        module = Chain()
        got = run_stages(module, batches, [["a"], ["b"]], step=checked, split=split)
        assert_same(got, run_plain(module, batches, step=checked))
        module.c = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        module.c.forward = partial(checkpoint, module.c.forward, use_reentrant=False)
        got = run_stages(module, batches, [["a"], ["c"], ["b"]], step=checked_inside, split=split)
        assert_same(got, run_plain(module, batches, step=checked_inside))
    passes = stage_pass(module, checked_both, batches[0], [["a"], ["b"]])
    held = passes.forward(0, 0, lambda: checked_both(module, batches[0]), {}).sent
    loss = passes.forward(1, 0, lambda: checked_both(module, batches[0]), held).result
    with pytest.raises(CaptureError, match="recomputes a part of the step that calls block 'a'"):
        passes.backward(1, 0, {}, loss=loss)


def calls_again(module: Any, batch: Tensor) -> Tensor:
    x = module.b(module.a(batch))
    return module.c(x if module.flag else module.c(x)).sum()


def takes_other(module: Any, batch: Tensor) -> Tensor:
    x = module.a(batch)
    y = module.b(x)
    return module.c(y if module.flag else x + y).sum()


def reads(module: Any, batch: Tensor) -> Tensor:
    x = module.a(batch)
    y = module.b(x)
    if not module.flag and x.sum() > 0:  # here
        y = y + 1
    return module.c(y).sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (calls_again, "calls 'c'.* expected no further block"),
        (takes_other, "block 'c' is given a tensor that this stage did not receive"),
        (reads, r"stage 2 .* in reads: if not module.flag and x.sum\(\) > 0:  # here"),
    ],
)
def test_steps_that_do_not_do_what_their_trace_did(step, message):
    module = Chain()
    batch = torch.randn(2, 4)
    passes = stage_pass(module, step, batch, [["a"], ["b"], ["c"]])
    first = passes.forward(0, 0, lambda: step(module, batch), {})
    second = passes.forward(1, 0, lambda: step(module, batch), first.sent)
    module.flag = False
    with pytest.raises(CaptureError, match="(?s)" + message):
        passes.forward(2, 0, lambda: step(module, batch), second.sent)
    assert all("_compiled_call_impl" not in vars(each) for each in module.modules())
