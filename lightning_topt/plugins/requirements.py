"""The conditions under which a fit can run plans of each kind, as one list of `Requirement`.

`why_not(fit, *kinds)` returns the first reason against plans of these kinds, as a clause that names
what was found and, where there is one, the way out. The kinds:

    SHARDED          parameters or gradients are sharded
    STAGES           the ranks of a pipeline run one step together
    OWN_BATCHES      the ranks of a pipeline bring a batch each
    SEQUENTIAL       the ranks of a tensor group run each other's batches
    SLICES           parameters are cut along tensor axes
    CONTINUOUS       stages begin batches before the update of the batch before is done
    SEARCHED_STAGES  OWN_BATCHES that nobody asked for

Plans are applied before optimizers are made. What user code finds in shards is on the page "What
sharding shows to your code"; here is what torch cannot shard. A step that another rank runs as well
must be the same there: what it reads is seen while it is traced (`noted_reads`).

A new reason is an entry of `REQUIREMENTS`. It has a test in `tests/plugins`
(CONTINUOUS: `test_continuous_care`) and a word in docs/reference/limits.md or
docs/concepts/pipelines.md. Other reasons are elsewhere: why blocks are not recomputed
(`graph.blocks.why_not_recomputed`), steps not cut (`searched_plan.why_not_cut`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_topt.communication.value_exchange import check_packs
from lightning_topt.graph.kernels import NAMESPACES
from lightning_topt.graph.module_copy import is_on_meta, silence
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.compilation import compiler_of
from lightning_topt.techniques.ddp_wrapper import names_to_ignore

if TYPE_CHECKING:
    from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

SHARDED, STAGES, OWN_BATCHES = "sharded", "stages", "own batches"
SLICES, SEQUENTIAL, CONTINUOUS, SEARCHED_STAGES = (
    *("slices", "sequential batches", "continuous", "searched stages"),
)

# What a step may read of its rank, of the loggers and of how far the fit is.
_RANKS = frozenset(
    ["global_rank", "local_rank", "node_rank", "is_global_zero", "get_rank", "is_local_zero"]
)
_COUNTS = frozenset(["global_step", "current_epoch"])
_WRITERS = frozenset(["logger", "loggers"])
_LIBRARIES = frozenset(["torch", "lightning", "lightning_fabric", "lightning_topt", "torchmetrics"])


@contextmanager
def noted_reads() -> Generator[set[str]]:
    """Note which of these names user code reads within, by which a step may differ between ranks.

    In a copy of the process: attributes of Lightning's classes are replaced.
    """
    reads: set[str] = set()

    def note(name: str) -> None:
        caller: Any = sys._getframe(2)
        if caller.f_globals.get("__name__") == silence.__module__:  # reads for a copy's user
            caller = caller.f_back
        if not is_library(caller.f_globals.get("__name__")):
            reads.add(name)

    def noting(name: str, own: property) -> property:
        def read(owner: Any) -> Any:
            note(name)
            assert own.fget is not None
            return own.fget(owner)

        return property(read, own.fset)

    def get_rank(*args: Any, **kwargs: Any) -> int:
        note("get_rank")
        return own_get_rank(*args, **kwargs)

    kept, own_get_rank = [], dist.get_rank
    for kind in (pl.LightningModule, pl.Trainer):
        for name in _RANKS | _COUNTS | _WRITERS:
            if isinstance(own := vars(kind).get(name), property):
                kept.append((kind, name, own))
                setattr(kind, name, noting(name, own))
    dist.get_rank = get_rank
    try:
        yield reads
    finally:
        dist.get_rank = own_get_rank
        for kind, name, own in kept:
            setattr(kind, name, own)


def is_library(module_name: str | None) -> bool:
    """Return whether code of that module is torch's, Lightning's or this package's."""
    return (module_name or "").partition(".")[0] in _LIBRARIES


