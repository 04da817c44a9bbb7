"""An asynchronous pipeline on one rank: passes of different minibatches alternate, without a flush.

    run = ContinuousRun(staged)                   # a `PipelineRun`, which has been applied
    run.attach([optimizer])
    for batch in loader:
        result = run.advance(batch, step)
        if result.completes:
            with run.update(result):
                optimizer.step()
                optimizer.zero_grad()
    for result in run.drain():                    # the minibatches in flight
        ...

[Note: an iteration] In iteration i the stage of this rank runs forward of minibatch i, then
backward of the minibatch that has come back, ``i - lag``. Its gradients are in ``.grad`` then, and
the caller updates with them, or adds those of the next ones first. Ranks wait only for the tensors
that they need: there is no collective call in an iteration but the average over data ranks.

    before     `_close_latest`                  the update before is over: its values go on
    rates      `StageWeights.begin`             the hyperparameters that the minibatch came in with
    receive    `StageInputs.receive`            activations of the stages before
    weights    `StageWeights.of_pass`           stale or predicted ones, during a pass
    forward    `StagePass.forward`              the blocks of this stage, in the user's own step
    send       `StageInputs.send`               activations to the stages behind
    backward   `MinibatchPasses.backward`       of ``i - lag``: receive, `StagePass.backward`, send
    average    `StageExchanges.average`         gradients, where the minibatch completes an update
    values     `ValueParcels.receive`           loss, norms and payload, from the next stage
    update     `update`, by the caller          with the minibatch's hyperparameters (`of_update`)

[Note: ahead of an iteration] Receives begin an iteration before the one that needs them. Over NCCL
all that waits for the whole device waits for what the rank has begun to receive and to send, and
user code may wait like that anywhere, on all ranks. So a stage may have begun only what others send
before they can wait for what it does next, and has to begin before that what they then wait for.
Activations begin at the end of an iteration, gradients at the start of the one after that in which
they are sent, and values before the backward pass of that. Where a hop takes two iterations, and
nothing travels but between neighbours, activations begin a forward pass earlier, if those of that
pass were begun ahead as well, and gradients with values. Where stages meet between iterations (each
batch is sent by the first rank, say), all that was sent before has begun by then, and nothing else.
In a run that is drained nothing has begun.

In the order of this module: the run, the passes of its stage, and parameters that stages share.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.execution.pipeline.p2p import (
    UNKNOWN,
    Payload,
    SideValues,
    StageInputs,
    StageLinks,
    StageTraffic,
    ValueParcels,
    spec_of,
)
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.pipeline.stage_layout import (
    StageFlow,
    StageLayout,
    Step,
    loss_of_step,
)
from lightning_topt.execution.pipeline.stage_weights import StageWeights, UpdatePattern
from lightning_topt.schedules.schedules import lag_of
from lightning_topt.weight_prediction.weights import unseen


@dataclass(eq=False)
class BackwardResult:
    """What an iteration has brought back to a stage.

    Gradients of `minibatch` have been added to ``.grad``; None while none has come back (warm-up).
    `completes`: the optimizer is to step now. `losses` are those that became known, by minibatch,
    and `payload` is what the last stage sent with the minibatch.
    """

    minibatch: int | None
    completes: bool
    values: SideValues | None
    is_open: bool = True  # its values have not been sent to the stage before
    is_updated: bool = False

    @property
    def losses(self) -> dict[int, Tensor]:
        """The losses by minibatch, without weights."""
        if self.minibatch is None or self.values is None:
            return {}
        return {self.minibatch: self.values.loss}

    @property
    def payload(self) -> Payload | None:
        """What travelled back with the minibatch."""
        return None if self.values is None else self.values.payload


class ContinuousRun:
    """The iterations of this rank's stage of `staged`, to which techniques have been applied.

    Optimizers must be attached before the first iteration: their hyperparameters are kept for each
    minibatch. Making the run is a collective call; an iteration is one of the ranks that run the
    same stage.
    """

    def __init__(self, staged: PipelineRun) -> None:
        lag_per_hop = staged.lag_per_hop
        assert lag_per_hop is not None
        # Links to the other stages, and what travels on them.
        named = dict(staged.module.named_parameters())
        links = StageLinks(staged.links)
        # See [Note: ahead of an iteration].
        self._lag_per_hop, self._sends_wait = lag_per_hop, staged.links.sends_wait
        is_chain = all(abs(one - other) == 1 for one, other in staged.links.pairs)
        self._begins_early = not self._sends_wait or (lag_per_hop > 1 and is_chain)
        self._shared = SharedParameters(named, staged.layout, links)
        self._staged, self._links, staged.is_drained = staged, links, lambda: self.is_drained
        self.stage, self.num_stages = links.stage, links.num_stages
        self._parameters = tuple(
            p for name, p in named.items() if name not in staged.non_local.names
        )
        # Iterations from a minibatch's forward to its backward on this stage.
        self.lag = lag_of(self.stage, num_ranks=self.num_stages, lag_per_hop=lag_per_hop)
        self.minibatches = 0  # that have come in
        self._returned = 0
        self._pattern = UpdatePattern(
            num_stages=self.num_stages, stage=self.stage, lag_per_hop=lag_per_hop
        )
        self._passes = MinibatchPasses(staged, links, self._shared, lag_per_hop=lag_per_hop)
        self._values = ValueParcels(links, self.num_stages, staged.device)
        self._weights = StageWeights([], None, self._pattern, parameters=self._parameters)
        self._latest: BackwardResult | None = None
        # Norms of the stages' gradients to their power, as far as this stage knows them.
        self._powers = torch.zeros(self.num_stages, dtype=torch.float64, device=staged.device)
        self.is_drained = True

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers: predict their weights by the plan's rule.

        Raises ValueError for an optimizer that the rule does not know.
        """
        rule = self._staged.plan.weight_prediction
        self._weights = StageWeights(optimizers, rule, self._pattern, parameters=self._parameters)

    @property
    def in_flight(self) -> int:
        """Minibatches that have come in and not come back to this stage.

        Always 0 on the last stage: see `is_drained`.
        """
        return self.minibatches - self._returned

    # ---- iterations ------------------------------------------------------------------------------

    def advance(
        self,
        batch: object,
        step: Step,
        *,
        weight: float = 1.0,
        completes: bool = True,
        accumulate: int = 1,
        remaining: int | None = None,
        last_completes: bool = True,
        payload: Callable[[], Payload] | None = None,
        meets: bool = False,
    ) -> BackwardResult:
        """Run forward of a new minibatch, and backward of the one that has come back.

        All ranks of a pipeline give the same arguments.

        Args:
            batch: the minibatch.
            step: ``step(module, batch)`` returns its loss.
            weight: what the loss is multiplied by for its gradients.
            completes: whether an update is to follow this minibatch; with accumulation the last of
                several.
            accumulate: minibatches for each of the updates to come, as far as that is known.
            remaining: minibatches after this one before the next drain, where that is known.
            last_completes: whether the last of these is to complete an update, however many that
                has.
            payload: called on the last stage after its forward pass; what it returns, bytes on the
                host and on the device, travels back to all others.
            meets: whether all stages make a collective call of their own between iterations, as
                where each batch is sent by the first rank. Everything that was sent has begun to be
                received by then. It takes effect in the first iteration of a drained run.

        Raises:
            PeerLostError: where another rank is gone; and what `step` raises.
        """
        with self._fails_for_good():
            self._close_latest()
            # What is known of the updates to come decides the weights of this pass.
            index = self.minibatches
            self._weights.begin(index, accumulate=accumulate, is_drained=self.is_drained)
            if self.is_drained:
                self._passes.inputs.is_ahead = not (meets and self._sends_wait)
            self.is_drained = False
            self._pattern.begin(index, completes=completes, accumulate=accumulate)
            self._pattern.expect(
                None if remaining is None else index + 1 + remaining, last_completes=last_completes
            )
            if not self._begins_early:
                self._begin_gradients(index - self.lag, since=1)
            self._passes.forward(
                index,
                batch,
                step,
                weights=self._weights,
                powers=self._powers,
                weight=weight,
                payload=payload,
                begins_early=self._begins_early,
            )
            self.minibatches += 1
            result = self._backward(index - self.lag)
            self._passes.begin_next(index + 1, self._powers)
            if not self._passes.inputs.is_ahead:
                self._begin_gradients(index - self.lag, since=0)
                self._begin_values(index - self.lag + self._lag_per_hop)
            return result

    def drain(self) -> Iterator[BackwardResult]:
        """Yield the results of the minibatches in flight.

        The run is drained once the last one's update is done and the loop ends.
        """
        with self._fails_for_good():
            self._close_latest()
            if not self.is_drained:
                self._passes.end_next(self.minibatches, self._powers)
        for minibatch in range(self._returned, self.minibatches):
            with self._fails_for_good():
                self._close_latest()
                self._pattern.expect(self.minibatches)
                result = self._backward(minibatch)
            yield result
        # Nothing is in flight: copies of shared parameters become equal, others are freed.
        with self._fails_for_good():
            self._close_latest()
            if not self.is_drained:
                self._passes.drop_next(self.minibatches)
            self._shared.agree(self.minibatches)
            self._links.finish()
            self._weights.drained()
            self._pattern.restart(self.minibatches)
            self.is_drained = True

    @contextmanager
    def update(self, result: BackwardResult) -> Generator[None]:
        """Run ``optimizer.step()`` within, with the hyperparameters of the result's minibatch.

        `result` is the latest one, and completes an update.
        """
        assert result is self._latest and result.minibatch is not None and result.completes, (
            "an update of the latest result that completes one"
        )
        with self._fails_for_good():
            result.is_updated = True
            with self._weights.of_update(result.minibatch):
                yield
            self._send_values(result)

    def clip_norm(
        self, result: BackwardResult, max_norm: float, *, parameters: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Scale this stage's gradients by the norm over all stages; return the norm before.

        Of stages behind, the norm is that of the result's minibatch. Of stages before, it is that
        of the latest minibatch that they had finished when they sent the newest activations. It is
        the same on all data ranks, which have equal gradients.
        """
        assert result is self._latest and result.values is not None and result.is_open, (
            "within the result's update, or before it"
        )
        # Squares add up: those of stages behind came with the minibatch, of stages before with
        # the latest activations.
        given = list(self._parameters if parameters is None else parameters)
        powers = result.values.powers.clamp(min=0.0)  # (stages,)
        powers[: self.stage] = self._powers[: self.stage]
        total, own = self._staged.norms.clip_with(given, max_norm, others=powers, own=self.stage)
        # This stage's power travels on, and all that are known now serve later minibatches.
        result.values.powers[self.stage] = own
        is_newer = result.values.powers.isfinite() & (result.values.powers >= 0)
        self._powers = torch.where(is_newer, result.values.powers, self._powers)
        return total

    # ---- what is held ----------------------------------------------------------------------------

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of copies of weights held now, and bytes under way between stages."""
        return self._weights.held_bytes, self._links.held_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return what a drained run has beside the states of module and optimizers.

        That of the first stage serves all.
        """
        assert self.is_drained, "drain the run first"
        return {"powers": self._powers.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave on the first stage."""
        assert self.is_drained, "drain the run first"
        self._powers = torch.tensor(
            state["powers"], dtype=torch.float64, device=self._staged.device
        )

    # ---- steps of an iteration -------------------------------------------------------------------

    def _backward(self, minibatch: int) -> BackwardResult:
        # Run backward of a minibatch, unless it is one before the first in flight
        # Begin to receive what this iteration and the next need of the stages behind, in the order
        # in which they send it.
        self._begin_gradients(minibatch)
        self._begin_values(minibatch)
        if self._sends_wait:
            self._begin_gradients(minibatch, since=1)
            self._begin_values(minibatch + self._lag_per_hop - 1)
        else:
            self._begin_gradients(minibatch + 1)
            self._begin_values(minibatch + 1)
        # Warm-up: nothing has come back.
        if minibatch < self._returned:
            self._latest = BackwardResult(None, False, None, is_open=False)
            return self._latest
        # Gradients of this stage, and of shared parameters before an update with them.
        values = self._passes.backward(minibatch, weights=self._weights)
        self._returned += 1
        completes = self._pattern.completes(minibatch)
        if completes:
            self._shared.send_gradients(minibatch)
            self._shared.add_gradients(minibatch)
            self._staged.exchanges.average(self.stage)
        # The last stage has the values of the minibatch, all others receive them. The stages
        # behind have used what this one sent of it then.
        if values is None:
            values = self._values.receive(minibatch)
            for behind in range(self.stage + 1, self.num_stages):
                self._links.free_sent(behind, before=minibatch + 1)
        self._latest = BackwardResult(minibatch, completes, values)
        if not completes:  # else they are sent after the update, with the norm of its gradients
            self._send_values(self._latest)
        return self._latest

    def _begin_gradients(self, minibatch: int, *, since: int | None = None) -> None:
        # Begin to receive the gradients of a minibatch in flight. With `since`, in the iteration of
        # its backward pass: all that stages behind have sent until so many iterations before. A
        # drain in the warm-up leaves iterations out, so that it may be of several minibatches.
        for behind in range(self.stage + 1, self.num_stages):
            last = minibatch
            if since is not None:
                last += self._lag_per_hop * (behind - self.stage) - since
            for each in range(minibatch, last + 1):
                if each in self._passes:
                    self._passes.begin_backward(each, behind)
                    if self._pattern.completes(each):
                        self._shared.begin_gradients(each, behind)

    def _begin_values(self, minibatch: int) -> None:
        # Begin to receive the values of a minibatch, if it is in flight
        if minibatch in self._passes:
            self._values.begin(minibatch)

    def _send_values(self, result: BackwardResult) -> None:
        # Send the values of a result to the stage before, once
        if result.is_open and result.minibatch is not None and result.values is not None:
            result.is_open = False
            self._values.send(result.minibatch, result.values)

    def _close_latest(self) -> None:
        # Forget the latest result; its values are sent if no update has sent them
        result, self._latest = self._latest, None
        if result is not None and result.minibatch is not None:
            self._send_values(result)
            # The caller left an update out: it changes nothing, but counts.
            if result.completes and not result.is_updated:
                with self._weights.of_update(result.minibatch):
                    pass
            if result.completes:
                self._pattern.updated(result.minibatch)
            self._weights.rates.forget(result.minibatch)

    @contextmanager
    def _fails_for_good(self) -> Generator[None]:
        # Drop all that is under way after an error, and refuse to go on
        self._staged.check_runs()
        try:
            yield
        except BaseException:
            self._staged.abort()
            self._links.forget()
            self._passes.forget()
            raise


# ---- passes --------------------------------------------------------------------------------------


class MinibatchPasses:
    """Forward and backward passes of one stage, with what they receive and send.

    `links` are those of the stage, and `shared` its parameters that other stages need as well.
    """

    def __init__(
        self, staged: PipelineRun, links: StageLinks, shared: SharedParameters, *, lag_per_hop: int
    ) -> None:
        self._staged, self._links, self._shared = staged, links, shared
        self.inputs = StageInputs(links)
        self._lags = [
            lag_of(stage, num_ranks=links.num_stages, lag_per_hop=lag_per_hop)
            for stage in range(links.num_stages)
        ]
        self._flying: dict[int, _Flying] = {}

    def __contains__(self, minibatch: int) -> bool:
        return minibatch in self._flying

    def forward(
        self,
        minibatch: int,
        batch: object,
        step: Step,
        *,
        weights: StageWeights,
        powers: Tensor,
        weight: float,
        payload: Callable[[], Payload] | None,
        begins_early: bool,
    ) -> None:
        """Run forward of ``step(module, batch)`` with the `weights` for it.

        `powers` of norms, (stages,), take over those of the stages before, and travel with what is
        sent. With `begins_early` receives of the next minibatch begin before it is computed. Other
        arguments are those of `ContinuousRun.advance`.
        """
        # What the step calls on this batch, and what this stage exchanges for it.
        (flow,) = self._staged.flows.of(step, [batch])
        self._staged.buffers.changed_by([flow])
        stage = self._links.stage
        flying = self._flying[minibatch] = _Flying(
            flow, StageTraffic.of_stage(stage, flow.crossings)
        )
        self.inputs.come_in(flow.crossings)
        # Receives begin in the order in which the stages before send.
        self._shared.begin_weights(minibatch)
        received = self.inputs.receive(minibatch, flying.traffic, powers)
        self._shared.receive_weights(minibatch)
        if begins_early and (self.inputs.has_begun or not self._staged.links.sends_wait):
            self.begin_next(minibatch + 1, powers)
        # Stages before have done the iteration before this one, in which they used gradients.
        for earlier in range(stage):
            self._links.free_sent(earlier, before=minibatch - self._lags[earlier])
        # Compute with the weights of the rule, which stages that share parameters get too.
        run = partial(step, self._staged.module, batch)
        with weights.of_pass("forward", minibatch), self._staged.around():
            # Before, so that the others get them early; but where sends wait, user code in the pass
            # may wait for what was sent.
            sends_wait = self._staged.links.sends_wait
            if not sends_wait:
                self._shared.send_weights(minibatch)
            output = flow.passes.forward(stage, minibatch, run, received)
            if sends_wait:
                self._shared.send_weights(minibatch)
        self.inputs.send(minibatch, flying.traffic, output.sent, powers)
        # The last stage keeps the loss for its backward, and begins what travels back.
        if stage == self._links.num_stages - 1:
            loss = loss_of_step(output.result)
            flying.loss = loss * weight
            unknown = torch.full_like(powers, UNKNOWN)
            flying.values = SideValues(
                loss.detach().reshape(()), unknown, None if payload is None else payload()
            )

    def begin_next(self, minibatch: int, powers: Tensor) -> None:
        """Begin to receive what the forward pass of `minibatch`, the next one, needs, once."""
        if self.inputs.is_next_known:
            self._shared.begin_weights(minibatch)
        self.inputs.begin_ahead(minibatch, powers)

    def end_next(self, minibatch: int, powers: Tensor) -> None:
        """Send what others have begun to receive for `minibatch`, before which the run is drained.

        Nobody reads it.
        """
        if self.inputs.is_next_known:
            self._shared.send_weights(minibatch)
        self.inputs.end_ahead(minibatch, powers)

    def drop_next(self, minibatch: int) -> None:
        """Receive what the others have sent by `end_next`."""
        if self.inputs.is_next_known:
            self._shared.drop_weights(minibatch)
        self.inputs.drop_ahead(minibatch)

    def begin_backward(self, minibatch: int, behind: int) -> None:
        """Begin to receive the gradients for a minibatch in flight, if that is not done yet.

        Those of a stage `behind`.
        """
        self.inputs.begin_gradients(minibatch, self._flying[minibatch].traffic, behind)

    def backward(self, minibatch: int, *, weights: StageWeights) -> SideValues | None:
        """Run backward of a minibatch in flight; return its values on the last stage."""
        flying = self._flying.pop(minibatch)
        # Wait, compute, and send without waiting.
        gradients = self.inputs.receive_gradients(minibatch, flying.traffic)
        with weights.of_pass("backward", minibatch):
            found = flying.flow.passes.backward(
                self._links.stage, minibatch, gradients, loss=flying.loss
            )
        self.inputs.send_gradients(minibatch, flying.traffic, found)
        return flying.values

    def forget(self) -> None:
        """Drop all minibatches in flight, after an error."""
        for flying in self._flying.values():
            flying.flow.passes.forget()
        self._flying.clear()


@dataclass(eq=False)
class _Flying:
    """A minibatch in flight: between its forward and its backward pass."""

    flow: StageFlow
    traffic: StageTraffic
    loss: Tensor | None = None  # of the last stage, as a graph, weighted
    values: SideValues | None = None


# ---- parameters that stages share ----------------------------------------------------------------


class SharedParameters:
    """Parameters that several stages need, such as tied embeddings: the first one updates them.

    [Note: shared parameters] Stages are at different minibatches, so their copies cannot step
    together. Gradients of a minibatch go to the first stage that needs the parameter. It has them
    all when it runs its own backward pass, and updates as ever. Its weights for the forward pass of
    a minibatch, predicted ones too, go to the others, who use them for theirs. So all stages run
    forward of a minibatch with equal weights, and a gradient is applied no later than that of the
    first stage's other parameters.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], layout: StageLayout, links: StageLinks
    ) -> None:
        self._links = links
        self._lent: dict[int, list[nn.Parameter]] = {}  # that this stage updates, by other stage
        self._followed: dict[int, list[nn.Parameter]] = {}  # by the stage that updates them
        # In an order that is the same on all stages.
        for name, parameter in sorted(named.items()):
            first, *others = layout.holders(name) or (links.stage,)
            for other in others if first == links.stage else ():
                self._lent.setdefault(other, []).append(parameter)
            if links.stage in others:
                self._followed.setdefault(first, []).append(parameter)
        self._begun: set[int] = set()  # minibatches whose weights are being received
        self._begun_gradients: set[tuple[int, int]] = set()  # minibatch and stage

    # ---- weights, from the first stage to the others ---------------------------------------------

    def send_weights(self, minibatch: int) -> None:
        """Send the weights of a minibatch's forward pass, or the true ones of a drained run."""
        for other, parameters in sorted(self._lent.items()):
            self._links.send(
                "shared weights", other, minibatch, [p.detach().clone() for p in parameters]
            )

    @torch.no_grad()
    def receive_weights(self, minibatch: int) -> None:
        """Write what the first stages have sent."""
        self.begin_weights(minibatch)
        for first, parameters in sorted(self._followed.items()):
            given = self._links.receive("shared weights", first, minibatch)
            with unseen(parameters):
                torch._foreach_copy_([p.detach() for p in parameters], given)
        self._begun.discard(minibatch)

    def drop_weights(self, minibatch: int) -> None:
        """Leave out what the first stages have sent."""
        for first in sorted(self._followed):
            self._links.receive("shared weights", first, minibatch)
        self._begun.discard(minibatch)

    def begin_weights(self, minibatch: int) -> None:
        """Begin to receive the weights of a forward pass, if that is not done yet."""
        if minibatch not in self._begun:
            self._begun.add(minibatch)
            for first, parameters in sorted(self._followed.items()):
                self._links.begin(
                    "shared weights", first, minibatch, [spec_of(p) for p in parameters]
                )

    # ---- gradients, from the others to the first -------------------------------------------------

    def send_gradients(self, minibatch: int) -> None:
        """Send this stage's part of an update's gradients to the stages that do it; keep none."""
        for first, parameters in sorted(self._followed.items()):
            # zeros in the place of those that are missing
            parts = [torch.zeros_like(p) if p.grad is None else _dense(p.grad) for p in parameters]
            self._links.send(
                "shared gradients",
                first,
                minibatch,
                [part.detach() for part in parts],
                [*map(spec_of, parameters)],
            )
            for parameter in parameters:
                parameter.grad = None

    def begin_gradients(self, minibatch: int, other: int) -> None:
        """Begin to receive the part of the stage `other`, if that is not done yet."""
        if other in self._lent and (minibatch, other) not in self._begun_gradients:
            self._begun_gradients.add((minibatch, other))
            specs = [*map(spec_of, self._lent[other])]
            self._links.begin("shared gradients", other, minibatch, specs)

    @torch.no_grad()
    def add_gradients(self, minibatch: int) -> None:
        """Add the others' parts to the gradients here."""
        for other, parameters in sorted(self._lent.items()):
            self._begun_gradients.remove((minibatch, other))
            parts = self._links.receive("shared gradients", other, minibatch)
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.requires_grad:
                    parameter.grad = (
                        part if parameter.grad is None else _dense(parameter.grad).add_(part)
                    )

    def agree(self, minibatch: int) -> None:
        """Make all copies equal, once the last update is done; `minibatch` is the next one."""
        self.send_weights(minibatch)
        self.receive_weights(minibatch)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
