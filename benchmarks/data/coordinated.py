"""Four jobs on one machine that train on the same photographs: alone, and coordinated.

    python -m benchmarks.data.coordinated          # about 3 minutes on 2 cores

Each job is a process of its own with one worker process, as a trial of a search has. A job's step
is the mean of its batch, so preparing takes the time (JPEG decode, random crop, resize and flip
with PIL). Time runs from when all jobs are ready until the last one has finished its last epoch;
rounds are interleaved. Each round has one more set of coordinated jobs, which loses one of them: it
is killed when it has prepared a tenth of an epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.common import RESULTS, ROOT, machine, mib
from lightning_topt.data.coordinated.loader import CoordinatedLoader
from lightning_topt.data.coordinated.preparation import SeededBatches

BATCH, SEED = 32, 0
WIDTH, HEIGHT, CROP, CLASSES = 500, 375, 224, 10  # ImageNet's mean size; the usual input of a net
MEMORY_BYTES = 256 << 20
KINDS = ("uncoordinated", "coordinated")
KILLED = "coordinated, one killed"


def make_files(folder: Path, *, number: int) -> None:
    """`number` JPEG files: crops of scikit-learn's two photographs (640 x 427)."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    for index in range(number):
        rng = np.random.default_rng(index)
        picture = pictures[index % len(pictures)]
        left, top = (
            int(rng.integers(size + 1)) for size in (picture.width - WIDTH, picture.height - HEIGHT)
        )
        path = folder / f"{index:06d}.jpg"
        if not path.exists():
            picture.crop((left, top, left + WIDTH, top + HEIGHT)).save(path, "JPEG", quality=92)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Random crops of half to all of each side, resized to 224 x 224, half of them flipped.

    Each draw is noted in `log`.
    """

    def __init__(self, folder: Path, names: list[str], log: Path) -> None:
        self.folder, self.names, self.log = folder, names, log

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(self.folder / self.names[index]).convert("RGB")
        share, x, y, flip = torch.rand(4).tolist()
        width, height = (int(size * (0.5 + share / 2)) for size in image.size)
        left, top = int(x * (image.width - width)), int(y * (image.height - height))
        image = image.resize(
            (CROP, CROP), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
        )
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), index % CLASSES


def loader_of(kind: str, dataset: Augmented, meet: str) -> Any:
    order = DataLoader(dataset, BATCH, shuffle=True).batch_sampler
    if kind == "uncoordinated":
        return DataLoader(dataset, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    return CoordinatedLoader(
        dataset,
        batches=SeededBatches(order, seed=SEED),
        collate_fn=default_collate,
        directory=meet,
        fingerprint="photographs",
        seed=SEED,
        memory_bytes=MEMORY_BYTES,
    )


def run_job(options: argparse.Namespace) -> None:
    """One job: says "ready", waits for a line, trains, and says what it did."""
    torch.set_num_threads(1)
    folder = Path(options.folder)
    dataset = Augmented(
        folder, sorted(path.name for path in folder.glob("*.jpg")), Path(options.log)
    )
    loader = loader_of(options.job, dataset, options.meet)
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, began, samples, digest, waited = cpu_seconds(), time.monotonic(), 0, hashlib.sha256(), 0.0
    for _ in range(options.epochs):
        asked = time.monotonic()
        for images, labels in loader:
            waited += time.monotonic() - asked
            samples += len(labels)
            digest.update(images.float().mean().numpy().tobytes() + labels.numpy().tobytes())
            asked = time.monotonic()
    ended = time.monotonic()
    if isinstance(loader, CoordinatedLoader):
        loader.close()
    del loader  # ends a DataLoader's workers: only then their time is counted
    own, children = (
        resource.getrusage(who).ru_maxrss << 10
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    report = {
        "seconds": ended - began,
        "samples": samples,
        "digest": digest.hexdigest(),
        "waited": waited,
    }
    report |= {"cpu_seconds": cpu_seconds() - cpu, "peak_bytes": own, "worker_peak_bytes": children}
    print(json.dumps(report), flush=True)


def cpu_seconds() -> float:
    """Of this process and its children that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_jobs(
    kind: str, *, folder: Path, jobs: int, epochs: int, kill_at: int | None = None
) -> dict[str, Any]:
    """Run `jobs` jobs at once: seconds until the last is done, samples prepared by each, reports.

    `kill_at`: samples that the first job has prepared when it is killed, with its worker.
    """
    with tempfile.TemporaryDirectory() as work:
        logs = [Path(work) / f"log{number}" for number in range(jobs)]
        command = [
            sys.executable,
            "-m",
            "benchmarks.data.coordinated",
            f"--job={kind}",
            f"--epochs={epochs}",
        ]
        places = [f"--folder={folder}", f"--meet={work}/meet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [
            subprocess.Popen(
                [*command, *places, f"--log={log}"],
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                **pipes,
            )
            for log in logs
        ]
        try:
            for process in running:
                assert process.stdout.readline() == "ready\n"
            for process in running:
                process.stdin.write("\n")
                process.stdin.flush()
            if kill_at is not None:
                while prepared(logs[0]) < kill_at:
                    time.sleep(0.01)
                os.killpg(running.pop(0).pid, signal.SIGKILL)
            reports = [json.loads(process.communicate(timeout=600)[0]) for process in running]
        finally:
            for process in running:
                process.kill()
        return {
            # until the last job has its last batch
            "seconds": max(report["seconds"] for report in reports),
            "cpu_seconds": sum(report["cpu_seconds"] for report in reports),
            "prepared": [prepared(log) for log in logs],
            "reports": reports,
        }


