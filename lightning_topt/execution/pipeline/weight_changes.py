"""Changes of parameters while backward passes that saved them are still to come.

[Note: one storage] Autograd saves tensors that refer to the parameters' storage, and refuses a
backward pass after the storage was written to. Here that is meant: a pass computes with what the
storage holds when it runs. Writes keep the version counters, which views of a parameter share with
it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


@contextmanager
def unnoticed(parameters: Iterable[Tensor]) -> Generator[None, None, None]:
    """Let autograd not notice what is written to `parameters` within; no forward pass may run
    there.
    """
    with _unsafe_preserve_version_counter(tuple(parameters)):
        yield


@contextmanager
def holding(
    weights: Iterable[AbstractContextManager[None]], parameters: Iterable[Tensor]
) -> Generator[None, None, None]:
    """Enter contexts that change `parameters` and leave them at the end, which autograd does not
    notice; passes run within.
    """
    changed = tuple(parameters)
    stack = ExitStack()
    with unnoticed(changed):
        for each in weights:
            stack.enter_context(each)
    try:
        yield
    finally:
        with unnoticed(changed):
            stack.close()
