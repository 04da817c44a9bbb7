"""What all reports share: colours, and one head of self-contained HTML pages.

A page loads nothing from elsewhere. Its head (`report_head.html`) has the colours of light and dark
pages and the common styles. The rest of the page has its own styles, body and script, and reads its
data as JSON from an element ``data``:

    save_page("frontier.html", "frontier_report.html", title="Plans", data={"points": [...]})
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

# Okabe and Ito's colours, told apart by colour-blind readers, those that are dark enough for a
# white page first
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, RED, STAR = "#1f2430", "#5b6472", "#a3262a", "#F0C419"


def save_page(
    path: str | Path, body: str, *, title: str, data: Mapping[str, object], schedule: str = ""
) -> None:
    """Write the page of the file `body`, with `title` and `data`; `schedule` is HTML."""
    # no "<" in the data: neither "</script>" nor "<!--" can end the element early
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {"title": html.escape(title), "data": embedded, "schedule": schedule}
    folder = resources.files("lightning_topt.plan")
    parts = [(folder / name).read_text(encoding="utf-8") for name in ("report_head.html", body)]
    names = r"\{\{ (title|data|schedule) \}\}"
    page = re.sub(names, lambda match: filled[match[1]], "".join(parts))
    Path(path).write_text(page, encoding="utf-8")
