"""Questions what came, behind the data, and again where no answer comes in time."""

from __future__ import annotations

from lightning_topt.communication.bounded_loss.control_messages import (
    BODY,
    BY_BOTH,
    BY_DATAGRAM,
    answer_nanoseconds,
    send_control,
)
from lightning_topt.communication.bounded_loss.datagram import (
    CONTRIBUTION,
    PROBE,
    RESULT,
)
from lightning_topt.communication.bounded_loss.raw_memory import (
    inner,
    store64,
)
from lightning_topt.communication.bounded_loss.table_views import (
    MESSAGE,
    config_row,
    counter_row,
    flow_row,
    peer_row,
    slot_row,
    table,
)
from lightning_topt.communication.bounded_loss.tables import (
    ACTIVE,
    NEVER,
    NEXT_SEQUENCE,
    NEXT_TIMER,
    OUT_C,
    OUT_R,
    PROBE_NS,
    PROBES_NS,
    PROBES_REPEATED,
    PROBING,
    RANK,
    SERIAL,
    STALLED_NS,
    STATE,
    STEP,
    TENSOR,
    TRIES,
    USED_SLOTS,
    WAIT_OPEN,
    WORLD,
)


@inner
def send_probe(t: int, slot: int, peer: int, way: int, now: int) -> None:
    """Ask what came, behind the data; over the side channel too if two answers did not come."""
    row, flow = slot_row(t, slot), flow_row(t, slot, peer, way)
    store64(table(t, MESSAGE) + BODY, peer_row(t, peer)[NEXT_SEQUENCE])
    ways = BY_BOTH if flow[TRIES] >= 2 else BY_DATAGRAM
    kind = CONTRIBUTION if way == OUT_C else RESULT
    send_control(t, peer, PROBE, kind, row[STEP], row[TENSOR], flow[SERIAL], 8, ways)
    flow[PROBE_NS] = now + answer_nanoseconds(t, peer, flow[TRIES])
    config_row(t)[PROBES_NS] = min(config_row(t)[PROBES_NS], flow[PROBE_NS])


@inner
def repeat_probes(t: int, now: int) -> None:
    """Repeat the probes that were not answered in time."""
    config = config_row(t)
    if now < config[PROBES_NS]:
        config[NEXT_TIMER] = min(config[NEXT_TIMER], config[PROBES_NS])
        return
    config[PROBES_NS] = NEVER
    for slot in range(config[USED_SLOTS]):
        if not slot_row(t, slot)[ACTIVE]:
            continue
        for peer in range(config[WORLD]):
            for way in (OUT_C, OUT_R):
                flow = flow_row(t, slot, peer, way)
                if peer == config[RANK] or (flow[STATE] != PROBING and flow[STATE] != WAIT_OPEN):
                    continue
                if flow[PROBE_NS] <= now:
                    flow[TRIES] += 1
                    if flow[STATE] == PROBING:
                        counter_row(t)[PROBES_REPEATED] += 1
                        counter_row(t)[STALLED_NS] += answer_nanoseconds(t, peer, flow[TRIES] - 1)
                    send_probe(t, slot, peer, way, now)
                config[PROBES_NS] = min(config[PROBES_NS], flow[PROBE_NS])
    config[NEXT_TIMER] = min(config[NEXT_TIMER], config[PROBES_NS])
