r"""Run Lightning's own tests with `AutoParallelStrategy` in place of `DDPStrategy`.

    git clone https://github.com/Lightning-AI/pytorch-lightning
    git -C pytorch-lightning checkout 2.6.5
    pip install cloudpickle jsonargparse[signatures] onnx pandas psutil pytest-rerunfailures \
        pytest-timeout scikit-learn tensorboardX
    python -m benchmarks.foreign.lightning_suite pytorch-lightning/tests \
        [--one-device] [tests_pytorch/loops ...]

Shows what fails that passes under ``ddp``. Every name of Lightning's registry that builds a
`DDPStrategy` builds ours. With ``--one-device`` Trainers on one CPU build it too, where Lightning
would take its `SingleDeviceStrategy`. Each file of tests runs in a process of its own. What fails
runs again without the others, and where it fails again, with ``ddp`` in the same places. Results
are kept in ``--work``: the same command goes on where it was stopped. ``@FILE`` names a file with
tests. `results/lightning_suite.md` has the outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from benchmarks.common import ROOT, machine

DEFAULT = (
    *(
        "trainer/test_trainer.py",
        "models/test_hooks.py",
        "models/test_restore.py",
        "trainer/optimization",
    ),
    *("callbacks", "checkpointing", "loops"),
)
CLASSES = {
    "ddp": "lightning.pytorch.strategies:DDPStrategy",
    "topt": "lightning_topt:AutoParallelStrategy",
}
STRATEGY, ONE_DEVICE, RESULTS = (
    f"LIGHTNING_SUITE_{name}" for name in ("STRATEGY", "ONE_DEVICE", "OUT")
)
Outcomes = dict[str, dict[str, Any]]
NOT_RUN: dict[str, Any] = {"outcome": "not run"}
Targets = dict[str, list[str]]  # the name of a process: its tests

# ---- inside pytest -------------------------------------------------------------------------------


class Substitution:
    """A pytest plugin that puts another class in the place of `DDPStrategy`.

    It notes the outcome of each test.
    """

    def __init__(self, class_name: str, *, one_device: bool, results: Path) -> None:
        self.results, self.builders = results, set[str]()
        module, name = class_name.split(":")
        self.strategy = getattr(importlib.import_module(module), name)
        self._note_builders()
        self._replace(one_device)

    def _note_builders(self) -> None:
        original = self.strategy.__init__

        @functools.wraps(original)
        def noting(*args: Any, **options: Any) -> None:
            self.builders.add(_running())
            original(*args, **options)

        self.strategy.__init__ = noting

    def _replace(self, one_device: bool) -> None:
        for entry in StrategyRegistry.values():
            if entry["strategy"] is DDPStrategy:
                entry["strategy"] = self.strategy
        choose = _AcceleratorConnector._choose_strategy

        def chosen(connector: Any) -> Any:
            strategy = choose(connector)
            on_cpu = type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"
            return "ddp" if one_device and on_cpu else strategy

        _AcceleratorConnector._choose_strategy = chosen

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        done = read_outcomes(self.results)
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "outcome": "ended the process or took too long", "reason": ""})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash and crash.message else ""
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self._write(
                {
                    "test": report.nodeid,
                    "outcome": outcome,
                    "reason": reason if outcome == "failed" else "",
                    "text": report.longreprtext if outcome == "failed" else "",
                    "built": report.nodeid in self.builders,
                    "seconds": round(report.duration, 2),
                }
            )

    def _write(self, line: dict[str, Any]) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with self.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _running() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "?").rsplit(" ", 1)[0]


def pytest_configure(config: Any) -> None:
    """Register the substitution that the environment asks for."""
    results, one_device = Path(os.environ[RESULTS]), bool(os.environ.get(ONE_DEVICE))
    config.pluginmanager.register(
        Substitution(os.environ[STRATEGY], one_device=one_device, results=results)
    )


def read_outcomes(path: Path) -> Outcomes:
    """Return the last line about each test; a failed set-up or tear-down stays with its test."""
    outcomes: Outcomes = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        if (
            outcomes.get(entry["test"], {}).get("outcome") != "failed"
            or entry["outcome"] == "failed"
        ):
            outcomes[entry["test"]] = entry
    return outcomes


# ---- the runner ----------------------------------------------------------------------------------


def run_target(
    target: str, tests: list[str], *, strategy: str, options: argparse.Namespace, folder: Path
) -> None:
    """Run `tests` in processes, one after the other, until none is left that a crash took along."""
    results = _results(folder, target)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{options.tests.resolve()}",
    }
    environment |= {
        STRATEGY: CLASSES[strategy],
        RESULTS: str(results.resolve()),
        ONE_DEVICE: "1" * options.one_device,
    }
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "benchmarks.foreign.lightning_suite",
            "-p",
            "no:cacheprovider",
            "-q",
        )
    ]
    command += ["-p", "no:xdist", "-W", "ignore::FutureWarning", f"--timeout={options.timeout}"]
    command += ["--timeout-method=thread", *(test.removeprefix("tests/") for test in tests)]
    for _ in range(100):
        before = len(read_outcomes(results))
        with results.with_suffix(".log").open("a") as log:
            job = subprocess.Popen(
                command,
                cwd=options.tests,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            job.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # ranks that it left
        if job.returncode in (0, 1, 5) or len(read_outcomes(results)) == before:
            return


def run_all(
    targets: Targets, *, strategy: str, options: argparse.Namespace, folder: Path
) -> Outcomes:
    """Run the tests of each target in a process, and return the outcome of each test.

    As many targets run at once as the options say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        run = functools.partial(run_target, strategy=strategy, options=options, folder=folder)
        for number, _ in enumerate(pool.map(run, targets, targets.values()), 1):
            print(f"{folder.name}: {number} of {len(targets)}", file=sys.stderr, flush=True)
    return {
        test: entry
        for name in targets
        for test, entry in read_outcomes(_results(folder, name)).items()
    }


