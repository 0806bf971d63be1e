"""Answers: from the worker to the requester unread, who may cancel what and when, and what is retried."""

import asyncio
import socket
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import uvloop
from fakes import A, B
from relay_parts import ANSWER, FINAL, SENTINEL, Asked, Dial, RelayBench, answers, chunk
from structlog.testing import capture_logs
from waiting import eventually

from dynamo_poa.errors import WorkerUnreachable
from dynamo_poa.frames import control, error_answer, handshake, prologue, two_part
from dynamo_poa.handover import Handovers
from dynamo_poa.relay_answers import HIGH_WATER_BYTES
from dynamo_poa.relay_call import CUT_OFF, engine_id
from dynamo_poa.values import Outcome, Role
from dynamo_poa.wire import Handover

KILL, STOP = control("kill"), control("stop")
CANCEL_S = 0.05  # issue: cancellation both ways within 50 ms


async def silent(dial: Dial) -> None:
    """Begin, and compute for ever."""
    dial.begin()


async def begun(dial: Dial) -> None:
    """Begin, and say one token."""
    dial.begin()
    dial.say(ANSWER[0])


async def never(dial: Dial) -> None:
    """Dial back and say nothing at all."""


# --- whose bytes a requester gets


async def test_a_requester_is_told_at_once_that_its_request_is_served() -> None:
    """So that it can cancel: before, natively, it has nothing to write `kill` to."""
    async with RelayBench() as bench:
        bench.script(None)
        asked = bench.requester.ask()
        begin = handshake(asked.subject) + prologue()
        await eventually(lambda: bytes(asked.heard) == begin)


async def test_bytes_that_come_in_pieces_are_passed_on_as_they_come() -> None:
    """Nothing waits for a frame to be whole, once the first one was."""
    async with RelayBench() as bench:
        bench.script(never)
        asked = bench.requester.ask()
        dial = await bench.dialled()
        sent = handshake(dial.request.subject) + prologue() + ANSWER[0]
        for at in range(len(sent) - 1):
            dial.say(sent[at : at + 1])
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert asked.answer == b""  # another worker could still be asked
        assert bench.said == ["Chosen"]
        dial.say(sent[-1:])
        await asked.has(ANSWER[0])
        assert bench.said == ["Chosen", "FirstToken"]
        dial.say(ANSWER[1][:5])
        await asked.has(ANSWER[0], ANSWER[1][:5])
        dial.say(ANSWER[1][5:], ANSWER[2])
        assert await asked.whole() == b"".join(ANSWER)


