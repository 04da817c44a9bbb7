"""Runs counting programs on a pair of ranks under ddp and another strategy; a pair that hangs or
dies names what it ran.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from tests.foreign.once_shelf import COUNTED, STEPS, Built, Counted
from tests.foreign.run import Outcome, Run, ddp_strategy, differences, run_program
from tests.foreign.shelf import Program
from tests.launch import _rank, load_kernels
from tests.plugins.trainer_ranks import _as_torchrun

MakeStrategy = Callable[[Any], Strategy]
RANKS = 2


def run_counted(program: Counted, strategy: Strategy) -> tuple[Run, Any]:
    """Run `program` on this rank as `run_program` does; its evidence too."""
    built: list[Built] = []
    options = {"limit_train_batches": STEPS, **program.options}

    def make() -> Any:
        built.append(program.make())
        options.update(built[0].options)
        return built[0].module, built[0].data

    run, evidence = (
        run_program(Program(program.name, make, options, program.find_unused), strategy),
        None,
    )
    if not run.error:
        try:
            evidence = built[0].evidence()
        except Exception:
            run.error = traceback.format_exc()
    return run, evidence


def first_difference(one: Any, two: Any, where: str = "evidence") -> str:
    """Where two pieces of evidence first differ, and how; "" where they are equal."""
    if type(one) is type(two) and one == two:
        return ""
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [
            key
            for key in {**one, **two}
            if key not in one or key not in two or one[key] != two[key]
        ]
        if keys and keys[0] in one and keys[0] in two:
            return first_difference(one[keys[0]], two[keys[0]], f"{where}[{keys[0]!r}]")
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        for index, (left, right) in enumerate(zip(one, two, strict=False)):
            if left != right:
                lengths = f" (of {len(one)} against {len(two)})" if len(one) != len(two) else ""
                return first_difference(left, right, f"{where}[{index}]{lengths}")
        return (
            f"{where} has {len(one)} entries against {len(two)}: {one!r:.200} against {two!r:.200}"
        )
    return f"{where}: {one!r:.200} against {two!r:.200}"


def compare_on_this_rank(
    rank: int,
    names: Sequence[str],
    strategy: MakeStrategy,
    together: Any,
    told: Any,
    stacks: Sequence[Path],
    limit_seconds: float,
) -> None:
    """Run each program under ddp and under `strategy`; tell what is begun, what failed, and how
    they differ.

    Ranks begin each run together: one that failed must not send what the other, still running,
    takes for its own.
    """
    # Ranks are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for program in (COUNTED[name] for name in names):
        runs = []
        for make in (ddp_strategy, strategy):
            run_name = f"{program.name} under {make.__name__}"
            told.put((rank, "waits", f"to begin {run_name}"))
            together.wait()
            told.put((rank, "runs", run_name))
            with stacks[rank].open("w") as stack:
                faulthandler.dump_traceback_later(0.9 * limit_seconds, file=stack)
                runs.append(run_counted(program, make(program)))  # type: ignore[arg-type]
                faulthandler.cancel_dump_traceback_later()
            if error := runs[-1][0].error:
                told.put((rank, "failed", f"{run_name}: {error}"))
        (expected, counts), (run, other_counts) = runs
        found = differences(expected, run, exactly=run.is_plain)
        if (
            not expected.error
            and not run.error
            and (difference := first_difference(counts, other_counts))
        ):
            found.insert(0, difference)
        expected.state, run.state = {}, {}
        told.put((rank, "ended", pickle.dumps(Outcome(program.name, found, expected, run))))


class Pair:
    """Two ranks that run programs one after the other, and what they have told so far."""

    def __init__(
        self, names: Sequence[str], strategy: MakeStrategy, folder: str, limit_seconds: float
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.results, self.told, self.limit_seconds = (
            context.SimpleQueue(),
            context.SimpleQueue(),
            limit_seconds,
        )
        self.stacks = [Path(folder, f"stack{rank}") for rank in range(RANKS)]
        arguments = (names, strategy, context.Barrier(RANKS), self.told, self.stacks, limit_seconds)
        common = (f"{folder}/store", self.results, context.Barrier(RANKS), 2 * limit_seconds)
        self.processes = [
            context.Process(
                target=_rank,
                args=(_as_torchrun, rank, RANKS, *common, (compare_on_this_rank, RANKS, arguments)),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        self.doing, self.failed, self.begun = ["starts"] * RANKS, [""] * RANKS, time.monotonic()
        self.outcomes: list[list[Outcome]] = [[] for _ in range(RANKS)]
        for process in self.processes:
            process.start()

    def watch(self) -> str:
        """Return "" when both ranks have ended, or what went wrong and where."""
        ended: set[int] = set()
        while len(ended) < RANKS:
            running = [rank for rank in range(RANKS) if rank not in ended]
            sources: list[Any] = [self.told._reader, self.results._reader]  # type: ignore[attr-defined]
            sources += [self.processes[rank].sentinel for rank in running]
            ready = wait(
                sources, timeout=max(0.0, self.begun + self.limit_seconds - time.monotonic())
            )
            if sources[0] in ready:
                self.hear(*self.told.get())
            elif sources[1] in ready:
                rank, _, error = self.results.get()
                if error:
                    return f"rank {rank} failed: {error}"
                ended.add(rank)
            elif ready:
                return f"a rank ended by itself; {self.state()}"
            else:
                return f"no end within {self.limit_seconds:.0f} s; {self.state()}"
        return ""

    def hear(self, rank: int, word: str, text: Any) -> None:
        if word == "ended":
            self.outcomes[rank].append(pickle.loads(text))
        elif word == "failed":
            self.failed[rank] = text
        else:
            self.doing[rank], self.begun = f"{word} {text}", time.monotonic()
            self.failed[rank] = "" if word == "runs" else self.failed[rank]

    def state(self) -> str:
        """What each rank does, the last error that it met, and where its main thread stands."""
        until = time.monotonic() + 1
        while self.told._reader.poll(max(0.0, until - time.monotonic())):  # type: ignore[attr-defined]
            self.hear(*self.told.get())
        lines = []
        for rank, file in enumerate(self.stacks):
            threads = file.read_text().split("\n\n") if file.exists() else []
            threads = [thread for thread in threads if __file__ in thread]
            code = self.processes[rank].exitcode
            about = f"rank {rank} {self.doing[rank]}" + (
                "" if code is None else f", ended with {code}"
            )
            lines += [
                about,
                self.failed[rank],
                "\n".join(threads[0].splitlines()[1:16]) if threads else "",
            ]
        return "\n".join(filter(None, lines))

    def end(self, grace_seconds: float) -> None:
        for process in self.processes:
            process.join(timeout=grace_seconds)
            if process.is_alive():
                process.kill()
                process.join()


def compare_counts(
    names: Sequence[str], strategy: MakeStrategy, *, limit_seconds: float = 60, most_lost: int = 3
) -> list[Outcome]:
    """The outcomes of all programs on both of 2 ranks, under ddp and `strategy`; ranks are started
    once.

    A run that takes longer than `limit_seconds`, or ends its rank, is told as a difference; the
    programs after it go on with new ranks, until `most_lost` of them were lost.
    """
    load_kernels()
    outcomes: list[Outcome] = []
    left, lost = list(names), 0
    while left and lost < most_lost:
        with tempfile.TemporaryDirectory() as folder:
            pair, wrong = Pair(left, strategy, folder, limit_seconds), "cut off"
            try:
                wrong = pair.watch()
            finally:
                pair.end(grace_seconds=0.1 if wrong else 5)
        ended = min(map(len, pair.outcomes))
        outcomes += [outcome for told in pair.outcomes for outcome in told[:ended]]
        if not wrong:
            return outcomes
        if ended == len(left):  # all programs ran, and a rank did not end well
            return [*outcomes, Outcome(left[-1], [wrong], Run(), Run(error=wrong))]
        lost += 1
        # A rank that dies before the first run of a program was ended by the program before.
        between = (
            ended and f"waits to begin {left[ended]} under {ddp_strategy.__name__}, ended" in wrong
        )
        outcomes.append(
            Outcome(left[ended - 1 if between else ended], [wrong], Run(), Run(error=wrong))
        )
        left = left[ended if between else ended + 1 :]
    outcomes += [Outcome(name, ["was not run"], Run(), Run(error="was not run")) for name in left]
    return outcomes
