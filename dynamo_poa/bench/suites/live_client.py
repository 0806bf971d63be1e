"""Sends a workload to a live graph as its load says, and keeps what became of every request.

Owns: open and closed loops, sessions, when a request was due and how late it was sent.
Does not own: one request on the wire (load.py), the workload (workloads/), what the figures are (live.py).
Invariant: each request that was due is accounted for: answered, failed, or not sent, with a reason. In an
           open loop a slow answer holds nothing up but its own session.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dynamo_poa.bench.load import LoadClient, Prompt, Result
from dynamo_poa.clock import Clock
from dynamo_poa.workloads import stream
from dynamo_poa.workloads.arrivals import Closed, Load
from dynamo_poa.workloads.request import Request, token_ids
from dynamo_poa.workloads.synthetic import Content, Turns

MAX_IN_FLIGHT = 4000  # each is a connection
MADE_AHEAD = 64  # requests of an open loop
AFTER_FAILURE_S = 0.1  # a dead server is not hammered
# Users come spread over so long. Measured: 64 who come at once, with answers of one length, go on asking as
# one; what falls to either side of a measurement's ends is then off by a whole round of theirs.
COMING_S = 1.0


class Asked(NamedTuple):
    """One request and its fate. Instants are of the client's clock.

    due_at_s:   in an open loop its arrival, or the end of its session's last turn if that is later; in a
                closed one the end of the user's last request and of their thinking
    """

    request: Request
    due_at_s: float
    sent_at_s: float
    ended_at_s: float
    open_loop: bool
    result: Result


class LiveClient:
    """Loads one graph.

    Args:  clients: one to each of the graph's frontends; requests go to them in turn.
           block_tokens: of the workers.
           max_in_flight: what is due while so many run is not sent.
    """

    def __init__(
        self,
        clients: Sequence[LoadClient],
        content: Content,
        seed: int,
        block_tokens: int,
        report: Callable[[Asked], None],
        clock: Clock,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._clients, self._turn = clients, itertools.cycle(clients)
        self._content, self._seed, self._block_tokens = content, seed, block_tokens
        self._prompt_tokens = stream.block_tokens_of(content, block_tokens)
        self._report, self._clock, self._max_in_flight = report, clock, max_in_flight
        self._users = _Users(self)
        self._arrivals: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self.in_flight = 0

    @property
    def tokens(self) -> int:
        """Return the tokens that have come so far."""
        return sum(client.tokens for client in self._clients)

    @property
    def exhausted(self) -> bool:
        """Tell whether a trace has come to its end and been answered."""
        arrived = self._users.exhausted if self._arrivals is None else self._arrivals.done()
        return arrived and not self.in_flight and not self._running

    async def load(self, load: Load, phase: int = 0) -> None:
        """Change to this load once it is ready; users of a closed loop stay, as far as they are wanted.

        Raises:  ConfigError when the workload cannot be read.
        """
        if isinstance(load, Closed):
            turns = stream.sessions(self._content, self._seed, self._block_tokens, phase)
            await self._end_arrivals()
            self._users.change(load, turns)
        else:
            requests = stream.requests(self._content, load, self._seed, self._block_tokens, phase)
            made = deque[tuple[Request, bytes]]()
            await self._make(requests, made, float("inf"))
            await self._end_arrivals()
            self._users.leave()
            self._sessions = {}  # another load's have the same numbers, and nothing to do with these
            self._arrivals = asyncio.create_task(self._arrive(requests, made), name="arrivals")

    async def finish(self, within_s: float) -> int:
        """Send no more and wait for what is in flight; return how many were given up."""
        await self._end_arrivals()
        self._users.leave()
        tasks = {*self._users.tasks, *self._running}
        late: set[asyncio.Task[None]] = set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks - late:
            task.result()
        return len(late)

    async def ask(self, request: Request, due_at_s: float, body: bytes, open_loop: bool) -> Result:
        """Send a request now and report what became of it, also when the wait for it is given up."""
        sent_at_s = self._clock.monotonic_s()
        result = _unanswered(sent_at_s, "no end before the run's")
        self.in_flight += 1
        try:
            result = await next(self._turn).send(body)
        finally:
            self.in_flight -= 1
            ended_at_s = self._clock.monotonic_s()
            self._report(Asked(request, due_at_s, sent_at_s, ended_at_s, open_loop, result))
        return result

    def body(self, request: Request) -> bytes:
        """Return the request as it goes over the wire."""
        tokens = token_ids(request, self._prompt_tokens)
        return self._clients[0].encode(Prompt(tuple(tokens), request.output_tokens))

    async def pause(self, until_s: float) -> None:
        """Wait until an instant of the clock."""
        if (left_s := until_s - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(left_s)

    def now_s(self) -> float:
        """Return the clock's instant."""
        return self._clock.monotonic_s()

    async def _end_arrivals(self) -> None:
        if self._arrivals is not None:
            done = self._arrivals.done()
            self._arrivals.cancel()
            await asyncio.wait([self._arrivals])
            if done:
                self._arrivals.result()  # an error in the workload is not kept quiet
            self._arrivals = None

    async def _arrive(self, requests: Iterator[Request], made: deque[tuple[Request, bytes]]) -> None:
        started_s = self._clock.monotonic_s()
        while made:
            request, body = made.popleft()
            due_at_s = started_s + (request.at_s or 0.0)
            await self._make(requests, made, due_at_s)
            await self.pause(due_at_s)
            if self.in_flight >= self._max_in_flight:
                now_s = self._clock.monotonic_s()
                late = _unanswered(now_s, f"not sent: {self._max_in_flight} in flight")
                self._report(Asked(request, due_at_s, now_s, now_s, True, late))
                continue
            before = self._sessions.get(request.session) if request.session >= 0 else None
            task = asyncio.create_task(self._one(request, due_at_s, body, before), name="request")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if request.session >= 0:
                self._sessions[request.session] = task

    async def _make(
        self, requests: Iterator[Request], made: deque[tuple[Request, bytes]], until_s: float
    ) -> None:
        """Make bodies ahead: a long prompt takes a millisecond, and a trace has many that are due at once."""
        while len(made) < MADE_AHEAD and (not made or self._clock.monotonic_s() < until_s):
            request = next(requests, None)
            if request is None:
                return
            made.append((request, self.body(request)))
            await asyncio.sleep(0)

    async def _one(
        self, request: Request, due_at_s: float, body: bytes, before: "asyncio.Task[None] | None"
    ) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
            due_at_s = max(due_at_s, self._clock.monotonic_s())
        await self.ask(request, due_at_s, body, open_loop=True)
        if self._sessions.get(request.session) is asyncio.current_task():
            del self._sessions[request.session]


