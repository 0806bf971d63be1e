"""A simulated graph on ManualClock: clients, routers and workers as arithmetic, the real controller on top.

What is simulated: requests arrive, wait and get a first token, as `ttft_s(load, params)` says; a router
reports them in batches and takes parameters from the channel. What is real: everything in the controller,
from the wire's batch to the published record.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import msgspec

from dynamo_poa.clock import ManualClock
from dynamo_poa.config import ControllerConfig, PolicyConfig, RegimeConfig
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import ActuationError, BusError
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook
from dynamo_poa.loop import ControlLoop
from dynamo_poa.policies import make_policy, make_shadow
from dynamo_poa.pricing import Pricer
from dynamo_poa.tick import Settings
from dynamo_poa.values import Candidate, Outcome, Role, RouterParams, Setting, WorkerCard
from dynamo_poa.wire import Chosen, DecisionBatch, Ended, FirstToken

STATIC = (0.2, 0.9)
SILENT = tuple(WorkerCard(worker_id=worker, role=Role.DECODE, kv_block_size=16) for worker in (1, 2))


class FakeBus:
    """Connected or not."""

    def __init__(self):
        self.connected = True
        self.dropped = 0
        self.handler_errors = 0


class FakeChannel:
    """The parameter channel, both ends: what is in force, what was written, what routers heard."""

    def __init__(self, bus, clock, stored=None):
        self.current = None
        self.refused = Counter()
        self.store_errors = 0
        self.stored = stored
        self.written = []
        self.heartbeats = []
        self.foreign = None
        self._bus, self._clock = bus, clock

    async def load(self):
        self._require_bus()
        return self.stored

    async def publish(self, params):
        if not self._bus.connected:
            raise ActuationError("not connected")
        self.current = params
        self.written.append((self._clock.monotonic_s(), params))
        self.stored = params

    async def heartbeat(self):
        self._require_bus()
        if self.current is not None:
            self.heartbeats.append((self._clock.monotonic_s(), self.current))

    async def poll_store(self):
        self._require_bus()
        foreign, self.foreign = self.foreign, None
        return foreign

    def _require_bus(self):
        if not self._bus.connected:
            raise BusError("not connected")


async def at_once(job):
    """Price in the loop's own thread: the next tick sees what this one looked at."""
    return job()


class Recorder:
    """A sink that keeps every record."""

    def __init__(self):
        self.dropped = 0
        self.records = []

    async def emit(self, record):
        self.records.append(record)


class Graph:
    """One router, two workers, the real loop.

    ttft_s:     called with the requests in flight and the parameters in force
    in_flight:  how many requests clients keep open; each lives `life_s`
    cards:      workers that say what a test sends for them, in place of two silent ones
    policy:     in place of the configured one, or its configuration
    """

    def __init__(
        self,
        ttft_s,
        *,
        stored=None,
        life_s=1.0,
        batch_s=0.25,
        frontend=None,
        fleet=None,
        cards=SILENT,
        games=None,
        sinks=(),
        policy=None,
        **config,
    ):
        if isinstance(policy, PolicyConfig):
            config, policy = config | {"policy": policy}, None
        config = {"regime": RegimeConfig(baseline_s=0.1)} | config
        self.config = ControllerConfig(**config)
        self.clock = ManualClock()
        self.bus = FakeBus()
        self.channel = FakeChannel(self.bus, self.clock, stored)
        self.book = LatencyBook()
        self.fleet = fleet or Fleet("poa-workers", self.config.stale_s, on_pass=self.book.observe)
        self.pricer = Pricer(self.config.estimate_window_s, self.book, run=at_once)
        self.recorder = Recorder()
        self.decisions = DecisionLog(
            window=self.config.window,
            ttft_window_s=self.config.regime.window_s,
            stale_s=self.config.stale_s,
            block_size=16,
        )
        self.loop = ControlLoop(
            Settings(
                namespace="poa",
                config=self.config,
                policy=policy or make_policy(self.config.policy),
                shadow=make_shadow(self.config.policy),
                static=Setting(*STATIC),
            ),
            clock=self.clock,
            bus=self.bus,
            channel=self.channel,
            fleet=self.fleet,
            decisions=self.decisions,
            pricer=self.pricer,
            games=games,
            cards=lambda: cards,
            frontend=frontend,
            sinks=(*sinks, self.recorder),
        )
        self._ttft_s, self._life_s, self._batch_s = ttft_s, life_s, batch_s
        self._request = self._sequence = 0

    async def run(self, duration_s, in_flight, *, router_heard=True):
        """Let clients keep so many requests open for a while."""
        for _ in range(round(duration_s / self._batch_s)):
            if router_heard and self.bus.connected:
                self.decisions.receive(
                    msgspec.msgpack.encode(self._batch(in_flight)), self.clock.monotonic_s()
                )
            await self.clock.advance(self._batch_s)

    def _batch(self, in_flight):
        """Report the requests that got their first token in this interval."""
        params = self.channel.current or RouterParams(
            revision=0, router_temperature=STATIC[0], overlap_weight=STATIC[1]
        )
        now_s = self.clock.wall_s()
        events = []
        for _ in range(round(in_flight * self._batch_s / self._life_s)):
            self._request += 1
            name = str(self._request)
            candidates = (
                Candidate(1, 0, 64, 0, in_flight, 0, added_blocks=4),
                Candidate(2, 0, 64, 0, in_flight // 2, 0, added_blocks=4),
            )
            received_s = now_s - self._ttft_s(in_flight, params)
            events += [
                Chosen(name, Role.DECODE, received_s, received_s, 1, 0, 64, params.revision, 1, candidates),
                FirstToken(name, Role.DECODE, now_s),
                Ended(name, Role.DECODE, now_s, Outcome.OK),
            ]
        self._sequence += 1
        return DecisionBatch(
            router_id="router-0",
            sequence=self._sequence,
            sent_at_s=now_s,
            events=tuple(events),
            in_flight={"decode": in_flight},
            params_revision=params.revision,
            params_source="heartbeat",
        )

    @property
    def records(self):
        return self.recorder.records

    @property
    def last(self):
        return self.records[-1]

    @property
    def written(self):
        """Return (τ, ω, kind) of everything written to the store."""
        return [(p.router_temperature, p.overlap_weight, str(p.kind)) for _, p in self.channel.written]

    @property
    def regimes(self):
        """Return the regimes in the order they came."""
        path = []
        for record in self.records:
            if not path or path[-1] != record.regime:
                path.append(record.regime)
        return path


@asynccontextmanager
async def ticking(graph):
    """Run a graph's loop as its own task."""
    task = asyncio.create_task(graph.loop.run())
    try:
        yield graph
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