async def test_a_first_frame_larger_than_what_is_held_is_passed_on_before_it_is_whole() -> None:
    """Memory is bounded whatever a worker sends."""
    async with RelayBench() as bench:
        large = two_part(b"", b"x" * (4 * HIGH_WATER_BYTES))

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(large[: 2 * HIGH_WATER_BYTES])
            await eventually(lambda: len(asked.answer) >= HIGH_WATER_BYTES)
            dial.say(large[2 * HIGH_WATER_BYTES :], FINAL, SENTINEL)

        bench.script(play)
        asked = bench.requester.ask()
        assert await asked.whole() == large + FINAL + SENTINEL
        await bench.at_rest()
        assert (bench.said, bench.outcomes()) == (["Chosen", "FirstToken", "Ended"], [Outcome.OK])


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "slow"])
async def test_a_requester_that_does_not_read_stops_its_own_worker_and_no_other(reads: bool) -> None:
    """What is held for it is bounded, and it gets every byte once it reads."""
    async with RelayBench() as bench:
        total = 40 * 2**20  # above what kernels buffer

        async def flood(dial: Dial) -> None:
            dial.begin()
            dial.say(ANSWER[0])
            if dial.request.id == "r0":
                for _ in range(total // 2**20):
                    dial.say(two_part(b"", bytes(2**20 - 24)))
                    await dial.writer.drain()
            dial.say(*ANSWER[1:])

        bench.script(flood)
        slow, frame = bench.requester.frame()
        if not reads:
            slow.reading.clear()
        bench.requester.write(frame)
        if not reads:
            side = await _held_back(bench)
            for _ in range(3):
                assert await bench.requester.ask().whole() == b"".join(ANSWER)
            assert len(slow.answer) < total // 2
            assert side._transport.get_write_buffer_size() < 2 * HIGH_WATER_BYTES + 2**18
            slow.reading.set()
        await eventually(lambda: len(slow.answer) == total + sum(map(len, ANSWER)), 20)
        slow.close()
        await bench.at_rest()
        assert set(bench.outcomes()) == {Outcome.OK}


async def _held_back(bench: RelayBench) -> Any:
    """Wait until a requester's side is over what is held, and return it."""

    def held() -> list[Any]:
        return [s for s in bench.answers._sides if getattr(s, "waits", False) and s._transport is not None]

    await eventually(held)
    return held()[0]


# --- how an answer ends


@pytest.mark.parametrize("ends", [True, False], ids=["with sentinel", "without"])
async def test_an_answer_is_complete_with_its_final_frame_however_fast_its_requester_leaves(
    ends: bool,
) -> None:
    """`complete_final` alone decides; who has it closes first, often by a reset. Source: measured."""
    async with RelayBench() as bench:

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(chunk(1000, finish_reason="stop"), FINAL, SENTINEL if ends else b"")

        bench.script(play)
        asked = bench.requester.ask()
        await eventually(lambda: FINAL in asked.heard)
        asked.reset()
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]
        dial = await bench.dialled()
        await eventually(lambda: dial.ended)
        assert bytes(dial.heard) == b""  # closed, not killed


async def test_a_worker_that_closes_behind_its_final_frame_has_its_close_passed_on() -> None:
    """Behind everything else."""
    async with RelayBench() as bench:

        async def play(dial: Dial) -> None:
            await answers(dial)
            dial.writer.close()

        bench.script(play)
        asked = bench.requester.ask()
        await eventually(lambda: asked.ended)
        assert asked.answer == b"".join(ANSWER)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]


async def test_a_requester_that_never_closes_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Dynamo's worker does after 10 s."""
    monkeypatch.setattr("dynamo_poa.relay_answers.LINGER_S", 0.05)
    async with RelayBench() as bench:
        asked = bench.requester.ask()
        await eventually(lambda: asked.ended)
        assert asked.answer == b"".join(ANSWER)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]


ENGINE_ERROR = chunk(finish_reason={"error": "no memory"})
RAISED = two_part(b"", b"\x82\xa4data\x81\xa5event\xa5error\xaecomplete_final\xc2")


@pytest.mark.parametrize("error", [ENGINE_ERROR, RAISED], ids=["engine", "handler"])
@pytest.mark.parametrize("apart", [True, False])
async def test_an_error_before_the_first_token_is_no_first_token(error: bytes, apart: bool) -> None:
    """An engine that fails at once must not look fast; its end is as clean as a good one's."""
    async with RelayBench() as bench:

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(error)
            if apart:
                await asked.has(error)
            dial.say(FINAL, SENTINEL)

        bench.script(play)
        asked = bench.requester.ask()
        assert await asked.whole() == error + FINAL + SENTINEL
        await bench.at_rest()
        assert (bench.said, bench.outcomes()) == (["Chosen", "Ended"], [Outcome.FAILED])
        assert len(bench.workers[A].frames) == 1  # it was reached: no retry


async def test_an_error_behind_tokens_is_a_failure() -> None:
    """Engine errors can be a chunk. Source: measured."""
    async with RelayBench() as bench:

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(ANSWER[0], ENGINE_ERROR, FINAL, SENTINEL)

        bench.script(play)
        await bench.requester.ask().whole()
        await bench.at_rest()
        assert (bench.said, bench.outcomes()) == (["Chosen", "FirstToken", "Ended"], [Outcome.FAILED])


