"""How ranks divide links: on tables, without a network."""

from __future__ import annotations

import pytest

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.link_shares import (
    EXPIRE_NS,
    count_senders,
    divide_link,
)
from lightning_topt.communication.bounded_loss.path_measures import SHARE
from lightning_topt.communication.bounded_loss.rate_rule import SHARES
from lightning_topt.communication.bounded_loss.tables import (
    OUT_C,
    OUT_R,
    SENDING,
    Tables,
    make_tables,
)

RANK, WORLD = 1, 4


def tables_of(*receivers: int, way: int = OUT_C) -> Tables:
    """Tables of a rank that has data for these."""
    t = make_tables(world_size=WORLD, slots=3, segments=8)
    t.config[tables.RANK], t.config[tables.USED_SLOTS] = RANK, 3
    t.slots[2, tables.ACTIVE] = 1
    for peer in receivers:
        t.flows[2, peer, way, tables.STATE] = SENDING
    return t


@pytest.mark.parametrize("way", [OUT_C, OUT_R])
def test_receivers_get_equal_shares(way):
    t = tables_of(0, 3, way=way)
    assert divide_link(t.address) == 2
    assert t.paths[:, SHARE].tolist() == [0.5, 0, 0, 0.5] and t.link[SHARES] == 1


def test_a_receiver_of_many_takes_less():
    t = tables_of(0, 2)
    t.peers[0, tables.SENDERS] = 3
    divide_link(t.address)
    assert t.paths[:, SHARE].tolist() == [1 / 3, 0, 0.5, 0] and t.link[SHARES] == pytest.approx(
        5 / 6
    )


def test_without_data_nothing_is_divided():
    t = tables_of()
    t.link[SHARES] = 0.5
    assert divide_link(t.address) == 0 and t.link[SHARES] == 0.5


def test_senders_are_counted_until_they_have_no_more_or_fall_silent():
    t, now = tables_of(), 10 * EXPIRE_NS
    t.peers[[0, 2, 3], tables.HAS_DATA] = 1
    t.peers[:, tables.ARRIVED_NS] = now
    assert count_senders(t.address, now) == 3
    t.peers[2, tables.HAS_DATA] = 0
    t.peers[3, tables.ARRIVED_NS] = now - EXPIRE_NS
    assert count_senders(t.address, now) == 1
