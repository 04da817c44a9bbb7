"""The residual of methods where every rank keeps its own, of whole gradients: flat per bucket,
found by parameter name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketLayout


class LocalResidual:
    """One float32 value per gradient element, not scaled by the loss.

    Kept flat in the layout of the buckets. When DDP lays its buckets anew, a bucket takes its
    parameters' values along by name; each parameter is in one bucket at a time, so other buckets
    may be in flight meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[int, tuple[BucketLayout, Tensor]] = {}
        self._by_name: dict[str, Tensor] = {}  # (numel,) each, views of the flat ones

    def flat(self, bucket: Bucket) -> Tensor:
        """Return the residual (n,) of `bucket`, zeros at first; what is written there is kept."""
        layout = bucket.layout
        known = self._flat.get(bucket.index)
        if known is not None and known[0] == layout:
            return known[1]
        flat = torch.zeros(bucket.buffer.numel(), device=self.device)
        for name, part in zip(layout.names, layout.slices, strict=True):
            if name in self._by_name:
                flat[part] = self._by_name[name]
            self._by_name[name] = flat[part]
        self._flat[bucket.index] = (layout, flat)
        return flat

    def norm(self) -> float:
        """Return the L2 norm of all of it."""
        if not self._by_name:
            return 0.0
        return float(torch.stack(torch._foreach_norm(list(self._by_name.values()))).norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameter name -> residual (numel,)."""
        return {name: value.clone() for name, value in self._by_name.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over `state`; parameters that it lacks start at zero."""
        self._flat.clear()
        self._by_name = {
            name: value.to(self.device, torch.float32, copy=True) for name, value in state.items()
        }
