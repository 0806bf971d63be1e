"""When cache placement and the split of workers are priced: beside the ticks, which never wait for it.

Owns: the one job at a time in a worker thread, the latest estimates.
Does not own: what is computed (placement.py, split.py), when it is due (loop.py).
Invariant: a job that takes longer than the time to the next skips it, counted; a game that fails is absent
           with its reason, and the other goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable

from dynamo_poa.coupling import AllocationEstimate, CachingEstimate

Found = tuple[CachingEstimate, AllocationEstimate]
Run = Callable[[Callable[[], Found]], Awaitable[Found]]


class SlowGames:
    """Prices both games now and then.

    caching, allocation:  the latest estimates
    skipped:              times nothing was priced because the job before took too long
    """

    def __init__(self, run: Run = asyncio.to_thread) -> None:
        """Price in a worker thread, or as `run` does it."""
        self.caching = CachingEstimate(reason="not priced yet")
        self.allocation = AllocationEstimate(reason="not priced yet")
        self.skipped = 0
        self._run = run
        self._job: asyncio.Task[None] | None = None

    def look(
        self, caching: Callable[[], CachingEstimate], allocation: Callable[[], AllocationEstimate]
    ) -> None:
        """Begin to price both, on what each has noted of this instant."""
        if self._job is not None and not self._job.done():
            self.skipped += 1
            return
        self._job = asyncio.create_task(self._take(lambda: (caching(), allocation())), name="slow games")

    def take_failure(self) -> BaseException | None:
        """Return what a job that has ended tripped over, once; there is no estimate until one succeeds."""
        if self._job is None or not self._job.done():
            return None
        job, self._job = self._job, None
        error = None if job.cancelled() else job.exception()
        if error is not None:
            self.caching = CachingEstimate(reason=f"pricing failed: {error!r}")
            self.allocation = AllocationEstimate(reason=self.caching.reason)
        return error

    async def settled(self) -> None:
        """Wait until nothing is being priced; for tests and measurements, no tick does."""
        if self._job is not None:
            await asyncio.wait({self._job})

    async def aclose(self) -> None:
        """Wait for nothing more; a thread that computes ends by itself."""
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)

    async def _take(self, job: Callable[[], Found]) -> None:
        self.caching, self.allocation = await self._run(job)
