"""The page of docs/ that says what one GPU showed, out of the lines that `run.py` has written.

python -m benchmarks.one_gpu.page docs/benchmarks/one_gpu.jsonl docs/benchmarks/one_gpu.md

Lines of several runs may stand in one file; a line with a "note" says of a step what its reader has
to know.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Lines = Sequence[dict[str, Any]]
_WELL = {True: "yes", False: "**no**", None: ""}
_HOW = (
    "Made by `python -m benchmarks.one_gpu.page`; CONTRIBUTING says how a GPU is measured. Steps stand in the order "
    "in which they are run. Shares are of a large bf16 product's rate in the same step; MFU is of 989 TFLOP/s, the "
    "vendor's dense bf16 rate of H100 and H200, also for products in 8 bits."
)
_PEAK_TFLOPS = 989.0
_OTHER = re.compile(r"(\w+): ")
"""Begins the names of steps of other devices than the first one."""
_PRODUCT, _SHARE = "a large product, TFLOP/s", "share_of_product"


def _largest(found: Lines) -> str:
    values = [r["found"] for r in found if isinstance(r["found"], float)]
    return f"{max(values):.2g} at most, of {len(values)}" if values else ""


def _last(*fields: str) -> Callable[[Lines], str]:
    def text(found: Lines) -> str:
        if not fields:
            return _text(found[-1]["found"]).split(":")[0]
        values = [r["found"] for r in found if fields[0] in r["found"]]
        return ", ".join(_text(values[-1][name]) for name in fields) if values else ""

    return text


def _span(field: str) -> Callable[[Lines], str]:
    def text(found: Lines) -> str:
        values = sorted(r["found"][field] for r in found if field in r["found"])
        return f"{values[0]:.3g} to {values[-1]:.3g}, of {len(values)}" if values else ""

    return text


_ROW = "4 x 4096"
_RESULTS: tuple[tuple[str, str, str, Callable[[Lines], str]], ...] = (
    ("error of gradients against one process, fp32", "parity", r"llama fp32", _largest),
    ("the same, LLaMA in bf16", "parity", r"llama bf16", _largest),
    ("iterations that should have the same bits", "parity", r".*deterministic", _last()),
    ("host waits of an iteration", "parity", r"host waits", _last()),
    ("passes of 1B, 4 x 4,096 tokens, ms: eager", "speed", rf"1B, vocabulary 32,000, {_ROW}", _last("passes_ms")),
    ("the same: compiled", "speed", rf"1B, vocabulary 32,000, compiled, {_ROW}", _last("passes_ms")),
    ("the same: plain transformers", "speed", rf"transformers, vocabulary 32,000, {_ROW}", _last("passes_ms")),
    ("iteration, compiled; of it the optimizer's step, ms", "speed", rf"1B, vocabulary 32,000, compiled, {_ROW}",
     _last("iteration_ms", "step_ms")),
    ("MFU of passes of 1B, compiled, 1 x 16,384", "speed", r"1B, vocabulary 32,000, compiled, 1 x 16384",
     _last("MFU_in_passes")),
    ("MFU of passes of LLaMA 2 7B, 4,096 tokens", "speed", r"LLaMA 2 7B.*, 4096", _last("MFU")),
    ("MFU of iterations of 7B, compiled", "iteration of 7B", r"LLaMA 2 7B.*compiled, 4 x",
     _last("MFU_in_iteration")),
    ("peak memory over the formula of MaxLen, 7B, one of 8", "memory", r"llama2_7b, one of 8, (?!.*gather)",
     _span("over_formula")),
    ("the same, gathered layers", "memory", r"llama2_7b, one of 8, .*gather", _span("over_formula")),
    ("what the doctor found of gradients", "doctor", r"doctor, gradients", _last()),
)  # fmt: skip
"""Questions of the first screen: steps and cases (patterns) that answer, how answers are told."""


def make(lines: Iterable[str]) -> str:
    """The page; of a dry run it says what ran and what is right, and no time."""
    records = [json.loads(line) for line in lines if line.strip()]
    steps: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        steps.setdefault(record.pop("step"), []).append(record)
    devices = list(dict.fromkeys(r["found"] for r in records if r.get("case") == "device"))
    versions = next((r["found"] for r in records if r.get("case") == "versions"), "")
    is_dry = not devices
    if is_dry:
        first = (
            "**No GPU has been measured yet.** This is the dry run of what measures one: tiny models on CPU ranks, "
            "every step that needs a GPU skipped by name. It says that the steps run, and no time."
        )
    else:
        first = f"Measured on {'; and on '.join(devices)}."
    prose = (textwrap.fill(text, 120) for text in (first, f"With {versions}.", _HOW))
    for own in steps.values():
        _add_mfu(own)
    results = [] if is_dry else ["## Results", _results(steps, devices), "## Steps"]
    texts = ["# One GPU", *prose, *results, _summary(steps, is_dry)]
    if is_dry:
        texts += ["## Skipped without a GPU", _skipped(steps)]
    texts += [_section(name, own, is_dry) for name, own in steps.items()]
    return "\n\n".join(text for text in texts if text) + "\n"


def _results(steps: dict[str, list[dict[str, Any]]], devices: Sequence[str]) -> str:
    """One screen: a row a question, a column a device, its newest answers."""
    prefixes = dict.fromkeys(m[0] if (m := _OTHER.match(name)) else "" for name in steps)
    rows = []
    for question, of_step, of_case, tell in _RESULTS:
        answers = []
        for prefix in prefixes:
            found = [
                record
                for name, own in steps.items()
                if name.startswith(prefix + of_step) and (prefix or not _OTHER.match(name))
                for record in own
                if "found" in record
                and re.match(of_case, record["case"])
                and "Error" not in str(record["found"])
            ]
            answers.append(tell(found) if found else "not asked")
        rows.append((question, *answers))
    names = [device.split(",")[0].removeprefix("NVIDIA ") for device in devices]
    about = "The newest answer to each question; all of them stand below, with the steps that gave them."
    return about + "\n\n" + _table(("question", *(names or prefixes)), rows)


def _summary(steps: dict[str, list[dict[str, Any]]], is_dry: bool) -> str:
    rows = []
    for name, own in steps.items():
        judged = [r["is_well"] for r in own if r.get("is_well") is not None]
        end = next((r for r in reversed(own) if "end" in r), None)
        text = "skipped" if end is None else end["end"]
        seconds = "" if end is None or is_dry else end["seconds"]
        wrong = judged.count(False)
        num_cases = sum("found" in r for r in own)
        rows.append((name, text, seconds, num_cases, f"**{wrong}**" if wrong else "0"))
    return _table(("step", "end", "seconds", "cases", "not well"), rows)


def _skipped(steps: dict[str, list[dict[str, Any]]]) -> str:
    return _table(
        ("what", "why"),
        [
            (f"{name}: {record['case']}" if "case" in record else name, record["skipped"])
            for name, own in steps.items()
            for record in own
            if "skipped" in record
        ],
    )


def _section(name: str, own: Lines, is_dry: bool) -> str:
    shown = [r for r in own if "found" in r and (not is_dry or r["is_well"] is not None)]
    if is_dry:
        shown = [r for r in shown if not r["is_well"] or isinstance(r["found"], float)]
    rows = [(r["case"], _text(r["found"]), r["wanted"], _WELL[r["is_well"]]) for r in shown]
    if not is_dry:
        rows += [
            (r["case"], f"skipped: {r['skipped']}", "", "")
            for r in own
            if "case" in r and "skipped" in r
        ]
    texts = [textwrap.fill(r["note"], 120) for r in own if "note" in r] if rows else []
    texts += [_table(("case", "found", "wanted", "well"), rows)] if rows else []
    for record in own:
        if record.get("last_words"):
            texts.append(f"{record['end']} after {record['seconds']} s, last words:")
            texts.append("\n".join(f"    {line}" for line in record["last_words"].splitlines()))
    return "\n\n".join([f"## {name[0].upper()}{name[1:]}", *texts]) if texts else ""


def _add_mfu(own: Lines) -> None:
    """Put the MFU behind each share of a large product of the same step."""
    product = next((r["found"] for r in own if r.get("case") == _PRODUCT), None)
    for record in own if product else ():
        if isinstance(found := record.get("found"), dict):
            record["found"] = more = {}
            for key, value in found.items():
                more[key] = value
                if key.startswith(_SHARE):
                    mfu = value * product / _PEAK_TFLOPS
                    more[key.replace(_SHARE, "MFU")] = float(f"{mfu:.3g}")


def _text(found: Any) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_text(value)}" for key, value in found.items())
    return f"{found:g}" if isinstance(found, float) else str(found)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Like `benchmarks/pages.py`, with what Markdown would read in a cell left as it is."""
    cells = [[str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (list(head), *cells)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def main() -> None:
    results, page = map(Path, sys.argv[1:3])
    page.write_text(make(results.read_text(encoding="utf-8").splitlines()), encoding="utf-8")


if __name__ == "__main__":
    main()
