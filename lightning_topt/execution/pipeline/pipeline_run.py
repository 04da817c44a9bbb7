"""A plan with stages on one rank: what it keeps of the model, and the steps that it runs.

    run = PipelineRun(plan, module, groups=groups, device=device, example=Example(step, batch))
    run.follow(applied)                           # techniques, on the parameters that are kept
    losses = run.run_step(microbatches, step, weights=weights)     # (n,), on every rank
    run.clip_norm(parameters, 1.0)
    outputs = run.evaluate(batch, step)           # on all ranks of the pipeline
    run.release()                                 # every rank has all parameters again

A step of n microbatches: `StepFlows` traces the user's step once, `StepPrograms` gives this rank's
actions with the messages around them, `run_actions` runs them one after the other, and gradients
are averaged over data ranks as soon as a stage has ended. The engine makes the run before it
applies techniques. Below it is what becomes of the gradients of stages. As under DDP every data
rank has the same ones after an exchange:

    StageExchanges         all groups of a rank: each stage's gradients as soon as it has ended, and
                           those of parameters that several ranks of a pipeline keep
    GradientExchange       one group's gradients, large ones where they are, small ones together
    StageNorms             the norm over the ranks of a pipeline, and clipping by it
    exchange_between_rows  what data ranks exchange by the plan's method
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from lightning_topt.communication.collectives import State as ExchangeState
from lightning_topt.communication.collectives import values_of_group
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.value_exchange import value_of_rank
from lightning_topt.execution.pipeline.p2p import RankLinks
from lightning_topt.execution.pipeline.stage_layout import (
    Crossings,
    Pair,
    PipelineGroups,
    StageBuffers,
    StageFlow,
    StageLayout,
    Step,
    StepFlows,
    average_over_data_ranks,
    loss_of_step,
    place_parameters,
)
from lightning_topt.execution.pipeline.stage_pass import OneStageOrder, RandomOrder
from lightning_topt.execution.pipeline.step_program import (
    MessageExchange,
    StepPrograms,
    run_actions,
    share_losses,
)
from lightning_topt.execution.states import load_module_state, module_state
from lightning_topt.optim.clipping import squared_norm
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.technique import Applied, AppliedTechniques, RunOptions
from lightning_topt.techniques.tensor_parallel.random_states import draw_alike
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

LARGE_BYTES = 1 << 20  # from here on a copy costs more than a message of its own


class Example(NamedTuple):
    """A step, ``step(module, microbatch)``, and a microbatch to try it on.

    From it follows what each stage needs.
    """

    step: Step
    microbatch: Any


class PipelineRun:
    """The stages of `plan` that this rank runs of `module`, on `device`, with its `groups`.

    All ranks get the parameters and buffers of rank 0; each keeps the parameters that its stages
    need. Making it is a collective call, as all methods are but `abort`.

    Raises:
        ValueError: for a schedule that does not exist or take these sizes.
        CaptureError: a ValueError, for a step that cannot be cut like this.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        module: nn.Module,
        *,
        groups: PipelineGroups,
        device: torch.device,
        example: Example,
    ) -> None:
        self.plan, self.module, self.groups, self.device = plan, module, groups, device
        # None unless the schedule is asynchronous.
        self.lag_per_hop = CONTINUOUS_SCHEDULES.get(plan.schedule or "")
        self._programs = StepPrograms(plan)
        self.schedule = self._programs.schedule(plan.num_microbatches, backward=True)
        if not plan.own_batches:
            draw_alike(self.groups.pipeline_group)  # functional operators draw on every rank
        # Trace the example: it says which parameters each stage needs.
        names = [[block.block for block in stage.blocks if block.block] for stage in plan.stages]
        order = RandomOrder() if self.lag_per_hop is None else OneStageOrder()
        # An asynchronous run changes parameters between a microbatch's passes.
        shares_casts = self.lag_per_hop is None
        self.flows = StepFlows(module, names, device=device, order=order, shares_casts=shares_casts)
        (first,) = self.flows.of(example.step, [example.microbatch])
        ranks = self.schedule.rank_of_stage
        # buffers that steps change, and those of them that steps also compute with: a microbatch
        # depends on the one before through these
        self.carried_buffers = sorted(first.flow.carried)
        self.layout = StageLayout.of_flow(
            first.flow, first.stage_of_call, module, rank_of_stage=ranks
        )
        self.changed_buffers = sorted(self.layout.buffers)
        # Connect, and keep the parameters that the stages of this rank need.
        is_asynchronous = self.lag_per_hop is not None
        pairs = linked_ranks(self.layout, first.crossings, is_asynchronous=is_asynchronous)
        self.links = RankLinks(
            groups, _of_every_rank(pairs), device=device, names_stages=is_asynchronous
        )
        self._peers = MessageExchange(self.links)
        self._originals = dict(module.named_parameters())
        self.non_local = place_parameters(module, self.layout, self.groups, device=device)
        self.buffers = StageBuffers(module, self.layout, self.groups)
        self._averaged = average_over_data_ranks(module, self.groups)
        self._synchronizes, self._failed = True, False
        self.is_drained: Callable[[], bool] = lambda: True  # an asynchronous run sets it
        # Known once techniques have been applied, see `follow`.
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._split: Callable[[], Mapping[str, SplitTensor]] = dict
        self.exchanges: StageExchanges
        self.norms: StageNorms

    def follow(self, applied: AppliedTechniques) -> None:
        """Follow what techniques did to the parameters of this rank, before the first step."""
        self.around = applied.around_step if applied.split else nullcontext
        # stages on slices compute in full tensors where they meet others
        self._split, self.flows.whole = applied.split_names, applied.whole
        self.flows.unsharded = applied.joined
        # Present parameters: techniques may have replaced some.
        named, by_first = dict(self.module.named_parameters()), self.lag_per_hop is not None
        self.exchanges = StageExchanges(named, self.layout, self.groups, by_first=by_first)
        self.norms = StageNorms(
            self.groups, self.device, self.exchanges.counted_elsewhere, applied.slices_of
        )

    def kept_of(
        self, named: Mapping[str, Mapping[str, nn.Parameter]]
    ) -> dict[str, dict[str, nn.Parameter]]:
        """Return those of `named`, parameters by block and name, that this rank keeps."""
        kept = self.own_parameters()
        return {
            block: {name: p for name, p in of_block.items() if p in kept}
            for block, of_block in named.items()
        }

    def own_parameters(self) -> frozenset[nn.Parameter]:
        """Return the parameters that this rank keeps."""
        names = self.non_local.names
        return frozenset(p for name, p in self._originals.items() if name not in names)

    def updated_parameters(self) -> frozenset[nn.Parameter]:
        """Return those of them that optimizers step on this rank.

        All, unless the pipeline is asynchronous: an earlier stage updates those that it shares.
        """
        if self.lag_per_hop is None:
            return self.own_parameters()
        owners = self.non_local.owners
        return frozenset(
            p
            for name, p in self._originals.items()
            if owners.get(name, self.groups.rank) == self.groups.rank
        )

    def owners(self) -> dict[Tensor, int]:
        """Return the rank of the pipeline whose state of each parameter is saved."""
        return {p: self.non_local.owners.get(name, 0) for name, p in self._originals.items()}

    # ---- steps -----------------------------------------------------------------------------------

    def run_step(
        self, microbatches: Sequence[object], step: Step, *, weights: Sequence[float]
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the losses (n,), on every rank.

        Args:
            microbatches: n of them.
            step: returns the loss of a microbatch.
            weights: of the losses in the sum that gradients are of.
        """
        if self.lag_per_hop is not None:
            raise ValueError(
                f"the schedule {self.plan.schedule!r} has no steps: minibatches go in by "
                "`engine.continuous.advance`"
            )
        count = len(microbatches)
        if len(weights) != count:
            raise ValueError(
                f"weights are one for each of the {count} microbatches, got {len(weights)}"
            )
        flows = self.flows.of(step, microbatches)
        # The step of this rank: buffers as on the first data rank, actions, losses to all ranks.
        self.buffers.begin_step(flows)
        results = self._run(microbatches, step, flows, factors=weights)
        losses = torch.ones(count, device=self.device)  # (n,)
        for index, loss in results.items():
            losses[index] = loss.detach()
        # From the last stage to all.
        share_losses(losses, self.groups, source=self.layout.rank_of_stage[-1])
        if self._synchronizes:
            self.exchanges.finish()
        return losses

    def evaluate(self, batch: object, step: Step) -> Any:
        """Run ``step(module, batch)`` forward; return what the last stage returns on all ranks."""
        self.check_drained()
        # Forward passes alone; the last stage's result goes to all ranks.
        with torch.no_grad():
            results = self._run([batch], step, self.flows.of(step, [batch]), factors=None)
            return value_of_rank(
                results.get(0),
                self.groups.pipeline_group,
                place=self.layout.rank_of_stage[-1],
                device=self.device,
                host_group=self.groups.host_group,
            )

    def check_drained(self) -> None:
        """Raise AssertionError while minibatches of an asynchronous run are in flight.

        Ranks are at different ones then.
        """
        assert self.is_drained(), "minibatches are in flight: drain the run first"

    def check_runs(self) -> None:
        """Raise RuntimeError after a step that has failed: no further one can be run."""
        if self._failed:
            raise RuntimeError(
                "a step of this pipeline has failed, and its ranks are out of step: start the run "
                "again"
            )

    def _run(
        self,
        microbatches: Sequence[object],
        step: Step,
        flows: Sequence[StageFlow],
        *,
        factors: Sequence[float] | None,
    ) -> dict[int, Any]:
        # Run this rank's actions; return the last stage's results by microbatch, elsewhere none.
        # Without `factors` of the losses there is no backward pass.
        self.check_runs()
        # the same on all ranks, so that each message that one sends another one awaits
        schedule = self._programs.schedule(len(microbatches), backward=factors is not None)
        program = self._programs.program(
            schedule, flows, rank=self.groups.rank, sends_wait=self.links.sends_wait
        )
        passes = [flow.passes for flow in flows]
        try:
            return run_actions(
                program,
                passes,
                self._peers,
                [partial(step, self.module, microbatch) for microbatch in microbatches],
                around=self.around,
                last_stage=schedule.num_stages - 1,
                loss_of=None
                if factors is None
                else lambda index, result: loss_of_step(result) * factors[index],
                ended=self.exchanges.stage_ended
                if self._synchronizes and factors is not None
                else lambda stage: None,
            )
        except BaseException:
            # Other ranks are elsewhere in the program now: no further step can be run.
            self.abort()
            self._peers.forget()
            for of_microbatch in passes:
                of_microbatch.forget()
            self.exchanges.forget()
            raise

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within it gradients are accumulated, and their exchange is left to a later step."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale all stages' gradients to a norm of at most `max_norm`; return the norm before."""
        if self.lag_per_hop is not None:
            raise ValueError(
                f"stages are at different minibatches under {self.plan.schedule!r}: "
                "`engine.continuous.clip_norm`"
            )
        return self.norms.clip(parameters, max_norm)

    @contextmanager
    def unsharded(self) -> Generator[None]:
        """Let all ranks have all parameters within, and the buffers that stages have changed."""
        self.sync_buffers()
        with self.non_local.unsharded():
            yield

    def sync_buffers(self) -> None:
        """Give all ranks the buffers that stages have changed."""
        self.check_drained()
        self.buffers.sync()

    # ---- states ----------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the full state of the module on rank 0, an empty one elsewhere."""
        self.sync_buffers()
        # Slices are gathered on every rank, stages on the first rank of its pipeline alone.
        with self.flows.unsharded():
            if not self.groups.saves:
                return {}
            with self.non_local.gathered_on_first():
                return self.module.state_dict() if self.groups.rank == 0 else {}

    def own_module_state(self) -> dict[str, Any]:
        """Return this rank's part of the module's state, slices of it where it is cut."""
        self.sync_buffers()
        # All names of parameters that this rank does not keep.
        parameters = self.non_local.parameters
        # tied parameters have several names, of which all are left out
        others = {id(parameters[name]) for name in self.non_local.names}
        named = self.module.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if id(parameter) in others}
        state = module_state(self.module, self._split(), full=False)
        return {name: value for name, value in state.items() if name not in names}

    def load_module_state(self, state: Mapping[str, object], *, strict: bool) -> None:
        """Load a full state, or a stored one, each rank its part."""
        self.check_drained()
        with self.non_local.skipped_by_loading():
            load_module_state(self.module, state, self._split() or None, strict=strict)

    def release(self) -> None:
        """Restore all stages' parameters on every rank."""
        self.sync_buffers()
        self.non_local.restore()
        for each, group in self._averaged:
            each.process_group = group
        self.groups.destroy()

    def abort(self) -> None:
        """End what is under way after an error, on this rank alone; no further step can be run."""
        self._failed = True
        self.groups.abort()


