"""Blocks of a running fit that are compiled, where a trial says that it pays (`allow="compile"`).

    steps = CompiledSteps(strategy, plan, room=math.inf)
    steps.begin_batch(batch)        # before each batch, on all ranks
    steps.end()                     # every block is as it was written

What happens, by the batches of the fit:

    6 to 15     timed: are there enough left for a compilation to pay?
    16          calls of blocks are noted on the first rank of each node
    before 17   those ranks compile and compare in copies of their processes; the others wait
    17 to 19    compiled blocks run, from the cache of the compiler
    20 to 29    timed: compiled blocks stay only if steps are faster

What a trial and the clock have found is kept (`known_trials`): later fits like this need no trial.

Nothing that user code sees changes but `forward` of some modules. A copy that crashes, differs or
is slower leaves the fit as it is, and one line says why. So do blocks with collectives or a state,
and blocks whose gradients are differentiated in batch 16: where only later steps do so, they fail
with one sentence. On accelerators, whose work no copy can do, each first rank compares in its own
process, on a copy of the module.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_topt.basics.forked_call import ForkedCall, writable_files
from lightning_topt.communication.rank_watch import within_limit
from lightning_topt.costs.measuring import from_rank_0, gather
from lightning_topt.graph.errors import one_line
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.plan_request import steps_of_fit
from lightning_topt.techniques.compilation import (
    CODE_BYTES,
    COMPILER_BYTES,
    BlockCall,
    CallRecording,
    Trial,
    candidates,
    compare,
    compile_blocks,
    form_of,
    uncompile,
)
from lightning_topt.techniques.known_trials import KnownTrials

_WARM, _TIMED, _COMPILES = 5, 10, 3  # batches
_TRIAL_SECONDS = 600.0  # that a copy may take to compile, while the other ranks wait
# What a trial and a compilation take where nothing is known yet, and the share of a step that they
# may save: blocks of one core were 0.8 to 1.45 times as fast, and took 5 to 38 s to compile.
USUAL_SECONDS, USUAL_GAIN = 20.0, 0.1


Vote = Mapping[str, Trial] | str  # of a node: trials by block, or why there are none


class CompiledSteps:
    """Compiles the blocks of the module of `strategy` for which that pays.

    Under `plan`, None where none is decided yet; with tensor axes or stages nothing is compiled.
    `room` are the bytes that a memory limit leaves; where there is one, blocks that keep more for
    the backward pass are left as they are. Methods are collective calls.
    """

    def __init__(self, strategy: DDPStrategy, plan: ParallelPlan | None, *, room: float) -> None:
        assert strategy.lightning_module is not None
        self._strategy, self._module = strategy, strategy.lightning_module
        self._room = room
        self._groups: dict[str, list[str]] = {}
        self._known: KnownTrials | None = None  # on the first rank of a node
        self._recording: CallRecording | None = None
        self._marks: list[float] = []
        self._eager_seconds = 0.0
        self._batch = 0
        if plan is not None and (plan.schedule or plan.brings_batches):
            rank_zero_warn(
                "topt: no blocks are compiled: those of plans with stages or tensor axes cannot be"
            )
            self._leave()
        if plan is not None and any(block.config.compile for block in plan.blocks):
            self._leave()  # the search has looked at what is known

    def begin_batch(self, batch: Any) -> None:
        """Do what is due before this batch."""
        self._batch += 1
        start, end = _WARM + 1, _WARM + _TIMED + 1
        again, last = end + 1 + _COMPILES, end + 1 + _COMPILES + _TIMED
        if start <= self._batch <= end or again <= self._batch <= last:
            self._marks.append(perf_counter())
        if self._batch == end:
            self._eager_seconds = self._step_seconds()
            self._begin_trial(batch)
        elif self._batch == end + 1:
            self._try()
        elif self._batch == last:
            self._check()

    def end(self) -> None:
        """Let blocks run as they are written. No collective call."""
        if self._recording is not None:
            self._recording.take()
        self._leave()
        uncompile(self._module)

    def _leave(self) -> None:
        # Nothing is left to do
        self._batch, self._recording, self._marks = 1 << 60, None, []

    def _step_seconds(self) -> float:
        # The same on all ranks: the median of those that were timed
        steps = [
            after - before for before, after in zip(self._marks, self._marks[1:], strict=False)
        ]
        self._marks = []
        seconds: float = from_rank_0(statistics.median(steps))
        return seconds

    def _batches_left(self) -> float:
        trainer = self._module.trainer
        left = steps_of_fit(trainer) - trainer.global_step
        return from_rank_0(max(left, 0) * trainer.accumulate_grad_batches)

    # ---- a trial ---------------------------------------------------------------------------------

    def _begin_trial(self, batch: Any) -> None:
        left = self._batches_left() * self._eager_seconds
        if left * USUAL_GAIN < USUAL_SECONDS:
            self._compile_nothing(
                f"this fit has about {left:.0f} s left, and a compilation takes about "
                f"{USUAL_SECONDS:.0f}"
            )
            return
        self._groups = candidates(self._module)
        needed = COMPILER_BYTES + CODE_BYTES * len(self._groups)
        if self._strategy.root_device.type == "cpu" and self._room < needed:
            self._compile_nothing(
                f"the compiler takes {needed / 1e6:.0f} MB, and the plan leaves fewer"
            )
        elif not self._groups:
            self._compile_nothing("no part of the module can be")
        elif self._strategy.local_rank == 0:
            self._known = known_trials(self._module.trainer, batch)
            if not self._known.trials:
                self._recording = CallRecording(self._module, self._groups)

    def _compile_nothing(self, reason: str) -> None:
        rank_zero_info(f"topt: no blocks are compiled: {reason}")
        self._leave()

    def _try(self) -> None:
        start = perf_counter()
        calls: dict[str, BlockCall] = {}
        vote: Vote | None = None if self._known is None else self._known.trials
        if self._known is not None and self._recording is not None:
            calls = self._recording.take()
            vote = self._vote(calls, self._recording.refusals)
            self._recording = None
            if not isinstance(vote, str):
                self._known.keep(vote)
        # one of each node; ranks behind the first have none
        forms = {name: form_of(call[:2]) for name, call in calls.items()}
        every = gather((vote, forms))
        votes, forms = [each for each, _ in every if each is not None], every[0][1]
        seconds = perf_counter() - start
        if problems := [each for each in votes if isinstance(each, str)]:
            self._compile_nothing(problems[0])
            return
        trials = _agreed([each for each in votes if not isinstance(each, str)])
        trials = {name: self._wanted(trials[name]) for name in self._groups if name in trials}
        chosen = {name: trial for name, trial in trials.items() if not trial.refusal}
        saved = sum(len(self._groups[name]) * t.saved_seconds for name, t in chosen.items())
        compilation = sum(trial.compilation_seconds for trial in chosen.values())
        left = self._batches_left()
        if not chosen or saved * left < compilation:
            words = _words({n: t for n, t in trials.items() if t.refusal}, self._groups)
            if chosen:
                words = (
                    f"{saved * left:.0f} s would be saved, and a compilation takes "
                    f"{compilation:.0f}"
                )
            self._compile_nothing(words)
            return
        compile_blocks(
            self._module, {each: forms.get(name) for name in chosen for each in self._groups[name]}
        )
        rank_zero_info(
            f"topt: compiled, after a trial of {seconds:.0f} s: {_words(trials, self._groups)}"
        )

    def _wanted(self, trial: Trial) -> Trial:
        if trial.refusal or self._room == math.inf or trial.kept_bytes <= 0:
            return trial
        why = f"compiled it keeps {trial.kept_bytes} bytes more for the backward pass"
        return replace(trial, refusal=why)

    def _vote(self, calls: Mapping[str, BlockCall], refusals: Mapping[str, str]) -> Vote:
        refused = {name: Trial(why) for name, why in refusals.items()}
        if not calls:
            return refused or "no block was called in the step that was watched"
        module, groups, device = self._module, self._groups, self._strategy.root_device
        limit = 0.9 * within_limit(_TRIAL_SECONDS)

        def run(module: nn.Module = module) -> dict[str, Trial]:
            with writable_files():
                return compare(module, groups, calls)

        try:
            if hasattr(os, "fork") and device.type == "cpu":
                trial = ForkedCall(run, isolated=True).result(timeout_seconds=limit)
                return {**trial, **refused}
            with torch.random.fork_rng(devices=[device]):
                return {**run(copy.deepcopy(module)), **refused}
        except Exception as error:
            return f"the trial failed: {one_line(error)}"

    def _check(self) -> None:
        # Whether steps are faster, by the clock
        seconds = self._step_seconds()
        share = seconds / self._eager_seconds
        if self._known is not None:
            self._known.keep_share(share)
        if share > 1:
            uncompile(self._module)
            rank_zero_info(
                f"topt: compiled blocks are given up: steps took {share:.2f} of the time before"
            )
        else:
            rank_zero_info(f"topt: steps of compiled blocks take {share:.2f} of the time")
        self._leave()


def known_trials(trainer: pl.Trainer, batch: Any) -> KnownTrials:
    """Return what is known of compiled blocks of this fit, for batches like `batch`."""
    return KnownTrials(
        trainer.lightning_module,
        batch,
        device=trainer.strategy.root_device,
        ranks=trainer.world_size // trainer.num_nodes,
        precision=trainer.precision,
    )


def _agreed(votes: list[Mapping[str, Trial]]) -> dict[str, Trial]:
    # Of each block the trial of the node that gains least
    found: dict[str, Trial] = {}
    for name in votes[0]:
        trials = [vote.get(name, Trial("another node did not call it")) for vote in votes]
        found[name] = min(trials, key=lambda t: (t.refusal is None, t.saved_seconds))
    return found


def _words(trials: Mapping[str, Trial], groups: Mapping[str, list[str]]) -> str:
    # What came of each group, in one line
    words = []
    for name, trial in trials.items():
        more = f" and {len(groups[name]) - 1} like it" if groups[name][1:] else ""
        if trial.refusal:
            words.append(f"not {name!r}{more} ({trial.refusal})")
        else:
            words.append(f"{name!r}{more} ({trial.share:.2f} of their time)")
    return "; ".join(words)
