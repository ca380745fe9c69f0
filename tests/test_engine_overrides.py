"""Our overrides against the installed DeepSpeed: an upgrade breaks here and not in a run."""

from __future__ import annotations

import ast
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime import config, engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator, stage3

import ds_hydra
from ds_hydra.engine import HydraEngine, gradient_shards
from ds_hydra.engine.gradient_shards import GradientShards

REPLACED = [
    "save_checkpoint", "load_checkpoint", "save_16bit_model", "deepspeed_io", "forward", "backward",
    "step", "destroy", "offload_states", "_zero3_consolidated_16bit_state_dict",
]  # fmt: skip


PRIVATE = {
    "_config", "_configure_checkpointing", "_configure_optimizer", "_copy_recovery_script", "_get_all_ckpt_names",
    "_get_zero_param_shapes", "_global_grad_norm", "_is_gradient_accumulation_boundary", "_param_dict",
    "_partition_all_parameters", "_step_applied", "_take_model_step", "_zero3_consolidated_16bit_state_dict",
}  # fmt: skip
"""Names of DeepSpeed that it may move in any version."""
OF_OTHERS = {"_lock", "_save_checkpoint"}
"""Names of ds_hydra and transformers that DeepSpeed has as well."""


def private_names(tree):
    """What is read, set, overridden, or named in a string."""
    for node in ast.walk(tree):
        names = [getattr(node, key, None) for key in ("attr", "name", "value")]
        yield from (n for n in names if isinstance(n, str) and re.fullmatch(r"_[a-z]\w+", n))


def test_the_private_names_of_deepspeed_that_are_used_are_known_and_there():
    modules = (engine, config, stage3, parameter_offload, partitioned_param_coordinator)
    code = "\n".join(map(inspect.getsource, modules))
    theirs = set(re.findall(r"(?:self\.|def )(_[a-z]\w+)", code))
    texts = [path.read_text() for path in Path(ds_hydra.__file__).parent.rglob("*.py")]
    used = {n for text in texts if "deepspeed" in text for n in private_names(ast.parse(text))}
    assert theirs >= PRIVATE, f"DeepSpeed has moved {sorted(PRIVATE - theirs)}"
    assert used & theirs - OF_OTHERS == PRIVATE, sorted(used & theirs ^ PRIVATE)


@pytest.mark.parametrize("name", REPLACED)
def test_overrides_take_what_deepspeed_takes(name):
    theirs = inspect.signature(getattr(DeepSpeedEngine, name)).parameters
    ours = inspect.signature(getattr(HydraEngine, name)).parameters
    takes_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values())
    missing = [p for p in theirs if p not in ours]
    assert takes_rest or not missing, f"{name} lacks {missing}"


def test_initialize_has_deepspeeds_signature():
    theirs = inspect.signature(deepspeed.initialize).parameters
    ours = inspect.signature(ds_hydra.initialize).parameters
    assert list(ours) == list(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_initialize_builds_the_class_that_we_swap_in():
    source = inspect.getsource(deepspeed.initialize)
    assert "engine = DeepSpeedEngine(args=args," in source


def test_what_deepspeed_offers_for_gradients_is_still_there():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.utils import safe_set_local_grad

    assert list(inspect.signature(safe_set_local_grad).parameters) == ["param", "value"]
    assert hasattr(DeepSpeedZeroOptimizer_Stage3, "independent_gradient_partition_epilogue")
    assert (
        "for bucket in self.ipg_buckets.values():\n            bucket.clear_params()"
        in inspect.getsource(DeepSpeedZeroOptimizer_Stage3._pre_step)
    )
    assert "_is_gradient_accumulation_boundary" in inspect.getsource(
        DeepSpeedEngine.set_gradient_accumulation_boundary
    )


def shards_of_a_device(monkeypatch, grads, **facts):
    """Shards `grads`, and what DeepSpeed's optimizer takes norms of."""
    taken = []

    def take(gradients, params, norm_type=2):
        taken.append([g.clone() for g in gradients])
        return torch.stack([g.norm(norm_type) for g in gradients]).norm(norm_type)

    groups = [[param] for param in grads]
    optimizer = SimpleNamespace(
        get_grad_norm_direct=take, offload_optimizer=False, fp16_groups=groups, **facts
    )
    by_param = {id(param): grad for param, grad in grads.items()}
    monkeypatch.setattr(gradient_shards, "safe_get_local_grad", lambda p: by_param[id(p)])
    shards = GradientShards(optimizer, list(grads), torch.device("cuda"))
    shards.zeroed()
    for number, grad in enumerate(grads.values()):
        grad.fill_(number + 1)
    return shards, optimizer, taken


def two_shards():
    return {torch.nn.Parameter(torch.zeros(n)): torch.zeros(n) for n in (4, 9)}


def test_deepspeed_takes_no_norm_of_what_ranks_have_told(monkeypatch):
    grads = two_shards()
    shards, optimizer, taken = shards_of_a_device(monkeypatch, grads)
    assert shards.squares().tolist() == [4, 36]
    shards.tell([16.0, math.nan])
    found = [
        optimizer.get_grad_norm_direct([grad], group)
        for grad, group in zip(grads.values(), optimizer.fp16_groups, strict=True)
    ]
    assert [float(norm) for norm in found] == [4.0, -1.0]  # as DeepSpeed marks one that is not
    assert taken == []


@pytest.mark.parametrize(
    "why", ["muon", "another gradient", "another norm", "another group", "a new iteration"]
)
def test_deepspeed_takes_its_own_norms_of_what_is_not_known(monkeypatch, why):
    grads = two_shards()
    shards, optimizer, taken = shards_of_a_device(monkeypatch, grads, use_muon=why == "muon")
    shards.tell(shards.squares().tolist())
    if why == "a new iteration":
        shards.zeroed()
    given = [torch.ones(3)] if why == "another gradient" else [next(iter(grads.values()))]
    args = (float("inf"),) if why == "another norm" else ()
    group = [next(iter(grads))] if why == "another group" else optimizer.fp16_groups[0]
    optimizer.get_grad_norm_direct(given, group, *args)
    assert [g.shape for g in taken[0]] == [g.shape for g in given]


def test_gradients_go_to_where_zero_has_moved_its_own(monkeypatch):
    grads = two_shards()
    buffer = torch.zeros(13)
    shards, optimizer, _ = shards_of_a_device(
        monkeypatch, grads, grad_partitions_flat_buffer=buffer
    )
    held = shards.zeroed()
    for param, grad in grads.items():
        grads[param] = grad.clone()
    assert shards.zeroed() is held  # until the buffer says so
    optimizer.grad_partitions_flat_buffer.data = buffer.clone()
    monkeypatch.setattr(gradient_shards, "safe_get_local_grad", lambda p: grads[p])
    for _ in range(2):
        held = shards.zeroed()
        assert [g.data_ptr() for g in held] == [g.data_ptr() for g in grads.values()]
    shards.release()
    assert shards._grads_P == []


def test_deepspeeds_norms_are_those_of_the_first_gradients_and_parameters():
    from deepspeed.runtime.zero import stage3

    source = inspect.getsource(stage3)
    assert "def get_grad_norm_direct(self, gradients, params, norm_type=2):" in source
    assert "self.get_grad_norm_direct(self.averaged_gradients[i], self.fp16_groups[i])" in source
    assert "self.grad_partitions_flat_buffer: Tensor = torch.zeros(" in source
    assert "self._pre_step()\n        self._partition_all_parameters()" in source
    assert "for g, p in zip(gradients, params):" in source
