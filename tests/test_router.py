"""The request path: every way in, every way out."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from fakes import A, B, EventList, FakeContext, FakeDirectory, FakePool, prefill_card
from structlog.testing import capture_logs

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import ManualClock
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import AnswerFailed, RequestShed, Unhashed, WorkerUnreachable
from dynamo_poa.handover import HandoverFailed, Handovers
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.router import Leg
from dynamo_poa.trip import RequestRefused, RouterStats, Sampler
from dynamo_poa.values import MAX_ROUTER_TEMPERATURE, Outcome, Role, RouterParams
from dynamo_poa.wire import Chosen, Ended, FirstToken, Handover


class Holder:
    def __init__(self) -> None:
        self.current = RouterParams(revision=7, router_temperature=0.0, overlap_weight=1.0)


class Bench:
    """One leg on fakes."""

    def __init__(
        self,
        role: Role = Role.AGGREGATED,
        handovers: Handovers | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.pool = FakePool([A, B], role)
        self.holder = Holder()
        self.events = EventList()
        self.directory = FakeDirectory(prefill_card(A, 7001), prefill_card(B, 7002))
        self.stats = RouterStats()
        self.avoid = AvoidList(15.0, self.clock)
        self.leg = Leg(
            role,
            self.pool,
            override=lambda params, preset: {
                **(preset or {}),
                "router_temperature": params.router_temperature,
                "revision": params.revision,
            },
            params=self.holder,
            events=self.events,
            directory=self.directory,
            handovers=handovers,
            avoid=self.avoid,
            stats=self.stats,
            config=config or RouterConfig(),
            clock=self.clock,
        )

    def generate(self, request_id: str = "r1", **request: Any) -> Any:
        return self.leg.generate({"token_ids": [1, 2, 3], **request}, FakeContext(request_id))

    def outcome(self) -> Outcome:
        ended = [event for event in self.events if isinstance(event, Ended)]
        assert len(ended) == 1
        return ended[0].outcome


async def test_a_request_is_booked_streamed_reported_and_freed() -> None:
    """One Chosen, one FirstToken, one Ended; the booking is over. Source: Decision contract."""
    bench = Bench()
    chunks = [chunk async for chunk in bench.generate()]
    assert [chunk["token_ids"] for chunk in chunks] == [[1000], [1001], [1002], []]
    chosen, first, ended = bench.events
    assert isinstance(chosen, Chosen)
    assert (chosen.worker_id, chosen.revision, chosen.prompt_tokens, chosen.attempt) == (A, 7, 3, 1)
    assert [c.worker_id for c in chosen.candidates] == [A, B]
    assert isinstance(first, FirstToken)
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.OK
    assert bench.pool.prefilled_ids == list(bench.pool.booked)
    assert bench.pool.open_bookings() == []
    assert bench.stats.in_flight[Role.AGGREGATED] == 0


@pytest.mark.parametrize(
    ("role", "told"), [(Role.AGGREGATED, True), (Role.PREFILL, True), (Role.DECODE, False)]
)
async def test_a_sampled_prompt_s_prefixes_are_told_by_the_leg_that_computes_it(
    role: Role, told: bool
) -> None:
    """The same sample as the candidates: caching is priced on who asked for what. Contract: wire.Chosen."""
    bench = Bench(role)
    async for _ in bench.generate():
        pass
    chosen = bench.events[0]
    assert isinstance(chosen, Chosen)
    assert chosen.prefix == (prefix_hashes([1, 2, 3]) if told else ())
    assert len(chosen.candidates) == 2
    assert bench.pool.prefixes_asked == told


async def test_prompts_beyond_the_sample_are_not_hashed() -> None:
    """Hashing costs 70 us for 4,096 tokens: `candidates_per_s` bounds what is spent on it."""
    bench = Bench(config=RouterConfig(candidates_per_s=2.0))
    for number in range(5):
        async for _ in bench.generate(f"r{number}"):
            pass
    told = [bool(event.prefix) for event in bench.events if isinstance(event, Chosen)]
    recorded = [bool(event.candidates) for event in bench.events if isinstance(event, Chosen)]
    assert told == recorded == [True, True, False, False, False]
    assert bench.pool.prefixes_asked == 2


async def test_a_prompt_that_dynamo_does_not_hash_is_served_and_counted() -> None:
    """What is only told of a request must not cost it."""
    bench = Bench()
    bench.pool.prefix_error = Unhashed("another release")
    assert len([chunk async for chunk in bench.generate()]) == 4
    chosen = bench.events[0]
    assert isinstance(chosen, Chosen)
    assert (chosen.prefix, len(chosen.candidates), bench.stats.unhashed) == ((), 2, 1)


async def test_routing_data_never_reaches_the_frontend() -> None:
    """The frontend logs two errors per request over a second writer. Source: measured."""
    chunks = [chunk async for chunk in Bench().generate()]
    assert all("routing_data" not in chunk for chunk in chunks)


async def test_each_request_uses_the_parameters_current_when_it_is_chosen() -> None:
    """A swap between two requests acts on the second, without a restart."""
    bench = Bench()
    async for _ in bench.generate("r1"):
        pass
    bench.holder.current = RouterParams(revision=8, router_temperature=0.7, overlap_weight=1.0)
    async for _ in bench.generate("r2"):
        pass
    assert [(o["router_temperature"], o["revision"]) for o in bench.pool.overrides] == [(0.0, 7), (0.7, 8)]


async def test_an_empty_prompt_never_reaches_the_kv_router() -> None:
    """KvRouter dies of an empty token list for good. Source: measured."""
    bench = Bench()
    with pytest.raises(RequestRefused, match=r"token_ids = \[\]"):
        await anext(bench.generate(token_ids=[]))
    assert bench.pool.overrides == []
    assert bench.outcome() is Outcome.FAILED


async def test_an_outage_is_a_line_a_second_and_not_a_flood() -> None:
    """What was not said is counted in the next line."""
    bench = Bench()
    with capture_logs() as lines:
        for pause_s in (0.0, 0.0, 0.0, 1.0):
            await bench.clock.advance(pause_s)
            with pytest.raises(RequestRefused):
                await anext(bench.generate(token_ids=[]))
    failed = [line["more"] for line in lines if line["event"] == "poa.request.failed"]
    assert failed == [0, 2]


async def test_a_refused_connection_costs_one_retry_on_another_worker() -> None:
    """The dead worker is avoided from then on, and both bookings end."""
    bench = Bench()
    bench.pool.unreachable = {A}
    chunks = [chunk async for chunk in bench.generate()]
    assert len(chunks) == 4
    assert [worker for worker, _ in bench.pool.sent] == [A, B]
    assert bench.pool.open_bookings() == []
    assert bench.stats.retries[Role.AGGREGATED] == 1
    async for _ in bench.generate("r2"):
        pass
    assert bench.pool.sent[-1][0] == B


async def test_an_avoided_worker_is_drawn_around_uniformly() -> None:
    """KvRouter has no exclusion and thinks the corpse idlest, so draws are uniform until another comes."""
    bench = Bench()
    bench.avoid.add(A)
    async for _ in bench.generate():
        pass
    assert bench.pool.overrides[0]["router_temperature"] == 0.0
    assert {o["router_temperature"] for o in bench.pool.overrides[1:]} == {MAX_ROUTER_TEMPERATURE}
    assert [worker for worker, _ in bench.pool.sent] == [B]
    assert bench.pool.open_bookings() == []


@pytest.mark.parametrize(("dead", "alive"), [(A, B), (B, A)])
async def test_where_all_are_avoided_the_retry_goes_to_the_one_not_tried(dead: int, alive: int) -> None:
    """One that was avoided for a moment's trouble is well again; the one just tried is not."""
    bench = Bench()
    bench.avoid.add(A)
    bench.avoid.add(B)
    bench.pool.unreachable = {dead}
    for request_id in ("r1", "r2"):
        assert len([chunk async for chunk in bench.generate(request_id)]) == 4
        assert bench.pool.sent[-1][0] == alive
    assert len(bench.pool.sent) <= 4
    assert bench.pool.open_bookings() == []


