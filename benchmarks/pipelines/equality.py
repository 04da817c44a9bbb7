"""Pipelines compute what one process computes: loss, gradients, an update, buffers.

    python -m benchmarks.pipelines.equality             # groups of 2, 3, 4 and 8 ranks on gloo
    python -m benchmarks.pipelines.equality --only zbv  # these rows alone, put into the table

The one process runs the same microbatches one after another. Plans are every schedule on every
number of ranks, and mixtures with data and tensor axes, ZeRO-1 and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from benchmarks.equality import MODELS as SPLIT_MODELS
from benchmarks.equality import (
    Comparison,
    Differences,
    Model,
    Outcome,
    Part,
    Refusal,
    Text,
    cell,
    commit,
    compare_all,
    count_cells,
    differences,
    largest,
    made,
    optimizer_of,
    read_options,
    reasons,
    table,
)
from benchmarks.tensor.equality import Plan
from lightning_topt.demo import ByteGPT
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.op_config import Shard
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from lightning_topt.schedules.schedules import SCHEDULES
from lightning_topt.techniques.registry import check_runs

ONE_STAGE = [name for name, rule in SCHEDULES.items() if rule.least_stages == 1]  # per rank
TWO_STAGES = [name for name, rule in SCHEDULES.items() if rule.least_stages == 2]
D2, T2 = ("data", 2), ("tensor", 2)


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """A pipeline of `schedule`, with `per_rank` stages on each rank of the axis "pipeline".

    The rest is as in `Plan`. Blocks are dealt out in order, equally many to each stage; the block
    "" stands in every stage.
    """

    schedule: str = "1f1b"
    per_rank: int = 1
    draws: bool = True  # whether models that draw random numbers draw those of one process

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return dict(self.axes)["pipeline"] * self.per_rank

    def of(self, model: Model) -> ParallelPlan:
        """Return the plan for `model`."""
        *blocks, rest = self.blocks_of(model)
        return ParallelPlan(
            self.mesh,
            tuple(StagePlan((*part, rest)) for part in _parts(blocks, self.num_stages)),
            schedule=self.schedule,
            num_microbatches=self.microbatches,
        )

    def refusal(self, model: Model) -> Refusal | None:
        """Return why `model` is not compared under this plan."""
        if "dropout" in model.make.__name__ and not self.draws:
            return Refusal("ranks of a data or tensor axis draw other numbers than one process")
        try:
            check_runs(self.mesh, self.of(model).configs, None)
        except ValueError as error:
            return Refusal(error)
        return None


def _parts(blocks: Sequence[BlockPlan], count: int) -> Iterator[Sequence[BlockPlan]]:
    sizes = [len(blocks) // count + (index < len(blocks) % count) for index in range(count)]
    start = 0
    for size in sizes:
        yield blocks[start : start + size]
        start += size


def _plan(
    schedule: str,
    ranks: int,
    *more: tuple[str, int],
    storage: str = "ddp",
    microbatches: int | None = None,
    note: str = "",
) -> PipelinePlan:
    name = " x ".join([f"{schedule} {ranks}", *(f"{axis} {size}" for axis, size in more)]) + note
    count = microbatches or {2: 4, 3: 6, 4: 8, 8: 8}[ranks]
    return PipelinePlan(
        name,
        [("pipeline", ranks), *more],
        storage,
        microbatches=count,
        schedule=schedule,
        per_rank=2 if schedule in TWO_STAGES else 1,
        draws=not more,
    )


def _mixtures() -> Iterator[PipelinePlan]:
    for schedule in ("gpipe", "1f1b", "zero_bubble", "interleaved", "zbv"):
        yield _plan(schedule, 2, D2)
        yield _plan(schedule, 2, D2, storage="zero1", note=", ZeRO-1")
        yield _plan(schedule, 2, storage="ddp+ ddp", note=" + recomputation")
        yield _plan(schedule, 2, T2)
    for schedule in ("1f1b", "zbv"):
        yield _plan(schedule, 4, D2, microbatches=4)
        yield _plan(
            schedule, 4, D2, storage="zero1+ zero1", microbatches=4, note=", ZeRO-1 + recomputation"
        )
        yield _plan(schedule, 4, T2)
        yield _plan(schedule, 2, D2, T2, storage="zero1+ zero1", note=", ZeRO-1 + recomputation")


PLANS: list[PipelinePlan] = [
    *(_plan(schedule, ranks) for schedule in ONE_STAGE for ranks in (2, 3, 4, 8)),
    *(_plan(schedule, ranks) for schedule in TWO_STAGES for ranks in (2, 3, 4)),
    _plan("1f1b", 4, microbatches=2, note=", fewer microbatches than stages"),
    _plan("interleaved", 3, microbatches=4, note=", microbatches that ranks do not divide"),
    *_mixtures(),
]


# ---- models of at least eight parts in a row -----------------------------------------------------
# `blocks` are the units that stages are made of, in the order of their calls. Units that no stage
# names (an embedding, a head) run with the named one before them.

BATCH, DEPTH = 24, 8


def tokens() -> Part:
    """Tokens in and out."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2, 64, (2, BATCH, 12), generator=generator)
    return values[0], values[1]


