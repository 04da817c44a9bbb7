"""When parameters must stay whole: who holds them, what cannot be sharded (`test_watching_hooks`:
which hooks look at them).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_topt.plugins import held_parameters
from lightning_topt.plugins.held_parameters import why_held
from lightning_topt.plugins.requirements import SHARDED, Fit, why_not
from tests.models import GPT, MLP, ConvNet
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.seen = MeanMetric()

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


# ---- held elsewhere ------------------------------------------------------------------------------


def hold_optimizer(module: Net) -> Any:
    module.own = torch.optim.SGD(module.net.parameters(), lr=0.1)


def hold_list(module: Net) -> Any:
    module.l2 = list(module.net.parameters())


def hold_nested(module: Net) -> Any:
    module.groups = {"decay": [("weight", module.net[0].weight)]}


def hold_attribute(module: Net) -> Any:
    object.__setattr__(module.net, "first_weight", module.net[0].weight)


def hold_closure(module: Net) -> Any:
    parameters = list(module.parameters())

    def penalty() -> Tensor:
        return sum(p.square().sum() for p in parameters)  # type: ignore[return-value]

    return penalty


class Pair(NamedTuple):
    module: nn.Module
    weights: list[Tensor]


class Loaded(dict[str, Tensor]):
    """A container of the user's."""


class Yielding(Net):
    """Has parameters that its modules do not name."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "hidden", (nn.Parameter(torch.ones(2)),))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        yield from self.hidden


class Averages(L.Callback):
    def __init__(self, module: nn.Module) -> None:
        self.averages = {p: p.detach().clone() for p in module.parameters()}


class Slots:
    __slots__ = ("weight",)


def hold_slots(module: Net) -> Any:
    holder = Slots()
    holder.weight = module.net[0].weight
    return holder


def hold_partial(module: Net) -> Any:
    return SimpleNamespace(add=functools.partial(torch.add, module.net[0].weight))


def hold_view(module: Net) -> Any:
    module.view = module.net[0].weight.detach()


def hold_other_module(module: Net) -> Any:
    other = nn.Linear(4, 4)
    other.weight = module.net[0].weight
    return [other]


def hold_generator_in_use(module: Net) -> Any:
    generator = (p for p in list(module.parameters()) if p.dim())
    next(generator)
    return [generator]


HOLDERS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "optimizer": (hold_optimizer, "attribute 'own' of Net holds parameter 'net."),
    "list": (hold_list, "attribute 'l2' of Net holds parameter 'net."),
    "nested": (hold_nested, "attribute 'groups' of Net holds parameter 'net.0.weight'"),
    "attribute": (
        hold_attribute,
        "attribute 'first_weight' of Sequential ('net') holds parameter 'net.0.weight'",
    ),
    "closure": (hold_closure, "function hold_closure.<locals>.penalty holds parameter 'net."),
    "callback": (Averages, "attribute 'averages' of Averages holds parameter 'net."),
    "slots": (hold_slots, "Slots holds parameter 'net.0.weight'"),
    "partial": (hold_partial, "SimpleNamespace holds parameter 'net.0.weight'"),
    "view": (hold_view, "tensor 'view' of Net shares memory with parameter 'net.0.weight'"),
    "other module": (
        hold_other_module,
        "module Linear, which is not part of the LightningModule, holds parameter",
    ),
}


@pytest.fixture
def everything_is_seen() -> Iterator[None]:
    """Also what the run has frozen before the first test: a look at all of it takes a second."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("name", HOLDERS)
def test_holders_are_named(name: str) -> None:
    hold, expected = HOLDERS[name]
    module = Net()
    optimizer = module.configure_optimizers()
    kept = hold(module)
    assert expected in (why_held(module, optimizers=[optimizer]) or "")
    del kept


@pytest.mark.usefixtures("everything_is_seen")
def test_variables_of_modules_are_holders() -> None:
    module = Net()
    globals()["parameters_of_the_script"] = list(module.parameters())
    try:
        said = why_held(module, optimizers=[module.configure_optimizers()])
    finally:
        del globals()["parameters_of_the_script"]
    assert f"variable 'parameters_of_the_script' of module {__name__} holds" in (said or "")


def tied() -> nn.Module:
    return GPT(tied=True)


def normed() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        torch.nn.utils.weight_norm(nn.Linear(4, 4)),  # type: ignore[no-untyped-call]
        torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
    )


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 4, 2), nn.GRUCell(4, 4), nn.TransformerEncoderLayer(4, 2))


def listed() -> nn.Module:
    module = nn.Module()
    module.entries = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))
    module.named = nn.ParameterDict({"a": module.entries[0]})
    return module


def compiled() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))
    module(torch.ones(2, 4)).sum().backward()
    return module


@pytest.mark.usefixtures("everything_is_seen")
def test_modules_and_their_optimizers_may_hold_parameters() -> None:
    """Of many kinds, in one module; nothing of the libraries counts that a run has in memory."""
    kinds = (Net, tied, normed, recurrent, listed, compiled, ConvNet, MLP)
    module = nn.ModuleDict({make.__name__: make() for make in kinds})
    optimizers, schedulers = [], []
    for part in module.values():
        optimizer = torch.optim.AdamW([{"params": [p]} for p in part.parameters()])
        part.optimizer = optimizer  # type: ignore[assignment]
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3))
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedulers[-1].step()
        optimizers.append(optimizer)
    # What runs now may hold them as well.
    local, running = list(module.parameters()), hold_generator_in_use
    assert why_held(module, optimizers=optimizers) is None
    assert local and running


