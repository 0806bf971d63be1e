"""Runs cells on live graphs: one graph a policy, all up at once, one of them under load at a time.

Owns: a block's life, the course of a cell (warm-up, measurement, drain), its figures, when it is void.
Does not own: graphs and names (live_graphs.py), the load (live_client.py), what graphs say (live_watch.py),
              the order of cells (runner.py).
Invariant: a cell that is started ends in a Result, whatever the graph does, unless it is cancelled. Graphs
           keep what they have learnt from cell to cell, as a service does: caches, speeds, baselines.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from dynamo_poa.bench.load import LoadClient
from dynamo_poa.bench.processes import MachineTime, busy_frac, cpu_s, machine_time
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.story import CPU_BUSY_FRAC, quantile
from dynamo_poa.bench.suites import stalls
from dynamo_poa.bench.suites.cells import Cell, Fleet, NotANumber, Phase, Policy, Result
from dynamo_poa.bench.suites.figures import Served, figures_of
from dynamo_poa.bench.suites.live_client import Asked, LiveClient
from dynamo_poa.bench.suites.live_graphs import frontend_ports, plan_of, process_of, worker_names
from dynamo_poa.bench.suites.live_watch import Watch
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import BusError, ConfigError, StartError
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.telemetry import TelemetryRecord

MAX_SEND_LAG_S = 0.02
POA_WINDOW_S = 20.0
REQUEST_TIMEOUT_S = 300.0
DRAIN_S = 60.0
SETTLE_S = 0.5  # after the last answer: bookings and events of it are over
START_AT_ONCE = 3  # graphs: their imports are what takes the time, and a frontend may not take 30 s
FIRST_TICK_S = 10.0


class Block:
    """One fleet under several policies, to run cells of.

    failed:  policies whose graph is not up, and why: refused or crashed; their cells fail at once

    Args:    poa_window_s: PoA-hat is that of the last so many seconds; at most what a cell measures.
    """

    def __init__(
        self,
        fleet: Fleet,
        policies: Sequence[Policy],
        poa_window_s: float = POA_WINDOW_S,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.failed: dict[str, str] = {}
        self._fleet, self._policies, self._poa_window_s = fleet, tuple(policies), poa_window_s
        self._clock: Clock = clock or SystemClock()
        self._running: dict[str, Running] = {}
        self._stacks: list[AsyncExitStack] = []
        if fleet.stall:
            stalls.check(fleet.stall)

    async def __aenter__(self) -> Self:
        """Start all graphs; who does not come up keeps nobody else from it."""
        room, complete = asyncio.Semaphore(START_AT_ONCE), False

        async def start(policy: Policy) -> None:
            stack = AsyncExitStack()
            async with room:
                try:
                    plan = plan_of(self._fleet, policy, self._poa_window_s)
                    serving = serve_graph(plan, clock=self._clock)
                    self._running[policy.name] = await stack.enter_async_context(serving)
                    self._stacks.append(stack)
                except (StartError, ConfigError, OSError) as error:
                    self.failed[policy.name] = f"the graph did not start: {error}"

        try:
            await asyncio.gather(*map(start, self._policies))
            complete = True
        finally:
            if not complete:
                await self._stop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all graphs."""
        await self._stop()

    async def _stop(self) -> None:
        await asyncio.gather(*(stack.aclose() for stack in self._stacks))
        self._stacks.clear()
        self._running.clear()

    def graph(self, policy: str) -> Running:
        """Return the graph that serves a policy, by its name."""
        return self._running[policy]

    async def run(self, cell: Cell) -> Result:
        """Run one cell.

        Raises:  ConfigError when the cell is not of this block, or its workload cannot be read.
        """
        if cell.fleet != self._fleet or cell.policy not in self._policies or cell.engine != "live":
            raise ConfigError([f"cell {cell.id} ({cell.group}, {cell.policy.name}): must be of this block"])
        started_s = self._clock.monotonic_s()
        try:
            if cell.policy.name not in self._running:
                raise MeasurementError(self.failed[cell.policy.name])
            result = await self._measure(cell, self._running[cell.policy.name])
        except (MeasurementError, BusError, NotANumber, OSError) as error:
            result = Result(cell=cell, state="failed", reason=str(error) or type(error).__name__)
        wall_s, at = self._clock.monotonic_s() - started_s, datetime.now(UTC).isoformat(timespec="seconds")
        return msgspec.structs.replace(result, wall_s=wall_s, at=at)

    async def _measure(self, cell: Cell, running: Running) -> Result:
        """Take one graph through a cell.

        Raises:  MeasurementError when nothing was answered or a process of the graph died.
        """
        before = _lives(running)
        names, plugin = worker_names(running, cell.policy, cell.fleet), bool(cell.policy.plugin)
        asked: list[Asked] = []
        async with (
            Bus(running.nats_url, name="bench", clock=self._clock) as bus,
            AsyncExitStack() as stack,
        ):
            watch = Watch(bus, running.plan, plugin, self._clock)
            await bus.wait_connected(10.0)
            if plugin:
                await self._first_tick(watch)
            if stall := cell.fleet.stall:
                child = running.process(process_of(running.plan, stall.role, stall.number))
                await stack.enter_async_context(stalls.stalling(stall, lambda: child.pid, self._clock))
            course = _Course(cell, running, [*self._running.values()], watch, self._clock)
            client = self._client(cell, running, asked)
            spans, given_up = await course.drive(client)
            await self._clock.sleep(SETTLE_S)
        if _lives(running) != before:
            raise MeasurementError(f"a process died: {_difference(before, _lives(running))}")
        return course.result(asked, spans, names, given_up)

    def _client(self, cell: Cell, running: Running, asked: list[Asked]) -> LiveClient:
        common = running.plan.sections["Common"]
        assert isinstance(common, CommonConfig)
        clients = [
            LoadClient(
                "127.0.0.1",
                port,
                common.model_name,
                clock=self._clock,
                timeout_s=REQUEST_TIMEOUT_S,
                ask_workers=True,  # of our router too, which has nothing to tell: like is compared with like
            )
            for port in frontend_ports(running.plan)
        ]
        return LiveClient(
            clients, cell.content, cell.seed, cell.fleet.block_tokens, asked.append, self._clock
        )

    async def _first_tick(self, watch: Watch) -> None:
        until_s = self._clock.monotonic_s() + FIRST_TICK_S
        while watch.latest is None:
            if self._clock.monotonic_s() > until_s:
                raise MeasurementError(f"the controller said nothing for {FIRST_TICK_S:g} s")
            await self._clock.sleep(0.05)


