"""Basis rotation: AdamW in the eigenbasis of its gradients, which stale gradients disturb less.

Copy this file beside your program and return the optimizer from `configure_optimizers`:

    from basis_rotation import BasisRotation

    optimizer = BasisRotation(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

Beside a continuous pipeline give the rule that suits it, as no default knows this optimizer:
`prediction={"rule": "two_versions", "error_feedback": True}` where batches are cut into at least as
many minibatches as are in flight, else `prediction="stash"`.

Jung et al., Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, arXiv
2602.03515, Algorithms 1 and 2, both sides, second moments; its synchronous form is SOAP, Vyas et
al., arXiv 2409.11321. With gradient G (m, n) of a matrix, bases U (m, m) and V (n, n):

    L ← βc L + (1 - βc) G Gᵀ        R ← βc R + (1 - βc) Gᵀ G
    every `refresh_every` updates:  U ← QR(L U), V ← QR(R V), columns by falling eigenvalue
    M ← β₁ M + (1 - β₁) G           S ← β₂ S + (1 - β₂) (Uᵀ G V)²
    W ← W - η λ W - η U (Uᵀ M̂ V / (√Ŝ + ε)) Vᵀ

Adam scales each coordinate by itself, which suits a Hessian that is diagonal. Where it is not,
steps of delayed gradients swing to and fro. In the rotated coordinates it nearly is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

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
    have the parameter's dtype; bases are computed in float32 at least. Sharded matrices raise
    ValueError.
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
        options = {**self.defaults, **param_group}
        beta = options["covariance_beta"]
        betas = (*options["betas"], 0.0 if beta is None else beta)
        if not all(0 <= each < 1 for each in betas) or options["refresh_every"] < 1:
            raise ValueError(f"betas are in [0, 1) and refresh_every from 1; got {options}")
        if any(options[name] < 0 for name in ("lr", "eps", "weight_decay")):
            raise ValueError(f"lr, eps and weight_decay are not negative; got {options}")
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            raise ValueError("BasisRotation does not take complex parameters")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
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
