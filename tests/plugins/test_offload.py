"""Fits whose shards are offloaded: to files, on CPU ranks. They are equal to those of `ddp`."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_topt.optim import mapped_memory
from lightning_topt.optim.mapped_memory import NewStatesInFiles, empty_in_file, in_file, is_in_file
from tests.plugins.test_first_values import CLUSTER, LateGPT, fit, full, said
from tests.plugins.trainer_ranks import on_ranks

DEEP, LIMITED = {"layers": 6, "width": 256}, {"cluster": CLUSTER}
UNEVEN = {"layers": 2, "width": 6, "vocab": 33, "tied": True}


class Momentum(LateGPT):
    """Makes its states by `clone`."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Early(LateGPT):
    """Has states before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


def local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def test_tensors_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "_folder", lambda: str(tmp_path))
    before = torch.randn(3, 5)
    kept = in_file(before)
    assert is_in_file(kept) and not is_in_file(before)
    assert torch.equal(kept, before)
    assert not os.listdir(tmp_path)  # a file without a name
    with NewStatesInFiles():
        made = [torch.zeros_like(kept), torch.clone(kept), torch.full_like(kept, 2.0)]
        other = [torch.zeros_like(before), kept + 1]
    assert all(map(is_in_file, made)) and not any(map(is_in_file, other))
    assert torch.equal(made[1], before) and float(made[2].sum()) == 30
    kept.add_(1)
    assert torch.equal(made[1], before)


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(OSError, match=r"offloading needs 4 MiB more in .*TMPDIR"):
        empty_in_file((1024, 1024), torch.float32)


def same(rank: int, plans: tuple[str, ...], options: dict[str, Any]) -> None:
    whole = fit("ddp", False, **options)[0]
    for plan in plans:
        module, trainer = fit(plan, False, **options)
        # up to the order of additions in reduced gradients
        assert module.losses == pytest.approx(whole.losses, rel=1e-6)
        assert "offload" in trainer.strategy.parallel_plan.summary()
        for name, value in full(whole).items():
            torch.testing.assert_close(full(module)[name], value, rtol=1e-5, atol=1e-6)


EVERY = ("zero3+offload", "zero2+offload", "zero3+recompute+offload")


@pytest.mark.parametrize(
    ("plans", "options"),
    [
        (EVERY, {"gradient_clip_val": 0.1}),
        (EVERY[:1], {"made": UNEVEN, "accumulate_grad_batches": 2}),
        (EVERY[:1], {"kind": Momentum}),
        pytest.param(EVERY[:1], {"kind": Early}, marks=pytest.mark.thorough),
    ],
)
def test_fits_are_those_of_ddp(plans: tuple[str, ...], options: dict[str, Any]) -> None:
    on_ranks(same, plans, options)


def in_files(rank: int, folder: Path) -> None:
    """On the meta device, whose shards stay after the fit; saved, and resumed in other plans."""
    expected = fit("ddp", False, max_steps=-1, max_epochs=2)[0]
    options = {"options": {"checkpoint": "sharded"}, "max_steps": -1}
    module, trainer = fit("zero3+offload", **options)
    (optimizer,) = trainer.optimizers
    assert all(is_in_file(local(parameter)) for parameter in module.parameters())
    assert len(optimizer.state) == len([*module.parameters()])
    for state in optimizer.state.values():
        assert is_in_file(local(state["exp_avg"])) and is_in_file(local(state["exp_avg_sq"]))
    trainer.save_checkpoint(folder / "end.ckpt")
    for plan, on_meta in (("zero3+offload", True), ("zero3", True), ("ddp", False)):
        rest = {**options, "seed": 9, "path": folder / "end.ckpt", "max_epochs": 2}
        resumed, trainer = fit(plan, on_meta, **rest)
        assert resumed.losses == pytest.approx(expected.losses[6:], rel=1e-5)
        if "offload" in plan:
            (state, *_) = trainer.optimizers[0].state.values()
            assert is_in_file(local(state["exp_avg"]))


def test_shards_and_states_are_in_files(tmp_path: Path) -> None:
    on_ranks(in_files, tmp_path)


class Unknown(LateGPT):
    """With an optimizer that no rule is known of."""

    def configure_optimizers(self) -> Any:
        return type("Own", (torch.optim.Adam,), {"step": lambda self, closure=None: closure()})(
            self.parameters()
        )


def refusals(rank: int) -> list[str]:
    return [
        said(lambda: fit("zero1+offload")),
        said(lambda: fit("zero3+offload", kind=Unknown)),
        said(lambda: fit(None, False, made=DEEP, options={**LIMITED, "memory_limit": "1MiB"})),
    ]


def test_what_cannot_be_offloaded_is_said() -> None:
    words = ("choose zero3[+]offload", "elements one by one", "offload")
    for rank in on_ranks(refusals):
        for said_words, message in zip(words, rank, strict=True):
            assert re.search(said_words, message), message


def searched(rank: int, limit: int) -> str:
    whole = fit("ddp", False, made=DEEP)[0]
    options = {**LIMITED, "memory_limit": limit}
    module, trainer = fit(None, False, made=DEEP, options=options)
    assert module.losses == pytest.approx(whole.losses, rel=1e-6)
    return str(trainer.strategy.parallel_plan.reason)


def test_a_limit_below_all_others_offloads() -> None:
    reason = on_ranks(searched, 44 << 20)[0]
    assert "offloaded to the host, without which no plan fits" in reason
