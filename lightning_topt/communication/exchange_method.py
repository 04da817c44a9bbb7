"""A method of exchange is a class: options, their checks, costs and a description.

    ExchangeMethod                  name, options, `words`
      GradientMethod                averages gradients bucket by bucket: `make_exchange`, `work`
        CompressedMethod            the first steps send everything
          FeedbackMethod            error feedback, exempt parameters
        ByNodes                     may sum inside each node first
      LocalMethod                   averages parameters that ranks train alone

`method_classes` lists them. A new one that averages gradients has, with `BF16` in
`methods/dense.py` as the shortest example:

    methods/NAME.py                       the class, with `name`, `words`, `make_exchange`, `work`;
                                          the `BucketExchange` that it makes
    METHOD_MODULES below                  its module
    conf/gradient_exchange/NAME.yaml      its options on the command line
    METHODS in                            the contract: among others, the first step is the exact
      tests/communication/test_methods.py   mean (`CompressedMethod`), and states go on alike
    docs/reference/exchange_methods.md    when to choose it, what it sends, what its options mean
    docs/reference/schemas.md             its name and options in plan files
    __init__ of the package, and of       its class among the public names
      `communication`

Strategies and plans then take it by its name. ``allow="compression"`` searches nothing but
`plugins.plan_request.default_candidates`, and under Adam those of them alone whose
`steps_under_adam` the training has; other methods are searched where they are named. A method that
averages parameters is a `LocalMethod`; `methods/local_steps.py` is the example.

What the exchange of one bucket takes is its `Work`: passes over memory, collectives and bytes held,
no seconds. The formulas are in the `work` of each method. Their letters: n gradient elements, s
bytes of one; W ranks = m nodes x l; b bytes of a message. The bytes are those that the exchange
itself moves.
"""

from __future__ import annotations

import importlib
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self, override

from lightning_topt.basics.argument_checks import (
    check_choice,
    check_flag,
    check_real,
    check_texts,
    check_whole,
)
from lightning_topt.communication.bucket import BucketExchange, BucketLayout, ExchangeContext
from lightning_topt.communication.topology import Topology

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that methods of exchange take
DEFAULT_METHOD = "topk"
# of all methods: those that average gradients, then local steps
METHOD_MODULES = ("top_k", "dense", "bounded_loss", "local_steps")

COMPILED_BYTES = 16 << 20  # kernels of one method of exchange, measured: 15 and 16 MiB per process

# In bytes of a copy that takes as long, measured on one core at densities of 0.1 to 5 %: passes
# over the entries (values, and indices to bits and back), and the cache lines that scattered
# additions touch.
PACK_BYTES_PER_ENTRY, DECODE_BYTES_PER_ENTRY = 50, 100
EXEMPT_PASSES = 10  # packed, checked, divided, written back
# kernels for one message, one received message
ENCODE_CALLS, DECODE_CALLS = 16, 10


