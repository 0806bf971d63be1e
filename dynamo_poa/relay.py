"""Which request frames this process takes over, and what becomes of those it does not.

Owns: the listener requesters are sent to; one acknowledgement per frame, in order; handing frames that are
      not understood to Dynamo's own endpoint in this process; counting those.
Does not own: choosing, booking, reporting (trip.py), the answer (relay_call.py, relay_answers.py), bytes
              (frames.py), the discovery record that sends requesters here (instance_record.py).
Invariant: a frame is acknowledged exactly once and in order, or its connection ends behind the
           acknowledgements of those before it. What is acknowledged by us gets an answer or an error.
Source: ai-dynamo 1.4.2: acknowledgements are matched by their order alone, and one that is missing puts
        every later request of the connection off by one for ever: each fails after 5 s although it was
        served. A refusal in words makes a requester wait for ever, so here it becomes an error answer.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self, cast

from dynamo_poa.clock import Clock
from dynamo_poa.errors import FrameError, WorkerUnreachable
from dynamo_poa.frames import ACCEPTED, FrameLimits, RequestFrame, RequestParser, read_request
from dynamo_poa.relay_answers import BACKLOG, Answers
from dynamo_poa.relay_call import Deliver, Locate, RelayCall
from dynamo_poa.sockets import notice_loss
from dynamo_poa.values import Address

MAX_CONNECTIONS = 4096
MAX_CALLS = 16_384
MAX_OWED = 1024  # frames handed on whose acknowledgement is not known yet, a connection: Dynamo's own bound
UNREAD_S = 10.0  # acknowledgements are 4 bytes: who does not take them has vanished
FOREIGN_LIMIT = 3  # frames not understood within FOREIGN_S: Dynamo speaks otherwise than we know
FOREIGN_S = 60.0

Handler = Callable[[dict[str, object], RelayCall], Awaitable[None]]


class Route(NamedTuple):
    """One leg.

    handle:  router.Leg.forward
    own:     Dynamo's own endpoint of this leg, in this process
    locate:  a worker's address
    """

    handle: Handler
    own: Address
    locate: Locate


class Relay:
    """The listener requesters are sent to. Enter it, then `serve` each leg.

    port:       the one listened on
    forwarded:  requests taken over
    handed_on:  frames handed to Dynamo's own endpoint, by reason; `busy` for those beyond `most_calls`
    lost:       of those, the ones it did not take
    gave_up:    is set when too many were not understood, which is for whoever rewrote the record to see
    """

    def __init__(
        self,
        host: str,
        answers: Answers,
        deliver: Deliver,
        clock: Clock,
        *,
        limits: FrameLimits | None = None,
        most: int = MAX_CONNECTIONS,
        most_calls: int = MAX_CALLS,
    ) -> None:
        self.port = 0
        self.forwarded = self.lost = 0
        self.handed_on: Counter[str] = Counter()
        self.gave_up = asyncio.Event()
        self.limits = limits or FrameLimits()
        self._host, self._answers, self._deliver, self._clock = host, answers, deliver, clock
        self._most, self._most_calls = most, most_calls
        self._say = answers.complaints.say
        self._routes: dict[str, Route] = {}
        self._links: set[_Link] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._handing: set[asyncio.Task[None]] = set()
        self._foreign_at_s: deque[float] = deque(maxlen=FOREIGN_LIMIT)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), self._host, 0, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection and cut off what is still running."""
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.end()
        tasks = [*self._calls, *self._handing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):
            link.abort()  # whose requester does not take what it is owed
        await self._server.wait_closed()

    @property
    def running(self) -> int:
        """Return how many requests are being served."""
        return len(self._calls)

    @property
    def connections(self) -> int:
        """Return how many requesters' connections there are."""
        return len(self._links)

    def serve(self, route: Route) -> None:
        """Take requests for a leg."""
        self._routes[route.own.path] = route

    async def drained(self, timeout_s: float) -> None:
        """Wait until nothing runs any more, for so long at most; what comes meanwhile is served too."""
        try:
            async with asyncio.timeout(timeout_s):
                while running := [*self._calls, *self._handing]:
                    await asyncio.wait(running)
        except TimeoutError:
            self._say("poa.relay.cut_off", requests=self.running)

    # What the connections ask for.

    def admit(self, link: "_Link") -> bool:
        """Keep a connection, unless there are too many."""
        if len(self._links) >= self._most:
            self._say("poa.relay.connection_refused", most=self._most)
            return False
        self._links.add(link)
        return True

    def closed(self, link: "_Link") -> None:
        """Let go of a connection."""
        self._links.discard(link)

    def take(self, frame: RequestFrame) -> bool:
        """Take a request over; False when it is Dynamo's to serve."""
        if len(self._calls) >= self._most_calls:
            self.handed_on["busy"] += 1
            return False
        route = self._routes.get(frame.path)
        try:
            if route is None:
                raise FrameError("path", frame.path[:200])
            call = self._call(frame, route)
            body = call.body()
        except FrameError as error:
            self.not_understood(error)
            return False
        self.forwarded += 1
        task = asyncio.create_task(self._serve(route, body, call), name=f"relay {call.id()}")
        call.on_given_up(task.cancel)
        self._calls.add(task)
        task.add_done_callback(lambda done: self._served(done, call))
        return True

    def not_understood(self, error: FrameError) -> None:
        """Count a frame that is Dynamo's to serve, and give up when there are too many."""
        self.handed_on[error.reason] += 1
        now_s = self._clock.monotonic_s()
        self._foreign_at_s.append(now_s)
        self._say("poa.relay.frame_handed_on", reason=error.reason, detail=error.detail)
        if len(self._foreign_at_s) == FOREIGN_LIMIT and now_s - self._foreign_at_s[0] <= FOREIGN_S:
            self.gave_up.set()

    def hand_on(self, frame: RequestFrame) -> "asyncio.Task[None]":
        """Give a frame, byte for byte, to Dynamo's own endpoint.

        Returns:  what ends when the frame may be acknowledged; with WorkerUnreachable when it may not.
        """
        task = asyncio.create_task(self._hand_on(frame), name="hand on")
        self._handing.add(task)
        task.add_done_callback(self._handing.discard)
        return task

    async def _hand_on(self, frame: RequestFrame) -> None:
        # Each leg's runtime has a listener of its own; an unknown path is as good at one as at another.
        route = self._routes.get(frame.path) or next(iter(self._routes.values()))
        try:
            (await self._deliver(route.own, frame.raw)).cancel()
        except WorkerUnreachable as refused:
            self.lost += 1
            self._say("poa.relay.frame_lost", path=frame.path[:200], error=refused.detail)
            try:
                call = self._call(frame, route)
            except FrameError:
                raise refused from None  # nobody knows whom to tell
            await call.open()
            call.over(f"no endpoint took the request: {refused.detail}")

    def _call(self, frame: RequestFrame, route: Route) -> RelayCall:
        return RelayCall(read_request(frame), self._answers, self._deliver, route.locate)

    async def _serve(self, route: Route, body: dict[str, object], call: RelayCall) -> None:
        opening = asyncio.create_task(call.open(), name=f"open {call.id()}")
        try:
            await route.handle(body, call)
        except asyncio.CancelledError:
            opening.cancel()
            raise
        finally:
            await asyncio.wait({opening})

    def _served(self, task: "asyncio.Task[None]", call: RelayCall) -> None:
        """Let go of a call, and tell the requester of a failure as Dynamo tells of a handler's."""
        self._calls.discard(task)
        if task.cancelled():
            call.over("the router is going away")
        elif (error := task.exception()) is not None:
            call.over(f"{type(error).__name__}: {error}")
        else:
            call.over()


