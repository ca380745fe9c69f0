"""Simulated workloads, a model and the lengths of its data on so many devices; and named cases of
them, such as those of the paper, with what was published about them. A model without a profile gets
one by its config.json, on described hardware, without a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ds_hydra.configs import find_file, list_files
from ds_hydra.configs.files import read_json_object, reading
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_latency, predict_profile
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.cost_models.decoder import read_decoder
from ds_hydra.strategy.cost_models.flops import ModelFlops, describe_config, expert_parallel_schemes
from ds_hydra.strategy.profiles.profile import Profile, engine_states, expert_memory
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import check_context
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

_ELEMENT_BYTES = 2


def estimate_from_config(
    model: str,
    hardware_name: str,
    num_devices: int,
    context_length: int,
    expert_skew: float = 1.0,
    config: Mapping[str, Any] | None = None,
    *,
    float8: bool = False,
) -> tuple[Profile, tuple[str, ...]]:
    """Profile of `model` (a shipped preset, the path of a config.json, or any name of a `config`
    that is known) on the named hardware, and what it assumes, one sentence each. With experts it
    has schemes with ep, too, on whose busiest rank experts get `expert_skew` times the mean of
    tokens. With `float8` linear layers multiply in 8 bits.

    Raises HydraConfigError naming what of the model cannot be described.
    """
    path = find_file("models", model) if config is None else Path(model)
    config = read_json_object(path) if config is None else config
    shape, heads = describe_config(config, str(path))
    decoder = read_decoder(config, str(path))
    source = find_file("hardware", hardware_name)
    described = read_json_object(source)
    hardware = Hardware.from_json(described, source=str(source))
    means = shape.means
    params = means.params / shape.hidden_size**2
    schemes = [
        s
        for s in power_of_two_schemes(num_devices)
        if heads % s.tp == 0 and s.pp <= shape.num_layers
    ]
    schemes += expert_parallel_schemes(shape, heads, num_devices)
    document = predict_profile(
        shape,
        hardware,
        schemes,
        name=path.parent.name if path.name == "config.json" else path.name.removesuffix(".json"),
        memory={
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): shape.activation_bytes(tp) for tp in {scheme.tp for scheme in schemes}
            },
            **engine_states(params, _ELEMENT_BYTES),
            **expert_memory(means.expert_params / means.params),
        },
        context_length=context_length,
        expert_skew=expert_skew,
        float8=float8,
    )
    document["float8"] = "rowwise" if float8 else None
    document["tp_sequence_parallel"] = True
    document["model"]["flops"] = ModelFlops.of_decoder(decoder).to_json()
    document["model"]["parameters"] = decoder.size.to_json()
    document["model"]["num_attention_heads"] = heads
    document["model"]["num_key_value_heads"] = round(heads * shape.key_value_share)
    reached = described["efficiency"]
    assumed = [
        *(f"model: {sentence}" for sentence in decoder.unpriced),
        f"T: roofline of {hardware.name}, {reached['matmul']:.0%} of its peak in matmuls, "
        f"{reached['attention']:.0%} in attention ({described.get('source', 'no source given')})",
        "MFU: those shares are a ceiling of it; left out are P2P between stages, imbalance of experts without ep, slow "
        "devices, contention and loading of data, so that a run has less",
        f"memory: {shape.kept_bytes:.3g} + 1.5 TP bytes a token, layer and hidden unit, of recomputed layers inputs "
        "in shards of TP groups, the engine's states, an eighth left free",
    ]
    if float8:
        one = Scheme(1, 1)
        ms, plain_ms = (
            predict_latency(shape, hardware, one, float8=f).micro_batch_ms([context_length])
            for f in (True, False)
        )
        assumed.append(
            "8-bit products: an estimate. Linear layers of decoder layers reach the same share of the 8-bit peak as of "
            "the 16-bit one, of which MFU is, and casts move 8 bytes for each number; head, attention and experts that "
            f"tokens choose from stay in 16 bit. T of {context_length:,} tokens under <1,1> is {ms / plain_ms:.2f} of "
            "that in 16 bit"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        assumed.append("attention: over the whole sequence, though the model has a sliding window")
    if shape.experts is not None:
        assumed.append(
            f"experts: {shape.experts.chosen} of {shape.experts.num} for a token; with ep the busiest rank's get "
            f"{expert_skew:g} times the mean of tokens (--expert-skew)"
        )
    return Profile.from_json(document), tuple(assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(World):
    """Simulated workload: a model on so many devices, and the lengths of its data."""

    name: str
    histogram: LengthHistogram
    tokens_per_iteration: int
    strategies: tuple[Strategy, ...] = ()
    """Candidates of ds_hydra, proposed from the histogram where empty."""
    plain_strategies: tuple[Strategy, ...] = ()
    """Strategies that a paper names, of <TP,PP>, for the rows of <TP,PP> alone."""
    own_profile: Profile | None = None
    """Profile of ds_hydra in place of `profile`, if not the same with the engine's states."""


