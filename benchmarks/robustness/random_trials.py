"""Fits that are killed, interrupted, resumed and resized at random: is every sample trained once?

    python -m benchmarks.robustness.random_trials --seeds 0:1000 --jobs 2
    python -m benchmarks.robustness.random_trials --seeds 0:1000 --strategy ddp
    python -m benchmarks.robustness.random_trials --seed 17 -v        # again, with all that it says
    python -m benchmarks.robustness.random_trials --report            # the table from the rows

A trial (`trial.py`) is drawn from its seed. Its ranks (`training.py`) write down what they train
on, and afterwards that is checked (`history.py`). A seed that has a row already is left out, so a
long list can be run in pieces. Each trial has namespaces of its own, so Linux and root, or a
kernel that lets users make them, are needed: what it leaves as a process, an open port, shared
memory or a file is found there. `--strategy ddp` runs the same trials with Lightning's own
strategy, for which plans and forms of checkpoints mean nothing.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import pkgutil
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import lightning_topt
from benchmarks.common import RESULTS, machine
from benchmarks.robustness.history import Failure, check, read_records
from benchmarks.robustness.training import run_rank
from benchmarks.robustness.trial import Trial, draw_trial, trial_of

KINDS = {
    "hang": "hang",
    "error": "end with an error nobody caused",
    "samples": "lose or repeat samples",
    "parameters": "parameters are not those of one process",
    "metrics": "metrics of validation are not those of one process",
    "progress": "lose a checkpoint's progress",
    "left": "leave a process, port, shared memory or file",
}
STRATEGIES = ("topt", "ddp")
IDLE_SECONDS, RUN_SECONDS = 30.0, 150.0  # without any record; in all
END_SECONDS = 15.0  # for workers of a killed rank, which look every five seconds
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_REC_PRIVATE = 0x44000
CHECKPOINT = r"(epoch=\d+-step=\d+|last|last-signal)(-v\d+)?\.ckpt"
OUTPUTS = re.compile(rf"regular(/{CHECKPOINT})?|hpc_ckpt_\d+\.ckpt")
LIBC = ctypes.CDLL(None, use_errno=True)


# ---- a trial -------------------------------------------------------------------------------------


def run_trial(trial: Trial, folder: Path, *, own: str) -> dict[str, Any]:
    """Run and check a trial in this process, which must be made for it; return its row."""
    begun = time.monotonic()
    isolate()
    for name in ("records", "work", "temporary", "logs"):
        (folder / name).mkdir()
    failures: list[Failure] = []
    runs = []
    for number in range(len(trial.runs)):
        run = run_once(trial, number, folder, own=own)
        runs.append(run)
        failures += run.pop("failures")
        if failures or run["ended"]:
            break
        if number + 1 < len(trial.runs):
            choose_checkpoint(trial, folder)
    if not failures:
        failures = check(trial, folder, runs=len(runs), own=own)
    left = left_behind(folder)
    if not any(failure.kind == "hang" for failure in failures):  # whose ranks this process killed
        failures += left
    return {
        "seed": trial.seed,
        "strategy": own,
        "failures": [[failure.kind, failure.words] for failure in failures],
        "seconds": round(time.monotonic() - begun, 1),
        "runs": runs,
        "trial": trial.fields,
    }


def run_once(trial: Trial, number: int, folder: Path, *, own: str) -> dict[str, Any]:
    """Start the ranks of run `number` and wait for their end."""
    run, begun = trial.runs[number], time.monotonic()
    ranks: dict[int, int] = {}
    group = 0
    for rank in range(run.ranks):
        process = fork(
            lambda rank=rank, group=group: _be_rank(trial, number, rank, folder, own, group)
        )
        ranks[process] = rank
        group = group or process
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(process, group)
    statuses = wait_for_ranks(ranks, folder / "records")
    failures = []
    stuck = sorted(rank for process, rank in ranks.items() if process not in statuses)
    if stuck:
        for process in ranks.keys() - statuses.keys():
            os.kill(process, signal.SIGUSR2)  # its log gets all stacks
        time.sleep(0.5)
        failures.append(Failure("hang", f"run {number}: ranks {stuck} did not end"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    codes = [statuses.get(process) for process in ranks]
    found = read_records(folder, number, run.ranks)
    sent = {r["signal"] for records in found for r in records if r["kind"] == "sent"}
    if not stuck and not sent & {"kill", "interrupt"} and any(codes):
        words = [last_words(folder / "logs" / f"{number}-{r}") for r, c in enumerate(codes) if c]
        failures.append(Failure("error", f"run {number}: {codes} {words[0]}"))
    ended = all(records and records[-1]["kind"] == "end" for records in found)
    return {
        "statuses": codes,
        "sent": sorted(sent),
        "ended": ended,
        "seconds": round(time.monotonic() - begun, 1),
        "failures": failures,
    }


def wait_for_ranks(ranks: Iterable[int], records: Path) -> dict[int, int]:
    """Return the statuses of those that end, while there are new records."""
    statuses: dict[int, int] = {}
    begun = changed = time.monotonic()
    size = 0
    while set(ranks) - set(statuses):
        process, status = os.waitpid(-1, os.WNOHANG)  # workers of dead ranks are ours, too
        if process:
            statuses[process] = os.waitstatus_to_exitcode(status)
            continue
        now = time.monotonic()
        present = sum(path.stat().st_size for path in records.iterdir())
        if present != size:
            size, changed = present, now
        if now - changed > IDLE_SECONDS or now - begun > RUN_SECONDS:
            break
        time.sleep(0.01)
    return statuses


def choose_checkpoint(trial: Trial, folder: Path) -> None:
    """Let the next run go on from the newest checkpoint, as a script of the user's would."""
    work = folder / "work"
    found = [*work.glob("regular/last*.ckpt"), *work.glob("hpc_ckpt_*.ckpt")]
    (folder / "resume").unlink(missing_ok=True)
    if not found:
        return
    newest = max(found, key=_saved_at)
    (folder / "resume").write_text(str(newest))


