"""Layers of a decoder by its config.json: parts that mix tokens, parts that each token passes
through beside, and the parameters of both.

Elements of the matrices of a layer, with hidden size H, h heads of width d and k key-value heads:

    attention    H (2 h d + 2 k d), and H h d where its output is gated
    latent       H q + q h (n + r) + H (c + r) + c h (n + v) + h v H
    Mamba 2      H (2 D + 2 g N + m) + D H + (D + 2 g N) w
    Mamba        2 H D + D (t + 2 N) + t D + D N + D H + D w
    delta rule   H (2 K + 2 V + 2 m) + V H + (2 K + V) w
    KDA          H (4 D + m) + its two gates + 3 D w
    lightning    5 H h d
    convolution  4 H^2 + H w
    MLP          3 H I, or 2 H I without a gate
    experts      3 E H I_e, the router's E H, shared ones like an MLP

Latent attention has ranks q of queries (H h (n + r) where it is null) and c of keys and values,
widths n of a key without and r with positions, v of a value. D features of m heads have a state of
N numbers each, g groups share what writes it, a convolution sees w tokens; K and V are the features
of all keys and values, t is `mamba_dt_rank`.

A state of N numbers for each of D features is written and read once for each token, as a matrix of
2 D N elements would be; that of a delta rule is read once more. Layers that predict tokens after
the next (MTP) are not counted, as their authors do not. Left out: norms and biases, less than 0.1%
of models that are trained. Source: the modelling code of transformers 5.23; a test compares each
family of `COMPARED` with the model that it builds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_hydra.configs.files import check_count, check_number, read_number
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Experts, LayerMeans, ModelShape
from ds_hydra.strategy.cost_models.cluster import model_shape
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "intermediate_size")
_SHARED_SIZE = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_MLP_SIZE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_FIRST_SPARSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_SPARSE_STEP = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
"""Keys of the sparse step in configurations of several families."""

_TWO_MATRICES = """
    apertus arcee biogpt bloom codegen falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2
    mpt nanochat nemotron nemotron_h openai-gpt opt persimmon phi starcoder2 xglm
"""
_THREE_MATRICES = """
    afmoe aria_text axk1 bailing_hybrid bamba bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v2
    deepseek_v3 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma
    gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_oss granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder
    jamba kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text mellum mimo_v2_flash minicpm3 minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral olmo olmo2 olmo3 olmo_hybrid olmoe phi3 phimoe
    qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm
    vaultgemma youtu
"""
UNGATED = frozenset(_TWO_MATRICES.split())
"""Model types whose MLPs have no gate."""
COMPARED = UNGATED | frozenset(_THREE_MATRICES.split())
"""Model types whose parameters are within 0.5% of those that transformers builds."""
_POSITIONS = {"biogpt", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"}
"""Families with a table of positions."""
_GATED_ATTENTION = {"afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families whose attention has a gate as wide as its output, which their class does not name."""
_ONE_SHARED = {"hunyuan_v1_moe", "llama4_text"}
"""Families with one expert of all tokens beside the others, which their class does not name."""

_NORM_HEADS = """
    afmoe apertus dots1 exaone4 exaone_moe flex_olmo gemma3 gemma3n gemma4 glm4_moe hunyuan_v1_dense
    hunyuan_v1_moe lfm2 lfm2_moe minimax_m2 nanochat olmo2 olmo3 olmo_hybrid olmoe qwen3 qwen3_5
    qwen3_5_moe qwen3_moe qwen3_next
""".split()  # noqa: SIM905
"""Model types whose queries and keys pass norms, which no field of a config.json says."""

_MOST_LAYERS = 1 << 14
"""Number far above any model's layers: a value is made for each."""

