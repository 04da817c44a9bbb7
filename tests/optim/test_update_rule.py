"""What a trial says about optimizers whose rule is known, and about a user's own of every kind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lightning_topt.optim import update_rule as rules
from lightning_topt.optim.adam_variants import LAMB
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.update_rule import (
    UnsplittableOptimizer,
    calls_may_repeat,
    check_by_parameter,
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
    """A user's optimizer: `change(parameter, gradient, state, group)` is what it does to one
    parameter.
    """

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


def large_only(p, gradient, state, group):
    factor = gradient.norm() if max(p.shape, default=0) >= 128 else 1.0
    p.sub_(group["lr"] * gradient / factor)


def late(p, gradient, state, group):
    state["step"] = state.get("step", 0) + 1
    (normalised if state["step"] > group["start"] else plain)(p, gradient, state, group)


def preconditioned(p, gradient, state, group):
    if p.dim() == 2:
        state.setdefault("left", torch.zeros(len(p), len(p), device=p.device)).add_(
            gradient @ gradient.T
        )
    # state of another shape: rows cannot own it, even while it is not used
    p.sub_(group["lr"] * gradient)


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
    """Prodigy-like: a rate that all parameters estimate together, kept in the group, at first
    without effect.
    """

    def before(self, group):
        total = sum(float(p.grad.abs().sum()) for p in group["params"])
        group["estimate"] = max(group.get("estimate", 1e-6), 1e-9 * total)


class EstimatedForAll(Estimated):
    """The same on the optimizer."""

    def before(self, group):
        self.estimate = max(
            getattr(self, "estimate", 1e-6),
            1e-9 * sum(float(p.grad.abs().sum()) for p in group["params"]),
        )


class EstimatedInState(Estimated):
    """The same in the state of no parameter."""

    def before(self, group):
        self.state["all"]["estimate"] = 1e-9 * sum(
            float(p.grad.abs().sum()) for p in group["params"]
        )


class Counting(Own):
    """Counts its calls in the group."""

    def before(self, group):
        group["step"] = group.get("step", 0) + 1
        group["lr"] = 0.1 / group["step"]


class CountingInside(Own):
    """Counts its calls where nobody sees it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.counts = {"calls": 0}

    def before(self, group):
        self.counts["calls"] += 1
        group["lr"] = 0.1 / self.counts["calls"]


