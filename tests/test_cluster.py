"""Bytes and times of pull, push, activations and optimizer against sums done by hand."""

from __future__ import annotations

import dataclasses

import pytest
from reference import make_profile

from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware, ModelShape
from ds_hydra.strategy.cost_models.cluster import Cluster, find_cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy
from ds_hydra.zero_link import BucketEntry, ParamSpec, Slicing, plan_link

SHAPE = ModelShape(num_layers=10, hidden_size=10, intermediate_size=20, vocab_size=0)
PARAMS = 10 * (400 + 600)


def make_cluster(num_devices: int, devices_per_node: int = 4) -> Cluster:
    """Inside a node 1,000 bytes in a ms, between nodes 100."""
    hardware = Hardware(
        name="test", devices_per_node=devices_per_node, memory_bytes=1, matmul_flops=1.0, attention_flops=1.0,
        memory_rate=1e6, intra_node_rate=1e6, inter_node_rate=1e5, layer_overhead_ms=0.0,
        collective_overhead_ms=0.0, intra_node_latency_ms=1.0, inter_node_latency_ms=2.0,
    )  # fmt: skip
    return Cluster(shape=SHAPE, hardware=hardware, num_devices=num_devices)


def link_times(text: str, num_devices: int, **more) -> tuple[float, float]:
    found = make_cluster(num_devices).link_times(Strategy.parse(text), **more)
    return found.pull_ms, found.push_ms


def test_a_single_node_moves_what_a_rank_lacks():
    """Each of 4 ranks pulls the whole model but its quarter: 2 bytes; pushes it with 2 more."""
    assert link_times("4x<1,1>", 4) == pytest.approx(
        (PARAMS * 0.75 * 2 / 1e3, PARAMS * 0.75 * 2 / 1e3)
    )
    # The slowest rank is the one with the largest slice; ranks of an SP group hold the same one.
    assert link_times("1x<2,1> + 2x<1,1>", 4) == link_times("4x<1,1>", 4)
    assert link_times("1x<sp4,1>", 4) == link_times("4x<1,1>", 4)
    assert link_times("1x<sp2,2,1>", 4)[0] == pytest.approx(2 * link_times("1x<4,1>", 4)[0])
    assert link_times("1x<2,2>", 4) == pytest.approx(
        (PARAMS / 4 * 0.75 * 2 / 1e3, PARAMS / 4 * 0.75 * 2 / 1e3)
    )


def test_slices_of_different_tp_overlap():
    """<8,1> over 2 nodes: node 0 needs half. With <2,1> in node 2 of three, that node needs
    everything.
    """
    assert link_times("1x<8,1>", 12)[0] == pytest.approx(PARAMS * 0.5 * (1 - 1 / 3) * 2 / 100)
    assert link_times("1x<8,1> + 2x<2,1>", 12)[0] == pytest.approx(PARAMS * (1 - 1 / 3) * 2 / 100)
    # A stage of <2,2> and one of <1,1>: the union is the whole model, not more.
    assert link_times("1x<2,1> + 2x<1,1>", 8)[0] == pytest.approx(PARAMS * 0.5 * 2 / 100)


def test_shards_of_megatron_are_cut_over_replicas_only():
    """2x<4,1> on 2 nodes: each rank's partner is in the other node. 4x<2,1>: half of each shard is
    at home.
    """
    assert link_times("2x<4,1>", 8, is_fully_sharded=False)[0] == pytest.approx(
        PARAMS * 0.5 * 2 / 100
    )
    assert link_times("4x<2,1>", 8, is_fully_sharded=False)[0] == pytest.approx(
        PARAMS * 0.5 * 2 / 100
    )
    # Ranks of an SP group hold the same: 8 replicas, 4 of them in each node.
    replicas = link_times("8x<1,1>", 8, is_fully_sharded=False)[0]
    assert link_times("2x<sp4,1>", 8, is_fully_sharded=False)[0] == pytest.approx(replicas)
    assert link_times("1x<sp8,1>", 8, is_fully_sharded=False)[0] == pytest.approx(replicas)
    # 1x<8,1> has no replica, so nothing crosses; only the copy from the optimizer's shard inside
    # the node is left.
    alone = link_times("1x<8,1>", 8, is_fully_sharded=False)[0]
    assert alone < link_times("1x<8,1>", 8)[0]


def test_uneven_stages_count_with_their_layers():
    """10 layers. On one node the rank of 7 layers pulls longest; on two nodes the stage of 7 needs
    most.
    """
    assert link_times("1x<1,2;stages=7,3>", 4)[0] == pytest.approx(
        0.7 * link_times("1x<1,1>", 4)[0]
    )
    assert link_times("1x<1,2;stages=5,5>", 4) == link_times("1x<1,2>", 4)
    assert link_times("1x<4,2;stages=7,3>", 8)[0] == pytest.approx(PARAMS * 0.7 * 0.5 * 2 / 100)
    uneven = link_times("1x<4,2;stages=7,3>", 8, is_fully_sharded=False)
    assert uneven[0] == pytest.approx(0.7 / 4 * PARAMS * 7 / 8 * 2 / 1e3), "no replica: only inside"


