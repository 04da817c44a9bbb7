"""What README and docs print: blocks of commands and of Python, and how a test runs each.

Commands go through ``bash -c`` as they are printed, with stand-ins on the PATH that write down the
words that arrive. `Command.form` says how these words are then run: as printed with tiny sizes
appended, or in one of the cheaper ways of `FORMS`, each for a reason. A command that is in no row
is an error, so that a new kind of command gets a row.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import topt_console

ROOT = Path(__file__).parent.parent
SHELLS = ("bash", "shell", "sh", "console")
HISTORY = ("devlog.md",)  # commands of versions that were
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    language: str
    text: str


def blocks() -> list[Block]:
    """Return the blocks of all pages, and the examples of the help of `topt`."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        text = page.read_text()
        for fence in _FENCE.finditer(text) if page.name not in HISTORY else []:
            line = text[: fence.start()].count("\n") + 1
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(place, fence[1], fence[2]))
    shown = [line.strip() for line in topt_console.HELP.splitlines()]
    examples = [line for line in shown if re.match(r"topt \w+ +[\w.]+=", line)]
    return [*found, Block("topt --help", "bash", "\n".join(examples))]


# ---- commands

# programs whose words are written down; the rest of a block runs as it is
STAND_INS = (
    *("topt", "python", "torchrun", "srun", "sbatch", "scontrol", "sudo", "pip", "make", "ray"),
    *("git", "docker", "mkdocs", "pre-commit", "ruff", "mypy", "pytest"),
)
_STAND_IN = r"""#!/bin/sh
printf '%s\037' "${0##*/}" "$@" >> "$COMMANDS"
printf '\036' >> "$COMMANDS"
"""

TINY_MODEL = (
    *("model.num_layers=2", "model.hidden=32", "model.num_heads=4", "model.seq_len=32"),
    "data.max_bytes=40000",
)
TINY_FIT = (*("trainer.limit_train_batches=5", "trainer.limit_val_batches=2"), "hydra.run.dir=run")


class Form(NamedTuple):
    """How a command is run: whether its words are only composed, or read, and what is appended."""

    pattern: str  # of its words
    kind: str  # "run", "compose", "read" or "skip"
    appended: tuple[str, ...]
    reason: str


RUN = "as printed, with tiny sizes"
FORMS = [
    # what is not run as printed
    Form(
        r"^topt .*--config-dir examples/conf ", "skip", (), "models of tests/test_published_models"
    ),
    Form(r"^topt .*--config-dir configs ", "skip", (), "a project's files (cli/test_own_classes)"),
    Form(r"^topt .*accelerator=cuda", "compose", (), "needs CUDA devices"),
    Form(r"^topt .*_target_=mine\.", "compose", (), "names classes of the reader's own"),
    Form(r"^topt .*/shared/", "compose", (), "reads a file that a cluster's nodes share"),
    Form(r"^topt predict .*runs=", "compose", (), "reads records of runs (tests/cli/test_predict)"),
    Form(r"^topt .*plan=\S+\.yaml", "compose", (), "reads a plan file (tests/cli/test_predict)"),
    Form(r"^topt train .*schedule=continuous", "compose", (), "snippets of these pages train it"),
    Form(r"^topt train .*gradient_exchange=", "compose", (), "tests/cli/test_exchange trains so"),
    Form(r"^topt train .*optimizer_step=", "compose", (), "tests/cli/test_optimizer_step does it"),
    Form(r"^topt calibrate", "compose", (), "measures for half a minute (tests/cli/test_main)"),
    Form(r"^topt train -m ", "skip", (), "starts ranks for each job (engines/test_sweeps)"),
    Form(r"^pip ", "skip", (), "needs a package registry"),
    Form(r"^make ", "skip", (), "takes minutes; what it runs is in the Makefile"),
    Form(r"^(git|docker|mkdocs|pre-commit|ruff|mypy|pytest|ray) ", "skip", (), "another's program"),
    Form(r"^scontrol ", "skip", (), "of SLURM"),
    Form(r"^sbatch ", "skip", (), "of SLURM"),
    Form(r"^python -m benchmarks\.", "skip", (), "takes minutes to hours, and root for networks"),
    Form(r"^python (examples/\S+\.py)", "skip", (), "tests/test_examples runs it"),
    Form(r"^python \S+\.py", "skip", (), "a script of the reader's own"),
    # what is
    Form(r"^topt (--version|--help|-\w+|\w+ --(cfg|help))", "run", (), RUN),
    Form(
        r"^topt plan model=gpt cluster=local_cpu ",
        "run",
        (*TINY_MODEL, "tensor=false", "pipeline=false"),
        RUN,
    ),
    Form(r"^topt plan ", "read", (), "README's runs; searches take seconds to minutes (tests/cli)"),
    Form(r"^topt verify .*nodes=64", "read", (), "README's runs"),
    Form(r"^topt verify ", "run", TINY_MODEL, RUN),
    Form(r"^topt predict ", "run", TINY_MODEL, RUN),
    Form(r"^topt checkpoint ", "skip", (), "reads a checkpoint (tests/cli/test_checkpoint)"),
    Form(r"^topt train .*data=cached", "run", (*TINY_MODEL[:3], *TINY_FIT), RUN),
    Form(r"^topt train ", "run", (*TINY_MODEL, *TINY_FIT), RUN),
]


class Command(NamedTuple):
    """The words of a command as they arrive from the shell, without launchers before them."""

    words: tuple[str, ...]

    @property
    def form(self) -> Form:
        """How it is run."""
        line = " ".join(self.words) + " "
        for form in FORMS:
            if re.search(form.pattern, line):
                return form
        raise AssertionError(f"no row of FORMS says how to run {line}")

    def is_there(self) -> bool:
        """Whether what a command that is not run names is in this repository, as far as it is."""
        line = " ".join(self.words)
        if module := re.search(r"-m (benchmarks[.\w]+)", line):
            return (ROOT / f"{module[1].replace('.', '/')}.py").is_file()
        if example := re.search(r"examples/\S+\.py", line):
            return (ROOT / example[0]).is_file()
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return self.words[0] != "make" or self.words[1] in targets

    @property
    def ranks(self) -> int:
        """How many processes run it."""
        trains = self.words[1] == "train" and not {"--cfg", "--help"} & {*self.words}
        return 2 if trains and self.form.kind == "run" else 1


def commands_of(block: Block, folder: Path) -> list[Command]:
    """Run a block in bash, in `folder`, and return the commands that arrived.

    Raises AssertionError where bash fails: a program without a stand-in, a file that is not there.
    """
    programs, log = folder / "programs", folder / "commands"
    programs.mkdir()
    for name in STAND_INS:
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    log.touch()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "COMMANDS": str(log), "HOME": str(folder)}
    environment |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), "1")
    ended = subprocess.run(
        ["bash", "-ec", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, f"{block.place}: bash says {ended.stderr}"
    lines = [line.split("\x1f")[:-1] for line in log.read_text().split("\x1e")[:-1]]
    return [Command(_without_launchers(tuple(words))) for words in lines]


def _without_launchers(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what srun, sudo and torchrun start, and `topt` for its module."""
    if words[0] in ("srun", "sudo"):
        inner = next(index for index, word in enumerate(words) if index and word[0] != "-")
        return _without_launchers(words[inner:])
    if words[0] == "torchrun":
        at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        return _without_launchers(("python", *words[at:]))
    if words[:3] == ("python", "-m", "lightning_topt.cli.main"):
        return ("topt", *words[3:])
    return words
