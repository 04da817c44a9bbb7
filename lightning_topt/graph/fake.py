"""Modules whose tensors have shapes but no memory: torch's fake tensors
(torch._subclasses.fake_tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.module_copy import TensorCopies, copy_module
from lightning_topt.graph.structures import map_tensors, tensors_in

__all__ = ["fake_copy", "map_tensors", "tensors_in"]

T = TypeVar("T", bound=nn.Module)
Like = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device | None]  # size, stride


def fake_copy(module: T, *, device: torch.device | str = "cpu") -> tuple[T, FakeTensorMode]:
    """Return a deep copy whose parameters, buffers and other tensors are fake, and the mode under
    which to run it.

    Nothing is allocated; tensors that share storage in `module` (tied weights) share it in the
    copy. Tensors of any device, ``meta`` included, become tensors of `device`. The trainer, data
    sets, and any attribute that cannot be copied, are shared with `module`. On the copy `log`,
    `log_dict`, `print`, `optimizers`, `lr_schedulers`, `manual_backward` and the loggers do
    nothing. Run the copy's methods under the returned mode: ``with mode:
    copy.configure_optimizers()``.

    Raises CaptureError, a ValueError, when `module` has lazy parameters that no forward has given a
    shape, or tensors that are not strided.
    """
    mode = ShapeMode(allow_non_fake_inputs=True)
    return copy_module(module, _Fakes(mode, torch.device(device)), fake=True), mode


class ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Knows the shapes of kernels that torch 2.13 refuses without memory, and runs: products of
    groups but in bfloat16.
    """

    def dispatch(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            left, right = args[0], args[1]
            groups: tuple[int, ...] = ()
            # rows and columns of each group; by `offs` the summed dim is in groups
            if left.ndim == right.ndim:
                groups = (left.shape[0] if left.ndim == 3 else args[2].shape[0],)
            shape = *groups, left.shape[-2], right.shape[-1]
            stride = contiguous_stride(shape)
            return empty_fake(self, like=(shape, stride, left.dtype, left.device))
        return super().dispatch(func, types, args, kwargs)


class _Fakes(TensorCopies):
    """Makes fake tensors, each tensor and each storage once."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(device)
        self.mode = mode
        self.bases: dict[int, Tensor] = {}

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"a tensor with layout {tensor.layout} cannot be captured; give the strategy a "
                    "plan",
                    needs_values=True,
                )
            fake = self._strided(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # as `nn.Parameter` does, after a slow `detach`
        # What users note on a parameter, such as that it has a learning rate of its own.
        vars(fake).update(
            {name: value for name, value in vars(tensor).items() if name not in vars(fake)}
        )
        return fake

    def _strided(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) and tensor.numel() > 1 and not any(tensor.stride()):
            # One element in the place of a parameter that another rank keeps.
            stride = contiguous_stride(tensor.shape)
            return empty_fake(self.mode, like=(tensor.shape, stride, tensor.dtype, self.device))
        if storage.nbytes() == tensor.nbytes and storage._cdata not in self.bases:
            fake = empty_fake(
                self.mode, like=(tensor.shape, tensor.stride(), tensor.dtype, self.device)
            )
            self.bases[storage._cdata] = fake
            return fake
        with self.mode:
            if storage._cdata not in self.bases:
                self.bases[storage._cdata] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device=self.device
                )
            shared = self.bases[storage._cdata].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return view.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def empty_fake(mode: FakeTensorMode, *, like: Like) -> Tensor:
    """Return a new fake tensor of `mode`, without passing through it, which would take ten times as
    long.
    """
    size, stride, dtype, device = like
    with _disable_current_modes():
        return FakeTensor(
            mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device
        )


def fake_device(func: OpOverload, args: tuple[Any, ...]) -> torch.device | None:
    """Return what `func` returns for a fake tensor where it asks for the device, in a tenth of its
    time; None for all else.
    """
    if func is not torch.ops.prim.device.default or type(args[0]) is not FakeTensor:
        return None
    return None if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor of this shape, without making one under
    whatever mode is on.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
