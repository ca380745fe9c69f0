"""Start-up overhead of ds_hydra over stock DeepSpeed: from the launch to the end of the first
optimizer step.

    python -m benchmarks.startup --ranks 2 --repeats 3

Both sides run the plain script of examples/custom_loop and its patched copy in new processes, in
turns. The profile that ds_hydra measures at the start is timed by the script itself and taken off,
since it is measured once per machine and model (hydra.profile). Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_loop"
STOP_AFTER_FIRST_STEP = "    if step == 0: break\n"
TIME_PROFILING = """
import time
from ds_hydra.engine import runtime
measure = runtime.measure_profile
def timed(*arguments):
    begin = time.perf_counter()
    document = measure(*arguments)
    print("profiling_s", time.perf_counter() - begin, flush=True)
    return document
runtime.measure_profile = timed
"""


def write_scripts(folder: Path) -> dict[str, Path]:
    plain = (EXAMPLE / "plain_deepspeed.py").read_text()
    (folder / "plain_deepspeed.py").write_text(plain)
    diff = (EXAMPLE / "plain_to_hydra.diff").read_text()
    subprocess.run(["git", "apply", "-p0"], input=diff, text=True, cwd=folder, check=True)
    scripts = {"deepspeed": folder / "stock.py", "ds_hydra": folder / "hydra.py"}
    scripts["deepspeed"].write_text(plain + STOP_AFTER_FIRST_STEP)
    patched = (folder / "plain_deepspeed.py").read_text()
    scripts["ds_hydra"].write_text(TIME_PROFILING + patched + STOP_AFTER_FIRST_STEP)
    return scripts


def time_start(script: Path, num_ranks: int) -> float:
    """Seconds from the launch until rank 0 prints its first step, profiling taken off."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={num_ranks}",
        str(script),
    ]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    profiling_s, first_step_s = 0.0, None
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("profiling_s"):
            profiling_s = max(profiling_s, float(line.split()[1]))
        if line.startswith("step 0"):
            first_step_s = time.perf_counter() - begin
    if process.wait() or first_step_s is None:
        raise SystemExit(f"{script.name} failed; run it by hand: {' '.join(command)}")
    return first_step_s - profiling_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        scripts = write_scripts(Path(folder))
        times: dict[str, list[float]] = {name: [] for name in scripts}
        for repeat in range(args.repeats + 1):
            for name, script in scripts.items():
                seconds = time_start(script, args.ranks)
                if repeat:  # the first round fills file caches
                    times[name].append(round(seconds, 2))
    medians = {name: statistics.median(values) for name, values in times.items()}
    overhead_s = round(medians["ds_hydra"] - medians["deepspeed"], 2)
    document = {
        "ranks": args.ranks,
        "seconds": times,
        "median_s": medians,
        "overhead_s": overhead_s,
        "limit_s": 10,
    }
    print(json.dumps(document, indent=1))
    if overhead_s > 10:
        raise SystemExit("start-up overhead above the limit of 10 s")


if __name__ == "__main__":
    main()
