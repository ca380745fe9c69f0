"""T(l, P) of hardware that nobody has profiled: a roofline of one layer's FLOPs and bytes, and its
collectives.

Per layer and rank, forward and backward, no recomputation, 16-bit types, H hidden, I intermediate
size:

    matmul      6 (4 H^2 + 3 H I) / TP     FLOP for each token (fewer for grouped key-value heads)
    attention   7 H / TP                   FLOP for each token and token of its past or future
    elementwise 3 * 36 H / TP              bytes for each token: written, read, read again
    collectives 4 * 2 (TP - 1) / TP * 2 H  bytes for each token over the TP group's slowest
                                           interconnect

Of a mixture of experts, each of size I_e, a token uses K: I is then that of its K experts and the
shared one. All E are read twice and their gradient is written for each micro-batch, whatever its
length, 6 * 3 E H I_e / TP bytes, or / ep. With ep a token's hidden state travels to each of its
experts and back, forward and backward, 4 * 2 K H (ep - 1) / ep bytes, and the busiest rank gets
`skew` times the mean of tokens.

Layers that are made of something else count by their own matrices (`decoder.py`), the mean over
layers, and their states as matrices of as many multiplications; W is then the mean of attention's
width, 0 in layers without it. Heads as wide as W together, where that is not H, count as W.
Attention is 14 W for each pair seen twice (2 + 5 products of the flash kernel's two passes), half
of it causal. The head adds 6 H V / TP, shared between the stages. Left out: P2P, the optimizer, and
imbalance. With 8-bit products the layers' matrices, but for experts that tokens choose from, count
at the device's 8-bit rate, and 8 bytes for each number that is cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_hydra.configs.files import (
    LARGEST,
    MAX_DEVICES,
    find_file,
    list_files,
    read_count,
    read_json_object,
    read_number,
    read_object,
    read_text,
    read_time,
    reading,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.profile import PROFILE_SCHEMA, LatencyModel, saturation_by_tp
from ds_hydra.strategy.schemes.scheme import Scheme

HARDWARE_SCHEMA = "ds_hydra.hardware/1"
_KEPT_BYTES = 36
"""A of App. B.1 for TP 1: bytes that a token leaves for the backward pass, per layer and hidden
unit.
"""
_COLLECTIVES = 4
_EXCHANGES = 4
"""All-to-alls of SP for each layer and part of the heads: queries, keys and values together to
heads, outputs back, in forward and backward (`engine/parallel/token_cuts.py`).
"""
KEY_VALUE_EXCHANGES = 3
"""Exchanges of CP for each layer: keys and values forward, again backward, and their gradients."""
_KEY_VALUE_BYTES = KEY_VALUE_EXCHANGES * 2 * 2
"""Bytes of a token, layer and hidden unit in these exchanges, in 16 bit."""
_EXPERT_EXCHANGES = 4
"""Times that hidden states travel to experts or back for each layer, forward and backward."""
_EXPERT_COLLECTIVES = 7
"""Collectives of a layer with experts: the number of tokens that come, hidden states and weights,
results of experts; in backward the last three.
"""
_KEPT_OF_MLP, _KEPT_OF_EXPERTS = 8, 4
"""Bytes that a token leaves for each unit of I, gate, up, activation and product in 16 bit; and for
each expert and hidden unit: what went in and what came out. `_KEPT_BYTES` has I / H = 2.7.
"""
_USUAL_WIDTH = 2.7
_TOUCHED_BYTES = 6
_CAST_BYTES = 2 + 2 * (2 + 1)
"""Bytes moved for a number that is an operand of two 8-bit products (`_eight_bit_work`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device and its interconnects; rates per second and direction, as reached
    (efficiency included).
    """

    name: str
    devices_per_node: int
    memory_bytes: int
    matmul_flops: float
    attention_flops: float
    memory_rate: float
    intra_node_rate: float
    inter_node_rate: float
    layer_overhead_ms: float
    collective_overhead_ms: float
    pieces_overhead_ms: float = 0.0
    """Time of a layer and micro-batch that attention to pieces of sequences (CP) takes beyond that
    to whole ones.
    """
    intra_node_latency_ms: float = 0.0
    """Time of a message without bytes inside a node."""
    inter_node_latency_ms: float = 0.0
    iteration_overhead_ms: float = 0.0
    """Time of the host in an iteration, beside passes and step."""
    host_rate: float = 0.0
    """Bytes per second from a device to its host, or back; 0 where the file does not say."""
    peak_flops: float | None = None
    """FLOP/s that the vendor states, dense and in 16 bit."""
    float8_flops: float | None = None
    """FLOP/s in 8 bits, by the same share of the peak as in 16; None for devices without."""

    @classmethod
    def load(cls, name: str) -> Hardware:
        """The shipped hardware of that name, or a `ds_hydra.hardware/1` file."""
        path = find_file("hardware", name)
        return cls.from_json(read_json_object(path), source=str(path))

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str = "hardware") -> Hardware:
        """The hardware in a `ds_hydra.hardware/1` document; raises HydraConfigError naming the
        error.
        """
        with reading(document, HARDWARE_SCHEMA, source):
            reached = read_object(document, "efficiency")
            latency = read_object(document, "latency_s")
            peak = _read_rate(document, "peak_flops")
            memory_rate = _read_rate(document, "memory_bytes_per_s")
            inside = _read_rate(document, "intra_node_bytes_per_s")
            across = _read_rate(document, "inter_node_bytes_per_s")
            share = {
                name: read_number(reached, name, least=1e-6, most=1)
                for name in ("matmul", "attention", "memory", "interconnect")
            }
            float8 = document.get("peak_float8_flops") is not None
            host = "host_bytes_per_s"
            optional = {"pieces_overhead_ms": 0.0, "iteration_overhead_ms": 0.0, **document}
            return cls(
                name=read_text(document, "name"),
                devices_per_node=read_count(
                    document, "devices_per_node", least=1, most=MAX_DEVICES
                ),
                memory_bytes=int(read_number(document, "memory_bytes", least=0)),
                matmul_flops=peak * share["matmul"],
                attention_flops=peak * share["attention"],
                memory_rate=memory_rate * share["memory"],
                intra_node_rate=inside * share["interconnect"],
                inter_node_rate=across * share["interconnect"],
                layer_overhead_ms=read_time(document, "layer_overhead_ms"),
                collective_overhead_ms=read_time(document, "collective_overhead_ms"),
                pieces_overhead_ms=read_time(optional, "pieces_overhead_ms"),
                intra_node_latency_ms=1e3 * read_number(latency, "intra_node", least=0),
                inter_node_latency_ms=1e3 * read_number(latency, "inter_node", least=0),
                iteration_overhead_ms=read_time(optional, "iteration_overhead_ms"),
                host_rate=_read_rate(document, host) * share["interconnect"]
                if host in document
                else 0.0,
                peak_flops=peak,
                float8_flops=_read_rate(document, "peak_float8_flops") * share["matmul"]
                if float8
                else None,
            )

    def group_rate(self, num_ranks: int, *, is_shared: bool = False) -> float:
        """Bytes per second of each rank of a group of neighbours; where it leaves a node those of
        the node's interconnect, of which a rank has a part where all devices share it.
        """
        if num_ranks <= self.devices_per_node:
            return self.intra_node_rate
        return self.inter_node_rate / (self.devices_per_node if is_shared else 1)


def find_shipped_hardware(device: str | None) -> dict[str, Any] | None:
    """The shipped `ds_hydra.hardware/1` document of a device, by its `name` or one of its
    `device_names` (what CUDA, and so a measured profile, calls such devices); None where no file
    has it.
    """
    for name in list_files("hardware"):
        document = read_json_object(find_file("hardware", name))
        if device in (document["name"], *document.get("device_names", ())):
            return document
    return None


def _read_rate(document: Mapping[str, Any], key: str) -> float:
    """Read a rate per second: from 1 to a million times the fastest device there is."""
    return read_number(document, key, least=1, most=1e6 * LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer that has them."""

    num: int
    chosen: int
    """Experts of a token (K)."""
    size: int
    """Intermediate size of one."""
    shared_size: int = 0
    """Intermediate size of the part that all tokens use beside."""
    layer_share: float = 1.0
    """Layers with experts over all layers; the others are dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeans:
    """Sizes of one layer, mean over layers; elements are those of matrices."""

    params: float
    active_params: float
    """Elements that a token meets."""
    expert_params: float
    """Elements of all experts that tokens choose from."""
    attention_width: float
    """Features of all attention heads."""
    state_params: float = 0.0
    """Elements of a matrix with as many multiplications as a token has with states."""
    kept_width: float = 0.0
    """I of a token, as of MLPs with a gate."""
    mixer_share: float = 1.0
    """Layers that mix tokens over all layers."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LayerMeans:
        """The fields by name; raises HydraConfigError for anything else."""
        if missing := [name for name in cls.__slots__ if name not in document]:
            raise HydraConfigError(
                f"model.layer has no {missing[0]}; leave model.layer out, or measure the profile anew"
            )
        return cls(**{name: read_number(document, name, least=0) for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder that the roofline needs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Intermediate size of a layer without experts."""
    vocab_size: int
    key_value_share: float = 1.0
    """Key-value heads over attention heads."""
    attention_width: int = 0
    """Features of all attention heads; 0: the hidden size."""
    norms_heads: bool = False
    """Whether queries and keys pass norms of their own, as in Qwen3."""
    experts: Experts | None = None
    layer: LayerMeans | None = None
    """Sizes of layers that are not as above: four projections, and an MLP with a gate or experts
    without a router.
    """

    @property
    def means(self) -> LayerMeans:
        """Sizes of one layer: `layer`, or by the sizes above."""
        if self.layer is not None:
            return self.layer
        e, width = self.experts, float(self.attention_width or self.hidden_size)
        active_size, experts, chosen = float(self.intermediate_size), 0.0, 0.0
        if e is not None:
            sparse = e.shared_size + e.chosen * e.size
            active_size = (1 - e.layer_share) * self.intermediate_size + e.layer_share * sparse
            # Gate, up and down of each, in the mean over layers with experts and without
            experts = 3.0 * self.hidden_size * e.num * e.size * e.layer_share
            chosen = e.chosen / e.num
        # Queries and outputs of all heads, keys and values of their share
        attention = (2 + 2 * self.key_value_share) * self.hidden_size * width
        active = attention + 3 * self.hidden_size * active_size
        # `active` has the chosen experts: those that a token does not meet come on top
        return LayerMeans(
            params=active + (1 - chosen) * experts,
            active_params=active,
            expert_params=experts,
            attention_width=width,
            kept_width=active_size,
        )

    @property
    def num_params(self) -> float:
        """Elements of all layers, of the embedding and of the head."""
        # Left out: that some models use one table for both
        tables = 2 * self.vocab_size * self.hidden_size
        return self.num_layers * self.means.params + tables

    @property
    def kept_bytes(self) -> float:
        """A of App. B.1 for TP 1. A layer that mixes no tokens keeps an MLP's alone."""
        if self.experts is None and self.layer is None:
            return _KEPT_BYTES
        means = self.means
        # `_KEPT_BYTES` has an MLP of the usual width in it: the difference counts
        width = means.kept_width / self.hidden_size - _USUAL_WIDTH
        # A token is a row for each expert that it chooses
        rows = self.experts.layer_share * self.experts.chosen if self.experts is not None else 0.0
        of_mixer = _KEPT_BYTES - _KEPT_OF_MLP * _USUAL_WIDTH
        return (
            _KEPT_BYTES
            + _KEPT_OF_MLP * width
            + _KEPT_OF_EXPERTS * rows
            - of_mixer * (1 - means.mixer_share)
        )

    def fused_activation_bytes(self, tp: int) -> float:
        """A of App. B.1 of Megatron-LM's layers, with TP in shards of the sequence; for dense
        models within 2% of the published A800 profiles.
        """
        return self.kept_bytes + 1.5 * tp

    def activation_bytes(self, tp: int = 1, *, compiled: bool = True, copies: int = 1) -> float:
        """A of App. B.1 in 16 bit: bytes that a token leaves for each layer and hidden unit of 1/TP
        of a micro-batch, under TP whose ranks have shards of the micro-batch between products;
        where they have `copies` of it, each keeps all numbers of norms.

        A layer keeps queries, keys, values and attention's output. Where it is `compiled` it keeps
        the inputs of norms, the output of the one before attention, and gate and up of an MLP.
        Under TP, whose collectives part its graph, it keeps outputs of norms, of the activation
        and of the product too. An eager layer keeps norms in fp32 besides. Norms of queries and
        keys have the same, but for their outputs, which attention keeps.

        >>> sizes = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
        >>> shape = ModelShape(num_layers=32, **sizes)
        >>> shape.activation_bytes(), shape.activation_bytes(2)
        (24.75, 37.5)
        >>> shape.activation_bytes(compiled=False)
        45.5
        """
        means, hidden = self.means, self.hidden_size
        share = means.mixer_share
        is_whole = compiled and tp == 1
        of_norm, of_unit = 4 if compiled else 8, 4 if is_whole else 8
        # Layers with states have no width of attention, and are taken to keep as much
        mixed = max(means.attention_width / hidden, share)
        rows = self.experts.layer_share * self.experts.chosen if self.experts is not None else 0.0
        return (
            of_norm * (1 + share) * copies
            - 2 * is_whole  # the output of the norm before the MLP
            + 4 * (1 + self.key_value_share) * mixed
            + (of_norm - 2) * self.norms_heads * (1 + self.key_value_share) * mixed
            + of_unit * means.kept_width / hidden
            + _KEPT_OF_EXPERTS * rows
        )

    @property
    def bytes_again(self) -> float:
        """Bytes for each token, layer and hidden unit that backward of compiled layers without TP
        writes once more, in kernels that read what they come from anyway: outputs of the norm
        before the MLP, and products of gate and up.
        """
        return 2 + 2 * self.means.kept_width / self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """The "model" section of a profile, beside the model's name."""
        document = asdict(self)
        del document["key_value_share"]
        optional = ("attention_width", "norms_heads", "experts", "layer")
        return {name: value for name, value in document.items() if value or name not in optional}


def key_values_ms(shape: ModelShape, hardware: Hardware, scheme: Scheme) -> float:
    """Milliseconds for a token of a micro-batch that CP ranks of a stage spend on keys and values
    of other rows.

    Rings of the CP group have one edge between two nodes, all ranks between two neighbours of a
    group at once. Left out: key-value heads that SP or TP ranks have repeatedly.
    """
    if scheme.cp == 1:
        return 0.0
    rate = hardware.intra_node_rate
    if scheme.cp * scheme.cp_step > hardware.devices_per_node:
        rate = min(rate, hardware.inter_node_rate / min(scheme.cp_step, hardware.devices_per_node))
    layers = shape.num_layers / scheme.pp
    width = shape.means.attention_width / (scheme.sp * scheme.tp)
    sent = _KEY_VALUE_BYTES * width * shape.key_value_share
    # A rank has its own row already
    return 1e3 * layers * sent * (scheme.cp - 1) / scheme.cp / rate


def sequence_parallel_latency(
    shape: ModelShape, hardware: Hardware, scheme: Scheme
) -> LatencyModel | None:
    """Part of T that the exchanges of SP add to `scheme` without communication; None without
    SP.

    A rank sends all but its own share of queries, keys, values and outputs of its tokens, and their
    gradients, inside its node and to others at the same time. All ranks of a node send at once, so
    they share its interconnect to other nodes. Left out: key-value heads that SP or TP ranks have
    repeatedly.
    """
    if scheme.sp == 1:
        return None
    layers = shape.num_layers / scheme.pp
    width = shape.means.attention_width
    # Queries, outputs, keys and values, and the gradient of each; 2 bytes a number
    numbers = 2 * (2 + 2 * shape.key_value_share) * width / scheme.ranks_per_stage
    exchanged = 2 * numbers * layers
    # Ranks of the group are `sp_step` apart: so many of them share a node
    in_node = min(scheme.sp, max(1, hardware.devices_per_node // scheme.sp_step))
    inside = exchanged * (in_node - 1) / scheme.sp / hardware.intra_node_rate
    shared_rate = hardware.inter_node_rate / hardware.devices_per_node
    outside = exchanged * (scheme.sp - in_node) / scheme.sp / shared_rate
    return LatencyModel(
        quadratic_ms=0.0,
        linear_ms=1e3 * max(inside, outside),
        constant_ms=layers * _EXCHANGES * hardware.collective_overhead_ms,
    )


def expert_parallel_latency(
    shape: ModelShape, hardware: Hardware, scheme: Scheme, skew: float = 1.0
) -> LatencyModel | None:
    """Part of T that `ep` adds to `scheme` without it: tokens that travel, and experts of the
    busiest rank, which get `skew` times the mean. None without ep or experts.
    """
    e, ep = shape.experts, scheme.ep
    if e is None or ep == 1:
        return None
    layers = shape.num_layers / scheme.pp * e.layer_share
    # All ranks of a node send tokens at once
    rate = hardware.group_rate(ep, is_shared=True)
    travelled = _EXPERT_EXCHANGES * 2 * e.chosen * shape.hidden_size * (1 - 1 / ep) * layers
    computed = 6 * 3 * shape.hidden_size * e.chosen * e.size * layers
    # T without `ep` has the mean of computation: only what is beyond it is added
    linear_s = skew * travelled / rate + (skew - 1) * computed / hardware.matmul_flops
    return LatencyModel(
        quadratic_ms=0.0,
        linear_ms=1e3 * linear_s / scheme.ranks_per_stage,
        constant_ms=layers * _EXPERT_COLLECTIVES * hardware.collective_overhead_ms,
    )


def _eight_bit_work(shape: ModelShape, layers: float, tp: int) -> tuple[float, float, float]:
    """Work of a stage whose linear layers multiply in 8 bits, by micro-batch of a rank: FLOP for
    each token, bytes that casts move for each token, and for weights.

    Experts that tokens choose from multiply in 16 bits. An operand is read for its largest number
    and for the casts of two products, which are written. Left out: what of it other operations do
    in passing, and how ranks of a TP group agree on scales.
    """
    means, hidden, e = shape.means, shape.hidden_size, shape.experts
    params, inner = means.active_params, means.kept_width
    if e is not None:
        params -= means.expert_params * e.chosen / e.num
        inner -= e.layer_share * e.chosen * e.size
    heads = means.attention_width * (2 + 2 * shape.key_value_share)
    # Input of each product and gradient of its output: queries, keys, values and outputs have 4 H
    # and the widths of their heads, gate, up and down 3 (H + I)
    features = 4 * hidden * means.mixer_share + heads + 3 * (hidden + inner)
    token_bytes, weight_bytes = (_CAST_BYTES * n * layers / tp for n in (features, params))
    return 6 * params * layers / tp, token_bytes, weight_bytes


def predict_latency(
    shape: ModelShape,
    hardware: Hardware,
    scheme: Scheme,
    *,
    expert_skew: float = 1.0,
    float8: bool = False,
) -> LatencyModel:
    """T(l, scheme) by the roofline. The stage has L / PP layers and its share of the head.

    SP ranks share the micro-batch and exchange queries, keys, values and outputs of attention,
    forward and backward; CP ranks keys and values. With `float8` linear layers of decoder layers
    multiply in 8 bits; raises HydraConfigError where `hardware` does not.
    """
    tp, hidden, means = scheme.tp, shape.hidden_size, shape.means
    layers = shape.num_layers / scheme.pp
    used = means.active_params + means.state_params
    # Of an element and a token 2 FLOP in forward, and twice as many in backward.
    matmul = 6 * (used * layers + hidden * shape.vocab_size / scheme.pp) / tp
    elementwise = 3 * shape.kept_bytes * hidden / tp * layers
    # A ring all-reduce sends each element 2 (TP - 1) / TP times, in 2 bytes.
    exchanged = _COLLECTIVES * 2 * (tp - 1) / tp * 2 * hidden * layers
    linear_s = (
        matmul / hardware.matmul_flops
        + elementwise / hardware.memory_rate
        + exchanged / hardware.group_rate(tp)
    )
    # Causal, so half of the pairs: two products forward, five backward with the one made again,
    # each of l^2 times the width.
    attention = 7 * means.attention_width * layers / scheme.ranks_per_stage
    # Those of SP and EP are in their own parts of T, added at the end
    num_collectives = _COLLECTIVES if tp > 1 else 0
    num_collectives += KEY_VALUE_EXCHANGES if scheme.cp > 1 else 0
    overhead_ms = hardware.layer_overhead_ms + num_collectives * hardware.collective_overhead_ms
    overhead_ms += hardware.pieces_overhead_ms if scheme.cp > 1 else 0.0
    # Read whatever the length, so a part of the constant; with ep a rank has whole experts
    experts_s = _TOUCHED_BYTES * means.expert_params * layers / (scheme.ep if scheme.ep > 1 else tp)
    casts_s = 0.0
    if float8:
        if hardware.float8_flops is None:
            raise HydraConfigError(
                f"hardware {hardware.name} has no 8-bit products (peak_float8_flops in its file); leave out float8, or "
                "name hardware that has them, as h100"
            )
        flop, token_bytes, weight_bytes = _eight_bit_work(shape, layers, tp)
        # Counted in 16 bits above
        linear_s += flop / hardware.float8_flops - flop / hardware.matmul_flops
        linear_s += token_bytes / hardware.memory_rate
        casts_s = weight_bytes / hardware.memory_rate
    latency = LatencyModel(
        quadratic_ms=1e3 * attention / hardware.attention_flops,
        # For a token of the micro-batch, of which a rank has its shard alone
        linear_ms=1e3 * linear_s / scheme.num_shards + key_values_ms(shape, hardware, scheme),
        constant_ms=layers * overhead_ms + 1e3 * (experts_s / hardware.memory_rate + casts_s),
    )
    return latency.plus(sequence_parallel_latency(shape, hardware, scheme)).plus(
        expert_parallel_latency(shape, hardware, scheme, expert_skew)
    )


def predict_profile(
    shape: ModelShape,
    hardware: Hardware,
    schemes: Iterable[Scheme],
    *,
    name: str,
    memory: Mapping[str, Any],
    context_length: int,
    expert_skew: float = 1.0,
    float8: bool = False,
) -> dict[str, Any]:
    """A `ds_hydra.profile/1` document without a measurement. `memory` is its section of that
    name; `expert_skew` as in `expert_parallel_latency`, `float8` as in `predict_latency`.
    """
    latency = {
        scheme: predict_latency(shape, hardware, scheme, expert_skew=expert_skew, float8=float8)
        for scheme in schemes
    }
    return {
        "schema": PROFILE_SCHEMA,
        "estimated": True,
        "source": f"roofline of {hardware.name}{' with 8-bit products' if float8 else ''}, nothing measured",
        "hardware": {
            "name": hardware.name,
            "devices_per_node": hardware.devices_per_node,
            "peak_flops": hardware.peak_flops,
            "memory_bytes": hardware.memory_bytes,
            "reserved_bytes": hardware.memory_bytes // 16,
            "safety_margin_bytes": hardware.memory_bytes // 16,
        },
        "model": {"name": name, **shape.to_json()},
        "memory": dict(memory),
        "saturation_tokens": saturation_by_tp(latency, context_length),
        "schemes": [
            {**scheme.to_json(), **model.to_json()} for scheme, model in sorted(latency.items())
        ],
    }
