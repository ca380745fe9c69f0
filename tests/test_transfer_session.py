"""When the thread of a session posts its rounds, on one rank with a link that only notes them."""

import contextlib
import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from distributed import TIMEOUT_S, wait_until

from ds_hydra.engine.telemetry import trace
from ds_hydra.engine.telemetry.trace import DeviceClock, Recorder
from ds_hydra.engine.transfer.link_thread import LinkThread
from ds_hydra.engine.transfer.schedule import Window, plan_transfers
from ds_hydra.engine.transfer.session import LinkCarrier, TransferSession


class NotedLink:
    """Notes what is posted, on a device also in which stream and thread; a round is over at
    once.
    """

    def __init__(self, posted, clock=None):
        self.posted, self.clock = posted, clock

    def begin_pull(self, plan, index, shards_P, bucket):
        self.posted.append(("pull", index, bucket, *self.where()))
        return lambda: None

    def begin_push(self, plan, index, bucket, grads_P):
        self.posted.append(("push", index, bucket, *self.where()))
        return lambda: None

    def where(self):
        if not isinstance(self.clock, NotedClock):
            return ()
        return self.clock.streams[-1], threading.current_thread().name

    def abandon(self, under_way):
        pass


class NotedClock(DeviceClock):
    """Of an accelerator that does nothing; a stream waits for no stamp of its own."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.has_streams, self.streams = True, ["computation"]

    @contextlib.contextmanager
    def beside(self):
        self.streams.append("link")
        try:
            yield
        finally:
            self.streams.pop()

    def stamp(self):
        return self.streams[-1]

    def wait_for(self, stamp):
        pass

    def settle(self, stamp):
        pass

    def ms_between(self, begin, end):
        return 0.0


def plan(num_buckets, num_rounds, window=None, counts=(), overlap=True):
    options = {"training": True, "pushes": True, "overlap": overlap}
    return plan_transfers(window or Window(), num_buckets, num_rounds, counts, **options)


def open_session(thread, posted, num_buckets, num_rounds, clock=None, schedule=None, link=None):
    link = link or NotedLink(posted, clock)
    of_link = SimpleNamespace(rounds=[None] * num_rounds)
    weights = SimpleNamespace(
        bucket_S=list(range(num_buckets)),
        grad_bucket_S=[f"gradients {i}" for i in range(num_buckets)],
        on_gradient=None,
        zero_missing=lambda index: None,
        prepare=lambda index: posted.append(("prepared", index)),
        expect_next=lambda index: posted.append(("pushed", index)),
    )
    return TransferSession(
        thread,
        Recorder(clock),
        schedule or plan(num_buckets, num_rounds, overlap=thread.overlap),
        LinkCarrier((link, of_link), (link, of_link), [], [], weights),
        weights,
    )


@pytest.fixture
def thread():
    thread = LinkThread(overlap=True)
    yield thread
    thread.close()


def test_no_round_of_the_push_is_posted_before_the_rank_has_computed(thread):
    """Two buckets of its own, and two rounds of other ranks alone, which come first."""
    posted = []
    with open_session(thread, posted, num_buckets=2, num_rounds=4) as session:
        session.await_all()
        with pytest.raises(TimeoutError):
            session._running.result(timeout=0.2)
        assert [kind for kind, *_ in posted] == ["pull"] * 4
        session.gradients_complete(1)
        session.finish()
    assert posted[4:] == [
        ("push", 3, ()),
        ("push", 2, ()),
        ("push", 1, "gradients 1"),
        ("push", 0, "gradients 0"),
    ]


def test_a_rank_without_a_pipeline_takes_part_in_every_round(thread):
    posted = []
    with open_session(thread, posted, num_buckets=0, num_rounds=3) as session:
        session.finish()
    assert posted[3:] == [("push", 2, ()), ("push", 1, ()), ("push", 0, ())]


def test_a_failed_computation_posts_no_push(thread):
    posted = []
    with (
        contextlib.suppress(ZeroDivisionError),
        open_session(thread, posted, num_buckets=1, num_rounds=3) as session,
    ):
        session.await_all()
        raise ZeroDivisionError
    assert [kind for kind, *_ in posted] == ["pull"] * 3
    thread.submit(lambda: None).result(timeout=TIMEOUT_S)


def test_on_a_device_the_computing_thread_posts_a_pull_ahead_of_the_layers(thread):
    posted, clock = [], NotedClock()
    with open_session(thread, posted, 12, 14, clock) as session:
        assert pulls_of(posted) == 5  # the first layer's, and four ahead
        for bucket, so_far in ((0, 5), (2, 5), (3, 8), (5, 8), (6, 11), (11, 14)):
            session.await_bucket(bucket)
            assert pulls_of(posted) == so_far
        assert {thread for *_, thread in posted} == {threading.current_thread().name}
        session.gradients_complete(11)
        assert pulls_of(posted) == len(posted), "nothing is pushed before all passes are launched"
        session.finish()
    assert [index for kind, index, *_ in posted if kind == "push"] == [*range(13, -1, -1)]
    assert {stream for _, _, _, stream, _ in posted} == {"link"}
    assert clock.streams == ["computation"]


def pulls_of(posted):
    return sum(kind == "pull" for kind, *_ in posted)


def test_on_a_device_all_of_the_pull_is_posted_before_a_message_and_where_passes_fail(thread):
    for fails in (False, True):
        posted = []
        with (
            contextlib.suppress(ZeroDivisionError),
            open_session(thread, posted, 12, 14, NotedClock()) as session,
        ):
            session.await_bucket(0)
            assert pulls_of(posted) == 5
            if fails:
                raise ZeroDivisionError
            session.await_posts()
            session.await_posts()
            assert pulls_of(posted) == 14
        assert [entry[:2] for entry in posted[:14]] == [("pull", n) for n in range(14)]
        assert len(posted) == 14


def test_on_a_device_gathered_layers_come_where_computation_leaves_others(thread):
    posted = []
    with gathered_session(thread, posted, NotedClock()) as session:
        pass_through(session)
        session.finish()
    assert [entry[:2] for entry in posted if entry[0] in ("pull", "push")] == [
        ("pull", 0), ("pull", 1), ("pull", 2), ("push", 2), ("push", 1), ("push", 0),
    ]  # fmt: skip
    assert {entry[3] for entry in posted if len(entry) > 2} == {"link"}


@pytest.mark.parametrize("num_kept", [1, 5, 8])
def test_on_a_device_the_first_gathered_layer_comes_after_all_kept_buckets(thread, num_kept):
    window = Window(buckets=(num_kept, num_kept + 1), has_backward=(True, True))
    posted, num = [], num_kept + 2
    schedule = plan(num, num, window, [1])
    with open_session(thread, posted, num, num, NotedClock(), schedule=schedule) as session:
        session.await_bucket(num_kept)
        assert pulls_of(posted) >= num_kept + 1
        session.await_bucket(num_kept + 1)
        session.finish()
    assert pulls_of(posted) == num_kept + 2


@pytest.mark.parametrize("where", ["begin", "end"])
def test_on_a_device_no_round_is_posted_after_one_that_failed(thread, where):
    class Failing(NotedLink):
        def begin_pull(self, plan, index, *more):
            super().begin_pull(plan, index, *more)
            if (where, index) == ("begin", 6):
                raise ZeroDivisionError
            return self.end if index == 6 else lambda: None

        def end(self):
            raise ZeroDivisionError

    posted, clock = [], NotedClock()
    session = open_session(thread, posted, 12, 12, clock, link=Failing(posted, clock))
    with pytest.raises(ZeroDivisionError), session:
        session.await_bucket(11)
    assert [index for _, index, *_ in posted] == list(range(7 + (where == "end")))
    assert clock.streams == ["computation"]


def test_a_pull_that_failed_fails_where_it_is_posted(thread):
    class Failing(NotedLink):
        def begin_pull(self, *_):
            raise ZeroDivisionError

    session = open_session(thread, [], 2, 2, NotedClock(), link=Failing([]))
    with pytest.raises(ZeroDivisionError), session:
        pytest.fail("it begins without weights")


def test_an_error_of_a_push_is_raised_when_computation_is_over(thread):
    class Failing(NotedLink):
        def begin_push(self, *_):
            raise ZeroDivisionError

    session = open_session(thread, [], 2, 2, link=Failing([]))
    with session:
        session.await_all()
        session.gradients_complete(1)
        with pytest.raises(ZeroDivisionError):
            session.finish()


def gathered_session(thread, posted, clock=None):
    """Two layers that take turns with no other, and a bucket that stays, in one micro-batch."""
    window = Window(buckets=(1, 2), has_backward=(True, True))
    schedule = plan(3, 3, window, [1])
    return open_session(thread, posted, 3, 3, clock, schedule=schedule)


def pass_through(session):
    """Forward and backward as a stage model makes them."""
    for bucket in range(3):
        session.await_bucket(bucket)
    for bucket in (2, 1):
        session.before_backward[bucket]()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_gathered_layer_is_pushed_once_computation_has_left_it(overlap):
    posted = []
    thread = LinkThread(overlap=overlap)
    with gathered_session(thread, posted) as session:
        pass_through(session)
        session.finish()
    thread.close()
    assert [entry[:2] for entry in posted] == [
        ("pull", 0),
        ("pull", 1),
        ("prepared", 1),
        ("pull", 2),
        ("prepared", 2),
        ("push", 2),
        ("pushed", 2),
        ("push", 1),
        ("pushed", 1),
        ("push", 0),
    ]


def test_computation_waits_until_a_gathered_layer_is_there(thread):
    """Its pull is over when computation waits for it, no earlier."""
    posted, has_come = [], threading.Event()
    with gathered_session(thread, posted) as session:
        begin_pull, wait = session.carrier.begin, session._over.wait

        def begin(transfer):
            if transfer.bucket == 2:
                has_come.wait(TIMEOUT_S)
            return begin_pull(transfer)

        def come(number):
            if session._schedule.transfers[number].bucket == 2:
                has_come.set()
            wait(number)

        session.carrier.begin, session._over.wait = begin, come
        session.await_bucket(0)
        session.await_bucket(1)
        assert ("prepared", 2) not in posted
        session.await_bucket(2)
        is_there = ("prepared", 2) in posted
        has_come.set()
        session.finish()
    assert is_there


FOUR_LAYERS = Window(buckets=(0, 1, 2, 3), has_backward=(True,) * 4)


def of_two_phases(thread, posted):
    """Four layers in two slots; each phase has one micro-batch on some rank."""
    schedule = plan(4, 4, FOUR_LAYERS, [1, 1])
    return open_session(thread, posted, 4, 4, schedule=schedule)


def test_the_next_layer_comes_beside_computation_into_the_next_phase(thread):
    """While computation is in a layer the next one comes, and none that has no place; with the
    second phase as with a second micro-batch.
    """
    posted = []

    def kinds(kind):
        return [entry[1] for entry in posted if entry[0] == kind]

    def is_prepared(num_layers):
        return kinds("prepared") == [0, 1, 2, 3][:num_layers]

    with of_two_phases(thread, posted) as session:
        for bucket in range(4):
            session.await_bucket(bucket)
            num_there = min(4, bucket + 2)
            wait_until(functools.partial(is_prepared, num_there))
        for bucket in (3, 2, 1, 0):
            session.before_backward[bucket]()
        wait_until(lambda: kinds("prepared") == [0, 1, 2, 3, 1, 0])
        session.begin_phase(1)
        for bucket in (0, 1):  # there since the phase before
            session.await_bucket(bucket)
        assert kinds("pull")[:6] == [0, 1, 2, 3, 1, 0]
        # The first phase's last gradient travels beside the second one's passes
        wait_until(lambda: kinds("pushed") == [3, 2, 1, 0])
        wait_until(lambda: kinds("pull") == [0, 1, 2, 3, 1, 0, 2])
        pass_through_again(session)
        session.finish()
    assert kinds("pull") == [0, 1, 2, 3, 1, 0, 2, 3, 1, 0]
    assert kinds("push") == [3, 2, 1, 0] * 2


def pass_through_again(session):
    for bucket in (2, 3):
        session.await_bucket(bucket)
    for bucket in (3, 2, 1, 0):
        session.before_backward[bucket]()


def test_a_rank_without_work_in_a_phase_meets_the_others_in_the_next(thread):
    """Else it would wait for a layer while the ranks of its group wait for what it sends."""
    posted = []
    with of_two_phases(thread, posted) as session:
        session.begin_phase(1)
        # It is one use before the others, and has posted what they need to come there
        wait_until(lambda: [e[1] for e in posted if e[0] == "push"] == [3, 2])
        session.await_bucket(0)
        assert session._use == session._schedule.phases[1]
        session.finish()
    assert [e[1] for e in posted if e[0] == "push"] == [3, 2, 1, 0] * 2


def test_a_failed_pass_posts_no_round_that_waits_for_it(thread):
    posted = []
    with contextlib.suppress(ZeroDivisionError), gathered_session(thread, posted) as session:
        session.await_bucket(0)
        session.await_bucket(1)
        raise ZeroDivisionError
    assert all(kind != "push" for kind, *_ in posted)
    thread.submit(lambda: None).result(timeout=TIMEOUT_S)


def test_a_layer_out_of_the_order_of_the_plan_is_refused(thread):
    with gathered_session(thread, []) as session:
        pass_through(session)
        with pytest.raises(RuntimeError, match="layer 2 of this stage was used out of the order"):
            session.await_bucket(2)
        session.finish()


def test_what_does_not_overlap_is_pushed_when_computation_is_over():
    posted = []
    thread = LinkThread(overlap=False)
    with open_session(thread, posted, num_buckets=2, num_rounds=2) as session:
        assert [kind for kind, *_ in posted] == ["pull"] * 2
        session.gradients_complete(1)  # as a hook inside a backward pass would
        assert [kind for kind, *_ in posted] == ["pull"] * 2
        session.finish()
    assert posted[2:] == [("push", 1, "gradients 1"), ("push", 0, "gradients 0")]


def test_a_stream_of_cuda_is_made_once(monkeypatch):
    """Stamps belong to the calling thread's stream, whichever that is at the moment."""
    current, made = [7], []

    class Stream:
        def __init__(self):
            self.number = current[0]
            made.append(self.number)

        def wait_event(self, event):
            event.append(f"waited by {self.number}")

    class Event(list):
        def record(self, stream):
            self.append(f"recorded on {stream.number}")

    accelerator = SimpleNamespace(
        Event=lambda enable_timing: Event(), current_stream=lambda: Stream()
    )
    monkeypatch.setattr(trace, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current[index], raising=False
    )
    clock = DeviceClock(torch.device("cuda", 0))
    first = clock.stamp()
    current[0] = 9  # another thread's, or `with torch.cuda.stream(...)`
    clock.wait_for(first)
    second = clock.stamp()
    current[0] = 7
    clock.wait_for(second)
    assert (first, second) == (
        ["recorded on 7", "waited by 9"],
        ["recorded on 9", "waited by 7"],
    )
    assert made == [7, 9]
    plain = DeviceClock(torch.device("cuda"))  # whose index nobody has said
    assert plain.stamp() == ["recorded on 7"]
    assert made == [7, 9, 7]
