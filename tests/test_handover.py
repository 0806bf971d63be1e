"""Where the two legs of a request meet."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from dynamo_poa.clock import ManualClock, SystemClock
from dynamo_poa.errors import BusError, RequestShed
from dynamo_poa.handover import (
    KEEP,
    RESEND_S,
    HandoverChannel,
    HandoverFailed,
    Handovers,
    meeting_place,
    of_the_other_leg,
)
from dynamo_poa.wire import Handover


def note(request_id: str = "r", worker_id: int = 1, port: int = 7001, room: int | None = None) -> Handover:
    return Handover(
        request_id=request_id,
        worker_id=worker_id,
        dp_rank=0,
        bootstrap_host="127.0.0.1",
        bootstrap_port=port,
        room=room,
    )


PLACEHOLDER = {
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 2**63 - 1,
    "handoff_id": b"\x00" * 15 + b"\xff",
}


@pytest.mark.parametrize(
    ("attempt", "room", "handoff_id"),
    [
        (1, 2**63 - 1, b"\x00" * 15 + b"\xff"),
        (2, 2**63 - 1 - 2**40, b"\x00" * 15 + b"\xfe"),
        (3, 2**63 - 1 - 2**41, b"\x00" * 15 + b"\xfd"),
    ],
)
def test_each_attempt_of_the_prefill_leg_has_an_id_and_a_room_of_its_own(
    attempt: int, room: int, handoff_id: bytes
) -> None:
    """An engine that has seen an id refuses it; the first attempt's are the frontend's. Source: make soak."""
    place = meeting_place(PLACEHOLDER, msgspec.structs.replace(note(), attempt=attempt))
    assert place == {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 7001,
        "bootstrap_room": room,
        "handoff_id": handoff_id,
    }
    assert room % 64 == PLACEHOLDER["bootstrap_room"] % 64  # type: ignore[operator]
    assert PLACEHOLDER["bootstrap_port"] == 1


def test_what_is_not_understood_of_a_meeting_place_stays_as_it_is() -> None:
    """The stream path may bring binary as a list; another engine may have no id at all."""
    again = msgspec.structs.replace(note(), attempt=2)
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 7001}
    assert meeting_place({"handoff_id": [0, 4]}, again) == {"handoff_id": [0, 5], **where}
    assert meeting_place({"handoff_id": "text", "more": 1}, again) == {
        "handoff_id": "text",
        "more": 1,
        **where,
    }
    assert meeting_place({}, again) == where


@pytest.mark.parametrize(
    ("error", "of_it"),
    [
        ("Generate Error: bootstrap connection failed: Connection refused (os error 111)", True),
        ("Generate Error: handoff HandoffId(4aee1a44) already has a lifecycle route", True),
        ("Generate Error: engine shut down", False),
    ],
)
def test_what_an_engine_says_of_the_other_leg_is_told_from_what_it_says_of_itself(
    error: str, of_it: bool
) -> None:
    """Its own worker is then avoided, or not. Source: measured, mock engine."""
    assert of_the_other_leg(error) is of_it


async def test_a_note_is_kept_for_a_decode_leg_that_comes_later() -> None:
    """Either leg may be first. Source: measured."""
    handovers = Handovers()
    handovers.announce(note())
    assert await handovers.wait("r") == (note(), 1)


async def test_a_later_note_replaces_the_earlier_and_a_repeat_changes_nothing() -> None:
    """Versions count only news: a repeat must not send the decode leg again."""
    handovers = Handovers()
    handovers.announce(note())
    handovers.accept(note())
    assert (await handovers.wait("r"))[1] == 1
    handovers.announce(note(worker_id=2, port=7002))
    assert await handovers.wait("r", after=1) == (note(worker_id=2, port=7002), 2)


async def test_a_failure_wakes_the_waiting_leg() -> None:
    """A waiting decode leg is always woken."""
    handovers = Handovers()
    waiting = asyncio.ensure_future(handovers.wait("r"))
    await asyncio.sleep(0)
    handovers.fail("r")
    with pytest.raises(HandoverFailed):
        await waiting


async def test_notes_nobody_comes_for_are_bounded() -> None:
    """With several routers most notes belong to another's decode leg."""
    handovers = Handovers()
    for number in range(KEEP + 10):
        handovers.accept(note(str(number)))
    assert len(handovers) == KEEP


async def test_a_leg_that_waits_is_woken_however_many_notes_came_meanwhile() -> None:
    """At 2,000 requests a second others' notes fill the table in the 20 s a decode leg may wait."""
    handovers = Handovers()
    waiting = asyncio.ensure_future(handovers.wait("r"))
    await asyncio.sleep(0)
    for number in range(2 * KEEP):
        handovers.accept(note(str(number)))
    handovers.accept(note("r"))
    assert await asyncio.wait_for(waiting, 1.0) == (note("r"), 1)
    handovers.accept(note("last"))
    assert len(handovers) == KEEP


