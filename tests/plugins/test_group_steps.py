"""Ranks that bring a batch each and share the model's parameters, in slices or in stages, train as
under ddp, whatever the step does with its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.utils.data import DataLoader

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Replicate
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError
from lightning_topt.techniques.registry import parameters_by_block
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.foreign import transformers_models
from tests.models import GPT
from tests.plugins.split_plans import split_plan
from tests.plugins.trainer_ranks import make_trainer, on_ranks, topt_trainer
from tests.techniques.tensor_parallel.traced import prices


class OwnBatches:
    """`length` batches of a rank: dictionaries, of lengths and sizes that differ between ranks and
    steps.
    """

    def __init__(self, length: int, *, seed: int = 0) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in range(self.length):
            generator = torch.Generator().manual_seed(
                1000 * self.seed + 10 * step + dist.get_rank()
            )
            samples, time = 3 + (step + dist.get_rank()) % 2, 6 + (step + dist.get_rank()) % 3
            tokens = torch.randint(0, 32, (samples, time), generator=generator)
            targets = torch.randint(0, 32, (samples, time), generator=generator)
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
            yield {
                "tokens": tokens,
                "nested": [targets, {"name": f"rank {dist.get_rank()}", "step": step}],
            }


class Rich(GPT):
    """A loss within the batch and a mean over what is not ignored; dropout, frozen batch norm,
    draws in the loss, metrics, logs of all kinds.
    """

    def __init__(
        self, width: int = 16, dropout: float = 0.1, *, collects: bool = False, counts: bool = True
    ) -> None:
        super().__init__(width=width, heads=2, dropout=dropout)
        self.p = dropout
        self.batch_norm = nn.BatchNorm1d(width).eval()
        # not in stages
        self.counts = counts
        if counts:
            self.right = torchmetrics.Accuracy("multiclass", num_classes=32, ignore_index=-100)
            self.seen = torchmetrics.CatMetric()
        self.several: torchmetrics.MetricCollection | None = None
        # they share their states; whether they may, they ask values, which a search does not know
        if collects:
            kinds = (torchmetrics.Precision, torchmetrics.Recall)
            several = [kind("multiclass", num_classes=32, ignore_index=-100) for kind in kinds]
            self.several = torchmetrics.MetricCollection(several, prefix="of_all_")
        self.outputs: list[Any] = []
        self.evaluated: list[float] = []

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets = batch["tokens"], batch["nested"][0]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.norm(x))
        features = F.normalize(x.mean(1), dim=-1)
        within = F.cross_entropy(features @ features.T * 4, torch.arange(len(features)))
        words = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        drawn = F.dropout(logits.square().mean(), self.p, self.training)
        return words + 0.01 * drawn, within, logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        words, within, logits = self.losses(batch)
        targets = batch["nested"][0]
        if self.counts:
            self.right(logits.detach().argmax(-1), targets)
            self.seen.update(batch["tokens"].sum().float())
            self.log("right", self.right, on_step=True, on_epoch=True)
        if self.several is not None:
            self.several.update(logits.detach().argmax(-1), targets)
        self.log_dict(
            {"words": words, "within": within}, on_step=True, on_epoch=True, batch_size=len(targets)
        )
        self.log(
            "mean", words, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(targets)
        )
        self.log(
            "sum",
            float(len(targets)),
            sync_dist=True,
            reduce_fx="sum",
            on_step=False,
            on_epoch=True,
        )
        return {"loss": words + within, "name": batch["nested"][1]["name"], "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        name = outputs["name"] if isinstance(outputs["name"], str) else f"rank {outputs['name']}"
        self.outputs.append(
            (outputs["loss"].item(), name, outputs["logits"].sum().item(), torch.rand(1))
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 0:  # one rank alone
            self.evaluated.append(self(batch["tokens"]).sum().item())
        self.log("val_own", self.losses(batch)[0], batch_size=len(batch["tokens"]))
        self.log("val_mean", self.losses(batch)[0], sync_dist=True, batch_size=len(batch["tokens"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.losses(batch)[0], batch_size=len(batch["tokens"]))

    def on_train_epoch_end(self) -> None:
        if self.counts:
            self.log("seen", self.seen.compute().sum())
            self.seen.reset()
        if self.several is not None:
            self.log_dict(self.several.compute())
            self.several.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Wordless(OwnBatches):
    """Batches of one shape that consist of tensors."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            tokens, targets = (tensor[:3, :6] for tensor in (batch["tokens"], batch["nested"][0]))
            yield {"tokens": tokens, "nested": [targets, {"name": torch.tensor(dist.get_rank())}]}


