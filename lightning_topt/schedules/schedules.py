"""Pipeline schedules as data: for every rank the passes that it runs, in order.

`make_schedule` builds a schedule by name, complete before the first tensor moves:

    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    # rank 0: F0 F1 B0 F2 B1 B2
    # rank 1: F0 B0 F1 B1 F2 B2

Stages are numbered along the forward pass, 0 to S - 1; a rank may run several of them. Sends and
receives are not among the actions: they follow from the rank of each stage and from what stages
need of one another (`check.Edges`). P is the number of ranks, M that of microbatches.

The module has the data types, `make_schedule`, one builder per kind of schedule, and at its end
the table `SCHEDULES`. A new schedule has a builder, a rule in `_RULES`, and (the first three are
asked for by tests):

    costs/chain_table.py                 its rates, without which it cannot be searched
    conf/schedule/NAME.yaml                 its name on the command line
    benchmarks/pipelines/equality.py        plans under it, compared with one process
    docs/reference/schedules.md             when to choose it
    docs/how_to/pipelines.md, `PipelineStrategy`   its name

Continuous schedules (`CONTINUOUS_SCHEDULES`) run without flush: they update after
a few minibatches while others are in flight. `forward_schedule` is for evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from lightning_topt.basics.argument_checks import check_choice, check_whole

Kind = Literal["forward", "backward", "backward_input", "backward_weight", "update"]

# By name of the schedule: minibatches that each hop between stages adds to the lag of a stage.
CONTINUOUS_SCHEDULES = {"continuous": 1, "continuous_overlapped": 2}
Completes = Callable[[int], bool]  # says of a minibatch whether it completes an update


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one stage, or an update of the stage's parameters.

    ``"backward"`` computes the gradients of the stage's inputs and of its parameters.
    ``"backward_input"`` computes those of the inputs alone, with which the stage before can go on,
    and ``"backward_weight"`` those of the parameters later (zero bubble; Qi et al., arXiv
    2401.10241). ``"update"``, in continuous schedules, is a step of the stage's optimizer with the
    gradients of all microbatches since the update before; `microbatch_index` is the last of them.
    """

    kind: Kind
    stage_index: int
    microbatch_index: int


@dataclass(frozen=True)
class Schedule:
    """The `actions` of each rank of a pipeline, (rank, action).

    Stage s runs on rank ``rank_of_stage[s]``. Ranks are positions along the pipeline axis. Nothing
    is checked here: see `check.check_schedule`.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        """Hash without the actions.

        Schedules are looked up often, and others of the same name and size are rare.
        """
        return hash((self.name, self.num_microbatches, self.rank_of_stage))

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the pipeline."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` runs, in order of the forward pass."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, rank in enumerate(self.rank_of_stage):
            found[rank] = (*found.get(rank, ()), stage)
        return found


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return the schedule `name` of a training step.

    Args:
        name: one of `SCHEDULES`, or of `CONTINUOUS_SCHEDULES` for a run from one drained state to
            the next with `num_microbatches` minibatches.
        num_ranks: P, at least 1.
        num_microbatches: M, at least 1.
        stages_per_rank: by default the least that the schedule takes.

    Raises:
        ValueError: for an unknown name, and for a size that the schedule does not take.
    """
    # not one step but a run of minibatches: its sizes are checked apart
    if name in CONTINUOUS_SCHEDULES:
        if stages_per_rank not in (None, 1):
            raise ValueError(f"schedule {name!r} runs 1 stage on each rank, got {stages_per_rank}")
        return continuous_schedule(
            num_ranks=num_ranks,
            num_minibatches=check_whole(num_microbatches, name="num_microbatches"),
            lag_per_hop=CONTINUOUS_SCHEDULES[name],
        )
    rule = SCHEDULES[check_choice(name, name="schedule", allowed=SCHEDULES)]
    num_ranks = check_whole(num_ranks, name="num_ranks")
    num_microbatches = check_whole(num_microbatches, name="num_microbatches")
    stages_per_rank = check_whole(
        rule.least_stages if stages_per_rank is None else stages_per_rank, name="stages_per_rank"
    )
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "stages_per_rank": stages_per_rank,
    }
    if problem := rule.problem(**sizes):
        raise ValueError(problem)
    return _built(name, **sizes)


