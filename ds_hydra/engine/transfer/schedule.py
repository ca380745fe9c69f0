"""List of an iteration's transfers: weights that come and gradients that go, in order. Pure.

[Note: Transfers]
An iteration is planned as one list of transfers (`TransferSchedule`), which `session.py` carries
out. Layers in the window take turns in its slots: they are gathered for every pass. Weights outside
of it have memory of their own and are kept for the iteration; where none is gathered, the window is
empty.

| weights  | `PULL`                             | `PUSH`                                         |
|----------|------------------------------------|------------------------------------------------|
| kept     | all buckets, at once               | a bucket, once its gradients are complete      |
| gathered | a layer before it is used, and     | a layer, after its backward pass of each       |
|          | again before its backward pass     | micro-batch                                    |

*Events.* `after` of a transfer is the number of an event of this rank's computation. Where layers
take turns in slots, event n is that computation leaves use n: a use is a forward or backward pass
of one layer, or both where they follow each other. Where weights are kept, event n is that the
gradients of bucket n are complete. The last event, `end`, is that computation is over. `AT_ONCE`
waits for none.

*Order.* Transfers are carried out in the order of the list. All are rounds of a link, collective
over all ranks, so every rank has the same rounds in the same order, also one that has fewer
micro-batches, or none. Gathered layers have the rounds of the pipeline with the most micro-batches:
pipelines run in lockstep, which costs nothing where each has one micro-batch.

*No rank waits for itself.* Transfers are sorted by `after`. Computation that begins use n waits
for the transfers with `needed_by` n, whose events lie before n. Every transfer before these in the
list waits for an earlier event still, which this rank has left.

*No rank waits for another's computation, kept weights.* No pull waits for an event, and all pulls
precede all pushes. A push waits for gradients of this rank. Computation waits for no push before
its end. So computation never waits for a round that waits for computation. `session.py` posts no
push before this rank has launched its passes: another stage may wait for one of them, and its part
of the round would never come.

A rank may have no bucket in a push round: its stage has fewer layers. That round waits for the
gradients of the rank's last bucket. It could be posted at once, but a receive that is posted before
the rank computes would occupy an accelerator all the while.

*Phases* of gathered layers that need the same slices have one list, in which the micro-batches of
one phase follow those of the other: the layers with which a phase begins are in their slots, where
the phase before has left them, and its gradients travel beside the next one's first passes. A rank
that has fewer micro-batches in a phase than others leaves its other uses before the next one
begins. Ranks that compute together are then in the same use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from ds_hydra.records.timeline import EventKind
from ds_hydra.strategy.profiles.memory_model import GATHER_WINDOW

AT_ONCE = -1
"""The event before all others."""
NEVER = -1
"""Use of a transfer that no use of the window needs."""


class Transfer(NamedTuple):
    """One transfer of `bucket`, carried out once event `after` is recorded: a round of a link, of
    shards to slices (`PULL`) or of gradients to shards (`PUSH`).
    """

    kind: EventKind
    bucket: int
    after: int = AT_ONCE
    needed_by: int = NEVER
    """The first use that may not begin before it is over."""


class Use(NamedTuple):
    """Passes of one layer that follow each other; `position` is its place in the window."""

    position: int
    ends_backward: bool
    """Whether its gradient of a micro-batch is there at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The layers of one stage that take turns in slots: their buckets, and whether backward reads
    them.

    A layer's slot is its place among them modulo the window, so neighbours never share one.
    Backward does not come to layers below the first trained parameter.
    """

    buckets: tuple[int, ...] = ()
    has_backward: tuple[bool, ...] = ()

    @property
    def slot_of(self) -> dict[int, int]:
        """The slot of each bucket."""
        return {bucket: position % GATHER_WINDOW for position, bucket in enumerate(self.buckets)}

    def uses(self, passes: Iterable[EventKind]) -> list[Use]:
        """The uses in which `passes` come to the layers, in order.

        >>> window = Window(buckets=(1, 2, 3), has_backward=(True,) * 3)
        >>> [use.position for use in window.uses([EventKind.FORWARD, EventKind.BACKWARD])]
        [0, 1, 2, 1, 0]
        """
        forward = range(len(self.buckets))
        backward = [position for position in reversed(forward) if self.has_backward[position]]
        order = [
            (position, pass_)
            for pass_ in passes
            for position in (forward if pass_ is EventKind.FORWARD else backward)
        ]
        return [
            Use(position, any(pass_ is EventKind.BACKWARD for _, pass_ in its_passes))
            for position, its_passes in groupby(order, key=lambda entry: entry[0])
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSchedule:
    """The transfers of an iteration on one rank, in order: [Note: Transfers]."""

    transfers: tuple[Transfer, ...]
    end: int
    """The last event: computation is over."""
    window: Window = field(default_factory=Window)
    """The layers that take turns in slots."""
    uses: tuple[int, ...] = ()
    """Buckets of the window in the order of use."""
    phases: tuple[int, ...] = ()
    """The use with which each phase begins; empty where ranks do not wait for each other's."""
    waits_for_gradients: bool = False
    """Whether events are complete gradients of buckets; else they are uses."""
    depth: int = 1
    """Rounds of a link on the wire at a time."""


