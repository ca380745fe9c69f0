"""Watchdog of the ranks: one that ends, fails or falls silent is named to all others, which then
stop.

[Note: Watchdog]
A collective only says that a connection broke (gloo), or nothing at all (NCCL). So every rank keeps
one TCP connection to rank 0, served by a thread. The kernel closes it the moment a process ends,
however it ends; a host that is cut off falls silent. So does a process that SIGSTOP holds, or in
which one call holds Python's lock, and nobody can tell these two apart. Rank 0 tells the others
which rank it was, and each rank raises RankLostError out of its broken collective, or ends itself
where it would wait for ever. Between the engine's calls (callbacks, collectives of TRL or the user)
it ends itself only where it stands in a collective: what else it does there may be finished.
Messages are lines of JSON, so nothing in them is unpickled, and a connection has to begin with a
random token that went through the process group.

It begins with a process' first engine, before anything else is exchanged, and ends with the last
one's `destroy`, in which each rank waits until all have come to theirs. A rank that is lost before
all are connected is named by the store that the ranks met in.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field

import torch
import torch.distributed as dist

from ds_hydra.configs.hydra_config import FaultsConfig
from ds_hydra.engine.ranks.agreement import (
    EXIT_CODE,
    TICK_S,
    VERDICT_WAIT_S,
    broadcast_text,
    describe_missing,
    ends_after,
    find_wait,
    gather_by_hosts,
    gather_flags,
    is_raised_on_all,
    looks_like_a_lost_peer,
    on_all_ranks,
    raise_known,
    said_by,
)
from ds_hydra.engine.ranks.hosts import find_hosts
from ds_hydra.errors import HydraConfigError, HydraError, PlanMismatchError, RankLostError

logger = logging.getLogger(__name__)

_ENGINE_DESTROYED = "is gone: its engine was destroyed"
_PROCESS_ENDED = "is gone: its process ended"
_IS_TOLD = "_ds_hydra_is_told"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fate of `rank`; a failure concerns one section only, a loss all that follow."""

    rank: int
    text: str
    section: int | None = None
    is_orderly: bool = False
    """Whether the rank has told that it leaves."""

    @property
    def is_loss(self) -> bool:
        """Whether the rank has neither failed in a section nor told that it leaves."""
        return self.section is None and not self.is_orderly


