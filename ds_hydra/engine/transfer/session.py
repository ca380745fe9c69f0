"""Carries out the transfers of one iteration beside its computation (Fig. 8): [Note: Transfers] in
`schedule.py` has the order and why no rank waits for itself.

[Note: Who posts]
The computing thread posts all transfers, between launches of passes. On an accelerator a call only
gives the device work: it is posted in the link's own stream, and the device runs it beside passes.
On a CPU a call returns when its work is done, so nothing of the link runs beside passes.

[Note: A kernel's first use]
A CUDA library loads the code of a kernel when it is first used, cuBLAS with EAGER loading, too: of
900 products at 60 lengths 112 did, after 23 other lengths, on an H200. The launch then waits until
the device has nothing to do, and launches of other threads wait with it. So any launch may have to
wait for every collective that its rank has posted. No two ranks wait for each other as long as all
post what they take part in together in one order, as they do from one thread, or launch nothing
between what they post in another (a send and a receive of 1F1B):

- Rounds of gathered layers are posted where computation leaves a layer, the same on all ranks.
- Rounds of a pull are posted some ahead of the layer that computation comes to (`_AHEAD`), all of
  them before it sends to another stage or waits for one (`await_posts`).
- Kept weights are pushed once this rank has launched all of its passes: a push that waits on the
  device for another stage's gradients, which wait for this stage's launch, would never end (seen
  with `<1,2>` on an H200). On the device their rounds still follow the gradients of their buckets,
  as far as passes are behind the host.

Passes are launched at most two micro-batches ahead (`Recorder.keep_up`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.schedule import AT_ONCE, NEVER, Transfer, TransferSchedule
from ds_hydra.engine.transfer.stage_weights import StageWeights
from ds_hydra.records.timeline import EventKind
from ds_hydra.zero_link import LinkPlan
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

_AHEAD = 4
"""Rounds of a pull beyond the one that is needed, posted two at a time or more: one of them packs
while the other one is on the wire.
"""


class RoundWindow:
    """Rounds of a link, at most `depth` of them on the wire, which end in the order of their begin.

    `begin(index)` posts a round, `is_over(index)` follows its end. A context manager: at its end
    all rounds are over; after an error, those on the wire go to `abandon`.
    """

    def __init__(
        self,
        begin: Callable[[int], RoundUnderWay],
        abandon: Callable[[RoundUnderWay], None],
        is_over: Callable[[int], None] = lambda index: None,
        *,
        depth: int = 2,
    ):
        self._begin, self._abandon, self._is_over = begin, abandon, is_over
        self._depth = depth
        self._on_wire: dict[int, RoundUnderWay] = {}

    def __len__(self) -> int:
        return len(self._on_wire)

    def __enter__(self) -> RoundWindow:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            for under_way in self._on_wire.values():
                self._abandon(under_way)

    def post(self, index: int) -> None:
        """Begin round `index`, then finish those that are too many on the wire."""
        self._on_wire[index] = self._begin(index)
        self._finish_all_but(self._depth - 1)

    def settle(self) -> None:
        """Finish the transfers in flight."""
        self._finish_all_but(0)

    def _finish_all_but(self, count: int) -> None:
        while len(self._on_wire) > count:
            index = next(iter(self._on_wire))
            self._on_wire[index]()
            # Kept until here: a round whose end fails is abandoned with the others.
            del self._on_wire[index]
            self._is_over(index)


class LinkCarrier:
    """Moves the bytes of transfers between this rank's shards and the slices of `weights`: rounds
    of the pull, and of the push where `grads_P` is given. Buckets that come once more do so by
    `pull_again`, where that is given ([Note: Weights on the node]).
    """

    def __init__(
        self,
        pull: tuple[Link, LinkPlan],
        push: tuple[Link, LinkPlan],
        shards_P: Sequence[Tensor],
        grads_P: Sequence[Tensor] | None,
        weights: StageWeights,
        *,
        pull_again: LinkPlan | None = None,
    ):
        self._shards_P, self._grads_P, self._weights = shards_P, grads_P, weights
        self._pull_link, self.pull_plan = pull
        self._push_link, self._push_plan = push
        self._pull_again = pull_again
        self._on_nodes: set[int] = set()

    def open(self) -> None:
        """Make room for weights that stay on the node."""
        if self._pull_again is not None:
            self._pull_link.reserve(self.pull_plan, self._shards_P)

    def close(self) -> None:
        """Leave that room to others."""
        if self._pull_again is not None:
            self._pull_link.forget_relayed()

    def _begin_pull(self, bucket: int, slices_S: Sequence[Tensor]) -> RoundUnderWay:
        plan = self.pull_plan
        if self._pull_again is not None:
            plan = self._pull_again if bucket in self._on_nodes else plan
            self._on_nodes.add(bucket)
        return self._pull_link.begin_pull(plan, bucket, self._shards_P, slices_S)

    def begin(self, transfer: Transfer) -> RoundUnderWay:
        """Post a round; this rank takes part with nothing where it does not have the bucket."""
        bucket = transfer.bucket
        is_own = bucket < len(self._weights.bucket_S)
        if transfer.kind is EventKind.PULL:
            return self._begin_pull(bucket, self._weights.bucket_S[bucket] if is_own else ())
        assert self._grads_P is not None
        if is_own:
            self._weights.zero_missing(bucket)
        grads_S = self._weights.grad_bucket_S[bucket] if is_own else ()
        return self._push_link.begin_push(self._push_plan, bucket, grads_S, self._grads_P)

    def abandon(self, under_way: RoundUnderWay) -> None:
        """Keep transfers in flight for as long as the link lives."""
        # Either link does: all that counts is that somebody holds it.
        self._pull_link.abandon(under_way)


class TransferSession:
    """The transfers of one iteration. A context manager: when it ends, none of them is under way.

    Every rank runs it with its own schedule, with work or without. Computation calls
    `await_bucket` before every forward pass that reads the slices of a bucket, those of
    `before_backward` before backward passes, `await_posts` before messages to other stages, and
    `finish` when it is over. Results have the same bits with `overlap` and without: the transfers
    are the same, and so is the order of sums in each.

    Should computation fail, nothing more begins that waits for it.
    """

    def __init__(
        self,
        recorder: Recorder,
        schedule: TransferSchedule,
        carrier: LinkCarrier,
        weights: StageWeights,
        *,
        overlap: bool,
    ):
        self.weights = weights
        self.carrier = carrier
        self._recorder, self._clock = recorder, recorder.clock
        self._is_beside = overlap and self._clock.has_streams
        """Whether transfers have a stream of their own: [Note: Who posts]."""
        self._schedule = schedule
        self._left: dict[int, Any] = {}
        """Stamp of each event of computation that was recorded, in the stream that computes."""
        self._over: dict[int, Any] = {}
        """Stamp of the end of each transfer, in the stream that had it."""
        # The last transfer of those that a use needs: they end in order.
        self._needed: dict[int, int] = {}
        # Of buckets that are brought once, for the whole iteration, and not yet awaited.
        self._brought: dict[int, int] = {}
        self._num_at_once = 0
        for number, transfer in enumerate(schedule.transfers):
            if transfer.needed_by != NEVER:
                self._needed[transfer.needed_by] = number
            elif transfer.kind is EventKind.PULL:
                self._brought[transfer.bucket] = number
            # These stand first in the list: one number says which they are.
            if transfer.kind is EventKind.PULL and transfer.after == AT_ONCE:
                self._num_at_once = number + 1
        self._in_window = frozenset(schedule.window.buckets)
        self._use = -1
        self._next = 0
        self._has_failed = False
        self._is_outside = False
        self._last_kind = EventKind.PULL
        self._last_end: Any = None
        """End of the last work on a transfer, in the stream that had it."""

    def __enter__(self) -> TransferSession:
        self.carrier.open()
        start = self._clock.stamp()
        if self._schedule.waits_for_gradients:
            self.weights.on_gradient = self._record
        try:
            if self._is_beside:
                with self._clock.beside():
                    self._clock.wait_for(start)
                self._post_ahead_of(0)
            else:
                self._catch_up()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # Else weights and session hold each other, and a whole stage's memory, until the garbage
        # collector comes.
        self.weights.on_gradient = None
        if error is None:
            return
        # Other ranks may wait for the pull, which waits for nothing of this rank's computation. An
        # error of it would hide the one that is raised.
        with contextlib.suppress(Exception):
            if not self._has_failed:
                self.await_posts()
        with contextlib.suppress(Exception):
            with self._clock.beside():
                end = self._clock.stamp()
            self._clock.wait_for(end)

    @property
    def before_backward(self) -> dict[int, Callable[[], None] | None]:
        """Functions to call before the backward pass of each bucket of the window; None where no
        gradient goes through the bucket.
        """
        window = self._schedule.window
        return {
            bucket: functools.partial(self.enter, bucket) if has_backward else None
            for bucket, has_backward in zip(window.buckets, window.has_backward, strict=True)
            if has_backward or bucket > 0
        }

    def begin_phase(self, number: int) -> None:
        """Computation comes to phase `number`, which is not the first one; with micro-batches of
        its own or without.
        """
        if self._schedule.phases:
            with self._outside_of_passes():
                while self._use + 1 < self._schedule.phases[number]:
                    self._go_on()

    def await_bucket(self, bucket: int) -> None:
        """Let computation read the slices of a bucket in a forward pass."""
        if bucket in self._in_window:
            self.enter(bucket)
        elif bucket in self._brought:
            number = self._brought[bucket]
            self._post_ahead_of(number)
            self._wait_for(number)
            del self._brought[bucket]

    def await_all(self) -> None:
        """Wait for all transfers that are made without waiting for an event."""
        self.await_posts()
        if self._num_at_once:
            self._wait_for(self._num_at_once - 1)

    def await_posts(self) -> None:
        """Post all that is brought without waiting for an event: [Note: A kernel's first use]."""
        if self._next < self._num_at_once:
            self._catch_up(self._num_at_once)

    def enter(self, bucket: int) -> None:
        """Computation leaves the bucket of the window it was in and comes to `bucket`.

        Nothing happens where it is in `bucket` already, as when a checkpointed layer is recomputed.
        """
        uses = self._schedule.uses
        while self._use < 0 or uses[self._use] != bucket:
            if self._use + 1 == len(uses):
                raise RuntimeError(
                    f"layer {bucket} of this stage was used out of the order of the iteration's plan"
                )
            self._go_on()

    def finish(self) -> None:
        """Let the current stream wait for the rest of the transfers: computation is over.

        Collective over all ranks.
        """
        with self._outside_of_passes():
            # Uses that are left: of other pipelines' micro-batches, or of a backward that needed
            # nothing. One after another: each posts its rounds.
            while self._use + 1 < len(self._schedule.uses):
                self._go_on()
            # Gradients that no backward pass came to are zeros: the carrier sees to it.
            for event in range(self._schedule.end + 1):
                self._record(event)
            self._catch_up()
            # Let the current stream go on only after all transfers.
            if self._last_end is not None:
                self._clock.wait_for(self._last_end)
            self.carrier.close()

    @contextlib.contextmanager
    def _outside_of_passes(self) -> Iterator[None]:
        """Count waits inside as a wait for the push, as a whole."""
        self._is_outside = True
        with self._recorder.rest():
            yield
        self._is_outside = False

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Count the block as a wait of a pass, unless it is outside of passes."""
        return contextlib.nullcontext() if self._is_outside else self._recorder.wait()

    @contextlib.contextmanager
    def _working(self, kind: EventKind) -> Iterator[None]:
        """Count the block as work on transfers of `kind`."""
        begin = self._clock.stamp()
        yield
        self._last_kind, self._last_end = kind, self._clock.stamp()
        self._recorder.add(kind, begin, self._last_end, self._recorder.phase)

    def _record(self, event: int) -> None:
        """All that the current stream has been given so far belongs to `event`. Repeating it
        changes nothing.
        """
        if event not in self._left:
            self._left[event] = self._clock.stamp()

    def _go_on(self) -> None:
        """Leave the present use for the next one, and wait for its transfers."""
        if self._use >= 0:
            # Before the next use is waited for: what that needs may go into the slot that is left
            # here.
            self._record(self._use)
            self._catch_up()
        self._use += 1
        if self._use in self._needed:
            self._wait_for(self._needed[self._use])

    def _wait_for(self, number: int) -> None:
        """Let the current stream go on after a transfer, and count the time as visible."""
        if self._next <= number:
            self._catch_up(number + 1)
        with self._waiting():
            self._clock.wait_for(self._over[number])

    def _post_ahead_of(self, number: int) -> None:
        """Post the next rounds of a pull where computation comes to `number`."""
        if self._next < min(self._num_at_once, number + _AHEAD - 1):
            self._catch_up(min(self._num_at_once, number + 1 + _AHEAD))

    def _catch_up(self, end: int | None = None) -> None:
        """All transfers before `end` whose event is recorded: without overlap in the stream that
        computes, else in the link's.
        """
        transfers = self._schedule.transfers[:end]
        where = self._clock.beside() if self._is_beside else self._waiting()
        try:
            with where, self._window() as window:
                while self._next < len(transfers):
                    after = transfers[self._next].after
                    if after != AT_ONCE:
                        if after not in self._left:
                            break
                        self._clock.wait_for(self._left[after])
                    self._post(self._next, window)
                    self._next += 1
                self._settle(window)
        except BaseException:
            self._has_failed = True  # whether others have the round is not known
            raise

    def _window(self) -> RoundWindow:
        def begin(number: int) -> RoundUnderWay:
            return self.carrier.begin(self._schedule.transfers[number])

        return RoundWindow(begin, self.carrier.abandon, self._end, depth=self._schedule.depth)

    def _post(self, number: int, window: RoundWindow) -> None:
        """Begin a transfer, and end the oldest where too many are in flight."""
        kind = self._schedule.transfers[number].kind
        if number and self._schedule.transfers[number - 1].kind is not kind:
            # Every rank ends its pull before it pushes: collectives of two groups that are under
            # way at once need one order on all ranks.
            self._settle(window)
        with self._working(kind):
            window.post(number)

    def _settle(self, window: RoundWindow) -> None:
        if len(window):
            with self._working(self._last_kind):
                window.settle()

    def _end(self, number: int) -> None:
        """A transfer is over."""
        transfer = self._schedule.transfers[number]
        if transfer.bucket in self._in_window and transfer.bucket < len(self.weights.bucket_S):
            if transfer.kind is EventKind.PULL:
                self.weights.prepare(transfer.bucket)
            else:
                self.weights.expect_next(transfer.bucket)
        self._over[number] = self._clock.stamp()
