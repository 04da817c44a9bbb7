"""Optimizers under a plan: their step, and their state, in shards or full.

    AttachedOptimizer    any plan: parameters may be in shards or slices, and ranks may share a step
    StageOptimizer       a plan with stages: a rank has state of the parameters that it keeps alone

    attached = AttachedOptimizer(optimizer, replaced=..., split=..., attach=...)
    attached.full_state()      # the `state_dict` of one process, on rank 0
    attached.own_state()       # what this rank keeps, to be written by each rank
    attached.load(state)       # full, or stored in a checkpoint folder
    attached.release()         # before techniques are undone; both states may still be asked for

After `release` an optimizer has a part of its state only: `state_dict` and `step` are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_topt.communication.collectives import travel_device
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.states import (
    StoredOptimizer,
    chunks_of,
    follow_parameters,
    gather_parameter_states,
    place_optimizer_state,
    rows_of_tensor,
)
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.optim.shard_step import as_dtensor, install_local_step, move_states
from lightning_topt.optim.update_rule import (
    ELEMENTWISE,
    UnsplittableOptimizer,
    check_by_parameter,
    check_runs_on_shards,
    is_one_of,
)
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


@final
class AttachedOptimizer:
    """An optimizer that was built over the module, before or after the plan was applied to it.

    Parameters are counted as ``Optimizer.state_dict`` does. Methods are collective calls, but for
    `load`.
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
        """Attach the optimizer.

        Args:
            optimizer: over original or present parameters of the module.
            replaced: the parameter in the place of each original one.
            split: how original parameters are cut along tensor axes.
            attach: what techniques do to optimizers.
            keeps_whole: this rank gets the full state; None: rank 0 does.
        """
        self.optimizer, self._replaced = optimizer, replaced
        if isinstance(refusal := vars(optimizer).get("state_dict"), _PartOfState):
            refusal()
        self._state_dict = optimizer.state_dict
        self._keeps_whole = dist.get_rank() == 0 if keeps_whole is None else keeps_whole
        # By index: the optimizer may have original parameters, or those in their place.
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
        # Point it to the present parameters, and let a technique share its step.
        if replaced or split:
            follow_parameters(optimizer, replaced, split)
        # The originals may be empty by now: a trial takes the shapes of what stands for them.
        if any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)):
            check_runs_on_shards(optimizer)
        steps = [step for install in attach if (step := install(optimizer)) is not None]
        assert len(steps) <= 1, "two techniques share the step of one optimizer"
        self.parallel_step = steps[0] if steps else None
        self._local_step = install_local_step(optimizer)
        # States in shards or slices; a shared step has those of its own pieces.
        shared = (
            {piece.index for piece in self.parallel_step.pieces} if self.parallel_step else set()
        )
        self._sharded = [
            index
            for index, parameter in enumerate(parameters_of(optimizer))
            if index not in shared and (isinstance(parameter, DTensor) or index in self._split)
        ]
        # States of sharded parameters, once released.
        self._kept: dict[int, State] | None = None
        # Both states of an optimizer whose step is shared over slices, once released.
        self._last: State | None = None
        self._last_own: State | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of the state."""
        is_spread = hasattr(self.optimizer, "consolidate_state_dict")
        return not (self._sharded or self._split or self.parallel_step is not None or is_spread)

    def full_state(self) -> State:
        """Return the ``state_dict`` of one process on rank 0; other ranks may return a part."""
        if self._last is not None:
            return self._last
        # States of sharded parameters are gathered one by one.
        gathered = gather_parameter_states(
            self._shards(), self._split, everywhere=self._keeps_whole
        )
        # The rest: a shared step gathers its own, else this rank has all of it.
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
        return {**rest, "state": dict(sorted({**others, **gathered}.items()))}

    def own_state(self) -> State:
        """Return the ``state_dict`` of what this rank keeps.

        That are DTensors, full tensors, and states of its share of parameters.
        """
        if self._last_own is not None:
            return self._last_own
        if hasattr(self.optimizer, "consolidate_state_dict") and self.parallel_step is None:
            return self._plain_state() or {"state": {}, "param_groups": []}
        # shards, then full tensors, then this rank's share of what ranks step together
        own = {i: self._chunks(i, values) for i, values in self._shards()}
        for index, parameter in enumerate(parameters_of(self.optimizer)):
            if index not in own and parameter in self.optimizer.state:
                own[index] = self._chunks(index, self.optimizer.state[parameter])
        # A shared step: rows of parameters.
        pieces = {} if self.parallel_step is None else self.parallel_step.own_states()
        assert len({piece.index for piece in pieces}) == len(pieces), (
            "a rank has several pieces of one parameter"
        )
        for piece, values in pieces.items():
            shape = parameters_of(self.optimizer)[piece.index].shape
            split = self._split.get(piece.index)
            own[piece.index] = {
                name: _as_rows(value, piece, shape, split) for name, value in values.items()
            }
        return {"state": own, "param_groups": _groups(self.optimizer)}

    def rows_to_read(self, index: int) -> range:
        """Return the rows that this rank keeps of a parameter's state; all of a shard."""
        pieces = [] if self.parallel_step is None else self.parallel_step.current_pieces()
        # Pieces of one parameter belong to several ranks; one rank's follow each other.
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
        """Load a full state, each rank its part, or a stored one, of which it reads its part."""
        if isinstance(state, StoredOptimizer):
            state = self.read(state, rows=self.rows_to_read)
        # a shared step takes full states, and keeps its part
        pieces = () if self.parallel_step is None else self.parallel_step.current_pieces()
        owned = {piece.index for piece in pieces}
        self.optimizer.load_state_dict(
            place_optimizer_state(self.optimizer, state, self._split, replicated=owned)
        )
        move_states(self.optimizer)

    def read(self, stored: StoredOptimizer, *, rows: Callable[[int], range]) -> State:
        """Return ``rows(index)`` of each parameter's state from a checkpoint folder."""
        kept_in_shards = {*self._sharded}
        parameters = [
            torch.empty(p.shape, dtype=p.dtype, device="meta")
            if isinstance(p, DTensor) and index not in kept_in_shards
            else p
            for index, p in enumerate(parameters_of(self.optimizer))
        ]
        return stored.read(parameters, rows=rows, split=self._split)

    def release(self) -> None:
        """Give the optimizer its own step and parameters back, before techniques are undone.

        Its shards are kept here, in host memory: the device may not hold the unsharded parameters
        beside them. What is left to it is a part of the state, so its `state_dict` and `step` are
        refused.
        """
        # Pieces are rows of slices, which are gone once parameters are unsharded.
        if self.parallel_step is not None and self._split:
            self._last, self._last_own = self.full_state(), self.own_state()
        # Its own step again, with the original parameters.
        if self._local_step is not None:
            self._local_step.detach()
        if self.parallel_step is not None:
            self.parallel_step.detach()
        self._kept = {
            i: {k: _in_host_memory(v) for k, v in values.items()} for i, values in self._shards()
        }
        for index in self._sharded:
            self.optimizer.state.pop(parameters_of(self.optimizer)[index], None)
        originals = {new: original for original, new in self._replaced.items()}
        follow_parameters(self.optimizer, originals, {})
        if self.parallel_step is not None:
            self.parallel_step.follow(originals)
        if self._kept or (
            self.parallel_step is not None and dist.get_world_size(self.parallel_step.group) > 1
        ):
            refuse_state_dict(self.optimizer)

    def _plain_state(self) -> State:
        # Return the state as Lightning takes it.
        # Optimizers such as torch's ZeroRedundancyOptimizer spread their state by themselves.
        if not hasattr(self.optimizer, "consolidate_state_dict"):
            return self._state_dict()
        self.optimizer.consolidate_state_dict()
        return self._state_dict() if dist.get_rank() == 0 else {}

    def _shards(self) -> Iterator[tuple[int, State]]:
        # Yield the states of sharded parameters by index
        if self._kept is not None:
            yield from self._kept.items()
            return
        parameters, state = parameters_of(self.optimizer), self.optimizer.state
        for index in self._sharded:
            if parameters[index] in state:
                yield index, dict(state[parameters[index]])

    def _chunks(self, index: int, values: State) -> State:
        # A parameter's state as the chunks of full tensors that it is
        return {name: chunks_of(value, self._split.get(index)) for name, value in values.items()}

    @contextmanager
    def _without_shards(self) -> Generator[None]:
        # Take states of sharded parameters from the optimizer within
        parameters, state = parameters_of(self.optimizer), self.optimizer.state
        # shards are gathered by themselves: they must not be in the state that is collected here
        taken = {p: state.pop(p) for p in (parameters[i] for i in self._sharded) if p in state}
        try:
            yield
        finally:
            state.update(taken)


