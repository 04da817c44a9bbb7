"""What the user asked of the planner, and what that means for the start of a fit.

`PlanRequest` has all options of `AutoParallelStrategy`. It says how a fit begins:

    what is asked                                    how the fit begins
    nothing                                          as under ddp; ranks share the update of
                                                     optimizers where a clock says that it pays
                                                     (`shared_updates`)
    anything else, or a model whose parameters,      the plan is made when the fit is set up, and
    gradients, buckets and optimizer state cannot    applied before optimizers are
    fit under DDP (`needs_plan`)                     (`AutoParallelStrategy.configure_ddp`)

Plans that are searched, have stages, or are given by name for blocks, need a traced step
(`needs_batch`).

What else changes the training needs the user's word, the option `allow`. `Allowed` reads it, checks
a given plan against it, and says what a search may try:

    compression   gradients may travel compressed
    local_steps   ranks may train alone for some steps
    staleness     stages may run without flush
    compile       blocks may run compiled code
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_topt import communication
from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.collectives import check_equal_on_ranks
from lightning_topt.communication.exchange_method import (
    GRADIENT_DTYPES,
    ByNodes,
    GradientMethod,
    LocalMethod,
    read_method,
)
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.accuracy import LEVEL, USUAL_MARGIN, share_at
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measuring import usable_memory_bytes
from lightning_topt.costs.plain_values import shown
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.plan.choose import TIME_TO_LOSS
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, rule_from_value
from lightning_topt.plan.plan_values import read_exchange, read_local_steps
from lightning_topt.plugins.plan_options import (
    GivenPlan,
    MeshPlan,
    PipelinePlan,
    UniformPlan,
    check_planner_options,
    read_cluster,
    read_memory_limit,
    read_plan_option,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.technique import FirstValues
from lightning_topt.weight_prediction import Prediction, TwoVersions, default_prediction

if TYPE_CHECKING:
    from lightning_topt.costs.optimizer import OptimizerProfile
    from lightning_topt.plan.step_factors import StepTable


Allow = None | str | Sequence[str] | Mapping[str, Any]
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # autocast, by precision
SEARCH = "search"  # as a plan: all that keep the loss curve are searched


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked of the planner; see `AutoParallelStrategy`.

    `searches`: all plans that keep the loss curve are searched (``plan="search"``). `own_hook`: the
    user exchanges gradients. `gradients_are_views`: whether they are to be views of DDP's buckets;
    None: where a memory limit is set, as the search finds it best.

    Raises PlanError for a plan whose gradient exchange, or stale weights, are not allowed,
    ValueError where the former would replace the user's, where there is nothing to allow, and for a
    memory limit beside a plan that is not searched.
    """

    memory_limit: float | None = None
    objective: str = "time"
    plan: GivenPlan | None = None
    searches: bool = False
    cluster: Cluster | None = None
    memory_margin: float | None = None
    confidence: float = LEVEL
    equal_within: float | None = None
    only_replicated: bool = False
    allowed: Allowed = field(default_factory=lambda: Allowed())
    own_hook: bool = False
    gradients_are_views: bool | None = None
    first_values: FirstValues = None

    def __post_init__(self) -> None:
        exchange = None
        self.allowed.check_staleness(self.plan)
        if self.memory_limit is not None and _is_fixed(self.plan):
            raise ValueError(
                "memory_limit chooses among plans that are searched, and this plan runs as it is: "
                "leave out memory_limit; or leave out plan, or give a mesh to search on "
                "(plan={'mesh': {'data': 2}})"
            )
        if isinstance(self.plan, ParallelPlan | PipelinePlan):
            exchange = self.plan.gradient_exchange
            self.allowed.check_exchange(self.plan)
        named = self.allowed.changes_exchange
        has_own = isinstance(self.plan, PipelinePlan) and self.plan.gradient_exchange is not None
        if isinstance(self.plan, MeshPlan | PipelinePlan) and named and not has_own:
            raise ValueError(
                "on a given mesh and in a pipeline no exchange is searched: allow neither "
                "compression nor local_steps, or give a pipeline its gradient_exchange"
            )
        if self.own_hook and (exchange is not None or named):
            raise ValueError(
                "a plan's gradient exchange would replace your communication hook: leave out "
                "ddp_comm_hook and mixed_precision, or the plan's gradient_exchange, compression "
                "and local_steps"
            )

    def check_local_steps(self) -> None:
        """Raise ValueError where local steps are searched, and seconds per step are compared."""
        searched = self.plan is None and self.allowed.local_steps
        if searched and self.objective != TIME_TO_LOSS:
            raise ValueError(
                "allow has local_steps: another training, whose steps are nearly always faster and "
                'of which more are needed. Say objective="time_to_loss", which counts these, or '
                "use LocalStepsStrategy"
            )

    def margin_on(self, cluster: Cluster | None) -> float:
        """Return the share that a predicted peak stays below a limit; None: an unknown cluster."""
        if self.memory_margin is not None:
            return self.memory_margin
        if cluster is None:
            return share_at(USUAL_MARGIN, self.confidence)
        return cluster.memory_margin(self.confidence)

    def difference_on(self, cluster: Cluster) -> float | None:
        """Return the share within which plans are equally fast; None: that is not known."""
        if self.equal_within is not None:
            return self.equal_within
        known = None if cluster.accuracy is None else cluster.accuracy.difference
        return None if known is None else known.median

    @property
    def asks_nothing(self) -> bool:
        """Whether a fit begins as under ddp, and decides from a clock."""
        return (
            self.plan is None
            and not self.searches
            and not self.saves_memory
            and self.cluster is None
            and not self.changes_exchange
            and not self.allowed.staleness
        )

    @property
    def changes_exchange(self) -> bool:
        """Whether a search may choose another exchange of gradients, or local steps."""
        return self.allowed.changes_exchange or self.objective == TIME_TO_LOSS

    @property
    def must_be_planned(self) -> bool:
        """Whether a fit that cannot be planned ends with an error, in place of running as ddp.

        That is where the user asked for what plain DDP may not give.
        """
        return self.plan is not None or self.searches or self.saves_memory

    def room_beside(self, plan: ParallelPlan | None) -> float:
        """Return the bytes that the limit leaves beside what `plan` is predicted to take.

        Infinity where nothing limits them, 0 where as few as can be are wanted.
        """
        if not self.saves_memory:
            return math.inf
        if self.memory_limit is None or plan is None or plan.predicted is None:
            return 0.0
        return self.memory_limit / (1 + self.margin_on(self.cluster)) - plan.predicted.peak_bytes

    @property
    def saves_memory(self) -> bool:
        """Whether plans are compared by what they leave free, not by time alone."""
        return self.memory_limit is not None or self.objective == "memory"

    @property
    def keeps_parameters_whole(self) -> bool:
        """Whether only the exchange is searched: every rank keeps the user's parameters."""
        return (
            self.plan is None
            and self.changes_exchange
            and not (self.searches or self.saves_memory or self.cluster is not None)
        )

    @property
    def gradient_views(self) -> tuple[bool, ...]:
        """Which a search may choose: whether gradients are views of DDP's buckets."""
        if self.gradients_are_views is not None:
            return (self.gradients_are_views,)
        return (False, True) if self.saves_memory else (False,)

    @property
    def is_by_block(self) -> bool:
        """Whether the plan was given by name and depends on which blocks there are."""
        return isinstance(self.plan, UniformPlan) and (
            self.plan.preset.level >= 2 or self.plan.recompute or self.plan.compile
        )

    @property
    def needs_batch(self) -> bool:
        """Whether the plan depends on how a training step runs."""
        given = self.plan
        if isinstance(given, ParallelPlan):
            return given.schedule is not None or given.brings_batches or given.leaves_gathers
        return given is None or self.is_by_block or isinstance(given, MeshPlan | PipelinePlan)

    def bytes_under_ddp(self, module: nn.Module) -> int:
        """Return the bytes of parameters and, of those that train, what DDP and Adam keep beside.

        That is a gradient, its place in a bucket, and two moments. Activations come on top.
        """
        parameters = [*module.parameters()]
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        return sum(p.nbytes for p in parameters) + (3 + (not self.gradients_are_views)) * trained


