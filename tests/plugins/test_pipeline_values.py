"""What microbatches return, log and count is what one step would have; found out by a test where it
cannot be known.
"""

from __future__ import annotations

import pickle
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_topt.plugins.microbatches import (
    Parts,
    combined_calls,
    combined_output,
    loss_problem,
    loss_weights,
    without_trace,
)
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
    losses = [float(call.value) for calls in parts for call in calls if call.name == "loss"]
    found = combined_calls(parts, sizes=(3, 2), weights=(1, 1), losses=losses)
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

    outputs = [output(X[:3]), output(X[3:])]
    losses = [float(each["loss"]) for each in outputs]
    found = combined_output(outputs, sizes=(3, 2), weights=(0.6, 0.4), losses=losses)
    torch.testing.assert_close(found["logits"], X)
    assert found["loss"] == pytest.approx(float(X.mean()))
    assert found["names"] == ["0", "1", "2", "0", "1"]
    assert (found["name"], found["rate"]) == ("same", 0.5)
    # What equals the loss has its weights; all else is a mean over samples.
    for losses, weights, expected in (
        ([1.0, 3.0], (1, 1), 4.0),
        ([1.0, 4.0], (1, 1), 1.5),
        ([1.0, float("nan")], (1, 0), 1.0),
    ):
        values = [torch.tensor(1.0), torch.tensor(losses[1] if weights[1] == 0 else 3.0)]
        got = combined_output(values, sizes=(3, 1), weights=weights, losses=losses)
        assert float(got) == expected


TOKENS = torch.tensor([[1, 2, -100], [3, -100, -100], [-100, -100, -100]])
PARTS = Parts(({"labels": TOKENS[:1]}, {"labels": TOKENS[1:]}), (1, 2))


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("mean", [1 / 3, 2 / 3]),
        ("sum", [1, 1]),
        ("tokens", [2 / 3, 1 / 3]),
        (lambda batch: (batch["labels"] == -100).sum(), [1 / 6, 5 / 6]),
    ],
)
def test_weights_of_microbatches_are_those_of_their_kind(kind: Any, weights: list[float]) -> None:
    assert loss_weights(PARTS, kind) == pytest.approx(weights)
    assert loss_weights(Parts(PARTS.batches[:1], (1,)), kind) == [1.0]


def test_targets_are_the_last_whole_numbers_of_a_batch() -> None:
    parts = Parts(((TOKENS[:1].float(), TOKENS[:1]), (TOKENS[1:].float(), TOKENS[1:])), (1, 2))
    assert loss_weights(parts, "tokens") == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(ValueError, match="labels"):
        loss_weights(Parts((torch.zeros(1), torch.zeros(1)), (1, 1)), "tokens")


@pytest.mark.parametrize(
    ("losses", "weights", "told"),
    [
        ([2.0, 4.0, 3.0], [0.5, 0.5], True),
        ([2.0, 4.0, 6.0], [1.0, 1.0], True),
        ([2.0, 4.0, 6.0], [0.5, 0.5], False),
        ([2.0, float("nan"), 2.0], [1.0, 0.0], True),
        ([0.0, 0.0, 0.0], [0.5, 0.5], None),
        ([2.0, float("nan"), 2.0], [0.5, 0.5], None),
    ],
)
def test_a_doubled_batch_tells_whether_losses_add_up(
    losses: list[float], weights: list[float], told: bool | None
) -> None:
    found = loss_problem(losses, weights, draws=False, half=False)
    assert told is (None if found is None else not found)
    assert told is not False or "microbatch_loss" in str(found)


def test_the_test_leaves_no_trace() -> None:
    module = Logs().train()
    told(module, X, TARGET)
    states, mean = random_states(), module.norm.running_mean.clone()
    with without_trace(module):
        assert not module.training and not torch.is_grad_enabled()
        module.norm.running_mean.add_(torch.rand(3))
        module.accuracy(X, TARGET)
    assert pickle.dumps(random_states()) == pickle.dumps(states) and module.norm.training
    assert torch.equal(module.norm.running_mean, mean) and module.accuracy.update_count == 1
