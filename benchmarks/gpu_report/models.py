"""Part 3: predicted and measured steps of five models on one device, in full and half precision.

Predicted as a search does it: the step captured on fake tensors, its kernels replayed one by one,
the optimizer timed on a copy, the machine calibrated. Measured: the engine runs the same plan, one
rank, in Lightning's order. Notes have the operators where predictions and a profile differ most.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import measure_update_seconds
from benchmarks.foreign.family_models import (
    ConvNext,
    FamilyModule,
    Recognizer,
    Vit,
    adamw,
    fused_adamw,
    images,
)
from benchmarks.gpu_report.reporting import (
    Report,
    free_memory,
    memory_columns,
    reset_peaks,
    run_part,
    synchronize,
)
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.compute import (
    RECOMPUTED_LAUNCHES,
    KernelKey,
    kernel_key,
    roofline_seconds,
)
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import MemoryMeter, warm_up
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.plugins.searched_plan import make_fake_optimizers
from lightning_topt.techniques.plan_costs import Explanation, PlanCosts, explain
from tests.models import GPT

WARM_UP, STEPS = 3, 6
PLANS = ("ddp", "ddp+recompute")
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_KERNEL_SECONDS, _MACHINE_SECONDS, _UPDATE_SECONDS = 2.0, 1.5, 0.3
_CELL_SECONDS, _COMPILED_SECONDS = 5.0, 22.0  # that are left at least before one begins
# terms of a plan's memory that are no tensors of the training
NOT_TENSORS = ("fragmentation", "cuBLAS workspace", "communicators")
_OPERATORS, _LAUNCH, _HOST_STEPS = 25, "launch: ", 5  # of a profile; names; of the host alone
_LEFT_OVER, _LIVE = 100 << 20, 6  # bytes of earlier cells that are looked into; tensors named


def run(report: Report) -> None:
    with single_rank(report):
        cluster = None
        with report.attempt("calibrate"):
            cluster = calibrate(device=report.device, budget_seconds=_MACHINE_SECONDS)
        if cluster is None:
            return
        models = make_models(report.quick)
        for name in ("lstm", "gpt", "convnext", "vit", "llama"):
            if report.left() > _CELL_SECONDS:
                cells(report, models[name], name, "bf16-mixed", cluster, PLANS)
        if report.left() > _CELL_SECONDS:
            cells(report, models["gpt"], "gpt", "16-mixed", cluster, PLANS[:1])
        if report.left() > _COMPILED_SECONDS:
            compiled = replace(models["gpt"], compiled=True)
            cells(report, compiled, "gpt, compiled", "bf16-mixed", cluster, PLANS[:1])
        # those that the device bounds come last
        for name in ("lstm", "convnext", "gpt", "vit", "llama"):
            if report.left() > _CELL_SECONDS:
                cells(report, models[name], name, "32-true", cluster, PLANS)
        report.note("left", seconds=report.left())


def cells(
    report: Report,
    model: Model,
    name: str,
    precision: str,
    cluster: Cluster,
    plans: tuple[str, ...],
) -> None:
    """Predict and measure a model under `plans`; one row each."""
    predicted: Predicted | None = None
    try:
        predicted = predict(model, precision, report.device, cluster, plans)
    except Exception as error:
        report.failure(f"{name} {precision}: prediction", error)
    free_memory(report.device)
    measured_plans = plans if predicted is not None else plans[:1]
    for plan in measured_plans:
        with report.attempt(f"{name} {precision} {plan}") as row:
            clear(report.device)
            if (left_over := allocated(report.device)) > _LEFT_OVER:
                tensors = live_tensors(report.device)
                report.note("left over", bytes=left_over, tensors=tensors)
            if predicted is not None:
                row |= predicted.columns(plan)
            profiled = not model.compiled
            found = measure(
                model,
                precision,
                report.device,
                given_plan(plan, predicted.graph) if predicted is not None else None,
                profiled=profiled,
            )
            row |= found.columns
            if predicted is not None and found.operators and plan == "ddp":
                report.note(
                    f"operators of {name} {precision}",
                    ms=compare_operators(predicted, found.operators),
                    unmeasured=predicted.unmeasured(),
                )


# ---- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """How to make a module and a batch of `samples`."""

    make: Callable[[], L.LightningModule]
    batch: Callable[[int], Any]
    samples: int
    compiled: bool = False

    def module(self, device: torch.device) -> L.LightningModule:
        """The module on its device, with equal parameters each time."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.make()

    def example(self, device: torch.device) -> Any:
        """One batch on the device."""
        torch.manual_seed(1)
        with torch.device(device):
            return self.batch(self.samples)