def read_request(
    *,
    memory_limit: int | float | str | None,
    objective: str | None,
    plan: ParallelPlan | PipelinePlan | Mapping[str, Any] | str | Path | None,
    cluster: Cluster | Mapping[str, Any] | str | Path | None,
    memory_margin: float | None,
    confidence: float,
    equal_within: float | None,
    allow: Allow,
    first_values: FirstValues,
    ddp_kwargs: Mapping[str, Any],
    has_hook: bool,
) -> PlanRequest:
    """Return the request of the options of `AutoParallelStrategy`. Raises ValueError, PlanError.

    `ddp_kwargs` are those of DistributedDataParallel, of which `has_hook` is a communication hook.
    """
    check_planner_options(
        memory_margin=memory_margin,
        confidence=confidence,
        equal_within=equal_within,
        objective="time" if objective is None else objective,
    )
    searches = isinstance(plan, str) and plan == SEARCH
    given = None if searches else read_plan_option(plan)
    if objective == "memory" and memory_limit is None and _is_fixed(given):
        rank_zero_warn(
            "topt: objective='memory' chooses among plans that are searched, and this plan runs as "
            "it is: freed memory is given back to the system, and that is all. For the plan of "
            "least memory leave out plan, or give a mesh to search on (plan={'mesh': {'data': 2}})"
        )
    return PlanRequest(
        memory_limit=read_memory_limit(memory_limit),
        objective=objective or "time",
        plan=given,
        searches=searches,
        cluster=read_cluster(cluster),
        memory_margin=memory_margin,
        confidence=confidence,
        equal_within=equal_within,
        only_replicated=bool(ddp_kwargs) or has_hook,
        allowed=Allowed.read(allow),
        own_hook=has_hook or ddp_kwargs.get("mixed_precision") is not None,
        gradients_are_views=ddp_kwargs.get("gradient_as_bucket_view"),
        first_values=first_values,
    )


