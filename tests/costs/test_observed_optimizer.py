"""What is seen in real steps, against what trial steps on copies show; and that watching changes
nothing.
"""

from __future__ import annotations

import copy
import gc
import math
import time

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._higher_order_ops.foreach_map import foreach_map
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topt.costs.cluster import Device
from lightning_topt.costs.observed_optimizer import OptimizerObserver, _followed
from lightning_topt.costs.optimizer import OptimizerError, OptimizerProfile, read_optimizer

CASES = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"foreach": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"foreach": True}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adadelta, {"foreach": True}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
    (pytorch_optimizer.Lion, {}),
    (pytorch_optimizer.Lamb, {}),
    (pytorch_optimizer.ScheduleFreeAdamW, {}),
    (pytorch_optimizer.AdaFactor, {}),
    (pytorch_optimizer.SOAP, {}),
]
ids = [f"{cls.__module__.split('.')[0]}.{cls.__name__}{sorted(options)}" for cls, options in CASES]

# Where watching sees something else than trial steps, and is right:
# - a transposed view is no traffic; a trial counts the many of SOAP as such, and is made on 64 x
#   64, not on the real sizes
# - what is written to `out=` is traffic; a trial leaves it out
OTHER_TRAFFIC = {pytorch_optimizer.SOAP: None, optim.Adamax: 64.0}  # bytes per element
# - temporaries of Lamb are all alive together, but a trial compares 4 * 4096 elements with 4 times
#   (4096 elements and a norm), finds the first a little less and counts them as of one parameter
OTHER_TEMPORARIES = {pytorch_optimizer.Lamb}


class Model(nn.Module):
    """Equal layers in a row, as most of a network is; dims are all different, as those of trial
    steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 80, bias=False) for _ in range(5))
        self.norm = nn.LayerNorm(80)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def loss(self) -> torch.Tensor:
        return sum((p**2).sum() for p in self.parameters() if p.requires_grad)


def differentiate(model):
    model.zero_grad()
    model.loss().backward()


def observe(model, optimizers, *, steps=2, timed=0) -> tuple[OptimizerProfile, OptimizerObserver]:
    observer = OptimizerObserver(optimizers, named_parameters=model.named_parameters())
    for step in range(steps + timed):
        differentiate(model)
        for optimizer in optimizers:
            with observer.recording(optimizer) if step < steps else observer.timing(optimizer):
                optimizer.step()
    return observer.profile(), observer


def temporaries(profile):
    """As prices of the update take them: the largest of a for-loop and the sum of foreach."""
    updates = profile.updates.values()
    largest = max((each.temporary_bytes for each in updates if not each.temporaries_add), default=0)
    return largest + sum(each.temporary_bytes for each in updates if each.temporaries_add)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=ids)
def test_agrees_with_trial_steps(cls, options):
    model = Model()
    optimizer = cls(model.parameters(), **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    read = read_optimizer([optimizer], named_parameters=model.named_parameters())
    seen, _ = observe(model, [optimizer])

    for name in ("name", "elementwise", "by_parameter", "adaptive"):
        assert getattr(seen, name) == getattr(read, name)
    assert list(seen.updates) == list(read.updates) and set(seen.probes) == set(read.probes)
    for name, expected in read.updates.items():
        update = seen.updates[name]
        assert update.state_bytes == expected.state_bytes, name
    calls = [sum(update.calls for update in profile.updates.values()) for profile in (read, seen)]
    # a trial leaves out those that are made once for all
    assert 0.95 * calls[0] - 1 <= calls[1] <= calls[0] + 25
    for name in (f"layers.{index}.weight" for index in range(5)):
        per_element = OTHER_TRAFFIC.get(cls, read.updates[name].moved_bytes / (48 * 80))
        if per_element is not None:
            assert seen.updates[name].moved_bytes == pytest.approx(per_element * 48 * 80, rel=0.05)
        if cls not in OTHER_TEMPORARIES and read.updates[name].temporary_bytes:
            assert seen.updates[name].temporaries_add == read.updates[name].temporaries_add
        for rows in (0, 1, 33):
            assert seen.state_bytes_of(name, (rows, 48)) == read.state_bytes_of(name, (rows, 48))
    if cls in OTHER_TEMPORARIES:
        assert temporaries(seen) == pytest.approx(
            4 * sum(p.numel() for p in model.parameters()), rel=0.05
        )
    else:
        assert temporaries(seen) == pytest.approx(temporaries(read), rel=0.15)
    assert len({seen.kinds[f"layers.{index}.weight"] for index in range(5)}) == 1


def test_temporaries_of_a_loop_are_those_of_this_model():
    """Variables of one parameter are alive while the next one's are made: a trial takes the next
    one to be as large.
    """
    model = nn.ModuleList([nn.Linear(100, 100), nn.Linear(2, 2)])
    model.loss = lambda: sum((p**2).sum() for p in model.parameters())
    optimizer = optim.AdamW(model.parameters())
    read = read_optimizer([optimizer], named_parameters=model.named_parameters())
    seen, _ = observe(model, [optimizer])
    assert read.updates["0.weight"].temporary_bytes == pytest.approx(3 * 40_000, rel=0.01)
    assert seen.updates["0.weight"].temporary_bytes == pytest.approx(2 * 40_000, rel=0.01)


@pytest.mark.parametrize("foreach", [False, True])
def test_groups_with_other_options_frozen_and_several_optimizers(foreach):
    model = Model()
    matrices, vectors = list(model.layers.parameters()), list(model.norm.parameters())
    optimizers = [
        optim.SGD(
            [{"params": matrices[:3], "momentum": 0.9}, {"params": matrices[3:]}],
            lr=0.1,
            foreach=foreach,
        ),
        optim.Adagrad([*vectors, model.frozen], foreach=foreach),
    ]
    read = read_optimizer(optimizers, named_parameters=model.named_parameters())
    seen, observer = observe(model, optimizers, timed=3)
    assert seen.name == "SGD + Adagrad"
    assert {n: u.state_bytes for n, u in seen.updates.items()} == {
        n: u.state_bytes for n, u in read.updates.items()
    }
    assert (
        seen.state_bytes("layers.0.weight") == 4 * 48 * 80
        and seen.state_bytes("layers.4.weight") == 0
    )
    assert (
        seen.state_bytes("frozen") == 16 + 4
        and "frozen" not in seen.probes
        and "frozen" not in seen.seconds_per_element
    )
    for name in ("layers.0.weight", "layers.4.weight"):
        assert seen.updates[name].moved_bytes == pytest.approx(
            read.updates[name].moved_bytes, rel=0.01
        )
    assert [observer.timed(optimizer) for optimizer in optimizers] == [3, 3]
    seconds = seen.seconds_per_element
    assert set(seconds) == set(read.probes)
    assert seconds["layers.0.weight"] == seconds["layers.4.weight"] != seconds["norm.bias"]


class Counted(optim.AdamW):
    """Counts its steps and its closure's calls."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


