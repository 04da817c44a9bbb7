from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_topt.basics.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from lightning_topt.costs.cluster import Cluster, ClusterError, CollectiveCurve, Device, Link

CONF = Path(__file__).parents[2] / "conf" / "cluster"
CURVE = {"op": "all_reduce", "group_size": 2, "stride": 4, "bytes": [1], "seconds": [1]}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "2GiB", 2**31),
        (parse_bytes, "80GB", 80e9),
        (parse_bytes, " 1.5 kB", 1500),
        (parse_bytes, 12, 12),
        (parse_bytes, "1e3", 1000),
        (parse_bandwidth, "25Gb/s", 25e9 / 8),
        (parse_bandwidth, "2TB/s", 2e12),
        (parse_bandwidth, "200Gbit/s", 25e9),
        (parse_flops, "312TFLOP/s", 312e12),
        (parse_seconds, "5us", 5e-6),
        (parse_seconds, "5e-6", 5e-6),
        (parse_seconds, 0, 0),
    ],
)
def test_units(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["2Gb", "80 gigabytes", "", "-1GB", "nan", "inf", True, None, "1GB/s", "GiB"]
)
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="memory_limit"):
        parse_bytes(text, name="memory_limit")


@pytest.mark.parametrize("name", ["local_cpu", "a100_8x8", "h100_2x8", "cloud_25gbe_16x8"])
def test_shipped_clusters_load_and_round_trip(name, tmp_path):
    path = CONF / f"{name}.yaml"
    cluster = Cluster.load(path)
    assert cluster.name == path.stem
    assert cluster.source
    assert Cluster.from_dict(OmegaConf.load(path)) == cluster  # as Hydra hands it over
    cluster.save(tmp_path / "copy.yaml")
    assert Cluster.load(tmp_path / "copy.yaml") == cluster


def test_measured_curves_round_trip(tmp_path):
    curve = CollectiveCurve((1e3, 1e6), (1e-5, 1e-3))
    device = Device("d", 100, {"float32": 1.0, "bfloat16": 2.0}, 1.0, 0.0, 2.5, 7)
    cluster = Cluster(
        "c",
        device,
        2,
        2,
        Link(0.0, 1.0),
        Link(1.0, 0.5),
        {("all_reduce", 2, 2): curve},
        0.25,
        "gloo",
        "me",
    )
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster


def test_curve_is_straight_on_logarithmic_axes():
    curve = CollectiveCurve((100.0, 10000.0), (1.0, 4.0))
    assert curve.seconds_at(1000) == pytest.approx(2.0)
    assert curve.seconds_at(100) == 1.0
    assert curve.seconds_at(10000) == 4.0
    assert curve.seconds_at(1) == 1.0  # latency
    assert curve.seconds_at(20000) == 8.0  # bandwidth


def _change(**changes):
    data = yaml.safe_load((CONF / "a100_8x8.yaml").read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        target = data
        for name in path:
            target = target[name]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device__memroy": 1}, r"cluster.device: unknown entries \['memroy'\]"),
        ({"device__memory_bytes": ...}, "'memory_bytes' is missing"),
        ({"device__memory_bytes": "80Gb"}, "cluster.device.memory_bytes.*'Gb'"),
        ({"device__memory_bytes": 0}, "must be positive"),
        ({"intra__bandwidth": "5us"}, "cluster.intra.bandwidth"),
        ({"inter": ...}, "link between"),
        ({"devices_per_node": 2.5}, "whole number"),
        ({"overlap": 1.5}, "between 0 and 1"),
        ({"backend": "mpi"}, "'nccl' or 'gloo'"),
        ({"device": 3}, "must be a mapping"),
        ({"collectives": [CURVE | {"op": "scan"}]}, "scan"),
        ({"collectives": [CURVE | {"bytes": [2, 1], "seconds": [1, 1]}]}, "ascending"),
    ],
)
def test_errors_name_the_entry(changes, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.from_dict(_change(**changes))


def test_unreadable_files(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    for name in ("bad.yaml", "missing.yaml"):
        with pytest.raises(ClusterError, match=name):
            Cluster.load(tmp_path / name)
    with pytest.raises(ClusterError, match="mapping"):
        Cluster.from_dict([1])
