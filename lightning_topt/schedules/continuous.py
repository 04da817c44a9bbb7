"""The continuous schedule: forward and backward passes of different minibatches in turn, an update
after each, no flush.

PipeDream's 1F1B (Narayanan et al., SOSP 2019) and SpecTrain's (Chen et al., arXiv 1809.02839): in
iteration i stage k of N runs forward of minibatch i, then backward of minibatch ``i - (N - 1 - k) *
lag_per_hop``, then the update that this one completes. Stage k is on rank k. What it computes with
are weights of other versions than those of a step that waits (see `horizons`).
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_topt.schedules.schedule import Action, Schedule

LAGS = {
    "continuous": 1,
    "continuous_overlapped": 2,
}  # by name of the schedule: minibatches for each hop of a stage's lag
Completes = Callable[[int], bool]


def lag_of(rank: int, *, num_ranks: int, lag_per_hop: int) -> int:
    """Return by how many minibatches the backward passes of a stage are behind its forward passes.

    ``lag_per_hop=1`` keeps the fewest minibatches in flight; with 2 a gradient may be under way for
    a whole iteration.
    """
    assert 0 <= rank < num_ranks and lag_per_hop >= 1, (rank, num_ranks, lag_per_hop)
    return (num_ranks - 1 - rank) * lag_per_hop


def every(accumulate: int, *, num_minibatches: int | None = None) -> Completes:
    """Return which minibatches complete an update of `accumulate` of them each; the last of
    `num_minibatches` does too.
    """
    return lambda minibatch: (minibatch + 1) % accumulate == 0 or minibatch + 1 == num_minibatches


def continuous_turn(
    rank: int, *, iteration: int, num_ranks: int, completes: Completes, lag_per_hop: int = 1
) -> tuple[Action, ...]:
    """Return what `rank` runs in an iteration in which a minibatch comes in; in its first ones
    nothing comes back.
    """
    behind = iteration - lag_of(rank, num_ranks=num_ranks, lag_per_hop=lag_per_hop)
    return Action("forward", rank, iteration), *_back(rank, behind, completes)


def drain_turns(
    rank: int, *, num_minibatches: int, num_ranks: int, completes: Completes, lag_per_hop: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return what `rank` runs, turn by turn, until all of `num_minibatches` that have come in have
    come back.
    """
    first = max(0, num_minibatches - lag_of(rank, num_ranks=num_ranks, lag_per_hop=lag_per_hop))
    return tuple(_back(rank, behind, completes) for behind in range(first, num_minibatches))


def continuous_schedule(
    *,
    num_ranks: int,
    num_minibatches: int,
    lag_per_hop: int = 1,
    accumulate: int = 1,
    completes: Completes | None = None,
) -> Schedule:
    """Return the schedule from one drained state to the next, with `num_minibatches` in between.

    An update is completed by every `accumulate`-th minibatch and by the last, unless `completes`
    says by which.
    """
    ends = every(accumulate, num_minibatches=num_minibatches) if completes is None else completes

    def of_rank(rank: int) -> tuple[Action, ...]:
        turns = [
            continuous_turn(
                rank, iteration=index, num_ranks=num_ranks, completes=ends, lag_per_hop=lag_per_hop
            )
            for index in range(num_minibatches)
        ]
        turns += drain_turns(
            rank,
            num_minibatches=num_minibatches,
            num_ranks=num_ranks,
            completes=ends,
            lag_per_hop=lag_per_hop,
        )
        return tuple(action for turn in turns for action in turn)

    ranks = tuple(range(num_ranks))
    name = next((name for name, lag in LAGS.items() if lag == lag_per_hop), "continuous")
    return Schedule(name, num_minibatches, ranks, tuple(of_rank(rank) for rank in ranks))


def _back(rank: int, minibatch: int, completes: Completes) -> tuple[Action, ...]:
    if minibatch < 0:
        return ()
    backward = Action("backward", rank, minibatch)
    return (backward, Action("update", rank, minibatch)) if completes(minibatch) else (backward,)
