"""Which launches wait until the device has nothing to do, and what follows from it: cuDNN's first
call of a shape, as torch makes it and as a stage does, pieces of sequences by both of its kernels,
and products at lengths that are new.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.one_gpu.device import DTYPE, HAS_GPU, median_ms
from benchmarks.one_gpu.telling import at_most, skip, tell, trying
from ds_hydra.engine.model.attention_contract import Demand, LongSegment, Scoring
from ds_hydra.engine.model.attention_kernels import load_kernel
from ds_hydra.engine.model.attention_operator import KernelUse, attend, count_on_host

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
CYCLES_PER_S = 1.7e9
WEIGHTS = ((4096, 4096), (4096, 11008), (11008, 4096), (4096, 32000))
"""Features in and out of a layer of LLaMA 7B, and of its head."""
PIECES = ((8192, 16_384), (16_384, 32_768), (4096, 32_768), (32_768, 65_536), (16_384, 131_072))
"""Queries, the last of keys, as ranks of context parallelism have them."""


def main() -> None:
    if not HAS_GPU:
        skip("first uses of kernels", "a CPU loads none")
        return
    torch.ones(8, device="cuda").sum().item()
    with trying("torch's call of cuDNN"):
        call_cudnn()
    with trying("plans before an iteration"):
        plan_between()
    with trying("pieces"):
        time_pieces()
    with trying("products"):
        multiply()


def occupy(seconds: float) -> None:
    """Keep another stream busy."""
    torch.cuda.synchronize()
    with torch.cuda.stream(_side()):
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def _side() -> torch.cuda.Stream:
    if not _sides:
        _sides.append(torch.cuda.Stream())
    return _sides[0]


_sides: list[torch.cuda.Stream] = []


def host_ms(run: Callable[[], object]) -> float:
    """Milliseconds until `run` returns, whatever the device does then."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def call_cudnn() -> None:
    """Milliseconds of the host for both passes, with new shapes, beside a kernel of a second."""
    cases = (4096, ""), (4352, ""), (4608, "backward"), (4864, "forward"), (65_536, "")
    for length, busy in cases:
        words = f"device busy for 1 s before {busy}" if busy else "device idle"
        tell(f"new shape of {length} tokens, {words}", _host_of_both(length, busy))


def _host_of_both(length: int, busy: str) -> dict[str, float]:
    heads = [torch.randn(1, length, HEADS, WIDTH, device="cuda", dtype=DTYPE) for _ in range(3)]
    heads = [t.transpose(1, 2).requires_grad_() for t in heads]
    found, outputs = {}, list[Tensor]()

    def forward() -> None:
        outputs.append(scaled_dot_product_attention(*heads, is_causal=True))

    def backward() -> None:
        torch.autograd.grad(outputs[0].sum(), heads)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for run in (forward, backward):
            torch.cuda.synchronize()
            if busy == run.__name__:
                occupy(1.0)
            found[f"{run.__name__}_ms"] = host_ms(run)
    torch.cuda.synchronize()
    return found


class Attention:
    """Attention of a kernel over the last `queries` of `keys`, and gradients."""

    def __init__(self, kernel: str, queries: int, keys: int):
        self._use = KernelUse.of(load_kernel(kernel), Demand(WIDTH, WIDTH, DTYPE))
        shapes = ((queries, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS))
        self.heads = [
            torch.randn(*shape, WIDTH, device="cuda", dtype=DTYPE).requires_grad_()
            for shape in shapes
        ]
        ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
        self._boundaries = (*ends, count_on_host([queries], [keys]))
        self._grad = torch.randn(queries, HEADS, WIDTH, device="cuda", dtype=DTYPE)

    def forward(self) -> Tensor:
        return attend(self._use, self.heads, self._boundaries, Scoring(WIDTH**-0.5))

    def both(self) -> Sequence[Tensor]:
        out = self.forward()
        return out, *torch.autograd.grad(out, self.heads, self._grad)


def plan_between() -> None:
    """That no pass of a stage waits for the device, and cuDNN runs after the plans."""
    for queries, keys in ((5000, 5000), (3000, 9000)):
        attention, name = Attention("cudnn", queries, keys), f"last {queries} of {keys} tokens"
        segments = LongSegment.of([queries], [keys])
        results = []
        for words in ("no plan", "planned"):
            occupy(1.0)
            ms = host_ms(lambda: results.append(attention.both()))  # noqa: B023
            at_most(f"{name}, {words}: both passes beside a kernel of 1 s, ms", ms, 100.0)
            torch.cuda.synchronize()
            if words == "no plan":
                planning = host_ms(lambda: load_kernel("cudnn").prepare(segments, math.inf))  # noqa: B023
                tell(f"{name}: plans, ms", planning)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
        at_most(f"{name}: cuDNN against varlen", max(errors), 2e-2)


def time_pieces() -> None:
    for queries, keys in PIECES:
        for kernel in ("varlen", "cudnn"):
            attention = Attention(kernel, queries, keys)
            attention.both()
            load_kernel(kernel).prepare(LongSegment.of([queries], [keys]), math.inf)
            ms = median_ms(attention.both, repeats=3, warmup=1)
            pairs = queries * (keys - queries / 2)
            rate = 14 * pairs * HEADS * WIDTH / ms / 1e9
            tell(f"{kernel}, last {queries} of {keys}", {"ms": ms, "TFLOP/s": rate})


def multiply() -> None:
    """How many products of a layer wait, at random lengths, after some lengths."""
    lengths = [int(2 ** random.Random(n).uniform(4, 15)) for n in range(60)]
    for _, run in _products(4096):
        run()
    for words in ("after one length", "after these lengths"):
        waited, total = Counter[str](), 0
        for length in lengths:
            for name, run in _products(length):
                occupy(0.012)
                waited[name] += host_ms(run) > 6
                total += 1
        found = ", ".join(f"{count} {name}" for name, count in waited.items())
        tell(
            f"of {total} products at {len(lengths)} lengths wait for an idle device, {words}", found
        )


def _products(length: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for wide, high in WEIGHTS:
        weight = torch.randn(high, wide, device="cuda", dtype=DTYPE)
        rows = torch.randn(length, wide, device="cuda", dtype=DTYPE)
        grads = torch.randn(length, high, device="cuda", dtype=DTYPE)
        yield "forward", lambda w=weight, x=rows: x @ w.t()
        yield "of inputs", lambda w=weight, g=grads: g @ w
        yield "of weights", lambda x=rows, g=grads: g.t() @ x


if __name__ == "__main__":
    main()
