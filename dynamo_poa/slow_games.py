"""When cache placement and the split of workers are priced: beside the ticks, which never wait for it.

Owns: the one job at a time in a worker thread, the latest estimates.
Does not own: what is computed (placement.py, split.py), when it is due (loop.py).
Invariant: a job that takes longer than the time to the next skips it, counted; games that fail, or take more
           than MAX_AGE_S, are absent with a reason until one succeeds. One that is no game (GameError) is
           absent with its reason and leaves the other alone; any other failure is a fault and takes both.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from dynamo_poa.coupling import AllocationEstimate, CachingEstimate
from dynamo_poa.errors import GameError
from dynamo_poa.one_job import OneJob

MAX_AGE_S = 60.0  # advice must not stand on what was so long ago, nor may a planner act on it

Found = tuple[CachingEstimate, AllocationEstimate]
Run = Callable[[Callable[[], Found]], Awaitable[Found]]
NoteCaching = Callable[[float], Callable[[], CachingEstimate]]
NoteAllocation = Callable[[float], Callable[[], AllocationEstimate]]


class SlowGames:
    """Prices both games now and then.

    caching, allocation:  the latest estimates
    looked_at_s:          instant that both are of; None before the first
    """

    def __init__(
        self, note_caching: NoteCaching, note_allocation: NoteAllocation, run: Run = asyncio.to_thread
    ) -> None:
        """Price in a worker thread, or as `run` does it.

        Args:  note_*: note what is known at an instant, at once, and return what prices it, in any thread.
        """
        self.caching = CachingEstimate(reason="not priced yet")
        self.allocation = AllocationEstimate(reason="not priced yet")
        self.looked_at_s: float | None = None
        self._note_caching, self._note_allocation = note_caching, note_allocation
        self._run = run
        self._job = OneJob("slow games")
        self._began_at_s = -math.inf

    def look(self, at_s: float) -> None:
        """Begin to price both games as they stand now."""
        if self._job.is_free():
            self._began_at_s = at_s
            self._job.start(self._price(at_s))
        elif at_s - self._began_at_s > MAX_AGE_S:
            self._lose(f"pricing takes more than {MAX_AGE_S:.0f} s")

    @property
    def skipped(self) -> int:
        """Return how often nothing was priced because the job before took too long."""
        return self._job.skipped

    def take_failure(self) -> BaseException | None:
        """Return what a job that has ended tripped over, once; there is no estimate until one succeeds."""
        error = self._job.take_failure()
        if error is not None:
            self._lose(f"pricing failed: {error!r}")
        return error

    async def settled(self) -> None:
        """Wait until nothing is being priced; for tests and measurements, no tick does."""
        await self._job.settled()

    async def aclose(self) -> None:
        """Wait for nothing more; a thread that computes ends by itself."""
        await self._job.aclose()

    def _lose(self, reason: str) -> None:
        self.caching, self.allocation = CachingEstimate(reason=reason), AllocationEstimate(reason=reason)

    async def _price(self, at_s: float) -> None:
        caching, allocation = self._note_caching(at_s), self._note_allocation(at_s)
        self.caching, self.allocation = await self._run(lambda: _priced(caching, allocation))
        self.looked_at_s = at_s


def _priced(caching: Callable[[], CachingEstimate], allocation: Callable[[], AllocationEstimate]) -> Found:
    """Price both games; what is no game is absent, with its reason."""
    try:
        priced = caching()
    except GameError as error:
        priced = CachingEstimate(reason=f"pricing failed: {error}")
    try:
        return priced, allocation()
    except GameError as error:
        return priced, AllocationEstimate(reason=f"pricing failed: {error}")
