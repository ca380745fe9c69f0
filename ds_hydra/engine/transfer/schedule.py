"""Which weights come and which gradients go in an iteration, in which order: a list. Pure.

[Note: Transfers]
An iteration is planned as one list of transfers (`TransferSchedule`). `session.py` carries it out,
whatever the weights: kept for the iteration, streamed from a home, or gathered for every pass.

| weights  | `PULL`, `LOAD`                     | `PUSH`, `STORE`                                |
|----------|------------------------------------|------------------------------------------------|
| kept     | all buckets, at once               | a bucket, once its gradients are complete      |
| gathered | a layer before it is used, and     | a layer, after its backward pass of each       |
|          | again before its backward pass     | micro-batch                                    |
| streamed | the same, of slices that are       | at the end, gradients of stages that do not    |
|          | copied                             | stream; a hook adds a streamed gradient        |

*Events.* `after` of a transfer is the number of an event of this rank's computation. Where layers
take turns in slots, event n is that computation leaves use n: a use is a forward or backward pass
of one layer, or both where they follow each other. Where weights are kept, event n is that the
gradients of bucket n are complete. The last event, `end`, is that computation is over. `AT_ONCE`
waits for none.

*Order.* Transfers are carried out in the order of the list. `PULL` and `PUSH` are rounds of a link,
collective over all ranks, so every rank has the same rounds in the same order, also one that has
fewer micro-batches, or none. Gathered layers have the rounds of the pipeline with the most
micro-batches: pipelines run in lockstep, which costs nothing where each has one micro-batch. `LOAD`
and `STORE` are this rank's alone, so ranks may differ.

*No rank waits for itself.* Transfers are sorted by `after`. Computation that begins use n waits
for the transfers with `needed_by` n, whose events lie before n. Every transfer before these in the
list waits for an earlier event still, which this rank has left.

*No rank waits for another's computation, kept weights.* No pull waits for an event, and all pulls
precede all pushes. A push waits for gradients of this rank. Computation waits for no push before
its end. So computation never waits for a round that waits for computation. On an accelerator a
launch may wait for the device, and so for a push: there `session.py` posts no push before this rank
has launched its passes.

A rank may have no bucket in a push round: its stage has fewer layers. That round waits for the
gradients of the rank's last bucket. It could be posted at once, but a receive that is posted before
the rank computes would occupy an accelerator all the while.

Without overlap the computing thread carries transfers out itself, when it records their event. It
may not push inside a backward pass then: another stage may wait for this backward pass, and its
part of the round would never come. So kept weights are pushed at the end.

*Phases* of gathered layers that need the same slices have one list, in which the micro-batches of
one phase follow those of the other: the layers with which a phase begins are in their slots, where
the phase before has left them, and its gradients travel beside the next one's first passes. A rank
that has fewer micro-batches in a phase than others leaves its other uses before the next one
begins. Ranks that compute together are then in the same use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, groupby
from typing import NamedTuple

from ds_hydra.engine.parallel.one_f_one_b import Pass, one_forward_one_backward
from ds_hydra.engine.ranks.hosts import ALLOCATORS
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.profiles.memory_model import STREAM_WINDOW
from ds_hydra.zero_link import ParamSpec, RankBuckets, Region

AT_ONCE = -1
"""The event before all others."""
NEVER = -1
"""No use of the window needs the transfer."""


class Kind(str, Enum):
    """What a transfer does."""

    PULL = "pull"
    """Shards of all ranks to slices: a round of a link."""
    PUSH = "push"
    """Gradients to the shards of all ranks: a round of a link."""
    LOAD = "load"
    """Weights of the home to slices."""
    STORE = "store"
    """Gradients to the sums of the home."""

    @property
    def is_bringing(self) -> bool:
        """Whether weights come."""
        return self in (Kind.PULL, Kind.LOAD)


class Transfer(NamedTuple):
    """One transfer of `bucket`, carried out once event `after` is recorded."""

    kind: Kind
    bucket: int
    after: int = AT_ONCE
    needed_by: int = NEVER
    """The first use that may not begin before it is over."""
    readers: frozenset[Pass] = frozenset(Pass)
    """Kinds of passes that read what is brought."""


class Use(NamedTuple):
    """Passes of one layer that follow each other; `position` is its place in the window."""

    position: int
    passes: frozenset[Pass]

    @property
    def ends_backward(self) -> bool:
        """Whether its gradient of a micro-batch is there at the end."""
        return Pass.BACKWARD in self.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The layers of one stage that take turns in slots: their buckets, and whether backward reads
    them.

    A layer's slot is its place among them modulo the window, so neighbours never share one.
    Backward does not come to layers below the first trained parameter.
    """

    buckets: tuple[int, ...] = ()
    has_backward: tuple[bool, ...] = ()
    recomputed: frozenset[int] = frozenset()
    """Buckets whose layers run forward again in backward."""

    @property
    def slot_of(self) -> dict[int, int]:
        """The slot of each bucket."""
        return {bucket: position % STREAM_WINDOW for position, bucket in enumerate(self.buckets)}

    def uses(self, passes: Iterable[Pass]) -> list[Use]:
        """The uses in which `passes` come to the layers, in order.

        >>> window = Window(buckets=(1, 2, 3), has_backward=(True,) * 3)
        >>> [use.position for use in window.uses([Pass.FORWARD, Pass.BACKWARD])]
        [0, 1, 2, 1, 0]
        """
        forward = range(len(self.buckets))
        backward = [position for position in reversed(forward) if self.has_backward[position]]
        order = [
            (position, pass_)
            for pass_ in passes
            for position in (forward if pass_ is Pass.FORWARD else backward)
        ]
        return [
            Use(position, frozenset(pass_ for _, pass_ in its_passes))
            for position, its_passes in groupby(order, key=lambda entry: entry[0])
        ]

    def readers(self, use: Use) -> frozenset[Pass]:
        """Kinds of passes that read the weights in `use`."""
        runs_again = use.ends_backward and self.buckets[use.position] in self.recomputed
        return use.passes | {Pass.FORWARD} if runs_again else use.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStreams:
    """Whether a stage's buckets stream, and which slices have to be copied."""

    is_streamed: bool = False
    """Whether gradients are added after every micro-batch."""
    window: Window = field(default_factory=Window)
    """The buckets that stream with slices that are copied, without the ones that share a
    parameter.
    """
    copied: frozenset[int] = frozenset()
    """Parameters that are copied: their slices are not in one piece."""


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