def prepared(log: Path) -> int:
    """Samples that a job has drawn so far."""
    return len(log.read_text().splitlines()) if log.exists() else 0


def check(kind: str, result: dict[str, Any], *, samples: int, epochs: int) -> None:
    """Each job had every sample; coordinated jobs had the same ones and prepared each once."""
    jobs = len(result["reports"])
    assert all(report["samples"] == samples * epochs for report in result["reports"])
    total = sum(result["prepared"])
    if kind != "uncoordinated":
        assert len({report["digest"] for report in result["reports"]}) == 1
        assert total >= samples * epochs
    else:
        assert total == jobs * samples * epochs


def row(name: str, results: list[dict[str, Any]], baseline: float) -> str:
    seconds = [result["seconds"] for result in results]
    median = statistics.median(seconds)
    shares = [
        prepared / result["reports"][0]["samples"]
        for result in results
        for prepared in result["prepared"]
    ]
    total = statistics.median(
        sum(result["prepared"]) / result["reports"][0]["samples"] for result in results
    )
    cpu = statistics.median(result["cpu_seconds"] for result in results)
    peak = max(report["peak_bytes"] for result in results for report in result["reports"])
    return (
        f"| {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | "
        f"{'-' if name == KILLED else f'{baseline / median:.2f}'} | {cpu:.1f} | {total:.3f} | "
        f"{min(shares):.3f} to {max(shares):.3f} | {mib(peak)} |"
    )


def write(results: dict[str, list[dict[str, Any]]], *, samples: int, epochs: int, jobs: int) -> str:
    baseline = statistics.median(result["seconds"] for result in results["uncoordinated"])
    ratios = [
        alone["seconds"] / together["seconds"]
        for alone, together in zip(results["uncoordinated"], results["coordinated"], strict=True)
    ]
    rounds = len(ratios)
    lines = [
        f"# {jobs} jobs on the same data: prepared once, or by each job",
        "",
        f"`python -m benchmarks.data.coordinated`: {samples} JPEG files of {WIDTH} x {HEIGHT} "
        "(crops of",
        "scikit-learn's photographs), random crop, resize to 224 x 224 and flip with PIL, batches "
        f"of {BATCH}, {epochs}",
        f"epochs, {jobs} jobs with one worker process each; {rounds} rounds, interleaved; median "
        "(range).",
        "",
        machine(),
        "",
        "| | seconds until the last job is done | speed-up | CPU seconds of all jobs | "
        "preparations per sample | share of each job | peak MiB of a job |",
        "|---|---|---|---|---|---|---|",
        *(row(kind, results[kind], baseline) for kind in results),
        "",
        f"Speed-up per round: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}). All {jobs} coordinated jobs got the same batches, bit for bit; each "
        f"sample once per job and epoch. So did the {jobs - 1} that went on after one was killed, "
        "in the midst of its first epoch: its part was prepared by them.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "photographs"))
    parser.add_argument("--job", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options)
        return
    folder = Path(options.folder) / str(options.samples)
    make_files(folder, number=options.samples)
    kinds = (*KINDS, KILLED)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            kill_at = options.samples // 10 if kind == KILLED else None
            name = "coordinated" if kind == KILLED else kind
            result = run_jobs(
                name, folder=folder, jobs=options.jobs, epochs=options.epochs, kill_at=kill_at
            )
            check(kind, result, samples=options.samples, epochs=options.epochs)
            results[kind].append(result)
            print(number, kind, round(result["seconds"], 2), result["prepared"], flush=True)
    together = [
        report for kind in kinds[1:] for result in results[kind] for report in result["reports"]
    ]
    assert len({report["digest"] for report in together}) == 1
    text = write(results, samples=options.samples, epochs=options.epochs, jobs=options.jobs)
    print(text)
    (RESULTS / "data_coordinated.md").write_text(text)


if __name__ == "__main__":
    main()
