"""Decides where the decode leg of a request finds the prefill worker it takes its KV cache from.

Owns: the meeting of both legs, by request id and room, in this process or over the bus.
Does not own: choosing the workers (trip.py), following the other leg (router.py).
Invariant: a waiting decode leg is always woken: by an address, by the prefill leg's failure, or by the
           caller's time limit; notes nobody comes for are bounded, the oldest go first. A note that was
           replaced is not sent any more: whoever heard it last would go back to it.
Source: measured: with bootstrap hand-over both legs run at once, arrive up to 10 ms apart in either
        order, and may reach different router replicas; `context.id()` is the same on both. It is also that of
        a request the frontend sends again after its router has died (host: migration.rs), while the prefill
        leg of the first time goes on and may move or fail: the room, drawn anew each time, tells them apart.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.errors import BusError, PoaError, RequestShed
from dynamo_poa.wire import Handover, subject

log = structlog.get_logger(__name__)

RESEND_S, RESEND_PAUSE_S = 20.0, 0.1  # for as long as a decode leg waits
# After a reconnect: the other routers reconnect within half a second to two of each other, and what was sent
# before they listen again, or into a connection that was dying, is lost. Source: measured, make soak.
REPEAT_AFTER_S = (0.5, 1.5, 3.0)
ROOM_SHIFT = 40  # engines take a room's remainder by their ranks for the rank: a change this high keeps it
KEEP = 40_000  # notes kept for decode legs that have not come yet; the oldest go first


# What an engine says that would not begin because of its other leg: nothing is wrong with its worker.
# Source: measured, mock engine; make soak: taken for unreachable, live decode workers were avoided.
_OF_THE_OTHER_LEG = ("bootstrap connection failed", "handoff")


def of_the_other_leg(error: str) -> bool:
    """Tell whether an engine refused a request for what it found, or did not find, at the other leg's."""
    return any(sign in error for sign in _OF_THE_OTHER_LEG)


class HandoverFailed(PoaError):
    """The prefill leg of this request failed: there is nothing to take over."""


@dataclass(slots=True)
class _Meeting:
    note: Handover | None = None
    refused: bool = False
    taken: bool = False
    version: int = 0
    waiters: list["asyncio.Future[None]"] = field(default_factory=list)
    gone: Callable[[], bool] | None = None  # of the decode leg's client, once that leg has come


def meeting_place(bootstrap_info: Mapping[str, Any], note: Handover) -> dict[str, Any]:
    """Return where the engines of both legs meet, and under which id.

    The first attempt's id and room are the frontend's. Another attempt has its own: an engine that has seen
    an id does not take it again.

    Args:     bootstrap_info: as the frontend sent it, the same on both legs; its address is a placeholder.
    Source:   measured, mock engine, make soak: "handoff ... already has a lifecycle route".
    """
    place = {
        **bootstrap_info,
        "bootstrap_host": note.bootstrap_host,
        "bootstrap_port": note.bootstrap_port,
    }
    again = note.attempt - 1
    room, handoff = room_of(bootstrap_info), bootstrap_info.get("handoff_id")
    if again and room is not None:
        place["bootstrap_room"] = room ^ (again << ROOM_SHIFT)
    if again and isinstance(handoff, bytes | list) and handoff:
        place["handoff_id"] = type(handoff)([*handoff[:-1], handoff[-1] ^ again])
    return place


# A request's id, and the room its frontend drew; none in the notes of routers of an earlier release.
_Key = tuple[str, int | None]


def room_of(bootstrap_info: Mapping[str, Any]) -> int | None:
    """Return the room the frontend drew for this request, the same on both legs."""
    room = bootstrap_info.get("bootstrap_room")
    return room if isinstance(room, int) else None