def plan_kept(
    num_rounds: int, num_buckets: int, *, pushes: bool, overlap: bool
) -> TransferSchedule:
    """Weights that stay: a rank with `num_buckets` buckets, where the most that a rank has is
    `num_rounds`.

    >>> schedule = plan_kept(2, 1, pushes=True, overlap=True)
    >>> [f"{t.kind.value} {t.bucket} after {t.after}" for t in schedule.transfers]
    ['pull 0 after -1', 'pull 1 after -1', 'push 1 after 0', 'push 0 after 0']
    """
    transfers = [Transfer(Kind.PULL, bucket) for bucket in range(num_rounds)]
    # Backward completes the last bucket first.
    for bucket in reversed(range(num_rounds)) if pushes else ():
        # A round beyond its buckets waits for the last one: a receive would occupy the device
        # before.
        own = min(bucket, num_buckets - 1)
        # A rank without a pipeline has no gradients to wait for; its computation is over at once.
        is_early = overlap and num_buckets > 0
        transfers.append(Transfer(Kind.PUSH, bucket, own if is_early else num_buckets))
    return TransferSchedule(
        transfers=tuple(transfers),
        end=num_buckets,
        waits_for_gradients=pushes and overlap,
        # While one round is on the wire the next one is packed.
        depth=2,
    )


