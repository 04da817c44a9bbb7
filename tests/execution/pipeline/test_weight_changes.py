"""Weights are written to while backward passes that saved them are to come, in any block."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_topt.execution.pipeline.stage_weights import StageWeights, UpdatePattern, holding
from lightning_topt.weight_prediction import make_prediction
from lightning_topt.weight_prediction.weights import unseen


class Views(nn.Module):
    """Autograd saves views of the weights: transposed, sliced, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (
            (x @ self.weight.t()[:, :4] @ self.weight[:4])
            * self.scale.expand_as(x)
            * self.scale[2:3].square()
        )


class Again(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


def recurrent() -> nn.Module:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[None])[0][0]

    return Last(6, 6)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)),
    "views": Views,
    "normed": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()
    ),
    "recurrent": recurrent,
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), torch.ones_like(x))


CASES = [
    *((name, how) for name in BLOCKS for how in ("plain", "recomputed")),
    ("linear", "compiled"),
    ("views", "compiled"),
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_backward_computes_with_the_weights_that_are_there(name: str, how: str) -> None:
    """Written to in between by an optimizer, and by a prediction around another pass.

    What a compiler keeps of the forward pass, and what it computes again from the weights, is its
    own choice.
    """
    torch.manual_seed(0)
    inside = BLOCKS[name]()
    model = Again(inside) if how == "recomputed" else inside
    twin, untouched = copy.deepcopy(model), copy.deepcopy(model)
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    parameters, x = list(model.parameters()), torch.randn(5, 6, requires_grad=True)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    first = loss(run, x)
    loss(run, x.detach()).backward()
    with unseen(parameters):
        optimizer.step()
    optimizer.zero_grad()
    newest = [p.detach().clone() for p in parameters]
    predicted = [value + 0.1 for value in newest]
    with holding([_Put(parameters, predicted)], parameters):
        assert all(torch.equal(p, value) for p, value in zip(parameters, predicted, strict=True))
        other = loss(run, x.detach())
    assert all(torch.equal(p, value) for p, value in zip(parameters, newest, strict=True))
    first.backward()
    found = [p.grad for p in parameters] + [x.grad]
    if (name, how) != ("views", "compiled"):
        torch.testing.assert_close(found, by_hand(twin, x.detach().requires_grad_(), newest))
    old = by_hand(
        copy.deepcopy(untouched),
        x.detach().requires_grad_(),
        [p.detach() for p in untouched.parameters()],
    )
    assert any(not torch.equal(one, other) for one, other in zip(found, old, strict=True))
    other.backward()
    # as torch is without it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late = loss(inside, x.detach())
        optimizer.step()
        late.backward()


def by_hand(model: nn.Module, x: Tensor, newest: list[Tensor]) -> list[Tensor | None]:
    """Return gradients where the saved tensors' memory is rewritten, unseen by autograd."""
    first = loss(model, x)
    for parameter, value in zip(model.parameters(), newest, strict=True):
        parameter.data.copy_(value)
    first.backward()
    return [*(p.grad for p in model.parameters()), x.grad]


class _Put:
    def __init__(self, parameters: list[nn.Parameter], values: list[Tensor]) -> None:
        self.parameters, self.values = parameters, values

    def __enter__(self) -> None:
        self.before = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_([p.data for p in self.parameters], self.values)

    def __exit__(self, *error: object) -> None:
        torch._foreach_copy_([p.data for p in self.parameters], self.before)


def test_the_default_rule_follows_the_minibatches_of_an_update() -> None:
    parameter = nn.Parameter(torch.ones(4))
    kinds = {}
    for rule in (None, "spectrain", {"rule": "two_versions", "error_feedback": True}):
        weights = StageWeights(
            [torch.optim.AdamW([parameter])],
            rule and make_prediction(rule),
            UpdatePattern(num_stages=4, stage=0, lag_per_hop=1),
            parameters=[parameter],
        )
        before = type(weights._rules[0])
        weights.begin(0, accumulate=4, is_drained=True)
        kinds[str(rule)] = before, type(weights._rules[0])
    default, whole, cut = kinds.values()
    assert whole[1] != cut[1] and default == (whole[0], cut[1])
