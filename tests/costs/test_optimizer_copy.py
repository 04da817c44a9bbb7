"""Trial steps leave the optimizers of a training, what these refer to, and all generators."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.common import measure_update_seconds
from lightning_topt.costs.optimizer import OptimizerError, read_optimizer

CPU = torch.device("cpu")


class Own(optim.SGD):
    """Keeps things of its own in every way that user code does."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.n, self.seen, self.by_name, self.rate = 0, [], {"steps": [0]}, torch.tensor(1.0)
        self.helper, self.all = (
            Helper(),
            [p for group in self.param_groups for p in group["params"]],
        )
        calls = []

        def note(value):
            calls.append(value)

        self.calls, self.note, self.append, self.partly = (
            calls,
            note,
            calls.append,
            partial(calls.append, 7),
        )

    def step(self, closure=None):
        self.n += 1
        self.seen.append(self.n)
        self.by_name["steps"][0] += 1
        self.rate.mul_(0.5)
        self.helper.count += 1
        for function, arguments in (
            (self.note, [1]),
            (self.append, [2]),
            (self.partly, []),
            (self.helper.tick, []),
        ):
            function(*arguments)
        for parameter in self.all:
            with torch.no_grad():
                parameter.add_(1.0)
        super().step()


class Helper:
    def __init__(self):
        self.count, self.ticks = 0, []

    def tick(self):
        self.ticks.append(self.count)


class Wrapper(optim.Optimizer):
    """Steps another optimizer, whose groups and state it shows, and keeps slow weights."""

    def __init__(self, base):
        self.base, self.slow = base, {}
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.slow.setdefault(parameter, parameter.detach().clone())
                slow.lerp_(parameter.detach(), 0.5)


class Shown(Wrapper):
    """The same with properties."""

    def __init__(self, base):
        self.base, self.slow, self.defaults = base, {}, base.defaults

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)


def both(optimizer, module):
    profile = read_optimizer([optimizer], named_parameters=module.named_parameters())
    measure_update_seconds(
        [optimizer], named_parameters=module.named_parameters(), device=CPU, budget_seconds=0.01
    )
    return profile


def trained(module, optimizer):
    """One real step, and gradients for the next."""
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter)
        if _ == 0:
            optimizer.step()
    return copy.deepcopy(
        (module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()])
    )


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_what_an_optimizer_keeps_for_itself_is_not_touched():
    module = nn.Linear(3, 2)
    optimizer = Own(module.parameters(), lr=0.1, momentum=0.9)
    before = trained(module, optimizer)
    hooked = []
    optimizer.register_step_pre_hook(lambda *arguments: hooked.append(1))
    hook = register_optimizer_step_pre_hook(lambda *arguments: hooked.append(2))
    names = set(vars(optimizer))
    assert both(optimizer, module).state_bytes("weight") == 24
    assert (optimizer.n, optimizer.seen, optimizer.by_name, optimizer.rate) == (
        1,
        [1],
        {"steps": [1]},
        0.5,
    )
    assert same(
        before, (module.state_dict(), optimizer.state_dict(), [p.grad for p in module.parameters()])
    )
    assert set(vars(optimizer)) == names and hooked == []
    optimizer.step()
    hook.remove()
    assert set(hooked) == {1, 2}


@pytest.mark.parametrize("cls", [Wrapper, Shown])
def test_wrapped_optimizers_are_not_touched_and_all_they_keep_counts(cls):
    module = nn.Linear(3, 2)
    optimizer = cls(optim.AdamW(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    before = copy.deepcopy(module.state_dict())
    profile = both(optimizer, module)
    assert same(before, module.state_dict())
    assert not optimizer.base.state and not optimizer.slow
    # two of Adam with its count, and the slow weights
    assert profile.state_bytes("weight") == 3 * 24 + 4


def test_numbers_in_tensors_without_values():
    with FakeTensorMode():
        module = nn.Linear(3, 2)
        optimizer = Own(module.parameters(), lr=0.1, momentum=0.9)
    profile = read_optimizer([optimizer], named_parameters=module.named_parameters())
    assert profile.state_bytes("weight") == 24


class Closed(optim.SGD):
    """Finds its state by a function that has closed over it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state_of = lambda parameter: self.state[parameter]

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state_of(parameter)["mean"] = parameter.grad.clone()
        super().step()


def test_functions_have_closed_over_the_copy():
    module = nn.Linear(3, 2)
    optimizer = Closed(module.parameters())
    assert both(optimizer, module).state_bytes("weight") == 24
    assert not optimizer.state


def test_generators_and_modes_are_as_before():
    class Noisy(optim.SGD):
        def step(self, closure=None):
            random.random()
            np.random.rand()
            torch.rand(3)
            assert (
                torch.get_default_dtype() == torch.float32 and not torch.is_inference_mode_enabled()
            )
            super().step()

    def states():
        generators = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        return (
            *generators,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
        )

    module = nn.Linear(3, 2)
    before = states()
    both(Noisy(module.parameters(), lr=0.1), module)
    assert states() == before
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
            inside = states()
            both(Noisy(module.parameters(), lr=0.1), module)
            assert states() == inside and torch.is_autocast_enabled("cpu")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("keep", [lambda module: module, lambda module: {"all": [module]}])
def test_modules_are_not_copied(keep):
    module = nn.Linear(3, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.models = keep(module)
    with pytest.raises(OptimizerError, match=r"(?s)refers to a module, Linear.*plan='ddp'"):
        both(optimizer, module)
