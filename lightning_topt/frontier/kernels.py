"""The search's inner loops, compiled by Numba without the GIL and kept on disk: a few seconds once, loaded where work is large.

Plain loops on purpose: whole-array expressions are no faster here and take several times as long to compile. Layers come
flattened (`network.flatten`): `net` is (transition pointers, source, target, value pointers, values, entry pointers, start,
end, column pointers, kinds, group pointers). States of a boundary are sorted by group; ``first[g]`` is the first one of g.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_BLOCK = 16  # kept states that share a lower bound


def _kernel(function: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    except RuntimeError:  # no place to write a cache to: compiled anew in each process
        return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


# ---- prices ---------------------------------------------------------------------------------------------------------


@_kernel
def _spread(net: Any, logs: Any, seconds: Any, size: Any, height: Any, mass: Any, flow: Any) -> None:
    """Share weights of `seconds` and `size` over all ways through the columns, in proportion to exp of the sum of `logs`."""
    _, _, _, _, _, entries, start, end, columns, _, _ = net
    layers = len(entries) - 1
    for c in range(columns[layers + 1]):
        height[c] = 0.0 if c >= columns[layers] else -np.inf
        mass[c] = 0.0
    mass[0], mass[1] = seconds, size
    for n in range(layers - 1, -1, -1):
        for e in range(entries[n], entries[n + 1]):
            a, x = columns[n] + start[e], logs[e] + height[columns[n + 1] + end[e]]
            low, high = min(x, height[a]), max(x, height[a])
            height[a] = high + np.log1p(np.exp(low - high)) if low > -np.inf else high
    for n in range(layers):
        for e in range(entries[n], entries[n + 1]):
            a, b = columns[n] + start[e], columns[n + 1] + end[e]
            flow[e] = mass[a] * np.exp(logs[e] + height[b] - height[a]) if height[b] > -np.inf else 0.0
            mass[b] += flow[e]


@_kernel
def _cheapest(net: Any, flow: Any, potential: Any, choice: Any) -> None:
    """The least price from every group to the end, and the transition that it begins with."""
    transitions, source, target, begin, values, entries, _, _, _, _, groups = net
    layers = len(entries) - 1
    for g in range(groups[layers + 1]):
        potential[g] = 0.0 if g >= groups[layers] else np.inf
    for n in range(layers - 1, -1, -1):
        count = entries[n + 1] - entries[n]
        for j in range(transitions[n], transitions[n + 1]):
            at = begin[n] + (j - transitions[n]) * count
            price = potential[groups[n + 1] + target[j]]
            for e in range(count):
                price += flow[entries[n] + e] * values[at + e]
            g = groups[n] + source[j]
            if price < potential[g]:
                potential[g], choice[g] = price, j


@_kernel
def _walk(net: Any, choice: Any, row: int, plans: Any, costs: Any, logs: Any, rate: Any, states: Any) -> None:
    """Follow the cheapest transitions into ``plans[row]`` and ``costs[row]``; its values raise the `logs` by `rate` (2,)."""
    transitions, _, target, begin, values, entries, start, end, columns, kinds, groups = net
    g = 0
    states[0, 0] = states[0, 1] = 0.0
    for n in range(len(entries) - 1):
        j = choice[groups[n] + g]
        before, after, at = n % 2, (n + 1) % 2, begin[n] + (j - transitions[n]) * (entries[n + 1] - entries[n])
        for c in range(columns[n + 2] - columns[n + 1]):
            states[after, c] = -np.inf
        for e in range(entries[n], entries[n + 1]):
            value = values[at + e - entries[n]]
            states[after, end[e]] = max(states[after, end[e]], states[before, start[e]] + value)
            logs[e] += rate[kinds[columns[n + 1] + end[e]]] * value
        plans[row, n] = j - transitions[n]
        g = target[j]
    for c in range(2):
        costs[row, c] = states[(len(entries) - 1) % 2, c]


@_kernel
def maximise(
    net: Any, weights: Any, rates: Any, steps: int, masses: Any, potentials: Any, plans: Any, costs: Any
) -> None:
    """For each of `weights` (L, 2), shares over columns for which the cheapest plan is dearest, as far as `steps` find them.

    Multiplicative weights with `rates` (L, 2). Into `masses` (L, columns) and `potentials` (L, groups) go the best prices,
    into `plans` (L * steps, N) and `costs` (L * steps, 2) all plans met.
    """
    height, mass, flow, logs = np.empty(net[8][-1]), np.empty(net[8][-1]), np.empty(net[5][-1]), np.empty(net[5][-1])
    potential, choice, states = np.empty(net[10][-1]), np.zeros(net[10][-1], np.int64), np.empty((2, net[8][-1]))
    for i in range(len(weights)):
        best = -np.inf
        for e in range(len(logs)):
            logs[e] = 0.0
        for step in range(steps):
            _spread(net, logs, weights[i, 0], weights[i, 1], height, mass, flow)
            _cheapest(net, flow, potential, choice)
            if potential[0] > best:
                best = potential[0]
                for c in range(len(mass)):
                    masses[i, c] = mass[c]
                for g in range(len(potential)):
                    potentials[i, g] = potential[g]
            _walk(net, choice, i * steps + step, plans, costs, logs, rates[i] / np.sqrt(step + 1.0), states)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@_kernel
def _hopeful(priced: Any, limits: Any, hint: int) -> int:
    """A corner of `limits` (Q, L) below which prices (L,) do not exclude an end, -1 for none; `hint` is tried first."""
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


@_kernel
def gains(states: Any, group: Any, mass: Any, potential: Any, limits: Any, found: Any) -> None:
    """Into `found` (n,) the largest over corners of the least over prices of ``limit / price - 1``: what could be gained.

    Infinite where prices are not positive. `potential` (G, L) is that of the states' boundary.
    """
    priced = np.empty(mass.shape[1])
    for k in range(len(states)):
        for i in range(len(priced)):
            priced[i] = potential[group[k], i]
        for c in range(states.shape[1]):
            for i in range(len(priced)):
                priced[i] += mass[c, i] * states[k, c]
        best = -1.0
        for q in range(len(limits)):
            least = np.inf
            for i in range(len(priced)):
                if priced[i] > 0.0:
                    least = min(least, limits[q, i] / priced[i] - 1.0)
                if least <= best:
                    break
            best = max(best, least)
        found[k] = best


# ---- layers ---------------------------------------------------------------------------------------------------------


@_kernel
def extend(
    states: Any, first: Any, layer: Any, bounds: Any, some: Any, after_first: Any, after: Any, parent: Any, via: Any
) -> int:
    """Write the partial plans that transitions from ``some[0]`` to ``some[1]`` make and that are not hopeless; how many.

    `layer`: transitions sorted by target `begin` (G + 1,), `source`, `values` (T, E), `start`, `end`, `lifts` (.., 2),
    `lifted_by` (..,). `bounds`: mass (c, L), potential (G, L), limits (Q, L), none to keep all.
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
                    after[size, end[e]] = max(after[size, end[e]], states[k, start[e]] + values[j, e])
                for e in range(len(lifted_by)):
                    after[size, lifts[e, 0]] = max(after[size, lifts[e, 0]], after[size, lifts[e, 1]] + lifted_by[e])
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


