"""Plans on all ranks: the step and the peak that are predicted, and what the engine takes.

Predicted as a strategy does it: the step captured, its kernels, the optimizer and the machine
measured by all ranks. Losses stand beside those of `ddp`; plans with a tensor axis train on the
batch of rank 0 alone, and have a loss of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import measure_update_seconds
from benchmarks.gpu_report.reporting import memory_columns, reset_peaks, synchronize
from benchmarks.multi_gpu.job import Job
from lightning_topt.costs.calibrate import calibrate, measure_kernels
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.demo import VOCABULARY, ByteGPT
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import MemoryMeter, return_freed_memory, warm_up
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.plugins.searched_plan import make_fake_optimizers
from lightning_topt.techniques.technique import RunOptions
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel

NAMED = ("ddp", "zero1", "zero2", "zero3", "zero3+recompute")
NODES = ("hybrid",)  # two halves of the ranks stand for two nodes
TENSOR = "tensor"
QUICK = ("ddp", "zero3", TENSOR)
_WARM_UP, _STEPS, _SECONDS = 4, 8, 120.0


class StepGPT(ByteGPT):
    """A GPT whose forward is the step: it takes a batch and returns the loss."""

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.long()
        logits = super().forward(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss


def run(job: Job) -> None:
    names = QUICK if job.report.quick else (*NAMED, *(NODES if job.ranks > 2 else ()), TENSOR)
    if not (left := job.left(names)):
        return
    if job.device.type == "cpu":
        return_freed_memory(job.device)
    warm_up(job.device)
    setting = Setting.measured(job)
    for name in left:
        with job.case(name, seconds=_SECONDS) as row:
            plan = setting.tensor_plan(job) if name == TENSOR else setting.named_plan(name, job)
            predicted = plan.predicted
            assert predicted is not None
            row["plan"] = plan.summary()
            row["predicted_step_seconds"] = predicted.step_seconds
            row["predicted_peak_bytes"] = predicted.peak_bytes
            row.update(measure(plan, setting, job))


@dataclass(frozen=True)
class Setting:
    """The sizes of the model, its batches by rank, and what a search asks for."""

    sizes: tuple[int, int, int, int]
    batches: Tensor  # (rank, sample, token)
    request: SearchRequest

    @classmethod
    def measured(cls, job: Job) -> Setting:
        """Capture the step and measure what it consists of; a collective call."""
        small = job.report.quick or job.device.type == "cpu"
        sizes, samples = ((2, 64, 4, 32), 4) if small else ((12, 1024, 16, 512), 8)
        shape = (job.ranks, samples, sizes[3] + 1)
        batches = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
        module = new_module(sizes)
        graph = capture(
            module,
            batches[0],
            device=job.device.type,
            batch_scaling=False,
            forward_context=lambda: autocast(job),
        )
        optimizers, named = make_fake_optimizers(module, device=job.device)
        profile = read_optimizer(optimizers, named_parameters=named, device_type=job.device.type)
        seconds = measure_update_seconds(optimizers, named_parameters=named, device=job.device)
        request = SearchRequest(
            graph,
            calibrate(device=job.device),
            replace(profile, seconds_per_element=seconds),
            device_counts=(job.ranks,),
            global_batch_size=samples * job.ranks,
            kernel_seconds=measure_kernels(graph, device=job.device),
            returns_memory=job.device.type == "cpu",
        )
        return cls(sizes, batches, request)

    def named_plan(self, name: str, job: Job) -> ParallelPlan:
        """Return a plan by name, priced."""
        given = read_plan_option(name)
        assert isinstance(given, UniformPlan)
        mesh = data_mesh(job.ranks)
        if given.preset.inner:
            mesh = hybrid_mesh(2, job.ranks // 2, scopes=("intra", "intra"))
        plan = replace(given.of(self.request.graph, mesh), batch_size=self.batches.shape[1])
        return self._of_rank_0(price_plan(self.request, plan).plan, job)

    def tensor_plan(self, job: Job) -> ParallelPlan:
        """Return the plan on one tensor axis over all ranks that takes least memory."""
        module, trace = new_module(self.sizes), FunctionTrace()
        given: Any = {"device": job.device.type, "forward_context": lambda: autocast(job)}
        graph = capture(module, self.batches[0], batch_scaling=False, adapt=trace.of, **given)
        wanted = replace(
            self.request,
            graph=graph,
            global_batch_size=graph.batch_size,
            shards=False,
            split=SplitModel(module, self.batches[0], graph, trace, **given),
            mesh=Mesh((Axis("tensor", job.ranks),)),
        )
        kernels = dict(wanted.kernel_seconds)
        for local in local_graphs(wanted):
            kernels |= measure_kernels(local, device=job.device, budget_seconds=0.5, known=kernels)
        points = search_plans(replace(wanted, kernel_seconds=kernels)).candidates
        return self._of_rank_0(min(points, key=lambda point: point.peak_bytes).plan, job)

    def _of_rank_0(self, plan: ParallelPlan, job: Job) -> ParallelPlan:
        return ParallelPlan.from_dict(job.of_rank_0(plan.to_dict()))


def new_module(sizes: tuple[int, int, int, int]) -> StepGPT:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    return StepGPT(*sizes)


def autocast(job: Job) -> torch.autocast:
    """Return the context of forward, as Lightning's ``bf16-mixed`` makes it."""
    return torch.autocast(job.device.type, torch.bfloat16, cache_enabled=False)


def measure(plan: ParallelPlan, setting: Setting, job: Job) -> Mapping[str, Any]:
    """Train under `plan`; return the columns of its row."""
    meter, module = MemoryMeter(job.device), new_module(setting.sizes)
    meter.mark_base(module)
    options = RunOptions(gather_dtype=torch.bfloat16)
    engine = Engine(plan, module, device=job.device, options=options)
    engine.apply()
    optimizer: Any = module.configure_optimizers()["optimizer"]
    engine.attach_optimizers([optimizer])
    batch = setting.batches[0 if plan.mesh.tensor_axes else job.rank].to(job.device)

    def loss_of(model: nn.Module, part: Any) -> Tensor:
        with autocast(job):
            loss: Tensor = model(part)
        optimizer.zero_grad()  # after forward, as Lightning does
        return loss

    def step() -> Tensor:
        loss = engine.run_step([batch], loss_of)
        optimizer.step()
        return loss

    for _ in range(_WARM_UP):
        step()
    meter.reset_peak()
    reset_peaks(job.device)
    synchronize(job.device)
    start = time.perf_counter()
    for _ in range(_STEPS):
        loss = step()
    synchronize(job.device)
    seconds = (time.perf_counter() - start) / _STEPS
    mean = job.empty(4)[:1] + loss.detach().float().sum()
    torch.distributed.all_reduce(mean)
    columns = {
        "measured_step_seconds": job.largest(seconds),
        "measured_peak_bytes": job.largest(float(meter.peak_bytes() or 0)),
        "last_loss": float(mean) / job.ranks,
        **memory_columns(job.device),
    }
    engine.release()
    engine.close()
    return columns
