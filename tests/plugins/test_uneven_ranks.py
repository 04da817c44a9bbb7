"""Ranks with different numbers of batches, compared with one process over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_topt import AutoParallelStrategy, LocalSteps, LocalStepsStrategy
from lightning_topt.plugins.planning import RemotePlanningError
from tests.models import GPT
from tests.plugins.trainer_ranks import compressed, make_trainer, on_ranks

COUNTS = (5, 2)


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Some tokens that no other batch has."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    tokens = torch.randint(0, 32, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Batches:
    """The batches of one rank, with a length."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch_of(self.rank, index) for index in range(self.count))


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, rank: int, count: int) -> None:
        self.batches = Batches(rank, count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(kind: str, rank: int, count: int) -> Any:
    if kind == "stream":
        return DataLoader(Stream(rank, count), batch_size=None)
    return Batches(rank, count)


class Seen(GPT):
    """Notes what its hooks see; has a buffer, as BatchNorm has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(layers=2, **options)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[tuple[str, int]] = []
        self.rates: list[float] = []
        self.hooked = 0
        self.register_forward_pre_hook(lambda *_: setattr(self, "hooked", self.hooked + 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(("step", batch_idx))
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=3)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.rates.append(scheduler.get_last_lr()[0])
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def one_process(
    counts: Sequence[int], *, accumulate: int = 1, epochs: int = 1, clip: float | None = None
) -> dict[str, Tensor]:
    """Train on the mean of the batches that exist in each step."""
    torch.manual_seed(0)
    module = GPT(layers=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    for _ in range(epochs):
        for index in range(max(counts)):
            if index % accumulate == 0:
                optimizer.zero_grad()
            losses = [
                module.training_step(batch_of(rank, index), index)
                for rank, count in enumerate(counts)
                if index < count
            ]
            (torch.stack(losses).mean() / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == max(counts):
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                scheduler.step()
    return parameters(module)


def strategy_of(plan: Any, **options: Any) -> Any:
    if plan == "compressed":
        return compressed(method="bf16", **options)
    return AutoParallelStrategy(plan=plan, **options)


def fit(
    rank: int,
    plan: Any,
    counts: Sequence[int],
    kind: str = "length",
    uneven: str = "join",
    options: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    strategy = strategy_of(plan, uneven=uneven, **(ddp or {}))
    trainer = make_trainer(strategy, devices=len(counts), **(options or {}))
    module = Seen()
    trainer.fit(module, loader_of(kind, rank, counts[rank]))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return parameters(module), trainer.global_step, module.seen, module.rates, logged, module.hooked


def assert_as(expected: dict[str, Tensor], results: Sequence[tuple[Any, ...]]) -> None:
    for result in results:
        for name, value in expected.items():
            torch.testing.assert_close(result[0][name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (None, "length"),
        ("ddp", "stream"),
        ("zero1", "length"),
        ("zero2", "stream"),
        ("zero3", "stream"),
        ("zero3+recompute", "length"),
    ],
)
def test_the_gradients_are_the_mean_over_the_batches_that_exist(plan: Any, kind: str) -> None:
    results = on_ranks(fit, plan, COUNTS, kind, "join", {"max_epochs": 2})
    assert_as(one_process(COUNTS, epochs=2), results)
    for rank, (_, steps, seen, rates, logged, hooked) in enumerate(results):
        assert steps == 2 * max(COUNTS) == len(rates)
        # User code has seen its own batches alone.
        names = ("start", "step", "end")
        assert seen == 2 * [(name, index) for index in range(COUNTS[rank]) for name in names]
        assert hooked == 2 * 2 * COUNTS[rank]  # for the step, and in it
        assert rates == results[0][3]
        assert logged["loss_epoch"] == pytest.approx(results[0][4]["loss_epoch"])


@pytest.mark.parametrize(("kind", "counts"), [("length", (0, 3)), ("stream", (3, 0))])
def test_a_rank_may_have_no_batch_at_all(kind: str, counts: tuple[int, ...]) -> None:
    results = on_ranks(fit, "ddp", counts, kind)
    assert_as(one_process(counts), results)
    assert [result[1] for result in results] == [3, 3]
    epoch = [result[4]["loss_epoch"] for result in results]
    assert epoch[0] == pytest.approx(epoch[1])


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_windows_of_accumulation_end_with_the_longest_rank(plan: str) -> None:
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, "gradient_clip_val": 0.1}
    results = on_ranks(fit, plan, (5, 3), "length", "join", options)
    assert_as(one_process((5, 3), accumulate=2, epochs=2, clip=0.1), results)
    assert [result[1] for result in results] == [6, 6]


def test_three_ranks_end_one_after_the_other() -> None:
    counts = (2, 4, 3)
    results = on_ranks(fit, "zero3", counts, world_size=3)
    assert_as(one_process(counts), results)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_options_of_ddp_hold(options: dict[str, Any]) -> None:
    results = on_ranks(fit, None, COUNTS, "length", "join", {"max_epochs": 2}, options)
    assert_as(one_process(COUNTS, epochs=2), results)


def test_compressed_gradients_are_joined() -> None:
    results = on_ranks(fit, "compressed", COUNTS, "length", "join", {"max_epochs": 2})
    for name, value in one_process(COUNTS, epochs=2).items():
        # In 16 bits.
        torch.testing.assert_close(results[0][0][name], value, rtol=2e-2, atol=2e-3)
        assert torch.equal(results[0][0][name], results[1][0][name])


@pytest.mark.parametrize(("plan", "kind"), [("ddp", "stream"), ("compressed", "length")])
def test_all_may_stop_with_the_first(plan: str, kind: str) -> None:
    results = on_ranks(fit, plan, COUNTS, kind, "stop", {"max_epochs": 2})
    if plan == "ddp":
        assert_as(one_process((2, 2), epochs=2), results)
    assert [result[1] for result in results] == [4, 4]


def error_of(rank: int, *args: Any) -> str:
    try:
        fit(rank, *args)
    except (ValueError, RemotePlanningError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("length", "rank 0 has 5, rank 1 has 2; uneven='join'"),
        ("stream", "of ranks 1 ended after 2 batches, and those of ranks 0 did not; uneven='join'"),
    ],
)
def test_an_error_names_ranks_and_counts(kind: str, words: str) -> None:
    for message in on_ranks(error_of, "ddp", COUNTS, kind, "error"):
        assert words in message


def test_a_plan_in_shards_needs_a_first_batch_of_each_rank() -> None:
    for message in on_ranks(error_of, "zero3", (0, 2)):
        assert "the training data are empty" in message


class Manual(Seen):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(GPT.training_step(self, batch, batch_idx))
        optimizer.step()


def fit_by_hand(rank: int) -> str:
    trainer = make_trainer(AutoParallelStrategy(uneven="join"), devices=2)
    try:
        trainer.fit(Manual(), Batches(rank, COUNTS[rank]))
    except ValueError as error:
        return str(error)
    return "no error"


def test_manual_optimization_says_what_to_use() -> None:
    for message in on_ranks(fit_by_hand):
        assert "manual optimization" in message and "take uneven='stop'" in message


@pytest.mark.parametrize("uneven", ["never", True])
def test_wrong_words_are_refused(uneven: Any) -> None:
    with pytest.raises(ValueError, match="uneven is one of join, stop, error"):
        AutoParallelStrategy(uneven=uneven)


STRATEGIES = {"auto": AutoParallelStrategy, "compressed": compressed, "local": LocalStepsStrategy}
AS_LIGHTNING: dict[str, Any] = {"uneven": None, "pad_evaluation": True}


def steps_by_default(rank: int, name: str, kind: str) -> int:
    trainer = make_trainer(STRATEGIES[name](), devices=2)
    trainer.fit(Seen(), loader_of(kind, rank, COUNTS[rank]))
    return trainer.global_step


@pytest.mark.parametrize(
    ("name", "kind"), [("auto", "stream"), ("compressed", "length"), ("local", "length")]
)
def test_ranks_join_by_default(name: str, kind: str) -> None:
    assert on_ranks(steps_by_default, name, kind) == [max(COUNTS)] * 2


class Draws:
    """Batches drawn from the random numbers that dropout draws from, too.

    Says that it has `length` batches, has `count`, and forgets to end where `count` is None.
    """

    def __init__(self, count: int | None, length: int | None) -> None:
        self.count, self.length = count, length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(1000 if self.count is None else self.count):
            yield torch.randn(3, 4)


class SizedDraws(Draws):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class DrawnStream(Draws, IterableDataset[Tensor]):
    """The same as a stream."""


class SizedDrawnStream(SizedDraws, IterableDataset[Tensor]):
    """The same as a stream with a length."""


class Drops(L.LightningModule):
    """Draws in its steps; notes losses, and what it is told of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.noted: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.noted.append((batch_idx, loss.item(), self.trainer.is_last_batch))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.noted.append((batch_idx, rate, self.trainer.is_last_batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.noted.append(("validation", batch_idx, self.trainer.global_step))
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


EVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "length": (lambda: SizedDraws(5, 5), {}),
    "stream": (lambda: DataLoader(DrawnStream(5, None), batch_size=None), {}),
    "stream with a length": (lambda: DataLoader(SizedDrawnStream(5, 5), batch_size=None), {}),
    "stream with a limit": (
        lambda: DataLoader(DrawnStream(None, None), batch_size=None),
        {"limit_train_batches": 5},
    ),
    "ends before its length": (lambda: SizedDraws(3, 5), {}),
    "stream that ends before its length": (
        lambda: DataLoader(SizedDrawnStream(3, 5), batch_size=None),
        {},
    ),
    "endless": (lambda: DrawnStream(None, None), {"max_steps": 4}),
}


def fit_even(rank: int, kind: str, options: dict[str, Any], accumulate: int) -> Any:
    L.seed_everything(rank, verbose=False)
    data, trainer_options = EVEN[kind]
    trainer = make_trainer(
        AutoParallelStrategy(plan="ddp", **options),
        devices=2,
        accumulate_grad_batches=accumulate,
        **{"max_epochs": 2, **trainer_options},
    )
    module = Drops()
    trainer.fit(module, data(), SizedDraws(2, 2))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return parameters(module), module.noted, logged, trainer.global_step, torch.rand(1).item()


@pytest.mark.parametrize("kind", EVEN)
def test_equal_numbers_of_batches_are_trained_as_by_lightning(kind: str) -> None:
    """Bit by bit: no batch is read at another time, and no number drawn in another order."""
    accumulate = 1 + list(EVEN).index(kind) % 2
    expected = on_ranks(fit_even, kind, AS_LIGHTNING, accumulate)
    found = on_ranks(fit_even, kind, {}, accumulate)
    for own, other in zip(found, expected, strict=True):
        assert own[1:] == other[1:]
        for name, value in own[0].items():
            assert torch.equal(value, other[0][name]), name


def fit_what_cannot_join(rank: int, how: str, kind: str, counts: tuple[int, int]) -> Any:
    of_plan: dict[str, Any] = {"manual": {}, "pipeline": {"plan": "pipeline"}}[how]
    trainer = make_trainer(AutoParallelStrategy(**of_plan), devices=2)
    module = Manual() if how == "manual" else GPT(layers=2)
    data_rank = 0 if how == "pipeline" else rank  # ranks of a pipeline have the same batches
    try:
        trainer.fit(module, loader_of(kind, data_rank, counts[rank]))
    except ValueError as error:
        return str(error)
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


@pytest.mark.parametrize(("how", "kind"), [("manual", "stream"), ("pipeline", "length")])
def test_what_cannot_join_runs_where_ranks_have_equally_many(how: str, kind: str) -> None:
    assert on_ranks(fit_what_cannot_join, how, kind, (3, 3)) == [3, 3]


@pytest.mark.parametrize(("how", "kind"), [("manual", "stream"), ("pipeline", "length")])
def test_what_cannot_join_says_so_where_they_have_not(how: str, kind: str) -> None:
    for message in on_ranks(fit_what_cannot_join, how, kind, (4, 2)):
        assert "different numbers of training batches" in message
        assert "uneven='stop'" in message


# ---- what happens within an epoch ----------------------------------------------------------------


class Validated(Seen):
    """Validates within the epoch, and notes when."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", GPT.training_step(self, batch, batch_idx), sync_dist=True)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)


def fit_with_saves(rank: int, plan: str, folder: str, interval: Any) -> Any:
    torch.manual_seed(0)
    callback = L.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = make_trainer(
        AutoParallelStrategy(plan=plan, uneven="join"),
        devices=2,
        callbacks=[callback],
        enable_checkpointing=True,
        val_check_interval=interval,
    )
    module = Validated()
    trainer.fit(module, Batches(rank, (6, 3)[rank]), Batches(rank, 2))
    return module.validated


@pytest.mark.parametrize(("plan", "interval"), [("ddp", 0.5), ("zero3", 3)])
def test_ranks_validate_and_save_together(plan: str, interval: Any, tmp_path: Any) -> None:
    results = on_ranks(fit_with_saves, plan, str(tmp_path), interval)
    assert results == [[3, 6], [3, 6]]
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


class Stops(L.Callback):
    """Stops the fit in a step that only rank 0 has a batch for."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.should_stop = True


def fit_that_stops(rank: int) -> int:
    trainer = make_trainer(
        AutoParallelStrategy(plan="ddp", uneven="join"), devices=2, callbacks=[Stops()]
    )
    trainer.fit(Seen(), Batches(rank, COUNTS[rank]))
    return trainer.global_step


def test_all_ranks_stop_where_one_decides() -> None:
    assert on_ranks(fit_that_stops) == [3, 3]


class Two(GPT):
    """Trains on the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [super(Two, self).training_step(part, batch_idx) for part in batch if part]
        return torch.stack(parts).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_on_two(rank: int, mode: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    loaders = [Batches(rank, (4, 2)[rank]), Batches(2 + rank, (3, 3)[rank])]
    combined = L.pytorch.utilities.CombinedLoader(loaders, mode)
    trainer = make_trainer(AutoParallelStrategy(plan="ddp", uneven="join"), devices=2)
    module = Two()
    trainer.fit(module, combined)
    return parameters(module), trainer.global_step


@pytest.mark.parametrize(
    ("mode", "steps"), [("min_size", 3), ("max_size", 4), ("max_size_cycle", 4)]
)
def test_several_loaders(mode: str, steps: int) -> None:
    first, second = on_ranks(fit_on_two, mode)
    assert first[1] == second[1] == steps
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name]), name


class Normed(L.LightningModule):
    """With statistics that ranks compute together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_norms(rank: int, synced: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    data = DataLoader(torch.randn(3 * (4, 2)[rank], 4), batch_size=3)
    module, trainer = (
        Normed(),
        make_trainer(
            AutoParallelStrategy(uneven="join"),
            devices=2,
            use_distributed_sampler=False,
            sync_batchnorm=synced,
        ),
    )
    trainer.fit(module, data)
    return parameters(module)


def test_buffers_are_those_of_the_first_rank() -> None:
    first, second = on_ranks(fit_norms, False)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def fit_local_steps(rank: int, counts: tuple[int, int]) -> Any:
    torch.manual_seed(0)
    method = LocalSteps(every=2, outer_learning_rate=1.0, outer_momentum=0.0)
    strategy = LocalStepsStrategy(method, uneven="join")
    trainer = make_trainer(strategy, devices=2)
    module = Two()
    trainer.fit(module, [Batches(rank, counts[rank])])
    return parameters(module), trainer.global_step


def test_local_steps_are_made_where_there_is_a_batch() -> None:
    """Two steps each, then two of rank 0 alone; ranks are averaged after each pair."""
    torch.manual_seed(0)
    start = GPT(layers=2).state_dict()

    def steps(state: dict[str, Tensor], rank: int, indices: Sequence[int]) -> dict[str, Tensor]:
        module = GPT(layers=2)
        module.load_state_dict(state)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for index in indices:
            optimizer.zero_grad()
            module.training_step(batch_of(rank, index), index).backward()
            optimizer.step()
        return module.state_dict()

    first, second = steps(start, 0, (0, 1)), steps(start, 1, (0, 1))
    middle = {name: (value + second[name]) / 2 for name, value in first.items()}
    alone = steps(middle, 0, (2, 3))
    expected = {name: (value + alone[name]) / 2 for name, value in middle.items()}
    results = on_ranks(fit_local_steps, (4, 2))
    assert_as(expected, results)
    assert [result[1] for result in results] == [4, 4]


def fit_local_window(rank: int) -> Any:
    torch.manual_seed(0)
    method = LocalSteps(every=1, outer_learning_rate=1.0, outer_momentum=0.0)
    strategy = LocalStepsStrategy(method, uneven="join")
    trainer = make_trainer(strategy, devices=2, accumulate_grad_batches=2)
    module, steps = Two(), []
    own = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = own()
        optimizer.register_step_post_hook(lambda *_: steps.append(trainer.global_step))
        return optimizer

    module.configure_optimizers = configure_optimizers
    trainer.fit(module, [Batches(rank, (6, 3)[rank])])
    return len(steps), trainer.global_step


def test_a_window_with_any_batch_ends_with_a_local_step() -> None:
    assert on_ranks(fit_local_window) == [(3, 3), (2, 3)]


# ---- lengths -------------------------------------------------------------------------------------


class Longer(Stream):
    """Says that it has more than it has."""

    def __len__(self) -> int:
        return self.batches.count + 2


def fit_loaders(rank: int, kinds: Sequence[str], counts: Sequence[int], options: Any) -> Any:
    torch.manual_seed(0)
    trainer = make_trainer(AutoParallelStrategy(plan="ddp", uneven="join"), devices=2, **options)
    module = Seen()
    if kinds[rank] == "longer":
        loader: Any = DataLoader(Longer(rank, counts[rank]), batch_size=None)
    else:
        loader = loader_of(kinds[rank], rank, counts[rank])
    try:
        trainer.fit(module, loader)
    except ValueError as error:
        return str(error)
    return parameters(module), trainer.global_step


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("stream", "stream"), {"limit_train_batches": 10}),
        (("longer", "longer"), {}),
        (("stream", "length"), {}),
        (("length", "stream"), {}),
        (("stream", "stream"), {"limit_train_batches": 10, "max_steps": 2}),
    ],
)
def test_a_limit_or_a_wrong_length_is_none(kinds: Any, options: Any) -> None:
    counts = (4, 2)
    results = on_ranks(fit_loaders, kinds, counts, {**options, "max_epochs": 2})
    steps = options.get("max_steps", 2 * max(counts))
    assert [result[1] for result in results] == [steps, steps]
    if "max_steps" not in options:
        assert_as(one_process(counts, epochs=2), results)


