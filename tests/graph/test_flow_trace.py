"""Flows of steps: what calls need, what binds them to one stage, what cannot be traced."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.graph.capture import call_training_step
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import StepFlow, TensorRef, assign_calls
from tests.models import GPT, ConvNet, batch_for

UNITS = ("a", "b", "c")


class Net(L.LightningModule):
    """Three linear layers; what is in between is added by those that inherit it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.c(self.b(self.a(batch))).square().mean()


def trace(step: Any, *, change: Any = None, units: Any = UNITS, batch: Any = None) -> StepFlow:
    """The flow of ``step(net, batch)``."""
    net = Net()
    if change is not None:
        change(net)
    return trace_flow(net, step, torch.randn(2, 4) if batch is None else batch, units=units)


def by_name(flow: StepFlow) -> dict[str, set[str]]:
    """What each call needs, by the names of modules, each called once."""
    return {call.module: {flow.calls[ref.call].module for ref in call.needs} for call in flow.calls}


def test_a_chain_needs_what_is_before():
    module = GPT(layers=2, tied=True)
    flow = trace_flow(
        module, call_training_step, batch_for(module, 2), units=["blocks.0", "blocks.1"]
    )
    assert by_name(flow) == {
        **{"tokens": set(), "positions": set(), "blocks.0": {"tokens", "positions"}},
        **{"blocks.1": {"blocks.0"}, "norm": {"blocks.1"}, "head": {"norm"}},
    }
    assert flow.end_needs == {TensorRef(5, 0)}
    stages = assign_calls(flow, [["blocks.0"], ["blocks.1"]])
    assert stages == (0, 0, 0, 1, 1, 1)
    first, second = StageLayout.of_flow(flow, stages, module, rank_of_stage=(0, 1)).parameters
    assert first & second == {"tokens.weight"}  # tied to the head
    assert first | second == {name for name, _ in module.named_parameters()}
    assert flow.crossings(stages) == {TensorRef(2, 0): (1,)}


def test_values_that_are_logged_returned_or_kept_are_needed_at_the_end():
    def step(net: Any, batch: Tensor) -> Any:
        a = net.a(batch)
        net.log("a", a.mean())
        b = net.b(a)
        net.kept = [b * net.scale]
        return {"loss": net.c(b).mean(), "unused": 1}

    flow = trace(step)
    assert flow.end_needs == {TensorRef(0, 0), TensorRef(1, 0), TensorRef(2, 0)}
    assert flow.end_reads == {"scale"}


def test_parameters_that_operators_read_belong_to_the_stages_of_their_readers():
    def step(net: Any, batch: Tensor) -> Any:
        return net.c(net.b(net.a(batch) * net.scale) @ net.a.weight).mean()

    flow = trace(step)
    assert [call.reads for call in flow.calls] == [frozenset(), {"scale"}, {"a.weight"}]
    stages = assign_calls(flow, [["a"], ["b"], ["c"]])
    needed = StageLayout.of_flow(flow, stages, Net(), rank_of_stage=(0, 1, 2)).parameters
    assert [
        sorted(name for name in names if "." not in name or name.startswith("a"))
        for names in needed
    ] == [["a.bias", "a.weight"], ["scale"], ["a.weight"]]


def test_attributes_of_operators_are_needed_where_units_read_them():
    def step(net: Any, batch: Tensor) -> Any:
        net.c.mask = net.a(batch).sigmoid()  # read inside of c, not an argument
        return net.c(net.b(batch)).mean()

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mask

    flow = trace(step, change=lambda net: setattr(net, "c", Masked(4, 4)))
    assert by_name(flow)["c"] == {"a", "b"}


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept.tanh()


class WritesToInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def reads_kept(net: Any, batch: Tensor) -> Any:
    return net.c(net.b(net.a(batch)) + net.a.kept).mean()


def reads_by_hook(net: Any, batch: Tensor) -> Any:
    found: list[Tensor] = []
    handle = net.a.register_forward_hook(lambda module, args, output: found.append(output))
    x = net.b(net.a(batch))
    handle.remove()
    return net.c(x + found[0]).mean()


def reads_old(net: Any, batch: Tensor) -> Any:
    x = net.a(batch)
    return net.c(net.b(x) + x).mean()


