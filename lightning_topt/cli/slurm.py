"""The cluster of a SLURM job: ``cluster=slurm cluster.like=a100_8x8``, inside of the job.

SLURM says how many nodes the job has, and how many devices each of them. How fast these are it does
not know: that is of a cluster file of the same devices. ``conf/cluster/slurm.yaml`` names
`allocated_cluster`, which Hydra calls when the configuration is built.

    what is read                                          from
    nodes                                                 SLURM_JOB_NUM_NODES
    devices of a node, like a cluster of GPUs (nccl)      SLURM_JOB_GPUS, else SLURM_GPUS_ON_NODE
    devices of a node, like a cluster of CPUs (gloo)      SLURM_TASKS_PER_NODE: a rank is a task

The variables are those of a batch script, of `salloc` and of tasks of `srun`; in a step of only
some of the nodes they still are those of the job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.costs.cluster import Cluster, ClusterError

_FILES = (".yaml", ".yml")
_OWN = "slurm"  # the configuration of this module


def allocated_cluster(
    like: str | None, environment: Mapping[str, str] | None = None, **entries: Any
) -> Cluster:
    """Return the nodes and devices of this SLURM job, as fast as those of another cluster.

    Measured collectives are kept where nodes have as many devices as there.

    Args:
        like: a choice of the group `cluster`, or a file such as `topt calibrate` writes.
        environment: the variables of SLURM; None: those of this process.
        entries: of a cluster file, in place of those of `like`; mappings are merged.

    Raises:
        ClusterError: this is no SLURM job, or one without devices of that kind; or `like` is
            missing, cannot be read, or says too little.
    """
    job = Allocation.read(os.environ if environment is None else environment)
    base = Cluster.from_dict(_merged(_cluster_like(like).to_dict(), entries))
    if base.nodes:
        raise ClusterError(
            f"cluster.like={like} has several kinds of nodes, and which of them the job has is not "
            "known: name a cluster of one kind"
        )
    devices = job.gpus(base.name) if base.backend == "nccl" else job.tasks()
    if job.nodes > 1 and base.inter is None:
        raise ClusterError(
            f"the job has {job.nodes} nodes, and cluster.like={like} is one node without a link to "
            "others: say +cluster.inter='{latency_seconds:30us,bandwidth:2.5Gb/s}', or measure "
            "several nodes with topt calibrate"
        )
    # a curve is of ranks inside of a node, or of several
    curves = base.collectives if devices == base.devices_per_node else {}
    return replace(
        base,
        name=f"{job.nodes} x {devices} of SLURM, like {base.name}",
        num_nodes=job.nodes,
        devices_per_node=devices,
        collectives=curves,
        source=f"nodes and devices of SLURM job {job.number}; {base.source}",
    )


@dataclass(frozen=True)
class Allocation:
    """What SLURM says of a job: its `number`, how many `nodes`, and the `variables`."""

    number: str
    nodes: int
    variables: Mapping[str, str]

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Allocation:
        """Read the variables of a job. Raises ClusterError outside of one."""
        number = variables.get("SLURM_JOB_ID", "")
        nodes = variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES", "")
        if not number or not nodes.isdecimal() or int(nodes) < 1:
            raise ClusterError(
                "cluster=slurm reads nodes and devices of a SLURM job, and this process is in none "
                "(SLURM_JOB_ID and SLURM_JOB_NUM_NODES): start it by sbatch, srun or salloc, or "
                "name the cluster, such as cluster=a100_8x8 cluster.num_nodes=2"
            )
        return cls(number, int(nodes), variables)

    def gpus(self, like: str) -> int:
        """Return the GPUs of each node. Raises ClusterError: none, or not equally many."""
        listed = self.variables.get("SLURM_JOB_GPUS", "")
        on_node = self.variables.get("SLURM_GPUS_ON_NODE", "")
        count = _numbers(listed) if listed else _whole(on_node, "SLURM_GPUS_ON_NODE")
        if not count:
            raise ClusterError(
                f"SLURM job {self.number} has no GPUs, of which the cluster {like!r} is: ask for "
                "them, such as --gpus-per-node=4, or name a cluster of CPUs, such as "
                "cluster.like=local_cpu"
            )
        # those of the job; "a100:4" has a type
        total = self.variables.get("SLURM_GPUS", "").rpartition(":")[2]
        if total and _whole(total, "SLURM_GPUS") != count * self.nodes:
            raise ClusterError(
                f"SLURM job {self.number} has {total} GPUs on {self.nodes} nodes, and {count} on "
                "this one: for equally many on each ask for --gpus-per-node in place of --gpus"
            )
        return count

    def tasks(self) -> int:
        """Return the tasks of each node. Raises ClusterError where these are not equally many."""
        text = self.variables.get("SLURM_TASKS_PER_NODE", "1")
        # 2(x3),1: three nodes of two tasks, and one of one
        parts = [re.fullmatch(r"(\d+)(?:\(x\d+\))?", part) for part in text.split(",")]
        counts = {int(part[1]) for part in parts if part}
        if None in parts or len(counts) != 1 or 0 in counts:
            raise ClusterError(
                f"SLURM job {self.number} has {text} tasks on its nodes (SLURM_TASKS_PER_NODE), "
                "not equally many on each: ask for --ntasks-per-node in place of --ntasks"
            )
        return counts.pop()


def _numbers(text: str) -> int:
    """Return how many numbers a list such as ``0,2-3`` has."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        count += 1 + (int(last) - int(first) if last else 0)
    return count


def _whole(text: str, name: str) -> int:
    if text and not text.isdecimal():
        raise ClusterError(f"{name} is {text!r}, which is no number of GPUs")
    return int(text or 0)


def _cluster_like(name: str | None) -> Cluster:
    """Return the cluster of a choice of the group `cluster`, or of a file."""
    if name is not None and name.endswith(_FILES):
        return Cluster.load(name)
    path = conf_dir() / "cluster" / f"{name}.yaml"
    if name in (None, _OWN, "measured") or not path.is_file():
        files = sorted(file.stem for file in path.parent.glob("*.yaml"))
        known = ", ".join(file for file in files if file not in (_OWN, "measured"))
        raise ClusterError(
            "SLURM knows how many devices the job has, and not how fast they are: say "
            f"cluster.like=FILE.yaml, which topt calibrate writes, or one of {known}"
            + ("" if name is None else f"; got {name!r}")
        )
    return Cluster.load(path)


def _merged(base: Any, given: Any) -> Any:
    """Return `given` in place of `base`; of two mappings, entry by entry."""
    if not isinstance(base, Mapping) or not isinstance(given, Mapping):
        return given
    return {**base, **{key: _merged(base.get(key), value) for key, value in given.items()}}


# ---- a Trainer that starts nothing


def plugins_of_planning(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return plugins for a Trainer that trains nothing; of none but `trainer`'s own, if any.

    In a job of SLURM it is no rank. Else Lightning takes the batch script for rank 0 of the job's
    tasks, and refuses ``--ntasks``.
    """
    if "SLURM_JOB_ID" not in os.environ or trainer.get("plugins") is not None:
        return {}
    return {"plugins": [LightningEnvironment()]}
