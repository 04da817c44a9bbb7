"""User code between steps, where a plan splits parameters: refused at once, or right."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_topt import AutoParallelStrategy
from lightning_topt.costs.measuring import RemotePlanningError
from tests.plugins.test_pipeline_fits import cluster, pipeline
from tests.plugins.test_tensor_fits import plan
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, topt_trainer

# ---- what steps leave ----------------------------------------------------------------------------


class Leaves(RecordingGPT):
    """Keeps and returns logits, which are split by class, in every way."""

    def __init__(self) -> None:
        super().__init__(heads=2)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(8, 32))
        self.last, self.all, self.named = torch.zeros(()), list[Tensor](), dict[str, Any]()
        self.confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=32)
        self.values = torchmetrics.CatMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * logits.mean(0)
            self.last = logits.clone()
            self.all.append(logits.mean((0, 1)))
            self.named["deviation"] = logits.std((0, 1))
            self.confusion(logits.flatten(0, 1), batch[1].flatten())
            self.values(logits[0, 0])
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()),
            "logits": logits.detach(),
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = (outputs["logits"], self.last, self.average, self.all[-1], self.named["deviation"])
        metrics = self.values.compute()[-32:], self.confusion.confmat.float()
        self.seen.append([each.double().square().sum().item() for each in (*kept, *metrics)])


def with_split_logits(data: int) -> dict[str, Any]:
    given = plan(data, "ddp")
    cut = {"data": "replicate", "tensor": "shard(0)"}
    given["stages"][0]["blocks"][-1]["computes"]["parameters"]["head.weight"] = cut
    return given


def leave(rank: int, given: Any) -> Any:
    torch.manual_seed(0)
    trainer, module = topt_trainer(given), Leaves()
    trainer.fit(module, loader(8, length=16))
    return module.seen, module.average, torch.stack(module.all)


def test_what_steps_leave_is_whole() -> None:
    """The same as on one data rank."""
    expected = on_ranks(leave, None, world_size=1)[0]
    for found in on_ranks(leave, with_split_logits(1)):
        assert found[0] == [pytest.approx(each, rel=1e-3) for each in expected[0]]
        for one, other in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# ---- gradients and samples in steps --------------------------------------------------------------


class Contrastive(RecordingGPT):
    """Compares the samples of all ranks, as SimCLR does."""

    def gathered(self, features: Tensor) -> Tensor:
        found: Tensor = self.all_gather(features, sync_grads=True)  # type: ignore[assignment]
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])  # split by class
        views = F.normalize(torch.stack([logits[:, :4].mean(1), logits[:, 4:].mean(1)]), dim=-1)
        first, second = self.gathered(views).transpose(0, 1).flatten(1, 2)
        assert not self.all_gather(batch[0].float()).requires_grad  # type: ignore[union-attr]
        return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


class GathersItself(Contrastive):
    """Without Lightning."""

    def gathered(self, features: Tensor) -> Tensor:
        several = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(several, features.detach().contiguous())
        return torch.stack([features, *several[1:]])


class Penalty(L.LightningModule):
    """Of the slope that the output has in the input (Gulrajani et al., arXiv 1704.00028)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 4)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].float().div(32).requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.norm(dim=-1) - 1).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def penalized(rank: int, given: Any) -> Any:
    torch.manual_seed(0)
    strategy = "ddp" if given is None else AutoParallelStrategy(plan=given, cluster=cluster(2))
    module = Penalty()
    trainer = make_trainer(strategy, devices=dist.get_world_size())
    trainer.fit(module, loader(4, length=16))
    return module.losses, dict(module.state_dict())


def test_gradient_penalties_train_on_slices() -> None:
    losses, state = on_ranks(penalized, None, world_size=1)[0]
    for found in on_ranks(penalized, "tensor+recompute"):
        assert found[0] == pytest.approx(losses, rel=1e-5) and len(losses) == 4
        for name, value in state.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def contrast(rank: int, given: Any, kind: type[RecordingGPT] = Contrastive) -> Any:
    torch.manual_seed(0)
    module = kind(heads=2)
    ranks = dist.get_world_size()
    options = {"cluster": cluster(ranks)}
    trainer = topt_trainer(given, options=options) if given else make_trainer("ddp", devices=ranks)
    trainer.fit(module, loader(4, length=16))
    return module.losses, dict(module.state_dict())


def test_samples_of_all_ranks_are_gathered_once() -> None:
    """Those of the data ranks; gradients go back to each."""
    expected = on_ranks(contrast, None)[0]
    for found in on_ranks(contrast, with_split_logits(2), world_size=4):
        assert found[0] == pytest.approx(expected[0], rel=1e-4) and len(found[0]) == 2
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)


def refused_gathers(rank: int) -> None:
    among_all = r"a step calls torch.distributed.all_gather among all ranks.*call self.all_gather"
    for given in (with_split_logits(1), "tensor"):
        with pytest.raises((ValueError, RemotePlanningError), match=among_all):
            contrast(rank, given, GathersItself)
    with pytest.raises((ValueError, RemotePlanningError), match="ranks with different batches"):
        contrast(rank, {**with_split_logits(1), "num_microbatches": 2})
    with pytest.raises((ValueError, RemotePlanningError), match=r"the step calls c10d.allgather_"):
        make_trainer(pipeline(2, microbatches=1), devices=2).fit(Contrastive(heads=2), loader(8))


def test_collectives_in_which_samples_count_twice_are_refused() -> None:
    """In turns too, where all ranks of a group have one member's samples."""
    on_ranks(refused_gathers)
