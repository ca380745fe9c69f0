"""Checkpointed layers that keep what they need in the host's memory: what the device has meanwhile,
how long a context fits, and what is said where the host is too small.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from command_line import accepted
from test_check_command import report_on
from torch.utils.checkpoint import checkpoint

from ds_hydra.commands.init import start_config
from ds_hydra.engine.model.current_micro_batch import checkpointed
from ds_hydra.engine.parallel import recomputation
from ds_hydra.engine.parallel.offload import OffloadedLayer, _Kept
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.proposal.program import check_context
from ds_hydra.strategy.proposal.space import candidate_schemes

MILLION = 1 << 20


def test_the_notation():
    text = "<sp2,1;ckpt=3;offload;gather>"
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert Scheme.from_json(scheme.to_json()) == scheme != Scheme.parse("<sp2,1;ckpt=3;gather>")
    assert not replace(scheme, ckpt=0).offload
    with pytest.raises(HydraConfigError, match="offload is for checkpointed layers; say how many"):
        Scheme.parse("<1,1;offload>")


class Attention(torch.autograd.Function):
    """Calls `run_once`; its backward reads what the first pass has kept."""

    @staticmethod
    def forward(ctx, hidden):
        out, cosine = recomputation.run_once(lambda: (hidden.sin(), hidden.cos()), keeps=True)
        ctx.save_for_backward(out, cosine)
        return out

    @staticmethod
    def backward(ctx, grad):
        _, cosine = ctx.saved_tensors
        return grad * cosine


def run_layers(hidden, weight, kept_of=None):
    """A chain of three layers that keep their input and two outputs, on the host for `kept_of`."""

    def layer(hidden):
        return hidden + Attention.apply(hidden) * weight

    for _ in range(3):
        offloaded = None if kept_of is None else OffloadedLayer()
        contexts = functools.partial(recomputation.contexts, offloaded=offloaded)
        with contextlib.nullcontext() if offloaded is None else offloaded.keeping_input():
            hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        if offloaded is not None:
            kept_of.append(offloaded._kept)
    return hidden


def test_the_device_has_what_two_layers_keep_and_the_host_the_rest():
    inputs = [torch.randn(400, requires_grad=True) for _ in range(2)]
    run_layers(*inputs).square().sum().backward()
    wanted = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    kept_of, on_device, get = [], [], _Kept.get

    def counting(kept):
        on_device.append(sum(one.on_device is not None for own in kept_of for one in own))
        return get(kept)

    output = run_layers(*inputs, kept_of)
    has_left = [[kept.on_device is None for kept in own] for own in kept_of]
    assert has_left == [[True] * 3, [True] * 3, [False] * 3]
    with mock.patch.object(_Kept, "get", counting):
        output.square().sum().backward()
    assert len(on_device) == 9
    assert max(on_device) == 6
    assert torch.equal(inputs[0].grad, wanted[0])
    assert torch.equal(inputs[1].grad, wanted[1])


def test_what_is_offloaded_is_as_it_was():
    layer = OffloadedLayer()
    tensor = torch.randn(3, 500)
    wanted, kept = tensor.clone(), layer.put(tensor)
    OffloadedLayer()
    tensor.fill_(0.0)
    assert torch.equal(layer.get(kept), wanted)


def test_a_layer_offloads_where_it_is_asked_to_and_backward_comes():
    hidden = torch.randn(1000, requires_grad=True)
    output = checkpointed(torch.sin, hidden, offloads=True)
    layer = OffloadedLayer._latest()
    assert [kept.host.tolist() for kept in layer._kept] == [hidden.tolist()]
    with torch.no_grad():
        checkpointed(torch.sin, hidden, offloads=True)
    checkpointed(torch.sin, hidden)
    assert OffloadedLayer._latest() is layer
    output.sum().backward()
    assert torch.equal(hidden.grad, hidden.detach().cos())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Qwen3-8B on 8 H100, a million tokens, as `check` estimates it."""
    started, _ = start_config("qwen3_8b", "h100", 8, 32768, None)
    report = report_on(started, model="qwen3_8b", num_devices=8, device="h100")
    profile = report.known_profile
    return World.of(profile, try_cluster(profile, 8), 8, MILLION)


