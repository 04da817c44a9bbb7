"""What reports share: one kind of table, titles, and names of blocks as ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.table import Table


def table(*columns: str, left: Sequence[str] = (), caption: str | None = None) -> Table:
    """Return a table whose columns are numbers, to the right, but for the first and `left`."""
    made = Table(caption=caption, caption_justify="left", padding=(0, 0, 0, 1), pad_edge=False)
    for place, name in enumerate(columns):
        if place == 0 or name in left:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="right", no_wrap=True)
    return made


def report_title(model: str, cluster: str, devices: Iterable[int]) -> str:
    """Return what a report is about: ``"GPT on a100_8x8, 32 and 64 devices"``."""
    *others, last = map(str, sorted(set(devices)))
    counts = f"{', '.join(others)} and {last}" if others else last
    where = f" on {cluster}" if cluster else ""
    return f"{model or 'A model'}{where}, {counts} device{'' if counts == '1' else 's'}"


def block_ranges(names: Sequence[str], *, most: int = 4) -> str:
    """Return names of blocks with numbers as ranges: ``"embedding, layers.0-79"``.

    Of more than `most` kinds of names the rest is counted. The block ``""`` is what the others
    leave.
    """
    # the same name but for its last number; names without one stand alone
    alike: dict[tuple[str, str | None], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*)(\D*)", name)
        if match is None:
            alike.setdefault((name or "(everything else)", None), [])
        else:
            alike.setdefault((match[1], match[3]), []).append(int(match[2]))
    parts = [
        prefix if suffix is None else f"{prefix}{ranges(sorted(numbers))}{suffix}"
        for (prefix, suffix), numbers in alike.items()
    ]
    rest = sum(max(len(numbers), 1) for numbers in [*alike.values()][most:])
    return ", ".join(parts[:most]) + (f" and {rest} more" if rest else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in order as text, ``"0-62,64"``; of many ranges the first ones."""
    # runs of consecutive numbers
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ",".join(parts) if len(parts) <= 4 else f"{','.join(parts[:3])},... ({len(numbers)})"
