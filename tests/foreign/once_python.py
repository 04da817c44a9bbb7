"""Programs that keep state of Python: caches, classes, loggers, hooks, files, data bases,
environments.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import random
import sqlite3
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.foreign.once_shelf import Built, Net, counted, mlp, rows, traced
from tests.foreign.shelf import generator

# ---- state of the interpreter


@functools.lru_cache
def positions(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] / 10 ** (torch.arange(width // 2) / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Positions(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = 4 - batch_idx % 3
        added = positions(length, 8)
        self.trace.append((type(added).__name__, length))
        return super().training_step((batch[0][:length] + added, batch[1][:length]), batch_idx)


@counted("functools.lru_cache of the module level: hits, misses, kinds of tensors")
def cached_positions() -> Built:
    positions.cache_clear()
    module = Positions()
    return Built(
        module,
        rows(),
        lambda: (module.trace, positions.cache_info()[:2], float(positions(4, 8).sum())),
    )


MASKS: dict[tuple[int, ...], Tensor] = {}
MASKS_MADE: list[tuple[int, ...]] = []


def mask_for(x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    if shape not in MASKS:
        MASKS_MADE.append(shape)
        MASKS[shape] = torch.rand(shape, generator=generator(sum(shape))) > 0.2
    return MASKS[shape]


class Masks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        count = 4 - batch_idx % 2
        x, y = batch[0][:count], batch[1][:count]
        return super().training_step((x * mask_for(x), y), batch_idx)


@counted("dictionary of masks by shape at the module level")
def masks_by_shape() -> Built:
    MASKS.clear()
    MASKS_MADE.clear()

    def evidence() -> Any:
        return list(MASKS_MADE), {
            shape: (type(mask).__name__, mask.tolist()) for shape, mask in MASKS.items()
        }

    return Built(Masks(), rows(), evidence)


class CachedProperty(Net):
    @functools.cached_property
    def neighbours(self) -> Tensor:
        self.trace.append("made")
        return torch.eye(8) + 0.1 * torch.eye(8).roll(1, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] @ self.neighbours, batch[1]), batch_idx)


@counted("functools.cached_property made in the first step")
def cached_property() -> Built:
    module = CachedProperty()
    return Built(module, rows(), lambda: (module.trace, type(vars(module)["neighbours"]).__name__))


class CountsInClass(Net):
    steps: ClassVar[int] = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).steps += 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * type(self).steps)


@counted("counter that is an attribute of the class")
def counter_of_the_class() -> Built:
    CountsInClass.steps = 0
    return Built(CountsInClass(), rows(), lambda: CountsInClass.steps)


def counting_factor() -> tuple[Any, Any]:
    """A function that grows with each call, and one that tells how often it was called."""
    calls = 0

    def factor() -> float:
        nonlocal calls
        calls += 1
        return 1 - 0.5**calls

    return factor, lambda: calls


class Closure(Net):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factor() * super().training_step(batch, batch_idx)


@counted("variable of a closure")
def counter_in_a_closure() -> Built:
    factor, calls = counting_factor()
    return Built(Closure(factor), rows(), calls)


DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


class Nested(nn.Module):
    """Notes how deep it stands, and leaves a mark in the context."""

    def __init__(self, inner: nn.Module, seen: list[int]) -> None:
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(DEPTH.get())
        token = DEPTH.set(DEPTH.get() + 1)
        try:
            return self.inner(x) + x
        finally:
            DEPTH.reset(token)


class ContextDepth(Net):
    def __init__(self) -> None:
        super().__init__()
        nested = Nested(
            nn.Sequential(nn.Linear(16, 16), Nested(nn.Linear(16, 16), self.trace)), self.trace
        )
        self.net = nn.Sequential(nn.Linear(8, 16), nested, nn.Linear(16, 5))


@counted("contextvars in forward")
def depth_in_the_context() -> Built:
    return traced(ContextDepth())


LOCAL = threading.local()


class ThreadLocal(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * LOCAL.calls)


@counted("threading.local")
def counter_of_the_thread() -> Built:
    LOCAL.__dict__.clear()
    return Built(ThreadLocal(), rows(), lambda: dict(vars(LOCAL)))


class Ticket:
    """Says when it goes away."""

    def __init__(self, number: int, gone: list[int]) -> None:
        self.number, self.gone = number, gone

    def __del__(self) -> None:
        self.gone.append(self.number)


class LosesTickets(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ticket = Ticket(batch_idx, self.trace)
        return super().training_step(batch, batch_idx)


@counted("objects with __del__, one for each step")
def tickets_that_go_away() -> Built:
    return traced(LosesTickets())


# ---- loggers, callbacks, hooks


class KeepsLog(Logger):
    """A logger that keeps which names were logged at which step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "keeps"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append((step, sorted(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("hyperparameters")


class BoundLoggers(Net):
    """Keeps `log` and `log_dict` under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.note = self.log
        self.writers = [self.log_dict, self.count]

    def count(self, metrics: dict[str, Any]) -> None:
        self.trace.append(sorted(metrics))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("noted", loss.detach(), on_step=True, on_epoch=True)
        for write in self.writers:
            write({"batch": float(batch_idx), "twice": 2.0 * batch_idx})
        return loss


@counted(
    "methods log and log_dict kept under other names, and a logger that counts", log_every_n_steps=1
)
def bound_loggers() -> Built:
    logger, module = KeepsLog(), BoundLoggers()
    return Built(module, rows(), lambda: (logger.calls, module.trace), {"logger": logger})


class WritesToLogger(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"direct": float(loss.detach())}, step=batch_idx)
        self.trainer.logger.log_metrics({"by_trainer": batch_idx}, step=self.global_step)
        return loss


@counted("self.logger and self.trainer.logger, written by the step")
def logger_written_by_the_step() -> Built:
    logger = KeepsLog()
    return Built(WritesToLogger(), rows(), lambda: logger.calls, {"logger": logger})


class KeepsRecords(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class LogsByPython(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logging.getLogger("stranger").warning("batch %d with %d rows", batch_idx, len(batch[0]))
        return super().training_step(batch, batch_idx)


@counted("Python's logging with a handler that counts")
def records_of_logging() -> Built:
    handler, stranger = KeepsRecords(), logging.getLogger("stranger")
    stranger.handlers, stranger.propagate = [handler], False
    return Built(LogsByPython(), rows(), lambda: handler.texts)


HOOKS = [name for name in dir(L.Callback) if name.startswith(("on_", "setup", "teardown"))]


def noting(name: str) -> Any:
    return lambda self, *args, **kwargs: self.seen.append(name)


class EveryHook(type("Noted", (L.Callback,), {name: noting(name) for name in HOOKS})):  # type: ignore[misc]
    """Notes the name of each hook that is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []


class WithCallback(Net):
    def __init__(self, callback: L.Callback) -> None:
        super().__init__()
        self.callback = callback

    def configure_callbacks(self) -> Any:
        return [self.callback]


@counted("all hooks of a callback, in their order", accumulate_grad_batches=2)
def hooks_of_a_callback() -> Built:
    callback = EveryHook()
    return Built(WithCallback(callback), rows(), lambda: callback.seen)


class OwnHooks(Net):
    """Counts in the hooks of the module, as those do who debug."""

    def forward(self, x: Tensor) -> Tensor:
        self.trace.append("forward")
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append("step")
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trace.append("start")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trace.append("transferred")
        return batch

    def on_before_backward(self, loss: Tensor) -> None:
        self.trace.append("before backward")

    def on_after_backward(self) -> None:
        self.trace.append("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trace.append("before step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.trace.append("before zero")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append("end")


@counted("hooks of the module, in their order", gradient_clip_val=0.5)
def hooks_of_the_module() -> Built:
    return traced(OwnHooks())


class OverriddenSteps(Net):
    """What Lightning lets a module override around the optimizer."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.trace.append("backward")
        super().backward(loss, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        self.trace.append("step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.trace.append("zero")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.trace.append("rate")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@counted("backward, optimizer_step, optimizer_zero_grad, lr_scheduler_step overridden")
def overridden_optimizer_hooks() -> Built:
    return traced(OverriddenSteps())


class CountsMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(batch[1].float())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append((self.seen.update_count, float(self.seen.weight)))

    def on_train_end(self) -> None:
        self.trace.append(float(self.trainer.callback_metrics["seen"]))


@counted("torchmetrics that count their updates")
def metric_that_counts() -> Built:
    return traced(CountsMetric())


class StopsItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.patience = 9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.patience -= 1
        self.trace.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.patience == 0 else None


@counted("epoch that the module ends by a count of its steps")
def epoch_ended_by_a_count() -> Built:
    return traced(StopsItself())


class SavesInTheMiddle(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["trace"] = len(self.trace)
        self.trace.append(sorted(checkpoint["state_dict"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 4:
            with tempfile.TemporaryDirectory() as folder:
                self.trainer.save_checkpoint(f"{folder}/middle.ckpt")


@counted("checkpoints that the module saves after some batches")
def checkpoints_in_the_middle() -> Built:
    return traced(SavesInTheMiddle())


# ---- files and data bases


class WritesLines(Net):
    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.file.write(f"{batch_idx} {batch[1].tolist()}\n")
        self.file.flush()
        return super().training_step(batch, batch_idx)


@counted("file to which each step writes a line")
def lines_of_a_file() -> Built:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def evidence() -> list[str]:
        file.seek(0)
        return file.readlines()

    return Built(WritesLines(file), rows(), evidence)


class WritesTable(Net):
    def __init__(self, base: sqlite3.Connection) -> None:
        super().__init__()
        self.base = base

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.base.executemany(
            "insert into seen (label) values (?)", [(number,) for number in batch[1].tolist()]
        )
        (count,) = self.base.execute("select count(*) from seen where label = 0").fetchone()
        return super().training_step(batch, batch_idx) * (1 + 0.01 * count)


@counted("sqlite in memory: rows with numbers that the data base gives")
def rows_of_a_data_base() -> Built:
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table seen (id integer primary key, label integer)")
    return Built(
        WritesTable(base), rows(), lambda: base.execute("select id, label from seen").fetchall()
    )


class WritesMap(Net):
    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.counts = counts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        np.add.at(self.counts, batch[1].numpy(), 1)
        scale = torch.from_numpy(1 / (1 + self.counts[batch[1].numpy()])).float()
        return (F.cross_entropy(self.net(batch[0]), batch[1], reduction="none") * scale).mean()


@counted("np.memmap of counts")
def counts_in_a_mapped_file() -> Built:
    with tempfile.NamedTemporaryFile() as file:
        counts = np.memmap(file.name, dtype=np.int64, mode="w+", shape=(5,))
    return Built(WritesMap(counts), rows(), counts.tolist)


# ---- reinforcement learning


class Corridor:
    """An environment with state: walk to the right end; it counts its steps and episodes."""

    def __init__(self) -> None:
        self.steps = self.episodes = self.place = 0
        self.source = random.Random(8)

    def reset(self) -> int:
        self.place, self.episodes = self.source.randrange(3), self.episodes + 1
        return self.place

    def step(self, action: int) -> tuple[int, float, bool]:
        self.steps += 1
        self.place = max(0, min(7, self.place + (2 * action - 1) + self.source.choice([0, 0, 1])))
        return self.place, float(self.place == 7), self.place == 7


def one_hot(places: Any) -> Tensor:
    return F.one_hot(torch.as_tensor(places), 8).float()


class DeepQ(Net):
    """Each step plays with a soft policy by its own dice, keeps what happened, and learns from what
    it kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = mlp(outputs=2), mlp(outputs=2).requires_grad_(False)
        self.play, self.dice = Corridor(), random.Random(6)
        self.kept: deque[Any] = deque(maxlen=20)
        self.place = self.play.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for _ in range(4):
            action = self.dice.randrange(2)
            place, reward, done = self.play.step(action)
            self.kept.append((self.place, action, reward, place, done))
            self.place = self.play.reset() if done else place
        before, actions, rewards, after, done = zip(
            *self.dice.choices(list(self.kept), k=8), strict=True
        )
        with torch.no_grad():
            ahead = self.target(one_hot(after)).amax(-1) * (1 - torch.tensor(done).float())
        if batch_idx % 4 == 3:
            self.target.load_state_dict(self.net.state_dict())
        value = self.net(one_hot(before)).gather(1, torch.tensor(actions)[:, None])[:, 0]
        return F.smooth_l1_loss(value, torch.tensor(rewards) + 0.9 * ahead)


@counted("environment with state, played in the step, and a replay buffer")
def replay_of_an_environment() -> Built:
    module = DeepQ()
    return Built(
        module, rows(), lambda: (module.play.steps, module.play.episodes, list(module.kept))
    )


class Episodes(torch.utils.data.IterableDataset[Any]):
    """Episodes that are played when the loader asks."""

    def __init__(self, play: Corridor) -> None:
        self.play, self.dice = play, random.Random(4)

    def __iter__(self) -> Iterator[Any]:
        while True:
            place, done = self.play.reset(), False
            while not done:
                action = self.dice.randrange(2)
                after, reward, done = self.play.step(action)
                yield one_hot(place), action, reward
                place = after


class PolicyGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.baseline = mlp(outputs=2), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, actions, rewards = batch
        self.baseline += 0.1 * (float(rewards.float().mean()) - self.baseline)
        self.trace.append(self.baseline)
        chosen = self.net(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return -(chosen * (rewards.float() - self.baseline)).mean()


@counted("environment played by an iterable data set, with a running baseline in Python")
def episodes_of_a_stream() -> Built:
    play, module = Corridor(), PolicyGradient()
    data = DataLoader(Episodes(play), batch_size=4)
    return Built(module, data, lambda: (play.steps, play.episodes, module.trace))
