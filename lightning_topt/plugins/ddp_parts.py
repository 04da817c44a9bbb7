"""Our strategies that exchange gradients or parameters share this: DDP's options checked, names
registered, the end.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

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


def checked_ddp_options(
    options: dict[str, Any], *, strategy: str, wraps: bool = True
) -> dict[str, Any]:
    """Return `options`, each of which `DDPStrategy` takes, or `DistributedDataParallel` where the
    strategy `wraps` in one.

    Raises ValueError for options that bring a communication hook, TypeError for one that nobody
    takes.
    """
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
    """Return `options`, each of which one of `owners` takes and none of which is `without`. Raises
    TypeError for any other.
    """
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
    """Return what Lightning's DDPStrategy would make of its options; `scales`: a GradScaler skips
    gradients that overflow.
    """
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
    """Let Lightning's advice on unused parameters name `strategy`, a class of ours, in place of its
    ``ddp``.
    """
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
    """Destroy the process group, for `atexit`: Lightning does this for NCCL only; threads of a gloo
    group that outlives the interpreter can abort it.

    A thread of the group still drops the tensors of the last collective call when that has
    returned, for which it needs the interpreter, and trainers and models refer to the group in
    cycles: both are done with after a collection.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
