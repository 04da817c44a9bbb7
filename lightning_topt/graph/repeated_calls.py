"""Leaves calls of equal modules out of a recording on fake tensors: see [Note: calls left out] in
`observed_calls`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_topt.graph.copied_calls import backward_of_copy, begin_copy, end_copy
from lightning_topt.graph.equal_modules import identity_of, state_of, surroundings_of
from lightning_topt.graph.fake import Like, empty_fake
from lightning_topt.graph.observed_calls import (
    CopiedCall,
    ObservedCall,
    Result,
    flatten,
    forward_facts,
    rebuild,
)
from lightning_topt.graph.op_config import LAYOUT
from lightning_topt.graph.record import Recorder
from lightning_topt.graph.recording import Recording, Storage

Key = tuple[Hashable, Hashable]  # of the module, of the call
SCALAR: Like = (), (), torch.float32, torch.device("cpu")
# shapes as they are recorded: for user code split tensors look whole
_LocalTensors = torch._C.DisableTorchFunction


class RepeatedCalls:
    """Watches the calls of modules in `root`, a fake copy; those of equal keys, by path in
    `modules`, may be alike.
    """

    def __init__(
        self, root: nn.Module, mode: FakeTensorMode, *, modules: Mapping[str, Hashable]
    ) -> None:
        self.modules = modules
        self._mode, self._root = mode, root
        self._models: dict[Key, ObservedCall] = {}  # run twice
        self._first: dict[Key, tuple[ObservedCall, Any]] = {}
        self._surroundings: dict[Key, Any] = {}

    def install(self, recorder: Recorder) -> None:
        """Let `recorder` leave calls out."""
        for path in self.modules:
            module = self._root.get_submodule(path)
            vars(module)["forward"] = self._wrapped(module, path, recorder)

    def _wrapped(self, module: nn.Module, path: str, recorder: Recorder) -> Callable[..., Any]:
        forward, identity = module.forward, identity_of(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if recorder.observed is not None or recorder.is_backward:
                return forward(*args, **kwargs)
            structure, tensors = flatten((args, kwargs))
            with _LocalTensors():
                state, call_key = state_of(module), _call_key(structure, tensors, recorder)
            if state is None or call_key is None or identity_of(module) != identity:
                return forward(*args, **kwargs)
            key = self.modules[path], (state, call_key)
            surroundings = surroundings_of(module)
            model = self._models.get(key)
            if model is not None and surroundings == self._surroundings[key]:
                with _LocalTensors():
                    return self._copy(model, path, tensors, recorder)
            before = surroundings, _drawn()
            with _LocalTensors():
                recorder.observed = observed = _open(recorder, path, key, module, tensors)
            try:
                result = forward(*args, **kwargs)
            finally:
                recorder.observed = None
            is_left = (surroundings_of(module), _drawn()) == before and flatten((args, kwargs))[
                0
            ] == structure
            is_left &= state_of(module) == state and identity_of(module) == identity
            with _LocalTensors():
                if _close(recorder, observed, result, tensors) and is_left:
                    self._compare(recorder.recording, observed, key, surroundings)
            return result

        return run

    def _compare(
        self, recording: Recording, observed: ObservedCall, key: Key, surroundings: Any
    ) -> None:
        facts = forward_facts(recording, observed)
        if key in self._first and self._first[key][1] == facts:
            self._models[key] = observed
            self._surroundings[key] = surroundings
            recording.models.append((self._first[key][0], observed))
        else:
            self._first[key] = observed, facts

    def _copy(
        self, model: ObservedCall, path: str, tensors: list[Tensor], recorder: Recorder
    ) -> Any:
        record = recorder.recording
        inputs = [recorder.memory.of(tensor) for tensor in tensors]
        copied = CopiedCall(
            path,
            recorder.stack()[:-1],
            model,
            inputs=inputs,
            input_ops=[-1 if storage is None else storage.op for storage in inputs],
            claims={k: op for k, op in model.claims.items() if op is not None},
            first_op=len(record.ops),
            tick=len(record.kernel_ops),
            storage=len(record.storages),
            call=len(record.calls) - 1,
        )
        begin_copy(recorder, copied)
        made = make_results(model, self._mode)
        held = [tensors[number].untyped_storage() for number in model.packed]
        held += [
            t.untyped_storage()
            for t, result in zip(made, model.results, strict=True)
            if result.saved_by is not None
        ]
        leaf = [tensor for tensor in tensors if tensor.requires_grad]
        (k,) = (k for k, result in enumerate(model.results) if result.requires_grad)
        given = leaf[0] if leaf else empty_fake(self._mode, like=SCALAR).requires_grad_()
        like = _like(given) if leaf else None
        made[k] = _LeftOut.apply(given, [made[k]], copied, recorder, held, like, self._mode)  # type: ignore[no-untyped-call]
        for tensor, result in zip(made, model.results, strict=True):
            if result.layout is not None:
                vars(tensor)[LAYOUT] = result.layout
        end_copy(recorder, copied, made)
        return rebuild(model.structure, made)


class _LeftOut(torch.autograd.Function):
    """Stands for a call in the autograd graph: holds what the call would hold, and gives a gradient
    of the right shape.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        result: list[Tensor],
        copied: CopiedCall,
        recorder: Recorder,
        held: list[Any],
        like: Any,
        mode: FakeTensorMode,
    ) -> Tensor:
        ctx.copied, ctx.recorder, ctx.held, ctx.like, ctx.mode = copied, recorder, held, like, mode
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made = None if ctx.like is None else empty_fake(ctx.mode, like=ctx.like)
        backward_of_copy(ctx.recorder, ctx.copied, gradient, made)
        ctx.held = None
        return made, None, None, None, None, None, None


