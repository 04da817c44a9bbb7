"""Searches that need nothing of one another run in several processes of this machine: in this one,
and in helpers beside it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from lightning_topt.cli.local_ranks import start_method

_MOST_PROCESSES = 8  # each has its own captures: 1.3 GB for 70 B parameters
_PATIENCE_SECONDS = 600.0  # for a helper that sends nothing
Item = TypeVar("Item")
Result = TypeVar("Result")


def most_processes(searches: int) -> int:
    """Return how many processes are worth having for so many searches here."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(min(cores, searches, _MOST_PROCESSES), 1)


def outcomes_of(
    function: Callable[[Item], Result], items: Sequence[Item], *, processes: int
) -> Iterator[tuple[int, Result | ValueError]]:
    """Start helpers, and return an iterator of the place of each item with what `function` returns
    for it, or the ValueError that it raises, as they come.

    Every process takes the next item when it has done one. What a helper took and did not finish is
    done here. Helpers are forked where that is safe, else spawned, for which `function` and `items`
    are pickled; results always are.
    """
    context: Any = get_context(start_method("cpu"))
    taken, received = context.Value("i", 0), queue.SimpleQueue[tuple[int, Any] | None]()
    helpers = [_start(context, function, items, taken, received) for _ in range(processes - 1)]
    return _outcomes(function, items, taken, received, helpers)


def _outcomes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    taken: Any,
    received: queue.SimpleQueue[Any],
    helpers: Sequence[Any],
) -> Iterator[tuple[int, Result | ValueError]]:
    left, going = {*range(len(items))}, len(helpers)
    try:
        while True:
            index = _take(taken)
            is_last = index >= len(items)
            if not is_last:
                yield index, _outcome(function, items[index])
                left.discard(index)
            while going and left and (is_last or not received.empty()):
                try:
                    found = received.get(timeout=_PATIENCE_SECONDS)
                except queue.Empty:
                    going = 0
                    break
                if found is None:  # one has ended
                    going -= 1
                else:
                    left.discard(found[0])
                    yield found
            if is_last:
                break
        for index in sorted(left):
            yield index, _outcome(function, items[index])
    finally:
        for helper in helpers:
            helper.terminate()
            helper.join()


def _start(
    context: Any, function: Any, items: Sequence[Any], taken: Any, received: queue.SimpleQueue[Any]
) -> Any:
    reader, writer = context.Pipe(duplex=False)
    helper = context.Process(target=_help, args=(function, items, taken, writer), daemon=True)
    helper.start()
    writer.close()  # or its end would never be seen
    threading.Thread(target=_receive, args=(reader, received), daemon=True).start()
    return helper


def _receive(reader: Connection, received: queue.SimpleQueue[Any]) -> None:
    """Pass on what a helper sends, and None when it has ended: a pipe that nobody reads would stop
    it.
    """
    try:
        with suppress(EOFError, OSError):
            while True:
                received.put(reader.recv())
    finally:
        received.put(None)


def _help(function: Any, items: Sequence[Any], taken: Any, writer: Connection) -> None:
    """Do items in a process of its own, which shows nothing."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (to the end of the process)
    torch.set_num_threads(1)  # a forked process would wait for threads that it does not have
    while (index := _take(taken)) < len(items):
        writer.send((index, _outcome(function, items[index])))


def _take(taken: Any) -> int:
    with taken.get_lock():
        index: int = taken.value
        taken.value += 1
    return index


def _outcome(function: Callable[[Item], Result], item: Item) -> Result | ValueError:
    try:
        return function(item)
    except ValueError as error:
        return error
