"""The step of an optimizer over sharded parameters (DTensors), on plain tensors.

    rule of the update    what a rank updates                   with
    elements              its shards                            `LocalStep`
    parameters            the parameters that it owns, in full  `ParallelStep` and `OwnedShards`

The update of a shard is the shard of the update where every element is updated by itself. The
optimizer then needs no DTensor at work: it is spared their dispatch (about 40 us per call on a
CPU). Parameters that are replicated, or sharded on different meshes, may be in one group, also for
its fused and foreach forms, which take tensors of one kind only.

A rule of full parameters (Muon) has one owner for each. Its gradient is gathered there, once, and
the new shards are sent from there. State is at the owner and never travels: kept in shards, its
momentum would travel to the owner and back in each step. Of P ranks a rank sends and receives
2 (P - 1) / P^2 of all bytes where the new parameter is a (1 - lr weight_decay) w + u, with u of the
gradients alone. Owners then send u; the shards are decayed where they are. Elsewhere (norms of w)
parameters are gathered with the gradients: 3 (P - 1) / P^2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_topt.communication.rank_watch import lost_peers
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.mapped_memory import NewStatesInFiles, in_file, is_in_file
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.update_rule import (
    ELEMENTWISE,
    UnsplittableOptimizer,
    is_one_of,
    updates_whole,
)

State = dict[str, Any]
# w <- (1 - lr weight_decay) w + u, where u does not depend on w
_DECAYED_APART: tuple[type[Optimizer], ...] = (
    (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
)


def install_local_step(optimizer: Optimizer) -> LocalStep | None:
    """Make ``optimizer.step`` update local tensors, where that is known to be the same.

    That needs DTensors among its parameters, and an optimizer known to update each element by
    itself. Any other optimizer is left as it is, and None returned. `LocalStep.detach` undoes it.
    """
    sharded = [p for p in parameters_of(optimizer) if isinstance(p, DTensor)]
    if not sharded or not is_one_of(optimizer, ELEMENTWISE):
        if any(is_in_file(_local(parameter)) for parameter in sharded):
            raise UnsplittableOptimizer(
                f"{type(optimizer).__name__} is not known to update elements one by one, so its "
                "state would stay in memory: leave '+offload' out of the plan"
            )
        return None
    move_states(optimizer)
    return LocalStep(optimizer)


def move_states(optimizer: Optimizer) -> None:
    """Let states of sharded parameters be in files where these are."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and is_in_file(_local(parameter)):
            for value in state.values():
                if isinstance(value, DTensor) and not is_in_file(value._local_tensor):
                    value._local_tensor = in_file(value._local_tensor)


def put_in_place(optimizer: Optimizer, **methods: Any) -> Callable[[], None]:
    """Give `optimizer` these methods; return what takes them away again.

    Whoever has wrapped one since calls through to it.
    """
    own = vars(optimizer)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)

    def restore() -> None:
        for name, method in methods.items():
            if own.get(name) is method:
                del own[name]
                own.update({name: before[name]} if name in before else {})

    return restore


