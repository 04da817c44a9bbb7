"""Running a function in a process of its own.

Data sets open files and connections; these must not be in this process when workers fork.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Failed:
    """What the function raised, with its traceback.

    It is a RuntimeError with the repr where the exception itself cannot be pickled.
    """

    error: Exception
    trace: str


def run_apart(
    function: Callable[..., Any],
    *arguments: object,
    context: Any,
    timeout_seconds: float,
    doing: str,
) -> Any:
    """Call ``function(*arguments)`` in a new process, with one thread, and return the result.

    The result is `Failed` where the function raised.

    Args:
        function: importable, so that a new process can find it.
        *arguments: can be pickled.
        context: of multiprocessing.
        timeout_seconds: for the result.
        doing: what the function does, for messages.

    Raises:
        RuntimeError: the process ended without a result, or gave none in time.
    """
    # this end reads; the process has the other one
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(other, function, arguments), daemon=True)
    process.start()
    # so that the pipe ends with the process, which alone can write to it
    other.close()
    try:
        if not mine.poll(timeout_seconds):
            raise RuntimeError(
                f"the process for {doing} gave no result within {timeout_seconds:.0f} s"
            )
        return mine.recv()
    # it wrote nothing: killed for memory, or it ended itself
    except EOFError:
        raise RuntimeError(f"the process for {doing} was ended") from None
    finally:
        process.kill()
        process.join()
        mine.close()


def _answer(connection: Any, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    # As in a worker: a forked process must not use its parent's thread pool.
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except Exception as error:
        result = Failed(error, traceback.format_exc())
        # Some exceptions cannot be pickled, others come back as another type.
        try:
            if type(pickle.loads(pickle.dumps(error))) is not type(error):
                result = replace(result, error=RuntimeError(repr(error)))
        except Exception:
            result = replace(result, error=RuntimeError(repr(error)))
    connection.send(result)
