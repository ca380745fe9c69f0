"""Trial of a tiny model of a family when the engine starts: values and gradients are compared with
each sequence alone. It shows whether a packed micro-batch keeps its sequences apart, and whether
layers run in stages.

[Note: One by one]
Where attention does not go through transformers' AttentionInterface, or layers have states of their
own (linear attention, convolutions), a packed micro-batch would mix its sequences. Layers with
states are first told where the sequences begin: the kernels of flash-linear-attention, mamba-ssm
and causal-conv1d, where installed, keep them apart by that, and transformers refuses it without
them. Then the modules with states run apart (apart.py). Where that is not enough the model runs the
sequences of a micro-batch one after the other, with its own attention, which is right for any model
that is causal.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hydra.engine.model import apart, decoder_parts, liger, model_checks
from ds_hydra.engine.model.adapters import unwrap_adapters
from ds_hydra.engine.model.attention import ATTENTION_NAME
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch
from ds_hydra.engine.model.language_model import language_model_of
from ds_hydra.engine.model.stage_model import ModelAbilities, StageModel
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme

logger = logging.getLogger(__name__)

_LENGTHS = (7, 4)
_POSITIONS = 10
"""Learned positions: more than a sequence takes, fewer than a micro-batch of both."""

_MOST_DIFFERENCE = 1e-3
"""Relative. Orders of sums differ by about 1e-6 in fp32, a sequence that sees another by 1e-2 and
more.
"""

_SHOW_STATES = frozenset({"linear_attention", "conv", "moe", "hybrid", "hybrid_sliding"})
"""Types of layers whose states two short sequences show. Of other types these may not show that
they mix, so they run one by one.
"""

_SMALLEST_SHARE = 1e-3
"""Share of the largest norm that smaller tensors are compared with."""

_MOST_PARAMETERS = 200_000_000

_verdicts: dict[tuple[Any, ...], ModelAbilities | str] = {}


def build_stage_model(model: nn.Module, **options: Any) -> StageModel:
    """Build the stage model of `model` with its small copy's abilities; `options`: StageModel's."""
    liger.check_patches(unwrap_adapters(model))
    stage_model = StageModel(model, try_small_copy(model), **options)
    stage_model.check_loss()
    if note := stage_model.after_head.loss_note:
        logger.warning("%s: %s", type(model).__name__, note)
    return stage_model


def try_small_copy(model: nn.Module) -> ModelAbilities:
    """Try a small model of the class of `model`.

    Raises UnsupportedModelError where sequences are not what each of them is alone, even one after
    the other, where tokens see later ones, or where no small model of the class runs.
    Deterministic, so equal on all ranks; takes tenths of a second, on the CPU, or on the
    accelerator where the family's code runs there alone.
    """
    model = language_model_of(model)
    model_checks.check_supported(model)
    kind, key = type(model), (model.config.to_json_string(), *_code_of(model))
    if key not in _verdicts:
        # Nothing of the trial may change the user's random numbers, nor depend on their defaults
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            try:
                _verdicts[key] = abilities = _try(kind, model.config)
                _log(kind, abilities)
            except UnsupportedModelError as error:
                _verdicts[key] = str(error)
    verdict = _verdicts[key]
    if isinstance(verdict, str):
        raise UnsupportedModelError(verdict)
    # Not cached with the verdict: an instance may have what its class has not
    if not verdict.one_by_one_because and (problem := _find_untried(model)):
        of_states = {"boundaries_because": "", "apart_because": "", "apart": frozenset()}
        verdict = replace(verdict, one_by_one_because=problem, **of_states)
        _log(kind, verdict)
    model_checks.check_unchanged(model, has_own_masks=bool(verdict.one_by_one_because))
    return verdict


def _code_of(model: nn.Module) -> tuple[Any, ...]:
    """Key of the code that a small copy of `model` would run: its class, and all functions that a
    program may have replaced since another one was tried.
    """
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    owners: set[Any] = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    owners |= {sys.modules[owner.__module__] for owner in owners if owner.__module__ in sys.modules}
    functions = frozenset(
        value
        for owner in owners
        for name, value in vars(owner).items()
        # DeepSpeed replaces `__init__` for a while where models are partitioned.
        if isinstance(value, FunctionType) and not name.startswith("__")
    )
    registered = frozenset(
        (name, function)
        for names in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        for name, function in names.items()
        if name != ATTENTION_NAME  # which the first trial registers
    )
    implementation = getattr(model.config, "_attn_implementation", None)
    return type(model), functions, registered, str(implementation)


def _log(kind: type[nn.Module], abilities: ModelAbilities) -> None:
    if abilities.one_by_one_because:
        logger.warning(
            "%s runs the sequences of a micro-batch one after the other with its own attention, under TP, SP and CP 1, "
            "because %s",
            kind.__name__,
            abilities.one_by_one_because,
        )
    if abilities.apart:
        logger.warning(
            "%s packs sequences, but for %s, which runs those of a micro-batch one after the other, because %s",
            kind.__name__,
            ", ".join(sorted(abilities.apart)),
            abilities.apart_because,
        )


def _try(kind: type[nn.Module], config: Any) -> ModelAbilities:
    small = _first_that_runs(kind, config)
    types = model_checks.other_layer_types(config)
    problem = states = f"it has layers of type {', '.join(types)}" if types else ""
    abilities = ModelAbilities(boundaries_because=states)
    if _SHOW_STATES.issuperset(types):
        problem = small.compare(abilities, Scheme(1, 1))
        if problem and states:
            problem = f"{states}, and {problem}"
    if problem and _SHOW_STATES.issuperset(types) and (kinds := small.find_mixed()):
        tried = ModelAbilities(apart=kinds, apart_because=problem)
        if not small.compare(tried, Scheme(1, 1)):
            abilities, problem = tried, ""
    if problem:
        abilities = ModelAbilities(one_by_one_because=problem)
        if still := small.compare(abilities, Scheme(1, 1)):
            raise UnsupportedModelError(
                f"{kind.__name__} (model type {config.model_type!r}) does not keep the sequences of a packed "
                f"micro-batch apart: {problem}; and one after the other {still}"
            )
        if small.looks_ahead():
            raise UnsupportedModelError(
                f"{kind.__name__} (model type {config.model_type!r}): its tokens see later ones, which is no causal "
                "language model; set is_decoder to true in its config where it has that"
            )
    if not small.runs_beyond_positions():
        abilities = replace(abilities, positions_end=True)
    if any(number != 1 for number in small.calls.values()):
        once = "it calls a layer more than once, or not at all"
        abilities = replace(abilities, no_gather_because=once)
    if small.num_layers > 1 and (problem := small.compare(abilities, Scheme(1, small.num_layers))):
        abilities = replace(abilities, no_stages_because=problem)
    return abilities


_DENSE = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)
_LIBRARIES = ("torch", "transformers", "accelerate", "liger_kernel")
"""Packages whose functions are as the model's own, or wrap them."""


