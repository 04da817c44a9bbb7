"""The first steps of a fit are real steps under DDP; rank 0 watches them, and plans from what it
saw. No user code runs twice.

    clock    forward, backward, the optimizer and the whole step are timed, nothing else
    record   operators, calls of modules, lifetimes of tensors (`graph.step_observer`), the
             optimizer's state
    time     every operator in place (`graph.step_observer`), the optimizer's traffic

On CPUs the first steps have the clock alone: plans on data axes compute what DDP computes, so where
that is nearly all of a step DDP goes on, and nothing more is looked at. Where more might be gained,
or memory is asked for, a step is recorded, the next one timed, and a plan searched beside training
(`ObservedPlanning`). It takes over between two steps that all ranks agree on, with parameters and
optimizer states where they are.

In the place of a recorded step without a loss comes the next one. Where a plan cannot be made, DDP
goes on.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.forked_call import ForkedCall
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.compute import KernelKey, kernel_key
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.observed_optimizer import OptimizerObserver
from lightning_topt.graph.errors import CaptureError, one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import ModuleState
from lightning_topt.graph.recorder import entered
from lightning_topt.graph.step_observer import StepObserver, StepTimer
from lightning_topt.graph.step_purity import PurityWatch
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.choose import TIME_ERROR, TIME_ERROR_SECONDS
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.given_plans import UniformPlan
from lightning_topt.plugins.joint_batches import are_alike
from lightning_topt.plugins.own_batches import digest_of_values
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning
from lightning_topt.plugins.planning_ranks import on_every_rank, on_rank_0
from lightning_topt.plugins.searched_plan import (
    RunCosts,
    measured_kernels,
    say,
    say_what_stays,
    search_request,
)
from lightning_topt.plugins.tensor_look import search_with_axes

Decision = tuple[ParallelPlan, Planning | None, str]
WATCHED_STEPS = 3
_PATIENCE_SECONDS = 120.0  # with a search beside training, whatever keeps it
_CAPTURE_SECONDS = 40.0  # of these
_BY_NAME = 'they are searched by name alone: give plan={"mesh": {"data": 1, "tensor": 2}}'


@dataclasses.dataclass(frozen=True)
class Observed:
    """What rank 0 saw of the first steps: the graph, its kernels' seconds in place, the optimizers,
    and the seconds of a step.

    `step_seconds` is None where no whole step was timed; `compute_seconds` are forward and backward
    without the exchange. `change` is what `training_step` changed beside tensors, or may have
    changed, as a clause.
    """

    graph: OpGraph
    kernel_seconds: dict[KernelKey, float]
    optimizers: OptimizerObserver
    step_seconds: float | None
    compute_seconds: float | None
    change: str | None = None


class ObservedFit:
    """Watches the first `steps` steps of a fit of `module` with `optimizers`, on `device`; only
    rank 0 looks.

    `records`: the first of them is recorded; else they have the clock alone, until `record_more`.
    Every rank has one, so that all of them know when a plan is due.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer] = (),
        *,
        device: torch.device,
        steps: int,
        records: bool,
        is_rank_0: bool,
    ) -> None:
        self.module, self.device = module, device
        self.kinds = (
            ["record", "time", *["clock"] * steps][:steps] if records else ["clock"] * steps
        )
        self.seen = 0  # batches with a whole step
        self.problem: str | None = None if is_rank_0 else "watched on rank 0"
        self.has_graph = self._has_backward = self._is_over = False
        self._observer: StepObserver | None = None
        self._timer: StepTimer | None = None
        self._changed: set[str] | None = None
        self._change: str | None = "no second step was watched"
        self.batch: Any = None  # of the recorded step, on the meta device
        self.clock = StepClock(device)
        named = module.named_parameters()
        self._optimizers = (
            OptimizerObserver(optimizers, named_parameters=named) if is_rank_0 else None
        )
        self._trainable = _trainable(module)  # what DDP exchanges to the end of the fit

    # ---- the batches -----------------------------------------------------------------------------

    def begin_batch(self, batch_idx: int, *, accumulate: int) -> bool:
        """A batch begins; return whether the plan is due before it: all steps were seen, and none
        is half done.
        """
        if self._has_backward:
            self.seen, self._has_backward = self.seen + 1, False
        self.clock.begin()
        return self.seen >= len(self.kinds) and batch_idx % accumulate == 0

    def record_more(self) -> None:
        """Record the next step, and time the one after it."""
        self.kinds = [*["clock"] * self.seen, "record", "time"]

    @property
    def _kind(self) -> str:
        """What is done in the step under way: nothing once all were seen, or where they cannot
        be.
        """
        if self.problem is not None or self._is_over or self.seen >= len(self.kinds):
            return "nothing"
        kind = self.kinds[self.seen]
        # In the place of a step without a loss.
        return "record" if kind == "time" and not self.has_graph else kind

    def forward(self, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Return the context in which `training_step` runs with `args`."""
        kind = self._kind
        if kind == "record":
            return self._recorded_forward(args)
        if kind == "time":
            return self._timed_forward()
        return self.clock.phase("forward") if kind == "clock" else nullcontext()

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return the context in which the backward pass from `loss` runs."""
        kind, self._has_backward = self._kind, True
        if kind == "record":
            return self._recorded_backward(loss)
        if kind == "time" and self._timer is not None:
            return entered(self._timer)
        return self.clock.phase("backward") if kind == "clock" else nullcontext()

    @contextmanager
    def update(self, optimizer: Optimizer) -> Iterator[None]:
        """A step of `optimizer`, which may call forward and backward."""
        observer = self._optimizers
        if (
            self.problem is not None
            or self._is_over
            or observer is None
            or optimizer not in observer.optimizers
        ):
            yield
            return
        # The first recorded step shows the optimizer's state, the second what it moves; others are
        # timed. With accumulation it may come after the last watched batch.
        is_recorded = "record" in self.kinds[: self.seen + 1] and observer.recorded(optimizer) < 2
        with observer.recording(optimizer) if is_recorded else observer.timing(optimizer):
            yield
        if self._kind == "clock":
            self.clock.end()

    def close(self) -> None:
        """Stop watching: every hook is taken off."""
        self._is_over = True
        if self._observer is not None:
            self._observer.close()

    @contextmanager
    def _recorded_forward(self, args: tuple[Any, ...]) -> Iterator[None]:
        if self._observer is not None:  # of a step without a backward pass
            self._observer.close()
        self._observer = None
        with self._own_problems():
            self.problem = why_not_watched()
            if self.problem is None:
                self._observer = StepObserver(self.module, args)
                self.batch = map_tensors(args[0], lambda tensor: tensor.detach().to("meta"))
        with nullcontext() if self._observer is None else self._observer.forward():
            yield

    @contextmanager
    def _recorded_backward(self, loss: Tensor) -> Iterator[None]:
        if self._observer is None:
            yield
            return
        with self._observer.backward(loss):
            yield
        self._observer.close()
        self.has_graph = True

    @contextmanager
    def _timed_forward(self) -> Iterator[None]:
        state: ModuleState | None = None
        watch: PurityWatch | None = None
        with self._own_problems():
            state, watch, self._timer = (
                ModuleState(self.module),
                PurityWatch(self.module),
                StepTimer(self.device),
            )
        with nullcontext() if self._timer is None else entered(self._timer):
            yield
        with self._own_problems():
            if state is not None and watch is not None:
                self._changed, self._change = state.changed(), watch.change()

    @contextmanager
    def _own_problems(self) -> Iterator[None]:
        """Keep what goes wrong in watching away from the user's step; there is no plan then."""
        try:
            yield
        except Exception as error:
            self.problem = f"watching the steps failed ({type(error).__name__}: {error})"

    # ---- what was seen ---------------------------------------------------------------------------

    def graph(self) -> OpGraph:
        """Return the graph of a step, on rank 0. Raises CaptureError where no whole step was
        seen.
        """
        if self.problem is not None:
            raise CaptureError(self.problem)
        if self._observer is None:
            raise CaptureError("no training step was recorded")
        self._check_trainable()
        return self._observer.graph(changed=self._changed)

    def _check_trainable(self) -> None:
        """Raise CaptureError if other parameters are trained than those that DDP was made for: a
        plan would exchange these.
        """
        if changed := set(_trainable(self.module).items()) ^ set(self._trainable.items()):
            name = min(name for name, _ in changed)
            raise CaptureError(
                f"since the fit began other parameters are trained ({name!r} was frozen, unfrozen, "
                "added or replaced); DDP goes on exchanging those that it began with; for a plan "
                "freeze before the fit, in configure_model or __init__"
            )

    def result(self) -> Observed:
        """Return all that was seen, on rank 0. Raises CaptureError where that is not a whole step,
        OptimizerError.
        """
        graph = self.graph()
        assert self._optimizers is not None
        kernels = {} if self._timer is None else dict(self._timer.seconds())
        step, forward = self.clock.median("step"), self.clock.median("forward")
        compute = self.clock.compute_seconds()
        if compute is None and forward is not None and kernels:
            passed = sum(
                k.count * kernels.get(kernel_key(k), 0.0) for op in graph.ops for k in op.backward
            )
            compute = forward + min(passed, self.clock.median("backward") or passed)
        return Observed(graph, kernels, self._optimizers, step, compute, self._change)


class StepClock:
    """The seconds of steps and of their phases, without anything else in the way.

    The first step, which sets up, is left out where there are others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = {}
        self._start = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._start = perf_counter()

    def end(self) -> None:
        """The step is over."""
        self._synchronize()
        self._seconds.setdefault("step", []).append(perf_counter() - self._start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of it, by the clock and by the processor."""
        self._synchronize()
        start, processor = perf_counter(), thread_time()
        yield
        self._synchronize()
        self._seconds.setdefault(name, []).append(perf_counter() - start)
        self._seconds.setdefault(f"{name} on the processor", []).append(thread_time() - processor)

    def median(self, name: str) -> float | None:
        """Return the median seconds of a phase, None where there was none."""
        found = self._seconds.get(name, [])
        return statistics.median(found[1:] or found) if found else None

    def compute_seconds(self) -> float | None:
        """Return the seconds of forward and backward without what waits for other ranks; None where
        that is not known.

        On a CPU rank they are those of its thread on a processor.
        """
        if self._device.type != "cpu":
            return None
        phases = [self.median(f"{name} on the processor") for name in ("forward", "backward")]
        return None if None in phases else sum(filter(None, phases))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class WatchingRedirection(_DDPForwardRedirection):
    """Lightning's call of `training_step` through the wrapper's forward, with `around` it and
    inside of the wrapper.
    """

    def __init__(self, around: Callable[[tuple[Any, ...]], AbstractContextManager[None]]) -> None:
        self._around = around

    @override
    def __call__(
        self,
        wrapper_module: nn.Module,
        original_module: pl.LightningModule,
        method_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        original_forward = original_module.forward

        def forward(*inner: Any, **inner_kwargs: Any) -> Any:
            original_module.forward = original_forward  # type: ignore[method-assign]
            with self._around((*inner, *inner_kwargs.values())):
                out = getattr(original_module, method_name)(*inner, **inner_kwargs)
            self.on_after_inner_forward(wrapper_module, original_module)
            return out

        original_module.forward = forward  # type: ignore[method-assign]
        out = wrapper_module(*args, **kwargs)
        self.on_after_outer_forward(wrapper_module, original_module)
        return out


def why_not_watched() -> str | None:
    """Return why no step can be recorded or timed now, as a clause; None where one can."""
    frames = getattr(
        sys.modules.get("torch._dynamo.eval_frame"), "always_optimize_code_objects", ()
    )
    is_used = bool(getattr(frames, "refs", ()))
    return (
        "torch.compile is in use, and what runs inside of compiled code is not seen"
        if is_used
        else None
    )


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, by all their names."""
    return {
        name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad
    }


# ---- planning ------------------------------------------------------------------------------------


class ObservedPlanning:
    """Makes a plan of what `fit` saw, beside training: `poll` it between steps, on all ranks, until
    it returns one.

    The search runs in a copy of rank 0's process, unless somebody wants the same plan at the same
    step every time, or memory is scarce. What cannot be planned goes on as DDP, with a warning,
    unless the request insists.
    """

    def __init__(self, request: PlanRequest, trainer: pl.Trainer, fit: ObservedFit) -> None:
        self._request, self._trainer, self._fit = request, trainer, fit
        self._observed: Observed | None = None  # on rank 0
        self._planning: Planning | None = None
        self._search: ForkedCall[Planning | list[OpGraph]] | None = None
        self._is_searching, self._begun = False, 0.0
        self._cluster: Cluster | None = None
        self._measurements: Measurements | None = None
        self._are_joint = False
        self._why_not: str | None = None

    def poll(self, batch: Any) -> Decision | None:
        """Return the decision, None where the search is not over. A collective call, before a step
        with `batch`.
        """
        try:
            plan = self._poll_search() if self._is_searching else self._begin(batch)
        except Exception as error:
            if self._request.insists or is_of_collective(error):
                raise
            reason = one_line(error)
            rank_zero_warn(
                f"topt: no plan can be made from the first steps, so DDP goes on: {reason}"
            )
            plain = preset_plan(PRESETS["ddp"], mesh=data_mesh(dist.get_world_size()))
            return plain, None, f"ddp: {reason}"
        if plan is None:
            return None
        say(plan)
        return plan, self._planning, "search"

    def close(self) -> None:
        """End a search that is under way."""
        if self._search is not None:
            self._search.kill()

    def _begin(self, batch: Any) -> ParallelPlan | None:
        """The plan, where it needs no search or one that is waited for; else begin to search."""
        found = on_rank_0(self._look)
        if found == "record":
            self._fit.record_more()
            return None
        if found is not None:
            return ParallelPlan.from_dict(found)
        device = self._trainer.strategy.root_device
        self._cluster, self._measurements = _cluster_of(self._request, self._trainer)
        self._are_joint = are_alike(batch, None, device=device)
        return self._begin_search({} if self._measurements is None else None)

    def _begin_search(self, kernels: dict[KernelKey, float] | None) -> ParallelPlan | None:
        """Begin a search with `kernels` on slices, and wait for it where it is waited for."""
        cluster, device = self._cluster, self._trainer.strategy.root_device
        forks = hasattr(os, "fork") and device.type == "cpu"
        if not forks:
            self._why_not = "on this device " + _BY_NAME
        elif self._request.objective == "memory":
            self._why_not = "with objective='memory' " + _BY_NAME
        waits = self._request.saves_memory or self._request.cluster is not None
        waits = waits or torch.are_deterministic_algorithms_enabled() or not hasattr(os, "fork")

        def search() -> Any:
            assert self._observed is not None and cluster is not None
            run = partial(
                _search,
                self._request,
                self._trainer,
                self._fit.batch,
                _search_request(self._request, self._trainer, self._observed, cluster),
                self._observed,
                are_joint=self._are_joint,
                kernels=kernels,
                why_not=self._why_not,
            )
            if waits and not forks:
                return self._taken(run())
            self._search = ForkedCall(run, isolated=True)
            return (
                self._taken(self._search.result(timeout_seconds=_PATIENCE_SECONDS))
                if waits
                else None
            )

        self._is_searching, self._begun = True, perf_counter()
        return self._go_on(on_rank_0(search))

    def _taken(self, found: Planning | list[OpGraph]) -> Any:
        """What rank 0 sends to all at the end of a search: the plan, or graphs whose kernels it
        wants.
        """
        if isinstance(found, list):
            return found
        self._planning = found
        return found.chosen.plan.to_dict()

    def _go_on(self, found: Any) -> ParallelPlan | None:
        """The plan that was found; None where there is none yet. Kernels that the search wants are
        measured first.
        """
        if isinstance(found, list):
            assert self._measurements is not None
            return self._begin_search(measured_kernels(self._measurements, found))
        if found is None:
            return None
        plan = ParallelPlan.from_dict(found)
        if plan.brings_batches and self._why_not is None and not self._ranks_are_alike():
            self._why_not = (
                "training_step may not run for other ranks: their modules hold other values than "
                "rank 0's"
            )
            return self._begin_search({})
        return plan

    def _ranks_are_alike(self) -> bool:
        """Whether the modules of all ranks hold equal values beside parameters and buffers. A
        collective call.
        """
        own = on_every_rank(lambda: digest_of_values(self._trainer.lightning_module))
        digests = torch.tensor([own, -own], device=self._trainer.strategy.root_device)
        dist.all_reduce(digests, dist.ReduceOp.MAX)
        return int(digests[0]) == -int(digests[1])

    def _look(self) -> Any:
        """The plan where it is known, ``"record"`` where a step is to be recorded first, None where
        a search comes.
        """
        fit, ranks = self._fit, dist.get_world_size()
        if not fit.has_graph and "record" not in fit.kinds:
            stays = _why_ddp_stays(
                self._request, fit.clock.median("step"), fit.clock.compute_seconds()
            )
            plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(ranks))
            return dataclasses.replace(plan, reason=f"{stays}.").to_dict() if stays else "record"
        self._observed = fit.result()
        fit.close()
        stays = _why_ddp_stays(
            self._request, self._observed.step_seconds, self._observed.compute_seconds
        )
        return _ddp_plan(self._observed, ranks, stays).to_dict() if stays else None

    def _poll_search(self) -> ParallelPlan | None:
        """The plan, once the search is over on rank 0."""
        device = self._trainer.strategy.root_device
        is_late = perf_counter() - self._begun > _PATIENCE_SECONDS
        is_over = torch.tensor(
            int(self._search is not None and (self._search.is_ready() or is_late)), device=device
        )
        dist.broadcast(is_over, 0)
        if not is_over:
            return None

        def found() -> Any:
            assert self._search is not None
            return self._taken(self._search.result(timeout_seconds=0.1))

        return self._go_on(on_rank_0(found))


def refine_observed(request: PlanRequest, trainer: pl.Trainer, fit: ObservedFit) -> Decision:
    """Return the uniform plan that was asked for, for the blocks that rank 0 saw. A collective
    call, between two steps.
    """
    given = request.plan
    assert isinstance(given, UniformPlan)
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    fit.close()

    def of_blocks() -> dict[str, Any]:
        try:
            graph = fit.graph()
        except CaptureError as error:
            if given.recompute:
                raise CaptureError(
                    f"{error}: leave '+recompute' out of the plan, whose blocks have to be seen"
                ) from error
            rank_zero_warn(
                "topt: the blocks were not seen, so the plan stores the whole module as one: "
                f"{error}"
            )
            return preset_plan(given.preset, mesh=mesh).to_dict()
        plan = given.of(graph, mesh)
        if graph.unused and not plan.keeps_gradients_whole:
            raise PlanError(
                f"this plan shards parameters, but the step gives {graph.unused[0]} no gradient, "
                "which only DistributedDataParallel sees and answers; choose ZeRO level 0 or 1"
            )
        if given.recompute:
            say_what_stays(graph)
        return plan.to_dict()

    return ParallelPlan.from_dict(on_rank_0(of_blocks)), None, "given"


def _why_ddp_stays(request: PlanRequest, step: float | None, compute: float | None) -> str | None:
    """Why nothing can be gained by any plan, as a sentence; None where something might be.

    Plans on data axes compute what DDP computes. What they may save is the rest of the step: the
    optimizer's part, and the exchange that backward does not hide.
    """
    if request.saves_memory or request.cluster is not None or step is None or compute is None:
        return None
    if compute * (1 + TIME_ERROR) + TIME_ERROR_SECONDS < step:
        return None
    return (
        f"Nothing to gain: of a step of {1e3 * step:.1f} ms, {1e3 * compute:.1f} ms are forward "
        "and backward, which take as long under any plan on data axes"
    )


def _ddp_plan(observed: Observed, ranks: int, reason: str) -> ParallelPlan:
    """Plain DDP with the blocks that were seen, the time that was measured and the memory that is
    predicted.
    """
    graph, seconds = observed.graph, observed.step_seconds or 0.0
    plan = preset_plan(
        PRESETS["ddp"], mesh=data_mesh(ranks), blocks=[block.name for block in graph.blocks]
    )
    request = SearchRequest(
        graph,
        _any_cluster(ranks),
        observed.optimizers.profile(),
        device_counts=(ranks,),
        global_batch_size=graph.batch_size * ranks,
    )
    plan = dataclasses.replace(
        plan, model=graph.model, fingerprint=graph.fingerprint, batch_size=graph.batch_size
    )
    priced = price_plan(request, plan)
    compute = observed.compute_seconds or 0.0
    predicted = dataclasses.replace(
        priced.predicted,
        step_seconds=seconds,
        compute_seconds=compute,
        exposed_communication_seconds=max(seconds - compute, 0.0),
    )
    return dataclasses.replace(plan, predicted=predicted, reason=f"{reason}.")


def _any_cluster(ranks: int) -> Cluster:
    """Ranks on one machine of no particular speed, where memory alone is asked for."""
    device = Device("any", 1 << 60, {"float32": 1e11}, 1e10, 2e-6)
    link = Link(latency_seconds=1e-4, bandwidth=1e9)
    return Cluster("any", device=device, devices_per_node=ranks, num_nodes=1, intra=link)


def _cluster_of(request: PlanRequest, trainer: pl.Trainer) -> tuple[Cluster, Measurements | None]:
    """The cluster as given; else as stored, or as measured now, and what measures kernels. A
    collective call.
    """
    if request.cluster is not None:
        return request.cluster, None
    device = trainer.strategy.root_device
    found = Measurements.open(
        device=device,
        num_nodes=trainer.num_nodes,
        progress=lambda line: rank_zero_info(f"topt: {line}"),
    )
    return on_every_rank(found.cluster), found


def _search_request(
    request: PlanRequest, trainer: pl.Trainer, observed: Observed, cluster: Cluster
) -> SearchRequest:
    """What to search on data axes; nothing of it refers to the trainer."""
    costs = RunCosts(
        observed.optimizers.profile(op_overhead_seconds=cluster.device.op_overhead_seconds),
        cluster,
        observed.kernel_seconds,
    )
    if request.cluster is not None:  # of other machines, perhaps
        profile = dataclasses.replace(costs.optimizer, seconds_per_element={})
        costs = dataclasses.replace(costs, optimizer=profile, kernel_seconds={})
    wanted = search_request(request, trainer, observed.graph, costs)
    return dataclasses.replace(wanted, in_place=request.saves_memory)


def _search(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    search: SearchRequest,
    observed: Observed,
    *,
    are_joint: bool,
    kernels: dict[KernelKey, float] | None,
    why_not: str | None,
) -> Planning | list[OpGraph]:
    """Search, and choose; or return the graphs whose kernels are wanted (`search_with_axes`).

    Steps are captured for tensor axes and stages in a copy of the process alone, and only if the
    watched steps changed nothing but tensors: such plans run a rank's step with batches of other
    ranks too.
    """
    if why_not is None and observed.change is not None:
        why_not = f"training_step may not run for other ranks: {observed.change}"
    ddp_seconds = observed.step_seconds if request.cluster is None else None
    with _at_most(_CAPTURE_SECONDS) if why_not is None else nullcontext():
        return search_with_axes(
            request,
            trainer,
            batch,
            search,
            are_joint=are_joint,
            kernels=kernels,
            why_not=why_not,
            as_measured=lambda found: (
                found if ddp_seconds is None else _as_measured(found, ddp_seconds)
            ),
        )


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer in this process, which has nothing else to do: a step
    that waits for others.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"a step on fake tensors has not ended within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _as_measured(frontier: PlanFrontier, ddp_seconds: float) -> PlanFrontier:
    """`frontier` with all times scaled so that plain DDP takes what its steps took: errors of the
    plans are alike.
    """
    plain = [p for p in frontier.candidates if _is_plain(p.plan)]
    if not plain or plain[0].step_seconds <= 0:
        return frontier
    factor = ddp_seconds / plain[0].step_seconds

    def scaled(point: PlanPoint) -> PlanPoint:
        plan, predicted = point.plan, point.plan.predicted
        if predicted is not None:
            times = ("step_seconds", "compute_seconds", "exposed_communication_seconds")
            new = dataclasses.replace(
                predicted, **{name: factor * getattr(predicted, name) for name in times}
            )
            plan = dataclasses.replace(plan, predicted=new)
        return dataclasses.replace(point, step_seconds=factor * point.step_seconds, plan=plan)

    return dataclasses.replace(
        frontier,
        points=tuple(map(scaled, frontier.points)),
        uniform=tuple(map(scaled, frontier.uniform)),
    )


def _is_plain(plan: ParallelPlan) -> bool:
    blocks = (block.config for block in plan.blocks)
    is_ddp = all(config.storage.level == 0 and not config.recompute for config in blocks)
    return (
        is_ddp
        and len(plan.mesh.axes) == 1
        and plan.gradient_exchange is None
        and plan.schedule is None
    )
