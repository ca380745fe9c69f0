"""Whether ranks that share a GPU can talk at all, by everything that ds_hydra calls; ms of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.one_gpu.device import HAS_GPU, join
from benchmarks.one_gpu.telling import tell, trying
from ds_hydra.engine.parallel.groups import GroupPool

NUMEL = 1 << 20


class Probe:
    """Two groups of all ranks, and what is sent in them."""

    def __init__(self, device: torch.device):
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), device
        pool = GroupPool(4, device)
        ranks = tuple(range(self.world))
        pool.create([("one", ranks), ("two", ranks)])
        self.one, self.two = pool.get("one", ranks), pool.get("two", ranks)
        self.x = torch.full((NUMEL,), float(self.rank + 1), device=device)
        self.sum = self.world * (self.world + 1) / 2

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, device=self.device)

    def all_reduce(self) -> bool:
        y = self.x.clone()
        dist.all_reduce(y, group=self.one)
        return bool((y == self.sum).all())

    def all_gather(self) -> bool:
        y = self.empty(self.world * NUMEL)
        dist.all_gather_into_tensor(y, self.x, group=self.one)
        return all(bool((part == r + 1).all()) for r, part in enumerate(y.view(self.world, -1)))

    def reduce_scatter(self) -> bool:
        part = NUMEL // self.world
        y = self.empty(part)
        dist.reduce_scatter_tensor(y, self.x[: part * self.world].contiguous(), group=self.one)
        return bool((y == self.sum).all())

    def uneven_all_to_all(self) -> bool:
        peers = range(self.world)
        sizes = [(self.rank + 1) * (p + 1) * 1000 * (p != self.rank) for p in peers]
        sent, y = self.x[:1].repeat(sum(sizes)), self.empty(sum(sizes))
        work = dist.all_to_all_single(y, sent, sizes, sizes, group=self.two, async_op=True)
        work.wait()
        return all(
            bool((part == p + 1).all()) for p, part in zip(peers, y.split(sizes), strict=True)
        )

    def messages(self) -> bool:
        y, before, after = (
            self.empty(NUMEL),
            (self.rank - 1) % self.world,
            (self.rank + 1) % self.world,
        )
        ops = [
            dist.P2POp(dist.isend, self.x, after, self.two),
            dist.P2POp(dist.irecv, y, before, self.two),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return bool((y == before + 1).all())

    def other_orders(self) -> bool:
        """Two communicators, two streams, orders that differ between ranks."""
        y, z = self.x.clone(), self.x.clone()
        side = torch.cuda.stream(torch.cuda.Stream()) if HAS_GPU else contextlib.nullcontext()
        if HAS_GPU:
            torch.cuda.synchronize()
        with side:
            first, second = ((y, self.one), (z, self.two))[:: 1 if self.rank else -1]
            works = [dist.all_reduce(t, group=group, async_op=True) for t, group in (first, second)]
        for work in works:
            work.wait()
        return bool((y == self.sum).all() and (z == self.sum).all())

    def settle(self) -> None:
        if HAS_GPU:
            torch.cuda.synchronize()
        dist.barrier()


def main() -> None:
    probe = Probe(join())
    if HAS_GPU:
        tell("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    runs: dict[str, Callable[[], bool]] = {
        "all-reduce": probe.all_reduce,
        "all-gather": probe.all_gather,
        "reduce-scatter": probe.reduce_scatter,
        "uneven all-to-all": probe.uneven_all_to_all,
        "messages both ways": probe.messages,
        "two communicators in other orders": probe.other_orders,
    }
    for name, run in runs.items():
        is_right = run()
        probe.settle()
        begin = time.perf_counter()
        is_right &= run()
        probe.settle()
        ms = (time.perf_counter() - begin) * 1e3
        words = "" if is_right else "wrong numbers, "
        tell(f"{name}, 4 MB", f"{words}{ms:.1f} ms", wanted="right numbers", is_well=is_right)
    compare_groups(probe)
    dist.barrier()


def compare_groups(probe: Probe) -> None:
    """Neighbours in twos, or the one pair: a group for each, with a first collective in each."""
    pairs = [(r, r + 1) for r in range(0, probe.world - 1, 2)]
    with trying(case := f"{len(pairs)} groups of 2"):
        probe.settle()
        free, begin = _free_mib(), time.perf_counter()
        pool = GroupPool(len(pairs), probe.device)
        pool.create([("pair", range(first, last + 1)) for first, last in pairs])
        probe.settle()
        ms = (time.perf_counter() - begin) * 1e3
        tell(case, {"ms": ms, "MiB, all ranks": free - _free_mib()})


def _free_mib() -> float:
    """Of the device that all ranks share."""
    return torch.cuda.mem_get_info()[0] / 2**20 if HAS_GPU else 0.0


if __name__ == "__main__":
    main()
