"""Seconds of a step in closed form: exact where that is said, else bounds between which the
simulated time lies.

Seconds are of one microbatch; N is the number of stages, one per rank; M that of microbatches; SR
the seconds of one hop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def equal_stages_seconds(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    forward: float,
    backward: float,
    transfer: float = 0.0,
) -> float:
    """Return the seconds of a step with N equal stages, transfers beside the passes; raises
    ValueError for other names.

    BaPipe (Zhao et al., arXiv 2012.12544) [recalled]: 1F1B-AS, ``(M + N - 1) (F + B)``, has no
    transfers; 1F1B-SNO, that of ``"1f1b"``, adds ``(N + M - 2 - ceil((M - 1) / N)) 2 SR``; 1F1B-SO,
    that of ``"1f1b_overlapped"``, adds ``(N - 1) 2 SR``. GPipe's time is that of 1F1B-SO. All equal
    the simulation: GPipe while ``SR <= min(F, B)``, 1F1B-SO while ``SR <= (F + B) / 2``, beyond
    which links are the bottleneck and the time is longer; 1F1B-SNO for any SR.
    """
    hops = {
        "1f1b": num_stages + num_microbatches - 2 - math.ceil((num_microbatches - 1) / num_stages),
        "1f1b_overlapped": num_stages - 1,
        "gpipe": num_stages - 1,
    }
    if name not in hops:
        raise ValueError(f"there is a formula for {', '.join(hops)}; simulate a step of {name!r}")
    return (num_microbatches + num_stages - 1) * (forward + backward) + hops[name] * 2 * transfer


def gpipe_seconds(
    forward: Sequence[float],
    *,
    backward: Sequence[float],
    num_microbatches: int,
    transfer: Sequence[float] = (),
    gradient_transfer: Sequence[float] | None = None,
) -> float:
    """Return the exact seconds of a step of GPipe with unequal stages and hops, (stages,) and
    (stages - 1,).

    Stages and links are machines of a flow shop with M equal jobs: the sum over all of them, and M
    - 1 times the largest. The last stage begins backward once its last forward ends, so forward and
    backward add up. Stages need the one before alone and transfers run beside the passes.
    """
    back = transfer if gradient_transfer is None else gradient_transfer
    return sum(
        sum(row) + (num_microbatches - 1) * max(row)
        for row in ([*forward, *transfer], [*backward, *back])
    )


def one_f_one_b_bounds(
    forward: Sequence[float],
    *,
    backward: Sequence[float],
    num_microbatches: int,
    transfer: Sequence[float] = (),
) -> tuple[float, float]:
    """Return a lower and an upper bound of a step of 1F1B or 1F1B with more warm-up, for unequal
    stages and hops.

    Lower: a stage runs all its passes after the first microbatch has come to it and before the last
    gradient has gone back from it, and one microbatch goes there and back through all stages.
    Upper: as if every stage, with its transfers before it goes on, were the slowest; longer passes
    never end a step earlier. Equal where stages are equal without transfers.
    """
    stages, hops = range(len(forward)), [*transfer, 0.0] if transfer else [0.0] * len(forward)
    way = [forward[stage] + backward[stage] + 2 * hops[stage] for stage in stages]
    work = [num_microbatches * (forward[stage] + backward[stage]) for stage in stages]
    lower = max(sum(way), *(sum(way[:stage]) + work[stage] for stage in stages))
    back = [0.0, *hops[:-1]]
    slowest = max(forward[s] + hops[s] for s in stages) + max(backward[s] + back[s] for s in stages)
    return lower, (num_microbatches + len(forward) - 1) * slowest
