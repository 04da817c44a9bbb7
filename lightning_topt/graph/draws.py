"""Random numbers: which operators draw them, and how they are drawn again without the tensors they
belong to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_topt.graph.step_flow import Draw, LeafSpec

SEEDED = torch.Tag.nondeterministic_seeded
# How many numbers these draw depends on the values of their tensors.
BY_VALUE = {
    "rrelu_with_noise",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "multinomial",
}
PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def draw_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Return the random numbers that ``func(*args, **kwargs)`` draws; None for none."""
    if not _draws(func) or _is_off(func, args, kwargs):
        return None
    name = func._schema.name.partition("::")[2].rstrip("_")
    values = [*args, *kwargs.values()]
    if any(isinstance(value, torch.Generator) for value in values):
        return Draw(func, (), (), problem="numbers from a generator of its own")
    if name in BY_VALUE or any(
        not isinstance(value, (*PLAIN, Tensor, list, tuple)) for value in values
    ):
        return Draw(
            func,
            (),
            (),
            problem=f"numbers whose count depends on the values of its tensors ({func})",
        )
    return Draw(
        func, tuple(map(_spec, args)), tuple((key, _spec(value)) for key, value in kwargs.items())
    )


def draw_again(draws: Sequence[Draw], device: torch.device) -> None:
    """Draw the same numbers on `device` and throw them away: the generator is then as after the
    operators themselves.
    """
    if not draws:
        return
    with torch.no_grad():
        for draw in draws:
            assert not draw.problem, draw.problem
            keywords = {key: _tensor(value, device) for key, value in draw.keywords}
            draw.op(*(_tensor(value, device) for value in draw.arguments), **keywords)


@functools.cache
def _draws(func: OpOverload) -> bool:
    return SEEDED in func.tags


@functools.cache
def _positions(func: OpOverload) -> dict[str, int]:
    return {argument.name: number for number, argument in enumerate(func._schema.arguments)}


def _is_off(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator is dropout that does nothing."""
    where = _positions(func)

    def given(name: str, default: Any) -> Any:
        if name in kwargs or name not in where:
            return kwargs.get(name, default)
        return args[where[name]] if where[name] < len(args) else default

    if given("dropout_p", 1.0) == 0.0 or (
        func._schema.name.endswith("_rnn") and given("dropout", 0.0) == 0.0
    ):
        return True
    return given("training", True) is False or given("train", True) is False


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return LeafSpec(tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad=False)
    return value


def _tensor(value: Any, device: torch.device) -> Any:
    if not isinstance(value, LeafSpec):
        return device if isinstance(value, torch.device) and value.type == device.type else value
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return made.fill_(0.5) if value.dtype.is_floating_point else made.zero_()
