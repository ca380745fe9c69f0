"""Connections of the watchdog: records of fixed size with a short text, a token at first."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
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
_MOST_SILENT = 512
"""Silent connections that are kept while ranks connect; beyond, the oldest is closed."""


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
    """The connections that begin with the token. Others are closed; one that stays silent holds up
    nobody.
    """
    accepted: dict[int, socket.socket] = {}
    hellos: dict[socket.socket, bytes] = {}
    """Of connections that have not said all: what they have said."""
    end = time.monotonic() + _CONNECT_TIMEOUT_S
    server.settimeout(0.0)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(accepted) < num_ranks - 1:
            if time.monotonic() > end:
                missing = sorted(set(range(1, num_ranks)) - accepted.keys())
                raise RankLostError(f"ranks {missing} did not reach rank 0's watchdog")
            ready = {key.fileobj for key, _ in selector.select(max(0.1, end - time.monotonic()))}
            for connection in [one for one in hellos if one in ready]:
                rank = _read_hello(connection, hellos, token)
                if rank is not None:
                    selector.unregister(connection)
                    del hellos[connection]
                    is_ours = 0 < rank < num_ranks and rank not in accepted
                    if is_ours:
                        accepted[rank] = _prepared(connection)
                    else:
                        connection.close()
            if server in ready:
                _admit(server, hellos, selector)
    for stranger in hellos:
        stranger.close()
    return sorted(accepted.items())


def _admit(
    server: socket.socket, hellos: dict[socket.socket, bytes], selector: selectors.BaseSelector
) -> None:
    """Take a connection in; the oldest silent one goes where there are too many."""
    with contextlib.suppress(OSError):  # it is gone again
        connection, _ = server.accept()
        connection.settimeout(0.0)
        selector.register(connection, selectors.EVENT_READ)
        hellos[connection] = b""
    if len(hellos) > _MOST_SILENT:
        oldest = next(iter(hellos))
        selector.unregister(oldest)
        del hellos[oldest]
        oldest.close()


def _read_hello(
    connection: socket.socket, hellos: dict[socket.socket, bytes], token: bytes
) -> int | None:
    """The rank at the other end, -1 for a stranger, None where more is to come."""
    try:
        read = connection.recv(_TOKEN_BYTES + 4 - len(hellos[connection]))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    hello = hellos[connection] = hellos[connection] + read
    if read and len(hello) < _TOKEN_BYTES + 4:
        return None
    if not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
        return -1
    return struct.unpack("!i", hello[_TOKEN_BYTES:])[0] if len(hello) == _TOKEN_BYTES + 4 else -1


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(5.0)  # of a send; reads come after select
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
