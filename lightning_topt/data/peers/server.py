"""Starts the process that serves a node's entries to the other nodes, see `service`.

It is a module of its own: the process that serves imports as little as possible.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_topt.data.cache.segment_store import SegmentStore, described
from lightning_topt.data.light_process import close_pipes, start_light
from lightning_topt.data.peers.protocol import PeerLimits, run_key

STARTUP_SECONDS = 60.0
END_SECONDS = 5.0


class PeerServer:
    """Serves `stores` (the fastest first, all of one cache) from a process of its own.

    The process ends with `close`, or when this process ends. `address` is what clients need.

    Args:
        stores: as this process has them open.
        host: address of this node's interface to the others, the only one that is listened on. See
            `protocol.own_address`.
        secret: of the run, at least 16 random bytes, the same on all nodes.
        fingerprint: of the data; clients with another one are refused.
        port: to listen on; 0: any free one.

    Raises:
        ValueError: the address is not of this machine, or means all of its interfaces.
        RuntimeError: the process does not start.
    """

    def __init__(
        self,
        stores: Sequence[SegmentStore],
        *,
        host: str,
        secret: bytes,
        fingerprint: str,
        port: int = 0,
        limits: PeerLimits | None = None,
    ) -> None:
        _check_host(host)
        num_items = {store.num_items for store in stores}
        if len(num_items) != 1:
            raise ValueError(
                "a peer server serves the stores of one cache: all of the same number of items, "
                "one at least"
            )
        # All that the process needs, as plain data; the stores' files are inherited.
        settings = {
            "host": host,
            "port": port,
            "key": run_key(secret, fingerprint=fingerprint, num_items=num_items.pop()).hex(),
            "limits": asdict(limits or PeerLimits()),
            "stores": [
                described(store) | {"name": f"{store.name} of this node"} for store in stores
            ],
            "parent": os.getpid(),
        }
        self.process = start_light(
            "lightning_topt.data.peers.service",
            settings,
            pass_fds=[store.file.descriptor for store in stores],
            stdout=subprocess.PIPE,
        )
        self._finalizer = weakref.finalize(self, _end, self.process, os.getpid())
        try:
            # the port is known once the process listens
            self.address = (host, _started(self.process, settings))
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process. Calling it again does nothing."""
        self._finalizer()


def _check_host(host: str) -> None:
    advice = "give the address of this node's interface to the other nodes"
    try:
        addresses = {
            entry[4][0] for entry in socket.getaddrinfo(host or "", 0, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        raise ValueError(f"cannot listen on {host!r}: {error}; {advice}") from error
    if not host or any(
        ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified for address in addresses
    ):
        raise ValueError(
            f"listening on {host!r} would be listening on every interface of this machine; {advice}"
        )


def _started(process: subprocess.Popen[bytes], settings: dict[str, Any]) -> int:
    # Wait until the process listens; returns the port
    assert process.stdout is not None
    # It prints one line of JSON: the port, or an error.
    poll, deadline, line = select.poll(), time.monotonic() + STARTUP_SECONDS, b""
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise RuntimeError(
                f"the process of the peer server said nothing for {STARTUP_SECONDS:g} s"
            )
        piece = os.read(process.stdout.fileno(), 1 << 12)
        if not piece:
            raise RuntimeError(
                "the process of the peer server ended at once; its standard error says why"
            )
        line += piece
    answer = json.loads(line)
    if "error" in answer:
        raise ValueError(
            f"cannot listen on {settings['host']}:{settings['port']}: {answer['error']}"
        )
    return int(answer["port"])


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked process
    close_pipes(process)
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
