"""What the links between ranks reach, beside what the hardware's description says."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ds_hydra.engine.doctor.findings import Finding, Status
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.ranks.hosts import Hosts
from ds_hydra.engine.transfer.link_thread import DeviceClock
from ds_hydra.strategy.cost_models.analytic import Hardware, find_shipped_hardware

CPU_NAME = "one CPU core"
_REPEATS = 5
_LEAST_SHARE = 0.5
"""Of the described rate: below it plans count on links that are not there."""
_DEVICE_BYTES, _HOST_BYTES = 64 << 20, 4 << 20
"""Of one message, on an accelerator and between CPU ranks."""


def find_hardware(name: str | None, device: torch.device, device_name: str) -> Hardware | None:
    """The hardware called `name` (shipped, or a file); without a name the shipped one that names
    the device, the CPU's for a CPU, else None.
    """
    if name is not None or device.type == "cpu":
        return Hardware.load(name or "cpu")
    document = find_shipped_hardware(device_name)
    return None if document is None else Hardware.from_json(document, source=device_name)


def check_links(
    device: torch.device, hosts: Hosts, hardware: Hardware | None, pairs: dist.ProcessGroup
) -> list[Finding]:
    """Rates of all-reduces of all ranks, and of messages between neighbours of a host and of two
    hosts. Collective over all ranks.

    `pairs` is a group of all ranks that nothing else uses.
    """
    clock = DeviceClock(device)
    world = dist.get_world_size()
    if world == 1:
        return [Finding(check="links", status=Status.SKIPPED, text="one rank has no links")]
    nbytes = _HOST_BYTES if device.type == "cpu" else _DEVICE_BYTES
    message = torch.ones(nbytes // 4, device=device)
    of_all = len(hosts.names) > 1
    seconds = _median_s(clock, lambda: dist.all_reduce(message, group=pairs))
    rate = 2 * (world - 1) / world * nbytes / seconds
    findings = [_judge("all-reduce", rate, hardware, across=of_all)]
    inside, across = neighbours(hosts.of_rank)
    for name, chosen in (("links inside a host", inside), ("links between hosts", across)):
        if chosen:
            rates = _message_rates(clock, chosen, message, pairs, device)
            rate, slowest = min(zip(rates, chosen))
            is_across = name.endswith("hosts")
            findings.append(_judge(name, rate, hardware, across=is_across, slowest=slowest))
    return findings


def neighbours(host_of: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of ranks that talk at once: rank 2i and 2i + 1 of a host; and the first rank of each
    host with that of the next, for every second host.

    >>> neighbours([0, 0, 0, 1, 1, 1])
    ([(0, 1), (3, 4)], [(0, 3)])
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks_of.setdefault(host, []).append(rank)
    inside = [pair for ranks in ranks_of.values() for pair in zip(ranks[::2], ranks[1::2])]
    firsts = [ranks[0] for ranks in ranks_of.values()]
    return inside, list(zip(firsts[::2], firsts[1::2]))


def _median_s(clock: DeviceClock, run: Callable[[], object]) -> float:
    """Seconds of `run`, which all ranks enter together; of the slowest rank."""
    times = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        begin = clock.stamp()
        run()
        end = clock.stamp()
        clock.settle(end)
        times.append(clock.ms_between(begin, end) / 1e3)
    return max(statistics.median(times[1:]), 1e-9)


def _message_rates(
    clock: DeviceClock,
    pairs: Sequence[tuple[int, int]],
    message: torch.Tensor,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[float]:
    """Bytes per second of every pair, all at once, each in one direction."""
    rank = dist.get_rank()
    mine = next((pair for pair in pairs if rank in pair), None)

    def exchange() -> None:
        if mine is None:
            return
        post = dist.isend if rank == mine[0] else dist.irecv
        peer = mine[1] if rank == mine[0] else mine[0]
        for work in dist.batch_isend_irecv([dist.P2POp(post, message, peer, group)]):
            work.wait()

    seconds = _median_s(clock, exchange)
    rows = gather_rows(torch.tensor([seconds], dtype=torch.float64, device=device)).flatten()
    nbytes = message.numel() * message.itemsize
    return [nbytes / max(float(rows[a]), float(rows[b])) for a, b in pairs]


def _judge(
    check: str,
    rate: float,
    hardware: Hardware | None,
    *,
    across: bool,
    slowest: tuple[int, int] | None = None,
) -> Finding:
    where = "" if slowest is None else f", slowest from rank {slowest[0]} to {slowest[1]}"
    text = f"{rate / 1e9:.2f} GB/s{where}"
    figures: dict[str, object] = {"bytes_per_s": rate, "pair": slowest}
    if hardware is None:
        return Finding.of_unknown_hardware(check, text, figures)
    wanted = hardware.inter_node_rate if across else hardware.intra_node_rate
    if across and check != "all-reduce":
        wanted /= hardware.devices_per_node  # a node's links, shared by its devices
    text += f", {hardware.name} is described with {wanted / 1e9:.2f}"
    figures |= {"described_bytes_per_s": wanted, "hardware": hardware.name}
    if hardware.name == CPU_NAME:
        advice = "other processes share the cores and the memory of CPU ranks"
    elif across:
        advice = "NCCL_DEBUG=INFO shows the transport: check NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GPUDirect RDMA"
    else:
        advice = "nvidia-smi topo -m; NCCL_P2P_DISABLE must be unset, and ACS off in the BIOS of PCIe machines"
    return Finding.judge(
        check,
        text,
        is_well=rate >= _LEAST_SHARE * wanted,
        advice=f"{advice}; or describe this machine in a hardware file, so that plans count on what is there",
        figures=figures,
    )
