"""Examination by `ds-hydra doctor` on every rank: join, look, measure, try; one report on rank
0.

What it tries is a tiny LLaMA on all ranks: whether every kind of scheme gives the gradients of one
process, and whether exchanges and collectives of many strategies in a row ever hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import LlamaConfig

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.doctor import findings
from ds_hydra.doctor.findings import Finding, Report, Status
from ds_hydra.doctor.hang_monitor import HangMonitor
from ds_hydra.engine.model.meta_model import make_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.profiling.profile_document import nominal_profile
from ds_hydra.engine.profiling.profile_run import join_ranks, use_device
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import broadcast_text
from ds_hydra.engine.ranks.hosts import Hosts, find_hosts
from ds_hydra.engine.ranks.process import can_overlap, leave_out_shared_memory
from ds_hydra.engine.ranks.turns import first_on_node
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.schemes.placement import groups_of_all, link_groups

_LEAST_STRESS_S, _STRESS_SHARE = 2.0, 0.5
"""Iterations that look for hangs take this share of the time that is left."""
_Result = TypeVar("_Result")


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Let ds_hydra log errors alone inside."""
    logger = logging.getLogger("ds_hydra")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_all_ranks(document: Any, device: torch.device) -> list[Any]:
    """Gather the document of each rank, in rank order. Collective over all ranks."""
    texts = [json.dumps(document)]
    ranks = range(dist.get_world_size())
    return [json.loads(broadcast_text(texts, rank, device)[0]) for rank in ranks]


