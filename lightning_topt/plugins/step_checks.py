"""Checks whether ranks may run each other's training steps.

The ranks of a tensor group run each other's batches (`sequential_batches`), those of a pipeline run
one step together (`pipeline_steps`). A step that another rank runs as well must be the same there,
and must leave nothing behind. Each function returns why it would not, as a clause, or None:

    why_no_pipeline            one batch, all ranks of a pipeline
    why_no_own_batches         a batch from each rank of a pipeline
    why_no_sequential_batches  a batch from each rank of a tensor group
    why_steps_may_differ       steps that may call other modules than the traced one

Most is read from names in compiled code; `TracedStep` also sees which objects a step changes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
import xxhash
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric, MetricCollection

from lightning_topt.graph.kernels import NAMESPACES
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import describe, describe_surroundings
from lightning_topt.graph.step_purity import PurityWatch
from lightning_topt.graph.structures import tensors_in
from lightning_topt.plugins.held_parameters import is_library
from lightning_topt.plugins.searched_plan import capture_step
from lightning_topt.plugins.value_exchange import check_packs
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

_RANKS = frozenset(
    ["global_rank", "local_rank", "node_rank", "is_global_zero", "get_rank", "is_local_zero"]
)


_COUNTS = frozenset(["global_step", "current_epoch"])


_WRITERS = frozenset(
    [
        "logger",
        "loggers",
        "rank_zero_only",
        "rank_zero_info",
        "rank_zero_warn",
        "rank_zero_deprecation",
    ]
)


_REGISTRIES = ("_parameters", "_buffers", "_modules", "forward")


def why_no_sequential_batches(
    trainer: pl.Trainer, batch: Any = None, graph: OpGraph | None = None
) -> str | None:
    """Return why ranks cannot run each other's batches, as a clause, or None.

    That is what can be seen before a step runs.
    """
    # What the strategy cannot do with tensor axes.
    strategy = trainer.strategy
    if getattr(strategy, "checkpoint_form", "full") != "full":
        return "sharded checkpoints do not know tensor axes"
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        return "a gradient scaler scales the loss only after batches of others have run backward"
    return _why_not_another_rank(trainer.lightning_module, batch, graph)


def why_no_own_batches(
    trainer: pl.Trainer, batch: Any = None, graph: OpGraph | None = None
) -> str | None:
    """Return why pipeline ranks cannot run each other's batches, as a clause, or None.

    That is what can be seen before a step runs.
    """
    module = trainer.lightning_module
    if reason := _why_not_another_rank(module, batch, graph):
        return reason
    if name := _name_in(module, _WRITERS):
        return (
            f"training_step uses {name}, and what rank 0 writes is known on the last stage's rank"
        )
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return "batch norm brings ranks with different batches together"
    if any(
        isinstance(part, _NormBase) and part.training and part.track_running_stats
        for part in module.modules()
    ):
        return (
            "batch norm counts the batches of rank 0 alone under ddp, and would count all of a "
            "pipeline's"
        )
    if any(isinstance(part, MetricCollection) for part in module.modules()):
        return "a collection of metrics shares states, which are not followed from rank to rank"
    return None


def why_steps_may_differ(module: pl.LightningModule) -> str | None:
    """Return why one step may call other modules than the next one, as a clause.

    That is as far as names tell.
    """
    name = _name_in(module, _COUNTS)
    return (
        None
        if name is None
        else f"training_step reads {name}, on which the modules that it calls may depend"
    )


def _why_not_another_rank(
    module: pl.LightningModule, batch: Any, graph: OpGraph | None
) -> str | None:
    # Names in the code.
    why = _why_not_together(
        module,
        backward="may do more with the loss than to differentiate it",
        rank="another rank would not do the same with its batch",
    )
    if why is not None:
        return why
    # What the graph shows: collective calls.
    for op in () if graph is None else graph.ops:
        for kernel in (*op.forward, *op.backward):
            if kernel.name.partition(".")[0] in NAMESPACES:
                return (
                    f"training_step calls {kernel.name}, which brings ranks with different batches "
                    "together"
                )
    try:
        # What is sent.
        check_packs(batch)
    except Exception as error:
        return f"its batches cannot be sent ({error})"
    return None


def why_no_pipeline(trainer: pl.Trainer) -> str | None:
    """Return why the ranks of a pipeline cannot run one step together, as a clause.

    That is what can be seen before it runs.
    """
    return _why_not_together(
        trainer.lightning_module,
        backward="would get a loss whose gradients exist already",
        rank="the ranks of a pipeline would not run the same step",
    )


def _why_not_together(module: pl.LightningModule, *, backward: str, rank: str) -> str | None:
    """Return why no ranks can run one step together, as a clause.

    `backward` and `rank` say what a backward of its own, and a rank that is read, would spoil.
    """
    if any(
        "backward" in vars(cls) for cls in type(module).__mro__ if not is_library(cls.__module__)
    ):
        return f"{type(module).__name__}.backward {backward}"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return "training_step fetches its own batches"
    if name := _name_in(module, _RANKS):
        return f"training_step reads {name}, and {rank}"
    for part in module.modules():
        # By name: importing torch._dynamo takes a second.
        if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
            return "the calls of a compiled module are not seen"
    if any(isinstance(metric, Metric) and metric.dist_sync_on_step for metric in module.modules()):
        return "a metric is synchronized in each step"
    return None


def _name_in(module: nn.Module, asked_for: frozenset[str]) -> str | None:
    """Return which of these names code that `training_step` runs uses, as far as names tell."""
    return min(_names_of_step(module) & asked_for, default=None)


def _names_of_step(module: nn.Module) -> set[str]:
    """Return all names of globals and attributes that `training_step` may use.

    Names in the user's code count.
    """
    # Code that a step may run: itself, forward of modules, what these name in turn.
    todo = [
        getattr(type(module), "training_step", None),
        *(type(part).forward for part in module.modules()),
    ]
    seen: set[types.CodeType] = set()
    found_names: set[str] = set()
    while todo:
        function = inspect.unwrap(found) if callable(found := todo.pop()) else None
        if (
            not isinstance(function, types.FunctionType)
            or is_library(function.__module__)
            or function.__code__ in seen
        ):
            continue
        seen.add(function.__code__)
        names = _names_in(function.__code__)
        found_names |= names
        todo += [
            vars(cls)[name] for cls in type(module).__mro__ for name in names if name in vars(cls)
        ]
        todo += [function.__globals__[name] for name in names if name in function.__globals__]
    return found_names


def _names_in(code: types.CodeType) -> set[str]:
    inner = (
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return {*code.co_names}.union(*inner)


def digest_of_values(module: nn.Module) -> int:
    """Return a number that is equal on ranks whose modules hold equal values.

    Values beside parameters and buffers count, under names that the step's code uses. A rank that
    kept something of its own first batch would run batches of other ranks with that.
    """
    # Without what Lightning and torch keep on every module.
    names = _names_of_step(module) - set(vars(pl.LightningModule())) - set(_REGISTRIES)
    parts = [part for part in module.modules() if not isinstance(part, Metric)]
    own = [{name: value for name, value in vars(part).items() if name in names} for part in parts]
    digest = xxhash.xxh3_64(
        repr((describe(own), describe_surroundings({type(part) for part in parts}))).encode()
    )
    # Tensors count by their bytes.
    for tensor in tensors_in(own):
        if tensor.layout is torch.strided and not tensor.is_meta:
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.intdigest() >> 1  # fits a signed number


class TracedStep:
    """The step of this rank with `batch`, traced on fake tensors when first asked for.

    Its graph, calls, and what it changes.
    """

    def __init__(self, trainer: pl.Trainer, batch: Any) -> None:
        self.trainer, self.batch = trainer, batch
        self._watched = WatchedTrace(FunctionTrace())

    @cached_property
    def graph(self) -> OpGraph:
        """The graph.

        Raises what `capture_step` does, and ValueError where the step changes objects.
        """
        graph = capture_step(self.trainer, self.batch, trace=self._watched)
        if self._watched.change is not None:
            raise ValueError(
                "training_step changes objects that the next step finds changed: "
                f"{self._watched.change}"
            )
        return graph

    @property
    def trace(self) -> FunctionTrace:
        """The calls of torch functions. Raises as `graph` does."""
        assert self.graph is not None
        return self._watched.trace


@dataclass
class WatchedTrace:
    """A trace of a step's calls that also sees whether it changes Python objects.

    `change` names one, after a capture.
    """

    trace: FunctionTrace
    change: str | None = None

    def of(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context that traces the forward pass of `module`.

        This is a copy that is thrown away.
        """
        return self._watching(module, self.trace.of(module))

    @contextmanager
    def _watching(
        self, module: nn.Module, tracing: AbstractContextManager[Any]
    ) -> Generator[None, None, None]:
        # On the copy: what is changed there would be changed on the module.
        watch = PurityWatch(module)
        with tracing:
            yield
        self.change = self.change or watch.change()