@pytest.mark.parametrize(
    ("cls", "options"), KNOWN, ids=lambda value: str(getattr(value, "__name__", value))
)
def test_the_trial_agrees_with_the_table(cls, options):
    optimizer = make(cls, **options)
    expected = "elements" if cls in rules.ELEMENTWISE else "parameters"
    assert update_rule(optimizer) == rules._tried_rule(optimizer) == expected
    assert calls_may_repeat(optimizer)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (plain, {}, "elements"),
        (momentum, {}, "elements"),
        (normalised, {}, "parameters"),
        (large_only, {}, "parameters"),
        (late, {"start": 20}, "parameters"),
        (preconditioned, {}, "parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_own_optimizers(change, options, expected):
    optimizer = Own(parameters(), change, **options)
    assert update_rule(optimizer) == expected
    assert calls_may_repeat(optimizer)


@pytest.mark.parametrize("cls", [Clipped, Estimated, EstimatedForAll, EstimatedInState])
def test_coupled_parameters_are_refused(cls):
    optimizer = cls(parameters(), plain)
    with pytest.raises(
        UnsplittableOptimizer, match=rf"{cls.__name__} cannot be split.*depends on which others"
    ):
        update_rule(optimizer)
    assert update_rule(optimizer, declared="parameters") == "parameters"
    assert not calls_may_repeat(optimizer)


def test_random_numbers_are_refused():
    def noisy(p, gradient, state, group):
        p.sub_(group["lr"] * (gradient + torch.randn_like(gradient)))

    with pytest.raises(UnsplittableOptimizer, match="random numbers"):
        update_rule(Own(parameters(), noisy))


def test_counted_calls():
    assert update_rule(Counting(parameters(), plain)) == "elements"
    assert calls_may_repeat(Counting(parameters(), plain))  # set back between the calls
    assert update_rule(CountingInside(parameters(), plain)) == "elements"
    assert not calls_may_repeat(CountingInside(parameters(), plain))


def test_a_group_that_has_no_parameter_on_some_rank():
    class Largest(Own):
        def before(self, group):
            group["largest"] = max(p.numel() for p in group["params"]) * 0

    first, *rest = parameters()
    with pytest.raises(UnsplittableOptimizer, match=r"not known.*ValueError"):
        update_rule(Largest([{"params": [first]}, {"params": rest, "lr": 0.2}], plain))


def test_closures_and_sparse_gradients_are_refused():
    with pytest.raises(
        UnsplittableOptimizer,
        match=r"LBFGS cannot be split: it needs a closure.*Leave the parallel",
    ):
        update_rule(optim.LBFGS(parameters()), declared="elements")
    with pytest.raises(
        UnsplittableOptimizer, match=r"SparseAdam cannot be split: its gradients are sparse"
    ):
        update_rule(optim.SparseAdam(parameters()))

    class Picky(Own):
        def step(self, closure=None):
            raise RuntimeError("not today")

    with pytest.raises(UnsplittableOptimizer, match=r"Picky.*RuntimeError: not today.*Declare"):
        update_rule(Picky(parameters(), plain))


class Asking(Own):
    """Asks its closure `count` times, and is plain otherwise; `moves`: it moves parameters before
    it does.
    """

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


def test_closures_are_asked_once_and_first():
    assert update_rule(Asking(parameters(), 1)) == "elements"
    with pytest.raises(UnsplittableOptimizer, match="several times per step"):
        update_rule(Asking(parameters(), 2))
    with pytest.raises(UnsplittableOptimizer, match="moves parameters, and asks its closure then"):
        update_rule(Asking(parameters(), 1, moves=0.1))


def test_parameters_by_themselves_whatever_is_asked():
    check_by_parameter(Asking(parameters(), 2))
    check_by_parameter(optim.SparseAdam(parameters()))
    with pytest.raises(UnsplittableOptimizer, match="depends on which others"):
        check_by_parameter(Asking(parameters(), 2, common=True))
    with pytest.raises(UnsplittableOptimizer, match="LBFGS cannot be split"):
        check_by_parameter(optim.LBFGS(parameters()))


def test_collectives_are_refused_and_send_nothing(tmp_path):
    def averaged(p, gradient, state, group):
        dist.all_reduce(gradient)
        sent.append(gradient)
        p.sub_(group["lr"] * gradient)

    sent = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UnsplittableOptimizer, match=r"shared between ranks already.*allreduce"):
            update_rule(Own(parameters(), averaged))
        assert "allreduce" in collective_in_step(Own(parameters(), averaged))
    finally:
        dist.destroy_process_group()
    assert not sent
    assert collective_in_step(Own(parameters(), plain)) is None


def test_declarations():
    class NoTrial(Own):
        def __init__(self, params):
            super().__init__(params, plain)
            self.lock = threading.Lock()

    with pytest.raises(UnsplittableOptimizer, match=r"NoTrial.*cannot be copied.*Declare"):
        update_rule(NoTrial(parameters()))
    assert not calls_may_repeat(NoTrial(parameters()))
    assert update_rule(NoTrial(parameters()), declared="elements") == "elements"
    assert update_rule(make(optim.AdamW), declared="parameters") == "parameters"
    with pytest.raises(UnsplittableOptimizer, match="Adafactor was declared"):
        update_rule(make(optim.Adafactor), declared="elements")
    with pytest.raises(ValueError, match=r"one of \('elements', 'parameters'\)"):
        update_rule(make(optim.AdamW), declared="rows")


def test_a_step_that_does_nothing_shows_nothing():
    with pytest.raises(UnsplittableOptimizer, match="changed none"):
        update_rule(Own(parameters(), lambda *_: None))


