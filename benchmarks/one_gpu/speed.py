"""Speed of one rank: a model of a billion parameters and layers of 7B, eager and compiled, beside
plain transformers on the same rows and the bare products and attention of their layers.

`--iteration`: whole iterations of LLaMA 2 7B in place of all that.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from engines import start_hydra
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from benchmarks.one_gpu import ceilings
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join, median_ms
from benchmarks.one_gpu.telling import skip, tell, trying
from ds_hydra.engine.model.attention_choice import kernel_for
from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.attention_operator import attend, count_on_host
from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config
from ds_hydra.engine.profiling import profiler
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch, count_flops
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Strategy

ALONE = Strategy.parse("1x<1,1>")
PLAIN_ATTENTION = "one_gpu_packed"
if HAS_GPU:
    SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    VOCABULARIES, CONTEXT = (32_000, 128_256), 16_384
    ROWS = {
        "1 x 16384": (16_384,),
        "4 x 4096": (4096,) * 4,
        "1 x 8192 and 80 x 100": (8192, *(100,) * 80),
        "1 x 64": (64,),  # the host's time
    }
    LAYERS, LAYER_TOKENS, WHOLE_TOKENS = 8, 16_384, 4096
else:
    SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    VOCABULARIES, CONTEXT = (512, 2048), 256
    ROWS = {"1 x 256": (256,), "4 x 64": (64,) * 4, "1 x 128 and 8 x 16": (128, *(16,) * 8)}
    LAYERS, LAYER_TOKENS, WHOLE_TOKENS = 1, 64, 32


STATES_OF_7B_BYTES = 150 << 30
"""18 bytes a parameter (weights, gradients, fp32 weights, Adam states), layers' activations."""


