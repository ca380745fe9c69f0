"""Memory that nobody measured: activations of one decoder layer traced without a device, and the
engine's needs beside the profile of another system.

The trace (forward and backward under fake tensors) answers what A of App. B.1 is for a model that
nobody has measured: bytes that one token costs per layer and hidden unit, for the rank's own share
of the heads and of the MLP under TP. What is counted for the engine is never less than it holds.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.attention_choice import keeps_copies
from ds_hydra.engine.model.decoder_parts import module_sides
from ds_hydra.engine.model.meta_model import make_model
from ds_hydra.engine.model.stage_forward import LEAST_KEPT
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.engine.parallel.groups import NCCL_GROUP_BYTES, NCCL_PAIR_BYTES
from ds_hydra.engine.profiling.profile_document import layer_params, state_memory
from ds_hydra.engine.ranks.memory import count_multiprocessors
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.sampler.candidate_set import gradient_bytes
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.cost_models.decoder import NUM_EXPERTS
from ds_hydra.strategy.profiles.profile import exchange_bytes
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.placement import groups_of

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 3 << 29
"""Bytes of CUDA and its libraries in each process, with EAGER loading: 1.3 GB idle, 1.6 with
cuBLAS, on an H200 under torch 2.11.
"""


def is_of_another_system(document: Mapping[str, Any]) -> bool:
    """Whether a profile says that something else than this engine was measured."""
    return bool(document.get("measured_with"))


def as_the_engine_needs(
    profile: Profile, stage_model: StageModel, config: HydraConfig, num_devices: int
) -> Profile:
    """`profile` with the larger of its memory and the engine's known needs. A profile that this
    engine measured stays as it is, but for the needs of `hydra.deterministic` if it was measured
    without.

    States are counted from the dtypes in use, activations of a layer are traced, communicators are
    those of all homogeneous strategies on one rank, exchange buffers those of two layers, or of a
    layer and a larger embedding. Not collective. Where the user has set
    `hydra.memory_limit_bytes`, communicators are the user's to leave out.
    """
    profile = _with_ordered_sums(profile, config)
    document = profile.document
    if not is_of_another_system(document):
        return profile
    memory = dict(document["memory"])
    counted = state_memory(stage_model)
    pairs = [_split(memory), _split(counted)]
    sharded, held = (max(parts) for parts in zip(*pairs, strict=True))
    if stage_model.offloads_optimizer:
        sharded = pairs[1][0]
    memory |= {
        "state_bytes_per_layer_per_hidden2": sharded + held,
        "sharded_fraction": sharded / (sharded + held),
        "vocabulary_tables": counted["vocabulary_tables"],
        "exchange_bytes": exchange_bytes(
            layer_params(stage_model),
            stage_model.hidden_size * stage_model.vocab_size,
            gradient_bytes(config),
        ),
    }
    key = "activation_bytes_per_token_per_layer_per_hidden"
    memory[key] = {
        tp: max(value, traced_activation(stage_model, int(tp), config) or 0.0)
        for tp, value in memory[key].items()
    }
    hardware = dict(document["hardware"])
    if config.memory_limit_bytes is None:
        hardware["reserved_bytes"] = max(
            hardware["reserved_bytes"], _CONTEXT_BYTES + _communicator_bytes(num_devices)
        )
    cut = stage_model.tp.cuts_micro_batches
    changed = {"memory": memory, "hardware": hardware, "tp_sequence_parallel": cut}
    return Profile.from_json({**document, **changed})


def _with_ordered_sums(profile: Profile, config: HydraConfig) -> Profile:
    """`profile`, with copies of gradients that `hydra.deterministic` takes and it does not have."""
    document = profile.document
    has_none = document["hardware"]["name"] == "cpu" or document.get("deterministic")
    if has_none or not config.deterministic or not keeps_copies(config.attention):
        return profile
    memory = {**document["memory"], "ordered_multiprocessors": count_multiprocessors()}
    return Profile.from_json({**document, "memory": memory})


def _split(memory: Mapping[str, Any]) -> tuple[float, float]:
    """Sharded and held bytes of states per layer and hidden unit squared."""
    total, share = memory["state_bytes_per_layer_per_hidden2"], memory["sharded_fraction"]
    return total * share, total * (1 - share)


def traced_activation(stage_model: StageModel, tp: int, config: HydraConfig) -> float | None:
    """Activation bytes of a layer under TP degree `tp`, as profiles have them; None where the model
    does not allow it, or torch cannot trace it.
    """
    try:
        layer = trace_layer_memory(
            stage_model.config,
            tp=tp,
            dtype=stage_model.params[0].dtype,
            checkpointing=config.activation_checkpointing,
            tp_sequence_parallel=stage_model.tp.cuts_micro_batches,
            compiled=config.compile_layers,
        )
    except UnsupportedModelError:
        return None
    return layer.activation_bytes


def _communicator_bytes(num_devices: int) -> int:
    """Device memory of NCCL's communicators on rank 0, with those of pull, push and the homogeneous
    strategies of all powers of two.
    """
    everyone = tuple(range(num_devices))
    keys = {("pull", everyone), ("push", everyone)}
    for scheme in power_of_two_schemes(num_devices):
        keys |= groups_of(Strategy.alike(scheme, num_devices))
    sizes = [len(ranks) for _, ranks in keys if 0 in ranks and len(ranks) > 1]
    return sum(NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES for size in sizes)


_EXPERT_WIDTHS = {"moe_intermediate_size", "shared_expert_intermediate_size"}
"""Keys of widths that TP cuts, where they are not those of the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank for a micro-batch of `num_tokens`.

    `kept_bytes` wait for the backward pass; `peak_bytes` is the most that is alive during forward
    and backward, parameters and their gradients left out.
    """

    num_tokens: int
    hidden_size: int
    tp: int
    kept_bytes: int
    peak_bytes: int

    @property
    def activation_bytes(self) -> float:
        """A of App. B.1, for which a layer keeps S * H / TP * A."""
        return self.kept_bytes * self.tp / (self.num_tokens * self.hidden_size)


def trace_layer_memory(
    config: PretrainedConfig,
    *,
    num_tokens: int = 1024,
    tp: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
    tp_sequence_parallel: bool = False,
    compiled: bool = False,
) -> LayerMemory:
    """Memory of one decoder layer of `config` for one sequence; allocates nothing.

    TP is traced as a layer with the rank's share of heads and MLP; residual stream and norms are
    whole on each rank, or with `tp_sequence_parallel` a shard of the tokens, padded to a multiple
    of `tp`. Raises UnsupportedModelError if the shapes do not divide by `tp`.

    A `compiled` layer keeps what torch's partitioner leaves for backward: inputs of norms, results
    of products, and attention. Its kernels compute the numbers between them again, but for those
    that leave one of its graphs: under TP what goes in and out of each module, else the input of
    attention, which runs outside where ranks share a sequence.

    Experts are traced in bf16, of which alone torch knows the shapes of grouped products; other
    types count by their size, which is not less than what they hold.

    Left out: the all-reduce's buffers, the embedding and the head, and fragmentation.
    """
    sliced = slice_config(config, tp)  # neither embedding nor head is traced
    traced, dtype = dtype, torch.bfloat16 if vars(sliced).keys() & NUM_EXPERTS else dtype
    scale = traced.itemsize / dtype.itemsize
    num_shards = tp if tp_sequence_parallel else 1
    num_tokens += -num_tokens % num_shards
    with FakeTensorMode(), _default_dtype(dtype):
        model, layer, rotary = _one_layer(sliced, num_shards)
        hidden = torch.empty(1, num_tokens // num_shards, config.hidden_size, requires_grad=True)
        positions = rotary(hidden, torch.arange(num_tokens)[None])
        tracker = MemTracker()
        tracker.track_external(layer, hidden, *positions)
        with tracker:
            kept = _Kept(layer)
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                output = _run(layer, hidden, positions, checkpointing)
            output.sum().backward()
        kept_bytes = kept.num_bytes
        if compiled and not checkpointing:
            _cut_graph(layer, module_sides(model) if tp > 1 else None)
            kept_bytes = min(kept_bytes, _partitioned_bytes(layer, hidden, positions))
        return LayerMemory(
            num_tokens=num_tokens,
            hidden_size=config.hidden_size,
            tp=tp,
            kept_bytes=round(kept_bytes * scale),
            peak_bytes=round(_peak_bytes(tracker) * scale),
        )


def check_slices(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where a model with a part of the heads and of the MLP of `config`
    does not compute as a rank of a TP group.
    """
    for name, style in (config.base_model_tp_plan or {}).items():
        if style in (tensor_parallel.GATHERED, tensor_parallel.SPLIT):
            raise UnsupportedModelError(
                f"every rank of a TP group has all features of {config.model_type} at {name} ({style}), which one "
                "device that stands for the rank does not show; measure on ranks (torchrun), or "
                "leave TP above 1 out (--tp 1)"
            )


