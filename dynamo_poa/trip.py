"""Decides which worker takes one leg of one request, and what is told of that leg from first to last.

Owns: stamping the current parameters on Dynamo's own choice; the booking; drawing around workers that are not
      to be sent to; the events of a leg, and its counts.
Does not own: sending, and whether to try again (router.py); how Dynamo scores workers (KvRouter does), what
              the parameters should be (the controller).
Invariant: a trip holds at most one booking, and none after `end`.
Source: contract: the relay path must be able to use the same choosing, booking and reporting, so a worker is
        chosen and booked by hand.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock
from dynamo_poa.errors import PoaError, Unhashed, Unpicked
from dynamo_poa.handover import Handovers, meeting_place, room_of
from dynamo_poa.ledger import Ticket
from dynamo_poa.picker import Picker, Ranks
from dynamo_poa.values import (
    MAX_ROUTER_TEMPERATURE,
    Booked,
    Candidate,
    Outcome,
    Role,
    RouterParams,
    Selection,
    WorkerCard,
    WorkerKey,
)
from dynamo_poa.wire import Chosen, DecisionEvent, Ended, FirstToken, Handover

PICKS = 32  # draws among all workers until one comes up that is well and new, and again for second best

# (params, the request's own preset) -> KvRouter's override
Override = Callable[[RouterParams, dict[str, Any] | None], dict[str, Any]]


class Pool(Protocol):
    """Dynamo's router over one pool of workers: dynamo_host.WorkerPool, or a fake in tests."""

    async def candidates(self, token_ids: list[int]) -> tuple[Candidate, ...]:
        """Return every worker's load before this prompt, and its uncached tokens there."""
        ...

    async def overlaps(self, token_ids: list[int]) -> dict[tuple[int, int], int]:
        """Return how many of the prompt's tokens each rank holds, or raise Unpicked."""
        ...

    def prefix(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the hashes of the prompt's prefixes as `wire.Chosen` tells them, or raise Unhashed."""
        ...

    def book_pinned(
        self, token_ids: list[int], worker: WorkerKey, uncached_tokens: int, booking: str
    ) -> bool:
        """Count the request as the load of this worker; False where Dynamo's router will not know of it."""
        ...

    async def book(self, token_ids: list[int], override: dict[str, Any], booking: str) -> Booked:
        """Choose a worker and count the request as its load."""
        ...

    def prefilled(self, booking: str) -> None:
        """Tell that the first token is out."""
        ...

    def free(self, booking: str) -> None:
        """End a booking."""
        ...

    async def send(
        self, request: dict[str, Any], worker: WorkerKey, context: Any
    ) -> tuple[Any, AsyncIterator[Any]]:
        """Send and wait for the first chunk, or raise WorkerUnreachable or AnswerFailed."""
        ...


class Params(Protocol):
    """Where the current parameters are read: params.ParamsHolder."""

    current: RouterParams


class Events(Protocol):
    """Where decisions are reported: reporter.DecisionReporter."""

    def add(self, event: DecisionEvent) -> None:
        """Queue one event without waiting."""
        ...


class Directory(Ranks, Protocol):
    """Who is alive, by model card: dynamo_host.WorkerDirectory. No card: gone, refused or not known yet."""

    def refresh(self) -> None:
        """Take over what discovery says now."""
        ...

    def refused(self, worker_id: int) -> bool:
        """Tell whether the worker is alive but not to be used."""
        ...


class RequestRefused(PoaError):
    """The request cannot be routed and no retry would help; the frontend turns it into an error."""


class RouterStats:
    """Counts of one router process, over all its legs.

    marginal:  requests that were to go by marginal cost: `picked`, or why Dynamo's own selection had them
    untold:    of the picked, those that Dynamo's router does not know of as load
    unhashed:  sampled decisions told without the prompt's prefix, because Dynamo did not hash it
    """

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.retries: Counter[str] = Counter()
        self.marginal: Counter[str] = Counter()
        self.untold = 0
        self.unhashed = 0


class Sampler:
    """Lets through so many a second; what was not used up to a second's worth, so bursts are whole."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._at_s = per_s, clock.monotonic_s()

    def take(self) -> bool:
        """Tell whether this one may."""
        now_s = self._clock.monotonic_s()
        self._left = min(self._left + (now_s - self._at_s) * self._per_s, max(self._per_s, 1.0))
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LegMeans:
    """What all trips of one leg share.

    handovers:  None for sequential hand-over
    picker:     None where Dynamo's own selection is all there is
    """

    role: Role
    pool: Pool
    override: Override
    params: Params
    events: Events
    directory: Directory
    handovers: Handovers | None
    avoid: AvoidList
    stats: RouterStats
    sampler: Sampler
    clock: Clock
    picker: Picker | None = None

    def bootstrap_card(self, worker_id: int) -> WorkerCard | None:
        """Return a prefill worker's card once it says where decode workers find it."""
        card = self.directory.card(worker_id)
        if card is None or card.bootstrap_host is None or card.bootstrap_port is None:
            return None
        return card

    def usable(self, worker_id: int, *, handover: bool) -> bool:
        """Tell whether a worker that Dynamo picks may be sent to now."""
        if worker_id in self.avoid or self.directory.refused(worker_id):
            return False
        if not handover or self.role is not Role.PREFILL or self.bootstrap_card(worker_id) is not None:
            return True
        self.directory.refresh()  # KvRouter saw it a moment before us
        return self.bootstrap_card(worker_id) is not None


class Trip:
    """One leg of one request: its booking and what has been reported of it."""

    __slots__ = (
        "_booking",
        "_bootstrap",
        "_means",
        "_received_at_s",
        "_started_at_s",
        "_ticket",
        "announced",
        "handover",
        "renamed",
        "request",
        "request_id",
        "room",
        "tried",
    )

    def __init__(self, means: LegMeans, request: dict[str, Any], request_id: str) -> None:
        self._means, self.request, self.request_id = means, request, request_id
        self._received_at_s, self._started_at_s = means.clock.wall_s(), means.clock.monotonic_s()
        self._booking: str | None = None
        self._ticket: Ticket | None = None
        self.announced = False  # to the decode leg
        self.renamed = False  # at its engines, on both legs
        self.tried: set[int] = set()  # in vain: another worker comes first
        self._bootstrap: dict[str, Any] = request.get("bootstrap_info") or {}
        self.handover = means.handovers if self._bootstrap else None
        self.room = room_of(self._bootstrap)  # tells this leg from another of the same id
        means.stats.in_flight[means.role] += 1

    async def choose(self, attempt: int) -> WorkerKey:
        """Choose as the current parameters say, book, and report the decision.

        Raises:  RequestRefused for an empty prompt: KvRouter dies of one.
        """
        means = self._means
        token_ids = self.request.get("token_ids")
        if not token_ids:
            raise RequestRefused("token_ids = []: must hold at least one token")
        params = means.params.current
        sampled, picked = means.sampler.take(), None
        if params.selection is Selection.MARGINAL and means.picker is not None:
            picked = await self._pick(means.picker, token_ids, record=sampled)
        if picked is None:
            override = means.override(params, self.request.get("router_config_override"))
            candidates = await means.pool.candidates(token_ids) if sampled else ()
            booked, picks = await self._book(token_ids, override)
            if picks > 1:
                candidates = ()  # a draw around a dead worker says nothing of the policy: it is not priced
            self._enter(booked, len(token_ids))
        else:
            booked, candidates = picked
        worker = booked.worker
        means.events.add(
            Chosen(
                request_id=self.request_id,
                role=means.role,
                at_s=means.clock.wall_s(),
                received_at_s=self._received_at_s,
                worker_id=worker.worker_id,
                dp_rank=worker.dp_rank,
                prompt_tokens=len(token_ids),
                revision=params.revision,
                attempt=attempt,
                candidates=candidates,
                cached_tokens=booked.cached_tokens,
                prefix=self._prefix(token_ids) if sampled else (),
            )
        )
        return worker

    def _prefix(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the prompt's prefixes, none where it is not computed or was not hashed."""
        if self._means.role is Role.DECODE:
            return ()
        try:
            return self._means.pool.prefix(token_ids)
        except Unhashed:
            self._means.stats.unhashed += 1
            return ()

    async def _pick(
        self, picker: Picker, token_ids: list[int], *, record: bool
    ) -> tuple[Booked, tuple[Candidate, ...]] | None:
        """Pick by marginal cost and book; None, counted, where Dynamo's own selection is to have the request.

        From the pick to the booking nothing is waited for: the next pick knows of this one.
        """
        means, stats = self._means, self._means.stats.marginal
        try:
            picker.speeds()
            # the decode leg computes no prompt
            cached = {} if means.role is Role.DECODE else await means.pool.overlaps(token_ids)
            picked = picker.pick(
                picker.speeds(),
                len(token_ids),
                self._most_output_tokens(),
                cached,
                tried=self.tried,
                reachable=self.handover is not None,
                record=record,
            )
        except Unpicked as unpicked:
            stats[unpicked.reason] += 1
            return None
        stats["picked"] += 1
        booking = uuid.uuid4().hex
        if means.pool.book_pinned(token_ids, picked.worker, picked.uncached_tokens, booking):
            self._booking = booking
        else:
            means.stats.untold += 1
        cached_tokens = 0 if means.role is Role.DECODE else len(token_ids) - picked.uncached_tokens
        booked = Booked(picked.worker, cached_tokens)
        self._enter(booked, len(token_ids))
        return booked, picked.candidates

    def _enter(self, booked: Booked, prompt_tokens: int) -> None:
        """Count the request as its worker's, whoever chose it: the next pick by marginal cost must know."""
        picker = self._means.picker
        if picker is None:
            return
        self._ticket = picker.ledger.enter(
            booked.worker,
            prompt_tokens=prompt_tokens,
            uncached_tokens=0 if self._means.role is Role.DECODE else prompt_tokens - booked.cached_tokens,
            output_tokens=picker.output_tokens(self._most_output_tokens()),
            blocks=picker.blocks(booked.worker.worker_id, prompt_tokens),
        )

    def _most_output_tokens(self) -> int | None:
        """Return how many tokens are asked for at most, None where the request does not say."""
        conditions = self.request.get("stop_conditions")
        most = conditions.get("max_tokens") if isinstance(conditions, dict) else None
        return most if isinstance(most, int) and most > 0 else None

    async def _book(self, token_ids: list[int], override: dict[str, Any]) -> tuple[Booked, int]:
        """Book; where Dynamo picks a worker to be avoided, draw among all until another comes up.

        KvRouter knows no exclusion, and a dead worker looks idlest to it, so the draw is uniform. Second best
        is one that was tried in vain but is well, then one to be avoided that was not tried: it may be back.

        Returns:  the booking and how many picks it took.
        """
        means, some_well = self._means, False
        for pick in range(1, 2 * PICKS + 1):
            # not the request's id: KvRouter refuses one it has, and a second request may carry the same
            self._booking = uuid.uuid4().hex
            booked = await means.pool.book(token_ids, override, self._booking)
            worker_id = booked.worker.worker_id
            untried = worker_id not in self.tried
            well = means.usable(worker_id, handover=self.handover is not None)
            some_well = some_well or well
            if (well and untried) or (pick > PICKS and (well if some_well else untried)):
                break
            if pick < 2 * PICKS:  # the last one stays: better a refused connection than no answer
                self.release()
                override = {**override, "router_temperature": MAX_ROUTER_TEMPERATURE}
        return booked, pick

    def first_token(self) -> None:
        """Note that the first chunk came."""
        means = self._means
        if self._ticket is not None:
            self._ticket.first_token()
        if self._booking is not None:
            means.pool.prefilled(self._booking)
        means.events.add(FirstToken(request_id=self.request_id, role=means.role, at_s=means.clock.wall_s()))

    @property
    def moved(self) -> Callable[[], None]:
        """Return what is to be called at each sign of life from the worker."""
        return _nothing if self._ticket is None else self._ticket.work.moved

    def address(self, note: Handover) -> None:
        """Write where and under which id the engines meet to where they look for it."""
        self.request["bootstrap_info"] = meeting_place(self._bootstrap, note)
        self.renamed = note.renamed

    def given_up(self) -> bool:
        """Tell, of a prefill leg that was announced, whether its decode leg wants nothing any more."""
        if not self.announced or self.handover is None:
            return False
        return self.handover.given_up(self.request_id, self.room)

    def age_s(self) -> float:
        """Return for how long this leg has been here."""
        return self._means.clock.monotonic_s() - self._started_at_s

    def release(self) -> None:
        """End the booking, if there is one."""
        if self._ticket is not None:
            self._ticket.end()
            self._ticket = None
        if self._booking is not None:
            self._means.pool.free(self._booking)
            self._booking = None

    def end(self, outcome: Outcome, orphan_check: asyncio.TimerHandle | None) -> None:
        """End the booking and report how it went. In the loop's thread only: timers are the loop's."""
        means = self._means
        if orphan_check is not None:
            orphan_check.cancel()
        self.release()
        if self.handover is not None:
            if means.role is Role.DECODE:
                self.handover.forget(self.request_id, self.room)
            elif outcome is not Outcome.OK:
                refused = outcome is Outcome.SHED
                gone = outcome is Outcome.CANCELLED
                expected = not (self.announced or gone)
                self.handover.fail(self.request_id, self.room, expected=expected, refused=refused)
        means.stats.in_flight[means.role] -= 1
        means.stats.ended[means.role, outcome] += 1
        means.events.add(
            Ended(request_id=self.request_id, role=means.role, at_s=means.clock.wall_s(), outcome=outcome)
        )


def _nothing() -> None:
    """Do nothing: nobody wants to know."""