@dataclass(slots=True)
class Examination:
    """Run the checks of this rank and return their findings. Collective over all ranks.

    `on_hang(report)` is called on rank 0 where a rank hangs or fails, with what was found so far,
    on the other ranks with None; the process should end in it. `hardware` is the name or file of a
    description, `seconds` are for all checks, and a step hangs that takes longer than `limit_s`.
    """

    on_hang: Callable[[Report | None], None]
    seconds: float
    limit_s: float
    hardware: str | None = None
    findings: list[Finding] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    @_errors_alone()
    def run(self) -> Report:
        """The report, equal on all ranks up to what each sees of its own host. Raises
        HydraConfigError for a request that is none, before any rank waits.
        """
        transformers.logging.set_verbosity_error()
        leave_out_shared_memory()
        use_device()  # first: what asks the device for anything starts it
        accelerator = get_accelerator()
        name = str(accelerator.device_name())
        if name == "cuda":
            name = torch.cuda.get_device_name()
        device = torch.device(accelerator.device_name())
        hardware = findings.find_hardware(self.hardware, device, name)
        device = join_ranks()
        with first_on_node("compiling the planner"):  # the first time ever it takes a minute
            warm_up()
        monitor = HangMonitor(
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_world_size(),
            limit_s=self.limit_s,
            on_end=self._end,
        )
        try:
            self._examine(monitor, device, hardware)
        except Exception as error:  # whatever it is, other ranks wait for this one
            monitor.fail(error)
            raise
        monitor.close()
        return self.report()

    def report(self) -> Report:
        """The report of all findings so far."""
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

    def _examine(
        self, monitor: HangMonitor, device: torch.device, hardware: Hardware | None
    ) -> None:
        with monitor.step("meeting the other ranks"):
            hosts = find_hosts(device)
            self._compare_ranks(device, hosts)
        here = len(hosts.ranks_beside(dist.get_rank()))
        with monitor.step("kernels and limits of the system"):
            self.findings.append(findings.check_attention(device))
            self._add_worst(device, findings.check_system(here))
        everyone = range(dist.get_world_size())
        groups = GroupPool(None, device)
        with monitor.step("connecting all ranks"):
            groups.create([("doctor", everyone)])
        with monitor.step("rates of links"):
            self.findings += findings.check_links(
                device, hosts, hardware, groups.get("doctor", everyone)
            )
        with monitor.step("rates of all-to-alls"):
            self.findings.append(findings.check_all_to_all(device, hosts, hardware, groups))
        groups.destroy()
        keys = [*groups_of_all(pick_strategies(len(everyone))), *link_groups(len(everyone), None)]
        self.findings.append(findings.check_communicators(keys, here, device))
        with monitor.step("speed of ranks"):
            self.findings.append(findings.check_speed_of_ranks(device))
        self._try_small_model(monitor, device)

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
        """Add one finding for each check: the first of a rank that is not well, or rank 0's."""
        of_rank = _of_all_ranks([finding.to_json() for finding in mine], device)
        for index in range(len(mine)):
            rows = [(found[index], rank) for rank, found in enumerate(of_rank)]
            row, rank = next((r for r in rows if r[0]["status"] != Status.OK.value), rows[0])
            where = f"rank {rank}: " if row["status"] != Status.OK.value else ""
            values = {**row, "status": Status(row["status"]), "text": where + row["text"]}
            self.findings.append(Finding(**values))

    def _try_small_model(self, monitor: HangMonitor, device: torch.device) -> None:
        with monitor.step("one process alone"):
            model = SmallModel(device)
        strategies = pick_strategies(dist.get_world_size())
        with monitor.step("settings of the device"):
            ways = (False, True) if can_overlap(device) else (False,)
        for overlap in ways:
            name = "exchanges beside computation" if overlap else "exchanges alone"
            with monitor.step(f"connecting groups, {name}"):
                propagator = open_propagator(model, strategies, overlap=overlap)
            self.findings.append(check_parity(model, propagator, monitor, name, strategies))
            if overlap is ways[-1]:
                with monitor.step("time that is left"):
                    left_s = self._left_s(propagator.max_over_ranks)
                self.findings.append(check_hangs(model, propagator, monitor, left_s, name))
            propagator.close()
        overlap = ways[-1]
        with monitor.step("one process alone, bf16"):
            halves = SmallModel(device, torch.bfloat16)
        gathered = Strategy.alike(Scheme(tp=1, pp=1, gather=True), dist.get_world_size())
        # Gathered twice: the first time nothing is posted beside computation
        for tried, name, of in (
            (halves, "bf16", strategies[:3]),
            (model, "gathered", (gathered, gathered)),
        ):
            with monitor.step(f"connecting groups, {name}"):
                propagator = open_propagator(tried, of, overlap=overlap)
            self.findings.append(check_parity(tried, propagator, monitor, name, of))
            propagator.close()

    def _left_s(self, max_over_ranks: Callable[[float], float]) -> float:
        gone = max_over_ranks(time.monotonic() - self.begin)
        return max(_LEAST_STRESS_S, _STRESS_SHARE * (self.seconds - gone))


def describe(report: Report) -> str:
    """Table of the findings, with advice under each that is not well."""
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


TOLERANCE = {"cpu": 1e-5}
_DEVICE_TOLERANCE = 1e-4
"""fp32 kernels of a device choose their blocks by the shapes, and so the order of their sums."""
_HALF_TOLERANCE = 1e-1
"""Tolerance of bf16 against fp32 of the same weights: one rank alone is off by 2e-2."""
_LENGTHS = (40, 7, 1, 33, 2, 64, 12, 5, 21, 3, 17, 9)
_VOCAB_SIZE = 251
_MAX_TP, _MAX_PP = 8, 4


