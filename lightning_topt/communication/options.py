"""This is what a user may say about the exchange of gradients, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_topt.basics.argument_checks import check_choice, check_flag, check_real, check_texts, check_whole

METHODS = ("topk", "dense", "bf16", "fp16", "powersgd", "sign")
SELECTIONS = ("auto", "mstopk", "sampled", "torch")
VALUE_DTYPES = ("float32", "bfloat16", "float16")
WARMUP_DENSITY = 0.25  # where a warm-up starts; Deep Gradient Compression (arXiv 1712.01887), section 3.3

# An option that only some methods read must keep its default for the others: nothing is accepted and ignored.
READ_BY = {
    "density": {"topk"},
    "selection": {"topk"},
    "value_dtype": {"topk"},
    "momentum": {"topk"},
    "warmup_steps": {"topk"},
    "link": {"topk"},
    "hierarchical": {"topk", "dense"},
    "rank": {"powersgd"},
    "error_feedback": {"topk", "powersgd", "sign"},
    "exempt": {"topk", "powersgd", "sign"},
}


@dataclass(frozen=True)
class LinkCosts:
    """The network between nodes: seconds before the first byte, then bytes per second."""

    latency_seconds: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_real(self.bandwidth, name="bandwidth")
        check_real(self.latency_seconds, name="latency_seconds")
        if self.bandwidth <= 0 or self.latency_seconds < 0:
            raise ValueError("a link has a positive bandwidth (bytes per second) and a latency of at least 0 seconds")


@dataclass(frozen=True)
class ExchangeOptions:
    """`ExchangeOptions` say how gradients travel; all ranks must say the same.

    - ``method``: "topk", "dense", "bf16", "fp16", "powersgd" or "sign";
    - ``density``: the fraction of a bucket's entries that each node sends, in (0, 1];
    - ``hierarchical``: sum inside each node first (HiTopKComm, arXiv 2010.10458); None: where there are several nodes of
      several ranks;
    - ``selection``: the method of `top_k`; "auto" is the one fused with error feedback;
    - ``value_dtype``: of the values sent; what rounding takes away stays in the residual;
    - ``error_feedback``: keep what was not sent for later steps;
    - ``momentum``: momentum correction and factor masking (arXiv 1712.01887, sections 3.1 and 3.2): the result has the momentum
      in it, so the optimizer must have none;
    - ``warmup_steps``: the density falls geometrically from 0.25 to `density` over so many steps;
    - ``dense_steps``: that many first steps send everything (at least 1: DDP lays its buckets anew after the first);
    - ``exempt``: parameters that are always sent whole: "norm", "bias", "embedding", or any pattern of parameter names
      (``"head.*"``);
    - ``link``: send a bucket whole where that is quicker on this link; None: never;
    - ``rank``: of PowerSGD's factors;
    - ``nonfinite``: "error" raises FloatingPointError on all ranks; "skip" makes the gradient NaN on all ranks, so that a
      GradScaler skips the step;
    - ``timeout_seconds``: for every wait on another rank;
    - ``debug``: before each exchange compare all parameters across ranks, bit for bit.
    """

    method: str = "topk"
    density: float = 0.01
    hierarchical: bool | None = None
    selection: str = "auto"
    value_dtype: str = "float32"
    error_feedback: bool = True
    momentum: float = 0.0
    warmup_steps: int = 0
    dense_steps: int = 1
    exempt: tuple[str, ...] = ("norm", "bias")
    link: LinkCosts | None = None
    rank: int = 2
    nonfinite: str = "error"
    timeout_seconds: float = 300.0
    debug: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "exempt", tuple(self.exempt))  # YAML gives lists
        if not 0 < self.density <= 1:
            raise ValueError(f"density is the fraction sent, above 0 and at most 1; got {self.density}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1; got {self.momentum}")
        if self.momentum and not self.error_feedback:
            raise ValueError("momentum correction accumulates into the residual: it needs error_feedback=True")
        for field in fields(self):
            readers = READ_BY.get(field.name)
            if readers and self.method not in readers and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} has no meaning for method={self.method!r}, only for {', '.join(sorted(readers))}: "
                    f"leave it at {field.default!r}"
                )

    def is_dense_step(self, step: int) -> bool:
        """Return whether step `step` (from 0) sends everything."""
        return self.method == "dense" or step < self.dense_steps

    def density_at(self, step: int) -> float:
        """Return the density of step `step` (from 0): 1 for dense steps, then the warm-up, then `density`."""
        if self.method != "topk" or self.is_dense_step(step):
            return 1.0
        start = max(WARMUP_DENSITY, self.density)
        done = min(1.0, (step - self.dense_steps) / self.warmup_steps) if self.warmup_steps else 1.0
        return float(self.density * (start / self.density) ** (1 - done))


def check_types(options: ExchangeOptions) -> None:
    """Raise ValueError for a value of the wrong type, or below what makes sense for it."""
    for name, allowed in (
        ("method", METHODS),
        ("selection", SELECTIONS),
        ("value_dtype", VALUE_DTYPES),
        ("nonfinite", ("error", "skip")),
    ):
        check_choice(getattr(options, name), name=name, allowed=allowed)
    for name in ("density", "momentum"):
        check_real(getattr(options, name), name=name)
    for name, least in (("warmup_steps", 0), ("dense_steps", 1), ("rank", 1)):
        check_whole(getattr(options, name), name=name, least=least)
    for name in ("error_feedback", "debug"):
        check_flag(getattr(options, name), name=name)
    check_flag(options.hierarchical, name="hierarchical", optional=True)
    check_real(options.timeout_seconds, name="timeout_seconds", positive=True)
    check_texts(options.exempt, name="exempt")
    if options.link is not None and not isinstance(options.link, LinkCosts):
        raise ValueError(f"link is LinkCosts(latency_seconds, bandwidth) or None; got {type(options.link).__name__}")