def images() -> Part:
    """Images of 16 x 16 and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((BATCH, 3, 16, 16), generator=generator), torch.randint(
        8, (BATCH,), generator=generator
    )


def masks() -> Part:
    """Images of 16 x 16 and the class of each of their points."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn((BATCH, 3, 16, 16), generator=generator), torch.randint(
        4, (BATCH, 16, 16), generator=generator
    )


class GPT(nn.Module):
    """The byte-level GPT of the console, with tied embeddings.

    The last stage reads the weights of the first.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = ByteGPT(
            num_layers=DEPTH, hidden=32, num_heads=4, seq_len=16, tied_head=True, dropout=dropout
        )

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(part[0]).flatten(0, 1), part[1].flatten())


class Residual(nn.Module):
    """Two convolutions with norms over the microbatch.

    `stride` 2 halves the image and doubles the channels.
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        width = channels * stride
        self.first = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.down = nn.Conv2d(channels, width, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.down(x) + self.norm2(self.second(y)))


class ResNet(nn.Module):
    """Eight residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        channels, blocks = 8, []
        for index in range(DEPTH):
            stride = 2 if index in (3, 6) else 1
            blocks.append(Residual(channels, stride))
            channels *= stride
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 8)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = F.relu(self.norm(self.stem(part[0])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), part[1])


class Convolutions(nn.Module):
    """Two convolutions and a norm of groups."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs, H, W)."""
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Four levels down and up again.

    What a level makes on the way down is read on the way up, stages later.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 16, 16)
        self.down = nn.ModuleList(map(Convolutions, widths, widths[1:]))
        self.middle = Convolutions(16, 16)
        self.up = nn.ModuleList(
            [Convolutions(32, 16), Convolutions(32, 16), Convolutions(32, 16), Convolutions(24, 8)]
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x, skips = part[0], []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return F.cross_entropy(self.head(x), part[1])


def gpt() -> nn.Module:
    """Without dropout."""
    return GPT(0.0)


def gpt_dropout() -> nn.Module:
    """Masks are drawn on every stage."""
    return GPT(0.1)


def llama() -> nn.Module:
    """Grouped heads."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=DEPTH,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return Text(transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    """Encoder and decoder of four blocks each.

    All decoder stages read the encoder's output, and position biases.
    """
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=DEPTH // 2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return Text(transformers.T5ForConditionalGeneration(config))


def _cuts(names: str) -> dict[str, dict[str, Shard]]:
    """Cuts along a tensor axis: a convolution by outputs, with its norm, and the next by inputs."""
    norms = {f"{name}.{kind}": Shard(0) for name in names.split() for kind in ("weight", "bias")}
    first = {"first.weight": Shard(0), "first.bias": Shard(0), "second.weight": Shard(1)}
    return {"attention": {}, "perceptron": {**first, **norms}, "rest": {}}


_GPT_BLOCKS = [f"net.blocks.{index}" for index in range(DEPTH)]
_LEVELS = range(DEPTH // 2)
MODELS: dict[str, Model] = {
    "GPT": Model(gpt, tokens, _GPT_BLOCKS, SPLIT_MODELS["GPT"].cuts),
    "Llama": Model(
        llama,
        tokens,
        [f"net.model.layers.{index}" for index in range(DEPTH)],
        SPLIT_MODELS["Llama"].cuts,
    ),
    "T5": Model(
        t5,
        tokens,
        [f"net.{part}.block.{index}" for part in ("encoder", "decoder") for index in _LEVELS],
        SPLIT_MODELS["T5"].cuts,
    ),
    "ResNet": Model(
        ResNet, images, [f"blocks.{index}" for index in range(DEPTH)], _cuts("norm1"), by_part=True
    ),
    "U-Net": Model(
        UNet,
        masks,
        [*(f"down.{index}" for index in _LEVELS), "middle", *(f"up.{index}" for index in _LEVELS)],
        _cuts("norm"),
    ),
    "GPT, dropout": Model(gpt_dropout, tokens, _GPT_BLOCKS, SPLIT_MODELS["GPT"].cuts),
}


# ---- a step under a plan, and of one process -----------------------------------------------------

CPU, SEED = torch.device("cpu"), 7


@dataclass(frozen=True)
class Step(Outcome):
    """An `Outcome` with the buffers after the step."""

    buffers: dict[str, Tensor]


def one_process(model: Model, plan: PipelinePlan) -> Step:
    """Return a step of one process on all microbatches, one after another."""
    module = made(model, seed=0)
    optimizer = optimizer_of(module)
    parts = plan.mesh.data_parallel_size * plan.microbatches
    torch.manual_seed(SEED)
    loss = 0.0
    for part in zip(*(tensor.chunk(parts) for tensor in model.batch()), strict=True):
        of_part = module(part) / parts
        of_part.backward()
        loss += of_part.item()
    optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return Step(loss, gradients, parameters, dict(module.named_buffers()))


def run_plan(rank: int, model: Model, plan: PipelinePlan) -> Step:
    """Return the same step under the plan, whole on rank 0 only. A collective call."""
    module = made(model, seed=rank)  # rank 0's parameters count
    names = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    engine = Engine(plan.of(model), module, device=CPU)
    place, parts = plan.mesh.data_rank(rank), plan.mesh.data_parallel_size
    own = [tensor.chunk(parts)[place].chunk(plan.microbatches) for tensor in model.batch()]
    engine.apply(example=Example(_loss_of, next(zip(*own, strict=True))))
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    torch.manual_seed(SEED)
    mean = engine.run_step(list(zip(*own, strict=True)), _loss_of).mean()
    dist.all_reduce(mean)
    optimizer.step()
    gradients = _gathered_gradients(engine, module, names)
    state = engine.module_state()
    parameters = {name: state[name].clone() for name in names if name in state}
    of_buffers = {name: state[name].clone() for name in buffers if name in state}
    engine.release()
    engine.close()
    return Step(float(mean) / dist.get_world_size(), gradients, parameters, of_buffers)


def _loss_of(root: nn.Module, part: Any) -> Tensor:
    loss: Tensor = root(part)
    return loss


def _gathered_gradients(
    engine: Engine, module: nn.Module, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the gradients of all ranks. A collective call.

    Several ranks may have the same one; then their values have to be equal.
    """
    now, split = dict(module.named_parameters()), engine._applied.split_names()
    # Ranks of a tensor group unshard their slices in order of names; the first of them returns the
    # full tensor.
    found = {name: now[name].grad for name in names if now[name].grad is not None}
    own = {
        name: (split[name].whole(value) if name in split else value).detach().clone()
        for name, value in found.items()
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    gradients: dict[str, Tensor] = {}
    for of_rank in gathered:
        for name, value in of_rank.items():
            if not torch.equal(gradients.setdefault(name, value), value):
                raise RuntimeError(f"ranks have different gradients of {name}")
    return gradients


def against_one_process(found: Step, model: Model, plan: PipelinePlan) -> Differences:
    """Return each difference and what it may be.

    Buffers are compared where one process sees the same microbatches in the same order.
    """
    expected = one_process(model, plan)
    limits = {
        "loss": 0.1 * plan.tolerance,
        "gradients": plan.tolerance,
        "parameters": plan.tolerance,
    }
    compared = {
        quantity: (value, limits[quantity])
        for quantity, value in differences(found, expected).items()
    }
    recomputes = "+" in plan.storage  # which updates statistics twice, as torch's checkpoints do
    # those that are saved
    if plan.mesh.data_parallel_size == 1 and found.buffers and not recomputes:
        values = {name: expected.buffers[name].float() for name in found.buffers}
        ours = {name: each.float() for name, each in found.buffers.items()}
        compared["buffers"] = largest(ours, values, 1e-3), plan.tolerance
    return compared


def row(plan: PipelinePlan, names: Sequence[str], found: Mapping[tuple[str, str], Any]) -> str:
    """Return the row of `plan`."""
    cells = " | ".join(cell(found.get((plan.name, name))) for name in names)
    return (
        f"| {plan.name} | {plan.num_stages} | {plan.mesh.size} | {plan.microbatches} | {cells} | "
        f"{commit()} |"
    )


COMPARISON = Comparison(PLANS, MODELS, run_plan, against_one_process, row)
LEAD = ("schedule, ranks of the pipeline", "stages", "ranks", "microbatches")


def main() -> None:
    """Run everything, or what is named, and write the table."""
    options = read_options(__doc__, models=MODELS, out=RESULTS / "pipeline_equality.md")
    compared = compare_all(COMPARISON, options)
    within, refused, cells = count_cells(compared.rows, len(options.models))
    options.out.write_text(
        f"""# Pipelines against one process

{machine()}

`python -m benchmarks.pipelines.equality`, {compared.took}: one step (forward, backward, AdamW in
two groups) of 24 samples in each plan's microbatches, and of one process that takes the same
microbatches one after another. In a cell: the largest difference of the loss, of all gradients, and
of all parameters after the update. Without data axis and recomputation (which updates them twice,
as in one process) buffers count too: running statistics of batches. The loss is relative to itself,
the others to the largest element of their tensor; gradients that are zero but for rounding to a
thousandth of the largest gradient. Float32; within 1e-5, the loss within 1e-6. Bold: above. GPT and
T5 have tied embeddings, on first and last stage; the decoder of T5 reads the encoder's output on
every stage; the skips of the U-Net go over cuts. Models have eight blocks in a row (the U-Net
nine), dealt out equally.

Not compared:

{reasons(compared.refusals)}

{within} of {cells - refused} cells within their tolerance.

{table(compared.rows, options.models, lead=LEAD)}
"""
    )


if __name__ == "__main__":
    main()