@lru_cache(maxsize=256)
def _built(name: str, **sizes: int) -> Schedule:
    # Build a schedule once; equal schedules are one object, so comparing them takes no time
    return SCHEDULES[name].build(**sizes)


@dataclass(frozen=True)
class ScheduleRule:
    """A kind of schedule and the sizes that it takes.

    It takes any number of ranks and of microbatches. A rank has `least_stages` to `most_stages`
    stages (None: any number), placed in a loop or along a V. `splits_backward`: the gradients of
    inputs and of parameters are passes of their own. `summary` says in a line when to choose it.
    """

    name: str
    summary: str
    build: Callable[..., Schedule]
    least_stages: int = 1
    most_stages: int | None = 1
    is_v_shaped: bool = False
    splits_backward: bool = False

    def problem(self, *, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
        """Return one sentence on why a schedule of this size is not legal, None where it is."""
        if num_ranks < 1:
            return f"schedule {self.name!r} has at least one rank, got {num_ranks}"
        if num_microbatches < 1:
            return f"schedule {self.name!r} has at least one microbatch, got {num_microbatches}"
        most = self.most_stages
        if stages_per_rank >= self.least_stages and (most is None or stages_per_rank <= most):
            return None
        stages = "1 stage" if self.least_stages == 1 else f"{self.least_stages} stages"
        # name the schedules that take so many stages
        others = [
            rule.name
            for rule in SCHEDULES.values()
            if rule.least_stages <= stages_per_rank <= (rule.most_stages or stages_per_rank)
        ]
        instead = f"; choose among {', '.join(others)} for that" if others else ""
        return (
            f"schedule {self.name!r} runs {'at least ' if most is None else ''}{stages} on each "
            f"rank, got {stages_per_rank}{instead}"
        )

    def rank_of_stage(self, *, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Return the rank of each stage, (stages,)."""
        if self.is_v_shaped:
            return _v_shaped_ranks(num_ranks)
        return _looped_ranks(num_ranks, stages_per_rank)


def _looped_ranks(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    # The rank of each stage where stage s is on rank s mod P, (stages,)
    return tuple(range(num_ranks)) * stages_per_rank


def _v_shaped_ranks(num_ranks: int) -> tuple[int, ...]:
    # The rank of each of 2P stages along a V: rank r has stages r and 2P - 1 - r
    return (*range(num_ranks), *reversed(range(num_ranks)))


# ---- All forward passes, then all backward passes: every microbatch is held at once.


def gpipe(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return GPipe's schedule (Huang et al., arXiv 1811.06965).

    The bubble is (P - 1) / (M + P - 1) of the step for P equal stages and M microbatches.
    """
    assert stages_per_rank == 1
    actions = tuple(
        tuple(
            Action(kind, rank, index)
            for kind in ("forward", "backward")
            for index in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, tuple(range(num_ranks)), actions)


def looped_bfs(*, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return the breadth-first schedule (Lamy-Poirier, arXiv 2211.05953), stage s on rank s mod P.

    A rank runs all microbatches through its first stage, then all through its next; backward in
    reverse, last microbatch first. The bubble is that of GPipe divided by the stages per rank.
    """

    def of_rank(rank: int) -> tuple[Action, ...]:
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        indices = range(num_microbatches)
        # breadth first: all microbatches through a stage, then through the next
        forward = [Action("forward", stage, index) for stage in stages for index in indices]
        # the same backwards, from the last stage and microbatch
        backward = [
            Action("backward", stage, index)
            for stage in reversed(stages)
            for index in reversed(indices)
        ]
        return (*forward, *backward)

    ranks = _looped_ranks(num_ranks, stages_per_rank)
    actions = tuple(of_rank(rank) for rank in range(num_ranks))
    return Schedule("looped_bfs", num_microbatches, ranks, actions)


# ---- One forward, one backward: few microbatches are in flight.


def one_f_one_b(
    *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1, overlapped: bool = False
) -> Schedule:
    """Return PipeDream-Flush's 1F1B (Narayanan et al., arXiv 2006.09503 and 2104.04473).

    The bubble is that of GPipe; rank r has at most P - r microbatches in flight. With `overlapped`
    the warm-up is twice as long, which hides transfers (1F1B-SO of BaPipe, Zhao et al., arXiv
    2012.12544); rank r has at most 2 (P - 1 - r) + 1 microbatches in flight.
    """
    assert stages_per_rank == 1

    def of_rank(rank: int) -> tuple[Action, ...]:
        # warm-up: forward passes before the first pair, one or two for every rank behind
        ahead = min((num_ranks - 1 - rank) * (2 if overlapped else 1), num_microbatches)
        actions = [Action("forward", rank, index) for index in range(ahead)]
        # steady state: one forward, one backward; then backward passes alone
        for index in range(num_microbatches):
            if index + ahead < num_microbatches:
                actions.append(Action("forward", rank, index + ahead))
            actions.append(Action("backward", rank, index))
        return tuple(actions)

    ranks = tuple(range(num_ranks))
    name = "1f1b_overlapped" if overlapped else "1f1b"
    return Schedule(name, num_microbatches, ranks, tuple(of_rank(rank) for rank in ranks))


# ---- Interleaved: several stages per rank in a loop, microbatches in rounds of about P.
# In a round a rank runs P microbatches through its first stage, then the same through its next.


def interleaved(*, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return Megatron's interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2).

    The bubble is that of 1F1B divided by the stages per rank where P divides M. Where it does not,
    rounds are as equal as they can be and the larger ones come first; torch.distributed.pipelining
    runs only those M whose rounds are equal.
    """

    def of_rank(rank: int) -> tuple[Action, ...]:
        visits = _visits(rank, num_ranks, num_microbatches, stages_per_rank)
        # all stages but one for a round, and two passes for each rank behind this one
        warm_up = (stages_per_rank - 1) * visits.round_size + 2 * (num_ranks - 1 - rank)
        pairs = _pair_passes(visits, warm_up)
        return tuple(action for forward, backward in pairs for action in (*forward, *backward))

    ranks = _looped_ranks(num_ranks, stages_per_rank)
    actions = tuple(of_rank(rank) for rank in range(num_ranks))
    return Schedule("interleaved", num_microbatches, ranks, actions)


def zero_bubble(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return ZB-H1 (Qi et al., arXiv 2401.10241, section 2.1), interleaved with several stages.

    Gradients of parameters are computed later, where the rank would wait: rank r puts them off by
    r microbatches. Memory on rank 0 is that of 1F1B, and the bubble a third of its bubble: (P - 1)
    (F + B - W) seconds, divided by the stages per rank. F, B, W are the seconds of forward,
    backward_input and backward_weight, and W <= B. With several stages per rank it is that of
    torch.distributed.pipelining, for any number of microbatches.
    """

    def of_rank(rank: int) -> tuple[Action, ...]:
        visits = _visits(rank, num_ranks, num_microbatches, stages_per_rank)
        # all stages but one for a round, and one pass for each rank behind this one
        warm_up = (stages_per_rank - 1) * visits.round_size + num_ranks - 1 - rank
        # put off, in the order of the backward passes; `done` of them are among the actions
        weights = [Action("backward_weight", *visit) for visit in visits.backward]
        actions: list[Action] = []
        done = put_off = 0
        for forward, backward in _pair_passes(visits, warm_up):
            actions += forward
            for action in backward:
                actions.append(
                    Action("backward_input", action.stage_index, action.microbatch_index)
                )
                put_off += 1
                # rank r is r microbatches behind with its parameters' gradients
                if put_off > rank:
                    actions.append(weights[done])
                    done += 1
        # what was put off to the end
        return (*actions, *weights[done:])

    name = "zero_bubble" if stages_per_rank == 1 else "interleaved_zero_bubble"
    ranks = _looped_ranks(num_ranks, stages_per_rank)
    actions = tuple(of_rank(rank) for rank in range(num_ranks))
    return Schedule(name, num_microbatches, ranks, actions)


class _Visits(NamedTuple):
    """A rank's forward and backward passes in order, as pairs (stage, microbatch)."""

    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    round_size: int  # microbatches of the first round


def _visits(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Visits:
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    # Rounds of at least P microbatches (or one of all, if these are fewer), larger ones first: the
    # last rank's warm-up is made for the first round, and a larger one after it would need a
    # backward before its forward.
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    starts = [size * index + min(index, larger) for index in range(count + 1)]
    rounds = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    forward = [(stage, index) for indices in rounds for stage in stages for index in indices]
    backward = [
        (stage, index) for indices in rounds for stage in reversed(stages) for index in indices
    ]
    return _Visits(forward, backward, len(rounds[0]))


def _pair_passes(visits: _Visits, warm_up: int) -> list[tuple[list[Action], list[Action]]]:
    # Pair each forward pass with the backward pass after it; either list may be empty.
    # Warm-up: forward passes alone. Steady state: one of each. Cool-down: backward passes alone.
    warm_up = min(warm_up, len(visits.forward))
    forward = [[Action("forward", *visit)] for visit in visits.forward]
    backward = [[Action("backward", *visit)] for visit in visits.backward]
    nothing: list[list[Action]] = [[] for _ in range(warm_up)]
    return list(zip([*forward, *nothing], [*nothing, *backward], strict=True))


# ---- Along a V: the first and the last stage share rank 0, and memory is balanced.


def zbv(*, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return ZB-V (Qi et al., arXiv 2401.10241, section 6; its kin in arXiv 2405.15362).

    Rank r runs stages r and 2P - 1 - r. The only bubble is the ramp where forward, backward_input
    and backward_weight take the same time and there are at least 2P - 1 microbatches. With fewer,
    it is the schedule of 2P - 1 without those that are not there.
    """
    assert stages_per_rank == 2
    planned = max(2 * num_ranks - 1, num_microbatches)

    def of_rank(rank: int) -> tuple[Action, ...]:
        passes = _NamedPasses(down=rank, up=2 * num_ranks - 1 - rank)
        # warm-up
        passes.add("F0", times=2 * (num_ranks - rank) - 1)
        passes.add("F1 F0", times=rank)
        passes.add("F1 B1 W1", times=num_ranks - rank)
        # steady state
        while passes.count("F1") < planned:
            passes.add("F0 B0 W0" if passes.count("F0") < planned else "B0 W0")
            passes.add("F1 B1 W1")
        # cool-down
        passes.add("B0 B1", times=rank)
        passes.add("B0 W0", times=num_ranks - rank)
        passes.add("W1", times=planned - passes.count("W1"))
        passes.add("W0", times=planned - passes.count("W0"))
        # microbatches that are planned but not there drop out; the order of the rest stays
        return tuple(each for each in passes.actions if each.microbatch_index < num_microbatches)

    actions = tuple(of_rank(rank) for rank in range(num_ranks))
    return Schedule("zbv", num_microbatches, _v_shaped_ranks(num_ranks), actions)


class _NamedPasses:
    """The actions of a rank so far, added by the paper's names.

    F, B and W are passes of stage 0 (down the V) or 1 (up).
    """

    def __init__(self, *, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self._stages = {"0": down, "1": up}
        self._counts: dict[str, int] = {}

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, names: str, *, times: int = 1) -> None:
        # Add the next microbatch of each of the passes `names`, and that `times` over.
        kinds: dict[str, Kind] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}
        for name in names.split() * times:
            self.actions.append(Action(kinds[name[0]], self._stages[name[1]], self.count(name)))
            self._counts[name] = self.count(name) + 1


# ---- Continuous: no flush. In iteration i stage k of N, on rank k, runs forward of minibatch i,
# then backward of minibatch i - (N - 1 - k) * lag_per_hop, then the update that this completes.


def continuous_schedule(
    *,
    num_ranks: int,
    num_minibatches: int,
    lag_per_hop: int = 1,
    accumulate: int = 1,
    completes: Completes | None = None,
) -> Schedule:
    """Return the continuous schedule from one drained state to the next.

    This is the 1F1B of PipeDream (Narayanan et al., SOSP 2019) and SpecTrain (Chen et al., arXiv
    1809.02839). Passes compute with weights of other versions than in a step that flushes (see
    `staleness`).

    Args:
        num_ranks: N, one stage per rank.
        num_minibatches: minibatches between the two drained states.
        lag_per_hop: 1 keeps the fewest minibatches in flight; with 2 a gradient may travel for a
            whole iteration.
        accumulate: minibatches per update; the last one always completes an update.
        completes: says which minibatches complete an update, in place of `accumulate`.
    """
    ends = every(accumulate, num_minibatches=num_minibatches) if completes is None else completes

    def of_rank(rank: int) -> tuple[Action, ...]:
        lag, actions = lag_of(rank, num_ranks=num_ranks, lag_per_hop=lag_per_hop), list[Action]()
        # Warm-up: forward passes alone. Steady state: one of each. Drain: backward passes alone.
        for iteration in range(num_minibatches + lag):
            if iteration < num_minibatches:
                actions.append(Action("forward", rank, iteration))
            if (behind := iteration - lag) >= 0:
                actions.append(Action("backward", rank, behind))
                if ends(behind):
                    actions.append(Action("update", rank, behind))
        return tuple(actions)

    ranks = tuple(range(num_ranks))
    # a lag without a name of its own runs under the first name
    names = (name for name, lag in CONTINUOUS_SCHEDULES.items() if lag == lag_per_hop)
    actions = tuple(of_rank(rank) for rank in ranks)
    return Schedule(next(names, "continuous"), num_minibatches, ranks, actions)


def lag_of(rank: int, *, num_ranks: int, lag_per_hop: int) -> int:
    """Return by how many minibatches a stage's backward passes are behind its forward passes."""
    assert 0 <= rank < num_ranks and lag_per_hop >= 1, (rank, num_ranks, lag_per_hop)
    return (num_ranks - 1 - rank) * lag_per_hop


def every(accumulate: int, *, num_minibatches: int | None = None) -> Completes:
    """Return a rule by which every `accumulate`-th minibatch completes an update, and the last."""
    return lambda minibatch: (minibatch + 1) % accumulate == 0 or minibatch + 1 == num_minibatches


def forward_schedule(rank_of_stage: Sequence[int]) -> Schedule:
    """Return the forward passes of an evaluation of one batch, on whatever ranks the stages are."""
    ranks = tuple(rank_of_stage)
    actions: list[tuple[Action, ...]] = [() for _ in range(max(ranks) + 1)]
    for stage, rank in enumerate(ranks):
        actions[rank] += (Action("forward", stage, 0),)
    return Schedule("forward", 1, ranks, tuple(actions))


_RULES = (
    ScheduleRule("gpipe", "the simplest; every microbatch is held", gpipe),
    ScheduleRule("1f1b", "GPipe's time with few microbatches in flight", one_f_one_b),
    ScheduleRule(
        "1f1b_overlapped",
        "1F1B that hides slow links behind more warm-up",
        partial(one_f_one_b, overlapped=True),
    ),
    ScheduleRule("interleaved", "smaller bubble for more transfers", interleaved, 2, None),
    ScheduleRule(
        "looped_bfs",
        "smaller bubble and few exchanges of parameters; every microbatch is held",
        looped_bfs,
        2,
        None,
    ),
    ScheduleRule(
        "zero_bubble",
        "1F1B with parameters' gradients in the bubble (ZB-H1)",
        zero_bubble,
        splits_backward=True,
    ),
    ScheduleRule(
        "interleaved_zero_bubble",
        "interleaved with parameters' gradients in the bubble",
        zero_bubble,
        2,
        None,
        splits_backward=True,
    ),
    ScheduleRule(
        "zbv",
        "next to no bubble where passes take equal time",
        zbv,
        2,
        2,
        is_v_shaped=True,
        splits_backward=True,
    ),
)
SCHEDULES: Mapping[str, ScheduleRule] = MappingProxyType({rule.name: rule for rule in _RULES})
