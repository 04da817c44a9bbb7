"""Plans whose blocks are compiled: as under ddp, what cannot be compiled as well."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.techniques.compilation import CompiledForward
from tests.plugins.trainer_ranks import make_trainer, once_on_ranks, state_of


class Layer(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 32)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        return x + y


class Steady(Layer):
    """Without dropout, whose draws some compilers make in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


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
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(rank: int, plan: Any, layer: type[Layer] = Layer) -> tuple[list[float], Any, Any]:
    """Losses of this rank, values at the end, and what became of compiled blocks."""
    torch.manual_seed(0)
    module = Stack(layer)
    source = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(58, 16, generator=source), torch.randint(4, (58,), generator=source)
    data = DataLoader([*zip(rows, labels, strict=True)], batch_size=4)  # of the last batch 1 or 2
    torch.manual_seed(rank)
    trainer = make_trainer(AutoParallelStrategy(plan=plan), devices=2)
    trainer.fit(module, data)
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
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


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

CALLS: list[str] = []  # of compiled code, of this rank


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that notes each call of what it compiles."""

    def run(*args: Any) -> Any:
        CALLS.append("training" if torch.is_grad_enabled() else "evaluation")
        return graph.forward(*args)

    return run


def compiled_by_user(way: str, module: Stack, backend: Any) -> Any:
    """Compile the layers, or all, in one of the ways that there are."""
    options = {"backend": backend, "fullgraph": way != "whole"}
    for index, layer in enumerate(module.layers):
        if way == "wrapper":
            module.layers[index] = torch.compile(layer, **options)  # type: ignore[call-overload]
        elif way == "in place":
            layer.compile(**options)
        elif way == "disabled":
            layer.compile(disable=True)
    if way == "stack":  # a module around the layers
        module.layers.compile(**options)
    elif way == "whole in place":
        module.compile(**options)
    if way == "whole":
        return torch.compile(module, **options)  # type: ignore[call-overload]
    return module


def fit_of_user(
    rank: int, way: str, backend: Any, plan: str | None, **options: Any
) -> tuple[list[float], dict[str, Tensor], list[str], list[str], str]:
    """Losses, values, calls of compiled code, what was said, and the plan that ran."""
    torch._dynamo.reset()
    CALLS.clear()
    torch.manual_seed(0)
    module = Stack(Steady)
    program = compiled_by_user(way, module, backend)
    had = [dict(vars(part)) for part in module.modules()]
    source = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(48, 16, generator=source), torch.randint(4, (48,), generator=source)
    data = DataLoader([*zip(rows, labels, strict=True)], batch_size=4)
    strategy = AutoParallelStrategy(plan=plan, timeout=timedelta(seconds=60), **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make_trainer(strategy, devices=2).fit(program, data)
    names = ("forward", "training_step", "_compiled_call_impl", "_compiler_ctx")
    for part, before in zip(module.modules(), had, strict=True):
        for name in names:
            assert name not in before or getattr(part, name) is before[name]
    said = [str(each.message) for each in warned if "runs compiled in parts" in str(each.message)]
    state = {name.replace("_orig_mod.", ""): value for name, value in state_of(module).items()}
    assert strategy.parallel_plan is not None
    return module.losses, state, list(CALLS), said, strategy.parallel_plan.summary()