def test_a_note_is_read_by_routers_of_the_release_before_and_theirs_by_us() -> None:
    """Replicas are replaced one by one: `attempt` and `room` came later."""

    class Before(msgspec.Struct, array_like=True):
        version: int
        request_id: str
        worker_id: int
        dp_rank: int
        bootstrap_host: str
        bootstrap_port: int
        refused: bool

    before = Before(1, "r", 1, 0, "127.0.0.1", 7001, False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Handover) == note()
    ours = msgspec.msgpack.encode(msgspec.structs.replace(note(room=2**64 - 1), attempt=2))
    assert msgspec.msgpack.decode(ours, type=Handover).room == 2**64 - 1
    assert msgspec.msgpack.decode(ours, type=Before) == before


async def test_notes_of_two_requests_under_one_id_are_told_apart_by_their_room() -> None:
    """The frontend sends a request again when its router has died. Source: host, migration.rs."""
    wire = Wire()
    first = HandoverChannel(wire, "poa", "router-0", SystemClock()).table()
    second = HandoverChannel(wire, "poa", "router-1", SystemClock()).table()
    first.fail("r", 41)
    second.announce(note(room=42))
    first.announce(note(room=41, worker_id=2, port=7002))
    await asyncio.sleep(0)
    first.fail("r", 41)
    await asyncio.sleep(0)
    for table in (first, second):
        assert await table.wait("r", 42) == (note(room=42), 1)
        with pytest.raises(HandoverFailed):
            await table.wait("r", 41)
        table.forget("r", 41)
        assert await table.wait("r", 42) == (note(room=42), 1)


async def test_the_legs_meet_where_the_other_router_is_of_an_earlier_release() -> None:
    """It says no room: what it says is taken until something of the own room comes."""
    wire = Wire()
    table = HandoverChannel(wire, "poa", "router-0", SystemClock()).table()
    waiting = asyncio.ensure_future(table.wait("r", 42))
    await asyncio.sleep(0)
    await wire.publish("poa.poa.handover.router-9", msgspec.msgpack.encode(note()))
    assert await asyncio.wait_for(waiting, 1.0) == (note(), 1)
    table.announce(note(room=42, worker_id=2, port=7002))
    assert await table.wait("r", 42, after=1) == (note(room=42, worker_id=2, port=7002), 2)
    table.forget("r", 42)
    assert len(table) == 0


class Wire:
    """Two routers' view of one bus."""

    def __init__(self) -> None:
        self.handlers: list[tuple[str, object]] = []
        self.connected: list[Callable[[], None]] = []
        self.up = True
        self.deaf = False

    def subscribe(self, subject: str, handler: object) -> None:
        self.handlers.append((subject, handler))

    def on_connect(self, callback: Callable[[], None]) -> None:
        self.connected.append(callback)

    async def publish(self, subject: str, data: bytes) -> None:
        if not self.up:
            raise BusError("away")
        if self.deaf:
            return
        for _, handler in self.handlers:
            handler(subject, data)  # type: ignore[operator]


async def test_the_legs_meet_across_router_processes() -> None:
    """The frontend spreads each leg over the replicas independently."""
    wire = Wire()
    first = HandoverChannel(wire, "poa", "router-0", SystemClock()).table()
    second = HandoverChannel(wire, "poa", "router-1", SystemClock()).table()
    waiting = asyncio.ensure_future(second.wait("r"))
    first.announce(note())
    assert await asyncio.wait_for(waiting, 1.0) == (note(), 1)
    assert (await first.wait("r"))[1] == 1  # its own echo is no news


async def test_garbage_and_a_dead_bus_harm_nobody() -> None:
    """Undecodable notes are dropped; an unsent note leaves the local leg served."""
    wire = Wire()
    table = HandoverChannel(wire, "poa", "router-0", SystemClock()).table()
    await wire.publish("poa.poa.handover.router-9", b"\xc1")
    await wire.publish("poa.poa.handover.router-9", msgspec.msgpack.encode({"request_id": 1}))
    wire.up = False
    table.announce(note())
    await asyncio.sleep(0)
    assert await table.wait("r") == (note(), 1)


async def test_a_note_is_sent_again_when_the_bus_is_back() -> None:
    """A NATS restart must not cost the requests whose legs are on different routers."""
    wire, clock = Wire(), ManualClock()
    first = HandoverChannel(wire, "poa", "router-0", clock).table()
    second = HandoverChannel(wire, "poa", "router-1", clock).table()
    wire.up = False
    first.announce(note())
    await clock.advance(3.0)
    assert len(second) == 0
    wire.up = True
    await clock.advance(0.1)
    assert await second.wait("r") == (note(), 1)


