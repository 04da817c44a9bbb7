"""What a rank does in a step of a pipeline with flush: its actions, and the messages around them.

    program = programs.program(schedule, flows, rank=0, sends_wait=False)
    for step in program:          # `run_actions` walks it, with a `MessageExchange`
        step.begins               # receives to begin before the action
        step.needs                # what the action waits for
        step.sends                # what it makes

A program follows from the schedule and from the tensors that cross between stages; all ranks
compute the same. From one rank to another messages travel in the order in which the sender makes
them, and receives are begun in that order: no message needs a header or a tag.

[Note: a queue for each pair] A pipeline that runs without such queues runs with them. A send waits
in its queue only for messages that were made before it. Their receives begin no later than its own,
and a rank waits for nothing but what it needs. Where more than two ranks share a queue, they may
wait for one another in a circle: so `RankLinks` has one for each sender and receiver.

[Note: one order of passes] Over NCCL, code that waits for the whole device waits for all that the
rank has begun to receive and to send. User code may wait like that anywhere, on all ranks. So all
ranks agree on one order of the passes of all of them, in which these can run one after the other. A
rank begins a receive before the first of its passes that comes, in this order, after the pass which
makes the message. Then no ranks wait in a circle. Proof: suppose that some passes do not end, or
that a wait for the device after them does not. Take the first of these in the order. What its rank
has begun to receive is made by earlier passes, which end. What it has sent begins to be received
after earlier passes of the other rank, which end too. So it ends.

In the order of this module: programs, messages, losses.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_topt.communication.rank_watch import lost_peers
from lightning_topt.execution.pipeline.p2p import PendingTransfer, RankLinks, laid_out
from lightning_topt.execution.pipeline.stage_layout import Crossings, PipelineGroups, StageFlow
from lightning_topt.execution.pipeline.stage_pass import StagePass
from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.check import Edges, run_order
from lightning_topt.schedules.schedules import (
    Action,
    Kind,
    Schedule,
    forward_schedule,
    make_schedule,
)

_KEPT = 64  # sequences of flows whose programs are known; others are made again
# Receives are begun so many actions before they are needed: in 1F1B those of the next backward
# and of the next forward. Not where sends wait: see [Note: one order of passes].
LOOKAHEAD = 2
# By which passes are put in one order: as many forward passes a pass takes, and a message.
_SECONDS: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "update": 0.0}
_MESSAGE_SECONDS = 0.1


class StepPrograms:
    """Schedules of a plan's steps by number of microbatches, and the programs of ranks.

    Methods are no collective calls.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._programs: dict[Hashable, tuple[ProgramStep, ...]] = {}

    def schedule(self, num_microbatches: int, *, backward: bool) -> Schedule:
        """Return the schedule of a step, or without `backward` of an evaluation.

        Raises ValueError for one that does not exist or take these sizes.
        """
        if num_microbatches < 1:
            raise ValueError("a step has at least one microbatch")
        key = backward, num_microbatches
        if key not in self._schedules:
            if backward:
                assert self._plan.schedule is not None
                self._schedules[key] = make_schedule(
                    self._plan.schedule,
                    num_ranks=self._plan.mesh.pipeline_size,
                    num_microbatches=num_microbatches,
                    stages_per_rank=self._plan.stages_per_rank,
                )
            else:  # stages are on the ranks that train them
                ranks = self.schedule(self._plan.num_microbatches, backward=True).rank_of_stage
                self._schedules[key] = forward_schedule(ranks)
        return self._schedules[key]

    def program(
        self, schedule: Schedule, flows: Sequence[StageFlow], *, rank: int, sends_wait: bool
    ) -> tuple[ProgramStep, ...]:
        """Return the program of `rank` of the pipeline; `flows` are those of the microbatches."""
        # Flows are compared by identity: those that are kept serve many steps.
        key = (schedule.name, tuple(flows))
        if (known := self._programs.get(key)) is None:
            crossings = [flow.crossings for flow in flows]
            messages = all_messages(schedule, crossings)
            known = program_of(schedule, messages, rank=rank, sends_wait=sends_wait)
            if all(flow.is_kept for flow in flows):
                if len(self._programs) >= _KEPT:
                    del self._programs[next(iter(self._programs))]
                self._programs[key] = known
        return known


