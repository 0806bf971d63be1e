"""Fakes of the router's seams: a pool with scripted workers, an event sink, a directory, a context."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dynamo_poa.errors import WorkerUnreachable
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.values import Booked, Candidate, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import DecisionEvent

A = 14370722098883561847  # above 2**63, and equal to B as a double
B = 14370722098883561846


class FakeContext:
    """Dynamo's request context: an id and a stop flag."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self.stopped = False

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return self.stopped

    def stop_generating(self) -> None:
        self.stopped = True


class FakePool:
    """Picks the least booked worker at τ = 0 and round-robin at any other; remembers all that was asked."""

    def __init__(self, workers: list[int], role: Role = Role.AGGREGATED) -> None:
        self.workers, self.role = workers, role
        self.booked: dict[str, WorkerKey] = {}
        self.freed: list[str] = []
        self.prefilled_ids: list[str] = []
        self.overrides: list[dict[str, Any]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.unreachable: set[int] = set()
        self.tokens = 3
        self.gate: asyncio.Event | None = None
        self.before_first: Callable[[], Any] | None = None
        self.fail_after: int | None = None
        self.last_chunk: dict[str, Any] = {"token_ids": [], "finish_reason": "length"}
        self.cached_tokens: dict[int, int] = {}  # by worker, for pinned requests
        self.pinned: list[tuple[int, int]] = []
        self.tells_pinned = True
        self.overlaps_asked = 0
        self.overlaps_error: Exception | None = None
        self.prefixes_asked = 0
        self.prefix_error: Exception | None = None
        self._turn = 0

    async def candidates(self, token_ids: list[int]) -> tuple[Candidate, ...]:
        uncached_tokens = 0 if self.role is Role.DECODE else len(token_ids)
        return tuple(Candidate(w, 0, uncached_tokens, 0, 0, 0) for w in self.workers)

    async def overlaps(self, token_ids: list[int]) -> dict[tuple[int, int], int]:
        self.overlaps_asked += 1
        if self.overlaps_error is not None:
            raise self.overlaps_error
        return {(worker, 0): tokens for worker, tokens in self.cached_tokens.items()}

    def prefix(self, token_ids: list[int]) -> tuple[int, ...]:
        self.prefixes_asked += 1
        if self.prefix_error is not None:
            raise self.prefix_error
        return prefix_hashes(token_ids)  # a block is a token

    def book_pinned(
        self, token_ids: list[int], worker: WorkerKey, uncached_tokens: int, booking: str
    ) -> bool:
        assert booking not in self.booked, "a booking id is used once"
        if self.tells_pinned:
            self.booked[booking] = worker
            self.pinned.append((worker.worker_id, uncached_tokens))
        return self.tells_pinned

    async def book(self, token_ids: list[int], override: dict[str, Any], booking: str) -> Booked:
        assert token_ids, "KvRouter dies of an empty token list"
        assert booking not in self.booked, "a booking id is used once"
        self.overrides.append(override)
        self._turn += 1
        held = [key.worker_id for name, key in self.booked.items() if name not in self.freed]
        worker = (
            min(self.workers, key=held.count)
            if override.get("router_temperature") == 0
            else self.workers[self._turn % len(self.workers)]
        )
        self.booked[booking] = WorkerKey(worker, 0)
        return Booked(self.booked[booking], 0)

    def prefilled(self, booking: str) -> None:
        self.prefilled_ids.append(booking)

    def free(self, booking: str) -> None:
        self.freed.append(booking)

    async def send(
        self, request: dict[str, Any], worker: WorkerKey, context: Any
    ) -> tuple[Any, AsyncIterator[Any]]:
        self.sent.append((worker.worker_id, {**request}))
        if worker.worker_id in self.unreachable:
            raise WorkerUnreachable(worker.worker_id, "Connection refused (os error 111)")
        if self.before_first is not None:
            await self.before_first()
        return {"token_ids": [1000], "routing_data": {"worker_id": {}}}, self._rest()

    async def _rest(self) -> AsyncIterator[Any]:
        for number in range(1, self.tokens):
            if self.gate is not None:
                await self.gate.wait()
            if self.fail_after == number:
                raise RuntimeError("engine gone")
            yield {"token_ids": [1000 + number]}
        yield self.last_chunk

    def open_bookings(self) -> list[str]:
        """Return the bookings that were never ended."""
        return [booking for booking in self.booked if booking not in self.freed]


class EventList(list[DecisionEvent]):
    """An event sink that keeps everything."""

    def add(self, event: DecisionEvent) -> None:
        self.append(event)


class FakeDirectory:
    """Cards by worker id."""

    def __init__(self, *cards: WorkerCard) -> None:
        self._cards = {card.worker_id: card for card in cards}
        self._listed: dict[Role, tuple[WorkerCard, ...]] = {}
        self._ranks: dict[Role, list[tuple[WorkerKey, WorkerCard]]] = {}
        self.late: dict[int, WorkerCard] = {}
        self.unusable: set[int] = set()

    def card(self, worker_id: int) -> WorkerCard | None:
        return self._cards.get(worker_id)

    def ranks(self, role: Role) -> Sequence[tuple[WorkerKey, WorkerCard]]:
        cards = tuple(card for card in self._cards.values() if card.role is role)
        if cards != self._listed.get(role):  # the same object until something changes
            self._listed[role] = cards
            self._ranks[role] = [
                (WorkerKey(card.worker_id, rank), card) for card in cards for rank in card.ranks
            ]
        return self._ranks[role]

    def put(self, card: WorkerCard) -> None:
        self._cards[card.worker_id] = card

    def remove(self, *worker_ids: int) -> None:
        for worker_id in worker_ids:
            del self._cards[worker_id]

    def refresh(self) -> None:
        self._cards |= self.late

    def refused(self, worker_id: int) -> bool:
        return worker_id in self.unusable


def prefill_card(worker_id: int, port: int) -> WorkerCard:
    return WorkerCard(
        worker_id=worker_id,
        role=Role.PREFILL,
        kv_block_size=16,
        bootstrap_host="127.0.0.1",
        bootstrap_port=port,
    )
