"""The sockets of one rank, and how ranks connect to each other.

A rank has one socket for datagrams and one that others connect their side channels (TCP) to, both
bound to one address. `own_host` finds that address. With everyone's addresses,
`connect_side_channels` makes one TCP connection for each pair of ranks: higher ranks connect to
lower ones. Both ends say hello: key, rank, size of datagrams, and how much their buffer holds.
"""

from __future__ import annotations

import fcntl
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_topt.communication.bounded_loss.control_messages import SOL_UDP, UDP_GRO, UDP_SEGMENT

# bytes that are asked for; the kernel gives what its limits allow
RECEIVE_BUFFER, SEND_BUFFER = 4 << 20, 1 << 19
LOOPBACK = "127.0.0.1"
# of Linux: options of sockets, and of ioctl
_BUFFER_FORCE = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}  # the same beyond the limits, for root
_TIMESTAMP, _RECEIVE_TOS, _MTU, _RECEIVE_ERRORS = 35, 13, 14, 11
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)
_GET_ADDRESS = 0x8915  # an interface's IPv4 address

_HEADERS = 28  # bytes of IPv4 and UDP
# magic, key, rank, ranks, bytes of a datagram, bytes that may lie in the receive buffer
_HELLO = struct.Struct("<8sqiiii")
_MAGIC = b"topt-bl1"
_ACCEPT_PAUSE_SECONDS = 0.01  # where a connection cannot be accepted now
_MOST_WAITING = 256  # connections that have not said who they are: older ones are refused

Address = tuple[str, int, int]  # host, port of datagrams, port of side channels


class ConnectionFailedError(RuntimeError):
    """Some rank could not be reached when the exchange was made."""


@dataclass
class Endpoint:
    """Sockets bound to `host`; give `address` to the other ranks."""

    host: str
    datagrams: socket.socket
    listener: socket.socket
    coalesces: bool  # received datagrams come in one piece (UDP_GRO)
    segments: bool  # sent pieces are cut by the kernel (UDP_SEGMENT)

    @property
    def address(self) -> Address:
        """Host and ports."""
        return self.host, self.datagrams.getsockname()[1], self.listener.getsockname()[1]

    @property
    def budget(self) -> int:
        """Bytes of data that may lie in the receive buffer.

        The kernel counts some 2.3 kB for a datagram of 1.5 kB.
        """
        return self.datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2

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
        """Close both sockets."""
        self.datagrams.close()
        self.listener.close()


def open_endpoint(host: str) -> Endpoint:
    """Open the sockets of one rank at the IPv4 address `host`.

    Raises:
        ValueError: this machine does not have it, or does not run Linux.
    """
    if sys.platform != "linux":
        raise ValueError("the bounded-loss exchange needs Linux: choose another gradient exchange")
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        datagrams.bind((host, 0))
        listener.bind((host, 0))
    except OSError as error:
        datagrams.close()
        listener.close()
        raise ValueError(
            f"no socket can be bound to {host!r} ({error}): give the IPv4 address that the other "
            "ranks reach this one at"
        ) from None
    listener.listen(128)
    datagrams.setblocking(False)
    for option, size in ((socket.SO_RCVBUF, RECEIVE_BUFFER), (socket.SO_SNDBUF, SEND_BUFFER)):
        if not _try(datagrams, socket.SOL_SOCKET, _BUFFER_FORCE[option], size):
            datagrams.setsockopt(socket.SOL_SOCKET, option, size)
    _try(datagrams, socket.SOL_SOCKET, _TIMESTAMP, 1)
    _try(datagrams, socket.IPPROTO_IP, _RECEIVE_TOS, 1)
    # so that sendmsg fails when a queue of this host drops what is sent
    _try(datagrams, socket.IPPROTO_IP, _RECEIVE_ERRORS, 1)
    coalesces = _try(datagrams, SOL_UDP, UDP_GRO, 1)
    return Endpoint(host, datagrams, listener, coalesces, _try(datagrams, SOL_UDP, UDP_SEGMENT, 0))


