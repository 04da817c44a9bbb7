"""All names of Lightning that are not public and that the package overrides, calls or reads.

No public hook gives what they are needed for. Lightning may change them in any release:
`test_lightning_private` compares this table with the installed version and with the package.
"""

from __future__ import annotations

from typing import NamedTuple

TRIED_WITH = "2.6.6"  # of lightning


class PrivateName(NamedTuple):
    """A name that is not public.

    `parameters` are those of a function or a constructor, in order, as they were when this was
    written; None for what is not called or overridden.
    """

    where: str
    why: str
    parameters: tuple[str, ...] | None = None


_PYTORCH, _FABRIC = "lightning.pytorch", "lightning.fabric"
_DDP = f"{_PYTORCH}.strategies.ddp:DDPStrategy"
_EPOCH_LOOP = f"{_PYTORCH}.loops.training_epoch_loop:_TrainingEpochLoop"
_FIT_LOOP = f"{_PYTORCH}.loops.fit_loop:_FitLoop"
_FETCHER = f"{_PYTORCH}.loops.fetchers:_PrefetchDataFetcher"
_AUTOMATIC = f"{_PYTORCH}.loops.optimization.automatic:_AutomaticOptimization"
_EVALUATION = f"{_PYTORCH}.loops.evaluation_loop:_EvaluationLoop"
_CONNECTOR = f"{_PYTORCH}.trainer.connectors.data_connector:_DataConnector"
_RESULTS = f"{_PYTORCH}.trainer.connectors.logger_connector.result"
_LOGGER = f"{_PYTORCH}.trainer.connectors.logger_connector.logger_connector:_LoggerConnector"
_TRAINER = f"{_PYTORCH}.trainer.trainer:Trainer"
_MODULE = f"{_PYTORCH}.core.module:LightningModule"
_SCRIPTS = f"{_FABRIC}.strategies.launchers.subprocess_script"
_OBSERVER = f"{_SCRIPTS}:_ChildProcessObserver"
_SUBPROCESSES = f"{_PYTORCH}.strategies.launchers.subprocess_script:_SubprocessScriptLauncher"
_PROCESSES = f"{_PYTORCH}.strategies.launchers.multiprocessing:_MultiProcessingLauncher"
_COMBINED = f"{_PYTORCH}.utilities.combined_loader:CombinedLoader"
_HYPERPARAMETERS = f"{_PYTORCH}.core.mixins.hparams_mixin:HyperparametersMixin"
_AVERAGING = f"{_PYTORCH}.callbacks.weight_averaging:WeightAveraging"
_STOCHASTIC = f"{_PYTORCH}.callbacks.stochastic_weight_avg:StochasticWeightAveraging"
_CHECKPOINT = f"{_PYTORCH}.callbacks.model_checkpoint:ModelCheckpoint"

