"""Compressed exchanges: bytes and seconds against sums, a simulated network, a real exchange."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import BF16, Dense, GradientMethod, TopK
from lightning_topt.communication.exchange_method import exempt_names
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import SparseMessage
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import (
    ExchangeModel,
    exempt_parameters,
    legal_exchanges,
    make_exchange_model,
)
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Amount, Block, Op, OpGraph, Parameter, Segment
from lightning_topt.techniques.plan_costs import PlanCosts, explain
from tests.costs.graphs import graph_of, profile_of
from tests.launch import run_ranks
from tests.models import GPT, batch_for

INTRA, INTER = Link(1e-4, 1e6), Link(3e-3, 2e4)
DEVICE = Device("toy", 10**6, {"float32": 1e7}, 1e6, 1e-5)
CLUSTER = Cluster("toy", DEVICE, 2, 3, INTRA, INTER, overlap=0.5, backend="gloo")
WEIGHT, BIAS = 40 * 30, 30
BASE = TopK(density=0.1)
OPTIONS = [
    replace(BASE, hierarchical=False),
    replace(BASE, hierarchical=True, bits=8),
    replace(BASE, hierarchical=True, density=0.9),
    replace(BASE, hierarchical=False, error_feedback=False, exempt=()),
    Dense(hierarchical=True),
    BF16(),
    replace(BASE, hierarchical=False, density=None, bits=2),
    replace(BASE, hierarchical=True, density=None, bits=4),
]


def names(options: GradientMethod) -> str:
    return options.words


def one_block() -> OpGraph:
    """A matrix of 40 x 30 and a bias of 30, float32."""
    parameters = (Parameter("w", (40, 30), "float32", ""), Parameter("bias", (30,), "float32", ""))
    op = Op("o", "Linear", "", "", ("w", "bias"), (), (), (), Amount())
    segment = Segment("", Amount(), Amount(), Amount(), Amount())
    return graph_of("M", 1, (op,), (), parameters, (Block("", 0, False),), (segment,), 0, Amount())


def model_of(options: GradientMethod, *, world_size: int = 6) -> ExchangeModel:
    return make_exchange_model(options, graph=one_block(), cluster=CLUSTER, world_size=world_size)


# ---- seconds
# --------------------------------------------------------------------------------------------------


def ring_pass(sizes: list[float], links: list[Link]) -> float:
    """Every rank sends on what it has, until all rows (bytes) are everywhere; a clock each."""
    ranks, clocks = len(sizes), [0.0] * len(sizes)
    rows = list(range(ranks))
    for _ in range(ranks - 1):
        arrivals = [
            clocks[r] + links[r].latency_seconds + sizes[rows[r]] / links[r].bandwidth
            for r in range(ranks)
        ]
        clocks = [max(clocks[r], arrivals[r - 1]) for r in range(ranks)]
        rows = [rows[r - 1] for r in range(ranks)]
    return max(clocks)


# one ring has the node's whole network; every second hop is between nodes
WORLD = [
    Link(link.latency_seconds, min(INTRA.bandwidth, 2 * INTER.bandwidth))
    for link in (INTRA, INTER) * 3
]


def world_ring(size: float, *, passes: int = 1) -> float:
    return passes * ring_pass([size] * 6, WORLD)


def message_of(options: TopK, numel: int, k: int) -> SparseMessage:
    return SparseMessage(numel, k, options.bits)


def seconds_by_hand(options: GradientMethod) -> float:
    """Network seconds of `one_block` on 3 nodes x 2 ranks."""
    exempt = 4 * BIAS if options.exempt_rules else 0
    small = world_ring(exempt / 6, passes=2) if exempt else 0.0
    if options.name == "bf16":
        return world_ring(2 * (WEIGHT + BIAS) / 6, passes=2)
    total = 4 * (WEIGHT + BIAS)
    in_node = ring_pass([total / 2] * 2, [INTRA] * 2)
    if options.name == "dense":
        return in_node + 2 * ring_pass([total / 2 / 3] * 3, [INTER] * 3) + in_node
    entries = WEIGHT + BIAS - exempt // 4
    assert isinstance(options, TopK)
    density = options.density or 0.16 / (3 if options.hierarchical else 6)
    if not options.hierarchical:
        form = message_of(options, WEIGHT + BIAS, round(density * entries))
        return world_ring(form.nbytes) + small - (world_ring(0) if exempt else 0)
    form = message_of(options, (WEIGHT + BIAS) // 2, round(density * entries / 2))
    back = total if 6 * form.nbytes > total else 6 * form.nbytes
    across = ring_pass([form.nbytes] * 3, [INTER] * 3)
    return max(in_node, small) + across + ring_pass([back / 2] * 2, [INTRA] * 2)


@pytest.mark.parametrize("options", OPTIONS, ids=names)
def test_network_seconds_are_those_of_messages_passed_on_hop_by_hop(
    options: GradientMethod,
) -> None:
    model = model_of(options)
    launches = model.work[""].calls * DEVICE.op_overhead_seconds
    # The latencies of exempt gradients are told apart by sending one byte.
    assert model.worker_seconds("") - launches == pytest.approx(seconds_by_hand(options), rel=1e-3)


def test_device_seconds_by_hand() -> None:
    n, s, w = WEIGHT + BIAS, 4 * (WEIGHT + BIAS), WEIGHT
    k = round(0.1 * w)
    expected = {
        # gradient read, residual read and written; 50 bytes an entry to pack; zeros; 6 messages at
        # 100; exempt 10 passes
        OPTIONS[0]: s + 8 * n + 50 * k + s + 6 * 100 * k + 10 * 4 * BIAS,
        OPTIONS[1]: (4 + 8) * n / 2 + 50 * k / 2 + s + 6 * 100 * k / 2 + 10 * 4 * BIAS,
        # 6 messages are larger than the gradient: 3 are decoded
        OPTIONS[2]: (4 + 8) * n / 2 + 50 * 540 + 2 * s + 3 * 100 * 540 + 10 * 4 * BIAS,
        OPTIONS[3]: s + 50 * 123 + s + 6 * 100 * 123,
        OPTIONS[4]: 2 * s + 36 * n / 2,
        # divided in place, cast, looked through twice, copied back
        OPTIONS[5]: (4 + 4) * n + (4 + 2) * n + 2 * n + 2 * n + (2 + 4) * n,
    }
    for options, moved in expected.items():
        assert model_of(options).device_seconds("") == pytest.approx(
            moved / DEVICE.memory_bandwidth
        ), names(options)


# ---- bytes
# --------------------------------------------------------------------------------------------------


def test_memory_of_an_exchange() -> None:
    """Two blocks; the exchange of `b`, the last, is in flight first, until backward is over."""
    parameters = tuple(Parameter(f"{b}.w", (20, 20), "float32", b) for b in "ab")
    ops = tuple(Op(b, "Linear", b, b, (f"{b}.w",), (), (), (), Amount()) for b in "ab")
    timeline = tuple(Segment(b, Amount(), Amount(), Amount(), Amount()) for b in "ab")
    blocks = (Block("a", 0, True), Block("b", 0, True))
    graph = graph_of("M", 1, ops, (), parameters, blocks, timeline, 0, Amount())
    cluster, configs = (
        replace(CLUSTER, devices_per_node=4, num_nodes=1),
        {b: OpConfig.zero(0) for b in "ab"},
    )

    def phases(options: GradientMethod | None) -> dict[str, float]:
        step = PlanCosts(
            TrainingStep(graph, cluster, profile_of(graph), data_mesh(4), 1, exchange=options)
        )
        return dict(explain(step, configs).phases)

    whole = phases(None)
    form = SparseMessage(400, 40)
    held, buffers = 4 * 400 + 8 * 40, 5 * form.nbytes
    difference = {
        name: size - whole[name] for name, size in phases(replace(BASE, hierarchical=False)).items()
    }
    # before the second forward: the first step was dense
    assert difference.pop("rebuild_buckets") == 0
    assert {difference[name] for name in ("forward 0", "forward 1", "forward_over", "update")} == {
        2 * held
    }
    assert difference["backward 1"] == 2 * held + buffers
    assert difference["backward 0"] == 2 * held + 2 * buffers == max(difference.values())
    no_memory = {name: size - whole[name] for name, size in phases(BF16()).items()}
    assert no_memory["forward 0"] == 0 and no_memory["backward 0"] == 2 * 800


class Small(L.LightningModule):
    """One block and one bucket: two matrices, a scale and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(40, 16)),
            nn.Parameter(torch.randn(3, 40)),
        )
        self.scale, self.bias = nn.Parameter(torch.ones(40)), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.first) * self.scale, self.second, self.bias)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()


