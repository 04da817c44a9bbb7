"""What `strategy="topt"` costs against Lightning's `ddp` under the same plan.

    python -m benchmarks.foreign.overhead        # about 6 minutes on 2 cores

Also shows how long planning takes. Rounds are interleaved; each is a job of its own (two CPU ranks,
one thread each).
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.common import RESULTS, machine, run_gpt

SMALL = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "seq_len": 128,
    "batch_size": 8,
    "steps": 60,
    "warmup": 10,
}
GPT2 = {
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "seq_len": 256,
    "batch_size": 1,
    "steps": 5,
    "warmup": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(run_gpt(strategy="ddp", **SMALL)["step_seconds"])
        ours.append(run_gpt(strategy="topt", plan="ddp", **SMALL)["step_seconds"])
        print(f"ddp {1e3 * theirs[-1]:.1f} ms, topt {1e3 * ours[-1]:.1f} ms", flush=True)
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    ratio = statistics.median(ours) / statistics.median(theirs)
    lines = [
        "# Overhead of the strategy, and planning time",
        "",
        machine(),
        "",
        f"Step time under Lightning's ddp: median {1e3 * statistics.median(theirs):.1f} ms "
        f"({1e3 * min(theirs):.1f} to {1e3 * max(theirs):.1f}) over {rounds} interleaved rounds;",
        f"under topt running the same plan: median {1e3 * statistics.median(ours):.1f} ms "
        f"({1e3 * min(ours):.1f} to {1e3 * max(ours):.1f}).",
        f"Ratio of medians **{ratio:.3f}**; round by round {ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"median {statistics.median(ratios):.3f}.",
        "",
    ]
    seconds = [run_gpt(strategy="topt", memory_limit="3GiB", **GPT2) for _ in range(3)]
    times = [result["planning_seconds"] for result in seconds]
    lines.append(
        f"Planning a 12-layer GPT of {seconds[0]['parameters'] / 1e6:.0f} M parameters on 2 ranks "
        f"(capture, calibration, search of {seconds[0]['points']} plans on the frontier, choice): "
        f"median **{statistics.median(times):.2f} s** ({min(times):.2f} to {max(times):.2f}) over "
        "3 runs."
    )
    print("\n".join(lines))
    (RESULTS / "overhead.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
