"""What the package takes of Lightning that is not public is in one table, and is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import lightning
import pytest

import lightning_topt
from tests.plugins.lightning_private import PRIVATE_NAMES, PrivateName

PACKAGE = Path(lightning_topt.__file__).parent
LISTED = {name for each in PRIVATE_NAMES for name in re.split(r"[:.]", each.where)}
# Lightning has names like these, and here they are of somebody else's.
OF_OTHERS = {
    "_modules": "torch's Module",
    "_param_requires_grad_state": "read from user code: what toggling optimizers leaves",
    "_version": "torch's Tensor",
    "_computed": "torchmetrics",
    "_forward_cache": "torchmetrics",
}
IS_PRIVATE = re.compile(r"_[A-Za-z]\w*")
STRATEGIES = (
    "AutoParallelStrategy",
    "PipelineStrategy",
    "CompressedDDPStrategy",
    "LocalStepsStrategy",
)


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.where)
def test_lightning_has_it_as_it_was(entry: PrivateName) -> None:
    module, _, path = entry.where.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    # an attribute of the module or class, or one that the class gives its instances
    sources = [
        inspect.getsource(each)
        for each in getattr(owner, "__mro__", ())
        if each.__module__.startswith("lightning")
    ]
    is_there = hasattr(owner, name) or any(
        re.search(rf"self\.{name}\b[^=\n]*=[^=]", source) for source in sources
    )
    assert is_there, f"{entry.where} is gone from lightning {lightning.__version__}"
    if entry.parameters is not None:
        assert tuple(inspect.signature(getattr(owner, name)).parameters) == entry.parameters
        assert entry.why


def defined_in(tree: ast.AST) -> set[str]:
    """Functions, classes, and attributes that are set on ``self`` or ``cls``."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if is_self(node.value) else set()
    return {name for name in names if IS_PRIVATE.fullmatch(name)}


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def used_in(tree: ast.AST) -> set[str]:
    """Private names that `tree` imports from Lightning, reads of objects, or asks for by text.

    Of itself a class may have names that Lightning has too, if it defines them.
    """
    names, here = set[str](), defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names |= set() if is_self(node.value) and node.attr in here else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if IS_PRIVATE.fullmatch(name)}


def test_the_table_has_what_is_used_and_nothing_else() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    of_package = set[str]().union(*map(defined_in, trees.values()))
    root, of_lightning = Path(lightning.__file__).parent, set[str]()
    for path in [*(root / "pytorch").rglob("*.py"), *(root / "fabric").rglob("*.py")]:
        of_lightning |= defined_in(ast.parse(path.read_text()))
    # read of other objects, names that the package defines itself are those
    allowed = LISTED | set(OF_OTHERS) | (of_package - LISTED)
    unlisted = {
        path.name: names
        for path, tree in trees.items()
        if path.parent.name in ("plugins", "cli")
        and (names := (used_in(tree) & of_lightning) - allowed)
    }
    assert unlisted == {}
    used = of_package.union(*map(used_in, trees.values()))
    names = {re.split(r"[:.]", each.where)[-1] for each in PRIVATE_NAMES}
    assert {name for name in names if IS_PRIVATE.fullmatch(name)} <= used


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_hide_no_name_of_lightning(name: str) -> None:
    """An attribute of a strategy is none that Lightning's base class keeps for itself."""
    names: dict[str, set[str]] = {"lightning": set(), "lightning_topt": set()}
    for base in getattr(lightning_topt, name).__mro__:
        package = base.__module__.partition(".")[0]
        if package in names:
            names[package] |= defined_in(ast.parse(inspect.getsource(base).lstrip()))
    assert names["lightning"] & names["lightning_topt"] <= LISTED
