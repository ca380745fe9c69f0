"""Ranks fail together: an error that one rank finds is raised on all of them, instead of leaving
them waiting; and whether this process waits for another rank, and for which ones when an engine
starts, before the watchdog watches them.

[Note: By way of the hosts]
Plans, digests and errors are numbers of the host. Sent by a device they would wait for all that it
still computes, and the device would then wait for the host. So on accelerators the hosts have a
Gloo group beside the group of all ranks: agreements go over it, and run beside the device.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import linecache
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ds_hydra import errors
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.errors import HydraError, PlanMismatchError, RankLostError

_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""The second name is that of torch before 2.13."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ErrorType = TypeVar("ErrorType", bound=BaseException)

_ON_ALL_RANKS = "_ds_hydra_is_raised_on_all"
_SAID_BY = "_ds_hydra_is_said_by"

ENVELOPE_BYTES = 1 << 15
"""Payloads up to this size, such as plans of some thousand sequences, travel in one broadcast."""

_SIZE_BYTES = 8

_hosts: tuple[Any, Any] = (None, None)
"""The group of all ranks, and the one of their hosts beside it ([Note: By way of the hosts])."""


def find_timeout(device: torch.device) -> datetime.timedelta:
    """Timeout of new groups: that of the group of all ranks, which DeepSpeed or the user chose,
    where it is longer than torch's own.
    """
    usual = c10d._get_default_timeout(dist.get_backend())
    try:
        world = c10d._get_default_group()._get_backend(device)
    except RuntimeError:  # a group that is registered under no type of device
        return usual
    chosen = getattr(getattr(world, "options", None), "_timeout", usual)
    return max(usual, chosen)


def open_host_group(device: torch.device) -> None:
    """Let agreements go by way of the hosts from now on, where the group of all ranks is one of
    accelerators; where a rank's host cannot connect they go by way of `device`, as before.
    Collective over all ranks.
    """
    global _hosts
    world, group = dist.group.WORLD, None
    # Kept by the group of all ranks: after another `init_process_group` it is made anew
    if device.type == "cpu" or _hosts[0] is world:
        return
    try:
        group = dist.new_group(backend="gloo", timeout=find_timeout(device))
        # Tried at once: later, a host that does not connect would be an error of an iteration
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        group = None
        logger.warning(
            "Gloo does not connect the hosts (%s): ranks agree by way of their devices, which then wait for the host "
            "in every iteration; name the network's interface in GLOO_SOCKET_IFNAME",
            str(error)[:300],
        )
    # By way of the device: `_hosts` is not set yet, and some hosts may have no group
    _hosts = (None, None) if any(gather_flags(group is None, device)) else (world, group)


def meeting_place(device: torch.device) -> torch.device:
    """Device of the tensors by which ranks on `device` agree: the CPU, if their hosts have a
    group.
    """
    return torch.device("cpu") if _hosts[0] is dist.group.WORLD else device


def _group_of(tensor: Tensor) -> Any:
    """The group that carries `tensor` between all ranks; None for the default one."""
    on_hosts = tensor.device.type == "cpu" and _hosts[0] is dist.group.WORLD
    return _hosts[1] if on_hosts else None


def gather_rows(mine: Tensor) -> Tensor:
    """[num_ranks, n] out of every rank's [n], in rank order. Collective over all ranks."""
    rows = mine.new_empty(dist.get_world_size(), *mine.shape)
    _all_gather(rows.view(-1), mine.reshape(-1), group=_group_of(mine))
    return rows


def gather_by_hosts(mine: Tensor, device: torch.device) -> Tensor:
    """The same of a tensor of the host, on the host; by way of `device` where hosts have no
    group.
    """
    return gather_rows(to_device(mine, meeting_place(device))).cpu()


def gather_flags(mine: bool, device: torch.device) -> list[bool]:
    """The flag of each rank, on every rank: more than a sum, it says who speaks for all. Collective
    over all ranks.
    """
    return gather_by_hosts(torch.tensor([mine]).long(), device).flatten().bool().tolist()


