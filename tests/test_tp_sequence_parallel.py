"""Shards of a micro-batch inside TP groups: same gradients as one process, less memory, profiles
that say so, bad input.
"""

from __future__ import annotations

import functools

import pytest
from distributed import run_distributed
from engines import small_profile, start_hydra
from holdings import peak_bytes
from models import tiny, with_a_mixer, with_plan
from torch import nn

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.tensor_parallel import COLUMN, ROW, find_blocks
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profiler import measure_stage_ms, token_bytes
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.memory_model import SP_ACTIVATIONS_REPEATED
from ds_hydra.zero_link.layout import Slicing


def memory():
    """(bytes kept for each token, peak bytes of a micro-batch) by strategy."""
    engine = start_hydra(tiny("llama", hidden_size=64, intermediate_size=176))
    propagator = engine.propagator
    found = {}
    for text in ("4x<1,1>", "2x<2,1>", "1x<4,1>", "1x<sp4,1>", "4x<1,1;ckpt=4>", "1x<4,1;ckpt=4>"):
        strategy = Strategy.parse(text)
        propagator.prepare([strategy])
        kept = token_bytes(propagator, strategy, 256)
        run = functools.partial(measure_stage_ms, propagator, strategy, ProbeMicroBatch(512))
        found[text] = kept, peak_bytes(run)
    return found


@pytest.mark.distributed
def test_activations_fall_with_tp_and_sp():
    """Kept bytes are divided by TP, also where layers run again in backward."""
    found = run_distributed(memory, 4)[0]
    grad = 64 * 4  # before the head: made in forward, and whole on every rank until backward
    for part in ("", ";ckpt=4"):
        (whole, peak), (kept, peak_of_four) = found[f"4x<1,1{part}>"], found[f"1x<4,1{part}>"]
        share = (whole - grad) / 4
        assert share <= kept - grad < 1.1 * share
        # Of a recomputed layer, what gloo releases late decides
        assert part or peak_of_four < 0.6 * peak
    assert found["4x<1,1>"][0] / 2 <= found["2x<2,1>"][0] < 0.6 * found["4x<1,1>"][0]
    quarter = found["4x<1,1>"][0] / 4  # under SP, where key-value heads are repeated
    assert quarter < found["1x<sp4,1>"][0] < SP_ACTIVATIONS_REPEATED * 1.02 * quarter


def document(**more):
    return {**small_profile(10**7), **more}


def test_a_profile_of_the_other_way_is_refused_where_it_matters():
    hydra = HydraConfig(context_length=64, tokens_per_iteration=64)
    for recorded in (True, False):
        profile = Profile.from_json(document(tp_sequence_parallel=recorded))
        profile.check_config(hydra, "float32", cuts_micro_batches=recorded)
        with pytest.raises(HydraConfigError, match=r"measured with tp_sequence_parallel .* anew"):
            profile.check_config(hydra, "float32", cuts_micro_batches=not recorded)
        without_tp = Costs(profile).table([Scheme(1, 1)])
        without_tp.check_config(hydra, "float32", cuts_micro_batches=not recorded)
    published = Profile.from_json(document())  # which does not say
    published.check_config(hydra, "float32", cuts_micro_batches=True)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_setting_that_is_no_truth_value_is_refused(value):
    with pytest.raises(
        HydraConfigError, match=r"tp_sequence_parallel is .*, expected true or false"
    ):
        Profile.from_json(document(tp_sequence_parallel=value))


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


def test_norms_push_from_every_rank_and_biases_from_one():
    cut, whole = StageModel(tiny("llama_bias")), StageModel(tiny("olmo2"))
    rules, others = ({spec.fqn: spec.slicing for spec in of.specs} for of in (cut, whole))
    assert {rules[name] for name in rules if "norm" in name} == {Slicing.REPLICATED_PARTIAL_GRAD}
    assert others["model.layers.0.post_attention_layernorm.weight"] is Slicing.REPLICATED
    assert rules["model.layers.0.mlp.down_proj.bias"] is Slicing.FIRST_RANK
    assert cut.tp.micro_batch_multiple(4) == 4
    assert whole.tp.micro_batch_multiple(4) == cut.tp.micro_batch_multiple(1) == 1


def layer_of(**modules):
    return nn.ModuleDict(modules)


def linear():
    return nn.Linear(2, 2)


def test_blocks_are_parents_of_column_wise_modules_with_one_row_wise_module():
    first, second = (
        layer_of(q=linear(), k=linear(), norm=linear(), o=linear()),
        layer_of(up=linear(), down=linear()),
    )
    styles = {first.q: COLUMN, first.k: COLUMN, first.o: ROW, second.up: COLUMN, second.down: ROW}
    layer = layer_of(attention=first, norm=linear(), mlp=second)
    assert list(find_blocks(layer, styles)) == [first, second]
    for block, problem in (
        (layer_of(up=second.up), "has 1 column-wise and 0 row-wise"),
        (layer_of(down=second.down), "has 0 column-wise and 1 row-wise"),
        (layer_of(up=second.up, down=second.down, o=first.o), "has 1 column-wise and 2 row-wise"),
    ):
        with pytest.raises(ValueError, match=problem):
            list(find_blocks(layer_of(mlp=block), styles))
    with pytest.raises(ValueError, match="the layer itself has 1 column-wise"):
        list(find_blocks(second, styles))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (functools.partial(tiny, "olmo3"), "k_norm.weight sees features that ranks exchange"),
        (functools.partial(tiny, "deepseek_v3"), "attention is not cut by heads"),
        (
            functools.partial(with_plan, "llama", {"layers.*.mlp.down_proj": "colwise"}),
            "LlamaMLP has 3 column-wise",
        ),
        (functools.partial(with_a_mixer, "llama"), "rotary_emb.mixer is sliced outside of"),
    ],
)
def test_tp_ranks_have_whole_micro_batches_where_shards_would_falsify(make, problem):
    stage_model = StageModel(make())
    assert problem in stage_model.uncut_because
    assert not stage_model.tp.cuts_micro_batches
    check_scheme(stage_model, Scheme(2, 1))
