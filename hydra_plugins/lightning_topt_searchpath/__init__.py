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
import warnings
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

NAMESPACE = "topt"
_GROUPS = ("cluster", "gradient_exchange", "optimizer_step")
# without the namespace, until version 0.2
_OLD_GROUPS = (*_GROUPS, "strategy", "schedule", "prediction")
# choices of the command alone, which have no new name: what other apps say instead
_INSTEAD = {
    "cluster/measured": "leave it out, and the cluster is measured",
    "optimizer_step/plain": "leave it out, and every rank does the whole optimizer step",
    "strategy/ddp": "say trainer.strategy=ddp",
    "strategy/single": "say trainer.devices=1",
}


def conf_dir() -> Path:
    """Return the folder of configurations of the command `topt`.

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
        search_path.append(provider="lightning-topt", path=f"topt://{conf_dir()}")
        # For `trainer.strategy=topt`, which passes the bare name to a Trainer. Where Lightning is
        # not loaded yet, importing it here would cost every Hydra app seconds.
        if "lightning.pytorch" in sys.modules:
            importlib.import_module("lightning_topt")


class LightningToptConfigs(ConfigSource):
    """The groups of our folder that other apps may use, under `NAMESPACE`.

    Their old names, without it, warn.
    """

    @staticmethod
    def scheme() -> str:
        """Return what paths of this source begin with."""
        return "topt"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a configuration, with a warning under an old name."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"there is no configuration {config_path!r}")
        group = config_path.partition("/")[0]
        if group != NAMESPACE:
            instead = _INSTEAD.get(f"{group}/{file.stem}") or (
                f"set the entry {group!r} of {NAMESPACE}/strategy=topt_pipeline"
                if group in ("schedule", "prediction")
                else f"its name is {NAMESPACE}/{group}"
            )
            warnings.warn(
                f"the config group {group!r} of lightning_topt goes in version 0.2: {instead}",
                FutureWarning,
            )
        text = file.read_text(encoding="utf-8")
        config = OmegaConf.load(file)
        header = self._get_header_dict(text)
        return ConfigResult(self.provider, self.full_path(), config, header)

    def available(self) -> bool:
        """Return whether the folder is there."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether this is the name of a group."""
        return config_path.rstrip("/") in ("", NAMESPACE, *_OLD_GROUPS, *_namespaced())

    def is_config(self, config_path: str) -> bool:
        """Return whether this is the name of a configuration."""
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of what is in a group."""
        groups = {"": (NAMESPACE, *_OLD_GROUPS), NAMESPACE: _GROUPS}.get(config_path)
        if groups is not None:
            return [] if results_filter == ObjectType.CONFIG else sorted(groups)
        if results_filter == ObjectType.GROUP:
            return []
        files = (Path(self.path) / config_path.removeprefix(f"{NAMESPACE}/")).glob("*.yaml")
        return sorted(file.stem for file in files if self.is_config(f"{config_path}/{file.stem}"))

    def _file(self, config_path: str) -> Path | None:
        """Return the file of a configuration; None: there is none that is shared."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        inside = f"{group.removeprefix(f'{NAMESPACE}/')}/{name}"
        file = Path(self.path) / f"{inside}.yaml"
        known = group in _OLD_GROUPS or (group in _namespaced() and inside not in _INSTEAD)
        return file if known and file.is_file() else None


def _namespaced() -> tuple[str, ...]:
    return tuple(f"{NAMESPACE}/{group}" for group in _GROUPS)
