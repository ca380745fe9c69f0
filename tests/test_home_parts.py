"""Homes of several hosts: what a host needs and does not own comes to it once, by one of its
ranks.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from link_cases import random_link
from test_link_plan import crop

from ds_hydra.zero_link import ParamSpec, Region, SliceRef, plan_link
from ds_hydra.zero_link.home_parts import flat_specs, parts_from_other_hosts


@given(link=random_link(), data=st.data())
def test_every_element_comes_to_a_host_once(link, data):
    specs, _, rank_buckets = link
    num_ranks = len(rank_buckets)
    host_of = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    rounds = [range(0, 3), range(2, len(specs))]  # parameter 2 is in both
    parts = parts_from_other_hosts(specs, rounds, rank_buckets, host_of)
    plan_link(flat_specs(specs), parts, 0)
    assert all(len(buckets) == len(rounds) for buckets in parts)
    for host in set(host_of):
        ranks = [rank for rank in range(num_ranks) if host_of[rank] == host]
        for param, spec in enumerate(specs):
            refs = [r for rank in ranks for b in parts[rank] for r in b if r.param == param]
            needed, is_hull = needs(spec, param, [rank_buckets[rank] for rank in ranks])
            owner = np.arange(spec.numel) // spec.shard_numel(num_ranks)
            outside = np.array(host_of)[owner] != host
            came = np.zeros(spec.numel, dtype=int)
            for ref in refs:
                came[ref.region.row : ref.region.row + ref.region.num_rows] += 1
            assert came.max(initial=0) <= 1
            assert (came[needed & outside] == 1).all(), "what is needed comes"
            assert not came[~outside].any(), "what the host owns does not come"
            assert not came[~is_hull].any(), "what nobody near reads does not come"
            assert {r.pushes_gradient for r in refs} <= {pushes(param, rank_buckets, ranks)}


def needs(spec, param, rank_buckets):
    """Elements that the ranks of a host read, and all rows between the first and the last of
    them.
    """
    needed = np.zeros(spec.numel, dtype=bool)
    for ref in (ref for buckets in rank_buckets for bucket in buckets for ref in bucket):
        if ref.param == param:
            crop(spec, needed, ref.region)[...] = True
    rows = np.flatnonzero(needed.reshape(spec.num_rows, spec.num_cols).any(axis=1))
    hull = np.zeros((spec.num_rows, spec.num_cols), dtype=bool)
    if len(rows):
        hull[rows[0] : rows[-1] + 1] = True
    return needed, hull.ravel()


def pushes(param, rank_buckets, ranks):
    refs = (ref for rank in ranks for bucket in rank_buckets[rank] for ref in bucket)
    return any(r.pushes_gradient for r in refs if r.param == param and r.region.numel)


def test_owners_on_other_hosts_are_shared_out():
    specs = [ParamSpec(fqn="w", shape=(8, 3))]
    whole = ((SliceRef(0, Region(0, 8, 0, 3), True),),)
    parts = parts_from_other_hosts(specs, [[0]], [whole] * 4, [0, 0, 1, 1])
    begins = [[ref.region.row for bucket in buckets for ref in bucket] for buckets in parts]
    assert begins == [[12], [18], [0], [6]]
