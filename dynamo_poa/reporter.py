"""Sends the router's decisions to the controller in batches, off the request path.

Owns: the bounded queue of decision events, its batching, its drop count, the router's once-a-second status.
Does not own: what is decided (trip.py) or how it is used (decisions.py).
Invariant: reporting never waits and never fails a request; what does not fit is dropped and counted.
Source: Decision of the architecture's contracts.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.errors import BusError
from dynamo_poa.sender import Publisher, Sender
from dynamo_poa.wire import DecisionBatch, DecisionEvent, subject

log = structlog.get_logger(__name__)
MAX_BATCH_BYTES = 512 * 1024  # half of what a NATS server takes by default: 64 events of 64 workers are 80 kB
STATUS_S = 1.0  # an empty batch after so long says that the router lives and which parameters it uses


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into every batch beside the events."""

    in_flight: dict[str, int]
    params_revision: int
    params_source: Literal["static", "heartbeat", "store"]


class DecisionReporter(Sender):
    """A queue between the request path and the bus."""

    TASK = "decision-reporter"

    def __init__(
        self,
        bus: Publisher,
        namespace: str,
        router_id: str,
        status: Callable[[], RouterStatus],
        *,
        clock: Clock,
        batch_s: float,
        batch_size: int,
        queue_size: int,
    ) -> None:
        self._bus, self._subject = bus, subject(namespace, "decisions")
        self._router_id, self._status, self._clock = router_id, status, clock
        self._batch_s, self._batch_size, self._queue_size = batch_s, batch_size, queue_size
        self._events: deque[DecisionEvent] = deque()
        self._wake = asyncio.Event()
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped = 0
        self.sent = 0
        self.loop_lag_s = 0.0  # delay of the event loop in the last batch period that ran its full length

    def add(self, event: DecisionEvent) -> None:
        """Queue one event. Returns at once."""
        if len(self._events) >= self._queue_size:
            self._events.popleft()  # the newest say more of what is going on now
            self.dropped += 1
        self._events.append(event)
        if len(self._events) == self._batch_size:
            self._wake.set()

    async def _send_on(self) -> None:
        last_sent_at_s = -STATUS_S
        while True:
            before_s = self._clock.monotonic_s()
            full = await self._pause()
            now_s = self._clock.monotonic_s()
            if not full:
                self.loop_lag_s = max(0.0, now_s - before_s - self._batch_s)
            if self._events or now_s - last_sent_at_s >= STATUS_S:
                await self._send_all()
                last_sent_at_s = now_s

    async def _pause(self) -> bool:
        """Wait for the batch period; True when a full batch cut it short."""
        self._wake.clear()
        pause = asyncio.ensure_future(self._clock.sleep(self._batch_s))
        full = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({pause, full}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            full.cancel()
        return self._wake.is_set()

    async def _send_all(self) -> None:
        """Send all that is queued, at least one batch; keep it when the bus is away."""
        while True:
            data, count = self._next_batch()
            taken = [self._events.popleft() for _ in range(count)]
            try:
                await self._bus.publish(self._subject, data)
            except BusError:
                self._events.extendleft(reversed(taken))
                return
            self._sequence += 1
            self.sent += count
            if not self._events:
                return

    def _next_batch(self) -> tuple[bytes, int]:
        """Encode as many events as fit; one that does not fit alone is dropped and counted."""
        status = self._status()
        size = self._batch_size
        while True:
            events = tuple(itertools.islice(self._events, size))
            data = self._encoder.encode(
                DecisionBatch(
                    router_id=self._router_id,
                    sequence=self._sequence,
                    sent_at_s=self._clock.wall_s(),
                    events=events,
                    dropped=self.dropped,
                    in_flight=status.in_flight,
                    params_revision=status.params_revision,
                    params_source=status.params_source,
                    loop_lag_s=self.loop_lag_s,
                )
            )
            if len(data) <= MAX_BATCH_BYTES or not events:
                return data, len(events)
            if len(events) == 1:
                self._events.popleft()
                self.dropped += 1
            size = max(len(events) // 2, 1)
