"""Formulas of schedules against the simulation of equal stages, for all sizes."""

import itertools

import pytest

from lightning_topt.costs.chain_table import fits, rates_of
from lightning_topt.schedules.schedules import SCHEDULES, make_schedule
from lightning_topt.schedules.timing import StageCosts, held_counts, step_seconds


def sizes(name):
    for ranks, micro, chunks in itertools.product((1, 2, 3, 4, 6), range(1, 15), (1, 2, 3)):
        given = {"num_ranks": ranks, "num_microbatches": micro, "stages_per_rank": chunks}
        if SCHEDULES[name].problem(**given) is None:
            yield given


def most_held(actions):
    held = most = 0
    for action in actions:
        held += action.kind == "forward"
        most = max(most, held)
        held -= action.kind in ("backward", "backward_weight")
    return most


def waits(counts):
    """Activations that are held, and that wait, where nothing else is worse, the most first."""
    late = counts[:, counts.shape[1] // 2 :].sum(axis=1)
    pairs = set(zip(counts.sum(axis=1).tolist(), late.tolist(), strict=True))
    worst = [p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)]
    return tuple(sorted((p for p in worst if p[1]), reverse=True))


def test_a_schedule_without_rates_has_no_price():
    with pytest.raises(NotImplementedError, match="'mine' has no rates"):
        rates_of("mine", num_ranks=2, num_microbatches=4, stages_per_rank=1)
    with pytest.raises(NotImplementedError, match="'mine' has no rates"):
        fits("mine", num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_give_the_seconds_of_equal_stages_and_what_ranks_hold(name):
    count = 0
    for given in sizes(name):
        rates, schedule = rates_of(name, **given), make_schedule(name, **given)
        stages, third = schedule.num_stages, [1.0] * schedule.num_stages
        if not fits(name, num_ranks=given["num_ranks"], num_microbatches=given["num_microbatches"]):
            continue
        simulated = step_seconds(schedule, StageCosts(third, [2.0] * stages, third, third))
        lead = 3 * rates.lead - rates.weights
        assert stages * lead + 3 * rates.load + rates.weights == pytest.approx(simulated)
        for rank, actions in enumerate(schedule.actions):
            assert {rates.held[stage] for stage in schedule.stages_of(rank)} == {most_held(actions)}
            assert {rates.waits[stage] for stage in schedule.stages_of(rank)} == {
                waits(held_counts(schedule)[rank])
            }
        count += 1
    assert count > 20


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b_overlapped"])
def test_rates_of_transfers_are_exact_where_links_are_no_bottleneck(name):
    for ranks, micro in itertools.product((2, 3, 5), range(1, 9)):
        rates = rates_of(name, num_ranks=ranks, num_microbatches=micro, stages_per_rank=1)
        schedule = make_schedule(name, num_ranks=ranks, num_microbatches=micro)
        edges = {(s, s + 1): 0.25 for s in range(ranks - 1)}
        simulated = step_seconds(
            schedule, StageCosts([1.0] * ranks, [2.0] * ranks, transfer_seconds=edges)
        )
        round_trip = 0.5
        load = max(3 * rates.load + rates.sent_load * round_trip, rates.sent_floor * round_trip)
        assert 3 * ranks + (ranks - 1) * round_trip + load == pytest.approx(simulated)
