"""The user's steps on ranks that run them together, and what such a step leaves on each rank.

Only the last stage of a pipeline gets through ``training_step``. What was returned, logged, printed
and counted there is a `StepRecord`: it is sent to the other ranks, which log and count the same, so
that callbacks find it everywhere. Ranks of a group that bring a batch each exchange records, too.

    StageSteps         runs a step of the module in stages, and shares its record
    StageRunner        what runners of stages have in common, with `StepPasses`
    AgreedBatches      batches that should be equal on all ranks of a pipeline
    recorded_calls     self.log and self.print are recorded, not run; `replay`
    MetricChanges      what metrics have counted; `uncounted`, `apply_metric_changes`
    stashed_gradients  gradients of backward passes that run inside of ``training_step``

[Note: stashed gradients] Lightning's automatic optimization runs ``training_step``, ``zero_grad``,
``backward`` in this order. A pipeline, and a rank that runs the batches of others, are done with
backward when `training_step` returns: ``zero_grad`` would clear what they have computed. So new
gradients are stashed, and come back with the backward pass of the loss that the step returns:

    with stashed_gradients(module) as gradients:  # {parameter: gradient}
        ...  # forward and backward, in any number of passes
    return with_gradients(output, gradients, factor=1.0, device=device)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication.value_exchange import value_of_rank
from lightning_topt.execution.pipeline.stage_pass import replaced_attributes
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.equal_batches import lent
from lightning_topt.plugins.plan_run import Step, StepRunner, evaluating
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES

if TYPE_CHECKING:
    from lightning_topt.execution.engine import Engine

_PLAIN_TRANSFERS = (DataHooks.transfer_batch_to_device, DataHooks.on_after_batch_transfer)
# the contexts of a precision plugin
_CONTEXTS = {
    "training_step": "train",
    "validation_step": "val",
    "test_step": "test",
    "predict_step": "predict",
}
_COMPARED_ELEMENTS = 512  # of each tensor, by `checksum`
RECORDED_METHODS = ("log", "print")
EXTREMES: Mapping[str, Callable[[Sequence[Any]], Any]] = {"max": max, "min": min}
# what a metric has beside its states
_COUNTERS = ("_update_count", "_forward_cache", "_computed")

# by the paths of metrics, and the names of their states
States = dict[str, dict[str, Any]]
M = TypeVar("M", bound=nn.Module)
Found = tuple[Any, "tuple[LoggedCall, ...]"]  # what a step returned, and its calls
Gradients = dict[nn.Parameter, Tensor]


class StageSteps:
    """The steps of `module`, which `engine` runs in stages on `device` as its plan says.

    Made before the plan is applied. Most methods are collective calls.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.engine, self.module = engine, module
        self.precision, self.device = precision, device
        # The ranks of this pipeline, and the one among them that sees losses.
        mesh, groups = engine.plan.mesh, engine.make_stage_groups()
        self.group = groups.pipeline_group
        self.last_place = _place_of_last_stage(engine.plan)
        self.host_group = groups.host_group
        # Ranks of a tensor group run the same batch as well.
        alike, alike_on_host = self.group, self.host_group
        if mesh.tensor_axes:
            parts = mesh.groups_along([*mesh.pipeline_axes, *mesh.tensor_axes])
            alike = groups.own(parts)
            alike_on_host = groups.on_host(parts, alike)
        self._batches = AgreedBatches(alike, alike_on_host, device=device)
        self._transferred: tuple[Any, Any] = (None, None)  # a batch, and what it was on the host

    # ---- batches ---------------------------------------------------------------------------------

    def watch_transfers(self, trainer: pl.Trainer) -> AbstractContextManager[None]:
        """Return a context in which batches are known as they were in memory of the host.

        Not where the user's hooks make what is on the device.
        """
        selector = trainer._data_connector._datahook_selector
        assert selector is not None, "a fit has data"
        hooks = [
            getattr(selector.get_instance(name), name)
            for name in ("transfer_batch_to_device", "on_after_batch_transfer")
        ]
        if any(getattr(hook, "__func__", hook) not in _PLAIN_TRANSFERS for hook in hooks):
            return nullcontext()

        def transfer(own: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
            moved = own(batch, *args, **kwargs)
            self._transferred = moved, batch
            return moved

        return lent(trainer.strategy, "batch_to_device", transfer)

    def on_host(self, batch: Any) -> Any:
        """Return `batch` as it was in memory of the host, where that is known."""
        moved, before = self._transferred
        return before if moved is batch else batch

    def agreed(self, batch: Any) -> Any:
        """Return the batch of all ranks, see `AgreedBatches`."""
        return self._batches.agreed(batch, self.on_host(batch))

    @property
    def batches_differ(self) -> bool:
        """Whether ranks got different batches, and each is sent from the first to the others."""
        return self._batches.differ

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, name: str, model: nn.Module, batch: Any, batch_idx: int | None) -> Any:
        """Return what this step of `model`, the module or a copy of it, returns.

        `batch` is ``(batch, dataloader_idx)``, or without the latter.
        """
        indices = () if batch_idx is None else (batch_idx,)
        with getattr(self.precision, f"{_CONTEXTS[name]}_step_context")():
            return getattr(model, name)(batch[0], *indices, *batch[1:])

    def recorded_step(self, name: str, batch: Any, batch_idx: int | None) -> Found:
        """Return the output of the module's own step, and its calls.

        A step that does not get to its end, as on all stages but the last, counts nothing.
        """
        calls, done = list[LoggedCall](), list[bool]()
        with recorded_calls(self.module, calls), uncounted(self.module, unless=done):
            output = self.engine.whole(self.step(name, self.module, batch, batch_idx))
            done.append(True)
        return output, tuple(calls)

    def evaluate(self, name: str, args: Sequence[Any]) -> Any:
        """Return the output of the module's step `name`, on every rank of the pipeline."""
        with evaluating(self.engine):
            counting = MetricChanges.begin(self.module)
            args = (self.agreed(args[0]), *args[1:])
            batch = (args[0], *args[2:])
            step = EVALUATIONS[name](self, batch, index_in(args))
            self.engine.evaluate(batch, step)
            return self.shared(step.found, counting).output

    def shared(self, found: Found | None, counting: MetricChanges) -> StepRecord:
        """Give all ranks of the pipeline what the last stage found; they log and count it."""
        own = StepRecord() if found is None else StepRecord(*found, counting.since(self.module))
        record: StepRecord = value_of_rank(
            own, self.group, place=self.last_place, device=self.device, host_group=self.host_group
        )
        if found is None:
            apply_metric_changes(self.module, record.counted)
        replay(self.module, record.calls)
        return record

    def loss_scale(self) -> float:
        """Return by what a scaler will multiply the loss.

        Microbatches need that already, and so does the exchange of their gradients.
        """
        scaler, scale = getattr(self.precision, "scaler", None), 1.0
        if scaler is not None and scaler.is_enabled():
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(self.device)
            scale = float(scaler.get_scale())
        if self.engine.exchange is not None:
            self.engine.exchange.loss_scale = scale
        return scale


