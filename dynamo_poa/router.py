"""Decides, for one leg of each request, whether it is tried again, and passes the answer through.

Owns: the request path: let a worker be chosen and booked, send, retry once, follow the other leg, end the
      booking.
Does not own: which worker it is (trip.py), where the legs meet (handover.py).
Invariant: a booking that was made ends on every way out: finished, cancelled, failed, client gone.
           Per chunk nothing is done but noting that it came and passing it on.
Source: contract: both data paths go through here. Measured on aggregated workers at concurrency 128:
        `Client.direct` 90 us of CPU per token, `generate_from_request` 86-90 us.
"""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

import structlog

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock
from dynamo_poa.complaints import Complaints
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import AnswerFailed, PoaError, RequestShed, WorkerUnreachable
from dynamo_poa.handover import Handovers
from dynamo_poa.picker import Picker
from dynamo_poa.trip import (
    Directory,
    Events,
    LegMeans,
    Override,
    Params,
    Pool,
    RequestRefused,
    RouterStats,
    Sampler,
    Trip,
)
from dynamo_poa.values import Outcome, Role, WorkerKey
from dynamo_poa.wire import Handover

log = structlog.get_logger(__name__)

ATTEMPTS = 2  # the first and one retry
MOST_ATTEMPTS = 8  # following the prefill leg included: two requests under one id could go on for ever
# A decode leg waits so long for the address of its prefill worker. With several routers that comes over NATS,
# which `serve` lets pause for up to 10 s when it dies again and again. Source: measured, make soak.
HANDOVER_TIMEOUT_S = 20.0
# A decode engine may notice the end of its prefill worker before the prefill leg does, which then moves or
# fails; after so long it has not noticed, and there is nothing to notice.
MOVE_S = 2.0
CARD_S, CARD_POLL_S = 2.0, 0.05  # KvRouter offers a worker a moment before its card can be read


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

    def tell(self, moved: Callable[[], None]) -> None:
        """Call this from now on whenever something comes from the worker."""
        ...

    async def send(
        self, request: dict[str, Any], worker: WorkerKey, *, again: bool = False, renamed: bool = False
    ) -> bool:
        """Send and wait for the first bytes of the answer, or raise WorkerUnreachable or AnswerFailed.

        Args:     again: an error instead of a first token is raised, not passed on.
                  renamed: the engine is to know the request by an id of its own.
        Returns:  whether they are a first token, not an error.
        """
        ...

    async def ended(self) -> Outcome:
        """Wait for the end of the answer and tell how it went."""
        ...


T = TypeVar("T")
# How a chosen worker is reached: over the request plane by Dynamo's own client, or by the relay.
Send = Callable[[dict[str, Any], WorkerKey], Awaitable[T]]


class _Account:
    """How a leg went: what it is unless a line says otherwise."""

    outcome = Outcome.FAILED


class _Moved(AnswerFailed):
    """The prefill leg goes to another worker: no failure, and as often as that leg is tried."""


