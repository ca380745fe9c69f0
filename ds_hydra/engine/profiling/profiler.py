"""Measures T(l, P) and activation memory of every scheme on the ranks at hand: one
`ds_hydra.profile/1`.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.attention_choice import keeps_copies
from ds_hydra.engine.profiling.profile_document import (
    ProbeMicroBatch,
    deeper_entry,
    describe_hardware,
    describe_model,
    dtype_of,
    fit_memory,
    logit_chunk_bytes,
    scheme_entry,
    state_memory,
)
from ds_hydra.engine.profiling.rehearsal import (
    at_rehearsed_level,
    choose_rehearsals,
    probe_example,
    rehearse,
    run_once,
)
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import broadcast_text
from ds_hydra.engine.ranks.hosts import find_ranks_per_core
from ds_hydra.engine.ranks.memory import count_multiprocessors, outside_bytes
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress
from ds_hydra.sampler.cuts import cut_micro_batches
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.profiles.memory_model import activation_share, ordered_share
from ds_hydra.strategy.profiles.profile import (
    PROFILE_SCHEMA,
    read_key_value_share,
    saturation_by_tp,
)

logger = logging.getLogger(__name__)

_SHORT_TOKENS, _LONG_TOKENS = 512, 4096
"""Tokens of the micro-batches by which the memory of a token is measured."""
_ROOM_SHARE = 0.5
"""Largest share of the free memory that the longer one is expected to take."""
_PEAK_TOLERANCE = 0.05
"""Share by which an iteration's memory may exceed the profile's."""
_FEWEST_PACKED = 8
"""Sequences in a packed micro-batch that is timed."""

_AGREEMENT = 0.1
"""Share of the shortest run by which the median may exceed it. Rehearsals set the level of T."""

_Subject = TypeVar("_Subject")
"""Subject of timing: a scheme, or a slice of the model."""


def measure_profile(
    propagator: Propagator,
    strategies: Iterable[Strategy],
    config: HydraConfig,
    *,
    probes_every_pp: bool = True,
) -> dict[str, Any]:
    """A profile of every scheme in `strategies`, measured now. Collective over all ranks; equal on
    all.

    The terms of T are fitted to probes: each scheme runs alone on as many pipelines as fit, PP
    equal micro-batches each. The stage time is the makespan over 2 PP - 1 (1F1B). Micro-batches are
    single sequences, and one packed micro-batch: many short sequences cost less in one micro-batch
    than T of each alone says, and not in every scheme by as much. The level of T is that of whole
    iterations under these strategies (`rehearsal.py`). Without `probes_every_pp` only the
    shallowest pipeline of each kind is probed: deeper ones have its T by the layers of a stage, and
    the level of their own rehearsals.
    """
    strategies = list(strategies)
    schemes = sorted({scheme for strategy in strategies for scheme in strategy.schemes})
    homogeneous = {s: Strategy.alike(s, propagator.num_ranks) for s in schemes}
    propagator.prepare(homogeneous.values())
    model = _measure_memory(propagator, homogeneous, config)
    lengths_of = _lengths_that_fit(propagator, schemes, model, config)
    probed_as = {s: s for s in lengths_of} if probes_every_pp else choose_probed(lengths_of)
    micro_batches_of = {
        scheme: _probe_micro_batches(lengths)
        for scheme, lengths in lengths_of.items()
        if probed_as[scheme] == scheme
    }
    times_ms = measure_in_rounds(
        [
            (scheme, micro_batch)
            for scheme, micro_batches in micro_batches_of.items()
            for micro_batch in micro_batches
        ],
        lambda scheme, micro_batch: measure_stage_ms(propagator, homogeneous[scheme], micro_batch),
        config,
        show_progress=propagator.rank == 0,
        warms_up_each=config.compile_layers,  # for its length
    )
    probed = {}
    for scheme, micro_batches in micro_batches_of.items():
        probed[scheme] = scheme_entry(
            scheme, {micro_batch: times_ms[scheme, micro_batch] for micro_batch in micro_batches}
        )
    entries = [
        probed.get(scheme) or deeper_entry(scheme, probed[source], source)
        for scheme, source in probed_as.items()
    ]
    document = {**model, "schemes": entries}
    profile = fit_memory(document, config)
    document["saturation_tokens"] = saturation_by_tp(profile.latency, config.context_length)
    rehearsed = choose_rehearsals([*homogeneous.values(), *strategies], lengths_of)
    is_warm = not has_device_memory()  # a CPU's memory is the process's, which has run probes
    found = rehearse(propagator, rehearsed, profile, config, is_warm=is_warm)
    if has_device_memory():
        # Communicators have had a message in each direction by now, gradients have been pushed
        document["hardware"] |= _reserved(propagator, document["hardware"])
        _fill_memory(propagator, homogeneous, fit_memory(document, config), config)
    return at_rehearsed_level(document, found)


def choose_probed(schemes: Iterable[Scheme]) -> dict[Scheme, Scheme]:
    """Return, for each of `schemes`, the one whose probes tell T: the shallowest pipeline with the
    same options. Pipelines of named stages are probed themselves.

    >>> found = choose_probed([Scheme(1, 1), Scheme(1, 4), Scheme(2, 2)])
    >>> {str(scheme): str(source) for scheme, source in found.items()}
    {'<1,1>': '<1,1>', '<1,4>': '<1,1>', '<2,2>': '<2,2>'}
    """
    schemes = tuple(schemes)
    even = sorted((s for s in schemes if not s.stages), key=lambda s: -s.pp)
    shallowest = {replace(s, pp=1): s for s in even}
    return {s: s if s.stages else shallowest[replace(s, pp=1)] for s in schemes}


def _reserved(propagator: Propagator, hardware: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that a profile leaves free outside of torch: those in use there on the fullest rank, no
    less than `hardware` says. Collective over all ranks.
    """
    most = int(propagator.max_over_ranks(float(outside_bytes())))
    if propagator.rank == 0:
        logger.info(
            "%.2f GB of a device are in use outside of torch, with %s",
            most / 1e9,
            propagator.groups,
        )
    return {"reserved_bytes": max(most, hardware["reserved_bytes"])}


