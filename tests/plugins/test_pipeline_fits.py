"""Modules in a pipeline under a Trainer: losses, logs, metrics and files of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils.data import DataLoader, DistributedSampler

from lightning_topt import AutoParallelStrategy, PipelineStrategy
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plugins.microbatches import split_batch
from tests.plugins.trainer_ranks import RecordingGPT, Tokens, loader, make_trainer, on_ranks

CPU = Device("core", 2**33, {"float32": 3e9}, 8e9, 3e-6)


def cluster(ranks: int) -> Cluster:
    """Nothing needs to be measured."""
    link = Link(1e-5, 1e9)
    return Cluster("toy", CPU, ranks, 1, link, link, backend="gloo")


def pipeline(ranks: int, **options: Any) -> PipelineStrategy:
    return PipelineStrategy(cluster=cluster(ranks), **options)


class Counted(RecordingGPT):
    """Counts in metrics, logs values of several kinds, returns more than a loss."""

    parts = 1  # in one process: the microbatches of a pipeline, one after the other

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(heads=2, dropout=dropout)
        self.right = torchmetrics.Accuracy("multiclass", num_classes=32)
        self.seen = torchmetrics.SumMetric()
        self.outputs: list[Any] = []
        self.logged: list[float] = []

    def losses_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        parts = split_batch(batch, self.parts)
        found = [self.losses_of(part) for part in parts.batches]
        loss = sum(share * loss for share, (loss, _) in zip(parts.shares, found, strict=True))
        logits = torch.cat([logits for _, logits in found])
        self.right(logits.argmax(-1), batch[1])
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(
            "sum",
            float(len(batch[0])),
            sync_dist=True,
            reduce_fx="sum",
            on_epoch=True,
            on_step=False,
        )
        return {"loss": loss, "logits": logits, "index": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.outputs.append(
            (tuple(outputs["logits"].shape), outputs["index"], float(outputs["logits"].sum()))
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.losses_of(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.seen.update(float(len(batch[0])))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.logged.append(float(self.seen.compute()))
        self.seen.reset()


def in_order(batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    """The order of Lightning's distributed sampler for one rank."""
    data = Tokens(**kwargs)
    return DataLoader(
        data, batch_size=batch_size, sampler=DistributedSampler(data, num_replicas=1, rank=0)
    )


def results_of(
    trainer: L.Trainer, module: Counted, train: Any, file: Path, samples: int
) -> dict[str, Any]:
    trainer.fit(module, train, loader(8, length=samples - 8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(module, loader(8, length=8), verbose=False)[0]["test_loss"]
    trainer.save_checkpoint(file)  # also after an evaluation
    return {
        "losses": module.losses,
        "outputs": module.outputs,
        "metrics": metrics,
        "logged": module.logged,
        "tested": tested,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "plan": getattr(getattr(trainer.strategy, "parallel_plan", None), "to_dict", dict)(),
        "saved": torch.load(file, weights_only=False) if trainer.global_rank == 0 else {},
    }


COMMON: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 0.5}
# By name: options of the strategy, of the Trainer, and ranks.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation, clipped values": (
        {"schedule": "gpipe"},
        {
            "accumulate_grad_batches": 2,
            "gradient_clip_algorithm": "value",
            "gradient_clip_val": 0.01,
            "max_epochs": 2,
        },
    ),
    "two stages per rank": ({"schedule": "interleaved_zero_bubble"}, {"precision": "bf16-mixed"}),
    "on a V, recomputed": ({"schedule": "zbv", "recompute": True}, {}),
}


def samples_of(schedule: str) -> int:
    """Of an epoch; the last batch of one of the schedules, four samples, is smaller."""
    return 20 if schedule == "gpipe" else 16


def one_process(folder: Path, samples: int, **kwargs: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Counted(dropout=0.1)
    module.parts = 4
    trainer = make_trainer(**{**COMMON, **kwargs})
    data = in_order(8, length=samples)
    return results_of(trainer, module, data, folder / "plain.ckpt", samples)


def fits(rank: int, folder: Path) -> dict[str, Any]:
    """Of each case; what an evaluation before them counted, and process groups after them."""
    first = Counted()
    make_trainer(pipeline(2), devices=2).validate(first, loader(4, length=8), verbose=False)
    found: dict[str, Any] = {"evaluated first": first.logged}
    for name, (options, kwargs) in CASES.items():
        torch.manual_seed(rank)
        trainer = make_trainer(
            pipeline(2, microbatches=4, **options), devices=2, **{**COMMON, **kwargs}
        )
        samples = samples_of(options["schedule"])
        found[name] = results_of(
            trainer, Counted(dropout=0.1), loader(8, length=samples), folder / "topt.ckpt", samples
        )
    return {**found, "groups": len(_world.pg_map)}


def assert_equal(
    found: dict[str, Any], expected: dict[str, Any], *, relative: float = 1e-4
) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=relative)
    for own, one in zip(found["outputs"], expected["outputs"], strict=True):
        assert own[:2] == one[:2] and own[2] == pytest.approx(
            one[2], rel=10 * relative, abs=100 * relative
        )
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=10 * relative)
    assert found["logged"] == expected["logged"]
    assert found["tested"] == pytest.approx(expected["tested"], rel=10 * relative)
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=10 * relative, atol=relative)
    if found["saved"]:
        assert_same_file(found["saved"], expected["saved"], relative)


