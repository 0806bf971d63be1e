"""Requests that go by marginal cost, on both data paths: picked, pinned, counted, ended."""

import asyncio
import contextlib
import random
from typing import Any

import pytest
from fakes import A, B, EventList, FakeContext, FakeDirectory, FakePool
from hypothesis import given
from hypothesis import strategies as st
from relay_parts import ANSWER, SENTINEL, RelayBench
from waiting import eventually

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock, ManualClock, SystemClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import AnswerFailed, Unpicked, WorkerUnreachable
from dynamo_poa.handover import Handovers
from dynamo_poa.ledger import Ledger
from dynamo_poa.marginal import Loads
from dynamo_poa.picker import Picker
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.router import Leg
from dynamo_poa.trip import RouterStats
from dynamo_poa.values import Curve, Role, RouterParams, Selection, WorkerCard, WorkerKey
from dynamo_poa.wire import Chosen, Coefficients, Handover, PoolSpeed, WorkerSpeed

FAST = Curve(prefill_base_s=0.002, prefill_token_s=0.0001, decode_base_s=0.006, decode_request_s=0.00025)
SLOW = Curve(prefill_base_s=0.01, prefill_token_s=0.0005, decode_base_s=0.03, decode_request_s=0.00125)
NOTHING = Loads(0, 0, 0, 0)
BOOTSTRAP = {"bootstrap_host": "placeholder", "bootstrap_port": 1, "bootstrap_room": 5}


class Holder:
    def __init__(self, selection: Selection = Selection.MARGINAL) -> None:
        self.current = RouterParams(
            revision=7, router_temperature=0.0, overlap_weight=1.0, selection=selection
        )


def card(worker_id: int, role: Role) -> WorkerCard:
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 7001} if role is Role.PREFILL else {}
    return WorkerCard(worker_id=worker_id, role=role, kv_block_size=16, **bootstrap)  # type: ignore[arg-type]


class Parts:
    """A picker whose coefficients say that A is slow: Dynamo's τ = 0 would send the first request there."""

    def __init__(self, role: Role, clock: Clock) -> None:
        self.coefficients = CoefficientsHolder(clock.monotonic_s)
        self.avoid = AvoidList(15.0, clock)
        self.directory = FakeDirectory(card(A, role), card(B, role))
        self.ledger = Ledger(role, clock)
        self.picker = Picker(
            self.ledger, self.coefficients, self.directory, self.avoid, clock, random.Random(1)
        )
        self.role = role

    def say(self, revision: int = 1) -> None:
        self.coefficients.offer(
            Coefficients(
                controller_id="c",
                revision=revision,
                sent_at_s=0.0,
                pools={self.role: PoolSpeed(curve=FAST)},
                workers=(WorkerSpeed(A, 0, SLOW, 100.0),),
            )
        )


