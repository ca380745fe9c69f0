"""Systems against each other and against sums done by hand, on a small cluster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from reference import make_batch, make_profile
from test_cluster import make_cluster

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.cases import Workload, list_cases, load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.mixed_groups import dynamic_cp
from ds_hydra.lab.simulator.results import Ratio, our_figure
from ds_hydra.lab.simulator.scenario import Scenario, perfect_balance_ms
from ds_hydra.lab.simulator.systems import (
    SYSTEMS,
    Settings,
    _hotspa_phase,
    _in_sequence,
    dynamic,
    fixed_length,
    hotspa,
)
from ds_hydra.lab.simulator.ulysses import deepspeed_ulysses
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.enumeration import neighbour_strategies
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def small_profile() -> Profile:
    """<1,1> fits 60 tokens, <2,1> 120, <4,1> 240; large groups are slower per device."""
    document = dict(
        make_profile(
            {"<1,1>": (1e-3, 1.0, 2.0), "<2,1>": (6e-4, 0.6, 2.0), "<4,1>": (4e-4, 0.4, 2.0)},
            max_len=60 * 30,
        ).document
    )
    document["memory"] = {
        **document["memory"], "activation_bytes_per_token_per_layer_per_hidden": {"1": 30, "2": 30, "4": 30},
    }  # fmt: skip
    return Profile.from_json(document)


def checkpointing_document() -> dict:
    """The same in 4 layers: 30 bytes of a token at most, 4 * 2 + 7.5 on <4,1> with all layers
    checkpointed.
    """
    document = dict(small_profile().document)
    document["model"] = {**document["model"], "num_layers": 4}
    document["hardware"] = {
        **document["hardware"],
        "memory_bytes": 4 * document["hardware"]["memory_bytes"],
    }
    document["memory"] = {**document["memory"], "input_bytes_per_token_per_layer_per_hidden": 2}
    return document


def make_scenario(*batches, context=100, num_devices=4):
    return Scenario(
        costs=Costs(small_profile()), num_devices=num_devices, context_length=context,
        batches=tuple(make_batch(list(b), i) for i, b in enumerate(batches)),
    )  # fmt: skip


HISTOGRAM = LengthHistogram.from_counts({5: 400, 20: 200, 50: 40, 100: 5}, name="small")


def make_workload(**changes) -> Workload:
    arguments = {
        "name": "small", "histogram": HISTOGRAM, "num_devices": 4,
        "context_length": 100, "tokens_per_iteration": 400,
    }  # fmt: skip
    costs = Costs(changes.pop("profile", None) or small_profile(), changes.pop("cluster", None))
    return Workload(costs=costs, **{**arguments, **changes})


OTHER_SCHEMES = (
    "zero3", "deepspeed", "deepspeed_balanced", "deepspeed_degrees", "flexsp", "flexsp_hidden", "fcp", "dynamic_cp",
)  # fmt: skip
"""Systems whose schemes are none of the profile's."""


@pytest.fixture(scope="module")
def comparison():
    return compare(make_workload(), Settings(iterations=6))


def test_megatron_by_hand():
    """Two replicas <2,1>, micro-batches of 100 tokens: {100}, {60, 40} and {30}, dealt 2 and 1."""
    scenario = make_scenario([40, 100, 60, 30])
    result = fixed_length(scenario, [Strategy.parse("2x<2,1>")], name="megatron")
    t = scenario.profile.get_latency(Scheme(2, 1))
    slow, fast = t.micro_batch_ms([100]) + t.micro_batch_ms([30]), t.micro_batch_ms([60, 40])
    assert result.propagation_ms == pytest.approx([slow])
    assert result.imbalance == pytest.approx([slow / fast - 1])
    assert result.bubble == pytest.approx([1 - (slow + fast) / (2 * slow)])


def test_megatron_is_tuned_over_every_scheme_that_fits_the_context():
    scenario = make_scenario([40, 100, 60, 30], [90, 5, 5])
    tuned = fixed_length(scenario, name="megatron")
    each = [fixed_length(scenario, [Strategy.parse(s)], name="x") for s in ("2x<2,1>", "1x<4,1>")]
    assert tuned.propagation_ms.mean() == min(r.propagation_ms.mean() for r in each)


