"""The user's model as stages: its own modules, ready to run on pulled slices, and where each slice
goes.

[Note: Stage model]
DeepSpeed's hooks on the trained model would gather whole parameters, collectively. While a rank's
passes run they are out, and the modules have slices in place of parameters ([Note: In place]). The
model's own `forward` runs; layers of other stages are replaced by `LayerPlaceholder`s, so the outer
forward (rotary embedding, layer types, logit scaling) is the model's own for every family. What
runs before the layers runs in every stage, later ones have zeros for its parameters and do not use
what it gives; the forward ends after a stage's own layers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model import attention, decoder_parts, model_checks
from ds_hydra.engine.model.adapters import check_head, use_saved_modules
from ds_hydra.engine.model.apart import run_apart
from ds_hydra.engine.model.attention_choice import (
    Choice,
    head_widths,
    layer_configs,
    select_kernels,
)
from ds_hydra.engine.model.current_micro_batch import checkpointed, current_micro_batch
from ds_hydra.engine.model.decoder_parts import Unit
from ds_hydra.engine.model.experts import ExpertBalance, ExpertParallel, hook_dispatch
from ds_hydra.engine.model.float8 import Float8Layers, use_plain_head
from ds_hydra.engine.model.in_place import InPlace
from ds_hydra.engine.model.language_model import language_model_of
from ds_hydra.engine.model.noise import add_neftune, count_noise
from ds_hydra.engine.model.since_start import SinceStart, find_hooks
from ds_hydra.engine.model.stage_forward import (
    AfterHead,
    StageForward,
    bind_constant,
    compile_each,
)
from ds_hydra.engine.model.tp_plan import (
    build_specs,
    expert_modules,
    find_unplanned,
    module_sides,
    module_styles,
)
from ds_hydra.engine.parallel.tensor_parallel import (
    GATHERED,
    LATENT,
    STYLES,
    TensorParallel,
    find_blocks,
    hook_embedding,
    hook_latent,
    hook_linear,
)
from ds_hydra.engine.transfer.schedule import Window
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.schemes.placement import coordinates
from ds_hydra.zero_link import Bucket, BucketEntry, ParamSpec, RankBuckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAbilities:
    """Results of a small copy's trial. A reason is "" where nothing stands in the way."""

    one_by_one_because: str = ""
    """Reason that the sequences of a micro-batch run one after the other ([Note: One by one])."""
    boundaries_because: str = ""
    """Reason that the layers of a packed micro-batch need the begins of its sequences."""
    apart: frozenset[str] = frozenset()
    """Classes of modules that run the sequences of a micro-batch one after the other
    ([Note: Modules apart]).
    """
    apart_because: str = ""
    """Reason that they do."""
    no_stages_because: str = ""
    """Reason that layers cannot be split into stages."""
    no_gather_because: str = ""
    """Reason that layers cannot be gathered."""
    positions_end: bool = False
    """Whether no sequence may be longer than `max_position_embeddings`: positions are learned."""

    @property
    def states_because(self) -> str:
        """Reason that a rank has to have whole sequences."""
        return self.boundaries_because or self.apart_because


def options_of(config: HydraConfig) -> dict[str, Any]:
    """Options of a StageModel that the "hydra" section has."""
    return {
        "activation_checkpointing": config.activation_checkpointing,
        "compile_layers": config.compile_layers,
        "neftune_noise_alpha": config.neftune_noise_alpha,
        "attention_kernel": config.attention,
        "float8": config.float8,
        "float8_exclude": config.float8_exclude,
    }


