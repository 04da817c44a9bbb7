"""A method of exchange is a class: its options, their checks, what they cost and how they are
described, in one place.

Methods that average gradients, bucket by bucket, are `GradientMethod`; those of ranks that train
alone are `LocalMethod` (`local_method`). Each has a folder in `methods`, which `method_registry`
finds by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from typing_extensions import Self, override

from lightning_topt.basics.argument_checks import check_flag, check_texts, check_whole
from lightning_topt.communication.bucket import BucketExchange
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.exchange_work import BucketGradients, Work
from lightning_topt.communication.topology import Topology

VALUE_DTYPES = ("float32", "bfloat16", "float16")

COMPILED_BYTES = 16 << 20  # kernels of one method of exchange, measured: 15 and 16 MiB per process


@dataclass(frozen=True, kw_only=True)
class ExchangeMethod(ABC):
    """A way for the replicas of a model to stay together, with its options; alike on all ranks.

    A subclass is a frozen dataclass of plain values that checks them in `check`.
    """

    name: ClassVar[str]  # in files, on command lines and in checkpoints
    not_in_plans: ClassVar[tuple[str, ...]] = ()  # options that a plan cannot fix

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027
        """Raise ValueError for options out of range."""

    @property
    @abstractmethod
    def words(self) -> str:
        """A few words for people: ``"top-k 1 % between nodes"``."""

    def as_mapping(self) -> dict[str, Any]:
        """Return ``{"method": name, option: value, ...}`` of plain values;
        `method_registry.read_method` reads it.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"method": self.name} | {
            n: list(v) if isinstance(v, tuple) else v for n, v in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class GradientMethod(ExchangeMethod):
    """A method that gives every rank the mean of all ranks' gradients, exactly or nearly, bucket by
    bucket.
    """

    # all of a gradient arrives in its step: training is that of whole gradients
    is_exact: ClassVar[bool] = False
    process_bytes: ClassVar[int] = 0  # beside tensors on CPUs, for compiled kernels
    # in place of the mean: the size of a step is the learning rate's alone
    gives_signs: ClassVar[bool] = False

    # ---- the exchange ----------------------------------------------------------------------------

    @abstractmethod
    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        """Return what exchanges the buckets. A collective call."""

    @abstractmethod
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        """Return the work of a step in which the method compresses (not of its first, dense
        ones).
        """

    def num_stages(self, topology: Topology) -> int:
        """Return how many of the exchange's stages use ``groups.world``."""
        return 1

    # ---- what others ask -------------------------------------------------------------------------

    def is_dense_step(self, step: int) -> bool:
        """Return whether step `step` (from 0) sends everything."""
        return False

    def density_at(self, step: int) -> float:
        """Return the share of entries that step `step` (from 0) sends."""
        return 1.0

    def sums_in_nodes(self, topology: Topology) -> bool:
        """Return whether gradients are summed inside each node first; the state is then the
        node's.
        """
        return False

    def choices(self, topology: Topology) -> tuple[Self, ...]:
        """Return the method with everything decided that it leaves open on these ranks; () where it
        cannot run on them.
        """
        return (self,)

    def on(self, topology: Topology) -> Self:
        """Return the method with the numbers that depend on how many ranks there are."""
        return self

    @property
    def steps_under_adam(self) -> int | None:
        """Return the least steps of a training with Adam or its kin that ends where it does with
        whole gradients.

        None: it was measured to end worse.
        """
        return 0

    @property
    def needs_under_adam(self) -> str:
        """Return what training with Adam or its kin must have for that; "" for nothing."""
        return ""

    def check_in_plan(self) -> None:
        """Raise ValueError where the options say more than a plan fixes."""
        for field in fields(self):
            if field.name in self.not_in_plans and getattr(self, field.name) != field.default:
                known = ", ".join(
                    each.name for each in fields(self) if each.name not in self.not_in_plans
                )
                raise ValueError(
                    f"{field.name} is not part of a plan; its entries for {self.name} are {known}"
                )

    @property
    def exempt_rules(self) -> tuple[str, ...] | None:
        """The parameters that are always sent whole, as `exempt.exempt_names` reads it; None where
        it treats all alike.
        """
        return None

    @property
    def holds_back(self) -> bool:
        """Whether what a step does not send is sent later."""
        return False

    @property
    def has_momentum(self) -> bool:
        """Whether the averaged gradient has momentum in it, so that the optimizer must have
        none.
        """
        return False


@dataclass(frozen=True, kw_only=True)
class CompressedMethod(GradientMethod):
    """``dense_steps``: that many first steps send everything (at least 1: DDP lays its buckets anew
    after the first).
    """

    dense_steps: int = 1

    @override
    def check(self) -> None:
        super().check()
        check_whole(self.dense_steps, name="dense_steps", least=1)

    @override
    def is_dense_step(self, step: int) -> bool:
        return step < self.dense_steps


@dataclass(frozen=True, kw_only=True)
class FeedbackMethod(CompressedMethod):
    """``error_feedback``: keep what was not sent for later steps; ``exempt``: parameters that are
    always sent whole.

    These are "norm", "bias", "embedding", or any pattern of parameter names (``"head.*"``).
    """

    error_feedback: bool = True
    exempt: tuple[str, ...] = ("norm", "bias")

    @override
    def check(self) -> None:
        super().check()
        check_flag(self.error_feedback, name="error_feedback")
        # YAML gives lists
        object.__setattr__(self, "exempt", check_texts(self.exempt, name="exempt"))

    @property
    @override
    def exempt_rules(self) -> tuple[str, ...]:
        return self.exempt

    @property
    @override
    def holds_back(self) -> bool:
        return self.error_feedback

    @property
    def feedback_words(self) -> str:
        """The end of `words`."""
        return "" if self.error_feedback else " without error feedback"


@dataclass(frozen=True, kw_only=True)
class ByNodes(GradientMethod):
    """``hierarchical``: sum inside each node first (HiTopKComm, arXiv 2010.10458); None: on several
    nodes of several ranks.
    """

    hierarchical: bool | None = None

    @override
    def check(self) -> None:
        super().check()
        check_flag(self.hierarchical, name="hierarchical", optional=True)

    @override
    def sums_in_nodes(self, topology: Topology) -> bool:
        if self.hierarchical is not None:
            return self.hierarchical
        return topology.num_nodes > 1 and topology.ranks_per_node > 1

    @override
    def num_stages(self, topology: Topology) -> int:
        """Return none by nodes: nothing but exempt parameters then goes through a group of all
        ranks.
        """
        return 0 if self.sums_in_nodes(topology) else 1

    @override
    def choices(self, topology: Topology) -> tuple[Self, ...]:
        possible = {False: True, True: topology.num_nodes > 1 and topology.ranks_per_node > 1}
        wanted = (False, True) if self.hierarchical is None else (self.hierarchical,)
        return tuple(replace(self, hierarchical=choice) for choice in wanted if possible[choice])
