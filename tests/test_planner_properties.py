"""What the planner promises, on random problems; `benchmarks/planner_properties.py` counts more."""

from random import Random

import pytest
from planner_instances import random_problem, slower_with_more, wrong_bounds


@pytest.mark.parametrize("first", [0, 20])
def test_no_plan_is_below_its_bound_and_more_candidates_are_not_slower(first):
    for seed in range(first, first + 20):
        problem = random_problem(seed)
        assert [*wrong_bounds(problem)] == [], seed
        assert [*slower_with_more(problem, Random(seed))] == [], seed