@pytest.mark.parametrize("cls", [Counted, pytorch_optimizer.Lamb, optim.Adafactor])
@pytest.mark.parametrize("with_closure", [False, True])
def test_watching_changes_nothing(cls, with_closure):
    def train(watched):
        torch.manual_seed(0)
        model, losses = Model(), []
        optimizer = cls(model.parameters(), lr=0.01)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())

        def closure():
            optimizer.zero_grad()
            loss = model.loss() + torch.rand(())
            loss.backward()
            losses.append(loss.detach())
            return loss

        def step():
            if with_closure:
                return optimizer.step(closure=closure)
            closure()
            return optimizer.step()

        for number in range(6):
            attributes = dict(vars(optimizer))
            if not watched:
                step()
            else:
                with observer.recording(optimizer) if number < 3 else observer.timing(optimizer):
                    step()
                assert vars(optimizer).keys() - attributes.keys() <= {"_opt_called", "calls"}
                assert vars(optimizer)["step"] is attributes["step"]
            scheduler.step()
        state = copy.deepcopy(optimizer.state_dict())
        return (
            [*model.parameters(), *losses],
            state,
            getattr(optimizer, "calls", 6),
            torch.get_rng_state(),
        )

    plain, watched = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
    assert len(plain[0]) == len(watched[0]) and str(plain[1]) == str(watched[1])
    assert plain[2] == watched[2] == 6
    assert torch.equal(plain[3], watched[3])


