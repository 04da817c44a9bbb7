"""The options of top-k, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Self, override

from lightning_topt.basics.argument_checks import check_choice, check_real, check_whole
from lightning_topt.communication.exchange_method import VALUE_DTYPES, ByNodes, FeedbackMethod
from lightning_topt.communication.levels import check_bits
from lightning_topt.communication.topology import Topology

SELECTIONS = ("auto", "mstopk", "sampled", "torch")
# of all who send; less ends worse under AdamW (benchmarks/results/adam_compression.md)
DENSITY_TOGETHER = 0.16
# of a training; those of 6000 end 2 % worse with so much (the same benchmark)
STEPS_UNDER_ADAM = 12000
# where a warm-up starts; Deep Gradient Compression (arXiv 1712.01887), section 3.3
WARMUP_DENSITY = 0.25


@dataclass(frozen=True)
class LinkCosts:
    """The network between nodes: seconds before the first byte, then bytes per second."""

    latency_seconds: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_real(self.bandwidth, name="bandwidth")
        check_real(self.latency_seconds, name="latency_seconds")
        if self.bandwidth <= 0 or self.latency_seconds < 0:
            raise ValueError(
                "a link has a positive bandwidth (bytes per second) and a latency of at least 0 "
                "seconds"
            )


@dataclass(frozen=True, kw_only=True)
class TopKOptions(ByNodes, FeedbackMethod):
    """Options of `TopK`, beside those of all methods with error feedback and by nodes.

    - ``density``: the fraction of a bucket's entries that each node (by itself, each rank) sends,
      in (0, 1]; None: 0.16 divided by their number, as many as training with AdamW needs;
    - ``selection``: the method of `top_k`; "auto" is the one fused with error feedback;
    - ``value_dtype``: of the values sent; what rounding takes away stays in the residual;
    - ``bits``: of the values sent, by levels: 1, 2, 4 or 8 (`levels`); None: as `value_dtype`;
    - ``momentum``: momentum correction and factor masking (arXiv 1712.01887, sections 3.1 and 3.2):
      the result has the momentum in it, so the optimizer must have none;
    - ``warmup_steps``: the density falls geometrically from 0.25 to `density` over so many steps;
    - ``link``: `LinkCosts`, or a mapping of its fields: send a bucket whole where that is quicker;
      None: never.
    """

    not_in_plans: ClassVar[tuple[str, ...]] = (
        *("selection", "momentum"),  # momentum belongs to the optimizer
        "link",  # a plan has been weighed against dense exchanges already
    )
    density: float | None = 0.01
    selection: str = "auto"
    value_dtype: str = "float32"
    bits: int | None = None
    momentum: float = 0.0
    warmup_steps: int = 0
    link: LinkCosts | None = None

    @override
    def check(self) -> None:
        super().check()
        check_real(self.momentum, name="momentum")
        if self.density is not None and not 0 < check_real(self.density, name="density") <= 1:
            raise ValueError(
                f"density is the fraction sent, above 0 and at most 1; got {self.density}"
            )
        check_choice(self.selection, name="selection", allowed=SELECTIONS)
        check_choice(self.value_dtype, name="value_dtype", allowed=VALUE_DTYPES)
        if self.bits is not None:
            check_bits(self.bits)
            if self.value_dtype != "float32":
                raise ValueError(
                    f"values are sent in bits={self.bits} or as {self.value_dtype}: give one of "
                    "the two"
                )
        check_whole(self.warmup_steps, name="warmup_steps", least=0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1; got {self.momentum}")
        if self.momentum and not self.error_feedback:
            raise ValueError(
                "momentum correction accumulates into the residual: it needs error_feedback=True"
            )
        object.__setattr__(self, "link", read_link(self.link))

    @override
    def density_at(self, step: int) -> float:
        """Return the density of step `step` (from 0): 1 for dense steps, then the warm-up, then
        `density`.

        Raises ValueError where the density depends on who sends (`on`).
        """
        if self.is_dense_step(step):
            return 1.0
        if self.density is None:
            raise ValueError("this density depends on the number of ranks: ask TopK.on(topology)")
        start = max(WARMUP_DENSITY, self.density)
        done = min(1.0, (step - self.dense_steps) / self.warmup_steps) if self.warmup_steps else 1.0
        return float(self.density * (start / self.density) ** (1 - done))

    @override
    def on(self, topology: Topology) -> Self:
        if self.density is not None:
            return self
        senders = topology.num_nodes if self.sums_in_nodes(topology) else topology.world_size
        return replace(self, density=DENSITY_TOGETHER / senders)

    @property
    @override
    def steps_under_adam(self) -> int | None:
        # With fewer, rare and large entries dominate its mean squares, and its steps get small.
        return (
            STEPS_UNDER_ADAM if self.density is None or self.density >= DENSITY_TOGETHER else None
        )

    @property
    @override
    def needs_under_adam(self) -> str:
        return (
            "a learning rate that rises for 100 steps or more"
            if self.steps_under_adam is not None
            else ""
        )

    @property
    @override
    def has_momentum(self) -> bool:
        return self.momentum > 0


def read_link(link: LinkCosts | Mapping[str, float] | None) -> LinkCosts | None:
    """Return `LinkCosts`, also from a mapping of its fields. Raises ValueError that names the
    entries.
    """
    if link is None or isinstance(link, LinkCosts):
        return link
    if not isinstance(link, Mapping):
        raise ValueError(
            f"link is LinkCosts(latency_seconds, bandwidth) or None; got {type(link).__name__}"
        )
    if set(link) != {"latency_seconds", "bandwidth"}:
        raise ValueError(
            f"link has the entries latency_seconds and bandwidth; got {sorted(map(str, link))}"
        )
    return LinkCosts(**link)
