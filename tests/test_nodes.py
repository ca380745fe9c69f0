"""Several nodes as a user has them: hosts with own addresses, lost hosts, bytes on the wire."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import wait_until
from engines import raised_by, start_hydra
from faults import kill_in
from models import VOCAB_SIZE, tiny
from nodes import PRIVATE_FOLDER, Counters, hosts_or_skip, run_on_hosts
from single_process import random_examples, token_mean_gradients
from test_engine_parity import hand_plan

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.hosts import (
    Hosts,
    find_ranks_per_node,
    ranks_per_node,
    warn_of_placement,
)
from ds_hydra.records.timeline import EventKind
from ds_hydra.strategy import Strategy


@pytest.mark.parametrize(
    ("host_of", "wanted", "warning"),
    [
        ([0], 1, None),
        ([0, 0, 0], 3, None),
        ([0, 0, 1, 1], 2, None),
        ([0, 1, 2], 1, None),
        (
            [0, 0, 0, 1, 1],
            3,
            "hosts run different numbers of ranks (3, 2): routes take them for nodes of 3",
        ),
        (
            [0, 0, 1, 1, 1, 1],
            2,
            "hosts run different numbers of ranks (2, 4): routes take them for nodes of 2",
        ),
        ([0, 1, 1], 1, "hosts run different numbers of ranks (1, 2)"),
        (
            [0, 1, 0, 1],
            1,
            "the ranks of a host are not consecutive (hosts of the first ranks: 0, 1, 0, 1)",
        ),
        ([0, 0, 1, 0], 1, "the ranks of a host are not consecutive"),
    ],
)
def test_nodes_out_of_the_hosts_of_the_ranks(host_of, wanted, warning, caplog):
    assert ranks_per_node(host_of) == wanted
    warn_of_placement(host_of)
    assert (warning or "") in caplog.text
    assert bool(caplog.text) == bool(warning)
    is_routed = 1 < wanted < len(host_of)
    assert find_ranks_per_node(LinkConfig(), host_of) == (wanted if is_routed else None)
    assert find_ranks_per_node(LinkConfig(devices_per_node=1), host_of) is None
    given = find_ranks_per_node(LinkConfig(devices_per_node=2), host_of)
    assert given == (2 if len(host_of) > 2 else None), "what the user says counts"


def test_places_are_named_where_there_are_several():
    assert Hosts(("a", "b"), (0, 0, 1)).describe_place(1) == "host a (ranks 0, 1)"
    assert Hosts(("a", "b"), (0, 0, 1)).describe_place(2) == "host b (rank 2)"
    assert Hosts(("a", "b"), (0,) * 9 + (1,)).describe_place(3) == "host a (ranks 0, 1 ... 8)"
    assert Hosts(("a",), (0, 0)).describe_place(1) == ""


STRATEGIES = (
    "1x<2,2>", "2x<2,1>", "1x<2,1> + 1x<1,2>", "4x<1,1>", "1x<4,1>", "1x<1,4>", "4x<1,1;gather>",
    "1x<sp4,1;gather>", "1x<2,1;gather> + 2x<1,1;gather>",
)  # fmt: skip
"""On two hosts of two ranks: TP inside and a pipeline across, all inside, mixed, none, TP across,
four stages; gathered layers, with exchanges across, and mixed.
"""

ROUTED = (
    "1x<2,2>", "1x<2,1> + 1x<1,2>", "4x<1,1>", "4x<1,1;gather>", "4x<1,1;gather> then 1x<sp4,1;gather>",
)  # fmt: skip
"""Those whose bytes are counted."""


def data_of(iteration):
    return random_examples([9, 25, 14, 7], VOCAB_SIZE, seed=iteration)


def own_counters():
    """What this host's `eth0` has carried."""
    (line,) = (text for text in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in text)
    numbers = [int(number) for number in line.split(":")[1].split()]
    return Counters(numbers[0], numbers[1], numbers[8], numbers[9])


def num_sent_twice():
    """Segments that the hosts of all ranks have sent once more, because an answer came late.
    Collective.
    """
    names, values = (
        text.split()
        for text in Path("/proc/net/snmp").read_text().splitlines()
        if text.startswith("Tcp:")
    )
    total = torch.tensor(int(values[names.index("RetransSegs")]))
    dist.all_reduce(total)
    return int(total)


def exchange(propagator, plan, grads_P, times):
    """All pulls and pushes of `plan`, `times` times, without computation: planned and counted bytes
    of this host's interface.

    Counted once more where a busy machine made TCP send something twice.
    """

    def once():
        phases = plan.on_rank(propagator.rank)
        session = propagator.links.open(phases, training=True, grads_P=grads_P)
        with session:
            session.await_all()
            session.finish()
        return session._schedule.transfers

    transfers = once()  # connections are made, and plans compared
    for _ in range(5):
        sent_twice = num_sent_twice()
        dist.barrier()
        before = own_counters()
        dist.barrier()
        for _ in range(times):
            once()
        dist.barrier()
        counted = own_counters() - before
        dist.barrier()
        if num_sent_twice() == sent_twice:
            break
    return planned_bytes(propagator, plan.strategy.in_turn[0], transfers), counted