async def test_a_worker_that_is_well_is_tried_again_rather_than_a_dead_one() -> None:
    """The decode leg's worker has died, and the only other prefill worker before it."""
    bench, asked = Bench(Role.PREFILL, Handovers()), list[int]()
    bench.avoid.add(B)
    original = bench.pool.send

    async def fail_once(request: Any, worker: Any, context: Any) -> Any:
        asked.append(worker.worker_id)
        if len(asked) == 1:
            raise AnswerFailed(worker.worker_id, "handoff peer has gone")
        return await original(request, worker, context)

    bench.pool.send = fail_once  # type: ignore[method-assign]
    async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    assert asked == [A, A]
    assert bench.pool.open_bookings() == []


async def test_two_refused_connections_fail_the_request_and_free_everything() -> None:
    """One retry, not more: the client hears of it."""
    bench = Bench()
    bench.pool.unreachable = {A, B}
    with pytest.raises(WorkerUnreachable):
        await anext(bench.generate())
    assert len(bench.pool.sent) == 2
    assert bench.pool.open_bookings() == []
    assert bench.outcome() is Outcome.FAILED


async def test_avoiding_ends_with_time_and_forgets() -> None:
    """A worker is avoided for `avoid_s`; the list holds no more than the workers of that time."""
    bench = Bench()
    bench.avoid.add(A)
    assert A in bench.avoid
    await bench.clock.advance(15.0)
    assert A not in bench.avoid
    bench.avoid.add(B)
    assert list(bench.avoid._until_s) == [B]


