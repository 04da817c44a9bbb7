"""Random operator graphs: a chain of blocks with segments of the root around them."""

from __future__ import annotations

import random

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import OptimizerProfile, ParameterUpdate
from lightning_topt.graph.op_graph import (
    Amount,
    Block,
    Kernel,
    ModuleCall,
    Op,
    OpGraph,
    Parameter,
    Segment,
    Step,
    StepTensor,
    TensorEdge,
    TensorSpec,
)


def graph_of(
    model: str,
    batch_size: int,
    ops: tuple[Op, ...],
    edges: tuple[TensorEdge, ...],
    parameters: tuple[Parameter, ...],
    blocks: tuple[Block, ...],
    timeline: tuple[Segment, ...],
    buffer_bytes: int,
    input_bytes: Amount,
) -> OpGraph:
    """A graph whose tensors have the memory of `timeline`; an operator runs in each segment."""
    step = step_of(timeline, batch_size, [op.name for op in ops])
    return OpGraph(
        model, batch_size, ops, edges, parameters, blocks, step, buffer_bytes, input_bytes
    )


def step_of(timeline: tuple[Segment, ...], batch_size: int, operators: list[str]) -> Step:
    """One kernel per segment and direction, with tensors that take what the segment says."""
    count, tensors, calls = len(timeline), [], []
    for k, segment in enumerate(timeline):
        back = 2 * count - 1 - k
        kept, output = segment.kept_bytes, segment.output_bytes
        temporary = segment.forward_peak_bytes + Amount(-kept.fixed, -kept.per_sample)
        lives = [
            (output, k, back + 1),
            (kept + Amount(-output.fixed, -output.per_sample), k, back + 1),
        ]
        lives += [(temporary, k, k + 1), (segment.backward_peak_bytes, back, back + 1)]
        if segment.block:
            calls.append(ModuleCall(segment.block, k, k + 1, (), (len(tensors),), True))
        tensors += [
            StepTensor(operators[k], TensorSpec((), "uint8"), size, first, end)
            for size, first, end in lives
        ]
    order = (*range(count), *reversed(range(count)))
    return Step((batch_size, 2 * batch_size), order, count, tuple(tensors), tuple(calls))


def random_graph(seed: int, *, num_blocks: int = 3, alike: bool = False) -> OpGraph:
    """With `alike` all named blocks cost the same."""
    rng = random.Random(seed)

    def drawn(block: str) -> random.Random:
        return random.Random(seed) if alike and block else rng

    names = [f"b{index}" for index in range(num_blocks)]
    order = [""] * rng.randint(0, 1) + names + [""] * rng.randint(0, 1)
    if rng.random() < 0.3:
        order.insert(rng.randint(0, len(order)), "")
    order = [name for index, name in enumerate(order) if index == 0 or name != order[index - 1]]
    parameters, uses = [], {index: [] for index in range(len(order))}
    for block in dict.fromkeys(order):
        own, draw = [index for index, name in enumerate(order) if name == block], drawn(block)
        for number in range(draw.randint(0 if block else 1, 3)):
            shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 2)))
            name = f"{block}.p{number}" if block else f"p{number}"
            parameters.append(Parameter(name, shape, "float32", block, draw.random() < 0.8))
            for index in draw.sample(own, draw.randint(1, min(2, len(own)))):
                uses[index].append(name)
    ops = []
    for i, block in enumerate(order):
        draw = drawn(block)
        kernels = (_kernel(draw),), (_kernel(draw), _kernel(draw))
        ops.append(Op(f"op{i}", "X", block, block, tuple(uses[i]), (), *kernels, _amount(draw)))
    timeline = [_segment(drawn(block), block) for block in order]
    blocks = [Block(name, 0, bool(name)) for name in {"": None, **dict.fromkeys(order)}]
    parameters.sort(key=lambda p: p.name)
    return graph_of(
        model="M",
        batch_size=2,
        ops=tuple(ops),
        edges=(),
        parameters=tuple(parameters),
        blocks=tuple(blocks),
        timeline=tuple(timeline),
        buffer_bytes=10,
        input_bytes=Amount(1, 2),
    )


def profile_of(graph: OpGraph, *, elementwise: bool = True, add: bool = False) -> OptimizerProfile:
    """Like Adam: two states per element, a step count, temporaries as large as the parameter."""
    updates = {
        p.name: ParameterUpdate(8 * p.numel + 4, 28.0 * p.numel, 10.0, 4.0 * p.numel, add)
        for p in graph.parameters
        if p.trainable
    }
    whole = {} if elementwise else dict.fromkeys(updates, 2)
    return OptimizerProfile("AdamLike", elementwise, True, updates, whole=whole)


def cluster_of(devices: int = 4, *, overlap: float = 0.5, backend: str = "nccl") -> Cluster:
    device = Device("toy", 1000, {"float32": 1e3}, 1e3, 1e-3)
    return Cluster("toy", device, devices, 1, Link(1e-3, 1e3), overlap=overlap, backend=backend)


def _amount(rng: random.Random) -> Amount:
    return Amount(rng.randint(0, 20), rng.randint(0, 20))


def _kernel(rng: random.Random) -> Kernel:
    return Kernel(
        "aten.mm.default", {"n": rng.randint(0, 99)}, _amount(rng), _amount(rng), rng.randint(1, 3)
    )


def _segment(rng: random.Random, block: str) -> Segment:
    output, kept, extra = _amount(rng), _amount(rng), _amount(rng)
    return Segment(block, kept + output, output, kept + output + extra, _amount(rng))
