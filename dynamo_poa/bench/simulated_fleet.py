"""Prefill workers as events in virtual time, which report as coarsely as real ones, and a controller on them.

Owns: arrivals, prompt sizes, queues, passes, their reports, clients who wait for their answers; driving the
      real controller's step over all of it.
Does not own: any judgement (the controller's own), figures (detection.py).
Invariant: seeded and in virtual time: the same arguments give the same run, on every machine.
Source: reports as measured on Dynamo 1.4.2: one after each pass, and once a second while a worker idles.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from dynamo_poa.config import ControllerConfig
from dynamo_poa.controller import step
from dynamo_poa.decisions import MAX_SIZES, Traffic
from dynamo_poa.latency import LatencyBook
from dynamo_poa.load import RankLoad, WorkerState
from dynamo_poa.policies import make_policy
from dynamo_poa.tick import ControllerState, Effects, Observation, Settings
from dynamo_poa.ttft import sample_of
from dynamo_poa.values import Regime, Role, RouterParams, Setting, TtftSample, WorkerCard, WorkerKey
from dynamo_poa.wire import ForwardPass

ARRIVAL, PASS, IDLE, END = range(4)
STALE_S = 30.0
STEP_S = 0.25


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated.

    rate:         Poisson arrivals a second at an instant, for an open loop; None for a closed one
    clients:      how many clients there are at an instant, in a closed loop; each thinks for think_s
    tokens_mean, spread:  lognormal prompt sizes: their mean, and variance over squared mean
    tokens_per_s: one worker's speed at prompts of the mean size
    pass_s:       what a pass costs beside its tokens
    pass_tokens:  most tokens of a pass
    answer_s:     mean time from first token to the last, which counts as in flight
    slow:         how many times slower than the others a worker is, by its number
    random_frac:  share of requests that go to any worker; the rest to the one with fewest tokens booked
    upstream_s:   what requests wait before they are routed, at an instant
    """

    workers: int = 8
    rate: Callable[[float], float] | None = None
    clients: Callable[[float], int] | None = None
    think_s: float = 5.0
    tokens_mean: float = 2000.0
    spread: float = 0.43
    tokens_per_s: float = 25_000.0
    pass_s: float = 0.002
    pass_tokens: int = 2048
    answer_s: float = 2.0
    slow: Mapping[int, float] = {}
    random_frac: float = 0.0
    upstream_s: Callable[[float], float] = lambda at_s: 0.0

    @property
    def capacity(self) -> float:
        """Return the requests a second that keep every worker busy."""
        return sum(self.tokens_per_s / self.slow.get(n, 1.0) for n in range(self.workers)) / self.tokens_mean


class _Request:
    __slots__ = ("arrived_at_s", "left", "tokens")

    def __init__(self, arrived_at_s: float, tokens: int) -> None:
        self.arrived_at_s = arrived_at_s
        self.tokens = self.left = tokens


class _Worker:
    def __init__(self, key: WorkerKey, token_s: float) -> None:
        self.key = key
        self.token_s = token_s
        self.card = WorkerCard(worker_id=key.worker_id, role=Role.PREFILL, kv_block_size=16, max_num_seqs=64)
        self.load = RankLoad(None, 0.0)
        self.waiting: deque[_Request] = deque()
        self.ending: list[_Request] | None = None  # of the pass that runs; None between passes
        self.pass_tokens = self.passes = self.booked = 0
        self.pass_s = self.reported_at_s = 0.0


