"""Comparison of what ranks were seen to hold and call with what was said of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_topt.basics.units import format_bytes
from lightning_topt.execution.collective_rows import PASSES, CollectiveRow, differences_of_rows
from lightning_topt.execution.held_bytes import KINDS
from lightning_topt.execution.observed_step import Observation
from lightning_topt.execution.verify_plan import Verification
from lightning_topt.techniques.technique import has_whole_gradients

_SHOWN = 3  # of each kind


def with_observations(
    verification: Verification, seen: Iterable[Observation], *, where: str
) -> Verification:
    """Return `verification` with what was `seen` of ranks `where` (words): differences are
    problems, or notes.

    It is a problem that a rank holds more than was said, or calls other collectives; that it holds
    less is a note, and that DDP packs the same gradients into another number of buckets: that
    depends on the order in which they become ready. Collectives along tensor axes are added to what
    is said, where it has none.
    """
    seen = list(seen)
    verification = _with_tensor_rows(verification, seen[0])
    more: list[str] = []
    less: list[str] = []
    calls: list[str] = []
    buckets: list[str] = []
    for each in seen:
        for block, kind, said, found in _differing(verification, each):
            text = f"{kind.replace('_', ' ')} of block {block!r}, {format_bytes(said)} expected"
            if found > said:
                more.append(
                    f"rank {each.rank} {where} holds {found - said:,} bytes more than said: {text}"
                )
            else:
                less.append(
                    f"rank {each.rank} {where} holds {said - found:,} bytes less than said: {text}"
                )
        if verification.plan.gradient_exchange is None and verification.plan.schedule is None:
            different, repacked = _differences(verification, each)
            calls += [
                f"rank {each.rank} {where} calls other collectives: {text}" for text in different
            ]
            buckets += [f"rank {each.rank} {where} has other buckets: {text}" for text in repacked]
    problems, notes = (
        [*_shortened(more), *_shortened(calls)],
        [*_shortened(less), *_shortened(buckets)],
    )
    if verification.plan.gradient_exchange is not None:
        notes.append(
            f"the gradient exchange works in a thread of its own, so what ranks {where} call was "
            "not compared"
        )
    if verification.plan.schedule is not None:
        notes.append(f"what ranks {where} call and send was not compared: the plan has stages")
    if not problems:
        ranks = f"rank {seen[0].rank}" if len(seen) == 1 else f"all {len(seen)} ranks"
        notes.append(
            f"{ranks} {where} took a step and did what is said here"
            if not notes
            else f"{ranks} {where} took a step"
        )
    return replace(
        verification,
        problems=(*verification.problems, *problems),
        notes=(*verification.notes, *notes),
    )


def _with_tensor_rows(verification: Verification, seen: Observation) -> Verification:
    mesh = verification.plan.mesh
    names = {mesh.names[axis] for axis in mesh.tensor_axes}

    def along_tensor_axes(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
        return [row for row in rows if names & set(row.axis.split(" x "))]

    known = {row.key for row in verification.collectives}
    if along_tensor_axes(verification.collectives) and not verification.plan.joint:
        return verification
    # Beside joint modules gradients travel along tensor axes too, which is known.
    rows = [
        *verification.collectives,
        *(row for row in along_tensor_axes(seen.collectives) if row.key not in known),
    ]
    return replace(
        verification, collectives=tuple(sorted(rows, key=lambda row: PASSES.index(row.during)))
    )


def _differences(verification: Verification, seen: Observation) -> tuple[list[str], list[str]]:
    """Sentences for collectives that differ, and for those that are only packed into other
    buckets.
    """
    said = {row.key: row for row in verification.collectives}
    packed = [
        row
        for row in seen.collectives
        if (row.during, row.op) == ("backward", "all_reduce")
        and row.key in said
        and said[row.key].nbytes == row.nbytes
        and any(has_whole_gradients(block.config) for block in verification.plan.blocks)
    ]
    repacked = differences_of_rows([said[row.key] for row in packed], packed)
    rest = [said[row.key] if row in packed else row for row in seen.collectives]
    return differences_of_rows(verification.collectives, rest), repacked


def _differing(
    verification: Verification, seen: Observation
) -> Iterator[tuple[str, str, int, int]]:
    """Block, kind, bytes said, bytes found."""
    for block, sizes in verification.held.items():
        for kind, said, found in zip(
            KINDS, sizes[seen.rank].tolist(), seen.held[block], strict=True
        ):
            if said != found and (verification.knows_state or kind != "optimizer_state"):
                yield block, kind, said, found


def _shortened(sentences: list[str]) -> list[str]:
    hidden = len(sentences) - _SHOWN
    return (
        sentences
        if hidden <= 0
        else [*sentences[:_SHOWN], f"and {hidden} more differences of this kind"]
    )
