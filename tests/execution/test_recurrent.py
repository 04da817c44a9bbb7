"""Recurrent layers, which keep a list of their own weights, under sharded plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import uniform_plan
from tests.launch import run_ranks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


def train(rank: int, level: int) -> tuple[list[float], list[bool]]:
    torch.manual_seed(0)
    module, x = Recurrent(), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(rank))
    plan = uniform_plan(level, data_parallel_size=2, blocks=["encoder"] if level else [])
    engine = Engine(plan, module, device=torch.device("cpu"))
    model = engine.apply()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine.attach_optimizers([optimizer])
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    engine.release()
    losses.append(module(x).item())
    lstm = module.encoder.lstm
    listed = zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    return losses, [weight is lstm._parameters[name] for weight, name in listed]


def test_lstm_follows_its_shards_and_is_whole_after_release() -> None:
    def every_level(rank: int) -> list[Any]:
        return [train(rank, level) for level in (0, 2, 3)]

    for (expected, _), *sharded in run_ranks(every_level, 2):
        for losses, same in sharded:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
            assert len(same) == 16 and all(same)
