"""An optimizer that follows a plan: its step, and its state in shards or whole, also once the plan
is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_topt.execution.gathered_state import (
    follow_parameters,
    gather_parameter_states,
    place_optimizer_state,
)
from lightning_topt.execution.stored_states import StoredOptimizer
from lightning_topt.execution.tensor_chunks import chunks_of, rows_of_tensor
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.local_step import install_local_step
from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.optim.update_rule import (
    ELEMENTWISE,
    UnsplittableOptimizer,
    collective_in_step,
    is_one_of,
)
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


@final
class AttachedOptimizer:
    """An optimizer that was built over the module, before or after the plan was applied to it.

    `replaced` has the parameter in the place of each original one, `split` says how original ones
    are cut along tensor axes, `attach` has what techniques do to optimizers. Parameters are counted
    as ``Optimizer.state_dict`` does. Methods are collective calls, but for `load`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        replaced: Mapping[Tensor, Tensor],
        split: Mapping[Tensor, SplitTensor],
        attach: Sequence[Callable[[Optimizer], ParallelStep | None]] = (),
        keeps_whole: bool | None = None,
    ) -> None:
        """`keeps_whole`: this rank gets the whole state; None: rank 0 does."""
        self.optimizer, self._replaced = optimizer, replaced
        lift_refusal(optimizer)
        self._state_dict = optimizer.state_dict
        self._keeps_whole = dist.get_rank() == 0 if keeps_whole is None else keeps_whole
        how = {**split, **{replaced[original]: how for original, how in split.items()}}
        before = enumerate(parameters_of(optimizer))
        self._split = {index: how[parameter] for index, parameter in before if parameter in how}
        if self._split and not is_one_of(optimizer, ELEMENTWISE):
            raise ValueError(
                f"{type(optimizer).__name__} looks at whole parameters (their norms, or rows and "
                "columns together), and this plan cuts them along tensor axes: use an optimizer "
                "that updates elements one by one, such as AdamW or SGD, or a plan without tensor "
                "axes"
            )
        if replaced.keys() & set(parameters_of(optimizer)):
            _check_runs_on_shards(optimizer)
        if replaced or split:
            follow_parameters(optimizer, replaced, split)
        steps = [step for install in attach if (step := install(optimizer)) is not None]
        assert len(steps) <= 1, "two techniques share the step of one optimizer"
        self.parallel_step = steps[0] if steps else None
        self._local_step = install_local_step(optimizer)
        shared = (
            {piece.index for piece in self.parallel_step.pieces} if self.parallel_step else set()
        )
        self._sharded = [
            index
            for index, parameter in enumerate(parameters_of(optimizer))
            if isinstance(parameter, DTensor) or (index in self._split and index not in shared)
        ]
        # of sharded parameters, once released or on the host
        self._kept: dict[int, State] | None = None
        # of an optimizer whose step is shared over slices, once released
        self._last: State | None = None
        self._last_own: State | None = None

    def full_state(self) -> State:
        """Return the ``state_dict`` of one process on rank 0; other ranks may return a part."""
        if self._last is not None:
            return self._last
        whole = gather_parameter_states(self._shards(), self._split, everywhere=self._keeps_whole)
        with self._without_shards():
            if self.parallel_step is not None:
                self.parallel_step.consolidate_state_dict()
            elif not self._sharded:
                return self._plain_state()
            if self.parallel_step is not None and dist.get_rank(self.parallel_step.group) == 0:
                rest = self.parallel_step.state_dict()
                shared = gather_parameter_states(
                    rest["state"].items(), self._split, everywhere=self._keeps_whole
                )
                rest = {**rest, "state": shared}
            if not self._keeps_whole:
                return {}
            rest = self._state_dict() if self.parallel_step is None else rest
        others = {
            i: {k: _to_host(v) for k, v in values.items()} for i, values in rest["state"].items()
        }
        return {**rest, "state": dict(sorted({**others, **whole}.items()))}

    def own_state(self) -> State:
        """Return the ``state_dict`` of what this rank keeps: DTensors, whole tensors, and states of
        its share of parameters.
        """
        if self._last_own is not None:
            return self._last_own
        if hasattr(self.optimizer, "consolidate_state_dict") and self.parallel_step is None:
            return self._plain_state() or {"state": {}, "param_groups": []}
        own = {i: self._chunks(i, values) for i, values in self._shards()}
        for index, parameter in enumerate(parameters_of(self.optimizer)):
            if index not in own and parameter in self.optimizer.state:
                own[index] = self._chunks(index, self.optimizer.state[parameter])
        pieces = {} if self.parallel_step is None else self.parallel_step.own_states()
        assert len({piece.index for piece in pieces}) == len(pieces), (
            "a rank has several pieces of one parameter"
        )
        for piece, values in pieces.items():
            whole, split = (
                parameters_of(self.optimizer)[piece.index].shape,
                self._split.get(piece.index),
            )
            own[piece.index] = {
                name: _as_rows(value, piece, whole, split) for name, value in values.items()
            }
        return {"state": own, "param_groups": _groups(self.optimizer)}

    def rows_to_read(self, index: int) -> range:
        """Return which rows of the state of the parameter with this index this rank keeps; all
        where it keeps a shard.
        """
        pieces = [] if self.parallel_step is None else self.parallel_step.current_pieces()
        of_parameter = [piece for piece in pieces if piece.index == index]
        own = [
            p
            for p in of_parameter
            if self.parallel_step is not None and p.owner == self.parallel_step.rank
        ]
        if not of_parameter:
            return range(num_rows(parameters_of(self.optimizer)[index]))
        return range(own[0].start, own[-1].stop) if own else range(0)

    def load(self, state: Mapping[str, Any] | StoredOptimizer) -> None:
        """Take over a whole state, each rank its part, or a stored one, of which each rank reads
        its part.
        """
        if isinstance(state, StoredOptimizer):
            state = self.read(state, rows=self.rows_to_read)
        self.optimizer.load_state_dict(place_optimizer_state(self.optimizer, state, self._split))

    def read(self, stored: StoredOptimizer, *, rows: Callable[[int], range]) -> State:
        """Return what a checkpoint folder has of the rows of each parameter's state that
        ``rows(index)`` says.
        """
        return stored.read(parameters_of(self.optimizer), rows=rows, split=self._split)

    def to_host(self) -> None:
        """Take the state off the device for good, each rank its own: `full_state` and `own_state`
        still return it.
        """
        self._kept = {
            i: {k: _HostShard.of(v) for k, v in values.items()} for i, values in self._shards()
        }
        self._drop_shards()
        for values in self.optimizer.state.values():
            values.update({k: v.cpu() for k, v in values.items() if isinstance(v, Tensor)})

    def release(self) -> None:
        """Give the optimizer its own step and parameters back, before techniques are undone; its
        shards are kept here.

        What is left to it is a part of the state, so its `state_dict` is refused until `give_back`.
        """
        if self.parallel_step is not None and self._split:
            self._last, self._last_own = (
                self.full_state(),
                self.own_state(),
            )  # pieces are rows of slices, which are gone once parameters are whole
        if self._local_step is not None:
            self._local_step.detach()
        if self.parallel_step is not None:
            self.parallel_step.detach()
        self._kept = dict(self._shards()) if self._kept is None else self._kept
        self._drop_shards()
        follow_parameters(
            self.optimizer, {new: original for original, new in self._replaced.items()}, {}
        )
        if self._kept or (
            self.parallel_step is not None and dist.get_world_size(self.parallel_step.group) > 1
        ):
            refuse_state_dict(self.optimizer)

    def give_back(self) -> None:
        """Give an optimizer that is used again after `release` the whole state, on every rank."""
        assert self._kept is not None, "release() comes first"
        lift_refusal(self.optimizer)
        parameters = parameters_of(self.optimizer)
        if self.parallel_step is not None and self._split:  # pieces were rows of slices
            last = [self._last if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(last, src=0)
            assert last[0] is not None
            self.optimizer.load_state_dict(last[0])
        else:
            for index, values in gather_parameter_states(
                self._shards(), self._split, everywhere=True
            ).items():
                self.optimizer.state[parameters[index]] = values
            if self.parallel_step is not None:
                self.parallel_step.update_pieces([])
        self._sharded, self._kept = [], None

    def _plain_state(self) -> State:
        """As Lightning takes it: optimizers such as torch's ZeroRedundancyOptimizer spread their
        state by themselves.
        """
        if not hasattr(self.optimizer, "consolidate_state_dict"):
            return self._state_dict()
        self.optimizer.consolidate_state_dict()
        return self._state_dict() if dist.get_rank() == 0 else {}

    def _shards(self) -> Iterator[tuple[int, State]]:
        """The states of sharded parameters by index, as DTensors on the device."""
        parameters, state = parameters_of(self.optimizer), self.optimizer.state
        for index in self._sharded:
            if self._kept is None and parameters[index] in state:
                yield index, dict(state[parameters[index]])
            elif self._kept is not None and index in self._kept:
                yield (
                    index,
                    {
                        k: v.placed() if isinstance(v, _HostShard) else v
                        for k, v in self._kept[index].items()
                    },
                )

    def _chunks(self, index: int, values: State) -> State:
        return {name: chunks_of(value, self._split.get(index)) for name, value in values.items()}

    def _drop_shards(self) -> None:
        parameters = parameters_of(self.optimizer)
        for index in self._sharded:
            self.optimizer.state.pop(parameters[index], None)

    @contextmanager
    def _without_shards(self) -> Generator[None, None, None]:
        parameters, state = parameters_of(self.optimizer), self.optimizer.state
        taken = {p: state.pop(p) for p in (parameters[i] for i in self._sharded) if p in state}
        try:
            yield
        finally:
            state.update(taken)


class _PartOfState:
    """Stands in the place of an optimizer's `state_dict`, which would have a part of the state, or
    mistake it for all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__

    def __call__(self) -> State:
        raise RuntimeError(
            f"the state of this {self.name} is spread over ranks since its plan was taken back: "
            "save a checkpoint (trainer.save_checkpoint, on all ranks), which has it whole; an "
            "optimizer that is an attribute of the module is given all of it after a fit"
        )


def refuse_state_dict(optimizer: Optimizer) -> None:
    """Let `state_dict` of an optimizer that has a part of its state say so."""
    optimizer.state_dict = _PartOfState(optimizer)  # type: ignore[method-assign]


def lift_refusal(optimizer: Optimizer) -> None:
    """Undo `refuse_state_dict`."""
    if isinstance(optimizer.__dict__.get("state_dict"), _PartOfState):
        del optimizer.__dict__["state_dict"]


def _check_runs_on_shards(optimizer: Optimizer) -> None:
    """Raise UnsplittableOptimizer for a step that is known not to run on DTensors."""
    name, way_out = type(optimizer).__name__, "Choose plan='ddp'"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsplittableOptimizer(
            f"this plan shards parameters, which {name} takes for one whole vector", way_out
        )
    if (op := collective_in_step(optimizer)) is not None:
        raise UnsplittableOptimizer(
            f"this plan shards parameters, but the step of {name} is shared between ranks already "
            f"({op})",
            way_out,
        )


@dataclass(frozen=True)
class _HostShard:
    """This rank's shard of `like`, a DTensor without memory, in host memory."""

    local: Tensor
    like: DTensor

    @classmethod
    def of(cls, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return _to_host(value)
        return cls(
            value.to_local().cpu(),
            _as_dtensor(torch.empty_like(value.to_local(), device="meta"), value),
        )

    def placed(self) -> DTensor:
        return _as_dtensor(self.local.to(self.like.device_mesh.device_type), self.like)


def _as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _as_rows(value: Any, piece: Piece, whole: torch.Size, split: SplitTensor | None) -> Any:
    """Return what has the shape of the piece's rows, as these rows of the whole."""
    of = whole if split is None else torch.Size(split.local_shape)
    rows = torch.Size((piece.stop - piece.start, *of[1:]))
    if not isinstance(value, Tensor) or value.shape != rows or (rows == of and split is None):
        return value
    shape = whole if split is None else split.layout.shape
    return rows_of_tensor(value, rows=range(piece.start, piece.stop), whole=shape, split=split)


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _groups(optimizer: Optimizer) -> list[State]:
    """As ``Optimizer.state_dict`` writes them: with the indices of parameters."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        groups.append(
            {**{key: value for key, value in group.items() if key != "params"}, "params": indices}
        )
    return groups
