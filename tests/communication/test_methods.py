"""What every `BucketExchange` must do, alone and under DDP. A new method is added to METHODS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from examples.recipes.demo import DeMo
from examples.recipes.power_sgd import PowerSGD
from examples.recipes.sign import Sign
from lightning_topt.communication.exchange_method import gradient_methods, read_gradient_method
from tests.communication.buckets import (
    ONE_BUCKET,
    SHAPES,
    TWO_BUCKETS,
    NonFiniteGradient,
    exchange_step,
    gradients_of,
    make_exchange,
)
from tests.communication.exchange_ranks import (
    assert_equal_on_all_ranks,
    bucket_names,
    loss_of,
    train,
    wrap,
)
from tests.launch import run_on_pool

METHODS = {
    "bounded_loss": {"tolerance": 0.0},  # with losses: test_bounded_loss_method.py
    "topk": {"density": 0.2, "bits": 2},
    "dense": {},
    "bf16": {},
    "fp16": {},
}
# those that a user copies
RECIPES = {"powersgd": PowerSGD(rank=2), "sign": Sign(), "demo": DeMo(density=0.2, chunk=8)}
ALL = [*METHODS, *RECIPES]
MEANS = [name for name in ALL if name != "demo"]  # which gives the sign of a sum
FEEDBACK = ["topk", "powersgd", "sign", "bounded_loss"]
EXEMPT = dict.fromkeys(FEEDBACK, ("bias",))
# bytes sent / dense bytes, where no method makes them fewer
WHOLE = {"dense": (1, 1), "bounded_loss": (1, 1.5)}


def made(method, **options):
    if method in RECIPES:
        return replace(RECIPES[method], **options)
    return read_gradient_method({"method": method, **METHODS[method], **options})


@pytest.fixture(params=ALL)
def method(request):
    return request.param


def test_every_method_is_here():
    assert set(METHODS) == set(gradient_methods())


def _exchange(rank, method, world_size=2, **options):
    return make_exchange(made(method, **options), rank, world_size)


def _steps(exchange, rank, steps, *, method, **kwargs):
    exempt = EXEMPT.get(method, ())
    return [
        exchange_step(exchange, gradients_of(rank, step), step=step, exempt=exempt, **kwargs)
        for step in steps
    ]


def _same(one, other, *, tolerance=0.0):
    for first, second in zip(one, other, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance, msg=name)


def _first_step(rank, method):
    return _steps(_exchange(rank, method), rank, [0], method=method)[0]


@pytest.mark.parametrize("name", MEANS)
def test_first_step_is_the_exact_mean(name):
    results = run_on_pool(_first_step, 2, name)
    expected = {
        n: torch.stack([gradients_of(rank, 0)[n] for rank in range(2)]).mean(0) for n in SHAPES
    }
    for means in results:
        _same([means], [expected], tolerance=1e-6)


def _resumed(rank, method):
    exchange = _exchange(rank, method)
    _steps(exchange, rank, range(4), method=method)
    state = {
        kind: {name: value.clone() for name, value in tensors.items()}
        for kind, tensors in exchange.state_dict().items()
    }
    other = _exchange(rank, method)
    if state:
        other.load_state_dict(state)
    _same(
        _steps(exchange, rank, range(4, 7), method=method),
        _steps(other, rank, range(4, 7), method=method),
    )
    return bool(state)


def test_state_round_trip_continues_alike(method):
    assert run_on_pool(_resumed, 2, method) == [method in [*FEEDBACK, "demo"]] * 2


def _relaid(rank, method):
    """Methods that treat each parameter by itself do not see how buckets are cut."""
    whole, cut = _exchange(rank, method), _exchange(rank, method)
    _same(
        _steps(whole, rank, range(6), method=method),
        _steps(cut, rank, range(3), method=method)
        + _steps(cut, rank, range(3, 6), method=method, buckets=TWO_BUCKETS),
        tolerance=1e-5,
    )
    return cut.residual_norm() - whole.residual_norm()


# topk selects, and demo rounds, per bucket
@pytest.mark.parametrize("name", sorted(set(ALL) - {"topk", "demo"}))
def test_residuals_follow_their_parameters_to_new_buckets(name):
    assert run_on_pool(_relaid, 2, name) == pytest.approx([0, 0], abs=1e-4)


def _scaled(rank, method):
    plain, scaled = _exchange(rank, method), _exchange(rank, method)
    expected = _steps(plain, rank, range(5), method=method)
    results = _steps(scaled, rank, range(5), method=method, loss_scale=64.0)
    # A power of two changes no bit but those of numbers that float16 cannot hold.
    _same([{n: m / 64 for n, m in means.items()} for means in results], expected, tolerance=1e-6)
    return scaled.residual_norm() - plain.residual_norm()


def test_loss_scale_stays_out_of_the_residual(method):
    assert run_on_pool(_scaled, 2, method) == pytest.approx([0, 0], abs=1e-4)


def _not_finite(rank, method, name, value):
    exchange = _exchange(rank, method)
    _steps(exchange, rank, range(3), method=method)
    before = exchange.state_dict()
    before = {kind: {n: t.clone() for n, t in tensors.items()} for kind, tensors in before.items()}
    gradients = gradients_of(rank, 3)
    if rank == 1:
        gradients[name].view(-1)[5] = value
    with pytest.raises(NonFiniteGradient) as caught:
        exchange_step(exchange, gradients, step=3, exempt=EXEMPT.get(method, ()))
    exchange.put_back()
    after = exchange.state_dict()
    if rank == 1 and name != "bias":  # this rank's gradient is lost, what it held back is not
        for n, residual in before.get("residual", {}).items():
            torch.testing.assert_close(after["residual"][n], residual, rtol=0, atol=1e-5)
    assert all(torch.isfinite(t).all() for tensors in after.values() for t in tensors.values())
    means = _steps(exchange, rank, [4], method=method)[0]
    assert all(torch.isfinite(mean).all() for mean in means.values())
    return caught.value.own, means


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["first", "bias"])  # compressed, exempt
def test_non_finite_gradient_is_known_everywhere_and_leaves_no_trace(method, name, value):
    (own_first, first), (own_second, second) = run_on_pool(_not_finite, 2, method, name, value)
    assert (own_first, own_second) == (False, True)
    _same([first], [second])


def _of_16_bits(rank, method):
    exchange = _exchange(rank, method)
    steps = []
    for step in range(4):
        gradients = gradients_of(rank, step, dtype=torch.bfloat16)
        steps.append(exchange_step(exchange, gradients, step=step, exempt=EXEMPT.get(method, ())))
    return steps


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_16_bits(name):
    first, second = run_on_pool(_of_16_bits, 2, name)
    _same(first, second)
    whole = run_on_pool(_first_step, 2, name)[0]
    for step in first:
        assert all(
            torch.isfinite(mean).all() and mean.dtype == torch.bfloat16 for mean in step.values()
        )
    for parameter, mean in first[0].items() if name in MEANS else ():
        torch.testing.assert_close(mean.float(), whole[parameter], rtol=0.02, atol=0.02)


def _thrown_away(rank, method):
    """Mean over ranks of what is held back, before and after a step that the scaler skipped."""
    exchange = _exchange(rank, method)
    _steps(exchange, rank, range(3), method=method, buckets=TWO_BUCKETS)
    before = exchange.state_dict()["residual"]
    before = {name: value.clone() for name, value in before.items()}
    _steps(exchange, rank, [3], method=method, buckets=TWO_BUCKETS)
    exchange.put_back()
    exchange.put_back()  # twice is once
    after = exchange.state_dict()["residual"]
    result = {}
    for name in ("first", "second", "conv"):
        gradient = gradients_of(rank, 3)[name].view(-1)
        pair = torch.stack([after[name].view(-1), before[name].view(-1) + gradient])
        dist.all_reduce(pair)
        result[name] = float((pair[0] - pair[1]).abs().max())
    return result


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_a_skipped_step_sent_is_held_back_again(name):
    for result in run_on_pool(_thrown_away, 2, name):
        assert max(result.values()) < 1e-5


def _nothing_is_lost(rank, method):
    """Sum of means + mean of residuals = sum of mean gradients: what error feedback is for."""
    exchange = _exchange(rank, method)
    steps = range(1, 6)
    means = _steps(exchange, rank, steps, method=method, buckets=ONE_BUCKET)
    residual = exchange.state_dict()["residual"]
    worst = 0.0
    for name in SHAPES:
        given = sum(gradients_of(rank, step)[name] for step in steps)
        pair = torch.stack(
            [
                residual[name].view(-1) if name in residual else torch.zeros(given.numel()),
                given.view(-1),
            ]
        )
        dist.all_reduce(pair)
        received = sum(step[name] for step in means).view(-1)
        worst = max(worst, float((received + pair[0] / 2 - pair[1] / 2).abs().max()))
    return worst


@pytest.mark.parametrize("name", FEEDBACK)
def test_error_feedback_loses_nothing(name):
    assert max(run_on_pool(_nothing_is_lost, 2, name)) < 2e-5


def _mean_loss(ddp, world_size):
    return sum(
        float(loss_of(ddp.module, rank, step)) for rank in range(world_size) for step in range(4)
    ) / (4 * world_size)


def _trained(rank, method, world_size):
    ddp, exchange = wrap(made(method))
    before = _mean_loss(ddp, world_size)
    for _ in train(ddp, rank=rank, steps=range(40)):
        pass
    assert_equal_on_all_ranks(ddp)
    assert len(bucket_names(exchange)) > 2
    statistics = exchange.statistics()
    exchange.close()
    return before, _mean_loss(ddp, world_size), statistics.bytes_sent / statistics.dense_bytes


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 2) for name in MEANS), ("topk", 3), ("bounded_loss", 3)]
)
def test_trains_under_ddp_with_several_buckets(name, world_size):
    before, after, share = run_on_pool(_trained, world_size, name, world_size)[0]
    assert after < 0.6 * before
    least, most = WHOLE.get(name, (0, 0.8))
    assert least <= share <= most
