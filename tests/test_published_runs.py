"""Rooflines held against runs that others have published, and against what one GPU did."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest
from shared_data import REPOSITORY, shared_json

from ds_hydra.lab.simulator.cases import Workload
from ds_hydra.lab.simulator.systems import SYSTEMS, Settings
from ds_hydra.strategy.cost_models.analytic import Hardware, ModelShape
from ds_hydra.strategy.cost_models.cluster import Cluster, find_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.scheme import Scheme

RUNS = shared_json("published_runs.json")
CLOSE = 0.15
PAGE = (REPOSITORY / "docs/benchmarks/simulate.md").read_text(encoding="utf-8")
MEASURED = [
    json.loads(line)
    for line in (REPOSITORY / "docs/benchmarks/one_gpu.jsonl").read_text().splitlines()
]


def simulated_tokens_per_s(run):
    """Of a device, all sequences as long as the context."""
    number, context, hardware = run["devices"], run["context"], run["hardware"]
    profile, _ = estimate_from_config(run["model"], hardware, number, context, float8=run["float8"])
    workload = Workload(
        name=run["run"],
        costs=Costs(profile, find_cluster(profile, number, hardware)),
        histogram=LengthHistogram.from_counts({context: 1}, name="alike"),
        num_devices=number,
        context_length=context,
        tokens_per_iteration=run["sequences"] * context,
    )
    scenario = Settings(iterations=1).scenario(workload)
    found = SYSTEMS[run["system"]].run(scenario, name="a")
    tokens = sum(batch.num_tokens for batch in scenario.batches)
    return 1e3 * tokens / found.iteration_ms.sum() / number


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["run"])
def test_published_runs_are_within_15_percent_or_the_page_names_them(run):
    simulated, published = simulated_tokens_per_s(run), run["tokens_per_s"]
    ratio = simulated / published
    found = "" if abs(ratio - 1) <= CLOSE else "underrated" if ratio < 1 else "overrated"
    assert found == run.get("outside", "")
    link = f"[{run['run']}]({run['source']})"
    row = f"| {link} | {published:,} | {simulated:,.0f} | {ratio:.2f} | {found or 'within 15%'} |"
    assert row in PAGE, row


def measured(card, field, of):
    """Values of `field` in steps of that card whose case `of` accepts."""
    return [
        entry["found"][field]
        for entry in MEASURED
        if isinstance(entry.get("found"), dict)
        and field in entry["found"]
        and entry["step"].startswith("H100") == (card == "h100")
        and of(entry["case"])
    ]


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_step_and_rest_of_an_iteration_are_those_of_one_gpu(card, vocabulary):
    """Within 20% of the median of such models, and within 10% of that of all."""
    shape = ModelShape(
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        vocab_size=vocabulary,
        key_value_share=1 / 4,
    )
    cluster = Cluster(shape=shape, hardware=Hardware.load(card), num_devices=1)
    steps = measured(card, "step_ms", lambda case: f"vocabulary {vocabulary:,}" in case)
    rests = measured(card, "rest_ms", lambda _: True)
    assert cluster.step_ms == pytest.approx(median(steps), rel=0.2)
    assert cluster.end_ms - cluster.step_ms == pytest.approx(median(rests), rel=0.1)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_pieces_of_sequences_have_the_overhead_of_one_gpu(card):
    """`<cp8,1>` against `<sp8,1>` of 32 layers, one of 8 ranks, nothing on the wire: the fastest of
    each.
    """

    def fastest(scheme):
        return min(measured(card, "stage_ms", lambda c: f"llama2_7b, one of 8, 1x{scheme}" in c))

    cp, sp = fastest("<cp8,1>"), fastest("<sp8,1>")
    assert Hardware.load(card).pieces_overhead_ms == pytest.approx((cp - sp) / 32, rel=0.01)


@pytest.mark.parametrize(
    "text",
    ["<cp8,1>", "<cp16,1>", "<cp4,2,1>", "<cp2,4>", "<cp8,1;gather>", "<cp4,2,1;gather>", "<cp2,sp8,1>"],
)  # fmt: skip
def test_every_scheme_with_cp_has_the_overhead_of_pieces(text):
    """Also one whose keys are priced by a TP group as wide."""
    profile, _ = estimate_from_config("llama3_1_8b", "h100", 16, 8192)
    cluster = find_cluster(profile, 16, "h100")
    without = replace(cluster, hardware=replace(cluster.hardware, pieces_overhead_ms=0.0))
    scheme = Scheme.parse(text)
    more = [Costs(profile, own).latency(scheme).constant_ms for own in (cluster, without)]
    pieces_ms = cluster.hardware.pieces_overhead_ms
    assert more[0] - more[1] == pytest.approx(32 / scheme.pp * pieces_ms)
