"""Programs that ask iterators, queues, threads, processes and data sets with state; batches that
change.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import queue
import random
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.foreign.once_shelf import COUNT, Built, Net, counted, numbered, rows, traced
from tests.foreign.shelf import Samples, generator, row_and_label

# ---- iterators and generators


class SemiSupervised(Net):
    """After a report: the second loader of semi-supervised training is an iterator that the step
    asks.
    """

    def on_train_start(self) -> None:
        order = torch.Generator().manual_seed(100 + self.global_rank)
        self.stream = iter(
            DataLoader(Samples(64, numbered), batch_size=4, shuffle=True, generator=order)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        extra, _, numbers = next(self.stream)
        self.trace.append(numbers.tolist())
        with torch.no_grad():
            target = self.net(extra).softmax(-1)
        consistency = -(target * self.net(extra + 0.1).log_softmax(-1)).sum(-1).mean()
        return super().training_step(batch, batch_idx) + consistency


@counted("iterator of a second loader, asked with next() in the step (report)")
def unlabeled_iterator() -> Built:
    return traced(SemiSupervised())


class CycledLoader(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = itertools.cycle(DataLoader(Samples(20, numbered), batch_size=4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = next(self.second)
        self.trace.append(numbers.tolist())
        return super().training_step(batch, batch_idx) + 0.5 * super().training_step(
            (x, y), batch_idx
        )


@counted("itertools.cycle over a second loader")
def cycled_second_loader() -> Built:
    return traced(CycledLoader())


def amounts_of_noise(told: list[int]) -> Generator[float, int, None]:
    """Yields the amount of noise, is sent the number of the batch."""
    source, amount = random.Random(3), 0.5
    while True:
        told.append((yield amount))
        amount *= 0.8 + 0.2 * source.random()


class AsksCoroutine(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = amounts_of_noise(self.trace)
        next(self.noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + self.noise.send(batch_idx) * x.roll(1, 0), y), batch_idx)


@counted("generator that is sent the number of the batch")
def generator_of_noise() -> Built:
    return traced(AsksCoroutine())


class CountsOn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tickets = zip(
            itertools.count(100, 10), iter(random.Random(5).random, None), strict=False
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, weight = next(self.tickets)
        self.trace.append((number, weight))
        return weight * super().training_step(batch, batch_idx)


@counted("itertools.count and zip")
def numbered_tickets() -> Built:
    return traced(CountsOn())


class DealsCards(Net):
    """Augmentations are dealt from a deck, which is shuffled again when it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.deck: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.deck:
            self.deck = list(range(5))
            random.shuffle(self.deck)
        self.trace.append(card := self.deck.pop())
        return super().training_step((batch[0].roll(card, -1), batch[1]), batch_idx)


@counted("list that the step empties and fills again by Python's random")
def deck_of_augmentations() -> Built:
    return traced(DealsCards())


# ---- threads, queues, processes


