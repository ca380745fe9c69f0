"""The model without parameters: its own layer code, ready to run on pulled slices, and where each
slice goes.

[Note: Stage model]
DeepSpeed's hooks on the trained model would gather whole parameters, collectively. Propagation
therefore runs on a deep copy whose parameters are on the meta device (no memory) and whose buffers
are real. A stage binds its slices into the copy's modules, runs the model's own `forward`, and
unbinds them. Layers of other stages are replaced by modules that pass the hidden state through, so
the outer forward (rotary embedding, layer types, logit scaling) is the model's own for every
family.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_hydra.engine.model import attention
from ds_hydra.engine.model.adapters import SUMMED, is_lora, split_style, unwrap_adapters
from ds_hydra.engine.model.attention import PackedMicroBatch
from ds_hydra.engine.model.compilation import compile_each
from ds_hydra.engine.model.module_state import ModuleState, check_user_code
from ds_hydra.engine.model.rotary import MicroBatchInSight, follow_each_sequence
from ds_hydra.engine.parallel.tensor_parallel import (
    TensorParallel,
    hook_block,
    hook_colwise,
    hook_embedding,
    hook_rowwise,
)
from ds_hydra.engine.parallel.tp_sequence_parallel import find_blocks
from ds_hydra.engine.transfer.stream_plan import StageStreams, Window, copied_params
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import Bucket, ParamSpec, RankBuckets, SliceRef, Slicing

SUPPORTED_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Styles of transformers' tp plans that run on pulled slices."""

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
QUERY_PROJECTIONS = {"q_proj"}


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one parameter lives in the stage model: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str
    param: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: the embedding, one decoder layer, or norm and head."""

    name: str
    modules: tuple[nn.Module, ...]
    bindings: tuple[Binding, ...]


class PassThrough(nn.Module):
    """Stands in for a layer of another stage, or for the final norm: returns the hidden state."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """`hidden_states`, untouched."""
        return hidden_states


def shape_of(param: nn.Parameter) -> torch.Size:
    """Full shape, also of a parameter that `deepspeed.zero.Init` has already partitioned."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


