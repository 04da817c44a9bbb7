"""Loss, gradients and parameters after an update under each plan, against one process: every plan,
every model.

python -m benchmarks.tensor_equality  # groups of 2, 4 and 8 ranks on gloo; about five minutes
python -m benchmarks.tensor_equality --only tensor_2d context  # these rows alone, into the table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
    optimizer_of,
    read_options,
)
from benchmarks.equality_tables import cell, commit, count_cells, reasons, table
from benchmarks.tensor_equality_models import MODELS, Model, made
from benchmarks.tensor_equality_plans import PLANS, Plan
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.engine import Engine
from lightning_topt.execution.gathered_state import gather_module_state
from lightning_topt.techniques.run_options import RunOptions

CPU = torch.device("cpu")


def _precision(plan: Plan) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if plan.bfloat16 else nullcontext()


def one_process(model: Model, plan: Plan) -> Outcome:
    """Return a step of one process on the whole batch; on its parts one after another where the
    loss is of parts.
    """
    module = made(model, seed=0)
    optimizer = optimizer_of(module)
    parts = plan.mesh.data_parallel_size * plan.microbatches if model.by_part else 1
    for _ in range(plan.steps):
        optimizer.zero_grad()
        loss = 0.0
        for part in zip(*(tensor.chunk(parts) for tensor in model.batch()), strict=True):
            with _precision(plan):
                of_part = module(part) / parts
            of_part.backward()
            loss += of_part.item()
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip)
        optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Outcome(loss, gradients, {name: p.detach() for name, p in module.named_parameters()})


def run_plan(rank: int, model: Model, plan: Plan) -> Outcome:
    """Return the same step under the plan; gradients and parameters are whole on rank 0 only. A
    collective call.
    """
    module = made(model, seed=rank)  # rank 0's parameters count
    names = [name for name, _ in module.named_parameters()]
    world = dist.get_world_size()
    options = RunOptions(topology=Topology(plan.nodes, world // plan.nodes, rank))
    engine = Engine(plan.of(model), module, device=CPU, options=options)
    engine.apply()
    optimizer = optimizer_of(module)
    engine.attach_optimizers([optimizer])
    place, parts = plan.mesh.data_rank(rank), plan.mesh.data_parallel_size
    own = [tensor.chunk(parts)[place].chunk(plan.microbatches) for tensor in model.batch()]

    def loss_of(root: nn.Module, part: Any) -> Tensor:
        with _precision(plan):
            loss: Tensor = root(part)
        return loss

    for _ in range(plan.steps):
        optimizer.zero_grad()
        mean = engine.run_step(list(zip(*own, strict=True)), loss_of).mean()
        dist.all_reduce(mean)
        if plan.clip is not None:
            engine.clip_norm(list(module.parameters()), plan.clip)
        optimizer.step()
    now = dict(module.named_parameters())
    found = {name: now[name].grad for name in names if now[name].grad is not None}
    gradients = {
        name: value.clone()
        for name, value in gather_module_state(found, engine._applied.split_names()).items()
    }
    state = engine.module_state()
    parameters = {name: state[name].clone() for name in names if name in state}
    engine.release()
    engine.close()
    return Outcome(float(mean) / world, gradients, parameters)


def against_one_process(found: Outcome, model: Model, plan: Plan) -> Differences:
    """Return each difference and what it may be.

    In bfloat16: twice what one process in it differs by from one in float32, since both that are
    compared round so; at least the distance of two numbers.
    """
    expected = one_process(model, plan)
    limits = {
        "loss": 0.1 * plan.tolerance,
        "gradients": plan.tolerance,
        "parameters": plan.tolerance,
    }
    if plan.bfloat16:
        rounding = differences(expected, one_process(model, replace(plan, bfloat16=False)))
        limits = {quantity: max(2 * value, 2**-8) for quantity, value in rounding.items()}
    return {
        quantity: (value, limits[quantity])
        for quantity, value in differences(found, expected).items()
    }


def row(plan: Plan, names: Sequence[str], found: Mapping[tuple[str, str], Any]) -> str:
    """Return the row of `plan`."""
    cells = [cell(found.get((plan.name, name)), shows_limits=plan.bfloat16) for name in names]
    tolerance = "" if plan.bfloat16 else f"{plan.tolerance:g}"
    return f"| {plan.name} | {plan.mesh.size} | {tolerance} | {' | '.join(cells)} | {commit()} |"


COMPARISON = Comparison(PLANS, MODELS, run_plan, against_one_process, row)


def main() -> None:
    """Run everything, or what is named, and write the table."""
    options = read_options(__doc__, models=MODELS, out=RESULTS / "tensor_equality.md")
    compared = compare_all(COMPARISON, options)
    within, refused, cells = count_cells(compared.rows, len(options.models))
    options.out.write_text(
        f"""# Plans against one process

{machine()}

`python -m benchmarks.tensor_equality`, {compared.took}: one step (forward, backward, AdamW in two
parameter groups) of 16 samples under each plan, and of one process; of a compressed exchange the
second step, since its first is dense. In a cell: the largest difference of the loss, of all
gradients, and of all parameters after the update. The loss is relative to itself, the others to the
largest element of their tensor; gradients that are zero but for rounding (of the biases of keys) to
a thousandth of the largest gradient. Float32; within 1e-5 where sums are only reordered (the loss:
a tenth of it), 3e-3 where the network has 16 bits; of operators in bfloat16 twice what one process
in bfloat16 differs by from one in float32 (in brackets). Bold: above. Statistics of batches in the
convolutional net are those of a rank's own part of the batch, as under `ddp`: one process took the
parts one after another. Embeddings of GPT and T5 are tied. Weight averaging (EMA) keeps parameters
whole and is refused with tensor axes (tests/plugins/test_tensor_care.py). The layouts
`tensor_sequence`, `context`, `tensor_2d` and `tensor_3d` are those of the presets of these names.
Where a model cannot run so, its user is told why:

{reasons(compared.refusals)}

{within} of {cells - refused} cells within their tolerance; {refused} refused.

{table(compared.rows, options.models)}
"""
    )


if __name__ == "__main__":
    main()
