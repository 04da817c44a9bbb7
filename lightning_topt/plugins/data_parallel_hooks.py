"""What strategies on Lightning's DDPStrategy share.

    rank_watch        names the rank that is lost (`lost_ranks`)
    _guard            looks after the exchange of gradients (`ExchangeGuard`)
    _training_data    where in an epoch a checkpoint was made (`training_data`)
    _batches          ranks end an epoch together (`equal_batches`)

`DataParallelHooks` makes the four, and hands on to them. Below it: the guard, the options that
Lightning's strategy takes as well, and the errors that speak of them.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt import plugins
from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.hook import CompressedExchange, ExchangeStatistics
from lightning_topt.communication.rank_watch import PeerLostError, is_of_collective
from lightning_topt.communication.topology import Topology, at_exit
from lightning_topt.plugins.equal_batches import EqualBatches
from lightning_topt.plugins.lost_ranks import LostRankWatch, Runs
from lightning_topt.plugins.training_data import CHECKPOINT_KEY, TrainingData

if TYPE_CHECKING:
    from lightning_topt.communication.local_sgd import OuterSteps

log = logging.getLogger(__name__)
EXCHANGE_KEY = "gradient_exchange"  # in our part of checkpoints
HOOK_OPTIONS = (
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
    "mixed_precision",
)


class DataParallelHooks(DDPStrategy):
    """The hooks of Lightning that only hand on to the four parts above.

    Args:
        options: of `DDPStrategy`.
        uneven: as in `EqualBatches`, and so is `gathers`.
    """

    _runs: Runs | None = None  # what runs a Trainer's functions in ranks that are processes

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        uneven: str | None,
        gathers: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(**options)
        self.rank_watch = LostRankWatch()
        self._guard = ExchangeGuard(self.rank_watch)
        self._training_data = TrainingData(self)
        self._batches = EqualBatches(uneven, gathers=gathers)

    def exchange_statistics(self) -> ExchangeStatistics | None:
        """Return what was exchanged since the last call; None without an exchange.

        Of local steps since the fit began: outer steps are too rare for shorter periods.
        """
        exchange = self._guard.exchange
        return None if exchange is None else exchange.statistics(reset=True)

    # ---- life cycle ------------------------------------------------------------------------------

    @property
    @override
    def launcher(self) -> Any:
        return self.rank_watch.launcher(self, super().launcher, runs=self._runs)

    @override
    def setup_distributed(self) -> None:
        self.rank_watch.meet(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        check_devices(self)
        super().setup_environment()
        self.rank_watch.begin()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._training_data.check_checkpoint(trainer)
        self._batches.begin(trainer)
        super().setup(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._guard.close(alone=True)  # the other ranks may be anywhere
        self.rank_watch.name(exception)
        super().on_exception(exception)
        name_own_strategy(exception, type(self).__name__)

    @override
    def teardown(self) -> None:
        if self._start_method != "popen":  # such ranks end without running what `atexit` holds
            self._guard.close()
        self._training_data.end()
        self._batches.end()
        with self.rank_watch.last():
            super().teardown()

    # ---- steps -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._guard.errors():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._guard.begin_backward(self.precision_plugin)
        with self._guard.errors():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

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

    def add_state(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the exchange to a checkpoint that is saved. A collective call."""
        self._guard.add_state(checkpoint, self.lightning_module)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        checkpoint = dict(self._training_data.with_state(checkpoint))  # hooks may keep theirs
        self.add_state(checkpoint)
        self.write_checkpoint(checkpoint, filepath, storage_options, super().save_checkpoint)

    def write_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, as_file: Any
    ) -> None:
        """Write a checkpoint, by Lightning's `as_file` where it is a file."""
        as_file = partial(as_file, storage_options=storage_options)
        if _may_be_folder(path):
            plugins.save_file(self, checkpoint, path, as_file)
        else:
            as_file(checkpoint, path)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        load = super().load_checkpoint
        checkpoint = self.read_checkpoint(checkpoint_path, load, weights_only)
        self._training_data.take(checkpoint)
        return checkpoint

    def read_checkpoint(self, path: Any, load: Any, weights_only: bool | None) -> dict[str, Any]:
        """Return a checkpoint, by Lightning's ``load(path, weights_only)`` where it is a file."""
        if _may_be_folder(path):
            load = partial(plugins.load_whole, load=load)
        checkpoint: dict[str, Any] = load(path, weights_only)
        return checkpoint


