"""`topt calibrate` measures this machine anew, for later runs here, writes it as a cluster file,
and says how sure that is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_topt.cli.calibration_report import print_calibration, save_calibration
from lightning_topt.cli.local_ranks import run_on_ranks
from lightning_topt.costs.calibration_check import (
    Change,
    CheckedPoint,
    changes_between,
    check_calibration,
)
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements


class Calibration(NamedTuple):
    """The measured cluster, the file that later runs read (None: it could not be written), how the
    table reproduces itself, what an earlier calibration differs by (None: there was none), and the
    seconds that all of it took.
    """

    cluster: Cluster
    kept: Path | None
    points: list[CheckedPoint]
    changes: list[Change] | None
    seconds: float


def run(config: DictConfig) -> None:
    """Measure, keep it for later runs, write `config.output`, and print how well the table
    reproduces itself.

    Raises ValueError when the machine lacks what `config` asks for.
    """
    found = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if found is None:  # another rank of torchrun writes it
        return
    cluster, output = found.cluster, Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)
    folder = Path(HydraConfig.get().runtime.output_dir)
    save_calibration(
        folder / "calibration.json", found.points, found.changes, seconds=found.seconds
    )
    print_calibration(found.points, found.changes)
    nodes = f"{cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)"
    print(f"measured {cluster.name}: {nodes}, in {found.seconds:.1f} s")
    if found.kept is not None:
        print(
            f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use it "
            f"from {found.kept}"
        )
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


def _measure(device: torch.device, num_nodes: int) -> Calibration:
    start = time.perf_counter()
    measurements = Measurements.open(
        device=device, num_nodes=num_nodes, refresh=True, progress=print
    )
    before, cluster = measurements.cluster_before, measurements.cluster()
    points = check_calibration(cluster, device=device)
    kept = (
        measurements.path if measurements.path is not None and measurements.path.is_file() else None
    )
    changes = None if before is None else changes_between(before, cluster)
    return Calibration(cluster, kept, points, changes, time.perf_counter() - start)
