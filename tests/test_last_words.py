"""Last words of a process that ends by an error: one sentence, by one rank."""

from __future__ import annotations

import json
import sys
from unittest import mock

import pytest
import torch

from ds_hydra.engine.ranks import agreement, process
from ds_hydra.errors import HydraConfigError, PlanMismatchError, RankLostError


def of_all(rank, error):
    """An error of all ranks, of which `rank` speaks."""
    return agreement.on_all_ranks(error, rank)


CONFIG = HydraConfigError("set 2")
LOST = agreement.said_by(1, RankLostError("rank 3 is gone"))
PAUSE = "pause"


@pytest.mark.parametrize(
    ("error", "rank", "printed"),
    [
        (CONFIG, 0, ["HydraConfigError: set 2"]),
        # Who cannot know whether others fail alike speaks after a pause
        (HydraConfigError("set 2"), 3, [PAUSE, "HydraConfigError: rank 3: set 2"]),
        (of_all(1, HydraConfigError("set 2")), 0, [PAUSE]),
        (of_all(1, HydraConfigError("set 2")), 1, ["HydraConfigError: rank 1: set 2"]),
        (of_all(1, HydraConfigError("set 2")), 2, [PAUSE]),
        (agreement.said_by(1, HydraConfigError("set 2")), 0, [PAUSE, "HydraConfigError: set 2"]),
        *((LOST, rank, ["RankLostError: rank 3 is gone"]) for rank in range(3)),
        (ValueError("mine"), 3, ["ValueError: mine"]),
        (KeyboardInterrupt(), 0, ["KeyboardInterrupt"]),
        (KeyboardInterrupt(), 1, []),
    ],
)
def test_one_rank_says_the_sentence_last_and_a_tracker_hears_every_error(
    error, rank, printed, monkeypatch, capsys
):
    told = []

    def tracker(kind, raised, trace):
        told.append((kind, raised, trace is not None))
        sys.__excepthook__(kind, raised, trace)

    monkeypatch.setattr(process.time, "sleep", lambda _: print(PAUSE, file=sys.stderr))
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except (Exception, KeyboardInterrupt) as raised:
        process._end(tracker, type(raised), raised, raised.__traceback__)
    assert told == [(type(error), error, True)]
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if not line.startswith(("Traceback", " "))]
    assert [line.removeprefix("ds_hydra.errors.") for line in said] == printed
    # The user's own line is among those before it
    has_trace = any("test_last_words.py" in line for line in lines)
    assert has_trace == (printed not in ([], [PAUSE]))


def test_the_first_of_the_ranks_that_fail_speaks_for_all():
    def broadcast(_texts, source, _device):
        return ["HydraConfigError", f"on {source}"]

    with (
        mock.patch.object(agreement, "broadcast_text", broadcast),
        pytest.raises(HydraConfigError, match="rank 1: on 1") as raised,
    ):
        agreement.raise_known(None, [False, True, True], torch.device("cpu"))
    assert agreement.rank_that_says(raised.value) == 1


@pytest.mark.parametrize(
    ("own", "rel_tol", "is_alike"),
    [(1.0, 0.0, True), (2, 1e-6, False), (1.0 + 1e-9, 1e-6, True), (1.0 + 1e-9, 0.0, False)],
)
def test_settings_of_ranks_are_compared(own, rel_tol, is_alike):
    first = json.dumps({"lr": 1.0})
    with (
        mock.patch.object(agreement, "broadcast_text", return_value=[first]),
        mock.patch.object(agreement, "raise_together") as raised,
    ):
        agreement.check_alike({"lr": own}, torch.device("cpu"), rel_tol=rel_tol)
    error, _ = raised.call_args.args
    assert error is None if is_alike else isinstance(error, PlanMismatchError)