_WHOLE, _WINDOWED, _LINEAR, _BOTH = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "hybrid",
)
_CONVOLUTION, _MLP_ALONE, _EXPERTS_ALONE, _CHUNKED = "conv", "mlp", "moe", "chunked_attention"
_KINDS = {_WHOLE, _WINDOWED, _LINEAR, _BOTH, _CONVOLUTION, _MLP_ALONE, _EXPERTS_ALONE, _CHUNKED}
_SAME = {"attention": _WHOLE, "mamba": _LINEAR, "mamba2": _LINEAR}
_LETTERS = {"*": _WHOLE, "M": _LINEAR, "-": _MLP_ALONE, "E": _EXPERTS_ALONE}
"""Kinds of layers by the letters of `hybrid_override_pattern`."""
_MAMBA_KEYS = ("mamba_d_state", "ssm_state_size")
_STATE_KEYS = (
    *_MAMBA_KEYS,
    "linear_num_value_heads",
    "linear_num_heads",
    "linear_attn_alpha_factor",
)
"""One of these is there where layers with a state are known here."""
_OTHER_MIXERS = ("mamba", "ssm_", "linear_num_", "conv_L_", "lru_", "hybrid_", "rwkv", "kda_")
"""Keys of a config.json begin with one of these where layers mix tokens by other means."""
_SOME_LAYERS = ("sliding_window_pattern", "max_window_layers")
"""Keys that only say which layers have a window to who knows the family."""
_NOT_COUNTED = {
    "num_nextn_predict_layers": "layers that predict tokens after the next",
    "vision_config": "parts that read images",
    "audio_config": "parts that read sound",
    "hidden_size_per_layer_input": "tables of each layer",
    "attention_hidden_size": "differences of attention that layers share",
}
"""Keys of parts that parameters, time and memory leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer; elements are those of matrices."""

    mixer_params: float = 0.0
    """Parameters of the part that mixes tokens."""
    mlp_params: float = 0.0
    """Parameters that every token passes through beside: MLP, shared experts, router."""
    expert_params: float = 0.0
    """Parameters of all experts that tokens choose from."""
    expert_share: float = 1.0
    """Share of these experts that a token chooses."""
    kept_width: float = 0.0
    """Intermediate size of a gated MLP with a token's activations kept for backward."""
    attention_width: float = 0.0
    """Mean of the features of all heads' queries and of their values; 0 without attention."""
    window: int | None = None
    """Tokens that attention sees; None for all."""
    state_params: float = 0.0
    """Elements of a matrix with as many multiplications as a token has with the state."""

    @property
    def params(self) -> float:
        """All of the layer's."""
        return self.mixer_params + self.mlp_params + self.expert_params

    @property
    def active_params(self) -> float:
        """Parameters that a token meets."""
        return self.mixer_params + self.mlp_params + self.expert_share * self.expert_params


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters of a model, as all commands print them."""

    total: float
    active: float
    """Parameters of one token: only its own of all experts. Embedding and head are among them; some
    authors leave out one of them or both.
    """
    tables: float
    """Parameters of embedding and head."""

    def __str__(self) -> str:
        active = (
            f", {_billions(self.active)} active for a token" if self.active < self.total else ""
        )
        return f"{_billions(self.total)} parameters{active}, {_billions(self.tables)} in embedding and head"


def _billions(params: float) -> str:
    return f"{params / 1e9:.2f} billion" if params >= 1e8 else f"{params / 1e6:.2f} million"


def find_size(profile: Profile) -> ModelSize | None:
    """Parameters of the model of `profile`; None where it does not say its sizes."""
    given = profile.document["model"].get("parameters")
    if given is not None:
        names = ("total", "active", "tables")
        return ModelSize(**{name: read_number(given, name, least=0) for name in names})
    try:
        shape = model_shape(profile)
    except HydraConfigError:
        return None
    tables, active = 2.0 * shape.vocab_size * shape.hidden_size, shape.means.active_params
    return ModelSize(
        total=shape.num_params, active=shape.num_layers * active + tables, tables=tables
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder's layers, and its tables of the vocabulary."""

    layers: tuple[DecoderLayer, ...]
    table_params: float
    """Elements of one table: vocabulary size times hidden size."""
    num_tables: int
    """1 where embedding and head are the same, else 2."""
    position_params: float = 0.0
    unpriced: tuple[str, ...] = ()
    """Sentences on what is not counted, or not known to be right."""
    unknown_mixers: str = ""
    """Reason that it is not known how layers mix tokens."""

    @property
    def params(self) -> float:
        """All parameters, without norms and biases."""
        return sum(x.params for x in self.layers) + self._tables

    @property
    def active_params(self) -> float:
        """Parameters of one token, all tables included."""
        return sum(x.active_params for x in self.layers) + self._tables

    @property
    def _tables(self) -> float:
        return self.num_tables * self.table_params + self.position_params

    @property
    def windows(self) -> dict[int | None, float]:
        """Width of all layers' attention together, by the tokens that it sees (None: all)."""
        widths: Counter[int | None] = Counter()
        for layer in self.layers:
            if layer.attention_width:
                widths[layer.window] += layer.attention_width  # type: ignore[assignment]
        return dict(widths)

    @property
    def means(self) -> LayerMeans:
        """Means over the layers."""
        number, mixers = len(self.layers), sum(x.mixer_params > 0 for x in self.layers)
        names = (name for name in LayerMeans.__slots__ if name != "mixer_share")
        means = {name: sum(getattr(x, name) for x in self.layers) / number for name in names}
        return LayerMeans(mixer_share=mixers / number, **means)

    @property
    def size(self) -> ModelSize:
        """Size that commands print."""
        return ModelSize(total=self.params, active=self.active_params, tables=self._tables)


