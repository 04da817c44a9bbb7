"""Lightning strategy whose ranks train alone and exchange once in many steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.checkpoint import gather_state, own_state
from lightning_topt.communication.hook import ExchangeStatistics
from lightning_topt.communication.local_steps import LocalSteps, check_options
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.plugins.ddp_parts import (
    CHECKPOINT_KEY,
    EXCHANGE_KEY,
    checked_ddp_options,
)
from lightning_topt.plugins.exchange_monitor import add_monitor
from lightning_topt.plugins.lost_ranks import NamesLostRanks

METHOD = "local_steps"  # in checkpoints, beside the methods of `ExchangeOptions`
State = dict[str, dict[str, torch.Tensor]]


class LocalStepsStrategy(NamesLostRanks):
    """Every rank makes `every` optimizer steps alone, then an outer step brings all together.

    No gradient is exchanged and there is no DistributedDataParallel: see `LocalSteps`. It is not the same training as ``ddp``:
    clipping, a GradScaler and the optimizer's state are each rank's own.

    Besides every `every` steps there is an outer step before each validation, before a checkpoint is saved and at the end of
    the fit, so that all ranks validate and save the same parameters. A checkpoint has the outer momentum, the residual of all
    ranks (redistributed on another number of ranks), and the optimizer state of rank 0, from which all ranks go on.

    Args:
        every: optimizer steps between outer steps.
        outer_learning_rate, outer_momentum, density, residual_decay, value_dtype, timeout_seconds: as in `LocalSteps`.
        ddp_options: arguments of Lightning's `DDPStrategy`; those of `DistributedDataParallel` mean nothing here.

    Raises ValueError for wrong options and more than one optimizer; `PeerLostError` when a rank is gone; FloatingPointError
    for parameters that are not finite.
    """

    def __init__(
        self,
        *,
        every: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        density: float | None = None,
        residual_decay: float = 1.0,
        value_dtype: str = "float32",
        timeout_seconds: float = 600.0,
        **ddp_options: Any,
    ) -> None:
        super().__init__(**checked_ddp_options(ddp_options, strategy=type(self).__name__, wraps=False))
        self.options: dict[str, Any] = {
            "every": every,
            "outer_learning_rate": outer_learning_rate,
            "outer_momentum": outer_momentum,
            "density": density,
            "residual_decay": residual_decay,
            "value_dtype": value_dtype,
            "timeout_seconds": timeout_seconds,
        }
        check_options(self.options)
        self.local_steps: LocalSteps | None = None
        self._fitting = False  # parameters may differ between ranks

    # ---- life cycle -----------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            add_monitor(trainer)

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name, parameter in module.named_parameters():
            if name not in trained:
                dist.broadcast(parameter.detach(), 0)
        self.local_steps = LocalSteps(trained.items(), buffers=module.named_buffers(), **self.options)
        self._fitting = True

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                "local steps are steps of one optimizer, and configure_optimizers returned "
                f'{len(self.optimizers)}: use one with several parameter groups, or strategy="topt_compressed"'
            )

    @override
    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.sanity_checking:
            self._synchronize()
        super().on_validation_start()

    @override
    def on_train_end(self) -> None:
        self._synchronize()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fitting = False  # the other ranks may be anywhere: no collective calls any more
        if self.local_steps is not None and is_of_collective(exception):
            with suppress(RuntimeError):
                self.local_steps.monitor.sign_in()  # others may wait in an outer step for this rank
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._fitting = False
        super().teardown()

    def _synchronize(self) -> None:
        if self._fitting and self.local_steps is not None:
            self.local_steps.synchronize()

    # ---- steps ----------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.local_steps is not None and self.lightning_module is not None
        known = self.local_steps.parameters.tensors
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad and name not in known:
                raise ValueError(
                    f"{name} was frozen when the fit began and is trained now, so ranks would never exchange it: begin with it "
                    "trainable, or start another fit"
                )
        self.local_steps.after_step()
        return output

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the fit began, None outside of a fit: outer steps are too rare for shorter
        periods.
        """
        if self.local_steps is None:
            return None
        found, density = self.local_steps.statistics, self.options["density"]
        return ExchangeStatistics(
            steps=found.local_steps,
            bytes_sent=found.bytes_sent,
            dense_bytes=found.dense_bytes,
            exposed_seconds=found.exchange_seconds,
            exchange_seconds=found.exchange_seconds,
            residual_norm=found.residual_norm,
            density=1.0 if density is None else density,
        )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronize()
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        assert self.lightning_module is not None
        whole = self.local_steps is not None and "optimizer_states" in checkpoint
        if whole and not self.lightning_module.trainer.interrupted:
            checkpoint = {**checkpoint, CHECKPOINT_KEY: {EXCHANGE_KEY: self._outer_state()}}  # hooks may keep theirs
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _outer_state(self) -> dict[str, Any]:
        """Collective call: the state of all ranks, whole on rank 0. What is equal on all ranks is there once."""
        assert self.local_steps is not None and dist.group.WORLD is not None
        state = self.local_steps.state_dict()
        own = {"residual": state.pop("residual")} if "residual" in state else {}
        ranks = gather_state(own, senders=range(self.world_size), group=dist.group.WORLD)
        if all(parameter.dtype == torch.float32 for parameter in self.local_steps.parameters.tensors.values()):
            del state["anchor"]  # it is the parameters
        return {"method": METHOD, "ranks": ranks, **state}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(EXCHANGE_KEY)
        if state is None or self.local_steps is None:
            return
        if state["method"] != METHOD:
            rank_zero_warn(
                f"the checkpoint's gradients were exchanged by method={state['method']!r}; local steps start without what "
                "that held back"
            )
            return
        parameters = self.local_steps.parameters.tensors
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        own: State = own_state(state["ranks"], position=self.global_rank, holders=self.world_size, numels=numels)
        anchor = {name: parameter.detach() for name, parameter in parameters.items()}
        known = {"anchor": anchor, **{name: value for name, value in state.items() if name not in ("method", "ranks")}}
        self.local_steps.load_state_dict({**known, **own})
