"""ParallelOptimizerStep against Lightning's plain ``ddp``, on gloo ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_topt import ParallelOptimizerStep
from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.optim import adaptive_step
from lightning_topt.plugins import parallel_optimizer
from tests.plugins.trainer_ranks import (
    RecordingGPT,
    loader,
    make_trainer,
    on_new_ranks,
    on_ranks,
    state_of,
)
from tests.processes import wait_until

FREE, DEAR = 0.0, 1e9  # seconds of a gather
Result = dict[str, Any]


class OwnRule(torch.optim.Optimizer):
    """A user's own: RMS of the gradient over the whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                square = parameter.grad.square().mean()
                state["square"] = 0.9 * state.get("square", square) + 0.1 * square
                parameter -= group["lr"] * parameter.grad / (state["square"].sqrt() + 1e-3)
        return loss


class OwnGPT(RecordingGPT):
    def configure_optimizers(self) -> Any:
        return OwnRule(self.parameters(), lr=1e-2)


def fit(callback: ParallelOptimizerStep | None, **kwargs: Any) -> Result:
    """Parameters, losses and decisions of a fit of the module `kind`, by default of 8 steps."""
    torch.manual_seed(0)
    options = {"max_steps": 8, "max_epochs": -1, "strategy": DDPStrategy(), **kwargs}
    module = options.pop("kind", RecordingGPT)()
    make: Callable[[], list[Any]] = options.pop("callbacks", list)
    resume, save = options.pop("resume", None), options.pop("save", None)
    scaler = None
    if options.pop("overflow", False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    callbacks = [*make(), *([callback] if callback else [])]
    trainer = make_trainer(
        options.pop("strategy"), devices=dist.get_world_size(), callbacks=callbacks, **options
    )
    trainer.fit(module, loader(4), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return {
        "state": state_of(module),
        "losses": module.losses,
        "decisions": callback.decisions if callback else None,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "scale": scaler.get_scale() if scaler else None,
    }


@contextlib.contextmanager
def forced(cost: float) -> Iterator[None]:
    """What sending costs is taken as `cost`: timings decide nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_step, "measure_gather", lambda *args, **kwargs: cost)
        patch.setattr(adaptive_step, "is_faster", lambda plain, shared: cost == FREE)
        yield


@functools.cache
def plain(fits: tuple[tuple[str, Any], ...]) -> Result:
    """The fit without the callback, once in a process: cases differ in more than these options."""
    return fit(None, **dict(fits))


def both(
    rank: int, options: dict[str, Any], fits: dict[str, Any], cost: float
) -> tuple[Result, Result]:
    with forced(cost):
        return plain(tuple(fits.items())), fit(ParallelOptimizerStep(**options), **fits)


def largest_difference(first: Any, second: Any) -> float:
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def assert_equal(results: list[tuple[Result, Result]], *, tolerance: float = 1e-6) -> None:
    for plain, ours in results:
        assert ours["losses"] == pytest.approx(plain["losses"], rel=max(tolerance, 1e-5))
        assert largest_difference(plain["state"], ours["state"]) <= tolerance
        assert all(
            torch.equal(value, results[0][1]["state"][name])
            for name, value in ours["state"].items()
        )
        for whole, state in zip(plain["optimizers"], ours["optimizers"], strict=True):
            assert_equal_optimizer_states(whole, state, tolerance=max(tolerance, 1e-5))


def assert_equal_optimizer_states(whole: Any, state: Any, *, tolerance: float) -> None:
    assert state.keys() == whole.keys() and state["param_groups"] == whole["param_groups"]
    assert state["state"].keys() == whole["state"].keys()
    for index, values in whole["state"].items():
        assert state["state"][index].keys() == values.keys()
        for name, value in values.items():
            assert torch.allclose(
                torch.as_tensor(state["state"][index][name]), torch.as_tensor(value), atol=tolerance
            )


# ---- the same as ddp -----------------------------------------------------------------------------


EQUAL: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    (
        {},
        {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1e-3,
            "gradient_clip_algorithm": "value",
        },
        FREE,
    ),
    ({}, {}, DEAR),
    ({"always": True, "rule": "parameters"}, {"gradient_clip_val": 0.05}, DEAR),
    ({}, {"kind": OwnGPT}, FREE),
    ({"always": True}, {"precision": "bf16-mixed", "gradient_clip_val": 0.05}, FREE),
    ({"always": True}, {"precision": "bf16-true"}, FREE),
    ({}, {"overflow": True, "max_steps": 12}, FREE),
]


@pytest.mark.parametrize(("options", "fits", "cost"), EQUAL, ids=str)
def test_equals_ddp(options: dict[str, Any], fits: dict[str, Any], cost: float) -> None:
    results = on_ranks(both, options, fits, cost)
    assert_equal(results, tolerance=1e-6 if "precision" not in fits else 1e-3)
    for plain, ours in results:
        assert ours["scale"] == plain["scale"] and (
            ours["scale"] is None or ours["scale"] < 2.0**20
        )
        shared = bool(options.get("always")) or cost == FREE
        assert all(d.shared == shared and d.reason for d in ours["decisions"])


# ---- other callbacks -----------------------------------------------------------------------------


class Unfreeze(L.Callback):
    """Trains the second block from the third epoch on: DDP averages its gradients, unlike those
    that were frozen at first.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        group, late = optimizer.param_groups[0], set(pl_module.blocks[1].parameters())
        self.late = [parameter for parameter in group["params"] if parameter in late]
        group["params"] = [parameter for parameter in group["params"] if parameter not in late]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.optimizers[0].add_param_group({"params": self.late, "lr": 1e-3})


def averaging() -> list[Any]:
    return [EMAWeightAveraging(decay=0.8)]


def stochastic() -> list[Any]:
    return [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)]


def unfreezing() -> list[Any]:
    return [Unfreeze()]


EPOCHS = {"max_steps": -1, "max_epochs": 4, "limit_train_batches": 3}


OTHERS = [(averaging, True), (stochastic, False), (unfreezing, True)]


def beside(rank: int, others: Callable[[], list[Any]], always: bool) -> tuple[Result, Result]:
    return both(rank, {"always": always}, {"callbacks": others, **EPOCHS}, FREE)


@pytest.mark.parametrize(("others", "always"), OTHERS)
def test_other_callbacks(others: Callable[[], list[Any]], always: bool) -> None:
    results = on_ranks(beside, others, always)
    assert_equal(results)
    for plain, ours in results:
        assert largest_difference(plain["state"], ours["state"]) < 1e-6
        if others is unfreezing:
            assert len(ours["optimizers"][0]["param_groups"]) == 3
            assert ours["decisions"][0].shared


# ---- checkpoints ---------------------------------------------------------------------------------


class Saver(L.Callback):
    """Saves in the middle of a fit, where state is spread over ranks."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


@forced(FREE)
def resumed(rank: int, resumptions: list[tuple[str, dict[str, Any] | None]]) -> list[Result]:
    return [
        fit(options and ParallelOptimizerStep(**options), max_steps=8, resume=path)
        for path, options in resumptions
    ]


@forced(FREE)
def saved_and_resumed(
    rank: int, plain: str, ours: str, resumptions: list[tuple[str, dict[str, Any] | None]]
) -> list[Result]:
    for path, callback in ((plain, None), (ours, ParallelOptimizerStep(always=True))):
        fit(callback, max_steps=4, callbacks=lambda path=path: [Saver(path)])
    return resumed(rank, resumptions)


def test_checkpoints_are_those_of_the_plain_step(tmp_path: Path) -> None:
    """Resumed with the callback and without it, on as many ranks and on more."""
    plain, ours = str(tmp_path / "plain.ckpt"), str(tmp_path / "ours.ckpt")
    always = {"always": True}
    fits = [(plain, None), (ours, None), (plain, always), (ours, {"rule": None})]
    results = on_ranks(saved_and_resumed, plain, ours, fits)
    first, second = torch.load(plain, weights_only=True), torch.load(ours, weights_only=True)
    assert second.keys() == first.keys()
    for whole, state in zip(first["optimizer_states"], second["optimizer_states"], strict=True):
        assert_equal_optimizer_states(whole, state, tolerance=1e-6)
    for index in range(1, len(fits)):
        assert_equal([(found[0], found[index]) for found in results], tolerance=2e-6)
    assert_equal(
        [
            tuple(found)
            for found in on_ranks(resumed, [(plain, None), (ours, always)], world_size=3)
        ],
        tolerance=2e-6,
    )


class StateBytes(L.Callback):
    """Bytes of state during the fit."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        states = trainer.optimizers[0].state.values()
        self.nbytes = sum(
            v.nbytes
            for state in states
            for v in state.values()
            if isinstance(v, Tensor) and v.dim()
        )
        self.whole = sum(
            8 * p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"]
        )


@forced(FREE)
def fits_twice(rank: int, ranks: int) -> tuple[float, list[Result]]:
    torch.manual_seed(0)
    module, observer, callback = RecordingGPT(), StateBytes(), ParallelOptimizerStep()
    trainer = make_trainer(
        DDPStrategy(), devices=ranks, callbacks=[callback, observer], max_steps=6, max_epochs=-1
    )
    results, fractions = [], []
    for steps in (8, 16):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, loader(4))
        results.append(
            {"state": state_of(module), "optimizers": [o.state_dict() for o in trainer.optimizers]}
        )
        fractions.append(observer.nbytes / observer.whole)
        assert callback.decisions[0].shared and not hasattr(
            trainer.optimizers[0], "consolidate_state_dict"
        )
    return fractions, results


