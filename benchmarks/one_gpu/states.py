"""What an engine leaves and takes up: optimizers on the host, fp16, a checkpoint, the memory after
its end.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import LENGTHS

from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join
from benchmarks.one_gpu.parity import train_alone
from benchmarks.one_gpu.telling import at_most, skip, tell, trying

STRATEGIES = ("2x<1,1>", "1x<2,1>", "1x<1,2>")
ON_HOST = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "offload_optimizer": {"device": "cpu", "pin_memory": HAS_GPU},
}


def main() -> None:
    device = join()
    torch.backends.cuda.matmul.allow_tf32 = False
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)

    def start(dtype: torch.dtype, hydra: dict[str, Any] | None = None, **sections: Any) -> Any:
        return start_hydra(tiny("llama").to(device, dtype), hydra=hydra, **sections)

    def train(engine: Any) -> list[float]:
        return [float(engine.train_batch(examples, strategy=s)) for s in STRATEGIES]

    wanted = train_alone(tiny("llama"), examples, len(STRATEGIES))
    for name, limit, dtype, sections in (
        ("fp32", 1e-4, torch.float32, {}),
        ("fp32, optimizer on the host", 1e-4, torch.float32, {"zero_optimization": ON_HOST}),
        ("bf16, optimizer on the host", 2e-2, DTYPE, SECTIONS | {"zero_optimization": ON_HOST}),
        ("fp16", 2e-2, torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ):
        if dtype is torch.float16 and not HAS_GPU:
            skip(f"losses of three iterations, {name}", "DeepSpeed has no fp16 on a CPU")
            continue
        with trying(f"losses of three iterations, {name}"):
            engine = start(dtype, **sections)
            losses = train(engine)
            engine.destroy()
            error = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
            at_most(f"losses of three iterations, {name}", error, limit)
    with trying("checkpoint"), tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        first = start(DTYPE, {"deterministic": True}, **SECTIONS)
        train(first)
        first.save_checkpoint(folder[0])
        losses = train(first)
        first.destroy()
        second = start(DTYPE, {"deterministic": True}, **SECTIONS)
        second.load_checkpoint(folder[0])
        is_same = train(second) == losses
        second.destroy()
        found = "the same" if is_same else "others"
        tell("losses after a checkpoint", found, wanted="the same", is_well=is_same)
        dist.barrier()
    if HAS_GPU:
        with trying("memory"):
            look_at_memory(start, train)
    else:
        skip("memory after each engine", "a CPU does not tell")
    dist.barrier()


def look_at_memory(start: Any, train: Any) -> None:
    """MB that torch holds after each of four engines, one after another."""
    seen = []
    for _ in range(4):
        engine = start(DTYPE, **SECTIONS)
        train(engine)
        engine.destroy()
        del engine
        gc.collect()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated() / 1e6)
    found = ", ".join(f"{mb:.1f}" for mb in seen)
    wanted = "the same from the second on"
    tell("MB after each engine", found, wanted=wanted, is_well=seen[-1] <= seen[1] + 1)


if __name__ == "__main__":
    main()
