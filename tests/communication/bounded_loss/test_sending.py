"""How ranks divide links: on tables, without a network."""

from __future__ import annotations

import pytest

from lightning_topt.communication.bounded_loss.control_messages import EXPIRE_NS, count_senders
from lightning_topt.communication.bounded_loss.sending import divide_link
from lightning_topt.communication.bounded_loss.tables import (
    OUT_CONTRIBUTION,
    OUT_RESULT,
    SENDING,
    Tables,
    make_tables,
)

RANK, WORLD = 1, 4


def tables_of(*receivers: int, way: int = OUT_CONTRIBUTION) -> Tables:
    """Tables of a rank that has data for these."""
    t = make_tables(world_size=WORLD, slots=3, segments=8)
    t.config.rank, t.config.used_slots = RANK, 3
    t.slots[2].active = 1
    for peer in receivers:
        t.flows[2, peer, way].state = SENDING
    return t


@pytest.mark.parametrize("way", [OUT_CONTRIBUTION, OUT_RESULT])
def test_receivers_get_equal_shares(way):
    t = tables_of(0, 3, way=way)
    assert divide_link(t.root) == 2
    assert t.paths["share"].tolist() == [0.5, 0, 0, 0.5] and t.link.shares == 1


def test_a_receiver_of_many_takes_less():
    t = tables_of(0, 2)
    t.peers[0].senders = 3
    divide_link(t.root)
    assert t.paths["share"].tolist() == [1 / 3, 0, 0.5, 0]
    assert t.link.shares == pytest.approx(5 / 6)


def test_without_data_nothing_is_divided():
    t = tables_of()
    t.link.shares = 0.5
    assert divide_link(t.root) == 0 and t.link.shares == 0.5


def test_senders_are_counted_until_they_have_no_more_or_fall_silent():
    t, now = tables_of(), 10 * EXPIRE_NS
    t.peers["has_data"][[0, 2, 3]] = 1
    t.peers["arrived_ns"] = now
    assert count_senders(t.root, now) == 3
    t.peers[2].has_data = 0
    t.peers[3].arrived_ns = now - EXPIRE_NS
    assert count_senders(t.root, now) == 1