def linked_ranks(
    layout: StageLayout, crossings: Crossings, *, is_asynchronous: bool
) -> frozenset[Pair]:
    """Return the ranks of a pipeline (sender, receiver) that exchange something in steps.

    Gradients come back of tensors that have some now. Where parameters are frozen now and trained
    later on, they come without a link.
    """
    ranks = layout.rank_of_stage
    pairs, both = set[Pair](), set[Pair]()
    for ref, targets in crossings.targets.items():
        found = {(ranks[crossings.stage_of_call[ref.call]], ranks[target]) for target in targets}
        pairs |= found
        both |= found if crossings.specs[ref].requires_grad else set()
    if is_asynchronous:  # stages pass on norms and values, and parameters that they share
        both |= set(pairwise(ranks))
        for name in frozenset[str]().union(*layout.parameters):
            first, *others = layout.holders(name)
            both |= {(first, other) for other in others}
    pairs |= both | {(receiver, sender) for sender, receiver in both}
    return frozenset((sender, receiver) for sender, receiver in pairs if sender != receiver)


def _of_every_rank(pairs: frozenset[Pair]) -> frozenset[Pair]:
    # Return the pairs of all ranks of the run together. Collective.
    # Each replica of the pipeline traced its own microbatch, and what crosses may depend on values.
    return frozenset(pair for own in values_of_group(pairs) for pair in own)


