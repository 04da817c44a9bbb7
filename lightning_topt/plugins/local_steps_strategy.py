"""Lightning strategy whose ranks train alone and exchange once in many steps (DiLoCo)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt import plugins
from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.communication.checkpoint import gather_state, own_state
from lightning_topt.communication.exchange_method import ExchangeMethod, LocalMethod
from lightning_topt.communication.hook import ExchangeStatistics, equal_parameters
from lightning_topt.communication.local_exchange import statistics_of
from lightning_topt.communication.local_sgd import OuterSteps
from lightning_topt.communication.method_registry import DEFAULT_METHOD, read_method
from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy, make_topology
from lightning_topt.plugins.ddp_options import check_devices, checked_ddp_options
from lightning_topt.plugins.equal_batches import EqualBatches
from lightning_topt.plugins.exchange_guard import CHECKPOINT_KEY, EXCHANGE_KEY
from lightning_topt.plugins.lost_ranks import LostRankWatch
from lightning_topt.plugins.monitors import add_monitor
from lightning_topt.plugins.preemption import Preemption
from lightning_topt.plugins.training_data import TrainingData
from lightning_topt.techniques.ddp_wrapper import names_to_ignore

State = dict[str, dict[str, torch.Tensor]]
_OF_ALL_RANKS = ("method", "ranks", "optimizers")  # in checkpoints; the rest is `OuterSteps`'
# Rank 0 holds the optimizer states of all replicas while it saves: no more bytes of them than this.
_MOST_STATE_BYTES = 1 << 30


class LocalStepsStrategy(DDPStrategy):
    """Every rank makes some optimizer steps alone, then an outer step brings all together.

    No gradient is exchanged and there is no DistributedDataParallel: see `OuterSteps`. It is not
    the same training as ``ddp``: clipping, a GradScaler and the optimizer's state are each rank's
    own.

    Besides every so many steps there is an outer step before each validation, before a checkpoint
    is saved and at the end of the fit. So all ranks validate and save the same parameters. A
    checkpoint has the outer momentum and the residual of all ranks (redistributed on another number
    of ranks). It has the optimizer states of all replicas where they take at most 1 GiB together,
    else that of rank 0. Adam's is two copies of the parameters.

    Args:
        method: an object such as ``LocalSteps(every=50)``, a name for its defaults, or a mapping
            such as ``{"method": "local_steps", "every": 50}``.
        timeout_seconds: for every wait on another rank.
        nodes, ranks_per_node: who shares a node (for a hierarchical method), where it is not what
            the Trainer has.
        uneven: as in `AutoParallelStrategy`.
        ddp_options: arguments of Lightning's `DDPStrategy`; those of `DistributedDataParallel` mean
            nothing here.

    Raises ValueError for wrong options and more than one optimizer; `PeerLostError` when a rank is
    gone; FloatingPointError for parameters that are not finite.
    """

    def __init__(
        self,
        method: ExchangeMethod | str | Mapping[str, Any] = "local_steps",
        *,
        timeout_seconds: float = 600.0,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        uneven: str | None = "stop",
        **ddp_options: Any,
    ) -> None:
        super().__init__(
            **checked_ddp_options(ddp_options, strategy=type(self).__name__, wraps=False)
        )
        self.method = _read_local_method(method)
        self.timeout_seconds = check_real(timeout_seconds, name="timeout_seconds", positive=True)
        for name, size in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if size is not None:
                check_whole(size, name=name)
        self._nodes, self._ranks_per_node = nodes, ranks_per_node
        self.outer: OuterSteps | None = None
        self._failed = False  # the last fit
        self._fitting = False  # parameters may differ between ranks
        self.rank_watch = LostRankWatch()
        self._training_data = TrainingData(self, Preemption())
        self._batches = EqualBatches(uneven)

    # ---- life cycle ------------------------------------------------------------------------------

    @property
    @override
    def launcher(self) -> Any:
        return self.rank_watch.launcher(self, super().launcher)

    @override
    def setup_distributed(self) -> None:
        self.rank_watch.meet(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        check_devices(self)
        with self.rank_watch.meeting():
            super().setup_environment()
        self.rank_watch.begin()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._training_data.check_checkpoint(trainer)
        self._batches.begin(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            add_monitor(trainer)

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        # Frozen parameters are no part of outer steps: they are made equal here, once.
        ignored = names_to_ignore(module)
        trained = equal_parameters(module, ignored)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and name not in ignored:
                dist.broadcast(parameter.detach(), 0)
        if self.outer is not None and not self._failed:
            self.outer.close()  # of the fit before
        self._failed = False
        self.outer = OuterSteps(
            trained.items(),
            self.method,
            buffers=[
                (name, buffer) for name, buffer in module.named_buffers() if name not in ignored
            ],
            topology=make_topology(
                nodes=self._nodes,
                ranks_per_node=self._ranks_per_node,
                rank=self.global_rank,
                trainer_nodes=self.num_nodes,
                world_size=self.world_size,
            ),
            timeout_seconds=self.timeout_seconds,
            watch=self.rank_watch.ranks,
        )
        self._fitting = True

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                "local steps are steps of one optimizer, and configure_optimizers returned "
                f"{len(self.optimizers)}: use one with several parameter groups, or "
                'strategy="topt_compressed"'
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
        # the other ranks may be anywhere: no collective calls any more
        self._fitting, self._failed = False, True
        self.rank_watch.name(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._batches.end()
        self._fitting = False
        self._training_data.end()
        with self.rank_watch.last():
            super().teardown()

    def _synchronize(self) -> None:
        if self._fitting and self.outer is not None:
            self.outer.synchronize()

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._fitting and self.outer is not None:
            # In each of several micro-batches: the mean of what is a mean already, and the new
            # part, is the mean of both.
            self.outer.average_gradients()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.outer is not None and self.lightning_module is not None
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # A parameter that is unfrozen later would differ between ranks.
        known, module = self.outer.parameters.tensors, self.lightning_module
        for name in equal_parameters(module, names_to_ignore(module)):
            if name not in known:
                raise ValueError(
                    f"{name} was frozen when the fit began and is trained now, so ranks would "
                    "never exchange it: begin with it trainable, or start another fit"
                )
        self.outer.after_step()
        return output

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the fit began, None outside of a fit.

        Outer steps are too rare for shorter periods.
        """
        return None if self.outer is None else statistics_of(self.outer)

    # ---- training data ---------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._training_data.track(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._training_data.begin()

    # ---- checkpoints -----------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronize()
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        checkpoint = self._training_data.with_state(checkpoint)
        whole = self.outer is not None and "optimizer_states" in checkpoint
        if whole and not self.lightning_module.trainer.interrupted:
            # hooks may keep theirs
            own = {**checkpoint.get(CHECKPOINT_KEY, {}), EXCHANGE_KEY: self._outer_state()}
            checkpoint = {**checkpoint, CHECKPOINT_KEY: own}
        as_file = partial(super().save_checkpoint, storage_options=storage_options)
        if os.path.isdir(filepath) or "://" in str(filepath):
            plugins.save_file(self, checkpoint, filepath, as_file)
        else:
            as_file(checkpoint, filepath)

    def _outer_state(self) -> dict[str, Any]:
        """Return the state of all ranks, on rank 0.

        What is equal on all ranks is there once. A collective call.
        """
        assert self.outer is not None and dist.group.WORLD is not None
        state = self.outer.state_dict()
        own = {"residual": state.pop("residual")} if "residual" in state else {}
        ranks = gather_state(own, senders=self.outer.holders, group=dist.group.WORLD)
        state["optimizers"] = self._other_optimizers()
        if all(
            parameter.dtype == torch.float32 for parameter in self.outer.parameters.tensors.values()
        ):
            del state["anchor"]  # it is the parameters
        return {"method": self.method.name, "ranks": ranks, **state}

    def _other_optimizers(self) -> list[dict[int, dict[str, Any]]]:
        """Return the states of the optimizers of all replicas but the first, on rank 0.

        None of them where they are too large together. A collective call.
        """
        assert self.outer is not None and dist.group.WORLD is not None
        if not self.optimizers:
            return []
        # Tensors one at a time, then what is no tensor.
        tensors: State = {}
        plain: dict[int, dict[str, Any]] = {}
        for index, values in self.optimizers[0].state_dict().get("state", {}).items():
            plain[index] = {}
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(str(index), {})[name] = value
                else:
                    plain[index][name] = value
        others = self.outer.holders[1:]
        sizes: list[Any] = [None] * self.world_size
        own = sum(value.nbytes for values in tensors.values() for value in values.values())
        dist.all_gather_object(sizes, own)
        if sum(sizes[holder] for holder in self.outer.holders) > _MOST_STATE_BYTES:
            return []
        gathered = gather_state(tensors, senders=others, group=dist.group.WORLD)
        plains: list[Any] = [None] * self.world_size
        dist.gather_object(plain, plains if self.global_rank == 0 else None)
        return [
            {
                index: {**values, **of_holder.get(str(index), {})}
                for index, values in plains[holder].items()
            }
            for holder, of_holder in zip(others, gathered, strict=bool(gathered))
        ]

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        if os.path.isdir(checkpoint_path) or "://" in str(checkpoint_path):
            load = partial(plugins.load_whole, load=load)
        checkpoint = load(checkpoint_path, *args, **kwargs)
        self._training_data.take(checkpoint)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(EXCHANGE_KEY)
        if state is None or self.outer is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        # The optimizer of this rank, or of any where there were other ranks.
        holders = self.outer.holders
        position = self.global_rank * len(holders) // self.world_size
        states, others = [*checkpoint["optimizer_states"]], state.get("optimizers", [])
        missing = len(holders) - 1 - len(others)
        if missing > 0 and states and states[0].get("state"):
            rank_zero_warn(
                f"the optimizers of {missing} of {len(holders)} replicas go on with the state of "
                f"another replica: the checkpoint has {1 + len(others)}"
            )
        if states and (source := position % (1 + len(others))):
            states[0] = {**states[0], "state": others[source - 1]}
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        if state["method"] != self.method.name:
            rank_zero_warn(
                f"the checkpoint's gradients were exchanged by method={state['method']!r}; local "
                "steps start without what that held back"
            )
            return
        # This rank's part of what all ranks had, however many they were.
        parameters = self.outer.parameters.tensors
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        own: State = own_state(
            state["ranks"], position=position, holders=len(holders), numels=numels
        )
        anchor = {name: parameter.detach() for name, parameter in parameters.items()}
        known = {
            "anchor": anchor,
            **{name: value for name, value in state.items() if name not in _OF_ALL_RANKS},
        }
        self.outer.load_state_dict({**known, **own})


def compressed_strategy(
    method: ExchangeMethod | str | Mapping[str, Any] = DEFAULT_METHOD, **options: Any
) -> CompressedDDPStrategy | LocalStepsStrategy:
    """Return the strategy for a method of either kind, for configurations.

    Args:
        method: as both strategies take it.
        options: those of the strategy that it is.
    """
    read = read_method(method)
    is_local = isinstance(read, LocalMethod)
    return (LocalStepsStrategy if is_local else CompressedDDPStrategy)(read, **options)


def _read_local_method(given: ExchangeMethod | str | Mapping[str, Any]) -> LocalMethod:
    method = read_method(
        {"method": "local_steps", **given} if isinstance(given, Mapping) else given
    )
    if not isinstance(method, LocalMethod):
        raise ValueError(
            f"{type(method).__name__} averages gradients in every step: give it to "
            "CompressedDDPStrategy, or choose a method such as LocalSteps(every=50)"
        )
    return method
