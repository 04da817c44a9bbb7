"""Values in few bits, against a plain loop over groups."""

from __future__ import annotations

import pytest
import torch

from lightning_topt.communication.wire import BITS, LevelFormat
from tests.communication.few_bits import in_few_bits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("numel", "group"), [(256, 64), (77, 8), (5, 128), (129, 64)])
def test_arrives_as_the_definition_says(bits, numel, group):
    torch.manual_seed(numel)
    values = torch.randn(numel) * 10.0 ** torch.randint(-3, 3, (numel,))
    form = LevelFormat(numel, bits, group)
    message = torch.full((form.nbytes,), 255, dtype=torch.uint8)
    form.encode(values, out=message)
    found, expected = form.decode(message), torch.tensor(in_few_bits(values.tolist(), bits, group))
    torch.testing.assert_close(
        found, expected, rtol=1e-2, atol=0
    )  # a sum in another order may round to the next bfloat16
    assert torch.equal(found.sign(), expected.sign())


@pytest.mark.parametrize("bits", BITS)
def test_other_devices_say_the_same(bits):
    """The form in plain torch, on the same values; a level may round another way."""
    torch.manual_seed(1)
    values = torch.randn(1000)
    form = LevelFormat(1000, bits, 64)
    plain = torch.zeros(form.nbytes, dtype=torch.uint8)
    form._encode_torch(values, plain)
    torch.testing.assert_close(form.decode(plain), form.round(values), rtol=1e-2, atol=0)
    levels = (
        plain[: form.level_bytes].view(torch.bfloat16)[: form.groups * form.levels_each].float()
    )
    assert torch.equal(form._decode_torch(levels.view(form.groups, -1), plain), form.decode(plain))


@pytest.mark.parametrize("bits", BITS)
def test_zeros_arrive(bits):
    form = LevelFormat(130, bits)
    assert torch.equal(form.round(torch.zeros(130)).abs(), torch.zeros(130))
