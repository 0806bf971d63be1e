"""What a person sees of a running graph as it happens, on a terminal or as JSON lines.

Owns: taking telemetry in, the last changes, telling that nothing comes, the live display.
Does not own: how a record is shown (view.py), where it comes from (target.py).
Invariant: a silent controller is told apart from a quiet graph; memory is bounded.
"""

import asyncio
import sys
from collections import deque
from contextlib import suppress

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.serve.show import console
from dynamo_poa.serve.target import Target, connected
from dynamo_poa.serve.view import changes, record_view
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.wire import subject

REFRESH_S = 0.25
SILENT_S = 3.0  # a controller speaks every tick, and a tick is rarely more than a second
MAX_CHANGES = 8
MAX_BACKLOG = 1024  # records not yet printed; the oldest are then dropped and counted


class Feed:
    """Takes in telemetry and keeps what a viewer needs.

    latest:      the newest record, None before the first
    changes:     the last changes of regime and parameters, newest first
    backlog:     records since the viewer last took them, oldest first; only of a feed made with a backlog
    unreadable:  messages that are no record, such as another version's
    missed:      records dropped because the backlog was full
    """

    def __init__(self, clock: Clock, *, backlog: int = 0) -> None:
        self.latest: TelemetryRecord | None = None
        self.changes: deque[str] = deque(maxlen=MAX_CHANGES)
        self.backlog: deque[TelemetryRecord] = deque(maxlen=backlog)
        self.unreadable = 0
        self.missed = 0
        self._clock = clock
        self._heard_at_s = clock.monotonic_s()
        self._arrived = asyncio.Event()

    @property
    def silent_s(self) -> float:
        """Return how long nothing has come."""
        return self._clock.monotonic_s() - self._heard_at_s

    def take(self, _subject: str, data: bytes) -> None:
        """Take in one message from the telemetry subject."""
        try:
            record = msgspec.msgpack.decode(data, type=TelemetryRecord)
        except (msgspec.DecodeError, RecursionError):
            self.unreadable += 1
            return
        self.changes.extendleft(changes(self.latest, record))
        self.latest = record
        self._heard_at_s = self._clock.monotonic_s()
        if self.backlog.maxlen:
            self.missed += len(self.backlog) == self.backlog.maxlen
            self.backlog.append(record)
        self._arrived.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a record since the last call, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        self._arrived.clear()


def trouble(feed: Feed, target: Target, *, is_connected: bool) -> str:
    """Return what is wrong with hearing the controller, empty when nothing is."""
    found = []
    if not is_connected:
        found.append("NATS is away, connecting again")
    elif feed.latest is None or feed.silent_s > SILENT_S:
        found.append(f"no telemetry in namespace {target.namespace} for {feed.silent_s:.0f} s")
    if feed.unreadable:
        found.append(f"{feed.unreadable} unreadable records")
    if feed.missed:
        found.append(f"{feed.missed} records missed")
    return ", ".join(found)


def live_view(feed: Feed, target: Target, *, is_connected: bool) -> RenderableType:
    """Return the live display: what is wrong with hearing it, the newest record, the last changes."""
    wrong = trouble(feed, target, is_connected=is_connected)
    parts: list[RenderableType] = [Text(wrong, style="bold red")] if wrong else []
    if feed.latest is not None:
        parts += [record_view(feed.latest), Text(), Text("last changes", style="bold")]
        parts += [Text(line) for line in feed.changes or ["none since the start of this view"]]
    return Group(*parts)


async def watch_live(target: Target) -> None:
    """Show telemetry on the terminal until cancelled.

    Raises:  BusError when NATS does not answer at the start; later it is waited for.
    """
    clock = SystemClock()
    feed = Feed(clock)
    async with connected(target, "watch") as bus:
        bus.subscribe(subject(target.namespace, "telemetry"), feed.take)
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                live.update(live_view(feed, target, is_connected=bus.connected), refresh=True)
                await clock.sleep(REFRESH_S)


async def watch_json(target: Target) -> None:
    """Print one record a line until cancelled.

    Raises:  BusError as `watch_live`; BrokenPipeError when the reader has gone.
    """
    feed = Feed(SystemClock(), backlog=MAX_BACKLOG)
    said = ""
    async with connected(target, "watch") as bus:
        bus.subscribe(subject(target.namespace, "telemetry"), feed.take)
        while True:
            await feed.wait(SILENT_S)
            # Outside the handler, where the bus would take a reader that has gone for a bug of ours.
            while feed.backlog:
                sys.stdout.buffer.write(msgspec.json.encode(feed.backlog.popleft()) + b"\n")
                sys.stdout.buffer.flush()
            wrong = trouble(feed, target, is_connected=bus.connected)
            if wrong and not said:
                print(wrong, file=sys.stderr)
            said = wrong
