"""What microbatches return, log and count is what one step would have; found out by a test where it
cannot be known.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_topt.plugins.loss_kinds import (
    LossKinds,
    Summand,
    TriedStep,
    compare_steps,
    drawn_since,
    summands_of,
    without_trace,
)
from lightning_topt.plugins.microbatches import combined_calls, combined_output
from lightning_topt.plugins.step_records import (
    LoggedCall,
    MetricChanges,
    apply_metric_changes,
    recorded_calls,
    replay,
    uncounted,
)
from lightning_topt.techniques.tensor_parallel.random_states import random_states


class Logs(L.LightningModule):
    """Logs values of all kinds, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.seen = torchmetrics.CatMetric()
        self.several = torchmetrics.MetricCollection(
            [
                kind("multiclass", num_classes=3)
                for kind in (torchmetrics.Precision, torchmetrics.Recall)
            ]
        )

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        self.accuracy(x, target)
        self.seen.update(x.sum())
        self.several.update(x, target)
        loss = (x.sum(1) * target).sum()
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"loss": loss, "mean": x.mean()}, batch_size=len(x))
        self.log("count", len(x), reduce_fx="sum")
        self.log("most", x.max(), reduce_fx=torch.max)
        self.print("step of", len(x))
        return loss


def told(module: Logs, x: Tensor, target: Tensor) -> list[LoggedCall]:
    calls: list[LoggedCall] = []
    with recorded_calls(module, calls):
        module.step(x, target)
    return calls


X, TARGET = (
    torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    torch.tensor([0, 2, 1, 1, 0]),
)


def test_logged_values_of_parts_are_those_of_the_whole() -> None:
    module, whole = Logs(), Logs()
    parts = [told(module, X[:3], TARGET[:3]), told(module, X[3:], TARGET[3:])]
    found = combined_calls(parts, sizes=(3, 2), weights=(1, 1), kinds={"loss": "sum"})
    expected = told(whole, X, TARGET)
    assert [call.name for call in found if call.method == "log"] == [
        c.name for c in expected if c.method == "log"
    ]
    assert [call.arguments for call in found if call.method == "print"] == [
        ("step of", 3),
        ("step of", 2),
    ]
    for own, one in zip([c for c in found if c.method == "log"], expected, strict=False):
        if own.name == "accuracy":
            assert own.value.path == "accuracy"
            assert own.value.value == pytest.approx(float(one.value.value))
        else:
            assert float(own.value) == pytest.approx(float(one.value)), own.name
            assert own.keywords.get("batch_size") == one.keywords.get("batch_size")
    assert "log" not in vars(module)


def test_calls_are_replayed_with_their_metrics() -> None:
    module, other = Logs(), Logs()
    calls, logged = told(module, X, TARGET), dict[str, Any]()
    vars(other)["log"] = lambda name, value, **_: logged.update({name: value})
    vars(other)["print"] = lambda *_: None
    replay(other, calls)
    assert logged["accuracy"] is other.accuracy
    assert float(other.accuracy._forward_cache) == pytest.approx(
        float(module.accuracy._forward_cache)
    )
    assert logged["count"] == 5


def test_another_rank_takes_over_what_metrics_counted() -> None:
    first, second = Logs(), Logs()
    for start in (0, 2):
        counting = MetricChanges.begin(first)
        told(first, X[start : start + 2], TARGET[start : start + 2])
        changes = counting.since(first)
        assert len(changes["seen"]["value"].entries) == 1  # lists are not sent again
        apply_metric_changes(second, changes)
    assert float(second.accuracy.compute()) == pytest.approx(float(first.accuracy.compute()))
    torch.testing.assert_close(second.seen.compute(), first.seen.compute())
    torch.testing.assert_close(second.several.compute(), first.several.compute())
    assert MetricChanges.begin(first).since(first) == {}
    first.accuracy.reset()
    assert second.accuracy.update_count == 2


