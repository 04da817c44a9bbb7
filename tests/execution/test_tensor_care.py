"""What user code does to split parameters beside calls: as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Shard
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from tests.launch import run_ranks

MESH = Mesh((Axis("tensor", 2),))


class Net(nn.Module):
    """`seen` has what user code saw: shape and sum of squares."""

    def __init__(self, change: Callable[[Net], Any] = lambda net: None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.change = change
        self.seen: list[tuple[Any, float]] = []

    def note(self, *given: Any) -> None:
        for each in given:
            if isinstance(each, Tensor):
                self.seen.append((tuple(each.shape), float(each.detach().double().square().sum())))
            elif isinstance(each, tuple):
                self.note(*each)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        out = self.down(self.hidden(x))
        return out.square().mean() + (self.down(self.hidden(0.5 * x)) - 1).square().mean()


# ---- hooks ---------------------------------------------------------------------------------------


def hooked(where: str, register: str, hook: Callable[..., Any]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        getattr(net.get_submodule(where), register)(lambda module, *given: hook(net, *given))
        return net

    return make


def noting(net: Net, *given: Any) -> None:
    net.note(*given)


class TensorHook(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda gradient: (self.note(gradient), gradient * 2)[1])
        return F.gelu(h)


def parameter_hook() -> Net:
    net = Net()
    net.up.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    return net


HOOKS = {
    "forward hook": hooked(
        "up", "register_forward_hook", lambda net, i, o: (net.note(i, o), 1.5 * o)[1]
    ),
    "forward pre-hook": hooked(
        "down", "register_forward_pre_hook", lambda net, i: (net.note(i), (0.5 * i[0],))[1]
    ),
    "pre-hook with sizes": hooked(
        "down",
        "register_forward_pre_hook",
        lambda net, i: (i[0].view(-1, 32) * torch.linspace(0.5, 1.5, 32),),
    ),
    "backward hook": hooked("up", "register_full_backward_hook", noting),
    "backward hook that changes": hooked(
        "down", "register_full_backward_hook", lambda net, gi, go: (2 * gi[0],)
    ),
    "backward pre-hook": hooked(
        "up", "register_full_backward_pre_hook", lambda net, go: (net.note(go), (2 * go[0],))[1]
    ),
    "hook on a tensor": TensorHook,
}

# ---- parametrizations ----------------------------------------------------------------------------


def parametrized(how: Callable[[nn.Module], Any]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        how(net.up)
        how(net.down)
        return net

    return make


PARAMETRIZED = {
    "weight_norm": parametrized(parametrizations.weight_norm),
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "orthogonal": parametrized(parametrizations.orthogonal),
}

# ---- in place ------------------------------------------------------------------------------------


def set_data(value: Callable[[Tensor], Tensor]) -> Callable[[Net], Any]:
    def change(net: Net) -> None:
        net.up.weight.data = value(net.up.weight.data)

    return change


def set_item(net: Net, key: Any, value: float) -> None:
    net.up.weight[key] = value


CHANGES: dict[str, Callable[[Net], Any]] = {
    "mul_": lambda net: net.up.weight.mul_(0.9),
    "weight clipping": lambda net: [p.data.clamp_(-0.1, 0.1) for p in net.parameters()],
    "data, from itself": set_data(lambda weight: 0.9 * weight),
    "columns of norm 1": lambda net: net.up.weight.div_(net.up.weight.norm(dim=0, keepdim=True)),
    "copy_": lambda net: net.up.weight.copy_(torch.linspace(-1, 1, 512).view(32, 16)),
    "chosen rows": lambda net: set_item(net, net.up.weight.abs().sum(1) > 2.0, 0.0),
    "random": lambda net: net.up.weight.normal_(0, 0.1),
    "orthogonal_": lambda net: nn.init.orthogonal_(net.up.weight),
    "transposed": lambda net: net.up.weight.t().mul_(0.5),
    "running average": lambda net: net.note(
        net.down.weight.detach().clone().lerp_(net.up.weight.t(), 0.1)
    ),
}

# ---- sizes in Python -----------------------------------------------------------------------------


class Sizes(Net):
    def __init__(self, use: Callable[[Sizes, Tensor], Tensor]) -> None:
        super().__init__()
        self.size, self.use = self.up.weight.shape[0], use

    def hidden(self, x: Tensor) -> Tensor:
        return self.use(self, super().hidden(x))


SIZES: dict[str, Callable[[Sizes, Tensor], Tensor]] = {
    "reshape": lambda net, h: h.reshape(-1, net.size // 4, 4).softmax(1).reshape(-1, net.size),
    "new tensor": lambda net, h: h * torch.linspace(0, 1, net.up.weight.shape[0]),
    "numpy": lambda net, h: h * float(net.up.weight.detach().numpy().sum()),
    "one by one": lambda net, h: torch.stack([h[:, index] for index in range(net.size)], 1),
    "as_strided": lambda net, h: h.as_strided((8, 32), (32, 1)),
}

# ---- gradients in forward ------------------------------------------------------------------------


class Penalty(Net):
    """Of the gradient of an input (arXiv 1704.00028), and of a parameter: second gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.down(self.hidden(x))
        (of_input,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (of_weight,) = torch.autograd.grad(out.square().sum(), self.up.weight, create_graph=True)
        self.note(of_weight)
        return (
            out.square().mean() + 0.3 * of_input.square().mean() + 0.1 * of_weight.square().mean()
        )


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.compile(lambda h: 2 * h + 1, backend="eager")

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.scale(super().hidden(x))
        return h


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(8)))


