"""Memory and CPU time of head and loss, in chunks and with all logits of a micro-batch at once, on
one CPU.

`python benchmarks/head_loss.py` prints, for 8,192 tokens and a vocabulary of 128 Ki, the peak of
memory beyond hidden states and head as a share of the logits, and for smaller ones the CPU time of
forward and backward both ways, alternately.
"""

from __future__ import annotations

import statistics
import time

import torch

from ds_hydra.engine.losses import loss as losses
from ds_hydra.engine.losses.loss import PLAIN, HeadLoss
from ds_hydra.engine.parallel.logit_transform import LogitTransform
from ds_hydra.engine.parallel.logits import Vocabulary
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.engine.ranks.memory import forget_peak, process_bytes

WIDTH = 128
LARGE = (8192, 128 * 1024)
SPEED = ((4096, 2048, 512), (2048, 64 * 1024, 128))
"""Tokens, vocabulary and hidden size."""
REPEATS = 5


def make(tokens: int, vocabulary: int, width: int):
    """A function that runs forward and backward once."""
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    of = HeadLoss(
        vocabulary=Vocabulary(TensorParallel(), vocabulary, LogitTransform()),
        targets_T=torch.randint(0, vocabulary, (tokens,)),
        fields={},
        loss=PLAIN,
        evaluate=lambda tokens_: PLAIN(tokens_) / tokens,
    )

    def run() -> None:
        hidden.grad = head.weight.grad = None
        of.of_hidden(hidden, head).backward()

    return run


def peak_bytes(run) -> int:
    """Growth of the resident set at its highest while `run` runs."""
    forget_peak()
    before = process_bytes("VmRSS")
    run()
    return process_bytes("VmHWM") - before


def cpu_ms(run) -> float:
    """CPU time of one run."""
    begin = time.process_time()
    run()
    return (time.process_time() - begin) * 1e3


def main() -> None:
    """Print what was measured."""
    torch.set_num_threads(1)
    tokens, vocabulary = LARGE
    logits = tokens * vocabulary * 4
    peak = peak_bytes(make(tokens, vocabulary, WIDTH))
    print(
        f"{tokens:,} tokens x {vocabulary:,}: peak {peak / 1e9:.2f} GB beyond hidden states and head, "
        f"the gradients of both included; {peak / logits:.3f} of the logits"
    )
    chunk = losses._CHUNK_ELEMENTS["cpu"]
    for tokens, vocabulary, width in SPEED:
        run = make(tokens, vocabulary, width)
        times = {chunk: [], 2**40: []}
        for elements in [*times] * (1 + REPEATS):  # the first ones warm up
            losses._CHUNK_ELEMENTS["cpu"] = elements
            times[elements].append(cpu_ms(run))
        ours, whole = (statistics.median(of[1:]) for of in times.values())
        print(
            f"{tokens:,} tokens x {vocabulary:,}, hidden size {width}: {ours:,.0f} ms in chunks, {whole:,.0f} at once, "
            f"ratio {ours / whole:.2f}"
        )


if __name__ == "__main__":
    main()
