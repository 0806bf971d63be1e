"""Open and closed loops, sessions and changes of load, against a server that takes as long as said."""

import asyncio
import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from dynamo_poa.bench.load import LoadClient, Result
from dynamo_poa.bench.suites.live_client import Asked, LiveClient
from dynamo_poa.clock import ManualClock
from dynamo_poa.workloads import stream
from dynamo_poa.workloads.arrivals import Closed, Load, Poisson, TraceTimes
from dynamo_poa.workloads.request import Request, token_ids
from dynamo_poa.workloads.synthetic import Content, MultiTurn, Paper, Trace

SEED, BLOCK_TOKENS = 3, 16


class Server(LoadClient):
    """Answers each request after `service_s`, with `error` if there is one."""

    def __init__(self, clock: ManualClock, service_s: float, error: str) -> None:
        super().__init__("nowhere", 0, "m", clock=clock)
        self.clock, self.service_s, self.error = clock, service_s, error
        self.bodies: list[bytes] = []

    async def send(self, body: bytes) -> Result:
        self.bodies.append(body)
        started_at_s = self.clock.monotonic_s()
        await self.clock.sleep(self.service_s)
        return Result(started_at_s, self.service_s / 2, self.service_s, 8, self.error)


class Bench:
    """A client, its servers, what it reported. The clock starts at 0."""

    def __init__(
        self,
        content: Content,
        *,
        servers: int = 1,
        service_s: float = 1.0,
        error: str = "",
        max_in_flight: int = 4000,
    ) -> None:
        self.clock = ManualClock(monotonic_s=0.0)
        self.servers = [Server(self.clock, service_s, error) for _ in range(servers)]
        self.asked: list[Asked] = []
        self.client = LiveClient(
            self.servers, content, SEED, BLOCK_TOKENS, self.asked.append, self.clock, max_in_flight
        )

    async def advance(self, seconds: float) -> None:
        """Let time pass, finely, so that everyone wakes in their own time."""
        for _ in range(round(seconds * 20)):
            await self.clock.advance(0.05)

    async def finish(self) -> None:
        """Let everything in flight end."""
        finishing = asyncio.create_task(self.client.finish(5.0))
        while not finishing.done():
            await self.advance(0.5)
        assert finishing.result() == 0
        assert self.client.in_flight == 0


def due_until(content: Content, load: Load, until_s: float) -> list[Request]:
    """Return the open loop's requests that are due by an instant."""
    source = stream.requests(content, load, SEED, BLOCK_TOKENS)
    return list(itertools.takewhile(lambda request: (request.at_s or 0.0) <= until_s, source))


