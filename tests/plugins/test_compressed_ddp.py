"""CompressedDDPStrategy against Lightning's own ``ddp``, on two or four gloo ranks."""

from __future__ import annotations

import gc
import threading
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_topt.communication import BF16, LocalSteps, TopK
from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy
from tests.models import GPT, Branching, batch_for
from tests.plugins.trainer_ranks import (
    RecordingGPT,
    SgdGPT,
    compressed,
    loader,
    make_trainer,
    mean_over_ranks,
    on_ranks,
    once_on_ranks,
    state_of,
)

NOTHING_EXEMPT: dict[str, Any] = {"exempt": ()}


class Unreported(CompressedDDPStrategy):
    """Nobody takes the statistics before the test does."""

    def exchange_statistics(self) -> None:
        return None


def fit(
    options: dict[str, Any] | None,
    *,
    module: L.LightningModule | None = None,
    ddp: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Losses, parameters and bytes of a fit of `SgdGPT`; Lightning's if `options` is None."""
    torch.manual_seed(0)
    module = SgdGPT() if module is None else module
    ddp = ddp or {}
    strategy = DDPStrategy(**ddp) if options is None else compressed(Unreported, **options, **ddp)
    trainer = make_trainer(strategy, devices=dist.get_world_size(), **{"max_steps": 6, **kwargs})
    trainer.fit(module, loader(4))
    statistics = (
        strategy.exchange.statistics(reset=False)
        if isinstance(strategy, CompressedDDPStrategy)
        else None
    )
    return {
        "losses": getattr(module, "losses", []),
        "state": state_of(module),
        "statistics": statistics,
        "steps": trainer.global_step,
        "records": getattr(module, "records", []),
    }


def fits(rank: int, *runs: tuple[dict[str, Any] | None, dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit(options, **kwargs) for options, kwargs in runs]


def fit_with(rank: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Two ranks clip, by the norm of what is applied."""
    return fit(options, gradient_clip_val=0.05 if dist.get_world_size() == 2 else None)


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def assert_equal_ranks(results: list[list[dict[str, Any]]]) -> None:
    for run in zip(*results, strict=True):
        for other in run[1:]:
            assert all(
                torch.equal(other["state"][name], value) for name, value in run[0]["state"].items()
            )


# ---- the same as ddp -----------------------------------------------------------------------------


EVERYTHING: dict[int, list[dict[str, Any]]] = {
    2: [{"density": 1.0, **NOTHING_EXEMPT}, {"density": 1.0, "nodes": 2, "hierarchical": True}],
    4: [
        {"density": 1.0, "nodes": 2},
        {"method": "dense", "nodes": 2},
        {"method": "bounded_loss", "tolerance": 0.0, "nodes": 2},
    ],
}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [(options, ranks) for ranks, several in EVERYTHING.items() for options in several],
)
def test_everything_sent_equals_ddp(options: dict[str, Any], ranks: int) -> None:
    results = on_ranks(fit_with, options, world_size=ranks)
    assert_equal_ranks([[ours] for ours in results])
    for dense, ours in zip(once_on_ranks(fit_with, None, world_size=ranks), results, strict=True):
        assert ours["losses"] == pytest.approx(dense["losses"], rel=1e-5)
        assert largest_difference(ours["state"], dense["state"]) < 1e-5


# ---- compressed ----------------------------------------------------------------------------------


class Easy(RecordingGPT):
    """Tokens that say what comes next: the loss falls fast."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        return super().training_step((tokens, (tokens + 1) % self.vocab), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def learns(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit(options, module=Easy(), max_steps=25, max_epochs=-1)


LOSSY: list[dict[str, Any]] = [
    {"density": 0.05, "bits": 8, "exempt": ("norm", "bias", "embedding")},
    {"method": "bounded_loss", "tolerance": 0.05},
]


@pytest.mark.parametrize("options", LOSSY, ids=lambda options: "-".join(map(str, options.values())))
def test_it_learns_and_ranks_stay_equal(options: dict[str, Any]) -> None:
    first, second = on_ranks(learns, options)
    assert_equal_ranks([[first], [second]])
    assert first["losses"][-1] < 0.6 * first["losses"][0]


# ---- precision, accumulation ---------------------------------------------------------------------


def in_precision(rank: int, precision: str) -> list[dict[str, Any]]:
    return [fit(options, precision=precision) for options in (None, {"density": 1.0})]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_precisions_equal_ddp(precision: str) -> None:
    for dense, result in on_ranks(in_precision, precision):
        assert result["losses"] == pytest.approx(dense["losses"], rel=2e-2)
        assert largest_difference(result["state"], dense["state"]) < 2e-2
        assert len(set(result["losses"])) > 2


class Overflow(SgdGPT):
    """The gradient of rank 1 overflows in the fourth batch; records norms, scales, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if batch_idx == 3 and self.global_rank == 1 else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        exchange = getattr(self.trainer.strategy, "exchange", None)
        norm = exchange.statistics(reset=False).residual_norm if exchange is not None else None
        scaler = self.trainer.precision_plugin.scaler
        weights = nn.utils.parameters_to_vector(self.parameters()).double().sum().item()
        self.records.append((weights, norm, scaler.get_scale()))


def overflows(rank: int, options: dict[str, Any] | None) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    torch.manual_seed(0)
    return fit(options, module=Overflow(), plugins=[plugin])


SKIPPING: list[dict[str, Any]] = [{"density": 0.1}, {"density": 1.0, "error_feedback": False}]


@pytest.mark.parametrize("options", SKIPPING)
def test_overflow_skips_the_step_on_all_ranks_and_keeps_the_residual(
    options: dict[str, Any],
) -> None:
    dense, ours = once_on_ranks(overflows, None)[0], on_ranks(overflows, options)
    assert_equal_ranks([[result] for result in ours])
    for rank, result in enumerate(ours):
        weights, norms, scales = zip(*result["records"], strict=True)
        assert weights[3] == weights[2] and weights[4] != weights[3]
        assert (
            scales == tuple(scale for _, _, scale in dense["records"])
            and scales[3] == scales[2] / 2
        )
        assert all(value.isfinite().all() for value in result["state"].values())
        if options.get("density") == 1.0:
            assert largest_difference(result["state"], dense["state"]) < 1e-3
        else:
            assert norms[2] > 0
            if rank == 1:  # the other rank's gradient was finite: it holds that back too
                assert norms[3] == pytest.approx(norms[2], rel=1e-6)


def test_accumulation_exchanges_once_per_step() -> None:
    accumulate = {"accumulate_grad_batches": 2, "max_steps": 4}
    for dense, ours in on_ranks(fits, (None, accumulate), ({"density": 1.0}, accumulate)):
        assert (
            ours["losses"] == pytest.approx(dense["losses"], rel=1e-5) and len(ours["losses"]) == 8
        )
        assert ours["steps"] == ours["statistics"].steps == 4


# ---- modules -------------------------------------------------------------------------------------


class Manual(SgdGPT):
    """Two steps per batch by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = GPT.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(mean_over_ranks(outputs["loss"]))


class Unused(Branching):
    """A layer that is never called."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batch_for(self, 32), batch_size=4)


def of_module(rank: int, kind: type[L.LightningModule], ddp: Any) -> list[dict[str, Any]]:
    found = []
    for options in (None, {"density": 1.0}):
        torch.manual_seed(0)
        found.append(fit(options, module=kind(), ddp=ddp, max_steps=4))
    return found


@pytest.mark.parametrize(
    ("kind", "ddp"),
    [(RecordingGPT, {"static_graph": True}), (Manual, {"find_unused_parameters": True})],
    ids=str,
)
def test_modules_equal_ddp(kind: type[L.LightningModule], ddp: dict[str, Any]) -> None:
    for first, second in on_ranks(of_module, kind, ddp):
        assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
        assert largest_difference(first["state"], second["state"]) < 1e-5


def unused(rank: int) -> list[dict[str, Any]]:
    found = []
    for options in (None, {"density": 1.0}, {"density": 0.2}):
        torch.manual_seed(0)
        module = Unused()
        kwargs: dict[str, Any] = {"find_unused_parameters": True}
        strategy = DDPStrategy(**kwargs) if options is None else compressed(**options, **kwargs)
        trainer = make_trainer(strategy, devices=2, max_steps=6)
        trainer.fit(module, module.train_dataloader())
        found.append({"state": state_of(module)})
    return found


def test_unused_parameters() -> None:
    results = on_ranks(unused)
    dense, ours, sparse = results[0]
    assert largest_difference(dense["state"], ours["state"]) < 1e-5
    assert_equal_ranks([[ours, sparse] for _, ours, sparse in results])
    torch.manual_seed(0)
    assert torch.equal(sparse["state"]["unused.weight"], Unused().unused.weight.detach())


def threads_after_fits(rank: int) -> list[int]:
    """Threads of exchanges after each of three fits, whose trainers and strategies are gone.

    Those that were there before do not count: these ranks have run other tests.
    """

    def running() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "gradient-exchange"}

    counts, before = [], running()
    for _ in range(3):
        fit({"method": "topk"}, max_steps=2)
        gc.collect()
        counts.append(len(running() - before))
    return counts


def test_an_exchange_ends_with_its_strategy() -> None:
    assert on_ranks(threads_after_fits) == [[0, 0, 0]] * 2


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"method": {"density": 0.0}}, ValueError, "density"),
        ({"method": {"dencity": 0.1}}, ValueError, "dencity"),
        ({"density": 0.1}, TypeError, "density"),
        ({"method": LocalSteps(every=2)}, ValueError, "LocalStepsStrategy"),
        ({"method": 3}, ValueError, "mapping"),
        ({"nodes": 0}, ValueError, "nodes is at least 1"),
        ({"ddp_comm_hook": print}, ValueError, "ddp_comm_hook would replace"),
    ],
)
def test_wrong_options_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        CompressedDDPStrategy(**options)


def test_options_from_yaml_and_command_lines() -> None:
    options = {"exempt": ["embedding"], "bits": 2}
    method = CompressedDDPStrategy(OmegaConf.create(options)).method
    assert method == TopK(exempt=("embedding",), bits=2)
    assert CompressedDDPStrategy().method == CompressedDDPStrategy("topk").method == TopK()
    assert CompressedDDPStrategy({"method": "bf16", "dense_steps": 4}).method == BF16(dense_steps=4)


class NotANumber(SgdGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("nan") if batch_idx == 3 and self.global_rank == 1 else 1.0)


class Sharded(SgdGPT):
    def configure_model(self) -> None:
        fully_shard(self.head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class Double(SgdGPT):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def fit_error(rank: int, options: dict[str, Any], kind: type[L.LightningModule]) -> tuple[str, str]:
    try:
        fit(options, module=kind())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


ERRORS: list[tuple[dict[str, Any], type[L.LightningModule], str, str]] = [
    ({"nonfinite": "skip"}, SgdGPT, "ValueError", "would train on NaN"),
    ({}, NotANumber, "FloatingPointError", "rank 1 has NaN or infinities"),
    ({}, Sharded, "ValueError", "head.weight is sharded"),
    ({}, Double, "ValueError", "tokens.weight is torch.float64"),
]


@pytest.mark.parametrize(("options", "kind", "name", "says"), ERRORS)
def test_errors_of_a_fit(
    options: dict[str, Any], kind: type[L.LightningModule], name: str, says: str
) -> None:
    for error, message in on_ranks(fit_error, options, kind):
        assert error == name and says in message


def differing(rank: int) -> tuple[str, str]:
    return fit_error(rank, {"density": 0.1 + 0.1 * rank}, SgdGPT)


def test_ranks_that_differ() -> None:
    for error, message in on_ranks(differing):
        assert error == "ValueError" and "density is 0.2 on rank 1 and 0.1 on rank 0" in message
