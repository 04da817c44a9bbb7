"""The address that other ranks reach this one at."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

_GET_ADDRESS = 0x8915  # of ioctl: an interface's IPv4 address
LOOPBACK = "127.0.0.1"


def own_host(environment: Mapping[str, str]) -> str:
    """Return the IPv4 address of the interface that the process group uses: gloo's by name, else
    the one towards MASTER_ADDR.

    Raises ValueError for an interface without an address.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return interface_address(name)
    master = environment.get("MASTER_ADDR", "")
    return address_towards(master) if master else LOOPBACK


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises ValueError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(
                probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
            )
        except OSError as error:
            raise ValueError(
                f"the interface {name!r} has no IPv4 address ({error}): set GLOO_SOCKET_IFNAME"
            ) from None
    return socket.inet_ntoa(found[20:24])


def address_towards(host: str) -> str:
    """Return the address that packets from here to `host` carry. Raises ValueError where there is
    no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent
        except OSError as error:
            raise ValueError(
                f"{host!r} cannot be reached ({error}): set MASTER_ADDR or GLOO_SOCKET_IFNAME"
            ) from None
        return str(probe.getsockname()[0])
