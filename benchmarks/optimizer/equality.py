"""Parameters after 200 steps of the parallel and of the plain step, for every optimizer.

    python -m benchmarks.optimizer.equality  # 2, 3, 4 ranks, float32 and bfloat16 autocast; minutes

Every rank trains two copies of one model on the same batches. One has its optimizer as it is; the
step of the other is split by the rule that is known or found for that optimizer. The table also
has the optimizer state that each rank keeps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from benchmarks.common import RESULTS, machine
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.update_rule import pieces_of, update_rule

# Rules of whole parameters can share 12 layers evenly among 2, 3 and 4 ranks.
STEPS, WIDTH, DEPTH, BATCH = 200, 48, 12, 32
RANKS, PRECISIONS = (2, 3, 4), ("float32", "bfloat16 autocast")
Make = Callable[[list[nn.Parameter]], Optimizer]


class OwnSign(Optimizer):
    """A user's own, whose rule is tried out."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.sub_(momentum.sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-4, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-4),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
    "Muon (matrices)": lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
    "LARS (pytorch-optimizer)": lambda p: pytorch_optimizer.LARS(p, lr=0.5, momentum=0.9),
    "LAMB (pytorch-optimizer)": lambda p: pytorch_optimizer.Lamb(p, lr=1e-2),
    "Shampoo (pytorch-optimizer)": lambda p: pytorch_optimizer.Shampoo(p, lr=1e-3),
    "SOAP (pytorch-optimizer)": lambda p: pytorch_optimizer.SOAP(p, lr=1e-3),
    "a user's own": lambda p: OwnSign(p, lr=1e-4),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(DEPTH)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    return nn.Sequential(*layers)


def gradients(model: nn.Module, batch: Tensor, precision: str) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
        loss = (model(batch) - batch.roll(1, 1)).float().square().mean()
    model.zero_grad()
    loss.backward()


def state_numel(optimizer: Optimizer) -> int:
    tensors = (
        leaf
        for state in optimizer.state.values()
        for leaf in tree_leaves(dict(state))
        if torch.is_tensor(leaf)
    )
    return sum(leaf.numel() for leaf in tensors if leaf.numel() > 1)


def compare(make: Make, precision: str) -> tuple[str, float, float]:
    """Return the rule, the largest relative difference of a parameter, and the share of state.

    That share is this rank's state over 1/ranks of all state.
    """
    models = [make_model(), make_model()]
    plain, split = (make(list(model.parameters())) for model in models)
    rule = update_rule(split)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        for model, optimizer in zip(models, (plain, split), strict=True):
            gradients(model, batch, precision)
            optimizer.step()
        if step == 0:
            pieces = pieces_of(split, parameters_of(split), ranks=dist.get_world_size(), rule=rule)
            install_parallel_step(split, pieces=pieces)
    worst = 0.0
    for one, other in zip(parameters_of(plain), parameters_of(split), strict=True):
        assert bool(other.isfinite().all())
        worst = max(
            worst,
            float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-30)),
        )
    whole = state_numel(plain)
    return rule, worst, state_numel(split) * dist.get_world_size() / whole if whole else 1.0


def rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    found = {
        (name, precision): compare(make, precision)
        for name, make in OPTIMIZERS.items()
        for precision in PRECISIONS
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    torch.save(everyone, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def on_ranks(ranks: int) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """By optimizer and precision: the outcome of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + 900
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
        if alive or any(process.exitcode for process in processes):
            raise SystemExit("a rank failed, or took more than 15 minutes")
        everyone = torch.load(Path(folder) / "rank0.pt")
    return {key: [of_rank[key] for of_rank in everyone] for key in everyone[0]}


def main() -> None:
    lines = [
        "| optimizer | split by | "
        + " | ".join(f"{n} ranks, {p}" for n in RANKS for p in PRECISIONS)
        + " | state |"
    ]
    lines.append("|---|---|" + "---|" * (len(RANKS) * len(PRECISIONS)) + "---|")
    found = {ranks: on_ranks(ranks) for ranks in RANKS}
    for name in OPTIMIZERS:
        cells, shares = [], []
        for ranks in RANKS:
            for precision in PRECISIONS:
                outcomes = found[ranks][name, precision]
                worst = max(difference for _, difference, _ in outcomes)
                cells.append("equal" if worst == 0 else f"{worst:.1e}")
                shares += [share for _, _, share in outcomes]
        rule = found[RANKS[0]][name, PRECISIONS[0]][0][0]
        lines.append(
            f"| {name} | {rule} | {' | '.join(cells)} | {min(shares):.3f} to {max(shares):.3f} |"
        )
    numel = sum(parameter.numel() for parameter in make_model().parameters())
    text = (
        f"# The parallel step against the plain one\n\n{machine()}\n\n`python -m "
        f"benchmarks.optimizer.equality`: {STEPS} steps "
        f"of {DEPTH} layers of {WIDTH} x {WIDTH} with norms and biases, {numel} parameters. Equal: "
        "in all bits, on all ranks. "
        "Else the largest difference, relative to the largest value of that parameter. State: "
        "elements that a rank keeps, over "
        "1/ranks of the whole; smallest and largest of all ranks and columns.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    (RESULTS / "optimizer_equality.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
