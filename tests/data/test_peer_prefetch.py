"""What is announced is fetched beforehand, once, within bounds, and never stands in the way."""

from __future__ import annotations

import os
import pickle
import threading
import time

import pytest
from torch.utils.data import (
    ConcatDataset,
    Sampler,
    Subset,
)

from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.lookahead import Lookahead
from lightning_topt.data.peers.prefetch import PrefetchingPeers
from lightning_topt.data.resumable_loader import ResumableLoader
from tests.processes import wait_until

SECONDS = 5  # for what happens in a thread


class Others:
    """Odd items are those of other nodes, which have all of them but multiples of five."""

    timeout_seconds = 1.0

    def __init__(self):
        self.asked, self.may_answer, self.fails = [], threading.Event(), False
        self.may_answer.set()

    def is_own(self, item):
        return item % 2 == 0

    def fetch(self, items):
        if items:
            self.asked.append((threading.current_thread() is threading.main_thread(), list(items)))
        assert self.may_answer.wait(SECONDS)
        if self.fails:
            raise MemoryError
        return [None if item % 5 == 0 else bytearray(b"%04d" % item) for item in items]

    def push(self, item, parts):
        pass

    def close(self):
        pass

    def __getstate__(self):
        return {"asked": [], "fails": False}

    def __setstate__(self, state):
        vars(self).update(state)
        self.may_answer = threading.Event()
        self.may_answer.set()


@pytest.fixture
def others():
    return Others()


@pytest.fixture
def peers(others):
    peers = PrefetchingPeers(others, ahead_bytes=1 << 20)
    yield peers
    peers.close()


def test_what_was_announced_is_there(others, peers):
    peers.expect([1, 2, 3, 5])
    peers.expect([7, 9])
    wait_until(lambda: len(others.asked) == 2)
    assert others.asked == [(False, [1, 3, 5]), (False, [7, 9])]
    assert peers.fetch([1, 3, 5]) == [b"0001", b"0003", None]
    assert peers.fetch([9, 7, 11]) == [b"0009", b"0007", b"0011"]
    # neither what had come nor what is known to be nowhere
    assert others.asked[2:] == [(True, [11])]
    assert peers.prefetched == 5


def test_a_batch_on_its_way_is_waited_for(others, peers):
    others.may_answer.clear()
    peers.expect([1])
    wait_until(lambda: others.asked)
    threading.Timer(0.05, others.may_answer.set).start()
    assert peers.fetch([1]) == [b"0001"]
    assert others.asked == [(False, [1])]


def test_a_batch_whose_turn_has_not_come_is_fetched_at_once(others, peers, monkeypatch):
    fetch = others.fetch

    def fetch_and_let_the_other_thread_go_on(items):
        if threading.current_thread() is threading.main_thread():
            others.may_answer.set()
        return fetch(items)

    monkeypatch.setattr(others, "fetch", fetch_and_let_the_other_thread_go_on)
    others.may_answer.clear()
    peers.expect([1])
    peers.expect([3])
    wait_until(lambda: others.asked)
    assert peers.fetch([3]) == [b"0003"]
    assert (True, [3]) in others.asked


def test_no_more_than_its_bytes_waits(others):
    peers = PrefetchingPeers(others, ahead_bytes=8)
    for item in (1, 3, 7, 9, 11, 13):
        peers.expect([item])
    wait_until(lambda: len(others.asked) == 2)
    time.sleep(0.02)
    assert len(others.asked) == 2
    assert peers.fetch([1]) == [b"0001"]
    wait_until(lambda: len(others.asked) == 3)
    peers.close()


def test_what_nobody_asked_for_is_dropped_when_later_ones_are_asked_for(others):
    peers = PrefetchingPeers(others, ahead_bytes=8)
    for item in (1, 3, 7, 9):
        peers.expect([item])
    wait_until(lambda: len(others.asked) == 2)
    assert peers.fetch([3]) == [b"0003"]
    wait_until(lambda: len(others.asked) == 4)  # the bytes of 1 count no more
    assert peers.fetch([1]) == [b"0001"] and others.asked[-1] == (True, [1])
    peers.close()


def test_a_thread_that_fails_leaves_the_work_to_those_who_ask(others, peers, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    others.fails = True
    peers.expect([1])
    wait_until(lambda: others.asked)
    others.fails = False
    assert peers.fetch([1]) == [b"0001"]


def test_another_process_fetches_for_itself(others, peers):
    peers.expect([1])
    wait_until(lambda: others.asked)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            peers.expect([3])
            answer = [*peers.fetch([1]), *peers.fetch([3])]
            os.write(writing, b"".join(answer))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100) == b"00010003"
    copy = pickle.loads(pickle.dumps(peers))
    assert copy.fetch([7]) == [b"0007"]


class Own(Sampler):
    def __iter__(self):
        return iter(range(4))


class Announced:
    def __init__(self):
        self.batches, self.finished = [], 0

    def finish(self):
        self.finished += 1

    def over(self, chosen):
        for indices in chosen:
            self.batches.append(indices)
            yield indices


@pytest.mark.parametrize(
    "options, looks", [({}, True), ({"num_workers": 1}, False), ({"sampler": Own()}, False)]
)
def test_loaders_look_ahead_where_it_changes_nothing(options, looks):
    lookahead = Announced()
    loader = ResumableLoader(list(range(4)), batch_size=2, lookahead=lookahead, **options)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert (lookahead.batches, lookahead.finished) == (([[0, 1], [2, 3]], 1) if looks else ([], 0))


def test_indices_are_followed_to_their_items(tmp_path, others):
    def cached(name, length):
        cache = SampleCache(
            tmp_path, fingerprint=name, num_items=length, memory_bytes=1 << 16, disk_bytes=0
        )
        others = Others()
        cache.peers = PrefetchingPeers(others, ahead_bytes=1 << 20)
        return CachedDataset(list(range(length)), cache), others

    first, of_first = cached("a", 4)
    second, of_second = cached("b", 8)
    whole = ConcatDataset([first, Subset(second, [7, 6, 3])])
    order = Lookahead(whole, batches=1).over(iter([[0, 1, 4], [5, 6], [2]]))
    assert next(order) == [0, 1, 4]
    wait_until(lambda: of_first.asked and len(of_second.asked) == 2)
    assert of_first.asked == [(False, [1])] and of_second.asked == [(False, [7]), (False, [3])]
    assert list(order) == [[5, 6], [2]]
    for dataset in (first, second):
        dataset.cache.close()
    assert list(Lookahead([1, 2], batches=1).over(iter([[0], [1]]))) == [[0], [1]]
