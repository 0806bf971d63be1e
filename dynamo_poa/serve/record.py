"""What a recording takes in, and when it ends.

Owns: the subjects that are recorded, progress on stderr, the closing words.
Does not own: the file format (recording.py), the connection (target.py).
Invariant: messages are written as they come, so memory does not grow; nothing ends a recording but its time,
           the person, or a file that cannot be written.
Source: event plane of the graph's two namespaces; contract Decision of the architecture; discovery is on no
        bus, so the controller announces the workers' cards (cards.py).
"""

import asyncio
import math
import sys
from contextlib import suppress
from pathlib import Path

from dynamo_poa import __version__
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import RecordingError
from dynamo_poa.recording import FORMAT, Header, Writer
from dynamo_poa.serve.target import Target, connected
from dynamo_poa.wire import subject

PROGRESS_S = 1.0


def recorded_subjects(namespace: str) -> list[str]:
    """Return the subjects of a graph's recording.

    Workers that the frontend sees directly stand in the graph's own namespace: decode ones with
    `legs: [prefill]`.
    """
    workers = CommonConfig(namespace=namespace).worker_namespace
    dynamo = [f"namespace.{name}.component.*.endpoint.*.*" for name in (workers, namespace)]
    return dynamo + [subject(namespace, topic) for topic in ("decisions", "params", "cards", "telemetry")]


class _Tap:
    """Writes what the bus hands over. Keeps a failure for `record`, because the bus would swallow it."""

    def __init__(self, writer: Writer, clock: Clock) -> None:
        self.failure: RecordingError | None = None
        self.closed = asyncio.Event()
        self._writer = writer
        self._clock = clock
        # Instants advance with the monotonic clock: a recording in which time goes back cannot be replayed.
        self._epoch_s = clock.wall_s() - clock.monotonic_s()

    def take(self, message_subject: str, data: bytes) -> None:
        if self.closed.is_set():  # messages still come between the end and the connection's
            return
        try:
            self._writer.write(self._epoch_s + self._clock.monotonic_s(), message_subject, data)
        except RecordingError as error:
            self.failure = error
            self.closed.set()


async def record(target: Target, path: Path, duration_s: float | None) -> None:
    """Record until the time is over or the task is cancelled; either way the file is whole.

    Raises:  RecordingError when the file cannot be written, BusError when NATS does not answer at the start.
    """
    clock = SystemClock()
    header = Header(
        recording=FORMAT, namespace=target.namespace, started_at_s=clock.wall_s(), version=__version__
    )
    async with connected(target, "record") as bus:
        with Writer(path, header) as writer:
            tap = _Tap(writer, clock)
            for name in recorded_subjects(target.namespace):
                bus.subscribe(name, tap.take)
            with suppress(asyncio.CancelledError):  # a person's way to end it, and there is more to say
                await _until_over(tap, writer, clock, duration_s)
            tap.closed.set()
        _say(f"{path}: {_size(writer)}")
        if not writer.messages:
            _say(f"nothing was heard in namespace {target.namespace} at {bus.url}")
        if bus.dropped:
            _say(f"{bus.dropped} messages came too fast and are missing")
        if bus.reconnects:
            _say(f"NATS went away {bus.reconnects} times")


async def _until_over(tap: _Tap, writer: Writer, clock: Clock, duration_s: float | None) -> None:
    started_s = clock.monotonic_s()
    left_s = math.inf if duration_s is None else duration_s
    while left_s > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, PROGRESS_S)):
                await tap.closed.wait()
        if tap.failure is not None:
            raise tap.failure
        writer.flush()
        elapsed_s = clock.monotonic_s() - started_s
        if sys.stderr.isatty():
            _say(f"{elapsed_s:.0f} s, {_size(writer)}", end="")
        left_s = math.inf if duration_s is None else duration_s - elapsed_s


def _size(writer: Writer) -> str:
    return f"{writer.messages} messages, {writer.written_bytes / 1e6:.2f} MB"


def _say(text: str, end: str = "\n") -> None:
    over = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress line gives way
    print(f"{over}{text}", end=end, file=sys.stderr, flush=True)
