"""Methods of exchange by mapping: those of the package, and those of examples/recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.recipes.demo import DeMo
from examples.recipes.power_sgd import PowerSGD
from examples.recipes.sign import Sign
from lightning_topt.communication import ExchangeMethod, read_method

RECIPES: dict[str, type[ExchangeMethod]] = {kind.name: kind for kind in (DeMo, PowerSGD, Sign)}


def method_of(given: Mapping[str, Any]) -> Any:
    """Return the method of ``{"method": name, option: value, ...}``."""
    options = dict(given)
    kind = RECIPES.get(options.pop("method", ""))
    return read_method(given) if kind is None else kind(**options)