class Handovers:
    """Announcements by request, newest first to count."""

    def __init__(self, publish: Callable[[Handover], None] | None = None) -> None:
        """Create the table. `publish` tells other router processes; None when this is the only one."""
        self._publish = publish
        self._meetings: OrderedDict[_Key, _Meeting] = OrderedDict()
        self._rooms: OrderedDict[str, int | None] = OrderedDict()  # the last of each request id

    def announce(self, note: Handover) -> None:
        """Say where the prefill leg went; a later note for the same request replaces the earlier."""
        self.accept(note)
        if self._publish is not None:
            self._publish(note)

    def accept(self, note: Handover) -> None:
        """Take an announcement, ours or another router's. An empty host says that the prefill leg failed."""
        self._rooms[note.request_id] = note.room
        if len(self._rooms) > KEEP:
            self._rooms.popitem(last=False)
        meeting = self._meeting((note.request_id, note.room))
        if meeting.version and meeting.note == (note if note.bootstrap_host else None):
            return
        meeting.note = note if note.bootstrap_host else None
        meeting.refused = note.refused
        meeting.version += 1
        for waiter in meeting.waiters:
            if not waiter.done():
                waiter.set_result(None)
        meeting.waiters.clear()

    def fail(
        self, request_id: str, room: int | None = None, *, expected: bool = False, refused: bool = False
    ) -> None:
        """Say that the prefill leg failed for good; nothing, when nobody can be waiting for it.

        Args:     expected: the decode leg may still come: the prefill leg failed before it was announced.
                  refused: Dynamo would not take it, so the decode leg is refused with it.
        """
        if self._publish is None and (request_id, room) not in self._meetings and not expected:
            return
        self.announce(
            Handover(
                request_id=request_id,
                worker_id=0,
                dp_rank=0,
                bootstrap_host="",
                bootstrap_port=0,
                refused=refused,
                room=room,
            )
        )

    def forget(self, request_id: str, room: int | None = None) -> None:
        """Drop what is known of a request whose decode leg is over."""
        for key in self._keys(request_id, room):
            self._meetings.pop(key, None)
        self._rooms.pop(request_id, None)

    async def wait(
        self,
        request_id: str,
        room: int | None = None,
        *,
        after: int = 0,
        gone: Callable[[], bool] | None = None,
    ) -> tuple[Handover, int]:
        """Wait for a note newer than version `after`; return it with its version.

        The caller sets the time limit.

        Args:    gone: tells whether the decode leg's client has gone.
        Raises:  HandoverFailed when the prefill leg failed, RequestShed when it was refused.
        """
        meetings = [self._meeting(key) for key in self._keys(request_id, room)]
        meetings[0].taken, meetings[0].gone = True, gone or meetings[0].gone
        while (version := sum(meeting.version for meeting in meetings)) <= after:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for meeting in meetings:
                meeting.waiters.append(waiter)
            await waiter
        said = next(meeting for meeting in meetings if meeting.version)  # of its own room, if anything was
        if said.note is None and said.refused:
            raise RequestShed(f"{request_id}: its prefill leg was refused")
        if said.note is None:
            raise HandoverFailed(request_id)
        return said.note, version

    def lived_before(self, request_id: str, room: int | None) -> bool:
        """Tell whether the frontend has sent this request before, with another room: its router has died."""
        return self._rooms.get(request_id, room) != room

    def given_up(self, request_id: str, room: int | None = None) -> bool:
        """Tell whether the decode leg of a request that was announced here is over, or its client has gone.

        False where that leg may be in another process.
        """
        meeting = self._meetings.get((request_id, room))
        return meeting is None or (meeting.gone is not None and meeting.gone())

    def orphaned(self, request_id: str, room: int | None = None) -> bool:
        """Tell whether no decode leg has come; False where it may have gone to another process."""
        if self._publish is not None:
            return False
        meeting = self._meetings.get((request_id, room))
        return meeting is None or not meeting.taken

    def __len__(self) -> int:
        """Return how many requests are known."""
        return len(self._meetings)

    def _keys(self, request_id: str, room: int | None) -> tuple[_Key, ...]:
        """Return where notes for a request may be: another router may be of an earlier release."""
        own = request_id, room
        return (own,) if room is None or self._publish is None else (own, (request_id, None))

    def _meeting(self, key: _Key) -> _Meeting:
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting()
            for _ in range(len(self._meetings) - KEEP):
                oldest_key, oldest = self._meetings.popitem(last=False)
                if oldest.waiters:  # it would never be woken: its turn comes again
                    self._meetings[oldest_key] = oldest
        return meeting


class Bus(Protocol):
    """The part of the bus that is needed here."""

    def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> None:
        """Have `handler` called for every message."""
        ...

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each connect."""
        ...

    async def publish(self, subject: str, data: bytes) -> None:
        """Send, or raise BusError."""
        ...


class HandoverChannel:
    """Carries announcements between the router processes of one graph."""

    def __init__(self, bus: Bus, namespace: str, router_id: str, clock: Clock) -> None:
        self._bus, self._clock, self._prefix = bus, clock, subject(namespace, "handover")
        self._own = f"{self._prefix}.{router_id}"
        self._decoder = msgspec.msgpack.Decoder(Handover)
        self._sending: set[asyncio.Task[None]] = set()
        # Of the last RESEND_S, each request's last note alone: an earlier one would undo it.
        self._recent: OrderedDict[_Key, tuple[float, Handover]] = OrderedDict()

    def table(self) -> Handovers:
        """Return a table that is fed by, and feeds, the other routers'."""
        handovers = Handovers(self._publish)

        def receive(name: str, data: bytes) -> None:
            if name == self._own:
                return
            try:
                handovers.accept(self._decoder.decode(data))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.warning("poa.handover.refused", subject=name, error=str(error))

        self._bus.subscribe(f"{self._prefix}.*", receive)
        self._bus.on_connect(lambda: self._run(self._repeat()))
        return handovers

    def _publish(self, note: Handover) -> None:
        key = note.request_id, note.room
        self._recent.pop(key, None)
        self._recent[key] = self._clock.monotonic_s(), note
        self._prune()
        self._run(self._send(note))

    def _run(self, sending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(sending, name="handover")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _prune(self) -> None:
        """Forget notes that no decode leg can be waiting for any more."""
        since_s = self._clock.monotonic_s() - RESEND_S
        while self._recent and next(iter(self._recent.values()))[0] < since_s:
            self._recent.popitem(last=False)

    async def _repeat(self) -> None:
        """Send once more what may not have been heard; who has heard it takes no notice."""
        before_s = 0.0
        for after_s in REPEAT_AFTER_S:
            await self._clock.sleep(after_s - before_s)
            before_s = after_s
            self._prune()
            try:
                for _, note in list(self._recent.values()):
                    if not self._replaced(note):
                        await self._bus.publish(self._own, msgspec.msgpack.encode(note))
            except BusError:
                return  # the next connect begins anew

    async def _send(self, note: Handover) -> None:
        """Publish; while the bus is away try again for as long as a decode leg may wait."""
        data = msgspec.msgpack.encode(note)
        until_s = self._clock.monotonic_s() + RESEND_S
        while not self._replaced(note):
            try:
                return await self._bus.publish(self._own, data)
            except BusError as error:
                if self._clock.monotonic_s() >= until_s:
                    log.warning("poa.handover.unsent", request_id=note.request_id, error=str(error))
                    return None
            await self._clock.sleep(RESEND_PAUSE_S)
        return None

    def _replaced(self, note: Handover) -> bool:
        """Tell whether a later note for the same request has come."""
        last = self._recent.get((note.request_id, note.room))
        return last is not None and last[1] is not note