@dataclass
class Fit:
    """What requirements look at.

    Parameters may be on the host or without values yet, and there may be no optimizers (`topt
    plan`, a fit that is sharded before its module is on the device).

    Args:
        trainer: whose fit it is.
        batch: of a step, where one was traced (`planning.trace_step`).
        graph: of that step.
        only_replicated: see `PlanRequest`.
        reads: what the step reads of its rank and of the fit, see `noted_reads`.
        trace: the calls that tell how the step can be split. None where a step that reads values
            ran on real tensors; `why_not_split` says where it reads them.
        why_not_split: see `trace`.
        would_shard: whether the parameter of that name would be sharded; others may be as they are.
    """

    trainer: pl.Trainer
    batch: Any = None
    graph: OpGraph | None = None
    only_replicated: bool = False
    reads: frozenset[str] = frozenset()
    trace: FunctionTrace | None = None
    why_not_split: str = ""
    would_shard: Callable[[str], bool] = lambda _: True

    @property
    def module(self) -> pl.LightningModule:
        """The module that is trained."""
        return self.trainer.lightning_module

    @property
    def begins_on_meta(self) -> bool:
        """Whether a fit has to give the module values; `topt plan` makes all models so."""
        return self.trainer.state.fn == TrainerFn.FITTING and is_on_meta(self.module)

    @property
    def traced(self) -> OpGraph:
        """The graph of the step, which was traced."""
        assert self.graph is not None
        return self.graph

    def callback(self, *kinds: type) -> str | None:
        """Return the class of a callback of these kinds."""
        found = (
            type(c).__name__
            for c in self.trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(c, kinds)
        )
        return next(found, None)

    def part(self, is_wanted: Callable[[nn.Module], bool]) -> str | None:
        """Return the name of the first such module in the module, quoted."""
        return next((repr(name) for name, p in self.module.named_modules() if is_wanted(p)), None)

    def parameter(self, is_wanted: Callable[[nn.Parameter], bool]) -> str | None:
        """Return the name of the first such parameter that would be sharded, quoted."""
        return next((repr(name) for name, p in self.sharded() if is_wanted(p)), None)

    def sharded(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that would be sharded."""
        return (each for each in self.module.named_parameters() if self.would_shard(each[0]))


@dataclass(frozen=True)
class Requirement:
    """What plans of some kinds need.

    Args:
        kinds: of the plans.
        reason: why they cannot run, as a clause; ``{}`` in it is what was found.
        check: returns what is against it, None or False where nothing is.
    """

    kinds: tuple[str, ...]
    reason: str
    check: Callable[[Fit], str | bool | None]


def why_not(fit: Fit, *kinds: str) -> str | None:
    """Return the first reason against plans of any of these kinds, as a clause, or None.

    That is what can be seen before a step runs.
    """
    for requirement in REQUIREMENTS:
        if not {*kinds}.isdisjoint(requirement.kinds) and (found := requirement.check(fit)):
            return requirement.reason.format(found)
    return None


# ---- checks that are longer than a line ----------------------------------------------------------


def _has_words(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return any(map(_has_words, batch.values()))
    if isinstance(batch, list | tuple):
        return any(map(_has_words, batch))
    return isinstance(batch, str | bytes | int) and not isinstance(batch, bool)


def _sparse_table(fit: Fit) -> str | None:
    for name, part in fit.module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and fit.would_shard(f"{name}.weight"):
            return repr(name)
    return None


def _needs_ddp(fit: Fit) -> bool:
    # Whether there are options that plans in shards do not follow
    strategy = fit.trainer.strategy
    is_met = {*getattr(strategy, "_ddp_kwargs", ())} == {"find_unused_parameters"}
    has_hook = getattr(strategy, "_ddp_comm_hook", None) is not None
    return fit.only_replicated and (has_hook or not is_met)


def _finds_unused(fit: Fit) -> bool:
    # Under manual optimization it means nothing: no plan needs it
    options = getattr(fit.trainer.strategy, "_ddp_kwargs", {})
    return bool(options.get("find_unused_parameters")) and fit.module.automatic_optimization


def _unused(fit: Fit) -> tuple[str, ...]:
    # Which parameters a step of automatic optimization gives no gradient, where nobody expects that
    graph = fit.graph
    return () if graph is None or graph.is_manual or _finds_unused(fit) else graph.unused


def _own_tensor(fit: Fit) -> str | None:
    kinds = ((name, type(parameter.data)) for name, parameter in fit.sharded())
    return next((f"{name!r} is a {kind.__name__}" for name, kind in kinds if kind != Tensor), None)


def _several_dtypes(fit: Fit) -> str | None:
    # FSDP2 gathers the parameters of a block in one buffer.
    names = {parameter.dtype: name for name, parameter in fit.sharded() if parameter.requires_grad}
    shown = [f"{name!r}: {str(dtype).removeprefix('torch.')}" for dtype, name in names.items()]
    return ", ".join(shown[:2]) if len(shown) > 1 else None


def _averages_apart(fit: Fit) -> str | None:
    # Why averaged weights cannot be in shards like those of the module, as a clause
    strategy = fit.trainer.strategy
    for callback in fit.trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            continue
        name, own = type(callback).__name__, callback._device
        if fit.begins_on_meta:
            return f"{name} copies parameters on the meta device before they have values"
        if own is not None and torch.device(own).type != strategy.root_device.type:
            return f"{name} keeps its averages on another device ({own}); give it device=None"
        if getattr(strategy, "checkpoint_form", "full") != "full":
            return f"{name} saves full weights; leave out checkpoint='sharded'"
    return None


def _own_backward(fit: Fit) -> str | None:
    kinds = type(fit.module).__mro__
    is_own = any("backward" in vars(kind) for kind in kinds if not is_library(kind.__module__))
    return type(fit.module).__name__ if is_own else None


def _collective(fit: Fit) -> str | None:
    for op in () if fit.graph is None else fit.graph.ops:
        for kernel in (*op.forward, *op.backward):
            if kernel.name.partition(".")[0] in NAMESPACES:
                return kernel.name
    return None


def _unpackable(fit: Fit) -> str | None:
    try:
        check_packs(fit.batch)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _has_scaler(fit: Fit) -> bool:
    return getattr(fit.trainer.strategy.precision_plugin, "scaler", None) is not None


# ---- the list: cheap checks first ----------------------------------------------------------------

_TOGETHER = (STAGES, OWN_BATCHES, SEQUENTIAL)  # other ranks run the same step
_EACH_ITS_OWN = (OWN_BATCHES, SEQUENTIAL)  # with batches of their own

REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        (SEARCHED_STAGES,),
        "batches hold texts or whole numbers, on which a step may depend, so that each would be "
        "traced",
        lambda fit: _has_words(fit.batch),
    ),
    # ---- options
    Requirement(
        (SHARDED,),
        "options of DistributedDataParallel were given, and sharded plans do not run it",
        _needs_ddp,
    ),
    Requirement(
        (SLICES, *_TOGETHER),
        "find_unused_parameters was given, which data axes alone follow",
        _finds_unused,
    ),
    Requirement(
        (SHARDED,),
        "16-true keeps no float32 weights to shard",
        lambda fit: fit.trainer.precision == "16-true",
    ),
    Requirement(
        (SEQUENTIAL,),
        "sharded checkpoints do not know tensor axes",
        lambda fit: getattr(fit.trainer.strategy, "checkpoint_form", "full") != "full",
    ),
    Requirement(
        (SEQUENTIAL,),
        "a gradient scaler scales the loss only after batches of others have run backward",
        _has_scaler,
    ),
    Requirement(
        (CONTINUOUS,),
        "a gradient scaler skips updates and changes its scale with minibatches in flight "
        "(bf16-mixed needs none)",
        _has_scaler,
    ),
    Requirement(
        (CONTINUOUS,),
        "each rank's clock would decide when to validate (val_check_interval is a number of "
        "batches, or a share of them)",
        lambda fit: getattr(fit.trainer, "_val_check_time_interval", None) is not None,
    ),
    Requirement(
        (CONTINUOUS,),
        "ReduceLROnPlateau in each step sees other values on each stage (interval='epoch' sees the "
        "same)",
        lambda fit: any(
            config.reduce_on_plateau and config.interval == "step"
            for config in fit.trainer.strategy.lr_scheduler_configs
        ),
    ),
    # ---- parameters that can be sharded
    Requirement(
        (SHARDED,),
        "each rank keeps a {} of its own (_ddp_params_and_buffers_to_ignore), which only "
        "DistributedDataParallel leaves alone",
        lambda fit: min(map(repr, names_to_ignore(fit.module)), default=None),
    ),
    Requirement(
        (SHARDED,),
        "the step gives {} no gradient, for which ranks look with find_unused_parameters=True",
        lambda fit: next(filter(fit.would_shard, _unused(fit)), None),
    ),
    Requirement(
        (SHARDED,),
        "{} is a TorchScript module; give the module itself in its place",
        lambda fit: fit.part(lambda part: isinstance(part, torch.jit.ScriptModule)),
    ),
    Requirement((SHARDED,), "{} has sparse gradients; leave out sparse=True", _sparse_table),
    Requirement(
        (SHARDED,),
        "parameter {} has no shape yet; run a batch through the module before the fit",
        lambda fit: fit.parameter(is_lazy),
    ),
    Requirement(
        (SLICES, *_TOGETHER),
        "parameters are on the meta device, which data axes alone give values (plan='zero3')",
        lambda fit: fit.begins_on_meta,
    ),
    Requirement((SHARDED,), "parameter {}, a tensor class of its own", _own_tensor),
    Requirement(
        (SHARDED,),
        "parameter {} has no dimension to shard; give it the shape (1,)",
        lambda fit: fit.parameter(lambda parameter: parameter.dim() == 0),
    ),
    Requirement(
        (SHARDED,),
        "parameter {} is empty; leave it out, or set its requires_grad to False",
        lambda fit: fit.parameter(lambda p: p.numel() == 0 and p.requires_grad),
    ),
    Requirement(
        (SHARDED,),
        "trained parameters differ in dtype ({}); keep them in one dtype, and compute in another "
        "with the Trainer's precision",
        _several_dtypes,
    ),
    # ---- callbacks
    Requirement(
        (SLICES, *_TOGETHER),
        "weight-averaging callbacks copy whole parameters",
        lambda fit: fit.callback(StochasticWeightAveraging, WeightAveraging),
    ),
    Requirement((SHARDED,), "{}", _averages_apart),
    Requirement(
        (SHARDED,), "callback {} prunes parameters", lambda fit: fit.callback(ModelPruning)
    ),
    # ---- steps that other ranks run as well
    Requirement(
        (SLICES, *_TOGETHER),
        "training_step runs backward passes and updates itself (manual optimization)",
        lambda fit: not fit.module.automatic_optimization,
    ),
    Requirement(
        _TOGETHER, "{}.backward may do more with the loss than to differentiate it", _own_backward
    ),
    Requirement(
        _TOGETHER,
        "training_step fetches its own batches",
        lambda fit: is_param_in_hook_signature(
            fit.module.training_step, "dataloader_iter", explicit=True
        ),
    ),
    Requirement(
        _TOGETHER,
        "training_step reads {}, and other ranks would not run the same step",
        lambda fit: min(fit.reads & _RANKS, default=None),
    ),
    Requirement(
        _TOGETHER, "the calls of a compiled module are not seen", lambda fit: fit.part(compiler_of)
    ),
    Requirement(
        _TOGETHER,
        "a metric is synchronized in each step",
        lambda fit: fit.part(lambda part: isinstance(part, Metric) and part.dist_sync_on_step),
    ),
    Requirement(
        _EACH_ITS_OWN,
        "training_step calls {}, which brings ranks with different batches together",
        _collective,
    ),
    Requirement(_EACH_ITS_OWN, "its batches cannot be sent ({})", _unpackable),
    Requirement(
        (SEQUENTIAL,),
        "batch norm {} keeps statistics, under ddp those of rank 0's batches",
        lambda fit: fit.part(
            lambda part: part.training and getattr(part, "running_mean", None) is not None
        ),
    ),
    Requirement(
        (OWN_BATCHES,),
        "training_step uses {}, and what rank 0 writes is known on the last stage's rank",
        lambda fit: min(fit.reads & _WRITERS, default=None),
    ),
    Requirement(
        (OWN_BATCHES,),
        "batch norm brings ranks with different batches together",
        lambda fit: fit.part(lambda part: isinstance(part, nn.SyncBatchNorm)),
    ),
    Requirement(
        (OWN_BATCHES,),
        "metric {} counts on the last stage's rank alone",
        lambda fit: fit.part(lambda part: isinstance(part, Metric)),
    ),
    Requirement(
        (SEARCHED_STAGES,),
        "training_step reads {}, on which the modules that it calls may depend",
        lambda fit: min(fit.reads & _COUNTS, default=None),
    ),
)
