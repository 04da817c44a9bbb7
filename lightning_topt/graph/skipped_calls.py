"""Skip calls of equal modules while a step is recorded on fake tensors.

    calls = SkippedCalls(copied, mode, modules=find_equal(module))
    calls.install(recorder)
    ...                                    # the step runs, with at most two calls per kind
    expand(recorder.recording)

A deep model repeats one layer; two calls of it are run and compared, the others are replaced by
their results. See [Note: skipped calls] in `equal_calls`. `find_equal` says which modules must
behave alike: equal classes, shapes and plain attributes all the way down, and nothing else inside.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as torch_module

from lightning_topt.graph.equal_calls import (
    CallsDiffer,
    ObservedCall,
    Result,
    SkippedCall,
    flatten,
    forward_facts,
    rebuild,
)
from lightning_topt.graph.module_copy import Like, empty_fake
from lightning_topt.graph.op_config import LAYOUT
from lightning_topt.graph.python_state import describe_surroundings, host_random_state
from lightning_topt.graph.recorder import Recorder
from lightning_topt.graph.recording import SKIPPED, OpRecord, Recording, StorageRecord

Key = tuple[Hashable, Hashable]  # of the module, of the call
SCALAR: Like = (), (), torch.float32, torch.device("cpu")
# shapes as they are recorded: to user code split tensors show their full shapes
_LocalTensors = torch._C.DisableTorchFunction
ATOMS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)
FUNCTIONS = (types.BuiltinFunctionType, type)
NOT_COMPARED = ("_parameters", "_buffers", "_modules", "forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MIN_REPETITIONS = 3  # two of them run
MAX_DEPTH = 4  # of attributes


class SkippedCalls:
    """Watch calls of modules in `root`, a fake copy, and skip those that repeat two others.

    `modules` are equal keys by path for modules that may be alike.
    """

    def __init__(
        self, root: nn.Module, mode: FakeTensorMode, *, modules: Mapping[str, Hashable]
    ) -> None:
        self.modules = modules
        self._mode, self._root = mode, root
        self._models: dict[Key, ObservedCall] = {}  # run twice
        self._first: dict[Key, tuple[ObservedCall, object]] = {}
        self._surroundings: dict[Key, object] = {}

    def install(self, recorder: Recorder) -> None:
        """Let `recorder` skip calls."""
        for path in self.modules:
            module = self._root.get_submodule(path)
            vars(module)["forward"] = self._wrapped(module, path, recorder)

    def _wrapped(self, module: nn.Module, path: str, recorder: Recorder) -> Callable[..., Any]:
        forward, identity = module.forward, identity_of(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            # inside of an observed call, and in recomputation, everything runs
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
                    return self._skip(model, path, tensors, recorder)
            # run it, and note what it reads, writes and leaves behind
            before = surroundings, host_random_state()
            with _LocalTensors():
                recorder.observed = observed = _open(recorder, path, key, module, tensors)
            try:
                result = forward(*args, **kwargs)
            finally:
                recorder.observed = None
            # a call that leaves anything changed may do something else the next time
            is_same = (surroundings_of(module), host_random_state()) == before
            is_same &= flatten((args, kwargs))[0] == structure
            is_same &= state_of(module) == state and identity_of(module) == identity
            with _LocalTensors():
                if _close(recorder, observed, result, tensors) and is_same:
                    self._compare(recorder.recording, observed, key, surroundings)
            return result

        return run

    def _compare(
        self, recording: Recording, observed: ObservedCall, key: Key, surroundings: object
    ) -> None:
        """Keep a call as the first of its kind, or as the model where it equals the first."""
        # two equal calls in a row of their kind make a model
        facts = forward_facts(recording, observed)
        if key in self._first and self._first[key][1] == facts:
            self._models[key] = observed
            self._surroundings[key] = surroundings
            recording.models.append((self._first[key][0], observed))
        else:
            self._first[key] = observed, facts

    def _skip(
        self, model: ObservedCall, path: str, tensors: list[Tensor], recorder: Recorder
    ) -> Any:
        """Put the results of `model` in the place of a call."""
        record = recorder.recording
        # its place in the recording: what is there before it
        inputs = [recorder.memory.of(tensor) for tensor in tensors]
        skipped = SkippedCall(
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
        _begin_skipped(recorder, skipped)
        # what autograd would keep alive until the backward pass of the call
        made = make_results(model, self._mode)
        held = [tensors[number].untyped_storage() for number in model.packed]
        held += [
            t.untyped_storage()
            for t, result in zip(made, model.results, strict=True)
            if result.saved_by is not None
        ]
        # one result needs a gradient, and at most one argument: else the call is not comparable
        leaf = [tensor for tensor in tensors if tensor.requires_grad]
        (k,) = (k for k, result in enumerate(model.results) if result.requires_grad)
        given = leaf[0] if leaf else empty_fake(self._mode, like=SCALAR).requires_grad_()
        like = _like(given) if leaf else None
        made[k] = _SkippedNode.apply(  # type: ignore[no-untyped-call]
            given, [made[k]], skipped, recorder, held, like, self._mode
        )
        for tensor, result in zip(made, model.results, strict=True):
            if result.layout is not None:
                vars(tensor)[LAYOUT] = result.layout
        _end_skipped(recorder, skipped, made)
        return rebuild(model.structure, made)


# ---- skipped calls in the recording --------------------------------------------------------------


class _SkippedNode(torch.autograd.Function):
    """Stands for a skipped call in the autograd graph.

    It holds what the call would hold, and gives a gradient of the right shape.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        result: list[Tensor],
        skipped: SkippedCall,
        recorder: Recorder,
        held: list[object],
        like: Any,
        mode: FakeTensorMode,
    ) -> Tensor:
        ctx.skipped, ctx.recorder, ctx.held = skipped, recorder, held
        ctx.like, ctx.mode = like, mode
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # gradients come by shape alone; what they take is the model's, put in by `expand`
        made = None if ctx.like is None else empty_fake(ctx.mode, like=ctx.like)
        recorder: Recorder = ctx.recorder
        skipped: SkippedCall = ctx.skipped
        if not recorder.is_backward or skipped.backward_tick is not None:
            raise CallsDiffer(skipped.model.key)
        record = recorder.recording
        skipped.backward_tick = len(record.kernel_ops)
        skipped.backward_storage = len(record.storages)
        skipped.gradient = recorder.memory.of(gradient)
        recorder.current = skipped.first_op + len(skipped.results) - 1
        if made is not None:
            recorder.memory.track(made, born=skipped.backward_tick, op=recorder.current)
            skipped.input_gradient = recorder.memory.of(made)
        record.kernel_ops.append(recorder.current)
        record.kernels.append(None)
        # from here on the call holds nothing
        ctx.held = None
        return made, None, None, None, None, None, None


