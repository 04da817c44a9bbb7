"""Seconds of updates by the names of parameters, as most tests want them."""

from __future__ import annotations

from typing import Any

from lightning_topt.costs.optimizer import time_updates


def measure_update_seconds(optimizers: Any, **options: Any) -> dict[str, float]:
    times = time_updates(optimizers, **options)
    return {name: each.seconds for each in times for name in each.names}