@pytest.mark.parametrize(
    ("step", "change", "pair"),
    [
        (reads_kept, lambda net: setattr(net, "a", Keeps(4, 4)), ("a", "c")),
        (reads_by_hook, None, ("a", "c")),
        (reads_old, lambda net: setattr(net, "b", WritesToInput(4, 4)), ("b", "c")),
    ],
)
def test_what_passes_beside_results_binds_calls_to_one_stage(step, change, pair):
    flow = trace(step, change=change)
    first, second = pair
    together = [["a", "b", "c"]] if first == "a" else [["a"], ["b", "c"]]
    assert max(assign_calls(flow, together)) == len(together) - 1
    with pytest.raises(
        CaptureError, match=rf"no cut may lie between block '{first}' .* by block '{second}'"
    ):
        assign_calls(flow, [["a", "b"], ["c"]])


def test_batch_norm_on_two_stages_is_refused():
    def step(net: Any, batch: Tensor) -> Any:
        return net.norm(net.b(net.norm(net.a(batch)))).mean()

    def change(net: Any) -> None:
        net.norm = nn.BatchNorm1d(4)

    flow = trace(step, change=change, units=["a", "b"])
    assert flow.calls[1].writes == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    with pytest.raises(CaptureError, match="no cut may lie between block 'norm'"):
        assign_calls(flow, [["a"], ["b"]])


def test_values_read_in_between_name_the_line():
    def step(net: Any, batch: Tensor) -> Any:
        x = net.a(batch)
        if x.sum() > 0:  # this line
            x = x + 1
        return net.c(net.b(x)).mean()

    with pytest.raises(
        CaptureError, match=r"test_flow_trace.py:\d+, in step: if x.sum\(\) > 0:  # this line"
    ):
        trace(step)


def test_values_read_inside_of_a_block_name_the_line():
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x > 0][:4].view(1, 4)) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"in forward: (.|\n)*inside of block 'b'"):
        trace(call_training_step, change=lambda net: setattr(net, "b", Branch(4, 4)))


def test_values_read_at_the_end_are_needed():
    def step(net: Any, batch: Tensor) -> Any:
        a = net.a(batch)
        loss = net.c(net.b(a)).mean()
        net.history = [
            a.max().item(),
            f"{loss:.3f}",
            float(loss),
            loss.tolist(),
            loss.detach().numpy(),
        ]
        return loss if not torch.isnan(loss) else None

    flow = trace(step)
    assert flow.end_needs == {TensorRef(0, 0), TensorRef(2, 0)}
    assert not flow.reads_values


def test_values_of_the_batch_are_read():
    def step(net: Any, batch: Any) -> Any:
        x, lengths = batch
        x = net.a(x[: lengths.max()])
        return net.c(net.b(x) if lengths[0] == 1 else x).mean()

    flow = trace(step, batch=(torch.randn(5, 4), torch.tensor([1, 3])))
    assert [call.module for call in flow.calls] == ["a", "b", "c"]
    assert flow.calls[0].leaves[0].shape == (3, 4)
    assert flow.reads_values
    assert len(trace(step, batch=(torch.randn(5, 4), torch.tensor([2, 3]))).calls) == 2


def random_branch(net: Any, batch: Tensor) -> Any:
    x = net.a(batch)
    return net.c(net.b(x) if torch.rand(()) > -1 else x).mean()


def own_generator(net: Any, batch: Tensor) -> Any:
    x = net.a(batch)
    return net.c(net.b(x) * torch.rand(4, generator=torch.Generator().manual_seed(1))).mean()


def python_numbers(net: Any, batch: Tensor) -> Any:
    return net.c(net.b(net.a(batch)) * random.random()).mean()


def by_value(net: Any, batch: Tensor) -> Any:
    return net.c(net.b(net.a(batch)) + torch.poisson(batch.abs())).mean()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (random_branch, "random_branch"),
        (own_generator, "before block 'c', draws numbers from a generator of its own"),
        (python_numbers, "before block 'c', draws Python's or NumPy's random numbers"),
        (by_value, "before block 'c', draws numbers whose count depends on the values"),
    ],
)
def test_random_numbers_that_other_stages_cannot_draw(step, message):
    with pytest.raises(CaptureError, match=message):
        assign_calls(trace(step), [["a"], ["b", "c"]])


def test_reentrant_checkpoints_are_refused():
    def step(net: Any, batch: Tensor) -> Any:
        x = net.a(batch)
        return net.c(checkpoint(net.b, x, use_reentrant=True)).mean()

    with pytest.raises(CaptureError, match=r"use_reentrant=True.* holds block 'b'"):
        trace(step)


