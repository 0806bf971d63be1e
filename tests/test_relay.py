"""Requests in, acknowledgements out: what is taken over, what is Dynamo's own, and in which order."""

import asyncio
import gc
import socket
import sys
from typing import Any

import pytest
import uvloop
from fakes import A
from relay_parts import ANSWER, OWN, SENTINEL, RelayBench, Requester, answers
from structlog.testing import capture_logs
from waiting import eventually

from dynamo_poa.clock import ManualClock
from dynamo_poa.frames import ACCEPTED, FrameLimits, error_answer
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.values import Outcome
from dynamo_poa.wire import Chosen, Ended, FirstToken

OTHER = f"{OWN:x}/other"


async def test_a_request_is_forwarded_and_its_answer_comes_back_byte_for_byte() -> None:
    """One Chosen, one FirstToken, one Ended, the booking ended: as on the stream path."""
    async with RelayBench() as bench:
        asked = bench.requester.ask(guided=b"\x00\xff", routing={"x": 1})
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        (request,) = bench.workers[A].requests
        assert (request.id, request.address) == ("r0", bench.answers.address)
        assert request.frame.path == f"{A:x}/generate"
        assert request.get("routing") == {"x": 1, "dp_rank": 0}
        assert (request.get("token_ids"), request.get("guided")) == ([1, 2, 3], b"\x00\xff")
        chosen, first, ended = bench.events
        assert isinstance(chosen, Chosen)
        assert isinstance(first, FirstToken)
        assert isinstance(ended, Ended)
        assert (chosen.request_id, chosen.worker_id, chosen.prompt_tokens) == ("r0", A, 3)
        assert (chosen.attempt, chosen.revision) == (1, 7)
        assert chosen.prefix == prefix_hashes([1, 2, 3])
        assert ended.outcome is Outcome.OK
        assert bench.pool.prefilled_ids == list(bench.pool.booked)
        assert (bench.relay.forwarded, dict(bench.relay.handed_on)) == (1, {})
        assert bytes(bench.requester.acks) == ACCEPTED


@pytest.mark.parametrize("step", [1, 7, 100, 1_000_000])
async def test_requests_sent_without_waiting_are_acknowledged_in_order_however_they_are_split(
    step: int,
) -> None:
    """Frames and acknowledgements may be cut anywhere. Source: measured on 1.4.2."""
    async with RelayBench() as bench:
        asked, frames = zip(*(bench.requester.frame() for _ in range(5)), strict=True)
        data = b"".join(frames)
        for at in range(0, len(data), step):
            bench.requester.write(data[at : at + step])
            if step > 1 or at % 50 == 0:
                await asyncio.sleep(0)
        for one in asked:
            assert await one.whole() == b"".join(ANSWER)
        await bench.requester.acknowledged(5)
        await bench.at_rest()
        sent = {request.id for worker in bench.workers.values() for request in worker.requests}
        assert sent == {f"r{number}" for number in range(5)}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [("path", {"path": OTHER}), ("codec", {"codec": "json"}), ("address", {"address": "nowhere"})],
)
async def test_a_frame_not_understood_is_handed_on_byte_for_byte(reason: str, changes: Any) -> None:
    """To Dynamo's own endpoint in this process, which answers it: its requester notices nothing."""
    async with RelayBench() as bench:
        asked, frame = bench.requester.frame(**changes)
        bench.requester.write(frame)
        await bench.requester.acknowledged(1)
        assert [taken.raw for taken in bench.own.frames] == [frame]
        assert dict(bench.relay.handed_on) == {reason: 1}
        if reason == "path":
            assert await asked.whole() == b"".join(ANSWER)
        assert (bench.relay.forwarded, bench.events) == (0, [])


async def test_the_acknowledgement_of_a_frame_handed_on_keeps_its_place() -> None:
    """Those behind it wait, for only the order says whose each is; their requests do not wait."""
    async with RelayBench() as bench:
        gate = asyncio.Event()
        bench.own.before_ack = gate.wait
        first = bench.requester.ask()
        foreign = bench.requester.ask(path=OTHER)
        behind = bench.requester.ask()
        for asked in (first, behind):
            assert await asked.whole() == b"".join(ANSWER)
        assert bytes(bench.requester.acks) == ACCEPTED
        gate.set()
        assert await foreign.whole() == b"".join(ANSWER)
        await bench.requester.acknowledged(3)