def _begin_skipped(recorder: Recorder, skipped: SkippedCall) -> None:
    """Note that a skipped call begins: one operator for each of its results."""
    recorder.nodes.claim(recorder.current)  # nodes made so far are not of the call
    record, stack = recorder.recording, recorder.stack()
    record.edges[SKIPPED, len(record.skipped)] = (), ""
    record.skipped.append(skipped)
    record.ops += [
        OpRecord(f"{skipped.path}:skipped_{k}", "skipped", stack)
        for k in range(len(skipped.model.results))
    ]
    for number in skipped.claims:
        if (given := skipped.inputs[number]) is not None:
            given.saved = True


def _end_skipped(recorder: Recorder, skipped: SkippedCall, results: list[Tensor]) -> None:
    """Note what the call would have returned."""
    record = recorder.recording
    for k, (tensor, result) in enumerate(zip(results, skipped.model.results, strict=True)):
        recorder.memory.track(tensor, born=skipped.tick, op=skipped.first_op + k)
        skipped.results += recorder.memory.within(tensor)
        skipped.results[k].saved = result.saved_by is not None
    recorder.current = skipped.first_op + len(results) - 1
    record.kernel_ops.append(recorder.current)
    record.kernels.append(None)
    recorder.nodes.claim(recorder.current)


