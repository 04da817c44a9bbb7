"""Blocks and configurations that stand in many plans of a file, each written once; plans have their
places instead.

A search of 81 blocks may find a thousand plans of a few dozen configurations: 68 MB of text with
every block written out, one with places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_topt.costs.plain_values import shown, text, whole
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_values import config_to_dict

_PLACES = ("blocks", "configs")


@dataclass
class SharedBlocks:
    """`SharedBlocks` number names of blocks and plain configurations in the order in which they are
    met.

    Plans that were written have to live as long.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    configs: dict[str, int] = field(default_factory=dict)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def plain(self, plan: ParallelPlan) -> dict[str, Any]:
        """Return `plan` as `ParallelPlan.to_dict` does, but for its stages, which hold places."""
        stages = [
            {
                "blocks": [
                    self.blocks.setdefault(each.block, len(self.blocks)) for each in stage.blocks
                ],
                "configs": [self._place_of(each.config, plan.mesh) for each in stage.blocks],
            }
            for stage in plan.stages
        ]
        return {**plan.to_dict(stages=False), "stages": stages}

    def _place_of(self, config: OpConfig, mesh: Mesh) -> int:
        key = id(config), id(mesh)  # plans of a search share objects, and comparing these is slow
        if key not in self._known:
            plain = json.dumps(config_to_dict(config, mesh))
            self._known[key] = self.configs.setdefault(plain, len(self.configs))
        return self._known[key]

    @property
    def tables(self) -> dict[str, list[Any]]:
        """The two lists, as plain values."""
        return {"blocks": [*self.blocks], "configs": [json.loads(plain) for plain in self.configs]}


@dataclass(frozen=True)
class BlockTables:
    """`BlockTables` are the two lists of a file that is read. Raises ValueError for what they
    cannot be.
    """

    blocks: list[str]
    configs: list[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, list) or not isinstance(self.configs, list):
            raise ValueError("blocks and configs must be lists")
        for number, name in enumerate(self.blocks):
            text(name, name=f"blocks[{number}]")
        for number, config in enumerate(self.configs):
            if not isinstance(config, dict) or "block" in config:
                raise ValueError(
                    f"configs[{number}] must be a mapping without a block, got {shown(config)}"
                )

    def written_out(self, plan: Any, *, name: str) -> Any:
        """Return what `ParallelPlan.from_dict` takes. Raises ValueError for places that are
        none.
        """
        if not isinstance(plan, dict) or not isinstance(plan.get("stages"), list):
            raise ValueError(f"{name} must be a mapping with a list of stages")
        return {
            **plan,
            "stages": [self._stage(entry, name=f"{name}.stages") for entry in plan["stages"]],
        }

    def _stage(self, entry: Any, *, name: str) -> dict[str, Any]:
        if not isinstance(entry, dict) or set(entry) != {*_PLACES}:
            raise ValueError(f"each of {name} has the entries {', '.join(_PLACES)}")
        places = [entry[key] for key in _PLACES]
        if not all(isinstance(each, list) for each in places) or len(places[0]) != len(places[1]):
            raise ValueError(f"blocks and configs of {name} must be lists of one length")
        return {
            "blocks": [
                {
                    "block": _at(self.blocks, block, name="blocks"),
                    **_at(self.configs, config, name="configs"),
                }
                for block, config in zip(*places, strict=True)
            ]
        }


def _at(values: list[Any], place: Any, *, name: str) -> Any:
    if whole(place, name=f"a place in {name}", least=0) >= len(values):
        raise ValueError(f"a place in {name} must be below {len(values)}, got {place}")
    return values[place]
