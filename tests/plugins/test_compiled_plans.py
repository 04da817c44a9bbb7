"""Plans whose blocks are compiled: as under ddp, what cannot be compiled as well."""

from __future__ import annotations

import itertools
import os
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.compilation import CompiledForward
from tests.plugins.trainer_ranks import (
    make_trainer,
    on_new_ranks,
    on_ranks,
    once_on_ranks,
    state_of,
)


class Layer(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        return x + y


class Printing(Layer):
    """Prints in its forward, which no graph can have."""

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return super().forward(x)


class Stack(L.LightningModule):
    """Three layers, whose losses are kept."""

    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.losses: list[float] = []
        self.compiled: list[str | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        for layer in self.layers:
            own = layer.forward
            own = own if isinstance(own, CompiledForward) else getattr(own, "forward", own)
            if isinstance(own, CompiledForward):
                self.compiled.append("in use" if own.failure is None else own.failure)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # rounding grows with it


def fit(
    rank: int, plan: Any, layer: type[Layer] = Layer, epochs: int = 25
) -> tuple[list[float], Any, Any]:
    """Losses of this rank, values at the end, and what became of compiled blocks."""
    torch.manual_seed(0)
    module = Stack(layer)
    source = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(58, 16, generator=source), torch.randint(4, (58,), generator=source)
    data = DataLoader([*zip(rows, labels, strict=True)], batch_size=4)  # of the last batch 1 or 2
    torch.manual_seed(rank)
    strategy = AutoParallelStrategy(plan=plan)
    make_trainer(strategy, devices=2, max_epochs=epochs).fit(module, data)  # of eight steps
    assert all("forward" not in vars(part) for part in module.layers.modules())
    return module.losses, state_of(module), module.compiled


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "zero3+recompute"])
def test_compiled_blocks_train_as_under_ddp(plan: str) -> None:
    """Draws of dropout are those of eager mode. Tolerance: compiled sums have another order."""
    for (losses, state, _), (found, values, compiled) in zip(
        once_on_ranks(fit, "ddp"), once_on_ranks(fit, f"{plan}+compile"), strict=True
    ):
        assert compiled == ["in use"] * 3
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)


def new_code(rank: int, folder: str) -> list[int]:
    """How many graphs a fit under ddp and one of shards compile, which others have not."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._dynamo.utils import counters

    found = []
    for plan in ("ddp+compile", "zero3+compile"):
        torch._dynamo.reset()
        counters.clear()
        assert fit(rank, plan, epochs=1)[2] == ["in use"] * 3
        found.append(counters["aot_autograd"]["autograd_cache_miss"])
    return found


def test_shards_run_code_that_was_compiled_without_them(tmp_path: Path) -> None:
    """As that of a trial is, whose memory and seconds are priced."""
    under_ddp, in_shards = map(sum, zip(*on_new_ranks(new_code, str(tmp_path)), strict=True))
    assert under_ddp > 0 and in_shards == 0


def test_what_does_not_compile_runs_as_it_is_written() -> None:
    """The compiler refuses to print; the fit goes on, equal to the last bit."""
    for (losses, state, _), (found, values, compiled) in zip(
        once_on_ranks(fit, "ddp", Printing),
        once_on_ranks(fit, "ddp+compile", Printing),
        strict=True,
    ):
        assert len(compiled) == 3 and all("Unsupported" in str(why) for why in compiled)
        assert found == losses
        assert all(torch.equal(values[name], value) for name, value in state.items())


def test_files_of_plans_say_which_blocks_are_compiled() -> None:
    """One block of three, read from plain values."""
    blocks = [
        {"block": f"layers.{index}", "storage": "zero1", "recompute": False, "compile": index == 1}
        for index in range(3)
    ]
    rest = {"block": "", "storage": "zero1", "recompute": False}
    plan = ParallelPlan.from_dict(
        {
            "version": 2,
            "mesh": [{"name": "data", "size": 2}],
            "stages": [{"blocks": [*blocks, rest]}],
        }
    )
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert [block.config.compile for block in plan.blocks] == [False, True, False, False]
    assert [found for _, _, found in once_on_ranks(fit, plan)] == [["in use"]] * 2


# ---- what the user has compiled ------------------------------------------------------------------


class Steady(Layer):
    """Without dropout; no two have the same code, where they have numbers of their own."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(width)
        self.drop, self.number = nn.Dropout(0.0), number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.number)


