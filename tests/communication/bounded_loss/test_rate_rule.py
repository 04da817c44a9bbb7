"""The rule for rates, on a model of a link: 1 Gb/s are 82,000 datagrams per second."""

from __future__ import annotations

import pytest

from lightning_topt.communication.bounded_loss.rate_rule import (
    LINK,
    PATH,
    LinkState,
    Path,
    measure_trip,
    reset_link,
    reset_path,
    take_report,
)
from lightning_topt.communication.bounded_loss.raw_memory import new_record
from tests.communication.bounded_loss.link_model import Cubic, Ours, run_link

GIGABIT = 82_000.0  # datagrams per second
LAN = 2e-4  # seconds


def fresh() -> LinkState:
    row = new_record(LINK)
    reset_link(row)
    return row


def fresh_path() -> Path:
    path = new_record(PATH)
    reset_path(path)
    return path


def rounds(row: LinkState, count: int, *, lost_each: int = 0, size: int = 100) -> None:
    """So many rounds of 2 ms with so many datagrams, limited by the window; one receiver."""
    path, now = fresh_path(), float(row.round_began)
    for number in range(1, count + 1):
        now += 2e-3
        row.limited = 1.0
        highest, lost = number * size - 1, number * lost_each
        take_report(path, row, highest, lost, highest + 1 - lost, 1 + now, now)


def refused_round(row: LinkState, *, delivered: int, refused: int) -> None:
    """A round of 2 ms that delivered that many datagrams; a queue of this host refused others."""
    row.refused = refused
    rounds(row, 1, size=delivered)


def test_what_an_own_queue_refuses_is_no_loss():
    row = fresh()
    rounds(row, 1, lost_each=50)
    rounds(row, 12, size=100)  # 50 in a millisecond get through
    row.window = row.w_max = 80.0
    refused_round(row, delivered=100, refused=30)
    assert row.window == pytest.approx(1.05 * 50) and row.caused_loss == 0 and row.reductions == 1
    before = row.window
    refused_round(row, delivered=20, refused=1)  # a burst of a late thread: no reason to be slower
    assert row.window >= before
    for _ in range(15):
        refused_round(row, delivered=20, refused=15)  # others use the queue
    assert row.window < 0.75 * before and row.reductions > 1


def test_a_queue_that_others_fill_is_not_left_to_them():
    row, near = fresh(), fresh_path()
    measure_trip(near, row, 1e-4)
    rounds(row, 1, lost_each=50)
    rounds(row, 12)
    for _ in range(50):
        measure_trip(near, row, 5e-3)
    row.window, windows = 300.0, []
    for _ in range(200):
        measure_trip(near, row, 5e-3)
        rounds(row, 3)
        windows.append(row.window)
    assert min(windows) < 250 and windows[-1] > min(windows) + 5


@pytest.mark.parametrize(
    ("queue", "loss"), [(11, 0.0), (22, 0.001), (87, 0.0), (87, 0.01), (4000, 0.001)]
)
def test_alone_it_fills_the_link_and_loses_little(queue, loss):
    sender = Ours()
    (rate,) = run_link([sender], capacity=GIGABIT, base=LAN, queue=queue, loss=loss, seconds=3.0)
    assert rate > 0.85 * GIGABIT * (1 - loss)
    caused = sender.lost / sender.sent - loss
    assert caused < 0.01


def test_alone_it_keeps_a_deep_queue_short():
    sender = Ours()
    run_link([sender], capacity=GIGABIT, base=LAN, queue=4000, seconds=3.0)
    assert sender.row.round_trip < LAN + 3e-3 and sender.lost == 0


@pytest.mark.parametrize(("queue", "first"), [(87, "ours"), (4000, "tcp")])
def test_it_shares_with_tcp(queue, first):
    starts = [0.0, 0.5] if first == "ours" else [0.5, 0.0]
    ours, tcp = run_link(
        [Ours(), Cubic()], capacity=GIGABIT, base=LAN, queue=queue, seconds=12.0, starts=starts
    )
    assert 0.3 < ours / (ours + tcp) < 0.7 and ours + tcp > 0.9 * GIGABIT


def test_two_exchanges_share():
    first, second = run_link(
        [Ours(), Ours()], capacity=GIGABIT, base=LAN, queue=87, seconds=8.0, starts=[0.0, 1.0]
    )
    assert 0.25 < first / (first + second) < 0.75
