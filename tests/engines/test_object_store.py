"""Checkpoints in an object store: fits of two ranks against a server of S3's protocol (moto)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy, newest_checkpoint, read_sharded_checkpoint
from lightning_topt.execution.checkpoint_files import MANIFEST, holds_shards

ROOT = Path(__file__).parents[2]
BUCKET, STEPS = "s3://bucket", 8
SAVE_EVERY = 2


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.losses[self.global_step] = float(self.trainer.callback_metrics["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(folder: str, options: dict[str, Any], resumes: bool, killed_at: int | None) -> None:
    """Train in a process of its own; print the losses of rank 0."""
    if killed_at is not None:
        kill_in_save(killed_at)
    L.seed_everything(0, verbose=False)
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="loss",
        save_top_k=2,
        every_n_train_steps=SAVE_EVERY,
        save_last=True,
    )
    trainer = L.Trainer(
        strategy=AutoParallelStrategy(**options),
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.linspace(-1, 1, STEPS * 2 * 4 * 8).reshape(-1, 8)
    module = Module()
    path = newest_checkpoint(folder) if resumes else None
    trainer.fit(module, DataLoader(data, 4), ckpt_path=path)
    if trainer.is_global_zero:
        print("RESULT " + json.dumps([path, module.losses, sorted(keep.best_k_models)]))


def kill_in_save(number: int) -> None:
    """Let this job be killed as it is about to write the manifest of a save."""
    import s3fs

    own, count = s3fs.S3FileSystem.pipe_file, [0]

    def pipe_file(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(MANIFEST):
            count[0] += 1
            if count[0] == number:
                os.killpg(os.getpgrp(), signal.SIGKILL)
        return own(self, path, *args, **kwargs)

    s3fs.S3FileSystem.pipe_file = pipe_file


def run(
    folder: str, *, resumes: bool = False, killed_at: int | None = None, **options: Any
) -> tuple[str | None, dict[int, float], list[str]]:
    arguments = json.dumps([folder, {"plan": "zero2", **options}, resumes, killed_at])
    job = subprocess.run(
        [sys.executable, "-m", "tests.engines.test_object_store", arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        start_new_session=True,
    )
    if killed_at is not None:
        assert job.returncode == -signal.SIGKILL, job.stderr
        return None, {}, []
    assert job.returncode == 0, job.stdout + job.stderr
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("RESULT ")]
    path, losses, kept = json.loads(line.removeprefix("RESULT "))
    return path, {int(step): loss for step, loss in losses.items()}, kept


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """A server of S3's protocol with a bucket, which processes that are started find."""
    pytest.importorskip("s3fs", reason="no s3fs")
    server = pytest.importorskip("moto.server", reason="no moto[server]").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "of nobody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield
    server.stop()


@pytest.fixture(scope="module")
def undisturbed(store: None) -> dict[int, float]:
    return run(f"{BUCKET}/undisturbed")[1]


@pytest.mark.parametrize(
    "options", [{"checkpoint": "full"}, {"checkpoint": "sharded"}], ids=["full", "sharded"]
)
def test_saved_kept_and_resumed(
    undisturbed: dict[int, float], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder = f"{BUCKET}/{request.node.callspec.id}"
    _, losses, kept = run(folder, **options)
    assert losses == pytest.approx(undisturbed, rel=1e-5)
    import s3fs

    files = s3fs.S3FileSystem()
    names = sorted(path.rpartition("/")[2] for path in files.ls(folder, refresh=True))
    # retention removes whole folders
    assert names == sorted(["last.ckpt", *(path.rpartition("/")[2] for path in kept)])
    assert len(kept) == 2
    is_sharded = options["checkpoint"] == "sharded"
    assert {holds_shards(f"{folder}/{name}") for name in names} == {is_sharded}
    # from an earlier one, on the same ranks: as if undisturbed
    middle = kept[0]
    step = int(middle.rpartition("step=")[2].removesuffix(".ckpt"))
    files.copy(middle, f"{folder}-again/last.ckpt", recursive=True)
    path, resumed, _ = run(f"{folder}-again", resumes=True, **options)
    assert path == f"{folder}-again/last.ckpt"
    assert resumed == pytest.approx({s: v for s, v in losses.items() if s > step}, rel=1e-5)
    if is_sharded:
        assert read_sharded_checkpoint(f"{folder}/last.ckpt")["global_step"] == STEPS


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(
    undisturbed: dict[int, float],
) -> None:
    # saves are those of step 2, last, step 4, last, ...: killed in the second "last"
    folder = f"{BUCKET}/killed"
    options = {"checkpoint": "sharded"}
    run(folder, killed_at=4, **options)
    assert read_sharded_checkpoint(f"{folder}/last.ckpt")["global_step"] == 2
    path, losses, _ = run(folder, resumes=True, **options)
    assert path == f"{folder}/last.ckpt"
    assert losses == pytest.approx({s: v for s, v in undisturbed.items() if s > 2}, rel=1e-5)
    # what the killed save left is gone
    import s3fs

    names = [path.rpartition("/")[2] for path in s3fs.S3FileSystem().ls(path, refresh=True)]
    assert len(names) == 2 and MANIFEST in names


def test_a_folder_without_a_manifest_is_no_checkpoint(store: None) -> None:
    folder = f"{BUCKET}/first"
    run(folder, killed_at=1, checkpoint="sharded")
    assert newest_checkpoint(folder) is None
    import s3fs

    (left,) = s3fs.S3FileSystem().ls(folder, refresh=True)
    with pytest.raises(FileNotFoundError, match="what a save left that was cut off"):
        read_sharded_checkpoint(f"s3://{left}")


if __name__ == "__main__":
    fit(*json.loads(sys.argv[1]))
