"""Profile of one model on one kind of hardware: latency and memory of every scheme.

One profile is one JSON file (schema `ds_hydra.profile/1`). Lengths are tokens, times milliseconds,
sizes bytes. Source of both models: Hydraulis, App. B.

Coefficients come from measured times by non-negative least squares on T(l) = a l^2 + b l + c
(`fit_latency`).

[Note: Bytes of states]
The published constants of App. B.1 count 16.6 to 17.4 bytes a parameter. The engine has its own
account: 16-bit shards and slices, fp32 master, moments and gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hydra.configs.files import (
    LARGEST,
    MAX_DEVICES,
    MAX_LENGTH_TOKENS,
    check_count,
    check_number,
    check_object,
    find_profile,
    read_count,
    read_json_object,
    read_list,
    read_number,
    read_object,
    reading,
)
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.memory_model import GRADIENT_BYTES, OPTIMIZER_BYTES, MemoryModel
from ds_hydra.strategy.schemes.scheme import (
    FORWARD_FRACTION,
    Scheme,
    slowest_stage_ratios,
)

PROFILE_SCHEMA = "ds_hydra.profile/1"


_LARGEST_COUNT = 1 << 32
"""Beyond this a count, or bytes of a number, are damaged, and arithmetic would overflow."""

_OPTIONAL_MEMORY = {
    "slice_bytes": ("slice_bytes_per_layer_per_hidden2", _LARGEST_COUNT),
    "input_bytes": ("input_bytes_per_token_per_layer_per_hidden", _LARGEST_COUNT),
    "exchange_bytes": ("exchange_bytes", LARGEST),
    "expert_fraction": ("expert_fraction", 1),
    "vocabulary_tables": ("vocabulary_tables", _LARGEST_COUNT),
    "ordered_multiprocessors": ("ordered_multiprocessors", _LARGEST_COUNT),
    "logit_chunk_bytes": ("logit_chunk_bytes", LARGEST),
}
"""Fields of the memory model that a profile may leave out: keys and largest values, which are 0
where it does.
"""

_VOCABULARY_TOLERANCE = 0.05
"""Share by which the vocabulary of a profile may differ from the model's: it only moves MaxLen a
little.
"""

_CHANGES = {
    "float8": "times",
    "activation_checkpointing": "time and memory of layers",
    "compile_layers": "time and memory of layers",
}
"""Keys of "hydra" that change a measured profile, and the part that they change."""

_HALF_OVER_THIRD = (1 / 2) / FORWARD_FRACTION

WHOLE_TOKENS = 2048
"""Tokens up to which sequences count as whole under CP: their keys stay where they are. With it
plans of the published profiles take as long as by the sequences that `cut_micro_batch` cuts.
"""


_OPTIONAL = ("traffic_ms", "hidden_ms", "exchange_ms", "hpz_traffic_ms")
"""Coefficients that documents leave out where they are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """T(l, P) = a l^2 + b l + c (App. B.2): forward + backward of ONE stage, one micro-batch of one
    sequence.

    A packed micro-batch of lengths l_i costs sum(a l_i^2 + b l_i) + c, and `traffic_ms` at least:
    what gathered layers move for every micro-batch, beside its computation. `exchange_ms` e
    and `hidden_ms` h of a token travel beside the attention of its sequence, which takes (e + h) l
    at least: heads under SP, and keys and values under CP of sequences above `WHOLE_TOKENS`. Left
    out: P2P between stages.
    """

    quadratic_ms: float
    linear_ms: float
    constant_ms: float
    traffic_ms: float = 0.0
    hidden_ms: float = 0.0
    exchange_ms: float = 0.0
    hpz_traffic_ms: float = 0.0
    """`traffic_ms` where gathered weights stay on the node (`hpz`), where that is less."""

    def sequence_ms(self, length_tokens: int) -> float:
        """b l + max(a l^2, (e + h) l), the part of T that adds up over the sequences of a packed
        micro-batch.
        """
        hidden_ms = self.hidden_ms if length_tokens > WHOLE_TOKENS else 0.0
        attention = max(self.quadratic_ms * length_tokens, self.exchange_ms + hidden_ms)
        return (attention + self.linear_ms) * length_tokens

    def sequences_ms(self, lengths_tokens: NDArray[Any]) -> NDArray[np.float64]:
        """The same for each of `lengths_tokens`."""
        tokens = lengths_tokens.astype(np.float64)
        hidden_ms = np.where(tokens > WHOLE_TOKENS, self.hidden_ms, 0.0)
        attention = np.maximum(self.quadratic_ms * tokens, self.exchange_ms + hidden_ms)
        return np.array((attention + self.linear_ms) * tokens, dtype=np.float64)

    def micro_batch_ms(self, lengths_tokens: Iterable[int]) -> float:
        """Time of one stage for one packed micro-batch; 0.0 for a micro-batch without sequences."""
        lengths = tuple(lengths_tokens)
        return max(self.computed_ms(lengths), self.traffic_ms) if lengths else 0.0

    def computed_ms(self, lengths_tokens: Iterable[int]) -> float:
        """The part of it that does not wait for traffic."""
        # Sequences may add nothing to the constant, where all that was measured took as long.
        own_ms = [self.sequence_ms(length) for length in lengths_tokens]
        return sum(own_ms) + self.constant_ms if own_ms else 0.0

    def scaled(self, ratio: float, of_attention: float | None = None) -> LatencyModel:
        """T of `ratio` times the computation, `of_attention` times that of attention (None: as
        often), with the same traffic. Where attention does not run again, nothing hides the heads
        that recomputation exchanges; keys are gathered as often as without.
        """
        own = ratio if of_attention is None else of_attention
        # Forward is a third of computation, and half of what heads travel
        seen_ms = _HALF_OVER_THIRD * (ratio - own) * self.exchange_ms
        return LatencyModel(
            quadratic_ms=own * self.quadratic_ms,
            linear_ms=ratio * self.linear_ms + seen_ms,
            constant_ms=ratio * self.constant_ms,
            traffic_ms=self.traffic_ms,
            hidden_ms=own * self.hidden_ms,
            exchange_ms=own * self.exchange_ms,
            hpz_traffic_ms=self.hpz_traffic_ms,
        )

    def shared(self, num_ranks: int) -> LatencyModel:
        """T of a micro-batch that `num_ranks` ranks share without communication."""
        return replace(
            self,
            quadratic_ms=self.quadratic_ms / num_ranks,
            linear_ms=self.linear_ms / num_ranks,
            exchange_ms=self.exchange_ms / num_ranks,
        )

    def plus(self, more: LatencyModel | None) -> LatencyModel:
        """T with the linear and constant part of `more` added."""
        if more is None:
            return self
        return replace(
            self,
            linear_ms=self.linear_ms + more.linear_ms,
            constant_ms=self.constant_ms + more.constant_ms,
        )

    @property
    def on_nodes(self) -> LatencyModel:
        """T of gathered layers whose weights stay on the node."""
        return replace(self, traffic_ms=self.hpz_traffic_ms or self.traffic_ms, hpz_traffic_ms=0.0)

    def to_json(self) -> dict[str, float]:
        """The coefficients by name, those of `_OPTIONAL` where there are any."""
        return {name: ms for name, ms in asdict(self).items() if ms or name not in _OPTIONAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Latency of every profiled scheme, the memory model, and UtilLen per TP degree."""

    name: str
    latency: Mapping[Scheme, LatencyModel]
    memory: MemoryModel
    saturation_tokens: Mapping[int, int]
    document: Mapping[str, Any]
    """The JSON document this profile was read from (source, hardware and model names,
    interconnects).
    """
    overlap_slowdown: float | None = None
    """Slowdown of computation and gradient synchronisation beside each other; None: not
    known.
    """
    ranks_per_core: float = 1.0
    """Ranks that shared a core while it was measured (`sampler.schedule.ends_ms`)."""
    _max_len: dict[tuple[Scheme, int], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def get_latency(self, scheme: Scheme) -> LatencyModel:
        """T(., scheme), that of a scheme with options derived from <TP,PP> where nobody has
        measured it.

        Raises HydraConfigError naming the schemes that were profiled.
        """
        if scheme in self.latency:
            return self.latency[scheme]
        even, plain = replace(scheme, stages=(), ckpt=0), scheme.without_options()
        if scheme.hpz and even not in self.latency:
            return self.get_latency(scheme.crossing).on_nodes
        # Of gathered layers where the profile has those
        base = self.latency.get(even, self.latency.get(plain))
        if base is not None:
            return base.scaled(*slowest_stage_ratios(scheme, self.memory.num_layers))
        wanted = (
            scheme if scheme == plain else f"{scheme}, and {plain} from which it could be derived,"
        )
        raise HydraConfigError(
            f"scheme {wanted} is not in profile {self.name!r}, which has "
            f"{', '.join(str(known) for known in sorted(self.latency))}; profile it or remove it from "
            "hydra.strategies"
        )

    @property
    def assumed(self) -> frozenset[Scheme]:
        """Schemes among `latency` whose times nobody measured: estimated, or derived from another
        scheme.
        """
        entries = (e for e in self.document["schemes"] if e.get("estimated") or "derived_from" in e)
        return frozenset(Scheme.from_json(entry) for entry in entries)

    def entry_of(self, scheme: Scheme) -> Scheme | None:
        """The entry that T of `scheme` is, or follows from where the planner lets gathered weights
        stay on the node; None for others.
        """
        return next((s for s in (scheme, scheme.crossing) if s in self.latency), None)

    def max_len_tokens(self, scheme: Scheme, num_devices: int) -> int:
        """MaxLen(scheme) on a cluster of `num_devices`."""
        key = (scheme, num_devices)
        if key not in self._max_len:
            self._max_len[key] = self.memory.max_len_tokens(scheme, num_devices)
        return self._max_len[key]

    def has_room(self, scheme: Scheme, num_devices: int) -> bool:
        """Whether `scheme` can be on a cluster of `num_devices`: a micro-batch of one token
        fits.
        """
        return scheme.num_devices <= num_devices and self.max_len_tokens(scheme, num_devices) > 0

    def forward_only(self, fraction: float, *, holds_longer: bool) -> Profile:
        """The profile of passes without backward: `fraction` of each T, and where a layer's
        activations are known (`holds_longer`) MaxLen of such a pass. Not to be saved: its document
        is that of training.
        """
        # Weights of one forward pass cross once in any case
        latency = {
            scheme: replace(model.scaled(fraction), hpz_traffic_ms=0.0)
            for scheme, model in self.latency.items()
        }
        memory = replace(self.memory, forward_only=holds_longer)
        return replace(self, latency=latency, memory=memory)

    @property
    def is_checkpointed(self) -> bool:
        """Whether all layers of the measured model are checkpointed."""
        return bool(self.document.get("activation_checkpointing"))

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a dense model."""
        return int((self.document["model"].get("experts") or {}).get("num", 0))

    def check_model(
        self, *, num_layers: int, hidden_size: int, vocab_size: int, num_experts: int = 0
    ) -> None:
        """Raise HydraConfigError if the profile belongs to another model than the one described.

        A vocabulary may differ by `_VOCABULARY_TOLERANCE`, as padded and unpadded ones do.
        """
        wanted = {"num_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
        found = {name: getattr(self.memory, name) for name in wanted}
        wanted["num_experts"], found["num_experts"] = num_experts, self.num_experts
        differing = [name for name in wanted if found[name] != wanted[name]]
        is_padded = abs(found["vocab_size"] - vocab_size) <= _VOCABULARY_TOLERANCE * vocab_size
        if differing and not (differing == ["vocab_size"] and is_padded):
            named = ", ".join(f"{n} {found[n]} instead of {wanted[n]}" for n in differing)
            raise HydraConfigError(
                f"profile {self.name!r} is of another model: {named}; give the profile of this model in "
                "hydra.profile, or remove it to measure one at the start"
            )

    def check_config(self, hydra: HydraConfig, dtype: str, *, cuts_micro_batches: bool) -> None:
        """Raise HydraConfigError if the profile says that it was measured with other values of the
        keys `_CHANGES`, in a type of another size than `dtype`, as "bfloat16", or with TP ranks
        that do not share micro-batches as the model's do (`cuts_micro_batches`).

        What it does not say passes, as in published ones; but it has `float8` where it says so
        alone.
        """
        was_cut = self.document.get("tp_sequence_parallel", cuts_micro_batches)
        if was_cut != cuts_micro_batches and any(scheme.tp > 1 for scheme in self.latency):
            raise HydraConfigError(
                f"profile {self.name!r} was measured with tp_sequence_parallel {json.dumps(was_cut)}, and TP ranks of "
                f"this model have {'shards of' if cuts_micro_batches else 'whole'} micro-batches between blocks, which "
                "changes time and memory under TP; measure anew (ds-hydra profile, or remove hydra.profile)"
            )
        for key, changes in _CHANGES.items():
            wanted = getattr(hydra, key)
            found = self.document.get(key, None if key == "float8" else wanted)
            if found != wanted:
                value = f" {wanted}" if key == "float8" else ""
                option = f" --{key.replace('_', '-')}{value}" if wanted else ""
                raise HydraConfigError(
                    f"profile {self.name!r} was measured with hydra.{key} {json.dumps(found)}, and it is "
                    f"{json.dumps(wanted)}, which changes {changes}; set hydra.{key} to {json.dumps(found)}, or "
                    f"measure anew (ds-hydra profile{option}, or remove hydra.profile)"
                )
        measured = str(self.document.get("dtype") or dtype)
        if ("32" in measured) != ("32" in dtype):
            option = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
            raise HydraConfigError(
                f"profile {self.name!r} was measured in {measured}, and the model trains in {dtype}, which takes "
                f"another time and memory; measure anew (ds-hydra profile --dtype {option}, or remove hydra.profile), "
                "or change bf16.enabled or fp16.enabled of the DeepSpeed config"
            )

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str = "profile") -> Profile:
        """The profile in a `ds_hydra.profile/1` document; raises HydraConfigError naming the
        error.
        """
        with reading(document, PROFILE_SCHEMA, source):
            hardware = {"devices_per_node": 8, "host_bytes": 0, **read_object(document, "hardware")}
            model = read_object(document, "model")
            memory = read_object(document, "memory")
            per_tp = read_object(memory, "activation_bytes_per_token_per_layer_per_hidden")
            saturation = read_object({"saturation_tokens": {}, **document}, "saturation_tokens")
            _check_model(model)
            optional: dict[str, Any] = {
                name: check_number(memory.get(key, 0), key, most=most)
                for name, (key, most) in _OPTIONAL_MEMORY.items()
            }
            known = MemoryModel(
                num_layers=read_count(model, "num_layers", least=1, most=_LARGEST_COUNT),
                hidden_size=read_count(model, "hidden_size", least=1, most=_LARGEST_COUNT),
                vocab_size=read_count(model, "vocab_size", most=_LARGEST_COUNT),
                activation_bytes={
                    int(tp): read_number(per_tp, tp, least=1e-6, most=_LARGEST_COUNT)
                    for tp in per_tp
                },
                state_bytes=read_number(memory, "state_bytes_per_layer_per_hidden2", least=0),
                sharded_fraction=read_number(memory, "sharded_fraction", least=0, most=1),
                memory_bytes=int(read_number(hardware, "memory_bytes", least=0)),
                reserved_bytes=int(read_number(hardware, "reserved_bytes", least=0)),
                safety_margin_bytes=int(read_number(hardware, "safety_margin_bytes", least=0)),
                tp_sequence_parallel=document.get("tp_sequence_parallel", False),
                devices_per_node=read_count(
                    hardware, "devices_per_node", least=1, most=MAX_DEVICES
                ),
                key_value_share=read_key_value_share(model),
                num_heads=model.get("num_attention_heads") or 0,
                attention_width=_read_attention_width(model),
                host_bytes=read_number(hardware, "host_bytes", least=0) or inf,
                **optional,
            )
            if type(known.tp_sequence_parallel) is not bool:
                raise HydraConfigError(
                    f"tp_sequence_parallel is {known.tp_sequence_parallel!r:.80}, expected true or false"
                )
            return cls(
                name=f"{model['name']} on {hardware['name']}",
                latency={
                    Scheme.from_json(entry): _read_latency(entry)
                    for entry in read_list(document, "schemes")
                },
                memory=known,
                saturation_tokens={
                    int(tp): read_count(saturation, tp, least=1, most=MAX_LENGTH_TOKENS)
                    for tp in saturation
                },
                document=document,
                overlap_slowdown=_read_ratio(hardware, "overlap_slowdown"),
                ranks_per_core=_read_ratio(hardware, "ranks_per_core") or 1.0,
            )

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile in the JSON file `path`."""
        return cls.from_json(read_json_object(path), source=str(path))


def _read_latency(entry: Mapping[str, Any]) -> LatencyModel:
    given = {**dict.fromkeys(_OPTIONAL, 0), **entry}
    found = LatencyModel(
        **{f.name: read_number(given, f.name, least=0) for f in fields(LatencyModel)}
    )
    if not (found.quadratic_ms or found.linear_ms or found.constant_ms):
        raise HydraConfigError(
            f"all latency coefficients of {Scheme.from_json(entry)} are 0, expected one above 0; measure it anew"
        )
    return found


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise HydraConfigError for what `model` says besides the sizes of the memory model, if it is
    of another kind; what is null is not said.
    """
    model = {key: value for key, value in model.items() if value is not None}
    heads = model.get("num_attention_heads", _LARGEST_COUNT)
    for key, least, most in (
        ("intermediate_size", 1, _LARGEST_COUNT),
        ("num_attention_heads", 1, _LARGEST_COUNT),
        ("num_key_value_heads", 1, heads),
        ("attention_width", 0, _LARGEST_COUNT),
    ):
        check_count(model.get(key, least), key, least=least, most=most)
    for key in ("layer", "parameters"):
        check_object(model.get(key, {}), key)
    if not model.get("experts"):
        return
    experts = {"shared_size": 0, "layer_share": 1.0, **read_object(model, "experts")}
    num = read_count(experts, "num", least=1, most=1 << 20)
    read_count(experts, "chosen", least=1, most=num)
    for key in ("size", "shared_size"):
        read_count(experts, key, most=_LARGEST_COUNT)
    read_number(experts, "layer_share", least=0, most=1)


def _read_attention_width(model: Mapping[str, Any]) -> float:
    """Features of all attention heads, the mean of all layers; 0.0 where `model` does not say."""
    width = {**model, **(model.get("layer") or {})}.get("attention_width")
    return check_number(width or 0, "attention_width")


def read_key_value_share(model: Mapping[str, Any]) -> float:
    """Key-value heads a query head; 1.0 where `model` does not say."""
    heads, kv_heads = model.get("num_attention_heads"), model.get("num_key_value_heads")
    return float(kv_heads / heads) if heads and kv_heads else 1.0


def _read_ratio(hardware: Mapping[str, Any], key: str) -> float | None:
    value = hardware.get(key)
    return None if value is None else check_number(value, f"hardware.{key}", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Time of one pull and one push on the slowest node, and of the optimizer and the host beside
    it, in ms; 0.0 where unknown.
    """

    pull_ms: float = 0.0
    push_ms: float = 0.0
    step_ms: float = 0.0

    def at_ends(self, pulls: bool, pushes: bool) -> LinkTimes:
        """Times of a phase that pulls, or pushes, something that no other phase does for it."""
        pull_ms, push_ms = pulls * self.pull_ms, pushes * self.push_ms
        return LinkTimes(pull_ms=pull_ms, push_ms=push_ms, step_ms=self.step_ms)


NO_LINKS = LinkTimes()

FloatArray = NDArray[np.float64]

_SATURATION = 0.85
"""UtilLen(P) is the micro-batch length at which P reaches this share of its best tokens/s (App. C).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """Fitted model, its relative residual at every measured length, and R^2 of the times."""

    model: LatencyModel
    lengths_tokens: tuple[int, ...]
    relative_residuals: tuple[float, ...]
    r_squared: float


def fit_latency(
    lengths_tokens: Sequence[int],
    times_ms: Sequence[float],
    num_sequences: Sequence[int] | None = None,
) -> LatencyFit:
    """Coefficients >= 0 that minimise the squared relative error of T for the measured
    micro-batches.

    Micro-batch i packs `num_sequences[i]` sequences (1 if not given) of `lengths_tokens[i]` tokens
    each.

    Relative, because a plan is made of micro-batches of all lengths. With three unknowns the exact
    non-negative optimum is the best unconstrained fit over all subsets of terms whose coefficients
    come out >= 0. Raises ValueError for fewer than two different lengths or times that are not
    positive.
    """
    lengths = np.asarray(lengths_tokens, dtype=np.float64)
    times = np.asarray(times_ms, dtype=np.float64)
    if len(set(lengths.tolist())) < 2 or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(
            f"need positive, finite times at two lengths or more, got {times_ms} at {lengths_tokens}"
        )
    counts = (
        np.ones_like(lengths)
        if num_sequences is None
        else np.asarray(num_sequences, dtype=np.float64)
    )
    terms = (
        np.stack([counts * lengths**2, counts * lengths, np.ones_like(lengths)], axis=1)
        / times[:, None]
    )
    # Rows are divided by their times, so that the residuals are relative errors.
    best = solve_non_negative(terms, np.ones(len(times)))
    predicted = (terms @ best) * times
    spread = float(np.sum((times - times.mean()) ** 2))
    return LatencyFit(
        model=LatencyModel(
            quadratic_ms=float(best[0]), linear_ms=float(best[1]), constant_ms=float(best[2])
        ),
        lengths_tokens=tuple(int(length) for length in lengths),
        relative_residuals=tuple(float(r) for r in predicted / times - 1),
        r_squared=1.0 - float(np.sum((times - predicted) ** 2)) / spread if spread else 1.0,
    )


def solve_non_negative(terms: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 of three terms that minimises |terms x - target|^2; terms [num_samples, 3]."""
    best, best_error = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for subset in combinations(range(3), min(size, len(target))):
            solution = np.linalg.lstsq(terms[:, subset], target, rcond=None)[0]
            error = float(np.sum((terms[:, subset] @ solution - target) ** 2))
            if (solution >= 0).all() and error < best_error - 1e-15:
                best, best_error = np.zeros(3), error
                best[list(subset)] = solution
    return best


def saturation_tokens(model: LatencyModel, longest_tokens: int) -> int:
    """UtilLen: shortest micro-batch of one sequence, up to `longest_tokens`, at 85% of the best
    tokens/s in range.
    """
    lengths = np.unique(np.geomspace(1, max(longest_tokens, 1), 512).astype(np.int64))
    times = model.quadratic_ms * lengths**2 + model.linear_ms * lengths + model.constant_ms
    rates = lengths / np.maximum(times, 1e-12)
    return int(lengths[np.argmax(rates >= _SATURATION * rates.max())])


def saturation_by_tp(latency: Mapping[Scheme, LatencyModel], longest_tokens: int) -> dict[str, int]:
    """UtilLen per TP degree, from its smallest SP, CP and PP; of the piece of a micro-batch that
    one rank has under them.
    """
    found = {}
    for scheme in sorted(latency, key=lambda s: (-s.num_shards, -s.pp)):
        tokens = saturation_tokens(latency[scheme], longest_tokens) // scheme.num_shards
        found[str(scheme.tp)] = max(1, tokens)
    return found


EXCHANGE_BUFFERS = 4
"""Packed ones of two rounds in flight, each with one to send and one to receive."""
_TABLES = 2
"""Embedding and head of the models whose published profiles count one for both."""

_STATES = "states"
_ACTIVATIONS = "activation_bytes_per_token_per_layer_per_hidden"
ENGINE_LAYERS = "engine_layers"
"""Key of the engine's layers in the profile of another system (docs/cost-model.md): A of App. B.1
of compiled ones without TP and with it, whose ranks have shards of the sequence, and of eager ones;
and the milliseconds beyond T for each token of what compiled ones without TP compute again.
"""
_EAGER_BYTES_OF_TP = 0.1
"""Bytes that eager layers keep besides for each TP rank, of whole rotary embeddings."""
_PUBLISHED = "published"
"""Value of `_STATES` in the memory of a profile whose bytes of states are those of the paper."""


def engine_states(
    params_per_hidden2: float, element_bytes: float, *, offloads_optimizer: bool = False
) -> dict[str, float]:
    """B and alpha of App. B.1, and the needs of gathered and checkpointed layers, of a layer with
    so many parameters per hidden size squared. Of an optimizer on the host the gradient stays.
    """
    sharded = element_bytes + (GRADIENT_BYTES if offloads_optimizer else OPTIMIZER_BYTES)
    held = element_bytes + GRADIENT_BYTES
    return {
        "state_bytes_per_layer_per_hidden2": params_per_hidden2 * (sharded + held),
        "sharded_fraction": sharded / (sharded + held),
        "slice_bytes_per_layer_per_hidden2": params_per_hidden2 * element_bytes,
        "input_bytes_per_token_per_layer_per_hidden": element_bytes,
    }


def exchange_bytes(layer_params: float, table_params: float, gradient_bytes: float) -> float:
    """Bytes of packed buffers of pull and push: a layer's of so many parameters, and beside them
    those of another layer, or of a larger table of the vocabulary.
    """
    each = EXCHANGE_BUFFERS / 2 * gradient_bytes
    return each * (layer_params + max(layer_params, table_params))


def expert_memory(fraction: float) -> dict[str, float]:
    """Memory entries of a profile for experts that are so large a part of a layer; none for a dense
    model.
    """
    return {"expert_fraction": fraction} if fraction else {}


def has_published_states(profile: Profile) -> bool:
    """Whether the bytes of states in `profile` are those of the paper."""
    return bool(profile.document["memory"].get(_STATES) == _PUBLISHED)


def with_engine_layers(profile: Profile, *, compiled: bool = True) -> Profile:
    """`profile` with the engine's layers, which are `compiled` or not, and its bytes of states in
    place of another system's; as it is where they are the engine's already.
    """
    document = dict(profile.document)
    layers: Any = document.pop(ENGINE_LAYERS, None)
    if layers is None and not has_published_states(profile):
        return profile
    memory = dict(document["memory"])
    if has_published_states(profile):
        memory |= _engine_states(profile)
    if layers is not None:
        of_tp = {tp: _layer_bytes(layers, tp, compiled) for tp in profile.memory.activation_bytes}
        memory[_ACTIVATIONS] = {str(tp): size for tp, size in of_tp.items()}
        again_ms = profile.memory.num_layers * read_number(layers, "compiled_ms")
        latency = dict(profile.latency)
        for scheme in (s for s in latency if compiled and s.tp == 1):
            linear_ms = latency[scheme].linear_ms + again_ms / scheme.num_devices
            latency[scheme] = replace(latency[scheme], linear_ms=linear_ms)
        document["schemes"] = [{**s.to_json(), **t.to_json()} for s, t in latency.items()]
    return Profile.from_json({**document, "memory": memory})


def _layer_bytes(layers: Mapping[str, Any], tp: int, compiled: bool) -> float:
    if compiled:
        return read_number(layers, "compiled_bytes" if tp == 1 else "compiled_bytes_of_tp")
    return read_number(layers, "eager_bytes") + _EAGER_BYTES_OF_TP * tp


def _engine_states(profile: Profile) -> dict[str, Any]:
    known = profile.memory
    if not known.slice_bytes or not known.input_bytes:
        raise HydraConfigError(
            f"profile {profile.name!r} has published states, for which its memory needs "
            "slice_bytes_per_layer_per_hidden2 and input_bytes_per_token_per_layer_per_hidden above 0"
        )
    params_per_hidden2 = known.slice_bytes / known.input_bytes
    layer, table = params_per_hidden2 * known.hidden_size**2, known.hidden_size * known.vocab_size
    return {
        **engine_states(params_per_hidden2, known.input_bytes),
        "exchange_bytes": exchange_bytes(layer, table, 2.0),
        "vocabulary_tables": _TABLES,
        _STATES: "engine",
    }


def load_profile(name_or_path: str, *, compiled: bool = True) -> Profile:
    """The profile of that path, or the shipped one of that name, with the engine's memory."""
    return with_engine_layers(Profile.load(find_profile(name_or_path)), compiled=compiled)
