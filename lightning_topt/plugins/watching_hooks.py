"""Hooks of user code that look at gradients or parameters, or call the model, outside of a training
step.

Where parameters are sharded, such code would see shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_topt.plugins.held_parameters import is_library
from lightning_topt.plugins.source_looks import GRADIENTS, PARAMETERS, Reader, look_into

OF_BATCHES = ("batch_start", "batch_end", "epoch_start", "epoch_end", "end")
HOOKS = (
    *(f"on_{stage}_{moment}" for stage in ("train", "validation") for moment in OF_BATCHES),
    *(
        f"on_validation_{moment}"
        for moment in ("start", "model_eval", "model_train", "model_zero_grad")
    ),
    *(
        f"on_before_{what}"
        for what in ("zero_grad", "backward", "optimizer_step", "batch_transfer")
    ),
    *(
        "on_after_backward",
        "on_after_batch_transfer",
        "transfer_batch_to_device",
        "on_save_checkpoint",
    ),
    *(
        "optimizer_step",
        "optimizer_zero_grad",
        "backward",
        "configure_gradient_clipping",
        "lr_scheduler_step",
    ),
)
# What a capture sees by itself is left to it: parameters that `training_step` reads are then whole
# while it runs.
SEEN_BY = {
    "training_step": frozenset({"grad", "state_dict"}),
    "validation_step": GRADIENTS | PARAMETERS,
}


def why_watched(trainer: pl.Trainer) -> str | None:
    """Return which hook looks at gradients or parameters between the steps, as a clause, or
    None.
    """
    module = trainer.lightning_module
    for name, looks in SEEN_BY.items():
        for function in _own_functions(module, name):
            reader = Reader(module, looks, calls_count=False)
            if found := look_into(function, (module,), reader, 0):
                return f"{type(module).__name__}.{name} reads {found}"
            reader = Reader(
                module,
                PARAMETERS,
                calls_count=False,
                attributes_count=True,
                computes=reader.computes,
            )
            if reader.computes and look_into(function, (module,), reader, 0):
                return (
                    f"{type(module).__name__}.{name} computes gradients, which may be those of "
                    "parameters that it reads"
                )
    for name in HOOKS:
        for function in _own_functions(module, name):
            if found := look_into(function, (module,), _of_hooks(module), 0):
                return f"{type(module).__name__}.{name} {_verb(found)}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for function in _own_functions(callback, name):
                # LambdaCallback: a function of (trainer, module, ...)
                bound = name in vars(callback)
                arguments = (trainer, module) if bound else (callback, trainer, module)
                if found := look_into(function, arguments, _of_hooks(module), 0):
                    return f"callback {type(callback).__name__} {_verb(found)} in {name}"
    return None


def why_function_watches(function: Callable[..., Any], module: pl.LightningModule) -> str | None:
    """Return the same for one function that torch calls, such as a forward hook; it may have a
    module as its first argument.
    """
    return look_into(
        function, (module,), Reader(module, GRADIENTS | PARAMETERS, calls_count=False), 0
    )


def _of_hooks(module: pl.LightningModule) -> Reader:
    return Reader(module, GRADIENTS | PARAMETERS, calls_count=True)


def _verb(found: str) -> str:
    return found if found.startswith(("calls", "hands", "uses")) else f"reads {found}"


def _own_functions(owner: Any, name: str) -> Iterator[Callable[..., Any]]:
    """The user's implementations of a hook: on the object, and in its classes, base classes too
    (`super()` may call them).
    """
    if callable(on_object := vars(owner).get(name)):
        yield on_object
    for cls in type(owner).__mro__:
        if name in vars(cls) and not is_library(cls.__module__):
            yield vars(cls)[name]
