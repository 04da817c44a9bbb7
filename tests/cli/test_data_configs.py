"""The data configs that wrap another one: their batches are those of what they wrap."""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from hydra_plugins.lightning_topt_searchpath import conf_dir


@pytest.mark.parametrize("name", ["cached", "coordinated"])
def test_a_config_around_another(name, tmp_path):
    overrides = [f"data={name}", "data.datamodule.max_bytes=100000"]
    overrides += [f"data.directory={tmp_path}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        wrapped = instantiate(compose("train", overrides).data)
        plain = instantiate(compose("train", ["data.max_bytes=100000"]).data)
    for module in (wrapped, plain):
        module.prepare_data()
        module.setup("fit")
    for ours, theirs in zip(wrapped.val_dataloader(), plain.val_dataloader(), strict=True):
        assert torch.equal(ours, theirs)
    getattr(wrapped, "close", lambda: None)()