class SimulatedFleet:
    """Workers, router and clients; `advance` makes time pass, `observe` tells what a controller would see."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.at_s = 0.0
        self.started = 0
        self._shape = shape
        self._chance = random.Random(seed)
        self._sigma = math.sqrt(math.log(1 + shape.spread))
        self._mu = math.log(shape.tokens_mean) - self._sigma**2 / 2
        token_s = 1 / shape.tokens_per_s - shape.pass_s / shape.tokens_mean
        self._workers = [
            _Worker(WorkerKey(1000 + number, 0), token_s * shape.slow.get(number, 1.0))
            for number in range(shape.workers)
        ]
        self._events: list[tuple[float, int, int, _Worker | None]] = []
        self._numbered = 0
        self._in_flight = self._clients = 0
        self._ttft: deque[tuple[float, float]] = deque()
        self._fresh = False
        self._arrivals: deque[float] = deque()
        self._sizes: deque[int] = deque(maxlen=MAX_SIZES)
        self._book = LatencyBook()
        self._latencies = self._book.fit(0.0, [])
        self._fitted_at_s = 0.0
        for worker in self._workers:
            self._push(1.0, IDLE, worker)
        if shape.rate is not None:
            self._push(self._chance.expovariate(shape.rate(0.0)), ARRIVAL)

    def advance(self, until_s: float) -> None:
        """Let everything happen up to an instant."""
        if self._shape.clients is not None:
            while self._clients < self._shape.clients(self.at_s):
                self._clients += 1
                self._push(self.at_s + self._chance.expovariate(1 / self._shape.think_s), ARRIVAL)
        while self._events and self._events[0][0] <= until_s:
            self.at_s, _, kind, worker = heapq.heappop(self._events)
            if kind == ARRIVAL:
                self._arrive()
            elif kind == END:
                self._end()
            elif worker is not None and kind == PASS:
                self._finish(worker)
            elif worker is not None:
                self._report_idle(worker)
        self.at_s = until_s

    def observe(self, window_s: float) -> Observation:
        """Return what a controller sees now."""
        at_s = self.at_s
        for times in (self._ttft, self._arrivals):
            while times and at_s - (times[0][0] if isinstance(times[0], tuple) else times[0]) > window_s:
                times.popleft()
        fresh, self._fresh = self._fresh, False
        ttft = (
            sample_of((ttft_s for _, ttft_s in self._ttft), fresh=fresh, source="decisions")
            if self._ttft
            else TtftSample()
        )
        if at_s - self._fitted_at_s >= 1.0:
            self._fitted_at_s = at_s
            self._latencies = self._book.fit(at_s, [(worker.key, Role.PREFILL) for worker in self._workers])
        tokens = sum(self._sizes)
        return Observation(
            wall_s=1.8e9 + at_s,
            monotonic_s=at_s,
            ttft=ttft,
            traffic=Traffic(
                in_flight=self._in_flight,
                arrived=self.started,
                arrival_rate=len(self._arrivals) / min(window_s, max(at_s, STEP_S)),
                tokens_mean=tokens / len(self._sizes) if tokens else None,
                tokens_effective=sum(size**2 for size in self._sizes) / tokens if tokens else None,
            ),
            workers=tuple(self._state(worker) for worker in self._workers),
            latencies=self._latencies,
            message_age_s=0.0,
        )

    def _state(self, worker: _Worker) -> WorkerState:
        state = worker.load.state(worker.key, worker.card, self.at_s, STALE_S, False)
        return msgspec.structs.replace(state, active_prefill_tokens=worker.booked)

    def _push(self, at_s: float, kind: int, worker: _Worker | None = None) -> None:
        self._numbered += 1
        heapq.heappush(self._events, (at_s, self._numbered, kind, worker))

    def _arrive(self) -> None:
        shape, chance = self._shape, self._chance
        if shape.rate is not None:
            self._push(self.at_s + chance.expovariate(shape.rate(self.at_s)), ARRIVAL)
        tokens = max(16, min(32_000, int(chance.lognormvariate(self._mu, self._sigma))))
        self._in_flight += 1
        self.started += 1
        self._arrivals.append(self.at_s)
        self._sizes.append(tokens)
        if chance.random() < shape.random_frac:
            worker = chance.choice(self._workers)
        else:
            least = min(worker.booked for worker in self._workers)
            worker = chance.choice([worker for worker in self._workers if worker.booked == least])
        worker.booked += tokens
        worker.waiting.append(_Request(self.at_s - shape.upstream_s(self.at_s), tokens))
        if worker.ending is None:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        left, worker.ending = self._shape.pass_tokens, []
        while worker.waiting and left:
            request = worker.waiting[0]
            taken = min(left, request.left)
            request.left -= taken
            left -= taken
            if request.left:
                break
            worker.ending.append(worker.waiting.popleft())
        worker.pass_tokens = self._shape.pass_tokens - left
        worker.pass_s = self._shape.pass_s + worker.token_s * worker.pass_tokens
        self._push(self.at_s + worker.pass_s, PASS, worker)

    def _finish(self, worker: _Worker) -> None:
        for request in worker.ending or ():
            worker.booked -= request.tokens
            self._ttft.append((self.at_s, self.at_s - request.arrived_at_s))
            self._fresh = True
            self._push(self.at_s + self._chance.expovariate(1 / self._shape.answer_s), END)
        worker.ending = None
        tokens, wall_time_s = worker.pass_tokens, worker.pass_s
        if worker.waiting:
            self._begin(worker)
        self._report(worker, tokens, wall_time_s)

    def _report_idle(self, worker: _Worker) -> None:
        if worker.ending is None and self.at_s - worker.reported_at_s >= 0.99:
            self._report(worker, 0, 0.0)

    def _report(self, worker: _Worker, tokens: int, wall_time_s: float) -> None:
        """Report a pass as an engine does: what it computed, and what waits when it ends."""
        waiting = [request for request in worker.waiting if request.left == request.tokens]
        worker.passes += 1
        done = ForwardPass(
            worker_id=worker.key.worker_id,
            dp_rank=0,
            counter_id=worker.passes,
            wall_time_s=wall_time_s,
            prefill_requests=int(tokens > 0),
            prefill_tokens=tokens,
            prefill_kv_tokens=0,
            decode_requests=0,
            decode_kv_tokens=0,
            queued_prefill_requests=len(waiting),
            queued_prefill_tokens=sum(request.tokens for request in waiting),
            queued_decode_requests=0,
            queued_decode_kv_tokens=0,
        )
        worker.load.take_pass(1, done, self.at_s)
        self._book.observe(worker.key, worker.card, done, self.at_s)
        worker.reported_at_s = self.at_s
        self._push(self.at_s + 1.0, IDLE, worker)

    def _end(self) -> None:
        self._in_flight -= 1
        shape = self._shape
        if shape.clients is None:
            return
        if self._clients > shape.clients(self.at_s):
            self._clients -= 1
        else:
            self._push(self.at_s + self._chance.expovariate(1 / shape.think_s), ARRIVAL)


class Controlled:
    """The real controller's step on a simulated fleet, a tick at a time.

    changes:  (instant, regime after, driver) of each change
    requests: started until each change
    """

    def __init__(self, shape: Shape, seed: int, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()
        self.fleet = SimulatedFleet(shape, seed)
        static = Setting(0.0, 1.0)
        self._settings = Settings(
            namespace="poa",
            config=self.config,
            policy=make_policy(self.config.policy),
            static=static,
        )
        self.state = ControllerState()
        self.changes: list[tuple[float, Regime, str]] = []
        self.requests: list[int] = []
        self.effects: Effects | None = None
        self.current: RouterParams | None = None

    @property
    def regime(self) -> Regime:
        """Return the regime now."""
        return self.state.regime.regime

    def run(self, until_s: float) -> list[tuple[float, Regime, str]]:
        """Tick until an instant; return the changes since then."""
        known = len(self.changes)
        while self.fleet.at_s < until_s - 1e-9:
            self.fleet.advance(self.fleet.at_s + self.config.tick_s)
            before = self.regime
            seen = msgspec.structs.replace(
                self.fleet.observe(self.config.regime.window_s), current=self.current, announced=True
            )
            self.state, self.effects = step(self.state, seen, self._settings)
            self.current = self.effects.publish or self.current
            if self.regime is not before:
                self.changes.append((self.fleet.at_s, self.regime, self.state.regime.driver))
                self.requests.append(self.fleet.started)
        return self.changes[known:]
