"""All methods of exchange by name: each module or folder of `methods` has the classes of one."""

from __future__ import annotations

import importlib
import pkgutil
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.communication import methods
from lightning_topt.communication.exchange_method import ExchangeMethod, GradientMethod

DEFAULT_METHOD = "topk"


def read_method(given: ExchangeMethod | str | Mapping[str, Any]) -> ExchangeMethod:
    """Return a method from itself, its name, or ``{"method": name, option: value, ...}``.

    Without a name it is top-k.

    Raises:
        ValueError: for a name or an option that there is not, and for options out of range.
    """
    if isinstance(given, ExchangeMethod):
        return given
    if not isinstance(given, str | Mapping):
        raise ValueError(
            "a method of exchange is a name, a mapping such as {method: topk, density: 0.01}, or "
            "an object such as "
            f"TopK(density=0.01); got {reprlib.repr(given)}"
        )
    # the name, then the options that are left
    options = {"method": given} if isinstance(given, str) else dict(given)
    name = check_choice(
        options.pop("method", DEFAULT_METHOD), name="method", allowed=method_classes()
    )
    kind = method_classes()[name]
    known = [field.name for field in fields(kind)]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(
            f"method {name!r} has no option {reprlib.repr(unknown[0])}; its options are "
            f"{', '.join(known) or 'none'}"
        )
    return kind(**options)


def read_gradient_method(given: ExchangeMethod | str | Mapping[str, Any]) -> GradientMethod:
    """Return what `read_method` gives where it averages gradients.

    Raises:
        ValueError: where it does not.
    """
    method = read_method(given)
    if not isinstance(method, GradientMethod):
        raise ValueError(
            f"{type(method).__name__} averages parameters that ranks train alone, not gradients: "
            f"give it to LocalStepsStrategy, or choose one of {', '.join(gradient_methods())}"
        )
    return method


@cache
def method_classes() -> Mapping[str, type[ExchangeMethod]]:
    """Return all methods by name.

    A method is a class with a name of its own, that its module or folder defines.
    """
    found: dict[str, type[ExchangeMethod]] = {}
    for entry in sorted(pkgutil.iter_modules(methods.__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{methods.__name__}.{entry.name}")
        for value in vars(module).values():
            is_method = isinstance(value, type) and issubclass(value, ExchangeMethod)
            # not what it imports, and no base class
            own = is_method and value.__module__.startswith(module.__name__)
            if own and "name" in vars(value):
                assert value.name not in found, f"two methods have the name {value.name}"
                found[value.name] = value
    return found


@cache
def gradient_methods() -> tuple[str, ...]:
    """Return the names of those that average gradients."""
    return tuple(
        name for name, kind in method_classes().items() if issubclass(kind, GradientMethod)
    )
