"""Decides, for one leg of each request, which worker serves it, and passes the answer through.

Owns: the request path: stamp the current parameters on Dynamo's own choice, book, send, retry once,
      report, end the booking.
Does not own: how Dynamo scores workers (KvRouter does), what the parameters should be (the controller).
Invariant: a booking that was made ends on every way out: finished, cancelled, failed, client gone.
           Per chunk nothing is done but passing it on.
Source: contract: the relay path must be able to use the same choosing, booking and reporting, so a worker
        is chosen and booked by hand and the request sent to it directly. Measured on aggregated workers at
        concurrency 128: `Client.direct` 90 us of CPU per token, `generate_from_request` 86-90 us.
"""

import asyncio
import contextlib
import functools
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

import structlog

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock
from dynamo_poa.complaints import Complaints
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import AnswerFailed, PoaError, RequestShed, WorkerUnreachable
from dynamo_poa.handover import Handovers, meeting_place
from dynamo_poa.values import (
    MAX_ROUTER_TEMPERATURE,
    Booked,
    Candidate,
    Outcome,
    Role,
    RouterParams,
    WorkerCard,
    WorkerKey,
)
from dynamo_poa.wire import Chosen, DecisionEvent, Ended, FirstToken, Handover

log = structlog.get_logger(__name__)

ATTEMPTS = 2  # the first and one retry
MOST_ATTEMPTS = 8  # following the prefill leg included: two requests under one id could go on for ever
PICKS = 32  # draws among all workers until one comes up that is well and new, and again for second best
HANDOVER_TIMEOUT_S = 10.0  # a decode leg waits so long for the address of its prefill worker
# A decode engine may notice the end of its prefill worker before the prefill leg does, which then moves or
# fails; after so long it has not noticed, and there is nothing to notice.
MOVE_S = 2.0
CARD_S, CARD_POLL_S = 2.0, 0.05  # KvRouter offers a worker a moment before its card can be read


class Pool(Protocol):
    """Dynamo's router over one pool of workers: dynamo_host.WorkerPool, or a fake in tests."""

    async def candidates(self, token_ids: list[int]) -> tuple[Candidate, ...]:
        """Return every worker's load before this prompt, and its uncached tokens there."""
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


class Call(Protocol):
    """A request that came over the relay: relay_call.RelayCall."""

    def id(self) -> str:
        """Return the request's id, the same on both legs."""
        ...

    def is_stopped(self) -> bool:
        """Tell whether its requester has gone or wants no more."""
        ...

    def stop_generating(self) -> None:
        """Ask the worker to end."""
        ...

    async def send(self, request: dict[str, Any], worker: WorkerKey, *, again: bool = False) -> bool:
        """Send and wait for the first bytes of the answer, or raise WorkerUnreachable or AnswerFailed.

        Args:     again: an error instead of a first token is raised, not passed on.
        Returns:  whether they are a first token, not an error.
        """
        ...

    async def ended(self) -> Outcome:
        """Wait for the end of the answer and tell how it went."""
        ...


class Params(Protocol):
    """Where the current parameters are read: params.ParamsHolder."""

    current: RouterParams


class Events(Protocol):
    """Where decisions are reported: reporter.DecisionReporter."""

    def add(self, event: DecisionEvent) -> None:
        """Queue one event without waiting."""
        ...


class Directory(Protocol):
    """Who is alive, by model card: dynamo_host.WorkerDirectory."""

    def card(self, worker_id: int) -> WorkerCard | None:
        """Return a worker's card, None when it is gone, refused or not known yet."""
        ...

    def refresh(self) -> None:
        """Take over what discovery says now."""
        ...

    def refused(self, worker_id: int) -> bool:
        """Tell whether the worker is alive but not to be used."""
        ...


T = TypeVar("T")
# How a chosen worker is reached: over the request plane by Dynamo's own client, or by the relay.
Send = Callable[[dict[str, Any], WorkerKey], Awaitable[T]]


class _Account:
    """How a leg went: what it is unless a line says otherwise."""

    outcome = Outcome.FAILED


class _Moved(AnswerFailed):
    """The prefill leg goes to another worker: no failure, and as often as that leg is tried."""


class RequestRefused(PoaError):
    """The request cannot be routed and no retry would help; the frontend turns it into an error."""


