"""Elastic fits that Ray starts: a node is lost, or another one comes, and a worker with it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_topt import AutoParallelStrategy
from tests.processes import runs, wait_until

ray = pytest.importorskip("ray", reason="no ray[train]")
train = pytest.importorskip("ray.train", reason="no ray[train]")

pytestmark = pytest.mark.timeout(400)  # each worker imports torch and Lightning anew
ROOT = Path(__file__).parents[2]
SAMPLES, EPOCHS, BATCH = 48, 2, 4
HELD_AT = 5  # the step at which nodes are lost, or come
SECONDS = 120.0
NODE = {"num_cpus": 1, "include_dashboard": False}


class Numbers(Dataset[tuple[int, Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values, values.sum()[None]


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


class Module(L.LightningModule):
    """Notes the loss and the samples of each step, and waits at one of them."""

    def __init__(self, folder: Path, held_world: int) -> None:
        super().__init__()
        self.net, self.folder, self.held_world = make_net(), folder, held_world

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[1]), batch[2])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, world = self.global_step, self.trainer.world_size
        note = {"rank": self.global_rank, "world": world, "step": step}
        note |= {"loss": float(outputs["loss"]), "samples": batch[0].tolist()}
        with (self.folder / "notes").open("a") as file:
            file.write(json.dumps(note) + "\n")
        if (step, world) == (HELD_AT, self.held_world):
            (self.folder / f"process-{self.global_rank}").write_text(str(os.getpid()))
            (self.folder / f"held-{self.global_rank}").touch()
            wait_for(self.folder / "go")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def wait_for(*paths: Path, fit: Future[Any] | None = None) -> None:
    """Wait for files, at most as long as a fit goes on."""
    deadline = time.monotonic() + SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        if fit is not None and fit.done():
            pytest.fail(f"the fit has ended before: {fit.result()}")
        time.sleep(0.05)


def fit(config: dict[str, Any]) -> None:
    """What a worker runs."""
    from ray.train.lightning import RayLightningEnvironment

    context, folder = train.get_context(), Path(config["folder"])
    workers = context.get_local_world_size()
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=AutoParallelStrategy(plan=config["plan"]),
        accelerator="cpu",
        devices=workers,
        num_nodes=context.get_world_size() // workers,
        plugins=[RayLightningEnvironment()],
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_top_k=0)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(folder, config["held_world"]), loader, ckpt_path="last")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head of one CPU, on which this process is; nodes may come and go."""
    from ray.cluster_utils import Cluster

    ray.shutdown()  # another module's
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, runtime_env={"env_vars": variables})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("plan", [None, "zero2"])
def test_a_fit_goes_on_with_a_node_less(cluster: Any, tmp_path: Path, plan: str | None) -> None:
    """One worker is left and goes on alone."""
    node = cluster.add_node(**NODE)

    def lose() -> None:
        cluster.remove_node(node, allow_graceful=False)
        # its worker lives for a moment longer, in which both would make all steps that are left
        workers = [int((tmp_path / f"process-{rank}").read_text()) for rank in (0, 1)]
        wait_until(lambda: not all(map(runs, workers)))
        (tmp_path / "go").touch()

    check_run(tmp_path, plan, lose, worlds=[2] * 4 + [1] * 16)


@pytest.mark.parametrize("plan", [None, "zero2"])
def test_a_fit_takes_a_node_that_comes(cluster: Any, tmp_path: Path, plan: str | None) -> None:
    """One worker waits until Ray ends it, and two go on from the last checkpoint."""
    check_run(tmp_path, plan, lambda: cluster.add_node(**NODE), worlds=[1] * 4 + [2] * 10)


def check_run(
    folder: Path, plan: str | None, change: Callable[[], object], *, worlds: list[int]
) -> None:
    """Fit while nodes change; each sample counts once in an epoch, losses are those of one process.

    Args:
        folder: of the notes and the checkpoints.
        plan: of the strategy; None: searched.
        change: is called when all workers have made step `HELD_AT`.
        worlds: how many ranks make each step that counts.
    """
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        fit,
        train_loop_config={"folder": str(folder), "plan": plan, "held_world": worlds[0]},
        scaling_config=train.ScalingConfig(
            num_workers=(1, 2), elastic_resize_monitor_interval_s=1.0
        ),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    # A node that starts sets a handler of signals, which the main thread alone may do.
    with ThreadPoolExecutor(1) as other_thread:
        result = other_thread.submit(trainer.fit)
        wait_for(*(folder / f"held-{rank}" for rank in range(worlds[0])), fit=result)
        change()
        result.result()

    notes = notes_that_count(folder)
    found = {note["step"]: note["world"] for note in notes}
    assert [found[step] for step in sorted(found)] == worlds, found
    counts = Counter(index for note in notes for index in note["samples"])
    assert counts == dict.fromkeys(range(SAMPLES), EPOCHS), counts
    check_losses(notes)


def notes_that_count(folder: Path) -> list[dict[str, Any]]:
    """Return the notes without those of steps that a later start has made again."""
    kept: list[dict[str, Any]] = []
    for note in map(json.loads, (folder / "notes").read_text().splitlines()):
        # ranks step together, so a step that was noted begins a new start
        has_begun_again = any(
            other["step"] > note["step"]
            or (
                other["step"] == note["step"]
                and (other["rank"] == note["rank"] or other["world"] != note["world"])
            )
            for other in kept
        )
        if has_begun_again:
            kept = [other for other in kept if other["step"] < note["step"]]
        kept.append(note)
    return kept


def check_losses(notes: list[dict[str, Any]]) -> None:
    """Make each step again with the samples of all its ranks, in one process."""
    net, numbers = make_net(), Numbers()
    optimizer = make_optimizer(net)
    for step in sorted({note["step"] for note in notes}):
        of_step = [note for note in notes if note["step"] == step]
        _, values, sums = zip(
            *(numbers[index] for note in of_step for index in note["samples"]), strict=True
        )
        loss = nn.functional.mse_loss(net(torch.stack(values)), torch.stack(sums))
        noted = sum(note["loss"] for note in of_step) / len(of_step)
        assert noted == pytest.approx(loss.item(), rel=1e-4), step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
