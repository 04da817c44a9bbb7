"""Options of Lightning's DDPStrategy that ours take too, and the errors that speak of them."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)
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
