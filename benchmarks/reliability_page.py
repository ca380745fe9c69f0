"""What reliability.py records, and the sections of its page."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
from holdings import STRATEGIES_OF_4
from pages import paragraphs, table


class Records:
    """What was measured, a JSON line each, kept at once: an interrupted run goes on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / "records.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.all = faults.read_json_lines(self._path) if self._path.exists() else []

    def of(self, part: str) -> list[dict[str, Any]]:
        return [record for record in self.all if record["part"] == part]

    def measure(
        self, part: str, keys: dict[str, Any], action: Callable[[], dict[str, Any]]
    ) -> None:
        """Record `action()` under `keys`, unless that is there already."""
        known = {"part": part, **keys}
        if any(known.items() <= record.items() for record in self.of(part)):
            return
        begin = time.monotonic()
        record = {**known, **action()}
        self.all.append(record)
        faults.append_json(self._path, record)
        print(
            f"{time.monotonic() - begin:6.1f} s  {json.dumps(record)[:200]}",
            file=sys.stderr,
            flush=True,
        )


STRATEGIES_OF_2 = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "2x<1,1;gather>", "1x<2,1;gather>")


def describe_kills(records: list[dict[str, Any]]) -> str:
    runs = [r for r in records if r["round"] >= 0]
    kills = [r for r in runs if r["where"] is not None]
    rows = []
    for weights, where, passes in dict.fromkeys(map(_place, kills)):
        mine = [r for r in kills if _place(r) == (weights, where, passes)]
        seconds = [r["detect_s"] for r in mine]
        named, others = sum(r["num_named"] for r in mine), sum(r["num_others"] for r in mine)
        rows.append(
            [
                f"{where}{f', after {passes} others' if passes else ''}",
                weights,
                len(mine),
                f"{named} of {others}",
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
            ]
        )
    same, losses = sum(r["num_same"] for r in runs), sum(r["num_losses"] for r in runs)
    resumes = [r["resume_s"] for r in runs]
    return paragraphs(
        f"SIGKILL of one rank of three, {len(kills)} times; after each, a new start from the last checkpoint, "
        "until ten iterations are trained. Seconds: from the kill until the last of the others has ended.",
        table(
            ["killed in", "layers", "runs", "others that ended with an error naming it", "median s", "worst s"], rows
        ),
        f"Losses equal to the uninterrupted run, bit for bit: **{same} of {losses}**. Engine started and "
        f"checkpoint loaded in {statistics.median(resumes):.1f} s (median; imports not counted).",
    )  # fmt: skip