class Bench:
    """One leg on fakes, by the stream path."""

    def __init__(
        self,
        role: Role = Role.AGGREGATED,
        *,
        handovers: Handovers | None = None,
        selection: Selection = Selection.MARGINAL,
        config: RouterConfig | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.parts = Parts(role, self.clock)
        self.pool = FakePool([A, B], role)
        self.events, self.stats, self.holder = EventList(), RouterStats(), Holder(selection)
        self.leg = Leg(
            role,
            self.pool,
            override=lambda params, preset: {"router_temperature": params.router_temperature},
            params=self.holder,
            events=self.events,
            directory=self.parts.directory,
            handovers=handovers,
            avoid=self.parts.avoid,
            stats=self.stats,
            config=config or RouterConfig(),
            clock=self.clock,
            picker=self.parts.picker,
        )

    def generate(self, request_id: str = "r1", **request: Any) -> Any:
        return self.leg.generate({"token_ids": [1, 2, 3], **request}, FakeContext(request_id))

    def ended_well(self) -> bool:
        """Tell whether nothing is left in flight, here and at Dynamo's router."""
        return self.pool.open_bookings() == [] and self.parts.ledger.in_flight() == NOTHING

    def chosen(self) -> list[Chosen]:
        return [event for event in self.events if isinstance(event, Chosen)]


@pytest.mark.parametrize("role", list(Role))
async def test_a_sampled_request_s_prefixes_are_told_whoever_chooses(role: Role) -> None:
    """Picked or left to Dynamo's selection: a decision is sampled once, in time with its candidates."""
    bench = Bench(role, config=RouterConfig(candidates_per_s=2.0))
    async for _ in bench.generate("r1"):  # without coefficients: Dynamo's selection has it
        pass
    bench.parts.say()
    for request_id in ("r2", "r3"):
        async for _ in bench.generate(request_id):
            pass
    hashes = () if role is Role.DECODE else prefix_hashes([1, 2, 3])
    assert bench.stats.marginal == {"no_coefficients": 1, "picked": 2}
    assert [event.prefix for event in bench.chosen()] == [hashes, hashes, ()]
    assert [len(event.candidates) for event in bench.chosen()] == [2, 2, 0]


@pytest.mark.parametrize("role", list(Role))
async def test_a_request_is_pinned_to_the_worker_that_costs_least(role: Role) -> None:
    """Dynamo's own selection is not asked; the booking is told, prefilled and ended; all legs."""
    bench = Bench(role)
    bench.parts.say()
    bench.pool.cached_tokens = {B: 2}
    assert len([chunk async for chunk in bench.generate()]) == 4
    assert [worker for worker, _ in bench.pool.sent] == [B]
    assert bench.pool.overrides == []
    uncached_tokens = 3 if role is Role.DECODE else 1
    assert bench.pool.pinned == [(B, uncached_tokens)]
    assert bench.pool.prefilled_ids == list(bench.pool.booked)
    assert bench.stats.marginal == {"picked": 1}
    (chosen,) = bench.chosen()
    assert (chosen.worker_id, chosen.revision, chosen.cached_tokens) == (B, 7, 3 - uncached_tokens)
    assert [candidate.worker_id for candidate in chosen.candidates] == [A, B]
    assert bench.ended_well()


@pytest.mark.parametrize(("role", "questions"), [(Role.PREFILL, 1), (Role.AGGREGATED, 1), (Role.DECODE, 0)])
async def test_a_pick_costs_one_question_to_dynamos_router_and_on_the_decode_leg_none(
    role: Role, questions: int
) -> None:
    """What is cached matters where prompts are computed; also a decision that is recorded asks no more."""
    bench = Bench(role)
    bench.parts.say()

    async def never(*_: Any) -> Any:
        raise AssertionError("asked")

    bench.pool.candidates = bench.pool.book = never  # type: ignore[method-assign]
    async for _ in bench.generate():
        pass
    assert bench.pool.overlaps_asked == questions


async def test_under_kv_selection_dynamo_chooses_and_the_ledger_counts_all_the_same() -> None:
    """So that the first pick by marginal cost knows what is in flight."""
    bench = Bench(selection=Selection.KV)
    bench.parts.say()
    stream = bench.generate()
    await anext(stream)
    assert [worker for worker, _ in bench.pool.sent] == [A]
    assert bench.parts.ledger.work(WorkerKey(A, 0)).all()[:4] == (1, 0, 0, 35)
    assert bench.stats.marginal == {}
    await stream.aclose()
    assert bench.ended_well()


async def test_each_reason_not_to_pick_leaves_the_request_to_dynamo_and_is_counted() -> None:
    """None yet, too old, a worker of no known speed, KvRouter's index silent, Dynamo's queue wanted."""
    bench = Bench()
    expected: dict[str, int] = {}

    async def one(reason: str) -> None:
        expected[reason] = expected.get(reason, 0) + 1
        async for _ in bench.generate():
            pass
        assert bench.stats.marginal == expected

    await one("no_coefficients")
    bench.parts.say()
    await one("picked")
    bench.pool.overlaps_error = Unpicked("failed", "no index")
    await one("failed")
    bench.pool.overlaps_error = None
    bench.parts.directory.remove(A, B)
    await one("unknown_worker")
    await bench.clock.advance(10.0)
    await one("stale_coefficients")
    bench.parts.picker.refusal = "queue_policy"
    await one("queue_policy")
    assert len(bench.pool.overrides) == 5
    assert bench.ended_well()


async def test_coefficients_that_grow_old_during_the_question_are_not_used() -> None:
    """They are looked at again after it."""
    bench = Bench()
    bench.parts.say()
    overlaps = bench.pool.overlaps

    async def slowly(token_ids: list[int]) -> Any:
        await bench.clock.advance(11.0)
        return await overlaps(token_ids)

    bench.pool.overlaps = slowly  # type: ignore[method-assign]
    async for _ in bench.generate():
        pass
    assert bench.stats.marginal == {"stale_coefficients": 1}


async def test_a_request_dynamos_router_is_not_told_of_is_counted_and_served() -> None:
    """Several routers without replica sync: the ledger knows, Dynamo does not."""
    bench = Bench()
    bench.parts.say()
    bench.pool.tells_pinned = False
    assert len([chunk async for chunk in bench.generate()]) == 4
    assert (bench.stats.untold, bench.pool.booked) == (1, {})
    assert bench.ended_well()


async def test_a_refused_connection_is_tried_again_on_another_worker() -> None:
    """The best one is dead: avoided from then on, and the slow one serves."""
    bench = Bench()
    bench.parts.say()
    bench.pool.unreachable = {B}
    for request_id in ("r1", "r2"):
        assert len([chunk async for chunk in bench.generate(request_id)]) == 4
    assert [worker for worker, _ in bench.pool.sent] == [B, A, A]
    assert [(event.worker_id, event.attempt) for event in bench.chosen()] == [(B, 1), (A, 2), (A, 1)]
    assert bench.stats.retries[Role.AGGREGATED] == 1
    assert bench.ended_well()


async def test_two_refused_connections_fail_the_request_and_leave_nothing() -> None:
    """One retry, as under Dynamo's selection."""
    bench = Bench()
    bench.parts.say()
    bench.pool.unreachable = {A, B}
    with pytest.raises(WorkerUnreachable):
        await anext(bench.generate())
    assert bench.ended_well()


async def test_two_requests_with_one_id_are_two_in_the_ledger() -> None:
    """A client may set the id."""
    bench = Bench()
    bench.parts.say()
    bench.pool.gate = asyncio.Event()
    streams = [bench.generate("same") for _ in range(2)]
    for stream in streams:
        await anext(stream)
    assert bench.parts.ledger.in_flight().running == 2
    await streams[0].aclose()
    assert bench.parts.ledger.in_flight().running == 1
    bench.pool.gate.set()
    async for _ in streams[1]:
        pass
    assert bench.ended_well()


async def test_a_request_cancelled_while_it_waits_is_taken_back() -> None:
    """Before its first token, during the question and after."""
    bench = Bench()
    bench.parts.say()
    hold = asyncio.Event()
    bench.pool.before_first = hold.wait
    waiting = asyncio.ensure_future(anext(bench.generate()))
    await asyncio.sleep(0.01)
    assert bench.parts.ledger.in_flight().waiting == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert bench.ended_well()

    async def never(token_ids: list[int]) -> Any:
        await hold.wait()

    bench.pool.overlaps = never  # type: ignore[method-assign]
    asking = asyncio.ensure_future(anext(bench.generate()))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert bench.ended_well()


async def test_a_prefill_leg_announces_the_worker_it_was_pinned_to() -> None:
    """The decode leg meets it there."""
    handovers = Handovers()
    bench = Bench(Role.PREFILL, handovers=handovers)
    bench.parts.say()
    async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    announced, _ = await handovers.wait("r1", 5, gone=lambda: False)
    assert announced.worker_id == B
    assert bench.ended_well()


def note(worker_id: int, attempt: int) -> Handover:
    """Return a prefill leg's word of where it is computed."""
    return Handover(
        request_id="r1",
        worker_id=worker_id,
        dp_rank=0,
        bootstrap_host="127.0.0.1",
        bootstrap_port=7000 + attempt,
        attempt=attempt,
        room=5,
    )


async def test_a_decode_leg_whose_prefill_leg_moves_goes_to_a_worker_that_is_new() -> None:
    """The first's entry is taken back, its booking ended."""
    handovers = Handovers()
    bench = Bench(Role.DECODE, handovers=handovers)
    bench.parts.say()
    handovers.announce(note(9, 1))
    hold = asyncio.Event()
    bench.pool.before_first = hold.wait
    first = asyncio.ensure_future(anext(bench.generate(bootstrap_info={**BOOTSTRAP})))
    await asyncio.sleep(0.01)
    assert [worker for worker, _ in bench.pool.sent] == [B]
    handovers.announce(note(8, 2))
    await asyncio.sleep(0.01)
    assert [worker for worker, _ in bench.pool.sent] == [B, A]
    assert bench.parts.ledger.in_flight().waiting == 1
    hold.set()
    await first
    assert bench.parts.ledger.work(WorkerKey(B, 0)).empty
    assert bench.stats.retries[Role.DECODE] == 1


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "next", "close", "selection", "dead", "well"]), st.integers(0, 4)),
        max_size=25,
    )
)
async def test_whatever_requests_go_through_nothing_is_left_in_flight(steps: list[tuple[str, int]]) -> None:
    """Choose, first token, end, retry, failure and cancellation in any order, under either selection."""
    bench = Bench()
    bench.parts.say()
    streams: list[Any] = []
    for number, (what, which) in enumerate(steps):
        if what == "ask":
            streams.append(bench.generate(f"r{number % 3}"))
        elif what == "selection":
            bench.holder.current = Holder(list(Selection)[which % 2]).current
        elif what in ("dead", "well"):
            bench.pool.unreachable = {(A, B)[which % 2]} if what == "dead" else set()
        elif streams:
            stream = streams[which % len(streams)]
            with contextlib.suppress(WorkerUnreachable, AnswerFailed):
                await (anext(stream, None) if what == "next" else stream.aclose())
    for stream in streams:
        await stream.aclose()
    assert bench.ended_well()
    assert bench.stats.in_flight[Role.AGGREGATED] == 0