async def test_a_worker_refused_for_its_card_is_drawn_around_too() -> None:
    """E6: KvRouter would still choose one with another block size."""
    bench = Bench()
    bench.directory.unusable = {A}
    async for _ in bench.generate():
        pass
    assert [worker for worker, _ in bench.pool.sent] == [B]


async def test_a_choice_drawn_around_a_dead_worker_is_not_priced() -> None:
    """Such a draw says nothing of the policy: PoA-hat must not count it."""
    bench = Bench()
    bench.avoid.add(A)
    async for _ in bench.generate():
        pass
    assert isinstance(bench.events[0], Chosen)
    assert bench.events[0].candidates == ()


async def test_two_requests_with_one_id_have_bookings_of_their_own() -> None:
    """A client may set the id: the end of one must not end the other's booking."""
    bench = Bench()
    bench.pool.gate = asyncio.Event()
    first = bench.generate("same")
    await anext(first)
    second = bench.generate("same")
    await anext(second)
    await second.aclose()
    assert len(bench.pool.open_bookings()) == 1
    bench.pool.gate.set()
    async for _ in first:
        pass
    assert bench.pool.open_bookings() == []


async def test_a_request_dynamo_sheds_is_counted_apart() -> None:
    """S8: refused requests are no failures of ours and no TTFT samples."""
    bench = Bench()

    async def shed(*_: Any) -> Any:
        raise RequestShed("queue limit")

    bench.pool.book = shed  # type: ignore[method-assign]
    with pytest.raises(RequestShed):
        await anext(bench.generate())
    assert bench.outcome() is Outcome.SHED


async def test_a_first_chunk_that_is_an_error_is_no_first_token() -> None:
    """An engine that fails at once must not look fast."""
    bench = Bench()

    async def fail(*_: Any) -> Any:
        async def nothing() -> Any:
            return
            yield

        return {"finish_reason": {"error": "no memory"}}, nothing()

    bench.pool.send = fail  # type: ignore[method-assign]
    async for _ in bench.generate():
        pass
    assert not any(isinstance(event, FirstToken) for event in bench.events)
    assert bench.outcome() is Outcome.FAILED


async def test_a_flood_of_failures_is_one_line_a_second() -> None:
    """An outage must not become a flood of lines; what was not said is counted."""
    bench = Bench()
    with capture_logs() as logs:
        for number in range(5):
            with pytest.raises(RequestRefused):
                await anext(bench.generate(f"r{number}", token_ids=[]))
        await bench.clock.advance(1.0)
        with pytest.raises(RequestRefused):
            await anext(bench.generate("last", token_ids=[]))
    assert [(line["request_id"], line["more"]) for line in logs] == [("r0", 0), ("last", 4)]


async def test_a_client_that_leaves_ends_the_booking() -> None:
    """Dynamo closes the generator: cancelled, not failed."""
    bench = Bench()
    stream = bench.generate()
    await anext(stream)
    await stream.aclose()
    assert bench.outcome() is Outcome.CANCELLED
    assert bench.pool.open_bookings() == []