@dataclass(frozen=True, kw_only=True)
class ExchangeMethod(ABC):
    """A way for the replicas of a model to stay together, with its options; alike on all ranks.

    A subclass is a frozen dataclass of plain values that checks them in `check`.
    """

    name: ClassVar[str]  # in files, on command lines and in checkpoints

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027
        """Raise ValueError for options out of range."""

    @property
    @abstractmethod
    def words(self) -> str:
        """A few words for people: ``"top-k 1 % between nodes"``."""

    def as_mapping(self) -> dict[str, Any]:
        """Return ``{"method": name, option: value, ...}`` of plain values.

        `read_method` reads it.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"method": self.name} | {
            n: list(v) if isinstance(v, tuple) else v for n, v in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class GradientMethod(ExchangeMethod):
    """A method that gives every rank the mean of all ranks' gradients, exactly or nearly."""

    # all of a gradient arrives in its step: training is that of whole gradients
    is_exact: ClassVar[bool] = False
    process_bytes: ClassVar[int] = 0  # beside tensors on CPUs, for compiled kernels
    # on CUDA the stream waits for what its exchange yields: for process groups, not for the host
    in_stream_order: ClassVar[bool] = True

    # ---- the exchange

    @abstractmethod
    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        """Return what exchanges the buckets. A collective call."""

    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        """Return the work of a step that compresses (not of the first, dense ones).

        A method without it has no price: it is for `CompressedDDPStrategy`, not for plans.
        """
        raise NotImplementedError(f"{type(self).__name__} has no price")

    def num_stages(self, topology: Topology) -> int:
        """Return how many of the exchange's stages use ``groups.world``."""
        return 1

    # ---- what planner, strategies and checkpoints ask

    def density_at(self, step: int) -> float:
        """Return the share of entries that step `step` (from 0) sends."""
        return 1.0

    def sums_in_nodes(self, topology: Topology) -> bool:
        """Return whether nodes sum their gradients first; the state is then the node's."""
        return False

    def choices(self, topology: Topology) -> tuple[Self, ...]:
        """Return the method with everything decided that it leaves open on these ranks.

        () where it cannot run on them.
        """
        return (self,)

    def on(self, topology: Topology) -> Self:
        """Return the method with the numbers that depend on how many ranks there are."""
        return self

    @property
    def steps_under_adam(self) -> int | None:
        """Least steps of a training with Adam that ends where it does with full gradients.

        0: any training does, as measured. None: it ends worse, or was not measured.
        """
        return None

    @property
    def needs_under_adam(self) -> str:
        """What training with Adam or its kin must have for that; "" for nothing."""
        return ""

    def check_in_plan(self) -> None:
        """Raise ValueError for a method without a price, and options that no plan has."""
        if type(self).work is GradientMethod.work:
            raise ValueError(
                f"{type(self).__name__} has no price, so plans cannot have it: give it to "
                "CompressedDDPStrategy"
            )

    @property
    def exempt_rules(self) -> tuple[str, ...] | None:
        """The parameters that are never compressed, as `exempt_names` reads it.

        None where the method treats all alike.
        """
        return None

    @property
    def has_residual(self) -> bool:
        """Whether what a step does not send is sent later."""
        return False


@dataclass(frozen=True, kw_only=True)
class CompressedMethod(GradientMethod):
    """A method whose first ``dense_steps`` steps send everything.

    There is at least one: DDP lays out its buckets anew after the first.
    """

    dense_steps: int = 1

    @override
    def check(self) -> None:
        super().check()
        check_whole(self.dense_steps, name="dense_steps", least=1)

    def is_dense_step(self, step: int) -> bool:
        """Return whether step `step` (from 0) sends everything."""
        return step < self.dense_steps


