import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from ds_hydra.sampler.data.dataset import TokenDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "stdlib"))

import prepare

FILES = {
    "b.py": "import os\n\n\ndef f(x):\n    return x + 1\n",
    "a.py": "'''Doc.'''\nVALUE = 1\n",
    "package/c.py": "# -*- coding: latin-1 -*-\nclass C:\n    name = 'é'\n",
    "empty.py": "",
    "test/t.py": "raise SystemExit",
    "package/tests/t.py": "raise SystemExit",
    "site-packages/other.py": "raise SystemExit",
    "notes.txt": "no source",
}


@pytest.fixture
def source_dir(tmp_path):
    root = tmp_path / "lib"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1" if "latin-1" in text else "utf-8"))
    return root


def prepare_small(tmp_path, source_dir):
    return prepare.prepare(tmp_path / "cache", source_dir=source_dir, vocab_size=300)


def test_sources_are_read_without_tests_and_installed_packages(tmp_path, source_dir):
    data = prepare_small(tmp_path, source_dir)
    assert data.dataset["path"][:] == ["a.py", "b.py", "b.py", "package/c.py", "package/c.py"]
    assert "".join(data.dataset["text"]) == "".join(
        FILES[name] for name in ("a.py", "b.py", "package/c.py")
    )


def test_every_text_survives_the_tokenizer(tmp_path, source_dir):
    tokenizer = prepare_small(tmp_path, source_dir).tokenizer
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer.eos_token_id) == prepare.EOS_TOKEN
    for text in [*FILES.values(), "\x00 ünknown \U0001f40d\n\n\t  x"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("x = 1\n", ["x = 1\n"]),
        ("def f(): 1\nclass C: 2\n", ["def f(): 1\n", "class C: 2\n"]),
        (
            "a\n\n@d\n@e(1)\nasync def f():\n    def g(): 1\nb\n",
            ["a\n\n", "@d\n@e(1)\nasync def f():\n    def g(): 1\nb\n"],
        ),
        ("default = 1\nclassic = 2\n", ["default = 1\nclassic = 2\n"]),
    ],
)
def test_definitions(text, pieces):
    assert prepare.split_definitions(text) == pieces


def test_the_second_call_finds_everything_and_other_sources_are_another_data_set(
    tmp_path, source_dir, monkeypatch
):
    first = prepare_small(tmp_path, source_dir)
    elsewhere = prepare_small(tmp_path / "two", source_dir)
    one, two = (data.tokenizer_dir / "tokenizer.json" for data in (first, elsewhere))
    assert one.read_bytes() == two.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_build", None)
        second = prepare_small(tmp_path, source_dir)
    assert second.tokenizer_dir == first.tokenizer_dir
    assert second.dataset[:] == first.dataset[:]
    changed = FILES["a.py"].replace("1", "2")
    (source_dir / "a.py").write_text(changed)
    assert prepare_small(tmp_path, source_dir).dataset["text"][0] == changed
    assert first.dataset["text"][0] == FILES["a.py"]


def test_an_interrupted_preparation_is_done_again(tmp_path, source_dir, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "train_tokenizer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_small(tmp_path, source_dir)
    (unfinished,) = (tmp_path / "cache").glob("*.tmp")
    (unfinished / "stray").touch()
    data = prepare_small(tmp_path, source_dir)
    assert len(data.dataset) == 5
    assert {path.name for path in data.tokenizer_dir.parent.iterdir()} == {"texts", "tokenizer"}
    assert not unfinished.exists()


def interrupt(*_):
    raise KeyboardInterrupt


def test_tokenising_is_already_in_the_cache(tmp_path, source_dir):
    data = prepare_small(tmp_path, source_dir)
    before = sorted((tmp_path / "cache").rglob("*.arrow"))
    tokens = TokenDataset.from_dataset(data.dataset, context_length=64, tokenize=data.tokenizer)
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == before
    assert tokens.report.num_without_label == 0
    assert tokens[0]["input_ids"][-1] == data.tokenizer.eos_token_id


def test_processes_that_start_together_prepare_once(tmp_path, source_dir):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        digests = pool.starmap(prepare_and_stamp, [(tmp_path, source_dir)] * 3)
    assert len(set(digests)) == 1


def prepare_and_stamp(tmp_path, source_dir):
    data = prepare_small(tmp_path, source_dir)
    time.sleep(0.1)  # keeps the pool from giving all three calls to one process
    return (data.tokenizer_dir / "tokenizer.json").stat().st_mtime_ns
