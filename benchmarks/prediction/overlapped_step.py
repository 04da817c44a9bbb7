"""A step whose gathers and scatters along tensor axes run beside products: no plan runs so.

    P, C -> max(P, C) + min(P, C) / n

Products that take P, and the gathers and scatters beside them that take C, in n parts: Wang et al.,
Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023; Megatron-LM's
tp-comm-overlap, torch's asynchronous tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_topt.costs.compute import estimate_kernels_seconds
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.op_graph import Kernel


@dataclass(frozen=True)
class OverlappedStep(TrainingStep):
    """A training step; with `tensor_overlap` these exchanges run beside their products."""

    tensor_overlap: bool = False

    def _pass_seconds(
        self, kernels: Sequence[Kernel], *, launches: float = 1.0, more_launches: float = 0.0
    ) -> float:
        seconds = super()._pass_seconds(kernels, launches=launches, more_launches=more_launches)
        if not self.tensor_overlap:
            return seconds
        beside, parts = 0.0, 1  # seconds of exchanges, and in how many parts
        for kernel in kernels:
            if (shown := self.shown(kernel)) is not None:
                op, size, axis = shown
                if op in ("all_gather", "reduce_scatter"):
                    each = self.collective_seconds(op, size, axes=[axis])
                    beside, parts = beside + each * kernel.count, self.mesh.shape[axis]
        if not beside:
            return seconds
        products = self._product_seconds(kernels)
        # only the first exchange waits for nothing, or the last product
        together = max(products, beside) + min(products, beside) / parts
        return seconds - (products + beside - together)

    def _product_seconds(self, kernels: Sequence[Kernel]) -> float:
        # Of matrix products, without attention
        return estimate_kernels_seconds(
            (
                kernel
                for kernel in kernels
                if self.shown(kernel) is None
                and kernel.flops.at(self.batch_size) > 0
                and "_scaled_dot_product_" not in kernel.name
            ),
            batch_size=self.batch_size,
            device=self.cluster.device,
            measured=self.kernel_seconds,
            measured_batch_size=self.graph.batch_size,
        )
