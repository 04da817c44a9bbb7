"""Packages that libraries import in full for a name or two: the rest is read when it is asked for.

    sys.meta_path.insert(0, LightPackages())
    import lightning            # which needs `torchmetrics.Metric`, and no metric of it

A light package has the names below, and the submodules that these need. Whatever else is asked of
it, a name or a submodule, has it read in full first, in its usual order; it stays the same object.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple


class _Part(NamedTuple):
    """What a light package has.

    Args:
        names: where each name is (see `pkgutil.resolve_name`).
        inside: the submodules that these need.
        values: what these submodules find in the package.
        first: the submodule that has to be imported before others.
    """

    names: dict[str, str]
    inside: tuple[str, ...] = ()
    values: dict[str, object] = {}
    first: str = ""


_LIGHT = {
    # Lightning's base classes, and the one metric that models here have
    "torchmetrics": _Part(
        {
            "Metric": "torchmetrics.metric:Metric",
            "MetricCollection": "torchmetrics.collections:MetricCollection",
            "MeanMetric": "torchmetrics.aggregation:MeanMetric",
            "__version__": "torchmetrics.__about__:__version__",
        },
        ("__about__", "metric", "collections", "aggregation", "wrappers", "utilities"),
        {"_logger": logging.getLogger("torchmetrics")},
        "torchmetrics.utilities",
    ),
    # of torchmetrics, which draws
    "matplotlib.pyplot": _Part(
        {"Figure": "matplotlib.figure:Figure", "style": "matplotlib.style:"}
    ),
    # of losses of transformers that match boxes
    "scipy.optimize": _Part(
        {"linear_sum_assignment": "scipy.optimize._lsap:linear_sum_assignment"}, ("_lsap",)
    ),
}


class _LightModule(ModuleType):
    """A module that has been found, and not been read."""

    def __getattr__(self, name: str) -> Any:
        part = _LIGHT[self.__name__]
        if name not in part.names:
            read_in_full(self)
            return getattr(self, name)
        if part.first:
            importlib.import_module(part.first)
        value = pkgutil.resolve_name(part.names[name])
        vars(self).setdefault(name, value)  # the next access does not come here
        return value


def read_in_full(package: object) -> None:
    """Read a light module as any other is; others are left as they are."""
    module: Any = package
    if type(package) is _LightModule:
        spec = module.__spec__
        module.__class__ = ModuleType
        spec.loader = module.__loader__ = spec.loader.usual
        spec.loader.exec_module(module)


class LightPackages(MetaPathFinder):
    """Finds the packages above, and leaves all others to the finders behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a light package, or a submodule that is there by now."""
        if name in _LIGHT:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _LightLoader(spec.loader)
            return spec
        package, _, submodule = name.rpartition(".")
        parent = sys.modules.get(package)
        if type(parent) is not _LightModule or submodule in _LIGHT[package].inside:
            return None
        # the package comes first, and imports most of its submodules by itself
        read_in_full(parent)
        known = sys.modules.get(name)
        return None if known is None else ModuleSpec(name, _Known(known), is_package=True)


class _LightLoader(Loader):
    """Makes a module, and reads nothing; `usual` is the loader that reads it."""

    def __init__(self, usual: Loader) -> None:
        self.usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _LightModule
        vars(module).update(_LIGHT[module.__name__].values)


class _Known(Loader):
    """Gives a module that has been read meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # which the import has replaced