def test_what_a_closure_does_is_not_the_optimizers():
    class Twice(optim.Optimizer):
        """Sharpness-aware: a second gradient at another place, in the same step."""

        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            parameters = self.param_groups[0]["params"]
            for p in parameters:
                p.add_(p.grad)
            with torch.enable_grad():
                closure()
            for p in parameters:
                p.sub_(p.grad)
            return loss

    model = Model()
    for optimizer in (
        optim.AdamW(model.parameters()),
        Twice([p for p in model.parameters() if p.requires_grad]),
    ):
        observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
        calls = []

        def closure(optimizer=optimizer, calls=calls):
            calls.append(1)
            optimizer.zero_grad()
            loss = model.loss()
            loss.backward()
            time.sleep(0.02)
            return loss

        for number in range(4):
            with observer.recording(optimizer) if number < 2 else observer.timing(optimizer):
                optimizer.step(closure)
        profile = observer.profile()
        update = profile.updates["layers.0.weight"]
        numel = 48 * 80
        if isinstance(optimizer, Twice):
            assert len(calls) == 8
            assert update.moved_bytes == pytest.approx(2 * 3 * 4 * numel) and update.calls == 2
        else:
            without, _ = observe(model, [optim.AdamW(model.parameters())])
            assert len(calls) == 4 and update == without.updates["layers.0.weight"]
        assert (
            profile.seconds_per_element["layers.0.weight"]
            * sum(p.numel() for p in model.parameters())
            < 0.02
        )


def test_never_calls_its_closure_and_needs_none():
    class Deaf(optim.SGD):
        def step(self, closure=None):
            return super().step()

    model = Model()
    differentiate(model)
    optimizer = Deaf(model.parameters(), lr=0.1)
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    with observer.recording(optimizer):
        optimizer.step(lambda: 1 / 0)
    assert observer.profile().updates["layers.0.weight"].calls == 1


