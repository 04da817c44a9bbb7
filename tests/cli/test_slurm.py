"""`cluster=slurm`: nodes and devices from the variables of a SLURM job, rates from another cluster.

What SLURM itself sets is tried in ``tests/engines/test_slurm.py``.
"""

from __future__ import annotations

import dataclasses

import pytest

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.cli.slurm import allocated_cluster
from lightning_topt.costs.cluster import Cluster, ClusterError
from tests.cli.test_main import TINY
from tests.forked_command import forked_topt

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}
GPUS = {**JOB, "SLURM_GPUS_ON_NODE": "4"}


def of_conf(name: str) -> Cluster:
    return Cluster.load(conf_dir() / "cluster" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("like", "variables", "devices"),
    [
        ("a100_8x8", GPUS, 4),
        ("a100_8x8", {**JOB, "SLURM_JOB_GPUS": "0,2-3"}, 3),  # a step of srun has a part of them
        ("a100_8x8", {**JOB, "SLURM_JOB_GPUS": "5", "SLURM_GPUS_ON_NODE": "8"}, 1),
        ("a100_8x8", {**GPUS, "SLURM_GPUS": "a100:8"}, 4),
        ("local_cpu", GPUS, 3),
        ("local_cpu", {**GPUS, "SLURM_TASKS_PER_NODE": "2(x1),2"}, 2),
        ("local_cpu", {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, 1),
    ],
)
def test_nodes_and_devices_are_those_of_the_job(like, variables, devices):
    inter = {"inter": {"latency_seconds": "30us", "bandwidth": "1GB/s"}}
    found = allocated_cluster(like, variables, **(inter if like == "local_cpu" else {}))
    base = of_conf(like)
    assert (found.num_nodes, found.devices_per_node) == (2, devices)
    assert found.device == base.device and found.intra == base.intra
    assert found.name == f"2 x {devices} of SLURM, like {like}"
    assert "SLURM job 7" in found.source and base.source in found.source


def test_entries_are_overridden_and_curves_stay_where_they_hold(tmp_path):
    base = of_conf("a100_8x8")
    measured = {"op": "all_reduce", "group_size": 4, "stride": 1, "bytes": [1], "seconds": [1e-3]}
    path = tmp_path / "measured.yaml"
    Cluster.from_dict({**base.to_dict(), "collectives": [measured]}).save(path)
    given = {"device": {"price_per_hour": 9.0}}
    found = allocated_cluster(str(path), {**GPUS, "SLURM_GPUS_ON_NODE": "8"}, **given)
    assert found.device == dataclasses.replace(base.device, price_per_hour=9.0)
    assert list(found.collectives) == [("all_reduce", 4, 1)]
    # of ranks of a node there, and of two nodes here
    assert not allocated_cluster(str(path), {**GPUS, "SLURM_GPUS_ON_NODE": "2"}).collectives


@pytest.mark.parametrize(
    ("like", "variables", "words"),
    [
        ("a100_8x8", {}, "this process is in none"),
        (None, GPUS, r"say cluster.like=FILE.yaml.* or one of a100_128x8, .*mixed_a100_v100$"),
        ("missing.yaml", GPUS, "cannot read the cluster 'missing.yaml'"),
        ("a100_8x8", JOB, "SLURM job 7 has no GPUs"),
        ("a100_8x8", {**GPUS, "SLURM_GPUS": "7"}, "has 7 GPUs on 2 nodes, and 4 on this one"),
        ("local_cpu", {**JOB, "SLURM_TASKS_PER_NODE": "3,2"}, "has 3,2 tasks .* not equally many"),
        ("local_cpu", JOB, r"is one node without a link to others: say \+cluster.inter="),
        ("mixed_a100_v100", GPUS, "has several kinds of nodes"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(like, variables, words):
    with pytest.raises(ClusterError, match=words):
        allocated_cluster(like, variables)


def test_a_plan_is_for_the_devices_of_the_job(tmp_path, monkeypatch):
    words = ["plan", *TINY, "cluster=slurm", "tensor=false", "pipeline=false"]
    code, output = forked_topt(*words, folder=tmp_path)
    assert code == 2 and "this process is in none" in output, output
    # as in a batch script, which is no rank of its job; Lightning refuses SLURM_NTASKS alone
    for name, value in {**GPUS, "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    code, output = forked_topt(*words, folder=tmp_path)
    assert code == 2 and "say cluster.like=FILE.yaml" in output, output
    code, output = forked_topt(*words, "cluster.like=a100_8x8", folder=tmp_path)
    assert code == 0 and "Planning for all 8 devices of 2 x 4 of SLURM, like a100_8x8" in output
