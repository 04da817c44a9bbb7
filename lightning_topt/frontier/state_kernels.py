"""Compiled loops over the partial plans of one layer.

States of a boundary (n, c) are sorted by group; ``first[g]`` is the first one of group g.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import kernel

BLOCK = 16  # kept states that share a lower bound


@kernel
def _hopeful(priced: Any, limits: Any, hint: int) -> int:
    """A corner of `limits` (Q, L) below which prices (L,) do not exclude an end, -1 for none;
    `hint` is tried first.
    """
    i = 0
    for k in range(-1, len(limits)):
        q = hint if k < 0 else k
        if priced[i] < limits[q, i]:
            found = True
            for other in range(len(priced)):
                if priced[other] >= limits[q, other]:
                    i, found = other, False
                    break
            if found:
                return q
    return -1


@kernel
def gains(states: Any, group: Any, mass: Any, potential: Any, limits: Any, found: Any) -> None:
    """Write into `found` (n,) the largest over corners of the least over prices of ``limit / price
    - 1``: what could be gained.

    Infinite where prices are not positive. `potential` (G, L) is that of the states' boundary.
    """
    priced = np.empty(mass.shape[1])
    for k in range(len(states)):
        for i in range(len(priced)):
            priced[i] = potential[group[k], i]
        for c in range(states.shape[1]):
            for i in range(len(priced)):
                priced[i] += mass[c, i] * states[k, c]
        best, last = -1.0, 0
        for q in range(len(limits)):
            least = np.inf
            for step in range(-1, len(priced)):
                i = last if step < 0 else step  # what excluded the corner before
                if priced[i] > 0.0 and limits[q, i] / priced[i] - 1.0 < least:
                    least, last = limits[q, i] / priced[i] - 1.0, i
                if least <= best:
                    break
            best = max(best, least)
        found[k] = best


@kernel
def extend(
    states: Any,
    first: Any,
    layer: Any,
    bounds: Any,
    some: Any,
    after_first: Any,
    after: Any,
    parent: Any,
    via: Any,
) -> int:
    """Write the partial plans that transitions from ``some[0]`` to ``some[1]`` make and that are
    not hopeless; how many.

    `layer`: transitions sorted by target `begin` (G + 1,), `source`, `values` (T, E), `start`,
    `end`, `lifts` (.., 2), `lifted_by` (..,). `bounds`: mass (c, L), potential (G, L), limits (Q,
    L), none to keep all.
    """
    begin, source, values, start, end, lifts, lifted_by = layer
    mass, potential, limits = bounds
    columns, size, hint = after.shape[1], 0, 0
    priced = np.empty(limits.shape[1])
    for g in range(len(begin) - 1):
        after_first[g] = size
        for j in range(max(begin[g], some[0]), min(begin[g + 1], some[1])):
            for k in range(first[source[j]], first[source[j] + 1]):
                for c in range(columns):
                    after[size, c] = -np.inf
                for e in range(len(start)):
                    after[size, end[e]] = max(
                        after[size, end[e]], states[k, start[e]] + values[j, e]
                    )
                for e in range(len(lifted_by)):
                    after[size, lifts[e, 0]] = max(
                        after[size, lifts[e, 0]], after[size, lifts[e, 1]] + lifted_by[e]
                    )
                if len(limits):
                    for i in range(len(priced)):
                        priced[i] = potential[g, i]
                    for c in range(columns):
                        for i in range(len(priced)):
                            priced[i] += mass[c, i] * after[size, c]
                    q = _hopeful(priced, limits, hint)
                    if q < 0:
                        continue
                    hint = q
                parent[size], via[size] = k, j
                size += 1
    after_first[len(begin) - 1] = size
    return size


@kernel
def minimal(
    states: Any, first: Any, order: Any, held: Any, floor: Any, kept: Any, counts: Any, most: int
) -> None:
    """Write into `kept` which of `states` (n, c) no other one of their group beats, and into
    ``counts[1:]`` how many of each.

    In `order`, which has group after group, who beats comes first. Each is compared with at most
    `most` blocks of those kept, and with the last one, where its equals are.
    """
    columns, done = states.shape[1], 0
    for g in range(len(first) - 1):
        size, killer = 0, 0
        for k in order[first[g] : first[g + 1]]:
            beaten = False
            blocks = (size + BLOCK - 1) // BLOCK
            for step in range(-2, min(blocks, most)):
                block = step if step >= 0 else (killer if step == -1 else blocks - 1)
                possible = 0 <= block < blocks
                for c in range(columns):
                    possible = possible and floor[block, c] <= states[k, c]
                if not possible:
                    continue
                for other in range(block * BLOCK, min(size, (block + 1) * BLOCK)):
                    beaten = True
                    for c in range(columns):
                        beaten = beaten and held[other, c] <= states[k, c]
                    if beaten:
                        break
                if beaten:
                    killer = block
                    break
            if not beaten:
                block = size // BLOCK
                for c in range(columns):
                    held[size, c] = states[k, c]
                    floor[block, c] = (
                        min(floor[block, c], states[k, c]) if size % BLOCK else states[k, c]
                    )
                kept[done + size] = k
                size += 1
        done += size
        counts[g + 1] = size


@kernel
def hopeful(
    states: Any, first: Any, mass: Any, potential: Any, limits: Any, kept: Any, counts: Any
) -> None:
    """Write into `kept` which of `states` (n, c) may become better than known plans, and into
    ``counts[1:]`` how many of each group.
    """
    priced = np.empty(mass.shape[1])
    size, hint = 0, 0
    for g in range(len(first) - 1):
        before = size
        for k in range(first[g], first[g + 1]):
            for i in range(len(priced)):
                priced[i] = potential[g, i]
            for c in range(states.shape[1]):
                for i in range(len(priced)):
                    priced[i] += mass[c, i] * states[k, c]
            q = _hopeful(priced, limits, hint)
            if q >= 0:
                kept[size] = k
                size += 1
                hint = q
        counts[g + 1] = size - before


@kernel
def extend_pairs(
    states: Any, first: Any, layer: Any, group: int, best: Any, after: Any, parent: Any, via: Any
) -> int:
    """Do `extend` for one group and two columns, (seconds, bytes), without most beaten ones; -1
    where there is no room.

    A first pass keeps the least seconds of every bin of bytes in `best` (bins + 1,), a second one
    what beats all bins before.
    """
    begin, source, values, _, _, _, _ = layer
    bins, low, high, size = len(best) - 1, np.inf, -np.inf, 0
    for j in range(begin[group], begin[group + 1]):
        a, b = first[source[j]], first[source[j] + 1]
        if a < b:  # by bytes ascending
            low, high = (
                min(low, states[a, 1] + values[j, 1]),
                max(high, states[b - 1, 1] + values[j, 1]),
            )
    scale = (bins - 1) / (high - low) if high > low else 0.0
    for b in range(bins + 1):
        best[b] = np.inf
    for j in range(begin[group], begin[group + 1]):
        seconds, offset = values[j, 0], values[j, 1] - low
        for k in range(first[source[j]], first[source[j] + 1]):
            b = np.int64((states[k, 1] + offset) * scale) + 1
            best[b] = min(best[b], states[k, 0] + seconds)
    for b in range(1, bins + 1):
        best[b] = min(best[b], best[b - 1])
    for j in range(begin[group], begin[group + 1]):
        seconds, offset = values[j, 0], values[j, 1] - low
        for k in range(first[source[j]], first[source[j] + 1]):
            if states[k, 0] + seconds < best[np.int64((states[k, 1] + offset) * scale)]:
                if size == len(parent):
                    return -1
                after[size, 0], after[size, 1] = states[k, 0] + seconds, states[k, 1] + values[j, 1]
                parent[size], via[size] = k, j
                size += 1
    return size


@kernel
def join(
    states: Any, others: Any, some: Any, kinds: Any, seconds: Any, size: Any, found: Any, costs: Any
) -> Any:
    """Write the pairs of ``states[some[0] : some[1]]`` and ``others[some[2] : some[3]]`` that known
    plans do not beat.

    Columns add up; the largest of each of `kinds` (c,) are the seconds and bytes. Known plans have
    `seconds` ascending and `size` descending. Returns how many were written to `found` (room, 2)
    and `costs` (room, 2), and the state to go on with.
    """
    count, columns = 0, len(kinds)
    for i in range(some[0], some[1]):
        if count + some[3] - some[2] > len(found):
            return count, i
        for j in range(some[2], some[3]):
            total = -np.inf
            for c in range(columns):
                if kinds[c] == 0:
                    total = max(total, states[i, c] + others[j, c])
            low, high = 0, len(seconds)
            while low < high:
                middle = (low + high) // 2
                if seconds[middle] <= total:
                    low = middle + 1
                else:
                    high = middle
            limit, peak = size[low - 1] if low else np.inf, -np.inf
            for c in range(columns):
                if kinds[c] == 1:
                    peak = max(peak, states[i, c] + others[j, c])
            if peak < limit:
                found[count, 0], found[count, 1] = i, j
                costs[count, 0], costs[count, 1] = total, peak
                count += 1
    return count, some[1]