def really_sent(rank: int, options: GradientMethod) -> tuple[int, int]:
    """Bytes that one step sends from here, and bytes held back."""
    torch.manual_seed(0)
    module = Small()
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    exchange = CompressedExchange(ddp, options, topology=Topology(2, 1, rank))
    for step in range(3):
        if step == 2:
            exchange.statistics()
        ddp(torch.randn(4, 16)).square().mean().backward()
    states = exchange.state_dict()["ranks"]
    residual = states[0].get("residual", {}) if rank == 0 else {}
    sent = exchange.statistics().bytes_sent
    exchange.close()
    return sent, sum(tensor.nbytes for tensor in residual.values())


@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if not o.sums_in_nodes(Topology(2, 1, 0))], ids=names
)
def test_messages_are_as_large_as_in_a_real_exchange(options: GradientMethod) -> None:
    graph = capture(Small(), torch.zeros(4, 16))
    cluster = replace(CLUSTER, devices_per_node=1)
    (work,) = make_exchange_model(options, graph=graph, cluster=cluster, world_size=2).work.values()
    passes = {"all_reduce": 2, "all_gather": 1}
    expected = sum(passes[op] * size / 2 for _, op, size in work.collectives) + work.exempt_bytes
    (sent, held), _ = run_ranks(really_sent, 2, options)
    assert sent == pytest.approx(expected, abs=1)
    keeps = options.has_residual
    assert held == (4 * sum(p.numel() for p in Small().parameters()) if keeps else 0)
    assert work.kept_bytes >= held