@dataclass(frozen=True, kw_only=True)
class FeedbackMethod(CompressedMethod):
    """A method with error feedback and exempt parameters.

    - ``error_feedback``: keep what was not sent for later steps;
    - ``exempt``: parameters that are never compressed: "norm", "bias", "embedding", or any pattern
      of parameter names (``"head.*"``).
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
    def has_residual(self) -> bool:
        return self.error_feedback

    @property
    def feedback_words(self) -> str:
        """The end of `words`."""
        return "" if self.error_feedback else " without error feedback"


def exempt_names(module: nn.Module, rules: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters of `module` that `rules` exempt: never compressed.

    Exempt parameters have few elements and much at stake.

    - "bias": parameters of fewer than two dims whose own name contains "bias";
    - "norm": all other parameters of fewer than two dims (the scales of norms), and all of modules
      called ...Norm...;
    - "embedding": the tables of ``nn.Embedding`` and ``nn.EmbeddingBag``;
    - anything else: a pattern of full names (``"head.*"``; * ? [] as in file names).

    Raises:
        ValueError: where a pattern matches no parameter.
    """
    parameters = dict(module.named_parameters())
    # the module that each parameter belongs to, by full name
    owners = {
        f"{prefix}.{name}" if prefix else name: owner
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    exempt: set[str] = set()
    for rule in rules:
        if rule == "embedding":
            found = {n for n in parameters if isinstance(owners[n], nn.Embedding | nn.EmbeddingBag)}
        elif rule in ("norm", "bias"):
            flat = {n: "bias" in n.rpartition(".")[2] for n, p in parameters.items() if p.dim() < 2}
            found = {n for n, is_bias in flat.items() if is_bias == (rule == "bias")}
            if rule == "norm":
                found |= {n for n in parameters if "Norm" in type(owners[n]).__name__}
        else:
            found = {n for n in parameters if fnmatchcase(n, rule)}
            if not found:
                raise ValueError(
                    f"exempt={rule!r} matches no parameter; names look like "
                    f"{', '.join(list(parameters)[:3])}"
                )
        exempt |= found
    return frozenset(exempt)


def averaged_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters whose gradients DDP averages, where it ignores `ignored`.

    DDP asks for a parameter of the module itself as ``".scale"`` here, and as ``"scale"`` where it
    broadcasts values.
    """
    averaged = {
        parameter
        for prefix, submodule in module.named_modules()
        for name, parameter in submodule.named_parameters(recurse=False)
        if parameter.requires_grad and f"{prefix}.{name}" not in ignored
    }
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter in averaged
    }


def equal_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trained parameters that DDP keeps equal on all ranks.

    It broadcasts them, and averages their gradients.
    """
    return {
        name: parameter
        for name, parameter in averaged_parameters(module, ignored).items()
        if name not in ignored
    }


@dataclass(frozen=True, kw_only=True)
class ByNodes(GradientMethod):
    """A method that may sum inside each node first (HiTopKComm, arXiv 2010.10458).

    ``hierarchical``: whether it does; None: where there are several nodes of several ranks.
    """

    hierarchical: bool | None = None

    @override
    def check(self) -> None:
        super().check()
        check_flag(self.hierarchical, name="hierarchical", optional=True)

    @override
    def sums_in_nodes(self, topology: Topology) -> bool:
        return topology.has_levels if self.hierarchical is None else self.hierarchical

    @override
    def num_stages(self, topology: Topology) -> int:
        """Return 0 by nodes, where only exempt parameters go through a group of all ranks."""
        return 0 if self.sums_in_nodes(topology) else 1

    @override
    def choices(self, topology: Topology) -> tuple[Self, ...]:
        wanted = (False, True) if self.hierarchical is None else (self.hierarchical,)
        possible = [choice for choice in wanted if not choice or topology.has_levels]
        return tuple(replace(self, hierarchical=choice) for choice in possible)


@dataclass(frozen=True)
class Work:
    """What exchanging the gradients of one bucket takes on each rank.

    `moved` bytes are read and written by `calls` kernels. `collectives` run one
    after another: (where, op, bytes of the full tensor). Where is "world" (among all ranks), "node"
    (inside each node) or "across" (among the ranks with equal position in their nodes, all l groups
    at once). The all-reduce of `exempt_bytes` over all ranks runs beside the first. `kept_bytes`
    stay between steps, `buffer_bytes` while the exchange is in flight. Of what goes by datagrams
    (the op "bounded_loss") the share `tolerance` may be lost.
    """

    moved: float
    calls: int
    collectives: tuple[tuple[str, str, float], ...]
    kept_bytes: float = 0.0
    buffer_bytes: float = 0.0
    exempt_bytes: float = 0.0
    tolerance: float = 0.0


NO_WORK = Work(0.0, 0, ())


@dataclass(frozen=True)
class BucketGradients:
    """The gradients of one bucket: their layout, and the bytes of each parameter's."""

    layout: BucketLayout
    sizes: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(self.layout.numels)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.sizes)

    @cached_property
    def compressible_numel(self) -> int:
        """Number of elements of parameters that are not exempt."""
        return self._sum(self.layout.numels, exempt=False)

    @cached_property
    def exempt_bytes(self) -> int:
        """Bytes of the exempt gradients."""
        return self._sum(self.sizes, exempt=True)

    def _sum(self, values: Sequence[int], *, exempt: bool) -> int:
        return sum(
            value
            for value, is_exempt in zip(values, self.layout.exempt, strict=True)
            if is_exempt == exempt
        )


# ---- ranks that train alone --------------------------------------------------------------------

OUTER_CALLS = 12  # kernels of an outer step beside those of its mean


