"""All names of Lightning that are not public and that the package overrides, calls or reads.

No public hook gives what they are needed for. Lightning may change them in any release:
`test_lightning_private` compares this table with the installed version and with the package.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class PrivateName(NamedTuple):
    """A name that is not public.

    `parameters` are those of a function or a constructor, in order, as they were when this was
    written; None for what is not called or overridden.
    """

    where: str
    why: str
    parameters: tuple[str, ...] | None = None


# Below each module and class: names, parameters in brackets, and why. As of lightning 2.6.6.
TABLE = """\
# the start of ranks, and their end
lightning.pytorch.strategies.launchers.subprocess_script:
  _SubprocessScriptLauncher(cluster_environment num_processes num_nodes) its main process is to end
      with an error that names the lost rank
lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher
  _call_children_scripts(self) starts the other ranks
lightning.pytorch.strategies.launchers.subprocess_script:
  _hydra_subprocess_cmd(local_rank) starts a rank of a Hydra app; in a sweep, of one job of it
lightning.fabric.strategies.launchers.subprocess_script:
  _ChildProcessObserver(main_pid child_processes sleep_period) its patient twin lets the main
      process end by itself
lightning.fabric.strategies.launchers.subprocess_script:_ChildProcessObserver
  _terminate_all(self) is put off
  _child_processes they are ended
  _finished a sweep goes on without them
  _termination_signal by this signal
lightning.pytorch.strategies.launchers.multiprocessing:
  _MultiProcessingLauncher(strategy start_method) ranks by fork or spawn name a lost one
lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher
  _wrapping_function(self process_idx trainer function args kwargs return_queue global_states) what
      a rank by fork or spawn runs: its errors do not reach the strategy
  _strategy whose watch knows the lost rank
  _start_method of the launcher that is replaced
lightning.fabric.utilities.distributed:
  _set_num_threads_if_needed(num_processes) as all launchers of Lightning do
lightning.pytorch.strategies.ddp:DDPStrategy
  _start_method forked ranks end without what `atexit` holds
  _timeout of the process group of restarted ranks
  _get_process_group_backend(self) of that group
# DDP, and what is done in its place
lightning.pytorch.strategies.ddp:DDPStrategy
  _ddp_kwargs options of the user's for DistributedDataParallel
  _ddp_comm_hook the user's communication hook
  _ddp_comm_state of that hook
  _ddp_comm_wrapper of that hook
  _model_averager whether gradients differ between ranks
lightning.fabric.utilities.optimizer:
  _optimizers_to_device(optimizers device) states that were loaded go where `setup` and loading put
      them
lightning.pytorch.core.optimizer:
  _configure_optimizers(optim_conf) reads what the user's configure_optimizers returned
lightning.pytorch.core.optimizer:LightningOptimizer
  _optimizer the user's optimizer, of a wrapper of Lightning's or of a library that names it so too
# the loop around an asynchronous pipeline
lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop
  _broadcast_sigterm_tensor(self) in each iteration ranks would wait for one another; here they
      agree to end
lightning.pytorch.trainer.trainer:Trainer
  _signal_connector its handlers, and not the user's, are replaced
  _checkpoint_connector names the file that SLURM's jobs go on from
lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop
  _should_accumulate(self) whether the last batch had a step
  _batches_that_stepped of a fit that was cut off
  _is_training_done the pipeline is drained then
  _should_check_val_fx(self data_fetcher) and before validation
  _should_check_val_epoch(self) known some batches before
  _results a batch that came back counts by its size
lightning.pytorch.loops.fit_loop:_FitLoop
  _data_fetcher for `_should_check_val_fx`
lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint
  _every_n_train_steps the pipeline is drained before a save
  _last_global_step_saved unless that is done
lightning.pytorch.trainer.trainer:Trainer
  _logger_connector what a step logs is logged later
lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector
  _current_fx as of `training_step`
  _callback_metrics has NaN until a step has come back
  _first_loop_iter when nothing of the epoch is over
lightning.pytorch.core.module:LightningModule
  _current_fx_name as of `training_step`
lightning.pytorch.plugins.precision.precision:Precision
  _after_closure(self model optimizer) clips, and calls hooks, before an update without a closure
lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization
  _skip_backward whether gradients are cleared between a step and its backward
# data
lightning.pytorch.utilities.combined_loader:CombinedLoader
  _iterator only what the fit itself reads counts as trained on
lightning.pytorch.loops.fit_loop:_FitLoop
  _combined_loader a batch is read before the fit reads one
  _combined_loader_states_to_load states that came after the loaders were built would be left there
  _load_combined_loader_states(self) loads them
lightning.fabric.utilities.types:
  _Stateful what Lightning takes for resumable
lightning.pytorch.utilities.combined_loader:CombinedLoader
  _spec how the loaders' batches are put together
  _mode of loaders that are wrapped
lightning.pytorch.core.module:LightningModule
  _on_before_batch_transfer(self batch dataloader_idx) transfer hooks see the batch that is planned
      with
lightning.pytorch.trainer.trainer:Trainer
  _accelerator_connector use_distributed_sampler is known there
  _data_connector attaches data without a fit
lightning.pytorch.core.mixins.hparams_mixin:HyperparametersMixin
  _log_hyperparams a wrapped data module logs its own
  _hparams one object: the tuners change it
# ranks with different numbers of batches
lightning.pytorch.loops.fetchers:
  _PrefetchDataFetcher ranks end an epoch together where it reads their batches
# others
lightning.pytorch.trainer.trainer:Trainer
  _run_stage(self) errors of forked ranks under strategies of others reach no callback
lightning.pytorch.core.module:LightningModule
  _compiler_ctx whether it was compiled as a whole
  _trainer whether it has one, without the error of `trainer`
lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop
  _on_before_fetch(self) a monitor times how long the loop waits
  _on_after_fetch(self) until then
lightning.pytorch.callbacks.weight_averaging:WeightAveraging
  _average_model what it averages into is sharded as the module
  _device where: shards are on the module's
lightning.pytorch.callbacks.stochastic_weight_avg:StochasticWeightAveraging
  _average_model the same of the other averaging callback
  _device where
"""


def read(table: str) -> tuple[PrivateName, ...]:
    found, owner = [], ""
    for line in re.sub(r"\n {6}", " ", table).splitlines():
        if entry := re.fullmatch(r"  (\w+)(?:\((.*?)\))? (.*)", line):
            name, parameters, why = entry.groups()
            where = owner + name if owner.endswith(":") else f"{owner}.{name}"
            given = None if parameters is None else tuple(parameters.split())
            found.append(PrivateName(where, why, given))
        elif not line.startswith("#"):
            owner = line
    return tuple(found)


PRIVATE_NAMES = read(TABLE)
