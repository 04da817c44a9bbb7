"""The programs of tests/foreign under `ddp` and `topt`: plan, time and result of each.

    python -m benchmarks.foreign.programs

Writes results/foreign_programs.md. Each group of programs runs on one pair of CPU ranks. The first
program of all pays for measuring the machine, unless that was kept from before.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
from collections import Counter

from tests.foreign.test_shelf import SHELVES, names_of, searched

from benchmarks.common import RESULTS, machine
from tests.foreign.run import STEPS, Outcome, compare, topt_strategy

os.environ.setdefault("HF_HUB_OFFLINE", "1")


HEAD = f"""# Programs that nobody wrote for this package

`python -m benchmarks.foreign.programs`: every program of `tests/foreign` runs {STEPS} batches on 2
gloo ranks under Lightning's `ddp`, under `topt` with its defaults, and under the plan of least
memory, which takes over after the third. Losses and the whole state must be equal, to the last bit
where the plan is plain DDP. Two programs have no plan of least memory and run with the defaults
(`NOT_LEAST_MEMORY` in `tests/foreign/test_shelf.py` says why).

"""


def how(outcome: Outcome) -> str:
    """A plan that was searched, DDP all along, or refused."""
    if outcome.topt.error:
        return "refused"
    return "searched" if outcome.topt.planned_by == "search" else "ddp"


def row(default: Outcome, searched: Outcome) -> str:
    """A line of the table, with the seconds of planning and of all fits."""
    cells = [default.name]
    for outcome in (default, searched):
        reason = re.sub(r"\s+", " ", outcome.topt.planned_by or outcome.topt.error)
        reason = "" if how(outcome) == "searched" else f" ({reason[:140]})"
        cells += [
            outcome.topt.plan + reason.replace("|", "/"),
            "differs" if outcome.differences else "equal",
            f"{outcome.topt.seconds:.2f}",
        ]
    seconds = f"{searched.topt.planning_seconds:.2f}"
    return f"| {' | '.join([*cells, seconds, f'{default.ddp.seconds:.2f}'])} |"


def main() -> None:
    """Run all shelves and write the table."""
    logging.disable(logging.WARNING)
    pairs: list[tuple[Outcome, Outcome]] = []
    for shelf in SHELVES:
        of_both = compare(names_of(shelf), [topt_strategy, searched], timeout_seconds=900)
        for found in of_both:  # of rank 0, then of rank 1, whose times alone differ
            half = len(found) // 2
            assert [o.differences for o in found[:half]] == [o.differences for o in found[half:]]
        pairs += zip(*(found[: len(found) // 2] for found in of_both), strict=True)
    count = len(pairs)
    planned = Counter(how(pair[1]) for pair in pairs)
    equal = [sum(not pair[index].differences for pair in pairs) for index in (0, 1)]
    planning = [pair[1].topt.planning_seconds for pair in pairs if how(pair[1]) == "searched"]
    lines = [
        HEAD + machine(),
        f"- {os.getloadavg()[0]:.0f} processes were running on average: times are upper bounds",
        "",
        f"{count} programs. Defaults: {equal[0]} equal. Least memory: {planned['searched']} "
        f"planned by a search, {planned['ddp']} ran as ddp, {planned['refused']} refused; "
        f"{equal[1]} equal. Planning: median {statistics.median(planning):.2f} s, longest "
        f"{max(planning):.2f} s.",
        "",
        "| program | plan by default | result | fit (s) | plan of least memory | result | fit (s) "
        "| planning (s) | fit under ddp (s) |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(*pair) for pair in pairs),
    ]
    (RESULTS / "foreign_programs.md").write_text("\n".join(lines) + "\n")
    print(lines[3])


if __name__ == "__main__":
    main()