def plan(data: int, storage: str = "ddp", *, recompute: bool = False) -> dict[str, Any]:
    return {
        **split_plan(data, storage, recomputed=range(2) if recompute else ()),
        "num_microbatches": 2,
    }


def staged_plan(
    data: int, *, storage: str = "ddp", recompute: bool = False, schedule: str = "1f1b"
) -> dict[str, Any]:
    first = [
        {"block": "tokens", "storage": storage},
        {"block": "blocks.0", "storage": storage, "recompute": recompute},
    ]
    second = [
        {"block": "blocks.1", "storage": storage, "recompute": recompute},
        {"block": "", "storage": storage},
    ]
    mesh = [{"name": "pipeline", "size": 2, "scope": "inter"}, {"name": "data", "size": data}]
    stages = [{"blocks": first}, {"blocks": second}]
    rest = {"schedule": schedule, "num_microbatches": 2, "own_batches": True}
    return {"version": 2, "mesh": mesh, **rest, "stages": stages}


CPU = Device("core", 2**33, {"float32": 3e9}, 8e9, 3e-6)
FAST, SLOW = Link(1e-5, 1e9), Link(1e-5, 1e6)


@dataclass(frozen=True)
class Case:
    """A fit on `ranks`: under `given`, or under what is found with `options` of the strategy."""

    ranks: int
    given: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 16
    relative: float = 1e-4  # of losses
    batches: type[OwnBatches] = OwnBatches

    @property
    def has_stages(self) -> bool:
        """Metrics do not go through stages."""
        return self.given is not None and "schedule" in self.given

    @property
    def counts(self) -> bool:
        """Whether the module has metrics."""
        return not self.has_stages and self.batches is OwnBatches


def results_of(trainer: Any, module: Rich, seed: int, batches: type[OwnBatches]) -> dict[str, Any]:
    torch.manual_seed(seed)  # other random numbers on every rank, as other samples would make them
    trainer.fit(module, batches(3), batches(1 + dist.get_rank() % 2, seed=1))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    plan = getattr(trainer.strategy, "parallel_plan", None)
    return {
        "outputs": [*module.outputs],
        "metrics": metrics,
        "evaluated": module.evaluated,
        "tested": trainer.test(module, batches(1, seed=2), verbose=False)[0]["test"],
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "plan": plan and plan.to_dict(),
        "planned": (
            plan and plan.summary(),
            getattr(trainer.strategy, "planned_by", ""),
            plan and plan.reason,
        ),
    }