def pick_strategies(num_ranks: int) -> tuple[Strategy, ...]:
    """Five strategies at most: data, tensor, pipeline and sequence parallelism, and a mixture.

    >>> [str(s) for s in pick_strategies(4)]
    ['4x<1,1>', '1x<4,1>', '1x<1,4>', '2x<sp2,1>', '1x<2,1> + 1x<1,2>']
    >>> [str(s) for s in pick_strategies(3)]
    ['3x<1,1>', '1x<2,1>', '1x<1,3>', '1x<sp2,1>', '1x<2,1> + 1x<1,1>']
    """
    one = Scheme(tp=1, pp=1)
    tp = Scheme(tp=min(_MAX_TP, 1 << (num_ranks.bit_length() - 1)), pp=1)
    pp = Scheme(tp=1, pp=min(_MAX_PP, num_ranks))
    alone = [one]
    if num_ranks > 1:
        alone += [tp, pp, Scheme(tp=1, pp=1, sp=2)]
    strategies = [Strategy.alike(scheme, num_ranks) for scheme in alone]
    if num_ranks >= 4:
        rest = (one,) * (num_ranks - 4)
        strategies.append(Strategy((Scheme(tp=2, pp=1), Scheme(tp=1, pp=2), *rest)))
    elif num_ranks == 3:
        strategies.append(Strategy((Scheme(tp=2, pp=1), one)))
    elif num_ranks == 2:
        strategies.append(Strategy((one,)))  # a rank is idle
    return tuple(strategies)


