"""Shards of a micro-batch inside TP groups: same gradients as one process, less memory, profiles
that say so, bad input.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from engines import losses_under, small_profile, start_hydra, start_stock, stock_step
from holdings import peak_bytes
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import LENGTHS, assert_parity, check_gradients
from test_engine_training import batches
from torch import nn

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.candidates import find_unsupported
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.tensor_parallel import COLUMN, ROW, find_blocks
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profiler import measure_stage_ms, token_bytes
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.topology import LayerShape, StageParts, Topology
from ds_hydra.strategy.cost_models.topology import stage_ms as composed_stage_ms
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.zero_link.layout import Slicing

ON = {"tp_sequence_parallel": True}
SHORT_ROWS = (2, 2, 3, 1, 1, 2, 1)
"""Micro-batches of 2 to 5 tokens: fewer than ranks, or not a multiple of them."""

FEATURES = [
    ("glm4", ("1x<2,1>",), ON, (22, 5, 3)),
    ("phi3", ("1x<2,1>",), ON, SHORT_ROWS),
    ("ernie4_5_moe", ("1x<2,1>",), ON, (9, 5)),
]
"""MLPs and attention whose features are whole outside of linears; shared experts that see tokens
without a micro-batch.
"""

STRATEGIES = ("1x<4,1>", "1x<2,1> + 2x<1,1>", "1x<2,2>", "1x<sp2,2,1>", "2x<2,1;ckpt=2>")


def families(cases):
    return {
        (family, *key): value
        for family, strategies, hydra, lengths in cases
        for key, value in check_gradients(family, strategies, hydra, lengths=lengths).items()
    }


def training():
    """Losses of stock DeepSpeed, of strategies that change in every iteration, twice, and in
    bf16.
    """
    model, data = tiny("llama_tied"), batches(len(STRATEGIES))
    stock = start_stock(copy.deepcopy(model))
    wanted = [stock_step(stock, examples) for examples in data]
    curves = []
    for _ in range(2):
        engine = start_hydra(copy.deepcopy(model), hydra=ON)
        curves.append(losses_under(engine, data, STRATEGIES))
    half = start_hydra(copy.deepcopy(model), hydra=ON, bf16={"enabled": True})
    in_bf16 = [float(half.train_batch(b, strategy="1x<2,2>")) for b in data]
    return wanted, curves, in_bf16


def memory():
    """(bytes kept for each token, peak bytes of a micro-batch) by strategy, without and with
    shards.
    """
    found = []
    for is_cut in (False, True):
        model = tiny("llama", hidden_size=64, intermediate_size=176)
        engine = start_hydra(model, hydra={"tp_sequence_parallel": is_cut})
        propagator = engine.hydra.propagator
        of_strategies = {}
        for text in ("4x<1,1>", "2x<2,1>", "1x<4,1>", "4x<1,1;ckpt=4>", "1x<4,1;ckpt=4>"):
            strategy = Strategy.parse(text)
            engine.hydra.propagator.prepare([strategy])
            kept = token_bytes(propagator, strategy, 256)
            run = functools.partial(measure_stage_ms, propagator, strategy, ProbeMicroBatch(512))
            of_strategies[text] = kept, peak_bytes(run) if "<4,1" in text else None
        found.append(of_strategies)
    return found


def profiles(folder):
    """What profiles say and which are taken: measured ones, given ones, those of a checkpoint."""
    hydra = {
        "strategies": ["2x<2,1>", "4x<1,1>"],
        "profiling": {"lengths": [8, 32, 64], "repeats": 1, "warmup": 0},
    }
    model = tiny("llama")
    off, on = (start_hydra(copy.deepcopy(model), hydra={**hydra, **more}) for more in ({}, ON))
    measured_off = off.hydra.candidates.ensure_profile().document
    state = off.hydra.state_dict()
    off.hydra.load_state_dict(state)
    on.hydra.load_state_dict(state)
    measured = [
        measured_off,
        on.hydra.candidates.ensure_profile().document,
        off.hydra.candidates.ensure_profile().document,
    ]
    path = Path(folder) / f"{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(measured[1]))
    with pytest.raises(HydraConfigError) as refused:
        start_hydra(copy.deepcopy(model), hydra={**hydra, "profile": str(path)})
    accepted = start_hydra(copy.deepcopy(model), hydra={**hydra, **ON, "profile": str(path)})
    loss = float(accepted.train_batch(random_examples(LENGTHS, VOCAB_SIZE, seed=0)))
    return measured, str(refused.value), loss


def checks(folder):
    return {
        "training": training(),
        "memory": memory(),
        "profiles": profiles(folder),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `checks` found on each of 4 ranks, started once."""
    return run_distributed(checks, 4, str(tmp_path_factory.mktemp("profiles")), timeout_s=900)


@pytest.mark.distributed
def test_gradients_of_other_blocks_equal_one_process():
    assert_parity(run_distributed(families, 2, FEATURES)[0])


