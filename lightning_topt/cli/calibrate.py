"""`topt calibrate`: measure this machine and write it as a cluster file."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig

from lightning_topt.cli.local_ranks import run_on_ranks
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.cluster import Cluster


def run(config: DictConfig) -> None:
    """Measure and write `config.output`. Raises ValueError when the machine lacks what `config` asks for."""
    cluster = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if cluster is None:  # another rank of torchrun writes it
        return
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)
    print(f"measured {cluster.name}: {cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)")
    print(f"written to {output}; use it with strategy.cluster={output}")


def _measure(device: torch.device, num_nodes: int) -> Cluster:
    return calibrate(device=device, num_nodes=num_nodes)