class LocalStep:
    """Replaces ``optimizer.step`` by one that sees local tensors in place of DTensors.

    Outside of the update, parameters and their state are DTensors: for users, hooks of the
    optimizer and checkpoints.
    """

    # Learning-rate schedulers leave this mark on a step that they have wrapped.
    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step: Callable[..., Any] = optimizer.step
        self._restore = put_in_place(optimizer, step=self)
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        # the state of DTensors while the optimizer is at work
        self._outside: dict[Tensor, State] = {}
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._update = ExitStack()  # contexts of the update

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take one step; `closure` runs forward, backward and clipping on DTensors."""
        if closure is not None:
            kwargs["closure"] = closure
        try:
            with inside_hooks(self.optimizer, enter=self._enter, leave=self._leave):
                return self.step(**kwargs)
        finally:
            self._leave()

    def _enter(self) -> None:
        # Put the local tensors and their state in place of the DTensors
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            self._groups.append((group, group["params"]))
            group["params"] = [
                self._stand_in(p) if isinstance(p, DTensor) else p for p in group["params"]
            ]
        for parameter, key in self._stand_ins.items():
            # state follows its parameter: under the stand-in while the optimizer is at work
            self._outside[parameter] = state.pop(parameter, {})
            if self._outside[parameter]:
                state[key] = {
                    name: _local(value) for name, value in self._outside[parameter].items()
                }
        if any(key not in state and is_in_file(key) for key in self._stand_ins.values()):
            self._update.enter_context(NewStatesInFiles())  # type: ignore[no-untyped-call]

    def _stand_in(self, parameter: DTensor) -> nn.Parameter:
        # The parameter over the local tensor, with the local gradient
        local = _local(parameter)
        key = self._stand_ins.get(parameter)
        if key is None:
            key = self._stand_ins[parameter] = nn.Parameter(
                local, requires_grad=parameter.requires_grad
            )
        elif key.data_ptr() != local.data_ptr():  # the parameter has got other memory
            key.data = local
        key.requires_grad_(parameter.requires_grad)
        key.grad = None if parameter.grad is None else _local(parameter.grad)
        return key

    def _leave(self) -> None:
        # Put the DTensors back, with what the update has made of their state
        if not self._groups:  # the hooks have done it already
            return
        self._update.close()
        for group, parameters in self._groups:
            group["params"] = parameters
        state = self.optimizer.state
        for parameter, key in self._stand_ins.items():
            key.grad = None
            before = self._outside.pop(parameter, {})
            if key in state:
                state[parameter] = _as_shards(state.pop(key), before, parameter, key)
            elif before:
                state[parameter] = before
        self._groups = []
        # parameters have left the groups
        if len(self._stand_ins) > len(parameters_of(self.optimizer)):
            self._stand_ins = {
                p: key
                for p, key in self._stand_ins.items()
                if p in set(parameters_of(self.optimizer))
            }

    def detach(self) -> None:
        """Give the optimizer its own step again."""
        self._stand_ins.clear()
        self._restore()


def _local(value: object) -> Any:
    # This rank's shard of a DTensor, the same object each time; anything else as it is
    return value._local_tensor if isinstance(value, DTensor) else value


def _as_shards(local: State, before: State, parameter: Tensor, key: Tensor) -> State:
    # Return the `local` state of a shard as DTensors.
    # Those of `before` where their memory is still in use.
    assert isinstance(parameter, DTensor)

    def placed(name: str, value: object) -> Any:
        known = before.get(name)
        if not isinstance(value, Tensor) or not value.dim() or value.shape != key.shape:
            return value
        if isinstance(known, DTensor) and known._local_tensor is value:
            return known
        return as_dtensor(value, parameter)

    return {name: placed(name, value) for name, value in local.items()}


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Return `local` as this rank's shard of a tensor that is placed as `like` is."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def on_mesh(tensor: DTensor) -> DTensor:
    """Return `tensor`, which may be offloaded to the host, on the devices of its mesh."""
    local, kind = tensor._local_tensor, tensor.device_mesh.device_type
    return tensor if local.device.type == kind else as_dtensor(local.to(kind), tensor)


# ---- rules of full parameters: one owner for each


class OwnedShards:
    """Sharded parameters that are updated in full, each by its owner.

    `keys` stand for a rank's own ones in its optimizer. They have memory from `collect` to
    `send_back`, which are collective calls.

    Args:
        optimizer: whose step is shared.
        parameters: of the optimizer.
        pieces: all of a parameter each; those of other parameters than DTensors are left out.
        group: the ranks that owners are among; None: all. Meshes of shards are within it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.optimizer, self.group = optimizer, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = {
            piece: parameter
            for piece in sorted(pieces)
            if isinstance(parameter := parameters[piece.index], DTensor)
        }
        self.keys = {
            piece: nn.Parameter(_local(p).new_empty(0), requires_grad=p.requires_grad)
            for piece, p in self.parameters.items()
            if piece.owner == self.rank
        }
        self.sends_updates = sends_updates(optimizer)
        self._rows = {
            piece: _RowsOfRanks.of(p, owner=piece.owner, group=group)
            for piece, p in self.parameters.items()
        }
        self._active: list[Piece] = []

    @torch.no_grad()
    def collect(self) -> None:
        """Bring gradients, and parameters where the rule reads them, to the owners."""
        self._active = [piece for piece, p in self.parameters.items() if p.grad is not None]
        gradients = self._to_owners(lambda p: p.grad)
        values = {} if self.sends_updates else self._to_owners(lambda p: p)
        for piece, gradient in gradients.items():
            key = self.keys[piece]
            key.data = torch.zeros_like(gradient) if self.sends_updates else values[piece]
            key.grad = gradient

    @torch.no_grad()
    def send_back(self) -> None:
        """Send what became of the parameters to all ranks, each its rows."""
        shards = self._to_shards()
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for piece, rows in shards.items():
            parameter = self.parameters[piece]
            local, group = _local(parameter), groups[parameter]
            if self.sends_updates:
                local.mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(rows)
            else:
                local.copy_(rows)
        for key in self.keys.values():
            key.grad, key.data = None, key.new_empty(0)

    def _to_owners(self, part: Callable[[DTensor], Tensor | None]) -> dict[Piece, Tensor]:
        # ``part(parameter)`` of own pieces in full; every rank sends its rows
        sent: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        targets: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        full: dict[Piece, Tensor] = {}
        for piece in self._active:
            rows, local = self._rows[piece], _local(part(self.parameters[piece]))
            # of replicas of a shard, the one in the owner's row of the mesh is sent
            if self.rank in rows.beside_owner:
                sent[piece.owner].append(local)
            if piece.owner == self.rank:
                full[piece] = local.new_empty(self.parameters[piece].shape)
                for source in rows.beside_owner:
                    targets[source].append(full[piece][rows.by_rank[source]])
        self._exchange(sent, targets)
        return full

    def _to_shards(self) -> dict[Piece, Tensor]:
        # This rank's rows of every piece that was updated, from the owners
        sent: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        targets: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        shards = {}
        for piece in self._active:
            if piece.owner == self.rank:
                for rank, rows in enumerate(self._rows[piece].by_rank):
                    sent[rank].append(self.keys[piece].detach()[rows])
            shards[piece] = torch.empty_like(_local(self.parameters[piece]))
            targets[piece.owner].append(shards[piece])
        self._exchange(sent, targets)
        return shards

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]
    ) -> None:
        # Send tensors by destination, and fill `targets` by source, in one collective call
        if not self._active:
            return
        device = _local(self.parameters[self._active[0]]).device
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        # as bytes: dtypes travel together
        buffer = torch.cat([empty, *(_bytes(t.contiguous()) for of in sent for t in of)])
        sizes = [sum(t.nbytes for t in of) for of in targets]
        received = buffer.new_empty(sum(sizes))
        with lost_peers(f"rank {self.rank} cannot exchange its shards with owners of parameters"):
            dist.all_to_all_single(
                received,
                buffer,
                output_split_sizes=sizes,
                input_split_sizes=[sum(t.nbytes for t in of) for of in sent],
                group=self.group,
            )
        arriving = [t for of in targets for t in of]
        for target, part in zip(
            arriving, received.split([t.nbytes for t in arriving]), strict=True
        ):
            _bytes(target).copy_(part)