def _in_host_memory(value: object) -> Any:
    # A value, or this rank's shard of one, as it is where it is offloaded
    if not isinstance(value, DTensor):
        return _to_host(value)
    local = value.to_local()
    # made without memory: torch moves what has some to the device of the mesh
    kept = as_dtensor(torch.empty_like(local, device="meta"), value)
    kept._local_tensor = local.cpu()
    return kept


def _as_rows(value: object, piece: Piece, shape: torch.Size, split: SplitTensor | None) -> Any:
    # A value with the shape of the piece's rows as these rows of the full tensor
    local = shape if split is None else torch.Size(split.local_shape)
    rows = torch.Size((piece.stop - piece.start, *local[1:]))
    # Numbers such as step counts, and states of all rows, stay as they are.
    if not isinstance(value, Tensor) or value.shape != rows or (rows == local and split is None):
        return value
    full = shape if split is None else split.layout.shape
    return rows_of_tensor(value, rows=range(piece.start, piece.stop), full_shape=full, split=split)


def _to_host(value: object) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _groups(optimizer: Optimizer) -> list[State]:
    # Groups as ``Optimizer.state_dict`` writes them, with indices of parameters
    groups, start = [], 0
    for group in optimizer.param_groups:
        # parameters are numbered through all groups
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        groups.append(
            {**{key: value for key, value in group.items() if key != "params"}, "params": indices}
        )
    return groups


