"""One part of what several GPUs can show, as one rank of a torchrun.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.multi_gpu plans --out FOLDER
    python -m benchmarks.multi_gpu summary --out FOLDER

`benchmarks/multi_gpu.sh` starts all of them. A case that was begun is not begun again.
"""

from __future__ import annotations

import argparse
import importlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_report.reporting import Report, read_lines, summarize
from benchmarks.multi_gpu.job import Job

PARTS = ("hazards", "collectives", "plans", "pipelines")
_CALL_SECONDS = 60.0  # that a collective call may take


def main() -> None:
    """Run one part as this rank, or write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "summary"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    lines = options.out / "multi_gpu.jsonl"
    if options.part == "summary":
        (options.out / "summary.md").write_text(summarize(read_lines(lines), title="Several GPUs"))
        return
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    cuda = options.device == "cuda"
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timedelta(seconds=_CALL_SECONDS),
        device_id=device if cuda else None,  # as Lightning does
    )
    report = Report(f"{options.part}, {ranks} ranks", lines, device, options.quick, float("inf"))
    job = Job(report, dist.get_rank(), ranks)
    importlib.import_module(f"benchmarks.multi_gpu.{options.part}").run(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