def model_config(vocab_size: int) -> LlamaConfig:
    """A billion parameters, beside embedding and head."""
    return LlamaConfig(
        **SIZES, vocab_size=vocab_size, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip


def main() -> None:
    device = join()
    transformers.logging.set_verbosity_error()
    peak = ceilings.matmul_flops()
    tell("a large product, TFLOP/s", peak / 1e12, wanted="790 to 798 of an H100")
    if "--iteration" in sys.argv[1:]:
        measure_iteration_of_7b(device, peak)
        return
    tell("a copy, TB/s", ceilings.copy_bytes_per_s() / 1e12, wanted="3.0 of an H100")
    with trying("bare operations"):
        measure_floor()
    first, last = VOCABULARIES
    for vocabulary, way in ((first, ""), (first, "compiled"), (last, "")):
        _try_engine(vocabulary, way, device, peak)
        if not way:
            with trying(f"transformers, vocabulary {vocabulary:,}"):
                measure_plain(vocabulary, device, peak)
            _clean()
    for way in ("", "compiled", "8 bits"):
        name = _name(f"{LAYERS} layers of 7B", way)
        if way and not HAS_GPU:
            skip(name, _WHY_NOT[way])
            continue
        with trying(name):
            measure_layers(name, LAYERS, LAYER_TOKENS, way, device, peak)
        _clean()
    if HAS_GPU:
        with trying("LLaMA 2 7B"):
            measure_layers("LLaMA 2 7B", None, WHOLE_TOKENS, "", device, peak)
        _clean()
    else:
        skip("LLaMA 2 7B", "54 GB")
    _try_engine(first, "Liger", device, peak)  # last: it patches LLaMA for the whole process


def _try_engine(vocabulary: int, way: str, device: torch.device, peak: float) -> None:
    name = _name(f"1B, vocabulary {vocabulary:,}", way)
    if way and not HAS_GPU:
        skip(name, _WHY_NOT[way])
        return
    with trying(name):
        measure_engine(name, model_config(vocabulary), ROWS, way, device, peak)
    _clean()


def measure_iteration_of_7b(device: torch.device, peak: float) -> None:
    """Iterations of LLaMA 2 7B, optimizer's step included; of half of its layers where memory holds
    no more states.
    """
    config = load_model_config("llama2_7b") if HAS_GPU else model_config(VOCABULARIES[0])
    rows = {"4 x 4096": (4096,) * 4, "32 x 512": (512,) * 32} if HAS_GPU else {"4 x 64": (64,) * 4}
    name = "LLaMA 2 7B, iteration"
    if HAS_GPU and torch.cuda.get_device_properties(device).total_memory < STATES_OF_7B_BYTES:
        config.num_hidden_layers //= 2
        name += " of half of its layers"
    for way in ("compiled", ""):
        if way and not HAS_GPU:
            skip(_name(name, way), _WHY_NOT[way])
            continue
        with trying(_name(name, way)):
            measure_engine(_name(name, way), config, rows, way, device, peak)
        _clean()


_WHY_NOT = {
    "compiled": "a CPU compiles for a minute",
    "Liger": "its kernels are for GPUs",
    "8 bits": "a CPU has no such products",
}


def _name(what: str, way: str) -> str:
    return f"{what}, {way}" if way else what


def _clean() -> None:
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def _build(config: PretrainedConfig, device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE)


def _examples(lengths: Sequence[int], vocab_size: int) -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(1, vocab_size, (length,)) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def measure_engine(
    name: str,
    config: PretrainedConfig,
    rows: Mapping[str, Sequence[int]],
    way: str,
    device: torch.device,
    peak: float,
) -> None:
    """Whole iterations of the engine on each of the rows."""
    compiled, model = way.endswith("compiled"), _build(config, device)
    if way == "Liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    hydra = {
        "context_length": CONTEXT,
        "tokens_per_iteration": sum(rows[next(iter(rows))]),
        "compile_layers": compiled,
        "planner": {"solver": "none", "num_workers": 0},
    }
    engine = start_hydra(model, hydra=hydra, **SECTIONS)
    try:
        flops = count_flops(engine.propagator.stage_model)
        for row, lengths in rows.items():
            examples = _examples(lengths, config.vocab_size)
            found = []
            for _ in range(2):  # heads are met in the first one
                engine.train_batch(examples, strategy="1x<1,1>")
            for _ in range(4 if HAS_GPU else 1):
                begin = time.perf_counter()
                engine.train_batch(examples, strategy="1x<1,1>")
                found.append((engine.last_metrics, (time.perf_counter() - begin) * 1e3))
            metrics, ms = found[-1][0], statistics.median(time_ms for _, time_ms in found)
            passes_ms = statistics.median(m.measured_ms for m, _ in found)
            tell(
                f"{name}, {row}",
                {
                    "iteration_ms": ms, "passes_ms": passes_ms, "step_ms": metrics.step_ms,
                    "rest_ms": ms - passes_ms - metrics.step_ms,
                    "share_of_product_in_iteration": flops.of(lengths) / ms * 1e3 / peak,
                    "share_of_product_in_passes": flops.of(lengths) / passes_ms * 1e3 / peak,
                    "tokens_per_s": sum(lengths) / ms * 1e3,
                },
                wanted="rest below 40 ms; 0.40 to 0.48 eager, 0.50 to 0.60 compiled",
                is_well=ms - passes_ms - metrics.step_ms < 40 if HAS_GPU else None,
            )  # fmt: skip
    finally:
        engine.destroy()


