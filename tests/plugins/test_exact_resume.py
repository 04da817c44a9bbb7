"""A fit that goes on from a checkpoint trains on what is left of the epoch, each sample once."""

from __future__ import annotations

import multiprocessing
import random
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy, LocalStepsStrategy
from tests.plugins.trainer_ranks import make_trainer, on_ranks

ITEMS = 48


class Numbers(Dataset):
    """Each sample is its index, and noise of Python, NumPy and torch where it `draws`."""

    def __init__(self, items=ITEMS, *, draws=True):
        self.items, self.draws = items, draws

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        noise = torch.zeros(3)
        if self.draws:
            noise = torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])
        return torch.tensor(float(index)), noise


class Model(pl.LightningModule):
    """Keeps the indices and the loss of each step; drops out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch[0], list) else [batch]
        self.seen.append(
            (self.current_epoch, batch_idx, [part[0].int().tolist() for part in parts if part])
        )
        index, noise = parts[0] if parts[0] is not None else parts[1]
        loss = self.net(torch.cat([index[:, None] / ITEMS, noise], 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if isinstance(self.trainer.strategy, LocalStepsStrategy):
            # without a state, which all ranks would get from rank 0
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class AsksEarly(Model):
    """Asks for the number of steps, for which Lightning builds the loaders before it resumes."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SaveAt(Callback):
    """Saves after some batches of the fit."""

    def __init__(self, path, *batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if len(module.seen) in self.batches:
            trainer.save_checkpoint(self.path / f"{len(module.seen)}.ckpt")


def fit(
    folder,
    *,
    save=(),
    resume=None,
    data=None,
    strategy=None,
    seed=1,
    early=False,
    model=None,
    val=None,
    callbacks=(),
    **options,
):
    """The steps of a fit on this rank, their losses, and its parameters."""
    multiprocessing.current_process()._config["daemon"] = False  # a rank may have workers
    pl.seed_everything(1, verbose=False)  # of samplers
    for reseed in (random.seed, np.random.seed, torch.manual_seed):
        reseed(seed)
    model = model or (AsksEarly() if early else Model())
    trainer = make_trainer(
        strategy or AutoParallelStrategy(plan="ddp"),
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        callbacks=[*callbacks, SaveAt(folder, *save)],
        **{"max_epochs": 2, **options},
    )
    loader = data() if callable(data) else DataLoader(Numbers(), **(data or {}))
    trainer.fit(model, loader, val, ckpt_path=resume and folder / resume, weights_only=True)
    return model.seen, model.losses, [p.detach().clone() for p in model.parameters()]


def indices(seen, part=0):
    return [index for _, _, parts in seen for index in parts[part]]


# ---- the same ranks ------------------------------------------------------------------------------

SAME = {
    "uneven": {"data": {"batch_size": 5, "shuffle": True}},
    "drop last": {"data": {"batch_size": 5, "shuffle": True, "drop_last": True}},
    "accumulated": {"data": {"batch_size": 4, "shuffle": True}, "accumulate_grad_batches": 2},
    "sharded": {"data": {"batch_size": 4, "shuffle": True}, "plan": "zero3", "form": "sharded"},
    "compressed": {"data": {"batch_size": 4, "shuffle": True}, "kind": CompressedDDPStrategy},
    "local steps": {"data": {"batch_size": 4, "shuffle": True}, "kind": LocalStepsStrategy},
}


def _strategy(options):
    kind = options.pop("kind", AutoParallelStrategy)
    if kind is CompressedDDPStrategy:
        return kind({"method": "topk", "density": 0.5})
    if kind is LocalStepsStrategy:
        return kind({"method": "local_steps", "every": 2})
    return kind(plan=options.pop("plan", "ddp"), checkpoint=options.pop("form", "full"))


def _fits_of_same_ranks(rank, folder, name, save):
    whole = fit(folder, save=[save], strategy=_strategy(options := dict(SAME[name])), **options)
    rest = fit(
        folder,
        resume=f"{save}.ckpt",
        seed=9,
        strategy=_strategy(options := dict(SAME[name])),
        **options,
    )
    return whole, rest


@pytest.mark.parametrize("name", SAME)
@pytest.mark.filterwarnings("error:.*resuming from a checkpoint that ended before.*")
def test_the_curve_of_the_same_ranks_is_that_of_the_undisturbed_fit(tmp_path, name):
    # A save brings ranks that train alone together, so it is where they meet anyway.
    save = 2 if name in ("accumulated", "local steps") else 3
    for whole, rest in on_ranks(_fits_of_same_ranks, tmp_path, name, save):
        assert rest[0] == whole[0][save:]
        assert rest[1] == whole[1][save:]
        assert all(torch.equal(a, b) for a, b in zip(rest[2], whole[2], strict=True))


ALONE = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "generator": lambda: DataLoader(
        Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "workers": lambda: DataLoader(Numbers(draws=False), 4, shuffle=True, num_workers=2),
    **{
        f"several, {mode}": lambda mode=mode: CombinedLoader(
            [DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(8), 4, shuffle=True)], mode
        )
        for mode in ("max_size", "min_size")
    },
}


