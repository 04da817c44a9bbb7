"""A plan made of the first real steps, by a search that runs beside training.

On CPUs the first steps have the clock alone (`watched_steps`): plans on data axes compute what DDP
computes, so where that is nearly all of a step DDP goes on, and nothing more is watched. Where
more might be gained, or memory is asked for, a step is recorded, the next one timed, and a plan
searched. It takes over between two steps that all ranks agree on.

    poll -> _begin         is there anything to gain? else ddp
         -> _begin_search  in a forked copy of rank 0's process
         -> _poll_search   ready on rank 0? else None, and the next step runs under DDP
         -> _go_on         the plan; or kernels on slices are measured, and the search goes on

Where a plan cannot be made, DDP goes on, unless `PlanRequest.must_be_planned`. A plan that was
given by name gets its blocks from a watched step (`refine_watched`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics import Metric

from lightning_topt.basics.forked_call import ForkedCall
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.communication.topology import is_equal_on_ranks
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.graph.errors import CaptureError, one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.graph.python_state import describe, describe_surroundings
from lightning_topt.graph.structures import tensors_in
from lightning_topt.plan.choose import equal_in_words, errors_of
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.code_names import names_of_step
from lightning_topt.plugins.default_search import search_with_axes
from lightning_topt.plugins.plan_options import UniformPlan
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import PlanDecision, Planning, on_every_rank, on_rank_0
from lightning_topt.plugins.searched_plan import (
    RunCosts,
    measured_kernels,
    open_measurements,
    say,
    say_what_stays,
    search_request,
)
from lightning_topt.plugins.watched_steps import WatchedFit, WatchedSteps

_PATIENCE_SECONDS = 120.0  # with a search beside training, whatever keeps it
_CAPTURE_SECONDS = 40.0  # of these
_BY_NAME = 'they are searched by name alone: give plan={"mesh": {"data": 1, "tensor": 2}}'
# where modules keep what counts otherwise
_REGISTRIES = ("_parameters", "_buffers", "_modules", "forward")


class WatchedPlanning:
    """Makes a plan of what `fit` saw, beside training.

    `poll` it between steps, on all ranks, until it returns one. The search runs in a copy of rank
    0's process, unless somebody wants the same plan at the same step every time, or memory is
    scarce. What cannot be planned goes on as DDP, with a warning, unless it `must_be_planned`.
    """

    def __init__(self, request: PlanRequest, trainer: pl.Trainer, fit: WatchedFit) -> None:
        self._request, self._trainer, self._fit = request, trainer, fit
        self._watched: WatchedSteps | None = None  # on rank 0
        self._planning: Planning | None = None
        self._search: ForkedCall[Planning | list[OpGraph]] | None = None
        self._is_searching, self._begun = False, 0.0
        self._cluster: Cluster | None = None
        self._measurements: Measurements | None = None
        self._why_not: str | None = None

    def poll(self, batch: Any) -> PlanDecision | None:
        """Return the decision, None where the search is not over.

        A collective call, before a step with `batch`.
        """
        try:
            plan = self._poll_search() if self._is_searching else self._begin(batch)
        except Exception as error:
            if self._request.must_be_planned or is_of_collective(error):
                raise
            reason = one_line(error)
            rank_zero_warn(
                f"topt: no plan can be made from the first steps, so DDP goes on: {reason}"
            )
            plain = preset_plan(PRESETS["ddp"], mesh=data_mesh(dist.get_world_size()))
            return PlanDecision(plain, None, f"ddp: {reason}")
        if plan is None:
            return None
        say(plan)
        return PlanDecision(plan, self._planning, "search", self._measurements)

    def close(self) -> None:
        """End a search that is under way."""
        if self._search is not None:
            self._search.kill()

    def _begin(self, batch: Any) -> ParallelPlan | None:
        """Return the plan if it needs no search, or one that is waited for; else begin it."""
        # Rank 0 decides what comes next: a plan, another recorded step, or a search.
        found = on_rank_0(self._look)
        if found == "record":
            self._fit.record_more()
            return None
        if found is not None:
            return ParallelPlan.from_dict(found)
        # The cluster is measured by all ranks, before the search is on its own.
        self._cluster, self._measurements = _cluster_of(self._request, self._trainer)
        return self._begin_search({} if self._measurements is None else None)

    def _begin_search(self, kernels: dict[KernelKey, float] | None) -> ParallelPlan | None:
        """Begin a search with `kernels` on slices, and wait for it where it is waited for."""
        cluster, device = self._cluster, self._trainer.strategy.root_device
        # Steps are captured in a forked process alone: there user code may leave traces.
        forks = hasattr(os, "fork") and device.type == "cpu"
        if not forks:
            self._why_not = "on this device " + _BY_NAME
        elif self._request.objective == "memory":
            self._why_not = "with objective='memory' " + _BY_NAME
        # Somebody wants the same plan at the same step, or memory is scarce: wait for it.
        waits = self._request.saves_memory or self._request.cluster is not None
        waits = waits or torch.are_deterministic_algorithms_enabled() or not hasattr(os, "fork")

        def search() -> Any:
            assert self._watched is not None and cluster is not None
            run = partial(
                _search,
                self._request,
                self._trainer,
                self._fit.batch,
                _search_request(self._request, self._trainer, self._watched, cluster),
                self._watched,
                kernels=kernels,
                why_not=self._why_not,
            )
            if waits and not forks:
                return self._taken(run())
            self._search = ForkedCall(run, isolated=True)
            return (
                self._taken(self._search.result(timeout_seconds=_PATIENCE_SECONDS))
                if waits
                else None
            )

        # Without waiting, rank 0 has no result yet, and training goes on.
        self._is_searching, self._begun = True, perf_counter()
        return self._go_on(on_rank_0(search))

    def _taken(self, found: Planning | list[OpGraph]) -> Any:
        """Return what rank 0 sends to all at the end of a search.

        That is the plan, or graphs whose kernels it wants.
        """
        if isinstance(found, list):
            return found
        self._planning = found
        return found.chosen.plan.to_dict()

    def _go_on(self, found: Any) -> ParallelPlan | None:
        """Return the plan that was found; None where there is none yet.

        Kernels that the search wants are measured first.
        """
        if isinstance(found, list):
            assert self._measurements is not None
            return self._begin_search(measured_kernels(self._measurements, found))
        if found is None:
            return None
        # Ranks that run each other's batches must hold equal values; else search again without.
        plan = ParallelPlan.from_dict(found)
        if plan.brings_batches and self._why_not is None and not self._ranks_are_alike():
            self._why_not = (
                "training_step may not run for other ranks: their modules hold other values than "
                "rank 0's"
            )
            return self._begin_search({})
        return plan

    def _ranks_are_alike(self) -> bool:
        """Return whether the modules of all ranks hold equal values.

        Values beside parameters and buffers count. A collective call.
        """
        own = on_every_rank(lambda: _digest_of_values(self._trainer.lightning_module))
        return is_equal_on_ranks(own, device=self._trainer.strategy.root_device)

    def _look(self) -> Any:
        """Return the plan where it is known, or what comes before one.

        ``"record"`` where a step is to be recorded first, None where a search comes.
        """
        fit, ranks = self._fit, dist.get_world_size()
        # After steps that were timed only: does DDP take longer than what it computes?
        if not fit.has_graph and "record" not in fit.kinds:
            stays = _why_ddp_stays(
                self._request, fit.clock.median("step"), fit.clock.compute_seconds()
            )
            plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(ranks))
            return dataclasses.replace(plan, reason=f"{stays}.").to_dict() if stays else "record"
        # After the recorded steps: all is known that a search needs.
        self._watched = fit.result()
        fit.close()
        stays = _why_ddp_stays(
            self._request, self._watched.step_seconds, self._watched.compute_seconds
        )
        return _ddp_plan(self._watched, ranks, stays).to_dict() if stays else None

    def _poll_search(self) -> ParallelPlan | None:
        """Return the plan, once the search is over on rank 0."""
        device = self._trainer.strategy.root_device
        is_late = perf_counter() - self._begun > _PATIENCE_SECONDS
        is_over = torch.tensor(
            int(self._search is not None and (self._search.is_ready() or is_late)), device=device
        )
        # Rank 0 knows whether its process is done; all ranks switch before the same step.
        dist.broadcast(is_over, 0)
        if not is_over:
            return None

        def found() -> Any:
            assert self._search is not None
            return self._taken(self._search.result(timeout_seconds=0.1))

        return self._go_on(on_rank_0(found))


def _digest_of_values(module: pl.LightningModule) -> int:
    """Return a number that is equal on ranks whose modules hold equal values.

    Values beside parameters and buffers count, under names that the step's code uses. A rank that
    kept something of its own first batch would run batches of other ranks with that.
    """
    # Without what Lightning and torch keep on every module.
    names = names_of_step(module) - vars(pl.LightningModule()).keys() - {*_REGISTRIES}
    parts = [part for part in module.modules() if not isinstance(part, Metric)]
    own = [{name: value for name, value in vars(part).items() if name in names} for part in parts]
    digest = xxhash.xxh3_64(
        repr((describe(own), describe_surroundings({type(part) for part in parts}))).encode()
    )
    # Tensors count by their bytes.
    for tensor in tensors_in(own):
        if tensor.layout is torch.strided and not tensor.is_meta:
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.intdigest() >> 1  # fits a signed number


def refine_watched(request: PlanRequest, trainer: pl.Trainer, fit: WatchedFit) -> PlanDecision:
    """Return the uniform plan that was asked for, for the blocks that rank 0 saw.

    A collective call, between two steps.
    """
    given = request.plan
    assert isinstance(given, UniformPlan)
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    fit.close()

    def of_blocks() -> dict[str, Any]:
        try:
            graph = fit.graph()
        except CaptureError as error:
            if given.recompute:
                raise CaptureError(
                    f"{error}: leave '+recompute' out of the plan, whose blocks have to be seen"
                ) from error
            rank_zero_warn(
                "topt: the blocks were not seen, so the plan stores the whole module as one: "
                f"{error}"
            )
            return preset_plan(given.preset, mesh=mesh).to_dict()
        plan = given.of(graph, mesh)
        if graph.unused and not plan.keeps_gradients_whole:
            raise PlanError(
                f"this plan shards parameters, but the step gives {graph.unused[0]} no gradient, "
                "which only DistributedDataParallel sees and answers; choose ZeRO level 0 or 1"
            )
        if given.recompute:
            say_what_stays(graph)
        return plan.to_dict()

    return PlanDecision(ParallelPlan.from_dict(on_rank_0(of_blocks)), None, "given")


def _why_ddp_stays(request: PlanRequest, step: float | None, compute: float | None) -> str | None:
    """Return why nothing can be gained by any plan, as a sentence, or None.

    Plans on data axes compute what DDP computes. What they may save is the rest of the step: the
    optimizer's part, and the exchange that backward does not hide.
    """
    if request.saves_memory or request.cluster is not None or step is None or compute is None:
        return None
    share, more = errors_of(request.equal_within)
    if compute * (1 + share) + more < step:
        return None
    return (
        f"Nothing to gain: of a step of {1e3 * step:.1f} ms, {1e3 * compute:.1f} ms are forward "
        "and backward, which take as long under any plan on data axes (steps within "
        f"{equal_in_words(request.equal_within)} count as equally fast)"
    )


def _ddp_plan(watched: WatchedSteps, ranks: int, reason: str) -> ParallelPlan:
    """Return plain DDP with what was seen.

    It has the blocks that were seen, the time that was measured and the memory that is predicted.
    """
    graph, seconds = watched.graph, watched.step_seconds or 0.0
    plan = preset_plan(
        PRESETS["ddp"], mesh=data_mesh(ranks), blocks=[block.name for block in graph.blocks]
    )
    request = SearchRequest(
        graph,
        _any_cluster(ranks),
        watched.optimizers.profile(),
        device_counts=(ranks,),
        global_batch_size=graph.batch_size * ranks,
    )
    plan = dataclasses.replace(
        plan, model=graph.model, fingerprint=graph.fingerprint, batch_size=graph.batch_size
    )
    # Memory is predicted, times are measured.
    priced = price_plan(request, plan)
    compute = watched.compute_seconds or 0.0
    predicted = dataclasses.replace(
        priced.predicted,
        step_seconds=seconds,
        compute_seconds=compute,
        exposed_communication_seconds=max(seconds - compute, 0.0),
    )
    return dataclasses.replace(plan, predicted=predicted, reason=f"{reason}.")


def _any_cluster(ranks: int) -> Cluster:
    """Return ranks on one machine of no particular speed, to predict memory alone."""
    device = Device("any", 1 << 60, {"float32": 1e11}, 1e10, 2e-6)
    link = Link(latency_seconds=1e-4, bandwidth=1e9)
    return Cluster("any", device=device, devices_per_node=ranks, num_nodes=1, intra=link)


def _cluster_of(request: PlanRequest, trainer: pl.Trainer) -> tuple[Cluster, Measurements | None]:
    """Return the cluster, and what measures kernels.

    The cluster is as given; else as stored, or as measured now. A collective call.
    """
    if request.cluster is not None:
        return request.cluster, None
    found = open_measurements(trainer)
    return on_every_rank(found.cluster), found


def _search_request(
    request: PlanRequest, trainer: pl.Trainer, watched: WatchedSteps, cluster: Cluster
) -> SearchRequest:
    """Return what to search on data axes; nothing of it refers to the trainer."""
    costs = RunCosts(
        watched.optimizers.profile(op_overhead_seconds=cluster.device.op_overhead_seconds),
        cluster,
        watched.kernel_seconds,
    )
    # Times in place belong to this machine.
    if request.cluster is not None:  # of other machines, perhaps
        profile = dataclasses.replace(costs.optimizer, seconds_per_element={})
        costs = dataclasses.replace(costs, optimizer=profile, kernel_seconds={})
    wanted = search_request(request, trainer, watched.graph, costs)
    return dataclasses.replace(wanted, in_place=request.saves_memory)


def _search(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    search: SearchRequest,
    watched: WatchedSteps,
    *,
    kernels: dict[KernelKey, float] | None,
    why_not: str | None,
) -> Planning | list[OpGraph]:
    """Search, and choose; or return the graphs whose kernels are wanted (`search_with_axes`).

    Steps are captured for tensor axes and stages in a copy of the process alone, and only if the
    watched steps changed nothing but tensors: such plans run a rank's step with batches of other
    ranks too.
    """
    # Such plans run a rank's step with batches of other ranks too.
    if why_not is None and watched.change is not None:
        why_not = f"training_step may not run for other ranks: {watched.change}"
    ddp_seconds = watched.step_seconds if request.cluster is None else None
    with _at_most(_CAPTURE_SECONDS) if why_not is None else nullcontext():
        return search_with_axes(
            request,
            trainer,
            batch,
            search,
            kernels=kernels,
            why_not=why_not,
            as_measured=lambda found: (
                found if ddp_seconds is None else _as_measured(found, ddp_seconds)
            ),
        )


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer in this process.

    A step may wait for others; the process has nothing else to do.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"a step on fake tensors has not ended within {seconds:.0f} s")

    # This is a forked process: nobody else uses the signal.
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _as_measured(frontier: PlanFrontier, ddp_seconds: float) -> PlanFrontier:
    """Return `frontier` with times scaled so that plain DDP takes what its steps took.

    Errors of the plans are alike.
    """
    # The same plan as the steps that were timed.
    plain = [p for p in frontier.candidates if _is_plain(p.plan)]
    if not plain or plain[0].step_seconds <= 0:
        return frontier
    factor = ddp_seconds / plain[0].step_seconds

    def scaled(point: PlanPoint) -> PlanPoint:
        plan, predicted = point.plan, point.plan.predicted
        if predicted is not None:
            times = ("step_seconds", "compute_seconds", "exposed_communication_seconds")
            new = dataclasses.replace(
                predicted, **{name: factor * getattr(predicted, name) for name in times}
            )
            plan = dataclasses.replace(plan, predicted=new)
        return dataclasses.replace(point, step_seconds=factor * point.step_seconds, plan=plan)

    return dataclasses.replace(
        frontier,
        points=tuple(map(scaled, frontier.points)),
        uniform=tuple(map(scaled, frontier.uniform)),
    )


def _is_plain(plan: ParallelPlan) -> bool:
    blocks = (block.config for block in plan.blocks)
    is_ddp = all(config.storage.level == 0 and not config.recompute for config in blocks)
    return (
        is_ddp
        and len(plan.mesh.axes) == 1
        and plan.gradient_exchange is None
        and plan.local_steps is None
        and plan.schedule is None
    )
