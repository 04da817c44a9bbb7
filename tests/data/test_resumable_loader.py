"""An interrupted epoch goes on at its next batch, in the order it had."""

from __future__ import annotations

import copy
import io
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_topt.data.resumable_loader import ResumableLoader, make_resumable

ITEMS = 23


class Numbers(Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor(index)


class OwnOrder(Sampler):
    """Drawn from NumPy's and Python's global states when an epoch begins."""

    def __len__(self):
        return ITEMS

    def __iter__(self):
        order = list(np.random.permutation(ITEMS))
        random.shuffle(order)
        yield from order


class Stateful(Sampler):
    """Another order in each epoch, which only its own state tells."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return ITEMS

    def __iter__(self):
        self.passes += 1
        yield from torch.randperm(
            ITEMS, generator=torch.Generator().manual_seed(self.passes)
        ).tolist()

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Hidden(Stateful):
    state_dict = load_state_dict = property()


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "in order": lambda data: ResumableLoader(data, 4),
    "shuffled": lambda data: ResumableLoader(data, 4, shuffle=True),
    "generator": lambda data: ResumableLoader(data, 4, shuffle=True, generator=seeded()),
    "sampler": lambda data: ResumableLoader(
        data, 4, sampler=RandomSampler(data, generator=seeded()), drop_last=True
    ),
    "replacement": lambda data: ResumableLoader(
        data, 4, sampler=RandomSampler(data, replacement=True, num_samples=30, generator=seeded())
    ),
    "weighted": lambda data: ResumableLoader(
        data, 4, sampler=WeightedRandomSampler(torch.arange(ITEMS) + 1.0, ITEMS)
    ),
    "batch sampler": lambda data: ResumableLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 5, False)
    ),
    "no batches": lambda data: ResumableLoader(data, batch_size=None, shuffle=True),
    "distributed": lambda data: ResumableLoader(
        data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=1)
    ),
    "own order": lambda data: ResumableLoader(data, 4, sampler=OwnOrder()),
    "stateful": lambda data: ResumableLoader(data, 4, sampler=Stateful()),
    "workers": lambda data: ResumableLoader(data, 4, shuffle=True, num_workers=2),
    "persistent": lambda data: ResumableLoader(
        data, 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def epoch(loader, number):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(number)
    return iter(loader)


def through_a_checkpoint(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("kind", LOADERS)
def test_an_interrupted_epoch_goes_on_in_its_order(kind):
    seed_all(1)
    loader = LOADERS[kind](Numbers())
    list(epoch(loader, 0))
    batches = epoch(loader, 1)
    before = [next(batches) for _ in range(3)]
    state = through_a_checkpoint(loader.state_dict())
    after = as_lists(batches)
    assert len(before) == 3 and len(after) == len(loader) - 3

    seed_all(2)
    data = Numbers()
    resumed = LOADERS[kind](data)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = iter(resumed)
        first = next(rest).tolist()
        again = through_a_checkpoint(resumed.state_dict())
        assert [first, *as_lists(rest)] == after
    if not resumed.num_workers:
        assert len(data.read) == sum(
            len(batch) if isinstance(batch, list) else 1 for batch in after
        )
    third = LOADERS[kind](Numbers())
    third.load_state_dict(again)
    assert as_lists(third) == after[1:]


def test_own_generators_go_on_as_if_nothing_had_happened():
    loader = LOADERS["generator"](Numbers())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    list(batches)
    resumed = LOADERS["generator"](Numbers())
    resumed.load_state_dict(state)
    list(resumed)
    assert as_lists(resumed) == as_lists(loader)


def test_drawing_again_leaves_the_random_states_alone():
    seed_all(1)
    loader = LOADERS["own order"](Numbers())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    drawn = []
    for resumes in (False, True):
        fresh = LOADERS["in order" if not resumes else "own order"](Numbers())
        if resumes:
            fresh.load_state_dict(state)
        seed_all(3)
        list(fresh)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_the_order_and_random_numbers_are_those_of_a_plain_loader():
    runs = []
    for kind in (DataLoader, ResumableLoader):
        seed_all(4)
        loader = kind(Numbers(), 4, shuffle=True)
        runs.append([as_lists(loader), as_lists(loader), torch.rand(3).tolist()])
    assert runs[0] == runs[1]


def test_a_finished_epoch_is_followed_by_a_new_one():
    loader = ResumableLoader(Numbers(), 4)
    assert loader.state_dict() == {"batches": 0}
    batches = iter(loader)
    for _ in range(len(loader)):  # a Trainer does not ask for one more
        next(batches)
    state = loader.state_dict()
    assert state == {"batches": 0}
    resumed = ResumableLoader(Numbers(), 4)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == len(loader)


def test_an_epoch_that_was_cut_short_is_finished_too():
    over = [False]
    loader = ResumableLoader(Numbers(), 4, is_epoch_over=lambda: over[0])
    next(iter(loader))
    assert loader.state_dict()["batches"] == 1
    over[0] = True
    assert loader.state_dict() == {"batches": 0}


@pytest.mark.parametrize("changed", [{"batch_size": 3}, {"sampler": Hidden()}])
def test_an_order_that_cannot_be_drawn_again_warns(changed):
    loader = ResumableLoader(Numbers(), **({"batch_size": 4, "sampler": Hidden()}))
    list(loader)
    batches = iter(loader)
    next(batches)
    resumed = ResumableLoader(Numbers(), **({"batch_size": 4, "sampler": Hidden()} | changed))
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="could not be drawn again"):
        list(resumed)


def test_another_rank_takes_its_own_part():
    def made(rank):
        return ResumableLoader(
            Numbers(), 2, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=rank)
        )

    first, second = made(0), made(1)
    batches = epoch(first, 2), epoch(second, 2)
    for part in batches:
        next(part)
    resumed = made(1)
    resumed.load_state_dict(first.state_dict())
    assert as_lists(resumed) == as_lists(batches[1])


def test_two_iterators_at_once_are_independent():
    loader = ResumableLoader(Numbers(), 4)
    assert all(torch.equal(a, b) for a, b in zip(loader, loader, strict=True))


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


def test_what_is_made_resumable():
    loader = DataLoader(Numbers(), 4, num_workers=1)
    assert make_resumable(loader) and isinstance(loader, ResumableLoader)
    assert len(list(loader)) == len(loader) == 6 and loader.state_dict() == {"batches": 0}
    assert not make_resumable(loader)
    assert not make_resumable(DataLoader(Endless()))
    assert not make_resumable(DataLoader(Numbers(), num_workers=1, in_order=False))


class NoEpoch(Stateful):
    """It is told its epoch and does not show it; its state cannot be had."""

    def set_epoch(self, epoch):
        self.passes = epoch

    def state_dict(self):
        raise RuntimeError("not now")


def test_a_sampler_that_shows_nothing_does_not_stop_a_loader():
    loader = ResumableLoader(Numbers(), 4, sampler=NoEpoch())
    with pytest.warns(UserWarning, match="NoEpoch gives no state_dict"):
        assert len(list(loader)) == len(loader)


def test_a_copy_begins_an_epoch_of_its_own():
    loader = ResumableLoader(Numbers(), 4)
    batches = iter(loader)
    next(batches)
    other = copy.deepcopy(loader)
    assert isinstance(other, ResumableLoader) and other.state_dict() == {"batches": 0}
    assert len(list(other)) == len(loader)
    assert len(list(batches)) == len(loader) - 1
