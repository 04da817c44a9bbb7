"""Programs that watch their own step: modes, profilers, hooks on nodes, tensor subclasses; and fits
that are not plain.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.flop_counter import FlopCounterMode

from tests.foreign.once_shelf import COUNT, Built, Net, counted, rows, traced
from tests.foreign.shelf import Samples, row_and_label

# ---- modes and profilers


class CountsFlops(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(batch, batch_idx)
        self.trace.append(counter.get_total_flops())
        return loss


@counted("FlopCounterMode in the step")
def flops_counted_by_the_user() -> Built:
    return traced(CountsFlops())


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


class PacksSaved(Net):
    """Saved tensors are packed by the user, in half of the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def pack(self, tensor: Tensor) -> Any:
        self.counts["packed"] += 1
        return tensor if isinstance(tensor, nn.Parameter) else (tensor.bfloat16(), tensor.dtype)

    def unpack(self, packed: Any) -> Tensor:
        self.counts["unpacked"] += 1
        return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with saved_tensors_hooks(self.pack, self.unpack):
            hidden = self.net[:4](batch[0]).tanh()
        return F.cross_entropy(self.net[4](hidden), batch[1])


@counted("saved_tensors_hooks of the user")
def saved_tensors_packed_by_the_user() -> Built:
    module = PacksSaved()
    return Built(module, rows(), lambda: dict(module.counts))


class Profiles(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with (
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
            record_function("own part"),
        ):
            loss = super().training_step(batch, batch_idx)
        self.trace.append(
            [event.count for event in profiler.key_averages() if event.key == "own part"]
        )
        return loss


@counted("torch.profiler in the step")
def profiler_in_the_step() -> Built:
    return traced(Profiles())


class SeesCalls(Net):
    """A profiler of Python, as debuggers and coverage set it, sees which functions of this module
    are called.
    """

    def on_train_start(self) -> None:
        self.before = sys.getprofile()
        sys.setprofile(self.saw)

    def saw(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            self.trace.append(frame.f_code.co_name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner(batch, batch_idx)

    def inner(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        sys.setprofile(self.before)


@counted("sys.setprofile during the fit")
def calls_seen_by_python() -> Built:
    return traced(SeesCalls())


class HooksNodes(Net):
    """Hooks on nodes of the graph, on several gradients together, and on all modules of the
    program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def on_train_start(self) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(self.called)

    def called(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.counts["linear"] += isinstance(module, nn.Linear)

    def note(self, name: str) -> None:
        self.counts[name] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.grad_fn.register_hook(lambda *args: self.note("node"))
        loss.grad_fn.register_prehook(lambda *args: self.note("before node"))
        register_multi_grad_hook(
            tuple(self.net[4].parameters()), lambda grads: self.note("both"), mode="all"
        )
        return loss

    def on_train_end(self) -> None:
        self.handle.remove()


@counted("hooks on nodes, on several gradients, on all modules")
def hooks_on_nodes() -> Built:
    module = HooksNodes()
    return Built(module, rows(), lambda: dict(module.counts))


class Unit(Tensor):
    """Numbers with a unit, which follows them through functions."""

    seen: Counter[str] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen[func.__name__] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class UsesUnits(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        lengths = batch[0].as_subclass(Unit)
        self.trace.append(type(lengths * 2).__name__)
        return super().training_step(((lengths * 2 - 1).as_subclass(Tensor), batch[1]), batch_idx)


@counted("tensor subclass that counts the functions it meets")
def subclass_that_counts() -> Built:
    Unit.seen.clear()
    module = UsesUnits()
    return Built(module, rows(), lambda: (module.trace, dict(Unit.seen)))


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


class Validates(Net):
    """Validation in the middle of the epoch, of which the next step of training knows."""

    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(("train", batch_idx, self.training))
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.validated)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.trace.append(("validate", batch_idx, self.training))
        self.log("validated", float(self.validated))

    def val_dataloader(self) -> Any:
        return rows()


@counted(
    "validation between batches", limit_val_batches=2, val_check_interval=4, num_sanity_val_steps=1
)
def validation_between_batches() -> Built:
    return traced(Validates())


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


class ReadsBack(Net):
    """Reads what it has logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = self.trainer.callback_metrics.get("batch")
        self.trace.append(None if before is None else float(before))
        self.log("batch", float(batch_idx))
        return super().training_step(batch, batch_idx)


@counted("trainer.callback_metrics read by the step")
def metrics_read_back() -> Built:
    return traced(ReadsBack())


class ReadByWorkers(Dataset[Any]):
    """Counts over processes how often it is read; says in which worker, by whose seed."""

    def __init__(self, reads: Any) -> None:
        self.reads, self.plain = reads, Samples(COUNT, row_and_label)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        with self.reads.get_lock():
            self.reads.value += 1
        x, y = self.plain[index]
        return x + 0.1 * torch.randn(8), y, get_worker_info().id


class NotesWorkers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)


@counted("reads counted over the workers of a loader, and their seeds")
def reads_of_workers() -> Built:
    reads, module = multiprocessing.Value("i", 0), NotesWorkers()
    data = DataLoader(
        ReadByWorkers(reads), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    return Built(module, data, lambda: (module.trace, reads.value))