class RouterStats:
    """Counts of one router process, over all its legs."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.retries: Counter[str] = Counter()


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


class Leg:
    """One leg of the requests: prefill, decode or aggregated."""

    def __init__(
        self,
        role: Role,
        pool: Pool,
        *,
        override: Any,  # (params, preset) -> KvRouter override
        params: Params,
        events: Events,
        directory: Directory,
        handovers: Handovers | None,  # None for sequential hand-over
        avoid: AvoidList,
        stats: RouterStats,
        config: RouterConfig,
        clock: Clock,
    ) -> None:
        self._role, self._pool, self._override = role, pool, override
        self._params, self._events, self._directory = params, events, directory
        self._handovers, self._avoid, self._stats = handovers, avoid, stats
        self._clock, self._sampler = clock, Sampler(config.candidates_per_s, clock)
        self._complaints = Complaints(clock)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        """Serve one leg of one request: Dynamo's endpoint handler (its second argument must be `context`)."""

        async def send(request: dict[str, Any], worker: WorkerKey) -> tuple[Any, AsyncIterator[Any]]:
            chunk, stream = await self._pool.send(request, worker, context)
            if trip.handover is not None and _is_error(chunk):
                raise AnswerFailed(worker.worker_id, str(chunk["finish_reason"]))
            return chunk, stream

        trip = _Trip(self, request, context.id())
        with self._accounted(trip, context) as account:
            chunk, stream = await self._start(trip, context, send)
            if not _is_error(chunk):
                trip.first_token()
            chunk.pop("routing_data", None)  # the frontend logs two errors per request over a second writer
            yield chunk
            async for chunk in stream:
                yield chunk
            account.outcome = _outcome(chunk, stopped=context.is_stopped())

    async def forward(self, request: dict[str, Any], call: "Call") -> None:
        """Serve one leg of one request over the relay: the answer's bytes pass `call` by, unread.

        Raises:  what `generate` does; the call tells its requester.
        """
        trip = _Trip(self, request, call.id())
        send = functools.partial(call.send, again=trip.handover is not None)
        with self._accounted(trip, call) as account:
            if await self._start(trip, call, send):
                trip.first_token()
            account.outcome = await call.ended()

    @contextlib.contextmanager
    def _accounted(self, trip: "_Trip", context: Any) -> Iterator["_Account"]:
        """End a trip on every way out, and say how it went."""
        loop = asyncio.get_running_loop()
        orphan_check = self._watch_for_orphan(trip, context)
        account = _Account()
        try:
            yield account
        except (GeneratorExit, asyncio.CancelledError):
            account.outcome = Outcome.CANCELLED
            raise
        except RequestShed:
            account.outcome = Outcome.SHED
            raise
        except PoaError:
            if not context.is_stopped():  # with the client gone there is nobody to tell
                raise
        finally:
            if account.outcome is Outcome.FAILED and context.is_stopped():
                account.outcome = Outcome.CANCELLED
            if account.outcome is Outcome.FAILED:
                error = str(sys.exception() or "the engine reported an error")
                self._complaints.say(
                    "poa.request.failed", request_id=trip.request_id, role=self._role, error=error
                )
            _run_on(loop, functools.partial(trip.end, account.outcome, orphan_check))

    def _watch_for_orphan(self, trip: "_Trip", context: Any) -> asyncio.TimerHandle | None:
        """Stop a prefill leg whose decode leg never comes: its engine would hold it for half a minute."""
        handovers = trip.handover
        if handovers is None or self._role is not Role.PREFILL:
            return None

        def check() -> None:
            if handovers.orphaned(trip.request_id):
                context.stop_generating()

        return asyncio.get_running_loop().call_later(HANDOVER_TIMEOUT_S, check)

    async def _start(self, trip: "_Trip", context: Any, send: Send[T]) -> T:
        """Choose and send; once more, on another worker, after a refused connection or an engine's error.

        With hand-over an engine's error is mostly the other leg's: its worker has died. Both legs then go on
        under an id of the prefill leg's new attempt, and on workers that have not seen the request yet: one
        that still clears up after it takes the second for the first. Source: measured, mock engine.
        """
        failures = 0
        for attempt in range(1, MOST_ATTEMPTS + 1):
            worker = await trip.choose(attempt)
            try:
                if trip.handover is not None and self._role is Role.PREFILL:
                    await self._announce(trip, worker, attempt)
                elif trip.handover is not None:
                    return await self._send_decode(trip, worker, send)
                return await send(trip.request, worker)
            except (WorkerUnreachable, AnswerFailed) as failed:
                trip.release()
                if context.is_stopped():
                    raise  # the stream ended because its client has gone: nothing is wrong with the worker
                unreachable, moved = isinstance(failed, WorkerUnreachable), isinstance(failed, _Moved)
                trip.tried.add(failed.worker_id)
                if unreachable:
                    self._avoid.add(failed.worker_id)
                failures += not moved
                if failures == ATTEMPTS or attempt == MOST_ATTEMPTS:
                    raise
                if not (unreachable or moved or trip.fresh()):
                    raise
                self._stats.retries[self._role] += 1
                log.warning(
                    "poa.worker.unreachable" if unreachable else "poa.answer.failed",
                    request_id=trip.request_id,
                    role=self._role,
                    worker_id=str(failed.worker_id),
                    error=failed.detail,
                )
        raise AssertionError("unreachable")

    async def _announce(self, trip: "_Trip", worker: WorkerKey, attempt: int) -> None:
        assert trip.handover is not None
        until_s = self._clock.monotonic_s() + CARD_S
        while (card := self._bootstrap_card(worker.worker_id)) is None:
            if self._clock.monotonic_s() >= until_s:  # not to be avoided: it is drawn around until it has one
                raise AnswerFailed(worker.worker_id, "its card gives no bootstrap address")
            await self._clock.sleep(CARD_POLL_S)
            self._directory.refresh()
        assert card.bootstrap_host is not None
        assert card.bootstrap_port is not None
        note = Handover(
            request_id=trip.request_id,
            worker_id=worker.worker_id,
            dp_rank=worker.dp_rank,
            bootstrap_host=card.bootstrap_host,
            bootstrap_port=card.bootstrap_port,
            attempt=attempt,
        )
        trip.address(note)
        trip.handover.announce(note)
        trip.announced = True

    def _bootstrap_card(self, worker_id: int) -> WorkerCard | None:
        """Return a prefill worker's card once it says where decode workers find it."""
        card = self._directory.card(worker_id)
        if card is None or card.bootstrap_host is None or card.bootstrap_port is None:
            return None
        return card

    def usable(self, worker_id: int, *, handover: bool) -> bool:
        """Tell whether a worker that Dynamo picks may be sent to now."""
        if worker_id in self._avoid or self._directory.refused(worker_id):
            return False
        if not handover or self._role is not Role.PREFILL or self._bootstrap_card(worker_id) is not None:
            return True
        self._directory.refresh()  # KvRouter saw it a moment before us
        return self._bootstrap_card(worker_id) is not None

    async def _send_decode(self, trip: "_Trip", worker: WorkerKey, send: Send[T]) -> T:
        """Wait for the prefill worker's address and send, unless the prefill leg moves elsewhere meanwhile.

        Raises:   _Moved when it has moved, HandoverFailed when it has failed; else what `send` does.
        """
        assert trip.handover is not None
        try:
            async with asyncio.timeout(HANDOVER_TIMEOUT_S):
                note, version = await trip.handover.wait(trip.request_id)
        except TimeoutError:
            raise RequestRefused(f"no prefill worker was announced within {HANDOVER_TIMEOUT_S:g} s") from None
        trip.address(note)
        sent = asyncio.ensure_future(send(trip.request, worker))
        moved = asyncio.ensure_future(trip.handover.wait(trip.request_id, after=version))
        try:
            await asyncio.wait({sent, moved}, return_when=asyncio.FIRST_COMPLETED)
            if sent.done() and isinstance(sent.exception(), AnswerFailed):
                await asyncio.wait({moved}, timeout=MOVE_S)  # it is about to, or to fail
            elif sent.done():
                return sent.result()
            if not moved.done():
                return sent.result()
            moved.result()
            raise _Moved(worker.worker_id, "its prefill leg has moved")
        finally:
            for task in (sent, moved):
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({sent})  # its request is ours to rewrite only when it is over


