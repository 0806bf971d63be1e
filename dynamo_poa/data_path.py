"""By which path a router process's requests and answers go: Dynamo's stream, or the relay.

Owns: bringing the relay up beside the served endpoints, pointing discovery to it, going back to the stream.
Does not own: whether it may be used at all (dynamo_host.py), how it works (relay.py and its parts).
Invariant: the stream path is always served. Discovery points to the relay only while the relay listens and
           understands what comes.
Source: architecture: choosing, booking and reporting do not know which path carries the bytes.
"""

import asyncio
import contextlib
import os
import resource
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.complaints import Complaints
from dynamo_poa.dynamo_host import WorkerPool
from dynamo_poa.errors import RecordUnchangeable
from dynamo_poa.frames import FrameLimits
from dynamo_poa.instance_record import InstanceRecord, store_of
from dynamo_poa.relay import MAX_CALLS, Relay, Route
from dynamo_poa.relay_answers import Answers
from dynamo_poa.relay_workers import WorkerConnections
from dynamo_poa.router import Leg
from dynamo_poa.values import Address

log = structlog.get_logger()

RECORD_WAIT_S = 10.0
RESTORE_PAUSE_S = 1.0
# Files of a request: its requester, its worker, and room for those that are just ending. Others are the
# process's own, and what Dynamo's endpoint needs for frames that are handed on.
FILES_PER_CALL, FILES_APART = 3, 1024


class Served(NamedTuple):
    """One leg as Dynamo serves it: its endpoint's path and instance id."""

    leg: Leg
    pool: WorkerPool
    endpoint: str
    instance_id: int


class RelayPath:
    """The relay of one process. Enter it when all legs are served.

    relay, answers, workers:  what they count
    in_force:                 requesters are sent here
    """

    def __init__(self, legs: list[Served], clock: Clock) -> None:
        self._legs, self._clock = legs, clock
        self._stack = AsyncExitStack()
        self._records: list[InstanceRecord] = []
        self._watch: asyncio.Task[None] | None = None
        self.in_force = False

    async def __aenter__(self) -> Self:
        """Listen, and send requesters here.

        Raises:  RecordUnchangeable when discovery cannot be rewritten, OSError when the relay cannot listen
                 where Dynamo does: nothing has changed then.
        """
        async with self._stack as stack:
            store = store_of(os.environ)
            for served in self._legs:
                record = InstanceRecord(store, served.endpoint, served.instance_id, self._clock)
                self._records.append(await stack.enter_async_context(record))
            own = [await record.wait(RECORD_WAIT_S) for record in self._records]
            host = own[0].host  # requesters reach Dynamo's own listener there, and so may workers
            self.workers = WorkerConnections(self._clock, alive=self._addresses)
            await stack.enter_async_context(self.workers)
            self.answers = await stack.enter_async_context(Answers(host, Complaints(self._clock)))
            self.relay = await stack.enter_async_context(
                Relay(
                    host,
                    self.answers,
                    self.workers.deliver,
                    self._clock,
                    limits=_limits(),
                    most_calls=_most_calls(),
                )
            )
            for served, address in zip(self._legs, own, strict=True):
                self.relay.serve(Route(served.leg.forward, address, served.pool.address))
            for record in self._records:  # when all legs are served, not before
                await record.rewrite(host, self.relay.port)
            stack.push_async_callback(self.restore)  # first of all, before anything closes
            self._watch = asyncio.create_task(self._give_up(), name="relay watch")
            self._stack = stack.pop_all()
        self.in_force = True
        log.info("poa.data_path.chosen", data_path="relay", reason="")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send requesters to Dynamo's own endpoints again, and close."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()

    async def restore(self) -> bool:
        """Send requesters to Dynamo's own endpoints from now on; what is running goes on.

        Returns:  whether all records are as they were; those that are not can be tried again.
        """
        done = True
        for record in self._records:
            try:
                await record.restore()
            except RecordUnchangeable as failed:
                done = False
                log.warning("poa.record.left", error=failed.reason)
        return done

    async def _give_up(self) -> None:
        """Go back to the stream once requesters speak otherwise than we know, or workers cannot reach us."""
        signs = [asyncio.create_task(sign.wait()) for sign in (self.relay.gave_up, self.answers.unheard)]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for sign in signs:
                sign.cancel()
        self.in_force = False
        reason = f"frames not understood: {dict(self.relay.handed_on)}"
        if self.answers.unheard.is_set():
            reason = f"no worker has ever dialled back to {self.answers.address}"
        log.error("poa.data_path.chosen", data_path="stream", reason=reason)
        while not await self.restore():
            await self._clock.sleep(RESTORE_PAUSE_S)

    async def drained(self, timeout_s: float) -> None:
        """Let what the relay serves end, for so long at most."""
        await self.relay.drained(timeout_s)

    def _addresses(self) -> list[Address]:
        return [address for served in self._legs for address in served.pool.addresses()]


def _limits() -> FrameLimits:
    """Return Dynamo's own bounds on a request, of which its users may set one."""
    try:
        return FrameLimits(payload_bytes=int(os.environ["DYN_TCP_MAX_MESSAGE_SIZE"]))
    except (KeyError, ValueError):  # as Dynamo reads it
        return FrameLimits()


def _most_calls() -> int:
    """Return how many requests this process has files for, having asked for as many as it may have.

    Beyond these requests are left to Dynamo's own endpoint: a worker that cannot dial back would be lost.
    """
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != hard:
        with contextlib.suppress(ValueError, OSError):  # a container may forbid even that
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            files = hard
    if files == resource.RLIM_INFINITY:
        return MAX_CALLS
    return min(max((files - FILES_APART) // FILES_PER_CALL, 1), MAX_CALLS)
