"""Part 6: NCCL with one rank (gloo on CPU): groups, objects, and the states of all that exchanges.

NCCL takes no two ranks on one device, but one rank shows what it refuses: tensors in host memory,
calls from another thread, operations that only gloo has. And what groups cost: seconds to make one
and bytes of the device that its communicator keeps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from benchmarks.gpu_report.reporting import Report, in_own_process, run_part, synchronize
from lightning_topt.communication import GradientMethod, LocalMethod, OuterSteps
from lightning_topt.communication.exchange_method import method_classes
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import uniform_plan

GROUPS, STEPS, WIDTH = 4, 4, 256
ALONE = Topology(1, 1, 0)
_LEAST_LEFT = 3.0


def run(report: Report) -> None:
    """Try everything that one rank can, in a process that ends with its communicators."""
    in_own_process(report, "one rank", _try_all)


def _try_all(report: Report) -> None:
    device = torch.device("cuda", 0) if report.device.type == "cuda" else report.device
    with one_rank(report, device):
        measure_groups(report, device)
        try_objects(report, device)
        for level in (0, 3) if report.quick else range(4):
            with report.attempt(f"engine, ZeRO-{level}") as row:
                row.update(engine_columns(level, device))
        for name, kind in method_classes().items():
            if report.left() < _LEAST_LEFT:
                report.note("not begun", method=name, left=report.left())
                continue
            method = kind()
            with report.attempt(f"exchange {name}") as row:
                if isinstance(method, GradientMethod):
                    row.update(exchange_columns(method, device))
                elif isinstance(method, LocalMethod):
                    row.update(outer_columns(method, device))
        with report.attempt("calibrate") as row:
            cluster = calibrate(device=device, budget_seconds=1.0)
            row["backend"], row["overlap"] = cluster.backend, cluster.overlap
            row["curves"] = len(cluster.collectives)


@contextmanager
def one_rank(report: Report, device: torch.device) -> Iterator[None]:
    """Make this process the one rank of a group, as Lightning does: bound to its device."""
    cuda = device.type == "cuda"
    given: dict[str, Any] = {"device_id": device} if cuda else {}
    with report.attempt("process group, first all-reduce") as row:
        before, start = used_bytes(device), time.perf_counter()
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
            rank=0,
            world_size=1,
            **given,
        )
        row["init_seconds"] = time.perf_counter() - start
        dist.all_reduce(torch.ones(1 << 20, device=device))
        synchronize(device)
        row["seconds"] = time.perf_counter() - start
        row["communicator_bytes"] = used_bytes(device) - before
        row["backend"] = dist.get_backend()
        if cuda:
            row["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        yield
    finally:
        if not cuda:  # there it would take many seconds
            dist.destroy_process_group()


def used_bytes(device: torch.device) -> int:
    """Return bytes of the device in use by anyone, 0 on CPU, without those that torch keeps."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


# ---- groups and objects --------------------------------------------------------------------------


def measure_groups(report: Report, device: torch.device) -> None:
    """Make groups in each way, use them, and destroy them."""
    ways: dict[str, Callable[[], Any]] = {"new_group": lambda: dist.new_group([0])}
    if device.type == "cuda":  # gloo cannot split
        ways["split_group"] = lambda: dist.split_group(split_ranks=[[0]])
    for name, make in ways.items():
        with report.attempt(name) as row:
            before, groups = used_bytes(device), []
            made, used = [], []
            for _ in range(GROUPS):
                start = time.perf_counter()
                groups.append(make())
                synchronize(device)
                made.append(time.perf_counter() - start)
                dist.all_reduce(torch.ones(1 << 20, device=device), group=groups[-1])
                synchronize(device)
                used.append(time.perf_counter() - start)
            row["make_seconds"], row["and_use_seconds"] = (sum(x) / GROUPS for x in (made, used))
            row["communicator_bytes"] = (used_bytes(device) - before) / GROUPS
            for group in groups:
                dist.destroy_process_group(group)
            row["kept_bytes"] = used_bytes(device) - before


