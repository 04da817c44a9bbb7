"""Counts of an exchange since the last reset, for logs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_topt.communication.bounded_loss import path_measures, rate_rule, tables
from lightning_topt.communication.bounded_loss.raw_memory import Array
from lightning_topt.communication.bounded_loss.tables import Tables


@dataclass(frozen=True)
class BoundedLossStatistics:
    """Since the last reset; shares are of this rank's contributions (`lost_share`) or of its
    datagrams.

    `path_loss` counts what receivers did not see, retransmissions and results included;
    `bytes_per_second` is the present rate of all that leaves; `round_trip_seconds` the present
    mean; `stalled_seconds` was waited for answers to probes that were late; `rejected` datagrams
    were wrong (key, size, place, source), `late` ones came after their part was closed.
    """

    lost_share: float
    path_loss: float
    marked_share: float
    datagrams_sent: int
    datagrams_resent: int
    bytes_sent: int
    bytes_per_second: float
    round_trip_seconds: float
    stalled_seconds: float
    probes_repeated: int
    rejected: int
    late: int
    duplicates: int
    refused_connections: int


def take_statistics(t: Tables, before: Array, *, rank: int, refused: int) -> BoundedLossStatistics:
    """Return what was counted since `before`, counters with the losses seen by receivers after them
    (`snapshot`).
    """
    since = snapshot(t) - before
    others = [row for peer, row in enumerate(t.paths) if peer != rank]
    sent = int(since[tables.SENT_DATAGRAMS])
    return BoundedLossStatistics(
        lost_share=float(since[tables.LOST_ELEMENTS] / max(since[tables.CONTRIBUTED_ELEMENTS], 1)),
        path_loss=float(since[-1] / max(sent, 1)),
        marked_share=float(
            since[tables.MARKED_DATAGRAMS] / max(since[tables.RECEIVED_DATAGRAMS], 1)
        ),
        datagrams_sent=sent,
        datagrams_resent=int(since[tables.RESENT_DATAGRAMS]),
        bytes_sent=int(since[tables.SENT_BYTES]),
        bytes_per_second=float(rate_rule.pacing_rate(t.link, int(t.config[tables.DATAGRAM]))),
        round_trip_seconds=float(np.mean([row[path_measures.TRIP] for row in others])),
        stalled_seconds=float(since[tables.STALLED_NS] * 1e-9),
        probes_repeated=int(since[tables.PROBES_REPEATED]),
        rejected=int(since[tables.REJECTED]),
        late=int(since[tables.LATE]),
        duplicates=int(since[tables.DUPLICATES]),
        refused_connections=refused,
    )


def snapshot(t: Tables) -> Array:
    """Return all counters, and the datagrams that receivers reported missing."""
    return np.append(t.counters, int(t.paths[:, path_measures.ALL_LOST].sum()))
