"""What process groups are said to cost."""

from __future__ import annotations

import contextlib
import datetime
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from ds_hydra.engine.parallel import groups
from ds_hydra.engine.parallel.groups import (
    NCCL_GROUP_BYTES,
    NCCL_PAIR_BYTES,
    GroupPool,
    check_groups_of_rank,
    describe_groups,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import (
    LINK_GROUPS,
    MAX_GROUPS_OF_RANK,
    Role,
    communicators,
    count_groups,
    groups_of,
    groups_of_all,
    link_groups,
    most_groups_of_rank,
    most_multicast_objects,
)

EVERYONE = range(4)
KEYS = [
    ("pull", EVERYONE),
    ("push", EVERYONE),
    *sorted(groups_of(Strategy.parse("1x<2,1> + 1x<1,2>")), key=str),
]


def test_groups_are_counted_by_purpose_and_for_the_rank_that_asks():
    text = describe_groups(KEYS, rank=1, is_nccl=False)
    assert (
        text
        == "5 process groups (1 pull, 1 push, 1 pp_down, 1 pp_up, 1 stage), 3 of them on rank 1"
    )


def test_nccl_memory_is_that_of_the_ranks_own_groups():
    text = describe_groups(KEYS, rank=3, is_nccl=True)
    gib = (2 * NCCL_GROUP_BYTES + 2 * NCCL_PAIR_BYTES) / 2**30
    assert f"about {gib:.1f} GiB" in text
    assert "hydra.max_process_groups" in text


@pytest.mark.parametrize("text", ["<sp3,cp2,2,2>", "<cp2,sp3,2,2>", "<cp4,sp2,1>", "<sp2,cp4,1>"])
def test_neighbours_are_those_of_the_group_that_is_written_first(text):
    strategy = Strategy.parse(text)
    scheme = strategy.schemes[0]
    roles = [Role.find(strategy, rank) for rank in range(strategy.num_devices)]
    for rank, role in enumerate(roles):
        assert role.rank == rank
        for ranks, place in (
            (role.sp_ranks, role.sp_rank), (role.cp_ranks, role.cp_rank), (role.tp_ranks, role.tp_rank)
        ):  # fmt: skip
            assert ranks[place] == rank
        for other in role.sp_ranks:
            assert roles[other].cp_rank == role.cp_rank
            assert roles[other].tp_rank == role.tp_rank
        for other in role.cp_ranks:
            assert roles[other].sp_rank == role.sp_rank
            assert roles[other].tp_rank == role.tp_rank
    near, far = roles[0].sp_ranks, roles[0].cp_ranks
    if scheme.context_first:
        near, far = far, near
    assert (near[1], far[1]) == (scheme.tp, scheme.tp * len(near))
    groups = {key for key in groups_of(strategy) if key[0] in ("sp", "cp")}
    wanted = {("sp", role.sp_ranks) for role in roles} | {("cp", role.cp_ranks) for role in roles}
    assert groups == wanted


def test_sp_groups_are_the_ranks_with_the_same_slices():
    strategy = Strategy.parse("1x<sp2,2,2> + 1x<sp2,1> + 1x<1,1>")
    keys = groups_of(strategy)
    assert {tuple(ranks) for purpose, ranks in keys if purpose == "tp"} == {
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    }
    assert {tuple(ranks) for purpose, ranks in keys if purpose == "sp"} == {
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
        (8, 9),
    }
    assert count_groups([strategy]) == len(keys)


@pytest.mark.parametrize(
    ("text", "group", "parts"),
    [
        ("1x<sp2,2,1;ep=4>", ("ep", range(4)), [0, 1, 2, 3]),
        ("1x<sp2,2,1;ep=2>", ("ep", range(4)), [0, 1, 0, 1]),
        ("1x<4,1;ep=2>", ("tp", range(4)), [0, 1, 0, 1]),
        ("1x<sp4,1;ep=4>", ("sp", range(4)), [0, 1, 2, 3]),
        ("1x<cp2,2,1;ep=2>", ("tp", range(2)), [0, 1, 0, 1]),
    ],
)
def test_experts_are_shared_inside_the_sp_x_tp_group(text, group, parts):
    strategy = Strategy.parse(text)
    roles = [Role.find(strategy, rank) for rank in range(4)]
    assert roles[0].ep_group == group
    assert {role.ep_group for role in roles} <= groups_of(strategy)
    assert [role.ep_place % role.scheme.ep for role in roles] == parts


def test_a_rank_is_in_no_more_groups_than_a_device_has_queues():
    keys = [("tp", range(size)) for size in range(2, MAX_GROUPS_OF_RANK + 2)]
    check_groups_of_rank(keys)
    check_groups_of_rank([*keys, ("tp", range(90, 99))])  # of other ranks
    with pytest.raises(HydraConfigError, match="one rank into 28 process groups, more than the 27"):
        check_groups_of_rank([*keys, ("pp_up", range(2))])


@pytest.mark.parametrize("num_devices", [8, 16, 64, 512])
def test_candidates_before_the_lengths_leave_groups_for_what_these_suggest(num_devices):
    settings = CandidateSettings(
        num_devices=num_devices, context_length=4096, max_groups=100_000, can_run=lambda _: True
    )
    start = decide_candidates(None, None, settings).strategies
    most = most_groups_of_rank(groups_of_all(start))
    assert most <= MAX_GROUPS_OF_RANK - LINK_GROUPS - 12
    assert most == 11 or num_devices < 64


@pytest.mark.parametrize(("minutes", "expected"), [(90, 90), (1, 30)])
def test_groups_wait_as_long_as_the_group_of_all_ranks(minutes, expected):
    """At least as long as torch's own groups, 30 minutes with gloo and 10 with NCCL."""
    timeout = datetime.timedelta(minutes=minutes)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        cpu = torch.device("cpu")
        pool = GroupPool(1, cpu)
        pool.create([("pull", range(1))])
        options = pool.get("pull", range(1))._get_backend(cpu).options
        assert options._timeout == datetime.timedelta(minutes=expected)
        pool.destroy()
    finally:
        dist.destroy_process_group()


def test_groups_that_share_no_rank_are_made_together():
    """Of 256 ranks in groups of 2 to 256 ranks: 255 groups of a purpose are 8 lists, in order."""
    keys = [
        (purpose, range(first, first + 2**k))
        for purpose in ("sp", "tp")
        for k in range(1, 9)
        for first in range(0, 256, 2**k)
    ]
    rounds = groups.disjoint_rounds(keys)
    assert len(rounds) == 16
    assert sorted((key for own in rounds for key in own), key=str) == sorted(keys, key=str)
    for own in rounds:
        ranks = [rank for _, ranks in own for rank in ranks]
        assert len(set(ranks)) == len(ranks) == 256
        assert len({purpose for purpose, _ in own}) == 1


MANY = ("1x<2,1> + 1x<1,2>", "1x<sp2,2,1>", "1x<4,1>", "1x<sp4,1>")


def make_many_groups(is_split, fails_at=0):
    """Sums of the ranks of each group, made one by one or by splits, of which torch has none for
    gloo: in their place all groups of a split are made, and each rank gets its own. Split
    `fails_at` fails on rank 1.
    """
    num_splits = 0

    def split_group(parent, split_ranks, *, timeout, pg_options):
        nonlocal num_splits
        num_splits += 1
        found = [dist.new_group(ranks, timeout=timeout) for ranks in split_ranks]
        if num_splits == fails_at and dist.get_rank() == 1:
            raise RuntimeError("no split")
        mine = [g for g, ranks in zip(found, split_ranks, strict=True) if dist.get_rank() in ranks]
        return mine[0] if mine else None

    strategies = [Strategy.parse(text) for text in MANY]
    with (
        mock.patch.object(groups, "_FEW_GROUPS", 1),
        mock.patch.object(groups, "_can_split", return_value=is_split),
        mock.patch.object(dist, "split_group", split_group),
    ):
        pool = GroupPool(100, torch.device("cpu"))
        pool.ensure(strategies)
    sums = {}
    for purpose, ranks in sorted(groups_of_all(strategies), key=str):
        if dist.get_rank() in ranks:
            value = torch.tensor(dist.get_rank())
            dist.all_reduce(value, group=pool.get(purpose, ranks))
            sums[purpose, ranks] = int(value)
    return sums, num_splits, len(pool)


def make_in_all_ways():
    """Of groups that are split, made one by one, and made so after a split has failed."""
    return [make_many_groups(is_split, fails) for is_split, fails in ((1, 0), (0, 0), (1, 2))]


@pytest.mark.distributed
def test_split_or_not_each_rank_has_its_groups():
    for split, one_by_one, failed in run_distributed(make_in_all_ways, 4):
        for sums, _, num_groups in (split, one_by_one, failed):
            assert sums
            assert all(value == sum(ranks) for (_, ranks), value in sums.items())
            assert num_groups == len(communicators(groups_of_all(map(Strategy.parse, MANY))))
        assert 1 < split[1] < split[2]
        assert (one_by_one[1], failed[1]) == (0, 2)


@pytest.mark.parametrize("num_devices", [8, 32])
def test_groups_inside_of_stages_share_communicators_and_none_of_a_strategy_is_shared(num_devices):
    texts = [
        f"{num_devices // (n * m)}x<{scheme}>"
        for n in (1, 2, 4)
        for m in (1, 2)
        for scheme in (
            f"{n},{m}",
            f"sp{n},{m}" if n > 1 else f"1,{m}",
            f"cp{n},{m},1" if n * m > 3 else f"{n},{m}",
        )
        if f"cp{n},{m},1" != "cp4,1,1"
    ]
    strategies = [Strategy.parse(text) for text in (*texts, "1x<sp2,2,1;ep=4>", "1x<sp2,cp2,2,1>")]
    for strategy in strategies:
        keys = groups_of(strategy)
        assert len(communicators(keys)) == len(keys), str(strategy)
    keys = groups_of_all(strategies)
    assert len(communicators(keys)) < 0.8 * len(keys) == 0.8 * count_groups(strategies)
    assert most_multicast_objects(keys, 8) <= 2 * len(communicators(keys))


def test_multicast_objects_are_counted_on_the_node_that_has_most():
    keys = [("tp", range(2)), ("sp", range(2)), ("pull", range(16)), ("tp", range(0, 16, 8))]
    assert most_multicast_objects(keys, 8) == 4  # one of two ranks, and pull
    assert most_multicast_objects([("pull_node", range(8)), ("pull_node", range(8, 16))], 8) == 2


def test_second_hops_of_the_link_have_groups_of_nodes():
    assert link_groups(4, None) == [("pull", range(4)), ("push", range(4))]
    nodes = [range(0, 2), range(2, 4), range(4, 5)]
    of_nodes = [(purpose, node) for purpose in ("pull_node", "push_node") for node in nodes]
    assert link_groups(5, 2) == [("pull", range(5)), ("push", range(5)), *of_nodes]


def test_few_groups_are_not_split(made):
    GroupPool(99, torch.device("cpu")).create([("tp", range(n, n + 2)) for n in range(64)])
    assert len(made) == 64


class Options:
    """As ProcessGroupNCCL has them, of an NCCL that knows bounds or not."""

    def __init__(self, *, knows_bounds=True):
        self.is_high_priority_stream, self._timeout = False, None
        self.config = SimpleNamespace(**({"max_ctas": None} if knows_bounds else {}))


@pytest.fixture
def made(monkeypatch):
    """Options of the groups that are made under NCCL, by purpose."""
    made = {}

    def new_group(ranks, timeout, pg_options):
        made[len(made)] = pg_options, timeout

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(groups, "_is_nccl", lambda _: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 99)
    monkeypatch.setattr(dist, "new_group", new_group)
    hour = datetime.timedelta(hours=1)
    monkeypatch.setattr(groups, "find_timeout", lambda device: hour)
    return made


def test_communicators_go_before_computation_and_leave_it_the_device(made):
    purposes = ("pull", "push_node", "pp_up", "tp", "home")
    GroupPool(9, torch.device("cpu")).create([(purpose, range(2)) for purpose in purposes])
    assert all(options.is_high_priority_stream for options, _ in made.values())
    assert all(options._timeout == timeout for options, timeout in made.values())
    found = [options.config.max_ctas for options, _ in made.values()]
    assert found == [8, 8, 4, None, None]


def test_what_nccl_does_not_know_is_not_set(made, monkeypatch):
    monkeypatch.setattr(
        dist.ProcessGroupNCCL, "Options", lambda: Options(knows_bounds=False), raising=False
    )
    GroupPool(9, torch.device("cpu")).create([("pull", range(2))])
    (options, _), *_ = made.values()
    assert vars(options.config) == {}


class Registered:
    """A group of all ranks as torch keeps it: a backend for each type of device."""

    def __init__(self, **names):
        self._names = names

    def _get_backend(self, device):
        if device.type not in self._names:
            raise RuntimeError(f"no backend for {device}")
        return SimpleNamespace(name=lambda: self._names[device.type])


def test_nccl_is_what_the_device_has_whatever_the_start_called_it(monkeypatch):
    """`dist.get_backend` says "undefined" after a start without one, or "cpu:gloo,cuda:nccl"."""
    world = Registered(cpu="gloo", cuda="nccl")
    monkeypatch.setattr(groups.c10d, "_get_default_group", lambda: world)
    found = [groups._is_nccl(torch.device(kind)) for kind in ("cpu", "cuda", "xpu")]
    assert found == [False, True, False]


def first_uses():
    """Collectives of the creation of a group of each purpose, in order."""
    done = []

    def tell(name, action):
        def told(*args, **more):
            done.append(name)
            return action(*args, **more)

        return mock.patch.object(dist, name, told)

    pool = GroupPool(9, torch.device("cpu"))
    names = ("all_reduce", "all_to_all_single", "batch_isend_irecv")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(tell(name, getattr(dist, name)))
        pool.create([(p, range(2)) for p in ("cp", "pp_down", "pp_up", "pull", "sp", "tp")])
    return done


@pytest.mark.distributed
def test_a_group_is_first_used_as_it_will_be():
    messages, exchange = "batch_isend_irecv", "all_to_all_single"
    wanted = [exchange, messages, messages, exchange, exchange, "all_reduce"]
    assert run_distributed(first_uses, 2) == [wanted] * 2


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("NCCL error: Failed to bind NVLink SHARP (NVLS) Multicast memory", True),
        ("NCCL error: unhandled system error, remote process exited", False),
    ],
)
def test_a_multicast_object_that_nccl_cannot_have_is_named(made, monkeypatch, text, is_named):
    def refuse(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(dist, "new_group", refuse)
    wanted = "one of 1 communicators.*NCCL_NVLS_ENABLE=0" if is_named else "remote process"
    with pytest.raises(RuntimeError if not is_named else HydraConfigError, match=wanted):
        GroupPool(9, torch.device("cpu")).create([("pull", range(2))])
