"""The preloaded Python runs programs as Python does: arguments, environment, descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import preloaded
from tests.preloaded import preloaded_python, preloaded_topt
from tests.processes import wait_for_end

TELL = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("COLOUR"), __name__, sys.path[0], sys.stdin.read(),
      flush=True)
ours = ("lightning_topt", "hydra_plugins", "tests")
print([name for name in sys.modules if name.startswith(ours)])
os.write(int(sys.argv[-1]), b"written")
sys.exit(7)
"""
SPAWN = """
import multiprocessing

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(square, range(4)))
"""


def run(python, *arguments, **options):
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("way", ["script", "-m", "-c"])
def test_a_program_sees_what_it_would_see(way, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    program = {"script": ["tell.py"], "-m": ["-m", "tell"], "-c": ["-c", TELL]}[way]
    results = []
    for python in (sys.executable, preloaded_python()):
        reader, writer = os.pipe()
        environment = {"COLOUR": "red", "PATH": os.environ["PATH"]}
        options = {"cwd": tmp_path, "env": environment, "input": "typed", "pass_fds": [writer]}
        result = run(python, *program, "a b", str(writer), **options)
        os.close(writer)
        results.append(
            (
                result.returncode,
                result.stdout.replace(str(writer), "N"),
                result.stderr,
                os.read(reader, 99),
            )
        )
        os.close(reader)
    assert results[0] == results[1] and results[0][0] == 7 and results[0][3] == b"written"


def test_processes_that_it_spawns_are_quick_too_and_find_its_functions(tmp_path):
    (tmp_path / "square.py").write_text(SPAWN)
    result = run(preloaded_python(), "square.py", cwd=tmp_path)
    assert result.stdout == "[0, 1, 4, 9]\n", result.stderr


def test_a_program_may_find_this_package_imported():
    code = (
        "import sys; print('lightning_topt.plugins.auto_parallel' in sys.modules, sys.executable)"
    )
    assert run(preloaded_topt(), "-c", code).stdout == f"True {preloaded_topt()}\n"
    assert run(preloaded_python(), "-c", code).stdout == f"False {preloaded_python()}\n"
    command = ["-m", "lightning_topt.cli.main", "nothing"]
    result = run(preloaded_topt(), *command, env={**os.environ, "PYTHONPATH": str(preloaded.ROOT)})
    assert result.returncode == 2 and result.stderr.startswith(
        "topt: there is no command 'nothing'"
    )


THREAD = """
import atexit, sys, threading, time

def late():
    time.sleep(0.2)
    print("thread")

atexit.register(lambda: print("exit function"))
threading.Thread(target=late).start()
print("program")
sys.exit({code})
"""


@pytest.mark.parametrize("code", ["", "259"])
def test_it_ends_as_python_does(code):
    ours, pythons = (
        run(python, "-c", THREAD.format(code=code))
        for python in (preloaded_python(), sys.executable)
    )
    assert ours.stdout.split("\n") == ["program", "thread", "exit function", ""]
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        pythons.returncode,
        pythons.stdout,
        pythons.stderr,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_who_kills_the_process_kills_the_program(number):
    command = [
        preloaded_python(),
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
    assert wait_for_end(program)