def plan_gathered(
    window: Window,
    num_buckets: int,
    num_micro_batches: Sequence[int],
    *,
    training: bool,
    pushes: bool,
) -> TransferSchedule:
    """Layers that all ranks gather for every pass; in each phase the pipeline with the most
    micro-batches has `num_micro_batches`.

    Buckets outside of the window share a parameter with another one (tied embeddings). They are
    pulled once, their gradients add up in fp32 and are pushed at the end.

    >>> window = Window(buckets=(0, 1, 2), has_backward=(True,) * 3)
    >>> schedule = plan_gathered(window, 3, [1], training=True, pushes=True)
    >>> [f"{t.kind.value} {t.bucket}" for t in schedule.transfers]
    ['pull 0', 'pull 1', 'pull 2', 'pull 0', 'push 2', 'push 1', 'push 0']
    """
    passes = [Pass.FORWARD, Pass.BACKWARD] if training else [Pass.FORWARD]
    uses = window.uses(passes * sum(num_micro_batches))
    before = accumulate(num_micro_batches[:-1], initial=0)
    # A phase begins in the use in which the one before ends where both are of the same layer.
    begins = [len(window.uses([*passes * n, Pass.FORWARD])) - len(window.buckets) for n in before]
    kept = [bucket for bucket in range(num_buckets) if bucket not in window.buckets]
    schedule = _plan_window(
        window,
        uses,
        first=[Transfer(Kind.PULL, bucket) for bucket in kept],
        last=[Transfer(Kind.PUSH, b, len(uses)) for b in reversed(kept) if training and pushes],
        bringing=Kind.PULL,
        taking=Kind.PUSH if pushes else None,
    )
    return replace(schedule, phases=tuple(begins))


def plan_streamed(
    streams: StageStreams, buckets: RankBuckets, passes: Sequence[Pass], *, training: bool
) -> TransferSchedule:
    """A stage of an iteration on a home: `passes` are what the stage does (`stage_passes`)."""
    window = streams.window
    uses = window.uses(passes)
    copied = [r for r, bucket in enumerate(only_copied(buckets, streams.copied)) if bucket]
    # Hooks add what is streamed. Other stages keep sums over micro-batches, and add them once.
    stored = range(len(buckets)) if training and not streams.is_streamed else ()
    return _plan_window(
        window,
        uses,
        first=[Transfer(Kind.LOAD, bucket) for bucket in copied if bucket not in window.buckets],
        last=[Transfer(Kind.STORE, bucket, len(uses)) for bucket in stored],
        bringing=Kind.LOAD,
        taking=None,
    )


def _plan_window(
    window: Window,
    uses: Sequence[Use],
    *,
    first: Sequence[Transfer],
    last: Sequence[Transfer],
    bringing: Kind,
    taking: Kind | None,
) -> TransferSchedule:
    """The transfers of a window between `first` and `last`, each as early as its slot allows.

    Turning from forward to backward finds the last layers still in their slots, and back again the
    first ones: these are not brought again.
    """
    transfers = [*first, *last]
    content, last_use = [-1] * STREAM_WINDOW, [AT_ONCE] * STREAM_WINDOW
    brought = [-1] * STREAM_WINDOW  # the transfer by which a slot has its content
    gradient_of: dict[int, int] = {}  # slot: the use that left a gradient there
    for number, use in enumerate(uses):
        position, readers = use.position, window.readers(use)
        slot = position % STREAM_WINDOW
        bucket = window.buckets[position]
        # The slot is free once computation has left the layer that was in it.
        if content[slot] != position:
            content[slot], brought[slot] = position, len(transfers)
            transfers.append(Transfer(bringing, bucket, last_use[slot], number, readers))
        else:
            # By place in the list, which holds until the sort below.
            known = transfers[brought[slot]]
            transfers[brought[slot]] = known._replace(readers=known.readers | readers)
        if use.ends_backward and taking:
            # The gradient before in this slot has to be gone when backward writes the next one.
            if slot in gradient_of:
                left = gradient_of[slot]
                before = window.buckets[uses[left].position]
                transfers.append(Transfer(taking, before, left, number))
            gradient_of[slot] = number
        last_use[slot] = number
    if taking:
        transfers += [
            Transfer(taking, window.buckets[uses[left].position], left)
            for left in gradient_of.values()
        ]
    # A layer before a gradient: computation waits for the layer first. The sort is stable.
    transfers.sort(key=lambda t: (t.after, not t.kind.is_bringing))
    return TransferSchedule(
        transfers=tuple(transfers),
        end=len(uses),
        window=window,
        uses=tuple(window.buckets[use.position] for use in uses),
    )


