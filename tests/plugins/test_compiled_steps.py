"""Blocks that are compiled in a running fit: chosen by a trial, checked by the clock."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.basics.forked_call import ForkedCall, writable_files
from lightning_topt.plugins import compiled_steps
from lightning_topt.plugins.plan_request import Allowed
from lightning_topt.techniques import compilation
from lightning_topt.techniques.compilation import (
    CallRecording,
    CompiledForward,
    Trial,
    candidates,
    compare,
    compile_blocks,
    form_of,
    uncompile,
)
from lightning_topt.techniques.recomputation import RecomputedForward, apply_recomputation
from tests.models import GPT
from tests.plugins.trainer_ranks import make_trainer, on_new_ranks, state_of


class Chain(nn.Module):
    """Elementwise operators, which eager mode runs one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(x)
        for step in range(12):
            y = torch.tanh(y * 1.1 + 0.1 * step) + torch.sigmoid(y)
        return x + self.drop(y)


class Sorted(Chain):
    """Reads a value, which no graph can have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(x.detach().sum()) == 0 else 0.5)


class Stack(L.LightningModule):
    """Two layers that pay, one that does not compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chain(), Chain()])
        self.odd, self.head = Sorted(), nn.Linear(64, 4)
        self.losses: list[float] = []
        self.form: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in (*self.layers, self.odd):
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        self.losses.append(loss.item())
        own = self.layers[0].forward
        own = getattr(own, "forward", own) if isinstance(own, RecomputedForward) else own
        self.form.append(isinstance(own, CompiledForward))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.global_step == 14

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(
    rank: int, plan: Any, patch: str = "", caches: str = ""
) -> tuple[list[float], Any, list[bool]]:
    """Losses, values, and which steps ran compiled blocks; trials are kept under `caches`."""
    os.environ["XDG_CACHE_HOME"] = caches
    compiled_steps._WARM, compiled_steps._TIMED, compiled_steps._COMPILES = 1, 2, 1
    compiled_steps.USUAL_SECONDS = compilation.LEAST_GAIN = 0.0  # whatever this machine's times are
    Trial.saved_seconds = property(lambda self: 1.0)  # type: ignore[assignment]
    seconds = iter((1.0, 2.0 if patch == "slower" else 0.5))
    compiled_steps.CompiledSteps._step_seconds = lambda self: (  # type: ignore[method-assign]
        self._marks.clear() or next(seconds)
    )
    if patch in ("crashes", "known"):
        compiled_steps.compare = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    module = Stack()
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(2048, 64, generator=source)
    data = DataLoader([*zip(rows, torch.arange(2048) % 4, strict=True)], batch_size=256)
    torch.manual_seed(rank)
    strategy = AutoParallelStrategy(plan=plan, allow="compile" if patch else None)
    make_trainer(strategy, devices=2, max_epochs=-1).fit(module, data)
    assert all("forward" not in vars(part) for part in module.layers.modules())
    return module.losses, state_of(module), module.form


@functools.cache
def plain_fits() -> list[Any]:
    """What both ranks have under ddp."""
    return on_new_ranks(fit, "ddp")


def change_entries(caches: Path, **changes: Any) -> None:
    """Change the trial of the layers, as if another one had found that."""
    (path,) = (p for p in caches.rglob("*.json") if '"layers.0"' in p.read_text())
    data = json.loads(path.read_text())
    assert data["entries"][""]["value"] == 0.5  # of the time, by the clock
    data["entries"]["layers.0"]["value"] |= changes
    path.write_text(json.dumps(data))


def test_trials_are_kept_for_later_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit without a trial of its own, a search that counts on one, and ones that may not."""
    with_trial = on_new_ranks(fit, None, "plain", str(tmp_path))
    change_entries(tmp_path, eager=[1, 1], compiled=[0.5, 0.5], compilation_seconds=0.0)
    for plan, since in (None, 4), ("search", 0):  # from which step
        found = on_new_ranks(fit, plan, "known", str(tmp_path))
        for (losses, _, form), (expected, *_) in zip(found, with_trial, strict=True):
            assert form == [False] * since + [True] * (len(form) - since)
            assert losses == pytest.approx(expected, rel=1e-5)
    with monkeypatch.context() as elsewhere:  # its code is gone, and a trial fails
        elsewhere.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
        assert not any(map(any, forms_of_known(tmp_path)))
    change_entries(tmp_path, refusal="it was slower")
    assert not any(map(any, forms_of_known(tmp_path)))


def forms_of_known(caches: Path) -> list[list[bool]]:
    """Which steps ran compiled blocks in a fit that could make no trial."""
    return [forms for *_, forms in on_new_ranks(fit, None, "known", str(caches))]


@pytest.mark.parametrize("plan", [None, "zero3+recompute"])
def test_blocks_that_pay_are_compiled(plan: str | None, tmp_path: Path) -> None:
    """As without, within the rounding of sums; the layer that reads a value stays as it is."""
    for (losses, state, form), (expected, values, _) in zip(
        on_new_ranks(fit, plan, "plain", str(tmp_path)), plain_fits(), strict=True
    ):
        assert form[:5] == [False] * 4 + [True]
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("patch", ["crashes", "slower"])
def test_a_fit_goes_on_where_compiling_fails_or_does_not_pay(patch: str, tmp_path: Path) -> None:
    """A copy that is killed changes nothing; slower steps give compiled blocks up."""
    for (losses, _, form), (others, *_) in zip(
        on_new_ranks(fit, None, patch, str(tmp_path)), plain_fits(), strict=True
    ):
        assert not form[-1] and any(form) == (patch == "slower")
        assert losses == (others if patch == "crashes" else pytest.approx(others, rel=1e-5))


# ---- trials -------------------------------------------------------------------------------------


def trials_of(module: nn.Module, x: Tensor) -> dict[str, Trial]:
    groups = candidates(module)
    recording = CallRecording(module, groups)
    module(x).sum().backward()
    calls = recording.take()

    def run() -> dict[str, Trial]:
        with writable_files():
            return compare(module, groups, calls)

    return ForkedCall(run, isolated=True).result(timeout_seconds=300)


class Layers(nn.Sequential):
    """Layers that are called one after the other, in a module around them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self[0]:
            x = layer(x)
        return x