def make_results(model: ObservedCall, mode: FakeTensorMode) -> list[Tensor]:
    """Return fake tensors like those that `model` returned, without a gradient."""
    return [empty_fake(mode, like=(r.size, r.stride, r.dtype, r.device)) for r in model.results]


def _like(tensor: Tensor) -> Like:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


# ---- observed calls ------------------------------------------------------------------------------


def _call_key(structure: object, tensors: list[Tensor], recorder: Recorder) -> Hashable | None:
    """Return what calls have in common that may be alike.

    None for a call that cannot be compared.
    """
    if structure is None or sum(tensor.requires_grad for tensor in tensors) > 1:
        return None
    # the arguments: their layout, which share memory, and what autograd knows of them
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
    if len(numbers) != len(tensors):  # two arguments share memory
        return None
    key = structure, tuple(facts), _modes()
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _modes() -> Hashable:
    """Return the modes of torch that decide how a call runs."""
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
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
    )


def _open(
    recorder: Recorder, path: str, key: Key, module: nn.Module, tensors: list[Tensor]
) -> ObservedCall:
    """Return the observation of a call that begins."""
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


def _close(recorder: Recorder, call: ObservedCall, result: object, given: list[Tensor]) -> bool:
    """Note where the call ends and what it returned; return whether others may equal it."""
    record = recorder.recording
    # ranges of all that was recorded during the call
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
        if storage is None or storage.born < call.ticks[0]:  # not made by the call
            return False
        # a result that shares memory with something else cannot be made anew
        if tensor._is_view() or not _is_dense(tensor) or tensor.nbytes != storage.bytes:
            return False
        call.results.append(_result(tensor, storage, call.ops[0]))
    # inputs that autograd saved, and that no operator before the call had asked for
    for number, storage in enumerate(call.inputs):
        saved_by = None if storage is None else storage.saved_by
        if saved_by is not None and saved_by < call.ops[0]:
            saved_by = None
        call.claims[number] = None if saved_by is None else saved_by - call.ops[0]
    # all else that is still alive is kept by autograd or autocast
    results = {id(result.storage) for result in call.results}
    alive = [s for s in made if s.died == float("inf") and id(s) not in results]
    is_kept = all(not s.saved or s.saved_by is not None or id(s) in call.casts for s in alive)
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not is_kept or len(results) < len(tensors) or len(differentiable) != 1:
        return False
    # gradients are known in the backward pass: their storages and shapes are noted then
    differentiable[0].register_hook(partial(_note_gradient, recorder, call))
    for tensor in given:
        if tensor.requires_grad:
            tensor.register_hook(partial(_note_input_gradient, call, _like(tensor)))
    return True


def _note_gradient(recorder: Recorder, call: ObservedCall, gradient: Tensor) -> None:
    call.gradient = recorder.memory.of(gradient)


def _note_input_gradient(call: ObservedCall, like: Like, gradient: Tensor) -> None:
    call.is_like_others &= _like(gradient) == like


def _result(tensor: Tensor, storage: StorageRecord, first_op: int) -> Result:
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


# ---- equal modules -------------------------------------------------------------------------------


class NotPlain(Exception):
    """A module holds something whose behaviour cannot be compared."""