def check_streams(schemes: Sequence[Scheme], device_type: str) -> None:
    """Raise HydraConfigError where the layers of `schemes`, which all have some, cannot stream."""
    if schemes and device_type != "cpu" and device_type not in ALLOCATORS:
        raise HydraConfigError(
            f"scheme {schemes[0]}: streamed layers are read from memory that the ranks of a host share, which is "
            f"written for cpu and {', '.join(ALLOCATORS)}, not for {device_type}; leave stream out of "
            "hydra.strategies, and let ckpt, or more TP or PP, save the memory"
        )


class HomeBytes(NamedTuple):
    """What one rank has of a home: its part of the weights, and of the sums beside the fp32
    gradient shards that every engine has.
    """

    weights: int
    sums: int


def home_bytes(specs: Sequence[ParamSpec], itemsize: int, num_ranks: int) -> HomeBytes:
    """Of a home that `num_ranks` ranks share; sums take 8 bytes an element and 4 a row of a
    parameter.

    >>> home_bytes([ParamSpec(fqn="w", shape=(8, 4))], 2, 4)
    HomeBytes(weights=16, sums=40)
    """
    padded = [spec.shard_numel(num_ranks) * num_ranks for spec in specs]
    summed = [(n, s.num_rows) for n, s in zip(padded, specs, strict=True) if s.requires_grad]
    owned = sum(numel for numel, _ in summed) // num_ranks
    sums = sum(8 * numel + 4 * rows for numel, rows in summed) // num_ranks - 4 * owned
    return HomeBytes(sum(padded) * itemsize // num_ranks, sums)


def is_in_one_piece(spec: ParamSpec, region: Region) -> bool:
    """Whether a slice is a contiguous part of its parameter, or empty."""
    return not region.numel or region.num_cols == spec.num_cols or region.num_rows == 1


def copied_params(
    specs: Sequence[ParamSpec], buckets: RankBuckets, *, has_views: bool
) -> frozenset[int]:
    """Parameters among `buckets` that are copied: where a home `has_views`, as on the CPU, those
    whose slices are not in one piece.
    """
    refs = [ref for bucket in buckets for ref in bucket if ref.region.numel]
    return frozenset(
        r.param for r in refs if not (has_views and is_in_one_piece(specs[r.param], r.region))
    )


def only_copied(buckets: RankBuckets, copied: frozenset[int]) -> RankBuckets:
    """`buckets` with nothing but what is copied."""
    return tuple(tuple(ref for ref in bucket if ref.param in copied) for bucket in buckets)


def count_addends(strategy: Strategy, num_micro_batches: Sequence[int]) -> int:
    """At most how many addends an element gets where pipelines have `num_micro_batches`
    micro-batches.

    Each rank of a stage adds after every micro-batch, or once; tied embeddings are in two stages.

    >>> count_addends(Strategy.parse("1x<2,1> + 1x<1,1>"), [3, 4])
    10
    """
    of_pipelines = zip(strategy.schemes, num_micro_batches, strict=True)
    return max(
        1,
        sum(s.ranks_per_stage * min(s.pp, 2) * micro_batches for s, micro_batches in of_pipelines),
    )


def stage_passes(
    num_stages: int, stage: int, num_micro_batches: int, *, training: bool
) -> list[Pass]:
    """What a stage does in one iteration, in order."""
    if not training:
        return [Pass.FORWARD] * num_micro_batches
    return [pass_ for pass_, _ in one_forward_one_backward(num_stages, stage, num_micro_batches)]
