"""The pages of the documentation agree with one another, with the code and with what was measured.

`make docs` builds the site, as strictly; this needs no site generator and takes a second.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
LOG = DOCS / "devlog.md"  # of what was: pages that it names may have gone
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page != LOG)]
# figures and lab notes, written or moved as they are
NOTES = {DOCS / "gpu.md", *(DOCS / "results").glob("*.md")}
GUIDES = [page for page in PAGES if page not in NOTES]
MOST_WORDS = 22  # of a sentence
HARDWARE = {"Xeon": "Intel(R) Xeon(R)", "EPYC": "AMD EPYC", "H100": "H100"}


def prose(page: Path) -> str:
    """Return a page without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        pass

    def names(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [name for value in entry.values() for name in names(value)]
        return (
            [name for value in entry for name in names(value)]
            if isinstance(entry, list)
            else [str(entry)]
        )

    listed = names(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    found = {str(page.relative_to(DOCS)) for page in PAGES[1:]}
    assert sorted(listed) == sorted(found)


def test_paths_of_pages_in_code_exist() -> None:
    files = [
        path
        for folder in ("lightning_topt", "conf", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".md")
    ]
    for path in files:
        for name in re.findall(r"\bdocs/[\w/]+\.md", path.read_text()):
            assert (ROOT / name).exists(), f"{path}: {name}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    lines = [
        re.sub(r"^\s*([-*]|\d+\.)\s", "\n", line)
        for line in prose(page).splitlines()
        if not re.match(r"\s*(\||#|!\[|:::|options:|members:)", line)
    ]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    for sentence in re.split(r"[.;:!?][\s)*\"]|\n\s*\n", text):
        words = re.findall(r"[\w`][^\s]*", re.sub(r"`[^`]*`", "code", sentence))
        assert len(words) <= MOST_WORDS, f"{len(words)} words: {' '.join(sentence.split())}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_example_comes_within_a_screen(page: Path) -> None:
    before = page.read_text().split("```", 1)
    assert len(before) == 2, "a page has an example"
    assert len(before[0].splitlines()) <= 25


def test_mappings_and_lists_are_quoted_for_the_shell() -> None:
    for page in PAGES:
        for code in re.findall(r"```(?:bash|shell)\n(.*?)```", page.read_text(), re.DOTALL):
            assert not re.search(r"=[\[{]", code), f"{page}: {code}"


def test_the_readme_fits_and_says_what_was_tried() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    first_screen = "\n".join(text.splitlines()[:40])
    assert all(word in first_screen for word in ("gloo", "docs/gpu.md", "make demo", "!["))


def test_make_builds_the_site_beside_the_folder_of_its_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^\.PHONY:.*\bdocs\b", makefile, re.MULTILINE)
    assert re.search(r"^docs:.*\n.*mkdocs build --strict", makefile, re.MULTILINE)


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!term)", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 40


def claims() -> list[tuple[str, str, list[str]]]:
    """Return figures, hardware and the text of the measurements of every row that has some."""
    rows = []
    for page, figure in ((DOCS / "results" / "index.md", 1), (ROOT / "README.md", 2)):
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            linked = re.findall(r"benchmarks/results/([\w.]+\.md)", cells[-1])
            if line.startswith("|") and linked:
                rows.append((cells[figure], cells[figure + 1], linked))
    return rows


def test_figures_are_those_that_were_measured() -> None:
    rows = claims()
    assert len(rows) > 40
    for figures, hardware, linked in rows:
        text = "\n".join((RESULTS / name).read_text() for name in linked)
        for number in re.findall(r"(?<![\w.])\d[\d.]*(?:e[-+]\d+)?", figures):
            assert re.search(rf"(?<![\d.]){re.escape(number.rstrip('.'))}(?![\d])", text), (
                f"{number} of {figures!r} is not in {linked}"
            )
        for word, name in HARDWARE.items():
            assert word not in hardware or name in text, f"{hardware}: {linked}"