def find_equal(root: nn.Module) -> dict[str, int]:
    """Return equal keys for modules below `root` that must behave alike, by path.

    These have children and at least two equals. They differ in nothing but the memory of their
    parameters and buffers, which no other module has, and have no hooks. What their forward reads
    from elsewhere is not compared.
    """
    if any(
        getattr(torch_module, name)
        for name in vars(torch_module)
        if name.startswith("_global_") and "hooks" in name
    ):
        return {}
    tensors = (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    )
    # how many names each memory has, and how many places each module
    owners = Counter(_address(tensor) for _, tensor in tensors if _is_dense(tensor))
    times = Counter(id(m) for _, m in root.named_modules(remove_duplicate=False))
    numbers: dict[Hashable, int] = {}
    keys: dict[str, int] = {}

    def visit(module: nn.Module, path: str) -> int | None:
        children = [
            (name, visit(child, f"{path}.{name}" if path else name))
            for name, child in module._modules.items()
            if child is not None
        ]
        # a module in several places, or with children that cannot be compared
        if times[id(module)] > 1 or any(key is None for _, key in children):
            return None
        try:
            own = _own_key(module, owners)
        except NotPlain:
            return None
        # equal numbers: equal on their own, with children of equal names and numbers
        number = numbers.setdefault((own, tuple(children)), len(numbers))
        if path and children:
            keys[path] = number
        return number

    visit(root, "")
    counts = Counter(keys.values())
    return {path: key for path, key in keys.items() if counts[key] >= MIN_REPETITIONS}


def state_of(module: nn.Module) -> Hashable | None:
    """Return what may have changed since `find_equal` and decides how `module` behaves.

    Plain attributes, hooks, which parameters are trained, and how they are split; equal for modules
    that behave alike, None if unknown.
    """
    try:
        return tuple(
            (
                _attributes(m),
                tuple(len(vars(m)[name]) for name in HOOKS),
                tuple(
                    (p.requires_grad, vars(p).get(LAYOUT)) for _, p in _named(m) if p is not None
                ),
            )
            for m in module.modules()
        )
    except NotPlain:
        return None


def identity_of(module: nn.Module) -> object:
    """Return which objects a module consists of."""
    return [
        [id(value) for name, value in (*vars(m).items(), *_named(m)) if name not in NOT_COMPARED]
        for m in module.modules()
    ]


def surroundings_of(module: nn.Module) -> object:
    """Return the globals that the code of a module's classes can read and write.

    Tensors count by identity.
    """
    return describe_surroundings({type(m) for m in module.modules()})


def _own_key(module: nn.Module, owners: Counter[int]) -> Hashable:
    if any(vars(module).get(name) for name in HOOKS) or "forward" in vars(module):
        raise NotPlain
    # tensors by layout; a module that shares memory with another one is not plain
    tensors: list[Hashable] = []
    for name, tensor in _named(module):
        if tensor is not None:
            if not _is_dense(tensor) or owners[_address(tensor)] > 1:
                raise NotPlain
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors.append(
                (
                    name,
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                    tensor.requires_grad,
                    is_parameter,
                )
            )
        else:
            tensors.append((name,))
    return type(module), tuple(tensors), _attributes(module)


def _attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, _token(value, 0))
        for name, value in vars(module).items()
        if name not in NOT_COMPARED and "_hooks" not in name
    )


def _token(value: Any, depth: int) -> Hashable:
    """Return a value that is equal for equal plain values. Raises NotPlain for all else."""
    if isinstance(value, ATOMS):
        return type(value), value
    # by text: NaN is not equal to itself, and zero has a sign
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if depth > MAX_DEPTH:
        raise NotPlain
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_token(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_token(item, depth + 1) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value), tuple(
            (_token(k, depth + 1), _token(v, depth + 1)) for k, v in value.items()
        )
    # functions by identity, unless they close over something
    if isinstance(value, FUNCTIONS) or (
        isinstance(value, types.FunctionType) and not value.__closure__
    ):
        return "function", id(value)
    # objects of Python classes by their attributes
    cls: Any = type(value)
    attributes = getattr(value, "__dict__", None)
    if (
        isinstance(value, (Tensor, nn.Module))
        or not isinstance(attributes, dict)
        or not _is_of_python(cls)
    ):
        raise NotPlain
    return cls, tuple((name, _token(item, depth + 1)) for name, item in attributes.items())


@functools.cache
def _is_of_python(cls: type) -> bool:
    """Return whether all that instances of `cls` hold is in their attributes."""
    files = [
        getattr(sys.modules.get(base.__module__), "__file__", None) or ""
        for base in cls.__mro__[:-1]
    ]
    return all(file.endswith(".py") for file in files) and not hasattr(cls, "__slots__")


def _named(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