def test_a_fraction_may_leave_a_rank_without_a_batch() -> None:
    results = on_ranks(fit_loaders, ("length", "length"), (4, 1), {"limit_train_batches": 0.5})
    assert_as(one_process((2, 0)), results)


@pytest.mark.parametrize(
    ("kinds", "counts", "words"),
    [
        (("length", "length"), (1, 1), "less than one batch on every rank"),
        (("length", "stream"), (4, 4), "loader 0 has no length on ranks 1"),
    ],
)
def test_fractions_that_cannot_be_are_refused_on_all_ranks(
    kinds: Any, counts: Any, words: str
) -> None:
    for message in on_ranks(fit_loaders, kinds, counts, {"limit_train_batches": 0.5}):
        assert words in message


# ---- what follows a logged value -----------------------------------------------------------------


class Follows(Seen):
    """Learns slower by the value of a step, and logs one more under its own name."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = GPT.training_step(self, batch, batch_idx)
        self.log("value", loss.detach() + batch_idx, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": rule, "interval": "step", "monitor": "value"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)


def fit_followed(rank: int, counts: Sequence[int], folder: str) -> Any:
    torch.manual_seed(0)
    saves = L.pytorch.callbacks.ModelCheckpoint(
        folder, monitor="value", save_top_k=2, every_n_train_steps=1, filename="{step}"
    )
    ends = L.pytorch.callbacks.EarlyStopping("value", patience=5, check_on_train_epoch_end=True)
    averages = L.pytorch.callbacks.EMAWeightAveraging()
    trainer = make_trainer(
        AutoParallelStrategy(plan="ddp", uneven="join"),
        devices=2,
        callbacks=[saves, ends, averages],
        enable_checkpointing=True,
        max_epochs=2,
    )
    module = Follows()
    trainer.fit(module, Batches(rank, counts[rank]))
    kept = {name: float(value) for name, value in saves.best_k_models.items()}
    rate, value = trainer.optimizers[0].param_groups[0]["lr"], trainer.callback_metrics["value"]
    average = sum(float(each.double().sum()) for each in module.parameters())
    return kept, rate, float(value), int(averages._average_model.n_averaged), average


@pytest.mark.parametrize("counts", [(5, 2), (0, 3)])
def test_what_follows_a_value_does_so_on_all_ranks(counts: Any, tmp_path: Any) -> None:
    first, second = on_ranks(fit_followed, counts, str(tmp_path))
    assert first == second
    assert len(first[0]) == 2 and first[3] == 2 * max(counts)


class Decides(Seen):
    """Ends its epoch by a hook, or asks the ranks that have a batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.how == "skip" and batch_idx == 3 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        if self.how == "ask" and strategy.reduce_boolean_decision(batch_idx == 2):
            self.trainer.should_stop = True


def fit_decided(rank: int, how: str, kind: str) -> int:
    strategy = AutoParallelStrategy(plan="ddp", uneven="join")
    trainer = make_trainer(strategy, devices=2, max_epochs=2, min_epochs=0)
    trainer.fit(Decides(how), loader_of(kind, rank, COUNTS[rank]))
    return trainer.global_step


@pytest.mark.parametrize(("how", "steps", "kind"), [("skip", 6, "length"), ("ask", 3, "stream")])
def test_hooks_of_a_batch_decide_for_all(how: str, steps: int, kind: str) -> None:
    assert on_ranks(fit_decided, how, kind) == [steps, steps]


class Gathers(Seen):
    """Gathers what ranks have different numbers of."""

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.zeros(len(self.seen) + 1))


def fit_gathers(rank: int) -> str:
    trainer = make_trainer(AutoParallelStrategy(plan="ddp", uneven="join"), devices=2)
    try:
        trainer.fit(Gathers(), Batches(rank, COUNTS[rank]))
    except ValueError as error:
        return str(error)
    return "no error"


def test_gathers_of_different_shapes_are_refused() -> None:
    for message in on_ranks(fit_gathers):
        assert "different shapes" in message and "rank 0 [16], rank 1 [7]" in message
