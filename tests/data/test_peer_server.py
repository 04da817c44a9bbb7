"""The process that serves a node's entries: whom it lets in, what it knows, its end."""

from __future__ import annotations

import ast
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import lightning_topt
from lightning_topt.data import light_process
from lightning_topt.data.cache.segment_store import checksum
from lightning_topt.data.light_process import BOOT
from lightning_topt.data.peers import client as peer_client
from lightning_topt.data.peers.protocol import (
    ENTRY,
    MOST_ENTRY_BYTES,
    OFFER,
    REQUEST,
    PeerError,
    connect,
    own_address,
)
from lightning_topt.data.peers.server import PeerServer
from tests.data.test_peer_faults import THEIRS, friend, hung_up, is_well, pair, soon
from tests.data.test_peers import HERE, SECRET, Node, client, nodes, payload
from tests.processes import wait_until

FORK = multiprocessing.get_context("fork")
__all__ = ["nodes", "pair"]  # fixtures
# All that the process has of this package:
NAMES = [
    "basics.own_files",
    "data.cache.memory_file",
    "data.cache.segment_store",
    "data.light_process",
    "data.peers.protocol",
    "data.peers.server",
]


def test_strangers_who_say_nothing_are_thrown_out(pair):
    newcomers = [connect(pair[1].server.address, deadline=soon()) for _ in range(20)]
    for newcomer in newcomers:
        with contextlib.suppress(PeerError):
            newcomer.send([b"x"], deadline=soon())
    for newcomer in newcomers:
        hung_up_some_time(newcomer)
    assert is_well(client(pair))


def hung_up_some_time(channel):
    """It may have been greeted first."""
    with pytest.raises(PeerError):
        while True:
            channel.receive(1, deadline=soon())
    channel.close()


def test_no_more_connections_than_allowed(pair):
    friends = [friend(pair[1].server.address) for _ in range(8)]
    with pytest.warns(UserWarning, match="hung up|broken"):
        assert client(pair).fetch(THEIRS[:1]) == [None]
    for each in friends:
        each.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the server has perhaps not noticed yet
        wait_until(lambda: is_well(client(pair)))


def offered(channel, *entries):
    """Offer (item, claimed bytes, claimed checksum); which are wanted."""
    channel.send(
        [REQUEST.pack(OFFER, len(entries)), b"".join(ENTRY.pack(*entry) for entry in entries)],
        deadline=soon(),
    )
    return list(channel.receive(len(entries), deadline=soon()))


def test_offers_that_are_too_large_or_have_no_room_are_refused(nodes, monkeypatch):
    two, item = nodes(2, memory=0, disk=4000), THEIRS[0]
    peers = client(two)
    peers.push({item: [bytes(4001)]})
    monkeypatch.setattr(peer_client, "MOST_ENTRY_BYTES", 3000)
    peers.push({item: [bytes(3001)]})  # not even offered
    assert not two[1].has(item)
    enemy = friend(two[1].server.address)
    offers = (item, 2**63, 0), (item, MOST_ENTRY_BYTES + 1, 0), (item, 3000, 0)
    assert offered(enemy, *offers) == [0, 0, 1]
    enemy.close()


def test_half_an_entry_or_a_wrong_one_is_not_stored(nodes):
    two, item = nodes(2), THEIRS[0]
    liar = friend(two[1].server.address)
    assert offered(liar, (item, 10, checksum([bytes(10)], item=item + 1))) == [1]  # another item's
    liar.send([bytes(10)], deadline=soon())
    hung_up(liar)
    quitter = friend(two[1].server.address)
    assert offered(quitter, (item, 10, checksum([bytes(10)], item=item))) == [1]
    quitter.send([bytes(9)], deadline=soon())
    quitter.close()
    assert not two[1].has(item)
    peers = client(two)
    peers.push({item: [payload(item)]})
    assert two[1].has(item) == {"memory", "disk"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])
def test_it_listens_on_no_other_interface_than_one_of_this_machine(nodes, host):
    store = nodes(1)[0].memory
    with pytest.raises(ValueError, match="listen"):
        PeerServer([store], host=host, secret=SECRET, fingerprint="f")


def test_it_listens_on_the_one_it_was_given_only(pair):
    host, port = pair[1].server.address
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert host == HERE and listening == [f"0100007F:{port:04X}"]
    with pytest.raises(PeerError):
        connect(("127.0.0.2", port), deadline=soon())
    assert own_address(towards=HERE) == HERE
    with pytest.raises(ValueError, match="in use"):
        PeerServer([pair[0].memory], host=host, port=port, secret=SECRET, fingerprint="f")


def has_ended(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _serve_and_hang(folder, pipe, closes):
    node = Node(folder)
    if not closes:
        light_process._started.clear()
    # has inherited what its parent has open
    worker = FORK.Process(target=time.sleep, args=[60], daemon=True)
    worker.start()
    pipe.send((node.server.process.pid, worker.pid))
    time.sleep(60)


@pytest.mark.parametrize("closes", [True, False], ids=["", "whose child keeps its pipe open"])
def test_it_ends_with_the_process_that_started_it(tmp_path, closes):
    here, there = FORK.Pipe()
    parent = FORK.Process(target=_serve_and_hang, args=[tmp_path / "node", there, closes])
    parent.start()
    assert here.poll(30)
    server, worker = here.recv()
    assert not has_ended(server)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_until(lambda: has_ended(server))
    assert not has_ended(worker)
    os.kill(worker, signal.SIGKILL)


def test_it_imports_neither_torch_nor_what_could_unpickle(pair):
    process = pair[1].server.process.pid
    maps = Path(f"/proc/{process}/maps").read_text()
    assert "numpy" in maps and "libtorch" not in maps and "torch/_C" not in maps
    package = Path(lightning_topt.__file__).parent
    path = [os.path.abspath(entry) for entry in sys.path]
    start = {"path": path, "package": str(package)}
    code = BOOT.replace('.main(start["settings"])', "; print(json.dumps(sorted(sys.modules)))")
    assert code != BOOT
    words = (json.dumps(start) + "\n").encode()
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "lightning_topt.data.peers.server"],
        input=words,
        capture_output=True,
        check=True,
    )
    modules = json.loads(run.stdout)
    assert not {"torch", "lightning", "multiprocessing", "asyncio"} & set(modules)
    prefix = "lightning_topt."
    folders = {f"{prefix}{folder}" for folder in ("basics", "data", "data.cache", "data.peers")}
    assert [
        n.removeprefix(prefix) for n in modules if n.startswith(prefix) and n not in folders
    ] == NAMES
    for name in NAMES:
        tree = ast.parse((package / f"{name.replace('.', '/')}.py").read_text())
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for part in [node.names[0].name]
        }
        assert not named & {"pickle", "marshal", "shelve", "eval", "exec", "compile", "__import__"}
        assert not any(
            isinstance(node, ast.Attribute) and node.attr in ("load", "save")
            for node in ast.walk(tree)
        )
