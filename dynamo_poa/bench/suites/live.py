"""Runs cells on live graphs: one graph a policy, all up at once, one of them under load at a time.

Owns: a block's life, the course of a cell: warm-up, measurement, drain; whether its graph lived through it.
Does not own: graphs and names (live_graphs.py), the load (live_client.py), what graphs say (live_watch.py),
              figures (live_result.py), the order of cells (runner.py).
Invariant: a cell that is started ends in a Result, whatever the graph does, unless it is cancelled. Graphs
           keep what they have learnt from cell to cell, as a service does: caches, speeds, baselines. Every
           graph has the same time to learn in before its first cell, whether or not its policy learns.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import msgspec

from dynamo_poa.bench.load import LoadClient
from dynamo_poa.bench.processes import cpu_s, machine_time
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import stalls
from dynamo_poa.bench.suites.cells import Cell, Fleet, NotANumber, Phase, Policy, Result
from dynamo_poa.bench.suites.live_client import Asked, LiveClient
from dynamo_poa.bench.suites.live_graphs import (
    frontend_ports,
    most_watches,
    plan_of,
    process_of,
    watches,
    worker_names,
)
from dynamo_poa.bench.suites.live_result import Reading, Span, picks_of, result_of
from dynamo_poa.bench.suites.live_watch import Watch
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import BusError, ConfigError, PoaError
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.workloads import stream

POA_WINDOW_S = 20.0
REQUEST_TIMEOUT_S = 300.0
DRAIN_S = 60.0
SETTLE_S = 0.5  # after the last answer: bookings and events of it are over
START_AT_ONCE = 3  # graphs: their imports are what takes the time, and a frontend may not take 30 s
FIRST_TICK_S = 10.0
MOST_PHASES = 16  # of a cell: what a stream's phases are numbered by


class Block:
    """One fleet under several policies, to run cells of.

    failed:  policies whose graph is not up, and why: refused or crashed; their cells fail at once

    Args:    poa_window_s: PoA-hat is that of the last so many seconds; where a cell measures less, the
             warm-up's too.
    """

    def __init__(
        self,
        fleet: Fleet,
        policies: Sequence[Policy],
        poa_window_s: float = POA_WINDOW_S,
        *,
        clock: Clock | None = None,
        most: int | None = None,
    ) -> None:
        self.failed: dict[str, str] = {}
        self._fleet, self._policies, self._poa_window_s = fleet, tuple(policies), poa_window_s
        self._clock: Clock = clock or SystemClock()
        self._running: dict[str, Running] = {}
        self._loaded_s: dict[str, float] = {}  # how long each graph has been under load
        self._stacks: list[AsyncExitStack] = []
        self._watches, self._most_watches = 0, most_watches() if most is None else most
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
                    self._watch_too(plan)
                    serving = serve_graph(plan, clock=self._clock)
                    self._running[policy.name] = await stack.enter_async_context(serving)
                    self._stacks.append(stack)
                except (PoaError, OSError) as error:
                    self.failed[policy.name] = f"the graph did not start: {error}"

        try:
            await asyncio.gather(*map(start, self._policies))
            complete = True
        finally:
            if not complete:
                await self._stop()
        return self

    def _watch_too(self, plan: Plan) -> None:
        """Count a graph's watches of discovery; those beyond the limit would see no worker and time out.

        Raises:  ConfigError.
        """
        most, wanted = self._most_watches, self._watches + watches(plan)
        if most is not None and wanted > most:
            raise ConfigError(
                [
                    f"fs.inotify.max_user_instances = {most}: must be >= {wanted} for the graphs up at once; "
                    f"sysctl -w fs.inotify.max_user_instances=1024"
                ]
            )
        self._watches = wanted

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
            before_s = self._loaded_s.get(cell.policy.name, 0.0)
            learn_s = 0.0 if before_s else cell.learn_s
            spans, given_up = await course.drive(client, learn_s)
            loaded_s = before_s + learn_s + cell.warm_up_s
            self._loaded_s[cell.policy.name] = loaded_s + sum(span.seconds for span in spans)
            picks = picks_of(asked, spans, watch.chosen if plugin else None, names)
            await self._clock.sleep(SETTLE_S)
        if _lives(running) != before:
            raise MeasurementError(f"a process died: {_difference(before, _lives(running))}")
        computed = watch.computed["prefill" if cell.fleet.prefill else "backend"]
        result = result_of(cell, asked, spans, computed, watch.points)
        unended = f"{given_up} requests had no end after {DRAIN_S:g} s" if given_up else ""
        reason = "; ".join(filter(None, (result.reason, unended)))
        return msgspec.structs.replace(
            result,
            reason=reason,
            picks=picks,
            health=result.health | {"loaded_s": loaded_s},
        )

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


class _Course:
    """One cell on its graph: what happens when."""

    def __init__(
        self,
        cell: Cell,
        running: Running,
        all_running: list[Running],
        watch: Watch,
        clock: Clock,
    ) -> None:
        self._cell, self._running, self._watch, self._clock = cell, running, watch, clock
        self._first_phase = first_phase(cell)
        self._idle = [other for other in all_running if other is not running]

    async def drive(self, client: LiveClient, learn_s: float = 0.0) -> tuple[list[Span], int]:
        """Warm up, measure, drain; return what was measured, and how many requests were given up.

        Args:  learn_s: of load before the warm-up.
        """
        cell, spans = self._cell, list[Span]()
        phases = cell.phases or (Phase(name="", load=cell.load, seconds=cell.seconds),)
        try:
            await client.load(phases[0].load, self._first_phase)
            await self._until(client, learn_s + cell.warm_up_s)
            self._watch.phase = phases[0].name
            self._watch.count()
            for number, phase in enumerate(phases):
                if number:
                    self._watch.phase = phase.name
                    await client.load(phase.load, self._first_phase + number)
                first = self._read(client)
                await self._until(client, phase.seconds)
                spans.append(Span(phase.name, first, self._read(client), self._watch.latest))
            self._watch.end()
        finally:
            given_up = await client.finish(DRAIN_S if len(spans) == len(phases) else 0)
        return spans, given_up

    async def _until(self, client: LiveClient, seconds: float) -> None:
        """Let time pass; a trace that is at its end is over when the last has been answered."""
        until_s = self._clock.monotonic_s() + seconds
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if client.exhausted:
                return
            await self._clock.sleep(min(left_s, 0.25))

    def _read(self, client: LiveClient) -> Reading:
        return Reading(
            at_s=self._clock.monotonic_s(),
            machine=machine_time(),
            own_s=_cpu_by_process(self._running),
            idle_s=sum(sum(_cpu_by_process(graph).values()) for graph in self._idle),
            client_s=time.process_time(),
            tokens=client.tokens,
        )


def first_phase(cell: Cell) -> int:
    """Return the number that a cell's first phase has among a seed's: every load asks anew.

    The same seed asks the same under every load, and on graphs that live on a second load's prompts would be
    in the caches already. The number is the same under every policy, or cells would not be paired, and after
    a restart that runs only what was missing.
    """
    return int(cell.question, 16) % (stream.MAX_PHASE // MOST_PHASES) * MOST_PHASES


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
