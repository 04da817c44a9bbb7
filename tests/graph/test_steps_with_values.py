"""Steps that fake tensors cannot follow run on real ones."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_topt.graph.capture import capture, observe_step
from lightning_topt.graph.errors import CaptureError, may_need_values
from tests.graph.measure import flops_of
from tests.launch import run_ranks


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()


class Item(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        assert not torch.isnan(loss) and loss >= 0
        assert f"{loss:.3f}" != "nan"
        return loss * 2 if loss.item() > 1e-9 else loss


class Mask(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.net(batch)
        return y[batch[:, 0] > 0].square().mean() + y[torch.nonzero(batch[:, 1])].mean()


class Speech(Net):
    """CTC, whose kernel reads the lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch).unsqueeze(1).expand(-1, 2, -1).log_softmax(-1)
        return F.ctc_loss(
            logits, torch.ones(2, 2, dtype=torch.long), torch.tensor([4, 4]), torch.tensor([2, 1])
        )


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch + self.table(torch.tensor([1, 1, 3, 4])), batch_idx)


class Packed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(
            batch[None].repeat(2, 1, 1), torch.tensor([4, 2]), batch_first=True
        )
        return super().training_step(self.rnn(packed)[0].data, batch_idx)


class Print(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        str(loss.tolist())
        return loss


X = torch.linspace(-1, 1, 32).reshape(4, 8)
NEED_VALUES = [Item(), Mask(), Speech(), Packed(), Print()]


@pytest.mark.parametrize(
    "module", [*NEED_VALUES, Sparse()], ids=lambda module: type(module).__name__
)
def test_steps_that_depend_on_values(module: Any) -> None:
    if not isinstance(module, Sparse):
        with pytest.raises(Exception) as caught:
            capture(module, X, batch_scaling=False)
        assert may_need_values(caught.value)
    before = {
        name: (value.clone(), value._version)
        for name, value in module.state_dict(keep_vars=True).items()
    }
    graph = observe_step(module, X)
    assert sum(flops_of(op, "forward", 4) for op in graph.ops) >= 2 * 4 * 64
    assert sum(flops_of(op, "backward", 4) for op in graph.ops) >= 2 * 4 * 64
    assert graph.unused == ()
    for name, value in module.state_dict(keep_vars=True).items():
        assert (
            torch.equal(value, before[name][0])
            and value._version == before[name][1]
            and value.grad is None
        )


def test_what_real_tensors_cannot_help() -> None:
    silent, frozen, lazy = Net(), Net().requires_grad_(False), Net()
    silent.automatic_optimization, lazy.net = False, nn.LazyLinear(8)  # calls no `manual_backward`
    for module in (silent, frozen, lazy):
        with pytest.raises(CaptureError) as caught:
            capture(module, X)
        assert not may_need_values(caught.value)


def test_users_errors_are_recognised() -> None:
    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not torch.is_tensor(batch) or type(batch) is not Tensor:
                raise KeyError("only plain tensors")
            return super().training_step(batch, batch_idx)

    with pytest.raises(CaptureError, match="KeyError: 'only plain tensors'") as caught:
        capture(Strange(), X)
    assert may_need_values(caught.value)
    assert observe_step(Strange(), X).ops

    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("always")

    with pytest.raises(CaptureError, match=r"KeyError: 'always'\n.*in training_step: raise"):
        observe_step(Wrong(), X)


# ---- collectives ---------------------------------------------------------------------------------


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.net(batch)
        everyone = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, y.detach())
        total = y.detach().sum()
        dist.all_reduce(total, async_op=True).wait()
        dist.barrier()
        return (y - torch.stack(everyone).mean(0)).square().mean() + total * 0


class GathersObjects(Gathers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, f"rank {dist.get_rank()}")
        assert names == ["rank 0", "rank 1"]
        return super().training_step(batch, batch_idx)


def _collectives(rank: int) -> None:
    if rank == 0:  # the other rank does nothing: a traced step waits for nobody
        for graph in (capture(Gathers(), X), observe_step(Gathers(), X)):
            assert {"c10d.allgather_", "c10d.allreduce_"} <= {op.kind for op in graph.ops}
        with pytest.raises(CaptureError) as caught:
            capture(GathersObjects(), X)
        assert may_need_values(caught.value)
        with pytest.raises(CaptureError, match="all_gather_object"):
            observe_step(GathersObjects(), X)
    dist.barrier()


def test_collectives_in_the_step() -> None:
    run_ranks(_collectives, 2)
