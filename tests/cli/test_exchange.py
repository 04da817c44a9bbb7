"""`topt train strategy=topt_compressed`, and its other ways to start ranks, as users run them."""

from __future__ import annotations

import csv
import json

import pytest

from tests.cli.test_main import run_python
from tests.forked_command import finished, forked_topt

SHORT = [
    "experiment=demo",
    "data.max_bytes=100000",
    "model.num_layers=1",
    "model.hidden=32",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=12",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=2",
]


@pytest.mark.parametrize(
    ("exchange", "strategy", "least"),
    [("topk", "CompressedDDPStrategy", 20), ("diloco", "LocalStepsStrategy", 10)],
)
def test_train(exchange, strategy, least, tmp_path):
    arguments = [
        "strategy=topt_compressed",
        f"gradient_exchange={exchange}",
        *SHORT,
        f"hydra.run.dir={tmp_path}/run",
    ]
    output = finished(forked_topt("train", *arguments, folder=tmp_path, ranks=2))
    # AdamW with what it ends worse with
    assert output.count("gradient_exchange=topk_few_bits") == (exchange == "topk")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (
        record["strategy"] == strategy and record["world_size"] == 2 and record["global_step"] == 12
    )
    assert record["metrics"]["val_bits_per_byte"] < 9
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["topt/exchange_bytes_per_step"]]
    assert len(rows) >= 5
    dense, sent = (
        float(rows[-1][f"topt/exchange_{name}_per_step"]) for name in ("dense_bytes", "bytes")
    )
    assert dense > least * sent


SCRIPT = """
import lightning as L, lightning_topt, torch
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    trainer = L.Trainer(strategy="{name}", accelerator="cpu", devices=2, max_steps=3, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(model)
    print("MOVED", not torch.equal(before, model.layer.weight))
"""


@pytest.mark.parametrize("name", ["topt_compressed", "topt_compressed_spawn"])
def test_every_way_to_start_ranks(name, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(name=name))
    result = run_python("train.py", folder=tmp_path)
    if "EADDRINUSE" in result.output:  # another test took the free port that Lightning had chosen
        result = run_python("train.py", folder=tmp_path)
    assert "MOVED True" in finished(result)