def read_decoder(config: Mapping[str, Any], source: str) -> Decoder:
    """The decoder that a config.json describes; raises HydraConfigError where it lacks a size."""
    fields = _Fields(config, source)
    kinds, unpriced = _layer_kinds(fields)
    sparse = _layers_with_experts(config, len(kinds))
    windows: Sequence[int | None]
    try:
        windows, unknown = _find_windows(fields, kinds), ""
    except HydraConfigError as error:
        windows, unknown = [None] * len(kinds), str(error)
    left_out = [
        f"{what} ({key}) are not counted" for key, what in _NOT_COUNTED.items() if config.get(key)
    ]
    if fields.family not in COMPARED:
        left_out.append(
            f"its layers are counted by the usual names of config.json; for model_type {fields.family} that was "
            "not compared with code"
        )
    if len(sparse) < len(kinds) and not fields.has(*_MLP_SIZE) and fields.family not in UNGATED:
        left_out.append("MLPs have 4 hidden_size features, as there is no intermediate_size")
    positions = fields.family in _POSITIONS and fields.count("max_position_embeddings", default=0)
    return Decoder(
        layers=tuple(
            _read_layer(fields, kind, i in sparse, window)
            for i, (kind, window) in enumerate(zip(kinds, windows, strict=True))
        ),
        table_params=float(fields.count("vocab_size", least=1) * fields.hidden),
        num_tables=1 if config.get("tie_word_embeddings") else 2,
        position_params=float(positions * fields.hidden),
        unpriced=(*unpriced, *left_out),
        unknown_mixers=unknown,
    )


