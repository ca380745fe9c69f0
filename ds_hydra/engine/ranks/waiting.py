"""Signs that this process waits for another rank: a thread that stands in a collective, an error
in a collective's words.
"""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path

import torch.distributed as dist

_COLLECTIVES = tuple(
    str(Path(dist.__file__).parent / name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
"""Of a handle, and of a device that computes what a collective gives."""

_COLLECTIVE_WORDS = (
    "gloo", "NCCL", "onnection", "Broken pipe", "imed out", "ProcessGroup", "what others need in their home",
)  # fmt: skip


def find_wait(thread_id: int) -> tuple[int, int] | None:
    """Where a thread waits in a collective, equal as long as it stays there; None where it does
    anything else, such as writing a file or talking to a debugger.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return None
    name = frame.f_code.co_filename
    is_wait = name in _COLLECTIVES or _WAITS.search(linecache.getline(name, frame.f_lineno))
    return (id(frame), frame.f_lasti) if is_wait else None


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """Whether an error comes from a collective; then it is worth waiting for the reason."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _COLLECTIVE_WORDS)
