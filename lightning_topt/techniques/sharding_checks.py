"""What user code does to parameters in shards: it does what it does under ddp, or an error says so.

FSDP2 by itself ignores much of it. `watch` follows the parameters of one FSDP2 group:

    written where they are gathered      goes to the shards when the gathered ones are released
    written where they are in shards     torch does it, tensor by tensor
    ``p.data = ...`` in shards           copies the values (`set_data`)
    ``p.register_hook(...)``             runs with this rank's whole gradient, as under ddp
    a post-accumulate hook               an error
    used by who holds the former object  an error (`Replaced`)
    memory that two parameters share     an error; tied parameters are one (`registry.check_tied`)

[Note: writes] Writes through ``.data`` raise no version, so that nothing tells them from none. What
a forward pass has gathered is therefore copied back always: each rank copies its own share, less
than a gather does. Where the shards were written meanwhile, these count. Of a matrix that was
gathered in 16 bits only the elements that changed are copied: the others have more bits in shards.

[Note: dtypes] Under FSDP2's `MixedPrecisionPolicy` some parameters of a group are gathered in 16
bits (see `fsdp`), the others in their own dtype. FSDP2 takes either kind in a gather, but one dtype
of gradients: they are as the parameters when it asks for them, as autocast makes them.

While a `DTensorRules` is open, a DTensor that is read as a Python number is reduced over the ranks,
which all have to read it, and random numbers are drawn for the whole tensor on each rank, as under
ddp. Where an operator gets plain tensors, too, torch raises: `errors.explain_shards`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_topt.communication.rank_watch import within_limit
from lightning_topt.graph.errors import WHOLE, PlanError, line_of_caller

READ_SECONDS = 60.0  # that ranks wait for each other where one reads a number
_SCALAR = torch.ops.aten._local_scalar_dense.default
_DRAWS = (
    *(torch.ops.aten.rand_like.default, torch.ops.aten.randn_like.default),
    *(torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default),
)
_ATTRIBUTES = {"__get__", "__set__", "__delete__", "size", "dim", "numel", "is_floating_point"}
_OWN_DATA: Any = Tensor.data
# of the shards of parameters, by their `id`: what ``p.data`` has given to others
_ALIASES: dict[int, list[weakref.ref[DTensor]]] = {}
_HANDLERS: Any = DTensor._op_dispatcher._custom_op_handlers


# ---- before parameters are sharded ---------------------------------------------------------------


def check_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Raise PlanError where parameters that are to be sharded would lose what they have."""
    places: list[tuple[int, int, str]] = []
    for name, parameter in {p: (name, p) for name, p in named.items()}.values():
        _check_hooks(name, parameter)
        has_memory = parameter.device.type != "meta" and not isinstance(parameter, FakeTensor)
        if has_memory and parameter.numel():
            start = parameter.data_ptr()
            size = sum(
                (n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
            )
            places.append((start, start + (size + 1) * parameter.element_size(), name))
    places.sort()
    for (_, end, first), (start, _, second) in pairwise(places):
        if start < end:
            raise PlanError(
                f"the parameters {first!r} and {second!r} share memory, which shards of them would "
                f"not: let both be one Parameter, or {WHOLE}"
            )


class Replaced(nn.Parameter):
    """The class of a parameter while a sharded one is in its place: nothing computes with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let attributes be read and set, and nothing else."""
        if getattr(func, "__name__", "") in _ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise PlanError(
            "code computes with a parameter that it has held since before it was sharded "
            f"({func.__name__}): look it up in its module each time, or {WHOLE}\n"
            f"{line_of_caller()}"
        )


def set_replaced(originals: Iterable[nn.Parameter], is_replaced: bool) -> None:
    """Say whether sharded parameters are in the places of `originals`."""
    for original in {*originals}:
        if type(original) is (nn.Parameter if is_replaced else Replaced):
            original.__class__ = Replaced if is_replaced else nn.Parameter


def _check_hooks(name: str, parameter: Tensor) -> None:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise PlanError(
            f"a hook of parameter {name!r} (register_post_accumulate_grad_hook) would see a shard "
            f"of the gradient: use register_hook, or {WHOLE}"
        )


# ---- parameters in shards ------------------------------------------------------------------------


def watch(
    block: nn.Module,
    names: Mapping[Tensor, str],
    originals: Mapping[str, nn.Parameter],
    narrow: Collection[str] = (),
) -> None:
    """Follow the parameters that FSDP2 has sharded for `block`, as long as it keeps them.

    Args:
        block: a module that `fully_shard` has taken.
        names: of the sharded parameters.
        originals: the parameters that were in their places, by name.
        narrow: of `names`, those that the policy's `param_dtype` is for; see [Note: dtypes].
    """
    assert isinstance(block, FSDPModule)
    for group in block._get_fsdp_state()._fsdp_param_groups:
        named = [(names[param.sharded_param], param) for param in group.fsdp_params]
        _WatchedGroup(
            group, [_Watched(n, p, originals[n], is_narrow=n in narrow) for n, p in named]
        )


class _WatchedGroup:
    # The parameters that FSDP2 gathers and releases together.
    # Its methods take the places of the group's own.

    def __init__(self, group: Any, watched: Sequence[_Watched]) -> None:
        self._group, self._watched = group, watched
        self._gather, self._release = group._to_unsharded, group._to_sharded
        self._reshard, self._reshards, self._of_forward = group.reshard, False, False
        group._to_unsharded, group._to_sharded = self._gathered, self._released
        group.reshard = self._resharded

    def _gathered(self) -> None:
        if self._group.is_unsharded:
            return
        self._gather()
        self._of_forward = self._group._training_state == TrainingState.FORWARD
        with torch._C.DisableTorchFunction():
            for each in self._watched:
                each.gathered()

    def _resharded(self) -> None:
        self._reshards = True
        try:
            self._reshard()
        finally:
            self._reshards = False

    @torch.no_grad()
    def _released(self) -> None:
        # `state_dict` would release what the step under way goes on to use
        if not self._reshards and self._group._training_state == TrainingState.FORWARD:
            return
        if self._group.is_unsharded and self._of_forward:
            with torch._C.DisableTorchFunction():  # modes of tensor axes would take them as split
                written = [pair for each in self._watched for pair in each.written()]
                if written:
                    shards, values = zip(*written, strict=True)
                    torch._foreach_copy_(shards, values)
        self._release()


class _Watched:
    # One parameter: `of` is what FSDP2 knows of it.
    # Its methods take the places of some of `of`.

    def __init__(self, name: str, of: Any, original: nn.Parameter, *, is_narrow: bool) -> None:
        self._name, self._of, self._original = name, of, original
        self._whole: Tensor | None = None  # a view of the gathered parameter
        self._version = 0  # of the shard
        self._has_hook = False
        self._reset, self._gradient = of.reset_sharded_param, of._get_grad_inner_tensor
        self._set_dtypes = of.init_dtype_attrs
        of.reset_sharded_param = self._loaded
        of._get_grad_inner_tensor = self._wide_gradient
        if not is_narrow:
            of.init_dtype_attrs = self._keep_dtype

    def _keep_dtype(self, policy: Any) -> None:
        self._set_dtypes(replace(policy, param_dtype=None))

    def _wide_gradient(self, gradient: Tensor) -> Tensor:
        found: Tensor = self._gradient(gradient)
        return found.to(self._of.orig_dtype)

    def _loaded(self) -> None:
        # `load_state_dict` in a step has written to the gathered parameter
        if self._of.sharded_state != ShardedState.UNSHARDED:
            self._reset()

    def gathered(self) -> None:
        # Note what is there now. Raises PlanError for hooks that would see shards.
        shard, whole = self._of.sharded_param, self._of._unsharded_param
        self._whole = whole.detach()
        self._version = shard._version
        _check_hooks(self._name, shard)
        if not self._has_hook and whole.requires_grad and self._hooks():
            self._has_hook = True
            whole.register_hook(self._run_hooks)

    def _hooks(self) -> list[Callable[[Tensor], Tensor | None]]:
        owners = (self._original, self._of.sharded_param)
        return [hook for owner in owners for hook in (owner._backward_hooks or {}).values()]

    def _run_hooks(self, gradient: Tensor) -> Tensor:
        dtype, gradient = gradient.dtype, gradient.to(self._original.dtype)
        for hook in self._hooks():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient.to(dtype)

    def written(self) -> Iterable[tuple[Tensor, Tensor]]:
        # Yield this rank's shard and what the gathered parameter has for it now.
        shard, whole = self._of.sharded_param, self._of._unsharded_param
        assert self._whole is not None
        values = whole.data
        if _memory(values) != _memory(self._whole):
            whole.data = self._whole  # FSDP2 gathers into the memory that it knows
        if shard._version != self._version:
            return
        mesh = self._of.mesh_info
        parts = values.chunk(mesh.shard_mesh_size, self._of.fsdp_placement.dim)
        if mesh.shard_mesh_rank < len(parts):
            own, part = shard._local_tensor, parts[mesh.shard_mesh_rank]
            if part.dtype != own.dtype:
                wide = own.to(part.device)  # from the host, where it is offloaded
                part = torch.where(part == wide.to(part.dtype), wide, part)
            yield own, part


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# ---- all DTensors --------------------------------------------------------------------------------


class DTensorRules:
    """While one of these is open, DTensors take ``.data = ...`` and are reduced to be numbers."""

    _open = 0
    _before: dict[Any, Any]

    def __init__(self) -> None:
        if DTensorRules._open == 0:
            DTensorRules._before = {**_HANDLERS}
            _HANDLERS.update({_SCALAR: read_number, **dict.fromkeys(_DRAWS, draw)})
            _HANDLERS[torch.ops.aten.detach.default] = _detached
            DTensor.data = property(get_data, set_data)  # type: ignore[assignment]
        DTensorRules._open += 1

    def close(self) -> None:
        """Leave the rest to the others that are open."""
        DTensorRules._open -= 1
        if DTensorRules._open == 0:
            _HANDLERS.clear()
            _HANDLERS.update(DTensorRules._before)
            _ALIASES.clear()
            del DTensor.data


@torch.no_grad()
def set_data(own: DTensor, value: Tensor) -> None:
    """Copy `value` into `own`, of which torch would change the outside alone.

    Raises PlanError where it is not in equal shards.
    """
    if not isinstance(value, DTensor) or (value._spec, value.dtype) != (own._spec, own.dtype):
        raise PlanError(
            "p.data = ... gives a parameter in shards other memory that is not in such shards: "
            f"write in place (p.copy_(...)), or {WHOLE}\n{line_of_caller()}"
        )
    if own is value:
        return
    # What `p.data` was before keeps its values, as where memory changes hands.
    before = [reference() for reference in _ALIASES.pop(id(own._local_tensor), ())]
    for alias in before:
        if alias is not None and alias is not value:
            alias._local_tensor = alias._local_tensor.clone()
    own._local_tensor.copy_(value._local_tensor)
    torch.autograd.graph.increment_version(own)


def get_data(own: DTensor) -> Tensor:
    """Return ``own.data``, known for as long as somebody has it."""
    data: DTensor = _OWN_DATA.__get__(own)
    known = [each for each in _ALIASES.get(id(own._local_tensor), ()) if each() is not None]
    _ALIASES[id(own._local_tensor)] = [*known, weakref.ref(data)]
    return data


def read_number(_: object, args: tuple[Any, ...], kwargs: object) -> Any:
    """Return the number that a DTensor is; where each rank has a part of it, a collective call."""
    return whole_of(cast(DTensor, args[0])).item()


def _detached(_: object, args: tuple[Any, ...], kwargs: object) -> DTensor:
    # From torch 2.14 on, detaching a norm would reduce it: a collective call where a rank reads one
    own = args[0]
    return DTensor(own._local_tensor.detach(), own._spec, requires_grad=False)


def draw(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor:
    """Return a DTensor of random numbers: those that the whole tensor would have on this rank."""
    own = args[0]
    whole = torch.empty(own.shape, dtype=own.dtype, device=own._local_tensor.device)
    whole = operator(whole, *args[1:], **kwargs)
    drawn = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    if not operator._schema.is_mutable:
        return drawn
    own._local_tensor.copy_(drawn._local_tensor)
    return cast(DTensor, own)


@torch.no_grad()
def whole_of(value: DTensor) -> Tensor:
    """Return a small DTensor whole, when all ranks of its mesh ask for it.

    Raises PlanError where some do not.
    """
    if not all(placement.is_replicate() for placement in value.placements):
        _meet(value.device_mesh)
    return value.full_tensor()


def _meet(mesh: DeviceMesh) -> None:
    # Wait for the other ranks of `mesh`: in a collective call they could be in another one
    ranks = mesh.mesh.flatten().tolist()
    store, key = _get_default_store(), f"topt/read/{'-'.join(map(str, ranks))}"
    # the reads of all ranks so far: a round is over when it is a multiple of the ranks
    goal = -(-store.add(key, 1) // len(ranks)) * len(ranks)
    end, pause = time.monotonic() + within_limit(READ_SECONDS), 1e-5
    while store.add(key, 0) < goal:
        if time.monotonic() > end:
            raise PlanError(
                "a sharded value is read as a Python number on some ranks alone "
                f"(rank {dist.get_rank()} waited for the others): let all ranks read it, or "
                f"{WHOLE}\n{line_of_caller()}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1e-2)