def _package_of(what: Any) -> str:
    return str(what.__module__).partition(".")[0]


def _find_untried(model: nn.Module) -> str:
    """Describe what a program has put in the place of transformers' attention or mask, or "". Two
    short sequences do not show its effect on long ones, nor a small copy what an instance has.
    """
    name = getattr(model.config, "_attn_implementation", None)
    used: Any = ALL_ATTENTION_FUNCTIONS.get(name)
    used = getattr(used, "func", used)  # of a partial
    found = [] if used is None or used in _DENSE else [used]
    others: list[tuple[str, Any]] = [("", ALL_MASK_ATTENTION_FUNCTIONS.get(name))]
    masks = (n for n in vars(masking_utils) if n.startswith("create_"))
    names = [*masks, *(["eager_attention_forward"] if name == "eager" else [])]
    own, imported = set(), []
    for kind in type(model).__mro__:
        functions = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        others += [(_package_of(kind), functions[n]) for n in names if n in functions]
        own.add(_package_of(kind))
        imported += [value for value in functions.values() if isinstance(value, type)]
    for module in model.modules():
        if "Attention" in type(module).__name__:
            others.append(("", vars(module).get("forward")))
            for kind in type(module).__mro__:
                # What the model's own code has not, a small copy has not either
                home = _package_of(kind)
                is_own = home in own or kind in imported
                others.append((home if is_own else "", vars(kind).get("forward")))
    for home, function in others:
        function = getattr(function, "func", function)
        if function is not None and _package_of(function) not in (*_LIBRARIES, home):
            found.append(function)
    if not found:
        return ""
    first = min(f"{f.__module__}.{getattr(f, '__qualname__', f)}" for f in found)
    return f"{first} is in the place of transformers' attention or mask, and short sequences do not show all it does"


