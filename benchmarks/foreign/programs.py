"""The programs of tests/foreign under `ddp` and `topt`: plan, time and result of each.

    python -m benchmarks.foreign.programs

Writes results/foreign_programs.md. Each group of programs runs on one pair of CPU ranks. The first
program of all pays for measuring the machine, unless that was kept from before.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter

from benchmarks.common import RESULTS, machine
from tests.foreign.run import Outcome, compare, topt_strategy
from tests.foreign.test_shelf import SHELVES, names_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")


HEAD = """# Programs that nobody wrote for this package

`python -m benchmarks.foreign.programs`: every program of `tests/foreign` runs three batches under
Lightning's `ddp` and under `topt` with its defaults, on 2 gloo ranks; losses and the whole state
must be equal (to the last bit where the plan is plain DDP). The first program pays for measuring
the machine.

"""


def how(outcome: Outcome) -> str:
    """Captured and searched, run as ddp, or refused."""
    if outcome.topt.error:
        return "refused"
    return "captured" if outcome.topt.planned_by == "search" else "fallback"


def row(outcome: Outcome) -> str:
    """A line of the table, with the seconds of planning and of both fits."""
    reason = (
        ""
        if how(outcome) == "captured"
        else re.sub(r"\s+", " ", outcome.topt.planned_by or outcome.topt.error)
    )
    result = "differs" if outcome.differences else "equal"
    run = outcome.topt
    cells = (outcome.name, how(outcome), run.plan, result, f"{run.planning_seconds:.2f}")
    times = (f"{outcome.ddp.seconds:.2f}", f"{run.seconds:.2f}", reason.replace("|", "/")[:140])
    return f"| {' | '.join((*cells, *times))} |"


def main() -> None:
    """Run all shelves and write the table."""
    logging.disable(logging.WARNING)
    outcomes: list[Outcome] = []
    for shelf in SHELVES:
        (found,) = compare(names_of(shelf), [topt_strategy], timeout_seconds=500)
        outcomes += found[: len(found) // 2]  # rank 0's; the other rank's differ in times only
        assert [o.differences for o in found[len(found) // 2 :]] == [
            o.differences for o in outcomes[-len(found) // 2 :]
        ]
    counts = Counter(how(outcome) for outcome in outcomes)
    equal = sum(not outcome.differences for outcome in outcomes)
    planning = sorted(outcome.topt.planning_seconds for outcome in outcomes)
    refused = f"{counts['refused']} refused; {equal} equal"
    middle, longest = planning[len(planning) // 2], planning[-1]
    lines = [
        HEAD + machine(),
        f"- {os.getloadavg()[0]:.0f} processes were running on average: times are upper bounds",
        "",
        f"{len(outcomes)} programs: {counts['captured']} captured, {counts['fallback']} run as "
        f"ddp, {refused}. Planning: median {middle:.2f} s, longest {longest:.2f} s.",
        "",
        "| program | planned by | plan | result | planning (s) | fit under ddp (s) | under topt "
        "(s) | reason |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, outcomes),
    ]
    (RESULTS / "foreign_programs.md").write_text("\n".join(lines) + "\n")
    print(lines[3])


if __name__ == "__main__":
    main()
