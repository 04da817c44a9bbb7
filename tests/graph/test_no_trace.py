"""A capture leaves nothing behind: containers, attributes, globals, closures, random states and
modes of torch.
"""

from __future__ import annotations

import builtins
import collections
import functools
import importlib
import logging
import random
import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import is_users
from lightning_topt.graph.no_trace import SavedContainers, no_trace
from tests.models import GPT

SEEN: list[Any] = []
COUNTS: dict[str, Any] = {"steps": 0}
STEPS = 0
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Uncopyable:
    """Shared between a module and its copy."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.names, self.last, self.count = {"a"}, None, 0

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


class Registry:
    entries: list[Any] = []
    total = 0


@functools.cache
def positions(length: int) -> Tensor:
    return torch.arange(length)


def keep(value: Any, *, values: list[Any] = []) -> None:  # noqa: B006
    values.append(value)
    keep.calls = getattr(keep, "calls", 0) + 1  # type: ignore[attr-defined]


def make_net(closed: dict[str, Any]) -> Any:
    count = 0

    class Messy(L.LightningModule):
        history: list[Any] = []

        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.stub, self.losses = Uncopyable(), collections.deque([1.0], maxlen=2)
            self.generator, self.rng = torch.Generator().manual_seed(1), np.random.default_rng(2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            global STEPS
            nonlocal count
            loss = (self.norm(self.net(batch)) + positions(8)).square().mean()
            STEPS, count = STEPS + 1, count + 1
            SEEN.append(loss)
            COUNTS["steps"] += 1
            COUNTS["loss"] = loss
            closed["loss"], closed["count"] = loss, count
            self.history.append(loss)
            Registry.entries.append(loss)
            Registry.total += 1
            keep(loss)
            self.losses.append(loss)
            self.stub.values += [loss]
            self.stub.names.add("b")
            self.stub.last, self.stub.new, self.stub.count = loss, loss, self.stub.count + 1
            self.trainer.datamodule.seen.append(loss)
            self.trainer.callbacks[0].seen[0] = loss
            self.trainer.should_stop = True
            self.extra = loss
            torch.rand(3, generator=self.generator)
            self.rng.random()
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(True)
            print("never printed")
            logging.getLogger("messy").error("never logged")
            return loss * (1 + random.random()) * (1 + np.random.rand()) * torch.rand(())

    return Messy()


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}


def state_of(module: Any, closed: dict[str, Any]) -> list[Any]:
    stub, trainer = module.stub, module.trainer
    return [
        [*SEEN],
        {**COUNTS},
        STEPS,
        {**closed},
        [*type(module).history],
        [*Registry.entries],
        Registry.total,
        [*keep.__kwdefaults__["values"]],
        {**vars(keep)},
        [*module.losses],
        {name: value for name, value in vars(stub).items() if name not in ("values", "names")},
        [*stub.values],
        {*stub.names},
        [*trainer.datamodule.seen],
        {**trainer.callbacks[0].seen},
        trainer.should_stop,
        sorted(vars(module)),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        {name: value.tolist() for name, value in module.state_dict().items()},
        [p.grad for p in module.parameters()],
        [
            torch.get_rng_state().tolist(),
            module.generator.get_state().tolist(),
            module.rng.bit_generator.state,
        ],
        [random.getstate(), np.random.get_state()[1].tolist()],
        [torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
        [builtins.print, logging.root.manager.disable],
    ]


def test_capture_leaves_no_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: dict[str, Any] = {}
    logged: list[Any] = []
    module = make_net(closed)
    module._trainer = L.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    module._trainer.datamodule = Data()
    capsys.readouterr()
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))
    before = state_of(module, closed)
    graph = capture(module, X, batch_scaling=False)
    assert graph.ops
    for a, b in zip(before, state_of(module, closed), strict=True):
        assert a == b
    assert type(positions(8)) is Tensor
    assert capsys.readouterr().out == "" and not logged


def test_nothing_remains_of_a_capture_that_fails() -> None:
    class Fails(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            SEEN.append(self.net(batch))
            torch.set_grad_enabled(False)
            raise KeyError("half-way")

    with pytest.raises(KeyError):
        capture(Fails(), X)
    assert SEEN == [] and torch.is_grad_enabled()


def test_what_changes_by_itself_is_left_alone() -> None:
    class Prefetcher:
        def __init__(self) -> None:
            self.items: list[int] = []
            self.lock = threading.Lock()

    class Samples(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.read: list[int] = []

    module = GPT()
    module.prefetcher, module.samples = Prefetcher(), Samples()
    with no_trace(module):
        module.prefetcher.items.append(1)
        module.samples.read.append(1)
        module.positions_seen = 3
    assert module.prefetcher.items == [1] and module.samples.read == [1]
    assert not hasattr(module, "positions_seen")


def test_containers_keep_their_order_and_identity() -> None:
    class Holder:
        def __init__(self) -> None:
            self.ordered = collections.OrderedDict(a=1, b=2)
            self.default: Any = collections.defaultdict(list, x=[1])
            self.counter, self.rows = collections.Counter("aab"), [[1], (2, [3])]

    holder = Holder()
    kept = {name: id(value) for name, value in vars(holder).items()}
    with no_trace(nn.Linear(1, 1), holder):
        holder.ordered.pop("a")
        holder.ordered["a"] = 5
        holder.default["y"].append(2)
        holder.default["x"].append(2)
        holder.counter["c"] += 1
        holder.rows[1][1].append(4)
        holder.rows = []
    assert list(holder.ordered.items()) == [("a", 1), ("b", 2)] and dict(holder.default) == {
        "x": [1]
    }
    assert holder.counter == collections.Counter("aab") and holder.rows == [[1], (2, [3])]
    assert kept == {name: id(value) for name, value in vars(holder).items()}


def test_generators_of_the_module_are_not_used_up() -> None:
    class Draws(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.items = nn.Linear(8, 8), (torch.ones(8) * n for n in range(3))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.net(batch) + next(self.items)).mean()

    module = Draws()
    with pytest.raises(ValueError, match="generator"):
        capture(module, X)
    assert len(list(module.items)) == 3


class Lazy(collections.OrderedDict[str, int]):
    """Shows keys that it does not hold, as the lazy registries of libraries do."""

    def keys(self) -> Any:
        return [*super().keys(), "not loaded"]

    def __iter__(self) -> Any:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __getitem__(self, key: str) -> int:
        if key == "not loaded" and not super().__contains__(key):
            self[key] = 2
        return super().__getitem__(key)


def test_dicts_that_show_more_than_they_hold() -> None:
    lazy = Lazy(a=0, b=1)
    lazy.move_to_end("a")
    saved = SavedContainers([lazy])
    assert lazy["not loaded"] == 2 and "not loaded" in collections.OrderedDict.keys(lazy)
    lazy.move_to_end("b")
    saved.restore()
    assert [*collections.OrderedDict.items(lazy)] == [("b", 1), ("a", 0)]


class Described:
    """As classes written in C may be: its name of a module is a descriptor."""

    __module__ = property(lambda self: "somewhere")  # type: ignore[assignment]


def test_classes_whose_module_is_no_name_are_left_alone() -> None:
    known = {"class": Described}
    saved = SavedContainers([known, sys.modules[__name__]])
    known.clear()
    saved.restore()
    assert known == {"class": Described} and not is_users(Described.__module__)


def test_packages_may_be_installed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``pip install --target``; the user's files may lie beside them."""
    for name in (
        "topt_installed/__init__.py",
        "topt_installed/part.py",
        "topt_alone.py",
        "topt_own.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "some-1.0.dist-info").mkdir()
    (tmp_path / "some-1.0.dist-info" / "RECORD").write_text(
        "topt_installed/__init__.py,,\ntopt_alone.py,sha256=1,0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("topt_installed.part", "topt_alone", "topt_own")
    users = {name: is_users(importlib.import_module(name).__name__) for name in names}
    assert users == {"topt_installed.part": False, "topt_alone": False, "topt_own": True}
