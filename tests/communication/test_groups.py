"""How many process groups exchanges make, and that none is left."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world

from lightning_topt.communication import GradientMethod, LocalMethod, OuterSteps, topology
from lightning_topt.communication.collectives import values_of_group
from lightning_topt.communication.exchange_method import method_classes
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology, abort_groups, host_group, make_groups
from tests.launch import run_ranks

GRADIENT_METHODS = {n: k for n, k in method_classes().items() if issubclass(k, GradientMethod)}
LOCAL_METHODS = {n: k for n, k in method_classes().items() if issubclass(k, LocalMethod)}
BY_NODES = {name: kind for name, kind in GRADIENT_METHODS.items() if "hierarchical" in vars(kind())}


def count() -> int:
    return len(_world.pg_map)


def module_with_bias() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 3))


def averaged(exchange: CompressedExchange, module: nn.Module, rank: int, *, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        exchange.average()


def counts_of_exchanges(rank: int, nodes: int) -> dict[str, tuple[int, int, int]]:
    """By method: the groups before, while and after an exchange is used."""
    found = {}
    for name, kind in GRADIENT_METHODS.items():
        if (nodes > 1) != (name in BY_NODES):
            continue
        size = dist.get_world_size()
        given: dict[str, Any] = {"hierarchical": True} if nodes > 1 else {}
        method, module, before = kind(**given), module_with_bias(), count()
        exchange = CompressedExchange(
            module, method, topology=Topology(nodes, size // nodes, rank), timeout_seconds=30
        )
        averaged(exchange, module, rank, steps=3)
        exchange.state_dict()
        in_use = count()
        exchange.close()
        exchange.close()  # once more changes nothing
        found[name] = before, in_use, count()
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_exchanges_make_few_groups_and_leave_none(nodes: int) -> None:
    expected = set(BY_NODES) if nodes > 1 else set(GRADIENT_METHODS) - set(BY_NODES)
    size = 2 * nodes
    for rank, found in enumerate(run_ranks(counts_of_exchanges, size, nodes)):
        assert set(found) == expected
        for name, (before, in_use, after) in found.items():
            assert before == after == 1, name
            method = GRADIENT_METHODS[name](**({"hierarchical": True} if nodes > 1 else {}))
            stages = method.num_stages(Topology(nodes, size // nodes, rank))
            if nodes == 1:
                assert in_use - before == stages, name
            else:
                with_exempt = method.exempt_rules is not None
                assert in_use - before == 3 + max(stages, int(with_exempt)), name


def counts_of_outer_steps(rank: int, nodes: int) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name, kind in LOCAL_METHODS.items():
        size, module, before = dist.get_world_size(), module_with_bias(), count()
        outer = OuterSteps(
            module,
            kind(every=1, hierarchical=True),
            topology=Topology(nodes, size // nodes, rank),
            timeout_seconds=30,
        )
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) + rank
        outer.average_gradients()
        for parameter in module.parameters():
            parameter.data.sub_(parameter.grad)
        outer.after_step()
        in_use = count()
        outer.close()
        outer.close()
        found[name] = before, in_use, count()
    return found


@pytest.mark.parametrize(("nodes", "made"), [(1, 1), (2, 2)])
def test_outer_steps_leave_no_groups(nodes: int, made: int) -> None:
    """The ranks of one node are those of the run, whose group serves them."""
    for found in run_ranks(counts_of_outer_steps, 2 * nodes, nodes):
        assert found == dict.fromkeys(LOCAL_METHODS, (1, 1 + made, 1))


def end_alone(rank: int) -> int:
    module = module_with_bias()
    exchange = CompressedExchange(
        module, GRADIENT_METHODS["bf16"](), topology=Topology(1, 2, rank), timeout_seconds=30
    )
    averaged(exchange, module, rank, steps=1)
    exchange.end()
    return count()


def test_an_exchange_that_ends_alone_leaves_its_groups_alone() -> None:
    assert run_ranks(end_alone, 2) == [2, 2]


def parts_share(rank: int) -> tuple[int, bool, list[int]]:
    """Two parts of two ranks: checks of one part are no business of the other."""
    topology = Topology(1, 4, rank).of_part([[0, 2], [1, 3]])
    groups = make_groups(
        topology, num_stages=0, hierarchical=True, timeout_seconds=30, with_exempt=False
    )
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=groups.state)
    members, made = dist.get_process_group_ranks(groups.state), count() - 1
    groups.destroy()
    return made, value.item() == sum(members), members


def test_parts_of_a_run_have_groups_of_their_own() -> None:
    found = run_ranks(parts_share, 4)
    assert [members for _, _, members in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(right and made == 4 for made, right, _ in found)


# ---- groups that end after an error --------------------------------------------------------------


class Ending:
    """A group on `backend` that ends once all of `others` have begun to end, or raises."""

    def __init__(self, backend: str, *others: Ending, error: str = "") -> None:
        self.backend, self.others, self.error = backend, others, error
        self.begun = threading.Event()

    def abort(self) -> None:
        self.begun.set()
        if self.error:
            raise RuntimeError(self.error)
        assert all(other.begun.wait(10) for other in self.others)


def test_groups_end_together_and_in_no_place_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        topology.log, "warning", lambda text, *args, **_: logged.append(text % args)
    )
    monkeypatch.setattr(topology, "_existing", list)
    monkeypatch.setattr(topology, "_ABORT_SECONDS", 0.5)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    last, gloo = Ending("nccl"), Ending("gloo")
    first, failing = Ending("nccl", last), Ending("nccl", error="no such communicator")
    late = Ending("nccl", Ending("nccl"))
    groups: Any = [first, failing, gloo, last, late]
    start = time.monotonic()
    assert abort_groups(groups) == [gloo]
    assert time.monotonic() - start < 5
    assert last.begun.is_set() and late.begun.is_set() and not gloo.begun.is_set()
    assert sorted(text[:18] for text in logged) == ["1 process groups h", "a process group co"]
    late.others[0].begun.set()


def hosts(rank: int) -> tuple[bool, bool, list[int], list[Any]]:
    own = host_group() is dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "backend_of", lambda *_: "")  # as of NCCL
        made = host_group()
        is_kept, ranks = made is host_group() is not dist.group.WORLD, values_of_group(rank, made)
        dist.destroy_process_group(made)
        patch.setattr(topology, "_hostless", [])
        patch.setattr(dist, "new_group", no_interface)
        return own, is_kept, ranks, [host_group(), host_group()]


def no_interface(**options: Any) -> None:
    raise RuntimeError("no network interface")


def test_memory_of_hosts_has_one_group_or_none() -> None:
    assert run_ranks(hosts, 2) == [(True, True, [0, 1], [None, None])] * 2