def plan_transfers(
    window: Window,
    num_buckets: int,
    num_rounds: int,
    num_micro_batches: Sequence[int] = (),
    *,
    training: bool,
    pushes: bool,
) -> TransferSchedule:
    """The transfers of a rank with `num_buckets` buckets, where the most that a rank has is
    `num_rounds`; in each phase the pipeline with the most micro-batches has `num_micro_batches`.

    Buckets outside of the window are pulled once. Their gradients add up in fp32, and are pushed
    when they are complete; at the end where others take turns, as a layer that is tied with
    another one has both of their gradients.

    >>> def show(*args):
    ...     made = plan_transfers(*args, training=True, pushes=True)
    ...     return [f"{t.kind.value} {t.bucket} after {t.after}" for t in made.transfers]
    >>> show(Window(), 1, 2)
    ['pull 0 after -1', 'pull 1 after -1', 'push 1 after 0', 'push 0 after 0']
    >>> show(Window(buckets=(0, 1, 2), has_backward=(True,) * 3), 3, 3, [1])[2:]
    ['pull 2 after 0', 'pull 0 after 2', 'push 2 after 2', 'push 1 after 3', 'push 0 after 4']
    """
    passes = [EventKind.FORWARD, EventKind.BACKWARD] if training else [EventKind.FORWARD]
    uses = window.uses(passes * sum(num_micro_batches))
    takes_turns = bool(window.buckets)
    end = len(uses) if takes_turns else num_buckets
    stays = [bucket for bucket in range(num_rounds) if bucket not in window.buckets]
    # A rank without a pipeline has no gradients to wait for; its computation is over at once.
    is_early = not takes_turns and num_buckets > 0
    transfers = [Transfer(EventKind.PULL, bucket) for bucket in stays]
    transfers += _take_turns(window, uses, pushes=pushes)
    # Backward completes the last bucket first. A round beyond a rank's buckets waits for the last
    # one: a receive would occupy the device before.
    for bucket in reversed(stays) if pushes else ():
        own = min(bucket, num_buckets - 1)
        transfers.append(Transfer(EventKind.PUSH, bucket, own if is_early else end))
    before = accumulate(num_micro_batches[:-1], initial=0)
    # A phase begins in the use in which the one before ends where both are of the same layer.
    # Counted back from the end of its first forward, which uses each layer once.
    begins = [
        len(window.uses([*passes * n, EventKind.FORWARD])) - len(window.buckets) for n in before
    ]
    return TransferSchedule(
        transfers=tuple(transfers),
        end=end,
        window=window,
        uses=tuple(window.buckets[use.position] for use in uses),
        phases=tuple(begins) if takes_turns else (),
        waits_for_gradients=pushes and not takes_turns,
        # While one round of kept weights is on the wire the next one is packed.
        depth=1 if takes_turns else 2,
    )


def _take_turns(window: Window, uses: Sequence[Use], *, pushes: bool) -> list[Transfer]:
    """The transfers of the window's layers, each as early as its slot allows.

    Turning from forward to backward finds the last layers still in their slots, and back again the
    first ones: these are not brought again.
    """
    transfers = []
    content, last_use = [-1] * GATHER_WINDOW, [AT_ONCE] * GATHER_WINDOW
    gradient_of: dict[int, int] = {}  # slot: the use that left a gradient there
    for number, use in enumerate(uses):
        position = use.position
        slot = position % GATHER_WINDOW
        bucket = window.buckets[position]
        # The slot is free once computation has left the layer that was in it.
        if content[slot] != position:
            content[slot] = position
            transfers.append(Transfer(EventKind.PULL, bucket, last_use[slot], number))
        if use.ends_backward and pushes:
            # The gradient before in this slot has to be gone when backward writes the next one.
            if slot in gradient_of:
                left = gradient_of[slot]
                before = window.buckets[uses[left].position]
                transfers.append(Transfer(EventKind.PUSH, before, left, number))
            gradient_of[slot] = number
        last_use[slot] = number
    if pushes:
        # Nothing is written to these slots any more: no use waits for their push.
        transfers += [
            Transfer(EventKind.PUSH, window.buckets[uses[left].position], left)
            for left in gradient_of.values()
        ]
    # A layer before a gradient: computation waits for the layer first. The sort is stable.
    return sorted(transfers, key=lambda t: (t.after, t.kind is EventKind.PUSH))