class Net(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OfUser(L.LightningModule):
    """Three layers, or ten that differ."""

    def __init__(self, many: bool, width: int) -> None:
        super().__init__()
        self.net: Any = Net([Steady(n, width) for n in (range(1, 11) if many else (1, 1, 1))])
        self.head = nn.Linear(width, 4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


CALLS: list[bool] = []  # of compiled code on this rank: whether in training


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that notes each call of what it compiles."""

    def run(*args: Any) -> Any:
        CALLS.append(torch.is_grad_enabled())
        return graph.forward(*args)

    return run


def compiled_by_user(way: str, module: OfUser, backend: Any) -> Any:
    """Compile layers, what is around them, or all, in one of the ways that there are."""
    net, options = module.net, {"backend": backend}
    if way == "wrappers":
        net.layers = nn.ModuleList([torch.compile(layer, **options) for layer in net.layers])
    elif way == "layers in place":
        for layer in net.layers:
            layer.compile(**options)
    elif way == "net":
        module.net = torch.compile(net, **options)
    elif way == "net in place":
        net.compile(**options)
    elif way == "options unknown":
        compiled = torch.compile(net._call_impl, **options)
        net._compiled_call_impl = lambda *args: compiled(*args)
    elif way == "disabled":
        net.compile(disable=True)
    elif way == "whole in place":
        module.compile(**options)
    elif way == "whole":
        return from_compiled(torch.compile(module, **options))  # type: ignore[arg-type]
    return module


class OfFit(NamedTuple):
    """Losses, values at the end, calls of compiled code, what was said, and the plan."""

    losses: list[float]
    state: dict[str, Tensor]
    calls: list[bool]
    said: list[str]
    plan: str


def fit_of_user(
    rank: int, way: str, plan: str | None, backend: Any = counting, many: bool = False,
    width: int = 16, limit: str | None = None,
) -> OfFit:  # fmt: skip
    torch._dynamo.reset()
    CALLS.clear()
    torch.manual_seed(0)
    module = compiled_by_user(way, OfUser(many, width), backend)
    names = ("forward", "training_step", "_compiled_call_impl", "_compiler_ctx")
    before = [{n: v for n, v in vars(p).items() if n in names} for p in module.modules()]
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(48, width, generator=source)
    labels = torch.randint(4, (48,), generator=source)
    data = DataLoader([*zip(rows, labels, strict=True)], batch_size=4)
    limits: dict[str, Any] = {} if limit is None else {"memory_limit": limit}
    strategy = AutoParallelStrategy(plan=plan, timeout=timedelta(seconds=60), **limits)
    cheap = mock.patch.object(torch, "compile", partial(torch.compile, backend=backend))
    with warnings.catch_warnings(record=True) as warned, cheap:
        warnings.simplefilter("always")
        make_trainer(strategy, devices=2, num_sanity_val_steps=0).fit(module, data, data)
    # what was compiled is as it was made; Lightning itself leaves a `forward` on its module
    for part, was in zip(module.modules(), before, strict=True):
        now = {n: v for n, v in vars(part).items() if n in names}
        assert now == was or (part is module and now == {"forward": part.forward, **was})
    assert strategy.parallel_plan is not None
    return OfFit(
        module.losses,
        {name.replace("_orig_mod.", ""): value for name, value in state_of(module).items()},
        [*CALLS],
        [str(each.message) for each in warned if "was compiled as one" in str(each.message)],
        strategy.parallel_plan.summary(),
    )


def assert_as_eager(found: list[OfFit], many: bool = False, width: int = 16) -> None:
    """Compare with ``ddp`` of the program that compiles nothing."""
    ddp = once_on_ranks(fit_of_user, "not", "ddp", counting, many, width)
    for expected, each in zip(ddp, found, strict=True):
        assert not expected.calls and len(each.losses) == 6
        assert each.losses == pytest.approx(expected.losses, rel=1e-5)
        assert each.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            torch.testing.assert_close(each.state[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("way", "plan"),
    [
        *itertools.product(
            ["wrappers", "layers in place", "whole"], ["zero1", "zero3", "zero3+recompute"]
        ),
        ("whole in place", "zero2"),
    ],
)
def test_what_users_compile_is_planned(way: str, plan: str) -> None:
    """Their backend runs inside of shards and recomputation; one sentence for whole modules."""
    found = on_ranks(fit_of_user, way, plan)
    assert_as_eager(found)
    is_cut = way.startswith("whole") and plan != "zero1"
    for rank, each in enumerate(found):
        name = plan.removesuffix("+recompute").replace("zero", "ZeRO-")
        assert name in each.plan and ("recompute" in each.plan) == plan.endswith("recompute")
        blocks = 1 if way.startswith("whole") and plan == "zero1" else 3
        assert sum(each.calls) == 6 * blocks * (2 if plan.endswith("recompute") else 1)
        assert each.calls.count(False) == 6 * blocks  # evaluations
        assert each.said == (
            [
                "topt: the module was compiled as one; under this plan 3 block(s) in it are, with "
                "your options"
            ]
            if is_cut and rank == 0
            else []
        )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["net", "net in place"])
def test_a_part_that_is_compiled_is_cut_into_its_blocks(way: str) -> None:
    """Ten blocks of one function, each with code of its own: torch's limit of eight is for each."""
    found = on_ranks(fit_of_user, way, "zero3+recompute", counting, True)
    assert_as_eager(found, many=True)
    assert [sum(each.calls) for each in found] == [6 * 10 * 2] * 2
    assert "10 block(s) in it" in found[0].said[0]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["wrappers", "layers in place", "whole"])
def test_a_limit_is_kept_for_what_users_compile(way: str) -> None:
    """The search sees what is inside."""
    found = on_ranks(fit_of_user, way, None, counting, False, 512, "50MB")
    assert_as_eager(found, width=512)
    assert all(each.calls for each in found) and "ZeRO-3" in found[0].plan


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "backend"), [("whole", "aot_eager"), ("layers in place", None)])
def test_backends_that_compile_backward_passes(way: str, backend: str | None) -> None:
    """None is inductor, which once hung where hooks were inside."""
    assert_as_eager(on_ranks(fit_of_user, way, "zero3+recompute", backend or "inductor"))


def test_options_that_are_not_known_are_torchs_defaults() -> None:
    found = on_ranks(fit_of_user, "options unknown", "zero3")
    assert_as_eager(found)
    assert [sum(each.calls) for each in found] == [18, 18]
    assert found[0].said[0].endswith("with torch's defaults (your options are not known)")


def test_what_is_not_compiled_stays_so() -> None:
    found = on_ranks(fit_of_user, "disabled", "zero3+recompute")
    assert_as_eager(found)
    assert not any(each.calls or each.said for each in found)