@pytest.mark.slow
@pytest.mark.distributed
def test_training_follows_stock_deepspeed_and_repeats_itself(results):
    wanted, curves, in_bf16 = results[0]["training"]
    torch.testing.assert_close(curves[0], wanted, rtol=1e-5, atol=0)
    assert curves[0] == curves[1]
    torch.testing.assert_close(in_bf16, wanted, rtol=5e-3, atol=0)


@pytest.mark.distributed
def test_activations_fall_with_tp(results):
    """What is kept is divided by TP; at the peak gathered micro-batches, and a checkpointed layer
    as a whole, are there too.
    """
    off, on = results[0]["memory"]
    grad = 64 * 4  # before the head: made in forward, and whole on every rank until backward
    for part in ("", ";ckpt=4"):
        whole, _ = on[f"4x<1,1{part}>"]
        assert whole == off[f"4x<1,1{part}>"][0]
        (kept, peak), (kept_off, peak_off) = on[f"1x<4,1{part}>"], off[f"1x<4,1{part}>"]
        share = (whole - grad) / 4
        assert share <= kept - grad < 1.1 * share < (kept_off - grad) / 1.5
        # Of a recomputed layer, what gloo releases late decides
        assert part or peak < 0.8 * peak_off
    assert off["4x<1,1>"][0] / 2 <= on["2x<2,1>"][0] < 0.85 * off["2x<2,1>"][0]


@pytest.mark.distributed
def test_profiles_say_how_they_were_measured(results):
    (off, on, taken_over), refused, loss = results[0]["profiles"]
    assert [p["tp_sequence_parallel"] for p in (off, on, taken_over)] == [False, True, False]
    assert taken_over == off, "a checkpoint's profile is only measured again where it would not fit"
    key = "activation_bytes_per_token_per_layer_per_hidden"
    assert on["memory"][key]["2"] < 0.85 * off["memory"][key]["2"]
    assert on["memory"][key]["1"] == off["memory"][key]["1"]
    assert "was measured with hydra.tp_sequence_parallel true, and it is false" in refused
    assert "set hydra.tp_sequence_parallel to true, or measure anew" in refused
    assert loss > 0


def document(**more):
    return {**small_profile(10**7), **more}


def test_a_profile_of_the_other_setting_is_refused_where_it_matters():
    sizes = {"context_length": 64, "tokens_per_iteration": 64}
    hydra = {on: HydraConfig(**sizes, tp_sequence_parallel=on) for on in (True, False)}
    for recorded in (True, False):
        profile = Profile.from_json(document(tp_sequence_parallel=recorded))
        profile.check_config(hydra[recorded], "float32")
        with pytest.raises(HydraConfigError, match=r"set hydra\.tp_sequence_parallel to"):
            profile.check_config(hydra[not recorded], "float32")
        Costs(profile).table([Scheme(1, 1)]).check_config(hydra[not recorded], "float32")
    Profile.from_json(document()).check_config(hydra[True], "float32")  # published ones do not say


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_setting_that_is_no_truth_value_is_refused(value):
    with pytest.raises(
        HydraConfigError, match=r"tp_sequence_parallel is .*, expected true or false"
    ):
        Profile.from_json(document(tp_sequence_parallel=value))
    with pytest.raises(HydraConfigError, match=r"hydra\.tp_sequence_parallel is "):
        HydraConfig.parse(
            {"context_length": 8, "tokens_per_iteration": 8, "tp_sequence_parallel": value}
        )


def test_inputs_of_checkpointed_layers_are_shared_by_a_tp_group():
    extra = {"input_bytes_per_token_per_layer_per_hidden": 4.0}
    memory = {**small_profile(10**7)["memory"], **extra}
    off, on = (
        Profile.from_json(document(memory=memory, tp_sequence_parallel=is_on)).memory
        for is_on in (False, True)
    )
    for text, num_ranks in (("<2,1;ckpt=2>", 2), ("<1,1;ckpt=2>", 1)):
        scheme = Scheme.parse(text)
        token_off, token_on = (
            memory.rank_bytes(scheme, 8, 2000) - memory.rank_bytes(scheme, 8, 1999)
            for memory in (off, on)
        )
        assert token_off - token_on == pytest.approx(2 * 32 * 4 * (1 - 1 / num_ranks))


