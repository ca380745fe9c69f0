"""When the thread of the link posts its rounds, on one rank with a link that only notes them."""

import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from ds_hydra.engine.transfer.link_session import DeviceClock, LinkSession, LinkThread


class NotedLink:
    """Notes what is posted; a round is over at once."""

    def __init__(self, posted):
        self.posted = posted

    def begin_pull(self, plan, index, shards_P, bucket):
        self.posted.append(("pull", index, bucket))

    def begin_push(self, plan, index, bucket, grads_P):
        self.posted.append(("push", index, bucket))

    def finish(self, under_way):
        pass

    def abandon(self, under_way):
        pass


class NotedClock(DeviceClock):
    """Of an accelerator that does nothing: notes what the host waits for, after `on_wait`."""

    def __init__(self, posted):
        super().__init__(torch.device("cpu"))
        self.has_streams, self.posted, self.count = True, posted, itertools.count()
        self.on_wait = lambda: None

    def stamp(self):
        return next(self.count), len(self.posted)

    def wait_for(self, stamp):
        pass

    def settle(self, stamp):
        self.on_wait()
        self.posted.append(("over", stamp[1]))  # what had been posted by then

    def ms_between(self, begin, end):
        return 0.0


def open_session(thread, posted, num_buckets, num_rounds, clock=None):
    link, plan = NotedLink(posted), SimpleNamespace(rounds=[None] * num_rounds)
    slices = SimpleNamespace(
        bucket_S=list(range(num_buckets)),
        grad_bucket_S=[f"gradients {i}" for i in range(num_buckets)],
        on_gradient=None,
        zero_missing=lambda index: None,
    )
    return LinkSession(
        thread,
        clock or DeviceClock(torch.device("cpu")),
        pull=(link, plan),
        push=(link, plan),
        shards_P=[],
        slices=slices,
        grads_P=[],
    )


@pytest.fixture
def thread():
    thread = LinkThread(torch.device("cpu"), overlap=True)
    yield thread
    thread.close()


def test_no_round_of_the_push_is_posted_before_the_rank_has_computed(thread):
    """Two buckets of its own, and two rounds of other ranks alone, which come first."""
    posted = []
    with open_session(thread, posted, num_buckets=2, num_rounds=4) as session:
        session.await_all()
        with pytest.raises(TimeoutError):
            session._pushing.result(timeout=0.2)
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
    thread.submit(lambda: None).result(timeout=5)


def rounds_under_way(posted):
    """The most rounds of a direction that are posted and not over, `posted` as NotedClock has it:
    the end of a post is that of the round before.
    """
    most, over, begun = 0, -1, 0
    for kind, what, *_ in posted:
        if kind == "over":
            over = max(over, sum(entry[0] != "over" for entry in posted[:what]) - 1)
        else:
            begun += 1
            most = max(most, begun - over)
    return most


def test_a_device_has_two_rounds_at_most_to_do(thread):
    posted = []
    with open_session(thread, posted, 6, 6, NotedClock(posted)) as session:
        session._pulling.result()
        assert rounds_under_way(posted) == 2
        del posted[:]
        for index in range(6):
            session.gradients_complete(index)
        session._pushing.result()
        assert rounds_under_way(posted) == 2


def test_all_of_the_pull_is_posted_before_computation_waits_for_another_stage(thread):
    """The device does nothing until the rank has come to its receive."""
    posted, has_come = [], threading.Event()
    clock = NotedClock(posted)
    clock.on_wait = lambda: has_come.wait(10) or pytest.fail("the pull waited for the device")

    class Pulling:
        def __init__(self, future):
            self.future = future

        def __getattr__(self, name):
            return getattr(self.future, name)

        def result(self):
            has_come.set()
            return self.future.result()

    with open_session(thread, posted, 6, 6, clock) as session:
        session._pulling = Pulling(session._pulling)
        session.await_posts()
        assert [index for kind, index, *_ in posted if kind == "pull"] == list(range(6))
        assert sum(kind == "over" for kind, *_ in posted) <= 2  # the one that it was in
        session.finish()


def test_a_pull_that_failed_fails_where_computation_waits_for_its_posts(thread):
    posted = []

    class Failing(NotedLink):
        def begin_pull(self, *_):
            raise ZeroDivisionError

    session = open_session(thread, posted, 2, 2, NotedClock(posted))
    session._pull_link = Failing(posted)
    with pytest.raises(ZeroDivisionError), session:
        session.await_posts()
