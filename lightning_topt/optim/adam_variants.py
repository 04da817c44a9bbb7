"""Optimizers that change Adam by whole parameters: LAMB by their norms, basis rotation by turning.

**LAMB** (You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, arXiv
1904.00962, Algorithm 2). Every parameter tensor is a layer; φ is the identity. With moments m, v
and their bias-corrected m̂, v̂:

    r = m̂ / (√v̂ + ε)        u = r + λ w        w ← w - η (‖w‖ / ‖u‖) u

The trust ratio ‖w‖ / ‖u‖ needs the update itself, so sharing ratios alone would save little (see
`lars.share_trust_ratios`); each parameter by itself may go to another rank (`parallel_step`).

**Basis rotation** is Adam in the eigenbasis of the gradients, which stale gradients disturb less
(Jung et al., Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, arXiv
2602.03515, Algorithms 1 and 2, both sides, second moments; in its synchronous form SOAP, Vyas et
al., arXiv 2409.11321). With gradient G (m, n) of a matrix, bases U (m, m) and V (n, n):

    L ← βc L + (1 - βc) G Gᵀ        R ← βc R + (1 - βc) Gᵀ G
    every `refresh_every` updates:  U ← QR(L U), V ← QR(R V), columns by falling eigenvalue
    M ← β₁ M + (1 - β₁) G           S ← β₂ S + (1 - β₂) (Uᵀ G V)²
    W ← W - η λ W - η U (Uᵀ M̂ V / (√Ŝ + ε)) Vᵀ

Adam scales each coordinate by itself, which suits a Hessian that is diagonal. Where it is not,
steps of delayed gradients swing to and fro. In the rotated coordinates it nearly is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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


# ---- Basis rotation

# Names of a side's covariance and basis in the state, and the dim of the gradient that it rotates.
_SIDES = (("left_covariance", "left_basis", 0), ("right_covariance", "right_basis", 1))


class BasisRotation(Optimizer):
    """AdamW whose matrices are updated in the eigenbasis of their gradients' covariances.

    `lr` η, `betas` of both moments, `eps` ε, `weight_decay` λ (decoupled). `covariance_beta`: βc,
    the second beta where None. `refresh_every`: updates between two refreshes of the bases, each
    one power iteration with QR. `max_dimension`: sides longer than that keep their coordinates (a
    vocabulary). `rotate=False` is AdamW. Every option may be set per parameter group, so embeddings
    and the head can do without::

        BasisRotation([{"params": matrices}, {"params": others, "rotate": False}], lr=1e-2)

    Parameters that are not matrices are updated as by AdamW. The best learning rate is higher than
    AdamW's.

    State per parameter: `step`, `exp_avg`, `exp_avg_sq` (of a matrix: in its rotated coordinates),
    and for a rotated side of length n a covariance and a basis of n² elements each. All but `step`
    have the parameter's dtype; bases are computed in float32 at least. Raises ValueError for
    options out of range, complex parameters, sparse gradients, and matrices that are sharded.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        covariance_beta: float | None = None,
        refresh_every: int = 10,
        max_dimension: int = 4096,
        rotate: bool = True,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(covariance_beta=covariance_beta, refresh_every=refresh_every)
        super().__init__(params, {**defaults, "max_dimension": max_dimension, "rotate": rotate})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every optimizer does; raises ValueError for bad options."""
        check_options(self, param_group, positive=("lr", "eps", "weight_decay"))
        options = {**self.defaults, **param_group}
        if not options["refresh_every"] >= 1:
            raise ValueError(
                f"BasisRotation needs refresh_every >= 1, not {options['refresh_every']}"
            )
        beta = options["covariance_beta"]
        if not all(0 <= each < 1 for each in (*options["betas"], 0.0 if beta is None else beta)):
            raise ValueError(
                f"BasisRotation needs betas in [0, 1), not {options['betas']} and "
                f"covariance_beta={beta}"
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
            for parameter in with_gradients(self, group):
                assert parameter.grad is not None
                self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            self._begin(parameter, state, group)
        state["step"] += 1
        steps = int(state["step"])
        # covariances, and now and then the bases of their eigenvectors
        beta = beta2 if group["covariance_beta"] is None else group["covariance_beta"]
        _follow(state, gradient, beta=beta)
        if steps == 1 or steps % group["refresh_every"] == 0:
            _refresh(state)
        # the first moment keeps its coordinates, which no refresh changes; the second is rotated
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        rotated = _rotate(gradient, state)
        state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        divisor = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        update = _rotate_back(_rotate(state["exp_avg"], state) / divisor, state)
        # decoupled decay, then the step
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(update, alpha=-rate / (1 - beta1**steps))

    def _begin(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Fill the state of a parameter before its first update."""
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        if not group["rotate"] or parameter.dim() != 2:
            return
        if isinstance(parameter, DTensor):
            raise ValueError(
                "BasisRotation rotates whole matrices, and this one is sharded; use a plan of "
                "strategy='topt', which gives each matrix an owner, or a group with rotate=False"
            )
        for covariance, basis, dim in _SIDES:
            if (size := parameter.shape[dim]) <= group["max_dimension"]:
                state[covariance] = parameter.new_zeros(size, size)
                state[basis] = parameter.new_zeros(size, size)


def _follow(state: dict[str, Any], gradient: Tensor, *, beta: float) -> None:
    """Average G Gᵀ and Gᵀ G into the covariances."""
    for covariance, _, dim in _SIDES:
        if covariance in state:
            product = gradient @ gradient.T if dim == 0 else gradient.T @ gradient
            state[covariance].lerp_(product, 1 - beta)


def _refresh(state: dict[str, Any]) -> None:
    """Take the eigenvectors at the first update; later one power iteration brings bases near them.

    The columns are ordered by their estimated eigenvalue first, so that QR keeps the largest
    directions best; second moments move with them.
    """
    for covariance, basis, dim in _SIDES:
        if basis not in state:
            continue
        dtype = torch.promote_types(state[basis].dtype, torch.float32)
        matrix, columns = state[covariance].to(dtype), state[basis].to(dtype)
        if state["step"] == 1:
            state[basis].copy_(torch.linalg.eigh(matrix).eigenvectors.flip(1))
            continue
        product = matrix @ columns
        order = (columns * product).sum(0).argsort(descending=True)
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(dim, order))
        state[basis].copy_(torch.linalg.qr(product.index_select(1, order)).Q)


def _rotate(tensor: Tensor, state: dict[str, Any]) -> Tensor:
    """Return Uᵀ T V, on the sides that are rotated."""
    if "left_basis" in state:
        tensor = state["left_basis"].T @ tensor
    return tensor @ state["right_basis"] if "right_basis" in state else tensor


def _rotate_back(tensor: Tensor, state: dict[str, Any]) -> Tensor:
    """Return U T Vᵀ, on the sides that are rotated."""
    if "left_basis" in state:
        tensor = state["left_basis"] @ tensor
    return tensor @ state["right_basis"].T if "right_basis" in state else tensor
