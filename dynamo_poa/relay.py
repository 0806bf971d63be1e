"""Which request frames this process takes over, and what becomes of those it does not.

Owns: the listener requesters are sent to; one acknowledgement per frame, in order; handing frames that are not
      understood to Dynamo's own endpoint in this process; counting those.
Does not own: choosing, booking, reporting (router.py), the answer (relay_answers.py), bytes (frames.py), the
              discovery record that sends requesters here (instance_record.py).
Invariant: a frame is acknowledged exactly once and in order, or its connection ends. What is acknowledged by us
           gets an answer or an error.
Source: ai-dynamo 1.4.2: acknowledgements are matched by their order alone, and one that is missing puts every
        later request of the connection off by one for ever (this lost 869 of 900 requests in an experiment).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self, cast

import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.errors import FrameError, WorkerUnreachable
from dynamo_poa.frames import ACCEPTED, RequestFrame, RequestParser, read_request
from dynamo_poa.relay_answers import Answers, Deliver, Locate, RelayCall
from dynamo_poa.values import Address

log = structlog.get_logger()

MAX_CONNECTIONS = 4096
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

    port:      the one listened on
    forwarded: requests taken over
    foreign:   frames handed to Dynamo's own endpoint, by reason
    gave_up:   is set when there were too many of them, which is for whoever rewrote the record to see
    """

    def __init__(
        self, host: str, answers: Answers, deliver: Deliver, clock: Clock, *, most: int = MAX_CONNECTIONS
    ) -> None:
        self.port = 0
        self.forwarded = 0
        self.foreign: Counter[str] = Counter()
        self.gave_up = asyncio.Event()
        self._host, self._answers, self._deliver, self._clock, self._most = (
            host,
            answers,
            deliver,
            clock,
            most,
        )
        self._routes: dict[str, Route] = {}
        self._links: set[_Link] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._foreign_at_s: deque[float] = deque(maxlen=FOREIGN_LIMIT)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection and cut off what is still running."""
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.abort()
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def running(self) -> int:
        """Return how many requests are being served."""
        return len(self._calls)

    def serve(self, route: Route) -> None:
        """Take requests for a leg."""
        self._routes[route.own.path] = route

    async def drained(self, timeout_s: float) -> None:
        """Wait until what runs has ended, for so long at most."""
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=timeout_s)

    # What the connections ask for.

    def admit(self, link: "_Link") -> bool:
        """Keep a connection, unless there are too many."""
        if len(self._links) >= self._most:
            return False
        self._links.add(link)
        return True

    def closed(self, link: "_Link") -> None:
        """Let go of a connection."""
        self._links.discard(link)

    def take(self, frame: RequestFrame) -> bool:
        """Take a request over; False when it is not understood."""
        route = self._routes.get(frame.path)
        try:
            if route is None:
                raise FrameError("path", frame.path[:200])
            call = RelayCall(read_request(frame), self._answers, self._deliver, route.locate)
            body = call.body()
        except FrameError as error:
            self.not_understood(error)
            return False
        self.forwarded += 1
        task = asyncio.create_task(self._serve(route, body, call), name=f"relay {call.id()}")
        self._calls.add(task)
        task.add_done_callback(lambda done: self._served(done, call))
        return True

    def not_understood(self, error: FrameError) -> None:
        """Count a frame that is Dynamo's to serve, and give up when there are too many."""
        self.foreign[error.reason] += 1
        now_s = self._clock.monotonic_s()
        self._foreign_at_s.append(now_s)
        log.warning("poa.relay.frame_handed_on", reason=error.reason, detail=error.detail)
        if len(self._foreign_at_s) == FOREIGN_LIMIT and now_s - self._foreign_at_s[0] <= FOREIGN_S:
            self.gave_up.set()

    async def hand_on(self, frame: RequestFrame) -> bytes:
        """Give a frame, byte for byte, to Dynamo's own endpoint and return its acknowledgement.

        Raises:   WorkerUnreachable.
        """
        own = self._own(frame.path)
        (await self._deliver(own, frame.raw)).cancel()
        return ACCEPTED

    def _own(self, path: str) -> Address:
        """Return where Dynamo itself would have taken a path; each leg's runtime has its own listener."""
        route = self._routes.get(path) or next(iter(self._routes.values()))
        return route.own

    async def _serve(self, route: Route, body: dict[str, object], call: RelayCall) -> None:
        opening = asyncio.create_task(call.open(), name=f"open {call.id()}")
        try:
            await route.handle(body, call)
        finally:
            await opening

    def _served(self, task: "asyncio.Task[None]", call: RelayCall) -> None:
        """Tell the requester of a failure as Dynamo tells of a handler's."""
        self._calls.discard(task)
        if task.cancelled():
            call.fail("the router is going away")
        elif (error := task.exception()) is not None:
            call.fail(f"{type(error).__name__}: {error}")


class _Link(asyncio.Protocol):
    """One requester's connection, over which its requests come one behind the other."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._parser: RequestParser | None = RequestParser()
        self._transport: asyncio.Transport | None = None
        # Acknowledgements that are not known yet, in order, with what is known behind them.
        self._owed: deque[asyncio.Task[bytes] | bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._relay.admit(self):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take over or hand on each frame."""
        if self._parser is None:
            return
        try:
            self._parser.feed(data)
            while (frame := self._parser.next()) is not None:
                self._take(frame)
        except FrameError as error:
            # Where this frame ends is not known: nothing behind it can be told apart. Dynamo ends the
            # connection too, after an answer that its requesters do not take for one.
            self._relay.not_understood(error)
            self._parser = None
            self.abort()

    def eof_received(self) -> bool:
        """Close: who asks no more needs no acknowledgement."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go. Requests taken over go on: their answers have connections of their own."""
        self._transport = None
        self._relay.closed(self)
        for owed in self._owed:
            if isinstance(owed, asyncio.Task):
                owed.cancel()

    def abort(self) -> None:
        """Reset the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, frame: RequestFrame) -> None:
        if not self._relay.take(frame):
            task = asyncio.create_task(self._relay.hand_on(frame), name="hand on")
            task.add_done_callback(self._handed_on)
            self._owed.append(task)
        elif self._owed:
            self._owed.append(ACCEPTED)
        elif self._transport is not None:
            self._transport.write(ACCEPTED)

    def _handed_on(self, task: "asyncio.Task[bytes]") -> None:
        if task.cancelled():
            return
        if isinstance(task.exception(), WorkerUnreachable):
            self.abort()  # better an end than an acknowledgement that never comes
            return
        while self._owed:
            owed = self._owed[0]
            if isinstance(owed, asyncio.Task):
                if not owed.done():
                    return
                owed = owed.result()
            self._owed.popleft()
            if self._transport is not None:
                self._transport.write(owed)