async def test_a_stream_dropped_on_a_thread_of_dynamos_ends_its_booking_in_the_loop() -> None:
    """Measured: 182 of 200 clients that left together; KvRouter can be asked only where a loop runs."""
    bench, loop = Bench(), asyncio.get_running_loop()
    free, freed_in = bench.pool.free, []

    def free_in_loop(booking: str) -> None:
        freed_in.append(asyncio.get_running_loop())
        free(booking)

    bench.pool.free = free_in_loop  # type: ignore[method-assign]
    streams = [bench.generate()]
    # As Dynamo does: asked for its chunks on a thread without a loop, the stream is not known to any.
    await (await loop.run_in_executor(None, lambda: streams[0].__anext__()))
    await loop.run_in_executor(None, streams.clear)
    await asyncio.sleep(0)
    assert freed_in == [loop]
    assert bench.outcome() is Outcome.CANCELLED
    assert bench.pool.open_bookings() == []
    assert bench.stats.in_flight[Role.AGGREGATED] == 0


async def test_a_timer_is_cancelled_in_the_loops_thread_wherever_the_stream_is_dropped() -> None:
    """A loop's timers are its own: cancelling one from another thread may corrupt uvloop."""
    bench, loop = Bench(), asyncio.get_running_loop()
    cancelled_in: list[int] = []

    class Timer:
        def cancel(self) -> None:
            cancelled_in.append(threading.get_ident())

    bench.leg._watch_for_orphan = lambda trip, context: Timer()  # type: ignore[method-assign]
    streams = [bench.generate()]
    await (await loop.run_in_executor(None, lambda: streams[0].__anext__()))
    await loop.run_in_executor(None, streams.clear)
    await asyncio.sleep(0)
    assert cancelled_in == [threading.get_ident()]


async def test_a_stream_that_ends_early_because_its_client_has_gone_is_cancelled() -> None:
    """Measured: Dynamo then ends the worker's stream without a finish reason and without an exception."""
    bench, context = Bench(), FakeContext("r1")
    bench.pool.last_chunk = {"token_ids": [1003]}
    async for _ in bench.leg.generate({"token_ids": [1, 2, 3]}, context):
        context.stopped = True
    assert bench.outcome() is Outcome.CANCELLED


async def test_a_client_that_leaves_before_the_first_token_costs_no_worker_its_good_name() -> None:
    """Measured: the stream then ends before its first chunk, as it does when a worker dies."""
    bench, context = Bench(), FakeContext("r1")
    bench.pool.unreachable = {A, B}
    context.stopped = True
    assert [chunk async for chunk in bench.leg.generate({"token_ids": [1, 2, 3]}, context)] == []
    assert bench.outcome() is Outcome.CANCELLED
    assert len(bench.pool.sent) == 1
    assert A not in bench.avoid
    assert B not in bench.avoid


async def test_a_cancelled_task_ends_the_booking() -> None:
    """Cancellation before the first token counts as cancelled."""
    bench = Bench()
    bench.pool.before_first = asyncio.Event().wait
    task = asyncio.ensure_future(anext(bench.generate()))
    await asyncio.sleep(0.01)
    assert len(bench.pool.open_bookings()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outcome() is Outcome.CANCELLED
    assert bench.pool.open_bookings() == []


async def test_an_engine_that_dies_mid_stream_fails_the_request() -> None:
    """No retry after the first chunk: tokens are out already."""
    bench = Bench()
    bench.pool.fail_after = 1
    with pytest.raises(RuntimeError, match="engine gone"):
        async for _ in bench.generate():
            pass
    assert bench.outcome() is Outcome.FAILED
    assert bench.pool.open_bookings() == []
    assert len(bench.pool.sent) == 1


async def test_an_error_reported_in_the_last_chunk_is_a_failure() -> None:
    """Engine errors can be a chunk: finish_reason {"error": ...}. Source: measured."""
    bench = Bench()
    bench.pool.last_chunk = {"token_ids": [], "finish_reason": {"error": "out of memory"}}
    async for _ in bench.generate():
        pass
    assert bench.outcome() is Outcome.FAILED


BOOTSTRAP = {
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 42,
    "handoff_id": b"\x00" * 16,
}
NOTE = Handover(
    request_id="r1", worker_id=A, dp_rank=0, bootstrap_host="127.0.0.1", bootstrap_port=7001, room=42
)


async def test_both_legs_meet_at_the_prefill_worker_that_was_chosen() -> None:
    """The placeholder address is replaced on both legs; room and binary id stay as they were."""
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)

    async def run(bench: Bench) -> None:
        async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
            pass

    await asyncio.gather(run(decode), run(prefill))
    expected = {**BOOTSTRAP, "bootstrap_port": 7001}
    assert prefill.pool.sent[0][1]["bootstrap_info"] == expected
    assert decode.pool.sent[0][1]["bootstrap_info"] == expected
    assert len(handovers) == 0


