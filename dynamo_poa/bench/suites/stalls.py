"""Stands a worker still at regular times, as one does whose machine swaps or collects garbage.

Owns: when it is stopped and let go, and that it is let go in the end.
Does not own: which process it runs in (live_graphs.py).
Invariant: the process runs when the block has ended, however it ended; nobody else's process is signalled.
Source: signal(7). Dynamo drops a worker after 10 s of silence, so a stall is shorter.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from dynamo_poa.bench.suites.cells import Stall
from dynamo_poa.clock import Clock
from dynamo_poa.errors import ConfigError

MAX_STALL_S = 8.0


def check(stall: Stall) -> None:
    """Refuse a stall that never ends, or that Dynamo would take for a death.

    Raises:  ConfigError.
    """
    if not 0 < stall.stall_s < stall.period_s or stall.stall_s > MAX_STALL_S:
        raise ConfigError(
            [f"stall_s = {stall.stall_s:g}: must be > 0, < period_s = {stall.period_s:g}, <= {MAX_STALL_S:g}"]
        )


@asynccontextmanager
async def stalling(stall: Stall, pid: Callable[[], int | None], clock: Clock) -> AsyncIterator[None]:
    """Stall a process while the block lasts: let it run `period_s - stall_s`, stop it `stall_s`, and again.

    Args:  pid: of the process; None while it is down, which is left alone.
    """
    task = asyncio.create_task(_stall(stall, pid, clock), name="stall")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _stall(stall: Stall, pid: Callable[[], int | None], clock: Clock) -> None:
    started_s, number = clock.monotonic_s(), 0
    while True:
        number += 1
        until_s = started_s + number * stall.period_s  # by the clock, so that lateness does not add up
        await clock.sleep(until_s - stall.stall_s - clock.monotonic_s())
        stopped = pid()
        try:
            _send(stopped, signal.SIGSTOP)
            await clock.sleep(until_s - clock.monotonic_s())
        finally:
            _send(stopped, signal.SIGCONT)


def _send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
