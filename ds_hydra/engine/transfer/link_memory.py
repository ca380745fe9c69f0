"""What pull and push of a strategy make a rank hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMemory:
    """Most bytes that a strategy makes this rank hold for propagation, activations left out."""

    slice_bytes: int
    gradient_bytes: int
    exchange_bytes: int
    """Packed buffers: two rounds in flight have four, each as large as the largest.

    Memory of the CPU is handed out with gaps, which may add as much again.
    """
    relayed_bytes: int
    """What this rank holds of other nodes' shards (pull) or sums for them (push), with node-aware
    routes.
    """