# ---- what is exempt, what is legal
# ----------------------------------------------------------------------------------


class Norms(GPT):
    def __init__(self) -> None:
        super().__init__(tied=True)
        self.extra = nn.GroupNorm(2, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.extra(torch.zeros(1, 16)).sum()


@pytest.mark.parametrize("rules", [("norm", "bias"), ("embedding",), ("blocks.0.*", "head*")])
def test_the_same_parameters_are_exempt_as_in_the_module(rules: tuple[str, ...]) -> None:
    module = Norms() if "head*" not in rules else GPT()
    graph = capture(module, batch_for(module))
    assert exempt_parameters(graph, rules) == exempt_names(module, rules)


@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (1, BASE, []),
        (2, BASE, [False]),  # one node
        (3, BASE, [False]),  # nodes of 2 and 1
        (6, BASE, [False, True]),
        (6, replace(BASE, hierarchical=True), [True]),
        (2, replace(BASE, hierarchical=True), []),
        (6, Dense(), [True]),
        (6, BF16(), [None]),
    ],
)
def test_what_ranks_leave_open(
    world_size: int, options: GradientMethod, expected: list[bool | None]
) -> None:
    found = legal_exchanges(options, cluster=CLUSTER, world_size=world_size)
    assert [getattr(choice, "hierarchical", None) for choice in found] == expected
    assert all(
        {**choice.as_mapping(), "hierarchical": 0} == {**options.as_mapping(), "hierarchical": 0}
        for choice in found
    )
