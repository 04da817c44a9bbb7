"""Do samples meet in a call? It is asked where a module runs the batches of several ranks at once,
of every call in it.

Samples do not meet where some row of the function's kind splits its arguments by batches, and
leaves its results so without communication. Such a row also says where the batches are in the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_topt.graph.op_config import Shard
from lightning_topt.techniques.tensor_parallel.decisions import Known
from lightning_topt.techniques.tensor_parallel.kinds import KINDS, Call, Kind, Row, named
from lightning_topt.techniques.tensor_parallel.kinds_attention import ATTENTION, LOSS
from lightning_topt.techniques.tensor_parallel.kinds_convolution import CONVOLUTION
from lightning_topt.techniques.tensor_parallel.kinds_elementwise import ELEMENTWISE
from lightning_topt.techniques.tensor_parallel.kinds_norms import NORM
from lightning_topt.techniques.tensor_parallel.kinds_random import CHANNEL_DROPOUT, DROPOUT, RANDOM
from lightning_topt.techniques.tensor_parallel.kinds_recurrent import CELL
from lightning_topt.techniques.tensor_parallel.kinds_reductions import GROUP_NORM
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE

Batches = tuple[Shard | None, ...]
_ADVICE = "the batches of several ranks cannot run through this module at once"
# samples are dim 0 of what they get
_FIRST = {CONVOLUTION.name, GROUP_NORM.name, CELL.name, "batch norm"}
_CONVERSION = "conversion"  # of its second argument the type alone is read
_UNSEEN = (
    "rand randn randint randperm normal bernoulli multinomial poisson rrelu alpha_dropout "
    "feature_alpha_dropout"
)
DRAWING: frozenset[Callable[..., Any]] = frozenset(
    function
    for function in (
        *named(_UNSEEN, torch, Tensor, F),
        *named(
            "bernoulli_ random_ rrelu_ alpha_dropout_ feature_alpha_dropout_ gumbel_softmax "
            "dropout_",
            torch,
            Tensor,
            F,
        ),
        *named("randint_like", torch),
        *(function for kind in (DROPOUT, CHANNEL_DROPOUT, RANDOM) for function in kind.functions),
    )
    if function is not None
)


def batches_after(
    kind: Kind | None, call: Call, known: Sequence[Known], ranks: int, *, in_place: bool
) -> Batches:
    """Return where the batches of `ranks` ranks are in the results of a call, the last for all that
    follow it; empty for results that have nothing of them. Raises ValueError where samples meet, or
    may.
    """
    name = getattr(call.func, "__name__", str(call.func))
    before = [each.layout.batch for each in known]
    if not any(before):
        if call.func in DRAWING and _draws(call):
            raise ValueError(
                f"{name} draws random numbers of its own for every rank's batch, so {_ADVICE}"
            )
        return ()
    if kind is not None and kind.name == _CONVERSION and before[0] is None:
        return ()
    row = (
        next((r for r in kind.rows(call, ranks) if _keeps(kind, call, r, before)), None)
        if kind is not None
        else None
    )
    if row is None or (in_place and row.outputs[0] != before[0]):
        raise ValueError(f"{name} may bring samples together, or is not known, so {_ADVICE}")
    return tuple(each for each in row.outputs if isinstance(each, Shard))


def refuse_draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for random numbers that have nothing to do with samples: every rank would
    draw others.
    """
    if func in DRAWING and _draws(Call(func, args, kwargs, ())):
        raise ValueError(
            f"{func.__name__} draws random numbers of its own for every rank's batch, so {_ADVICE}"
        )


def numbers_in(call: Any) -> set[float]:
    """Return the numbers with which `call`, of an elementwise function, computes; none for others,
    which may have shapes.
    """
    if KINDS.get(call.func) is not ELEMENTWISE:
        return set()
    values = (*call.args, *call.kwargs.values())
    return {
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _draws(call: Call) -> bool:
    """Whether a call draws: dropout that is off does not."""
    if "dropout" not in getattr(call.func, "__name__", ""):
        return True
    return bool(call.get(2, "training", call.get(2, "train", True))) and call.get(1, "p", 0.5) != 0


def _keeps(kind: Kind, call: Call, row: Row, before: Sequence[Shard | None]) -> bool:
    """Whether a row splits by batches, and its results too."""
    if any(place != (batch or REPLICATE) for place, batch in zip(row.inputs, before, strict=True)):
        return False
    if not row.outputs or row.added is not None:
        return False
    if not all(isinstance(each, Shard) for each in row.outputs):
        return False
    return all(
        _is_free(kind, call, place, batch.dim)
        for place, batch in enumerate(before)
        if batch is not None
    )


def _is_free(kind: Kind, call: Call, place: int, dim: int) -> bool:
    """Whether the kind treats indices of `dim` of an argument one by one; some rows communicate
    inside.
    """
    ndim = len(call.operands[place].shape)
    if kind.name in _FIRST:
        return dim == 0 and kind.name != "batch norm"
    if kind is ATTENTION:
        return dim < ndim - 2 if place < 3 else True
    if kind is NORM:
        return place == 0 and dim < ndim - len(call.get(1, "normalized_shape"))
    return kind is not LOSS or dim == 0