async def test_an_empty_answer_is_complete_and_has_no_first_token() -> None:
    """Handlers may yield nothing."""
    async with RelayBench() as bench:

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(FINAL, SENTINEL)

        bench.script(play)
        assert await bench.requester.ask().whole() == FINAL + SENTINEL
        await bench.at_rest()
        assert (bench.said, bench.outcomes()) == (["Chosen", "Ended"], [Outcome.OK])


@pytest.mark.parametrize("way", ["reset", "close", "sentinel"])
async def test_a_worker_lost_midway_cuts_its_answer_off_behind_what_it_had_said(way: str) -> None:
    """With part of a frame, as natively: no final frame. Tokens are out, so nobody else is asked."""
    async with RelayBench() as bench:
        bench.script(begun)
        asked = bench.requester.ask()
        await asked.has(ANSWER[0])
        dial = await bench.dialled()
        last = SENTINEL if way == "sentinel" else ANSWER[1][:9]
        dial.say(last)
        await asked.has(ANSWER[0], last)
        dial.reset() if way == "reset" else dial.writer.close()
        await eventually(lambda: asked.ended)
        assert asked.answer == ANSWER[0] + last
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.FAILED]
        assert [len(worker.frames) for worker in bench.workers.values()] == [1, 0]
        assert A not in bench.avoid


async def test_a_worker_lost_between_two_frames_is_an_error_of_the_engine_and_not_of_this_router() -> None:
    """As on the stream path: a requester shuns the router whose answer is cut off (make soak)."""
    async with RelayBench() as bench:
        bench.script(begun)
        asked = bench.requester.ask()
        await asked.has(ANSWER[0])
        (await bench.dialled()).reset()
        assert await asked.whole() == ANSWER[0] + error_answer(CUT_OFF)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.FAILED]
        assert A not in bench.avoid


async def test_a_slow_requester_gets_all_that_a_worker_said_before_it_died() -> None:
    """As it would from the kernel of the worker's machine."""
    async with RelayBench() as bench:
        size = 8 * 2**20

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(ANSWER[0], two_part(b"", bytes(size)))
            await dial.writer.drain()
            await dial.close()

        bench.script(play)
        slow, frame = bench.requester.frame()
        slow.reading.clear()
        bench.requester.write(frame)
        await _held_back(bench)
        slow.reading.set()
        await slow.whole()
        assert len(slow.answer) == len(ANSWER[0]) + 24 + size + len(error_answer(CUT_OFF))
        await bench.at_rest()


# --- who is asked instead


async def _prologue_error(dial: Dial) -> None:
    dial.say(handshake(dial.request.subject), prologue("Generate Error: engine shut down"))


async def _reset(dial: Dial) -> None:
    dial.reset()


async def _handshake_then_reset(dial: Dial) -> None:
    dial.say(handshake(dial.request.subject))
    await dial.writer.drain()
    dial.reset()


async def _half_a_token(dial: Dial) -> None:
    dial.begin()
    dial.say(chunk(9999)[:30])
    await dial.close()


async def _nonsense(dial: Dial) -> None:
    dial.say(handshake(dial.request.subject), two_part(b"not json"))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (_prologue_error, "Generate Error: engine shut down"),
        (_reset, "no answer begun within 0.5 s of its acknowledgement"),
        (_handshake_then_reset, "the connection ended before the first token"),
        (_half_a_token, "the connection ended before the first token"),
        (_nonsense, "the connection ended before the first token"),
    ],
    ids=[
        "error prologue",
        "before its handshake",
        "before its prologue",
        "before its first token",
        "nonsense",
    ],
)
async def test_a_worker_that_fails_before_its_first_token_costs_one_retry_on_another(
    script: Any, error: str
) -> None:
    """Its requester notices nothing: handshake and prologue were ours, and no byte of that worker passed."""
    async with RelayBench(dial_back_s=0.5) as bench:
        bench.workers[A].script = script
        with capture_logs() as logs:
            assert await bench.requester.ask().whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert bench.said == ["Chosen", "Chosen", "FirstToken", "Ended"]
        assert [(event.worker_id, event.attempt) for event in bench.chosen()] == [(A, 1), (B, 2)]
        assert bench.outcomes() == [Outcome.OK]
        assert bench.stats.retries[Role.AGGREGATED] == 1
        assert A in bench.avoid
        told = [line for line in logs if line["event"] == "poa.worker.unreachable"]
        assert [(line["worker_id"], line["error"]) for line in told] == [(str(A), error)]


