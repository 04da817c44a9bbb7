"""Parameters written in place, unseen by autograd; copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

CHUNK_BYTES = 32 << 20  # temporaries are made for so much at a time, and at least for one tensor
T = TypeVar("T")


def trainable(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that steps may change: they want gradients and have elements of their
    own here.

    On other stages' parameters all elements are one in memory.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return [p for p in parameters if not _is_expanded(p)]


@contextmanager
def unseen(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Write in place without autograd noticing: backward passes in flight compute with what the
    storages hold then.
    """
    with _unsafe_preserve_version_counter(tuple(parameters)):
        yield


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of equal shapes; targets may be parameters."""
    if targets:
        with torch.no_grad(), unseen(targets):
            torch._foreach_copy_(list(targets), list(sources))


def swap(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Exchange the contents of parameters and copies."""
    with torch.no_grad(), unseen(parameters):
        for chunk in chunks(
            list(zip(parameters, copies, strict=True)), size=lambda pair: num_bytes(pair[:1])
        ):
            inside, outside = [pair[0] for pair in chunk], [pair[1] for pair in chunk]
            kept = empty_copies(inside)
            torch._foreach_copy_(kept, inside)
            torch._foreach_copy_(inside, outside)
            torch._foreach_copy_(outside, kept)


def empty_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors like them, without contents and gradients."""
    return [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def chunks(items: Sequence[T], *, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, as many at a time as fit `CHUNK_BYTES`, and at least one."""
    chunk: list[T] = []
    filled = 0
    for item in items:
        if chunk and filled + size(item) > CHUNK_BYTES:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += size(item)
    if chunk:
        yield chunk


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and all(
        step == 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