def needs_plan(
    request: PlanRequest, module: pl.LightningModule, device: torch.device, *, ranks: int
) -> bool:
    """Return whether this fit needs a plan: it was asked for, or `module` does not fit under DDP.

    `ranks` are those of a machine. Raises ValueError on every rank where versions, options or the
    model differ. A collective call, before the module gets to `device`.
    """
    needed = request.bytes_under_ddp(module)
    # What must be equal: else plans, or shapes of exchanged tensors, differ.
    mine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "options of the strategy": repr(request),
    }
    for name, parameter in module.named_parameters():
        mine[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype}"
    more = [needed > usable_memory_bytes(device, ranks=ranks)]
    (is_full,) = check_equal_on_ranks(mine, of="set-up", more=more)
    if not (request.asks_nothing and is_full):
        return not request.asks_nothing
    text = (
        "topt: parameters, gradients, DDP's buckets and two moments of Adam take "
        f"{needed / 2**30:.2f} GiB, which is more than a rank may use"
    )
    rank_zero_info(f"{text}: a plan is searched, as strategy='topt_full' does")
    return True


def check_values(module: nn.Module, *, is_planned: bool, is_given: bool = False) -> None:
    """Raise PlanError where `module` has no values, or is in shards, when a fit begins or another.

    `is_planned`: a plan gives it values. `is_given`: those of files, which are for no other module.
    """
    if any(hasattr(part, "_is_fsdp_managed_module") for part in module.modules()):
        raise PlanError(
            "the model is in shards already, of a fit before (or by fully_shard): make it anew, "
            "and give the checkpoint of that fit as ckpt_path"
        )
    if is_given and not is_on_meta(module):
        raise PlanError(
            "first_values is for a model on the meta device, and this one has values: make it "
            "there in configure_model, or leave out first_values"
        )
    if not is_planned and is_on_meta(module):
        raise PlanError(
            "the model is on the meta device: a plan of data axes gives it values in a fit "
            "or an evaluation that asks for one (plan='zero3', memory_limit=...) and whose ranks "
            "are no forks (start_method='popen'); others need a model with values"
        )


def _is_fixed(plan: GivenPlan | None) -> bool:
    # Whether nothing is searched for `plan`: no prediction of it meets a memory limit
    return isinstance(plan, ParallelPlan | UniformPlan) or (
        isinstance(plan, MeshPlan) and bool(plan.preset)
    )


# ---- what a fit may change -----------------------------------------------------------------------


def default_candidates() -> tuple[GradientMethod, ...]:
    """Return what is searched where the user names no exchange."""
    top_k = communication.TopK  # imported here, by its first use
    return top_k(), top_k(density=None, bits=2), communication.BF16()


