"""ParallelPlan: the narrow waist between search and execution. Complete, readable YAML, and a
hand-written one runs too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.plain_values import (
    dump_yaml,
    one_line,
    parse_yaml,
    read_text,
    shown,
)
from lightning_topt.graph.joint_module import JointModule
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.gradient_exchange import exchange_to_dict, read_exchange
from lightning_topt.plan.legal_stages import check_continuous, rule_from_value
from lightning_topt.plan.plan_checks import check_joint_batches, check_stages, check_views
from lightning_topt.plan.plan_entries import VERSION, plan_entries
from lightning_topt.plan.plan_parts import (
    BlockPlan,
    PlanError,
    Prediction,
    StagePlan,
)
from lightning_topt.plan.plan_values import (
    config_to_dict,
    mesh_to_list,
)
from lightning_topt.plan.presets import Preset, describe_config
from lightning_topt.prediction.rule import Prediction as WeightPrediction
from lightning_topt.prediction.rules import prediction_to_value

__all__ = [
    "BlockPlan",
    "ParallelPlan",
    "PlanError",
    "Prediction",
    "StagePlan",
    "preset_plan",
    "uniform_plan",
]


@dataclass(frozen=True)
class ParallelPlan:
    """A whole model's plan: the mesh of ranks, and how each block is placed on its axes.

    `model` and `fingerprint` say which model it was made for (`OpGraph.fingerprint`; None in a
    hand-written plan means "any model that has these modules"). `batch_size` is per rank.
    `gradient_exchange` is for gradients that are whole on every rank; None: an all-reduce.
    `predicted` and `reason` are for people.

    `schedule` names the pipeline schedule of a plan with stages (`schedules`), None without. Stages
    are numbered along the forward pass, as many on each rank along the axis "pipeline"; which of
    them a rank runs is the schedule's. A named block stands in one stage; the block ``""`` may
    stand in several, which place it alike.

    `num_microbatches`, with a schedule, is the number of parts that a rank's batch is cut into.
    Without one it is the number of batches that the ranks of a tensor group run together in a step,
    one after the other: 1, a batch that all of them get, or as many as they are, the batch of each
    rank. `own_batches`, with a schedule: each rank of a pipeline brings a batch, and each of these
    is one microbatch. `joint` are the modules that run the batches of all ranks of a tensor group
    at once: each of them brings one, and runs all the rest on it alone.

    `prediction`, with a schedule that never flushes, is the rule for the weights of its passes, its
    name or ``{"rule": name, option: value}``; None: the default one of the optimizer.

    `gradient_views`: gradients that are whole are views of DDP's buckets
    (`gradient_as_bucket_view`), which saves a copy of them; an optimizer that keeps gradients of an
    earlier step then finds the new ones there.

    A plan says what is to run; whether a release can run it is asked of the techniques
    (`techniques.registry`). Raises PlanError when a placement does not have as many axes as the
    mesh, the gradient exchange is none that a plan can fix, the block ``""`` is missing, stages,
    schedule and mesh do not belong together, or the microbatches cannot be.
    """

    mesh: Mesh
    stages: tuple[StagePlan, ...]
    model: str = ""
    fingerprint: str | None = None
    batch_size: int | None = None
    cluster: str = ""
    predicted: Prediction | None = None
    reason: str = field(default="", compare=False)
    gradient_exchange: GradientMethod | None = None
    num_microbatches: int = 1
    schedule: str | None = None
    own_batches: bool = False
    joint: tuple[JointModule, ...] = ()
    prediction: WeightPrediction | str | Mapping[str, Any] | None = None
    gradient_views: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prediction", rule_from_value(self.prediction))
        if not self.stages:
            raise PlanError("a plan has at least one stage")
        if "" not in self.configs:
            raise PlanError('the plan lacks the block "" (everything outside the named blocks)')
        for name, config in {
            id(config): (name, config) for name, config in self.configs.items()
        }.values():
            self._check_axes(BlockPlan(name, config))
        rest: dict[str, Any] = {
            "num_microbatches": self.num_microbatches,
            "own_batches": self.own_batches,
        }
        check_stages(self.stages, self.mesh, self.configs, schedule=self.schedule, **rest)
        check_continuous(self)
        if self.gradient_views:
            check_views(self.configs, has_schedule=self.schedule is not None)
        ranks = self.mesh.ranks_along(self.mesh.tensor_axes)
        if self.schedule is None and self.num_microbatches not in (1, ranks):
            raise PlanError(
                f"num_microbatches is 1, or the ranks along tensor axes, {ranks}; got "
                f"{self.num_microbatches}"
            )
        if self.joint:
            has = {
                "has_schedule": self.schedule is not None,
                "has_exchange": self.gradient_exchange is not None,
            }
            check_joint_batches(self.mesh, self.configs, has_turns=self.num_microbatches > 1, **has)
        if self.gradient_exchange is not None:
            try:
                read_exchange(self.gradient_exchange)
            except ValueError as error:
                raise PlanError(f"gradient_exchange: {error}") from error

    def _check_axes(self, block: BlockPlan) -> None:
        config, axes = block.config, len(self.mesh.axes)
        placed = [config.storage.parameters, *config.placed()]
        if any(len(placements) != axes for placements in placed):
            raise PlanError(
                f"block {shown(block.block)} must be placed along each of the axes "
                f"{', '.join(self.mesh.names)} of the mesh"
            )

    @classmethod
    def of_blocks(
        cls, blocks: Sequence[BlockPlan], *, mesh: Mesh | int, **rest: Any
    ) -> ParallelPlan:
        """Return a plan of one stage; `mesh` may be the number of ranks of one data axis. `rest` as
        in the class.
        """
        return cls(
            data_mesh(mesh) if isinstance(mesh, int) else mesh, (StagePlan(tuple(blocks)),), **rest
        )

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The blocks of all stages, each once."""
        return tuple(BlockPlan(name, config) for name, config in self.configs.items())

    @cached_property
    def configs(self) -> dict[str, OpConfig]:
        """The configuration of each block."""
        found: dict[str, OpConfig] = {}
        for block in (block for stage in self.stages for block in stage.blocks):
            found.setdefault(block.block, block.config)
        return found

    @property
    def weight_prediction(self) -> WeightPrediction | None:
        """The rule for the weights of passes; None: the default one of the optimizer, or none with
        steps that wait.
        """
        assert self.prediction is None or isinstance(self.prediction, WeightPrediction)
        return self.prediction

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that each rank of a pipeline runs; 1 without a pipeline."""
        return len(self.stages) // self.mesh.pipeline_size

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts the global batch is split."""
        return self.mesh.data_parallel_size

    @property
    def brings_batches(self) -> bool:
        """Whether ranks along tensor axes or stages bring a batch each, as data ranks do, and run
        these together.
        """
        return (
            self.own_batches
            or bool(self.joint)
            or (self.schedule is None and self.num_microbatches > 1)
        )

    @property
    def keeps_gradients_whole(self) -> bool:
        """Whether every rank holds the whole gradient of every parameter after the backward pass,
        as under DDP.

        Under a plan with stages it holds those of its own stages alone.
        """
        cut = bool(self.mesh.tensor_axes or self.mesh.pipeline_axes)
        return not cut and not any(
            config.storage.sharded_axes("gradients") for config in self.configs.values()
        )

    @property
    def saves_memory(self) -> bool:
        """Whether the plan takes more time than another to hold less: it shards gradients or
        recomputes.
        """
        return not self.keeps_gradients_whole or any(
            block.config.recompute for block in self.blocks
        )

    def summary(self) -> str:
        """Return one line for people: how many blocks run in which way, and how gradients travel if
        not whole as they are.
        """
        counts: dict[str, int] = {}
        for block in self.blocks:
            name = describe_config(block.config, self.mesh)
            counts[name] = counts.get(name, 0) + 1
        blocks = ", ".join(f"{count} x {name}" for name, count in counts.items())
        if self.mesh.names != ("data",):
            blocks += f" on {' x '.join(f'{axis.name} {axis.size}' for axis in self.mesh.axes)}"
        if self.schedule is not None:
            rule = "" if self.weight_prediction is None else f", {self.weight_prediction.name}"
            blocks += f", {len(self.stages)} stages ({self.schedule}{rule})"
        if self.num_microbatches > 1:
            blocks += f", {self.num_microbatches} microbatches"
        if self.own_batches:
            blocks += ", the batch of each rank"
        if self.joint:
            blocks += f", {len(self.joint)} joint modules"
        if self.gradient_views:
            blocks += ", gradients as views of buckets"
        if self.gradient_exchange is None:
            return blocks
        return f"{blocks}, gradients {self.gradient_exchange.words}"

    def to_dict(self, *, stages: bool = True) -> dict[str, Any]:
        """Return plain values, as written to YAML, `run.json` and checkpoints; without `stages` all
        but these.
        """
        exchange, mesh = self.gradient_exchange, self.mesh
        configs = (
            {config: config_to_dict(config, mesh) for config in set(self.configs.values())}
            if stages
            else {}
        )
        return {
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "mesh": mesh_to_list(mesh),
            "batch_size": self.batch_size,
            "cluster": self.cluster,
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "reason": self.reason,
            **({} if exchange is None else {"gradient_exchange": exchange_to_dict(exchange)}),
            **({} if self.schedule is None else {"schedule": self.schedule}),
            **({} if self.num_microbatches == 1 else {"num_microbatches": self.num_microbatches}),
            **({"own_batches": True} if self.own_batches else {}),
            **({"joint": [each.to_dict() for each in self.joint]} if self.joint else {}),
            **({"gradient_views": True} if self.gradient_views else {}),
            **(
                {}
                if (rule := self.weight_prediction) is None
                else {"prediction": prediction_to_value(rule)}
            ),
            **(
                {"stages": [_stage_to_dict(stage, configs) for stage in self.stages]}
                if stages
                else {}
            ),
        }

    @classmethod
    def from_dict(cls, data: Any) -> ParallelPlan:
        """Read what `to_dict` wrote, also in version 1. Raises PlanError that names the wrong
        entry.
        """
        try:
            return cls(**plan_entries(data, known={f.name for f in dataclasses.fields(cls)}))
        except PlanError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise PlanError(one_line(error)) from error

    def to_yaml(self) -> str:
        """Return the plan as YAML text."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str) -> ParallelPlan:
        """Read a plan from YAML text. Raises PlanError that says what is wrong."""
        try:
            return cls.from_dict(parse_yaml(text))
        except ValueError as error:
            raise PlanError(one_line(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        Path(path).write_text(self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan file. Raises PlanError that names the file and what is wrong with it."""
        try:
            return cls.from_yaml(read_text(path))
        except (ValueError, OSError) as error:
            raise PlanError(
                f"cannot read the plan {shown(str(path))}: {one_line(error)}"
            ) from error


def _stage_to_dict(stage: StagePlan, configs: Mapping[OpConfig, dict[str, Any]]) -> dict[str, Any]:
    return {"blocks": [{"block": block.block, **configs[block.config]} for block in stage.blocks]}


def uniform_plan(
    level: int,
    *,
    data_parallel_size: int,
    blocks: Sequence[str] = (),
    recompute: Collection[str] = (),
) -> ParallelPlan:
    """Return the plan of one ZeRO `level` over all ranks; `blocks` are kept apart, those in
    `recompute` recomputed.
    """
    return preset_plan(
        Preset(level), mesh=data_mesh(data_parallel_size), blocks=blocks, recompute=recompute
    )


def preset_plan(
    preset: Preset, *, mesh: Mesh, blocks: Sequence[str] = (), recompute: Collection[str] = ()
) -> ParallelPlan:
    """Return the plan that stores everything as `preset` says on `mesh`; `blocks` and `recompute`
    as in `uniform_plan`.
    """
    storage = preset.storage(mesh)
    named = tuple(
        BlockPlan(name, OpConfig(storage, recompute=name in recompute)) for name in blocks if name
    )
    return ParallelPlan.of_blocks((*named, BlockPlan("", OpConfig(storage))), mesh=mesh)