def measure_plain(vocab_size: int, device: torch.device, peak: float) -> None:
    """Forward and backward of transformers on the same rows: scaled_dot_product_attention for the
    single row, a varlen kernel for the packed ones.
    """
    transformers.AttentionInterface.register(PLAIN_ATTENTION, _packed_attention)
    model = _build(model_config(vocab_size), device)
    stage_model = build_random_stage_model(
        model.config, dtype=DTYPE, device=torch.device("meta"), num_ranks=1
    )
    flops = count_flops(stage_model)
    for row, lengths in ROWS.items():
        kind = "sdpa" if len(lengths) == 1 else PLAIN_ATTENTION
        model.set_attn_implementation(kind)
        ids = torch.randint(1, vocab_size, (1, sum(lengths)), device=device)
        places = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        _Rows.lengths = lengths

        def run(ids: torch.Tensor = ids, places: torch.Tensor = places) -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, position_ids=places, labels=ids).loss.backward()

        with trying(f"transformers, vocabulary {vocab_size:,}, {row}"):
            ms = median_ms(run, repeats=3 if HAS_GPU else 1, warmup=1)
            found = {"passes_ms": ms, "share_of_product": flops.of(lengths) / ms * 1e3 / peak}
            tell(f"transformers, vocabulary {vocab_size:,}, {row}", found)


class _Rows:
    lengths: Sequence[int] = ()


def _packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> Any:
    """The kernel that ds_hydra calls too, without ds_hydra; each sequence alone on a CPU."""
    lengths, scale = _Rows.lengths, options.get("scaling")
    use = kernel_for(query.shape[-1], value.shape[-1], query.dtype, False)
    if use is None or not HAS_GPU:
        ends = [0, *itertools.accumulate(lengths)]
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, a:b], key[:, :, a:b], value[:, :, a:b],
                is_causal=True, scale=scale, enable_gqa=True,
            )
            for a, b in itertools.pairwise(ends)
        ]  # fmt: skip
        return torch.cat(parts, dim=2).transpose(1, 2), None
    ends_T = torch.tensor(
        [0, *itertools.accumulate(lengths)], dtype=torch.int32, device=query.device
    )
    heads = [t[0].transpose(0, 1) for t in (query, key, value)]
    boundaries = (ends_T, ends_T, count_on_host(lengths, lengths))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(use, heads, boundaries, Scoring(scale))[None], None


def measure_floor() -> None:
    """Products and attention alone: what no code around them could be faster than."""
    for vocabulary in VOCABULARIES:
        config = model_config(vocabulary)
        for row, lengths in ROWS.items():
            layer, head = ceilings.products_ms(config, sum(lengths))
            attention = ceilings.attention_ms(config, lengths)
            layers = config.num_hidden_layers
            found = {
                "passes_ms": layers * (layer + attention) + head,
                "products_ms": layers * layer, "attention_ms": layers * attention, "head_ms": head,
            }  # fmt: skip
            tell(f"bare operations, vocabulary {vocabulary:,}, {row}", found)


def measure_layers(
    name: str,
    num_layers: int | None,
    tokens: int,
    way: str,
    device: torch.device,
    peak: float,
) -> None:
    """Passes of layers of LLaMA 2 7B through the propagator, without states of an optimizer."""
    config = load_model_config("llama2_7b")
    if num_layers:
        config.num_hidden_layers = num_layers
    if not HAS_GPU:
        config.hidden_size, config.intermediate_size, config.head_dim = 64, 160, 2
    stage_model = build_random_stage_model(
        config, dtype=DTYPE, device=device, num_ranks=1,
        compile_layers=bool(way), float8="rowwise" if way == "8 bits" else None,
    )  # fmt: skip
    propagator = Propagator(stage_model, device=device)
    propagator.prepare([ALONE])
    try:
        flops = count_flops(stage_model)
        for micro_batch in (ProbeMicroBatch(tokens), ProbeMicroBatch(tokens // 8, 8)):
            times = [profiler.measure_stage_ms(propagator, ALONE, micro_batch) for _ in range(4)]
            ms = statistics.median(times[1:])
            lengths = (micro_batch.length,) * micro_batch.num_sequences
            found = {"passes_ms": ms, "share_of_product": flops.of(lengths) / ms * 1e3 / peak}
            tell(f"{name}, {micro_batch}", found)
    finally:
        propagator.close()


if __name__ == "__main__":
    main()
