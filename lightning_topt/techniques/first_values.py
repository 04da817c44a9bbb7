"""First values of a module on the meta device, of which a rank keeps what the plan gives it.

    when it is made              its ``reset_parameters()`` (``_reset_parameters()``, torch's own)
    when one around it is made   the ``_init_weights(module)`` of that, where it has one, as models
                                 of transformers, timm and nanoGPT apply it to all that is in them

Children come first, as in ``nn.Module.apply``. Constructors draw nothing on the meta device, so
these calls draw what they would have drawn: values are those of a whole module for a seed. That
holds where modules are made in this order, and draw in these methods only.

What one call writes is on the host at once, as constructors make it: a leaf's tensors, mostly. A
run on the meta device says beforehand what that is. Values are rank 0's, as under DDP. What the
plan keeps whole gets memory, in the same Parameter objects, and so do buffers. Of the others
`ParallelModel.rows` has this rank's part: FSDP2 takes them on the meta device, and shards their
first dim. A tied parameter has the values of the first module that has it.

Where the run names weights on a disk (`RunOptions.first_values`), these come first: each rank reads
its rows of what is sharded, and all of what is kept whole.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topt.costs.measuring import on_every_rank
from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.optim.mapped_memory import in_file
from lightning_topt.techniques.technique import ParallelModel, shard_axes
from lightning_topt.techniques.weight_files import StoredTensor, stored_weights

Fill = Callable[[], Any]


@torch.no_grad()
def give_first_values(model: ParallelModel) -> None:
    """Give values to what of `model` is on the meta device. A collective call.

    Torch's generator goes on as it does where a whole module is made. Raises PlanError for tensors
    that nothing gives values, and for weights on a disk that are not those of the module.
    """
    # Into how many parts parameters are to be sharded, and which of them is this rank's.
    rank, shards = model.mesh.data_rank(dist.get_rank()), dict[Tensor, tuple[int, int]]()
    offloaded = set[Tensor]()
    for block, config in model.configs.items():
        for parameter in model.parameters[block].values():
            if axes := shard_axes(config, is_trained=parameter.requires_grad):
                parts = model.mesh.ranks_along(axes)
                shards[parameter] = parts, rank % parts
                if config.storage.offload and model.device.type == "cpu":
                    offloaded.add(parameter)
    is_stored = model.options.first_values is not None
    stored = on_every_rank(partial(_stored, model)) if is_stored else {}
    # What each call gives; one that leaves out elements, or reads some, leaves NaN.
    kept, owners = dict[Tensor, Tensor](), dict[Tensor, Any]()
    for held, _, tensor in _places(model.module):
        owners.setdefault(tensor, held)
    for module, fill in _fills(model.module, set(), set()):
        if stored and all(tensor in stored for *_, tensor in _places(module)):
            continue
        for tensor, value in _values(module, fill, owners).items():
            kept.pop(tensor, None)
            if value.shape == tensor.shape and not value.isnan().any():
                model.broadcast([value])  # which moves it to the device
                kept[tensor] = value.detach()
                if tensor in shards:
                    parts, own = shards[tensor]
                    rows = _chunk_with_empty(value, parts, dim=0)[own]
                    kept[tensor] = in_file(rows) if tensor in offloaded else rows.clone()
    for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]:
        if tensor in stored:  # what has memory is sharded later
            part = shards.get(tensor, (1, 0)) if tensor.is_meta else (1, 0)
            value = _read_part(stored[tensor], *part).to(model.device, tensor.dtype)
            kept[tensor] = in_file(value) if tensor in offloaded else value
        if not tensor.is_meta:
            if tensor in stored:
                tensor.copy_(kept.pop(tensor))
            continue
        if tensor not in kept:
            raise PlanError(
                f"{name!r} is on the meta device, and nothing gives all of it values: its module "
                "needs reset_parameters(), or one around it _init_weights(module); else make it on "
                "a real device (docs/how_to/larger_than_memory.md)"
            )
        value = kept.pop(tensor)
        if tensor in shards:
            model.rows[tensor] = value
        else:  # the object stays, with what users have noted on it
            torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))


@torch.no_grad()
def draw_first_values(module: nn.Module) -> Tensor | None:
    """Draw the values of `module` once for nothing, where it is on the meta device.

    What draws before it gets them then draws what it would after a whole module was made. Returns
    the state of torch's generator from which they are to be drawn again (`drawn_from`).
    """
    if not is_on_meta(module):
        return None
    state = torch.get_rng_state()
    owners = {tensor: held for held, _, tensor in reversed([*_places(module)])}
    for part, fill in _fills(module, set(), set()):
        _values(part, fill, owners)
    return state


@contextmanager
def drawn_from(state: Tensor | None) -> Generator[None]:
    """Let torch's generator begin at `state` within, and go on afterwards as if nothing drew."""
    after = torch.get_rng_state()
    torch.set_rng_state(after if state is None else state)
    try:
        yield
    finally:
        if state is not None:
            torch.set_rng_state(after)


# ---- weights on a disk ---------------------------------------------------------------------------


