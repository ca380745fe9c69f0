"""The rounds that fill and empty the homes of several hosts, beside computation.

[Note: Rounds of homes]
A bucket of the model comes into a home by one round for each of its parts that other hosts own,
and its sums leave by another; every rank of the host receives and sends some of it. So what one
rank computes depends on what others of its host have received, and what one sends on what others
have added. Each rank says in a word of memory that they share how many rounds it has received, and
for how many, from the last one on, it has added its gradients; words only grow, over all
iterations. Who needs a bucket waits until the words of all ranks of the host say so: nobody posts
anything for another.

One thread per rank posts all rounds in one order, as in [Note: Overlap without deadlock]: those of
the pull wait for no computation, and no computation waits for a push before its own end.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ds_hydra.engine.transfer.link_session import (
    LEAVING_S,
    Abandoned,
    DeviceClock,
    LinkThread,
    Spans,
    TwoInFlight,
)
from ds_hydra.zero_link import LinkPlan, RankBuckets
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

if TYPE_CHECKING:
    from ds_hydra.engine.transfer.home import Home

_POLL_S, _LONGEST_POLL_S = 5e-5, 2e-3
_FAILED = -1
"""In place of a count of rounds."""
_ITERATION = 1 << 32
"""More than an iteration has rounds."""


class Milestone(enum.IntEnum):
    """Of a round: its weights have come to this rank, or its gradients are in the home's sums."""

    RECEIVED = 0
    ADDED = 1


def progress_bytes(num_ranks: int) -> int:
    """Of the words of `num_ranks` ranks of a host."""
    return len(Milestone) * num_ranks * 8


