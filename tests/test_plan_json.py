"""Plans reach every rank bit for bit; anything else is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from hypothesis import given
from hypothesis import strategies as st
from reference import wide_schemes

from ds_hydra.configs.files import LARGEST
from ds_hydra.engine.ranks.agreement import ENVELOPE_BYTES, broadcast_bytes
from ds_hydra.errors import HydraError
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.cuts import cut_micro_batches
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy.profiles.learned import Corrections
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

times = st.floats(0, 1e12, allow_nan=False)
counts = st.integers(0, LARGEST)


@st.composite
def plans(draw):
    plain = st.builds(Scheme, st.integers(1, 4), st.integers(1, 3))
    schemes = draw(st.lists(plain | wide_schemes(4, 3), min_size=1, max_size=5))
    strategy = Strategy(tuple(schemes))
    num_sequences = draw(st.integers(0, 12))
    order = draw(st.permutations(range(num_sequences)))
    owner = [draw(st.integers(0, len(schemes) - 1)) for _ in order]
    lengths = draw(st.lists(st.integers(1, 10**6), min_size=num_sequences, max_size=num_sequences))
    pipelines = []
    for number, (scheme, ranks) in enumerate(zip(strategy.schemes, strategy.place())):
        mine = [i for i, pipeline in zip(order, owner) if pipeline == number]
        cut = draw(st.integers(0, len(mine)))
        micro_batches = tuple(tuple(m) for m in (mine[:cut], mine[cut:]) if m)
        pipelines.append(
            PipelinePlan(
                scheme=scheme,
                ranks=ranks,
                micro_batches=micro_batches,
                rows=cut_micro_batches(micro_batches, lengths, scheme.cp),
                makespan_ms=draw(times),
                lower_bound_ms=draw(times),
            )
        )
    size = {"min_size": num_sequences, "max_size": num_sequences}
    return IterationPlan(
        iteration=draw(counts),
        num_devices=strategy.num_devices + draw(st.integers(0, 3)),
        strategy=strategy,
        sample_indices=tuple(draw(st.lists(counts, **size))),
        lengths=tuple(lengths),
        num_label_tokens=draw(counts),
        pipelines=tuple(pipelines),
        makespan_ms=draw(times),
        lower_bound_ms=draw(times),
    )


def sent(plan):
    """`plan` as another rank receives it."""
    return IterationPlan.from_json(json.loads(json.dumps(plan.to_json())))


@given(plans())
def test_round_trip(plan):
    assert sent(plan) == plan
    assert sent(plan).digest == plan.digest


def test_a_planned_iteration_survives_the_broadcast_with_its_times():
    plan = one_sequence_plan()
    planned = PlannedIteration(
        plan=plan,
        planning_ms=0.1,
        waited_ms=2.5,
        source="deadline",
        corrections=Corrections(slow_ranks={1: 2.0}),
    )
    assert PlannedIteration.from_json(json.loads(json.dumps(planned.to_json()))) == planned


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"iteration": "3"}, "iteration is '3'"),
        ({"lengths": [5.0]}, "lengths is 5.0"),
        ({"pipelines": 7}, "pipelines is 7"),
    ],
)
def test_another_value_is_refused(change, named):
    with pytest.raises(HydraError, match=named):
        IterationPlan.from_json({**one_sequence_plan().to_json(), **change})


def one_sequence_plan():
    scheme = Scheme(2, 1)
    pipeline = PipelinePlan(
        scheme=scheme, ranks=(0, 1), micro_batches=((0,),), makespan_ms=0.0, lower_bound_ms=0.0
    )
    return IterationPlan(
        iteration=3, num_devices=2, strategy=Strategy((scheme,)), sample_indices=(7,), lengths=(5,),
        num_label_tokens=4, pipelines=(pipeline,), makespan_ms=0.0, lower_bound_ms=0.0,
    )  # fmt: skip


@pytest.mark.distributed
def test_payloads_of_any_size_reach_every_rank():
    assert run_distributed(receive_payloads, 2) == [True, True]


def receive_payloads():
    sizes = (0, 1, ENVELOPE_BYTES - 9, ENVELOPE_BYTES - 8, ENVELOPE_BYTES - 7, 3 * ENVELOPE_BYTES)
    payloads = [bytes(i % 251 for i in range(size)) for size in sizes]
    mine = payloads if dist.get_rank() == 1 else [b""] * len(sizes)
    cpu = torch.device("cpu")
    return [broadcast_bytes(payload, 1, cpu) for payload in mine] == payloads
