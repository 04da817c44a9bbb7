"""ZeRO levels on one CUDA rank of NCCL: losses of the CPU, and states that go there and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import uniform_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, WIDTH = 3, 32
BLOCKS = ["0", "1", "2"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("level", range(4))
def test_losses_are_those_of_plain_torch_on_the_cpu(
    level: int, recompute: bool, one_rank: None, device: torch.device
) -> None:
    module = make_model()
    expected = train_plain(make_model())
    engine, optimizer, model = start(module, level, device, recompute=recompute)
    losses = train(model, optimizer, range(STEPS), device)
    engine.release()
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("level", range(4))
def test_states_go_there_and_back(level: int, one_rank: None, device: torch.device) -> None:
    engine, optimizer, model = start(make_model(), level, device)
    train(model, optimizer, range(STEPS), device)
    state = copy.deepcopy(engine.state_dict())
    expected = train(model, optimizer, range(STEPS, 2 * STEPS), device)
    engine.load(copy.deepcopy(state))  # a loaded state may become that of the optimizer
    assert train(model, optimizer, range(STEPS, 2 * STEPS), device) == pytest.approx(
        expected, rel=1e-5
    )
    engine.release()
    # Another engine, of another level, takes it too.
    engine, optimizer, model = start(make_model(seed=1), (level + 1) % 4, device)
    engine.load(state)
    assert train(model, optimizer, range(STEPS, 2 * STEPS), device) == pytest.approx(
        expected, rel=1e-4
    )
    engine.release()


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in BLOCKS
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def start(
    module: nn.Module, level: int, device: torch.device, *, recompute: bool = False
) -> tuple[Engine, torch.optim.Optimizer, nn.Module]:
    again = BLOCKS if recompute else ()
    plan = uniform_plan(level, data_parallel_size=1, blocks=BLOCKS, recompute=again)
    engine = Engine(plan, module, device=device)
    model = engine.apply()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine.attach_optimizers([optimizer])
    return engine, optimizer, model


def train_plain(module: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return train(module, optimizer, range(STEPS), torch.device("cpu"))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
    return nn.functional.mse_loss(model(x), x[:, :4])
