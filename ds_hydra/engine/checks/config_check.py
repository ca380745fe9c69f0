"""Check of a DeepSpeed JSON with a "hydra" section for a cluster, without ranks and without a
GPU.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch

from ds_hydra.configs import HydraConfig, find_file, read_ds_config
from ds_hydra.configs.ds_config import FILL_INS, dtype_name, find_auto_keys, find_key
from ds_hydra.configs.files import read_json_object
from ds_hydra.engine.checks.deepspeed_section import find_deepspeed_problems
from ds_hydra.engine.model.attention_choice import (
    choose,
    demands_of,
    find_softcap_problem,
    is_of_hub,
)
from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config, making
from ds_hydra.engine.model.scheme_support import (
    can_run,
    check_context,
    check_context_parallel,
    check_scheme,
    find_unseen_positions,
)
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import (
    MAX_MULTICAST_OBJECTS,
    check_groups_of_rank,
    check_num_groups,
    describe_multicast,
)
from ds_hydra.engine.profiling.memory import as_the_engine_needs, is_of_another_system
from ds_hydra.engine.profiling.profile_document import (
    count_flops,
    count_parameters,
    estimate_profile,
    fit_memory,
    model_facts,
)
from ds_hydra.engine.profiling.profiler import default_lengths
from ds_hydra.engine.ranks.process import NO_COMPILER, compiles_adam, offloads_optimizer
from ds_hydra.errors import HydraConfigError, HydraError
from ds_hydra.sampler.candidate_set import (
    check_longest,
    decide_candidates,
    find_cheapest_holding,
    gradient_bytes,
    proposes,
)
from ds_hydra.sampler.sample_bench import MAX_ENUMERATED_RANKS, CandidateSettings
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.flops import profile_flops, profile_peak_flops
from ds_hydra.strategy.profiles.profile import load_profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.enumeration import (
    load_strategies,
    measured_beside,
)
from ds_hydra.strategy.schemes.placement import (
    GroupKey,
    communicators,
    group_limit,
    groups_of_all,
    link_groups,
    most_groups_of_rank,
    most_multicast_objects,
)
from ds_hydra.strategy.schemes.scheme import schemes_of

logger = logging.getLogger(__name__)

CHECK_SCHEMA = "ds_hydra.check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Request for a check, with the facts that are known beside the file. `model`, `profile`,
    `device`, `histogram`: names or paths.
    """

    config: Path | Mapping[str, Any]
    model: str | None = None
    num_devices: int | None = None
    profile: str | None = None
    device: str | None = None
    histogram: str | None = None


