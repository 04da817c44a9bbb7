"""What a trial says about optimizers whose rule is known, and about a user's own of every kind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lightning_topt.optim import update_rule as rules
from lightning_topt.optim.update_rule import (
    UnsplittableOptimizer,
    check_runs_on_shards,
    collective_in_step,
    update_rule,
    why_not_shared,
)

KNOWN = [(cls, {}) for cls in rules.BY_PARAMETER] + [
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.AdamW, {"foreach": True, "amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
]


def parameters(only_matrices=False):
    torch.manual_seed(0)
    shapes = [(300, 200), (10, 200)] + ([] if only_matrices else [(200,), (4,), (), (6, 2, 5, 5)])
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def make(cls, **options):
    return cls(parameters(cls.__name__ == "Muon"), lr=0.01, **options)


class Own(optim.Optimizer):
    """A user's: `change(parameter, gradient, state, group)` is what it does to one parameter."""

    def __init__(self, params, change, **options):
        super().__init__(params, {"lr": 0.1, **options})
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, p.grad, self.state[p], group)

    def before(self, group):
        pass


def plain(p, gradient, state, group):
    p.sub_(group["lr"] * gradient)


def momentum(p, gradient, state, group):
    state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(gradient)
    state["step"] = state.get("step", 0) + 1
    p.sub_(group["lr"] / state["step"] * state["m"])


def normalised(p, gradient, state, group):
    p.sub_(group["lr"] * gradient / gradient.norm())


class Clipped(Own):
    """Clips by the norm of all gradients."""

    def before(self, group):
        norm = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()
        group["scale"] = float(1 / norm.clamp(min=1))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                p.sub_(group["lr"] * group["scale"] * p.grad)


class Estimated(Own):
    """As Prodigy: a rate that all parameters estimate together, at first without effect."""

    def before(self, group):
        total = sum(float(p.grad.abs().sum()) for p in group["params"])
        group["estimate"] = max(group.get("estimate", 1e-6), 1e-9 * total)


class Counting(Own):
    """Counts its calls in the group."""

    def before(self, group):
        group["step"] = group.get("step", 0) + 1
        group["lr"] = 0.1 / group["step"]


@pytest.mark.parametrize(
    ("cls", "options"), KNOWN, ids=lambda value: str(getattr(value, "__name__", value))
)
def test_the_trial_agrees_with_the_table(cls, options):
    expected = "elements" if cls in rules.ELEMENTWISE else "parameters"
    assert update_rule(make(cls, **options)) == expected

    class Unknown(cls):
        def step(self, closure=None):
            return super().step(closure)

    Unknown.__name__ = cls.__name__
    assert update_rule(make(Unknown, **options)) == "parameters"


def noisy(p, gradient, state, group):
    p.sub_(group["lr"] * (gradient + torch.randn_like(gradient)))


def boxed(p, gradient, state, group):
    state["box"] = gradient.as_subclass(Boxed) if p.numel() >= 4096 else gradient
    p.sub_(group["lr"] * gradient)


def averaged(p, gradient, state, group):
    dist.all_reduce(gradient)
    pytest.fail("the gradient was sent")


class Boxed(Tensor):
    """A class of tensors of its own, for states of large parameters."""


class Asking(Own):
    """Asks its closure `count` times, and is plain otherwise; `moves` parameters before."""

    def __init__(self, params, count, *, moves=0.0, common=False):
        super().__init__(params, plain)
        self.count, self.moves, self.common = count, moves, common

    @torch.no_grad()
    def step(self, closure):
        trained = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_sub_(trained, self.moves)
        losses = [closure()]
        for _ in range(self.count - 1):
            norm = torch.stack([p.grad.norm() for p in trained]).norm() if self.common else 1.0
            moves = [0.05 * p.grad / norm for p in trained]
            torch._foreach_add_(trained, moves)
            losses.append(closure())
            torch._foreach_sub_(trained, moves)
        super().step()
        return losses[0]


class Failing(Own):
    def before(self, group):
        raise RuntimeError("not today")


class NoTrial(Own):
    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()


