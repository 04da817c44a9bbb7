"""What a step leaves behind beside tensors is seen, and named, without a copy and without a call of
the user's code.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import multiprocessing
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.step_observer import StepObserver
from lightning_topt.graph.step_purity import MAX_ITEMS, PurityWatch
from tests.models import GPT, MLP, Branching, CalledTwice, ConvNet, DictBatch, batch_for

CACHE: dict[int, int] = {}
UNUSED: list[int] = []
STREAM = iter([1, 2, 3])  # no step names it


class Counter:
    total = 0

    def __init__(self) -> None:
        self.n = 0

    def __eq__(self, other: object) -> bool:
        raise AssertionError("the user's code was called")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise AssertionError("the user's code was called")

    def __len__(self) -> int:
        raise AssertionError("the user's code was called")


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class Settings:
    values: dict[str, Any] = field(default_factory=lambda: {"a": [1, 2]})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None


class Net(L.LightningModule):
    shared = 0

    def __init__(self, step: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net, self.part = nn.Linear(4, 4), Part()
        self.register_buffer("mean", torch.zeros(4))
        self.step, self.queue = step, torch.zeros(4)
        self.count, self.history, self.by_name = 0, [], {"a": 1}
        self.counter, self.slots, self.settings = Counter(), Slots(), Settings()
        self.numbers, self.generator = np.zeros(3), torch.Generator()
        self.random, self.order = random.Random(1), np.random.default_rng(1)
        self.numbering = itertools.count()
        self.recent: Any = collections.deque([1], maxlen=4)
        self.hidden = [nn.Linear(2, 2)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).sum()
        if self.step is not None:
            self.step(self)
        return loss


def named(net: Any) -> None:
    CACHE[len(CACHE)] = 1


@functools.lru_cache
def cached(number: int) -> int:
    return number


counts: list[int] = [0]


def closure() -> Callable[[Any], None]:
    calls = 0

    def step(net: Any) -> None:
        nonlocal calls
        calls += 1

    return step


def defaults(net: Any, seen: list[int] = []) -> None:  # noqa: B006
    seen.append(1)


def by_attribute(net: Any) -> None:
    by_attribute.calls = getattr(by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]


def rebinds(net: Any) -> None:
    global ROUNDS
    ROUNDS = globals().get("ROUNDS", 0) + 1


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (
        lambda net: setattr(net, "count", net.count + 1),
        "attribute 'count' of Net changed",
    ),
    "new attribute": (lambda net: setattr(net, "fresh", 1), "attribute 'fresh' of Net changed"),
    "of a part": (lambda net: setattr(net.part, "state", 3), "attribute 'state' of Part changed"),
    "a tensor is kept": (
        lambda net: setattr(net.part, "state", torch.zeros(1)),
        "attribute 'state' of Part changed",
    ),
    "list": (lambda net: net.history.append(1), "attribute 'history' of Net changed"),
    "dict": (lambda net: net.by_name.update(a=2), "attribute 'by_name' of Net changed"),
    "same length": (
        lambda net: net.recent.rotate() or net.recent.append(net.recent.pop() + 1),
        "attribute 'recent'",
    ),
    "deep": (
        lambda net: net.settings.values["a"].append(3),
        "attribute 'values' of Settings changed",
    ),
    "object": (lambda net: setattr(net.counter, "n", 1), "attribute 'n' of Counter changed"),
    "slots": (lambda net: setattr(net.slots, "n", 1), "attribute 'n' of Slots changed"),
    "array": (lambda net: net.numbers.__setitem__(0, 1.0), "attribute 'numbers' of Net changed"),
    "plain tensor": (lambda net: net.queue.add_(1), "attribute 'queue' of Net changed"),
    "generator": (
        lambda net: torch.rand(1, generator=net.generator),
        "attribute 'generator' of Net changed",
    ),
    "random.Random": (lambda net: net.random.random(), "attribute 'random' of Net changed"),
    "numpy generator": (lambda net: net.order.random(), "attribute 'order' of Net changed"),
    "python": (lambda net: random.random(), "the state of Python's random numbers changed"),
    "numpy": (lambda net: np.random.rand(), "the state of NumPy's random numbers changed"),
    "itertools": (lambda net: next(net.numbering), "attribute 'numbering' of Net changed"),
    "global": (named, "global 'CACHE' of tests.graph.test_step_purity changed"),
    "new global": (rebinds, "global 'ROUNDS' of tests.graph.test_step_purity changed"),
    "lru_cache": (
        lambda net: cached(random.randrange(10)) if False else cached(len(counts)),
        "the cache of cached",
    ),
    "closure": (closure(), "variable 'calls' of closure.<locals>.step changed"),
    "defaults": (defaults, "defaults of defaults changed"),
    "function": (by_attribute, "attribute 'calls' of by_attribute changed"),
    "class": (
        lambda net: setattr(type(net), "shared", type(net).shared + 1),
        "attribute 'shared' of class Net changed",
    ),
    "class of an object": (
        lambda net: setattr(Counter, "total", Counter.total + 1),
        "attribute 'total' of class Counter",
    ),
    "frozen": (
        lambda net: net.net.weight.requires_grad_(False),
        "requires_grad of 'weight' of Linear changed",
    ),
    "mode": (lambda net: net.part.eval(), "attribute 'training' of Part changed"),
    "hook": (
        lambda net: net.net.register_forward_hook(print),
        "attribute '_forward_hooks' of Linear changed",
    ),
    "new parameter": (
        lambda net: setattr(net.net, "weight", nn.Parameter(torch.zeros(4, 4))),
        "'weight' of Linear changed",
    ),
    "new module": (lambda net: setattr(net, "more", nn.Linear(1, 1)), "'more' of Net changed"),
    "hidden module": (lambda net: net.hidden[0].eval(), "attribute 'training' of Linear changed"),
}


@pytest.mark.parametrize(("step", "clause"), CHANGES.values(), ids=CHANGES)
def test_what_changed_is_named(step: Any, clause: str) -> None:
    module = Net(step)
    watch = PurityWatch(module)
    assert watch.change() is None
    module.training_step(torch.zeros(2, 4), 0)
    assert clause in (watch.change() or "")


def free(net: Any) -> None:
    """What may change: tensors' values, buffers, torch's random numbers, and what is as it was in
    the end.
    """
    with torch.no_grad():
        net.net.weight.add_(1)
        net.mean.mul_(0.9)
    net.mean = 0.5 * net.mean
    net.count += 1
    net.count -= 1
    net.history.append(1)
    net.history.pop()
    torch.rand(1)
    UNUSED.append  # noqa: B018


def test_tensors_and_buffers_and_torchs_generators_are_free() -> None:
    module = Net(free)
    watch = PurityWatch(module)
    module.training_step(torch.zeros(2, 4), 0).backward()
    assert watch.change() is None


@pytest.mark.parametrize(
    "module", [GPT(), MLP(), Branching(), CalledTwice(), DictBatch(), ConvNet()]
)
def test_the_tests_models_are_pure(module: Any) -> None:
    """A metric counts, and Lightning keeps what is logged."""
    vars(module)["log"] = vars(module)["log_dict"] = lambda *args: None
    watch, batch = PurityWatch(module), batch_for(module)
    module.training_step(*((batch,) if isinstance(module, MLP) else (batch, 0)))
    assert watch.change() is None


def test_what_lightning_keeps_is_not_the_users() -> None:
    class Logs(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            watch = PurityWatch(self)
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            found.append(watch.change())
            return loss

    found: list[Any] = []
    module = Logs()
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    trainer = L.Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader([torch.zeros(4)] * 2))
    assert found == [None]


UNKNOWN: dict[str, tuple[Any, str]] = {
    "generator": ((number for number in range(3)), "builtins.generator"),
    "iterator": (iter([1, 2]), "builtins.list_iterator"),
    "file": (io.StringIO(), "_io.StringIO"),
    "queue": (multiprocessing.Value("i", 0), "multiprocessing.sharedctypes.Synchronized"),
    "thread": (threading.Thread(), "threading.Thread"),
    "objects": (np.array([[]], dtype=object), "numpy.ndarray"),
}


@pytest.mark.parametrize(("value", "kind"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_compared_counts_as_changed(value: Any, kind: str) -> None:
    module = Net()
    module.source = value
    assert (
        PurityWatch(module).change()
        == f"attribute 'source' of Net holds a {kind}, which cannot be compared"
    )


def test_a_list_that_is_too_long_counts_as_changed() -> None:
    module = Net()
    module.history = [0] * (MAX_ITEMS + 1)
    assert "attribute 'history' of Net holds more than" in (PurityWatch(module).change() or "")


def test_an_observer_of_the_same_step_changes_nothing() -> None:
    module = Net()
    watch, batch = PurityWatch(module), torch.zeros(2, 4)
    observer = StepObserver(module, batch)
    with observer.forward():
        module.training_step(batch, 0)
    assert watch.change() is None
    observer.close()


def test_a_tensor_is_not_kept_alive_and_its_place_is_not_taken_for_it() -> None:
    module = Net()
    module.part.state = torch.zeros(3)
    gone = weakref.ref(module.part.state)
    watch = PurityWatch(module)
    module.part.state = None
    assert gone() is None
    module.part.state = torch.zeros(3)  # perhaps at the same address
    assert watch.change() == "attribute 'state' of Part changed"


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.given = 0


def test_the_data_module_and_callbacks_are_looked_at() -> None:
    class Remembers(L.Callback):
        last = None

    module, callback = Net(), Remembers()
    trainer = L.Trainer(accelerator="cpu", barebones=True)
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    trainer.datamodule = Data()  # type: ignore[attr-defined]
    module._trainer = trainer  # type: ignore[assignment]
    watch = PurityWatch(module)
    assert watch.change() is None
    trainer.datamodule.given += 1  # type: ignore[attr-defined]
    assert watch.change() == "attribute 'given' of Data changed"
    trainer.datamodule.given -= 1  # type: ignore[attr-defined]
    callback.last = 1
    assert watch.change() == "attribute 'last' of Remembers changed"
