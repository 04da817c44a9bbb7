"""The table and the page: what is marked and left out; the page is whole and harmless."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from rich.console import Console

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.choose import choose
from lightning_topt.plan.frontier_report import MemoryLimit, print_table, save_html
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan, StepEstimate
from lightning_topt.plan.plan_frontier import PlanPoint

GIB = 2.0**30
HOSTILE = "</script><b>&\u2028 'x' <!-- {{ data }}"


def point(seconds, size, *, devices=2, stage=0, name="layers.0", model="GPT"):
    blocks = (
        BlockPlan(name, OpConfig.zero(stage, recompute=True)),
        BlockPlan("", OpConfig.zero(stage)),
    )
    predicted = StepEstimate(seconds, size, 0.75 * seconds, 0.25 * seconds)
    return PlanPoint(
        seconds,
        size,
        devices,
        ParallelPlan.of_blocks(
            blocks, mesh=devices, model=model, batch_size=8, predicted=predicted
        ),
    )


def frontier(count, *, devices=(2,), **kwargs):
    """`count` points in all, spread over `devices`, smaller ones slower."""
    each = [count // len(devices) + (i < count % len(devices)) for i in range(len(devices))]
    return [
        point((1 + (n - k) / n) / d, (1 + k / n) * GIB / d, devices=d, stage=k % 2, **kwargs)
        for d, n in zip(devices, each, strict=True)
        for k in range(n)
    ]


class Page(HTMLParser):
    """Tags with their attributes, and the text inside each kind of element."""

    VOID = {"meta", "link"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    @property
    def data(self):
        return json.loads(self.text["script"][0])


def page(tmp_path, points, chosen, **kwargs):
    path = tmp_path / "frontier.html"
    save_html(path, points, chosen, **kwargs)
    text = path.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.open == []
    return text, parsed


def text_of(data, entry):
    """The plan of a point as the page puts it together."""
    blocks = [data["blocks"][index]["yaml"] for index in entry["blocks"]]
    ends = list(itertools.accumulate(entry["stages"]))
    stages = [blocks[end - count : end] for end, count in zip(ends, entry["stages"], strict=True)]
    return entry["header"] + "".join("- blocks:\n" + "".join(stage) for stage in stages)


def table_rows(points, chosen, **kwargs):
    console = Console(width=160, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    print_table(points, chosen, console=console, **kwargs)
    lines = console.export_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in lines
        if line.startswith("│")
    ]
    return rows, lines[-1].strip()


def test_table_marks_the_chosen_plan():
    points = frontier(5)
    chosen = choose(points, memory_limit=1.5 * GIB / 2)
    rows, caption = table_rows(points, chosen)
    marked = [row for row in rows if row[0] == "*"]
    assert len(rows) == 5 and len(marked) == 1
    assert marked[0] == ["*", "800 ms", "716.80 MiB", "1 x DDP + recompute, 1 x DDP"]
    assert caption == "* chosen"
    rows, caption = table_rows(points, chosen, memory_limit=MemoryLimit(1.5 * GIB / 2))
    assert [row[0] for row in rows] == ["", "", "*", "!", "!"]
    assert caption == "* chosen; ! does not fit (memory limit 768.00 MiB)"


def test_table_leaves_out_evenly_and_says_so():
    points = frontier(500, devices=(1, 2, 4))
    chosen = points[70]
    rows, caption = table_rows(points[::-1], chosen, limit=12)
    assert 9 <= len(rows) <= 12
    assert caption == f"* chosen; {500 - len(rows)} of 500 plans left out"
    assert [row[0] for row in rows].count("*") == 1
    for devices, group in itertools.groupby(points, key=lambda p: p.devices):
        members, shown = list(group), [row for row in rows if row[1] == str(devices)]
        assert shown[0][3] == format_bytes(members[0].peak_bytes)
        assert shown[-1][2] == format_seconds(members[-1].step_seconds)
        assert len(shown) >= 3  # and some between
    # the ends of three series and the chosen one stay
    assert len(table_rows(points, chosen, limit=2)[0]) == 7


def test_page_loads_nothing(tmp_path):
    text, parsed = page(tmp_path, frontier(9), frontier(9)[4], memory_limit=MemoryLimit(GIB))
    assert (
        "http:" not in text
        and "https:" not in text
        and "url(" not in text
        and "@import" not in text
    )
    loading = {"src", "href", "data", "action", "srcset", "poster", "xlink:href"}
    assert [attrs[k] for _, attrs in parsed.tags for k in loading & set(attrs)] == ["data:,"]
    policy = next(
        a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize(("count", "devices"), [(1, (1,)), (9, (2,)), (2000, (1, 2, 4, 8, 16))])
def test_page_holds_every_plan(tmp_path, count, devices):
    points = frontier(count, devices=devices)
    chosen = choose(points)
    text, parsed = page(tmp_path, points, chosen, exact=False)
    data = parsed.data
    assert len(data["points"]) == count and data["exact"] is False and len(text) < 2_000_000
    plans = []
    for entry in data["points"]:
        plan = ParallelPlan.from_yaml(text_of(data, entry))
        plans.append(PlanPoint(entry["y"], entry["x"], entry["devices"], plan))
    assert plans == sorted(points, key=lambda p: (p.devices, p.peak_bytes))
    assert plans[data["chosen"]] == chosen and data["reason"] == chosen.plan.reason != ""
    assert plans[data["chosen"]].plan.to_yaml() == chosen.plan.to_yaml()  # with its reason


def test_page_escapes_text(tmp_path):
    points = frontier(3, name=HOSTILE, model=HOSTILE)
    chosen = dataclasses.replace(
        points[1], plan=dataclasses.replace(points[1].plan, reason=HOSTILE)
    )
    for title, shown in (("", f"Plans for {HOSTILE}"), (HOSTILE, HOSTILE)):
        _, parsed = page(tmp_path, points, chosen, title=title)
        assert "b" not in {tag for tag, _ in parsed.tags} and len(parsed.text["script"]) == 2
        assert "".join(parsed.text["title"]) == "".join(parsed.text["h1"]) == shown
        assert parsed.data["reason"] == HOSTILE and parsed.data["blocks"][0]["block"] == HOSTILE


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")
def test_script_is_valid_and_draws_axes_with_round_marks(tmp_path):
    _, parsed = page(tmp_path, frontier(3), frontier(3)[0])
    script = tmp_path / "page.js"
    script.write_text(parsed.text["script"][1])
    subprocess.run(["node", "--check", script], check=True)
    source = parsed.text["script"][1]
    function = source[source.index("function makeAxis") :].split("\n}\n")[0] + "\n}\n"
    ranges = [[1e-3, 1.1e-3], [0.2, 3.0], [5.0, 5.0], [1e-4, 2.0], [40.0, 2e5], [0.0, 9.0]]
    call = (
        f"console.log(JSON.stringify({json.dumps(ranges)}.map((values) => "
        'makeAxis("t", values, [["us", 1e-6], ["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600]], '
        "[1, 2, 5, 10, 20, 50, 100, 200, 500]))))"
    )
    axes = subprocess.run(["node", "-e", function + call], check=True, capture_output=True).stdout
    for (low, high), axis in zip(ranges, json.loads(axes), strict=True):
        assert axis["low"] <= low and high <= axis["high"] and axis["low"] < axis["high"]
        assert all(axis["low"] <= value <= axis["high"] for value, _ in axis["ticks"])
        assert 2 <= len(axis["ticks"]) <= 8 and axis["log"] == (0 < 20 * low < high)
        assert len({text for _, text in axis["ticks"]}) == len(axis["ticks"])


def test_the_page_holds_plans_with_stages(tmp_path):
    stages = (StagePlan((BlockPlan("a", OpConfig.zero(0)), BlockPlan("", OpConfig.zero(0)))),)
    stages += (StagePlan((BlockPlan("b", OpConfig.zero(0)),)),)
    plan = ParallelPlan(Mesh((Axis("pipeline", 2),)), stages, schedule="1f1b", num_microbatches=4)
    points = [dataclasses.replace(point(1, 1), plan=plan), point(2, 0.5)]
    _, parsed = page(tmp_path, points, points[0])
    assert ParallelPlan.from_yaml(text_of(parsed.data, parsed.data["points"][1])) == plan
