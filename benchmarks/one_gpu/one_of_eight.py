"""TP 8, SP 8 and CP 8 beside each other: passes of one rank of 8 without a link.

Exchanges move nothing (`fake_world`), so a time is that of the rank's own products, attention and
operations: what `Costs` has without the bytes on the wire.
"""

from __future__ import annotations

import statistics

from benchmarks.one_gpu import fake_world
from benchmarks.one_gpu.device import HAS_GPU
from benchmarks.one_gpu.memory import TINY
from benchmarks.one_gpu.telling import tell, trying
from ds_hydra.engine.model.meta_model import load_model_config
from ds_hydra.engine.profiling import profiler
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch, count_flops
from ds_hydra.strategy import Strategy

SCHEMES = ("8,1", "sp8,1", "cp8,1", "sp2,cp4,1", "sp2,4,1")
LAYERS = 8 if HAS_GPU else 2
TOKENS = (32_768, 8192, 1024) if HAS_GPU else (128,)


def main() -> None:
    device = fake_world.enter(8)
    config = load_model_config("llama2_7b") if HAS_GPU else TINY
    config.num_hidden_layers = LAYERS
    for scheme in SCHEMES:
        text = f"1x<{scheme};gather>"
        with trying(text):
            strategy = Strategy.parse(text)
            propagator = fake_world.open_rank(config, strategy, device)
            try:
                flops = count_flops(propagator.stage_model)
                for tokens in TOKENS:
                    for probe in (ProbeMicroBatch(tokens), ProbeMicroBatch(tokens // 8, 8)):
                        ms = statistics.median(
                            profiler.measure_stage_ms(propagator, strategy, probe)
                            for _ in range(4 if HAS_GPU else 1)
                        )
                        lengths = (probe.length,) * probe.num_sequences
                        found = {"stage_ms": ms, "TFLOP/s": flops.of(lengths) / 8 / ms / 1e9}
                        tell(f"{text}, {probe}", found)
            finally:
                propagator.close()


if __name__ == "__main__":
    main()
