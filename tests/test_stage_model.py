"""Which models and schemes are accepted, and what is said of the others; no rank is started."""

from __future__ import annotations

import functools
import re
import types
from dataclasses import replace

import kernels_apart
import pytest
import torch
import transformers
from models import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama import modeling_llama
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

from ds_hydra.engine.model import packing_probe, stage_forward
from ds_hydra.engine.model.attention_choice import head_widths
from ds_hydra.engine.model.current_micro_batch import checkpointed
from ds_hydra.engine.model.model_checks import check_supported
from ds_hydra.engine.model.scheme_support import check_context, check_scheme
from ds_hydra.engine.model.stage_forward import StageForward
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda model: setattr(model.model.embed_tokens, "padding_idx", 1),
            r"embed_tokens\.padding_idx was set after the start.* before ds_hydra",
        ),
        (
            lambda model: setattr(model.lm_head, "forward", torch.relu),
            r"lm_head\.forward was set after the start",
        ),
        (
            lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.Identity()),
            r"layers\.1\.mlp has other modules than at the start",
        ),
        (
            lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient),
            r"lm_head\.weight has a hook, .*<lambda>.*slices of it",
        ),
        (
            lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.zeros(m.vocab_size))),
            r"lm_head\.bias is another parameter than at the start.* before ds_hydra",
        ),
        (
            lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
            r"lm_head\.weight is another parameter",
        ),
        (
            lambda m: setattr(m.lm_head, "weight", None),
            r"lm_head\.weight is another parameter",
        ),
        (
            lambda model: model.half(),
            r"embed_tokens\.weight was torch\.float32 .* torch\.float16 now",
        ),
        (
            lambda m: setattr(m.model.layers[1].self_attn, "attention_dropout", 0.1),
            r"layers\.1\.self_attn.attention_dropout was 0 .* set it back",
        ),
    ],
)
def test_what_changes_after_the_start_is_named(change, named):
    model = tiny("llama")
    stage_model = StageModel(model)
    model.generation_config = transformers.GenerationConfig()
    model.bfloat16().float()  # what a start may do
    stage_model.check_unchanged()
    change(model)
    with pytest.raises(UnsupportedModelError, match=named):
        stage_model.check_unchanged()


NOISY = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
    "llama": {"attention_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.1},
}


@pytest.mark.parametrize(("family", "rates"), NOISY.items(), ids=NOISY)
def test_noise_of_a_loaded_model_is_refused_and_both_ways_out_work(tmp_path, family, rates):
    model = tiny(family, **rates)
    model.save_pretrained(tmp_path)
    zeros = dict.fromkeys(rates, 0.0)
    with pytest.raises(UnsupportedModelError) as refused:
        StageModel(model)
    advised = re.search(r"from_pretrained\(\.\.\., (.*?)\)", str(refused.value)).group(1)
    assert all(f"{key}=0.0" in advised for key in zeros)
    for key in zeros:
        setattr(model.config, key, 0.0)
    with pytest.raises(UnsupportedModelError, match=r"does not follow its config") as refused:
        StageModel(model)
    assert all(f"{key}=0.0" in str(refused.value) for key in zeros)
    refused = refused.value
    while refused is not None:  # each module that it names
        attribute, name = re.search(r"(\w+) = [\d.]+ of module ([\w.]+)", str(refused)).groups()
        setattr(model.get_submodule(name), attribute, 0)
        refused = None
        try:
            StageModel(model)
        except UnsupportedModelError as error:
            refused = error
    packing_probe.build_stage_model(model)
    named = dict.fromkeys(re.findall(r"(\w+)=0\.0", advised), 0.0)
    StageModel(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **named))


class Doubled(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if out.loss is not None:
            out.loss = out.loss * 2.0
        return out


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits * 0.5
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, vocab_size=self.config.vocab_size)
        return out


class OwnLoss(transformers.LlamaForCausalLM):
    loss_function = staticmethod(lambda logits, labels, **_: logits.sum())


