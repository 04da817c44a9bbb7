"""``checkpoint="sharded"``: folders of shards, resumed under other plans and numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_topt import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    LocalStepsStrategy,
    read_sharded_checkpoint,
)
from lightning_topt.communication import TopK
from lightning_topt.execution.checkpoint_files import holds_shards, replace_by_file
from lightning_topt.graph.mesh_axes import hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from tests.plugins.trainer_ranks import (
    OwnShare,
    RecordingGPT,
    loader,
    make_trainer,
    on_ranks,
    state_of,
    topt_trainer,
)

SHARDED = {"checkpoint": "sharded"}
MIXED = {"blocks.0": "hybrid", "blocks.1": "zero1", "tokens": "zero3", "": "ddp"}


def mixed_plan() -> ParallelPlan:
    mesh = hybrid_mesh(2, 2)
    blocks = [
        BlockPlan(name, OpConfig(PRESETS[preset].storage(mesh))) for name, preset in MIXED.items()
    ]
    return ParallelPlan.of_blocks(blocks, mesh=mesh)


class Resumable(OwnShare):
    """Goes on in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__(8, length=32)
        self.seen = 0

    def __iter__(self) -> Any:
        start = self.seen
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.seen = (index + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class ResumableGPT(RecordingGPT):
    def train_dataloader(self) -> Any:
        return Resumable()


def fit(plan: Any, *, path: Path | None = None, options: Any = SHARDED, **kwargs: Any) -> Any:
    torch.manual_seed(0 if path is None else 1)
    trainer, module = (
        topt_trainer(plan, options=options, **{"max_epochs": 2, **kwargs}),
        ResumableGPT(),
    )
    trainer.fit(module, ckpt_path=path)
    return trainer, module


def fit_and_save(plan: Any, folder: Path, **kwargs: Any) -> Any:
    """Two epochs of four steps, saved after six: in an epoch, and once more after the fit."""
    keep = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=6, save_top_k=-1, save_last=True
    )
    trainer, module = fit(plan, callbacks=[keep], enable_checkpointing=True, **kwargs)
    trainer.save_checkpoint(folder / "after.ckpt")
    return module.losses, state_of(module)


def on_four_ranks(rank: int, folder: Path) -> Any:
    mixed = fit_and_save(mixed_plan(), folder / "mixed")
    middle = folder / "mixed" / "step=6.ckpt"
    resumed = [fit(plan, path=middle)[1].losses for plan in (mixed_plan(), "zero2")]
    tested = topt_trainer("zero3").test(ResumableGPT(), loader(4), ckpt_path=middle, verbose=False)[
        0
    ]["test_loss"]
    return mixed, resumed, tested


def on_two_ranks(rank: int, folder: Path) -> Any:
    middle = folder / "mixed" / "step=6.ckpt"
    again = fit_and_save("zero3", folder / "again", path=middle)[0]
    resumed = fit("ddp", path=middle, options={})[1].losses
    kinds = [
        holds_shards(path) for part in ("mixed", "again") for path in (folder / part).iterdir()
    ]
    whole = str(folder / "whole.ckpt")
    if rank == 0:
        torch.save(read_sharded_checkpoint(middle), whole)
    torch.distributed.barrier()
    trainer, module = make_trainer(DDPStrategy(), devices=2, max_epochs=2), ResumableGPT()
    trainer.fit(module, ckpt_path=whole)
    tested = topt_trainer("ddp").test(ResumableGPT(), loader(4), ckpt_path=whole, verbose=False)[0][
        "test_loss"
    ]
    return [again, resumed, module.losses], kinds, tested, held_back(folder / "compressed")


def held_back(folder: Path) -> Any:
    """What an exchange holds back on each rank is in the folder; options of storage."""
    exchange = TopK(density=0.1, hierarchical=False)
    plan = ParallelPlan.of_blocks(
        [BlockPlan("", OpConfig.zero(1))], mesh=2, gradient_exchange=exchange
    )
    options = {**SHARDED, "allow": "compression"}
    losses, _ = fit_and_save(plan, folder, options=options)
    trainer, module = fit(plan, path=folder / "step=6.ckpt", options=options)
    with pytest.raises(ValueError) as error:
        trainer.save_checkpoint(str(folder / "b.ckpt"), storage_options={"anything": 1})
    return losses[6:], module.losses, str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def four(folder: Path) -> Any:
    return on_ranks(on_four_ranks, folder, world_size=4)


@pytest.fixture(scope="module")
def one() -> Any:
    """One process."""
    torch.manual_seed(0)
    module = ResumableGPT()
    make_trainer(max_epochs=2).fit(module)
    return module.losses, state_of(module)


def test_resumed_in_the_middle_of_an_epoch_as_if_undisturbed(four: Any, one: Any) -> None:
    losses, state = one
    for (mixed, mixed_state), resumed, _ in four:
        assert len(losses) == 8 and mixed == pytest.approx(losses, rel=1e-5)
        for tail in resumed:
            assert tail == pytest.approx(losses[6:], rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(mixed_state[name], value, rtol=1e-4, atol=2e-6)


def test_resumed_on_other_ranks_and_as_a_plain_file(four: Any, one: Any, folder: Path) -> None:
    for resumed, kinds, tested, (undisturbed, compressed, says) in on_ranks(on_two_ranks, folder):
        for tail in resumed:
            assert tail == pytest.approx(one[0][6:], rel=1e-5)
        assert len(kinds) == 3 + 2 and all(kinds)
        assert tested == pytest.approx(four[0][2], rel=1e-4)
        assert compressed == pytest.approx(undisturbed, rel=1e-5)
        assert "takes neither storage_options" in says
    held = read_sharded_checkpoint(folder / "compressed" / "step=6.ckpt")["lightning_topt"][
        "gradient_exchange"
    ]
    assert held["step"] == 6 and len(held["ranks"]) == 2
    assert all(held["ranks"][rank]["residual"]["head.weight"].abs().sum() > 0 for rank in range(2))


def over_shards(rank: int, folder: Path) -> Any:
    """Go on from a folder of shards, and save a file under its name."""
    first, found = topt_trainer("zero2", options=SHARDED), []
    first.fit(RecordingGPT(), loader(32))
    for kind in (AutoParallelStrategy, CompressedDDPStrategy, LocalStepsStrategy):
        path = folder / f"{kind.__name__}.ckpt"
        first.save_checkpoint(path)
        was_folder = holds_shards(path)
        trainer, module = make_trainer(kind(), devices=2, max_epochs=2), RecordingGPT()
        trainer.fit(module, loader(32), ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(path)
        left = len([*folder.iterdir()]) - len(found) - 1
        state = torch.load(path, weights_only=False)["state_dict"]
        same = all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        found.append((was_folder, path.is_file(), left, trainer.global_step, same))
    return found


def test_a_file_replaces_a_folder_of_shards(tmp_path: Path) -> None:
    """Lightning would write it into the folder, and the next resume begin at the old steps."""
    for found in on_ranks(over_shards, tmp_path):
        assert found == [(True, True, 0, 2, True)] * 3


def test_what_was_a_folder_stays_until_the_file_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    target.mkdir()
    (target / "part").write_text("shards")

    def fails(path: str) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_by_file(target, fails)
    assert (target / "part").read_text() == "shards"
    replace_by_file(target, lambda path: Path(path).write_text("whole"))
    assert target.read_text() == "whole" and [*tmp_path.iterdir()] == [target]