class GptLoss(nn.Module):
    """The GPT of the tests with its loss."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.gpt = GPT(**sizes)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


class LlamaLoss(nn.Module):
    """A Llama of transformers with its loss."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        config = LlamaConfig(use_cache=False, attn_implementation="sdpa", **sizes)
        self.llama = LlamaForCausalLM(config)

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = self.llama(input_ids=batch[0], labels=batch[0]).loss
        return loss


def make_models(quick: bool) -> dict[str, Model]:
    """Return five models; `quick`: so small that a CPU runs them."""
    if quick:
        gpt = {"layers": 2, "width": 64, "heads": 2, "vocab": 256, "context": 32}
        llama = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        llama |= {"num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 256}
        return {
            "gpt": Model(lambda: FamilyModule(GptLoss(**gpt), adamw), pairs(32, 256), 2),
            "llama": Model(lambda: FamilyModule(LlamaLoss(**llama), adamw), singles(32, 256), 2),
            "vit": Model(lambda: FamilyModule(Vit(64, 2, 2), fused_adamw), pictures, 4),
            "convnext": Model(
                lambda: FamilyModule(ConvNext((16, 32, 48, 64), (1, 1, 1, 1)), adamw), pictures, 4
            ),
            "lstm": Model(lambda: FamilyModule(Recognizer(32, 1), adamw), sounds, 2),
        }
    gpt = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "context": 1024, "tied": True}
    llama = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    llama |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000}
    widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
    return {
        "gpt": Model(lambda: FamilyModule(GptLoss(**gpt), adamw), pairs(1024, 50304), 8),
        "llama": Model(lambda: FamilyModule(LlamaLoss(**llama), adamw), singles(1024, 32000), 4),
        "vit": Model(lambda: FamilyModule(Vit(768, 12, 12), fused_adamw), pictures, 256),
        "convnext": Model(lambda: FamilyModule(ConvNext(widths, depths), adamw), pictures, 256),
        "lstm": Model(lambda: FamilyModule(Recognizer(1024, 3), adamw), sounds, 64),
    }


def pairs(length: int, vocabulary: int) -> Callable[[int], Any]:
    """Batches of tokens and targets."""
    return lambda n: tuple(torch.randint(0, vocabulary, (n, length)) for _ in range(2))


def singles(length: int, vocabulary: int) -> Callable[[int], Any]:
    """Batches of tokens."""
    return lambda n: (torch.randint(0, vocabulary, (n, length)),)


def pictures(samples: int) -> Any:
    """Images of 64 x 64 pixels with labels."""
    return images(samples, 64, classes=100)


def sounds(samples: int) -> Any:
    """Filter banks with a label per two frames."""
    return torch.rand(samples, 80, 200), torch.randint(0, 48, (samples, 100))


