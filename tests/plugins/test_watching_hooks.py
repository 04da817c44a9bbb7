"""Hooks and callbacks that look at gradients or parameters between steps, or change them, keep
parameters whole.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.autograd import grad

from lightning_topt.plugins.requirements import SHARDED, Fit, why_not
from tests.plugins.test_whole_parameters import Net
from tests.plugins.trainer_ranks import make_trainer


def trainer_of(module: L.LightningModule, *callbacks: L.Callback) -> Any:
    trainer = make_trainer(
        callbacks=list(callbacks), enable_checkpointing=True, logger=CSVLogger("/dev/null")
    )
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.strategy.optimizers = [module.configure_optimizers()]
    return trainer


def reason_of(module: L.LightningModule, *callbacks: L.Callback) -> str | None:
    return why_not(Fit(trainer_of(module, *callbacks)), SHARDED)


READ = ", and no rank has all of that then"


def helper_that_looks(module: nn.Module) -> float:
    return max(float(p.abs().max()) for p in module.parameters())


class GradNorm(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class OwnGradNorm(Net):
    def on_after_backward(self) -> None:
        self.log("norm", self._norm())

    def _norm(self) -> Tensor:
        return torch.stack([p.grad.norm() for p in self.net if p.grad is not None]).norm()


class Histogram(Net):
    def on_train_epoch_end(self) -> None:
        self.log("weight", self.net[0].weight.mean())


class CallsModel(Net):
    def on_validation_epoch_end(self) -> None:
        self.images = self.net(torch.zeros(2, 4))


class CallsItself(Net):
    def on_train_epoch_end(self) -> None:
        self.images = self(torch.zeros(2, 4))


class HelperLooks(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("max", helper_that_looks(self))


def helper_that_calls(anything: Any, samples: int) -> Any:
    return anything(torch.zeros(samples, 4))


class HelperCalls(Net):
    def on_train_epoch_end(self) -> None:
        self.images = helper_that_calls(self, 2)


class Clips(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, **_: Any
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Groups(Net):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.clamp_(-1, 1)


class PropertyLooks(Net):
    @property
    def size_of_weights(self) -> float:
        return sum(float(p.norm()) for p in self.net.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("size", self.size_of_weights)


class Base(Net):
    def on_train_epoch_end(self) -> None:
        self.last = self.state_dict()


class Derived(Base):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()


class PenaltyOfValidation(Net):
    def validation_step(self, batch: Tensor) -> None:
        self.log("size", sum(p.norm() for p in self.parameters()))


class GradientInStep(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        batch.requires_grad_()
        self.net(batch).sum().backward()
        return batch.grad.square().mean()  # type: ignore[union-attr]


class GradientOfParameters(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        return sum(slope.square().mean() for slope in self.slopes(batch))  # type: ignore[return-value]

    def slopes(self, batch: Tensor) -> Any:
        return grad(self.net(batch).sum(), [*self.parameters()], create_graph=True)


class GradientOfAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Tensor) -> Tensor:
        return torch.autograd.grad(
            self.net(batch * self.scale).sum(), self.scale, create_graph=True
        )[0].norm()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (GradNorm, "GradNorm.on_before_optimizer_step reads gradients"),
        (OwnGradNorm, "OwnGradNorm.on_after_backward reads gradients"),
        (Histogram, "Histogram.on_train_epoch_end reads parameters"),
        (CallsModel, "CallsModel.on_validation_epoch_end uses 'net'"),
        (CallsItself, "CallsItself.on_train_epoch_end calls the model"),
        (HelperLooks, "HelperLooks.on_train_batch_end reads parameters"),
        (HelperCalls, "HelperCalls.on_train_epoch_end calls the model"),
        (Clips, "Clips.configure_gradient_clipping reads gradients"),
        (Groups, "Groups.optimizer_step reads parameters"),
        (PropertyLooks, "PropertyLooks.on_train_batch_end reads parameters"),
        (Derived, "Derived.on_train_epoch_end reads parameters"),
        (PenaltyOfValidation, "PenaltyOfValidation.validation_step reads parameters"),
        (GradientInStep, "GradientInStep.training_step reads gradients"),
        (
            GradientOfAttribute,
            "GradientOfAttribute.training_step computes gradients, which may be those of "
            "parameters that it reads",
        ),
        (
            GradientOfParameters,
            "GradientOfParameters.training_step computes gradients, which may be those of "
            "parameters that it reads",
        ),
    ],
)
def test_hooks_that_look(make: type[Net], expected: str) -> None:
    assert reason_of(make()) == expected + READ


class Ordinary(Net):
    """Whatever hooks usually do without looking at a parameter."""

    def training_step(self, batch: Tensor) -> Tensor:
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(batch).sum(), batch, create_graph=True)
        (same,) = grad(self.net(batch).sum(), batch, create_graph=True)
        return slope.square().mean() + same.mean()

    def on_train_start(self) -> None:
        self.first = [p.clone() for p in self.parameters()]  # before the first step all is whole

    def on_train_epoch_start(self) -> None:
        self.net.eval()
        self.net.train()
        self.seen.reset()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen(outputs["loss"])
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("size", float(sum(p.numel() for p in self.parameters() if p.requires_grad)))
        self.is_there = next(self.parameters()).device == self.device
        batch.to(next(self.net.parameters()).dtype)

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.seen.compute())
        if isinstance(self.net, nn.Sequential):
            print(len(self.net))

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self(batch).mean())

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 10) * 1e-3
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = len(checkpoint["state_dict"])


class Printer(L.Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        pl_module.log("step", float(trainer.global_step))
        print(trainer.callback_metrics.get("loss"), type(pl_module).__name__)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.logger and trainer.logger.log_metrics({"weight": 1.0})


def test_ordinary_hooks_and_callbacks() -> None:
    usual = (
        ModelCheckpoint(),
        EarlyStopping("loss"),
        LearningRateMonitor(),
        ModelSummary(),
        Timer(),
    )
    assert reason_of(Ordinary(), Printer(), *usual) is None


class NotConnected:
    """As clients of clusters are: what is asked of them without a connection raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not connected")


