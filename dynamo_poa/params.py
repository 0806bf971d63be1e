"""Which router parameters are in force: how they are published, judged, held and given up.

Owns: the stored record's JSON, refusal by reason, the lease, take-over, healing of the store.
Does not own: which values are right (policies), the transport (bus.py), how Dynamo takes them (router.py).
Invariant: what a router reads is always a valid record: the last good one, or after its lease the static one.
Source: Contracts of the architecture: heartbeat every second, store for late joiners, lease.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import structlog

from dynamo_poa import telemetry
from dynamo_poa.bus import KV_HISTORY, Bus, KvEntry
from dynamo_poa.clock import Clock
from dynamo_poa.errors import ActuationError, BusError, ParamsError
from dynamo_poa.values import Mode, ParamsKind, Regime, RouterParams, Selection
from dynamo_poa.wire import Heartbeat, subject

log = structlog.get_logger()

Source = Literal["static", "heartbeat", "store"]

KEY = "params"
MAX_RECORD_BYTES = 16 * 1024  # a record is about 200 bytes
LEASE_CHECK_S = 0.5
STORE_RETRY_S = 1.0  # JetStream needs a moment after a server's start
REFUSAL_LOG_S = 10.0


def bucket(namespace: str) -> str:
    """Return the key-value bucket of a namespace; its one key is `params`."""
    return f"poa_{namespace}"


def encode_params(params: RouterParams) -> bytes:
    """Return the stored form: JSON, because operators read and write it by hand."""
    return msgspec.json.encode(params)


def decode_params(data: bytes) -> RouterParams:
    """Return the record, or refuse it whole.

    Only τ and ω are required, as in a record written by hand; its kind is then `external`, its selection
    Dynamo's own.
    Unknown keys are tolerated.

    Raises:  ParamsError with a reason of `empty`, `too_large`, `not_json`, `missing`, `type`, `not_finite`
             or `out_of_range`.
    """
    _check_size(data)
    try:
        # The standard library's parser on purpose: it takes NaN and Infinity, so that they are refused
        # for what they are, by key, instead of as bad JSON.
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParamsError("not_json", "record", _shown(data), "JSON") from error
    if not isinstance(raw, dict):
        raise ParamsError("type", "record", _shown(data), "a JSON object")
    fields = {name: raw[name] for name in RouterParams.__struct_fields__ if name in raw}
    for name in ("router_temperature", "overlap_weight"):
        if name not in fields:
            raise ParamsError("missing", name, None, "present")
    fields.setdefault("revision", 0)
    fields["kind"] = _member(ParamsKind, "kind", fields.get("kind", ParamsKind.EXTERNAL))
    fields["selection"] = _member(Selection, "selection", fields.get("selection", Selection.KV))
    fields["regime"] = _member(Regime, "regime", fields.get("regime", Regime.BELOW))
    if not isinstance(fields.get("reason", ""), str):
        raise ParamsError("type", "reason", fields["reason"], "text")
    return RouterParams(**fields)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Return the heartbeat, or refuse it whole.

    Raises:  ParamsError, with the reasons of `decode_params`, `not_msgpack` in place of `not_json`.
    """
    _check_size(data)
    try:
        return msgspec.msgpack.decode(data, type=Heartbeat)
    except msgspec.ValidationError as error:
        raise ParamsError("type", "heartbeat", str(error), "a Heartbeat") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ParamsError("not_msgpack", "heartbeat", _shown(data), "msgpack") from error


class ParamsHolder:
    """The router's side, pure: which record is in force.

    current:       read on the request path, without a lock or an await; never None, never invalid
    source:        where it came from
    refused:       refusals by reason
    last_refusal:  the latest, None before the first
    """

    def __init__(self, static: RouterParams, *, clock_s: Callable[[], float]) -> None:
        self.static = static
        self.current = static
        self.source: Source = "static"
        self.refused: Counter[str] = Counter()
        self.last_refusal: ParamsError | None = None
        self._clock_s = clock_s
        self._received_at_s = 0.0

    def offer(
        self, params: RouterParams, source: Literal["heartbeat", "store"], at_s: float | None = None
    ) -> bool:
        """Take the record over and start its lease anew; return False when it is not taken.

        A leased record gives way to a higher revision only; the same record renews its own lease. With
        none leased any is taken: a controller that lost its store starts to count from the beginning.
        """
        if self.source != "static":
            held = self.current
            if params.revision < held.revision and source == "store":
                return False  # nothing wrong with it: a heartbeat was faster than the read
            if params.revision < held.revision:
                return self._refuse(
                    ParamsError("stale_revision", "revision", params.revision, f">= {held.revision}")
                )
            if params.revision == held.revision and not params.same_values(held):
                return self._refuse(
                    ParamsError(
                        "conflict", "revision", params.revision, f"> {held.revision} to change values"
                    )
                )
        if params != self.current:
            self.current = params
        self.source = source
        self._received_at_s = self._clock_s() if at_s is None else at_s
        return True

    def offer_bytes(
        self, data: bytes, source: Literal["heartbeat", "store"], at_s: float | None = None
    ) -> bool:
        """Decode and offer: a heartbeat's message or the store's entry. What cannot be decoded is refused."""
        try:
            params = decode_heartbeat(data).params if source == "heartbeat" else decode_params(data)
        except ParamsError as error:
            return self._refuse(error)
        return self.offer(params, source, at_s)

    def expire(self, at_s: float | None = None) -> bool:
        """Fall back to the static record when the lease is over; return True once, when that happens."""
        now_s = self._clock_s() if at_s is None else at_s
        if self.source == "static" or now_s - self._received_at_s < self.current.lease_s:
            return False
        self.current, self.source = self.static, "static"
        return True

    def _refuse(self, error: ParamsError) -> bool:
        self.refused[error.reason] += 1
        self.last_refusal = error
        return False