def _try(of: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        of.setsockopt(level, option, value)
    except OSError:
        return False
    return True


@dataclass
class SideChannels:
    """Connected TCP sockets by rank, and how many bytes each rank's receive buffer takes."""

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    budgets: dict[int, int] = field(default_factory=dict)
    refused: int = 0  # connections that did not know the key

    def close(self) -> None:
        """Close all."""
        for each in self.sockets.values():
            each.close()


def connect_side_channels(
    rank: int,
    *,
    endpoint: Endpoint,
    addresses: Sequence[Address],
    key: int,
    datagram_bytes: int,
    timeout_seconds: float,
) -> SideChannels:
    """Connect to all other ranks; every rank calls this.

    Raises:
        ConnectionFailedError: names who did not connect in time.
    """
    deadline = time.monotonic() + timeout_seconds
    channels = SideChannels()
    own = _HELLO.pack(_MAGIC, key, rank, len(addresses), datagram_bytes, endpoint.budget)
    try:
        # To all lower ranks first, without waiting for their answers: each of them may be waiting
        # for another. Then take those of higher ranks, then read the answers.
        for lower in range(rank):
            channels.sockets[lower] = _connect(lower, endpoint, addresses[lower], deadline)
            channels.sockets[lower].sendall(own)
        _accept_higher(
            rank, endpoint, channels, own=own, deadline=deadline, world_size=len(addresses)
        )
        for lower in range(rank):
            found = _read_hello(channels.sockets[lower], own, deadline - time.monotonic())
            if found is None or found[0] != lower:
                raise ConnectionFailedError(
                    f"rank {lower} gave no answer, or is of another session"
                )
            channels.budgets[lower] = found[1]
    except BaseException:
        channels.close()
        raise
    for each in channels.sockets.values():
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _try(each, socket.IPPROTO_TCP, _USER_TIMEOUT, int(1000 * timeout_seconds))
    return channels


def _connect(peer: int, endpoint: Endpoint, address: Address, deadline: float) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind((endpoint.host, 0))
        made.settimeout(max(0.01, deadline - time.monotonic()))
        made.connect((address[0], address[2]))
    except OSError as error:
        made.close()
        raise ConnectionFailedError(
            f"rank {peer} cannot be reached at {address[0]} port {address[2]}: {error}"
        ) from None
    return made


def _accept_higher(
    rank: int,
    endpoint: Endpoint,
    channels: SideChannels,
    *,
    own: bytes,
    deadline: float,
    world_size: int,
) -> None:
    """Accept connections until all higher ranks of this run are among them; refuse others.

    All are listened to at once: one that says nothing keeps nobody waiting.
    """
    # what each has said so far, the oldest first
    waiting: dict[socket.socket, bytes] = {}
    endpoint.listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(endpoint.listener, selectors.EVENT_READ)

        def refuse(stranger: socket.socket) -> None:
            channels.refused += 1
            del waiting[stranger]
            selector.unregister(stranger)
            stranger.close()

        try:
            while missing := set(range(rank + 1, world_size)) - set(channels.sockets):
                if time.monotonic() > deadline:
                    names = ", ".join(map(str, sorted(missing)))
                    raise ConnectionFailedError(
                        f"rank {names} did not connect to rank {rank} in time"
                    )
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    made = key.fileobj
                    assert isinstance(made, socket.socket)
                    if made is endpoint.listener:
                        if (accepted := _accepted(made)) is None:
                            time.sleep(_ACCEPT_PAUSE_SECONDS)
                            continue
                        waiting[accepted] = b""
                        selector.register(accepted, selectors.EVENT_READ)
                        if len(waiting) > _MOST_WAITING:
                            refuse(next(iter(waiting)))
                        continue
                    if made not in waiting:  # refused in this round
                        continue
                    more = _received(made, _HELLO.size - len(waiting[made]))
                    waiting[made] += more
                    if more and len(waiting[made]) < _HELLO.size:
                        continue
                    found = _other_end(waiting[made], own)
                    if found is None or found[0] not in missing - set(channels.sockets):
                        refuse(made)
                        continue
                    del waiting[made]
                    selector.unregister(made)
                    channels.sockets[found[0]], channels.budgets[found[0]] = made, found[1]
                    made.setblocking(True)
                    made.sendall(own)
        finally:
            for stranger in [*waiting]:
                refuse(stranger)


def _accepted(listener: socket.socket) -> socket.socket | None:
    """Return a new connection.

    None where its other end is gone again, or the process has as many open files as it may.
    """
    try:
        made, _ = listener.accept()
    except OSError:
        return None
    made.setblocking(False)
    return made


def _received(of: socket.socket, most: int) -> bytes:
    """Return what a connection that can be read has; nothing where it has ended."""
    try:
        return of.recv(most)
    except OSError:
        return b""


def _read_hello(of: socket.socket, own: bytes, seconds: float) -> tuple[int, int] | None:
    """Return rank and buffer of the other end; None for one with another key."""
    data, deadline = b"", time.monotonic() + seconds
    while len(data) < _HELLO.size:
        of.settimeout(max(0.01, deadline - time.monotonic()))
        more = _received(of, _HELLO.size - len(data))
        if not more:
            return None
        data += more
    return _other_end(data, own)


def _other_end(hello: bytes, own: bytes) -> tuple[int, int] | None:
    """Return the rank and the buffer of a hello; None where it is not of this run."""
    if len(hello) != _HELLO.size:
        return None
    magic, key, rank, world_size, datagram, budget = _HELLO.unpack(hello)
    _, own_key, _, own_world, own_datagram, _ = _HELLO.unpack(own)
    if (magic, key, world_size, datagram) != (_MAGIC, own_key, own_world, own_datagram):
        return None
    return rank, budget


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
