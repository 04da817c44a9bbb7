"""Plans with stages on ranks: losses, gradients, states, and what follows, of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.communication import TopK
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.execution.pipeline.stage_models import logits_of, loss_of, make, plan_of, tokens
from tests.launch import run_on_pool

CPU = torch.device("cpu")
STEPS = 2


class Case(NamedTuple):
    """A model under a plan; `sizes` are the samples of each microbatch of a data rank, `clip` a
    norm. `evaluates`: once trained.
    """

    model: str
    plan: ParallelPlan
    sizes: tuple[int, ...] = (2, 2, 2, 2)
    clip: float | None = None
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    evaluates: bool = False


class Outcome(NamedTuple):
    """What training leaves: losses, the last step's gradients, states, norms, logits."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    norms: list[float]
    logits: Tensor | None


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if "bias" not in name]
    rest = [parameter for name, parameter in named if "bias" in name]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def parts(case: Case, step: int, data_rank: int) -> list[Tensor]:
    samples = sum(case.sizes)
    batch = tokens(STEPS, samples * case.plan.data_parallel_size)[step]
    return list(batch[data_rank * samples : (data_rank + 1) * samples].split(case.sizes))


def weights_of(case: Case) -> list[float]:
    return [size / sum(case.sizes) for size in case.sizes]


def alone(case: Case) -> Outcome:
    """One process runs the same microbatches; those of all data ranks are averaged."""
    model, size = make(case.model), case.plan.data_parallel_size
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen))
    optimizer = optimizer_of(model)
    torch.manual_seed(5)
    losses, norms = [], []
    for step in range(STEPS):
        before, of_rank = torch.get_rng_state(), []
        for data_rank in range(size):
            torch.set_rng_state(before)  # every data rank begins with the same seed
            buffers = [buffer.clone() for buffer in model.buffers()]
            for weight, part in zip(weights_of(case), parts(case, step, data_rank), strict=True):
                loss = loss_of(model, part)
                (loss * weight / size).backward()
                of_rank.append(loss.detach())
            if data_rank and buffers:  # those of the first count, as under DDP
                torch._foreach_copy_(list(model.buffers()), buffers)
        losses += of_rank
        if (step + 1) % case.accumulate == 0:
            if case.clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
            optimizer.step()
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = logits_of(model, tokens(1)[0])
    return Outcome(losses, gradients, model.state_dict(), optimizer.state_dict(), norms, logits)


def train(rank: int, case: Case) -> tuple[Outcome, dict[str, Any]]:
    model = make(case.model, seed=rank)  # rank 0's weights must win
    originals = dict(model.named_parameters())
    for name, parameter in originals.items():
        parameter.requires_grad_(not name.startswith(case.frozen))
    data_rank = case.plan.mesh.data_rank(rank)
    torch.manual_seed(5)
    engine = Engine(case.plan, model, device=CPU)
    engine.apply(example=Example(loss_of, parts(case, 0, data_rank)[0]))
    optimizer = optimizer_of(model)
    engine.attach_optimizers([optimizer])
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        microbatches = parts(case, step, data_rank)
        if (step + 1) % case.accumulate:
            with engine.no_sync():
                losses += engine.run_step(microbatches, loss_of, weights=weights_of(case)).unbind()
            continue
        losses += engine.run_step(microbatches, loss_of, weights=weights_of(case)).unbind()
        if case.clip is not None:
            norms.append(float(engine.clip_norm(list(model.parameters()), case.clip)))
        optimizer.step()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    kept = sum(t.numel() for values in optimizer.state.values() for t in values.values() if t.dim())
    model.eval()
    engine.sync_buffers()
    logits = engine.evaluate(tokens(1)[0], logits_of) if case.evaluates else None
    state = {name: value.clone() for name, value in engine.module_state().items()}
    optimizer_state = copy.deepcopy(engine.optimizer_state(optimizer))
    engine.release()
    assert all(parameter is originals[name] for name, parameter in model.named_parameters())
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    later = engine.optimizer_state(optimizer)
    assert (
        later.keys() == optimizer_state.keys()
        and later.get("state", {}).keys() == optimizer_state.get("state", {}).keys()
    )
    loss_of(model, tokens(1)[0]).backward()  # a plain module again
    facts = {
        "held": held,
        "kept": kept,
        "whole": whole,
        "data_rank": data_rank,
        "tensor_rank": rank % 2,
    }
    return Outcome(losses, gradients, state, optimizer_state, norms, logits), facts


def run_cases(rank: int, cases: Sequence[Case]) -> list[Any]:
    return [train(rank, case) for case in cases]


