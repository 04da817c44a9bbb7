"""All programs under `topt` and under plans that were asked for, beside Lightning's ddp: user code
runs as often, and losses, states and what the programs note are equal.

The environment variable ONCE takes some programs by their names, or "all" under every strategy;
otherwise every second one runs by default, and every fourth one, and each that is refused, meets
one of the plans that are asked for. Few meet compiled blocks, which take 5 to 20 s each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_topt import AutoParallelStrategy
from lightning_topt.optim import adaptive_step
from lightning_topt.plan import choose
from lightning_topt.plugins import compiled_steps, shared_updates
from lightning_topt.plugins.compiled_steps import CompiledSteps
from lightning_topt.techniques import compilation
from tests.foreign import once_run
from tests.foreign.once_run import compare_counts
from tests.foreign.programs import ALL
from tests.foreign.run import CLUSTER, Outcome, is_ddp, topt_strategy

MakeStrategy = Callable[[Any], Any]


def default(program: Any) -> Any:
    return topt_strategy(program)


def zero3(program: Any) -> Any:
    return AutoParallelStrategy(plan="zero3")


def zero3_again(program: Any) -> Any:
    return AutoParallelStrategy(plan="zero3+recompute")


def limited(program: Any) -> Any:
    """Of a limit that is just below what DDP needs: see `just_below_ddp`."""
    return topt_strategy(program, memory_limit="1GiB", cluster=CLUSTER)


def compiled(program: Any) -> Any:
    """With blocks that are compiled whether or not it pays: see `compile_at_once`."""
    return topt_strategy(program, allow="compile")


def full(program: Any) -> Any:
    return topt_strategy(program, plan="search", cluster=CLUSTER)


ASKED = (zero3, zero3_again, limited, full)


# ---- what is known


# The update stays whole: the rule of the optimizer is not known, hooks watch its step, or its
# gradients are sparse. Every other program that takes enough steps shares it.
NOT_SHARED = frozenset(
    [
        # rules that are not known
        *("gradients_kept_by_the_optimizer", "step_that_ranks_agree_on", "closure_asked_by_lbfgs"),
        *("lookahead", "sam", "optimizer_inside", "own_list_of_parameters"),
        # step hooks, sparse gradients, fewer steps than are measured
        *("extragradient", "sparse_embeddings", "accumulation_cut_by_epochs"),
        *("manual_accumulates", "manual_searcheslines"),
    ]
)
# No block is compiled: there is none, its gradients are differentiated, it talks to other ranks,
# or its results or its code depend on calls before: by a count, a cache or buffers of its own, or
# by a hook that keeps a list. Or no two calls have equal shapes. Or a gradient is zero but for
# rounding (of a bias before batch norm), which differs by all of it.
NOT_COMPILED = frozenset(
    [
        *("packed_lstm", "gradient_penalty", "penalty_on_gradients", "norm_over_ranks"),
        *("block_that_counts_its_calls", "gpt2", "norms_of_weights"),
        *("checkpointing_by_the_user", "dtypes_under_autocast", "detection_with_lists_of_dicts"),
        *("manual_dcgan", "segformer", "hydra_template", "clip"),
    ]
)
# What meets compiled blocks by default, in half a minute.
COMPILED = [
    *("manual_surgery", "gradients_per_sample", "body_unfrozen_at_step_5"),
    *("gradient_penalty", "norm_over_ranks"),
]
# What cannot be tried before the fit, and a part of the sentence.
UNTRACED = {
    # made by a hook of training, which comes after planning
    "unlabeled_iterator": "tried before the fit",
    "group_made_on_first_use": "File too large",
    "bound_loggers": "You are trying to `self.log()`",
    "gradients_per_sample": "uses a transform of torch.func",
}
# What a search cannot try before the fit, which asks for more than a plan by name.
UNTRIED = {"own_list_of_parameters": "a trial step of OwnList failed"}
# Refused under every plan that shards parameters, and a part of the sentence.
REFUSED: dict[str, str] = {
    "step_that_ranks_agree_on": "shared between ranks",
    "closure_asked_by_lbfgs": "LBFGS takes them for one",
    "manual_searcheslines": "LBFGS takes them for one",
    "sparse_embeddings": "'table' has sparse gradients",
    **dict.fromkeys(("scalar_parameter", "clip"), "has no dimension to shard"),
    "average_from_fit_start": "deepcopy",
    "logged_gradient_norms": "not allocated yet",
    "norms_gathered_before_the_step": "c10d.allgather_",
    "rows_bounded": "aten.renorm.default",
    "penalty_on_gradients": "the graph has the gathered one in its place",
    "manual_vqgan_adaptive": "the graph has the gathered one in its place",
    "statistics_of_weights": ".numpy() is not supported",
    "replay_of_an_environment": "aten.copy_.default meets a parameter in shards",
    "hooks_on_parameters": "register_post_accumulate_grad_hook",
    "stored_list_for_l2": "held since before it was sharded",
    "average_by_hand": "mixed kinds of tensors",
    "unused_parameters": "gives unused.weight no gradient",
}
# What is refused under one strategy beside that, or in other words; "": it is not.
REFUSED_BY: dict[MakeStrategy, dict[str, str]] = {
    zero3_again: UNTRACED,
    # nothing but DDP runs them, of which every plan needs more
    limited: {
        **UNTRACED,
        **dict.fromkeys(
            (
                *("gradients_kept_by_the_optimizer", "lookahead", "step_that_ranks_agree_on"),
                *("sam", "sparse_embeddings", "closure_asked_by_lbfgs"),
                *("optimizer_inside", "manual_searcheslines"),
            ),
            "no plan fits",
        ),
        **UNTRIED,
    },
    full: {**UNTRACED, **UNTRIED},
}
# By hand they read or write all weights outside of modules, which keeps these whole.
KEPT_WHOLE = frozenset(["manual_dqn", "manual_averages", "manual_sharpness"])
# They note what the machinery of shards does (docs/concepts/sharding_and_your_code.md): addresses,
# or that rank 0 alone has the whole state in a checkpoint.
COUNTS_MACHINERY = frozenset(("gradients_kept_by_the_optimizer", "checkpoints_in_the_middle"))
# Ranks of ddp go apart: it does not average what is trained since later than its start.
NO_ORACLE = frozenset(["unfrozen_by_a_callback"])
# Errors of ours that users meet.
SENTENCES = re.compile(
    r"((PlanError|CaptureError|StepError|NoPlanFitsError|UnsplittableOptimizer|ValueError"
    r"|RemotePlanningError): [^\n]{20,1200}(\n[^\n]+){0,3}"
    # of torch's kind, in our words and with the line of user code
    r"|(RuntimeError|NotImplementedError|AssertionError): [^\n]{20,700}"
    r"(: |or )choose plan='zero1'[^\n]+(\n[^\n]+\n?[^\n]*)?)\n+Traceback"
)


def refusals(strategy: MakeStrategy) -> dict[str, str]:
    sharded = REFUSED if strategy in (zero3, zero3_again) else {}
    known = {**sharded, **REFUSED_BY.get(strategy, {})}
    return {name: word for name, word in known.items() if word}


def chosen(strategy: MakeStrategy) -> list[str]:
    """The names of programs that `strategy` meets here."""
    asked = os.environ.get("ONCE", "").split()
    if asked and asked != ["all"]:
        return asked
    if asked:
        return list(ALL)
    if strategy is default:
        return [*ALL[::2]]
    if strategy is compiled:
        return COMPILED
    among, known = ALL[ASKED.index(strategy) :: len(ASKED)], refusals(strategy)
    return [name for index, name in enumerate(among) if index % 4 == 0 or name in known]


def shortened(text: str, *, first: int = 12, last: int = 10) -> str:
    """`text` without the middle of its lines: traces of Lightning are long."""
    lines = text.splitlines()
    return (
        text if len(lines) <= first + last else "\n".join([*lines[:first], "...", *lines[-last:]])
    )


def of_programs(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each program, of both ranks."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.name, []).append(outcome)
    return found


def wrong(name: str, ranks: Sequence[Outcome], known: dict[str, str]) -> str:
    """What is neither equal to ddp, nor a sentence on all ranks that is known; "" where none is."""
    errors = [outcome.topt.error for outcome in ranks]
    if name in known:
        if not all(map(SENTENCES.match, errors)):
            return f"{name}: one sentence on all ranks was expected, not {shortened(str(errors))}"
        sentence = errors[0].split("\nTraceback")[0]
        return "" if known[name] in sentence else f"{name}: {known[name]!r} is not in {sentence!r}"
    told = [each for outcome in ranks for each in outcome.differences]
    if name in NO_ORACLE and not ranks[0].topt.is_plain and not any(errors):
        return ""
    if name in COUNTS_MACHINERY:
        told = [each for each in told if not each.startswith("evidence")]
    if not any(told):
        return ""
    return f"{name} under {ranks[0].topt.plan}: " + shortened("\n".join(dict.fromkeys(told)))


def check(outcomes: Sequence[Outcome], known: dict[str, str]) -> dict[str, list[Outcome]]:
    """Fail for what is wrong; return the outcomes of the programs that ran."""
    programs = of_programs(outcomes)
    found = filter(None, (wrong(name, ranks, known) for name, ranks in programs.items()))
    if text := "\n\n".join(found):
        pytest.fail(text, pytrace=False)
    ran = {name: ranks for name, ranks in programs.items() if name not in known}
    assert all(len(ranks[0].ddp.losses) >= 7 for ranks in ran.values()), "a program took no steps"
    return ran


# ---- nothing is asked


def share_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let updates be shared whatever the clock says, from the fourth step on; settled at the sixth.

    Ranks are forked, and have this as well.
    """
    patch.setattr(adaptive_step, "is_faster", lambda *seconds: True)
    patch.setattr(adaptive_step, "can_pay", lambda *seconds: True)
    patch.setattr(adaptive_step, "TRIAL_STEPS", 2)
    patch.setattr(adaptive_step, "PLAIN_STEPS", 2)
    patch.setattr(shared_updates, "_WORTH_SECONDS", -1.0)


