"""The commands of `topt`, most under Hydra; `topt_console` answers what needs no Lightning.

`run` imports the module of a command (``lightning_topt.cli.<command>``) when it is asked for. Hydra
composes the command's configuration, with which the module's `run` is called. Wrong use ends with
one sentence and exit code 2; other errors show their traceback and end with 1.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import yaml
from hydra.errors import HydraException, InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

import topt_console
from hydra_plugins.lightning_topt_searchpath import hydra_command
from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.started_ranks import leave_to_rank_0, run_name, started_rank
from topt_console.status_line import STATUS

FULL_ERROR = "HYDRA_FULL_ERROR"
CLUSTER_FILES = (".yaml", ".yml")
_CLUSTERS = re.compile(r"^cluster=(\[.*\])$", re.DOTALL)
# whole numbers of the trainer and the least that they may be: Lightning takes any
_LEAST = {"max_epochs": -1, "max_steps": -1, "accumulate_grad_batches": 1, "log_every_n_steps": 0}
_OF_ONE_RANK = ("predict",)  # ranks do nothing together in these
_WITH_OPTIONS = ("checkpoint",)  # which have no configuration


def main() -> None:
    """Do what `python -m lightning_topt.cli.main` does: the same as the console script."""
    topt_console.main()


def run(command: str) -> None:
    """Run a command under Hydra; tracebacks only where they say more than the message."""
    # Hydra's own variable, read before it is changed
    wants_traceback = os.environ.get(FULL_ERROR) not in (None, "", "0")
    # classes of the user's own (`model._target_=mine.Net`), as `python -m` finds them
    sys.path.append(os.getcwd())
    try:
        task = importlib.import_module(f"lightning_topt.cli.{command}").run
        if command in _WITH_OPTIONS:
            task(sys.argv[2:])
        else:
            hydra_main(command, task)
    except Exception as error:
        STATUS.clear()
        sentence = None if wants_traceback else _sentence(error)
        if sentence is None:
            traceback.print_exc()
            sys.exit(1)
        topt_console.refuse(sentence)


def hydra_main(command: str, run: Callable[[DictConfig], object]) -> None:
    """Compose the configuration of `command` from the command line and pass it to `run`.

    Hydra reads its overrides from `sys.argv`, and reports errors in its own way unless an
    environment variable is set. While `run` works both are as the user left them: Lightning starts
    the other ranks from them.
    """
    arguments, full_error = sys.argv, os.environ.get(FULL_ERROR)
    # arguments: the program, the command, then overrides
    words = arguments[2:]
    if command == "plan":
        words = as_hydra_reads(words)
    OmegaConf.register_new_resolver(
        "topt.run", partial(run_name, command=words), use_cache=True, replace=True
    )
    words = _with_overrides(words, _words_of_rank(command, words))
    has_begun = False

    def task(config: DictConfig) -> object:
        nonlocal has_begun
        has_begun = True
        for name, least in _LEAST.items():
            if (value := OmegaConf.select(config, f"trainer.{name}")) is not None:
                check_whole(value, name=f"trainer.{name}", least=least)
        # the user's state again, inside of Hydra's
        with _process_state(arguments, full_error):
            return run(config)  # what sweepers read

    # "1": Hydra raises its errors instead of printing them
    try:
        with _process_state([arguments[0], *words], "1"):
            hydra_command(command)(task)()
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        # what Hydra does not find is an OSError too
        if has_begun or isinstance(error, HydraException):
            raise
        raise ValueError(
            f"the configuration or the run folder (hydra.run.dir): {_one_line(str(error))}"
        ) from error


def as_hydra_reads(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``cluster=[a,b]`` as ``clusters=[a,b]``.

    A group of Hydra has one choice. The first cluster becomes the group's choice too, so that
    entries of clusters can be overridden.
    """
    read: list[str] = []
    for word in arguments:
        # cluster=[a,b] becomes clusters=[a,b] cluster=a; files are no choices of the group
        listed = _CLUSTERS.match(word)
        read.append(f"clusters={listed[1]}" if listed else word)
        first = listed[1].strip("[] ").split(",")[0].strip() if listed else ""
        if first and not first.endswith(CLUSTER_FILES):
            read.append(f"cluster={first}")
    return read


