"""What is set for CUDA, torch's allocator and NCCL before they start."""

import os

import deepspeed
import pytest
import torch

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine import hydra_engine_class
from ds_hydra.engine.ranks.accelerator_settings import WANTED, set_accelerator_environment
from ds_hydra.errors import HydraConfigError


def test_what_nobody_chose_is_set():
    environment = {"PATH": "/bin"}
    assert set_accelerator_environment(environment, is_started=False) == []
    assert environment == {"PATH": "/bin", **WANTED}


@pytest.mark.parametrize("name", [*WANTED, "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_chose_stays(name):
    environment = {name: "8"}
    set_accelerator_environment(environment, is_started=False)
    assert environment[name] == "8"
    assert len(environment) == len(WANTED)


def test_a_device_that_has_started_is_named_with_what_it_lacks():
    environment = {"CUDA_MODULE_LOADING": "LAZY"}
    late = set_accelerator_environment(environment, is_started=True)
    assert late == ["CUDA_DEVICE_MAX_CONNECTIONS=32", "PYTORCH_ALLOC_CONF=expandable_segments:True"]
    assert environment == {"CUDA_MODULE_LOADING": "LAZY"}


def test_one_hardware_queue_is_refused():
    with pytest.raises(HydraConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        set_accelerator_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, is_started=False)


@pytest.mark.parametrize(("device", "is_set"), [("cuda", True), ("cpu", False)])
def test_engines_on_cuda_devices_alone_are_started_with_it(monkeypatch, device, is_set):
    for name in WANTED:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "gone")  # so that it is removed again after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        type(deepspeed.accelerator.get_accelerator()), "device_name", lambda *_: device
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    config = HydraConfig(context_length=64, tokens_per_iteration=64)
    with hydra_engine_class(config):
        assert ("CUDA_MODULE_LOADING" in os.environ) is is_set
