"""`topt calibrate`: measure this machine anew, and keep it for later runs.

It writes a cluster file (``output``), which is used elsewhere with ``strategy.cluster=FILE``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from lightning_topt.cli.local_processes import run_on_ranks
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements


class Calibration(NamedTuple):
    """What the ranks have measured, in `seconds`.

    `kept` is the file that later runs read; None: it could not be written.
    """

    cluster: Cluster
    kept: Path | None
    seconds: float


def run(config: DictConfig) -> None:
    """Measure, write ``config.output``, and say where it is used.

    Raises:
        ValueError: the machine lacks what `config` asks for.
    """
    measured = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if measured is None:  # another rank of torchrun or srun writes it
        return
    cluster, output = measured.cluster, Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)

    nodes = f"{cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)"
    print(f"measured {cluster.name}: {nodes}, in {measured.seconds:.1f} s")
    if measured.kept is not None and cluster.busy_share:
        print(
            f"the machine was busy: in {100 * cluster.busy_share:.0f} % of the time a rank waited "
            f"while other programs had its core. Measure again when it is quiet. {measured.kept} "
            "keeps what was measured on a quiet machine before; without that, runs use this one "
            "until they find it quiet"
        )
    elif measured.kept is not None:
        print(
            f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use it "
            f"from {measured.kept}"
        )
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


# called on every rank
def _measure(device: torch.device, num_nodes: int) -> Calibration:
    start = time.perf_counter()
    # refresh: what is kept on this machine is measured anew
    measurements = Measurements.open(
        device=device, num_nodes=num_nodes, refresh=True, progress=print
    )
    cluster = measurements.cluster()
    # the file is there only where the folder of measurements can be written
    path = measurements.path
    kept = path if path is not None and path.is_file() else None
    return Calibration(cluster, kept, time.perf_counter() - start)