def describe_config(config: Mapping[str, Any], source: str) -> tuple[ModelShape, int]:
    """Shape and attention heads of the decoder in a config.json; raises HydraConfigError for one
    that the roofline does not know.
    """
    family = config.get("model_type", "the model")
    if config.get("is_encoder_decoder"):
        raise HydraConfigError(f"{source}: {family} has an encoder; ds_hydra trains decoders alone")
    fields = _Fields(config, source)
    heads = fields.count("num_attention_heads", least=1)
    decoder = read_decoder(config, source)
    means = decoder.means
    width = 0 if means.attention_width == fields.hidden else round(means.attention_width)
    size = _first_count(config, ("intermediate_size", "moe_intermediate_size"))
    by_sizes = ModelShape(
        num_layers=len(decoder.layers),
        hidden_size=fields.hidden,
        intermediate_size=size or 4 * fields.hidden,
        vocab_size=config["vocab_size"],
        key_value_share=_key_value_heads(config, heads, source) / heads,
        attention_width=width,
        norms_heads=family.removesuffix("_text") in _NORM_HEADS,
        experts=find_experts(config, len(decoder.layers), source),
    )
    return by_sizes if by_sizes.means == means else replace(by_sizes, layer=means), heads


def find_experts(config: Mapping[str, Any], num_layers: int, source: str) -> Experts | None:
    """The experts that a config.json describes, None for a dense model; raises HydraConfigError
    where it has experts and does not say how many a token chooses.
    """
    num, chosen = _count_experts(config, source)
    sparse = _layers_with_experts(config, num_layers)
    if not num or not sparse:
        return None
    return Experts(
        num=num,
        chosen=chosen,
        size=_expert_size(config),
        shared_size=_shared_expert_size(config),
        layer_share=len(sparse) / num_layers,
    )


def expert_parallel_schemes(shape: ModelShape, heads: int, num_devices: int) -> list[Scheme]:
    """<spN,PP;ep=N> of powers of two that fit `num_devices` and divide heads and experts."""
    num = shape.experts.num if shape.experts is not None else 1
    return [
        Scheme(1, s.pp, sp=s.tp, ep=s.tp)
        for s in power_of_two_schemes(num_devices)
        if s.tp > 1 and heads % s.tp == 0 and num % s.tp == 0 and s.pp <= shape.num_layers
    ]


class _Fields:
    """The fields of a config.json, by any of their names."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source
        self.family = str(config.get("model_type", "the model"))
        self.hidden = self.count("hidden_size", least=1)

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The first of `names` that is there, or `default`; raises HydraConfigError where that is
        None, or for anything but a whole number.
        """
        for name in names:
            value = self.config.get(name)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if value is not None:
                return check_count(value, f"{self.source}: {name}", least=least, most=1 << 32)
        if default is None:
            inner = "; its text_config may be one" if "text_config" in self.config else ""
            raise HydraConfigError(
                f"{self.source}: {self.family} has no {names[0]}, so it cannot be described{inner}"
            )
        return default

    def has(self, *names: str) -> bool:
        """Whether one of them is there."""
        return any(self.config.get(name) is not None for name in names)

    def knows_states(self, kind: str) -> bool:
        """Whether the sizes of layers of `kind`, which have a state, are there."""
        return self.has(*(_MAMBA_KEYS if kind == _BOTH else _STATE_KEYS))


def _read_layer(fields: _Fields, kind: str, is_sparse: bool, window: int | None) -> DecoderLayer:
    kind = _SAME.get(kind, kind)
    parts: dict[str, float] = {}
    if kind in (_LINEAR, _BOTH) and fields.knows_states(kind):
        parts = _linear_mixer(fields)
    if kind == _CONVOLUTION:
        parts = {
            "mixer_params": 4 * fields.hidden**2 + fields.hidden * fields.count("conv_L_cache")
        }
    if kind in (_MLP_ALONE, _EXPERTS_ALONE) or (parts and kind != _BOTH):
        attention = {}
    else:
        attention = _latent(fields) if fields.has("kv_lora_rank") else _attention(fields)
    for name, value in attention.items():
        parts[name] = parts.get(name, 0) + value
    if fields.family != "nemotron_h" or kind in (_MLP_ALONE, _EXPERTS_ALONE):
        parts |= _experts(fields) if is_sparse else _mlp(fields)
    return DecoderLayer(**parts, window=window)


