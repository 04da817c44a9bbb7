"""Parameters that somebody holds besides the module and the optimizers, and who that is.

Sharding puts other Parameter objects into the module and the optimizers; whoever else holds one
would go on with the old. Without such a holder, reference counts tell at once; otherwise the heap
is searched upwards, from a parameter to the first holder that outlives the step.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LIBRARIES = frozenset(
    [
        "torch",
        "torchmetrics",
        "functorch",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "lightning_topt",
    ]
)
RUNNING = (types.FrameType, types.GeneratorType, types.CoroutineType, types.TracebackType)
EMPTY: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), deque())
CONTAINERS = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
    types.CellType,
    types.MethodType,
    types.BuiltinMethodType,
    types.MappingProxyType,
    functools.partial,
    *(type(iter(empty)) for empty in EMPTY),
    enumerate,
    zip,
    map,
    filter,
)
# up to so many objects `gc.get_referrers` is faster than looking at every object's referents
FEW = 32
CHUNK = 4096
MAX_LEVELS = 10


def is_library(module_name: str | None) -> bool:
    """Return whether code of that module is torch's, Lightning's or this package's."""
    return (module_name or "").partition(".")[0] in LIBRARIES


def why_held(
    module: nn.Module, *, optimizers: Sequence[Optimizer], model: nn.Module | None = None
) -> str | None:
    """Return who else holds parameters of `module`, as a clause, or None.

    Else: besides `module` and `optimizers`. Variables of running functions do not count: they
    cannot be used before the step is over. `model` is what wraps `module`
    (DistributedDataParallel), and may hold them too. Without such a holder, reference counts answer
    at once; otherwise the heap is searched.
    """
    # Somebody may hold the memory alone.
    if shared := _shares_memory(module):
        return shared
    # Who may hold them.
    known = _known_containers(module, optimizers, module if model is None else model)
    names = _Names(
        module,
        {id(submodule): name for name, submodule in module.named_modules()},
        {id(parameter): name for name, parameter in module.named_parameters()},
    )
    # A few by gc.get_referrers; all others in one pass over the heap.
    suspects = _suspects(module, known)
    for part in (suspects[:FEW], suspects[FEW:]):
        found = _Level(
            _Link(holder, None) for holder in _referrers(part) if id(holder) not in known
        )
        if clause := _first_owner(found, names):
            return clause
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


def _referrers(objects: Sequence[Any]) -> list[Any]:
    """Return every object that refers to one of `objects`.

    As gc.get_referrers, in time that does not grow with their number.
    """
    if len(objects) <= FEW:
        return gc.get_referrers(*objects) if objects else []
    # By chunks: types are compared first, which is fast.
    wanted, kinds = {id(entry) for entry in objects}, {type(entry) for entry in objects}
    heap, found = gc.get_objects(), []
    for start in range(0, len(heap), CHUNK):
        chunk = heap[start : start + CHUNK]
        if kinds.isdisjoint(map(type, gc.get_referents(*chunk))):
            continue
        found += [
            entry for entry in chunk if not wanted.isdisjoint(map(id, gc.get_referents(entry)))
        ]
    own = {id(objects), id(heap), id(chunk)} if heap else set()
    return [entry for entry in found if id(entry) not in own]


# ---- whose it is ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Link:
    """An object on the way up from a parameter.

    `below` is what it refers to, None for a parameter.
    """

    value: Any
    below: _Link | None


class _Level(list[_Link]):
    """Links of the same height.

    A class of its own, so that the search knows itself when it meets itself.
    """


@dataclass(frozen=True, eq=False)
class _Names:
    module: nn.Module
    tree: dict[int, str]  # id of a module of the tree -> its name
    parameters: dict[int, str]


def _first_owner(level: _Level, names: _Names) -> str | None:
    """Climb from the direct holders to the first one that outlives the step, level by level."""
    seen: set[int] = set()
    for _ in range(MAX_LEVELS):
        upper = _Level()
        # Breadth first, so that the closest owner is named.
        for link in level:
            if id(link.value) in seen or isinstance(link.value, RUNNING):
                continue
            seen.add(id(link.value))
            clause, climb = _judge(link, names)
            if clause:
                return clause
            if climb:
                upper.append(link)
        if not upper:
            return None
        level = _parents(upper)
    return (
        f"a {type(level[0].value).__name__} holds {_parameter(level[0], names)}" if level else None
    )


def _parents(children: _Level) -> _Level:
    by_id = {id(link.value): link for link in children}
    parents = _Level()
    for parent in _referrers_of_values(children):
        for value in gc.get_referents(parent):
            if id(value) in by_id:
                parents.append(_Link(parent, by_id[id(value)]))
                break
    return parents


def _referrers_of_values(children: _Level) -> list[Any]:
    found: list[Any] = []
    for start in range(0, len(children), FEW):
        found += gc.get_referrers(*[link.value for link in children[start : start + FEW]])
    # What libraries hold does not count, but for modules and optimizers, which are judged.
    return [
        entry
        for entry in found
        if not is_library(type(entry).__module__) or isinstance(entry, nn.Module | Optimizer)
    ]


def _judge(link: _Link, names: _Names) -> tuple[str | None, bool]:
    """Return (the clause for a holder that counts, whether to climb on instead)."""
    # Owners that outlive the step count; containers are climbed.
    value, held = link.value, _parameter(link, names)
    kind = type(value)
    if isinstance(value, nn.Module):
        return _of_module(link, names, held), False
    if isinstance(value, Optimizer):
        # it counts where it can be stepped again: that of an earlier fit is held by Lightning alone
        return None, True
    if isinstance(value, types.ModuleType):
        return None, False
    if kind is dict and isinstance(name := value.get("__name__"), str) and "__builtins__" in value:
        if is_library(name):
            return None, False
        is_script = name == "__main__" and "__main__" in sys.modules
        where = "the script" if is_script else f"module {name}"
        return f"variable {_key_of(value, link.below)!r} of {where} holds {held}", False
    if isinstance(value, types.FunctionType):
        clause = f"function {value.__qualname__} holds {held}"
        return (None if is_library(value.__module__) else clause), False
    if isinstance(value, type):
        return f"class {value.__name__} holds {held}", False
    if isinstance(value, CONTAINERS):
        return None, True
    if is_library(kind.__module__):
        return None, False
    return f"{_attribute(link)}{kind.__name__} holds {held}", False


def _of_module(link: _Link, names: _Names, held: str) -> str | None:
    value, path = link.value, names.tree.get(id(link.value))
    if path is None:
        return (
            f"module {type(value).__name__}, which is not part of the LightningModule, holds {held}"
        )
    title = type(value).__name__ + (f" ({path!r})" if path else "")
    return f"{_attribute(link)}{title} holds {held}"


def _attribute(link: _Link) -> str:
    name = _attribute_name(link)
    return f"attribute {name!r} of " if name else ""


def _attribute_name(link: _Link) -> str | None:
    """Return the attribute of `link`'s object through which the climb came."""
    below = link.below
    values = getattr(link.value, "__dict__", None)
    if below is not None and below.value is values:
        below = below.below
    return _key_of(values or {}, below)


def _key_of(values: dict[Any, Any], below: _Link | None) -> str | None:
    for name, value in list(values.items()):
        if isinstance(value, nn.Parameter) if below is None else value is below.value:
            return str(name)
    return None


def _parameter(link: _Link, names: _Names) -> str:
    while link.below is not None:
        link = link.below
    for value in gc.get_referents(link.value):
        if id(value) in names.parameters:
            return f"parameter {names.parameters[id(value)]!r}"
    return "parameters"
