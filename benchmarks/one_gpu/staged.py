"""Collectives of ranks that share a GPU where NCCL cannot: gloo's, on copies in the host's memory.

Posting waits for the tensors that are read, `wait` for the other ranks: no race and no overlap
shows here, only what is computed.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"


class _Work(dist._Work):
    def __init__(self, inner: Any, hosts: Sequence[Tensor], writes: Sequence[Tensor]):
        super().__init__()
        self._inner, self._pairs = inner, list(zip(writes, hosts, strict=True))

    def wait(self, timeout: Any = None) -> bool:
        if self._inner is not None:
            self._inner.wait()
            for tensor, host in self._pairs:
                tensor.copy_(host)
        self._inner, self._pairs = None, []
        return True

    def is_completed(self) -> bool:
        return self._inner is None

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([])
        return future


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class StagedGroup(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        """As torch knows it when the group is destroyed."""
        return self._group_name

    def _done(
        self, inner: Any, hosts: Sequence[Tensor], writes: Sequence[Tensor], opts: Any
    ) -> _Work:
        work = _Work(inner, hosts, writes)
        if opts is not None and not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        hosts = [_host(tensor) for tensor in tensors]
        return self._done(self._gloo.allreduce(hosts, opts), hosts, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> _Work:
        hosts = [_host(tensor) for tensor in tensors]
        return self._done(self._gloo.broadcast(hosts, opts), hosts, tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> _Work:
        hosts = [_host(tensor) for tensor in tensors]
        return self._done(self._gloo.reduce(hosts, opts), hosts, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        hosts = [[_host(tensor) for tensor in output] for output in outputs]
        inner = self._gloo.allgather(hosts, [_host(tensor) for tensor in inputs])
        flat, writes = itertools.chain(*hosts), list(itertools.chain(*outputs))
        return self._done(inner, list(flat), writes, opts)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        host = _host(output)
        return self._done(self._gloo._allgather_base(host, _host(tensor)), [host], [output], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        works = [self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        host = _host(tensor)
        parts = torch.empty_like(host)
        self._gloo.alltoall_base(parts, host, [], []).wait()
        output.copy_(parts.view(self.size(), -1).sum(0).view_as(output))
        return _Work(None, [], [])

    def alltoall_base(
        self, output: Any, tensor: Any, into: Any, out: Any, opts: Any = None
    ) -> _Work:
        host = _host(output)
        inner = self._gloo.alltoall_base(host, _host(tensor), into, out)
        return self._done(inner, [host], [output], opts)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Any, to: int, tag: int = 0) -> _Work:
        return _Work(self._gloo.send([_host(tensor) for tensor in tensors], to, tag), [], [])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> _Work:
        hosts = [_host(tensor) for tensor in tensors]
        return _Work(self._gloo.recv(hosts, source, tag), hosts, tensors)

    def barrier(self, opts: Any = None) -> _Work:
        self._gloo.barrier().wait()
        return _Work(None, [], [])


def init_staged(limit: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
    """Join the ranks that a launcher has started, before DeepSpeed would."""
    dist.Backend.register_backend(
        NAME,
        lambda store, rank, size, timeout: StagedGroup(store, rank, size, timeout),
        devices=["cuda", "cpu"],
    )
    dist.init_process_group(NAME, timeout=limit)
