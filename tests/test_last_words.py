"""What a process prints that ends by an error: one sentence, last, by one rank."""

from __future__ import annotations

import sys

import pytest

from ds_hydra.engine.ranks import agreement, process
from ds_hydra.errors import HydraConfigError, RankLostError

ERRORS = "ds_hydra.errors."


def end(error, monkeypatch, capsys, *, rank=0, hook=sys.__excepthook__):
    """What a rank prints; a pause is told as one."""
    monkeypatch.setattr(process.time, "sleep", lambda _: print("pause", file=sys.stderr))
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except (Exception, KeyboardInterrupt) as raised:
        process._end(hook, type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err.splitlines()


def test_the_sentence_comes_last_after_the_users_own_lines(monkeypatch, capsys):
    printed = end(HydraConfigError("hydra.a is 1, set 2"), monkeypatch, capsys)
    assert printed[-1] == f"{ERRORS}HydraConfigError: hydra.a is 1, set 2"
    assert printed.count(printed[-1]) == 1
    assert sum("test_last_words.py" in line for line in printed) == 1


@pytest.mark.parametrize(("rank", "printed"), [(0, ["pause"]), (1, None), (2, ["pause"])])
def test_of_an_error_of_all_ranks_one_speaks(rank, printed, monkeypatch, capsys):
    error = agreement.said_by(1, HydraConfigError("no such folder"))
    setattr(error, agreement._ON_ALL_RANKS, True)
    found = end(error, monkeypatch, capsys, rank=rank)
    if printed is None:
        assert "pause" not in found
        assert found[-1] == f"{ERRORS}HydraConfigError: rank 1: no such folder"
    else:
        assert found == printed


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_lost_rank_is_named_by_all_others(rank, monkeypatch, capsys):
    error = agreement.said_by(1, RankLostError("rank 3 is gone"))
    found = end(error, monkeypatch, capsys, rank=rank)
    assert "pause" not in found
    assert found[-1] == f"{ERRORS}RankLostError: rank 3 is gone"


def test_a_rank_that_cannot_know_speaks_after_a_pause(monkeypatch, capsys):
    found = end(HydraConfigError("no such folder here"), monkeypatch, capsys, rank=3)
    assert found[0] == "pause"
    assert found[-1] == f"{ERRORS}HydraConfigError: rank 3: no such folder here"


def test_other_errors_are_left_to_python(monkeypatch, capsys):
    printed = end(ValueError("of the user"), monkeypatch, capsys, rank=3)
    assert printed[0] == "Traceback (most recent call last):"
    assert printed[-1] == "ValueError: of the user"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ctrl_c_the_first_rank_alone_shows_where_it_was(rank, monkeypatch, capsys):
    printed = end(KeyboardInterrupt(), monkeypatch, capsys, rank=rank)
    assert printed[-1:] == ([] if rank else ["KeyboardInterrupt"])


@pytest.mark.parametrize(
    ("error", "rank", "printed"),
    [
        (HydraConfigError("set 2"), 0, ["in the tracker", f"{ERRORS}HydraConfigError: set 2"]),
        (
            agreement.said_by(1, HydraConfigError("set 2")),
            0,
            ["pause", f"{ERRORS}HydraConfigError: set 2"],
        ),
        (ValueError("mine"), 0, ["in the tracker", "ValueError: mine"]),
        (KeyboardInterrupt(), 1, []),
    ],
)
def test_the_hook_of_a_tracker_is_called_for_every_error(error, rank, printed, monkeypatch, capsys):
    told = []

    def tracker(kind, raised, trace):
        told.append((kind, raised, trace is not None))
        print("in the tracker", file=sys.stderr)
        sys.__excepthook__(kind, raised, trace)

    lines = end(error, monkeypatch, capsys, rank=rank, hook=tracker)
    assert told == [(type(error), error, True)]
    assert [line for line in lines if not line.startswith(("Traceback", " "))] == printed
