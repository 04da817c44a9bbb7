"""The protocol says what nodes of a partitioned cache say to each other, byte by byte
(little-endian), and what that may cost.

    server -> client   MAGIC, 32 random bytes
    client -> server   32 random bytes, proof    both prove that they know the run's secret, by
    server -> client   proof                     HMAC-SHA256 of all random bytes, before anything
                                                 else is read or answered

    GET    count, then the numbers of so many items
           -> per item: state, bytes, checksum; then the bytes of all that are PRESENT
    OFFER  count, then so many (number, bytes, checksum)
           -> a byte per item: wanted or not; <- the bytes of those wanted; -> a byte per item:
           stored or not

The data's fingerprint is part of the proof: nodes with other data or another transform refuse each
other. Nothing is unpickled, nothing is evaluated. What follows the proofs is neither encrypted nor
signed: whoever can read or change the packets of the cluster's network sees or damages samples
(damaged ones are found by their checksum unless that was the intention).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass

from lightning_topt.data.peers.peer_channel import Channel, PeerError, PeerLost, ProtocolError

MAGIC = b"toptpeer1"
NONCE_BYTES = PROOF_BYTES = 32
LEAST_SECRET_BYTES = 16
REQUEST = struct.Struct("<II")  # GET or OFFER, number of items
ENTRY = struct.Struct("<QQQ")  # GET's answer: state, bytes, checksum. OFFER: item, bytes, checksum
GET, OFFER = 1, 2
ABSENT, PRESENT, DEFERRED = 0, 1, 2  # deferred: too much for one answer, to be asked for again
SLOWEST_BYTES_PER_SECOND = 1e6  # what a transfer's time limit grows by


class PeerRefused(PeerError):
    """The other end has another secret or other data."""


@dataclass(frozen=True)
class PeerLimits:
    """`PeerLimits` say what a conversation may cost, in bytes and seconds; the same on all nodes.

    - ``entry_bytes``: the largest entry; larger ones stay on the node that reads them from the
      source;
    - ``reply_bytes``: of one answer, unless its first entry alone is larger;
    - ``items``, ``offers``: of one request;
    - ``connections``, and besides ``strangers``, who have not proved yet that they know the secret:
      open at a time;
    - ``proof_seconds``: until then;
    - ``request_seconds``: for a request or answer, and one more second per megabyte;
      ``idle_seconds``: between requests.
    """

    entry_bytes: int = 1 << 28
    reply_bytes: int = 1 << 30
    items: int = 1024
    offers: int = 64
    connections: int = 2048
    strangers: int = 512
    proof_seconds: float = 5.0
    request_seconds: float = 30.0
    idle_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} is positive; got {value}")


def run_key(secret: bytes, *, fingerprint: str, num_items: int) -> bytes:
    """Return what proofs are made with, (32,) bytes. Raises ValueError for a short secret."""
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"the run's secret has at least {LEAST_SECRET_BYTES} bytes, for example "
            "secrets.token_bytes(32) made by one rank "
            "and given to all"
        )
    return hmac.digest(
        secret, MAGIC + hashlib.sha256(f"{num_items} {fingerprint}".encode()).digest(), "sha256"
    )


def _proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Another one for each role: what one end says cannot be sent back to it."""
    return hmac.digest(key, MAGIC + role + server_nonce + client_nonce, "sha256")


class Welcome:
    """The server's part of the beginning, without waiting: the few bytes that are sent have room in
    any new connection.
    """

    def __init__(self, channel: Channel, key: bytes) -> None:
        self.channel, self._key, self._nonce, self._answer = (
            channel,
            key,
            os.urandom(NONCE_BYTES),
            bytearray(),
        )
        channel.send([MAGIC + self._nonce], deadline=0)

    def go_on(self) -> bool:
        """Return whether the other end has proved that it knows the key, after what came. Raises
        PeerRefused where it does not.
        """
        self._answer += self.channel.receive_some(NONCE_BYTES + PROOF_BYTES - len(self._answer))
        if len(self._answer) < NONCE_BYTES + PROOF_BYTES:
            return False
        client_nonce, proof = bytes(self._answer[:NONCE_BYTES]), bytes(self._answer[NONCE_BYTES:])
        if not hmac.compare_digest(proof, _proof(self._key, b"client", self._nonce, client_nonce)):
            raise PeerRefused("a stranger")
        self.channel.send([_proof(self._key, b"server", self._nonce, client_nonce)], deadline=0)
        return True


def introduce(channel: Channel, key: bytes, *, deadline: float) -> None:
    """Do the client's part. Raises PeerRefused where either end finds that the other does not know
    the key.
    """
    hello = bytes(channel.receive(len(MAGIC) + NONCE_BYTES, deadline=deadline))
    if hello[: len(MAGIC)] != MAGIC:
        raise ProtocolError("something else listens there, or another version")
    client_nonce, server_nonce = os.urandom(NONCE_BYTES), hello[len(MAGIC) :]
    channel.send(
        [client_nonce, _proof(key, b"client", server_nonce, client_nonce)], deadline=deadline
    )
    try:
        proof = bytes(channel.receive(PROOF_BYTES, deadline=deadline))
    except PeerLost as error:
        raise PeerRefused("it has another secret or other data") from error
    if not hmac.compare_digest(proof, _proof(key, b"server", server_nonce, client_nonce)):
        raise PeerRefused("it does not know the run's secret")
