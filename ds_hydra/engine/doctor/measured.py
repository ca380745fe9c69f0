"""One point of a profile, and the memory of its micro-batch, beside what would be expected."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from ds_hydra.engine.doctor.findings import Finding
from ds_hydra.engine.model.meta_model import build_random_stage_model
from ds_hydra.engine.profiling.memory_trace import trace_layer_memory
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profiler import measure_stage_ms, token_bytes
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.transfer.link_thread import DeviceClock
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.cost_models.analytic import Hardware, ModelShape, predict_latency

_MOST_SLOWER = 2.0
"""Measured over estimated time, above which something is wrong rather than estimated."""
_MOST_ABOVE = 1.3
"""Measured over estimated bytes of a token, above which plans would not fit."""
_MOST_BEHIND = 1.3
"""Slowest rank over the median one: all others wait for it in every iteration."""
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeModel:
    """Some layers of a model, random, and the micro-batch that is timed."""

    name: str
    config: LlamaConfig
    dtype: torch.dtype
    num_tokens: int

    @classmethod
    def of(cls, device: torch.device) -> ProbeModel:
        """Two layers of LLaMA 7B in bf16 for an accelerator, small ones in fp32 for a CPU."""
        if device.type == "cuda":
            config = LlamaConfig(num_hidden_layers=2)
            return cls(
                name="2 layers of LLaMA 7B, bf16",
                config=config,
                dtype=torch.bfloat16,
                num_tokens=4096,
            )
        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=512,
        )
        return cls(
            name="2 layers of width 256, fp32", config=config, dtype=torch.float32, num_tokens=512
        )


def check_speed_of_ranks(device: torch.device) -> Finding:
    """Which rank computes more slowly than the others. Collective over all ranks."""
    clock = DeviceClock(device)
    size = 4096 if device.type == "cuda" else 256
    matrix = torch.ones(size, size, device=device)
    times = []
    for _ in range(2 + 5 * _REPEATS):
        begin = clock.stamp()
        for _ in range(4):
            matrix @ matrix
        end = clock.stamp()
        clock.settle(end)
        times.append(clock.ms_between(begin, end))
    mine = torch.tensor([statistics.median(times[2:])], dtype=torch.float64, device=device)
    all_ms = gather_rows(mine).flatten().tolist()
    slowest = max(range(len(all_ms)), key=all_ms.__getitem__)
    ratio = all_ms[slowest] / statistics.median(all_ms)
    text = f"slowest is rank {slowest}, {ratio:.2f} x the median"
    figures = {"matmul_ms": all_ms}
    return Finding.judge(
        "speed of ranks",
        text,
        is_well=ratio <= _MOST_BEHIND,
        advice="look at clocks, temperature and other processes of that device; a second run tells noise from damage",
        figures=figures,
    )


def check_profile_point(device: torch.device, hardware: Hardware | None) -> list[Finding]:
    """Time and memory of a micro-batch under <1,1> on all ranks at once, beside estimates.
    Collective over all ranks.
    """
    probe = ProbeModel.of(device)
    stage_model = build_random_stage_model(
        probe.config, dtype=probe.dtype, device=device, num_ranks=dist.get_world_size()
    )
    scheme = Scheme(tp=1, pp=1)
    strategy = Strategy((scheme,) * dist.get_world_size())
    propagator = Propagator(stage_model, device=device, max_groups=4)
    try:
        micro_batch = ProbeMicroBatch(probe.num_tokens)
        times_ms = [
            measure_stage_ms(propagator, strategy, micro_batch) for _ in range(1 + _REPEATS)
        ]
        num_bytes = token_bytes(propagator, strategy, probe.num_tokens)
    finally:
        propagator.close()
    return [
        _judge_time(probe, statistics.median(times_ms[1:]), hardware),
        _judge_memory(probe, num_bytes),
    ]


def _judge_time(probe: ProbeModel, measured_ms: float, hardware: Hardware | None) -> Finding:
    config = probe.config
    layer_params = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    params = layer_params * config.num_hidden_layers + config.hidden_size * config.vocab_size
    rate = 6 * params * probe.num_tokens / (measured_ms / 1e3)
    text = (
        f"{probe.name}, {probe.num_tokens} tokens: {measured_ms:.1f} ms ({rate / 1e12:.3g} TFLOP/s)"
    )
    figures: dict[str, object] = {"measured_ms": measured_ms, "flops": rate}
    if hardware is None:
        return Finding.of_unknown_hardware("profile point", text, figures)
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
    )
    latency = predict_latency(shape, hardware, Scheme(tp=1, pp=1))
    expected_ms = latency.micro_batch_ms([probe.num_tokens])
    text += f", estimated {expected_ms:.1f} for {hardware.name}"
    figures |= {"estimated_ms": expected_ms, "hardware": hardware.name}
    return Finding.judge(
        "profile point",
        text,
        is_well=measured_ms <= _MOST_SLOWER * expected_ms,
        advice="measure a profile (ds-hydra profile) instead of planning with estimates for this hardware",
        figures=figures,
    )


def _judge_memory(probe: ProbeModel, measured: float) -> Finding:
    config = probe.config
    layer = trace_layer_memory(config, num_tokens=probe.num_tokens, dtype=probe.dtype)
    # Logits and their gradient, as in the memory model; hidden states around the last norm.
    head = (
        2 * config.vocab_size * probe.dtype.itemsize + 4 * config.hidden_size * probe.dtype.itemsize
    )
    expected = config.num_hidden_layers * config.hidden_size * layer.activation_bytes + head
    ratio = measured / expected
    text = f"a token takes {measured:,.0f} bytes, {ratio:.2f} x what the memory model counts"
    figures = {"measured_bytes": measured, "expected_bytes": expected}
    return Finding.judge(
        "memory",
        text,
        is_well=ratio <= _MOST_ABOVE,
        advice="measure a profile here (ds-hydra profile), or lower hydra.memory_limit_bytes by that share",
        figures=figures,
    )