@dataclass(frozen=True)
class Allowed:
    """What a fit may change beyond speed and memory, one entry for each name of `CHANGES`.

    `is_given` says whether the user said anything. If not, and the time to a loss is the objective,
    all is searched that the table of step factors knows of the run's optimizer and ranks.

    Args:
        compression: gradient exchanges that are searched beside plain gradients, and that given
            plans may have. True: those of `default_candidates` that hold for the module's optimizer
            are searched, and given plans may have any.
        local_steps: the same of local steps, searched where the time to a loss is the objective.
            True: those of the table are searched.
        staleness: whether stages may run without flush; a rule: with this one for their weights.
        compile: whether blocks may run compiled code, where a trial says that it is faster.
    """

    compression: Literal[True] | tuple[GradientMethod, ...] = ()
    local_steps: Literal[True] | tuple[LocalMethod, ...] = ()
    staleness: bool | Prediction = False
    compile: bool = False
    is_given: bool = True

    @classmethod
    def read(cls, allow: Allow) -> Allowed:
        """Read the option `allow`: None, a name, a list of names, or names with their options.

        Raises ValueError for a name that there is not, and one that shows a wrong option.
        """
        if allow is None:
            return cls(is_given=False)
        named = [(name, True) for name in _listed(allow)]
        found = {}
        for name, option in allow.items() if isinstance(allow, Mapping) else named:
            reader = CHANGES[check_choice(name, name="an entry of allow", allowed=CHANGES)]
            try:
                if option:  # others, such as False, allow nothing
                    found[name] = option is True or reader(option)
            except ValueError as error:
                raise ValueError(f"allow={shown({name: option})}: {error}") from error
        return cls(**found)

    @property
    def changes_exchange(self) -> bool:
        """Whether gradients may be exchanged in another way, or ranks train alone."""
        return bool(self.compression or self.local_steps)

    @property
    def rule(self) -> Prediction | None:
        """The rule for stale weights; None: the optimizer's default."""
        return self.staleness if isinstance(self.staleness, Prediction) else None

    def held(self, optimizer: OptimizerProfile, *, steps: float) -> tuple[GradientMethod, ...]:
        """Return the gradient exchanges to search for a training of so many `steps`.

        Messages say which are left out, and what others need.
        """
        if self.compression is not True:
            return self.compression
        candidates = default_candidates()
        if not optimizer.adaptive:
            return candidates
        # Methods are known to hold under Adam from some number of steps on.
        held = tuple(
            m for m in candidates if m.steps_under_adam is not None and m.steps_under_adam <= steps
        )
        for method in candidates:
            if method not in held:
                least = method.steps_under_adam
                plain = type(method)().as_mapping()
                options = {k: v for k, v in method.as_mapping().items() if v != plain[k]}
                asked = {"method": method.name, **options} if options else method.name
                which = "training" if least is None else f"fewer than {least} steps"
                rank_zero_info(
                    f"topt: {method.words} was not searched: {which} with {optimizer.name} may end "
                    "worse under it (docs/concepts/compression_quality.md): "
                    f"allow={{'compression': [{asked!r}]}} searches it all the same"
                )
            elif needs := method.needs_under_adam:
                rank_zero_info(
                    f"topt: {method.words} is searched; {optimizer.name} needs {needs} "
                    "(docs/concepts/compression_quality.md)"
                )
        return held

    def check_exchange(self, plan: ParallelPlan | PipelinePlan) -> None:
        """Raise PlanError where `plan` compresses gradients in a way that is not allowed.

        Also where its ranks train alone.
        """
        exchange = plan.gradient_exchange
        local = plan.local_steps if isinstance(plan, ParallelPlan) else None
        for method, name, allowed, does, entry in (
            (
                None if exchange is None or exchange.is_exact else exchange,
                "compression",
                self.compression,
                "this plan sends gradients compressed",
                "gradient_exchange",
            ),
            (
                local,
                "local_steps",
                self.local_steps,
                "the ranks of this plan train alone",
                "local_steps",
            ),
        ):
            if method and allowed is not True and method.name not in [m.name for m in allowed]:
                raise PlanError(
                    f"{does} ({method.words}), which changes the training. To run it, say "
                    f"allow={name!r}, or {{{name!r}: [{method.name!r}]}}; or remove {entry} from "
                    "the plan"
                )

    def check_staleness(self, plan: GivenPlan | None) -> None:
        """Raise PlanError for a plan without flush where that is not allowed.

        ValueError where nothing is left to be allowed.
        """
        # What is not allowed.
        schedule = plan.schedule if isinstance(plan, ParallelPlan | PipelinePlan) else None
        if schedule in CONTINUOUS_SCHEDULES and not self.staleness:
            raise PlanError(
                f"this plan's stages never wait for an update (schedule {schedule!r}), and compute "
                "with weights that miss some, which changes the training. To run it, say "
                "allow='staleness'; or choose another schedule"
            )
        if not self.staleness or plan is None:
            return
        # What is allowed, but excluded by the plan.
        if isinstance(plan, PipelinePlan) and schedule in (None, *CONTINUOUS_SCHEDULES):
            if dict(plan.sizes or ()).get("tensor", 1) > 1:
                raise ValueError(
                    f"the search takes the schedules {' and '.join(CONTINUOUS_SCHEDULES)} beside "
                    "an axis 'data' alone: leave out the axis 'tensor', or staleness in allow"
                )
            return
        if not isinstance(plan, ParallelPlan) or schedule not in CONTINUOUS_SCHEDULES:
            named = "the mesh" if isinstance(plan, MeshPlan) else "the plan"
            raise ValueError(
                f"staleness in allow is for the schedules {' and '.join(CONTINUOUS_SCHEDULES)}, "
                f"which {named} excludes: leave out one of them"
            )
        # Two rules that contradict each other.
        own = plan.weight_prediction
        if self.rule is not None and own is not None and own != self.rule:
            raise ValueError(
                f"the plan predicts weights by {own.name!r}, and allow names another rule: say "
                "allow='staleness', or change the plan's prediction"
            )


