"""Many plans at once against one at a time, and equal blocks against each by itself."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.training_step import CompiledCost, TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.compilation import CODE_BYTES, COMPILER_BYTES
from lightning_topt.techniques.plan_costs import PlanBatch, PlanCosts, explain
from tests.costs.graphs import cluster_of, profile_of, random_graph
from tests.techniques.plan_memory import plan_memory


def any_plans(seed, *, count, blocks, alike=False, **profile):
    """(costs, batch) of random plans of a random graph on a random mesh of four ranks."""
    rng, graph = random.Random(seed), random_graph(seed, num_blocks=blocks, alike=alike)
    mesh = rng.choice([data_mesh(4), hybrid_mesh(2, 2)])
    cluster = cluster_of(4, overlap=rng.choice([0.0, 0.5]), backend=rng.choice(["gloo", "nccl"]))
    compiled = {}  # of none, or of every second block
    if seed % 2:
        compiled = {b.name: CompiledCost(0.7, 0.9, -50.0, 1e-4) for b in graph.blocks[1::2]}
    optimizer = profile_of(graph, **profile)
    costs = PlanCosts(TrainingStep(graph, cluster, optimizer, mesh, 3, compiled=compiled))
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
        assert batch.peak_bytes[row] == pytest.approx(plan_memory(costs, configs).max(), rel=1e-12)
        compute = explain(costs, configs).compute_seconds
        assert batch.compute_seconds[row] == pytest.approx(compute, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_block_saves_its_share_and_keeps_its_bytes(seed):
    """By hand, on one rank: without exchanges seconds add up."""
    graph = random_graph(seed, num_blocks=3)
    block, cost = graph.blocks[1], CompiledCost(0.5, 0.75, 1e7, 1e-3)
    step = TrainingStep(
        graph, cluster_of(1), profile_of(graph), data_mesh(1), 3, compiled={block.name: cost}
    )
    costs, configs = PlanCosts(step), dict[str, OpConfig]()
    for each in graph.blocks:
        configs[each.name] = costs.configs(each)[0]
    forward, backward = step.compute[block.name].sum(axis=1)
    for recompute in {False, block.recomputable}:
        eager = configs | {block.name: replace(configs[block.name], recompute=recompute)}
        compiled = eager | {block.name: replace(eager[block.name], compile=True)}
        assert compiled[block.name] in costs.configs(block)
        saved = 0.5 * forward * (1 + recompute) + 0.25 * backward - 1e-3
        assert costs.seconds(eager) - costs.seconds(compiled) == pytest.approx(saved, rel=1e-9)
        assert explain(costs, eager).compute_seconds - explain(
            costs, compiled
        ).compute_seconds == pytest.approx(saved, rel=1e-9)
        more = plan_memory(costs, compiled).max() - plan_memory(costs, eager).max()
        # above all else that there is; the compiler is there, too
        assert more == pytest.approx(1e7 + COMPILER_BYTES + CODE_BYTES, rel=0.01)


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
        np.testing.assert_allclose(
            plan_memory(costs, configs), plan_memory(alone, configs), rtol=1e-12
        )
        assert costs.seconds(configs) == pytest.approx(alone.seconds(configs), rel=1e-12)
