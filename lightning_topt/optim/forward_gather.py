"""Updated parameters that arrive during the next forward pass: each module waits for its own when it is called.

`ParallelStep` then returns while rows still travel. Which parameters a module reads is what it holds itself and what the first
forward pass shows: there every operator is looked at, so that also tied weights and weights that a parent reads without
calling their module (``nn.MultiheadAttention`` does) are waited for in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topt.optim.gather import PendingGather, PieceGather
from lightning_topt.optim.parallel_step import ParallelStep

CHUNK_BYTES = 8 << 20  # parameters are sent in groups of about this size, in the order of their use


class ForwardGather:
    """Lets the gathers of `steps` overlap with the next forward pass of `module`, which holds all their parameters.

    Whoever reads parameters otherwise (callbacks, a copy of the weights, code outside of ``module.forward``) calls `wait_all`
    first; ``state_dict`` and forward passes without gradients do. A branch that reads another module's weights and that the
    first forward pass did not take must do so as well. Raises ValueError for compiled modules, whose hooks do not run one
    by one, and for parameters that are not of `module`.
    """

    def __init__(self, module: nn.Module, *, steps: Sequence[ParallelStep]) -> None:
        _check(module, steps)
        self.module, self.steps = module, steps
        self._reads: dict[nn.Module, list[Tensor]] = {p: list(p.parameters(recurse=False)) for p in module.modules()}
        self._order: list[Tensor] | None = None  # of first use; None until a forward pass was looked at
        self._gathers: dict[ParallelStep, list[tuple[PieceGather, frozenset[int]]]] = {}
        self._planned_for: dict[ParallelStep, object] = {}
        self._chunk_of: dict[int, tuple[int, int]] = {}  # id of a parameter: number of its step, of its chunk
        self._pending: dict[tuple[int, int], PendingGather] = {}
        self._look: _Look | None = None
        self._handles: list[Any] = []
        for part in module.modules():
            self._handles.append(part.register_forward_pre_hook(self._before, prepend=True))
            self._handles.append(part.register_state_dict_pre_hook(lambda *_: self.wait_all()))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_pre_hook(self._open, prepend=True))
        self._handles.append(module.register_forward_hook(self._close, always_call=True))
        for number, step in enumerate(steps):
            step.exchange = lambda number=number: self._start(number)  # type: ignore[misc]

    def wait_all(self) -> None:
        """Block until all parameters are here. Raises PeerLostError as ``PendingGather.wait``."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    def remove(self) -> None:
        """Wait, and let the steps gather at once again."""
        self.wait_all()
        for handle in self._handles:
            handle.remove()
        for step in self.steps:
            step.exchange = step.gather

    def _start(self, number: int) -> None:
        """Begin to send what a step updated, in the order of use."""
        step = self.steps[number]
        for key in [key for key in self._pending if key[0] == number]:
            self._pending.pop(key).wait()  # parameters that no forward pass has read
        if self._order is None:
            step.gather()
            return
        if self._planned_for.get(step) is not step.pieces:
            self._plan(number, self._order)
        active = frozenset(step.active)
        for chunk, (gather, indices) in enumerate(self._gathers[step]):
            if indices & active:
                self._pending[number, chunk] = gather.start(indices & active)

    def _plan(self, number: int, order: Sequence[Tensor]) -> None:
        step = self.steps[number]
        used = {id(parameter): position for position, parameter in enumerate(order)}
        spread = {piece.index for piece in step.pieces}
        indices = sorted(spread, key=lambda index: (used.get(id(step.parameters[index]), len(used)), index))
        self._gathers[step] = []
        for chunk, members in enumerate(_chunks(indices, step.parameters)):
            pieces = [piece for piece in step.pieces if piece.index in members]
            gather = PieceGather(
                step.parameters, pieces, group=step.group, dtype=step.gather_dtype, sources=step.masters
            )
            self._gathers[step].append((gather, members))
            self._chunk_of.update({id(step.parameters[index]): (number, chunk) for index in members})
        self._planned_for[step] = step.pieces

    def _before(self, part: nn.Module, _: Any) -> None:
        if self._look is not None:
            self._look.enter(part)
        for parameter in self._reads[part] if self._pending else ():
            pending = self._pending.pop(self._chunk_of.get(id(parameter), (-1, -1)), None)
            if pending is not None:
                pending.wait()

    def _open(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.wait_all()
        elif self._order is None and self._look is None:
            assert not self._pending
            self._look = _Look(self.module)
            self._look.__enter__()  # type: ignore[no-untyped-call]

    def _close(self, *_: Any) -> None:
        if self._look is not None:
            look, self._look = self._look, None
            look.__exit__(None, None, None)
            for part, parameters in look.read.items():
                known = {id(parameter) for parameter in self._reads[part]}
                self._reads[part] += [parameter for parameter in parameters if id(parameter) not in known]
            self._order = look.order


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which parameters are read inside of which module (the innermost that is running), and in which order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = {id(parameter): parameter for parameter in module.parameters()}
        self.order: list[Tensor] = []
        self.read: dict[nn.Module, list[Tensor]] = {}
        self._running: list[nn.Module] = [module]
        self._handles = [part.register_forward_hook(self._leave, always_call=True) for part in module.modules()]

    def enter(self, part: nn.Module) -> None:
        """`part` is called."""
        self._running.append(part)

    def _leave(self, part: nn.Module, *_: Any) -> None:
        while len(self._running) > 1 and self._running.pop() is not part:
            pass  # parts that raised before their own hooks ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self.parameters:
                read = self.read.setdefault(self._running[-1], [])
                if all(leaf is not known for known in read):
                    read.append(leaf)
                if all(leaf is not known for known in self.order):
                    self.order.append(leaf)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _chunks(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[frozenset[int]]:
    members: list[int] = []
    for index in indices:
        if members and sum(parameters[member].nbytes for member in members) + parameters[index].nbytes > CHUNK_BYTES:
            yield frozenset(members)
            members = []
        members.append(index)
    if members:
        yield frozenset(members)


def _check(module: nn.Module, steps: Sequence[ParallelStep]) -> None:
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            raise ValueError(
                f"{name or 'the module'} is compiled, and compiled code does not wait for single modules' parameters: leave "
                "overlap_forward off, or compile nothing"
            )
    held = {id(parameter) for parameter in module.parameters()}
    for step in steps:
        foreign = [index for index, parameter in enumerate(step.parameters) if id(parameter) not in held]
        if foreign:
            raise ValueError(
                f"parameter {foreign[0]} of {type(step.optimizer).__name__} is not a parameter of the module whose forward "
                "pass is to wait for it: give the module that holds all of them, or leave overlap_forward off"
            )
