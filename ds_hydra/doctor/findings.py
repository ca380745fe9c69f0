"""Findings of an examination, as values. Those about a rank's own machine (versions, kernels,
limits of the system) wait for no other rank. Then come measurements of all ranks beside what would
be expected: links between them, and the speed of each.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_hydra.engine.model.attention_choice import Choice, choose, has_kernels
from ds_hydra.engine.model.attention_contract import Demand
from ds_hydra.engine.parallel.groups import (
    BLOCKS,
    MAX_MULTICAST_OBJECTS,
    GroupPool,
    describe_groups,
    describe_multicast,
)
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.ranks.hosts import Hosts
from ds_hydra.engine.ranks.memory import available_bytes
from ds_hydra.engine.telemetry.trace import DeviceClock
from ds_hydra.environment import WANTED
from ds_hydra.strategy.cost_models.analytic import Hardware, find_shipped_hardware
from ds_hydra.strategy.schemes.placement import (
    GroupKey,
    communicators,
    most_multicast_objects,
)

REPORT_SCHEMA = "ds_hydra.doctor/1"


class Status(str, Enum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report, with `advice` where it is not well."""

    check: str
    status: Status
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def judge(
        cls,
        check: str,
        text: str,
        *,
        is_well: bool,
        advice: str,
        figures: Mapping[str, Any],
        otherwise: Status = Status.WARNING,
    ) -> Finding:
        """A check that ends well, or as `otherwise` says and with its advice."""
        status, advice = (Status.OK, "") if is_well else (otherwise, advice)
        return cls(check=check, status=status, text=text, advice=advice, figures=figures)

    def to_json(self) -> dict[str, Any]:
        """The finding as in `ds_hydra.doctor/1`."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of an examination, in the order of its checks."""

    findings: Sequence[Finding]
    seconds: float

    @property
    def has_problem(self) -> bool:
        """Whether training would fail, hang or be wrong here."""
        return any(finding.status is Status.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.doctor/1` document."""
        return {
            "schema": REPORT_SCHEMA,
            "is_well": not self.has_problem,
            "seconds": round(self.seconds, 1),
            "findings": [finding.to_json() for finding in self.findings],
        }


_PACKAGES = (
    "ds_hydra", "torch", "deepspeed", "transformers", "datasets", "accelerate", "numpy", "numba",
    "flash-attn",
)  # fmt: skip
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_LEAST_SHARED_BYTES = 1 << 30
"""NCCL takes some 10 MB of a host's shared memory for each rank and communicator, workers of a data
loader more; containers have 64 MiB if nobody asks for more."""
_LEAST_FILES = 4096
"""Descriptors: a gloo group takes 7 of each rank."""

_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Head widths of queries and of values, as models have them."""


def describe_environment() -> dict[str, Any]:
    """Versions and settings of this rank, equal on all ranks where all is well."""
    versions = {name: _version(name) for name in _PACKAGES}
    accelerator = get_accelerator()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
        "accelerator": str(accelerator.device_name()),
    }
    if torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    names = [*WANTED, "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"]
    names += [name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]
    found["environment"] = {
        name: os.environ[name] for name in sorted(set(names)) if name in os.environ
    }
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compare_environments(environments: Sequence[Mapping[str, Any]]) -> Finding:
    """Versions of all ranks, which must be the same."""
    first = environments[0]
    differing = {
        name: sorted({str(environment.get(name)) for environment in environments})
        for name in sorted(set().union(*environments))
        if len({str(environment.get(name)) for environment in environments}) > 1
    }
    shown = [name for name in (*_PACKAGES, "cuda", "nccl", "device") if name in first]
    text = ", ".join(f"{name} {first[name]}" for name in shown)
    differences = "; ".join(f"{name}: {' and '.join(v)}" for name, v in differing.items())
    return Finding.judge(
        "versions",
        f"ranks differ: {differences}" if differing else text,
        is_well=not differing,
        otherwise=Status.WARNING if set(differing) == {"environment"} else Status.PROBLEM,
        advice="install the same packages, and export the same variables, on every host",
        figures={"rank_0": dict(first), "differing": differing},
    )


def check_attention(device: torch.device) -> Finding:
    """Report the attention that runs here, and try it on packed micro-batches."""
    if not has_kernels(device):
        return Finding(
            check="attention",
            status=Status.OK,
            text=f"torch's scaled_dot_product_attention, one call for each sequence, on {device.type}",
        )
    choices: dict[str, Choice] = {}
    for widths in _WIDTHS:
        shape = "/".join(map(str, dict.fromkeys(widths)))
        choice = choose(Demand(*widths, torch.bfloat16), device)
        choices[shape] = choice
        if choice.kernel is None:
            return Finding(
                check="attention",
                status=Status.WARNING,
                text=f"no kernel for heads of {shape}, which run one call for each sequence: {choice.reasons()}",
                advice="pip install flash-attn, or torch 2.11 or later",
            )
    errors = {shape: choice.error or 0.0 for shape, choice in choices.items()}
    names = {shape: choice.name for shape, choice in choices.items()}
    # Why faster ones do not run: of those that fail, where there are any
    told = max(choices.values(), key=lambda choice: len(choice.failed))
    softcap = choose(Demand(*_WIDTHS[0], torch.bfloat16, True)).kernel is not None
    worst = max(errors, key=errors.__getitem__)
    kernels = " and ".join(dict.fromkeys(names.values()))
    text = f"{kernels}, off by {errors[worst]:.1e} (bf16, heads of {worst})"
    text += ("" if softcap else "; softcap needs flash-attn") + (
        f"; {told.reasons()}" if told.passed_over else ""
    )
    failed = dict.fromkeys(name for choice in choices.values() for name in choice.failed)
    return Finding.judge(
        "attention",
        text,
        is_well=not failed,
        advice=f"reinstall {' and '.join(failed)} for this version of torch and CUDA, or leave it",
        figures={"kernel": names, "relative_errors": errors, "softcap": softcap},
    )


def check_system(num_ranks_here: int) -> list[Finding]:
    """Limits of this host that stop a run: shared memory, open files, memory, CPU cores."""
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores, free = len(os.sched_getaffinity(0)), available_bytes()
    is_device = get_accelerator().device_name() != "cpu"
    return [
        Finding.judge(
            "shared memory",
            f"{shared / 2**30:.1f} GiB free in {_SHARED_MEMORY}",
            is_well=shared >= _LEAST_SHARED_BYTES,
            advice="start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)",
            figures={"free_bytes": shared},
        ),
        Finding.judge(
            "open files",
            f"{soft:,} open files allowed",
            is_well=soft >= _LEAST_FILES,
            advice=f"ulimit -n {min(hard, 65536) if hard > 0 else 65536} before the launcher",
            figures={"soft": soft, "hard": hard},
        ),
        Finding.judge(
            "host",
            f"{cores} cores and {free / 2**30:.0f} GiB of memory free for {num_ranks_here} ranks",
            is_well=cores >= num_ranks_here * (2 if is_device else 1),
            advice="give every rank a core, and a second one on an accelerator for its exchanges; times below are too "
            "long",
            figures={"cores": cores, "free_bytes": free, "ranks": num_ranks_here},
        ),
    ]


CPU_NAME = "one CPU core"
_LINK_REPEATS = 5
_LEAST_SHARE = 0.5
"""Least share of the described rate. Below it plans count on links that are not there."""
_MUCH_FASTER = 1.2
"""All-to-alls by other thread blocks over those by as many as pulls take, from which it is said."""
_DEVICE_BYTES, _HOST_BYTES = 64 << 20, 4 << 20
"""Bytes of one message, on an accelerator and between CPU ranks."""


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
    """Rates of all-reduces of all ranks, and of messages between neighbours of a host and between
    all ranks of two hosts. Collective over all ranks.

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
            found = _judge(name, rate, hardware, across=is_across, slowest=slowest)
            if is_across:  # the row of a hardware file for what was measured, all pairs at once
                per_pair = len(hosts.names) // 2
                row = {"inter_node_bytes_per_s": round(sum(rates) / per_pair)}
                found = replace(
                    found,
                    text=f"{found.text}; a hardware file of this machine has {json.dumps(row)[1:-1]}",
                    figures={**found.figures, **row},
                )
            findings.append(found)
    return findings


def check_all_to_all(
    device: torch.device, hosts: Hosts, hardware: Hardware | None, groups: GroupPool
) -> Finding:
    """Rate of all-to-alls of all ranks as pulls make them, by the thread blocks that NCCL may take
    for them. Collective over all ranks.
    """
    clock, world = DeviceClock(device), dist.get_world_size()
    if world == 1:
        return Finding(check="all-to-all", status=Status.SKIPPED, text="one rank has no links")
    nbytes = _HOST_BYTES if device.type == "cpu" else _DEVICE_BYTES
    sent = torch.ones(nbytes // 4 // world * world, device=device)
    received = torch.empty_like(sent)
    # Without NCCL one is like the other
    tried = BLOCKS if device.type == "cuda" else {"pull by 8 blocks": 8}
    rates = {}
    for purpose, blocks in tried.items():
        groups.create([(purpose, range(world))])
        group = groups.get(purpose, range(world))
        run = functools.partial(dist.all_to_all_single, received, sent, group=group)
        rates[blocks] = (world - 1) / world * nbytes / _median_s(clock, run)
    finding = _judge("all-to-all", rates[8], hardware, across=len(hosts.names) > 1)
    best = max(rates, key=rates.__getitem__)
    by_blocks = ", ".join(f"{rate / 1e9:.0f} by {blocks}" for blocks, rate in rates.items())
    is_well = rates[best] < _MUCH_FASTER * rates[8]
    advice = f"NCCL_MAX_CTAS={best} in the environment of all ranks lets pull and push take {best} thread blocks"
    return replace(
        finding,
        status=finding.status if is_well else Status.WARNING,
        text=f"{finding.text}; GB/s by thread blocks: {by_blocks}"
        if len(rates) > 1
        else finding.text,
        advice=finding.advice if is_well else advice,
        figures={**finding.figures, "bytes_per_s_by_blocks": rates},
    )


def check_communicators(
    keys: Iterable[GroupKey], ranks_per_node: int, device: torch.device
) -> Finding:
    """Count the communicators that strategies need, beside what the switches of a node have."""
    objects, is_nccl = most_multicast_objects(keys, ranks_per_node), device.type == "cuda"
    is_asked = is_nccl and os.environ.get("NCCL_NVLS_ENABLE") != "0"
    text = describe_groups(keys, 0, is_nccl)
    return Finding.judge(
        "communicators",
        f"{text}; up to {objects} NVLink multicast objects on a node" if is_asked else text,
        is_well=not is_asked or objects <= MAX_MULTICAST_OBJECTS,
        advice=describe_multicast(objects),
        figures={"multicast_objects": objects, "communicators": len(communicators(keys))},
    )


def neighbours(host_of: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of ranks that talk at once: rank 2i and 2i + 1 of a host; and each rank of a host with
    that of the next in its place, for every second host.

    >>> neighbours([0, 0, 0, 1, 1, 1])
    ([(0, 1), (3, 4)], [(0, 3), (1, 4), (2, 5)])
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        ranks_of.setdefault(host, []).append(rank)
    inside = [pair for ranks in ranks_of.values() for pair in zip(ranks[::2], ranks[1::2])]
    hosts = [*ranks_of.values()]
    return inside, [pair for two in zip(hosts[::2], hosts[1::2]) for pair in zip(*two)]


def _median_s(clock: DeviceClock, run: Callable[[], object]) -> float:
    """Seconds of `run`, which all ranks enter together; of the slowest rank."""
    times = []
    for _ in range(1 + _LINK_REPEATS):
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
        return Finding(
            check=check,
            status=Status.SKIPPED,
            text=f"{text}; nothing to compare with",
            advice="--hardware NAME (a shipped hardware description, or a file of your own)",
            figures=figures,
        )
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


_MOST_BEHIND = 1.3
"""Slowest rank over the median one: all others wait for it in every iteration."""
_REPEATS = 3


def check_speed_of_ranks(device: torch.device) -> Finding:
    """Find the slowest rank. Collective over all ranks."""
    clock = DeviceClock(device)
    size = 4096 if device.type == "cuda" else 256
    matrix = torch.ones(size, size, device=device)
    times = []
    for _ in range(2 + 5 * _REPEATS):
        begin = clock.stamp()
        for _ in range(4):
            matrix @ matrix
        end = clock.stamp()
        clock.settle(end)
        times.append(clock.ms_between(begin, end))
    mine = torch.tensor([statistics.median(times[2:])], dtype=torch.float64, device=device)
    all_ms = gather_rows(mine).flatten().tolist()
    slowest = max(range(len(all_ms)), key=all_ms.__getitem__)
    ratio = all_ms[slowest] / statistics.median(all_ms)
    return Finding.judge(
        "speed of ranks",
        f"slowest is rank {slowest}, {ratio:.2f} x the median",
        is_well=ratio <= _MOST_BEHIND,
        advice="look at clocks, temperature and other processes of that device; a second run tells noise from damage",
        figures={"matmul_ms": all_ms},
    )
