"""A simulated step for people: a drawing that is well formed and has every pass."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from lightning_topt.plan.frontier_report import save_html
from lightning_topt.plan.plan_report import schedule_svg
from lightning_topt.schedules.schedules import continuous_schedule, make_schedule
from lightning_topt.schedules.timing import Simulation, StageCosts, simulate
from tests.plan.test_frontier_report import frontier


def simulated(
    name: str, *, num_ranks: int = 4, num_microbatches: int = 8, **more: object
) -> Simulation:
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    count = schedule.num_stages
    row = [1.0] * count
    sizes: dict[str, object] = {
        "static_bytes": [4.0 * 2**20] * count,
        "activation_bytes": [2.0**20] * count,
    }
    costs = StageCosts(row, [2.0] * count, row, row, **(sizes | more))  # type: ignore[arg-type]
    return simulate(schedule, costs)


def test_the_drawing_is_well_formed_and_has_every_pass() -> None:
    for name in ("gpipe", "zero_bubble"):
        step = simulated(name)
        root = ElementTree.fromstring(f"<div>{schedule_svg(step)}</div>")
        passes = [
            path.get("d", "") for path in root.iter("path") if path.get("fill-opacity") is None
        ]
        assert sum(path.count("M") for path in passes) == len(step.spans)
        numbers = [
            text.text for text in root.iter("text") if (text.get("style") or "") == "fill: #fff"
        ]
        assert set(numbers) <= {str(i) for i in range(8)} and numbers
        assert "gradients of parameters" in "".join(root.itertext()) or name == "gpipe"
    schedule = continuous_schedule(num_ranks=2, num_minibatches=6)
    step = simulate(
        schedule, StageCosts([1.0] * 2, [2.0] * 2, update=[0.5] * 2, version_bytes=[2.0**20] * 2)
    )
    drawn = schedule_svg(step)
    assert (
        "Schedule continuous: 2 stages on 2 ranks, 6 minibatches" in drawn
        and "update</span>" in drawn
    )
    assert drawn.count("v20H") == len(step.spans) == 2 * 6 * 3 and step.peak_bytes == (2.0**20, 0.0)
    inside = re.findall(r"M([\d.]+),[\d.]+h([\d.]+)v20", schedule_svg(simulated("zbv")))
    assert inside and all(
        float(x) >= 70 and float(x) + float(width) <= 640.01 for x, width in inside
    )


def test_large_schedules_make_no_large_page() -> None:
    assert len(schedule_svg(simulated("1f1b", num_ranks=16, num_microbatches=128))) < 400_000


def test_the_page_shows_the_schedule_of_the_chosen_plan(tmp_path: Path) -> None:
    points = frontier(3)
    save_html(tmp_path / "with.html", points, points[0], step=simulated("1f1b"))
    save_html(tmp_path / "without.html", points, points[0])
    with_step, without = ((tmp_path / f"{name}.html").read_text() for name in ("with", "without"))
    assert (
        'aria-label="Schedule"' in with_step and "Schedule 1f1b: 4 stages on 4 ranks" in with_step
    )
    assert 'aria-label="Schedule"' not in without and "{{ " not in with_step + without
