"""Names that people use for placements: ``ddp``, ``zero1`` to ``zero3``, ``hybrid`` and
``hybrid_zero2``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Shard, Storage


@dataclass(frozen=True)
class Preset:
    """A ZeRO level over all data axes of a mesh, or over the last one only (`inner`: hybrid
    sharding).
    """

    level: int
    inner: bool = False

    def storage(self, mesh: Mesh) -> Storage:
        """Return the placements on `mesh`."""
        over = mesh.data_axes[-1:] if self.inner else mesh.data_axes
        return Storage.zero(self.level, axes=len(mesh.axes), over=over)


PRESETS = {
    "ddp": Preset(0),
    "zero1": Preset(1),
    "zero2": Preset(2),
    "zero3": Preset(3),
    "hybrid_zero2": Preset(2, inner=True),
    "hybrid": Preset(3, inner=True),
}
_LEVELS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def describe_config(config: OpConfig, mesh: Mesh) -> str:
    """Return a few words for people: ``"hybrid ZeRO-3 + recompute"``, ``"DDP + split"`` with slices
    of parameters along tensor axes, ``"DDP + split activations"`` where activations between calls
    are in slices too, or alone.
    """
    storage = config.storage
    sharded = storage.sharded_axes("optimizer_state")
    words = [
        f"{'hybrid ' if 0 < len(sharded) < len(mesh.data_axes) else ''}{_LEVELS[storage.level]}"
    ]
    words += (
        ["split"]
        if any(isinstance(p, Shard) for _, placements in config.parameters for p in placements)
        else []
    )
    between = [
        placements[axis]
        for placements in (*config.inputs, *config.outputs)
        for axis in mesh.tensor_axes
    ]
    words += (
        ["split activations"] if any(isinstance(placement, Shard) for placement in between) else []
    )
    words += ["recompute"] if config.recompute else []
    return " + ".join(words)
