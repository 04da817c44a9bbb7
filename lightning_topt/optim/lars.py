"""LARS: stochastic gradient descent whose rate is scaled per layer by ‖w‖ / ‖gradient‖.

You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888, Algorithm
1. Every parameter tensor is a layer. What is what:

| paper | here |
|---|---|
| γ, global learning rate (its schedule is a learning-rate scheduler's) | `lr` |
| m, β | `momentum`, `weight_decay` |
| η, trust coefficient | `trust_coefficient` |
| λ = η ‖w‖ / (‖g‖ + β ‖w‖), local learning rate | `trust_ratios` |
| v ← m v + γ λ (g + β w);  w ← w - v | `update_each`, `update_together` |

The momentum holds γ λ, as in the paper; implementations that multiply by γ afterwards differ while
the rate changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

# "matrices": parameters of two dims or more; not biases and norms' scales
Adapt = Literal["all", "matrices", "none"]

# The fused kernel takes 1 - rate; below this, rounding of that difference (1e-16) would show in a
# float32.
_SMALLEST_FUSED_RATE = 1e-7


def layer_norms(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return ‖w‖ and ‖g‖ of every layer: (2, layers), in float32, or in float64 if a parameter is;
    no wait for the device.

    A tensor's norm does not depend on the other tensors of the call, bit for bit.
    """
    return tensor_norms([*parameters, *gradients]).view(2, len(parameters))


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms (number of tensors,) on the first one's device; see `layer_norms`."""
    dtype = (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )
    if not tensors:
        return torch.empty(0)
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=dtype)
    return torch.stack([norm.to(tensors[0].device) for norm in norms])


def trust_ratios(
    norms: Tensor, *, weight_decay: float, trust_coefficient: float, eps: float
) -> Tensor:
    """Return λ (layers,) from the (2, layers) of `layer_norms`: η ‖w‖ / (‖g‖ + β ‖w‖ + eps), or 1
    where either norm is zero.
    """
    weights, gradients = norms
    ratios = trust_coefficient * weights / (gradients + weight_decay * weights + eps)
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0)


def is_adapted(parameter: Tensor, adapt: Adapt) -> bool:
    """Return whether the rate of `parameter` is scaled by a trust ratio."""
    return adapt == "all" or (adapt == "matrices" and parameter.dim() > 1)


def check_options(
    optimizer: Optimizer, group: Mapping[str, Any], *, positive: Sequence[str]
) -> None:
    """Raise ValueError for a negative option among `positive`, for an unknown `adapt`, and for
    complex parameters.
    """
    options = {**optimizer.defaults, **group}
    name = type(optimizer).__name__
    for option in positive:
        if not options[option] >= 0:
            raise ValueError(f"{name} needs {option} >= 0, not {options[option]}")
    if options["adapt"] not in ("all", "matrices", "none"):
        raise ValueError(
            f'{name} needs adapt "all", "matrices" or "none", not {options["adapt"]!r}'
        )
    params = [options["params"]] if isinstance(options["params"], Tensor) else options["params"]
    if any(p.is_complex() for p in params if isinstance(p, Tensor)):
        raise ValueError(
            f"{name} does not take complex parameters; give it torch.view_as_real of them"
        )


