"""Several clusters in one command: ``topt plan 'cluster=[a100_8x8,mine.yaml]'``.

A group of Hydra has one choice. So `as_hydra_reads` passes the list on as ``clusters=[...]``,
before Hydra reads the command line. `read_clusters` then composes each cluster as if it were the
only one. A small module of its own: `main` needs the first half without loading what plans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_topt.costs.cluster import Cluster, ClusterError

_FILES = (".yaml", ".yml")
_LIST = re.compile(r"^cluster=(\[.*\])$", re.DOTALL)
_OVERRIDE = re.compile(r"^[+~]*(clusters?)(=|$)")  # of the group itself, not of an entry


def as_hydra_reads(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``cluster=[a,b]`` as ``clusters=[a,b]``.

    The first cluster becomes the group's choice too, so that entries of clusters can be overridden.
    """
    found: list[str] = []
    for word in arguments:
        # cluster=[a,b] becomes clusters=[a,b] cluster=a; files are no choices of the group
        listed = _LIST.match(word)
        found.append(f"clusters={listed[1]}" if listed else word)
        first = listed[1].strip("[] ").split(",")[0].strip() if listed else ""
        if first and not first.endswith(_FILES):
            found.append(f"cluster={first}")
    return found


def read_clusters(names: Sequence[str] | None, *, default: Cluster | None) -> list[Cluster | None]:
    """Return the clusters of these names, in their order.

    Overrides of a cluster's entries (``cluster.device.price_per_hour=2``) hold for each.

    Args:
        names: choices of the group `cluster`, or files; None: `default` alone.
        default: the cluster of the configuration.

    Returns:
        A cluster for each name; None is the machine that this runs on.

    Raises:
        ClusterError: a file or choice that is no cluster; what Hydra raises for unknown names.
    """
    if names is None:
        return [default]
    return [Cluster.load(name) if name.endswith(_FILES) else _composed(name) for name in names]


def _composed(name: str) -> Cluster | None:
    # Compose the configuration of this command once more, with one choice of `cluster`
    hydra = HydraConfig.get()
    given = [word for word in hydra.overrides.task if not _OVERRIDE.match(word)]
    config = compose(hydra.job.config_name or "plan", overrides=[*given, f"cluster={name}"])
    cluster = config.get("cluster")
    if cluster is None:
        return None
    if not isinstance(cluster, DictConfig):
        raise ClusterError(f"the cluster {name!r} is not a mapping")
    return Cluster.from_dict(instantiate(cluster, _convert_="all"))
