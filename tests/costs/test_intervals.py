"""Intervals of predictions: quantiles of measured errors, and how far a run is outside."""

from __future__ import annotations

import math
import random

import pytest

from lightning_topt.costs.accuracy import (
    CPU_BYTES,
    LEVEL,
    UNKNOWN,
    WIDER,
    Accuracy,
    Domain,
    ErrorFigure,
    check_level,
    interval_of,
    quantile_of,
    sentence_of,
    share_at,
)
from lightning_topt.costs.cluster import Cluster
from tests.costs.test_formulas import cluster


def test_nine_of_ten_new_runs_are_inside():
    """Errors of runs drawn alike, many times: the level holds, and not by far more."""
    draw, inside = random.Random(3), []
    for _ in range(400):
        errors = [abs(draw.gauss(0, 0.1)) for _ in range(30)]
        inside.append(abs(draw.gauss(0, 0.1)) <= quantile_of(errors))
    assert 0.86 < sum(inside) / len(inside) < 0.96


def test_quantiles_by_hand():
    errors = [n / 100 for n in range(1, 20)]
    assert quantile_of(errors) == 0.18  # the 18th of 19
    assert quantile_of([0.3, 0.1]) == 0.3  # of so few the largest
    assert quantile_of(errors, level=0.0) == 0.01


def test_runs_outside_are_less_sure():
    sizes = {"devices": (8, 64), "parameters": (1e9, 7e9)}
    domain = Domain(sizes, ("pipeline", "tensor"))
    assert domain.outside({"devices": 16, "parameters": 2e9}, ("tensor",)) == {}
    outside = domain.outside({"devices": 256, "parameters": 5e8, "other": 3.0}, ("sharded",))
    assert outside == {"devices": 2.0, "parameters": 1.0, "sharded": 1.0}
    accuracy = Accuracy(ErrorFigure(0.05, 0.1, 20), domain=domain)
    inside = accuracy.interval(2.0, {"devices": 16})
    assert (inside.low, inside.high) == pytest.approx((2 / 1.1, 2 * 1.1)) and 2.1 in inside
    wide = accuracy.interval(2.0, {"devices": 256})
    assert wide.outside == ("devices",)
    assert wide.high == pytest.approx(2 * 1.1 * math.exp(2 * WIDER))
    assert interval_of(1.0, error=0.0).low == 1.0
    with pytest.raises(ValueError, match="domain of devices"):
        Domain({"devices": (0.0, 1.0)})


def test_other_levels_scale_the_width():
    """As normal errors do: drawn ones are inside so often as the level says."""
    draw = random.Random(1)
    errors = [draw.gauss(0, 0.1) for _ in range(4000)]
    nine = quantile_of([abs(e) for e in errors])
    for level in (0.2, 0.5, 0.8, 0.98):
        interval = interval_of(1.0, error=math.expm1(nine), level=level)
        assert interval.level == level
        inside = sum(math.exp(error) in interval for error in errors) / len(errors)
        assert inside == pytest.approx(level, abs=0.02)
    nothing = interval_of(3.0, error=0.5, outside={"devices": 2.0}, level=0.0)
    assert nothing.low == nothing.high == 3.0
    assert share_at(0.05, LEVEL) == pytest.approx(0.05) and share_at(0.05, 0.0) == 0.0
    for wrong in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="confidence"):
            check_level(wrong)


def test_bytes_above_the_prediction():
    """Nine of ten measured peaks are above by at most `above`; those below do not count."""
    measured = [80.0] * 50 + [100 + n for n in range(50)]
    figure = ErrorFigure.of([100.0] * 100, measured, above=True)
    assert figure.above == pytest.approx(0.40, abs=0.02) and figure.p90 >= figure.above
    assert ErrorFigure.of([100.0] * 100, measured).above is None
    with pytest.raises(ValueError, match="above"):
        ErrorFigure(0.1, 0.2, 3, above=-0.1)
    known = cluster(accuracy=Accuracy(ErrorFigure(0.1, 0.2, 9), figure), backend="nccl")
    limit = 1000.0
    assert known.memory_margin() == figure.above
    kept = [m / 100 * limit / (1 + figure.above) <= limit for m in measured]
    assert 0.88 < sum(kept) / len(kept) < 0.96
    # eight peaks: the largest of so many is above 89 % of all
    for runs, margin in ((8, 0.05), (9, 0.35)):
        few = Accuracy(figure, ErrorFigure(0.2, 0.35, runs, above=0.35))
        assert cluster(accuracy=few, backend="nccl").memory_margin() == margin
    # what is not known, and what CPU ranks have shown
    unknown = cluster(backend="nccl")
    assert unknown.bytes_interval(100.0, {}) is unknown.seconds_interval(1.0, {}) is None
    ranks = cluster(backend="gloo")
    assert ranks.memory_margin() == unknown.memory_margin() == 0.05 > CPU_BYTES.above
    assert ranks.bytes_interval(100.0, {}).high == pytest.approx(107.5)


def test_error_figures():
    figure = ErrorFigure.of([1.1, 0.8, 1.0], [1.0, 1.0, 1.0])
    assert (
        figure.median == pytest.approx(0.1)
        and figure.p90 == pytest.approx(0.25)
        and figure.runs == 3
    )
    assert str(figure) == "half of 3 runs within 10 %, nine of ten within 25 %"
    assert (
        "half of 3 runs within 10 %" in sentence_of(Accuracy(figure, source="here"))
        and sentence_of(None) == UNKNOWN
    )
    with pytest.raises(ValueError, match="at least 1 run"):
        ErrorFigure(0.1, 0.2, 0)


def test_a_file_keeps_the_domain(tmp_path):
    accuracy = Accuracy(
        ErrorFigure(0.05, 0.1, 20),
        ErrorFigure(0.1, 0.3, 4, above=0.2),
        source="x",
        domain=Domain({"devices": (8.0, 64.0)}, ("tensor",)),
        difference=ErrorFigure(0.06, 0.27, 9),
        bytes_domain=Domain({"parameters": (1e9, 8e9)}),
    )
    known = cluster(accuracy=accuracy)
    known.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == known
    for wrong in ("devices: [8]", "devices: 8", "devices: [9, 8]"):
        text = (tmp_path / "c.yaml").read_text()
        start = text.index("      devices:") if "      devices:" in text else -1
        assert start > 0
        lines = text[:start] + f"      {wrong}\n" + text[text.index("    techniques:") :]
        (tmp_path / "wrong.yaml").write_text(lines)
        with pytest.raises(ValueError, match="devices"):
            Cluster.load(tmp_path / "wrong.yaml")