def run_actions(
    program: Sequence[ProgramStep],
    passes: Sequence[StagePass],
    peers: MessageExchange,
    runs: Sequence[Callable[[], Any]],
    *,
    last_stage: int,
    loss_of: Callable[[int, Any], Tensor] | None = None,
    ended: Callable[[int], None] = lambda stage: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[int, Any]:
    """Run the actions of one rank, one after the other, with the messages around them.

    Args:
        program: of this rank.
        passes: ``passes[m]`` are those of this rank's stages on microbatch m.
        peers: the other ranks of the pipeline.
        runs: ``runs[m]`` runs the user's step on microbatch m.
        last_stage: the one that returns the step's results.
        loss_of: ``loss_of(m, result)`` is the loss that is differentiated, with its graph.
        ended: is called with a stage whose parameters have all their gradients.
        around: makes the context of forward passes.

    Returns:
        The results of `last_stage` by microbatch, without graphs, if it is this rank's.
    """
    results: dict[int, Any] = {}
    losses: dict[int, Tensor] = {}  # of the last stage, from a forward to its backward
    for step in program:
        action = step.action
        stage, microbatch = action.stage_index, action.microbatch_index
        # Receives of the next actions, so that they overlap with this one.
        if step.begins:
            peers.begin(step.begins)
        if action.kind == "forward":
            received = {message.ref: peers.receive(message) for message in step.needs}
            # Compute, and send without waiting.
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
            # Backward of all, or of inputs alone with that of parameters to follow.
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
        # Gradients of a stage are complete: their average over data ranks may begin.
        for ended_stage in step.ends:
            ended(ended_stage)
    # Sends may still be on their way when the last action is done.
    peers.finish()
    return results


def _summed(needs: Sequence[Message], peers: MessageExchange) -> dict[TensorRef, Tensor]:
    # The gradients of what a stage has sent, summed over its receivers
    found: dict[TensorRef, Tensor] = {}
    for message in needs:  # one activation may have gone to several stages
        gradient = peers.receive(message)
        found[message.ref] = found[message.ref] + gradient if message.ref in found else gradient
    return found


# ---- messages ------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A tensor of a microbatch on its way from stage `source` to stage `target`.

    `is_gradient`: it is the gradient of the activation `ref`, on its way back. `sender` and
    `receiver` are ranks of the pipeline. The sender's action with the index `made` makes it, and
    the receiver's with the index `used` needs it. The first `after` actions of the receiver come
    before it is made, in the order of all.
    """

    source: int
    target: int
    microbatch: int
    ref: TensorRef
    spec: LeafSpec
    is_gradient: bool
    sender: int
    receiver: int
    made: int
    used: int
    after: int = 0

    def __str__(self) -> str:
        what = "gradients" if self.is_gradient else "activations"
        return (
            f"{what} of microbatch {self.microbatch} from stage {self.source} for stage "
            f"{self.target}"
        )


@dataclass(frozen=True)
class ProgramStep:
    """One action of a rank, and the messages around it.

    `begins` are receives to begin before it, `needs` what it waits for, `sends` what it makes.
    `ends` are stages whose parameters have all their gradients after it.
    """

    action: Action
    begins: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    ends: tuple[int, ...] = ()


def program_of(
    schedule: Schedule, messages: Sequence[Message], *, rank: int, sends_wait: bool = False
) -> tuple[ProgramStep, ...]:
    """Return the program of `rank` with these `messages` of the step.

    Where a send waits for its receive, as over NCCL, receives begin in the order of all passes.
    """
    actions = schedule.actions[rank]
    needs: list[list[Message]] = [[] for _ in actions]
    sends: list[list[Message]] = [[] for _ in actions]
    incoming = []
    for message in messages:
        if message.receiver == rank:
            needs[message.used].append(message)
            if message.sender != rank:
                incoming.append(message)
        if message.sender == rank:
            sends[message.made].append(message)
    begins = _begins(incoming, len(actions), sends_wait=sends_wait)
    # A stage's gradients are complete after its last backward.
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.kind in ("backward", "backward_weight"):
            last[action.stage_index] = index
    ends = [[stage for stage, at in last.items() if at == index] for index in range(len(actions))]
    rows = zip(actions, begins, needs, sends, ends, strict=True)
    return tuple(
        ProgramStep(action, tuple(b), tuple(n), tuple(s), tuple(e)) for action, b, n, s, e in rows
    )


def all_messages(schedule: Schedule, crossings: Sequence[Crossings]) -> list[Message]:
    """Return the messages of a step, in the order in which their senders make them."""
    # The index of each pass among its rank's actions; of a backward in two parts, the first's.
    kinds = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
    index_of = {
        (kinds[action.kind], action.stage_index, action.microbatch_index): index
        for actions in schedule.actions
        for index, action in enumerate(actions)
        if action.kind in kinds
    }
    found, places = [], _places(schedule)

    def add(
        source: int,
        target: int,
        microbatch: int,
        ref: TensorRef,
        spec: LeafSpec,
        *,
        is_gradient: bool,
    ) -> None:
        kind = "backward" if is_gradient else "forward"
        sender, receiver = schedule.rank_of_stage[source], schedule.rank_of_stage[target]
        made, used = index_of[kind, source, microbatch], index_of[kind, target, microbatch]
        message = Message(
            source=source,
            target=target,
            microbatch=microbatch,
            ref=ref,
            spec=spec,
            is_gradient=is_gradient,
            sender=sender,
            receiver=receiver,
            made=made,
            used=used,
            after=min(used, bisect(places[receiver], places[sender][made])),
        )
        found.append(message)

    for microbatch, of_microbatch in enumerate(crossings):
        for ref, targets in of_microbatch.targets.items():
            source, spec = of_microbatch.stage_of_call[ref.call], of_microbatch.specs[ref]
            for target in targets:
                add(source, target, microbatch, ref, spec, is_gradient=False)
                if spec.requires_grad and ("backward", target, microbatch) in index_of:
                    add(target, source, microbatch, ref, spec, is_gradient=True)
    return sorted(found, key=lambda m: (m.sender, m.made, m.target, m.ref))


@lru_cache(maxsize=64)
def _places(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    # The place of each action (rank, action) in one order of the actions of all ranks: the order in
    # which they would end were all stages equal, each in need of the one before. So a message is
    # made while the receiver runs what comes next in the order, if anything, and its receive has
    # begun. What a schedule that hangs never runs has the last place.
    edges, ends = Edges(schedule.num_stages, needs=None), dict[tuple[str, int, int], float]()
    ranks = schedule.rank_of_stage
    clocks = [0.0] * schedule.num_ranks
    runs: list[tuple[float, int]] = []  # when an action ends, and its rank
    for rank, action in run_order(schedule, edges)[0]:
        stage, index = action.stage_index, action.microbatch_index
        for kind, source in edges.inputs[action.kind, stage]:
            travels = _MESSAGE_SECONDS if ranks[source] != rank else 0.0
            clocks[rank] = max(clocks[rank], ends[kind, source, index] + travels)
        clocks[rank] += _SECONDS.get(action.kind, 1.0)
        runs.append((clocks[rank], rank))
        if action.kind != "backward_weight":
            ends["forward" if action.kind == "forward" else "backward", stage, index] = clocks[rank]
    # Those of a rank stay in its own order.
    places: list[list[int]] = [[] for _ in schedule.actions]
    for place, (_, rank) in enumerate(sorted(runs)):
        places[rank].append(place)
    return tuple(
        (*of_rank, *[len(runs)] * (len(actions) - len(of_rank)))
        for of_rank, actions in zip(places, schedule.actions, strict=True)
    )


def _begins(incoming: Sequence[Message], count: int, *, sends_wait: bool) -> list[list[Message]]:
    # The receives to begin before each of `count` actions, in the order of each sender
    by_sender: dict[int, list[Message]] = {}
    for message in incoming:
        by_sender.setdefault(message.sender, []).append(message)
    begins: list[list[Message]] = [[] for _ in range(count)]
    for messages in by_sender.values():
        first = count
        for message in reversed(messages):  # not later than any that comes after it
            begin = message.after if sends_wait else max(message.used - LOOKAHEAD, 0)
            first = min(first, begin)
            begins[first].append(message)
    # Lists are reversed sender by sender: each one's part is put in order again.
    return [sorted(reversed(of_action), key=lambda m: m.sender) for of_action in begins]


class MessageExchange:
    """Exchanges the messages of a step's schedule with the other ranks of this rank's pipeline."""

    def __init__(self, links: RankLinks) -> None:
        self._links = links
        # Keys are ids of messages: to hash a message as a whole takes longer.
        self._receives: dict[int, PendingTransfer] = {}
        self._own: dict[int, Tensor] = {}  # from one stage of this rank to another
        self._sends: dict[int, list[tuple[Message, PendingTransfer]]] = {}  # by receiver

    def begin(self, messages: Sequence[Message]) -> None:
        """Begin to receive."""
        for message in messages:
            self._receives[id(message)] = self._links.receive(message.sender, message.spec, message)

    def receive(self, message: Message) -> Tensor:
        """Return the tensor of `message`, once it is here."""
        if message.sender == message.receiver:
            return self._own.pop(id(message))
        received = self._links.wait(self._receives.pop(id(message)))
        # The sender had used what came before it made this message, so those sends are over. Gloo
        # tells nobody, and their memory would stay: wait for them, which takes no time.
        if sends := self._sends.get(message.sender):
            kept = []
            for each in sends:
                if each[0].used <= message.made:
                    self._links.wait(each[1])
                else:
                    kept.append(each)
            self._sends[message.sender] = kept
        return received

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send."""
        if message.sender == message.receiver:
            self._own[id(message)] = tensor
            return
        transfer = self._links.send(message.receiver, laid_out(tensor, message.spec), message)
        # The tensor must stay until it has arrived.
        self._sends.setdefault(message.receiver, []).append((message, transfer))

    def finish(self) -> None:
        """Wait until all sends have arrived."""
        for sends in self._sends.values():
            for _, transfer in sends:
                self._links.wait(transfer)
        self._sends = {}
        assert not self._receives and not self._own, "a message that nobody waited for"

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._receives, self._own, self._sends = {}, {}, {}


# ---- losses --------------------------------------------------------------------------------------


def share_losses(values: Tensor, groups: PipelineGroups, *, source: int) -> None:
    """Give all ranks of the pipeline the `values` of rank `source`, which runs the last stage.

    By messages, since gloo takes longer to begin a collective call. Raises PeerLostError where a
    rank is gone.
    """
    group, own = groups.pipeline_group, groups.rank
    of_last = f"of rank {groups.pipeline[source]}, which runs the last stage"
    with lost_peers(f"rank {dist.get_rank()} lacks losses {of_last}"):
        if own == source:
            others = (rank for rank in range(len(groups.pipeline)) if rank != own)
            works = [group.send([values], rank, 0) for rank in others]
        else:
            works = [group.recv([values], source, 0)]
        for work in works:
            work.wait()
