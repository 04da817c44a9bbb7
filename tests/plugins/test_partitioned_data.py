"""Two "nodes" with cache directories of their own: who reads what, and equal training."""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import signal
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_topt.data.peers.client import owners
from lightning_topt.plugins.cached_data import CachedDataModule, CachePartition
from tests.launch import run_on_pool, torchrun_environment
from tests.plugins.test_cached_data import ITEMS, Model, Module, Numbers, Plain
from tests.processes import halt

EPOCHS, BATCH = 3, 2
QUICK = CachePartition(timeout_seconds=5, seed=1)


def on_nodes(function, *args, devices=1, nodes=2, run=run_on_pool):
    return run(_on_node, nodes * devices, function, devices, nodes, args)


def _on_node(rank, function, devices, nodes, args):
    # the port is never used: the process group exists already
    os.environ.update(torchrun_environment(rank, nodes * devices, port=1, nodes=nodes))
    mp.current_process()._config["daemon"] = False  # which may not have workers
    return function(rank // devices, devices, nodes, *args)


class Seen(Plain):
    """Remembers which items it was asked for; they have other sizes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def fit(node, devices, nodes, folder, make, options, *, epochs=EPOCHS, cached=True, callbacks=()):
    module = Module(make, dataset=Seen())
    if cached:
        module = CachedDataModule(module, directory=folder / str(node), **options)
    pl.seed_everything(1, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=epochs,
        num_nodes=nodes,
        devices=devices,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        trainer.fit(model, datamodule=module)
    statistics = list(module.statistics().values()) if cached else []
    seen = list(module.dataset.seen)
    if cached:
        dist.barrier()  # who ends first serves nobody any more
        module.close()
    return model.losses, statistics, seen


def in_batches(data, **options):
    return DataLoader(data, BATCH, shuffle=True, **options)


def room(**options):
    return {"memory_bytes": 1 << 20, "partition": QUICK, "data_version": "1"} | options


def orders(num_ranks, rank):
    """What `DistributedSampler` gives a rank in each epoch, as Lightning makes it."""
    sampler = torch.utils.data.DistributedSampler(
        range(ITEMS), num_ranks, rank, shuffle=True, seed=1
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield list(sampler)


def test_after_the_first_epoch_the_source_is_not_read_and_the_network_as_often_as_the_formula_says(
    tmp_path,
):
    results = on_nodes(fit, tmp_path, in_batches, room())
    owner = owners(ITEMS, num_nodes=2, seed=1)
    for node, (_, [counts], seen) in enumerate(results):
        first, *later = orders(2, node)
        assert set(seen) == set(first)  # (some of them twice, to see whether they are random)
        from_others = sum(owner[item] != node for order in later for item in order)
        assert counts.misses == len(first)
        assert (counts.peer_hits, counts.memory_hits) == (
            from_others,
            len(first) * len(later) - from_others,
        )
        assert counts.memory_items == ITEMS // 2
        assert from_others > 3


@functools.cache
def losses_without_a_cache(make, devices):
    """Of each rank: nothing of them depends on a folder."""
    return [result[0] for result in on_nodes(fit_without, None, make, devices=devices)]


@pytest.mark.parametrize(
    ("devices", "options"), [(1, {}), (2, {"memory_bytes": 0, "disk_bytes": 1 << 20})]
)
def test_losses_are_those_without_a_cache(tmp_path, devices, options):
    results = on_nodes(fit, tmp_path, in_batches, room(**options), devices=devices)
    assert [result[0] for result in results] == losses_without_a_cache(in_batches, devices)
    per_node = [
        sum(result[1][0].peer_hits for result in results[i::devices]) for i in range(devices)
    ]
    assert all(per_node)


def fit_without(node, devices, nodes, folder, make):
    return fit(node, devices, nodes, folder, make, {}, cached=False)


def with_workers(data):
    return in_batches(data, num_workers=1, persistent_workers=True)


def a_part(data):
    return in_batches(Subset(data, list(range(ITEMS - 1, 3, -1))))


def joined(data):
    return in_batches(ConcatDataset([data, Numbers(start=100)]))


@pytest.mark.parametrize("make", [with_workers, a_part, joined])
def test_any_loader(tmp_path, make):
    results = on_nodes(fit, tmp_path, make, room())
    assert [result[0] for result in results] == losses_without_a_cache(make, 1)
    assert all(sum(counts.peer_hits for counts in result[1]) > 3 for result in results)
    # The first epoch reads each sample once, on one of the nodes; the later ones read none.
    each = [sum(result[1][i].misses for result in results) for i in range(len(results[0][1]))]
    assert sum(each) == {with_workers: ITEMS, a_part: ITEMS - 4, joined: 2 * ITEMS}[make]


def test_a_warm_start_reads_the_other_nodes_disk(tmp_path):
    options = room(memory_bytes=0, disk_bytes=1 << 20)
    on_nodes(fit, tmp_path, in_batches, options)
    for _, [counts], seen in on_nodes(fit, tmp_path, in_batches, options):
        assert not seen and counts.misses == 0
        assert counts.peer_hits + counts.disk_hits == EPOCHS * ITEMS // 2


def test_room_for_less_than_a_share_costs_exactly_what_does_not_fit(tmp_path):
    entry = 208  # bytes of 32 float32 and their header
    [(_, [first], _), (_, [second], _)] = on_nodes(
        fit, tmp_path, in_batches, room(memory_bytes=6 * entry)
    )
    kept = first.memory_items + second.memory_items
    assert 0 < kept < ITEMS
    assert first.misses + second.misses == ITEMS + (EPOCHS - 1) * (ITEMS - kept)


class Ends(pl.Callback):
    """The server of node 1's samples is killed, or stopped, when the second epoch begins."""

    def __init__(self, node, sign):
        self.node, self.sign = node, sign

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            if self.node == 1:
                halt(trainer.datamodule._servers[0].process.pid, self.sign)
            dist.barrier()


def fit_while_a_server_ends(node, devices, nodes, folder, options, sign):
    return fit(node, devices, nodes, folder, in_batches, options, callbacks=[Ends(node, sign)])


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_costs_readings_of_the_source_and_nothing_else(tmp_path, sign):
    partition = CachePartition(seed=1, timeout_seconds=2, retry_seconds=60)
    results = on_nodes(fit_while_a_server_ends, tmp_path, room(partition=partition), sign)
    assert [result[0] for result in results] == losses_without_a_cache(in_batches, 1)
    owner = owners(ITEMS, num_nodes=2, seed=1)
    first, *later = orders(2, 0)
    lost = sum(owner[item] == 1 for order in later for item in order)
    counts = results[0][1][0]
    assert (counts.misses, counts.peer_hits) == (len(first) + lost, 0)


def refused(node, devices, nodes, folder, make, options):
    with pytest.raises(ValueError) as caught:
        fit(
            node,
            devices,
            nodes,
            folder,
            make,
            options[node] if isinstance(options, list) else options,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ([room(), room(data_version="2")], "data"),
        ([room(), room(partition=CachePartition(interface="nosuch0"))], "node 1"),
        (room(partition=CachePartition(port=1 << 15 | 4)), "cannot listen"),
    ],
)
def test_what_one_node_cannot_do_is_said_on_all(tmp_path, options, words):
    for message in on_nodes(refused, tmp_path, in_batches, options):
        assert words in message
