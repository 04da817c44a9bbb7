"""The preloaded Python runs programs as Python does: arguments, environment, folder, descriptors
and how they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

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


def test_an_isolated_process_has_none_of_the_libraries():
    code = "import sys; print(sys.flags.isolated, sys.flags.no_site, 'torch' in sys.modules)"
    assert run(preloaded_python(), "-I", "-S", "-c", code).stdout == "1 1 False\n"


def test_warnings_are_filtered_as_told():
    result = run(
        preloaded_python(),
        "-Werror::FutureWarning",
        "-c",
        "import warnings; warnings.warn('x', FutureWarning)",
    )
    assert result.returncode == 1 and "FutureWarning: x" in result.stderr.splitlines()[-1]


def test_errors_and_signals_end_it_as_they_end_python():
    result = run(preloaded_python(), "-c", "import atexit; atexit.register(print, 'bye'); 1 / 0")
    assert (
        result.returncode == 1 and result.stdout == "bye\n" and "ZeroDivisionError" in result.stderr
    )
    assert (
        run(preloaded_python(), "-c", "import os; os.kill(os.getpid(), 9)").returncode
        == -signal.SIGKILL
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


@pytest.mark.parametrize("code", ["", "259", "-1", "'a word'"])
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


def test_an_error_in_an_exit_function_is_told_and_one_of_the_program_goes_before():
    code = "import atexit; atexit.register(lambda: 1 / 0); print('x'); nothing"
    result = run(preloaded_python(), "-c", code)
    assert result.returncode == 1 and result.stdout == "x\n"
    assert result.stderr.index("NameError") < result.stderr.index("ZeroDivisionError")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
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


def ask_a_server(tmp_path, search_path):
    """Start a server, connect, and return its process once it forked or ended."""
    address = tmp_path / "server"
    command = [sys.executable, "-S", preloaded.__file__, address, "unused"]  # no site-packages
    server = subprocess.Popen(
        [*command, json.dumps(search_path)],
        env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not address.exists() and time.monotonic() < end:
        time.sleep(0.01)
    # it may end at any moment of this
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionError):
        client.connect(str(address))
        socket.send_fds(client, [(0).to_bytes(8, "big")], [])
        client.settimeout(60)
        client.recv(4)
    return server


def test_a_library_that_is_missing_ends_the_server_with_its_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such thing here')")
    server = ask_a_server(tmp_path, [])
    assert "no such thing here" in server.communicate(timeout=30)[1]
    assert server.returncode == 1
