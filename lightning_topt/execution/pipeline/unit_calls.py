"""Calls of modules are taken over for the time of one pass, without hooks that user code can
see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_topt.graph.silence import runs_metrics

ABSENT: Any = object()
Attribute = tuple[dict[str, Any], str, Any]  # of a namespace: its name, its value
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
LOGS = ("log", "log_dict", "print")
METRIC_METHODS = ("update", "compute", "forward", "_compiled_call_impl")


@contextmanager
def replaced(attributes: Iterable[Attribute]) -> Iterator[None]:
    """Set attributes of instances for the time of the context, and put back what was there."""
    before: list[Attribute] = []
    try:
        for namespace, name, value in attributes:
            before.append((namespace, name, namespace.get(name, ABSENT)))
            namespace[name] = value
        yield
    finally:
        for namespace, name, value in reversed(before):
            if value is ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = value


def taken_over(units: Iterable[tuple[str, nn.Module]], handler: Handler) -> list[Attribute]:
    """Return the attributes that let calls of `units`, given with their paths, go to
    ``handler(path, call, args, kwargs)``.

    ``call(*args, **kwargs)`` is what the module would have done. `nn.Module.__call__` asks
    ``_compiled_call_impl`` before anything else, hooks included.
    """
    found: list[Attribute] = []
    for path, module in units:
        own = vars(module).get("_compiled_call_impl") or module._call_impl
        found.append((vars(module), "_compiled_call_impl", partial(_take_over, handler, path, own)))
    return found


def _take_over(
    handler: Handler, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return handler(path, call, args, kwargs)


def silenced(module: nn.Module, make: Callable[..., Any]) -> list[Attribute]:
    """Return the attributes that let logs of `module` be dropped, and calls of its metrics give
    what `make` returns.
    """
    found: list[Attribute] = [
        (vars(module), name, _nothing) for name in LOGS if hasattr(module, name)
    ]
    for submodule in module.modules():
        if runs_metrics(submodule):
            found += [(vars(submodule), name, make) for name in METRIC_METHODS]
    return found


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
