"""Run a user's code once more than the user asked for, and leave everything as if it had not run.

with no_trace(module):
    copy.training_step(batch, 0)

Files, sockets, iterators that something else advances, and the values of tensors are out of scope.
"""

from __future__ import annotations

import builtins
import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_topt.graph.containers import SavedContainers, roots_of

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def no_trace(module: nn.Module, *roots: Any) -> Iterator[None]:
    """Put back, at the end: random states, modes of torch, and what user code can reach from
    `module` and `roots`.

    These are the random states of torch (of every device in use), NumPy and Python, and generators
    that the module owns; whether gradients are computed, the default dtype and autocast;
    attributes, lists, dicts, sets, hooks and gradients (see [Note: what is saved] in
    `graph.containers`). `print` without a file and `logging` are silent meanwhile.
    """
    with random_states(), _modes_of_torch(), kept_objects(*roots_of(module), *roots):
        yield


@contextmanager
def kept_objects(*roots: Any) -> Iterator[None]:
    """Put back, at the end, what user code can reach from `roots`; `print` and `logging` are silent
    meanwhile.
    """
    saved = SavedContainers(roots)
    with _silence():
        try:
            yield
        finally:
            saved.restore()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: a collection takes long, and would end the life of tensors in cycles at
    no moment of the step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def random_states() -> Iterator[None]:
    """Put back, at the end, the random states of torch, NumPy and Python."""
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if uses_cuda else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _modes_of_torch() -> Iterator[None]:
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST_DEVICES
    }
    caches = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        for kind, (enabled, cast_dtype) in casts.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, cast_dtype)
        torch.set_autocast_cache_enabled(caches)


@contextmanager
def _silence() -> Iterator[None]:
    """Let `print` to the standard output and `logging` do nothing; a debugger, which writes to its
    file, can be used.
    """
    own_print, disabled = builtins.print, logging.root.manager.disable

    def quiet(*args: Any, file: Any = None, **kwargs: Any) -> None:
        if file is not None:
            own_print(*args, file=file, **kwargs)

    builtins.print = quiet
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        builtins.print = own_print
        logging.disable(disabled)
