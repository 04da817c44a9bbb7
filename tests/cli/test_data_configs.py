"""The data configs that wrap another one: composed, made, and their batches are those of what they
wrap.
"""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from hydra_plugins.lightning_topt_searchpath import conf_dir


@pytest.mark.parametrize("name", ["cached", "coordinated"])
def test_a_config_around_another(name, tmp_path):
    overrides = ["experiment=digits", f"data={name}", "data@data.datamodule=digits"]
    overrides += [f"data.directory={tmp_path}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        wrapped = instantiate(compose("train", overrides).data)
        plain = instantiate(compose("train", ["experiment=digits"]).data)
    for module in (wrapped, plain):
        module.prepare_data()
        module.setup("fit")
    for ours, theirs in zip(wrapped.val_dataloader(), plain.val_dataloader(), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    getattr(wrapped, "close", lambda: None)()
