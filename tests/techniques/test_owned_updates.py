"""Updates of whole parameters on shards: what plans are said to cost, against what ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.verify_plan import KINDS, held_bytes
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.graph.op_graph import Block
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.plan_costs import Explanation, PlanCosts, explain
from lightning_topt.techniques.registry import parameters_by_block
from tests.execution.observed_ranks import cluster_for
from tests.launch import run_ranks

CPU = torch.device("cpu")
CASES = [("zero2", "Muon"), ("zero3", "Own"), ("hybrid", "Muon")]


class Own(Optimizer):
    """Divides each gradient by its norm: a rule that has to be tried."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norm"] = p.grad.norm()
                    p.sub_(group["lr"] * p.grad / self.state[p]["norm"])


class Net(L.LightningModule):
    """Matrices of three sizes, whose rows all numbers of ranks here divide, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8))
        self.last = nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        y: Tensor = self.last(self.second(self.first(batch)))
        return y.square().mean()

    forward = training_step


def make_optimizers(kind: str, module: nn.Module) -> list[Optimizer]:
    """One for matrices that reads them whole, and AdamW for vectors."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    if kind == "Muon":
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors)]
    return [Own(matrices), torch.optim.AdamW(vectors)]


def plan_of(preset: str) -> ParallelPlan:
    mesh = hybrid_mesh(2, 2) if preset == "hybrid" else data_mesh(2)
    return preset_plan(PRESETS[preset], mesh=mesh, blocks=["first", "second"])


def one_step(rank: int, preset: str, kind: str) -> Any:
    """The bytes of each exchange in the update (to others, given, taken), and what a rank owns."""
    module = Net()
    engine = Engine(plan_of(preset), module, device=CPU)
    engine.apply()
    optimizers = make_optimizers(kind, module)
    engine.attach_optimizers(optimizers)
    engine.run_step([torch.randn(4, 8)], lambda model, batch: model(batch))
    calls, original = list[tuple[int, int, int]](), dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, **options: Any) -> Any:
        sizes: Sequence[int] = options["input_split_sizes"]
        others = sum(sizes) - sizes[dist.get_rank(options["group"])]
        calls.append((others * given.itemsize, given.nbytes, output.nbytes))
        return original(output, given, **options)

    names = {p: name for name, p in module.named_parameters()}
    names = {index: names[p] for index, p in enumerate(parameters_of(optimizers[0]))}
    dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        dist.all_to_all_single = original
    pieces = optimizers[0].step.own_states()  # type: ignore[attr-defined]
    owned = [names[piece.index] for piece in pieces]
    engine.close()
    return calls, owned


def cluster(plan: ParallelPlan) -> Cluster:
    """A network and a memory of one byte in a second, and calls that cost something."""
    found = cluster_for(plan.mesh)
    return replace(found, device=replace(found.device, op_overhead_seconds=3.0))


def explained(
    module: Net, plan: ParallelPlan, optimizers: list[Optimizer], backend: str = "gloo"
) -> Explanation:
    blocks = tuple(Block(each.block, index, False) for index, each in enumerate(plan.blocks))
    graph = capture(module, torch.randn(4, 8)).with_blocks(blocks)
    profile = read_optimizer(optimizers, named_parameters=module.named_parameters())
    step = TrainingStep(graph, replace(cluster(plan), backend=backend), profile, plan.mesh, 4)
    return explain(PlanCosts(step), plan.configs)


@pytest.mark.parametrize(("preset", "kind"), CASES)
def test_exchanges_updates_and_states_are_those_of_ranks(preset: str, kind: str) -> None:
    plan, module = plan_of(preset), Net()
    results = run_ranks(one_step, plan.mesh.size, preset, kind)
    optimizers = make_optimizers(kind, module)
    profile = read_optimizer(optimizers, named_parameters=module.named_parameters())
    found = explained(module, plan, optimizers)
    device = cluster(plan).device
    # exchanges: in the mean over ranks, what goes to others, and copies in and out of buffers
    calls = [of_rank for of_rank, _ in results]
    assert {len(of_rank) for of_rank in calls} == {2 if kind == "Muon" else 3}
    sent, given, taken = (
        sum(call[i] for of_rank in calls for call in of_rank) / len(calls) for i in range(3)
    )
    assert found.seconds["broadcast"] == pytest.approx(sent + 2 * given + 2 * taken, rel=1e-9)
    # the update: that of the rank which owns most, and of shards of vectors
    owned = [names for _, names in results]
    matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
    assert sorted(name for names in owned for name in names) == sorted(matrices)
    busiest = max(
        sum(profile.update_seconds(n, numel=matrices[n].numel(), device=device) for n in names)
        for names in owned
    )
    vectors = sum(  # in halves, also of four ranks
        profile.update_seconds(name, numel=p.numel(), device=device, share=1 / 2)
        for name, p in module.named_parameters()
        if p.dim() == 1
    )
    assert found.seconds["update"] == pytest.approx(busiest + vectors)
    # states: those of the fullest rank (step counts of AdamW's shards are in halves)
    configs = plan.configs
    blocks = parameters_by_block(module, configs)
    held = held_bytes(blocks, configs, plan.mesh, profile=profile, optimizers=optimizers)
    states = sum(held.values())[:, KINDS.index("optimizer_state")].max()
    assert found.peak_parts["optimizer state"] == pytest.approx(states, abs=4 * len(matrices) * 2)


@pytest.mark.parametrize(("backend", "share"), [("gloo", 1.0), ("nccl", 0.5)])
def test_a_shared_step_costs_broadcasts_or_a_gather(backend: str, share: float) -> None:
    """Of two ranks; a byte takes a second."""
    module = Net()
    optimizers: list[Optimizer] = [torch.optim.AdamW(module.parameters())]
    found = explained(module, plan_of("zero1"), optimizers, backend)
    total = sum(p.nbytes for p in module.parameters())
    assert found.seconds["broadcast"] == pytest.approx(share * total, rel=1e-9)
