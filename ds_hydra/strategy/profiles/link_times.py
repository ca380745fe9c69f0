"""How long pull, push and optimizer step of a strategy take, as plain numbers for planner and
simulator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Time of one pull and one push on the slowest node, and of the optimizer, in ms; 0.0 where
    unknown.
    """

    pull_ms: float = 0.0
    push_ms: float = 0.0
    step_ms: float = 0.0


NO_LINKS = LinkTimes()
