"""Ways of training on two nodes of two ranks: their plans, a fit of one, and its predicted seconds.

    python -m benchmarks.exchange.loss_ways --way dense --model GPT ...   # a rank of a fit
    python -m benchmarks.exchange.loss_ways --predict                     # a rank of a prediction

Started by `benchmarks.exchange.time_to_loss`, whose ways these are. All take the same samples in
every step, whichever ranks have them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from benchmarks.common import QUIET
from benchmarks.pipelines.time_to_quality import Recurrent
from lightning_topt import AutoParallelStrategy, LocalStepsStrategy
from lightning_topt.basics.core_wait import usable_cores
from lightning_topt.communication.exchange_method import (
    ExchangeMethod,
    GradientMethod,
    LocalMethod,
    read_method,
)
from lightning_topt.communication.wire import LevelFormat, SparseMessage
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import read_optimizer, time_updates
from lightning_topt.demo import ByteGPT, StdlibBytesDataModule
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan import stage_tables
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.lost_ranks import destroy_process_group

NODES, LOCAL = 2, 2
RANKS = NODES * LOCAL
SEQ_LEN, SEQUENCES, VALIDATION, MOST_BYTES = 64, 16, 256, 8_000_000
WARMUP, DENSE = 50, "dense"  # steps in which the learning rate rises; what others are compared with
SHARED = max(RANKS / usable_cores(), 1.0)  # ranks of both nodes on a core
SMOOTH = 75  # steps whose validations are averaged
FILLING, WINDOW = 10, 10  # steps before the clock starts, and of a window that it times
FEEDBACK = {"rule": "two_versions", "error_feedback": True}
TOP_K = {"method": "topk", "density": None, "bits": 2}


@dataclass(frozen=True)
class Way:
    """A way of training on `RANKS` ranks.

    Args:
        name: in step_factors.json's page, of its compression; "" without.
        method: that compresses, or of local steps; None: gradients as they are.
        stages: of each pipeline; 1: none.
        schedule: of the stages.
        rule: for the weights of an asynchronous pipeline.
        cut: minibatches of an update (`accumulate_grad_batches`), or microbatches of 1F1B.
    """

    name: str = ""
    method: Mapping[str, Any] | None = None
    stages: int = 1
    schedule: str | None = None
    rule: str | Mapping[str, Any] | None = None
    cut: int = 1

    @property
    def exchange(self) -> ExchangeMethod | None:
        return None if self.method is None else read_method(self.method)

    @property
    def is_local(self) -> bool:
        return isinstance(self.exchange, LocalMethod)

    @property
    def replicas(self) -> int:
        """Ranks with a batch of their own."""
        return RANKS // self.stages

    @property
    def senders(self) -> int:
        """Ranks, or nodes whose ranks are summed first, that send something of their own."""
        by_nodes = getattr(self.exchange, "hierarchical", False)
        return NODES if by_nodes else self.replicas

    @property
    def accumulate(self) -> int:
        return 1 if self.schedule == "1f1b" else self.cut

    @property
    def samples(self) -> int:
        """Sequences of a batch of the loader of a replica."""
        return SEQUENCES // self.replicas // self.accumulate

    @property
    def pass_samples(self) -> int:
        """Sequences of a forward pass."""
        return self.samples // (self.cut if self.schedule == "1f1b" else 1)

    @property
    def period(self) -> int:
        """Steps after which all repeats."""
        method = self.exchange
        return method.every if isinstance(method, LocalMethod) else 1

    @property
    def missing(self) -> int:
        """Updates that the first stage misses; two versions miss one on any number of stages."""
        return 0 if self.rule is None else 1 if self.rule == FEEDBACK else self.stages - 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the runs of its parts in step_factors.json, without the model."""
        stale = "two_versions, error feedback, any stages"
        stale = stale if self.rule == FEEDBACK else f"{self.rule}, {self.stages} stages"
        return (
            *((f"{stale}|1",) if self.rule is not None else ()),
            *((f"{self.name}|{NODES}",) if self.name else ()),
        )