def _place(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["weights"], record["where"], record["passes"]


def describe_between(records: list[dict[str, Any]]) -> str:
    good = sum(
        record.get("named", False) and not any(left_of(record).values()) for record in records
    )
    return paragraphs(
        "One rank of two is killed or stopped outside of the engine's calls: in a callback of a Trainer, before a "
        "collective of the user (also one of objects, one whose handle is waited for), and after training, where "
        "the table says so. "
        "`silence_s` 6, `grace_s` 2. Seconds: from the signal until the other one has ended. "
        f"**{good} of {len(records)}** name the lost rank and leave nothing.",
        table_of_losses(records),
    )


def describe_phases(records: list[dict[str, Any]]) -> str:
    return paragraphs(
        "One rank of two is killed or stopped in each phase of an engine's life; `silence_s` 6, `grace_s` 2. "
        "Seconds: from the signal until the other one has ended.",
        table_of_losses(records),
    )


def left_of(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record.get(key) for key in ("processes", "shared_memory", "temp")}


def table_of_losses(records: list[dict[str, Any]]) -> str:
    """A row for each signal, and what was not as it should be by name."""
    rows, wrong = [], []
    for signal in dict.fromkeys(record["signal"] for record in records):
        mine = [record for record in records if record["signal"] == signal]
        seconds = [record["seconds"] for record in mine if not record["hangs"]] or [float("nan")]
        rows.append(
            [
                signal,
                ", ".join(dict.fromkeys(record["where"] for record in mine)),
                f"{sum(bool(record.get('named')) for record in mine)} of {len(mine)}",
                f"{statistics.median(seconds):.1f}",
                f"{max(seconds):.1f}",
            ]
        )
        wrong += [
            f"{record['where']}, {signal}: {'hangs' if record['hangs'] else left_of(record)}"
            for record in mine
            if record["hangs"] or any(left_of(record).values())
        ]
    head = ["signal", "where", "named by the other", "median s", "worst s"]
    return paragraphs(
        table(head, rows), "; ".join(wrong) or "Nothing hangs, nothing is left behind."
    )


def describe_gathered(records: list[dict[str, Any]]) -> str:
    rows = []
    for strategy in dict.fromkeys(r["strategy"] for r in records):
        mine = [r for r in records if r["strategy"] == strategy]
        seconds = [r["seconds"] for r in mine]
        rows.append(
            [
                f"`{strategy}`",
                len(mine),
                f"{sum(r['num_named'] for r in mine)} of {2 * len(mine)}",
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
                sum(len(r["shared_memory"]) for r in mine),
            ]
        )
    return paragraphs(
        f"SIGKILL of one rank of three, {len(records)} times, 0 to 2 s after the first of many iterations in which "
        "layers are gathered; the victims alternate. Seconds: from the kill until the last of the others has "
        "ended. Files: what is new in /dev/shm and held by no process.",
        table(
            ["strategy", "kills", "others that ended naming it", "median s", "worst s", "files left"],
            rows,
        ),
    )  # fmt: skip


def describe_launches(records: list[dict[str, Any]]) -> str:
    runs = [r for r in records if r["launcher"] != "none"]
    rows = [
        [
            r["launcher"],
            "rank {0} in {2} of iteration {1}".format(*r["death"].split(":")),
            " then ".join(map(str, r["codes"])),
            "yes" if r["named"] else "no",
            f"{r['num_same']} of {r['num_losses']}",
            f"{r['resume_s']:.1f}",
        ]
        for r in runs
    ]
    return paragraphs(
        "Two ranks, `torchrun --max-restarts 2` (which restarts by itself) and `deepspeed` (started a second time "
        "by hand). Seconds: from the kill until training resumed, process starts and imports included.",
        table(
            [
                "launcher",
                "killed",
                "exit codes",
                "rank named",
                "losses identical",
                "seconds to resume",
            ],
            rows,
        ),
    )


def describe_planner(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["fault"],
            r["num_faults"],
            f"{r['num_same']} of {r['num_faults']}",
            f"{r['seconds']:.1f}",
        ]
        for r in records
    ]
    return paragraphs(
        "The planning process is stopped (SIGSTOP; deadline 0.5 s, then the heuristic's plan is used and the "
        "process replaced) or killed while it works. Seconds: until the next plan came from a new process.",
        table(["planning process", "faults", "next plans identical", "median s"], rows),
    )


def describe_saves(records: list[dict[str, Any]]) -> str:
    (record,) = records
    return (
        f"A process that saves without pause was killed {record['num_kills']} times, 5 to 80 ms after its start; "
        f"`latest` named a checkpoint whose files all had their digests **{record['num_good']} times**. The tests also "
        "kill it at every single operation on a file or folder, and in every write."
    )


def slope_of(samples: list[dict[str, int]], key: str) -> str:
    """Bytes per iteration, with the 95% interval that samples around a line would give."""
    xs, ys = [s["iteration"] for s in samples], [s[key] for s in samples]
    slope, intercept = statistics.linear_regression(xs, ys)
    rest = [y - slope * x - intercept for x, y in zip(xs, ys)]
    spread = sum(r * r for r in rest) / (len(xs) - 2)
    mean = statistics.fmean(xs)
    half = 1.96 * (spread / sum((x - mean) ** 2 for x in xs)) ** 0.5
    return f"{slope:+.0f} ± {half:.0f}"


