"""User code that touches parameters in shards, on two ranks: as on one process, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.errors import PlanError, explain_shards
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.parallel_plan import preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques import sharding_checks
from lightning_topt.techniques.technique import RunOptions
from tests.launch import run_on_pool

CPU, STEPS = torch.device("cpu"), 3
Write = Callable[[Tensor, Tensor], Any]


def rebind(slow: Tensor, fast: Tensor) -> None:
    slow.data = 0.5 * slow.data + 0.5 * fast.data


def write_data(slow: Tensor, fast: Tensor) -> None:
    slow.data.copy_(0.5 * slow.data + 0.5 * fast.data)


def write_in_place(slow: Tensor, fast: Tensor) -> None:
    slow.mul_(0.5).add_(fast, alpha=0.5)


def write_foreach(slow: Tensor, fast: Tensor) -> None:
    torch._foreach_lerp_([slow], [fast], 0.5)


WRITES: dict[str, Write] = {
    f.__name__: f for f in (rebind, write_data, write_in_place, write_foreach)
}


class Teacher(nn.Module):
    """`slow` follows `fast` in each forward, by `write`; three rows for two ranks."""

    def __init__(self, write: str, *, is_outside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast, self.slow = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.last, self.write, self.is_outside = nn.Linear(3, 1), write, is_outside

    @torch.no_grad()
    def move(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            WRITES[self.write](slow, fast)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_outside:
            self.move()
        return self.last((self.fast(x) - self.slow(x)).tanh()).square().mean()


class Clipped(nn.Linear):
    """Gives itself new memory in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Net(nn.Module):
    """Two layers; `first` is of `kind`."""

    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = kind(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def batches() -> Tensor:
    return torch.randn(STEPS, 4, 4, generator=torch.Generator().manual_seed(1))


def train(
    module: nn.Module,
    *,
    preset: str | None = None,
    blocks: list[str] | tuple[str, ...] = (),
    after_backward: Callable[[nn.Module], Any] = lambda _: None,
    after_step: Callable[[nn.Module], Any] = lambda _: None,
    dtype: torch.dtype | None = None,
    wide: bool | tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Train under a plan on the ranks, or without one in this process; `dtype` of autocast, under
    which all but `wide` are gathered in 16 bits.
    """
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype is not None)
    engine = None
    if preset is not None:
        plan = preset_plan(PRESETS[preset], mesh=data_mesh(dist.get_world_size()), blocks=blocks)
        if dtype is not None:
            plan = replace(plan, float32_gathers=wide)
        engine = Engine(plan, module, device=CPU, options=RunOptions(gather_dtype=dtype))
        engine.apply()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    if engine is not None:
        engine.attach_optimizers([optimizer])
    for batch in batches():
        if engine is None:
            with autocast():
                loss = module(batch)
            loss.backward()
        else:
            part = batch.chunk(dist.get_world_size())[dist.get_rank()]
            with autocast():
                engine.run_step([part], lambda model, x: model(x))
        after_backward(module)
        optimizer.step()
        optimizer.zero_grad()
        after_step(module)
    if engine is not None:
        engine.release()
        engine.close()
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(found: list[dict[str, Tensor]], wanted: dict[str, Tensor], *, bits: int = 23) -> None:
    tolerances = {} if bits == 23 else {"rtol": 2.0**-bits, "atol": 2.0**-bits}
    for of_rank in found:
        torch.testing.assert_close(of_rank, wanted, **tolerances)


# ---- written parameters --------------------------------------------------------------------------


def _teacher(rank: int, write: str, preset: str, blocks: list[str]) -> dict[str, Tensor]:
    return train(Teacher(write), preset=preset, blocks=blocks)


@pytest.mark.parametrize(
    ("write", "preset", "blocks"),
    [
        *((write, "zero3", []) for write in WRITES),
        ("rebind", "zero2", []),
        ("write_in_place", "zero3", ["last"]),
    ],
)
def test_writes_to_gathered_parameters_hold(write: str, preset: str, blocks: list[str]):
    before = Teacher(write).state_dict()
    wanted = train(Teacher(write))
    assert not torch.equal(wanted["slow.weight"], before["slow.weight"])
    same(run_on_pool(_teacher, 2, write, preset, blocks), wanted)


@pytest.mark.parametrize("write", WRITES)
def test_writes_between_shards_hold(write: str):
    wanted = train(Teacher(write))
    same(run_on_pool(_teacher, 2, write, "zero3", ["fast", "slow"]), wanted)


def _outside(rank: int, write: str) -> dict[str, Tensor]:
    module = Teacher(write, is_outside=True)
    return train(module, preset="zero3", blocks=["fast"], after_step=lambda _: module.move())


@pytest.mark.parametrize("write", WRITES)
def test_writes_after_a_step_hold(write: str):
    module = Teacher(write, is_outside=True)
    same(run_on_pool(_outside, 2, write), train(module, after_step=lambda _: module.move()))


def _clipped(rank: int, preset: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return train(Net(Clipped), preset=preset, blocks=["first", "last"], dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_new_memory_inside_of_a_block_holds(preset: str, dtype: torch.dtype | None):
    wanted = train(Net(Clipped), dtype=dtype)
    same(run_on_pool(_clipped, 2, preset, dtype), wanted, bits=23 if dtype is None else 7)


# ---- hooks, memory -------------------------------------------------------------------------------


def _scale(gradient: Tensor) -> Tensor:
    assert gradient.dtype == torch.float32
    return 0.3 * gradient


def _hooked(rank: int, when: str) -> dict[str, Tensor]:
    module = Net()
    if when != "later":
        dtype = torch.bfloat16 if when == "16 bits" else None
        module.first.weight.register_hook(_scale)
        found = train(module, preset="zero3", blocks=["first"], dtype=dtype)
        if dtype is not None:
            module = Net()
            module.first.weight.register_hook(_scale)
            exact = train(module, preset="zero3", blocks=["first"], dtype=dtype, wide=True)
            assert all(torch.equal(found[name], value) for name, value in exact.items())
        return found

    def register(net: nn.Module) -> None:
        if not handles:
            handles.append(net.first.weight.register_hook(_scale))

    handles: list[Any] = []
    return train(module, preset="zero3", blocks=["first"], after_step=register)


@pytest.mark.parametrize("when", ["before", "16 bits", "later"])
def test_hooks_of_parameters_get_whole_gradients(when: str):
    module, handles = Net(), []
    if when != "later":
        module.first.weight.register_hook(_scale)

    def register(net: nn.Module) -> None:
        if when == "later" and not handles:
            handles.append(net.first.weight.register_hook(_scale))

    is_narrow = when == "16 bits"
    wanted = train(module, after_step=register, dtype=torch.bfloat16 if is_narrow else None)
    assert not torch.allclose(wanted["first.weight"], train(Net())["first.weight"])
    same(run_on_pool(_hooked, 2, when), wanted, bits=10 if is_narrow else 23)


class Recurrent(nn.Module):
    """A recurrent layer keeps a list of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(2, 3, 2, bidirectional=True)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.view(-1, 2, 2).transpose(0, 1))[0]).square().mean()


