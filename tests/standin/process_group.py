"""Collectives of the stand-in: gloo's on the same memory, ordered on a stream of each communicator.

`Work.wait` lets the current stream go on after the collective, as NCCL's; what it brings must be
there, so it blocks the host, too. A communicator's collectives and messages run one after another,
in a thread of its own; a batch of several messages is one. What NCCL refuses is refused: tensors of
the CPU, and tensors that are not contiguous.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from standin.streams import Event, Stream, current_stream, observer, where

sizes: list[int] = []
"""Size of each communicator that this rank has made."""

checks_order = False
"""While true, ranks compare what they call as they call it: collectives of a communicator in one
order on all ranks, messages of a pair in the order in which they were posted. Switch it on all
ranks at the same point.
"""

occupies_device = False
"""While true, a synchronise of the device waits for all that was posted, as NCCL's kernels make it:
they run until the other ranks have joined.
"""

HANG_S = 120
"""Limit of one wait in a synchronise, as of a collective."""

hangs: list[str] = []
"""Where one ran into that limit: an allocation cannot raise."""

lone_messages: list[str] = []
"""Where messages were sent or received outside a batch: NCCL makes a communicator for each pair of
ranks then.
"""

waited_for: collections.Counter[str] = collections.Counter()
"""Names of what was under way where the device was synchronised."""

_under_way: set[_Work] = set()


_launching = threading.RLock()
"""Held by a synchronise of a device that is occupied: launches of other threads wait with it, as
where CUDA loads a kernel.
"""


def drain() -> None:
    """A synchronise of the device: what was posted has ended."""
    if not occupies_device:
        return
    with _launching:
        works = set(_under_way)
        waited_for.update(work.name for work in works)
        for work in works:
            work.finish(HANG_S)


class _Work(dist._Work):
    """A collective under way: `host` is its host part, `event` its device part."""

    def __init__(self, name: str, host: Future[None], stream: Stream, tensors: Sequence[Tensor]):
        super().__init__()
        self.name = name
        self._tensors: Sequence[Tensor] | None = tensors
        self.event = Event()
        self.event.record(stream)
        self._host = host
        _under_way.add(self)
        host.add_done_callback(lambda _: _under_way.discard(self))

    def finish(self, limit_s: float | None = None) -> None:
        """The collective has ended on the device; where that cannot be known, wait for it."""
        try:
            self._host.result(limit_s)
        except TimeoutError:
            hangs.append(f"{self.name} has not ended after {limit_s} s, at {where()}")
            raise TimeoutError(hangs[-1]) from None

    def wait(self, timeout: Any = None) -> bool:
        self.finish()
        current_stream().wait_event(self.event)
        self._tensors = None  # NCCL lets go of them here
        return True

    def is_completed(self) -> bool:
        if self._host.done() and self.event.clock is not None:
            observer.settle(self.event.clock)
        return self._host.done()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([])
        return future


def _run_to_its_end(run: Callable[[], Any]) -> None:
    work = run()
    if work is not None:
        work.wait()


class StandInGroup(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, as_host: Any, name: str):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._stream = Stream()
        self._queue, self._batch = ThreadPoolExecutor(1), ThreadPoolExecutor(size)
        self._as_host = as_host
        self._backend_name = name
        self._store = store
        self._counts: collections.Counter[str] = collections.Counter()
        sizes.append(size)

    def getBackendName(self) -> str:
        return self._backend_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        """As torch knows it when the group is destroyed."""
        return self._group_name

    def _run(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], Any],
        opts: Any = None,
        queue: ThreadPoolExecutor | None = None,
    ) -> _Work:
        for tensor in (*reads, *writes):
            if tensor.device.type != self._backend_name:
                raise RuntimeError(f"{name}: no backend for a tensor on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: tensors must be contiguous")
        if name not in ("send", "recv"):
            # Messages of other sizes than those that are expected fail in gloo.
            shapes = [tuple(tensor.shape) for tensor in writes] if name != "all_to_all" else ""
            self._agree("collective", f"{name} {shapes}")
        is_async = opts is None or getattr(opts, "asyncOp", True)
        stream = self._stream if is_async else current_stream()
        if is_async:
            stream.wait_stream(current_stream())
        if observer.is_on:
            accesses = [
                (
                    tensor.untyped_storage().data_ptr(),
                    tensor.storage_offset() * tensor.element_size(),
                    (tensor.storage_offset() + tensor.numel()) * tensor.element_size(),
                    is_written,
                )
                for tensors, is_written in ((reads, False), (writes, True))
                for tensor in tensors
                if tensor.numel()
            ]
            observer.kernel(name, accesses, stream.id)
        with _launching if occupies_device else contextlib.nullcontext():
            host = (queue or self._queue).submit(_run_to_its_end, run)
            work = _Work(name, host, stream, (*reads, *writes))
        if not is_async:
            work.wait()
        return work

    def _agree(self, order: str, call: str) -> None:
        """Raise where another rank does something else at this place of `order`."""
        self._counts[order] += 1
        if not checks_order:
            return
        key = f"order/{order}/{self._counts[order]}"
        first = self._store.compare_set(key, "", call).decode()
        if first != call:
            raise RuntimeError(
                f"rank {self.rank()}: {order} {self._counts[order]} is {call!r}, on another rank {first!r}"
            )

    def _agree_on_message(
        self, source: int, to: int, tensors: Sequence[Tensor]
    ) -> ThreadPoolExecutor:
        """Where the message runs: beside the others of a batch."""
        sizes = [tensor.numel() for tensor in tensors]
        self._agree(f"message from {source} to {to}", f"{sizes} elements")
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "batch_isend_irecv":
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            lone_messages.append(where())
        is_one_of_several = frame is not None and len(frame.f_locals["p2p_op_list"]) > 1
        return self._batch if is_one_of_several else self._queue

    def _hosts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._as_host(tensor) for tensor in tensors]

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        hosts = self._hosts(tensors)
        run = lambda: self._gloo.allreduce(hosts, opts)  # noqa: E731
        return self._run("all_reduce", tensors, tensors, run, opts)

    def broadcast(self, tensors: Any, opts: Any) -> _Work:
        hosts = self._hosts(tensors)
        run = lambda: self._gloo.broadcast(hosts, opts)  # noqa: E731
        return self._run("broadcast", tensors, tensors, run, opts)

    def reduce(self, tensors: Any, opts: Any) -> _Work:
        hosts = self._hosts(tensors)
        return self._run("reduce", tensors, tensors, lambda: self._gloo.reduce(hosts, opts), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        out_hosts, in_hosts = [self._hosts(output) for output in outputs], self._hosts(inputs)
        run = lambda: self._gloo.allgather(out_hosts, in_hosts)  # noqa: E731
        return self._run("all_gather", inputs, list(itertools.chain(*outputs)), run, opts)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        hosts = self._hosts([output, tensor])
        run = lambda: self._gloo._allgather_base(*hosts)  # noqa: E731
        return self._run("all_gather", [tensor], [output], run, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        works = [self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        out_host, host = self._hosts([output, tensor])

        def run() -> None:
            parts = torch.empty_like(host)
            self._gloo.alltoall_base(parts, host, [], []).wait()
            out_host.copy_(parts.view(self.size(), -1).sum(0).view_as(out_host))

        return self._run("reduce_scatter", [tensor], [output], run, opts)

    def alltoall_base(
        self, output: Any, tensor: Any, into: Any, out: Any, opts: Any = None
    ) -> _Work:
        hosts = self._hosts([output, tensor])
        run = lambda: self._gloo.alltoall_base(*hosts, into, out)  # noqa: E731
        return self._run("all_to_all", [tensor], [output], run, opts)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Any, to: int, tag: int = 0) -> _Work:
        hosts = self._hosts(tensors)
        queue = self._agree_on_message(self.rank(), to, tensors)
        run = lambda: self._gloo.send(hosts, to, tag)  # noqa: E731
        return self._run("send", tensors, [], run, queue=queue)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> _Work:
        hosts = self._hosts(tensors)
        queue = self._agree_on_message(source, self.rank(), tensors)
        run = lambda: self._gloo.recv(hosts, source, tag)  # noqa: E731
        return self._run("recv", [], tensors, run, queue=queue)

    def barrier(self, opts: Any = None) -> _Work:
        observer.wait("barrier")
        host = self._queue.submit(_run_to_its_end, self._gloo.barrier)
        work = _Work("barrier", host, current_stream(), ())
        work.wait()
        return work


def register(name: str, as_host: Callable[[Tensor], Tensor]) -> None:
    """The process group as backend `name` of torch.distributed."""
    dist.Backend.register_backend(
        name,
        lambda store, rank, size, timeout: StandInGroup(store, rank, size, timeout, as_host, name),
        devices=[name],
    )