def describe_leak(records: list[dict[str, Any]]) -> str:
    record = records[-1]
    memory, counts = [], []
    for rank, samples in enumerate(record["ranks"]):
        quarter, half, last = samples[len(samples) // 4], samples[len(samples) // 2], samples[-1]
        tail = samples[len(samples) // 2 :]
        memory.append(
            [
                rank,
                *(f"{s['malloc_bytes'] / 2**20:.2f}" for s in (quarter, half, last)),
                slope_of(tail, "malloc_bytes"),
                *(f"{s['rss_bytes'] / 2**20:.1f}" for s in (quarter, half, last)),
                slope_of(tail, "rss_bytes"),
            ]
        )
        keys = ("open_files", "process_groups", "threads", "tensors", "python_blocks")
        counts.append([rank, *(f"{quarter[key]:,} -> {last[key]:,}" for key in keys)])
    head = [
        f"{what} {when}"
        for what in ("malloc", "RSS")
        for when in ("after 25%", "50%", "100%", "slope")
    ]
    return paragraphs(
        f"{record['iterations']:,} iterations on 4 ranks, one of {len(STRATEGIES_OF_4)} strategies drawn for each, "
        "4 to 12 sequences of 2 to 60 tokens. `malloc`: MiB handed out and not freed; RSS: MiB resident. Slopes: "
        "bytes per iteration over the last half.",
        table(["rank", *head], memory),
        "From 25% to the end:",
        table(
            [
                "rank",
                "open files",
                "process groups",
                "threads",
                "live tensors",
                "blocks of Python",
            ],
            counts,
        ),
    )


def describe_shared_memory(records: list[dict[str, Any]]) -> str:
    whole, small = (next(r for r in records if r["name"] == name) for name in ("whole", "64 MB"))
    is_same = [r["losses"] for r in whole["ranks"]] == [r["losses"] for r in small["ranks"]]
    most = max(rank["most_bytes"] for rank in small["ranks"])
    return (
        f"Two ranks train under {', '.join(f'`{s}`' for s in STRATEGIES_OF_2)} in a mount namespace of their own with "
        f"`mount -t tmpfs -o size=64m tmpfs /dev/shm`: losses {'equal' if is_same else 'differ from'} those with the "
        f"machine's /dev/shm, bit for bit; at most {most:,} bytes in it, {len(small['left'])} files left."
    )


def describe_folders(records: list[dict[str, Any]]) -> str:
    record = records[-1]
    return (
        f"{record['inputs']:,} run folders with one or two files damaged (values changed, bytes changed, cut, "
        "replaced), read as `ds-hydra report --perfetto --json` reads them: "
        f"{record['accepted']} read, {record['refused']} refused, **0 other errors**, the slowest "
        f"{record['slowest_ms'] / 1e3:.2f} s of CPU time."
    )  # fmt: skip


def describe_documents(records: list[dict[str, Any]]) -> str:
    keys = ("inputs", "carried_out", "refused")
    rows = [
        [f"`{r['command']}`", *(r[key] for key in keys), 0, f"{r['slowest_ms']:.0f}"]
        for r in records
    ]
    return paragraphs(
        "One or two of the documents that a command reads (profile, histogram, strategies, lengths, hardware, "
        "topology, layers, points, DeepSpeed JSON, a model's and a tokenizer's, data, run folder) damaged: values "
        "changed, bytes changed, cut, replaced. The command carries it out, or ends with an error of ds_hydra; what it "
        "prints or writes as JSON has no NaN and no Infinity. Anything else, or more than 1 s of CPU time, "
        "ends the benchmark.",
        table(["command", "inputs", "carried out", "refused", "other errors", "slowest ms"], rows),
    )


def describe_examples(records: list[dict[str, Any]]) -> str:
    rows = []
    for run in dict.fromkeys(r["run"] for r in records):
        mine = [r for r in records if r["run"] == run]
        rows.append(
            [
                f"`{run}`",
                ", ".join(str(r["exit_code"]) for r in mine),
                max(r["longest"] for r in mine),
                sum(r["redrawn"] for r in mine),
            ]
        )
    failures = sum(r["exit_code"] != 0 for r in records)
    heads = {re.sub(r"\S*/|`", "", r["longest_line"])[:60].strip() for r in records} - {""}
    said = (
        f" Above 200 are: {'; '.join(f'`{head} ...`' for head in sorted(heads))}." if heads else ""
    )
    return paragraphs(
        "Every script of `examples/`, started as its README says, on 2 CPU ranks (`RUNS`, `CACHE`: folders of the "
        "benchmark), stdout and stderr in a file. The longest line of the file, in characters, does not count what "
        "DeepSpeed's launcher logs of its own command lines (`--log_level error` leaves that out); bars drawn again: "
        "returns to the start of a line, and lines of progress that say what was said. "
        f"**{failures} of {len(records)} runs failed.**{said}",
        table(["run", "exit codes", "longest line", "bars drawn again"], rows),
    )


def describe_configurations(records: list[dict[str, Any]]) -> str:
    inputs, carried_out, refused = (
        sum(r[key] for r in records) for key in ("inputs", "carried_out", "refused")
    )
    slowest = max(r["slowest_ms"] for r in records)
    return (
        f'{inputs:,} configurations with every key of the "hydra" section, one to three places of each changed to '
        "numbers beyond every bound, NaN, NUL, half characters, lists too deep, dictionaries that contain themselves, "
        "keys that are not text, or other objects of Python, examined as `ds-hydra check` does: "
        f"{carried_out:,} carried out, {refused:,} refused, **0 other errors**, the slowest {slowest / 1e3:.2f} s of "
        "CPU time."
    )


def describe_fuzz(records: list[dict[str, Any]]) -> str:
    rows = []
    for name in dict.fromkeys(r["reader"] for r in records):
        mine = [r for r in records if r["reader"] == name]
        total = [sum(r[key] for r in mine) for key in ("inputs", "accepted")]
        slowest = max(r["slowest_ms"] for r in mine)
        growth = max(r["rss_growth_mib"] for r in mine)
        rows.append([name, f"{total[0]:,}", f"{total[1]:,}", 0, f"{slowest:.1f}", f"{growth:.1f}"])
    is_complete = sum(r["inputs"] for r in records) >= len(rows) * 100_000
    return paragraphs(
        "Each input is read, or refused with an error of ds_hydra; anything else, or more than 1 s of CPU time, "
        "ends the benchmark. hypothesis draws valid documents with changed places and any JSON value in any "
        "first-level place."
        + ("" if is_complete else " Not complete: the same command continues up to 100,000 inputs a row."),
        table(
            ["reader", "inputs", "accepted", "other errors", "slowest ms", "RSS growth MiB"],
            rows,
        ),
    )  # fmt: skip


PARTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "kill": ("A rank is lost", describe_kills),
    "phases": ("A rank is lost, from the start to the end", describe_phases),
    "between": ("A rank is lost between the engine's calls", describe_between),
    "gathered": ("A rank is lost while layers are gathered", describe_gathered),
    "launch": ("Restarts under launchers", describe_launches),
    "planner": ("A planning process is lost", describe_planner),
    "saves": ("A crash while saving", describe_saves),
    "leak": ("Many iterations", describe_leak),
    "shm": ("A small /dev/shm", describe_shared_memory),
    "folders": ("Damaged run folders", describe_folders),
    "documents": ("Damaged documents of commands", describe_documents),
    "configurations": ("Hostile configurations", describe_configurations),
    "examples": ("Examples", describe_examples),
    "fuzz": ("Damaged input", describe_fuzz),
}