@pytest.mark.parametrize("way", ["refused", "not there", "unlisted"])
async def test_a_worker_that_does_not_take_a_frame_costs_one_retry(way: str) -> None:
    """One that drains says `Unknown endpoint`, which Dynamo's own client takes for an acknowledgement."""
    async with RelayBench() as bench:
        if way == "refused":
            bench.workers[A].ack = b"\x00\x00\x00\x11Unknown endpoint:"
        elif way == "not there":
            await bench.workers[A].close()
        else:
            locate = bench.locate
            bench.locate = lambda worker: None if worker == A else locate(worker)  # type: ignore[method-assign]
        assert await bench.requester.ask().whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert [event.worker_id for event in bench.chosen()] == [A, B]
        assert (bench.outcomes(), A in bench.avoid) == ([Outcome.OK], True)


async def test_a_worker_that_dies_before_it_dials_back_is_noticed_by_its_other_connection() -> None:
    """It has acknowledged the frame, and nothing else would ever come of it."""
    async with RelayBench() as bench:
        bench.workers[A].script = None
        asked = bench.requester.ask()
        await eventually(lambda: bench.workers[A].frames)
        await bench.workers[A].close()
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]


async def test_a_worker_that_never_dials_back_is_given_up_and_its_late_answer_refused() -> None:
    """One that cannot read a payload acknowledges it and says no more, ever. Source: measured on 1.4.2."""
    async with RelayBench(dial_back_s=0.1) as bench:
        bench.workers[A].script = None
        with capture_logs() as logs:
            assert await bench.requester.ask().whole() == b"".join(ANSWER)
        told = [line["error"] for line in logs if line["event"] == "poa.worker.unreachable"]
        assert told == ["no answer begun within 0.1 s of its acknowledgement"]
        await bench.at_rest()
        late = await bench.workers[A].dial(bench.workers[A].requests[0])
        late.begin()
        await eventually(lambda: late.ended)
        assert bytes(late.heard) == KILL
        assert bench.answers.turned_away == 1
        assert bench.outcomes() == [Outcome.OK]


async def test_two_workers_that_fail_are_an_error_to_the_requester() -> None:
    """One retry, not more; told as a handler's failure is."""
    async with RelayBench() as bench:
        bench.script(_prologue_error)
        asked = bench.requester.ask()
        why = f"WorkerUnreachable: worker {B}: Generate Error: engine shut down"
        await asked.has(error_answer(why))
        asked.close()
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.FAILED]
        assert bench.said == ["Chosen", "Chosen", "Ended"]


async def test_a_worker_that_dials_back_twice_is_heard_once() -> None:
    """Nobody else's bytes get into an answer."""
    async with RelayBench() as bench:
        bench.script(begun)
        asked = bench.requester.ask()
        await asked.has(ANSWER[0])
        again = await bench.workers[A].dial(bench.workers[A].requests[0])
        again.begin()
        again.say(chunk(6666))
        await eventually(lambda: again.ended)
        bench.dials[0].say(*ANSWER[1:])
        assert await asked.whole() == b"".join(ANSWER)


