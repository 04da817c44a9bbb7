"""Weights of a stage, changed without autograd noticing: pointed to, copied, swapped, predicted.

Prediction takes the moments that the optimizer keeps of gradients (`read_moments`). From them it
computes how the weights will move (`repeated_update`, `updates_without_gradients`), and moves them
(`keep_and_move`): by torch, in pieces, or on a CPU by compiled loops (`move_kernels`).

W: weights; s: updates ahead; lr: learning rate; g: momentum; d: dampening; b1, b2: betas;
l: weight decay; t: steps made; m and v: the first and second moments.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

Method = Literal["SGD", "Adam"]  # AdamW is Adam with decoupled weight decay
Hyperparameters = Mapping[str, Any]
KNOWN = ("SGD", "Adam", "AdamW")
CHUNK_BYTES = 32 << 20  # temporaries are made for so much at a time, and at least for one tensor
CACHE_BYTES = 512 << 10  # of each tensor, where a CPU computes with a few at once
# of weights; with fewer, loading the compiler takes longer than it saves in a thousand passes
KERNEL_BYTES = 4 << 20
KERNEL_THREADS = 3  # as many of torch's are as fast as a kernel on one
COPY = 2.0  # of the bytes of tensors, what is read and written to copy them


# ---- Parameters in place, and copies of them.


def trainable(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that steps may change.

    They want gradients and have elements of their own here: of other stages' parameters all
    elements are one in memory.
    """
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not _is_expanded(parameter)
    ]


@contextmanager
def unseen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hide from autograd what is written to parameters within. No forward pass may run there.

    Backward passes in flight compute with what the storages hold then.
    """
    with _unsafe_preserve_version_counter(tuple(parameters)):
        yield


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of equal shapes; targets may be parameters."""
    if targets:
        with torch.no_grad(), unseen(targets):
            torch._foreach_copy_(list(targets), list(sources))


def are_alone(parameters: Sequence[Tensor]) -> bool:
    """Return whether all references to the parameters' memory are their own, and fill it.

    Then they may be pointed to other memory. Views that somebody holds would stay behind, and so
    would parameters of others in the same memory. Those of a recurrent layer may lie in one.
    """
    if not all(type(p) in (Tensor, nn.Parameter) and p.layout == torch.strided for p in parameters):
        return False
    by_memory: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        by_memory.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    for inside in by_memory.values():
        memory = inside[0].untyped_storage()
        # one reference of each parameter, and that of the name
        references = torch._C._storage_Use_Count(memory._cdata)
        if references != len(inside) + 1 or num_bytes(inside) != memory.nbytes():
            return False
        if memory.device.type == "cpu" and memory.is_shared():  # other processes hold it
            return False
    return True


def point_to(parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Let parameters have the memory of tensors of equal shapes."""
    for parameter, place in zip(parameters, places, strict=True):
        parameter.data = place


def swap(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Exchange the contents of tensors of equal shapes."""
    with torch.no_grad(), unseen(parameters):
        # in pieces, so that only one of them is held twice
        for inside, outside in pieces(parameters, copies):
            kept = [tensor.clone() for tensor in inside]
            torch._foreach_copy_(inside, outside)
            torch._foreach_copy_(outside, kept)


def empty_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors like `tensors`, without contents and gradients."""
    return [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]


def empty_places(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors that lie in new memory as `tensors`, which are alone, do in theirs."""
    memories: dict[int, Tensor] = {}
    made = []
    for tensor in tensors:
        old = tensor.untyped_storage()
        if old._cdata not in memories:
            memories[old._cdata] = torch.empty(
                old.nbytes(), dtype=torch.uint8, device=tensor.device
            )
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        memory, start = memories[old._cdata].untyped_storage(), tensor.storage_offset()
        made.append(new.set_(memory, start, tensor.shape, tensor.stride()))
    return made


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors)


