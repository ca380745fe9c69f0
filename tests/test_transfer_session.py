"""When a session posts its rounds, on one rank with a link that only notes them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ds_hydra.engine.telemetry import trace
from ds_hydra.engine.telemetry.trace import DeviceClock, Recorder
from ds_hydra.engine.transfer.schedule import Window, plan_transfers
from ds_hydra.engine.transfer.session import LinkCarrier, TransferSession


class NotedLink:
    """Notes what is posted, and in which stream; a round is over at once, or fails where it is told
    to.
    """

    def __init__(self, posted, clock, fails_at=()):
        self.posted, self.clock, self.fails_at = posted, clock, fails_at

    def begin_pull(self, plan, index, shards_P, bucket):
        return self.begin("pull", index, bucket)

    def begin_push(self, plan, index, bucket, grads_P):
        return self.begin("push", index, bucket)

    def begin(self, *entry):
        self.posted.append((*entry, self.clock.streams[-1]))
        self.fail("begin", *entry[:2])
        return lambda: self.fail("end", *entry[:2])

    def fail(self, *what):
        if what == self.fails_at:
            raise ZeroDivisionError

    def abandon(self, under_way):
        pass


class NotedClock(DeviceClock):
    """Of a CPU, or of an accelerator that does nothing; a stream waits for no stamp of its own."""

    def __init__(self, has_streams):
        super().__init__(torch.device("cpu"))
        self.has_streams, self.streams = has_streams, ["computation"]

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


def open_session(posted, num_buckets, num_rounds, window=None, counts=(), *, device, fails_at=()):
    """Of a CPU rank, or of a `device`."""
    schedule = plan_transfers(
        window or Window(), num_buckets, num_rounds, counts, training=True, pushes=True
    )
    clock = NotedClock(device)
    link, of_link = NotedLink(posted, clock, fails_at), SimpleNamespace(rounds=[None] * num_rounds)
    weights = SimpleNamespace(
        bucket_S=list(range(num_buckets)),
        grad_bucket_S=[f"gradients {i}" for i in range(num_buckets)],
        on_gradient=None,
        zero_missing=lambda index: None,
        prepare=lambda index: posted.append(("prepared", index)),
        expect_next=lambda index: posted.append(("pushed", index)),
    )
    carrier = LinkCarrier((link, of_link), (link, of_link), [], [], weights)
    return TransferSession(Recorder(clock), schedule, carrier, weights, overlap=True)


on_both = pytest.mark.parametrize("device", [False, True])


def rounds_of(posted, *kinds):
    return [entry[:2] for entry in posted if entry[0] in (kinds or ("pull", "push"))]


def num_pulls(posted):
    return len(rounds_of(posted, "pull"))


@on_both
@pytest.mark.parametrize("num_buckets", [0, 2])
def test_a_rank_takes_part_in_every_round_and_pushes_once_it_has_computed(num_buckets, device):
    """Two rounds of other ranks alone, or all four, come first."""
    posted = []
    with open_session(posted, num_buckets, 4, device=device) as session:
        session.await_all()
        for bucket in range(num_buckets):
            session.weights.on_gradient(bucket)  # as a hook inside a backward pass would
        assert rounds_of(posted) == [("pull", n) for n in range(4)]
        session.finish()
    pushed = [entry[1:3] for entry in posted if entry[0] == "push"]
    assert pushed == [(n, f"gradients {n}" if n < num_buckets else ()) for n in (3, 2, 1, 0)]
    assert {entry[3] for entry in posted} == {"link" if device else "computation"}
    assert session._clock.streams == ["computation"]


@on_both
def test_all_of_the_pull_is_posted_before_a_message_and_where_passes_fail(device):
    for fails in (False, True):
        posted = []
        with (
            contextlib.suppress(ZeroDivisionError),
            open_session(posted, 12, 14, device=device) as session,
        ):
            session.await_bucket(0)
            assert num_pulls(posted) == (5 if device else 14)
            if fails:
                raise ZeroDivisionError
            session.await_posts()
            session.await_posts()
            assert num_pulls(posted) == 14
        assert rounds_of(posted) == [("pull", n) for n in range(14)]


def test_on_a_device_a_pull_is_posted_ahead_of_the_layers():
    posted = []
    with open_session(posted, 12, 14, device=True) as session:
        assert num_pulls(posted) == 5  # the first layer's, and four ahead
        for bucket, so_far in ((0, 5), (2, 5), (3, 8), (5, 8), (6, 11), (11, 14)):
            session.await_bucket(bucket)
            assert num_pulls(posted) == so_far
        session.finish()


@pytest.mark.parametrize("num_kept", [1, 5, 8])
def test_on_a_device_the_first_gathered_layer_comes_after_all_kept_buckets(num_kept):
    window = Window(buckets=(num_kept, num_kept + 1), has_backward=(True, True))
    posted, num = [], num_kept + 2
    with open_session(posted, num, num, window, [1], device=True) as session:
        session.await_bucket(num_kept)
        assert num_pulls(posted) >= num_kept + 1
        session.await_bucket(num_kept + 1)
        session.finish()
    assert num_pulls(posted) == num_kept + 2


@pytest.mark.parametrize("where", ["begin", "end"])
def test_on_a_device_no_round_is_posted_after_one_that_failed(where):
    posted = []
    session = open_session(posted, 12, 12, device=True, fails_at=(where, "pull", 6))
    with pytest.raises(ZeroDivisionError), session:
        session.await_bucket(11)
    assert [index for _, index, *_ in posted] == list(range(7 + (where == "end")))
    assert session._clock.streams == ["computation"]


@on_both
def test_a_pull_that_failed_fails_where_it_is_posted_and_a_push_when_computation_is_over(device):
    session = open_session([], 2, 2, device=device, fails_at=("begin", "pull", 0))
    with pytest.raises(ZeroDivisionError), session:
        pytest.fail("it begins without weights")
    assert session.weights.on_gradient is None
    with open_session([], 2, 2, device=device, fails_at=("begin", "push", 0)) as session:
        session.await_all()
        session.weights.on_gradient(1)
        with pytest.raises(ZeroDivisionError):
            session.finish()


TWO_LAYERS = Window(buckets=(1, 2), has_backward=(True, True))
"""They take turns with no other; bucket 0 stays."""


def use(session, posted, buckets, *, backward=False):
    """Passes of layers, as a stage model makes them."""
    for bucket in buckets:
        if backward:
            session.before_backward[bucket]()
        else:
            session.await_bucket(bucket)
        posted.append(("used", bucket))


@on_both
def test_a_gathered_layer_is_there_when_it_is_used_and_pushed_once_computation_has_left_it(device):
    posted = []
    with open_session(posted, 3, 3, TWO_LAYERS, [1], device=device) as session:
        use(session, posted, (0, 1, 2))
        use(session, posted, (2, 1), backward=True)
        session.finish()
    assert [entry[:2] for entry in posted] == [
        ("pull", 0),
        ("pull", 1),
        ("prepared", 1),
        ("pull", 2),
        ("prepared", 2),
        *(("used", bucket) for bucket in (0, 1, 2, 2)),
        ("push", 2),
        ("pushed", 2),
        ("used", 1),
        ("push", 1),
        ("pushed", 1),
        ("push", 0),
    ]


FOUR_LAYERS = Window(buckets=(0, 1, 2, 3), has_backward=(True,) * 4)
"""In two slots."""


@on_both
def test_layers_come_into_the_next_phase_as_into_the_next_micro_batch(device):
    posted = []
    with open_session(posted, 4, 4, FOUR_LAYERS, [1, 1], device=device) as session:
        for number in range(2):
            if number:
                session.begin_phase(number)
            use(session, posted, (0, 1, 2, 3))
            use(session, posted, (3, 2, 1, 0), backward=True)
        session.finish()
    in_slots = {}
    for kind, bucket, *_ in posted:
        if kind == "prepared":
            in_slots[FOUR_LAYERS.slot_of[bucket]] = bucket
        elif kind == "used":
            assert in_slots[FOUR_LAYERS.slot_of[bucket]] == bucket
    # Two layers are there where forward turns into backward, and where the second phase begins
    pulled = [bucket for _, bucket in rounds_of(posted, "pull")]
    assert pulled == [0, 1, 2, 3, 1, 0, 2, 3, 1, 0]
    assert [bucket for _, bucket in rounds_of(posted, "push")] == [3, 2, 1, 0] * 2


@on_both
def test_a_rank_without_work_in_a_phase_meets_the_others_in_the_next(device):
    """Else it would wait for a layer while the ranks of its group wait for what it sends."""
    posted = []
    with open_session(posted, 4, 4, FOUR_LAYERS, [1, 1], device=device) as session:
        session.begin_phase(1)
        # It is one use before the others, and has posted what they need to come there
        assert [bucket for _, bucket in rounds_of(posted, "push")] == [3, 2]
        session.await_bucket(0)
        assert session._use == session._schedule.phases[1]
        session.finish()
    assert [bucket for _, bucket in rounds_of(posted, "push")] == [3, 2, 1, 0] * 2


@on_both
def test_a_failed_pass_posts_no_round_that_waits_for_it(device):
    for window, counts in ((Window(), ()), (TWO_LAYERS, [1])):
        posted = []
        with (
            contextlib.suppress(ZeroDivisionError),
            open_session(posted, 3, 3, window, counts, device=device) as session,
        ):
            use(session, posted, (0, 1))
            raise ZeroDivisionError
        assert rounds_of(posted) == [("pull", n) for n in range(3)]


def test_a_layer_out_of_the_order_of_the_plan_is_refused():
    with open_session([], 3, 3, TWO_LAYERS, [1], device=False) as session:
        use(session, [], (0, 1, 2))
        use(session, [], (2, 1), backward=True)
        with pytest.raises(RuntimeError, match="layer 2 of this stage was used out of the order"):
            session.await_bucket(2)
        session.finish()


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
