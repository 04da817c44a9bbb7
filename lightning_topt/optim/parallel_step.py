"""The parallel step: every rank updates its pieces of the parameters and receives the others.

Gradients are equal on all ranks (DDP), so an optimizer that sees this rank's pieces only does
exactly its share of the work and makes state for that share alone (Rajbhandari et al., arXiv
1910.02054, section 5.1, P_os; Xu et al., arXiv 2004.13336). The result equals the plain step for
every optimizer that treats each parameter by itself (uncut pieces), or each element (rows).

    step = install_parallel_step(optimizer, pieces=pieces, group=group)
    optimizer.step()                      # own pieces are updated, all are gathered
    optimizer.consolidate_state_dict()    # on all ranks; rank 0 then has the full state_dict
    step.remove()                         # the full state on every rank, the optimizer as it was

In a step, `PieceKeys` stand for the own pieces in the optimizer's groups; hooks of the user run
outside of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.communication.collectives import all_gather_into, backend_of, values_of_group
from lightning_topt.communication.rank_watch import lost_peers
from lightning_topt.optim.full_state import (
    State,
    check_cut_state,
    full_states,
    gather_state_dict,
    keep_own_state,
    laid_out,
    parameters_of,
)
from lightning_topt.optim.pieces import Piece, check_pieces, has_dense_rows, is_whole, rows_of
from lightning_topt.optim.shard_step import OwnedShards, inside_hooks, put_in_place

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows


def install_parallel_step(
    optimizer: Optimizer,
    *,
    pieces: Sequence[Piece],
    group: dist.ProcessGroup | None = None,
    node: NodeRows | None = None,
) -> ParallelStep:
    """Make ``optimizer.step`` update this rank's `pieces` and gather all of them.

    Collective call on `group`; `ParallelStep.remove` undoes it. State that the optimizer has is cut
    to the pieces. Saving needs ``optimizer.consolidate_state_dict()`` on all ranks first.

    Args:
        optimizer: the one whose step is split.
        pieces: of all ranks.
        group: the ranks; None: all.
        node: the ranks of `group` where they share a machine: parameters on the CPU are then
            gathered through its memory.

    Raises:
        ValueError: for pieces that do not cover their parameters, when ranks disagree, and for an
            optimizer that is sharded already.
    """
    return ParallelStep(optimizer, pieces=pieces, group=group, node=node)


class ParallelStep:
    """Replaces ``optimizer.step`` by one that updates this rank's pieces and gathers all of them.

    Parameters without a piece are updated on every rank. Parameters without a gradient are not
    sent. Hooks before the step run before its closure, and hooks after it see full groups, gathered
    parameters and full gradients; the state that they see is that of this rank's pieces.
    """

    # Learning-rate schedulers leave this mark on a step that they have wrapped.
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        pieces: Sequence[Piece],
        group: dist.ProcessGroup | None = None,
        node: NodeRows | None = None,
    ) -> None:
        check_can_be_split(optimizer)
        self.optimizer, self.group, self.node = optimizer, group, node
        self.rank = dist.get_rank(group)
        self.step: Callable[..., Any] = optimizer.step
        self.active: list[int] = []  # parameters that had a gradient in the last step
        self._removed = False
        self._consolidated: State | None = None
        self._checked_state = False
        self._narrowed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._use(pieces)
        self._restore = put_in_place(
            optimizer,
            step=self,
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
            consolidate_state_dict=self.consolidate_state_dict,
        )

    def _use(self, pieces: Sequence[Piece]) -> None:
        # Make the keys of own pieces and drop the state that other ranks keep
        parameters = parameters_of(self.optimizer)
        check_agreement(parameters, pieces, group=self.group)
        check_pieces(pieces, parameters, world_size=dist.get_world_size(self.group))
        self.parameters, self.pieces = parameters, sorted(pieces)
        # what stands for own pieces in the optimizer
        self._shards = OwnedShards(self.optimizer, parameters, self.pieces, group=self.group)
        self.own = PieceKeys(parameters, self.pieces, rank=self.rank, of_shards=self._shards.keys)
        self._gather = PieceGather(parameters, self.pieces, group=self.group, node=self.node)
        keep_own_state(self.optimizer, self.pieces, keys=self.own.keys)
        self._consolidated, self._checked_state = None, False

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take one step; `closure` runs forward, backward and clipping on full gradients.

        Raises:
            PeerLostError: when a rank is gone or late beyond the timeout of the group.
            ValueError: for sparse gradients of parameters that are cut into rows, and as
                `inside_hooks`.
        """
        if closure is not None:
            kwargs["closure"] = closure
        try:  # hooks of the user, closure, narrow groups, update, full groups, gather, hooks again
            with inside_hooks(self.optimizer, enter=self._narrow, leave=self._leave):
                return self.step(**kwargs)
        finally:
            self._widen()

    def _leave(self) -> None:
        self._widen()
        if not self._checked_state:  # after the first step there is state to look at
            check_cut_state(self.optimizer, keys=self._current_keys())
            self._checked_state = True
        self.gather()

    def _narrow(self) -> None:
        # Leave only the own pieces in the groups, with their rows of the gradients
        self._consolidated = None
        self.active = [
            index for index, parameter in enumerate(self.parameters) if parameter.grad is not None
        ]
        self._shards.collect()
        self.own.refresh()
        for group in self.optimizer.param_groups:
            names = group.get("param_names")
            self._narrowed.append(
                (group, {"params": group["params"]} | ({"param_names": names} if names else {}))
            )
            kept = [
                self.own.of_parameter.get(parameter, [parameter]) for parameter in group["params"]
            ]
            group["params"] = [key for keys in kept for key in keys]
            if names:
                group["param_names"] = [
                    name for name, keys in zip(names, kept, strict=True) for _ in keys
                ]

    def _widen(self) -> None:
        # Give the groups all their parameters again; does nothing the second time
        for group, entries in self._narrowed:
            group.update(entries)
        if self._narrowed:
            self.own.drop_gradients()
        self._narrowed = []

    def gather(self) -> None:
        """Send what had a gradient, and wait until all has arrived; shards go to their ranks."""
        sharded = {piece.index for piece in self._shards.parameters}
        pending = self._gather.start([index for index in self.active if index not in sharded])
        self._shards.send_back()
        pending.wait()

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Count the parameters that `replaced` has in the place of those so far, once detached."""
        assert self._removed, "keys and messages are of the parameters so far"
        self.parameters = [replaced.get(parameter, parameter) for parameter in self.parameters]

    def current_pieces(self) -> list[Piece]:
        """Return the pieces, counted as the optimizer counts its parameters now.

        Groups may have grown since the pieces were made.
        """
        return list(self._counted_now().values())

    def _current_keys(self) -> Mapping[Piece, Tensor]:
        now = self._counted_now()
        return {now[piece]: key for piece, key in self.own.keys.items() if piece in now}

    def _counted_now(self) -> dict[Piece, Piece]:
        # Map each piece to itself with the index that its parameter has now
        now = {parameter: index for index, parameter in enumerate(parameters_of(self.optimizer))}
        kept = [piece for piece in self.pieces if self.parameters[piece.index] in now]
        return {piece: replace(piece, index=now[self.parameters[piece.index]]) for piece in kept}

    def update_pieces(self, pieces: Sequence[Piece]) -> None:
        """Move the state to the owners of `pieces`, which count the parameters as they are now.

        Collective call. Raises ValueError as `check_pieces` does, and when ranks disagree.
        """
        check_pieces(
            pieces, parameters_of(self.optimizer), world_size=dist.get_world_size(self.group)
        )
        old, keys, parameters = (
            self.current_pieces(),
            self._current_keys(),
            parameters_of(self.optimizer),
        )
        for index, state in full_states(self.optimizer, old, keys=keys, group=self.group):
            for piece, key in keys.items():
                if piece.index == index:
                    self.optimizer.state.pop(key, None)
            mine = any(piece.index == index and piece.owner == self.rank for piece in pieces)
            # owners, and everybody where the parameter is not split any more
            if mine or all(piece.index != index for piece in pieces):
                self.optimizer.state[parameters[index]] = state
        self._use(pieces)

    def own_states(self) -> dict[Piece, State]:
        """Return the states of this rank's pieces, in the optimizer's memory.

        The pieces count parameters as the groups do now.
        """
        state = self.optimizer.state
        return {
            piece: dict(state[key]) for piece, key in self._current_keys().items() if key in state
        }

    def consolidate_state_dict(self) -> None:
        """Bring the full state to rank 0 of the group, for its next `state_dict`.

        Collective call.
        """
        self._consolidated = gather_state_dict(
            self.optimizer, self.current_pieces(), keys=self._current_keys(), group=self.group
        )

    def state_dict(self) -> State:
        """Return the unsharded optimizer's ``state_dict``, in CPU memory.

        Only on rank 0, and only after `consolidate_state_dict`. Raises RuntimeError elsewhere.
        """
        if self._removed and not self.pieces:
            return type(self.optimizer).state_dict(self.optimizer)
        if not self._consolidated:
            raise RuntimeError(
                "the state of this optimizer is spread over ranks: call "
                "optimizer.consolidate_state_dict() on all ranks after the last step, then "
                "optimizer.state_dict() on rank 0"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: State) -> None:
        """Load a full state, the same on all ranks; each keeps its part."""
        self._consolidated = None
        pieces, keys = self.current_pieces(), self._current_keys()
        own = {piece.index for piece in keys}
        of_others = {piece.index for piece in pieces} - own
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        dropped = {saved for index, saved in enumerate(indices) if index in of_others}
        kept = {
            index: state for index, state in state_dict["state"].items() if index not in dropped
        }
        type(self.optimizer).load_state_dict(self.optimizer, {**state_dict, "state": kept})
        keep_own_state(self.optimizer, pieces, keys=keys)

    def remove(self) -> None:
        """Give every rank the full state, and the optimizer its own methods again.

        Collective call.
        """
        self.update_pieces([])
        self.detach()

    def detach(self) -> None:
        """Give the optimizer its own methods again and leave its state in pieces.

        `consolidate_state_dict` still gathers it.
        """
        self._removed = True
        self._restore()


# ---- What stands for own pieces in the optimizer


class PieceKeys:
    """The tensors that stand for a rank's own pieces in its optimizer, by piece: `keys`.

    A key is a view of the rows. Rows that are scattered in memory (of transposed weights) are not
    cut: fused kernels take the strides of states for those of their parameters.

    `of_shards` are the keys of own parameters that are in shards, and filled by `OwnedShards`.
    `of_parameter` has, for each parameter with pieces, the keys that stand for it on this rank:
    none where others own it all.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        rank: int,
        of_shards: Mapping[Piece, Tensor],
    ) -> None:
        self.parameters, self._of_shards = parameters, of_shards
        self.keys: dict[Piece, Tensor] = {}
        self.of_parameter: dict[Tensor, list[Tensor]] = {
            parameters[piece.index]: [] for piece in pieces
        }
        for piece in pieces:
            of = parameters[piece.index]
            if not is_whole(piece, of) and not has_dense_rows(of):
                raise ValueError(
                    f"rows of parameter {piece.index} are scattered in memory, as of a transposed "
                    "one: give it to one rank as a whole"
                )
            if piece.owner == rank:
                key = self.keys[piece] = self._key(piece)
                self.of_parameter[parameters[piece.index]].append(key)

    def _key(self, piece: Piece) -> Tensor:
        if piece in self._of_shards:
            return self._of_shards[piece]
        parameter = self.parameters[piece.index]
        if is_whole(piece, parameter):
            return parameter
        return nn.Parameter(rows_of(parameter, piece), requires_grad=parameter.requires_grad)

    def refresh(self) -> None:
        """Follow what others did to the parameters since the last step.

        They may have new memory, new values and new gradients. Raises ValueError for the sparse
        gradient of a parameter that is cut into rows.
        """
        for piece, key in self.keys.items():
            if key is not self.parameters[piece.index] and piece not in self._of_shards:
                self._refresh(piece, key)

    def _refresh(self, piece: Piece, key: Tensor) -> None:
        parameter = self.parameters[piece.index]
        rows = rows_of(parameter, piece)
        if key.data_ptr() != rows.data_ptr():
            key.data = rows
        key.requires_grad_(parameter.requires_grad)
        if (
            parameter.grad is not None
            and parameter.grad.is_sparse
            and not is_whole(piece, parameter)
        ):
            raise ValueError(
                f"parameter {piece.index} is cut into rows and has a sparse gradient; update it "
                "whole"
            )
        key.grad = None if parameter.grad is None else laid_out(rows_of(parameter.grad, piece), key)

    def drop_gradients(self) -> None:
        """Let go of the gradients that `refresh` has given the keys."""
        for piece, key in self.keys.items():
            if key is not self.parameters[piece.index]:
                key.grad = None


