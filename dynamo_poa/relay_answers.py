"""How an answer's bytes get from the worker that makes them to the requester that waits.

Owns: the listener workers dial back to; the connections of both sides; the pace, which is that of the slower
      side; turning away who is not expected.
Does not own: which bytes are wanted, and how a call ends (relay_call.py); what bytes mean (frames.py).
Invariant: every connection belongs to a call and ends with it, or has HANDSHAKE_S to say whose it is. Of an
           answer no more is held than HIGH_WATER_BYTES and what one read brings.
Source: ai-dynamo 1.4.2 on the wire (frames.py). A worker goes on after a half-close, and stops at `kill`, or
        at the second write after a close; a requester that has all closes first.
"""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from dynamo_poa.complaints import Complaints
from dynamo_poa.errors import FrameError
from dynamo_poa.frames import TwoPartParser, control, error_of, subject_of
from dynamo_poa.sockets import notice_loss

if TYPE_CHECKING:
    from dynamo_poa.relay_call import Attempt, RelayCall

# From a request's acknowledgement to its worker's handshake. It comes at once, save from a worker that has
# more requests than its pool takes (DYN_TCP_WORKER_POOL_SIZE) and queues them; never for a payload that it
# cannot read. Dynamo itself waits for ever.
DIAL_BACK_S = 60.0
# Until any worker has: it may be that none can reach us, and then the stream path must have it.
FIRST_DIAL_BACK_S = 10.0
UNHEARD_LIMIT = 3
HANDSHAKE_S = 10.0  # from a connection to its handshake; Dynamo's own bound
LINGER_S = 10.0  # from an answer's end until its requester closes; Dynamo's own bound
WORKER_UNREAD_S = 10.0  # a worker always reads: we say 30 bytes
REQUESTER_UNREAD_S = 300.0  # a requester may be slow, as its client may be
HIGH_WATER_BYTES = 256 * 1024
BACKLOG = 4096  # all workers may dial back at once; what does not fit is tried again a second later
MAX_CONNECTIONS = 65_536


class Answers:
    """The listener workers dial back to. Enter it, then `expect` each attempt's worker.

    address:      what to name as the return address
    unheard:      is set when workers were asked and none has ever dialled back
    most:         connections, of both sides
    turned_away:  connections closed because they were not expected, or no longer
    """

    def __init__(
        self,
        host: str,
        complaints: Complaints,
        *,
        dial_back_s: float = DIAL_BACK_S,
        handshake_s: float = HANDSHAKE_S,
        most: int = MAX_CONNECTIONS,
    ) -> None:
        self.address = ""
        self.complaints, self.handshake_s = complaints, handshake_s
        self.turned_away = 0
        self.unheard = asyncio.Event()
        self._dial_back_s, self._heard, self._in_vain = dial_back_s, False, 0
        self.most = most
        self._host = host
        self._server: asyncio.Server | None = None
        self._awaited: dict[str, Attempt] = {}  # by subject
        self._sides: set[_Side] = set()

    async def __aenter__(self) -> Self:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: WorkerSide(self), self._host, 0, backlog=BACKLOG)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for side in list(self._sides):
            side.abort()
        await self._server.wait_closed()

    @property
    def open(self) -> int:
        """Return how many connections there are, of both sides."""
        return len(self._sides)

    @property
    def awaited(self) -> int:
        """Return how many workers have yet to dial back."""
        return len(self._awaited)

    @property
    def dial_back_s(self) -> float:
        """Return how long a worker may take to dial back."""
        return self._dial_back_s if self._heard else min(self._dial_back_s, FIRST_DIAL_BACK_S)

    def waited_in_vain(self) -> None:
        """Take note of a worker that did not dial back in time."""
        self._in_vain += 1
        if not self._heard and self._in_vain >= UNHEARD_LIMIT:
            self.unheard.set()

    def expect(self, attempt: "Attempt") -> None:
        """Take a worker's connection that names this subject for this attempt's."""
        self._awaited[attempt.subject] = attempt

    def forget(self, attempt: "Attempt") -> None:
        """Turn away whoever names this subject from now on."""
        self._awaited.pop(attempt.subject, None)

    def take(self, subject: str) -> "Attempt | None":
        """Return whose answer a worker has dialled back with, once."""
        attempt = self._awaited.pop(subject, None)
        self._heard = self._heard or attempt is not None
        return attempt

    def admit(self, side: "_Side") -> bool:
        """Keep a connection, unless there are too many."""
        if len(self._sides) >= self.most:
            return False
        self._sides.add(side)
        return True

    def closed(self, side: "_Side") -> None:
        """Let go of a connection."""
        self._sides.discard(side)


