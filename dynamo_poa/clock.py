"""Where time comes from.

Owns: the one place that reads the machine's clock or sleeps.
Does not own: any decision about how long to wait.
Invariant: everything else takes a `Clock` as a constructor argument, so tests run on `ManualClock`.
"""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """A source of instants and pauses. All values in seconds."""

    def wall_s(self) -> float:
        """Return seconds since the epoch; may jump when the machine's clock is set."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds from an arbitrary origin; never goes back. Use it for ages and durations."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Pause the calling task."""
        ...


class SystemClock:
    """The machine's clock."""

    def wall_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return the machine's monotonic clock."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Pause the calling task for real."""
        await asyncio.sleep(duration_s)


class ManualClock:
    """A clock that moves only when told; sleepers wake in order of their deadlines."""

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_offset_s = wall_s - monotonic_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def wall_s(self) -> float:
        """Return the simulated epoch time."""
        return self._monotonic_s + self._wall_offset_s

    def monotonic_s(self) -> float:
        """Return the simulated monotonic time."""
        return self._monotonic_s

    def set_wall(self, wall_s: float) -> None:
        """Set the wall clock alone, as an administrator would."""
        self._wall_offset_s = wall_s - self._monotonic_s

    async def sleep(self, duration_s: float) -> None:
        """Wait until `advance` has moved past the deadline."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic_s + duration_s, next(self._order), waiter))
        await waiter

    async def advance(self, duration_s: float) -> None:
        """Move time forward, waking each sleeper at its own instant."""
        end_s = self._monotonic_s + duration_s
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, waiter = heapq.heappop(self._sleepers)
            self._monotonic_s = max(self._monotonic_s, due_s)
            if not waiter.done():
                waiter.set_result(None)
            await self._settle()
        self._monotonic_s = end_s

    @staticmethod
    async def _settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
