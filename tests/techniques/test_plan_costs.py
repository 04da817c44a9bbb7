"""Seconds of plans against a simulated network; what is legal; configurations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_topt.costs.cluster import CollectiveCurve
from lightning_topt.costs.compute import kernel_key
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Amount
from lightning_topt.plan.plan_values import describe_config
from lightning_topt.techniques.plan_costs import PlanCosts, explain
from tests.costs.graphs import cluster_of, profile_of, random_graph

BATCH = 3


def arguments(graph, world_size, *, overlap=0.5, backend="nccl", **profile):
    return {
        "cluster": cluster_of(world_size, overlap=overlap, backend=backend),
        "optimizer": profile_of(graph, **profile),
        "mesh": data_mesh(world_size),
        "batch_size": BATCH,
    }


def costs_of(graph, **given):
    return PlanCosts(TrainingStep(graph, **given))


def explained(graph, configs, **given):
    return explain(costs_of(graph, **given), configs)


@pytest.mark.parametrize("seed", range(10))
def test_one_rank(seed):
    graph = random_graph(seed)
    costs = costs_of(graph, **arguments(graph, 1))
    legal = {block.name: costs.configs(block) for block in graph.blocks}
    assert {config.storage.level for configs in legal.values() for config in configs} == {0}
    chosen = {name: configs[-1] for name, configs in legal.items()}
    result = explain(costs, chosen)
    sizes = [4 * p.numel for p in graph.parameters if p.trainable]
    # into buckets and out of them
    assert result.seconds["reduce"] == pytest.approx(2 * 2 * sum(sizes) / 1e3)
    viewed = explained(graph, chosen, **arguments(graph, 1), gradient_views=True)
    assert viewed.seconds["reduce"] == pytest.approx(2 * sum(sizes) / 1e3)
    assert result.step_seconds - viewed.step_seconds == pytest.approx(2 * sum(sizes) / 1e3)


def simulate_step(costs, configs):
    """Computation in order; the network serves what is ready, first come, first served."""
    step, spans = costs.step, costs.step.segments.of_block
    added = {name: costs.block_seconds(name, config) for name, config in configs.items()}
    clock = sum(step.compute[name][0].sum() + sum(t.gather_foreground) for name, t in added.items())
    network = 0.0
    for k in reversed(range(step.segments.count)):
        clock += sum(times[1][k] for times in step.compute.values())
        ready = [t for name, t in added.items() if (spans[name][0] if name else 0) == k]
        clock += sum(t.recompute + t.reduce_foreground for t in ready)
        for t in ready:
            network = max(network, clock) + t.reduce_background
    return (
        max(clock, network)
        + sum(t.reduce_last + t.update + t.broadcast for t in added.values())
        + costs.plan_seconds(configs)
    )


@pytest.mark.parametrize("seed", range(40))
def test_exchanges_run_as_on_a_simulated_network(seed):
    rng = random.Random(seed)
    graph, ranks = random_graph(seed, num_blocks=rng.randint(1, 5)), rng.randint(2, 4)
    costs = costs_of(graph, **arguments(graph, ranks, overlap=rng.choice([0.0, 0.5, 1.0])))
    whole = {b.name: [c for c in costs.configs(b) if c.storage.level < 2] for b in graph.blocks}
    configs = {name: rng.choice(legal) for name, legal in whole.items()}
    assert costs.seconds(configs) == pytest.approx(simulate_step(costs, configs))


@pytest.mark.parametrize("seed", range(10))
def test_under_gloo_sharded_exchanges_block(seed):
    rng = random.Random(seed)
    graph = random_graph(seed)
    costs = costs_of(graph, **arguments(graph, 3, overlap=1.0, backend="gloo"))
    configs = {
        b.name: rng.choice([c for c in costs.configs(b) if c.storage.level >= 2])
        for b in graph.blocks
    }
    result = explain(costs, configs)
    assert result.step_seconds == pytest.approx(sum(result.seconds.values()))


def test_kernel_measurements_count():
    graph = random_graph(1)
    given = arguments(graph, 1)
    kernels = {kernel_key(k) for op in graph.ops for k in (*op.forward, *op.backward)}
    configs = {b.name: OpConfig.zero(0) for b in graph.blocks}
    calls = sum(k.count for op in graph.ops for k in op.forward)
    given["batch_size"] = graph.batch_size
    result = explained(graph, configs, kernel_seconds=dict.fromkeys(kernels, 7.0), **given)
    assert result.seconds["forward"] == pytest.approx(7.0 * calls)


def test_measured_collectives_count():
    graph = random_graph(1)
    given = arguments(graph, 2, overlap=0.0)
    curve = CollectiveCurve((1.0,), (1.0,))
    given["cluster"] = replace(given["cluster"], collectives={("all_reduce", 2, 1): curve})
    gradients = sum(4 * p.numel for p in graph.parameters if p.trainable)
    result = explained(graph, {b.name: OpConfig.zero(0) for b in graph.blocks}, **given)
    assert result.seconds["reduce"] == pytest.approx(gradients + 2 * 2 * gradients / 1e3)


def test_optimizers_limit_the_space():
    graph = random_graph(0)
    block = next(b for b in graph.blocks if b.recomputable)
    given, profile = arguments(graph, 4), profile_of(graph)
    whole = replace(profile, elementwise=False)
    coupled = replace(whole, by_parameter=False)

    def legal(optimizer=profile, mesh=given["mesh"], name=block):
        configs = costs_of(graph, **{**given, "optimizer": optimizer, "mesh": mesh}).configs(name)
        return [(describe_config(config, mesh), config.recompute) for config in configs]

    def both(*names):
        return [(n, False) for n in names] + [(f"{n} + recompute", True) for n in names]

    flat = "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"
    assert legal() == both(*flat)
    assert legal(mesh=hybrid_mesh(2, 2)) == both(*flat, "hybrid ZeRO-2", "hybrid ZeRO-3")
    assert legal(whole) == legal(whole, hybrid_mesh(2, 2)) == both("DDP", "ZeRO-1")
    assert legal(coupled) == legal(mesh=data_mesh(1)) == both("DDP")
    root = next(b for b in graph.blocks if not b.name)
    assert legal(name=root) == [(name, False) for name in flat[:3]]

    # frozen blocks have nothing that level 2 could shard
    parameters = tuple(replace(p, trainable=p.block != "b2") for p in graph.parameters)
    graph = replace(graph, parameters=parameters)
    (frozen,) = (b for b in graph.blocks if b.name == "b2")
    assert legal(name=frozen) == both("DDP", "ZeRO-1", "ZeRO-3")


@pytest.mark.parametrize("level", [0, 2])
def test_returned_memory_costs_its_page_faults(level):
    """What is allocated, an optimizer's temporaries, buffers of shards, by the device's price."""
    graph = random_graph(3)
    large = replace(graph.parameters[0], shape=(512, 256), trainable=True)  # 512 KiB
    allocated = Amount(1 << 17)
    ops = tuple(
        replace(op, forward=tuple(replace(k, allocated=allocated) for k in op.forward))
        for op in graph.ops
    )
    graph = replace(graph, ops=ops, parameters=(large, *graph.parameters[1:]))
    given = arguments(graph, 2, overlap=0.0, backend="gloo")
    device = replace(given["cluster"].device, page_fault_seconds_per_byte=1e-6)
    given["cluster"] = replace(given["cluster"], device=device)
    configs = {block.name: OpConfig.zero(level) for block in graph.blocks}
    activations = sum(k.count for op in ops for k in op.forward) * (1 << 17)
    # a gather's two; a reduction's two and the shard
    buffers = 0 if level == 0 else 4 * (1 << 19) + (1 << 18)
    kept, returned = (
        explained(graph, configs, returns_memory=returns, **given) for returns in (False, True)
    )
    temporaries = (1 << 19) if level == 0 else (1 << 18)
    extra = returned.step_seconds - kept.step_seconds
    assert extra == pytest.approx(1e-6 * (activations + buffers + temporaries), rel=1e-2)
