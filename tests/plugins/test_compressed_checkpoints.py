"""Residuals in checkpoints: resumed as uninterrupted, also on another number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightning_topt import CompressedDDPStrategy, LocalSteps, LocalStepsStrategy, TopK
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, compressed, make_trainer, on_ranks

State = dict[str, Any]


class Recording(RecordingGPT):
    """SGD, so that nothing hides a lost gradient; keeps the exchange's first state."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.at_start: State = {}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_start(self) -> None:
        exchange = getattr(self.trainer.strategy, "exchange", None)
        if exchange is not None:
            self.at_start = exchange.state_dict()


def fit(
    strategy: Strategy,
    *,
    epochs: int,
    resume: Path | None = None,
    save: Path | None = None,
    **kwargs: Any,
) -> Any:
    torch.manual_seed(0)
    module = Recording()
    trainer = make_trainer(
        strategy,
        devices=dist.get_world_size(),
        max_epochs=epochs,
        limit_train_batches=4,
        accumulate_grad_batches=1,
        **kwargs,
    )
    trainer.fit(module, OwnShare(8), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def saved_state(path: Path) -> State:
    state: State = torch.load(path, weights_only=True)["lightning_topt"]["gradient_exchange"]
    return state


def resumed(
    rank: int, path: Path, options: dict[str, Any]
) -> tuple[list[float], list[float], bool]:
    whole = fit(compressed(**options), epochs=2)
    first = fit(compressed(**options), epochs=1, save=path)
    second = fit(compressed(**options), epochs=2, resume=path)
    equal = all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True)
    )
    return whole.losses, first.losses + second.losses, equal


EXACT: list[dict[str, Any]] = [{"density": 0.1}, {"density": 0.1, "hierarchical": True, "nodes": 2}]


@pytest.mark.parametrize("options", EXACT, ids=lambda options: "-".join(map(str, options.values())))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, options: dict[str, Any]) -> None:
    for whole, parts, equal in on_ranks(resumed, tmp_path / "one.ckpt", options):
        assert len(whole) == 8 and parts == whole and equal


# ---- other numbers of ranks ----------------------------------------------------------------------


def first_parts(rank: int, several: dict[Path, dict[str, Any]]) -> None:
    for path, options in several.items():
        fit(compressed(density=0.1, **options), epochs=1, save=path)


def second_parts(rank: int, several: list[tuple[Path, dict[str, Any]]]) -> list[State]:
    found = []
    for path, options in several:
        module = fit(compressed(density=0.1, **options), epochs=2, resume=path)
        assert len(module.losses) > 0
        found.append(module.at_start)
    return found


def mean(states: list[State], kind: str = "residual") -> dict[str, Tensor]:
    return {
        name: torch.stack([state[kind][name] for state in states]).mean(0)
        for name in states[0][kind]
    }


def assert_same_mean(path: Path, loaded: State, *, before: int, after: int) -> None:
    saved = saved_state(path)
    assert (len(saved["ranks"]), len(loaded["ranks"])) == (before, after), path
    expected, found = mean(saved["ranks"]), mean(loaded["ranks"])
    assert any(value.abs().max() > 0 for value in expected.values()), path
    for name, value in expected.items():
        torch.testing.assert_close(found[name].view(-1), value.view(-1))


def test_other_world_size_keeps_the_mean_pending_gradient(tmp_path: Path) -> None:
    two, four, nodes = (tmp_path / f"{name}.ckpt" for name in ("two", "four", "nodes"))
    of_two = {"nodes": 2}
    on_ranks(first_parts, {four: {}, nodes: of_two}, world_size=4)
    on_ranks(first_parts, {two: {}})
    by_rank, by_node = on_ranks(second_parts, [(two, {}), (two, of_two)], world_size=4)[0]
    assert_same_mean(two, by_rank, before=2, after=4)
    assert_same_mean(two, by_node, before=2, after=2)
    from_ranks, from_nodes = on_ranks(second_parts, [(four, {}), (nodes, {})])[0]
    assert_same_mean(four, from_ranks, before=4, after=2)
    assert_same_mean(nodes, from_nodes, before=2, after=2)


# ---- other strategies ----------------------------------------------------------------------------


def portable(rank: int, folder: Path) -> list[int]:
    ours, theirs = folder / "ours.ckpt", folder / "theirs.ckpt"
    fit(CompressedDDPStrategy(TopK(density=0.1)), epochs=1, save=ours)
    fit(DDPStrategy(), epochs=1, save=theirs)
    steps = []
    for strategy, path in (
        (DDPStrategy(), ours),
        (CompressedDDPStrategy(TopK(density=0.1)), theirs),
        (LocalStepsStrategy(LocalSteps(every=2)), theirs),
    ):
        steps.append(len(fit(strategy, epochs=2, resume=path).losses))
    for strategy in (
        CompressedDDPStrategy("bounded_loss"),
        LocalStepsStrategy(LocalSteps(every=2)),
    ):
        warns = pytest.warns(UserWarning, match="without what that held back")
        with warns if rank == 0 else nullcontext():
            steps.append(len(fit(strategy, epochs=2, resume=ours).losses))
    return steps


def test_checkpoints_of_and_for_other_strategies(tmp_path: Path) -> None:
    assert on_ranks(portable, tmp_path) == [[4] * 5] * 2


# ---- when checkpoints are saved ------------------------------------------------------------------


class Interrupted(Recording):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise MemoryError("on all ranks")


def callbacks(rank: int, folder: Path) -> None:
    during = ModelCheckpoint(folder / "during", every_n_train_steps=3, save_top_k=-1)
    light = ModelCheckpoint(folder / "light", every_n_train_steps=2, save_weights_only=True)
    fit(
        CompressedDDPStrategy(TopK(density=0.1)),
        epochs=1,
        callbacks=[during, light],
        enable_checkpointing=True,
    )
    on_error = OnExceptionCheckpoint(folder, "error")
    trainer = make_trainer(
        CompressedDDPStrategy(TopK(density=0.1)),
        devices=2,
        callbacks=[on_error],
        enable_checkpointing=True,
    )
    with pytest.raises(MemoryError):
        trainer.fit(Interrupted(), OwnShare(8))


def test_residuals_are_saved_during_a_fit_but_not_with_weights_alone_or_after_an_error(
    tmp_path: Path,
) -> None:
    on_ranks(callbacks, tmp_path)
    (during,) = (tmp_path / "during").glob("*.ckpt")
    state = saved_state(during)
    assert state["step"] == 3 and len(state["ranks"]) == 2
    for path in (*(tmp_path / "light").glob("*.ckpt"), tmp_path / "error.ckpt"):
        ours = torch.load(path, weights_only=False).get("lightning_topt", {})
        assert "gradient_exchange" not in ours