class Watchdog:
    """One per process. Creating it is collective over all ranks; everything else is not.

    `exchange_text` gives rank 0's text on every rank. `places[rank]` is where a rank runs, in
    words; empty where that says nothing. `silence_s`: without a sign of life for so long, a rank
    counts as lost. `grace_s`: a rank that still waits in a collective so long after another was
    lost ends itself with `EXIT_CODE`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        exchange_text: Callable[[str], str],
        *,
        places: Sequence[str],
        silence_s: float,
        grace_s: float,
    ) -> None:
        self._rank = rank
        self._places = places
        self._silence_s = silence_s
        self._grace_s = grace_s
        self._section = 0
        self._is_inside = False
        self._section_thread = 0
        self._phase = "start"
        self._verdict: Verdict | None = None
        self._deadline: float | None = None
        self._failed_section: int | None = None
        """Number of the section in which this rank itself has failed."""
        self._engine_thread = threading.get_ident()
        self._wait: tuple[int, int] | None = None
        self._wait_began = 0.0
        self.call: tuple[str, float] | None = None
        """Call for which this rank waits for the others, and since when."""
        self._changed = threading.Condition()
        self._peers: dict[int, Peer] = {}
        self._is_leaving = False
        self._is_closing = False
        self._has_raised = False
        """Whether the loss of a rank has been raised here."""
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        """Socket that ends the thread's wait when it is sent to."""
        self._selector.register(woken, selectors.EVENT_READ)
        for peer in connect(rank, num_ranks, exchange_text):
            self._peers[peer.rank] = peer
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._serve, name="ds_hydra-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def section(self, phase: str) -> Iterator[None]:
        """Make the block collective over all ranks. Raises RankLostError where another rank is
        lost.

        Errors that all ranks raise together pass; of any other one the others are told. Sections
        may be nested; the outer one counts.
        """
        thread = threading.get_ident()
        with self._changed:
            if self._is_inside and thread != self._section_thread:
                raise HydraError(
                    f"the engine is in {self._phase} in another thread, and its ranks exchange one thing at a time: "
                    "call its methods one after the other, from one thread"
                )
            is_nested, before = self._is_inside, self._phase
            self._phase = phase
            if not is_nested:
                self._section += 1
                verdict = self._relevant_verdict()
                self._is_inside, self._section_thread = True, thread
        if is_nested:
            yield
            # Not after an error: the outer section tells of it as of the inner phase
            self._phase = before
            return
        try:
            if verdict is not None:
                raise self._error_of(verdict)
            yield
        except (Exception, KeyboardInterrupt) as error:
            if is_raised_on_all(error):
                raise
            raise_from = self.find_cause(error)
            if raise_from is None:
                raise
            raise raise_from from error
        finally:
            with self._changed:
                self._is_inside = False
                self._deadline = None

    def find_cause(self, error: BaseException) -> RankLostError | None:
        """The loss behind `error`; where there is none, `error` is this rank's own and the others
        are told, once.
        """
        verdict = None
        if looks_like_a_lost_peer(error):  # any other error is this rank's own, and says more
            with self._changed:
                self._changed.wait_for(lambda: self._relevant_verdict() is not None, VERDICT_WAIT_S)
                verdict = self._relevant_verdict()
        if verdict is not None:
            return self._error_of(verdict)
        if not hasattr(error, _IS_TOLD):
            # One error may pass several callers, each of which asks for its cause
            setattr(error, _IS_TOLD, True)
            self._failed_section = self._section
            # Cut: it becomes a line of the protocol, and one sentence of the others' errors
            what = f"{type(error).__name__}: {str(error).strip()[:500]}"
            text = f"failed {self._place}: {what}"
            if isinstance(error, KeyboardInterrupt):
                text = f"was interrupted by its user {self._place}"
            self._tell(Verdict(self._rank, text, self._section))
        return None

    @property
    def _place(self) -> str:
        """Place of this rank in the program, in words."""
        is_known = self._is_inside or self._is_leaving
        return f"in {self._phase}" if is_known else "between two calls of the engine"

    def _relevant_verdict(self) -> Verdict | None:
        verdict = self._verdict
        if verdict is None or verdict.rank == self._rank:
            return None
        is_relevant = verdict.section is None or (
            # Of a section that is over it stops nobody, nor where this rank has failed itself
            verdict.section == self._section != self._failed_section
        )
        return verdict if is_relevant else None

    def raise_loss(self) -> None:
        """Raise RankLostError where another rank is lost or has failed."""
        with self._changed:
            verdict = self._relevant_verdict()
        if verdict is not None and not verdict.is_orderly:
            raise self._error_of(verdict)

    def _error_of(self, verdict: Verdict) -> RankLostError:
        self._has_raised = True
        return said_by(1 if verdict.rank == 0 else 0, RankLostError(self._describe(verdict)))

    def _describe(self, verdict: Verdict) -> str:
        advice = "Restart from the last checkpoint (torchrun --max-restarts does)"
        return (
            f"rank {verdict.rank} {verdict.text}; rank {self._rank} was {self._place} and cannot go on "
            f"without it. {'' if self._section <= 1 and self._phase == 'start' else advice}"
        ).rstrip()

    @property
    def is_left(self) -> bool:
        """Whether another rank has told that it leaves."""
        return self._verdict is not None and self._verdict.is_orderly

    def leave(self) -> None:
        """Wait until all ranks have come to leave, and end. Collective over all ranks.

        Raises RankLostError for a rank that is lost before it has come, unless that has been raised
        here already. A rank that lives and does not come is waited for `silence_s + grace_s`.
        """
        self._is_leaving, self._phase = True, "destroy"
        self._tell(Verdict(self._rank, _ENGINE_DESTROYED, is_orderly=True))
        with self._changed:
            self._changed.wait_for(
                lambda: self._have_all_left() or self.find_loss() is not None,
                self._silence_s + self._grace_s,
            )
            loss = self.find_loss()
        self.close()
        if loss is not None and not self._has_raised:
            raise self._error_of(loss)

    def _have_all_left(self) -> bool:
        """Rank 0 knows of all; it ends last, which the others see."""
        peers = list(self._peers.values())
        return not peers or (self._rank == 0 and all(peer.has_left for peer in peers))

    def find_loss(self) -> Verdict | None:
        """The loss of a rank that has not told that it leaves, if any is known."""
        verdict = self._verdict
        return verdict if verdict is not None and verdict.is_loss else None

    def close(self, reason: str = _ENGINE_DESTROYED) -> None:
        """Tell the others that this rank leaves, and end without waiting for them."""
        if not self._is_leaving:
            self._tell(Verdict(self._rank, reason, is_orderly=True))
        self._is_closing = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:  # which may collect garbage, too
            self._thread.join(4 * TICK_S)

    def close_connections(self) -> None:
        """Close without a word; in a forked child, which would hide the end of this process."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()
        self._selector.close()
        self._waker.close()

    # The thread.

    def _serve(self) -> None:
        try:
            self._serve_until_closing()
        finally:
            self.close_connections()

    def _serve_until_closing(self) -> None:
        last_tick = time.monotonic()
        while not self._is_closing:
            for key, _ in self._selector.select(TICK_S):
                if key.data is not None:  # nothing is read of what only wakes
                    self._receive(key.data)
            now = time.monotonic()
            # Before silence is judged: a process that was suspended has not listened.
            self._forgive(now - last_tick, now)
            last_tick = now
            for peer in list(self._peers.values()):
                if now - peer.last_seen > self._silence_s:
                    place = self._places[peer.rank] or "host"
                    self._drop(
                        peer,
                        f"is silent for {self._silence_s:.0f} s ({place} cut off, process stopped, or in a call that "
                        "holds Python's lock, such as a long regular expression or a C extension: set "
                        "hydra.faults.silence_s above its seconds)",
                    )
                # Four signs of life in the time of one silence: a late one is no loss
                elif now - peer.last_told > self._silence_s / 4:
                    peer.last_told = now
                    peer.send(_ALIVE)
            self._say_who_waits(now)
            self._end_if_stuck(now)

    def _say_who_waits(self, now: float) -> None:
        """Name a call for which the others let this rank wait; once, they may only be slow."""
        call = self.call
        if call is not None and now - call[1] > _PATIENCE_S:
            self.call = None
            logger.warning(
                "rank %d has waited %.0f s in %s for other ranks to call it, too; every rank has to, not one alone "
                "(`if rank == 0`)",
                self._rank, _PATIENCE_S, call[0],
            )  # fmt: skip

    def _forgive(self, seconds: float, now: float) -> None:
        """A pause of this very process (a job that was suspended and continued) is no silence of
        the others.
        """
        # Shorter pauses alone make nobody look silent
        if seconds > max(2 * TICK_S, self._silence_s / 4):
            for peer in self._peers.values():
                peer.last_seen = min(now, peer.last_seen + seconds)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except TimeoutError:  # woken for nothing; a socket with a timeout raises no other
            return
        except OSError:
            data = b""
        # The stream has ended: the kernel closes it with the process, however that has ended.
        if not data:
            place = self._places[peer.rank]
            self._drop(peer, _PROCESS_ENDED + (f" on {place}" if place else ""))
            return
        peer.last_seen = time.monotonic()
        peer.buffer += data
        # The last part may be half a line, whose rest is still to come
        *lines, peer.buffer = peer.buffer.split(b"\n")
        for line in filter(None, lines):
            verdict = Verdict(*json.loads(line))
            peer.has_left |= verdict.is_orderly and verdict.rank == peer.rank
            self._hear(verdict)

    def _drop(self, peer: Peer, text: str) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        # Who waits in `leave` looks at the peers that are left, once notified below
        del self._peers[peer.rank]
        if not peer.has_left:
            self._hear(Verdict(peer.rank, text))
        with self._changed:
            self._changed.notify_all()

    def _hear(self, verdict: Verdict) -> None:
        """Keep the first loss (others follow from it), and tell the others if this is rank 0.

        A rank that failed and then ended is lost for all sections that follow, with its failure as
        the reason.
        """
        # First: once its main thread knows, this process may end, and be taken for the lost one.
        if self._rank == 0:
            self._tell(verdict)
        with self._changed:
            current, failure = self._relevant_verdict(), self._last_failure_of(verdict.rank)
            if verdict.section is None and failure is not None:
                self._keep(Verdict(failure.rank, failure.text))
            elif current is None or (self._is_leaving and current.is_orderly):
                self._keep(verdict)
            self._changed.notify_all()

    def _last_failure_of(self, rank: int) -> Verdict | None:
        """The last failure that `rank` has reported, in this section or the one before."""
        last = self._verdict
        if last is None or last.rank != rank or last.section is None:
            return None
        # An older failure was got over, and is no reason why the process has ended
        return last if last.section >= self._section - 1 else None

    def _keep(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if self._relevant_verdict() is not None:
            if self._is_inside:
                # Until then the collective may break by itself, which raises in place of ending
                self._deadline = time.monotonic() + self._grace_s
            # The others may be about to end, or to raise the same: said where they do not.
            if verdict.is_loss and not self._is_leaving:
                logger.error("%s", self._describe(verdict))

    def _tell(self, verdict: Verdict) -> None:
        # A copy: the main thread tells, too, while this one drops peers.
        for peer in list(self._peers.values()):
            if peer.rank != verdict.rank:
                peer.send(json.dumps(astuple(verdict)).encode() + b"\n")

    def _end_if_stuck(self, now: float) -> None:
        with self._changed:
            deadline = self._deadline
            is_stuck = deadline is not None and self._is_inside and now > deadline
            is_stuck |= not self._is_inside and self._waits_in_vain(now)
            verdict = self._verdict
        if is_stuck and verdict is not None:
            print(
                f"ds_hydra: {self._describe(verdict)}; ending rank {self._rank}",
                file=sys.stderr,
                flush=True,
            )
            # Not sys.exit, which ends a thread alone: the main one stands in a collective.
            os._exit(EXIT_CODE)

    def _waits_in_vain(self, now: float) -> bool:
        """Whether the engine's thread stands in one collective for longer than the grace though a
        rank has failed or is lost; one that left in order may still come to it.
        """
        verdict = self._relevant_verdict()
        is_lost = verdict is not None and not verdict.is_orderly
        wait = find_wait(self._engine_thread) if is_lost else None
        # Another place, or another call at it: it goes on
        if wait != self._wait:
            self._wait, self._wait_began = wait, now
        return wait is not None and now - self._wait_began > self._grace_s


CALL_BYTES = 160
"""Bytes of the text by which ranks compare their calls."""
_PATIENCE_S = 30.0
"""Seconds until a rank says for which call it waits."""

_watchdog: Watchdog | None = None
_num_engines = 0
_num_starts = 0


def join_watchdog(faults: FaultsConfig, device: torch.device) -> None:
    """Let the engine that is being made watch the other ranks, as the process' others do.

    Collective over all ranks; the first thing that an engine exchanges. Raises RankLostError.
    """
    global _watchdog, _num_engines, _num_starts
    _num_engines += 1
    _num_starts += 1
    if dist.get_world_size() == 1 or not faults.watchdog:
        return
    # One that somebody has left is on its way out, on all ranks
    is_watched = _watchdog is not None and not _watchdog.is_left
    try:
        with watch("start") if is_watched else contextlib.nullcontext():
            # All or none: a rank without one would not be heard by the others'
            if all(gather_flags(is_watched, device)):
                return
        _close()
        # All ranks have come here: none is still loading its model.
        with ends_after(faults.silence_s, _num_starts):
            _watchdog = _make(faults, device)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RankLostError):
            raise
        raise RankLostError(describe_missing(error, _num_starts)) from error


def leave_watchdog(*, waits: bool) -> None:
    """An engine ends; with the last one the watchdog does, after all ranks have come here where it
    `waits`. Collective over all ranks then; raises RankLostError for one that does not come.
    """
    global _num_engines, _watchdog
    _num_engines -= 1
    if _num_engines == 0 and waits and _watchdog is not None:
        watchdog, _watchdog = _watchdog, None
        watchdog.leave()
    elif _num_engines == 0:
        _close()


def watch(phase: str) -> contextlib.AbstractContextManager[None]:
    """`Watchdog.section` of this process' watchdog, if it has one."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.section(phase)