# ---- gradients: averaged over data ranks ---------------------------------------------------------


class StageExchanges:
    """The gradient exchanges of this rank.

    Parameters that several ranks of a pipeline keep are summed over these ranks as well, once all
    stages have ended. All but the first of the ranks have them in `counted_elsewhere`.

    Args:
        parameters: all of the module, by name.
        layout: says what each stage needs.
        groups: this rank's.
        by_first: each rank has one stage, and the first of those that share a parameter has the
            gradients of all (see `SharedParameters`).

    Making it is a collective call of all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: StageLayout,
        groups: PipelineGroups,
        *,
        by_first: bool = False,
    ) -> None:
        # Parameters that this rank alone holds, by the stages that need them; those that several
        # ranks hold, by these ranks.
        by_stages: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        by_holders: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            holders = tuple(sorted(layout.holders(name)))
            if by_first and holders and holders[0] == groups.rank:
                by_stages.setdefault((groups.rank,), {})[name] = parameter
            elif len(holders) > 1:
                by_holders.setdefault(holders, {})[name] = parameter
            elif holders == (groups.rank,):
                by_stages.setdefault(layout.stages_of(name), {})[name] = parameter
        # With `by_first` shared gradients come by messages, and no group is needed.
        sharing = {} if by_first else groups.sharing(by_holders)
        parts, data = groups.mesh.data_parallel_size, groups.data
        self._by_stages = {
            stages: GradientExchange(named, group=data, parts=parts)
            for stages, named in by_stages.items()
            if data is not None
        }
        self._shared = [
            GradientExchange(by_holders[holders], group=group, parts=parts)
            for holders, group in sharing.items()
        ]
        others = (named for holders, named in by_holders.items() if holders[0] != groups.rank)
        self.counted_elsewhere = frozenset(
            parameter for named in others for parameter in named.values()
        )
        # Summed over ranks of a pipeline, here or on others: by `finish`, as they are.
        self.shared = frozenset(p for named in by_holders.values() for p in named.values())
        # In place of averaging the gradients of this rank's own stages as they are.
        self.instead: Callable[[], None] | None = None
        self._ended: set[int] = set()
        self._started: list[GradientExchange] = []

    def stage_ended(self, stage: int) -> None:
        """Begin to exchange what this stage was the last to add to.

        A collective call of the stage's data ranks.
        """
        self._ended.add(stage)
        if self.instead is not None:
            return  # all together, by `finish`
        for stages, exchange in self._by_stages.items():
            # several stages of this rank may use a parameter: its gradient is whole after the last
            # one
            if stage in stages and self._ended.issuperset(stages):
                exchange.start()
                self._started.append(exchange)

    def average(self, stage: int) -> None:
        """Average the gradients of a rank's one stage, and wait for it.

        A collective call of the stage's data ranks.
        """
        if self.instead is not None:
            self.instead()
            return
        self.stage_ended(stage)
        for exchange in self._started:
            exchange.wait()
        self.forget()

    def finish(self) -> None:
        """Exchange what is shared, and wait for all. A collective call of all ranks."""
        if self.instead is not None:
            self.instead()
        # shared ones last: ranks of several stages meet in them, when all have run their passes
        for exchange in self._shared:
            exchange.start()
        for exchange in (*self._started, *self._shared):
            exchange.wait()
        self.forget()

    def forget(self) -> None:
        """Start afresh with the next step."""
        self._ended, self._started = set(), []


class GradientExchange:
    """Sums the gradients of `parameters` (by name) over `group` and divides by `parts`.

    A parameter without a gradient on some ranks counts as zeros; one without any on all of them
    stays without. In the first step, and when other parameters are trained, all are asked for; from
    then on those in each step that had none.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, group: dist.ProcessGroup, parts: int
    ) -> None:
        self._parameters, self._group, self._parts = dict(parameters), group, parts
        self._agreed: dict[tuple[bool, ...], frozenset[str]] = {}
        self._works: list[tuple[Any, list[Tensor], Tensor | None]] = []

    @torch.no_grad()
    def start(self) -> None:
        """Begin. A collective call of the group, as all methods are."""
        gradients = self._gradients()
        # The mean: divide first.
        if self._parts > 1 and gradients:
            values = [each._values() if each.is_sparse else each for each in gradients]
            torch._foreach_mul_(values, 1 / self._parts)
        # Large gradients are reduced in place, small ones in one tensor of each dtype.
        small: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            if gradient.is_sparse or (gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous()):
                self._works.append(
                    (dist.all_reduce(gradient, group=self._group, async_op=True), [], None)
                )
            else:
                small.setdefault(gradient.dtype, []).append(gradient)
        for alike in small.values():
            # One message of (n,) for all small gradients of a dtype.
            packed = torch.cat([gradient.reshape(-1) for gradient in alike])
            self._works.append(
                (dist.all_reduce(packed, group=self._group, async_op=True), alike, packed)
            )

    @torch.no_grad()
    def wait(self) -> None:
        """Block until the gradients are there."""
        works, self._works = self._works, []
        for work, gradients, packed in works:
            work.wait()
            if packed is not None:
                # Copy the sums back to where the gradients are.
                parts = torch.split(packed, [gradient.numel() for gradient in gradients])
                torch._foreach_copy_(
                    gradients, [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)]
                )

    def _gradients(self) -> list[Tensor]:
        # The gradients to exchange, the same on all ranks; missing ones become zeros
        # what was agreed on holds as long as the same parameters are trained
        trained = tuple(parameter.requires_grad for parameter in self._parameters.values())
        is_known = trained in self._agreed
        if not is_known:
            named = zip(self._parameters, trained, strict=True)
            self._agreed[trained] = self._having([name for name, is_trained in named if is_trained])
        agreed, found = self._agreed[trained], []
        # A parameter that was without a gradient so far may have one now, on some rank.
        asked = [
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and name not in agreed
        ]
        late = self._having(asked) if is_known else frozenset()
        for name, parameter in self._parameters.items():
            if name in agreed or name in late:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def _having(self, names: Sequence[str]) -> frozenset[str]:
        # Those that have a gradient on some rank. A collective call of equal `names`.
        if not names:
            return frozenset()
        own = [self._parameters[name] for name in names]
        # (names,), 1 where this rank has a gradient.
        has = torch.tensor([float(p.grad is not None) for p in own], device=own[0].device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        return frozenset(name for name, one in zip(names, has.tolist(), strict=True) if one)


# ---- norms over all stages -----------------------------------------------------------------------


@dataclass(frozen=True)
class StageNorms:
    """Norms of gradients over the ranks of a pipeline, on `device`.

    A parameter that several stages share counts once: `counted_elsewhere` are those that another
    rank counts. `slices_of` says into how many slices a parameter is cut along tensor axes. Methods
    are collective calls of all ranks.
    """

    groups: PipelineGroups
    device: torch.device
    counted_elsewhere: Collection[Tensor]
    slices_of: Callable[[Tensor], int]

    @torch.no_grad()
    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients as torch's ``clip_grad_norm_`` does, and return the norm before, ().

        The norm is that of the full gradients, in another order of summation.
        """
        given = list(parameters)
        square = self._of_rank(given)
        dist.all_reduce(square, group=self.groups.pipeline_group)
        total = square**0.5
        clip_grads_with_norm_(given, max_norm, total)
        return total

    @torch.no_grad()
    def clip_with(
        self, parameters: Iterable[Tensor], max_norm: float, *, others: Tensor, own: int
    ) -> tuple[Tensor, Tensor]:
        """Scale this rank's gradients by the norm over all ranks, those of others being known.

        Args:
            parameters: of this rank.
            max_norm: the most that the norm may be.
            others: squares of the norms of the ranks of the pipeline, (ranks,).
            own: this rank's place in `others`.

        Returns:
            The norm before, and the square of this rank's norm. A collective call of the ranks
            along tensor axes.
        """
        given, squares = list(parameters), others.clone()
        # This rank's norm is new, those of others are as they were sent.
        squares[own] = self._of_rank(given)
        total = (squares.sum() ** 0.5).to(torch.float32)
        clip_grads_with_norm_(given, max_norm, total)
        return total, squares[own]

    def _of_rank(self, parameters: Iterable[Tensor]) -> Tensor:
        # the square of the norm of what this rank counts
        return squared_norm(
            (p for p in parameters if p not in self.counted_elsewhere),
            device=self.device,
            slices=self.slices_of,
            group=self.groups.tensor,
        )


# ---- gradients by a method of the plan -----------------------------------------------------------


def exchange_between_rows(run: PipelineRun, options: RunOptions) -> Applied | None:
    """Let data ranks exchange the gradients of their stages by the plan's method; None without one.

    The ranks that run the same stage, one of each pipeline, form a group, which exchanges a stage's
    gradients once it has all of an update. A collective call.
    """
    method = run.plan.gradient_exchange
    if method is None:
        return None
    # among the data ranks of each stage: a part of the topology
    everyone = options.topology or Topology.from_environment(
        rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    # Parameters that this rank shares with other ranks of the pipeline are summed with these, as
    # they are. The others are left out by all their names, also as DDP calls the module's own.
    exchanged = run.updated_parameters() - run.exchanges.shared
    named = run.module.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in named if parameter not in exchanged]
    ignored = [*names, *(f".{name}" for name in names if "." not in name)]
    mesh = run.plan.mesh
    exchange = CompressedExchange(
        run.module,
        method,
        topology=everyone.of_part(mesh.groups_along(mesh.data_axes)),
        device=run.device,
        nonfinite=options.nonfinite,
        ignored=ignored,
        merge=lambda ranks: _merged(run, ranks),
        watch=options.watch,
    )
    run.exchanges.instead = exchange.average
    return Applied(exchange=exchange)


def _merged(run: PipelineRun, ranks: list[ExchangeState]) -> list[ExchangeState]:
    # Join the states of a pipeline's stages, for each data rank, on rank 0
    groups, found = run.groups, [ExchangeState() for _ in ranks]
    with groups.at_any_time() as group:
        for place in range(len(groups.pipeline)) if groups.saves else ():
            # Place after place of the pipeline gives the states of its data ranks.
            own = ranks if place == groups.rank else None
            states = value_of_rank(own, group, place=place, device=run.device)
            for into, state in zip(found, states, strict=True):
                for kind, tensors in state.items():
                    into.setdefault(kind, {}).update(tensors)
    return found if groups.saves and groups.rank == 0 else []
