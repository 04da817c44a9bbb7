"""Copies that are made to run once, of modules with attributes that cannot be copied."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_topt.graph.fake import fake_copy


class Wrapped:
    """Stands in the place of a module's forward, as techniques put it there, and is copied with the
    module.
    """

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
    """The wrapper leads to the whole module, and so to what cannot be copied; still it is not what
    the copy has to share.
    """
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
