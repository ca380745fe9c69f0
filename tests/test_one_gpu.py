"""The pack for one GPU: its dry run on CPU ranks, and that no step stops the others."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import transformers
from distributed import wait_until

from benchmarks.one_gpu import ceilings, launches, page, prepare, run

ROOT = Path(__file__).parent.parent
LONG_S = 300
"""Only what hangs takes so long."""


def read(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.distributed
def test_every_step_runs_on_cpu_ranks(tmp_path):
    """What needs a GPU is skipped by name, and all else is right."""
    command = [sys.executable, "-m", "benchmarks.one_gpu.run", "--dry-run", "--no-install"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True)
    log = (tmp_path / "log.txt").read_text()[-5000:]
    records = read(tmp_path)
    assert [r for r in records if r.get("is_well") is False] == [], log
    ended = {r["step"] for r in records if r.get("end") == "ended"}
    steps = {s.name: s for _, lanes in run.STEPS for lane in lanes for s in lane}
    assert ended == {"machine"} | {name for name, s in steps.items() if not s.gpu_only}, log
    skipped = {r["step"]: r["skipped"] for r in records if "skipped" in r and "case" not in r}
    assert skipped == {name: s.gpu_only for name, s in steps.items() if s.gpu_only}
    text = (tmp_path / "one_gpu.md").read_text()
    assert text.startswith("# One GPU\n\n**No GPU has been measured yet.**")


@pytest.mark.nightly
@pytest.mark.distributed
def test_ranks_talk_without_nccl():
    """The last way that is tried: copies in the host's memory."""
    command = [sys.executable, "-m", "benchmarks.one_gpu.ranks", "--way", "staged", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    found = subprocess.run(
        [*command, "-m", "benchmarks.one_gpu.probe"],
        cwd=ROOT, check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    told = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    judged = [r["is_well"] for r in told if r.get("is_well") is not None]
    assert judged == [True] * 6


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, flush=True); time.sleep(100)
"""


def test_a_step_that_hangs_or_fails_stops_no_other(tmp_path, monkeypatch):
    told = '{"case": "sum", "found": 2, "wanted": "2", "is_well": true}'
    steps = [
        run.Step(name="hangs", arguments=("-c", HANGS), limit_s=2),
        run.Step(
            name="fails", arguments=("-c", f"print('{told}'); raise OSError('no')"), limit_s=LONG_S
        ),
        run.Step(
            name="ends", arguments=("-c", f"print('{told}'); print('{told[:30]}')"), limit_s=LONG_S
        ),
    ]
    one = run.Run(tmp_path, has_gpu=True, seconds=LONG_S, site=None, nccl="")
    output, wait = Path(one._temporary.name, "hangs.out"), subprocess.Popen.wait

    def wait_for_words(process, timeout=None):
        if timeout == 2:  # however long it takes to come so far
            wait_until(lambda: "child" in output.read_text())
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_words)
    until = time.monotonic() + LONG_S
    assert [one.try_step(s, until, "") for s in steps] == [False, False, True]
    assert not one.try_step(steps[2], time.monotonic() + 1, "")  # no time is left
    ends = {r["step"]: r for r in read(tmp_path) if "end" in r}
    assert [r["end"] for r in ends.values()] == ["hung", "exit code 1", "ended"]
    assert "OSError: no" in ends["fails"]["last_words"]
    assert 'File "<string>", line 4' in ends["hangs"]["last_words"]
    assert [r["step"] for r in read(tmp_path) if r.get("case") == "sum"] == ["fails", "ends"]
    child = int(ends["hangs"]["last_words"].split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_page_shows_what_was_measured_and_what_is_wrong():
    records = [
        {
            "step": "machine",
            "case": "device",
            "found": "NVIDIA H100",
            "wanted": "",
            "is_well": None,
        },
        {
            "step": "speed",
            "case": "8x<1,1>",
            "found": {"passes_ms": 1.5},
            "wanted": "",
            "is_well": None,
        },
        {
            "step": "parity of 2 ranks",
            "case": "llama fp32, 1x<2,1>",
            "found": 2e-06,
            "wanted": "",
            "is_well": True,
        },
        {"step": "speed", "case": "loss", "found": "nan", "wanted": "at most 1", "is_well": False},
        {"step": "speed", "end": "hung", "seconds": 9.0, "last_words": "waiting"},
        {"step": "times", "skipped": "no time was left"},
    ]
    text = page.make(map(json.dumps, records))
    assert text.startswith("# One GPU\n\nMeasured on NVIDIA H100.")
    assert "| speed | hung | 9.0 | 2 | **1** |" in text
    assert "| error of gradients against one process, fp32 | 2e-06 at most, of 1 |" in text
    assert "| host waits of an iteration | not asked |" in text
    assert text.index("## Results") < text.index("## Steps")
    assert "| 8x&lt;1,1> | passes ms 1.5 |  |  |" in text
    assert "| loss | nan | at most 1 | **no** |" in text
    assert "hung after 9.0 s, last words:\n\n    waiting" in text
    assert "| times | skipped |" in text


def test_phases_that_launches_marks_are_there(monkeypatch):
    """It wraps methods of the engine and of ZeRO-3 by their names."""
    marked = []
    monkeypatch.setattr(launches, "mark", lambda owner, name, _: marked.append((owner, name)))
    launches.mark_phases(None)
    assert all(hasattr(owner, name) for owner, name in marked)
    assert len(marked) > 15


def test_modules_of_all_steps_can_be_imported():
    steps = [s for _, lanes in run.STEPS for lane in lanes for s in lane]
    steps += [s for call in run.CALLS for s in call]
    assert all([*run.ROOT.glob(text)] for step in steps for text in step.rests_on)
    for first, second in {step.arguments[:2] for step in steps}:
        if first == "-m":
            assert callable(importlib.import_module(second).main)
        else:  # an example, which other tests run
            assert (run.ROOT / first).is_file()


def test_what_a_wheel_needs_is_carried_or_there(tmp_path):
    """All that the project needs is known, too."""
    prepare.check_requirements(tmp_path)
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        needs = "Requires-Dist: numpy>=2\nRequires-Dist: lost_one\nRequires-Dist: x; extra == 'all'"
        wheel.writestr("a-1.dist-info/METADATA", f"Name: a\n{needs}\n")
    with pytest.raises(SystemExit, match=r"lost-one \(a-1-py3-none-any.whl\); add them to CARRIED"):
        prepare.check_requirements(tmp_path)


def test_bare_attention_is_called_as_a_stage_calls_it():
    """It had failed unseen on an H100: its arguments were those of a day before."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert ceilings.attention_ms(transformers.LlamaConfig(**sizes), (5, 3)) > 0
