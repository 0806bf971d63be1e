"""A stalled process stands still when it should, and runs in the end."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from waiting import eventually

from dynamo_poa.bench.suites.cells import Stall
from dynamo_poa.bench.suites.stalls import check, stalling
from dynamo_poa.clock import ManualClock
from dynamo_poa.errors import ConfigError

STALL = Stall(role="decode", number=0, stall_s=2, period_s=6)


def state(pid: int) -> str:
    """Return what proc(5) says of a process: T is stopped, S sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def becomes(process: asyncio.subprocess.Process, wanted: str) -> None:
    """Wait until a process is in a state: signals take their time."""
    await eventually(lambda: state(process.pid) == wanted)


async def sleeper() -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    await becomes(process, "S")
    return process


async def test_a_worker_stands_still_for_the_last_two_of_every_six_seconds() -> None:
    """Issue 5: a worker that stalls 2 s in every 6."""
    process, clock = await sleeper(), ManualClock()
    try:
        async with stalling(STALL, lambda: process.pid, clock):
            for expected in ("S", "T", "S", "T"):
                await becomes(process, expected)
                await clock.advance(3.9 if expected == "S" else 1.9)
                assert state(process.pid) == expected
                await clock.advance(0.1)
            await becomes(process, "S")
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_it_runs_when_the_block_is_left_in_the_middle_of_a_stall(cancelled: bool) -> None:
    """Invariant: no process is left stopped, also on Ctrl-C."""
    process, clock, entered = await sleeper(), ManualClock(), asyncio.Event()

    async def block() -> None:
        async with stalling(STALL, lambda: process.pid, clock):
            entered.set()
            await asyncio.sleep(60 if cancelled else 0.2)

    try:
        task = asyncio.create_task(block())
        await entered.wait()
        await clock.advance(4.5)
        await becomes(process, "T")
        if cancelled:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await becomes(process, "S")
    finally:
        process.kill()
        await process.wait()
    assert process.returncode == -signal.SIGKILL


async def test_a_process_that_is_down_or_gone_is_left_alone() -> None:
    """A worker may die of something else meanwhile."""
    process, clock = await sleeper(), ManualClock()
    pids = iter((None, process.pid))
    async with stalling(STALL, lambda: next(pids), clock):
        await clock.advance(6)
        assert state(process.pid) == "S"
        await clock.advance(4)
        process.kill()
        await process.wait()
        await clock.advance(2)  # nobody is told to go on, and nothing is raised


@pytest.mark.parametrize(("stall_s", "period_s"), [(0, 6), (6, 6), (9, 20)])
def test_a_stall_that_never_ends_or_is_taken_for_a_death_is_refused(stall_s: float, period_s: float) -> None:
    """Dynamo drops a worker after 10 s of silence."""
    with pytest.raises(ConfigError, match=rf"stall_s = {stall_s:g}: must be > 0, < period_s"):
        check(Stall(role="decode", number=0, stall_s=stall_s, period_s=period_s))