def _fits_of_one_process(rank, folder, name, save):
    options = {"data": ALONE[name], "early": name == "generator"}
    whole = fit(folder, save=save, **options)
    resumed = (fit(folder, resume=f"{at}.ckpt", seed=9, **options) for at in save)
    return [whole, *resumed]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.filterwarnings("error:.*resuming from a checkpoint that ended before.*")
def test_the_curve_of_one_process_is_that_of_the_undisturbed_fit(tmp_path, name):
    save = [1] if "min_size" in name else [3, 12]
    (fits,) = on_ranks(_fits_of_one_process, tmp_path, name, save, world_size=1)
    whole = fits[0]
    for at, rest in zip(save, fits[1:], strict=True):
        assert rest[0] == whole[0][at:]
        assert rest[1] == whole[1][at:]
        assert all(torch.equal(a, b) for a, b in zip(rest[2], whole[2], strict=True))


# ---- other ranks, batches and plans --------------------------------------------------------------


def _steps(rank, folder, options):
    options = dict(options)
    return fit(folder, strategy=_strategy(options), **options)[0]


def steps(folder, ranks, **options):
    """What each rank has seen."""
    return on_ranks(_steps, folder, options, world_size=ranks)


def of_epoch(parts, epoch=0):
    """All indices of an epoch, in the global order: rank by rank, sample by sample."""
    own = [indices([step for step in part if step[0] == epoch]) for part in parts]
    return [own[i % len(own)][i // len(own)] for i in range(sum(map(len, own)))]


CHANGES = {
    "1 to 2": (1, {"batch_size": 4}, 2, {"batch_size": 4}, {}),
    "3 to 2": (3, {"batch_size": 3}, 2, {"batch_size": 5}, {}),
    "plan": (2, {"batch_size": 4}, 3, {"batch_size": 4}, {"plan": "zero3"}),
}


@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, True) for name in CHANGES), ("1 to 2", False)]
)
@pytest.mark.filterwarnings("error:.*resuming from a checkpoint that ended before.*")
def test_other_ranks_go_on_with_what_is_left(tmp_path, name, shuffle):
    ranks, data, ranks_then, data_then, options = CHANGES[name]
    save = 3
    whole = steps(tmp_path, ranks, data={**data, "shuffle": shuffle}, save=[save])
    rest = steps(
        tmp_path,
        ranks_then,
        data={**data_then, "shuffle": shuffle},
        resume=f"{save}.ckpt",
        seed=9,
        **options,
    )
    used = save * data["batch_size"] * ranks
    order = of_epoch(whole)[:ITEMS]
    assert sorted(order) == list(range(ITEMS))
    left, again = order[used:], of_epoch(rest)
    assert again[: len(left)] == left
    # ranks get equally many: some samples of the epoch's beginning come again
    assert again[len(left) :] == order[: -len(left) % ranks_then]
    # and the next epoch is whole
    assert sorted(set(of_epoch(rest, 1))) == list(range(ITEMS))
    assert len(of_epoch(rest, 1)) == ITEMS