async def test_no_more_is_read_from_a_connection_than_can_be_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for Dynamo's own endpoint is held whole; other connections are read all the same."""
    monkeypatch.setattr("dynamo_poa.relay.MAX_OWED", 4)
    async with RelayBench() as bench, Requester() as neighbour:
        await neighbour.connect(bench.relay.port)
        gate = asyncio.Event()
        bench.own.before_ack = gate.wait
        for _ in range(3):
            for _ in range(4):
                bench.requester.ask(path=OTHER)
            await asyncio.sleep(0.02)
        assert bench.relay.handed_on.total() == 4
        assert await neighbour.ask().whole() == b"".join(ANSWER)
        gate.set()
        await bench.requester.acknowledged(12)
        for asked in list(bench.requester.asked.values()):
            assert await asked.whole() == b"".join(ANSWER)


@pytest.mark.parametrize("refusal", [b"\x00\x00\x00\x03no!", None], ids=["refused", "silent"])
async def test_a_frame_that_no_endpoint_takes_is_answered_with_an_error(refusal: bytes | None) -> None:
    """In words a refusal makes a requester wait for ever. Source: measured on 1.4.2: `Unknown endpoint`."""
    async with RelayBench(ack_timeout_s=0.2) as bench:
        bench.own.ack = refusal
        asked = bench.requester.ask(path=OTHER)
        neighbour = bench.requester.ask()
        assert await neighbour.whole() == b"".join(ANSWER)
        await eventually(lambda: asked.heard.endswith(SENTINEL))
        why = "no!" if refusal else "no acknowledgement within 0.2 s"
        await asked.has(error_answer(f"no endpoint took the request: {why}"))
        asked.close()
        await bench.requester.acknowledged(2)
        assert bench.relay.lost == 1
        await bench.at_rest()


async def test_a_frame_that_nobody_takes_or_understands_ends_its_connection_behind_those_before_it() -> None:
    """Whom to tell is not known; an acknowledgement that never comes would put all behind it off by one."""
    async with RelayBench() as bench:
        bench.own.ack = b"\x00\x00\x00\x03no!"
        first = bench.requester.ask()
        bench.requester.ask(codec="json")
        await eventually(lambda: bench.requester.hung_up)
        assert bytes(bench.requester.acks) == ACCEPTED
        assert await first.whole() == b"".join(ANSWER)
        await bench.at_rest()


async def test_three_frames_not_understood_within_a_minute_give_the_relay_up() -> None:
    """Dynamo then speaks otherwise than we know; what comes on kept connections is served all the same."""
    clock = ManualClock()
    async with RelayBench(clock=clock) as bench:
        for at_s, given_up in ((0, False), (0, False), (61, False), (1, False), (1, True)):
            await clock.advance(at_s)
            assert await bench.requester.ask(path=OTHER).whole() == b"".join(ANSWER)
            assert bench.relay.gave_up.is_set() is given_up
        assert dict(bench.relay.handed_on) == {"path": 5}
        assert await bench.requester.ask().whole() == b"".join(ANSWER)
        assert bench.outcomes() == [Outcome.OK]


async def test_a_flood_of_frames_not_understood_is_one_line_a_second() -> None:
    """What was not said is counted."""
    clock = ManualClock()
    async with RelayBench(clock=clock) as bench:
        with capture_logs() as logs:
            for count, pause_s in ((1, 0.0), (5, 1.0), (1, 0.0)):
                frames = [bench.requester.frame(path=OTHER)[1] for _ in range(count)]
                bench.requester.write(b"".join(frames))
                seen = bench.relay.handed_on.total() + count
                await eventually(lambda seen=seen: bench.relay.handed_on.total() == seen)  # type: ignore[misc]
                await clock.advance(pause_s)
        assert logs == [
            {
                "event": "poa.relay.frame_handed_on",
                "log_level": "warning",
                "reason": "path",
                "detail": OTHER,
                "more": more,
            }
            for more in (0, 5)
        ]


async def test_a_connection_whose_framing_is_lost_is_closed_and_its_neighbours_are_not() -> None:
    """What was taken over before is acknowledged and answered; nothing behind it can be told apart."""
    async with RelayBench(relay={"limits": FrameLimits(path_bytes=100)}) as bench, Requester() as neighbour:
        await neighbour.connect(bench.relay.port)
        before = bench.requester.ask()
        bench.requester.write(b"\xff\xff" + b"x" * 1000)
        await eventually(lambda: bench.requester.hung_up)
        assert bytes(bench.requester.acks) == ACCEPTED
        assert await before.whole() == b"".join(ANSWER)
        assert await neighbour.ask().whole() == b"".join(ANSWER)
        assert not neighbour.hung_up
        assert dict(bench.relay.handed_on) == {"path_size": 1}