async def test_each_chunk_is_a_sign_of_life_of_its_worker() -> None:
    """By the stream path."""
    bench = Bench()
    bench.parts.say()
    work = bench.parts.ledger.work(WorkerKey(B, 0))
    stream, seen = bench.generate(), list[float]()
    async for _ in stream:
        await bench.clock.advance(1.0)
        seen.append(bench.clock.monotonic_s() - work.moved_at_s)
    assert seen == [1.0, 1.0, 1.0, 1.0]


async def test_over_the_relay_a_request_is_pinned_counted_and_ended_likewise() -> None:
    """The frame goes to the picked worker, its limit of output untouched."""
    parts = Parts(Role.AGGREGATED, SystemClock())
    parts.say()
    async with RelayBench(params=Holder(), picker=parts.picker) as bench:
        asked = bench.requester.ask(stop_conditions={"max_tokens": 10})
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert (len(bench.workers[A].requests), len(bench.workers[B].requests)) == (0, 1)
        assert bench.workers[B].requests[0].get("stop_conditions") == {"max_tokens": 10}
        assert bench.stats.marginal == {"picked": 1}
        assert bench.pool.open_bookings() == []
        assert parts.ledger.in_flight() == NOTHING
        assert parts.ledger.arrivals_per_s() > 0