def _may_be_folder(path: Any) -> bool:
    return os.path.isdir(path) or "://" in str(path)


# ---- the exchange of gradients -------------------------------------------------------------------


class ExchangeGuard:
    """Looks after a strategy's `exchange`, None where DDP's own all-reduce averages gradients.

    It stays open after a fit, for checkpoints, until the next fit or the end of the process.
    """

    def __init__(self, rank_watch: LostRankWatch) -> None:
        self.exchange: CompressedExchange | OuterSteps | None = None
        self._call_off: Callable[[], None] | None = None
        self._rank_watch = rank_watch

    def open(self, exchange: CompressedExchange | OuterSteps | None) -> None:
        """Take `exchange` in place of the last one."""
        self.close()
        self.exchange = exchange
        if exchange is not None:
            self._call_off = at_exit(exchange.end)

    def close(self, *, alone: bool = False) -> None:
        """End the exchange; other ranks need not do so where this one does it `alone`."""
        if self.exchange is not None:
            if self._call_off is not None:
                self._call_off()
                self._call_off = None
            if alone:
                self.exchange.end()
            else:
                self.exchange.close()
            self.exchange = None

    # ---- steps -----------------------------------------------------------------------------------

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise the error of the hook that autograd and DDP may have wrapped in their own.

        DDP hands out the buckets of unused parameters in its forward pass already.
        """
        try:
            yield
        except Exception as error:
            # What the hook has raised in its thread or in backward.
            reason = None if self.exchange is None else self.exchange.error
            # Another collective failed: somebody is lost.
            if reason is None and is_of_collective(error) and not isinstance(error, PeerLostError):
                reason = self._rank_watch.diagnose(error)
            if reason is None or error is reason:
                raise
            raise reason from error

    def begin_backward(self, precision: Precision) -> None:
        """Tell the exchange by what `precision` has scaled the loss."""
        scaler = getattr(precision, "scaler", None)  # of 16-mixed
        if self.exchange is not None and scaler is not None:
            self.exchange.loss_scale = scaler.get_scale()

    def step(self, step: Callable[[], Any], precision: Precision) -> Any:
        """Return what an optimizer's `step` returns; tell the exchange where it was skipped.

        A scaler lowers its scale exactly then.
        """
        output = step()
        exchange, scaler = self.exchange, getattr(precision, "scaler", None)
        if exchange is not None and scaler is not None and scaler.get_scale() < exchange.loss_scale:
            exchange.step_skipped()
        return output

    # ---- checkpoints -----------------------------------------------------------------------------

    def saves_state(self, checkpoint: Mapping[str, Any], module: pl.LightningModule | None) -> bool:
        """Return whether `checkpoint` is to have the exchange's state.

        It has that with the optimizers', and while the ranks are together.
        """
        return (
            self.exchange is not None
            and module is not None
            and "optimizer_states" in checkpoint
            # After an exception the other ranks may be anywhere: a collective call could wait for
            # them.
            and not module.trainer.interrupted
        )

    def add_state(self, checkpoint: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Put the exchange's state into a checkpoint that is to have it. A collective call."""
        if self.saves_state(checkpoint, module):
            assert self.exchange is not None
            checkpoint.setdefault(CHECKPOINT_KEY, {})[EXCHANGE_KEY] = self.exchange.state_dict()

    def load_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the exchange what `checkpoint` has of it."""
        state = checkpoint.get(CHECKPOINT_KEY, {}).get(EXCHANGE_KEY)
        if state is None:
            return
        # The residuals of another method mean nothing to this one.
        method = None if self.exchange is None else self.exchange.method.name
        if self.exchange is not None and state["method"] == method:
            self.exchange.load_state_dict(state)
            if self.exchange.trains_alone:
                rank_zero_warn(
                    "topt: ranks that train alone have optimizers of their own, and the checkpoint "
                    "has that of rank 0: all go on with it"
                )
            return
        now = "an all-reduce" if method is None else f"method={method!r}"
        rank_zero_warn(
            f"the checkpoint's gradients were exchanged by method={state['method']!r}; {now} "
            "starts without what that held back"
        )


# ---- options of Lightning's DDPStrategy ----------------------------------------------------------


class NodeShape(NamedTuple):
    """Who shares a node, where it is not what the Trainer has; None: it is, or it follows."""

    nodes: int | None
    ranks_per_node: int | None

    def checked(self) -> NodeShape:
        """Return itself. Raises ValueError for what are no numbers of nodes and ranks."""
        for name, size in self._asdict().items():
            if size is not None:
                check_whole(size, name=name)
        return self

    def topology(self, strategy: DDPStrategy) -> Topology:
        """Return the topology of the ranks of `strategy`. Raises ValueError where it has others."""
        nodes, ranks = self
        if nodes is None and ranks is None:
            nodes = strategy.num_nodes
        # One of the two numbers follows from the other.
        ranks = ranks or strategy.world_size // (nodes or 1)
        nodes = nodes or strategy.world_size // ranks
        if nodes * ranks != strategy.world_size:
            raise ValueError(
                f"the world size is {strategy.world_size}, which is not nodes x ranks_per_node: "
                f"nodes={self.nodes} and ranks_per_node={self.ranks_per_node}; give numbers that "
                "fit, or neither, for those of the Trainer"
            )
        return Topology(nodes, ranks, strategy.global_rank)


def checked_ddp_options(
    options: dict[str, Any], *, strategy: str, wraps: bool = True
) -> dict[str, Any]:
    """Return `options`, each of which `DDPStrategy` takes.

    Where the strategy `wraps` its module, those of `DistributedDataParallel` are known as well.

    Raises ValueError for options that bring a communication hook, TypeError for one that nobody
    takes.
    """
    # Options that would replace our exchange.
    for name in HOOK_OPTIONS:
        if options.get(name) is not None:
            raise ValueError(
                f"{strategy} exchanges gradients in its own way, which {name} would replace: leave "
                f"{name} out, or use Lightning's DDPStrategy with it"
            )
    owners = (DDPStrategy, DistributedDataParallel) if wraps else (DDPStrategy,)
    return known_options(options, strategy=strategy, owners=owners, without=HOOK_OPTIONS)


def known_options(
    options: dict[str, Any],
    *,
    strategy: str,
    owners: Sequence[type] = (DDPStrategy, DistributedDataParallel),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Return `options`, each of which one of `owners` takes. Raises TypeError for others.

    None of them is one of `without`.
    """
    # All keyword arguments of their constructors.
    known = {
        name
        for owner in owners
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    } - {"module", "device_ids", *without}
    if unknown := sorted(set(options) - known):
        raise TypeError(
            f"{strategy} does not take {unknown[0]!r}; DDP's own options are {sorted(known)}"
        )
    return options


