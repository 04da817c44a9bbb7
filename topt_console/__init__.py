"""Entry point of the console script `topt`: what needs no Lightning is answered without it.

It is a package of its own because `import lightning_topt` imports Lightning, which takes seconds:
help, version and shell completion import at most Hydra.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import NoReturn

from topt_console.status_line import STATUS

__version__ = "0.1.0"
COMMANDS = ("plan", "train", "calibrate", "predict", "verify", "checkpoint")
WRONG_USE = 2
COMPLETION = ("-sc", "--shell-completion")

HELP = """\
topt: plan and train PyTorch Lightning modules across devices.

  topt plan      [overrides]   search the frontier of step time and memory; no training
  topt train     [overrides]   plan, train, validate; ends with what was predicted and what was \
measured
  topt calibrate [overrides]   measure this machine, for later plans
  topt predict   [overrides]   what given plans or recorded runs would take on a cluster; no search
  topt verify    [overrides]   would a plan run, and what would each rank hold; any number of ranks
  topt checkpoint FOLDER FILE  weights of a sharded checkpoint as safetensors, tensor by tensor
  topt --version

Overrides are Hydra's; what has [ or { is in quotes. For instance
  topt plan  model=gpt cluster=local_cpu strategy.memory_limit=2GiB
  topt plan  model=gpt 'cluster=[a100_8x8,h100_2x8]' batch_size=1024 work.tokens=300e9 \
limits.deadline=60d
  topt train experiment=byte_lm strategy=topt trainer.max_epochs=1
`topt train --help` lists the groups and values, `topt train --cfg job` shows the whole \
configuration.
eval "$(topt -sc install=bash)" completes commands and overrides in this shell (also fish and zsh).
HYDRA_FULL_ERROR=1 shows the traceback of every error."""


def main() -> None:
    """Answer at once, or go on to the command."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first in ("-h", "--help"):
        print(HELP)
    elif first == "--version":
        print(f"lightning_topt {__version__}")
    elif first in COMPLETION:
        complete(sys.argv[2] if len(sys.argv) > 2 else "")
    elif first not in COMMANDS:
        refuse(f"there is no command {first!r}; choose one of {', '.join(COMMANDS)}")
    else:
        if first == "plan":
            STATUS.show("importing torch and Lightning")
        from topt_console.light_packages import LightPackages  # noqa: PLC0415  (help needs none)

        sys.meta_path.insert(0, LightPackages())
        _import_without_collection("lightning_topt.cli.main").run(first)


def _import_without_collection(name: str) -> ModuleType:
    """Import a module with the garbage collector off.

    What imports make stays, and looking through it takes a third of their time, and more of every
    later collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def refuse(sentence: str) -> NoReturn:
    """End with `sentence` and the exit code of wrong use."""
    STATUS.clear()
    sys.stderr.write(f"topt: {sentence}\n")  # one write: ranks share the terminal
    sys.exit(WRONG_USE)


def complete(request: str) -> None:
    """Serve Hydra's shell completion.

    ``install=bash``, ``uninstall=bash``, and ``query=bash`` for the line in COMP_LINE.
    The first word of a line is a command, which Hydra knows nothing of; the rest is completed from
    the configuration of that command.
    """
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in ("bash", "fish", "zsh"):
        refuse(
            "shell completion takes install=SHELL or uninstall=SHELL, where SHELL is bash, fish or "
            "zsh"
        )
    command = COMMANDS[0]
    if action == "query":
        application, *words = os.environ.get("COMP_LINE", "").split(" ")
        while words and not words[0]:  # several blanks
            words.pop(0)
        if len(words) < 2:
            start = words[0] if words else ""
            print(" ".join(name for name in COMMANDS if name.startswith(start)))
            return
        command, *rest = words
        if command not in COMMANDS or command == "checkpoint":  # which has no configuration
            return
        os.environ["COMP_LINE"] = " ".join([application, *rest])
    _run_hydra(command, ["-sc", request])


def _run_hydra(command: str, arguments: list[str]) -> None:
    # a quarter of a second, which help and version need not wait for
    from hydra_plugins.lightning_topt_searchpath import hydra_command  # noqa: PLC0415

    sys.argv = [sys.argv[0], *arguments]
    hydra_command(command)(lambda config: None)()
