"""The first steps of a fit are real steps under DDP, which rank 0 watches.

No user code runs twice. Each step is watched in one of three ways:

    clock    forward, backward, the optimizer and the whole step are timed, nothing else
    record   operators, calls of modules, lifetimes of tensors (`graph.step_observer`), and the
             optimizer's state
    time     every operator in place (`graph.step_observer`), and the optimizer's traffic

In the place of a recorded step without a loss comes the next one. Later, the first steps under the
plan are timed beside everything else, to be compared with its prediction (`StepsOfPlan`).
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, thread_time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.core_wait import CoreWait, is_busy
from lightning_topt.costs.compute import KernelKey, kernel_key
from lightning_topt.costs.observed_optimizer import OptimizerObserver
from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import ModuleState
from lightning_topt.graph.recorder import entered
from lightning_topt.graph.step_observer import StepObserver, StepTimer
from lightning_topt.graph.step_purity import PurityWatch
from lightning_topt.graph.structures import map_tensors

WATCHED_STEPS, STEPS_OF_PLAN = 3, 20


@dataclasses.dataclass(frozen=True)
class WatchedSteps:
    """What rank 0 saw of the first steps.

    The graph, its kernels' seconds in place, the optimizers, and the seconds of a step.
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


class WatchedFit:
    """Watches the first `steps` steps of a fit of `module` with `optimizers`.

    Only rank 0 watches. `records`: the first of them is recorded; else they have the clock alone,
    until `record_more`. Every rank has one, so that all of them know when a plan is due.
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
        # How each of the steps is watched, in order.
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
        """Begin a batch; return whether the plan is due before it.

        It is when all steps were seen, and none is half done.
        """
        # The batch before was a whole step.
        if self._has_backward:
            self.seen, self._has_backward = self.seen + 1, False
        self.clock.begin()
        return self.seen >= len(self.kinds) and batch_idx % accumulate == 0

    def record_more(self) -> None:
        """Record the next step, and time the one after it."""
        self.kinds = [*["clock"] * self.seen, "record", "time"]

    @property
    def _kind(self) -> str:
        """What is done in the step under way.

        Nothing once all were seen, or where they cannot be.
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

    def step_without_batch(self) -> None:
        """Count a step that only other ranks have a batch for; there is nothing to see."""
        self._has_backward = True

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
        # Nothing of the observer stays on the module for the next step.
        self._observer.close()
        self.has_graph = True

    @contextmanager
    def _timed_forward(self) -> Iterator[None]:
        state: ModuleState | None = None
        watch: PurityWatch | None = None
        with self._own_problems():
            # Besides times, the step shows what Python objects it changes.
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
        """Return the graph of a step, on rank 0.

        Raises CaptureError where no whole step was seen.
        """
        if self.problem is not None:
            raise CaptureError(self.problem)
        if self._observer is None:
            raise CaptureError("no training step was recorded")
        self._check_trainable()
        return self._observer.graph(changed=self._changed)

    def _check_trainable(self) -> None:
        """Raise CaptureError if other parameters are trained than when DDP was made.

        A plan would exchange these.
        """
        if changed := set(_trainable(self.module).items()) ^ set(self._trainable.items()):
            name = min(name for name, _ in changed)
            raise CaptureError(
                f"since the fit began other parameters are trained ({name!r} was frozen, unfrozen, "
                "added or replaced); DDP goes on exchanging those that it began with; for a plan "
                "freeze before the fit, in configure_model or __init__"
            )

    def result(self) -> WatchedSteps:
        """Return all that was seen, on rank 0.

        Raises CaptureError where that is not a whole step, OptimizerError.
        """
        graph = self.graph()
        assert self._optimizers is not None
        kernels = {} if self._timer is None else dict(self._timer.seconds())
        # Without the exchange: forward as timed, and the kernels of backward.
        step, forward = self.clock.median("step"), self.clock.median("forward")
        compute = self.clock.compute_seconds()
        if compute is None and forward is not None and kernels:
            passed = sum(
                k.count * kernels.get(kernel_key(k), 0.0) for op in graph.ops for k in op.backward
            )
            compute = forward + min(passed, self.clock.median("backward") or passed)
        return WatchedSteps(graph, kernels, self._optimizers, step, compute, self._change)


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
        # Kernels of the phase before are not part of it.
        self._synchronize()
        start, processor = perf_counter(), thread_time()
        yield
        self._synchronize()
        self._seconds.setdefault(name, []).append(perf_counter() - start)
        self._seconds.setdefault(f"{name} on the processor", []).append(thread_time() - processor)

    def median(self, name: str) -> float | None:
        """Return the median seconds of a phase, None where there was none."""
        # The first one sets up: buckets, kernels, caches.
        found = self._seconds.get(name, [])
        return statistics.median(found[1:] or found) if found else None

    def compute_seconds(self) -> float | None:
        """Return the seconds of forward and backward without waiting for other ranks.

        None where that is not known. On a CPU rank they are those of its thread on a processor.
        """
        if self._device.type != "cpu":
            return None
        phases = [self.median(f"{name} on the processor") for name in ("forward", "backward")]
        return None if None in phases else sum(filter(None, phases))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StepsOfPlan:
    """Times the first 20 steps under a plan, on one rank, without waiting for an accelerator.

    A step is what `StepMonitor` measures: its batches from their start to the end of their backward
    pass or the update, not the wait for data.

    Args:
        device: of this rank.
        ranks: on this machine.
        then: called once, with the median seconds of these steps, and whether the machine was busy.
    """

    def __init__(
        self, device: torch.device, *, ranks: int, then: Callable[[float, bool], None]
    ) -> None:
        self._device, self._ranks, self._then = device, ranks, then
        # of every step, the beginning and end of its batches; the last one is under way
        self._steps: list[list[tuple[Any, Any]]] = [[]]
        self._began: Any = None
        self._host_began = 0.0
        self._host = self._waited = 0.0  # seconds of this thread; those without a core
        self._core_wait: CoreWait | None = None
        self._is_over = False

    def begin_batch(self) -> None:
        """A batch begins."""
        if self._is_over:
            return
        if len(self._steps) > STEPS_OF_PLAN:
            self._settle()
            return
        self._began = self._now()
        self._host_began = perf_counter()
        self._core_wait = CoreWait(threads=torch.get_num_threads())

    def end_batch(self, *, updates: bool) -> None:
        """A batch is over; where it `updates`, a step is."""
        if self._is_over or self._core_wait is None:
            return
        self._waited += self._core_wait.seconds()
        self._host += perf_counter() - self._host_began
        self._steps[-1].append((self._began, self._now()))
        self._core_wait = None
        if updates:
            self._steps.append([])
        if len(self._steps) > STEPS_OF_PLAN:
            self._settle()

    def _now(self) -> Any:
        """Return the time, or a mark in the work of an accelerator."""
        if self._device.type == "cpu":
            return perf_counter()
        mark = torch.Event(self._device, enable_timing=True)
        mark.record()
        return mark

    def _settle(self) -> None:
        """Call `then`, once the device has got to the end of the last step."""
        on_cpu, steps = self._device.type == "cpu", self._steps[:STEPS_OF_PLAN]
        if not on_cpu and not steps[-1][-1][1].query():
            return
        self._is_over = True
        seconds = [
            sum(end - start if on_cpu else start.elapsed_time(end) / 1e3 for start, end in batches)
            for batches in steps
        ]
        share = self._waited / max(self._host, 1e-9)
        self._steps = []
        self._then(
            statistics.median(seconds),
            is_busy(share, ranks=self._ranks, threads=torch.get_num_threads()),
        )


class WatchingRedirection(_DDPForwardRedirection):
    """Lightning's call of `training_step` through DDP's forward, with a context.

    `around` gives it, inside of DDP.
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
        # As in Lightning: DDP calls forward, which is `training_step` for this call.
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
    # torch._dynamo is asked only where it is loaded: importing it takes a second.
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
    """Return the parameters that get gradients, by all their names."""
    return {
        name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad
    }
