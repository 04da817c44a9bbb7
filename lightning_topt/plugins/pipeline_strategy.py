"""The strategy ``"topt_pipeline"``: the stages of a module on ranks one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.cluster import Cluster
from lightning_topt.plan.parallel_plan import rule_from_value
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.microbatches import MicrobatchLoss
from lightning_topt.plugins.plan_options import PipelinePlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.weight_prediction import Prediction


class PipelineStrategy(AutoParallelStrategy):
    """A pipeline for any LightningModule, as it is.

    ``Trainer(strategy=PipelineStrategy(stages=4, microbatches=8))``

    At setup the step is captured, and its blocks are cut into the stages whose step is fastest.
    From then on a rank holds the parameters of its stages alone. It runs the module's own
    `training_step` on each microbatch, in which only its own blocks compute. Losses and gradients
    are those of the batch in one process, where `microbatch_loss` says how losses add up. Ranks of
    one pipeline get the same batches. What the last stage returns and logs is returned and logged
    on every rank.

    Args:
        stages: number of stages; None: as many as fit on all ranks. With fewer, ranks that are left
            form a data axis.
        schedule: the order of passes: ``"1f1b"``, ``"1f1b_overlapped"``, ``"gpipe"``,
            ``"interleaved"``, ``"looped_bfs"``, ``"zero_bubble"``, ``"interleaved_zero_bubble"``,
            ``"zbv"`` (docs/reference/schedules.md says when to choose which). Under
            ``"continuous"``, and ``"continuous_overlapped"`` for slow links, the pipeline runs
            without flush: stages compute with weights that miss some updates, another training.
        microbatches: parts that a rank's batch is split into; a batch of fewer samples has as many
            as samples. None: four per rank of the pipeline, fewer where the batch does not divide.
        microbatch_loss: as in `AutoParallelStrategy`: ``"mean"``, ``"sum"``, ``"tokens"``, or a
            function.
        prediction: with these two, the rule of the weights that passes compute with: a name such as
            ``"spectrain"``, a mapping ``{"rule": name, option: value}`` or a `Prediction`; None:
            the optimizer's (docs/reference/prediction_rules.md).
        gradient_exchange: where ranks are left for a data axis, how rows of stages exchange their
            gradients: a method as of `CompressedDDPStrategy`, or its name or mapping. None: they
            average them as they are.
        stages_per_rank: None: the fewest that the schedule takes, 1 or 2.
        recompute: whether blocks run forward again in the backward pass, instead of keeping
            activations.
        cluster: as in `AutoParallelStrategy`: the machines that stages are balanced for.
        checkpoint: as there.
        ddp_options: arguments of Lightning's `DDPStrategy`, such as ``timeout`` and
            ``process_group_backend``.

    For other cuts, ZeRO-1 and recomputation of single blocks give `AutoParallelStrategy` a plan
    with stages. Raises ValueError for sizes that the schedule does not take and for a loss that
    depends on the batch as a whole, PlanError for fewer blocks than stages, and for modules whose
    step the ranks cannot run together, saying why.
    """

    def __init__(
        self,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        *,
        microbatch_loss: MicrobatchLoss = "mean",
        prediction: Prediction | Mapping[str, Any] | str | None = None,
        gradient_exchange: GradientMethod | Mapping[str, Any] | str | None = None,
        stages_per_rank: int | None = None,
        recompute: bool = False,
        cluster: Cluster | Mapping[str, Any] | str | Path | None = None,
        checkpoint: str = "full",
        **ddp_options: Any,
    ) -> None:
        for name in (
            "plan",
            "memory_limit",
            "objective",
            "memory_margin",
            "confidence",
            "equal_within",
            "allow",
        ):
            if name in ddp_options:
                raise TypeError(
                    f"PipelineStrategy searches no plan, so it does not take {name!r}; "
                    "AutoParallelStrategy does"
                )
        exchange: Any = gradient_exchange  # in any form, which the plan reads
        given = PipelinePlan(
            stages,
            schedule,
            microbatches,
            stages_per_rank,
            recompute,
            prediction=rule_from_value(prediction),
            gradient_exchange=exchange,
        )
        stale = schedule in CONTINUOUS_SCHEDULES
        super().__init__(
            plan=given,
            # what is asked for is allowed
            allow={"compression": given.gradient_exchange, "staleness": stale},
            microbatch_loss=microbatch_loss,
            cluster=cluster,
            checkpoint=checkpoint,
            **ddp_options,
        )
