"""Every command and code block of README and documentation.

What is run: `ds-hydra` commands in `sh` and `console` blocks, in a folder with small inputs
(`propose` on one global batch only); `python` blocks; `json` blocks that are configurations, by the
reader of configurations; other JSON by the reader of its schema; added lines of `diff` blocks are
compiled. A block after `<!-- needs: ranks -->` (or cluster, network) cannot run here, nor can other
programs than ds-hydra: their syntax is checked, that the scripts, targets and files they name
exist, and that ds-hydra takes the options. Blocks without a language are text; lines in them that
begin with a known program are checked the same way.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from run_folders import make_record, write_run, write_run_folder
from typer.testing import CliRunner

import ds_hydra
from ds_hydra.cli import app
from ds_hydra.configs import find_file, read_ds_config
from ds_hydra.engine.checks.deepspeed_section import find_deepspeed_problems
from ds_hydra.report import summarize_run
from ds_hydra.strategy import Profile
from ds_hydra.strategy.schemes.enumeration import strategies_from_json

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md")],
    key=lambda page: str(page.relative_to(ROOT)),
)
NEEDS = {"ranks", "cluster", "network"}
PROGRAMS = {
    "accelerate", "deepspeed", "ds-hydra", "git", "kubectl", "make", "pip", "python", "sbatch", "tensorboard",
    "torchrun",
}  # fmt: skip
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>\w+) -->\n)?^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    needs: str | None
    code: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(*languages):
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("fence")) + 1
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, match["language"], match["needs"], match["code"]))
    return [block for block in found if not languages or block.language in languages]


def commands_of(block):
    """Logical lines that begin with a known program; in a console block those after the prompt."""
    text = block.code.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            assert not block.language, f"{block}: {line!r} has an open quote"
            words = []
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and Path(words[0]).name in PROGRAMS:
            yield [Path(words[0]).name, *words[1:]]
        else:
            assert not block.language or not words, (
                f"{block}: {line!r} is no program this test knows"
            )


def test_every_block_says_what_it_is():
    for block in blocks():
        assert block.language in ("", "console", "diff", "json", "python", "sh", "text"), block
        assert block.needs in NEEDS | {None}, block


def find_usage_error(arguments):
    """What ds-hydra says of arguments that it does not take, without running anything; None if it
    takes them.
    """
    command = typer.main.get_command(app).commands.get(arguments[0])
    if command is None:
        return f"no command {arguments[0]}"
    try:
        command.make_context(f"ds-hydra {arguments[0]}", list(arguments[1:]))
    except Exception as error:  # typer has its own copy of click's exceptions
        return repr(error)
    return None


@pytest.mark.parametrize("block", blocks("sh", "console", ""), ids=str)
def test_commands_parse_and_what_they_name_exists(block):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *arguments in commands_of(block):
        line = shlex.join([program, *arguments])
        assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
        if program == "make":
            assert set(arguments) <= set(targets), line
        for argument in arguments:
            path = argument.split("=")[-1]
            if re.match(r"(examples|benchmarks|docs|ds_hydra|tests)/\S+\.\w+$", path):
                assert (ROOT / path).is_file(), f"{block}: {path} does not exist"
        if "ds-hydra" in (program, *arguments):
            rest = [program, *arguments][[program, *arguments].index("ds-hydra") + 1 :]
            assert find_usage_error(rest) is None, f"{block}: {line}"


def runnable_pages():
    return sorted(
        {
            block.page
            for block in blocks("sh", "console")
            if block.needs is None and any(words[0] == "ds-hydra" for words in commands_of(block))
        }
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the commands of the documentation name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(("a b c", "a b", "a b c d e f g")):
        (tmp_path / f"texts/{index}.txt").write_text(text)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate("?abcdefg")}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="?").save_pretrained(
        "tokenizer"
    )
    (tmp_path / "my_config.json").write_text(find_file("deepspeed", "llama2_7b_8gpus").read_text())
    (tmp_path / "batch.json").write_text(json.dumps([30000, 9000, 4000, 800]))
    (tmp_path / "ds_hydra").symlink_to(ROOT / "ds_hydra")
    return tmp_path


CANDIDATES = {
    "schema": "ds_hydra.strategies/1",
    "num_devices": 64,
    "context_length": 32768,
    "strategies": ["4x<16,1>", "1x<16,1> + 6x<8,1>"],
}


@pytest.mark.parametrize("page", runnable_pages())
def test_ds_hydra_commands_run(page, folder):
    """In the order of the page, so that what one writes the next can read."""
    for block in blocks("sh", "console"):
        if block.page != page or block.needs is not None:
            continue
        for program, *arguments in commands_of(block):
            if program != "ds-hydra":
                continue
            if arguments[0] == "init":
                Path(arguments[arguments.index("--out") + 1]).unlink(missing_ok=True)
            if arguments[0] == "propose":
                arguments += ["--batches", "1"]
            if arguments[0] == "plan" and not Path("strategies.json").exists():
                small = (
                    {}
                    if "a800_llama2_32b" in arguments
                    else {"num_devices": 8, "strategies": ["2x<4,1>"]}
                )
                Path("strategies.json").write_text(json.dumps(CANDIDATES | small))
            for run_dir in (
                Path(argument) for argument in arguments if argument.startswith("runs/")
            ):
                if not run_dir.exists():
                    write_run_folder(run_dir, 2)
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, (
                f"{block}: {arguments}: {result.stderr or result.exception!r}"
            )


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_run_or_use_names_that_exist(block, capsys):
    tree = ast.parse(block.code)
    if block.needs is None:
        exec(compile(tree, str(block), "exec"), {})
        return
    methods = set(dir(ds_hydra.HydraEngine))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "ds_hydra":
                assert hasattr(ds_hydra, node.attr), f"{block}: ds_hydra.{node.attr}"
            if node.value.id == "engine":
                assert node.attr in methods, f"{block}: engine.{node.attr}"


@pytest.mark.parametrize("block", blocks("diff"), ids=str)
def test_added_lines_of_diffs_are_python_with_names_that_exist(block):
    tree = ast.parse(
        "\n".join(line[1:] for line in block.code.splitlines() if line.startswith("+"))
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ds_hydra":
            assert all(hasattr(ds_hydra, name.name) for name in node.names), block


READERS = {
    "ds_hydra.profile/1": Profile.from_json,
    "ds_hydra.strategies/1": strategies_from_json,
}


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_blocks_are_accepted_by_what_reads_them(block):
    text = block.code.strip()
    document = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if "schema" in document:
        READERS[document["schema"]](document)
        return
    assert "hydra" in document, f"{block}: neither a configuration nor a file with a schema"
    complete = {"zero_optimization": {"stage": 3}, **document}
    ds_config, _ = read_ds_config(complete)
    assert find_deepspeed_problems(ds_config) == []


def test_every_decision_is_in_the_index_under_its_room_and_has_its_parts():
    """The navigation leaves decisions to their index."""
    folder = ROOT / "docs/decisions"
    index = (folder / "index.md").read_text()
    rooms = {
        link: section.partition("\n")[0]
        for section in index.split("\n## ")[1:]
        for link in re.findall(r"\]\((\d{3}-\S+\.md)\)", section)
    }
    pages = {page.name: page.read_text() for page in folder.glob("[0-9]*.md")}
    assert rooms.keys() == pages.keys()
    assert len({name[:3] for name in pages}) == len(pages)
    for name, text in pages.items():
        title = re.search(rf"\({re.escape(name)}\) (.+)", index)[1]
        assert text.startswith(f"# {name[:3]}. {title}\n\n*{rooms[name]}, 20"), name
        for part in ("Context", "Decision", "What would change it"):
            assert f"**{part}.**" in text, (name, part)


def _block(page: str, first: str) -> list[str]:
    """The lines of the block of a page that begins so."""
    text = (ROOT / page).read_text()
    return (
        next(b for b in text.split("```") if b.strip("\n").startswith(first))
        .strip("\n")
        .splitlines()
    )


def _form(line: str) -> str:
    """`line` with one sign for each number, and one blank for several."""
    return " ".join(re.sub(r"[\d,.]*\d", "#", re.sub(r"#+", "", line)).split())


def test_the_demo_in_the_readme_has_the_form_that_a_run_prints(tmp_path):
    records = [make_record(i, "4x<1,1>") for i in range(3)]
    for record in records:
        record["tflops_per_device"] = 0.03
        for pipeline in record["pipelines"]:
            pipeline["profiled_ms"] = 100.0
    printed = str(summarize_run(write_run(tmp_path, records))).splitlines()
    shown = _block("README.md", "3.2 million parameters")
    begin = shown.index("")
    assert [_form(line) for line in shown[begin : begin + len(printed) - 2]] == [
        _form(line) for line in printed[2:]
    ]
    assert shown[1].split() == printed[0].split()