def test_no_hook_stays_on_a_head_whose_model_cannot_be_tried(monkeypatch):
    run, ends = StageForward._run_few, stage_forward._end_at_head
    had = []

    def fails(forward, *given):
        had.append(ends in forward._head._forward_pre_hooks.values())
        assert not had[-1], "a family's own"
        return run(forward, *given)

    monkeypatch.setattr(StageForward, "_run_few", fails)
    model = tiny("llama")
    StageModel(model)
    assert had[:2] == [False, True]
    assert ends not in model.lm_head._forward_pre_hooks.values()


def test_a_loss_of_the_model_itself_is_refused():
    config = tiny("llama").config
    with pytest.raises(
        UnsupportedModelError, match=r"Doubled .* returns a loss of .* loss=\.\.\.\)"
    ):
        packing_probe.build_stage_model(Doubled(config))
    packing_probe.build_stage_model(Scaled(config))
    with pytest.raises(UnsupportedModelError, match="class OwnLoss has a loss_function of its own"):
        StageModel(OwnLoss(config))
    model = tiny("llama")
    stage_model = StageModel(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    for look in (stage_model.check_unchanged, lambda: StageModel(model)):
        with pytest.raises(UnsupportedModelError, match=r"its loss_function is .*<lambda>, which"):
            look()
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    StageModel(model)


def test_what_a_forward_of_transformers_adds_to_the_loss_is_refused():
    config = transformers.BambaConfig(num_hidden_layers=1, z_loss_coefficient=0.25)
    with torch.device("meta"):
        model = transformers.BambaForCausalLM(config)
    with pytest.raises(
        UnsupportedModelError,
        match=r"z_loss_coefficient = 0\.25 .* loss=.*CrossEntropy\(z_loss=0\.25\)",
    ):
        StageModel(model)


def state_of(model):
    flags = ("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")  # by number
    return [
        (
            type(m),
            {k: {**v} if isinstance(v, dict) else v for k, v in vars(m).items() if k not in flags},
        )
        for m in model.modules()
    ]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_modules_are_the_users_between_passes_and_hold_no_memory_in_them(family):
    model = tiny(family).eval()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    before, implementation = state_of(model), model.config._attn_implementation
    stage_model = packing_probe.build_stage_model(model)
    assert state_of(model) == before
    for _ in range(2):
        stage_model.enter()
        assert stage_model.model.training
        assert all(param.is_meta for param in model.parameters())
        assert model.config._attn_implementation != implementation
        stage_model.unbind()
        assert state_of(model) == before
        assert model.config._attn_implementation == implementation


def add_parameters_without_a_plan(model):
    model.model.layers[0].mlp.scale = torch.nn.LayerNorm(32)


def depend_on_all_features(model):
    model.config.activation_sparsity_pattern = [0.95, 0.0, 0.0, 0.0]


def have_a_style_that_is_not_run(model):
    plan = {**model.config.base_model_tp_plan, "layers.*.mlp.down_proj": "packed_rowwise"}
    model.config.base_model_tp_plan = plan


def plan_the_embedding_alone(model):
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}


