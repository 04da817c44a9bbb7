"""Steps of pipelines as simulated and as measured, on one machine and on nodes at 1 Gb/s.

    sudo python -m benchmarks.pipelines.predictions            # --rate, --steps, --settings

Seconds of passes come from short runs of other schedules (`CALIBRATION`) with fewer microbatches, a
clock around every pass of a stage. Seconds of transfers come from tensors of the same size sent
back and forth. Bytes of a stage come from the peaks of two short runs that hold all their
microbatches, of 4 and of 6: with fewer the peak is at another time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine, mib
from benchmarks.lab import Lab, LabError, end_on_signals
from benchmarks.pipelines.shared import plan_of
from benchmarks.pipelines.simulated_memory import MemoryCosts, arrived_bytes, peak_bytes
from benchmarks.tensor.overhead import Layer
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.memory import MemoryMeter, return_freed_memory, warm_up
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_pass import StagePass
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.schedules.schedules import SCHEDULES, Schedule, make_schedule
from lightning_topt.schedules.timing import simulate

RUN = "benchmarks.pipelines.predictions"
SETTINGS = {
    "1 node of 2": (1, 2),
    "1 node of 4": (1, 4),
    "2 nodes of 1": (2, 1),
    "4 nodes of 1": (4, 1),
}


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """Return the relative errors of seconds, and of the bytes of the rank with the largest one."""
    pairs = zip(row["expected_bytes"], row["bytes"], strict=True)
    return row["expected_seconds"] / row["seconds"] - 1, max((a / b - 1 for a, b in pairs), key=abs)


def line(setting: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    of_time, of_bytes = (f"{100 * error:+.1f} %" for error in errors(row))
    peaks = f"{mib(max(row['expected_bytes']))} | {mib(max(row['bytes']))}"
    seconds = f"{row['expected_seconds']:.3f} | {row['seconds']:.3f}"
    return f"| {setting} | {row['case']} | {seconds} | {of_time} | {peaks} | {of_bytes} |"


def shares(values: Sequence[float]) -> str:
    """Return median and largest as text."""
    return f"{100 * statistics.median(values):.1f} % (median), {100 * max(values):.1f} % (largest)"


def main() -> None:
    """Measure and write the table."""
    end_on_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_predictions.md")
    options = parser.parse_args()
    rows: list[tuple[str, dict[str, Any]]] = []
    for setting in options.settings:
        nodes, per_node = SETTINGS[setting]
        with Lab(nodes, rate=options.rate if nodes > 1 else None) as lab:
            found = lab.run_module(RUN, "--worker", ranks_per_node=per_node, steps=options.steps)
        for row in found:
            rows.append((setting, row))
            print(line(setting, row), flush=True)
            passes = {
                kind: [round(1e3 * s, 1) for s in values]
                for kind, values in row["passes"].items()
                if values
            }
            print(
                f"    ms of passes {passes}, of a transfer {1e3 * row['transfer']:.2f}", flush=True
            )
    of_time, of_bytes = zip(*(map(abs, errors(row)) for _, row in rows), strict=True)
    lines = [
        "# Steps of pipelines simulated and measured",
        "",
        f"`sudo python -m benchmarks.pipelines.predictions --rate {options.rate} --steps "
        f"{options.steps}`",
        "",
        machine(),
        "",
        f"- {len(rows)} runs: |error| of time {shares(of_time)}; of peak bytes {shares(of_bytes)}",
        "",
        "Eight Transformer layers, one thread per rank, 8 microbatches; forward and backward. "
        "Seconds of passes come from",
        "short runs of another schedule with 4 and 6 microbatches, those of transfers from tensors "
        "of the same size sent",
        "back and forth, bytes from the peaks of the short runs. MiB: of the rank with the most; "
        "error: the largest of a rank.",
        "",
        "| setting | schedule | simulated s | measured s | error | simulated MiB | measured MiB | "
        "error |",
        "|---" * 8 + "|",
        *(line(setting, row) for setting, row in rows),
    ]
    options.out.write_text("\n".join(lines) + "\n")
    print(lines[6])


# ---- one rank of a job: measured steps, and what the simulator expects of them -------------------

CPU = torch.device("cpu")
KINDS = ("forward", "backward", "backward_input", "backward_weight")
LAYERS = 8
# Of one and of two stages per rank: without and with a backward pass in two parts.
CALIBRATION = {1: ("gpipe", "zero_bubble"), 2: ("looped_bfs", "interleaved_zero_bubble")}
# Names of rows: schedule, layers of the stages (None: equally many).
CASES: dict[str, tuple[str, Mapping[int, Sequence[int]] | None]] = {
    "gpipe": ("gpipe", None),
    "1f1b": ("1f1b", None),
    "1f1b, uneven stages": ("1f1b", {2: (3, 5), 4: (1, 2, 3, 2)}),
    "zero_bubble": ("zero_bubble", None),
    "interleaved": ("interleaved", None),
    "zbv": ("zbv", None),
}


class Stack(nn.Module):
    """Transformer layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def forward(self, part: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        x = part[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, part[1])


def loss_of(model: nn.Module, part: Any) -> Tensor:
    """Return the loss of a microbatch."""
    loss: Tensor = model(part)
    return loss


@contextmanager
def clocked() -> Iterator[dict[tuple[str, int], list[float]]]:
    """Within it seconds of the passes of this rank are taken, by kind and stage."""
    found: dict[tuple[str, int], list[float]] = {}
    originals = {kind: getattr(StagePass, kind) for kind in KINDS}

    def timed(kind: str) -> Any:
        @wraps(originals[kind])
        def call(self: StagePass, stage_index: int, *args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = originals[kind](self, stage_index, *args, **keywords)
            found.setdefault((kind, stage_index), []).append(time.perf_counter() - start)
            return result

        return call

    for kind in KINDS:
        setattr(StagePass, kind, timed(kind))
    try:
        yield found
    finally:
        for kind, original in originals.items():
            setattr(StagePass, kind, original)


@contextmanager
def arrived() -> Iterator[dict[int, int]]:
    """Record the bytes of gradients that wait for backward_weight, by stage of this rank."""
    found: dict[int, int] = {}
    original = StagePass.backward_input

    def noted(
        self: StagePass, stage_index: int, microbatch_index: int, *args: Any, **keywords: Any
    ) -> Any:
        result = original(self, stage_index, microbatch_index, *args, **keywords)
        if (
            state := self._passes.get((stage_index, microbatch_index))
        ) is not None and state.weights is not None:
            found[stage_index] = arrived_bytes(state.weights)
        return result

    StagePass.backward_input = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StagePass.backward_input = original  # type: ignore[method-assign]


class Job:
    """One pipeline at a time on these ranks, on microbatches of one size."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.ranks, self.rank = options, dist.get_world_size(), dist.get_rank()
        self.meter = MemoryMeter(CPU)

    def run(
        self,
        name: str,
        sizes: Sequence[int],
        *,
        microbatches: int,
        steps: int,
        clocks: bool = False,
    ) -> dict[str, Any]:
        """Return this rank's seconds of each step and the peak bytes of all of them.

        With `clocks` also seconds of passes.
        """
        options = self.options
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        blocks = [f"layers.{index}" for index in range(LAYERS)]
        mesh = Mesh((Axis("pipeline", self.ranks),))
        plan = plan_of(blocks, starts, mesh=mesh, schedule=name, microbatches=microbatches)
        shape = (2, microbatches, options.batch, options.tokens, options.width)
        # the batch is not the pipeline's
        parts = list(zip(*torch.randn(shape).unbind(), strict=True))
        self.meter.mark_base()
        torch.manual_seed(0)
        module = Stack(options.width)
        engine = Engine(plan, module, device=CPU)
        engine.apply(example=Example(loss_of, parts[0]))
        seconds = []
        with arrived() as waiting:
            engine.run_step(parts, loss_of)  # flows are traced, gradients exist from here on
        with clocked() as passes:
            for index in range(steps + 1):
                if index == 1:
                    self.meter.reset_peak()
                    passes.clear()
                dist.barrier()
                start = time.perf_counter()
                engine.run_step(parts, loss_of)
                dist.barrier()
                seconds.append(time.perf_counter() - start)
        peak = self.meter.peak_bytes()
        engine.release()
        engine.close()
        return {
            "seconds": seconds[1:],
            "peak": peak,
            "passes": passes,
            "waiting": waiting,
            "module": sum(p.nbytes for p in module.parameters()),
        }


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks. A collective call."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def pass_seconds(results: Sequence[dict[str, Any]], kind: str, count: int) -> list[float]:
    """Return the median seconds of a kind of pass in each stage, of all ranks' clocks."""
    of_stage: dict[int, list[float]] = {}
    for result in results:
        for (found, stage), values in result["passes"].items():
            if found == kind:
                of_stage.setdefault(stage, []).extend(values)
    return [statistics.median(of_stage[stage]) for stage in range(count)]


def transfer_seconds(nbytes: int, *, repeats: int = 30) -> float:
    """Return the seconds of a tensor from one rank to the next. A collective call.

    Other pairs exchange one at the same time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    tensor, seconds = torch.zeros(nbytes // 4), []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        if peer >= ranks:
            continue
        for sends in (True, False) if rank < peer else (False, True):
            (dist.send if sends else dist.recv)(tensor, peer)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(statistics.median(each) for each in gathered(seconds) if each)


def run_worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return_freed_memory(CPU)
    warm_up(CPU)
    rows = list(measured(options))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every case: what was expected, and what was measured. A collective call."""
    job, ranks = Job(options), dist.get_world_size()
    nbytes = 4 * options.batch * options.tokens * options.width
    for name, (schedule, uneven) in CASES.items():
        rule = SCHEDULES[schedule]
        count = ranks * rule.least_stages
        sizes = uneven[ranks] if uneven else [LAYERS // count] * count
        costs = calibrated(
            job, sizes, per_rank=rule.least_stages, splits=rule.splits_backward, nbytes=nbytes
        )
        found = gathered(
            job.run(schedule, sizes, microbatches=options.microbatches, steps=options.steps)
        )
        made = make_schedule(
            schedule,
            num_ranks=ranks,
            num_microbatches=options.microbatches,
            stages_per_rank=rule.least_stages,
        )
        expected = simulate(made, costs)
        yield {
            "case": name,
            "expected_seconds": expected.step_seconds,
            "seconds": statistics.median(
                max(each) for each in zip(*(f["seconds"] for f in found), strict=True)
            ),
            "expected_bytes": list(peak_bytes(expected)),
            "bytes": [f["peak"] for f in found],
            "passes": {kind: costs.seconds(kind) for kind in KINDS},  # type: ignore[arg-type]
            "transfer": max((costs.transfer_seconds or {}).values(), default=0.0),
        }
        if dist.get_rank() == 0:
            print(name, flush=True)


def calibrated(
    job: Job, sizes: Sequence[int], *, per_rank: int, splits: bool, nbytes: int
) -> MemoryCosts:
    """Return the costs of stages of so many layers, from short runs. A collective call."""
    whole, split = CALIBRATION[per_rank]
    few, more = (gathered(job.run(whole, sizes, microbatches=count, steps=4)) for count in (4, 6))
    results, count = few + more, len(sizes)
    waiting: dict[int, int] = {}
    seconds = {
        "forward": pass_seconds(results, "forward", count),
        "backward": pass_seconds(results, "backward", count),
    }
    if splits:
        results = gathered(job.run(split, sizes, microbatches=4, steps=4))
        waiting = {
            stage: nbytes for result in results for stage, nbytes in result["waiting"].items()
        }
        seconds = {kind: pass_seconds(results, kind, count) for kind in KINDS if kind != "backward"}
        seconds["backward"] = [
            a + b
            for a, b in zip(seconds["backward_input"], seconds["backward_weight"], strict=True)
        ]
    seconds_of_edge = transfer_seconds(nbytes)
    edges = {(stage, stage + 1): seconds_of_edge for stage in range(count - 1)}
    crossing = dict.fromkeys(edges, float(nbytes))
    costs = MemoryCosts(**seconds, transfer_seconds=edges, transfer_bytes=crossing)  # type: ignore[arg-type]
    made = make_schedule(whole, num_ranks=job.ranks, num_microbatches=4, stages_per_rank=per_rank)
    of_stages = stage_bytes(made, few, more)
    weights = [
        nbytes + waiting.get(stage, 0) for stage, nbytes in enumerate(of_stages["activation_bytes"])
    ]
    return replace(costs, **of_stages, weight_bytes=weights)


def stage_bytes(
    schedule: Schedule, few: Sequence[dict[str, Any]], more: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return bytes of each stage, from peaks of two runs.

    Their ranks hold 4 and 6 microbatches of each of their stages.
    """
    static, activation = [0.0] * schedule.num_stages, [0.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        for stage in stages:
            activation[stage] = (more[rank]["peak"] - few[rank]["peak"]) / 2 / len(stages)
            static[stage] = few[rank]["peak"] / len(stages) - 4 * activation[stage]
    return {"static_bytes": static, "activation_bytes": activation}


if __name__ == "__main__":
    try:
        run_worker() if "--worker" in sys.argv else main()
    except LabError as error:
        sys.exit(str(error))