def with_gradients(group: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters of `group` that have a gradient. ValueError for a sparse one."""
    parameters: list[Tensor] = [
        parameter for parameter in group["params"] if parameter.grad is not None
    ]
    if any(p.grad.is_sparse for p in parameters if p.grad is not None):
        raise ValueError("trust ratios need dense gradients; build the embedding with sparse=False")
    return parameters


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling; see the module's docstring for the equations.

    `lr` γ, `momentum` m, `weight_decay` β, `trust_coefficient` η; `eps` is added to the denominator
    of the trust ratio (the paper has none). `nesterov`: w ← w - (γ λ (g + β w) + m v). `adapt`:
    which parameters get a trust ratio ("all", as the paper; "matrices": those of two dims or more;
    "none": plain SGD); the others are updated with λ = 1. Every option may be set per parameter
    group, so biases and norms can do without ratio and weight decay::

        LARS([{"params": weights, "weight_decay": 1e-4}, {"params": others, "adapt": "none"}],
        lr=4.0)

    State: `momentum_buffer` per parameter. Gradients are not clipped: that is the Trainer's. Raises
    ValueError for negative options, `nesterov` without momentum, complex parameters and sparse
    gradients.
    """

    # replaced on an instance by `trust_ratios.share_trust_ratios`
    layer_norms = staticmethod(layer_norms)

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt: Adapt = "all",
    ) -> None:
        defaults = dict(
            lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient
        )
        super().__init__(params, {**defaults, "eps": eps, "nesterov": nesterov, "adapt": adapt})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every optimizer does; raises ValueError for bad options."""
        check_options(
            self,
            param_group,
            positive=("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
        )
        options = {**self.defaults, **param_group}
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("LARS with nesterov needs a momentum above 0")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, with_gradients(group)) for group in self.param_groups]
        adapted = [
            [p for p in parameters if is_adapted(p, group["adapt"])] for group, parameters in groups
        ]
        layers = [parameter for some in adapted for parameter in some]
        norms = self.layer_norms(layers, [_gradient(parameter) for parameter in layers])
        parts = torch.split(norms, [len(some) for some in adapted], dim=1)
        for (group, parameters), some, part in zip(groups, adapted, parts, strict=True):
            self._update(group, some, part)
            self._update(group, [p for p in parameters if not is_adapted(p, group["adapt"])], None)
        return loss

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], norms: Tensor | None
    ) -> None:
        """Update `parameters`, with trust ratios from `norms` (2, parameters) or with the plain
        rate.
        """
        if not parameters:
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        gradients, buffers = [_gradient(parameter) for parameter in parameters], []
        if momentum:
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        options = {
            "momentum": momentum,
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
        }
        rates: Tensor | None = None
        if norms is not None:
            chosen = {name: group[name] for name in ("weight_decay", "trust_coefficient", "eps")}
            rates = lr * trust_ratios(norms, **chosen)
        if all(parameter.device.type == "cpu" for parameter in parameters):
            numbers = [lr] * len(parameters) if rates is None else rates.tolist()
            update_each(parameters, gradients, buffers, rates=numbers, **options)
        else:
            update_together(
                parameters, gradients, buffers, rates=lr if rates is None else rates, **options
            )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def update_each(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    rates: Sequence[float],
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update one parameter after the other, for CPU: in one pass over memory where torch's fused
    SGD can express the update.

    `rates` are γ λ; `buffers` is empty without momentum.
    """
    options: dict[str, Any] = {
        "momentum": momentum,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    for index, (parameter, gradient, rate) in enumerate(
        zip(parameters, gradients, rates, strict=True)
    ):
        own = list(buffers[index : index + 1])
        if (
            nesterov
            or not _same_memory_order(parameter, gradient, *own)
            or not rate > _SMALLEST_FUSED_RATE
        ):
            update_together([parameter], [gradient], own, rates=rate, **options)
            continue
        # Fused SGD: v ← m v + (1 - dampening) (g + β w); w ← w - lr v. Without momentum: w ← w - lr
        # (g + β w).
        lr, dampening = (1.0, 1.0 - rate) if momentum else (rate, 0.0)
        torch._fused_sgd_(
            *([parameter], [gradient], own),
            **{
                **options,
                "lr": lr,
                "dampening": dampening,
                "maximize": False,
                "is_first_step": False,
            },
        )


def _same_memory_order(*tensors: Tensor) -> bool:
    """Whether a kernel may walk through the memory of all of them at once; float32 only."""
    return all(tensor.dtype == torch.float32 for tensor in tensors) and (
        all(tensor.is_contiguous() for tensor in tensors)
        or (
            tensors[0].dim() == 4
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        )
    )


def update_together(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    rates: Tensor | float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update all parameters with a few calls, without waiting for the device; `rates` γ λ is a
    number or (parameters,).
    """
    if weight_decay:
        updates = list(torch._foreach_add(list(gradients), list(parameters), alpha=weight_decay))
    else:
        updates = [gradient.clone() for gradient in gradients]
    if isinstance(rates, Tensor):
        scales = [
            rate.to(update.device) for rate, update in zip(rates.unbind(), updates, strict=True)
        ]
        torch._foreach_mul_(updates, scales)
    else:
        torch._foreach_mul_(updates, rates)
    if momentum:
        torch._foreach_mul_(list(buffers), momentum)
        torch._foreach_add_(list(buffers), updates)
        if nesterov:
            torch._foreach_add_(updates, list(buffers), alpha=momentum)
    torch._foreach_sub_(list(parameters), updates if nesterov or not momentum else list(buffers))
