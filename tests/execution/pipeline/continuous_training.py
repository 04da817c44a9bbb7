"""Training under the continuous schedule on ranks, and in one process, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.continuous_run import BackwardResult, ContinuousRun
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.execution.pipeline.stage_models import loss_of, make, plan_of, tokens

CPU = torch.device("cpu")


def continuous_plan(
    pipeline: int, *, schedule: str = "continuous", prediction: Any = "none", **more: Any
) -> ParallelPlan:
    return replace(plan_of(pipeline, schedule, microbatches=1, **more), prediction=prediction)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    options = {"betas": (0.99, 0.999), "decoupled_weight_decay": True}
    return torch.optim.NAdam(parameters, lr=1e-2, **options)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass
class Case:
    """A training: every `drain_every` minibatches the pipeline is drained; `clip` is a norm."""

    model: str
    plan: ParallelPlan
    steps: int = 12
    drain_every: int | None = None
    clip: float | None = None
    accumulate: int = 1
    sizes: Sequence[int] = (8,)
    optimizer: Callable[[Any], torch.optim.Optimizer] = adam
    schedule: Callable[[int], float] | None = None
    frozen: tuple[str, ...] = ()

    def model_of(self, seed: int = 0) -> Any:
        model = make(self.model, seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen or ("nothing",)))
        return model

    def batch(self, step: int, data_rank: int = 0) -> Tensor:
        size = self.sizes[step % len(self.sizes)]
        batch = tokens(self.steps, size * self.plan.data_parallel_size)[step]
        return batch[data_rank * size : (data_rank + 1) * size]

    def completes(self, step: int) -> bool:
        return (step + 1) % self.accumulate == 0 or step + 1 == self.steps

    def next_drain(self, step: int) -> int:
        every = self.drain_every or self.steps
        return min((step // every + 1) * every, self.steps)

    def scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LambdaLR | None:
        return (
            None
            if self.schedule is None
            else torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        )


@dataclass
class Outcome:
    """What training leaves on a rank; `state` is whole on the first one."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    random: Tensor | None = None
    # parameters of which the compressed exchange of some rank holds gradients back
    residuals: int = 0
    # parcels of shared weights under way when each forward pass of the first block begins
    weights_sent: list[int] = field(default_factory=list)


def alone(case: Case) -> Outcome:
    """Train in one process, minibatch by minibatch."""
    model, found = case.model_of(), Outcome()
    optimizer = case.optimizer(model.parameters())
    scheduler = case.scheduler(optimizer)
    torch.manual_seed(5)
    for step in range(case.steps):
        loss = loss_of(model, case.batch(step))
        (loss / case.accumulate).backward()
        found.losses[step] = loss.detach()
        if case.completes(step):
            if case.clip is not None:
                found.norms[step] = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    found.state, found.random = model.state_dict(), torch.get_rng_state()
    return found


def train(rank: int, case: Case) -> Outcome:
    """Train on a rank of a pipeline."""
    model, found = case.model_of(seed=rank), Outcome()
    torch.manual_seed(5)
    engine = Engine(case.plan, model, device=CPU)
    data_rank = case.plan.mesh.data_rank(rank)
    engine.apply(example=Example(loss_of, case.batch(0, data_rank)))
    optimizer = case.optimizer(model.parameters())
    engine.attach_optimizers([optimizer])
    scheduler, run = case.scheduler(optimizer), engine.continuous
    model.embed.register_forward_pre_hook(
        lambda *_: found.weights_sent.append(
            sum(len(sent) for (kind, _), sent in run._links._sends.items() if "weights" in kind)
        )
    )
    for step in range(case.steps):
        result = run.advance(
            case.batch(step, data_rank),
            loss_of,
            weight=1 / case.accumulate,
            completes=case.completes(step),
            accumulate=case.accumulate,
            remaining=case.next_drain(step) - 1 - step,
            last_completes=case.completes(case.next_drain(step) - 1),
        )
        finish(result, run, optimizer, case, found)
        if (case.drain_every and (step + 1) % case.drain_every == 0) or step + 1 == case.steps:
            for result in run.drain():
                finish(result, run, optimizer, case, found)
            assert run.in_flight == 0
        found.held.append(run._links.held_bytes)
        if scheduler is not None:
            scheduler.step()
    found.random = torch.get_rng_state()
    found.state = {name: value.clone() for name, value in engine.module_state().items()}
    if engine.exchange is not None:
        saved = engine.exchange.state_dict()
        assert saved is not None and len(saved["ranks"]) == (
            case.plan.data_parallel_size if rank == 0 else 0
        )
        of_ranks = [named for each in saved["ranks"] for named in each.values()]
        # those of all stages
        learned = {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(named.keys() == learned for named in of_ranks)
        found.residuals = sum(bool(tensor.any()) for named in of_ranks for tensor in named.values())
        given = [saved]
        torch.distributed.broadcast_object_list(given, src=0)
        engine.exchange.load_state_dict(given[0])
    engine.release()
    engine.close()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    assert not found.state or all(torch.equal(whole[name], found.state[name]) for name in whole)
    return found


def finish(
    result: BackwardResult,
    run: ContinuousRun,
    optimizer: torch.optim.Optimizer,
    case: Case,
    found: Outcome,
) -> None:
    found.losses.update(result.losses)
    if result.minibatch is None or not result.completes:
        return
    if case.clip is not None:
        found.norms[result.minibatch] = run.clip_norm(result, case.clip)
    with run.update(result):
        optimizer.step()
    optimizer.zero_grad()


def train_all(rank: int, cases: Sequence[Case]) -> list[Outcome]:
    return [train(rank, case) for case in cases]
