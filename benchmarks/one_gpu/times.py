"""T(l) as `ds-hydra profile` measures it on this device against the estimate of shipped hardware,
and what efficiencies of the hardware file follow.
"""

from __future__ import annotations

import json
import statistics
from tempfile import mkdtemp

import torch
from transformers import LlamaConfig

from benchmarks.one_gpu import ceilings
from benchmarks.one_gpu.device import HAS_GPU, join
from benchmarks.one_gpu.telling import tell, trying
from ds_hydra.configs.files import find_file, read_json_object
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import load_model_config
from ds_hydra.engine.profiling.profile_run import ProfileRequest, run_profile
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_latency
from ds_hydra.strategy.cost_models.cluster import model_shape

HARDWARE = "h100" if HAS_GPU else "cpu"
CONTEXT = 16_384 if HAS_GPU else 64
NUM_LAYERS = 4
"""Layers of LLaMA 7B whose times are measured: with all of them it does not fit."""
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def main() -> None:
    device = join()
    with trying("efficiencies of the hardware file"):
        measure_efficiencies()
    with trying("times of a profile"):
        measure_times(device)


def measure_times(device: torch.device) -> None:
    """Every scheme and length: measured over estimated."""
    config = load_model_config("llama2_7b").to_dict() | {"num_hidden_layers": NUM_LAYERS}
    model = f"{mkdtemp()}/config.json"
    with open(model, "w") as file:
        json.dump(config if HAS_GPU else TINY, file)
    hydra = HydraConfig.model_validate(
        {
            "context_length": CONTEXT,
            "tokens_per_iteration": 8 * CONTEXT,
            "profiling": {"repeats": 3 if HAS_GPU else 1},
        }
    )
    request = ProfileRequest(model=model, config=hydra)
    document = run_profile(request, device)
    profile, hardware = Profile.from_json(document), Hardware.load(HARDWARE)
    shape = model_shape(profile)
    errors, overheads = [], []
    for entry in document["schemes"]:
        scheme = Scheme.from_json(entry)
        estimate = predict_latency(shape, hardware, scheme)
        measured = dict(
            zip(entry["measured"]["lengths"], entry["measured"]["times_ms"], strict=True)
        )
        found = {}
        for length, ms in measured.items():
            found[f"{length}"] = f"{ms:.1f} / {estimate.sequence_ms(length):.1f} ms"
            errors.append(ms / estimate.sequence_ms(length) - 1)
        overheads.append(entry["constant_ms"] / (shape.num_layers / scheme.pp))
        tell(f"T(l) under {scheme}, measured / estimated for {hardware.name}", found)
    found_all = {"median": statistics.median(errors), "least": min(errors), "most": max(errors)}
    tell(f"measured over estimated, minus 1, {len(errors)} times", found_all, wanted="within 0.3",
         is_well=max(map(abs, errors)) <= 0.3 if HAS_GPU else None)  # fmt: skip
    tell("layer_overhead_ms by the constant terms", statistics.median(overheads))


def measure_efficiencies() -> None:
    """What the hardware file says, as shares of what the vendor states."""
    document = read_json_object(find_file("hardware", HARDWARE))
    peak, rate = document["peak_flops"], document["memory_bytes_per_s"]
    config = load_model_config("llama2_7b") if HAS_GPU else LlamaConfig(**TINY)
    tokens = CONTEXT
    layer_ms, _ = ceilings.products_ms(config, tokens)
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = 2 * hidden * config.num_key_value_heads // config.num_attention_heads
    params = hidden * (2 * hidden + keys + 3 * inner)
    attention_ms = ceilings.attention_ms(config, (tokens,))
    found = {
        "matmul": 6 * params * tokens / layer_ms * 1e3 / peak,
        # As the estimate counts: two products forward, five backward, over half of the square
        "attention": 7 * hidden * tokens**2 / attention_ms * 1e3 / peak,
        "memory": ceilings.copy_bytes_per_s() / rate,
    }
    shipped = ", ".join(f"{name} {document['efficiency'][name]}" for name in found)
    tell("efficiencies of bare operations", found, wanted=f"{HARDWARE}.json says {shipped}")


if __name__ == "__main__":
    main()