def test_a_rate_of_zero_is_no_obstacle():
    """Warm-up starts at 0, where every rule looks alike."""
    optimizer = Own(parameters(), normalised)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert update_rule(optimizer) == "parameters"


def test_groups_that_are_treated_differently():
    def chosen(p, gradient, state, group):
        (normalised if group["normalised"] else plain)(p, gradient, state, group)

    first, *rest = parameters()
    groups = [{"params": rest, "normalised": False}, {"params": [first], "normalised": True}]
    assert update_rule(Own(groups, chosen)) == "parameters"


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
    assert update_rule(optimizer) == "elements"
    assert optimizer.state_dict() == before[0] and not optimizer.state
    assert all(
        torch.equal(p, q)
        for p, q in zip(optimizer.param_groups[0]["params"], before[1], strict=True)
    )
    assert all(bool((p.grad == 1).all()) for p in optimizer.param_groups[0]["params"])
    assert torch.equal(torch.get_rng_state(), before[2])


class Boxed(Tensor):
    """A class of tensors of its own, for states of parameters with as many elements as given."""


def boxed(p, gradient, state, group):
    state["box"] = gradient.as_subclass(Boxed) if p.numel() >= group["smallest"] else gradient
    p.sub_(group["lr"] * gradient)


def noisy(p, gradient, state, group):
    p.sub_(group["lr"] * (gradient + torch.randn_like(gradient)))


@pytest.mark.parametrize("shape", [(70, 80), (8, 5000), (40_000,), (3, 4, 9, 900)])
def test_states_in_tensors_of_a_class_are_seen_though_trials_are_small(shape):
    def optimizer(smallest):
        given = [nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(9))]
        return Own(given, boxed, smallest=smallest)

    for call, way_out in ((update_rule, "Leave"), (check_runs_on_shards, "Choose plan='ddp'")):
        with pytest.raises(UnsplittableOptimizer, match=rf"Boxed.*cannot be gathered.*{way_out}"):
            call(optimizer(4096))
        call(optimizer(1 << 20))


def test_random_numbers_are_others_for_shards():
    check_runs_on_shards(Own(parameters(), plain))
    with pytest.raises(UnsplittableOptimizer, match=r"draws random numbers.*Choose plan='ddp'"):
        check_runs_on_shards(Own(parameters(), noisy))


def test_a_rate_in_a_tensor_stays_one():
    def change(p, gradient, state, group):
        assert isinstance(group["lr"], Tensor)
        p.sub_(group["lr"] * gradient)

    optimizer = Own(parameters(), change, lr=torch.tensor(0.0))
    assert update_rule(optimizer) == "elements"
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    with pytest.raises(UnsplittableOptimizer, match=r"rate has no value.*Declare"):
        update_rule(optimizer)


def test_steps_that_are_shared_unasked():
    class Copy(optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Renamed(optim.AdamW):
        pass

    known = [optim.SGD, optim.AdamW, optim.Adafactor, LARS, LAMB, Renamed]
    assert [why_not_shared(make(cls)) for cls in known] == [None] * len(known)
    assert why_not_shared(make(Copy)) == (
        "the update rule of Copy is not known: ParallelOptimizerStep(rule=...) shares it"
    )
    assert "one vector" in why_not_shared(optim.LBFGS(parameters()))
    assert "sparse" in why_not_shared(optim.SparseAdam(parameters()))
    sharded = make(optim.SGD)
    sharded.consolidate_state_dict = lambda: None
    assert "shards its state" in why_not_shared(sharded)
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = make(optim.SGD)
        handle = getattr(optimizer, register)(lambda *_: None)
        assert "has step hooks" in why_not_shared(optimizer)
        handle.remove()
        assert why_not_shared(optimizer) is None
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = optim.SGD(table.parameters())
    table(torch.tensor([1])).sum().backward()
    assert why_not_shared(optimizer) == "its gradients are sparse"
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = optim.SGD([table.weight, table.weight])
    table.weight.grad = None
    assert why_not_shared(twice) == "it has a parameter twice"
