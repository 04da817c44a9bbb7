"""The strategies as Hydra composes them: names, types and defaults of their options.

Hydra checks the types of what is overridden. An option that is not named here, such as those of
DistributedDataParallel, is added: ``+trainer.strategy.find_unused_parameters=true``. Defaults are
those of the constructors, which the tests compare. Hydra imports this module, and so registers
them, when an app starts; nothing here imports torch, and annotations are no strings, which Hydra's
way to import plugins cannot look up.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

# what the group topt/cluster has composed; null: measure
_CLUSTER = "${oc.select:topt.cluster,null}"


@dataclass
class AutoParallelConfig:
    """``strategy="topt"``: ddp, or the plan asked for (`lightning_topt.AutoParallelStrategy`)."""

    _target_: str = "lightning_topt.AutoParallelStrategy"
    _convert_: str = "all"
    memory_limit: int | float | str | None = None  # e.g. 2GiB; null: the memory of the device
    # time, memory or time_to_loss; null: time, where the step can be planned
    objective: str | None = None
    # a plan file, a mapping, or a name: ddp, zero1, zero2, zero3, hybrid, tensor, pipeline, ...;
    # search: all plans that keep the loss curve; null: ddp, where nothing else is asked
    plan: Any = None
    cluster: Any = _CLUSTER
    memory_margin: float | None = None  # null: as much as keeps a limit at the confidence
    confidence: float = 0.9  # share of the runs that intervals of predictions are for
    # plans whose times differ by at most this share count as equally fast; 0: the fastest alone;
    # null: by what the ratio of two predictions may be off
    equal_within: float | None = None
    # what plans may change: compression (of gradients), local_steps (ranks train alone), staleness
    # (pipelines never flush): a name, a list, or names with options such as
    # {compression: [topk], staleness: spectrain}; null: nothing, but with the objective
    # time_to_loss what was measured of compression and local steps
    allow: Any = None
    checkpoint: str = "full"  # or sharded: a folder to which every rank writes what it keeps
    # a safetensors file or a folder of them, for a model on the meta device; {net: folder}
    first_values: Any = None
    microbatch_loss: Any = "mean"  # of a pipeline: mean, sum or tokens
    # stop: ranks end an epoch with the first whose data are over; null: as in Lightning
    uneven: str | None = "stop"
    elastic: bool = False  # whether a fit goes on when a rank is lost, under torchrun


@dataclass
class FullSearchConfig(AutoParallelConfig):
    """``strategy="topt_full"``: searches all plans that keep the loss curve, and runs the best."""

    plan: Any = "search"


@dataclass
class CompressedConfig:
    """``strategy="topt_compressed"``: data parallelism for slow networks."""

    _target_: str = "lightning_topt.compressed_strategy"
    _convert_: str = "all"
    method: Any = "topk"  # a name, or a mapping such as the group topt/gradient_exchange has
    nodes: int | None = None  # who shares a node, where it is not what the Trainer has
    ranks_per_node: int | None = None
    uneven: str | None = "stop"


@dataclass
class PipelineConfig:
    """``strategy="topt_pipeline"``: stages on ranks (`lightning_topt.PipelineStrategy`)."""

    _target_: str = "lightning_topt.PipelineStrategy"
    _convert_: str = "all"
    # null: as many as the ranks run; with fewer, ranks that are left form a data axis
    stages: int | None = None
    schedule: str = "1f1b"
    microbatches: int | None = None  # parts of a rank's batch; null: up to four per rank
    microbatch_loss: Any = "mean"  # over samples; or sum, or tokens that are not -100
    prediction: Any = None  # of weights, with schedule=continuous; null: that of the optimizer
    # of rows of stages, a name or a mapping such as {method: topk, density: 0.01}; null: averages
    gradient_exchange: Any = None
    stages_per_rank: int | None = None  # null: the fewest that the schedule takes
    recompute: bool = False
    cluster: Any = _CLUSTER
    checkpoint: str = "full"


STRATEGIES = {
    "topt": AutoParallelConfig,
    "topt_full": FullSearchConfig,
    "topt_compressed": CompressedConfig,
    "topt_pipeline": PipelineConfig,
}
for _name, _kind in STRATEGIES.items():
    _node = OmegaConf.structured(_kind)
    OmegaConf.set_struct(_node, False)  # options of DDP may be added; constructors check names
    ConfigStore.instance().store(group="topt/strategy", name=_name, node=_node)
