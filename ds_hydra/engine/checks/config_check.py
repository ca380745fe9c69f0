"""Check of a DeepSpeed JSON with a "hydra" section for a cluster, without ranks and without a
GPU.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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
    gradient_bytes,
    proposes,
)
from ds_hydra.sampler.sample_bench import MAX_ENUMERATED_RANKS, CandidateSettings
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.flops import ModelFlops, profile_flops, profile_peak_flops
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
        _Budget(request, ds_config, hydra, report).fill()
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


class _Budget:
    """Fill in values that depend on model, devices and profile."""

    def __init__(
        self,
        request: CheckRequest,
        ds_config: Mapping[str, Any],
        hydra: HydraConfig,
        report: ConfigReport,
    ):
        self._request, self._hydra, self._report = request, hydra, report
        self._dtype: torch.dtype = getattr(torch, dtype_name(ds_config))
        self._offloads_optimizer = offloads_optimizer(ds_config)
        self._stage_model: StageModel | None = None
        self._profile: Profile | None = None
        self._started_with: Sequence[Strategy] = ()
        self._given: Sequence[Strategy] = ()

    def fill(self) -> None:
        """Raises HydraError at the first thing that makes the rest meaningless."""
        report, hydra = self._report, self._hydra
        self._check_paths()
        if hydra.strategies is not None:
            self._given = load_strategies(hydra.strategies)
        report.num_devices = self._num_devices()
        self._load_model()
        self._check_given()
        self._profile = self._find_profile()
        self._say_what_is_estimated()
        if self._profile is not None:
            self._describe_memory(self._profile)
        strategies = self._candidates()
        self._check_communicators([*strategies, *self._started_with])
        report.strategies = [str(strategy) for strategy in strategies]

    def _check_given(self) -> None:
        for scheme in sorted(schemes_of(self._given)):
            check_context_parallel(scheme, self._hydra.context_length)
            if self._stage_model is not None:
                check_scheme(self._stage_model, scheme)
        if self._given and "space" in self._hydra.planner.model_fields_set:
            self._report.warnings.append(
                f"hydra.planner.space is {self._hydra.planner.space} and not used: hydra.strategies are given"
            )

    def _say_what_is_estimated(self) -> None:
        if self._profile is None:
            return
        costs = Costs(self._profile, self._settings().cluster)
        even = {replace(scheme, ckpt=0, stages=()) for scheme in schemes_of(self._given)}
        unknown = sorted(even - self._profile.latency.keys())
        if added := [scheme for scheme in unknown if costs.find(scheme) is not None]:
            self._report.assumed.append(
                f"times of {', '.join(map(str, added))}, which the profile does not know, are estimated from "
                "those it knows (`ds-hydra profile` measures them)"
            )

    def _check_paths(self) -> None:
        folder, tokenizer, found = self._hydra.run_dir, self._hydra.tokenizer, self._report.problems
        if folder is not None and Path(folder).is_file():
            found.append(f"hydra.run_dir is {folder!r}, which is a file; name a folder")
        elif (
            folder is not None
            and Path(folder).exists()
            and not os.access(folder, os.W_OK | os.X_OK)
        ):
            found.append(
                f"hydra.run_dir is {folder!r}, which is no folder that can be written; name another one"
            )
        is_path = tokenizer is not None and tokenizer.startswith((".", "/"))
        if is_path and not Path(str(tokenizer)).exists():
            found.append(
                f"hydra.tokenizer is {tokenizer!r}, which does not exist; name a folder with a tokenizer or a hub id"
            )

    def _num_devices(self) -> int:
        needed = max((strategy.num_devices for strategy in self._given), default=None)
        if self._request.num_devices is None:
            number = DEFAULT_DEVICES if needed is None else needed
            why = "one node" if needed is None else "what hydra.strategies need"
            self._report.assumed.append(
                f"{number} devices ({why}); give --devices for another number"
            )
            return number
        if needed is not None and needed > self._request.num_devices:
            largest = max(self._given, key=lambda strategy: strategy.num_devices)
            raise HydraConfigError(
                f"strategy {largest} needs {needed} devices, there are {self._request.num_devices}; change "
                f"hydra.strategies or train on {needed} devices"
            )
        return self._request.num_devices

    def _load_model(self) -> None:
        if self._request.model is None:
            self._report.assumed.append(
                "the model can run every scheme (heads divide by TP, layers by PP); give --model to be sure"
            )
            return
        config = load_model_config(self._request.model)
        with making(self._request.model):
            self._stage_model = build_random_stage_model(
                config,
                dtype=self._dtype,
                device=torch.device("meta"),
                num_ranks=self._report.num_devices,
                activation_checkpointing=self._hydra.activation_checkpointing,
                float8=self._hydra.float8,
                float8_exclude=self._hydra.float8_exclude,
                offloads_optimizer=self._offloads_optimizer,
            )
        self._report.parameters = count_parameters(self._stage_model).to_json()
        check_context(self._stage_model.abilities, config, self._hydra.context_length)
        if problem := find_softcap_problem(config, self._dtype):
            self._report.warnings.append(f"on GPUs the engine refuses this model: {problem}")
        elif self._request.device != "cpu":
            self._name_attention(config)
        if note := find_unseen_positions(config, self._hydra.context_length):
            self._report.warnings.append(note)

    def _name_attention(self, config: Any) -> None:
        """Say which kernel the packages here would run attention by on a GPU, untried."""
        asked = self._hydra.attention
        if is_of_hub(asked):
            self._report.assumed.append(
                f"hydra.attention: the hub has {asked} for the GPUs at hand"
            )
            return
        for demand in demands_of(config, self._dtype):
            try:
                choice = choose(demand, request=asked, is_ordered=self._hydra.deterministic)
            except HydraConfigError as error:
                self._report.warnings.append(f"with the packages here: {error}")
            else:
                self._report.assumed.append(
                    f"attention on GPUs, by the packages here: {choice.describe()}"
                )

    def _can_run(self, scheme: Scheme) -> bool:
        return self._stage_model is None or can_run(self._stage_model, scheme)

    def _find_profile(self) -> Profile | None:
        report, hydra = self._report, self._hydra
        name = self._request.profile or hydra.profile
        if name is not None:
            known = load_profile(name, compiled=hydra.compile_layers)
            report.profile = f"{name}: {known.document.get('source', 'of unknown source')}"
            if self._stage_model is not None:
                known.check_model(**model_facts(self._stage_model))
                known.check_config(
                    hydra,
                    str(self._dtype).removeprefix("torch."),
                    cuts_micro_batches=self._stage_model.tp.cuts_micro_batches,
                )
            self._say_what_was_measured(name, known)
            if self._request.device is not None:
                report.warnings.append(
                    f"--hardware {self._request.device} is not used: profile {name} is known"
                )
        if hydra.profile is None:
            self._say_what_is_profiled()
        if name is None:
            if self._stage_model is None or self._request.device is None:
                report.assumed.append(
                    "nothing is known of time and memory before the profile is measured; give --profile, or "
                    "--model and --hardware for an estimate"
                )
                return None
            hardware = Hardware.load(self._request.device)
            known = estimate_profile(
                self._stage_model,
                hardware,
                report.num_devices,
                hydra,
                name=str(self._request.model),
            )
            report.profile = f"estimate: {known.document['source']}"
            unpriced = known.document["model"]["unpriced"]
            report.assumed += [f"model: {sentence}" for sentence in unpriced]
            report.assumed.append(
                f"time and memory below are a roofline of {hardware.name}, nothing is measured; activations "
                f"{'are recomputed' if hydra.activation_checkpointing else 'are as large as in the shipped profiles'}"
            )
            if self._stage_model.uncut_because and any(scheme.tp > 1 for scheme in known.latency):
                report.assumed.append(
                    "under TP they are larger than in the shipped profiles: norms and residual stream are whole on "
                    f"every rank, because {self._stage_model.uncut_because}"
                )
        elif hydra.activation_checkpointing and "activation_checkpointing" not in known.document:
            report.assumed.append(
                f"profile {name} was measured with hydra.activation_checkpointing as well"
            )
        fitted = fit_memory(known.document, hydra)
        if self._stage_model is None:
            return fitted
        return as_the_engine_needs(fitted, self._stage_model, hydra, report.num_devices)

    def _say_what_was_measured(self, name: str, known: Profile) -> None:
        """Note what is taken in place of the memory of a profile that is not this engine's."""
        if not is_of_another_system(known.document):
            return
        measured_with = known.document["measured_with"]
        if self._stage_model is None:
            self._report.assumed.append(
                f"profile {name} was measured with {measured_with}; the engine needs more memory than it says, how "
                "much follows from --model"
            )
            return
        self._report.assumed.append(
            f"profile {name} was measured with {measured_with}; in place of its memory counts what is larger: states "
            "by their dtypes, activations by sizes of layers, communicators of NCCL's default size, exchange buffers"
        )

    def _say_what_is_profiled(self) -> None:
        hydra, number = self._hydra, self._report.num_devices
        schemes = {*schemes_of(decide_candidates(None, None, self._settings()).strategies)}
        if not self._given:
            schemes |= {*measured_beside(number, hydra.planner.space, are_nodes=self._are_nodes)}
        runnable = sorted(scheme for scheme in schemes if self._can_run(scheme))
        lengths = hydra.profiling.lengths or default_lengths(hydra.context_length)
        measured = "scheme is measured" if len(runnable) == 1 else "schemes are measured"
        self._report.profiled.append(
            f"hydra.profile is null: {len(runnable)} {measured} at the start of every run "
            f"({', '.join(map(str, runnable))}), micro-batches of {', '.join(map(str, lengths))} tokens as far as they "
            f"fit; `ds-hydra profile` measures them once for all runs"
        )

    def _describe_memory(self, profile: Profile) -> None:
        report, context, number = self._report, self._hydra.context_length, self._report.num_devices
        costs = Costs(profile, self._settings().cluster)
        profile = self._profile = costs.extended(schemes_of(self._given))
        report.known_profile, memory = profile, profile.memory
        report.memory_bytes = memory.usable_bytes
        flops, peak = self._flops(profile)
        fitting = [s for s in profile.latency if s.num_devices <= number and self._can_run(s)]
        for scheme in sorted(fitting, key=lambda s: (s.num_devices, s)):
            longest = max(0, profile.max_len_tokens(scheme, number))
            micro_batch = min(longest, context)
            time_ms = profile.latency[scheme].micro_batch_ms([micro_batch]) if micro_batch else 0.0
            tflops = flops.tflops([micro_batch], time_ms, scheme.num_devices)
            report.schemes.append(
                {
                    "scheme": str(scheme),
                    "max_len_tokens": longest,
                    "states_bytes": round(memory.rank_bytes(scheme, number, 0)),
                    "micro_batch_tokens": micro_batch,
                    "total_bytes": round(memory.rank_bytes(scheme, number, micro_batch)),
                    "micro_batch_ms": round(time_ms, 1) if micro_batch else None,
                    "tflops_per_device": None if isnan(tflops) else float(f"{tflops:.4g}"),
                    "mfu": None
                    if isnan(tflops) or peak is None
                    else round(tflops * 1e12 / peak, 4),
                }
            )
        self._warn_of_wide_tp(profile, fitting)
        try:
            holding = check_longest(profile, self._settings())
        except HydraConfigError as error:
            limited = self._hydra.memory_limit_bytes is not None
            advice = ", or raise hydra.memory_limit_bytes" if limited else ""
            raise HydraConfigError(f"hydra.context_length: {error}{advice}") from error
        longest = max((row["max_len_tokens"] for row in report.schemes), default=0)
        if not self._given and longest < context:
            named = "" if holding is None else f", such as {holding}"
            report.assumed.append(
                f"none of these schemes fits hydra.context_length = {context}; others of the full space do{named}, "
                "whose times and memory follow from theirs (--histogram shows the candidates)"
            )
        if holding is not None and holding.offload:
            kept = context * memory.offloaded_bytes(holding) / (1 << 30)
            report.offloaded = (
                f"a sequence of {context} tokens fits because checkpointed layers of {holding} keep their input, and "
                f"what attention returns, in the host's memory: {kept:.0f} GiB for each device, which has to be there"
            )
            report.assumed.append(report.offloaded)

    def _warn_of_wide_tp(self, profile: Profile, schemes: Sequence[Scheme]) -> None:
        """Say so where TP groups of what fits the context leave a node, all of them."""
        report, number = self._report, self._report.num_devices
        node = self._hydra.link.devices_per_node or int(
            profile.document["hardware"].get("devices_per_node", DEFAULT_DEVICES)
        )
        longest = {s: profile.max_len_tokens(s, number) for s in schemes}
        holding = [s for s in schemes if longest[s] >= report.context_length]
        if not holding or any(s.ranks_per_stage <= node for s in holding):
            return
        inside = max((longest[s] for s in schemes if s.ranks_per_stage <= node), default=0)
        advice = (
            ""
            if self._hydra.activation_checkpointing
            else "; hydra.activation_checkpointing lets more fit"
        )
        names = ", ".join(map(str, sorted(holding)[:4]))
        report.warnings.append(
            f"only {names} fit hydra.context_length = {report.context_length}; their TP groups are "
            f"wider than a node of {node}: every layer's collectives cross nodes; inside a node "
            f"the longest that fits has {max(0, inside)}{advice}"
        )

    def _flops(self, profile: Profile) -> tuple[ModelFlops, float | None]:
        """FLOPs of the model, and a device's peak FLOP/s in 16 bit; notes where they are
        unknown.
        """
        flops = (
            profile_flops(profile) if self._stage_model is None else count_flops(self._stage_model)
        )
        if flops.unknown:
            self._report.assumed.append(f"TFLOP/s and MFU are left out: {flops.unknown}")
        return flops, profile_peak_flops(profile) if self._dtype.itemsize == 2 else None

    def _settings(self) -> CandidateSettings:
        number = self._report.num_devices
        cluster = None
        if self._profile is not None:
            nodes = self._hydra.link.devices_per_node
            cluster = try_cluster(self._profile, number, gradient_bytes(self._hydra), nodes)
        return CandidateSettings.of(
            self._hydra,
            num_devices=number,
            given=self._given,
            can_run=self._can_run,
            cluster=cluster,
            num_link_groups=len(self._link_groups()),
        )

    def _candidates(self) -> Sequence[Strategy]:
        report, name, given = self._report, self._request.histogram, self._given
        settings = self._settings()
        start = decide_candidates(self._profile, None, settings).strategies
        lengths_decide = not given and not settings.is_enumerated
        if self._profile is not None:
            lengths_decide = proposes(self._profile, settings)
        if name is not None and not lengths_decide:
            report.warnings.append(
                f"--histogram {name} is not used: where hydra.strategies is null, candidates are "
                f'proposed on more than {MAX_ENUMERATED_RANKS} devices; on fewer with hydra.planner.space "full", or a '
                "profile that measured SP"
            )
        if given:
            report.strategies_source = "hydra.strategies"
        elif not lengths_decide and self._hydra.planner.space != "full":
            report.strategies_source = (
                f"all of two schemes, as on {MAX_ENUMERATED_RANKS} ranks and fewer"
            )
        elif name is None or self._profile is None:
            so_far = "all of two schemes <TP,PP>" if settings.is_enumerated else "homogeneous ones"
            report.strategies_source = (
                f"{so_far} until the lengths of the training data are known, from which the engine proposes "
                "others; give --histogram and a profile to see them"
            )
        else:
            self._started_with = start  # whose groups stay
            histogram = LengthHistogram.load(find_file("lengths", name))
            found = decide_candidates(self._profile, histogram, settings)
            report.strategies_source = f"proposed for the lengths of {name}"
            if found.assumed:
                report.assumed.append(
                    f"times of {', '.join(map(str, found.assumed))} follow from those of <TP,PP>, because "
                    f"hydra.planner.space is {self._hydra.planner.space}"
                )
            return found.strategies
        return start

    def _link_groups(self) -> list[GroupKey]:
        """Groups of pull and push, as the propagator has them."""
        per_node = self._per_node if self._are_nodes else None
        return link_groups(self._report.num_devices, per_node)

    @property
    def _per_node(self) -> int:
        return self._hydra.link.devices_per_node or DEFAULT_DEVICES

    @property
    def _are_nodes(self) -> bool:
        """Whether ranks relay data from other nodes."""
        return 1 < self._per_node < self._report.num_devices

    def _check_communicators(self, strategies: Sequence[Strategy]) -> None:
        number = self._report.num_devices
        limit = group_limit(number, self._hydra.max_process_groups)
        keys = communicators([*groups_of_all(strategies), *self._link_groups()])
        total, objects = len(keys), most_multicast_objects(keys, self._per_node)
        self._report.communicators = {
            "total": total,
            "most_on_one_rank": most_groups_of_rank(keys),
            "limit": limit,
            "multicast_objects": objects,
        }
        if objects > MAX_MULTICAST_OBJECTS:
            self._report.warnings.append(describe_multicast(objects))
        check_num_groups(total, limit)
        check_groups_of_rank(keys)