class StageModel:
    """A causal language model, runnable one stage at a time.

    `params` are the model's own parameters in the order of `specs`, those of LoRA adapters among
    them. `abilities` is what a small copy of the model has shown (`packing_probe.try_small_copy`).
    Raises UnsupportedModelError by name for what cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        abilities: ModelAbilities | None = None,
        *,
        activation_checkpointing: bool = False,
        compile_layers: bool = False,
        aux_loss: bool = True,
        neftune_noise_alpha: float = 0.0,
        attention_kernel: str = "auto",
        float8: str | None = None,
        float8_exclude: Sequence[str] = (),
        offloads_optimizer: bool = False,
    ):
        # Of a model that also reads images the language model alone trains
        model = language_model_of(model)
        model_checks.check_supported(model)
        self.model = model
        """Language model, without a wrapper of PEFT."""
        self.abilities = abilities or ModelAbilities()
        self.offloads_optimizer = offloads_optimizer
        """Whether masters and moments of its parameters are in the host's memory."""
        self.tp = TensorParallel()
        self.ep = ExpertParallel(self.tp)
        self._attention_kernel = attention_kernel
        # Read here: packed attention takes its place in the configuration below
        self._asked_attention = getattr(model.config, "_attn_implementation", None)
        self.attention_choices: Sequence[Choice] = ()
        """Choices of the attention kernel on the compute device, one for each width of heads."""
        named = list(model.named_parameters())
        # Modules have these while nothing is bound: a pass that reads them by mistake fails
        meta_of = {id(p): decoder_parts.on_meta(p) for _, p in named}
        for name, module in model.named_modules():
            for problem in find_hooks(name or type(model).__name__, module):
                raise UnsupportedModelError(problem)
        self._in_place, self._stays = InPlace(model, meta_of), False
        # Each part reads what those before it have found; a module's hooks run in the order in
        # which they are set here.
        with self._in_place:
            named = self._take_params(named, meta_of)
            parts = decoder_parts.DecoderParts.find(self.model)
            self._base, self._embedding, head = parts.base, parts.embedding, parts.head
            self._follow_sequences(parts.layers)
            self._checkpoint_layers(parts.layers, activation_checkpointing)
            self._replace_forward(parts)
            self._hook_units(parts)
            spec_of, blocks = self._describe_params(named, head)
            self.balance = ExpertBalance(self.model, self.layers, self.tp, with_loss=aux_loss)
            # With the balance loss taken out of the model's own
            self.after_head = self._try_head()
            self.has_noise = count_noise(self._base, self.tp, spec_of) or neftune_noise_alpha > 0
            self.float8 = Float8Layers(
                self.layers,
                spec_of,
                module_sides(self._base),
                self.tp,
                request=float8,
                exclude=float8_exclude,
                is_compiled=compile_layers,
            )
            model_checks.check_weights(named)
            self._hook_degrees(neftune_noise_alpha)
            self._hook_blocks(blocks, head)
            self._try_stages()
            if compile_layers:  # last: what is compiled has all hooks
                compile_each(self.layers)
            self._unbind()
        # Outside of the context: it looks at what the user has, not at what a stage has
        self._since_start = SinceStart(model, self._forward.inside_layers)

    def _take_params(
        self, named: Sequence[tuple[str, nn.Parameter]], meta_of: Mapping[int, nn.Parameter]
    ) -> list[tuple[str, nn.Parameter]]:
        """Take the parameters that run, with their names and copies without memory."""
        use_saved_modules(self.model)
        running = set(self.model.parameters())
        named = [(fqn, p) for fqn, p in named if meta_of[id(p)] in running]
        self.params: list[nn.Parameter] = [p for _, p in named]
        self._meta_params: list[nn.Parameter] = [meta_of[id(p)] for p in self.params]
        return named

    def _follow_sequences(self, layers: Iterable[nn.Module]) -> None:
        """Let attention and layers with states see where the sequences of a micro-batch begin."""
        if not self.abilities.one_by_one_because:
            attention.use_packed_attention(self.model)
        # transformers' layers checkpoint in training mode alone
        self.model.train()
        attention.follow_each_sequence(self.model)
        run_apart(layers, self.abilities.apart)

    def _checkpoint_layers(self, layers: Iterable[nn.Module], all_of_them: bool) -> None:
        """Let layers run again in backward where they are asked to, or under any scheme."""
        if all_of_them:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.layers = list(layers)
        """All decoder layers."""
        self.always_checkpointed = [
            getattr(layer, "gradient_checkpointing", False) for layer in self.layers
        ]
        """Whether each layer runs again in backward under any scheme."""
        for module in self.model.modules():
            # transformers' own function would run the layer again without its micro-batch
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = checkpointed

    def _replace_forward(self, parts: decoder_parts.DecoderParts) -> None:
        """Make the forward of a stage out of the model's own."""
        self._forward = StageForward(
            self.model,
            parts,
            self._meta_params,
            self.tp,
            one_by_one=bool(self.abilities.one_by_one_because),
            takes_boundaries=bool(self.abilities.boundaries_because),
        )
        self.forward_stage = self._forward.run
        head = parts.head
        check_head(head)
        use_plain_head(head, self.model)
        # A head with a forward of its own may do more than one product
        self._has_plain_head = type(head) is nn.Linear and "forward" not in vars(head)
        # Kept here: `bind` sets the module's own to the row in this rank's slice
        self._padding_idx = getattr(self._embedding, "padding_idx", None)
        self.vocab_size: int = self._embedding.weight.shape[0]
        """Rows of the embedding."""
        self.num_logits: int = head.weight.shape[0]
        """Rows of the head; one of both may have been resized alone."""

    def _hook_units(self, parts: decoder_parts.DecoderParts) -> None:
        """Find the units, and let passes wait for their slices."""
        self.units = self._find_units(parts)
        self._await_unit: dict[nn.Module, list[int]] = {}
        self._await_bucket: Callable[[int], None] = lambda _: None
        self._before_backward: dict[nn.Module, Callable[[], None] | None] = {}
        # A set: a module may be of both outer units, and one hook waits for all its units
        for module in {module for unit in self.units for module in unit.modules}:
            module.register_forward_pre_hook(self._before_unit)
        for module in (self._embedding, *self.layers):
            module.register_forward_hook(self._after_layer)

    def _describe_params(
        self, named: Sequence[tuple[str, nn.Parameter]], head: nn.Module
    ) -> tuple[dict[tuple[nn.Module, str], ParamSpec], list[nn.Module]]:
        """Find out how TP slices each parameter; return the description of each attribute that
        holds one, and the blocks that gather a micro-batch.
        """
        bindings = [binding for unit in self.units for binding in unit.bindings]
        # By place, not by parameter: a tied one has two places
        fqn_of = {(module, name): named[param][0] for module, name, param in bindings}
        blocks, self.uncut_because = self._find_blocks(fqn_of)
        """Blocks that gather a micro-batch under TP, or why the model has none: then every rank
        of a group has whole micro-batches.
        """
        self.tp.cuts_micro_batches = not self.uncut_because
        self.specs = build_specs(
            named,
            self._base,
            bindings=bindings,
            vocabulary=(head, self._embedding),
            cuts_micro_batches=self.tp.cuts_micro_batches,
        )
        self.unplanned = find_unplanned(self._base, fqn_of)
        """Parameters between sliced layers of which the tp plan should tell."""
        return {(module, name): self.specs[param] for module, name, param in bindings}, blocks

    def _hook_degrees(self, neftune: float) -> None:
        """Hook the modules whose results TP, EP and noise change."""
        for module, (style, _) in module_styles(self._base):
            hook = STYLES[style].hook if style in STYLES else None
            if hook is not None:
                hook(module, self.tp)
            # One by one runs under TP 1 alone
            elif style == LATENT and not self.abilities.one_by_one_because:
                hook_latent(module, self.tp, self.config.kv_lora_rank)
        experts = list(expert_modules(self._base))
        self.has_experts = bool(experts)
        """Whether some layer routes tokens to experts."""
        for module in experts:
            hook_dispatch(module, self.ep)
        hook_embedding(self._embedding, self.tp, partial(add_neftune, alpha=neftune))

    def _hook_blocks(self, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        """Hook blocks, products and the head, in the order in which they see a micro-batch."""
        # The head gathers a micro-batch as blocks do: its columns see all tokens
        self.tp.blocks = [*blocks, head] if self.tp.cuts_micro_batches else []
        for module in (*(m for layer in self.layers for m in layer.modules()), head):
            hook_linear(module, self.tp)
        self._forward.hook_head()  # after its block has gathered shards

    def _try_stages(self) -> None:
        """Find out whether layers of other stages can be left out of a forward."""
        # As in a later stage, which has zeros for what runs before the layers
        bind_constant(0.0, self.units[0].bindings, self._meta_params, self._forward.device)
        hidden = torch.linspace(-1, 1, 5 * self.hidden_size).view(1, 5, self.hidden_size)
        found = self._forward.find_placeholder_problem(hidden.to(self._meta_params[0].dtype))
        self.no_pp_because = self.abilities.no_stages_because or self.no_pp_because or found

    @property
    def config(self) -> Any:
        """Configuration of the base model."""
        return self._base.config

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of the activations that stages exchange."""
        return int(self._base.config.hidden_size)

    @cached_property
    def flops_of_pair(self) -> float:
        """FLOPs of attention of all layers, forward (2 products) and backward (5), for one query
        and one key.
        """
        layers = layer_configs(self.config)
        products = sum(
            getattr(layer, "num_attention_heads", 0) * max(map(sum, head_widths(layer)), default=0)
            for layer in layers
        )
        # One configuration may stand for all layers: their mean, times the layers
        return 7.0 * self.num_layers * products / len(layers)

    def stage_units(self, scheme: Scheme, stage: int) -> tuple[Unit, ...]:
        """Units that `stage` needs, in the order in which forward uses them."""
        layers = scheme.stage_layers(self.num_layers, stage)
        before, after = stage == 0, stage == scheme.pp - 1
        # Unit 0 runs before the layers: layer i is unit i + 1, and the last unit follows them
        return self.units[1 + layers.start - before : 1 + layers.stop + after]

    def buckets(self, scheme: Scheme, stage: int, tp_rank: int, ep_rank: int = 0) -> RankBuckets:
        """Slices that rank `tp_rank` of `stage` pulls, with part `ep_rank` of the experts, one
        bucket per unit.

        A parameter that two units of the stage share (tied embeddings with PP 1) is pulled once, by
        the first.
        """
        seen: set[int] = set()
        buckets: list[Bucket] = []
        for unit in self.stage_units(scheme, stage):
            params = [p for p in dict.fromkeys(b.param for b in unit.bindings) if p not in seen]
            seen.update(params)
            regions = [
                self.specs[p].slice_region(scheme.tp, tp_rank, scheme.ep, ep_rank) for p in params
            ]
            pushes = [self.specs[p].pushes_gradient(tp_rank, scheme.ep) for p in params]
            buckets.append(tuple(map(BucketEntry, params, regions, pushes)))
        return tuple(buckets)

    def gather_window(self) -> Window:
        """Find the buckets that all ranks gather for every pass: those that share no parameter."""
        owners = Counter(p for unit in self.units for p in {b.param for b in unit.bindings})
        alone = [
            r for r, u in enumerate(self.units) if all(owners[b.param] == 1 for b in u.bindings)
        ]
        # Layers take turns in slots: a single one has nobody to take turns with
        buckets = alone if len(alone) > 1 else []
        trained = [any(self.specs[b.param].requires_grad for b in u.bindings) for u in self.units]
        return Window(
            buckets=tuple(buckets),
            # Backward ends at the lowest unit that is trained: those below run forward only
            has_backward=tuple(any(trained[: r + 1]) for r in buckets),
        )

    def strategy_buckets(self, strategy: Strategy, num_ranks: int) -> list[RankBuckets]:
        """Find the buckets of all ranks under `strategy`; equal ones are one object. Idle ranks
        have none.
        """
        known: dict[tuple[Scheme, int, int, int], RankBuckets] = {}
        rank_buckets: list[RankBuckets] = [()] * num_ranks
        for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
            for (stage, shard, tp_rank), rank in zip(coordinates(scheme), ranks, strict=True):
                # EP neighbours are neighbours in the stage's SP x TP group, whatever their TP ranks
                key = (scheme, stage, tp_rank, (shard * scheme.tp + tp_rank) % scheme.ep)
                if key not in known:
                    known[key] = self.buckets(*key)
                rank_buckets[rank] = known[key]
        return rank_buckets

    def enter(self) -> None:
        """Make the model's modules a stage's, before hooks for its groups are set; `unbind` gives
        them back.
        """
        self._in_place.enter()

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
        r-th unit, and `before_backward[r]`, if the r-th unit is a layer or the embedding, before
        every backward pass of it. Where that is None no gradient goes through the layer, because
        nothing below is trained.
        """
        self.enter()
        if stage > 0:
            # The model's forward reads what is before the layers, of which nothing is pulled here
            device = next(iter(leaves.values())).device
            bind_constant(0.0, self.units[0].bindings, self._meta_params, device)
        for index, unit in enumerate(self.stage_units(scheme, stage)):
            if before_backward is not None and index in before_backward:
                self._before_backward[unit.modules[0]] = before_backward[index]
            for module in unit.modules:
                self._await_unit.setdefault(module, []).append(index)
            decoder_parts.bind(unit.bindings, leaves)
        self._await_bucket = await_bucket
        self._embedding.padding_idx = self._local_padding_idx(self._embedding.weight.shape[0])
        own = scheme.stage_layers(self.num_layers, stage)
        # All of them are checkpointed for memory, and then attention runs again, too
        keeps = not all(self.always_checkpointed) and scheme.keeps_attention(self.num_layers)
        for index in own:
            checkpoints = self.always_checkpointed[index] or index < scheme.ckpt
            layer: Any = self.layers[index]
            layer.gradient_checkpointing = checkpoints
            layer._gradient_checkpointing_func = partial(
                checkpointed, keeps=keeps, offloads=scheme.offload
            )
        self._forward.show_layers(own)

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Keep the modules a stage's from one `bind` to the next; the user's again at the end."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False
            self._in_place.leave()

    def unbind(self) -> None:
        """Leave the stage: nothing of the phase stays alive, and the modules are the user's again
        outside of `staying`.
        """
        self._unbind()
        if not self._stays:
            self._in_place.leave()

    def _unbind(self) -> None:
        for unit in self.units:
            decoder_parts.bind(unit.bindings, self._meta_params)
        self._await_unit.clear()
        self._await_bucket = lambda _: None
        self._before_backward.clear()
        self._forward.show_layers(range(self.num_layers))
        # Size 1 switches all hooks of TP off, for whatever runs between phases
        self.tp.enter(None, 1, 0)
        self.ep.leave()

    def check_unchanged(self) -> None:
        """Raise UnsupportedModelError for changes of the model since the start that training cannot
        follow.
        """
        self._in_place.check()
        self._since_start.check()
        if not self._since_start.take_changes_outside():
            return
        self.enter()
        try:
            # Training was set up for what followed the head: a scale may change, not become more
            before, self.after_head = self.after_head, self._try_head()
        finally:
            self.unbind()
        self.check_loss()
        if self.after_head.transform is None and before.transform is not None:
            raise UnsupportedModelError(
                f"what was set on modules of {type(self.model).__name__} makes its logits more than a scale or a cap "
                "of its head's output, as which training has begun; set it before ds_hydra.initialize"
            )

    def _try_head(self) -> AfterHead:
        return self._forward.try_head() if self._has_plain_head else AfterHead()

    def check_loss(self) -> None:
        """Raise UnsupportedModelError for a loss of the model that training would not minimise."""
        if self.after_head.loss_problem:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} (model type {self.model.config.model_type!r}): "
                f"{self.after_head.loss_problem}{model_checks.INSTEAD_OF_ITS_LOSS}"
            )

    def to_device(self, device: torch.device) -> None:
        """Move buffers (rotary frequencies) to the compute device, and choose the attention kernel
        there. Raises UnsupportedModelError for attention that no kernel of that device computes,
        HydraConfigError for a kernel that was asked for and cannot, and for 8-bit products that the
        device does not have.
        """
        self.float8.check_device(device)
        self.attention_choices = select_kernels(
            self.config,
            device,
            self.params[0].dtype,
            request=self._attention_kernel,
            asked_by_model=self._asked_attention,
        )
        for module in self.model.modules():
            # Not `module.to`, which would take the parameters along
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def _find_blocks(
        self, fqn_of: Mapping[tuple[nn.Module, str], str]
    ) -> tuple[list[nn.Module], str]:
        """Return attention and MLP blocks, which gather a micro-batch before their column-wise
        layers, and "", or nothing and why the model has no such blocks.
        """
        sides = module_sides(self._base)
        # Only blocks of layers, and the head, gather a micro-batch that is cut
        inside = {module for layer in self.layers for module in layer.modules()}
        if outside := [n for n, m in self._base.named_modules() if m in sides and m not in inside]:
            return [], f"{outside[0]} is sliced outside of the layers"
        if not self.has_plain_embedding:
            return [], "more than an embedding runs before the layers"
        if because := self.abilities.states_because:
            return [], f"states pass from token to token: {because}"
        try:
            blocks = [block for layer in self.layers for block in find_blocks(layer, sides)]
        except ValueError as error:
            return [], str(error)
        # They see all tokens on every rank, others a shard
        if between := find_unplanned(self._base, fqn_of, beside=GATHERED):
            return [], f"{between[0]} sees features that ranks exchange whole"
        return blocks, ""

    def _before_unit(self, module: nn.Module, _args: Any) -> None:
        for index in self._await_unit.get(module, ()):
            self._await_bucket(index)

    def _after_layer(self, layer: nn.Module, _args: Any, output: Any) -> Any:
        """Let the gradient of the layer's output, the first that backward has of it, call
        `before_backward`, and gather keys of other rows again.
        """
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        micro_batch = current_micro_batch()
        if micro_batch is not None and micro_batch.keys is not None:
            micro_batch.keys.before_backward(hidden)
        if layer not in self._before_backward or not hidden.requires_grad:
            return None
        callback = self._before_backward[layer]
        if callback is None:
            # Else backward would run through a layer whose slices are not brought again
            return (hidden.detach(), *output[1:]) if isinstance(output, tuple) else hidden.detach()
        hidden.register_hook(lambda _: callback())
        return None

    def _local_padding_idx(self, num_rows: int) -> int | None:
        """Row of the padding token in this rank's slice of the embedding (its gradient is zero)."""
        if self._padding_idx is None:
            return None
        local = self._padding_idx - self.tp.first_row(self.vocab_size)
        return local if 0 <= local < num_rows else None

    def _find_units(self, parts: decoder_parts.DecoderParts) -> tuple[Unit, ...]:
        """Find the units that travel together: all that runs before the layers, each layer, all
        that follows. A module before the layers that is no table may run after them, too.
        """
        index_of = {id(meta): i for i, meta in enumerate(self._meta_params)}
        before, read, self.no_pp_because = self._forward.find_modules_before()
        first = [self._embedding, *(m for m in (*before, *read) if m is not self._embedding)]
        tables = [m for m in before if isinstance(m, nn.Embedding)]
        last = [m for m in self._forward.outer if m not in tables]
        # Parameters that are read without a call of their module are there before the model runs
        reader = [self.model] if read else []
        self.has_plain_embedding = len(first) == 1
        """Whether nothing but the embedding has parameters that are used before the layers."""

        def unit(name: str, owners: Iterable[nn.Module], modules: Sequence[nn.Module]) -> Unit:
            return Unit(name, tuple(modules), decoder_parts.bindings_of(owners, index_of))

        def outer_unit(name: str, owners: Sequence[nn.Module]) -> Unit:
            holders = decoder_parts.with_holders(owners, self.model, parts.layers)
            return unit(name, owners, [*holders, *reader])

        layers = (unit(f"layer.{i}", m.modules(), [m]) for i, m in enumerate(self.layers))
        return (outer_unit("embed", first), *layers, outer_unit("head", last))
