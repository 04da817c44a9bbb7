"""The entry `gradient_exchange` of a plan: what of `ExchangeOptions` a plan fixes, as plain values and in words.

How a run waits, checks and treats infinities (`timeout_seconds`, `debug`, `nonfinite`) is not the plan's; neither are
`momentum`, which belongs to the optimizer, nor `link`: the plan has been weighed against dense exchanges already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_topt.communication.options import READ_BY, ExchangeOptions
from lightning_topt.costs.plain_values import names, shown

ENTRIES = (
    *("method", "density", "hierarchical", "value_dtype", "error_feedback"),
    *("warmup_steps", "dense_steps", "exempt", "rank"),
)


def check_exchange(options: ExchangeOptions) -> None:
    """Raise ValueError where `options` say more than a plan fixes, and for a dense exchange that is none of ours."""
    for field in fields(options):
        if field.name not in ENTRIES and getattr(options, field.name) != field.default:
            raise ValueError(f"{field.name} is not part of a plan; its entries are {', '.join(ENTRIES)}")
    if options.method == "dense" and not options.hierarchical:
        raise ValueError("method 'dense' needs hierarchical: true; without it leave gradient_exchange out")


def exchange_to_dict(options: ExchangeOptions) -> dict[str, Any]:
    """Return plain values of the entries that mean something for the method."""
    read = [name for name in ENTRIES if options.method in READ_BY.get(name, {options.method})]
    values = {name: getattr(options, name) for name in read}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def exchange_from_dict(data: Any) -> ExchangeOptions:
    """Read what `exchange_to_dict` wrote, or a part of it. Raises ValueError that names the wrong entry."""
    if not isinstance(data, Mapping):
        raise ValueError(f"must be a mapping such as {{method: topk, density: 0.01}}, got {shown(data)}")
    if unknown := set(data) - set(ENTRIES):
        raise ValueError(f"unknown entries {names(unknown)}; known are {', '.join(ENTRIES)}")
    for field in fields(ExchangeOptions):
        if field.name in data:
            _check_type(field.name, data[field.name], field.default)
    options = ExchangeOptions(**data)
    check_exchange(options)
    return options


def is_lossy(options: ExchangeOptions) -> bool:
    """Return whether training is another one than with whole gradients: not everything of a gradient arrives in its step."""
    return options.method != "dense"


def describe_exchange(options: ExchangeOptions) -> str:
    """Return a few words for people: ``"top-k 1 % between nodes"``."""
    methods = {
        "topk": f"top-k {100 * options.density:g} %",
        "dense": "whole",
        "bf16": "bfloat16",
        "fp16": "float16",
        "powersgd": f"PowerSGD rank {options.rank}",
        "sign": "1 bit per entry",
    }
    words = methods[options.method]
    words += f" in {options.value_dtype}" if options.value_dtype != "float32" else ""
    if options.hierarchical:
        words += " between nodes" if is_lossy(options) else ", summed in each node first"
    return words + ("" if options.error_feedback else " without error feedback")


def _check_type(name: str, value: Any, default: Any) -> None:
    """YAML gives any type; a number of the wrong kind would show up far from here."""
    kinds: dict[type, tuple[type, ...]] = {float: (int, float), tuple: (list, tuple), type(None): (bool, type(None))}
    allowed = kinds.get(type(default), (type(default),))
    right = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
    if isinstance(default, tuple):
        right = right and all(isinstance(item, str) for item in value)
    if not right:
        raise ValueError(f"{name} must be of the kind of {default!r}, got {shown(value)}")
