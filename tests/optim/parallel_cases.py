"""Models, optimizers and hand-made pieces for the tests of the parallel step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.optim.pieces import Piece, has_dense_rows, num_rows


class Net(nn.Module):
    """Vectors, a scalar, matrices (one transposed), tied, channels-last, frozen, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 12)
        self.conv = nn.Conv2d(2, 7, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(12, 13)
        self.back = nn.Linear(13, 12)
        self.back.weight = nn.Parameter(self.back.weight.detach().t().clone().t())
        self.out = nn.Linear(12, 9, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.frozen = nn.Linear(12, 12)
        self.unused = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        hidden = (
            self.back(torch.tanh(self.hidden(self.embed(tokens)))) * self.scale
            + self.conv(pixels).mean() * 0.1
        )
        return self.out(hidden + self.frozen(hidden))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(net: Net, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(9, (2, 16), generator=generator)
    pixels = torch.randn(2, 2, 5, 5, generator=generator)
    return nn.functional.cross_entropy(net(tokens, pixels), targets)


class SignMomentum(Optimizer):
    """A user's own: by element, a list and Python numbers in its state, a counter in its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"moments": [torch.zeros_like(p), torch.zeros_like(p)], "count": 0}
                state["count"] += 1
                first, second = state["moments"]
                first.lerp_(p.grad, 0.1)
                second.lerp_(first, 0.5)
                p.add_(
                    torch.sign(second) * 0.1 + second, alpha=-group["lr"] / group["calls"] ** 0.5
                )
        return loss


class WholeNorm(Optimizer):
    """A user's own that needs whole parameters; a nested state with tensors of another shape."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    factor = state.setdefault("factors", {"sum": torch.zeros(3)})["sum"]
                    factor += p.grad.norm()
                    p.sub_(p.grad, alpha=group["lr"] / float(factor[0] + 1))


class Decayed(torch.optim.AdamW):
    """Calls the step of its base class in its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - 0.001)
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(self.state[p]["exp_avg"], alpha=-0.001)
        return loss


def groups_of(net: Net) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.dim() > 1]
    return [
        {"params": matrices},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "lr": 0.003},
    ]


def muon(net: Net) -> Optimizer:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    return torch.optim.Muon(
        [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 0.01}], lr=0.02
    )


# name: (makes the optimizer of a net, whether its rule treats every element by itself)
OPTIMIZERS: dict[str, tuple[Callable[[Net], Optimizer], bool]] = {
    "AdamW": (lambda net: torch.optim.AdamW(groups_of(net), lr=0.01, foreach=False), True),
    "AdamW foreach": (
        lambda net: torch.optim.AdamW(groups_of(net), lr=0.01, foreach=True, amsgrad=True),
        True,
    ),
    "AdamW fused": (lambda net: torch.optim.AdamW(groups_of(net), lr=0.01, fused=True), True),
    "SGD": (lambda net: torch.optim.SGD(groups_of(net), lr=0.1, momentum=0.9, nesterov=True), True),
    "Adagrad": (lambda net: torch.optim.Adagrad(groups_of(net), lr=0.1), True),
    "RMSprop": (
        lambda net: torch.optim.RMSprop(groups_of(net), lr=0.01, momentum=0.5, centered=True),
        True,
    ),
    "Adafactor": (lambda net: torch.optim.Adafactor(groups_of(net), lr=0.01), False),
    "SignMomentum": (lambda net: SignMomentum(groups_of(net)), True),
    "WholeNorm": (lambda net: WholeNorm(groups_of(net)), False),
    "Decayed": (lambda net: Decayed(groups_of(net), lr=0.01), True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = (muon, False)


# Relative differences that are allowed. The vectors of this kernel, whose products are not rounded
# before they are added, end elsewhere in a run of rows than in the whole tensor; everything else is
# equal in all bits.
ROUNDING = {"AdamW fused": 1e-3}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole_pieces(parameters: Sequence[Tensor], world_size: int) -> list[Piece]:
    """Owners in turns."""
    return [Piece(i, 0, num_rows(p), i % world_size) for i, p in enumerate(parameters)]


def row_pieces(parameters: Sequence[Tensor], world_size: int) -> list[Piece]:
    """Every parameter cut into unequal runs of rows, but those with few or scattered rows."""
    pieces = []
    for index, parameter in enumerate(parameters):
        rows = num_rows(parameter)
        if rows < 2 * world_size or not has_dense_rows(parameter):
            pieces.append(Piece(index, 0, rows, index % world_size))
            continue
        cuts = [0, *(rows * k // world_size + (k + index) % 2 for k in range(1, world_size)), rows]
        owners = [(k + index) % world_size for k in range(world_size)]
        pieces += [
            Piece(index, a, b, owner) for a, b, owner in zip(cuts, cuts[1:], owners, strict=False)
        ]
    return pieces


def pieces_for(optimizer: Optimizer, world_size: int, by_element: bool) -> list[Piece]:
    return (row_pieces if by_element else whole_pieces)(parameters_of(optimizer), world_size)
