"""States of the random generators that user code draws from: torch, CUDA, NumPy and Python.

A small module, since execution and plugins use it without tensor parallelism.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RandomStates = tuple[Any, ...]


def random_states() -> RandomStates:
    """Return the states of this process, in values that pickle."""
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state().numpy() if is_used else None
    return torch.get_rng_state().numpy(), cuda, np.random.get_state(), random.getstate()


def set_random_states(states: RandomStates) -> None:
    """Set the generators to `states`, of this process or of another one."""
    cpu, cuda, of_numpy, of_python = states
    torch.set_rng_state(torch.from_numpy(cpu))
    if cuda is not None:
        torch.cuda.set_rng_state(torch.from_numpy(cuda))
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def draw_alike(group: dist.ProcessGroup) -> None:
    """Give the ranks of `group` the states of its first rank. A collective call."""
    states = [random_states()]
    dist.broadcast_object_list(states, group=group, group_src=0)
    set_random_states(states[0])
