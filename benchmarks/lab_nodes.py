"""The nodes of a lab as Linux has them: a network namespace each, with a link to one bridge that is
limited as asked.

Node i of a lab is ``topt<mark>n<i>``, with the link ``tv<mark>n<i>`` to the bridge ``tbr<mark>``;
the mark is the id of the process that made the lab, and a number.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    """Add the namespace `name` with an interface ``eth0`` of this IPv4 address, whose other end is
    `link`, on the bridge.
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
    """Let processes of namespaces choose a congestion control of this machine; what the machine
    itself uses stays.
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
