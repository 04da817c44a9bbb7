"""Programs that watch their own step: modes, profilers, hooks on nodes, tensor subclasses; and fits
that are not plain.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.foreign.once_shelf import Built, Net, counted, rows, traced

# ---- modes and profilers


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class OwnModes(Net):
    """A dispatch mode and a function mode around the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.functions = Operators(), Functions()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.operators, self.functions:
            return super().training_step(batch, batch_idx)


@counted("own dispatch mode and function mode, which count")
def modes_of_the_user() -> Built:
    module = OwnModes()
    return Built(module, rows(), lambda: (dict(module.operators.seen), dict(module.functions.seen)))


class Scripted(nn.Module):
    """Counts its calls in a buffer, inside of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.relu(self.linear(x))


@counted("block of TorchScript that counts in a buffer")
def scripted_block() -> Built:
    module = Net()
    block = torch.jit.script(Scripted())
    module.net = nn.Sequential(nn.Linear(8, 16), block, nn.Linear(16, 5))
    return Built(module, rows(), lambda: int(block.calls))


@counted("Trainer(detect_anomaly=True)", detect_anomaly=True)
def anomalies_watched() -> Built:
    module = Net()
    module.net[1].register_forward_hook(
        lambda *args: module.trace.append(torch.is_anomaly_enabled())
    )
    return traced(module)


@counted("dtypes that blocks see under autocast", precision="bf16-mixed")
def dtypes_under_autocast() -> Built:
    module = Net()
    module.net[1].register_forward_hook(
        lambda block, inputs, output: module.trace.append(str(output.dtype))
    )
    return traced(module)


# ---- fits that are not plain


class CountsUpdates(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(
            lambda *args: self.trace.append((self.current_epoch, self.global_step))
        )
        return optimizer


@counted(
    "accumulation whose epochs end in the middle",
    accumulate_grad_batches=4,
    max_epochs=2,
    limit_train_batches=6,
)
def accumulation_cut_by_epochs() -> Built:
    return traced(CountsUpdates())
