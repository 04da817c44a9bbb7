"""Part 4: one rank of eight on real tensors of the device, the other seven imagined.

A fake process group has any number of ranks and sends nothing. So one device runs the code, the
kernels and the memory of one rank of ZeRO, hybrid sharding, tensor axes and pipelines. What a plan
is predicted to need without its network stands beside what it needed:

    predicted_seconds    the cost model on a cluster of this device with infinitely fast links
    predicted_bytes      the peak of the fullest rank, by the cost model
    measured_bytes       the peak of allocated tensors, above what was there before the module

Values that "arrive" are those that were there before, so losses mean nothing here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import measure_update_seconds
from benchmarks.gpu_report.reporting import (
    Report,
    free_memory,
    memory_columns,
    reset_peaks,
    run_part,
    synchronize,
)
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.demo import VOCABULARY, ByteGPT
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import MemoryMeter
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.capture import call_training_step, capture, loss_of
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.module_copy import silence
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.plan_costs import PlanCosts, explain
from lightning_topt.techniques.technique import RunOptions, forget_meshes
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.execution.observed_ranks import forward_is_training_step

RANKS, STAGES, MICROBATCHES = 8, 4, 8
_FAST = Link(0.0, 1e18)
_WARM_STEPS, _LEAST_LEFT = 2, 4.0  # seconds that an attempt is begun with


@dataclass(frozen=True)
class Setting:
    """A model, its batch, and what was measured of them on this device."""

    module: ByteGPT
    batch: Tensor
    device: torch.device
    cluster: Cluster  # of fast links
    profile: OptimizerProfile
    graph: OpGraph
    kernels: Mapping[KernelKey, float]

    @property
    def samples(self) -> int:
        """Of a batch of one rank."""
        return len(self.batch)


@dataclass(frozen=True)
class Expected:
    """A plan with what it should need."""

    plan: ParallelPlan
    seconds: float
    nbytes: float


def run(report: Report) -> None:
    """Predict and run each plan."""
    device = torch.device("cuda", 0) if report.device.type == "cuda" else report.device
    setting = measured_setting(report, device)
    for name, make in expectations(setting).items():
        if report.left() < _LEAST_LEFT:
            report.note("not begun", plan=name, left=report.left())
            continue
        ranks = (0, STAGES - 1) if name.startswith("pipeline") else (0,)
        for rank in ranks:
            with report.attempt(f"{name}, rank {rank}") as row:
                start = time.perf_counter()
                expected = make()
                row["planning_s"] = round(time.perf_counter() - start, 2)
                row["plan"] = expected.plan.summary()
                row["predicted_seconds"] = expected.seconds
                # The prediction is of the fullest rank, which is the first.
                row["fullest_bytes" if rank else "predicted_bytes"] = expected.nbytes
                row.update(run_rank(setting, expected.plan, rank=rank, quick=report.quick))


# ---- the model and what is known of it -----------------------------------------------------------


def measured_setting(report: Report, device: torch.device) -> Setting:
    """Measure what the cost model asks for."""
    small = report.quick or device.type != "cuda"
    sizes = (4, 64, 8, 32) if small else (12, 1024, 16, 512)
    torch.manual_seed(0)
    module = ByteGPT(*sizes)
    silence(module)
    batch = torch.randint(0, VOCABULARY, (4 if small else 8, sizes[3] + 1), dtype=torch.uint8)
    with report.attempt("capture, kernels, device") as row:
        graph = capture(module, batch, device=device.type, batch_scaling=False)
        optimizers = optimizers_of(module)
        named = list(module.named_parameters())
        profile = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
        seconds = measure_update_seconds(optimizers, named_parameters=named, device=device)
        kernels = measure_kernels(graph, device=device, budget_seconds=2.0 if small else 4.0)
        cluster = fast_cluster(calibrate(device=device))
        row["parameters"] = sum(parameter.numel() for _, parameter in named)
        row["kernels"], row["operators"] = len(kernels), len(graph.ops)
        row["blocks"] = len(graph.blocks)
    return Setting(
        module,
        batch,
        device,
        cluster,
        replace(profile, seconds_per_element=seconds),
        graph,
        kernels,
    )


def fast_cluster(measured: Cluster) -> Cluster:
    """Return eight of the measured device, with links on which nothing takes time.

    Peaks are those of tensors alone: without communicators, which a fake group has not, and
    without what the allocator cannot use.
    """
    return replace(
        measured,
        device=replace(measured.device, caching_allocator=False),
        devices_per_node=RANKS,
        num_nodes=1,
        intra=_FAST,
        inter=None,
        collectives={},
        overlap=1.0,
    )


def optimizers_of(module: nn.Module) -> list[Optimizer]:
    """Make AdamW with and without decay, as the module does for Lightning."""
    made: list[Optimizer] = [module.configure_optimizers()["optimizer"]]  # type: ignore[operator]
    return made


# ---- plans and predictions -----------------------------------------------------------------------


def expectations(setting: Setting) -> dict[str, Callable[[], Expected]]:
    """Return what makes each plan, by name; the most telling ones first."""
    flat = data_mesh(RANKS, scope="intra")
    two_by_four = hybrid_mesh(2, RANKS // 2, scopes=("intra", "intra"))
    meshes = {"hybrid": two_by_four, "hybrid_zero2": two_by_four}

    def uniform(name: str, *, again: bool) -> Callable[[], Expected]:
        return lambda: expected_uniform(setting, name, meshes.get(name, flat), recompute=again)

    made = {name: uniform(name, again=False) for name in ("ddp", "zero1", "zero2", "zero3")}
    made["hybrid"] = uniform("hybrid", again=False)
    made["zero3+recompute"] = uniform("zero3", again=True)
    made["ddp+recompute"] = uniform("ddp", again=True)
    for ranks in (2, 4, 8):
        made[f"tensor {ranks}"] = lambda ranks=ranks: expected_tensor(setting, ranks)  # type: ignore[misc]
    made["pipeline 4"] = lambda: expected_pipeline(setting)
    made |= {f"{name}+recompute": uniform(name, again=True) for name in ("zero1", "zero2")}
    made["hybrid+recompute"] = uniform("hybrid", again=True)
    made["hybrid_zero2"] = uniform("hybrid_zero2", again=False)
    return made


def expected_uniform(setting: Setting, name: str, mesh: Mesh, *, recompute: bool) -> Expected:
    """Return a plan that stores all blocks alike."""
    graph = setting.graph
    names = [block.name for block in graph.blocks]
    again = [block.name for block in graph.blocks if recompute and block.recomputable]
    plan = preset_plan(PRESETS[name], mesh=mesh, blocks=names, recompute=again)
    costs = PlanCosts(
        TrainingStep(
            graph, setting.cluster, setting.profile, mesh, setting.samples, setting.kernels
        )
    )
    configs = plan.configs
    return Expected(plan, costs.seconds(configs), explain(costs, configs).peak_bytes)


def expected_tensor(setting: Setting, ranks: int) -> Expected:
    """Return the fastest plan with parameters split over `ranks`."""
    data = RANKS // ranks
    axes = (Axis("data", data, scope="intra"), Axis("tensor", ranks, scope="intra"))
    mesh, trace = Mesh(axes if data > 1 else axes[1:]), FunctionTrace()
    given: dict[str, Any] = {"device": setting.device.type}
    graph = capture(setting.module, setting.batch, batch_scaling=False, adapt=trace.of, **given)
    request = SearchRequest(
        graph,
        setting.cluster,
        setting.profile,
        device_counts=(RANKS,),
        global_batch_size=graph.batch_size * data,
        shards=False,
        kernel_seconds=setting.kernels,
        max_seconds=2.0,
        split=SplitModel(setting.module, setting.batch, graph, trace, **given),
        mesh=mesh,
    )
    kernels = dict(setting.kernels)
    for local in local_graphs(request):
        kernels |= measure_kernels(
            local, device=setting.device, budget_seconds=0.5, known=kernels.keys()
        )
    found = search_plans(replace(request, kernel_seconds=kernels)).candidates
    plain = [p for p in found if not any(block.config.recompute for block in p.plan.blocks)]
    # The smallest splits most; several splits are equally fast where nothing takes time on links.
    point = min(plain or found, key=lambda each: (each.peak_bytes, each.step_seconds))
    return Expected(point.plan, point.step_seconds, point.peak_bytes)


def expected_pipeline(setting: Setting) -> Expected:
    """Return four stages in a row under 1F1B; seconds are those of a rank that never waits."""
    request = SearchRequest(
        setting.graph,
        setting.cluster,
        setting.profile,
        device_counts=(STAGES,),
        global_batch_size=setting.samples * MICROBATCHES,
        shards=False,
        kernel_seconds=setting.kernels,
        max_seconds=2.0,
        pipelines=PipelineRequest(STAGES, "1f1b", MICROBATCHES, ranks=STAGES, tensor=1),
    )
    point = min(search_plans(request).candidates, key=lambda each: each.step_seconds)
    busy = MICROBATCHES / (MICROBATCHES + STAGES - 1)  # the rest of the step are bubbles
    return Expected(point.plan, busy * point.step_seconds, point.peak_bytes)


# ---- steps of one rank ---------------------------------------------------------------------------


def run_rank(setting: Setting, plan: ParallelPlan, *, rank: int, quick: bool) -> dict[str, Any]:
    """Run steps of `plan` as one of its ranks; return columns of its row."""
    device = setting.device
    steps = 2 if quick else 5
    with fake_ranks(plan.mesh.size, rank=rank):
        module = copy.deepcopy(setting.module).train()
        free_memory(device)
        meter = MemoryMeter(device)
        meter.mark_base(module)
        step, close = make_step(plan, module, setting.batch, device)
        step()  # optimizer state, work buffers of libraries
        # DDP holds its buckets twice at the start of the second step, which predictions count.
        reset_peaks(device)
        meter.reset_peak()
        for _ in range(_WARM_STEPS):
            step()
        seconds, host = timed(step, steps, device)
        row: dict[str, Any] = {"measured_seconds": seconds, "host_seconds": host}
        row["measured_bytes"] = meter.peak_bytes()
        row.update(memory_columns(device))
        close()
    return row


@contextmanager
def fake_ranks(world_size: int, *, rank: int) -> Iterator[None]:
    """Make this process a rank of a group that sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    make = dist.new_group

    def make_fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs)  # a group on gloo would wait for ranks that are not there

    try:
        with _own_objects(), mock.patch.object(dist, "new_group", make_fake):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def _own_objects() -> Iterator[None]:
    """Let a rank receive its own objects: nothing that could be unpickled comes of a fake group."""

    def gather(object_list: Any, obj: object, group: object = None) -> Any:
        object_list[:] = [obj] * len(object_list)

    # a broadcast leaves what is there; a gather finds its own object of every rank
    broadcast = mock.patch.object(dist, "broadcast_object_list", lambda *_, **__: None)
    with broadcast, mock.patch.object(dist, "all_gather_object", gather):
        yield


