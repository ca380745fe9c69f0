"""Parts of an iteration by themselves: the loss, attention, the optimizer's step, norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig

from benchmarks.one_gpu import ceilings
from benchmarks.one_gpu.device import DEVICE, DTYPE, HAS_GPU, median_ms, peak_gb
from benchmarks.one_gpu.telling import skip, tell, trying
from ds_hydra.engine.losses.loss import PLAIN, HeadLoss
from ds_hydra.engine.model.attention_choice import kernels_here
from ds_hydra.engine.model.attention_contract import Demand, Scoring
from ds_hydra.engine.model.attention_operator import KernelUse, attend, attention_per_sequence
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch
from ds_hydra.engine.parallel.logit_transform import LogitTransform
from ds_hydra.engine.parallel.logits import Vocabulary
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel

TOKENS, VOCABULARIES, WIDTH = (16_384, (32_000, 128_256), 4096) if HAS_GPU else (64, (512,), 32)
HEADS = LlamaConfig(
    hidden_size=4096 if HAS_GPU else 32, num_attention_heads=32 if HAS_GPU else 4,
    num_key_value_heads=32 if HAS_GPU else 4,
)  # fmt: skip
PACKS = (
    {"1 x 4096": (4096,), "1 x 16384": (16_384,), "1 x 32768": (32_768,), "1 x 8192 and 80 x 100": (8192, *(100,) * 80)}
    if HAS_GPU
    else {"1 x 64": (64,), "1 x 32 and 4 x 8": (32, *(8,) * 4)}
)  # fmt: skip
NUM_PARAMS, NUM_TENSORS = (1 << 30, 200) if HAS_GPU else (1 << 16, 20)


def main() -> None:
    for vocabulary in VOCABULARIES:
        with trying(f"loss, vocabulary {vocabulary:,}"):
            measure_loss(vocabulary)
    for name, lengths in PACKS.items():
        measure_attention(name, lengths)
    measure_optimizers()
    with trying("norms"):
        tensors = [
            torch.randn(NUM_PARAMS // NUM_TENSORS, device=DEVICE) for _ in range(NUM_TENSORS)
        ]
        apart = median_ms(lambda: torch.stack([t.norm() for t in tensors]))
        together = median_ms(lambda: torch.stack(torch._foreach_norm(tensors)))
        tell(f"norms of {NUM_TENSORS} tensors, ms", {"one by one": apart, "together": together})


def measure_loss(vocabulary: int) -> None:
    """The loss and its gradient beside the three products of the head."""
    hidden = torch.randn(1, TOKENS, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    head = torch.nn.Linear(WIDTH, vocabulary, bias=False, device=DEVICE, dtype=DTYPE)
    head_loss = HeadLoss(
        vocabulary=Vocabulary(TensorParallel(), vocabulary, LogitTransform()),
        targets_T=torch.randint(0, vocabulary, (TOKENS,), device=DEVICE),
        fields={},
        loss=PLAIN,
        evaluate=lambda tokens: PLAIN(tokens) / TOKENS,
    )

    def run() -> None:
        loss = head_loss.of_hidden(hidden, head)
        torch.autograd.grad(loss, (hidden, head.weight))

    products = ceilings._three_products_ms(TOKENS, WIDTH, vocabulary)
    logits = TOKENS * vocabulary * DTYPE.itemsize / 1e9
    ms = median_ms(run, repeats=3, warmup=1)
    found = {"head_and_loss_ms": ms, "products_of_head_ms": products, "loss_ms": ms - products}
    if HAS_GPU:
        found |= {"peak_over_logits": peak_gb(run) / logits}
    tell(f"loss of {TOKENS:,} tokens, vocabulary {vocabulary:,}", found)


def measure_attention(name: str, lengths: tuple[int, ...]) -> None:
    """Forward and backward of one layer's attention, TFLOP/s of causal pairs by each way."""
    flops = 12 * HEADS.hidden_size * sum(length**2 / 2 for length in lengths)
    inputs = ceilings.attention_inputs(HEADS, sum(lengths))
    scoring = Scoring(inputs[0].shape[-1] ** -0.5)

    def apart() -> Tensor:
        return attention_per_sequence(*inputs, scoring, lengths)

    ways: dict[str, Callable[[], float]] = {
        "as a stage calls it": functools.partial(ceilings.attention_ms, HEADS, lengths),
        "each sequence": functools.partial(ceilings.forward_backward_ms, apart, inputs),
    }
    width = inputs[0].shape[-1]
    demand = Demand(width, inputs[2].shape[-1], inputs[0].dtype)
    boundaries = PackedMicroBatch.build(lengths, inputs[0].device).boundaries
    heads = [t[0].transpose(0, 1) for t in inputs]
    for kernel in kernels_here(demand, inputs[0].device):
        run = functools.partial(attend, KernelUse.of(kernel, demand), heads, boundaries, scoring)
        ways[kernel.name] = functools.partial(ceilings.forward_backward_ms, run, inputs)
    if len(lengths) == 1:
        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if HAS_GPU else ()
        for backend in backends:
            run = functools.partial(_sdpa, inputs, backend)
            ways[backend.name] = functools.partial(ceilings.forward_backward_ms, run, inputs)
    found: dict[str, Any] = {}
    for way, measure in ways.items():
        with trying(f"attention, {name}, {way}"):
            ms = measure()
            found |= {f"{way}, ms": ms, f"{way}, TFLOP/s": flops / ms / 1e9}
    tell(f"attention, {name}", found)


def _sdpa(inputs: list[Tensor], backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)


def measure_optimizers() -> None:
    """A step of Adam over a flat shard in fp32, as ZeRO-3 has it."""
    for name, make in _optimizers().items():
        with trying(f"step of {name}"):
            parameter = torch.nn.Parameter(torch.randn(NUM_PARAMS, device=DEVICE))
            parameter.grad = torch.randn_like(parameter)
            optimizer = make([parameter])
            optimizer.step()  # allocates moments
            found = {"ms": median_ms(optimizer.step), "peak_gb": peak_gb(optimizer.step)}
            tell(f"step of {name}, {NUM_PARAMS:,} parameters", found)
            del optimizer, parameter
    if not HAS_GPU:
        skip("step of DeepSpeed's FusedAdam", "it is a CUDA kernel")


def _optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    adam = torch.optim.AdamW
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch's fused AdamW": functools.partial(adam, lr=1e-4, fused=True),
        "torch's foreach AdamW": functools.partial(adam, lr=1e-4, foreach=True),
    }
    if HAS_GPU:

        def fused(parameters: Any) -> torch.optim.Optimizer:
            from deepspeed.ops.adam import FusedAdam

            return FusedAdam(parameters, lr=1e-4)

        found["DeepSpeed's FusedAdam"] = fused
    return found


if __name__ == "__main__":
    main()
