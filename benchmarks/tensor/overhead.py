"""Step time of split Transformer layers: `SplitMode` against the same layers by hand.

    python -m benchmarks.tensor.overhead [--width 256 768] [--rounds 20] [--layers 4] [--profile]

`SplitMode` runs the unmodified module. By hand there are local linear layers, one all-reduce after
attention and one after the feed-forward part, forward and backward (Shoeybi et al., arXiv
1909.08053, section 3). Rounds of both alternate. The median over rounds of the ratio of two
neighbours is shown with its quartiles: of the time by the clock, in which ranks wait for each
other, and of the time that rank 0's thread computes, forward and backward.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_mode import SplitMode
from lightning_topt.techniques.tensor_parallel.split_parameters import split_parameters

HEADS, RANKS = 8, 2
PLACEMENTS: dict[str, Placement] = {
    "qkv.weight": Shard(0, parts=3),
    "qkv.bias": Shard(0, parts=3),
    "project.weight": Shard(1),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


class Layer(nn.Module):
    """As a user writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, steps, HEADS, width // HEADS).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LayerByHand(nn.Module):
    """The same, for one of the ranks of `axes`."""

    def __init__(self, width: int, axes: TensorAxes) -> None:
        super().__init__()
        own = width // RANKS
        self.axes, self.own = axes, own
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * own), nn.Linear(own, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * own), nn.Linear(4 * own, width, bias=False)
        self.project_bias, self.down_bias = (
            nn.Parameter(torch.zeros(width)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        qkv = self.qkv(moves.enter(self.norm1(x), self.axes, 0)).chunk(3, dim=-1)
        q, k, v = (
            t.view(batch, steps, HEADS // RANKS, width // HEADS).transpose(1, 2) for t in qkv
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.project(y.transpose(1, 2).reshape(batch, steps, self.own))
        x = x + (moves.reduce(mixed, self.axes, 0) + self.project_bias)
        raised = F.gelu(self.up(moves.enter(self.norm2(x), self.axes, 0)))
        return x + (moves.reduce(self.down(raised), self.axes, 0) + self.down_bias)


def seconds(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return the seconds of one of `count` steps, by the clock and of this thread."""
    dist.barrier()
    start, computed = time.perf_counter(), time.thread_time()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count, (time.thread_time() - computed) / count


def line(width: int, pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> str:
    """Return the row of a width, of pairs of a step on slices and one by hand."""
    cells = []
    for kind in (0, 1):
        split, hand = (
            1e3 * statistics.median(pair[which][kind] for pair in pairs) for which in (0, 1)
        )
        low, middle, high = statistics.quantiles(
            [split[kind] / hand[kind] for split, hand in pairs], n=4
        )
        cells.append(f"{split:.2f} ms | {hand:.2f} ms | {middle:.3f} ({low:.3f} to {high:.3f})")
    return f"| {width} | {' | '.join(cells)} |"


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    axes = TensorAxes.with_groups(Mesh((Axis("tensor", RANKS),)))
    rows = []
    for width in args.width:
        torch.manual_seed(0)
        ours = nn.Sequential(*(Layer(width) for _ in range(args.layers)))
        hand = nn.Sequential(*(LayerByHand(width, axes) for _ in range(args.layers)))
        names = dict(ours.named_parameters())
        placements = {name: (PLACEMENTS.get(name.split(".", 1)[1], Replicate()),) for name in names}
        split_parameters(ours, placements, axes)
        mode, x = SplitMode(axes), torch.randn(args.batch, args.steps, width)

        def split_step(ours: nn.Module = ours, mode: SplitMode = mode, x: Tensor = x) -> None:
            ours.zero_grad()
            with mode:
                loss = ours(x).square().mean()
            loss.backward()

        def hand_step(hand: nn.Module = hand, x: Tensor = x) -> None:
            hand.zero_grad()
            hand(x).square().mean().backward()

        for step in (split_step, hand_step):
            seconds(step, 3)
        if args.profile and rank == 0:
            profile = cProfile.Profile()
            profile.enable()
        pairs = []
        for index in range(args.rounds):
            order = (split_step, hand_step) if index % 2 else (hand_step, split_step)
            found = {step: seconds(step, args.count) for step in order}
            pairs.append((found[split_step], found[hand_step]))
        if args.profile and rank == 0:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        rows.append(line(width, pairs))
    if rank == 0:
        write_page(rows, args)
    dist.destroy_process_group()


def write_page(rows: Sequence[str], args: argparse.Namespace) -> None:
    """Write the table."""
    given = f"--width {' '.join(map(str, args.width))} --rounds {args.rounds} --count {args.count}"
    lines = [
        "# Split layers against layers written by hand",
        "",
        f"`python -m benchmarks.tensor.overhead {given}`",
        "",
        machine(),
        f"- {RANKS} gloo ranks of one thread, {args.layers} Transformer layers, {args.batch} x "
        f"{args.steps} tokens",
        "",
        "Forward and backward of the unmodified module under `SplitMode`, and of the same layers "
        "written with local linear",
        "layers and explicit all-reduces; the two in turn, ratios of neighbouring rounds: median "
        "and quartiles.",
        "",
        "| width | split | by hand | ratio | split, thread | by hand, thread | ratio, thread |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    (RESULTS / "tensor_overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--count", type=int, default=5, help="steps in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), args), nprocs=RANKS)


if __name__ == "__main__":
    main()
