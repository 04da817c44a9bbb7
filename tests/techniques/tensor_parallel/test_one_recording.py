"""The step of a rank from one recording is the one from two, number for number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_topt.graph import capture as capturing
from lightning_topt.graph.capture import StepRun
from lightning_topt.graph.recording import PRIME
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.models import GPT, Mixture
from tests.techniques.tensor_parallel.test_split_models import llama, t5
from tests.techniques.tensor_parallel.traced import Step, along, prices

WIDTH = 32


class Language(nn.Module):
    """A training step around a model of Hugging Face's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class Vision(nn.Module):
    """A training step around a classifier of images of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=16, patch_size=4, num_labels=8,
        )  # fmt: skip
        self.model = transformers.ViTForImageClassification(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images).logits, labels)


class Words(nn.Module):
    """A recurrent network, whose kernels keep bytes that no tensor shows, and whose samples are in
    the second dim.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(48, WIDTH),
            nn.LSTM(WIDTH, WIDTH),
            nn.Linear(WIDTH, 48),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, _ = self.lstm(self.embed(batch.t()))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.t().reshape(-1))


def gpt() -> nn.Module:
    return GPT(layers=4, width=WIDTH, heads=4)


def convolutions() -> nn.Module:
    layers = (
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
    )
    return Step(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 8)))


def ids(samples: int) -> Tensor:
    return torch.zeros(samples, 8, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "gpt": (gpt, lambda n: (ids(n), ids(n))),
    "llama": (lambda: Language(llama()), ids),
    "t5": (lambda: Language(t5()), ids),
    "vit": (Vision, lambda n: (torch.zeros(n, 3, 16, 16), torch.zeros(n, dtype=torch.long))),
    "mixture": (lambda: Step(Mixture("einsum", width=WIDTH)), lambda n: torch.zeros(n, 8, WIDTH)),
    "convolutions": (convolutions, lambda n: torch.zeros(n, 3, 16, 16)),
    "words": (Words, lambda n: ids(2 * n)),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of every recording that was made."""
    found: list[int] = []
    record = StepRun.record

    def counted(self: StepRun, batch: Any, **options: Any) -> Any:
        found.append(options.get("samples", (1, 1))[1])
        return record(self, batch, **options)

    monkeypatch.setattr(StepRun, "record", counted)
    return found


def graphs(model: SplitModel, ranks: int, *, all_splits: bool = True) -> list[Any]:
    """Steps of a rank, each part of them captured: of all splits, or of that which splits most."""
    costs, found = prices(model.module, ranks), []
    candidates = model.candidates(costs)
    for split in candidates if all_splits else candidates[-1:]:
        found.append(model.local_graph(split.layout, along(ranks)))
    return found


@pytest.mark.parametrize(("name", "samples"), [*((name, 4) for name in MODELS), ("vit", 1)])
def test_one_recording_tells_what_two_do(
    name: str, samples: int, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch_of = MODELS[name]
    module, batch, trace = make(), batch_of(samples), FunctionTrace()
    whole = capturing.capture(module, batch, adapt=trace.of)
    recorded.clear()
    model = SplitModel(module, batch, whole, trace)
    all_splits = name not in ("llama", "t5", "vit")  # other models, not other splits
    found, steps = graphs(model, 2, all_splits=all_splits), model.captured.graphs.values()
    of_one = [count for count in recorded if count % PRIME == 0]
    if name == "mixture":  # einsum chooses other operators for a large batch
        assert len(of_one) == 1
    else:
        assert len(of_one) == 1 + len(steps)
        # again, for errors that tell of the user's batch
        refused = sum(graph is None for graph in steps)
        assert len(recorded) == len(of_one) + refused
    monkeypatch.setattr(capturing, "_from_one_recording", lambda *_: None)
    of_two = graphs(SplitModel(module, batch, whole, trace), 2, all_splits=all_splits)
    assert any(graph is not None for graph in found)
    assert len(found) == len(of_two)
    # Two small batches may run different operators, where one has as many samples as there are
    # ranks.
    assert all(a == b for a, b in zip(found, of_two, strict=True) if samples > 1 or b is not None)


class Pairs(nn.Module):
    """Neighbours of the batch are compared: one fewer of them than samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.down(F.gelu(self.up(batch)))
        return (x[1:] - x[:-1]).square().mean()


def test_two_recordings_tell_where_one_does_not(recorded: list[int]) -> None:
    module, batch, trace = Pairs(), torch.zeros(4, 16), FunctionTrace()
    whole = capturing.capture(module, batch, adapt=trace.of)
    recorded.clear()
    model = SplitModel(module, batch, whole, trace)
    split = model.candidates(prices(module, 2))[0]
    local = model.local_graph(split.layout, along(2))
    assert recorded == [4 * PRIME, 4, 8]  # the first one of the step as it is
    assert local is not None
    differences = [t.bytes for t in local.step.tensors if t.spec.shape == (3, 16)]
    assert differences
    assert {(amount.fixed, amount.per_sample) for amount in differences} == {(-64.0, 64.0)}


@pytest.mark.parametrize("dim", [0, 1])
def test_one_recording_stands_for_two_batches_that_differ_in_their_first_dim(
    dim: int, recorded: list[int]
) -> None:
    module, trace, shapes = Step(nn.Linear(16, 64)), FunctionTrace(), ((4, 4, 16), [4, 4, 16])
    shapes[1][dim] = 8
    batch, second = (torch.zeros(*shape) for shape in shapes)
    whole = capturing.capture(module, batch, second_batch=second, adapt=trace.of)
    recorded.clear()
    model = SplitModel(module, batch, whole, trace, second)
    local = model.local_graph(model.candidates(prices(module, 2))[0].layout, along(2))
    assert recorded == ([4 * PRIME, 4 * PRIME] if dim == 0 else [4 * PRIME, 4, 8])
    assert local is not None
    assert {
        tensor.spec.batch_dim for tensor in local.step.tensors if len(tensor.spec.shape) == 3
    } == {dim}