@pytest.mark.parametrize(
    "says", [b"", b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n", handshake("nobody's") + prologue()]
)
async def test_a_stranger_is_shown_out(says: bytes) -> None:
    """Whoever does not say whose answer it brings, or brings one that nobody awaits."""
    async with RelayBench(handshake_s=0.1) as bench:
        reader, writer = await asyncio.open_connection(*bench.answers.address.split(":"))
        writer.write(says)
        heard = await asyncio.wait_for(reader.read(), 5)
        turned_away = 0 if says.startswith(b"GET") else 1
        assert heard == KILL * turned_away
        writer.close()
        await bench.at_rest()
        await asyncio.sleep(0.12)
        assert bench.answers.turned_away == turned_away


async def test_answers_connections_over_the_limit_are_closed() -> None:
    """And those within it go on."""
    async with RelayBench(most=2) as bench:
        bench.script(begun)
        asked = bench.requester.ask()
        await asked.has(ANSWER[0])
        reader, writer = await asyncio.open_connection(*bench.answers.address.split(":"))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        bench.dials[0].say(*ANSWER[1:])
        assert await asked.whole() == b"".join(ANSWER)


# --- who leaves

WAYS: dict[str, Callable[[Asked], None]] = {
    "kill": lambda asked: asked.say("kill"),
    "stop": lambda asked: asked.say("stop"),
    "close": Asked.close,
    "half-close": Asked.half_close,
    "reset": Asked.reset,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["before its worker dials back", "before the first token", "midway"])
async def test_a_requester_that_leaves_stops_its_worker_and_frees_the_booking(moment: str, way: str) -> None:
    """Issue: within 50 ms; nothing is wrong with the worker, and nobody else is asked."""
    async with RelayBench() as bench:
        script = {"before its worker dials back": None, "before the first token": silent, "midway": begun}
        bench.script(script[moment])
        asked = bench.requester.ask()
        await asked.connected.wait()
        await eventually(lambda: bench.workers[A].frames)
        if moment == "midway":
            await asked.has(ANSWER[0])
        elif moment == "before the first token":
            await eventually(lambda: bench.dials and bench.answers.awaited == 0)
        else:
            await eventually(lambda: bench.answers.awaited == 1)
        WAYS[way](asked)
        await eventually(lambda: bench.pool.open_bookings() == [], CANCEL_S)
        if moment == "before its worker dials back":
            dial = await bench.workers[A].dial(bench.workers[A].requests[0])
            dial.begin()
        else:
            dial = bench.dials[0]
        told = STOP if way == "stop" and moment != "before its worker dials back" else KILL
        await eventually(lambda: bytes(dial.heard).startswith(told), CANCEL_S)
        if way == "stop":
            await asyncio.sleep(0.02)
            assert not asked.ended  # as natively: who stops an answer closes its connection itself
            assert moment != "midway" or (bytes(dial.heard), dial.ended) == (STOP, False)
        asked.close()
        await eventually(lambda: dial.ended)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.CANCELLED]
        assert len(bench.chosen()) == 1
        assert (A in bench.avoid, bench.stats.retries.total()) == (False, 0)


async def test_a_requester_that_leaves_while_a_worker_is_chosen_is_not_served() -> None:
    """The choice may wait in a queue of Dynamo's; what it books then is ended by the pool."""
    async with RelayBench() as bench:
        gate, asked_for = asyncio.Event(), asyncio.Event()

        async def wait(*_: Any) -> Any:
            asked_for.set()
            await gate.wait()

        bench.pool.book = wait  # type: ignore[method-assign]
        asked = bench.requester.ask()
        await asked_for.wait()
        await asked.connected.wait()
        asked.reset()
        await eventually(lambda: bench.relay.running == 0, CANCEL_S)
        assert (bench.outcomes(), bench.workers[A].frames) == ([Outcome.CANCELLED], [])


async def test_a_decode_leg_whose_requester_leaves_does_not_wait_for_its_prefill_leg() -> None:
    """Its booking would be held for ten seconds."""
    async with RelayBench(Role.DECODE, handovers=Handovers()) as bench:
        asked = bench.requester.ask(bootstrap_info={"bootstrap_room": 1, "handoff_id": b"\0" * 16})
        await asked.connected.wait()
        await eventually(lambda: bench.pool.open_bookings())
        asked.say("kill")
        await eventually(lambda: bench.pool.open_bookings() == [], CANCEL_S)
        assert (bench.outcomes(), bench.workers[A].frames) == ([Outcome.CANCELLED], [])


