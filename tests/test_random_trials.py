"""The random trials of the benchmarks: the checks see what they are to see."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.robustness.history import History, check, one_process
from benchmarks.robustness.training import features_of, losses_of, new_net
from benchmarks.robustness.trial import Event, Run, Trial
from tests.preloaded import preloaded_topt

RUN = Run(2, "ddp", "full", 2, 0, Event("kill", "batch_start", ((0, 3),)))
TRIAL = Trial(
    seed=5,
    items=11,
    validation_items=7,
    shuffle=True,
    drop_last=False,
    accumulate=1,
    epochs=1,
    save_every=1,
    adam=True,
    validation_workers=0,
    runs=(RUN, replace(RUN, ranks=1, batch_size=3, event=Event())),
)

SEEDS = (12,)
DDP_SEED = 12  # resumed inside an epoch on another number of ranks


def records_of_trial() -> list[list[list[dict[str, Any]]]]:
    """What a fit writes that goes on, on one rank, after two steps of two: run by run, by rank.

    A third step was trained on, and its checkpoint was not complete.
    """

    order = torch.randperm(11, generator=torch.Generator().manual_seed(5)).tolist()

    def batch(number: int, *places: int) -> dict[str, Any]:
        samples = [order[place] for place in places]
        return {"kind": "batch", "epoch": 0, "batch": number, "step": number + 1} | {
            "samples": samples
        }

    start = {"kind": "start", "epoch": 0, "step": 0}
    saved = [{"kind": "saved", "step": step} for step in (1, 2)]
    first = [start, batch(0, 0, 2), saved[0], batch(1, 4, 6), saved[1], batch(2, 8, 10)]
    second = [start, batch(0, 1, 3), saved[0], batch(1, 5, 7), saved[1], batch(2, 9, 0)]
    first.append({"kind": "sent", "signal": "kill"})
    rest = [{**start, "step": 2}, batch(2, 8, 9, 10)]
    runs = [[first, second], [rest]]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        history = History(TRIAL, list(TRIAL.runs), runs, [2, 3])
        state = one_process(history)[3]
        net = new_net()
        torch.nn.utils.vector_to_parameters(state, net.parameters())
        items = torch.arange(7)
        loss = losses_of(net, features_of(items)).mean().item()
    finally:
        torch.set_default_dtype(before)
    mean = float(torch.sin(items.double() * 1.7).mean())
    metrics = {"fixed": mean, "mean": mean, "count": 7.0, "loss": loss}
    rest.append({"kind": "valid", "step": 3, "metrics": metrics})
    rest.append({"kind": "end", "step": 3, "parameters": state.tolist()})
    return runs


def failures(
    folder: Path, runs: list[list[list[dict[str, Any]]]], trial: Trial = TRIAL
) -> list[str]:
    (folder / "records").mkdir()
    for number, ranks in enumerate(runs):
        for rank, records in enumerate(ranks):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / "records" / f"{number}-{rank}.jsonl").write_text(lines)
    return [failure.kind for failure in check(trial, folder, runs=len(runs), own="topt")]


def test_a_fit_that_is_right_is_found_right(tmp_path: Path) -> None:
    assert failures(tmp_path, records_of_trial()) == []


def _samples(runs: Any, number: int, rank: int, batch: int) -> list[int]:
    found = [record for record in runs[number][rank] if record["kind"] == "batch"]
    return found[batch]["samples"]  # type: ignore[no-any-return]


def _lose(runs: Any) -> None:
    _samples(runs, 1, 0, 0).pop()


def _differ(runs: Any) -> None:
    runs[1][0][-1]["parameters"][0] += 2e-6


def _count_twice(runs: Any) -> None:
    runs[1][0][-2]["metrics"]["count"] += 1


PLANTED = {
    "lost sample": (_lose, "samples"),
    "parameters": (_differ, "parameters"),
    "count of validation": (_count_twice, "metrics"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(tmp_path: Path, name: str) -> None:
    plant, kind = PLANTED[name]
    runs = records_of_trial()
    plant(runs)
    assert kind in failures(tmp_path, runs)


# ---- whole trials --------------------------------------------------------------------------------


def said_of(seed: int, own: str) -> str:
    """What the script says of the trial of a seed."""
    made = subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("namespaces cannot be made here")
    module = ["-m", "benchmarks.robustness.random_trials"]
    job = subprocess.run(
        [preloaded_topt(), *module, f"--seed={seed}", f"--strategy={own}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return job.stdout


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trial_is_as_one_process(seed: int) -> None:
    said = said_of(seed, "topt")
    assert said.startswith(f"{seed} ") and said.endswith(" ok\n"), said


def test_what_ddp_repeats_is_found() -> None:
    """A fit of Lightning's own strategy goes on inside an epoch."""
    assert "lost" in said_of(DDP_SEED, "ddp")