def test_lbfgs_by_formula():
    model = nn.Linear(4, 3)
    optimizer = optim.LBFGS(model.parameters())
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for context in (observer.recording, observer.timing):
        with context(optimizer):
            optimizer.step(closure)
    assert observer.profile() == read_optimizer(
        [optimizer], named_parameters=model.named_parameters()
    )
    assert not observer.profile().seconds_per_element


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_collectives_inside(fake_group):
    class Averaged(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        dist.all_reduce(p.grad)
            return super().step(closure)

    class Own(optim.AdamW):  # steps as AdamW does
        pass

    model = Model()
    plain, observer = observe(model, [Own(model.parameters())])
    assert plain.elementwise and plain.by_parameter and not observer.collectives
    profile, observer = observe(
        model, [Own([model.norm.weight]), Averaged(model.layers.parameters(), lr=0.1)]
    )
    assert observer.collectives and not profile.elementwise and not profile.by_parameter

    optimizer = Own(model.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: dist.barrier())
    profile, observer = observe(model, [optimizer])
    assert observer.collectives and not profile.elementwise and not profile.by_parameter


class OnSelf(optim.Optimizer):
    """Keeps momentum, factors and one vector for everything beside its state."""

    def __init__(self, params, *, ready=False):
        super().__init__(params, {})
        self.momentum, self.rows = {}, {}
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.flat = torch.zeros(sum(p.numel() for p in trained)) if ready else None

    @torch.no_grad()
    def step(self, closure=None):
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p in trained:
            self.momentum.setdefault(p, torch.zeros_like(p)).add_(p.grad)
            if p.ndim == 2:
                # a new one each time
                self.rows[p] = self.rows[p] + p.grad.sum(1) if p in self.rows else p.grad.sum(1)
            p.sub_(self.momentum[p], alpha=0.1)
        if self.flat is None:
            self.flat = torch.zeros(sum(p.numel() for p in trained))
        self.flat.add_(torch.cat([p.grad.flatten() for p in trained]))


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_state_on_the_optimizer_itself(ready, steps):
    model = Model()
    optimizer = OnSelf(model.parameters(), ready=ready)
    profile, _ = observe(model, [optimizer], steps=steps)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rows = len(parameter) if parameter.ndim == 2 else 0
            assert profile.state_bytes(name) == 4 * (2 * parameter.numel() + rows)
    assert profile.state_bytes_of("layers.0.weight", (7, 48)) == 4 * (2 * 7 * 48 + 7)
    assert profile.state_bytes("frozen") == 0


def test_inner_optimizers_and_keys_that_are_no_parameters():
    class Outer(optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            self.inner.step(closure)
            self.state["steps"] = self.state.get("steps", torch.zeros(5000)) + 1

    model = Model()
    inner = optim.AdamW([p for p in model.parameters() if p.requires_grad])
    profile, _ = observe(model, [Outer(inner)])
    real = sum(leaf.nbytes for state in inner.state.values() for leaf in state.values()) + 4 * 5000
    assert sum(update.state_bytes for update in profile.updates.values()) == pytest.approx(
        real, abs=10
    )


def test_gradients_in_one_bucket():
    """As DDP keeps them with gradient_as_bucket_view: all of them share one storage."""
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    plain, _ = observe(model, [optim.AdamW(trained)])
    bucket = torch.rand(sum(p.numel() for p in trained))
    for p, view in zip(trained, bucket.split([p.numel() for p in trained]), strict=True):
        p.grad = view.view_as(p)
    optimizer = optim.AdamW(trained)
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    for _ in range(2):
        with observer.recording(optimizer):
            optimizer.step()
    assert observer.profile().updates == plain.updates


def test_a_first_step_alone():
    """What it creates is state and no temporary."""
    model = Model()
    for options in ({}, {"foreach": True}, {"fused": True}):
        once, _ = observe(model, [optim.AdamW(model.parameters(), **options)], steps=1)
        twice, _ = observe(model, [optim.AdamW(model.parameters(), **options)], steps=2)
        for name, update in twice.updates.items():
            assert once.updates[name].state_bytes == update.state_bytes
            assert once.updates[name].temporary_bytes == pytest.approx(
                update.temporary_bytes, rel=0.01, abs=16
            )


def test_a_skipped_step_counts_for_nothing():
    model = Model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    for overflow in (True, False):
        model.zero_grad()
        scaler.scale(model.loss() * (math.inf if overflow else 1.0)).backward()
        with observer.recording(optimizer):
            scaler.step(optimizer)
        scaler.update()
        assert observer.recorded(optimizer) == (not overflow)
        if overflow:
            with pytest.raises(OptimizerError, match="no step of SGD has been recorded"):
                observer.profile()
    # unscaling is not the optimizer's
    assert observer.profile().updates["layers.0.weight"].calls == 1


def test_parameters_without_gradient_are_like_their_kind():
    model = Model()
    optimizer = optim.AdamW(model.parameters())
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    for context in (observer.recording, observer.recording, observer.timing):
        differentiate(model)
        model.layers[0].weight.grad = model.norm.weight.grad = model.norm.bias.grad = None
        with context(optimizer):
            optimizer.step()
    profile = observer.profile()
    assert profile.updates["layers.0.weight"] == profile.updates["layers.1.weight"]
    assert profile.updates["norm.weight"].moved_bytes == profile.state_bytes("norm.weight") == 0
    assert set(profile.seconds_per_element) == set(profile.probes)


def test_kernels_that_no_dispatcher_sees():
    class Foreign(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = (
                            self.state[p].setdefault("m", torch.zeros_like(p))
                            if p not in self.state
                            else None
                        )
                        array = p.detach().numpy() if state is None else None
                        if array is not None:
                            array -= 0.1 * p.grad.numpy()

    model = Model()
    profile, _ = observe(model, [Foreign(model.parameters())])
    assert profile.state_bytes("layers.0.weight") == 4 * 48 * 80
    # parameter and state twice, gradient once
    assert profile.updates["layers.0.weight"].moved_bytes == 5 * 4 * 48 * 80


def test_errors_of_the_step_are_the_users():
    class Broken(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise KeyError("mine")

    model = Model()
    differentiate(model)
    optimizer = Broken(model.parameters(), lr=0.1)
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    for context in (observer.recording, observer.timing):
        with pytest.raises(KeyError, match="mine"), context(optimizer):
            optimizer.step()
    assert (
        "step" not in vars(optimizer)
        and not observer.recorded(optimizer)
        and not observer.timed(optimizer)
    )
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_errors_of_watching_reach_the_profile_only(monkeypatch):
    def broken(*_):
        raise RuntimeError("an operator nobody knows")

    monkeypatch.setattr("lightning_topt.costs.optimizer_recording._makers", broken)
    model = Model()
    differentiate(model)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    with observer.recording(optimizer):
        optimizer.step()
    assert len(optimizer.state) == 7
    with pytest.raises(OptimizerError, match=r"could not be watched.*an operator nobody knows"):
        observer.profile()


def test_refusals_are_those_of_trial_steps():
    stranger = nn.Parameter(torch.ones(1))
    for optimizer, match in (
        (optim.SGD([stranger], lr=1.0), "not a parameter of the module"),
        (optim.SparseAdam([stranger]), "sparse gradients"),
    ):
        named = [] if isinstance(optimizer, optim.SGD) else [("p", stranger)]
        with pytest.raises(OptimizerError, match=match):
            read_optimizer([optimizer], named_parameters=named)
        with pytest.raises(OptimizerError, match=match):
            OptimizerObserver([optimizer], named_parameters=named).profile()


def test_a_compiled_step_stays_compiled():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = Model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        differentiate(model)
        optimizer.step()
    before = len(graphs)
    assert before
    observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
    differentiate(model)
    with observer.recording(optimizer):
        optimizer.step()
    assert len(graphs) == before
    assert observer.profile().updates["layers.0.weight"].moved_bytes == pytest.approx(
        12 * 48 * 80, rel=0.01
    )


@pytest.mark.parametrize(
    ("state", "parameter", "expected"),
    [
        ((), (3, 4), ()),
        ((1,), (1,), (-1,)),
        ((3, 4), (3, 4), (-1, -2)),
        ((12,), (3, 4), (-1, -2)),
        ((3, 1), (3, 4), (-1, 1)),
        ((4, 1), (4, 4), (-1, 1)),
        ((1, 4), (4, 4), (1, -2)),
        ((4, 4), (3, 4), (-2, -2)),
        ((3, 3), (3, 4), (-1, -1)),
        ((4,), (4, 4), (-1,)),
        ((4, 4), (4, 4, 5), (-1, -2)),
        ((7,), (3, 4), (7,)),
    ],
)
def test_dims_of_state_that_follow_the_parameters(state, parameter, expected):
    assert _followed(state, parameter) == expected


def test_equal_dims_are_told_apart_by_others_of_their_kind():
    class Columns(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("columns", torch.zeros_like(p[0])).add_(p.grad.sum(0))

    model = nn.ModuleDict(
        {"square": nn.Linear(6, 6, bias=False), "other": nn.Linear(6, 5, bias=False)}
    )
    model.loss = lambda: sum((p**2).sum() for p in model.parameters())
    profile, _ = observe(model, [Columns(model.parameters())])
    assert profile.state_bytes_of("square.weight", (2, 6)) == 4 * 6


def test_seconds_contain_the_overhead_of_calls_once():
    model = Model()
    optimizer = optim.AdamW(model.parameters())
    _, observer = observe(model, [optimizer], timed=5)
    overhead = 1e-7
    device = Device("d", 1, {"float32": 1.0}, 100.0, overhead)

    def whole(profile):
        named = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
        return sum(
            profile.update_seconds(name, numel=numel, device=device) for name, numel in named
        )

    calls = sum(update.calls for update in observer.profile().updates.values())
    once, twice = whole(observer.profile(op_overhead_seconds=overhead)), whole(observer.profile())
    assert twice - once == pytest.approx(calls * overhead)


def test_a_busy_machine_does_not_count():
    class Waiting(optim.SGD):
        def step(self, closure=None):
            time.sleep(0.05)  # as if others had the processor
            return super().step(closure)

    model = Model()
    profile, _ = observe(model, [Waiting(model.parameters(), lr=0.1)], timed=3)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert profile.seconds_per_element["layers.0.weight"] * numel < 0.04


def test_higher_order_operators_pass():
    class Mapped(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            stepped = foreach_map(
                lambda p, g: p - 0.1 * g, parameters, [p.grad for p in parameters]
            )
            for p, new in zip(parameters, stepped, strict=True):
                p.copy_(new)

    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    profile, _ = observe(model, [Mapped(trained)])
    assert profile.updates["layers.0.weight"].moved_bytes == pytest.approx(
        4 * 48 * 80 * (3 + 3), rel=0.01
    )


def test_overhead_is_small_and_nothing_stays_alive():
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(75))
    taken, plain = [], []
    for _ in range(3):
        optimizer = optim.AdamW(model.parameters(), foreach=False)
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        observer = OptimizerObserver([optimizer], named_parameters=model.named_parameters())
        for _ in range(2):
            start = time.thread_time()
            with observer.recording(optimizer):
                optimizer.step()
            taken.append(time.thread_time() - start)
        start = time.thread_time()
        optimizer.step()
        plain.append(time.thread_time() - start)
    limit = max(0.1, 20 * min(plain))  # a step takes 5 ms, unless the machine is busy
    assert min(taken[::2]) < limit and min(taken[1::2]) < limit
    gc.collect()
    assert not any(type(each).__name__ in ("_Recording", "_Memory") for each in gc.get_objects())
