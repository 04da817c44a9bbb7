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
from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalStepsStrategy,
    PipelineStrategy,
)
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


def resolve(where: str) -> tuple[Any, str]:
    """The object that holds the name, and the name."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


def is_there(owner: Any, name: str) -> bool:
    """An attribute of the module or class, or one that the class gives its instances."""
    if hasattr(owner, name):
        return True
    sources = (
        inspect.getsource(each)
        for each in getattr(owner, "__mro__", ())
        if each.__module__.startswith("lightning")
    )
    return any(re.search(rf"self\.{name}\b[^=\n]*=[^=]", source) for source in sources)


def parameters_of(owner: Any, name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(owner, name)).parameters)


@pytest.mark.parametrize("known", PRIVATE_NAMES, ids=lambda known: known.where)
def test_lightning_has_it_as_it_was(known: PrivateName) -> None:
    owner, name = resolve(known.where)
    assert is_there(owner, name), f"{known.where} is gone from lightning {lightning.__version__}"
    if known.parameters is not None:
        assert parameters_of(owner, name) == known.parameters
        assert known.why


def names_of_lightning() -> set[str]:
    """All private names that Lightning's own code defines, on whatever."""
    found = set[str]()
    root = Path(lightning.__file__).parent
    for path in [*(root / "pytorch").rglob("*.py"), *(root / "fabric").rglob("*.py")]:
        found |= defined_in(ast.parse(path.read_text()))
    return {name for name in found if IS_PRIVATE.fullmatch(name)}


def defined_in(tree: ast.AST) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_self(node.value) else set()
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def used_in(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names that `tree` imports from Lightning, reads of objects, or asks for by text.

    Of itself a class may have names that Lightning has too, if they are its `own`.
    """
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found |= set() if is_self(node.value) and node.attr in own else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if IS_PRIVATE.fullmatch(name)}


def unlisted(tree: ast.AST, of_lightning: set[str], of_package: set[str]) -> set[str]:
    """Names of Lightning's that are used and not in the table.

    Read of other objects, names that the package defines itself are its own.
    """
    own = defined_in(tree)
    used = used_in(tree, own) & of_lightning
    return used - LISTED - set(OF_OTHERS) - (of_package - LISTED)


@pytest.fixture(scope="module")
def package() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_all_that_is_used_is_in_the_table(package: dict[Path, ast.AST]) -> None:
    of_lightning, of_package = names_of_lightning(), set[str]()
    for tree in package.values():
        of_package |= defined_in(tree)
    found = {
        path.name: names
        for path, tree in package.items()
        if path.parent.name in ("plugins", "cli")
        and (names := unlisted(tree, of_lightning, of_package))
    }
    assert found == {}


def test_what_is_in_the_table_is_used(package: dict[Path, ast.AST]) -> None:
    used = set[str]()
    for tree in package.values():
        used |= used_in(tree, set()) | defined_in(tree)
    names = {re.split(r"[:.]", each.where)[-1] for each in PRIVATE_NAMES}
    assert names - used - {"__call__"} == set()


@pytest.mark.parametrize(
    "strategy",
    [
        AutoParallelStrategy(),
        PipelineStrategy(),
        CompressedDDPStrategy(),
        LocalStepsStrategy(),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_strategies_hide_no_name_of_lightning(strategy: Any) -> None:
    """What a strategy has of its own is not what Lightning's base class keeps for itself."""
    bases = [base for base in type(strategy).__mro__ if base.__module__.startswith("lightning.")]
    of_bases = set[str]()
    for base in bases:
        of_bases |= defined_in(ast.parse(inspect.getsource(base).lstrip()))
    ours = [base for base in type(strategy).__mro__ if base.__module__.startswith("lightning_topt")]
    own = set[str]()
    for base in ours:
        own |= defined_in(ast.parse(inspect.getsource(base).lstrip()))
    hidden = {name for name in own & of_bases if IS_PRIVATE.fullmatch(name)}
    assert hidden <= LISTED