@dataclass(frozen=True, kw_only=True)
class LocalMethod(ExchangeMethod):
    """A method of ranks that train alone and come together every so many steps.

    Ranks make ``every`` steps of their own optimizers, then one step of the outer one together. The
    outer optimizer is SGD with Nesterov momentum: ``outer_learning_rate``, ``outer_momentum``. With
    ``hierarchical`` the ranks of a node train one replica together: their gradients are averaged in
    every step, and outer steps are between nodes. None: where there are several nodes of several
    ranks.
    """

    every: int = 50
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    hierarchical: bool | None = False

    @override
    def check(self) -> None:
        super().check()
        check_flag(self.hierarchical, name="hierarchical", optional=True)
        check_whole(self.every, name="every (the number of local steps between outer steps)")
        for name in ("outer_learning_rate", "outer_momentum"):
            check_real(getattr(self, name), name=name)
        if not self.outer_learning_rate > 0:
            raise ValueError(f"outer_learning_rate is positive; got {self.outer_learning_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum is at least 0 and below 1; got {self.outer_momentum}")

    @abstractmethod
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> Any:
        """Return the `local_sgd.MeanOverRanks` of vectors (numel,): how far each rank went.

        It takes their mean over `group`.
        """

    @abstractmethod
    def mean_work(self, numel: int, ranks: int) -> Work:
        """Return the work of the mean over `ranks` ranks of vectors (numel,), and of adding it.

        With what `make_mean` keeps. The formulas are in the work of each method.
        """

    def work(self, numel: int, ranks: int) -> Work:
        """Return the work of an outer step of `ranks` replicas of `numel` float32 parameters.

        Bytes of passes: parameters are checked (4 n), the mean is added to the anchor, and that
        written to the parameters (8 n). The outer momentum is scaled (8 n), and added (12 n).
        """
        mean = self.mean_work(numel, ranks)
        momentum = 20 * numel if self.outer_momentum else 0
        kept = 4 * numel * (1 + bool(self.outer_momentum))  # the anchor, and the momentum
        return replace(
            mean,
            moved=mean.moved + 12 * numel + momentum,
            calls=mean.calls + OUTER_CALLS,
            # whether parameters are finite, by rank
            collectives=(("world", "all_reduce", 4.0 * ranks), *mean.collectives),
            kept_bytes=mean.kept_bytes + kept,
        )

    def choices(self, topology: Topology) -> tuple[Self, ...]:
        """Return the method with everything decided that it leaves open, as plans need it.

        () where the ranks of a node would train one replica: in plans each trains its own.
        """
        return () if self.joins_nodes(topology) else (replace(self, hierarchical=False),)

    def joins_nodes(self, topology: Topology) -> bool:
        """Return whether the ranks of each node train one replica together."""
        if self.hierarchical is not None:
            return self.hierarchical and topology.ranks_per_node > 1
        return topology.has_levels

    @property
    def sent_share(self) -> float:
        """The share of entries that an outer step sends."""
        return 1.0


# ---- methods by name -----------------------------------------------------------------------------


def read_method(given: ExchangeMethod | str | Mapping[str, Any]) -> ExchangeMethod:
    """Return a method from itself, its name, or ``{"method": name, option: value, ...}``.

    Without a name it is top-k.

    Raises:
        ValueError: for a name or an option that there is not, and for options out of range.
    """
    if isinstance(given, ExchangeMethod):
        return given
    if not isinstance(given, str | Mapping):
        raise ValueError(
            "a method of exchange is a name, a mapping such as {method: topk, density: 0.01}, or "
            "an object such as "
            f"TopK(density=0.01); got {reprlib.repr(given)}"
        )
    # the name, then the options that are left
    options = {"method": given} if isinstance(given, str) else dict(given)
    name = check_choice(
        options.pop("method", DEFAULT_METHOD), name="method", allowed=method_classes()
    )
    kind = method_classes()[name]
    known = [field.name for field in fields(kind)]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(
            f"method {name!r} has no option {reprlib.repr(unknown[0])}; its options are "
            f"{', '.join(known) or 'none'}"
        )
    return kind(**options)


def read_gradient_method(given: ExchangeMethod | str | Mapping[str, Any]) -> GradientMethod:
    """Return what `read_method` gives where it averages gradients.

    Raises:
        ValueError: where it does not.
    """
    method = read_method(given)
    if not isinstance(method, GradientMethod):
        raise ValueError(
            f"{type(method).__name__} averages parameters that ranks train alone, not gradients: "
            f"give it to LocalStepsStrategy, or choose one of {', '.join(gradient_methods())}"
        )
    return method


@cache
def method_classes() -> Mapping[str, type[ExchangeMethod]]:
    """Return all methods by name: the classes with a `name` that their modules define."""
    methods: dict[str, type[ExchangeMethod]] = {}
    for module_name in METHOD_MODULES:
        module = importlib.import_module(f"lightning_topt.communication.methods.{module_name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, ExchangeMethod)
                and value.__module__ == module.__name__
                and "name" in vars(value)
            ):
                methods[value.name] = value
    return methods


@cache
def gradient_methods() -> tuple[str, ...]:
    """Return the names of those that average gradients."""
    return tuple(
        name for name, kind in method_classes().items() if issubclass(kind, GradientMethod)
    )
