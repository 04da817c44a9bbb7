"""Checkpoints of a strategy whose engine comes with the first training batch: plain files before, with and after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.ddp_parts import CHECKPOINT_KEY
from lightning_topt.plugins.exchange_steps import ExchangeSteps


class EngineCheckpoints(ExchangeSteps):
    """Files are those of ``ddp``, with the plan beside them, whenever they are written.

    `_engine` runs the plan while `_running`. A state that is loaded before there is an engine is kept in `_resumed` for
    it; where `_holds_back`, optimizers get all but their tensors, which may be too large to be whole on the device.
    """

    parallel_plan: ParallelPlan | None = None
    _engine: Engine | None = None
    _running = False
    _holds_back = False
    _resumed: Mapping[str, Any] | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is not None and self._running:
            return self._engine.module_state()
        return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._engine is not None and self._running:
            self._engine.load_module_state(checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._engine is None and self._holds_back and self._resumed is not None:
            state: dict[str, Any] = self._resumed["optimizer_states"][self.optimizers.index(optimizer)]
            return state
        if self._engine is None or hasattr(optimizer, "consolidate_state_dict"):
            return super().optimizer_state(optimizer)
        return self._engine.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self._engine is not None:
            for optimizer, state in zip(self.optimizers, states, strict=False):
                self._engine.load_optimizer_state(optimizer, state)
            self._load_exchange(checkpoint)
            _optimizers_to_device(self.optimizers, self.root_device)
            return
        if self._holds_back:
            for optimizer, state in zip(self.optimizers, states, strict=False):
                optimizer.load_state_dict({**state, "state": {}})
        else:
            super().load_optimizer_state_dict(checkpoint)
        self._resumed = {name: checkpoint[name] for name in ("optimizer_states", CHECKPOINT_KEY) if name in checkpoint}

    def _load_resumed(self) -> None:
        """Give a new engine what was loaded before it was there."""
        assert self._engine is not None
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is None:
            return
        if self._holds_back:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                options = [dict(group) for group in optimizer.param_groups]  # user code may have changed them since
                self._engine.load_optimizer_state(optimizer, state)
                for group, before in zip(optimizer.param_groups, options, strict=True):
                    group.update({name: value for name, value in before.items() if name != "params"})
            _optimizers_to_device(self.optimizers, self.root_device)
        self._load_exchange(checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # A checkpoint of a Trainer names Lightning's version; bare weights (sent back by forked ranks) stay bare.
        if self.parallel_plan is not None and "pytorch-lightning_version" in checkpoint:
            # The user's hooks were given `checkpoint`, and may keep it.
            checkpoint = {**checkpoint, CHECKPOINT_KEY: {"plan": self.parallel_plan.to_dict()}}
            self._save_exchange(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)


def is_held_by(module: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an attribute of `module` is, or directly holds, `optimizer`: then it may be used after the fit."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            held = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            if any(item is optimizer for item in held):
                return True
    return False
