"""Freed blocks are kept: page faults are counted in a process of its own, because the setting is
the process's.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, torch
from ds_hydra.engine.ranks.memory import keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page has one fault instead of 512

def faults_of_reuse():
    for _ in range(4):
        torch.zeros(16 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(9):
        torch.zeros(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults_of_reuse(), keep_freed_memory(), faults_of_reuse(), resource.getpagesize())
"""


def run_script(**environment):
    """Faults before, whether it was done, faults after, pages of the 64 MiB that are taken nine
    times.
    """
    names = (
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_MAX_",
        "MALLOC_MMAP_THRESHOLD_",
        "GLIBC_TUNABLES",
    )
    clean = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    before, was_done, after, page = done.stdout.split()[-4:]
    return int(before), was_done == "True", int(after), 64 * 2**20 // int(page)


@pytest.mark.slow
def test_memory_is_reused_without_page_faults():
    before, was_done, after, pages = run_script()
    assert was_done
    assert before > 8 * pages, "nothing to gain here: this proves nothing"
    assert after < before / 2  # most are gone; how often the heap grows is the allocator's


@pytest.mark.slow
def test_the_users_choice_stays():
    before, was_done, after, pages = run_script(MALLOC_TRIM_THRESHOLD_="1000000")
    assert not was_done
    assert min(before, after) > 8 * pages