async def test_a_request_too_large_is_refused_before_it_is_read() -> None:
    """Dynamo closes such a connection as well."""
    async with RelayBench(relay={"limits": FrameLimits(payload_bytes=1000)}) as bench:
        _, frame = bench.requester.frame(token_ids=list(range(1000, 2000)))
        bench.requester.write(frame[:300])
        await eventually(lambda: bench.requester.hung_up)
        assert dict(bench.relay.handed_on) == {"payload_size": 1}


async def test_connections_over_the_limit_are_closed_and_those_within_it_are_served() -> None:
    """The limit is on what one process can hold; a place that becomes free is given again."""
    async with RelayBench(relay={"most": 2}) as bench, Requester() as second, Requester() as third:
        await second.connect(bench.relay.port)
        await eventually(lambda: bench.relay.connections == 2)
        await third.connect(bench.relay.port)
        await eventually(lambda: third.hung_up)
        assert await second.ask().whole() == b"".join(ANSWER)
        second.hang_up()
        await eventually(lambda: bench.relay.connections == 1)
        await third.connect(bench.relay.port)
        assert await third.ask().whole() == b"".join(ANSWER)


async def test_requests_over_the_limit_are_left_to_dynamos_own_endpoint() -> None:
    """The stream path serves them; that is no sign of a protocol not understood."""
    async with RelayBench(relay={"most_calls": 1}) as bench:
        gate = asyncio.Event()

        async def wait(dial: Any) -> None:
            await gate.wait()
            await answers(dial)

        bench.script(wait)
        first = bench.requester.ask()
        await bench.dialled()
        over = [bench.requester.ask() for _ in range(4)]
        for asked in over:
            assert await asked.whole() == b"".join(ANSWER)
        gate.set()
        assert await first.whole() == b"".join(ANSWER)
        assert dict(bench.relay.handed_on) == {"busy": 4}
        assert not bench.relay.gave_up.is_set()
        assert len(bench.own.frames) == 4


async def test_a_requester_that_hangs_up_its_requests_connection_still_gets_its_answers() -> None:
    """The two connections are independent. Source: measured on 1.4.2."""
    async with RelayBench() as bench:
        asked = bench.requester.ask()
        bench.requester.hang_up()
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert bench.relay.connections == 0


async def test_what_vanishes_without_a_word_is_noticed_by_the_kernel() -> None:
    """Half-open: a machine that is gone closes nothing, so each of the four connections is watched."""
    async with RelayBench() as bench:
        bench.script(None)
        bench.requester.ask()
        await bench.requester.acknowledged(1)
        await eventually(lambda: bench.workers[A].frames and bench.answers.open == 1)
        dial = await bench.workers[A].dial(bench.workers[A].requests[0])
        dial.begin()
        await eventually(lambda: bench.answers.open == 2)
        sides = [*bench.answers._sides, *bench.relay._links, *bench.connections._open]
        watched = []
        for side in sides:
            sock = side._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4
            watched.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        assert sorted(watched) == [10_000, 10_000, 10_000, 300_000]


async def test_drained_waits_for_what_runs_and_for_what_comes_meanwhile() -> None:
    """SIGTERM: frames sent before the frontend knew are acknowledged and served to their end."""
    async with RelayBench() as bench:
        gates = {"r0": asyncio.Event(), "r1": asyncio.Event()}

        async def wait(dial: Any) -> None:
            dial.begin()
            dial.say(ANSWER[0])
            await gates[dial.request.id].wait()
            dial.say(*ANSWER[1:])

        bench.script(wait)
        first = bench.requester.ask()
        await first.has(ANSWER[0])
        draining = asyncio.ensure_future(bench.relay.drained(5.0))
        await asyncio.sleep(0)
        late = bench.requester.ask()
        await late.has(ANSWER[0])
        gates["r0"].set()
        assert await first.whole() == b"".join(ANSWER)
        await eventually(lambda: bench.relay.running == 1)
        await asyncio.sleep(0.02)
        assert not draining.done()
        gates["r1"].set()
        assert await late.whole() == b"".join(ANSWER)
        await draining
        await bench.requester.acknowledged(2)
        assert bench.outcomes() == [Outcome.OK, Outcome.OK]


