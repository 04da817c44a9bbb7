"""What planning starts from: batches as `training_step` gets them, and plans given by name."""

from __future__ import annotations

import random
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.choose import choose
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.plan_values import Preset
from lightning_topt.plugins.plan_options import UniformPlan
from lightning_topt.plugins.planning import batches_of, make_fake_optimizers


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class PartlyRandom(pl.LightningModule):
    """Two kinds of blocks: recomputation suits one kind only when its buffers stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.ModuleList([Residual() for _ in range(3)])
        self.normed = nn.ModuleList(
            [nn.Sequential(Residual(), nn.BatchNorm1d(8)) for _ in range(3)]
        )

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in (*self.plain, *self.normed):
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_by_name_shards_every_block_and_recomputes_what_can_be(stage, recompute):
    graph = capture(PartlyRandom(), (torch.zeros(4, 8),), second_batch=(torch.zeros(8, 8),))
    able = {block.name for block in graph.blocks if block.name and block.recomputable}
    assert able and {block.name for block in graph.blocks} - able - {""}  # both kinds are there
    plan = UniformPlan(Preset(stage), recompute).of(graph, data_mesh(2))
    assert {block.block for block in plan.blocks} == {block.name for block in graph.blocks}
    assert {block.block for block in plan.blocks if block.config.recompute} == (
        able if recompute else set()
    )
    assert {block.config.storage.level for block in plan.blocks} == {stage}


class Halved(pl.LightningDataModule):
    """Samples of two, halved by the data module's own hook."""

    def train_dataloader(self) -> dict[str, DataLoader]:
        def loader(n: int) -> DataLoader:
            return DataLoader(TensorDataset(torch.full((n, 3), 2.0)), batch_size=4)

        return {"long": loader(20), "short": loader(6)}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {name: [tensor / 2 for tensor in tensors] for name, tensors in batch.items()}


def test_batches_pass_the_hooks_of_the_data_module_and_keep_the_form_of_the_loaders():
    module, data = PartlyRandom(), Halved()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.strategy.connect(module)
    state = torch.get_rng_state()
    batch, double = batches_of(CombinedLoader(data.train_dataloader()), trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: tensors[0].shape for name, tensors in batch.items()} == {
        "long": (4, 3),
        "short": (4, 3),
    }
    assert all((tensors[0] == 1).all() for tensors in batch.values())
    assert double is None  # the short loader has no batch of eight samples


# ---- uniform plans and the choice ----------------------------------------------------------------

CPU = Cluster(
    "cpu",
    Device("core", 2**33, {"float32": 3e10}, 8e9, 3e-6),
    2,
    1,
    Link(4e-5, 1e9),
    backend="gloo",
)


def measured_again(generator: random.Random) -> Cluster:
    """The same machine as other noise lets it appear: every figure is off by up to 10 %."""

    def noisy(value: float) -> float:
        return value * generator.uniform(0.9, 1.1)

    device = replace(
        CPU.device,
        flops={"float32": noisy(3e10)},
        memory_bandwidth=noisy(8e9),
        op_overhead_seconds=noisy(3e-6),
    )
    return replace(
        CPU, device=device, intra=Link(noisy(4e-5), noisy(1e9)), overlap=generator.uniform(0, 0.2)
    )


def searched(graph, module, cluster):
    optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
    optimizer = read_optimizer(optimizers, named_parameters=named)
    return search_plans(
        SearchRequest(graph, cluster, optimizer, device_counts=(1, 2), global_batch_size=8)
    )


class Trained(PartlyRandom):
    """With an optimizer whose update takes about as long as broadcasting what a shared one has
    updated.
    """

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_uniform_plans_are_candidates_at_every_number_of_devices():
    module = Trained()
    graph = capture(module, (torch.zeros(4, 8),), second_batch=(torch.zeros(8, 8),))
    frontier = searched(graph, module, CPU)
    able = {block.name for block in graph.blocks if block.name and block.recomputable}
    found = {1: set(), 2: set()}
    for point in frontier.uniform:
        levels = {block.config.storage.level for block in point.plan.blocks if block.block}
        again = {block.block for block in point.plan.blocks if block.config.recompute}
        root = next(block.config.storage.level for block in point.plan.blocks if not block.block)
        (level,) = levels
        assert again in (set(), able) and root == min(level, 2)
        found[point.devices].add((level, bool(again)))
    assert found == {
        1: {(0, False), (0, True)},
        2: {(level, again) for level in range(4) for again in (False, True)},
    }
    assert len(frontier.uniform) == 10


def test_noise_moves_no_choice_for_a_small_model():
    module, generator = Trained(), random.Random(0)
    graph = capture(module, (torch.zeros(4, 8),), second_batch=(torch.zeros(8, 8),))
    plans, fastest = set(), set()
    for _ in range(8):
        points = searched(graph, module, measured_again(generator)).candidates
        plans |= {
            choose(points, memory_limit=limit, devices=2).plan.summary() for limit in (None, 2**30)
        }
        fastest.add(
            choose(points, devices=2, time_error=0.0, time_error_seconds=0.0).plan.summary()
        )
    assert plans == {f"{len(graph.blocks)} x DDP"}
    assert fastest != plans  # noise is enough for other plans to be predicted as fastest
