"""What `ds-hydra doctor` does on every rank: join, look, measure, try; one report on rank 0."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from ds_hydra.configs.files import read_json_object
from ds_hydra.engine.doctor import findings, probe_measurements, small_model
from ds_hydra.engine.doctor.findings import Finding, Report, Status
from ds_hydra.engine.doctor.vigil import Vigil
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.profiling.profile_run import join_ranks, use_device
from ds_hydra.engine.ranks.agreement import broadcast_text
from ds_hydra.engine.ranks.hosts import Hosts, find_hosts
from ds_hydra.engine.ranks.process import can_overlap, leave_out_shared_memory
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.analytic import Hardware

_COMPILE_S = 900.0
"""Far more than the planner takes to compile on cores that do other things too."""
_LEAST_STRESS_S, _STRESS_SHARE = 2.0, 0.5
"""Iterations that look for hangs take this share of the time that is left."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`device`: name or file of a hardware description. `config`: the DeepSpeed JSON that will
    train. `seconds`: for all checks. `limit_s`: a step that takes longer hangs.
    """

    device: str | None = None
    config: Path | None = None
    seconds: float = 180.0
    limit_s: float = 60.0


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """While open, ds_hydra logs errors alone."""
    logger = logging.getLogger("ds_hydra")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_all_ranks(document: Any, device: torch.device) -> list[Any]:
    """What each rank brings, in rank order. Collective over all ranks."""
    texts = [json.dumps(document)]
    ranks = range(dist.get_world_size())
    return [json.loads(broadcast_text(texts, rank, device)[0]) for rank in ranks]


@dataclass(slots=True)
class Examination:
    """The checks of this rank, and what they found. Collective over all ranks.

    `on_hang(report)` is called on rank 0 where a rank hangs or fails, with what was found so far,
    on the other ranks with None; the process should end in it.
    """

    request: Request
    on_hang: Callable[[Report | None], None]
    findings: list[Finding] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    _ds_config: dict[str, Any] = field(default_factory=dict)

    @_errors_alone()
    def run(self) -> Report:
        """The report, equal on all ranks up to what each sees of its own host. Raises
        HydraConfigError for a request that is none, before any rank waits.
        """
        transformers.logging.set_verbosity_error()
        leave_out_shared_memory()
        if self.request.config is not None:
            self._ds_config = read_json_object(self.request.config)
        use_device()  # first: what asks the device for anything starts it
        accelerator = get_accelerator()
        name = str(accelerator.device_name())
        if name == "cuda":
            name = torch.cuda.get_device_name()
        hardware = probe_measurements.find_hardware(
            self.request.device, torch.device(accelerator.device_name()), name
        )
        limit_s = 2 * self.request.limit_s + 30 + _COMPILE_S
        device = join_ranks(timeout=datetime.timedelta(seconds=limit_s))
        self._compile_planner(is_first=os.environ.get("LOCAL_RANK", "0") == "0")
        vigil = Vigil(
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_world_size(),
            limit_s=self.request.limit_s,
            on_end=self._end,
        )
        try:
            self._examine(vigil, device, hardware)
        except Exception as error:  # whatever it is, other ranks wait for this one
            vigil.fail(error)
            raise
        vigil.close()
        return self.report()

    @staticmethod
    def _compile_planner(*, is_first: bool) -> None:
        """Load the planner before steps are watched: the first time ever it is compiled for a
        minute, which the first rank of a host does while the others wait for it.
        """
        store = dist.distributed_c10d._get_default_store()
        key = f"doctor/compiled/{socket.gethostname()}"
        if not is_first:
            store.wait([key], datetime.timedelta(seconds=_COMPILE_S))
        warm_up()
        store.set(key, "1")

    def report(self) -> Report:
        """What was found so far."""
        return Report(findings=tuple(self.findings), seconds=time.monotonic() - self.begin)

    def _end(self, text: str) -> None:
        if dist.get_rank():
            self.on_hang(None)
            return
        self.findings.append(
            Finding(
                check="hangs",
                status=Status.PROBLEM,
                text=text,
                advice="look at the rank that others wait for: its host, its link, its log. If all wait in the same "
                'step, try NCCL_DEBUG=INFO, and training with "link": {"overlap": false}',
            )
        )
        self.on_hang(self.report())

    def _examine(self, vigil: Vigil, device: torch.device, hardware: Hardware | None) -> None:
        with vigil.step("meeting the other ranks"):
            hosts = find_hosts(device)
            self._compare_ranks(device, hosts)
        here = len(hosts.ranks_beside(dist.get_rank()))
        with vigil.step("kernels and limits of the system"):
            self.findings += findings.check_kernels(device)
            mine = findings.check_settings(device) + findings.check_system(here)
            mine += findings.check_compiler(device, self._ds_config)
            self._add_worst(device, mine)
        groups = GroupPool(1, device)
        with vigil.step("connecting all ranks"):
            everyone = tuple(range(dist.get_world_size()))
            groups.create([("doctor", everyone)])
        with vigil.step("rates of links"):
            self.findings += probe_measurements.check_links(
                device, hosts, hardware, groups.get("doctor", everyone)
            )
        groups.destroy()
        with vigil.step("speed of ranks"):
            self.findings.append(probe_measurements.check_speed_of_ranks(device))
        with vigil.step("a point of a profile"):
            self.findings += probe_measurements.check_profile_point(device, hardware)
        self._try_small_model(vigil, device)

    def _compare_ranks(self, device: torch.device, hosts: Hosts) -> None:
        everyone = _of_all_ranks(findings.describe_environment(), device)
        world, num_hosts = len(everyone), len(hosts.names)
        num_devices = torch.cuda.device_count() if device.type == "cuda" else 1
        text = f"{world} on {num_hosts} host{'s' * (num_hosts > 1)}, {device.type}"
        if world == 1:
            more = f", and this host has {num_devices} devices" if num_devices > 1 else ""
            text = f"{text}{more}: nothing between ranks can be checked"
        self.findings.append(
            Finding.judge(
                "ranks",
                text,
                is_well=world > 1,
                advice="deepspeed --log_level error --no_local_rank --no_python ds-hydra doctor",
                figures={"ranks": world, "devices_of_host": num_devices},
            )
        )
        self.findings.append(findings.compare_environments(everyone))

    def _add_worst(self, device: torch.device, mine: Sequence[Finding]) -> None:
        """Of each check of the system, what the lowest rank found that is not well there."""
        of_rank = _of_all_ranks([finding.to_json() for finding in mine], device)
        for index in range(len(mine)):
            rows = [(found[index], rank) for rank, found in enumerate(of_rank)]
            row, rank = next((r for r in rows if r[0]["status"] != Status.OK.value), rows[0])
            where = f"rank {rank}: " if row["status"] != Status.OK.value else ""
            values = {**row, "status": Status(row["status"]), "text": where + row["text"]}
            self.findings.append(Finding(**values))

    def _try_small_model(self, vigil: Vigil, device: torch.device) -> None:
        with vigil.step("one process alone"):
            model = small_model.SmallModel(device)
        strategies = small_model.pick_strategies(dist.get_world_size())
        with vigil.step("settings of the device"):
            ways = (False, True) if can_overlap(device) else (False,)
        for overlap in ways:
            name = "exchanges beside computation" if overlap else "exchanges alone"
            with vigil.step(f"connecting groups, {name}"):
                propagator = small_model.open_propagator(model, strategies, overlap=overlap)
            self.findings.append(
                small_model.check_parity(model, propagator, vigil, name, strategies)
            )
            if overlap is ways[-1]:
                with vigil.step("time that is left"):
                    left_s = self._left_s(propagator.max_over_ranks)
                self.findings.append(
                    small_model.check_hangs(model, propagator, vigil, left_s, name)
                )
            propagator.close()
        overlap = ways[-1]
        self.findings.append(small_model.check_halves(device, vigil, overlap=overlap))
        self.findings.append(small_model.check_gathered(model, vigil, overlap=overlap))
        if len(propagator.hosts.names) == 1:
            self.findings.append(
                small_model.check_streamed_gradients(model, vigil, overlap=overlap)
            )

    def _left_s(self, max_over_ranks: Callable[[float], float]) -> float:
        gone = max_over_ranks(time.monotonic() - self.begin)
        return max(_LEAST_STRESS_S, _STRESS_SHARE * (self.request.seconds - gone))


def describe(report: Report) -> str:
    """A table of the findings, with what to do under each that is not well."""
    width = max(len(finding.check) for finding in report.findings)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.status.value:>7}  {finding.check:<{width}}  {finding.text}")
        if finding.advice and finding.status is not Status.OK:
            lines.append(f"{'':>7}  {'':<{width}}  -> {finding.advice}")
    counts = {s: sum(f.status is s for f in report.findings) for s in Status}
    verdict = "not well" if report.has_problem else "well"
    lines.append(
        f"{verdict}: {counts[Status.PROBLEM]} problems, {counts[Status.WARNING]} warnings, "
        f"{counts[Status.SKIPPED]} skipped, in {report.seconds:.0f} s"
    )
    return "\n".join(lines)


def check_launch() -> None:
    """Raise HydraConfigError where a launcher's variables do not fit together; not collective."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in os.environ]
    if "RANK" in found and len(found) < len(names):
        missing = ", ".join(name for name in names if name not in found)
        raise HydraConfigError(
            f"RANK is set, and {missing} not: start with deepspeed or torchrun, or unset RANK to examine one rank"
        )
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if get_accelerator().device_name() == "cuda" and local >= count:
        raise HydraConfigError(
            f"LOCAL_RANK is {local}, and this host has {count} devices; start {count} ranks on it (--num_gpus, "
            "--nproc-per-node)"
        )
