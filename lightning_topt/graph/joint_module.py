"""A module that runs the batches of several ranks at once, though each rank calls it with its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class JointModule(NamedTuple):
    """The module at path `module` runs on the samples of all ranks of a tensor group.

    `inputs` and `outputs` have, for each tensor among its arguments and results in order, the dim
    of its samples; None for a tensor that does not depend on the batch, and is equal on all ranks.
    """

    module: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def holds(self, path: str) -> bool:
        """Return whether `path` is the module, or something in it."""
        return path == self.module or path.startswith(f"{self.module}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"module": self.module, "inputs": [*self.inputs], "outputs": [*self.outputs]}


def joint_from_value(value: Any, *, name: str) -> tuple[JointModule, ...]:
    """Read what `to_dict` wrote of several. Raises ValueError that names the entry."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of modules, got {type(value).__name__}")
    found = tuple(_one(entry, f"{name}[{index}]") for index, entry in enumerate(value))
    for joint in found:
        if inside := [
            other.module for other in found if other is not joint and joint.holds(other.module)
        ]:
            raise ValueError(
                f"{name}: module {inside[0]!r} is {joint.module!r}, or inside of it; name one of "
                "them"
            )
    return found


def _one(entry: Any, name: str) -> JointModule:
    if not isinstance(entry, Mapping) or set(entry) != set(JointModule._fields):
        raise ValueError(
            f"{name} must be a mapping with the entries {', '.join(JointModule._fields)}"
        )
    module, inputs, outputs = (entry[field] for field in JointModule._fields)
    if not isinstance(module, str) or not module:
        raise ValueError(f"{name}.module must be the path of a module, got {module!r}")
    return JointModule(module, _dims(inputs, f"{name}.inputs"), _dims(outputs, f"{name}.outputs"))


def _dims(value: Any, name: str) -> tuple[int | None, ...]:
    if not isinstance(value, list | tuple) or not all(
        each is None or (type(each) is int and 0 <= each < 64) for each in value
    ):
        raise ValueError(
            f"{name} must be a list with the dim of the samples of each tensor, or null; got "
            f"{value!r}"
        )
    return tuple(value)