async def test_an_open_loop_sends_each_request_when_it_is_due_however_slow_the_answers() -> None:
    """Issue 5: open loop; frontends take turns."""
    bench, load = Bench(Paper(), servers=2, service_s=20.0), Poisson(rate_rps=10)
    await bench.client.load(load)
    await bench.advance(5.0)
    wanted = due_until(Paper(), load, 5.0)
    assert bench.client.in_flight == len(wanted) > 20
    assert [len(server.bodies) for server in bench.servers] == [(len(wanted) + 1) // 2, len(wanted) // 2]
    await bench.finish()
    assert [one.due_at_s for one in bench.asked] == [request.at_s for request in wanted]
    assert all(one.open_loop and one.sent_at_s == one.due_at_s for one in bench.asked)
    body = json.loads(bench.servers[0].bodies[0])
    assert (body["prompt"], body["max_tokens"]) == (token_ids(wanted[0], BLOCK_TOKENS), 64)


async def test_what_is_due_while_too_many_are_in_flight_fails_and_is_not_forgotten() -> None:
    """Invariant: each request that was due is accounted for."""
    bench, load = Bench(Paper(), service_s=20.0, max_in_flight=8), Poisson(rate_rps=10)
    await bench.client.load(load)
    await bench.advance(5.0)
    wanted = due_until(Paper(), load, 5.0)
    assert [one.result.error for one in bench.asked] == ["not sent: 8 in flight"] * (len(wanted) - 8)
    await bench.finish()
    assert len(bench.asked) == len(wanted)


async def test_a_closed_loop_has_as_many_in_flight_as_users_who_do_not_think() -> None:
    """Issue 5: closed loop; each asks again after 1 s of answer and 0.5 s of thinking. They come apart."""
    bench = Bench(Paper())
    await bench.client.load(Closed(users=3, think_s=0.5))
    await bench.advance(0.9)
    assert bench.client.in_flight == 3
    await bench.advance(5.9)
    rounds = [user / 3 + 1.5 * number for number in range(4) for user in range(3)]
    assert [one.due_at_s for one in bench.asked] == pytest.approx(rounds)
    assert not any(one.open_loop for one in bench.asked)
    await bench.finish()


async def test_a_change_of_load_keeps_users_and_asks_new_things_under_the_same_prefixes() -> None:
    """Issue 5: below, saturated, below. Who leaves finishes first; the other way round likewise."""
    bench = Bench(Paper())
    await bench.client.load(Closed(users=2), 0)
    await bench.advance(1.6)
    await bench.client.load(Closed(users=4), 1)
    await bench.advance(0.6)
    assert bench.client.in_flight == 4
    await bench.advance(1.95)
    await bench.client.load(Poisson(rate_rps=10), 2)
    await bench.advance(1.5)
    closed = len([one for one in bench.asked if not one.open_loop])
    await bench.client.load(Closed(users=1), 3)
    await bench.advance(1.5)
    assert bench.client.in_flight == 1
    await bench.finish()
    assert closed == 5 + 4 + 3 + 3  # from 0, 0.5, 1.6 and 2.1 s on; what was under way at 4.15 s has ended
    assert len([one for one in bench.asked if one.open_loop]) > 5
    firsts = {one.request.blocks[0] for one in bench.asked}
    lasts = [one.request.blocks[-1] for one in bench.asked]
    assert len(firsts) == 5
    assert len(set(lasts)) == len(lasts)


@pytest.mark.parametrize("load", [Closed(users=4), Poisson(rate_rps=4)], ids=lambda load: load.text)
async def test_a_turn_is_sent_after_the_answer_before_it(load: Load) -> None:
    """Contract: workloads.Request: turns of one session are in order, and each waits for the last."""
    content = MultiTurn(mean_turns=4, think_s=0.2)
    bench = Bench(content, service_s=2.0)
    await bench.client.load(load)
    await bench.advance(20.0)
    await bench.finish()
    sessions = defaultdict(list)
    for one in bench.asked:
        sessions[one.request.session].append(one)
    waited = 0
    for turns in sessions.values():
        assert [one.request.input_tokens for one in turns] == sorted(
            one.request.input_tokens for one in turns
        )
        for before, after in itertools.pairwise(turns):
            assert after.sent_at_s >= before.ended_at_s
            assert after.due_at_s >= before.ended_at_s
            waited += 1
    assert waited > 10


async def test_who_has_no_answer_in_the_end_is_reported_as_failed() -> None:
    """Invariant: each request that was due is accounted for, also when it is given up."""
    bench = Bench(Paper(), service_s=100.0)
    await bench.client.load(Closed(users=3))
    await bench.advance(1.0)
    assert bench.asked == []
    assert await bench.client.finish(0.01) == 3
    assert [one.result.error for one in bench.asked] == ["no end before the run's"] * 3


async def test_a_dead_server_is_not_hammered() -> None:
    """A user whose request failed at once waits a tenth of a second."""
    bench = Bench(Paper(), service_s=0.0, error="connection: refused")
    await bench.client.load(Closed(users=1))
    await bench.advance(1.02)
    assert 8 <= len(bench.asked) <= 11
    await bench.finish()


@pytest.mark.parametrize("load", [Closed(users=2), TraceTimes(speedup=2.0)], ids=lambda load: load.text)
async def test_a_trace_is_exhausted_when_its_last_request_has_been_answered(
    load: Load, tmp_path: Path
) -> None:
    """The rest of a measurement would be of an idle graph."""
    rows = [
        {"timestamp": at_s * 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, at_s + 1]}
        for at_s in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench = Bench(Trace(path=str(path)), service_s=1.0)
    await bench.client.load(load)
    left = []
    while not bench.client.exhausted:
        left.append(len(bench.asked))
        await bench.advance(0.25)
    assert left[0] == 0
    assert len(bench.asked) == 6
    assert bench.clock.monotonic_s() == pytest.approx(3.5, abs=0.3)  # 3 rounds of 2 users; 5 s / 2, answered
    bodies = [json.loads(body) for body in bench.servers[0].bodies]
    assert [len(body["prompt"]) for body in bodies] == [600] * 6
    assert len({tuple(body["prompt"][:512]) for body in bodies}) == 1
    assert len({tuple(body["prompt"]) for body in bodies}) == 6
    await bench.finish()


async def test_a_new_loads_sessions_do_not_wait_for_those_of_the_load_before() -> None:
    """Found in review: each load numbers its sessions from 0, and nothing else links them."""
    bench = Bench(MultiTurn(think_s=0.0), service_s=60.0)
    await bench.client.load(Poisson(rate_rps=1), 0)
    await bench.advance(5.0)
    before = len(bench.servers[0].bodies)
    await bench.client.load(Poisson(rate_rps=1), 1)
    await bench.advance(5.0)
    assert len(bench.servers[0].bodies) > before > 0
    assert await bench.client.finish(0) > 0
