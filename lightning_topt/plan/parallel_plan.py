"""`ParallelPlan`, the narrow waist between search and execution.

Search returns it, the engine runs it. It is complete, saved as readable YAML with every checkpoint,
and a plan written by hand runs too:

    plan = ParallelPlan.load("plan.yaml")
    plan = uniform_plan(1, data_parallel_size=4)
    plan.summary()                                  # "1 x ZeRO-1"

Its parts and their plain values are in `plan.plan_values`; here are the plan itself, its entries in
files, and the checks that its parts belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod
from lightning_topt.costs.plain_values import (
    ValueReader,
    anything,
    dump_yaml,
    list_of,
    one_line,
    parse_yaml,
    read_entries,
    read_text,
    shown,
    text,
    truth,
    whole,
    write_text,
)
from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.plan_values import (
    PRESETS,
    BlockPlan,
    Preset,
    StagePlan,
    StepEstimate,
    config_to_dict,
    describe_config,
    mesh_to_list,
    read_estimate,
    read_exchange,
    read_given_exchange,
    read_given_local_steps,
    read_local_steps,
    read_mesh,
    stage_reader,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.weight_prediction.rules import Prediction as WeightPrediction
from lightning_topt.weight_prediction.rules import make_prediction, prediction_to_value

if TYPE_CHECKING:
    from lightning_topt.graph.op_graph import OpGraph

__all__ = [
    "BlockPlan",
    "ParallelPlan",
    "PlanError",
    "StagePlan",
    "StepEstimate",
    "preset_plan",
    "uniform_plan",
]
VERSION = 2
T = TypeVar("T")


@dataclass(frozen=True)
class ParallelPlan:
    """A whole model's plan: the mesh of ranks, and how each block is placed on its axes.

    A plan says what is to run. Whether a release can run it is asked of the techniques
    (`techniques.registry`).

    Stages are numbered along the forward pass, as many on each rank along the axis "pipeline";
    which of them a rank runs is the schedule's. A named block is in one stage. The block ``""`` may
    be in several, which place it alike.

    Args:
        mesh: the axes of ranks.
        stages: what the stages of the pipeline run; one without a pipeline.
        model, fingerprint: the model that it was made for (`OpGraph.fingerprint`). None in a plan
            written by hand means "any model that has these modules".
        batch_size: samples per rank, of one micro-batch where a step has several.
        cluster: name of the cluster that it was made for.
        predicted: expected costs, for people.
        reason: why it was chosen, for people.
        gradient_exchange: for gradients that every rank has unsharded; None: an all-reduce.
        num_microbatches: with a schedule, the parts that a rank's batch is cut into. Without one,
            the batches that the ranks of a tensor group run in a step, one after the other: 1, a
            batch that all of them get, or as many as they are, the batch of each rank.
        schedule: name of the pipeline schedule (`schedules`) of a plan with stages; None without.
        own_batches: with a schedule, each rank of a pipeline brings a batch, and each of these is
            one microbatch.
        prediction: with a schedule that never flushes, the rule for the weights of its passes: its
            name, or ``{"rule": name, option: value}``. None: the default one of the optimizer.
        gradient_views: unsharded gradients are views of DDP's buckets (`gradient_as_bucket_view`),
            which saves a copy of them. An optimizer that keeps gradients of an earlier step then
            finds the new ones there.
        float32_gathers: under precision ``bf16-mixed`` and ``16-mixed``, the float32 matrices in
            shards that are gathered so, by name: all others are gathered in 16 bits. True: all are.
            False: a fit asks the step that it traces (`gathering`); without one all are.
        accumulate: micro-batches of a step whose gradients are added up, of which the prediction is
            (`accumulate_grad_batches` of the Trainer).
        local_steps: data ranks train alone, and meet as it says once in many
            steps; None: gradients are averaged in every step.

    Raises:
        PlanError: a placement does not have as many axes as the mesh; the block ``""`` is missing;
            stages, schedule, microbatches and mesh do not belong together; or a plan cannot fix the
            gradient exchange.
    """

    mesh: Mesh
    stages: tuple[StagePlan, ...]
    model: str = ""
    fingerprint: str | None = None
    batch_size: int | None = None
    cluster: str = ""
    predicted: StepEstimate | None = None
    reason: str = field(default="", compare=False)
    gradient_exchange: GradientMethod | None = None
    num_microbatches: int = 1
    schedule: str | None = None
    own_batches: bool = False
    prediction: WeightPrediction | str | Mapping[str, Any] | None = None  # kept as a rule
    gradient_views: bool = False
    float32_gathers: bool | tuple[str, ...] = False
    accumulate: int = 1
    local_steps: LocalMethod | None = None

    def __post_init__(self) -> None:
        # a rule that is given by name becomes the rule, so that plans that mean the same are equal
        object.__setattr__(self, "prediction", rule_from_value(self.prediction))
        if not self.stages:
            raise PlanError("a plan has at least one stage")
        if "" not in self.configs:
            raise PlanError('the plan lacks the block "" (everything outside the named blocks)')
        # Blocks share few configurations: each is checked once, with the last block that has it.
        for name, config in {id(c): (name, c) for name, c in self.configs.items()}.values():
            placed = [config.storage.parameters, *config.placed()]
            if any(len(placements) != len(self.mesh.axes) for placements in placed):
                raise PlanError(
                    f"block {shown(name)} must be placed along each of the axes "
                    f"{', '.join(self.mesh.names)} of the mesh"
                )

        # stages, schedule and mesh; then what only some plans have
        _check_stages(self)
        _check_continuous(self)
        if self.gradient_views:
            _check_views(self)
        if self.float32_gathers is not False and not self._gathers:
            raise PlanError(
                "float32_gathers is for parameters in shards (ZeRO levels 2 and 3), of which this "
                "plan has none: leave it out"
            )
        # without stages, ranks of a tensor group run one batch, or one of each of them
        ranks = self.mesh.ranks_along(self.mesh.tensor_axes)
        if self.schedule is None and self.num_microbatches not in (1, ranks):
            raise PlanError(
                f"num_microbatches is 1, or the ranks along tensor axes, {ranks}; got "
                f"{self.num_microbatches}"
            )
        if self.schedule is None and self.num_microbatches > 1:
            _check_own_batches(self)
        # an exchange that cannot be made is refused with the plan, before any rank runs
        if self.gradient_exchange is not None:
            try:
                read_exchange(self.gradient_exchange)
            except ValueError as error:
                raise PlanError(f"gradient_exchange: {error}") from error
        if self.local_steps is not None:
            _check_local_steps(self)

    @classmethod
    def of_blocks(
        cls, blocks: Sequence[BlockPlan], *, mesh: Mesh | int, **rest: Any
    ) -> ParallelPlan:
        """Return a plan of one stage.

        `mesh` may be the number of ranks of one data axis; `rest` are further fields of the class.
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
        # "" may be in several stages, which place it alike: the first of them speaks for all
        for block in (block for stage in self.stages for block in stage.blocks):
            found.setdefault(block.block, block.config)
        return found

    def check_world_size(self, world_size: int) -> None:
        """Raise PlanError unless the plan is for `world_size` ranks."""
        if self.mesh.size != world_size:
            raise PlanError(
                f"the plan is for {self.mesh.size} ranks, this run has {world_size}; start "
                f"{self.mesh.size} ranks (devices x num_nodes) or make a plan for {world_size}"
            )

    def check_model(self, name: str, fingerprint: str) -> None:
        """Raise PlanError unless the plan is for the model of that class name and fingerprint."""
        if self.fingerprint not in (None, fingerprint):
            raise PlanError(
                f"the plan was made for another model ({self.model or 'of another kind'}): class "
                f"name, parameter names, shapes or dtypes of this {name} differ. Make a new plan, "
                "or remove 'fingerprint' from the plan to run it all the same"
            )

    @cached_property
    def _gathers(self) -> bool:
        return any(config.storage.level >= 2 for config in self.configs.values())

    @property
    def leaves_gathers(self) -> bool:
        """Whether the step of a fit says which parameters are gathered in 16 bits."""
        return self.float32_gathers is False and self._gathers

    def gathering(self, graph: OpGraph) -> ParallelPlan:
        """Return the plan that gathers in 16 bits what the step `graph` uses so."""
        if not self.leaves_gathers or not graph.narrow_parameters:
            return self
        matrices = (p for p in graph.parameters if len(p.shape) > 1 and p.dtype == "float32")
        return dataclasses.replace(
            self, float32_gathers=tuple(p.name for p in matrices if not p.narrow)
        )

    @property
    def weight_prediction(self) -> WeightPrediction | None:
        """The rule for the weights of passes, if the plan names one.

        None: the default one of the optimizer, or none at all with a schedule that flushes.
        """
        assert self.prediction is None or isinstance(self.prediction, WeightPrediction)
        return self.prediction

    @property
    def in_flight(self) -> int:
        """Minibatches between the passes of the first stage; 0 where pipelines flush."""
        return (len(self.stages) - 1) * CONTINUOUS_SCHEDULES.get(self.schedule or "", 0)

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
        """True if ranks along tensor axes or stages bring a batch each, as data ranks do.

        They run these batches together.
        """
        return self.own_batches or (self.schedule is None and self.num_microbatches > 1)

    @property
    def keeps_gradients_whole(self) -> bool:
        """True if every rank has the full gradient of every parameter, as under DDP.

        Under a plan with stages a rank has those of its own stages alone.
        """
        # a rank that has slices or stages has no gradient of the whole model
        cut = bool(self.mesh.tensor_axes or self.mesh.pipeline_axes)
        return not cut and not any(
            config.storage.sharded_axes("gradients") for config in self.configs.values()
        )

    @property
    def saves_memory(self) -> bool:
        """True if the plan trades time for memory: it shards gradients or recomputes."""
        return not self.keeps_gradients_whole or any(
            block.config.recompute for block in self.blocks
        )

    def summary(self) -> str:
        """Return one line for people: how many blocks run in which way, how gradients travel."""
        # blocks of one configuration are counted together, in order of the first of each
        counts: dict[str, int] = {}
        for block in self.blocks:
            name = describe_config(block.config, self.mesh)
            counts[name] = counts.get(name, 0) + 1
        blocks = ", ".join(f"{count} x {name}" for name, count in counts.items())
        # then only what differs from plain data parallelism
        if self.mesh.names != ("data",):
            blocks += f" on {' x '.join(f'{axis.name} {axis.size}' for axis in self.mesh.axes)}"
        if self.schedule is not None:
            rule = "" if self.weight_prediction is None else f", {self.weight_prediction.name}"
            blocks += f", {len(self.stages)} stages ({self.schedule}{rule})"
        if self.num_microbatches > 1:
            blocks += f", {self.num_microbatches} microbatches"
        if self.own_batches:
            blocks += ", the batch of each rank"
        if self.gradient_views:
            blocks += ", gradients as views of buckets"
        if self.float32_gathers is True:
            blocks += ", gathers in float32"
        if self.local_steps is not None:
            return f"{blocks}, {self.local_steps.words}"
        if self.gradient_exchange is None:
            return blocks
        return f"{blocks}, gradients {self.gradient_exchange.words}"

    def to_dict(self, *, stages: bool = True) -> dict[str, Any]:
        """Return plain values, as written to YAML, `run.json` and checkpoints.

        Without `stages`, all but these.
        """
        exchange, rule, mesh = self.gradient_exchange, self.weight_prediction, self.mesh
        count, local = self.num_microbatches, self.local_steps
        # what most plans do not have is left out
        rare = {
            "accumulate": None if self.accumulate == 1 else self.accumulate,
            "gradient_exchange": None if exchange is None else exchange.as_mapping(),
            "local_steps": None if local is None else local.as_mapping(),
            "schedule": self.schedule,
            "num_microbatches": None if count == 1 else count,
            "own_batches": self.own_batches or None,
            "gradient_views": self.gradient_views or None,
            "float32_gathers": None if self.float32_gathers is False else self.float32_gathers,
            "prediction": None if rule is None else prediction_to_value(rule),
        }
        plain: dict[str, Any] = {
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "mesh": mesh_to_list(mesh),
            "batch_size": self.batch_size,
            "cluster": self.cluster,
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "reason": self.reason,
            **{name: value for name, value in rare.items() if value is not None},
        }
        if stages:
            # Many blocks share few configurations: each of these is written once.
            configs = {
                config: config_to_dict(config, mesh) for config in set(self.configs.values())
            }
            plain["stages"] = [
                {"blocks": [{"block": b.block, **configs[b.config]} for b in stage.blocks]}
                for stage in self.stages
            ]
        return plain

    @classmethod
    def from_dict(cls, data: object) -> ParallelPlan:
        """Read what `to_dict` wrote. Raises PlanError that names the wrong entry."""
        try:
            return cls(**_arguments(data))
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
        """Write the plan to a YAML file. Raises PlanError for one that `load` could not read."""
        try:
            write_text(path, self.to_yaml())
        except ValueError as error:
            raise PlanError(
                f"cannot write the plan {shown(str(path))}: {error}; a plan by name, such as "
                "plan=zero3, needs no file"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan file. Raises PlanError that names the file and what is wrong with it."""
        try:
            return cls.from_yaml(read_text(path))
        except (ValueError, OSError) as error:
            raise PlanError(
                f"cannot read the plan {shown(str(path))}: {one_line(error)}"
            ) from error


def uniform_plan(
    level: int,
    *,
    data_parallel_size: int,
    blocks: Sequence[str] = (),
    recompute: Collection[str] = (),
) -> ParallelPlan:
    """Return the plan of one ZeRO `level` over all ranks.

    `blocks` are kept apart from the rest of the model; those in `recompute` are recomputed.
    """
    return preset_plan(
        Preset(level), mesh=data_mesh(data_parallel_size), blocks=blocks, recompute=recompute
    )


def preset_plan(
    preset: Preset,
    *,
    mesh: Mesh,
    blocks: Sequence[str] = (),
    recompute: Collection[str] = (),
    compiled: bool = False,
    is_manual: bool = False,
) -> ParallelPlan:
    """Return the plan that stores everything as `preset` says on `mesh`.

    `blocks` and `recompute` as in `uniform_plan`; `compiled` blocks are all or none. Under manual
    optimization blocks of level 2 have level 3, and the rest keeps whole gradients ([Note: manual
    optimization] in `techniques.fsdp`).
    """
    storage = root = preset.storage(mesh)
    if is_manual and preset.level > 1:
        storage = dataclasses.replace(preset, level=3).storage(mesh)
        root = PRESETS["zero1"].storage(mesh)
    named = tuple(
        BlockPlan(name, OpConfig(storage, recompute=name in recompute, compile=compiled))
        for name in blocks
        if name
    )
    blocks_of_plan = (*named, BlockPlan("", OpConfig(root)))
    return ParallelPlan.of_blocks(blocks_of_plan, mesh=mesh, float32_gathers=preset.float32_gathers)


# ---- entries of a file


def _arguments(data: object) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"a plan is a mapping, got {type(data).__name__}")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"version is {shown(version)}; this release reads plans of version {VERSION}"
        )
    rest = {name: value for name, value in data.items() if name != "version"}
    arguments = read_entries(rest, _READERS, needed=("mesh", "stages"), name="plan")
    read_stages = list_of(stage_reader(arguments["mesh"]))
    return {**arguments, "stages": read_stages(arguments["stages"], name="plan.stages")}


def read_gathers(value: Any, *, name: str) -> bool | tuple[str, ...]:
    """Return `value`, true, false or names. Raises ValueError that names it."""
    return value if isinstance(value, bool) else list_of(text)(value, name=name)


_READERS: dict[str, ValueReader[Any]] = {
    "mesh": read_mesh,
    "stages": anything,  # where the mesh is known
    "model": text,
    "fingerprint": text,
    "batch_size": whole,
    "accumulate": whole,
    "cluster": text,
    "predicted": read_estimate,
    "reason": text,
    "gradient_exchange": read_given_exchange,
    "local_steps": read_given_local_steps,
    "num_microbatches": whole,
    "schedule": text,
    "own_batches": truth,
    "prediction": anything,
    "gradient_views": truth,
    "float32_gathers": read_gathers,
}


def rule_from_value(value: object) -> WeightPrediction | None:
    """Return the rule of weight prediction that a plan names, or has.

    Raises:
        PlanError: there is no such rule.
    """
    if value is None or isinstance(value, WeightPrediction):
        return value
    if not isinstance(value, str | Mapping):
        raise PlanError(
            "prediction is the name of a rule, or a mapping with one under 'rule'; got "
            f"{shown(value)}"
        )
    try:
        return make_prediction(value)
    except (TypeError, ValueError) as error:
        raise PlanError(f"prediction: {one_line(error)}") from error


# ---- what belongs together


def _check_stages(plan: ParallelPlan) -> None:
    # Raise PlanError where stages, schedule, microbatches and mesh do not belong together
    stages, mesh, configs, schedule = plan.stages, plan.mesh, plan.configs, plan.schedule
    num_microbatches, own_batches = plan.num_microbatches, plan.own_batches
    count, ranks = len(stages), mesh.pipeline_size
    # a schedule, stages and the axis "pipeline" are given together, or none of them
    if schedule is None and (count > 1 or mesh.pipeline_axes):
        raise PlanError(
            f"a plan with stages ({count} stages on {ranks} ranks along the axis 'pipeline') needs "
            "a schedule such as 'schedule: 1f1b'"
        )
    if schedule is not None and not mesh.pipeline_axes:
        raise PlanError(
            f"the schedule {schedule!r} needs an axis of the mesh for the stages: {{name: "
            f"pipeline, size: {count}}}"
        )
    # the sizes: stages per rank, microbatches, batches of the ranks
    if count % ranks:
        raise PlanError(
            f"every rank of the pipeline runs equally many stages: {count} stages cannot be "
            f"divided among {ranks} ranks"
        )
    if schedule is not None and num_microbatches < 1:
        raise PlanError(f"num_microbatches is at least 1, got {num_microbatches}")
    if own_batches and mesh.tensor_axes:
        raise PlanError(
            "own_batches: ranks along tensor axes get one batch, so leave it out, or these axes"
        )
    if own_batches and (schedule is None or num_microbatches != ranks):
        raise PlanError(
            "own_batches is for pipelines whose ranks bring one microbatch each: num_microbatches "
            f"is then the ranks along the axis 'pipeline', {ranks}, and there is a schedule; got "
            f"{num_microbatches} and {schedule}"
        )
    # a stage begins at its first named block
    if count > 1 and (
        empty := [s for s, stage in enumerate(stages) if not any(b.block for b in stage.blocks)]
    ):
        raise PlanError(
            f'stages[{empty[0]}] names no block but "", so nothing says where it begins: name one'
        )
    if count == 1:
        return  # each block is there once
    # every named block in one stage; "" placed alike in all
    stage_of: dict[str, int] = {}
    for index, block in (
        (index, block) for index, stage in enumerate(stages) for block in stage.blocks
    ):
        if stage_of.setdefault(block.block, index) != index and block.block:
            raise PlanError(
                f"block {shown(block.block)} is in the stages {stage_of[block.block]} and {index}: "
                "leave it in one"
            )
        if block.config is not configs[block.block] and block.config != configs[block.block]:
            raise PlanError('the block "" stands in several stages, which must place it alike')


def _check_continuous(plan: ParallelPlan) -> None:
    # Raise PlanError for what a schedule without flushes cannot have, or for what needs one
    # under other schedules all passes of a minibatch see one version of the weights
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        if plan.prediction is not None:
            raise PlanError(
                "prediction is for schedules that never flush: leave it out, or choose the "
                f"schedule {' or '.join(CONTINUOUS_SCHEDULES)}; got {plan.schedule}"
            )
        return
    # one stage for each rank, whole minibatches, unsharded weights
    if len(plan.stages) != plan.mesh.pipeline_size:
        raise PlanError(
            f"schedule {plan.schedule!r} runs one stage on each rank: {plan.mesh.pipeline_size} "
            f"stages; got {len(plan.stages)}"
        )
    if plan.num_microbatches != 1 or plan.own_batches:
        raise PlanError(
            f"schedule {plan.schedule!r} does not cut batches: num_microbatches is 1, without "
            f"own_batches; got {plan.num_microbatches}"
        )
    for block in plan.blocks:
        if block.config.storage.level:
            raise PlanError(
                f"block {shown(block.block)} has ZeRO level {block.config.storage.level}, and "
                f"schedule {plan.schedule!r} needs whole weights and optimizer state in every "
                "pass: choose level 0 (ddp)"
            )


def _check_own_batches(plan: ParallelPlan) -> None:
    # Raise PlanError where ranks of a tensor group that bring a batch each shard gradients
    for block, config in plan.configs.items():
        if config.storage.sharded_axes("gradients"):
            raise PlanError(
                f"block {shown(block)} shards gradients, and ranks that bring a batch each "
                "evaluate by themselves, without shards of others: choose ZeRO level 0 or 1, or "
                "leave out num_microbatches"
            )


def _check_views(plan: ParallelPlan) -> None:
    # Raise PlanError where no gradient of the plan is in a bucket of DDP
    several = plan.schedule is not None or plan.num_microbatches > 1
    if several or all(config.storage.sharded_axes("gradients") for config in plan.configs.values()):
        raise PlanError(
            "gradient_views is for gradients that DistributedDataParallel averages (ZeRO levels 0 "
            "and 1, one batch in a step), of which this plan has none: leave it out"
        )


def _check_local_steps(plan: ParallelPlan) -> None:
    # Raise PlanError for what ranks that train alone cannot have
    assert plan.local_steps is not None
    # also of local steps that were given as they are
    try:
        given = read_local_steps(plan.local_steps)
    except ValueError as error:
        raise PlanError(f"local_steps: {error}") from error
    object.__setattr__(plan, "local_steps", given)
    if {*plan.mesh.names} != {"data"} or plan.mesh.data_parallel_size == 1:
        raise PlanError(
            "local_steps are of ranks along one data axis, several of them, and this plan has "
            f"{' x '.join(f'{axis.name} {axis.size}' for axis in plan.mesh.axes)}: leave out "
            "local_steps, or choose another mesh"
        )
    for block, config in plan.configs.items():
        if config.storage.level:
            raise PlanError(
                f"block {shown(block)} has ZeRO level {config.storage.level}, and ranks that train "
                "alone have the whole model and its optimizer: choose level 0 (ddp), or leave out "
                "local_steps"
            )
    if plan.gradient_exchange is not None or plan.gradient_views:
        raise PlanError(
            "ranks that train alone average no gradients: leave out gradient_exchange and "
            "gradient_views, or local_steps"
        )