BY_NODES = {"hierarchical": True}
SPARSE_LOCO = {"method": "sparse_loco", "every": 5, "density": 0.125, "residual_decay": 0.8}
DILOCO = {"method": "local_steps", "every": 50, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
SHORT_TOP_K, SHORT_LOCO = "top-k 16 % / ranks, 2 bits", "SparseLoCo, 5 steps, 12.5 %"
WAYS = {
    DENSE: Way(),
    "bf16": Way("bf16", {"method": "bf16"}),
    "top-k": Way(SHORT_TOP_K, TOP_K | BY_NODES),
    "SparseLoCo": Way(SHORT_LOCO, SPARSE_LOCO | BY_NODES),
    "DiLoCo": Way("DiLoCo, 50 steps", DILOCO | BY_NODES),
    "4 stages, 1F1B": Way(stages=4, schedule="1f1b", cut=4),
    "4 stages, spectrain": Way(stages=4, schedule="continuous", rule="spectrain"),
    "4 stages, two versions": Way(stages=4, schedule="continuous", rule=FEEDBACK, cut=4),
    "2 x (2 stages, 1F1B)": Way(stages=2, schedule="1f1b", cut=4),
    "2 x (2 stages, 1F1B), top-k": Way(SHORT_TOP_K, TOP_K, stages=2, schedule="1f1b", cut=4),
    "2 x (2 stages, two versions), top-k": Way(
        SHORT_TOP_K, TOP_K, stages=2, schedule="continuous", rule=FEEDBACK
    ),
}


# ---- models --------------------------------------------------------------------------------------


class ResidualByteLSTM(L.LightningModule):
    """A language model of bytes, with the optimizer and the logged loss of `ByteGPT`."""

    def __init__(self, layers: int, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, 256)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of the next byte, in nats."""
        tokens = batch.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Train on (B, T + 1) bytes."""
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log bits per byte."""
        self.log("val_bits_per_byte", self.loss(batch) / math.log(2), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW whose learning rate rises, and then stays."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LabModel(NamedTuple):
    """A model of `blocks.0` to `blocks.3`, made for a learning rate; `rate` is the dense run's."""

    make: Callable[[float], Any]
    rate: float
    words: str


BLOCKS = 4
MODELS = {
    "GPT": LabModel(
        lambda rate: ByteGPT(BLOCKS, 192, 4, SEQ_LEN, learning_rate=rate, warmup_steps=WARMUP),
        0.001,
        "a byte-level GPT of 4 layers of 192, as in the table but larger",
    ),
    "LSTM": LabModel(
        lambda rate: ResidualByteLSTM(BLOCKS, 192, rate),
        0.002,
        "a byte-level LSTM of 4 layers of 192, held out",
    ),
}


def plan_of(way: Way) -> ParallelPlan:
    """Return the plan of a way of training; without local steps, if whole replicas make these."""
    inside = "inter" if way.stages > LOCAL else "intra"
    axes = [] if way.stages == RANKS else [Axis("data", way.replicas, "inter")]
    axes += [] if way.stages == 1 else [Axis("pipeline", way.stages, inside)]
    config = OpConfig.zero(0, axes=len(axes), over=())
    each = BLOCKS // way.stages
    stages = [
        (*(f"blocks.{n}" for n in range(first, first + each)), "")
        for first in range(0, BLOCKS, each)
    ]
    method = way.exchange
    return ParallelPlan(
        Mesh(tuple(axes)),
        tuple(StagePlan(tuple(BlockPlan(name, config) for name in names)) for names in stages),
        batch_size=way.samples,
        gradient_exchange=method if isinstance(method, GradientMethod) else None,
        local_steps=method if isinstance(method, LocalMethod) and way.stages > 1 else None,
        schedule=way.schedule,
        num_microbatches=way.cut if way.schedule == "1f1b" else 1,
        prediction=way.rule,
        accumulate=way.accumulate,
    )


def window_of(way: Way) -> int:
    """Return the steps that are timed together."""
    return max(WINDOW, way.period)


# ---- one rank of a fit ---------------------------------------------------------------------------


def smooth(points: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """Return steps and losses, each the mean of the validations in the last `SMOOTH` steps.

    A single validation of two equal trainings differs by as much as 30 steps of training make.
    """
    return [
        (step, statistics.mean(loss for s, _, loss in points if step - SMOOTH < s <= step))
        for step, _, _ in points
    ]


class Clock(L.Callback):
    """Times steps of `each` batches, and ends the fit at a smooth validation loss.

    `points`: steps, seconds of training without those of validation, and the loss.
    """

    def __init__(self, *, each: int, goal: float) -> None:
        self.each, self.goal = each, goal
        self.ends: list[float] = []
        self.points: list[tuple[int, float, float]] = []
        self._seconds, self._since = 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock."""
        trainer.strategy.barrier()
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Note the end of a step; of an asynchronous pipeline it is that of an iteration."""
        if (index + 1) % self.each == 0:
            self.ends.append(time.perf_counter())

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop the clock: minibatches in flight are done."""
        trainer.strategy.barrier()
        self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Note the loss, that of rank 0 on all ranks, and start the clock again."""
        loss = float(trainer.callback_metrics["val_bits_per_byte"])
        loss = trainer.strategy.broadcast(loss)
        self.points.append((len(self.ends), self._seconds, loss))
        trainer.should_stop = trainer.should_stop or smooth(self.points)[-1][1] <= self.goal
        trainer.strategy.barrier()
        self._since = time.perf_counter()

    def windows(self, size: int) -> list[float]:
        """Return seconds per step of each `size` steps, after those that fill pipelines."""
        ends = self.ends[FILLING - 1 :]
        return [
            (ends[start + size] - ends[start]) / size
            for start in range(0, len(ends) - 1 - size, size)
        ]


def strategy_of(way: Way) -> L.pytorch.strategies.DDPStrategy:
    """Return the strategy that trains in that way."""
    if way.is_local and way.stages == 1:
        assert way.method is not None
        return LocalStepsStrategy(way.method)
    return AutoParallelStrategy(
        plan=replace(plan_of(way), batch_size=None),
        allow={"local_steps" if way.is_local else "compression": way.method, "staleness": way.rule},
    )


def loaders(samples: int) -> tuple[Any, Any]:
    """Return loaders of `samples` sequences per replica: the same ones in every step of any way."""
    data = StdlibBytesDataModule(SEQ_LEN, SEQUENCES, max_bytes=MOST_BYTES)
    data.setup()
    order = torch.randperm(len(data.train_data), generator=torch.Generator().manual_seed(1))
    apart = len(data.val_data) // VALIDATION
    held = range(0, VALIDATION * apart, apart)
    return (
        DataLoader(Subset(data.train_data, order.tolist()), samples),
        DataLoader(Subset(data.val_data, held), VALIDATION // RANKS),
    )


def fit_here(options: argparse.Namespace) -> dict[str, Any]:
    """Train; return the points of `Clock`, seconds per step in windows, and the learning rate."""
    way = WAYS[options.way]
    L.seed_everything(0, verbose=False)
    clock = Clock(each=way.accumulate, goal=options.loss)
    rest: dict[str, Any] = QUIET | {"limit_val_batches": 0}
    if options.every:
        rest = QUIET | {"val_check_interval": options.every * way.accumulate}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=LOCAL,
        num_nodes=NODES,
        strategy=strategy_of(way),
        max_steps=options.steps,
        accumulate_grad_batches=way.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[clock],
        **rest,
    )
    module = MODELS[options.model].make(options.rate)
    trainer.fit(module, *loaders(way.samples))
    return {
        "points": clock.points,
        "windows": clock.windows(window_of(way)),
        "rate": options.rate,
        "parameters": sum(p.numel() for p in module.parameters()),
    }


# ---- one rank of a prediction --------------------------------------------------------------------


def predict_here() -> dict[str, Any]:
    """Calibrate this lab, and return seconds per step by model and way."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found: dict[str, dict[str, float]] = {}
    # Python of ranks that share cores, as `on_shared_cores`
    stage_tables.PASS_SECONDS *= SHARED
    stage_tables.STALE_PASS_SECONDS *= SHARED
    with tempfile.TemporaryDirectory() as folder:  # measured now, not in another moment
        measurements = Measurements.open(num_nodes=NODES, directory=folder)
        cluster = on_shared_cores(measurements.cluster())
        for name, model in MODELS.items():
            requests = {
                samples: _request(measurements, cluster, model, samples)
                for samples in sorted({way.pass_samples for way in WAYS.values()})
            }
            found[name] = {
                way_name: predicted_seconds(way, requests[way.pass_samples])
                for way_name, way in WAYS.items()
            }
        busy = measurements.busy_share
    return {"seconds": found, "cluster": cluster.to_dict(), "busy_share": busy}


def on_shared_cores(cluster: Cluster) -> Cluster:
    """Return the cluster of ranks that share cores: a kernel is measured while it has one."""
    device = cluster.device
    return replace(
        cluster,
        device=replace(
            device,
            flops={dtype: rate / SHARED for dtype, rate in device.flops.items()},
            memory_bandwidth=device.memory_bandwidth / SHARED,
            op_overhead_seconds=device.op_overhead_seconds * SHARED,
            framework_seconds=device.framework_seconds * SHARED,
        ),
    )


def _request(
    measurements: Measurements, cluster: Cluster, model: LabModel, samples: int
) -> SearchRequest:
    """Return what plans with passes of `samples` are priced with. A collective call."""
    module = model.make(0.001)
    # as it is: kernels of an LSTM depend on the batch size
    batch = torch.zeros(samples, SEQ_LEN + 1, dtype=torch.uint8)
    graph = capture(module, batch, batch_scaling=False)
    optimizers = [module.configure_optimizers()["optimizer"]]
    named = [*module.named_parameters()]
    times = time_updates(optimizers, named_parameters=named, known=measurements.known_updates)
    seconds = measurements.agree_on_updates(times)
    profile = read_optimizer(optimizers, named_parameters=named)
    kernels = measurements.kernel_seconds(graph)
    return SearchRequest(
        graph,
        cluster,
        replace(profile, seconds_per_element={k: SHARED * v for k, v in seconds.items()}),
        device_counts=(RANKS,),
        global_batch_size=samples,
        kernel_seconds={key: SHARED * each for key, each in kernels.items()},
    )


def predicted_seconds(way: Way, request: SearchRequest) -> float:
    """Return the package's seconds per step.

    It has no price for local steps of nodes: here that is a step of the ranks that train one
    replica, and the outer step divided by the steps between two.
    """
    if way.is_local and way.stages == 1:
        # the ranks of a node under DDP
        inside = ParallelPlan.of_blocks(
            [BlockPlan("", OpConfig.zero(0))], mesh=data_mesh(LOCAL), batch_size=way.samples
        )
        one_node = replace(request, device_counts=(LOCAL,), global_batch_size=way.samples * LOCAL)
        step = price_plan(one_node, inside).predicted.step_seconds
        numel = sum(p.numel for p in request.graph.parameters)
        return step + outer_seconds(way, request.cluster, numel) / way.period
    plan = plan_of(way)
    wanted = replace(request, global_batch_size=way.samples * way.replicas)
    return price_plan(wanted, plan).predicted.step_seconds


def outer_seconds(way: Way, cluster: Cluster, numel: int) -> float:
    """Return the seconds of an outer step by nodes: shards between nodes, gathered inside them."""
    part = numel // LOCAL
    across, inside = Group(NODES, LOCAL), Group(LOCAL)
    density = way.exchange.sent_share if isinstance(way.exchange, LocalMethod) else 1.0
    if density == 1.0:
        op, size = "all_reduce", 4.0 * part
    else:  # of each node, levels and codes beside the indices
        k = round(density * part)
        indices = SparseMessage(part, k).nbytes - 4 * k
        op, size = "all_gather", NODES * float(indices + LevelFormat(k, 2).nbytes)
    # what all agreed on, the residual, the parameters: read and written
    passes = 10 * 4.0 * numel / cluster.device.memory_bandwidth
    return (
        passes
        + estimate_collective_seconds(cluster, op=op, size=size, group=across)
        + estimate_collective_seconds(cluster, op="broadcast", size=4.0 * numel, group=inside)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--loss", type=float, help="where to stop")
    parser.add_argument("--every", type=int, help="steps between validations; 0: none")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = predict_here() if options.predict else fit_here(options)
    if int(os.environ["RANK"]) == 0:
        options.out.write_text(json.dumps(result))
    destroy_process_group()


if __name__ == "__main__":
    main()
