"""What strangers do that fake tensors, shards or a second call of a block cannot follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from tests.foreign.once_shelf import Net
from tests.foreign.shelf import Samples, loader, program, row_and_label, tokens


class Classifier(Net):
    """What is awkward is added by those that inherit it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class OwnOptimizer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.opt


@program()
def optimizer_built_in_init() -> Any:
    return OwnOptimizer(), loader(row_and_label)


class StoredList(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.decayed = list(self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(
            p.pow(2).sum() for p in self.decayed
        )


@program()
def stored_list_for_l2() -> Any:
    return StoredList(), loader(row_and_label)


class AveragesInDict(Classifier):
    """An exponential average kept by hand, keyed by parameter."""

    def on_fit_start(self) -> None:
        self.averages = {p: p.detach().clone() for p in self.net.parameters()}
        self.register_buffer("drift", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter, average in self.averages.items():
            average.lerp_(parameter.detach(), 0.1)
            self.drift += (average - parameter.detach()).abs().sum()


@program()
def average_by_hand() -> Any:
    return AveragesInDict(), loader(row_and_label)


class CountingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(width, width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x + self.l(x).relu() * (1 + 0.5 * self.n)


@program()
def block_that_counts_its_calls() -> Any:
    module = Classifier()
    module.net = nn.Sequential(
        nn.Linear(8, 16), *(CountingBlock(16) for _ in range(3)), nn.Linear(16, 5)
    )
    return module, loader(row_and_label)


class LogsNorms(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.register_buffer("total", torch.zeros(()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.total += norms["grad_2.0_norm_total"]


@program()
def logged_gradient_norms() -> Any:
    return LogsNorms(), loader(row_and_label)


class ValuesInStep(Classifier):
    """Reads values by `.item()`, masks, `nonzero`, printing; keeps a list; draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert x.abs().max() < 100, "rows are not normalized"
        x = x + 0.01 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * np.random.rand()
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        if torch.isnan(loss):
            return None  # type: ignore[return-value]
        confident = logits.softmax(-1).amax(-1) > 0.2
        if confident.any():
            loss = loss + 0.1 * F.cross_entropy(logits[confident], y[confident])
        rows = (y == 0).nonzero()[:, 0]
        if len(rows):
            loss = loss + logits[rows].square().mean()
        self.history.append(loss.item())
        print(f"loss {loss:.4f}", end="\r")
        return loss


@program()
def values_read_in_the_step() -> Any:
    return ValuesInStep(), loader(row_and_label)


def padded(batch: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(entry) for entry in batch])
    return {"tokens": pad_sequence(batch, batch_first=True), "lengths": lengths}


def text_of_any_length(source: torch.Generator, index: int) -> Tensor:
    return tokens(source, length=3 + int(torch.randint(0, 6, (), generator=source)))


class RecurrentTagger(L.LightningModule):
    """A packed, bidirectional LSTM over texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(16, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(batch["tokens"]), batch["lengths"], batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), batch["tokens"], ignore_index=0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@program()
def packed_lstm() -> Any:
    return RecurrentTagger(), loader(text_of_any_length, collate_fn=padded)


class SparseEmbeddings(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        looked_up = self.table((batch[0] * 10).long() % 64).mean(1)
        return F.cross_entropy(self.net(looked_up), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@program()
def sparse_embeddings() -> Any:
    return SparseEmbeddings(), loader(row_and_label)


class Experts(nn.Module):
    """Top-1 of 4 experts, by boolean masks: experts without a token are not called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in "abcd"
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = (weights[mine, None] * expert(x[mine])).to(out.dtype)
        return x + out


@program(precision="bf16-mixed")
def mixture_of_experts_under_bf16() -> Any:
    module = Classifier()
    module.net = nn.Sequential(nn.Linear(8, 16), Experts(16), nn.Linear(16, 5))
    return module, loader(row_and_label)


class Unused(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)


@program(find_unused=True)
def unused_parameters() -> Any:
    return Unused(), loader(row_and_label)


class StringKeys(torch.utils.data.Dataset[Any]):
    """Samples are looked up by name; the sampler hands out names."""

    def __init__(self) -> None:
        self.rows = {
            f"row{number}": sample
            for number, sample in enumerate(Samples(64, row_and_label).samples)
        }

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Any:
        return self.rows[name]


@program(use_distributed_sampler=False)
def data_set_with_string_keys() -> Any:
    data = StringKeys()
    names = [list(data.rows)[start : start + 4] for start in range(0, 32, 4)]
    return Classifier(), DataLoader(data, batch_sampler=names)


class ByLength(BatchSampler):
    """Batches of different sizes, as bucketing makes them."""

    def __init__(self, source: Any, batch_size: int = 4, drop_last: bool = False) -> None:
        super().__init__(source, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        entries = list(self.sampler)
        while entries:
            size = 2 + len(entries) % 3
            yield entries[:size]
            entries = entries[size:]

    def __len__(self) -> int:
        return 8


@program(use_distributed_sampler=False)
def batch_sampler_with_workers() -> Any:
    data = Samples(64, row_and_label)
    return Classifier(), DataLoader(
        data, batch_sampler=ByLength(SequentialSampler(data)), num_workers=1
    )


class OneShot(IterableDataset[Any]):
    """A stream that can be read once."""

    def __init__(self) -> None:
        self.stream = iter(Samples(64, row_and_label).samples)

    def __iter__(self) -> Iterator[Any]:
        return self.stream


@program()
def one_shot_stream() -> Any:
    return Classifier(), DataLoader(OneShot(), batch_size=4)


class ScalarScale(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.scale.exp(), batch[1])


@program()
def scalar_parameter() -> Any:
    return ScalarScale(), loader(row_and_label)


class TwoLoaders(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(
            batch["b"], batch_idx
        )


@program()
def two_loaders() -> Any:
    return TwoLoaders(), {"a": loader(row_and_label), "b": loader(row_and_label, batch_size=2)}


class OwnBackward(Classifier):
    """A custom autograd function, a parametrized layer, and a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 32))
        self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(Reversed.apply(self.net(batch[0])), batch[1])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@program(accumulate_grad_batches=2)
def own_backward_and_parameter_hook() -> Any:
    return OwnBackward(), loader(row_and_label)


class GradientPenalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().sum(-1).mean()


@program()
def gradient_penalty() -> Any:
    return GradientPenalty(), loader(row_and_label)


class Outputs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "extra": [batch_idx], "logits": self.net(batch[0]).detach()}


@program(log_every_n_steps=1, gradient_clip_val=0.5, gradient_clip_algorithm="value")
def dictionary_of_outputs() -> Any:
    return Outputs(), loader(row_and_label)
