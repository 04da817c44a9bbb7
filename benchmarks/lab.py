"""A cluster with slow links on one Linux machine, for benchmarks of communication.

    python -m benchmarks.lab --nodes 2 --ranks-per-node 2 --rate 1gbit -- script.py arguments

Every node is a network namespace on one bridge. Traffic between nodes passes a token bucket of the
given rate in each direction; ranks of one node talk over its loopback at full speed. Ranks start
as under torchrun (RANK, LOCAL_RANK, GROUP_RANK, MASTER_ADDR, ...), with one thread each. Needs
root, iproute2 and a kernel with veth and tbf; random losses also need iptables and ethtool.

Node i of a lab is ``topt<mark>n<i>``, with the link ``tv<mark>n<i>`` to the bridge ``tbr<mark>``.
The mark is the id of the process that made the lab, and a number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = "29500"
HEADERS = 14 + 20 + 32  # bytes: Ethernet, IPv4, TCP with time stamps
_made = itertools.count()
# Paced datagrams for a competing flow: address, port, bytes per second.
FLOW = """
import socket, sys, time
address, port, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
size, start, sent = 1400, time.monotonic(), 0
while True:
    while sent > rate * (time.monotonic() - start):
        time.sleep(0.001)
    try:
        sender.sendto(bytes(size), (address, port))
    except ConnectionRefusedError:
        pass
    sent += size + 42  # headers of UDP, IP and Ethernet
