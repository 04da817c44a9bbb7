"""Rows of pipelines that exchange compressed gradients under a Trainer, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_topt import PipelineStrategy, TopK
from tests.plugins.test_continuous_fits import Net, Points, adamw
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import SaveAfterEpoch, make_trainer, on_ranks

EXCHANGE = {"method": "topk", "density": 0.5}


class Plain(Net):
    """Without a metric, which is as large as a block of so small a model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def fit(path: str, *, resumes: bool) -> tuple[Any, Plain]:
    """Two epochs, of which the first is saved; or the second from there."""
    strategy = PipelineStrategy(
        stages=2,
        cluster=cluster(4),
        schedule="1f1b",
        gradient_exchange=EXCHANGE,
        checkpoint="sharded",
    )
    module, loader = Plain(adamw), DataLoader(Points(24), batch_size=4, shuffle=False)
    callbacks = [] if resumes else [SaveAfterEpoch(path)]
    trainer = make_trainer(strategy, devices=4, max_epochs=2, callbacks=callbacks)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    return trainer, module


def resume(rank: int, path: str) -> Any:
    trainer, whole = fit(path, resumes=False)
    plan = trainer.strategy.parallel_plan
    assert isinstance(plan.gradient_exchange, TopK) and plan.gradient_exchange.density == 0.5
    assert (plan.mesh.pipeline_size, plan.mesh.data_parallel_size) == (2, 2)
    _, resumed = fit(path, resumes=True)
    return [
        {key: value.clone() for key, value in module.state_dict().items()}
        for module in (whole, resumed)
    ]


def test_files_have_what_rows_keep(tmp_path: Path) -> None:
    results = on_ranks(resume, str(tmp_path / "half.ckpt"), world_size=4)
    for whole, resumed in results:
        for key, value in results[0][0].items():
            torch.testing.assert_close(whole[key], value, rtol=0, atol=0)
            torch.testing.assert_close(resumed[key], value, rtol=0, atol=0)
