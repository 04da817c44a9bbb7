"""Shares: ranks that send to one, and receivers that one sends to, divide the links between them,
so that no queue fills.

A rank with data for k receivers gives one that n ranks send to 1 / max(k, n) of its link: neither
this rank's link nor the receiver's is asked for more than it has. Each datagram says whether its
sender has more for the receiver (`MORE`), and reports say how many such senders there are. Where
all ranks have data for all others, all links are full without a word between them; where a rank is
late, or is done, the others take its share with the next report.
"""

from __future__ import annotations

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.path_measures import SHARE
from lightning_topt.communication.bounded_loss.rate_rule import SHARES
from lightning_topt.communication.bounded_loss.raw_memory import inner
from lightning_topt.communication.bounded_loss.table_views import (
    config_row,
    flow_row,
    link_row,
    path_row,
    peer_row,
    slot_row,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    ARRIVED_NS,
    HAS_DATA,
    OUT_C,
    OUT_R,
    PRIORITY,
    RANK,
    SENDERS,
    SENDING,
    STATE,
    USED_SLOTS,
    WORLD,
)

# a sender that said it has more, and of which nothing came for so long, is not counted
EXPIRE_NS = 10_000_000


@inner
def most_urgent(t: int, peer: int) -> tuple[int, int]:
    """Return the slot and way that has data for `peer` and goes first; (-1, 0): none. Sums go
    before contributions.
    """
    best, best_way, best_key = -1, 0, -1
    for slot in range(config_row(t)[USED_SLOTS]):
        if not slot_row(t, slot)[ACTIVE]:
            continue
        for way in (OUT_R, OUT_C):
            key = 2 * slot_row(t, slot)[PRIORITY] + (way == OUT_R)
            if flow_row(t, slot, peer, way)[STATE] == SENDING and key > best_key:
                best, best_way, best_key = slot, way, key
    return best, best_way


@inner
def has_other_data(t: int, slot: int, peer: int, way: int) -> bool:
    """Return whether there are data for `peer` beside those of this slot and way (slot -1: any)."""
    for other in range(config_row(t)[USED_SLOTS]):
        if not slot_row(t, other)[ACTIVE]:
            continue
        for kind in (OUT_R, OUT_C):
            if (other != slot or kind != way) and flow_row(t, other, peer, kind)[STATE] == SENDING:
                return True
    return False


@compiled
def divide_link(t: int) -> int:
    """Set the share of each receiver that this rank has data for; returns how many they are."""
    config, receivers, shares = config_row(t), 0, 0.0
    for peer in range(config[WORLD]):
        path_row(t, peer)[SHARE] = (
            1.0 if peer != config[RANK] and has_other_data(t, -1, peer, 0) else 0.0
        )
        receivers += path_row(t, peer)[SHARE] > 0
    for peer in range(config[WORLD]):
        path_row(t, peer)[SHARE] /= max(1, receivers, peer_row(t, peer)[SENDERS])
        shares += path_row(t, peer)[SHARE]
    if receivers:
        link_row(t)[SHARES] = shares
    return receivers


@compiled
def count_senders(t: int, clock: int) -> int:
    """Return how many ranks have data for this one at the time `clock`, of the clock that
    datagrams' arrivals are in.
    """
    senders = 0
    for peer in range(config_row(t)[WORLD]):
        row = peer_row(t, peer)
        senders += row[HAS_DATA] != 0 and clock - row[ARRIVED_NS] < EXPIRE_NS
    return senders
