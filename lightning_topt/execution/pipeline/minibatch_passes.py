"""`MinibatchPasses`: forward and backward passes of one stage in a run that never flushes, with
what they receive and send.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.pipeline.shared_parameters import SharedParameters
from lightning_topt.execution.pipeline.side_values import UNKNOWN, SideValues
from lightning_topt.execution.pipeline.stage_inputs import StageInputs
from lightning_topt.execution.pipeline.stage_links import StageLinks
from lightning_topt.execution.pipeline.stage_traffic import StageTraffic
from lightning_topt.execution.pipeline.stage_weights import StageWeights
from lightning_topt.execution.pipeline.step_flows import StageFlow, Step
from lightning_topt.execution.pipeline.step_losses import loss_of_step
from lightning_topt.schedules.schedules import lag_of


@dataclass(eq=False)
class _Flying:
    """A minibatch between its forward and its backward pass."""

    flow: StageFlow
    traffic: StageTraffic
    loss: Tensor | None = None  # of the last stage, as a graph, weighted
    values: SideValues | None = None


class MinibatchPasses:
    """A `MinibatchPasses` runs the stage of `links` of `staged`; `shared` are its parameters that
    other stages need as well.

    A minibatch is in flight from its forward to its backward pass.
    """

    def __init__(
        self, staged: PipelineRun, links: StageLinks, shared: SharedParameters, *, lag_per_hop: int
    ) -> None:
        self._staged, self._links, self._shared, self._lag_per_hop = (
            staged,
            links,
            shared,
            lag_per_hop,
        )
        self._inputs = StageInputs(links)
        self._flying: dict[int, _Flying] = {}

    def __contains__(self, minibatch: int) -> bool:
        return minibatch in self._flying

    def forward(
        self,
        minibatch: int,
        batch: Any,
        step: Step,
        *,
        weights: StageWeights,
        powers: Tensor,
        weight: float,
        payload: Callable[[], bytes] | None,
        kind: Hashable,
    ) -> None:
        """Run forward of ``step(module, batch)`` with the `weights` for it; `powers` of norms
        travel with what it sends.

        Those of the stages before are taken over into `powers`. Other arguments are those of
        `ContinuousRun.advance`.
        """
        (flow,) = self._staged.flows.of(step, [batch], kind=kind)
        self._staged.buffers.changed_by([flow])
        stage = self._links.stage
        flying = self._flying[minibatch] = _Flying(
            flow, StageTraffic.of_stage(stage, flow.crossings)
        )
        received = self._inputs.receive(minibatch, flying.traffic, powers)
        self._shared.receive_weights(minibatch)
        self._let_go_of_gradients(minibatch)
        run = partial(step, self._staged.module, batch)
        with weights.of_pass("forward", minibatch), self._staged.around():
            self._shared.send_weights(minibatch)
            output = flow.passes.forward(stage, minibatch, run, received)
        self._inputs.send(minibatch, flying.traffic, output.sent, powers)
        if stage == self._links.num_stages - 1:
            loss = loss_of_step(output.result)
            flying.loss = loss * weight
            unknown = torch.full_like(powers, UNKNOWN)
            flying.values = SideValues(
                loss.detach().reshape(()), unknown, None if payload is None else payload()
            )

    def begin_backward(self, minibatch: int) -> None:
        """Begin to receive the gradients that the backward pass of a minibatch in flight needs,
        unless that has been done.
        """
        self._inputs.begin_gradients(minibatch, self._flying[minibatch].traffic)

    def backward(self, minibatch: int, *, weights: StageWeights) -> SideValues | None:
        """Run backward of a minibatch in flight, which it is no longer then; returns its values on
        the last stage.
        """
        flying = self._flying.pop(minibatch)
        gradients = self._inputs.receive_gradients(minibatch, flying.traffic)
        with weights.of_pass("backward", minibatch):
            found = flying.flow.passes.backward(
                self._links.stage, minibatch, gradients, loss=flying.loss
            )
        self._inputs.send_gradients(minibatch, flying.traffic, found)
        return flying.values

    def forget(self) -> None:
        """Drop all minibatches in flight, after an error."""
        for flying in self._flying.values():
            flying.flow.passes.forget()
        self._flying.clear()

    def _let_go_of_gradients(self, minibatch: int) -> None:
        """Stages before have done the turn before this one, in which they used gradients."""
        for earlier in range(self._links.stage):
            lag = lag_of(earlier, num_ranks=self._links.num_stages, lag_per_hop=self._lag_per_hop)
            for channel in ("gradients", "values", "shared gradients"):
                self._links.let_go(channel, earlier, before=minibatch - lag)