class _Reading(NamedTuple):
    """Processor time at an instant. Of the graph by process; of graphs that wait, all together."""

    at_s: float
    machine: MachineTime
    own_s: dict[str, float]
    idle_s: float
    client_s: float
    tokens: int


class _Span(NamedTuple):
    """A measured stretch; `record`: the controller's last of it."""

    name: str
    first: _Reading
    last: _Reading
    record: TelemetryRecord | None

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.last.at_s - self.first.at_s

    @property
    def busy_frac(self) -> float:
        """Return the share of the machine's processors that was busy."""
        return busy_frac(self.first.machine, self.last.machine)


class _Course:
    """One cell on its graph: what happens when, and what was found."""

    def __init__(
        self, cell: Cell, running: Running, all_running: list[Running], watch: Watch, clock: Clock
    ) -> None:
        self._cell, self._running, self._watch, self._clock = cell, running, watch, clock
        self._idle = [other for other in all_running if other is not running]

    async def drive(self, client: LiveClient) -> tuple[list[_Span], int]:
        """Warm up, measure, drain; return what was measured, and how many requests were given up."""
        cell, spans = self._cell, list[_Span]()
        phases = cell.phases or (Phase(name="", load=cell.load, seconds=cell.seconds),)
        try:
            await client.load(phases[0].load)
            await self._until(client, cell.warm_up_s)
            self._watch.phase = phases[0].name
            self._watch.count()
            for number, phase in enumerate(phases):
                if number:
                    self._watch.phase = phase.name
                    await client.load(phase.load, number)
                first = self._read(client)
                await self._until(client, phase.seconds)
                spans.append(_Span(phase.name, first, self._read(client), self._watch.latest))
        finally:
            given_up = await client.finish(DRAIN_S if len(spans) == len(phases) else 0)
        return spans, given_up

    async def _until(self, client: LiveClient, seconds: float) -> None:
        """Let time pass; a trace that is at its end is over when the last has been answered."""
        until_s = self._clock.monotonic_s() + seconds
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if client.exhausted and not client.in_flight:
                return
            await self._clock.sleep(min(left_s, 0.25))

    def _read(self, client: LiveClient) -> _Reading:
        return _Reading(
            at_s=self._clock.monotonic_s(),
            machine=machine_time(),
            own_s=_cpu_by_process(self._running),
            idle_s=sum(sum(_cpu_by_process(graph).values()) for graph in self._idle),
            client_s=time.process_time(),
            tokens=client.tokens,
        )

    def result(self, asked: list[Asked], spans: list[_Span], names: dict[int, str], given_up: int) -> Result:
        """Work out the cell's figures.

        Raises:  MeasurementError when a stretch has none.
        """
        figures: dict[str, float] = {}
        measured: list[Asked] = []
        for span in spans:
            mine = [one for one in asked if _belongs(one, span)]
            measured += mine
            prefix = f"{span.name}." if span.name else ""
            figures |= {prefix + key: value for key, value in self._figures(mine, span).items()}
        # What was computed from the start of counting on was for those whose first token came since.
        computed = self._watch.computed["prefill" if self._cell.fleet.prefill else "backend"]
        since_s = spans[0].first.at_s
        prompts = sum(one.request.input_tokens for one in asked if _first_token_at_s(one) > since_s)
        if prompts:
            figures["cached_frac"] = max(0.0, 1 - computed / prompts)
        health = _health(measured, spans)
        reason = _why_void(health) or ""
        return Result(
            cell=self._cell,
            state="void" if reason else "done",
            reason=reason or (f"{given_up} requests had no end after {DRAIN_S:g} s" if given_up else ""),
            figures=figures,
            picks=self._picks(measured, names),
            health=health,
            series=tuple(self._watch.points) if self._cell.phases else (),
        )

    def _figures(self, asked: list[Asked], span: _Span) -> dict[str, float]:
        try:
            figures = figures_of([_served(one) for one in asked], span.seconds)
        except MeasurementError as error:
            errors = Counter(one.result.error for one in asked if one.result.error)
            said = "; ".join(f"{count} x {what}" for what, count in errors.most_common(3))
            raise MeasurementError(f"{error}{': ' if said else ''}{said}") from error
        # In an open loop those that were due here may have been answered later.
        ended = [one for one in asked if one.result.ok and one.ended_at_s <= span.last.at_s]
        figures["throughput_rps"] = len(ended) / span.seconds
        figures["output_tokens_per_s"] = (span.last.tokens - span.first.tokens) / span.seconds
        if record := span.record:
            poa = {
                "poa_hat": record.poa_hat,
                "poa_low": record.poa_low,
                "poa_high": record.poa_high,
                "poa_frozen": record.poa_frozen,
            }
            figures |= {key: value for key, value in poa.items() if value is not None}
        return figures

    def _picks(self, asked: list[Asked], names: dict[int, str]) -> dict[str, int]:
        """Return requests by worker: our router's own decisions, or what Dynamo's frontend says of each."""
        picks = Counter[int]()
        if self._cell.policy.plugin:
            picks = self._watch.chosen
        else:
            for one in asked:
                if one.result.workers is not None:
                    picks.update(set(one.result.workers))  # an aggregated worker is both
        return {name: picks[worker] for worker, name in sorted(names.items(), key=lambda item: item[1])}


