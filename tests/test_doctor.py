"""`ds-hydra doctor`: ranks that are well, that compute wrongly, hang or fail, and bad input."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import types

import pytest
import torch
from command_line import refused
from distributed import run_distributed

from ds_hydra.doctor import examination, findings
from ds_hydra.doctor.examination import Examination, describe
from ds_hydra.doctor.findings import REPORT_SCHEMA, Finding, Report, Status
from ds_hydra.engine.parallel import groups as groups_of_engine
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.engine.profiling import profile_run
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware

LONG_S = 300
"""Only what hangs takes so long."""
CHECKS = {
    "ranks", "versions", "attention", "shared memory", "open files", "host", "communicators", "all-reduce",
    "all-to-all", "links inside a host", "speed of ranks", "gradients", "hangs",
}  # fmt: skip


def examine():
    """Document of an examination on this rank, and of the one that `on_hang` was called with."""
    ended = queue.SimpleQueue()
    examination = Examination(ended.put, 1.0, LONG_S)

    def run():
        ended.put(examination.run())

    threading.Thread(target=run, daemon=True).start()
    report = ended.get()
    return report and report.to_json()


def well_then_wrong():
    torch.set_num_threads(1)
    well = examine()

    def own_part(shards, partial):
        part = partial.chunk(shards.size, dim=1)[torch.distributed.get_rank()]
        return part.contiguous(), tensor_parallel.nothing

    tensor_parallel.TokenShards.post_reduce_scatter = own_part
    return well, examine()


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_are_well_and_sums_that_are_missing():
    (well, wrong), _ = run_distributed(well_then_wrong, 2)
    found = {finding["check"]: finding for finding in well["findings"]}
    assert well["schema"] == REPORT_SCHEMA
    assert well["is_well"], well
    assert set(found) == CHECKS
    assert found["hangs"]["figures"]["iterations"] > 0
    gradients = [f for f in well["findings"] if f["check"] == "gradients"]
    assert [len(f["figures"]["errors"]) for f in gradients] == [5, 3, 2]
    assert all(e <= 1e-5 for f in gradients[::2] for e in f["figures"]["errors"].values())
    in_bf16 = gradients[1]["figures"]["errors"].values()
    assert all(1e-4 < e < 5e-2 for e in in_bf16), in_bf16  # half of what is allowed
    assert list(gradients[2]["figures"]["errors"]) == ["2x<1,1;gather>", "2x<1,1;gather>, again"]
    assert not wrong["is_well"]
    bad = [f for f in wrong["findings"] if f["check"] == "gradients"][:2]
    assert len(bad) == 2
    assert all(f["status"] == "problem" and "wrong: 1x<2,1>" in f["text"] for f in bad)
    assert all(f["advice"] for f in bad)


def one_rank_sleeps():
    """Rank 0 takes rank 1 for late as soon as it sleeps."""
    original, make, monitors = examination.SmallModel.train, examination.HangMonitor, []

    def noted(*args, **settings):
        monitors.append(make(*args, **settings))
        return monitors[0]

    def train(self, propagator, strategy):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 6:  # the first that looks for hangs
            store = torch.distributed.distributed_c10d._get_default_store()
            if propagator.rank == 1:
                store.set("asleep", "1")
                time.sleep(1000)
            store.wait(["asleep"])
            monitors[0]._limit_s = 0.0
        return original(self, propagator, strategy)

    examination.SmallModel.train, examination.HangMonitor = train, noted
    return examine()


def one_rank_fails():
    def fail(self, strategy):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("out of memory")
        return self.original(strategy)

    examination.SmallModel.original = examination.SmallModel.plan
    examination.SmallModel.plan = fail
    return examine()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_hangs_is_named_with_what_it_does():
    first, second = run_distributed(one_rank_sleeps, 2)
    assert second is None
    last = first["findings"][-1]
    assert (last["check"], last["status"]) == ("hangs", "problem")
    assert "rank 1 is in 'iteration" in last["text"]
    assert "exchanges alone" in last["text"]
    assert "rank 0 is in" in last["text"]
    assert ".py:" in last["text"]  # where rank 0 waits
    # What was found before is kept
    assert {finding["check"] for finding in first["findings"]} == CHECKS


@pytest.mark.distributed
def test_a_rank_that_fails_is_named_with_its_error():
    first, second = run_distributed(one_rank_fails, 2)
    assert second is None
    text = first["findings"][-1]["text"]
    assert text.startswith("others wait for rank 1: rank 1 failed in 'gradients of"), text
    assert "RuntimeError: out of memory" in text


def test_a_rank_disturbs_its_own_device(monkeypatch):
    calls, is_over = [], threading.Event()
    accelerator = types.SimpleNamespace(
        set_device=lambda index: calls.append(index), synchronize=is_over.set
    )
    monkeypatch.setattr(examination, "get_accelerator", lambda: accelerator)
    own = types.SimpleNamespace(random=lambda: 0.0)
    examination._disturb(torch.device("cuda", 3), is_over, own)
    assert calls == [3]
    assert is_over.is_set()


def test_two_ranks_on_one_device_are_told_what_to_do(monkeypatch):
    def duplicate(**_):
        raise RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp, invalid usage\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10\n"
        )

    monkeypatch.setattr(profile_run.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(profile_run.deepspeed, "init_distributed", duplicate)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        HydraConfigError, match=r"rank 1 and rank 0 both.*LOCAL_RANK is 0.*NCCL_HOSTID"
    ):
        profile_run.join_ranks()


def test_versions_of_ranks_are_compared():
    one = {"torch": "2.13.0", "environment": {"NCCL_DEBUG": "INFO"}}
    assert findings.compare_environments([one, one]).status is Status.OK
    other = findings.compare_environments([one, {**one, "environment": {}}])
    assert other.status is Status.WARNING
    other = findings.compare_environments([one, {**one, "torch": "2.12.0"}])
    assert other.status is Status.PROBLEM
    assert "torch: 2.12.0 and 2.13.0" in other.text


def test_hardware_is_found_by_the_device():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert findings.find_hardware(None, cuda, "NVIDIA A800-SXM4-80GB").name == "A800-80GB"
    assert "H200" in findings.find_hardware(None, cuda, "NVIDIA H200").name
    assert findings.find_hardware(None, cuda, "NVIDIA A100-SXM4-40GB").name == "A100-40GB"
    assert findings.find_hardware(None, cuda, "NVIDIA H100 PCIe") is None  # has other links
    assert findings.find_hardware(None, cuda, "Radeon") is None
    assert findings.find_hardware(None, cpu, "cpu").name == findings.CPU_NAME


@pytest.mark.parametrize(("rate", "status"), [(0.4e9, Status.WARNING), (0.6e9, Status.OK)])
def test_slow_links_are_told(rate, status):
    hardware = Hardware(
        name="A", devices_per_node=2, memory_bytes=1, matmul_flops=1.0, attention_flops=1.0, memory_rate=1.0,
        intra_node_rate=1e9, inter_node_rate=1e9, layer_overhead_ms=0.0, collective_overhead_ms=0.0,
    )  # fmt: skip
    finding = findings._judge("links inside a host", rate, hardware, across=False, slowest=(2, 3))
    assert finding.status is status
    assert "rank 2 to 3" in finding.text
    assert bool(finding.advice) == (status is Status.WARNING)


@pytest.mark.parametrize(
    ("seconds", "status"), [({4: 2, 8: 1.0, 16: 0.5, 24: 0.6}, "warning"), ({}, "ok")]
)
def test_blocks_by_which_all_to_alls_are_faster_are_told(monkeypatch, seconds, status):
    """As pulls have them, on communicators of 4 to 24 thread blocks."""
    made = []
    times = iter([1e-3 * seconds.get(blocks, 1.0) for blocks in (4, 8, 16, 24)])
    groups = types.SimpleNamespace(create=made.extend, get=lambda *_: None)
    monkeypatch.setattr(findings.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(findings, "_median_s", lambda *_: next(times))
    monkeypatch.setattr(findings.torch, "ones", lambda n, device: torch.zeros(n))
    hardware = Hardware.load("h100")
    hosts = types.SimpleNamespace(names=("a",), of_rank=(0, 0, 0, 0))
    found = findings.check_all_to_all(torch.device("cuda"), hosts, hardware, groups)
    assert [most for purpose, _ in made for most in (groups_of_engine._MOST_CTAS[purpose],)] == [
        4,
        8,
        16,
        24,
    ]
    assert found.status.value == status or not seconds
    assert ("NCCL_MAX_CTAS=16" in found.advice) == bool(seconds)
    assert "by 16" in found.text


def test_communicators_are_counted_beside_the_objects_of_a_node(monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    keys = [(f"purpose {i}", range(8)) for i in range(65)]
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    found = findings.check_communicators(keys, 8, cuda)
    assert found.status is Status.WARNING
    assert found.figures == {"multicast_objects": 130, "communicators": 65}
    assert "NCCL_NVLS_ENABLE=0" in found.advice
    assert findings.check_communicators(keys[1:], 8, cuda).status is Status.OK
    assert findings.check_communicators(keys, 8, cpu).status is Status.OK
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert findings.check_communicators(keys, 8, cuda).status is Status.OK


def test_a_report_is_a_document_and_a_table():
    bad = Finding(check="links", status=Status.WARNING, text="slow", advice="do this")
    skipped = Finding(check="a", status=Status.SKIPPED, text="b", figures={"c": (1, 2)})
    report = Report(findings=(bad, skipped), seconds=3.0)
    lines = describe(report).splitlines()
    assert "-> do this" in lines[1]
    assert lines[-1].startswith("well: 0 problems, 1 warnings")
    document = json.loads(json.dumps(report.to_json()))
    assert [finding["status"] for finding in document["findings"]] == ["warning", "skipped"]


def test_half_of_a_launchers_variables_are_refused(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not: start with deepspeed" in refused("doctor")
    assert logging.getLogger("ds_hydra").level == logging.NOTSET
