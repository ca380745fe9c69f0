"""What the planner promises, on random problems; `benchmarks/planner_properties.py` counts more."""

from random import Random

import pytest
from planner_instances import illegal_plans, random_problem, slower_with_more, wrong_bounds

# Plans were slower by a pull that the estimate did not see between steps, a limit that ended a
# search early, a menu that holds a sequence less, groups of one size that are no candidate, a full
# group that stayed the earliest.
FOUND_SLOWER = [245, 609, 734, 1043, 2023, 2377, 2532, 2556, 2661, 2783, 3448, 4020, 4109]


@pytest.mark.parametrize("seeds", [range(20), range(20, 40), FOUND_SLOWER], ids=str)
def test_no_plan_is_below_its_bound_and_more_candidates_are_not_slower(seeds):
    for seed in seeds:
        problem = random_problem(seed)
        assert [*illegal_plans(problem)] == [], seed
        assert [*wrong_bounds(problem)] == [], seed
        assert [*slower_with_more(problem, Random(seed))] == [], seed
