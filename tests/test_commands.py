"""`ds-hydra propose` and `ds-hydra lengths` as a user calls them."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys

import datasets
import pytest
import typer
from command_documents import COMMANDS, write_documents_of
from command_line import accepted, document_of, invoke, refused
from conftest import OF_A_LAUNCHER
from reference import make_profile
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.utils import logging as libraries

from ds_hydra.cli import app
from ds_hydra.commands import common, lengths
from ds_hydra.configs.files import write_whole
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress, no_bars_in_files
from ds_hydra.sampler.data import length_stats
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.enumeration import load_strategies


@pytest.fixture
def files(tmp_path):
    profile = make_profile({"<1,1>": (0.0, 1.0, 1.0), "<2,1>": (0.0, 0.6, 1.0)}, max_len=60)
    (tmp_path / "profile.json").write_text(json.dumps(dict(profile.document)))
    histogram = LengthHistogram.from_counts({5: 90, 50: 10})
    (tmp_path / "lengths.json").write_text(json.dumps(histogram.to_json()))
    return tmp_path


def propose_arguments(files, *more):
    return [
        "propose", "--profile", files / "profile.json", "--histogram", files / "lengths.json",
        "--devices", 4, "--batches", 4, *more,
    ]  # fmt: skip


def test_propose_prints_one_document_and_writes_the_same(files):
    out = files / "strategies.json"
    document = document_of(*propose_arguments(files, "--context", 50, "--json", "--out", out))
    assert document == json.loads(out.read_text())
    assert document["schema"] == "ds_hydra.strategies/1"
    assert (document["num_devices"], document["context_length"]) == (4, 50)
    assert [str(s) for s in load_strategies(str(out))] == document["strategies"]


def test_propose_says_what_nobody_measured(files):
    profile = make_profile(
        {"<1,1>": (0.01, 1.0, 1.0), "<2,1>": (0.006, 0.6, 1.0), "<4,1>": (0.004, 0.4, 1.0)},
        max_len=60,
    )
    (files / "profile.json").write_text(json.dumps(dict(profile.document)))
    plain = invoke(*propose_arguments(files, "--context", 50, "--tokens", 60, "--space", "plain"))
    full = accepted(*propose_arguments(files, "--context", 50, "--tokens", 60))
    for said in ("nobody measured <sp", "with those of <TP,PP> alone", "communicators"):
        assert said in full.stdout
    assert "<sp" not in plain.stdout
    assert "alone" not in plain.stdout
    typo = invoke(*propose_arguments(files, "--context", 50, "--tokens", 60, "--space", "wide"))
    assert typo.exit_code == 2
    assert "'full', 'measured', 'plain'" in typo.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", 70, "--space", "plain"], "lower the context to 60"),
        (["--context", 70, "--space", "measured"], "set hydra.planner.space to"),
    ],
)
def test_propose_refuses_without_a_traceback(files, arguments, message):
    assert message in refused(*propose_arguments(files, *arguments))


def test_results_are_written_through_links_and_into_pipes(tmp_path):
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    common.write_document({"a": 1}, link)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    common.write_document({"a": 2}, pipe)
    assert json.loads(reader.communicate(timeout=600)[0]) == {"a": 2}
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", typer.main.get_command(app).commands)
def test_help_has_an_example(command):
    printed = " ".join(invoke(command, "--help").stdout.split())
    assert re.search(rf"Example: .*ds-hydra {command}", printed)


class SplitTokenizer:
    """One token for each word."""

    eos_token_id = 0

    def __call__(self, texts):
        return {"input_ids": [list(range(1, len(text.split()) + 1)) for text in texts]}


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(lengths, "_load_tokenizer", lambda name: SplitTokenizer())


TEXTS = ["a b c", "a b", "a b c d e f g", "a b", ""]  # with an end of text: 4, 3, 8, 3 and 1 tokens
COUNTS = {"3": 2, "4": 1, "8": 1}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved", "folder"])
@pytest.mark.parametrize("streaming", [False, True])
def test_lengths_of_local_data(tmp_path, words, kind, streaming):
    data = datasets.Dataset.from_dict({"text": TEXTS})
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        data.to_json(path)
    elif kind == "parquet":
        data.to_parquet(path)
    elif kind == "saved":
        data.save_to_disk(path)
    elif kind == "arrow":
        path.mkdir()
        data.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path / "part.arrow")
    else:
        path = tmp_path / "folder"
        path.mkdir()
        for i, text in enumerate(TEXTS[:-1]):
            (path / f"{i}.txt").write_text(text)
    out = tmp_path / "lengths.json"
    more = ["--streaming"] if streaming else []
    result = accepted(
        "lengths", "--dataset", path, "--tokenizer", "words", "--out", out, "--json", *more
    )
    assert json.loads(result.stdout) == json.loads(out.read_text())
    assert json.loads(result.stdout)["counts"] == COUNTS


def test_lengths_refuses_without_a_traceback(tmp_path, words):
    arguments = ("lengths", "--dataset", tmp_path, "--out", tmp_path / "h.json")
    assert "holds no file" in refused(*arguments)
    assert "--max-rows needs --streaming" in refused(*arguments, "--max-rows", 2)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, more, message in (
        ("empty.jsonl", (), "empty.jsonl cannot be read as json"),
        ("broken.jsonl", (), "broken.jsonl cannot be read as json"),
        ("latin.txt", (), "cannot be read as text: 'utf-8' codec can't decode byte 0xe9"),
        ("broken.jsonl", ("--split", "valid"), "leave out --split"),
        ("missing.jsonl", (), "missing.jsonl does not exist"),
        ("empty.jsonl", ("--out", tmp_path / "no" / "h.json"), "folder does not exist"),
    ):
        assert message in refused(
            "lengths", "--dataset", tmp_path / name, "--out", tmp_path / "h.json", *more
        )


@pytest.fixture
def tokenizer_file(tmp_path):
    """It cuts and pads what it is called with, which does not count."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=2)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([{"text": text} for text in ("abc", "a", "", "abcd")], {"3": 1, "4": 1}),
        ([{"input_ids": n} for n in ([1, 2, 3], None, [4, 5])], {"2": 1, "3": 1}),
        ([{"id": 1}, {"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], {"2": 1, "3": 1}),
        ([{"input_ids": [1, 2, 3], "response_mask": [1, n, 0]} for n in (0, 1)], {"3": 1}),
        ([{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}], {"2": 1}),
        ([{"input_ids": [[1, 2, 3]]}], {"3": 1}),
    ],
)
def test_a_stream_counts_what_training_counts(tmp_path, tokenizer_file, rows, counts):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data.jsonl").write_text(lines)
    for more in (), ("--streaming",):
        result = accepted(
            "lengths", "--dataset", tmp_path / "data.jsonl", "--tokenizer", tokenizer_file,
            "--out", tmp_path / "h.json", "--json", *more,
        )  # fmt: skip
        assert json.loads(result.stdout)["counts"] == counts


@pytest.mark.parametrize("more", [(), ("--streaming",)])
def test_data_that_cannot_be_counted_is_refused_with_the_options(tmp_path, tokenizer_file, more):
    turns = [{"from": "human", "value": "ab"}]
    for row, tokenizer, message in (
        ({"conversations": turns}, tokenizer_file, "tokenise chats before, by dataset.map("),
        ({"text": "a"}, None, "no tokenizer; .*(--tokenizer)"),
        ({"question": "a", "answer": "b"}, tokenizer_file, "train prompts and completions by ds"),
        ({"body": "a"}, tokenizer_file, "name one of them (--text-column)"),
        ({"input_ids": [1, 2], "prompt_mask": [1, 0]}, None, "'prompt_mask', which is not used"),
        ({"input_ids": [1, 2]}, None, "cannot be read as"),
    ):
        lines = json.dumps(row) + "\n"
        cut = '{"input_ids": [1' if "cannot" in message else ""
        (tmp_path / "data.jsonl").write_text(lines * 3 + cut)
        named = () if tokenizer is None else ("--tokenizer", tokenizer)
        out = tmp_path / f"{len(message)}.json"
        said = refused("lengths", "--dataset", tmp_path / "data.jsonl", *named, "--out", out, *more)
        assert all(part in said for part in message.split(".*")), said
        assert "hydra.text_column" not in said


def test_compressed_files_and_those_beside_the_data(tmp_path, caplog):
    """Hidden files, and descriptions of shards, are left out."""
    folder = tmp_path / "data"
    (folder / ".cache").mkdir(parents=True)
    rows = [{"input_ids": [1] * n} for n in (2, 3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    (folder / "B.JSONL").write_text(lines)
    (folder / "._b.jsonl").write_bytes(b"\0\5\x16\7")
    (folder / ".cache" / "c.jsonl").write_text("{")
    for n in range(3):
        (folder / f"meta{n}.json").write_text('{"shard": 1}')
    for streaming in False, True:
        data = length_stats.load_data(str(folder), split="train", streaming=streaming)
        assert sorted(len(row["input_ids"]) for row in data) == [2, 2, 3, 3]
    assert "the 2 files of .jsonl are read, and 3 of .json are left out" in caplog.text
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfdjunk")
    with pytest.raises(HydraConfigError, match=r"x\.jsonl\.zst cannot be read as json"):
        length_stats.load_data(str(tmp_path / "x.jsonl.zst"), split="train")


@pytest.mark.parametrize("devices", [3, 6])
def test_one_length_and_odd_numbers_of_devices(files, devices):
    (files / "lengths.json").write_text(json.dumps(LengthHistogram.from_counts({7: 3}).to_json()))
    result = accepted(*propose_arguments(files, "--context", 50, "--devices", devices, "--json"))
    found = [Strategy.parse(text) for text in json.loads(result.stdout)["strategies"]]
    assert max(strategy.num_devices for strategy in found) == devices
    (files / "lengths.json").write_text('{"schema": "ds_hydra.lengths/1", "counts": {}}')
    assert "is empty" in refused(*propose_arguments(files, "--context", 50))


def test_training_finds_the_cache_of_lengths(tmp_path):
    """Tokenising counts its calls; the second reader of the same data makes none."""
    data = datasets.Dataset.from_dict({"text": TEXTS})
    data.to_json(tmp_path / "data.jsonl")
    calls = tmp_path / "calls"

    def tokenize(texts):
        with calls.open("a") as file:
            file.write(f"{len(texts)}\n")
        return {"input_ids": [list(range(len(text))) for text in texts]}

    def load():
        return datasets.load_dataset(
            "json",
            data_files=[str(tmp_path / "data.jsonl")],
            split="train",
            cache_dir=str(tmp_path / "cache"),
        )

    length_stats.measure_dataset(load(), tokenize, name="n")
    TokenDataset.from_dataset(load(), context_length=4, tokenize=tokenize)
    assert calls.read_text() == "5\n"


DEEP = "[" * 100_000 + "]" * 100_000


OF_7B = "--profile a800_llama2_7b --histogram github --context 4096"
SEARCH = "search --profile a800_llama2_7b"
INIT = "init --model llama2_7b --device a800"
PROFILE = "profile --model llama2_7b --context 64"
PLAN = "plan --profile a800_llama2_7b --strategies good.json --lengths file.json"
LENGTHS = "lengths --out out.json --dataset"
MISTAKES = [
    (PLAN, DEEP, "is not JSON"),
    (PLAN, f"[{2**63}]", "length 0 is"),
    ("check file.json", DEEP, "is not JSON"),
    ("report .", DEEP + "\n", "metrics.jsonl"),
    ("report none", "", "cannot read none/metrics.jsonl: No such file or directory"),
    ("report one two --out x", "", "--out x is a folder for one run, 2 were given"),
    (f"simulate {OF_7B} --devices 8 --tokens 1000000000000", "", "--tokens"),
    (f"simulate {OF_7B} --devices 1000000", "", "--devices"),
    (f"simulate {OF_7B} --devices 8 --systems megatorn", "", "system 'megatorn' is not known"),
    (f"simulate {OF_7B} --devices 8 --strategies missing.json", "", "cannot read missing.json"),
    (f"simulate {OF_7B} --devices 8 --hardware h10", "", "did you mean 'h100'"),
    (f"simulate {OF_7B} --devices 8 --float8", "", "--float8 goes with --model and --hardware"),
    (f"simulate {OF_7B} --devices 8 --out missing/out.json", "", "whose folder does not exist"),
    ("simulate --case paper/case-study --devices 8", "", "and strategies; leave those"),
    ("simulate --case paper/case-studi", "", "did you mean paper/case-study"),
    ("simulate --profile a800_llama2_7b", "", "--histogram, --devices, --context missing"),
    ("simulate --profile a800_llama2_7b --expert-skew 5", "", "--expert-skew 5 goes with --model"),
    ("simulate --model llama2_7c --hardware h100 --nodes 1", "", "did you mean 'llama2_7b'"),
    ("simulate --model llama2_7b --nodes 1", "", "--model needs --hardware"),
    ("simulate --model llama2_7b --hardware h100", "", "give --nodes or --devices"),
    (f"propose {OF_7B} --devices 1000000", "", "--devices"),
    (f"propose {OF_7B} --devices 8 --profile nothing", "", "not among the profiles"),
    (f"propose {OF_7B} --devices 8 --histogram missing.json", "", "cannot read missing.json"),
    (f"{SEARCH} --memory-gb 80 --devices 1000000", "", "--devices"),
    (f"{SEARCH} --memory-gb 40 --devices 8 --max-batch 4", "", "is 4, below --batch-step (8)"),
    (f"{SEARCH} --memory-gb 80 --devices 6", "", "not a power of two"),
    (f"{SEARCH} --memory-gb 1 --devices 8", "", "no plan fits 1024 MB"),
    (f"{LENGTHS} . --tokenizer file.json", "{}", "cannot load the tokenizer"),
    (f"{LENGTHS} . --tokenizer no/such/one", "{}", "the tokenizer 'no/such/one' does not exist"),
    (f"{LENGTHS} texts/", "", "texts does not exist"),
    (f"{INIT} --devices 8 --context 4096 --device b300", "", "'b300' is not among"),
    (f"{INIT} --devices 8 --context 4096 --model lama2_7b", "", "did you mean 'llama2_7b'?"),
    (f"{PROFILE} --lengths 8,x,32", "", "--lengths is '8,x,32', expected whole numbers"),
    (f"{PROFILE} --lengths 8,16", "", "three different lengths"),
    (f"{PROFILE} --lengths 8,16,128", "", "--lengths has 128, more than --context 64"),
    (f"{PROFILE} --tp 0,1", "", "--tp is '0,1', expected whole numbers of 1 or more"),
    (f"{PROFILE} --out no/such/p.json", "", "whose folder does not exist"),
    ("doctor --device a900", "", "a900"),
    ("doctor --out missing/doctor.json", "", "whose folder does not exist"),
]
"""A command, what the file has that it reads, and what is said of it."""


@pytest.mark.parametrize(("command", "content", "said"), MISTAKES)
def test_mistakes_are_named_without_a_traceback(tmp_path, monkeypatch, command, content, said):
    for name in OF_A_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("file.json", "metrics.jsonl"):
        (tmp_path / name).write_text(content)
    document = {"schema": "ds_hydra.strategies/1", "num_devices": 2, "strategies": ["2x<1,1>"]}
    (tmp_path / "good.json").write_text(json.dumps(document))
    result = invoke(*command.split())
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit), result.exception
    assert said in result.output


def test_two_processes_that_write_a_file_at_once_never_mix(tmp_path):
    path = tmp_path / "out.json"

    def lines():
        yield "first\n"
        if os.fork() == 0:
            write_whole(path, ["second\n"])
            os._exit(0)
        os.wait()
        assert path.read_text() == "second\n"
        yield "first\n"

    write_whole(path, lines())
    assert path.read_text() == "first\nfirst\n"
    assert os.listdir(tmp_path) == ["out.json"]


class Screen(io.StringIO):
    def isatty(self):
        return True


def drawn(file):
    with Progress(total=1000, desc="profiling", file=file) as progress:
        for step in range(1000):
            progress.set_postfix_str(f"step {step} " + "x" * 300)
            progress.update()
        Progress.write("0% of what is logged", file=file)  # as transformers' callback does
    return file.getvalue()


def test_progress_is_a_line_every_tenth_where_there_is_no_terminal():
    text = drawn(io.StringIO())
    assert "\r" not in text
    lines = text.splitlines()[:-1]
    assert [line.split("%")[0].split()[-1] for line in lines] == [
        str(n) for n in range(10, 101, 10)
    ]
    assert max(map(len, lines)) <= 200
    assert "\r" in drawn(Screen())


def test_a_line_that_cannot_be_written_ends_nothing():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    with Progress(total=10, file=Full()) as progress:
        for _ in range(10):
            progress.update()


def test_bars_of_libraries_are_off_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    libraries.enable_progress_bar()
    with no_bars_in_files():
        assert not libraries.is_progress_bar_enabled()
    assert libraries.is_progress_bar_enabled()


class Tee:
    """A stream of a program's own, as trackers put it in place of stderr."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


def closed():
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("stream", [Tee(), None, closed()], ids=["tee", "none", "closed"])
def test_stderr_may_be_any_object(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with no_bars_in_files():
        libraries.enable_progress_bar()
    common.say_loading()
    with common.progress_bar("profiling", "point", lambda show: "inside") as show:
        show(5, 10)
        show(10, 10)


LOADS_TORCHAO = """
import sys
from typer.testing import CliRunner
from ds_hydra.cli import app

line = "init --model llama2_7b --hardware h100 --devices 8 --context 4096 --out c.json"
result = CliRunner().invoke(app, line.split())
print(result.stderr)
assert result.exit_code == 0, result.stderr
assert "torchao" in sys.modules, "transformers imports it"
"""


@pytest.mark.nightly
def test_what_torchao_logs_when_transformers_imports_it_is_not_shown(tmp_path):
    pytest.importorskip("torchao")
    words = [sys.executable, "-c", LOADS_TORCHAO]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for told in ("torchao", "_pytree", "Failed to load"):
        assert told not in done.stdout + done.stderr


WITHOUT_TORCH = """
import json, os, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ("torch", "deepspeed", "accelerate"):
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from typer.testing import CliRunner
from ds_hydra.cli import app

found = []
for folder, line in json.loads(sys.argv[1]):
    os.chdir(folder)
    result = CliRunner().invoke(app, line.split())
    found.append((line, result.exit_code, result.stderr, repr(result.exception)))
print(json.dumps(found))
"""
WITHOUT_TORCH_WORK = ("plan", "lengths", "propose", "fit", "simulate", "search", "report")


def test_without_torch_commands_do_their_work_or_say_what_needs_it(tmp_path):
    lines = [
        (str(write_documents_of(command, tmp_path / f"{command} {number}")), f"{command} {line}")
        for command, (_, lines) in COMMANDS.items()
        for number, line in enumerate(lines)
    ]
    lines.append((str(tmp_path), "doctor"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        env={k: v for k, v in os.environ.items() if k != "HF_DATASETS_DISABLE_PROGRESS_BARS"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(lines)
    for line, code, error, exception in found:
        command = line.split()[0]
        assert "\r" not in error, (line, error)
        if command in WITHOUT_TORCH_WORK:
            assert code == 0, (line, error, exception)
        else:
            assert code == 1, (line, exception)
            assert "error: this command needs torch" in error, line
            assert "pip install torch" in error, line
            assert command in ("profile", "doctor") or ", ".join(WITHOUT_TORCH_WORK) in error, line