def test_a_pass_that_does_not_end_counts_nothing() -> None:
    module = Logs()
    told(module, X[:2], TARGET[:2])
    before = {name: float(metric.compute()) for name, metric in (("a", module.accuracy),)}
    with pytest.raises(KeyboardInterrupt), uncounted(module, unless=[]):
        told(module, X, TARGET)
        raise KeyboardInterrupt
    assert module.accuracy.update_count == 1 and len(module.seen.value) == 1
    assert float(module.accuracy.compute()) == before["a"]


def test_outputs_of_parts_are_joined() -> None:
    def output(x: Tensor) -> dict[str, Any]:
        each = {
            "logits": x,
            "name": "same",
            "names": [str(i) for i in range(len(x))],
            "right": torch.tensor(len(x)),
        }
        return {"loss": x.mean(), **each, "rate": 0.5, "total": x.sum()}

    found = combined_output(
        [output(X[:3]), output(X[3:])], sizes=(3, 2), weights=(0.6, 0.4), kinds={6: "sum", 4: "sum"}
    )
    torch.testing.assert_close(found["logits"], X)
    assert found["loss"] == pytest.approx(float(X.mean())) and found["total"] == pytest.approx(
        float(X.sum())
    )
    assert (
        found["name"] == "same"
        and found["names"] == ["0", "1", "2", "0", "1"]
        and found["rate"] == 0.5
    )
    assert found["right"] == 5
    numbers = [X.mean(), X.sum()]
    assert combined_output(numbers, sizes=(1, 1), weights=(1, 1), kinds={}) == pytest.approx(
        float(sum(numbers)) / 2
    )
    assert (
        combined_output(
            [X.mean(), X.sum() * torch.nan], sizes=(1, 1), weights=(1, 0), kinds={0: "loss"}
        )
        == X.mean()
    )


def tried(loss: float, *divided: float, size: int = 2, **logged: float) -> TriedStep:
    calls = [LoggedCall("", "log", (name, value), {}) for name, value in logged.items()]
    return TriedStep(
        {"loss": torch.tensor(loss), "extra": torch.tensor(loss)},
        calls,
        tuple(Summand(each, 1.0) for each in divided),
        size,
    )


def kinds_of(
    first: TriedStep, second: TriedStep, both: TriedStep, *, draws: bool = False
) -> LossKinds:
    return compare_steps((first, second), both, draws=draws)


def test_kinds_of_losses_are_told_by_two_parts_of_a_batch() -> None:
    kinds = kinds_of(tried(2.0, a=1.0, b=3.0), tried(4.0, a=5.0, b=1.0), tried(3.0, a=3.0, b=4.0))
    assert (
        kinds.loss == "mean"
        and kinds.logged == {"b": "sum"}
        and kinds.returned == {0: "loss", 1: "loss"}
    )
    kinds = kinds_of(tried(2.0), tried(4.0), tried(6.0))
    assert kinds.loss == "sum" and kinds.returned == {0: "loss", 1: "loss"}
    assert kinds_of(tried(2.0), tried(3.0, size=1), tried(7 / 3)).loss == "mean"
    assert kinds_of(tried(2.0, 10.0), tried(4.0, 5.0), tried(8 / 3, 15.0)).loss == "mean"
    assert kinds_of(tried(0.0), tried(0.0), tried(0.0)).loss is None
    assert kinds_of(tried(float("nan")), tried(1.0), tried(1.0)).loss is None
    assert kinds_of(tried(1.0), tried(1.0), tried(1.1), draws=True).loss == "mean"
    assert kinds_of(tried(1.0, 1, 1), tried(1.0, 1, 1), tried(1.0, 1, 1, 1, 1)).loops


