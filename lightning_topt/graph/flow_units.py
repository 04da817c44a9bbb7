"""Units of a step: which modules they can be."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from lightning_topt.graph.silence import runs_metrics


def check_units(module: nn.Module, units: Collection[str]) -> None:
    """Raise ValueError for `units` that `module` does not have, or that lie inside of one
    another.
    """
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    for unit in units:
        if not unit or unit not in paths:
            raise ValueError(
                f"{type(module).__name__} has no module {unit!r} that a stage could run; name its "
                "submodules"
            )
        for outer in parents(unit):
            if outer in units:
                raise ValueError(
                    f"block {unit!r} lies inside of block {outer!r}; a stage runs one or the other"
                )


def parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules around the one at `path`, innermost first, without the
    root.
    """
    while path := path.rpartition(".")[0]:
        yield path


def unit_modules(module: nn.Module, units: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return, with their paths, all modules whose calls may be calls of units: those that contain
    no named block.
    """
    opened = {""}
    for unit in units:
        opened.update(parents(unit))
    found: list[tuple[str, nn.Module]] = []
    named = {id(module.get_submodule(unit)): unit for unit in units}
    for path, submodule in module.named_modules():
        if path not in opened and not runs_metrics(submodule):
            found.append((named.get(id(submodule), path), submodule))
    return found