class SmallModel:
    """The model, its shards on this rank, and the results of one process. Equal on all ranks."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        """Shards in `dtype`; one process computes in fp32 with the same weights."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=_VOCAB_SIZE,
            max_position_embeddings=256,
            initializer_range=0.1,  # larger than usual: attention and norms shall matter
            tie_word_embeddings=False,
        )
        model = make_model(config, dtype=torch.float32, attn_implementation="sdpa").to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        generator = torch.Generator().manual_seed(1)
        self.examples = [
            torch.randint(0, _VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS
        ]
        self.num_labels = sum(length - 1 for length in _LENGTHS)
        self.loss, grads = self._compute_alone(model, device)
        self.wanted_P = [_shard(grad) for grad in grads]
        model.to(dtype)
        for parameter in model.parameters():
            parameter.ds_tensor = _shard(parameter.detach())
        self.tolerance = TOLERANCE.get(device.type, _DEVICE_TOLERANCE)
        if dtype != torch.float32:
            self.tolerance = _HALF_TOLERANCE
        self.stage_model = StageModel(model)
        self.stage_model.to_device(device)

    def _compute_alone(self, model: nn.Module, device: torch.device) -> tuple[float, list[Tensor]]:
        """Loss and gradients of one process that runs each sequence alone."""
        loss = 0.0
        for tokens in (example.to(device) for example in self.examples):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            part = F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") / self.num_labels
            if len(tokens) > 1:
                part.backward()
                loss += float(part.detach())
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        model.zero_grad()
        return loss, grads

    def plan(self, strategy: Strategy) -> IterationPlan:
        """All examples under `strategy`."""
        profile = Profile.from_json(nominal_profile(self.stage_model, strategy.schemes))
        batch = GlobalBatch(
            iteration=0,
            sample_indices=tuple(range(len(_LENGTHS))),
            lengths=_LENGTHS,
            num_label_tokens=self.num_labels,
        )
        return plan_iteration(
            batch, strategies=(strategy,), profile=profile, num_devices=dist.get_world_size()
        )

    def train(self, propagator: Propagator, strategy: Strategy) -> tuple[float, list[Tensor]]:
        """Loss and this rank's gradient shards under `strategy`. Collective over all ranks."""
        plan = self.plan(strategy)
        propagator.check_plan(plan)
        grads_P = [torch.zeros_like(wanted) for wanted in self.wanted_P]

        def load(position: int) -> tuple[Tensor, Tensor]:
            tokens = self.examples[plan.sample_indices[position]]
            return tokens, tokens

        outcome = propagator.train(plan, load, grads_P, 1.0)
        loss = outcome.loss_sum
        dist.all_reduce(loss)
        return float(loss) / self.num_labels, grads_P

    def error_of(self, loss: float, grads_P: Sequence[Tensor], propagator: Propagator) -> float:
        """Largest relative error of the loss and of any gradient. Collective over all ranks."""
        names = zip(grads_P, self.wanted_P, strict=True)
        squares = torch.stack(
            [torch.stack([(g - w).square().sum(), w.square().sum()]) for g, w in names]
        ).double()
        dist.all_reduce(squares)
        off, norm = squares.sqrt().T
        worst = float((off / norm.clamp_min(1e-3 * norm.max())).max())
        return propagator.max_over_ranks(max(worst, abs(loss / self.loss - 1)))


def _shard(tensor: Tensor) -> Tensor:
    """This rank's flat partition, padded as ZeRO-3 pads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()


def open_propagator(
    model: SmallModel, strategies: Sequence[Strategy], *, overlap: bool
) -> Propagator:
    """Collective over all ranks; the caller closes it."""
    propagator = Propagator(
        model.stage_model,
        device=model.wanted_P[0].device,
        link_config=LinkConfig(overlap=overlap),
    )
    propagator.prepare(strategies)
    return propagator


def check_parity(
    model: SmallModel,
    propagator: Propagator,
    monitor: HangMonitor,
    name: str,
    strategies: Sequence[Strategy],
) -> Finding:
    """Gradients under every strategy against those of one process. Collective over all ranks."""
    errors = {}
    for strategy in strategies:
        with monitor.step(f"gradients of {strategy}, {name}"):
            loss, grads_P = model.train(propagator, strategy)
            name_of = f"{strategy}, again" if str(strategy) in errors else str(strategy)
            errors[name_of] = model.error_of(loss, grads_P, propagator)
    worst = max(errors, key=errors.__getitem__)
    # Also where it is no number
    wrong = [text for text, error in errors.items() if not error <= model.tolerance]
    count = len({*strategies})
    tried = "1 strategy" if count == 1 else f"{count} strategies"
    text = f"{tried}, {name}: largest error {errors[worst]:.1e} ({worst})"
    return Finding.judge(
        "gradients",
        f"{text}; wrong: {', '.join(wrong)}" if wrong else text,
        is_well=not wrong,
        otherwise=Status.PROBLEM,
        advice="report this with the JSON; meanwhile name strategies that are right in hydra.strategies",
        figures={"errors": errors, "tolerance": model.tolerance, "strategies": list(errors)},
    )


def check_hangs(
    model: SmallModel, propagator: Propagator, monitor: HangMonitor, seconds: float, name: str
) -> Finding:
    """Iterations under strategies drawn at random, ranks delayed at random, the device synchronised
    at random. Collective over all ranks; the monitor ends a hang.
    """
    strategies = pick_strategies(propagator.num_ranks)
    common, own = np.random.default_rng(0), np.random.default_rng(1 + propagator.rank)
    is_over = threading.Event()
    disturbing = threading.Thread(
        target=_disturb, args=(propagator.device, is_over, own), daemon=True
    )
    disturbing.start()
    begin, count, worst = time.monotonic(), 0, 0.0
    try:
        while True:
            strategy = strategies[common.integers(len(strategies))]
            with monitor.step(f"iteration {count} of {name}, {strategy}"):
                time.sleep(own.random() * 0.02)
                loss, _ = model.train(propagator, strategy)
                worst = max(worst, abs(loss / model.loss - 1))
                count += 1
                elapsed = propagator.max_over_ranks(time.monotonic() - begin)
            if elapsed >= seconds:
                break
    finally:
        is_over.set()
        disturbing.join()
    text = f"{count} iterations under {len(strategies)} strategies, {name}, none hung"
    is_well = worst <= 10 * model.tolerance
    moved = f", but the loss of the same global batch moved by {worst:.1e}"
    return Finding.judge(
        "hangs",
        text if is_well else text + moved,
        is_well=is_well,
        otherwise=Status.PROBLEM,
        advice='set "link": {"overlap": false} in the "hydra" section, and report this with the JSON',
        figures={"iterations": count, "seconds": elapsed, "loss_error": worst},
    )


def _disturb(device: torch.device, is_over: threading.Event, own: np.random.Generator) -> None:
    """Synchronise `device` at random points, as an allocator that runs full does."""
    if device.type == "cpu":
        return
    accelerator = get_accelerator()
    accelerator.set_device(device.index)  # a new thread starts on device 0
    while not is_over.wait(own.random() * 0.1):
        accelerator.synchronize()