def pieces(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield equal parts of lists of tensors of equal shapes, a part of each list at a time.

    On CPUs they are small enough for a cache, so that what is computed of them costs no memory
    traffic; elsewhere as large as `CHUNK_BYTES`, since each operation has to be started.
    """
    together = list(zip(*lists, strict=True))
    on_host = all(tensors[0].device.type == "cpu" for tensors in together)
    most = CACHE_BYTES if on_host else CHUNK_BYTES
    for chunk in _chunks(together, most):
        tensors = chunk[0]
        # a tensor that is larger than the cache is alone, and cut where it is plain memory
        if on_host and tensors[0].nbytes > most and all(map(_is_plain, tensors)):
            count = most // tensors[0].element_size()
            parts = [tensor.view(-1).split(count) for tensor in tensors]
            for part in zip(*parts, strict=True):
                yield tuple([tensor] for tensor in part)
        else:
            yield tuple(map(list, zip(*chunk, strict=True)))


def _chunks(
    together: Sequence[tuple[Tensor, ...]], most: int
) -> Iterator[list[tuple[Tensor, ...]]]:
    # Rows in order, as many at a time as fit `most` bytes of a list, and at least one
    chunk: list[tuple[Tensor, ...]] = []
    filled = 0
    for tensors in together:
        filled += tensors[0].nbytes
        if chunk and filled > most:
            yield chunk
            chunk, filled = [], tensors[0].nbytes
        chunk.append(tensors)
    if chunk:
        yield chunk


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and all(
        step == 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )


# ---- Moments that optimizers keep of gradients.


class Moments(NamedTuple):
    """Parameters of one group that have made equally many steps, and their moments.

    `first` are SGD's momentum buffers, or Adam's m; `second` Adam's v, with amsgrad its maximum.
    All have the parameters' shapes.
    """

    group: int
    steps: int
    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


def method_of(optimizer: Optimizer, *, rule: str) -> Method:
    """Return how an optimizer that `rule` predicts with steps. Raises ValueError for any other."""
    kinds: tuple[tuple[type[Optimizer], Method], ...] = ((optim.SGD, "SGD"), (optim.Adam, "Adam"))
    # the method itself: torch wraps it, for hooks and the profiler
    steps = inspect.unwrap(type(optimizer).step)
    # a subclass that steps in its own way is not known
    found = [
        method
        for kind, method in kinds
        if isinstance(optimizer, kind) and steps is inspect.unwrap(kind.step)
    ]
    if not found:
        raise ValueError(
            f"prediction {rule!r} knows the optimizers {', '.join(KNOWN)} of torch.optim, got "
            f"{type(optimizer).__name__}; use one of them, or prediction 'stash', which serves "
            "every optimizer"
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(f"prediction {rule!r} moves real weights; use prediction 'stash'")
    for group in optimizer.param_groups:
        if found[0] == "SGD" and group["momentum"] == 0:
            raise ValueError(
                f"prediction {rule!r} follows the momentum of SGD, which is 0 here; give SGD a "
                "momentum, or use prediction 'stash'"
            )
        if group.get("differentiable"):
            raise ValueError(
                f"prediction {rule!r} writes weights in place; build the optimizer with "
                "differentiable=False"
            )
    return found[0]


def read_moments(
    optimizer: Optimizer, *, method: Method, steps_made: MutableMapping[Tensor, int] | None = None
) -> list[Moments]:
    """Return the moments of all parameters that have been updated.

    Those of others are not known yet. Adam counts steps by parameter, on its device if fused or
    capturable. Counts in `steps_made` are taken from there; others are read, for which the host
    waits once, and are added.
    """
    steps_made = {} if steps_made is None else steps_made
    first_name = "momentum_buffer" if method == "SGD" else "exp_avg"
    here = {id(parameter) for parameter in trainable(optimizer)}
    found: list[Moments] = []
    for index, group in enumerate(optimizer.param_groups):
        second_name = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        # updated before, and of this stage
        known = [
            p
            for p in group["params"]
            if id(p) in here and optimizer.state.get(p, {}).get(first_name) is not None
        ]
        if method == "Adam":
            _read_steps(optimizer, known, steps_made)
        by_steps: dict[int, list[Tensor]] = {}
        for parameter in known:
            by_steps.setdefault(steps_made.get(parameter, 0), []).append(parameter)
        for steps, parameters in by_steps.items():
            states = [optimizer.state[p] for p in parameters]
            first = [state[first_name] for state in states]
            second = [state[second_name] for state in states] if method == "Adam" else []
            found.append(Moments(index, steps, parameters, first, second))
    return found


def _read_steps(
    optimizer: Optimizer, parameters: Sequence[Tensor], steps_made: MutableMapping[Tensor, int]
) -> None:
    # Add the steps of `parameters` that are not in `steps_made`; all are read at once
    counts = {p: optimizer.state[p]["step"] for p in parameters if p not in steps_made}
    tensors = {p: count for p, count in counts.items() if isinstance(count, Tensor)}
    if tensors:
        device = next(iter(tensors.values())).device
        read = torch.stack([count.to(device) for count in tensors.values()]).tolist()
        counts |= dict(zip(tensors, read, strict=True))
    steps_made.update({p: int(count) for p, count in counts.items()})


# ---- Moves of the weights: what a rule expects of the next updates.


class SGDMove(NamedTuple):
    """W <- weight W + buffer m."""

    weight: float
    buffer: float


class AdamStep(NamedTuple):
    """W <- shrink W; m <- keep m + pull W; W <- W - rate m / (sqrt(v) / root + eps).

    Only W is written.
    """

    shrink: float
    keep: float
    pull: float
    rate: float
    root: float
    eps: float


Move = SGDMove | tuple[AdamStep, ...]


def repeated_update(
    moments: Moments, method: Method, count: int, rates: Sequence[Hyperparameters]
) -> Move:
    """Return the move by `count` times the last update's direction, W - s lr dW.

    SGD: dW is the momentum buffer; Adam, AdamW: m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),
    without decoupled decay.
    """
    step = rates[0]
    length = count * float(step["lr"])
    if method == "SGD":
        return SGDMove(1.0, -length)
    first, second = _bias_corrections(step, moments.steps)
    return (AdamStep(1.0, 1.0, 0.0, length / first, math.sqrt(second), float(step["eps"])),)


def updates_without_gradients(
    moments: Moments, method: Method, count: int, rates: Sequence[Hyperparameters]
) -> Move:
    """Return the move by `count` updates as the optimizer would make them with gradients of 0.

    Weight decay goes on, the last of `rates` stays, and so do second moments.
    """
    steps = [rates[min(ahead, len(rates) - 1)] for ahead in range(count)]
    if method == "SGD":
        return _sgd_move(steps)
    return tuple(
        _adam_step(step, moments.steps + ahead) for ahead, step in enumerate(steps, start=1)
    )


def _sgd_move(steps: Sequence[Hyperparameters]) -> SGDMove:
    # weights and velocity as multiples of the weights and buffers of now
    weights, velocity = (1.0, 0.0), (0.0, 1.0)

    def plus(a: tuple[float, float], factor: float, b: tuple[float, float]) -> tuple[float, float]:
        return a[0] + factor * b[0], a[1] + factor * b[1]

    for step in steps:
        momentum = float(step["momentum"])
        # with a gradient of 0 the decay is all of it
        decay = plus((0.0, 0.0), float(step["weight_decay"]), weights)
        velocity = plus(plus((0.0, 0.0), momentum, velocity), 1.0 - float(step["dampening"]), decay)
        direction = plus(decay, momentum, velocity) if step["nesterov"] else velocity
        weights = plus(weights, -float(step["lr"]), direction)
    return SGDMove(*weights)


def _adam_step(step: Hyperparameters, count: int) -> AdamStep:
    # Step number `count` without a gradient
    rate, decay, keep = float(step["lr"]), float(step["weight_decay"]), float(step["betas"][0])
    is_decoupled = bool(step.get("decoupled_weight_decay"))
    first, second = _bias_corrections(step, count)
    # decoupled decay shrinks the weights, the other kind goes into the mean
    shrink, pull = (1.0 - rate * decay, 0.0) if is_decoupled else (1.0, (1.0 - keep) * decay)
    return AdamStep(shrink, keep, pull, rate / first, math.sqrt(second), float(step["eps"]))


def _bias_corrections(step: Hyperparameters, count: int) -> tuple[float, float]:
    first, second = (float(beta) for beta in step["betas"])
    return 1.0 - first**count, 1.0 - second**count


# ---- Moving the weights.


def keep_and_move(moments: Moments, copies: Sequence[Tensor], move: Move) -> None:
    """Copy the parameters into `copies`, of the same shapes, and move them in place."""
    # SGD has no second moments, and reads none
    columns = (moments.parameters, moments.first, moments.second or moments.first, copies)
    if _suits_kernels(moments):
        kernels = importlib.import_module("lightning_topt.weight_prediction.move_kernels")
        for tensors in zip(*columns, strict=True):
            kernels.keep_and_move(
                *(tensor.detach().view(-1).numpy() for tensor in tensors), move=move
            )
        return
    for weights, means, squares, kept in pieces(*columns):
        torch._foreach_copy_(kept, weights)
        move_by_torch(moments._replace(parameters=weights, first=means, second=squares), move)


def _suits_kernels(moments: Moments) -> bool:
    # Whether tensors are contiguous, of 32 bit on a CPU, and enough to pay
    tensors = [*moments.parameters, *moments.first, *moments.second]
    return (
        {(t.dtype, t.device.type) for t in tensors} == {(torch.float32, "cpu")}
        and num_bytes(moments.parameters) >= KERNEL_BYTES
        and torch.get_num_threads() <= KERNEL_THREADS
        and all(map(_is_plain, tensors))
    )


def move_traffic(optimizer: str, *, in_cache: bool, steps: int = 1) -> float:
    """Return how often `keep_and_move` reads or writes the bytes of the weights.

    Args:
        optimizer: the name of its class.
        in_cache: on a CPU, where each number is read and written once.
        steps: of Adam's moves. Decay is not counted.
    """
    is_adam = optimizer != "SGD"
    if in_cache:
        return 5.0 if is_adam else 4.0
    # roots; then for each step a quotient, eps, and a product of three
    return COPY + (2.0 + steps * 8.0 if is_adam else 3.0)


def move_by_torch(moments: Moments, move: Move) -> None:
    """Move the parameters in place, on any device."""
    parameters, means = moments.parameters, moments.first
    # SGD: one move for any number of updates
    if isinstance(move, SGDMove):
        if move.weight != 1.0:
            torch._foreach_mul_(parameters, move.weight)
        torch._foreach_add_(parameters, means, alpha=move.buffer)
        return
    # Adam: one step after the other
    roots = torch._foreach_sqrt(moments.second)
    is_pulled = any(step.pull for step in move)
    if is_pulled:  # means change by more than a factor
        means = [mean.clone() for mean in means]
    kept = 1.0  # of the means of now
    for step in move:
        if step.shrink != 1.0:
            torch._foreach_mul_(parameters, step.shrink)
        if is_pulled:
            torch._foreach_mul_(means, step.keep)
            torch._foreach_add_(means, parameters, alpha=step.pull)
        else:
            kept *= step.keep
        # numerator and divisor are both multiplied by the root
        divisors = torch._foreach_add(roots, step.eps * step.root)
        torch._foreach_addcdiv_(parameters, means, divisors, value=-step.rate * kept * step.root)