def _listed(value: Any) -> Sequence[Any]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return value if several else [value]


def _read_methods(name: str, option: Any) -> tuple[Any, ...]:
    # The methods that an option names, in any of the forms of `read_method`
    methods = [*map(read_method, _listed(option))]
    for method in methods:
        place = "local_steps" if isinstance(method, LocalMethod) else "compression"
        if place != name:
            raise ValueError(f"{method.name} belongs under {place!r}")
    read = read_local_steps if name == "local_steps" else read_exchange
    return tuple(dict.fromkeys(map(read, methods)))


def _only_true(option: Any) -> Any:
    raise ValueError(f"it is True or False, got {shown(option)}")


# What `allow` may name, and how options but True are read; the fields of `Allowed`.
CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "compression": partial(_read_methods, "compression"),
    "local_steps": partial(_read_methods, "local_steps"),
    "staleness": rule_from_value,
    "compile": _only_true,
}


# ---- gradient exchanges and local steps ----------------------------------------------------------


def ways_of_run(
    request: PlanRequest, trainer: pl.Trainer, optimizer: OptimizerProfile, *, ranks: int
) -> tuple[list[GradientMethod], list[LocalMethod]]:
    """Return the gradient exchanges, and the local steps, to search for this run.

    The run's own nodes count, not those in the description of its cluster.
    """
    if any(
        p.requires_grad and p.dtype not in GRADIENT_DTYPES
        for p in trainer.lightning_module.parameters()
    ):
        return [], []
    exchanges, local_steps = allowed_ways(request, trainer, optimizer, ranks=[ranks])
    if local_steps and (reason := why_not_alone(request, trainer)):
        rank_zero_info(f"topt: plans with local steps are left out: {reason}")
        local_steps = []
    if trainer.num_nodes > 1:
        return exchanges, local_steps
    # What between nodes is for is not searched on one.
    one_node = Topology(1, 2, 0)  # how many ranks it has decides nothing
    of_node = itertools.chain.from_iterable(method.choices(one_node) for method in exchanges)
    return [*of_node], local_steps


def allowed_ways(
    request: PlanRequest,
    trainer: pl.Trainer,
    optimizer: OptimizerProfile,
    *,
    ranks: Collection[int],
) -> tuple[list[GradientMethod], list[LocalMethod]]:
    """Return the exchanges and local steps that the user allows, on any of these numbers of ranks.

    Raises ValueError for local steps where seconds per step are compared.
    """
    request.check_local_steps()
    exchanges = request.allowed.held(optimizer, steps=steps_of_fit(trainer))
    local_steps = request.allowed.local_steps
    is_open = request.objective == TIME_TO_LOSS and not request.allowed.is_given
    if local_steps is True or (is_open and not request.own_hook):
        known = step_table_of(trainer).methods(optimizer.name, ranks=ranks)
        local_steps = tuple(method for method in known if isinstance(method, LocalMethod))
        if is_open:
            exchanges = tuple(method for method in known if isinstance(method, GradientMethod))
    return [*exchanges], [*local_steps]


