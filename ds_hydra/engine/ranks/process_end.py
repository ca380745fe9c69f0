"""How a process ends whose last collective has just ended.

[Note: Work that outlives its wait]
torch's gloo threads drop the tensors of a collective after its `wait` has returned, and need
Python's lock for that. In an interpreter that is already finalizing they cannot have it: the
process aborts ("terminate called without an active exception"), though all its work is done. A
script that ends right after `save_checkpoint` may meet this.
"""

from __future__ import annotations

import atexit
import functools
import time

_PAUSE_S = 0.2
"""Threads that only wait for Python's lock get it within milliseconds."""


@functools.cache
def let_collectives_end_at_exit() -> None:
    """From now on this process gives its other threads time before it ends. Repeating it changes
    nothing.
    """
    atexit.register(time.sleep, _PAUSE_S)
