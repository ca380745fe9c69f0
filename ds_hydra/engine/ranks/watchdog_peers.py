"""Connections of the watchdog: records of fixed size with a short text, a token at first."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ds_hydra.errors import RankLostError

_RECORD = struct.Struct("!BiqI")
"""Kind, rank, section, bytes of the text that follows."""
ALIVE, FAILED, LOST, LEFT = 0, 1, 2, 3
_MAX_TEXT_BYTES = 4096

_CONNECT_TIMEOUT_S = 60.0
_TOKEN_BYTES = 16


@dataclass(slots=True)
class Peer:
    """One connection and what is known about its other end."""

    rank: int
    connection: socket.socket
    last_seen: float = field(default_factory=time.monotonic)
    last_told: float = 0.0
    buffer: bytes = b""
    has_left: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_records(self) -> Iterator[tuple[int, int, int, str]]:
        """The complete records at the begin of the buffer, removed from it."""
        while len(self.buffer) >= _RECORD.size:
            kind, rank, section, size = _RECORD.unpack_from(self.buffer)
            end = _RECORD.size + min(size, _MAX_TEXT_BYTES)
            if len(self.buffer) < end:
                return
            text = self.buffer[_RECORD.size : end].decode("utf-8", "replace")
            self.buffer = self.buffer[end:]
            yield kind, rank, section, text

    def send(self, kind: int, rank: int, section: int, text: str) -> None:
        """Send a record; a broken connection shows up in select."""
        body = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
        with contextlib.suppress(OSError), self.lock:
            self.connection.sendall(_RECORD.pack(kind, rank, section, len(body)) + body)


def connect(rank: int, num_ranks: int, exchange_text: Callable[[str], str]) -> list[Peer]:
    """Connections of rank 0 to all others, of the others to rank 0. Collective over all ranks."""
    if rank != 0:
        host, port, token = exchange_text("").split(" ")
        connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
        connection.sendall(bytes.fromhex(token) + struct.pack("!i", rank))
        return [Peer(0, _prepared(connection))]
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    with _listen(host, num_ranks) as server:
        token = secrets.token_bytes(_TOKEN_BYTES)
        exchange_text(f"{host} {server.getsockname()[1]} {token.hex()}")
        return [Peer(*accepted) for accepted in _accept(server, num_ranks, token)]


def _listen(host: str, backlog: int) -> socket.socket:
    """A listening socket on rank 0's address, on all addresses where the name is not one of this
    machine.
    """
    try:
        return socket.create_server((host, 0), backlog=backlog)
    except OSError:
        return socket.create_server(("", 0), backlog=backlog)


def _accept(server: socket.socket, num_ranks: int, token: bytes) -> list[tuple[int, socket.socket]]:
    accepted: dict[int, socket.socket] = {}
    end = time.monotonic() + _CONNECT_TIMEOUT_S
    while len(accepted) < num_ranks - 1:
        server.settimeout(max(0.1, end - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, num_ranks)) - accepted.keys())
            raise RankLostError(f"ranks {missing} did not reach rank 0's watchdog") from None
        connection.settimeout(5.0)
        try:
            hello = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if not secrets.compare_digest(hello[:_TOKEN_BYTES], token) or len(hello) < _TOKEN_BYTES + 4:
            connection.close()  # not one of ours
            continue
        accepted[struct.unpack("!i", hello[_TOKEN_BYTES:])[0]] = _prepared(connection)
    return sorted(accepted.items())


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(5.0)  # of a send; reads come after select
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