def _first_that_runs(kind: type[nn.Module], config: Any) -> _SmallCopy:
    """A small copy at the first sizes at which the family's own code runs, on the CPU if it can:
    kernels of an accelerator are all that its layers know where those are installed. Raises
    UnsupportedModelError with what it says at the smallest ones.
    """
    try:
        return _first_that_runs_on(torch.device("cpu"), kind, config)
    except UnsupportedModelError:
        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            raise
    return _first_that_runs_on(torch.device(accelerator.current_device_name()), kind, config)


def _first_that_runs_on(device: torch.device, kind: type[nn.Module], config: Any) -> _SmallCopy:
    first: Exception | None = None
    for small in small_configs(config, _POSITIONS):
        try:
            # Counted before memory is taken: some families have widths that no key makes smaller
            with torch.device("meta"):
                number = sum(p.numel() for p in kind(small).parameters())
            if number > _MOST_PARAMETERS:
                raise ValueError(
                    f"{number / 1e6:,.0f} million parameters that no width makes fewer"
                )
            return _SmallCopy(kind, small, device)
        except UnsupportedModelError:
            raise
        except Exception as error:  # a family's own code, at sizes that it was not written for
            first = first or error
    raise UnsupportedModelError(
        f"{kind.__name__} cannot be tried on a small model of its class ({type(first).__name__}: {first}), and "
        "whether it keeps the sequences of a packed micro-batch apart would not be known; its class has to take a "
        "configuration alone, and its configuration to be one that runs"
    ) from first


