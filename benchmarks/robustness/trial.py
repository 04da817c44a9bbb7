"""What a random trial is: a fit in one to three runs, all drawn from one seed.

Each `Run` but the last has an `Event` that may end it. The next one goes on from the newest
checkpoint, mostly with other ranks, another plan, other batches or other workers.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

EVENTS = ("none", "term", "usr1", "kill", "interrupt")
EXACT_PLANS = ("auto", "ddp", "zero1", "zero2", "zero3")  # gradients of one process
PLANS = (*EXACT_PLANS, "compressed", "local_steps")


@dataclass(frozen=True)
class Event:
    """A signal that ranks send to themselves.

    Attributes:
        kind: one of `EVENTS`. SIGTERM; SIGUSR1 under SLURM; SIGKILL; Ctrl-C, which is SIGINT to
            all processes of the run at once.
        where: the hook, ``"batch_start"``, ``"batch_end"``, ``"save"`` or ``"validation"``.
        at: rank, and the how manieth call of that hook in its run.
    """

    kind: str = "none"
    where: str = "batch_start"
    at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Run:
    """One start of the program, on `ranks` ranks."""

    ranks: int
    plan: str
    form: str  # of its checkpoints
    batch_size: int
    workers: int
    event: Event


@dataclass(frozen=True)
class Trial:
    """A fit of `epochs` epochs over `items` samples, of a plain loader with Lightning's sampler."""

    seed: int
    items: int
    validation_items: int
    shuffle: bool
    drop_last: bool
    accumulate: int
    epochs: int
    save_every: int  # optimizer steps
    adam: bool
    validation_workers: int
    runs: tuple[Run, ...]

    @property
    def is_exact(self) -> bool:
        """Whether one process has the same gradients."""
        return all(run.plan in EXACT_PLANS for run in self.runs)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def draw_trial(seed: int) -> Trial:
    """Return the trial of `seed`."""
    chance = random.Random(seed)
    drop_last = chance.random() < 0.25
    most_runs = chance.choices((1, 2, 3), (20, 55, 25))[0]
    is_lossy = chance.random() < 0.25
    plans = PLANS if is_lossy else EXACT_PLANS
    runs = []
    run = _draw_run(chance, plans)
    for number in range(most_runs):
        is_last = number == most_runs - 1
        event = Event() if is_last else _draw_event(chance, run.ranks)
        runs.append(Run(run.ranks, run.plan, run.form, run.batch_size, run.workers, event))
        other = _draw_run(chance, plans)
        # Each of these changes in half of the resumes.
        kept = [
            getattr(chance.choice((run, other)), name)
            for name in ("ranks", "plan", "form", "batch_size", "workers")
        ]
        run = Run(*kept, Event())
    return Trial(
        seed,
        items=chance.randint(24, 90) if drop_last else chance.randint(4, 90),
        validation_items=chance.randint(1, 30),
        shuffle=chance.random() < 0.7,
        drop_last=drop_last,
        accumulate=chance.choices((1, 2, 3), (65, 20, 15))[0],
        epochs=chance.choices((1, 2, 3), (20, 60, 20))[0],
        save_every=chance.randint(1, 5),
        adam=chance.random() < 0.5,
        validation_workers=chance.choices((0, 1), (80, 20))[0],
        runs=tuple(runs),
    )


def _draw_run(chance: random.Random, plans: tuple[str, ...]) -> Run:
    ranks = chance.choices((1, 2, 3, 4), (20, 40, 20, 20))[0]
    workers = chance.choices((0, 1, 2, 3), (55, 20, 15, 10))[0]
    form = chance.choice(("full", "sharded"))
    return Run(ranks, chance.choice(plans), form, chance.randint(1, 6), workers, Event())


def _draw_event(chance: random.Random, ranks: int) -> Event:
    kind = chance.choices(EVENTS, (5, 30, 15, 35, 15))[0]
    if kind == "none":
        return Event()
    where = chance.choices(("batch_start", "batch_end", "save", "validation"), (40, 30, 15, 15))[0]
    most = {"save": 4, "validation": 2}.get(where, 14)
    who = [chance.randrange(ranks)]
    # SIGTERM may come to all, at different batches; SLURM warns all, others are single.
    if kind in ("term", "usr1") and chance.random() < 0.5:
        who = list(range(ranks))
    at = chance.randint(1, most)
    late = 2 if where.startswith("batch") else 0
    return Event(kind, where, tuple((rank, at + chance.randint(0, late)) for rank in who))


def trial_of(fields: dict[str, Any]) -> Trial:
    """Return the trial that `fields` describe, as read from JSON."""
    runs = tuple(
        Run(**{**run, "event": Event(**{**run["event"], "at": _pairs(run["event"]["at"])})})
        for run in fields["runs"]
    )
    return Trial(**{**fields, "runs": runs})


def _pairs(values: Any) -> tuple[tuple[int, int], ...]:
    return tuple((rank, at) for rank, at in values)
