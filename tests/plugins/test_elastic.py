"""Fits that go on after a loss, under real torchrun: which steps they make, on which samples, and
what they leave behind.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.elastic import ElasticRun, copy_buffers, set_buffers
from tests.launch import run_ranks
from tests.torchrun_job import Job, check_same, check_same_end, jobs, undisturbed

__all__ = ["jobs", "undisturbed"]  # fixtures


def test_losses_of_ranks_change_nothing(jobs: Any, undisturbed: Job) -> None:
    """In the first step of all, twice in one step, in the last batch of an epoch, in the first one
    of the next; with workers.
    """
    events = [["kill in", 1, 2], ["kill in", 3, 1], ["kill in", 3, 0], ["kill in", 4, 0]]
    job = jobs([*events, ["kill in", 5, 2]], workers=1)
    job.run(3)
    job.check_samples()
    check_same(job, undisturbed)
    assert len(list(job.folder.glob("event-*"))) == 5


def test_a_loss_after_an_update(jobs: Any, undisturbed: Job) -> None:
    """The ranks that are left have made the step, whatever hook they are in: it is not repeated."""
    job = jobs([["kill end", 3, 1], ["kill end", 4, 2], ["kill end", 8, 0]])
    job.run(3)
    check_same_end(job, undisturbed)
    assert job.losses().keys() | {3, 4, 8} == undisturbed.losses().keys()


def test_a_kill_while_a_state_is_written(jobs: Any, undisturbed: Job) -> None:
    """The next one writes it. Ranks with equally many batches have none to join."""
    job = jobs([["kill_first_that_saves in", 5, None], ["kill in", 6, 0]], uneven="join")
    job.run(3)
    assert (job.folder / "first").exists()
    job.check_samples()
    check_same(job, undisturbed)


def test_a_fit_that_was_asked_to_stop_does(jobs: Any) -> None:
    job = jobs([["stop end", 3, None], ["kill end", 3, 1]], validates=True)
    job.run(2)
    assert job.losses().keys() == {1, 2}, job.output()
    assert {note["validated"] for note in job.notes() if "validated" in note} == {3}
    assert torch.load(job.folder / "end.pt")["count"] == 3


def test_a_window_that_is_not_full_comes_again(jobs: Any) -> None:
    plain, disturbed = jobs([], accumulate=2), jobs([["kill odd", 3, 1]], accumulate=2)
    for job in (plain, disturbed):
        job.run(2)
    check_same_end(disturbed, plain)
    assert disturbed.losses().keys() == plain.losses().keys()


def test_a_loss_in_a_validation_lets_all_of_it_come_again(jobs: Any) -> None:
    plain = jobs([], validates=True)
    disturbed = jobs([["kill validate", 6, 1], ["kill validate", 12, 0]], validates=True)
    for job in (plain, disturbed):
        job.run(2)
        job.check_samples()
    check_same(disturbed, plain)
    for job in (plain, disturbed):
        validated = Counter(note["validated"] for note in job.notes() if "validated" in note)
        assert validated == {6: 2, 12: 2}, job.output()


def test_damaged_states_are_left_out(jobs: Any) -> None:
    """Then the fit begins again from its ckpt_path."""
    plain, job = jobs([], saves=True), jobs([["kill in", 6, 1], ["damage in", 6, 0]], saves=True)
    for each in (plain, job):
        each.run(2)
    assert "is damaged, and is left out" in job.output()
    check_same(job, plain)
    steps = Counter(note["step"] for note in job.notes())
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


def test_sharded_plans_go_on_from_the_last_checkpoint(jobs: Any) -> None:
    plain, job = (
        jobs([], plan="zero2", saves=True),
        jobs([["kill in", 6, 1]], plan="zero2", saves=True),
    )
    for each in (plain, job):
        each.run(2)
    assert "it has a part of it" in job.output()
    assert "training begins again from the start" not in job.output()
    check_same(job, plain)
    steps = Counter(note["step"] for note in job.notes())
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


def test_an_error_of_the_user_ends_the_job(jobs: Any) -> None:
    job = jobs([["fail in", 3, 1]])
    job.run(2, succeeds=False)
    assert "of the user" in job.output()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "sharded"}, "in one piece"),
        ({"uneven": "stop"}, "leave uneven out"),
        ({"start_method": "spawn"}, "leave start_method='spawn' out"),
        ({"allow_staleness": True}, "leave allow_staleness out"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoParallelStrategy(elastic=True, **options)


def test_without_torchrun_it_is_refused() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoParallelStrategy(elastic=True),
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="torchrun --standalone"):
        trainer.fit(BoringModel())


def elastic_run(
    *,
    device: str = "cpu",
    backend: str | None = None,
    on_plateau: bool = False,
    lengths: list[float] | None = None,
    is_replicated: bool = True,
) -> ElasticRun:
    strategy: Any = SimpleNamespace(
        cluster_environment=object.__new__(TorchElasticEnvironment),
        root_device=torch.device(device),
        process_group_backend=backend,
        lr_scheduler_configs=[SimpleNamespace(reduce_on_plateau=on_plateau)],
        optimizers=[],
    )
    data: Any = SimpleNamespace(lengths=lengths)
    plan: Any = SimpleNamespace(engine=SimpleNamespace(is_replicated=is_replicated))
    return ElasticRun(strategy, SimpleNamespace(), data, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "stops_early", "message"),
    [
        ({"device": "cuda"}, False, "leave elastic out"),
        ({"backend": "mpi"}, False, "leave elastic out"),
        ({}, True, "EarlyStopping"),
    ],
)
def test_fits_that_were_not_tried_are_refused(
    options: dict[str, Any], stops_early: bool, message: str
) -> None:
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=True),
        early_stopping_callbacks=[object()] * stops_early,
    )
    with pytest.raises(ValueError, match=message):
        elastic_run(**options)._check(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_plateau": True, "lengths": [6]}, "ReduceLROnPlateau"),
        ({"lengths": None}, "map-style data"),
    ],
)
def test_states_that_a_loss_takes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elastic_run(**options)._check_training()


def _check_lengths(rank: int, lengths: list[list[float]]) -> str | None:
    try:
        elastic_run(lengths=lengths[rank])._check_training()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("lengths", [[[6], [6]], [[6], [5]]])
def test_ranks_need_equally_many_batches(lengths: list[list[float]]) -> None:
    for error in run_ranks(_check_lengths, 2, lengths):
        assert (error is None) is (lengths[0] == lengths[1])
        assert error is None or "equally many batches, and they have [[6], [5]]" in error


def test_a_plan_that_shards_warns_without_ckpt_path(recwarn: pytest.WarningsRecorder) -> None:
    elastic_run(is_replicated=True).begin_plan()
    assert not recwarn
    run = elastic_run(is_replicated=False)
    for _ in range(2):
        run.begin_plan()
    assert ["begins again from the start" in str(each.message) for each in recwarn] == [True]


def test_buffers_are_those_before_whatever_was_put_there() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    shared = torch.zeros(2)
    module.register_buffer("first", shared)
    module[1].register_buffer("second", shared)
    before = copy_buffers(module)
    module[0](torch.randn(4, 2))  # in place
    module.first = shared + 1
    module[1].second = torch.ones(3)
    set_buffers(module, before)
    state = module.state_dict()
    assert state["0.num_batches_tracked"] == 0
    assert torch.equal(state["0.running_mean"], torch.zeros(2))
    assert torch.equal(state["first"], shared) and torch.equal(state["1.second"], shared)