CLIENT = NotConnected()


class AsksClient(Net):
    def on_train_epoch_end(self) -> None:
        CLIENT.report("an epoch")


def test_objects_that_raise_at_any_attribute() -> None:
    assert reason_of(AsksClient()) is None


class CallbackLooks(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.norms = {name: tensor.norm() for name, tensor in trainer.model.named_parameters()}


class CallbackCalls(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module(torch.zeros(2, 4))


class CallbackAsksTrainer(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.model(torch.zeros(2, 4))


class CallbackHands(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(pl_module, "/dev/null")


class Sampler:
    def sample(self, count: int, anything: Any) -> Any:
        return anything.net(torch.zeros(count, 4))


class CallbackSamples(L.Callback):
    def __init__(self) -> None:
        self.sampler = Sampler()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sampler.sample(2, pl_module)


class Ema:
    def update(self, module: nn.Module) -> None:
        for name, tensor in module.state_dict().items():
            print(name, tensor)


class CallbackDelegates(L.Callback):
    def __init__(self) -> None:
        self.ema = Ema()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.ema.update(pl_module)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (CallbackLooks(), "callback CallbackLooks reads parameters in on_train_batch_end"),
        (CallbackCalls(), "callback CallbackCalls calls the model in on_train_epoch_end"),
        (
            CallbackAsksTrainer(),
            "callback CallbackAsksTrainer calls the model in on_train_epoch_end",
        ),
        (CallbackSamples(), "callback CallbackSamples uses 'net' in on_train_epoch_end"),
        (
            CallbackHands(),
            "callback CallbackHands hands the model to a function in on_train_epoch_end",
        ),
        (CallbackDelegates(), "callback CallbackDelegates reads parameters in on_train_batch_end"),
        (
            LambdaCallback(
                on_train_batch_end=lambda trainer, module, *_: print(module.net[0].weight.norm())
            ),
            "callback LambdaCallback reads parameters in on_train_batch_end",
        ),
    ],
)
def test_callbacks_that_look(callback: L.Callback, expected: str) -> None:
    assert reason_of(Net(), callback) == expected + READ


def test_code_without_source_is_read_by_its_names() -> None:
    """In an interactive session there may be no source."""
    scope: dict[str, Any] = {}
    exec("def look(trainer, module, *rest):\n    return [p.grad for p in module.net]", scope)
    exec("def glance(trainer, module, *rest):\n    return trainer.global_step", scope)
    assert reason_of(Net(), LambdaCallback(on_train_batch_end=scope["look"])) is not None
    assert reason_of(Net(), LambdaCallback(on_train_batch_end=scope["glance"])) is None


def test_callbacks_of_lightning_that_change_parameters() -> None:
    for callback in (ModelPruning("l1_unstructured", amount=0.5), BackboneFinetuning()):
        assert f"callback {type(callback).__name__} " in (reason_of(Net(), callback) or "")
    assert reason_of(Net(), ModelCheckpoint()) is None


def test_hooks_registered_by_the_user() -> None:
    module = Net()
    assert reason_of(module) is None
    forward = module.net.register_forward_hook(lambda mod, args, out: print(out.mean()))
    assert reason_of(module) is None
    forward.remove()
    looking = module.net.register_forward_hook(
        lambda mod, args, out: print([p.norm() for p in mod.parameters()])
    )
    assert "a hook on 'net'" in (reason_of(module) or "")
    looking.remove()
    on_gradient = module.net[0].weight.register_hook(lambda gradient: gradient * 2)
    assert "a hook on parameter 'net.0.weight'" in (reason_of(module) or "")
    on_gradient.remove()
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "a hook on parameter 'net.0.weight'" in (reason_of(module) or "")


# ---- how calls are told apart --------------------------------------------------------------------


def probe(anything: Any, count: Any = 1) -> Any:
    return anything(torch.zeros(count, 4))


def probe_second(count: Any, anything: Any) -> Any:
    return probe(anything, count)


def probe_keyword(*, anything: Any) -> Any:
    return anything(torch.zeros(1, 4))


def probe_any(*anything: Any) -> Any:
    return anything[0](torch.zeros(1, 4))


def doubled(value: Any) -> Any:
    return 2 * value


class Tracker:
    def __call__(self, anything: Any) -> Any:
        return [parameter.norm() for parameter in anything.parameters()]

    def look(self, anything: Any) -> Any:
        return self(anything)


tracker = Tracker()
look_without_gradients = torch.no_grad()(tracker.look)


class Snippets(Net):
    """What snippets of hooks find."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.table = nn.Embedding(4, 4)
        self.prefix, self.metrics = "it", [doubled]
        self.weigh, self.weighed_part = Weighed(), functools.partial(weighed, 2.0)

    def _a(self) -> None:
        self.table.weight.full_tensor()
        self._norms()

    def _norms(self) -> Any:
        return [parameter.norm() for parameter in self.parameters()]


class Weighed:
    weight = 2.0

    def __call__(self, value: Any) -> Any:
        return self.weight * value


def weighed(factor: Any, value: Any) -> Any:
    return factor * value


def module_of(snippet: str) -> L.LightningModule:
    """A module whose hook `on_train_epoch_end` has these lines."""
    lines = "".join(f"    {line}\n" for line in snippet.splitlines())
    scope: dict[str, Any] = {**globals(), "concurrent": concurrent, "logging": logging}
    exec(f"def hook(self):\n    batch, x, bad = 1, 2, 0\n{lines}", scope)
    return type("Made", (Snippets,), {"on_train_epoch_end": scope["hook"]})()


@pytest.mark.parametrize(
    ("snippet", "expected"),
    [
        # what is called after another call is over
        ("net = getattr(self, 'ema', None) or self.net\nnet(x)", "uses 'net'"),
        ("torch.save({'epoch': str(1), 'net': self.net}, 'path')", "uses 'net'"),
        ("probe_second(len('text'), self.net)", "calls the model"),
        ("probe_second(doubled(x), self.net)", "calls the model"),
        ("if bad: raise ValueError(str(bad))\nnet = self.net", "uses 'net'"),
        ("print([layer(x).mean() for layer in self.layers])", "uses 'layers'"),
        ("print(self.layers[-1].forward(x))", "uses 'layers'"),
        ("print(self.layers[0](x))", "uses 'layers'"),
        # as which argument
        ("probe_second(batch + 1, self.net)", "calls the model"),
        ("probe_keyword(anything=self.net)", "calls the model"),
        ("probe(count=3, anything=self.net)", "calls the model"),
        ("probe_any(self.net)", "uses 'net'"),
        ("probe(*[1], self.net)", "uses 'net'"),
        ("probe(**{'anything': self.net})", "uses 'net'"),
        ("probe_any(*self.net)", "uses 'net'"),
        # to something unknown
        ("for metric in self.metrics: metric(self)", "hands the model to a function"),
        ("for metric in self.metrics: metric(self.net)", "uses 'net'"),
        ("for metric in self.metrics: metric(net=self)", "hands the model to a function"),
        ("(lambda net: net)(self.net)", "uses 'net'"),
        ("import copy\nself.kept = copy.deepcopy(self.net)", "uses 'net'"),
        ("concurrent.futures.Executor().submit(probe, self.net)", "uses 'net'"),
        ("concurrent.futures.wait(self)", "hands the model to a function"),
        ("(probe if x else print)(self.net)", "calls the model"),
        ("probe(self.net if x else None)", "calls the model"),
        # inside of a call
        ("print(self(x))", "calls the model"),
        ("print(self.net(x, mask=x))", "uses 'net'"),
        ("print(torch.unique(self.table.weight).numel())", "reads parameters"),
        ("print(*[self.net(x)], sep='')", "uses 'net'"),
        # through objects that can be called
        ("print(tracker(self.net))", "reads parameters"),
        ("print(tracker.look(self))", "reads parameters"),
        ("print(look_without_gradients(self))", "reads parameters"),
        ("with torch.no_grad(): print(probe(self.net))", "calls the model"),
        ("print([self.net(each) for each in range(2)])", "uses 'net'"),
        ("print(*(self(each) for each in range(2)))", "calls the model"),
        ("look = lambda: self.net(x)\nlook()", "uses 'net'"),
        # beside code that knows shards
        ("self._a()\nself._norms()", "reads parameters"),
        # loops over parameters
        (
            "print([[p.abs().max() for _ in range(2)] for p in self.parameters()])",
            "reads parameters",
        ),
        ("for p in self.parameters():\n    print(p.numel(), p)", "reads parameters"),
        ("for p in self.parameters(): self.last = p.mean()", "reads parameters"),
        ("print([p.mean() for p in self.parameters()])", "reads parameters"),
        ("print({p: 1 for p in self.parameters()})", "reads parameters"),
        ("self.last, self.size = next(self.parameters()), 1", "reads parameters"),
        ("try:\n    x / bad\nexcept ZeroDivisionError as error:\n    self.net(x)", "uses 'net'"),
        ("with open('/dev/null') as file:\n    print(self.net(x), file=file)", "uses 'net'"),
    ],
)
def test_snippets_that_look(snippet: str, expected: str) -> None:
    assert reason_of(module_of(snippet)) == f"Made.on_train_epoch_end {expected}{READ}"


@pytest.mark.parametrize(
    "snippet",
    [
        "print(self.prefix, self)",
        "weighed(self.scale, self)",
        "logging.info('%s', self)",
        "super(Net, self).on_train_epoch_end()",
        "print(type(self).__name__.lower())",
        "print(getattr(self, self.prefix, None), getattr(self.net, 'name', None))",
        "print(sum([p.numel() for p in self.parameters()]))",
        "print({p.numel() for p in self.parameters()}, {p.dtype: 1 for p in self.parameters()})",
        "print([x for p in self.parameters() for x in p.shape])",
        "print([x for x in self.metrics if x], [p.shape for p in self.net.parameters()])",
        "print(sum(p.numel() for p in self.parameters()), [str(x) for x in [1, 2]])",
        "n = sum(p.numel() for p in self.parameters())\ntitles = [str(x) for x in self.metrics]",
        "for p in self.parameters():\n    if p.requires_grad: print(p.shape, p.dtype)",
        "self.log('criterion', self.weigh(x) + self.weighed_part(x))",
        "print(next(self.net.parameters(), None).device if x else 'nowhere')",
        "print(self.get_parameter('table.weight').shape, self.table.weight.shape)",
        "if isinstance(self.net, nn.Sequential) and len(self.net) > 1: print(f'{x} {x:.2f}')",
        "try:\n    self.log('loss', x / bad)\nexcept ZeroDivisionError:\n    print(type(self.net))",
        "with torch.no_grad(): self.log('mean', self.seen.compute())",
    ],
)
def test_snippets_that_do_not_look(snippet: str) -> None:
    assert reason_of(module_of(snippet)) is None


class Reports(Net):
    def report(self) -> None:
        self.log("size", self.net[0].weight.norm())


class Validates(Net):
    """Calls objects of the user's in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.weighed_part = Weighed(), functools.partial(weighed, 2.0)

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self.weigh(self.weighed_part(self.net(batch).mean())))


def test_functions_are_read_with_their_own_self() -> None:
    module = Reports()
    report = module.report
    callback = LambdaCallback(on_train_epoch_end=lambda trainer, module: report())
    assert reason_of(module, callback) == (
        f"callback LambdaCallback reads parameters in on_train_epoch_end{READ}"
    )
    assert reason_of(Validates()) is None

    def reporting(what: Any) -> Any:
        return lambda trainer, module: what()

    # Closures that share their code.
    first, second = reporting(module.cpu), reporting(report)
    callback = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: (
            first(trainer, module),
            second(trainer, module),
        )
    )
    assert "reads parameters" in (reason_of(module, callback) or "")


def test_functions_that_call_one_another_without_an_end() -> None:
    """Each for another object: they are read as deep as calls usually go."""

    class Chain(L.Callback):
        def __init__(self, after: Any) -> None:
            self.after = after

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.after.on_train_epoch_end(trainer, pl_module)

    callback = Chain(Printer())
    for _ in range(2000):
        callback = Chain(callback)
    assert reason_of(Net(), callback) is None
    looks = Chain(Chain(Chain(CallbackCalls())))
    assert "calls the model" in (reason_of(Net(), looks) or "")