def _words_of_rank(command: str, words: Sequence[str]) -> list[str]:
    # Return Hydra's overrides for another rank of torchrun or srun, as Lightning's own have.
    # Rank 0 alone keeps the configuration, and each rank has a log of its own.
    # Raises: ValueError: each rank would hand the jobs of a sweep to submitit
    rank, ranks = started_rank()
    if ranks > 1 and any(word.startswith("hydra/launcher=submitit") for word in words):
        raise ValueError(
            f"{ranks} ranks of srun or torchrun would each submit all jobs of the sweep: start it "
            "in one process, without srun, and submitit starts the ranks of each job"
        )
    if rank and command in _OF_ONE_RANK:
        leave_to_rank_0()
    names = f"hydra.job.name={command}_rank_{rank}"
    return ["hydra.output_subdir=null", names] if rank else []


def _with_overrides(words: Sequence[str], further: Sequence[str]) -> list[str]:
    # Add overrides behind the last one: Hydra reads none on both sides of an option such as -m
    places = (
        place
        for place, word in enumerate(words, 1)
        if not word.startswith("-") and ("=" in word or word.startswith("~"))
    )
    last = max(places, default=len(words))
    return [*words[:last], *further, *words[last:]]


@contextmanager
def _process_state(arguments: list[str], full_error: str | None) -> Generator[None]:
    # Set the command line and Hydra's environment variable, and put them back at the end
    before = sys.argv, os.environ.get(FULL_ERROR)
    try:
        _set_process_state(arguments, full_error)
        yield
    finally:
        _set_process_state(*before)


def _set_process_state(arguments: list[str], full_error: str | None) -> None:
    sys.argv = arguments
    # a variable that was not set is removed, not set to nothing
    os.environ.pop(FULL_ERROR, None)
    if full_error is not None:
        os.environ[FULL_ERROR] = full_error


# ---- errors


def _sentence(error: BaseException) -> str | None:
    # Return the message of an error that the user can mend.
    # None for all others, whose traceback is needed
    # what a `_target_` raised: its message, after the entry that names the target
    cause = error.__cause__
    if isinstance(error, InstantiationException) and cause is not None:
        place = re.search(r"full_key: (\S+)", str(error))
        inner = _sentence(cause)
        if inner is None and isinstance(cause, TypeError | ImportError):
            # an argument that the target does not take, or a target that is not there
            inner = _one_line(str(cause))
        return f"{place[1]}: {inner}" if inner and place else inner
    if isinstance(error, InterpolationKeyError):
        return (
            f"{_one_line(str(error))}; a value that `--cfg job` shows refers to it, as data made "
            "for another model does (data=own takes yours)"
        )
    if isinstance(error, ModuleNotFoundError):  # ours have no name, but a hint
        hint = "" if error.name is None else "; install the package that has it"
        return _one_line(str(error)) + hint
    # written for the user: a ValueError whose innermost frame is in this package or in Lightning
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    is_ours = isinstance(error, ValueError) and module.startswith(("lightning_topt.", "lightning."))
    if is_ours or isinstance(error, MisconfigurationException):
        return _one_line(str(error))
    if isinstance(error, HydraException | OmegaConfBaseException):
        # Hydra says where, and the cause says what
        more = f": {_one_line(str(cause))}" if isinstance(cause, OmegaConfBaseException) else ""
        return _one_line(str(error)) + more
    return None


def _one_line(message: str) -> str:
    # Hydra's messages are paragraphs, of which the first ones are kept: no search path, no types
    message = re.split(r"Config search path:|\n\s*object_type=|\n\s*full_key:", message)[0]
    return re.sub(r"\s*\n\s*", " ", message.strip())


if __name__ == "__main__":
    main()