def both(rank: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for topt in (False, True):
        torch.manual_seed(rank)
        collects = case.given is not None and not case.has_stages
        module = Rich(case.width, collects=collects, counts=case.counts)
        rest = {"max_epochs": 1 + case.counts, "num_sanity_val_steps": 0, **case.trainer}
        strategy = topt_trainer(case.given, options=case.options, **rest) if topt else None
        found.append(
            results_of(
                strategy or make_trainer("ddp", devices=case.ranks, **rest),
                module,
                10 + rank,
                case.batches,
            )
        )
    return found[0], found[1]


def assert_equal(
    expected: dict[str, Any], found: dict[str, Any], *, rank: int, relative: float
) -> None:
    assert len(found["outputs"]) == len(expected["outputs"])
    for (loss, name, logits, drawn), (own_loss, own_name, own_logits, own_drawn) in zip(
        expected["outputs"], found["outputs"], strict=True
    ):
        assert name == own_name == f"rank {rank}" and torch.equal(drawn, own_drawn)
        assert own_loss == pytest.approx(loss, rel=relative)
        assert own_logits == pytest.approx(logits, rel=1e-3, abs=2e-3)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-3, abs=1e-3)
    assert found["tested"] == pytest.approx(expected["tested"], rel=1e-3)
    for name, value in expected["state"].items():
        torch.testing.assert_close(
            found["state"][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(case: Case) -> dict[str, Any]:
    results = on_ranks(both, case, world_size=case.ranks)
    for rank, (expected, found) in enumerate(results):
        assert_equal(expected, found, rank=rank, relative=case.relative)
    return results[0][1]


ONCE, CLIPPED = {"max_epochs": 1}, {"gradient_clip_val": 0.5}
ACCUMULATED = {**CLIPPED, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    "case",
    [
        Case(2, plan(1, recompute=True), CLIPPED),
        Case(2, staged_plan(1, recompute=True), relative=1e-6),
        Case(4, staged_plan(2, storage="zero1"), ACCUMULATED, relative=1e-6),
    ],
    ids=["slices", "stages", "stages zero1"],
)
def test_a_fit_is_that_of_ddp(case: Case) -> None:
    check(case)


# ---- models of others ----------------------------------------------------------------------------


def split_most(module: Any, batch: Any) -> dict[str, Any]:
    """The plan that splits most parameters over two ranks, which bring a batch each."""
    trace = FunctionTrace()
    graph = capture(module, batch, batch_scaling=False, adapt=trace.of)
    model, along = SplitModel(module, batch, graph, trace), prices(module, 2)
    chosen = model.candidates(along)[-1].placements
    placements = parameters_by_block(module, [block.name for block in graph.blocks])
    whole, mesh = OpConfig.zero(0, axes=2), Mesh((Axis("data", 1), Axis("tensor", 2)))
    blocks = [
        BlockPlan(
            name,
            replace(
                whole,
                parameters=tuple(
                    (each.removeprefix(f"{name}."), (Replicate(), chosen[each]))
                    for each in named
                    if each in chosen
                ),
            ),
        )
        for name, named in placements.items()
    ]
    return ParallelPlan.of_blocks(blocks, mesh=mesh, num_microbatches=2).to_dict()


def model_fits(rank: int, given: dict[str, Any]) -> list[Any]:
    runs = []
    for trainer in (
        make_trainer("ddp", devices=2, max_epochs=1, use_distributed_sampler=False),
        topt_trainer(given, max_epochs=1, use_distributed_sampler=False),
    ):
        torch.manual_seed(0)
        module, batches = transformers_models.t5()
        losses = Losses()
        trainer.callbacks.append(losses)
        torch.manual_seed(rank)
        trainer.fit(module, DataLoader(list(batches)[rank:4:2], batch_size=None))  # type: ignore[arg-type]
        runs.append((losses.found, torch.rand(1), dict(module.state_dict())))
    return runs


class Losses(Callback):
    """Keeps them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(outputs["loss"].item())


def test_a_model_of_others_trains_as_under_ddp() -> None:
    """It has dropout and padding."""
    torch.manual_seed(0)
    module, batches = transformers_models.t5()
    split = split_most(module.train(), next(iter(batches)))
    assert any("computes" in block for block in split["stages"][0]["blocks"])
    for (losses, drawn, expected), (own_losses, own_drawn, found) in on_ranks(model_fits, split):
        assert len(losses) > 1 and own_losses == pytest.approx(losses, rel=1e-5)
        assert torch.equal(drawn, own_drawn)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


# ---- buffers -------------------------------------------------------------------------------------


class Averaging(Rich):
    """Keeps a mean from the second epoch on, or statistics that kernels write without a version."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.changes_norm = norm

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        norm = self.batch_norm
        if self.changes_norm:
            x = torch.ones(4, 16)
            F.batch_norm(x, norm.running_mean, norm.running_var, training=True)
        elif self.trainer.current_epoch:
            self.mean.add_(1)
        return super().losses(batch)


def refused(rank: int) -> list[str]:
    found = []
    for norm in (False, True):
        with pytest.raises(PlanError) as caught:
            topt_trainer(plan(1), max_epochs=2).fit(Averaging(norm=norm), OwnBatches(1))
        found.append(str(caught.value))
    return found


def test_steps_that_change_buffers_are_errors() -> None:
    for mean, norm in on_ranks(refused):
        assert "change the buffer 'mean'" in mean
        assert "change the buffer 'batch_norm.running_mean'" in norm


# ---- searches ------------------------------------------------------------------------------------


def cluster(per_node: int, nodes: int, link: Link) -> Cluster:
    return Cluster("toy", CPU, per_node, nodes, link, link, backend="gloo")


@pytest.mark.parametrize(
    ("case", "summary", "reason"),
    [
        (
            Case(
                4,
                None,
                ONCE | CLIPPED,
                {"cluster": cluster(2, 2, FAST), "memory_limit": "360KiB"},
                width=32,
            ),
            "split on data 2 x tensor 2, 2 microbatches",
            "without which no plan fits",
        ),
        (
            Case(2, None, ONCE, {"cluster": cluster(2, 1, SLOW)}, width=64),
            "on data 1 x tensor 2, 2 microbatches",
            "without that the fastest plan takes",
        ),
    ],
)
def test_tensor_axes_are_found_where_they_are_best(case: Case, summary: str, reason: str) -> None:
    found = check(case)
    assert found["planned"][1] == "search"
    assert summary in found["planned"][0] and reason in found["planned"][2]


def planned_with_statistics(rank: int) -> str:
    """What is planned for a model whose batch norm trains, in what only tensor axes keep."""
    module = Rich(width=32)
    module.batch_norm.train()
    options: Any = {"cluster": cluster(2, 1, FAST), "memory_limit": "10KiB"}
    with pytest.raises(Exception, match="no plan fits") as caught:
        topt_trainer(options=options).fit(module, OwnBatches(2))
    return str(caught.value)


def test_batch_norm_keeps_tensor_axes_out_of_searches() -> None:
    (said, *_) = on_ranks(planned_with_statistics)
    assert "not split over tensor axes: batch norm 'batch_norm' keeps statistics" in said


# ---- what is left --------------------------------------------------------------------------------


def groups_after(rank: int) -> list[int]:
    """Process groups after a fit, evaluations and another fit, beside those before the first."""
    trainer, module, before = topt_trainer(plan(1)), Rich(), len(_world.pg_map)
    counts = []
    for run in (trainer.fit, trainer.test, trainer.test, trainer.fit):
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += run == trainer.fit
        run(module, OwnBatches(2))
        counts.append(len(_world.pg_map) - before)
    return counts


def test_the_groups_of_a_plan_end_with_it() -> None:
    for fit, test, second, last in on_ranks(groups_after):
        assert fit == last > 0 and test == second


def resumed(rank: int, folder: Path) -> Any:
    trainers = {
        "topt": lambda **rest: topt_trainer(plan(1), **rest),
        "ddp": lambda **rest: make_trainer("ddp", devices=2, **rest),
        "search": lambda **rest: topt_trainer(
            options={"cluster": cluster(2, 1, FAST), "memory_limit": "400KiB"}, **rest
        ),
    }
    rest = {"num_sanity_val_steps": 0, "enable_checkpointing": True}
    for first in ("ddp", "topt"):
        torch.manual_seed(rank)
        # Before an evaluation is over: the parameters are whole.
        saving = ModelCheckpoint(folder / first, filename="half", save_on_train_epoch_end=False)
        trainers[first](max_epochs=1, callbacks=[saving], **rest).fit(
            Rich(32, dropout=0.0), OwnBatches(2), OwnBatches(1)
        )
    found = {}
    for first, then in (("ddp", "ddp"), ("topt", "ddp"), ("ddp", "search")):
        module = Rich(32, dropout=0.0)
        trainer = trainers[then](max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(module, OwnBatches(2), OwnBatches(1), ckpt_path=folder / first / "half.ckpt")
        found[first, then] = [output[0] for output in module.outputs], dict(module.state_dict())
    searched = trainer.strategy.parallel_plan
    assert "split on data 1 x tensor 2, 2 microbatches" in searched.summary()
    assert "without which no plan fits" in searched.reason
    return found


def test_checkpoints_go_on_under_ddp_and_back(tmp_path: Path) -> None:
    for found in on_ranks(resumed, tmp_path):
        losses, state = found["ddp", "ddp"]
        for own_losses, own_state in found.values():
            assert len(losses) == 2 and own_losses == pytest.approx(losses, rel=1e-4)
            for name, value in state.items():
                torch.testing.assert_close(own_state[name], value, rtol=1e-3, atol=1e-4)
