"""Which NATS connection is in use, and what to do when it is gone: start over, for ever.

Owns: connecting, noticing a dead or hung connection, subscribing anew, publish, request and reply,
      JetStream key-value access; counters of what was dropped or failed.
Does not own: what a message means (wire.py, params.py) or how often to publish.
Invariant: a `Bus` never ends by itself: whatever the server or a handler does, it connects again. For this
           alone it catches broadly, in two places: where handlers are called and where it reconnects.
Source: nats-py 2.16. Its own reconnection has a budget of 60 tries, and its `close` gives up half-way when
        data is pending on a dead connection, so each connection here is one client, replaced whole.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client

from dynamo_poa.clock import Clock
from dynamo_poa.errors import BusError, NoResponders

log = structlog.get_logger()

RECONNECT_WAIT_S = 0.5
CONNECT_TIMEOUT_S = 2
PING_INTERVAL_S = 5.0  # two unanswered pings in a row, each waited for this long: hung after 10-15 s
CLOSE_TIMEOUT_S = 1.0
LOG_EVERY_S = 1.0  # of a kind that may come by the thousand

PENDING_MESSAGES = 65_536  # about a second of a flood; what does not fit is dropped and counted
PENDING_BYTES = 64 * 2**20
OUTBOUND_BYTES = 4 * 2**20  # unsent data; refused beyond, because a full nats-py buffer blocks the caller
CLIENT_BUFFER_BYTES = 2 * OUTBOUND_BYTES  # nats-py's own bound: out of reach

# A subscription handles messages for so long, then lets the others and the reader go first. Reading then goes
# ahead of slow handling, so an overload ends in a counted drop here rather than in the server holding back
# the publishers and cutting us off. Fast handling gets through one read (up to 256 KiB) in a turn.
TURN_S = 0.002
PAUSE_S = 0.0005  # between two messages: longer than handling one takes

KV_HISTORY = 8
KV_VALUE_BYTES = 64 * 1024
KV_TIMEOUT_S = 2.0

# What nats-py raises when a connection dies under it: besides its own tree, sockets' OSError (TimeoutError
# included), closed transports' RuntimeError, its assertions about state, undecodable JSON answers.
CLIENT_ERRORS = (OSError, nats.errors.Error, RuntimeError, AssertionError, ValueError)

T = TypeVar("T")
Handler = Callable[[str, bytes], None]
Responder = Callable[[bytes], bytes]


class KvEntry(NamedTuple):
    """One revision of a key. `deleted` marks a delete or purge, whose value is empty."""

    value: bytes
    revision: int
    deleted: bool


class _Interest(NamedTuple):
    subject: str
    on_message: Callable[[Any], Awaitable[None]]
    pending_messages: int
    pending_bytes: int


class Bus:
    """A NATS connection that comes back. Enter it to start connecting; entering never waits for the server.

    reconnects:      connections made after the first
    dropped:         messages that did not fit a subscription's pending limits
    handler_errors:  exceptions that handlers and callbacks raised
    last_error:      the latest of any kind, in words
    """

    def __init__(
        self, url: str, *, name: str, clock: Clock, ping_interval_s: float = PING_INTERVAL_S
    ) -> None:
        self.url = _without_password(url)
        self.reconnects = 0
        self.dropped = 0
        self.handler_errors = 0
        self.last_error = ""
        self._servers = url
        self._name = name
        self._clock = clock
        self._ping_interval_s = ping_interval_s
        self._interests: list[_Interest] = []
        self._on_connect: list[Callable[[], None]] = []
        self._client: Any = None  # the connected one, None otherwise
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()  # wakes the watch: connection closed, or a new subscription
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._logged_at_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"bus {self._name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._closing = True
        self._changed.set()
        # More than once, because nats-py swallows a cancellation in some places.
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S * 2)
        if not self._task.cancelled():
            self._task.result()

    @property
    def connected(self) -> bool:
        """Tell whether a message published now would be handed to the server."""
        return self._client is not None and self._client.is_connected

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait for the first or the next connection.

        Raises:  BusError naming the server and the latest error.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError as error:
            detail = f" ({self.last_error})" if self.last_error else ""
            raise BusError(f"NATS at {self.url}: no connection within {timeout_s:g} s{detail}") from error

    def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        pending_messages: int = PENDING_MESSAGES,
        pending_bytes: int = PENDING_BYTES,
        gather_s: float = 0.0,
    ) -> None:
        """Call `handler(subject, data)` for each message, in order, from now on and on every connection.

        Args:  gather_s: a message that comes after a pause waits so long for others: waking up for each of
               many costs more than handling it. A stream without pauses never waits.
        """
        now_s = self._clock.monotonic_s
        turn_ends_at_s = handled_at_s = 0.0

        async def on_message(msg: Any) -> None:
            nonlocal turn_ends_at_s, handled_at_s
            if gather_s and now_s() - handled_at_s > PAUSE_S:
                await self._clock.sleep(gather_s)
            self._hand_over(subject, handler, msg.subject, msg.data)
            handled_at_s = now_s()
            if handled_at_s >= turn_ends_at_s:
                await asyncio.sleep(0)  # noqa: TID251  gives way, does not wait
                handled_at_s = now_s()
                turn_ends_at_s = handled_at_s + TURN_S

        self._add(_Interest(subject, on_message, pending_messages, pending_bytes))

    def respond(self, subject: str, handler: Responder) -> None:
        """Answer requests on `subject`; one whose handler raises gets no answer."""

        async def on_message(msg: Any) -> None:
            answer = self._hand_over(subject, handler, msg.data)
            if msg.reply and answer is not None:
                try:
                    await self.publish(msg.reply, answer)
                except BusError as error:
                    self.last_error = str(error)

        self._add(_Interest(subject, on_message, PENDING_MESSAGES, PENDING_BYTES))

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call back after each connect, subscriptions in place; at once when connected already."""
        self._on_connect.append(callback)
        if self.connected:
            self._hand_over("on_connect", callback)

    async def publish(self, subject: str, data: bytes) -> None:
        """Hand a message to the connection; never waits for the network.

        Raises:  BusError when not connected, when the data is too large, or when unsent data has piled up.
        """
        client = self._connected_client()
        if client.pending_data_size + len(data) > OUTBOUND_BYTES:
            raise BusError(f"NATS at {self.url}: {client.pending_data_size} bytes unsent, {subject} refused")
        try:
            await client.publish(subject, data)
        except CLIENT_ERRORS as error:
            raise self._bus_error(f"publish on {subject}", error) from error

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Return the first answer.

        Raises:  NoResponders when nobody serves the subject, BusError otherwise.
        """
        client = self._connected_client()
        try:
            answer = await heeding_cancellation(client.request(subject, data, timeout=timeout_s))
        except nats.errors.NoRespondersError as error:
            raise NoResponders(f"NATS at {self.url}: nobody answers on {subject}") from error
        except CLIENT_ERRORS as error:
            raise self._bus_error(f"request on {subject}", error) from error
        return bytes(answer.data)

    async def kv_get(self, bucket: str, key: str, revision: int | None = None) -> KvEntry | None:
        """Return the latest entry, or that of one revision; None when there is none. Creates the bucket.

        Raises:  BusError, also when JetStream is not enabled.
        """
        try:
            store = await heeding_cancellation(self._bucket(bucket))
            entry = await heeding_cancellation(store.get(key, revision=revision))
        except nats.js.errors.KeyNotFoundError as error:
            # nats-py reports delete and purge markers as "not found", with the marker attached.
            return None if error.entry is None else KvEntry(b"", error.entry.revision, deleted=True)
        except CLIENT_ERRORS as error:
            raise self._bus_error(f"read of {bucket}/{key}", error) from error
        return KvEntry(entry.value or b"", entry.revision, deleted=False)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Store a value and return its revision. Creates the bucket.

        Raises:  BusError, also when JetStream is not enabled or the value is larger than the bucket allows.
        """
        try:
            store = await heeding_cancellation(self._bucket(bucket))
            return int(await heeding_cancellation(store.put(key, value)))
        except CLIENT_ERRORS as error:
            raise self._bus_error(f"write of {bucket}/{key}", error) from error

    async def _bucket(self, bucket: str) -> Any:
        jetstream = self._connected_client().jetstream(timeout=KV_TIMEOUT_S)
        try:
            return await jetstream.key_value(bucket)
        except nats.js.errors.BucketNotFoundError:
            return await jetstream.create_key_value(
                bucket=bucket, history=KV_HISTORY, max_value_size=KV_VALUE_BYTES
            )

    def _add(self, interest: _Interest) -> None:
        self._interests.append(interest)
        self._changed.set()

    def _connected_client(self) -> Any:
        if not self.connected:
            raise BusError(f"NATS at {self.url}: not connected")
        return self._client

    async def _run(self) -> None:
        """Keep one connection after another until closed."""
        connections = 0
        while not self._closing:
            client = Client()
            try:
                await self._connect(client)
                await self._install(client, 0)
                connections += 1
                self.reconnects = connections - 1
                self._client = client
                self._ready.set()
                log.info("poa.bus.connected" if connections == 1 else "poa.bus.reconnected", url=self.url)
                for callback in self._on_connect:
                    self._hand_over("on_connect", callback)
                await self._watch(client)
            # Broad, not CLIENT_ERRORS: nobody awaits this task while the bus is open, so to end here is to be
            # deaf for good, and what nats-py's parser and state may raise is written nowhere.
            except Exception as error:
                self.last_error = repr(error)
            finally:
                was_connected, self._client = self._client is not None, None
                self._ready.clear()
                await _dispose(client)
            if was_connected and not self._closing:
                log.warning("poa.bus.disconnected", url=self.url, last_error=self.last_error)
            if not self._closing:
                await self._clock.sleep(RECONNECT_WAIT_S)

    async def _connect(self, client: Client) -> None:
        async def on_error(error: Exception) -> None:
            if isinstance(error, nats.errors.SlowConsumerError):
                self.dropped += 1
                if self._may_log("dropped"):
                    log.warning("poa.bus.dropped", subject=error.subject, dropped=self.dropped)
            else:
                self.last_error = repr(error)

        async def on_closed() -> None:
            self._changed.set()

        await client.connect(
            self._servers,
            name=self._name,
            error_cb=on_error,
            closed_cb=on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=-1,  # of the first connect: without a server it tries until cancelled
            reconnect_time_wait=RECONNECT_WAIT_S,
            connect_timeout=CONNECT_TIMEOUT_S,
            pending_size=CLIENT_BUFFER_BYTES,
        )

    async def _install(self, client: Client, first: int) -> int:
        """Subscribe to all interests from number `first` on; return how many there are in all."""
        for interest in self._interests[first:]:
            await client.subscribe(
                interest.subject,
                cb=interest.on_message,
                pending_msgs_limit=interest.pending_messages,
                pending_bytes_limit=interest.pending_bytes,
            )
            first += 1
        await client.flush(timeout=CONNECT_TIMEOUT_S)
        return first

    async def _watch(self, client: Client) -> None:
        """Return once the connection is gone, hangs, or the bus is closing."""
        installed, unanswered = len(self._interests), 0
        while not self._closing and unanswered < 2:
            self._changed.clear()
            if not client.is_connected:
                return
            if installed < len(self._interests):
                installed = await self._install(client, installed)
            try:
                async with asyncio.timeout(self._ping_interval_s):
                    await self._changed.wait()
                continue
            except TimeoutError:
                pass
            try:
                await client.flush(timeout=self._ping_interval_s)
                unanswered = 0
            except nats.errors.FlushTimeoutError as error:
                unanswered += 1
                self.last_error = repr(error)

    def _hand_over(self, subject: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """Call a handler or callback; return its answer, None when it failed."""
        try:
            return call(*arguments)
        # Broad: what a handler may raise is not the bus's to know, and one handler's bug must end neither its
        # own feed nor the connection that all share.
        except Exception as error:
            self.handler_errors += 1
            self.last_error = repr(error)
            if self._may_log("handler_failed"):
                log.error(
                    "poa.bus.handler_failed", subject=subject, failures=self.handler_errors, exc_info=error
                )
            return None

    def _may_log(self, kind: str) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_at_s.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        self._logged_at_s[kind] = now_s
        return True

    def _bus_error(self, what: str, error: Exception) -> BusError:
        if isinstance(error, nats.js.errors.ServiceUnavailableError | nats.js.errors.NoStreamResponseError):
            return BusError(f"NATS at {self.url}: {what}: JetStream is not enabled or not ready")
        return BusError(f"NATS at {self.url}: {what}: {str(error) or type(error).__name__}")


async def heeding_cancellation(call: Awaitable[T]) -> T:
    """Await a call of nats-py without losing a cancellation.

    It waits with `asyncio.wait_for`, which in Python 3.11 returns the answer and forgets the cancellation
    when both come at once; the caller would then run on for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def _dispose(client: Any) -> None:
    """Close a client and leave nothing of it behind, whatever state it is in.

    The one place that reaches into nats-py: `close` waits without limit for a peer that takes no data, and
    when the connection died with data pending it raises before it has stopped its tasks and its socket.
    """
    tasks = [client._reading_task, client._ping_interval_task, client._flusher_task]
    tasks += [subscription._wait_for_msgs_task for subscription in client._subs.values()]
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
    except CLIENT_ERRORS:
        pass  # it is being thrown away because it failed
    left = [task for task in tasks if task is not None and not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def _without_password(url: str) -> str:
    return url.replace(f"{urlsplit(url).netloc.rpartition('@')[0]}@", "") if "@" in url else url