def raise_loss() -> None:
    """Raise RankLostError where this process' watchdog, if it has one, knows of a lost rank."""
    if _watchdog is not None:
        _watchdog.raise_loss()


def is_rank_lost() -> bool:
    """Whether this process' watchdog, if it has one, knows of a rank that will not come back."""
    return _watchdog is not None and _watchdog.find_loss() is not None


def call_together(call: str, device: torch.device, problem: Exception | None = None) -> None:
    """Raise, on all ranks, a `problem` that any rank brings, as `raise_together`; else
    PlanMismatchError, on all, unless each has come to the same `call` of an engine.

    Collective over all ranks, before anything else is exchanged: collectives of two methods would
    hang, end the process, or take each other's data.
    """
    mine = torch.zeros(CALL_BYTES + 1, dtype=torch.uint8)
    # A text of fixed size: one exchange compares calls of any ranks
    mine[: len(call)] = torch.frombuffer(bytearray(call, "ascii"), dtype=torch.uint8)
    mine[-1] = problem is not None
    if _watchdog is not None:
        _watchdog.call = call, time.monotonic()
    try:
        rows = gather_by_hosts(mine, device).numpy()
    finally:
        if _watchdog is not None:
            _watchdog.call = None
    rows, brings = rows[:, :-1], rows[:, -1].astype(bool).tolist()
    # A problem goes first: it may be why a rank comes with another call
    if any(brings) or (rows == rows[0]).all():
        raise_known(problem, brings, device)
        return
    of_calls: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        of_calls.setdefault(row.tobytes().rstrip(b"\0").decode("ascii", "replace"), []).append(rank)
    said = (
        f"{name} on rank {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
        for name, ranks in of_calls.items()
    )
    raise on_all_ranks(
        PlanMismatchError(
            f"ranks have called different methods, or with other strategies: {'; '.join(said)}. All ranks take part in "
            "each: call it on every rank, not on one (`if rank == 0`, a callback's control.should_save of one rank)"
        )
    )