def _saved_at(path: Path) -> float:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return max(file.stat().st_mtime for file in files)


def last_words(log: Path) -> str:
    """Return the last lines of a log that say something."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-400:]


# ---- processes -----------------------------------------------------------------------------------


def fork(target: Callable[[], None]) -> int:
    """Run `target` in a new process, which ends as a program ends; return its number."""
    sys.stdout.flush()
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        gc.freeze()
        target()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _be_rank(trial: Trial, number: int, rank: int, folder: Path, own: str, group: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setpgid(0, group)
    log = os.open(folder / "logs" / f"{number}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # A shell lets background jobs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = trial.runs[number]
    os.environ.update(
        {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
            **{"WORLD_SIZE": str(run.ranks), "LOCAL_WORLD_SIZE": str(run.ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + number)},
            **{"TORCHELASTIC_RUN_ID": "trial", "GLOO_SOCKET_IFNAME": "lo"},
            "TMPDIR": str(folder / "temporary"),
        }
    )
    # Else each process would look for a folder by writing to it, and may be killed meanwhile.
    tempfile.tempdir = str(folder / "temporary")
    os.chdir(folder / "work")
    run_rank(trial, number, rank, folder, own=own)


def isolate() -> None:
    """Give this process a network and shared memory of its own, and all orphans of the trial.

    Raises OSError where the system does not allow that.
    """
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    user, flags = (os.getuid(), os.getgid()), CLONE_NEWNS | CLONE_NEWNET
    if user[0]:
        flags |= CLONE_NEWUSER
    if LIBC.unshare(flags):
        raise OSError(
            ctypes.get_errno(), "a trial has namespaces of its own: run it as root, or allow them"
        )
    if user[0]:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user[0]} {user[0]} 1")
        Path("/proc/self/gid_map").write_text(f"{user[1]} {user[1]} 1")
    LIBC.mount(None, b"/", None, MS_REC_PRIVATE, None)
    if LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "shared memory of a trial's own could not be made")
    with socket.socket() as any_socket:  # the loopback interface is down in a new network
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def children() -> list[int]:
    """Return the children of this process, those included that have ended and wait for it."""
    return [int(child) for child in Path("/proc/thread-self/children").read_text().split()]


def left_behind(folder: Path) -> list[Failure]:
    """Return what the trial has left in the system, and end its processes."""
    found = []
    deadline = time.monotonic() + END_SECONDS
    # All orphans are children of this process, until none is left.
    while processes := children():
        if not os.waitpid(-1, os.WNOHANG)[0]:
            time.sleep(0.02)
        if time.monotonic() > deadline:
            found += [f"process {name_of(process)}" for process in processes]
            for process in processes:
                os.kill(process, signal.SIGKILL)
            deadline = math.inf
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    found += [f"port {int(address.rpartition(':')[2], 16)}" for address in listening]
    found += [f"shared memory {path.name}" for path in Path("/dev/shm").iterdir()]
    found += [f"temporary file {path.name}" for path in (folder / "temporary").iterdir()]
    work = folder / "work"
    for path in [*work.iterdir(), *(work / "regular").glob("*")]:
        if not OUTPUTS.fullmatch(str(path.relative_to(work))):
            found.append(f"file {path.relative_to(work)}")
    return [Failure("left", ", ".join(found))] if found else []


def name_of(process: int) -> str:
    """Return the number of a process, and what it waits in."""
    with contextlib.suppress(OSError):
        return f"{process} ({Path(f'/proc/{process}/wchan').read_text()})"
    return str(process)


# ---- many of them --------------------------------------------------------------------------------


def prepare() -> None:
    """Import and compile once what each rank needs: ranks are forked from this process."""
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(lightning_topt.__path__, "lightning_topt."):
        importlib.import_module(module.name)
    importlib.import_module("lightning_topt.communication.selection").warm_up()
    gc.collect()
    gc.freeze()


def run_all(trials: list[Trial], *, own: str, jobs: int, done: Callable[[Any, Path], None]) -> None:
    """Run trials, each in a process of its own, `jobs` at a time; `done` gets rows and folders."""
    waiting, running = list(reversed(trials)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            trial = waiting.pop()
            folder = Path(tempfile.mkdtemp(prefix="random-trial-"))

            def target(trial: Trial = trial, folder: Path = folder) -> None:
                row = run_trial(trial, folder, own=own)
                (folder / "row.json").write_text(json.dumps(row))

            running[fork(target)] = trial, folder
        process, _ = os.waitpid(-1, 0)
        trial, folder = running.pop(process)
        try:
            row = folder / "row.json"
            if not row.exists():
                raise RuntimeError(f"trial {trial.seed} could not be run")
            done(json.loads(row.read_text()), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def rows_of(own: str) -> list[dict[str, Any]]:
    """Return the rows that were written, by seed."""
    path = rows_path(own)
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda row: row["seed"])


def rows_path(own: str) -> Path:
    """Return the file of rows of a strategy."""
    return RESULTS / f"random_trials_{own}.jsonl"


# ---- the table -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Trial, dict[str, Any]], bool]] = {
    "undisturbed": lambda trial, row: not _sent(row),
    "SIGTERM or SIGUSR1": lambda trial, row: bool(_sent(row) & {"term", "usr1"}),
    "SIGKILL of a rank": lambda trial, row: "kill" in _sent(row),
    "Ctrl-C": lambda trial, row: "interrupt" in _sent(row),
    "resumed on other ranks": lambda trial, row: (
        len({run.ranks for run in trial.runs[: len(row["runs"])]}) > 1
    ),
    "resumed under another plan": lambda trial, row: (
        len({run.plan for run in trial.runs[: len(row["runs"])]}) > 1
    ),
}


def _sent(row: dict[str, Any]) -> set[str]:
    return {signal for run in row["runs"] for signal in run["sent"]}


def summary() -> str:
    """Return the page of results, from all rows."""
    rows = {own: rows for own in STRATEGIES if (rows := rows_of(own))}
    lines = ["# Random trials", "", machine(), "", "| | " + " | ".join(rows) + " |"]
    lines.append("|---|" + "---:|" * len(rows))

    def add(name: str, count: Callable[[dict[str, Any]], bool], within: Any = None) -> None:
        cells = []
        for each in rows.values():
            among = [row for row in each if within is None or within(row)]
            number = sum(map(count, among))
            cells.append(f"{number} of {len(among)}" if within else str(number))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    add("trials", lambda row: True)
    for kind, words in KINDS.items():
        add(words, lambda row, kind=kind: any(kind == name for name, _ in row["failures"]))
    add("with any of these", lambda row: bool(row["failures"]))
    for name, part in PARTS.items():
        add(
            f"of these: {name}",
            lambda row: bool(row["failures"]),
            lambda row, part=part: part(trial_of(row["trial"]), row),
        )
    for own, each in rows.items():
        seconds = sorted(row["seconds"] for row in each)
        seeds = f"{each[0]['seed']} to {each[-1]['seed']}"
        lines += ["", f"`{own}`: seeds {seeds}, {seconds[len(seconds) // 2]} s in the median."]
        failed = [str(row["seed"]) for row in each if row["failures"]]
        if own == "topt":
            lines.append(f"Seeds that failed: {', '.join(failed) or 'none'}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the trials that are asked for, and write rows and table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:1000", help="first and last + 1")
    parser.add_argument("--seed", type=int, help="this one alone; nothing is kept")
    parser.add_argument("--strategy", choices=STRATEGIES, default="topt")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="write the table, run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="with the ranks' logs")
    options = parser.parse_args()
    own = options.strategy
    if options.report:
        (RESULTS / "random_trials.md").write_text(summary())
        return
    if options.seed is None:
        known = {row["seed"] for row in rows_of(own)}
        seeds = [s for s in range(*map(int, options.seeds.split(":"))) if s not in known]
    else:
        seeds = [options.seed]

    def done(row: dict[str, Any], folder: Path) -> None:
        print(row["seed"], row["seconds"], row["failures"] or "ok", flush=True)
        if options.verbose:
            print(json.dumps(row, indent=1))
            for log in sorted((folder / "logs").iterdir()):
                print(f"---- {log.name}\n{log.read_text()}")
        if options.seed is None:
            with rows_path(own).open("a") as file:
                file.write(json.dumps(row) + "\n")

    prepare()
    run_all([draw_trial(seed) for seed in seeds], own=own, jobs=options.jobs, done=done)
    if options.seed is None:
        (RESULTS / "random_trials.md").write_text(summary())


if __name__ == "__main__":
    main()