async def test_a_prefill_retry_moves_the_decode_leg_along() -> None:
    """The first prefill worker refused after its address was announced: decode is sent again, elsewhere.

    Where it was sent first the engine still clears up after it, and would with the second, of the same id.
    """
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)
    met = asyncio.Event()

    async def rendezvous() -> None:
        if decode.pool.sent[-1][1]["bootstrap_info"]["bootstrap_port"] == 7001:
            met.set()
            await asyncio.Event().wait()  # the engine waits for a prefill worker that never comes

    decode.pool.before_first = rendezvous
    stream = decode.generate(bootstrap_info={**BOOTSTRAP})
    first = asyncio.ensure_future(anext(stream))
    original = prefill.pool.send

    async def refuse_first(request: Any, worker: Any, context: Any) -> Any:
        if worker.worker_id == A:
            await met.wait()
            raise WorkerUnreachable(A, "Connection refused")
        return await original(request, worker, context)

    prefill.pool.send = refuse_first  # type: ignore[method-assign]
    async for _ in prefill.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    assert (await first)["token_ids"] == [1000]
    asked = [(worker, request["bootstrap_info"]["bootstrap_port"]) for worker, request in decode.pool.sent]
    assert asked == [(A, 7001), (B, 7002)]
    assert A not in decode.avoid
    async for _ in stream:
        pass
    assert decode.pool.open_bookings() == []


async def test_a_request_is_renamed_for_its_engines_only_in_its_second_life_and_then_in_each_try() -> None:
    """Legs may come one by relay and one by stream: their engines take one id alone for a pair."""
    handovers = Handovers()
    prefill, again = Bench(Role.PREFILL, handovers), {**BOOTSTRAP, "bootstrap_room": 99}
    for info, renamed, attempt in ((BOOTSTRAP, False, 1), (again, True, 2)):
        prefill.pool.unreachable = {A} if attempt == 2 else set()
        async for _ in prefill.generate(bootstrap_info={**info}):
            pass
        said, _ = await handovers.wait("r1", info["bootstrap_room"])
        assert (said.renamed, said.attempt) == (renamed, attempt)


async def test_a_prefill_leg_whose_decode_legs_client_has_gone_is_not_tried_again() -> None:
    """The frontend does not stop it: tried again it held a worker until the engine's half minute was over."""
    handovers, context = Handovers(), FakeContext("r1")
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)
    decode.pool.before_first = asyncio.Event().wait
    request = {"token_ids": [1, 2, 3], "bootstrap_info": {**BOOTSTRAP}}
    first = asyncio.ensure_future(anext(decode.leg.generate(request, context)))
    await asyncio.sleep(0.01)

    async def disconnected() -> None:
        context.stopped = True
        raise AnswerFailed(A, "destination disconnected")

    prefill.pool.before_first = disconnected
    with pytest.raises(AnswerFailed, match="destination disconnected"):
        await anext(prefill.generate(bootstrap_info={**BOOTSTRAP}))
    assert len(prefill.pool.sent) == 1
    assert prefill.pool.open_bookings() == []
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_decode_worker_that_finds_no_prefill_worker_is_asked_again_when_that_leg_has_moved() -> None:
    """The decode leg may be the first to notice: nothing is wrong with its worker. Measured, mock engine."""
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)
    noticed = asyncio.Event()

    async def rendezvous() -> None:
        worker_id, request = decode.pool.sent[-1]
        if request["bootstrap_info"]["bootstrap_port"] == 7001:
            noticed.set()
            raise AnswerFailed(worker_id, "Generate Error: bootstrap connection failed: Connection refused")

    decode.pool.before_first = rendezvous
    stream = decode.generate(bootstrap_info={**BOOTSTRAP})
    first = asyncio.ensure_future(anext(stream))
    original = prefill.pool.send

    async def refuse_late(request: Any, worker: Any, context: Any) -> Any:
        if worker.worker_id == A:
            await noticed.wait()
            raise WorkerUnreachable(A, "Connection refused")
        return await original(request, worker, context)

    prefill.pool.send = refuse_late  # type: ignore[method-assign]
    async for _ in prefill.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    assert (await first)["token_ids"] == [1000]
    asked = [(worker, request["bootstrap_info"]["bootstrap_port"]) for worker, request in decode.pool.sent]
    assert asked == [(A, 7001), (B, 7002)]
    assert A not in decode.avoid
    async for _ in stream:
        pass
    assert (decode.outcome(), decode.pool.open_bookings()) == (Outcome.OK, [])