def try_objects(report: Report, device: torch.device) -> None:
    """Send objects, and tensors in host memory, which NCCL refuses."""
    value = {"a": list(range(100)), "b": "text"}

    def gather() -> None:
        found: list[Any] = [None]
        dist.all_gather_object(found, value)
        assert found == [value]

    def broadcast() -> None:
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0)
        assert found == [value]

    def broadcast_from_host() -> None:
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))

    def gather_to_one() -> None:
        found: list[Any] = [None]
        dist.gather_object(value, found, dst=0)
        assert found == [value]

    def scatter() -> None:
        out: list[Any] = [None]
        dist.scatter_object_list(out, [value], src=0)
        assert out == [value]

    calls = {
        "all_gather_object": gather,
        "broadcast_object_list": broadcast,
        "gather_object": gather_to_one,
        "scatter_object_list": scatter,
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        with report.attempt(name) as row:
            call()
            start = time.perf_counter()
            for _ in range(5):
                call()
            synchronize(device)
            row["seconds"] = (time.perf_counter() - start) / 5
    refused: dict[str, Callable[[], Any]] = {
        "all_reduce of host memory": lambda: dist.all_reduce(torch.ones(8)),
        "broadcast_object_list on host memory": broadcast_from_host,
    }
    for name, call in refused.items():
        with report.attempt(f"is refused: {name}") as row:
            try:
                call()
                row["answer"] = "it is not refused"
            except Exception as error:
                row["answer"] = f"{type(error).__name__}: {error}"


# ---- what exchanges ------------------------------------------------------------------------------


def make_model(device: torch.device) -> nn.Sequential:
    """Return layers with matrices, biases and norms."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8)).to(device)


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """Return the loss of a batch that depends on the step alone."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
    return nn.functional.mse_loss(model(x), x[:, :8])


def engine_columns(level: int, device: torch.device) -> dict[str, Any]:
    """Train under a ZeRO level on one rank, save, load, go on; both must give equal losses."""
    plan = uniform_plan(level, data_parallel_size=1, blocks=["0", "1", "2"], recompute=["1"])
    module = make_model(torch.device("cpu"))
    engine = Engine(plan, module, device=device)
    model = engine.apply()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine.attach_optimizers([optimizer])

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, step, device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(range(STEPS))
    state = copy.deepcopy(engine.state_dict())
    first = train(range(STEPS, 2 * STEPS))
    engine.load(state)
    second = train(range(STEPS, 2 * STEPS))
    engine.release()
    engine.close()
    kinds = sorted({str(leaf.device.type) for leaf in tensors_of(state)})
    assert first == second, f"other losses after loading: {first} and {second}"
    return {"states_on": ", ".join(kinds), "losses_equal": first == second}


def exchange_columns(method: GradientMethod, device: torch.device) -> dict[str, Any]:
    """Train through the exchange and its thread, save its state, load it into another."""
    if not method.choices(ALONE):
        return {"answer": "not for one rank"}
    model = make_model(device)
    ddp, exchange = exchanged(model, method, device)
    losses = train_ddp(ddp, range(STEPS), device)
    synchronize(device)
    state, own = exchange.state_dict(), exchange.own_state_dict()
    other_model = make_model(device)
    other_model.load_state_dict(model.state_dict())
    other_ddp, other = exchanged(other_model, method, device)
    other.load_state_dict(copy.deepcopy(state))
    # DDP lays its buckets out anew after the first step; the state has to follow.
    later = [train_ddp(each, range(STEPS, 2 * STEPS), device) for each in (ddp, other_ddp)]
    statistics = exchange.statistics()
    for each in (exchange, other):
        each.close()
    kinds = sorted({str(leaf.device.type) for leaf in tensors_of(state)})
    return {
        "first_loss": losses[0],
        "last_loss": later[0][-1],
        "after_loading": later[1][-1],
        "states_on": ", ".join(kinds),
        "state_tensors": len(tensors_of(own)),
        "exposed_seconds": statistics.exposed_seconds / max(1, statistics.steps),
        "exchange_seconds": statistics.exchange_seconds / max(1, statistics.steps),
    }


def exchanged(
    model: nn.Module, method: GradientMethod, device: torch.device
) -> tuple[DistributedDataParallel, CompressedExchange]:
    """Return the model in a DDP whose gradients the method exchanges."""
    devices = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=0.3)
    exchange = CompressedExchange(ddp, method, topology=ALONE, device=device, timeout_seconds=10)
    return ddp, exchange


def train_ddp(ddp: nn.Module, steps: range, device: torch.device) -> list[float]:
    """Train by plain SGD; return the losses."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step in steps:
        loss = loss_of(ddp, step, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def outer_columns(method: LocalMethod, device: torch.device) -> dict[str, Any]:
    """Train with outer steps, save their state, and load it."""
    model = make_model(device)
    outer = OuterSteps(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(2 * method.every + 1):
        loss = loss_of(model, step, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outer.after_step()
        losses.append(loss.item())
    state = copy.deepcopy(outer.state_dict())
    outer.load_state_dict(state)
    again = outer.state_dict()
    same = all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(again), strict=True))
    assert same, "another state after loading"
    outer.synchronize()
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "states_on": ", ".join(sorted({leaf.device.type for leaf in tensors_of(state)})),
        "state_tensors": len(tensors_of(state)),
        "exchange_seconds": outer.statistics().exchange_seconds / outer.outer_steps,
    }


def tensors_of(state: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors of a state."""
    return [leaf for leaf in tree_flatten(dict(state))[0] if isinstance(leaf, Tensor)]


def main() -> None:
    run_part("one_rank_nccl", run, __doc__, forks=True)


if __name__ == "__main__":
    main()