async def test_a_note_that_was_replaced_while_the_bus_was_away_is_not_sent_any_more() -> None:
    """Heard after its successor it would send the decode leg back to a worker that has died."""
    wire, clock = Wire(), ManualClock()
    first = HandoverChannel(wire, "poa", "router-0", clock).table()
    second = HandoverChannel(wire, "poa", "router-1", clock).table()
    wire.up = False
    first.announce(note())
    await clock.advance(0.05)
    first.announce(note(worker_id=2, port=7002))
    await clock.advance(0.04)
    wire.up = True
    await clock.advance(1.0)
    assert await second.wait("r") == (note(worker_id=2, port=7002), 1)


async def test_a_note_that_is_replaced_during_a_repeat_is_not_repeated() -> None:
    """The same, of the notes that are sent again after a reconnect."""
    wire, clock = Wire(), ManualClock()
    first = HandoverChannel(wire, "poa", "router-0", clock).table()
    second = HandoverChannel(wire, "poa", "router-1", clock).table()
    first.announce(note("other"))
    first.announce(note("r"))
    await clock.advance(0.0)
    publish = wire.publish

    async def slow(subject: str, data: bytes) -> None:
        await publish(subject, data)
        if msgspec.msgpack.decode(data, type=Handover).request_id == "other":
            wire.publish = publish  # type: ignore[method-assign]
            first.announce(note("r", worker_id=2, port=7002))
            await clock.sleep(0.1)

    wire.publish = slow  # type: ignore[method-assign]
    wire.connected[0]()
    await clock.advance(1.0)
    assert await second.wait("r") == (note("r", worker_id=2, port=7002), 2)


async def test_notes_that_nobody_heard_are_repeated_after_a_reconnect() -> None:
    """Routers reconnect one after the other. Each request's last note, for as long as a leg may wait."""
    wire, clock = Wire(), ManualClock()
    first = HandoverChannel(wire, "poa", "router-0", clock).table()
    second = HandoverChannel(wire, "poa", "router-1", clock).table()
    wire.deaf = True
    first.announce(note("old"))
    await clock.advance(RESEND_S - 1.0)
    first.announce(note("r", worker_id=1))
    first.announce(note("r", worker_id=2, port=7002))
    wire.connected[0]()
    await clock.advance(1.0)
    wire.deaf = False
    await clock.advance(1.4)
    assert await second.wait("r") == (note("r", worker_id=2, port=7002), 1)
    assert len(second) == 1
    await clock.advance(2.0)
    assert (await second.wait("r"))[1] == 1  # heard again, no news


async def test_a_failure_after_the_decode_leg_has_ended_leaves_nothing_behind() -> None:
    """With one process nobody else can be waiting."""
    handovers = Handovers()
    handovers.announce(note())
    handovers.forget("r")
    handovers.fail("r")
    assert len(handovers) == 0


async def test_a_prefill_leg_that_fails_before_its_decode_leg_comes_is_not_waited_for() -> None:
    """Measured: a prefill leg that is refused at once is over before the decode leg arrives, 10 ms apart."""
    handovers = Handovers()
    handovers.fail("failed", expected=True)
    handovers.fail("refused", expected=True, refused=True)
    with pytest.raises(HandoverFailed):
        await handovers.wait("failed")
    with pytest.raises(RequestShed, match="refused: its prefill leg was refused"):
        await handovers.wait("refused")
    handovers.forget("failed")
    handovers.forget("refused")
    handovers.fail("failed")  # its decode leg is over: nobody will come
    assert len(handovers) == 0


async def test_a_refusal_crosses_over_to_another_router() -> None:
    """The legs of a request may be with different routers; the decode leg's then is a refusal as well."""
    sent: list[Handover] = []
    Handovers(sent.append).fail("r", refused=True)
    others = Handovers()
    others.accept(msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]), type=Handover))
    with pytest.raises(RequestShed):
        await others.wait("r")


async def test_a_decode_leg_that_is_over_or_whose_client_has_gone_wants_nothing_any_more() -> None:
    """Its prefill leg fails then, and is not tried again: the frontend does not stop it."""
    handovers, gone = Handovers(), False
    handovers.announce(note("r"))
    assert handovers.given_up("r") is False  # it may still come
    assert await handovers.wait("r", gone=lambda: gone) == (note("r"), 1)
    assert handovers.given_up("r") is False
    gone = True
    assert handovers.given_up("r") is True
    handovers.announce(note("s"))
    await handovers.wait("s")
    handovers.forget("s")
    assert handovers.given_up("s") is True


def test_a_request_that_comes_again_with_another_room_has_lived_before() -> None:
    """The frontend sends what a dead router had under its old id, with a new room."""
    handovers = Handovers()
    assert handovers.lived_before("r", 1) is False
    handovers.accept(note("r", room=1))
    assert (handovers.lived_before("r", 1), handovers.lived_before("r", 2)) == (False, True)
    handovers.forget("r", 1)
    assert handovers.lived_before("r", 2) is False
