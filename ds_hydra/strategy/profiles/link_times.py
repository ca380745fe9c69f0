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

    def at_ends(self, pulls: bool, pushes: bool) -> LinkTimes:
        """Of a phase that pulls, or pushes, something that no other phase does for it."""
        pull_ms, push_ms = pulls * self.pull_ms, pushes * self.push_ms
        return LinkTimes(pull_ms=pull_ms, push_ms=push_ms, step_ms=self.step_ms)


NO_LINKS = LinkTimes()
