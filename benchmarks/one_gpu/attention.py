"""Attention as a stage calls it, both passes, against fp64; and whether its bits repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.one_gpu.device import DEVICE, HAS_GPU
from benchmarks.one_gpu.telling import at_most, tell, trying
from ds_hydra.engine.model import attention_choice
from ds_hydra.engine.model.attention import _attend
from ds_hydra.engine.model.attention_choice import (
    choose,
    kernel_error,
    kernels_here,
    prepare_kernels,
)
from ds_hydra.engine.model.attention_contract import Demand, LongSegment, Scoring
from ds_hydra.engine.model.attention_operator import KernelUse, attention_per_sequence
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, Segment
from ds_hydra.engine.ranks.process import use_deterministic_kernels

LENGTHS = (513, 64, 1, 1000, 7) if HAS_GPU else (33, 8, 1, 60, 7)
LONG = (513, 4096, 7, 5000) if HAS_GPU else (33, 64, 7)
"""With sequences that the kernel "cudnn" runs apart."""
WINDOW = 100 if HAS_GPU else 20
TOLERANCE = 2e-2
"""Of bf16: its mantissa has 8 bits."""


@dataclass(frozen=True)
class Case:
    """Heads of queries and of keys and values, widths of queries and of values."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int | None = None
    halves: bool = False
    lengths: tuple[int, ...] = LENGTHS

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(sequence, begin, end): whole ones, or second halves, as a row of context parallelism has
        them.
        """
        return tuple(
            (n, length // 2 * self.halves, length) for n, length in enumerate(self.lengths)
        )

    def __str__(self) -> str:
        widths = "/".join(map(str, dict.fromkeys((self.width, self.value_width))))
        more = f", window {self.window}" if self.window else ""
        more += ", second halves of sequences" if self.halves else ""
        more += f", to {max(self.lengths)} tokens" if self.lengths is LONG else ""
        return f"{self.heads} heads of {widths} on {self.key_heads}{more}"


_PLAIN = [Case(8, k, w, w) for k, w in ((8, 64), (2, 128), (1, 256))]
CASES = (
    *_PLAIN,
    Case(8, 2, 128, 128, window=WINDOW),
    Case(8, 2, 128, 128, halves=True),
    Case(8, 2, 128, 128, window=WINDOW, halves=True),
    Case(8, 8, 192, 128),  # latent attention
    Case(4, 1, 512, 512),
    Case(6, 3, 72, 72),
    Case(8, 2, 128, 128, lengths=LONG),
    Case(4, 4, 64, 64, lengths=LONG),
    Case(6, 3, 72, 72, lengths=LONG),
    Case(8, 2, 128, 128, lengths=LONG, halves=True),
)


def main() -> None:
    for case in CASES:
        with trying(str(case)):
            at_most(f"{case}, bf16", error_of(case, torch.bfloat16), TOLERANCE)
    demand = Demand(128, 128, torch.bfloat16)
    tell("kernel, and why none before it", choose(demand, DEVICE if HAS_GPU else None).describe())
    for kernel in kernels_here(demand, DEVICE):
        with trying(kernel.name):
            at_most(f"{kernel.name}, bf16", kernel_error(kernel, DEVICE, demand), TOLERANCE)
    with trying("fp32"):
        torch.backends.cuda.matmul.allow_tf32 = False
        at_most(f"{_PLAIN[1]}, fp32", error_of(_PLAIN[1], torch.float32), 1e-4)
    for name in ("as it is", "hydra.deterministic"):
        if name != "as it is":
            use_deterministic_kernels(DEVICE)
        with trying(f"bits of five backward passes, {name}"):
            found = count_results(_PLAIN[1])
            wanted, is_well = ("1", found == 1) if name != "as it is" else ("", None)
            tell(
                f"different gradients of five equal passes, {name}",
                found,
                wanted=wanted,
                is_well=is_well,
            )


def error_of(case: Case, dtype: torch.dtype) -> float:
    """Largest relative error of output and gradients."""
    exact, inputs = _inputs(case, torch.float64), _inputs(case, dtype)
    if HAS_GPU:
        demand = Demand(case.width, case.value_width, dtype)
        attention_choice._in_use[tuple(demand)] = None
        if kernel := choose(demand, DEVICE).kernel:
            attention_choice._in_use[tuple(demand)] = KernelUse.of(kernel, demand)
    lengths, keys = _lengths(case)
    wanted = attention_per_sequence(*exact, _scoring(case), lengths, keys).transpose(1, 2)
    _run(case, inputs)
    prepare_kernels(LongSegment.of(lengths, keys), math.inf)
    got = _run(case, inputs)
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, device=DEVICE)
    wanted_all = (wanted, *torch.autograd.grad((wanted * cotangent).sum(), exact))
    got_all = (got, *torch.autograd.grad((got * cotangent.to(dtype)).sum(), inputs))
    pairs = zip(got_all, wanted_all, strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def count_results(case: Case) -> int:
    inputs = _inputs(case, torch.bfloat16)
    results: list[Sequence[Tensor]] = []
    for _ in range(5):
        grads = torch.autograd.grad(_run(case, inputs).float().square().sum(), inputs)
        if not any(all(map(torch.equal, grads, known)) for known in results):
            results.append(grads)
    return len(results)


def _run(case: Case, inputs: Sequence[Tensor]) -> Tensor:
    segments = [Segment(n, case.lengths[n], begin, end) for n, begin, end in case.pieces]
    micro_batch = PackedMicroBatch.of_segments(segments, case.lengths, DEVICE)
    query, key, value = inputs
    return _attend(query, key, value, micro_batch, _scoring(case))


def _scoring(case: Case) -> Scoring:
    return Scoring(case.width**-0.5, case.window)


def _lengths(case: Case) -> tuple[list[int], list[int]]:
    """Tokens of each piece, and of the keys that it attends to."""
    return [end - begin for _, begin, end in case.pieces], list(case.lengths)


def _inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The same numbers, rounded to bf16, in every dtype."""
    generator = torch.Generator().manual_seed(0)
    lengths, keys = _lengths(case)
    shapes = ((case.heads, lengths, case.width), (case.key_heads, keys, case.width))
    shapes = (*shapes, (case.key_heads, keys, case.value_width))
    tensors = (torch.randn((1, h, sum(n), w), generator=generator) for h, n, w in shapes)
    return [t.bfloat16().to(DEVICE, dtype).requires_grad_() for t in tensors]


if __name__ == "__main__":
    main()
