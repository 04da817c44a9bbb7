"""Compare training steps under plans with the same steps of one process.

`benchmarks.tensor.equality` and `benchmarks.pipelines.equality` list plans and write a page each.
`compare_all` runs their plans on forked gloo ranks: one step under the plan on all ranks, the same
step of one process on rank 0, and the differences of losses, gradients and parameters. A plan may
refuse a model (`Refusal`); the page then says why. Below are the models and the tables.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.common import ROOT
from lightning_topt.demo import ByteGPT
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import Shard

Differences = dict[str, tuple[float, float]]  # by quantity: the difference, and what it may be
Cases = Callable[[int, Collection[tuple[str, str]]], Iterator[tuple[str, str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """The state of one step: by name of the parameter."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


class _Plan(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    def refusal(self, model: Model) -> Refusal | None: ...


P = TypeVar("P", bound=_Plan)
R = TypeVar("R", bound=Outcome)


@dataclass(frozen=True)
class Comparison(Generic[P, R]):
    """Plans and models to compare, how a plan runs, and how its outcome is compared.

    `run_plan` is a collective call; its outcome is unsharded on rank 0. `against_one_process` runs
    there.
    """

    plans: Sequence[P]
    models: Mapping[str, Model]
    run_plan: Callable[[int, Model, P], R]
    against_one_process: Callable[[R, Model, P], Differences]
    row: Callable[[P, Sequence[str], Mapping[tuple[str, str], Any]], str]


@dataclass(frozen=True)
class Compared:
    """Rows of a table, reasons of refusals (by plan and model), and in words the time it took."""

    rows: list[str]
    refusals: dict[tuple[str, str], Refusal]
    took: str


def read_options(
    description: str | None, *, models: Collection[str], out: Path
) -> argparse.Namespace:
    """Return the options of the command line: `models`, `only`, `out`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(models))
    parser.add_argument(
        "--only", nargs="*", help="plans, by what their names contain; other rows of the table stay"
    )
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


def compare_all(comparison: Comparison[P, R], options: argparse.Namespace) -> Compared:
    """Run all plans, or those of `options`, on groups of their numbers of ranks.

    Rows of other plans are those of the existing table.
    """
    torch.set_num_threads(1)
    only, models = options.only, {name: comparison.models[name] for name in options.models}
    plans = [
        plan for plan in comparison.plans if only is None or any(text in plan.name for text in only)
    ]
    start = time.perf_counter()
    found: dict[tuple[str, str], Any] = {}
    for world in sorted({plan.mesh.size for plan in plans}):
        cases = [(plan, name) for name in models for plan in plans if plan.mesh.size == world]
        for plan, name in cases:
            plan.refusal(models[name])  # layouts are found once for all ranks
        found |= run_group(world, partial(compare, comparison=comparison, cases=cases))
    rows = {plan.name: comparison.row(plan, list(models), found) for plan in plans}
    if only is not None and options.out.exists():
        rows = {**read_rows(options.out.read_text(), list(models)), **rows}
    refusals = {
        (plan.name, name): why
        for name, plan in itertools.product(models, comparison.plans)
        if plan.name in rows and (why := plan.refusal(models[name])) is not None
    }
    lines = [rows[plan.name] for plan in comparison.plans if plan.name in rows]
    part = "" if only is None else " for some of the rows"
    return Compared(lines, refusals, f"{(time.perf_counter() - start) / 60:.0f} minutes{part}")


def compare(
    rank: int,
    done: Collection[tuple[str, str]] = (),
    *,
    comparison: Comparison[P, R],
    cases: Sequence[tuple[P, str]],
) -> Iterator[tuple[str, str, Any]]:
    """Yield plan, model and their differences for `cases`, plans with names of models.

    A collective call. Differences are on rank 0; a text says that the plan does not run. Cases that
    are `done` are left out.
    """
    for plan, name in [(plan, name) for plan, name in cases if (plan.name, name) not in done]:
        model = comparison.models[name]
        if (why := plan.refusal(model)) is not None:
            yield plan.name, name, why
            continue
        try:
            found = comparison.run_plan(rank, model, plan)
            compared = comparison.against_one_process(found, model, plan) if rank == 0 else None
        except Exception:
            yield plan.name, name, traceback.format_exc()
            return  # the other ranks may be anywhere
        yield plan.name, name, compared


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Make an AdamW with two parameter groups.

    Its eps is large, so that a gradient that is zero but for rounding does not become a step.
    """
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest differences of loss, gradients and parameters.

    That of the loss is relative to it, others to the largest element of the tensor. Gradients that
    are zero but for rounding (of a key's bias) are compared with a thousandth of the largest one.
    """
    sides = set(found.gradients) ^ set(expected.gradients)
    assert not sides, f"gradients on one side only: {', '.join(sorted(sides))}"
    floor = 1e-3 * max(float(value.abs().max()) for value in expected.gradients.values())
    return {
        "loss": abs(found.loss - expected.loss) / abs(expected.loss),
        "gradients": largest(found.gradients, expected.gradients, floor),
        "parameters": largest(found.parameters, expected.parameters, 1e-3),
    }


def largest(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> float:
    """Return the largest difference relative to the largest element of its tensor, or to `floor`.

    `floor` counts where it is larger than that element.
    """
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=floor))
        for name, value in expected.items()
    )


def run_group(world: int, cases: Cases) -> dict[tuple[str, str], Any]:
    """Run ``cases(rank, done)`` on so many forked ranks, and return what rank 0 yields.

    Keys are plan and model; errors of any rank are returned too. After an error ranks start anew:
    `done` has the plans and models before it, and the one with the error.
    """
    found: dict[tuple[str, str], Any] = {}
    while _run_ranks(world, cases, found):
        pass
    return found


def _run_ranks(world: int, cases: Cases, found: dict[tuple[str, str], Any]) -> bool:
    """Add to `found`; whether there was an error, after which cases may be left."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        given = world, f"{folder}/store", cases, frozenset(found), results
        ranks = [
            context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        left = world
        while left and not failed:
            if (item := results.get()) is None:
                left -= 1
                continue
            plan, model, value = item
            found[plan, model] = value
            failed = isinstance(value, str) and not isinstance(value, Refusal)
            print(f"{world} ranks, {plan}, {model}: {value}", flush=True)
        for process in ranks:
            if failed:
                process.kill()
            process.join()
    return failed


def _rank(
    rank: int, world: int, store: str, cases: Cases, done: Collection[tuple[str, str]], results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for plan, model, found in cases(rank, done):
        if rank == 0 or (isinstance(found, str) and not isinstance(found, Refusal)):
            results.put((plan, model, found))
    results.put(None)
    dist.destroy_process_group()


# ---- five small models, and where their parameters may be cut ------------------------------------
# A model is a module whose forward takes a part of the batch and returns its mean loss. Sizes are
# divisible by 8.

BATCH = 16
OUT, IN, FUSED = Shard(0), Shard(1), Shard(0, parts=3)
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A model to compare, its batch, and where its parameters may be cut.

    `blocks` are the repeated modules, by name. `cuts` gives, by part of the model, the dim along
    which parameters are cut whose names end so. `by_part`: the loss belongs to each part of the
    batch by itself (statistics of batches).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Part]
    blocks: Sequence[str]
    cuts: Mapping[str, Mapping[str, Shard]]
    by_part: bool = False


def _numbers(*shape: int, high: int) -> Tensor:
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens() -> Part:
    """Tokens in and out."""
    return _numbers(BATCH, 16, high=64), _numbers(BATCH, 16, high=64)


def images() -> Part:
    """Images of 16 x 16 and their classes."""
    values = torch.randn((BATCH, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    return values, _numbers(BATCH, high=8)


class GPT(nn.Module):
    """The byte-level GPT of the console; tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ByteGPT(num_layers=2, hidden=32, num_heads=8, seq_len=16, tied_head=True)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(part[0]).flatten(0, 1), part[1].flatten())


class Text(nn.Module):
    """A model of transformers on tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(input_ids=part[0], labels=part[1]).loss
        return loss


class Images(nn.Module):
    """A model of transformers on images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(pixel_values=part[0], labels=part[1]).loss
        return loss


class Residual(nn.Module):
    """Two convolutions around norms of groups and of batches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.groups, self.batches = nn.GroupNorm(8, channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return F.relu(x + self.batches(self.second(F.relu(self.groups(self.first(x))))))


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.stem(part[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), part[1])


def llama() -> nn.Module:
    """Grouped heads."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4
    )  # fmt: skip
    return Text(transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    """Encoder and decoder, tied embeddings."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=8,
        decoder_start_token_id=0, dropout_rate=0.0,
        use_cache=False,  # a block that is recomputed must not find its keys there
    )  # fmt: skip
    return Text(transformers.T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    """Patches of 4 x 4."""
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=8,
    )  # fmt: skip
    return Images(transformers.ViTForImageClassification(config))


def _both(names: str, shard: Shard) -> dict[str, Shard]:
    return {f"{name}.{kind}": shard for name in names.split() for kind in ("weight", "bias")}


def _weights(names: str, shard: Shard) -> dict[str, Shard]:
    return {f"{name}.weight": shard for name in names.split()}


MODELS: dict[str, Model] = {
    "GPT": Model(
        GPT,
        tokens,
        [f"net.blocks.{index}" for index in range(2)],
        {
            "attention": {**_both("query_key_value", FUSED), "attention_out.weight": IN},
            "perceptron": {**_both("mlp_in", OUT), "mlp_out.weight": IN},
            "rest": {
                "net.embedding.weight": OUT,
                "net.head.weight": OUT,
                "net.positions.weight": IN,
            },
        },
    ),
    "Llama": Model(
        llama,
        tokens,
        [f"net.model.layers.{index}" for index in range(2)],
        {
            "attention": {**_weights("q_proj k_proj v_proj", OUT), "o_proj.weight": IN},
            "perceptron": {**_weights("gate_proj up_proj", OUT), "down_proj.weight": IN},
            "rest": _weights("embed_tokens lm_head", OUT),
        },
    ),
    "T5": Model(
        t5,
        tokens,
        [f"net.{part}.block.{index}" for part in ("encoder", "decoder") for index in range(2)],
        {
            "attention": {
                **_weights("Attention.q Attention.k Attention.v", OUT),
                **_weights("Attention.o relative_attention_bias", IN),
            },
            "perceptron": {"wi.weight": OUT, "wo.weight": IN},
            "rest": _weights("shared embed_tokens lm_head", OUT),
        },
    ),
    "ViT": Model(
        vit,
        images,
        [f"net.vit.layers.{index}" for index in range(2)],
        {
            "attention": {**_both("q_proj k_proj v_proj", OUT), "o_proj.weight": IN},
            "perceptron": {**_both("fc1", OUT), "fc2.weight": IN},
            "rest": {**_both("projection", OUT), "net.classifier.weight": IN},
        },
    ),
    "conv": Model(
        ConvNet,
        images,
        [f"blocks.{index}" for index in range(2)],
        {
            "attention": {"first.weight": OUT, **_both("groups", OUT)},
            "perceptron": {"second.weight": IN},
            "rest": {**_both("stem", OUT), "head.weight": IN},
        },
        by_part=True,
    ),
}


def made(model: Model, *, seed: int) -> Any:
    """Return the module with the parameters of `seed`, in training mode."""
    torch.manual_seed(seed)
    return model.make().train()


# ---- tables: a row per plan, a column per model, and the commit of each row ----------------------

REFUSED = "refused"


class Refusal(str):
    """Why a model cannot run under a plan: the message that its user gets."""


def cell(found: Any, *, shows_limits: bool = False) -> str:
    """Return the text of a cell: each difference, bold where it is above its limit.

    `found` has a difference and a limit by quantity.
    """
    if not isinstance(found, dict):
        return REFUSED if isinstance(found, Refusal) else "**failed**" if found else "not run"
    texts = []
    for difference, limit in found.values():
        text = f"{difference:.0e}" + (f" ({limit:.0e})" if shows_limits else "")
        texts.append(text if difference <= limit else f"**{text}**")
    return " / ".join(texts)


def commit() -> str:
    """Return the commit that runs now."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        or "unknown"
    )


def table(
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    lead: Sequence[str] = ("plan", "ranks", "tolerance"),
) -> str:
    """Return the table as Markdown."""
    header = f"| {' | '.join((*lead, *columns))} | commit |"
    return "\n".join([header, "|---" * (len(lead) + len(columns) + 1) + "|", *rows])


def read_rows(text: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the rows of a table that was written with these columns, by plan.

    Another table has no rows.
    """
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    if not lines or [each.strip() for each in lines[0].split("|")[-len(columns) - 2 : -2]] != [
        *columns
    ]:
        return {}
    return {line.split("|")[1].strip(): line for line in lines[1:]}


def count_cells(rows: Sequence[str], columns: int) -> tuple[int, int, int]:
    """Return how many cells of `rows` are within their limits, refused, and there in all."""
    cells = [each.strip() for row in rows for each in row.split("|")[-columns - 2 : -2]]
    within = sum(text[0].isdigit() and "**" not in text for text in cells)
    return within, sum(text == REFUSED for text in cells), len(cells)


def reasons(found: Mapping[tuple[str, str], Refusal]) -> str:
    """Return one line for each reason why plans were refused for models.

    Keys of `found` are plan and model.
    """
    by_reason: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for (plan, model), why in found.items():
        models, plans = by_reason.setdefault(why, ({}, {}))
        models[model], plans[plan] = None, None
    lines = [
        f"- {', '.join(models)} ({'; '.join(plans)}): {why}"
        for why, (models, plans) in by_reason.items()
    ]
    return "\n".join(lines) or "- none is refused"
