"""How large the package is, and how much of it training loads.

Command: python benchmarks/house.py    (`--root` counts another checkout)

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
from collections.abc import Iterable
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout")
    root = parser.parse_args().root.resolve()
    package = sorted((root / "ds_hydra").rglob("*.py"))
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