ENGINE_ERROR = {"finish_reason": {"error": "the other leg's worker has gone"}, "token_ids": []}


def failing(bench: Bench, *workers: int) -> list[int]:
    """Let engines of these workers begin with an error; return the list that says who was asked."""
    original, asked = bench.pool.send, list[int]()

    async def send(request: Any, worker: Any, context: Any) -> Any:
        chunk, rest = await original(request, worker, context)
        asked.append(worker.worker_id)
        return ({**ENGINE_ERROR} if worker.worker_id in workers else chunk), rest

    bench.pool.send = send  # type: ignore[method-assign]
    return asked


async def test_a_prefill_engine_that_fails_is_tried_again_elsewhere_under_another_id() -> None:
    """Its decode worker has died, mostly: the decode leg, retried, follows. Source: measured, make soak."""
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)
    asked = failing(prefill, A)
    decode.pool.unreachable = {A}

    async def run(bench: Bench) -> None:
        async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
            pass

    await asyncio.gather(run(prefill), run(decode))
    assert asked == [A, B]
    assert (prefill.outcome(), decode.outcome()) == (Outcome.OK, Outcome.OK)
    assert A not in prefill.avoid  # it is well
    moved = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 7002,
        "bootstrap_room": 42 ^ 2**40,
        "handoff_id": b"\x00" * 15 + b"\x01",
    }
    assert prefill.pool.sent[-1][1]["bootstrap_info"] == moved
    assert decode.pool.sent[-1][1]["bootstrap_info"] == moved
    assert prefill.pool.open_bookings() == decode.pool.open_bookings() == []


async def test_a_request_sent_again_under_its_id_meets_its_own_prefill_leg() -> None:
    """After its router has died the frontend sends it again; the first prefill leg then fails, or moves."""
    handovers = Handovers()
    first, again = Bench(Role.PREFILL, handovers), Bench(Role.PREFILL, handovers)
    decode = Bench(Role.DECODE, handovers)
    first.pool.workers, again.pool.workers = [A], [B]
    first.pool.before_first = again.pool.before_first = decode.pool.before_first = asyncio.Event().wait
    old = asyncio.ensure_future(anext(first.generate(bootstrap_info={**BOOTSTRAP})))
    info = {**BOOTSTRAP, "bootstrap_room": 43}
    legs = [asyncio.ensure_future(anext(bench.generate(bootstrap_info=info))) for bench in (again, decode)]
    await asyncio.sleep(0.01)
    old.cancel()  # its failure is told to both legs of the first time, of which one is left
    await asyncio.sleep(0.01)
    assert not any(leg.done() for leg in legs)
    assert [request["bootstrap_info"] for _, request in decode.pool.sent] == [
        {**info, "bootstrap_port": 7002}
    ]
    for leg in legs:
        leg.cancel()
    await asyncio.gather(old, *legs, return_exceptions=True)


async def test_a_prefill_engine_that_fails_late_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rendezvous that timed out nobody waits for another."""
    monkeypatch.setattr("dynamo_poa.router.HANDOVER_TIMEOUT_S", 0.0)
    bench = Bench(Role.PREFILL, Handovers())
    asked = failing(bench, A, B)
    with pytest.raises(AnswerFailed, match="the other leg's worker has gone"):
        await anext(bench.generate(bootstrap_info={**BOOTSTRAP}))
    assert asked == [A]
    assert bench.outcome() is Outcome.FAILED


async def test_a_decode_engine_that_fails_while_its_prefill_leg_stays_is_tried_again_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits a moment for that leg to move, for it mostly does; both failing, the client hears why."""
    monkeypatch.setattr("dynamo_poa.router.MOVE_S", 0.02)
    for broken, outcome in (((A,), Outcome.OK), ((A, B), Outcome.FAILED)):
        handovers = Handovers()
        decode = Bench(Role.DECODE, handovers)
        asked = failing(decode, *broken)
        handovers.announce(NOTE)
        stream = decode.generate(bootstrap_info={**BOOTSTRAP})
        if outcome is Outcome.OK:
            assert [chunk["token_ids"] async for chunk in stream] == [[1000], [1001], [1002], []]
        else:
            with pytest.raises(AnswerFailed, match=rf"worker {B}: .*the other leg's worker has gone"):
                await anext(stream)
        assert asked == [A, B]
        assert (decode.outcome(), A in decode.avoid) == (outcome, False)
        assert decode.pool.open_bookings() == []


