"""What `topt` answers without importing Lightning: help, version, wrong commands, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import lightning_topt
import topt_console

ROOT = Path(__file__).parents[2]
# What a console script does, and then what was imported for it
SCRIPT = """
import atexit, os, sys
import topt_console
lines = os.environ.get("LINES_TO_COMPLETE", "").split("|")
arguments = sys.argv[1:]
atexit.register(
    lambda: sys.stderr.write(
        "IMPORTED " + " ".join(sorted({name.split(".")[0] for name in sys.modules}))
    )
)
for number, line in enumerate(lines):
    os.environ["COMP_LINE"], sys.argv = line, ["topt", *arguments]
    print(end="END" if number else "")
    topt_console.main()
"""
END = "END"
SLOW = {"lightning", "lightning_topt", "torch", "numpy", "numba", "matplotlib", "rich", "scipy"}


def topt(*arguments: str, lines: Sequence[str] = ()) -> tuple[str, str, set[str], int]:
    """Its output, its errors, the packages it imported, its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LINES_TO_COMPLETE": "|".join(lines)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    errors, _, imported = result.stderr.partition("IMPORTED ")
    assert imported, result.stderr
    return result.stdout, errors, set(imported.split()), result.returncode


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], topt_console.HELP),
        (["--help"], topt_console.HELP),
        (["-h"], topt_console.HELP),
        (["--version"], f"lightning_topt {lightning_topt.__version__}"),
    ],
)
def test_answers_import_nothing(arguments: list[str], says: str) -> None:
    output, errors, imported, code = topt(*arguments)
    assert output.strip() == says and not errors and code == 0
    assert not imported & (SLOW | {"hydra", "omegaconf"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["tarin"],
            "there is no command 'tarin'; choose one of plan, train, calibrate, predict, verify",
        ),
        (["-sc"], "shell completion takes install=SHELL"),
        (["-sc", "install=powershell"], "shell completion takes install=SHELL"),
    ],
)
def test_wrong_use_is_refused_as_quickly(arguments: list[str], says: str) -> None:
    output, errors, imported, code = topt(*arguments)
    assert not output and errors.startswith(f"topt: {says}") and code == 2
    assert not imported & SLOW


# lines, and what is among their completions
LINES = {
    "topt ": "plan train calibrate predict verify",
    "topt  tr": "train",
    "topt x": "",
    "topt nothing mo": "",
    "topt train strategy=topt": "strategy=topt strategy=topt_compressed",
    "topt plan cluster=h100": "cluster=h100_128x8 cluster=h100_2x8",
    "topt calibrate dev": "devices=",
    "topt verify cluster=h100": "cluster=h100_128x8 cluster=h100_2x8",
    "topt verify glob": "global_batch_size=",
    "topt train trainer.max_e": "trainer.max_epochs=",
}


def test_completion_knows_commands_groups_and_values() -> None:
    output, errors, imported, code = topt("-sc", "query=bash", lines=[*LINES])
    for found, expected in zip(output.split(END), LINES.values(), strict=True):
        assert set(expected.split()) <= set(found.split()) and (expected or not found.strip())
    assert code == 0 and not errors and not imported & (SLOW - {"numpy"})
