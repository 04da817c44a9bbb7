"""Runs programs of the shelf on ranks, under any strategy, and says how two runs differ."""

from __future__ import annotations

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
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
from tests.foreign.shelf import PROGRAMS, Program
from tests.launch import run_ranks
from tests.plugins.trainer_ranks import _as_torchrun, make_trainer, mean_over_ranks

CLUSTER = yaml.safe_load(
    (Path(__file__).parents[2] / "conf" / "cluster" / "local_cpu.yaml").read_text()
)
# These models are small beside what a process takes: what a plan saves would be less than the
# prediction's error.
CLUSTER["device"]["process_bytes"] = 0
SEED = 11
STEPS = 7  # the plan that a search found takes over after the third


@dataclass
class Run:
    """What one run of a program left: losses of its steps, the module's state, and how it was
    planned.
    """

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    plan: str = "ddp"
    is_plain: bool = True  # every rank computes as under ddp: equal to the last bit
    planned_by: str = ""
    planning_seconds: float = 0.0
    seconds: float = 0.0


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
    """Run `STEPS` batches of `program` on this rank, seeded; an exception is told in `error`."""
    run, keeper, start = Run(), KeepLosses(), time.perf_counter()
    L.seed_everything(SEED, verbose=False)
    try:
        module, data = program.make()
        options: dict[str, Any] = {
            "limit_train_batches": STEPS,
            "limit_val_batches": 0,
            **program.options,
        }
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
    run.seconds = time.perf_counter() - start
    plan = getattr(strategy, "parallel_plan", None)
    if plan is not None:
        run.plan, run.planned_by = plan.summary(), getattr(strategy, "planned_by", "")
        plain = (
            block.config.storage.level == 0 and not block.config.recompute for block in plan.blocks
        )
        run.is_plain = not plan.mesh.tensor_axes and all(plain)
        run.planning_seconds = strategy.planning_seconds or 0.0  # type: ignore[attr-defined]
    return run


def differences(one: Run, two: Run, *, exactly: bool) -> list[str]:
    """How `two` differs from `one`, in words; [] where losses and states are equal (within
    float32's reordering).
    """
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


def least_memory_strategy(program: Program) -> Strategy:
    """The plan of least memory on a known cluster: it is another than ddp where it can.

    It takes over after the watched steps.
    """
    return topt_strategy(program, objective="memory", cluster=CLUSTER)


@dataclass
class Outcome:
    """One program under ddp and under another strategy, on one rank."""

    name: str
    differences: list[str]
    ddp: Run
    topt: Run


Strategies = Sequence[Callable[[Program], Strategy]]


def compare_on_this_rank(
    rank: int, names: Sequence[str], strategies: Strategies
) -> list[list[Outcome]]:
    """Run each program under ddp and under each of `strategies`; an outcome for each program and
    strategy.

    A failure on one rank only would leave the other waiting, and ends with its time-out.
    """
    # Ranks are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    outcomes = []
    for program in (PROGRAMS[name] for name in names):
        expected = run_program(program, ddp_strategy(program))
        runs = [run_program(program, strategy(program)) for strategy in strategies]
        told = [differences(expected, run, exactly=run.is_plain) for run in runs]
        outcomes.append(
            [
                Outcome(program.name, found, expected, run)
                for found, run in zip(told, runs, strict=True)
            ]
        )
        for run in (expected, *runs):
            run.state = {}
    return outcomes


def compare(
    names: Sequence[str], strategies: Strategies, *, timeout_seconds: float = 240
) -> list[list[Outcome]]:
    """For each strategy the outcomes of all programs on both of 2 ranks, which are started once."""
    arguments = (compare_on_this_rank, 2, (list(names), strategies))
    ranks = run_ranks(_as_torchrun, 2, *arguments, timeout_seconds=timeout_seconds)
    return [
        [program[index] for rank in ranks for program in rank] for index in range(len(strategies))
    ]
