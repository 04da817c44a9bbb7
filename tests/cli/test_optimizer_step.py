"""`topt train optimizer_step=parallel`, and the group `optimizer_step` in any Hydra app."""

from __future__ import annotations

import json

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tests.forked_command import finished, forked_topt

SHORT = [
    "experiment=demo",
    "data.max_bytes=100000",
    "model.num_layers=1",
    "model.hidden=32",
    "trainer.limit_train_batches=10",
    "trainer.limit_val_batches=2",
]


def test_train(tmp_path):
    arguments = ["strategy=ddp", "optimizer_step=parallel", "optimizer_step.always=true", *SHORT]
    arguments += [f"hydra.run.dir={tmp_path}/run"]
    output = finished(forked_topt("train", *arguments, folder=tmp_path, ranks=2))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["world_size"] == 2 and record["global_step"] == 10
    assert "the update is shared from the first step on, as told" in output


def test_a_wrong_value_is_refused_in_one_sentence(tmp_path):
    wrong = ["strategy=ddp", "optimizer_step=parallel", "optimizer_step.always=2"]
    status, output = forked_topt("train", *wrong, *SHORT, folder=tmp_path)
    assert status == 2 and "topt: optimizer_step: always" in output


def test_another_hydra_app_finds_the_group(tmp_path):
    entry = "topt/optimizer_step@callbacks.step: parallel"
    (tmp_path / "app.yaml").write_text(f"defaults:\n  - {entry}\n  - _self_\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", overrides=["callbacks.step.always=true"])
    assert instantiate(config.callbacks.step).always
