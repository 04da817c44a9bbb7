"""Ranks that use different modules in a step, under plans that shard: as under ddp, or named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.graph.blocks import child_blocks
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.plan.parallel_plan import PRESETS, ParallelPlan, PlanError, preset_plan
from tests.foreign.run import Run, run_program
from tests.foreign.shelf import Program
from tests.plugins.trainer_ranks import make_trainer, on_new_ranks, on_ranks, once_on_ranks

STEPS = 6
Choice = Callable[[int, int], list[int]]  # of a batch and a rank: the layers that run


class Chosen(L.LightningModule):
    """A stack of layers, of which each rank runs some in each step."""

    def __init__(self, choose: Choice, widths: tuple[int, ...] = (16, 24, 32, 16)) -> None:
        super().__init__()
        self.choose, self.temperature = choose, nn.Parameter(torch.ones(1))
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths
        )

    def features(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for index in self.choose(batch_idx, self.global_rank):
            x = x + self.layers[index](x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.head(self.features(batch, batch_idx))
        loss = F.cross_entropy(x * self.temperature if batch_idx % 3 else x, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


class Images(Chosen):
    """Images in some batches of a rank; features of all ranks are compared, as CLIP does."""

    def __init__(self) -> None:
        super().__init__(lambda step, rank: [1, 2])
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.project = nn.Linear(64, 8)

    def features(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        if (batch_idx + self.global_rank) % 2:
            pixels = (batch[0][:, :4, None] * batch[0][:, None, 4:]).unsqueeze(1)
            x = x + self.project(self.tower(pixels))
        everyone = self.all_gather(x.detach().mean(dim=0)).mean(dim=0)
        return super().features((x - everyone,), batch_idx)


class Experts(Chosen):
    """Each sample goes to one expert; a rank has samples for some of them."""

    def features(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        weights = torch.softmax(x[:, : len(self.layers)], dim=1)
        chosen = (batch[1] + self.global_rank + batch_idx) % 2 + 2 * (batch_idx % 2)
        for index, expert in enumerate(self.layers):
            if (rows := (chosen == index).nonzero()[:, 0]).numel():
                x = x.index_add(0, rows, weights[rows, index, None] * expert(x[rows]))
        return x


class Auxiliary(Chosen):
    """A second head on odd batches of all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda step, rank: [0, 1])
        self.auxiliary = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            loss = loss + F.cross_entropy(self.auxiliary(self.stem(batch[0])), batch[1])
        return loss


class Frozen(Chosen):
    """A backbone that is not trained, whose layers ranks use by turns."""

    def __init__(self) -> None:
        super().__init__(turns)
        self.layers[:3].requires_grad_(False)


def dropped(step: int, rank: int) -> list[int]:
    draws = random.Random(100 * step + rank)
    return [index for index in range(4) if draws.random() < 0.5]


def turns(step: int, rank: int) -> list[int]:
    return [0, 3 if (step + rank) % 2 else 1]


PROGRAMS: dict[str, tuple[Callable[[], Chosen], dict[str, Any]]] = {
    "images in some batches": (Images, {}),
    "experts without tokens": (lambda: Experts(turns), {}),
    "layers dropped at random": (lambda: Chosen(dropped), {"gradient_clip_val": 0.5}),
    "a head on odd batches": (Auxiliary, {}),
    "used by no rank in some steps": (
        lambda: Chosen(lambda s, r: [0, 2] if s in (0, 4) else [0]),
        {},
    ),
    "a frozen backbone": (Frozen, {}),
    "blocks of equal size": (lambda: Chosen(lambda step, rank: [3 * rank], (16,) * 4), {}),
    "accumulation": (lambda: Chosen(turns), {"accumulate_grad_batches": 2}),
}
PLANS = ("zero3", "zero3+recompute", "zero2")


def data(steps: int = STEPS) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(2)
    rows = torch.randn(8 * steps, 8, generator=source)
    labels = torch.randint(4, (8 * steps,), generator=source)
    return DataLoader([*zip(rows, labels, strict=True)], batch_size=4)