SENT_WHOLE = TopK(density=1.0)
CASES: dict[str, Case] = {
    "interleaved": Case("skips", plan_of(2, "interleaved", stages=4), evaluates=True),
    "dropout, recomputed": Case(
        "dropout", plan_of(2, "interleaved_zero_bubble", stages=4, recompute=True), evaluates=True
    ),
    "1f1b_overlapped batch norm": Case("normed", plan_of(2, "1f1b_overlapped"), evaluates=True),
    "complex numbers, one microbatch": Case(
        "shortcut", plan_of(2, "1f1b"), sizes=(4,), evaluates=True
    ),
    "accumulated": Case(
        "tied", plan_of(2, "zbv", stages=4), accumulate=2, clip=0.1, evaluates=True
    ),
    "frozen": Case(
        "tied", plan_of(2, "1f1b"), frozen=("embed.weight", "positions", "blocks.0.0.weight")
    ),
    "unused": Case("spare", plan_of(2, "gpipe", data=2), evaluates=True),
    "data batch norm": Case("normed", plan_of(2, "1f1b", data=2), sizes=(3, 3, 2)),
    "data first, sent whole": Case(
        "skips",
        replace(
            plan_of(2, "interleaved", stages=4, data=2, data_first=True),
            gradient_exchange=SENT_WHOLE,
        ),
        accumulate=2,
        clip=0.1,
    ),
    "zero1": Case(
        "tied", plan_of(2, "looped_bfs", stages=4, data=2, storage="zero1"), clip=0.1, accumulate=2
    ),
    # of tied parameters beside a tensor axis: test_stage_states.py
    "tensor 2 handed zero bubble": Case(
        "handed",
        plan_of(2, "interleaved_zero_bubble", stages=8, tensor=2),
        clip=0.1,
        accumulate=2,
        evaluates=True,
    ),
    "tensor 2 rows zbv, uneven": Case(
        "skips",
        plan_of(2, "zbv", stages=4, tensor=2, recompute=True, rows=True),
        sizes=(3, 3, 2),
        clip=0.1,
    ),
    "4 ranks": Case("skips", plan_of(4, "1f1b", microbatches=6), sizes=(1, 2, 1, 2, 1, 1)),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[tuple[Outcome, dict[str, Any]]]]:
    found = {}
    for size in sorted({case.plan.mesh.size for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case.plan.mesh.size == size]
        ranks = run_on_pool(run_cases, size, [CASES[name] for name in names])
        found |= {name: [of_rank[index] for of_rank in ranks] for index, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_one_process(
    name: str, trained: dict[str, list[tuple[Outcome, dict[str, Any]]]]
) -> None:
    case, ranks = CASES[name], trained[name]
    expected = alone(case)
    count = len(case.sizes)
    for outcome, facts in ranks:
        first = facts["data_rank"] * count
        for step in range(STEPS):
            own = expected.losses[step * count * case.plan.data_parallel_size + first :][:count]
            torch.testing.assert_close(
                outcome.losses[step * count : (step + 1) * count], own, rtol=1e-5, atol=1e-6
            )
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        for parameter, gradient in outcome.gradients.items():
            of_rank = own_slice(expected.gradients[parameter], gradient.shape, facts["tensor_rank"])
            close({parameter: gradient}, {parameter: of_rank}, atol=1e-6)
        close(facts["whole"], expected.state)
        if case.evaluates:
            torch.testing.assert_close(outcome.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert set().union(*(outcome.gradients for outcome, _ in ranks)) == expected.gradients.keys()
    close(ranks[0][0].state, expected.state)
    assert all(outcome.state == {} for outcome, _ in ranks[1:])
    saved = ranks[0][0].optimizer_state
    assert saved["param_groups"] == expected.optimizer_state["param_groups"]
    assert saved["state"].keys() == expected.optimizer_state["state"].keys()
    for index, values in expected.optimizer_state["state"].items():
        close(saved["state"][index], values)


def own_slice(whole: Tensor, shape: torch.Size, tensor_rank: int) -> Tensor:
    for dim, size in enumerate(shape):
        whole = whole.narrow(dim, tensor_rank * size, size) if size < whole.shape[dim] else whole
    return whole


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 1e-5) -> None:
    # Sums in another order; AdamW magnifies the last bits of gradients near zero.
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_ranks_hold_their_stages_alone(
    trained: dict[str, list[tuple[Outcome, dict[str, Any]]]],
) -> None:
    whole = sum(p.untyped_storage().nbytes() for p in make("skips").parameters())
    held = [facts["held"] for _, facts in trained["4 ranks"]]
    # the table of positions, and scalars
    assert max(held) < 0.5 * whole and whole <= sum(held) < whole * 1.1
    kept = [facts["kept"] for _, facts in trained["zero1"]]
    state = sum(2 * p.numel() for p in make("tied").parameters())
    assert max(kept) < 0.4 * state