# ---- Checks before a step is split


def check_can_be_split(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step cannot be split between ranks.

    That is one that is sharded already, moves parameters outside of its step, has no hooks around
    its step, or has a parameter twice.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ValueError(f"{name} shards its state already; use one way of sharding")
    if not getattr(type(optimizer).step, "hooked", False) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        raise ValueError(
            f"{name} does not call torch.optim.Optimizer.__init__; a parallel step needs its step "
            "hooks"
        )
    # schedule-free ones
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{name} moves parameters in train() and eval() by states that only one rank would "
            "have: keep its state whole (plan='ddp', no ParallelOptimizerStep)"
        )
    parameters = parameters_of(optimizer)
    if len(set(parameters)) != len(parameters):
        raise ValueError(f"{name} has a parameter twice; leave the second one out of its groups")


def check_agreement(
    parameters: Sequence[Tensor], pieces: Sequence[Piece], *, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ValueError, on all ranks, that names the first difference from rank 0.

    Collective call.
    """
    own = [f"parameter {i}: {p.dtype} {tuple(p.shape)}" for i, p in enumerate(parameters)]
    own = [f"{len(own)} parameters", *own, f"{len(pieces)} pieces", *map(str, sorted(pieces))]
    everyone = values_of_group(own, group)
    for rank, theirs in enumerate(everyone):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first != other:
                raise ValueError(
                    f"ranks disagree on what is split: rank 0 has {first}, rank {rank} has {other}"
                )


# ---- sending updated rows ------------------------------------------------------------------------

# On NCCL the shares of all owners travel by all-gathers, in flat buckets padded to one size; two
# are in flight. Where shares are too different, and on gloo, where a broadcast per owner is faster
# than its all-gather (`communication.collectives`), a large piece is broadcast in place, and small
# ones of one owner travel together in packs. All of these are under way at once, and owners
# alternate, so that links carry both directions. CPU ranks of one node read each other's memory
# instead (`communication.node.rows`).


# below this, a broadcast costs latency rather than bandwidth: such pieces travel together
SMALL_BYTES = 1 << 20
# small pieces travel in packs of about this size: packing one overlaps with sending another
PACK_BYTES = 8 << 20
MOST_PADDED = 1.25  # bytes of buckets, to those of the pieces in them
BUCKET_BYTES = 128 << 20  # of all ranks at most: two buckets live at once, on every device


def share_bytes(ranks: int) -> int:
    """Return the most bytes that one of `ranks` owners has in a bucket, but for a larger row."""
    return min(PACK_BYTES, BUCKET_BYTES // ranks)


class PieceGather:
    """Sends the rows of every piece from its owner to the other ranks of `group`.

    Buffers for what is packed live from `start` to `wait`: kept, they would be as large as all
    small parameters.

    Args:
        parameters: those of one optimizer.
        pieces: of all ranks. Raises ValueError where they do not cover their parameters.
        group: the ranks; None: all.
        node: the ranks of `group` through memory, for parameters on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        group: dist.ProcessGroup | None = None,
        node: NodeRows | None = None,
    ) -> None:
        check_pieces(pieces, parameters, world_size=dist.get_world_size(group))
        self.parameters, self.pieces = list(parameters), sorted(pieces)
        self.group, self.node = group, node
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._gathers_all = node is None and backend_of(device, group) != "gloo"
        self._planned_for: Any = ()
        self._plan: list[list[Piece]] = []
        self._buckets: list[Sequence[list[Piece]]] = []  # each by owner

    @torch.no_grad()
    def start(self, indices: Collection[int] | None = None) -> PendingGather:
        """Begin to send the pieces of the parameters `indices` (default: of all).

        The same ones on all ranks.
        """
        messages = [_Message.of(pieces, self.parameters) for pieces in self._planned(indices)]
        pending = PendingGather(rank=self.rank)
        # the copies out of a bucket cover the way of the next one
        for bucket in self._buckets:
            pending.add(*self._gather_all(bucket))
            pending.wait(but=1)
        # all messages are under way before the first one is waited for
        works = self._read_from_memory(messages) if self.node else map(self._broadcast, messages)
        for message, work in zip(messages, works, strict=True):
            pending.add(message, work)
        return pending

    def gather(self, indices: Collection[int] | None = None) -> None:
        """Send the pieces and wait until all have arrived."""
        self.start(indices).wait()

    def _gather_all(self, bucket: Sequence[Sequence[Piece]]) -> tuple[_Message, Any]:
        # Begin one all-gather of the rows of all owners
        rows = [[rows_of(self.parameters[p.index], p) for p in of_owner] for of_owner in bucket]
        numels = [[part.numel() for part in of_owner] for of_owner in rows]
        like = next(chain.from_iterable(rows))
        # (ranks, elements of the largest share)
        flat = like.new_empty((self.world_size, max(map(sum, numels))))
        parts = [
            [part.view(r.shape) for part, r in zip(of[: sum(ns)].split(ns), rs, strict=True)]
            for of, ns, rs in zip(flat, numels, rows, strict=True)
        ]
        if rows[self.rank]:
            torch._foreach_copy_(parts[self.rank], rows[self.rank])
        rows[self.rank], parts[self.rank] = [], []  # which are there
        as_bytes = flat.view(torch.uint8)  # backends do not know all dtypes
        work = self._begin(all_gather_into, as_bytes.view(-1), as_bytes[self.rank])
        return _Message(-1, [*chain(*rows)], flat, [*chain(*parts)]), work

    def _broadcast(self, message: _Message) -> Any:
        if message.owner == self.rank:
            message.fill()
        return self._begin(dist.broadcast, message.buffer, group_src=message.owner)

    def _begin(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with lost_peers(f"rank {self.rank} cannot reach the other ranks of its group"):
            return collective(*args, group=self.group, async_op=True, **options)

    def _read_from_memory(self, messages: Sequence[_Message]) -> list[Any]:
        # one operation, which all messages wait for
        assert self.node is not None
        parts: dict[int, list[Tensor]] = {}
        for message in messages:
            if message.owner == self.rank:
                message.fill()
            parts.setdefault(message.owner, []).append(message.buffer)
        return [self.node.gather_rows(parts)] * len(messages) if messages else []

    def _planned(self, indices: Collection[int] | None) -> list[list[Piece]]:
        # The pieces of each message. They are planned again when other parameters are sent.
        chosen = None if indices is None else frozenset(indices)
        if self._planned_for != chosen:
            pieces = [piece for piece in self.pieces if chosen is None or piece.index in chosen]
            self._buckets = []
            if self._gathers_all:
                pieces = self._fill_buckets(pieces)
            by_owner: dict[int, list[list[Piece]]] = {}
            for together in packed(pieces, self.parameters):
                by_owner.setdefault(together[0].owner, []).append(together)
            # the owners in alternation, so that links carry both directions
            alternating = zip_longest(*(by_owner[owner] for owner in sorted(by_owner)))
            self._planned_for = chosen
            self._plan = [each for each in chain.from_iterable(alternating) if each is not None]
        return self._plan

    def _fill_buckets(self, pieces: Sequence[Piece]) -> list[Piece]:
        # Plan all-gathers; return the pieces whose owners' shares are too different for them
        kinds: dict[Any, list[list[Piece]]] = {}
        for piece in pieces:
            of = self.parameters[piece.index]
            shares = kinds.setdefault((of.dtype, of.device), [[] for _ in range(self.world_size)])
            shares[piece.owner].append(piece)
        left: list[Piece] = []
        for shares in kinds.values():
            buckets = list(zip_longest(*map(self._cut, shares), fillvalue=[]))
            sizes = [[sum(map(self._bytes, of)) for of in bucket] for bucket in buckets]
            padded = self.world_size * sum(map(max, sizes))
            if padded <= max(MOST_PADDED * sum(map(sum, sizes)), SMALL_BYTES):
                self._buckets += buckets
            else:
                left += chain(*shares)
        return left

    def _bytes(self, piece: Piece) -> int:
        return rows_of(self.parameters[piece.index], piece).nbytes

    def _cut(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        # Yield runs of rows of one owner
        most = share_bytes(self.world_size)
        pack, room = list[Piece](), most
        for piece in filter(self._bytes, pieces):
            start, per_row = piece.start, self._bytes(piece) // (piece.stop - piece.start)
            while start < piece.stop:
                if pack and room < per_row:
                    yield pack
                    pack, room = [], most
                stop = min(piece.stop, start + max(1, room // per_row))
                pack.append(replace(piece, start=start, stop=stop))
                start, room = stop, room - per_row * (stop - start)
        if pack:
            yield pack


class PendingGather:
    """A gather under way; `wait` until the parameters hold the owners' values."""

    def __init__(self, *, rank: int) -> None:
        self._messages: list[tuple[_Message, Any]] = []
        self._rank = rank

    def add(self, message: _Message, work: Any) -> None:
        """Wait for this one too."""
        self._messages.append((message, work))

    @torch.no_grad()
    def wait(self, *, but: int = 0) -> None:
        """Block until all rows are here, `but` those of the last messages; again: at once.

        Raises PeerLostError when a rank is gone or late beyond the timeout of the group.
        """
        while len(self._messages) > but:
            message, work = self._messages.pop(0)
            who = f"rank {message.owner} of its group" if message.owner >= 0 else "the others"
            with lost_peers(f"rank {self._rank} did not receive what {who} updated"):
                work.wait()
            if message.parts and message.owner != self._rank:
                torch._foreach_copy_(message.rows, message.parts)


def packed(pieces: Sequence[Piece], parameters: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Yield the pieces of each message: large ones alone, small ones of one owner together.

    Small ones of a message have one dtype and one device.
    """
    packs: dict[tuple[Any, ...], list[list[Piece]]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    for piece in pieces:
        rows = rows_of(parameters[piece.index], piece)
        size, kind = rows.nbytes, (piece.owner, rows.dtype, rows.device)
        if size >= SMALL_BYTES:
            yield [piece]
        elif size:
            if filled.get(kind, PACK_BYTES) + size > PACK_BYTES:
                packs.setdefault(kind, []).append([])
                filled[kind] = 0
            packs[kind][-1].append(piece)
            filled[kind] += size
    for of_kind in packs.values():
        yield from of_kind


@dataclass(frozen=True)
class _Message:
    # One broadcast: `buffer` is the memory of its only piece, or `parts` are views into it. Or one
    # all-gather, of no `owner` (-1).

    owner: int
    rows: list[Tensor]
    buffer: Tensor
    parts: list[Tensor] | None

    @classmethod
    def of(cls, pieces: list[Piece], parameters: Sequence[Tensor]) -> _Message:
        rows = [rows_of(parameters[piece.index], piece) for piece in pieces]
        # in place: a single contiguous piece
        if len(rows) == 1 and rows[0].is_contiguous():
            return cls(pieces[0].owner, rows, rows[0].view(-1), None)
        # else through a buffer, of which each piece has a view
        buffer = torch.empty(
            sum(part.numel() for part in rows), dtype=rows[0].dtype, device=rows[0].device
        )
        split = buffer.split([part.numel() for part in rows])
        parts = [part.view(own.shape) for part, own in zip(split, rows, strict=True)]
        return cls(pieces[0].owner, rows, buffer, parts)

    def fill(self) -> None:
        # what the owner sends
        if self.parts is not None:
            torch._foreach_copy_(self.parts, self.rows)
