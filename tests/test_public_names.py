"""The public names of `lightning_topt` are there twice: for users, and for type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_topt


def test_type_checkers_see_what_is_imported_at_first_use() -> None:
    tree = ast.parse(Path(lightning_topt.__file__).read_text())
    (typed,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in typed
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == lightning_topt._HOMES
