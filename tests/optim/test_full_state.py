"""Checkpoints of the parallel step against those of the unsharded optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import install_parallel_step
from tests.launch import run_ranks
from tests.optim.parallel_cases import OPTIMIZERS, ROUNDING, Net, loss_of, make_net, pieces_for


def differences(got: Any, wanted: Any, *, rtol: float = 0, path: str = "") -> list[str]:
    """Where two nested states differ: types, keys in order, dtypes, values (up to `rtol`)."""
    if type(got) is not type(wanted):
        return [f"{path}: {type(got)} for {type(wanted)}"]
    if isinstance(got, dict):
        if list(got) != list(wanted):
            return [f"{path}: keys {list(got)} for {list(wanted)}"]
        return [
            line
            for key in got
            for line in differences(got[key], wanted[key], rtol=rtol, path=f"{path}/{key}")
        ]
    if isinstance(got, list | tuple):
        if len(got) != len(wanted):
            return [f"{path}: {len(got)} for {len(wanted)} items"]
        pairs = enumerate(zip(got, wanted, strict=True))
        return [
            line for i, (a, b) in pairs for line in differences(a, b, rtol=rtol, path=f"{path}/{i}")
        ]
    if isinstance(got, Tensor):
        same = all(getattr(got, a) == getattr(wanted, a) for a in ("dtype", "shape", "device"))
        same = same and got.stride() == wanted.stride()
        equal = same and torch.allclose(got, wanted, rtol=rtol, atol=1e-3 * rtol)
        return [] if equal else [f"{path}: {got} for {wanted}"]
    return [] if got == wanted else [f"{path}: {got} for {wanted}"]


def assert_near(net: Net, wanted: Net, name: str) -> None:
    got, want = dict(net.named_parameters()), dict(wanted.named_parameters())
    assert differences(got, want, rtol=ROUNDING.get(name, 0)) == [], name


def train(net: Net, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def plain_run(name: str, steps: int) -> tuple[Net, Optimizer]:
    net = make_net()
    optimizer = OPTIMIZERS[name][0](net)
    train(net, optimizer, range(steps))
    return net, optimizer


def saved(rank: int) -> list[bytes]:
    """Checkpoints of all optimizers after four steps, equal to those of unsharded ones."""
    checkpoints = []
    for name, (make, by_element) in OPTIMIZERS.items():
        net = make_net()
        optimizer = make(net)
        install_parallel_step(
            optimizer, pieces=pieces_for(optimizer, dist.get_world_size(), by_element)
        )
        train(net, optimizer, range(4))
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        if rank == 0:
            state = optimizer.state_dict()
            plain_net, plain = plain_run(name, 4)
            wanted = plain.state_dict()
            wanted["state"] = {index: wanted["state"][index] for index in sorted(wanted["state"])}
            assert differences(state, wanted, rtol=ROUNDING.get(name, 0)) == [], name
            assert_near(net, plain_net, name)
            before = copy.deepcopy(state)
            file = io.BytesIO()
            torch.save({"net": net.state_dict(), "optimizer": state}, file)
            checkpoints.append(file.getvalue())
        train(net, optimizer, range(4, 5))
        if rank == 0:
            # a saved state does not change with later steps
            assert differences(state, before) == []
        with pytest.raises(
            RuntimeError, match=r"call optimizer.consolidate_state_dict\(\) on all ranks"
        ):
            optimizer.state_dict()
    return checkpoints


def resumed(rank: int, checkpoints: list[bytes]) -> None:
    """From a checkpoint to the seventh step at this world size, as the unsharded optimizer does."""
    for (name, (make, by_element)), checkpoint in zip(OPTIMIZERS.items(), checkpoints, strict=True):
        loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
        kept = copy.deepcopy(loaded["optimizer"])
        net = make_net(seed=1)
        net.load_state_dict(loaded["net"])
        optimizer = make(net)
        install_parallel_step(
            optimizer, pieces=pieces_for(optimizer, dist.get_world_size(), by_element)
        )
        optimizer.load_state_dict(loaded["optimizer"])
        train(net, optimizer, range(4, 7))
        plain_net, plain = plain_run(name, 7)
        assert_near(net, plain_net, name)
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        if rank == 0:
            wanted = plain.state_dict()
            wanted["state"] = {index: wanted["state"][index] for index in sorted(wanted["state"])}
            assert differences(optimizer.state_dict(), wanted, rtol=ROUNDING.get(name, 0)) == [], (
                name
            )
            # Loaded tensors may be shared with the optimizer, as torch does; never cut or dropped.
            assert loaded["optimizer"]["state"].keys() == kept["state"].keys()
        else:
            with pytest.raises(RuntimeError, match="on rank 0"):
                optimizer.state_dict()


def resumed_plainly(rank: int, checkpoints: list[bytes]) -> None:
    """From a checkpoint of a parallel step without one."""
    for name, checkpoint in zip(OPTIMIZERS, checkpoints, strict=True):
        loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
        net = make_net(seed=1)
        net.load_state_dict(loaded["net"])
        optimizer = OPTIMIZERS[name][0](net)
        optimizer.load_state_dict(loaded["optimizer"])
        train(net, optimizer, range(4, 7))
        assert_near(net, plain_run(name, 7)[0], name)


def test_checkpoints_are_the_unsharded_ones_and_load_at_another_size() -> None:
    checkpoints = run_ranks(saved, 2)[0]
    assert len(checkpoints) == len(OPTIMIZERS)
    run_ranks(resumed, 3, checkpoints)
    run_ranks(resumed_plainly, 1, checkpoints)


def unsharded_checkpoint(rank: int) -> None:
    """A plain optimizer's checkpoint, state only of parameters that had gradients, before and after
    the first step.
    """
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    install_parallel_step(optimizer, pieces=pieces_for(optimizer, 2, True))
    optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
    if rank == 0:
        assert optimizer.state_dict()["state"] == {}
    plain_net = make_net()
    plain = torch.optim.AdamW(plain_net.parameters(), lr=0.02)
    train(plain_net, plain, range(3))
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values())
    whole = sum(t.numel() for state in plain.state.values() for t in state.values())
    assert held < 0.6 * whole
    optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
    if rank == 0:
        assert differences(optimizer.state_dict(), plain.state_dict()) == []
    wrong = torch.optim.AdamW(list(make_net().parameters())[:2])
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(wrong.state_dict())


def test_loads_unsharded_checkpoints() -> None:
    run_ranks(unsharded_checkpoint, 2)
