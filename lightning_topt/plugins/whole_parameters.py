"""Why the plans that shard parameters cannot run here without changing values that user code
sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_topt.plugins.held_parameters import is_library, why_held
from lightning_topt.plugins.watching_hooks import why_function_watches, why_watched

# loggers whose `watch` registers hooks
WATCHERS = frozenset({"wandb", "comet_ml", "neptune", "clearml", "aim"})


def why_whole(
    trainer: pl.Trainer, *, would_shard: Callable[[str], bool] = lambda _: True
) -> str | None:
    """Return why parameters must stay whole in this fit (ZeRO levels 0 and 1), as a clause, or
    None.

    What torch cannot shard counts where the parameter's name `would_shard`.

    To be called once the module is on its device and the optimizers exist. A clause names what it
    found ("callback Norms reads gradients in on_after_backward") and, where there is one, the way
    out. Takes milliseconds, and up to half a second where somebody else holds parameters.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in strategy.optimizers]
    return (
        why_unshardable(module, would_shard=would_shard)
        or why_changed_by_callbacks(trainer)
        or why_hooked(module)
        or why_watched(trainer)
        or why_held(module, optimizers=optimizers, model=strategy.model)
    )


def why_unshardable(
    module: nn.Module, *, would_shard: Callable[[str], bool] = lambda _: True
) -> str | None:
    """Return which parameter or submodule of `module` torch's FSDP2 cannot shard, as a clause with
    the way out, or None.

    Parameters count whose name `would_shard`.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            return f"{name!r} is a TorchScript module; give the module itself in its place"
        table = isinstance(submodule, nn.Embedding | nn.EmbeddingBag)
        if table and submodule.sparse and would_shard(f"{name}.weight"):
            return f"{name!r} has sparse gradients; leave out sparse=True"
    sharded = [
        (name, parameter) for name, parameter in module.named_parameters() if would_shard(name)
    ]
    for name, parameter in sharded:
        if reason := _why_unshardable(parameter):
            return f"parameter {name!r} {reason}"
    dtypes = {parameter.dtype: name for name, parameter in sharded if parameter.requires_grad}
    if len(dtypes) > 1:
        (one, first), (other, second) = list(dtypes.items())[:2]
        return (
            f"trained parameters differ in dtype ({first!r}: {_short(one)}, {second!r}: "
            f"{_short(other)}); keep them in one dtype, and compute in another with the Trainer's "
            "precision"
        )
    return None


def _why_unshardable(parameter: nn.Parameter) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet; run a batch through the module before the fit"
    if isinstance(parameter, DTensor):
        return "is sharded already (DTensor)"
    if parameter.is_meta:
        return "is on the meta device; give it values in configure_model"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}, a tensor class of its own"
    if parameter.dim() == 0:
        return "has no dimension to shard; give it the shape (1,)"
    if parameter.numel() == 0 and parameter.requires_grad:
        return "is empty; leave it out, or set its requires_grad to False"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_changed_by_callbacks(trainer: pl.Trainer) -> str | None:
    """Return which of Lightning's callbacks replaces or freezes parameters during the run, as a
    clause, or None.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            return f"callback {name} prunes parameters"
        if isinstance(callback, BaseFinetuning):
            return f"callback {name} freezes parameters and trains them later"
    return None


def why_hooked(module: pl.LightningModule) -> str | None:
    """Return which hook that was registered on parameters or submodules looks at parameters or
    gradients, or None.
    """
    for name, parameter in module.named_parameters():
        for hook in _hooks_of_parameter(parameter):
            if not is_library(_module_of(hook)):
                return f"a hook on parameter {name!r} ({_title(hook)}) gets its gradient"
    for name, submodule in module.named_modules():
        for hook in _hooks_of_module(submodule):
            of_logger = _module_of(hook).partition(".")[0] in WATCHERS
            if of_logger or why_function_watches(hook, module):
                return (
                    f"a hook on {name or 'the LightningModule'!r} ({_title(hook)}) reads parameters"
                )
    return None


def _hooks_of_parameter(parameter: nn.Parameter) -> Iterator[Callable[..., Any]]:
    for hooks in (
        parameter._backward_hooks,
        getattr(parameter, "_post_accumulate_grad_hooks", None),
    ):
        yield from (hooks or {}).values()


def _hooks_of_module(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for hook in getattr(module, name).values():
            if not is_library(_module_of(hook)):
                yield hook


def _module_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # a functools.partial
    return getattr(inner, "__module__", None) or type(inner).__module__


def _title(function: Any) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", None) or type(inner).__name__
