"""A served graph as the end-to-end tests see it: its HTTP front, its event plane, its /metrics, its output.

Nothing of Dynamo runs in the test process: everything is observed from outside, over HTTP and NATS.
"""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from exposition import samples_of
from waiting import eventually

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Prompt, Result, prompts
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import WireError
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Role
from dynamo_poa.wire import (
    Chosen,
    DecisionBatch,
    DynamoMessage,
    Ended,
    FirstToken,
    ForwardPass,
    Heartbeat,
    KvMetrics,
    decode_dynamo,
    subject,
)

CLOCK = SystemClock()
MODEL = "mock-llama-3.1-70b"
SAME_S = 0.005  # messages so close together may come in either order, whatever their numbers
# Fast enough for tests, and slow enough that two cores are not what limits.
MOCK_ARGS = "{speedup-ratio: 5, num-gpu-blocks-override: 2048}"
DISAGG_2P3D = (
    "PrefillWorker.per_process=2",
    f"PrefillWorker.args={MOCK_ARGS}",
    "DecodeWorker.per_process=3",
    f"DecodeWorker.args={MOCK_ARGS}",
    "PoaRouter.min_prefill_workers=2",
    "PoaRouter.min_decode_workers=3",
)
AGG_3 = (
    "Worker.workers=3",
    "Worker.per_process=3",
    f"Worker.args={MOCK_ARGS}",
    "PoaRouter.min_decode_workers=3",
)
DATA_PATHS = ("relay", "stream")
# What regime changes are forced with: any TTFT at all ends `below`, and idleness returns to it.
# `saturated` is never called for by TTFT alone.
FORCED = (
    "PoaController.tick_s=0.1",
    "PoaController.regime={unit: seconds, theta1: 1.0e-6, theta2: 2.0e-6, confirm_s: 0.2, dwell_s: 0.3, "
    "min_samples: 1, window_s: 1, half_life_s: 0.1, idle_s: 1}",
)
# A process says more than a line for these; none may appear in a run in which nothing was broken.
BAD_SIGNS = ("Traceback (most recent call last)", "Conflicting request tracker write", "panicked at")


