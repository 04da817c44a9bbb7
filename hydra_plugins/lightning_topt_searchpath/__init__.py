"""Put the configuration groups of lightning_topt on the search path of every Hydra app.

They are then composed by ``strategy=topt``, ``cluster=...``.
Hydra imports this module whenever any of its apps starts, so it must not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


def conf_dir() -> Path:
    """Return the folder of configuration groups.

    It is inside the installed package, or beside it in a checkout.
    """
    spec = importlib.util.find_spec("lightning_topt")
    assert spec is not None and spec.origin is not None, "lightning_topt is not installed"
    package = Path(spec.origin).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


class LightningToptSearchPath(SearchPathPlugin):
    """Append our groups; those of the app come first.

    Where Lightning is in use, the strategy names are registered too.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes a configuration."""
        search_path.append(provider="lightning-topt", path=f"file://{conf_dir()}")
        # For apps that pass the bare name to a Trainer. Where Lightning is not loaded yet,
        # importing it here would cost every Hydra app seconds, and `_target_:
        # lightning_topt.AutoParallelStrategy` (conf/strategy) needs no name.
        if "lightning.pytorch" in sys.modules:
            importlib.import_module("lightning_topt")
