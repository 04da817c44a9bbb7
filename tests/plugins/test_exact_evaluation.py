"""Validation, tests and predictions count every sample once, on any number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAUROC

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.exact_evaluation import (
    ExactSampler,
    ExactSamplerOf,
)
from tests.plugins.trainer_ranks import compressed, make_trainer, on_ranks

LENGTHS = (1, 7, 9)


class Numbers(Dataset[Tensor]):
    """`length` samples of 4 numbers; the last one is the index."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
        self.rows[:, 3] = torch.arange(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Stream(IterableDataset[Tensor]):
    """The samples of one rank, without a length."""

    def __init__(self, data: Numbers, rank: int, size: int) -> None:
        self.rows = [data[index] for index in range(rank, len(data), size)]

    def __iter__(self) -> Any:
        return iter(self.rows)


class Plain(L.LightningModule):
    """Logs means, sums and metrics of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.register_buffer("kept", torch.zeros(1))
        self.mean, self.auroc = MeanMetric(), BinaryAUROC()
        self.indices: list[int] = []
        self.gathered: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # evaluations are compared

    def _evaluate(self, batch: Tensor) -> None:
        values = self.blocks(batch).square().squeeze(1)
        self.indices += batch[:, 3].int().tolist()
        self.mean(values)
        self.auroc(values, (batch[:, 3] % 2).int())
        self.log("loss", values.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("count", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.log("most", values.max(), sync_dist=True, reduce_fx="max")
        self.log("own", values.mean())
        self.log("mean_metric", self.mean)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch)


class Judged(Plain):
    """Talks to other ranks by itself, too."""

    def on_validation_epoch_end(self) -> None:
        own = torch.tensor(len(self.indices))
        self.gathered = self.all_gather(own).flatten().tolist()


def numbers_of(module: Judged, trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def strategy_of(plan: Any) -> Any:
    if plan == "compressed":
        return compressed(pad_evaluation=False)
    return AutoParallelStrategy(plan=plan, pad_evaluation=False)


def evaluated(rank: int, size: int, length: int, plan: Any) -> Any:
    torch.manual_seed(0)
    trainer = make_trainer(strategy_of(plan) if size > 1 else "auto", devices=size)
    module = Judged()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.test(module, DataLoader(Numbers(length), batch_size=2), verbose=False)
    words = [str(each.message) for each in said]
    return module.indices, numbers_of(module, trainer), words


def assert_equal_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        # Values of one step, or of one rank, are others.
        if not name.startswith(("own", "loss_step")):
            assert found[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


@pytest.mark.parametrize(
    ("plan", "length"), [*((None, length) for length in LENGTHS), ("compressed", 7)]
)
def test_a_test_counts_every_sample_once(plan: Any, length: int) -> None:
    expected = evaluated(0, 1, length, None)
    results = on_ranks(evaluated, 2, length, plan)
    assert sorted(results[0][0] + results[1][0]) == list(range(length))
    for _, found, words in results:
        assert_equal_metrics(found, expected[1])
        assert not any("DistributedSampler" in each for each in words)


def validated(rank: int, size: int, plan: Any, loaders: str) -> Any:
    torch.manual_seed(0)
    trainer = make_trainer(
        strategy_of(plan) if size > 1 else "auto",
        devices=size,
        max_epochs=2,
        num_sanity_val_steps=1,
    )
    module = Judged()
    train = DataLoader(Numbers(8), batch_size=2)
    if loaders == "stream" and size > 1:
        data: Any = [
            DataLoader(Stream(Numbers(length), rank, size), batch_size=2) for length in (5, 1)
        ]
    else:
        data = [DataLoader(Numbers(length), batch_size=2) for length in (5, 1)]
    if loaders == "one":
        data = data[:1]
    elif loaders == "first short":
        data = data[::-1]
    trainer.fit(module, train, data)
    return module.indices, numbers_of(module, trainer), module.gathered


@pytest.mark.parametrize(
    ("plan", "loaders"),
    [
        (None, "several"),
        (None, "stream"),
        ("zero2", "first short"),
        ("zero3", "one"),
        ("zero3", "several"),
        ("zero3", "stream"),
    ],
)
def test_validation_within_a_fit_is_exact(plan: Any, loaders: str) -> None:
    expected = validated(0, 1, None, loaders)
    results = on_ranks(validated, 2, plan, loaders)
    for _, found, gathered in results:
        assert_equal_metrics(found, expected[1])
        assert gathered == [len(indices) for indices, _, _ in results]


def predicted(rank: int, size: int, length: int) -> Any:
    torch.manual_seed(0)
    trainer = make_trainer(strategy_of(None) if size > 1 else "auto", devices=size)
    found: Any = trainer.predict(Judged(), DataLoader(Numbers(length), batch_size=2))
    return [row for batch in found or [] for row in batch.flatten().tolist()]


@pytest.mark.parametrize("length", [1, 5])
def test_predictions_come_in_order(length: int) -> None:
    expected = predicted(0, 1, length)
    results = on_ranks(predicted, 2, length)
    assert results[0] == pytest.approx(expected[::2])
    assert results[1] == pytest.approx(expected[1::2])


def tried(rank: int, make: Any, length: int, pads: bool = True) -> Any:
    torch.manual_seed(0)
    size = dist.get_world_size() if dist.is_initialized() else 1
    module, callback = make()
    strategy = AutoParallelStrategy(pad_evaluation=pads) if size > 1 else "auto"
    callbacks = [] if callback is None else [callback]
    trainer = make_trainer(strategy, devices=size, callbacks=callbacks)
    trainer.test(module, DataLoader(Numbers(length), batch_size=2), verbose=False)
    return module.indices, numbers_of(module, trainer)


def plain() -> Any:
    return Plain(), None


def test_fewer_samples_than_ranks_are_repeated() -> None:
    assert [found for found, _ in on_ranks(tried, plain, 1)] == [[0], [0]]


def by_helper() -> Any:
    def helper(values: Tensor) -> None:
        dist.barrier()

    class ByHelper(Plain):
        def on_test_batch_end(self, outputs: Any, batch: Any, *args: Any) -> None:
            helper(batch)

    return ByHelper(), None


def by_inner_metric() -> Any:
    """Waits for ranks with fewer entries, if each sample counts once."""

    class Scores:
        def __init__(self) -> None:
            self.inner = {"entries": [Entries()]}

    class ByInnerMetric(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scores = Scores()

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self._evaluate(batch)
            self.scores.inner["entries"][0].update(batch)

        def on_test_epoch_end(self) -> None:
            self.log("entries", self.scores.inner["entries"][0].compute())

    return ByInnerMetric(), None


@pytest.mark.parametrize("make", [by_helper, by_inner_metric])
def test_by_default_code_that_talks_to_ranks_gets_the_samples_of_ddp(make: Any) -> None:
    # 4 and 3 samples, in 2 batches
    first, second = (indices for indices, _ in on_ranks(tried, make, 7))
    assert len(first) == len(second) == 4


class CountsBatches(Plain):
    """Calls all ranks in its last batch, in a group that it made, and needs a sample."""

    def setup(self, stage: str) -> None:
        self.batches, self.rows = 0, []

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.rows.append(self.blocks(batch))
        self.batches += 1
        self.mean.update(self.rows[-1])
        if self.batches == self.trainer.num_test_batches[0]:
            self.log("mean", self.mean.compute())

    def on_test_epoch_end(self) -> None:
        self.log("all", torch.cat(self.rows).mean(), sync_dist=True)


class WholeBatches(BatchSampler):
    """Leaves a smaller last batch out, which nobody sees from outside."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if len(batch) == self.batch_size)

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size  # type: ignore[arg-type]


def counted(rank: int, kind: str) -> int:
    torch.manual_seed(0)
    limit = {"limit_test_batches": 0.5} if kind == "fraction" else {}
    trainer = make_trainer(AutoParallelStrategy(), devices=2, **limit)
    data = Numbers(9 if kind in ("drop_last", "own batches") else 5)
    if kind == "own batches":
        batches = WholeBatches(SequentialSampler(data), batch_size=5, drop_last=False)
        loader: Any = DataLoader(data, batch_sampler=batches)
    elif kind == "drop_last":
        loader = DataLoader(data, batch_size=5, drop_last=True)
    else:
        loader = DataLoader(data, batch_size=1 if kind == "single" else 2)
    module = CountsBatches()
    trainer.test(module, loader, verbose=False)
    return module.batches


@pytest.mark.parametrize(
    ("kind", "batches"),
    [("single", 3), ("several", 2), ("fraction", 1), ("drop_last", 1), ("own batches", 1)],
)
def test_by_default_ranks_have_equally_many_batches(kind: str, batches: int) -> None:
    assert on_ranks(counted, kind) == [batches] * 2


def on_own_parts(rank: int, uneven: str | None) -> dict[str, float]:
    torch.manual_seed(0)
    module, data = Plain(), Numbers(5)
    strategy = AutoParallelStrategy(uneven=uneven, pad_evaluation=False)
    trainer = make_trainer(strategy, devices=2, use_distributed_sampler=False)
    trainer.test(module, DataLoader(Subset(data, range(rank, 5, 2)), batch_size=3), verbose=False)
    return numbers_of(module, trainer)


@pytest.mark.parametrize("uneven", ["join", None])
def test_means_over_batches_of_other_sizes_are_those_over_samples(uneven: str | None) -> None:
    """Ranks have 3 and 2 samples of their own; Lightning takes 2 for the mean of these."""
    expected = tried(0, plain, 5)[1]
    for found in on_ranks(on_own_parts, uneven):
        assert_equal_metrics(found, expected)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_samplers_share_every_sample_out_once(length: int, shuffle: bool) -> None:
    data = Numbers(length)
    samplers = [ExactSampler(data, num_replicas=3, rank=rank, shuffle=shuffle) for rank in range(3)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        assert sorted(index for part in parts for index in part) == list(range(length))


def test_what_another_sampler_yields_is_shared_out() -> None:
    chosen = [
        WeightedRandomSampler([1.0] * 7, 5, generator=torch.Generator().manual_seed(1))
        for _ in range(3)
    ]
    whole = list(chosen[2])
    parts = [
        list(ExactSamplerOf(chosen[rank], num_replicas=2, rank=rank, shuffle=False))
        for rank in range(2)
    ]
    assert parts == [whole[::2], whole[1::2]]


class Gathers(Judged):
    """Gathers what was computed: of each step, or at the end."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.found: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        rows = self.blocks(batch)
        self.outputs.append(rows)
        if self.when == "step":
            self.found.append(self.all_gather(rows))

    def on_test_epoch_end(self) -> None:
        if self.when == "end":
            self.found.append(self.all_gather(torch.cat(self.outputs)))
        elif self.when == "other shapes":
            self.all_gather(torch.zeros(2 + self.trainer.global_rank))


def gathered(rank: int, when: str, length: int, pads: bool) -> Any:
    torch.manual_seed(0)
    size = dist.get_world_size()
    trainer = make_trainer(AutoParallelStrategy(plan="ddp", pad_evaluation=pads), devices=size)
    module = Gathers(when)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.test(module, DataLoader(Numbers(length), batch_size=2), verbose=False)
        except ValueError as error:
            return str(error)
    return module.found, any("is smaller" in str(each.message) for each in said)


@pytest.mark.parametrize(("length", "size"), [(7, 2), (8, 3), (9, 3)])
def test_gathers_at_the_end_are_those_of_ddp(length: int, size: int) -> None:
    """Rows of a rank with a sample less are filled up by those that ddp's sampler repeats."""
    expected = on_ranks(gathered, "end", length, True, world_size=size)
    found = on_ranks(gathered, "end", length, False, world_size=size)
    for (own, warned), (other, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)
        assert not warned or length % size
    # on rank 0
    assert found[0][1] == bool(length % size)


def test_gathers_of_each_step_are_among_those_that_have_a_batch() -> None:
    # 5 and 4 samples
    for found, _ in on_ranks(gathered, "step", 9, False):
        assert [len(each) for each in found][:2] == [2, 2]
    first, second = (found for found, _ in on_ranks(gathered, "step", 9, False))
    assert [list(each.shape) for each in first] == [[2, 2, 1], [2, 2, 1], [1, 1, 1]]
    assert len(second) == 2


def test_gathers_of_other_shapes_are_refused() -> None:
    for message in on_ranks(gathered, "other shapes", 7, False):
        assert "rank 0 [2], rank 1 [3]" in message and "pad_evaluation=True" in message


class Talks(Judged):
    """Calls all ranks in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        strategy.barrier()
        dist.barrier()
        self.heard.append(strategy.broadcast(batch_idx, 0))
        try:
            dist.all_reduce(torch.ones(1))
        except ValueError as error:
            self.heard.append(str(error))

    def on_test_epoch_end(self) -> None:
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, len(self.heard))
        self.heard.append(rows)


def talked(rank: int) -> list[Any]:
    module = Talks()
    trainer = make_trainer(strategy_of("ddp"), devices=2)
    trainer.test(module, DataLoader(Numbers(3), batch_size=1), verbose=False)
    return module.heard


def test_calls_to_all_ranks_end_where_some_have_no_batch() -> None:
    first, second = on_ranks(talked)
    message = first.pop(2)
    assert "torch.distributed.all_reduce" in message and "only ranks 0" in message
    assert first == [0, 1, [3, 1]] and second == [0, [3, 1]]


class Entries(Metric):
    """Keeps an entry for each sample, as metrics of detection do: tensors, and tuples as masks."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, batch: Tensor) -> None:
        self.rows += [row[: 1 + int(row[3]) % 2] for row in batch]

    def compute(self) -> Tensor:
        weights = torch.arange(1.0, 1 + len(self.rows))
        return torch.stack([row.sum() for row in self.rows]).mul(weights).sum()


class Detects(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.entries = Entries()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.entries.update(batch)
        self.log("entries", self.entries)

    def on_test_epoch_end(self) -> None:
        pass


def detected(rank: int, size: int, length: int) -> float:
    trainer = make_trainer(strategy_of(None) if size > 1 else "auto", devices=size)
    trainer.test(Detects(), DataLoader(Numbers(length), batch_size=2), verbose=False)
    return float(trainer.callback_metrics["entries"])


@pytest.mark.parametrize("length", [1, 5])
def test_metrics_with_an_entry_for_each_sample_have_them_in_order(length: int) -> None:
    assert on_ranks(detected, 2, length) == pytest.approx([detected(0, 1, length)] * 2)


class Ranked(Judged):
    """Logs a metric that keeps whole numbers and rows in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = MulticlassAUROC(3, thresholds=None)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        scores = self.blocks(batch) * torch.arange(3.0)
        self.classes.update(scores.softmax(-1), batch[:, 3].long() % 3)
        self.log("classes", self.classes)

    def on_test_epoch_end(self) -> None:
        pass


def ranked(rank: int, size: int, batch_size: int) -> float:
    torch.manual_seed(0)
    trainer = make_trainer(strategy_of(None) if size > 1 else "auto", devices=size)
    # All samples on rank 0.
    data: Any = DataLoader(Numbers(6 if rank == 0 else 0), batch_size=batch_size)
    if size > 1:
        trainer._accelerator_connector.use_distributed_sampler = False
    trainer.test(Ranked(), data, verbose=False)
    return float(trainer.callback_metrics["classes"])


@pytest.mark.parametrize("batch_size", [2, 6])
def test_metrics_with_lists_may_be_empty_on_a_rank(batch_size: int) -> None:
    expected = ranked(0, 1, batch_size)
    assert on_ranks(ranked, 2, batch_size) == pytest.approx([expected] * 2)


def limited(rank: int) -> list[int]:
    module = Judged()
    trainer = make_trainer(strategy_of(None), devices=2, limit_test_batches=0.5)
    trainer.test(module, DataLoader(Numbers(5), batch_size=2), verbose=False)
    return module.indices


def test_a_fraction_may_leave_a_rank_without_a_batch() -> None:
    assert on_ranks(limited) == [[0, 2], []]
