"""LocalStepsStrategy against `OuterSteps` in a plain loop, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt import LocalSteps, LocalStepsStrategy, SparseLoCo
from lightning_topt.communication import LocalMethod, OuterSteps
from lightning_topt.communication.topology import Topology
from tests.models import ConvNet, batch_for
from tests.plugins.trainer_ranks import OwnShare, SgdGPT, loader, make_trainer, on_ranks, state_of

EVERY = 3


def trained(rank: int, method: LocalMethod, nodes: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)  # rank 0's parameters count
    module, ranks = SgdGPT(), dist.get_world_size()
    strategy = LocalStepsStrategy(method, nodes=nodes)
    trainer = make_trainer(
        strategy, devices=ranks, limit_train_batches=8, accumulate_grad_batches=1
    )
    trainer.fit(module, OwnShare(8))
    return state_of(module)


def looped(rank: int, method: LocalMethod, nodes: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    module = SgdGPT()
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    optimizer = module.configure_optimizers()
    topology = Topology(nodes, dist.get_world_size() // nodes, rank)
    local = OuterSteps(module, method, topology=topology)
    for index, batch in zip(range(8), OwnShare(8), strict=False):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        local.average_gradients()
        optimizer.step()
        local.after_step()
    local.synchronize()
    return state_of(module)


METHODS: list[tuple[LocalMethod, int]] = [
    (LocalSteps(every=EVERY), 1),
    (SparseLoCo(every=EVERY, density=0.1), 1),
    (SparseLoCo(every=EVERY, density=0.1), 2),
]


def both(rank: int, method: LocalMethod, nodes: int) -> list[dict[str, Tensor]]:
    return [run(rank, method, nodes) for run in (looped, trained)]


@pytest.mark.parametrize(("method", "nodes"), METHODS, ids=str)
def test_it_is_the_plain_loop(method: LocalMethod, nodes: int) -> None:
    plain, ours = zip(*on_ranks(both, method, nodes, world_size=2 * nodes), strict=True)
    for first, second in ((plain[0], ours[0]), (ours[0], ours[-1])):
        assert all(torch.equal(first[name], value) for name, value in second.items())


class Watching(SgdGPT):
    """Notes at each validation and step whether ranks have equal parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.equal: dict[str, list[bool]] = {"validation": [], "step": []}

    def note(self, when: str) -> None:
        own = torch.nn.utils.parameters_to_vector(self.parameters()).detach()
        first = own.clone()
        dist.broadcast(first, 0)
        different = torch.tensor(float(not torch.equal(own, first)))
        dist.all_reduce(different)
        self.equal[when].append(not different)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation")


def watched(rank: int) -> tuple[dict[str, list[bool]], int]:
    module = Watching()
    strategy = LocalStepsStrategy(LocalSteps(every=EVERY))
    trainer = make_trainer(
        strategy,
        devices=2,
        limit_train_batches=8,
        limit_val_batches=1,
        val_check_interval=4,
        max_epochs=1,
    )
    trainer.fit(module, OwnShare(8), loader(4))
    assert strategy.exchange is not None
    return module.equal, strategy.exchange.outer_steps


def test_ranks_differ_between_outer_steps_and_agree_in_validation() -> None:
    for equal, outer_steps in on_ranks(watched):
        # Outer steps after 3, 4 (validation), 7 and 8 (validation).
        assert equal["step"] == [False, False, True, False, False, False, True, False]
        # the first: sanity check
        assert equal["validation"] == [True, True, True] and outer_steps == 4


def resumed(
    rank: int, folder: Path, method: LocalMethod
) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
    def fit(epochs: int, path: Path | None = None, save: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = SgdGPT()
        ranks = dist.get_world_size()
        strategy = LocalStepsStrategy(method, nodes=ranks // 2)
        trainer = make_trainer(strategy, devices=ranks, max_epochs=epochs, limit_train_batches=4)
        trainer.fit(module, OwnShare(8), ckpt_path=path)
        if save is not None:
            trainer.save_checkpoint(save)
        return state_of(module)

    whole = fit(3)
    fit(1, save=folder / "one.ckpt")
    return (
        "loops" in torch.load(folder / "one.ckpt", weights_only=True),
        whole,
        fit(3, folder / "one.ckpt"),
    )


@pytest.mark.parametrize(
    ("method", "ranks"), [(LocalSteps(every=2), 2), (SparseLoCo(every=2, density=0.1), 4)], ids=str
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, method: LocalMethod, ranks: int
) -> None:
    for saved, whole, parts in on_ranks(resumed, tmp_path, method, world_size=ranks):
        assert saved and all(torch.equal(whole[name], value) for name, value in parts.items())


def other_size(rank: int, path: Path, resume: bool, nodes: int = 1) -> Any:
    torch.manual_seed(0)
    module = SgdGPT()
    strategy = LocalStepsStrategy(
        SparseLoCo(every=2, density=0.1, hierarchical=nodes > 1), nodes=nodes
    )
    trainer = make_trainer(
        strategy, devices=dist.get_world_size(), max_epochs=1 + resume, limit_train_batches=4
    )
    found: dict[str, Any] = {}

    def note() -> None:
        assert strategy.exchange is not None
        found.update(strategy.exchange.own_state_dict()["state"])

    module.on_train_start = note  # type: ignore[method-assign]
    trainer.fit(module, OwnShare(8), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return found.get("residual")


def test_residuals_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    on_ranks(other_size, path, False)
    found = on_ranks(other_size, path, True, world_size=4)
    by_node = on_ranks(other_size, path, True, 2, world_size=4)  # as many holders as there were
    saved = torch.load(path, weights_only=True)["lightning_topt"]["gradient_exchange"]["ranks"]
    for rank in found:
        for name, value in rank.items():
            torch.testing.assert_close(
                value, (saved[0]["residual"][name] + saved[1]["residual"][name]) / 2
            )
    assert max(value.abs().max() for value in found[0].values()) > 0
    for index in (0, 1):
        assert all(
            torch.equal(value, saved[index]["residual"][name])
            for name, value in by_node[2 * index].items()
        )


class Scaled(ConvNet):
    """Buffers, and a frozen parameter that is not equal everywhere at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0 + rank), requires_grad=False)

    def train_dataloader(self) -> Any:
        images, labels = batch_for(self, 32)
        return torch.utils.data.DataLoader(list(zip(images, labels, strict=True)), batch_size=4)


def buffers(rank: int, precision: str) -> dict[str, Tensor]:
    module = Scaled(rank)
    trainer = make_trainer(LocalStepsStrategy(LocalSteps(every=2)), devices=2, precision=precision)
    trainer.fit(module)
    return state_of(module)


PRECISIONS = ("32-true", "16-mixed", "bf16-true")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_of_the_module_is_equal_at_the_end(precision: str) -> None:
    first, second = on_ranks(buffers, precision)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert first["scale"] == 1 and first["norm1.running_mean"].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("method", "topk", "give it to CompressedDDPStrategy"),
        ("ddp_comm_hook", print, "ddp_comm_hook"),
    ],
)
def test_wrong_options_are_refused_at_once(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LocalStepsStrategy(**{name: value})
