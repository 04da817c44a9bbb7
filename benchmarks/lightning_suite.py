"""pytest plugin: Lightning's own tests against `AutoParallelStrategy` in place of `DDPStrategy`.

    git clone https://github.com/Lightning-AI/pytorch-lightning && cd pytorch-lightning/tests && git checkout 2.6.5
    pip install cloudpickle jsonargparse[signatures] pandas psutil pytest-rerunfailures pytest-timeout scikit-learn tensorboardX
    PYTHONPATH=<this repository>:. python -m pytest -p benchmarks.lightning_suite -W ignore::FutureWarning tests_pytorch

Every name of Lightning's registry that builds a `DDPStrategy` builds ours; ranks started as scripts or by spawning inherit
the plugin. At the end it says how many tests built it. `results/lightning_suite.md` has the outcome.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_topt import AutoParallelStrategy

_builders: set[str] = set()


class Substitute(AutoParallelStrategy):
    """AutoParallelStrategy that notes which test built it."""

    def __init__(self, **options: Any) -> None:
        _builders.add(os.environ.get("PYTEST_CURRENT_TEST", "?").split(" ")[0])
        super().__init__(**options)


for _entry in StrategyRegistry.values():
    if _entry["strategy"] is DDPStrategy:
        _entry["strategy"] = Substitute


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests ran our strategy."""
    terminalreporter.write_line(f"AutoParallelStrategy was built in {len(_builders)} tests")
