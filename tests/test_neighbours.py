"""What is known of other routers' requests."""

import random
from typing import Any

import msgspec
import pytest
from fakes import A, B, FakeDirectory
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import ManualClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.ledger import Ledger
from dynamo_poa.marginal import Loads
from dynamo_poa.neighbours import OLD_S, SILENT_S, Neighbours
from dynamo_poa.picker import Picker
from dynamo_poa.values import Curve, Outcome, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import Chosen, Coefficients, DecisionBatch, Ended, FirstToken, PoolSpeed, WorkerSpeed

KEY = WorkerKey(A, 0)
ROLE = Role.AGGREGATED
FAST = Curve(prefill_base_s=0.002, prefill_token_s=0.0001, decode_base_s=0.006, decode_request_s=0.00025)


class FakeBus:
    """Keeps the handler."""

    def subscribe(self, subject: str, handler: Any) -> None:
        self.subject, self.handler = subject, handler


class World:
    """A router called `me` and what it hears."""

    def __init__(self) -> None:
        self.clock, self.bus = ManualClock(), FakeBus()
        self.holder = CoefficientsHolder(self.clock.monotonic_s)
        self.ledger = Ledger(ROLE, self.clock)
        self.neighbours = Neighbours(
            self.bus,  # type: ignore[arg-type]
            "ns",
            "me",
            {ROLE: self.ledger},
            self.holder,
            self.clock,
        )
        self.sequence = 0

    def say(self, *events: Any, router_id: str = "r2", in_flight: int = 0) -> None:
        self.sequence += 1
        batch = DecisionBatch(
            router_id=router_id,
            sequence=self.sequence,
            sent_at_s=self.clock.wall_s(),
            events=events,
            in_flight={ROLE: in_flight},
        )
        self.neighbours.receive(msgspec.msgpack.encode(batch))


def chosen(request_id: str = "q1", worker: int = A, attempt: int = 1, role: Role = ROLE) -> Chosen:
    return Chosen(
        request_id=request_id,
        role=role,
        at_s=0.0,
        received_at_s=0.0,
        worker_id=worker,
        dp_rank=0,
        prompt_tokens=100,
        revision=1,
        attempt=attempt,
        candidates=(),
        cached_tokens=64,
    )


def first(request_id: str = "q1") -> FirstToken:
    return FirstToken(request_id=request_id, role=ROLE, at_s=0.0)


def ended(request_id: str = "q1") -> Ended:
    return Ended(request_id=request_id, role=ROLE, at_s=0.0, outcome=Outcome.OK)


async def test_another_routers_request_is_followed_from_its_choice_to_its_end() -> None:
    """Uncached prompt tokens until the first token; prompt and half of 64 output tokens to the end."""
    world = World()
    world.say(chosen())
    assert world.ledger.work(KEY).all()[:4] == (0, 1, 36, 132)
    world.say(first())
    assert world.ledger.work(KEY).all()[:4] == (1, 0, 0, 132)
    world.say(ended())
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_another_attempt_ends_the_one_before_it() -> None:
    """A retry goes to another worker; the first is told no end of its own."""
    world = World()
    world.say(chosen())
    world.say(chosen(worker=B, attempt=2))
    assert world.ledger.work(KEY).empty
    assert world.ledger.work(WorkerKey(B, 0)).waiting == 1


async def test_our_own_word_is_not_heard_twice() -> None:
    """The bus brings it back; our own ledger has it."""
    world = World()
    world.say(chosen(), router_id="me")
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)
    assert not world.neighbours.heard(2)


async def test_two_routers_may_have_a_request_of_the_same_id() -> None:
    """A client sets it, or a router has died: each ends its own."""
    world = World()
    world.say(chosen(), router_id="r2")
    world.say(chosen(), router_id="r3")
    world.say(ended(), router_id="r2")
    assert world.ledger.work(KEY).waiting == 1


async def test_the_picture_is_complete_when_all_others_are_heard() -> None:
    """Of three routers two; one that falls silent takes its requests with it."""
    world = World()
    world.say(chosen(), router_id="r2")
    assert [world.neighbours.heard(routers) for routers in (1, 2, 3)] == [True, True, False]
    world.say(router_id="r3")
    assert world.neighbours.heard(3)
    await world.clock.advance(SILENT_S)
    world.say(router_id="r3")
    assert [world.neighbours.heard(routers) for routers in (2, 3)] == [True, False]
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_a_request_whose_end_was_lost_is_let_go_in_the_end() -> None:
    """Its router lives, has others running and says nothing more of it."""
    world = World()
    world.say(chosen())
    while world.ledger.in_flight() != Loads(0, 0, 0, 0):
        await world.clock.advance(1.0)
        world.say(in_flight=1)
        assert world.clock.monotonic_s() <= 1000.0 + OLD_S + 1.0
    assert world.clock.monotonic_s() >= 1000.0 + OLD_S


