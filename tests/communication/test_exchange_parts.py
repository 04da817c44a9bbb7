"""Messages, the order of the worker, topologies, options, exemptions: without ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lightning_topt.communication import TopK, read_method
from lightning_topt.communication.bucket import is_finite
from lightning_topt.communication.collectives import HostCopy
from lightning_topt.communication.exchange_method import (
    exempt_names,
    gradient_methods,
    read_gradient_method,
)
from lightning_topt.communication.hook import ExchangeWorker, Streams, StreamWorker, _hook
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import BITMAP, INT32, SparseMessage
from tests.communication.exchange_ranks import FakeStreams


@pytest.mark.parametrize(
    ("numel", "k", "low_bits"),
    [
        (7, 1, BITMAP),
        (1000, 1000, BITMAP),
        (70_001, 21_000, BITMAP),
        (70_001, 7_001, 4),
        (70_001, 701, 8),
        (65_536, 1, INT32),
        (50_000_000, 3, INT32),
    ],
)
@pytest.mark.parametrize("bits", [None, 2, 8])
def test_message_round_trip(bits, numel, k, low_bits):
    form = SparseMessage(numel, k, bits)
    assert form.low_bits == low_bits
    generator = torch.Generator().manual_seed(k)
    indices = (
        torch.randint(numel, (4 * k,), generator=generator).unique()[:k]
        if k < numel
        else torch.arange(k)
    )
    indices[-1] = numel - 1
    indices, values = indices[:k].int(), torch.randn(k, generator=generator) * 1e5
    message = torch.full((form.nbytes + 4,), 255, dtype=torch.uint8)
    form.pack(values, indices, out=message)
    got_values, got_indices = form.unpack(message)
    assert not message[0] and torch.equal(got_indices, indices.long())
    assert torch.equal(got_values, values if bits is None else form.levels.round(values))
    assert message[form.nbytes :].tolist() == [255] * 4
    if form.low_bits != INT32:  # on other devices the same bytes, by other means
        again = message.clone()
        form._pack_indices(indices.long(), again)
        assert torch.equal(again, message)
        assert torch.equal(form._unpack_indices(message), indices.long())
    # what all ranks read of one that is not finite makes their sums so, and does no harm
    form.pack_nonfinite(out=message)
    got_values, got_indices = form.unpack(message)
    assert message[0] and got_values.isnan().all() and got_indices.tolist() == list(range(k))


def test_a_message_with_entries_missing_is_an_error():
    form = SparseMessage(70_001, 701)
    message = torch.zeros(form.nbytes, dtype=torch.uint8)
    form.pack(torch.randn(701), torch.arange(701, dtype=torch.int32), out=message)
    message[form.cuts[1] :] = 0
    with pytest.raises(ValueError, match="damaged"):
        form.unpack(message)


class Manual:
    """Something in flight that the test completes."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def is_completed(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.is_set()


def recorded(name: str, works: list[Manual], log: list[str]) -> Iterator[Any]:
    for stage, work in enumerate(works):
        log.append(f"{name}{stage}")
        yield work
    log.append(f"{name} done")
    return torch.tensor(0.0)


def test_worker_overlaps_and_keeps_the_order_of_stages():
    streams, log = Streams(torch.device("cpu")), []
    worker = ExchangeWorker(streams=streams, watch=None, timeout_seconds=20)
    first, second = [Manual(), Manual(), Manual()], [Manual(), Manual()]
    futures = [worker.submit(recorded("a", first, log)), worker.submit(recorded("b", second, log))]
    wait_for(log, ["a0", "b0"])  # b starts while a waits
    second[0].event.set()
    assert not threading.Event().wait(0.05)
    assert log == ["a0", "b0"]  # b may not overtake: its stage 1 would be issued before a's
    first[0].event.set()
    wait_for(log, ["a0", "b0", "a1", "b1"])
    second[1].event.set()
    first[1].event.set()
    wait_for(log, ["a0", "b0", "a1", "b1", "a2", "b done"])
    assert futures[1].wait() is not None and not futures[0].done()
    first[2].event.set()
    worker.drain()
    assert futures[0].done()
    worker.close()