def test_a_call_that_returns_its_argument_and_what_writes_to_results():
    def step(net: Any, batch: Tensor) -> Any:
        x = net.b(net.a(batch))
        x += 1
        x = net.drop(x)
        return F.relu_(net.c(x)).mean()

    def change(net: Any) -> None:
        net.drop = nn.Identity()

    flow = trace(step, change=change)
    assert by_name(flow) == {"a": set(), "b": {"a"}, "drop": {"b"}, "c": {"drop"}}
    assert [call.leaves[0].is_rewritten for call in flow.calls] == [False, True, False, True]


def test_metrics_run_at_the_end():
    module = ConvNet()
    flow = trace_flow(module, call_training_step, batch_for(module), units=["conv1", "hidden"])
    assert flow.metrics == ("accuracy",)
    assert "accuracy" not in {call.module for call in flow.calls}
    assert flow.calls[-1].module == "head"


def test_a_trace_leaves_nothing_behind():
    module = GPT(dropout=0.1)
    batch = batch_for(module)
    before, state = {id(m): dict(vars(m)) for m in module.modules()}, torch.get_rng_state()
    flow = trace_flow(module, call_training_step, batch, units=["blocks.0"])
    assert any(call.draws for call in flow.calls)
    assert before == {id(m): dict(vars(m)) for m in module.modules()}
    assert torch.equal(state, torch.get_rng_state())


# Buffers that one step changes and the next one reads: no cut may lie between the two.


class Block(nn.Module):
    """Reads or updates a running mean beside its layer."""

    def __init__(self, center: Tensor, *, reads: bool = False, updates: bool = False) -> None:
        super().__init__()
        self.layer, self.reads, self.updates = nn.Linear(4, 4), reads, updates
        self.register_buffer("center", center)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x - self.center if self.reads else x)
        if self.updates:
            self.center.mul_(0.9).add_(result.detach().mean(0), alpha=0.1)
        return result


class Centered(nn.Module):
    """Its first block reads a running mean, which the second block, or the step's end, makes."""

    def __init__(self, late: str) -> None:
        super().__init__()
        center, self.late = torch.zeros(4), late
        self.register_buffer("center", center)
        self.first = Block(center, reads=bool(late))
        self.second = Block(center, updates=late.startswith("by"))

    def forward(self, x: Tensor) -> Tensor:
        result = self.second(self.first(x))
        if not self.late.startswith("by"):
            self.center.copy_(result.detach().mean(0))
        return result.sum()


@pytest.mark.parametrize(
    ("late", "is_refused"),
    [("by block 'second'", True), ("after the last block", True), ("", False)],
)
def test_buffers_of_the_step_before(late: str, is_refused: bool) -> None:
    flow = trace_flow(
        Centered(late),
        lambda module, batch: module(batch),
        torch.randn(2, 4),
        units=["first", "second"],
    )
    assign_calls(flow, [["first", "second"]])
    if not is_refused:
        assert assign_calls(flow, [["first"], ["second"]]) == (0, 1)
        return
    with pytest.raises(ValueError, match=f"'center' in the next step as it is changed {late}"):
        assign_calls(flow, [["first"], ["second"]])


class Scaled(nn.Module):
    """Divides by an average of what it has seen, only keeps one, or has a buffer that stays."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.average.view(2, 2).clone().flatten()
        with torch.no_grad():
            if self.how == "new":
                self.average = 0.9 * self.average + x.abs().mean(0)
            elif self.how != "stays":
                self.average.copy_(0.9 * self.average + x.abs().mean(0))
        return x if self.how == "kept" else x / scale


@pytest.mark.parametrize(
    ("block", "carried"),
    [
        (Scaled("changed"), {"0.average"}),
        (Scaled("new"), {"0.average"}),
        (Scaled("kept"), set()),
        (Scaled("stays"), set()),
        (nn.BatchNorm1d(4), set()),
        (torch.nn.utils.spectral_norm(nn.Linear(4, 4)), {"0.weight_u", "0.weight_v"}),
        (
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"},
        ),
    ],
)
@pytest.mark.parametrize("units", [["0", "1"], ["1"]])
def test_buffers_that_a_step_changes_and_computes_with(
    block: nn.Module, carried: set[str], units: list[str]
) -> None:
    module: Any = nn.Sequential(block, nn.Linear(4, 4))
    flow = trace_flow(
        module, lambda module, batch: module(batch).sum(), torch.randn(3, 4), units=units
    )
    assert flow.carried <= carried and bool(flow.carried) == bool(carried)
