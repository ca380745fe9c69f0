"""How often random planning problems break what the planner promises.

Command: python benchmarks/planner_properties.py    (`--number`, `--first`)

No plan is faster than its lower bound. No superset of candidates gives a plan that is slower by
more than the search's tolerance. `tests/planner_instances.py` makes the problems. Ends with an
error where a promise is broken.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from planner_instances import TOLERANCE, random_problem, slower_with_more, wrong_bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--number", type=int, default=5000, help="of problems")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    arguments = parser.parse_args()
    bounds = slower = 0
    told = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.number):
        problem = random_problem(seed)
        for sentence in wrong_bounds(problem):
            bounds += 1
            print(f"problem {seed}: {sentence}", flush=True)
        for sentence in slower_with_more(problem, Random(seed)):
            slower += 1
            print(f"problem {seed}: {sentence}", flush=True)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(
                f"{seed + 1 - arguments.first} of {arguments.number}", file=sys.stderr, flush=True
            )
    print(f"| {arguments.number} random problems | violations |\n|---|--:|")
    print(f"| a plan is faster than its lower bound | {bounds} |")
    print(f"| more candidates, a plan slower by more than {TOLERANCE:.0%} | {slower} |")
    return int(bounds + slower > 0)


if __name__ == "__main__":
    sys.exit(main())