class _Trip:
    """One leg of one request: its booking and what has been reported of it."""

    __slots__ = (
        "_booking",
        "_bootstrap",
        "_leg",
        "_received_at_s",
        "_started_at_s",
        "announced",
        "handover",
        "request",
        "request_id",
        "tried",
    )

    def __init__(self, leg: Leg, request: dict[str, Any], request_id: str) -> None:
        self._leg, self.request, self.request_id = leg, request, request_id
        self._received_at_s, self._started_at_s = leg._clock.wall_s(), leg._clock.monotonic_s()
        self._booking: str | None = None
        self.announced = False  # to the decode leg
        self.tried: set[int] = set()  # in vain: another worker comes first
        self._bootstrap: dict[str, Any] = request.get("bootstrap_info") or {}
        self.handover = leg._handovers if self._bootstrap else None
        leg._stats.in_flight[leg._role] += 1

    async def choose(self, attempt: int) -> WorkerKey:
        """Let Dynamo choose under the current parameters; book, and report the decision.

        Raises:  RequestRefused for an empty prompt: KvRouter dies of one.
        """
        leg = self._leg
        token_ids = self.request.get("token_ids")
        if not token_ids:
            raise RequestRefused("token_ids = []: must hold at least one token")
        params = leg._params.current
        override = leg._override(params, self.request.get("router_config_override"))
        candidates = await leg._pool.candidates(token_ids) if leg._sampler.take() else ()
        booked, picks = await self._book(token_ids, override)
        worker = booked.worker
        if picks > 1:
            candidates = ()  # a draw around a dead worker says nothing of the policy: it is not priced
        leg._events.add(
            Chosen(
                request_id=self.request_id,
                role=leg._role,
                at_s=leg._clock.wall_s(),
                received_at_s=self._received_at_s,
                worker_id=worker.worker_id,
                dp_rank=worker.dp_rank,
                prompt_tokens=len(token_ids),
                revision=params.revision,
                attempt=attempt,
                candidates=candidates,
                cached_tokens=booked.cached_tokens,
            )
        )
        return worker

    async def _book(self, token_ids: list[int], override: dict[str, Any]) -> tuple[Booked, int]:
        """Book; where Dynamo picks a worker to be avoided, draw among all until another comes up.

        KvRouter knows no exclusion, and a dead worker looks idlest to it, so the draw is uniform. Second best
        is one that was tried in vain but is well, then one to be avoided that was not tried: it may be back.

        Returns:  the booking and how many picks it took.
        """
        leg, some_well = self._leg, False
        for pick in range(1, 2 * PICKS + 1):
            # not the request's id: KvRouter refuses one it has, and a second request may carry the same
            self._booking = uuid.uuid4().hex
            booked = await leg._pool.book(token_ids, override, self._booking)
            worker_id = booked.worker.worker_id
            untried = worker_id not in self.tried
            well = leg.usable(worker_id, handover=self.handover is not None)
            some_well = some_well or well
            if (well and untried) or (pick > PICKS and (well if some_well else untried)):
                break
            if pick < 2 * PICKS:  # the last one stays: better a refused connection than no answer
                self.release()
                override = {**override, "router_temperature": MAX_ROUTER_TEMPERATURE}
        return booked, pick

    def first_token(self) -> None:
        """Note that the first chunk came."""
        leg = self._leg
        if self._booking is not None:
            leg._pool.prefilled(self._booking)
        leg._events.add(FirstToken(request_id=self.request_id, role=leg._role, at_s=leg._clock.wall_s()))

    def address(self, note: Handover) -> None:
        """Write where and under which id the engines meet to where they look for it."""
        self.request["bootstrap_info"] = meeting_place(self._bootstrap, note)

    def fresh(self) -> bool:
        """Tell whether the other leg can still be waiting for this one."""
        return self._leg._clock.monotonic_s() - self._started_at_s < HANDOVER_TIMEOUT_S

    def release(self) -> None:
        """End the booking, if there is one."""
        if self._booking is not None:
            self._leg._pool.free(self._booking)
            self._booking = None

    def end(self, outcome: Outcome, orphan_check: asyncio.TimerHandle | None) -> None:
        """End the booking and report how it went. In the loop's thread only: timers are the loop's."""
        leg = self._leg
        if orphan_check is not None:
            orphan_check.cancel()
        self.release()
        if self.handover is not None:
            if leg._role is Role.DECODE:
                self.handover.forget(self.request_id)
            elif outcome is not Outcome.OK:
                refused = outcome is Outcome.SHED
                gone = outcome is Outcome.CANCELLED
                self.handover.fail(self.request_id, expected=not (self.announced or gone), refused=refused)
        leg._stats.in_flight[leg._role] -= 1
        leg._stats.ended[leg._role, outcome] += 1
        leg._events.add(
            Ended(request_id=self.request_id, role=leg._role, at_s=leg._clock.wall_s(), outcome=outcome)
        )


def _run_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call at once in the loop's thread, soon after from any other.

    Measured: with its caller gone, Dynamo may drop a handler's stream on a thread of its own, under load nine
    times in ten, and Python then closes the stream in that thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop.call_soon_threadsafe(call)
    else:
        call()


def _is_error(chunk: Any) -> bool:
    """Tell whether a chunk reports an engine error: `finish_reason` is then a mapping."""
    return isinstance(chunk, dict) and isinstance(chunk.get("finish_reason"), dict)


def _outcome(last: Any, *, stopped: bool) -> Outcome:
    """Judge a stream that has ended by its last chunk.

    When the client has gone Dynamo's stream just ends, without the chunk that would say why.
    """
    if _is_error(last):
        return Outcome.FAILED
    finished = isinstance(last, dict) and last.get("finish_reason") is not None
    return Outcome.CANCELLED if stopped and not finished else Outcome.OK
