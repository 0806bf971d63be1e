"""How Dynamo's own routers learn of a request that was pinned to a worker: as of a replica's booking.

Owns: Dynamo's replica-sync events on the wire, their order, holding them while the bus is away.
Does not own: which worker it is (picker.py); Dynamo's own bookings (dynamo_host.py).
Invariant: an end never overtakes its beginning: all events of a leg go one way, in order. What began ends;
           what was never told is not ended either. Nothing here waits on the request path.
Source: KvRouter.best_worker takes no pin, and generate_from_request carries the answer through Python. A
        KvRouter with `router_replica_sync` books what it hears here, ours and every replica's: measured on
        1.4.2: potential loads, potential blocks and kv_metrics are those of a booking of its own, `free` and
        `mark_prefill_complete` of any of them end it, a duplicate or an unknown id changes nothing.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_poa.clock import Clock
from dynamo_poa.errors import BusError
from dynamo_poa.sender import Publisher, Sender
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import ACTIVE_SEQUENCES

GATHER_S = 0.005  # events that come together cost one waking-up; nobody waits for them
RETRY_S = 0.5
MAX_UNSENT = 4096  # bookings that wait while the bus is away; more are not told
# From then on the beginning has surely been heard, so that Dynamo's own call, which no lost message can undo,
# does for the end.
HEARD_S = 2.0

Hashes = Callable[[Sequence[int]], list[int]]


class _Booked:
    """A booking that is to be told, or was."""

    __slots__ = ("added_at_s", "ended", "sent", "token_ids", "uncached_tokens", "worker")

    def __init__(
        self, worker: WorkerKey, token_ids: Sequence[int], uncached_tokens: int | None, added_at_s: float
    ) -> None:
        self.worker, self.uncached_tokens, self.added_at_s = worker, uncached_tokens, added_at_s
        self.token_ids: Sequence[int] = token_ids  # until they are sent
        self.sent = self.ended = False


class PinnedBookings(Sender):
    """The pinned bookings of one leg. Enter it to send.

    subject:  the worker endpoint's, of active_sequences_events
    untold:   bookings that were not told: too many waited, or Dynamo makes nothing of their tokens
    """

    TASK = "pinned bookings"

    def __init__(
        self, bus: Publisher, worker_endpoint: str, hashes: Hashes, clock: Clock, rng: random.Random
    ) -> None:
        namespace, component, endpoint = worker_endpoint.split(".")
        self.subject = f"namespace.{namespace}.component.{component}.endpoint.{endpoint}.{ACTIVE_SEQUENCES}"
        self.untold = 0
        self._bus, self._hashes, self._clock = bus, hashes, clock
        self._publisher_id, self._router_id = rng.getrandbits(52), rng.getrandbits(63)
        self._sequence = 0
        self._open: dict[str, _Booked] = {}
        self._events: deque[tuple[str, _Booked, str]] = deque()
        self._wake = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def open(self) -> int:
        """Return how many bookings have not ended."""
        return len(self._open)

    def add(
        self, booking: str, worker: WorkerKey, token_ids: Sequence[int], uncached_tokens: int | None
    ) -> bool:
        """Have a request counted as a worker's load; False when there is no telling it now.

        Args:  uncached_tokens: to be prefilled there; None where no prompt is computed, on the decode leg.
        """
        if len(self._events) >= MAX_UNSENT:
            self.untold += 1
            return False
        booked = _Booked(worker, token_ids, uncached_tokens, self._clock.monotonic_s())
        self._open[booking] = booked
        self._put(booking, booked, "AddRequest")
        return True

    def prefilled(self, booking: str) -> bool:
        """Tell that the first token is out; False when the booking is not one of these."""
        booked = self._open.get(booking)
        if booked is None:
            return False
        if booked.uncached_tokens is not None:
            self._put(booking, booked, "MarkPrefillCompleted")
        return True

    def free(self, booking: str) -> bool:
        """End a booking; False when that is still to be done, by Dynamo's own call."""
        booked = self._open.pop(booking, None)
        if booked is None:
            return False
        booked.ended = True
        if booked.sent and self._clock.monotonic_s() - booked.added_at_s >= HEARD_S:
            return False
        self._put(booking, booked, "Free")
        return True

    def _put(self, booking: str, booked: _Booked, what: str) -> None:
        self._events.append((booking, booked, what))
        self._wake.set()

    async def _send_on(self) -> None:
        while True:
            await self._wake.wait()
            await self._clock.sleep(GATHER_S)
            self._wake.clear()
            if not await self._send_all():
                await self._clock.sleep(RETRY_S)
                self._wake.set()

    async def _send_all(self) -> bool:
        """Send what waits, oldest first; False when the bus is away."""
        while self._events:
            booking, booked, what = self._events[0]
            # One that has ended before it was told is nobody's load.
            if booked.sent or (what == "AddRequest" and not booked.ended):
                try:
                    await self._bus.publish(self.subject, self._message(booking, booked, what))
                except BusError:
                    return False
                except (
                    TypeError,
                    ValueError,
                    OverflowError,
                ):  # of the hashes: one request's trouble, no leg's
                    self.untold += 1
                    self._events.popleft()
                    continue
                self._sequence += 1
                booked.sent, booked.token_ids = True, ()
            self._events.popleft()
        return True

    def _message(self, booking: str, booked: _Booked, what: str) -> bytes:
        """Return Dynamo's form: an envelope, and in it msgpack again."""
        data: Any = what
        if what == "AddRequest":
            tokens = booked.uncached_tokens
            hint = {"initial_effective_prefill_tokens": tokens, "expected_prefill_duration": None}
            data = {
                "AddRequest": {
                    "token_sequence": self._hashes(booked.token_ids),
                    "track_prefill_tokens": tokens is not None,
                    "expected_output_tokens": None,
                    "prefill_load_hint": hint if tokens else None,
                }
            }
        body = {
            "request_id": booking,
            "worker": {"worker_id": booked.worker.worker_id, "dp_rank": booked.worker.dp_rank},
            "data": data,
            "router_id": self._router_id,
            "lora_name": None,
        }
        return self._encode(
            {
                "publisher_id": self._publisher_id,
                "sequence": self._sequence,
                "published_at": int(self._clock.wall_s() * 1000),
                "topic": ACTIVE_SEQUENCES,
                "payload": self._encode(body),
            }
        )
