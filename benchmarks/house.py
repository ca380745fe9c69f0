"""How large the package is, and how much of it training loads.

Commands: python benchmarks/house.py           (`--root` counts another checkout)
          python benchmarks/house.py --bill    which clause of decision 052 keeps which part, and
                                               where lines of tests are

Lines are all lines of a file, docstrings and empty ones too. An import's lines are those of its
statement, wherever it stands; a comment's are those that hold nothing else.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_PURPOSE, _WORTH, _STOCK, _NONE = "(a) purpose", "(b) worth", "(c) stock", "none"
BILL: tuple[tuple[str, str, str], ...] = (
    ("engine/", _PURPOSE, "engine subclass: iterations, stages, plans carried out"),
    ("engine/transfer/", _PURPOSE, "pull and push beside computation"),
    ("engine/strategy_links.py", _PURPOSE, "pull and push beside computation"),
    ("zero_link/", _PURPOSE, "ZeRO-3 link"),
    ("engine/parallel/", _PURPOSE, "TP, PP, SP, CP inside a pipeline"),
    ("engine/parallel/float8_products.py", _WORTH, "8-bit products: passes 1.08 to 1.12"),
    ("engine/model/float8.py", _WORTH, "8-bit products: passes 1.08 to 1.12"),
    ("engine/parallel/log", _WORTH, "head and loss in chunks: no logits of a whole micro-batch"),
    ("engine/parallel/offload.py", _STOCK, "contexts that TRL trains: activations in host memory"),
    ("engine/model/attention", _WORTH, "attention kernels: 1.7 to 2.0 of varlen on Hopper"),
    ("engine/model/experts.py", _STOCK, "mixtures of experts"),
    ("engine/model/adapters.py", _STOCK, "LoRA, dropout of adapters, NEFTune"),
    ("engine/model/noise.py", _STOCK, "LoRA, dropout of adapters, NEFTune"),
    ("engine/model/liger.py", _STOCK, "models that Liger has patched"),
    ("engine/model/decoder_parts.py", _STOCK, "model types of transformers: 176 of 196"),
    ("engine/model/model_checks.py", _STOCK, "model types of transformers: 176 of 196"),
    ("engine/model/tp_plan.py", _STOCK, "model types of transformers: 176 of 196"),
    ("engine/model/packing_probe.py", _STOCK, "model types of transformers: 176 of 196"),
    ("engine/model/since_start.py", _STOCK, "model types of transformers: 176 of 196"),
    ("engine/losses/", _STOCK, "losses of one's own, DPO and GRPO through TRL"),
    ("engine/profiling/", _PURPOSE, "profiles"),
    (
        "engine/checkpointing/",
        _STOCK,
        "checkpoints of stock ZeRO-3, other numbers of ranks, beside training",
    ),
    ("engine/ranks/", _STOCK, "errors on all ranks, lost ranks, signals, hosts"),
    ("engine/telemetry/", _PURPOSE, "metrics, learned times, traces"),
    ("engine/checks/", _STOCK, "the DeepSpeed JSON as DeepSpeed reads it; `check`"),
    ("sampler/", _PURPOSE, "proposal and planning beside training"),
    ("sampler/planner/", _PURPOSE, "dispatch, packing, MIP, phases, bounds"),
    ("sampler/data/", _PURPOSE, "datasets sampler"),
    ("sampler/data/stream.py", _STOCK, "streams (IterableDataset)"),
    ("strategy/", _PURPOSE, "schemes, profiles, cost models, program of Eq. (4)"),
    ("trainer/", _PURPOSE, "HF Trainer"),
    ("trl/", _STOCK, "SFT, DPO, GRPO and RLOO of TRL"),
    ("configs/", _PURPOSE, 'the "hydra" section, presets'),
    ("commands/", _PURPOSE, "propose, plan, profile, check, init without ranks"),
    ("lab/search/", _PURPOSE, "Galvatron-BMW's search"),
    ("lab/whole_iteration.py", _PURPOSE, "Rubick's fitted model"),
    ("lab/alpha_beta.py", _PURPOSE, "HexiScale's alpha-beta"),
    ("lab/", _NONE, "simulator: every claim against other systems"),
    ("doctor/", _NONE, "examination of a cluster in its first hour"),
    ("report/", _NONE, "summary, picture and traces of a run"),
    ("records/", _NONE, "metrics' schema, timelines"),
    ("", _PURPOSE, "names of the package, errors, command line"),
)
"""Parts of the package by the beginning of their paths (the longest one holds), the clause of the
rule that keeps them, and what they are for.
"""
LOADED = """
import sys
import ds_hydra.engine, ds_hydra.trainer
print(*(m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "ds_hydra"), sep="\\n")
"""


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def num_import_lines(paths: Iterable[Path]) -> int:
    return sum(
        node.end_lineno - node.lineno + 1
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def num_comment_lines(paths: Iterable[Path]) -> int:
    return sum(
        token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        for path in paths
        for token in tokenize.generate_tokens(path.open(encoding="utf-8").readline)
    )


def loaded_by_training(root: Path) -> list[Path]:
    """Files of the package that `import ds_hydra.engine, ds_hydra.trainer` loads."""
    command = [sys.executable, "-W", "ignore", "-c", LOADED]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(
        command, cwd=root, env=environment, check=True, capture_output=True, text=True
    )
    paths = [Path(line) for line in run.stdout.splitlines() if line.endswith(".py")]
    package = root / "ds_hydra"
    return [path for path in paths if path.is_relative_to(package)]


Part = tuple[str, str]
"""The clause that keeps a part of the package, and what it is for."""


def part_of(name: str) -> Part:
    """The part of a module of the package, whose name has slashes."""
    _, clause, what = max(r for r in BILL if f"{name}/".startswith(r[0].removesuffix(".py")))
    return clause, what


def tested_part(path: Path) -> Part | None:
    """The part that a file of tests imports most names from; None where it imports none."""
    parts: Counter[Part] = Counter()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
        if module and module.startswith("ds_hydra."):
            name = module.removeprefix("ds_hydra.").replace(".", "/")
            parts[part_of(name)] += len(node.names) if "/" in name else 0
    return parts.most_common(1)[0][0] if parts else None


def print_bill(root: Path) -> None:
    """Print lines of each part, and of its tests, in a Markdown table, the largest first."""
    lines: Counter[Part] = Counter()
    tests: Counter[Part | None] = Counter()
    for path in (root / "ds_hydra").rglob("*.py"):
        name = path.relative_to(root / "ds_hydra").with_suffix("").as_posix()
        lines[part_of(name)] += num_lines([path])
    for path in (root / "tests").rglob("*.py"):
        tests[tested_part(path)] += num_lines([path])
    print("| kept by | lines | of tests | part |\n|---|--:|--:|---|")
    for part, number in lines.most_common():
        print(f"| {part[0]} | {number:,} | {tests[part]:,} | {part[1]} |")
    print(f"| | | {tests[None]:,} | the package from outside: scripts, commands, ranks |")
    for clause in (_PURPOSE, _WORTH, _STOCK, _NONE):
        number = sum(n for (of, _), n in lines.items() if of == clause)
        tested = sum(n for part, n in tests.items() if part and part[0] == clause)
        share = f"{number / lines.total():.0%}, of tests {tested / tests.total():.0%}"
        print(f"| **{clause}** | **{number:,}** | **{tested:,}** | **{share}** |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument("--bill", action="store_true", help="lines of each part")
    options = parser.parse_args()
    root = options.root.resolve()
    package = sorted((root / "ds_hydra").rglob("*.py"))
    if options.bill:
        print_bill(root)
        return
    core = [path for path in package if not path.is_relative_to(root / "ds_hydra/lab")]
    loaded = loaded_by_training(root)
    total = num_lines(package)
    for name, value in (
        ("lines that training loads", f"{num_lines(loaded):,} in {len(loaded)} files"),
        ("lines without lab/", f"{num_lines(core):,} in {len(core)} files"),
        ("lines of lab/", f"{total - num_lines(core):,} in {len(package) - len(core)} files"),
        ("files below 100 lines", f"{sum(num_lines([path]) < 100 for path in package)}"),
        ("longest file", f"{max(num_lines([path]) for path in package):,} lines"),
        ("import lines", f"{num_import_lines(package) / total:.1%}"),
        ("comment lines", f"{num_comment_lines(package) / total:.1%}"),
        ("lines of tests", f"{num_lines((root / 'tests').rglob('*.py')):,}"),
    ):
        print(f"{name:27}{value}")


if __name__ == "__main__":
    main()
