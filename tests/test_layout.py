"""The order of the stages, read from the imports; and the size of modules and functions."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.preloaded import preloaded_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_topt"
# each imports itself and what is before
STAGES = ["graph", "costs", "techniques", "frontier", "plan", "execution", "plugins", "cli"]
BESIDE = ["communication", "optim", "data", "schedules", "weight_prediction"]  # import no stage
BELOW = "basics"  # imports nothing of the package
ALLOWED = {stage: STAGES[: index + 1] + BESIDE for index, stage in enumerate(STAGES)}
ALLOWED |= {beside: [beside] for beside in BESIDE}
# results are gathered with its collectives, errors are its PeerLostError
ALLOWED["optim"] = ["optim", "communication"]
ALLOWED["weight_prediction"] = ["weight_prediction", "schedules"]  # staleness comes from schedules
ALLOWED["frontier"] = ["frontier", "costs"]  # the search knows nothing of models
ALLOWED = {folder: [*allowed, BELOW] for folder, allowed in ALLOWED.items()} | {BELOW: [BELOW]}
ONLY_IN = {
    "lightning": {"plugins", "cli"},
    "pytorch_lightning": set(),
    "hydra": {"cli"},
    "omegaconf": {"cli"},
}
ONLY_IN |= {"torch": set(ALLOWED) - {BELOW}}  # light processes use what is there
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 900, 80
# Lowered with every folder that is rewritten: to a tenth of all modules, and to none.
MOST_SINGLE_IMPORTERS, MOST_CLASS_NAMES_TWICE = 20, 0
# Names, numbers, operators and texts of the package. Who raises it says what that buys: the last
# 8,000 are blocks that are compiled: in a plan, where a trial says that it pays, or by the user;
# what trials found is kept, and priced by searches. 300 are packed sequences in pipelines.
MOST_TOKENS = 479_000


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in froms), "relative import"
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def violations(path: Path, tree: ast.AST) -> list[str]:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:  # the package's own __init__ may import everything
        return []
    stage, found = parts[0], []
    for name in imported(tree) - {"lightning_topt.__version__"}:
        top, *rest = name.split(".")
        if top == "lightning_topt" and rest[0] not in ALLOWED[stage]:
            found.append(
                f"{path.relative_to(ROOT)} imports {name}; {stage} may import {ALLOWED[stage]}"
            )
        if stage not in ONLY_IN.get(top, ALLOWED):
            found.append(f"{path.relative_to(ROOT)} imports {name}, which is for {ONLY_IN[top]}")
    return found


def test_imports_run_one_way():
    assert [found for path in FILES for found in violations(path, parsed(path))] == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("techniques/a.py", "from lightning_topt.plan.parallel_plan import ParallelPlan"),
        ("techniques/a.py", "import lightning.pytorch as pl"),
        ("plugins/a.py", "import hydra"),
        ("frontier/a.py", "from lightning_topt.graph.op_graph import OpGraph"),
        ("plugins/a.py", "def f():\n    from lightning_topt.cli import main"),
        ("data/a.py", "from lightning_topt.costs.cluster import Cluster"),
        ("basics/a.py", "from lightning_topt.data.light_process import BOOT"),
        ("basics/a.py", "import torch"),
    ],
)
def test_the_check_sees_violations(path, code):
    assert violations(PACKAGE / path, ast.parse(code))


def test_sizes():
    """A module tells one thing whole and a reader can hold it; a function is a step that has a
    name.
    """
    long = [str(p.relative_to(ROOT)) for p in FILES if p.read_text().count("\n") > MAX_MODULE_LINES]
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                if node.end_lineno - first + 1 > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert long == []


@functools.cache
def imports_of_modules() -> dict[str, set[str]]:
    """The modules of the package, and which of them each imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    edges = {}
    for name, path in files.items():
        found = imported(parsed(path))
        named = (*found, *(f.rpartition(".")[0] for f in found))
        edges[name] = {n for n in named if n in files and n != name}
    return edges


def test_the_package_stays_within_its_weight():
    counted = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
    tokens = 0
    for path in FILES:
        with path.open("rb") as file:
            tokens += sum(token.type in counted for token in tokenize.tokenize(file.readline))
    assert tokens <= MOST_TOKENS, f"{tokens} tokens: take something away"


def test_a_split_has_a_second_reader():
    """What one module uses lives in it; some are subjects of their own, such as a wire format."""
    edges = imports_of_modules()
    importers = {name: [n for n, targets in edges.items() if name in targets] for name in edges}
    alone = [
        name
        for name, found in importers.items()
        if len(found) == 1 and found[0].rpartition(".")[0] == name.rpartition(".")[0]
    ]
    assert len(alone) <= MOST_SINGLE_IMPORTERS, alone


def test_class_names_are_there_once():
    names = Counter(
        node.name for path in FILES for node in parsed(path).body if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= MOST_CLASS_NAMES_TWICE, twice


def test_no_import_cycles():
    """Imports inside a stage have a direction too."""
    edges = dict(imports_of_modules())
    while leaves := [name for name, targets in edges.items() if not targets & set(edges)]:
        for name in leaves:
            del edges[name]
    assert not edges, f"import cycle among {sorted(edges)}"


# A stage is a stage of a pipeline (or of the exchange of one bucket); ZeRO has levels, storage is a
# placement.
GONE = re.compile(r"\bzero_stage\b|\bis_sharded\b|ZeRO stage|FAMILIES|\bfamily=")


def test_words_that_are_gone():
    of_addresses = ("server.py",)  # their families
    assert [
        path for path in FILES if GONE.search(path.read_text()) and path.name not in of_addresses
    ] == []


@pytest.mark.parametrize(
    ("name", "most"), [("CompressedDDPStrategy", 26), ("AutoParallelStrategy", 100)]
)
def test_a_strategy_imports_what_every_fit_needs(name, most):
    """Not what plans and searches, nor the runners of stages."""
    code = (
        f"import sys; from lightning_topt import {name};"
        "print(sum(name.startswith('lightning_topt.') for name in sys.modules))"
    )
    job = subprocess.run(
        [preloaded_python(), "-c", code], capture_output=True, text=True, check=True
    )
    assert int(job.stdout) <= most
