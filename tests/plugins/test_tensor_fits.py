"""Plans with tensor axes under a Trainer: losses, metrics and files of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.plan_options import MeshPlan, read_plan_option
from tests.plugins.split_plans import split_plan
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import (
    RecordingGPT,
    Tokens,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)


class Counted(RecordingGPT):
    """Counts samples in a torchmetrics metric, and logs sums over ranks."""

    def __init__(self) -> None:
        super().__init__(heads=2)
        self.samples = torchmetrics.SumMetric()
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log(
            "sum",
            float(len(batch[0])),
            sync_dist=True,
            reduce_fx="sum",
            on_epoch=True,
            on_step=False,
        )
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.samples.update(float(len(batch[0])))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.logged.append(float(self.samples.compute()))
        self.samples.reset()


def plan(data: int, storage: str) -> dict[str, Any]:
    return split_plan(data, storage, recomputed={0})


def fit(rank: int, data: int, storage: str, folder: Path) -> Any:
    torch.manual_seed(rank)
    trainer, module = (
        topt_trainer(plan(data, storage), max_epochs=2, gradient_clip_val=0.5),
        Counted(),
    )
    trainer.fit(module, loader(8 // data, length=16), loader(8 // data, length=16))
    trainer.save_checkpoint(folder / "topt.ckpt")
    losses, metrics = (
        module.losses,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    )
    tested = trainer.test(module, loader(8 // data, length=16), verbose=False)[0]["test_loss"]
    predicted = trainer.predict(module, loader(8 // data, length=16))
    assert predicted is not None
    return (
        losses,
        metrics,
        module.logged,
        tested,
        [batch.shape for batch in predicted],
        dict(module.state_dict()),
    )


def in_order() -> DataLoader[Any]:
    """The order of Lightning's sampler for one rank, whose batches are those of several."""
    data = Tokens(16)
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=1, rank=0))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two epochs: losses, metrics, counts, loss of the test, state, file."""
    torch.manual_seed(0)
    trainer, module = make_trainer(max_epochs=2, gradient_clip_val=0.5), Counted()
    trainer.fit(module, in_order(), loader(8, length=16))
    file = tmp_path_factory.mktemp("one_process") / "plain.ckpt"
    trainer.save_checkpoint(file)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    del metrics["train_loss"]  # of the last batch of a rank, as under ddp
    tested = trainer.test(module, loader(8, length=16), verbose=False)[0]["test_loss"]
    return module.losses, metrics, module.logged, tested, dict(module.state_dict()), file


@pytest.mark.parametrize(("data", "storage"), [(1, "ddp"), (2, "zero3")])
def test_a_fit_is_that_of_one_process(
    data: int, storage: str, one_process: Any, tmp_path: Path
) -> None:
    losses, metrics, counted, tested, state, file = one_process
    results = on_ranks(fit, data, storage, tmp_path, world_size=2 * data)
    for own_losses, own_metrics, own_counted, own_tested, shapes, own_state in results:
        # Sums in another order, which steps of Adam let grow.
        assert own_losses == pytest.approx(losses, rel=1e-3)
        del own_metrics["train_loss"]
        assert own_metrics == pytest.approx(metrics, rel=1e-3)
        assert own_counted == counted and own_tested == pytest.approx(tested, rel=1e-3)
        assert set(shapes) == {(8 // data, 8)}
        for name, value in state.items():
            torch.testing.assert_close(own_state[name], value, rtol=1e-3, atol=1e-4)
    saved, plain = (torch.load(path, weights_only=False) for path in (tmp_path / "topt.ckpt", file))
    assert list(saved["state_dict"]) == list(plain["state_dict"])
    for index, values in plain["optimizer_states"][0]["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(
                saved["optimizer_states"][0]["state"][index][key], value, rtol=1e-3, atol=1e-4
            )


def found(rank: int, given: Any) -> Any:
    """Losses of an epoch, and the plan."""
    torch.manual_seed(rank)
    options = {"cluster": cluster(dist.get_world_size())}
    trainer = topt_trainer(given, max_epochs=1, gradient_clip_val=0.5, options=options)
    module = RecordingGPT(heads=2)
    mesh = read_plan_option(given)
    assert isinstance(mesh, MeshPlan)
    parts = mesh.mesh(trainer.world_size, num_nodes=1).data_parallel_size
    trainer.fit(module, loader(8 // parts, length=16))
    return module.losses, trainer.strategy.parallel_plan.to_dict()


@pytest.mark.parametrize(
    ("given", "ranks"),
    # tensor_2d in an engine: tests/execution/test_tensor_equality.py
    [("tensor_sequence", 2), ("context+recompute", 2)],
)
def test_splits_are_found_where_only_the_mesh_is_given(
    given: Any, ranks: int, one_process: Any
) -> None:
    losses = one_process[0]
    for own_losses, plan_of in on_ranks(found, given, world_size=ranks):
        assert own_losses == pytest.approx(losses[: len(losses) // 2], rel=1e-3)
        blocks = {block["block"]: block for block in plan_of["stages"][0]["blocks"]}
        if given == "tensor_sequence":  # the preset splits all that it can
            split = blocks["blocks.1"]["computes"]["parameters"]
            assert "shard(0)" in str(split["up.weight"]) and "shard(1)" in str(split["down.weight"])
        assert blocks["blocks.0"]["recompute"] == ("recompute" in str(given))


# ---- from plan to plan ---------------------------------------------------------------------------

EXCHANGED = {"method": "topk", "density": 1.0, "hierarchical": False}
# Ranks, plan (None: Lightning's own ddp), form of the file that is left to the next.
CHAIN: list[tuple[int, Any, str]] = [
    (2, plan(1, "ddp"), "full"),
    (4, "zero3", "sharded"),
    (4, plan(2, "zero3"), "full"),
    (4, None, "full"),
    (4, {**plan(2, "ddp"), "gradient_exchange": EXCHANGED}, "sharded"),
    (2, "zero1", "full"),
]


def link(rank: int, folder: Path, numbers: list[int]) -> Any:
    """Epochs `numbers`, one under each plan."""
    losses, found = [], None
    for number in numbers:
        ranks, given, form = CHAIN[number]
        torch.manual_seed(100 * number + rank)  # what is not loaded differs
        strategy = DDPStrategy() if given is None else AutoParallelStrategy(
            plan=given, checkpoint=form, allow="compression"
        )  # fmt: skip
        trainer, module = (
            make_trainer(strategy, devices=ranks, max_epochs=number + 1, gradient_clip_val=0.5),
            Counted(),
        )
        parts = ranks if not isinstance(given, dict) else given["mesh"][0]["size"]
        before = str(folder / f"{number - 1}.ckpt") if number else None
        trainer.fit(module, loader(8 // parts, length=16), ckpt_path=before)
        trainer.save_checkpoint(folder / f"{number}.ckpt")
        losses += module.losses
        found = {name: value.clone() for name, value in module.state_dict().items()}
    return losses, found


def test_a_training_goes_from_plan_to_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer, module = make_trainer(max_epochs=len(CHAIN), gradient_clip_val=0.5), Counted()
    trainer.fit(module, in_order())
    losses: list[float] = []
    last: Any = None
    for ranks, links in itertools.groupby(range(len(CHAIN)), key=lambda number: CHAIN[number][0]):
        own, last = on_ranks(link, tmp_path, [*links], world_size=ranks)[0]
        losses += own
    assert losses == pytest.approx(module.losses, rel=1e-3)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(last[name], value, rtol=1e-3, atol=1e-4)
    saved = torch.load(tmp_path / f"{len(CHAIN) - 1}.ckpt", weights_only=False)["optimizer_states"][
        0
    ]
    for index, values in trainer.optimizers[0].state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(saved["state"][index][key], value, rtol=2e-3, atol=1e-4)
