"""The pack for one GPU: its dry run on CPU ranks, and that no step stops the others."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import transformers
from distributed import wait_until

from benchmarks.one_gpu import ceilings, launches, page, prepare, ranks, run
from benchmarks.one_gpu.trim_fatbin import MAGIC, trim
from ds_hydra.environment import WANTED

ROOT = Path(__file__).parent.parent
LONG_S = 300
"""Only what hangs takes so long."""


def read(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_memory_is_compared_with_the_formula(tmp_path):
    """The step that calls most of the planner: it had failed unseen on the first GPU."""
    command = [sys.executable, "-m", "benchmarks.one_gpu.run", "--dry-run", "--no-install"]
    options = ["--only", "memory of one of 8", "--out", str(tmp_path)]
    subprocess.run([*command, *options], cwd=ROOT, check=True)
    found = [r for r in read(tmp_path) if r["step"] == "memory of one of 8" and "found" in r]
    assert len(found) == 9
    assert all(r["found"]["formula_gb"] > 0 for r in found)


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


def test_who_ends_a_run_ends_its_steps(tmp_path):
    one = run.Run(tmp_path, has_gpu=True, seconds=LONG_S, site=None, nccl="")
    waits = ("-c", f"import time; time.sleep({2 * LONG_S})")
    step = run.Step(name="waits", arguments=waits, limit_s=LONG_S)
    until = time.monotonic() + LONG_S
    lane = threading.Thread(target=one._run_lane, args=((step, step), until, ()))
    lane.start()
    wait_until(lambda: one._running)
    one.stop()
    lane.join()
    assert [r["end"] for r in read(tmp_path)] == ["exit code -15"]


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


def test_answered_questions_are_left_out_until_their_files_change(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    file = tmp_path / "rests.py"
    file.write_text("1")
    told = '{"case": "sum", "found": 2, "wanted": "2", "is_well": true}'
    step = run.Step(
        name="asks", arguments=("-c", f"print('{told}')"), limit_s=30, rests_on=("*.py",)
    )
    other = run.Step(name="asks anew", arguments=step.arguments, limit_s=30)

    def ask(answered):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        one = run.Run(folder, has_gpu=True, seconds=60, site=None, nccl="", answered=answered)
        one._run_lane((step, other), time.monotonic() + 60, ())
        return read(folder), run.read_answers(folder / "results.jsonl")

    records, answered = ask({})
    assert [r["step"] for r in records if r.get("end") == "ended"] == ["asks", "asks anew"]
    assert answered == {"asks": step.digest()}
    records, _ = ask(answered)
    assert [r["step"] for r in records if "skipped" in r] == ["asks"]
    file.write_text("2")
    records, _ = ask(answered)
    assert not [r for r in records if "skipped" in r]
    assert run.read_answers(run.ANSWERS) == {}  # lines of earlier runs have no digests


def test_calls_of_half_an_hour_fit_and_faults_come_first():
    assert [steps[0].name for steps in run.CALLS] == [
        "soak of 4 ranks",
        "launches",
        "iteration of 7B",
    ]
    names = [step.name for steps in run.CALLS for step in steps]
    assert len(names) == len(set(names))
    for steps in run.CALLS:
        assert sum(step.limit_s for step in steps) <= 1.15 * run.MOST_S
    ends = [
        lane for _, lanes in run.STEPS[:-1] for lane in lanes for s in lane if "memory" in s.name
    ]
    assert not ends  # what measures memory runs alone
    for step in (s for _, lanes in run.STEPS for lane in lanes for s in lane):
        assert all([*run.ROOT.glob(text)] for text in step.rests_on), step.name


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
    for first, second in {step.arguments[:2] for step in steps}:
        if first == "-m":
            assert callable(importlib.import_module(second).main)
        else:  # an example, which other tests run
            assert (run.ROOT / first).is_file()


def test_steps_run_under_the_settings_of_training():
    assert WANTED == run.DESIGN
    steps = [s for _, lanes in run.STEPS for lane in lanes for s in lane]
    others = [s.name for s in steps if not s.environment.items() >= WANTED.items()]
    assert others == ["queues by default", "queues set late"]


def test_ranks_are_hosts_of_their_own_for_nccl():
    own = [ranks.environment(rank, 2, 1234, "hostid") for rank in (0, 1)]
    assert [e["NCCL_HOSTID"] for e in own] == ["rank0", "rank1"]
    assert {e["LOCAL_RANK"] for e in own} == {"0"}
    shared = ranks.environment(1, 2, 1234, "multirank", "/a/libnccl.so.2")
    assert "NCCL_HOSTID" not in shared
    assert shared["LD_PRELOAD"] == "/a/libnccl.so.2"


def test_what_a_wheel_needs_is_carried_or_there(tmp_path):
    """All that the project needs is known, too."""
    prepare.check_requirements(tmp_path)
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        needs = "Requires-Dist: numpy>=2\nRequires-Dist: lost_one\nRequires-Dist: x; extra == 'all'"
        wheel.writestr("a-1.dist-info/METADATA", f"Name: a\n{needs}\n")
    with pytest.raises(SystemExit, match=r"lost-one \(a-1-py3-none-any.whl\); add them to CARRIED"):
        prepare.check_requirements(tmp_path)


def test_device_code_of_other_architectures_is_blanked(tmp_path):
    def entry(kind, architecture, size):
        return (
            struct.pack("<HHIQ", kind, 1, 64, size).ljust(28)
            + struct.pack("<I", architecture)
            + bytes(32)
        )

    parts = [(2, 80, b"a" * 100), (2, 90, b"b" * 50), (1, 90, b"c" * 30)]
    body = b"".join(entry(kind, arch, len(code)) + code for kind, arch, code in parts)
    library = b"head" + struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body + b"tail"
    (tmp_path / "library").write_bytes(library)
    found = trim(tmp_path / "library", tmp_path / "out", {90})
    assert found == {(80, False): 100, (90, True): 50, (90, False): 30}
    out = (tmp_path / "out").read_bytes()
    assert out == library.replace(b"a" * 100, bytes(100)).replace(b"c" * 30, bytes(30))


def test_bare_attention_is_called_as_a_stage_calls_it():
    """It had failed unseen on an H100: its arguments were those of a day before."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert ceilings.attention_ms(transformers.LlamaConfig(**sizes), (5, 3)) > 0