class _Side(asyncio.Protocol):
    """One connection of a call."""

    unread_s: float

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        notice_loss(transport, self.unread_s)
        if not self._answers.admit(self):
            self._answers.complaints.say("poa.relay.connection_refused", most=self._answers.most)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the transport."""
        self._transport = None
        self._answers.closed(self)

    def write(self, data: bytes) -> None:
        """Send what can still be sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End the connection behind what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection and drop what was not sent."""
        if self._transport is not None:
            self._transport.abort()


class WorkerSide(_Side):
    """A worker's dial-back: handshake and prologue are for us, all that follows is for the requester."""

    unread_s = WORKER_UNREAD_S

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._parser: TwoPartParser | None = TwoPartParser()
        self._attempt: Attempt | None = None
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give it some time to say who it is."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._answers.handshake_s, self._turn_away)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take the worker's bytes."""
        if self._parser is None:
            assert self._attempt is not None
            self._attempt.data(data)
            return
        try:
            self._parser.feed(data)
            self._begin(self._parser)
        except FrameError as error:
            self._answers.complaints.say("poa.relay.answer_refused", reason=error.reason, detail=error.detail)
            self.abort()

    def eof_received(self) -> bool:
        """Close: a worker that has no more to say says nothing."""
        return False

    def pause_writing(self) -> None:
        """Leave it: a requester sends 30 bytes at most."""

    def resume_writing(self) -> None:
        """Leave it."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the attempt."""
        super().connection_lost(exc)
        self._deadline.cancel()
        if self._attempt is not None:
            self._attempt.lost()

    def hold(self, paused: bool) -> None:
        """Read no more, or go on reading."""
        if self._transport is None or self._transport.is_closing() or paused == self._held:
            return
        self._held = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def dismiss(self, *, kill: bool) -> None:
        """End the connection as a requester does; `kill` makes a worker stop that has not said all."""
        if kill:
            self.write(control("kill"))
        self.close()

    def _turn_away(self) -> None:
        self._answers.turned_away += 1
        self.dismiss(kill=True)

    def _begin(self, parser: TwoPartParser) -> None:
        """Read handshake and prologue; hand on what came behind them.

        Raises:   FrameError.
        """
        while (part := parser.next()) is not None:
            if self._attempt is None:
                self._deadline.cancel()
                self._attempt = self._answers.take(subject_of(part))
                if self._attempt is None:  # of a call that is over
                    self._turn_away()
                    return
                self._attempt.dialled(self)
                continue
            error = error_of(part)
            if error is not None:
                self._attempt.refused(error)
                self.abort()
                return
            rest, self._parser = parser.pending, None
            if rest:
                self._attempt.data(rest)
            return


class RequesterSide(_Side):
    """The connection a requester awaits its answer on.

    waits:  it cannot take more bytes now
    """

    unread_s = REQUESTER_UNREAD_S

    def __init__(self, call: "RelayCall", answers: Answers, greeting: bytes) -> None:
        super().__init__(answers)
        self.waits = True  # until it is connected
        self._pending: bytes | None = greeting  # and what of an answer came before that
        self._call = call
        self._lingers = False
        self._lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the answer come."""
        super().connection_made(transport)
        pending, self._pending = self._pending, None
        self.write(pending or b"")
        if self._lingers:
            self.linger()
        self.resume_writing()

    def write(self, data: bytes) -> None:
        """Send what can still be sent; before the connection is there it is kept."""
        if self._pending is not None:
            self._pending += data
        else:
            super().write(data)

    def data_received(self, data: bytes) -> None:
        """Hand `stop` and `kill` on; a requester says nothing else."""
        self._call.asked(data)

    def eof_received(self) -> bool:
        """Close: a requester closes its half only when it wants no more."""
        self.abort()
        return False

    def pause_writing(self) -> None:
        """Let this answer's worker wait, and no other."""
        self.waits = True
        self._call.hold(True)

    def resume_writing(self) -> None:
        """Go on."""
        self.waits = False
        self._call.hold(False)

    def linger(self) -> None:
        """Wait for the requester to close, as it does once it has all."""
        self._lingers = True
        if self._lingering is None and self._transport is not None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call."""
        super().connection_lost(exc)
        if self._lingering is not None:
            self._lingering.cancel()
        self._call.requester_left()
