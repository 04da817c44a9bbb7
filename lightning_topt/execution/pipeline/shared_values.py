"""Values of any kind from one rank of a group to the others: what is not a tensor is pickled,
tensors travel as they are.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Spec = tuple[torch.Size, torch.dtype, bool]  # the last: it lies on an accelerator


def share_value(value: Any, *, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """Return the `value` of rank `source` of `group`, on all of its ranks; tensors without a graph.
    A collective call.

    Raises whatever pickle raises for a value that it does not take.
    """
    is_source = dist.get_rank(group) == source
    tensors: list[Tensor] = []
    head: list[Any] = [None]
    if is_source:
        text = _without_tensors(value, tensors)
        head = [(text, [(t.shape, t.dtype, t.device.type != "cpu") for t in tensors])]
    dist.broadcast_object_list(head, group=group, group_src=source, device=device)
    text, specs = head[0]
    shared = [
        _shared(tensors[index] if is_source else None, spec, group, source, device)
        for index, spec in enumerate(specs)
    ]
    return value if is_source else _with_tensors(text, shared)


def _shared(
    tensor: Tensor | None, spec: Spec, group: dist.ProcessGroup, source: int, device: torch.device
) -> Tensor:
    shape, dtype, on_device = spec
    where = device if on_device or dist.get_backend(group) != "gloo" else torch.device("cpu")
    sent = (
        torch.empty(shape, dtype=dtype, device=where)
        if tensor is None
        else tensor.detach().to(where).contiguous()
    )
    dist.broadcast(sent, group=group, group_src=source)
    result: Tensor = sent if on_device else sent.cpu()
    return result


def _without_tensors(value: Any, tensors: list[Tensor]) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, Tensor):
                return None
            tensors.append(obj)
            return len(tensors) - 1

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _with_tensors(text: bytes, tensors: list[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Tensor:
            tensor: Tensor = tensors[pid]
            return tensor

    value: Any = Unpickler(io.BytesIO(text)).load()
    return value
