"""A function run in a process of its own: files and connections that a data set opens must not be
there when workers fork.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Failed:
    """A `Failed` holds what the function raised, or a RuntimeError with its words where the
    exception itself cannot travel; and its traceback.
    """

    error: Exception
    trace: str


def run_apart(
    function: Callable[..., Any], *arguments: Any, context: Any, timeout_seconds: float, doing: str
) -> Any:
    """Return the result of ``function(*arguments)``, called in a new process of the multiprocessing
    `context`, with one thread; `Failed` where it raised.

    Raises RuntimeError where the process ends without an answer, or gives none in time; `doing` is
    what the message says of it.
    """
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(other, function, arguments), daemon=True)
    process.start()
    other.close()
    try:
        if not mine.poll(timeout_seconds):
            raise RuntimeError(
                f"the process for {doing} gave no result within {timeout_seconds:.0f} s"
            )
        return mine.recv()
    except EOFError:
        raise RuntimeError(f"the process for {doing} was ended") from None
    finally:
        process.kill()
        process.join()
        mine.close()


def _answer(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # as in a worker; a forked process must not use the threads that it thinks it has
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except Exception as error:
        result = Failed(
            error if _survives(error) else RuntimeError(repr(error)), traceback.format_exc()
        )
    connection.send(result)


def _survives(error: Exception) -> bool:
    """Whether an exception is the same type in another process."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