@_kernel
def minimal(states: Any, order: Any, held: Any, floor: Any, kept: Any, most: int) -> int:
    """Write into `kept` which of `states` (n, c) no other one beats; returns how many. In `order` who beats comes first.

    Each is compared with at most `most` blocks of those kept, and with the last one, where its equals are.
    """
    columns, size, killer = states.shape[1], 0, 0
    for k in order:
        beaten = False
        blocks = (size + _BLOCK - 1) // _BLOCK
        for step in range(-2, min(blocks, most)):
            block = step if step >= 0 else (killer if step == -1 else blocks - 1)
            possible = 0 <= block < blocks
            for c in range(columns):
                possible = possible and floor[block, c] <= states[k, c]
            if not possible:
                continue
            for other in range(block * _BLOCK, min(size, (block + 1) * _BLOCK)):
                beaten = True
                for c in range(columns):
                    beaten = beaten and held[other, c] <= states[k, c]
                if beaten:
                    break
            if beaten:
                killer = block
                break
        if not beaten:
            block = size // _BLOCK
            for c in range(columns):
                held[size, c] = states[k, c]
                floor[block, c] = min(floor[block, c], states[k, c]) if size % _BLOCK else states[k, c]
            kept[size] = k
            size += 1
    return size


@_kernel
def hopeful(states: Any, group: int, mass: Any, potential: Any, limits: Any, kept: Any) -> int:
    """Write into `kept` which of `states` (n, c) of a group may become better than known plans; returns how many."""
    priced = np.empty(mass.shape[1])
    size, hint = 0, 0
    for k in range(len(states)):
        for i in range(len(priced)):
            priced[i] = potential[group, i]
        for c in range(states.shape[1]):
            for i in range(len(priced)):
                priced[i] += mass[c, i] * states[k, c]
        q = _hopeful(priced, limits, hint)
        if q >= 0:
            kept[size] = k
            size += 1
            hint = q
    return size


@_kernel
def extend_pairs(states: Any, first: Any, layer: Any, group: int, best: Any, after: Any, parent: Any, via: Any) -> int:
    """`extend` for one group and two columns, (seconds, bytes), without most beaten ones; -1 where there is no room.

    A first pass keeps the least seconds of every bin of bytes in `best` (bins + 1,), a second one what beats all bins before.
    """
    begin, source, values, _, _, _, _ = layer
    bins, low, high, size = len(best) - 1, np.inf, -np.inf, 0
    for j in range(begin[group], begin[group + 1]):
        a, b = first[source[j]], first[source[j] + 1]
        if a < b:  # by bytes ascending
            low, high = min(low, states[a, 1] + values[j, 1]), max(high, states[b - 1, 1] + values[j, 1])
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
