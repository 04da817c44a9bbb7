"""A function of a shared seed says which node stores which item of a partitioned cache, so that
nobody has to be asked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def owners(num_items: int, *, num_nodes: int, seed: int) -> npt.NDArray[np.int32]:
    """Return the node (0 .. `num_nodes` - 1) that owns each item, (num_items,). Raises ValueError
    where there are no nodes.

    The numbers of items per node differ by one at most. The result depends on the arguments only,
    not on versions of numpy: items take their places in the order of a hash of seed and item
    (SplitMix64; Steele, Lea and Flood, OOPSLA 2014), and places go to the nodes in turn. A random
    partition, because neighbours in the source (of one class, of one size) would otherwise make one
    node's part heavier.
    """
    if num_nodes < 1 or num_items < 0:
        raise ValueError(
            f"a partition has at least one node and no negative items; got {num_nodes} and "
            f"{num_items}"
        )
    keys = _mixed(np.arange(num_items, dtype=np.uint64) + np.uint64(_mixed_number(seed)))
    result = np.empty(num_items, np.int32)
    result[np.argsort(keys, kind="stable")] = np.arange(num_items, dtype=np.int64) % num_nodes
    return result


def _mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function, modulo 2^64; (n,) -> (n,)."""
    with np.errstate(over="ignore"):
        keys = keys * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ keys >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ keys >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = keys ^ keys >> np.uint64(31)
    return mixed


def _mixed_number(seed: int) -> int:
    """Far apart for neighbouring seeds: their hashes would otherwise be shifts of each other."""
    return int(_mixed(np.array([(seed & _MASK) ^ 0xD1B54A32D192ED03], np.uint64))[0])
