"""The table against `explain`, paths against a simulated network, dropped columns against all of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.cluster import CollectiveCurve
from lightning_topt.costs.columns import needed_columns
from lightning_topt.costs.compute import kernel_key
from lightning_topt.costs.estimate import StepModel, estimate_costs, explain, legal_configs, legal_families
from lightning_topt.costs.owned import bound_owned_elements, busiest_load
from lightning_topt.costs.step_time import StepTime, estimate_block_time, path_seconds
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Amount
from tests.costs.graphs import cluster_of, profile_of, random_graph

BATCH = 3


def arguments(graph, world_size, *, overlap=0.5, backend="nccl", **profile):
    return {
        "cluster": cluster_of(world_size, overlap=overlap, backend=backend),
        "optimizer": profile_of(graph, **profile),
        "data_parallel_size": world_size,
        "batch_size": BATCH,
    }


def explained(graph, configs, **given):
    sharded = any(config.storage.level >= 2 for config in configs.values())
    return explain(StepModel(graph, family="sharded" if sharded else "replicated", **given), configs)


def plans(table, rng, count=30):
    everything = itertools.product(*(range(len(operator.configs)) for operator in table.operators))
    choices = list(itertools.islice(everything, 5000))
    return rng.sample(choices, min(count, len(choices)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", ["replicated", "sharded"])
def test_table_agrees_with_explain(seed, family):
    rng = random.Random(seed)
    graph, world_size = random_graph(seed), rng.randint(2, 4)
    given = arguments(graph, world_size, overlap=rng.choice([0.0, 0.6]), add=rng.random() < 0.5)
    table = estimate_costs(StepModel(graph, family=family, **given))
    assert [operator.name for operator in table.operators] == [block.name for block in graph.blocks]
    for choice in plans(table, rng):
        configs = {operator.name: operator.configs[i] for operator, i in zip(table.operators, choice, strict=True)}
        seconds, size = table.evaluate(choice)
        result = explained(graph, configs, **given)
        assert size >= result.peak_bytes - 1e-6
        largest = max(p.numel for p in graph.parameters)
        assert size <= result.peak_bytes + 9 * largest + 20 * len(graph.parameters)
        if not any(config.storage.level == 1 for config in configs.values()):
            rate = sum(28 * p.numel / 1e3 + 10e-3 for p in graph.parameters) / sum(p.numel for p in graph.parameters)
            assert result.step_seconds - 1e-9 <= seconds <= result.step_seconds + 3 * rate * largest
        if family == "sharded":
            assert (seconds, size) == (pytest.approx(result.step_seconds), pytest.approx(result.peak_bytes))


@pytest.mark.parametrize("seed", range(10))
def test_one_rank(seed):
    graph = random_graph(seed)
    given = arguments(graph, 1)
    table = estimate_costs(StepModel(graph, **given))
    for operator in table.operators:
        assert {config.storage.level for config in operator.configs} == {0}
    for choice in plans(table, random.Random(seed)):
        configs = {operator.name: operator.configs[i] for operator, i in zip(table.operators, choice, strict=True)}
        result = explained(graph, configs, **given)
        assert table.evaluate(choice) == (pytest.approx(result.step_seconds), pytest.approx(result.peak_bytes))
        assert result.seconds["reduce"] == pytest.approx(
            2 * sum(4 * p.numel for p in graph.parameters if p.trainable) / 1e3
        )


def simulate_step(step, times):
    """Computation in order; the network serves what is ready, first come, first served."""
    clock = sum(t.forward.sum() for t in times)
    network = 0.0
    for k in reversed(range(step.segments.count)):
        clock += sum(t.backward[k] for t in times)
        ready = [t for t in times if t.ready == k]
        clock += sum(t.reduce_foreground for t in ready)
        for t in ready:
            network = max(network, clock) + t.reduce_background
    return max(clock, network) + sum(t.update + t.broadcast for t in times)


@pytest.mark.parametrize("seed", range(40))
def test_paths_are_a_simulated_network(seed):
    rng = random.Random(seed)
    graph = random_graph(seed, num_blocks=rng.randint(1, 5))
    cluster = cluster_of(4, overlap=rng.choice([0.0, 0.5, 1.0]))
    step = StepTime(graph, cluster, profile_of(graph), "replicated", BATCH, rng.randint(2, 4))
    times = []
    for block in graph.blocks:
        config = rng.choice(legal_configs(block, family="replicated", optimizer=step.optimizer, data_parallel_size=2))
        times.append(estimate_block_time(step, block=block.name, config=config))
    expected = simulate_step(step, times)
    assert np.sum([path_seconds(step, t) for t in times], axis=0).max() == pytest.approx(expected)


def test_overlap_helps_and_never_beats_computation():
    graph = random_graph(3, num_blocks=5)
    configs = {block.name: OpConfig.zero(0) for block in graph.blocks}
    results = [explained(graph, configs, **arguments(graph, 4, overlap=e)) for e in (0.0, 0.5, 1.0)]
    seconds = [result.step_seconds for result in results]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] >= results[-1].compute_seconds
    for result in results:
        assert result.step_seconds == pytest.approx(result.compute_seconds + result.exposed_communication_seconds)
    blocking = explained(graph, configs, **arguments(graph, 4, overlap=0.0))
    exchanged = blocking.seconds["reduce"] + blocking.seconds["buffers"]
    assert blocking.exposed_communication_seconds == pytest.approx(exchanged)


def test_what_configurations_change():
    graph = random_graph(3)
    given = arguments(graph, 2)
    results = {
        (stage, again): explained(
            graph,
            {b.name: OpConfig.zero(stage, recompute=again and b.recomputable) for b in graph.blocks},
            **given,
        )
        for stage in range(4)
        for again in (False, True)
    }
    assert results[0, True].seconds["recompute"] > 0 == results[0, False].seconds["recompute"]
    assert results[0, True].seconds["backward"] == pytest.approx(results[0, False].seconds["backward"])
    assert results[1, False].seconds["update"] < results[0, False].seconds["update"]
    assert results[1, False].seconds["broadcast"] > 0 == results[0, False].seconds["broadcast"]
    assert (
        results[3, False].seconds["gather"]
        > results[2, False].seconds["gather"]
        > 0
        == results[0, False].seconds["gather"]
    )


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
    assert result.seconds["reduce"] == pytest.approx(gradients + 2 * gradients / 1e3)


def test_what_is_not_allowed():
    graph = random_graph(0)
    given = arguments(graph, 2)
    with pytest.raises(ValueError, match="family must be"):
        estimate_costs(StepModel(graph, family="both", **given))
    with pytest.raises(ValueError, match="batch_size"):
        estimate_costs(StepModel(graph, **{**given, "batch_size": 0}))
    with pytest.raises(ValueError, match="do not fit"):
        estimate_costs(StepModel(graph, **{**given, "data_parallel_size": 3}))
    with pytest.raises(ValueError, match="elementwise"):
        estimate_costs(StepModel(graph, family="sharded", **{**given, "data_parallel_size": 1}))
    with pytest.raises(ValueError, match="no configuration"):
        explained(graph, {"": OpConfig.zero(0)}, **given)
    mixed = {b.name: OpConfig.zero(i % 4) for i, b in enumerate(graph.blocks)}
    with pytest.raises(ValueError, match="mix"):
        explained(graph, mixed, **given)


def test_optimizers_limit_the_space():
    graph = random_graph(0)
    block = next(b for b in graph.blocks if b.recomputable)
    profile = profile_of(graph)
    whole = replace(profile, elementwise=False)
    coupled = replace(whole, by_parameter=False)

    def stages(optimizer, family, size=2):
        configs = legal_configs(block, family=family, optimizer=optimizer, data_parallel_size=size)
        return {(config.storage.level, config.recompute) for config in configs}

    both = {False, True}
    assert stages(profile, "replicated") == set(itertools.product([0, 1], both))
    assert stages(profile, "sharded") == set(itertools.product([2, 3], both))
    assert stages(coupled, "replicated") == stages(profile, "replicated", 1) == set(itertools.product([0], both))
    assert legal_families(profile, data_parallel_size=2) == ("replicated", "sharded")
    assert (
        legal_families(whole, data_parallel_size=2) == legal_families(profile, data_parallel_size=1) == ("replicated",)
    )
    with pytest.raises(ValueError, match="elementwise"):
        estimate_costs(StepModel(graph, family="sharded", **{**arguments(graph, 2), "optimizer": whole}))


@pytest.mark.parametrize("seed", range(50))
def test_dropping_columns_never_changes_a_maximum(seed):
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(1, 12))
    costs = [rng.integers(0, 4, (rng.integers(1, 4), columns)).astype(float) for _ in range(rng.integers(1, 4))]
    fixed = rng.integers(0, 4, columns).astype(float)
    kept = needed_columns(costs, fixed=fixed)
    assert len(kept) > 0 and sorted(kept) == list(kept)
    for choice in itertools.product(*(range(len(cost)) for cost in costs)):
        total = fixed + sum(cost[row] for cost, row in zip(costs, choice, strict=True))
        assert total[kept].max() == total.max()


def test_equal_columns_leave_one():
    assert len(needed_columns([np.ones((3, 7))], fixed=np.zeros(7))) == 1
    assert list(needed_columns([], fixed=np.array([1.0, 3.0, 2.0]))) == [1]


@pytest.mark.parametrize("seed", range(30))
def test_owned_elements_are_bounded_for_every_set_of_blocks(seed):
    rng = random.Random(seed)
    graph, world_size = random_graph(seed, num_blocks=4), rng.randint(2, 5)
    bound = bound_owned_elements(graph, world_size=world_size)
    loads = {p.name: float(p.numel) for p in graph.parameters}
    names = [b.name for b in graph.blocks]
    largest = max(p.numel for p in graph.parameters)
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            exact = busiest_load(graph, blocks=chosen, world_size=world_size, loads=loads)
            estimate = (bound.fixed + sum(bound.blocks[name] for name in chosen)).max()
            average = sum(p.numel for p in graph.parameters if p.trainable and p.block in chosen) / world_size
            assert exact - 1e-9 <= estimate <= average + largest + 1e-9


@pytest.mark.parametrize("family", ["replicated", "sharded"])
def test_returned_memory_costs_its_page_faults(family):
    """What is allocated, the optimizer's temporaries and the buffers of sharded plans, at the price of the device."""
    graph = random_graph(3)
    large = replace(graph.parameters[0], shape=(512, 256), trainable=True)  # 512 KiB
    allocated = Amount(1 << 17)
    ops = tuple(replace(op, forward=tuple(replace(k, allocated=allocated) for k in op.forward)) for op in graph.ops)
    graph = replace(graph, ops=ops, parameters=(large, *graph.parameters[1:]))
    given = arguments(graph, 2, overlap=0.0, backend="gloo")
    given["cluster"] = replace(
        given["cluster"], device=replace(given["cluster"].device, page_fault_seconds_per_byte=1e-6)
    )
    kept = StepModel(graph, family=family, **given)
    returned = replace(kept, returns_memory=True)
    table = estimate_costs(returned)
    names = [block.name for block in graph.blocks]
    configs = {n: OpConfig.zero(0 if family == "replicated" else 2) for n in names}
    activations = sum(k.count for op in ops for k in op.forward) * (1 << 17)
    buffers = 0 if family == "replicated" else 5 * (1 << 19) + (1 << 18) + (1 << 19)
    extra = explain(returned, configs).step_seconds - explain(kept, configs).step_seconds
    temporaries = (1 << 19) if family == "replicated" else (1 << 18)
    assert extra == pytest.approx(1e-6 * (activations + buffers + temporaries), rel=1e-2)
    first = [operator.configs.index(configs[operator.name]) for operator in table.operators]
    assert table.evaluate(first)[0] >= explain(returned, configs).step_seconds - 1e-9