def find_loss_behind(error: BaseException) -> RankLostError | None:
    """The loss of a rank that has led to `error` outside of the engine's calls; where there is
    none, the others are told that this rank has failed.
    """
    if _watchdog is None or is_raised_on_all(error):
        return None
    return _watchdog.find_cause(error)


@contextlib.contextmanager
def names_losses() -> Iterator[None]:
    """Raise RankLostError where a collective inside, which is not the engine's, breaks because a
    rank is lost.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if (loss := find_loss_behind(error)) is None:
            raise
        raise loss from error


def _make(faults: FaultsConfig, device: torch.device) -> Watchdog:
    # A process of multiprocessing ends without the functions of atexit.
    multiprocessing.util.Finalize(None, _close, (_PROCESS_ENDED,), exitpriority=0)
    hosts, num_ranks = find_hosts(device), dist.get_world_size()
    return Watchdog(
        dist.get_rank(),
        num_ranks,
        lambda text: broadcast_text([text], 0, device)[0],
        places=[hosts.describe_place(rank) for rank in range(num_ranks)],
        silence_s=faults.silence_s,
        grace_s=faults.grace_s,
    )


def _close(reason: str = _ENGINE_DESTROYED) -> None:
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        watchdog.close(reason)


atexit.register(_close, _PROCESS_ENDED)


def _close_in_child() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.close_connections()
        _watchdog = None


os.register_at_fork(after_in_child=_close_in_child)


_ALIVE = b"\n"
"""Message that only says that its sender lives; others are a verdict in JSON, each a line."""

_CONNECT_TIMEOUT_S = 60.0
_OPEN_PORTS = (
    "let ranks reach each other on all ports, or set hydra.faults.watchdog to false: collectives then time out where a "
    "rank is lost"
)
_HELLO = struct.Struct("!16si")
"""The token, and the rank that connects."""
_POLL_S = 0.02


@dataclass(slots=True)
class Peer:
    """One connection and the known state of its other end."""

    rank: int
    connection: socket.socket
    last_seen: float = field(default_factory=time.monotonic)
    last_told: float = 0.0
    buffer: bytes = b""
    has_left: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: bytes) -> None:
        """Send a message; a broken connection shows up in select."""
        # Under the lock: two threads send, and the other end reads line after line.
        with contextlib.suppress(OSError), self.lock:
            self.connection.sendall(message)


def connect(rank: int, num_ranks: int, exchange_text: Callable[[str], str]) -> list[Peer]:
    """Connections of rank 0 to all others, of the others to rank 0. Collective over all ranks."""
    if rank != 0:
        host, port, token = exchange_text("").split(" ")
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
        except OSError as error:
            raise HydraConfigError(
                f"rank {rank} cannot connect to port {port} of {host}, where rank 0's watchdog listens ({error}); "
                f"{_OPEN_PORTS}"
            ) from error
        connection.sendall(_HELLO.pack(bytes.fromhex(token), rank))
        return [Peer(0, _prepared(connection))]
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    with _listen(host, num_ranks) as server:
        secret = secrets.token_bytes(16)
        exchange_text(f"{host} {server.getsockname()[1]} {secret.hex()}")
        return [Peer(*accepted) for accepted in _accept(server, num_ranks, secret)]


def _listen(host: str, backlog: int) -> socket.socket:
    """A listening socket on rank 0's address, on all addresses where the name is not one of this
    machine.
    """
    try:
        # The address family of the name that the launcher gave, IPv4 or IPv6
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=backlog)
    except OSError:
        if not socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), backlog=backlog)
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )


def _accept(server: socket.socket, num_ranks: int, token: bytes) -> list[tuple[int, socket.socket]]:
    """The connections that begin with the token. Others are closed; one that stays silent holds up
    nobody.
    """
    accepted: dict[int, socket.socket] = {}

    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone again, or silent
            connection.settimeout(_CONNECT_TIMEOUT_S)
            hello = b""
            while read := connection.recv(_HELLO.size - len(hello)):  # "" also of nothing wanted
                hello += read
            given, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
            is_ours = secrets.compare_digest(given, token) and 0 < rank < num_ranks
            # A second connection of a rank is a stranger: the first one is watched.
            if is_ours and accepted.setdefault(rank, connection) is connection:
                return
        connection.close()

    end = time.monotonic() + _CONNECT_TIMEOUT_S
    server.settimeout(_POLL_S)
    while len(accepted) < num_ranks - 1:
        if time.monotonic() > end:
            missing = sorted(set(range(1, num_ranks)) - accepted.keys())
            raise HydraConfigError(
                f"ranks {missing} did not reach rank 0's watchdog on port {server.getsockname()[1]} within "
                f"{_CONNECT_TIMEOUT_S:.0f} s; {_OPEN_PORTS}"
            )
        with contextlib.suppress(OSError):  # nobody has come, or it is gone again
            connection, _ = server.accept()
            threading.Thread(target=greet, args=(connection,), daemon=True).start()
    return [(rank, _prepared(connection)) for rank, connection in sorted(accepted.items())]


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(5.0)  # of a send; reads come after select
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
