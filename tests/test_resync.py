"""Workers are asked what their caches hold once events were missed: whom, when, and what becomes of it."""

import asyncio
from typing import Any

import pytest
from dynamo_messages import Sender, cl, st
from waiting import eventually

from dynamo_poa.cache_whole import CacheWhole, whole_of
from dynamo_poa.clock import ManualClock
from dynamo_poa.errors import WireError, WorkerUnreachable
from dynamo_poa.fleet import Fleet
from dynamo_poa.residency import GAP_WAIT_S
from dynamo_poa.resync import RETRY_S, Resync
from dynamo_poa.values import Role, WorkerCard, WorkerKey
from dynamo_poa.wire import CacheHeld, KvEvent, KvStored, Tier

W1, W2 = 8821, 2**63 + 9


def card(worker_id: int) -> WorkerCard:
    return WorkerCard(worker_id=worker_id, role=Role.PREFILL, kv_block_size=16, total_kv_blocks=100)


def block(number: int) -> KvEvent:
    return KvEvent(W1, 0, 0, Tier.DEVICE, KvStored(None, (number,), (number,)))


class World:
    """Two workers, one of which joined after we did, and what they answer."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet("ns", 30.0)
        self.fleet.set_cards([card(W1), card(W2)], 0.0)
        self.sender = Sender(self.fleet)
        self.asked: list[tuple[WorkerKey, int]] = []
        self.answer: CacheHeld | Exception = CacheHeld((block(5), block(6)), 7)
        self.resync = Resync(self.fleet, self.ask, self.clock)
        self.say(W1, st(W1, 7, None, [5]))
        self.say(W2, st(W2, 1, None, [1]))

    def say(self, worker_id: int, message: Any) -> None:
        self.sender.send(f"{worker_id}", message, self.clock.monotonic_s())

    async def ask(self, card: WorkerCard, key: WorkerKey, publisher_id: int) -> CacheWhole:
        assert card.worker_id == key.worker_id
        self.asked.append((key, publisher_id))
        if isinstance(self.answer, Exception):
            raise self.answer
        return whole_of(self.answer)

    def caches(self) -> dict[int, tuple[int | None, bool]]:
        return {
            state.key.worker_id: (state.cache.resident_blocks, state.cache.approximate)
            for state in self.fleet.workers(self.clock.monotonic_s())
        }


async def test_only_a_worker_whose_events_were_missed_is_asked() -> None:
    """And only once: then its mirror is whole."""
    world = World()
    await world.resync.look()
    await world.resync.look()
    assert world.asked == [(WorkerKey(W1, 0), world.sender.publisher_id(f"{W1}", "kv-events"))]
    assert world.caches() == {W1: (2, False), W2: (1, False)}
    assert (world.resync.asked, world.resync.taken) == (1, 1)


@pytest.mark.parametrize(
    "failure", [WorkerUnreachable(W1, "cache: no such endpoint"), WireError("answer", "TreeDumpFailed")]
)
async def test_a_worker_that_cannot_answer_is_asked_again_later(failure: Exception) -> None:
    """Its mirror goes on as it was, and says that it is approximate."""
    world = World()
    answer, world.answer = world.answer, failure
    await world.resync.look()
    await world.clock.advance(RETRY_S - 0.1)
    await world.resync.look()
    assert (len(world.asked), world.caches()[W1]) == (1, (1, True))
    world.answer = answer
    await world.clock.advance(0.2)
    await world.resync.look()
    assert (len(world.asked), world.resync.taken, world.caches()[W1]) == (2, 1, (2, False))


async def test_a_gap_is_asked_about_when_it_is_given_up() -> None:
    """Case E1: late events come by themselves; lost ones do not."""
    world = World()
    await world.resync.look()
    world.say(W2, st(W2, 3, None, [3]))
    await world.resync.look()
    assert len(world.asked) == 1
    await world.clock.advance(GAP_WAIT_S)
    world.fleet.take_notices(world.clock.monotonic_s())
    world.answer = CacheHeld((block(1), block(2), block(3)), 3)
    await world.resync.look()
    assert world.asked[1][0] == WorkerKey(W2, 0)
    assert world.caches() == {W1: (2, False), W2: (3, False)}


async def test_a_worker_cleared_meanwhile_keeps_its_empty_cache() -> None:
    """The answer may be older than the clear."""
    world = World()

    async def ask(card: WorkerCard, key: WorkerKey, publisher_id: int) -> CacheWhole:
        world.say(W1, cl(W1, 8))
        return whole_of(CacheHeld((block(5),), 7))

    resync = Resync(world.fleet, ask, world.clock)
    await resync.look()
    assert (resync.asked, resync.taken, world.caches()[W1]) == (1, 0, (0, False))


async def test_a_worker_that_never_answers_holds_up_no_other() -> None:
    """Each mirror is approximate until its own worker has answered, and no longer than that."""
    world = World()
    world.say(W2, st(W2, 3, None, [3]))
    await world.clock.advance(GAP_WAIT_S)
    world.fleet.take_notices(world.clock.monotonic_s())
    hangs = asyncio.Event()

    async def ask(card: WorkerCard, key: WorkerKey, publisher_id: int) -> CacheWhole:
        if key.worker_id == W1:
            await hangs.wait()
        return whole_of(CacheHeld((block(5), block(6), block(7)), 3 if key.worker_id == W2 else 7))

    resync = Resync(world.fleet, ask, world.clock)
    looking = asyncio.create_task(resync.look())
    await eventually(lambda: resync.taken == 1)
    assert world.caches() == {W1: (1, True), W2: (3, False)}
    hangs.set()
    await looking
    assert world.caches() == {W1: (3, False), W2: (3, False)}
    assert (resync.asked, resync.taken) == (2, 2)


async def test_it_looks_by_itself_until_it_is_left() -> None:
    """Contract: every task is owned and awaited."""
    world = World()
    async with world.resync:
        for _ in range(5):
            await asyncio.sleep(0)
    assert world.caches()[W1] == (2, False)
    assert world.resync._task is not None
    assert world.resync._task.cancelled()
