"""Parameters that somebody holds besides the module and the optimizers, and who that is.

Sharding puts other Parameter objects into the module and the optimizers; whoever else holds one
would go on with the old. Reference counts tell whether there is such a holder. Only where there is,
its referrers are climbed, to name the first one that outlives the step.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.plugins.code_names import is_library

MAX_LEVELS = 10
# Up to so many objects, `gc.get_referrers` is faster than a look at what each object refers to.
_FEW, _CHUNK = 32, 4096
_RUNNING = (types.FrameType, types.GeneratorType, types.CoroutineType, types.TracebackType)
_CONTAINERS = frozenset(["builtins", "collections", "functools", "itertools"])  # where these are


class _Link(NamedTuple):
    """An object on the way up from a parameter, and what it refers to there."""

    value: Any
    below: _Link | None


def why_held(
    module: nn.Module, *, optimizers: Sequence[Optimizer], model: nn.Module | None = None
) -> str | None:
    """Return who else holds parameters of `module`, as a clause, or None.

    Else: besides `module` and `optimizers`. Variables of running functions do not count: they
    cannot be used before the step is over. `model` is what wraps `module`
    (DistributedDataParallel), and may hold them too.
    """
    # Somebody may hold the memory alone.
    if shared := _shares_memory(module):
        return shared
    known = _known_containers(module, optimizers, module if model is None else model)
    for count in (1, None):
        suspects = _suspects(module, known)[:count]
        holders = _holders([_Link(parameter, None) for parameter in suspects], known)
        if clause := _first_owner(holders, module):
            return clause
        # Who holds the first one often holds the others: that much is explained now.
        known |= {id(link.value): link.value for link in holders}
        del holders  # which hold it as well
    return None


def _known_containers(
    module: nn.Module, optimizers: Iterable[Optimizer], model: nn.Module
) -> dict[int, Any]:
    """Return the containers where parameters may be, by id.

    They are the tree's own dictionaries, optimizers, the wrapper.
    """
    # References that the module tree itself keeps.
    containers: list[Any] = [m._parameters for part in (module, model) for m in part.modules()]
    for optimizer in optimizers:
        containers += [group["params"] for group in optimizer.param_groups]
        containers += [optimizer.state, *optimizer.state.values()]
    if model is not module:
        containers += [vars(model), *vars(model).values()]
    # Set anew whenever a weight is.
    containers += [m._flat_weights for m in module.modules() if isinstance(m, nn.RNNBase)]
    # Lightning's own note of what `toggle_optimizer` has switched off
    containers.append(vars(module).get("_param_requires_grad_state"))
    return {id(container): container for container in containers}


def _suspects(module: nn.Module, known: dict[int, Any]) -> list[nn.Parameter]:
    """Return the parameters with more references than torch and `known` explain."""
    explained: Counter[int] = Counter()
    for container in known.values():
        if isinstance(container, dict):
            explained.update(
                id(entry) for entry in container.values() if isinstance(entry, nn.Parameter)
            )
        if isinstance(container, dict | list | tuple | set | frozenset):
            explained.update(id(entry) for entry in container if isinstance(entry, nn.Parameter))
    parameters = list(module.parameters())
    # More references than explained: somebody else has one.
    idle, held = _references_of_torch()
    suspects = []
    for parameter in parameters:
        own = held if parameter._use_count() > 1 else idle  # type: ignore[attr-defined]
        if sys.getrefcount(parameter) > own + explained[id(parameter)]:
            suspects.append(parameter)
    return suspects


def _references_of_torch() -> tuple[int, int]:
    """Return the reference counts of a parameter that a loop over a list sees.

    The first: it is only in the list; the second: autograd holds it as well. (Releases of torch
    differ in whether C++ counts among the references.)
    """
    counts, parameters = [], [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    # Autograd's AccumulateGrad holds the second.
    graph = parameters[1] * 2
    for parameter in parameters:
        counts.append(sys.getrefcount(parameter))
    del graph
    return counts[0], counts[1]


def _shares_memory(module: nn.Module) -> str | None:
    """Name a buffer or a tensor attribute that is a view of a parameter.

    Nobody holds the Parameter then, only its memory.
    """
    owners: dict[int, str] = {
        p.data_ptr(): n for n, p in module.named_parameters() if _has_memory(p)
    }
    for path, submodule in module.named_modules():
        for name, tensor in (*submodule._buffers.items(), *vars(submodule).items()):
            if (
                isinstance(tensor, Tensor)
                and not isinstance(tensor, nn.Parameter)
                and _has_memory(tensor)
            ):
                parameter = owners.get(tensor.data_ptr())
                where = f"{path}.{name}" if path else name
                if (
                    parameter is not None and parameter != f"{where}_orig"
                ):  # torch.nn.utils.spectral_norm, before it runs
                    return (
                        f"tensor {where!r} of {type(module).__name__} shares memory with parameter "
                        f"{parameter!r}"
                    )
    return None


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is not None
    return plain and not tensor.is_meta and not tensor.is_sparse and tensor.numel() > 0


# ---- whose it is ---------------------------------------------------------------------------------


def _holders(links: Sequence[_Link], known: Collection[int]) -> list[_Link]:
    """Return what refers to the values of `links`, without what runs now and what is a library's.

    Modules and optimizers count, whose classes are torch's.
    """
    by_id = {id(link.value): link for link in links}
    found = []
    for holder in _referrers(links, by_id):
        kind = type(holder)
        name = kind.__module__
        if isinstance(holder, types.FunctionType):
            name = holder.__module__
        elif _is_scope(holder):
            name = holder["__name__"]
        if id(holder) in known or isinstance(holder, (*_RUNNING, types.ModuleType)):
            continue
        if is_library(name) and not isinstance(holder, nn.Module | Optimizer):
            continue
        referents = gc.get_referents(holder)
        below = next((by_id[id(each)] for each in referents if id(each) in by_id), None)
        found += [] if below is None else [_Link(holder, below)]
    return found


def _referrers(links: Sequence[_Link], by_id: Collection[int]) -> list[Any]:
    """Return what refers to the values of `links`, in time that their number hardly changes."""
    if len(links) <= _FEW:
        return gc.get_referrers(*[link.value for link in links]) if links else []
    wanted, heap = {*by_id}, gc.get_objects()
    found = []
    for start in range(0, len(heap), _CHUNK):
        chunk = heap[start : start + _CHUNK]
        if wanted.isdisjoint(map(id, gc.get_referents(*chunk))):
            continue
        found += [each for each in chunk if not wanted.isdisjoint(map(id, gc.get_referents(each)))]
    return found


def _first_owner(links: list[_Link], module: nn.Module) -> str | None:
    """Climb from the direct holders to the first one that outlives the step, level by level."""
    tree = {id(part): name for name, part in module.named_modules()}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for height in range(MAX_LEVELS + 1):
        if not links:
            break
        # Breadth first, so that the closest owner is named.
        for link in links:
            if owner := _owner(link, tree) or (height == MAX_LEVELS and type(link.value).__name__):
                while link.below is not None:
                    link = link.below
                # Not all that an overridden `parameters` yields has a name.
                name = names.get(id(link.value), type(link.value).__name__)
                return f"{owner} holds parameter {name!r}"
        seen |= {id(link.value) for link in links}
        links = _holders(links, seen)
    return None


def _owner(link: _Link, tree: dict[int, str]) -> str | None:
    """Return what to call an object that outlives the step; None for one that others hold."""
    value, kind = link.value, type(link.value)
    if isinstance(value, nn.Module) and id(value) not in tree:
        return f"module {kind.__name__}, which is not part of the LightningModule,"
    if _is_scope(value):
        name = value["__name__"]
        is_script = name == "__main__" and "__main__" in sys.modules
        where = "the script" if is_script else f"module {name}"
        return f"variable {_key_of(value, link.below)!r} of {where}"
    if isinstance(value, types.FunctionType | type):
        is_class = isinstance(value, type)
        return f"class {value.__name__}" if is_class else f"function {value.__qualname__}"
    # Who can step an optimizer again counts: that of an earlier fit is Lightning's alone.
    is_container = isinstance(value, dict | list | tuple | set | frozenset | deque)
    if isinstance(value, Optimizer) or is_container or kind.__module__ in _CONTAINERS:
        return None
    # Through its dictionary, if it has one.
    values, below = getattr(value, "__dict__", {}), link.below
    attribute = _key_of(values, below.below if below and below.value is values else below)
    path = tree.get(id(value))
    title = kind.__name__ + (f" ({path!r})" if path else "")
    return f"attribute {attribute!r} of {title}" if attribute else title


def _is_scope(value: Any) -> bool:
    """Return whether these are the variables of a module."""
    is_plain = type(value) is dict
    return is_plain and isinstance(value.get("__name__"), str) and "__builtins__" in value


def _key_of(values: dict[Any, Any], below: _Link | None) -> str | None:
    assert below is not None
    return next((str(name) for name, each in [*values.items()] if each is below.value), None)
