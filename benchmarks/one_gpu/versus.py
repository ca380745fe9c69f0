"""ds_hydra beside what a user has today, the same rows, optimizer step included, on one rank.

    python -m benchmarks.one_gpu.versus [--kinds
        hydra,hydra_compiled,plain,plain_compiled,liger,liger_compiled,fsdp2,fsdp2_compiled]
        [--rows 4096x4 --rows 8192+100x80 --rows 16384 --rows 64]

plain: transformers in bf16, fp32 masters by `torch.optim.AdamW(fused=True)` on fp32 copies, clip by
norm; packed rows by varlen, what a user's flash-attn 2 is (single rows by sdpa: cuDNN's there);
ds_hydra has cuDNN's for 4,096 tokens and more. compiled: `torch.compile` of each decoder layer.
liger: its patched LLaMA with fused linear cross entropy. fsdp2: `fully_shard` of each layer and of
the model on a mesh of one, bf16 parameters and fp32 reduction (MixedPrecisionPolicy), fused AdamW,
`clip_grad_norm_`; one pass. Each kind is a process of its own (Liger patches a class for the whole
process): `--kinds` starts them one by one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.one_gpu.common import engine_of, llama, prepare_kernels, rows_of, say
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join

SIZES = (
    {
        "hidden": 2048,
        "inner": 8192,
        "heads": 32,
        "kv": 8,
        "layers": 16,
        "vocab": 32_000,
        "context": 16_384,
    }
    if HAS_GPU
    else {
        "hidden": 64,
        "inner": 160,
        "heads": 4,
        "kv": 2,
        "layers": 2,
        "vocab": 512,
        "context": 256,
    }
)
ROWS = ["16384", "4096x4", "8192+100x80", "512x32", "64"] if HAS_GPU else ["64", "32x4"]
REPEATS = 5 if HAS_GPU else 1


def lengths_of(text: str) -> list[int]:
    parts = [part.partition("x") for part in text.split("+")]
    return [int(length) for length, _, count in parts for _ in range(int(count or 1))]


def timed(run) -> tuple[float, float]:
    """Median ms of an iteration, and peak GB."""
    for _ in range(3):
        run()
    _sync()
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        _sync()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), torch.cuda.max_memory_allocated() / 1e9 if HAS_GPU else 0.0


def _sync() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def hydra(kind: str, rows: list[str]) -> None:
    device = join()
    model = llama(device, DTYPE, **SIZES)
    if "liger" in kind:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    context = SIZES["context"]
    engine = engine_of(
        model,
        lr=1e-4,
        context=context,
        tokens=context,
        hydra={"compile_layers": kind.endswith("compiled")},
        **SECTIONS,
    )
    for text in rows:
        examples = rows_of(lengths_of(text), SIZES["vocab"], 1)

        def run(examples=examples) -> None:
            engine.train_batch(examples, strategy="1x<1,1>")

        run()
        prepare_kernels(lengths_of(text))
        ms, peak = timed(run)
        m = engine.last_metrics
        say(
            f"{kind}, {text}",
            iteration_ms=ms,
            peak_gb=peak,
            passes_ms=m.measured_ms,
            step_ms=m.step_ms,
            tokens_per_s=sum(lengths_of(text)) / ms * 1e3,
        )
    engine.destroy()


class _Now:
    lengths: tuple[int, ...] = ()


@torch.compiler.disable
def packed_attention(module, query, key, value, attention_mask, **options):
    from benchmarks.one_gpu import speed

    speed._Rows.lengths = _Now.lengths
    return speed._packed_attention(module, query, key, value, attention_mask, **options)


def other(kind: str, rows: list[str]) -> None:
    import transformers

    device = join()
    if kind.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    transformers.AttentionInterface.register("packed", packed_attention)
    is_fsdp = kind.startswith("fsdp2")
    model = llama(device, torch.float32 if is_fsdp else DTYPE, **SIZES)
    if kind.endswith("compiled"):
        for layer in model.model.layers:
            layer.compile()
    if is_fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        masters = list(model.parameters())
    else:
        params = list(model.parameters())
        masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, fused=True)

    for text in rows:
        lengths = lengths_of(text)
        model.set_attn_implementation("packed" if len(lengths) > 1 else "sdpa")
        rows_T = rows_of(lengths, SIZES["vocab"], 1)
        ids = torch.cat([r["input_ids"] for r in rows_T]).to(device)[None]
        labels = torch.cat([torch.cat([torch.tensor([-100]), r["labels"][1:]]) for r in rows_T]).to(
            device
        )[None]
        places = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        _Now.lengths = tuple(lengths)

        def run(ids=ids, labels=labels, places=places) -> None:
            model(input_ids=ids, position_ids=places, labels=labels).loss.backward()
            if is_fsdp:
                torch.nn.utils.clip_grad_norm_(masters, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return
            for master, p in zip(masters, params, strict=True):
                master.grad = p.grad.float()
                p.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
            for master in masters:
                master.grad = None

        ms, peak = timed(run)
        say(f"{kind}, {text}", iteration_ms=ms, peak_gb=peak, tokens_per_s=sum(lengths) / ms * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--kinds",
        default="hydra_compiled,fsdp2_compiled,hydra,fsdp2,liger_compiled,liger,plain_compiled,hydra_liger",
    )
    parser.add_argument("--rows", action="append", default=[])
    parser.add_argument("--limit", type=float, default=100)
    options = parser.parse_args()
    kinds, rows = options.kinds.split(","), options.rows or ROWS
    if len(kinds) > 1:
        for kind in kinds:
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--kinds",
                kind,
                *itertools.chain(*(("--rows", r) for r in rows)),
            ]
            try:
                code = subprocess.run(
                    command, timeout=options.limit, env=os.environ, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = "no end"
            if code:
                say(kind, failed=str(code))
        return
    (hydra if kinds[0].startswith("hydra") else other)(kinds[0], rows)


if __name__ == "__main__":
    main()