def _recurrent(rank: int, preset: str) -> dict[str, Tensor]:
    module = Recurrent()
    found = train(module, preset=preset, blocks=["first"])
    with torch.no_grad():
        module(torch.ones(1, 4))
    names = zip(module.first._flat_weights, module.first._flat_weights_names, strict=True)
    assert all(weight is module.first._parameters[name] for weight, name in names)
    return found


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_recurrent_layers_follow_their_shards(preset: str):
    same(run_on_pool(_recurrent, 2, preset), train(Recurrent()))


class Tied(nn.Module):
    """Embedding and head share a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        words = x.argmax(1)
        return nn.functional.cross_entropy(self.head(self.middle(self.table(words))), words)


def _tied(rank: int, blocks: list[str]) -> Any:
    try:
        return train(Tied(), preset="zero3", blocks=blocks)
    except PlanError as error:
        return str(error)


def test_tied_parameters_are_in_one_group():
    same(run_on_pool(_tied, 2, ["middle"]), train(Tied()))
    for message in run_on_pool(_tied, 2, ["table", "head"]):
        assert "is tied to one of block 'table'" in message


# ---- numbers -------------------------------------------------------------------------------------


def numbers(preset: str | None) -> dict[str, float]:
    """What user code reads of gradients as Python numbers."""
    found: dict[str, float] = {}

    def read(net: nn.Module) -> None:
        gradient = net.first.weight.grad
        assert isinstance(gradient, DTensor) == (preset is not None)
        found.update(
            norm=float(gradient.norm()),
            sum=gradient.sum().item(),
            largest=gradient.abs().max().item(),
            total=torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item(),
            is_negative=bool((gradient < 0).any()),
        )

    train(Net(), preset=preset, blocks=["first"], after_backward=read)
    return found


def _numbers(rank: int) -> dict[str, float]:
    return numbers("zero3")


def test_numbers_are_those_of_whole_tensors():
    for found in run_on_pool(_numbers, 2):
        assert found == pytest.approx(numbers(None), rel=1e-5)


def _read_alone(rank: int) -> str:
    sharding_checks.READ_SECONDS = 1.0

    def read(net: nn.Module) -> None:
        if rank == 0:
            float(net.first.weight.norm())
        else:
            dist.barrier()  # as if in the next step

    try:
        train(Net(), preset="zero3", blocks=["first"], after_backward=read)
        return ""
    finally:
        sharding_checks.READ_SECONDS = 60.0


def test_a_number_that_one_rank_reads_is_an_error_in_time():
    with pytest.raises(RuntimeError, match="read as a Python number on some ranks alone"):
        run_on_pool(_read_alone, 2, timeout_seconds=30)


def _clipped_by_user(rank: int) -> dict[str, Tensor]:
    def clip(net: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    return train(Net(), preset="zero3", blocks=["first"], after_backward=clip)


def test_clipping_of_user_code_scales_by_the_whole_norm():
    wanted = train(
        Net(), after_backward=lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    )
    assert not torch.allclose(wanted["last.weight"], train(Net())["last.weight"])
    same(run_on_pool(_clipped_by_user, 2), wanted)


# ---- errors --------------------------------------------------------------------------------------


class Held(Net):
    """Penalizes parameters that it has put into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [*self.first.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.held)