def sends_updates(optimizer: Optimizer) -> bool:
    """Return whether owners need no parameters: two exchanges in a step, in place of three."""
    return is_one_of(optimizer, _DECAYED_APART)


def count_exchanges(optimizer: Optimizer) -> int:
    """Return how often shards travel to or from owners in a step; 0: they have none."""
    if not updates_whole(optimizer):
        return 0
    return 2 if sends_updates(optimizer) else 3


class _RowsOfRanks(NamedTuple):
    # The rows of one parameter that each rank of a group has.

    by_rank: list[slice]
    beside_owner: list[int]  # ranks that have all rows together, the owner among them

    @classmethod
    def of(cls, parameter: DTensor, *, owner: int, group: dist.ProcessGroup | None) -> _RowsOfRanks:
        # FSDP2 shards rows along the last dim of its mesh, and replicates along the others
        *others, last = parameter.placements
        assert last.is_shard(0) and all(placement.is_replicate() for placement in others)
        ranks = parameter.device_mesh.mesh.reshape(-1, parameter.device_mesh.shape[-1]).tolist()
        known = dist.get_process_group_ranks(group or dist.group.WORLD)
        chunk = -(-parameter.shape[0] // len(ranks[0]))
        place = {rank: number for row in ranks for number, rank in enumerate(row)}
        starts = [min(place[rank] * chunk, parameter.shape[0]) for rank in known]
        (beside,) = [row for row in ranks if known[owner] in row]
        return cls(
            [slice(start, min(start + chunk, parameter.shape[0])) for start in starts],
            [known.index(rank) for rank in beside],
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# ---- around the update ---------------------------------------------------------------------------

# `LocalStep` and `ParallelStep` stand in place of the optimizer's own step. Hooks of the user see
# what they see around a plain step: groups and weights before forward and backward, and after the
# update.


@contextmanager
def inside_hooks(
    optimizer: Optimizer, *, enter: Callable[[], None], leave: Callable[[], None]
) -> Generator[None]:
    """In a step: hooks before it, its closure, `enter`, the update, `leave`, hooks after it.

    The update gets a closure that gives the loss, once.

    Raises:
        ValueError: where the update asks its closure again, and where hooks would run within the
            update once more, as a step that calls the step of its base class may make them.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
    name, hooks = type(optimizer).__name__, optimizer._optimizer_step_pre_hooks
    passed: dict[str, Any] = {}  # the keywords of the update, which hooks after it get too
    user_closure: Any = None

    def before_update(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal passed, user_closure
        optimizer._optimizer_step_pre_hooks = hooks  # torch goes through a copy: closures may add
        passed = kwargs  # the same of all that stand on this step, one in another
        user_closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if user_closure is not None:
            with torch.enable_grad():
                passed["closure"] = _closure_for_one_call(user_closure(), name=name)
        enter()
        return args[:1], passed

    def after_update(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs is passed:
            if user_closure is not None:
                passed["closure"] = user_closure
            leave()
        elif hooks or len(optimizer._optimizer_step_post_hooks) > 1:
            raise ValueError(
                f"{name} calls the step of its base class, within which its step hooks would see "
                "pieces of parameters: remove the hooks, or keep the step whole (plan='ddp', no "
                "ParallelOptimizerStep)"
            )

    last = id(before_update), before_update
    optimizer._optimizer_step_pre_hooks = OrderedDict([*hooks.items(), last])
    after = optimizer.register_step_post_hook(after_update)
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    post_hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = hooks
        after.remove()


def _closure_for_one_call(loss: object, *, name: str) -> Callable[[], Any]:
    # A closure that gives `loss`; it raises ValueError when it is called again
    was_called = False

    def closure() -> Any:
        nonlocal was_called
        if was_called:
            raise ValueError(
                f"{name} asks its closure again in one step, and this step is shared between "
                "ranks: keep it whole (plan='ddp', no ParallelOptimizerStep)"
            )
        was_called = True
        return loss

    return closure