class StageModel:
    """A parameter-free copy of a causal language model, runnable one stage at a time.

    `params` are the model's own parameters in the order of `specs`, those of LoRA adapters among
    them. Raises UnsupportedModelError by name for what cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        activation_checkpointing: bool = False,
        compile_layers: bool = False,
        tp_sequence_parallel: bool = False,
        simulated_tp_size: int = 1,
    ):
        model = unwrap_adapters(model)
        check_model(model)
        check_user_code(model)
        attention.register()
        self.params: list[nn.Parameter] = list(model.parameters())
        self.tp = TensorParallel(
            cuts_micro_batches=tp_sequence_parallel, simulated_tp_size=simulated_tp_size
        )
        memo = {
            id(p): nn.Parameter(
                torch.empty(shape_of(p), device="meta", dtype=p.dtype), p.requires_grad
            )
            for p in self.params
        }
        self._meta_params: list[nn.Parameter] = [memo[id(p)] for p in self.params]
        index_of = {id(meta): i for i, meta in enumerate(self._meta_params)}
        self._model = copy.deepcopy(model, memo)
        self._state = ModuleState(model, self._model)
        self._model.config._attn_implementation = attention.ATTENTION_NAME
        self._base = self._model.base_model
        self._base.config._attn_implementation = attention.ATTENTION_NAME
        self._model.train()
        self._sight = MicroBatchInSight()
        follow_each_sequence(self._model, self._sight)
        if activation_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = list(self._base.layers)
        self._always_checkpointed = [
            getattr(layer, "gradient_checkpointing", False) for layer in self._layers
        ]
        for layer, is_checkpointed in zip(self._layers, self._always_checkpointed, strict=True):
            if not is_checkpointed:
                layer._gradient_checkpointing_func = functools.partial(
                    checkpoint, use_reentrant=False
                )
        self._norm = self._base.norm
        self._embedding: nn.Embedding = self._model.get_input_embeddings()
        self._padding_idx = self._embedding.padding_idx
        head = self._model.get_output_embeddings()
        if is_lora(head):
            raise UnsupportedModelError(
                "adapter at the output head: ds_hydra cuts the head by vocabulary and has no rule for an adapter "
                "there; leave it out of LoraConfig.target_modules"
            )
        self.vocab_size: int = self._embedding.weight.shape[0]
        """Rows of the embedding."""
        self.num_logits: int = head.weight.shape[0]
        """Rows of the head; one of both may have been resized alone."""
        self.units: tuple[Unit, ...] = (
            _unit("embed", [self._embedding], index_of),
            *(_unit(f"layer.{i}", [layer], index_of) for i, layer in enumerate(self._layers)),
            _unit("head", [self._norm, head], index_of),
        )
        self._check_all_params_have_a_unit(model)
        self._await_unit: dict[nn.Module, Callable[[], None]] = {}
        self._before_backward: dict[nn.Module, Callable[[], None] | None] = {}
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(self._before_unit)
        for layer in self._layers:
            layer.register_forward_hook(self._after_layer)
        self.specs = self._build_specs(model, head)
        self._unplanned = self._find_unplanned()
        self._hook(head)
        self._uncut_because = self._hook_blocks(head) if tp_sequence_parallel else ""
        self._pass_through = PassThrough()
        self._no_pp_because = self._probe_pass_through()
        if compile_layers:
            compile_each(self._layers)

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self._base.config

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the activations that stages exchange."""
        return int(self._base.config.hidden_size)

    def check_scheme(self, scheme: Scheme) -> None:
        """Raise HydraConfigError where this model cannot run under `scheme`, naming degrees that
        work.
        """
        scheme.check_layers(self.num_layers)
        self._check_checkpointing(scheme)
        if scheme.pp > 1 and self._no_pp_because:
            raise UnsupportedModelError(
                f"scheme {scheme}: the layers of {type(self._model).__name__} cannot be split into stages, because "
                f"{self._no_pp_because}; use PP 1 in hydra.strategies"
            )
        if scheme.tp > 1:
            self._check_tensor_parallel(scheme)
        if scheme.sp > 1:
            self._check_sequence_parallel(scheme)

    def _check_sequence_parallel(self, scheme: Scheme) -> None:
        """Refuse degrees that do not divide the heads."""
        heads = self._base.config.num_attention_heads
        if heads % (scheme.sp * scheme.tp):
            works = [d for d in range(1, heads + 1) if heads % (d * scheme.tp) == 0]
            raise HydraConfigError(
                f"scheme {scheme}: SP {scheme.sp} x TP {scheme.tp} = {scheme.sp * scheme.tp} does not divide the "
                f"model's {heads} attention heads; use SP {', '.join(map(str, works))} with TP {scheme.tp} in "
                "hydra.strategies"
            )

    def _check_tensor_parallel(self, scheme: Scheme) -> None:
        """Refuse degrees that do not divide the heads, and layers that the tp plan does not
        slice.
        """
        config = self._base.config
        heads, kv_heads = config.num_attention_heads, _num_kv_heads(config)
        if heads % scheme.tp:
            works = [d for d in range(1, heads + 1) if heads % d == 0]
            raise HydraConfigError(
                f"scheme {scheme}: TP {scheme.tp} does not divide the model's {heads} attention heads; "
                f"use TP {', '.join(map(str, works))} in hydra.strategies"
            )
        if kv_heads % scheme.tp and scheme.tp % kv_heads:
            works = [
                d
                for d in range(1, heads + 1)
                if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)
            ]
            raise HydraConfigError(
                f"scheme {scheme}: TP {scheme.tp} and the model's {kv_heads} key-value heads do not divide "
                f"each other; use TP {', '.join(map(str, works))} in hydra.strategies"
            )
        if self._unplanned:
            raise UnsupportedModelError(
                f"scheme {scheme}: parameters {', '.join(self._unplanned[:3])} are used between sliced layers, but "
                f"the tp plan of {type(self._model).__name__} does not say how; use TP 1 in hydra.strategies"
            )
        refused = [
            f"{m} ({s})" for m, s in _tp_plan(self._model).items() if s not in SUPPORTED_STYLES
        ]
        if refused:
            raise UnsupportedModelError(
                f"scheme {scheme}: the tp plan of {type(self._model).__name__} has styles that ds_hydra does not run, "
                f"as for fused weights: {', '.join(refused)}; use TP 1 in hydra.strategies"
            )
        if self._uncut_because:
            raise UnsupportedModelError(
                f"scheme {scheme}: hydra.tp_sequence_parallel wants column-wise layers in blocks (attention, MLP) that "
                f"end in one row-wise layer, and in {type(self._model).__name__} {self._uncut_because}; set "
                "hydra.tp_sequence_parallel to false, or use TP 1 in hydra.strategies"
            )

    def _check_checkpointing(self, scheme: Scheme) -> None:
        if not scheme.ckpt:
            return
        if any(self._always_checkpointed):
            raise HydraConfigError(
                f"scheme {scheme}: hydra.activation_checkpointing, or the model's own gradient checkpointing, "
                "checkpoints layers under every scheme; turn it off, or leave ckpt out of hydra.strategies"
            )
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in self._layers):
            raise UnsupportedModelError(
                f"scheme {scheme}: transformers cannot checkpoint the layers of {type(self._model).__name__}; leave "
                "ckpt out of hydra.strategies"
            )

    def stage_layers(self, scheme: Scheme, stage: int) -> range:
        """Decoder layers of `stage`."""
        return scheme.stage_layers(self.num_layers, stage)

    def stage_units(self, scheme: Scheme, stage: int) -> tuple[Unit, ...]:
        """Units that `stage` needs, in the order in which forward uses them."""
        layers = [self.units[1 + i] for i in self.stage_layers(scheme, stage)]
        first = [self.units[0]] if stage == 0 else []
        last = [self.units[-1]] if stage == scheme.pp - 1 else []
        return (*first, *layers, *last)

    def buckets(self, scheme: Scheme, stage: int, tp_rank: int) -> RankBuckets:
        """Slices that rank `tp_rank` of `stage` pulls, one bucket per unit.

        A parameter that two units of the stage share (tied embeddings with PP 1) is pulled once, by
        the first.
        """
        seen: set[int] = set()
        buckets: list[Bucket] = []
        for unit in self.stage_units(scheme, stage):
            refs = []
            for binding in unit.bindings:
                if binding.param in seen:
                    continue
                seen.add(binding.param)
                spec = self.specs[binding.param]
                region = spec.slice_region(scheme.tp, tp_rank)
                refs.append(SliceRef(binding.param, region, spec.pushes_gradient(tp_rank)))
            buckets.append(tuple(refs))
        return tuple(buckets)

    def _unshared_layers(self, units: Sequence[Unit]) -> list[int]:
        """Places of the decoder layers among `units` that share no parameter with another unit."""
        owners = Counter(p for unit in self.units for p in {b.param for b in unit.bindings})
        layers = [r for r, unit in enumerate(units) if unit not in (self.units[0], self.units[-1])]
        return [r for r in layers if all(owners[b.param] == 1 for b in units[r].bindings)]

    def _in_order(self, units: Sequence[Unit], stage: int, buckets: Sequence[int]) -> Window:
        trained = [any(self.specs[b.param].requires_grad for b in unit.bindings) for unit in units]
        return Window(
            buckets=tuple(buckets),
            has_backward=tuple(stage > 0 or any(trained[: r + 1]) for r in buckets),
        )

    def stage_streams(self, scheme: Scheme, stage: int, tp_rank: int) -> StageStreams:
        """Which of the buckets of `tp_rank` stream, which of them have to be copied, and what."""
        units = self.stage_units(scheme, stage)
        streamed = {self.units[1 + i] for i in scheme.streamed_layers(self.num_layers, stage)}
        if scheme.streams_all:
            streamed |= {self.units[0], self.units[-1]}
        buckets = self.buckets(scheme, stage, tp_rank)
        copied = copied_params(self.specs, buckets)
        window = [
            r
            for r in self._unshared_layers(units)
            if units[r] in streamed and any(b.param in copied for b in units[r].bindings)
        ]
        return StageStreams(
            buckets=frozenset(r for r, unit in enumerate(units) if unit in streamed),
            window=self._in_order(units, stage, window),
            copied=copied,
        )

    def strategy_buckets(self, strategy: Strategy, num_ranks: int) -> list[RankBuckets]:
        """The buckets of all ranks under `strategy`; equal ones are one object. Idle ranks have
        none.
        """
        known: dict[tuple[Scheme, int, int], RankBuckets] = {}
        rank_buckets: list[RankBuckets] = [()] * num_ranks
        for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
            for place, rank in enumerate(ranks):
                key = (scheme, place // scheme.ranks_per_stage, place % scheme.tp)
                if key not in known:
                    known[key] = self.buckets(*key)
                rank_buckets[rank] = known[key]
        return rank_buckets

    def bind(
        self,
        scheme: Scheme,
        stage: int,
        leaves: dict[int, nn.Parameter],
        await_bucket: Callable[[int], None] = lambda _: None,
        before_backward: Mapping[int, Callable[[], None] | None] | None = None,
    ) -> None:
        """Put the stage's slices into the modules, other stages' layers out of the way, and
        checkpoint the scheme's.

        `await_bucket(r)` is called before every forward pass that reads the slices of the stage's
        r-th unit, and `before_backward[r]`, if the r-th unit is a layer, before every backward pass
        of it. Where that is None no gradient goes through the layer, because nothing below is
        trained.
        """
        for index, unit in enumerate(self.stage_units(scheme, stage)):
            if before_backward is not None and index in before_backward:
                self._before_backward[unit.modules[0]] = before_backward[index]
            for module in unit.modules:
                self._await_unit[module] = functools.partial(await_bucket, index)
            for binding in unit.bindings:
                binding.module._parameters[binding.attribute] = leaves[binding.param]
        self._embedding.padding_idx = self._local_padding_idx(self._embedding.weight.shape[0])
        own = self.stage_layers(scheme, stage)
        for index in own:
            self._layers[index].gradient_checkpointing = (
                self._always_checkpointed[index] or index < scheme.ckpt
            )
        self._show_layers(own, with_norm=stage == scheme.pp - 1)

    def unbind(self) -> None:
        """Put meta parameters back, so that nothing of the iteration stays alive."""
        for unit in self.units:
            for binding in unit.bindings:
                binding.module._parameters[binding.attribute] = self._meta_params[binding.param]
        self._await_unit.clear()
        self._before_backward.clear()
        self.tp.enter(None, 1, 0)

    def forward_stage(
        self,
        micro_batch: PackedMicroBatch,
        *,
        input_ids: Tensor | None,
        hidden: Tensor | None,
        is_last: bool,
    ) -> Tensor:
        """The model's own forward over the bound stage: hidden states, or this rank's logits on the
        last.

        `input_ids` [1, T] on the first stage, else `hidden` [1, T, H] from the stage before; where
        TP cuts micro-batches hidden states are this rank's shard [1, T / TP, H].
        """
        inputs = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        model = self._model if is_last else self._base
        self._sight.micro_batch = micro_batch
        output = model(
            **inputs,
            position_ids=micro_batch.position_ids,
            use_cache=False,
            packed_micro_batch=micro_batch,
        )
        self._sight.micro_batch = None
        self.tp.forget_input()
        return output.logits if is_last else output.last_hidden_state

    def carry_over(self) -> None:
        """Take over what was set on the trained model's modules (`ModuleState.carry_over`)."""
        self._state.carry_over()

    def to_device(self, device: torch.device) -> None:
        """Move buffers (rotary frequencies) to the compute device."""
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def _build_specs(self, model: nn.Module, head: nn.Module) -> tuple[ParamSpec, ...]:
        styles = dict(self._parameter_styles())
        slicing: dict[int, tuple[Slicing, int]] = {}
        for unit in self.units:
            for binding in unit.bindings:
                # Vocabulary rows, whatever the model's plan gathers
                if binding.module in (
                    head,
                    self._embedding,
                ):
                    slicing[binding.param] = (Slicing.COLWISE, 0)
                    continue
                style, name = styles.get(binding.module, ("replicated", ""))
                slicing[binding.param] = _slicing_of(
                    style,
                    name,
                    binding.attribute,
                    self.config,
                    cuts_micro_batches=self.tp.cuts_micro_batches,
                )
        names = {id(p): n for n, p in model.named_parameters()}
        specs = []
        for index, param in enumerate(self.params):
            rule, num_blocks = slicing[index]
            specs.append(
                ParamSpec(
                    fqn=names[id(param)],
                    shape=tuple(shape_of(param)),
                    slicing=rule,
                    num_blocks=num_blocks,
                    requires_grad=param.requires_grad,
                )
            )
        return tuple(specs)

    def _module_styles(self) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
        """(module, (style, last name part)) of every module that the tp plan mentions."""
        return module_styles(self._base)

    def _parameter_styles(self) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
        """As `_module_styles`, of the modules that hold the parameters (the parts of a LoRA
        layer).
        """
        for module, (style, name) in self._module_styles():
            for part, part_style in split_style(module, style):
                yield part, (part_style, name)

    def _hook(self, head: nn.Module) -> None:
        for module, (style, _) in self._module_styles():
            if style == "colwise":
                hook_colwise(module, self.tp)
            elif style == "rowwise":
                hook_rowwise(module, self.tp)
        hook_embedding(self._embedding, self.tp)
        hook_colwise(head, self.tp)

    def _hook_blocks(self, head: nn.Module) -> str:
        """Gather micro-batches before attention, MLPs and head; why the model has no such blocks,
        or "".
        """
        styles = {module: style for module, (style, _) in self._module_styles()}
        try:
            blocks = [block for layer in self._layers for block in find_blocks(layer, styles)]
        except ValueError as error:
            return str(error)
        for block in [*blocks, head]:
            hook_block(block, self.tp)
        return ""

    def _before_unit(self, module: nn.Module, _args: Any) -> None:
        if module in self._await_unit:
            self._await_unit[module]()

    def _after_layer(self, layer: nn.Module, _args: Any, output: Any) -> Any:
        """Let the gradient of the layer's output, the first that backward has of it, call
        `before_backward`.
        """
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if layer not in self._before_backward or not hidden.requires_grad:
            return None
        callback = self._before_backward[layer]
        if callback is None:
            hidden = hidden.detach()
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
        hidden.register_hook(lambda _: callback())
        return None

    def _local_padding_idx(self, num_rows: int) -> int | None:
        """Row of the padding token in this rank's slice of the embedding (its gradient is zero)."""
        if self._padding_idx is None:
            return None
        local = self._padding_idx - self.tp.first_row(self.vocab_size)
        return local if 0 <= local < num_rows else None

    def _show_layers(self, own: range, *, with_norm: bool) -> None:
        for index, layer in enumerate(self._layers):
            self._base.layers._modules[str(index)] = layer if index in own else self._pass_through
        self._base.norm = self._norm if with_norm else self._pass_through

    def _probe_pass_through(self) -> str:
        """Why the outer forward does not leave `inputs_embeds` alone when all layers pass them
        through, or "".

        It does for every family whose embedding scale is inside the embedding module; one that adds
        position embeddings or scales outside would do it again in every stage. A stage has neither
        layers nor norm of others, so each of them must be called once.
        """
        self._show_layers(range(0), with_norm=False)
        calls: list[None] = []
        counting = self._pass_through.register_forward_hook(lambda *_: calls.append(None))
        micro_batch = PackedMicroBatch.build([3, 2], torch.device("cpu"))
        hidden = torch.linspace(-1, 1, 5 * self.hidden_size).view(1, 5, self.hidden_size)
        try:
            with torch.no_grad():
                output = self.forward_stage(
                    micro_batch, input_ids=None, hidden=hidden, is_last=False
                )
            problem = ""
            if not torch.equal(output, hidden):
                problem = "it changes embeddings outside its embedding module"
            elif len(calls) != self.num_layers + 1:
                problem = "it calls a layer or its final norm more than once"
        except (RuntimeError, NotImplementedError, TypeError) as error:
            problem = f"running it without layers fails ({error})"
        counting.remove()
        self._show_layers(range(self.num_layers), with_norm=True)
        return problem

    def _find_unplanned(self) -> list[str]:
        """Parameters beside colwise layers (same parent module) whose own module the tp plan does
        not mention.

        Their gradient would be partial on each rank of a TP group, or not; only the plan can say.
        """
        styles = {module: style for module, (style, _) in self._module_styles()}
        planned = styles.keys() | dict(self._parameter_styles()).keys()
        parents = [
            module
            for layer in self._layers
            for module in layer.modules()
            if any(styles.get(child) == "colwise" for child in module.children())
        ]
        param_of = {(b.module, b.attribute): b.param for unit in self.units for b in unit.bindings}
        found = {
            self.specs[param_of[module, attribute]].fqn
            for parent in parents
            for module in parent.modules()
            if module not in planned
            for attribute, param in module._parameters.items()
            if param is not None
        }
        return sorted(found)

    def _check_all_params_have_a_unit(self, model: nn.Module) -> None:
        covered = {binding.param for unit in self.units for binding in unit.bindings}
        missing = [n for i, (n, _) in enumerate(model.named_parameters()) if i not in covered]
        if missing:
            raise UnsupportedModelError(
                f"{type(model).__name__} has parameters outside embedding, layers, norm and head: "
                f"{', '.join(missing[:4])}; ds_hydra does not propagate through them"
            )


def module_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """(module, (style, last name part)) of every module of `base` that its tp plan mentions."""
    patterns = [
        (re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")), style)
        for pattern, style in _tp_plan(base).items()
    ]
    for name, module in base.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield module, (style, name.rsplit(".", 1)[-1])


def _unit(name: str, modules: Sequence[nn.Module], index_of: dict[int, int]) -> Unit:
    bindings = [
        Binding(module, attribute, index_of[id(param)])
        for root in modules
        for module in root.modules()
        for attribute, param in module._parameters.items()
        if param is not None
    ]
    return Unit(name, tuple(modules), tuple(bindings))


def _slicing_of(
    style: str, name: str, attribute: str, config: Any, *, cuts_micro_batches: bool
) -> tuple[Slicing, int]:
    """Slicing rule and number of indivisible blocks of one parameter.

    Where TP `cuts_micro_batches`, parameters that the tp plan does not mention see a shard of the
    tokens.
    """
    if style == "colwise":
        if name in KEY_VALUE_PROJECTIONS:
            return Slicing.COLWISE, _num_kv_heads(config)
        return Slicing.COLWISE, config.num_attention_heads if name in QUERY_PROJECTIONS else 0
    if style == "rowwise":
        return (Slicing.FIRST_RANK if attribute == "bias" else Slicing.ROWWISE), 0
    if style == SUMMED and attribute == "bias":
        return Slicing.FIRST_RANK, 0
    if style in ("replicated_with_grad_allreduce", SUMMED):
        return Slicing.REPLICATED_PARTIAL_GRAD, 0
    return (Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED), 0


def _num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _tp_plan(model: nn.Module) -> dict[str, str]:
    return dict(model.base_model.config.base_model_tp_plan or {})


def check_model(model: nn.Module) -> None:
    """Raise UnsupportedModelError naming the first part of `model` that ds_hydra cannot train."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise UnsupportedModelError(
            f"{name} is not a Hugging Face causal language model; pass e.g. a LlamaForCausalLM"
        )
    base_config = model.base_model.config
    for problem in _problems(model, config, base_config):
        raise UnsupportedModelError(f"{name} (model type {config.model_type!r}): {problem}")


def _problems(model: nn.Module, config: Any, base_config: Any) -> Iterator[str]:
    for plan in ("base_model_tp_plan", "base_model_pp_plan"):
        if not getattr(base_config, plan, None):
            yield f"transformers ships no {plan} for it; ds_hydra needs one to slice or split the model"
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported; use a decoder-only model"
    base = model.base_model
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(base, part)]
    if missing or model.get_output_embeddings() is None:
        yield f"has no {', '.join(missing) or 'output head'} where ds_hydra looks for it"
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits is true, and the loss of balance that comes with it is over the micro-batch and "
            "would depend on the strategy; set model.config.output_router_logits to false"
        )
    for key, value in vars(base_config).items():
        if "jitter" in key and value:
            yield f"{key} = {value}: noise in the router would depend on the strategy; set it to 0 in model.config"
        if (
            ("dropout" in key or key.endswith("_pdrop"))
            and isinstance(value, int | float)
            and value
        ):
            yield f"{key} = {value}: dropout would depend on the strategy; set it to 0 in the model's config"
    layer_types = set(getattr(base_config, "layer_types", None) or ())
    if layer_types - SUPPORTED_LAYER_TYPES:
        yield f"layer types {sorted(layer_types - SUPPORTED_LAYER_TYPES)} are not supported"
    if getattr(base_config, "use_bidirectional_attention", False):
        yield "bidirectional attention is not supported; set use_bidirectional_attention to false"
    sinks = [name for name, _ in model.named_parameters() if name.endswith("sinks")]
    if sinks:
        yield f"attention sinks ({sinks[0]}) are not supported"
    if len({p.dtype for p in model.parameters()}) > 1:
        dtypes = sorted({str(p.dtype) for p in model.parameters()})
        yield f"parameters of several dtypes ({', '.join(dtypes)}); cast the model to one, e.g. model.float()"
