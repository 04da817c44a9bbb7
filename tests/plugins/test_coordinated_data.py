"""`CoordinatedDataModule` in Trainers: trials side by side, resume, ranks, and what it refuses."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import random
import traceback
import types
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from lightning_topt.data.coordinated.coordinator_link import is_supported
from lightning_topt.data.coordinated.preparation import SeededBatches
from lightning_topt.plugins.cached_data import CachedDataModule
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux")
NUM_SAMPLES, BATCH_SIZE = 20, 4


class Noisy(Dataset):
    def __init__(self, log: Path | None = None, *, noise: float = 1.0) -> None:
        self.log, self.noise = log, noise

    def __getstate__(self):
        return {"noise": self.noise}  # the log is not part of the data

    def __setstate__(self, state):
        vars(self).update(log=None, **state)

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        return torch.full((3,), float(index)) + self.noise * torch.rand(3)


class Data(pl.LightningDataModule):
    def __init__(self, dataset=None, **options) -> None:
        super().__init__()
        self.dataset = dataset or Noisy()
        self.options = {"batch_size": BATCH_SIZE, "shuffle": True, **options}
        self.torn_down = 0

    def train_dataloader(self):
        return DataLoader(self.dataset, **self.options)

    def val_dataloader(self):
        return DataLoader(Noisy(noise=0.0), batch_size=BATCH_SIZE)

    def teardown(self, stage):
        self.torn_down += 1


class Model(pl.LightningModule):
    """Keeps a digest of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.got: list[str] = []

    def training_step(self, batch, batch_idx):
        self.got.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest())
        return (batch @ self.weight).square().mean()

    def validation_step(self, batch, batch_idx):
        assert batch.shape == (BATCH_SIZE, 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(data, *, epochs=2, model=None, ckpt_path=None, **options):
    model = model or Model()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", **{**quiet, **options})
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model, trainer


class Together(pl.Callback):
    """Both trials have joined before either begins; one that had not would prepare what the other
    has had.
    """

    def __init__(self, data, barrier) -> None:
        self.data, self.barrier = data, barrier

    def on_train_start(self, trainer, pl_module):
        self.data._loaders[0]._joined()
        self.barrier.wait(30)


def trial(number, directory, log, barrier, results):
    try:
        torch.set_num_threads(1)
        pl.seed_everything(number)  # trials have their own seeds
        data = CoordinatedDataModule(Data(Noisy(log)), directory=directory, memory_bytes=1 << 20)
        model, _ = fit(data, epochs=3, callbacks=[Together(data, barrier)])
        (counts,) = data.statistics()
        results.put((number, model.got, counts.own + counts.others, counts.alone, None))
    except BaseException:
        results.put((number, [], 0, 0, traceback.format_exc()))


def test_trials_get_the_same_batches_and_prepare_them_once(tmp_path):
    context = mp.get_context("fork")
    results, barrier = context.SimpleQueue(), context.Barrier(2)
    logs = [tmp_path / "a", tmp_path / "b"]
    trials = [
        context.Process(target=trial, args=(number, tmp_path / "meet", log, barrier, results))
        for number, log in enumerate(logs)
    ]
    for process in trials:
        process.start()
    try:
        assert results._reader.poll(60)
        got = [results.get()]
        assert results._reader.poll(60)
        got.append(results.get())
    finally:
        for process in trials:
            process.join(10)
            process.kill()
    assert [error for *_, error in got if error] == []
    assert got[0][1] == got[1][1] and len(set(got[0][1])) == 3 * NUM_SAMPLES // BATCH_SIZE
    assert [shared for _, _, shared, _, _ in got] == [15, 15] and [
        alone for *_, alone, _ in got
    ] == [0, 0]
    drawn = sum(len(log.read_text().split()) for log in logs if log.exists())
    assert drawn == 3 * NUM_SAMPLES


def alone(epochs, *, seed=0, dataset=None):
    """The same batches by a plain loop."""
    dataset = dataset or Noisy()
    batches = SeededBatches(BatchSampler(RandomSampler(dataset), BATCH_SIZE, False), seed=seed)
    digests = []
    state = torch.get_rng_state()
    for epoch in range(epochs):
        for number, indices in enumerate(batches(epoch)):
            words = np.random.SeedSequence([seed, epoch, number]).generate_state(4)
            torch.manual_seed(int(words[2]) << 32 | int(words[3]))
            batch = torch.stack([dataset[index] for index in indices])
            digests.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest())
    torch.set_rng_state(state)
    return digests


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainer_sees_the_batches_of_seed_and_epoch(tmp_path, num_workers):
    wrapped = Data(num_workers=num_workers)
    data = CoordinatedDataModule(wrapped, directory=tmp_path / "meet", memory_bytes=1 << 20, seed=3)
    model, _ = fit(data)
    assert model.got == alone(2, seed=3)
    assert (
        data.options == wrapped.options
        and wrapped.torn_down == 1
        and wrapped.trainer is data.trainer
    )
    assert not (tmp_path / "meet").exists()
    assert all(loader._membership is None for loader in data._loaders)


def test_training_goes_on_in_the_middle_of_an_epoch(tmp_path):
    def data():
        return CoordinatedDataModule(Data(), directory=tmp_path / "meet", memory_bytes=1 << 20)

    saver = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}"
    )
    first, _ = fit(data(), callbacks=[saver], enable_checkpointing=True)
    second, _ = fit(data(), ckpt_path=tmp_path / "step=7.ckpt")
    assert first.got == alone(2) and second.got == alone(2)[7:]


def test_the_training_process_keeps_its_random_state(tmp_path):
    data = CoordinatedDataModule(Data(), directory=tmp_path / "meet", memory_bytes=1 << 20)
    pl.seed_everything(5, verbose=False)
    expected = torch.rand(1), np.random.rand(), random.random()
    pl.seed_everything(5, verbose=False)
    loader = data.train_dataloader()
    assert len(list(loader)) == NUM_SAMPLES // BATCH_SIZE
    data.close()
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_each_rank_shares_its_own_part(tmp_path):
    got = []
    for rank in range(2):
        data = CoordinatedDataModule(
            Data(Noisy(noise=0.0)), directory=tmp_path / "meet", memory_bytes=1 << 20
        )
        connector = types.SimpleNamespace(use_distributed_sampler=True)
        data.trainer = types.SimpleNamespace(
            global_rank=rank, world_size=2, _accelerator_connector=connector
        )
        loader = data.train_dataloader()
        got.append([[int(value) for batch in loader for value in batch[:, 0]] for _ in range(2)])
        data.close()
    for epoch in range(2):
        assert sorted(got[0][epoch] + got[1][epoch]) == [*range(NUM_SAMPLES)]
    assert got[0][0] != got[0][1]
    data = CoordinatedDataModule(
        Data(sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES), shuffle=None),
        directory=tmp_path / "meet",
        memory_bytes=1 << 20,
    )
    data.trainer = types.SimpleNamespace(
        global_rank=0, world_size=2, _accelerator_connector=connector
    )
    with pytest.raises(ValueError, match="WeightedRandomSampler cannot be divided"):
        data.train_dataloader()


def test_a_cache_goes_inside(tmp_path):
    cached = CachedDataModule(
        Data(Noisy(noise=0.0)), directory=tmp_path / "cache", memory_bytes=1 << 20
    )
    data = CoordinatedDataModule(cached, directory=tmp_path / "meet", memory_bytes=1 << 20)
    model, _ = fit(data)
    assert model.got == alone(2, dataset=Noisy(noise=0.0))
    cached.close()
