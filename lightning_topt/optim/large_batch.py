"""Optimizers for large batches, whose rates are scaled per layer by the norm of its weights.

Every parameter tensor is a layer.

**LARS** (You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888,
Algorithm 1):

| paper | here |
|---|---|
| γ, global learning rate (its schedule is a learning-rate scheduler's) | `lr` |
| m, β | `momentum`, `weight_decay` |
| η, trust coefficient | `trust_coefficient` |
| λ = η ‖w‖ / (‖g‖ + β ‖w‖), local learning rate | `trust_ratios` |
| v ← m v + γ λ (g + β w);  w ← w - v | `LARS._update` |

The momentum holds γ λ, as in the paper; implementations that multiply by γ afterwards differ while
the rate changes.

**LAMB** (You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, arXiv
1904.00962, Algorithm 2; φ is the identity). With moments m, v and their bias-corrected m̂, v̂:

    r = m̂ / (√v̂ + ε)        u = r + λ w        w ← w - η (‖w‖ / ‖u‖) u
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

# "matrices": parameters of two dims or more; not biases and norms' scales
Adapt = Literal["all", "matrices", "none"]


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling; see the module for the equations.

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
        _check_options(
            self,
            param_group,
            positive=("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
        )
        options = {**self.defaults, **param_group}
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("LARS with nesterov needs a momentum above 0")
        super().add_param_group(param_group)
        _refuse_complex(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = _with_gradients(self, group)
            adapted = [p for p in parameters if _is_adapted(p, group["adapt"])]
            # norms of weights, then of gradients: (2, layers)
            norms = tensor_norms([*adapted, *(_gradient(p) for p in adapted)]).view(2, -1)
            options = {name: group[name] for name in ("weight_decay", "trust_coefficient", "eps")}
            rates = float(group["lr"]) * trust_ratios(norms, **options)
            self._update(group, adapted, rates)
            plain = [p for p in parameters if not _is_adapted(p, group["adapt"])]
            self._update(group, plain, float(group["lr"]))
        return loss

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], rates: Tensor | float
    ) -> None:
        # `rates` γ λ: a number, or (parameters,)
        if not parameters:
            return
        momentum, gradients = group["momentum"], [_gradient(p) for p in parameters]
        # γ λ (g + β w), without waiting for the device
        if group["weight_decay"]:
            updates = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        else:
            updates = [gradient.clone() for gradient in gradients]
        if isinstance(rates, Tensor):
            scales = [r.to(u.device) for r, u in zip(rates.unbind(), updates, strict=True)]
            torch._foreach_mul_(updates, scales)
        else:
            torch._foreach_mul_(updates, rates)
        # v ← m v + γ λ (g + β w); w ← w - v
        if momentum:
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, buffers, alpha=momentum)
            else:
                updates = buffers
        torch._foreach_sub_(parameters, updates)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class LAMB(Optimizer):
    """Layer-wise adaptive moments; see the module for the equations.

    `lr` η, `betas` of m and v, `eps` ε, `weight_decay` λ. `bias_correction`: divide the moments by
    1 - β^step (the paper's Algorithm 2); without, m̂ = m and v̂ = v. `trust_clip`: largest trust
    ratio (None: no limit; timm's ``trust_clip=True`` is 1.0). `adapt`: which parameters get a trust
    ratio ("all", as the paper; "matrices": those of two dims or more; "none": the others' update is
    AdamW's). Every option may be set per parameter group. The gradient's global norm is not clipped
    here (apex's `max_grad_norm`): that is the Trainer's `gradient_clip_val`.

    State per parameter: `step` (float32 scalar, on the parameter's device unless that is the host),
    `exp_avg`, `exp_avg_sq`. Extra memory of a step: one tensor as large as the largest parameter on
    CPU, as all parameters elsewhere. Raises ValueError for options out of range, complex parameters
    and sparse gradients.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        trust_clip: float | None = None,
        adapt: Adapt = "all",
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction
        )
        super().__init__(params, {**defaults, "trust_clip": trust_clip, "adapt": adapt})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every optimizer does; raises ValueError for bad options."""
        _check_options(self, param_group, positive=("lr", "eps", "weight_decay"))
        options = {**self.defaults, **param_group}
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(f"LAMB needs betas in [0, 1), not {options['betas']}")
        if options["trust_clip"] is not None and not options["trust_clip"] > 0:
            raise ValueError(
                f"LAMB needs trust_clip > 0, or None for no limit, not {options['trust_clip']}"
            )
        super().add_param_group(param_group)
        _refuse_complex(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kinds: dict[Any, list[Tensor]] = {}
            for index, parameter in enumerate(_with_gradients(self, group)):
                adapted = _is_adapted(parameter, group["adapt"])
                # On CPU one parameter after the other, while its update is in the cache; elsewhere
                # as few calls as possible.
                alone = index if parameter.device.type == "cpu" else None
                kinds.setdefault((parameter.device, parameter.dtype, adapted, alone), []).append(
                    parameter
                )
            for (_, _, adapted, _), parameters in kinds.items():
                self._update(group, parameters, adapted=adapted)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor], *, adapted: bool) -> None:
        # Update `parameters` of one device and dtype
        options = {
            name: group[name] for name in ("betas", "eps", "weight_decay", "bias_correction")
        }
        updates = _negative_updates(
            parameters, states=[self.state[parameter] for parameter in parameters], **options
        )
        lr = float(group["lr"])
        if not adapted:
            torch._foreach_add_(parameters, updates, alpha=lr)
            return
        # w ← w - η ratio u
        ratios = _update_ratios(
            tensor_norms([*parameters, *updates]).view(2, -1), trust_clip=group["trust_clip"]
        )
        if parameters[0].device.type == "cpu":
            for parameter, update, ratio in zip(parameters, updates, ratios.tolist(), strict=True):
                parameter.add_(update, alpha=lr * ratio)
        else:  # without waiting for the device
            _add_scaled(parameters, updates, rates=lr * ratios)


def _update_ratios(norms: Tensor, *, trust_clip: float | None) -> Tensor:
    """Return ‖w‖ / ‖u‖ (layers,), at most `trust_clip`; 1 where either norm is zero.

    `norms` are (2, layers).
    """
    weights, updates = norms
    ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
    return ratios if trust_clip is None else ratios.clamp(max=trust_clip)


def _add_scaled(parameters: list[Tensor], updates: list[Tensor], *, rates: Tensor) -> None:
    # Compute w ← w + rate * update, `rates` (parameters,); `updates` are overwritten
    torch._foreach_mul_(updates, list(rates.unbind()))
    torch._foreach_add_(parameters, updates)


def _negative_updates(
    parameters: Sequence[Tensor],
    *,
    states: Sequence[dict[str, Any]],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> list[Tensor]:
    """Advance `states` by one step; return -u of every parameter, in new memory.

    States are made where they are empty. torch's fused Adam takes its step from the tensor it is
    given; started at -λ w, with rate 1, that becomes -u: one pass over g, m and v in place of
    eight.
    """
    updates = [torch.empty_like(parameter) for parameter in parameters]
    gradients: list[Tensor] = []
    for parameter, update, state in zip(parameters, updates, states, strict=True):
        # A new state, or a loaded one on the device and with the strides of the update.
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor) or step.device != update.device:
            state["step"] = torch.as_tensor(step, dtype=torch.float32, device=update.device).clone()
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = (
                _in_order_of(update, state[name]) if name in state else torch.zeros_like(update)
            )
        assert parameter.grad is not None
        gradients.append(_in_order_of(update, parameter.grad))
        torch.mul(parameter, -weight_decay, out=update)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    if not bias_correction:
        steps = [torch.full_like(step, torch.inf) for step in steps]  # 1 - β^inf = 1
    first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    rates: dict[str, Any] = {
        "lr": 1.0,
        "beta1": betas[0],
        "beta2": betas[1],
        "weight_decay": 0.0,
        "eps": eps,
    }
    torch._fused_adam_(
        updates, gradients, first, second, [], steps, **rates, amsgrad=False, maximize=False
    )
    return updates


def _in_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, copied if its elements lie in another order than `like`'s.

    The fused kernel walks through memory.
    """
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


# ---- both


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms (number of tensors,) on the first one's device, without waiting for it.

    In float32, or in float64 if a tensor is. A tensor's norm does not depend on the other tensors
    of the call, bit for bit.
    """
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    if not tensors:
        return torch.empty(0)
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=dtype)
    return torch.stack([norm.to(tensors[0].device) for norm in norms])


def trust_ratios(
    norms: Tensor, *, weight_decay: float, trust_coefficient: float, eps: float
) -> Tensor:
    """Return λ (layers,): η ‖w‖ / (‖g‖ + β ‖w‖ + eps), or 1 where either norm is zero.

    `norms` (2, layers) are those of weights and of gradients.
    """
    weights, gradients = norms
    ratios = trust_coefficient * weights / (gradients + weight_decay * weights + eps)
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0)


def _is_adapted(parameter: Tensor, adapt: Adapt) -> bool:
    # whether the rate of the parameter is scaled by a trust ratio
    return adapt == "all" or (adapt == "matrices" and parameter.dim() > 1)


def _check_options(
    optimizer: Optimizer, group: Mapping[str, object], *, positive: Sequence[str]
) -> None:
    """Raise ValueError for options that are out of range.

    That is a negative option among `positive`, and an unknown `adapt`.
    """
    options = {**optimizer.defaults, **group}
    name = type(optimizer).__name__
    for option in positive:
        if not options[option] >= 0:
            raise ValueError(f"{name} needs {option} >= 0, not {options[option]}")
    if options.get("adapt", "all") not in ("all", "matrices", "none"):
        raise ValueError(
            f'{name} needs adapt "all", "matrices" or "none", not {options["adapt"]!r}'
        )


def _refuse_complex(optimizer: Optimizer) -> None:
    # Raise ValueError, and take the newest group off, where it has complex parameters
    if any(parameter.is_complex() for parameter in optimizer.param_groups[-1]["params"]):
        optimizer.param_groups.pop()
        raise ValueError(
            f"{type(optimizer).__name__} does not take complex parameters; give it "
            "torch.view_as_real of them"
        )


def _with_gradients(optimizer: Optimizer, group: Mapping[str, Any]) -> list[Tensor]:
    # The parameters of `group` that have a gradient. ValueError for a sparse one.
    parameters: list[Tensor] = [
        parameter for parameter in group["params"] if parameter.grad is not None
    ]
    if any(p.grad.is_sparse for p in parameters if p.grad is not None):
        raise ValueError(
            f"{type(optimizer).__name__} needs dense gradients; build the embedding with "
            "sparse=False"
        )
    return parameters
