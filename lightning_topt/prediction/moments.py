"""Moments that optimizers keep of gradients, by parameter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_topt.prediction.storages import chunks, num_bytes, trainable

Method = Literal["SGD", "Adam"]  # AdamW is Adam with decoupled weight decay
Hyperparameters = Mapping[str, Any]
KNOWN = ("SGD", "Adam", "AdamW")


class Moments(NamedTuple):
    """Parameters of one group that have made equally many steps, and averages of their gradients,
    of the same shapes.

    `first`: SGD's momentum buffers, or Adam's m; `second`: Adam's v, with amsgrad its maximum.
    """

    group: int
    steps: int
    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


def method_of(optimizer: Optimizer, *, rule: str) -> Method:
    """Return how an optimizer that `rule` predicts with steps. Raises ValueError for any other."""
    kinds: tuple[tuple[type[Optimizer], Method], ...] = ((optim.SGD, "SGD"), (optim.Adam, "Adam"))
    steps = inspect.unwrap(type(optimizer).step)
    found = [
        method
        for kind, method in kinds
        if isinstance(optimizer, kind) and steps is inspect.unwrap(kind.step)
    ]
    if not found:
        raise ValueError(
            f"prediction {rule!r} knows the optimizers {', '.join(KNOWN)} of torch.optim, got "
            f"{type(optimizer).__name__}; "
            "use one of them, or prediction 'stash', which serves every optimizer"
        )
    for group in optimizer.param_groups:
        if found[0] == "SGD" and group["momentum"] == 0:
            raise ValueError(
                f"prediction {rule!r} follows the momentum of SGD, which is 0 here; give SGD a "
                "momentum, or use prediction "
                "'stash'"
            )
        if group.get("differentiable"):
            raise ValueError(
                f"prediction {rule!r} writes weights in place; build the optimizer with "
                "differentiable=False"
            )
    return found[0]


def read_moments(optimizer: Optimizer, *, method: Method) -> list[Moments]:
    """Return the moments of all parameters that have been updated, in chunks; those of others are
    not known yet.
    """
    here = {id(parameter) for parameter in trainable(optimizer)}
    found: list[Moments] = []
    for index, group in enumerate(optimizer.param_groups):
        known = [
            p
            for p in group["params"]
            if id(p) in here and _first(optimizer.state.get(p, {}), method) is not None
        ]
        for steps, parameters in _by_steps(optimizer, known, method=method).items():
            for chunk in chunks(parameters, size=lambda p: num_bytes([p])):
                states = [optimizer.state[p] for p in chunk]
                second = [_second(state, group) for state in states] if method == "Adam" else []
                found.append(
                    Moments(
                        index, steps, chunk, [_first(state, method) for state in states], second
                    )
                )
    return found


def _first(state: Mapping[str, Any], method: Method) -> Any:
    return state.get("momentum_buffer" if method == "SGD" else "exp_avg")


def _second(state: Mapping[str, Any], group: Hyperparameters) -> Tensor:
    second: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return second


def _by_steps(
    optimizer: Optimizer, parameters: Sequence[Tensor], *, method: Method
) -> dict[int, list[Tensor]]:
    """Adam counts the steps of each parameter, on its device if fused or capturable: all are read
    at once.
    """
    if method == "SGD":
        return {0: list(parameters)} if parameters else {}
    found: dict[int, list[Tensor]] = {}
    for parameter, steps in zip(
        parameters, _numbers([optimizer.state[p]["step"] for p in parameters]), strict=True
    ):
        found.setdefault(steps, []).append(parameter)
    return found


def _numbers(steps: Sequence[Any]) -> Iterator[int]:
    tensors = [step for step in steps if isinstance(step, Tensor)]
    read = iter(torch.stack([t.to(tensors[0].device) for t in tensors]).tolist() if tensors else ())
    return (int(next(read)) if isinstance(step, Tensor) else int(step) for step in steps)