def test_what_is_left_may_fill_no_batch(tmp_path):
    """Four samples on each rank are left, for batches of five."""
    data = {"shuffle": True, "drop_last": True}
    steps(tmp_path, 2, data={**data, "batch_size": 4}, save=[5])
    resumed = {"resume": "5.ckpt", "seed": 9}
    rest = steps(tmp_path, 2, data={**data, "batch_size": 5}, **resumed)
    assert not of_epoch(rest, 0)
    assert len(set(of_epoch(rest, 1))) == 40


def test_a_resumed_epoch_may_be_interrupted_again(tmp_path):
    whole = steps(tmp_path, 2, data={"batch_size": 4, "shuffle": True}, save=[2])
    once = steps(
        tmp_path, 1, data={"batch_size": 6, "shuffle": True}, resume="2.ckpt", save=[3], seed=9
    )
    twice = steps(
        tmp_path, 3, data={"batch_size": 2, "shuffle": True}, resume="3.ckpt", save=[1], seed=8
    )
    last = steps(tmp_path, 2, data={"batch_size": 4, "shuffle": True}, resume="1.ckpt", seed=7)
    order = of_epoch(whole)
    assert of_epoch(once) == order[16:]
    assert of_epoch(twice)[: 48 - 34] == order[34:]
    assert of_epoch(last) == order[40:]
    assert sorted(of_epoch(last, 1)) == list(range(ITEMS))


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        pass


class Ends(Callback):
    """Saves in a hook at the end of each epoch, as ModelCheckpoint may; knows begun epochs."""

    def __init__(self, hook, path):
        self.begun = []
        setattr(self, hook, lambda trainer, module, *_: self.save(trainer, path))

    def save(self, trainer, path):
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            trainer.save_checkpoint(path / f"end-{trainer.current_epoch}.ckpt")

    def on_train_epoch_start(self, trainer, module):
        self.begun.append(trainer.current_epoch)


def _ends(rank, folder, hook, batch_size, options):
    ends = Ends(hook, folder)
    data = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
    val = DataLoader(Numbers(4, draws=False))
    seen, _, _ = fit(folder, callbacks=[ends], data=data, val=val, model=Validated(), **options)
    return seen, ends.begun


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_behind_an_epoch_the_next_one_is_whole(tmp_path, hook):
    """On fewer ranks epochs have more batches; twice, since the second resume needs the counts."""
    runs = []
    for epoch, (ranks, batch_size) in enumerate([(2, 6), (1, 3), (2, 4)]):
        options = {"max_epochs": epoch + 1, "num_sanity_val_steps": 0}
        if epoch:
            options["resume"] = f"end-{epoch - 1}.ckpt"
        runs.append(on_ranks(_ends, tmp_path, hook, batch_size, options, world_size=ranks))
    for epoch, run in enumerate(runs):
        seen = [steps for steps, _ in run]
        assert {step[0] for steps in seen for step in steps} == {epoch}
        assert sorted(of_epoch(seen, epoch)) == list(range(ITEMS))
        assert all(begun == [epoch] for _, begun in run)


class Fails(Model):
    def validation_step(self, batch, batch_idx):
        raise KeyError("validation")


def _workers_after_a_failed_validation(rank, folder):
    model, data = Fails(), {"batch_size": 4, "num_workers": 2}
    with pytest.raises(KeyError, match="validation") as failed:
        fit(folder, model=model, data=data, val=DataLoader(Numbers(4)), num_sanity_val_steps=0)
    left = multiprocessing.active_children()
    assert failed is not None and model is not None  # which hold the fit, as in a program that ends
    return len(left)


def test_a_failed_validation_leaves_no_workers_of_training(tmp_path):
    """Else they end when the program does, which takes five seconds for each."""
    assert on_ranks(_workers_after_a_failed_validation, tmp_path, world_size=1) == [0]


