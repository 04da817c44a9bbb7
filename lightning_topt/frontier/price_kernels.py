"""Compiled loops over all layers: prices, cheapest plans, and what crossing plans makes of them.

Plain loops on purpose: whole-array expressions are no faster here and take several times as long to
compile. Layers come flattened (`prices.Network`): `net` is (transition pointers, source, target,
value pointers, values, entry pointers, start, end, column pointers, kinds, group pointers).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_topt.basics.jit import kernel


@kernel
def _spread(
    net: Any, logs: Any, seconds: Any, size: Any, height: Any, mass: Any, flow: Any
) -> None:
    """Share weights of `seconds` and `size` over all ways through the columns, in proportion to exp
    of the sum of `logs`.
    """
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
            flow[e] = (
                mass[a] * np.exp(logs[e] + height[b] - height[a]) if height[b] > -np.inf else 0.0
            )
            mass[b] += flow[e]


@kernel
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


@kernel
def _walk(
    net: Any, choice: Any, row: int, plans: Any, costs: Any, logs: Any, rate: Any, states: Any
) -> None:
    """Follow the cheapest transitions into ``plans[row]`` and ``costs[row]``; its values raise the
    `logs` by `rate` (2,).
    """
    transitions, _, target, begin, values, entries, start, end, columns, kinds, groups = net
    g = 0
    states[0, 0] = states[0, 1] = 0.0
    for n in range(len(entries) - 1):
        j = choice[groups[n] + g]
        before, after, at = (
            n % 2,
            (n + 1) % 2,
            begin[n] + (j - transitions[n]) * (entries[n + 1] - entries[n]),
        )
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


@kernel
def maximise(
    net: Any,
    weights: Any,
    rates: Any,
    steps: int,
    masses: Any,
    flows: Any,
    potentials: Any,
    plans: Any,
    costs: Any,
) -> None:
    """Find, for each of `weights` (L, 2), shares over columns for which the cheapest plan is
    dearest, as far as `steps` find them.

    Multiplicative weights with `rates` (L, 2). Into `masses` (L, columns), `flows` (L, entries) and
    `potentials` (L, groups) go the best prices, into `plans` (L * steps, N) and `costs` (L * steps,
    2) all plans met.
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
                for e in range(len(flow)):
                    flows[i, e] = flow[e]
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
def _suffixes(net: Any, plan: Any, ahead: Any) -> None:
    """Into `ahead` (columns,) what every column still gains under `plan` (N,) from its boundary to
    the end.
    """
    _, _, _, begin, values, entries, start, end, columns, _, _ = net
    layers = len(entries) - 1
    for c in range(columns[layers + 1]):
        ahead[c] = 0.0 if c >= columns[layers] else -np.inf
    for n in range(layers - 1, -1, -1):
        at = begin[n] + plan[n] * (entries[n + 1] - entries[n]) - entries[n]
        for e in range(entries[n], entries[n + 1]):
            a = columns[n] + start[e]
            ahead[a] = max(ahead[a], values[at + e] + ahead[columns[n + 1] + end[e]])


@kernel
def _step(net: Any, n: int, transition: int, states: Any, before: int, after: int) -> None:
    _, _, _, begin, values, entries, start, end, columns, _, _ = net
    for c in range(columns[n + 2] - columns[n + 1]):
        states[after, c] = -np.inf
    at = begin[n] + transition * (entries[n + 1] - entries[n]) - entries[n]
    for e in range(entries[n], entries[n + 1]):
        states[after, end[e]] = max(
            states[after, end[e]], states[before, start[e]] + values[at + e]
        )


@kernel
def crossings(
    net: Any, leaving: Any, plan: Any, other: Any, seconds: Any, size: Any, found: Any, costs: Any
) -> int:
    """Write plans that begin as `plan` (N,), take any two transitions, and end as `other`, unless
    known ones beat them.

    `leaving` are the transitions by the group that they leave: pointers, and their numbers. Known
    plans have `seconds` ascending and `size` descending. Into `found` (room, 3) go the layer and
    its two transitions; returns how many were found. With two equal plans these are its changes in
    neighbouring layers.
    """
    transitions, _, target, _, _, entries, _, _, columns, kinds, groups = net
    begin, numbers = leaving
    ahead, states = np.empty(columns[-1]), np.empty((3, columns[-1]))
    _suffixes(net, other, ahead)
    states[0, 0] = states[0, 1] = 0.0
    count, g = 0, 0
    for n in range(len(entries) - 2):
        goal = target[transitions[n + 1] + other[n + 1]]
        for first in range(begin[groups[n] + g], begin[groups[n] + g + 1]):
            j = numbers[first] - transitions[n]
            _step(net, n, j, states, 0, 1)
            middle = groups[n + 1] + target[transitions[n] + j]
            for second in range(begin[middle], begin[middle + 1]):
                k = numbers[second] - transitions[n + 1]
                if target[numbers[second]] != goal:
                    continue
                _step(net, n + 1, k, states, 1, 2)
                total, peak = -np.inf, -np.inf
                for c in range(columns[n + 3] - columns[n + 2]):
                    value = states[2, c] + ahead[columns[n + 2] + c]
                    if kinds[columns[n + 2] + c] == 0:
                        total = max(total, value)
                    else:
                        peak = max(peak, value)
                low, high = 0, len(seconds)
                while low < high:
                    half = (low + high) // 2
                    if seconds[half] <= total:
                        low = half + 1
                    else:
                        high = half
                if (low == 0 or size[low - 1] > peak) and count < len(found):
                    found[count, 0], found[count, 1], found[count, 2] = n, j, k
                    costs[count, 0], costs[count, 1] = total, peak
                    count += 1
        _step(net, n, plan[n], states, 0, 1)
        for c in range(columns[n + 2] - columns[n + 1]):
            states[0, c] = states[1, c]
        g = target[transitions[n] + plan[n]]
    return count