async def test_a_requester_that_cannot_be_reached_has_gone() -> None:
    """Nobody waits for the answer: the worker is stopped, and it is said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with RelayBench() as bench:
            bench.script(silent)
            with capture_logs() as logs:
                bench.requester.ask(address=address)
                await bench.requester.acknowledged(1)
                await bench.at_rest()
            assert bench.outcomes() == [Outcome.CANCELLED]
            assert [(line["event"], line["address"]) for line in logs] == [
                ("poa.relay.requester_unreachable", address)
            ]


async def test_a_requester_that_does_not_answer_the_call_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listener's queue is full: it is neither refused nor connected."""
    monkeypatch.setattr("dynamo_poa.relay_call.CONNECT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address):
            async with RelayBench() as bench:
                bench.script(silent)
                bench.requester.ask(address=f"127.0.0.1:{address[1]}")
                await bench.requester.acknowledged(1)
                await bench.at_rest()
                assert bench.outcomes() == [Outcome.CANCELLED]


async def test_a_worker_faster_than_the_way_to_its_requester_is_not_lost() -> None:
    """What it says meanwhile is kept, and no more than one read brings; nor is its end forgotten."""
    async with RelayBench() as bench:
        size = 16 * 2**20

        async def play(dial: Dial) -> None:
            dial.begin()
            dial.say(ANSWER[0], two_part(b"", bytes(size)))
            await dial.writer.drain()
            dial.say(ANSWER[2])
            await dial.writer.drain()
            await dial.close()

        bench.script(play)
        way = asyncio.Event()
        with bench.connect_requesters_after(way):
            asked = bench.requester.ask()
            await eventually(lambda: bench.calls and bench.calls[0]._requester._pending)
            await asyncio.sleep(0.05)
            assert bytes(asked.heard) == b""
            assert len(bench.calls[0]._requester._pending or b"") < 2 * HIGH_WATER_BYTES
            way.set()
            await eventually(lambda: asked.ended)
        assert asked.answer == ANSWER[0] + two_part(b"", bytes(size)) + ANSWER[2]
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]