def assert_same_file(saved: dict[str, Any], plain: dict[str, Any], relative: float) -> None:
    assert list(saved["state_dict"]) == list(plain["state_dict"])
    (own,), (one,) = saved["optimizer_states"], plain["optimizer_states"]
    assert own["param_groups"] == one["param_groups"] and set(own["state"]) == set(one["state"])
    for index, values in one["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(
                own["state"][index][key], value, rtol=10 * relative, atol=relative
            )


def test_fits_are_those_of_one_process(tmp_path: Path) -> None:
    results = on_ranks(fits, tmp_path)
    assert all(found["groups"] == 1 and found["evaluated first"] == [8.0] for found in results)
    for name, (options, kwargs) in CASES.items():
        expected = one_process(tmp_path, samples_of(options["schedule"]), **kwargs)
        for found in results:
            assert_equal(found[name], expected, relative=1e-2 if "precision" in kwargs else 1e-4)
            schedule = options["schedule"]
            assert found[name]["plan"]["schedule"] == schedule
            assert len(found[name]["plan"]["stages"]) == (2 if schedule == "gpipe" else 4)


# ---- rows of data, and going on ------------------------------------------------------------------


def stops(**kwargs: Any) -> list[Any]:
    best = ModelCheckpoint(monitor="val_loss", filename="best", save_last=True, **kwargs)
    return [best, EarlyStopping("val_loss", patience=1, min_delta=0.2)]


def with_files(folder: Path) -> dict[str, Any]:
    return {
        "enable_checkpointing": True,
        "default_root_dir": folder,
        "max_epochs": 4,
        "callbacks": stops(dirpath=folder),
    }


def seen_by(trainer: L.Trainer, module: Counted) -> dict[str, Any]:
    checkpoint: Any = trainer.checkpoint_callback
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "epochs": trainer.current_epoch,
        "best": float(checkpoint.best_model_score),
        "file": Path(checkpoint.best_model_path).name,
        "metrics": {name: metrics[name] for name in ("val_loss", "sum", "right_epoch")},
        "counted": module.logged,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "state": {name: value.clone() for name, value in module.state_dict().items()},
    }


def in_rows(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(rank)
    trainer = make_trainer(pipeline(4, stages=2, microbatches=2), devices=4, **with_files(folder))
    module = Counted()
    trainer.fit(module, loader(4, length=16), loader(4, length=8))
    return seen_by(trainer, module)


def test_rows_of_pipelines_share_the_data_and_stop_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Counted()
    module.parts = 2
    trainer = make_trainer(**with_files(tmp_path / "one"))
    trainer.fit(module, in_order(8, length=16), loader(8, length=8))
    expected = seen_by(trainer, module)
    assert 1 < expected["epochs"] < 4
    for found in on_ranks(in_rows, tmp_path / "rows", world_size=4):
        for name in ("epochs", "file", "counted", "rates"):
            assert found[name] == expected[name], name
        assert found["best"] == pytest.approx(expected["best"], rel=1e-3)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3)
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)
    saved = torch.load(tmp_path / "rows" / "best.ckpt", weights_only=False)
    restored = Counted()
    restored.load_state_dict(saved["state_dict"])  # in plain Lightning


# Names of what trains an epoch each, and goes on from the file of the one before.
CHAIN = ("1f1b", "zbv, sharded", "zero3", "the plan in a file")


def strategy_of(name: str, folder: Path) -> Any:
    if name == "the plan in a file":
        saved = torch.load(folder / "1f1b.ckpt", weights_only=False)
        return AutoParallelStrategy(plan=saved["lightning_topt"]["plan"])
    return {
        "1f1b": pipeline(2, microbatches=2),
        "zbv, sharded": pipeline(2, schedule="zbv", microbatches=4, checkpoint="sharded"),
        "zero3": AutoParallelStrategy(plan="zero3"),
    }[name]


def goes_on(rank: int, folder: Path) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    found, before = {}, "plain"
    for number, name in enumerate(CHAIN):
        torch.manual_seed(number)
        module = Counted()
        trainer = make_trainer(strategy_of(name, folder), devices=2, max_epochs=2 + number)
        data = loader(4 if name == "zero3" else 8, length=16)
        trainer.fit(module, data, ckpt_path=folder / f"{before}.ckpt")
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        found[name], before = module.losses, name
    return found, {name: value.clone() for name, value in module.state_dict().items()}


def test_any_checkpoint_goes_on_in_a_pipeline_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Counted()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, in_order(8, length=16))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    module = Counted()
    make_trainer(max_epochs=1 + len(CHAIN)).fit(
        module, in_order(8, length=16), ckpt_path=tmp_path / "plain.ckpt"
    )
    for losses, state in on_ranks(goes_on, tmp_path):
        for number, name in enumerate(CHAIN):
            expected = pytest.approx(module.losses[2 * number :][:2], rel=1e-3)
            assert name == "zero3" or losses[name] == expected, name
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=2e-4, msg=name)
