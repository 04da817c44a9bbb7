"""Every command and every snippet of README and docs runs; `docs_commands` says how.

Loops in plain PyTorch also run on two ranks, which end equal.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.docs_commands import SHELLS, Block, Command, blocks, commands_of
from tests.forked_command import Ended, console, forked_ranks
from tests.launch import run_ranks

ALL = blocks()
PYTHON = [block for block in ALL if block.language == "python"]
COMMANDS = [block for block in ALL if block.language in SHELLS]
LOOPS = [
    block for block in PYTHON if ".backward()" in block.text and "for step in range" in block.text
]


def place(block: Block) -> str:
    return block.place


# ---- commands


@pytest.mark.parametrize("block", COMMANDS, ids=place)
def test_commands_run(block: Block, tmp_path: Path, done: set[Command]) -> None:
    check_commands(block, tmp_path, done)


def check_commands(block: Block, tmp_path: Path, done: set[Command]) -> None:
    commands = commands_of(block, tmp_path)
    assert commands
    for command in commands:
        form = command.form
        if form.kind == "skip":
            assert command.is_there(), command.words
            continue
        if command in done:  # it ran in another block
            continue
        for rank, ended in enumerate(run_command(command, tmp_path)):
            assert ended.status == 0, f"{' '.join(command.words)} (rank {rank}):\n{ended.output}"
        done.add(command)


@pytest.fixture(scope="module")
def done() -> set[Command]:
    """Commands that have run in this process."""
    return set()


def run_command(command: Command, folder: Path) -> list[Ended]:
    form = command.form
    _, *words = command.words
    if form.kind == "compose":
        words += ["--cfg", "job"]
    else:
        words += [*form.appended]
    return forked_ranks(partial(console, words, form.kind == "read"), command.ranks, folder=folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topt plan mesh={data:2,tensor:1}", "got 'tensor:1'"),
        ("topt plan mesh='{data:2}' ranks=2", "Could not override 'ranks'"),
        ("topt serve", "no row of FORMS"),
        ("python -m benchmarks.nothing", "'benchmarks.nothing'"),
    ],
)
def test_a_wrong_command_fails(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_commands(Block("here", "bash", text), tmp_path, set())


# ---- snippets


@pytest.mark.parametrize("block", [block for block in PYTHON if block not in LOOPS], ids=place)
def test_snippets_run(block: Block, tmp_path: Path) -> None:
    """With a few batches."""
    batches = "limit_val_batches=1, " + "limit_train_batches=4, " * ("max_epochs" in block.text)
    text = block.text.replace("L.Trainer(", f"L.Trainer({batches}")
    text = re.sub(r"max_steps=\d[\d_]+", "max_steps=8", text)
    script = tmp_path / "script.py"
    script.write_text(text)

    def main() -> None:
        sys.argv = [str(script)]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        exec(compile(text, str(script), "exec"), {"__name__": "__main__"})

    fits = ".fit(" in text and re.search(r"devices\"?[=:] ?2\b", text)
    for rank, ended in enumerate(forked_ranks(main, 2 if fits else 1, folder=tmp_path)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output}"


def run_loop(rank: int, code: str) -> tuple[float, list[float]]:
    names: dict[str, Any] = {}
    exec(compile(code, "loop", "exec"), names)
    return names["loss"].item(), [
        float(parameter.detach().sum()) for parameter in names["module"].parameters()
    ]


@pytest.mark.parametrize("block", LOOPS, ids=place)
def test_loops_train_and_ranks_end_equal(block: Block) -> None:
    first, second = run_ranks(run_loop, 2, block.text)
    assert first[1] == second[1] and first[0] < 0.1


def test_what_is_there_is_found() -> None:
    assert len(LOOPS) == 3 and len(PYTHON) > 20 and len(COMMANDS) > 20
    others = [block for block in ALL if block not in PYTHON and block not in COMMANDS]
    assert not [block.place for block in others if not block.language], "a fence says its language"
    assert not [block.place for block in others if re.search(r"^\W*topt ", block.text, re.M)]
