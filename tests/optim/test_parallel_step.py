"""The parallel step against the unsharded optimizer on a copy of the model."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from tests.launch import run_on_pool, run_ranks
from tests.optim.parallel_cases import (
    OPTIMIZERS,
    ROUNDING,
    Net,
    loss_of,
    make_net,
    parameters_of,
    pieces_for,
    row_pieces,
    whole_pieces,
)

TOLERANCE = 1e-5  # of parameters of order 1, where `ROUNDING` allows a difference


def distance(net: Net, other: Net) -> float:
    """The largest difference of parameters; 0 only where all bits that count are equal."""
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def backward(net: Net, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(net, step).backward()


def two_runs(
    name: str, world_size: int, **options: Any
) -> tuple[Net, Optimizer, Net, Optimizer, ParallelStep]:
    make, by_element = OPTIMIZERS[name]
    plain_net, net = make_net(), make_net()
    plain, optimizer = make(plain_net), make(net)
    pieces = pieces_for(optimizer, world_size, by_element)
    return (
        plain_net,
        plain,
        net,
        optimizer,
        install_parallel_step(optimizer, pieces=pieces, **options),
    )


def all_optimizers(rank: int) -> dict[str, float]:
    """Distances after 12 steps; a frozen parameter is unfrozen at the sixth."""
    distances = {}
    for name in OPTIMIZERS:
        plain_net, plain, net, optimizer, _ = two_runs(name, dist.get_world_size())
        for step in range(12):
            for model, its in ((plain_net, plain), (net, optimizer)):
                model.frozen.requires_grad_(step >= 6)
                backward(model, its, step)
                its.step()
            assert all(p.grad is not None for p in net.hidden.parameters())
        assert parameters_of(optimizer) == [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        assert {id(p) for p in parameters_of(optimizer)} <= {id(p) for p in net.parameters()}
        assert net.unused.weight.equal(plain_net.unused.weight) and (
            # which makes all state at once
            net.unused.weight not in optimizer.state or name == "Adagrad"
        )
        distances[name] = distance(net, plain_net)
    return distances


def test_equal_to_the_unsharded_optimizer() -> None:
    for distances in run_on_pool(all_optimizers, 3):
        assert distances.keys() == OPTIMIZERS.keys()
        assert {name for name, value in distances.items() if value} <= ROUNDING.keys()
        assert max(distances.values()) < TOLERANCE


def hooked_run(net: Net, optimizer: Optimizer) -> list[Any]:
    """Losses, the order of calls, what hooks saw, and rates.

    Hooks move weights: the loss shows whether they run before the closure, and the norm whether
    they see full parameters. The third closure adds another hook.
    """
    seen: list[Any] = []

    @torch.no_grad()
    def before(hooked: Optimizer, _: Any, kwargs: dict[str, Any]) -> None:
        seen.append(("before", callable(kwargs["closure"])))
        for p in parameters_of(hooked):
            p.mul_(0.99)

    @torch.no_grad()
    def after(hooked: Optimizer, _: Any, kwargs: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters_of(hooked) if p.grad is not None]
        seen.append(("after", kwargs["closure"].__name__, [float(g.norm()) for g in gradients]))
        for p in parameters_of(hooked):
            p.div_(max(1.0, float(p.norm())))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for number in range(5):

        def closure(number: int = number) -> Tensor:
            backward(net, optimizer, number)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            seen.append("closure")
            if number == 2:
                handles.append(optimizer.register_step_pre_hook(before))
            return loss_of(net, number).detach()

        seen.append(float(optimizer.step(closure=closure)))
        scheduler.step()
    for handle in handles:
        handle.remove()
    return [seen, [group["lr"] for group in optimizer.param_groups]]


def schedulers_closures_hooks(rank: int) -> list[float]:
    warnings.simplefilter("error")
    distances = []
    for name in ("SGD", "AdamW"):
        plain_net, plain, net, optimizer, step = two_runs(name, 2)
        ours, theirs = hooked_run(net, optimizer), hooked_run(plain_net, plain)
        assert ours == theirs and ours[0][:2] == [("before", True), "closure"]
        assert not optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks
        distances.append(distance(net, plain_net))
        step.remove()
        assert (
            not {"step", "state_dict", "load_state_dict", "consolidate_state_dict"}
            & optimizer.__dict__.keys()
        )
        for model, its in ((plain_net, plain), (net, optimizer)):
            backward(model, its, 7)
            its.step()
        distances.append(distance(net, plain_net))
        assert {id(p) for p in optimizer.state} == {
            id(p) for p in parameters_of(optimizer) if p.grad is not None
        }
    return distances


def test_schedulers_closures_hooks_and_removal() -> None:
    assert run_ranks(schedulers_closures_hooks, 2) == [[0.0] * 4] * 2


def hooks_of_all_optimizers(rank: int) -> float:
    plain_net, plain, net, optimizer, _ = two_runs("AdamW", 2)
    seen: list[list[Any]] = [[], []]

    @torch.no_grad()
    def move(hooked: Optimizer, *_: Any) -> None:
        seen[hooked is optimizer].append([float(p.norm()) for p in parameters_of(hooked)])
        for p in parameters_of(hooked):
            p.mul_(0.9)

    handles = [register_optimizer_step_pre_hook(move), register_optimizer_step_post_hook(move)]
    for step in range(3):
        for model, its in ((plain_net, plain), (net, optimizer)):
            its.step(partial(backward, model, its, step))  # type: ignore[arg-type]
    for handle in handles:
        handle.remove()
    assert len(seen[0]) == 6 and seen[0] == seen[1]
    return distance(net, plain_net)


def test_hooks_of_all_optimizers_run_before_the_closure_and_after_the_gather() -> None:
    assert run_on_pool(hooks_of_all_optimizers, 2) == [0.0] * 2


def hooks_within(rank: int) -> None:
    *_, net, optimizer, _ = two_runs("Decayed", 2)
    torch.optim.AdamW(make_net().parameters()).step()  # hooks run in the step of this class too
    backward(net, optimizer, 0)
    optimizer.step()
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Decayed calls the step of its base class, within which"):
        optimizer.step()
    handle.remove()
    optimizer.step()


def test_hooks_that_would_see_pieces_are_refused() -> None:
    run_on_pool(hooks_within, 2)


def scaled_and_accumulated(rank: int) -> list[float]:
    """A GradScaler with an overflow, two backward passes a step; at first no gradients."""
    distances = []
    for name in ("AdamW", "AdamW fused"):
        plain_net, plain, net, optimizer, _ = two_runs(name, 2)
        for model, its in ((plain_net, plain), (net, optimizer)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            its.step()  # without gradients
            for number in range(8):
                its.zero_grad()
                for half in range(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = loss_of(model, 2 * number + half)
                    scaler.scale(loss * (float("inf") if number == 4 else 0.5)).backward()
                if number % 2:
                    scaler.unscale_(its)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(its)
                scaler.update()
            assert scaler.get_scale() not in (2.0**10, 0.0)
        distances.append(distance(net, plain_net))
    return distances


def test_grad_scaler_and_accumulation() -> None:
    for looped, fused in run_on_pool(scaled_and_accumulated, 2):
        assert looped == 0 and fused < TOLERANCE


def changed_groups(rank: int) -> list[float]:
    """A group that is added is updated everywhere until pieces are given; owners change."""
    plain_net, plain, net, optimizer, step = two_runs("AdamW", 3)
    added = [torch.nn.Parameter(torch.ones(6, 2)) for _ in range(2)]
    distances = []
    for number in range(12):
        for model, its, more in ((plain_net, plain, added[0]), (net, optimizer, added[1])):
            if number == 3:
                its.add_param_group({"params": [more], "lr": 0.1})
            if number == 9:
                model.hidden.weight.data = model.hidden.weight.data.clone()
            backward(model, its, number)
            more.grad = torch.full_like(more, number + 1.0) * torch.arange(2)
            its.step()
        if number == 4:
            assert added[1] in optimizer.state
        if number == 6:
            assert len(step.current_pieces()) == len(step.pieces)
            step.update_pieces(whole_pieces(parameters_of(optimizer), 3))
            assert (added[1] in optimizer.state) == (
                rank == (len(parameters_of(optimizer)) - 1) % 3
            )
        if number == 8:
            parameters = parameters_of(optimizer)
            # one is whole everywhere again
            step.update_pieces([p for p in row_pieces(parameters, 3) if p.index != 1])
        distances.append(max(distance(net, plain_net), float((added[0] - added[1]).abs().max())))
    return distances


def test_added_groups_and_new_owners() -> None:
    assert run_on_pool(changed_groups, 3) == [[0.0] * 12] * 3


def state_bytes(optimizer: Optimizer) -> int:
    return sum(
        t.numel() * t.element_size()
        for s in optimizer.state.values()
        for t in s.values()
        if t.dim()
    )


def installed_later(rank: int) -> list[float]:
    """Pieces on an optimizer that has made steps; what is left is this rank's part of the state."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(240, 10 + k)) for k in range(4)]
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    whole, world_size = state_bytes(optimizer), dist.get_world_size()
    install_parallel_step(optimizer, pieces=row_pieces(parameters, world_size))
    shares = [state_bytes(optimizer) / whole]
    optimizer.step()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for s in optimizer.state.values()
        for t in s.values()
    }
    shares.append(sum(storages.values()) / whole)  # nothing keeps the whole tensors alive
    return [share * world_size for share in shares]


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_has_its_part_of_the_state(world_size: int) -> None:
    for shares in run_on_pool(installed_later, world_size):
        assert shares == [pytest.approx(1, rel=0.05)] * 2


def named(rank: int) -> None:
    """Names of parameters go with them, also inside the step."""
    seen: list[tuple[int, int]] = []

    class Named(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            seen.extend(
                (len(group["params"]), len(group["param_names"])) for group in self.param_groups
            )
            return super().step(closure)

    net = make_net()
    optimizer = Named(net.named_parameters(), lr=0.1)
    pieces = row_pieces(parameters_of(optimizer), 2)
    install_parallel_step(optimizer, pieces=pieces)
    backward(net, optimizer, 0)
    optimizer.step()
    own = sum(piece.owner == rank for piece in pieces)
    assert seen == [(own, own)]
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_named_parameters() -> None:
    run_on_pool(named, 2)
