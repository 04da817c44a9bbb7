"""What `topt plan` takes for machines that nobody has: CPU seconds and peak memory.

    python -m benchmarks.search.what_if                  # --only PART-OF-A-NAME writes nothing

Whole commands are measured, capture included. Each is a process of its own, from the start of
Python to the written files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, JobFailed, machine

COUNTS = "device_counts=[64,128,256,512,1024]"
CLUSTERS = "cluster=[a100_128x8,h100_128x8,a100_64x8]"
CASES = {
    "Llama 3 70B on 1,024 H100": ["model=llama3_70b", "cluster=h100_128x8", "batch_size=1024"],
    "the same without tensor axes": [
        "model=llama3_70b",
        "cluster=h100_128x8",
        "batch_size=1024",
        "tensor=false",
    ],
    "Llama 3 405B on 512 H100": [
        "model=llama3_405b",
        "cluster=h100_128x8",
        "device_counts=[512]",
        "batch_size=512",
    ],
    "Llama 3 70B, 5 counts x 3 clusters": ["model=llama3_70b", CLUSTERS, COUNTS, "batch_size=1024"],
    "GPT of 48 layers, 5 counts x 3 clusters": [
        *(
            "model=gpt",
            "model.num_layers=48",
            "model.hidden=1024",
            "model.num_heads=16",
            "model.seq_len=1024",
        ),
        *(CLUSTERS, COUNTS, "batch_size=1024"),
    ],
}


def measure(words: list[str]) -> dict[str, Any]:
    """Run `topt plan` with `words`.

    Returns seconds of CPU and of the clock, bytes at the peak, scenarios and the chosen plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "topt_console",
            "plan",
            *("--config-dir", f"{ROOT}/examples/conf"),
            *words,
            f"hydra.run.dir={folder}/run",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        start = time.perf_counter()
        with Path(folder, "output").open("w+") as output:
            job = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder
            )
            _, status, used = os.wait4(job.pid, 0)
            seconds = time.perf_counter() - start
            job.returncode = os.waitstatus_to_exitcode(status)
            if job.returncode:
                output.seek(0)
                raise JobFailed(f"exit status {job.returncode}", steps=0, output=output.read())
        found = json.loads(Path(folder, "run", "scenarios.json").read_text())
    best = found["estimates"]
    (chosen,) = (each for each in best if each["chosen"])
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "seconds": seconds,
        "bytes": used.ru_maxrss * 1024,
        "scenarios": len(best),
        "chosen": f"{chosen['devices']} x {chosen['cluster']}: {chosen['plan']}, "
        f"{chosen['step_seconds']:.3g} s",
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Return the row of a case."""
    size = f"{found['bytes'] / 2**30:.2f}"
    return (
        f"| {name} | {found['cpu']:.1f} | {found['seconds']:.1f} | {size} | {found['scenarios']} | "
        f"{found['chosen']} |"
    )


def main() -> None:
    """Measure all cases and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    lines = [
        "# Planning for machines that nobody has",
        "",
        "`python -m benchmarks.search.what_if`",
        "",
        machine(),
        f"- load average before the run: {os.getloadavg()[0]:.1f}",
        "- whole commands, from the start of Python to the written files; CPU of all processes, "
        "bytes of the largest one; a process on each core searches where there are several "
        "scenarios, with one thread each",
        "",
        "| question | CPU s | s | peak GiB | scenarios with a plan | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for name, words in CASES.items():
        if only in name:
            lines.append(line(name, measure(words)))
            print(lines[-1], flush=True)
    if only:
        return
    lines += [
        "",
        "Commands:",
        "",
        *(f"- `topt plan {' '.join(words)}`" for words in CASES.values()),
    ]
    (RESULTS / "what_if_search.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except JobFailed as failed:
        sys.exit(f"{failed}\n{failed.output[-4000:]}")