# what is made of parameters, and a word of what update_rule, then check_runs_on_shards, says;
# "": nothing
OWN = {
    "plain": (lambda p: Own(p, plain), "", ""),
    "momentum": (lambda p: Own(p, momentum), "", ""),
    "whole parameters": (lambda p: Own(p, normalised), "", ""),
    "counts calls": (lambda p: Counting(p, plain), "", ""),
    "a closure": (lambda p: Asking(p, 1), "", ""),
    "clipped together": (lambda p: Clipped(p, plain), "depends on which others", ""),
    "a common estimate": (lambda p: Estimated(p, plain), "depends on which others", ""),
    "random": (lambda p: Own(p, noisy), "random numbers", "draws random numbers"),
    "another class": (lambda p: Own(p, boxed), "Boxed", "Boxed"),
    "two closures": (lambda p: Asking(p, 2), "several times per step", ""),
    "moves first": (lambda p: Asking(p, 1, moves=0.1), "before its closure", ""),
    "does nothing": (lambda p: Own(p, lambda *_: None), "changed none", ""),
    "fails": (lambda p: Failing(p, plain), "not today", ""),
    "cannot be copied": (lambda p: NoTrial(p, plain), "cannot be copied", ""),
    "LBFGS": (optim.LBFGS, "needs a closure", "one whole vector"),
    "SparseAdam": (optim.SparseAdam, "sparse", ""),
}


@pytest.mark.parametrize("name", OWN)
def test_own_optimizers(name):
    make_own, *words = OWN[name]
    for call, word in zip((update_rule, check_runs_on_shards), words, strict=True):
        if word:
            with pytest.raises(UnsplittableOptimizer, match=word):
                call(make_own(parameters()))
        else:
            assert call(make_own(parameters())) in ("parameters", None)
    if name not in ("LBFGS", "SparseAdam"):
        assert update_rule(make_own(parameters()), declared="elements") == "elements"


def test_collectives_are_refused_and_send_nothing(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for call in (update_rule, check_runs_on_shards):
            with pytest.raises(UnsplittableOptimizer, match=r"shared between ranks already"):
                call(Own(parameters(), averaged))
        assert "allreduce" in collective_in_step(Own(parameters(), averaged))
    finally:
        dist.destroy_process_group()
    assert collective_in_step(Own(parameters(), plain)) is None


def test_rates_of_zero_and_in_tensors_are_no_obstacle():
    """Warm-up starts at 0, where every rule looks alike."""
    optimizer = Clipped(parameters(), plain, lr=torch.tensor(0.1))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(UnsplittableOptimizer, match="depends on which others"):
        update_rule(optimizer)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    optimizer.param_groups[0].pop("initial_lr")
    with pytest.raises(UnsplittableOptimizer, match="rate has no value"):
        update_rule(optimizer)


def test_nothing_of_the_user_is_touched():
    optimizer = Counting(parameters(), momentum)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook saw the trial"))
    before = (
        copy.deepcopy(optimizer.state_dict()),
        [p.clone() for p in parameters()],
        torch.get_rng_state(),
    )
    assert update_rule(optimizer) == "parameters"
    assert optimizer.state_dict() == before[0] and not optimizer.state
    assert all(
        torch.equal(p, q)
        for p, q in zip(optimizer.param_groups[0]["params"], before[1], strict=True)
    )
    assert all(bool((p.grad == 1).all()) for p in optimizer.param_groups[0]["params"])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_steps_that_are_shared_unasked():
    class Copy(optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Renamed(optim.AdamW):
        pass

    known = [optim.SGD, optim.AdamW, optim.Adafactor, Renamed]
    assert [why_not_shared(make(cls)) for cls in known] == [None] * len(known)
    assert why_not_shared(make(Copy)) == (
        "the update rule of Copy is not known: ParallelOptimizerStep(rule=...) shares it"
    )
    hooked = make(optim.SGD)
    hooked.register_step_post_hook(lambda *_: None)
    sharded = make(optim.SGD)
    sharded.consolidate_state_dict = lambda: None
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = optim.SGD([(p := parameters()[0]), p])
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for optimizer, word in (
        (optim.LBFGS(parameters()), "one vector"),
        (optim.SparseAdam(parameters()), "sparse"),
        (optim.SGD(table.parameters()), "sparse"),
        (sharded, "shards its state"),
        (hooked, "has step hooks"),
        (twice, "parameter twice"),
    ):
        assert word in why_not_shared(optimizer)