def step_table_of(trainer: pl.Trainer) -> StepTable:
    """Return the steps that ways of training need, also what was measured of this module."""
    # it imports the search, which fits with a plan do not need
    from lightning_topt.plan import step_factors  # noqa: PLC0415

    module = trainer.lightning_module
    parameters = sum(parameter.numel() for parameter in module.parameters())
    model = step_factors.model_words(type(module).__name__, parameters)
    return step_factors.StepTable.of_model(model)


def why_not_alone(request: PlanRequest, trainer: pl.Trainer) -> str | None:
    """Return why the ranks of this run cannot train alone (local steps), as a clause, or None."""
    if request.only_replicated or request.own_hook:
        return (
            "options of DistributedDataParallel were given, and ranks that train alone are in none"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "the GradScaler of precision 16-mixed may skip a step on one rank alone"
    averaging = (StochasticWeightAveraging, WeightAveraging)
    if any(isinstance(each, averaging) for each in trainer.callbacks):  # type: ignore[attr-defined]
        return "a callback averages weights, which differ between ranks from step to step"
    return None


def steps_of_fit(trainer: pl.Trainer) -> float:
    """Return the optimizer's steps of this fit.

    Infinity where nothing ends it, or its data are not there yet.
    """
    if trainer.train_dataloader is None:
        return trainer.max_steps if trainer.max_steps >= 0 else math.inf
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else math.inf


def check_exchange_of_run(plan: ParallelPlan, trainer: pl.Trainer, request: PlanRequest) -> None:
    """Raise PlanError where this run cannot have the exchange of a given plan."""
    exchange, local_steps = plan.gradient_exchange, plan.local_steps
    if local_steps is not None and (reason := why_not_alone(request, trainer)):
        raise PlanError(f"the ranks of this plan train alone, but {reason}: leave out local_steps")
    if exchange is None and local_steps is None:
        return
    if isinstance(exchange, ByNodes) and exchange.hierarchical and trainer.num_nodes == 1:
        raise PlanError(
            "this plan exchanges gradients between nodes (hierarchical), and this Trainer has one: "
            "set num_nodes, or hierarchical: false"
        )
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in GRADIENT_DTYPES:
            raise PlanError(
                "this plan has a gradient exchange, which takes float32, bfloat16 and float16, and "
                f"{name} is {parameter.dtype}: choose another precision, or remove "
                f"{'gradient_exchange' if local_steps is None else 'local_steps'} from the plan"
            )


# ---- continuous pipelines ------------------------------------------------------------------------


def rule_for(
    optimizer: Optimizer,
    prediction: Prediction | None = None,
    *,
    flight: int = 1,
    accumulate: int = 1,
) -> Prediction:
    """Return the rule of weights for an optimizer: `prediction`, else its default.

    The default depends on the minibatches in `flight` behind the first stage, and on how many an
    update takes.

    Raises ValueError where `prediction` does not know the optimizer, or this needs its closure.
    """
    if type(optimizer).__name__ == "LBFGS":
        raise ValueError(
            "LBFGS runs the training step several times per update, which stages that never wait "
            "cannot do: choose another optimizer, or another schedule"
        )
    if prediction is not None:
        prediction.on(optimizer, stage=0, num_stages=2)
        return prediction
    return default_prediction(optimizer, flight=flight, accumulate=accumulate)


def check_flight(plan: ParallelPlan, trainer: pl.Trainer) -> None:
    """Raise PlanError where a rule needs more minibatches in an update than the fit accumulates."""
    rule, flight = plan.weight_prediction, plan.in_flight
    if isinstance(rule, TwoVersions) and trainer.accumulate_grad_batches < flight:
        raise PlanError(
            f"prediction {rule.name!r} needs as many minibatches in an update as are in flight, "
            f"{flight}: set accumulate_grad_batches={flight}, or use prediction 'stash'"
        )


def with_rule(
    plan: ParallelPlan, optimizers: Sequence[Optimizer], allowed: Allowed, *, accumulate: int
) -> ParallelPlan:
    """Return `plan`, a continuous pipeline, with its rule of weights.

    Raises PlanError where none suits.
    """
    if len(optimizers) != 1:
        raise PlanError(
            f"the schedule {plan.schedule!r} updates with one optimizer, and the module has "
            f"{shown(len(optimizers))}"
        )
    try:
        rule = rule_for(
            optimizers[0],
            plan.weight_prediction or allowed.rule,
            flight=plan.in_flight,
            accumulate=accumulate,
        )
        return replace(plan, prediction=rule)
    except ValueError as error:
        raise PlanError(str(error)) from error
