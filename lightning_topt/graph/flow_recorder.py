"""`FlowRecorder`: a dispatch mode that watches a step run on a copy, and notes what its calls of
units need of one another.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.draws import draw_of
from lightning_topt.graph.errors import CaptureError, check_no_reentrant_checkpoint, line_of_caller
from lightning_topt.graph.flow_readers import BETWEEN, FlowReader, leaf_spec
from lightning_topt.graph.flow_units import unit_modules
from lightning_topt.graph.kernels import is_view
from lightning_topt.graph.provenance import Origin, Provenance
from lightning_topt.graph.step_flow import Bond, Draw, StepFlow, TensorRef
from lightning_topt.graph.structures import CONTAINERS, tensors_in
from lightning_topt.graph.writes import is_strided, written_tensors

READS_A_VALUE = torch.ops.aten._local_scalar_dense.default
DEVICE_OF = torch.ops.prim.device.default
HOST = "Python's or NumPy's random numbers"
UNSEEN = ("_parameters", "_modules", "_trainer", "_fabric")


class FlowRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it, run the step of `module`, leave it, call `finish` and take the `flow`.

    Args:
        module: a fake copy, whose calls of units are watched.
        batch: the tensors of the batch, which are real.
        units: paths of the named blocks.
    """

    def __init__(
        self, module: nn.Module, batch: Iterable[Tensor], *, units: Collection[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.metrics: list[str] = []
        self.in_metric = False  # what it reads of the batch only the last stage reads
        self.running: OpOverload | None = None
        self.unit_name = ""
        self._at = BETWEEN
        self._origins = Provenance()
        self._calls: list[FlowReader] = []
        self._end = FlowReader()
        self._bonds: dict[tuple[int, int], str] = {}
        self._draws: list[Draw] = []
        self._own: dict[str, set[int]] = {}
        self._rewritten: set[TensorRef] = set()
        self._read_first: dict[
            str, int
        ] = {}  # buffers: the call that reads each before all others, or follows the read
        self._written_last: dict[
            str, int
        ] = {}  # the call that changes each after all others, or comes before the change
        self._made_of: dict[int, set[str]] = {}  # storages: the buffers whose values are in them
        self._read_out: set[str] = set()  # buffers whose values units return, or the step
        self._replaced: set[str] = set()  # buffers that are other tensors at the end
        self._value_read = ""
        self._reads_values = False
        self._has_gradients = torch.is_grad_enabled()
        self._host_state, self._draws_on_host = _host_draws(), False
        self._begin(module, batch)
        self._units = unit_modules(module, units)
        for path, submodule in self._units:
            vars(submodule)["_compiled_call_impl"] = partial(self._call, path, submodule)

    def _begin(self, module: nn.Module, batch: Iterable[Tensor]) -> None:
        for name, parameter in module.named_parameters():
            self._origins.begin(parameter, Origin(parameter=name))
        for name, buffer in module.named_buffers():
            if is_strided(buffer):
                self._origins.begin(buffer, Origin())
                self._origins.memory(buffer).buffer = name
        for tensor in batch:
            if is_strided(tensor):
                self._origins.begin(tensor, Origin(varies=True, is_batch=True))

    # ---- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return func(*args)
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if is_strided(tensor)]
        if is_collective(func):
            raise CaptureError(
                f"the step calls {func}, in which ranks that run other stages would not take "
                f"part.\n{line_of_caller()}"
                "Give a plan without a pipeline."
            )
        if func is READS_A_VALUE and (value := self._value(inputs[0])) is not None:
            return value
        self.running = func
        draw = draw_of(func, args, kwargs)
        result = func(*args, **kwargs)
        self.running = None
        self._note_buffers(inputs)
        # autograd repeats views of an old base where a view is written to
        if self._at >= 0 and not is_view(func):
            self._consume(self._calls[self._at], inputs)
        for tensor in written_tensors(func, args, kwargs):
            self._write(tensor, inputs)
        outputs = [tensor for tensor in tensors_in(result) if is_strided(tensor)]
        self._origins.made(outputs, inputs, inside=self._at, varies=draw is not None)
        self._follow_buffers(func, inputs, outputs)
        if draw is not None:
            (self._draws if self._at < 0 else self._calls[self._at].draws).append(draw)
        return result

    def _note_buffers(self, inputs: Iterable[Tensor]) -> None:
        for tensor in inputs:
            if (buffer := self._origins.memory(tensor).buffer) is not None:
                self._read_first.setdefault(buffer, self._at if self._at >= 0 else len(self._calls))

    def _follow_buffers(
        self, func: OpOverload, inputs: Iterable[Tensor], outputs: Iterable[Tensor]
    ) -> None:
        # in training it changes its averages and computes without them
        is_norm = "batch_norm" in func._schema.name
        names = {name for tensor in inputs for name in self._buffers_in(tensor, itself=not is_norm)}
        for tensor in outputs if names else ():
            if self._origins.memory(tensor).buffer is None:
                self._made_of.setdefault(tensor.untyped_storage()._cdata, set()).update(names)

    def _buffers_in(self, tensor: Tensor, *, itself: bool = True) -> set[str]:
        buffer = self._origins.memory(tensor).buffer
        if buffer is not None:
            return {buffer} if itself else set()
        return self._made_of.get(tensor.untyped_storage()._cdata, set())

    def _write(self, tensor: Tensor, inputs: list[Tensor]) -> None:
        buffer = self._origins.memory(tensor).buffer
        if buffer is not None:
            self._written_last[buffer] = self._at if self._at >= 0 else len(self._calls) - 1
        self._rewritten |= set(self._origins.written(tensor, inputs, inside=self._at))
        if buffer is not None and self._at >= 0:
            self._calls[self._at].writes.add(buffer)
        elif buffer is not None:
            self._end.writes.add(buffer)
            self._consume(self._end, [tensor])

    def _value(self, tensor: Tensor) -> Any:
        """Return what a value reads as here; None to let it be read."""
        origin = self._origins.origin(tensor)
        if origin.is_batch and not (origin.refs or origin.reads):
            if self.in_metric and isinstance(tensor, FakeTensor):
                return torch.zeros((), dtype=tensor.dtype).tolist()
            if isinstance(tensor, FakeTensor):
                raise CaptureError("the step reads values of the batch", needs_values=True)
            self._reads_values = True
            return None
        if isinstance(tensor, FakeTensor):
            if self._at >= 0:
                return None
        elif not origin.varies:
            return None
        self._consume(self._end, [tensor])
        self._value_read = self._value_read or line_of_caller()
        return (
            torch.zeros((), dtype=tensor.dtype).tolist() if isinstance(tensor, FakeTensor) else None
        )

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor as which `tensor` reads outside of operators; None to let it be read."""
        if not isinstance(tensor, FakeTensor) or self._at >= 0:
            return None
        self._value(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    # ---- calls of units --------------------------------------------------------------------------

    def _call(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._at >= 0 or self not in _active():
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._value_read:
            raise CaptureError(
                "the step reads the value of a tensor before its last block has run, and stages "
                "of a pipeline know only "
                f"the shapes of what others compute.\n{self._value_read}Move this to the end of "
                "the step, or into a block, or "
                "give a plan without a pipeline."
            )
        if self._has_gradients and not torch.is_grad_enabled():
            check_no_reentrant_checkpoint(path)
        at = len(self._calls)
        tensors = (t for t in (*module.parameters(), *module.buffers()) if is_strided(t))
        own = {id(self._origins.origin(tensor)) for tensor in tensors}
        call = FlowReader(path, at, own)
        self._note_host_draws()
        call.draws_before, self._draws = tuple(self._draws), []
        self._calls.append(call)
        self._consume(call, _leaves((args, kwargs)))
        self._at, self.unit_name = at, path
        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._at, self.unit_name = BETWEEN, ""
        if _host_draws() != self._host_state:
            self._host_state = _host_draws()
            call.draws.append(Draw(None, (), (), problem=HOST))
        return self._returned(call, result)

    def _returned(self, call: FlowReader, result: Any) -> Any:
        """Note what a call returned; return the same with other tensor objects: what is seen inside
        of it stays known apart.
        """
        leaves, call.structure = tree_flatten(result)
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                call.leaves.append(leaf)
                continue
            call.leaves.append(leaf_spec(call.module, leaf, seen.get(id(leaf))))
            self._read_out |= self._buffers_in(leaf)
            if (first := seen.setdefault(id(leaf), number)) != number:
                leaves[number] = leaves[first]
                continue
            ref = TensorRef(call.index, number)
            is_older = self._origins.memory(leaf).made_in != call.index
            leaves[number] = leaf[...]
            self._origins.begin(
                leaves[number],
                Origin({ref}, leaf=ref, varies=True, alias_call=call.index if is_older else -1),
            )
        return tree_unflatten(leaves, call.structure)

    # ---- needs -----------------------------------------------------------------------------------

    def need_at_end(self, value: Any) -> None:
        """Note that the end of the step needs the tensors in `value`."""
        self._consume(self._end, _leaves(value))

    def _consume(self, reader: FlowReader, tensors: Iterable[Tensor]) -> None:
        joined, at = Origin(), reader.index
        for tensor in tensors:
            if not is_strided(tensor) or (at >= 0 and self._origins.memory(tensor).made_in == at):
                continue
            origin = self._origins.origin(tensor)
            if id(origin) in reader.own:
                joined.bonds.update(origin.bonds)
            else:
                self._origins.join(joined, [tensor], inside=at)
        reader.needs |= joined.refs
        reader.reads |= joined.reads
        for call, reason in joined.bonds.items():
            if call != at:
                self._bonds.setdefault((call, at), reason)

    def finish(self, result: Any, module: nn.Module) -> None:
        """Note what the step returned, and left in attributes of modules that no unit contains;
        call it at the end.
        """
        self.need_at_end(result)
        self._read_out.update(
            *(self._buffers_in(tensor) for tensor in _leaves(result) if is_strided(tensor))
        )
        named = ((name, buffer) for name, buffer in module.named_buffers() if is_strided(buffer))
        self._replaced = {
            name for name, buffer in named if self._origins.memory(buffer).buffer is None
        }
        units = {path for path, _ in self._units}
        for path, submodule in module.named_modules():
            if path in units:
                continue
            left = [
                v
                for name, v in vars(submodule).items()
                if name not in UNSEEN and isinstance(v, CONTAINERS)
            ]
            known = (t for t in tensors_in(left) if is_strided(t) and self._origins.knows(t))
            self.need_at_end([t for t in known if not self._origins.hidden_in(t)])
        self._note_host_draws()
        for name, last in self._written_last.items():
            if (first := self._read_first.get(name, last)) < last:
                is_after = last == len(self._calls) - 1 and name not in self._calls[last].writes
                second = BETWEEN if is_after else last
                self._bonds.setdefault(
                    (first, second), f"reads buffer {name!r} in the next step as it is changed"
                )

    def _note_host_draws(self) -> None:
        if _host_draws() == self._host_state:
            return
        self._host_state = _host_draws()
        if self._calls:
            self._draws.append(Draw(None, (), (), problem=HOST))
        self._draws_on_host = True

    def flow(self) -> StepFlow:
        """Return the flow of the step."""
        calls = tuple(call.unit_call(self._rewritten) for call in self._calls)
        bonds = tuple(
            Bond(a, len(calls) if b < 0 else b, why) for (a, b), why in sorted(self._bonds.items())
        )
        return StepFlow(
            calls,
            frozenset(self._end.needs),
            end_reads=frozenset(self._end.reads),
            end_draws=tuple(self._draws),
            end_writes=frozenset(self._end.writes),
            bonds=bonds,
            carried=frozenset(self._read_out & {*self._written_last, *self._replaced}),
            metrics=tuple(self.metrics),
            reads_values=self._reads_values,
            draws_on_host=self._draws_on_host,
        )


def _leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _active() -> list[Any]:
    return list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def _host_draws() -> Any:
    state: Any = np.random.get_state()
    return hash(random.getstate()), hash(state[1].tobytes()), state[2:]
