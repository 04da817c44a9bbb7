"""The actions of one rank of a pipeline, one after the other, with the messages around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_topt.execution.pipeline.messages import Around, Message
from lightning_topt.execution.pipeline.stage_pass import StagePass
from lightning_topt.execution.pipeline.stage_peers import Peers
from lightning_topt.graph.step_flow import TensorRef


def run_actions(
    program: Sequence[Around],
    passes: Sequence[StagePass],
    peers: Peers,
    runs: Sequence[Callable[[], Any]],
    *,
    last_stage: int,
    loss_of: Callable[[int, Any], Tensor] | None = None,
    ended: Callable[[int], None] = lambda stage: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[int, Any]:
    """Run the passes of `program`; returns the results of `last_stage` by microbatch, without
    graphs, if it is this rank's.

    ``passes[m]`` are those of this rank's stages on microbatch m, and ``runs[m]`` runs the user's
    step on it. ``loss_of(m, result)`` is the loss that is differentiated, as a graph. `ended` is
    called with a stage whose parameters have all their gradients; `around` makes the context of
    forward passes.
    """
    results: dict[int, Any] = {}
    losses: dict[int, Tensor] = {}
    for step in program:
        action = step.action
        stage, microbatch = action.stage_index, action.microbatch_index
        if step.begins:
            peers.begin(step.begins)
        if action.kind == "forward":
            received = {message.ref: peers.receive(message) for message in step.needs}
            with around():
                output = passes[microbatch].forward(stage, microbatch, runs[microbatch], received)
            for message in step.sends:
                peers.send(message, output.sent[message.ref])
            if stage == last_stage:
                results[microbatch] = tree_map_only(Tensor, Tensor.detach, output.result)
                if loss_of is not None:
                    losses[microbatch] = loss_of(microbatch, output.result)
            del received, output
        elif action.kind == "backward_weight":
            passes[microbatch].backward_weight(stage, microbatch)
        else:
            of_microbatch = passes[microbatch]
            run = (
                of_microbatch.backward
                if action.kind == "backward"
                else of_microbatch.backward_input
            )
            loss = losses.pop(microbatch) if stage == last_stage else None
            gradients = run(stage, microbatch, _summed(step.needs, peers), loss=loss)
            for message in step.sends:
                peers.send(message, gradients[message.ref])
            del gradients, loss
        for ended_stage in step.ends:
            ended(ended_stage)
    peers.finish()
    return results


def _summed(needs: Sequence[Message], peers: Peers) -> dict[TensorRef, Tensor]:
    """The gradients of what a stage has sent, summed over the stages that it was sent to."""
    found: dict[TensorRef, Tensor] = {}
    for message in needs:
        gradient = peers.receive(message)
        found[message.ref] = found[message.ref] + gradient if message.ref in found else gradient
    return found