def planned_bytes(propagator, strategy, transfers):
    """Bytes of `transfers` that this rank sends to, and receives from, other hosts, by the plan."""
    link = propagator.links.link_for(strategy)
    host_of = propagator.hosts.of_rank

    def across(batches):
        return 4 * sum(
            batch.numel
            for batch in batches
            for peer in batch.peers
            if host_of[peer] != host_of[propagator.rank]
        )

    sent = received = 0
    for transfer in transfers:
        is_pull = transfer.kind is EventKind.PULL
        for hop in (link.pull if is_pull else link.push).rounds[transfer.bucket].hops:
            sent += across(hop.outgoing if is_pull else hop.incoming)
            received += across(hop.incoming if is_pull else hop.outgoing)
    return sent, received


def count_bytes(engine, strategies, times=2):
    """For each strategy and kind of routes: planned and counted bytes of this host, per
    exchange.
    """
    own = engine.propagator
    direct = Propagator(
        own.stage_model,
        device=engine.device,
        max_groups=64,
        link_config=LinkConfig(devices_per_node=1),
    )
    grads_P = engine._zero_gradient_shards()
    found = {}
    for text in strategies:
        strategy = Strategy.parse(text)
        # A micro-batch each
        plan = hand_plan(strategy, random_examples([5] * len(strategy.schemes), VOCAB_SIZE))
        for name, propagator in (("node", own), ("direct", direct)):
            planned, counted = exchange(propagator, plan, grads_P, times)
            mine = torch.tensor(planned, dtype=torch.int64)
            rows = [torch.empty_like(mine) for _ in own.hosts.of_rank]
            dist.all_gather(rows, mine)
            here = [
                row
                for row, host in zip(rows, own.hosts.of_rank)
                if host == own.hosts.of_rank[own.rank]
            ]
            sent, received = torch.stack(here).sum(dim=0).tolist()
            found[f"{name} {text}"] = {
                "planned": [sent, received],
                "counted": [counted.sent_bytes / times, counted.received_bytes / times],
                "packets": [counted.sent_packets / times, counted.received_packets / times],
            }
    direct.close()
    return found


def big_model():
    return tiny("llama_tied", hidden_size=128, intermediate_size=352, num_hidden_layers=4)


def train(engine, strategies):
    return [
        float(engine.train_batch(data_of(i), strategy=s)).hex() for i, s in enumerate(strategies)
    ]


def train_count_and_wait_for_a_cut(folder, cut, given=None):
    """Losses and bytes; then an iteration of the strategy `cut`, if there is one, in the middle of
    which a host is cut off.
    """
    engine = start_hydra(
        big_model(),
        hydra={"faults": {"silence_s": 15, "grace_s": 2}, "link": {"devices_per_node": given}},
    )
    propagator = engine.propagator
    outcome = {
        "losses": train(engine, STRATEGIES),
        "hosts": propagator.hosts.names,
        "host_of": propagator.hosts.of_rank,
        "ranks_per_node": propagator.links.ranks_per_node,
    }
    if not cut:
        return outcome
    outcome["bytes"] = count_bytes(engine, ROUTED)
    Path(f"{folder}/outcome_{dist.get_rank()}").write_text(json.dumps(outcome))
    dist.barrier()
    if dist.get_rank() == 3:
        forward = engine.propagator.stage_model.forward_stage

        def forward_after_the_cut(*args, **kwargs):
            Path(f"{folder}/cut_now").touch()
            wait_until(Path(f"{folder}/is_cut").exists)
            return forward(*args, **kwargs)

        engine.propagator.stage_model.forward_stage = forward_after_the_cut
    engine.train_batch(data_of(9), strategy=cut)
    return None


