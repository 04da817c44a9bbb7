"""A configuration of `topt plan` becomes a search: a model without memory, its captured step, costs
given or measured.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_topt.basics.units import format_bytes
from lightning_topt.cli.example_step import ExampleStep, NeedsValues, capture_example
from lightning_topt.cli.local_ranks import run_on_ranks
from lightning_topt.cli.searched_meshes import SearchedMeshes
from lightning_topt.cli.searched_pipelines import stale_weights
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.graph.meta_build import build_on_meta
from lightning_topt.plan.plan_search import SearchRequest, local_graphs
from lightning_topt.plugins.allowed_exchanges import steps_of_fit
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import make_fake_optimizers
from lightning_topt.plugins.planning_ranks import on_rank_0
from lightning_topt.techniques.tensor_parallel.split_candidates import Captured

AskedFor = Callable[..., SearchRequest]  # a request, but for its costs


@dataclass(frozen=True)
class Measured:
    """The arguments of a `SearchRequest` that ranks have measured, and the steps on slices that
    rank 0 has captured for it.
    """

    costs: Mapping[str, Any]
    captured: Captured | None


@dataclass
class PlanSetup:
    """A `PlanSetup` is what a configuration builds: `model` has no memory until its values are
    needed.
    """

    model: pl.LightningModule
    make_model: Callable[[], pl.LightningModule]
    datamodule: pl.LightningDataModule
    strategy: AutoParallelStrategy
    trainer: pl.Trainer

    @classmethod
    def of(cls, config: DictConfig) -> PlanSetup:
        """Return what `config` builds. Raises ValueError when the strategy is not one that
        plans.
        """
        datamodule: pl.LightningDataModule = instantiate(config.data)
        make_model: Callable[[], pl.LightningModule] = functools.partial(instantiate, config.model)
        model: pl.LightningModule = build_on_meta(make_model)
        strategy = instantiate(config.strategy, _convert_="all")
        if not isinstance(strategy, AutoParallelStrategy):
            raise ValueError(
                "topt plan needs strategy=topt: the other strategies have nothing to plan"
            )
        trainer: pl.Trainer = instantiate(
            config.trainer, strategy=strategy, logger=False, _convert_="all"
        )
        return cls(model, make_model, datamodule, strategy, trainer)

    @property
    def request(self) -> PlanRequest:
        """The user's request to the planner."""
        return self.strategy.request

    def capture(self, *, splits: bool) -> tuple[ExampleStep, float]:
        """Return the captured step, and the seconds it took. Raises ValueError for a model that
        must be real and is larger than the memory of this machine.
        """
        start = time.perf_counter()
        try:
            example = capture_example(self.model, self.datamodule, self.trainer, splits=splits)
        except NeedsValues as reason:
            self._check_memory(reason)
            self.model = self.make_model()
            example = capture_example(self.model, self.datamodule, self.trainer)
        return example, time.perf_counter() - start

    def _check_memory(self, reason: NeedsValues) -> None:
        size, free = (
            sum(p.nbytes for p in self.model.parameters()),
            psutil.virtual_memory().available,
        )
        if 2 * size > free:  # parameters and their gradients
            raise ValueError(
                f"the step reads values of tensors ({reason.__cause__}), so it runs on real "
                f"weights to be planned; these take {format_bytes(2 * size)} with their gradients, "
                f"of which this machine has {format_bytes(free)} free: plan a smaller model of the "
                "same kind"
            )

    def with_costs(self, asked: AskedFor, request: PlanRequest) -> SearchRequest | None:
        """Return the request with what the search needs besides the graph: for the cluster of
        `request`, or measured here; None on ranks of torchrun that have nothing more to do.
        """
        if request.cluster is not None:
            return self._of_what_holds(
                asked(cluster=request.cluster, optimizer=self._optimizer), request
            )
        accelerator = "cpu" if self.strategy.root_device.type == "cpu" else "cuda"
        measured = run_on_ranks(
            _measure, asked, self.model, accelerator=accelerator, devices=self.trainer.num_devices
        )
        if measured is None:
            return None
        search = asked(**measured.costs)
        if search.split is not None and measured.captured is not None:
            search.split.take_over(measured.captured)
        return self._of_what_holds(search, request)

    def _of_what_holds(self, search: SearchRequest, request: PlanRequest) -> SearchRequest:
        held = request.allowed.held(search.optimizer, steps=steps_of_fit(self.trainer))
        return dataclasses.replace(search, exchanges=held)

    @functools.cached_property
    def _optimizer(self) -> OptimizerProfile:
        optimizers, named = make_fake_optimizers(self.model, device=torch.device("cpu"))
        return read_optimizer(optimizers, named_parameters=named)


@dataclass(frozen=True)
class Asked:
    """An `Asked` is what is searched on one cluster: the request but for its costs, and why splits
    or stages are left out (None: they are not).
    """

    request: AskedFor
    unsplit: str | None
    unstaged: str | None

    @classmethod
    def of(
        cls,
        setup: PlanSetup,
        meshes: SearchedMeshes,
        example: ExampleStep,
        request: PlanRequest,
        **given: Any,
    ) -> Asked:
        """Return what `meshes` and `request` ask of a captured step; `given` are more arguments of
        the `SearchRequest`.
        """
        unsplit = meshes.why_not_split(example, request, setup.trainer)
        unstaged = meshes.pipelines.why_not(example, request, setup.trainer)
        asked = functools.partial(
            SearchRequest,
            example.graph,
            device_counts=meshes.device_counts,
            returns_memory=request.saves_memory,
            gradient_views=request.gradient_views,
            split=example.split if meshes.tensor and unsplit is None else None,
            mesh=meshes.mesh,
            pipelines=meshes.pipelines.wanted if unstaged is None else None,
            stale=stale_weights(meshes.pipelines, request, setup.model)
            if unstaged is None
            else None,
            **given,
        )
        return cls(asked, unsplit, unstaged)


def _measure(
    device: torch.device, num_nodes: int, asked: AskedFor, module: pl.LightningModule
) -> Measured:
    """Measure on every rank; steps on slices are captured on one, and measured as the whole one."""
    optimizers, named = make_fake_optimizers(module, device=device)
    optimizer = read_optimizer(optimizers, named_parameters=named, device_type=device.type)
    measurements = Measurements.open(device=device, num_nodes=num_nodes, progress=print)
    seconds = measurements.update_seconds(optimizers, named_parameters=named)
    optimizer = dataclasses.replace(optimizer, seconds_per_element=seconds)
    costs: dict[str, Any] = {"cluster": measurements.cluster(), "optimizer": optimizer}
    search = asked(**costs)
    kernels: dict[KernelKey, float] = {}
    for graph in (search.graph, *on_rank_0(lambda: local_graphs(search))):
        kernels |= measurements.kernel_seconds(graph)
    return Measured(
        {**costs, "kernel_seconds": kernels},
        None if search.split is None else search.split.captured,
    )
