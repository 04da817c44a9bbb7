"""A tuned DataModule trains as the plain one, with what was chosen, on every rank."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler

from lightning_topt.data.loader_tuning import LoaderChoice
from lightning_topt.plugins import tuned_data
from lightning_topt.plugins.cached_data import CachedDataModule
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
from lightning_topt.plugins.tuned_data import TunedDataModule
from tests.plugins.test_cached_data import Endless, Module, Plain, fit
from tests.plugins.trainer_ranks import on_new_ranks


class MadeUp:
    """In place of `tune_loader`: chooses what it was told, or what is given, and keeps what it was
    asked.
    """

    def __init__(self, *choices, error=None):
        self.choices, self.error, self.asked = (
            choices or (LoaderChoice(2, 3, "as told"),),
            error,
            [],
        )

    def __call__(self, loader, **options):
        self.asked.append(options)
        torch.rand(
            1
            # what a measurement would do to the random states is the measurement's business, but
            # here it counts
        )
        if self.error is not None:
            raise self.error
        return self.choices[(len(self.asked) - 1) % len(self.choices)]


@pytest.fixture
def made_up(monkeypatch):
    def use(*choices, error=None):
        made = MadeUp(*choices, error=error)
        monkeypatch.setattr(tuned_data, "tune_loader", made)
        return made

    return use


def start(worker):
    random.seed(worker)


LOADERS = {
    "shuffled": lambda data: DataLoader(data, 4, shuffle=True),
    "workers": lambda data: DataLoader(
        data, 4, True, num_workers=1, persistent_workers=True, worker_init_fn=start
    ),
    "positional": lambda data: DataLoader(data, 4, True, None, None, 1, None, False, True, 60.0),
    "generator": lambda data: DataLoader(
        data, 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "sampler": lambda data: DataLoader(
        data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5))
    ),
    "start method": lambda data: DataLoader(
        data, 4, num_workers=1, multiprocessing_context="fork", timeout=60
    ),
    "no batches": lambda data: DataLoader(data, batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_losses_and_arguments_are_kept(monkeypatch, kind, workers):
    choice = LoaderChoice(workers, 3 if workers else None, "as told")
    monkeypatch.setattr(tuned_data, "tune_loader", lambda loader, **_: choice)
    module = TunedDataModule(Module(LOADERS[kind]))
    losses, trainer = fit(module, epochs=2)
    wanted, plain_trainer = fit(Module(LOADERS[kind]), epochs=2)
    # Later epochs' order is another with torch itself: it draws from these generators when workers
    # look for an end.
    same = 1 if (kind, workers) in (("workers", 0), ("generator", 2), ("sampler", 2)) else 2
    assert losses[: same * len(losses) // 2] == wanted[: same * len(wanted) // 2]
    loader, plain = trainer.train_dataloader, plain_trainer.train_dataloader
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (
        workers,
        3 if workers else None,
        False,
    )
    for name in ("batch_size", "drop_last", "worker_init_fn", "collate_fn"):
        assert getattr(loader, name) == getattr(plain, name)
    assert type(loader.sampler) is type(plain.sampler)
    assert (
        loader.generator is None
        or loader.generator.initial_seed() == plain.generator.initial_seed()
    )
    assert loader.persistent_workers == (plain.persistent_workers and workers > 0)
    assert loader.timeout == (plain.timeout if workers else 0)
    context = plain.multiprocessing_context if workers else None
    assert loader.multiprocessing_context is context or loader.multiprocessing_context == context


def test_the_choice_is_made_and_said_once(made_up, monkeypatch):
    made, said = made_up(), []
    monkeypatch.setattr(tuned_data, "rank_zero_info", said.append)
    module = TunedDataModule(Module())
    for _ in range(2):
        fit(module, epochs=2, reload_dataloaders_every_n_epochs=1)
    assert len(made.asked) == len(said) == 1 and "as told" in said[0]
    assert module.choices == {"train": LoaderChoice(2, 3, "as told", pin_memory=False)}


def test_the_measurement_is_asked_for_what_is_auto(made_up, monkeypatch):
    made = made_up()
    monkeypatch.setattr(tuned_data, "cores_per_rank", lambda sharers: 12 // sharers)
    monkeypatch.setattr(tuned_data, "memory_for_waiting", lambda sharers: 900 / sharers)

    def asked(**options):
        module = TunedDataModule(
            Module(lambda data: DataLoader(data, num_workers=1, prefetch_factor=4)), **options
        )
        module.train_dataloader()
        return made.asked[-1]

    auto = {
        "num_workers": "auto",
        "prefetch_factor": "auto",
        "cores": 12,
        "memory_bytes": 900,
        "seconds": 5.0,
    }
    assert asked() == auto
    assert asked(seconds=2.0, memory_bytes=100) == auto | {"seconds": 2.0, "memory_bytes": 100}
    assert asked(num_workers=3, prefetch_factor=6) == auto | {
        "num_workers": 3,
        "prefetch_factor": 6,
    }
    assert asked(num_workers=None, prefetch_factor=None) == auto | {
        "num_workers": 1,
        "prefetch_factor": 4,
    }
    assert asked(num_workers=0, prefetch_factor=None) == auto | {
        "num_workers": 0,
        "prefetch_factor": None,
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: [a, b],
        lambda a, b: {"x": a, "y": b},
        lambda a, b: CombinedLoader([a, b], "min_size"),
    ],
    ids=["list", "dict", "combined"],
)
def test_several_loaders_share_the_cores(made_up, monkeypatch, make):
    made = made_up(LoaderChoice(1, 2, "first"), LoaderChoice(0, None, "second"))
    monkeypatch.setattr(tuned_data, "cores_per_rank", lambda sharers: 12 // sharers)

    def loaders(data):
        return make(DataLoader(data, 4, shuffle=True), DataLoader(Plain(start=7), 4))

    module = TunedDataModule(Module(loaders), memory_bytes=100)
    losses, _ = fit(module, epochs=1)
    assert losses == fit(Module(loaders), epochs=1)[0]
    assert [(options["cores"], options["memory_bytes"]) for options in made.asked] == [
        (6, 50),
        (6, 50),
    ]
    assert [choice.reason for choice in module.choices.values()] == ["first", "second"]


def test_what_the_user_set_afterwards_is_not_repeated_by_lightning(made_up):
    def make(data):
        loader = DataLoader(data, 4, shuffle=True)
        loader.num_workers, loader.worker_init_fn = 1, start
        return loader

    made_up(LoaderChoice(0, None, "as told"))
    # which makes the loader anew
    _, trainer = fit(TunedDataModule(Module(make)), epochs=1, overfit_batches=2)
    assert (
        trainer.train_dataloader.num_workers == 0
        and trainer.train_dataloader.worker_init_fn is start
    )


def test_loaders_but_those_of_training_stay(made_up):
    made_up()

    class WithValidation(Module):
        def val_dataloader(self):
            return DataLoader(self.dataset, 4)

    _, trainer = fit(TunedDataModule(WithValidation()), epochs=1)
    assert (trainer.train_dataloader.num_workers, trainer.val_dataloaders.num_workers) == (2, 0)


@pytest.mark.parametrize(
    ("device", "wish", "pins"),
    [
        ("cpu", "auto", False),
        ("cuda", "auto", True),
        ("cuda", False, False),
        ("cpu", True, True),
        ("cuda", None, None),
    ],
)
def test_pinning_is_for_gpus(device, wish, pins):
    module = TunedDataModule(Module(), pin_memory=wish)
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    assert module._pins() is pins
    loader = DataLoader(Plain(), pin_memory=True)
    tuned_data.apply_choice(loader, replace(LoaderChoice(1, None, ""), pin_memory=pins))
    assert loader.pin_memory is (True if pins is None else pins) and loader.prefetch_factor == 2


def test_a_real_measurement_changes_no_loss_and_no_random_state():
    module = TunedDataModule(Module(), seconds=0.3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    module.train_dataloader()
    after = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert after == (random.random(), np.random.rand(), torch.rand(1).item())
    choice = module.choices["train"]
    assert choice.num_workers >= 0 and choice.trial_size >= 1 and module.dataset.calls == 0
    assert fit(module)[0] == fit(Module())[0]


def test_around_and_inside_a_cache(tmp_path):
    def cached(module, name):
        return CachedDataModule(module, directory=tmp_path / name, memory_bytes=1 << 20)

    plain = fit(Module())[0]
    around = TunedDataModule(cached(Module(), "around"), seconds=0.2)
    assert fit(around)[0] == plain and list(around.choices) == ["train"]
    inside = cached(TunedDataModule(Module(), seconds=0.2), "inside")
    assert fit(inside)[0] == plain and list(inside.choices) == ["train"]
    for module in (around, inside):
        (statistics,) = module.statistics().values()
        assert statistics.memory_hits > 0 and statistics.memory_items == 24
        module.close()


def _fit_two_ranks(rank, with_error):
    own = LoaderChoice(rank + 1, rank + 2, f"of rank {rank}")
    made = MadeUp(own, error=OSError("no such file") if with_error else None)
    tuned_data.tune_loader = made  # this process is the test's own
    # ranks of a user may have workers
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    module = TunedDataModule(Module())
    try:
        losses, trainer = fit(module, epochs=2, devices=2, strategy="ddp")
    except Exception as error:
        return type(error).__name__, str(error), len(made.asked)
    loader = trainer.train_dataloader
    return (
        losses,
        (loader.num_workers, loader.prefetch_factor, type(loader.sampler).__name__),
        made.asked,
    )


def _fit_plain(rank):
    return fit(Module(), epochs=2, devices=2, strategy="ddp")[0]


def test_ranks_do_as_rank_0_chooses():
    results, wanted = on_new_ranks(_fit_two_ranks, False), on_new_ranks(_fit_plain)
    for (losses, loader, _), plain in zip(results, wanted, strict=True):
        assert losses == plain and loader == (1, 2, "DistributedSampler")
    assert [len(asked) for _, _, asked in results] == [1, 0]
    assert results[0][2][0]["cores"] == tuned_data.cores_per_rank(2)


def test_an_error_of_rank_0_is_one_of_all():
    first, second = on_new_ranks(_fit_two_ranks, True)
    assert first == ("OSError", "no such file", 1)
    assert second[0] == "RuntimeError" and "no such file" in second[1] and second[2] == 0


class OwnLoader(DataLoader):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: DataLoader(Endless()), "IterableDataset"),
        (OwnLoader, "OwnLoader is a subclass"),
        (lambda _: range(3), "range as loader"),
    ],
)
def test_loaders_that_cannot_be_changed_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        fit(TunedDataModule(Module(make), num_workers=1))


def test_coordinated_loaders_are_refused_outside_and_taken_inside(made_up, tmp_path):
    options = {"directory": tmp_path, "memory_bytes": 1 << 20}
    made_up(LoaderChoice(1, 2, "as told"))
    with pytest.raises(ValueError, match="CoordinatedLoader"):
        fit(TunedDataModule(CoordinatedDataModule(Module(), **options)))
    assert len(fit(CoordinatedDataModule(TunedDataModule(Module()), **options), epochs=1)[0]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": "many"}, "num_workers"),
        ({"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor"),
        ({"pin_memory": "yes"}, "pin_memory"),
    ],
)
def test_values_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TunedDataModule(Module(), **options)
