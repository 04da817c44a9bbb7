"""Checks of a stage's pass: no tensor without elements is computed with or read."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_topt.graph.errors import CaptureError, explain, user_line


def check_real(value: Any, what: str) -> None:
    """Raise CaptureError where `value`, of which `what` says what is done with it, holds a tensor
    without elements.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, FakeTensor):
            raise CaptureError(
                f"{what} a tensor that this stage did not receive: on this microbatch the step "
                "computes it from other tensors than in its trace; a step whose data flow depends "
                "on values needs a plan without a pipeline"
            )


def read_of_shape(error: Exception, stage_index: int) -> CaptureError | None:
    """Return the error that names the line which reads a value that the stage does not have; None
    for other errors.
    """
    if isinstance(error, CaptureError) or explain(error, None) is None:
        return None
    return CaptureError(
        f"stage {stage_index} of the pipeline knows only the shape of a tensor whose value is read "
        f"here.\n{user_line(error)}"
        "Move this to the end of the step, or into a block, or give a plan without a pipeline."
    )
