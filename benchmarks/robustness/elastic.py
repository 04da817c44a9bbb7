"""Time from a loss to the next step, and goodput under losses, with ``elastic=True``.

    python -m benchmarks.robustness.elastic --parameters 50_000_000 --seconds 600 --every 30

Starts torchrun on this machine (gloo, CPU) twice: undisturbed, and with one rank killed (SIGKILL)
every `--every` seconds, one after the other. Prints, and writes with ``--output``:

    restart_seconds   of each loss, from the kill to the end of the next optimizer step, in parts:
                      the kill until the process group begins again, from there to the step's
                      begin on the last rank, and to its end
    goodput           samples per second with the losses, as a share of those without
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(text.replace("_", "")), default=10**6)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--every", type=float, default=10, help="seconds between two losses")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    quiet, disturbed = measure(options, kills=False), measure(options, kills=True)
    result = {
        "parameters": options.parameters,
        "ranks": options.ranks,
        "every_seconds": options.every,
        "samples_per_second": [quiet["samples_per_second"], disturbed["samples_per_second"]],
        "goodput": disturbed["samples_per_second"] / quiet["samples_per_second"],
        "losses": disturbed["losses"],
    }
    print(json.dumps(result, indent=1))
    for name in ("to_group_seconds", "group_to_begin_seconds", "group_to_step_seconds"):
        values = [loss[name] for loss in disturbed["losses"]]
        if values:
            print(f"{name}: median {statistics.median(values):.2f}, largest {max(values):.2f}")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1))


def measure(options: argparse.Namespace, *, kills: bool) -> dict[str, Any]:
    """Run a job for `options.seconds` after its first step; return what it did."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.ranks), "--max-restarts", "1000"]
        command += ["-m", "benchmarks.robustness.elastic_rank", str(events)]
        command += [str(options.parameters), str(options.batch_size)]
        job = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            first = wait_for(events, job, lambda each: each["what"] == "step")
            begin = first["at"]
            losses: list[dict[str, Any]] = []
            while time.time() < begin + options.seconds:
                time.sleep(min(options.every, max(0, begin + options.seconds - time.time())))
                if kills and time.time() < begin + options.seconds - options.every / 2:
                    rank = len(losses) % options.ranks
                    losses.append(lose(events, job, rank))
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait(timeout=60)
        steps = [each for each in read(events) if each["what"] == "step"]
    # A step is one of all ranks, however often it was made.
    done = {each["step"] for each in steps if begin < each["at"] <= begin + options.seconds}
    samples = len(done) * options.ranks * options.batch_size
    return {"samples_per_second": samples / options.seconds, "losses": losses}


def lose(events: Path, job: subprocess.Popen[bytes], rank: int) -> dict[str, Any]:
    """Kill `rank`, and return how long each part took until the next step."""
    begun = [each for each in read(events) if each["what"] == "begun" and each["rank"] == rank]
    killed = time.time()
    os.kill(begun[-1]["training"], signal.SIGKILL)
    group = wait_for(events, job, lambda each: each["what"] == "group" and each["at"] > killed)
    step = wait_for(events, job, lambda each: each["what"] == "step" and each["at"] > group["at"])
    first: dict[int, float] = {}
    for each in read(events):
        if each["what"] == "batch" and each["at"] > group["at"]:
            first.setdefault(each["rank"], each["at"])
    return {
        "rank": rank,
        "to_group_seconds": group["at"] - killed,
        "group_to_begin_seconds": max(first.values()) - group["at"],
        "group_to_step_seconds": step["at"] - group["at"],
    }


def wait_for(events: Path, job: subprocess.Popen[bytes], is_it: Any) -> dict[str, Any]:
    """Return the first event that `is_it`. Raises RuntimeError after two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.poll() is None:
        for each in read(events):
            if is_it(each):
                return each
        time.sleep(0.01)
    raise RuntimeError("the job has ended, or makes no steps")


def read(events: Path) -> list[dict[str, Any]]:
    """Return what the ranks have written, whole lines only."""
    if not events.exists():
        return []
    lines = events.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    main()
