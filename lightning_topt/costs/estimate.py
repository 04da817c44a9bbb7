"""OpGraph x Cluster x OptimizerProfile -> CostTable: every configuration of every block, in seconds and bytes.

A table covers one *family* at one number of ranks: ``"replicated"`` (ZeRO 0 and 1, mixed freely over blocks) or
``"sharded"`` (ZeRO 2 and 3), the former with one way to exchange gradients; whoever wants several asks several times and
unites the frontiers. `explain` takes one plan apart: what its seconds are spent on, and what is in memory at each moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.columns import needed_columns
from lightning_topt.costs.communication import check_world_size
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.cost_table import Array, CostTable, OperatorCosts
from lightning_topt.costs.exchange import ExchangeModel, make_exchange_model
from lightning_topt.costs.memory import (
    FAMILIES,
    REBUILD,
    REDUCE_ROOT,
    STEP,
    Lifetime,
    StepMemory,
    block_lifetimes,
    fixed_lifetimes,
)
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.owned import OwnedBound, bound_owned_elements, busiest_load
from lightning_topt.costs.sizes import ROOT
from lightning_topt.costs.step_time import BlockTime, StepTime, estimate_block_time, path_seconds
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, OpGraph

_LOOSE_STATE_BYTES = 16  # state that does not grow with a parameter: step counts


@dataclass(frozen=True)
class Explanation:
    """What a plan is expected to cost on each rank, in seconds and bytes.

    `step_seconds` = `compute_seconds` + `exposed_communication_seconds`. `seconds` splits the work (exchanges in full,
    overlapped or not), `peak_moment` names the moment of `peak_bytes`, ``"backward 3"`` for instance, `peak_parts` what
    is alive then, and `moments` the bytes of every moment in the order of time.
    """

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    seconds: Mapping[str, float]
    peak_bytes: float
    peak_moment: str
    peak_parts: Mapping[str, float]
    moments: Mapping[str, float]


@dataclass(frozen=True)
class StepModel:
    """One training step of one rank on given machines: what the costs of every plan of one family depend on.

    Args:
        graph: one training step of one rank.
        cluster: the machines.
        optimizer: from `read_optimizer`.
        data_parallel_size: number of ranks.
        batch_size: samples per rank (not the global batch).
        family: ``"replicated"`` or ``"sharded"``.
        kernel_seconds: measured seconds of kernels at ``graph.batch_size`` (`measure_kernels`); they beat the formulas.
        exchange: how whole gradients are exchanged (one of `legal_exchanges`); None: by an all-reduce.
        returns_memory: the run gives freed memory back at once, as under a memory limit on CPUs (`execution.allocator`), and
            pays `Device.page_fault_seconds_per_byte` for what it takes anew.

    Raises ValueError for more ranks than the cluster has devices, a family that does not exist or that the optimizer
    forbids, a batch smaller than one sample, and an exchange that these ranks or the sharded family cannot have.
    """

    graph: OpGraph
    cluster: Cluster
    optimizer: OptimizerProfile
    data_parallel_size: int
    batch_size: float
    family: str = "replicated"
    kernel_seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    exchange: ExchangeOptions | None = None
    returns_memory: bool = False

    def __post_init__(self) -> None:
        check_world_size(self.cluster, world_size=self.data_parallel_size)
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {FAMILIES}, got {self.family!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is the number of samples per rank, at least 1; got {self.batch_size}")
        if not self.graph.batch_scaling and self.batch_size != self.graph.batch_size:
            raise ValueError(
                f"the step was captured for batches of {self.graph.batch_size} sample(s) and how it grows with them is "
                f"unknown, so {self.batch_size} per rank cannot be estimated; capture it with batch_scaling=True"
            )
        if self.family not in legal_families(self.optimizer, data_parallel_size=self.data_parallel_size):
            raise ValueError(
                f"sharded plans (ZeRO 2 and 3) need several ranks and an elementwise optimizer; here are "
                f"{self.data_parallel_size} rank(s) and {self.optimizer.name}. Use family='replicated'"
            )
        if self.exchange is not None and self.family != "replicated":
            raise ValueError("only whole gradients (family='replicated') can be exchanged compressed")
        _ = self._exchange  # raises

    @cached_property
    def _exchange(self) -> ExchangeModel | None:
        if self.exchange is None:
            return None
        ranks = self.data_parallel_size
        return make_exchange_model(self.exchange, graph=self.graph, cluster=self.cluster, world_size=ranks)

    @cached_property
    def time(self) -> StepTime:
        """Its seconds."""
        ranks, kernels = self.data_parallel_size, self.kernel_seconds
        common = self.graph, self.cluster, self.optimizer, self.family, self.batch_size, ranks
        return StepTime(*common, kernels, self._exchange, self.returns_memory)

    @cached_property
    def memory(self) -> StepMemory:
        """Its bytes."""
        backend, ranks, exchange = self.cluster.backend, self.data_parallel_size, self._exchange
        process_bytes = self.cluster.device.process_bytes + (exchange.process_bytes if exchange else 0)
        common = self.graph, self.optimizer, self.family, self.batch_size, ranks
        return StepMemory(*common, backend, process_bytes, exchange)

    def block_time(self, block: str, config: OpConfig) -> BlockTime:
        """Seconds of one block under one configuration; worked out once."""
        key = block, config
        if key not in self._block_times:
            self._block_times[key] = estimate_block_time(self.time, block=block, config=config)
        return self._block_times[key]

    def block_memory(self, block: str, config: OpConfig) -> dict[str, Array]:
        """Bytes (moment,) by kind of one block under one configuration, without owned optimizer state; worked out once."""
        key = block, config
        if key not in self._block_memories:
            state = 0.0 if config.storage.level == 1 else _state_bytes(self.memory, block)
            lifetimes = block_lifetimes(
                self.memory, block=block, stage=config.storage.level, recompute=config.recompute, state_bytes=state
            )
            self._block_memories[key] = _by_kind(self.memory, lifetimes)
        return self._block_memories[key]

    @cached_property
    def _block_times(self) -> dict[tuple[str, OpConfig], BlockTime]:
        return {}

    @cached_property
    def _block_memories(self) -> dict[tuple[str, OpConfig], dict[str, Array]]:
        return {}


def legal_families(optimizer: OptimizerProfile, *, data_parallel_size: int) -> tuple[str, ...]:
    """The families that `estimate_costs` takes: one rank has nothing to shard, and shards need elementwise updates."""
    return FAMILIES if data_parallel_size > 1 and optimizer.elementwise else FAMILIES[:1]


def legal_configs(
    block: Block, *, family: str, optimizer: OptimizerProfile, data_parallel_size: int
) -> tuple[OpConfig, ...]:
    """The configurations of one block.

    Replicated: ZeRO 0, and ZeRO 1 on several ranks when the optimizer treats each parameter by itself. Sharded: ZeRO 2
    and 3, for the block ``""`` only 2 (FSDP2's root is needed until the end of the step). Each also recomputed, where
    the block can be.
    """
    if family == "replicated":
        stages = [0, 1] if data_parallel_size > 1 and optimizer.by_parameter else [0]
    else:
        stages = [2] if block.name == ROOT else [2, 3]
    recompute = (False, True) if block.recomputable and block.name != ROOT else (False,)
    return tuple(OpConfig.zero(stage, recompute=again) for stage in stages for again in recompute)


def estimate_costs(model: StepModel) -> CostTable:
    """The costs of every plan of one family; operators are blocks, configurations `OpConfig`.

    The sharded family is exactly what `explain` says. Where ZeRO 1 can be chosen, bytes and seconds are close upper
    bounds of it (`owned`): at most the excess of one parameter above an even share. Paths and moments that can never be
    the largest are left out.
    """
    graph, time, memory = model.graph, model.time, model.memory
    world_size, family = model.data_parallel_size, model.family
    owned = bound_owned_elements(graph, world_size=world_size, any_owned=family == "replicated")
    operators = []
    for block in graph.blocks:
        configs = legal_configs(block, family=family, optimizer=model.optimizer, data_parallel_size=world_size)
        operators.append(_operator(block.name, configs, time=time, memory=memory, owned=owned))
    fixed = memory.add_up(fixed_lifetimes(memory))
    return _without_idle_columns(
        CostTable(
            operators=tuple(operators),
            edges=(),
            fixed_seconds=_spread(
                np.full(len(time.paths), time.buffers_seconds), owned.fixed * time.seconds_per_owned_element
            ),
            fixed_bytes=_spread(fixed, owned.fixed * _state_density(memory)),
        )
    )


def explain(model: StepModel, configs: Mapping[str, OpConfig]) -> Explanation:
    """What the plan that gives each block its entry of `configs` costs.

    Raises ValueError when a block has no configuration, or one of the other family.
    """
    graph, time, memory = model.graph, model.time, model.memory
    if missing := [block.name for block in graph.blocks if block.name not in configs]:
        raise ValueError(f"the plan has no configuration for the blocks {missing}")
    if foreign := [name for name, config in configs.items() if FAMILIES[config.storage.level >= 2] != model.family]:
        raise ValueError(
            f"the blocks {foreign} have ZeRO stages that are not {model.family}: a plan cannot mix 0 and 1 with 2 and 3"
        )
    times = [model.block_time(block.name, configs[block.name]) for block in graph.blocks]
    stage_1 = [name for name, config in configs.items() if config.storage.level == 1]
    loads = {p.name: time.update_seconds(p) for p in graph.parameters}
    owned = busiest_load(graph, blocks=stage_1, world_size=model.data_parallel_size, loads=loads)
    paths = np.sum([path_seconds(time, block_time) for block_time in times], axis=0)
    step_seconds = float(paths.max()) + owned + time.buffers_seconds
    seconds = {**_seconds_parts(times, owned), "buffers": time.buffers_seconds}
    compute = sum(seconds[kind] for kind in ("forward", "backward", "recompute", "update"))
    parts = _memory_parts(model, configs)
    total = np.sum([*parts.values()], axis=0)
    peak = int(np.argmax(total))
    names = [kind if (kind, k) in (STEP, REDUCE_ROOT, REBUILD) else f"{kind} {k}" for kind, k in memory.moments]
    return Explanation(
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_communication_seconds=max(step_seconds - compute, 0.0),
        seconds=seconds,
        peak_bytes=float(total[peak]),
        peak_moment=names[peak],
        peak_parts={kind: float(sizes[peak]) for kind, sizes in parts.items()},
        moments={name: float(size) for name, size in zip(names, total, strict=True)},
    )


def _operator(
    block: str, configs: tuple[OpConfig, ...], *, time: StepTime, memory: StepMemory, owned: OwnedBound
) -> OperatorCosts:
    """Costs (config, path x owned column) and (config, moment x owned column) of one block."""
    seconds, sizes = [], []
    for config in configs:
        share = owned.blocks[block] if config.storage.level == 1 else np.zeros(len(owned.fixed))
        paths = path_seconds(time, estimate_block_time(time, block=block, config=config))
        seconds.append(_spread(paths, share * time.seconds_per_owned_element))
        loose = _LOOSE_STATE_BYTES * len(memory.graph.block_parameters(block))
        state = loose if config.storage.level == 1 else _state_bytes(memory, block)
        lifetimes = block_lifetimes(
            memory, block=block, stage=config.storage.level, recompute=config.recompute, state_bytes=state
        )
        sizes.append(_spread(memory.add_up(lifetimes), share * _state_density(memory)))
    return OperatorCosts(block, configs, np.array(seconds), np.array(sizes))


def _spread(costs: Array, owned: Array) -> Array:
    """Every column of `costs` with every column of `owned` added: (a,), (b,) -> (a * b,)."""
    return np.add.outer(costs, owned).ravel()


def _state_bytes(memory: StepMemory, block: str) -> float:
    return sum(memory.optimizer.state_bytes(p.name) for p in memory.graph.block_parameters(block))


def _state_density(memory: StepMemory) -> float:
    """The least d for which no parameter has more state than ``d * elements + _LOOSE_STATE_BYTES``."""
    parameters = [p for p in memory.graph.parameters if p.numel]
    loose = [memory.optimizer.state_bytes(p.name) - _LOOSE_STATE_BYTES for p in parameters]
    return max((size / p.numel for size, p in zip(loose, parameters, strict=True) if size > 0), default=0.0)


def _without_idle_columns(table: CostTable) -> CostTable:
    paths = needed_columns([operator.seconds for operator in table.operators], fixed=table.fixed_seconds)
    moments = needed_columns([operator.bytes for operator in table.operators], fixed=table.fixed_bytes)
    operators = [
        OperatorCosts(operator.name, operator.configs, operator.seconds[:, paths], operator.bytes[:, moments])
        for operator in table.operators
    ]
    return CostTable(tuple(operators), (), table.fixed_seconds[paths], table.fixed_bytes[moments])


def _seconds_parts(times: list[BlockTime], owned: float) -> dict[str, float]:
    """The work of a step by kind, in seconds, whether it is in the way of anything or not."""
    recompute = sum(time.recompute for time in times)
    return {
        "forward": float(sum(time.forward.sum() for time in times)),
        "backward": float(sum(time.backward.sum() for time in times)) - recompute,
        "recompute": recompute,
        "update": sum(time.update for time in times) + owned,
        "gather": sum(sum(time.gather_foreground) + sum(time.gather_background) for time in times),
        "reduce": sum(time.reduce_foreground + time.reduce_background for time in times),
        "broadcast": sum(time.broadcast for time in times),
    }


def _memory_parts(model: StepModel, configs: Mapping[str, OpConfig]) -> dict[str, Array]:
    """Bytes (moment,) by kind. Rank-dependent state (ZeRO 1) is that of the rank that owns most."""
    memory = model.memory
    stage_1 = [name for name, config in configs.items() if config.storage.level == 1]
    loads = {p.name: float(memory.optimizer.state_bytes(p.name)) for p in memory.graph.parameters}
    owned = busiest_load(memory.graph, blocks=stage_1, world_size=memory.world_size, loads=loads)
    fixed = [*fixed_lifetimes(memory), Lifetime("optimizer state", owned, memory.moments[0], STEP)]
    parts = _by_kind(memory, fixed)
    for block in memory.graph.blocks:
        for kind, size in model.block_memory(block.name, configs[block.name]).items():
            parts[kind] = parts[kind] + size if kind in parts else size
    return parts


def _by_kind(memory: StepMemory, lifetimes: list[Lifetime]) -> dict[str, Array]:
    kinds = dict.fromkeys(lifetime.kind for lifetime in lifetimes)
    return {kind: memory.add_up(item for item in lifetimes if item.kind == kind) for kind in kinds}