def _results(folder: Path, target: str) -> Path:
    return folder / (
        hashlib.sha256(target.encode()).hexdigest()[:8]
        + Path(target.split("::")[0]).name
        + ".jsonl"
    )


def compare(options: argparse.Namespace) -> str:
    """Run everything with ours, and what fails once more and with ``ddp``.

    Returns the report in Markdown.
    """
    outcomes = run_all(
        options.chosen, strategy="topt", options=options, folder=options.work / "topt"
    )
    failed = [test for test, entry in outcomes.items() if not _fine(entry)]
    again = run_all(
        _by_file(failed), strategy="topt", options=options, folder=options.work / "topt_again"
    )
    still = [test for test in failed if not _fine(again.get(test, NOT_RUN))]
    ddp = run_all(_by_file(still), strategy="ddp", options=options, folder=options.work / "ddp")
    ours = sorted(test for test in still if _fine(ddp.get(test, NOT_RUN)))
    counts = Counter(entry["outcome"] for test, entry in outcomes.items() if test not in failed)
    counts["passed when run again"] = len(failed) - len(still)
    counts["fails with ddp as well"] = len(still) - len(ours)
    counts["fails with ours alone"] = len(ours)
    built = sum(entry.get("built", False) for entry in (outcomes | again).values())
    lines = [
        machine(),
        "",
        f"{built} of {len(outcomes)} tests built the strategy.",
        "",
        "| outcome | tests |",
        "|---|---|",
    ]
    lines += [f"| {outcome} | {count} |" for outcome, count in counts.items()]
    lines += ["", "| fails with ours alone | what it says |", "|---|---|"]
    lines += [f"| `{_short(test)}` | {_cell(again.get(test, NOT_RUN))} |" for test in ours]
    lines += [
        "",
        "Fails with ddp as well:",
        "",
        *(f"- `{_short(t)}`: {_cell(ddp.get(t, NOT_RUN))}" for t in still if t not in ours),
    ]
    return "\n".join(lines)


def _by_file(tests: Sequence[str]) -> Targets:
    return {
        file: [t for t in tests if t.split("::")[0] == file]
        for file in sorted({t.split("::")[0] for t in tests})
    }


def _fine(entry: dict[str, Any]) -> bool:
    return entry["outcome"] in ("passed", "skipped", "xfailed")


def _short(test: str) -> str:
    return test.removeprefix("tests/tests_pytorch/")


def _cell(entry: dict[str, Any]) -> str:
    return str(entry.get("reason") or entry.get("outcome")).replace("|", "\\|")[:160]


def chosen_tests(arguments: Sequence[str], tests: Path) -> dict[str, list[str]]:
    """Return the tests to run, by the file they are in; files that take long come first."""
    chosen: dict[str, list[str]] = {}
    names = []
    for argument in arguments or [f"tests_pytorch/{name}" for name in DEFAULT]:
        names += (
            Path(argument[1:]).read_text().split("\n") if argument.startswith("@") else [argument]
        )
    for name in (name.strip().removeprefix("tests/") for name in names if name.strip()):
        path = tests / name
        if path.is_dir():
            for file in sorted(path.rglob("test_*.py")):
                relative = str(file.relative_to(tests))
                chosen[relative] = [relative]
        else:
            chosen.setdefault(name.split("::")[0], []).append(name)
    return dict(sorted(chosen.items(), key=lambda item: -(tests / item[0]).stat().st_size))


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("tests", type=Path, help="the folder `tests` of a checkout of Lightning")
    parser.add_argument(
        "names", nargs="*", help="files, folders or tests below it, or @FILE with a list"
    )
    parser.add_argument(
        "--one-device", action="store_true", help="Trainers on one CPU run the strategy too"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one test")
    parser.add_argument(
        "--work", type=Path, default=Path("lightning_suite_work"), help="where results are kept"
    )
    options = parser.parse_intermixed_args()
    options.chosen = chosen_tests(options.names, options.tests)
    print(compare(options))


if __name__ == "__main__":
    main()
