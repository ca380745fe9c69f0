"""When the thread of the link posts its rounds, on one rank with a link that only notes them."""

import contextlib
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


def open_session(thread, posted, num_buckets, num_rounds):
    link, plan = NotedLink(posted), SimpleNamespace(rounds=[None] * num_rounds)
    slices = SimpleNamespace(
        bucket_S=list(range(num_buckets)),
        grad_bucket_S=[f"gradients {i}" for i in range(num_buckets)],
        on_gradient=None,
        zero_missing=lambda index: None,
    )
    return LinkSession(
        thread,
        DeviceClock(torch.device("cpu")),
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