class StageRunner(StepRunner):
    """Runs one batch on the ranks of a pipeline, by `steps`."""

    engine: Engine

    def __init__(self, steps: StageSteps) -> None:
        self.engine, self._steps, self._module = steps.engine, steps, steps.module
        self._undo = ExitStack()

    @override
    def begin(self, trainer: pl.Trainer) -> None:
        check_microbatches(self.engine)
        self._undo.enter_context(self._steps.watch_transfers(trainer))

    @override
    def close(self, *, failed: bool) -> None:
        self._undo.close()
        if failed:
            self.engine.abort()

    @override
    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._steps.evaluate(name, (*args, *kwargs.values()))


class StepPasses:
    """The passes of one training step on this rank.

    `finished` has what those that reached the end returned and called, by place in `microbatches`.
    """

    def __init__(
        self,
        steps: StageSteps,
        microbatches: Sequence[tuple[Any, ...]] = (),
        weights: Sequence[float] = (),
        *,
        batch_idx: int | None,
    ) -> None:
        self._steps, self._weights, self._batch_idx = steps, weights, batch_idx
        self.microbatches = microbatches
        self._places = {id(microbatch): index for index, microbatch in enumerate(microbatches)}
        self.finished: dict[int, Found] = {}

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch.

        The engine also calls it with copies of the module and of a microbatch, to trace them.
        """
        index = self._places.get(id(microbatch))
        if index is None:
            return loss_in(self._steps.step("training_step", model, microbatch, self._batch_idx))
        output, calls = self._steps.recorded_step("training_step", microbatch, self._batch_idx)
        loss = loss_in(output)
        self.finished[index] = map_tensors(output, Tensor.detach), calls
        # of padding alone: NaN
        return torch.zeros_like(loss) if self._weights[index] == 0 else loss


def check_microbatches(engine: Engine) -> None:
    """Raise PlanError where a microbatch depends on the one before, through a buffer."""
    plan = engine.plan
    if plan.num_microbatches > 1 and (carried := engine.stages.carried_buffers):
        raise PlanError(
            f"training steps change the buffer {carried[0]!r} and compute with it, as "
            "spectral_norm does: in microbatches that would happen once in each, and another "
            "loss be trained than that of the batch; use microbatches=1, or choose a plan "
            "without stages"
        )


def takes_index(module: pl.LightningModule) -> bool:
    """Return whether Lightning gives ``training_step`` the index of the batch."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def index_in(args: Sequence[Any]) -> int | None:
    """Return the index of the batch, where the module's step takes one."""
    return args[1] if len(args) > 1 else None