class Progress:
    """How far the ranks of a host, of which this is number `place`, have come in the rounds of an
    iteration. `memory` are bytes that they share, zero at first. Not collective.
    """

    def __init__(self, memory: Tensor, ranks: Sequence[int], place: int):
        words = memory[: progress_bytes(len(ranks))].view(torch.int64)
        self._words = words.view(len(Milestone), len(ranks)).numpy()
        self._ranks, self._place = ranks, place
        self._begin = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """The next iteration; every rank calls it once for each."""
        self._begin += _ITERATION
        self._words[:, self._place] = self._begin

    def report(self, milestone: Milestone, count: int) -> None:
        """This rank has come to `count` rounds; less than before changes nothing, nor does anything
        after `fail`.
        """
        self.reporting(milestone, count)()

    def reporting(self, milestone: Milestone, count: int) -> Callable[[], None]:
        """A `report` for later, of this iteration even if the next one has begun by then."""
        word, words = self._begin + count, self._words[milestone]

        def write() -> None:
            with self._changed:
                if words[self._place] != _FAILED:
                    words[self._place] = max(int(words[self._place]), word)
                self._changed.notify_all()

        return write

    def fail(self) -> None:
        """This rank gets no further in this iteration."""
        with self._changed:
            self._words[:, self._place] = _FAILED
            self._changed.notify_all()

    def leave(self, is_left: threading.Event) -> None:
        """End every `wait` with `is_left`."""
        with self._changed:
            is_left.set()
            self._changed.notify_all()

    def is_reached(self, milestone: Milestone, count: int) -> bool:
        """Whether all ranks have come to `count` rounds."""
        return bool((self._words[milestone] >= self._begin + count).all())

    def wait(self, milestone: Milestone, count: int, is_left: threading.Event) -> None:
        """Return once `is_reached`. Raises Abandoned once `is_left` is set, RuntimeError where a
        rank has failed, or is behind this one for longer than a collective would wait; the watchdog
        ends a process that waits for a lost rank.
        """
        target = self._begin + count

        def has_come() -> bool:
            own = self._words[milestone, self._place]
            return bool(own >= target or own == _FAILED or is_left.is_set())

        # Other processes cannot wake this one, so their words are polled. Only once this rank's own
        # word is there, which needs no polling: most of the time has passed by then.
        with self._changed:
            self._changed.wait_for(has_come)
        longest_s, pause_s = default_pg_timeout.total_seconds(), _POLL_S
        begin = time.monotonic()
        while not self.is_reached(milestone, count):
            if is_left.is_set():
                raise Abandoned
            last = int(self._words[milestone].argmin())
            if self._words[milestone, last] == _FAILED:
                raise RuntimeError(
                    f"rank {self._ranks[last]} of this host did not exchange what others need in their home"
                )
            if time.monotonic() > begin + longest_s:
                raise RuntimeError(
                    f"rank {self._ranks[last]} of this host has not exchanged what others need in their home for "
                    f"{longest_s:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossHosts:
    """How this rank takes part in filling the homes of all hosts, and in emptying them."""

    params: tuple[tuple[int, ...], ...]
    """Of each round, together all of the model; one round where there is one host."""
    brought: RankBuckets = ()
    """Runs of other hosts' shards that this rank brings to the home of its host, for each round."""
    pull: tuple[Link, LinkPlan] | None = None
    pull_trained: tuple[Link, LinkPlan] | None = None
    """The pull without frozen parameters."""
    push: tuple[Link, LinkPlan] | None = None
    """None, as the others, where there is one host."""


class HomeRounds:
    """The rounds of one iteration on this rank: it computes with `buckets`, and nothing is pushed
    where `grads_P` is None. Every rank runs it, with work or without.

    `begin`, then the home is filled with the ranks' own shards and its sums are set to zero, a
    barrier, `begin_push`; `finish` after the barrier that follows computation. Where it `overlaps`
    nothing of a bucket may be read before `await_filled`, and `complete` has to be called for every
    bucket once this rank has added its gradients.
    """

    def __init__(
        self,
        thread: LinkThread,
        clock: DeviceClock,
        home: Home,
        across: AcrossHosts,
        buckets: RankBuckets,
        shards_P: Sequence[Tensor],
        grads_P: Sequence[Tensor] | None,
    ):
        self.overlaps = thread.overlap and across.pull is not None
        self._thread, self._clock, self._home, self._across = thread, clock, home, across
        self._shards_P, self._grads_P = shards_P, grads_P
        round_of = {p: index for index, params in enumerate(across.params) for p in params}
        self._last_round = {
            index: max((round_of[ref.param] for ref in bucket), default=-1)
            for index, bucket in enumerate(buckets)
        }
        self._incomplete = dict(self._last_round)
        self._filled: set[int] = set()
        self._received: Any = None
        self._is_left = threading.Event()
        self._pulling: Future[None] | None = None
        self._pushing: Future[None] | None = None
        self.pull_work, self.push_work = Spans(clock), Spans(clock)

    def begin(self) -> None:
        """Begin to receive weights; without overlap they are there when it returns."""
        self._home.progress.begin()
        self._start = self._clock.stamp()
        if self._across.pull is not None:
            self._pulling = self._thread.submit(self._pull)
            if not self.overlaps:
                self._pulling.result()

    def begin_push(self) -> None:
        """Let sums go out as soon as they are complete, where rounds overlap computation."""
        self._start = self._clock.stamp()
        if self.overlaps and self._grads_P is not None:
            self._pushing = self._thread.submit(self._push)

    def await_filled(self, bucket: int) -> None:
        """Wait until the weights of a bucket are in the home; safe in two threads. Raises what the
        pull raised, and Abandoned after `leave`.
        """
        if self.overlaps and bucket not in self._filled:
            count = self._last_round[bucket] + 1
            try:
                self._home.progress.wait(Milestone.RECEIVED, count, self._is_left)
            except RuntimeError:
                assert self._pulling is not None
                if self._pulling.done():
                    self._pulling.result()
                raise
            self._filled.add(bucket)
        if self._received is not None:
            self._clock.wait_for(self._received)  # of this rank; others' were over, on the host

    def await_all(self) -> None:
        """Wait until all weights of this rank's buckets are in the home."""
        for bucket in self._last_round:
            self.await_filled(bucket)

    def await_posts(self) -> None:
        """Wait, on an accelerator, until the pull is posted. Raises what it raised."""
        if self._clock.has_streams and self._pulling is not None:
            self._pulling.result()

    def complete(self, bucket: int) -> None:
        """This rank has added its last gradient of a bucket."""
        self._incomplete.pop(bucket, None)
        missing = max(self._incomplete.values(), default=-1)
        progress, count = self._home.progress, len(self._across.params) - 1 - missing
        self._home.when_added(progress.reporting(Milestone.ADDED, count))

    def complete_all(self) -> None:
        """This rank adds nothing more."""
        self._incomplete.clear()
        self._home.progress.report(Milestone.ADDED, len(self._across.params))

    def finish(self) -> None:
        """Return once all sums have come to their owners, on the current stream. Raises what the
        thread raised.
        """
        if self._pulling is not None:
            self._pulling.result()
        if self._pushing is not None:
            self._pushing.result()
        elif self._grads_P is not None:
            self._push()
        self._join()

    def leave(self) -> None:
        """Computation has failed: end what is under way."""
        self._home.progress.leave(self._is_left)
        _, stuck = wait([job for job in (self._pulling, self._pushing) if job], LEAVING_S)
        if stuck:
            self._thread.give_up()
        else:
            self._join()

    def _join(self) -> None:
        self.pull_work.join()
        self.push_work.join()

    def _pull(self) -> None:
        """All rounds of the pull."""
        assert self._across.pull is not None
        link, plan = self._across.pull
        self._clock.wait_for(self._start)  # shards are up to date
        weights = self._home.weight_runs(self._across.brought)

        def begin(index: int) -> RoundUnderWay:
            return link.begin_pull(plan, index, self._shards_P, weights[index])

        def is_over(index: int) -> None:
            self._received = self._clock.stamp()
            self._clock.settle(self._received)
            self._home.progress.report(Milestone.RECEIVED, index + 1)

        try:
            with TwoInFlight(link, begin, self.pull_work, is_over) as rounds:
                for index in range(len(weights)):
                    rounds.post(index)
        except BaseException:
            self._home.progress.fail()
            raise

    def _push(self) -> None:
        """All rounds of the push, the last one first; one is finished early where the next one's
        sums are not complete yet.
        """
        assert self._grads_P is not None
        if self._pulling is not None and self._pulling.exception() is not None:
            return
        self._clock.wait_for(self._start)  # sums are zero
        home, across, grads_P = self._home, self._across, self._grads_P
        if across.push is None:
            with self.push_work.measure():
                for params in across.params:
                    home.collect(grads_P, params)
            return
        link, plan = across.push

        def begin(index: int) -> RoundUnderWay:
            brought = across.brought[index]
            home.collect(grads_P, across.params[index], brought)
            (sums,) = home.sum_runs((brought,))
            return link.begin_push(plan, index, sums, grads_P)

        try:
            with (
                contextlib.suppress(Abandoned),  # computation has failed
                TwoInFlight(link, begin, self.push_work) as rounds,
            ):
                for index in reversed(range(len(across.params))):
                    if self.overlaps:
                        count = len(across.params) - index
                        if not home.progress.is_reached(Milestone.ADDED, count):
                            rounds.settle()
                        home.progress.wait(Milestone.ADDED, count, self._is_left)
                    rounds.post(index)
        except BaseException:
            home.progress.fail()
            raise
