"""Pipelines under a Trainer: modules of others, built late, split; meshes; Ctrl-C."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError

from lightning_topt import AutoParallelStrategy
from tests.models import GPT
from tests.plugins.test_pipeline_fits import cluster, in_order, pipeline
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, state_of

VOCAB = 32


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences that end with padding, more or less of it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, VOCAB, (8,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones(8, dtype=torch.long)
        mask[8 - 3 * index % 7 :] = 0
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, -100),
        }


class Pretrained(L.LightningModule):
    """The usual wrapper of a model of Hugging Face that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        torch.manual_seed(0)
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = hf.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
        self.model = hf.T5ForConditionalGeneration(config)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class BuiltLate(RecordingGPT):
    """Has layers only when the fit begins: built on the meta device, then given values."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.losses = []
        self.head: nn.Module | None = None

    def configure_model(self) -> None:
        if self.head is not None:
            return
        with torch.device("meta"):
            late = GPT(heads=2)
        late.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(3)
        for parameter in late.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        for name, child in late.named_children():
            setattr(self, name, child)
        for name, buffer in late.named_buffers(recurse=False):
            self.register_buffer(name, buffer)


class Interrupted(Callback):
    """Ctrl-C in the second step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            raise KeyboardInterrupt


def make(name: str) -> tuple[Any, DataLoader[Any], DataLoader[Any]]:
    """A module with its data: for a pipeline, and in the same order for one process."""
    if name == "t5":
        data = Texts()
        one = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
        return (
            Pretrained(),
            DataLoader(data, batch_size=4),
            DataLoader(data, batch_size=4, sampler=one),
        )
    torch.manual_seed(0)
    module = BuiltLate() if name == "built late" else RecordingGPT(heads=2)
    return module, loader(8, length=16), DataLoader(in_order(8, length=16).dataset, batch_size=8)


NAMES = ("t5", "built late")


def fits(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        module, data, _ = make(name)
        trainer = make_trainer(
            pipeline(2, microbatches=2, microbatch_loss="tokens" if name == "t5" else "mean"),
            devices=2,
            use_distributed_sampler=False,
        )
        trainer.fit(module, data)
        found[name] = module.losses, state_of(module), trainer.strategy.parallel_plan.to_dict()  # type: ignore[union-attr]
    module, data, _ = make("gpt")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make_trainer(pipeline(2, microbatches=2), devices=2, callbacks=[Interrupted()]).fit(
            module, data
        )
    says = "16 microbatches were asked for, and the first batch of a rank has 8"
    given = {"mesh": {"pipeline": 2}, "schedule": "zbv", "num_microbatches": 16}
    with pytest.warns(UserWarning, match=says) if rank == 0 else nullcontext():
        found["searched"] = searched(rank, given, 2)
    return found


def searched(rank: int, plan: dict[str, Any], ranks: int) -> Any:
    module, data, _ = make("gpt")
    module.error = MeanSquaredError()  # holds a process group where the data axis is not all ranks
    strategy = AutoParallelStrategy(plan=plan, cluster=cluster(ranks))
    make_trainer(strategy, devices=ranks, use_distributed_sampler=False).fit(module, data)
    assert strategy.parallel_plan is not None and strategy.planned_by == "given"
    return module.losses, state_of(module), strategy.parallel_plan.to_dict()


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    module, _, data = make(name)
    make_trainer().fit(module, data)
    return module.losses, state_of(module)


def assert_alike(found: Any, expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-4) and len(found[0]) == 2
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)


def test_modules_as_they_are_train_as_in_one_process() -> None:
    results = on_ranks(fits)
    expected = {name: alone(name) for name in (*NAMES, "gpt")}
    for found in results:
        for name in NAMES:
            assert_alike(found[name], expected[name])
            assert len(found[name][2]["stages"]) == 2
        assert_alike(found["searched"], expected["gpt"])
        plan = found["searched"][2]
        assert (plan["schedule"], plan["num_microbatches"]) == ("zbv", 16)
        assert len(plan["stages"]) == 4
        # no other was looked for
        assert "without which no plan fits" not in plan["reason"]


# ---- four ranks ----------------------------------------------------------------------------------


def on_four(rank: int) -> dict[str, Any]:
    return {
        "rows": searched_rows(rank),
        "slices": searched(rank, {"mesh": {"pipeline": 2, "tensor": 2}, "num_microbatches": 2}, 4),
    }


def searched_rows(rank: int) -> Any:
    torch.manual_seed(0)
    strategy = AutoParallelStrategy(plan={"mesh": {"pipeline": 2, "data": 2}}, cluster=cluster(4))
    module = RecordingGPT(heads=2)
    make_trainer(strategy, devices=4).fit(module, loader(4, length=16))
    assert strategy.parallel_plan is not None
    return module.losses, state_of(module), strategy.parallel_plan.to_dict()


def test_stages_beside_a_tensor_axis_and_on_a_searched_mesh() -> None:
    results = on_ranks(on_four, world_size=4)
    torch.manual_seed(0)
    rows = RecordingGPT(heads=2)
    make_trainer().fit(rows, in_order(8, length=16))
    expected = alone("gpt")
    for found in results:
        assert_alike(found["slices"], expected)
        axes = {axis["name"]: axis["size"] for axis in found["slices"][2]["mesh"]}
        assert (
            axes == {"pipeline": 2, "data": 1, "tensor": 2}
            and len(found["slices"][2]["stages"]) == 2
        )
        assert any(
            "computes" in block
            for stage in found["slices"][2]["stages"]
            for block in stage["blocks"]
        )
        assert_alike(found["rows"], (rows.losses, state_of(rows)))
        axes = {axis["name"]: axis["size"] for axis in found["rows"][2]["mesh"]}
        assert axes == {"pipeline": 2, "data": 2} and found["rows"][2]["batch_size"] == 4
        assert found["rows"][2]["num_microbatches"] in (2, 4)  # looked for
