"""Blocks that ranks call in shards: the same on all ranks, or agreed on before each is gathered.

FSDP2 has three collective calls for a block: it gathers parameters before forward, at level 3 once
more before backward, and reduces gradients afterwards. All ranks have to make the same calls in the
same order. They do not where a batch decides which modules run: images in some batches, experts
without tokens, layers that are dropped, a head for some steps.

`CalledBlocks` notes the calls of this rank. Once per step, before the update, ranks compare a hash
of them: blocks of equal size would be mixed up in silence. Where sizes differ the backend ends a
process or waits until its limit; the error then says what this rank called last.

`AgreedGathers` lets ranks differ (``find_unused_parameters=True``). A rank announces each call, as
a number, and learns the smallest number of all ranks. All take part in the call that this one
means. A rank that has no use for it drops what it gathers, or reduces zeros. They announce again
until each has been served, so that no order of calls can hang. With n blocks:

    number            is announced by a rank that
    b                 gathers block b in forward
    n + (n - 1 - b)   gathers block b in backward, which runs from the last block to the first
    2n + (n - 1 - b)  reduces the gradients of block b
    3n                comes to a collective call of Lightning in the step (`meet`)
    3n + 1            ends its step, and had a gradient for all that it reduced
    3n + 2            ends its step

Gathers come before reductions: a rank that has skipped a block waits for nobody's gradients. A step
is over when all ranks have ended it. Then parameters that no rank has used lose the zeros that were
reduced for them, so that optimizers leave them out, as under ddp. Which these are takes one more
all-reduce, unless a rank has used all that was reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_topt.communication.collectives import HostCopy, travel_device, values_of_group
from lightning_topt.communication.rank_watch import is_of_collective, lost_peers
from lightning_topt.graph.errors import PlanError

_WAY_OUT = "give the strategy find_unused_parameters=True"
_GROUP_STATE = ("_training_state", "_sharded_state", "_all_gather_result", "reshard_after_backward")

_Call = tuple[int, ...]  # a block that is gathered, or (block, -1, parameters without gradients)


class CalledBlocks:
    """Notes which blocks this rank gathers and reduces, and compares that over ranks in each step.

    On backends that send nothing from the host, a step is compared when the next one is over: the
    host would wait for the device. Those ranks notice after the update, and not in the last step.

    Args:
        names: of all blocks, in the order of the module, alike on all ranks.
        group: the ranks that split the batch; None: all.
        is_manual: backward passes run inside of the root's forward; all ranks run as many.
    """

    def __init__(
        self, names: Iterable[str], group: dist.ProcessGroup | None, *, is_manual: bool = False
    ) -> None:
        self.names = tuple(dict.fromkeys([*names, ""]))
        self.blocks: list[SentBlock] = []
        self.runs_root = self.in_step = False
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self._is_manual = is_manual
        self._calls: list[_Call] = []
        # where they are compared, and the step that is not yet
        self._device = travel_device(group)
        self._last: tuple[list[_Call], int, HostCopy] | None = None

    def follow(self, name: str, block: nn.Module) -> None:
        """Follow what FSDP2, which has taken `block`, sends for it."""
        assert isinstance(block, FSDPModule)
        state: Any = block._get_fsdp_state()
        self.blocks += [
            SentBlock(self.names.index(name), group, self) for group in state._fsdp_param_groups
        ]
        # FSDP2 queues that of the state to which the first gradient comes
        own = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = partial(self.end_backward, own)

    def follow_root(self, root: nn.Module) -> list[RemovableHandle]:
        """Follow the root, which is called once per step; return the hooks."""
        self.follow("", root)
        return [
            root.register_forward_pre_hook(self._begin, prepend=True),
            root.register_forward_hook(self._end_forward),  # after FSDP2's
        ]

    def _begin(self, *_: Any) -> None:
        self.runs_root = self.in_step = True

    def _end_forward(self, *_: Any) -> None:
        self.runs_root = False
        if not torch.is_grad_enabled():
            self.end_step()

    # ---- calls; `AgreedGathers` does them in other ways ------------------------------------------

    def gather(self, block: SentBlock, async_op: bool = False) -> None:
        """Gather the parameters of `block`, unless they are, or FSDP2 has begun to."""
        if block.is_gathered:
            return
        self._calls.append((block.index,))
        with self._named():
            block.gather(async_op)

    def reduce(self, block: SentBlock, *unused: Any) -> None:
        """Reduce the gradients that `block` has on this rank."""
        trained = block.trained()
        without = [index for index, p in enumerate(trained) if not has_gradient(p)]
        if len(without) < len(trained):
            self._calls.append((block.index, -1, *without))
        with self._named():
            block.reduce(*unused)

    def end_backward(self, finish: Callable[[], None]) -> None:
        """Let FSDP2 `finish` a backward pass, and compare.

        Passes within the step, as for gradients of inputs, may be of some ranks alone.
        """
        finish()
        if self._is_manual or not self.runs_root:
            self.end_step()

    def end_step(self) -> None:
        """Compare the calls since the last step. Raises PlanError where they differ."""
        calls, self._calls = self._calls, []
        number, on_host = hash(tuple(calls)) >> 20, self._device.type == "cpu"  # of numbers alone
        numbers = torch.tensor([number], pin_memory=not on_host)
        numbers = numbers.to(self._device, non_blocking=True)
        dist.all_reduce(numbers, group=self.group)  # one number goes in half the time of two
        # A device answers later; its answer of the step before is there.
        this = calls, len(self.ranks) * number, HostCopy(numbers)
        last, self._last = (this, None) if on_host else (self._last, this)
        if last is not None and last[2].result() != [last[1]]:
            self._check(values_of_group(last[0], self.group))

    def meet(self) -> None:
        """Get ready for a collective call that all ranks make in the step."""

    # ---- errors ----------------------------------------------------------------------------------

    def _check(self, everyone: Sequence[list[_Call]]) -> None:
        # Raise PlanError where ranks, in the order of the group, have made other calls
        for calls in itertools.zip_longest(*everyone):
            first = {call: rank for rank, call in reversed([*zip(self.ranks, calls, strict=True)])}
            if len(first) > 1:
                said = {rank: self._described(call) for call, rank in first.items()}
                raise PlanError(_different(dict(sorted(said.items()))))

    def shown(self, index: int) -> str:
        """Return the name of a block, in messages."""
        return repr(self.names[index]) if self.names[index] else "what is in no block"

    def _described(self, call: _Call | None) -> str:
        if call is None:
            return "calls no further block"
        name = self.shown(call[0])
        if len(call) == 1:
            return f"gathers {name}"
        params = next(b for b in self.blocks if b.index == call[0]).trained()
        lacking = [repr(params[index]._param_fqn) for index in call[2:]]
        return f"reduces {name}" + (f" without {', '.join(lacking[:3])}" if lacking else "")

    @contextmanager
    def _named(self) -> Generator[None]:
        # Let an error of a collective call say what this rank called last
        try:
            yield
        except RuntimeError as error:
            if is_of_collective(error):
                last = ", ".join(map(self._described, self._calls[-4:]))
                what = f"this rank {last}; where others call other modules, {_WAY_OUT}"
                error.args = (f"{error} ({what})",)
            raise


def _different(said: dict[int, str]) -> str:
    calls = ", ".join(f"rank {rank} {what}" for rank, what in said.items())
    return f"ranks call different modules in one step, or in another order ({calls}): {_WAY_OUT}"


class AgreedGathers(CalledBlocks):
    """Lets ranks call different blocks: all take part in what any of them gathers or reduces.

    Args:
        names: of all blocks, in the order of the module, alike on all ranks.
        group: the ranks that split the batch, in a group of gloo for nothing else.
    """

    def __init__(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        super().__init__(names, group)
        self._number = torch.zeros(1, dtype=torch.int64)
        self._count = len(self.names)
        # parameters with a gradient on this rank, and those whose gradient began as zeros here
        self._used: set[Any] = set()
        self._filled: set[Any] = set()

    # ---- what this rank wants --------------------------------------------------------------------

    @override
    def gather(self, block: SentBlock, async_op: bool = False) -> None:
        if block.is_gathered:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        self._agree(2 * self._count - 1 - block.index if in_backward else block.index)
        block.gather(async_op)

    @override
    def reduce(self, block: SentBlock, *unused: Any) -> None:
        trained = block.trained()
        used = [param for param in trained if has_gradient(param)]
        # what groups of ranks have added up so far goes between them in the last pass
        is_sent = bool(used) or (block.is_partly_reduced and block.group.all_reduce_grads)
        if is_sent:
            self._agree(3 * self._count - 1 - block.index)
        self._used.update(used)
        zeros = [param for param in trained if is_sent and not has_gradient(param)]
        with self._zeros(block, zeros):
            block.reduce(*unused)

    @override
    def end_backward(self, finish: Callable[[], None]) -> None:
        if not self.runs_root:
            # those to whose inputs no gradient came, as FSDP2 would do after the end
            for block in reversed(self.blocks):
                if block.group._training_state != TrainingState.POST_BACKWARD:
                    block.group.post_backward()
            self.end_step()
        finish()

    @override
    def end_step(self) -> None:
        end = 3 * self._count + 1
        if self._agree(end + bool(self._filled)) > end:
            self._drop_zeros()
        # those that are partly reduced have their gradients in a later pass
        later = {p for b in self.blocks if b.is_partly_reduced for p in b.group.fsdp_params}
        self._used &= later
        self._filled &= later
        self.in_step = False

    @override
    def meet(self) -> None:
        if self.in_step:
            self._agree(3 * self._count)

    # ---- what all do -----------------------------------------------------------------------------

    def _agree(self, wish: int) -> int:
        # Take part in what other ranks want until it is this rank's turn; return the least wish
        end = 3 * self._count + 1
        while (least := self._least(wish)) < min(wish, end):
            self._take_part(least)
        return least

    def _least(self, wish: int) -> int:
        self._number[0] = wish
        with lost_peers(f"rank {dist.get_rank()} waits to {self._meaning(wish)} with all ranks"):
            dist.all_reduce(self._number, dist.ReduceOp.MIN, self.group)
        return int(self._number)

    def _meaning(self, number: int) -> str:
        kind, place = divmod(number, self._count)
        if kind > 2:
            return "make a collective call of Lightning" if place == 0 else "end the step"
        index = place if kind == 0 else self._count - 1 - place
        return f"{'reduce' if kind == 2 else 'gather'} {self.shown(index)}"

    def _take_part(self, number: int) -> None:
        # Take part in a call that this rank does not want now; what it has of the block stays
        kind, place = divmod(number, self._count)
        if kind > 2:
            raise PlanError(
                f"rank {dist.get_rank()} is at the end of its step, where other ranks make a "
                "collective call (self.log(..., sync_dist=True), self.all_gather): let all ranks "
                "make it in each step"
            )
        index = place if kind == 0 else self._count - 1 - place
        block = next(block for block in self.blocks if block.index == index)
        with block.set_aside():
            if kind == 2:
                with self._zeros(block, block.trained()):
                    block.reduce()
            else:
                block.gather_in_vain()

    @contextmanager
    def _zeros(self, block: SentBlock, params: Sequence[Any]) -> Generator[None]:
        # Let these of the block have gradients that are zero
        never_gathered = [param for param in params if not hasattr(param, "_unsharded_param")]
        for param in never_gathered:
            param._unsharded_param = nn.Parameter(torch.empty(0, device=block.group.device))
        for param in params:
            if param.sharded_param.grad is None:
                self._filled.add(param)
            param.unsharded_accumulated_grad = torch.zeros(
                param._orig_size, dtype=param.orig_dtype, device=block.group.device
            )
        yield
        for param in never_gathered:
            del param._unsharded_param

    def _drop_zeros(self) -> None:
        # Take away gradients that are zeros of all ranks
        params = [param for block in self.blocks for param in block.group.fsdp_params]
        used = torch.tensor([param in self._used for param in params], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, self.group)
        for param, is_used in zip(params, used.tolist(), strict=True):
            if not is_used and param in self._filled:
                param.sharded_param.grad = None


class SentBlock:
    """What FSDP2 gathers and reduces together; `calls` decides how, in the place of its methods.

    Args:
        index: of the block.
        group: torch's ``FSDPParamGroup`` of it.
        calls: those of all blocks.
    """

    def __init__(self, index: int, group: Any, calls: CalledBlocks) -> None:
        self.index, self.group = index, group
        self.gather, self.reduce = group.unshard, group.post_backward
        group.unshard, group.post_backward = (
            partial(calls.gather, self),
            partial(calls.reduce, self),
        )

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters are there, or on their way."""
        return self.group._all_gather_result is not None or self.group.is_unsharded

    @property
    def is_partly_reduced(self) -> bool:
        """Whether gradients were reduced inside of groups of ranks, and not yet between them."""
        return self.group._partial_reduce_output is not None

    def trained(self) -> list[Any]:
        """Return what FSDP2 knows of each of its parameters that is trained."""
        return [param for param in self.group.fsdp_params if param.sharded_param.requires_grad]

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Let the group look as on a rank that has not used it; what is there comes back."""
        group, known = self.group, {name: getattr(self.group, name) for name in _GROUP_STATE}
        params = [
            (param, param.sharded_state, param.unsharded_accumulated_grad, _unsharded_grad(param))
            for param in group.fsdp_params
        ]
        group._sharded_state, group._all_gather_result = ShardedState.SHARDED, None
        group.reshard_after_backward = False
        for param, _, _, gradient in params:
            param.sharded_state, param.unsharded_accumulated_grad = ShardedState.SHARDED, None
            if gradient is not None:
                param._unsharded_param.grad = None
        yield
        vars(group).update(known)
        for param, state, accumulated, gradient in params:
            param.sharded_state, param.unsharded_accumulated_grad = state, accumulated
            if gradient is not None:
                param._unsharded_param.grad = gradient

    def gather_in_vain(self) -> None:
        """Take part in a gather, and drop what comes; while `set_aside`."""
        self.gather()
        result, self.group._all_gather_result = self.group._all_gather_result, None
        if result is not None and result.all_gather_event is not None:
            # its memory may be given away in the streams in which it was taken
            self.group._wait_all_gather_streams_on_event(result.all_gather_event)
            self.group.device_handle.current_stream().wait_event(result.all_gather_event)


def has_gradient(param: Any) -> bool:
    """Return whether a backward pass has left a gradient of the gathered parameter."""
    return param.unsharded_accumulated_grad is not None or _unsharded_grad(param) is not None


def _unsharded_grad(param: Any) -> Tensor | None:
    gathered: Tensor | None = getattr(param, "_unsharded_param", None)
    return None if gathered is None else gathered.grad
