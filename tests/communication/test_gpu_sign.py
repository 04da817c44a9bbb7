"""One bit per element on CUDA: as on a CPU, and nothing waits for the device; skipped without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_topt.communication.bucket import BucketLayout
from lightning_topt.communication.methods.sign import SignFormat, add_signs, take_signs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (4096, 7, 100_001, 64)


def form() -> SignFormat:
    offsets = tuple(sum(SIZES[:index]) for index in range(len(SIZES)))
    shapes = tuple(torch.Size([size]) for size in SIZES)
    exempt = (False, True, False, False)
    return SignFormat(BucketLayout(("a", "b", "c", "d"), offsets, SIZES, shapes, exempt))


def test_messages_are_those_of_a_cpu() -> None:
    generator, made = torch.Generator().manual_seed(0), []
    given = [torch.randn(sum(SIZES), generator=generator) for _ in range(3)]
    for device in ("cpu", "cuda"):
        pending = [one.to(device, copy=True) for one in given]
        rows = torch.stack([form().encode(one) for one in pending])
        total = torch.zeros(sum(SIZES), device=device)
        form().add_decoded(rows, to=total, scale=1 / 3)
        made.append((rows.cpu(), total.cpu(), torch.stack(pending).cpu()))
    (rows, total, left), (rows_cuda, total_cuda, left_cuda) = made
    start = form().bits[0].start  # scales are sums, in another order
    assert torch.equal(rows_cuda[:, start:], rows[:, start:])
    torch.testing.assert_close(form().scales(rows_cuda), form().scales(rows))
    torch.testing.assert_close(total_cuda, total)
    torch.testing.assert_close(left_cuda, left)


@pytest.fixture
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_signs_wait_for_nothing(no_waits: None) -> None:
    values = torch.zeros(1001, device="cuda")
    packed = torch.zeros(3, 126, dtype=torch.uint8, device="cuda")
    steps = torch.ones(3, device="cuda")
    take_signs(values, step=steps[0], packed=packed[0])
    add_signs(packed, steps=steps, values=values)
