"""Memory of batches is used again when nobody can see it any more, and not before."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data._utils import worker

from lightning_topt.data.cache.cached_batches import LEAST_BYTES, BatchMemory, _empty
from lightning_topt.data.coordinated.preparation import Worker

SHAPE = (4, LEAST_BYTES // 16)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_memory_of_a_batch_that_is_gone_is_used_again():
    memory = BatchMemory()
    first = memory.empty(SHAPE, torch.float32)
    assert first.shape == SHAPE and first.dtype == torch.float32 and first.is_contiguous()
    where = address(first)
    del first
    assert address(memory.empty(SHAPE, torch.int32)) == where  # and of another type
    assert address(memory.empty((4, LEAST_BYTES // 8), torch.float32)) != where


@pytest.mark.parametrize("kind", [worker.WorkerInfo, Worker])
def test_only_workers_that_send_it_take_shared_memory(kind, monkeypatch):
    info = kind(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(worker, "_worker_info", info)
    assert _empty(2, LEAST_BYTES).is_shared() == (kind is worker.WorkerInfo)


HOLDERS = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1, 5:],
    "an array": lambda tensor: tensor.numpy(),
    "a view of an array": lambda tensor: tensor.numpy()[1:],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a graph": lambda tensor: (torch.ones(SHAPE, requires_grad=True) * tensor).sum(),
    "an alias": lambda tensor: tensor.detach(),
    "a capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
}


@pytest.mark.parametrize("kind", list(HOLDERS))
def test_memory_that_anybody_holds_is_not(kind):
    memory = BatchMemory()
    tensor = memory.empty(SHAPE, torch.float32)
    where, held = address(tensor), HOLDERS[kind](tensor)
    del tensor
    for _ in range(3):
        other = memory.empty(SHAPE, torch.float32)
        assert address(other) != where
        del other
    del held
    found = [memory.empty(SHAPE, torch.float32) for _ in range(2)]
    assert where in map(address, found)
