"""Advice: a number with its formula, what went into it and its source; on batch, devices, exchange.

    advice = [*advise_batch(found), *advise_devices(found, at=chosen, wanted=0.8)]
    save_advice(folder, advice, title="Advice")         # advice.md and advice.json

`plan.advice_bottlenecks` has more, on resources of the machines and on data.

    equation                                     function             source
    argmax over B of B / T(B)                    advise_batch         Zou et al. 2017, section 3
    time to a loss ~ T(B) (1 + N / B)            advise_batch         McCandlish et al. 2018,
                                                                      arXiv 1812.06162
    alpha = (1 + R) / (1 + G R), R = T_o / T_c   efficiency           Zou et al. 2017
    G <= (1 + R - alpha) / (alpha R)             most_devices         solved for G
    R <= (1 - alpha) / (alpha G - 1)             largest_overhead     solved for R
    N_ps >= ceil(2 S_p N_w / (B_ps T_C))         parameter_servers    Zou et al. 2017
    gain = T(whole) / T(compressed) - 1          advise_compression   costs/exchange_work.py
    gain <= T / (T - x (1 - 1 / q)) - 1          advise_bounded_loss  derived: as if all messages
                                                                      were as fast as the median

B: samples of a step; T(B): its seconds; N: the gradient noise scale in samples; G: devices; T_c:
seconds of computation of the whole batch on one device; T_o: those in which a device does not
compute; S_p: bytes of parameters; N_w: workers; B_ps: bytes/s of a server's network; T_C: seconds
of computation of a step; x: seconds of exchange that nothing hides; q: how many times the median
the slowest message takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_topt.costs.cluster import Cluster
from lightning_topt.plan.choose import errors_of
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.scenarios import Estimate

SCHEMA_VERSION = 1
ZOU = "Zou et al., Distributed Training Large-Scale Deep Architectures, arXiv 1709.06622"
MODEL = "the cost model of this package (docs/concepts/cost_model.md)"
_NOISE = "McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162"
NEARLY = 0.05  # fewer samples per second than the best: not worth a larger batch


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Args:
        topic: of what, such as ``"batch size"``.
        advice: one sentence for people.
        value: the number it is about; None where there is none, and `advice` says what is missing.
        unit: of the value.
        formula: how the value follows from `inputs`.
        inputs: names and values.
        source: of the formula.
        table: rows with equal keys that show more than the one value.
    """

    topic: str
    advice: str
    value: float | None = None
    unit: str = ""
    formula: str = ""
    inputs: Mapping[str, object] = field(default_factory=dict)
    source: str = ""
    table: Sequence[Mapping[str, object]] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; an infinite number is None."""
        plain = {
            # JSON has no infinity: in the value, the inputs and the table it is null
            **vars(self),
            "value": _finite(self.value),
            "inputs": {k: _finite(v) for k, v in self.inputs.items()},
        }
        plain["table"] = [{key: _finite(value) for key, value in row.items()} for row in self.table]
        return plain


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_advice(
    folder: Path, advice: Sequence[Advice], *, title: str, notes: Sequence[str] = ()
) -> str:
    """Write `advice.md` and `advice.json`; return the Markdown."""
    text = to_markdown(advice, title=title, notes=notes)
    (folder / "advice.md").write_text(text, encoding="utf-8")
    record = {
        "schema_version": SCHEMA_VERSION,
        "title": title,
        "notes": [*notes],
        "advice": [each.to_dict() for each in advice],
    }
    (folder / "advice.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return text


def to_markdown(advice: Sequence[Advice], *, title: str, notes: Sequence[str] = ()) -> str:
    """Return a page with a heading for each topic.

    Below it the sentence, then formula, inputs, source and table.
    """
    # title and notes, then the topics in the order in which they first come
    lines = [f"# {title}", "", *(line for note in notes for line in (note, ""))]
    topics = dict.fromkeys(each.topic for each in advice)
    for topic in topics:
        lines += [f"## {topic[:1].upper()}{topic[1:]}", ""]
        for each in advice:
            if each.topic == topic:
                lines += _section(each)
    return "\n".join(lines).rstrip() + "\n"


# the sentence, what it follows from, and the rows
def _section(each: Advice) -> list[str]:
    lines = [f"**{each.advice}**", ""]
    if each.formula:
        lines.append(f"- formula: `{each.formula}`")
    if each.inputs:
        lines.append(
            "- inputs: "
            + ", ".join(f"{name} = {shown_number(value)}" for name, value in each.inputs.items())
        )
    if each.source:
        lines.append(f"- source: {each.source}")
    lines.append("")
    if each.table:
        names = list(each.table[0])
        lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        lines += [
            f"| {' | '.join(shown_number(row.get(name)) for name in names)} |" for row in each.table
        ]
        lines.append("")
    return lines


def shown_number(value: object) -> str:
    """Return a value for people: numbers with three significant digits, "" for None."""
    if value is None:
        return ""
    # a bool is an int in Python, and is shown as a word
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ---- how many samples a step should have


def advise_batch(found: Sequence[Estimate], *, noise_scale: float | None = None) -> list[Advice]:
    """Return advice on the batch from the best plan of each candidate.

    All of `found` are on as many devices of one cluster.
    """
    best = max(found, key=lambda each: each.samples_per_second)
    # the smallest batch that is nearly as good: larger ones need more samples to a loss
    enough = min(
        (e for e in found if e.samples_per_second >= (1 - NEARLY) * best.samples_per_second),
        key=lambda each: each.scenario.batch_size,
    )
    batch = enough.scenario.batch_size
    advice = [
        Advice(
            "batch size",
            f"{batch} samples per step: {enough.samples_per_second:.4g} samples per second, within "
            f"{100 * NEARLY:.0f} % of the most, {best.samples_per_second:.4g} at "
            f"{best.scenario.batch_size}.",
            float(batch),
            "samples",
            "min B with B / T(B) >= 0.95 max over B of B / T(B), T(B) the step of the fastest plan "
            "that fits",
            {
                "devices": enough.scenario.devices,
                "cluster": enough.scenario.cluster.name,
                "T(B)": enough.step_seconds,
            },
            f"{ZOU}, section 3 (recalled); T(B): {MODEL}",
            # all candidates by size, so that the bend of the curve is seen
            [
                _batch_row(each, noise_scale)
                for each in sorted(found, key=lambda e: e.scenario.batch_size)
            ],
        )
    ]
    return [*advice, _noise_advice(found, noise_scale)]


def _batch_row(each: Estimate, noise_scale: float | None) -> dict[str, object]:
    row: dict[str, object] = {
        "samples of a step": each.scenario.batch_size,
        "micro-batches": each.accumulate,
        "seconds per step": each.step_seconds,
        "samples per second": each.samples_per_second,
        "GiB per device": each.peak_bytes / 2**30,
    }
    if noise_scale is not None:
        row["relative time to a loss"] = _time_to_loss(each, noise_scale)
    return row


def _noise_advice(found: Sequence[Estimate], noise_scale: float | None) -> Advice:
    # samples to a loss grow with the batch, steps shrink with it: the product has a minimum
    formula = "argmin over B of T(B) (1 + N / B); samples needed grow by 1 + B / N"
    if noise_scale is None:
        return Advice(
            "batch size",
            "Which batch reaches a loss first is not known without the gradient noise scale: give "
            "log=, a metrics.csv with it.",
            formula=formula,
            source=_NOISE,
        )
    soonest = min(found, key=lambda each: _time_to_loss(each, noise_scale))
    batch = soonest.scenario.batch_size
    return Advice(
        "batch size",
        f"{batch} samples per step reach a loss soonest, at a gradient noise scale of "
        f"{noise_scale:,.0f} samples; they take {100 * batch / noise_scale:.0f} % more samples "
        "than tiny batches.",
        float(batch),
        "samples",
        formula,
        {"N": noise_scale, "T(B)": soonest.step_seconds},
        f"{_NOISE}, sections 2.3 and 5",
    )


def _time_to_loss(each: Estimate, noise_scale: float) -> float:
    return each.step_seconds * (1 + noise_scale / each.scenario.batch_size)


# ---- how many devices are worth having


def advise_devices(found: Sequence[Estimate], *, at: Estimate, wanted: float) -> list[Advice]:
    """Return advice on the number of devices.

    From the overhead of the plan `at`, and from the best plan for each number.
    """
    # the formula: one plan's overhead, scaled to other numbers of devices
    ratio = overhead_ratio(at)
    most = most_devices(wanted, overhead_ratio=ratio)
    count = (
        "any number of devices" if math.isinf(most) else f"at most {max(int(most), 1)} device(s)"
    )
    devices = at.scenario.devices
    by_ratio = Advice(
        "number of devices",
        f"By the overhead of its plan on {devices}, {count} keep an efficiency of {wanted:g}; "
        f"{devices} reach {efficiency(devices, overhead_ratio=ratio):.2f}.",
        most,
        "devices",
        "alpha = (1 + R) / (1 + G R), so G <= (1 + R - alpha) / (alpha R); R = T_o / T_c",
        {
            # T_o: seconds without computation; T_c: the whole batch on one device
            "T_o": at.step_seconds - compute_seconds(at),
            "T_c": devices * compute_seconds(at),
            "R": ratio,
            "alpha": wanted,
            "G": devices,
            "largest R for G": largest_overhead(wanted, devices=devices),
        },
        f"{ZOU} (alpha recalled, R and G derived from it); T_o, T_c: {MODEL}",
    )
    return [by_ratio, _searched_devices(found, wanted)]


def _searched_devices(found: Sequence[Estimate], wanted: float) -> Advice:
    """Compare the best plans: a larger number has others, which the formula does not know."""
    first = min(found, key=lambda each: each.scenario.devices)
    # per device, relative to the least number that was looked at
    rate = first.samples_per_second / first.scenario.devices

    def of(each: Estimate) -> float:
        return each.samples_per_second / each.scenario.devices / rate

    # never empty: the least number keeps all of its own speed
    enough = [each for each in found if of(each) >= wanted]
    most = max(enough, key=lambda each: each.scenario.devices)
    rows = [
        {
            "devices": each.scenario.devices,
            "seconds per step": each.step_seconds,
            "samples per second": each.samples_per_second,
            "efficiency": of(each),
            "R": overhead_ratio(each),
            "money per 1000 samples": None
            if each.money_per_sample is None
            else 1000 * each.money_per_sample,
        }
        for each in sorted(found, key=lambda each: each.scenario.devices)
    ]
    return Advice(
        "number of devices",
        f"With the best plan for each number, {most.scenario.devices} devices are the most of "
        "those looked at that keep "
        f"{wanted:g} of the speed per device of {first.scenario.devices}.",
        float(most.scenario.devices),
        "devices",
        "max G with (samples per second on G) / G >= alpha (samples per second on G_0) / G_0",
        {"G_0": first.scenario.devices, "alpha": wanted},
        MODEL,
        rows,
    )


def efficiency(devices: float, *, overhead_ratio: float) -> float:
    """Return alpha, the share of the speed of `devices` single devices that they reach together."""
    return (1 + overhead_ratio) / (1 + devices * overhead_ratio)


def most_devices(wanted: float, *, overhead_ratio: float) -> float:
    """Return the most devices with an efficiency of `wanted`; infinite without overhead."""
    return (
        math.inf
        if overhead_ratio <= 0
        else (1 + overhead_ratio - wanted) / (wanted * overhead_ratio)
    )


def largest_overhead(wanted: float, *, devices: int) -> float:
    """Return the largest ratio of overhead to computation for `devices` at `wanted` efficiency."""
    return (1 - wanted) / (wanted * devices - 1) if wanted * devices > 1 else math.inf


def overhead_ratio(each: Estimate) -> float:
    """Return R of a plan.

    It is what the plan takes besides computation, over the computation of the whole batch on one
    device.
    """
    compute = compute_seconds(each)
    return max(each.step_seconds - compute, 0.0) / (each.scenario.devices * compute)


def compute_seconds(each: Estimate) -> float:
    """Return the seconds of a step in which a device computes."""
    predicted = each.point.plan.predicted
    assert predicted is not None
    return predicted.compute_seconds


# ---- how gradients are exchanged


def worth_from(cluster: Cluster, *, equal_within: float | None = None) -> tuple[float, str]:
    """Return the gain per step from which a change pays, and where that is from, as a clause.

    Less is within the error of a ratio of two predictions. `equal_within` is what the user said.
    """
    if equal_within is not None:
        return equal_within, "as equal_within says"
    known = None if cluster.accuracy is None else cluster.accuracy.difference
    if known is None:
        share, _ = errors_of(None)
        return share, "assumed: no pairs of plans on these machines were compared"
    return known.median, f"half of {known.runs} pairs of plans were predicted closer"


def advise_servers(at: Estimate, *, parameter_bytes: float) -> Advice:
    """Return how many parameter servers the plan's workers would need.

    This package has none: rings take their place.
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
        "the record: here gradients are exchanged by all-reduce, in which every rank serves.",
        float(count),
        "servers",
        "N_ps >= ceil(2 S_p N_w / (B_ps T_C))",
        {"S_p": parameter_bytes, "N_w": workers, "B_ps": bandwidth, "T_C": compute},
        f"{ZOU} (recalled); B_ps: the network of a node",
    )


