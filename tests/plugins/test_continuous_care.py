"""Around a pipeline that never flushes: files, resuming, replicas, evaluation, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy, PipelineStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.weight_prediction import default_prediction
from tests.plugins.continuous_twin import ChainTwin
from tests.plugins.test_continuous_fits import Net, Points, adamw, factor, points, sgd
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import make_trainer, on_new_ranks, on_ranks, state_of


def never(ranks: int = 2, **options: Any) -> PipelineStrategy:
    return PipelineStrategy(
        cluster=cluster(ranks), **{"schedule": "continuous", "prediction": "multistep", **options}
    )


# ---- files ---------------------------------------------------------------------------------------


class Resumable(DataLoader[Any]):
    """Goes on where it was, in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__(Points(24), batch_size=4)
        self.first = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= self.given:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


def goes_on(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for form, *then in (
        ("full", ("step=4.ckpt", "resumed")),
        ("sharded", ("step=6.ckpt", "after an epoch")),
    ):
        for start, name in ((None, "undisturbed"), *then):
            torch.manual_seed(rank)
            module = Net(adamw)
            saves = ModelCheckpoint(
                folder / form / name, filename="{step}", every_n_train_steps=4, save_top_k=-1
            )
            epochs = ModelCheckpoint(
                folder / form / name, filename="{step}", save_top_k=-1, every_n_epochs=1
            )
            trainer = make_trainer(
                never(checkpoint=form, prediction="spectrain"),
                devices=2,
                max_epochs=2,
                enable_checkpointing=True,
                callbacks=[saves, epochs],
                use_distributed_sampler=False,
                limit_val_batches=0,
                gradient_clip_val=0.2,
            )
            file = None if start is None else folder / form / "undisturbed" / start
            trainer.fit(module, Resumable(), ckpt_path=file)
            found[form, name] = state_of(module), trainer.global_step, module.epochs[-1:]
    return found


def test_a_run_goes_on_from_any_file_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The undisturbed run is drained there, too: each fourth step, and at ends of epochs."""
    for found in on_ranks(goes_on, tmp_path):
        expected, steps, epochs = found["full", "undisturbed"]
        assert steps == 12
        for (_, name), (state, own_steps, own_epochs) in found.items():
            assert own_steps == steps
            assert name == "undisturbed" or own_epochs == epochs
            for key, value in expected.items():
                assert torch.equal(state[key], value), (name, key)
    saved = torch.load(tmp_path / "full" / "undisturbed" / "step=4.ckpt", weights_only=False)
    plan = ParallelPlan.from_dict(saved["lightning_topt"]["plan"])
    batches = [(x, y) for x, y in DataLoader(Points(24), batch_size=4)][:4]
    twin = ChainTwin(Net(adamw), plan, batches, optimizer=adamw, clip=0.2, factor=factor).train()
    # the file has the updates of all batches that had come in
    for key, value in twin.state.items():
        torch.testing.assert_close(saved["state_dict"][key], value, rtol=1e-5, atol=1e-6)


class Decides(Net):
    """Saves when it likes, and may stop in the middle of an epoch."""

    def __init__(self, folder: Path, *, stop: bool = False) -> None:
        super().__init__(sgd)
        self.folder, self.stop = folder, stop

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 4:
            self.trainer.save_checkpoint(self.folder / "own.ckpt")
        self.trainer.should_stop = self.stop and batch_idx == 6

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("updated", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if self.trainer.global_step < 3:  # a warm-up as many write it
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


class Warmed(ChainTwin):
    """The warm-up of `Decides`."""

    def __init__(self, plan: ParallelPlan, batches: Any, ends: Any) -> None:
        super().__init__(Net(sgd), plan, batches, optimizer=sgd, ends=ends, epoch=10, factor=factor)

    def groups(self, stage: int, step: int) -> Any:
        found = super().groups(stage, step)
        return [{**group, "lr": 0.01 * (step + 1)} for group in found] if step < 3 else found


def decides(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monitors = [
        ModelCheckpoint(
            folder,
            filename="{step}-{loss_step:.3f}",
            monitor="loss_step",
            every_n_train_steps=3,
            save_top_k=1,
        ),
        ModelCheckpoint(folder, filename="best-{epoch}", monitor="loss_epoch", save_top_k=1),
        EarlyStopping("loss_epoch", patience=1, min_delta=10.0),
    ]
    module = Decides(folder)
    kwargs: dict[str, Any] = {"enable_checkpointing": True, "callbacks": monitors, "max_epochs": 5}
    trainer = make_trainer(never(), devices=2, **kwargs)
    trainer.fit(module, points(38), points(8))
    found["epochs"] = trainer.current_epoch, trainer.global_step, module.epochs
    found["files"] = sorted(path.name for path in folder.iterdir())
    found["best"] = [monitor.best_model_path for monitor in monitors[:2]]
    found["tested"] = trainer.validate(module, points(8), verbose=False)
    found["state"], found["batches"] = state_of(module), module.batches
    found["plan"] = trainer.strategy.parallel_plan.to_dict()
    stopped = Decides(folder, stop=True)
    trainer = make_trainer(never(), devices=2, max_epochs=2)
    trainer.fit(stopped, points(38), points(8))
    found["stopped"] = trainer.global_step, stopped.epochs, state_of(stopped)
    return found


def test_callbacks_find_the_same_values_and_weights_on_all_ranks(tmp_path: Path) -> None:
    first, *others = on_ranks(decides, tmp_path)
    for found in others:
        for name in ("epochs", "best", "tested"):
            assert found[name] == first[name], name
        for key, value in first["state"].items():
            assert torch.equal(found["state"][key], value)
        assert found["stopped"][:2] == first["stopped"][:2]
    assert first["epochs"][:2] == (2, 20)  # the second epoch is not better by ten
    assert [epoch["updated"] for epoch in first["epochs"][2]] == [10, 10] and first["stopped"][1][
        0
    ]["updated"] == 7
    assert (
        first["stopped"][0] == 7
        and len(first["stopped"][1]) == 1
        and "val_loss" in first["stopped"][1][0]
    )
    plan = ParallelPlan.from_dict(first["plan"])
    ends = [3, 5, 6, 9, 10, 12, 15, 18]  # saved by the monitors and by the module, validated
    for key, value in Warmed(plan, first["batches"], ends).train().state.items():
        torch.testing.assert_close(first["state"][key], value, rtol=1e-5, atol=1e-6)
    # Written by the second fit, by the module alone.
    own = torch.load(tmp_path / "own.ckpt", weights_only=False)
    for key, value in Warmed(plan, first["batches"][:5], ()).train().state.items():
        torch.testing.assert_close(own["state_dict"][key], value, rtol=1e-5, atol=1e-6)


# ---- replicas, precision, evaluation -------------------------------------------------------------


class Evaluated(Net):
    """Tests."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def in_rows(rank: int) -> dict[str, Any]:
    plan: dict[str, Any] = {"mesh": {"pipeline": 2, "data": 2}, "schedule": "continuous"}
    strategy = AutoParallelStrategy(plan=plan, allow={"staleness": "multistep"}, cluster=cluster(4))
    module = Evaluated(adamw)
    trainer = make_trainer(
        strategy, devices=4, max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2
    )
    trainer.fit(module, points(36), points(8))
    assert strategy.parallel_plan is not None
    return {
        "state": state_of(module),
        "batches": module.batches,
        "epochs": module.epochs,
        "plan": strategy.parallel_plan.to_dict(),
        "tested": trainer.test(module, points(8), verbose=False),
    }


def test_replicas_share_the_batches_and_average_their_gradients() -> None:
    results = on_ranks(in_rows, world_size=4)
    first, second, *_ = results  # of one stage
    plan = ParallelPlan.from_dict(first["plan"])
    assert plan.mesh.shape == (2, 2) and plan.schedule == "continuous"
    pairs = zip(first["batches"], second["batches"], strict=True)
    batches = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs]
    assert len(batches) == 10 and [len(x) for x, _ in batches[3:5]] == [8, 4]
    twin = ChainTwin(
        Net(adamw),
        plan,
        batches,
        optimizer=adamw,
        ends=(5,),
        epoch=5,
        accumulate=2,
        clip=0.5,
        factor=factor,
    ).train()
    for found in results:
        assert found["epochs"] == first["epochs"] and found["tested"] == first["tested"]
        for key, value in twin.state.items():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-6)