def check_workload(workload: Workload, *, is_plain: bool = True) -> None:
    """Raise HydraConfigError for a context that nothing fits, or a strategy that has no place in
    the cluster.
    """
    if is_plain:
        check_context(workload)
    if workload.tokens_per_iteration < workload.context_length:
        raise HydraConfigError(
            f"{workload.tokens_per_iteration} tokens per iteration are fewer than one sequence of the context, "
            f"{workload.context_length}; raise --tokens to {workload.context_length} or more"
        )
    for strategy in (*workload.strategies, *workload.plain_strategies):
        if strategy.num_devices > workload.num_devices:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} devices, there are {workload.num_devices}"
            )


def draw_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, count: int, seed: int
) -> tuple[GlobalBatch, ...]:
    """`count` mini-batches drawn from `histogram`, the same for the same arguments."""
    drawn = histogram.draw_batches(tokens_per_iteration, count, seed)
    return tuple(
        GlobalBatch.of_lengths(lengths.tolist(), number) for number, lengths in enumerate(drawn)
    )


CASES_SCHEMA = "ds_hydra.cases/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One published figure: its kind, its value as text, and the name of ours
    (`report.metrics`).
    """

    what: str
    paper: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One named workload and the figures published for it; `figure` is where they stand."""

    name: str
    figure: str
    workload: Workload
    expected: tuple[Expected, ...]


def list_cases() -> tuple[str, ...]:
    """Names of all shipped cases, `paper/commoncrawl-32b-64gpu-f2` and so on."""
    return tuple(f"{group}/{name}" for group in list_files("cases") for name in _read_group(group))


def load_case(name: str) -> Case:
    """The shipped case `name`; raises HydraConfigError with the nearest names for one that is not
    known.
    """
    names = list_cases()
    if name not in names:
        nearest = get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(nearest)}? " if nearest else ""
        raise HydraConfigError(
            f"case {name!r} is not known; {hint}ds-hydra simulate --list-cases shows all {len(names)}"
        )
    group, short = name.split("/", 1)
    return _read_case(name, _read_group(group)[short])


def _read_group(group: str) -> Mapping[str, Mapping[str, Any]]:
    document = read_json_object(find_file("cases", group))
    with reading(document, CASES_SCHEMA, f"cases {group!r}"):
        cases: Mapping[str, Mapping[str, Any]] = document["cases"]
    return cases


_FIELDS = (
    "figure", "histogram", "num_devices", "context_length", "tokens_per_iteration", "expected",
)  # fmt: skip


def _read_case(name: str, document: Mapping[str, Any]) -> Case:
    missing = [field for field in _FIELDS if field not in document]
    if "profile" not in document:
        missing += [field for field in ("model", "hardware") if field not in document]
    if missing:
        raise HydraConfigError(
            f"case {name!r} lacks {', '.join(missing)}"
            + ("; a case has a profile, or a model and hardware" if "model" in missing else "")
        )
    histogram = LengthHistogram.load(find_file("lengths", document["histogram"]))
    context_length = document["context_length"]
    return Case(
        name=name,
        figure=document["figure"],
        workload=Workload(
            name=name,
            costs=Costs(_profile(document)),
            histogram=histogram.limit(context_length, document.get("over_length", "truncate")),
            num_devices=document["num_devices"],
            context_length=context_length,
            tokens_per_iteration=document["tokens_per_iteration"],
            plain_strategies=parse_strategies(document.get("plain_strategies", ())),
        ),
        expected=tuple(Expected(**expected) for expected in document["expected"]),
    )


def _profile(document: Mapping[str, Any]) -> Profile:
    """The published one, or a roofline's."""
    if "profile" in document:
        return Profile.load(find_file("profiles", document["profile"]))
    estimated, _ = estimate_from_config(
        document["model"],
        document["hardware"],
        document["num_devices"],
        document["context_length"],
    )
    return estimated
