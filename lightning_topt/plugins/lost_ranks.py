"""Every strategy of ours does this so that a rank that is lost, killed or stopped is named on the
others.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
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
from lightning_topt.plugins.ddp_parts import destroy_process_group

log = logging.getLogger(__name__)

LAST_SECONDS = GRACE_SECONDS + STORE_SECONDS + 5  # for the main process to end with its own error


def name_lost(error: BaseException, watch: RankWatch | None) -> None:
    """Give `error` of a collective call the message that says who is lost; leave word of any other
    error for the others.
    """
    if watch is None or (isinstance(error, PeerLostError) and error.diagnosed):
        return
    if is_of_collective(error):
        error.args = watch.diagnose(error).args
    else:
        watch.tell(error)


class NamesLostRanks(DDPStrategy):
    """Watches all ranks from `setup_environment` to `teardown`, and puts who is lost into the
    errors that end a run.

    The process group ends before the interpreter does.
    """

    _watch: RankWatch | None = None
    _ended_with_error = False

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            assert self.cluster_environment is not None
            self._launcher = PatientLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        elif self._start_method != "popen":
            self._launcher = NamingLauncher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
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
    """Lightning's start of ranks by fork or spawn, where errors reach the strategy: there, only the
    main process asks it.
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
    """Lightning's start of ranks as processes; when one has died the main process may end with its
    own error, which says who.

    Lightning's own kills the main process as soon as it has noticed, within five seconds.
    """

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
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
        main, deadline = threading.main_thread(), time.monotonic() + LAST_SECONDS
        while main.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        if main.is_alive():
            super()._terminate_all()
            return
        for process in self._child_processes:
            process.send_signal(self._termination_signal)
