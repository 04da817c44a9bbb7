"""Let every Hydra app compose the configurations of lightning_topt.

    topt/strategy           topt, topt_compressed, topt_pipeline: typed, `strategies`
    topt/cluster            files of clusters
    topt/gradient_exchange  methods of `topt_compressed`
    topt/optimizer_step     a callback

for instance by ``topt/strategy@trainer.strategy=topt``. All else of the command `topt`, such as its
models, stays its own. Hydra imports this package whenever any of its apps starts, so it must not
import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

NAMESPACE = "topt"
_GROUPS = ("cluster", "gradient_exchange", "optimizer_step")
_OF_COMMAND = ("cluster/measured", "optimizer_step/plain")  # which other apps say by no choice


def conf_dir() -> Path:
    """Return the folder of configurations of the command `topt`.

    It is inside the installed package, or beside it in a checkout.
    """
    spec = importlib.util.find_spec("lightning_topt")
    assert spec is not None and spec.origin is not None, "lightning_topt is not installed"
    package = Path(spec.origin).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def hydra_command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return `hydra.main` with the configuration of a command `topt`."""
    # Hydra 1.4 behaves so without being asked, and warns where it is
    base: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    return hydra.main(config_path=str(conf_dir()), config_name=name, **base)


class LightningToptSearchPath(SearchPathPlugin):
    """Append our groups; those of the app come first.

    Where Lightning is in use, the strategy names are registered too.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes a configuration."""
        search_path.append(provider="lightning-topt", path=f"topt://{conf_dir()}")
        # For `trainer.strategy=topt`, which passes the bare name to a Trainer. Where Lightning is
        # not loaded yet, importing it here would cost every Hydra app seconds.
        if "lightning.pytorch" in sys.modules:
            importlib.import_module("lightning_topt")


class LightningToptConfigs(ConfigSource):
    """The groups of our folder that other apps may use, under `NAMESPACE`."""

    @staticmethod
    def scheme() -> str:
        """Return what paths of this source begin with."""
        return "topt"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a configuration."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"there is no configuration {config_path!r}")
        text = file.read_text(encoding="utf-8")
        config = OmegaConf.load(file)
        header = self._get_header_dict(text)
        return ConfigResult(self.provider, self.full_path(), config, header)

    def available(self) -> bool:
        """Return whether the folder is there."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether this is the name of a group."""
        return config_path.rstrip("/") in (
            "",
            NAMESPACE,
            *(f"{NAMESPACE}/{group}" for group in _GROUPS),
        )

    def is_config(self, config_path: str) -> bool:
        """Return whether this is the name of a configuration."""
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of what is in a group."""
        groups = {"": (NAMESPACE,), NAMESPACE: _GROUPS}.get(config_path)
        if groups is not None:
            return [] if results_filter == ObjectType.CONFIG else sorted(groups)
        if results_filter == ObjectType.GROUP:
            return []
        files = (Path(self.path) / config_path.removeprefix(f"{NAMESPACE}/")).glob("*.yaml")
        return sorted(file.stem for file in files if self.is_config(f"{config_path}/{file.stem}"))

    # the file of a configuration; None: there is none that is shared
    def _file(self, config_path: str) -> Path | None:
        namespace, _, inside = config_path.removesuffix(".yaml").partition("/")
        file = Path(self.path) / f"{inside}.yaml"
        is_shared = inside.partition("/")[0] in _GROUPS and inside not in _OF_COMMAND
        return file if namespace == NAMESPACE and is_shared and file.is_file() else None
