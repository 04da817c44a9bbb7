"""All stages of a pipeline in turn in one process, and the plain step to compare them with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.execution.pipeline.stage_pass import RandomOrder, StagePass
from lightning_topt.graph.capture import call_training_step, loss_of
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import StepFlow, TensorRef, assign_calls

Step = Callable[[Any, Any], Any]


@dataclass
class Done:
    """What a training step left behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor
    flow: StepFlow | None = None
    sent: list[int] = field(default_factory=list)  # tensors, per microbatch


def run_plain(
    module: nn.Module,
    batches: Sequence[Any],
    *,
    step: Step = call_training_step,
    context: Any = nullcontext,
) -> Done:
    """The twin: microbatches in order in one process, the mean of their losses."""
    module = copy.deepcopy(module)
    torch.manual_seed(5)
    losses = []
    for batch in batches:
        with context():
            loss = loss_of(step(module, batch))
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return _done(module, losses)


def run_stages(
    module: nn.Module,
    batches: Sequence[Any],
    stages: Sequence[Sequence[str]],
    *,
    ranks: Sequence[int] | None = None,
    split: bool = False,
    step: Step = call_training_step,
    context: Any = nullcontext,
    poison: bool = True,
    flow: StepFlow | None = None,
) -> Done:
    """All stages; `ranks` of them have random states of their own. `poison`: parameters that a
    stage does not need are NaN.

    `flow`: that of an earlier run with the same blocks.
    """
    module = copy.deepcopy(module)
    units = [block for stage in stages for block in stage]
    if flow is None:
        flow = trace_flow(module, step, batches[0], units=units, forward_context=context)
    assigned = assign_calls(flow, stages)
    needed = StageLayout.of_flow(
        flow, assigned, module, rank_of_stage=range(len(stages))
    ).parameters
    assert set().union(*needed) <= {
        name for name, _ in module.named_parameters()
    }  # what no stage needs is NaN in all of them
    rank_of = list(ranks or range(len(stages)))
    orders = {rank: RandomOrder() for rank in rank_of}
    passes = {
        rank: StagePass(module, flow, assigned, units=units, order=order)
        for rank, order in orders.items()
    }
    torch.manual_seed(5)
    states = dict.fromkeys(orders, torch.get_rng_state())
    crossings = flow.crossings(assigned)
    losses: list[Tensor] = []
    held: dict[tuple[int, TensorRef], Tensor] = {}
    sent_counts = []
    for index, batch in enumerate(batches):
        for stage in range(len(stages)):
            received = {
                ref: held[index, ref].clone()
                for ref, readers in crossings.items()
                if stage in readers
            }
            torch.set_rng_state(states[rank_of[stage]])
            with _poisoned(module, needed[stage], poison), context():
                output = passes[rank_of[stage]].forward(
                    stage, index, lambda b=batch: step(module, b), received
                )
            states[rank_of[stage]] = torch.get_rng_state()
            held |= {(index, ref): tensor for ref, tensor in output.sent.items()}
            assert set(output.sent) == {ref for ref in crossings if assigned[ref.call] == stage}
            assert all(not tensor.requires_grad for tensor in output.sent.values())
        losses.append(loss_of(output.result))
        sent_counts.append(sum(key[0] == index for key in held))
    for index in range(len(batches)):
        gradients: dict[TensorRef, Tensor] = {}
        for stage in reversed(range(len(stages))):
            mine = {ref: g for ref, g in gradients.items() if assigned[ref.call] == stage}
            loss = losses[index] / len(batches) if stage == len(stages) - 1 else None
            one = passes[rank_of[stage]]
            if split:
                made = one.backward_input(stage, index, mine, loss=loss)
                before = _gradients(module)
                one.backward_weight(stage, index)
                assert index or stage < 1 or before != _gradients(module) or not needed[stage]
            else:
                made = one.backward(stage, index, mine, loss=loss)
            assert set(made) == {
                r
                for r, readers in crossings.items()
                if stage in readers and flow.spec(r).requires_grad
            }
            for ref, gradient in made.items():
                gradients[ref] = gradients[ref] + gradient if ref in gradients else gradient
    assert all(not one._passes for one in passes.values())
    assert len({tuple(state.tolist()) for state in states.values()}) == 1, (
        "ranks drew different numbers"
    )
    torch.set_rng_state(next(iter(states.values())))
    done = _done(module, [loss.detach() for loss in losses])
    done.flow, done.sent = flow, sent_counts
    return done


class _poisoned:
    """Parameters that a stage does not need read as NaN, as on its rank."""

    def __init__(self, module: nn.Module, needed: frozenset[str], poison: bool) -> None:
        self.parameters = (
            [p for name, p in module.named_parameters() if name not in needed] if poison else []
        )

    def __enter__(self) -> None:
        self.data = [p.data for p in self.parameters]
        for parameter in self.parameters:
            parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(
                parameter.shape
            )

    def __exit__(self, *error: object) -> None:
        for parameter, data in zip(self.parameters, self.data, strict=True):
            parameter.data = data


def _gradients(module: nn.Module) -> dict[str, list[Any] | None]:
    return {
        name: None if p.grad is None else p.grad.flatten().tolist()
        for name, p in module.named_parameters()
    }


def _done(module: nn.Module, losses: list[Tensor]) -> Done:
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return Done(losses, gradients, buffers, torch.get_rng_state())


def assert_same(got: Done, wanted: Done, *, tolerance: float = 1e-6) -> None:
    """Losses, every gradient, buffers and the random state."""
    for one, other in zip(got.losses, wanted.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert got.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        if gradient is None:
            assert got.gradients[name] is None, name
        else:
            assert got.gradients[name] is not None, name
            torch.testing.assert_close(
                got.gradients[name],
                gradient,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(got.buffers[name], buffer, rtol=tolerance, atol=tolerance)
    assert torch.equal(got.random_state, wanted.random_state), "the generator is somewhere else"
