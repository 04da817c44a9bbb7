"""Parameters that several stages of a run that never flushes need, such as tied embeddings: the
first of them updates them.

[Note: shared parameters] Stages are at different minibatches, so their copies cannot step together.
Gradients of a minibatch go to the first stage that needs the parameter, which has them all when it
runs its own backward pass, and updates as ever. Its weights for the forward pass of a minibatch,
predicted ones too, go to the others, who use them for theirs. So all stages run forward of a
minibatch with equal weights, and the gradient is applied no later than that of the first stage's
other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.execution.pipeline.stage_links import StageLinks
from lightning_topt.execution.pipeline.weight_changes import unnoticed
from lightning_topt.graph.step_flow import LeafSpec


class SharedParameters:
    """Those of `named` that the stage of `links` shares with others, as `layout` says."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], layout: StageLayout, links: StageLinks
    ) -> None:
        self._links = links
        self._lent: dict[int, list[nn.Parameter]] = {}  # that this stage updates, by other stage
        self._followed: dict[int, list[nn.Parameter]] = {}  # by the stage that updates them
        for name, parameter in sorted(named.items()):
            first, *others = layout.holders(name) or (links.stage,)
            for other in others if first == links.stage else ():
                self._lent.setdefault(other, []).append(parameter)
            if links.stage in others:
                self._followed.setdefault(first, []).append(parameter)
        self._begun: set[tuple[str, int]] = set()

    # ---- weights, from the first stage to the others ---------------------------------------------

    def send_weights(self, minibatch: int) -> None:
        """Send the weights that the forward pass of a minibatch computes with, or the true ones of
        a drained state.
        """
        for other, parameters in sorted(self._lent.items()):
            self._links.send(
                "shared weights", other, minibatch, [p.detach().clone() for p in parameters]
            )

    @torch.no_grad()
    def receive_weights(self, minibatch: int, *, more_follow: bool = True) -> None:
        """Take over what the first stages have sent, and begin to receive those of the next
        minibatch if more follow.
        """
        self._begin_weights(minibatch)
        for first, parameters in sorted(self._followed.items()):
            given = self._links.receive("shared weights", first, minibatch)
            with unnoticed(parameters):
                torch._foreach_copy_([p.detach() for p in parameters], given)
        self._begun.discard(("weights", minibatch))
        if more_follow and self._links.begins_ahead:
            self._begin_weights(minibatch + 1)

    def _begin_weights(self, minibatch: int) -> None:
        if ("weights", minibatch) not in self._begun:
            self._begun.add(("weights", minibatch))
            for first, parameters in sorted(self._followed.items()):
                self._links.begin(
                    "shared weights", first, minibatch, [_spec(p) for p in parameters]
                )

    # ---- gradients, from the others to the first -------------------------------------------------

    def send_gradients(self, minibatch: int) -> None:
        """Send this stage's part of the gradients of an update to the stages that do it, and keep
        none.
        """
        for first, parameters in sorted(self._followed.items()):
            there = torch.tensor(
                [float(p.grad is not None) for p in parameters], device=parameters[0].device
            )
            parts = [torch.zeros_like(p) if p.grad is None else _dense(p.grad) for p in parameters]
            specs = [_spec(there), *map(_spec, parameters)]
            self._links.send(
                "shared gradients", first, minibatch, [there, *(p.detach() for p in parts)], specs
            )
            for parameter in parameters:
                parameter.grad = None

    def begin_gradients(self, minibatch: int) -> None:
        """Begin to receive the others' parts, unless that has been done."""
        if ("gradients", minibatch) not in self._begun:
            self._begun.add(("gradients", minibatch))
            for other, parameters in sorted(self._lent.items()):
                there = LeafSpec((len(parameters),), (1,), torch.float32, requires_grad=False)
                specs = [there, *map(_spec, parameters)]
                self._links.begin("shared gradients", other, minibatch, specs)

    @torch.no_grad()
    def add_gradients(self, minibatch: int) -> None:
        """Add the others' parts to the gradients here."""
        self.begin_gradients(minibatch)
        self._begun.discard(("gradients", minibatch))
        for other, parameters in sorted(self._lent.items()):
            there, *parts = self._links.receive("shared gradients", other, minibatch)
            for parameter, part, is_there in zip(parameters, parts, there.tolist(), strict=True):
                if is_there:
                    parameter.grad = (
                        part if parameter.grad is None else _dense(parameter.grad).add_(part)
                    )

    # ---- drained states --------------------------------------------------------------------------

    def agree(self, minibatch: int) -> None:
        """Let all copies be equal, once the last update is done; `minibatch` is the next one."""
        self.send_weights(minibatch)
        self.receive_weights(minibatch, more_follow=False)


def _spec(tensor: Tensor) -> LeafSpec:
    return LeafSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, requires_grad=False)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
