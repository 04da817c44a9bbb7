"""Memory for batches, used again once nobody holds the batch: new memory costs a page fault every 4
kB, as much as the copy.

(glibc gives the memory of a large tensor back to the system when it is freed, unless something lies
behind it by chance.)
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST_BYTES = 1 << 18  # smaller ones stay in the allocator's own lists
_MOST_BLOCKS = 8


class BatchMemory:
    """Tensors in blocks of which at most `most_blocks` are kept; those that are in use longer
    belong to their users alone.

    A block is free when no tensor, view or array of it is left: they all hold the block's array,
    which counts its references.
    """

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._blocks: deque[npt.NDArray[np.uint8]] = deque(maxlen=most_blocks)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor like `torch.empty`, on the CPU; a large one cannot be resized."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:  # until the tensor holds the block
            return torch.from_numpy(self._free_block(nbytes)).view(dtype).view(shape)

    def _free_block(self, nbytes: int) -> npt.NDArray[np.uint8]:
        # the one used last may be in the processor's cache yet
        for index in reversed(range(len(self._blocks))):
            # Two references: of the deque, and of the call.
            if self._blocks[index].nbytes == nbytes and sys.getrefcount(self._blocks[index]) == 2:
                block = self._blocks[index]
                del self._blocks[index]
                break
        else:
            block = np.empty(nbytes, np.uint8)
        self._blocks.append(block)  # the one used last goes last
        return block


MEMORY = BatchMemory()  # of the process
os.register_at_fork(after_in_child=MEMORY.__init__)  # type: ignore[misc]  # the parent's lock may be held, its blocks are its own
