"""When a worker is asked what its cache holds, because events of it were missed.

Owns: which mirrors are to be made whole, how many are at once, how long until one is asked again.
Does not own: the question (dynamo_host.py), how the answer and the events since are joined (residency.py).
Invariant: until an answer has been taken the mirror says that it is approximate; a worker that cannot answer
           costs one question in RETRY_S, and its mirror goes on as it is.
Source: host: Dynamo's own routers ask the same when they begin or miss events (its local indexer); measured:
        0.7 ms for a small cache on Dynamo 1.4.2.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import structlog

from dynamo_poa import telemetry
from dynamo_poa.cache_whole import CacheWhole
from dynamo_poa.clock import Clock
from dynamo_poa.errors import WireError, WorkerUnreachable
from dynamo_poa.fleet import Fleet
from dynamo_poa.residency import CacheMirror
from dynamo_poa.values import WorkerCard, WorkerKey

Ask = Callable[[WorkerCard, WorkerKey, int], Awaitable[CacheWhole]]

LOOK_S = 1.0
RETRY_S = 30.0
AT_ONCE = 2  # one that never answers must not hold up the others; measured: 0.4 GB for 600,000 blocks

log = structlog.get_logger(__name__)


class Resync:
    """Asks workers for the whole of their caches.

    asked, taken:  questions so far, and answers that made a mirror whole
    """

    def __init__(self, fleet: Fleet, ask: Ask, clock: Clock) -> None:
        """Watch a fleet's mirrors.

        Args:  ask: what lies in the cache of a rank, by its worker's card, its key and its publisher's id;
                    raises WorkerUnreachable or WireError.
        """
        self.asked = 0
        self.taken = 0
        self._fleet, self._ask, self._clock = fleet, ask, clock
        self._retry_at_s: dict[WorkerKey, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to look after the mirrors."""
        self._task = asyncio.create_task(self._run(), name="resync")
        self._task.add_done_callback(_tell_failure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave them as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Ask those that are due, a few at a time."""
        mirrors = self._fleet.mirrors()
        present = {key for _, key, _ in mirrors}
        self._retry_at_s = {key: at_s for key, at_s in self._retry_at_s.items() if key in present}
        due = [
            (card, key, mirror)
            for card, key, mirror in mirrors
            if mirror.asks is not None and self._clock.monotonic_s() >= self._retry_at_s.get(key, 0.0)
        ]
        outcomes, places = Counter[str](), asyncio.Semaphore(AT_ONCE)

        async def ask(card: WorkerCard, key: WorkerKey, mirror: CacheMirror) -> None:
            async with places:
                publisher_id = mirror.asks
                if publisher_id is not None:  # it may have been cleared while others were asked
                    self._retry_at_s[key] = self._clock.monotonic_s() + RETRY_S
                    outcomes[await self._one(card, key, mirror, publisher_id)] += 1

        async with asyncio.TaskGroup() as asking:
            for card, key, mirror in due:
                asking.create_task(ask(card, key, mirror), name=f"ask for the cache of {key.worker_id}")
        if outcomes:
            log.info(telemetry.CACHES_ASKED, **outcomes)

    async def _run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def _one(self, card: WorkerCard, key: WorkerKey, mirror: CacheMirror, publisher_id: int) -> str:
        held = None
        self.asked += 1
        mirror.ask()
        try:
            held = await self._ask(card, key, publisher_id)
        except (WorkerUnreachable, WireError):
            return "unanswered"
        finally:
            taken = mirror.answer(publisher_id, held, self._clock.monotonic_s())
        self.taken += taken
        return "taken" if taken else "overtaken"


def _tell_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(telemetry.RESYNC_ENDED, error=repr(error))
