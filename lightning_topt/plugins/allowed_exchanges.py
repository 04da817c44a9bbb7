"""A plan may have these gradient exchanges: what the user allows, and what the run can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_topt.communication.exchange_method import ByNodes, ExchangeMethod, GradientMethod
from lightning_topt.communication.method_registry import gradient_methods
from lightning_topt.communication.methods.half import BF16
from lightning_topt.communication.methods.top_k import TopK
from lightning_topt.communication.selection.vector_top_k import DTYPES
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_values import read_exchange

Allow = (
    bool
    | str
    | Mapping[str, Any]
    | ExchangeMethod
    | Sequence[str | Mapping[str, Any] | ExchangeMethod]
)
DEFAULT_CANDIDATES = (TopK(), TopK(density=None, bits=2), BF16())


@dataclass(frozen=True)
class AllowedExchanges:
    """`candidates` are searched, besides whole gradients; plans that are given may have `methods`.

    With `only_what_holds` those of the candidates are searched that hold for the module's
    optimizer.
    """

    candidates: tuple[GradientMethod, ...] = ()
    methods: tuple[str, ...] = ()
    only_what_holds: bool = False

    @classmethod
    def read(cls, allow: Allow) -> AllowedExchanges:
        """Read what `allow_compression` says: False; True; any of the forms of `read_method`; or
        several of these.

        True searches those of `DEFAULT_CANDIDATES` that hold for the module's optimizer, and lets a
        given plan have any method. Raises ValueError that names the entry.
        """
        if isinstance(allow, bool):
            return (
                cls(DEFAULT_CANDIDATES, gradient_methods(), only_what_holds=True)
                if allow
                else cls()
            )
        several = isinstance(allow, Sequence) and not isinstance(allow, str)
        entries = allow if several else [allow]
        candidates = tuple(_read(entry) for entry in entries)  # type: ignore[union-attr]
        if not candidates:
            raise ValueError(
                "allow_compression is an empty list: name an exchange, or set it to false or true"
            )
        return cls(
            tuple(dict.fromkeys(candidates)),
            tuple(dict.fromkeys(method.name for method in candidates)),
        )

    def held(
        self, optimizer: OptimizerProfile, *, steps: float, say: bool = True
    ) -> tuple[GradientMethod, ...]:
        """Return the candidates to search for a training of so many `steps`; `say` which are left
        out, and what others need.
        """
        if not self.only_what_holds or not optimizer.adaptive:
            return self.candidates
        held = tuple(
            m
            for m in self.candidates
            if m.steps_under_adam is not None and m.steps_under_adam <= steps
        )
        for method in self.candidates if say else ():
            if method not in held:
                rank_zero_info(_left_out(method, optimizer.name))
            elif needs := method.needs_under_adam:
                rank_zero_info(
                    f"topt: {method.words} is searched; {optimizer.name} needs {needs} "
                    "(docs/compression.md)"
                )
        return held

    def check(self, plan: ParallelPlan) -> None:
        """Raise PlanError where `plan` compresses gradients in a way that is not allowed."""
        exchange = plan.gradient_exchange
        if exchange is None or exchange.is_exact or exchange.name in self.methods:
            return
        raise PlanError(
            f"this plan sends gradients compressed ({exchange.words}), which changes the training. "
            f"To run it, say allow_compression=True, or {[exchange.name]}; or remove "
            "gradient_exchange from the plan"
        )


def exchanges_of_run(
    allowed: AllowedExchanges, trainer: pl.Trainer, optimizer: OptimizerProfile
) -> list[GradientMethod]:
    """Return the candidates that this run can have, whatever nodes the description of its cluster
    has.
    """
    if any(
        p.requires_grad and p.dtype not in DTYPES for p in trainer.lightning_module.parameters()
    ):
        return []
    candidates = allowed.held(optimizer, steps=steps_of_fit(trainer))
    if trainer.num_nodes > 1:
        return [*candidates]
    one_node = Topology(1, 2, 0)  # how many ranks it has decides nothing
    return [*itertools.chain.from_iterable(method.choices(one_node) for method in candidates)]


def steps_of_fit(trainer: pl.Trainer) -> float:
    """Return the optimizer's steps of this fit; infinity where nothing ends it, or its data are not
    there yet.
    """
    if trainer.train_dataloader is None:
        return trainer.max_steps if trainer.max_steps >= 0 else math.inf
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else math.inf


def check_exchange_of_run(plan: ParallelPlan, trainer: pl.Trainer) -> None:
    """Raise PlanError where this run cannot have the gradient exchange of a given plan."""
    exchange = plan.gradient_exchange
    if exchange is None:
        return
    if isinstance(exchange, ByNodes) and exchange.hierarchical and trainer.num_nodes == 1:
        raise PlanError(
            "this plan exchanges gradients between nodes (hierarchical), and this Trainer has one: "
            "set num_nodes, or hierarchical: false"
        )
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise PlanError(
                "this plan has a gradient exchange, which takes float32, bfloat16 and float16, and "
                f"{name} is {parameter.dtype}: choose another precision, or remove "
                "gradient_exchange from the plan"
            )


def _left_out(method: GradientMethod, optimizer: str) -> str:
    least = method.steps_under_adam
    which = "training" if least is None else f"fewer than {least} steps"
    return (
        f"topt: {method.words} was not searched: {which} with {optimizer} may end worse under it "
        "than with whole gradients (docs/compression.md). To search it all the same, say "
        f"allow_compression=[{_written(method)}]"
    )


def _written(method: GradientMethod) -> dict[str, Any]:
    """The shortest mapping that is read as `method`."""
    changed = {
        f.name: getattr(method, f.name)
        for f in fields(method)
        if getattr(method, f.name) != f.default
    }
    return {"method": method.name, **changed}


def _read(entry: Any) -> GradientMethod:
    try:
        return read_exchange(entry)
    except ValueError as error:
        raise ValueError(f"allow_compression: {entry!r}: {error}") from error
