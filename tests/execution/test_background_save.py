"""Saves in the background: of copies, one at a time, in order; errors are kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_topt.execution.background_save import MOST, BackgroundSaves
from lightning_topt.execution.states import TensorChunks
from lightning_topt.techniques.tensor_parallel.layout import Span


def test_what_is_written_is_the_state_when_it_was_submitted() -> None:
    saves, goes_on, written = BackgroundSaves(), threading.Event(), []

    def write(state: Any) -> None:
        assert goes_on.wait(60)
        chunk = state["chunk"]
        written.append({**state, "weight": state["weight"].clone(), "chunk": chunk.local.clone()})
        written.append((chunk.spans, tuple(chunk.full_shape)))

    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    state = {
        "weight": weight,
        "tied": weight,
        "column": weight.detach().T,
        "sparse": torch.eye(2).to_sparse(),
        "nothing": torch.empty(0, 3),
        "list": [1, {"step": 2}],
        "chunk": TensorChunks(torch.ones(2), spans=[(Span(2, 0, 2),)], full_shape=[8]),
    }
    saves.submit(state, write, name="first")
    with torch.no_grad():
        weight.zero_()
    state["list"][1]["step"] = 3  # type: ignore[index]
    goes_on.set()
    saves.wait(60)
    assert saves.take_error() is None
    found, chunk = written
    assert torch.equal(found["weight"], torch.arange(6.0).view(2, 3))
    assert found["list"] == [1, {"step": 2}] and found["nothing"].shape == (0, 3)
    assert isinstance(found["tied"], nn.Parameter) and found["tied"].requires_grad
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(found["chunk"], torch.ones(2)) and chunk == ([(Span(2, 0, 2),)], (8,))


def test_saves_are_in_order_and_the_third_waits_for_the_first() -> None:
    saves, gate, order = BackgroundSaves(wait_seconds=0.2), threading.Event(), list[Any]()

    def write(number: int) -> None:
        assert gate.wait(60)
        order.append(number)

    for number in range(MOST):
        saves.submit(number, write, name=f"save {number}")
    with pytest.raises(TimeoutError, match=r"'save 0' was not written in the background within 0"):
        saves.submit(2, order.append, name="save 2")
    with pytest.raises(TimeoutError):
        saves.wait()
    saves.then(lambda: order.append("after"))
    gate.set()
    saves.wait(60)
    assert order == [0, 1, "after"]
    saves.then(lambda: order.append("at once"))
    assert order[-1] == "at once"


def test_an_error_is_kept_and_what_was_to_follow_is_left_out() -> None:
    saves, gate, done = BackgroundSaves(), threading.Event(), list[Any]()

    def fails(state: Any) -> None:
        assert gate.wait(60)
        raise OSError("disk full")

    saves.submit(1, fails, name="first")
    saves.then(lambda: done.append("removed first"))
    saves.submit(2, done.append, name="second")
    saves.then(lambda: done.append("removed second"))
    gate.set()
    saves.wait(60)
    assert saves.has_failed and done == [2, "removed second"]
    assert "disk full" in str(saves.take_error()) and not saves.has_failed
    assert saves.take_error() is None


def test_what_cannot_be_pickled_is_an_error_at_once() -> None:
    saves = BackgroundSaves()
    with pytest.raises(Exception, match="pickle"):
        saves.submit({"a": lambda: None}, print, name="first")
    saves.wait(1)