class Leg:
    """One leg of the requests: prefill, decode or aggregated."""

    def __init__(
        self,
        role: Role,
        pool: Pool,
        *,
        override: Override,
        params: Params,
        events: Events,
        directory: Directory,
        handovers: Handovers | None,  # None for sequential hand-over
        avoid: AvoidList,
        stats: RouterStats,
        config: RouterConfig,
        clock: Clock,
        picker: Picker | None = None,
    ) -> None:
        self._role, self._pool, self._directory = role, pool, directory
        self._avoid, self._stats, self._clock = avoid, stats, clock
        self._means = LegMeans(
            role=role,
            pool=pool,
            override=override,
            params=params,
            events=events,
            directory=directory,
            handovers=handovers,
            avoid=avoid,
            stats=stats,
            sampler=Sampler(config.candidates_per_s, clock),
            clock=clock,
            picker=picker,
        )
        self._complaints = Complaints(clock)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        """Serve one leg of one request: Dynamo's endpoint handler (its second argument must be `context`)."""

        async def send(request: dict[str, Any], worker: WorkerKey) -> tuple[Any, AsyncIterator[Any]]:
            chunk, stream = await self._pool.send(request, worker, context)
            if trip.handover is not None and _is_error(chunk) and not trip.given_up():
                raise AnswerFailed(worker.worker_id, str(chunk["finish_reason"]))
            return chunk, stream

        trip = Trip(self._means, request, context.id())
        with self._accounted(trip, context) as account:
            chunk, stream = await self._start(trip, context, send)
            if not _is_error(chunk):
                trip.first_token()
            chunk.pop("routing_data", None)  # the frontend logs two errors per request over a second writer
            moved = trip.moved
            yield chunk
            async for chunk in stream:
                moved()
                yield chunk
            account.outcome = _outcome(chunk, stopped=context.is_stopped())

    async def forward(self, request: dict[str, Any], call: "Call") -> None:
        """Serve one leg of one request over the relay: the answer's bytes pass `call` by, unread.

        Raises:  what `generate` does; the call tells its requester.
        """
        trip = Trip(self._means, request, call.id())
        alone = trip.handover is None

        async def send(request: dict[str, Any], worker: WorkerKey) -> bool:
            call.tell(trip.moved)
            return await call.send(request, worker, again=not alone, renamed=alone or trip.renamed)

        with self._accounted(trip, call) as account:
            if await self._start(trip, call, send):
                trip.first_token()
            account.outcome = await call.ended()

    @contextlib.contextmanager
    def _accounted(self, trip: Trip, context: Any) -> Iterator["_Account"]:
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

    def _watch_for_orphan(self, trip: Trip, context: Any) -> asyncio.TimerHandle | None:
        """Stop a prefill leg whose decode leg never comes: its engine would hold it for half a minute."""
        handovers = trip.handover
        if handovers is None or self._role is not Role.PREFILL:
            return None

        def check() -> None:
            if handovers.orphaned(trip.request_id, trip.room):
                context.stop_generating()

        return asyncio.get_running_loop().call_later(HANDOVER_TIMEOUT_S, check)

    async def _start(self, trip: Trip, context: Any, send: Send[T]) -> T:
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
                    return await self._send_decode(trip, worker, send, context.is_stopped)
                return await send(trip.request, worker)
            except (WorkerUnreachable, AnswerFailed) as failed:
                trip.release()
                if context.is_stopped():
                    raise  # the stream ended because its client has gone: nothing is wrong with the worker
                if trip.given_up():
                    raise  # likewise, and the frontend does not stop the prefill leg of its own
                unreachable, moved = isinstance(failed, WorkerUnreachable), isinstance(failed, _Moved)
                trip.tried.add(failed.worker_id)
                if unreachable:
                    self._avoid.add(failed.worker_id)
                failures += not moved
                if failures == ATTEMPTS or attempt == MOST_ATTEMPTS:
                    raise
                if not (unreachable or moved or trip.age_s() < HANDOVER_TIMEOUT_S):
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

    async def _announce(self, trip: Trip, worker: WorkerKey, attempt: int) -> None:
        assert trip.handover is not None
        until_s = self._clock.monotonic_s() + CARD_S
        while (card := self._means.bootstrap_card(worker.worker_id)) is None:
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
            room=trip.room,
            renamed=trip.renamed or trip.handover.lived_before(trip.request_id, trip.room),
        )
        trip.address(note)
        trip.handover.announce(note)
        trip.announced = True

    async def _send_decode(self, trip: Trip, worker: WorkerKey, send: Send[T], gone: Callable[[], bool]) -> T:
        """Wait for the prefill worker's address and send, unless the prefill leg moves elsewhere meanwhile.

        Raises:   _Moved when it has moved, HandoverFailed when it has failed; else what `send` does.
        """
        assert trip.handover is not None
        try:
            async with asyncio.timeout(HANDOVER_TIMEOUT_S):
                note, version = await trip.handover.wait(trip.request_id, trip.room, gone=gone)
        except TimeoutError:
            raise RequestRefused(f"no prefill worker was announced within {HANDOVER_TIMEOUT_S:g} s") from None
        trip.address(note)
        sent = asyncio.ensure_future(send(trip.request, worker))
        moved = asyncio.ensure_future(trip.handover.wait(trip.request_id, trip.room, after=version))
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
