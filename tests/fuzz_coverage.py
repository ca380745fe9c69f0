"""Coverage-guided fuzzing of one reader with atheris (libFuzzer): inputs that reach new code are
kept and changed.

    python tests/fuzz_coverage.py READER NUM_INPUTS FOLDER [SEED]

Inputs are JSON texts, changed by the mutator of `fuzzing.py`, so that they stay JSON. The readers'
modules are instrumented; compiled planning code is not. Counts go to FOLDER/READER.json. An error
that is not one of ds_hydra, more than 1 s, or more than 2 GiB above the start ends the process with
a code that is not 0, and leaves the input in FOLDER.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import atheris
import psutil


def compiled_modules() -> list[str]:
    """Those that numba compiles from their bytecode, which has to stay as it is."""
    package = Path(__file__).parent.parent / "ds_hydra"
    return [
        ".".join(("ds_hydra", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if path.stem == "compiled" or "ds_hydra.strategy.compiled" in path.read_text()
    ]


with atheris.instrument_imports(include=["ds_hydra"], exclude=compiled_modules()):
    import fuzzing


def main(name: str, num_inputs: int, folder: Path, seed: int) -> None:
    """Never returns: libFuzzer ends the process."""
    logging.disable(logging.WARNING)
    reader, valid = fuzzing.BROKEN if name == "a broken reader" else fuzzing.targets(folder)[name]
    atheris.instrument_func(reader)
    corpus = folder / f"corpus of {name}"
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "valid").write_text(json.dumps(valid))
    rss = psutil.Process().memory_info().rss
    # What libFuzzer looks at, which a process takes over from the one that started it
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    outcomes: Counter[str] = Counter()
    slowest = 0.0

    def write_counts() -> None:
        counts = {
            "inputs": outcomes.total(),
            "accepted": outcomes["accepted"],
            "slowest_ms": slowest * 1e3,
            "rss_growth_mib": (psutil.Process().memory_info().rss - rss) / 2**20,
        }
        (folder / f"{name}.json").write_text(json.dumps(counts))

    def test_one_input(data: bytes) -> None:
        nonlocal slowest
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return  # libFuzzer's own first inputs; `read_json_object` refuses what is not JSON
        start = time.process_time()
        outcomes[fuzzing.check(reader, value)] += 1
        slowest = max(slowest, time.process_time() - start)
        if outcomes.total() == num_inputs:
            write_counts()

    def change(data: bytes, max_size: int, change_seed: int) -> bytes:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = valid
        changed = json.dumps(fuzzing.mutate(value, random.Random(change_seed))).encode()
        return changed if len(changed) <= max_size else json.dumps(valid).encode()

    limits = [f"-runs={num_inputs + 50}", f"-seed={seed}", "-max_len=20000", "-timeout=60"]
    limits += [
        f"-rss_limit_mb={max(rss // 2**20, peak) + 2048}",
        f"-artifact_prefix={folder}/",
        "-reduce_inputs=0",
    ]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], test_one_input, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        Path(sys.argv[3]),
        int(sys.argv[4]) if len(sys.argv) > 4 else 1,
    )
