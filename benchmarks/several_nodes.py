"""Several hosts on one machine (network namespaces): bytes, lost hosts.

    python benchmarks/several_nodes.py --out docs/benchmarks/nodes.md [--parts bytes cut]
    [--repeats 5]

Sections of parts that are not measured stay in the page. Parts: `bytes` (what a strategy sends
between hosts, by plan and on the interface), `cut` (seconds until all processes have ended after a
host was cut off, or a process killed). Needs what tests/nodes.py needs. Uses the helpers of the
tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import test_nodes
import torch
import torch.distributed as dist
from engines import start_hydra
from models import tiny
from nodes import Hosts, run_on_hosts
from pages import how, paragraphs, put_section, table

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 4}
VOCAB_SIZE = 2048


def model():
    sizes = SIZES | {"num_attention_heads": 12, "num_key_value_heads": 12}  # divided by each TP
    return tiny("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=4096, **sizes)


def num_parameters() -> str:
    return f"{sum(p.numel() for p in model().parameters()) / 1e6:.1f} M parameters"


# What crosses the boundary.


def count(strategies: list[str]) -> dict:
    engine = start_hydra(model())
    return test_nodes.count_bytes(engine, strategies, times=3)


def measure_bytes(folder: Path) -> str:
    rows = []
    for ranks_on, strategies in (
        (
            [2, 2],
            [
                "4x<1,1>",
                "2x<2,1>",
                "1x<2,2>",
                "1x<2,1> + 1x<1,2>",
                "1x<2,1> + 2x<1,1>",
                "1x<4,1>",
                "4x<1,1;gather>",
                "4x<1,1;gather> then 1x<sp4,1;gather>",
            ],
        ),
        ([2, 2, 2], ["6x<1,1>", "3x<2,1>", "1x<2,3>", "1x<2,2> + 2x<1,1>", "6x<1,1;gather>"]),
    ):
        with Hosts(len(ranks_on)) as hosts:
            ended = run_on_hosts(
                count, hosts, ranks_on, folder / f"bytes{len(ranks_on)}", strategies
            )
        assert not any(rank.exit_code for rank in ended), ended[0].stderr
        firsts = [ended[2 * host].value for host in range(len(ranks_on))]
        test_nodes.check_bytes(firsts)
        for strategy in strategies:
            sent = {}
            for routes in ("direct", "node"):
                found = [first[f"{routes} {strategy}"] for first in firsts]
                sent[routes] = [
                    sum(f[kind][0] for f in found) / 1e6 for kind in ("planned", "counted")
                ]
            (direct_plan, direct), (plan, counted) = sent["direct"], sent["node"]
            rows.append(
                [f"{len(ranks_on)} x 2", f"`{strategy}`", f"{plan:.2f}", f"{counted:.2f}",
                 f"{counted / plan - 1:+.1%}", f"{direct_plan:.2f}", f"{direct:.2f}", f"{counted / direct:.2f}"]
            )  # fmt: skip
    return paragraphs(
        f"One pull (fp32) and one push of a LLaMA of {num_parameters()}, MB sent by all hosts. Counted: the "
        "hosts' `eth0` (`/proc/net/dev`), three exchanges without computation, per exchange; Ethernet, IP and "
        "TCP headers and acknowledgements included (MTU 1500). Direct: one fetch per rank "
        '(`"link": {"devices_per_node": 1}`). Gathered layers: two pulls and a push for one micro-batch of each '
        "pipeline, in each phase, but for layers that are still there from the pass before.",
        table(
            ["hosts x ranks", "strategy", "plan", "counted", "above the plan", "direct: plan", "counted",
             "node / direct"],
            rows,
        ),
    )  # fmt: skip


# A host that is lost.


def train_until_the_end(folder: str, silence_s: int, victim: int) -> None:
    faults = {"silence_s": silence_s, "grace_s": 2}
    engine = start_hydra(test_nodes.big_model(), hydra={"faults": faults})
    for iteration in range(100_000):
        engine.train_batch(
            test_nodes.data_of(iteration), strategy=test_nodes.STRATEGIES[iteration % 6]
        )
        if iteration == 6:
            Path(f"{folder}/training_{dist.get_rank()}").touch()
        if iteration > 6 and dist.get_rank() == victim and Path(f"{folder}/kill").exists():
            os.kill(os.getpid(), 9)


def lose(
    folder: Path, *, silence_s: int, is_cut: bool, delay_s: float
) -> tuple[float, float, bool]:
    """Seconds until the last process has ended, on the hosts that stay and on the one that is lost;
    all named?
    """
    with Hosts(2) as hosts:
        begin = 0.0

        def poll() -> bool:
            nonlocal begin
            if not begin and all((folder / f"training_{rank}").exists() for rank in range(4)):
                begin = time.monotonic()
            if not begin or time.monotonic() < begin + delay_s:
                return False
            if is_cut:
                hosts.cut(1)
            else:
                (folder / "kill").touch()
            return True

        ended = run_on_hosts(
            train_until_the_end,
            hosts,
            [2, 2],
            folder,
            str(folder),
            silence_s,
            3,
            poll=poll,
            limit_s=300,
        )
    told = r"silent" if is_cut else "rank 3 is gone: its process ended on host node-1"
    named = all(rank.exit_code in (1, 75) and told in rank.stderr for rank in ended[:2])
    return max(r.seconds for r in ended[:2]), max(r.seconds for r in ended[2:]), named


def measure_cut(folder: Path, repeats: int) -> str:
    rows = []
    for what, is_cut, silence_s in (
        ("cut off", True, 5),
        ("cut off", True, 15),
        ("process killed", False, 60),
    ):
        runs = [
            lose(
                folder / f"{silence_s}_{index}",
                silence_s=silence_s,
                is_cut=is_cut,
                delay_s=0.5 + 0.37 * index,
            )
            for index in range(repeats)
        ]
        stay, lost, named = zip(*runs)
        seconds = [f"{value:.1f}" for value in (statistics.median(stay), max(stay), max(lost))]
        rows.append([what, silence_s, repeats, f"{sum(named)} of {repeats}", *seconds])
    return paragraphs(
        "Two hosts of two ranks that train; host `node-1` is cut off (no packet leaves or arrives, nothing is "
        "reset), or its second process killed. Seconds until the last process of a host has ended; `grace_s` is "
        "2. Named: both ranks that stay ended with an error that names the lost ranks and their host, and an exit "
        "code that is not 0.",
        table(
            ["fault", "`silence_s`", "runs", "named", "node-0: median s", "worst s", "node-1: worst s"],
            rows,
        ),
    )  # fmt: skip


PARTS = {
    "bytes": ("Bytes between hosts", lambda folder, repeats: measure_bytes(folder)),
    "cut": ("A host that is lost", measure_cut),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="ds_hydra_nodes_"))
    try:
        for part in options.parts:
            where = how(
                f"python benchmarks/several_nodes.py --parts {part} --repeats {options.repeats}"
            )
            title, measure = PARTS[part]
            section = f"{where}\n\n{measure(folder, options.repeats)}"
            print(f"## {title}\n\n{section}", file=sys.stderr)
            if options.out:
                put_section(options.out, title, section)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
