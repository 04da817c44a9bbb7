"""A rank that takes the turn of another member of its group is that member meanwhile, and itself
again afterwards.

What a training step reads and writes beside parameters: random numbers, buffers, metrics, logged
values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_topt.plugins.member_batches import values_of_members
from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)

_MESSAGE_BYTES = 250 << 20  # DDP's
_TOLD = ("log", "print")
Buffers = dict[tuple[str, str], Tensor]  # by the paths of their modules, and their names


@contextmanager
def foreign_turn(module: nn.Module, states: RandomStates) -> Generator[None, None, None]:
    """Draw from `states`; nothing that is logged, written by rank 0 alone or counted in metrics is
    left at the end.
    """
    own, only = random_states(), cast(Any, rank_zero_only)
    rank = getattr(only, "rank", None)
    metrics = [
        (metric, dict(vars(metric))) for metric in module.modules() if isinstance(metric, Metric)
    ]
    for metric, values in metrics:
        vars(metric).update(
            {name: _copied(values[name]) for name in metric._defaults if name in values}
        )
    set_random_states(states)
    only.rank = rank or 1
    try:
        yield
    finally:
        only.rank = rank
        set_random_states(own)
        for metric, values in metrics:
            vars(metric).clear()
            vars(metric).update(values)


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else [*state]


class LoggedLater:
    """Keeps what a module logs in this rank's own turn, to log it when all turns are over: ranks
    then synchronize together.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if isinstance(each, pl.LightningModule)]
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def on(self, *, own: bool) -> Generator[None, None, None]:
        """Keep what is logged, where the turn is this rank's own, and drop it where not."""
        before = [
            {name: vars(module)[name] for name in _TOLD if name in vars(module)}
            for module in self._modules
        ]
        for module in self._modules:
            vars(module).update(
                {"log": self._keeper(module.log)} if own else dict.fromkeys(_TOLD, _drop)
            )
        try:
            yield
        finally:
            for module, of_instance in zip(self._modules, before, strict=True):
                for name in _TOLD:
                    vars(module).pop(name, None)
                vars(module).update(of_instance)

    def replay(self) -> None:
        """Log what was kept."""
        calls, self._calls = self._calls, []
        for log, args, kwargs in calls:
            log(*args, **kwargs)

    def _keeper(self, log: Callable[..., Any]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            now = (
                tuple(map(_value_now, args)),
                {name: _value_now(value) for name, value in kwargs.items()},
            )
            self._calls.append((log, *now))

        return keep


def _value_now(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _value_now(one) for name, one in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def _drop(*args: Any, **kwargs: Any) -> None:
    return None


class MemberBuffers:
    """The buffers that every member of a group has under DDP, of those that steps change.

    DDP gives all ranks rank 0's before forward, unless the last pass was an evaluation or left
    gradients unsynchronized.
    """

    def __init__(self, module: nn.Module, *, size: int, place: int) -> None:
        self._module, self._place = module, place
        self._members: list[Buffers] = [_statistics(module)] * size
        self._are_to_sync = True
        self._is_first = True

    def begin(self, *, stay_in_sync: bool = False) -> None:
        """Give all ranks rank 0's where DDP would, and again before the next pass if they
        `stay_in_sync`. A collective call.
        """
        own = {(path, name): buffer for path, name, buffer in self._all()}
        if self._are_to_sync and own:
            world: Any = dist.group.WORLD
            dist._broadcast_coalesced(world, [*own.values()], _MESSAGE_BYTES, 0)  # type: ignore[attr-defined]
        now = {key: own[key].clone() for key in self._members[self._place] if key in own}
        for member in range(len(self._members)):
            if self._are_to_sync or member == self._place:
                self._members[member] = now
        self._are_to_sync = stay_in_sync

    def exchange(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        """Learn those of all members of `group`, each of which ran a step on its own. A collective
        call.
        """
        own = self._members[self._place]
        self._members = [{**buffers} for buffers in values_of_members(own, group, device=device)]

    @contextmanager
    def turn_of(self, member: int) -> Generator[None, None, None]:
        """Let the module have the buffers of `member`; remember them as they are at the end."""
        known = self._members[member]
        self._write(known)
        before = {(path, name): (buffer, buffer._version) for path, name, buffer in self._all()}
        # The first turn of all shows which buffers change.
        was = {key: buffer.clone() for key, (buffer, _) in before.items()} if self._is_first else {}
        self._is_first = False
        yield
        after = {(path, name): buffer for path, name, buffer in self._all()}
        changed = {
            key
            for key, now in after.items()
            if key not in before or _has_changed(now, *before[key], was.get(key))
        }
        was = {key: value for key, value in was.items() if key in changed}
        self._members = [{**was, **buffers} for buffers in self._members]
        self._members[member] = {
            key: after[key].clone() for key in changed | set(known) if key in after
        }

    def end(self) -> None:
        """Let the module have this rank's own buffers."""
        self._write(self._members[self._place])

    @torch.no_grad()
    def _write(self, buffers: Buffers) -> None:
        for (path, name), value in buffers.items():
            own = self._module.get_submodule(path)._buffers
            held = own.get(name)
            if held is None or held.shape != value.shape:
                own[name] = value.clone()
            else:
                # not in place: the last turn's graph may hold the elements
                held.data = value.clone()

    def _all(self) -> Iterator[tuple[str, str, Tensor]]:
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield path, name, buffer


def _has_changed(now: Tensor, before: Tensor, version: int, value: Tensor | None) -> bool:
    """Kernels of batch norm write running statistics without a new version."""
    return (
        now is not before
        or now._version != version
        or (value is not None and not torch.equal(now, value))
    )


def _statistics(module: nn.Module) -> Buffers:
    """Return running statistics, which may change only once layers that are frozen are not any
    more.
    """
    return {
        (path, name): buffer.clone()
        for path, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for name, buffer in layer._buffers.items()
        if buffer is not None
    }
