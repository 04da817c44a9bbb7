"""Sparse exchanges on gloo ranks against a slow simulation; checkpoints; DDP and a hook."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import TopK, read_method
from lightning_topt.communication.exchange_method import exempt_names
from lightning_topt.communication.selection import feedback_top_k
from lightning_topt.communication.topology import Topology
from tests.communication.exchange_ranks import (
    Simulation,
    assert_equal_on_all_ranks,
    batch,
    bucket_names,
    gathered_gradients,
    make_model,
    train,
    wrap,
)
from tests.launch import run_on_pool, run_ranks


def against_simulation(
    rank: int, options: TopK, shape: tuple[int, int], hierarchical: bool, resume: bool
) -> int:
    """Six steps, the last three after a checkpoint into a new DDP (of one bucket) if `resume`."""
    topology = Topology(*shape, rank)
    ddp, exchange = wrap(options, topology=topology)
    exempt = set(exempt_names(ddp.module, options.exempt))
    options = options.on(topology)
    simulation = Simulation(options, topology, hierarchical=hierarchical, exempt=exempt)
    parameters = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
    for steps in (range(3), range(3, 6)):
        for step, gradient in zip(steps, train(ddp, rank=rank, steps=steps), strict=True):
            if rank == 0:
                everyone = gathered_gradients(make_model, parameters, topology.world_size, step)
                expected = simulation.step(everyone, bucket_names(exchange), step)
                for name, value in gradient.items():
                    scale = expected[name].abs().max().item()
                    torch.testing.assert_close(
                        value.double(), expected[name], rtol=1e-6, atol=2e-6 * scale, msg=name
                    )
            parameters = {n: t - 0.1 * gradient[n] for n, t in parameters.items()}
        assert_equal_on_all_ranks(ddp)
        if resume and steps.start == 0:
            state = [exchange.state_dict()]
            dist.broadcast_object_list(state)
            exchange.close()
            ddp, exchange = wrap(options, topology=topology, model=ddp.module)
            exchange.load_state_dict(state[0])
    statistics = exchange.statistics()
    assert (
        statistics.steps == 6 - 3 * resume
        and statistics.exchange_seconds > 0
        and statistics.exposed_seconds >= 0
    )
    assert options.density == 1 or 0 < statistics.bytes_sent < statistics.dense_bytes
    assert (statistics.residual_norm > 0) == (options.error_feedback and options.density < 1)
    exchange.close()
    return len(bucket_names(exchange))


FLAT, BY_NODES = (2, 1), (2, 2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (FLAT, {"density": 0.05}),
        (FLAT, {"density": 0.02, "dense_steps": 2, "exempt": ("embedding", "0.*")}),
        (FLAT, {"density": 0.1, "error_feedback": False, "exempt": ()}),
        (FLAT, {"density": 1.0, "exempt": ()}),
        (FLAT, {"density": 0.1, "bits": 8, "exempt": ()}),
        (BY_NODES, {"density": 0.02, "dense_steps": 2, "exempt": ("embedding", "0.*")}),
        (BY_NODES, {"density": None, "bits": 2}),
    ],
    ids=str,
)
def test_equal_to_simulation(shape, options):
    world_size, hierarchical = shape[0] * shape[1], shape[1] > 1
    buckets = run_on_pool(
        against_simulation, world_size, TopK(**options), shape, hierarchical, False
    )
    assert buckets[0] >= 3


@pytest.mark.parametrize("shape", [FLAT, BY_NODES], ids=str)
def test_resumed_equals_simulation(shape):
    options = TopK(density=0.05)
    run_on_pool(against_simulation, shape[0] * shape[1], options, shape, shape[1] > 1, True)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_four_ranks_of_one_kind(hierarchical):
    """All on one node, and two nodes of two exchanged flat."""
    shape = (1, 4) if hierarchical else (2, 2)
    options = TopK(density=0.05, hierarchical=hierarchical)
    run_on_pool(against_simulation, 4, options, shape, hierarchical, False)


def saved_after(rank: int, shape: tuple[int, int], steps: int) -> Any:
    ddp, exchange = wrap(TopK(density=0.05), topology=Topology(*shape, rank))
    list(train(ddp, rank=rank, steps=range(steps)))
    state = exchange.state_dict()
    exchange.close()
    return state


def saved_after_loading(rank: int, shape: tuple[int, int], state: Any) -> Any:
    options = TopK(density=0.05)
    ddp, exchange = wrap(options, topology=Topology(*shape, rank))
    exchange.load_state_dict(state)
    again = exchange.state_dict()
    assert exchange.statistics().steps == 0
    next(train(ddp, rank=rank, steps=range(1)))
    exchange.close()
    return again


@pytest.fixture(scope="module")
def state():
    return run_on_pool(saved_after, 4, (2, 2), 3)[0]


@pytest.mark.parametrize("target", [(2, 1), (4, 1), (2, 2), (1, 1)])
def test_state_on_other_ranks(target, state):
    """The pending mean gradient survives any change of the number of ranks and nodes."""
    assert len(state["ranks"]) == 2 and state["step"] == 3
    loaded = run_on_pool(saved_after_loading, target[0] * target[1], target, state)
    assert len(loaded[0]["ranks"]) == target[0] and all(not other["ranks"] for other in loaded[1:])
    for name in state["ranks"][0]["residual"]:
        held = [[r["residual"][name] for r in s["ranks"]] for s in (state, loaded[0])]
        before, after = (torch.stack(of_ranks).mean(0) for of_ranks in held)
        torch.testing.assert_close(after, before)
        assert target[0] == 2 or all(torch.allclose(each, before) for each in held[1])


def test_state_of_another_model():
    state = run_on_pool(saved_after, 2, (2, 1), 2)[0]
    tensors = state["ranks"][0]["residual"]
    tensors["0.weight"] = tensors["0.weight"][1:]
    with pytest.raises(
        RuntimeError, match=r"state of 0.weight has 639 elements, the parameter 640"
    ):
        run_ranks(saved_after_loading, 1, (1, 1), state)
    tensors["old.weight"] = tensors.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"parameter that the model lacks: old.weight"):
        run_ranks(saved_after_loading, 1, (1, 1), state)
    with pytest.raises(RuntimeError, match=r"is of method='bf16', this exchange has 'topk'"):
        run_ranks(saved_after_loading, 1, (1, 1), state | {"method": "bf16"})


def lossless(
    rank: int, ddp_options: dict[str, Any], accumulate: int, dtype: torch.dtype, method: str
) -> None:
    """A density of 1 gives DDP's own gradients, whatever DDP does."""

    def model() -> nn.Module:
        return Branches().to(dtype)

    plain = DistributedDataParallel(model(), **ddp_options)
    options = (
        TopK(density=1.0, exempt=("norm", "layers.3.b*"))
        if method == "topk"
        else read_method(method)
    )
    ddp, exchange = wrap(options, model=model(), **ddp_options)
    for step in range(4):
        for both in (plain, ddp):
            both.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(accumulate):
                branch = 0 if ddp_options.get("static_graph") else (step + micro) % 2
                with both.no_sync() if micro + 1 < accumulate else nullcontext():
                    both(
                        batch(rank, 10 * step + micro)[0].to(dtype), branch=branch
                    ).float().square().mean().backward()
        for (name, ours), theirs in zip(
            ddp.module.named_parameters(), plain.module.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                tolerance = (
                    {"rtol": 2e-6, "atol": 1e-7}
                    if dtype == torch.float32
                    else {"rtol": 2e-2, "atol": 1e-3}
                )
                torch.testing.assert_close(ours.grad, theirs.grad, **tolerance, msg=name)
    assert exchange.statistics().steps == 4
    exchange.close()


class Branches(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Linear(16, 40), nn.Linear(40, 30), nn.Linear(40, 30), nn.Linear(30, 50)]
        )

    def forward(self, x: torch.Tensor, *, branch: int) -> torch.Tensor:
        x = self.layers[1 + branch](torch.tanh(self.layers[0](x)))
        return self.layers[3](x)


@pytest.mark.parametrize(
    ("ddp_options", "accumulate"),
    [
        ({"find_unused_parameters": True}, 1),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, 2),
        ({"static_graph": True}, 1),
        ({"static_graph": True, "gradient_as_bucket_view": True}, 1),
    ],
)
@pytest.mark.parametrize("method", ["topk", "dense"])
def test_ddp_options(ddp_options, accumulate, method):
    run_on_pool(lossless, 2, ddp_options, accumulate, torch.float32, method)


def test_half_parameters():
    # compiled here, not by both ranks
    feedback_top_k(torch.ones(8, dtype=torch.bfloat16), torch.ones(8), 1)
    run_on_pool(lossless, 2, {"find_unused_parameters": True}, 1, torch.bfloat16, "topk")