async def test_a_decode_leg_follows_its_prefill_leg_however_late_that_moves() -> None:
    """Its prefill worker is killed after the request has waited there for longer than a leg may."""
    handovers = Handovers()
    decode = Bench(Role.DECODE, handovers)
    waits = asyncio.Event()

    async def rendezvous() -> None:
        if decode.pool.sent[-1][1]["bootstrap_info"]["bootstrap_port"] == 7001:
            waits.set()
            await asyncio.Event().wait()

    decode.pool.before_first = rendezvous
    handovers.announce(NOTE)
    stream = decode.generate(bootstrap_info={**BOOTSTRAP})
    first = asyncio.ensure_future(anext(stream))
    await waits.wait()
    await decode.clock.advance(11.0)
    handovers.announce(msgspec.structs.replace(NOTE, worker_id=B, bootstrap_port=7002, attempt=2))
    assert (await first)["token_ids"] == [1000]
    assert [worker for worker, _ in decode.pool.sent] == [A, B]
    async for _ in stream:
        pass
    assert (decode.outcome(), decode.pool.open_bookings()) == (Outcome.OK, [])


async def test_a_decode_leg_does_not_follow_for_ever() -> None:
    """Prefill legs of two requests under one id would move it to and fro for as long as they come."""
    handovers = Handovers()
    decode = Bench(Role.DECODE, handovers)

    async def moves_again() -> None:
        port = 7001 + len(decode.pool.sent)
        handovers.announce(msgspec.structs.replace(NOTE, bootstrap_port=port))
        await asyncio.Event().wait()

    decode.pool.before_first = moves_again
    handovers.announce(NOTE)
    with pytest.raises(AnswerFailed, match="its prefill leg has moved"):
        await asyncio.wait_for(anext(decode.generate(bootstrap_info={**BOOTSTRAP})), 5.0)
    assert len(decode.pool.sent) == 8
    assert decode.pool.open_bookings() == []


async def test_without_hand_over_an_engines_error_is_the_clients() -> None:
    """It is the request's own, mostly: another engine would say the same."""
    bench = Bench()
    asked = failing(bench, A)
    assert await anext(bench.generate()) == ENGINE_ERROR
    assert asked == [A]


async def test_a_failed_prefill_leg_fails_the_decode_leg_at_once() -> None:
    """Otherwise it would wait half a minute for a rendezvous that cannot come."""
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)
    prefill.pool.unreachable = {A, B}
    waiting = asyncio.ensure_future(anext(decode.generate(bootstrap_info={**BOOTSTRAP})))
    with pytest.raises(WorkerUnreachable):
        await anext(prefill.generate(bootstrap_info={**BOOTSTRAP}))
    with pytest.raises(HandoverFailed):
        await asyncio.wait_for(waiting, 1.0)
    assert decode.outcome() is Outcome.FAILED
    assert decode.pool.open_bookings() == []


async def test_a_refused_prefill_leg_refuses_the_decode_leg_that_comes_after_it() -> None:
    """S8, measured: Dynamo refuses at once, and the decode leg of the request arrives milliseconds later."""
    handovers = Handovers()
    prefill, decode = Bench(Role.PREFILL, handovers), Bench(Role.DECODE, handovers)

    async def shed(*_: Any) -> Any:
        raise RequestShed("queue limit")

    prefill.pool.book = shed  # type: ignore[method-assign]
    with pytest.raises(RequestShed):
        await anext(prefill.generate(bootstrap_info={**BOOTSTRAP}))
    with pytest.raises(RequestShed):
        await asyncio.wait_for(anext(decode.generate(bootstrap_info={**BOOTSTRAP})), 1.0)
    assert decode.outcome() is Outcome.SHED
    assert decode.pool.open_bookings() == []
    assert len(handovers) == 0


