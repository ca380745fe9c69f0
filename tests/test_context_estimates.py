"""What is said of schemes with context parallelism that nobody measured: time, memory, which are
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
)
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.memory_model import ROW_TOLERANCE, SP_ACTIVATIONS_REPEATED
from ds_hydra.strategy.profiles.profile import LatencyModel, load_profile
from ds_hydra.strategy.proposal.space import context_parallel_schemes

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
    stretched = Costs.of(profile, 64).find(replace(scheme, ckpt=40))
    assert stretched.latency.linear_ms == pytest.approx(4 / 3 * found.linear_ms)
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
    keys = 3 * 1000 * 2 * 32 / 4 * 2  # copies, tokens, keys and values, hidden units, bytes
    assert rows == pytest.approx((micro_batch - states) * (1 + ROW_TOLERANCE) / 4 + keys)
    both = memory.rank_bytes(Scheme(1, 1, sp=2, cp=2), 8, 1000) - states
    shared = (micro_batch - states) * SP_ACTIVATIONS_REPEATED * (1 + ROW_TOLERANCE) / 4
    assert both == pytest.approx(shared + keys / 2)
