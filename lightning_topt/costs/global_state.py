"""Measure without a trace: generators and modes of the whole process are afterwards what they
were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_global_state() -> Iterator[None]:
    """Set plain training modes inside; all generators and modes are as before afterwards.

    The states of Python's, NumPy's and torch's default generators (of CUDA: all devices, if it is
    in use) are put back. Inside, gradients are enabled, inference mode and autocast are off and the
    default dtype is float32: what is measured does not depend on where it is measured from. Also
    usable as a decorator.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Asking for the state would start CUDA in a process that does not use it.
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if in_use else []
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), torch.enable_grad(), _no_autocast():
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        if not torch.cuda.is_available():
            yield
            return
        with torch.autocast("cuda", enabled=False):
            yield