class Exact(Net):
    """Switches autocast off for its last layer, or for its first, which is a block."""

    of_block = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.of_block):
            hidden = self.first(x).tanh()
        with torch.autocast("cpu", enabled=False):
            return self.last(hidden.float()).square().mean()


class ExactBlock(Exact):
    of_block = True


def twins() -> Net:
    module = Net()
    module.twin = nn.Linear(4, 3)
    module.twin.weight = nn.Parameter(module.first.weight.data)
    return module


def add_hook(net: nn.Module) -> Any:
    net.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    return net


def nothing(net: nn.Module) -> None:
    pass


def other_memory(net: nn.Module) -> None:
    net.first.weight.data = torch.zeros(3, 4)


def mix(net: nn.Module) -> None:
    net.first.weight.grad.add_(torch.ones(3, 4))


def flatten(net: nn.Module) -> None:
    net.last.weight.view(-1)


def differentiate(net: nn.Module) -> None:
    torch.autograd.grad(net.last.weight.sum(), net.first.weight)


# a module, what is done to it after backward, and words of the error
ERRORS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "a hook": (lambda: add_hook(Net()), nothing, "use register_hook"),
    "a later hook": (Net, add_hook, "use register_hook"),
    "shared memory": (twins, nothing, "'first.weight' and 'twin.weight' share memory"),
    "other memory": (Net, other_memory, "in other_memory: net.first.weight.data = torch.zeros"),
    "plain tensors": (Net, mix, ", in mix: "),
    "views": (Net, flatten, ", in flatten: "),
    "gradients": (Net, differentiate, ", in differentiate: "),
    "held": (Held, nothing, "in <genexpr>: "),
    "16 bits": (Exact, nothing, "in forward: return self.last(hidden.float())"),
    "16 bits of a block": (ExactBlock, nothing, "in forward: hidden = self.first(x).tanh()"),
}


def _errors(rank: int) -> dict[str, str]:
    found = {}
    for name, (make, use, _) in ERRORS.items():
        with pytest.raises((PlanError, RuntimeError)) as error:
            dtype = torch.bfloat16 if name.startswith("16 bits") else None
            train(make(), preset="zero3", blocks=["first"], after_backward=use, dtype=dtype)
        explain_shards(error.value)
        found[name] = str(error.value)
    return found


def test_what_shards_cannot_do_is_an_error_with_the_line() -> None:
    for found in run_on_pool(_errors, 2):
        for name, (*_, words) in ERRORS.items():
            assert words in found[name] and "plan=" in found[name], (name, found[name])


# ---- random numbers ------------------------------------------------------------------------------


def add_noise(net: nn.Module) -> None:
    torch.manual_seed(2)
    for p in net.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        p.grad.add_(torch.zeros_like(p.grad).uniform_(), alpha=0.1)


def _noisy(rank: int) -> dict[str, Tensor]:
    return train(Net(), preset="zero3", blocks=["first"], after_backward=add_noise)


def test_random_numbers_are_those_of_whole_tensors():
    same(run_on_pool(_noisy, 2), train(Net(), after_backward=add_noise))