@pytest.mark.parametrize("run", [fixed_length, hotspa, dynamic_cp])
def test_megatrons_recompute_layers_where_the_context_does_not_fit_otherwise(run):
    costs = Costs(Profile.from_json(checkpointing_document()))
    scenario = replace(make_scenario([300, 40, 7], context=300), costs=costs)
    assert not scenario.statics()
    assert ";ckpt=" in run(scenario, name="x").strategy


def test_hotspa_steps_once_for_all_intervals():
    scenario = make_scenario([40, 100, 60, 30]).linked_by(make_cluster(4))
    parts = [_hotspa_phase(scenario, *own, overlap=False) for own in ((0, 50), (50, 100))]
    whole = _in_sequence("hotspa", parts, scenario)
    assert (whole.propagation_ms == parts[0].propagation_ms + parts[1].propagation_ms).all()
    both_ms = parts[0].iteration_ms + parts[1].iteration_ms
    assert whole.iteration_ms == pytest.approx(both_ms - scenario.cluster.end_ms)


def test_hotspa_of_one_interval_is_megatron():
    """With all sequences in one interval it is Megatron-LM with micro-batches as long as memory
    allows.
    """
    scenario = make_scenario([40, 100, 60, 30])
    assert hotspa(scenario, name="hotspa").propagation_ms == pytest.approx(
        fixed_length(scenario, name="megatron").propagation_ms
    )


def test_ulysses_by_hand():
    """Groups of 2 hold 120 tokens: micro-batches {100} and {60, 40} in step 1, {30} in step 2; no
    traffic is known.
    """
    scenario = make_scenario([40, 100, 60, 30])
    result = deepspeed_ulysses(scenario, name="deepspeed")

    def micro_batch(*lengths):
        return sum(1e-3 * l * l + l for l in lengths) / 2 + 2

    by_two = micro_batch(100) + micro_batch(30)
    assert result.strategy in ("DP2 SP2", "DP1 SP4")
    assert result.propagation_ms[0] <= by_two


def test_bound_holds_for_every_system(comparison):
    for result in comparison.results:
        if result.name not in OTHER_SCHEMES:
            space = comparison.planned["ds_hydra" if result.name == "ds_hydra" else "plain"]
            assert (result.propagation_ms >= space.perfect_balance_ms - 1e-9).all()
    assert all(planned.distance_to_bound >= 0 for planned in comparison.planned.values())


def bound_of_plain(scenario):
    return perfect_balance_ms(scenario, scenario.batches[0], usable_schemes(scenario))


def test_bound_by_hand():
    """One sequence of 100 on <2,1> at least; two devices could share the rest, but a micro-batch
    passes as a whole.
    """
    scenario = make_scenario([100])
    t = scenario.profile.get_latency(Scheme(4, 1))
    assert bound_of_plain(scenario) == pytest.approx(t.micro_batch_ms([100]))
    many = make_scenario([10] * 40)
    device_ms = 40 * (1e-3 * 100 + 10 + 2 * 10 / 60)
    assert bound_of_plain(many) == pytest.approx(device_ms / 4)


def bound_of_gathered(lengths, **latency):
    """The bound on four devices of gathered schemes, which hold 100 tokens a rank, 400 where layers
    are checkpointed.
    """
    known = {Scheme.parse(text): model for text, model in latency.items()}
    scenario = SimpleNamespace(
        profile=SimpleNamespace(get_latency=known.__getitem__),
        num_devices=4,
        max_len_tokens=lambda scheme: (400 if scheme.ckpt else 100) * scheme.num_devices,
    )
    return perfect_balance_ms(scenario, make_batch(lengths), list(known))


def model_of(linear_ms, constant_ms=0.0, **traffic):
    return LatencyModel(quadratic_ms=0.0, linear_ms=linear_ms, constant_ms=constant_ms, **traffic)


@pytest.mark.parametrize(("number", "bound_ms"), [(2, 60), (3, 90), (4, 100)])
def test_bound_where_sequences_must_end_in_time(number, bound_ms):
    """A sequence takes a rank 100 ms, two ranks 60: less than 100 ms is a matter of 120 ms of
    devices for each.
    """
    one, two = (model_of(linear_ms) for linear_ms in (1.0, 0.6))
    found = bound_of_gathered([100] * number, **{"<1,1;gather>": one, "<sp2,1;gather>": two})
    assert found == pytest.approx(bound_ms, rel=2e-4)


