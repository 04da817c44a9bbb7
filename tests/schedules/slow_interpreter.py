"""A schedule in the plainest way: ranks take turns, each runs what has all it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_topt.schedules.schedules import Schedule


def runs(schedule: Schedule, needs: Mapping[int, Sequence[int]] | None = None) -> bool:
    """Return whether every rank ends, and every pass ran once and with what it needs."""
    done: list[tuple[str, int, int]] = []
    stages = range(schedule.num_stages)
    sources = {stage: [stage - 1] if stage else [] for stage in stages} if needs is None else needs
    left = [list(actions) for actions in schedule.actions]
    while any(left):
        before = len(done)
        for rank, actions in enumerate(left):
            if not actions:
                continue
            kind, stage, index = (
                actions[0].kind,
                actions[0].stage_index,
                actions[0].microbatch_index,
            )
            if stage not in stages or schedule.rank_of_stage[stage] != rank:
                return False
            arrived = {
                (k[:8], s)
                for k, s, i in done
                if i == index and k not in ("backward_weight", "update")
            }
            if kind == "forward":
                missing = [s for s in sources.get(stage, ()) if ("forward", s) not in arrived]
            elif kind == "backward_weight":
                missing = [] if ("backward_input", stage, index) in done else [stage]
            elif kind == "update":
                missing = [] if _may_update(done, stage, index) else [stage]
            else:
                readers = [s for s in stages if stage in sources.get(s, ())]
                missing = [s for s in readers if ("backward", s) not in arrived]
                missing += [] if ("forward", stage, index) in done else [stage]
            if not missing:
                done.append((kind, stage, index))
                actions.pop(0)
        if len(done) == before:
            return False
    return _is_complete(schedule, done)


def _may_update(done: Sequence[tuple[str, int, int]], stage: int, index: int) -> bool:
    """Return whether the gradients since the last update are those of the microbatches after it, up
    to `index`.
    """
    updates = [place for place, (kind, s, _) in enumerate(done) if (kind, s) == ("update", stage)]
    since = done[updates[-1] :] if updates else done
    gradients = [
        i for kind, s, i in since if s == stage and kind in ("backward", "backward_weight")
    ]
    first = done[updates[-1]][2] + 1 if updates else 0
    return sorted(gradients) == list(range(first, index + 1)) and index >= first


def _is_complete(schedule: Schedule, done: list[tuple[str, int, int]]) -> bool:
    passes = {
        (stage, index)
        for stage in range(schedule.num_stages)
        for index in range(schedule.num_microbatches)
    }
    by_kind = {kind: [(s, i) for k, s, i in done if k == kind] for kind, _, _ in done}
    if any(
        len(found) != len(set(found)) or not passes.issuperset(found) for found in by_kind.values()
    ):
        return False
    whole, split = set(by_kind.get("backward", ())), set(by_kind.get("backward_input", ()))
    complete = set(by_kind.get("forward", ())) == passes and split == set(
        by_kind.get("backward_weight", ())
    )
    if updates := by_kind.get("update", []):
        last = schedule.num_microbatches - 1
        by_stage = [
            sorted(i for s, i in updates if s == stage) for stage in range(schedule.num_stages)
        ]
        complete = complete and all(
            each == by_stage[0] and each[-1:] == [last] for each in by_stage
        )
    return complete and not (whole & split) and (whole | split in (passes, set()))
