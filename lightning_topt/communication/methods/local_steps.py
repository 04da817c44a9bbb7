"""LocalSteps: how far each rank went travels whole, or its largest entries.

Whole: DiLoCo, arXiv 2311.08105. The sparse form sends only the `density` largest entries of what is
pending on each rank (SparseLoCo, arXiv 2508.15706):

    residual = residual_decay * residual + delta
    sent = the largest of residual;  residual = residual - sent
    mean = mean of sent

SparseLoCo itself is ``outer_momentum=0, outer_learning_rate=1, residual_decay=0.95``: there the
residual is the momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice, check_real
from lightning_topt.communication.exchange_method import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    PACK_BYTES_PER_ENTRY,
    VALUE_DTYPES,
    LocalMethod,
    Work,
)
from lightning_topt.communication.local_sgd import (
    DenseMean,
    EntriesMean,
    MeanOverRanks,
    OuterGradient,
    OuterMean,
    Wait,
)
from lightning_topt.communication.selection import feedback_top_k, warm_up
from lightning_topt.communication.wire import MessageFormat, warm_up_wire


@dataclass(frozen=True, kw_only=True)
class LocalSteps(LocalMethod):
    """Ranks train alone, then take an outer step together.

    - ``density``: the share of entries that an outer step sends, the rest stays in the residual;
      None: all;
    - ``residual_decay``: what is left of the residual after an outer step;
    - ``value_dtype``: of the values sent: "float32", "bfloat16" or "float16".
    """

    name: ClassVar[str] = "local_steps"
    density: float | None = None
    residual_decay: float = 1.0
    value_dtype: str = "float32"

    @override
    def check(self) -> None:
        super().check()
        check_choice(self.value_dtype, name="value_dtype", allowed=VALUE_DTYPES)
        check_real(self.residual_decay, name="residual_decay")
        if self.density is not None and not 0 < check_real(self.density, name="density") <= 1:
            raise ValueError(
                "density is the fraction sent, above 0 and at most 1, or None for all; got "
                f"{self.density}"
            )
        if not 0 <= self.residual_decay <= 1 or (self.residual_decay != 1 and self.density is None):
            raise ValueError(
                "residual_decay is from 0 to 1, and 1 where no density makes a residual; got "
                f"{self.residual_decay}"
            )

    @property
    @override
    def words(self) -> str:
        sent = "" if self.density is None else f", top-k {100 * self.density:g} % of them"
        return f"outer steps every {self.every} steps{sent}"

    @property
    @override
    def sent_share(self) -> float:
        return 1.0 if self.density is None else self.density

    @override
    def make_mean(
        self, numel: int, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> MeanOverRanks:
        dtype: torch.dtype = getattr(torch, self.value_dtype)
        if self.density is None:
            return DenseMean(value_dtype=dtype, group=group)
        form = self._form(numel)
        return SparseMean(form, decay=self.residual_decay, device=device, group=group)

    @override
    def mean_work(self, numel: int, ranks: int) -> Work:
        targets = 1 + bool(self.outer_momentum)
        if self.density is None:
            # anchor - parameters (12 n), divided (8 n), rounded; the mean is added to each target
            size = getattr(torch, self.value_dtype).itemsize
            rounded = (4 + size) * numel if size < 4 else 0
            return Work(
                (20 + 12 * targets) * numel + rounded,
                ENCODE_CALLS,
                (("world", "all_reduce", float(size * numel)),),
                buffer_bytes=(4 + (size if size < 4 else 0)) * numel,
            )
        # anchor - parameters (12 n), the residual decays (8 n), its largest entries leave (12 n)
        form = self._form(numel)
        packed = PACK_BYTES_PER_ENTRY + DECODE_BYTES_PER_ENTRY * ranks * targets
        return Work(
            32 * numel + packed * form.k,
            ENCODE_CALLS + DECODE_CALLS * ranks,
            (("world", "all_gather", float(ranks * form.nbytes)),),
            kept_bytes=4 * numel,
            buffer_bytes=4 * numel + (1 + ranks) * form.nbytes,
        )

    def _form(self, numel: int) -> MessageFormat:
        assert self.density is not None
        k = max(1, round(self.density * numel))
        return MessageFormat(numel, k, getattr(torch, self.value_dtype))


class SparseMean(MeanOverRanks):
    """The largest entries of each rank's residual by one all-gather.

    The rest, and what rounding takes away, stay in the residual.
    """

    residual: Tensor

    def __init__(
        self,
        form: MessageFormat,
        *,
        decay: float,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(group=group)
        self.form, self.decay = form, decay
        self.residual = torch.zeros(form.numel, device=device)
        if device.type == "cpu":
            warm_up()
            warm_up_wire()

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean of what was selected."""
        # decay, add and select; send while the rounding goes back to the residual
        self.residual.mul_(self.decay)
        chosen = feedback_top_k(gradient.whole(), self.residual, self.form.k)
        messages, work = self.send_entries(chosen, self.form, residual=self.residual)
        wait(work)
        return EntriesMean(
            [(self.form.numel, messages, partial(self.form.unpack, known_finite=True))]
        )
