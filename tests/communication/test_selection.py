"""Every selection against a stable sort; the step of error feedback against its three lines."""

from __future__ import annotations

import numba
import pytest
import torch

from lightning_topt.basics.jit import compiled
from lightning_topt.communication import selection
from lightning_topt.communication.selection import (
    NonFiniteError,
    _feedback_torch,
    feedback_top_k,
    top_k,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DATA = {
    "normal": lambda n: torch.randn(n),
    "heavy tails": lambda n: (
        torch.randn(n).sign() * torch.randn(n).abs().pow(8).clamp(max=6e4)
    ),  # float16 ends at 65504
    "zeros": lambda n: torch.zeros(n),
    "equal": lambda n: torch.full((n,), -2.5),
    "ascending": lambda n: torch.arange(n).float() / n,
    "mostly zeros": lambda n: torch.randn(n) * (torch.rand(n) < 1e-3),
    "all but few equal": lambda n: torch.where(
        torch.rand(n) < 1e-3, torch.randn(n) * 3, torch.ones(n)
    ),
    # what the sample sees is all there is
    "periodic": lambda n: (torch.arange(n) % 12800 < 64) * torch.rand(n),
    # the sample sees zeros only
    "unseen": lambda n: (torch.arange(n) % 12800 >= 64) * torch.rand(n),
    "clustered": lambda n: (
        (torch.rand(n // 500 + 1, 1) < 0.02).mul(torch.randn(n // 500 + 1, 500)).flatten()[:n]
    ),
    "descending": lambda n: -torch.arange(n).flip(0).float() / n,
    "tiny": lambda n: torch.randn(n) * 1e-42,  # denormal numbers
}


def fake_collect(values, added, threshold, indices, *, scale=0.0):
    """What the kernel of a GPU does."""
    total = values if added is None else torch.add(values, added.float(), alpha=scale)
    finite = total.isfinite()
    if added is not None:
        values.copy_(torch.where(finite, total, values))
    kept = torch.nonzero(finite & (total.abs() >= threshold)).view(-1).flip(0)[: len(indices)]
    indices[: len(kept)] = kept
    count = (finite & (total.abs() >= threshold)).sum()
    return torch.stack([count, (~finite).any()]).int()


def slow_indices(x, k):
    return x.abs().sort(descending=True, stable=True).indices[:k].sort().values


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the oracle's threads would wait for each other longer than they sort
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", DATA)
def test_exactly_the_k_largest_and_of_equal_ones_the_first(dtype, data):
    for n in (10, 65536, 100_003):
        x = DATA[data](n).to(dtype)
        order = x.abs().sort(descending=True, stable=True).indices
        for k in sorted({0, 1, n // 1000, n // 10, n - 1, n}):
            expected = order[:k].sort().values
            values, indices = top_k(x, k)
            assert indices.dtype == torch.int64 and values.dtype == dtype, (n, k)
            assert torch.equal(indices, expected) and torch.equal(values, x[indices]), (n, k)


def test_any_shape_and_strides():
    x = torch.randn(40, 50, 6)[::2, :, 1::2].transpose(0, 1)
    values, indices = top_k(x, 30)
    assert not x.is_contiguous() and torch.equal(values, x.flatten()[indices])
    assert values.abs().min() >= x.abs().flatten().sort().values[-31]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad):
    for where in (0, 17, 70_002, 70_009):
        x = torch.randn(70_010)
        x[where] = bad
        for k in (0, 5):
            with pytest.raises(NonFiniteError):
                top_k(x, k)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feedback_is_accumulate_select_zero(data, dtype):
    for n in (1, 1000, 100_003):
        gradient, residual = DATA[data](n).to(dtype), torch.randn(n)
        for k in sorted({0, 1, n // 100, n}):
            expected = residual + 0.5 * gradient.float()
            values, indices = feedback_top_k(gradient, residual, k, scale=0.5)
            assert indices.dtype == torch.int32 and values.dtype == torch.float32
            # Multiply-add may be fused in one of the two, which moves a value by one rounding:
            # compare what was kept and taken.
            whole = residual.clone()
            whole[indices] = values
            torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(indices.long(), slow_indices(whole, k))
            assert not residual[indices].any()


@pytest.mark.parametrize("where", [0, 1023, 5000, 99_999])
@pytest.mark.parametrize("k", [0, 100])
def test_a_gradient_that_is_not_finite_changes_nothing(where, k):
    gradient, residual = torch.randn(100_000), torch.randn(100_000)
    before = residual.clone()
    gradient[where] = float("nan")
    with pytest.raises(NonFiniteError):
        feedback_top_k(gradient, residual, k)
    # undone by subtraction: up to rounding
    torch.testing.assert_close(residual, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_read_exactly(dtype):
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite, residual = numbers[numbers.isfinite()], torch.zeros(int(numbers.isfinite().sum()))
    feedback_top_k(finite, residual, 0)
    assert torch.equal(residual, finite.float())
    for bad in numbers[~numbers.isfinite()][::101]:
        with pytest.raises(NonFiniteError):
            top_k(torch.cat([finite[:1000], bad.view(1)]), 3)


@pytest.mark.parametrize("where", [0, 70_002, 99_999])
def test_a_sum_that_overflows_leaves_what_it_was_added_to(where):
    gradient, residual = torch.randn(100_000), torch.randn(100_000)
    gradient[where] = residual[where] = 3e38
    before = residual.clone()
    with pytest.raises(NonFiniteError):
        feedback_top_k(gradient, residual, 10)
    torch.testing.assert_close(residual, before, rtol=1e-6, atol=1e-6)


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch):
    real = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_other_devices_run_follows_the_compiled_form(dtype):
    """The plain-torch step of error feedback, here on CPU tensors."""
    gradient, residual = torch.randn(100_000).to(dtype), torch.randn(100_000)
    ours, twin = residual.clone(), residual.clone()
    first = feedback_top_k(gradient, ours, 500, scale=0.5)
    second = _feedback_torch(gradient, twin, 500, scale=0.5)
    assert torch.equal(first.indices, second.indices)
    for one, other in ((first.values, second.values), (ours, twin)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    gradient[7] = float("nan")
    before = twin.clone()
    assert _feedback_torch(gradient, twin, 500, scale=0.5) is None and torch.equal(twin, before)


@pytest.mark.parametrize("data", DATA)
def test_what_a_gpu_runs_around_its_kernel(data, monkeypatch):
    monkeypatch.setattr(selection, "_has_triton", lambda x: True)
    monkeypatch.setattr(selection.selection_triton, "collect", fake_collect)
    for n in (1000, 100_003):
        x, residual = DATA[data](n), torch.randn(n)
        for k in (0, 1, n // 100, n):
            assert torch.equal(top_k(x, k).indices, slow_indices(x, k))
            whole = torch.add(residual, x, alpha=0.5)
            values, indices = feedback_top_k(x, residual, k, scale=0.5)
            assert torch.equal(indices.long(), slow_indices(whole, k))
            assert torch.equal(values, whole[indices.long()])
            assert torch.equal(residual, whole.index_fill(0, indices.long(), 0))
    x[7], before = float("nan"), residual.clone()
    with pytest.raises(NonFiniteError):
        feedback_top_k(x, residual, 5)
    torch.testing.assert_close(residual, before, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("n", [1000, 3_000_001])
def test_cuda_selects_as_a_sort_does(data, n):
    x = DATA[data](n).cuda()
    for k in (0, 1, n // 100, n):
        assert torch.equal(top_k(x, k).indices, slow_indices(x, k))
        residual = torch.randn(n, device="cuda")
        whole = residual + 0.5 * x
        values, indices = feedback_top_k(x, residual, k, scale=0.5)
        assert torch.equal(indices.long(), slow_indices(whole, k))
        torch.testing.assert_close(values, whole[indices.long()])
        whole[indices.long()] = 0
        torch.testing.assert_close(residual, whole)
