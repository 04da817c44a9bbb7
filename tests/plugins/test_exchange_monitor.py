"""What users see of the exchange: log metrics and progress bar, against what can be worked out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_topt.plugins.monitors import ExchangeMonitor
from tests.plugins.trainer_ranks import compressed, make_trainer, on_ranks

INPUTS, OUTPUTS = 100, 50
WEIGHT_BYTES, BIAS_BYTES = 4 * INPUTS * OUTPUTS, 4 * OUTPUTS


class Bar(TQDMProgressBar):
    """Keeps what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module))


class Layer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, OUTPUTS)
        self.norms: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        exchange = getattr(self.trainer.strategy, "exchange", None)
        self.norms.append(exchange.statistics(reset=False).residual_norm if exchange else 0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def read(path: Path) -> dict[int, dict[str, float]]:
    with path.open() as file:
        rows = [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return {int(row["step"]): row for row in rows}


def fit(
    rank: int, folder: Path, strategy: Any, **kwargs: Any
) -> tuple[list[dict[str, Any]], dict[int, Any], Any]:
    torch.manual_seed(0)
    module, logger, bar = Layer(), CSVLogger(folder, name="", version=""), Bar()
    callbacks = [*kwargs.pop("callbacks", []), bar]
    options = {"max_epochs": 1, "log_every_n_steps": 1, "enable_progress_bar": True, **kwargs}
    trainer = make_trainer(
        strategy, devices=dist.get_world_size(), logger=logger, callbacks=callbacks, **options
    )
    trainer.fit(
        module,
        DataLoader(
            torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(0)), batch_size=4
        ),
    )
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, ExchangeMonitor)]
    logged = read(folder / "metrics.csv") if rank == 0 else {}
    return bar.shown, logged, (module.norms, len(monitors))


def run(rank: int, folder: Path, options: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    return fit(rank, folder, compressed(**options), **kwargs)


def test_values_of_every_step(tmp_path: Path) -> None:
    shown, logged, (norms, monitors) = on_ranks(run, tmp_path, {"density": 0.1}, {})[0]
    assert monitors == 1
    dense = WEIGHT_BYTES + BIAS_BYTES  # a ring of two ranks: each sends the whole once
    sparse = (
        0.1 * INPUTS * OUTPUTS * (4 + 2) + BIAS_BYTES
    )  # float32 and at most 16 bits of index; a rank sends its message once
    rows = [logged[step] for step in range(1, 4)]
    assert all(
        row["topt/exchange_dense_bytes_per_step"] == pytest.approx(dense, rel=1e-3) for row in rows
    )
    for row in rows:
        assert 0.6 * sparse < row["topt/exchange_bytes_per_step"] < 1.05 * sparse
        assert row["topt/exchange_density"] == pytest.approx(0.1)
        assert 0 < row["topt/exchange_exposed_seconds"] < 5
    assert [row["topt/exchange_residual_norm"] for row in rows] == pytest.approx(
        norms[1:4], rel=1e-5
    ) and norms[1] > 0
    ratio = (
        rows[-1]["topt/exchange_dense_bytes_per_step"] / rows[-1]["topt/exchange_bytes_per_step"]
    )
    assert shown[-1]["compression"] == pytest.approx(ratio, rel=1e-3) and ratio > 5
    assert shown[-1]["exposed_ms"] > 0


def test_datagrams_say_what_was_lost(tmp_path: Path) -> None:
    _, logged, _ = on_ranks(run, tmp_path, {"method": "bounded_loss", "tolerance": 0.05}, {})[0]
    rows = [logged[step] for step in range(1, 8)]
    for row in rows:
        assert (
            0 <= row["topt/exchange_lost_share"] <= 0.05
            and row["topt/exchange_rejected_datagrams"] == 0
        )
        assert (
            row["topt/exchange_bytes_per_second"] > 0 and row["topt/exchange_stalled_seconds"] >= 0
        )
    # A datagram counts when the kernel takes it, which may be after the step that it belongs to was
    # read.
    sent, dense = (
        sum(row[f"topt/exchange_{name}"] for row in rows)
        for name in ("bytes_per_step", "dense_bytes_per_step")
    )
    assert sent > 0.9 * dense


def test_the_users_own_monitor_takes_its_place(tmp_path: Path) -> None:
    callbacks = [ExchangeMonitor(every_n_steps=4)]
    _, logged, (_, monitors) = on_ranks(run, tmp_path, {"density": 0.1}, {"callbacks": callbacks})[
        0
    ]
    # reports after steps 2, 4 and 8
    seconds = [logged[step]["topt/exchange_exposed_seconds"] for step in range(1, 8)]
    assert (
        monitors == 1
        and len(set(seconds)) == 3
        and seconds[0] == seconds[1]
        and seconds[2] == seconds[5]
    )
    with pytest.raises(ValueError, match="every_n_steps"):
        ExchangeMonitor(every_n_steps=0)
