"""The twin of torch's CUDA allocator: its rules, against a slow one, and what plans count of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_topt.costs.reserved_memory import CachingAllocator
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.plan_costs import PlanBatch, PlanCosts, explain
from tests.costs.graphs import cluster_of, profile_of, random_graph
from tests.techniques.plan_memory import plan_memory

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 700, 40 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB + 5, 50 * MIB)


def test_streams_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB


def test_at_a_limit_free_segments_go_back_first() -> None:
    allocator = CachingAllocator(at_limit=True)
    allocator.free(allocator.allocate(60 * MIB))
    part = allocator.allocate(50 * MIB)  # of the free segment, which stays
    assert allocator.reserved == 60 * MIB
    allocator.free(allocator.allocate(80 * MIB))
    allocator.allocate(90 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (150 * MIB, 150 * MIB)
    allocator.free(part)
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 190 * MIB


class SlowAllocator:
    """Segments as lists of [size, owner], searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int | None]]]] = []

    def allocate(self, size: int, owner: int) -> None:
        wanted = -(-size // 512) * 512
        small = wanted <= MIB
        found: list[tuple[int, int, int]] = []
        for number, (is_small, pieces) in enumerate(self.segments):
            if is_small == small:
                found += [
                    (piece[0], number, place)
                    for place, piece in enumerate(pieces)
                    if piece[1] is None and piece[0] >= wanted
                ]
        if not found:
            whole = 2 * MIB if small else 20 * MIB if wanted < 10 * MIB else 0
            whole = whole or -(-wanted // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            found = [(whole, len(self.segments) - 1, 0)]
        room, number, place = min(found)
        pieces = self.segments[number][1]
        left = room - wanted
        if left >= 512 if small else left > MIB:
            pieces[place : place + 1] = [[wanted, owner], [left, None]]
        else:
            pieces[place][1] = owner

    def free(self, owner: int) -> None:
        for _, pieces in self.segments:
            for piece in pieces:
                if piece[1] == owner:
                    piece[1] = None
            place = 0
            while place + 1 < len(pieces):
                if pieces[place][1] is None and pieces[place + 1][1] is None:
                    pieces[place : place + 2] = [[pieces[place][0] + pieces[place + 1][0], None]]
                else:
                    place += 1

    @property
    def sizes(self) -> tuple[int, int]:
        every = [piece for _, pieces in self.segments for piece in pieces]
        return sum(p[0] for p in every if p[1] is not None), sum(p[0] for p in every)


@pytest.mark.parametrize("seed", range(5))
def test_random_tensors_as_with_a_slow_allocator(seed: int) -> None:
    rng, fast, slow = random.Random(seed), CachingAllocator(), SlowAllocator()
    alive = {}
    for number in range(300):
        if alive and rng.random() < 0.45:
            owner = rng.choice([*alive])
            fast.free(alive.pop(owner))
            slow.free(owner)
        else:
            size = max(1, round(rng.choice(SIZES) * rng.uniform(0.7, 1.3)))
            alive[number] = fast.allocate(size)
            slow.allocate(size, number)
        assert (fast.allocated, fast.reserved) == slow.sizes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_tensors_as_on_a_device() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    rng, twin = random.Random(0), CachingAllocator()
    alive = {}
    # what others of this process left free is not known here
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(300):
            if alive and rng.random() < 0.45:
                block, tensor = alive.pop(rng.choice([*alive]))
                twin.free(block)
                del tensor
            else:
                size = max(1, round(rng.choice(SIZES) * rng.uniform(0.7, 1.3)))
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                alive[number] = twin.allocate(size), tensor
            assert torch.cuda.memory_allocated() - before[0] == twin.allocated
            assert torch.cuda.memory_reserved() - before[1] == twin.reserved


# ---- what plans count


def costs_of(seed: int, *, caching: bool) -> PlanCosts:
    graph, cluster = random_graph(seed), cluster_of(4)
    cluster = replace(cluster, device=replace(cluster.device, caching_allocator=caching))
    return PlanCosts(TrainingStep(graph, cluster, profile_of(graph), data_mesh(4), 3))


@pytest.mark.parametrize("seed", range(4))
def test_plans_count_what_is_reserved_beside_tensors(seed: int) -> None:
    plain, caching = (costs_of(seed, caching=each) for each in (False, True))
    legal = {block.name: caching.configs(block) for block in caching.step.graph.blocks}
    rng = random.Random(seed)
    rows = np.array([[rng.randrange(len(each)) for each in legal.values()] for _ in range(6)])
    batch = PlanBatch(caching, legal, rows)
    for row, peak in enumerate(batch.peak_bytes):
        configs = batch.configs_of(row)
        found = explain(caching, configs)
        named: list[OpConfig] = [config for name, config in configs.items() if name]
        unused = max(map(caching.fragmentation, named))
        more = sum(
            found.peak_parts[kind]
            for kind in ("fragmentation", "cuBLAS workspace", "communicators")
        )
        assert found.peak_parts["fragmentation"] == unused > 0
        assert peak == pytest.approx(found.peak_bytes)
        assert found.peak_bytes - more == pytest.approx(float(plan_memory(plain, configs).max()))
        assert "fragmentation" not in explain(plain, configs).peak_parts
