"""Saves that go on beside training: what is saved is copied first, and written by a thread.

    saves = BackgroundSaves()
    saves.submit(state, write, name="last.ckpt")     # copies `state`, then returns
    saves.then(remove_old)                            # once that save has succeeded
    saves.wait()                                      # for all of them

Saves are written one at a time, in their order. Two may be unfinished, as the best and the last
checkpoint of one step: the third waits for the first. A copy has the tensors of a state in host
memory, pinned where they come from a GPU, in buffers that are used again; whatever else is in it is
pickled, so that training may change it. An error of a save is kept until it is asked for.
"""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor

from lightning_topt.execution.states import TensorChunks, chunks_of_shard

MOST = 2  # saves that are not finished
WAIT_SECONDS = 1800.0  # for a save, as long as torch waits for a collective call


class BackgroundSaves:
    """The saves of a run, of which one is written at a time.

    Args:
        wait_seconds: that `submit` and `wait` wait, before they raise TimeoutError.
    """

    def __init__(self, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._buffers = _Buffers()
        self._changed = threading.Condition()
        self._unfinished: list[_Save] = []  # the first one is being written
        self._last_succeeded = True  # of those that are finished
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed whose error was not taken yet."""
        with self._changed:
            return self._error is not None

    def take_error(self) -> BaseException | None:
        """Return the error of a save that failed, once."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def submit(self, state: Any, write: Callable[[Any], object], *, name: str) -> None:
        """Copy `state`, and let ``write(copy)`` run after the saves before.

        Waits where as many as `MOST` are unfinished. Raises TimeoutError if that lasts.
        """
        self._wait_until(lambda: len(self._unfinished) < MOST, self._wait_seconds)
        save = _Save(name, write, _Copy.of(state, self._buffers))
        with self._changed:
            self._unfinished.append(save)
            if len(self._unfinished) == 1:
                threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def then(self, action: Callable[[], object]) -> None:
        """Call `action` once all that was submitted has succeeded; not where the last one fails."""
        with self._changed:
            if self._unfinished:
                self._unfinished[-1].actions.append(action)
                return
            if not self._last_succeeded:
                return
        action()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until nothing is unfinished. Raises TimeoutError if that lasts for `seconds`."""
        seconds = self._wait_seconds if seconds is None else seconds
        self._wait_until(lambda: not self._unfinished, seconds)

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not is_so():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"the checkpoint {self._unfinished[0].name!r} was not written in the "
                        f"background within {seconds:.0f} s: save less often or to faster storage, "
                        "or without async_checkpoint"
                    )
                self._changed.wait(left)

    def _run(self) -> None:
        # Write what is unfinished, in the thread, which ends where nothing is
        while True:
            save = self._unfinished[0]
            succeeded = self._try(partial(_write, save))
            save.copy.free()
            # what is to come after it, also what came while it was written
            while True:
                with self._changed:
                    if not succeeded or not save.actions:
                        self._unfinished.pop(0)
                        self._last_succeeded = succeeded
                        self._changed.notify_all()
                        break
                    action = save.actions.pop(0)
                succeeded = self._try(action)
            with self._changed:
                if not self._unfinished:
                    return

    def _try(self, action: Callable[[], object]) -> bool:
        # Whether `action` raised nothing; keep the first error
        try:
            action()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            return False
        return True


def _write(save: _Save) -> None:
    save.write(save.copy.restored())


@dataclass
class _Save:
    """A save that is unfinished."""

    name: str
    write: Callable[[Any], object]
    copy: _Copy
    actions: list[Callable[[], object]] = field(default_factory=list)


# ---- copies --------------------------------------------------------------------------------------


class _Buffers:
    """Host memory for copies, by size and whether it is pinned, which later copies use again."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}

    def take(self, size: int, pinned: bool) -> Tensor:
        free = self._free.get((size, pinned))
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def give_back(self, buffer: Tensor, pinned: bool) -> None:
        self._free.setdefault((buffer.numel(), pinned), []).append(buffer)


class _Copy:
    """A state as it was when the copy was made: its pickle, and its tensors apart."""

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers
        self._taken: list[tuple[Tensor, bool]] = []
        self._tensors: list[Tensor] = []
        self._pickle = b""

    @classmethod
    def of(cls, state: Any, buffers: _Buffers) -> _Copy:
        # Copy `state`. Its tensors may change once this returns.
        copy, devices = cls(buffers), set[torch.device]()
        found: dict[Hashable, int] = {}

        class CopyPickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                # Name the tensors that are copied; None for all else, which is pickled.
                if not isinstance(value, Tensor) or not _is_plain(value):
                    return None
                if isinstance(value, DTensor):
                    value = chunks_of_shard(value)
                is_parameter = type(value) is nn.Parameter
                chunks = (value.spans, value.full_shape) if type(value) is TensorChunks else None
                local = value.detach().as_subclass(Tensor)
                # the same memory, of two names, is copied once
                place = (local.data_ptr(), local.dtype, local.shape, local.stride(), local.device)
                key = place if local.numel() else object()
                if key not in found:
                    found[key] = copy._add(local)
                    devices.add(local.device)
                return found[key], is_parameter and value.requires_grad, is_parameter, chunks

        stream = io.BytesIO()
        CopyPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(state)
        copy._pickle = stream.getvalue()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copy

    def _add(self, local: Tensor) -> int:
        pinned = local.is_cuda
        buffer = self._buffers.take(local.nbytes, pinned)
        self._taken.append((buffer, pinned))
        into = buffer.view(local.dtype).view(local.shape)
        into.copy_(local, non_blocking=pinned)
        self._tensors.append(into)
        return len(self._tensors) - 1

    def restored(self) -> Any:
        # Return the state, of the copied tensors.
        tensors = self._tensors

        class CopyUnpickler(pickle.Unpickler):
            def persistent_load(self, key: Any) -> Any:
                index, requires_grad, is_parameter, chunks = key
                if is_parameter:
                    return nn.Parameter(tensors[index], requires_grad=requires_grad)
                if chunks is not None:
                    return TensorChunks(tensors[index], spans=chunks[0], full_shape=chunks[1])
                return tensors[index]

        return CopyUnpickler(io.BytesIO(self._pickle)).load()

    def free(self) -> None:
        # Give the buffers back.
        self._tensors.clear()
        while self._taken:
            self._buffers.give_back(*self._taken.pop())


def _is_plain(value: Tensor) -> bool:
    # Whether a tensor is memory alone, which can be copied as such
    if isinstance(value, DTensor):
        return True
    return (
        type(value) in (Tensor, nn.Parameter, nn.Buffer, TensorChunks)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not is_fake(value)
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not vars(value).keys() - {"spans", "full_shape"}
    )