def _stored(model: ParallelModel) -> dict[Tensor, StoredTensor]:
    # The weights that the run names, by the tensors of the module that they are for
    module, given = model.module, model.options.first_values
    assert given is not None
    named: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found, unknown = dict[Tensor, StoredTensor](), list[str]()
    for prefix, path in (given if isinstance(given, Mapping) else {None: given}).items():
        weights = stored_weights(path)
        prefix = _prefix_of(weights, named, path) if prefix is None else prefix
        before = len(found)
        for name, tensor in weights.items():
            place = f"{prefix}.{name}" if prefix else name
            if (own := named.get(place)) is None:
                unknown.append(name)
            elif tuple(own.shape) != tensor.shape:
                raise PlanError(
                    f"{place!r} has the shape {tuple(own.shape)}, and {name!r} in "
                    f"{tensor.file.name} has {tensor.shape}: make the model by the configuration "
                    "of these weights, or name others as first_values"
                )
            else:
                found[own] = tensor
        if len(found) == before:
            raise PlanError(_unlike(weights, named, path))
    if dist.get_rank() == 0:
        drawn = [name for name, p in module.named_parameters() if p.is_meta and p not in found]
        for names, text in (
            (drawn, "no file of first_values has {}: reset_parameters() or the like fills them"),
            (unknown, "first_values has {}, which the model does not have: they are not read"),
        ):
            if names:
                some = ", ".join(names[:20]) + (
                    f" and {len(names) - 20} more" if names[20:] else ""
                )
                warnings.warn(f"topt: {text.format(some)}", stacklevel=2)
    return found


def _prefix_of(weights: Collection[str], named: Mapping[str, Tensor], path: object) -> str:
    # Which submodule has most of the tensors that `weights` names
    held = defaultdict[str, set[Tensor]](set)
    for name, tensor in named.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            if ".".join(parts[depth:]) in weights:
                held[".".join(parts[:depth])].add(tensor)
    most = max(map(len, held.values()), default=0)
    best = [prefix for prefix, tensors in held.items() if len(tensors) == most]
    if not best:
        raise PlanError(_unlike(weights, named, path))
    if any(held[prefix] != held[best[0]] for prefix in best):
        raise PlanError(
            f"the weights in {str(path)!r} may be those of {best[0]!r} or {best[1]!r}: say of "
            f"which they are, first_values={{{best[0]!r}: ...}}"
        )
    return best[0]


def _unlike(weights: Collection[str], named: Collection[str], path: object) -> str:
    return (
        f"no tensor in {str(path)!r} ({next(iter(weights))!r}, ...) has the name that one has in "
        f"the model ({next(iter(named), None)!r}, ...) or in a submodule of it: name other "
        "weights, or the submodule, first_values={'net': ...}"
    )


def _read_part(stored: StoredTensor, parts: int, own: int) -> Tensor:
    # Read the part of a tensor that `torch.chunk` gives this rank
    if parts == 1:
        return stored.read()
    count = stored.shape[0]
    size = -(-count // parts)
    rows = range(min(own * size, count), min((own + 1) * size, count))
    return stored.read(rows) if rows else torch.empty(0, dtype=stored.dtype)


# ---- values that methods give --------------------------------------------------------------------


def _fills(
    module: nn.Module, made: set[int], applied: set[int]
) -> Iterator[tuple[nn.Module, Fill]]:
    # Yield modules with meta tensors, and what gives them values, as constructors have it
    if id(module) in made or not is_on_meta(module):
        return
    made.add(id(module))
    for child in module.children():
        yield from _fills(child, made, applied)
    own = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if own is None and type(module).__module__ == "transformers.pytorch_utils":
        own = partial(_fill_conv1d, module)
    if own is not None:
        yield module, own
    convention = getattr(module, "_init_weights", None)
    if callable(convention) and len(inspect.signature(convention).parameters) == 1:
        parts: list[nn.Module] = []
        module.apply(parts.append)  # children first
        for part in parts:
            if id(part) not in applied and is_on_meta(part):
                applied.add(id(part))
                yield part, partial(convention, part)


def _fill_conv1d(module: Any) -> None:
    # Draw what the constructor of GPT-2's layers draws, which has no method for it
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


def _values(module: nn.Module, fill: Fill, owners: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    # Run `fill`; return the meta tensors of `module` that it writes, with what their owners have
    places = [*_places(module)]

    def put(device: str, tensors: Collection[Tensor]) -> dict[Tensor, Tensor]:
        new = {tensor: _like(tensor, device) for tensor in tensors}
        for held, name, tensor in places:
            held[name] = new.get(tensor, tensor)
        return new

    try:
        # Without memory, to see what is written or replaced.
        new = put("meta", {tensor for *_, tensor in places})
        storages = _written(fill)
        written = {
            tensor
            for held, name, tensor in places
            if held[name] is not new[tensor] or new[tensor].untyped_storage()._cdata in storages
        }
        # In memory. What had values keeps them.
        put("cpu", written)
        fill()
        return {
            tensor: held[name]
            for held, name, tensor in places
            if tensor.is_meta and tensor in written and owners[tensor] is held
        }
    finally:
        put("meta", ())


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    # Yield the parameters and buffers of `module`, each after what holds it and its name there
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            yield from ((held, name, t) for name, t in held.items() if t is not None)


def _like(tensor: Tensor, device: str) -> Tensor:
    # A tensor without values, but with what users have noted on `tensor`
    new = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def _written(fill: Fill) -> set[int]:
    # Run `fill`; return the storages that operators write to in it
    storages = set()

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if argument.is_write and isinstance(value, Tensor):
                    storages.add(value.untyped_storage()._cdata)
            return func(*args, **kwargs)

    with torch.random.fork_rng(devices=()), Writes():  # type: ignore[no-untyped-call]
        fill()
    return storages
