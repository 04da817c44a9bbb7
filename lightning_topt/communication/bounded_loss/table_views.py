"""The tables as compiled code sees them: `t` is the address of a list of addresses (`Tables.root`),
rows are views made of it.

An array is seven values wherever compiled code passes it, all tables would be two hundred and a
minute of compilation. An address is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from lightning_topt.communication.bounded_loss.path_measures import PATH_COLUMNS
from lightning_topt.communication.bounded_loss.rate_rule import LINK_COLUMNS
from lightning_topt.communication.bounded_loss.raw_memory import (
    Array,
    _typed_intrinsic,
    inner,
    load64,
)
from lightning_topt.communication.bounded_loss.tables import (
    CONFIG_COLUMNS,
    COUNTER_COLUMNS,
    FLOW_COLUMNS,
    PART_BLOCKS,
    PART_WORDS,
    PEER_COLUMNS,
    ROOT,
    SLOT_COLUMNS,
    WORDS,
    WORLD,
)

_CONFIG, _COUNTERS, _PEERS = ROOT["config"], ROOT["counters"], ROOT["peers"]
_LINK, _PATHS = ROOT["link"], ROOT["paths"]
_SLOTS, _FLOWS, _BITS, _EXACT = ROOT["slots"], ROOT["flows"], ROOT["bits"], ROOT["exact"]


@_typed_intrinsic
def _pointer(typing: Any, address: Any, kind: Any) -> Any:
    """Return `address` as a pointer to elements of the type `kind`."""
    element = kind.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, kind), generate


@inner
def integers(address: int, size: int) -> Array:
    """Return `size` int64 at `address`."""
    return carray(_pointer(address, np.int64), size)


@inner
def table(t: int, which: int) -> int:
    """Return the address of a table, one of ``ROOT``'s numbers."""
    return load64(t + 8 * which)


@inner
def config_row(t: int) -> Array:
    """Return the row of settings and of the loop's state."""
    return integers(table(t, _CONFIG), CONFIG_COLUMNS)


@inner
def counter_row(t: int) -> Array:
    """Return all counters."""
    return integers(table(t, _COUNTERS), COUNTER_COLUMNS)


@inner
def peer_row(t: int, peer: int) -> Array:
    """Return the row of a rank."""
    return integers(table(t, _PEERS) + 8 * PEER_COLUMNS * peer, PEER_COLUMNS)


@inner
def link_row(t: int) -> Array:
    """Return the row of this rank's link, float64."""
    return carray(_pointer(table(t, _LINK), np.float64), LINK_COLUMNS)


@inner
def path_row(t: int, peer: int) -> Array:
    """Return the row of the way to a rank, float64."""
    return carray(_pointer(table(t, _PATHS) + 8 * PATH_COLUMNS * peer, np.float64), PATH_COLUMNS)


@inner
def slot_row(t: int, slot: int) -> Array:
    """Return the row of a part."""
    return integers(table(t, _SLOTS) + 8 * SLOT_COLUMNS * slot, SLOT_COLUMNS)


@inner
def _way(t: int, slot: int, peer: int, way: int) -> int:
    return (slot * config_row(t)[WORLD] + peer) * 4 + way


@inner
def flow_row(t: int, slot: int, peer: int, way: int) -> Array:
    """Return the row of one way of a part."""
    return integers(table(t, _FLOWS) + 8 * FLOW_COLUMNS * _way(t, slot, peer, way), FLOW_COLUMNS)


@inner
def bit_row(t: int, slot: int, peer: int, way: int) -> Array:
    """Return the bits of one way of a part, uint64."""
    words = config_row(t)[WORDS]
    return bits_at(table(t, _BITS) + 8 * words * _way(t, slot, peer, way), words)


@inner
def bits_at(address: int, words: int) -> Array:
    """Return `words` uint64 at `address`."""
    return carray(_pointer(address, np.uint64), words)


@inner
def exact_row(t: int, slot: int) -> Array:
    """Return the bits of a part's segments that may not be lost, uint64."""
    words = config_row(t)[PART_WORDS]
    return bits_at(table(t, _EXACT) + 8 * words * slot, words)


MESSAGE, WORK, SOURCES, PENDING, STREAMS = (
    ROOT["message"],
    ROOT["work"],
    ROOT["sources"],
    ROOT["pending"],
    ROOT["streams"],
)
SEND, SEND_PARTS, SEND_HEADERS = ROOT["send"], ROOT["send_parts"], ROOT["send_headers"]
SEND_CONTROL, FILES, INBOXES, SCALES, LARGE = (
    ROOT[name] for name in ("send_control", "files", "inboxes", "scales", "large")
)
RECEIVE, RECEIVE_PARTS, RECEIVE_MEMORY = (
    ROOT["receive"],
    ROOT["receive_parts"],
    ROOT["receive_memory"],
)
RECEIVE_NAMES, RECEIVE_CONTROL = ROOT["receive_names"], ROOT["receive_control"]


@inner
def source_of(t: int, peer: int) -> int:
    """Return where the struct sockaddr_in of a rank is."""
    return table(t, SOURCES) + 16 * peer


@inner
def inbox_of(t: int, slot: int, peer: int) -> int:
    """Return where the contribution of a rank to this one's shard goes."""
    return load64(table(t, INBOXES) + 8 * (slot * config_row(t)[WORLD] + peer))


@inner
def sent_part(t: int, index: int) -> Array:
    """Return one struct iovec of what is sent."""
    return integers(table(t, SEND_PARTS) + 16 * index, 2)


@inner
def sent_message(t: int, index: int) -> Array:
    """Return one struct mmsghdr of what is sent."""
    return integers(table(t, SEND) + 64 * index, 8)


@inner
def scale_of(t: int, slot: int) -> float:
    """Return what the sum of a part is multiplied by."""
    return carray(_pointer(table(t, SCALES) + 8 * slot, np.float64), 1)[0]


@inner
def large_of(t: int, slot: int, block: int) -> int:
    """Return where the byte is that says whether a block of a part's segments has large entries."""
    return table(t, LARGE) + slot * config_row(t)[PART_BLOCKS] + block
