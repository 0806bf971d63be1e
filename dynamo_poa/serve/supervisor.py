"""Decides the order in which a graph's processes start and stop, and when a start has failed.

Owns: stages, readiness, the time a start and a stop may take, clean-up whatever happens.
Does not own: what runs (plan.py), one process's restarts (child.py), files (rundir.py), which records in
              discovery are a dead process's (dead_records.py).
Invariant: when `serve_graph` has exited, however it was left, no process and no file of the graph remains.
Source: written here rather than taken from a library: circus brings ZeroMQ and a daemon but no readiness,
        honcho neither restarts nor orders, supervisord wants files and a daemon of its own.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.errors import StartError
from dynamo_poa.serve import rundir
from dynamo_poa.serve.child import Child, Emit
from dynamo_poa.serve.dead_records import remove_dead_records
from dynamo_poa.serve.graph import Probe, Process, Registered, Stage
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.readiness import PROBE_TIMEOUT_S, is_up, shortfall

START_TIMEOUT_S = 120.0
STOP_S = 9.0  # contract: everything is gone 10 s after Ctrl-C
PROBE_INTERVAL_S = 0.05
STUCK_S = 30.0  # measured: the frontend is up after 1 to 3 s, and once in 75 starts on a busy machine never

log = structlog.get_logger()


class Running:
    """A graph that is being served."""

    def __init__(self, plan: Plan, emit: Emit, clock: Clock) -> None:
        self.plan = plan
        self._clock = clock
        self._children = {p.name: Child(p, plan.env, emit, clock, self._tidy) for p in plan.processes}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def http_url(self) -> str:
        """Return the frontend's address."""
        return self.plan.http_url

    @property
    def nats_url(self) -> str:
        """Return the NATS server's address."""
        return self.plan.nats_url

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Return the /metrics address of each of our own processes, by name."""
        return self.plan.metrics_urls

    def process(self, name: str) -> Child:
        """Return one process: its pid, restarts, last lines."""
        return self._children[name]

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process and, where the signal ends it, wait until it is gone; it will be restarted."""
        child = self._children[name]
        pid = child.pid
        child.send(number)
        while number in (signal.SIGKILL, signal.SIGTERM) and pid is not None and child.pid == pid:
            await self._clock.sleep(PROBE_INTERVAL_S)

    async def _tidy(self, ended: Process) -> None:
        """Take a process that has ended out of discovery, where its silence alone would tell of its end."""
        if isinstance(self.plan.discovery, Path):
            removed = await remove_dead_records(self.plan.discovery)
            if removed:
                log.info("poa.records.removed", process=ended.name, records=list(removed))

    async def wait(self) -> None:
        """Wait for ever, or until a process cannot be kept running."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def start(self, timeout_s: float) -> None:
        """Start stage after stage, each when the one before is up.

        Raises:  StartError when a process crashes too often or is not up in time.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for stage in Stage:
                children = [child for child in self._children.values() if child.spec.stage is stage]
                for child in children:
                    task = asyncio.create_task(child.keep(), name=f"process {child.spec.name}")
                    self._tasks[child.spec.name] = task
                await self._await_ready(children, session, deadline_s, timeout_s)

    async def stop(self, within_s: float) -> None:
        """Stop stage after stage in reverse order; who does not end in its share of the time is killed."""
        deadline_s = self._clock.monotonic_s() + within_s
        running: dict[Stage, list[Child]] = {}
        for name in self._tasks:
            running.setdefault(self._children[name].spec.stage, []).append(self._children[name])
        killed: list[str] = []
        for position, stage in enumerate(sorted(running, reverse=True)):
            share_s = (deadline_s - self._clock.monotonic_s()) / (len(running) - position)
            killed += await self._stop_stage(running[stage], max(share_s, 0.1))
        if killed:  # said last: whatever becomes of the log, nothing is left running
            log.warning("poa.process.killed", processes=killed)

    async def _stop_stage(self, children: list[Child], within_s: float) -> list[str]:
        """Stop these together and return the names of those that had to be killed."""
        tasks = [self._tasks[child.spec.name] for child in children]
        for child, task in zip(children, tasks, strict=True):
            child.stop()
            if child.pid is None:
                task.cancel()  # waiting to be restarted, or given up
        _, pending = await asyncio.wait(tasks, timeout=within_s)
        deaf = [child for child, task in zip(children, tasks, strict=True) if task in pending]
        for child in deaf:
            child.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [child.spec.name for child in deaf]

    async def _await_ready(
        self, children: list[Child], session: aiohttp.ClientSession, deadline_s: float, timeout_s: float
    ) -> None:
        waiting: dict[Probe, list[Child]] = {}
        for child in children:
            waiting.setdefault(child.spec.ready, []).append(child)
        stuck_at_s = self._clock.monotonic_s() + STUCK_S
        while waiting:
            if self._clock.monotonic_s() >= stuck_at_s:
                stuck_at_s += STUCK_S
                self._restart_stuck(child for waiters in waiting.values() for child in waiters)
            for name, task in self._tasks.items():
                if task.done() and not task.cancelled():
                    task.result()  # raises StartError
                    raise StartError(f"{name} ended during the start")
            for probe in list(waiting):
                if self._cannot_ask(probe) or await is_up(probe, session, self.plan.discovery):
                    for child in waiting.pop(probe):
                        child.ready = True
                        log.info("poa.process.ready", process=child.spec.name, pid=child.pid)
            if waiting and self._clock.monotonic_s() > deadline_s:
                raise StartError(await self._too_late(waiting, session, timeout_s))
            if waiting:
                await self._clock.sleep(PROBE_INTERVAL_S)

    def _restart_stuck(self, children: Iterable[Child]) -> None:
        """Start a frontend anew that is silent for too long; others may have a model to load."""
        for child in children:
            if child.spec.stage is Stage.FRONTEND:
                log.warning("poa.process.stuck", process=child.spec.name, after_s=STUCK_S)
                child.send(signal.SIGTERM)

    def _cannot_ask(self, probe: Probe) -> bool:
        """Tell whether discovery cannot be listed by us (Kubernetes): the router waits for its workers."""
        return isinstance(probe, Registered) and not self.plan.discovery

    async def _too_late(
        self, waiting: dict[Probe, list[Child]], session: aiohttp.ClientSession, timeout_s: float
    ) -> str:
        lines = [f"not up after {timeout_s:g} s (--start-timeout):"]
        for probe, children in waiting.items():
            names = ", ".join(child.spec.name for child in children)
            lines.append(f"{names}: {await shortfall(probe, session, self.plan.discovery)}; last lines:")
            lines += [f"  {child.spec.name} | {line}" for child in children for line in child.last_lines]
        return "\n".join(lines)


@asynccontextmanager
async def serve_graph(
    plan: Plan,
    emit: Emit = lambda name, line: None,
    clock: Clock | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    stop_s: float = STOP_S,
) -> AsyncIterator[Running]:
    """Serve a graph for as long as the block lasts.

    Args:     emit: gets every line of output, with the name of its process.
    Raises:   StartError when it does not come up; ConfigError when its files cannot be laid out.
    """
    running = Running(plan, emit, clock or SystemClock())
    try:
        rundir.create(plan)
        await running.start(start_timeout_s)
        rundir.write_state(plan)
        yield running
    finally:
        try:
            await _uninterrupted(running.stop(stop_s))
        finally:
            rundir.remove(plan)


async def _uninterrupted(cleanup: Coroutine[Any, Any, None]) -> None:
    """Finish cleaning up even when cancelled meanwhile; the cancellation comes after."""
    task = asyncio.ensure_future(cleanup)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
