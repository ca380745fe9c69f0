"""Real training data that every machine has: the source of the running interpreter's standard
library.

    python examples/stdlib/prepare.py

reads it through `datasets`, trains a byte-level BPE on it with `tokenizers`, and keeps both under
`.cache/`. Every later call with the same interpreter finds them there. About 730 files and 12 MB
(Python 3.11): folders of tests are left out, because they would more than double that.

A sequence is a top-level function or class with what follows it, which have the long tail of real
corpora: median 145 tokens, 2% above 4096.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_hydra.progress import no_bars_in_files
from ds_hydra.sampler.data.dataset import TokenDataset

DEFAULT_CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache"
EOS_TOKEN = "<|endoftext|>"
VOCAB_SIZE = 4096
"""Small, so that the embedding does not outweigh the layers of a model of a few million
parameters.
"""

_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_DEFINITION = re.compile(r"^(?:@.*\n)*(?:async def|def|class)\b", re.MULTILINE)
_LOCK_TIMEOUT_S = 600
_TEXTS_PER_BATCH = 100


@dataclass(frozen=True, slots=True)
class StdlibData:
    """The texts (columns `path` and `text`) and the tokenizer trained on them."""

    dataset: datasets.Dataset
    tokenizer: PreTrainedTokenizerFast
    tokenizer_dir: Path


def prepare(
    cache_dir: str | Path = DEFAULT_CACHE_DIR,
    *,
    source_dir: str | Path | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> StdlibData:
    """The data, made on the first call; the same files give the same data.

    Any number of processes may call this at once: one works and the others wait for it.
    `source_dir` stands in for the folder of the standard library.
    """
    root = Path(source_dir or sysconfig.get_path("stdlib"))
    paths = find_sources(root)
    if not paths:
        raise FileNotFoundError(f"no Python source under {root}; give another folder as source_dir")
    name = f"stdlib-py{platform.python_version()}-{_digest(root, paths, vocab_size)}"
    where = {"root": str(root), "paths": [str(path) for path in paths]}
    return prepare_rows(name, _read_sources, where, cache_dir, vocab_size=vocab_size)


def prepare_rows(
    name: str,
    read: Callable[..., Iterator[dict[str, str]]],
    arguments: dict[str, Any],
    cache_dir: str | Path = DEFAULT_CACHE_DIR,
    *,
    vocab_size: int = VOCAB_SIZE,
) -> StdlibData:
    """The rows ("path", "text") that `read(**arguments)` yields, and a tokenizer trained on them.

    Made once and kept under `name`. Any number of processes may call this at once.
    """
    target = Path(cache_dir) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock", timeout=_LOCK_TIMEOUT_S):
        if not target.exists():
            _build(read, arguments, vocab_size, target)
    return _load(target)


def find_sources(root: Path) -> list[Path]:
    """All Python files under `root` outside of tests and installed packages, sorted."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # What is excluded is not looked through: packages may be tens of thousands of files
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def split_definitions(text: str) -> list[str]:
    """Pieces that join to `text`; one begins at each top-level function or class, or at its
    decorators.
    """
    starts = [match.start() for match in _DEFINITION.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)]) if start < end]


def _digest(root: Path, paths: list[Path], vocab_size: int) -> str:
    """Fingerprint of all that the result depends on."""
    state = hashlib.sha256(f"{vocab_size}\0".encode())
    for path in paths:
        content = path.read_bytes()
        state.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()[:12]


def _build(
    read: Callable[..., Iterator[dict[str, str]]],
    arguments: dict[str, Any],
    vocab_size: int,
    target: Path,
) -> None:
    """Write texts, tokenizer and tokenised texts to `target`, which appears when all of it is
    there.
    """
    unfinished = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    with no_bars_in_files():
        dataset = datasets.Dataset.from_generator(
            read,
            gen_kwargs=arguments,
            cache_dir=str(unfinished / "generated"),
        )
        dataset.save_to_disk(unfinished / "texts")
    shutil.rmtree(unfinished / "generated")
    train_tokenizer(dataset["text"], vocab_size).save_pretrained(unfinished / "tokenizer")
    unfinished.rename(target)
    data = _load(target)
    # Fills the cache of `datasets` beside the texts, so that ranks that start together need not all
    # do it.
    TokenDataset.from_dataset(data.dataset, context_length=2, tokenize=data.tokenizer)


def _read_sources(root: str, paths: list[str]) -> Iterator[dict[str, str]]:
    for path in paths:
        with tokenize.open(path) as file:  # honours the encoding that the file declares
            text = file.read()
        for piece in split_definitions(text):
            yield {"path": str(Path(path).relative_to(root)), "text": piece}


def train_tokenizer(texts: datasets.Column | list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` tokens with the special one among them; no text is unknown
    to it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    batches = (
        texts[start : start + _TEXTS_PER_BATCH] for start in range(0, len(texts), _TEXTS_PER_BATCH)
    )
    tokenizer.train_from_iterator(batches, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN
    )


def _load(target: Path) -> StdlibData:
    return StdlibData(
        dataset=datasets.load_from_disk(target / "texts"),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(target / "tokenizer"),
        tokenizer_dir=target / "tokenizer",
    )


def main() -> None:
    """Prepare the data and say what it holds."""
    start = time.perf_counter()
    data = prepare()
    tokens = TokenDataset.from_dataset(data.dataset, context_length=4096, tokenize=data.tokenizer)
    print(f"{data.tokenizer_dir.parent}: {time.perf_counter() - start:.1f} s")
    print(tokens.report)


if __name__ == "__main__":
    main()