class Spoilt(Evaluated):
    """The loss of one batch is not a number, that of another fit fails."""

    def __init__(
        self, *, at: int | None = None, fails: bool = False, error: type[BaseException] = ValueError
    ) -> None:
        super().__init__(sgd)
        self.at, self.fails, self.error = at, fails, error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at and self.fails:
            raise self.error("the batch is broken")
        found = super().training_step(batch, batch_idx)
        return {**found, "loss": found["loss"] * torch.nan} if batch_idx == self.at else found


BLOCKS = [[{"block": "layers.0"}, {"block": ""}], [{"block": "head"}]]
BY_HAND = {
    "version": 2,
    "mesh": [{"name": "pipeline", "size": 2}],
    "schedule": "continuous",
    "stages": [{"blocks": [{**block, "storage": "ddp"} for block in blocks]} for blocks in BLOCKS],
}


def odd(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in ("32-true", "bf16-mixed"):
        module = Evaluated(sgd)
        trainer = make_trainer(never(), devices=2, max_epochs=1, precision=precision)
        trainer.fit(module, points(22), points(8))
        found[precision] = state_of(module), module.epochs
        found[f"{precision} evaluated"] = trainer.test(module, points(8), verbose=False)
    strategy = AutoParallelStrategy(plan=BY_HAND, allow="staleness")
    make_trainer(strategy, devices=2, fast_dev_run=3).fit(Net(adamw), points(22), points(8))
    assert strategy.parallel_plan is not None
    found["by hand"] = strategy.parallel_plan
    spoilt = Spoilt(at=3)
    trainer = make_trainer(never(), devices=2, max_epochs=1, limit_val_batches=0)
    trainer.fit(spoilt, points(22))
    found["nan"] = state_of(spoilt), [loss for loss, _ in spoilt.outputs], trainer.global_step
    return found


def test_half_precision_evaluation_and_a_loss_that_is_not_a_number() -> None:
    results = on_ranks(odd)
    for rank, found in enumerate(results):
        state, epochs = found["32-true"]
        half, half_epochs = found["bf16-mixed"]
        for key, value in state.items():
            torch.testing.assert_close(half[key], value, rtol=0.05, atol=0.02)
            assert torch.equal(half[key], results[0]["bf16-mixed"][0][key])
        assert not torch.equal(half["head.weight"], state["head.weight"])
        assert half_epochs[-1]["loss_epoch"] == pytest.approx(epochs[-1]["loss_epoch"], rel=0.02)
        tested = found["32-true evaluated"]
        module = Evaluated(sgd)
        module.load_state_dict(state)
        inputs, targets = (torch.cat(parts) for parts in zip(*points(8), strict=True))
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(module(inputs), targets))
        assert tested[0]["test_loss"] == pytest.approx(loss, rel=1e-4)
        assert found["by hand"].weight_prediction == default_prediction("AdamW")
        # As in one process: its gradients are not numbers, nor are the weights from then on.
        spoilt, losses, steps = found["nan"]
        assert steps == 6 and all(
            value.isnan().any() for name, value in spoilt.items() if "right" not in name
        )
        assert [index for index, loss in enumerate(losses) if loss == loss] == (
            [0, 1, 2] if rank else [1, 2, 3]
        )


