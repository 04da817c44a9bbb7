"""Plan, frontier and cluster files that are wrong in any way: one sentence, at once."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_topt.communication import TopK
from lightning_topt.costs import plain_values
from lightning_topt.costs.cluster import Cluster, ClusterError
from lightning_topt.costs.plain_values import MAX_BYTES
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StepEstimate

ROOT = Path(__file__).parents[2]
PLAN = ParallelPlan.of_blocks(
    (BlockPlan("a", OpConfig.zero(1, recompute=True)), BlockPlan("", OpConfig.zero(0))),
    mesh=2,
    model="M",
    fingerprint="f",
    batch_size=4,
    cluster="c",
    predicted=StepEstimate(1.0, 2.0, 0.75, 0.25),
    gradient_exchange=TopK(),
)
CLUSTER = Cluster.load(ROOT / "conf/cluster/a100_8x8.yaml")
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 30)
)
SELF = "&a {blocks: *a, version: 1}"
TEXTS = [
    LAUGHS, SELF, "[" * 10**6, "{a: " * 10**5, "- " * 10**5, "? " * 10**5, "a: b: c", "\x00",
    "\ud7ff\uffff", "", "-", "5", "'text'", "[1, 2]", "? [1]\n: 2",
    "{1: 2, a: 3, null: 4, 2.5: 1, true: 1}", "2026-99-99", "1:" * 7000 + "1", "9" * 5000,
    "!!python/object/apply:os.system [true]", "!!binary '%%%'", "!!set {a, b}", "!!int x",
    "!!float ''", "!!timestamp x", "<<: 3", "<<: [1]", "%YAML 9.9\n---\n1", "--- 1\n--- 2",
    "a: 1\na: 2", "x" * (MAX_BYTES + 1), "- 1\n" * 2_100_000,
]  # fmt: skip
WRONG: list[Any] = [
    -1, 0, 1.5, math.nan, math.inf, -math.inf, 10**400, True, "", "text", "1 banana",
    "9" * 4000 + "!", [], [1], [[]], {}, {"a": 1}, {1: 2, "b": 3}, b"bytes", {1, 2}, object(), "²",
    "shard(²)", "shard(9)", "shard(" + "9" * 5000 + ")",
]  # fmt: skip


def sentence(error: BaseException) -> str:
    message = str(error)
    assert message and "\n" not in message and len(message) < 1200
    return message


def refuses(read: Any, value: Any, kind: type[ValueError]) -> None:
    with pytest.raises(kind) as caught:
        read(value)
    sentence(caught.value)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.copy(data)
    data[path[0]] = replaced(data[path[0]], path[1:], value)
    return data


@pytest.mark.timeout(60)  # one that is read without bounds would never come back
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_that_is_no_plan_and_no_cluster(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    refuses(ParallelPlan.from_yaml, text, PlanError)
    refuses(ParallelPlan.load, path, PlanError)
    refuses(Cluster.load, path, ClusterError)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "special", ["folder", "missing", "pipe", "/dev/zero", "latin", "x" * 5000, "a\0b"]
)
def test_what_is_no_file(special: str, tmp_path: Path) -> None:
    path = Path(special) if special.startswith("/") else tmp_path / special
    if special == "folder":
        path.mkdir()
    elif special == "pipe":
        os.mkfifo(path)
    elif special == "latin":
        path.write_bytes("version: é".encode("latin-1"))
    refuses(ParallelPlan.load, path, PlanError)
    refuses(Cluster.load, path, ClusterError)


@pytest.mark.parametrize(("of", "kind"), [(PLAN, PlanError), (CLUSTER, ClusterError)])
def test_what_is_too_long_to_be_read_is_not_written(
    of: Any, kind: type[ValueError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.yaml"
    of.save(path)
    monkeypatch.setattr(plain_values, "MAX_BYTES", path.stat().st_size)
    of.save(path)
    assert type(of).load(path) == of
    monkeypatch.setattr(plain_values, "MAX_BYTES", path.stat().st_size - 1)
    refuses(type(of).load, path, kind)
    refuses(of.save, path, ValueError)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("read", "data", "kind"),
    [
        (ParallelPlan.from_dict, PLAN.to_dict(), PlanError),
        (Cluster.from_dict, CLUSTER.to_dict(), ClusterError),
    ],
    ids=["plan", "cluster"],
)
def test_every_entry_with_every_wrong_value_is_read_or_refused_in_a_sentence(
    read, data, kind
) -> None:
    assert read(data) is not None
    refused = 0
    for place in places(data):
        for value in WRONG:
            changed = replaced(data, place, value)
            try:
                read(changed)
            except kind as error:
                sentence(error)
                refused += 1
            except (TypeError, ValueError):
                raise AssertionError((place, value)) from None
    assert refused > 0.7 * len(places(data)) * len(WRONG)
