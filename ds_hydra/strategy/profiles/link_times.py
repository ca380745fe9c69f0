"""How long pull, push and optimizer step of a strategy take, as plain numbers for planner and
simulator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Time of one pull and one push on the slowest node, and of the optimizer, in ms; 0.0 where
    unknown. `overlaps`: whether pull and push run beside propagation, layer by layer, where those
    of others do.
    """

    pull_ms: float = 0.0
    push_ms: float = 0.0
    step_ms: float = 0.0
    overlaps: bool = True

    def num_buckets(self, num_layers: int) -> int:
        """Of `num_layers` that are pulled and pushed one by one: all; 0 where nothing overlaps."""
        return num_layers if self.overlaps else 0


NO_LINKS = LinkTimes()
