"""Trials of compiled blocks that later fits read: for their searches, choices and hints.

    known = KnownTrials(module, batch, device=device, ranks=2, precision="32-true")
    known.trials            # by block; empty where nothing is known
    known.keep(trials)      # after a trial
    known.keep_share(0.9)   # after the clock has compared steps
    compiled_costs(module, known.trials, steps=1000)       # for a search

A trial is that of one module, shape of batch, precision, machine and version. It is kept in a file
of its own beside the measurements (`costs.measurements`), for as long as these, and as the folder
where the compiler keeps its code: prices are those of code that is there. The module is known by
its parts: their classes, the text of the files that these are in, and their parameters. One that
calls code of other files is tried again once the trial is old, or its file is removed.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_topt.costs.measurements import (
    Entry,
    default_directory,
    describe_machine,
    describe_software,
    load_entries,
    save_entries,
)
from lightning_topt.costs.training_step import CompiledCost
from lightning_topt.graph.structures import tensors_in
from lightning_topt.techniques.compilation import Trial, candidates

_SHARE = ""  # the name of an entry that no block has


class KnownTrials:
    """What is known of compiled blocks of `module`, for batches like `batch`.

    Args:
        module: with the values of any rank, in shards or not.
        batch: of one rank.
        device: of this rank.
        ranks: of this machine, which share its memory.
        precision: that of the `Trainer`.
    """

    def __init__(
        self, module: nn.Module, batch: Any, *, device: torch.device, ranks: int, precision: str
    ) -> None:
        shapes = [[list(each.shape), str(each.dtype)] for each in tensors_in(batch)]
        program = json.dumps([_parts(module), shapes, precision, ranks])
        self._program = {
            **describe_software(),
            "machine": describe_machine(device),
            "compiled": hashlib.sha256(program.encode()).hexdigest(),
        }
        self._directory: Path | None = None
        with contextlib.suppress(RuntimeError):  # a user without a home
            self._directory = default_directory()
        self._entries = load_entries(self._directory, self._setup) if self._directory else {}

    @property
    def _setup(self) -> dict[str, Any]:
        return {**self._program, "code": _code_folder()}  # a trial may have made the folder

    @property
    def trials(self) -> dict[str, Trial]:
        """The trials by the first block of each group."""
        found: dict[str, Trial] = {}
        for name, entry in self._entries.items():
            if name != _SHARE:
                with contextlib.suppress(TypeError):  # not ours: tried again
                    found[name] = Trial(**entry.value)
        return found

    @property
    def share(self) -> float | None:
        """Seconds of compiled steps relative to eager ones, in the last fit that had both."""
        value = self._entries[_SHARE].value if _SHARE in self._entries else None
        return value if isinstance(value, float) else None

    def keep(self, trials: Mapping[str, Trial]) -> None:
        """Keep trials by block. A directory that cannot be written costs a warning."""
        self._keep({name: asdict(trial) for name, trial in trials.items()})

    def keep_share(self, share: float) -> None:
        """Keep what steps took. Where that was more, no block is compiled later."""
        self._keep({_SHARE: share})
        if share > 1:
            why = f"steps of a fit took {share:.2f} of the time"
            slow = {name: Trial(why) for name, each in self.trials.items() if not each.refusal}
            self.keep(slow)

    def _keep(self, values: Mapping[str, Any]) -> None:
        now = time.time()
        self._entries |= {name: Entry(now, value) for name, value in values.items()}
        if self._directory is not None:
            save_entries(self._directory, self._setup, self._entries)


def compiled_costs(
    module: nn.Module, trials: Mapping[str, Trial], *, steps: float
) -> dict[str, CompiledCost]:
    """Return what blocks cost compiled in a fit of so many `steps`, by the names of all of them."""
    found: dict[str, CompiledCost] = {}
    for first, names in candidates(module).items():
        trial = trials.get(first)
        if trial is None or trial.refusal:
            continue
        forward, backward = (
            after / before if before else 1.0
            for before, after in zip(trial.eager, trial.compiled, strict=True)
        )
        seconds = trial.compilation_seconds / len(names) / max(steps, 1.0)
        cost = CompiledCost(forward, backward, trial.kept_bytes, seconds)
        found |= dict.fromkeys(names, cost)
    return found


def _code_folder() -> str:
    # As `torch._inductor.runtime.cache_dir_utils` has it, which takes seconds to import; "" where
    # it is not there, or is that of a user without a name
    with contextlib.suppress(OSError, KeyError):
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(
            tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"
        )
        return f"{os.path.abspath(folder)} {os.stat(folder).st_ino}"
    return ""


def _parts(module: nn.Module) -> list[Any]:
    # Classes with the text of their files, numbers that they show, and parameters
    texts: dict[str, str] = {}  # hashes by Python module
    parts: list[Any] = []
    for name, part in module.named_modules():
        kind = type(part)
        if isinstance(part, FSDPModule):  # a class of FSDP2 before that of the user
            kind = kind.__mro__[2]
        source = kind.__module__
        if source not in texts and not source.startswith("torch."):
            with contextlib.suppress(OSError, TypeError, KeyError):  # no file
                text = inspect.getsource(sys.modules[source])
                texts[source] = hashlib.sha256(text.encode()).hexdigest()
        parts.append([name, kind.__qualname__, texts.get(source, source), part.extra_repr()])
    for name, p in module.named_parameters():
        parts.append([name, list(p.shape), str(p.dtype), p.requires_grad])
    return parts
