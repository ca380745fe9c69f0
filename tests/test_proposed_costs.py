"""T, MaxLen, pull and push of every scheme that a proposal considers stay what they were, to the
last bit, on every shipped profile and kind of hardware (`proposed_costs.py`).
"""

import json

import pytest
from proposed_costs import DIGESTS, digests, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_prices_are_those_of_the_digests(name):
    known = json.loads(DIGESTS.read_text())[name]
    found = digests(name)
    assert found.keys() == known.keys()
    differing = [key for key in known if found[key] != known[key]]
    assert not differing, (
        f"python tests/proposed_costs.py '{name}' {differing[0]} prints the values; compare them "
        "with those of the commit before, and write digests anew (--write) for prices that were wrong"
    )
