"""Compiled functions: the cache on the disk may be damaged, gone or full, and the numbers stay."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
from pathlib import Path

import pytest

caching = pytest.importorskip("ds_hydra.strategy.compiled_cache", exc_type=ImportError)


SOURCE = """
from ds_hydra.strategy.compiled import compiled

@compiled
def triple(value):
    return 3 * value
"""

_numbers = itertools.count()


def load_triple(folder):
    """The function as a new process has it; its cache lies beside its file."""
    path = Path(folder, "module.py")
    if not path.exists():
        path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(f"compiled_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.triple


def call(folder):
    """(result, whether it was compiled and not read from the cache)."""
    triple = load_triple(folder)
    return triple(7), bool(triple.stats.cache_misses)


def garble(content):
    middle = len(content) // 2
    return (
        content[:middle]
        + bytes(255 - byte for byte in content[middle : middle + 9])
        + content[middle + 9 :]
    )


DAMAGES = {
    "empty": lambda _: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "garbled": garble,
    "zeros": lambda content: bytes(len(content)),
    "text": lambda _: b"no pickle at all\n" * 9,
    "a bit": lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
}


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_compiled_anew_once(tmp_path, ending, damage):
    assert call(tmp_path) == (21, True)
    assert call(tmp_path) == (21, False)
    (path,) = tmp_path.glob(f"__pycache__/*.{ending}")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert call(tmp_path) == (21, True)
    assert call(tmp_path) == (21, False)


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_cache_that_cannot_be_read_or_written_is_done_without(tmp_path, ending):
    assert call(tmp_path) == (21, True)
    (path,) = tmp_path.glob(f"__pycache__/*.{ending}")
    path.unlink()
    path.mkdir()
    assert call(tmp_path) == (21, True)


def test_a_full_disk_and_a_folder_without_a_cache(tmp_path, monkeypatch):
    triple = load_triple(tmp_path)
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)

    def refuse(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(caching.CheckedFiles, "_save_index", refuse)
    assert triple(7) == 21
    assert call(tmp_path) == (21, True)
    for locator in caching.FunctionCache._impl_class._locator_classes:
        monkeypatch.setattr(locator, "from_function", classmethod(lambda *_: None))
    assert load_triple(tmp_path)(7) == 21


def test_who_waits_for_the_compiler_is_told_once(tmp_path, caplog):
    caching._say_once.cache_clear()
    call(tmp_path)
    call(tmp_path)
    assert [record.message for record in caplog.records] == [
        "compiling the planner, once after an installation (up to a minute)"
    ]