async def test_an_error_from_before_the_way_to_its_requester_is_told_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A requester that is never dialled back to waits for ever. Source: measured."""
    monkeypatch.setattr("dynamo_poa.relay_answers.LINGER_S", 0.05)
    async with RelayBench() as bench:
        way = asyncio.Event()
        with bench.connect_requesters_after(way):
            asked = bench.requester.ask(token_ids=[])
            await eventually(lambda: bench.outcomes() == [Outcome.FAILED])
            way.set()
            await eventually(lambda: asked.ended)
        assert asked.answer == error_answer("RequestRefused: token_ids = []: must hold at least one token")
        await bench.at_rest()


# --- two legs


async def test_a_decode_leg_is_sent_the_address_of_its_prefill_worker_and_binary_stays_binary() -> None:
    """The placeholder is replaced, room and hand-off id are not touched."""
    handovers = Handovers()
    async with RelayBench(Role.DECODE, handovers=handovers) as bench:
        info = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 1,
            "bootstrap_room": 2**63 + 5,
            "handoff_id": bytes(range(16)),
        }
        asked = bench.requester.ask(id="both", bootstrap_info=info)
        await eventually(lambda: bench.chosen())
        handovers.announce(_note("both", 7001, 2**63 + 5))
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        (request,) = bench.workers[A].requests
        assert request.get("bootstrap_info") == {**info, "bootstrap_host": "10.0.0.1", "bootstrap_port": 7001}


ID = "b057c415-c246-429f-80b1-1611cecde96f"
PLACE = {"bootstrap_room": 7, "handoff_id": bytes(range(16))}


def test_both_legs_of_a_try_have_one_id_at_the_engines_and_each_try_has_its_own() -> None:
    """A worker that still clears up after the first try would end the second with it."""
    first, again = engine_id(ID, PLACE, "a" * 36), engine_id(ID, {**PLACE, "bootstrap_room": 8}, "a" * 36)
    assert engine_id(ID, {**PLACE, "handoff_id": list(range(16)), "bootstrap_port": 1}, "b" * 36) == first
    assert len({ID, first, again, engine_id(ID, {**PLACE, "handoff_id": bytes(16)}, "a" * 36)}) == 4
    assert {name[:24] for name in (first, again)} == {ID[:24]}
    assert all(str(uuid.UUID(name)) == name for name in (first, again))


def test_without_a_meeting_place_a_try_has_an_id_of_its_own_and_what_is_no_uuid_keeps_its_name() -> None:
    """Nobody else need know it; a batch's `<id>-0` is the frontend's to name."""
    subject = str(uuid.uuid4())
    assert engine_id(ID, None, subject) == ID[:24] + subject[24:]
    assert engine_id(f"{ID}-0", None, subject) == f"{ID}-0"


async def test_an_engine_is_not_sent_the_same_id_twice() -> None:
    """The frontend sends a request again under its id when its router has died."""
    async with RelayBench() as bench:
        for _ in range(2):
            await bench.requester.ask(id=ID).whole()
        await bench.at_rest()
        names = [request.id for of in bench.workers.values() for request in of.requests]
        assert len({*names, ID}) == 3
        assert {event.request_id for event in bench.chosen()} == {ID}


@pytest.mark.parametrize("renamed", [False, True])
async def test_a_decode_leg_is_called_at_its_engine_as_its_prefill_leg_says(renamed: bool) -> None:
    """Both engines must be told the same id, whichever path the prefill leg took."""
    handovers = Handovers()
    async with RelayBench(Role.DECODE, handovers=handovers) as bench:
        asked = bench.requester.ask(id=ID, bootstrap_info={**PLACE})
        await eventually(lambda: bench.chosen())
        note = _note(ID, 7001, PLACE["bootstrap_room"])
        handovers.announce(msgspec.structs.replace(note, renamed=renamed))
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        (request,) = bench.workers[A].requests
        assert request.id == (engine_id(ID, PLACE, "") if renamed else ID)


async def test_a_prefill_leg_that_moves_takes_its_decode_leg_along() -> None:
    """The first try's worker, which waits for a rendezvous that cannot come, is stopped."""
    handovers = Handovers()
    async with RelayBench(Role.DECODE, handovers=handovers) as bench:
        bench.script(silent)
        asked = bench.requester.ask(id="both", bootstrap_info={"bootstrap_room": 1})
        await eventually(lambda: bench.chosen())
        handovers.announce(_note("both", 7001))
        first = await bench.dialled()
        await eventually(lambda: bench.answers.awaited == 0)
        bench.script(answers)
        handovers.announce(_note("both", 7002))
        assert await asked.whole() == b"".join(ANSWER)
        await eventually(lambda: first.ended)
        assert bytes(first.heard) == KILL
        requests = [bench.workers[worker].requests for worker in (A, B)]
        ports = [[request.get("bootstrap_info")["bootstrap_port"] for request in of] for of in requests]
        assert ports == [[7001], [7002]]
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.OK]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_engines_error_of_one_leg_is_held_back_and_its_leg_tried_again(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the other leg's, mostly. No byte of it reaches the requester, nor of what follows it."""
    monkeypatch.setattr("dynamo_poa.router.MOVE_S", 0.02)
    error = chunk(finish_reason={"error": "handoff peer has gone"})

    async def fails(dial: Dial) -> None:
        dial.begin()
        dial.say(error)
        await asyncio.sleep(0.01)
        dial.say(FINAL, SENTINEL)

    handovers = Handovers()
    async with RelayBench(role, handovers=handovers) as bench:
        bench.workers[A].script = fails
        handovers.announce(_note("both", 7001))
        asked = bench.requester.ask(id="both", bootstrap_info={"bootstrap_room": 1})
        assert await asked.whole() == b"".join(ANSWER)
        await bench.at_rest()
        assert [(event.worker_id, event.attempt) for event in bench.chosen()] == [(A, 1), (B, 2)]
        assert (bench.outcomes(), A in bench.avoid) == ([Outcome.OK], False)


async def test_an_engines_error_of_both_workers_is_told_in_words() -> None:
    """As a handler's failure is; natively such an answer is an empty one."""

    async def fails(dial: Dial) -> None:
        dial.begin()
        dial.say(chunk(finish_reason={"error": "no memory"}), FINAL, SENTINEL)

    async with RelayBench(Role.PREFILL, handovers=Handovers()) as bench:
        bench.script(fails)
        asked = bench.requester.ask(bootstrap_info={"bootstrap_room": 1})
        await asked.has(error_answer(f"AnswerFailed: worker {B}: no memory"))
        asked.close()
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.FAILED]


