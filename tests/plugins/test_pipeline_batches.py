"""Pipelines where a step looks at samples: packed sequences, batch norm, metrics, batch sizes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt.graph.errors import StepError
from lightning_topt.plugins import training_data
from tests.plugins.test_pipeline_fits import pipeline
from tests.plugins.trainer_ranks import make_trainer, on_ranks

SAMPLES, CLASSES = 16, 3


class Recorded(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Packed(Recorded):
    """Reads each sequence up to its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, lengths, classes = batch
        padded = self.embedding(tokens)
        packed = pack_padded_sequence(padded, lengths.cpu(), True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return nn.functional.cross_entropy(self.head(hidden[-1]), classes)


class Measured(Recorded):
    """An MLP; a step gives two collections its probabilities, by `update` and by `forward`."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        between = nn.BatchNorm1d(16) if norm else nn.ReLU()
        self.below, self.above = nn.Sequential(nn.Linear(8, 16), between), nn.Linear(16, CLASSES)
        kinds = (tm.Accuracy, tm.F1Score, tm.AUROC, tm.ConfusionMatrix, tm.CohenKappa)
        options: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
        self.updated = tm.MetricCollection({k.__name__: k(**options) for k in kinds})
        self.called = self.updated.clone()
        self.found: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        logits = self.above(self.below(inputs))
        self.updated.update(logits.detach().softmax(-1), classes)
        self.called(logits.detach().softmax(-1), classes)
        return nn.functional.cross_entropy(logits, classes)

    def on_train_epoch_end(self) -> None:
        for name in ("updated", "called"):
            computed = getattr(self, name).compute()
            self.found |= {f"{name} {k}": v.flatten().tolist() for k, v in computed.items()}


def data_of(module: Recorded, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(SAMPLES) % CLASSES
    if isinstance(module, Packed):
        tokens = torch.randint(50, (SAMPLES, 9), generator=generator)
        data = TensorDataset(tokens, torch.randint(1, 10, (SAMPLES,), generator=generator), classes)
    else:
        data = TensorDataset(torch.randn(SAMPLES, 8, generator=generator), classes)
    sampler = torch.utils.data.SequentialSampler(data)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def fit(rank: int, module: Recorded, **options: Any) -> tuple[list[float], Any]:
    strategy = pipeline(2, **options)
    make_trainer(strategy, devices=2, use_distributed_sampler=False).fit(module, data_of(module))
    return module.losses, getattr(module, "found", None)


def alone(module: Recorded) -> tuple[list[float], Any]:
    make_trainer().fit(module, data_of(module))
    return module.losses, getattr(module, "found", None)


def test_packed_sequences_train_as_in_one_process() -> None:
    expected, _ = alone(Packed())
    for losses, _ in on_ranks(fit, Packed()):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_collections_of_metrics_count_on_every_rank_what_one_process_counts() -> None:
    expected, found = alone(Measured())
    assert len(found) == 10
    for losses, counted in on_ranks(fit, Measured()):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert counted.keys() == found.keys()
        for name in found:
            assert counted[name] == pytest.approx(found[name], abs=1e-6), name


def refused(rank: int) -> str:
    with pytest.raises(
        ValueError if rank == 0 else RuntimeError, match="more than 1 value per channel"
    ) as error:
        fit(rank, Measured(norm=True), microbatches=8)
    assert rank or isinstance(error.value, StepError)
    return str(error.value)


def with_two_samples(rank: int) -> tuple[list[float], Any]:
    return fit(rank, Measured(norm=True), microbatches=4)


def test_batch_norm_of_single_samples_names_a_way_out_that_works() -> None:
    for message in on_ranks(refused):
        assert message.endswith("two samples in each microbatch: choose fewer microbatches.")
    for losses, _ in on_ranks(with_two_samples):
        assert len(losses) == 2


class Divided(L.LightningDataModule):
    """As the one of lightning-hydra-template."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        assert self.trainer is not None
        self.per_device = self.hparams["batch_size"] // self.trainer.world_size

    def train_dataloader(self) -> DataLoader[Any]:
        return data_of(Measured(), self.per_device)


def warned(rank: int) -> list[str]:
    said: list[str] = []
    before, training_data.rank_zero_warn = training_data.rank_zero_warn, said.append
    try:
        for strategy in (pipeline(2), "topt"):
            trainer = make_trainer(strategy, devices=2, max_steps=1)
            trainer.fit(Measured(), datamodule=Divided(8))
    finally:
        training_data.rank_zero_warn = before
    return said


def test_a_batch_size_divided_by_ranks_that_share_batches_is_named() -> None:
    sentence = (
        "topt: the data module divided batch_size=8 by 2 ranks, and 2 of them share each batch, so "
        "a step has 4 samples: set batch_size=16"
    )
    assert on_ranks(warned) == [[sentence]] * 2
