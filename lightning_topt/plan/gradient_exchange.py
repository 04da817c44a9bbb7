"""The entry `gradient_exchange` of a plan: a method of exchange with what of its options a plan
fixes, as plain values.

How a run waits, checks and treats infinities (`ExchangeSettings`) is not the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod
from lightning_topt.communication.method_registry import (
    DEFAULT_METHOD,
    method_classes,
    read_gradient_method,
)
from lightning_topt.costs.plain_values import shown

# Plans were once read with the options of all methods, each of which had to have this value where
# the method ignored it.
_ONCE_COMMON = {
    "density": 0.01,
    "hierarchical": None,
    "value_dtype": "float32",
    "error_feedback": True,
    "warmup_steps": 0,
    "dense_steps": 1,
    "exempt": ["norm", "bias"],
    "rank": 2,
}


def exchange_to_dict(method: GradientMethod) -> dict[str, Any]:
    """Return plain values of the method and the options that a plan fixes."""
    return {
        name: value
        for name, value in method.as_mapping().items()
        if name not in method.not_in_plans
    }


def read_exchange(given: ExchangeMethod | str | Mapping[str, Any]) -> GradientMethod:
    """Return a method that a plan can have from any of the forms of `read_method`. Raises
    ValueError for any other.
    """
    method = read_gradient_method(given)
    method.check_in_plan()
    return method


def exchange_from_dict(data: Any) -> GradientMethod:
    """Read what `exchange_to_dict` wrote, in this release or an earlier one, or a part of it.
    Raises ValueError.
    """
    if not isinstance(data, Mapping):
        raise ValueError(
            f"must be a mapping such as {{method: topk, density: 0.01}}, got {shown(data)}"
        )
    kind = method_classes().get(str(data.get("method", DEFAULT_METHOD)))
    known = set() if kind is None else {"method", *kind.__dataclass_fields__}
    ignored = {
        name
        for name, value in data.items()
        if name not in known and _ONCE_COMMON.get(name, ...) == value
    }
    return read_exchange({name: value for name, value in data.items() if name not in ignored})
