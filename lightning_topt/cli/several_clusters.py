"""Several clusters at once: each is one choice of the group `cluster`, composed as if it were the
only one, or a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_topt.costs.cluster import Cluster, ClusterError

_FILES = (".yaml", ".yml")
_LIST = re.compile(r"^cluster=(\[.*\])$", re.DOTALL)
_OWN = re.compile(r"^[+~]*(clusters?)(=|$)")


def as_hydra_reads(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``cluster=[a,b]`` as ``clusters=[a,b]``: a group of
    Hydra has one choice.

    The first one is that choice, so that entries of clusters can be overridden.
    """
    found: list[str] = []
    for word in arguments:
        listed = _LIST.match(word)
        found.append(f"clusters={listed[1]}" if listed else word)
        first = listed[1].strip("[] ").split(",")[0].strip() if listed else ""
        if first and not first.endswith(_FILES):
            found.append(f"cluster={first}")
    return found


def read_clusters(names: Sequence[str] | None, *, default: Cluster | None) -> list[Cluster | None]:
    """Return the clusters of these names (None: `default` alone), in their order; None is the
    machine that this runs on.

    Overrides of a cluster's entries (``cluster.device.price_per_hour=2``) hold for each. Raises
    ClusterError for a file that is none, what Hydra raises for names that are not known.
    """
    if names is None:
        return [default]
    return [Cluster.load(name) if name.endswith(_FILES) else _composed(name) for name in names]


def _composed(name: str) -> Cluster | None:
    hydra = HydraConfig.get()
    given = [word for word in hydra.overrides.task if not _OWN.match(word)]
    config = compose(hydra.job.config_name or "plan", overrides=[*given, f"cluster={name}"])
    cluster = config.get("cluster")
    if cluster is None:
        return None
    if not isinstance(cluster, DictConfig):
        raise ClusterError(f"the cluster {name!r} is not a mapping")
    return Cluster.from_dict(OmegaConf.to_container(cluster, resolve=True))