# ---- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A model's graph, what was measured for it, and what its plans should cost."""

    graph: OpGraph
    cluster: Cluster
    kernels: Mapping[KernelKey, float]
    plans: Mapping[str, Explanation]
    seconds: Mapping[str, float]  # that capturing and measuring took

    def columns(self, plan: str) -> dict[str, Any]:
        """Return one plan's columns of the table."""
        found = self.plans[plan]
        work = [found.seconds[kind] for kind in ("forward", "backward", "recompute")]
        return {
            "predicted_step_seconds": found.step_seconds,
            "predicted_passes_seconds": sum(work),
            "predicted_update_seconds": found.seconds["update"],
            "predicted_reserved_bytes": found.peak_bytes,
            "predicted_allocated_bytes": found.peak_bytes
            - sum(found.peak_parts.get(kind, 0.0) for kind in NOT_TENSORS),
            "predicted_host_seconds": self.host_seconds(plan),
            "kernels": sum(kernel.count for kernel in self._kernels()),
            "peak_phase": found.peak_phase,
            "capture_s": round(self.seconds["capture"], 2),
            "kernels_s": round(self.seconds["kernels"], 2),
        }

    def host_seconds(self, plan: str) -> float:
        """Return the seconds in which the host issues forward and backward, as predicted."""
        again = plan.endswith("+recompute")
        calls = 0.0
        for op in self.graph.ops:
            forward = sum(kernel.count for kernel in op.forward)
            calls += forward + sum(kernel.count for kernel in op.backward)
            calls += forward * RECOMPUTED_LAUNCHES * (again and op.block != ROOT)
        return calls * self.cluster.device.launch_seconds

    def by_operator(self) -> dict[str, float]:
        """Return the seconds of the kernels of forward and backward by the operator's name."""
        total: Counter[str] = Counter()
        for kernel in self._kernels():
            key, size = kernel_key(kernel), self.graph.batch_size
            seconds = self.kernels.get(key)
            if seconds is None:
                seconds = roofline_seconds(kernel, batch_size=size, device=self.cluster.device)
            total[kernel.name.split(".")[1]] += kernel.count * seconds
        return dict(total)

    def unmeasured(self) -> dict[str, float]:
        """Return the milliseconds that formulas say of kernels that could not be measured."""
        total: Counter[str] = Counter()
        for kernel in self._kernels():
            if kernel_key(kernel) not in self.kernels:
                size = self.graph.batch_size
                seconds = roofline_seconds(kernel, batch_size=size, device=self.cluster.device)
                total[kernel.name] += round(1e3 * kernel.count * seconds, 4)
        return dict(total.most_common(_OPERATORS))

    def _kernels(self) -> Iterator[Any]:
        for op in self.graph.ops:
            yield from (*op.forward, *op.backward)


def predict(
    model: Model,
    precision: str,
    device: torch.device,
    cluster: Cluster,
    plans: tuple[str, ...],
    *,
    kernel_seconds: float = _KERNEL_SECONDS,
) -> Predicted:
    """Capture the step, measure what it consists of, and predict `plans` on one rank."""
    module, batch = model.module(device), model.example(device)
    start = time.perf_counter()
    graph = capture(
        module, batch, device=device.type, forward_context=lambda: autocast(precision, device)
    )
    captured = time.perf_counter()
    profile = update_profile(module, device)
    updated = time.perf_counter()
    kernels = measure_kernels(graph, device=device, budget_seconds=kernel_seconds)
    step = TrainingStep(graph, cluster, profile, data_mesh(1), model.samples, kernels)
    costs = PlanCosts(step)
    found = {}
    for name in plans:
        blocks = given_plan(name, graph).blocks
        found[name] = explain(costs, {block.block: block.config for block in blocks})
    seconds = {
        "capture": captured - start,
        "update": updated - captured,
        "kernels": time.perf_counter() - updated,
    }
    return Predicted(graph, cluster, kernels, found, seconds)


def update_profile(module: L.LightningModule, device: torch.device) -> OptimizerProfile:
    """Return what the module's optimizers do, timed on copies on the device."""
    optimizers, named = make_fake_optimizers(module, device=device)
    profile = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    seconds = measure_update_seconds(
        optimizers, named_parameters=named, device=device, budget_seconds=_UPDATE_SECONDS
    )
    return replace(profile, seconds_per_element=seconds)


def given_plan(name: str, graph: OpGraph) -> ParallelPlan:
    """Return the uniform plan of one rank that the strategy makes of the name."""
    given = read_plan_option(name)
    assert isinstance(given, UniformPlan)
    return given.of(graph, data_mesh(1))


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in this precision, as Lightning makes it."""
    dtype = DTYPES[precision]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


# ---- measurements --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One plan's columns of the table, and milliseconds and calls by operator in one step."""

    columns: dict[str, Any]
    operators: dict[str, tuple[float, int]]


