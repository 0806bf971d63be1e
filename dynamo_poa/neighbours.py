"""What other routers have in flight on the same workers, by what they tell the controller anyway.

Owns: listening to the routers' own decisions; their requests in one ledger a leg; letting go of those of a
      router that has fallen silent.
Does not own: the message (wire.py), sending it (reporter.py), this router's own requests (its ledger).
Invariant: bounded whatever comes; what is wrong is dropped and counted. Ages are measured from local receipt.
Source: cases R3, R7: routers that see one and the same picture choose the same worker, each. A decision is
        told within `batch_s`, 50 ms; forward-pass metrics say the same a pass and a tick later.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import msgspec

from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.ledger import Ledger, Ticket
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import VERSION, Chosen, DecisionBatch, FirstToken, subject

SILENT_S = 3.0  # a router says at least once a second that it lives
OLD_S = 120.0  # by then a request's end has been lost
SWEEP_S = 1.0
MAX_ROUTERS = 256
MAX_REQUESTS = 100_000

_decode = msgspec.msgpack.Decoder(DecisionBatch).decode


class _Router:
    """One other router: when it was last heard, its count of batches, its requests, oldest first."""

    def __init__(self) -> None:
        self.heard_at_s = 0.0
        self.sequence = -1
        self.requests: dict[tuple[Role, str], tuple[Ticket, float]] = {}


class Neighbours:
    """The other routers' requests. Enter it to listen.

    ledgers:  by leg
    refused:  messages by reason
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        router_id: str,
        ledgers: Mapping[Role, Ledger],
        holder: CoefficientsHolder,
        clock: Clock,
    ) -> None:
        self.ledgers = ledgers
        self.refused: Counter[str] = Counter()
        self._bus, self._subject, self._router_id = bus, subject(namespace, "decisions"), router_id
        self._output_tokens = holder.latest_output_tokens
        self._now_s = clock.monotonic_s
        self._routers: dict[str, _Router] = {}
        self._in_flight = 0
        self._swept_at_s = self._now_s()

    async def __aenter__(self) -> Self:
        """Subscribe."""
        self._bus.subscribe(self._subject, lambda _, data: self.receive(data))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it to the bus, which closes after."""

    @property
    def count(self) -> int:
        """Return how many are heard."""
        self._sweep()
        return len(self._routers)

    def heard(self, routers: int) -> bool:
        """Tell whether all others of so many routers are heard: what they have is then all there is."""
        return self.count >= routers - 1

    def receive(self, data: bytes) -> None:
        """Take a router's batch of decisions."""
        try:
            batch = _decode(data)
        except msgspec.ValidationError:
            self.refused["schema"] += 1
            return
        except (msgspec.DecodeError, RecursionError):  # the latter from nesting without end
            self.refused["not_msgpack"] += 1
            return
        if batch.router_id == self._router_id:
            return
        if batch.version > VERSION:
            self.refused["version"] += 1
            return
        self._sweep()
        router = self._routers.get(batch.router_id)
        if router is None:
            if len(self._routers) >= MAX_ROUTERS:
                self.refused["too_many_routers"] += 1
                return
            router = self._routers[batch.router_id] = _Router()
        if batch.sequence <= router.sequence:  # the same name counts anew: its requests died with its process
            self._end_all(router, tuple(Role))
        router.heard_at_s, router.sequence = self._now_s(), batch.sequence
        if not batch.events:
            # Nothing left to report and none of a leg running: the end of those we still hold was lost.
            self._end_all(router, tuple(role for role in Role if not batch.in_flight.get(role)))
        for event in batch.events:
            if isinstance(event, Chosen):
                self._chosen(router, event)
            elif isinstance(event, FirstToken):
                known = router.requests.get((event.role, event.request_id))
                if known is not None:
                    known[0].first_token()
            else:
                self._end(router, (event.role, event.request_id))

    def _chosen(self, router: _Router, event: Chosen) -> None:
        key = event.role, event.request_id
        self._end(router, key)  # another attempt: the one before it is over
        ledger = self.ledgers.get(event.role)
        if ledger is None:
            return
        if self._in_flight >= MAX_REQUESTS:
            self.refused["too_many_requests"] += 1
            return
        uncached_tokens = max(event.prompt_tokens - event.cached_tokens, 0)
        ticket = ledger.enter(
            WorkerKey(event.worker_id, event.dp_rank),
            prompt_tokens=event.prompt_tokens,
            uncached_tokens=0 if event.role is Role.DECODE else uncached_tokens,
            output_tokens=self._output_tokens(event.role),
            blocks=0,
        )
        router.requests[key] = ticket, self._now_s()
        self._in_flight += 1

    def _end_all(self, router: _Router, roles: Collection[Role]) -> None:
        for key in [key for key in router.requests if key[0] in roles]:
            self._end(router, key)

    def _end(self, router: _Router, key: tuple[Role, str]) -> None:
        known = router.requests.pop(key, None)
        if known is not None:
            known[0].end()
            self._in_flight -= 1

    def _sweep(self) -> None:
        """Let go of routers that have fallen silent, and of requests whose end was lost."""
        now_s = self._now_s()
        if now_s - self._swept_at_s < SWEEP_S:
            return
        self._swept_at_s = now_s
        for router_id, router in list(self._routers.items()):
            silent = now_s - router.heard_at_s >= SILENT_S
            old = [key for key, (_, at_s) in router.requests.items() if silent or now_s - at_s >= OLD_S]
            for key in old:
                self._end(router, key)
            if silent:
                del self._routers[router_id]
