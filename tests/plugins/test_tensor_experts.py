"""Mixtures of experts are found to split along experts, and train alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_topt.graph.op_config import Shard
from tests.models import Mixture
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import (
    Tokens,
    loader,
    make_trainer,
    mean_over_ranks,
    on_ranks,
    topt_trainer,
)

EXPERTS, WIDTH, HIDDEN = 4, 16, 32  # of `Mixture` too


class Loop(nn.Module):
    """A list of modules; which tokens each of them gets depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = (
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        sums = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            sums.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return sums.view_as(x)


class Recording(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Net(Recording):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.tokens(batch[0])
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (WIDTH,)))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())


class Mixtral(Recording):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
            num_experts_per_tok=2,
        )  # fmt: skip
        self.model = transformers.MixtralForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss


BY_HAND = {
    f"{index}.{layer}.{kind}": {"tensor": f"shard({dim})"}
    for index in range(EXPERTS)
    for layer, kind, dim in ((0, "weight", 0), (0, "bias", 0), (2, "weight", 1))
}
LOOP_PLAN = {
    "version": 2,
    "mesh": [{"name": "tensor", "size": 2}],
    "stages": [
        {
            "blocks": [
                {
                    "block": f"blocks.{index}.experts",
                    "storage": "ddp",
                    "computes": {"parameters": BY_HAND},
                }
                for index in range(2)
            ]
            + [{"block": "", "storage": "ddp"}]
        }
    ],
}
MODELS: dict[str, tuple[Callable[[], Recording], Any]] = {
    "einsum": (lambda: Net(lambda: Mixture("einsum")), "tensor"),
    "list of modules": (lambda: Net(Loop), LOOP_PLAN),
    "mixtral": (Mixtral, "tensor"),
}


def fit(rank: int) -> Any:
    found = {}
    for name, (make, plan) in MODELS.items():
        torch.manual_seed(rank)
        trainer, module = topt_trainer(plan, options={"cluster": cluster(2)}), make()
        trainer.fit(module, loader(8, length=16))
        placed = {
            n: p
            for block in trainer.strategy.parallel_plan.blocks
            for n, p in block.config.parameters
        }
        found[name] = module.losses, placed
    return found


def one_process(name: str) -> list[float]:
    torch.manual_seed(0)
    trainer, module = make_trainer(), MODELS[name][0]()
    data = Tokens(length=16)
    trainer.fit(
        module,
        DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=1, rank=0)),
    )
    return module.losses


def test_mixtures_of_experts() -> None:
    expected = {name: one_process(name) for name in MODELS}
    for found in on_ranks(fit):
        for name, (losses, placed) in found.items():
            assert losses == pytest.approx(expected[name], rel=1e-4), name
            # by expert, or inside of each: which of them is found depends on the machine
            if name == "einsum":
                assert all(
                    any(isinstance(p, Shard) for p in placed[each])
                    for each in ("up", "bias", "down")
                )
            if name == "mixtral":
                (experts,) = (
                    where for each, where in placed.items() if each.endswith("experts.gate_up_proj")
                )
                assert any(isinstance(placement, Shard) for placement in experts)
