"""When the workers' cards go over the bus: discovery is not on it, and a recording needs to know them.

Owns: the announcement on `poa.<namespace>.cards` and how often it is made.
Does not own: who the workers are (dynamo_host.py), the message (wire.py), what a replay makes of it (serve/).
Invariant: every change is announced within a tick, and all of it again each ANNOUNCE_S, so that whoever comes
           later has it soon; what cannot be sent is counted and sent at the next tick.
Source: contract: serve/record.py records the subject.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec

from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock
from dynamo_poa.errors import BusError
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import WorkerCard
from dynamo_poa.wire import Cards, subject

ANNOUNCE_S = 10.0


class CardsSink:
    """Announces the cards of the moment; a sink, because it is asked once a tick."""

    def __init__(
        self, bus: Bus, namespace: str, cards: Callable[[], Iterable[WorkerCard]], clock: Clock
    ) -> None:
        self.dropped = 0
        self._bus, self._cards, self._clock = bus, cards, clock
        self._subject = subject(namespace, "cards")
        self._said: tuple[WorkerCard, ...] = ()
        self._due_at_s = clock.monotonic_s()

    async def emit(self, record: TelemetryRecord) -> None:
        """Announce the cards if they have changed or have not been announced for long."""
        now = tuple(sorted(self._cards(), key=attrgetter("worker_id")))
        unchanged = now == self._said and self._clock.monotonic_s() < self._due_at_s
        if unchanged or not (now or self._said):  # before discovery has answered there is nothing to say
            return
        try:
            message = Cards(sent_at_s=self._clock.wall_s(), cards=now)
            await self._bus.publish(self._subject, msgspec.msgpack.encode(message))
        except BusError:
            self.dropped += 1
        else:
            self._said, self._due_at_s = now, self._clock.monotonic_s() + ANNOUNCE_S
