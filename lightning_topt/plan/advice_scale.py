"""Advice on scale: how many samples a step should have, and how many devices are worth having.

    equation                                    function          source
    argmax over B of B / T(B)                   advise_batch      Zou et al. 2017, section 3
    time to a loss ~ T(B) (1 + N / B)           advise_batch      McCandlish et al. 2018,
                                                                  arXiv 1812.06162
    alpha = (1 + R) / (1 + G R), R = T_o / T_c  efficiency        Zou et al. 2017
    G <= (1 + R - alpha) / (alpha R)            most_devices      solved for G
    R <= (1 - alpha) / (alpha G - 1)            largest_overhead  solved for R

B samples of a step, T(B) its seconds, N the gradient noise scale in samples, G devices, T_c seconds
of computation of the whole batch on one device, T_o those in which a device does not compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_topt.plan.advice_page import MODEL, ZOU, Advice
from lightning_topt.plan.scenarios import Estimate

NEARLY = 0.05  # fewer samples per second than the best: not worth a larger batch
_NOISE = "McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162"


def efficiency(devices: float, *, overhead_ratio: float) -> float:
    """Return alpha: the share of the speed of `devices` single devices that they reach together."""
    return (1 + overhead_ratio) / (1 + devices * overhead_ratio)


def most_devices(wanted: float, *, overhead_ratio: float) -> float:
    """Return the most devices at which efficiency is at least `wanted`; infinite without
    overhead.
    """
    return (
        math.inf
        if overhead_ratio <= 0
        else (1 + overhead_ratio - wanted) / (wanted * overhead_ratio)
    )


def largest_overhead(wanted: float, *, devices: int) -> float:
    """Return the largest ratio of overhead to computation at which `devices` devices are `wanted`
    efficient.
    """
    return (1 - wanted) / (wanted * devices - 1) if wanted * devices > 1 else math.inf


def overhead_ratio(each: Estimate) -> float:
    """Return R of a plan: what it takes beside computation, over the computation of the whole batch
    on one device.
    """
    compute = compute_seconds(each)
    return max(each.step_seconds - compute, 0.0) / (each.scenario.devices * compute)


def compute_seconds(each: Estimate) -> float:
    """Return the seconds of a step in which a device computes."""
    predicted = each.point.plan.predicted
    assert predicted is not None
    return min(each.accumulate * predicted.compute_seconds, each.step_seconds)


def advise_batch(found: Sequence[Estimate], *, noise_scale: float | None = None) -> list[Advice]:
    """Return advice on the batch from the best plan of each candidate, all on as many devices of
    one cluster.
    """
    best = max(found, key=lambda each: each.samples_per_second)
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


def _time_to_loss(each: Estimate, noise_scale: float) -> float:
    return each.step_seconds * (1 + noise_scale / each.scenario.batch_size)


def _noise_advice(found: Sequence[Estimate], noise_scale: float | None) -> Advice:
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
        f"{noise_scale:,.0f} samples; they take "
        f"{100 * batch / noise_scale:.0f} % more samples than tiny batches.",
        float(batch),
        "samples",
        formula,
        {"N": noise_scale, "T(B)": soonest.step_seconds},
        f"{_NOISE}, sections 2.3 and 5",
    )


def advise_devices(found: Sequence[Estimate], *, at: Estimate, wanted: float) -> list[Advice]:
    """Return advice on the number of devices: from the overhead of the plan `at`, and from the best
    plan for each number.
    """
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
    """A larger number has other plans, which the formula knows nothing of."""
    first = min(found, key=lambda each: each.scenario.devices)
    rate = first.samples_per_second / first.scenario.devices

    def of(each: Estimate) -> float:
        return each.samples_per_second / each.scenario.devices / rate

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