class _RefusalLog:
    """Says the first refusal of a reason at once, then one of them every ten seconds at most."""

    def __init__(self, namespace: str, clock: Clock) -> None:
        self._namespace = namespace
        self._clock = clock
        self._said_at_s: dict[str, float] = {}

    def say(self, error: ParamsError, source: str, count: int) -> None:
        now_s = self._clock.monotonic_s()
        said_at_s = self._said_at_s.get(error.reason)
        if said_at_s is not None and now_s - said_at_s < REFUSAL_LOG_S:
            return
        self._said_at_s[error.reason] = now_s
        log.warning(
            telemetry.PARAMS_REFUSED,
            namespace=self._namespace,
            source=source,
            refusal=error.reason,
            key=error.key,
            value=repr(error.value),
            bound=error.bound,
            count=count,
        )


class ParamsSubscriber:
    """The router's side: feeds a holder from heartbeats and the store, and ends leases.

    Without a server it waits for one; `wait_loaded` tells when the first word on parameters has come.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        holder: ParamsHolder,
        clock: Clock,
        *,
        on_change: Callable[[RouterParams], None] | None = None,
    ) -> None:
        self.holder = holder
        self._bus = bus
        self._namespace = namespace
        self._clock = clock
        self._on_change = on_change
        self._refusals = _RefusalLog(namespace, clock)
        self._loaded = asyncio.Event()
        self._read_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._bus.subscribe(subject(self._namespace, "params"), self._on_heartbeat)
        self._bus.on_connect(self._read_due.set)
        self._tasks = [
            asyncio.create_task(self._read_store_when_due(), name="params store"),
            asyncio.create_task(self._watch_lease(), name="params lease"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until a heartbeat came or the store was read, even if it is empty; False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            return False
        return True

    def _on_heartbeat(self, _subject: str, data: bytes) -> None:
        self._offer(data, "heartbeat")

    def _offer(self, data: bytes, source: Literal["heartbeat", "store"]) -> None:
        before, refusal_before = self.holder.current, self.holder.last_refusal
        if self.holder.offer_bytes(data, source):
            self._loaded.set()
        refusal = self.holder.last_refusal
        if refusal is not None and refusal is not refusal_before:
            self._refusals.say(refusal, source, self.holder.refused[refusal.reason])
        if self.holder.current is not before:
            self._changed(telemetry.PARAMS_TAKEN)

    async def _read_store_when_due(self) -> None:
        while True:
            await self._read_due.wait()
            self._read_due.clear()
            try:
                entry = await self._bus.kv_get(bucket(self._namespace), KEY)
            except BusError as error:
                log.debug(telemetry.PARAMS_UNREAD, namespace=self._namespace, error=str(error))
                if self._bus.connected:  # otherwise the next connect calls again
                    await self._clock.sleep(STORE_RETRY_S)
                    self._read_due.set()
                continue
            if entry is not None and not entry.deleted:
                self._offer(entry.value, "store")
            self._loaded.set()

    async def _watch_lease(self) -> None:
        while True:
            await self._clock.sleep(LEASE_CHECK_S)
            if self.holder.expire():
                self._changed(telemetry.PARAMS_EXPIRED)

    def _changed(self, event: str) -> None:
        params = self.holder.current
        log.info(
            event, namespace=self._namespace, source=self.holder.source, **msgspec.structs.asdict(params)
        )
        if self._on_change is not None:
            self._on_change(params)


class ParamsPublisher:
    """The controller's side: says what is in force, stores it, and minds what others write to the store.

    mode:          what the heartbeats say; may be changed
    current:       the record the heartbeats carry: the last that went out, None before the first
    refused:       bad stored records by reason; `deleted` counts delete and purge markers
    store_errors:  writes that failed; each is made good by a later `poll_store`
    """

    def __init__(self, bus: Bus, namespace: str, controller_id: str, clock: Clock, mode: Mode) -> None:
        self.mode = mode
        self.current: RouterParams | None = None
        self.refused: Counter[str] = Counter()
        self.store_errors = 0
        self._bus = bus
        self._namespace = namespace
        self._controller_id = controller_id
        self._clock = clock
        self._refusals = _RefusalLog(namespace, clock)
        self._seen_revision = 0  # of the store, not of the record: the newest entry we wrote or dealt with
        self._unsaved = False
        self._written: RouterParams | None = None  # the last we tried to store, with success or without

    async def load(self) -> RouterParams | None:
        """Return the newest good record of the store's history, for a controller that takes over.

        Its revision is the highest of the history, so that counting on from it is above all that went
        before, also when an operator's record without a revision is the newest.

        Raises:  BusError when the store cannot be read.
        """
        newest = await self._bus.kv_get(bucket(self._namespace), KEY)
        if newest is None:
            return None
        self._seen_revision = newest.revision
        found: RouterParams | None = None
        highest = 0
        for revision in range(newest.revision, max(0, newest.revision - KV_HISTORY), -1):
            entry = await self._bus.kv_get(bucket(self._namespace), KEY, revision)
            if entry is None:
                continue
            params = self._judge(entry)
            if params is not None:
                found = found or params
                highest = max(highest, params.revision)
        return found and msgspec.structs.replace(found, revision=highest)

    async def publish(self, params: RouterParams) -> None:
        """Make `params` the record in force: heartbeat at once, then the store.

        Raises:  ActuationError when neither worked; the record before is then still in force. One is enough:
                 the other follows, with the next heartbeat or `poll_store`.
        """
        unsaid: BusError | None = None
        try:
            await self._say(params)
            self.current = params  # at once: the caller may not wait for the store
        except BusError as error:
            unsaid = error
        try:
            await self._store(params)
            self.current = params
        except BusError:
            if unsaid is not None:
                raise ActuationError(f"revision {params.revision} not published: {unsaid}") from unsaid

    async def heartbeat(self) -> None:
        """Repeat the record in force, which renews its lease; nothing before the first `publish`.

        Raises:  BusError when not connected.
        """
        if self.current is not None:
            await self._say(self.current)

    async def _say(self, params: RouterParams) -> None:
        message = Heartbeat(
            controller_id=self._controller_id,
            sent_at_s=self._clock.wall_s(),
            mode=self.mode,
            params=params,
        )
        await self._bus.publish(subject(self._namespace, "params"), msgspec.msgpack.encode(message))

    async def poll_store(self) -> RouterParams | None:
        """Return a valid record that somebody else wrote, once, for the caller to adopt under a new revision.

        What is bad, deleted or lost is replaced by the record in force, once for each foreign write, so
        that a late joiner reads a good one.

        Raises:  BusError when the store cannot be read or healed; the next call tries again.
        """
        entry = await self._bus.kv_get(bucket(self._namespace), KEY)
        if entry is None:
            self._unsaved = True
        elif entry.revision != self._seen_revision:
            self._seen_revision = entry.revision
            params = self._judge(entry)
            if params is None:
                self._unsaved = True
            elif self._is_news(params):
                return params
        if self._unsaved and self.current is not None:
            await self._store(self.current)
            log.info(telemetry.PARAMS_RESTORED, namespace=self._namespace, revision=self.current.revision)
        return None

    def _is_news(self, params: RouterParams) -> bool:
        if params == self._written:  # our own, whose answer was lost
            return False
        # Keeps two controllers that were started by mistake from adopting each other's records for ever.
        current = self.current
        return current is None or params.kind != current.kind or not params.same_values(current)

    def _judge(self, entry: KvEntry) -> RouterParams | None:
        try:
            if entry.deleted:
                raise ParamsError("deleted", "record", None, "present")
            return decode_params(entry.value)
        except ParamsError as error:
            self.refused[error.reason] += 1
            self._refusals.say(error, "store", self.refused[error.reason])
            return None

    async def _store(self, params: RouterParams) -> None:
        self._unsaved = True
        self._written = params
        try:
            self._seen_revision = await self._bus.kv_put(bucket(self._namespace), KEY, encode_params(params))
        except BusError:
            self.store_errors += 1
            raise
        self._unsaved = False


def _check_size(data: bytes) -> None:
    if not data:
        raise ParamsError("empty", "record", b"", "present")
    if len(data) > MAX_RECORD_BYTES:
        raise ParamsError("too_large", "record", f"{len(data)} bytes", f"<= {MAX_RECORD_BYTES} bytes")


def _member(kind: type[StrEnum], key: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError as error:
        reason = "out_of_range" if isinstance(value, str) else "type"
        raise ParamsError(reason, key, value, "one of " + ", ".join(kind)) from error


def _shown(data: bytes) -> str:
    return data[:80].decode(errors="replace")