def test_two_fits_and_state_of_one_share() -> None:
    results = on_ranks(fits_twice, 2)
    for fractions, fits in results:
        assert fractions == pytest.approx([0.5, 0.5], rel=0.05)
        for fitted, other in zip(fits, results[0][1], strict=True):
            assert largest_difference(fitted["state"], other["state"]) == 0
            assert (
                len(fitted["optimizers"][0]["state"]) == len(other["optimizers"][0]["state"]) > 20
            )
        assert largest_difference(fits[0]["state"], fits[1]["state"]) > 0


# ---- where it does not run -----------------------------------------------------------------------


class OtherOrder(RecordingGPT):
    """Ranks list their parameters in different orders."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:: 1 - 2 * self.global_rank], lr=0.1)


class OtherRate(RecordingGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 + self.global_rank)


def refused(rank: int, kinds: list[type[L.LightningModule]]) -> list[tuple[str, str]]:
    said = []
    for kind in kinds:
        with pytest.raises(ValueError) as caught:
            fit(ParallelOptimizerStep(always=True), kind=kind)
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


def test_optimizers_that_differ_are_refused_on_all_ranks() -> None:
    for (_, order), (_, rate) in on_ranks(refused, [OtherOrder, OtherRate]):
        assert "tokens.weight" in order and "head.weight" in order
        assert "group 0, lr 0.1, and rank 1 has" in rate


def test_one_rank_does_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logged: list[str] = []
    monkeypatch.setattr(parallel_optimizer, "rank_zero_info", logged.append)
    callback = ParallelOptimizerStep(always=True)
    trainer = make_trainer(callbacks=[callback], max_steps=3)
    trainer.fit(RecordingGPT(), loader(4))
    assert callback.decisions == [] and trainer.global_step == 3
    assert len(logged) == 1 and "there is one rank" in logged[0]


class Late(RecordingGPT):
    """Rank 1 comes to the step that it should share when rank 0 has given up."""

    flag = Path()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1 and self.global_step == 2:
            wait_until(self.flag.exists)


def waits(rank: int, flag: Path) -> str:
    Late.flag = flag
    try:
        fit(ParallelOptimizerStep(always=True, timeout_seconds=1.5), kind=Late)
    except PeerLostError as error:
        flag.touch()
        return str(error)
    return ""


def test_no_wait_is_longer_than_the_timeout(tmp_path: Path) -> None:
    first, _ = on_new_ranks(waits, tmp_path / "noticed")
    assert "slower than the timeout" in first
