"""Settings of CUDA, torch's allocator and NCCL before they start, and what is off where they came
late.
"""

import contextlib
import logging
import os
import subprocess
import sys
import types
from unittest import mock

import deepspeed
import pytest
import torch

from ds_hydra.configs.hydra_config import HydraConfig, LinkConfig
from ds_hydra.engine import candidates, hydra_engine_class
from ds_hydra.engine.propagation import Propagator, Task
from ds_hydra.engine.ranks import memory, process
from ds_hydra.engine.ranks.process import can_overlap, overlap_where_safe
from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.environment import (
    WANTED,
    count_own_cores,
    is_first_on_host,
    set_accelerator_environment,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.scheme import Strategy

CUDA = torch.device("cuda")


@pytest.fixture
def nothing_chosen(monkeypatch):
    for name in WANTED:
        monkeypatch.setenv(name, "gone")  # so that what was there is back after the test
        monkeypatch.delenv(name)


def run(code, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in WANTED}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, text=True, capture_output=True
    )


def test_importing_sets_what_nobody_chose_without_torch():
    code = (
        "import os, sys, ds_hydra; from ds_hydra import errors; hasattr(ds_hydra, '__wrapped__')\n"
        "print(bool({'torch', 'deepspeed'} & {*sys.modules}), "
        f"*[os.environ.get(name) for name in {list(WANTED)}])"
    )
    assert run(code).stdout.split() == ["False", *WANTED.values()]
    assert run(code, CUDA_MODULE_LOADING="LAZY").stdout.split()[2] == "LAZY"


def test_names_of_deepspeed_are_none_where_it_is_not_installed():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ds_hydra; print(hasattr(ds_hydra, 'zero')); from ds_hydra import zero"
    )
    done = run(code)
    assert (done.stdout, done.returncode) == ("False\n", 1)
    assert "cannot import name 'zero' from 'ds_hydra'" in done.stderr


def test_importing_after_the_device_has_started_pretends_nothing():
    code = (
        "import os, sys, types; sys.modules['torch'] = t = types.ModuleType('torch')\n"
        "t.cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
        f"import ds_hydra; print(*[os.environ.get(name) for name in {list(WANTED)}])"
    )
    assert run(code).stdout.split() == ["None"] * len(WANTED)


# The calls of libcuda, which a CPU's machine does not have.
DRIVER = """
import ctypes, os
class Driver:
    def cuModuleGetLoadingMode(self, mode):
        mode._obj.value = {mode}
        return {code}
ctypes.CDLL = lambda name, mode: {{"libcuda.so.1": Driver()}}[name]
"""


@pytest.mark.parametrize(
    ("code", "are_set"), [(0, False), (3, True)], ids=["the driver has started", "it has not"]
)
def test_asking_whether_a_device_is_there_starts_the_driver(code, are_set):
    """As `torch.cuda.is_available()` and `import deepspeed` do, without torch's own start: what
    torch itself reads is in time.
    """
    program = DRIVER.format(mode=2, code=code) + (
        f"import ds_hydra; print(*[os.environ.get(name) for name in {list(WANTED)}])"
    )
    values = [value if are_set or "PYTORCH" in name else "None" for name, value in WANTED.items()]
    assert run(program).stdout.split() == values


def test_what_the_driver_has_in_force_counts(monkeypatch, nothing_chosen):
    os.environ.update(WANTED)
    monkeypatch.setattr(process, "module_loading", lambda: "EAGER")
    assert process.find_overlap_problem(CUDA) == ""
    monkeypatch.setattr(process, "module_loading", lambda: "LAZY")  # the environment came too late
    problem = process.find_overlap_problem(CUDA)
    assert "CUDA_MODULE_LOADING=LAZY" in problem
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in problem
    assert "export CUDA_MODULE_LOADING=EAGER" in problem


