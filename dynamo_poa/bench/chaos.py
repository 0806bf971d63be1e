"""Decides which process of a served graph is ended next, and when the graph is whole again.

Owns: drawing a process and a signal, telling whose requests are on it, waiting for it to be back.
Does not own: restarting it (serve/), the pauses in between (soak.py).
Invariant: one process at a time: the next is ended only when the graph is whole, so that there is always
           somebody who could have served a request. Whom it hits follows from the seed.
"""

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec

from dynamo_poa.bench.processes import listening_ports
from dynamo_poa.bench.soak_report import Hit
from dynamo_poa.clock import Clock
from dynamo_poa.errors import PoaError
from dynamo_poa.serve.graph import Process, Stage
from dynamo_poa.serve.readiness import is_up
from dynamo_poa.serve.supervisor import Running
from dynamo_poa.values import Address

KINDS = ("prefill", "decode", "router", "nats")  # as names of processes begin
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
WHOLE_S = 60.0
LOOK_S = 0.1


class NotWhole(PoaError):
    """Stop: the graph does not come back, and what would be ended next could leave nobody."""


class Chaos:
    """Ends one process after the other and waits until the graph is whole again.

    hits:  what was ended
    """

    def __init__(
        self, running: Running, http: aiohttp.ClientSession, rng: random.Random, clock: Clock
    ) -> None:
        self._running, self._http, self._rng, self._clock = running, http, rng, clock
        self._deck: list[tuple[str, signal.Signals]] = []
        self.hits: list[Hit] = []

    async def end_one(self, kinds: tuple[str, ...]) -> Hit:
        """End a process drawn by lot, of one of these kinds.

        Raises:  NotWhole when the graph is not whole in time.
        """
        kind, number = self._draw(kinds)
        names = [p.name for p in self._running.plan.processes if p.name.partition("-")[0] == kind]
        name = self._rng.choice(names)
        pid = self._running.process(name).pid
        hit = Hit(
            at_s=self._clock.monotonic_s(),
            process=name,
            signal=number.name,
            worker_ids=tuple(self._worker_ids(name)),
            router_id=f"{name}-{pid}" if kind == "router" else "",
        )
        await self._running.kill(name, number)
        self.hits.append(hit)  # should the graph stay broken, this is why
        await self.whole()
        self.hits[-1] = msgspec.structs.replace(hit, back_s=self._clock.monotonic_s() - hit.at_s)
        return self.hits[-1]

    def _draw(self, kinds: tuple[str, ...]) -> tuple[str, signal.Signals]:
        """Draw from a shuffled deck of all kinds and signals, so that none is left out for long."""
        while True:
            if not self._deck:
                self._deck = [(kind, number) for kind in KINDS for number in SIGNALS]
                self._rng.shuffle(self._deck)
            kind, number = self._deck.pop()
            if kind in kinds:
                return kind, number

    def unasked(self) -> dict[str, int]:
        """Return restarts by process that were none of ours."""
        ours = Counter(hit.process for hit in self.hits)
        restarts = {p.name: self._running.process(p.name).restarts for p in self._running.plan.processes}
        return {name: count - ours[name] for name, count in restarts.items() if count != ours[name]}

    async def whole(self) -> None:
        """Wait until every process is up, and every worker where requests can find it.

        Raises:  NotWhole.
        """
        missing: list[str] = []
        try:
            async with asyncio.timeout(WHOLE_S):
                while missing := [p.name for p in self._running.plan.processes if not await self._up(p)]:
                    await self._clock.sleep(LOOK_S)
        except TimeoutError:
            raise NotWhole(f"not up again after {WHOLE_S:g} s: {', '.join(missing)}") from None

    async def _up(self, process: Process) -> bool:
        if self._running.process(process.name).pid is None:
            return False
        if process.stage is Stage.WORKERS:
            return bool(self._worker_ids(process.name))
        return await is_up(process.ready, self._http, self._running.plan.discovery)

    def _worker_ids(self, name: str) -> set[int]:
        """Return the instances that discovery lists at a port a process listens on; none but a worker's."""
        pid, folder = self._running.process(name).pid, self._running.plan.discovery
        spec = next(p for p in self._running.plan.processes if p.name == name)
        if pid is None or spec.stage is not Stage.WORKERS or not isinstance(folder, Path):
            return set()
        found = set[int]()
        with contextlib.suppress(FileNotFoundError):  # the process has gone meanwhile
            ports = listening_ports(pid)
            for entry in (folder / "v1" / "instances").iterdir():
                if entry.name.startswith("."):
                    continue  # not ready
                with contextlib.suppress(FileNotFoundError):  # a record has: another process's, mostly
                    record = json.loads(entry.read_bytes())
                    if Address.parse(record["transport"]["tcp"]).port in ports:
                        found.add(int(record["instance_id"]))
        return found
