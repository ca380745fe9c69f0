"""The garbage collector need not look at what lives as long as an engine."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import pytest
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import LENGTHS

from ds_hydra.engine import hydra_engine
from ds_hydra.engine.ranks.memory import available_bytes, freeze_gc, unfreeze_gc


def frozen_objects():
    """The collector leaves out what lives with an engine, while it trains and alone does."""
    gc.unfreeze()
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)

    def train(engine, times):
        for _ in range(times):
            engine.train_batch(examples, strategy="1x<1,1>")
        return gc.get_freeze_count()

    first = start_hydra(tiny("llama"))
    assert train(first, 4) == 0
    settled, kept = train(first, 1), train(first, 1)
    assert abs(settled - kept) < 10_000 < kept
    second = start_hydra(tiny("llama"))
    assert gc.get_freeze_count() == 0, "another engine has come"
    assert train(second, 5) > 100_000
    second.destroy()
    assert gc.get_freeze_count() == 0
    with mock.patch.object(hydra_engine, "_FREEZES_EVERY", 7):
        assert train(first, 5) == 0
        assert train(first, 1) > 100_000
    first.destroy()
    gc.disable()
    freeze_gc()
    assert gc.get_freeze_count() == 0, "switched off by the user"
    gc.enable()
    gc.freeze()
    own = gc.get_freeze_count()
    freeze_gc()
    unfreeze_gc()
    assert gc.get_freeze_count() == own, "of the user"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_collector_leaves_out_what_lives_with_an_engine():
    run_distributed(frozen_objects, 1)


V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        # Slurm and systemd set the limit of a job above the group of its processes
        (
            "0::/job_1/step_0",
            {f"{V2}/job_1/memory.max": 900, f"{V2}/job_1/memory.current": 700},
            200,
        ),
        ("0::/job", {f"{V2}/job/memory.max": "max", f"{V2}/job/memory.current": 700}, 5000),
        # A container that sees its own group as the root has a path of the host
        ("0::/docker/1f", {f"{V2}/memory.max": 900, f"{V2}/memory.current": 100}, 800),
        (
            "4:cpu,cpuacct:/a\n3:memory:/a/b",
            {
                f"{V1}/a/memory.limit_in_bytes": 900,
                f"{V1}/a/memory.usage_in_bytes": 800,
                f"{V1}/a/memory.stat": "cache 9\ntotal_inactive_file 300",
            },
            400,
        ),
        ("0::/", {}, 5000),
    ],
)
def test_memory_that_is_left_is_that_of_all_groups_above(groups, files, left, monkeypatch):
    files |= {"/proc/self/cgroup": groups, "/proc/meminfo": "MemAvailable: 5000 kB"}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return f"{files[str(path)]}\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_bytes() == (5000 * 1024 if left == 5000 else left)