@pytest.mark.parametrize("words", [0, 1])
@pytest.mark.parametrize("way", ["requester", "worker"])
async def test_over_the_relay_a_request_cut_short_is_taken_back(way: str, words: int) -> None:
    """Who asks goes away, or who answers: before the first token (a worker's is retried) and after it."""

    async def play(dial: Any) -> None:
        dial.begin()
        dial.say(*ANSWER[:words])

    parts = Parts(Role.AGGREGATED, SystemClock())
    parts.say()
    async with RelayBench(params=Holder(), picker=parts.picker) as bench:
        bench.script(play)
        asked = bench.requester.ask()
        dial = await bench.dialled()
        await eventually(lambda: parts.ledger.in_flight()[:2] == ((0, 1), (1, 0))[words])
        if way == "worker":
            dial.reset()
            if not words:
                await bench.dialled(2)
                for each in bench.dials:
                    each.reset()
            await eventually(lambda: SENTINEL in asked.answer)  # an error
        asked.close()
        await bench.at_rest()
        assert parts.ledger.in_flight() == NOTHING
        assert bench.stats.marginal == {"picked": 2 if way == "worker" and not words else 1}


async def test_over_the_relay_the_workers_bytes_are_its_signs_of_life() -> None:
    """Unread, as they come."""
    parts = Parts(Role.AGGREGATED, clock := SystemClock())
    parts.say()
    async with RelayBench(params=Holder(), picker=parts.picker) as bench:
        before_s = clock.monotonic_s()
        asked = bench.requester.ask()
        await asked.whole()
        await eventually(lambda: parts.ledger.in_flight() == NOTHING)
        ended_s = clock.monotonic_s()
        assert before_s < parts.ledger.work(WorkerKey(B, 0)).moved_at_s <= ended_s
        assert bench.calls[0].moved == parts.ledger.work(WorkerKey(B, 0)).moved