def measure(
    model: Model,
    precision: str,
    device: torch.device,
    plan: ParallelPlan | None,
    *,
    profiled: bool = False,
    steps: int = STEPS,
) -> Measured:
    """Train a few steps under `plan` (None: the plain module) on one rank."""
    clear(device)
    warm_up(device)
    synchronize(device)
    left_over = allocated(device)
    meter = MemoryMeter(device)
    module, batch = model.module(device), model.example(device)
    meter.mark_base(module, other_bytes=0)
    engine = None if plan is None else Engine(plan, module, device=device)
    called: Callable[[Any], Tensor] = module if engine is None else engine.apply()
    optimizer: Any = module.configure_optimizers()
    if engine is not None:
        engine.attach_optimizers([optimizer])
    scaler = torch.amp.GradScaler(device.type) if precision == "16-mixed" else None
    if model.compiled:
        called = torch.compile(called)
    step = partial(_step, called, batch, optimizer, scaler, precision, device)
    started = time.perf_counter()
    for _ in range(WARM_UP):
        step([])
    synchronize(device)
    warmed = time.perf_counter() - started
    meter.reset_peak()
    reset_peaks(device)
    retries = memory_columns(device).get("alloc_retries", 0)
    moments: list[list[Any]] = [[] for _ in range(steps)]
    started = time.perf_counter()
    for each in moments:
        step(each)
    synchronize(device)
    wall = (time.perf_counter() - started) / steps
    passes, update, whole = _spans(moments, device)
    memory = memory_columns(device)
    columns = {
        "measured_step_seconds": whole,
        "measured_passes_seconds": passes,
        "measured_update_seconds": update,
        "wall_step_seconds": wall,
        "measured_allocated_bytes": meter.peak_bytes(),
        "base_bytes": meter.base_bytes,
        "left_over_bytes": left_over,  # of what ran before: should be 0
        "reserved_bytes": memory.get("peak_reserved_bytes"),
        "used_bytes": memory.get("used_bytes"),
        "retries": memory.get("alloc_retries", 0) - retries,
        "warm_up_s": round(warmed, 2),
    }
    operators = {}
    try:  # one sample, with which the device never holds the host up
        least = batch if model.compiled else replace(model, samples=1).example(device)
        alone = partial(_step, called, least, optimizer, scaler, precision, device)
        columns["host_step_seconds"] = _host_alone(alone, device)
    except Exception as error:  # the figures above are kept
        columns["host_not_timed"] = f"{type(error).__name__}: {error}"
    if profiled:
        try:
            operators = _profile(step, device)
        except Exception as error:  # the figures above are kept
            columns["not_profiled"] = f"{type(error).__name__}: {error}"
        columns["operators"] = sum(
            calls for name, (_, calls) in operators.items() if not name.startswith(_LAUNCH)
        )
        columns["launches"] = sum(
            calls for name, (_, calls) in operators.items() if name.startswith(_LAUNCH)
        )
        operators = {k: v for k, v in operators.items() if not k.startswith(_LAUNCH)}
    if engine is not None:
        engine.release()
    return Measured(columns, operators)


def clear(device: torch.device) -> None:
    """Free all that an earlier model left: cycles, compiled code, the allocator's cache."""
    if "torch._dynamo.eval_frame" in sys.modules:  # importing it takes a second
        torch._dynamo.reset()
    torch.clear_autocast_cache()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    free_memory(device)


