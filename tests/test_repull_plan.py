"""Which layers are pulled again, in which order: every use finds its layer, and none is overwritten too early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from ds_hydra.configs.hydra_config import REPULL_WINDOW
from ds_hydra.engine.pipeline import Pass
from ds_hydra.engine.repull_plan import (
    StageRepulls,
    check_repulls,
    choose_layers,
    plan_loads,
    split_repulled,
    stage_passes,
)
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy


@st.composite
def stages(draw):
    num_layers = draw(st.integers(3, 9))
    num_stages = draw(st.integers(1, 4))
    first_trained = draw(st.integers(0, num_layers))
    repulls = StageRepulls(
        buckets=tuple(range(1, num_layers + 1)),
        has_backward=tuple(layer >= first_trained for layer in range(num_layers)),
    )
    passes = stage_passes(
        num_stages,
        draw(st.integers(0, num_stages - 1)),
        draw(st.integers(0, 5)),
        training=draw(st.booleans()),
    )
    return repulls, passes


@given(stages())
def test_every_use_finds_its_layer_in_its_slot(case):
    repulls, passes = case
    uses = repulls.uses(passes)
    slots = [repulls.slot_of[bucket] for bucket in repulls.buckets]
    loads = plan_loads(uses)
    content = {}
    for use, position in enumerate(uses):
        for load in (load for load in loads if load.use == use):
            assert load.position == position
            assert load.after < use
            # Whoever was in the slot has been used for the last time at `after`.
            earlier = [u for u in range(use) if slots[uses[u]] == slots[position]]
            assert load.after == max(earlier, default=-1)
            content[slots[position]] = position
        assert content[slots[position]] == position
    assert len(set(slots)) == REPULL_WINDOW
    assert [load.use for load in loads] == sorted(load.use for load in loads)


@given(stages())
def test_uses_are_the_passes_in_order(case):
    repulls, passes = case
    uses = repulls.uses(passes)
    at = -1
    for pass_ in passes:
        layers = list(range(len(repulls.buckets)))
        if pass_ is Pass.BACKWARD:
            layers = [layer for layer in reversed(layers) if repulls.has_backward[layer]]
        for layer in layers:
            at += at < 0 or uses[at] != layer
            assert uses[at] == layer
    assert at == len(uses) - 1


def test_one_more_row_pulls_each_layer_twice_but_those_where_passes_turn():
    repulls = StageRepulls(buckets=tuple(range(8)), has_backward=(True,) * 8)
    loads = [len(plan_loads(repulls.uses(stage_passes(1, 0, rows, training=True)))) for rows in (1, 2, 3)]
    assert loads == [8 + 6, 8 + 6 + 12, 8 + 6 + 24]


@given(st.integers(1, 70), st.one_of(st.integers(3, 80), st.just("all")))
def test_layers_are_chosen_evenly(num_layers, wanted):
    chosen = choose_layers(num_layers, wanted)
    count = num_layers if wanted == "all" else min(num_layers, wanted)
    assert len(chosen) == (count if count > REPULL_WINDOW else 0)
    gaps = {b - a for a, b in zip([-1, *chosen], chosen, strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_layers_that_share_a_parameter_stay_and_backward_ends_at_the_first_trained_one():
    model = tiny("llama", num_hidden_layers=7)
    model.model.layers[4].mlp = model.model.layers[1].mlp
    for name, param in model.named_parameters():
        param.requires_grad_("layers.3" in name)
    skeleton = Skeleton(model)
    whole = skeleton.stage_repulls(Scheme(1, 1), 0, "all")
    assert whole.buckets == (1, 3, 4, 6, 7)  # bucket 0 is the embedding
    assert whole.has_backward == (False, False, True, True, True)
    assert (
        skeleton.stage_repulls(Scheme(1, 2), 1, "all").has_backward == ()
    )  # layers 4 to 6, of which 4 stays
    assert skeleton.stage_repulls(Scheme(1, 1), 0, 3).buckets == (3, 6, 7)
    strategy = Strategy.parse("1x<2,1> + 1x<1,2>")
    repulls = skeleton.strategy_repulls(strategy, 5, "all")
    assert [stage.buckets for stage in repulls[1:]] == [(1, 3, 4, 6, 7), (1, 3, 4), (), ()]
    buckets = skeleton.strategy_buckets(strategy, 5)
    kept, served = split_repulled(buckets, repulls)
    assert [r for r, bucket in enumerate(kept[0]) if bucket] == [0, 2, 5, 8]
    assert served[0] == tuple(buckets[0][r] for r in (1, 3, 4, 6, 7))
    assert served[3:] == [(), ()]
    assert kept[3] == buckets[3]


def test_what_cannot_be_served_is_refused():
    with pytest.raises(
        HydraConfigError, match=r"repull_layers is 9, the model has 7 layers; set it to 7 or less"
    ):
        check_repulls(9, 7)
    with pytest.raises(
        HydraConfigError, match=r'repull_layers is "all": .* CPU ranks .* on cuda set it to 0'
    ):
        check_repulls("all", 7, "cuda")
    check_repulls(0, 7, "cuda")
    check_repulls(7, 7)
