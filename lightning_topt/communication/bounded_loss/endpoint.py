"""The socket of one rank, bound to one address; `own_host` finds that address."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_topt.communication.bounded_loss.control_messages import SOL_UDP, UDP_GRO, UDP_SEGMENT

# bytes that are asked for; the kernel gives what its limits allow
RECEIVE_BUFFER, SEND_BUFFER = 4 << 20, 1 << 19
LOOPBACK = "127.0.0.1"
# of Linux: options of sockets, and of ioctl
_BUFFER_FORCE = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}  # the same beyond the limits, for root
_TIMESTAMP, _RECEIVE_TOS, _MTU, _RECEIVE_ERRORS = 35, 13, 14, 11
_GET_ADDRESS = 0x8915  # an interface's IPv4 address

_HEADERS = 28  # bytes of IPv4 and UDP
Address = tuple[str, int, int]  # host, port, bytes of data that its receive buffer takes


@dataclass
class Endpoint:
    """A socket bound to `host`; give `address` to the other ranks."""

    host: str
    datagrams: socket.socket
    coalesces: bool  # received datagrams come in one piece (UDP_GRO)
    segments: bool  # sent pieces are cut by the kernel (UDP_SEGMENT)

    @property
    def address(self) -> Address:
        """Host, port, and bytes of data that may lie in the receive buffer."""
        # The kernel counts some 2.3 kB for a datagram of 1.5 kB.
        budget = self.datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        return self.host, self.datagrams.getsockname()[1], budget

    def largest_datagram(self, addresses: Sequence[Address]) -> int:
        """Return the bytes that a datagram to any of these addresses may have without being cut."""
        sizes = []
        for host, port, _ in addresses:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((self.host, 0))
                probe.connect((host, port))
                sizes.append(probe.getsockopt(socket.IPPROTO_IP, _MTU) - _HEADERS)
        return min(sizes)

    def close(self) -> None:
        """Close the socket."""
        self.datagrams.close()


def open_endpoint(host: str) -> Endpoint:
    """Open the socket of one rank at the IPv4 address `host`.

    Raises:
        ValueError: this machine does not have it, or does not run Linux.
    """
    if sys.platform != "linux":
        raise ValueError("the bounded-loss exchange needs Linux: choose another gradient exchange")
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        datagrams.bind((host, 0))
    except OSError as error:
        datagrams.close()
        raise ValueError(
            f"no socket can be bound to {host!r} ({error}): give the IPv4 address that the other "
            "ranks reach this one at"
        ) from None
    datagrams.setblocking(False)
    for option, size in ((socket.SO_RCVBUF, RECEIVE_BUFFER), (socket.SO_SNDBUF, SEND_BUFFER)):
        if not _try(datagrams, socket.SOL_SOCKET, _BUFFER_FORCE[option], size):
            datagrams.setsockopt(socket.SOL_SOCKET, option, size)
    _try(datagrams, socket.SOL_SOCKET, _TIMESTAMP, 1)
    _try(datagrams, socket.IPPROTO_IP, _RECEIVE_TOS, 1)
    # sendmsg fails when a queue of this host drops what is sent, and ICMP says who is gone
    _try(datagrams, socket.IPPROTO_IP, _RECEIVE_ERRORS, 1)
    coalesces = _try(datagrams, SOL_UDP, UDP_GRO, 1)
    return Endpoint(host, datagrams, coalesces, _try(datagrams, SOL_UDP, UDP_SEGMENT, 0))


def _try(of: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        of.setsockopt(level, option, value)
    except OSError:
        return False
    return True


# ---- the address of this rank


def own_host(environment: Mapping[str, str]) -> str:
    """Return the IPv4 address that other ranks reach this one at.

    It is that of the interface that GLOO_SOCKET_IFNAME names, else that of the one towards
    MASTER_ADDR, else the loopback.

    Raises:
        ValueError: the interface has no address, or MASTER_ADDR cannot be reached.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return _interface_address(name)
    master = environment.get("MASTER_ADDR", "")
    return _address_towards(master) if master else LOOPBACK


def _interface_address(name: str) -> str:
    # The IPv4 address of a network interface. Raises ValueError where it has none.
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


def _address_towards(host: str) -> str:
    """Return the address that packets from here to `host` carry.

    Raises:
        ValueError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent
        except OSError as error:
            raise ValueError(
                f"{host!r} cannot be reached ({error}): set MASTER_ADDR or GLOO_SOCKET_IFNAME"
            ) from None
        return str(probe.getsockname()[0])
