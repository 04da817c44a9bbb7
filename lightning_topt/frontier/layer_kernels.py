"""Compiled loops of the search over layers: prices, and partial plans of one layer.

Plain loops on purpose: whole-array expressions are no faster here and take several times as long to
compile. Loaded by `prices.layer_kernels` where work is large.

All layers come flattened (`prices.Network`): `net` is (transition pointers, source, target, value
pointers, values, entry pointers, start, end, column pointers, kinds, group pointers). One layer
comes as `layer` (see `extend`). States of a boundary, its partial plans, are (n, c) and sorted by
group; ``first[g]`` is the first one of group g.
"""

from __future__ import annotations

import numpy as np

from lightning_topt.basics.jit import kernel
from lightning_topt.frontier.pareto import Array, Rows

BLOCK = 16  # kept states that share a lower bound

# As above: all layers, flattened.
Net = tuple[Rows, Rows, Rows, Rows, Array, Rows, Rows, Rows, Rows, Rows, Rows]
# begin, source, values, start, end, lifts, lifted_by (see `extend`)
LayerArrays = tuple[Rows, Rows, Array, Rows, Rows, Rows, Array]


# ---- Over all layers: prices, and cheapest plans.


@kernel
def maximise(
    net: Net,
    weights: Array,
    rates: Array,
    steps: int,
    masses: Array,
    potentials: Array,
    plans: Rows,
    costs: Array,
) -> None:
    """Find shares over columns for which the cheapest plan is dearest.

    By multiplicative weights, for each of `weights` (L, 2), as far as `steps` with `rates` (L, 2)
    find them. The best prices go into `masses` (L, columns) and `potentials` (L, groups). All plans
    met go into `plans` (L * steps, N) and `costs` (L * steps, 2).
    """
    height, mass, flow, logs = (
        np.empty(net[8][-1]),
        np.empty(net[8][-1]),
        np.empty(net[5][-1]),
        np.empty(net[5][-1]),
    )
    potential, choice, states = (
        np.empty(net[10][-1]),
        np.zeros(net[10][-1], np.int64),
        np.empty((2, net[8][-1])),
    )
    # for each ratio of seconds to bytes, from shares that are all alike
    for i in range(len(weights)):
        best = -np.inf
        for e in range(len(logs)):
            logs[e] = 0.0
        for step in range(steps):
            # shares, the cheapest plan under them, and shares under which that plan is dearer
            _spread(net, logs, weights[i, 0], weights[i, 1], height, mass, flow)
            _cheapest(net, flow, potential, choice)
            if potential[0] > best:  # the dearest cheapest plan so far: keep its prices
                best = potential[0]
                for c in range(len(mass)):
                    masses[i, c] = mass[c]
                for g in range(len(potential)):
                    potentials[i, g] = potential[g]
            _walk(
                net,
                choice,
                i * steps + step,
                plans,
                costs,
                logs,
                rates[i] / np.sqrt(step + 1.0),
                states,
            )


@kernel
def _spread(
    net: Net, logs: Array, seconds: float, size: float, height: Array, mass: Array, flow: Array
) -> None:
    """Share weights of `seconds` and `size` over all ways through the columns.

    In proportion to exp of the sum of `logs` along a way: backwards the sums of all ways from a
    column (`height`), forwards what comes into each column (`mass`) and entry (`flow`).
    """
    _, _, _, _, _, entries, start, end, columns, _, _ = net
    layers = len(entries) - 1
    # backwards: the logarithm of the sum over all ways from each column to the end
    # columns behind the last layer are the end of every way
    for c in range(columns[layers + 1]):
        height[c] = 0.0 if c >= columns[layers] else -np.inf
        mass[c] = 0.0
    mass[0], mass[1] = seconds, size
    for n in range(layers - 1, -1, -1):
        for e in range(entries[n], entries[n + 1]):
            a, x = columns[n] + start[e], logs[e] + height[columns[n + 1] + end[e]]
            # the logarithm of a sum of exponentials, without overflow
            low, high = min(x, height[a]), max(x, height[a])
            height[a] = high + np.log1p(np.exp(low - high)) if low > -np.inf else high
    # forwards: what of both weights comes along each entry, and into each column
    for n in range(layers):
        for e in range(entries[n], entries[n + 1]):
            a, b = columns[n] + start[e], columns[n + 1] + end[e]
            flow[e] = (
                mass[a] * np.exp(logs[e] + height[b] - height[a]) if height[b] > -np.inf else 0.0
            )
            mass[b] += flow[e]


@kernel
def _cheapest(net: Net, flow: Array, potential: Array, choice: Rows) -> None:
    # Write the least price from every group to the end, and the transition it begins with
    transitions, source, target, begin, values, entries, _, _, _, _, groups = net
    layers = len(entries) - 1
    # backwards over groups
    for g in range(groups[layers + 1]):
        potential[g] = 0.0 if g >= groups[layers] else np.inf
    for n in range(layers - 1, -1, -1):
        count = entries[n + 1] - entries[n]
        for j in range(transitions[n], transitions[n + 1]):
            # where the values of transition j begin
            at = begin[n] + (j - transitions[n]) * count
            price = potential[groups[n + 1] + target[j]]
            for e in range(count):
                price += flow[entries[n] + e] * values[at + e]
            g = groups[n] + source[j]
            if price < potential[g]:
                potential[g], choice[g] = price, j


