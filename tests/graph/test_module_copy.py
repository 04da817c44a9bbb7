"""Copies of modules that run once, and modules that are built without memory."""

from __future__ import annotations

import copy
import subprocess
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from lightning_topt.graph.capture import capture
from lightning_topt.graph.module_copy import ShapeMode, build_on_meta, fake_copy, is_on_meta
from tests.graph.test_capture import MODEL_IDS, MODELS
from tests.models import MLP, batch_for
from tests.preloaded import preloaded_python


class Wrapped:
    """Stands in the place of a module's forward, as techniques do, and is copied with it."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return Wrapped(copy.deepcopy(self.forward, memo))


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one of these")


def test_process_groups_are_shared() -> None:
    held = {"groups": [ProcessGroup(0, 1)]}
    copied, _ = fake_copy(nn.Sequential(nn.Linear(2, 2), Holds(held)), device=torch.device("cpu"))
    found: Any = copied[1].held
    assert found is not held and found["groups"][0] is held["groups"][0]


def test_what_cannot_be_copied_is_shared_and_nothing_else() -> None:
    """The wrapper leads to the whole module; still it is not what the copy has to share."""
    held, module = Uncopyable(), nn.Sequential(nn.Linear(2, 2))
    module.append(Holds(held))
    vars(module)["forward"] = Wrapped(module.forward)
    copied, mode = fake_copy(module, device=torch.device("cpu"))
    calls: list[nn.Module] = []
    copied[0].register_forward_hook(lambda *_: calls.append(copied[0]))
    with mode:
        copied(torch.ones(1, 2))
    assert calls == [copied[0]] and copied[1].held is held


def test_a_generator_of_random_numbers_is_copied_with_its_state() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        copied, _ = fake_copy(
            nn.Sequential(nn.Linear(2, 2), Holds([generator])), device=torch.device("cpu")
        )
        found: Any = copied[1].held[0]  # type: ignore[index]
        assert found is not generator and torch.equal(found.get_state(), generator.get_state())


# Models built without memory: the same graph, or a real model where the constructor needs
# values.


@pytest.mark.parametrize("module", MODELS, ids=MODEL_IDS)
def test_the_graph_is_that_of_a_real_model(module: Any) -> None:
    module = type(module)()
    batch = batch_for(module)
    expected = capture(module, batch, batch_scaling=False)
    meta = build_on_meta(type(module))
    assert is_on_meta(meta) and not is_on_meta(module)
    assert capture(meta, batch, batch_scaling=False) == expected
    with FakeTensorMode():
        fake = type(module)()
    assert capture(fake, batch, batch_scaling=False) == expected


def test_forks_of_a_process_that_captured_run_backward() -> None:
    # torch 2.14 with CUDA and without a GPU starts threads in a first backward on fake tensors
    program = """
        from torch import ones
        from torch.nn import Linear
        from lightning_topt.basics.forked_call import ForkedCall
        from lightning_topt.graph.module_copy import fake_copy
        module = Linear(2, 2)
        copied, mode = fake_copy(module)
        with mode:
            copied(ones(1, 2)).sum().backward()
        print(ForkedCall(lambda: module(ones(1, 2)).sum().backward()).result())
    """
    command = [preloaded_python(), "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "None", result.stderr


class ReadsValues(MLP):
    """As vision Transformers do with their rates of stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]


class Fails(MLP):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("the user's own")


def test_constructors_that_read_values_run_on_real_tensors() -> None:
    torch.manual_seed(3)
    expected = ReadsValues().state_dict()
    torch.manual_seed(3)
    module = build_on_meta(ReadsValues)
    assert not is_on_meta(module) and module.rates == pytest.approx([0, 0.05, 0.1])
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    with pytest.raises(KeyError, match="own"):
        build_on_meta(Fails)


def backward(x: Tensor) -> Any:
    weight = torch.empty(8, 5, requires_grad=True)
    (x @ weight).relu().sum().backward()
    return weight.grad


CALLS: dict[str, Any] = {
    "products": lambda x: (x @ x.transpose(1, 2), torch.softmax(x, -1), x + 1),
    "views": lambda x: (x[1:][1:], x[2:], x[:, ::2], x.unbind(1), x.split(2), x.expand(2, 6, 4, 8)),
    "several": lambda x: torch.native_layer_norm(x, [8], None, torch.ones(8), 1e-5),
    "dtypes": lambda x: (
        x.bfloat16(),
        x.view(torch.int32),
        (x > 0) + 1,
        (x > 0) + 1.0,
        (x > 0) + True,
    ),
    "in place": lambda x: (y := x.clone(), y[1].mul_(2), y.t_() if y.ndim < 3 else y.squeeze_()),
    "complex": lambda x: (z := torch.view_as_complex(x.unflatten(2, (4, 2))), z.conj().imag + 1),
    "numbers": lambda x: (x * torch.tensor(2.0), (torch.tensor(2.0) + 1).item(), x * torch.ones(8)),
    "gradients": backward,
    "random": lambda x: (torch.nn.functional.dropout(x, 0.5), torch.rand_like(x), x.new_zeros(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_shapes_that_are_known_are_those_of_torch(name: str) -> None:
    def described(kind: type[FakeTensorMode]) -> list[Any]:
        def like(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            memory, form = value.untyped_storage(), (value.shape, value.stride(), value.dtype)
            place = value.storage_offset(), memory.nbytes(), memory._cdata == base._cdata
            return type(value), *form, *place, value.is_conj(), value.is_neg()

        with kind(allow_non_fake_inputs=True):
            x = torch.empty(4, 6, 8).transpose(0, 1)
            base = x.untyped_storage()
            return [*map(like, tree_leaves(CALLS[name](x)))]

    plain = described(FakeTensorMode)
    assert described(ShapeMode) == plain
    assert described(ShapeMode) == plain


def test_an_operator_runs_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dispatch = [], FakeTensorMode.dispatch

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        asked.append(func._schema.name)
        return dispatch(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    for sizes in ((3, 7), (3, 7), (3, 11)):
        with ShapeMode(allow_non_fake_inputs=True):
            torch.empty(sizes).t().cosh().sum(0)
    counts = {name: asked.count(name) for name in asked if name != "prim::device"}
    assert counts == {"aten::empty": 3, "aten::t": 2, "aten::cosh": 2, "aten::sum": 2}