async def test_no_second_worker_is_asked_once_an_answer_has_begun() -> None:
    """Whoever asks: two workers' bytes in one answer would be read as nonsense."""
    async with RelayBench() as bench:
        bench.script(begun)
        asked = bench.requester.ask()
        await asked.has(ANSWER[0])
        with pytest.raises(Exception, match="another worker's answer has begun") as refused:
            await bench.calls[0].send({}, bench.pool.booked[next(iter(bench.pool.booked))])
        assert not isinstance(refused.value, WorkerUnreachable)


async def test_a_prefill_leg_whose_decode_leg_never_comes_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine would hold it, and its booking, for half a minute."""
    monkeypatch.setattr("dynamo_poa.router.HANDOVER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("dynamo_poa.relay_answers.LINGER_S", 0.05)
    async with RelayBench(Role.PREFILL, handovers=Handovers()) as bench:
        bench.script(silent)
        asked = bench.requester.ask(bootstrap_info={"bootstrap_room": 1})
        dial = await bench.dialled()
        await eventually(lambda: dial.ended)
        assert bytes(dial.heard) == KILL
        await eventually(lambda: asked.ended)
        await bench.at_rest()
        assert bench.outcomes() == [Outcome.CANCELLED]


def _note(request_id: str, port: int, room: int = 1) -> Handover:
    return Handover(
        request_id=request_id,
        worker_id=A,
        dp_rank=0,
        bootstrap_host="10.0.0.1",
        bootstrap_port=port,
        room=room,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["before its worker dials back", "before the first token", "midway"])
def test_leaving_is_the_same_on_the_loop_that_routers_run_on(moment: str, way: str) -> None:
    """uvloop's transports differ from asyncio's in what they allow while closing."""
    uvloop.run(test_a_requester_that_leaves_stops_its_worker_and_frees_the_booking(moment, way))


@pytest.mark.parametrize(
    "case",
    [
        lambda: test_a_requester_that_does_not_read_stops_its_own_worker_and_no_other(False),
        lambda: test_a_worker_lost_midway_cuts_its_answer_off_behind_what_it_had_said("reset"),
        lambda: test_an_answer_is_complete_with_its_final_frame_however_fast_its_requester_leaves(True),
        test_a_slow_requester_gets_all_that_a_worker_said_before_it_died,
        test_a_worker_faster_than_the_way_to_its_requester_is_not_lost,
        test_answers_connections_over_the_limit_are_closed,
        test_bytes_that_come_in_pieces_are_passed_on_as_they_come,
    ],
    ids=["slow", "lost", "complete", "slow and lost", "fast", "limit", "pieces"],
)
def test_answers_are_the_same_on_the_loop_that_routers_run_on(case: Any) -> None:
    """The same."""
    uvloop.run(case())
