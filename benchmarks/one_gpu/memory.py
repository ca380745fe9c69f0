"""Peak memory of rank 0 of 8 and of 64 beside the formula of MaxLen, and its host time.

python -m benchmarks.one_gpu.memory WORLD [MODEL]
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, PretrainedConfig

from benchmarks.one_gpu import fake_world
from benchmarks.one_gpu.device import HAS_GPU
from benchmarks.one_gpu.telling import skip, tell, trying
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import load_model_config
from ds_hydra.engine.profiling import profiler
from ds_hydra.engine.profiling.profile_document import (
    ProbeMicroBatch,
    layer_params,
    nominal_profile,
)
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.profiles.profile import OPTIMIZER_BYTES, exchange_bytes

WIDE_VOCABULARY = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=65_536,
    tie_word_embeddings=False,
)
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=512,
)
STRATEGIES = {
    8: ("8x<1,1>", "1x<8,1>", "1x<sp8,1>", "1x<cp8,1>", "1x<1,8>", "2x<2,2>", "8x<1,1;ckpt=8>", "8x<1,1;gather>"),
    64: ("64x<1,1>", "8x<8,1>", "16x<2,2>", "8x<1,8>"),
}  # fmt: skip
TOKENS = 4096 if HAS_GPU else 256
LOW, HIGH = 0.95, 1.05
LARGE_BYTES = 100 << 30
"""Of a device; on a smaller one all layers leave no room for the steps beside this one."""
SHARDED = ("<8,1>", "<sp8,1>", "<cp8,1>")
"""Such a rank has an eighth of a micro-batch, which is longer for that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", type=int, choices=STRATEGIES)
    parser.add_argument("model", nargs="?", default="llama2_7b", help="a preset, or 128K")
    options = parser.parse_args()
    device = fake_world.enter(options.world)
    config = _find_config(options.model)
    name = f"{options.model if HAS_GPU else 'tiny'}, one of {options.world}"
    if HAS_GPU and torch.cuda.get_device_properties(device).total_memory < LARGE_BYTES:
        config.num_hidden_layers //= 2
        name += ", half of its layers"
    if not HAS_GPU:
        skip(f"{name}: peaks beside the formula", "a CPU's memory is that of the whole process")
    for text in STRATEGIES[options.world]:
        with trying(f"{name}, {text}"):
            measure(f"{name}, {text}", config, text, device)


def _find_config(name: str) -> PretrainedConfig:
    if not HAS_GPU:
        return TINY
    return WIDE_VOCABULARY if name == "128K" else load_model_config(name)


def measure(
    case: str, config: PretrainedConfig, text: str, device: torch.device, **options: bool
) -> None:
    strategy = Strategy.parse(text)
    propagator = fake_world.open_rank(config, strategy, device, **options)
    try:
        shards = 8 if str(strategy.schemes[0]) in SHARDED else 1
        _measure(case, propagator, strategy, TOKENS * shards)
    finally:
        propagator.close()


def _measure(case: str, propagator: Propagator, strategy: Strategy, tokens: int) -> None:
    profiler.measure_stage_ms(propagator, strategy, ProbeMicroBatch(tokens))
    formula, activation = expect_bytes(propagator, strategy, tokens)
    # Memory that the formula's micro-batches had, of another scheme, goes when the next one begins.
    profiler.measure_stage_ms(propagator, strategy, ProbeMicroBatch(tokens))
    if HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.process_time()
    stage_ms = profiler.measure_stage_ms(propagator, strategy, ProbeMicroBatch(tokens))
    host_ms = (time.process_time() - begin) * 1e3
    found = {"tokens": tokens, "stage_ms": stage_ms, "host_cpu_ms": host_ms}
    found |= {"formula_gb": formula / 1e9, "activation_bytes_per_layer_and_hidden": activation}
    if not HAS_GPU:
        tell(case, found)
        return
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    ratio = peak / formula
    found |= {"peak_gb": peak / 1e9, "over_formula": ratio, "reserved_over_peak": reserved / peak}
    is_well = LOW <= ratio <= HIGH and reserved <= HIGH * peak
    tell(
        case,
        found,
        wanted=f"over_formula {LOW} to {HIGH}, reserved at most {HIGH}",
        is_well=is_well,
    )


def expect_bytes(propagator: Propagator, strategy: Strategy, tokens: int) -> tuple[float, float]:
    """What a profile that is measured here says of this rank, without states of an optimizer and
    buffers of a push, which are not here; and activations of a token as it has them.
    """
    model, world, scheme = propagator.stage_model, propagator.num_ranks, strategy.schemes[0]
    config = HydraConfig.model_validate({"context_length": TOKENS, "tokens_per_iteration": TOKENS})
    measured = profiler._measure_memory(propagator, {scheme: strategy}, config)
    document = {**nominal_profile(model, [scheme]), **measured}
    table = model.hidden_size * model.vocab_size
    document["memory"] |= {
        "exchange_bytes": exchange_bytes(layer_params(model), table, 2.0) * scheme.gather
    }
    document["schemes"] = nominal_profile(model, [scheme])["schemes"]
    whole = Profile.from_json(document).memory.rank_bytes(scheme, world, tokens)
    (activation,) = document["memory"]["activation_bytes_per_token_per_layer_per_hidden"].values()
    return whole - OPTIMIZER_BYTES * sum(spec.numel for spec in model.specs) / world, activation


if __name__ == "__main__":
    main()
