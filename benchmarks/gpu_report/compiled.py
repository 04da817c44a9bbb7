"""Part 10: compiled blocks, as ``allow="compile"`` tries them, and the step that they make.

A row for each kind of blocks has what the trial says: seconds of forward and backward, eager and
compiled, bytes kept more, seconds to compile. One for each model has its step with the blocks that
passed, relative to the eager one: medians of rounds that run by turns.
"""

from __future__ import annotations

import copy
import statistics
from functools import partial

import torch

from benchmarks.gpu_report.models import _step, clear, make_models
from benchmarks.gpu_report.reporting import Report, run_part
from lightning_topt.costs.measuring import time_once
from lightning_topt.techniques.compilation import (
    CallRecording,
    candidates,
    compare,
    compile_blocks,
    form_of,
    uncompile,
)

PRECISION = "bf16-mixed"
_ROUNDS, _CELL_SECONDS = 5, 25.0  # seconds that are left at least before a model begins


def run(report: Report) -> None:
    """Try the blocks of every model that there is time for."""
    models = make_models(report.quick)
    for name in ("llama", "gpt", "vit", "convnext", "lstm"):
        if report.left() < _CELL_SECONDS:
            report.note("not begun", model=name)
            continue
        clear(report.device)
        module, batch = models[name].module(report.device), models[name].example(report.device)
        optimizer = module.configure_optimizers()
        step = partial(_step, module, batch, optimizer, None, PRECISION, report.device)
        step([])
        groups = candidates(module)
        recording = CallRecording(module, groups)
        step([])
        calls = recording.take()
        chosen = {}
        with report.attempt(f"{name}: trial"):
            for block, trial in compare(copy.deepcopy(module), groups, calls).items():
                report.note(
                    f"{name}: {block}",
                    blocks=len(groups[block]),
                    refusal=trial.refusal,
                    eager_seconds=sum(trial.eager),
                    compiled_seconds=sum(trial.compiled),
                    share=trial.share,
                    kept_bytes=trial.kept_bytes,
                    compilation_seconds=trial.compilation_seconds,
                )
                if not trial.refusal:
                    form = form_of(calls[block][:2])
                    chosen |= dict.fromkeys(groups[block], form)
        with report.attempt(f"{name}: step", compiled=len(chosen)) as row:
            shares: list[float] = []
            compile_blocks(module, chosen)
            step([])
            own = {part: part.__dict__["forward"] for part in map(module.get_submodule, chosen)}
            for _ in range(_ROUNDS):
                times: dict[bool, list[float]] = {False: [], True: []}
                for is_compiled in (False, True):
                    for part, forward in own.items():
                        part.__dict__.pop("forward", None)
                        if is_compiled:
                            part.forward = forward
                    again = partial(step, [])
                    times[is_compiled] += [time_once(again, device=report.device) for _ in range(4)]
                shares.append(
                    statistics.median(times[True][1:]) / statistics.median(times[False][1:])
                )
            uncompile(module)
            row |= {"share_of_eager": statistics.median(shares), "shares": shares}
        del module, batch, optimizer, step
        torch.compiler.reset()


def main() -> None:
    run_part("compiled", run, __doc__)


if __name__ == "__main__":
    main()