def make_step(
    plan: ParallelPlan, module: nn.Module, batch: Tensor, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Apply `plan`; return what runs a step of forward, backward and update, and what ends it."""
    # DDP's own all-reduce has a result only from real ranks.
    engine = Engine(plan, module, device=device, options=RunOptions(hook=_keep_bucket))
    staged = plan.schedule is not None
    batch = batch.to(device)

    def loss_of_part(model: nn.Module, part: Any) -> Tensor:
        return loss_of(call_training_step(model, part))

    engine.apply(example=Example(loss_of_part, batch) if staged else None)
    optimizers = optimizers_of(module)
    engine.attach_optimizers(optimizers)
    parts: Sequence[Any] = [batch] * (plan.num_microbatches if staged else 1)

    def loss(model: nn.Module, part: Any) -> Tensor:
        with forward_is_training_step(module):
            found = loss_of(model(part))
        for optimizer in optimizers:  # after forward, as Lightning does
            optimizer.zero_grad()
        return found

    def step() -> None:
        if staged:
            for optimizer in optimizers:
                optimizer.zero_grad()
        engine.run_step(parts, loss_of_part if staged else loss)
        for optimizer in optimizers:
            optimizer.step()

    return step, engine.close


def _keep_bucket(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Give a bucket back as it is, in the place of DDP's all-reduce."""
    buffer = bucket.buffer()
    devices = [buffer.device] if buffer.device.type == "cuda" else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


# DDP compares annotations with the types themselves, not with their names.
_keep_bucket.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> tuple[float, float]:
    """Return seconds of a step, and those in which the host issued it."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / steps, issued / steps


def main() -> None:
    run_part("fake_groups", run, __doc__)


if __name__ == "__main__":
    main()