def check_bytes(of_hosts):
    """Counted bytes are those planned, 66 bytes of headers for each packet, and less than 1% + 5
    KB.

    The rest are headers of gloo's messages, two barriers, and what the watchdog says meanwhile. A
    packet of the interface may be 64 KB large: the kernel cuts it later. Returns the counted bytes
    of all hosts, without headers: how many there are depends on the load.
    """
    for name in of_hosts[0]:
        for found in (host[name] for host in of_hosts):
            for planned, counted, packets in zip(
                found["planned"], found["counted"], found["packets"]
            ):
                assert 0 <= counted - planned - 66 * packets <= 0.01 * planned + 5000, (name, found)
    return {
        name: sum(sum(host[name]["counted"]) - 66 * sum(host[name]["packets"]) for host in of_hosts)
        for name in of_hosts[0]
    }


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cut", ["1x<2,2>", "4x<1,1;gather>"])
def test_two_hosts_of_two_ranks(tmp_path, cut):
    """As on one host, bit for bit; the plan's bytes and no more on the wire; a host that is cut off
    is named.
    """
    folder = tmp_path / "two"

    def cut_off():
        if not (folder / "cut_now").exists():
            return False
        hosts.cut(1)
        (folder / "is_cut").touch()
        return True

    with hosts_or_skip(2) as hosts:
        function = train_count_and_wait_for_a_cut
        alone = run_on_hosts(function, None, [4], tmp_path / "alone", "", "", 2)
        ended = run_on_hosts(function, hosts, [2, 2], folder, str(folder), cut, poll=cut_off)
    outcomes = [json.loads((folder / f"outcome_{rank}").read_text()) for rank in range(4)]
    for outcome in outcomes:
        assert outcome["hosts"] == ["node-0", "node-1"]
        assert outcome["host_of"] == [0, 0, 1, 1]
        assert outcome["ranks_per_node"] == 2
        # One host that is told to route as two sums in the same order; without it the last digits
        # would differ.
        assert outcome["losses"] == alone[0].value["losses"]
    assert alone[0].value["hosts"] != ["node-0"]
    counted = check_bytes([outcomes[0]["bytes"], outcomes[2]["bytes"]])
    for strategy in ROUTED:
        assert counted[f"node {strategy}"] < 1.01 * counted[f"direct {strategy}"], strategy
    for strategy in ("4x<1,1>", *ROUTED[3:]):  # every rank needs everything, each time anew
        assert counted[f"node {strategy}"] < 0.51 * counted[f"direct {strategy}"], strategy
    assert counted["node 1x<2,1> + 1x<1,2>"] < 0.99 * counted["direct 1x<2,1> + 1x<1,2>"]
    for rank, lost in enumerate(["node-1 (ranks 2, 3)"] * 2 + ["node-0 (ranks 0, 1)"] * 2):
        assert ended[rank].exit_code in (1, 75), ended[rank].stderr
        assert re.search(
            rf"rank \d is silent for 15 s \(host {re.escape(lost)} cut off", ended[rank].stderr
        )


def save_where_no_other_host_reads(engine, strategies):
    """Losses after saving and after loading, and the error without DeepSpeed's option for such
    storage.
    """
    folder = f"{PRIVATE_FOLDER}/checkpoints"
    engine.save_checkpoint(folder)
    after_saving = train(engine, strategies)
    engine.load_checkpoint(folder)
    after_loading = train(engine, strategies)
    engine._config.use_node_local_storage = False
    _, error = raised_by(lambda: engine.save_checkpoint(f"{PRIVATE_FOLDER}/others"))
    return after_saving, after_loading, error


def train_count_and_die(folder, victim):
    engine = start_hydra(big_model(), checkpoint={"use_node_local_storage": True})
    propagator = engine.propagator
    strategies = ("1x<2,2> + 1x<1,1>", "2x<2,1> + 1x<1,1>", "1x<1,3> + 1x<2,1>")
    outcome = {
        "losses": train(engine, strategies),
        "host_of": propagator.hosts.of_rank,
        "ranks_per_node": propagator.links.ranks_per_node,
    }
    outcome["bytes"] = count_bytes(engine, (strategies[0], "5x<1,1;gather>"))
    outcome["resumed"] = save_where_no_other_host_reads(engine, strategies[1:2])
    Path(f"{folder}/outcome_{dist.get_rank()}").write_text(json.dumps(outcome))
    dist.barrier()
    if dist.get_rank() == victim:  # between two layers that are gathered
        kill_in(engine, "pull", folder, passes=2)
    engine.train_batch(data_of(9), strategy="2x<2,1;gather> + 1x<1,1;gather>")
    return None


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_three_hosts_the_last_with_fewer_ranks(tmp_path):
    """As one process; checkpoints on storage of each host; a killed process is named with its
    host.
    """
    wanted, _ = token_mean_gradients(big_model(), data_of(0))
    folder = tmp_path / "three"
    with hosts_or_skip(3) as hosts:
        ended = run_on_hosts(train_count_and_die, hosts, [2, 2, 1], folder, str(folder), 3)
    outcomes = [json.loads((folder / f"outcome_{rank}").read_text()) for rank in range(5)]
    for outcome in outcomes:
        assert outcome["host_of"] == [0, 0, 1, 1, 2]
        after_saving, after_loading, error = outcome["resumed"]
        assert after_saving == after_loading
        assert "there is no folder" in error
        assert 'share, or set "checkpoint": {"use_node_local_storage": true}' in error
        assert outcome["ranks_per_node"] == 2
        assert float.fromhex(outcome["losses"][0]) == pytest.approx(wanted, rel=1e-5)
        assert outcome["losses"] == outcomes[0]["losses"]
    check_bytes([outcomes[0]["bytes"], outcomes[2]["bytes"], outcomes[4]["bytes"]])
    assert ended[3].exit_code == -signal.SIGKILL
    for rank in (0, 1, 2, 4):
        assert ended[rank].exit_code in (1, 75), ended[rank].stderr
        assert "rank 3 is gone: its process ended on host node-1 (ranks 2, 3)" in ended[rank].stderr