@pytest.mark.parametrize("name", [*WANTED, "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_chose_stays(name):
    environment = {name: "8"}
    set_accelerator_environment(environment, lambda _: False)
    assert environment[name] == "8"
    assert len(environment) == len(WANTED)


def test_a_device_that_has_started_is_named_with_what_it_lacks():
    environment = {"CUDA_MODULE_LOADING": "LAZY"}
    late = set_accelerator_environment(environment, lambda _: True)
    assert late == [f"{n}={v}" for n, v in WANTED.items() if n not in environment]
    assert len(late) == len(WANTED) - 1
    assert environment == {"CUDA_MODULE_LOADING": "LAZY"}


def test_one_hardware_queue_is_refused(monkeypatch):
    monkeypatch.setattr(
        type(deepspeed.accelerator.get_accelerator()), "device_name", lambda *_: "cuda"
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(HydraConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        process.prepare_accelerator()


@pytest.mark.parametrize(("device", "is_set"), [("cuda", True), ("cpu", False)])
def test_engines_on_cuda_devices_alone_are_started_with_it(
    monkeypatch, nothing_chosen, device, is_set
):
    monkeypatch.setattr(
        type(deepspeed.accelerator.get_accelerator()), "device_name", lambda *_: device
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    config = HydraConfig(context_length=64, tokens_per_iteration=64)
    with hydra_engine_class(config):
        assert ("CUDA_MODULE_LOADING" in os.environ) is is_set


def test_overlap_is_off_with_one_warning_where_any_rank_was_late(
    monkeypatch, nothing_chosen, caplog
):
    problems = [[False, True], [False, False], [True, True]]
    monkeypatch.setattr(process, "gather_flags", lambda *_: problems.pop(0))
    monkeypatch.setattr(process.dist, "get_rank", lambda: 0)
    config = HydraConfig(
        context_length=64, tokens_per_iteration=64, link=LinkConfig(devices_per_node=2)
    )
    logging.getLogger("ds_hydra").propagate = True
    with caplog.at_level(logging.WARNING, "ds_hydra"):
        changed = overlap_where_safe(config, CUDA)
        assert (changed.link.overlap, changed.link.devices_per_node) == (False, 2)
        assert overlap_where_safe(config, CUDA) == config
        assert caplog.messages == []  # rank 1 has warned
        assert not can_overlap(CUDA)
    (warning,) = caplog.messages
    assert "CUDA_DEVICE_MAX_CONNECTIONS=(not set)" in warning
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER" in warning
    os.environ.update(WANTED)
    assert process.find_overlap_problem(CUDA) == ""
    assert not overlap_where_safe(config, torch.device("cpu")).link.overlap  # no ranks asked


@pytest.mark.parametrize(
    "setting",
    ["NCCL_LAUNCH_ORDER_IMPLICIT=1", "CUDA_LAUNCH_BLOCKING=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL"],
)
def test_settings_for_debugging_switch_overlap_off(monkeypatch, nothing_chosen, setting):
    os.environ.update(WANTED)
    monkeypatch.setenv(*setting.split("="))
    problem = process.find_overlap_problem(CUDA)
    assert problem.startswith(setting)
    assert "unset it" in problem
    assert process.find_overlap_problem(torch.device("cpu")) == ""


@pytest.mark.parametrize(("limit", "value"), [(None, 45_000), (40_000, 36_000)])
def test_a_device_without_memory_is_told_with_a_limit_to_set(monkeypatch, limit, value):
    accelerator = types.SimpleNamespace(
        memory_reserved=lambda: 30_000, available_memory=lambda: 20_000
    )
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    with (
        pytest.raises(
            HydraConfigError, match=f"set hydra.memory_limit_bytes to {value},"
        ) as raised,
        memory.naming_memory_limit(limit),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
    assert "Tried to allocate 2.00 GiB" in str(raised.value)
    assert "more" not in str(raised.value)
    with pytest.raises(RuntimeError, match="other"), memory.naming_memory_limit(limit):
        raise RuntimeError("other")


def test_training_and_profiling_name_the_limit(monkeypatch):
    """Both run inside sections of the watchdog, which tells the other ranks."""

    def fail(*_, **_options):
        raise torch.OutOfMemoryError("out of memory")

    config = HydraConfig(context_length=64, tokens_per_iteration=64, memory_limit_bytes=1000)
    accelerator = types.SimpleNamespace(memory_reserved=lambda: 900, available_memory=lambda: 200)
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(candidates, "measure_profile", fail)
    propagator = types.SimpleNamespace(
        _memory_limit_bytes=1000,
        _run_phases=fail,
        rank=0,
        device=torch.device("cpu"),
        recorder=Recorder(),
        stage_model=types.SimpleNamespace(
            balance=types.SimpleNamespace(begin=lambda *_: None),
            flops_of_pair=1.0,
            staying=contextlib.nullcontext,
        ),
    )
    plan = mock.MagicMock(num_devices=1)
    of_phase = types.SimpleNamespace(strategy=Strategy.parse("1x<1,1>"))
    plan.on_rank.return_value = (types.SimpleNamespace(plan=of_phase),)
    known = types.SimpleNamespace(
        profile=None,
        config=config,
        propagator=propagator,
        log=None,
        _at_start=(),
        _measured_beside=tuple,
    )
    with pytest.raises(HydraConfigError, match="memory_limit_bytes to 900"):
        Propagator._run(propagator, plan, Task(None, None, 1.0, None), [])
    with pytest.raises(HydraConfigError, match="memory_limit_bytes to 900"):
        candidates.EngineCandidates.ensure_profile(known)


def test_warnings_of_torchaos_classes_are_left_out():
    torchs = logging.getLogger("torch.utils._pytree")

    def is_told(text):
        return torchs.filter(torchs.makeRecord("", logging.WARNING, "", 0, text, ("Kind",), None))

    assert not is_told("%s is an Enum subclass and is now natively supported")
    assert is_told("%s is something else")


TORCHRUN = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("launched", "num_cores", "is_first", "own"),
    [
        ({}, 64, True, 2),  # no launcher says more than that there are 32 ranks
        (TORCHRUN, 64, False, 8),
        (SRUN, 64, False, 8),  # nobody is bound
        (SRUN, 12, False, 12),  # each task has its own
        ({**SRUN, "SLURM_LOCALID": "0"}, 12, True, 12),
        ({**SRUN, **TORCHRUN, "SLURM_LOCALID": "0"}, 64, False, 8),  # one torchrun on each node
        ({**SRUN, **TORCHRUN, "LOCAL_RANK": "0"}, 4, True, 1),
    ],
)
def test_places_and_cores_of_a_host_are_those_of_the_launcher(
    monkeypatch, launched, num_cores, is_first, own
):
    for name in {*SRUN, *TORCHRUN, "LOCAL_SIZE"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cores))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert is_first_on_host() == is_first
    assert count_own_cores(num_ranks=32) == own
