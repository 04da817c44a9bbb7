"""How readable the package is, in figures that can be counted.

    python -m benchmarks.house                   # this tree
    python -m benchmarks.house --commit 17444a6  # beside the tree of an earlier commit

Everything is read from the sources; only the modules behind a public class are counted by importing
it in a new process.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_COLUMNS = 100
PUBLIC = ("CompressedDDPStrategy", "AutoParallelStrategy")  # whose imports are counted
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` as in an import."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        """The package that it is in."""
        return self.name.rpartition(".")[0]

    @cached_property
    def lines(self) -> list[str]:
        """Its lines."""
        return self.text.splitlines()

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        """All nodes of these kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def imports(self) -> set[str]:
        """Names of modules, or of what is in them, that it imports."""
        found = {alias.name for node in self.nodes(ast.Import) for alias in node.names}  # type: ignore[attr-defined]
        for node in self.nodes(ast.ImportFrom):
            assert isinstance(node, ast.ImportFrom)
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        return found


def read_package(root: Path) -> list[Module]:
    """Return all modules of the package below `root`."""
    files = sorted((root / "lightning_topt").rglob("*.py"))
    return [
        Module(".".join(file.relative_to(root).with_suffix("").parts), file.read_text())
        for file in files
    ]


def single_importers(modules: list[Module]) -> list[tuple[str, str]]:
    """Return (module, importer) of modules that one other imports, and that is in their folder."""
    names = {module.name for module in modules}
    importers: dict[str, list[Module]] = {name: [] for name in names}
    for module in modules:
        for name in module.imports() & names - {module.name}:
            importers[name].append(module)
    return [
        (name, found[0].name)
        for name, found in importers.items()
        if len(found) == 1
        and found[0].folder == name.rpartition(".")[0]
        and not name.endswith("__init__")
    ]


def body_lines(function: Function) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def private_functions(modules: list[Module]) -> tuple[int, int, int]:
    """Return how many private functions there are, of these are named once, and of these are short.

    Methods count; short are bodies of at most six lines.
    """
    names = Counter[str]()
    functions: list[tuple[str, Function]] = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                names[f"{module.name} {node.id}"] += 1
            elif isinstance(node, ast.Attribute):
                names[f"{module.name} {node.attr}"] += 1
            elif (
                isinstance(node, Function)
                and node.name.startswith("_")
                and not node.name.startswith("__")
            ):
                functions.append((f"{module.name} {node.name}", node))
    once = [function for name, function in functions if names[name] == 1]
    return len(functions), len(once), sum(body_lines(function) <= 6 for function in once)


def comment_lines(module: Module) -> int:
    """Return the number of comments."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def class_names_twice(modules: list[Module]) -> list[str]:
    """Return names that more than one class at the top of a module has."""
    names = Counter(
        node.name
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def modules_behind(root: Path, name: str) -> int:
    """Return how many modules of ours an import of the public class `name` loads."""
    ours = "sum(m.startswith('lightning_topt.') for m in sys.modules)"
    code = f"import sys; from lightning_topt import {name}; print({ours})"
    job = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    return int(job.stdout)


def figures(root: Path) -> dict[str, str]:
    """Return what is counted, by its name."""
    modules = read_package(root)
    lines = [line for module in modules for line in module.lines]
    functions = [
        node for module in modules for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    ]
    bodies = sorted(body_lines(function) for function in functions)  # type: ignore[arg-type]
    singles = single_importers(modules)
    private, once, short = private_functions(modules)
    imports = [node for module in modules for node in module.nodes(ast.Import, ast.ImportFrom)]
    import_lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in imports)  # type: ignore[attr-defined]
    anys = sum(node.id == "Any" for module in modules for node in module.nodes(ast.Name))  # type: ignore[attr-defined]
    percent: Callable[[float, float], str] = lambda part, whole: f"{100 * part / whole:.1f} %"  # noqa: E731
    return {
        "files": f"{len(modules)}",
        "lines": f"{len(lines):,}",
        "lines per file": f"{len(lines) / len(modules):.0f}",
        "modules with one importer, in the same folder": (
            f"{len(singles)} ({percent(len(singles), len(modules))})"
        ),
        "lines per function": f"{len(lines) / len(functions):.1f}",
        "lines of a body: median, 90th percentile, most": (
            f"{statistics.median(bodies):.0f}, {bodies[int(0.9 * len(bodies))]}, {bodies[-1]}"
        ),
        "private functions that are named once": (
            f"{once} of {private} ({percent(once, private)}), {short} of up to 6 lines"
        ),
        "comments": percent(sum(map(comment_lines, modules)), len(lines)),
        "`Any` per 100 lines": f"{100 * anys / len(lines):.1f}",
        f"lines over {MAX_COLUMNS} columns": f"{sum(len(line) > MAX_COLUMNS for line in lines):,}",
        "lines of imports": percent(import_lines, len(lines)),
        **{f"modules behind `{name}`": f"{modules_behind(root, name)}" for name in PUBLIC},
        "class names that are there twice": f"{len(class_names_twice(modules))}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="an earlier one, for a column of its own")
    parser.add_argument(
        "--list", action="store_true", help="list modules with one importer, and double names"
    )
    options = parser.parse_args()
    columns = {"now": figures(ROOT)}
    if options.commit:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", options.commit], cwd=ROOT, capture_output=True, check=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(folder, filter="data")
            columns = {options.commit: figures(Path(folder)), **columns}
    print("| | " + " | ".join(columns) + " |\n" + "|---" * (1 + len(columns)) + "|")
    for name in columns["now"]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns.values()) + " |")
    if options.list:
        modules = read_package(ROOT)
        print(*(f"{name} <- {importer}" for name, importer in single_importers(modules)), sep="\n")
        print(*class_names_twice(modules), sep="\n")


if __name__ == "__main__":
    main()
