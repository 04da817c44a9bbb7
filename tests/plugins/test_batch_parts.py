"""Batches of any structure are split into nearly equal parts; what cannot be is named."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_topt.plugins.microbatches import (
    combined_calls,
    combined_output,
    first_samples,
    split_batch,
)
from lightning_topt.plugins.stage_steps import LoggedCall
from tests.host_waits import fake_device, no_host_waits


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping that is no dict."""


class Pair(NamedTuple):
    tokens: Tensor
    names: list[str]


@dataclass
class Graph:
    nodes: Tensor
    options: dict[str, Any]


def ramp(*shape: int) -> Tensor:
    return torch.arange(float(np.prod(shape))).view(shape)


def test_parts_have_all_samples_in_order() -> None:
    batch = {
        "pair": Pair(ramp(7, 3), [f"sample {index}" for index in range(7)]),
        "encoding": Encoding(ids=ramp(7, 2), positions=ramp(1, 2)),
        "graph": Graph(ramp(7), {"mode": "train", "weights": ramp(7), "rate": torch.tensor(0.5)}),
        "numbers": [1, 2],
        "array": np.arange(7),
    }
    parts = split_batch(batch, 3)
    assert parts.sizes == (3, 2, 2) and parts.shares == pytest.approx((3 / 7, 2 / 7, 2 / 7))
    torch.testing.assert_close(
        torch.cat([part["pair"].tokens for part in parts.batches]), ramp(7, 3)
    )
    assert [name for part in parts.batches for name in part["pair"].names] == batch["pair"].names
    assert [len(part["graph"].options["weights"]) for part in parts.batches] == [3, 2, 2]
    assert np.concatenate([part["array"] for part in parts.batches]).tolist() == list(range(7))
    for part in parts.batches:
        assert isinstance(part["encoding"], Encoding) and part["encoding"]["positions"].shape == (
            1,
            2,
        )
        assert part["numbers"] == [1, 2] and part["graph"].options["rate"] == 0.5
    assert batch["graph"].nodes.shape == (7,)


def test_samples_may_be_entries_of_sequences() -> None:
    """As detection has them: images of their own sizes, a dictionary for each."""
    images = tuple(ramp(3, 4 + index, 5) for index in range(4))
    targets = tuple({"boxes": ramp(index + 1, 4)} for index in range(4))
    parts = split_batch((images, targets), 2)
    assert [[image.shape[1] for image in part[0]] for part in parts.batches] == [[4, 5], [6, 7]]
    assert [len(part[1][0]["boxes"]) for part in parts.batches] == [1, 3]
    assert len(first_samples((images, targets), 3)[1]) == 3


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"a": ramp(3, 2), "b": ramp(4, 2)},
            r"no common size in dimension 0 \(they are \(3, 2\), \(4, 2\)\)",
        ),
        ({"text": "alone"}, "are missing"),
        ([ramp(2, 2).to_sparse()], "sparse or nested"),
        ([pack_sequence([ramp(2), ramp(1)])], "pack it in training_step"),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_batch(batch, 2)


def test_outputs_are_joined_wherever_samples_are_in_them() -> None:
    sizes = (2, 1)
    outputs = [
        ({"loss": loss, "of": Pair(ramp(n, 2), ["name"] * n), "rate": 0.1, "n": n}, ramp(n))
        for loss, n in zip(LOSSES, sizes, strict=True)
    ]
    options: dict[str, Any] = {"sizes": sizes, "weights": [0.5, 0.5], "losses": LOSSES}
    first, last = combined_output(outputs, **options)
    assert first["loss"] == 2 and first["of"].names == ["name"] * 3
    assert first["rate"] == 0.1 and first["n"] == pytest.approx(5 / 3)
    assert first["of"].tokens.shape == (3, 2) and last.tolist() == [0, 1, 0]
    # of different structures the last one remains
    assert combined_output([{"a": 1}, {"b": 2}], **options) == {"b": 2}


LOSSES = (torch.tensor(1.0), torch.tensor(3.0))
# what microbatches of 3 samples and 1 returned, and what their batch would: the loss is weighted by
# other numbers than the sizes
NUMBERS: dict[str, tuple[list[Any], float]] = {
    "the loss": ([torch.tensor(1.0), torch.tensor(3.0)], 2.0),
    "the loss, in 16 bits": ([torch.tensor([1.0]).half(), torch.tensor([3.0]).half()], 2.0),
    "the loss as a number": ([1.0, 3.0], 2.0),
    "another tensor": ([torch.tensor(1.0), torch.tensor(2.0)], 1.25),
    "another number": ([1.0, 2.0], 1.25),
    "whole numbers": ([torch.tensor(1), torch.tensor(3)], 1.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_equals_the_loss_is_weighted_as_it(name: str) -> None:
    values, expected = NUMBERS[name]
    options: dict[str, Any] = {"sizes": (3, 1), "weights": [0.5, 0.5], "losses": LOSSES}
    assert float(combined_output(values, **options)) == pytest.approx(expected)
    calls = [[LoggedCall("", "log", (name, value), {})] for value in values]
    (call,) = combined_calls(calls, **options)
    assert float(call.value) == pytest.approx(expected)


def test_no_host_waits_for_outputs_on_a_device() -> None:
    with fake_device() as device:
        losses = [torch.ones((), device=device) for _ in range(2)]
        outputs = [{"loss": loss, "of": loss * 2, "rate": 0.1, "n": loss.int()} for loss in losses]
        calls = [[LoggedCall("", "log", ("of", each["of"]), {})] for each in outputs]
        options: dict[str, Any] = {"sizes": (2, 1), "weights": [0.5, 0.5], "losses": losses}
        with no_host_waits():
            found = combined_output(outputs, **options)
            (call,) = combined_calls(calls, **options)
    assert {found["loss"].device, found["n"].device, call.value.device} == {device}
