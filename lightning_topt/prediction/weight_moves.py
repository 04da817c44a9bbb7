"""Weights that are to be expected from an optimizer's moments, as moves of the weights of now,
written in place.

Symbols: W weights, s updates ahead, lr learning rate, g momentum, d dampening, b1 b2 betas, l
weight decay, t steps made, m and v the first and second moments.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_topt.prediction.moments import Hyperparameters, Method, Moments

# of weights; with fewer, loading the compiler takes longer than it saves in a thousand passes
KERNEL_BYTES = 4 << 20
KERNEL_THREADS = 3  # as many of torch's are as fast as a kernel on one


class SGDMove(NamedTuple):
    """W <- weight W + buffer m."""

    weight: float
    buffer: float


class AdamStep(NamedTuple):
    """W <- shrink W; m <- keep m + pull W; W <- W - rate m / (sqrt(v) / root + eps). Only W is
    written.
    """

    shrink: float
    keep: float
    pull: float
    rate: float
    root: float
    eps: float


Move = SGDMove | tuple[AdamStep, ...]


def repeated_update(
    moments: Moments, method: Method, count: int, rates: Sequence[Hyperparameters]
) -> Move:
    """Return the move by `count` times the last update's direction, W - s lr dW.

    SGD: dW is the momentum buffer; Adam, AdamW: m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),
    without decoupled decay.
    """
    step = rates[0]
    length = count * float(step["lr"])
    if method == "SGD":
        return SGDMove(1.0, -length)
    first, second = _corrections(step, moments.steps)
    return (AdamStep(1.0, 1.0, 0.0, length / first, math.sqrt(second), float(step["eps"])),)


def updates_without_gradients(
    moments: Moments, method: Method, count: int, rates: Sequence[Hyperparameters]
) -> Move:
    """Return the move by `count` updates as the optimizer would make them, were all gradients 0 but
    for weight decay.

    The last of `rates` stays. Second moments stay as they are.
    """
    steps = [rates[min(ahead, len(rates) - 1)] for ahead in range(count)]
    if method == "SGD":
        return _sgd_move(steps)
    return tuple(
        _adam_step(step, moments.steps + ahead) for ahead, step in enumerate(steps, start=1)
    )


def keep_and_move(moments: Moments, copies: Sequence[Tensor], move: Move) -> None:
    """Copy the parameters into `copies`, of the same shapes, and move them in place."""
    if _suits_kernels(moments):
        kernels = importlib.import_module("lightning_topt.prediction.move_kernels")
        columns = (
            moments.parameters,
            moments.first,
            copies,
            *([moments.second] if moments.second else []),
        )
        for tensors in zip(*columns, strict=True):
            kernels.keep_and_move(
                *(tensor.detach().view(-1).numpy() for tensor in tensors), move=move
            )
    else:
        torch._foreach_copy_(list(copies), moments.parameters)
        move_by_torch(moments, move)


def move_by_torch(moments: Moments, move: Move) -> None:
    """Move the parameters in place, on any device."""
    parameters, means = _real(moments.parameters), _real(moments.first)
    if isinstance(move, SGDMove):
        if move.weight != 1.0:
            torch._foreach_mul_(parameters, move.weight)
        torch._foreach_add_(parameters, means, alpha=move.buffer)
        return
    roots = torch._foreach_sqrt(_real(moments.second))
    is_pulled = any(step.pull for step in move)
    if is_pulled:  # means change by more than a factor
        means = [mean.clone() for mean in means]
    kept = 1.0  # of the means of now
    for step in move:
        if step.shrink != 1.0:
            torch._foreach_mul_(parameters, step.shrink)
        if is_pulled:
            torch._foreach_mul_(means, step.keep)
            torch._foreach_add_(means, parameters, alpha=step.pull)
        else:
            kept *= step.keep
        divisors = torch._foreach_div(roots, step.root)
        torch._foreach_add_(divisors, step.eps)
        torch._foreach_addcdiv_(parameters, means, divisors, value=-step.rate * kept)


def _sgd_move(steps: Sequence[Hyperparameters]) -> SGDMove:
    weights, velocity = (1.0, 0.0), (0.0, 1.0)  # as multiples of weights and buffers of now

    def plus(a: tuple[float, float], factor: float, b: tuple[float, float]) -> tuple[float, float]:
        return a[0] + factor * b[0], a[1] + factor * b[1]

    for step in steps:
        momentum, decay = (
            float(step["momentum"]),
            plus((0.0, 0.0), float(step["weight_decay"]), weights),
        )
        velocity = plus(plus((0.0, 0.0), momentum, velocity), 1.0 - float(step["dampening"]), decay)
        direction = plus(decay, momentum, velocity) if step["nesterov"] else velocity
        weights = plus(weights, -float(step["lr"]), direction)
    return SGDMove(*weights)


def _adam_step(step: Hyperparameters, count: int) -> AdamStep:
    """Return step number `count` without a gradient."""
    rate, decay, keep = float(step["lr"]), float(step["weight_decay"]), float(step["betas"][0])
    is_decoupled = bool(step.get("decoupled_weight_decay"))
    first, second = _corrections(step, count)
    shrink, pull = (1.0 - rate * decay, 0.0) if is_decoupled else (1.0, (1.0 - keep) * decay)
    return AdamStep(shrink, keep, pull, rate / first, math.sqrt(second), float(step["eps"]))


def _corrections(step: Hyperparameters, count: int) -> tuple[float, float]:
    first, second = (float(beta) for beta in step["betas"])
    return 1.0 - first**count, 1.0 - second**count


def _suits_kernels(moments: Moments) -> bool:
    """Whether all tensors are plain rows of 32 or 64 bit on a CPU, and enough for kernels to
    pay.
    """
    tensors = [*moments.parameters, *moments.first, *moments.second]
    return (
        {(t.dtype, t.device.type) for t in tensors}
        in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})
        and sum(parameter.nbytes for parameter in moments.parameters) >= KERNEL_BYTES
        and torch.get_num_threads() <= KERNEL_THREADS
        and all(type(t) in (Tensor, nn.Parameter) and t.is_contiguous() for t in tensors)
    )


def _real(tensors: list[Tensor]) -> list[Any]:
    """Adam takes real and imaginary parts for numbers of their own."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
