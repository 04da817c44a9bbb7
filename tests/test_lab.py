"""The lab of slow links that the benchmarks use; skipped without namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import ROOT, Lab, LabError

SENT = 500_000
RANK = f"""
import json, os, socket, time
from benchmarks.lab import sent_bytes, sent_payload

before, payload, other = sent_bytes(), sent_payload(), 0
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        connection, _ = server.accept()
        while received := connection.recv(65536):
            other += len(received)
        connection.close()
else:
    for _ in range(500):
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes({SENT}))
    connection.shutdown(socket.SHUT_WR)
    assert not connection.recv(1)  # closed there, so all has arrived
    assert 1.0001 * {SENT} < sent_bytes() - before < 1.1 * {SENT}, sent_bytes() - before
    # Small packets have other headers.
    assert abs(sent_payload() - payload - {SENT}) < 5000, sent_payload() - payload
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"]
print(json.dumps({{"received": other, **{{name: int(os.environ[name]) for name in names}}}}))
"""


@pytest.fixture(scope="module", autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def namespaces():
    try:
        with Lab(1, rate="1gbit"):
            pass
    except LabError as error:
        pytest.skip(f"no lab on this machine: {error}")


def script(folder: Path, text: str) -> str:
    path = folder / "job.py"
    path.write_text(text)
    return str(path)


def existing() -> str:
    names = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return (
        names
        + subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    )


def start_and_wait(path: str) -> subprocess.Popen[bytes]:
    """The lab's command with a job that sleeps; returns once its second node has a process."""
    command = [sys.executable, "-m", "benchmarks.lab", "--rate", "", "--", path]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        node = f"topt{process.pid:x}-0n1"
        found = subprocess.run(
            ["ip", "netns", "pids", node], capture_output=True, text=True, check=False
        )
        if found.stdout.strip():
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the lab did not start its job")


def test_two_nodes_talk_over_a_shaped_link(namespaces, tmp_path):
    with Lab(2, rate="200mbit") as cluster:
        shapes = [
            subprocess.run(
                ["ip", "netns", "exec", node, "tc", "qdisc", "show", "dev", "eth0"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for node in cluster.nodes
        ]
        output = cluster.run([script(tmp_path, RANK)], timeout=60)
    assert all("tbf" in shape and "rate 200Mbit" in shape for shape in shapes)
    assert json.loads(output) == {
        "received": SENT,
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": 0,
        "OMP_NUM_THREADS": 1,
    }
    assert not any(node in existing() for node in (*cluster.nodes, cluster.bridge))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_ended_leaves_nothing(namespaces, tmp_path, number):
    process = start_and_wait(script(tmp_path, "import time\ntime.sleep(100)"))
    process.send_signal(number)
    process.wait(timeout=30)
    if number == signal.SIGKILL:  # it could do nothing itself; the next one does
        assert f"topt{process.pid:x}-0n1" in existing()
        with Lab(1, rate=None):
            pass
    assert f"{process.pid:x}-0" not in existing()
