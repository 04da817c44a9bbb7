"""First values of a module on the meta device, of which a rank keeps what the plan gives it.

    once it is made              its ``reset_parameters()``, or ``_reset_parameters()`` (torch's own)
    once one around it is made   the ``_init_weights(module)`` of that, where it has one: what models
                                 of transformers, timm and nanoGPT apply to all that is in them

Modules come as in ``nn.Module.apply``: children first. Constructors draw nothing on the meta device,
so these calls draw what they would have drawn, and values are those of a whole module for a seed.
That holds where modules are made in this order, and draw in these methods only.

What one call writes is on the host at once, as constructors make it: a leaf's tensors, mostly. A
run on the meta device says beforehand what that is (`_written`). Values are rank 0's, as under DDP.
What the plan keeps whole gets memory, in the same Parameter objects, and so do buffers. Of the
others `ParallelModel.rows` has this rank's part: FSDP2 takes them on the meta device, and shards
their first dim by ``torch.chunk``. A tied parameter has the values of the first module that has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.techniques.technique import ParallelModel, shard_axes

Fill = Callable[[], Any]
Slot = tuple[dict[str, Any], str]  # the parameters or buffers of a module, and a name


@torch.no_grad()
def give_first_values(model: ParallelModel) -> None:
    """Give values to what of `model` is on the meta device. A collective call.

    Torch's generator goes on as it does where a whole module is made. Raises PlanError for tensors
    that nothing gives values.
    """
    shards, kept = _shards(model), dict[int, Tensor]()
    owners: dict[int, tuple[int, str]] = {}  # whose values a tied parameter has
    for module, fill in _fills(model.module, set(), set()):
        made = [
            (tensor, value)
            for (held, name), tensor, value in _values(module, fill)
            if owners.setdefault(id(tensor), (id(held), name)) == (id(held), name)
        ]
        model.broadcast(value for _, value in made)  # which moves them to the device
        for tensor, value in made:
            kept[id(tensor)] = _own_rows(value.detach(), shards.get(tensor))
    # Every tensor has values, or none gets them.
    found = [*model.module.named_parameters(), *model.module.named_buffers()]
    for name, tensor in found:
        if tensor.is_meta and id(tensor) not in kept:
            raise PlanError(
                f"{name!r} is on the meta device, and nothing gives it values: its module needs "
                "reset_parameters(), or one around it _init_weights(module); else make it on a "
                "real device (docs/how_to/larger_than_memory.md)"
            )
    for _, tensor in found:
        if tensor in shards and tensor.is_meta:
            model.rows[tensor] = kept.pop(id(tensor))
        elif tensor.is_meta:
            # The object stays, and what users have noted on it; who holds it finds values.
            value = kept.pop(id(tensor)).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, value)


def _shards(model: ParallelModel) -> dict[Tensor, tuple[int, int]]:
    # Into how many parts FSDP2 is to shard parameters, and which of them is this rank's
    rank, found = model.mesh.data_rank(dist.get_rank()), {}
    for block, config in model.configs.items():
        for parameter in model.parameters[block].values():
            if axes := shard_axes(config, is_trained=parameter.requires_grad):
                parts = model.mesh.ranks_along(axes)
                found[parameter] = parts, rank % parts
    return found


def _own_rows(value: Tensor, shard: tuple[int, int] | None) -> Tensor:
    # What this rank keeps of a parameter; the last ranks have no rows of a short one
    if shard is None:
        return value
    parts = value.chunk(shard[0])
    own = parts[shard[1]] if shard[1] < len(parts) else value[:0]
    return own.clone(memory_format=torch.contiguous_format)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    # `value` as a parameter where `tensor` is one, with what users have noted on that
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(value).update(vars(tensor))
    return value


# ---- what gives values ---------------------------------------------------------------------------


def _fills(
    module: nn.Module, made: set[int], applied: set[int]
) -> Iterator[tuple[nn.Module, Fill]]:
    # Yield modules with meta tensors, and what gives them values, as constructors have it
    if id(module) in made or not is_on_meta(module):
        return
    made.add(id(module))
    for child in module.children():
        yield from _fills(child, made, applied)
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(fill := getattr(module, name, None)):
            yield module, fill
            break
    convention = getattr(module, "_init_weights", None)
    if callable(convention) and len(inspect.signature(convention).parameters) == 1:
        parts: list[nn.Module] = []
        module.apply(parts.append)  # children first
        for part in parts:
            if id(part) not in applied and is_on_meta(part):
                applied.add(id(part))
                yield part, partial(convention, part)


# ---- one call ------------------------------------------------------------------------------------


def _values(module: nn.Module, fill: Fill) -> list[tuple[Slot, Tensor, Tensor]]:
    # Run `fill`; return where it has written to meta tensors of `module`, these, and their values
    slots = [
        (held, name)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    before: list[Any] = [held[name] for held, name in slots]

    def put(tensors: dict[int, Tensor]) -> None:
        for (held, name), tensor in zip(slots, before, strict=True):
            held[name] = tensors.get(id(tensor), tensor)

    try:
        # without memory: what has values stays as it is
        stand_ins = {
            id(t): _like(t, torch.empty_like(t, device="meta")) for t in before if not t.is_meta
        }
        put(stand_ins)
        storages = _written(fill)
        written = {
            id(t)
            for (held, name), t in zip(slots, before, strict=True)
            for own in [stand_ins.get(id(t), t)]
            if held[name] is not own or own.untyped_storage()._cdata in storages
        }
        if not written:
            return []
        put({id(t): _like(t, _scratch(t)) for t in before if id(t) in written})
        fill()
        after = [held[name] for held, name in slots]
    finally:
        put({})
    made, known = [], set[int]()
    for slot, tensor, value in zip(slots, before, after, strict=True):
        if tensor.is_meta and id(tensor) in written - known:
            known.add(id(tensor))
            if value.shape != tensor.shape or value.is_meta or value.isnan().any():
                raise PlanError(
                    f"{type(module).__name__} gives {slot[1]!r}, which is on the meta device, no "
                    "values or not all: its reset_parameters() or _init_weights(module) has to set "
                    "each element, and read none"
                )
            made.append((slot, tensor, value))
    return made


def _scratch(tensor: Tensor) -> Tensor:
    # Memory on the host, in which what nobody writes is seen
    if not tensor.is_meta:
        return tensor.clone()
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, torch.nan, device="cpu")
    return torch.zeros_like(tensor, device="cpu")


def _written(fill: Fill) -> set[int]:
    # Run `fill` on the meta device; return the storages that it writes to
    storages: set[int] = set()

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: object, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            named |= kwargs or {}
            for argument in func._schema.arguments:
                value = named.get(argument.name)
                if argument.is_write and isinstance(value, Tensor):
                    storages.add(value.untyped_storage()._cdata)
            return func(*args, **(kwargs or {}))

    with torch.random.fork_rng(devices=()), Writes():
        fill()
    return storages
