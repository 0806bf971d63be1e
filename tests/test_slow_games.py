"""The other two games are priced beside the ticks."""

import asyncio
from collections.abc import Callable

from dynamo_poa.coupling import AllocationEstimate, CachingEstimate
from dynamo_poa.errors import GameError
from dynamo_poa.slow_games import Found, SlowGames


def games(run: Callable[[Callable[[], Found]], object], noted: list[float]) -> SlowGames:
    def note_caching(at_s: float) -> Callable[[], CachingEstimate]:
        noted.append(at_s)
        return lambda: CachingEstimate(poa_hat=at_s)

    def note_allocation(at_s: float) -> Callable[[], AllocationEstimate]:
        return lambda: AllocationEstimate(poa_hat=2 * at_s)

    return SlowGames(note_caching, note_allocation, run)


async def test_both_are_priced_as_they_stood_when_looked_at() -> None:
    """Contract: what is noted is of one instant."""
    noted: list[float] = []
    slow = games(asyncio.to_thread, noted)
    assert slow.caching.poa_hat is slow.allocation.poa_hat is slow.looked_at_s is None
    slow.look(3.0)
    await slow.settled()
    assert (slow.caching.poa_hat, slow.allocation.poa_hat, noted) == (3.0, 6.0, [3.0])
    assert slow.looked_at_s == 3.0
    assert slow.take_failure() is None


async def test_a_look_while_a_job_runs_is_skipped_and_counted() -> None:
    """Issue 7: a tick is never delayed by it."""
    noted: list[float] = []
    go_on = asyncio.Event()

    async def slowly(job: Callable[[], Found]) -> Found:
        await go_on.wait()
        return job()

    slow = games(slowly, noted)
    slow.look(1.0)
    await asyncio.sleep(0)
    slow.look(2.0)
    go_on.set()
    await slow.settled()
    assert (slow.skipped, noted, slow.caching.poa_hat) == (1, [1.0], 1.0)


async def test_what_was_priced_long_ago_is_no_estimate_while_a_job_hangs() -> None:
    """Advice that stands on it would not be withdrawn when the load changes."""
    go_on = asyncio.Event()
    go_on.set()

    async def run(job: Callable[[], Found]) -> Found:
        await go_on.wait()
        return job()

    slow = games(run, [])
    slow.look(1.0)
    await slow.settled()
    go_on.clear()
    slow.look(6.0)
    slow.look(66.0)
    assert (slow.caching.poa_hat, slow.allocation.poa_hat) == (1.0, 2.0)
    slow.look(66.5)
    why = "pricing takes more than 60 s"
    assert (slow.caching, slow.allocation) == (CachingEstimate(reason=why), AllocationEstimate(reason=why))
    go_on.set()
    await slow.settled()
    assert slow.caching.poa_hat == 6.0


async def test_a_failed_job_leaves_no_estimate_and_is_told_once() -> None:
    """Absent is not the last value known, and not 1.0."""
    failing = True

    async def run(job: Callable[[], Found]) -> Found:
        if failing:
            raise ValueError("no solution")
        return job()

    slow = games(run, [])
    slow.look(1.0)
    await slow.settled()
    assert str(slow.take_failure()) == "no solution"
    assert slow.take_failure() is None
    assert slow.caching == CachingEstimate(reason="pricing failed: ValueError('no solution')")
    assert slow.allocation == AllocationEstimate(reason="pricing failed: ValueError('no solution')")
    failing = False
    slow.look(2.0)
    await slow.settled()
    assert slow.caching.poa_hat == 2.0


async def test_one_that_is_no_game_takes_nothing_from_the_other() -> None:
    """Its reason is told in its place; that is no failure of the job."""
    broken: list[str] = []

    def note_caching(at_s: float) -> Callable[[], CachingEstimate]:
        def price() -> CachingEstimate:
            if "caching" in broken:
                raise GameError("rate[0, 1]", -1.0, ">= 0")
            return CachingEstimate(poa_hat=at_s)

        return price

    def note_allocation(at_s: float) -> Callable[[], AllocationEstimate]:
        def price() -> AllocationEstimate:
            if "allocation" in broken:
                raise GameError("context_tokens", 0.0, "in (0, inf)")
            return AllocationEstimate(poa_hat=at_s)

        return price

    slow = SlowGames(note_caching, note_allocation)
    broken.append("caching")
    slow.look(1.0)
    await slow.settled()
    why = "pricing failed: rate[0, 1] = -1.0: must be >= 0"
    assert (slow.caching, slow.allocation.poa_hat) == (CachingEstimate(reason=why), 1.0)
    broken[:] = ["allocation"]
    slow.look(2.0)
    await slow.settled()
    why = "pricing failed: context_tokens = 0.0: must be in (0, inf)"
    assert (slow.caching.poa_hat, slow.allocation) == (2.0, AllocationEstimate(reason=why))
    assert slow.take_failure() is None


async def test_closing_ends_a_job_that_runs() -> None:
    """Every task is awaited by whoever owns it."""
    never = asyncio.Event()

    async def run(job: Callable[[], Found]) -> Found:
        await never.wait()
        return job()

    slow = games(run, [])
    slow.look(1.0)
    await asyncio.sleep(0)
    await slow.aclose()
    assert slow.take_failure() is None
    assert slow.caching.reason == "not priced yet"