@dataclass(slots=True)
class ConfigReport:
    """Result of a check. `problems` would stop a run; `warnings` would not; `assumed` is what
    nobody has said.

    `schemes` has a row for each scheme: MaxLen, bytes of the states, bytes with a full row of
    `micro_batch_tokens`.
    """

    num_devices: int = 0
    context_length: int = 0
    tokens_per_iteration: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    profiled: list[str] = field(default_factory=list)
    filled_in: list[str] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of the model: all, those of one token, those of embedding and head."""
    profile: str | None = None
    memory_bytes: int | None = None
    schemes: list[dict[str, Any]] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    strategies_source: str = ""
    communicators: dict[str, int] = field(default_factory=dict)
    offloaded: str = ""
    """Sentence on what has to be in the host's memory; empty where nothing has to."""
    known_profile: Profile | None = field(default=None, repr=False)
    """Profile that the rows of `schemes` were made of; not in the document."""

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.check/1` document."""
        names = [field.name for field in fields(self) if field.name != "known_profile"]
        found = {name: getattr(self, name) for name in names}
        return {"schema": CHECK_SCHEMA, "ok": not self.problems, **found}


DEFAULT_DEVICES = 8
"""Devices that are assumed where neither the user nor the strategies say how many there are: one
usual node.
"""


def check_config(request: CheckRequest) -> ConfigReport:
    """Everything that can be said about a configuration before ranks start; never raises a
    HydraError.

    A problem in one part does not hide those of others, unless the JSON itself cannot be read.
    """
    report = ConfigReport()
    with _warnings_to(report.warnings):
        try:
            ds_config, hydra = read_ds_config(request.config)
        except HydraError as error:
            report.problems.append(str(error))
            return report
        _check_deepspeed(request, ds_config, report)
    report.context_length = hydra.context_length
    report.tokens_per_iteration = hydra.tokens_per_iteration
    try:
        _check_run(request, ds_config, hydra, report)
    except HydraError as error:
        report.problems.append(str(error))
    return report


@contextmanager
def _check_deepspeed(
    request: CheckRequest, ds_config: Mapping[str, Any], report: ConfigReport
) -> None:
    """Add to `report` the problems and assumptions of the DeepSpeed part of the JSON."""
    report.problems += find_deepspeed_problems(ds_config)
    if auto := find_auto_keys(ds_config):
        report.assumed.append(
            f'{", ".join(auto)}: "auto" is filled in by HydraTrainer; write values for ds_hydra.initialize'
        )
    written: Any = request.config
    if not isinstance(written, Mapping):
        written = read_json_object(written)
    for fill_in in FILL_INS:
        if all(find_key(written, key) is None for key in (fill_in.key, *fill_in.unless)):
            report.filled_in.append(f"{fill_in.key} = {json.dumps(fill_in.value)}: {fill_in.why}")
    if "optimizer" not in ds_config:
        report.assumed.append(
            "the JSON has no optimizer; pass one to initialize, or TrainingArguments do"
        )
    elif request.device != "cpu" and compiles_adam(ds_config):
        report.assumed.append(
            "on GPUs, an nvcc of torch's CUDA on every host, which DeepSpeed compiles its FusedAdam with at the "
            f"first start; without one {NO_COMPILER}"
        )
    if dtype_name(ds_config) == "float32":
        report.warnings.append(
            'neither "bf16" nor "fp16" is enabled: weights and activations are fp32'
        )


@contextmanager
def _warnings_to(found: list[str]) -> Iterator[None]:
    """Collect warnings that ds_hydra's readers log."""
    logger = logging.getLogger("ds_hydra.configs")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The run that is checked: its configuration and devices, and its model where one is named."""

    hydra: HydraConfig
    num_devices: int
    given: Sequence[Strategy]
    dtype: torch.dtype
    model: StageModel | None = None

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.hydra.link.devices_per_node or DEFAULT_DEVICES

    @property
    def are_nodes(self) -> bool:
        """Whether ranks relay data from other nodes."""
        return 1 < self.per_node < self.num_devices

    @property
    def link_groups(self) -> list[GroupKey]:
        """Groups of pull and push, as the propagator has them."""
        return link_groups(self.num_devices, self.per_node if self.are_nodes else None)

    def can_run(self, scheme: Scheme) -> bool:
        """Whether the model, where it is known, runs `scheme`."""
        return self.model is None or can_run(self.model, scheme)

    def settings(self, profile: Profile | None) -> CandidateSettings:
        """Settings for the choice of candidates."""
        cluster = None
        if profile is not None:
            nodes = self.hydra.link.devices_per_node
            cluster = try_cluster(profile, self.num_devices, gradient_bytes(self.hydra), nodes)
        return CandidateSettings.of(
            self.hydra,
            num_devices=self.num_devices,
            given=self.given,
            can_run=self.can_run,
            cluster=cluster,
            num_link_groups=len(self.link_groups),
        )


def _check_run(
    request: CheckRequest,
    ds_config: Mapping[str, Any],
    hydra: HydraConfig,
    report: ConfigReport,
) -> None:
    """Fill in `report` what depends on model, devices and profile. Raises HydraError at the first
    thing that makes the rest meaningless.
    """
    report.problems += _find_path_problems(hydra)
    given = () if hydra.strategies is None else load_strategies(hydra.strategies)
    report.num_devices = number = _count_devices(request, given, report)
    dtype: torch.dtype = getattr(torch, dtype_name(ds_config))
    model = None
    if request.model is None:
        report.assumed.append(
            "the model can run every scheme (heads divide by TP, layers by PP); give --model to be sure"
        )
    else:
        model = _build_model(request, ds_config, hydra, report, dtype)
    run = _Run(hydra=hydra, num_devices=number, given=given, dtype=dtype, model=model)
    _check_given(run, report)
    profile = _find_profile(request, run, report)
    if profile is not None:
        _note_estimates(run, profile, report)
        profile = _describe_memory(run, profile, report)
    strategies, stay = _find_candidates(request, run, profile, report)
    _check_communicators(run, [*strategies, *stay], report)
    report.strategies = [str(strategy) for strategy in strategies]


def _find_path_problems(hydra: HydraConfig) -> Iterator[str]:
    folder, tokenizer = hydra.run_dir, hydra.tokenizer
    if folder is not None and Path(folder).is_file():
        yield f"hydra.run_dir is {folder!r}, which is a file; name a folder"
    elif folder is not None and Path(folder).exists() and not os.access(folder, os.W_OK | os.X_OK):
        yield f"hydra.run_dir is {folder!r}, which is no folder that can be written; name another one"
    is_path = tokenizer is not None and tokenizer.startswith((".", "/"))
    if is_path and not Path(str(tokenizer)).exists():
        yield f"hydra.tokenizer is {tokenizer!r}, which does not exist; name a folder with a tokenizer or a hub id"


def _count_devices(request: CheckRequest, given: Sequence[Strategy], report: ConfigReport) -> int:
    largest = max(given, key=lambda strategy: strategy.num_devices, default=None)
    needed = None if largest is None else largest.num_devices
    if request.num_devices is None:
        number = DEFAULT_DEVICES if needed is None else needed
        why = "one node" if needed is None else "what hydra.strategies need"
        report.assumed.append(f"{number} devices ({why}); give --devices for another number")
        return number
    if needed is not None and needed > request.num_devices:
        raise HydraConfigError(
            f"strategy {largest} needs {needed} devices, there are {request.num_devices}; change "
            f"hydra.strategies or train on {needed} devices"
        )
    return request.num_devices


def _build_model(
    request: CheckRequest,
    ds_config: Mapping[str, Any],
    hydra: HydraConfig,
    report: ConfigReport,
    dtype: torch.dtype,
) -> StageModel:
    """The named model without weights; notes what limits it."""
    assert request.model is not None
    config = load_model_config(request.model)
    with making(request.model):
        model = build_random_stage_model(
            config,
            dtype=dtype,
            device=torch.device("meta"),
            num_ranks=report.num_devices,
            activation_checkpointing=hydra.activation_checkpointing,
            float8=hydra.float8,
            float8_exclude=hydra.float8_exclude,
            offloads_optimizer=offloads_optimizer(ds_config),
        )
    report.parameters = asdict(count_parameters(model))
    check_context(model.abilities, config, hydra.context_length)
    if problem := find_softcap_problem(config, dtype):
        report.warnings.append(f"on GPUs the engine refuses this model: {problem}")
    elif request.device != "cpu":
        _name_attention(config, dtype, hydra, report)
    if note := find_unseen_positions(config, hydra.context_length):
        report.warnings.append(note)
    return model


def _name_attention(
    config: Any, dtype: torch.dtype, hydra: HydraConfig, report: ConfigReport
) -> None:
    """Say which kernel the packages here would run attention by on a GPU, untried."""
    asked = hydra.attention
    if is_of_hub(asked):
        report.assumed.append(f"hydra.attention: the hub has {asked} for the GPUs at hand")
        return
    for demand in demands_of(config, dtype):
        try:
            choice = choose(demand, request=asked, is_ordered=hydra.deterministic)
        except HydraConfigError as error:
            report.warnings.append(f"with the packages here: {error}")
        else:
            report.assumed.append(f"attention on GPUs, by the packages here: {choice.describe()}")


def _check_given(run: _Run, report: ConfigReport) -> None:
    for scheme in sorted(schemes_of(run.given)):
        check_context_parallel(scheme, run.hydra.context_length)
        if run.model is not None:
            check_scheme(run.model, scheme)
    if run.given and "space" in run.hydra.planner.model_fields_set:
        report.warnings.append(
            f"hydra.planner.space is {run.hydra.planner.space} and not used: hydra.strategies are given"
        )


def _find_profile(request: CheckRequest, run: _Run, report: ConfigReport) -> Profile | None:
    """The profile that the run would have, or an estimate; None where nothing is known."""
    hydra, model = run.hydra, run.model
    name = request.profile or hydra.profile
    if hydra.profile is None:
        report.profiled.append(_describe_profiling(run))
    if name is not None:
        known = _load_profile(request, name, run, report)
    elif model is None or request.device is None:
        report.assumed.append(
            "nothing is known of time and memory before the profile is measured; give --profile, or "
            "--model and --hardware for an estimate"
        )
        return None
    else:
        known = _estimate(request, model, Hardware.load(request.device), run, report)
    fitted = fit_memory(known.document, hydra)
    return fitted if model is None else as_the_engine_needs(fitted, model, hydra, run.num_devices)


def _load_profile(request: CheckRequest, name: str, run: _Run, report: ConfigReport) -> Profile:
    hydra, model = run.hydra, run.model
    known = load_profile(name, compiled=hydra.compile_layers)
    report.profile = f"{name}: {known.document.get('source', 'of unknown source')}"
    if model is not None:
        known.check_model(**model_facts(model))
        known.check_config(
            hydra,
            str(run.dtype).removeprefix("torch."),
            cuts_micro_batches=model.tp.cuts_micro_batches,
        )
    if is_of_another_system(known.document):  # whose memory is not this engine's
        taken = (
            "in place of its memory counts what is larger: states by their dtypes, activations by sizes of layers, "
            "communicators of NCCL's default size, exchange buffers"
        )
        if model is None:
            taken = "the engine needs more memory than it says, how much follows from --model"
        report.assumed.append(
            f"profile {name} was measured with {known.document['measured_with']}; {taken}"
        )
    if request.device is not None:
        report.warnings.append(f"--hardware {request.device} is not used: profile {name} is known")
    if hydra.activation_checkpointing and "activation_checkpointing" not in known.document:
        report.assumed.append(
            f"profile {name} was measured with hydra.activation_checkpointing as well"
        )
    return known


def _estimate(
    request: CheckRequest,
    model: StageModel,
    hardware: Hardware,
    run: _Run,
    report: ConfigReport,
) -> Profile:
    known = estimate_profile(model, hardware, run.num_devices, run.hydra, name=str(request.model))
    report.profile = f"estimate: {known.document['source']}"
    unpriced = known.document["model"]["unpriced"]
    report.assumed += [f"model: {sentence}" for sentence in unpriced]
    activations = "are as large as in the shipped profiles"
    if run.hydra.activation_checkpointing:
        activations = "are recomputed"
    report.assumed.append(
        f"time and memory below are a roofline of {hardware.name}, nothing is measured; activations {activations}"
    )
    if model.uncut_because and any(scheme.tp > 1 for scheme in known.latency):
        report.assumed.append(
            "under TP they are larger than in the shipped profiles: norms and residual stream are whole on "
            f"every rank, because {model.uncut_because}"
        )
    return known


def _describe_profiling(run: _Run) -> str:
    hydra, start = run.hydra, decide_candidates(None, None, run.settings(None))
    schemes = {*schemes_of(start.strategies)}
    if not run.given:
        space = hydra.planner.space
        schemes |= {*measured_beside(run.num_devices, space, are_nodes=run.are_nodes)}
    runnable = sorted(filter(run.can_run, schemes))
    lengths = hydra.profiling.lengths or default_lengths(hydra.context_length)
    measured = "scheme is measured" if len(runnable) == 1 else "schemes are measured"
    return (
        f"hydra.profile is null: {len(runnable)} {measured} at the start of every run "
        f"({', '.join(map(str, runnable))}), micro-batches of {', '.join(map(str, lengths))} tokens as far as they "
        f"fit; `ds-hydra profile` measures them once for all runs"
    )


def _note_estimates(run: _Run, profile: Profile, report: ConfigReport) -> None:
    costs = Costs(profile, run.settings(profile).cluster)
    even = {replace(scheme, ckpt=0, stages=()) for scheme in schemes_of(run.given)}
    unknown = sorted(even - profile.latency.keys())
    if added := [scheme for scheme in unknown if costs.find(scheme) is not None]:
        report.assumed.append(
            f"times of {', '.join(map(str, added))}, which the profile does not know, are estimated from "
            "those it knows (`ds-hydra profile` measures them)"
        )


def _describe_memory(run: _Run, profile: Profile, report: ConfigReport) -> Profile:
    """Add a row for each scheme; the profile with the given ones."""
    context, number = run.hydra.context_length, run.num_devices
    profile = Costs(profile, run.settings(profile).cluster).extended(schemes_of(run.given))
    report.known_profile, memory = profile, profile.memory
    report.memory_bytes = memory.usable_bytes
    flops = profile_flops(profile) if run.model is None else count_flops(run.model)
    if flops.unknown:
        report.assumed.append(f"TFLOP/s and MFU are left out: {flops.unknown}")
    peak = profile_peak_flops(profile) if run.dtype.itemsize == 2 else None
    fitting = [s for s in profile.latency if s.num_devices <= number and run.can_run(s)]
    for scheme in sorted(fitting, key=lambda s: (s.num_devices, s)):
        longest = max(0, profile.max_len_tokens(scheme, number))
        micro_batch = min(longest, context)
        time_ms = profile.latency[scheme].micro_batch_ms([micro_batch]) if micro_batch else 0.0
        tflops = flops.tflops([micro_batch], time_ms, scheme.num_devices)
        is_known = not isnan(tflops)
        report.schemes.append(
            {
                "scheme": str(scheme),
                "max_len_tokens": longest,
                "states_bytes": round(memory.rank_bytes(scheme, number, 0)),
                "micro_batch_tokens": micro_batch,
                "total_bytes": round(memory.rank_bytes(scheme, number, micro_batch)),
                "micro_batch_ms": round(time_ms, 1) if micro_batch else None,
                "tflops_per_device": float(f"{tflops:.4g}") if is_known else None,
                "mfu": round(tflops * 1e12 / peak, 4) if is_known and peak else None,
            }
        )
    _warn_of_wide_tp(run, profile, fitting, report)
    _check_context(run, profile, report)
    return profile


def _check_context(run: _Run, profile: Profile, report: ConfigReport) -> None:
    """Raise HydraConfigError where no scheme of any candidate fits the context; say which one takes
    least where none of the rows does, or where it needs the host's memory.
    """
    context, settings = run.hydra.context_length, run.settings(profile)
    try:
        check_longest(profile, settings)
    except HydraConfigError as error:
        limited = run.hydra.memory_limit_bytes is not None
        advice = ", or raise hydra.memory_limit_bytes" if limited else ""
        raise HydraConfigError(f"hydra.context_length: {error}{advice}") from error
    if run.given:
        return
    holding = find_cheapest_holding(profile, settings)
    if max((row["max_len_tokens"] for row in report.schemes), default=0) < context:
        named = "" if holding is None else f", such as {holding}"
        report.assumed.append(
            f"none of these schemes fits hydra.context_length = {context}; others of the full space do{named}, "
            "whose times and memory follow from theirs (--histogram shows the candidates)"
        )
    if holding is not None and holding.offload:
        kept = context * profile.memory.offloaded_bytes(holding) / (1 << 30)
        report.offloaded = (
            f"a sequence of {context} tokens fits because checkpointed layers of {holding} keep their input, and "
            f"what attention returns, in the host's memory: {kept:.0f} GiB for each device, which has to be there"
        )
        report.assumed.append(report.offloaded)


def _warn_of_wide_tp(
    run: _Run, profile: Profile, schemes: Sequence[Scheme], report: ConfigReport
) -> None:
    """Say so where TP groups of what fits the context leave a node, all of them."""
    context = run.hydra.context_length
    node = run.hydra.link.devices_per_node or int(
        profile.document["hardware"].get("devices_per_node", DEFAULT_DEVICES)
    )
    longest = {s: profile.max_len_tokens(s, run.num_devices) for s in schemes}
    holding = [s for s in schemes if longest[s] >= context]
    if not holding or any(s.ranks_per_stage <= node for s in holding):
        return
    inside = max((longest[s] for s in schemes if s.ranks_per_stage <= node), default=0)
    advice = "; hydra.activation_checkpointing lets more fit"
    if run.hydra.activation_checkpointing:
        advice = ""
    names = ", ".join(map(str, sorted(holding)[:4]))
    report.warnings.append(
        f"only {names} fit hydra.context_length = {context}; their TP groups are "
        f"wider than a node of {node}: every layer's collectives cross nodes; inside a node "
        f"the longest that fits has {max(0, inside)}{advice}"
    )


def _find_candidates(
    request: CheckRequest, run: _Run, profile: Profile | None, report: ConfigReport
) -> tuple[Sequence[Strategy], Sequence[Strategy]]:
    """The candidates, and those that the run starts with, whose groups stay."""
    name, given, space = request.histogram, run.given, run.hydra.planner.space
    settings = run.settings(profile)
    start = decide_candidates(profile, None, settings).strategies
    lengths_decide = not given and not settings.is_enumerated
    if profile is not None:
        lengths_decide = proposes(profile, settings)
    if name is not None and not lengths_decide:
        report.warnings.append(
            f"--histogram {name} is not used: where hydra.strategies is null, candidates are "
            f'proposed on more than {MAX_ENUMERATED_RANKS} devices; on fewer with hydra.planner.space "full", or a '
            "profile that measured SP"
        )
    if given:
        report.strategies_source = "hydra.strategies"
    elif not lengths_decide and space != "full":
        report.strategies_source = (
            f"all of two schemes, as on {MAX_ENUMERATED_RANKS} ranks and fewer"
        )
    elif name is None or profile is None:
        so_far = "all of two schemes <TP,PP>" if settings.is_enumerated else "homogeneous ones"
        report.strategies_source = (
            f"{so_far} until the lengths of the training data are known, from which the engine proposes "
            "others; give --histogram and a profile to see them"
        )
    else:
        histogram = LengthHistogram.load(find_file("lengths", name))
        found = decide_candidates(profile, histogram, settings)
        report.strategies_source = f"proposed for the lengths of {name}"
        if found.assumed:
            report.assumed.append(
                f"times of {', '.join(map(str, found.assumed))} follow from those of <TP,PP>, because "
                f"hydra.planner.space is {space}"
            )
        return found.strategies, start
    return start, ()


def _check_communicators(run: _Run, strategies: Sequence[Strategy], report: ConfigReport) -> None:
    limit = group_limit(run.num_devices, run.hydra.max_process_groups)
    keys = communicators([*groups_of_all(strategies), *run.link_groups])
    total, objects = len(keys), most_multicast_objects(keys, run.per_node)
    report.communicators = {
        "total": total,
        "most_on_one_rank": most_groups_of_rank(keys),
        "limit": limit,
        "multicast_objects": objects,
    }
    if objects > MAX_MULTICAST_OBJECTS:
        report.warnings.append(describe_multicast(objects))
    check_num_groups(total, limit)
    check_groups_of_rank(keys)