PRIVATE_NAMES = (
    # ---- the start of ranks, and their end -------------------------------------------------------
    PrivateName(
        _SUBPROCESSES,
        "its main process is to end with an error that names the lost rank",
        ("cluster_environment", "num_processes", "num_nodes"),
    ),
    PrivateName(f"{_SUBPROCESSES}._call_children_scripts", "starts the other ranks", ("self",)),
    PrivateName(
        f"{_SUBPROCESSES.partition(':')[0]}:_hydra_subprocess_cmd",
        "starts a rank of a Hydra app; in a sweep, of one job of it",
        ("local_rank",),
    ),
    PrivateName(
        _OBSERVER,
        "its patient twin lets the main process end by itself",
        ("main_pid", "child_processes", "sleep_period"),
    ),
    PrivateName(f"{_OBSERVER}._terminate_all", "is put off", ("self",)),
    PrivateName(f"{_OBSERVER}._child_processes", "they are ended"),
    PrivateName(f"{_OBSERVER}._finished", "a sweep goes on without them"),
    PrivateName(f"{_OBSERVER}._termination_signal", "by this signal"),
    PrivateName(_PROCESSES, "ranks by fork or spawn name a lost one", ("strategy", "start_method")),
    PrivateName(
        f"{_PROCESSES}._wrapping_function",
        "what a rank by fork or spawn runs: its errors do not reach the strategy",
        (
            "self",
            "process_idx",
            "trainer",
            "function",
            "args",
            "kwargs",
            "return_queue",
            "global_states",
        ),
    ),
    PrivateName(f"{_PROCESSES}._strategy", "whose watch knows the lost rank"),
    PrivateName(f"{_PROCESSES}._start_method", "of the launcher that is replaced"),
    PrivateName(
        f"{_FABRIC}.utilities.distributed:_set_num_threads_if_needed",
        "as all launchers of Lightning do",
        ("num_processes",),
    ),
    PrivateName(f"{_DDP}._start_method", "forked ranks end without what `atexit` holds"),
    PrivateName(f"{_DDP}._timeout", "of the process group of restarted ranks"),
    PrivateName(f"{_DDP}._get_process_group_backend", "of that group", ("self",)),
    # ---- DDP, and what is done in its place ------------------------------------------------------
    PrivateName(f"{_DDP}._ddp_kwargs", "options of the user's for DistributedDataParallel"),
    PrivateName(f"{_DDP}._ddp_comm_hook", "the user's communication hook"),
    PrivateName(f"{_DDP}._ddp_comm_state", "of that hook"),
    PrivateName(f"{_DDP}._ddp_comm_wrapper", "of that hook"),
    PrivateName(f"{_DDP}._model_averager", "whether gradients differ between ranks"),
    PrivateName(
        f"{_FABRIC}.utilities.optimizer:_optimizers_to_device",
        "states that were loaded go where `setup` and loading put them",
        ("optimizers", "device"),
    ),
    PrivateName(
        f"{_PYTORCH}.core.optimizer:_configure_optimizers",
        "reads what the user's configure_optimizers returned",
        ("optim_conf",),
    ),
    PrivateName(
        f"{_PYTORCH}.core.optimizer:LightningOptimizer._optimizer",
        "the user's optimizer, of a wrapper of Lightning's or of a library that names it so too",
    ),
    # ---- the loop around an asynchronous pipeline ------------------------------------------------
    PrivateName(
        f"{_EPOCH_LOOP}._broadcast_sigterm_tensor",
        "in each iteration ranks would wait for one another; here they agree to end",
        ("self",),
    ),
    PrivateName(f"{_TRAINER}._signal_connector", "its handlers, and not the user's, are replaced"),
    PrivateName(f"{_TRAINER}._checkpoint_connector", "names the file that SLURM's jobs go on from"),
    PrivateName(
        f"{_EPOCH_LOOP}._should_accumulate", "whether the last batch had a step", ("self",)
    ),
    PrivateName(f"{_EPOCH_LOOP}._batches_that_stepped", "of a fit that was cut off"),
    PrivateName(f"{_EPOCH_LOOP}._is_training_done", "the pipeline is drained then"),
    PrivateName(
        f"{_EPOCH_LOOP}._should_check_val_fx", "and before validation", ("self", "data_fetcher")
    ),
    PrivateName(f"{_EPOCH_LOOP}._should_check_val_epoch", "known some batches before", ("self",)),
    PrivateName(f"{_EPOCH_LOOP}._results", "a batch that came back counts by its size"),
    PrivateName(f"{_FIT_LOOP}._can_stop_early", "whether an elastic fit that was told to ends"),
    PrivateName(f"{_FIT_LOOP}._data_fetcher", "for `_should_check_val_fx`"),
    PrivateName(f"{_CHECKPOINT}._every_n_train_steps", "the pipeline is drained before a save"),
    PrivateName(f"{_CHECKPOINT}._last_global_step_saved", "unless that is done"),
    PrivateName(f"{_TRAINER}._logger_connector", "what a step logs is logged later"),
    PrivateName(f"{_LOGGER}._current_fx", "as of `training_step`"),
    PrivateName(f"{_LOGGER}._callback_metrics", "has NaN until a step has come back"),
    PrivateName(f"{_LOGGER}._first_loop_iter", "when nothing of the epoch is over"),
    PrivateName(f"{_MODULE}._current_fx_name", "as of `training_step`"),
    PrivateName(
        f"{_PYTORCH}.plugins.precision.precision:Precision._after_closure",
        "clips, and calls hooks, before an update without a closure",
        ("self", "model", "optimizer"),
    ),
    PrivateName(
        f"{_AUTOMATIC}._skip_backward",
        "whether gradients are cleared between a step and its backward",
    ),
    # ---- data ------------------------------------------------------------------------------------
    PrivateName(
        f"{_COMBINED}._iterator",
        "only what the fit itself reads counts as trained on",
    ),
    PrivateName(f"{_FIT_LOOP}._combined_loader", "a batch is read before the fit reads one"),
    PrivateName(
        f"{_FIT_LOOP}._combined_loader_states_to_load",
        "states that came after the loaders were built would be left there",
    ),
    PrivateName(f"{_FIT_LOOP}._load_combined_loader_states", "loads them", ("self",)),
    PrivateName(f"{_FABRIC}.utilities.types:_Stateful", "what Lightning takes for resumable"),
    PrivateName(
        f"{_COMBINED}._state_dicts", "of loaders of others, before a batch is fetched", ("self",)
    ),
    PrivateName(f"{_COMBINED}._spec", "how the loaders' batches are put together"),
    PrivateName(f"{_COMBINED}._mode", "of loaders that are wrapped"),
    PrivateName(
        f"{_MODULE}._on_before_batch_transfer",
        "transfer hooks see the batch that is planned with",
        ("self", "batch", "dataloader_idx"),
    ),
    PrivateName(f"{_TRAINER}._accelerator_connector", "use_distributed_sampler is known there"),
    PrivateName(f"{_TRAINER}._data_connector", "attaches data without a fit"),
    PrivateName(f"{_HYPERPARAMETERS}._log_hyperparams", "a wrapped data module logs its own"),
    PrivateName(f"{_HYPERPARAMETERS}._hparams", "one object: the tuners change it"),
    # ---- ranks with different numbers of batches -------------------------------------------------
    PrivateName(
        f"{_PYTORCH}.loops.fetchers:_DataLoaderIterDataFetcher",
        "its steps take batches by themselves, so that ranks cannot be kept together",
    ),
    PrivateName(f"{_FETCHER}._start_profiler", "of the fetcher behind the one that ranks share"),
    PrivateName(f"{_FETCHER}._stop_profiler", "of the same"),
    PrivateName(f"{_FIT_LOOP}._last_train_dl_reload_epoch", "also where a rank has no batch"),
    PrivateName(
        f"{_EPOCH_LOOP}._num_ready_batches_reached", "the end of the epoch of all ranks", ("self",)
    ),
    PrivateName(
        f"{_AUTOMATIC}._make_closure",
        "in its place comes one without a batch",
        ("self", "kwargs", "optimizer", "batch_idx"),
    ),
    PrivateName(
        f"{_AUTOMATIC}._optimizer_zero_grad",
        "a step without a batch begins a window, too",
        ("self", "batch_idx", "optimizer"),
    ),
    PrivateName(
        f"{_PYTORCH}.trainer.call:_call_strategy_hook",
        "plans count steps without a batch",
        ("trainer", "hook_name", "args", "kwargs"),
    ),
    PrivateName(
        f"{_CONNECTOR}._resolve_sampler",
        "evaluation repeats no sample",
        ("self", "dataloader", "shuffle", "mode"),
    ),
    PrivateName(
        f"{_CONNECTOR}._requires_distributed_sampler",
        "whether the ranks share a loader's samples",
        ("self", "dataloader"),
    ),
    PrivateName(
        f"{_FABRIC}.utilities.distributed:_DatasetSamplerWrapper",
        "samples that a sampler of the user's yields are shared out",
        ("sampler",),
    ),
    PrivateName(f"{_EVALUATION}._max_batches", "a rank without a batch runs the loop, too"),
    PrivateName(
        f"{_PYTORCH}.loops.fit_loop:_parse_num_batches",
        "a limit that leaves nothing is refused by all ranks or none",
        ("stage", "length", "limit_batches"),
    ),
    PrivateName(f"{_EVALUATION}._is_sequential", "whether loaders come one after the other"),
    PrivateName(
        f"{_EVALUATION}._store_dataloader_outputs",
        "also of a loader of which this rank has no batch",
        ("self",),
    ),
    PrivateName(f"{_RESULTS}:_ResultCollection", "what was logged on other ranks is known here"),
    PrivateName(f"{_RESULTS}:_ResultMetric", "one value of it", ("metadata", "is_tensor")),
    PrivateName(
        f"{_RESULTS}:_Metadata",
        "how it is logged",
        (
            "fx",
            "name",
            "prog_bar",
            "logger",
            "on_step",
            "on_epoch",
            "reduce_fx",
            "enable_graph",
            "add_dataloader_idx",
            "dataloader_idx",
            "metric_attribute",
            "_sync",
        ),
    ),
    PrivateName(f"{_RESULTS}:_Metadata._sync", "which is not compared between ranks"),
    PrivateName(
        f"{_RESULTS}:_Sync",
        "how ranks reduce it",
        ("fn", "_should", "rank_zero_only", "_op", "_group"),
    ),
    PrivateName(f"{_RESULTS}:_Sync._should", "whether they do"),
    # ---- others ----------------------------------------------------------------------------------
    PrivateName(
        f"{_TRAINER}._run_stage",
        "errors of forked ranks under strategies of others reach no callback",
        ("self",),
    ),
    PrivateName(f"{_MODULE}._compiler_ctx", "whether it was compiled as a whole"),
    PrivateName(f"{_MODULE}._trainer", "whether it has one, without the error of `trainer`"),
    PrivateName(
        f"{_EPOCH_LOOP}._on_before_fetch", "a monitor times how long the loop waits", ("self",)
    ),
    PrivateName(f"{_EPOCH_LOOP}._on_after_fetch", "until then", ("self",)),
    PrivateName(f"{_AVERAGING}._average_model", "what it averages into is sharded as the module"),
    PrivateName(f"{_AVERAGING}._device", "where: shards are on the module's"),
    PrivateName(f"{_STOCHASTIC}._average_model", "the same of the other averaging callback"),
    PrivateName(f"{_STOCHASTIC}._device", "where"),
)