@pytest.mark.timeout(900)
def test_what_runs_under_ddp_is_equal_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    share_at_once(monkeypatch)
    names = chosen(default)
    ran = check(compare_counts(names, default, among=names), {})
    whole = {name for name, ranks in ran.items() if ranks[0].topt.level == 0}
    assert whole == NOT_SHARED & {*names}


# ---- compiled blocks


def compile_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let blocks be compiled before the third batch, however slow they are, and stay so.

    The strategy gets `compiled_blocks`: how often a block was called in the form that is compiled,
    or why it runs as it is written. Ranks are forked, and have this as well.
    """
    plain_end, plain_run = CompiledSteps.end, compilation._without_compiler

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        run = plain_run(forward)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            counted.calls += 1  # type: ignore[attr-defined]
            return found

        counted.calls = 0  # type: ignore[attr-defined]
        return counted

    def end(self: Any) -> None:
        found = self._strategy.compiled_blocks = {}
        for name, part in self._module.named_modules():
            own = vars(compilation._holder(part)).get("forward")
            if isinstance(own, compilation.CompiledForward):
                found[name] = own.failure or getattr(own._compiled, "calls", 0)
        plain_end(self)

    patch.setattr(CompiledSteps, "end", end)
    patch.setattr(compilation, "_without_compiler", counting)
    patch.setattr(compilation, "LEAST_GAIN", 0.0)
    patch.setattr(compilation, "_PAIR_SECONDS", 0.0)
    patch.setattr(compiled_steps, "_WARM", 0)
    patch.setattr(compiled_steps, "_TIMED", 1)
    patch.setattr(compiled_steps, "_COMPILES", 1 << 40)
    patch.setattr(compiled_steps, "USUAL_SECONDS", 0.0)
    patch.setattr(
        compilation.Trial, "saved_seconds", property(lambda trial: 0.0 if trial.refusal else 1e9)
    )
    patch.setattr(CompiledSteps, "_batches_left", lambda self: 1e9)
    patch.setattr(once_run, "LIMIT_SECONDS", 300)


@pytest.mark.timeout(3600)
def test_what_is_compiled_is_equal_to_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of compiled code have another order; user code runs as often."""
    compile_at_once(monkeypatch)
    names = chosen(compiled)
    ran = check(compare_counts(names, compiled, among=names), {})
    plain = {name for name, ranks in ran.items() if not any(map(is_in_use, ranks))}
    assert plain == NOT_COMPILED & {*names}


