"""Three questions before renting machines: the answer of `topt plan`, and what others cost.

    python -m benchmarks.search.worked_questions     # some minutes; all three, and the page
    python -m benchmarks.search.worked_questions 2   # the second question alone

All figures come from the cost model of the search; nothing was measured. The chosen plan is shown
beside others for the same machines, batch and run. These are plain DDP, and FSDP2 with every block
sharded (ZeRO-3). Each of them runs with and without recomputation of all blocks, and with the best
number of micro-batches that fits. The last is the plan that an expert would write by hand: a mesh,
a schedule and a number of microbatches. Its cut and what it recomputes are searched, which
flatters it.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from benchmarks.common import PUBLISHED_MODELS, RESULTS, machine
from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.basics.units import format_bytes, format_duration, format_money, format_seconds
from lightning_topt.cli.main import as_hydra_reads
from lightning_topt.cli.what_if import WhatIfOptions, read_searches, search_all
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.plan.plan_frontier import ModelFacts, PlanPoint, step_of_microbatches
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.scenarios import Estimate, choose_estimate, default_objective, estimate


@dataclass(frozen=True)
class Question:
    """A question, the words of the command that answers it, and those of an expert's plan.

    The latter are for the chosen machines.
    """

    title: str
    asked: str
    words: tuple[str, ...]
    expert: str
    expert_words: tuple[str, ...]


QUESTIONS = (
    Question(
        "Few devices",
        "Llama 3 8B, 64 sequences of 8,192 tokens per step, on one node of 8 A100: does it fit, "
        "and how fast is it?",
        ("model=llama3_8b", "cluster=a100_8x8", "device_counts=[8]", "batch_size=64"),
        "tensor 4 x data 2, recomputation as needed",
        ("mesh={data:2,tensor:4}",),
    ),
    Question(
        "Slow network",
        "GPT-2 XL on 8 nodes of 8 A100 that 25 Gb/s Ethernet joins: what can be had without "
        "InfiniBand?",
        (
            "model=gpt2_xl",
            "cluster=a100_8x8",
            "cluster.inter.bandwidth=2.5Gb/s",
            "cluster.inter.latency_seconds=30us",
            "batch_size=512",
        ),
        "pipeline 8 (a stage for each node) x data 8, 1F1B of 16 microbatches",
        ("mesh={pipeline:8,data:8}", "pipeline={schedule:1f1b,microbatches:16}"),
    ),
    Question(
        "A deadline and a budget",
        "Llama 3 70B on 300 B tokens within 20 days and 450,000: which machines, how many, for how "
        "much?",
        (
            *(
                "model=llama3_70b",
                "cluster=[a100_128x8,h100_128x8]",
                "device_counts=[256,512]",
                "batch_size=1024",
            ),
            *("work.tokens=300e9", "limits.deadline=20d", "limits.budget=450000"),
        ),
        "tensor 8 x pipeline 4 x data, interleaved 1F1B",
        ("mesh={pipeline:4,data:DATA,tensor:8}", "pipeline={schedule:interleaved}"),
    ),
)


def composed(words: Sequence[str]) -> DictConfig:
    config = compose(
        "plan", overrides=[PUBLISHED_MODELS, *as_hydra_reads(words)], return_hydra_config=True
    )
    HydraConfig.instance().set_config(config)
    return config


def answer(question: Question) -> list[str]:
    started, clock = time.process_time(), time.perf_counter()
    config = composed(question.words)
    asked = WhatIfOptions.read(config)
    searches, request = read_searches(config, asked)
    found, notes = search_all(searches, request, asked)
    estimates = [each.chosen for each in found]
    objective = asked.objective or default_objective(
        estimates, asked.limits, given=request.objective
    )
    chosen, reason = choose_estimate(estimates, objective=objective, limits=asked.limits)
    seconds = time.process_time() - started, time.perf_counter() - clock
    base = next(
        search
        for scenario, search in searches
        if (scenario.cluster.name, scenario.devices)
        == (chosen.scenario.cluster.name, chosen.scenario.devices)
    )
    rows = [("`topt plan`", chosen)]
    rows += [
        (name, baseline(base, chosen, asked, level=level))
        for name, level in (("DDP", 0), ("FSDP2 everywhere", 3))
    ]
    rows.append((f"by hand: {question.expert}", expert(question, chosen, asked)))
    lines = [
        f"## {question.title}",
        "",
        question.asked,
        "",
        "```",
        f"topt plan {' '.join(question.words)}",
        "```",
        "",
    ]
    lines += [reason, "", *table(rows, chosen), "", *(f"- {note}" for note in notes)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines.append(
        f"Captured, searched and chosen in {seconds[0]:.0f} s of CPU ({seconds[1]:.0f} s), "
        f"{len(searches)} scenario(s); peak of the process so far {format_bytes(peak)}."
    )
    return [*lines, ""]


def fits(point: PlanPoint, request: SearchRequest) -> bool:
    return point.peak_bytes * 1.05 <= request.cluster.device.memory_bytes


def baseline(
    base: SearchRequest, chosen: Estimate, asked: WhatIfOptions, *, level: int
) -> Estimate | str:
    """Return the best plan that treats all blocks alike at this level, or why there is none.

    Numbers of micro-batches vary.
    """
    scenario, facts = chosen.scenario, ModelFacts.of(base.graph, base.optimizer, base.cluster)
    best: Estimate | None = None
    least = float("inf")
    for count in (2**k for k in range(9)):
        batch = scenario.batch_size // count
        if scenario.batch_size % count or batch % scenario.devices:
            break
        mesh = data_mesh(
            scenario.devices,
            scope="intra" if scenario.devices <= base.cluster.devices_per_node else "inter",
        )
        request = dataclasses.replace(
            base, global_batch_size=batch, split=None, pipelines=None, stale=None, mesh=mesh
        )
        for point in search_plans(request).uniform:
            if {block.config.storage.level for block in point.plan.blocks if block.block} != {
                level
            }:
                continue
            least = min(least, point.peak_bytes)
            step = step_of_microbatches(point, accumulate=count, facts=facts)
            each = estimate(scenario, step, facts=facts, work=asked.work)
            if fits(point, base) and (best is None or each.step_seconds < best.step_seconds):
                best = each
    return (
        best
        or f"does not fit: at least {format_bytes(least)} of "
        f"{format_bytes(base.cluster.device.memory_bytes)}"
    )


def expert(question: Question, chosen: Estimate, asked: WhatIfOptions) -> Estimate | str:
    """What `topt plan` says of the plan that is written by hand, on the chosen machines."""
    scenario = chosen.scenario
    kept = [
        w for w in question.words if not w.startswith(("cluster=", "device_counts=", "limits."))
    ]
    data = scenario.devices // 32
    words = [
        *kept,
        f"cluster={scenario.cluster.name}",
        *(w.replace("DATA", str(data)) for w in question.expert_words),
    ]
    config = composed(words)
    own = WhatIfOptions.read(config)
    try:
        searches, request = read_searches(config, own)
        (found, *_), _ = search_all(searches, request, own)
    except ValueError as error:
        return str(error)
    return found.chosen


def table(rows: Sequence[tuple[str, Estimate | str]], chosen: Estimate) -> list[str]:
    with_run = chosen.run is not None
    names = [
        "plan",
        "step",
        "against the choice",
        "memory",
        *(["run", "money"] if with_run else []),
        "what it is",
    ]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, each in rows:
        if isinstance(each, str):
            lines.append(f"| {name} | {' | '.join([''] * (len(names) - 2))} | {each} |")
            continue
        cells = [
            name,
            format_seconds(each.step_seconds),
            f"{each.step_seconds / chosen.step_seconds:.2f} x",
        ]
        cells.append(format_bytes(each.peak_bytes))
        if with_run:
            money = "no price" if each.money is None else format_money(each.money)
            cells += ["" if each.run is None else format_duration(each.run.seconds), money]
        count = each.point.plan.accumulate
        parts = f"{count} micro-batches, " if count > 1 else ""
        lines.append(f"| {' | '.join(cells)} | {parts}{each.plan_in_words} |")
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    wanted = [int(word) - 1 for word in sys.argv[1:]] or range(len(QUESTIONS))
    pages: list[str] = []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for index in wanted:
            page = answer(QUESTIONS[index])
            print("\n".join(page), flush=True)
            pages += page
    if len(wanted) == len(QUESTIONS):
        head = [
            "# Three worked questions",
            "",
            "`python -m benchmarks.search.worked_questions`",
            "",
            machine(),
            "",
        ]
        doc = (__doc__ or "").split("\n\n")[-1].replace("\n", " ").strip()
        (RESULTS / "worked_questions.md").write_text(
            "\n".join([*head, doc, "", *pages]).rstrip() + "\n"
        )


if __name__ == "__main__":
    main()
