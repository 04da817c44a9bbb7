"""Costs of a chain of blocks, each under several configurations: what a step is made of.

Blocks run forward in order and backward in reverse. Computation does not wait for the network;
exchanges of gradients run on one network in the order in which they become ready, beside the
backward of earlier blocks. For blocks n = 0 ... N-1

    step_seconds   when both are done: computation takes the sum of seconds; an exchange starts
                   when its block's backward is over and the one before it has finished; backward
                   passes are the last part of computation, in reverse
    peak_bytes     sum of static + the largest of
                   held of j < n + forward_hump of n + late of j > n     forward of n
                   held of all                                           forward is over
                   kept of j < n + hump of n + late of j > n             backward of n
                   late of all + update_bytes                            the optimizer step

`evaluate` says the same in arrays. The search folds blocks from the last to the first with five
numbers (`search_chain`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_COSTS = ("seconds", "backward", "exchange", "static", "kept", "late", "hump")
_FORWARD = {"held": "kept", "forward_hump": "hump"}  # what they are where they are not given


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs of one block under each of its `configs`, arrays (config,); inf forbids.

    Args:
        configs: names of the configurations.
        seconds: computation of the whole step: forward, backward, update, and exchanges that it has
            to wait for.
        backward: the part of `seconds` during which exchanges of later blocks run: its backward.
        exchange: seconds of the network for its gradients, from when its backward is over.
        static: bytes that are there all the step.
        kept: bytes while later blocks run backward.
        late: bytes from the end of its backward to the end of the step, and in the next step until
            its forward: its gradients.
        hump: peak bytes while it runs backward, above what is listed for it and other blocks.
        held: bytes from its forward to the end of all forwards; None: as `kept`.
        forward_hump: peak bytes while it runs forward, like `hump`; None: as `hump`.
    """

    configs: tuple[Any, ...]
    seconds: Array
    backward: Array
    exchange: Array
    static: Array
    kept: Array
    late: Array
    hump: Array
    held: Array | None = None
    forward_hump: Array | None = None

    def cost(self, name: str) -> Array:
        """Return the costs (config,) of this name.

        Where `held` and `forward_hump` are not given, what stands for them.
        """
        given: Array | None = getattr(self, name)
        return self.cost(_FORWARD[name]) if given is None else given

    @property
    def splits_forward(self) -> bool:
        """Whether forward takes other bytes than backward."""
        return self.held is not None or self.forward_hump is not None


@dataclass(frozen=True, eq=False)
class ChainTable:
    """A chain of blocks, in the order of forward.

    `blocks` are the distinct ones, ``order[n]`` says which of them block n is. Every plan also pays
    `fixed_seconds` and `fixed_bytes`, and `update_bytes` while the optimizer steps. `names` of the
    blocks of the chain are for the answer; left out, they are numbers.
    """

    blocks: tuple[BlockCosts, ...]
    order: tuple[int, ...]
    fixed_seconds: float = 0.0
    fixed_bytes: float = 0.0
    update_bytes: float = 0.0
    names: tuple[str, ...] = ()

    def block(self, n: int) -> BlockCosts:
        """Return the costs of block `n` of the chain."""
        return self.blocks[self.order[n]]

    def evaluate(self, plans: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return (step_seconds, peak_bytes) (n,) of `plans` (n, block).

        Plans are indices of configurations.
        """
        # by name of the cost: (block, n)
        shape = len(self.order), len(plans)
        chosen = {
            name: np.array(
                [self.block(n).cost(name)[plans[:, n]] for n in range(shape[0])]
            ).reshape(shape)
            for name in (*_COSTS, *_FORWARD)
        }
        # sums over blocks (n,)
        seconds, static = chosen["seconds"].sum(axis=0), chosen["static"].sum(axis=0)
        # the step is over when computation and network are
        step = np.maximum(
            seconds, self._network_seconds(seconds, chosen["backward"], chosen["exchange"])
        )
        moving = [  # backward, forward, the ends of both, the update
            self._moving_bytes(chosen["kept"], chosen["late"], chosen["hump"]),
            self._moving_bytes(chosen["held"], chosen["late"], chosen["forward_hump"]),
            chosen["kept"].sum(axis=0),
            chosen["held"].sum(axis=0),
            chosen["late"].sum(axis=0) + self.update_bytes,
        ]
        return step + self.fixed_seconds, static + np.max(moving, axis=0) + self.fixed_bytes

    @staticmethod
    def _network_seconds(seconds: Array, backward: Array, exchange: Array) -> Array:
        # The seconds (n,) when the last exchange is over
        finished = np.full_like(seconds, -np.inf)
        for n in range(len(backward) - 1, -1, -1):  # in the order of backward
            # backward passes of blocks before n are still to come then
            ready = seconds - backward[:n].sum(axis=0)
            finished = np.maximum(finished, ready) + exchange[n]
        return finished

    @staticmethod
    def _moving_bytes(kept: Array, late: Array, hump: Array) -> Array:
        # The most bytes (n,) while a block runs, above what is static
        # while block n runs: blocks before it keep, blocks behind it are late
        peaks = [
            kept[:n].sum(axis=0) + hump[n] + late[n + 1 :].sum(axis=0) for n in range(len(hump))
        ]
        return np.asarray(np.max(peaks, axis=0)) if peaks else np.zeros(hump.shape[1])
