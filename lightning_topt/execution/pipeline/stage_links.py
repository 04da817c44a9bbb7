"""Links of a stage to the others for a run that never flushes: sends that nobody waits for,
receives begun ahead.

Between two stages, in each channel, parcels (lists of tensors) travel in the order in which they
are sent, and their receives are begun in that order. A channel is a group of its own: NCCL runs
what two ranks exchange in a group in the order in which it is begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.communication.topology import own_group
from lightning_topt.execution.pipeline.stage_peers import flat, laid_out
from lightning_topt.graph.step_flow import LeafSpec

Channel = Literal["activations", "gradients", "values", "shared weights", "shared gradients"]
_GO_UP = ("activations", "shared weights")  # to later stages
_Works = list[tuple[Any, Tensor]]


class _Sent(NamedTuple):
    minibatch: int
    works: _Works


class StageLinks:
    """The links of `stage` to the other stages of its pipeline, of which stage s is on rank
    ``ranks[s]``, on `device`.

    All waits end at the time limit of the run's groups, with a PeerLostError that names the rank
    and its stage.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        groups: dict[Channel, dist.ProcessGroup],
        *,
        stage: int,
        device: torch.device,
    ) -> None:
        self.stage, self._ranks, self._groups, self._device = stage, list(ranks), groups, device
        self._begun: dict[tuple[Channel, int], deque[tuple[int, _Works]]] = {}
        self._sent: dict[tuple[Channel, int], deque[_Sent]] = {}

    @classmethod
    def of_pipelines(
        cls,
        pipelines: Sequence[Sequence[int]],
        *,
        rank: int,
        device: torch.device,
        are_shared: bool = False,
    ) -> StageLinks:
        """Return the links of this rank, `rank` of the run, which is in one of `pipelines`. A
        collective call of all ranks.

        `are_shared`: stages share parameters.
        """
        channels: list[Channel] = [
            each for each in get_args(Channel) if are_shared or not each.startswith("shared")
        ]
        groups = {channel: own_group(pipelines) for channel in channels}
        own = next(ranks for ranks in pipelines if rank in ranks)
        links = cls(own, groups, stage=own.index(rank), device=device)
        links._meet()
        return links

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self._ranks)

    @property
    def begins_ahead(self) -> bool:
        """Whether receives may be begun long before anything is sent: a kernel of NCCL would keep
        the device waiting.
        """
        return dist.get_backend(self._groups["values"]) == "gloo"

    def begin(
        self, channel: Channel, source: int, minibatch: int, specs: Sequence[LeafSpec]
    ) -> None:
        """Begin to receive a parcel: the next one of stage `source`."""
        works: _Works = []
        for spec in specs:
            buffer = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=self._device
            )
            try:
                works.append((self._groups[channel].recv([flat(buffer)], source, 0), buffer))
            except RuntimeError as error:
                self._fail(channel, source, minibatch, error, is_receiver=True)
        self._begun.setdefault((channel, source), deque()).append((minibatch, works))

    def receive(self, channel: Channel, source: int, minibatch: int) -> list[Tensor]:
        """Return the tensors of the parcel of `source` that was begun first, once they are here."""
        of_minibatch, works = self._begun[channel, source].popleft()
        assert of_minibatch == minibatch, (channel, source, of_minibatch, minibatch)
        for work, _ in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(channel, source, minibatch, error, is_receiver=True)
        return [buffer for _, buffer in works]

    def send(
        self,
        channel: Channel,
        target: int,
        minibatch: int,
        tensors: Sequence[Tensor],
        specs: Sequence[LeafSpec] | None = None,
    ) -> None:
        """Begin to send a parcel, laid out as `specs` say."""
        works: _Works = []
        for number, tensor in enumerate(tensors):
            sent = tensor if specs is None else laid_out(tensor, specs[number])
            try:
                works.append((self._groups[channel].send([flat(sent)], target, 0), sent))
            except RuntimeError as error:
                self._fail(channel, target, minibatch, error, is_receiver=False)
        self._sent.setdefault((channel, target), deque()).append(_Sent(minibatch, works))

    def let_go(self, channel: Channel, target: int, before: int) -> None:
        """Free what was sent to `target` of minibatches before this one, which it is known to have
        used.

        Gloo tells nobody when a send is over; waiting for one that is takes no time.
        """
        sent = self._sent.get((channel, target))
        while sent and sent[0].minibatch < before:
            self._wait_for(channel, target, sent.popleft())

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for (channel, target), sent in self._sent.items():
            while sent:
                self._wait_for(channel, target, sent.popleft())

    @property
    def held_bytes(self) -> int:
        """Bytes of what is under way: parcels that are not known to have arrived, and buffers for
        what comes.
        """
        parcels = [works for sent in self._sent.values() for _, works in sent]
        parcels += [works for begun in self._begun.values() for _, works in begun]
        return sum(tensor.nbytes for works in parcels for _, tensor in works)

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._begun, self._sent = {}, {}

    def _wait_for(self, channel: Channel, target: int, sent: _Sent) -> None:
        for work, _ in sent.works:
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(channel, target, sent.minibatch, error, is_receiver=False)

    def _fail(
        self,
        channel: Channel,
        stage: int,
        minibatch: int,
        error: RuntimeError,
        *,
        is_receiver: bool,
    ) -> NoReturn:
        what = f"{channel} of minibatch {minibatch}"
        me, other = (f"rank {self._ranks[each]} (stage {each})" for each in (self.stage, stage))
        if is_receiver:
            text = (
                f"{me} waited for {what}, and {other} did not send them: it is gone, stopped or "
                "late"
            )
        else:
            text = f"{me} could not send {what} to {other}: it is gone, stopped or late"
        raise PeerLostError(f"{text} ({error})") from error

    def _meet(self) -> None:
        """Connect with all others, in one order on all ranks: NCCL connects two ranks when they
        first exchange something.
        """
        for channel, group in self._groups.items():
            for low in range(len(self._ranks)):
                for high in range(low + 1, len(self._ranks)):
                    sender, receiver = (low, high) if channel in _GO_UP else (high, low)
                    token = torch.zeros(1, device=self._device)
                    if self.stage == sender:
                        group.send([token], receiver, 0).wait()
                    elif self.stage == receiver:
                        group.recv([token], sender, 0).wait()