def slice_config(
    config: PretrainedConfig, tp: int, *, num_layers: int = 1, vocab_size: int = 8
) -> PretrainedConfig:
    """The model that one rank of a TP group computes: its share of heads and MLP, `num_layers` of
    the layers.

    Raises UnsupportedModelError if the shapes do not divide by `tp`, or where the share does not
    show what the rank computes.
    """
    if tp > 1:
        check_slices(config)
    for key in ("num_attention_heads", "intermediate_size"):
        if getattr(config, key, None) is None:
            raise UnsupportedModelError(f"a {config.model_type} config has no {key} to slice by")
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    for name, value in (
        ("attention heads", heads),
        ("intermediate size", config.intermediate_size),
    ):
        if value % tp:
            raise UnsupportedModelError(f"{value} {name} do not divide into TP {tp}")
    sliced = copy.deepcopy(config)
    sliced.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sliced.num_attention_heads = heads // tp
    sliced.num_key_value_heads = max(1, (kv_heads or heads) // tp)
    sliced.intermediate_size = config.intermediate_size // tp
    for key in _EXPERT_WIDTHS & vars(config).keys():
        if width := getattr(config, key):
            if width % tp:
                raise UnsupportedModelError(f"{key} {width} does not divide into TP {tp}")
            setattr(sliced, key, width // tp)
    sliced.num_hidden_layers = num_layers
    sliced.vocab_size = vocab_size
    sliced.pad_token_id = None  # may be outside the micro-batches that are left
    if getattr(config, "layer_types", None):
        sliced.layer_types = config.layer_types[:num_layers]
    return sliced


def _one_layer(
    config: PretrainedConfig, num_shards: int
) -> tuple[PreTrainedModel, nn.Module, Callable[..., Any]]:
    """A model, its first layer, which runs on one of `num_shards` shards of a micro-batch, and what
    computes its rotary embeddings.
    """
    try:
        # Else that of the configuration, which says how the checkpoint is stored
        dtype = torch.get_default_dtype()
        model: Any = make_model(config, dtype=dtype, attn_implementation="sdpa").base_model
    except ValueError as error:  # softcapped attention, of which the eager kind keeps all scores
        raise UnsupportedModelError(str(error).split(".")[0]) from error
    if not hasattr(model, "layers") or not hasattr(model, "rotary_emb"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no 'layers' and 'rotary_emb' to trace"
        )
    layer, rotary = model.layers[0], model.rotary_emb
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        rotary = functools.partial(rotary, layer_type=config.layer_types[0])
    if num_shards > 1:
        _cut_micro_batches(model, layer, num_shards)
    return model, layer, rotary


def _cut_micro_batches(model: nn.Module, layer: nn.Module, num_shards: int) -> None:
    tp = tensor_parallel.TensorParallel(cuts_micro_batches=True, simulated_tp_size=num_shards)
    tp.enter(None, 1, 0)
    sides = module_sides(model)
    for block in tensor_parallel.find_blocks(layer, sides):
        tensor_parallel.hook_block(block, tp)
    for module in layer.modules():
        tensor_parallel.hook_linear(module, tp)
        if sides.get(module) == tensor_parallel.ROW:
            tensor_parallel.hook_rowwise(module, tp)


def _run(
    layer: nn.Module, hidden: Tensor, positions: tuple[Tensor, Tensor], checkpointing: bool
) -> Tensor:
    def forward(hidden: Tensor) -> Tensor:
        output = layer(hidden, position_embeddings=positions)
        return output[0] if isinstance(output, tuple) else output

    return checkpoint(forward, hidden, use_reentrant=True) if checkpointing else forward(hidden)


class _Kept:
    """Counts each storage that autograd keeps once, parameters left out."""

    def __init__(self, layer: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
        self._storages: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in self._parameters:
            self._storages[address] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._storages.values())


@torch.library.custom_op("ds_hydra::outside", mutates_args=())
def _outside(tensor: Tensor) -> Tensor:
    """`tensor`, which a graph ends with and another one begins with."""
    return tensor.clone()


_outside.register_fake(torch.empty_like)
_outside.register_autograd(lambda _, grad: grad)


def _cut_graph(layer: nn.Module, sides: Mapping[nn.Module, str] | None) -> None:
    """Let the graph of `layer` end where the engine leaves it: before attention, or where TP cuts
    modules (`sides`) after each module without others inside, and before the last one of an MLP.
    """

    def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {k: _outside(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return tuple(map(_outside, args)), given

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _outside(output) if isinstance(output, Tensor) else None

    attention = [m for m in layer.modules() if "Attention" in type(m).__name__]
    if sides is None:
        read = attention
    else:
        read = {m for m in layer.modules() if sides.get(m) == tensor_parallel.ROW}
        read -= {part for module in attention for part in module.modules()}
        for module in layer.modules():
            if not any(module.children()):
                module.register_forward_hook(after)
    for module in read:
        module.register_forward_pre_hook(before, with_kwargs=True)


def _partitioned_bytes(layer: nn.Module, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> float:
    """Bytes that forward leaves for backward where torch.compile cuts the graph of both in two;
    infinite where the layer is no such graph. Rotary embeddings, which all layers share, count not.
    """
    named = dict(layer.named_parameters())
    left = math.inf

    def run(weights: list[nn.Parameter], hidden: Tensor, *positions: Tensor) -> Tensor:
        bound = dict(zip(named, weights, strict=True))
        output = functional_call(layer, bound, (hidden,), {"position_embeddings": positions})
        return output[0] if isinstance(output, tuple) else output

    def count(graph: fx.GraphModule, _inputs: list[Tensor]) -> fx.GraphModule:
        nonlocal left
        given = graph.graph.find_nodes(op="placeholder")
        shared = {*given[: len(named)], *given[len(named) + 1 :]}
        outputs: Any = graph.graph.output_node().args[0]
        owners = {_owner(node) for node in outputs[1:]} - shared
        found = (owner.meta["val"] for owner in owners)
        left = sum(v.numel() * v.element_size() for v in found if isinstance(v, Tensor))
        return graph

    traced = aot_function(
        run,
        fw_compiler=count,
        bw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    try:
        with torch._functorch.config.patch(LEAST_KEPT):
            traced(list(named.values()), hidden, *positions)
    except Exception as error:  # torch has no common one for what it cannot trace
        logger.info("a compiled layer counts as an eager one, which torch traces: %s", error)
    return left


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of, or itself."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _peak_bytes(tracker: MemTracker) -> int:
    """Most bytes of activations and temporary buffers that were alive at once."""
    (by_kind,) = tracker.get_tracker_snapshot("peak").values()
    wanted = ("Activation", "Temp", "Other")
    return sum(size for kind, size in by_kind.items() if getattr(kind, "value", kind) in wanted)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