async def test_a_router_that_has_nothing_running_has_nothing_here() -> None:
    """The end of what is still held was lost; while it has any the others may be among them."""
    world = World()
    world.say(chosen("q1"), chosen("q2"))
    world.say(in_flight=1)
    assert world.ledger.work(KEY).waiting == 2
    world.say()
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_a_router_that_counts_anew_has_lost_what_it_had() -> None:
    """In a container each process may have the name of the one before it."""
    world = World()
    world.say(chosen("q1"))
    world.sequence = -1
    world.say(chosen("q2"))
    assert world.ledger.work(KEY).waiting == 1


async def test_a_leg_that_is_not_ours_is_not_followed() -> None:
    """This process serves aggregated workers alone."""
    world = World()
    world.say(chosen(role=Role.DECODE))
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1", "not_msgpack"),
        (msgspec.msgpack.encode({"router_id": 5}), "schema"),
        (
            msgspec.msgpack.encode(DecisionBatch(version=99, router_id="r2", sequence=1, sent_at_s=0.0)),
            "version",
        ),
    ],
)
async def test_what_is_no_batch_is_counted_and_dropped(data: bytes, reason: str) -> None:
    """And its sender is not taken to be heard."""
    world = World()
    world.neighbours.receive(data)
    assert world.neighbours.refused == {reason: 1}
    assert not world.neighbours.heard(2)


@given(
    st.lists(
        st.tuples(st.sampled_from([chosen, first, ended, None]), st.integers(0, 3), st.integers(0, 2)),
        max_size=40,
    )
)
async def test_whatever_routers_say_their_silence_leaves_nothing(events: list[tuple[Any, int, int]]) -> None:
    """Events lost, repeated and out of order: no count falls below 0, and all is let go."""
    world = World()
    for make, request, router in events:
        if make is None:
            await world.clock.advance(1.0)
        else:
            world.say(make(f"q{request}"), router_id=f"r{router}")
        assert min(world.ledger.in_flight()) >= 0
    await world.clock.advance(SILENT_S + 1.0)
    world.neighbours.heard(1)
    assert world.ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_on_entering_decisions_are_listened_to() -> None:
    """The subject the controller reads."""
    world = World()
    async with world.neighbours:
        batch = DecisionBatch(router_id="r2", sequence=1, sent_at_s=0.0, events=(chosen(),))
        world.bus.handler(world.bus.subject, msgspec.msgpack.encode(batch))
    assert world.bus.subject == "poa.ns.decisions"
    assert world.ledger.work(KEY).waiting == 1


async def test_a_pick_counts_what_the_others_say_and_else_what_workers_say() -> None:
    """Of two routers the other is heard: its word alone counts. It falls silent: the workers' does."""
    world = World()
    cards = [WorkerCard(worker_id=worker, role=ROLE, kv_block_size=16) for worker in (A, B)]
    picker = Picker(
        Ledger(ROLE, world.clock),
        world.holder,
        FakeDirectory(*cards),
        AvoidList(15.0, world.clock),
        world.clock,
        random.Random(1),
        neighbours=world.neighbours,
    )

    def tell(revision: int) -> None:
        """Have B say that it carries ten requests."""
        world.holder.offer(
            Coefficients(
                controller_id="c",
                revision=revision,
                sent_at_s=0.0,
                routers=2,
                pools={ROLE: PoolSpeed(curve=FAST)},
                workers=(WorkerSpeed(B, 0, FAST, 100.0, 10, 2000, 2, 500),),
            )
        )

    tell(1)
    world.say(*(chosen(f"q{number}") for number in range(5)))
    assert picker.pick(picker.speeds(), 200, None, {}).worker == (B, 0)
    await world.clock.advance(SILENT_S)
    tell(2)
    assert picker.pick(picker.speeds(), 200, None, {}).worker == (A, 0)


async def test_a_pass_is_as_old_as_the_latest_sign_of_it_by_whichever_router() -> None:
    """Ours idled there for a minute; the other's request is not a minute overdue for that."""
    world = World()
    own = Ledger(ROLE, world.clock)
    work = own.work(KEY)
    await world.clock.advance(60.0)
    world.say(chosen())
    world.say(chosen("q2"))
    work.beside = world.ledger.work(KEY)
    assert work.all() == Loads(0, 2, 72, 264, 1, 36, world.clock.monotonic_s())
    work.beside = None
    own.take_totals([WorkerSpeed(A, 0, FAST, 100.0, 0, 0, 2, 500)], routers=2)
    assert work.all().moved_at_s == world.clock.monotonic_s()