@kernel
def _walk(
    net: Net,
    choice: Rows,
    row: int,
    plans: Rows,
    costs: Array,
    logs: Array,
    rate: Array,
    states: Array,
) -> None:
    """Follow the cheapest transitions into ``plans[row]`` and ``costs[row]``.

    The plan's values raise the `logs` by `rate` (2,).
    """
    transitions, _, target, begin, values, entries, start, end, columns, kinds, groups = net
    g = 0
    states[0, 0] = states[0, 1] = 0.0
    for n in range(len(entries) - 1):
        j = choice[groups[n] + g]
        # two rows of `states` in turns: before the layer, and after it
        before, after, at = (
            n % 2,
            (n + 1) % 2,
            begin[n] + (j - transitions[n]) * (entries[n + 1] - entries[n]),
        )
        for c in range(columns[n + 2] - columns[n + 1]):
            states[after, c] = -np.inf
        for e in range(entries[n], entries[n + 1]):
            # a column is the largest of all that leads to it
            value = values[at + e - entries[n]]
            states[after, end[e]] = max(states[after, end[e]], states[before, start[e]] + value)
            logs[e] += rate[kinds[columns[n + 1] + end[e]]] * value
        # transitions are counted within their layer
        plans[row, n] = j - transitions[n]
        g = target[j]
    for c in range(2):
        costs[row, c] = states[(len(entries) - 1) % 2, c]


# ---- Over the partial plans of one layer.


@kernel
def extend(
    states: Array,
    first: Rows,
    layer: LayerArrays,
    bounds: tuple[Array, Array, Array],
    some: Rows,
    after_first: Rows,
    after: Array,
    parent: Rows,
    via: Rows,
) -> int:
    """Write the partial plans that transitions of one layer make and that are not hopeless.

    Args:
        states: (n, c) partial plans before the layer.
        first: (G + 1,) where those of each group begin.
        layer: transitions sorted by target: `begin` (G + 1,), `source`, `values` (T, E), `start`,
            `end`, `lifts` (.., 2), `lifted_by` (..,).
        bounds: mass (c, L), potential (G, L) and limits (Q, L) of the boundary after it; no limits
            to keep all.
        some: transitions from ``some[0]`` to ``some[1]`` are taken.
        after_first: as `first`, after the layer; is written.
        after: (room, c'), is written.
        parent: the state that each comes from; is written.
        via: the transition that each took; is written.

    Returns:
        How many were written.
    """
    begin, source, values, start, end, lifts, lifted_by = layer
    mass, potential, limits = bounds
    columns, size, hint = after.shape[1], 0, 0
    priced = np.empty(limits.shape[1])
    # transitions by the group that they lead to
    for g in range(len(begin) - 1):
        after_first[g] = size
        for j in range(max(begin[g], some[0]), min(begin[g + 1], some[1])):
            for k in range(first[source[j]], first[source[j] + 1]):
                # the columns after transition j
                for c in range(columns):
                    after[size, c] = -np.inf
                for e in range(len(start)):
                    after[size, end[e]] = max(
                        after[size, end[e]], states[k, start[e]] + values[j, e]
                    )
                # columns that may be set to more without deciding anything
                for e in range(len(lifted_by)):
                    after[size, lifts[e, 0]] = max(
                        after[size, lifts[e, 0]], after[size, lifts[e, 1]] + lifted_by[e]
                    )
                # drop what is hopeless
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
    states: Array,
    first: Rows,
    order: Rows,
    held: Array,
    floor: Array,
    kept: Rows,
    counts: Rows,
    most: int,
) -> None:
    """Write into `kept` which of `states` (n, c) no other one of their group beats.

    Into ``counts[1:]`` goes how many of each group. In `order`, which has group after group, who
    beats comes first. Each is compared with at most `most` blocks of those kept, and with the last
    one, where its equals are.
    """
    columns, done = states.shape[1], 0
    for g in range(len(first) - 1):
        size, killer = 0, 0
        for k in order[first[g] : first[g + 1]]:
            beaten = False
            blocks = (size + BLOCK - 1) // BLOCK
            # first the last block, and the one that beat the state before; then all from the first
            for step in range(-2, min(blocks, most)):
                block = step if step >= 0 else (killer if step == -1 else blocks - 1)
                # a block can only beat the state if its least is no more in every column
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
                # kept: in a new block, or in the last one, whose least it may lower
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
    states: Array,
    first: Rows,
    mass: Array,
    potential: Array,
    limits: Array,
    kept: Rows,
    counts: Rows,
) -> None:
    """Write into `kept` which of `states` (n, c) may become better than known plans.

    Into ``counts[1:]`` goes how many of each group.
    """
    priced = np.empty(mass.shape[1])
    size, hint = 0, 0
    for g in range(len(first) - 1):
        before = size
        for k in range(first[g], first[g + 1]):
            # what the cheapest completion of the state costs, under each price
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
def gains(
    states: Array, group: Rows, mass: Array, potential: Array, limits: Array, found: Array
) -> None:
    """Write into `found` (n,) by how much each state could still beat the known plans, at most.

    That is the largest over corners of the least over prices of ``limit / price - 1``; infinite
    where prices are not positive. `potential` (G, L) is that of the states' boundary.
    """
    priced = np.empty(mass.shape[1])
    for k in range(len(states)):
        # the same here
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
                # no better than a corner before
                if least <= best:
                    break
            best = max(best, least)
        found[k] = best


@kernel
def _hopeful(priced: Array, limits: Array, hint: int) -> int:
    """Return a corner of `limits` (Q, L) that prices (L,) do not exclude, -1 for none.

    Prices exclude a corner where one of them is not below its limit. Corner `hint` is tried first.
    """
    i = 0  # the price that excluded the last corner is the first to be tried
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
