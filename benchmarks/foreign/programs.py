"""The programs of tests/foreign under `ddp` and `topt`, and what each strategy made of them.

    python -m benchmarks.foreign.programs

Writes results/foreign_programs.md. It is `ONCE=all pytest tests/foreign/test_once.py` as a table.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from benchmarks.common import RESULTS, machine
from tests.foreign.once_run import compare_counts
from tests.foreign.once_shelf import STEPS
from tests.foreign.programs import ALL
from tests.foreign.run import Outcome
from tests.foreign.test_once import (
    default,
    full,
    just_below_ddp,
    limited,
    of_programs,
    refusals,
    share_at_once,
    wrong,
    zero3,
    zero3_again,
)

COLUMNS: dict[str, tuple[Callable[..., object], Callable[[pytest.MonkeyPatch], None] | None]] = {
    "`topt`": (default, share_at_once),
    "`zero3`": (zero3, None),
    "`zero3+recompute`": (zero3_again, None),
    "a limit below DDP": (limited, just_below_ddp),
    "`topt_full`": (full, None),
}
HEAD = f"""# Programs that nobody wrote for this package

`python -m benchmarks.foreign.programs`: every program of `tests/foreign` runs {STEPS} batches on 2
gloo ranks, under Lightning's `ddp` and under each strategy. Equal: losses, the whole state and all
calls of user code are those of `ddp`, to the last bit where ranks compute as it does. Refused: one
sentence on all ranks, before a step runs. `test_once.py` lists those that are refused,
those that note the machinery of shards itself, and the one of which `ddp` is no oracle.

"""


def cell(name: str, ranks: Sequence[Outcome], known: dict[str, str]) -> str:
    """What a strategy made of a program."""
    if wrong(name, ranks, known):
        return "differs"
    return "refused" if name in known else f"equal ({ranks[0].topt.plan})"


def main() -> None:
    """Run all programs under all strategies and write the table."""
    logging.disable(logging.WARNING)
    cells: dict[str, list[str]] = {name: [] for name in ALL}
    counts = []
    for title, (strategy, prepare) in COLUMNS.items():
        known = {} if strategy is default else refusals(strategy)
        with pytest.MonkeyPatch.context() as patch:
            if prepare is not None:
                prepare(patch)
            outcomes = of_programs(compare_counts(ALL, strategy, among=ALL))
        for name, ranks in outcomes.items():
            cells[name].append(cell(name, ranks, known))
        counted = Counter(cells[name][-1].split(" (")[0] for name in ALL)
        counts.append(f"- {title}: " + ", ".join(f"{n} {how}" for how, n in counted.most_common()))
        print(counts[-1], flush=True)
    rows = [f"| {name} | {' | '.join(found)} |" for name, found in cells.items()]
    lines = [
        HEAD + machine(),
        "",
        f"{len(ALL)} programs:",
        "",
        *counts,
        "",
        f"| program | {' | '.join(COLUMNS)} |",
        "|---|" + "---|" * len(COLUMNS),
        *rows,
    ]
    (RESULTS / "foreign_programs.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
