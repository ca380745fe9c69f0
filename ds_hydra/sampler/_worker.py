"""The planning process that `BackgroundPlanner` starts: reads batches from stdin, writes plans to
stdout.

Messages are JSON documents, each after its size in bytes (4 bytes, big endian). The process ends
when its stdin ends, so it cannot outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

_SIZE = struct.Struct(">I")
_PARENT_POLL_S = 1.0


def write_message(stream: BinaryIO, document: Mapping[str, Any]) -> None:
    """Writes one message and flushes; raises OSError if the other end is gone."""
    body = json.dumps(document, separators=(",", ":")).encode()
    stream.write(_SIZE.pack(len(body)) + body)
    stream.flush()


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, None where the stream ends (also in the middle of a message)."""
    header = stream.read(_SIZE.size)
    if len(header) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(header)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def _end_with_parent() -> None:
    """Ends this process when its parent is gone even if a fork of the parent still holds our stdin
    open.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def main() -> None:
    """Plans batches until stdin ends. The first message holds the "task": everything but batches
    and corrections.
    """
    # Ctrl-C reaches the whole group; the parent closes our stdin
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not break the protocol
    first = read_message(requests)
    if first is None:
        return

    from ds_hydra.errors import HydraError
    from ds_hydra.sampler.plan import GlobalBatch
    from ds_hydra.sampler.planner.iteration import plan_task
    from ds_hydra.sampler.planner.planner_settings import PlanningTask
    from ds_hydra.sampler.warm_up import warm_up
    from ds_hydra.strategy.profiles.learned import Corrections

    warm_up()
    task = PlanningTask.from_json(first["task"])
    while (request := read_message(requests)) is not None:
        start = time.perf_counter()
        reply: dict[str, Any]
        try:
            corrections = Corrections.from_json(request["corrections"])
            plan = plan_task(task, GlobalBatch.from_json(request), corrections)
            reply = {"plan": plan.to_json()}
        except HydraError as error:
            reply = {"error": {"type": type(error).__name__, "message": str(error)}}
        reply["planning_ms"] = (time.perf_counter() - start) * 1e3
        try:
            write_message(replies, reply)
        except OSError:
            return


if __name__ == "__main__":
    main()