# ---- what goes wrong -----------------------------------------------------------------------------


class Interrupts(Net):
    """Ends in the middle, on all ranks at once, with an exception of this kind."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(sgd)
        self.error = error

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise self.error("enough")


class NoStep(Net):
    """Leaves out an update."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def message_of(module: L.LightningModule, strategy: Any = None, **kwargs: Any) -> str:
    trainer = make_trainer(strategy or never(), devices=2, max_epochs=2, **kwargs)
    try:
        trainer.fit(module, points(38))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def goes_wrong(rank: int, folder: Path) -> list[str]:
    found = [
        message_of(Interrupts(KeyboardInterrupt)),
        message_of(Interrupts(ValueError)),
        message_of(NoStep(sgd)),
    ]
    saves = ModelCheckpoint(folder, save_on_exception=True)
    found.append(message_of(Interrupts(ValueError), enable_checkpointing=True, callbacks=[saves]))
    spoilt = Spoilt(at=5, fails=True)  # reaches the end of its step on the last stage alone
    found.append(message_of(spoilt if rank else Evaluated(sgd)))
    return found


def test_what_goes_wrong_ends_the_fit_on_every_rank(tmp_path: Path) -> None:
    # on ranks whose connections end with them: the first waits for the last one's error
    first, last = on_new_ranks(goes_wrong, tmp_path)
    for found in (first, last):
        assert found[0].startswith("SystemExit") and found[1] == "ValueError: enough"
        assert "optimizer_step did not step" in found[2] and "interrupted" in found[3]
    assert last[4] == "ValueError: the batch is broken"
    assert "PeerLostError" in first[4] and "stage" in first[4] and "rank 1" in first[4]


class Plateau(Net):
    """Lowers its rate in each step, by a loss that stages know at different times."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd([*self.named_parameters()])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss_step"},
        }


class Repeats(Net):
    """Its optimizer runs the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "16 bits": (
        lambda: Net(sgd),
        {"plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))},
        "scaler",
    ),
    "plateau": (lambda: Plateau(sgd), {}, "ReduceLROnPlateau"),
    "lbfgs": (lambda: Repeats(sgd), {}, "LBFGS"),
    "by time": (lambda: Net(sgd), {"val_check_interval": {"seconds": 1}}, "clock"),
    "no mesh": (
        lambda: Net(sgd),
        {"strategy": lambda: AutoParallelStrategy(allow="staleness")},
        "give a mesh",
    ),
}


def refused(rank: int) -> dict[str, str]:
    found = {}
    for name, (make, kwargs, _) in REFUSED.items():
        strategy = kwargs.get("strategy", never)()
        found[name] = message_of(
            make(), strategy, **{key: value for key, value in kwargs.items() if key != "strategy"}
        )
    return found


def test_what_cannot_hold_is_refused_with_a_sentence_on_every_rank() -> None:
    for found in on_ranks(refused):
        for name, (_, _, says) in REFUSED.items():
            assert says in found[name], (name, found[name])
