"""LAMB: Adam whose steps are scaled by the norms of whole parameters.

You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, arXiv
1904.00962, Algorithm 2. Every parameter tensor is a layer; φ is the identity. With moments m, v and
their bias-corrected m̂, v̂:

    r = m̂ / (√v̂ + ε)        u = r + λ w        w ← w - η (‖w‖ / ‖u‖) u

The trust ratio ‖w‖ / ‖u‖ needs the update itself, so sharing ratios alone would save little (see
`lars.share_trust_ratios`); each parameter by itself may go to another rank (`parallel_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.lars import (
    Adapt,
    check_options,
    is_adapted,
    refuse_complex,
    tensor_norms,
    with_gradients,
)


class LAMB(Optimizer):
    """Layer-wise adaptive moments; see the module's docstring for the equations.

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
        check_options(self, param_group, positive=("lr", "eps", "weight_decay"))
        options = {**self.defaults, **param_group}
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(f"LAMB needs betas in [0, 1), not {options['betas']}")
        if options["trust_clip"] is not None and not options["trust_clip"] > 0:
            raise ValueError(
                f"LAMB needs trust_clip > 0, or None for no limit, not {options['trust_clip']}"
            )
        super().add_param_group(param_group)
        refuse_complex(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kinds: dict[Any, list[Tensor]] = {}
            for index, parameter in enumerate(with_gradients(self, group)):
                adapted = is_adapted(parameter, group["adapt"])
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
        """Update `parameters` of one device and dtype."""
        options = {
            name: group[name] for name in ("betas", "eps", "weight_decay", "bias_correction")
        }
        updates = negative_updates(
            parameters, states=[self.state[parameter] for parameter in parameters], **options
        )
        lr = float(group["lr"])
        if not adapted:
            torch._foreach_add_(parameters, updates, alpha=lr)
            return
        # w ← w - η ratio u
        ratios = update_ratios(
            tensor_norms([*parameters, *updates]).view(2, -1), trust_clip=group["trust_clip"]
        )
        if parameters[0].device.type == "cpu":
            for parameter, update, ratio in zip(parameters, updates, ratios.tolist(), strict=True):
                parameter.add_(update, alpha=lr * ratio)
        else:  # without waiting for the device
            add_scaled(parameters, updates, rates=lr * ratios)


def update_ratios(norms: Tensor, *, trust_clip: float | None) -> Tensor:
    """Return ‖w‖ / ‖u‖ (layers,), at most `trust_clip`; 1 where either norm is zero.

    `norms` are (2, layers).
    """
    weights, updates = norms
    ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
    return ratios if trust_clip is None else ratios.clamp(max=trust_clip)


def add_scaled(parameters: list[Tensor], updates: list[Tensor], *, rates: Tensor) -> None:
    """Compute w ← w + rate * update, `rates` (parameters,); `updates` are overwritten."""
    torch._foreach_mul_(updates, list(rates.unbind()))
    torch._foreach_add_(parameters, updates)


def negative_updates(
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
