"""Compiled functions: the cache on the disk may be damaged, gone or full, and the numbers stay."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import pickle
import shutil
import sys
from pathlib import Path

import numba
import pytest
from typer.testing import CliRunner

from ds_hydra.cli import app
from ds_hydra.sampler.warm_up import warm_up

caching = pytest.importorskip("ds_hydra.strategy.compiled", exc_type=ImportError)


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


def test_a_start_that_cannot_keep_compiled_code_says_why_it_waits(tmp_path, monkeypatch, caplog):
    def find_none(*_):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("ds_hydra.strategy.compiled.HealingCache", find_none)
    monkeypatch.delenv(caching._SAID_UNCACHED, raising=False)
    assert load_triple(tmp_path)(7) == load_triple(tmp_path)(7) == 21
    assert caplog.text.count("set NUMBA_CACHE_DIR to") == 1


DAMAGES = (
    lambda _: b"",
    lambda content: content[: len(content) // 2],
    lambda _: b"no pickle at all\n" * 9,
    lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
)


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_cache_is_compiled_anew_once(tmp_path, ending):
    assert call(tmp_path) == (21, True)
    assert call(tmp_path) == (21, False)
    for damaged in DAMAGES:
        (path,) = tmp_path.glob(f"__pycache__/*.{ending}")
        path.write_bytes(damaged(path.read_bytes()))
        assert call(tmp_path) == (21, True)
        assert call(tmp_path) == (21, False)


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_code_that_names_a_module_that_has_moved_is_compiled_anew(tmp_path, ending):
    assert call(tmp_path) == (21, True)
    (path,) = tmp_path.glob(f"__pycache__/*.{ending}")
    body = b"cds_hydra.no_such_room\nfunction\n."  # a pickle of a function that was there once
    version = pickle.dumps(numba.__version__, protocol=-1) if ending == "nbi" else b""
    path.write_bytes(version + body + hashlib.sha256(body).digest())
    assert call(tmp_path) == (21, True)
    assert call(tmp_path) == (21, False)


CALLER = """
from {other} import double, PLUS
from ds_hydra.strategy.compiled import compiled

@compiled
def triple(value):
    return double(value) + value + PLUS
"""
CALLEE = """
from ds_hydra.strategy.compiled import compiled

PLUS = {plus}

@compiled
def double(value):
    return {factor} * value
"""


def test_an_edit_of_what_a_function_calls_or_reads_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    other = f"callee_of_{tmp_path.name}"
    (tmp_path / "module.py").write_text(CALLER.format(other=other))

    def call_with(factor, plus):
        (tmp_path / f"{other}.py").write_text(CALLEE.format(factor=factor, plus=plus))
        sys.modules.pop(other, None)
        importlib.invalidate_caches()
        for bytecode in tmp_path.glob(f"__pycache__/{other}.*.pyc"):
            bytecode.unlink()
        return call(tmp_path)

    assert call_with("2.00", "0") == (21, True)
    assert call(tmp_path) == (21, False)
    assert call_with("4", "0") == (35, True)
    assert call_with("4", "1000") == (1035, True)


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


def test_who_waits_for_the_compiler_is_told_once(tmp_path, caplog, monkeypatch):
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        caching._has_said.clear()
        caching._say_once.cache_clear()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        call(tmp_path)
        call(tmp_path)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (rank == "0"), "of the ranks of a host one speaks"
    assert "triple and what it calls, once after an installation" in told[0]


def compiled_so_far():
    """How many versions of each compiled function of the package this process has."""
    return {
        name: len(function.signatures)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith(("ds_hydra.sampler", "ds_hydra.strategy"))
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }


def test_what_plans_and_proposes_is_compiled_by_the_warm_up(tmp_path):
    """What `make install` runs; the first plan, and the first proposal, find all of it."""
    warm_up()
    before = compiled_so_far()
    assert before
    files = ("--profile", "a800_llama2_7b", "--histogram", "github", "--devices", "8")
    for space in ("plain", "full"):
        arguments = [*files, "--context", "4096", "--tokens", "16384", "--batches", "2"]
        out = ["--space", space, "--out", str(tmp_path / "strategies.json")]
        result = CliRunner().invoke(app, ["propose", *arguments, *out])
        assert result.exit_code == 0, result.output
    (tmp_path / "lengths.json").write_text("[4000, 300, 200, 100, 100]")
    names = ("--strategies", str(tmp_path / "strategies.json"))
    lengths = ("--lengths", str(tmp_path / "lengths.json"))
    result = CliRunner().invoke(app, ["plan", *files[:2], *names, *lengths])
    assert result.exit_code == 0, result.output
    after = compiled_so_far()
    assert {name: count for name, count in after.items() if count > before.get(name, 0)} == {}