class _SmallCopy:
    """A small model, two sequences, and the results of each of them alone."""

    def __init__(self, kind: type[nn.Module], config: Any, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self._device = device
        self._model = _build(kind, config, generator).to(device)
        self._sequences = [_Sequence.draw(length, generator, device) for length in _LENGTHS]
        # Some models keep what they have computed: a copy of the same parameters runs
        same = {id(param): param for param in self._model.parameters()}
        self._runs: Any = copy.deepcopy(self._model, same)
        layers = list(decoder_parts.DecoderParts.find(self._runs).layers)
        self.num_layers = len(layers)
        with decoder_parts.noting_calls(layers) as calls:
            alone = [_run_alone(self._runs, sequence) for sequence in self._sequences]
        self.calls = {layer: calls.get(layer, 0) / len(alone) for layer in layers}
        # One backward for both: gradients of a shared micro-batch add up, too
        self._alone = self._gradients(alone)

    def compare(self, abilities: ModelAbilities, scheme: Scheme) -> str:
        """Describe the first difference in a shared micro-batch that runs under `scheme`, or ""."""
        try:
            stage_model = StageModel(self._model, abilities, aux_loss=False)
            # Known without a run, in words of its own
            if scheme.pp > 1 and stage_model.no_pp_because:
                return stage_model.no_pp_because
            together = self._gradients(self._run_together(stage_model, scheme))
        except UnsupportedModelError as error:
            return str(error)
        except Exception as error:  # a family's own code
            what = "it cannot run in stages" if scheme.pp > 1 else "a packed micro-batch fails"
            return f"{what} ({type(error).__name__}: {str(error)[:200]})"
        named = self._model.named_parameters()
        names = ["values", *(f"gradients of {name}" for name, _ in named)]
        how = "run in stages" if scheme.pp > 1 else "share a micro-batch"
        problem = _compare(names, together, self._alone)
        return problem and f"{problem} where two sequences {how}"

    def find_mixed(self) -> frozenset[str]:
        """Classes of modules in layers that mix sequences of a packed micro-batch."""
        try:
            stage_model = StageModel(self._model, aux_loss=False)
            layers = stage_model.layers
            with torch.no_grad(), apart.noting_mixed(layers, _MOST_DIFFERENCE) as kinds:
                self._run_together(stage_model, Scheme(1, 1))
        except Exception:  # a family's own code
            return frozenset()
        return frozenset(kinds)

    def looks_ahead(self) -> bool:
        """Whether another last token changes the outputs of a sequence before it."""
        input_ids = self._sequences[0].input_ids
        other = input_ids.clone()
        other[0, -1] = (other[0, -1] + 1) % VOCABULARY
        with torch.no_grad():
            mine, theirs = (
                self._runs(input_ids=ids, use_cache=False).logits[0, :-1]
                for ids in (input_ids, other)
            )
        return float((mine - theirs).norm()) > _MOST_DIFFERENCE * float(mine.norm())

    def runs_beyond_positions(self) -> bool:
        """Whether a sequence may be longer than the positions of the configuration."""
        positions = getattr(self._runs.config, "max_position_embeddings", None)
        # Only a limit that was made small can be gone beyond here
        if positions != _POSITIONS:
            return True
        try:
            with torch.no_grad():
                ids = torch.ones(1, positions + 5, dtype=int, device=self._device)
                self._runs(input_ids=ids, use_cache=False)
        except Exception:  # a family's own code
            return False
        return True

    def _run_together(self, stage_model: StageModel, scheme: Scheme) -> list[Tensor]:
        micro_batch = PackedMicroBatch.build(_LENGTHS, self._device)
        input_ids: Tensor | None = torch.cat([s.input_ids for s in self._sequences], dim=1)
        hidden: Tensor | None = None
        for stage in range(scheme.pp):
            # Whole parameters stand for slices: stages and packing are tried, not TP
            stage_model.bind(scheme, stage, dict(enumerate(stage_model.params)))
            try:
                hidden = stage_model.forward_stage(micro_batch, input_ids, hidden)
            finally:  # families' own code may fail
                stage_model.unbind()
            input_ids = None
            if stage < scheme.pp - 1 and hidden.shape[1:] != (
                sum(_LENGTHS),
                stage_model.hidden_size,
            ):
                raise UnsupportedModelError(
                    "its layers hand on more than one hidden state for each token: "
                    f"{tuple(hidden.shape)} for {sum(_LENGTHS)} tokens of {stage_model.hidden_size}"
                )
        assert hidden is not None
        return [hidden[0] * torch.cat([sequence.weights for sequence in self._sequences])]

    def _gradients(self, weighted: Sequence[Tensor]) -> list[Tensor]:
        """Return weighted logits of all sequences, and the gradient of their sum by parameter."""
        values = torch.cat(list(weighted))
        params = list(self._model.parameters())
        grads = torch.autograd.grad(values.sum(), params, allow_unused=True, materialize_grads=True)
        return [values.detach(), *grads]


@dataclass(frozen=True, slots=True)
class _Sequence:
    input_ids: Tensor
    """[1, l]."""
    weights: Tensor
    """[l, V], by which logits are added up."""

    @classmethod
    def draw(cls, length: int, generator: torch.Generator, device: torch.device) -> _Sequence:
        return cls(
            torch.randint(0, VOCABULARY, (1, length), generator=generator).to(device),
            torch.randn(length, VOCABULARY, generator=generator).to(device),
        )


def _build(kind: type[nn.Module], config: Any, generator: torch.Generator) -> nn.Module:
    """A model whose parameters follow from `generator`; vectors (norms, biases) near their initial
    values.
    """
    model = kind(config).float()
    for _, module, rate in model_checks.find_rates(model):  # what is trained may have lost them
        setattr(module, rate, 0.0)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            # By the width, so that activations neither grow nor vanish
            if param.dim() > 1:
                param.copy_(noise * param.shape[-1] ** -0.5)
            else:
                param.add_(noise * 0.1)
    return model.train().requires_grad_(True)  # some families fix biases of routers


def _run_alone(model: nn.Module, sequence: _Sequence) -> Tensor:
    logits = model(input_ids=sequence.input_ids, use_cache=False).logits[0]
    return logits * sequence.weights


def _compare(names: Sequence[str], got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    # Gradients that are zero but for rounding would be off by any factor
    floor = _SMALLEST_SHARE * max(float(tensor.norm()) for tensor in wanted)
    errors = [
        float((mine - theirs).norm()) / max(float(theirs.norm()), floor)
        for mine, theirs in zip(got, wanted, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] <= _MOST_DIFFERENCE:
        return ""
    return f"{names[worst]} are off by {errors[worst]:.0%}"


VOCABULARY = 32
_WINDOW = 3
_WIDTH = 48
_HEADLESS_WIDTH = 64
_CHUNK = 4


def small_configs(config: Any, positions: int) -> Iterator[Any]:
    """`config` with two layers (or one of each kind), small widths and at most `positions` learned
    positions, smallest first: heads keep their size and their grouping, and sizes that a family
    does not run at are followed by larger ones.
    """
    heads = _get(config, "num_attention_heads") or 1
    # With few positions first: a micro-batch longer than all of them shows learned ones
    for num_heads in sorted({min(2, heads), min(4, heads), heads}):
        yield _shrink(config, num_heads, positions)
        yield _shrink(config, num_heads, None)


def _shrink(config: Any, num_heads: int, positions: int | None) -> Any:
    small = copy.deepcopy(config)
    layers = _layers_of_each_kind(small)
    num_layers = _get(small, "num_hidden_layers")
    for key, value in list(vars(small).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(small, key, type(value)(value[i] for i in layers))
    for key, value in (
        dict.fromkeys(_LAYER_COUNTS, len(layers)) | _small_widths(small, num_heads)
    ).items():
        before = _get(small, key)
        if before is not None:
            of_layers = isinstance(before, list | tuple)
            _set(small, key, [value] * len(before) if of_layers else value)
    if positions is not None and (_get(small, "max_position_embeddings") or 0) > positions:
        small.max_position_embeddings = positions
    if (_get(small, "pad_token_id") or 0) >= VOCABULARY:
        small.pad_token_id = VOCABULARY - 1
    return small


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def _get(config: Any, key: str) -> Any:
    """Value of `config` at `key`, or None. Some configurations raise where layers differ."""
    try:
        return getattr(config, key, None)
    except Exception:  # a family's own configuration
        return None


def _set(config: Any, key: str, value: Any) -> None:
    with contextlib.suppress(NotImplementedError):  # names of others that cannot be set
        setattr(config, key, value)


def _layers_of_each_kind(config: Any) -> list[int]:
    """Two layers, or the first of each of more kinds, in their order; a kind is what the lists of
    the configuration with an entry for each layer say of it.
    """
    num_layers = _get(config, "num_hidden_layers") or 2
    of_layers = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and len(set(map(str, value))) < max(num_layers, 3)  # else numbers of layers
    ]
    kinds = [tuple(map(str, kind)) for kind in zip(*of_layers)] or [()] * num_layers
    first = {kinds.index(kind) for kind in kinds}
    return sorted(first | set(range(min(2, num_layers))))


def _small_widths(config: Any, num_heads: int) -> dict[str, int]:
    heads = _get(config, "num_attention_heads") or 1
    kv_heads = _get(config, "num_key_value_heads") or heads
    hidden = _get(config, "hidden_size") or _WIDTH
    head_dim = _get(config, "head_dim") or hidden // heads
    width = num_heads * head_dim if _get(config, "num_attention_heads") else _HEADLESS_WIDTH
    widths = {
        "num_attention_heads": num_heads,
        "decoder_attention_heads": num_heads,
        "encoder_attention_heads": num_heads,
        "num_decoder_attention_heads": num_heads,
        "num_key_value_heads": num_heads if kv_heads == heads else max(1, num_heads // 2),
        "hidden_size": width,
        "attention_hidden_size": width,
        "word_embed_proj_dim": width,
        "intermediate_size": _WIDTH,
        "decoder_ffn_dim": _WIDTH,
        "encoder_ffn_dim": _WIDTH,
        "ffn_dim": _WIDTH,
        "ffn_hidden_size": _WIDTH,
        "moe_intermediate_size": _WIDTH,
        "shared_expert_intermediate_size": _WIDTH,
        "first_k_dense_replace": min(1, _get(config, "first_k_dense_replace") or 0),
        "mamba_n_heads": _mamba_heads(config, width),
    }
    for key in ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"):
        if many := _get(config, key):
            few = _get(config, "linear_num_key_heads") or many
            widths[key] = 2 * max(1, many // few)
    if _get(config, "state_size"):  # a state space model without attention
        widths |= {"num_heads": _mamba_heads(config, width), "n_groups": 1}
    for part, most in (("window", _WINDOW), ("chunk_size", _CHUNK), ("vocab_size", VOCABULARY)):
        for key, value in vars(config).items():
            if part in key and type(value) is int and value > most:
                widths[key] = most
    return widths


def _mamba_heads(config: Any, width: int) -> int:
    """Heads of a state space layer, whose width is a multiple of the model's."""
    expanded = (_get(config, "mamba_expand") or _get(config, "expand") or 1) * width
    size = _get(config, "mamba_d_head") or _get(config, "head_dim")
    return max(1, expanded // size) if isinstance(size, int) and size else 1
