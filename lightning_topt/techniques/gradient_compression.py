"""The plan's gradient exchange: unsharded gradients travel compressed, as DDP's hook.

The hook may also send them over the levels of the network. Beside tensor axes the ranks of each
data group exchange their slices. Parameters that are replicated along tensor axes must stay equal
there. Methods that choose what they send (top-k) send them uncompressed.

The second technique here is for ranks that exchange no gradients, but meet once in many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.lifetimes import REBUILD, REDUCE_LAST, UPDATE, Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.data_parallel import add_exchange
from lightning_topt.techniques.ddp_wrapper import names_to_ignore
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_unsharded_gradients,
)
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor


class GradientCompression(Technique):
    """The technique of plans that have a `gradient_exchange`.

    The exchange outlives `undo`, for checkpoints, until it is closed.
    """

    name = "gradient exchange"

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        if exchange is None:
            return
        if not any(has_unsharded_gradients(config) for config in configs.values()):
            raise ValueError(
                "gradient_exchange: needs whole gradients (ZeRO levels 0 and 1), and this plan "
                "shards all"
            )
        if mesh.data_parallel_size == 1:
            raise ValueError(
                "gradient_exchange: a single rank along the data axes exchanges nothing; leave it "
                "out"
            )

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return step.exchange is not None and has_unsharded_gradients(config)

    @override
    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        assert step.exchange_model is not None
        if step.segments.count:
            # what the method keeps between steps, and buffers from the first backward on
            work = step.exchange_model.work[block]
            spans = [
                step.segments.of_parameter[p.name][0] for p in step.parameters(block) if p.trainable
            ]
            yield Lifetime(
                "held-back gradients", work.kept_bytes, step.phases.after(REBUILD), UPDATE
            )
            # on a slow network all its buffers are in flight to the end
            yield Lifetime(
                "exchange buffers",
                work.buffer_bytes,
                ("backward", min(spans, default=0)),
                REDUCE_LAST,
            )

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        assert step.exchange_model is not None
        yield step.phases.always("process", step.exchange_model.process_bytes)

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        assert step.exchange_model is not None
        waits = step.exchange_model.wait_seconds(block)
        add_exchange(seconds, step, step.exchange_model.worker_seconds(block), waits=waits)
        buffers = step.exchange_model.work[block].buffer_bytes
        seconds.reduce_foreground += step.exchange_model.device_seconds(block) + step.taken_seconds(
            buffers
        )

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        # stages exchange their own gradients when a pass comes back
        if model.exchange is None or model.mesh.pipeline_axes:
            return None
        if not isinstance(model.root, DistributedDataParallel):
            raise ValueError(
                "gradient_exchange: no trained parameter of this model has whole gradients; leave "
                "it out"
            )
        # with tensor axes: the ranks of this data group, which exchange slices
        topology, slices = model.options.topology, None
        if model.mesh.tensor_axes:
            everyone = topology or Topology.from_environment(
                rank=dist.get_rank(), world_size=dist.get_world_size()
            )
            topology = everyone.of_part(model.mesh.groups_along(model.mesh.data_axes))
            slices = _Slices(dict(model.root.module.named_parameters()), model.split)
        # the exchange becomes the hook of DDP
        exchange = CompressedExchange(
            model.root,
            model.exchange,
            topology=topology,
            device=model.device,
            nonfinite=model.options.nonfinite,
            slices=slices,
            watch=model.options.watch,
        )
        return Applied(exchange=exchange)


@dataclass(frozen=True)
class _Slices:
    # `communication.collectives.Slices` for the named parameters of a module.
    # Some of them are slices, cut as `split` says.

    parameters: Mapping[str, nn.Parameter]
    split: Mapping[Tensor, SplitTensor]

    @property
    def uncut(self) -> Collection[str]:
        return [n for n, p in self.parameters.items() if p.requires_grad and p not in self.split]

    def numel(self, name: str, own: int) -> int:
        how = self._how(name)
        return own if how is None else own * how.slices

    def whole(self, name: str, own: Tensor) -> Tensor:
        how = self._how(name)
        return own if how is None else how.whole(own.view(how.local_shape)).flatten()

    def own(self, name: str, whole: Tensor) -> Tensor:
        how = self._how(name)
        return whole if how is None else how.own(whole.view(how.layout.shape)).flatten()

    def _how(self, name: str) -> SplitTensor | None:
        return self.split.get(self.parameters[name])


# ---- ranks that train alone --------------------------------------------------------------------


class LocalTraining(Technique):
    """The technique of plans that have `local_steps` (DiLoCo, SparseLoCo).

    Data ranks train alone and meet in an outer step once in many. No gradient is averaged, so there
    is no DDP: a step costs what one rank alone takes, and its share of an outer step. What that
    exchanges is the method's (`communication.local_sgd`).

    What is kept between outer steps outlives `undo`, for checkpoints, until it is closed.
    """

    name = "local steps"

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return step.local_steps is not None

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        # what all agreed on last, momentum and residual; messages while ranks meet
        yield step.phases.always("outer state", step.outer_work.kept_bytes)
        yield Lifetime("outer step", step.outer_work.buffer_bytes, UPDATE, UPDATE)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return step.outer_seconds

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        if model.local_steps is None:
            return None
        # importing it takes what only such plans need
        from lightning_topt.communication.local_sgd import OuterSteps  # noqa: PLC0415

        exchange = OuterSteps(
            model.module,
            model.local_steps,
            ignored=names_to_ignore(model.module),
            watch=model.options.watch,
        )
        return Applied(undo=exchange.leave, attach=exchange.follow, exchange=exchange)