class LiveGraph:
    """A graph that is being served, and everything it has said since.

    lines:       output, with the name of its process
    telemetry:   the controller's records, oldest first
    batches:     the routers' batches, oldest first
    heartbeats:  the controller's, oldest first
    passes:      forward passes that computed something, by component (`prefill`, `backend`)
    counters:    counter ids of all forward passes, by (worker id, rank)
    booked:      latest active_decode_blocks, by (publisher, worker id, rank)
    """

    def __init__(
        self, running: Running, bus: Bus, http: aiohttp.ClientSession, lines: list[tuple[str, str]]
    ) -> None:
        self.running, self.bus, self._http, self.lines = running, bus, http, lines
        self.telemetry: list[TelemetryRecord] = []
        self.batches: list[DecisionBatch] = []
        self.heartbeats: list[Heartbeat] = []
        self.passes: list[tuple[str, ForwardPass]] = []
        self.counters: dict[tuple[int, int], list[int]] = {}
        self.booked: dict[tuple[int, int, int], int] = {}
        self._booked_at: dict[tuple[int, int, int], tuple[int, float]] = {}  # its message's sequence and time
        self.undecodable = 0
        host, _, port = running.http_url.removeprefix("http://").partition(":")
        self.client = LoadClient(host, int(port), MODEL, clock=CLOCK, timeout_s=30)
        self._listen()

    @property
    def url(self) -> str:
        """Return the frontend's address."""
        return self.running.http_url

    @property
    def namespace(self) -> str:
        """Return the graph's namespace."""
        return self.running.plan.namespace

    @property
    def latest(self) -> TelemetryRecord:
        """Return the controller's last record."""
        return self.telemetry[-1]

    def chosen(self, role: Role | None = None) -> list[Chosen]:
        """Return the decisions so far, of one leg or of all."""
        events = (event for batch in self.batches for event in batch.events)
        return [event for event in events if isinstance(event, Chosen) and role in (None, event.role)]

    async def decided(self, count: int) -> None:
        """Wait until there have been so many decisions."""
        await eventually(lambda: len(self.chosen()) >= count)

    def first_tokens(self, role: Role) -> list[FirstToken]:
        """Return the first tokens of one leg so far."""
        events = (event for batch in self.batches for event in batch.events)
        return [event for event in events if isinstance(event, FirstToken) and event.role is role]

    def ended(self) -> list[Ended]:
        """Return the ends of legs so far."""
        events = (event for batch in self.batches for event in batch.events)
        return [event for event in events if isinstance(event, Ended)]

    def prefill_tokens(self, component: str) -> int:
        """Return the prompt tokens that a component's workers have computed so far."""
        return sum(done.prefill_tokens for at, done in self.passes if at == component)

    def distinct_passes(self) -> int:
        """Return how many forward passes have been announced, each counted once."""
        return sum(len(set(ids)) for ids in self.counters.values())

    async def complete(self, prompt: Prompt) -> Result:
        """Send one streamed completion of exact tokens."""
        return await self.client.complete(prompt)

    async def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Send a request as it is; return status and text."""
        async with self._http.post(f"{self.url}{path}", json={"model": MODEL, **body}) as response:
            return response.status, await response.text()

    async def get(self, url: str) -> str:
        """Return a page's text."""
        async with self._http.get(url, raise_for_status=True) as response:
            return await response.text()

    @asynccontextmanager
    async def streaming(self, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a streamed completion; leaving the block hangs up."""
        body = {"model": MODEL, "stream": True, **body}
        async with self._http.post(
            f"{self.url}/v1/completions", json=body, raise_for_status=True
        ) as response:
            yield response

    async def control(self, **command: Any) -> dict[str, Any]:
        """Ask the controller, as `dynamo-poa set | release | status` do."""
        answer = await self.bus.request(subject(self.namespace, "control"), json.dumps(command).encode(), 5.0)
        reply: dict[str, Any] = json.loads(answer)
        return reply

    async def pin(self, router_temperature: float, overlap_weight: float) -> Heartbeat:
        """Pin parameters through the control service; return the heartbeat that carries them first."""
        answer = await self.control(
            op="set", router_temperature=router_temperature, overlap_weight=overlap_weight
        )
        assert answer["ok"], answer
        wanted = (router_temperature, overlap_weight)
        seen = len(self.heartbeats)

        def carrying() -> list[Heartbeat]:
            return [
                beat
                for beat in self.heartbeats[max(seen - 1, 0) :]
                if (beat.params.router_temperature, beat.params.overlap_weight) == wanted
            ]

        await eventually(carrying, 5)
        return carrying()[0]

    async def metrics(self, process: str) -> dict[str, float]:
        """Return one of our processes' samples, each of which must be finite."""
        return samples_of(await self.get(self.running.metrics_urls[process]))

    async def data_path(self) -> str:
        """Return the path that all requests have taken so far, by the router's own figures."""
        samples = await self.metrics("router")
        ended = sum(count for name, count in samples.items() if name.startswith("poa_router_requests_total"))
        assert not [name for name in samples if "handed_on_total" in name]
        assert samples.get("poa_router_relay_frames_lost_total", 0) == 0
        relayed = samples.get("poa_router_relay_requests_total", 0)
        assert relayed == (ended if samples["poa_router_relay_in_force"] else 0)
        return "relay" if samples["poa_router_relay_in_force"] else "stream"

    async def metrics_until(
        self, process: str, holds: Callable[[dict[str, float]], bool], within_s: float = 5.0
    ) -> dict[str, float]:
        """Scrape until the samples are as wanted; fail with the last ones when they do not become so."""
        deadline_s = time.monotonic() + within_s
        while True:
            samples = await self.metrics(process)
            if holds(samples):
                return samples
            assert time.monotonic() < deadline_s, samples
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def load(
        self,
        concurrency: int,
        *,
        prompt_tokens: int = 64,
        max_tokens: int = 8,
        templates: int = 2,
        shared_frac: float = 0.0,
        seed: int = 0,
    ) -> AsyncIterator[list[Result]]:
        """Keep so many requests going while the block lasts; yields the results, complete after the block."""
        results: list[Result] = []
        source = prompts(
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            templates=templates,
            shared_frac=shared_frac,
            seed=seed,
        )
        users = ClosedLoop(self.client, source, results.append, CLOCK)
        users.resize(concurrency)
        try:
            yield results
        finally:
            await users.finish()

    async def many(self, count: int, concurrency: int, **shape: int) -> list[Result]:
        """Send exactly so many requests, so many at a time."""
        left: Iterator[Prompt] = prompts(
            prompt_tokens=shape.get("prompt_tokens", 64),
            max_tokens=shape.get("max_tokens", 8),
            templates=0,
            shared_frac=0,
            seed=count,
        )
        results: list[Result] = []

        async def user() -> None:
            nonlocal count
            while count:
                count -= 1
                results.append(await self.complete(next(left)))

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return results

    async def until(self, condition: Callable[[TelemetryRecord], object], within_s: float = 5.0) -> float:
        """Wait for the first record from now on that is as wanted; return the seconds it took."""
        seen = len(self.telemetry)
        return await eventually(lambda: any(condition(record) for record in self.telemetry[seen:]), within_s)

    async def idle(self, within_s: float = 10.0, *, gone: int | None = None) -> None:
        """Wait until no router serves anything, all of it has been reported, and no worker is booked.

        Args:     gone: a worker that discovery has dropped: Dynamo says no more of its bookings.
        """
        for process in self.running.metrics_urls:
            if process.startswith("router"):
                await self.metrics_until(process, _serves_nothing, within_s)
        await self.until(lambda record: record.in_flight == 0, within_s)  # a tick later: batches have come
        try:
            await eventually(lambda: not self._still_booked(gone), within_s)
        except AssertionError:
            print("still booked, by publisher, worker and rank:", self._still_booked(gone))
            raise

    def _still_booked(self, gone: int | None) -> dict[tuple[int, int, int], int]:
        return {of: count for of, count in self.booked.items() if count and of[1] != gone}

    @asynccontextmanager
    async def held_down(self, process: str) -> AsyncIterator[None]:
        """Keep a process dead for as long as the block lasts: killed again whenever it is started again."""

        async def kill_on_sight() -> None:
            while True:
                await self.running.kill(process, signal.SIGKILL)
                await asyncio.sleep(0.02)

        await self.running.kill(process, signal.SIGKILL)
        task = asyncio.create_task(kill_on_sight(), name=f"hold down {process}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _listen(self) -> None:
        records = msgspec.msgpack.Decoder(TelemetryRecord)
        batches = msgspec.msgpack.Decoder(DecisionBatch)
        beats = msgspec.msgpack.Decoder(Heartbeat)
        self.bus.subscribe(
            subject(self.namespace, "telemetry"), lambda _, data: self.telemetry.append(records.decode(data))
        )
        self.bus.subscribe(
            subject(self.namespace, "decisions"), lambda _, data: self.batches.append(batches.decode(data))
        )
        self.bus.subscribe(
            subject(self.namespace, "params"), lambda _, data: self.heartbeats.append(beats.decode(data))
        )
        self.bus.subscribe(
            f"namespace.{self.namespace}-workers.component.*.endpoint.generate.*", self._on_event
        )

    def _on_event(self, topic_subject: str, data: bytes) -> None:
        try:
            message = decode_dynamo(topic_subject, data)
        except WireError:
            self.undecodable += 1
            return
        self._take(message)

    def _take(self, message: DynamoMessage) -> None:
        body = message.body
        if isinstance(body, ForwardPass):
            self.counters.setdefault((body.worker_id, body.dp_rank), []).append(body.counter_id)
            if body.prefill_requests or body.decode_requests:
                self.passes.append((message.component, body))
        elif isinstance(body, KvMetrics) and body.active_decode_blocks is not None:
            # Measured: a router's messages may arrive out of order.
            of = (message.publisher_id, body.worker_id, body.dp_rank)
            at_s, blocks = message.published_at_s, body.active_decode_blocks
            sequence, last_at_s = self._booked_at.get(of, (-1, 0.0))
            if message.sequence > sequence:
                # Nor is their number the order they were counted in: of two of a millisecond the last may be
                # the older one (seen: 0 blocks, then 4 with all ended). What is never freed is in both.
                at_once = at_s - last_at_s < SAME_S
                self._booked_at[of] = message.sequence, at_s
                self.booked[of] = min(blocks, self.booked[of]) if at_once else blocks


def _serves_nothing(samples: dict[str, float]) -> bool:
    return not any(
        value for name, value in samples.items() if name.startswith("poa_router_in_flight_requests")
    )


def plan_of(kind: str, *overrides: str) -> Plan:
    """Return the plan of a shipped graph, `disagg` or `agg`, on free ports.

    Its policy is the table unless `overrides` say otherwise: Dynamo selects; τ and ω move with the regime.
    """
    defaults = ("Frontend.http_port=0", "PoaController.policy.name=table")
    return make_plan(f"graphs.{kind}_poa:Frontend", f"graphs/{kind}_poa.yaml", (*defaults, *overrides))


@asynccontextmanager
async def live_graph(
    kind: str, *overrides: str, clean: bool = True, plan: Plan | None = None
) -> AsyncIterator[LiveGraph]:
    """Serve a shipped graph for as long as the block lasts.

    Args:     clean: nothing is going to be broken on purpose, so no process may have said anything bad in the
              end, from its start to its stop.  plan: is served instead of the graph as shipped.
    """
    lines: list[tuple[str, str]] = []
    plan = plan or plan_of(kind, *overrides)

    def emit(name: str, line: str) -> None:
        lines.append((name, line))
        if '"poa.tick"' not in line:
            print(f"{name:10} | {line}")  # shown with a test that fails, a fixture's too

    async with (
        serve_graph(plan, emit=emit, start_timeout_s=60) as running,
        Bus(running.nats_url, name="test", clock=CLOCK) as bus,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        graph = LiveGraph(running, bus, http, lines)
        await bus.wait_connected(5)
        await eventually(lambda: graph.telemetry and graph.heartbeats and graph.batches, 10)
        yield graph
    if clean:
        assert bad_lines(lines) == []
        assert graph.undecodable == 0


def bad_lines(lines: list[tuple[str, str]]) -> list[str]:
    """Return what should not have been said."""
    return [f"{name} | {line}" for name, line in lines if any(sign in line for sign in BAD_SIGNS)]
