"""Many plans at once against one at a time, and equal blocks against each by itself."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.techniques.plan_costs import PlanBatch, PlanCosts, explain
from tests.costs.graphs import cluster_of, profile_of, random_graph


def any_plans(seed, *, count, blocks, alike=False, **profile):
    """(costs, batch) of random plans of a random graph on a random mesh of four ranks."""
    rng, graph = random.Random(seed), random_graph(seed, num_blocks=blocks, alike=alike)
    mesh = rng.choice([data_mesh(4), hybrid_mesh(2, 2)])
    cluster = cluster_of(4, overlap=rng.choice([0.0, 0.5]), backend=rng.choice(["gloo", "nccl"]))
    costs = PlanCosts(TrainingStep(graph, cluster, profile_of(graph, **profile), mesh, 3))
    configs = {block.name: costs.configs(block) for block in graph.blocks}
    rows = [[rng.randrange(len(legal)) for legal in configs.values()] for _ in range(count)]
    return costs, PlanBatch(costs, configs, np.array(rows, np.intp))


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_batch_costs_what_its_plans_do(seed, elementwise):
    costs, batch = any_plans(seed, count=9, blocks=1 + seed % 5, elementwise=elementwise)
    for row in range(9):
        configs = batch.configs_of(row)
        assert batch.seconds[row] == pytest.approx(costs.seconds(configs), rel=1e-12)
        assert batch.peak_bytes[row] == pytest.approx(costs.memory(configs).max(), rel=1e-12)
        compute = explain(costs, configs).compute_seconds
        assert batch.compute_seconds[row] == pytest.approx(compute, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_known_of_a_block_holds_for_blocks_alike(seed):
    costs, batch = any_plans(seed, count=6, blocks=5, alike=True)
    assert len(set(costs.step.alike.values())) < len(costs.step.graph.blocks)
    for row in range(6):
        configs = batch.configs_of(row)
        alone = PlanCosts(replace(costs.step))
        alone.step.__dict__["alike"] = {
            block.name: number for number, block in enumerate(costs.step.graph.blocks)
        }
        np.testing.assert_allclose(costs.memory(configs), alone.memory(configs), rtol=1e-12)
        assert costs.seconds(configs) == pytest.approx(alone.seconds(configs), rel=1e-12)
