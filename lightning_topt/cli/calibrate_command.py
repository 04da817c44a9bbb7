"""`topt calibrate` measures this machine anew, for later runs here, and writes it as a cluster file."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig

from lightning_topt.cli.local_ranks import run_on_ranks
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements


def run(config: DictConfig) -> None:
    """Measure, keep it for later runs, and write `config.output`.

    Raises ValueError when the machine lacks what `config` asks for.
    """
    measured = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if measured is None:  # another rank of torchrun writes it
        return
    cluster, kept = measured
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)
    print(f"measured {cluster.name}: {cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)")
    if kept is not None:
        print(f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use it from {kept}")
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


def _measure(device: torch.device, num_nodes: int) -> tuple[Cluster, Path | None]:
    """The cluster, and the file that later runs read, where it could be written."""
    measurements = Measurements.open(device=device, num_nodes=num_nodes, refresh=True, progress=print)
    cluster = measurements.cluster()
    return cluster, measurements.path if measurements.path is not None and measurements.path.is_file() else None
