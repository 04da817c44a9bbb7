"""Advice on the exchange of gradients: parameter servers, compression, a transport that may lose
some.

    equation                                   function              source
    N_ps >= ceil(2 S_p N_w / (B_ps T_C))       parameter_servers     Zou et al. 2017
    gain = T(whole) / T(compressed) - 1        advise_compression    costs/exchange_work.py
    gain <= T / (T - x (1 - 1 / q)) - 1        advise_bounded_loss   derived: as if all were as fast
                                                                     as the median

S_p bytes of parameters, N_w workers, B_ps bytes/s of a server's network, T_C seconds of computation
of a step, x seconds of exchange that nothing hides, q how many times the median the slowest message
takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_topt.costs.cluster import Cluster
from lightning_topt.plan.advice_page import MODEL, ZOU, Advice
from lightning_topt.plan.advice_scale import compute_seconds
from lightning_topt.plan.choose import TIME_ERROR
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.scenarios import Estimate

_WORTH = 0.1  # gain per step: less is within the error of predictions


def parameter_servers(
    parameter_bytes: float, *, workers: int, bandwidth: float, compute: float
) -> int:
    """Return how many parameter servers keep up with `workers` workers that send and fetch
    everything once per step.
    """
    return math.ceil(2 * parameter_bytes * workers / (bandwidth * compute))


def advise_servers(at: Estimate, *, parameter_bytes: float) -> Advice:
    """Return how many parameter servers the plan's workers would need; this package has none, rings
    take their place.
    """
    cluster, plan = at.scenario.cluster, at.point.plan
    bandwidth, compute = server_bandwidth(cluster), compute_seconds(at)
    workers = plan.data_parallel_size
    count = parameter_servers(
        parameter_bytes, workers=workers, bandwidth=bandwidth, compute=compute
    )
    return Advice(
        "parameter servers",
        f"{count} server(s) would hide the exchange of {workers} worker(s) behind computation. For "
        "the record: here gradients "
        "are exchanged by all-reduce, in which every rank serves.",
        float(count),
        "servers",
        "N_ps >= ceil(2 S_p N_w / (B_ps T_C))",
        {"S_p": parameter_bytes, "N_w": workers, "B_ps": bandwidth, "T_C": compute},
        f"{ZOU} (recalled); B_ps: the network of a node",
    )


def server_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second of a node's network, that inside the node where there is one
    node.
    """
    link = cluster.inter or cluster.intra
    return link.bandwidth * (cluster.devices_per_node if cluster.inter else 1)


def advise_compression(points: Sequence[PlanPoint], *, at: Estimate, why_none: str = "") -> Advice:
    """Return whether a compressed exchange is worth allowing; `points` are plans with whole
    gradients, compressed or not, that fit into memory, and `why_none` says why there are none.
    """
    fastest: dict[str, PlanPoint] = {}
    for point in points:
        exchange = point.plan.gradient_exchange
        name = "all-reduce" if exchange is None else exchange.words
        if name not in fastest or point.step_seconds < fastest[name].step_seconds:
            fastest[name] = point
    base = at.point.step_seconds
    if not fastest:
        return Advice(
            "compression", f"A compressed exchange cannot help here: {why_none}.", source=MODEL
        )
    rows = [
        {
            "exchange": name,
            "seconds per step": each.step_seconds,
            "gain over the plan": base / each.step_seconds - 1,
        }
        for name, each in sorted(fastest.items(), key=lambda item: item[1].step_seconds)
    ]
    best = min(
        (name for name in fastest if name != "all-reduce"),
        key=lambda n: fastest[n].step_seconds,
        default=None,
    )
    gain = 0.0 if best is None else base / fastest[best].step_seconds - 1
    if best is not None and gain > _WORTH:
        sentence = (
            f"{best} would be worth allowing (strategy.allow_compression=true): {100 * gain:.0f} % "
            "more steps per second than "
            "the plan without; it changes the training."
        )
    else:
        sentence = (
            f"Not worth allowing: the best compressed exchange brings {100 * gain:.0f} % over the "
            "plan without, and times may "
            f"be off by {100 * TIME_ERROR:.0f} %."
        )
    formula = "gain = T(plan) / T(fastest plan with the exchange) - 1"
    inputs: Mapping[str, object] = {"T(plan)": base, "worth it from": _WORTH}
    return Advice(
        "compression", sentence, gain, "of the steps per second", formula, inputs, MODEL, rows
    )


def advise_bounded_loss(at: Estimate, *, tail: float | None) -> Advice:
    """Return what a transport that may lose part of the gradients could bring; `tail`: the slowest
    message of an exchange over the median one, None: not measured.
    """
    predicted = at.point.plan.predicted
    assert predicted is not None
    exposed, step = predicted.exposed_communication_seconds, at.point.step_seconds
    if at.point.plan.schedule is not None:
        exposed = 0.0  # in a pipeline these are waits for stages, not for gradients
    source = "derived; the idea: DLCP, arXiv 2008.08445, and MLT, NSDI 2024"
    formula = "gain <= T / (T - x (1 - 1 / q)) - 1"
    inputs: dict[str, object] = {"T": step, "x": exposed, "q": tail}
    if tail is None:
        most = step / max(step - exposed, 1e-12) - 1
        return Advice(
            "bounded loss",
            f"At most {100 * most:.0f} % more steps per second, if an exchange took no time at "
            "all; what it would bring "
            "follows from how much slower the slowest messages are (exchange_tail=, the 99th "
            "percentile over the median).",
            most,
            "of the steps per second",
            formula,
            inputs,
            source,
        )
    gain = step / max(step - exposed * (1 - 1 / tail), 1e-12) - 1
    worth = (
        "worth allowing (strategy.allow_compression=[bounded_loss])"
        if gain > _WORTH
        else "not worth it"
    )
    sentence = f"At most {100 * gain:.0f} % more steps per second: {worth}."
    return Advice(
        "bounded loss", sentence, gain, "of the steps per second", formula, inputs, source
    )
