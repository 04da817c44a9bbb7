"""Every row against DTensor's propagation: it takes the row's inputs without a collective, and
leaves the row's outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Partial as DPartial
from torch.distributed.tensor.placement_types import Replicate as DReplicate
from torch.distributed.tensor.placement_types import Shard as DShard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topt.graph.op_config import Partial, Placement, Shard
from lightning_topt.techniques.technique import forget_meshes
from lightning_topt.techniques.tensor_parallel.op_rules.rules import Row, tensors_in
from tests.techniques.tensor_parallel.samples import SAMPLES
from tests.techniques.tensor_parallel.simulated import Sample, copies

RANKS = 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()
        forget_meshes()


def as_dtensor(placement: Placement) -> Any:
    return DShard(placement.dim) if isinstance(placement, Shard) else DReplicate()


def admits(sample: Sample, row: Row, mesh: DeviceMesh) -> str:
    """Why DTensor does not admit the row; empty where it does."""
    given: list[Any] = [
        distribute_tensor(tensor.detach(), mesh, [as_dtensor(placement)])
        for tensor, placement in zip(sample.tensors, row.inputs, strict=True)
    ]
    given = copies(sample, given)
    _clear_sharding_prop_cache()  # the mask of an embedding's rows is remembered with the rule
    run = sample.run
    if row.added is not None and sample.func is torch.addmm:
        run = partial(run, func=lambda _, x, weight: torch.mm(x, weight))
    if row.added is not None:
        given[row.added] = None
    try:
        with CommDebugMode() as calls, sdpa_kernel(SDPBackend.MATH):
            found = run(given)
    except Exception as error:
        return f"error: {type(error).__name__} {str(error)[:60]}"
    if calls.get_total_counts():
        return "moves"
    results = list(
        tensors_in(
            (given[0] if found is None else found,)
            if not isinstance(found, list | tuple)
            else found
        )
    )
    for index, result in enumerate(results):
        if not isinstance(result, DTensor):
            return "plain"
        (got,) = result.placements
        want = row.outputs[min(index, len(row.outputs) - 1)]
        same = isinstance(got, DPartial) if isinstance(want, Partial) else got == as_dtensor(want)
        if not same:
            return f"{got} for {want}"
    return ""


# Where DTensor of this release of torch has no such rule, by function.
WITHOUT_RULE = {
    "broadcast_tensors": "what is whole and grows is declared whole, though one rank's other "
    "tensors are slices",
    "matmul": "an operand whose batch dim of size 1 is broadcast is reshaped first, which gathers "
    "the other one",
    "scaled_dot_product_attention": "the causal mask that its decomposition makes is a plain "
    "tensor",
    "logsumexp": "with keepdim the result is declared split along the dim without it",
    "group_norm": "groups are always gathered",
    "instance_norm": "it is a batch norm of a reshaped tensor, whose channels are gathered",
    "batch_norm": "samples are gathered, in evaluation too",
    "cat": "an empty vector beside tensors makes it gather",
    "tril": "always gathered",
    "triu": "always gathered",
    "unfold": "no strategy",
    "__setitem__": "no strategy for a number",
    "pad": "no strategy for reflections",
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        "only tensors split along their width are known; results of all others are declared whole, "
        "groups fail",
    ),
}
NOT_ON_FAKE_TENSORS = {"_grouped_mm", "grouped_mm"}  # but in bfloat16


@pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:DTensor random operators")
def test_rows_are_those_of_dtensor(mesh: DeviceMesh) -> None:
    refused: dict[str, str] = {}
    admitted = 0
    for sample in SAMPLES:
        name = sample.func.__name__
        for _, row in sample.rows(RANKS) if name not in NOT_ON_FAKE_TENSORS else ():
            shards = [
                placement
                for placement in (*row.inputs, *row.outputs)
                if isinstance(placement, Shard)
            ]
            if any(shard.parts > 1 for shard in shards):
                continue  # DTensor has no such placement
            if name in ("layer_norm", "rms_norm") and row.inputs[0] == Shard(2):
                continue  # DTensor gathers features
            if reason := admits(sample, row, mesh):
                refused[name] = f"{sample} {row}: {reason}"
            admitted += not reason
    assert {name: text for name, text in refused.items() if name not in WITHOUT_RULE} == {}
    assert {name for name in WITHOUT_RULE if name not in refused} == set(), "DTensor has learnt it"
    assert admitted > 300