def have_another_number_of_key_value_heads(model):
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(32, 32, bias=False)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (add_parameters_without_a_plan, r"<2,1>.*mlp.scale.*use TP 1"),
        (depend_on_all_features, r"activation_sparsity_pattern.*use TP 1"),
        (have_a_style_that_is_not_run, r"styles that .*mlp.down_proj \(packed_rowwise\).*use TP 1"),
        (plan_the_embedding_alone, r"no base_model_tp_plan.*use TP 1"),
        (have_another_number_of_key_value_heads, r"keys of 16, 32 features.*use TP 1"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_cut_refuse_tp_alone(edit, words):
    model = tiny("llama")
    edit(model)
    stage_model = packing_probe.build_stage_model(model)
    check_scheme(stage_model, Scheme(1, 2, sp=2))
    with pytest.raises(UnsupportedModelError, match=words):
        check_scheme(stage_model, Scheme(2, 1))


def test_a_plan_that_names_the_embedding_too_is_run():
    """Its rows are shared in any case; of other embeddings nothing is known."""
    model = tiny("llama")
    plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    model.config.base_model_tp_plan = plan
    check_scheme(packing_probe.build_stage_model(model), Scheme(2, 1))
    model.config.base_model_tp_plan = {**plan, "embed_positions": "embedding_rowwise"}
    with pytest.raises(UnsupportedModelError, match=r"embed_positions \(embedding_rowwise\)"):
        check_scheme(packing_probe.build_stage_model(model), Scheme(2, 1))


LLAMA_OF_6_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
WHOLE_FEATURES = {"intermediate_size": 70, "num_key_value_heads": 4}
"""Phi-3 gathers gate and up of all ranks, and cuts them again for down."""


@pytest.mark.parametrize(
    ("family", "sizes", "scheme", "words"),
    [
        ("llama", {}, "<3,1>", "TP 3 does not divide the model's 4 attention heads; use TP 1, 2, 4"),
        ("llama", {}, "<sp3,1>", "SP 3 x TP 1 = 3 does not divide the model's 4 .*heads; use SP 1, 2, 4 with TP 1"),
        ("llama", {}, "<sp4,2,1>", "SP 4 x TP 2 = 8 does not divide .*4 attention heads; use SP 1, 2 with TP 2"),
        ("llama", {}, "<sp2,3,1>", "TP 3 does not divide the model's 4 attention heads; use TP 1, 2 in"),
        ("llama", {}, "<1,5>", "PP 5 is above the model's 4 layers; use PP 4 or less"),
        ("llama", LLAMA_OF_6_HEADS, "<3,1>", "TP 3 and the model's 2 key-value heads.*use TP 1, 2, 6"),
        ("phi3", WHOLE_FEATURES, "<4,1>", "TP 4 does not divide the 70 features.*at down_proj"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(family, sizes, scheme, words):
    stage_model, scheme = StageModel(tiny(family, **sizes)), Scheme.parse(scheme)
    with pytest.raises(HydraConfigError, match=f"{scheme}: {words}") as refused:
        check_scheme(stage_model, scheme)
    degrees = re.search(r"use (\w+) (\d+(?:, \d+)*) (?!or less)", str(refused.value))
    for degree in degrees[2].split(", ") if degrees else ():
        check_scheme(stage_model, replace(scheme, **{degrees[1].lower(): int(degree)}))


def test_the_padding_token_is_a_row_of_one_ranks_slice():
    """Of 251 rows two ranks have 125 and 126."""
    stage_model, found = StageModel(tiny("llama", pad_token_id=200)), []
    for rank in range(2):
        stage_model.tp.enter(None, 2, rank)
        found.append(stage_model._local_padding_idx((125, 126)[rank]))
    stage_model.tp.enter(None, 1, 0)
    assert found == [None, 75]


def test_checkpointing_that_the_user_switched_on_stays_on_and_refuses_ckpt():
    model = tiny("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    stage_model = StageModel(model)
    stage_model.bind(Scheme(1, 1), 0, stage_model._meta_params, lambda index: None)
    assert all(layer.gradient_checkpointing for layer in stage_model.layers)
    with pytest.raises(
        HydraConfigError, match=r"<1,1;ckpt=2>: .*the model's own gradient checkpointing"
    ):
        check_scheme(stage_model, Scheme(1, 1, ckpt=2))


def test_a_trial_says_nothing_where_sequences_stay_apart_and_draws_no_number(caplog, monkeypatch):
    monkeypatch.setattr(packing_probe, "_verdicts", {})
    model, state = tiny("qwen3_moe"), torch.get_rng_state()
    with caplog.at_level("INFO", logger=packing_probe.__name__):
        packing_probe.try_small_copy(model)
    assert not caplog.records, "the probe was not run"
    assert torch.equal(torch.get_rng_state(), state)


class Leaking(transformers.LlamaForCausalLM):
    """A token sees a little of the one before it, whichever sequence that belongs to."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].self_attn.o_proj = self.Mixed(config.hidden_size)

    class Mixed(torch.nn.Linear):
        def __init__(self, width):
            super().__init__(width, width, bias=False)

        def forward(self, hidden_BTD):
            before_BTD = torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]
            return super().forward(hidden_BTD + 0.1 * before_BTD)


class LeakingOutside(Leaking):
    """The same behind the embedding, of which no layer knows."""

    def __init__(self, config):
        transformers.LlamaForCausalLM.__init__(self, config)
        self.model.embed_tokens = self.Leaky(config.vocab_size, config.hidden_size)

    class Leaky(torch.nn.Embedding):
        def forward(self, input_ids):
            embedded_BTH = super().forward(input_ids)
            before_BTH = torch.nn.functional.pad(embedded_BTH, (0, 0, 1, 0))[:, :-1]
            return embedded_BTH + 0.3 * before_BTH


class WithoutSmallCopy(Leaking):
    def __init__(self, config, more):
        super().__init__(config)


def test_families_that_do_not_keep_sequences_apart_run_them_one_by_one(caplog):
    config = transformers.LlamaConfig(**SIZES)
    settings = SIZES | {"num_experts": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**settings))
    for model, why in (
        (LeakingOutside(config), r"are off by \d+% where two sequences share a micro-batch"),
        (doge, "DogeAttention: .*a mask of its own"),
    ):
        stage_model = packing_probe.build_stage_model(model)
        assert re.search(f"one after the other .*{why}", caplog.messages.pop())
        check_scheme(stage_model, Scheme(1, 2))
        for scheme in (
            Scheme(2, 1),
            Scheme(1, 1, sp=2),
            Scheme(1, 1, cp=2),
            Scheme(1, 1, gather=True),
        ):
            with pytest.raises(UnsupportedModelError, match=f"one after the other.*{why}"):
                check_scheme(stage_model, scheme)


def test_heads_of_layers_that_differ_are_all_found():
    config = transformers.Gemma4TextConfig()
    widths = {layer.head_dim for layer in config.per_layer_config[:]}
    assert len(widths) > 1
    assert head_widths(config) >= {(width, width) for width in widths}


def test_a_verdict_is_of_the_code_that_there_is(monkeypatch):
    """A program that patches a class, a function or a registered attention after a first run."""
    tried, try_ = [], packing_probe._try

    def counted(*arguments):
        tried.append(1)
        return try_(*arguments)

    monkeypatch.setattr(packing_probe, "_verdicts", {})
    monkeypatch.setattr(packing_probe, "_try", counted)
    for _ in range(2):
        assert not packing_probe.try_small_copy(tiny("llama")).one_by_one_because
    assert len(tried) == 1
    forward = modeling_llama.LlamaAttention.forward

    def shifted(self, hidden_states, *args, **kwargs):
        before = torch.cat([hidden_states[:, :1], hidden_states[:, :-1]], dim=1)
        return forward(self, hidden_states + before, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", shifted)
        assert packing_probe.try_small_copy(tiny("llama")).one_by_one_because
    with monkeypatch.context() as patch:
        rotate = modeling_llama.rotate_half
        patch.setattr(modeling_llama, "rotate_half", lambda x: rotate(x))
        packing_probe.try_small_copy(tiny("llama"))
    transformers.AttentionInterface.register("of_mine", lambda *args, **kwargs: None)
    packing_probe.try_small_copy(tiny("llama"))
    assert len(tried) == 4
    assert not packing_probe.try_small_copy(tiny("llama")).one_by_one_because


def test_attention_of_the_users_own_runs_one_by_one(monkeypatch):
    """Two short sequences do not show what it does to long ones."""
    attention = modeling_llama.LlamaAttention
    forward, sdpa = attention.forward, transformers.modeling_utils.sdpa_attention_forward

    def for_long(self, hidden_states, *args, **kwargs):
        factor = 1 if hidden_states.shape[1] < 30 else 2
        return forward(self, hidden_states * factor, *args, **kwargs)

    def because(model):
        return packing_probe.try_small_copy(model).one_by_one_because

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    with monkeypatch.context() as patch:
        patch.setitem(functions._local_mapping, "sdpa", lambda *a, **k: sdpa(*a, **k))
        assert re.match(r"\w*test_stage_model\..*lambda> is in the place", because(tiny("llama")))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "forward", for_long)
        assert "for_long" in because(tiny("llama"))
    with monkeypatch.context() as patch:
        mask = modeling_llama.create_causal_mask
        patch.setattr(modeling_llama, "create_causal_mask", lambda *a, **k: mask(*a, **k))
        assert "lambda" in because(tiny("llama"))
    model = tiny("llama")
    assert not because(model)
    with monkeypatch.context() as patch:  # the same of a program's own class of model
        model.__class__ = type("Own", (type(model),), {})
        assert not because(model)
        patch.setattr(attention, "forward", for_long)
        assert "for_long" in because(model)
    layer = model.model.layers[2].self_attn
    for own in (types.MethodType(for_long, layer), functools.partial(for_long, layer)):
        layer.forward = own
        assert "for_long" in because(model)


def test_kernels_are_told_where_sequences_begin(monkeypatch, caplog):
    told = kernels_apart.install(modeling_olmo_hybrid, monkeypatch.setattr)
    monkeypatch.setattr(packing_probe, "_verdicts", {})
    stage_model = packing_probe.build_stage_model(tiny("olmo_hybrid"))
    assert not stage_model.abilities.one_by_one_because
    assert not caplog.messages
    assert {tuple(lengths) for lengths in told if len(lengths) > 1} == {(7, 4)}
    assert not stage_model.abilities.apart
    check_schemes_of_states(stage_model)


def check_schemes_of_states(stage_model):
    for works in ("<1,1>", "<1,2>", "<2,1>", "<1,1;gather>", "<1,1;ckpt=2>", "<1,1;ckpt=2;gather>"):
        check_scheme(stage_model, Scheme.parse(works))
    for scheme in (Scheme(1, 1, sp=2), Scheme(1, 1, cp=2)):
        with pytest.raises(UnsupportedModelError, match=r"token to token.*linear_attention.*SP 1"):
            check_scheme(stage_model, scheme)


def test_modules_with_states_run_each_sequence_where_no_kernel_keeps_them_apart(caplog):
    stage_model = packing_probe.build_stage_model(tiny("olmo_hybrid"))
    abilities = stage_model.abilities
    assert abilities.apart == {"OlmoHybridGatedDeltaNet"}
    assert not abilities.one_by_one_because
    assert not abilities.boundaries_because
    assert re.search("packs sequences, but for OlmoHybridGatedDeltaNet.*conv", caplog.messages[-1])
    check_schemes_of_states(stage_model)
    # The same of any module in a layer
    leaking = packing_probe.try_small_copy(Leaking(transformers.LlamaConfig(**SIZES)))
    assert leaking.apart == {"LlamaAttention"}


def test_kernels_that_mix_sequences_are_given_one_at_a_time(monkeypatch, caplog):
    kernels_apart.install(modeling_olmo_hybrid, monkeypatch.setattr)
    apart = modeling_olmo_hybrid.torch_chunk_gated_delta_rule

    def mixing(*args, cu_seqlens=None, **kwargs):
        return apart(*args, **kwargs)

    monkeypatch.setattr(modeling_olmo_hybrid, "torch_chunk_gated_delta_rule", mixing)
    monkeypatch.setattr(packing_probe, "_verdicts", {})
    trial = packing_probe.try_small_copy(tiny("olmo_hybrid"))
    assert re.search(r"linear_attention, and .* are off by \d+%", trial.apart_because)
    assert trial.apart == {"OlmoHybridGatedDeltaNet"}


def test_kernels_of_an_accelerator_alone_are_tried_there(monkeypatch):
    kernels_apart.install(modeling_olmo_hybrid, monkeypatch.setattr)
    apart = modeling_olmo_hybrid.torch_chunk_gated_delta_rule
    on_accelerator = []

    def of_accelerator(*args, **kwargs):
        if not on_accelerator:
            raise RuntimeError("cannot be accessed from Triton (cpu tensor?)")
        return apart(*args, **kwargs)

    monkeypatch.setattr(modeling_olmo_hybrid, "torch_chunk_gated_delta_rule", of_accelerator)
    monkeypatch.setattr(packing_probe, "_verdicts", {})
    with pytest.raises(UnsupportedModelError, match=r"cannot be tried .*cpu tensor"):
        packing_probe.try_small_copy(tiny("olmo_hybrid"))
    accelerator = types.SimpleNamespace(
        device_name=lambda: "cuda", current_device_name=lambda: on_accelerator.append(0) or "cpu"
    )
    monkeypatch.setattr(packing_probe, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(packing_probe, "_verdicts", {})
    assert packing_probe.try_small_copy(tiny("olmo_hybrid")).boundaries_because


class Growing(Leaking):
    """What a sequence gives depends on how many came before it."""

    class Mixed(torch.nn.Linear):
        calls = 0

        def __init__(self, width):
            super().__init__(width, width, bias=False)

        def forward(self, hidden_BTD):
            type(self).calls += 1
            return super().forward(hidden_BTD) * self.calls


def test_models_that_no_micro_batch_is_right_for_are_refused_by_name():
    bert = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    for model, words in (
        (Growing(transformers.LlamaConfig(**SIZES)), r"Growing .*apart: .*; and one after the"),
        (transformers.BertLMHeadModel(bert), "tokens see later ones.*set is_decoder to true"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            packing_probe.try_small_copy(model)
    vision = types.SimpleNamespace(
        model_type="gemma3", get_text_config=transformers.Gemma3TextConfig
    )
    model = tiny("llama")
    model.config = vision
    with pytest.raises(UnsupportedModelError, match=r"'gemma3'.*train Gemma3ForCausalLM with its"):
        check_supported(model)


def test_what_does_not_answer_as_a_model_does_is_named():
    with pytest.raises(UnsupportedModelError, match=r"pass the model itself.*hydra.compile_layers"):
        check_supported(torch.compile(tiny("llama")))


def changed_after_loading(change):
    sizes = {**SIZES, "num_hidden_layers": 4}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8))
    change(model.model)
    return model


def swap_layers(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def prune_layer(model):
    del model.layers[1]


def change_types(model):
    model.config.layer_types = ["full_attention"] * 4


def see_later_tokens(model):
    model.layers[2].self_attn.is_causal = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_layers, "self_attn of layer 0 has the attention of 'full_attention' .layer_idx 1.*sliding"),
        (prune_layer, "layer 1 has the attention of 'sliding_attention' .layer_idx 2.*'full_att"),
        (change_types, "layer 0 has the attention of 'sliding_attention' .layer_idx 0"),
        (see_later_tokens, "self_attn of layer 2 has is_causal = False"),
        (lambda m: setattr(m.config, "sliding_window", 3), "layer 0 has sliding_window = 4096.*says 3"),
        (lambda m: setattr(m.layers[2].self_attn, "sliding_window", 3), "layer 2 has sliding_window = 3"),
        (lambda m: setattr(m.embed_tokens, "max_norm", 1.0), "max_norm = 1.0.*set max_norm to None"),
        (lambda m: setattr(m.embed_tokens, "scale_grad_by_freq", True), "scale_grad_by_freq to False"),
    ],
)  # fmt: skip
def test_a_loaded_model_that_was_changed_is_refused(change, words):
    """transformers masks by `layer_types`, and here the modules decide."""
    packing_probe.build_stage_model(changed_after_loading(lambda model: None))
    with pytest.raises(UnsupportedModelError, match=words):
        packing_probe.build_stage_model(changed_after_loading(change))


def test_cross_attention_is_named():
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, add_cross_attention=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModelError, match="load the model with add_cross_attention=False"
    ):
        packing_probe.build_stage_model(transformers.GPT2LMHeadModel(config))


def test_sequences_are_not_longer_than_learned_positions():
    trial = packing_probe.try_small_copy(tiny("gpt2", n_positions=64))
    config = transformers.GPT2Config(n_positions=64)
    check_context(trial, config, 64)
    with pytest.raises(HydraConfigError, match=r"is 65, above the 64 positions.*to 64 or less"):
        check_context(trial, config, 65)
    check_context(packing_probe.try_small_copy(tiny("llama")), tiny("llama").config, 10**6)


def test_families_that_cannot_be_tried_are_refused_by_name():
    """A class that no small model can be made of, a configuration that does not run, one that
    checks what is set.
    """
    with pytest.raises(
        UnsupportedModelError, match=r"WithoutSmallCopy cannot be tried .*TypeError"
    ):
        packing_probe.try_small_copy(WithoutSmallCopy(transformers.LlamaConfig(**SIZES), 1))
    latent = SIZES | {"num_key_value_heads": 1, "num_attention_heads": 4}
    latent |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    model = transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**latent, v_head_dim=4))
    with pytest.raises(
        UnsupportedModelError, match=r"MiniCPM3ForCausalLM cannot be tried .*size of"
    ):
        packing_probe.try_small_copy(model)


def test_inputs_of_every_layer_refuse_stages_and_gathering():
    settings = SIZES | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings))
    stage_model = packing_probe.build_stage_model(model)
    check_scheme(stage_model, Scheme(1, 1, sp=2))
    with pytest.raises(UnsupportedModelError, match=r"<1,2>: .*into stages, because.*input_ids"):
        check_scheme(stage_model, Scheme(1, 2))
    with pytest.raises(UnsupportedModelError, match="it has more than an embedding before its lay"):
        check_scheme(stage_model, Scheme(1, 1, gather=True))


class NormedTwice(transformers.LlamaModel):
    """The final norm is that of the embeddings, too."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=self.norm(inputs_embeds), **kwargs)


class WithNormedEmbedding(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.__class__ = NormedTwice


class LayersTwice(transformers.LlamaForCausalLM):
    """Every layer runs twice."""

    def __init__(self, config):
        super().__init__(config)
        self.model.__class__ = self.Twice

    class Twice(transformers.LlamaModel):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            once = super().forward(input_ids, inputs_embeds=inputs_embeds, **kwargs)
            return super().forward(inputs_embeds=once.last_hidden_state, **kwargs)


def test_what_runs_twice_is_in_every_stage_that_needs_it_or_refuses_stages():
    config = transformers.LlamaConfig(**SIZES)
    check_scheme(packing_probe.build_stage_model(WithNormedEmbedding(config)), Scheme(1, 2))
    stage_model = packing_probe.build_stage_model(LayersTwice(config))
    check_scheme(stage_model, Scheme(1, 1))
    with pytest.raises(UnsupportedModelError, match=r"<1,2>: .*be split into stages, because"):
        check_scheme(stage_model, Scheme(1, 2))
    with pytest.raises(UnsupportedModelError, match="it calls a layer more than once"):
        check_scheme(stage_model, Scheme(1, 1, gather=True))


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "minicpm3", "mixtral"])
def test_flops_are_those_that_torch_counts(family):
    """Within 4%, which norms, biases and tables of positions are; torch counts attention whole."""
    model = tiny(family, **({"experts_implementation": "eager"} if family == "mixtral" else {}))
    flops = count_flops(StageModel(model))
    model.config._attn_implementation = "eager"
    ids = torch.arange(3, 27).view(1, -1)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    (whole,) = flops.attention
    attention = 12 * whole.width * ids.numel() ** 2
    assert flops.of([24]) == pytest.approx(24 * flops.per_token + attention / 2)
    assert counter.get_total_flops() == pytest.approx(24 * flops.per_token + attention, rel=0.04)


def test_flops_of_frozen_parameters_and_of_layers_with_a_state():
    model = tiny("llama")
    trained = count_flops(StageModel(model))
    for param in model.parameters():
        param.requires_grad = False
    model.lm_head.weight.requires_grad = True
    head = model.lm_head.weight.numel()
    frozen = count_flops(StageModel(model))
    assert frozen.per_token == pytest.approx(4 / 6 * (trained.per_token - 6 * head) + 6 * head)
    hybrid = tiny("olmo_hybrid")  # every second layer attends, the others have a state
    counted = count_flops(StageModel(hybrid))
    (attention,) = counted.attention
    assert attention.width == hybrid.config.num_hidden_layers / 2 * hybrid.config.hidden_size
    matrices = sum(p.numel() for n, p in hybrid.named_parameters() if "embed_tokens" not in n)
    assert 6 * matrices < counted.per_token < 6.5 * matrices


def test_layers_that_are_computed_again_keep_no_state_of_generators(monkeypatch):
    """Noise is counted, not drawn."""
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("a state was kept"))
    hidden = torch.ones(3, requires_grad=True)
    checkpointed(torch.exp, hidden).sum().backward()
    torch.testing.assert_close(hidden.grad, hidden.detach().exp())
