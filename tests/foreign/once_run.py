"""Runs counting programs on a pair of ranks under a strategy and compares them with those under
ddp; a pair that hangs or dies names what it ran.
"""

from __future__ import annotations

import faulthandler
import functools
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
Told = tuple[Run, Any]  # what a run left on one rank, and the program's evidence
RANKS = 2


def run_counted(program: Counted, strategy: Strategy) -> Told:
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


def first_difference(one: Any, two: Any, where: str = "evidence", *, exactly: bool = True) -> str:
    """Where two pieces of evidence first differ, and how; "" where they are equal.

    Unless `exactly`, numbers with fractions may differ within float32's reordering.
    """
    if not exactly:
        one, two = rounded(one), rounded(two)
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


def rounded(value: Any) -> Any:
    """`value` with all numbers in it to four digits, in their place."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return type(value)(map(rounded, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return value


def run_on_this_rank(
    rank: int,
    names: Sequence[str],
    strategy: MakeStrategy,
    together: Any,
    told: Any,
    stacks: Sequence[Path],
    limit_seconds: float,
) -> None:
    """Run each program under `strategy`; tell what is begun, what failed, and what it left.

    Ranks begin each run together: one that failed must not send what the other, still running,
    takes for its own.
    """
    # Ranks are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for program in (COUNTED[name] for name in names):
        run_name = f"{program.name} under {strategy.__name__}"
        told.put((rank, "waits", f"to begin {run_name}"))
        together.wait()
        told.put((rank, "runs", run_name))
        with stacks[rank].open("w") as stack:
            faulthandler.dump_traceback_later(0.9 * limit_seconds, file=stack)
            run, evidence = run_counted(program, strategy(program))
            faulthandler.cancel_dump_traceback_later()
        if run.error:
            told.put((rank, "failed", f"{run_name}: {run.error}"))
        told.put((rank, "ended", pickle.dumps((run, evidence))))


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
                args=(_as_torchrun, rank, RANKS, *common, (run_on_this_rank, RANKS, arguments)),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        self.doing, self.failed, self.begun = ["starts"] * RANKS, [""] * RANKS, time.monotonic()
        self.ended: list[list[Told]] = [[] for _ in range(RANKS)]
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
            self.ended[rank].append(pickle.loads(text))
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


def run_programs(
    names: Sequence[str], strategy: MakeStrategy, *, limit_seconds: float, most_lost: int = 3
) -> dict[str, list[Told]]:
    """What each program left on both of 2 ranks under `strategy`; ranks are started once.

    A run that takes longer than `limit_seconds`, or ends its rank, left an error that tells so; the
    programs after it go on with new ranks, until `most_lost` of them were lost.
    """
    load_kernels()
    found: dict[str, list[Told]] = {}
    left, lost = list(names), 0
    while left and lost < most_lost:
        with tempfile.TemporaryDirectory() as folder:
            pair, wrong = Pair(left, strategy, folder, limit_seconds), "cut off"
            try:
                wrong = pair.watch()
            finally:
                pair.end(grace_seconds=0.1 if wrong else 5)
        ended = min(map(len, pair.ended))
        found |= {
            name: [told[index] for told in pair.ended] for index, name in enumerate(left[:ended])
        }
        if not wrong:
            return found
        if ended == len(left):  # all programs ran, and a rank did not end well
            found[left[-1]].append((Run(error=wrong), None))
            return found
        lost += 1
        # A rank that dies before the run of a program was ended by the program before.
        between = (
            ended and f"waits to begin {left[ended]} under {strategy.__name__}, ended" in wrong
        )
        found[left[ended - 1 if between else ended]] = [(Run(error=wrong), None)]
        left = left[ended if between else ended + 1 :]
    return found | {name: [(Run(error="was not run"), None)] for name in left}


@functools.cache
def runs_under_ddp(names: tuple[str, ...]) -> dict[str, list[Told]]:
    """With these, the runs under every other strategy are compared."""
    return run_programs(names, ddp_strategy, limit_seconds=60)  # type: ignore[arg-type]


def compare_counts(
    names: Sequence[str],
    strategy: MakeStrategy,
    *,
    among: Sequence[str] = (),
    exactly: bool = False,
    limit_seconds: float = 60,
) -> list[Outcome]:
    """The outcomes of programs on both of 2 ranks, under ddp and `strategy`.

    The programs `among` which they are run under ddp together, once for all strategies. They must
    be equal to the last bit `exactly`, or where ranks compute as under ddp.
    """
    under_ddp = runs_under_ddp(tuple(among or names))
    outcomes = []
    for name, told in run_programs(names, strategy, limit_seconds=limit_seconds).items():
        for rank, (run, evidence) in enumerate(told):
            # one that was lost was so on both ranks
            expected, expected_evidence = under_ddp[name][min(rank, len(under_ddp[name]) - 1)]
            found = differences(expected, run, exactly=exactly or run.is_plain)
            if not expected.error and not run.error:
                told_of = first_difference(
                    expected_evidence, evidence, exactly=exactly or run.is_plain
                )
                found = [told_of, *found] if told_of else found
            outcomes.append(Outcome(name, found, expected, run))
    return outcomes
