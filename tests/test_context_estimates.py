"""Estimates of schemes with context parallelism that nobody measured: time, memory, which are
worth considering.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from spaces import full_space, priced
from test_sequence_parallel import PROFILE

from ds_hydra.configs import find_file
from ds_hydra.configs.files import read_json_object
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import (
    Hardware,
    ModelShape,
    key_values_ms,
    predict_latency,
    sequence_parallel_latency,
)
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.memory_model import ROW_TOLERANCE, SP_ACTIVATIONS_REPEATED
from ds_hydra.strategy.profiles.profile import LatencyModel, load_profile
from ds_hydra.strategy.proposal.space import context_parallel_schemes, unpruned_schemes

A800 = Hardware.from_json(read_json_object(find_file("hardware", "a800")), source="a800")
SHAPE = ModelShape(
    num_layers=10, hidden_size=100, intermediate_size=1, vocab_size=1, key_value_share=0.5
)


def test_measured_tp_tells_what_gathered_keys_cost():
    """<2,1> takes 0.5 - 0.8 / 2 = 0.1 ms for 4 H numbers; keys and values of 2 rows are 3 H."""
    profile = Profile.from_json(PROFILE)
    found = priced(profile, "1x<cp2,1>")
    two = found.latency[Scheme(1, 1, cp=2)]
    assert (two.quadratic_ms, two.constant_ms) == (4e-4, 2.0)
    assert two.linear_ms == pytest.approx(0.4 + 0.1 * 3 / 4)
    assert Costs(profile).find(Scheme(1, 1, cp=4)) is None, "nothing says how fast 4 ranks exchange"
    assert [e["cp"] for e in found.document["schemes"] if e.get("estimated")] == [2]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    grouped = Profile.from_json({**PROFILE, "model": {**PROFILE["model"], **heads}})
    quarter = priced(grouped, "1x<cp2,1>").latency[Scheme(1, 1, cp=2)]
    # Two key-value heads, so two parts: of two exchanges of three the first one is seen
    travels_ms = 0.1 * 3 / 4 / 4
    assert quarter.linear_ms == pytest.approx(0.4 + travels_ms / 3)
    assert quarter.hidden_ms == pytest.approx(travels_ms * 2 / 3)


def test_keys_cross_nodes_over_one_edge_of_each_ring():
    per_rank = 10 * 12 * 100 * 0.5 / 4  # layers, bytes, hidden units, share, TP
    inside = key_values_ms(SHAPE, A800, Scheme(4, 1, cp=2))
    assert inside == pytest.approx(1e3 * per_rank / 2 / A800.intra_node_rate)
    across = key_values_ms(SHAPE, A800, Scheme(4, 1, cp=4))
    rate = min(A800.intra_node_rate, A800.inter_node_rate / 4)
    assert across == pytest.approx(1e3 * per_rank * 3 / 4 / rate)
    assert key_values_ms(SHAPE, A800, Scheme(4, 1)) == 0.0


def test_neighbours_keep_their_keys_in_a_node_and_others_exchange_between_nodes():
    scheme = Scheme(1, 1, sp=2, cp=8, context_first=True)
    num_bytes = (
        10 * 12 * 100 * 0.5 / 2 * 7 / 8
    )  # layers, bytes, hidden units, share, SP, other rows
    inside = key_values_ms(SHAPE, A800, scheme)
    assert inside == pytest.approx(1e3 * num_bytes / A800.intra_node_rate)
    near = key_values_ms(SHAPE, A800, replace(scheme, context_first=False))
    assert near == pytest.approx(
        1e3 * num_bytes / min(A800.intra_node_rate, A800.inter_node_rate / 2)
    )
    # Queries, outputs, keys and values of a token, forward and backward, in 16 bit
    exchanged = 10 * 2 * 2 * (2 + 2 * 0.5) * 100 / 16
    shared = A800.inter_node_rate / 8
    more, in_node = (
        sequence_parallel_latency(SHAPE, A800, s).linear_ms
        for s in (scheme, replace(scheme, context_first=False))
    )
    assert more == pytest.approx(1e3 * exchanged / 2 / shared)
    assert in_node == pytest.approx(1e3 * exchanged / 2 / A800.intra_node_rate)
    # Half of 16 neighbours are in the own node
    wide = sequence_parallel_latency(SHAPE, A800, Scheme(1, 1, sp=16)).linear_ms
    assert wide == pytest.approx(1e3 * exchanged * 8 / 16 / shared)


def test_a_measured_tp_group_of_several_nodes_had_the_interconnect_for_itself():
    """<16,1> takes as long as <2,1> does; SP 8 x TP 2 still share the interconnect."""
    profile = load_profile("a800_llama2_7b")
    flat = dict(profile.latency)
    flat[Scheme(16, 1)] = replace(flat[Scheme(2, 1)], linear_ms=flat[Scheme(2, 1)].linear_ms / 8)
    costs = Costs.of(replace(profile, latency=flat), 64)
    scheme = Scheme(2, 1, sp=8)
    least = sequence_parallel_latency(costs.cluster.shape, costs.cluster.hardware, scheme).linear_ms
    assert least > 0
    share = flat[Scheme(2, 1)].linear_ms / 8
    found = costs.latency(scheme)
    assert found.linear_ms + found.exchange_ms == pytest.approx(share + least)
    # Four rings of TP 4 share what two of TP 2 do
    two, four = (Scheme(tp, 1, cp=16 // tp) for tp in (2, 4))
    travels = [Costs.of(profile, 64).latency(s).hidden_ms * s.cp / (s.cp - 1) for s in (two, four)]
    assert travels[1] == pytest.approx(travels[0], rel=0.1)


def test_the_order_of_ranks_changes_what_leaves_a_node_and_nothing_inside():
    profile = load_profile("a800_llama2_7b")
    costs = Costs.of(profile, 16)
    near, far = (Scheme(2, 1, sp=2, cp=4, context_first=c) for c in (False, True))
    assert costs.latency(far).hidden_ms < 0.7 * costs.latency(near).hidden_ms
    assert costs.latency(far).exchange_ms > costs.latency(near).exchange_ms
    unknown = Costs(profile)
    near, far = (Scheme(2, 1, sp=2, cp=2, context_first=c) for c in (False, True))
    for known in (costs, unknown):
        assert known.latency(far) == known.latency(near)
    assert unknown.find(Scheme(2, 1, sp=2, cp=4, context_first=True)) is None


def test_neighbours_of_a_row_are_proposed_where_a_group_has_several_nodes():
    """40 heads divide by SP 8: two and four nodes of eight ranks."""
    profile = load_profile("a800_llama2_13b")
    world = World.of(profile, find_cluster(profile, 32), 32, 1)
    found = [s for s in unpruned_schemes(world, 1e6) if s.context_first]
    assert {(s.cp, s.sp) for s in found} == {(8, 2), (8, 4)}
    assert all(s.gather and s.tp == 1 for s in found)
    in_one = World.of(profile, find_cluster(profile, 8), 8, 1)
    assert not any(s.context_first for s in unpruned_schemes(in_one, 1e6))
    far, near = (
        world.costs.latency(Scheme(1, 1, sp=4, cp=8, context_first=c, gather=True))
        for c in (True, False)
    )
    assert far.hidden_ms < near.hidden_ms / 3
    assert far.exchange_ms > 3 * near.exchange_ms


def test_roofline_of_cp_shares_work_and_adds_keys():
    one, rows = (predict_latency(SHAPE, A800, s) for s in (Scheme(1, 1), Scheme(1, 1, cp=4)))
    assert rows.quadratic_ms == pytest.approx(one.quadratic_ms / 4)
    keys = key_values_ms(SHAPE, A800, Scheme(1, 1, cp=4))
    assert rows.linear_ms == pytest.approx(one.linear_ms / 4 + keys)
    assert rows.constant_ms > one.constant_ms


def test_links_tell_where_measured_schemes_do_not():
    profile = load_profile("a800_llama2_13b")
    cluster = find_cluster(profile, 64)
    scheme = Scheme(8, 1, cp=8)
    assert Scheme(64, 1) not in profile.latency
    found = Costs(profile, cluster).latency(scheme)
    base = profile.latency[Scheme(8, 1)]
    keys = key_values_ms(cluster.shape, cluster.hardware, scheme)
    # Five heads a rank, in four parts of 1, 1, 1, 2: of two exchanges of three the first is seen
    assert found.linear_ms == pytest.approx(base.linear_ms / 8 + keys * 2 / 3 / 5)
    start_ms = cluster.shape.num_layers * cluster.hardware.collective_overhead_ms
    assert found.constant_ms == pytest.approx(base.constant_ms + 2 * start_ms)
    hidden_ms = 6 / 5 * keys * (1 - 2 / 3 / 5) + (3 * 4 - 2) * start_ms / (8 * 8192)
    assert found.hidden_ms == pytest.approx(hidden_ms)
    assert found.quadratic_ms * 3000 < found.hidden_ms < found.quadratic_ms * 6e5
    assert found.sequence_ms(3000) == pytest.approx((found.linear_ms + found.hidden_ms) * 3000)
    of_each = found.sequences_ms(np.array([100, 3000, 600_000]))
    assert of_each[0] == pytest.approx(found.sequence_ms(100))
    assert of_each[1] == pytest.approx(found.sequence_ms(3000))
    for place, whole_or_long in ((0, 100), (2, 600_000)):
        attention_ms = found.quadratic_ms * whole_or_long**2
        assert of_each[place] == pytest.approx(found.linear_ms * whole_or_long + attention_ms)
    assert found.scaled(2.0).sequence_ms(3000) == pytest.approx(2 * found.sequence_ms(3000))
    assert LatencyModel(**found.to_json()) == found
    assert Costs(profile).find(scheme) is None
    stretched = Costs.of(profile, 64).find(replace(scheme, ckpt=39))
    share = 39 / 40
    wanted_ms = (1 + share / 3) * found.linear_ms + share * found.exchange_ms / 2
    assert stretched.latency.linear_ms == pytest.approx(wanted_ms)
    assert stretched.latency.hidden_ms == found.hidden_ms, "keys are gathered as often"
    assert (stretched.origin, stretched.sources) == ("derived", (scheme,))


def test_cp_in_place_of_sp_and_where_heads_end():
    """40 heads divide by SP 8, 32 by 32."""
    thirteen, seven = (load_profile(f"a800_llama2_{size}b") for size in (13, 7))
    beyond = {str(s) for s in context_parallel_schemes(World.of(thirteen, None, 16, 1))}
    assert {"<sp8,cp2,1>", "<sp4,cp2,2,1>", "<cp2,8,1>", "<cp4,2,1>"} <= beyond
    assert all("cp" in text for text in beyond)
    assert all(scheme.sp == 1 for scheme in context_parallel_schemes(World.of(seven, None, 16, 1)))
    assert not list(context_parallel_schemes(World.of(Profile.from_json(PROFILE), None, 64, 1)))
    wide = full_space(
        thirteen, num_devices=16, context_length=16384, cluster=find_cluster(thirteen, 16)
    )
    assert any(scheme.cp == 2 for scheme in wide.latency)
    refused = full_space(
        thirteen, num_devices=16, context_length=16384, can_run=lambda scheme: scheme.cp == 1
    )
    assert not any(scheme.cp > 1 for scheme in refused.latency)


def test_memory_of_rows_and_of_all_keys_of_a_layer():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    memory = Profile.from_json({**PROFILE, "model": {**PROFILE["model"], **heads}}).memory
    states, micro_batch = (memory.rank_bytes(Scheme(1, 1), 8, tokens) for tokens in (0, 1000))
    rows = memory.rank_bytes(Scheme(1, 1, cp=4), 8, 1000) - states
    # In two parts of one head each, and what rows send, get and have
    keys = (
        (1 + 1 / 2) * (1 + 1.5 / 4) * 1000 * 2 * 32 / 4 * 2
    )  # tokens, keys and values, hidden units, bytes
    assert rows == pytest.approx((micro_batch - states) * (1 + ROW_TOLERANCE) / 4 + keys)
    both = memory.rank_bytes(Scheme(1, 1, sp=2, cp=2), 8, 1000) - states
    shared = (micro_batch - states) * SP_ACTIVATIONS_REPEATED * (1 + ROW_TOLERANCE) / 4
    # Of two ranks' heads one each, so one part
    of_two = 2 * (1 + 1.5 / 2) * 1000 * 2 * 32 / 4 / 2 * 2
    assert both == pytest.approx(shared + of_two)