"""


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as an exception, so that a lab is taken down.

    For the main thread of a script.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


class Lab:
    """Nodes 0 to `nodes` - 1, for as long as the context lasts.

    What labs of killed processes left is taken down first.

    `rate` of each node's link is in tc's units ("1gbit"), None: unlimited. A full link queues
    `queue` ("64kb"; None: 50 ms) before it drops. Every receiver loses the share `loss` of all
    packets. TCP uses `congestion` ("bbr"; None: the machine's). Packets have `mtu` bytes at most
    (None: 1500).

    Raises ValueError for a number of nodes that is not 1 to 250, LabError where the machine cannot
    make one.
    """

    def __init__(
        self,
        nodes: int,
        *,
        rate: str | None,
        burst: str = "256kb",
        queue: str | None = None,
        loss: float = 0.0,
        congestion: str | None = None,
        mtu: int | None = None,
    ) -> None:
        if not 1 <= nodes <= 250:
            raise ValueError(f"a lab has 1 to 250 nodes; got {nodes}")
        check_root()
        self.limits = LinkLimits(rate, burst, queue, loss, congestion, mtu)
        # Never a name twice: the kernel takes its time to end a namespace. At most 15 characters.
        mark = f"{os.getpid():x}-{next(_made) % 256:x}"
        self.bridge = f"tbr{mark}"
        self.nodes = [f"topt{mark}n{i}" for i in range(nodes)]
        self._links = [f"tv{mark}n{i}" for i in range(nodes)]
        self._flows: list[subprocess.Popen[bytes]] = []

    def address(self, node: int) -> str:
        """IPv4 address of a node on the bridge."""
        return f"10.78.0.{node + 1}"

    def __enter__(self) -> Lab:
        try:
            remove_abandoned()
            add_bridge(self.bridge)
            for i, (name, link) in enumerate(zip(self.nodes, self._links, strict=True)):
                add_node(
                    name, link, bridge=self.bridge, address=self.address(i), limits=self.limits
                )
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for flow in self._flows:
            flow.kill()
            flow.wait()
        self._flows.clear()
        for name in self.nodes:
            remove_node(name)
        remove_bridge(self.bridge)

    def add_flow(self, source: int, target: int, *, bytes_per_second: float) -> None:
        """Send datagrams from one node to another until the lab ends.

        `bytes_per_second` includes their headers.
        """
        arguments = [sys.executable, "-c", FLOW, self.address(target), "9", str(bytes_per_second)]
        self._flows.append(
            subprocess.Popen(["ip", "netns", "exec", self.nodes[source], *arguments])
        )

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_node: int = 1,
        nodes: int | None = None,
        timeout: float = 900,
    ) -> str:
        """Run ``python *command`` on every rank of the first `nodes` (None: all).

        Returns rank 0's output, after `timeout` seconds at most. Raises LabError with the output of
        a rank that failed; the others are killed.
        """
        nodes = len(self.nodes) if nodes is None else nodes
        world_size = nodes * ranks_per_node
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, log in enumerate(logs):
                    processes.append(
                        self._start(
                            rank, command, log=log, nodes=nodes, ranks_per_node=ranks_per_node
                        )
                    )
                failed = _wait(processes, timeout)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if failed is not None:
                output = logs[failed].read_text(errors="replace")
                raise LabError(
                    f"rank {failed} failed, or did not end within {timeout:.0f} "
                    f"s:\n{output[-4000:]}"
                )
            return logs[0].read_text(errors="replace")

    def run_gpt(
        self, *, ranks_per_node: int, timeout: float = 500, **options: Any
    ) -> dict[str, Any]:
        """Run `benchmarks.gpt_run` on all nodes, as `run_module` does."""
        return self.run_module(
            "benchmarks.gpt_run", ranks_per_node=ranks_per_node, timeout=timeout, **options
        )

    def run_module(
        self, name: str, *flags: str, ranks_per_node: int, timeout: float = 500, **options: Any
    ) -> dict[str, Any]:
        """Run a module on every rank; rank 0 writes the result as JSON to ``--out``.

        Args:
            name: as after ``python -m``.
            flags: arguments before the options, such as ``--worker``.
            ranks_per_node: on all nodes.
            timeout: seconds.
            options: ``key=value`` becomes ``--key=value``.

        Raises:
            LabError: as `run` does.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            arguments = [f"--{key}={value}" for key, value in {**options, "out": out}.items()]
            self.run(
                ["-m", name, *flags, *arguments], ranks_per_node=ranks_per_node, timeout=timeout
            )
            result: dict[str, Any] = json.loads(out.read_text())
            return result

    def _start(
        self, rank: int, command: Sequence[str], *, log: Path, nodes: int, ranks_per_node: int
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.nodes[rank // ranks_per_node],
                    sys.executable,
                    *command,
                ],
                env=self._environment(rank, nodes, ranks_per_node),
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _environment(self, rank: int, nodes: int, ranks_per_node: int) -> dict[str, str]:
        node, local_rank = divmod(rank, ranks_per_node)
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(nodes * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": PORT,
            "TORCHELASTIC_RUN_ID": "lab",
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }


def sent_bytes(device: str = "eth0") -> int:
    """Bytes that left this process's node through `device` since it exists, with all headers."""
    return _sent(device)[0]


def sent_payload(device: str = "eth0") -> int:
    """The same without the headers of TCP, IP and Ethernet.

    What the link cuts into packets later has one header.
    """
    nbytes, packets = _sent(device)
    return nbytes - HEADERS * packets


def _sent(device: str) -> tuple[int, int]:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            nbytes, packets, *_ = map(int, counters.split()[8:])
            return nbytes, packets
    raise LabError(f"this node has no device {device}")


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """The first rank that failed or did not end in time; None when all ended well."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                time.sleep(2)  # for the others' reasons
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return next(rank for rank, process in enumerate(processes) if process.poll() is None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument(
        "--rate", default="1gbit", help="of each node's link, in tc's units; empty: unlimited"
    )
    parser.add_argument("--burst", default="256kb", help="bytes that leave at once, in tc's units")
    parser.add_argument(
        "--queue",
        default="",
        help="bytes that a full link queues before it drops, as 64kb; empty: 50 ms",
    )
    parser.add_argument(
        "--loss", type=float, default=0.0, help="share of packets that receivers lose, as 0.001"
    )
    parser.add_argument(
        "--congestion", default="", help="TCP's congestion control, as bbr; empty: the machine's"
    )
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument(
        "command", nargs="+", help="after --: script.py or -m module, and its arguments"
    )
    options = parser.parse_args(arguments)
    if options.nodes < 1 or options.ranks_per_node < 1:
        parser.error("--nodes and --ranks-per-node are at least 1")
    end_on_signals()
    try:
        with Lab(
            options.nodes,
            rate=options.rate or None,
            burst=options.burst,
            queue=options.queue or None,
            loss=options.loss,
            congestion=options.congestion or None,
        ) as lab:
            print(
                lab.run(
                    options.command, ranks_per_node=options.ranks_per_node, timeout=options.timeout
                ),
                end="",
            )
    except LabError as error:
        sys.exit(f"lab: {error}")


# ---- nodes as Linux has them: a network namespace each, with a limited link to one bridge --------

CONGESTION = Path("/proc/sys/net/ipv4")


class LabError(RuntimeError):
    """The machine cannot make a lab, or a job in it failed."""


def check_root() -> None:
    """Raise LabError without root."""
    if os.geteuid() != 0:
        raise LabError(
            "the lab makes network namespaces, which needs root: run it with sudo, or leave it out"
        )


@dataclass(frozen=True)
class LinkLimits:
    """What a node's link does to packets, as `Lab` takes it."""

    rate: str | None
    burst: str
    queue: str | None
    loss: float
    congestion: str | None
    mtu: int | None


def add_bridge(name: str) -> None:
    """Add a bridge that nodes can be added to."""
    _sh("ip", "link", "add", name, "type", "bridge")
    _sh("ip", "link", "set", name, "up")


def remove_bridge(name: str) -> None:
    """Delete a bridge, which may be gone."""
    _sh("ip", "link", "del", name, check=False)


def add_node(name: str, link: str, *, bridge: str, address: str, limits: LinkLimits) -> None:
    """Add the namespace `name` with an interface ``eth0`` of this IPv4 address.

    Its other end is `link`, on the bridge.
    """
    _sh("ip", "netns", "add", name)
    _sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _sh("ip", "link", "set", link, "master", bridge, "up")
    _sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _sh("ip", "-n", name, "link", "set", "eth0", "up")
    _sh("ip", "-n", name, "link", "set", "lo", "up")
    if limits.mtu:
        _sh("ip", "link", "set", link, "mtu", str(limits.mtu))
        _sh("ip", "-n", name, "link", "set", "eth0", "mtu", str(limits.mtu))
    inside = ["ip", "netns", "exec", name]
    if limits.rate:
        queue = ["limit", limits.queue] if limits.queue else ["latency", "50ms"]
        shape = ["root", "tbf", "rate", limits.rate, "burst", limits.burst, *queue]
        _sh(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
        _sh("tc", "qdisc", "add", "dev", link, *shape)
    if limits.loss:
        # What is lost is one packet of the link's size, not 64 kB that would have been cut later.
        for where, device in ((inside, "eth0"), ([], link)):
            _sh(
                *where,
                "ethtool",
                "-K",
                device,
                "tso",
                "off",
                "gso",
                "off",
                "gro",
                "off",
                "tx-udp-segmentation",
                "off",
            )
        at_random = ["-m", "statistic", "--mode", "random", "--probability", f"{limits.loss:.6f}"]
        _sh(*inside, "iptables", "-A", "INPUT", "-i", "eth0", *at_random, "-j", "DROP")
    if limits.congestion:
        allow_in_namespaces(limits.congestion)
        _sh(
            *inside,
            "sh",
            "-c",
            f"echo {limits.congestion} > {CONGESTION / 'tcp_congestion_control'}",
        )


def allow_in_namespaces(congestion: str) -> None:
    """Let processes of namespaces choose a congestion control of this machine.

    What the machine itself uses stays.
    """
    allowed = CONGESTION / "tcp_allowed_congestion_control"
    if congestion not in allowed.read_text().split():
        allowed.write_text(f"{allowed.read_text().strip()} {congestion}")


def remove_node(name: str) -> None:
    """Kill what runs in a node, and delete it with its link."""
    for pid in _sh("ip", "netns", "pids", name, check=False).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    # The link by itself, for a namespace lives on as long as a packet of it is somewhere.
    _sh("ip", "link", "del", name.replace("topt", "tv"), check=False)
    _sh("ip", "netns", "del", name, check=False)


def remove_abandoned() -> None:
    """Take down what labs left whose process was killed; names tell the process."""
    names = re.findall(
        r"^(topt(([0-9a-f]+)-[0-9a-f]+)n\d+)\b", _sh("ip", "netns", "list"), re.MULTILINE
    )
    for name, mark, pid in names:
        if not Path(f"/proc/{int(pid, 16)}").exists():
            remove_node(name)
            remove_bridge(f"tbr{mark}")


def _sh(*command: str, check: bool = True) -> str:
    try:
        job = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(
            f"the lab needs the command {command[0]!r}: install iproute2 (iptables and ethtool for "
            "losses)"
        ) from None
    if job.returncode and check:
        raise LabError(f"{' '.join(command)}: {job.stderr.strip()}")
    return job.stdout


if __name__ == "__main__":
    main()
