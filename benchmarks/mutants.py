"""Faults put into the package by hand, one at a time: which test notices which.

`python -m benchmarks.mutants` copies the tree, puts in each fault of `mutants.txt` in turn, and
runs rows of the parity table that could notice it until one fails, or the test files that are named
for it. What was tried, and what noticed, is kept in `docs/benchmarks/mutants.json`; the page beside
it is made of that. A fault that is not noticed is printed and makes the exit code 1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_hydra"
RECORD = ROOT / "docs/benchmarks/mutants.json"
TABLE = "parity table"
TIMEOUT_S = 240
"""Of a start of ranks; of a collective, and of what tests wait for, a quarter."""
ROWS_AT_ONCE = 5
NO_FAULTS = (
    "deepspeed.runtime.zero.muon.original_muon",
    "hypothesis",
    "numba",
    "peft",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl",
)
"""Loaded once; what may have a fault is loaded anew for each."""


class Mutant(NamedTuple):
    """`old`, which occurs once in `file` of the package, is replaced by `new`."""

    name: str
    room: str
    file: str
    old: str
    new: str
    families: tuple[str, ...] = ("llama", "llama_bias")
    """Of the table: their rows are run until one fails."""
    rows: tuple[str, ...] = ()
    """Rows that have one of these alone; all if empty."""
    tests: tuple[str, ...] = ()
    """Run instead of the table, one after another."""
    equivalent: str = ""
    """Reason for which nothing can notice it."""


def read_mutants(text: str) -> Iterator[Mutant]:
    """The faults of `mutants.txt`, whose form its first lines say."""
    for part in text.split("\n# ")[1:]:
        head, *bodies = part.split("\n## ")
        room, *rest = head.splitlines()
        of_room = next((line[7:].split() for line in rest if line.startswith("tests: ")), [])
        for body in bodies:
            name, *lines = body.rstrip().splitlines()
            found: dict[str, Any] = {"tests": of_room}
            for line in lines:
                key, _, value = line.partition(": ")
                if line[0] in "-+":
                    key, value = {"-": "old", "+": "new"}[line[0]], line[1:]
                    value = f"{found[key]}\n{value}" if key in found else value
                found[key] = value
            for key in {"families", "rows", "tests"} & found.keys():
                values = found[key].split() if isinstance(found[key], str) else found[key]
                found[key] = tuple(values)
            found["file"] = found.pop("in")
            yield Mutant(name, room, **{"new": "", **found})


MUTANTS = tuple(read_mutants((Path(__file__).parent / "mutants.txt").read_text()))


@functools.cache
def texts_of(package: Path) -> dict[Path, str]:
    """The files of a package as they are without a fault."""
    return {path: path.read_text() for path in package.rglob("*.py")}


def file_of(mutant: Mutant, package: Path = PACKAGE) -> Path:
    """The file of the package that the fault goes into, where its text occurs once; AssertionError
    without one.
    """
    every = {path: text.count(mutant.old) for path, text in texts_of(package).items()}
    named = {p: n for p, n in every.items() if f"/{p.as_posix()}".endswith(f"/{mutant.file}")}
    for counts in (named, every):
        found = [path for path, count in counts.items() if count]
        if len(found) == 1 and counts[found[0]] == 1:
            return found[0]
    raise AssertionError(f"{mutant.name}: {sum(named.values())} places in {mutant.file}")


def rows_that_notice(mutant: Mutant) -> Iterator[str]:
    """Rows of the parity table that notice the fault, with errors. In a process of its own."""
    import test_parity_table as table
    from distributed import run_distributed

    for family in mutant.families:
        of_family = (n for n in table.read_table() if table.row_of(n)["family"] == family)
        names = [name for name in of_family if not table.is_compiled(name)]  # which take long
        if mutant.rows:
            names = [n for n in names if set(table.row_of(n).values()) & {*mutant.rows}]
        for begin in range(0, len(names), ROWS_AT_ONCE):
            some = names[begin : begin + ROWS_AT_ONCE]
            try:
                found = run_distributed(table.check_rows, 4, some, timeout_s=TIMEOUT_S)[0]
            except AssertionError as error:
                yield f"{some[0]}: {str(error).splitlines()[-1]}"
                continue
            for name, (error, _, loss_error) in found.items():
                if max(error, loss_error) > table.RELATIVE_TOLERANCE or error != error:
                    yield f"{name}: gradient {error:.0e}, loss {loss_error:.0e}"


class FirstFailure:
    """Plugin of pytest that keeps the name of the first test, or file, that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Look at a test."""
        if report.failed:
            self.name = self.name or report.nodeid.partition("::")[2]

    def pytest_collectreport(self, report: Any) -> None:
        """Look at a file."""
        if report.failed:
            self.name = self.name or "collection"


def tests_that_notice(test: str, tree: Path) -> Iterator[str]:
    """The same of the tests of a file, or of one of them."""
    import pytest

    first = FirstFailure()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly", "--rootdir", str(tree)]
    options += ["--hypothesis-profile", "first", str(tree / "tests" / test)]
    code = pytest.main(options, plugins=[first])
    if code:
        yield (
            first.name
            if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
            else "..."
        )


def look(mutant: Mutant, test: str, tree: Path, found: Any) -> None:
    """Put the first thing that notices the fault into `found`, or nothing."""
    os.setsid()  # so that ranks of a hanging test end with it
    sys.path[:] = [str(tree), str(tree / "tests"), *(p for p in sys.path if not is_of_root(p))]
    os.environ |= {"PYTHONPATH": str(tree), "TEST_TIMEOUT_S": str(TIMEOUT_S / 4)}
    os.chdir(tree)
    with (tree / "output").open("w") as output:
        for stream in (1, 2):  # of ranks, too
            os.dup2(output.fileno(), stream)
        noticing = rows_that_notice(mutant) if test == TABLE else tests_that_notice(test, tree)
        try:
            found.put(next(noticing, ""))
        except BaseException as error:
            found.put(repr(error))


def is_of_root(path: str) -> bool:
    """Whether modules of this tree would be found in `path`."""
    return Path(path or ".").resolve() in (ROOT, ROOT / "tests")


def try_out(mutant: Mutant, test: str, tree: Path, limit_s: float) -> str:
    """What notices the fault in `test`; "" for nothing, "..." where that is not known in time."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    process = context.Process(target=look, args=(mutant, test, tree, found))
    process.start()
    try:
        return found.get(timeout=limit_s)
    except queue.Empty:
        return "..."
    finally:
        process.join(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def page_of(record: dict[str, dict[str, str]]) -> str:
    """The page that says what notices each fault."""
    rooms = list(dict.fromkeys(mutant.room for mutant in MUTANTS))
    noticed = {name for name, tried in record.items() if is_noticed(tried)}
    lines = [
        "# Faults put in by hand",
        "",
        "`python -m benchmarks.mutants` puts each of these faults into a copy of the package and runs what could",
        "notice it, cheapest first, until something does.",
        "",
        "| Room | Faults | Tried | Noticed | By |",
        "|---|---|---|---|---|",
    ]
    for room in rooms:
        of_room = [mutant for mutant in MUTANTS if mutant.room == room]
        own = [mutant for mutant in of_room if mutant.name in record]
        by: dict[str, int] = {}
        for mutant in own:
            for test, said in record[mutant.name].items():
                if said.strip("."):
                    by[test] = by.get(test, 0) + 1
        files = ", ".join(
            f"{test} {count}" for test, count in sorted(by.items(), key=lambda b: -b[1])
        )
        counts = f"{len(of_room)} | {len(own)} | {sum(m.name in noticed for m in own)}"
        lines.append(f"| {room} | {counts} | {files} |")
    for room in dict.fromkeys(mutant.room for mutant in MUTANTS if mutant.name in record):
        lines += ["", f"## {room}", "", "| Fault | Noticed by | After |", "|---|---|---|"]
        for mutant in MUTANTS:
            if mutant.room != room or mutant.name not in record:
                continue
            tried = record[mutant.name]
            nothing = "nothing in time" if "..." in tried.values() else "nothing"
            said = next((f"{t}: `{s}`" for t, s in tried.items() if s.strip(".")), nothing)
            if mutant.equivalent:
                said = f"nothing: {mutant.equivalent}"
            before = ", ".join(test for test, found in tried.items() if not found.strip("."))
            lines.append(f"| {mutant.name} | {said} | {before} |")
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def is_noticed(tried: dict[str, str]) -> bool:
    """Whether something has noticed the fault."""
    return any(said.strip(".") for said in tried.values())


def main(
    only: Annotated[str, typer.Option(help="Faults whose names hold this text")] = "",
    room: Annotated[str, typer.Option(help="Faults of rooms that hold this text")] = "",
    tests: Annotated[str, typer.Option(help="Test files to run in place of those named")] = "",
    all_tests: Annotated[bool, typer.Option(help="Run every file, also after one noticed")] = False,
    limit_s: Annotated[float, typer.Option(help="Seconds for a test file")] = 2 * TIMEOUT_S,
    record: Annotated[Path, typer.Option(help="Where to keep what was tried")] = RECORD,
    new: Annotated[bool, typer.Option(help="Only faults that were not noticed before")] = False,
) -> None:
    """Put in each fault and say what notices it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    known: dict[str, dict[str, str]] = json.loads(record.read_text()) if record.exists() else {}
    known = {m.name: known[m.name] for m in MUTANTS if m.name in known}
    chosen = [m for m in MUTANTS if only in m.name and room in m.room]
    chosen = [
        m for m in chosen if not m.equivalent and not (new and is_noticed(known.get(m.name, {})))
    ]
    for module in NO_FAULTS if chosen else ():
        importlib.import_module(module)

    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("ds_hydra", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / part, tree / part)  # with bytecode and the compiled planner
        for path in ROOT.glob("[!.]*"):
            if path.is_file():
                shutil.copy2(path, tree)
        for mutant in chosen:
            file, begin = file_of(mutant, tree / "ds_hydra"), time.monotonic()
            text = file.read_text()
            file.write_text(text.replace(mutant.old, mutant.new))
            tried = known[mutant.name] = dict(known.get(mutant.name, {})) if tests else {}
            for test in tests.split() or mutant.tests or (TABLE,):
                tried[test] = try_out(mutant, test, tree, limit_s)
                if tried[test].strip(".") and not all_tests:
                    break
            file.write_text(text)
            noticed = is_noticed(tried)
            survivors += [] if noticed else [mutant.name]
            word = "noticed" if noticed else "SURVIVES"
            typer.echo(f"{word}  {mutant.name}  ({time.monotonic() - begin:.0f} s)  {tried!s:.300}")
            ordered = {m.name: known[m.name] for m in MUTANTS if m.name in known}
            record.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    record.with_suffix(".md").write_text(page_of(known))
    typer.echo(f"{len(survivors)} survive")
    raise typer.Exit(bool(survivors))


if __name__ == "__main__":
    typer.run(main)