def _host_alone(step: Callable[[list[Any]], None], device: torch.device) -> float:
    """Return the least seconds in which the host issues a step, without waiting for its end."""
    times = []
    for _ in range(_HOST_STEPS):
        synchronize(device)
        started = time.perf_counter()
        step([])
        times.append(time.perf_counter() - started)
    synchronize(device)
    return min(times)


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors hold; 0 on CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def live_tensors(device: torch.device) -> list[str]:
    """Return the largest tensors of the device that Python knows, with what refers to them."""
    found = [
        each
        for each in gc.get_objects()
        if isinstance(each, Tensor) and not isinstance(each, FakeTensor) and each.device == device
    ]
    found.sort(key=lambda tensor: -tensor.nbytes)
    return [
        f"{tuple(tensor.shape)} {tensor.dtype} {type(tensor).__name__} of "
        + ", ".join(sorted({type(each).__name__ for each in gc.get_referrers(tensor)}))
        for tensor in found[:_LIVE]
    ]


def _step(
    called: Callable[[Any], Tensor],
    batch: Any,
    optimizer: Any,
    scaler: Any,
    precision: str,
    device: torch.device,
    moments: list[Any],
) -> None:
    """Lightning's order: forward, zero_grad, backward, step. `moments` gets three of them."""
    moments.append(_now(device))
    with autocast(precision, device):
        loss = called(batch)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        moments.append(_now(device))
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        moments.append(_now(device))
        scaler.step(optimizer)
        scaler.update()
    moments.append(_now(device))


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _spans(moments: list[list[Any]], device: torch.device) -> tuple[float, float, float]:
    """Return the median seconds of the passes, of the update, and from one step to the next."""

    def between(one: Any, other: Any) -> float:
        return one.elapsed_time(other) * 1e-3 if device.type == "cuda" else other - one

    starts = [each[0] for each in moments] + [moments[-1][2]]
    return (
        statistics.median(between(each[0], each[1]) for each in moments),
        statistics.median(between(each[1], each[2]) for each in moments),
        statistics.median(map(between, starts[:-1], starts[1:])),
    )


def _profile(step: Callable[[list[Any]], None], device: torch.device) -> dict[str, Any]:
    """Return milliseconds and calls of each operator in one step."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        step([])
        synchronize(device)
    found = {}
    for event in profiler.key_averages():
        if "LaunchKernel" in event.key or event.key.startswith("cudaMemcpy"):
            found[f"{_LAUNCH}{event.key}"] = (0.0, event.count)
        elif event.key.startswith("aten::"):
            micro = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            found[event.key.removeprefix("aten::")] = (micro / 1e3, event.count)
    return found


def compare_operators(
    predicted: Predicted, measured: Mapping[str, tuple[float, int]]
) -> dict[str, list[float]]:
    """Return [predicted ms, measured ms, measured calls] of the operators that take longest."""
    ours = {name: 1e3 * seconds for name, seconds in predicted.by_operator().items()}
    names = sorted(
        {*ours, *measured}, key=lambda name: -max(ours.get(name, 0), measured.get(name, (0,))[0])
    )
    return {
        name: [
            round(ours.get(name, 0.0), 3),
            round(measured.get(name, (0.0, 0))[0], 3),
            measured.get(name, (0.0, 0))[1],
        ]
        for name in names[:_OPERATORS]
    }


# ---- one rank ------------------------------------------------------------------------------------


@contextmanager
def single_rank(report: Report) -> Iterator[None]:
    """Within, the process is the only rank of a process group; of gloo where NCCL fails."""
    with tempfile.TemporaryDirectory() as folder:
        backends = ["nccl", "gloo"] if report.device.type == "cuda" else ["gloo"]
        for number, backend in enumerate(backends):
            try:
                store = dist.FileStore(str(Path(folder) / str(number)), 1)
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=0,
                    world_size=1,
                    device_id=report.device if backend == "nccl" else None,  # as Lightning does
                )
                dist.all_reduce(torch.ones(1, device=report.device))
                synchronize(report.device)
                break
            except Exception as error:
                report.failure(f"a process group of {backend}", error)
                if dist.is_initialized():
                    dist.destroy_process_group()
        report.note("process group", backend=dist.get_backend() if dist.is_initialized() else "")
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def main() -> None:
    run_part("models", run, __doc__)


if __name__ == "__main__":
    main()