def _place_of_last_stage(plan: ParallelPlan) -> int:
    # The place along the pipeline of the rank that runs the last stage
    assert plan.schedule is not None
    if plan.schedule in CONTINUOUS_SCHEDULES:
        return plan.mesh.pipeline_size - 1
    rule = SCHEDULES[check_choice(plan.schedule, name="schedule", allowed=SCHEDULES)]
    return rule.rank_of_stage(
        num_ranks=plan.mesh.pipeline_size, stages_per_rank=plan.stages_per_rank
    )[-1]


@dataclass
class _Evaluation:
    """A step forward only; `found` is what it returned and called, where it reached the end."""

    steps: StageSteps
    batch: Any
    batch_idx: int | None
    found: Found | None = None
    name: ClassVar[str] = ""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if batch is not self.batch:  # a copy, which the engine traces
            return self.steps.step(self.name, model, batch, self.batch_idx)
        self.found = self.run()
        return None

    def run(self) -> Found:
        return self.steps.recorded_step(self.name, self.batch, self.batch_idx)


# The engine tells steps apart by their classes.
EVALUATIONS: dict[str, Any] = {
    name: type(name, (_Evaluation,), {"name": name}) for name in _CONTEXTS
}


# ---- batches that should be equal on all ranks of a pipeline -------------------------------------


class AgreedBatches:
    """Batches of the ranks in `group`, which must be equal: those of a pipeline's stages.

    `host_group` has the same ranks on gloo.
    """

    def __init__(
        self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, *, device: torch.device
    ) -> None:
        self._group, self._host_group, self._device = group, host_group, device
        self.differ = self._is_begun = False

    def agreed(self, batch: Any, on_host: Any) -> Any:
        """Return `batch`, or that of the first rank if batches differ now or did before.

        Some elements of each tensor are compared, and texts and numbers: in the first batch those
        on the device, which hooks may have changed, from then on those that it had `on_host`. A
        collective call.
        """
        if not self.differ:
            # One number per rank.
            seen = on_host if self._is_begun else batch
            self._is_begun = self._is_begun or on_host is not batch
            own = torch.tensor([checksum(seen)])
            everyone = own.new_empty(dist.get_world_size(self._host_group))
            of_ranks = list(everyone.split(1))  # views
            dist.all_gather(of_ranks, own, group=self._host_group)
            self.differ = bool((everyone.numpy() != own.numpy()).any())
            if self.differ:
                rank_zero_warn(
                    "topt: the ranks of a pipeline got different batches, so each of these is sent "
                    "from the first rank to the others. That takes time: leave "
                    "use_distributed_sampler=True, or let loaders shuffle, and transforms draw, "
                    "from a generator with the same seed on all ranks"
                )
        if not self.differ:
            return batch
        return value_of_rank(
            batch, self._group, place=0, device=self._device, host_group=self._host_group
        )