def plan_of(name: str, module: nn.Module, ranks: int) -> ParallelPlan:
    """All children are blocks of their own."""
    preset, _, recompute = name.partition("+")
    mesh = hybrid_mesh(ranks // 2, 2) if "hybrid" in preset else data_mesh(ranks)
    blocks = child_blocks(module)
    return preset_plan(
        PRESETS[preset], mesh=mesh, blocks=blocks, recompute=blocks if recompute else ()
    )


def run_all(rank: int, plan: str | None, names: tuple[str, ...], ranks: int = 2) -> dict[str, Run]:
    found = {}
    for name in names:
        make, options = PROGRAMS[name]
        strategy: Any = DDPStrategy(find_unused_parameters=True)
        if plan is not None:
            own = plan_of(plan, make(), ranks)
            strategy = AutoParallelStrategy(plan=own, find_unused_parameters=True)
        found[name] = run_program(Program(name, lambda m=make: (m(), data()), options), strategy)
    return found


def check_equal(plan: str, names: tuple[str, ...], ranks: int = 2) -> None:
    expected = once_on_ranks(run_all, None, names, ranks, world_size=ranks)[0]
    for found in on_ranks(run_all, plan, names, ranks, world_size=ranks):
        for name, run in found.items():
            assert not run.error, f"{name}: {run.error}"
            assert run.level == (2 if "zero2" in plan else 3) and not expected[name].error
            # gradients add up in another order, and Adam divides by their size, in each step
            for one, two in (
                (run.losses, expected[name].losses),
                (run.state, expected[name].state),
            ):
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_use_different_modules(plan: str) -> None:
    check_equal(plan, tuple(PROGRAMS))


def test_shards_inside_of_groups_of_ranks() -> None:
    """With accumulation gradients go between the groups once: also those of an earlier batch."""
    for plan in ("hybrid", "hybrid_zero2"):
        check_equal(plan, ("layers dropped at random", "accumulation"), ranks=4)


def many_steps(rank: int, plan: str | None) -> list[Tensor]:
    L.seed_everything(1, verbose=False)
    module = Chosen(lambda step, rank: [i for i in dropped(step, rank) if i < 2], (16, 24))
    strategy: Any = DDPStrategy(find_unused_parameters=True)
    if plan is not None:
        strategy = AutoParallelStrategy(plan=plan_of(plan, module, 2), find_unused_parameters=True)
    make_trainer(strategy, devices=2).fit(module, data(100))
    return [p.detach().clone() for p in module.parameters()]


def test_a_hundred_steps_at_random() -> None:
    expected = on_ranks(many_steps, None)[0]
    for found in on_ranks(many_steps, "zero3"):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # after 100 steps of Adam


# ---- without the option


def name_ranks(rank: int, widths: tuple[int, ...], plan: str, folder: str) -> None:
    module = Chosen(lambda step, rank: [3 * rank if step == 2 else 1], widths)
    strategy = AutoParallelStrategy(plan=plan_of(plan, module, 2))
    with pytest.raises((PlanError, RuntimeError)) as caught:
        make_trainer(strategy, devices=2).fit(module, data())
    assert module.trainer.global_step == 2  # nothing was updated
    Path(folder, str(rank)).write_text(str(caught.value))


@pytest.mark.parametrize("plan", ["zero3", "zero2"])
def test_ranks_that_differ_are_named(plan: str, tmp_path: Path) -> None:
    on_ranks(name_ranks, (16,) * 4, plan, str(tmp_path))
    for path in (tmp_path / "0", tmp_path / "1"):
        text = path.read_text()
        assert "rank 0 gathers 'layers.0', rank 1 gathers 'layers.3'" in text, text
        assert "find_unused_parameters=True" in text


def test_blocks_of_other_sizes_end_a_process_of_gloo(tmp_path: Path) -> None:
    """In the backend, which ends the process; the other rank says what it did."""
    with pytest.raises(RuntimeError, match=r"ranks .0. gave no result: they ended"):
        on_new_ranks(name_ranks, (16, 24, 32, 48), "zero3", str(tmp_path))
    text = (tmp_path / "1").read_text()
    assert "rank 0 did not answer" in text and "gathers 'layers.3', gathers" in text, text
    assert "find_unused_parameters=True" in text


# ---- plans that are searched


def fit_traced(rank: int, options: dict[str, Any]) -> int:
    module = Auxiliary()  # its first batch uses neither the second head nor two layers
    strategy = AutoParallelStrategy(**options, find_unused_parameters=True)
    make_trainer(strategy, devices=2).fit(module, data())
    assert strategy.parallel_plan is not None
    return max(block.config.storage.level for block in strategy.parallel_plan.blocks)


def test_a_traced_step_without_some_gradients_is_planned() -> None:
    assert on_ranks(fit_traced, {"plan": "zero3"}) == [3, 3]
    assert on_ranks(fit_traced, {"plan": {"mesh": {"data": 2}}}) != [None, None]