# ---- plans with stages ---------------------------------------------------------------------------


@final
class StageOptimizer:
    """The `AttachedOptimizer` of a plan with stages: each rank steps the parameters that it keeps.

    It has state of these alone. Methods are collective calls, but for `load`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        run: PipelineRun,
        *,
        replaced: Mapping[Tensor, Tensor],
        split: Mapping[Tensor, SplitTensor],
        attach: Sequence[Callable[[Optimizer], ParallelStep | None]],
    ) -> None:
        try:
            check_by_parameter(optimizer)
        except UnsplittableOptimizer as error:
            raise UnsplittableOptimizer(
                f"ranks of a pipeline update the parameters of their stages, but {error.reason}",
                "Choose a plan without stages, such as 'ddp'",
            ) from error
        # by the parameters that the optimizer may have: original ones, or those in their place
        owners, kept = run.owners(), set[Tensor](run.updated_parameters())
        owners |= {
            replaced[original]: owner for original, owner in owners.items() if original in replaced
        }
        kept |= {replaced[original] for original in kept if original in replaced}
        parameters = parameters_of(optimizer)
        self._owners = {
            index: owners.get(parameter, 0) for index, parameter in enumerate(parameters)
        }
        # Indices of parameters that other ranks step.
        self._others = {
            index for index, p in enumerate(parameters) if p in owners and p not in kept
        }
        self._groups = run.groups
        # what the optimizer has of these already is for other ranks to keep
        for index in self._others:
            optimizer.state.pop(parameters[index], None)
        self._attached = AttachedOptimizer(
            optimizer,
            replaced=replaced,
            split=split,
            attach=attach,
            keeps_whole=run.groups.data_rank == 0,
        )
        self.optimizer = optimizer

    def full_state(self) -> State:
        """Return the ``state_dict`` of one process on rank 0, an empty one elsewhere."""
        own = self._attached.full_state()
        with self._groups.at_any_time() as group:
            states = self._collected(own["state"], group) if self._groups.saves else {}
        if not self._groups.saves or self._groups.rank != 0:
            return {}
        return {"state": states, "param_groups": own["param_groups"]}

    # The states of all parameters on the pipeline's first rank, in host memory: each rank sends
    # those that it owns, one parameter after the other, so that no device holds more than one.
    def _collected(self, own: Mapping[int, State], group: dist.ProcessGroup) -> dict[int, State]:
        states: dict[int, State] = {}
        rank, device = self._groups.rank, travel_device(group)
        for index, owner in sorted(self._owners.items()):
            values: list[Any] = [None]
            if rank == owner and index in own:
                values = [{name: _to_host(value) for name, value in own[index].items()}]
            if owner and rank == owner:
                dist.send_object_list(values, group=group, group_dst=0, device=device)
            elif owner and rank == 0:
                dist.recv_object_list(values, group=group, group_src=owner, device=device)
            if rank == 0 and values[0] is not None:
                states[index] = values[0]
        return states

    def own_state(self) -> State:
        """Return the ``state_dict`` of what this rank keeps."""
        return self._attached.own_state()

    def load(self, state: Mapping[str, Any] | StoredOptimizer) -> None:
        """Load a full state, or a stored one, each rank its part."""
        if isinstance(state, StoredOptimizer):
            state = self._attached.read(
                state,
                rows=lambda index: (
                    range(0) if index in self._others else self._attached.rows_to_read(index)
                ),
            )
        own = {
            index: values for index, values in state["state"].items() if index not in self._others
        }
        self._attached.load({**state, "state": own})

    def release(self) -> None:
        """Give the optimizer its own step back."""
        self._attached.release()
        if len(self._groups.pipeline) > 1:
            refuse_state_dict(self.optimizer)


# ---- refusal -------------------------------------------------------------------------------------


class _PartOfState:
    """In the place of the `state_dict` of an optimizer that has a part of its state; its step too.

    Loading a full state ends that. Where an optimizer never called `Optimizer.__init__`, it has no
    hooks: its step goes on, and `state_dict` stays as it is here.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._name = type(optimizer).__name__
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return
        self._hook = optimizer.register_step_pre_hook(self)
        # which stays: torch goes through such hooks while it runs, also of several refusals
        optimizer.register_load_state_dict_post_hook(self._lift)

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError(
            f"the state of this {self._name} is spread over ranks since its plan was taken back: "
            "save a checkpoint (trainer.save_checkpoint, on all ranks), which has it in full, and "
            "let configure_optimizers make a new optimizer for the next fit"
        )

    def _lift(self, optimizer: Optimizer) -> None:
        self._hook.remove()
        vars(optimizer).pop("state_dict", None)


def refuse_state_dict(optimizer: Optimizer) -> None:
    """Let `state_dict` and `step` of an optimizer that has a part of its state say so.

    That part goes to host memory.
    """
    for values in optimizer.state.values():
        values.update({name: _to_host(value) for name, value in values.items()})
    optimizer.state_dict = _PartOfState(optimizer)  # type: ignore[method-assign]