# ---- what else -----------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        for _ in range(12):
            yield torch.tensor(1.0), torch.zeros(3)


class OwnState(DataLoader):
    """Resumable by itself, as torchdata's StatefulDataLoader."""

    def __init__(self):
        super().__init__(Endless(), 2)
        self.passes, self.batches = 0, 0

    def __len__(self):
        return 10

    def __iter__(self):
        for batch in range(self.batches, 10):
            values = torch.full((2,), self.passes * 100.0 + batch), torch.zeros(2, 3)
            self.passes, self.batches = self.passes + (batch == 9), (batch + 1) % 10
            yield values

    def state_dict(self):
        return {"passes": self.passes, "batches": self.batches}

    def load_state_dict(self, state):
        self.passes, self.batches = state["passes"], state["batches"]


def test_loaders_with_a_state_of_their_own_go_on(tmp_path):
    (fits,) = on_ranks(_fits_with_own_state, tmp_path, world_size=1)
    whole, *resumed = fits
    assert indices(whole[0][:10])[::2] == list(range(10))
    for at, rest in zip((3, 10, 13), resumed, strict=True):
        assert [(epoch, parts) for epoch, _, parts in rest[0]] == [
            (epoch, parts) for epoch, _, parts in whole[0][at:]
        ]
        assert rest[1] == whole[1][at:]


def _fits_with_own_state(rank, folder):
    options = {"data": OwnState, "early": True}
    whole = fit(folder, save=(3, 10, 13), **options)
    return [whole, *(fit(folder, resume=f"{at}.ckpt", **options) for at in (3, 10, 13))]


def _fits_with_ddp(rank, folder):
    data = ALONE["shuffled"]
    fit(folder, data=data, save=[3])
    plain = fit(folder, data=data, resume="3.ckpt", strategy="ddp", save=[2])
    return len(plain[0]), len(fit(folder, data=data, resume="2.ckpt")[0])


def test_the_file_is_read_by_ddp_and_a_file_of_ddp_is_read(tmp_path):
    assert on_ranks(_fits_with_ddp, tmp_path, world_size=1) == [(21, 19)]


# ---- only what is known exactly ------------------------------------------------------------------


class OwnBatches:
    """A batch sampler with `set_epoch`, which does not show its epoch."""

    def __init__(self):
        self.seed = 0

    def set_epoch(self, epoch):
        self.seed = epoch

    def __iter__(self):
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.seed))
        return iter([batch.tolist() for batch in order.split(4)])

    def __len__(self):
        return ITEMS // 4


# On how many ranks, and whether their position is known.
ORDERS = {
    "own batches": (1, lambda: DataLoader(Numbers(), batch_sampler=OwnBatches()), False),
    "weighted": (
        1,
        lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * ITEMS, ITEMS)),
        True,
    ),
    "weighted, two ranks": (
        2,
        lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * ITEMS, ITEMS)),
        False,
    ),
    "in order, two ranks": (2, lambda: DataLoader(Numbers(), 4), True),
}


def _fits_of_any_order(rank, folder, name):
    options = {"data": ORDERS[name][1], "use_distributed_sampler": False, "max_epochs": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # the ranks draw at random, each for itself
        whole = fit(folder, seed=rank, save=[3, 4], **options)
        rest = fit(folder, seed=rank + 5, resume="3.ckpt", **options)
        plain = fit(folder, seed=rank + 5, resume="3.ckpt", strategy="ddp", **options)
    said = sum("does not say where the training data are" in str(w.message) for w in caught)
    return whole[0], rest[0], plain[0], said


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_is_not_known_exactly_is_left_to_lightning(tmp_path, name):
    ranks, _, known = ORDERS[name]
    for rank, (whole, rest, plain, said) in enumerate(
        on_ranks(_fits_of_any_order, tmp_path, name, world_size=ranks)
    ):
        assert said == (not known and rank == 0)
        if known:
            assert rest == whole[3:]
        else:
            assert [number for _, number, _ in rest] == [number for _, number, _ in plain]