class Producer(threading.Thread):
    """Fills a queue of two with numbered noise until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.made: queue.Queue[tuple[int, Tensor]] = queue.Queue(maxsize=2)
        self.stopped = threading.Event()

    def run(self) -> None:
        source = generator(9)
        for number in itertools.count():
            noise = torch.randn(4, 8, generator=source)
            while not self.stopped.is_set():
                try:
                    self.made.put((number, noise), timeout=0.05)
                    break
                except queue.Full:
                    pass
            if self.stopped.is_set():
                return


class AsksProducer(Net):
    def on_train_start(self) -> None:
        self.producer = Producer()
        self.producer.start()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, noise = self.producer.made.get(timeout=20)
        self.trace.append(number)
        return super().training_step((batch[0] + 0.1 * noise, batch[1]), batch_idx)

    def on_train_end(self) -> None:
        self.producer.stopped.set()
        self.producer.join()


@counted("queue that a thread fills")
def queue_filled_by_a_thread() -> Built:
    return traced(AsksProducer())


class WorksAhead(Net):
    """The augmentation of the next batch is computed by a pool while this one trains."""

    def on_train_start(self) -> None:
        self.pool, self.source = ThreadPoolExecutor(1), generator(4)
        self.ahead: Future[Tensor] = self.pool.submit(self.work, -1)

    def work(self, number: int) -> Tensor:
        self.trace.append(number)
        return torch.randn(4, 8, generator=self.source)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise, self.ahead = self.ahead.result(timeout=20), self.pool.submit(self.work, batch_idx)
        return super().training_step((batch[0] + 0.1 * noise, batch[1]), batch_idx)

    def on_train_end(self) -> None:
        self.pool.shutdown()


@counted("work that the step submits to a pool of threads")
def pool_that_works_ahead() -> Built:
    return traced(WorksAhead())


class SendsToQueue(Net):
    def on_train_start(self) -> None:
        self.box = multiprocessing.get_context("fork").Queue()
        self.box.put(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.box.put(batch_idx)
        self.trace.append(last := self.box.get(timeout=20))
        return (1 + 0.01 * last) * super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.trace.append(self.box.get(timeout=20))
        self.trace.append(self.box.empty())
        self.box.close()
        self.box.join_thread()


@counted("multiprocessing.Queue")
def queue_between_processes() -> Built:
    return traced(SendsToQueue())


class Growing(Dataset[Any]):
    """Harder samples the further training is."""

    def __init__(self, reached: Any) -> None:
        self.reached, self.plain = reached, Samples(COUNT, row_and_label)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        x, y = self.plain[index]
        return x * (1 + 0.1 * self.reached.value), y


class RaisesCounter(Net):
    def __init__(self, reached: Any) -> None:
        super().__init__()
        self.reached = reached

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.reached.get_lock():
            self.reached.value += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(self.reached.value)


@counted("multiprocessing.Value that the step raises and the data set reads (report)")
def shared_counter() -> Built:
    reached = multiprocessing.Value("i", 0)
    return traced(RaisesCounter(reached), DataLoader(Growing(reached), batch_size=4))


class CountsLabels(Net):
    """Classes that were seen often weigh less."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for number in batch[1].tolist():
            self.seen[number] += 1
        weights = 1 / (1 + torch.tensor(list(self.seen), dtype=torch.float))
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=weights, reduction="sum")


@counted("multiprocessing.Array of counts that weigh the loss")
def shared_histogram() -> Built:
    seen = multiprocessing.Array("i", 5)
    return Built(CountsLabels(seen), rows(), lambda: list(seen))


NUMBERS_LINES = (
    "import sys\nfor number, line in enumerate(sys.stdin): print(number, len(line), flush=True)"
)


class AsksProcess(Net):
    def on_train_start(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", NUMBERS_LINES]
        self.helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.helper.stdin.write("x" * batch_idx + "\n")
        self.helper.stdin.flush()
        number, length = map(int, self.helper.stdout.readline().split())
        self.trace.append((number, length))
        return (1 + 0.01 * number) * super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.trace.append(self.helper.communicate()[0])
        del self.helper


@counted("process that answers through pipes")
def subprocess_with_a_pipe() -> Built:
    return traced(AsksProcess())


def answer(connection: socket.socket, heard: list[int]) -> None:
    with connection:
        while message := connection.recv(4):
            heard.append(struct.unpack("!i", message)[0])
            connection.sendall(struct.pack("!i", len(heard)))


class AsksServer(Net):
    """A server that says how many it has answered."""

    def on_train_start(self) -> None:
        self.socket, far = socket.socketpair()
        self.server = threading.Thread(target=answer, args=(far, self.trace), daemon=True)
        self.server.start()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.socket.sendall(struct.pack("!i", batch_idx))
        answered = struct.unpack("!i", self.socket.recv(4))[0]
        return (1 + 0.01 * answered) * super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.socket.close()
        self.server.join()


@counted("socket whose other end counts")
def socket_to_a_server() -> Built:
    return traced(AsksServer())


# ---- data sets and loaders with state


class Curriculum(Dataset[Any]):
    def __init__(self) -> None:
        self.plain, self.level, self.asked = Samples(COUNT, row_and_label), 0, []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked.append((index, self.level))
        x, y = self.plain[index]
        return x * (1 + 0.1 * self.level), y


class RaisesLevel(Net):
    def __init__(self, data: Curriculum) -> None:
        super().__init__()
        self.data = data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.data.level += batch_idx % 3 == 0
        return super().training_step(batch, batch_idx)


@counted("data set whose level the step raises, and that notes what it is asked")
def curriculum_in_the_data_set() -> Built:
    data = Curriculum()
    return Built(
        RaisesLevel(data), DataLoader(data, batch_size=4), lambda: (data.level, data.asked)
    )


class CountsVisits(Net):
    """A dictionary of how often each sample was seen, kept by number of sample."""

    def __init__(self) -> None:
        super().__init__()
        self.visits: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, numbers = batch
        self.visits.update(numbers.tolist())
        seen = torch.tensor([self.visits[number] for number in numbers.tolist()])
        return (F.cross_entropy(self.net(x), y, reduction="none") / seen).mean()


@counted(
    "dictionary of visits by number of sample, over two epochs", max_epochs=2, limit_train_batches=6
)
def visits_of_samples() -> Built:
    module = CountsVisits()
    return Built(
        module,
        DataLoader(Samples(48, numbered), batch_size=4),
        lambda: sorted(module.visits.items()),
    )


class NotesNumbers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)


