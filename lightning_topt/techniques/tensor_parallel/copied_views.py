"""Views of what was gathered for them: user code may read them; a change of one in place would
change the copy alone, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_topt.techniques.tensor_parallel.kinds import tensors_in

COPIED = "_topt_copied"


def note_copies(tensors: Sequence[Tensor], local: Sequence[Tensor], result: Any) -> None:
    """Mark the views in `result`: a view of what was gathered is no view of the tensor that user
    code has.

    `tensors` are the arguments of the call, `local` what it ran on.
    """
    first, memory = tensors[0], local[0].untyped_storage()._cdata
    if COPIED in first.__dict__ or (
        local[0] is not first and memory != first.untyped_storage()._cdata
    ):
        for each in tensors_in((result,)):
            if each.untyped_storage()._cdata == memory:
                each.__dict__[COPIED] = True


def refuse_copies(func: Callable[..., Any], tensor: Tensor) -> None:
    """Raise ValueError where `func`, which changes `tensor` in place, would change a view of such a
    copy.
    """
    if COPIED in tensor.__dict__:
        raise ValueError(
            f"{func.__name__} changes a view of a split tensor in place, which would not change "
            "that tensor; write it without the in-place call, or keep the tensor's block whole"
        )