async def test_what_is_not_drained_in_time_is_cut_off() -> None:
    """An answer that has begun ends without its final frame, one that has not is an error; all is freed."""
    bench = RelayBench()
    async with bench:

        async def part(dial: Any) -> None:
            dial.begin()
            if dial.request.id == "r0":
                dial.say(ANSWER[0], ANSWER[1][:10])

        bench.script(part)
        begun = bench.requester.ask()
        await begun.has(ANSWER[0], ANSWER[1][:10])
        waiting = bench.requester.ask()
        await bench.dialled(2)
        await eventually(lambda: bench.answers.awaited == 0)
        with capture_logs() as logs:
            await bench.relay.drained(0.05)
        assert [(line["event"], line["requests"]) for line in logs] == [("poa.relay.cut_off", 2)]
        await bench.relay.__aexit__(None, None, None)
        await eventually(lambda: begun.ended)
        await begun.has(ANSWER[0], ANSWER[1][:10])
        await waiting.has(error_answer("the router is going away"))
        assert bench.outcomes() == [Outcome.CANCELLED, Outcome.CANCELLED]
        assert bench.pool.open_bookings() == []
        assert bench.requester.hung_up


async def test_a_request_that_cannot_be_routed_is_answered_as_if_a_handler_had_raised() -> None:
    """KvRouter dies of an empty prompt, so nobody is asked."""
    async with RelayBench() as bench:
        asked = bench.requester.ask(token_ids=[])
        await asked.has(error_answer("RequestRefused: token_ids = []: must hold at least one token"))
        asked.close()
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.FAILED]
        assert bench.workers[A].frames == []


async def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    """Tasks, connections, tables and memory are what they were; the soak does the same for longer."""
    async with RelayBench() as bench:
        bench.pool.freed = _Dropped(bench.pool)  # type: ignore[assignment]

        async def some(count: int) -> None:
            for _ in range(count // 50):
                asked = [bench.requester.ask() for _ in range(50)]
                for one in asked:
                    await one.whole()
                    assert len(one.answer) == sum(map(len, ANSWER))
                await eventually(lambda: bench.answers.open == 0)
                bench.requester.asked.clear()
                for worker in bench.workers.values():
                    for dial in worker.dials:
                        await dial.close()
                    worker.frames.clear()
                    worker.dials.clear()
            await eventually(lambda: bench.relay.running == 0)
            bench.events.clear()
            bench.pool.prefilled_ids.clear()
            bench.pool.overrides.clear()
            bench.requester.acks.clear()
            bench.calls.clear()
            gc.collect()

        await some(2000)
        tasks, blocks = len(asyncio.all_tasks()), sys.getallocatedblocks()
        await some(18_000)
        assert bench.relay.forwarded == 20_000
        assert len(asyncio.all_tasks()) == tasks
        assert (bench.answers.open, bench.answers.awaited, bench.connections.open) == (0, 0, 2)
        assert (bench.relay._calls, bench.relay._handing, bench.relay.connections) == (set(), set(), 1)
        assert sys.getallocatedblocks() - blocks < 1000


class _Dropped(list[str]):
    """Forgets a booking once it is ended: the fake's own record would grow."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._pool = pool

    def append(self, booking: str) -> None:
        del self._pool.booked[booking]


@pytest.mark.parametrize(
    "case",
    [
        test_a_request_is_forwarded_and_its_answer_comes_back_byte_for_byte,
        test_the_acknowledgement_of_a_frame_handed_on_keeps_its_place,
        test_a_frame_that_nobody_takes_or_understands_ends_its_connection_behind_those_before_it,
        test_a_connection_whose_framing_is_lost_is_closed_and_its_neighbours_are_not,
        test_connections_over_the_limit_are_closed_and_those_within_it_are_served,
        test_what_is_not_drained_in_time_is_cut_off,
        test_what_vanishes_without_a_word_is_noticed_by_the_kernel,
    ],
    ids=lambda case: case.__name__.removeprefix("test_"),
)
def test_it_is_the_same_on_the_loop_that_routers_run_on(case: Any) -> None:
    """uvloop's transports differ from asyncio's in what they allow while closing."""
    uvloop.run(case())
