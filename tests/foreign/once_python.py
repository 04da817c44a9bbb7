"""Programs that keep state of Python: caches, classes, loggers, hooks, files, environments."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from typing import Any, ClassVar

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torchmetrics import MeanMetric

from tests.foreign.once_shelf import Built, Net, counted, mlp, rows, traced

# ---- state of the interpreter


class CountsInClass(Net):
    steps: ClassVar[int] = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).steps += 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * type(self).steps)


@counted("counter that is an attribute of the class")
def counter_of_the_class() -> Built:
    CountsInClass.steps = 0
    return Built(CountsInClass(), rows(), lambda: CountsInClass.steps)


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
        self.patience = 7

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
        if batch_idx % 4 == 3:
            with tempfile.TemporaryDirectory() as folder:
                self.trainer.save_checkpoint(f"{folder}/middle.ckpt")


@counted("checkpoints that the module saves after some batches")
def checkpoints_in_the_middle() -> Built:
    return traced(SavesInTheMiddle())


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
    """Plays with a soft policy by its own dice, and learns from what it kept."""

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