def test_stages_in_the_order_of_a_stream() -> None:
    """Nobody asks whether works are done; the host waits for its copies, a bucket later."""
    log: list[str] = []

    class Works:
        def wait(self) -> None: ...

    class Late(HostCopy):
        looks = 0

        def is_completed(self) -> bool:
            self.looks += 1
            return self.looks > 2

    copies = [Late(torch.zeros(1)) for _ in range(3)]
    worker = StreamWorker(streams=FakeStreams(torch.device("cpu")), watch=None, timeout_seconds=9)
    futures = []
    for name, copy in zip("abc", copies, strict=True):
        futures.append(worker.submit(recorded(name, [copy, Works(), Works()], log)))  # type: ignore[list-item]
        assert not copy.looks
    assert log == ["a0", "b0", "a1", "c0", "b1", "a2"]
    worker.drain()
    assert log[6:] == ["a done", "b2", "c1", "b done", "c2", "c done"]
    assert all(future.done() for future in futures) and [each.looks for each in copies] == [3] * 3
    assert "gradient-exchange" not in {thread.name for thread in threading.enumerate()}
    # what does not come is an error, which ends it
    Late.is_completed = lambda self: False  # type: ignore[method-assign]
    worker.timeout_seconds = 0.01
    worker.submit(recorded("d", [Late(torch.zeros(1))], log))  # type: ignore[list-item]
    for call in (worker.drain, worker.drain, lambda: worker.submit(recorded("e", [], log))):
        with pytest.raises(TimeoutError, match="longer than"):
            call()


def wait_for(log: list[str], expected: list[str]) -> None:
    for _ in range(2000):
        if log == expected:
            return
        threading.Event().wait(0.005)
    raise AssertionError(log)


def test_topology():
    torchrun = {"LOCAL_WORLD_SIZE": "2"}
    assert Topology.from_environment(rank=3, world_size=4, environment=torchrun) == Topology(
        2, 2, 3
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}
    assert Topology.from_environment(rank=0, world_size=8, environment=slurm) == Topology(2, 4, 0)
    slurm["SLURM_NTASKS_PER_NODE"] = "2(x2)"
    assert Topology.from_environment(rank=0, world_size=6, environment=slurm) == Topology(2, 3, 0)
    assert Topology.from_environment(rank=1, world_size=3, environment={}) == Topology(1, 3, 1)
    assert (Topology(2, 3, 4).node, Topology(2, 3, 4).local_rank) == (1, 1)
    with pytest.raises(ValueError, match="5 is not nodes x 2 ranks per node"):
        Topology.from_environment(rank=0, world_size=5, environment=torchrun)
    with pytest.raises(ValueError, match=r"rank 4 is not in a topology of 2 nodes x 2"):
        Topology(2, 2, 4)


def test_density_of_all_together():
    """What each sends depends on how many do: ranks, or nodes that sum inside them."""
    method = TopK(density=None, bits=2)
    assert [method.on(Topology(nodes, 2, 0)).density for nodes in (1, 2, 4)] == pytest.approx(
        [0.08, 0.08, 0.04]
    )
    assert replace(method, hierarchical=False).on(Topology(2, 2, 0)).density == pytest.approx(0.04)
    assert TopK(density=0.5).on(Topology(2, 2, 0)) == TopK(density=0.5)
    assert read_method(method.as_mapping()) == method
    assert [TopK(density=d).steps_under_adam is not None for d in (None, 0.2, 0.01)] == [
        True,
        True,
        False,
    ]
    assert method.on(Topology(1, 2, 0)).density_at(0) == 1
    assert TopK(exempt=["bias"]).exempt == ("bias",)
    with pytest.raises(ValueError, match="depends on the number of ranks"):
        method.density_at(1)


def test_only_what_was_measured_is_said_to_hold_under_adam():
    """A method that says nothing of it does not."""
    held = {name: read_gradient_method(name).steps_under_adam for name in gradient_methods()}
    assert {name: steps for name, steps in held.items() if steps is not None} == {
        "dense": 0,
        "bf16": 0,
    }


def test_exempt_names():
    model = nn.Sequential(
        nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3), nn.GRU(3, 3)
    )
    assert exempt_names(model, ()) == frozenset()
    assert exempt_names(model, ("embedding",)) == {"0.weight"}
    assert exempt_names(model, ("bias",)) == {
        "1.bias",
        "2.bias",
        "3.bias",
        "4.bias_ih_l0",
        "4.bias_hh_l0",
    }
    assert exempt_names(model, ("norm",)) == {
        f"{layer}.{name}" for layer in (2, 3) for name in ("weight", "bias")
    }
    assert exempt_names(model, ("4.weight_?h*",)) == {"4.weight_ih_l0", "4.weight_hh_l0"}
    with pytest.raises(
        ValueError, match=r"exempt='head.*' matches no parameter; names look like 0.weight"
    ):
        exempt_names(model, ("head.*",))


# ---- what is finite, for every dtype of gradients; sums of finite values may not be


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [1, 1000])
def test_is_finite_says_what_torch_says(dtype: torch.dtype, value: float, size: int) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.full((size,), largest, dtype=dtype)  # whose sum is infinite
    tensor[size // 2] = value
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


def test_no_views_of_gradients_are_made_where_the_layout_is_known() -> None:
    _hook(Mock(), bucket := Mock())
    bucket.gradients.assert_not_called()
