"""Notes of the engine are read by who starts it, unless the program has logging of its own."""

import io
import logging
import sys

import pytest
from distributed import run_distributed
from engines import start_hydra
from models import tiny

from ds_hydra.progress import show_notes

PACKAGE = logging.getLogger("ds_hydra")


def without_logging(monkeypatch, handlers=()):
    """Be in a program that has set up these handlers, which gets this stderr; called by the test
    itself, as pytest adds handlers of its own before.
    """
    monkeypatch.setattr(logging.root, "handlers", list(handlers))
    monkeypatch.setattr(PACKAGE, "handlers", [])
    monkeypatch.setattr(PACKAGE, "level", logging.NOTSET)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    PACKAGE.manager._clear_cache()
    return sys.stderr


def note():
    child = logging.getLogger("ds_hydra.engine.anything")
    child.info("proposed: 2x<1,1>")
    child.warning("rows were cut")


@pytest.mark.parametrize(
    ("rank", "level", "seen"),
    [
        ("0", None, ["INFO", "WARNING"]),
        ("1", None, ["WARNING"]),
        ("1", logging.INFO, ["INFO", "WARNING"]),
        ("0", logging.ERROR, []),
    ],
)
def test_the_first_rank_shows_notes_and_every_rank_warnings(monkeypatch, rank, level, seen):
    stderr = without_logging(monkeypatch)
    monkeypatch.setenv("RANK", rank)
    show_notes(level)
    show_notes(level)  # as for a second engine
    note()
    lines = stderr.getvalue().splitlines()
    assert [line.split("] [")[1].split("]")[0] for line in lines] == seen
    assert all("] ds_hydra: " in line for line in lines)


def test_logging_of_the_program_stays_as_it_is(monkeypatch):
    own = logging.StreamHandler(io.StringIO())
    own.setFormatter(logging.Formatter("mine %(levelname)s"))
    stderr = without_logging(monkeypatch, [own])
    show_notes(None)
    note()
    assert own.stream.getvalue().splitlines() == ["mine WARNING"]
    assert stderr.getvalue() == ""
    PACKAGE.setLevel(logging.INFO)
    note()
    assert own.stream.getvalue().count("mine INFO") == 1
    assert stderr.getvalue() == ""


def notes_of_an_engine(level):
    logging.root.handlers, sys.stderr = [], io.StringIO()
    sections = {} if level is None else {"log_level": level}
    start_hydra(tiny("llama"), hydra={"strategies": ["2x<1,1>"]}, **sections)
    return sys.stderr.getvalue()


@pytest.mark.distributed
def test_an_engine_says_what_it_chooses_among():
    first, other = run_distributed(notes_of_an_engine, 2, None)
    assert "[INFO] ds_hydra: 1 candidate strategy on 2 ranks (2x<1,1>)" in first
    assert "INFO" not in other
    assert run_distributed(notes_of_an_engine, 2, "ERROR") == ["", ""]