def check_devices(strategy: DDPStrategy) -> None:
    """Raise ValueError where DDP does not run on the devices of `strategy`.

    Lightning finds it out by the word ``ddp`` in a strategy's name, which ours do not have. Warn
    where srun has not numbered ranks node by node.
    """
    if any(device.type == "mps" for device in strategy.parallel_devices or ()):
        raise ValueError(
            f"{type(strategy).__name__} runs on CPU and CUDA devices, not on MPS: use "
            "Trainer(accelerator='cpu'), or another strategy"
        )
    # of the first node, on which rank 0 is: "0,1", or "0,2" where srun deals ranks out in turn
    numbers = os.environ.get("SLURM_GTIDS", "0").split(",")
    if (
        isinstance(strategy.cluster_environment, SLURMEnvironment)
        and strategy.cluster_environment.global_rank() == 0
        and numbers != [str(rank) for rank in range(len(numbers))]
    ):
        log.warning(
            "the first node has ranks %s, but plans take ranks that follow each other to be on one "
            "node, so they may be slower than predicted: srun --distribution=block numbers them so",
            ", ".join(numbers),
        )


def name_own_strategy(error: BaseException, strategy: str) -> None:
    """Let Lightning's advice on unused parameters name our `strategy`, not its ``ddp``."""
    # The advice names a strategy string; ours have the same endings.
    name = {"AutoParallelStrategy": "topt", "CompressedDDPStrategy": "topt_compressed"}.get(
        strategy
    )
    if name is not None:
        error.args = tuple(
            argument.replace("='ddp_find_unused", f"='{name}_find_unused").replace(
                "=DDPStrategy(", f"={strategy}("
            )
            if isinstance(argument, str)
            else argument
            for argument in error.args
        )