def test_activations_between_stages():
    cluster = make_cluster(8)
    assert cluster.hop_ms(Scheme(1, 2), 50) == pytest.approx(1 + 50 * 10 * 2 / 1e3)
    # Between nodes the 4 ranks of a node share 100 bytes in a ms.
    assert cluster.hop_ms(Scheme(4, 2), 50) == pytest.approx(2 + 50 * 10 * 2 / 25)


def test_the_optimizer_reads_and_writes_its_shard():
    assert make_cluster(8).step_ms == pytest.approx(PARAMS / 8 * 80 / 1e3)


def test_the_paper_cluster():
    """LLaMA 32B on 64 A800: 32 billion parameters; Table 1 has 20 ms for the optimizer."""
    cluster = find_cluster(Profile.load(find_file("profiles", "a800_llama2_32b")), 64)
    assert cluster.shape.num_params == pytest.approx(32.5e9, rel=0.02)
    assert 15 < cluster.step_ms < 30
    assert cluster.end_ms == cluster.step_ms + 26
    homogeneous, mixed = (
        cluster.link_times(Strategy.parse(text)) for text in ("4x<16,1>", "1x<8,1> + 14x<4,1>")
    )
    # Nodes of <16,1> hold half of the slices
    assert mixed.pull_ms == pytest.approx(2 * homogeneous.pull_ms)


def test_hardware_by_name_and_unknown_hardware():
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    assert find_cluster(profile, 8).hardware.name == "A800-80GB"
    assert find_cluster(profile, 8, "h100").hardware.name != "A800-80GB"
    with pytest.raises(HydraConfigError, match="did you mean 'h100'"):
        find_cluster(profile, 8, "h10")
    assert find_cluster(make_profile({"<1,1>": (0, 1, 1)}), 8) is None


def test_a_profile_without_the_models_shape_is_refused():
    profile = make_profile({"<1,1>": (0, 1, 1)})
    with pytest.raises(HydraConfigError, match="intermediate_size is missing"):
        find_cluster(profile, 8, "h100")
    document = {**profile.document, "model": {**profile.document["model"], "intermediate_size": 3}}
    described = dataclasses.replace(profile, document=document)
    assert find_cluster(described, 8, "h100").shape.num_params > 0


def received_by_the_busiest_node(text: str, slicing: Slicing) -> float:
    """Share of a model of 8 equal layers that plans of the link bring to it on two nodes of 4."""
    strategy = Strategy.parse(text)
    specs = [ParamSpec(fqn=f"{i}", shape=(40, 40), slicing=slicing) for i in range(8)]
    buckets = [()] * 8
    for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
        for place, rank in enumerate(ranks):
            stage, tp_rank = divmod(place, scheme.tp)
            layers = scheme.stage_layers(8, stage)
            buckets[rank] = tuple(
                (BucketEntry(i, specs[i].slice_region(scheme.tp, tp_rank), True),) for i in layers
            )
    received = [0, 0]
    for rank in range(8):
        plan = plan_link(specs, buckets, rank, ranks_per_node=4)
        for peer, numel in plan.sent_elements.items():
            received[peer // 4] += numel if peer // 4 != rank // 4 else 0
    return max(received) / (8 * 1600)


@pytest.mark.parametrize(
    "strategy",
    [
        "8x<1,1>",
        "4x<2,1>",
        "2x<4,1>",
        "1x<1,8>",
        "2x<1,4>",
        "1x<4,2>",
        "1x<4,1> + 4x<1,1>",
        "1x<4,1> + 2x<1,2>",
    ],
)
def test_a_node_receives_as_many_elements_as_plans_of_the_link_bring_to_it(strategy):
    pull_ms, _ = link_times(strategy, 8)
    share = received_by_the_busiest_node(strategy, Slicing.COLWISE)
    assert pull_ms == pytest.approx(PARAMS * share * 2 / 100)


def test_a_tp_group_over_nodes_receives_no_more_than_is_counted():
    """Columns of its slices lie across all shards; rows may be in its own."""
    pull_ms, _ = link_times("1x<8,1>", 8)
    columns = received_by_the_busiest_node("1x<8,1>", Slicing.ROWWISE)
    assert pull_ms == pytest.approx(PARAMS * columns * 2 / 100)
    assert received_by_the_busiest_node("1x<8,1>", Slicing.COLWISE) == 0.0
