"""What cannot be captured is refused with operator or error, line and a way out."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.errors import CaptureError
from tests.graph.measure import flops_of
from tests.graph.test_steps_with_values import Net


def refuse(module: Any, batch: Any, *fragments: str, **kwargs: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(module, batch, **kwargs)
    for fragment in fragments:
        assert fragment in str(caught.value)


X = torch.zeros(4, 8)
WAY_OUT = 'plan="ddp" or plan="zero1"'


def test_value_inside_a_submodule() -> None:
    class Clamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 1).any()):  # here
                x = x.clamp(max=1)
            return x

    class Inside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.clamp = Clamp()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.clamp(self.net(batch)).mean()

    refuse(Inside(), X, "in forward: if bool((x > 1).any())", WAY_OUT)


def test_operator_without_fake_implementation() -> None:
    library = torch.library.Library("topt_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")

    class Custom(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(torch.ops.topt_test.double(batch)).mean()

    refuse(
        Custom(),
        X,
        "topt_test.double",
        "torch.ops.topt_test.double(batch)",
        "no shape-only",
        WAY_OUT,
    )


@pytest.mark.parametrize("output", [None, 1.0])
def test_no_loss(output: Any) -> None:
    class NoLoss(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return output

    refuse(NoLoss(), X, "loss", "training_step returned", WAY_OUT)


def test_step_that_depends_on_the_batch_size() -> None:
    class Odd(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.net(batch)
            return (x.relu() if len(batch) > 4 else x.tanh()).mean()

    refuse(Odd(), X, "other operators on 4 samples than on 8", "relu", "tanh", WAY_OUT)


def test_users_own_error_has_its_line() -> None:
    class MyError(Exception):
        pass

    class Raises(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise MyError("mine")  # by the user

    class WrongShape(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch[:, :3]).mean()  # three of eight

    class Unfinished(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.net(batch)
            raise NotImplementedError("later")

    refuse(Raises(), X, "raised MyError: mine", f"{__file__}:", "# by the user", WAY_OUT)
    refuse(WrongShape(), X, "raised RuntimeError", "# three of eight", WAY_OUT)
    refuse(Unfinished(), X, "raised NotImplementedError: later", WAY_OUT)


# ---- what works although it is awkward -----------------------------------------------------------


def test_metrics_that_read_values_do_not_stop_the_capture() -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.f1 = torchmetrics.F1Score("multiclass", num_classes=8)
            self.auroc = torchmetrics.AUROC("multiclass", num_classes=8)
            self.both = torchmetrics.MetricCollection(
                [torchmetrics.MeanMetric(), torchmetrics.MaxMetric()]
            )

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            logits = self.net(batch)
            labels = torch.zeros(len(batch), dtype=torch.long)
            self.log("f1", self.f1(logits.softmax(-1), labels))
            self.auroc.update(logits.softmax(-1), labels)
            self.log("auroc", self.auroc.compute())
            self.both(logits.mean())
            return nn.functional.cross_entropy(logits, labels)

    module = Measured()
    before = [metric.clone() for metric in (module.f1.tp, module.both.MeanMetric.mean_value)]
    graph = capture(module, X)
    assert "net" in [op.name for op in graph.ops]
    assert [
        torch.equal(a, b)
        for a, b in zip(before, (module.f1.tp, module.both.MeanMetric.mean_value), strict=True)
    ]
    assert module.f1._update_count == 0


def test_trainer_and_what_cannot_be_copied_are_shared() -> None:
    class Stub:
        global_step = 3

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

    class Owner(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stub, self.lists = Stub(), [torch.zeros(3)]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.logger.experiment.add_scalar("x", batch.mean(), self.global_step)
            self.log_dict({"lr": self.optimizers().param_groups[0]["lr"]})
            self.lists[0] += 1
            self.lists.append(batch)
            self.print("never")
            return super().training_step(batch, batch_idx) * self.stub.global_step

    module = Owner()
    module._trainer = trainer = L.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    graph = capture(module, X)
    assert graph.model == "Owner" and module._trainer is trainer
    assert torch.equal(module.lists[0], torch.zeros(3)) and len(module.lists) == 1


def test_checkpointed_module() -> None:
    class Checkpointed(Net):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.use_reentrant = use_reentrant
            self.first = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.first(batch)
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
            return super().training_step(x, batch_idx)

    for use_reentrant in (True, False):
        graph = capture(Checkpointed(use_reentrant), X)
        recomputed = [
            k.name for op in graph.ops for k in op.backward if k.name == "aten.tanh.default"
        ]
        assert len(recomputed) == 1
        products = sum(flops_of(op, "backward", 4) for op in graph.ops) / (2 * 4 * 64)
        # Two for each of four layers but the first, and those computed again; torch's newer form
        # stops before the last.
        assert products == 7 + (2 if use_reentrant else 1)