def checksum(batch: Any) -> int:
    """Return a number that very likely differs for batches that differ, if only in a shape."""
    found = 0
    for piece in _pieces(batch):
        found = zlib.crc32(piece, found)
    return found


def _pieces(value: Any) -> Iterator[bytes]:
    # Yield the parts of a batch that its checksum is made of
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        if value.layout == torch.strided and value.numel():
            flat = (
                value.detach().reshape(-1)
                if value.is_contiguous()
                else value.detach().contiguous().view(-1)
            )
            # about 512 elements, evenly spread
            sample = flat[:: max(1, len(flat) // _COMPARED_ELEMENTS)].contiguous()
            sample = sample if sample.is_cpu else sample.cpu()
            yield sample.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield repr(name).encode()
            yield from _pieces(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _pieces(entry)
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        yield repr(value).encode()
    elif hasattr(value, "__dict__"):
        yield from _pieces(vars(value))


# ---- records -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRecord:
    """What a step returned, its calls of ``log`` and ``print``, and what its metrics counted."""

    output: Any = None
    calls: tuple[LoggedCall, ...] = ()
    counted: States = field(default_factory=dict)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def loss_in(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned. Raises ValueError where there is none."""
    if (loss := loss_of(output)) is None:
        raise ValueError(
            f"training_step returned no loss but {type(output).__name__} for a batch, which "
            "ranks that run steps together cannot leave out; return a loss, or use another strategy"
        )
    return loss


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return what `training_step` returned with another loss."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


@contextmanager
def as_nonzero_rank() -> Generator[None]:
    """Run as a rank other than 0: what rank 0 alone does is for its own batch."""
    only = cast(Any, rank_zero_only)
    rank = getattr(only, "rank", None)
    only.rank = rank or 1
    try:
        yield
    finally:
        only.rank = rank


# ---- log and print -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoggedCall:
    """A call of ``log`` or ``print`` of the LightningModule at `path`."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> Any:
        """The name that is logged."""
        return self.arguments[0] if self.arguments else self.keywords.get("name")

    @property
    def value(self) -> Any:
        """The value that is logged."""
        return self.arguments[1] if len(self.arguments) > 1 else self.keywords.get("value")

    @property
    def reduction(self) -> str:
        """The name of the ``reduce_fx``: how values of this name are put together."""
        reduction = self.keywords.get("reduce_fx", "mean")
        return str(getattr(reduction, "__name__", reduction))

    @property
    def averages(self) -> bool:
        """Whether a number is logged, of which that is the mean."""
        return self.method == "log" and self.reduction not in ("sum", *EXTREMES)

    def with_value(self, value: Any, *, batch_size: Any) -> LoggedCall:
        """Return this call with another value; and with this `batch_size` unless that is None."""
        keywords = (
            self.keywords if batch_size is None else {**self.keywords, "batch_size": batch_size}
        )
        if len(self.arguments) > 1:
            return replace(
                self, arguments=(self.arguments[0], value, *self.arguments[2:]), keywords=keywords
            )
        return replace(self, keywords={**keywords, "value": value})


@dataclass(frozen=True)
class LoggedMetric:
    """Stands for the metric at `path` in a call; `value` is what its last call has returned."""

    path: str
    value: Any


@contextmanager
def recorded_calls(module: nn.Module, calls: list[LoggedCall] | None) -> Generator[None]:
    """Put the calls of ``log`` and ``print`` of `module` into `calls`; None: drop them."""
    paths = {id(each): path for path, each in _metrics(module).items()}
    recorders = [
        (vars(each), name, _recorder(path, name, calls, paths))
        for path, each in _modules_of(pl.LightningModule, module).items()
        for name in RECORDED_METHODS
    ]
    with replaced_attributes(recorders):
        yield


def _recorder(
    path: str, method: str, calls: list[LoggedCall] | None, paths: Mapping[int, str]
) -> Callable[..., None]:
    # What takes the place of ``log`` or ``print``; `paths`: of metrics, by their ids

    def snapshot(value: Any) -> Any:
        if isinstance(value, Metric) and id(value) in paths:
            return LoggedMetric(paths[id(value)], map_tensors(value._forward_cache, Tensor.detach))
        if isinstance(value, Mapping):
            return {name: snapshot(one) for name, one in value.items()}
        return value.detach().clone() if isinstance(value, Tensor) else value

    def record(*args: Any, **kwargs: Any) -> None:
        if calls is not None:
            keywords = {name: snapshot(one) for name, one in kwargs.items()}
            calls.append(LoggedCall(path, method, tuple(map(snapshot, args)), keywords))

    return record


def replay(module: nn.Module, calls: Sequence[LoggedCall]) -> None:
    """Run recorded calls on this rank's `module`."""

    def with_metrics(value: Any) -> Any:
        if isinstance(value, LoggedMetric):
            metric: Any = module.get_submodule(value.path)
            metric._forward_cache = value.value
            return metric
        if isinstance(value, dict):
            return {name: with_metrics(one) for name, one in value.items()}
        return value

    for call in calls:
        arguments, keywords = map(with_metrics, call.arguments), with_metrics(call.keywords)
        getattr(module.get_submodule(call.path), call.method)(*arguments, **keywords)


# ---- metrics -------------------------------------------------------------------------------------


@contextmanager
def uncounted(module: nn.Module, *, unless: list[bool]) -> Generator[None]:
    """Give the metrics of `module` their states back at the end.

    Not if the list `unless` has an entry by then: a step that got to its end counts.
    """
    metrics = [
        (metric, dict(vars(metric)), dict(metric._buffers)) for metric in _metrics(module).values()
    ]
    for metric, values, _ in metrics:
        # Some metrics add to their states in place.
        vars(metric).update(
            {name: copied_state(values[name]) for name in metric._defaults if name in values}
        )
    try:
        yield
    finally:
        if not unless:
            for metric, values, buffers in metrics:
                vars(metric).clear()
                vars(metric).update(values)
                metric._buffers.update(buffers)


def copied_state(state: Any) -> Any:
    """Return a copy of a metric's state, a tensor or a list of tensors."""
    return state.clone() if isinstance(state, Tensor) else [*state]


@dataclass
class MetricChanges:
    """Knows the states of metrics at `begin`, and gives what was counted `since`."""

    before: States = field(default_factory=dict)

    @classmethod
    def begin(cls, module: nn.Module) -> MetricChanges:
        """Return the changes from now on."""
        return cls({path: _states(metric) for path, metric in _metrics(module).items()})

    def since(self, module: nn.Module) -> States:
        """Return what changed, by path and name, as values that can be sent."""
        found: States = {}
        for path, metric in _metrics(module).items():
            before, now = self.before.get(path, {}), _states(metric)
            if now["_update_count"] != before.get("_update_count") or now[
                "_computed"
            ] is not before.get("_computed"):
                found[path] = {
                    name: _difference(before.get(name), value) for name, value in now.items()
                }
        return found


def apply_metric_changes(module: nn.Module, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the metrics of `module` count what another rank has counted since both were alike."""
    metrics = _metrics(module)
    for path, states in changes.items():
        for name, value in states.items():
            if isinstance(value, _Appended):
                value = [*getattr(metrics[path], name)[: value.kept], *value.entries]
            setattr(metrics[path], name, value)


@dataclass(frozen=True)
class _Appended:
    """A list of states: its first `kept` entries are as they were, then come `entries`."""

    kept: int
    entries: list[Any]


def _metrics(module: nn.Module) -> dict[str, Metric]:
    return _modules_of(Metric, module)  # type: ignore[type-abstract]


def _modules_of(kind: type[M], module: nn.Module) -> dict[str, M]:
    # The modules of `kind` by path, in the order of ``named_modules``. Steps of small models ask so
    # often that its time counts
    found, seen, left = dict[str, M](), set[int](), [("", module)]
    while left:
        path, each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            found[path] = each
        for name, child in reversed(each._modules.items()):
            if child is not None:
                left.append((f"{path}.{name}" if path else name, child))
    return found


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    states = {
        name: [*value] if isinstance(value, list) else value for name, value in states.items()
    }
    return {**states, **{name: vars(metric).get(name) for name in _COUNTERS}}


def _difference(before: Any, now: Any) -> Any:
    # `now` as it is sent: of a list that has only grown, the new entries alone
    if not isinstance(now, list):
        return now.detach() if isinstance(now, Tensor) else now
    before = before if isinstance(before, list) else []
    has_grown = len(before) <= len(now) and all(a is b for a, b in zip(before, now, strict=False))
    kept = len(before) if has_grown else 0
    return _Appended(kept, now[kept:])


# ---- stashed gradients ---------------------------------------------------------------------------


@contextmanager
def stashed_gradients(
    module: nn.Module, *, dropped: Collection[nn.Parameter] = frozenset()
) -> Generator[Gradients]:
    """Let parameters start without gradients; stash those that they get, and restore the old ones.

    Args:
        module: whose parameters these are.
        dropped: parameters whose old gradients are not restored, since they are cleared anyway
            before anybody reads them (`cleared_before_backward`). That saves their memory.
    """
    # From here on backward writes to empty gradients.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [None if parameter in dropped else parameter.grad for parameter in parameters]
    found: Gradients = {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield found
    finally:
        # New gradients go into the stash, the old ones back.
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                found[parameter] = parameter.grad
            parameter.grad = gradient


def cleared_before_backward(module: pl.LightningModule) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradients Lightning clears between this step and its backward.

    These are the optimizer's, in the first batch of an accumulation, unless the module or the
    optimizer has a ``zero_grad`` of its own.
    """
    # Lightning's hook calls `optimizer.zero_grad()`; both may be the user's.
    trainer, own = module.trainer, getattr(module.optimizer_zero_grad, "__func__", None)
    loop = trainer.fit_loop.epoch_loop
    is_first = loop.batch_idx % trainer.accumulate_grad_batches == 0
    is_kept = not is_first or loop.automatic_optimization._skip_backward
    if is_kept or own is not pl.LightningModule.optimizer_zero_grad:
        return frozenset()
    return frozenset(
        parameter
        for optimizer in trainer.optimizers
        if getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def with_gradients(
    output: Any, gradients: Gradients, *, factor: float | None, device: torch.device
) -> Any:
    """Return `output` with a loss whose backward adds `gradients` to those of the parameters.

    Args:
        output: of a step; the graph of its loss is not used.
        gradients: emptied by backward, so that each is freed as soon as it is added.
        factor: multiplies them, beside the gradient of the loss (1 / accumulated batches, or a
            scaler's). None: they have their final scale, and replace what parameters have.
        device: of the loss.
    """
    source = torch.zeros((), device=device, requires_grad=True)
    loss: Tensor = _CarriedGradients.apply(  # type: ignore[no-untyped-call]
        source, loss_in(output).detach(), factor, gradients
    )
    return with_loss(output, loss)


class _CarriedGradients(torch.autograd.Function):
    # A value with a graph of its own; see `with_gradients`.

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, value: Tensor, factor: float | None, gradients: Gradients
    ) -> Tensor:
        ctx.factor, ctx.gradients = factor, gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # One after the other: gradients are not in memory twice.
        scaled = gradient.reshape(()) * (1.0 if ctx.factor is None else ctx.factor)
        while ctx.gradients:
            parameter, found = ctx.gradients.popitem()
            if ctx.factor is None:
                parameter.grad = found
                continue
            found.mul_(scaled.to(found.dtype))
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        return scaled, None, None, None
