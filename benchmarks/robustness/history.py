"""Whether what the ranks of a trial wrote down is one fit over all samples.

What counts of a run is what the next one goes on from: the batches of optimizer steps that its
checkpoint has. Together these must be each epoch once (`check_samples`), lead to the parameters
that one process has after the same batches (`check_parameters`), and validation must find what one
process finds over all samples (`check_metrics`).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.robustness.training import features_of, losses_of, new_net, new_optimizer
from benchmarks.robustness.trial import Run, Trial

TOLERANCE = 1e-6
Record = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """What went wrong; `kind` is a row of the summary."""

    kind: str
    words: str


@dataclass(frozen=True)
class History:
    """The records of all runs that began to train, rank by rank.

    `reached` has, for each run, the last optimizer step that counts.
    """

    trial: Trial
    runs: list[Run]
    records: list[list[list[Record]]]
    reached: list[float]

    def batches(self, number: int, rank: int) -> list[Record]:
        """Return the batches of a run and a rank that count."""
        return [
            record
            for record in self.records[number][rank]
            if record["kind"] == "batch" and record["step"] <= self.reached[number]
        ]

    def start(self, number: int) -> Record:
        """Return where a run began."""
        return next(r for r in self.records[number][0] if r["kind"] == "start")


def read_records(folder: Path, number: int, ranks: int) -> list[list[Record]]:
    """Return what the ranks of run `number` wrote. A last line may be cut off by a kill."""
    found = []
    for rank in range(ranks):
        path = folder / "records" / f"{number}-{rank}.jsonl"
        lines = path.read_text().split("\n") if path.exists() else [""]
        found.append([json.loads(line) for line in lines[:-1]])
    return found


def check(trial: Trial, folder: Path, *, runs: int, own: str) -> list[Failure]:
    """Return what is wrong with the records of the first `runs` runs, which make a whole fit."""
    numbers, records, starts = [], [], []
    for number in range(runs):
        found = read_records(folder, number, trial.runs[number].ranks)
        begun = [[(r["epoch"], r["step"]) for r in rank if r["kind"] == "start"] for rank in found]
        if not any(begun):
            continue  # nothing was left to train, or nothing had begun
        if any(places != begun[0] for places in begun):
            return [Failure("samples", f"ranks of run {number} begin differently: {begun}")]
        numbers.append(number)
        records.append(found)
        starts.append(begun[0][0][1])
    reached = [
        min([*(float(step) for step in starts[k + 1 :]), math.inf]) for k in range(len(starts))
    ]
    history = History(trial, [trial.runs[n] for n in numbers], records, reached)
    failures = [*check_progress(history, own=own), *check_samples(history)]
    # Other samples lead to other parameters, which says no more.
    if not any(failure.kind == "samples" for failure in failures):
        failures += check_parameters(history)
    return [*failures, *check_metrics(history)]


# ---- checkpoints ---------------------------------------------------------------------------------


def check_progress(history: History, *, own: str) -> Iterator[Failure]:
    """A run goes on from the newest complete checkpoint; after a preemption from the last batch."""
    newest = 0
    for number in range(len(history.records) - 1):
        ranks, next_step = history.records[number], history.start(number + 1)["step"]
        saved = [r["step"] for r in ranks[0] if r["kind"] == "saved"]
        newest = max([newest, *saved])
        if next_step < newest:
            yield Failure("progress", f"saved step {newest}, and went on from {next_step}")
        sent = {r["signal"] for records in ranks for r in records if r["kind"] == "sent"}
        trained = max([r["step"] for rank in ranks for r in rank if r["kind"] == "batch"] or [0])
        is_promised = own == "topt" and sent & {"term", "usr1"}
        if is_promised and next_step != trained:
            yield Failure(
                "progress", f"a signal came, step {trained} was trained, not step {next_step}"
            )


# ---- samples -------------------------------------------------------------------------------------


def check_samples(history: History) -> list[Failure]:
    """Each epoch has every sample once, in one global order.

    Lightning's sampler shuffles (also a loader that does not), the same on any number of ranks, and
    gives all ranks equally many: the last ones may be samples of the epoch's beginning. With
    `drop_last` a last batch that is not full is left out.
    """
    failures = []
    for epoch in range(history.trial.epochs):
        if words := _of_order(history, epoch):
            failures.append(Failure("samples", f"epoch {epoch}: {words}"))
    return failures


def _epoch_of(history: History, number: int, epoch: int) -> list[list[int]]:
    """Return the samples of each rank, in a run's part of an epoch."""
    return [
        [s for r in history.batches(number, rank) if r["epoch"] == epoch for s in r["samples"]]
        for rank in range(history.runs[number].ranks)
    ]


def _compare(found: Sequence[int], items: int, repeated: int) -> str:
    """Say what is lost of `items` samples, and repeated but for the last `repeated` ones."""
    counts: dict[int, int] = defaultdict(int)
    for sample in found[: len(found) - repeated]:
        counts[sample] += 1
    lost = [item for item in range(items) if not counts[item]]
    again = [item for item, count in counts.items() if count > 1]
    return f"lost {lost}, repeated {again}" if lost or again else ""


