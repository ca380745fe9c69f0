"""HexiScale's equations against the reference cases, term by term: the text's and the originals'
code's.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from shared_data import shared_json

from ds_hydra.lab.alpha_beta import (
    Interconnects,
    LayerShape,
    compute_s,
    data_parallel_s,
    memory_bytes,
    pipeline_columns_s,
    pipeline_hop_s,
    pipeline_s,
    released_pipeline_hop_s,
    tensor_parallel_s,
)

GIB, TERA = 1024**3, 1024**4  # the originals count both in powers of 1024
CASES = range(len(shared_json("flashflex/simulation_cases.json")))


def load(index: int):
    case = shared_json("flashflex/simulation_cases.json")[index]
    devices, theirs = case["authors_output"]["devices"], case["authors_output"]
    machine = np.array([d["machine"] for d in devices])
    inside = np.array([d["intra_bw_GBps"] for d in devices], dtype=float) * GIB
    rate = np.where(
        machine[:, None] == machine[None, :], inside[:, None], case["case"]["inter_bw"] * GIB
    )
    interconnects = Interconnects(latency_s=np.zeros(rate.shape), bytes_per_s=rate)
    flops = np.array([d["tflops"] for d in devices], dtype=float) * TERA
    cfg = theirs["cfg"]
    shape = LayerShape(
        hidden_size=cfg["H"],
        num_tokens=cfg["S"],
        micro_batch=cfg["MB_per_pipeline"],
        type_bytes=cfg["B_type"],
    )
    return case, interconnects, flops, shape


@pytest.mark.parametrize("index", CASES)
def test_terms_of_the_text(index):
    case, interconnects, flops, shape = load(index)
    times = []
    for pipeline, expected in zip(case["case"]["pipelines"], case["seed_equations"]["pipelines"]):
        stages, layers = pipeline["stages"], pipeline["layers"]
        compute = [compute_s(flops[devices], shape) for devices in stages]
        tensor = [tensor_parallel_s(interconnects, devices, shape) for devices in stages]
        hops = [
            pipeline_hop_s(interconnects, a, b, shape) for a, b in itertools.pairwise(stages)
        ] + [0.0]
        stage = [n * (c + t) for n, c, t in zip(layers, compute, tensor)]
        num_micro_batches = case["authors_output"]["cfg"]["N_MB"]
        assert compute == pytest.approx(expected["comp_layer_s"], rel=1e-9)
        assert tensor == pytest.approx(expected["tp_layer_s"], rel=1e-9)
        assert hops == pytest.approx(expected["pp_hop_s"], rel=1e-9)
        assert stage == pytest.approx(expected["stage_s"], rel=1e-9)
        times.append(pipeline_s(stage, hops, num_micro_batches))
        assert times[-1] == pytest.approx(expected["pipeline_time_eq7_s"], rel=1e-9)
        over_all = pipeline_s(stage, hops, num_micro_batches, skips_first=False)
        assert over_all == pytest.approx(
            expected["pipeline_time_eq7_max_over_all_stages_s"], rel=1e-9
        )
    sync = whole_data_parallel_s(case, interconnects, shape)
    assert sync == pytest.approx(case["seed_equations"]["comm_dp_eq5_s"], rel=1e-9)
    assert max(times) + sync == pytest.approx(case["seed_equations"]["total_eq8_s"], rel=1e-9)


def whole_data_parallel_s(case, interconnects, shape) -> float:
    """Eq. 5: the slowest stage's sum of Eq. 2 over its layers, each held by all devices that have
    it.
    """
    pipelines = case["case"]["pipelines"]
    if len(pipelines) == 1:
        return 0.0
    holders = [set() for _ in range(case["case"]["layers"])]
    for pipeline in pipelines:
        owners = [s for s, n in zip(pipeline["stages"], pipeline["layers"]) for _ in range(n)]
        for layer, devices in enumerate(owners):
            holders[layer] |= set(devices)
    per_layer = [data_parallel_s(interconnects, sorted(devices), shape) for devices in holders]
    sums = []
    for pipeline in pipelines:
        first = 0
        for count in pipeline["layers"]:
            sums.append(sum(per_layer[first : first + count]))
            first += count
    return max(sums)


@pytest.mark.parametrize("index", CASES)
def test_terms_of_the_originals_code(index):
    case, interconnects, flops, shape = load(index)
    cfg = case["authors_output"]["cfg"]
    head = cfg["V"] / (16 * cfg["L"] * cfg["H"])
    for pipeline, expected in zip(case["case"]["pipelines"], case["authors_output"]["pipelines"]):
        stages = pipeline["stages"]
        hops = [
            released_pipeline_hop_s(interconnects, a, b, shape)
            for a, b in itertools.pairwise(stages)
        ] + [0.0]
        times = []
        for devices, layers, theirs in zip(stages, pipeline["layers"], expected["stages"]):
            compute = compute_s(flops[devices], shape, head_share=head)
            tensor = tensor_parallel_s(interconnects, devices, shape)
            assert compute == pytest.approx(theirs["tp_comp_layer_s"], rel=1e-9)
            assert tensor == pytest.approx(theirs["tp_comm_layer_s"], rel=1e-9)
            times.append(layers * (compute + tensor))
        assert hops == pytest.approx([stage["pp_hop_s"] for stage in expected["stages"]], rel=1e-9)
        assert times == pytest.approx(
            [stage["stage_mb_s"] for stage in expected["stages"]], rel=1e-9
        )
        total = pipeline_columns_s(times, hops, cfg["N_MB"])
        assert total == pytest.approx(expected["pipeline_cost_s"], rel=1e-9)


@pytest.mark.parametrize("index", CASES)
def test_memory_of_the_text(index):
    case, _, _, shape = load(index)
    for pipeline, expected in zip(
        case["case"]["pipelines"], case["seed_equations"]["mem_eq9_GB_per_dev"]
    ):
        found = [
            memory_bytes(len(devices), layers, shape) / GIB
            for devices, layers in zip(pipeline["stages"], pipeline["layers"])
        ]
        assert found == pytest.approx(expected, rel=1e-9)


def test_latency_and_nodes_of_different_speed_count():
    rate = np.full((3, 3), 10.0)
    rate[2, :] = rate[:, 2] = 5.0
    interconnects = Interconnects(latency_s=np.full((3, 3), 0.5), bytes_per_s=rate)
    shape = LayerShape(hidden_size=10, num_tokens=3, type_bytes=1)
    assert tensor_parallel_s(interconnects, [0, 1, 2], shape, passes=1) == pytest.approx(
        2 * (0.5 + 10 / 5)
    )
    assert compute_s([2.0, 1.0], shape) == 2 * compute_s([2.0, 2.0], shape)