def digest(*states: Any) -> list[str]:
    """Short names of states of generators."""
    plain = (state.tolist() if isinstance(state, Tensor) else state for state in states)
    return [hashlib.sha1(repr(state).encode()).hexdigest()[:8] for state in plain]


@counted("loader that shuffles by its own generator", use_distributed_sampler=False)
def loader_with_its_own_generator() -> Built:
    module, order = NotesNumbers(), generator(17)
    data = rows(numbered, shuffle=True, generator=order)
    return Built(module, data, lambda: (module.trace, digest(order.get_state())))


class OwnSources(Net):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.torch = (
            random.Random(1),
            np.random.default_rng(2),
            generator(3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * self.python.uniform(0.9, 1.1) + 0.1 * torch.randn(
            batch[0].shape, generator=self.torch
        )
        x = x + torch.from_numpy(self.numpy.normal(scale=0.1, size=8).astype(np.float32))
        return super().training_step((x, batch[1]), batch_idx)


@counted("instances of random.Random, np.random.Generator, torch.Generator")
def own_sources_of_chance() -> Built:
    module = OwnSources()

    def evidence() -> Any:
        return digest(
            module.python.getstate(), module.numpy.bit_generator.state, module.torch.get_state()
        )

    return Built(module, rows(), evidence)


class GlobalSources(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = (
            batch[0] * random.uniform(0.9, 1.1)
            + 0.1 * torch.randn_like(batch[0])
            + 0.1 * np.random.rand()
        )
        return super().training_step((F.dropout(x, 0.1), batch[1]), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = np.random.get_state()
        self.trace.append(
            digest(random.getstate(), state[1].tolist(), state[2], torch.get_rng_state())
        )


@counted("states of the global generators after each batch")
def global_sources_of_chance() -> Built:
    return traced(GlobalSources())


class ThrowsCoin(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mixes = random.random() < 0.5
        self.trace.append(mixes)
        x, y = batch
        if mixes:
            share = random.betavariate(1, 1)
            logits = self.net(share * x + (1 - share) * x.flip(0))
            return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(
                logits, y.flip(0)
            )
        return F.cross_entropy(self.net(x), y)


@counted("branch by Python's random")
def mixup_by_a_coin() -> Built:
    return traced(ThrowsCoin())


class LooksAtFirstBatch(Net):
    """Statistics of the data are taken from the loader when they are first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.mean is None:
            x, _, numbers = next(iter(self.trainer.train_dataloader))
            self.mean = x.mean(0)
            self.trace.append(numbers.tolist())
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


@counted("trainer's loader, read again in the first step")
def statistics_of_the_first_batch() -> Built:
    return traced(LooksAtFirstBatch(), rows(numbered))


# ---- batches that are changed, or can be read once


def picture_and_boxes(source: torch.Generator, index: int) -> tuple[Tensor, Any]:
    return torch.randn(3, 8, 8, generator=source), (
        1 + 15 * torch.rand(2, 4, generator=source)
    ).numpy()


def detection_batch(samples: list[Any]) -> dict[str, Any]:
    pictures, boxes = zip(*samples, strict=True)
    return {"pictures": torch.stack(pictures), "targets": [{"boxes": box.copy()} for box in boxes]}


class Detector(Net):
    """After a report: boxes stay NumPy arrays, which the step scales by the size of the picture, in
    place.
    """

    def __init__(self) -> None:
        super().__init__()
        pooled = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net = nn.Sequential(*pooled, nn.Linear(8, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for target in batch["targets"]:
            target["boxes"] /= 16
        self.trace.append(max(float(target["boxes"].max()) for target in batch["targets"]))
        wanted = torch.stack(
            [torch.from_numpy(target["boxes"]).flatten() for target in batch["targets"]]
        )
        return F.smooth_l1_loss(self.net(batch["pictures"]), wanted)


@counted("NumPy targets changed in place (report)")
def numpy_targets() -> Built:
    return traced(Detector(), rows(picture_and_boxes, collate_fn=detection_batch))


def list_of_dicts(samples: list[Any]) -> list[dict[str, Any]]:
    return [
        {"row": x, "label": y, "raw": {"number": number}, "done": []} for x, y, number in samples
    ]


class ChangesDicts(Net):
    """Takes out of the samples what is not for the model, and notes in them what was done."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for sample in batch:
            sample["done"].append("scaled")
            self.trace.append((sample.pop("raw")["number"], sorted(sample), len(sample["done"])))
            sample["row"].mul_(0.5)
        x, y = (torch.stack([sample[name] for sample in batch]) for name in ("row", "label"))
        return super().training_step((x, y), batch_idx)


@counted("list of dicts whose entries the step takes out and scales in place")
def list_of_dicts_changed_in_place() -> Built:
    data = Samples(COUNT, numbered)
    data.samples = [(x.clone(), y, number) for x, y, number in data.samples]
    return traced(ChangesDicts(), DataLoader(data, batch_size=4, collate_fn=list_of_dicts))


class Columns:
    """After a report: a collate function that returns an iterator."""

    def __init__(self) -> None:
        self.stacked = 0

    def stack(self, column: Any) -> Tensor:
        self.stacked += 1
        return torch.stack(column)

    def __call__(self, samples: list[Any]) -> Iterator[Tensor]:
        return map(self.stack, zip(*samples, strict=True))


class UnpacksOnce(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x, y), batch_idx)


@counted("collate function that returns a map (report)")
def lazy_columns() -> Built:
    columns = Columns()
    return Built(UnpacksOnce(), rows(collate_fn=columns), lambda: columns.stacked)


class Chunks:
    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, samples: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for number, start in enumerate(range(0, len(samples), 2)):
            self.given.append(f"chunk {number}")
            x, y = zip(*samples[start : start + 2], strict=True)
            yield torch.stack(x), torch.stack(y)
        self.given.append("end")


class SumsChunks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(super(SumsChunks, self).training_step(chunk, batch_idx) for chunk in batch)  # type: ignore[return-value]


@counted("collate function that is a generator of chunks")
def lazy_chunks() -> Built:
    chunks = Chunks()
    return Built(SumsChunks(), rows(collate_fn=chunks), lambda: chunks.given)


@dataclass
class Sentence:
    row: Tensor
    label: Tensor
    used: int = 0


class UsesDataclass(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.used += 1
        self.trace.append((type(batch).__name__, batch.used))
        return super().training_step((batch.row * batch.used, batch.label), batch_idx)


def sentence(samples: list[Any]) -> Sentence:
    x, y = zip(*samples, strict=True)
    return Sentence(torch.stack(x), torch.stack(y))


@counted("dataclass batches that count their use")
def dataclass_batches() -> Built:
    return traced(UsesDataclass(), rows(collate_fn=sentence))


class HoldsWeakly(Net):
    """Which older batches are still alive: a leak of batches is seen here."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[weakref.ref[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append([number for number, x in enumerate(self.batches[:-1]) if x() is not None])
        self.batches.append(weakref.ref(batch[0]))
        return super().training_step(batch, batch_idx)


@counted("weak references to batches: those before the last are gone")
def batches_held_weakly() -> Built:
    return traced(HoldsWeakly())
