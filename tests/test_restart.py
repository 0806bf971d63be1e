"""A worker restarted under its old id: nothing of its former life is mixed into what is known of it."""

import pytest
from dynamo_messages import Sender, fp, km, rm, st

from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook, iteration_s
from dynamo_poa.load import WorkerState
from dynamo_poa.ordering import REPLACED_S, Life, Speaker
from dynamo_poa.values import Role, WorkerCard, WorkerKey

W1, W2 = 8821, 8822
KEY = WorkerKey(W1, 0)


class World:
    """Two workers that are watched, and how fast they are."""

    def __init__(self) -> None:
        self.book = LatencyBook()
        self.restarted: list[WorkerKey] = []
        self.fleet = Fleet("ns", 30.0, on_pass=self.book.observe, on_restart=self.restart)
        self.fleet.set_cards(
            [
                WorkerCard(worker_id=worker, role=Role.AGGREGATED, kv_block_size=16, total_kv_blocks=1000)
                for worker in (W1, W2)
            ],
            0.0,
        )
        self.sender = Sender(self.fleet)

    def restart(self, key: WorkerKey) -> None:
        self.restarted.append(key)
        self.book.forget(key)

    def worker(self, at_s: float) -> WorkerState:
        return next(state for state in self.fleet.workers(at_s) if state.key == KEY)


def test_the_cache_is_that_of_the_new_life() -> None:
    """Measured: a new publisher whose events count from 1; what it says is complete."""
    world = World()
    world.sender.send("old", st(W1, 1, None, [1, 2, 3]), 1.0)
    world.sender.send("old", rm(W1, 2, [3]), 1.5)
    world.sender.send("new", st(W1, 1, None, [3, 9]), 2.0)
    world.sender.send("old", st(W1, 3, 2, [4]), 2.1)
    assert world.fleet.resident_blocks(KEY) == {3, 9}
    cache = world.worker(3.0).cache
    assert (cache.resident_blocks, cache.approximate, cache.orphans) == (2, False, 0)
    (_, snapshot), _ = world.fleet.caches()
    # An engine that is gone has not evicted too early what the next one computes.
    assert (snapshot.evicted, snapshot.reloaded, len(snapshot.chains)) == (1, 0, 2)
    assert world.fleet.dropped["outdated"] == 1


def test_the_load_is_that_of_the_new_life() -> None:
    """What ran before is gone; totals go on, each pass counted once."""
    world = World()
    world.sender.send("old", km(W1, None, None, 700), 1.0)
    for counter in range(1, 11):
        world.sender.send("old", fp(W1, counter, 0.1, np=1, pt=100, nd=8, qn=3), 1.0 + counter / 10)
    before = world.worker(2.0)
    assert (before.kv_used_blocks, before.running_decode_requests, before.queued_requests) == (700, 8, 3)
    assert before.busy_frac == pytest.approx(1.0)
    world.sender.send("new", fp(W1, 1, 0.0), 2.2)
    world.sender.send("old", fp(W1, 11, 0.1, np=1, pt=100, nd=8, qn=3), 2.3)
    now = world.worker(2.4)
    assert (now.kv_used_blocks, now.running_decode_requests, now.queued_requests) == (None, 0, 0)
    assert (now.busy_frac, now.iteration_s, now.decoding_requests) == (0.0, None, 0)
    assert (now.prefill_tokens_total, world.restarted) == (1000, [KEY])


def test_use_of_the_cache_told_after_the_restart_stands_whatever_comes_late() -> None:
    """Three topics have three publishers: each shows the restart by itself, in any order."""
    world = World()
    world.sender.send("old", km(W1, None, None, 700), 1.0)
    world.sender.send("old", fp(W1, 1, 0.1, nd=8), 1.1)
    world.sender.send("new", km(W1, None, None, 5), 2.0)
    world.sender.send("new", fp(W1, 1, 0.1, nd=1), 2.1)
    world.sender.send("old", km(W1, None, None, 710), 2.2)
    assert world.worker(2.3).kv_used_blocks == 5


def test_the_speed_is_that_of_the_new_life() -> None:
    """A slow worker that was restarted is not a straggler until it is slow again; the other one stays."""
    world = World()
    present = [(WorkerKey(worker, 0), Role.AGGREGATED) for worker in (W1, W2)]
    for counter in range(1, 41):
        world.sender.send("old", fp(W1, counter, 0.08, nd=8), counter / 10)
        world.sender.send("other", fp(W2, counter, 0.02, nd=8), counter / 10)
    before = world.book.fit(4.0, present)
    assert (before[KEY].straggler, before[KEY].samples > 35) == (True, True)
    for counter in range(1, 11):
        world.sender.send("new", fp(W1, counter, 0.02, nd=8), 4.0 + counter / 10)
        world.sender.send("other", fp(W2, 40 + counter, 0.02, nd=8), 4.0 + counter / 10)
    now = world.book.fit(5.0, present)
    assert now[KEY].straggler is False
    assert now[KEY].samples == pytest.approx(10, abs=0.1)
    assert iteration_s(now[KEY].curve, 8, 0) == pytest.approx(0.02, rel=1e-3)
    assert now[WorkerKey(W2, 0)].samples > 45


def test_a_publisher_heard_long_after_it_was_replaced_lives() -> None:
    """Otherwise one message with a wrong id would silence a worker for good."""
    speaker = Speaker()
    heard = [(1, 0.0), (1, 1.0), (2, 2.0), (1, 2.0 + REPLACED_S), (2, 3.0), (1, 2.1 + REPLACED_S)]
    assert [speaker.hear(publisher_id, at_s) for publisher_id, at_s in heard] == [
        Life.NEW,
        Life.SAME,
        Life.NEW,
        Life.PAST,
        Life.SAME,
        Life.NEW,
    ]
    for publisher_id in range(100, 200):
        speaker.hear(publisher_id, 70.0)
    assert (speaker.publisher_id, len(speaker._replaced)) == (199, 8)
