"""`ContinuousRun`: a pipeline that never waits, on one rank. Forward and backward passes of
different minibatches take turns.

[Note: a turn] In iteration i the stage k of this rank runs forward of minibatch i, then backward of
the minibatch that has come back, ``i - lag``; its gradients are in ``.grad`` then, and the caller
updates with them, or adds those of the next ones first. Ranks wait for the tensors that they need
alone: there is no collective call in a turn but the average over data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.execution.pipeline.minibatch_passes import MinibatchPasses
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.pipeline.shared_parameters import SharedParameters
from lightning_topt.execution.pipeline.side_values import SideValues, ValueParcels
from lightning_topt.execution.pipeline.stage_links import StageLinks
from lightning_topt.execution.pipeline.stage_weights import StageWeights
from lightning_topt.execution.pipeline.step_flows import Step
from lightning_topt.execution.pipeline.turn import Turn
from lightning_topt.execution.pipeline.update_pattern import UpdatePattern
from lightning_topt.schedules.schedules import lag_of

__all__ = ["ContinuousRun", "Turn"]


class ContinuousRun:
    """The turns of this rank's stage of `staged`, which has been applied. Making it is a collective
    call; a turn is one of the ranks that run the same stage.

    `optimizers` have to be attached before the first turn: their hyperparameters are kept for each
    minibatch.
    """

    def __init__(self, staged: PipelineRun) -> None:
        lag_per_hop, mesh = staged.lag_per_hop, staged.plan.mesh
        assert lag_per_hop is not None
        pipelines, named = (
            mesh.groups_along(mesh.pipeline_axes),
            dict(staged.module.named_parameters()),
        )
        are_shared = any(len(staged.layout.holders(name)) > 1 for name in named)
        links = StageLinks.of_pipelines(
            pipelines, rank=dist.get_rank(), device=staged.device, are_shared=are_shared
        )
        self._shared = SharedParameters(named, staged.layout, links)
        self._staged, self._links, staged.is_drained = staged, links, lambda: self.is_drained
        self.stage, self.num_stages = links.stage, links.num_stages
        self._parameters = tuple(p for name, p in named.items() if name not in staged.foreign.names)
        self.lag = lag_of(self.stage, num_ranks=self.num_stages, lag_per_hop=lag_per_hop)
        self.minibatches = 0  # that have come in
        self._returned = 0
        self._pattern = UpdatePattern(
            num_stages=self.num_stages, stage=self.stage, lag_per_hop=lag_per_hop
        )
        self._passes = MinibatchPasses(staged, links, self._shared, lag_per_hop=lag_per_hop)
        self._values = ValueParcels(links, self.num_stages, staged.device)
        self._weights = StageWeights([], None, self._pattern, parameters=self._parameters)
        self._turn: Turn | None = None
        self._powers = torch.zeros(self.num_stages, dtype=torch.float64, device=staged.device)
        self._failed, self.is_drained = False, True

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep the hyperparameters of these optimizers for each minibatch, and predict their
        weights as the plan says.

        Raises ValueError for an optimizer that the plan's rule does not know.
        """
        rule = self._staged.plan.weight_prediction
        self._weights = StageWeights(optimizers, rule, self._pattern, parameters=self._parameters)

    @property
    def in_flight(self) -> int:
        """Minibatches that have come in and not come back to this stage. None are in the last one,
        but see `is_drained`.
        """
        return self.minibatches - self._returned

    # ---- turns -----------------------------------------------------------------------------------

    def advance(
        self,
        batch: Any,
        step: Step,
        *,
        weight: float = 1.0,
        completes: bool = True,
        accumulate: int = 1,
        remaining: int | None = None,
        last_completes: bool = True,
        payload: Callable[[], bytes] | None = None,
        kind: Hashable = None,
    ) -> Turn:
        """Run forward of ``step(module, batch)``, which returns its loss, and backward of the
        minibatch that has come back.

        Args:
            weight: what the loss is multiplied by for its gradients.
            completes: whether an update is to follow this minibatch; with accumulation the last of
                several.
            accumulate: minibatches for each of the updates to come, as far as that is known.
            remaining: minibatches after this one before the next drain, where that is known.
            last_completes: whether the last of these is to complete an update, however many that
                has.
            payload: called on the last stage after its forward pass; what it returns travels back
                to all others.
            kind: tells steps with the same code apart (see `StepFlows.of`).

        All ranks of a pipeline give the same. Raises PeerLostError where another rank is gone, and
        what `step` raises.
        """
        with self._whole_or_failed():
            self._close_turn()
            index = self.minibatches
            self._weights.begin(index, accumulate=accumulate, is_drained=self.is_drained)
            self.is_drained = False
            self._pattern.begin(index, completes=completes, accumulate=accumulate)
            self._pattern.expect(
                None if remaining is None else index + 1 + remaining, last_completes=last_completes
            )
            weights, powers = self._weights, self._powers
            self._passes.forward(
                index,
                batch,
                step,
                weights=weights,
                powers=powers,
                weight=weight,
                payload=payload,
                kind=kind,
            )
            self.minibatches += 1
            return self._back(index - self.lag)

    def drain(self) -> Iterator[Turn]:
        """Yield the turns of the minibatches in flight; nothing is, once the last one's update is
        done and the loop ends.
        """
        for minibatch in range(self._returned, self.minibatches):
            with self._whole_or_failed():
                self._close_turn()
                self._pattern.expect(self.minibatches)
                turn = self._back(minibatch)
            yield turn
        with self._whole_or_failed():
            self._close_turn()
            self._shared.agree(self.minibatches)
            self._links.finish()
            self._weights.drained()
            self._pattern.restart(self.minibatches)
            self.is_drained = True

    @contextmanager
    def update(self, turn: Turn) -> Generator[None, None, None]:
        """Run ``optimizer.step()`` of a turn that completes an update within: with the minibatch's
        hyperparameters.
        """
        assert turn is self._turn and turn.minibatch is not None and turn.completes, (
            "an update of the latest turn that completes one"
        )
        with self._whole_or_failed():
            turn.is_updated = True
            with self._weights.of_update(turn.minibatch):
                yield
            self._send_values(turn)

    def clip_norm(
        self,
        turn: Turn,
        max_norm: float,
        *,
        parameters: Sequence[Tensor] | None = None,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Scale this stage's gradients by the norm over all stages, and return that norm before.

        Of stages behind it is that of the turn's minibatch, of stages before that of the latest
        minibatch that they had finished when they sent the newest activations. The same on all data
        ranks, which have equal gradients.
        """
        assert turn is self._turn and turn.values is not None and turn.is_open, (
            "within the turn's update, or before it"
        )
        given = list(self._parameters if parameters is None else parameters)
        powers = turn.values.powers.clamp(min=0.0)
        powers[: self.stage] = self._powers[: self.stage]
        total, own = self._staged.norms.clip_with(
            given, max_norm, others=powers, own=self.stage, norm_type=norm_type
        )
        turn.values.powers[self.stage] = own
        is_newer = turn.values.powers.isfinite() & (turn.values.powers >= 0)
        self._powers = torch.where(is_newer, turn.values.powers, self._powers)
        return total

    # ---- what is held ----------------------------------------------------------------------------

    @property
    def num_versions(self) -> int:
        """The most copies of the stage's weights beside the storages at once, as the rule's formula
        says.
        """
        return self._weights.num_versions

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of copies of weights that are held now, and bytes of tensors under way between
        stages.
        """
        return self._weights.held_bytes, self._links.held_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return what a drained state needs beside those of module and optimizers; that of the
        first stage serves all.
        """
        assert self.is_drained, "drain the run first"
        return {"rules": self._weights.state(), "powers": self._powers.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on the first stage."""
        assert self.is_drained, "drain the run first"
        self._weights.load_state(state["rules"])
        self._powers = torch.tensor(
            state["powers"], dtype=torch.float64, device=self._staged.device
        )

    # ---- passes ----------------------------------------------------------------------------------

    def _back(self, minibatch: int) -> Turn:
        """Run backward of a minibatch, unless it is one before the first in flight."""
        self._begin_ahead(minibatch)
        if minibatch < self._returned:
            self._turn = Turn(None, False, None, is_open=False)
            return self._turn
        own = self._passes.backward(minibatch, weights=self._weights)
        self._returned += 1
        completes = self._pattern.completes(minibatch)
        if completes:
            self._shared.send_gradients(minibatch)
            self._shared.add_gradients(minibatch)
            self._staged.exchanges.average(self.stage)
        values = own or self._receive_values(minibatch)
        self._turn = Turn(minibatch, completes, values)
        if not completes:
            self._send_values(self._turn)
        return self._turn

    def _begin_ahead(self, minibatch: int) -> None:
        """Begin to receive what this turn and the next need of the stages behind."""
        for later in (minibatch, minibatch + 1):
            if later in self._passes:
                self._passes.begin_backward(later)
                if self._pattern.completes(later):
                    self._shared.begin_gradients(later)
        if self._links.begins_ahead and minibatch >= self._returned:
            self._values.begin(minibatch)

    def _receive_values(self, minibatch: int) -> SideValues:
        values = self._values.receive(minibatch)
        # they have used what this stage sent of it
        for later in range(self.stage + 1, self.num_stages):
            for channel in ("activations", "shared weights"):
                self._links.let_go(channel, later, before=minibatch + 1)
        return values

    def _send_values(self, turn: Turn) -> None:
        if turn.is_open and turn.minibatch is not None and turn.values is not None:
            turn.is_open = False
            self._values.send(turn.minibatch, turn.values)

    def _close_turn(self) -> None:
        """Forget the last turn; its values go on if no update has sent them."""
        turn, self._turn = self._turn, None
        if turn is not None and turn.minibatch is not None:
            self._send_values(turn)
            # left out: an update that changes nothing, but counts
            if turn.completes and not turn.is_updated:
                with self._weights.of_update(turn.minibatch):
                    pass
            if turn.completes:
                self._pattern.updated(turn.minibatch)
            self._weights.rates.forget(turn.minibatch)

    @contextmanager
    def _whole_or_failed(self) -> Generator[None, None, None]:
        if self._failed:
            raise RuntimeError(
                "a step of this pipeline has failed, and its ranks are out of step: start the run "
                "again"
            )
        try:
            yield
        except BaseException:
            self._failed = True
            self._links.forget()
            self._passes.forget()
            raise
