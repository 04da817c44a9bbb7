"""Optimizers over shards against the same over whole parameters, with hooks and closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_topt.optim.shard_step import install_local_step
from tests.launch import run_ranks

# What torch's foreach and fused forms refuse for a mixture of plain tensors and DTensors, and
# states of every kind.
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "foreach RMSprop": lambda p: torch.optim.RMSprop(
        p, lr=0.1, foreach=True, centered=True, momentum=0.5
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
}


def shapes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (1,), (4,), (2, 2, 2))]


def gradients(step: int) -> list[Tensor | None]:
    """The third parameter has none in the second step."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(p.shape, generator=generator) for p in shapes()]
    return [None if (step, index) == (1, 2) else gradient for index, gradient in enumerate(made)]


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def run(make: Any, place: Any) -> Any:
    """Three steps by closure with a schedule; what a hook after the step sees."""
    parameters = [nn.Parameter(place(index, p)) for index, p in enumerate(shapes())]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    optimizer = make(groups)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(o.param_groups[0]["params"][0] is parameters[0])
    )
    optimizer.register_step_post_hook(
        lambda o, *_: seen.append(o.param_groups[1]["params"][0] is parameters[2])
    )
    step = install_local_step(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):

        def closure(number: int = number) -> float:
            for index, (p, gradient) in enumerate(zip(parameters, gradients(number), strict=True)):
                p.grad = None if gradient is None else place(index, gradient)
            seen.append("closure")
            return float(number)

        assert optimizer.step(closure) == float(number)
        scheduler.step()
    state = {
        i: {k: whole(v) for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()
    }
    kinds = {
        type(v)
        for p in parameters
        for v in optimizer.state[p].values()
        if isinstance(v, Tensor) and v.shape == p.shape
    }
    return step, [whole(p) for p in parameters], state, seen, kinds, parameters, optimizer


def on_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def place(index: int, value: Tensor) -> Tensor:
        """The first two parameters are sharded, unevenly: a rank has nothing of one."""
        return distribute_tensor(value, mesh, [Shard(0)]) if index < 2 else value

    for name, make in OPTIMIZERS.items():
        _, parameters, state, *_ = run(make, lambda _, value: value)
        step, ours, our_state, seen, kinds, placed, optimizer = run(make, place)
        assert step is not None and seen == [True, "closure", True] * 3
        torch.testing.assert_close(ours, parameters, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(our_state, state, msg=lambda m, n=name: f"{n}: {m}")
        assert DTensor in kinds and isinstance(placed[0], DTensor)
        step.detach()
        before = [whole(p) for p in placed]
        placed[0].grad = None  # what is left is plain, or without a gradient
        for p in placed[1:2]:
            p.grad = None
        optimizer.step()
        assert torch.equal(whole(placed[0]), before[0]) and not torch.equal(
            whole(placed[3]), before[3]
        )
    dist.barrier()


def test_steps_on_shards_are_those_on_whole_parameters() -> None:
    run_ranks(on_shards, 2)


def failing(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    # its update is not one of single elements
    assert install_local_step(torch.optim.Adafactor([parameter])) is None
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert install_local_step(optimizer) is not None
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer.param_groups[0]["lr"] = "wrong"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [parameter]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    torch.testing.assert_close(parameter.full_tensor().detach(), torch.full((4,), 0.5))


def test_a_failed_step_leaves_shards_where_they_were() -> None:
    run_ranks(failing, 2)


def test_an_optimizer_without_shards_is_left_alone() -> None:
    assert install_local_step(torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))])) is None