class _Link(asyncio.Protocol):
    """One requester's connection, over which its requests come one behind the other."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._parser = RequestParser(relay.limits)
        self._transport: asyncio.Transport | None = None
        # What is not acknowledged yet, oldest first: a frame handed on, or None for one behind it taken over.
        self._owed: deque[asyncio.Task[None] | None] = deque()
        self._unread = self._ending = self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        notice_loss(transport, UNREAD_S)
        if not self._relay.admit(self):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take over or hand on each frame."""
        if self._ending:
            return
        try:
            self._parser.feed(data)
            while (frame := self._parser.next()) is not None:
                self._take(frame)
        except FrameError as error:
            # Where this frame ends is not known: nothing behind it can be told apart. Dynamo ends the
            # connection too, after an answer that its requesters do not take for one.
            self._relay.not_understood(error)
            self.end()
        self._pace()

    def eof_received(self) -> bool:
        """Close: who asks no more needs no acknowledgement."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go. Requests taken over go on: their answers have connections of their own."""
        self._transport = None
        self._owed.clear()
        self._relay.closed(self)

    def pause_writing(self) -> None:
        """Take no more requests from one that does not read their acknowledgements."""
        self._unread = True
        self._pace()

    def resume_writing(self) -> None:
        """Go on."""
        self._unread = False
        self._pace()

    def end(self) -> None:
        """Take nothing more, and close behind what is owed."""
        self._ending = True
        self._pace()
        if not self._owed and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, frame: RequestFrame) -> None:
        if not self._relay.take(frame):
            task = self._relay.hand_on(frame)
            self._owed.append(task)
            task.add_done_callback(self._settle)
        elif self._owed:
            self._owed.append(None)
        elif self._transport is not None:
            self._transport.write(ACCEPTED)

    def _settle(self, task: "asyncio.Task[None]") -> None:
        """Acknowledge what can be by now, in order."""
        while self._owed:
            owed = self._owed[0]
            if owed is not None:
                if not owed.done():
                    break
                if owed.cancelled() or owed.exception() is not None:
                    self._owed.clear()  # better an end than an acknowledgement that never comes
                    self._ending = True
                    break
            self._owed.popleft()
            if self._transport is not None:
                self._transport.write(ACCEPTED)
        self._pace()
        if self._ending and not self._owed:
            self.end()

    def _pace(self) -> None:
        """Read no more than can be acknowledged."""
        hold = self._ending or self._unread or len(self._owed) >= MAX_OWED
        if self._transport is None or self._transport.is_closing() or hold == self._held:
            return
        self._held = hold
        if hold:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