def test_logged_means_have_the_weights_of_samples_or_of_the_loss() -> None:
    steps = (
        tried(2.0, 6.0, samples=1.0, tokens=1.0, near=1.0, neither=1.0),
        tried(6.0, 2.0, samples=3.0, tokens=3.0, near=1.0001, neither=3.0),
        tried(3.0, 8.0, samples=2.0, tokens=1.5, near=1.000025, neither=1.2),
    )
    kinds = kinds_of(*steps)
    assert (
        kinds.loss == "mean"
        and kinds.logged == {"tokens": "loss", "near": "loss"}
        and kinds.unlike == ("neither",)
    )
    assert not kinds_of(*steps, draws=True).unlike
    for step in steps:
        step.calls[-1].keywords["reduce_fx"] = torch.max
    assert not kinds_of(*steps).unlike


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            (tried(1.0), tried(1.0), tried(1.1)),
            r"neither a mean nor a sum over samples.*microbatches=1",
        ),
        (
            (tried(2.0, 2.0), tried(4.0, 2.0), tried(3.0, 2.0)),
            r"looks like a mean.*divided by 2 and 2.*by 2 for both",
        ),
        ((tried(2.0, 2.0), tried(4.0, 2.0), tried(6.0, 4.0)), "looks like a sum"),
        (
            (tried(2.0, 8.0, 2.0), tried(4.0, 4.0, 2.0), tried(3.0, 12.0, 4.0)),
            "no weights of microbatches",
        ),
        ((TriedStep(None, [], (), 1), tried(1.0), tried(1.0)), "returned no loss"),
    ],
)
def test_losses_that_microbatches_do_not_have_are_named(steps: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kinds_of(*steps)


W, KEPT = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
P = torch.nn.Parameter(torch.ones(3))
LOSSES: dict[str, tuple[Any, tuple[float, ...]]] = {
    "mean": (lambda x: x.square().mean(), (6,)),
    "mean over all dims": (lambda x: x.square().mean(dim=(0, 1)) / 2, (12,)),
    "sum": (lambda x: 3 * x.sum() - (x.sum(1) @ torch.ones(2)) / 2, (1, 2)),
    "by mask": (lambda x: (x * KEPT).sum() / KEPT.sum(), (3,)),
    "chosen": (lambda x: x[KEPT > 0].mean(), (3,)),
    "kernel": (lambda x: F.mse_loss(x, KEPT) + F.mse_loss(x, KEPT, reduction="sum"), (6, 1)),
    "ignored": (lambda x: F.cross_entropy(x, torch.tensor([-100, 2])).to(torch.float64), (1,)),
    "classes": (lambda x: F.cross_entropy(x, torch.tensor([1, 2]), weight=W), (5,)),
    "smooth": (
        lambda x: F.cross_entropy(x, torch.tensor([1, -1]), ignore_index=-1, label_smoothing=0.3),
        (1, 1),
    ),
    "pixels": (
        lambda x: F.cross_entropy(x.T.reshape(1, 3, 2, 1), torch.tensor([[[-100], [2]]])),
        (1,),
    ),
    "off": (lambda x: x.mean() + 0.0 * x.sum(), (6, 1)),
    "heads": (lambda x: torch.stack([x[:, head].mean() for head in range(3)]).sum(), (2, 2, 2)),
    "samples": (lambda x: torch.stack([row.mean() for row in x]).mean(), (2,)),
    "nothing": (lambda x: (x * KEPT).sum() / 0.0, (0,)),
    "penalty": (
        lambda x: x.mean() + 0.1 * (2 * P).square().sum() + P.norm() + (P * x).sum(),
        (6, 1),
    ),
    "constant": (lambda x: torch.ones(()), ()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_divisors_are_read_in_the_graph_of_a_loss(name: str) -> None:
    loss, expected = LOSSES[name]
    found = summands_of(loss(X[:2].clone().requires_grad_()), samples=2)
    assert [each.divisor for each in found] == pytest.approx([*expected])


def test_the_test_leaves_no_trace() -> None:
    module = Logs().train()
    told(module, X, TARGET)
    states, mean = random_states(), module.norm.running_mean.clone()
    with without_trace(module):
        assert not module.training and not torch.is_grad_enabled()
        assert not drawn_since(states)
        module.norm.running_mean.add_(torch.rand(3))
        module.accuracy(X, TARGET)
        assert drawn_since(states)
    assert not drawn_since(states) and module.norm.training
    assert torch.equal(module.norm.running_mean, mean) and module.accuracy.update_count == 1
