"""How parameters that FSDP2 gathers travel, and how they arrive.

FSDP2 sends the rows of a shard as they are, and hands modules contiguous tensors. Some parameters
are gathered otherwise, by the functions that it looks for on their local tensors
(`fsdp_pre_all_gather` and `fsdp_post_all_gather`):

    parameters                             travel                    arrive
    matrices, if the plan says bfloat16    in half the bytes         in float32, rounded
    those that a model has channels-last   in that order of memory   channels-last

Shards stay as FSDP2 has them: float32, contiguous, and so are their gradients and states.

[Note: rounded matrices] Under autocast torch rounds the matrices of products and convolutions to
bfloat16 before it uses them. To send them so changes nothing there, bit for bit. Vectors (norms,
biases) and tables of Embedding modules, which autocast leaves alone, travel in float32. Any other
parameter of two or more dims that is read in float32 is seen rounded: positions that are added, a
penalty on weights, a layer that switches autocast off. FSDP2's `MixedPrecisionPolicy` would leave
gathered parameters in bfloat16, which takes half their memory too. But modules then have all their
parameters in it: norms round theirs, BatchNorm and torch's CPU norms refuse the mixture with
float32, and gradients are rounded before they are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TABLES = (nn.Embedding, nn.EmbeddingBag)
_BY_DIMS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Return whether a tensor is channels-last, by its strides; else the contiguous format."""
    found = _BY_DIMS.get(tensor.dim())
    if found is None or tensor.stride() == _strides(tensor.shape, torch.contiguous_format):
        return torch.contiguous_format
    return found if tensor.stride() == _strides(tensor.shape, found) else torch.contiguous_format


def _strides(shape: Iterable[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(tuple(shape), memory_format=memory_format, device="meta").stride()


def narrow_of(module: nn.Module, named: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """Return those of the parameters `named` of `module` that travel in bfloat16 if a plan says so.

    See [Note: rounded matrices].
    """
    return {
        parameter
        for parameter, owners in _owners(module, named)
        if parameter.dim() > 1
        and parameter.dtype == torch.float32
        and not any(isinstance(owner, TABLES) for owner, _ in owners)
    }


@dataclass
class Gathers:
    """The parameters of one model that are gathered in another way than FSDP2's own."""

    ways: list[_Way] = field(default_factory=list)

    def add(
        self, module: nn.Module, named: Mapping[str, nn.Parameter], *, dtype: torch.dtype | None
    ) -> list[_Way]:
        """Find those of the parameters `named`, before they are sharded; return them.

        Matrices travel as `dtype`, if there is one.
        """
        found, narrow = [], narrow_of(module, named) if dtype is not None else set()
        for parameter, owners in _owners(module, named):
            memory_format = memory_format_of(parameter)
            if parameter in narrow or memory_format != torch.contiguous_format:
                sent = dtype if parameter in narrow and dtype is not None else parameter.dtype
                strides = _strides(parameter.shape, memory_format)
                found.append(_Way(*owners[0], sent, memory_format, strides))
        self.ways += found
        return found

    def attach(self, *_: Any) -> None:
        """Let FSDP2 find how they are gathered; a hook before the root's forward.

        Calls such as ``module.to`` give shards new local tensors, which know nothing of it.
        """
        for way in self.ways:
            way.attach()


def _owners(
    module: nn.Module, named: Mapping[str, nn.Parameter]
) -> Iterator[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    # Yield each parameter once, with the modules that have it and its names there
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for name, parameter in named.items():
        path, _, own = name.rpartition(".")
        found.setdefault(parameter, []).append((module.get_submodule(path), own))
    yield from found.items()


@dataclass(eq=False)
class _Way:
    """How one parameter of `module` is gathered."""

    module: nn.Module
    name: str
    sent: torch.dtype
    memory_format: torch.memory_format
    strides: tuple[int, ...]  # of the gathered parameter
    _whole: Tensor | None = None  # memory of the gathered parameter, if it travels narrow
    _was_sent: bool = False

    def attach(self) -> None:
        parameter = self.module._parameters[self.name]
        if isinstance(parameter, DTensor):
            local: Any = parameter._local_tensor
            if not hasattr(local, "fsdp_pre_all_gather"):
                local.fsdp_pre_all_gather = self.send
                local.fsdp_post_all_gather = self.receive

    # FSDP2 calls these two by position, and counts the parameters of the first.

    @torch.no_grad()
    def send(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor], None]:
        """Return what this rank sends: its rows (rows, ...), padded, in the order of memory."""
        parameter = self.module._parameters[self.name]
        assert isinstance(parameter, DTensor)
        local, rows = parameter._local_tensor, -(-outer_size[0] // mesh.size())
        shape = (rows, *outer_size[1:])
        sent = torch.empty(
            shape, dtype=self.sent, device=local.device, memory_format=self.memory_format
        )
        sent[: len(local)].copy_(local)
        sent[len(local) :].zero_()
        self._was_sent = True
        return (sent.as_strided(shape, outer_stride),), None  # as if contiguous: FSDP2 flattens it

    def receive(
        self,
        outputs: tuple[Tensor],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return what arrived and the memory beside `outputs` that it takes; None with `out`."""
        (arrived,) = outputs
        if arrived.dtype == dtype:
            return None if out is not None else (arrived, ())
        if self._whole is None:
            # autograd cannot save tensors of the inference mode, in which an evaluation may begin
            with torch.inference_mode(False):
                self._whole = torch.empty(arrived.shape, dtype=dtype, device=arrived.device)
        with (
            torch.no_grad(),
            torch.autograd.grad_mode._unsafe_preserve_version_counter(self._whole),
        ):
            self._whole.copy_(arrived)
        arrived.untyped_storage().resize_(0)  # FSDP2 takes it again for the next gather
        return None if out is not None else (self._whole, (self._whole,))

    @torch.no_grad()
    def arrange(self, *_: Any) -> None:
        """Give the gathered parameter its strides: once, since FSDP2 keeps the Parameter.

        Autograd gives its gradient the same; FSDP2 copies that into contiguous rows.
        """
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        if isinstance(parameter, DTensor):
            return
        assert self._was_sent, f"FSDP2 gathered {self.name!r} as if it were contiguous"
        if parameter.stride() != self.strides:
            parameter.data = parameter.data.as_strided(parameter.shape, self.strides)

    def __deepcopy__(self, memo: object) -> _Way:
        return self  # a copy of a shard has no module of its own
