"""Plans survive the flat integer form bit for bit; anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import wide_schemes

from ds_hydra.errors import HydraError, PlanMismatchError
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.sampler.plan_codec import from_array, to_array
from ds_hydra.strategy.scheme import Scheme, Strategy

times = st.floats(0, 1e12, allow_nan=False)
counts = st.integers(0, 2**62)


@st.composite
def plans(draw):
    plain = st.builds(Scheme, st.integers(1, 4), st.integers(1, 3))
    schemes = draw(st.lists(plain | wide_schemes(4, 3), min_size=1, max_size=5))
    strategy = Strategy(tuple(schemes))
    num_sequences = draw(st.integers(0, 12))
    order = draw(st.permutations(range(num_sequences)))
    owner = [draw(st.integers(0, len(schemes) - 1)) for _ in order]
    pipelines = []
    for number, (scheme, ranks) in enumerate(zip(strategy.schemes, strategy.place())):
        mine = [i for i, pipeline in zip(order, owner) if pipeline == number]
        cut = draw(st.integers(0, len(mine)))
        pipelines.append(
            PipelinePlan(
                scheme=scheme,
                ranks=ranks,
                micro_batches=tuple(tuple(row) for row in (mine[:cut], mine[cut:]) if row),
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
        lengths=tuple(draw(st.lists(st.integers(1, 10**6), **size))),
        num_label_tokens=draw(counts),
        pipelines=tuple(pipelines),
        makespan_ms=draw(times),
        lower_bound_ms=draw(times),
    )


@given(plans())
def test_round_trip(plan):
    array = to_array(plan)
    assert array.dtype == np.int64
    assert array.ndim == 1
    assert from_array(array) == plan
    assert from_array(array).digest == plan.digest


@given(plans(), st.data())
def test_cut_or_extended_arrays_are_refused(plan, data):
    array = to_array(plan)
    cut = data.draw(st.integers(0, array.size - 1))
    with pytest.raises(PlanMismatchError):
        from_array(array[:cut])
    with pytest.raises(PlanMismatchError, match="1 more after it"):
        from_array(np.append(array, 0))


@given(plans(), st.data())
def test_a_changed_integer_never_passes_unnoticed(plan, data):
    array = to_array(plan)
    position = data.draw(st.integers(0, array.size - 1))
    array[position] += data.draw(st.sampled_from([-1, 1, 1000, -(2**40)]))
    try:
        changed = from_array(array)
    except HydraError:
        return
    assert changed.digest != plan.digest


def test_plans_of_plain_schemes_keep_their_layout():
    scheme = Scheme(2, 1)
    pipeline = PipelinePlan(
        scheme=scheme, ranks=(0, 1), micro_batches=((0,),), makespan_ms=0.0, lower_bound_ms=0.0
    )
    plan = IterationPlan(
        iteration=3, num_devices=2, strategy=Strategy((scheme,)), sample_indices=(7,), lengths=(5,),
        num_label_tokens=4, pipelines=(pipeline,), makespan_ms=0.0, lower_bound_ms=0.0,
    )  # fmt: skip
    begin = [0x44534859_00000001, 3, 2, 4, 0, 0, 1, 7, 5, 1]
    assert to_array(plan).tolist() == [*begin, 2, 1, 0, 0, 1, 1, 0]


def test_another_version_is_named():
    with pytest.raises(PlanMismatchError, match="all ranks need the same ds_hydra version"):
        from_array(np.array([1, 2, 3]))