def _attention(fields: _Fields) -> dict[str, float]:
    heads = fields.count("num_attention_heads", least=1)
    shared = _key_value_heads(fields.config, heads, fields.source)
    head = fields.count("head_dim", "attention_head_dim", default=fields.hidden // heads)
    values = fields.count("v_head_dim", default=head)
    is_gated = fields.config.get("attn_output_gate", fields.family in _GATED_ATTENTION)
    width = heads * (head + values * (2 if is_gated else 1)) + shared * (head + values)
    return {
        "mixer_params": fields.hidden * width,
        "attention_width": heads * (head + values) / 2,
    }


def _key_value_heads(config: Mapping[str, Any], heads: int, source: str) -> int:
    """Number of key-value heads: all `heads` where the config.json does not say."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    given = config.get("num_key_value_heads") or config.get("num_kv_heads")
    if given is None:
        return heads
    return check_count(given, f"{source}: num_key_value_heads", least=1, most=heads)


def _latent(fields: _Fields) -> dict[str, float]:
    hidden, heads = fields.hidden, fields.count("num_attention_heads", least=1)
    rank, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", default=0)
    plain = fields.count("qk_nope_head_dim", "head_dim", default=hidden // heads)
    values = fields.count("v_head_dim", default=hidden // heads)
    queries = heads * (plain + rotary)
    of_queries = hidden * queries
    if low := fields.count("q_lora_rank", default=0):
        of_queries = low * (hidden + queries)
    of_keys = hidden * (rank + rotary) + rank * heads * (plain + values)
    return {
        "mixer_params": of_queries + of_keys + heads * values * hidden,
        "attention_width": heads * (plain + rotary + values) / 2,
    }


def _linear_mixer(fields: _Fields) -> dict[str, float]:
    """Sizes of a part that mixes tokens by a state, by the keys of its families."""
    hidden = fields.hidden
    if fields.has("linear_num_value_heads"):
        heads = fields.count("linear_num_value_heads")
        keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
        values = heads * fields.count("linear_value_head_dim")
        conv = fields.count("linear_conv_kernel_dim", default=4)
        matrices = hidden * (2 * keys + 3 * values + 2 * heads) + (2 * keys + values) * conv
        return {
            "mixer_params": matrices,
            "state_params": 3 * values * fields.count("linear_key_head_dim"),
        }
    if fields.has("linear_num_heads"):
        heads, head = fields.count("linear_num_heads"), fields.count("linear_head_dim")
        inner, conv = heads * head, fields.count("linear_conv_kernel_dim", default=4)
        gates = (
            2 * head * (hidden + inner) if fields.family == "kimi_linear" else 2 * hidden * inner
        )
        matrices = hidden * (4 * inner + heads) + gates + 3 * inner * conv
        return {"mixer_params": matrices, "state_params": 3 * inner * head}
    if not fields.has(*_MAMBA_KEYS):
        heads = fields.count("num_attention_heads", least=1)
        head = fields.count("head_dim", default=hidden // heads)
        return {"mixer_params": 5 * hidden * heads * head, "state_params": 2 * heads * head**2}
    state = fields.count("mamba_d_state", "ssm_state_size")
    conv = fields.count("mamba_d_conv", "conv_kernel", default=4)
    expand = fields.count("mamba_expand", "expand", default=2)
    if fields.has("mamba_dt_rank"):
        inner, rank = expand * hidden, fields.count("mamba_dt_rank")
        matrices = inner * (3 * hidden + 2 * rank + 3 * state + conv)
    else:
        heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", least=1)
        head = fields.count("mamba_d_head", "mamba_head_dim", default=expand * hidden // heads)
        inner = fields.count("mamba_d_ssm", default=heads * head)
        mixed = inner + 2 * fields.count("mamba_n_groups", "n_groups", default=1) * state
        matrices = hidden * (2 * inner + mixed + heads) + mixed * conv
    return {"mixer_params": matrices, "state_params": 2 * inner * state}


def _mlp(fields: _Fields) -> dict[str, float]:
    size = fields.count("intermediate_size_mlp", default=0)
    size = size or fields.count(*_MLP_SIZE, default=4 * fields.hidden)
    if fields.config.get("block_auto_adjust_ff_dim"):
        factor = check_number(
            fields.config.get("block_ffn_dim_multiplier", 1.0), "block_ffn_dim_multiplier"
        )
        size = int(factor * int(2 * size / 3))
        unit = fields.count("block_multiple_of", default=1)
        size = -(-size // unit) * unit
    return _of_size(fields, size)


def _of_size(fields: _Fields, size: int) -> dict[str, float]:
    matrices, kept = (2, size / 2) if fields.family in UNGATED else (3, size)
    return {"mlp_params": matrices * fields.hidden * size, "kept_width": kept}


def _experts(fields: _Fields) -> dict[str, float]:
    num, chosen = _count_experts(fields.config, fields.source)
    size = fields.count(*_EXPERT_SIZE)
    each, shared = _of_size(fields, size), _of_size(fields, _shared_expert_size(fields.config))
    is_gated = fields.has("shared_expert_intermediate_size") and fields.family.startswith("qwen")
    return {
        "mlp_params": shared["mlp_params"] + (num + is_gated) * fields.hidden,
        "expert_params": num * each["mlp_params"],
        "expert_share": chosen / num,
        "kept_width": shared["kept_width"] + chosen * each["kept_width"],
    }


def _count_experts(config: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Experts of a layer that has them, and those of one token; (0, 0) for a dense model. Raises
    HydraConfigError where a config.json has experts and does not say how many a token chooses.
    """
    num = _first_count(config, NUM_EXPERTS)
    if num < 2:
        return 0, 0
    chosen = _first_count(config, NUM_CHOSEN)
    if not 1 <= chosen <= num:
        raise HydraConfigError(
            f"{source}: {config.get('model_type')} has {num} experts, and a token chooses {chosen} of them "
            f"({' or '.join(NUM_CHOSEN)}), expected 1 to {num}"
        )
    return num, chosen


def _expert_size(config: Mapping[str, Any]) -> int:
    """Intermediate size of one expert."""
    return _first_count(config, _EXPERT_SIZE)


def _shared_expert_size(config: Mapping[str, Any]) -> int:
    """Intermediate size of the experts that all tokens use; 0 without."""
    given = _first_count(config, _SHARED_SIZE)
    number = _first_count(config, _NUM_SHARED) or config.get("model_type") in _ONE_SHARED
    return given or number * _expert_size(config)


def _first_count(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    """The first of `keys` that is a positive number, or the first of several; 0 without."""
    for key in keys:
        value = config.get(key)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _layers_with_experts(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Numbers of the layers whose MLP is a mixture of experts."""
    if _first_count(config, NUM_EXPERTS) < 2 or config.get("is_moe") is False:
        return frozenset()
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
        return frozenset(i for i, kind in enumerate(kinds) if kind != "dense")
    kinds = _find_layer_kinds(config, num_layers)
    if kinds is not None and {_MLP_ALONE, _EXPERTS_ALONE} & set(kinds):
        return frozenset(i for i, kind in enumerate(kinds) if kind == _EXPERTS_ALONE)
    if isinstance(chosen := config.get("moe_layers"), list | tuple):
        return frozenset(i for i in range(num_layers) if i in chosen)
    if period := _first_count(config, ("expert_layer_period",)):
        offset = _first_count(config, ("expert_layer_offset",))
        return frozenset(range(offset % period, num_layers, period))
    first, step = _first_count(config, _FIRST_SPARSE), _first_count(config, _SPARSE_STEP) or 1
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list | tuple) else ()
    return frozenset(i for i in range(first, num_layers) if i not in dense and (i + 1) % step == 0)


def _find_layer_kinds(config: Mapping[str, Any], num_layers: int | None = None) -> list[str] | None:
    """Kinds of the `num_layers` layers, by a list or pattern of the config; None without one."""
    for key in ("layer_types", "layers_block_type"):
        kinds = config.get(key)
        if isinstance(kinds, list | tuple) and len(kinds) == (num_layers or len(kinds)):
            return [str(kind) for kind in kinds]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == (num_layers or len(pattern)):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return None


def _layer_kinds(fields: _Fields) -> tuple[list[str], list[str]]:
    """The kind of each layer, and which of them are not known here."""
    config = fields.config
    if config.get("num_hidden_layers") is None and (kinds := _find_layer_kinds(config)):
        number = len(kinds)
    else:
        number = fields.count("num_hidden_layers", least=1)
    check_count(number, f"{fields.source}: num_hidden_layers", most=_MOST_LAYERS)
    kinds = _find_layer_kinds(config, number)
    if kinds is None and (period := _first_count(config, ("attn_layer_period",))):
        offset = _first_count(config, ("attn_layer_offset",)) % period
        kinds = [_WHOLE if i % period == offset else _LINEAR for i in range(number)]
    if kinds is None and (period := _first_count(config, ("full_attention_interval",))):
        kinds = [_LINEAR if (i + 1) % period else _WHOLE for i in range(number)]
    for key, other in (("attn_layer_indices", _LINEAR), ("full_attn_idxs", _CONVOLUTION)):
        if kinds is None and isinstance(whole := config.get(key), list | tuple):
            kinds = [_WHOLE if i in whole else other for i in range(number)]
    if kinds is None and fields.family == "falcon_h1":
        kinds = [_BOTH] * number
    if kinds is None:
        others = _other_mixers(config)
        found = [f"layers that do not attend ({others[0]})"] if others else []
        kinds = [_WHOLE] * number
    else:
        found = [
            f"layers of {kind} (layer_types)" for kind in sorted(_unknown_kinds(fields, kinds))
        ]
    return kinds, [f"{what} are counted as attention" for what in found]


def _unknown_kinds(fields: _Fields, kinds: Sequence[str]) -> set[str]:
    unknown = {kind for kind in kinds if _SAME.get(kind, kind) not in _KINDS}
    states = {kind for kind in kinds if _SAME.get(kind, kind) in (_LINEAR, _BOTH)}
    return unknown | {kind for kind in states if not fields.knows_states(_SAME.get(kind, kind))}


def _other_mixers(config: Mapping[str, Any]) -> list[str]:
    return sorted(
        key for key, value in config.items() if value and str(key).startswith(_OTHER_MIXERS)
    )


def _find_windows(fields: _Fields, kinds: Sequence[str]) -> list[int | None]:
    """The window of each layer, None for all tokens; raises HydraConfigError where it is not known
    which tokens a layer sees.
    """
    config, family = fields.config, fields.family
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    is_window = isinstance(window, int) and window > 0
    if _find_layer_kinds(config, len(kinds)) is not None or set(kinds) != {_WHOLE}:
        others = sorted({*_unknown_kinds(fields, kinds), *({_CHUNKED} & set(kinds))})
        if others or (_WINDOWED in kinds and not is_window):
            what = ", ".join(others) or f"{_WINDOWED} without sliding_window"
            raise HydraConfigError(f"{family} has layers of {what}, whose FLOPs are not counted")
        return [window if kind == _WINDOWED else None for kind in kinds]
    if others := _other_mixers(config):
        raise HydraConfigError(
            f"{family} has layers that do not attend ({others[0]}), whose FLOPs are not counted"
        )
    if is_window and (family == "gemma2" or any(config.get(key) for key in _SOME_LAYERS)):
        raise HydraConfigError(
            f"{family} does not say which of its layers have a sliding window (layer_types)"
        )
    return [window if is_window else None] * len(kinds)
