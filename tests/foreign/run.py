"""Runs programs of the shelf on ranks, under any strategy, and says how two runs differ."""

from __future__ import annotations

import traceback
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.foreign.shelf import Program
from tests.plugins.trainer_ranks import make_trainer, mean_over_ranks

CLUSTER = yaml.safe_load(
    (Path(__file__).parents[2] / "conf" / "cluster" / "local_cpu.yaml").read_text()
)
# These models are small beside what a process takes: what a plan saves would be less than the
# prediction's error.
CLUSTER["device"]["process_bytes"] = 0
SEED = 11


@dataclass
class Run:
    """What one run of a program left: losses of its steps, the module's state, and its plan."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    plan: str = "ddp"
    level: int = 0  # of sharding: the highest of all blocks
    is_plain: bool = True  # every rank computes as under ddp: equal to the last bit
    compiled: dict[str, int | str] = field(default_factory=dict)  # see test_once.compile_at_once


class KeepLosses(L.Callback):
    """The loss of each batch, averaged over ranks; where a step returns none, what it logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = [outputs["loss"]] if outputs else list(trainer.callback_metrics.values())
        self.losses += [mean_over_ranks(leaf.detach()) for leaf in tree_leaves(found)]


def run_program(program: Program, strategy: Strategy) -> Run:
    """Run `program` on this rank, seeded; an exception is told in `error`."""
    run, keeper = Run(), KeepLosses()
    L.seed_everything(SEED, verbose=False)
    try:
        module, data = program.make()
        options: dict[str, Any] = {"limit_val_batches": 0, **program.options}
        callbacks = [keeper, *options.pop("callbacks", ())]
        trainer = make_trainer(
            strategy, devices=dist.get_world_size(), callbacks=callbacks, **options
        )
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            datamodule = isinstance(data, L.LightningDataModule)
            trainer.fit(
                module, **({"datamodule": data} if datamodule else {"train_dataloaders": data})
            )
        run.losses = keeper.losses
        run.state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    plan = getattr(strategy, "parallel_plan", None)
    if plan is not None:
        run.plan = plan.summary()
        run.level = max(block.config.storage.level for block in plan.blocks)
        run.is_plain = is_ddp(plan)
    run.compiled = getattr(strategy, "compiled_blocks", {})
    run.is_plain = run.is_plain and not run.compiled
    return run


def is_ddp(plan: ParallelPlan) -> bool:
    """Whether every rank computes as under DDP."""
    blocks = [block.config for block in plan.blocks]
    plain = not any(config.storage.level or config.recompute for config in blocks)
    return plain and plan.mesh.data_parallel_size == plan.mesh.size


def differences(one: Run, two: Run, *, exactly: bool) -> list[str]:
    """How `two` differs from `one`, in words, beyond float32's reordering unless `exactly`."""
    if one.error or two.error:
        return [error for error in (one.error, two.error) if error]
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    found = []
    losses = torch.tensor(one.losses), torch.tensor(two.losses)
    if losses[0].shape != losses[1].shape or not torch.allclose(*losses, **tolerance):
        found.append(f"losses {one.losses} against {two.losses}")
    if one.state.keys() != two.state.keys():
        found.append(f"names {sorted(one.state.keys() ^ two.state.keys())}")
    for name in one.state.keys() & two.state.keys():
        if not torch.allclose(
            one.state[name].double(), two.state[name].double(), equal_nan=True, **tolerance
        ):
            found.append(f"{name} differs")
    return found


def ddp_strategy(program: Program) -> Strategy:
    return DDPStrategy(find_unused_parameters=program.find_unused)


def topt_strategy(program: Program, **options: Any) -> Strategy:
    unused = {"find_unused_parameters": True} if program.find_unused else {}
    return AutoParallelStrategy(**options, **unused)


@dataclass
class Outcome:
    """One program under ddp and under another strategy, on one rank."""

    name: str
    differences: list[str]
    ddp: Run
    topt: Run
