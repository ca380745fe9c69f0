"""SIGTERM as a wish to stop: remembered, and granted by the engine between two iterations."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """Whether SIGTERM has arrived. Installs its handler if `enabled`, in the main thread; else
    SIGTERM ends.
    """

    def __init__(self, enabled: bool) -> None:
        self.is_set = False
        if enabled and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True