def test_reference_counts_tell_who_is_held() -> None:
    """Of many parameters, with a loss whose graph holds them too, the one in a list."""
    module = GPT(tied=True, layers=20)
    optimizer = module.configure_optimizers()
    # autograd holds parameters now
    loss = module.net_loss = module(torch.zeros(1, 8, dtype=torch.long)).sum()
    keeper = [module.blocks[7].up.weight]
    known = held_parameters._known_containers(module, [optimizer], module)
    assert [id(p) for p in held_parameters._suspects(module, known)] == [id(keeper[0])]
    del loss, module.net_loss


def test_the_heap_is_searched_only_where_somebody_holds_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at a million objects takes long; ordinary programs are to start at once."""
    searched: list[int] = []
    original = held_parameters._holders

    def counted(links: Any, known: Any) -> list[Any]:
        searched.append(len(links))
        return original(links, known)

    monkeypatch.setattr(held_parameters, "_holders", counted)
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(40))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert why_held(module, optimizers=[optimizer]) is None
    assert sum(searched) == 0
    holder = [*module.parameters(), module]
    searched.clear()
    assert why_held(module, optimizers=[optimizer]) is None  # a variable of this function
    assert 0 < max(searched) <= 2  # of many in one list, the first one tells
    assert holder


def test_many_parameters_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of a running function holds them all, something else holds the last one."""
    heap, looks = gc.get_objects, list[int]()

    def counted() -> list[Any]:
        looks.append(1)
        return heap()

    monkeypatch.setattr(gc, "get_objects", counted)
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(40))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    named = list(module.named_parameters())
    assert why_held(module, optimizers=[optimizer]) is None
    module.kept = {"last": named[-1][1]}  # type: ignore[assignment]
    assert why_held(module, optimizers=[optimizer]) == (
        "attribute 'kept' of ModuleList holds parameter '39.bias'"
    )
    assert looks


def test_variables_of_running_functions_are_no_holders_whatever_they_are_in() -> None:
    module = Net()
    optimizer = module.configure_optimizers()
    pair = Pair(module, list(module.parameters()))
    loaded = Loaded(module.named_parameters())
    assert why_held(module, optimizers=[optimizer]) is None
    module.loaded = loaded
    assert "attribute 'loaded' of Net holds" in (why_held(module, optimizers=[optimizer]) or "")
    assert pair


def test_parameters_without_a_name_are_named_by_their_class() -> None:
    module = Yielding()
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1)
    assert "attribute 'hidden' of Yielding holds parameter 'Parameter'" in (
        why_held(module, optimizers=[optimizer]) or ""
    )


# ---- kinds of parameters -------------------------------------------------------------------------


class OneParameter(nn.Module):
    def __init__(self, value: Tensor, **kwargs: Any) -> None:
        super().__init__()
        self.rest = nn.Linear(2, 2)
        self.value = nn.Parameter(value, **kwargs)


class OwnTensor(Tensor):
    pass


def of_two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scalar": (
        lambda: OneParameter(torch.tensor(1.0)),
        "'value' has no dimension to shard; give it the shape (1,)",
    ),
    "empty": (lambda: OneParameter(torch.ones(0, 4)), "'value' is empty"),
    "subclass": (
        lambda: OneParameter(torch.ones(2).as_subclass(OwnTensor)),
        "'value' is a OwnTensor",
    ),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(2), "'weight' has no shape yet"),
    "complex": (lambda: OneParameter(torch.ones(2, dtype=torch.cfloat)), "complex64"),
    "two dtypes": (
        of_two_dtypes,
        "trained parameters differ in dtype ('0.bias': float32, '1.bias': bfloat16)",
    ),
    "sparse": (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "'0' has sparse gradients"),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), "'0' has sparse gradients"),
    "script": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
        "'0' is a TorchScript module",
    ),
}


def reason_of(module: nn.Module) -> str | None:
    strategy = SimpleNamespace(optimizers=[], model=module)
    trainer: Any = SimpleNamespace(
        lightning_module=module, strategy=strategy, callbacks=[], precision="32-true"
    )
    return why_not(Fit(trainer), SHARDED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_kinds_that_cannot_be_sharded(kind: str) -> None:
    make, expected = KINDS[kind]
    assert expected in (reason_of(make()) or "")


def of_int8() -> nn.Module:
    return OneParameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)


def frozen_half() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    )


def channels_last() -> nn.Module:
    return nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "make", [tied, normed, recurrent, listed, ConvNet, of_int8, frozen_half, channels_last]
)
def test_kinds_that_can_be_sharded(make: Callable[[], nn.Module]) -> None:
    assert reason_of(make()) is None


# ---- in a fit ------------------------------------------------------------------------------------


class Asks(L.Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.answers.append(why_not(Fit(trainer), SHARDED))


def fit_and_ask(rank: int) -> list[str | None]:
    answers: list[str | None] = []
    for hold in (lambda module: None, hold_list_of_gpt):
        module = RecordingGPT(tied=True)
        module.answers = []  # type: ignore[assignment]
        hold(module)
        make_trainer("ddp", devices=2, callbacks=[Asks()], max_steps=2).fit(module, loader(4))
        answers += module.answers  # type: ignore[arg-type]
    return answers


def hold_list_of_gpt(module: Any) -> None:
    module.l2 = list(module.blocks.parameters())


def test_answers_in_a_fit() -> None:
    """Under DDP, whose reducer and hooks hold parameters too, before and after a step (with Adam's
    state).
    """
    for before, after, held_before, held_after in on_ranks(fit_and_ask):
        assert before is None and after is None
        assert "attribute 'l2' of RecordingGPT holds parameter 'blocks." in held_before
        assert held_after == held_before
