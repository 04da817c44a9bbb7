"""Finds who is gone, frozen or late, from what the tables know of the other ranks."""

from __future__ import annotations

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.datagram import MOST_PARTS
from lightning_topt.communication.bounded_loss.delivery import PeerSilentError
from lightning_topt.communication.bounded_loss.tables import IN_C, IN_R, OUT_C, OUT_R, Tables


def quiet_ranks(t: Tables, now: int, seconds: float) -> list[int]:
    """Return the ranks that nothing was heard of for `seconds`, whose side channel is open."""
    return [
        peer
        for peer, row in enumerate(t.peers)
        if peer != t.config[tables.RANK]
        and not row[tables.CLOSED]
        and now - row[tables.HEARD_NS] > seconds * 1e9
    ]


def find_lost(t: Tables, now: int, timeout_seconds: float) -> None:
    """Raise PeerSilentError where an active part waits for a rank that is gone, silent, or does not
    go on, in vain.
    """
    used = int(t.config[tables.USED_SLOTS])
    active = [slot for slot in range(used) if t.slots[slot, tables.ACTIVE]]
    _raise_reported(t)
    for peer, row in enumerate(t.peers):
        if row[tables.CLOSED] and any(_owes(t, slot, peer) for slot in active):
            ended = "closed its side channel: its process has ended, or the link is cut"
            fate = "left the exchange" if row[tables.LEFT] else ended
            raise PeerSilentError(f"rank {peer} {fate}", (peer,))
    limit = now - int(timeout_seconds * 1e9)
    stuck = [slot for slot in active if t.slots[slot, tables.PROGRESS_NS] < limit]
    if not stuck:
        return
    late = [peer for peer in range(len(t.peers)) if any(_owes(t, slot, peer) for slot in stuck)]
    silent = tuple(peer for peer in late if t.peers[peer, tables.HEARD_NS] < limit)
    if silent:
        raise PeerSilentError(
            f"{_named(silent)} did not answer for {timeout_seconds:g} s: stopped, or unreachable "
            "from here",
            silent,
        )
    bucket, part = divmod(int(t.slots[stuck[0], tables.TENSOR]), MOST_PARTS)
    ranks, reason = _reason(t, stuck[0], late)
    raise PeerSilentError(
        f"bucket {bucket} (part {part}) did not go on for {timeout_seconds:g} s although all ranks "
        f"answer: {reason}",
        ranks,
    )


def _raise_reported(t: Tables) -> None:
    for peer, row in enumerate(t.peers):
        code = int(row[tables.FAILED_RANK])
        if code > 0:
            raise PeerSilentError(
                f"rank {code - 1} did not answer, as rank {peer} reports", (code - 1,)
            )
        if code < 0:
            bucket = int(t.slots[-1 - code, tables.TENSOR]) // MOST_PARTS
            raise PeerSilentError(
                f"bucket {bucket} has another size on rank {peer}: start the same on all ranks",
                (peer,),
            )


def _owes(t: Tables, slot: int, peer: int) -> bool:
    """Return whether the part waits for something from `peer`."""
    if peer == t.config[tables.RANK]:
        return False
    flows = t.flows[slot, peer]
    coming = any(flows[way, tables.STATE] == tables.RECEIVING for way in (IN_C, IN_R))
    return coming or any(flows[way, tables.STATE] != tables.STOPPED for way in (OUT_C, OUT_R))


def _reason(t: Tables, slot: int, late: list[int]) -> tuple[tuple[int, ...], str]:
    """Find which ranks that answer a part waits for, and for what."""
    unstarted = tuple(
        peer for peer in late if t.flows[slot, peer, OUT_C, tables.STATE] == tables.WAIT_OPEN
    )
    if unstarted:
        return (
            unstarted,
            f"{_named(unstarted)} has not started it; if it is slow, raise the time limit",
        )
    if all(t.flows[slot, peer, IN_C, tables.RECEIVED] == 0 for peer in late):
        return tuple(
            late
        ), f"no data of {_named(tuple(late))} arrives; a firewall may block UDP between the ranks"
    return tuple(
        late
    ), f"it waits for {_named(tuple(late))}; if the network is slow, raise the time limit"


def _named(ranks: tuple[int, ...]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