def parameter_servers(
    parameter_bytes: float, *, workers: int, bandwidth: float, compute: float
) -> int:
    """Return how many servers keep up with workers that send and fetch everything once per step."""
    # parameters and gradients cross once each, within the seconds of computation
    return math.ceil(2 * parameter_bytes * workers / (bandwidth * compute))


def server_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second of a node's network; of its inside where there is one node."""
    # all devices of a node send through its network together
    link = cluster.inter or cluster.intra
    return link.bandwidth * (cluster.devices_per_node if cluster.inter else 1)


def advise_compression(
    points: Sequence[PlanPoint],
    *,
    at: Estimate,
    why_none: str = "",
    equal_within: float | None = None,
) -> Advice:
    """Return whether a compressed exchange is worth allowing.

    Args:
        points: plans with unsharded gradients, compressed or not, that fit into memory.
        at: the plan without compression.
        why_none: why there are no such points.
        equal_within: as in `worth_from`.
    """
    # by exchange, in words
    fastest: dict[str, PlanPoint] = {}
    for point in points:
        exchange = point.plan.gradient_exchange
        name = "all-reduce" if exchange is None else exchange.words
        if name not in fastest or point.step_seconds < fastest[name].step_seconds:
            fastest[name] = point
    base = at.point.step_seconds
    # none of the plans could exchange anything compressed
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
    # the fastest compressed exchange, and what it gains over the plan
    best = min(
        (name for name in fastest if name != "all-reduce"),
        key=lambda n: fastest[n].step_seconds,
        default=None,
    )
    gain = 0.0 if best is None else base / fastest[best].step_seconds - 1
    # a change of the training is suggested only for more than the error of predictions
    worth, source = worth_from(at.scenario.cluster, equal_within=equal_within)
    if best is not None and gain > worth:
        sentence = (
            f"{best} would be worth allowing (strategy.allow_compression=true): {100 * gain:.0f} % "
            "more steps per second than the plan without; it changes the training."
        )
    else:
        sentence = (
            f"Not worth allowing: the best compressed exchange brings {100 * gain:.0f} % over the "
            f"plan without, and it is worth it from {100 * worth:.0f} % on ({source})."
        )
    formula = "gain = T(plan) / T(fastest plan with the exchange) - 1"
    inputs: Mapping[str, object] = {
        "T(plan)": base,
        "worth it from": worth,
        "which is from": source,
    }
    return Advice(
        "compression", sentence, gain, "of the steps per second", formula, inputs, MODEL, rows
    )