class _Users:
    """The users of a closed loop; how many, what they ask and how long they think may change at any time."""

    def __init__(self, client: LiveClient) -> None:
        self._client = client
        self._wanted, self._think_s = 0, 0.0
        self._source: Iterator[Turns] = iter(())
        self._users: dict[int, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list["asyncio.Task[None]"]:
        """Return them, also those who are just leaving."""
        return list(self._users.values())

    @property
    def exhausted(self) -> bool:
        """Tell whether all have asked what there was to ask."""
        return self._wanted > 0 and all(user.done() for user in self._users.values())

    def change(self, load: Closed, source: Iterator[Turns]) -> None:
        """Have so many from now on, asking this; who leaves finishes their request first."""
        self._wanted, self._think_s, self._source = load.users, load.think_s, source
        here = {number for number, user in self._users.items() if not user.done()}
        coming = [number for number in range(load.users) if number not in here]
        for place, number in enumerate(coming):
            user = self._user(number, COMING_S * place / len(coming))
            self._users[number] = asyncio.create_task(user, name=f"user-{number}")

    def leave(self) -> None:
        """Have none from now on."""
        self._wanted = 0

    async def _user(self, number: int, think_s: float) -> None:
        client = self._client
        while number < self._wanted:
            source = self._source
            turns = next(source, None)
            if turns is None:  # a trace ends
                return
            for request in turns:
                due_at_s = client.now_s() + think_s + request.think_s
                await client.pause(due_at_s)
                if number >= self._wanted or source is not self._source:
                    break
                result = await client.ask(request, due_at_s, client.body(request), open_loop=False)
                think_s = self._think_s if result.ok else max(self._think_s, AFTER_FAILURE_S)


def _unanswered(at_s: float, why: str) -> Result:
    return Result(started_at_s=at_s, ttft_s=None, latency_s=0.0, tokens=0, error=why)
