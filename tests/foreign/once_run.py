"""Runs counting programs on two ranks under a strategy and compares them with those under ddp."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from tests.foreign.once_shelf import COUNTED, STEPS, Built, Counted
from tests.foreign.run import Outcome, Run, ddp_strategy, differences, run_program
from tests.foreign.shelf import Program
from tests.launch import run_ranks
from tests.plugins.trainer_ranks import _as_torchrun

MakeStrategy = Callable[[Any], Strategy]
Told = tuple[Run, Any]  # what a run left on one rank, and the program's evidence
RANKS, LIMIT_SECONDS = 2, 60  # of one program


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
    rank: int, names: Sequence[str], strategy: MakeStrategy, together: Any, folder: Path
) -> list[Told]:
    """Run each program under `strategy`. One that does not end, ends its rank with its stack.

    Ranks begin each run together: one that failed must not send what the other, still running,
    takes for its own.
    """
    # Ranks are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    results = []
    with (folder / f"rank{rank}").open("w") as log:
        for program in (COUNTED[name] for name in names):
            together.wait(LIMIT_SECONDS)
            log.seek(0)
            log.truncate()
            print(
                f"rank {rank} runs {program.name} under {strategy.__name__}", file=log, flush=True
            )
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=log)
            results.append(run_counted(program, strategy(program)))
            faulthandler.cancel_dump_traceback_later()
    return results


def run_programs(names: Sequence[str], strategy: MakeStrategy) -> dict[str, list[Told]]:
    """What each program left on both of 2 ranks under `strategy`; ranks are started once.

    Raises RuntimeError with what both ranks did where one of them ended or did not.
    """
    together = multiprocessing.get_context("fork").Barrier(RANKS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        call = run_on_this_rank, RANKS, (names, strategy, together, folder)
        try:
            ranks = run_ranks(_as_torchrun, RANKS, *call, timeout_seconds=LIMIT_SECONDS * 10)
        except RuntimeError as error:
            logs = "\n".join(path.read_text()[:3000] for path in sorted(folder.iterdir()))
            raise RuntimeError(f"{error}\n{logs}") from None
    return {name: list(told) for name, *told in zip(names, *ranks, strict=True)}


@functools.cache
def runs_under_ddp(names: tuple[str, ...]) -> dict[str, list[Told]]:
    """With these, the runs under every other strategy are compared."""
    return run_programs(names, ddp_strategy)  # type: ignore[arg-type]


def compare_counts(
    names: Sequence[str], strategy: MakeStrategy, *, among: Sequence[str]
) -> list[Outcome]:
    """The outcomes of programs on both of 2 ranks, under ddp and `strategy`.

    The programs `among` which they are run under ddp together, once for all strategies. They must
    be equal to the last bit where ranks compute as under ddp.
    """
    under_ddp = runs_under_ddp(tuple(among))
    outcomes = []
    for name, ranks in run_programs(names, strategy).items():
        for (expected, expected_evidence), (run, evidence) in zip(
            under_ddp[name], ranks, strict=True
        ):
            found = differences(expected, run, exactly=run.is_plain)
            if not expected.error and not run.error:
                of_evidence = first_difference(expected_evidence, evidence, exactly=run.is_plain)
                found = [of_evidence, *found] if of_evidence else found
            outcomes.append(Outcome(name, found, expected, run))
    return outcomes