def advise_bounded_loss(
    at: Estimate, *, tail: float | None, equal_within: float | None = None
) -> Advice:
    """Return what a transport that may lose part of the gradients could bring.

    `tail` is the slowest message of an exchange over the median one; None: not measured.
    `equal_within` as in `worth_from`.
    """
    predicted = at.point.plan.predicted
    assert predicted is not None
    # only what nothing hides can be saved
    exposed, step = predicted.exposed_communication_seconds, at.point.step_seconds
    if at.point.plan.schedule is not None:
        exposed = 0.0  # in a pipeline these are waits for stages, not for gradients
    source = "derived; the idea: DLCP, arXiv 2008.08445, and MLT, NSDI 2024"
    formula = "gain <= T / (T - x (1 - 1 / q)) - 1"
    inputs: dict[str, object] = {"T": step, "x": exposed, "q": tail}
    # without a measured tail the bound is that an exchange takes no time at all
    if tail is None:
        most = step / max(step - exposed, 1e-12) - 1
        return Advice(
            "bounded loss",
            f"At most {100 * most:.0f} % more steps per second, if an exchange took no time at "
            "all; what it would bring follows from how much slower the slowest messages are "
            "(exchange_tail=, the 99th percentile over the median).",
            most,
            "of the steps per second",
            formula,
            inputs,
            source,
        )
    # with one, that every message is as fast as the median
    gain = step / max(step - exposed * (1 - 1 / tail), 1e-12) - 1
    worth, why = worth_from(at.scenario.cluster, equal_within=equal_within)
    inputs |= {"worth it from": worth, "which is from": why}
    says = (
        "worth allowing ('strategy.allow_compression=[bounded_loss]')"
        if gain > worth
        else f"not worth it, which it is from {100 * worth:.0f} % on ({why})"
    )
    sentence = f"At most {100 * gain:.0f} % more steps per second: {says}."
    return Advice(
        "bounded loss", sentence, gain, "of the steps per second", formula, inputs, source
    )