def schemes_of(world):
    found = candidate_schemes(world, "full", 4.0 * MILLION)
    return [s for s in found if world.max_len_tokens(s) >= MILLION]


def test_a_million_tokens_fit_where_layers_offload_and_there_alone(world):
    found = schemes_of(world)
    assert found
    assert all(scheme.offload for scheme in found)
    shorter = candidate_schemes(replace(world, context_length=131_072), "full", 524_288.0)
    assert not any(scheme.offload for scheme in shorter), "what fits without is left as it is"
    silent = replace(world.cluster, hardware=replace(world.cluster.hardware, host_rate=0.0))
    assert not any(s.offload for s in candidate_schemes(world.linked_by(silent), "full", 4e6))


def test_a_host_that_is_too_small_is_named(world):
    memory = replace(world.profile.memory, host_bytes=20e9)
    small = world.knowing(replace(world.profile, memory=memory))
    assert not schemes_of(small)
    text = r"layers of <\S+;ckpt=36;offload\S*> would keep 7\d\.\d GB of each device in the host's memory, "
    with pytest.raises(HydraConfigError, match=text + "which has 20 GB left for each"):
        check_context(small, is_full=True, tokens_per_iteration=4.0 * MILLION)
    scheme = Scheme.parse("<sp8,1;ckpt=36;offload;gather>")
    longest = small.max_len_tokens(scheme)
    assert longest * memory.offloaded_bytes(scheme) <= 20e9
    assert (longest + 1) * memory.offloaded_bytes(scheme) > 20e9


def test_a_slow_link_to_the_host_is_part_of_the_time(world):
    scheme = Scheme.parse("<sp8,1;ckpt=36;offload;gather>")
    on_device = replace(scheme, offload=False)

    def linear_ms(rate, of=scheme):
        hardware = replace(world.cluster.hardware, host_rate=rate)
        return Costs(world.profile, replace(world.cluster, hardware=hardware)).latency(of).linear_ms

    fast = linear_ms(world.cluster.hardware.host_rate)
    assert fast == pytest.approx(linear_ms(1.0, of=on_device)), "hidden beside passes"
    kept = 36 * world.profile.memory.checkpointed_bytes(scheme)
    assert linear_ms(1e8) == pytest.approx(2 * 1e3 * kept / 1e8)
    assert world.costs.latency(scheme).quadratic_ms < world.costs.latency(on_device).quadratic_ms


@pytest.mark.slow
def test_init_says_how_a_million_tokens_fit(tmp_path):
    arguments = ("--model", "qwen3_8b", "--hardware", "h100", "--devices", 8)
    out = tmp_path / "ds_config.json"
    said = accepted("init", *arguments, "--context", MILLION, "--out", out).stderr
    assert "keep their input, and what attention returns, in the host's memory: " in said
    checked = accepted("check", out, *arguments).stdout
    assert "in the host's memory: " in checked
    assert checked.rstrip().endswith("no problem found")


def test_an_optimizer_on_the_host_leaves_its_memory_to_micro_batches():
    started, _ = start_config("qwen3_8b", "h100", 8, 32768, None)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    sizes = {"model": "qwen3_8b", "num_devices": 8, "device": "h100"}
    reports = [
        report_on(config, **sizes) for config in (started, {**started, "zero_optimization": zero})
    ]
    on_device, on_host = ({row["scheme"]: row for row in r.schemes} for r in reports)
    # fp32 masters and two moments of all parameters, cut over 8
    saved = 12 * reports[0].parameters["total"] / 8
    for scheme in ("<1,1>", "<8,1>"):
        difference = on_device[scheme]["states_bytes"] - on_host[scheme]["states_bytes"]
        assert difference == pytest.approx(saved, rel=0.02)
        assert on_host[scheme]["max_len_tokens"] > on_device[scheme]["max_len_tokens"]