OTHERS: dict[str, Callable[[], Net]] = {
    "gradients of gradients": Penalty,
    "compiled": Compiled,
    "parameter of another": lambda: Sizes(
        lambda net, h: h + nn.Parameter(net.up.weight.detach()).mean(1)
    ),
    "copy of a parameter": lambda: Sizes(lambda net, h: h * copy.deepcopy(net.up.bias)),
}

RIGHT: dict[str, Callable[[], Net]] = {
    **HOOKS,
    **PARAMETRIZED,
    **OTHERS,
    **{f"in place: {name}": lambda change=change: Net(change) for name, change in CHANGES.items()},
    **{f"sizes: {name}": lambda use=use: Sizes(use) for name, use in SIZES.items()},
}


# ---- refused -------------------------------------------------------------------------------------


def set_wrong_shape(net: Net) -> None:
    net.up.weight.data = torch.ones(16, 32)


def write_array(net: Net) -> None:
    net.up.weight.data.numpy()[0] = 0


REFUSED: dict[str, tuple[Callable[[], Net], str]] = {
    "hook on a parameter": (parameter_hook, "up.weight"),
    "data of another shape": (lambda: Net(set_wrong_shape), "(16, 32)"),
    "view of a copy": (lambda: Net(lambda net: net.up.weight[1].mul_(2)), "view"),
    "out=": (lambda: Net(lambda net: torch.mul(net.up.weight, 0.9, out=net.up.weight)), "in place"),
    "array": (lambda: Net(write_array), "read-only"),
    "copy of a module": (lambda: Sizes(lambda net, h: h + copy.deepcopy(net.up).bias), "copied"),
    "table of small norm": (MaxNorm, "embedding"),
    "grad": (
        lambda: Sizes(
            lambda net, h: h + torch.func.grad(lambda w: w.square().sum())(net.up.weight).sum()
        ),
        "torch.func",
    ),
}

# ---- both ----------------------------------------------------------------------------------------


def cut(name: str, parameter: Tensor) -> Shard | None:
    if "down" in name:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] == 32 else None
    return Shard(0) if parameter.shape[0] == 32 else None


def steps(
    net: Net, loss_of: Callable[[Tensor], float], optimizer: torch.optim.Optimizer
) -> list[float]:
    losses, x = [], torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        torch.manual_seed(step)
        losses.append(loss_of(x))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def one_process(make: Callable[[], Net]) -> Any:
    torch.manual_seed(0)
    net = make()

    def loss_of(x: Tensor) -> float:
        loss: Tensor = net(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    losses = steps(net, loss_of, torch.optim.SGD(net.parameters(), 0.1))
    return losses, {name: value.detach() for name, value in net.state_dict().items()}, net.seen


def split(make: Callable[[], Net]) -> Any:
    torch.manual_seed(0)
    net = make()
    found = ((name, cut(name, parameter)) for name, parameter in net.named_parameters())
    placed = tuple((name, (shard,)) for name, shard in found if shard is not None)
    config = OpConfig(PRESETS["ddp"].storage(MESH), parameters=placed)
    engine = Engine(
        ParallelPlan.of_blocks([BlockPlan("", config)], mesh=MESH), net, device=torch.device("cpu")
    )
    engine.apply()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine.attach_optimizers([optimizer])
    losses = steps(
        net, lambda x: engine.run_step([x], lambda model, batch: model(batch)).item(), optimizer
    )
    engine.release()
    return losses, {name: value.detach() for name, value in net.state_dict().items()}, net.seen


def on_ranks(rank: int) -> Any:
    sentences = {}
    for name, (make, _) in REFUSED.items():
        try:
            split(make)
            sentences[name] = "nothing"
        except ValueError as error:
            sentences[name] = str(error)
    return {name: split(make) for name, make in RIGHT.items()}, sentences


def test_right_or_refused() -> None:
    for found, sentences in run_ranks(on_ranks, 2):
        for name, (losses, state, seen) in found.items():
            expected, states, saw = one_process(RIGHT[name])
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(expected), rtol=2e-4, atol=1e-5, msg=name
            )
            assert [shape for shape, _ in seen] == [shape for shape, _ in saw], name
            squares = [torch.tensor([value for _, value in each]) for each in (seen, saw)]
            torch.testing.assert_close(*squares, rtol=1e-3, atol=1e-5, msg=name)
            for each, value in states.items():
                torch.testing.assert_close(
                    state[each], value, rtol=1e-3, atol=1e-4, msg=f"{name}: {each}"
                )
        for name, (_, words) in REFUSED.items():
            assert words in sentences[name], (name, sentences[name])