def _fill_memory(
    propagator: Propagator,
    homogeneous: Mapping[Scheme, Strategy],
    profile: Profile,
    config: HydraConfig,
) -> None:
    """One iteration with micro-batches as long as plans may make them, under the scheme that has
    least room: where MaxLen is too long it ends here and not hours later. Collective over all
    ranks; warns of more memory than the profile says and than there is for plans.
    """
    num_ranks = propagator.num_ranks
    longest = {
        scheme: min(
            profile.memory.max_len_tokens(scheme, num_ranks),
            config.tokens_per_iteration // scheme.pp,
        )
        for scheme in profile.latency
        if scheme in homogeneous
    }
    scheme = min(longest, key=lambda s: (longest[s], s))
    num_tokens = max(2, longest[scheme])
    num_sequences = -(-num_tokens // config.context_length)
    micro_batch = ProbeMicroBatch(num_tokens // num_sequences, num_sequences)
    plan = probe_plan(homogeneous[scheme], num_ranks, micro_batch)

    accelerator = get_accelerator()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    run_once(propagator, plan)
    peak = propagator.max_over_ranks(float(accelerator.max_memory_allocated()))
    said = profile.memory.rank_bytes(scheme, num_ranks, micro_batch.num_tokens)
    # Other schemes have more tokens where those of an iteration are the limit.
    most = max(profile.memory.rank_bytes(s, num_ranks, longest[s]) for s in longest)
    is_more = peak > (1 + _PEAK_TOLERANCE) * said
    if is_more and most * peak / said > profile.memory.usable_bytes and propagator.rank == 0:
        logger.warning(
            "scheme %s, micro-batches of %d tokens: %.2f GB at the peak, where the profile says %.2f; should memory "
            "run out, set hydra.memory_limit_bytes to %d",
            scheme, micro_batch.num_tokens, peak / 1e9, said / 1e9,
            profile.memory.usable_bytes * said / peak,
        )  # fmt: skip


def measure_in_rounds(
    cases: Sequence[tuple[_Subject, ProbeMicroBatch]],
    measure_ms: Callable[[_Subject, ProbeMicroBatch], float],
    config: HydraConfig,
    *,
    show_progress: bool,
    warms_up_each: bool,
) -> dict[tuple[_Subject, ProbeMicroBatch], float]:
    """Median over `profiling.repeats` of every (subject, micro-batch), after warming up each
    subject.

    In rounds over all cases, so that a disturbance of some seconds hits every subject alike. A case
    of which two runs agree is not run again: the median of more would lie between them or be as
    good. Warmed up is the longest micro-batch of each subject, whose memory is touched for the
    first time; with `warms_up_each` every micro-batch. On CPUs, whose memory is the process's, it
    is the longest of all, and the shortest of each subject.
    """
    repeats = range(config.profiling.repeats)
    by_length = sorted(cases, key=lambda case: case[1], reverse=not has_device_memory())
    last_of_each = dict(by_length).items()
    of_process = by_length[:1] if not has_device_memory() else []
    warmed_up = cases if warms_up_each else [*dict.fromkeys([*of_process, *last_of_each])]
    total = len(warmed_up) + len(cases) * len(repeats)
    runs_ms: dict[tuple[_Subject, ProbeMicroBatch], list[float]] = {case: [] for case in cases}
    with Progress(total=total, desc="profiling", disable=not show_progress) as progress:
        for subject, micro_batch in warmed_up:
            progress.set_postfix_str(f"{subject} warm-up")
            measure_ms(subject, micro_batch)
            progress.update()
        for _ in repeats:
            for subject, micro_batch in cases:
                progress.set_postfix_str(f"{subject} {micro_batch} tokens")
                times = runs_ms[subject, micro_batch]
                if not _agree(times):
                    times.append(measure_ms(subject, micro_batch))
                progress.update()
    return {case: statistics.median(times) for case, times in runs_ms.items()}


def _agree(times_ms: Sequence[float]) -> bool:
    """Whether the median is that of two runs at least that are as long.

    >>> [_agree(times) for times in ([100.0], [100.0, 118.0], [100.0, 140.0], [100.0, 140.0, 96.0])]
    [False, True, False, True]
    """
    ordered = sorted(times_ms)
    return len(ordered) > 1 and statistics.median(ordered) <= (1 + _AGREEMENT) * ordered[0]


def _measure_memory(
    propagator: Propagator,
    homogeneous: dict[Scheme, Strategy],
    config: HydraConfig,
) -> dict[str, Any]:
    """The profile without its times: hardware, model, and activation bytes of every TP degree.

    Measured with short micro-batches under the deepest pipeline of each degree, which needs the
    least memory; without sequence parallelism where there is a choice, never with context
    parallelism.
    """
    last_wins = sorted(homogeneous, key=lambda s: (-s.cp, -s.sp, s.pp))
    # What autograd keeps in attention over rows is not seen from outside
    deepest = {s.tp: replace(s.without_options(), cp=1) for s in last_wins}
    propagator.prepare(Strategy.alike(s, propagator.num_ranks) for s in deepest.values())
    has_device = has_device_memory()
    length = min(config.context_length, _LONG_TOKENS if has_device else _SHORT_TOKENS)
    stage_model = propagator.stage_model
    activation = {}
    model = describe_model(stage_model)
    key_value_share, heads = read_key_value_share(model), model.get("num_attention_heads", 0)
    has_copies = config.deterministic and has_device and keeps_copies(config.attention)
    ordered = count_multiprocessors() if has_copies else 0
    for tp, scheme in sorted(deepest.items()):
        # Without the scheme's options: what a layer keeps that is not checkpointed.
        plain = Strategy.alike(scheme, propagator.num_ranks)
        num_bytes = token_bytes(propagator, plain, length)
        share = activation_share(scheme, key_value_share)
        num_bytes -= ordered_share(scheme, ordered, heads) * stage_model.hidden_size
        a_layer = max(1e-6, num_bytes) / (share * stage_model.num_layers * stage_model.hidden_size)
        activation[str(tp)] = a_layer
    hosts = propagator.hosts
    hardware = describe_hardware(len(hosts.ranks_beside(propagator.rank)))
    document = {
        "schema": PROFILE_SCHEMA,
        "source": f"measured on {propagator.num_ranks} ranks",
        "hardware": {
            **hardware,
            **(_reserved(propagator, hardware) if has_device else {}),
            "devices_per_node": propagator.links.devices_per_node,
            "ranks_per_core": find_ranks_per_core(hosts, propagator.device),
        },
        "model": model,
        "dtype": dtype_of(stage_model),
        "tp_sequence_parallel": stage_model.tp.cuts_micro_batches,
        "activation_checkpointing": config.activation_checkpointing,
        "compile_layers": config.compile_layers,
        "deterministic": config.deterministic,
        "float8": config.float8,
        "offload_optimizer": stage_model.offloads_optimizer,
        "memory": {
            "activation_source": "peak memory" if has_device else "tensors kept for backward",
            "activation_bytes_per_token_per_layer_per_hidden": activation,
            "ordered_multiprocessors": ordered,
            "logit_chunk_bytes": logit_chunk_bytes(stage_model, propagator.device),
            **state_memory(stage_model),
        },
        "schemes": [],
    }
    return _agree_on_memory(propagator, document)


def _agree_on_memory(propagator: Propagator, document: dict[str, Any]) -> dict[str, Any]:
    """`document` of rank 0 on every rank, with the memory of the rank that has least: what all
    measure together follows from it. Collective over all ranks.
    """
    least = {
        key: int(-propagator.max_over_ranks(-float(document["hardware"][key])))
        for key in ("memory_bytes", "safety_margin_bytes")
    }
    (text,) = broadcast_text([json.dumps(document)], 0, propagator.device)
    of_first: dict[str, Any] = json.loads(text)
    return {**of_first, "hardware": {**of_first["hardware"], **least}}


def _lengths_that_fit(
    propagator: Propagator, schemes: Sequence[Scheme], model: dict[str, Any], config: HydraConfig
) -> dict[Scheme, tuple[int, ...]]:
    """Lengths to measure under each scheme: those up to its MaxLen, with MaxLen in place of the
    first above it.

    Schemes that fit too little for two lengths are left out of the profile.
    """
    memory = fit_memory(model, config).memory
    wanted = config.profiling.lengths or default_lengths(config.context_length)
    fitting = {}
    for scheme in schemes:
        longest = memory.max_len_tokens(scheme, propagator.num_ranks)
        lengths = tuple(sorted({min(length, longest) for length in wanted}))
        if longest >= 2 and len(lengths) >= 2:
            fitting[scheme] = lengths
    if not fitting:
        raise HydraConfigError(
            f"no scheme of {', '.join(map(str, schemes))} has memory for micro-batches of {wanted[0]} tokens within "
            f"{memory.memory_bytes / 1e6:,.0f} MB of a rank; raise hydra.memory_limit_bytes, or start more ranks"
        )
    return fitting


def default_lengths(context_length: int) -> tuple[int, ...]:
    """Powers of four up to the context, and the context: the quadratic term shows at the long
    end.
    """
    lengths = [length for length in (64, 256, 1024, 4096, 16384, 65536) if length < context_length]
    return (
        (*lengths[-4:], context_length)
        if lengths
        else (max(2, context_length // 2), context_length)
    )


def _probe_micro_batches(lengths: Sequence[int]) -> list[ProbeMicroBatch]:
    """One sequence of each of `lengths`, and a packed micro-batch of as many tokens as the longest.

    >>> one = _probe_micro_batches((64, 256, 1024, 4096))
    >>> [str(micro_batch) for micro_batch in one]
    ['64', '256', '1024', '4096', '16 x 256']
    >>> [str(micro_batch) for micro_batch in _probe_micro_batches((300, 400))]
    ['300', '400']
    """
    longest = max(lengths)
    short = [length for length in lengths if longest // length >= _FEWEST_PACKED]
    packed = [ProbeMicroBatch(max(short), longest // max(short))] if short else []
    return [*map(ProbeMicroBatch, lengths), *packed]


def probe_plan(
    strategy: Strategy,
    num_ranks: int,
    micro_batch: ProbeMicroBatch,
    num_micro_batches: int | None = None,
) -> IterationPlan:
    """The plan in which every pipeline runs `num_micro_batches` (PP if None) like `micro_batch`."""
    pipelines = []
    count = 0
    for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
        num_sequences = (num_micro_batches or scheme.pp) * micro_batch.num_sequences
        begins = range(count, count + num_sequences, micro_batch.num_sequences)
        micro_batches = tuple(
            tuple(range(begin, begin + micro_batch.num_sequences)) for begin in begins
        )
        count += num_sequences
        pipelines.append(
            PipelinePlan(
                scheme=scheme,
                ranks=ranks,
                micro_batches=micro_batches,
                rows=cut_micro_batches(micro_batches, [micro_batch.length] * count, scheme.cp),
                makespan_ms=0.0,
                lower_bound_ms=0.0,
            )
        )
    return IterationPlan(
        iteration=0,
        num_devices=num_ranks,
        strategy=strategy,
        sample_indices=tuple(range(count)),
        lengths=(micro_batch.length,) * count,
        num_label_tokens=count * (micro_batch.length - 1),
        pipelines=tuple(pipelines),
        makespan_ms=0.0,
        lower_bound_ms=0.0,
    )


def measure_stage_ms(
    propagator: Propagator,
    strategy: Strategy,
    micro_batch: ProbeMicroBatch,
    *,
    at_begin: Callable[[], None] | None = None,
) -> float:
    """Milliseconds of a stage, of the slowest rank, for one `micro_batch`; `at_begin` as in
    `Propagator.time_propagation`.
    """
    plan = probe_plan(strategy, propagator.num_ranks, micro_batch)
    example = probe_example(propagator.stage_model.vocab_size, micro_batch.length)
    total_ms = propagator.time_propagation(plan, lambda _: example, at_begin=at_begin)
    return total_ms / (2 * strategy.schemes[0].pp - 1)


def has_device_memory() -> bool:
    """Whether peak memory can be read from the accelerator; a CPU's would be that of the whole
    process.
    """
    return str(get_accelerator().device_name()) != "cpu"


def token_bytes(propagator: Propagator, strategy: Strategy, length: int) -> float:
    """Bytes of activations that one more token of a micro-batch costs a rank, embedding and head
    included.

    By the growth of peak memory of the passes between micro-batches of `length` / 2 and `length`
    tokens, fewer where these might not fit, which leaves weights and the pull out; on a CPU by
    counting what autograd keeps. Collective, the most of any rank.
    """
    if has_device_memory():
        found = _growth(propagator, strategy, min(length, _SHORT_TOKENS))
        accelerator = get_accelerator()
        free = accelerator.total_memory() - accelerator.memory_allocated()
        has_room = found * length <= _ROOM_SHARE * -propagator.max_over_ranks(-float(free))
        # What kernels and allocator round up to is a large part of few tokens.
        is_longer = length > _SHORT_TOKENS and has_room
        return _growth(propagator, strategy, length) if is_longer else found
    with _count_saved_bytes() as counted:
        measure_stage_ms(propagator, strategy, ProbeMicroBatch(length))
    # Autograd keeps views of weights, which are not activations.
    for address in propagator.links.weight_addresses():
        counted.pop(address, None)
    return propagator.max_over_ranks(sum(counted.values())) / length


def _growth(propagator: Propagator, strategy: Strategy, length: int) -> float:
    short = max(1, length // 2)
    grown = _peak_bytes(propagator, strategy, length) - _peak_bytes(propagator, strategy, short)
    return max(1.0, grown / max(1, length - short))


def _peak_bytes(propagator: Propagator, strategy: Strategy, length: int) -> float:
    """Peak bytes of the passes alone: buffers of a pull exceed those of a short micro-batch."""
    accelerator = get_accelerator()
    accelerator.empty_cache()
    measure_stage_ms(
        propagator,
        strategy,
        ProbeMicroBatch(length),
        at_begin=accelerator.reset_peak_memory_stats,
    )
    return propagator.max_over_ranks(float(accelerator.max_memory_allocated()))


@contextmanager
def _count_saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps, parameters left out, by address."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