def _of_order(history: History, epoch: int) -> str:
    trial, order = history.trial, []
    parts: list[tuple[Run, int, int]] = []  # run, samples before it, and each rank's
    for number, run in enumerate(history.runs):
        ranks = _epoch_of(history, number, epoch)
        if len({len(rank) for rank in ranks}) > 1:
            return f"ranks have {[len(rank) for rank in ranks]} samples in run {number}"
        if ranks[0] or history.start(number)["epoch"] == epoch:
            parts.append((run, len(order), len(ranks[0])))
        order += [sample for each in zip(*ranks, strict=True) for sample in each]
    if not order:
        return "it was not trained on"
    # the run that ended the epoch had all that was left
    last = max(k for k, part in enumerate(parts) if part[2])
    run, before, had = parts[last]
    left = _left(trial, run, before)
    ends_later = any(not _left(trial, later, len(order)) for later, _, _ in parts[last + 1 :])
    if had != left and not ends_later:
        return (
            f"{had} samples on each of {run.ranks} ranks after {before} of {trial.items}, not "
            f"{left}: {_compare(order, trial.items, 0) or 'none lost'}"
        )
    extra = max(0, len(order) - trial.items)
    if order[trial.items :] != order[:extra]:
        return f"its end is {order[trial.items :]}, not its beginning {order[:extra]}"
    whole = order[: trial.items]
    if len(set(whole)) < len(whole):
        return _compare(order, trial.items, extra)
    generator = torch.Generator().manual_seed(trial.seed + epoch)
    expected = torch.randperm(trial.items, generator=generator).tolist()
    if whole != expected[: len(whole)]:
        return f"the order is {whole}, not {expected}"
    return ""


def _left(trial: Trial, run: Run, used: int) -> int:
    """Return how many samples each rank has after `used` ones of an epoch."""
    own = -(-max(0, trial.items - used) // run.ranks)
    return own // run.batch_size * run.batch_size if trial.drop_last else own


# ---- one process ---------------------------------------------------------------------------------


def check_parameters(history: History) -> Iterator[Failure]:
    """One process that gets the same batches has the same parameters, and losses of validation."""
    if not history.trial.is_exact:
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        states = one_process(history)
        yield from _compare_with(states, history)
    finally:
        torch.set_default_dtype(before)


def one_process(history: History) -> dict[int, Tensor]:
    """Return the parameters after each optimizer step, trained in one process."""
    trial, net = history.trial, new_net()
    optimizer = new_optimizer(net, adam=trial.adam)
    # by optimizer step, then by batch of its accumulation window
    steps: dict[int, dict[tuple[int, int], list[list[int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for number, run in enumerate(history.runs):
        for rank in range(run.ranks):
            for record in history.batches(number, rank):
                place = record["epoch"], record["batch"]
                steps[record["step"]][place].append(record["samples"])
    states = {0: _flat(net)}
    for step in sorted(steps):
        optimizer.zero_grad()
        for batches in steps[step].values():
            losses = [losses_of(net, features_of(torch.tensor(b))).mean() for b in batches]
            (torch.stack(losses).mean() / trial.accumulate).backward()
        optimizer.step()
        states[step] = _flat(net)
    return states


def _flat(net: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def _compare_with(states: dict[int, Tensor], history: History) -> Iterator[Failure]:
    net = new_net()
    for number, run in enumerate(history.runs):
        items = _evaluated(history.trial, run)
        for rank, records in enumerate(history.records[number]):
            for record in records:
                if record["kind"] not in ("valid", "end"):
                    continue
                if record["step"] > history.reached[number]:
                    continue
                state = states.get(record["step"])
                if state is None:
                    yield Failure("parameters", f"no batch is known of step {record['step']}")
                    return
                if record["kind"] == "end":
                    distance = float((torch.tensor(record["parameters"]) - state).abs().max())
                    if not distance <= TOLERANCE:
                        yield Failure("parameters", f"rank {rank}: off by {distance:.2g}")
                    continue
                torch.nn.utils.vector_to_parameters(state, net.parameters())
                loss = float(losses_of(net, features_of(items)).mean().detach())
                found = record["metrics"]["loss"]
                if not abs(found - loss) <= TOLERANCE * max(1, loss):
                    yield Failure("metrics", f"loss {found} on rank {rank}, not {loss}")


def check_metrics(history: History) -> Iterator[Failure]:
    """Metrics of a known function of a sample are those of what Lightning's sampler gives."""
    for number, ranks in enumerate(history.records):
        items = _evaluated(history.trial, history.runs[number])
        mean = float(torch.sin(items.double() * 1.7).mean())
        expected = {"fixed": mean, "mean": mean, "count": float(len(items))}
        for rank, records in enumerate(ranks):
            for found in (r["metrics"] for r in records if r["kind"] == "valid"):
                wrong = {
                    name: found.get(name)
                    for name, value in expected.items()
                    if not abs(found.get(name, math.nan) - value) <= TOLERANCE
                }
                if wrong:
                    yield Failure("metrics", f"run {number}, rank {rank}: {wrong}, not {expected}")
                    return


def _evaluated(trial: Trial, run: Run) -> Tensor:
    """Return the samples of a validation: the first ones again, until all ranks have as many."""
    items = trial.validation_items
    return torch.arange(-(-items // run.ranks) * run.ranks) % items
