"""The sums of lifetimes against a simulation that allocates and frees one buffer after another."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from lightning_topt.costs.segments import blocks_reduced_last, locate
from lightning_topt.costs.sizes import (
    gradient_bytes,
    padded_bytes,
    parameter_bytes,
    shard_bytes,
    shard_share,
)
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import (
    Amount,
    Block,
    Op,
    Parameter,
    Segment,
    TensorEdge,
    TensorSpec,
)
from lightning_topt.optim.pieces import Share, assign_pieces
from lightning_topt.techniques.plan_costs import Explanation, PlanCosts, explain
from tests.costs.graphs import cluster_of, graph_of, profile_of, random_graph
from tests.techniques.plan_memory import plan_memory

BATCH = 3


class Memory:
    def __init__(self):
        self.live, self.peak = Counter(), 0.0

    def alloc(self, name, size):
        self.live[name] += size
        self.peak = max(self.peak, sum(self.live.values()))

    def free(self, *names):
        for name in names:
            del self.live[name]

    def spike(self, size):
        self.alloc("spike", size)
        self.free("spike")


def held(segment, recompute):
    return (segment.output_bytes if recompute else segment.kept_bytes).at(BATCH)


def backward_spike(segment, recompute):
    own = segment.kept_bytes.at(BATCH) + segment.backward_peak_bytes.at(BATCH)
    return (
        max(own, segment.output_bytes.at(BATCH) + segment.forward_peak_bytes.at(BATCH))
        if recompute
        else own
    )


def simulate_replicated(graph, profile, configs, world_size, rank, views):
    memory, spans = Memory(), locate(graph).of_parameter
    level_1 = [p for p in graph.parameters if configs[p.block].storage.level == 1]
    trained = [p for p in level_1 if p.trainable]
    # an update's work: the elements, and of a matrix the products of one side with the other
    sides = [sorted((p.shape[0], p.numel // p.shape[0])) for p in trained]
    works = [
        float(p.numel + (0 if len(p.shape) < 2 else long * short**2))
        for p, (short, long) in zip(trained, sides, strict=True)
    ]
    shares = [Share(i, 1, works[i], splittable=False) for i, p in enumerate(trained)]
    owners = {
        trained[piece.index].name: piece.owner
        for piece in assign_pieces(shares, world_size=world_size)
    }
    memory.alloc("buffers", graph.buffer_bytes + graph.input_bytes.at(BATCH))
    for p in graph.parameters:
        memory.alloc("parameters", parameter_bytes(p))
        memory.alloc("buckets", gradient_bytes(p))
        if profile.elementwise and p in level_1:
            memory.alloc("state", profile.state_bytes(p.name) / world_size)
        elif owners.get(p.name, rank) == rank:
            memory.alloc("state", profile.state_bytes(p.name))
    everything = sum(gradient_bytes(p) for p in graph.parameters)
    if views:
        memory.spike(everything)  # DDP makes new buckets while gradients still hold the old
    else:
        memory.alloc("gradients", everything)  # of the step before, until zero_grad
    for k, segment in enumerate(graph.timeline):
        memory.spike(segment.forward_peak_bytes.at(BATCH))
        memory.alloc(("kept", k), held(segment, configs[segment.block].recompute))
    if not views:
        memory.free("gradients")
    for k, segment in reversed([*enumerate(graph.timeline)]):
        memory.free(("kept", k))
        memory.alloc("backward", backward_spike(segment, configs[segment.block].recompute))
        for p in graph.parameters:
            first, last = spans[p.name]
            # views: copied into a bucket one by one, and freed
            if last == k and (first != k or not views):
                memory.alloc(("gradient", p.name), gradient_bytes(p))
        parts = [
            gradient_bytes(p)
            for p in graph.parameters
            if spans[p.name][0] == k and (views or spans[p.name][1] != k)
        ]
        memory.spike(max(parts, default=0))
        for p in graph.parameters:
            if spans[p.name][0] == k != spans[p.name][1] and views:
                memory.free(("gradient", p.name))
        memory.free("backward")
    memory.spike(max((u.temporary_bytes for u in profile.updates.values()), default=0))
    memory.spike(sum(map(parameter_bytes, trained)))  # small ones travel through buffers
    return memory.peak


class Fsdp:
    """One step of FSDP2 as its source reads: gathers, prefetches, reductions, by buffer."""

    def __init__(self, graph, profile, configs, world_size, backend):
        self.graph, self.profile, self.size, self.memory = graph, profile, world_size, Memory()
        self.levels = {name: config.storage.level for name, config in configs.items()}
        self.recompute = {name: config.recompute for name, config in configs.items()}
        self.spans, self.backend = locate(graph).of_parameter, backend
        self.part = {p: 0.5 if p.name in graph.narrow_parameters else 1 for p in graph.parameters}
        self.order = list(
            dict.fromkeys(s.block for s in graph.timeline if s.block and self.gathered(s.block))
        )
        self.last_flat = self.reducing = None

    def is_sharded(self, p):
        """Level 2 keeps frozen parameters whole."""
        return p.trainable or self.levels[p.block] == 3

    def gathered(self, block):
        return [p for p in self.graph.block_parameters(block) if self.is_sharded(p)]

    def flat(self, block):
        return sum(self.part[p] * padded_bytes(p, self.size) for p in self.gathered(block))

    def flat_gradients(self, block):
        trainable = [p for p in self.graph.block_parameters(block) if p.trainable]
        return sum(padded_bytes(p, self.size) for p in trainable)

    def whole(self, block):
        return sum(self.part[p] * parameter_bytes(p) for p in self.gathered(block))

    def gather_forward(self, block):
        self.memory.alloc(("flat", block), self.flat(block))
        self.memory.alloc(("whole", block), self.whole(block))
        if self.last_flat is not None:
            # a local variable of `wait_for_unshard` holds it until here
            self.memory.free(("flat", self.last_flat))
        self.last_flat = block

    def prefetch(self, block):
        if self.levels[block] == 3 and ("flat", block) not in self.memory.live:
            self.memory.alloc(("flat", block), self.flat(block))

    def pre_backward(self, block):
        if self.levels[block] == 3:
            self.prefetch(block)
            self.memory.alloc(("whole", block), self.whole(block))
            self.memory.free(("flat", block))
        index = self.order.index(block)
        if index:
            self.prefetch(self.order[index - 1])

    def reduce(self, block):
        trainable = [p for p in self.graph.block_parameters(block) if p.trainable]
        narrow = [p for p in trainable if self.part[p] < 1]
        for p in sorted(narrow, key=gradient_bytes):  # the largest at last
            self.memory.alloc(("float32", p.name), gradient_bytes(p))
            self.memory.free(("gradient", p.name))
        self.memory.free(("whole", block))
        if self.reducing is not None:
            self.memory.free(("reducing", self.reducing))
            self.reducing = None
        flat = self.flat_gradients(block)
        self.memory.alloc(("reducing", block), flat)
        self.reducing = block
        self.memory.free(*((kind, p.name) for p in trainable for kind in ("gradient", "float32")))
        self.memory.alloc("gradient shards", sum(shard_bytes(p, self.size) for p in trainable))
        self.memory.spike(flat if self.backend == "gloo" else 0)

    def run(self):
        memory, graph = self.memory, self.graph
        memory.alloc("buffers", graph.buffer_bytes + graph.input_bytes.at(BATCH))
        for p in graph.parameters:
            state = self.profile.state_bytes(p.name) * shard_share(p, self.size)
            own = shard_bytes(p, self.size) if self.is_sharded(p) else parameter_bytes(p)
            memory.alloc("shards", own + state)
            memory.alloc("old gradients", shard_bytes(p, self.size) if p.trainable else 0)
        self.gather_forward("")
        for k, segment in enumerate(graph.timeline):
            if segment.block in self.order:
                self.gather_forward(segment.block)
            memory.spike(segment.forward_peak_bytes.at(BATCH))
            memory.alloc(("kept", k), held(segment, self.recompute[segment.block]))
            if segment.block in self.order and self.levels[segment.block] == 3:
                memory.free(("whole", segment.block))
        memory.free(("flat", self.last_flat), "old gradients")
        if self.order:
            self.prefetch(self.order[-1])
        for k, segment in reversed([*enumerate(graph.timeline)]):
            self.backward(k, segment)
        self.reduce("")
        memory.free(("reducing", ""))
        shares = {p.name: shard_share(p, self.size) for p in graph.parameters}
        memory.spike(
            max((u.temporary_bytes * shares[n] for n, u in self.profile.updates.items()), default=0)
        )
        return memory.peak

    def backward(self, k, segment):
        if segment.block in self.order:
            self.pre_backward(segment.block)
        self.memory.free(("kept", k))
        second = 0
        for p in self.graph.parameters:
            first, last = self.spans[p.name]
            size = self.part[p] * gradient_bytes(p)
            if last == k:
                self.memory.alloc(("gradient", p.name), size)
            second += size if first == k < last else 0
        self.memory.spike(backward_spike(segment, self.recompute[segment.block]) + second)
        if segment.block in self.order:
            self.reduce(segment.block)


def costs_of(graph, profile, world_size, backend="nccl", views=False):
    common = graph, cluster_of(world_size, backend=backend), profile, data_mesh(world_size), BATCH
    return PlanCosts(TrainingStep(*common, gradient_views=views))


def random_plan(graph, profile, levels, world_size, rng):
    costs = costs_of(graph, profile, world_size)
    legal = {
        b.name: [c for c in costs.configs(b) if c.storage.level in levels] for b in graph.blocks
    }
    return {name: rng.choice(configs) for name, configs in legal.items()}


def explained(graph, profile, configs, world_size, backend="nccl", views=False) -> Explanation:
    costs = costs_of(graph, profile, world_size, backend, views)
    result = explain(costs, configs)
    assert plan_memory(costs, configs).max() == pytest.approx(result.peak_bytes)
    return result


@pytest.mark.parametrize("seed", range(50))
def test_replicated_peak_is_that_of_a_simulated_step(seed):
    rng = random.Random(seed)
    graph, world_size = random_graph(seed, num_blocks=rng.randint(1, 4)), rng.randint(1, 4)
    profile = profile_of(graph, elementwise=seed % 2 == 0)
    configs = random_plan(graph, profile, (0, 1), world_size, rng)
    for views in (False, True):
        peaks = [
            simulate_replicated(graph, profile, configs, world_size, rank, views)
            for rank in range(world_size)
        ]
        result = explained(graph, profile, configs, world_size, views=views)
        assert result.peak_bytes == pytest.approx(max(peaks), abs=1e-6), views


@pytest.mark.parametrize("seed", range(80))
def test_sharded_peak_is_that_of_a_simulated_step(seed):
    rng = random.Random(seed)
    graph, world_size = random_graph(seed, num_blocks=rng.randint(1, 4)), rng.randint(2, 4)
    backend, profile = rng.choice(["nccl", "gloo"]), profile_of(graph)
    configs = random_plan(graph, profile, (2, 3), world_size, rng)
    if seed % 2:  # some parameters are gathered in 16 bits
        narrow = frozenset(p.name for p in graph.parameters if rng.random() < 0.5)
        timelines = dict.fromkeys((2, 3), graph.timeline)
        vars(graph).update(narrow_parameters=narrow, gathered_timelines=timelines)
    simulated = Fsdp(graph, profile, configs, world_size, backend).run()
    result = explained(graph, profile, configs, world_size, backend)
    reserve = result.peak_parts.get("reserve", 0.0)
    assert (reserve > 0) == (backend == "gloo")
    assert result.peak_bytes - reserve == pytest.approx(simulated, abs=1e-6)


@pytest.mark.parametrize(
    ("backend", "ranks", "mib"), [("nccl", 2, 32), ("nccl", 32, 80), ("gloo", 2, 0)]
)
def test_updated_parameters_arrive_in_two_flat_buckets_on_nccl(backend, ranks, mib):
    parameters = (
        Parameter("a", (4 << 20,), "float32", "a"),
        Parameter("b", (16 << 20,), "float32", ""),
    )
    blocks = Block("", 0, False), Block("a", 0, True)
    known = graph_of("M", 1, (), (), parameters, blocks, (), 0, Amount())
    costs = costs_of(known, profile_of(known), ranks, backend)
    sent = sum(costs.temporaries(block.name, OpConfig.zero(1))[2] for block in blocks)
    assert sent == mib << 20


def test_a_block_whose_inputs_need_no_gradient_is_reduced_last():
    """An embedding of the batch: FSDP2 cannot see when its backward is over."""
    parameters = tuple(Parameter(f"{b}.w", (4, 4), "float32", b) for b in "ab")
    ops = tuple(Op(b, "Linear", b, b, (f"{b}.w",), (), (), (), Amount()) for b in "ab")
    timeline = tuple(Segment(b, Amount(), Amount(), Amount(), Amount()) for b in "ab")
    blocks = (Block("", 0, False), Block("a", 0, True), Block("b", 0, True))
    edges = (TensorEdge("a", "b", TensorSpec((2, 4), "float32")),)
    known = graph_of("M", 1, ops, edges, parameters, blocks, timeline, 0, Amount())
    assert blocks_reduced_last(known) == {"a"}
    configs = {"": OpConfig.zero(2), "a": OpConfig.zero(3), "b": OpConfig.zero(3)}
    late = explained(known, profile_of(known), configs, 2).phases
    early = explained(replace(known, edges=()), profile_of(known), configs, 2).phases
    # The whole parameter and gradient of a (64 bytes each) instead of its shard of the gradient.
    shards = 2 * (32 + 66) + 32
    assert late["reduce_last"] == shards + 64 + 64
    assert late["reduce_last"] > early["reduce_last"]
    integers = (TensorEdge("a", "b", TensorSpec((2, 4), "int64")),)
    assert blocks_reduced_last(replace(known, edges=integers)) == {"a", "b"}
