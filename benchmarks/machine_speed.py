"""How fast the machine is at each step: virtual ones change by a quarter within seconds, whatever runs on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

SIZE, TIMES = 384, 5
FASTEST = 0.1  # the share of products that are faster than at what counts as full speed: calibrations keep the fastest


class MachineSpeed(L.Callback):
    """Times steps, and products of one size between them; place it before callbacks that time steps.

    `of_ranks` are, after the fit, (rank, step, [seconds of the step, CPU seconds of the products around it]).
    """

    def __init__(self) -> None:
        self.of_ranks: list[list[list[float]]] = []
        self._factor = torch.ones(SIZE, SIZE)
        self._steps: list[float] = []
        self._products: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._products.append(self._product())
        self._started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps.append(time.perf_counter() - self._started)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        around = np.array([*self._products, self._product()])
        rows = np.stack([self._steps, (around[:-1] + around[1:]) / 2], axis=1)
        gathered: Tensor = trainer.strategy.all_gather(torch.from_numpy(rows))
        self.of_ranks = gathered.reshape(-1, *rows.shape).tolist()

    def _product(self) -> float:
        start = time.thread_time()
        for _ in range(TIMES):
            self._factor @ self._factor
        return time.thread_time() - start


def full_speed(of_jobs: Sequence[Sequence[Sequence[Sequence[float]]]]) -> float:
    """Return the seconds of the products when the machine is fast, from `of_ranks` of many jobs."""
    return float(np.quantile(np.concatenate([np.asarray(job)[..., 1].ravel() for job in of_jobs]), FASTEST))


def seconds_at_full_speed(of_ranks: Sequence[Sequence[Sequence[float]]], *, products: float, warmup: int) -> float:
    """Return the median seconds of a step, each as if the machine had been as fast as when it takes `products` seconds.

    A step waits for its slowest rank.
    """
    seconds, around = np.asarray(of_ranks)[:, warmup:].max(axis=0).T
    return float(np.median(seconds * products / around))