def test_collectives_of_a_stage_by_hand():
    """Free computation, 2 layers, head and embedding on one stage: 2 (10 - 8) / 2 + 1 / 2 more
    all-reduces.
    """
    node = {"num_devices": 4, "device": "A", "latency_s": 0.0, "bytes_per_s": 1e9}
    topology = Topology.from_json(
        {
            "schema": "ds_hydra.topology/1",
            "nodes": [node],
            "between_nodes": {"latency_s": 0, "bytes_per_s": 1e9},
        }
    )
    shape = LayerShape(hidden_size=64, num_tokens=1000)

    def time_ms(scheme, *, cuts_micro_batches):
        parts = StageParts(layer_ms=0.0, ends_ms=0.0)
        return composed_stage_ms(
            scheme,
            parts,
            topology.interconnects(),
            shape,
            num_layers=2,
            passes=10 if cuts_micro_batches else 8,
            cuts_micro_batches=cuts_micro_batches,
        )

    whole, cut = (
        time_ms(Scheme(4, 1), cuts_micro_batches=cuts_micro_batches)
        for cuts_micro_batches in (False, True)
    )
    assert cut / whole == pytest.approx(12.5 / 10)
    assert time_ms(Scheme(1, 1), cuts_micro_batches=True) == 0
    hop, cut_hop = (
        time_ms(Scheme(1, 2), cuts_micro_batches=cuts_micro_batches)
        for cuts_micro_batches in (False, True)
    )
    assert hop == cut_hop > 0


def test_norms_push_from_every_rank_and_biases_from_one():
    plain, cut = (
        StageModel(tiny("llama_bias"), tp_sequence_parallel=is_on) for is_on in (False, True)
    )
    rules = [{spec.fqn: spec.slicing for spec in stage_model.specs} for stage_model in (plain, cut)]
    changed = {name for name in rules[0] if rules[0][name] is not rules[1][name]}
    assert changed == {name for name in rules[0] if "norm" in name}
    assert {rules[1][name] for name in changed} == {Slicing.REPLICATED_PARTIAL_GRAD}
    assert rules[1]["model.layers.0.mlp.down_proj.bias"] is Slicing.FIRST_RANK
    assert cut.tp.micro_batch_multiple(4) == 4
    assert plain.tp.micro_batch_multiple(4) == cut.tp.micro_batch_multiple(1) == 1


class Layer(nn.Module):
    """A layer of whatever modules."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def linear():
    return nn.Linear(2, 2)


def test_blocks_are_parents_of_column_wise_modules_with_one_row_wise_module():
    first, second = (
        Layer(q=linear(), k=linear(), norm=linear(), o=linear()),
        Layer(up=linear(), down=linear()),
    )
    styles = {first.q: COLUMN, first.k: COLUMN, first.o: ROW, second.up: COLUMN, second.down: ROW}
    layer = Layer(attention=first, norm=linear(), mlp=second)
    assert list(find_blocks(layer, styles)) == [first, second]
    for block, problem in (
        (Layer(up=second.up), "has 1 column-wise and 0 row-wise"),
        (Layer(down=second.down), "has 0 column-wise and 1 row-wise"),
        (Layer(up=second.up, down=second.down, o=first.o), "has 1 column-wise and 2 row-wise"),
    ):
        with pytest.raises(ValueError, match=problem):
            list(find_blocks(Layer(mlp=block), styles))
    with pytest.raises(ValueError, match="the layer itself has 1 column-wise"):
        list(find_blocks(second, styles))


def test_a_model_without_such_blocks_is_refused_under_tp_only():
    model = tiny("llama")
    plan = {**model.config.base_model_tp_plan, "layers.*.mlp.down_proj": "colwise"}
    model.config.base_model_tp_plan = plan
    stage_model = StageModel(model, tp_sequence_parallel=True)
    stage_model.check_scheme(Scheme(1, 2))
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaMLP has 3 column-wise .* set hydra\.tp_sequence"
    ):
        stage_model.check_scheme(Scheme(2, 1))
    (line,) = find_unsupported(stage_model, power_of_two_schemes(4))
    assert line.startswith("<2,1>, <4,1>, <2,2>: hydra.tp_sequence_parallel wants")
    assert not list(find_unsupported(StageModel(model), power_of_two_schemes(4)))
    StageModel(model).check_scheme(Scheme(2, 1))


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("olmo3", r"layers\.0\.self_attn\.k_norm\.weight sees features that ranks exchange whole"),
        ("deepseek_v3", "attention is not cut by heads"),
    ],
)
def test_blocks_that_shards_would_falsify_are_refused_under_tp_only(family, problem):
    stage_model = StageModel(tiny(family), tp_sequence_parallel=True)
    stage_model.check_scheme(Scheme(1, 2))
    with pytest.raises(
        UnsupportedModelError, match=rf"{problem}; set hydra\.tp_sequence_parallel to"
    ):
        stage_model.check_scheme(Scheme(2, 1))
    StageModel(tiny(family)).check_scheme(Scheme(2, 1))


def test_what_is_sliced_outside_of_the_layers_is_refused():
    model = tiny("llama")
    model.model.rotary_emb.mixer = nn.Linear(2, 2)
    plan = {**model.config.base_model_tp_plan, "rotary_emb.mixer": "colwise_gather_output"}
    model.config.base_model_tp_plan = plan
    with pytest.raises(UnsupportedModelError, match=r"rotary_emb\.mixer is sliced outside of"):
        StageModel(model, tp_sequence_parallel=True).check_scheme(Scheme(2, 1))