class Indexed(Chain):
    """Knows its place, as layers of transformers do: each has compiled code of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.index


def test_trials_say_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is read, a place that each layer knows, a compiler that is not there."""
    monkeypatch.setattr(compilation, "LEAST_GAIN", 0.0)
    x = torch.randn(256, 64)
    assert [t.refusal for t in trials_of(Layers(Chain(), Chain()), x).values()] == [None]
    (read,) = trials_of(Layers(Sorted(), Sorted()), x).values()
    assert "data-dependent" in str(read.refusal)
    (indexed,) = trials_of(Layers(Indexed(1), Indexed(2)), x).values()
    assert "equal blocks do not share compiled code" in str(indexed.refusal)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nowhere")
    (without,) = trials_of(Layers(Chain(), Chain()), x[:128]).values()
    assert without.refusal


def test_results_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that returns something else."""
    monkeypatch.setattr(
        compilation, "_compiled", lambda forward: lambda *args: forward(*args) * (1 + 1e-3)
    )
    (trial,) = trials_of(Layers(Chain(), Chain()), torch.randn(256, 64)).values()
    assert "differ" in str(trial.refusal)


# ---- which blocks, and how they are replaced -----------------------------------------------------


def test_layers_of_a_stack_are_a_group() -> None:
    """Others are the outermost modules that have parts; kernels alone are none."""
    assert candidates(GPT(layers=2, width=16, heads=2, vocab=8, context=4)) == {
        "blocks.0": ["blocks.0", "blocks.1"]
    }
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert candidates(plain) == {"0": ["0"]}
    plain[0].compile()  # by the user
    assert candidates(plain) == {}


def test_a_copy_of_a_compiled_block_runs_its_own_parameters() -> None:
    """An average of weights copies the module within a fit; recomputation stays around."""
    module = Layers(Chain(), Chain())
    x = torch.randn(4, 64)
    expected = module(x)
    apply_recomputation(module, ["0.1"], device=x.device)
    compile_blocks(module, dict.fromkeys(["0.0", "0.1"]))
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert not torch.equal(other(x), expected)
    torch.manual_seed(0)
    assert isinstance(module[0][1].forward.forward, CompiledForward)
    uncompile(module)
    assert "forward" not in vars(module[0][0])
    assert not isinstance(module[0][1].forward.forward, CompiledForward)


def test_other_forms_run_as_written() -> None:
    """Shapes, evaluations, and values that are no tensors."""
    calls: list[int] = []

    def forward(x: Tensor, scale: float = 1.0) -> Tensor:
        calls.append(len(x))
        return x * scale

    own = CompiledForward(forward, form_of(((torch.ones(2, requires_grad=True),), {})))
    own._compiled = lambda *args, **kwargs: "compiled"
    assert own(torch.ones(2, requires_grad=True)) == "compiled"
    for args in ((torch.ones(3, requires_grad=True),), (torch.ones(2, requires_grad=True), 2.0)):
        own(*args)
    own(torch.ones(2))
    with torch.no_grad():
        own(torch.ones(2, requires_grad=True))
    assert calls == [3, 2, 2, 2]


@pytest.mark.parametrize("allow", ["compile", ["compile"], {"compile": True}])
def test_allow_compile(allow: Any) -> None:
    """In each form, and without options."""
    assert Allowed.read(allow).compile
    assert not Allowed.read({"compile": False}).compile
    with pytest.raises(ValueError, match="True or False"):
        Allowed.read({"compile": {"mode": "max-autotune"}})
    assert AutoParallelStrategy(allow=allow).request.asks_nothing
