"""Public names that are imported at first use are there twice: for users, and type checkers."""

from __future__ import annotations

import ast
import importlib
import pickle
from pathlib import Path

import pytest

PACKAGES = ("lightning_topt", "lightning_topt.communication")


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_what_is_imported_at_first_use(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (typed,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in typed
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {key: f"{name}.{home}" for key, home in package._HOMES.items()}
    assert set(seen) <= set(package.__all__) and set(seen) <= set(dir(package))
    for key in seen:
        value = getattr(package, key)
        assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = package.no_such_name