def make_results(model: ObservedCall, mode: FakeTensorMode) -> list[Tensor]:
    """Return fake tensors like those that `model` returned, without a gradient."""
    return [empty_fake(mode, like=(r.size, r.stride, r.dtype, r.device)) for r in model.results]


def _like(tensor: Tensor) -> Like:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def _call_key(structure: Any, tensors: list[Tensor], recorder: Recorder) -> Hashable | None:
    """Return what calls have in common that may be alike; None for a call that cannot be
    compared.
    """
    if structure is None or sum(tensor.requires_grad for tensor in tensors) > 1:
        return None
    facts: list[Hashable] = []
    numbers: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided or isinstance(tensor, nn.Parameter):
            return None
        storage = recorder.memory.of(tensor)
        number = numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers))
        shape = (
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
        )
        is_saved = None if storage is None else storage.saved
        layout = vars(tensor).get(LAYOUT)
        facts.append(
            (
                shape,
                number,
                tensor.requires_grad,
                tensor.is_leaf,
                tensor._is_view(),
                is_saved,
                layout,
            )
        )
    if len(numbers) != len(tensors):
        return None
    key = structure, tuple(facts), _modes()
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _modes() -> Hashable:
    kinds = ("cpu", "cuda")
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    attention = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        hooks and id(hooks[0]),
        attention.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        attention.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        attention.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    )


def _open(
    recorder: Recorder, path: str, key: Key, module: nn.Module, tensors: list[Tensor]
) -> ObservedCall:
    record = recorder.recording
    buffers = {t.untyped_storage()._cdata for t in module.buffers()}
    return ObservedCall(
        path,
        key[0],
        len(recorder.stack()) - 1,
        inputs=[recorder.memory.of(tensor) for tensor in tensors],
        given={tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)},
        own={*buffers, *(t.untyped_storage()._cdata for t in module.parameters())},
        buffers=buffers,
        ops=(len(record.ops), 0),
        ticks=(len(record.kernel_ops), 0),
        storages=(len(record.storages), 0),
        calls=(len(record.calls), 0),
    )


def _close(recorder: Recorder, call: ObservedCall, result: Any, given: list[Tensor]) -> bool:
    """Note where the call ends and what it returned; whether it may be compared with others."""
    record = recorder.recording
    call.ops = call.ops[0], len(record.ops)
    call.ticks = call.ticks[0], len(record.kernel_ops)
    call.storages = call.storages[0], len(record.storages)
    call.calls = call.calls[0], len(record.calls)
    call.current = recorder.current - call.ops[0]
    call.structure, tensors = flatten(result)
    made = record.storages[slice(*call.storages)]
    if (
        call.structure is None
        or not tensors
        or not made
        or not call.is_like_others
        or call.current < 0
    ):
        return False
    for tensor in tensors:
        storage = recorder.memory.of(tensor)
        if storage is None or storage.born < call.ticks[0] or not _is_whole(tensor, storage):
            return False
        call.results.append(_result(tensor, storage, call.ops[0]))
    for number, storage in enumerate(call.inputs):
        claimed = (
            storage is not None and storage.saved_by is not None and storage.saved_by >= call.ops[0]
        )
        call.claims[number] = storage.saved_by - call.ops[0] if claimed else None  # type: ignore[union-attr, operator]
    results = {id(result.storage) for result in call.results}
    alive = [s for s in made if s.died == float("inf") and id(s) not in results]
    is_kept = all(not s.saved or s.saved_by is not None or id(s) in call.casts for s in alive)
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not is_kept or len(results) < len(tensors) or len(differentiable) != 1:
        return False
    differentiable[0].register_hook(partial(_note_gradient, recorder, call))  # type: ignore[no-untyped-call]
    for tensor in given:
        if tensor.requires_grad:
            tensor.register_hook(partial(_note_input_gradient, call, _like(tensor)))  # type: ignore[no-untyped-call]
    return True


def _note_gradient(recorder: Recorder, call: ObservedCall, gradient: Tensor) -> None:
    call.gradient = recorder.memory.of(gradient)


def _note_input_gradient(call: ObservedCall, like: Like, gradient: Tensor) -> None:
    call.is_like_others &= _like(gradient) == like


def _is_whole(tensor: Tensor, storage: Storage) -> bool:
    return (
        not tensor._is_view() and tensor.layout is torch.strided and tensor.nbytes == storage.bytes
    )


def _result(tensor: Tensor, storage: Storage, first_op: int) -> Result:
    return Result(
        storage,
        storage.op - first_op,
        storage.shape,
        None if storage.saved_by is None else storage.saved_by - first_op,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        vars(tensor).get(LAYOUT),
    )


def _drawn() -> Any:
    """The states of generators that are not torch's."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]
