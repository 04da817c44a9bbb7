"""The order of the stages, read from the imports; and the size of files and functions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_topt"
# each imports itself and what is before
STAGES = ["graph", "costs", "techniques", "frontier", "plan", "execution", "plugins", "cli"]
BESIDE = ["communication", "optim", "data", "schedules", "prediction"]  # import no stage
BELOW = "basics"  # imports nothing of the package
ALLOWED = {stage: STAGES[: index + 1] + BESIDE for index, stage in enumerate(STAGES)}
ALLOWED |= {beside: [beside] for beside in BESIDE}
ALLOWED["optim"] = ["optim", "communication"]  # results are gathered with its collectives, errors are its PeerLostError
ALLOWED["prediction"] = ["prediction", "schedules"]  # horizons come from schedules
ALLOWED["frontier"] = ["frontier", "costs"]  # the search knows nothing of models
ALLOWED = {folder: [*allowed, BELOW] for folder, allowed in ALLOWED.items()} | {BELOW: [BELOW]}
ONLY_IN = {"lightning": {"plugins", "cli"}, "pytorch_lightning": set(), "hydra": {"cli"}, "omegaconf": {"cli"}}
ONLY_IN |= {"torch": set(ALLOWED) - {BELOW}}  # light processes use what is there
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
DOCUMENTED = [
    *FILES,
    *(path for name in ("topt_console", "hydra_plugins") for path in sorted((ROOT / name).rglob("*.py"))),
]
HEADLESS = {"What", "Which", "Who", "Whose", "Of", "That", "How", "Where", "When"}  # clauses without a main verb
NOUN_PHRASES = {"The", "A", "An", "Whether", "Bytes", "Seconds", "Number", "Names", "Indices", "One", "Several"}


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in froms), "relative import"
    return names | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def violations(path: Path, tree: ast.AST) -> list[str]:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:  # the package's own __init__ may import everything
        return []
    stage, found = parts[0], []
    for name in imported(tree) - {"lightning_topt.__version__"}:
        top, *rest = name.split(".")
        if top == "lightning_topt" and rest[0] not in ALLOWED[stage]:
            found.append(f"{path.relative_to(ROOT)} imports {name}; {stage} may import {ALLOWED[stage]}")
        if stage not in ONLY_IN.get(top, ALLOWED):
            found.append(f"{path.relative_to(ROOT)} imports {name}, which is for {ONLY_IN[top]}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert violations(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("techniques/a.py", "from lightning_topt.plan.parallel_plan import ParallelPlan"),
        ("techniques/a.py", "from lightning_topt.execution.engine import Engine"),
        ("techniques/a.py", "import lightning.pytorch as pl"),
        ("graph/a.py", "from lightning_topt.plan.parallel_plan import ParallelPlan"),
        ("costs/a.py", "import lightning.pytorch as pl"),
        ("plugins/a.py", "import hydra"),
        ("frontier/a.py", "from lightning_topt.graph.op_graph import OpGraph"),
        ("plugins/a.py", "def f():\n    from lightning_topt.cli import main"),
        ("graph/a.py", "from lightning_topt import AutoParallelStrategy"),
        ("data/a.py", "from lightning_topt.costs.cluster import Cluster"),
        ("basics/a.py", "from lightning_topt.data.light_process import BOOT"),
        ("basics/a.py", "import torch"),
    ],
)
def test_the_check_sees_violations(path, code):
    assert violations(PACKAGE / path, ast.parse(code))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {}
    for function in functions:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        size = function.end_lineno - (body[0].lineno if body else function.lineno) + 1
        if size > MAX_FUNCTION_LINES:
            long[function.name] = size
    assert not long


def test_no_import_cycles():
    """Imports inside a stage have a direction too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    edges = {}
    for name, path in files.items():
        found = imported(ast.parse(path.read_text()))
        edges[name] = {n for n in (*found, *(f.rpartition(".")[0] for f in found)) if n in files and n != name}
    while leaves := [name for name, targets in edges.items() if not targets & set(edges)]:
        for name in leaves:
            del edges[name]
    assert not edges, f"import cycle among {sorted(edges)}"


def test_every_file_name_is_there_once():
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


# A stage is a stage of a pipeline (or of the exchange of one bucket); ZeRO has levels, storage is a placement.
GONE = re.compile(r"\bzero_stage\b|\bis_sharded\b|ZeRO stage|FAMILIES|\bfamily=")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_words_that_are_gone(path):
    found = GONE.findall(path.read_text())
    assert found == [] or path.name in ("service.py", "peer_channel.py")  # families of addresses


def headless_docstrings(tree: ast.AST) -> list[str]:
    """Return what opens without a verb: any definition by a bare clause, a public function also by a noun."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name, text = getattr(node, "name", "the module"), ast.get_docstring(node) or ""
        is_property = any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", []))
        is_public_function = not isinstance(node, ast.Module | ast.ClassDef) and name[0] != "_" and not is_property
        opening = re.match(r"\w*", text)[0]
        if opening in HEADLESS or (is_public_function and opening in NOUN_PHRASES):
            found.append(f"{name}: {text.splitlines()[0]}")
    return found


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_a_sentence(path):
    assert headless_docstrings(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('"""What is here."""', 1),
        ('class A:\n    """Where it lies."""', 1),
        ('def _f():\n    """Of a worker."""', 1),
        ('def f():\n    """The bytes of a worker."""', 1),
        ('def f():\n    """Return the bytes of a worker."""', 0),
        ('def _f():\n    """The bytes of a worker."""', 0),
        ('class A:\n    """A worker."""\n    @property\n    def f(self):\n        """The bytes."""', 0),
    ],
)
def test_the_check_sees_headless_docstrings(code, count):
    assert len(headless_docstrings(ast.parse(code))) == count