async def test_the_decode_leg_keeps_dynamos_preset() -> None:
    """Dynamo's own decode override stays; only τ is ours."""
    bench = Bench(Role.DECODE)
    preset = {"overlap_score_credit": 0.0, "assume_kv_reuse": False}
    async for _ in bench.generate(router_config_override=preset):
        pass
    assert bench.pool.overrides[0] == {**preset, "router_temperature": 0.0, "revision": 7}


async def test_a_prefill_worker_seen_by_the_kv_router_first_is_looked_up_again() -> None:
    """The directory follows discovery a moment later than KvRouter does."""
    bench = Bench(Role.PREFILL, Handovers())
    bench.directory.late = {A: prefill_card(A, 7009)}
    del bench.directory._cards[A]
    async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    assert [request["bootstrap_info"]["bootstrap_port"] for _, request in bench.pool.sent] == [7009]


async def test_a_prefill_worker_without_a_card_is_drawn_around_and_keeps_its_good_name() -> None:
    """Just started, it was avoided for 15 s, and a dead one was all that was left. Source: make soak."""
    bench = Bench(Role.PREFILL, Handovers())
    del bench.directory._cards[A]
    async for _ in bench.generate(bootstrap_info={**BOOTSTRAP}):
        pass
    assert [worker for worker, _ in bench.pool.sent] == [B]
    assert A not in bench.avoid


async def test_the_only_prefill_worker_is_waited_for_until_its_card_can_be_read() -> None:
    """KvRouter offers it a moment earlier; without an address nobody could meet there."""
    bench = Bench(Role.PREFILL, Handovers())
    bench.pool.workers = [A]
    del bench.directory._cards[A]
    asked = asyncio.ensure_future(anext(bench.generate(bootstrap_info={**BOOTSTRAP})))
    for _ in range(5):
        await bench.clock.advance(0.1)
    assert (asked.done(), bench.pool.sent) == (False, [])
    bench.directory.late = {A: prefill_card(A, 7009)}
    await bench.clock.advance(0.1)
    await asked
    assert [request["bootstrap_info"]["bootstrap_port"] for _, request in bench.pool.sent] == [7009]


async def test_a_prefill_worker_whose_card_never_comes_fails_its_request_and_keeps_its_good_name() -> None:
    """With its card it can be used at once; avoided, it would be left alone beside a dead one for 15 s."""
    bench = Bench(Role.PREFILL, Handovers())
    bench.pool.workers = [A]
    del bench.directory._cards[A]
    asked = asyncio.ensure_future(anext(bench.generate(bootstrap_info={**BOOTSTRAP})))
    await bench.clock.advance(1.9)
    assert not asked.done()
    await bench.clock.advance(2.5)
    with pytest.raises(AnswerFailed, match="its card gives no bootstrap address"):
        await asked
    assert (bench.pool.sent, A in bench.avoid, bench.pool.open_bookings()) == ([], False, [])


async def test_candidates_are_recorded_so_many_times_a_second() -> None:
    """They add to a request's cost; a burst up to a second's worth is recorded whole."""
    clock = ManualClock()
    sampler = Sampler(3.0, clock)
    assert [sampler.take() for _ in range(5)] == [True, True, True, False, False]
    await clock.advance(0.5)
    assert [sampler.take() for _ in range(2)] == [True, False]
    await clock.advance(60.0)
    assert [sampler.take() for _ in range(5)] == [True, True, True, False, False]
    assert not Sampler(0.0, clock).take()


@pytest.mark.parametrize("decode_came", [True, False])
async def test_a_prefill_leg_whose_decode_leg_never_comes_is_stopped(
    decode_came: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine would hold it, and its booking, for half a minute. Measured after a router died."""
    monkeypatch.setattr("dynamo_poa.router.HANDOVER_TIMEOUT_S", 0.02)
    handovers = Handovers()
    bench = Bench(Role.PREFILL, handovers)
    bench.pool.gate = asyncio.Event()
    context = FakeContext("r1")
    stream = bench.leg.generate({"token_ids": [1], "bootstrap_info": {**BOOTSTRAP}}, context)
    await anext(stream)
    if decode_came:
        await handovers.wait("r1", 42)
    await asyncio.sleep(0.05)
    assert context.stopped is not decode_came
    await stream.aclose()
