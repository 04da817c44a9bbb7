"""What our strategies share: lost ranks are named, DDP's options checked, the end is orderly.

`NamesLostRanks` is the base of the strategies. When a rank dies, hangs or is stopped, the others
get an error of a collective call that says nothing of it; here that error says which rank is lost,
and why (`communication.rank_watch`), however ranks were started.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.rank_watch import (
    GRACE_SECONDS,
    STORE_SECONDS,
    PeerLostError,
    RankWatch,
    init_attempt,
    is_of_collective,
    shares_store_between_attempts,
    watch_ranks,
)
from lightning_topt.communication.topology import Topology
from lightning_topt.plugins.register import register_names as register_names
from lightning_topt.techniques.run_options import RunOptions

CHECKPOINT_KEY, EXCHANGE_KEY, PIPELINE_KEY = "lightning_topt", "gradient_exchange", "pipeline"
HOOK_OPTIONS = (
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
    "mixed_precision",
)

log = logging.getLogger(__name__)


LAST_SECONDS = GRACE_SECONDS + STORE_SECONDS + 5  # for the main process to end with its own error


def name_lost(error: BaseException, watch: RankWatch | None) -> None:
    """Let `error` of a collective call say which rank is lost.

    Of any other error word is left for the other ranks.
    """
    # Somebody has said it already.
    if watch is None or (isinstance(error, PeerLostError) and error.diagnosed):
        return
    if is_of_collective(error):
        error.args = watch.diagnose(error).args
    else:
        watch.tell(error)


class NamesLostRanks(DDPStrategy):
    """A DDPStrategy that says which rank is lost in the errors that end a run.

    It watches all ranks from `setup_environment` to `teardown`. The process group ends before the
    interpreter does.
    """

    _watch: RankWatch | None = None
    _ended_with_error = False

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # Ranks as processes.
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = PatientLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        # Ranks by fork or spawn.
        elif self._start_method != "popen":
            self._launcher = NamingLauncher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        # Restarted ranks meet in the same store as those before them.
        if not dist.is_initialized() and shares_store_between_attempts():
            self.set_world_ranks()
            device = None if self.root_device.type == "cpu" else self.root_device
            init_attempt(
                self._get_process_group_backend(),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout or default_pg_timeout,
                device_id=device,
            )
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # That of an earlier fit.
        self._end_watch()
        self._watch, self._ended_with_error = watch_ranks(), False
        atexit.register(destroy_process_group)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._ended_with_error = True
        name_lost(exception, self._watch)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        except RuntimeError as error:
            # Where a backward pass was cut off, parameters may not be moved any more: that must not
            # hide what cut it off.
            if not self._ended_with_error:
                raise
            log.warning("the module stays as the error left it: %s", error)
        finally:
            self._end_watch()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


class NamingLauncher(_MultiProcessingLauncher):
    """Lightning's start of ranks by fork or spawn, whose errors reach the strategy.

    Lightning's own asks it in the main process only.
    """

    @override
    def _wrapping_function(self, process_idx: int, trainer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except Exception as error:
            strategy = self._strategy if trainer is None else trainer.strategy
            name_lost(error, getattr(strategy, "_watch", None))
            raise


class PatientLauncher(_SubprocessScriptLauncher):
    """Lightning's start of ranks as processes, whose main one may end by itself.

    When a rank has died the main process says who, with its own error. Lightning's own kills the
    main process as soon as it has noticed, within five seconds.
    """

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        # As in Lightning, but for the observer.
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            PatientObserver(main_pid=os.getpid(), child_processes=self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class PatientObserver(_ChildProcessObserver):
    """Kills what is left of a run only where its main process has not ended by itself."""

    @override
    def _terminate_all(self) -> None:
        # The main process waits in a collective call until that names the lost rank.
        main, deadline = threading.main_thread(), time.monotonic() + LAST_SECONDS
        while main.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        if main.is_alive():
            super()._terminate_all()
            return
        for process in self._child_processes:
            process.send_signal(self._termination_signal)


# ---- options of Lightning's DDPStrategy ----------------------------------------------------------


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


def run_options(strategy: DDPStrategy, *, scales: bool) -> RunOptions:
    """Return what Lightning's DDPStrategy would make of its options.

    `scales`: a GradScaler skips gradients that overflow.
    """
    # As DDPStrategy registers it.
    hook = strategy._ddp_comm_hook
    if hook is not None and strategy._ddp_comm_wrapper is not None:
        hook = strategy._ddp_comm_wrapper(hook)
    return RunOptions(
        ddp=strategy._ddp_kwargs,
        hook=hook,
        hook_state=strategy._ddp_comm_state,
        topology=Topology(
            strategy.num_nodes, strategy.world_size // strategy.num_nodes, strategy.global_rank
        ),
        nonfinite="skip" if scales else "error",
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


def refuse_momentum(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for an optimizer with momentum: the exchanged gradient has it already."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, own in (
                ("momentum", group.get("momentum")),
                ("betas", (group.get("betas") or (0,))[0]),
            ):
                if own:
                    raise ValueError(
                        f"what the exchange gives has momentum, and {type(optimizer).__name__} has "
                        f"its own ({name}={group[name]}), which would be applied twice: set that "
                        "to 0 in configure_optimizers (Adam: betas=(0, ...)), or choose an "
                        "exchange without (TopK(momentum=0))"
                    )


def destroy_process_group() -> None:
    """Destroy the process group, for `atexit`.

    Lightning does this for NCCL only; threads of a gloo group that outlives the interpreter can
    abort it. A thread of the group drops the tensors of the last collective call after that has
    returned, for which it needs the interpreter. Trainers and models refer to the group in cycles.
    Both are done with after a collection.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
