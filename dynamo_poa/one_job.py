"""Work beside the ticks: one job at a time, and none of them is waited for.

Owns: the task, counting what came while it ran, its failure.
Does not own: what is computed, and when it is due (loop.py).
Invariant: whoever starts a job returns at once; a failure is told once, and only when the job has ended.
"""

import asyncio
from collections.abc import Coroutine


class OneJob:
    """At most one task. `skipped`: times there was one already."""

    def __init__(self, name: str) -> None:
        self.skipped = 0
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def is_free(self) -> bool:
        """Tell whether a job may start; counted when not."""
        free = self._task is None or self._task.done()
        self.skipped += not free
        return free

    def start(self, job: Coroutine[None, None, None]) -> None:
        """Run a job; only after `is_free`."""
        self._task = asyncio.create_task(job, name=self._name)

    def take_failure(self) -> BaseException | None:
        """Return what a job that has ended tripped over, once."""
        if self._task is None or not self._task.done():
            return None
        task, self._task = self._task, None
        return None if task.cancelled() else task.exception()

    async def settled(self) -> None:
        """Wait until nothing runs; for tests and measurements, no tick does."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def aclose(self) -> None:
        """Wait for nothing more; a thread that computes ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
