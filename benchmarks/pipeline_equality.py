"""Loss, gradients and parameters after an update of pipelines against one process that runs the
same microbatches.

python -m benchmarks.pipeline_equality                       # groups of 2, 3, 4 and 8 ranks on gloo
python -m benchmarks.pipeline_equality --only zbv            # these rows alone, put into the table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine
from benchmarks.equality_runs import (
    Comparison,
    Differences,
    Outcome,
    compare_all,
    differences,
    largest,
    optimizer_of,
    read_options,
)
from benchmarks.equality_tables import cell, commit, count_cells, reasons, table
from benchmarks.pipeline_equality_models import MODELS
from benchmarks.pipeline_equality_plans import PLANS, PipelinePlan
from benchmarks.tensor_equality_models import Model, made
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example

CPU, SEED = torch.device("cpu"), 7


@dataclass(frozen=True)
class Step(Outcome):
    """An `Outcome` with the buffers after the step."""

    buffers: dict[str, Tensor]


def one_process(model: Model, plan: PipelinePlan) -> Step:
    """Return a step of one process on all microbatches, one after another."""
    module = made(model, seed=0)
    optimizer = optimizer_of(module)
    parts = plan.mesh.data_parallel_size * plan.microbatches
    torch.manual_seed(SEED)
    loss = 0.0
    for part in zip(*(tensor.chunk(parts) for tensor in model.batch()), strict=True):
        of_part = module(part) / parts
        of_part.backward()
        loss += of_part.item()
    optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return Step(loss, gradients, parameters, dict(module.named_buffers()))


def run_plan(rank: int, model: Model, plan: PipelinePlan) -> Step:
    """Return the same step under the plan, whole on rank 0 only. A collective call."""
    module = made(model, seed=rank)  # rank 0's parameters count
    names = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    engine = Engine(plan.of(model), module, device=CPU)
    place, parts = plan.mesh.data_rank(rank), plan.mesh.data_parallel_size
    own = [tensor.chunk(parts)[place].chunk(plan.microbatches) for tensor in model.batch()]
    engine.apply(example=Example(_loss_of, next(zip(*own, strict=True))))
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    torch.manual_seed(SEED)
    mean = engine.run_step(list(zip(*own, strict=True)), _loss_of).mean()
    dist.all_reduce(mean)
    optimizer.step()
    gradients = _gathered_gradients(engine, module, names)
    state = engine.module_state()
    parameters = {name: state[name].clone() for name in names if name in state}
    of_buffers = {name: state[name].clone() for name in buffers if name in state}
    engine.release()
    engine.close()
    return Step(float(mean) / dist.get_world_size(), gradients, parameters, of_buffers)


def _loss_of(root: nn.Module, part: Any) -> Tensor:
    loss: Tensor = root(part)
    return loss


def _gathered_gradients(
    engine: Engine, module: nn.Module, names: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients of all ranks, of which several may have the same one: then it has to be the
    same. A collective call.
    """
    now, split = dict(module.named_parameters()), engine._applied.split_names()
    # Slices are joined by the ranks of a tensor group, in order of names, the first of which
    # returns the whole tensor.
    found = {name: now[name].grad for name in names if now[name].grad is not None}
    whole = _joined(found, split)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, whole)
    gradients: dict[str, Tensor] = {}
    for of_rank in gathered:
        for name, value in of_rank.items():
            if not torch.equal(gradients.setdefault(name, value), value):
                raise RuntimeError(f"ranks have different gradients of {name}")
    return gradients


def _joined(found: Mapping[str, Any], split: Mapping[str, Any]) -> dict[str, Tensor]:
    if not split:
        return {name: value.detach().clone() for name, value in found.items()}
    whole = {}
    for name, value in found.items():
        joined = split[name].whole(value) if name in split else value
        whole[name] = joined.detach().clone()
    return whole


def against_one_process(found: Step, model: Model, plan: PipelinePlan) -> Differences:
    """Return each difference and what it may be; of buffers where one process sees the same
    microbatches in the same order.
    """
    expected = one_process(model, plan)
    limits = {
        "loss": 0.1 * plan.tolerance,
        "gradients": plan.tolerance,
        "parameters": plan.tolerance,
    }
    compared = {
        quantity: (value, limits[quantity])
        for quantity, value in differences(found, expected).items()
    }
    recomputes = "+" in plan.storage  # which updates statistics twice, as torch's checkpoints do
    # those that are saved
    if plan.mesh.data_parallel_size == 1 and found.buffers and not recomputes:
        values = {name: expected.buffers[name].float() for name in found.buffers}
        ours = {name: each.float() for name, each in found.buffers.items()}
        compared["buffers"] = largest(ours, values, 1e-3), plan.tolerance
    return compared


def row(plan: PipelinePlan, names: Sequence[str], found: Mapping[tuple[str, str], Any]) -> str:
    """Return the row of `plan`."""
    cells = " | ".join(cell(found.get((plan.name, name))) for name in names)
    return (
        f"| {plan.name} | {plan.num_stages} | {plan.mesh.size} | {plan.microbatches} | {cells} | "
        f"{commit()} |"
    )


COMPARISON = Comparison(PLANS, MODELS, run_plan, against_one_process, row)
LEAD = ("schedule, ranks of the pipeline", "stages", "ranks", "microbatches")


def main() -> None:
    """Run everything, or what is named, and write the table."""
    options = read_options(__doc__, models=MODELS, out=RESULTS / "pipeline_equality.md")
    compared = compare_all(COMPARISON, options)
    within, refused, cells = count_cells(compared.rows, len(options.models))
    options.out.write_text(
        f"""# Pipelines against one process

{machine()}

`python -m benchmarks.pipeline_equality`, {compared.took}: one step (forward, backward, AdamW in two
groups) of 24 samples in each plan's microbatches, and of one process that takes the same
microbatches one after another. In a cell: the largest difference of the loss, of all gradients, of
all parameters after the update and, without data axis and recomputation (which updates them twice,
as in one process), of the buffers: running statistics of batches. The loss is relative to itself,
the others to the largest element of their tensor; gradients that are zero but for rounding to a
thousandth of the largest gradient. Float32; within 1e-5, the loss within 1e-6. Bold: above. GPT and
T5 have tied embeddings, on first and last stage; the decoder of T5 reads the encoder's output on
every stage; the skips of the U-Net go over cuts. Models have eight blocks in a row (the U-Net
nine), dealt out equally.

Not compared:

{reasons(compared.refusals)}

{within} of {cells - refused} cells within their tolerance.

{table(compared.rows, options.models, lead=LEAD)}
"""
    )


if __name__ == "__main__":
    main()
