"""Compiled blocks where a step asks more of them than forward and backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.errors import explain_compiled
from lightning_topt.techniques import compilation
from lightning_topt.techniques.compilation import (
    CallRecording,
    CompiledForward,
    compare,
    compile_blocks,
)
from lightning_topt.techniques.known_trials import KnownTrials

runs: list[Any] = []  # of compiled graphs


def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        runs.append(graph)
        return graph.forward(*args)

    return run


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run operator by operator: what is tested here needs no compiler of C++."""
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend=counting)
    monkeypatch.setattr(compilation, "_compiled", compiled)
    runs.clear()


def stack(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 4))


def test_later_changes_run_as_written_and_compile_nothing() -> None:
    """A hook, a frozen parameter and a transform of torch.func; then compiled code again."""
    block, x, seen = stack(), torch.randn(2, 8), []
    forward = CompiledForward(block.forward)
    forward(x), forward(x)
    assert len(runs) == 2
    hook = block[0].register_forward_hook(lambda *args: seen.append("hook"))
    forward(x)
    assert len(runs) == 2 and seen == ["hook"]
    hook.remove()
    block[0].requires_grad_(False)
    forward(x).sum().backward()
    assert block[0].weight.grad is None and block[2].weight.grad is not None
    block[0].requires_grad_(True)
    torch.func.vmap(torch.func.grad(lambda row: forward(row).sum()))(x)
    assert len(runs) == 2
    forward(x)
    assert len(runs) == 3 and len({id(graph) for graph in runs}) == 1


def test_many_blocks_of_one_class_are_compiled() -> None:
    """Also more than the compiler's limit for a function, which torch's containers share."""
    for width in range(1, 13):
        forward = CompiledForward(stack(width).forward)
        forward(torch.randn(2, width)), forward(torch.randn(2, width))
        assert forward.failure is None and len(runs) == 2 * width


def test_a_second_derivative_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(compilation, "_compiled", compiled)
    x = torch.randn(2, 8, requires_grad=True)
    made = CompiledForward(stack().forward)(x)
    (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        slope.square().sum().backward()
    explain_compiled(caught.value)
    assert str(caught.value).startswith("the gradients of a compiled block cannot be")


def test_gradients_that_are_differentiated_are_seen_beforehand() -> None:
    module, x = nn.ModuleDict({"once": stack(), "twice": stack()}), torch.randn(2, 8)
    recording = CallRecording(module, module)
    loss = module["once"](x).sum()
    made = module["twice"](x)
    (slope,) = torch.autograd.grad(
        made.sum(), module["twice"][0].weight, create_graph=True, materialize_grads=True
    )
    (loss + slope.square().sum()).backward()
    assert list(recording.take()) == ["once"]
    assert list(recording.refusals) == ["twice"]
    assert not any("forward" in vars(block) for block in module.values())
    assert list(recording.take()) == ["once"]  # nothing is undone twice


@pytest.mark.parametrize("begin", [CallRecording, compile_blocks])
def test_copies_made_within_a_fit_run_as_written(begin: Any) -> None:
    """Copies and pickles have a forward of their own, which needs nothing of this package."""
    module, x = nn.ModuleDict({"block": stack()}), torch.randn(2, 8)
    begin(module, {"block": None})
    module["block"](x), module["block"](x)
    before = len(runs)
    pickled = pickle.dumps(module)
    assert b"lightning_topt" not in pickled
    copies = copy.deepcopy(module), pickle.loads(pickled)
    with torch.no_grad():
        module["block"][2].bias += 1
    for each in copies:
        torch.testing.assert_close(each["block"](x) + 1, nn.Sequential.forward(module["block"], x))
    assert len(runs) == before


class Counts(nn.Module):
    """Its output depends on no count, its compiled code does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        return y


def test_blocks_with_a_state_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "LEAST_GAIN", 0.0)
    module = nn.ModuleDict({"plain": stack(), "counts": Counts()})
    recording = CallRecording(module, module)
    for block in module.values():
        block(torch.randn(2, 8))
    trials = compare(module, {name: [name] for name in module}, recording.take())
    assert trials["plain"].refusal is None
    assert "compiled for one call" in str(trials["counts"].refusal)


def test_results_under_autocast_may_differ_as_numbers_of_16_bits_do() -> None:
    one = [torch.randn(16)]
    other = [one[0] * 1.004]
    assert compilation._difference(one, other, in_16_bits=True) is None
    assert compilation._difference(one, other, in_16_bits=False) is not None


def test_what_is_known_needs_no_user_and_makes_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container whose user has no name, in each fit that asks for nothing."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("getpass.getuser", nameless)
    options: Any = {"device": torch.device("cpu"), "ranks": 2, "precision": "32-true"}
    assert KnownTrials(stack(), torch.randn(2, 8), **options).trials == {}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    assert KnownTrials(stack(), torch.randn(2, 8), **options).trials == {}
    assert not (tmp_path / "code").exists()
