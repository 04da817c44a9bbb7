"""Tensors with their names as one flat vector."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_topt.communication.bucket import is_finite

Named = Iterable[Tensor | tuple[str, Tensor]]


class NamedTensors:
    """Tensors of one device with their names, seen as one flat float32 vector (n,)."""

    def __init__(self, tensors: Named) -> None:
        pairs = [
            item if isinstance(item, tuple) else (str(index), item)
            for index, item in enumerate(tensors)
        ]
        self.tensors = dict(pairs)
        if len(self.tensors) < len(pairs):
            raise ValueError(
                "two parameters or buffers have the same name: give them as "
                "module.named_parameters() does"
            )
        devices = {tensor.device for tensor in self.tensors.values()}
        if len(devices) > 1:
            raise ValueError(
                "OuterSteps takes tensors of one device; got "
                f"{', '.join(sorted(map(str, devices)))}"
            )
        self.numel = sum(tensor.numel() for tensor in self.tensors.values())

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return name -> view of `flat` (n,) in the tensor's shape."""
        parts = torch.split(flat, [tensor.numel() for tensor in self.tensors.values()])
        return {
            name: part.view(self.tensors[name].shape)
            for name, part in zip(self.tensors, parts, strict=True)
        }

    def read(self) -> Tensor:
        """Return the tensors, copied to a new flat vector (n,)."""
        flat = [tensor.detach().reshape(-1).float() for tensor in self.tensors.values()]
        return torch.cat(flat) if flat else torch.empty(0)

    def write(self, flat: Tensor) -> None:
        """Copy `flat` (n,) to the tensors, rounded to their dtypes."""
        with torch.no_grad():
            for name, part in self.split(flat).items():
                self.tensors[name].copy_(part)

    def is_finite(self) -> bool:
        """Return whether no element is infinite or NaN, in one pass where that is so."""
        tensors = [tensor.detach() for tensor in self.tensors.values()]
        sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
        return not sums or bool(torch.stack(sums).isfinite().all()) or all(map(is_finite, tensors))

    def load(self, flat: Tensor, state: Mapping[str, Tensor], *, what: str) -> None:
        """Copy `state`, by name, to `flat` (n,). Raises ValueError where names or shapes are not
        those of the tensors.
        """
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        given = {name: tensor.shape for name, tensor in state.items()}
        if shapes != given:
            wrong = sorted(
                name for name in {*shapes, *given} if shapes.get(name) != given.get(name)
            )
            raise ValueError(
                f"the saved {what} is of another model: {', '.join(wrong[:3])} differ in name or "
                "shape"
            )
        for name, part in self.split(flat).items():
            part.copy_(state[name])


def averaged_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters whose gradients DDP averages where it is to ignore the names
    `ignored`.

    DDP asks for a parameter of the module itself as ``".scale"`` here, and as ``"scale"`` where it
    broadcasts values.
    """
    averaged = {
        parameter
        for prefix, submodule in module.named_modules()
        for name, parameter in submodule.named_parameters(recurse=False)
        if parameter.requires_grad and f"{prefix}.{name}" not in ignored
    }
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter in averaged
    }


def equal_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters that DDP keeps equal on all ranks: it broadcasts them, and
    averages their gradients.
    """
    return {
        name: parameter
        for name, parameter in averaged_parameters(module, ignored).items()
        if name not in ignored
    }
