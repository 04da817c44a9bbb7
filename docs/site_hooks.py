"""Hooks of the documentation site (`make docs`).

The measurements in benchmarks/results become pages below results/measured. Pages link to them by
their place in the repository, so that the links are right there too; here they are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = "results/measured"
LOG = "devlog.md"  # of what was: pages that it names may have gone
LINK = re.compile(r"\]\((?:\.\./)+(docs|benchmarks/results)/([^)]+)\)")


def on_config(config: Any) -> Any:
    """Add a page for each measurement, and what did not help where there is such a page."""
    pages = [f"{MEASURED}/{path.name}" for path in sorted(RESULTS.glob("*.md"))]
    section = {name: entry for part in config.nav for name, entry in part.items()}
    section["Results"].append({"All measurements": pages})
    if (ROOT / "docs" / LOG).exists():
        section["Help"].append({"What did not help": LOG})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add measurements and their pictures to the files of the site."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".png"):
            files.append(File.generated(config, f"{MEASURED}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links between docs/ and benchmarks/results/ to the places of the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        target = link[2] if link[1] == "docs" else f"{MEASURED}/{link[2]}"
        return f"]({posixpath.relpath(target, folder or '.')})"

    rewritten = LINK.sub(rewrite, markdown)
    if page.file.src_uri != LOG:
        return rewritten
    return re.sub(r"\[([^\]]+)\]\((?!http|results/)[^)]*\)", r"\1", rewritten)
