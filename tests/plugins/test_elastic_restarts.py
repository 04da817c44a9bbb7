"""torchrun restarts a job whose rank was killed: it goes on from the last checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_topt.communication.rank_watch import attempt_store
from tests.preloaded import preloaded_topt

SCRIPT = """
import os, signal, sys
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_topt import (
    AutoParallelStrategy, CachedDataModule, CompressedDDPStrategy, LocalSteps, LocalStepsStrategy,
    TopK,
)
from tests.plugins.trainer_ranks import RecordingGPT, loader
from tests.plugins.test_compressed_ddp import SgdGPT

folder, again = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"

class Dies(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(4)

def cached():
    return CachedDataModule(Data(), directory=folder + "/cache", memory_bytes=2**24)

def fit(name, strategy, data, *, dies=False):
    saves = ModelCheckpoint(f"{folder}/{name}", save_last=True, every_n_train_steps=2, save_top_k=0)
    module = (SgdGPT if name == "compressed" else RecordingGPT)()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False,
        callbacks=[saves, Dies()] if dies else [saves], enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, max_steps=-1 if again or dies else 4,
    )
    trainer.fit(module, data, ckpt_path="last" if again else None)
    if trainer.is_global_zero:
        print(f"{name}: {trainer.global_step} steps, {len(module.losses)} of them here", flush=True)

fit("zero3", AutoParallelStrategy(plan="zero3"), loader(4))
fit("compressed", CompressedDDPStrategy(TopK(density=0.1)), loader(4))
fit("local", LocalStepsStrategy(LocalSteps(every=2)), loader(4))
fit("search", AutoParallelStrategy(), cached(), dies=not again)
"""


def test_a_restarted_job_goes_on_under_every_strategy(tmp_path: Path) -> None:
    """The first attempt leaves the middle of every fit, and ends with the last one's rank."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        preloaded_topt(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    job = subprocess.Popen(
        [*command, str(script), str(tmp_path)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, output[-5000:]
    first = [(name, "4", "4") for name in ("zero3", "compressed", "local")]
    second = [(name, "8", "4") for name in ("zero3", "compressed", "local", "search")]
    assert (
        re.findall(r"^(\w+): (\d+) steps, (\d+) of them here", output, re.MULTILINE)
        == first + second
    ), output[-5000:]


def test_ranks_of_an_attempt_find_each_other_among_what_others_left() -> None:
    """Also where a rank of the attempt before is silent, and one comes late, after another."""
    limit, found = timedelta(seconds=30), {}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join(attempt: int, rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        own = attempt_store(store, rank=rank, world_size=3, timeout=limit)
        assert not own.check(["left"])
        found[attempt, rank] = own

    def together(attempt: int, *, order: tuple[int, ...]) -> None:
        threads = [threading.Thread(target=join, args=(attempt, rank)) for rank in order]
        for thread in threads:
            thread.start()
            thread.join(timeout=0.1)  # the next comes later
        for thread in threads:
            thread.join()
        for rank in order:
            found[attempt, rank].set(f"{rank}", str(attempt))
        assert all(
            found[attempt, rank].get(str(other)) == str(attempt).encode()
            for rank in order
            for other in order
        )
        found[attempt, 0].set("left", "by the attempt before")

    together(0, order=(0, 1, 2))
    server.set(
        "lightning_topt/attempt/token/1", "of a rank that was started again before the others came"
    )
    together(1, order=(2, 0, 1))
    together(2, order=(1, 2, 0))