@pytest.mark.parametrize(("number", "bound_ms"), [(4, 110), (5, 145)])
def test_bound_counts_steps_that_memory_asks_for(number, bound_ms):
    """Four ranks hold 400 tokens. The fifth sequence needs a step more, and its constant."""
    found = bound_of_gathered([100] * number, **{"<1,1;gather>": model_of(1.0, 10.0)})
    assert found == pytest.approx(bound_ms, rel=2e-4)


def test_bound_counts_steps_where_one_would_be_slow():
    """One step has 1,200 tokens on checkpointing ranks alone, which take 8 ms for each. Others have
    them in two or more, of 300 ms of traffic.
    """
    fast, slow = (model_of(linear_ms, traffic_ms=300.0) for linear_ms in (1.0, 8.0))
    schemes = {"<1,1;gather>": fast, "<1,1;ckpt=4;gather>": slow}
    assert bound_of_gathered([100] * 12, **schemes) == pytest.approx(600, rel=2e-4)


def test_bound_knows_weights_that_stay_on_the_node():
    """They travel in 20 ms, crossing ones in 500: a plan may take the time of the sequence, 100."""
    model = model_of(1.0, traffic_ms=500.0, hpz_traffic_ms=20.0)
    assert bound_of_gathered([100], **{"<1,1;gather>": model}) == 100


def test_all_systems_are_there_and_none_static_is_faster(comparison):
    holding = [name for name in SYSTEMS if name != "zero3"]  # one rank holds 60 of 100 tokens
    assert [r.name for r in comparison.results] == ["ds_hydra", "plain", *holding]
    for name in SYSTEMS:
        if name not in OTHER_SCHEMES:
            assert comparison.speedup(name, of_propagation=True).value >= 0.999, name
    assert comparison.speedup("ds_hydra").value == 1


def test_ratio_of_equal_times_has_no_spread():
    times = np.array([1.0, 5.0, 2.0])
    assert Ratio.of(2 * times, times) == Ratio(value=2.0, low=2.0, high=2.0)


def test_dynamic_says_how_often_it_chose_what():
    scenario = make_scenario([100], [10] * 8, [10] * 8, [10] * 8)
    result, plans = dynamic(
        scenario, [Strategy.parse("1x<4,1>"), Strategy.parse("4x<1,1>")], name="ds_hydra"
    )
    assert result.strategy == "4x<1,1> (75%); 1x<4,1> (25%)"
    assert len(plans) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 1000}, "no scheme fits a micro-batch of 1000 tokens on 4 devices"),
        ({"num_devices": 1}, "use 2 devices"),
        ({"tokens_per_iteration": 50}, "raise --tokens to 100 or more"),
        ({"strategies": (Strategy.parse("2x<4,1>"),)}, "needs 8 devices, there are 4"),
    ],
)
def test_workloads_without_a_meaning(changes, message):
    with pytest.raises(HydraConfigError, match=message):
        compare(make_workload(**changes), Settings(iterations=1))


def test_large_global_batches_are_fewer():
    sizes = [Settings().sized(tokens) for tokens in (200_000, 2_000_000, 50_000_000)]
    assert [s.iterations for s in sizes] == [100, 10, 2]
    assert Settings(iterations=3).sized(200_000) == Settings(iterations=3)


def test_progress_names_each_system_as_it_begins():
    seen = []
    settings = Settings(iterations=1, systems=("megatron",))
    compare(make_workload(), settings, progress=seen.append)
    assert seen == ["ds_hydra", "Megatron-LM, tuned"]


def test_every_shipped_case_loads_and_names_figures_that_exist(comparison):
    names = list_cases()
    groups = {name.partition("/")[0] for name in names}
    assert groups >= {"paper", "infinipipe", "flexsp", "skrull", "bytescale"}
    for name in names:
        case = load_case(name)
        assert case.workload.context_length <= case.workload.tokens_per_iteration
        for expected in case.expected:
            if expected.metric.split(".")[0] not in ("link_s", "step_s", "exposed_link_s"):
                assert our_figure(comparison, expected.metric) != ""


def test_neighbours_use_as_many_devices():
    start = Strategy.parse("1x<4,1> + 2x<2,1>")
    found = neighbour_strategies(start, [Scheme(4, 1), Scheme(2, 1), Scheme(1, 1), Scheme(2, 2)])
    assert {s.num_devices for s in found} == {8}
    assert start not in found
    assert Strategy.parse("2x<4,1>") in found
    assert Strategy.parse("1x<4,1> + 1x<2,1> + 2x<1,1>") in found
    assert Strategy.parse("1x<2,2> + 2x<2,1>") in found
