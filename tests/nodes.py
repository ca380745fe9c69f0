"""Several hosts on one machine: each has its own network, address, name, processes and shared
memory.

A host is a process in namespaces of its own (net, uts, ipc, mount, pid), joined to the others by a
switch. All of them end when this process ends, however it ends, because they read a pipe of it:
nothing is left behind, and the network of the machine is never touched. Users who are not root get
there by a user namespace, where the kernel lets them.

`Hosts(2)` are hosts `node-0` (10.77.0.1) and `node-1` (10.77.0.2), each with `eth0`, joined by a
bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import free_port, rank_environment
from faults import Ended, run_ranks

NETWORK = "10.77.0"
_IN_USE = tuple(map(os.path.realpath, (__file__, sys.prefix, tempfile.gettempdir(), os.getcwd())))
PRIVATE_FOLDER = next(
    (
        folder
        for folder in ("/mnt", "/media", "/srv", "/opt")
        if os.path.isdir(folder) and not any(path.startswith(f"{folder}/") for path in _IN_USE)
    ),
    "/mnt",
)
"""Of every host: the others do not see what is in it. Everything else is a file system that all
hosts share.
"""
_libc = ctypes.CDLL(None, use_errno=True)


class CannotBuildHosts(Exception):
    """What this machine does not allow or does not have."""


@dataclass(frozen=True)
class Counters:
    """What the interface of a host has carried since it is up."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.received_bytes - other.received_bytes,
            self.received_packets - other.received_packets,
            self.sent_bytes - other.sent_bytes,
            self.sent_packets - other.sent_packets,
        )


class Hosts:
    """A context manager; raises CannotBuildHosts when it is entered where the machine does not
    allow it.
    """

    def __init__(self, number: int):
        self.names = [f"node-{index}" for index in range(number)]
        self.addresses = [f"{NETWORK}.{index + 1}" for index in range(number)]
        self._holders: list[subprocess.Popen[str]] = []
        self._inits: list[int] = []
        self._as_root = os.geteuid() == 0

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts with everything that runs in them."""
        for holder in reversed(self._holders):
            holder.kill()
        for job in self._holders:
            job.wait()
            for pipe in (job.stdin, job.stdout):
                if pipe is not None:
                    pipe.close()
        self._holders, self._inits = [], []

    def run(self, host: int, command: str) -> str:
        """What a shell command prints on a host."""
        return _output([*self._enter(self._inits[host]), "sh", "-c", command])

    def cut(self, host: int) -> None:
        """Cut a host off, as behind a broken switch: its interface stays up, and no packet leaves
        or arrives.
        """
        self._in_switch(f"ip link set port{host} nomaster")

    def move_in(self, host: int) -> None:
        """Go on in a process of a host; this process, which must have one thread, waits and ends as
        that one does.
        """
        folder = os.getcwd()
        # The user namespace first, for the rights to the others; what is forked after "pid" is in
        # it.
        for space in ([] if self._as_root else ["user"]) + ["net", "uts", "ipc", "pid", "mnt"]:
            with open(f"/proc/{self._inits[host]}/ns/{space}") as target:
                _setns(target.fileno())
        os.chdir(folder)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)

    # Building.

    def _build(self) -> None:
        user = [] if self._as_root else ["--user", "--map-root-user"]
        bridge = "ip link set lo up && ip link add switch type bridge && ip link set switch up"
        self._hold(
            [
                "unshare",
                *user,
                "--net",
                "--mount",
                "sh",
                "-c",
                f"{bridge} && echo ready && exec cat",
            ]
        )
        for index in range(len(self.names)):
            self._inits.append(self._start_host(index))
        self._join_to_bridge()
        for index in range(len(self.names)):
            self.run(
                index, f"ip addr add {self.addresses[index]}/24 dev eth0 && ip link set eth0 up"
            )

    def _start_host(self, index: int) -> int:
        """The process that keeps a host's namespaces, as this process sees it."""
        table = "\n".join(
            ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(self.addresses, self.names))]
        )
        script = f"""
            mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc &&
            hostname {self.names[index]} &&
            {{ echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true; }} 2>/dev/null && ip link set lo up &&
            mount -t tmpfs tmpfs {PRIVATE_FOLDER} && printf %s {shlex.quote(table)} > {PRIVATE_FOLDER}/hosts &&
            mount --bind {PRIVATE_FOLDER}/hosts /etc/hosts && echo ready && exec cat"""
        own = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
        holder = self._hold([*self._enter(self._holders[0].pid), *own, "sh", "-c", script])
        return _descendants(holder.pid)[-1]

    def _join_to_bridge(self) -> None:
        for index, init in enumerate(self._inits):
            port = f"port{index}"
            self._in_switch(
                f"ip link add {port} type veth peer name eth0 netns {init} && "
                f"ip link set {port} master switch && ip link set {port} up"
            )

    def _in_switch(self, command: str) -> None:
        _output([*self._enter(self._holders[0].pid), "sh", "-c", command])

    def _enter(self, pid: int) -> list[str]:
        user = [] if self._as_root else ["--user", "--preserve-credentials"]
        spaces = (
            ["--net", "--mount"]
            if pid == self._holders[0].pid
            else ["--net", "--uts", "--ipc", "--mount", "--pid"]
        )
        return ["nsenter", f"--target={pid}", *user, *spaces, "--"]

    def _hold(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a process that says "ready" and then lives until its input ends."""
        try:
            holder = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except FileNotFoundError as error:
            raise CannotBuildHosts(f"{error.filename} is not installed") from error
        self._holders.append(holder)
        line = holder.stdout.readline().strip()
        if line != "ready":
            raise CannotBuildHosts(f"{shlex.join(command[:8])} ...: {line}")
        return holder


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildHosts(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _descendants(pid: int) -> list[int]:
    """Children of a process, and theirs, parents first."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _setns(file: int) -> None:
    if _libc.setns(file, 0):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def run_on_hosts(
    function: Callable[..., Any],
    hosts: Hosts | None,
    ranks_on: Sequence[int],
    folder: Path,
    *args: Any,
    poll: Callable[[], bool] = lambda: False,
    limit_s: float = 800,
) -> list[Ended]:
    """`run_ranks` with `ranks_on[host]` of them on each host, in the order of the hosts.

    Without `hosts` all of them run on this machine.
    """
    places = [(host, local) for host, number in enumerate(ranks_on) for local in range(number)]
    port = free_port()
    environments = [
        rank_environment(rank, len(places), port)
        | {"LOCAL_RANK": str(local), "LOCAL_SIZE": str(ranks_on[host])}
        | ({} if hosts is None else {"MASTER_ADDR": hosts.names[0]})
        for rank, (host, local) in enumerate(places)
    ]

    def enter(rank: int) -> None:
        if hosts is not None:
            hosts.move_in(places[rank][0])

    return run_ranks(function, args, environments, folder, enter=enter, poll=poll, limit_s=limit_s)


@contextlib.contextmanager
def hosts_or_skip(number: int) -> Iterator[Hosts]:
    """Hosts, or the test is skipped and says what the machine lacks."""
    import pytest

    hosts = Hosts(number)
    try:
        hosts.__enter__()
    except CannotBuildHosts as error:
        pytest.skip(f"hosts need root or user namespaces, ip, unshare and nsenter: {error}")
    try:
        yield hosts
    finally:
        hosts.close()
