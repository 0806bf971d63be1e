"""What Dynamo's routers are told of pinned requests, and when."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.booking import GATHER_S, HEARD_S, MAX_UNSENT, RETRY_S, Hashes, PinnedBookings
from dynamo_poa.clock import ManualClock
from dynamo_poa.errors import BusError
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import DynamoMessage, decode_dynamo

A = WorkerKey(14370722098883561847, 1)
TOKENS = list(range(40))


class FakeBus:
    """Keeps what is sent, or is away."""

    def __init__(self) -> None:
        self.away = False
        self.sent: list[tuple[str, bytes]] = []

    async def publish(self, subject: str, data: bytes) -> None:
        if self.away:
            raise BusError("away")
        self.sent.append((subject, data))

    def envelopes(self) -> list[dict[str, Any]]:
        return [msgspec.msgpack.decode(data) for _, data in self.sent]

    def bodies(self) -> list[dict[str, Any]]:
        return [msgspec.msgpack.decode(envelope["payload"]) for envelope in self.envelopes()]

    def said(self) -> list[tuple[str, str]]:
        """Return booking and event, in order."""
        return [
            (body["request_id"], data if isinstance(data := body["data"], str) else next(iter(data)))
            for body in self.bodies()
        ]


class World:
    """Bookings on a bus, time by hand."""

    def __init__(self, hashes: Hashes = lambda tokens: [2**64 - 1 - len(tokens)]) -> None:
        self.bus, self.clock = FakeBus(), ManualClock()
        self.bookings = PinnedBookings(
            self.bus, "workers.backend.generate", hashes, self.clock, random.Random(1)
        )

    async def __aenter__(self) -> "World":
        await self.bookings.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.bookings.__aexit__(None, None, None)

    async def settle(self, pause_s: float = 2 * GATHER_S) -> None:
        await self.clock.advance(pause_s)


async def test_a_booking_is_told_in_the_words_of_dynamos_replicas() -> None:
    """Subject, envelope and body as measured on 1.4.2; our own decoder takes it."""
    async with World() as world:
        world.bookings.add("b1", A, TOKENS, 24)
        await world.settle()
        ((subject, data),) = world.bus.sent
        assert subject == "namespace.workers.component.backend.endpoint.generate.active_sequences_events"
        assert isinstance(decode_dynamo(subject, data), DynamoMessage)
        (envelope,), (body,) = world.bus.envelopes(), world.bus.bodies()
        assert envelope["topic"] == "active_sequences_events"
        assert (envelope["sequence"], envelope["published_at"]) == (0, 1_800_000_000_005)
        assert set(body) == {"request_id", "worker", "data", "router_id", "lora_name"}
        assert (body["request_id"], body["lora_name"]) == ("b1", None)
        assert body["worker"] == {"worker_id": A.worker_id, "dp_rank": 1}
        assert body["data"] == {
            "AddRequest": {
                "token_sequence": [2**64 - 41],
                "track_prefill_tokens": True,
                "expected_output_tokens": None,
                "prefill_load_hint": {
                    "initial_effective_prefill_tokens": 24,
                    "expected_prefill_duration": None,
                },
            }
        }


async def test_first_token_and_end_follow_in_order_under_one_publisher() -> None:
    """Sequences count on; the router's id is the same in all."""
    async with World() as world:
        world.bookings.add("b1", A, TOKENS, 24)
        await world.settle()
        assert world.bookings.prefilled("b1")
        assert world.bookings.free("b1")
        await world.settle()
        assert world.bus.said() == [("b1", "AddRequest"), ("b1", "MarkPrefillCompleted"), ("b1", "Free")]
        assert [envelope["sequence"] for envelope in world.bus.envelopes()] == [0, 1, 2]
        assert len({body["router_id"] for body in world.bus.bodies()}) == 1
        assert len({envelope["publisher_id"] for envelope in world.bus.envelopes()}) == 1
        assert world.bookings.open == 0


async def test_the_decode_leg_books_no_prompt_to_be_computed() -> None:
    """As Dynamo's own preset of that leg: nothing to track, nothing to complete."""
    async with World() as world:
        world.bookings.add("b1", A, TOKENS, None)
        assert world.bookings.prefilled("b1")
        await world.settle()
        assert world.bus.said() == [("b1", "AddRequest")]
        add = world.bus.bodies()[0]["data"]["AddRequest"]
        assert (add["track_prefill_tokens"], add["prefill_load_hint"]) == (False, None)