def gather_ragged(
    mine: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> list[list[Tensor]]:
    """The 1-dim tensors of every rank, in rank order, on the CPU; each may bring another number of
    them, of any lengths. Collective over all ranks.
    """
    lengths = torch.tensor([len(tensor) for tensor in mine], dtype=torch.int64)
    of_ranks = _gather_padded(lengths, device)
    flat = torch.cat([torch.zeros(0, dtype=dtype), *(tensor.cpu().to(dtype) for tensor in mine)])
    values = _gather_padded(flat, device)
    return [list(row.split(counts.tolist())) for row, counts in zip(values, of_ranks, strict=True)]


def _gather_padded(mine: Tensor, device: torch.device) -> list[Tensor]:
    """Every rank's [n], n of its own, on the CPU."""
    sizes = gather_by_hosts(torch.tensor([len(mine)]), device).flatten().tolist()
    # Rows of one exchange have one size; at least one element, so that none is empty
    padded = torch.nn.functional.pad(mine, (0, max(1, *sizes) - len(mine)))
    rows = gather_by_hosts(padded, device)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def raise_together(error: Exception | None, device: torch.device) -> None:
    """Raise on all ranks if any rank brings an error. Collective over all ranks.

    A rank that brings one raises its own; the others raise that of the lowest failing rank, naming
    it.
    """
    raise_known(error, gather_flags(error is not None, device), device)


def raise_known(error: Exception | None, brings: Sequence[bool], device: torch.device) -> None:
    """The same where every rank knows already which ones bring an error. Collective over all ranks
    if any does.
    """
    if True not in brings:
        return
    source = brings.index(True)
    # Of the other ranks nothing is sent, so that their `error` may be None
    name, text = broadcast_text([type(error).__name__, str(error)], source, device)
    if error is None:
        error = restore_error(name, f"rank {source}: {text}")
    raise on_all_ranks(error, source)


def on_all_ranks(error: ErrorType, source: int = 0) -> ErrorType:
    """`error`, which all ranks raise at the same time, so that none has to be told of it, and rank
    `source` alone prints where all end with it.
    """
    setattr(error, _ON_ALL_RANKS, True)
    return said_by(source, error)


def is_raised_on_all(error: BaseException) -> bool:
    """Whether all ranks raise `error` at the same time: no rank waits for another one then."""
    return isinstance(error, RankLostError) or getattr(error, _ON_ALL_RANKS, False)


def said_by(rank: int, error: ErrorType) -> ErrorType:
    """`error`, which `rank` alone prints where all ranks end with it."""
    setattr(error, _SAID_BY, rank)
    return error


def rank_that_says(error: BaseException) -> int:
    """The rank that prints an error with which all ranks end; 0 where nothing is known."""
    return getattr(error, _SAID_BY, 0)


def run_together(action: Callable[[], Result], device: torch.device) -> Result:
    """Run `action`, which waits for no other rank, and return its result. An error is raised on all
    ranks. Collective over all ranks.
    """
    result, error = None, None
    try:
        result = action()
    except RankLostError:  # of which the others hear by themselves
        raise
    except Exception as caught:  # whatever it is, the other ranks wait for it
        error = caught
    raise_together(error, device)
    return result  # type: ignore[return-value]


def check_alike(values: Mapping[str, Any], device: torch.device, *, rel_tol: float = 0.0) -> None:
    """Raise PlanMismatchError, on all ranks, where one has others of these named `values`, which
    JSON holds, than rank 0; floats may differ by `rel_tol`. Collective over all ranks.
    """
    mine = json.dumps(values)
    (of_first,) = broadcast_text([mine], 0, device)

    def compare() -> None:
        first, own = json.loads(of_first), json.loads(mine)
        for name in sorted(first.keys() | own.keys()):
            both = own.get(name), first.get(name)
            # As text: NaN is equal to itself there, and 1 is not 1.0
            mine_is, first_is = map(json.dumps, both)
            is_close = (
                rel_tol > 0
                and all(isinstance(value, float) for value in both)
                and math.isclose(*both, rel_tol=rel_tol, abs_tol=1e-12 * rel_tol)
            )
            if mine_is != first_is and not is_close:
                raise PlanMismatchError(
                    f"{name} is {mine_is:.300}, and {first_is:.300} on rank 0; give every rank the same configuration"
                )

    run_together(compare, device)


def check_same_numbers(
    mine: Sequence[int], say: Callable[[list[int], list[int], int], str], device: torch.device
) -> None:
    """Raise PlanMismatchError, on all ranks, with what `say` makes of rank 0's numbers and those of
    the first rank that has others. Collective over all ranks, each with as many numbers.
    """
    of_ranks = gather_by_hosts(torch.tensor(mine, dtype=torch.int64), device).tolist()
    for rank, found in enumerate(of_ranks):
        # All ranks see all numbers, so all come to the same error without telling each other
        if found != of_ranks[0]:
            raise on_all_ranks(PlanMismatchError(say(of_ranks[0], found, rank)))


def restore_error(name: str, text: str) -> HydraError:
    """The error of ds_hydra of that name, or a HydraError that mentions it."""
    kind = getattr(errors, name, None)
    # Of ds_hydra's own alone: a name from another rank must not make any other object
    if isinstance(kind, type) and issubclass(kind, HydraError):
        return kind(text)
    return HydraError(f"{name}: {text}")


def broadcast_text(texts: list[str], source: int, device: torch.device) -> list[str]:
    """The texts of rank `source` on every rank. Collective over all ranks."""
    return json.loads(broadcast_bytes(json.dumps(texts).encode(), source, device))


def broadcast_bytes(payload: bytes, source: int, device: torch.device) -> bytes:
    """Broadcast the payload of rank `source`. Collective over all ranks: one broadcast, and a
    second one for the part beyond `ENVELOPE_BYTES`.
    """
    size = len(payload).to_bytes(_SIZE_BYTES, "little")
    first = _broadcast((size + payload)[:ENVELOPE_BYTES], ENVELOPE_BYTES, source, device)
    numel = int.from_bytes(first[:_SIZE_BYTES], "little")
    # The envelope has one size, so that receivers need not be told it before
    room = ENVELOPE_BYTES - _SIZE_BYTES
    rest = b""
    if numel > room:
        rest = _broadcast(payload[room:], numel - room, source, device)
    return (first[_SIZE_BYTES:] + rest)[:numel]


def _broadcast(payload: bytes, numel: int, source: int, device: torch.device) -> bytes:
    """`numel` bytes of rank `source` on every rank; shorter payloads are padded."""
    body = torch.zeros(numel, dtype=torch.uint8)
    if dist.get_rank() == source and payload:
        body[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    body = to_device(body, meeting_place(device))
    dist.broadcast(body, src=source, group=_group_of(body))
    return body.cpu().numpy().tobytes()


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest `value` of any rank. Collective over all ranks."""
    # In fp64, in which bytes are whole numbers up to 2^53.
    largest = torch.tensor(value, dtype=torch.float64, device=meeting_place(device))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_group_of(largest))
    return float(largest)


_COLLECTIVES = tuple(
    str(Path(dist.__file__).parent / name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
"""Calls that wait for a handle, or for a device that computes a collective's result."""

_COLLECTIVE_WORDS = (
    "gloo", "NCCL", "onnection", "Broken pipe", "imed out", "ProcessGroup",
)  # fmt: skip


def find_wait(thread_id: int) -> tuple[int, int] | None:
    """Place at which a thread waits in a collective, equal as long as it stays there. None where it
    does anything else, such as writing a file or talking to a debugger.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return None
    name = frame.f_code.co_filename
    is_wait = name in _COLLECTIVES or _WAITS.search(linecache.getline(name, frame.f_lineno))
    return (id(frame), frame.f_lasti) if is_wait else None


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """Whether an error comes from a collective; then it is worth waiting for the reason."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _COLLECTIVE_WORDS)


EXIT_CODE = 75
"""Exit status of a process that ends itself because it waits for a lost rank (EX_TEMPFAIL: a
restart may help).
"""


TICK_S = 0.5
VERDICT_WAIT_S = 10.0
"""Longest from a broken connection to the name of the lost rank, on a host with too much to do."""


@contextlib.contextmanager
def ends_after(seconds: float, start: int) -> Iterator[None]:
    """End the process, naming who is missing, where the block takes longer: a rank that stops
    before the first connection is seen by nobody.
    """

    def end() -> None:
        error = TimeoutError(f"no answer for {seconds:.0f} s")
        print(f"ds_hydra: {describe_missing(error, start)}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_missing(error: Exception, start: int) -> str:
    """Describe the ranks that no longer answer, when a collective before the first connection broke
    or does not end.
    """
    missing = {0}  # the store is in its process, unless the launcher keeps it, and as silent
    # In a thread: a store that is gone may hold a request longer than anybody should wait
    asking = threading.Thread(target=_find_missing, args=(missing, start), daemon=True)
    asking.start()
    asking.join(2 * VERDICT_WAIT_S)
    ranks = ", ".join(map(str, sorted(missing))) or "unknown"
    return (
        f"rank {ranks} is gone before the engine started ({str(error).strip()[:200]}); rank {dist.get_rank()} cannot "
        "go on without it. Restart"
    )


def _find_missing(missing: set[int], start: int) -> None:
    """Put into `missing` the ranks that do not answer in the store; not if it is lost, too."""
    key = f"ds_hydra/alive/{start}"
    silent = set(range(dist.get_world_size()))
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{dist.get_rank()}", "1")
        end = time.monotonic() + VERDICT_WAIT_S
        while silent and time.monotonic() < end:
            silent = {rank for rank in silent if not store.check([f"{key}/{rank}"])}
            time.sleep(TICK_S)
        # Only here, when the store has answered to the end
        missing.clear()
        missing |= silent