def is_in_use(outcome: Outcome) -> bool:
    """Whether compiled code of a block ran until the end of the fit."""
    return any(isinstance(calls, int) and calls > 0 for calls in outcome.topt.compiled.values())


# ---- plans that are asked for


def just_below_ddp(patch: pytest.MonkeyPatch) -> None:
    """Let every limit be a byte less than what the smallest plan of DDP is predicted to need."""
    plain = choose.fitting_points

    def fitting_points(points: Any, *, memory_limit: Any, memory_margin: float = 0.05) -> Any:
        points = list(points)
        needed = [point.peak_bytes * (1 + memory_margin) for point in points if is_ddp(point.plan)]
        limit = min(needed) - 1 if needed else memory_limit
        return plain(points, memory_limit=limit, memory_margin=memory_margin)

    patch.setattr(choose, "fitting_points", fitting_points)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ASKED)
def test_what_is_asked_is_equal_to_ddp_or_refused(
    strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy is limited:
        just_below_ddp(monkeypatch)
    names, known = chosen(strategy), refusals(strategy)
    ran = check(compare_counts(names, strategy, among=names), known)
    level = {zero3: 3, zero3_again: 3, limited: 0, full: 0}[strategy]
    low = {name for name, ranks in ran.items() if ranks[0].topt.level < level}
    assert low <= KEPT_WHOLE, "sharded less than was asked"
    if strategy is limited:
        assert not {name for name, ranks in ran.items() if ranks[0].topt.is_plain}