async def test_what_ends_before_it_was_told_is_never_told() -> None:
    """Cancelled at once: nobody's load."""
    async with World() as world:
        world.bookings.add("b1", A, TOKENS, 24)
        world.bookings.prefilled("b1")
        assert world.bookings.free("b1")
        await world.settle()
        assert world.bus.said() == []


async def test_an_old_booking_is_ended_by_dynamos_own_call() -> None:
    """It has surely been heard of by then, and no lost message can leave it behind."""
    async with World() as world:
        world.bookings.add("b1", A, TOKENS, 24)
        await world.settle()
        await world.clock.advance(HEARD_S)
        assert not world.bookings.free("b1")
        assert world.bookings.open == 0
        await world.settle()
        assert world.bus.said() == [("b1", "AddRequest")]


async def test_a_booking_of_dynamos_own_is_not_ours_to_end() -> None:
    """The caller then asks KvRouter."""
    async with World() as world:
        assert not world.bookings.prefilled("other")
        assert not world.bookings.free("other")


async def test_while_the_bus_is_away_events_wait_in_order() -> None:
    """What has ended meanwhile is dropped, the rest is told when it is back."""
    async with World() as world:
        world.bus.away = True
        for booking in ("b1", "b2"):
            world.bookings.add(booking, A, TOKENS, 24)
        await world.settle()
        world.bookings.free("b1")
        world.bookings.prefilled("b2")
        world.bus.away = False
        await world.settle(RETRY_S + 2 * GATHER_S)
        assert world.bus.said() == [("b2", "AddRequest"), ("b2", "MarkPrefillCompleted")]


async def test_more_than_can_wait_are_not_told_and_counted() -> None:
    """Requests go on all the same."""
    async with World() as world:
        world.bus.away = True
        assert all(world.bookings.add(f"b{number}", A, TOKENS, 1) for number in range(MAX_UNSENT))
        assert not world.bookings.add("one more", A, TOKENS, 1)
        assert (world.bookings.untold, world.bookings.open) == (1, MAX_UNSENT)
        world.bus.away = False


async def test_tokens_that_dynamo_cannot_hash_are_told_of_by_nobody() -> None:
    """A request of another's making: it must not end what tells of all the others."""

    def hashes(tokens: Any) -> list[int]:
        if -1 in tokens:
            raise OverflowError("can't convert negative int to unsigned")
        return []

    async with World(hashes) as world:
        world.bookings.add("bad", A, [-1], 1)
        world.bookings.add("good", A, TOKENS, 1)
        await world.settle()
        assert world.bookings.prefilled("bad")
        assert world.bookings.free("bad")
        await world.settle()
        assert world.bus.said() == [("good", "AddRequest")]
        assert (world.bookings.untold, world.bookings.open) == (1, 1)


async def test_what_is_left_at_the_end_is_sent() -> None:
    """A router that goes leaves no load behind at the others."""
    world = World()
    async with world:
        world.bookings.add("b1", A, TOKENS, 1)
        await world.settle()
        world.bookings.free("b1")
    assert world.bus.said() == [("b1", "AddRequest"), ("b1", "Free")]


@pytest.mark.filterwarnings("error")
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "prefilled", "free", "settle", "away", "back"]), st.integers(0, 5)),
        max_size=40,
    )
)
async def test_every_beginning_told_is_ended_once_and_nothing_else_is(steps: list[tuple[str, int]]) -> None:
    """Whatever the order of requests and outages: by event, or left to Dynamo's own call."""
    by_call, made = list[str](), 0
    async with World() as world:
        live: list[str] = []
        for what, number in steps:
            if what == "add":
                made += 1
                live.append(f"b{made}")
                world.bookings.add(live[-1], A, TOKENS, number or None)
            elif what in ("settle", "away", "back"):
                world.bus.away = what == "away" or (what == "settle" and world.bus.away)
                await world.settle(RETRY_S * number + 2 * GATHER_S)
            elif live:
                booking = live[number % len(live)]
                if what == "prefilled":
                    assert world.bookings.prefilled(booking)
                else:
                    live.remove(booking)
                    if not world.bookings.free(booking):
                        by_call.append(booking)
        for booking in live:
            if not world.bookings.free(booking):
                by_call.append(booking)
        world.bus.away = False
        await world.settle(RETRY_S + 2 * GATHER_S)
    said = world.bus.said()
    begun = [booking for booking, what in said if what == "AddRequest"]
    ended = [booking for booking, what in said if what == "Free"] + by_call
    assert len(begun) == len(set(begun))
    assert sorted(begun) == sorted(ended)
    for booking, what in said:
        assert said.index((booking, "AddRequest")) <= said.index((booking, what))
    assert world.bookings.open == 0