def _belongs(one: Asked, span: _Span) -> bool:
    """Tell whether a request is a stretch's: by when it was due, or ended where nobody waits for a due time.

    In an open loop the slow ones would be left out if those counted that ended in time.
    """
    at_s = one.due_at_s if one.open_loop else one.ended_at_s
    return span.first.at_s <= at_s < span.last.at_s


def _served(one: Asked) -> Served:
    result, late_s = one.result, (one.sent_at_s - one.due_at_s) if one.open_loop else 0.0
    ttft_s = result.ttft_s or 0.0
    decoding_s = result.latency_s - ttft_s
    return Served(
        ttft_s=ttft_s + late_s,
        itl_s=decoding_s / (result.tokens - 1) if result.tokens > 1 else None,
        e2e_s=result.latency_s + late_s,
        output_tokens=result.tokens,
        input_tokens=one.request.input_tokens,
        ok=result.ok,
    )


def _first_token_at_s(one: Asked) -> float:
    return float("-inf") if one.result.ttft_s is None else one.result.started_at_s + one.result.ttft_s


def _health(asked: list[Asked], spans: list[_Span]) -> dict[str, float]:
    first, last = spans[0].first, spans[-1].last
    seconds, total_s = last.at_s - first.at_s, last.machine.total_s - first.machine.total_s
    own_s = {name: last.own_s[name] - first.own_s.get(name, 0.0) for name in last.own_s}
    client_s = last.client_s - first.client_s
    return {
        "busy_frac": max(span.busy_frac for span in spans),
        "own_frac": (sum(own_s.values()) + client_s) / total_s,
        "client_frac": client_s / seconds,
        "idle_graphs_frac": (last.idle_s - first.idle_s) / total_s,
        "send_lag_p99_s": quantile((max(one.sent_at_s - one.due_at_s, 0.0) for one in asked), 0.99),
        **{f"cpu.{name}": spent_s / seconds for name, spent_s in own_s.items()},
    }


def _why_void(health: dict[str, float]) -> str | None:
    reasons = []
    if health["busy_frac"] > CPU_BUSY_FRAC:
        reasons.append(f"the processors were {health['busy_frac']:.0%} busy (bound {CPU_BUSY_FRAC:.0%})")
    if health["send_lag_p99_s"] > MAX_SEND_LAG_S:
        lag_ms = health["send_lag_p99_s"] * 1e3
        reasons.append(
            f"requests were sent {lag_ms:.0f} ms late at P99 (bound {MAX_SEND_LAG_S * 1e3:.0f} ms)"
        )
    return "; ".join(reasons) or None


def _cpu_by_process(graph: Running) -> dict[str, float]:
    found = {}
    for process in graph.plan.processes:
        pid = graph.process(process.name).pid
        if pid is not None:
            found[process.name] = cpu_s(pid)
    return found


def _lives(running: Running) -> dict[str, str]:
    """Return which process of a graph is in which of its lives.

    Raises:  MeasurementError when one is down.
    """
    lives = {}
    for process in running.plan.processes:
        child = running.process(process.name)
        if child.pid is None:
            said = f"; it said: {child.last_lines[-1]}" if child.last_lines else ""
            raise MeasurementError(f"{process.name} is down{said}")
        lives[process.name] = f"pid {child.pid}"
    return lives


def _difference(before: dict[str, str], after: dict[str, str]) -> str:
    return ", ".join(name for name in before if before[name] != after.get(name))
