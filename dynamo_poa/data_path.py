"""By which path a router process's requests and answers go: Dynamo's stream, or the relay where it can be had.

Owns: bringing the relay up beside the served endpoints, pointing discovery to it, going back to the stream.
Does not own: whether it may be used at all (dynamo_host.py), how it works (relay.py and its parts).
Invariant: the stream path is always served. Discovery points to the relay only while the relay listens and
           understands what comes.
Source: architecture: choosing, booking and reporting do not know which path carries the bytes.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.dynamo_host import WorkerPool
from dynamo_poa.errors import RecordUnchangeable
from dynamo_poa.instance_record import InstanceRecord, store_of
from dynamo_poa.relay import Relay, Route
from dynamo_poa.relay_answers import Answers
from dynamo_poa.relay_workers import WorkerConnections
from dynamo_poa.router import Leg
from dynamo_poa.values import Address

log = structlog.get_logger()

RECORD_WAIT_S = 10.0


class Served(NamedTuple):
    """One leg as Dynamo serves it: its endpoint's path and instance id."""

    leg: Leg
    pool: WorkerPool
    endpoint: str
    instance_id: int


class RelayPath:
    """The relay of one process. Enter it when all legs are served.

    relay:  what it counts
    """

    def __init__(self, legs: list[Served], clock: Clock) -> None:
        self._legs, self._clock = legs, clock
        self._stack = AsyncExitStack()
        self._records: list[InstanceRecord] = []
        self._watch: asyncio.Task[None] | None = None
        self.relay: Relay | None = None

    async def __aenter__(self) -> Self:
        """Listen, and send requesters here.

        Raises:  RecordUnchangeable when discovery cannot be rewritten: nothing has changed then.
        """
        async with self._stack as stack:
            store = store_of(os.environ)
            for served in self._legs:
                record = InstanceRecord(store, served.endpoint, served.instance_id, self._clock)
                self._records.append(await stack.enter_async_context(record))
            own = [await record.wait(RECORD_WAIT_S) for record in self._records]
            host = own[0].host  # requesters reach Dynamo's own listener there, and so may workers
            workers = WorkerConnections(self._clock, alive=self._addresses)
            await stack.enter_async_context(workers)
            answers = await stack.enter_async_context(Answers(host))
            relay = await stack.enter_async_context(Relay(host, answers, workers.deliver, self._clock))
            for served, address, record in zip(self._legs, own, self._records, strict=True):
                relay.serve(Route(served.leg.forward, address, served.pool.address))
                await record.rewrite(host, relay.port)
            stack.push_async_callback(self.restore)  # first of all, before anything closes
            self._watch = asyncio.create_task(self._give_up(relay), name="relay watch")
            self.relay = relay
            self._stack = stack.pop_all()
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

    async def restore(self) -> None:
        """Send requesters to Dynamo's own endpoints from now on; what is running goes on."""
        for record in self._records:
            try:
                await record.restore()
            except RecordUnchangeable as failed:
                log.warning("poa.record.left", error=failed.reason)

    async def _give_up(self, relay: Relay) -> None:
        """Go back to the stream once requesters speak otherwise than we know."""
        await relay.gave_up.wait()
        reason = f"frames not understood: {dict(relay.foreign)}"
        log.error("poa.data_path.chosen", data_path="stream", reason=reason)
        await self.restore()

    async def drained(self, timeout_s: float) -> None:
        """Let what the relay serves end, for so long at most."""
        if self.relay is not None:
            await self.relay.drained(timeout_s)

    def _addresses(self) -> list[Address]:
        return [address for served in self._legs for address in served.pool.addresses()]
