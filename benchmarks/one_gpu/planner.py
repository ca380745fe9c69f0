"""How long iterations wait for their plans, with 0, 1 and 2 planning processes beside them."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from engines import start_hydra
from transformers import AutoModelForCausalLM

from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join
from benchmarks.one_gpu.speed import CONTEXT, VOCABULARIES, model_config
from benchmarks.one_gpu.telling import tell, trying
from ds_hydra.engine.model.meta_model import build_random_stage_model
from ds_hydra.engine.profiling.profile_document import nominal_profile
from ds_hydra.strategy import Scheme

NUM_ITERATIONS = 8 if HAS_GPU else 2
WORKERS = (0, 1, 2) if HAS_GPU else (0, 1)
LENGTHS = [CONTEXT // 2, *(100 if HAS_GPU else 10,) * 40] * (NUM_ITERATIONS + 4)


def main() -> None:
    device = join()
    config = model_config(VOCABULARIES[0])
    stage_model = build_random_stage_model(
        config, dtype=DTYPE, device=torch.device("meta"), num_ranks=1
    )
    data = [{"input_ids": [1 + n % 100 for n in range(length)]} for length in LENGTHS]
    data = Dataset.from_list([{**row, "labels": row["input_ids"]} for row in data])
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        profile.write_text(json.dumps(nominal_profile(stage_model, [Scheme(tp=1, pp=1)])))
        for workers in WORKERS:
            with trying(f"{workers} planning processes"):
                measure(workers, str(profile), data, config, device)


def measure(
    workers: int, profile: str, data: Dataset, config: object, device: torch.device
) -> None:
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    hydra = {
        "context_length": CONTEXT,
        "tokens_per_iteration": CONTEXT,
        "profile": profile,
        "strategies": ["1x<1,1>"],
        "planner": {"solver": "none", "num_workers": workers},
    }
    engine = start_hydra(model, hydra=hydra, training_data=data, **SECTIONS)
    try:
        metrics = []
        for _ in range(NUM_ITERATIONS):
            engine.train_batch()
            metrics.append(engine.last_metrics)
        waited, whole, passes = (
            statistics.median(getattr(m, name) for m in metrics[NUM_ITERATIONS // 2 :])
            for name in ("waited_ms", "iteration_ms", "measured_ms")
        )
        found = {"waited_ms": waited, "iteration_ms": whole, "passes_ms": passes}
        is_well = waited <= 1.0 if HAS_GPU and workers else None
        wanted = "waited at most 1 ms" if workers else ""
        tell(f"{workers} planning processes", found, wanted=wanted, is_well=is_well)
    finally:
        engine.destroy()


if __name__ == "__main__":
    main()
