"""Attention of packed short sequences: TFLOP/s of both passes, by each kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import LlamaConfig

from benchmarks.one_gpu import ceilings
from benchmarks.one_gpu.common import prepare_kernels
from benchmarks.one_gpu.device import DEVICE, DTYPE, HAS_GPU
from benchmarks.one_gpu.telling import tell, trying
from ds_hydra.engine.model import attention_choice
from ds_hydra.engine.model.attention_choice import kernels_here
from ds_hydra.engine.model.attention_contract import Demand, Kernel
from ds_hydra.engine.model.attention_operator import KernelUse

TOKENS = 16_384 if HAS_GPU else 128
LENGTHS = (512, 1024, 2048, 4096) if HAS_GPU else (16, 64)
RAGGED = (3968, 2176, 1408, 896, 640, 448, 320, 192) if HAS_GPU else (48, 24, 7)
"""A pack of unequal sequences, as the planner makes them."""


def main() -> None:
    for heads, key_heads, width in ((32, 8, 64), (32, 8, 128)):
        config = LlamaConfig(
            hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=key_heads
        )
        demand = Demand(width, width, DTYPE)
        packs = {f"{TOKENS // n} x {n}": (n,) * (TOKENS // n) for n in LENGTHS}
        packs[f"{len(RAGGED)} from {min(RAGGED)} to {max(RAGGED)}"] = RAGGED
        for name, lengths in packs.items():
            # Two products forward and five backward of the causal half, heads of all queries.
            flops = 7 * heads * width * sum(n * n for n in lengths)
            for kernel in [*kernels_here(demand, DEVICE)] if HAS_GPU else [None]:
                case = f"{heads} heads of {width} on {key_heads}, {name} tokens"
                case += f", {kernel.name}" if kernel else ""
                with trying(case), using(kernel, demand):
                    prepare_kernels(lengths)
                    ms = ceilings.attention_ms(config, lengths)
                    tell(case, {"ms": ms, "TFLOP/s": flops / ms / 1e9})


@contextmanager
def using(kernel: Kernel | None, demand: Demand) -> Iterator[None]:
    """Attention of `demand` by `kernel`, in place of the one that a model would choose."""
    if kernel is None:
        yield
        return
    attention_choice._in_use[tuple(demand)] = KernelUse.of(kernel, demand)
    try:
        yield
    finally:
        del attention_choice._in_use[tuple(demand)]


if __name__ == "__main__":
    main()
