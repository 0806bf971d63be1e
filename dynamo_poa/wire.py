"""What travels on the event plane: Dynamo's messages and ours, one codec pair.

Owns: the field names, types and units on the wire; turning bytes into values and back.
Does not own: what a message means for a worker's state (fleet.py) or how bytes travel (bus.py).
Invariant: unknown fields are tolerated, known fields are never guessed: a message is decoded whole or
           refused with a reason.
Source: measured on Dynamo 1.4.2; ours carry a version.
"""

import functools
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from dynamo_poa.errors import WireError
from dynamo_poa.values import Candidate, Curve, Mode, Outcome, Role, RouterParams, WorkerCard

VERSION = 1
MAX_FIGURE = 1e12  # of coefficients: no product of them, as routers make them, overflows to infinity or NaN
MAX_CANDIDATES = 1024  # of one decision; more workers than this are not priced
MAX_PREFIX_DEPTHS = 32  # 2^31 blocks: longer than any prompt

# What a router may say of itself; beyond these the batch is refused whole.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Hash = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself ends at 2^64 - 1


def subject(namespace: str, topic: str) -> str:
    """Return our subject for a topic.

    There are `decisions`, `params`, `coefficients`, `cards`, `telemetry`, `control` and `handover`.
    """
    return f"poa.{namespace}.{topic}"


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag="chosen"):
    """A worker was chosen. Instants are seconds since the epoch on the router's clock."""

    request_id: Name  # the same on both legs
    role: Role
    at_s: float
    received_at_s: float  # when this leg of the request reached the router
    worker_id: int
    dp_rank: int
    prompt_tokens: Count
    revision: int  # of the parameters the choice was made under
    attempt: int  # 1, or 2 after a refused connection
    candidates: Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=MAX_CANDIDATES)]
    cached_tokens: Count = 0  # of the prompt, on the worker chosen; known also without candidates
    # of a sampled prompt: rolling hashes of its first 1, 2, 4, 8, ... KV blocks (prefixes.py)
    prefix: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_PREFIX_DEPTHS)] = ()


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first_token"):
    """The first chunk of a leg reached the router."""

    request_id: str
    role: Role
    at_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A leg is over, however it ended."""

    request_id: str
    role: Role
    at_s: float
    outcome: Outcome


DecisionEvent = Chosen | FirstToken | Ended


class DecisionBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Router to controller, on `poa.<namespace>.decisions`; sent at least once a second, also when empty.

    dropped:         events this router has dropped since it started, because its queue was full
    in_flight:       requests by role that this router is serving now
    params_source:   `static`, `heartbeat` or `store`
    loop_lag_s:      delay of the router's event loop in the last full batch period
    """

    version: int = VERSION
    router_id: Name
    sequence: Count
    sent_at_s: float
    events: tuple[DecisionEvent, ...] = ()
    dropped: Count = 0
    in_flight: Annotated[dict[str, Count], msgspec.Meta(max_length=8)] = {}
    params_revision: int = 0
    params_source: Literal["static", "heartbeat", "store"] = "static"
    loop_lag_s: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to routers, on `poa.<namespace>.params`: the current record, once a second and on change."""

    version: int = VERSION
    controller_id: str
    sent_at_s: float
    mode: Mode
    params: RouterParams


class Handover(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Router to routers, on `poa.<namespace>.handover.<router_id>`: where the prefill leg of a request went.

    An empty host says that the prefill leg failed; `refused` that Dynamo would not take it. `attempt` is the
    prefill leg's: engines meet under an id and a room of the attempt's own. `room` is the frontend's, one for
    both legs, by which requests under one id are told apart; routers of an earlier release say none.
    `renamed`: its engines are to know it under an id of its own (relay_call.engine_id).
    """

    version: int = VERSION
    request_id: str
    worker_id: int
    dp_rank: int
    bootstrap_host: str
    bootstrap_port: int
    refused: bool = False
    attempt: int = 1
    room: int | None = None
    renamed: bool = False


class Cards(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to whoever listens, on `poa.<namespace>.cards`: every worker that discovery lists now."""

    version: int = VERSION
    sent_at_s: float
    cards: tuple[WorkerCard, ...]


class WorkerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """One rank's latency model, and what it last said it carries, whichever router sent it.

    samples:                      passes behind the curve; 0 where it is its pool's
    running_requests, kv_tokens:  past their first token, and the KV tokens they hold
    queued_requests:              before it, waiting or in a prefill pass, or preempted
    queued_prefill_tokens:        of those that wait, raw prompt

    None is unknown, never zero.
    """

    worker_id: int
    dp_rank: int
    curve: Curve
    samples: float = 0.0
    running_requests: Count | None = None
    kv_tokens: Count | None = None
    queued_requests: Count | None = None
    queued_prefill_tokens: Count | None = None


class PoolSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a pool's worker of which nothing else is known.

    output_tokens_mean:  decode iterations of a request, mean over those of late; None where it is not known
    """

    curve: Curve
    output_tokens_mean: float | None = None


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to routers, on `poa.<namespace>.coefficients`: what marginal cost is computed from.

    Sent on every tick while the setting in force has `selection` marginal.

    revision:  grows with each message, also over a controller's restart
    lease_s:   a router that hears nothing for so long falls back to Dynamo's own selection
    routers:   how many share the workers
    pools:     by role
    """

    version: int = VERSION
    controller_id: Name
    revision: Count
    sent_at_s: float
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 10.0
    routers: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 1
    pools: Annotated[dict[Role, PoolSpeed], msgspec.Meta(max_length=8)] = {}
    workers: Annotated[tuple[WorkerSpeed, ...], msgspec.Meta(max_length=2**16)] = ()


# Dynamo's part. Everything below is Dynamo's wire format, not ours to change; unknown fields are ignored.

MAX_U64 = 2**64 - 1
MAX_MESSAGE_BYTES = 4 * 2**20  # measured: 520 bytes for a forward pass, about 62 for each stored block
MAX_WALL_TIME_S = 3600.0  # a forward pass takes milliseconds; an instant sent as a duration is 10^9

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"
FORWARD_PASS_METRICS = "forward-pass-metrics"
ACTIVE_SEQUENCES = "active_sequences_events"

_Unsigned = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself ends at 2^64 - 1
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
MAX_SIZE = 2**53  # of a card's figures: no sum of a fleet's leaves 64 bits
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Each rank costs state of its own, so a card may not promise any number of them; engines have tens.
MAX_RANKS = 4096
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Route(NamedTuple):
    """Where a message of Dynamo's came from, as its subject says."""

    namespace: str
    component: str
    topic: str


class Tier(StrEnum):
    """Where a cached block lies."""

    DEVICE = "device"
    HOST_PINNED = "host_pinned"
    DISK = "disk"
    EXTERNAL = "external"


class KvStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks entered the cache: sent when the pass is scheduled, before its prefill has finished.

    parent_hash:    of the block before the first one; None at the start of a prompt
    block_hashes:   unsigned 64-bit, oldest first, each the parent of the next; the engine's own, arbitrary
    tokens_hashes:  of each block's tokens alone, the same whichever engine computed them
    """

    parent_hash: int | None
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]


class KvRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left one tier of the cache. Hashes are unsigned 64-bit."""

    block_hashes: tuple[int, ...]


class KvCleared(msgspec.Struct, frozen=True, gc=False):
    """Every block left the cache: all tiers and all ranks of the worker, whatever tier and rank say."""


class KvEvent(msgspec.Struct, frozen=True, gc=False):
    """One change of a worker's cache.

    event_id:  consecutive from 1 per (worker_id, dp_rank), however events are batched
    """

    worker_id: int
    dp_rank: int
    event_id: int
    tier: Tier
    data: KvStored | KvRemoved | KvCleared


class CacheHeld(msgspec.Struct, frozen=True):
    """What a worker says its cache holds, when it is asked.

    events:         `stored` ones, numbered anew; a parent may come after its children; to be read once
    last_event_id:  they are the cache as it was after this one of its events
    """

    events: Iterable[KvEvent]
    last_event_id: int


class KvMetrics(msgspec.Struct, frozen=True):
    """A worker's or a router's figures for one worker; None says nothing, least of all zero.

    active_decode_blocks:   from a router: prompt blocks of the requests it has booked there
    active_prefill_tokens:  from a router: uncached prompt tokens it has booked there, until first token
    kv_used_blocks:         from the worker: blocks that running requests hold; cached ones do not count
    """

    worker_id: _Unsigned
    dp_rank: _Rank
    active_decode_blocks: _Unsigned | None = None
    active_prefill_tokens: _Unsigned | None = None
    kv_used_blocks: _Unsigned | None = None


class ForwardPass(msgspec.Struct, frozen=True):
    """One forward pass that has ended; all zero once a second while the rank idles.

    counter_id:             consecutive from 1 per (worker_id, dp_rank)
    wall_time_s:            how long the pass took, in [0, MAX_WALL_TIME_S]
    prefill_*, decode_*:    what the pass computed; the KV tokens are what it read, cached or earlier chunks
    queued_*:               requests waiting for their prefill, with raw prompt tokens, and preempted decodes
    """

    worker_id: int
    dp_rank: int
    counter_id: int
    wall_time_s: float
    prefill_requests: int
    prefill_tokens: int
    prefill_kv_tokens: int
    decode_requests: int
    decode_kv_tokens: int
    queued_prefill_requests: int
    queued_prefill_tokens: int
    queued_decode_requests: int
    queued_decode_kv_tokens: int


DynamoBody = KvMetrics | ForwardPass | tuple[KvEvent, ...] | None


class DynamoMessage(msgspec.Struct, frozen=True):
    """One message of Dynamo's event plane.

    publisher_id:    one per process, topic and runtime; a restart brings a new one
    sequence:        from 0 per publisher, without gaps; `kv_metrics` may arrive out of order
    published_at_s:  seconds since the epoch on the sender's clock: good for its skew, not for ages
    body:            None for a topic that is known and of no use to us
    """

    namespace: str
    component: str
    topic: str
    publisher_id: int
    sequence: int
    published_at_s: float
    body: DynamoBody


class _Envelope(msgspec.Struct, gc=False):
    publisher_id: _Unsigned
    sequence: _Unsigned
    published_at: _Unsigned  # milliseconds since the epoch
    topic: str
    payload: bytes  # msgpack inside msgpack


class _Block(msgspec.Struct, gc=False):
    block_hash: int  # some senders write the signed form
    tokens_hash: int


class _Stored(msgspec.Struct, gc=False):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int]


class _Change(msgspec.Struct, gc=False):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Event(msgspec.Struct, gc=False):
    event_id: _Unsigned
    dp_rank: _Rank
    data: _Change | Literal["cleared"]


class _RouterEvent(msgspec.Struct, gc=False):
    worker_id: _Unsigned
    storage_tier: Tier
    event: _Event


class _Dump(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]  # each a _RouterEvent
    last_event_id: _Unsigned


class _Whole(msgspec.Struct, gc=False, rename="pascal"):
    tree_dump: _Dump


class _Answer(msgspec.Struct, gc=False):
    data: _Whole


class _Scheduled(msgspec.Struct, gc=False):
    num_prefill_requests: _Unsigned
    sum_prefill_tokens: _Unsigned
    sum_prefill_kv_tokens: _Unsigned
    num_decode_requests: _Unsigned
    sum_decode_kv_tokens: _Unsigned


class _Queued(msgspec.Struct, gc=False):
    num_prefill_requests: _Unsigned
    sum_prefill_tokens: _Unsigned
    num_decode_requests: _Unsigned
    sum_decode_kv_tokens: _Unsigned


class _ForwardPass(msgspec.Struct, gc=False):
    version: int
    worker_id: str  # decimal; a number in the other topics
    dp_rank: _Rank
    counter_id: _Unsigned
    wall_time: float  # seconds
    scheduled_requests: _Scheduled
    queued_requests: _Queued


class _Version(msgspec.Struct, gc=False):
    version: int


_decode_coefficients = msgspec.msgpack.Decoder(Coefficients).decode
_decode_cards = msgspec.msgpack.Decoder(Cards).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_event = msgspec.msgpack.Decoder(_RouterEvent).decode
_decode_events = msgspec.msgpack.Decoder(list[_RouterEvent]).decode
_decode_metrics = msgspec.msgpack.Decoder(KvMetrics).decode
_decode_pass = msgspec.msgpack.Decoder(_ForwardPass).decode
_decode_version = msgspec.msgpack.Decoder(_Version).decode


@functools.lru_cache(maxsize=1024)  # a fleet has a handful of subjects, and one comes with every message
def parse_subject(subject: str) -> Route:
    """Return where a subject of Dynamo's event plane points.

        namespace.<namespace>.component.<component>.endpoint.<endpoint>.<topic>

    Raises:  WireError with reason `subject`.
    """
    tokens = subject.split(".")
    if len(tokens) != 7 or tokens[0::2] != ["namespace", "component", "endpoint", tokens[6]]:
        raise WireError("subject", f"{subject[:200]!r} is not a subject of Dynamo's event plane")
    if tokens[6] not in (KV_EVENTS, KV_METRICS, FORWARD_PASS_METRICS, ACTIVE_SEQUENCES):
        raise WireError("subject", f"unknown topic {tokens[6][:100]!r}")
    return Route(tokens[1], tokens[3], tokens[6])


def decode_dynamo(subject: str, data: bytes) -> DynamoMessage:
    """Decode one message of Dynamo's event plane.

    Raises:   WireError and nothing else, whatever the bytes. Reasons: `subject`, `too_large`,
              `not_msgpack`, `envelope`, `payload`, `version`, `impossible_value`.
    Source:   measured on Dynamo 1.4.2; forward-pass metrics carry version 1.
    """
    namespace, component, topic = parse_subject(subject)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError("too_large", f"{len(data)} bytes: must be <= {MAX_MESSAGE_BYTES}")
    try:
        envelope = _decode_envelope(data)
    except msgspec.ValidationError as error:
        raise WireError("envelope", str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("not_msgpack", str(error)) from error
    if envelope.topic != topic:
        raise WireError("envelope", f"topic {envelope.topic[:100]!r} on a subject of {topic!r}")
    body: DynamoBody = None
    try:
        if topic == FORWARD_PASS_METRICS:
            body = _forward_pass(envelope.payload)
        elif topic == KV_METRICS:
            body = _decode_metrics(envelope.payload)
        elif topic == KV_EVENTS:
            body = tuple([_kv_event(event) for event in _decode_events(envelope.payload)])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("payload", f"{topic}: {error}") from error
    return DynamoMessage(
        namespace,
        component,
        topic,
        envelope.publisher_id,
        envelope.sequence,
        envelope.published_at / 1000,
        body,
    )


def _forward_pass(payload: bytes) -> ForwardPass:
    try:
        raw = _decode_pass(payload)
    except msgspec.ValidationError:
        # Another version may lack fields of this one: name the cause, not the symptom.
        _require_version(_decode_version(payload).version)
        raise
    _require_version(raw.version)
    if not 0 <= raw.wall_time <= MAX_WALL_TIME_S:  # NaN fails this too
        raise WireError(
            "impossible_value", f"wall_time = {raw.wall_time}: must be in [0, {MAX_WALL_TIME_S:g}] s"
        )
    text = raw.worker_id
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and (worker_id := int(text)) <= MAX_U64):
        raise WireError("payload", f"worker_id = {text[:40]!r}: must be an unsigned 64-bit number in decimal")
    scheduled, queued = raw.scheduled_requests, raw.queued_requests
    return ForwardPass(
        worker_id,
        raw.dp_rank,
        raw.counter_id,
        raw.wall_time,
        scheduled.num_prefill_requests,
        scheduled.sum_prefill_tokens,
        scheduled.sum_prefill_kv_tokens,
        scheduled.num_decode_requests,
        scheduled.sum_decode_kv_tokens,
        queued.num_prefill_requests,
        queued.sum_prefill_tokens,
        queued.num_decode_requests,
        queued.sum_decode_kv_tokens,
    )


def _require_version(version: int) -> None:
    if version != 1:
        raise WireError("version", f"forward-pass metrics of version {version}: must be 1")


def _kv_event(raw: _RouterEvent) -> KvEvent:
    change = raw.event.data
    data: KvStored | KvRemoved | KvCleared
    if isinstance(change, str):
        data = KvCleared()
    elif (stored := change.stored) is not None and change.removed is None:
        parent = None if stored.parent_hash is None else stored.parent_hash & MAX_U64
        blocks = stored.blocks
        data = KvStored(
            parent,
            tuple([block.block_hash & MAX_U64 for block in blocks]),
            tuple([block.tokens_hash & MAX_U64 for block in blocks]),
        )
    elif change.removed is not None and stored is None:
        data = KvRemoved(tuple([block_hash & MAX_U64 for block_hash in change.removed.block_hashes]))
    else:
        raise WireError("payload", "kv-events: data must be one of stored, removed, cleared")
    return KvEvent(raw.worker_id, raw.event.dp_rank, raw.event.event_id, raw.storage_tier, data)


def cache_held(body: bytes | bytearray) -> CacheHeld:
    """Read a worker's answer to being asked for the whole of its cache: the body of its data frame.

    Events are decoded as they are read, and let go of then: one call for all of them would hold up every
    other thread, ticks too, and so would the garbage collector's looking at all of them.

    Raises:   WireError with reason `answer`: also when the worker says that it cannot tell; so does
              reading the events.
    Source:   measured on Dynamo 1.4.2: {"data": {"TreeDump": {"events": [...], "last_event_id": 17}}, ...}.
    """
    try:
        dump = _decode_answer(body).data.tree_dump
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("answer", str(error)) from error
    return CacheHeld(_events(dump.events), dump.last_event_id)


def _events(raw: list[msgspec.Raw]) -> Iterator[KvEvent]:
    raw.reverse()
    while raw:
        try:
            event = _kv_event(_decode_event(raw.pop()))
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError("answer", str(error)) from error
        yield event


class _DisaggregatedEndpoint(msgspec.Struct, frozen=True):
    bootstrap_host: str | None = None
    bootstrap_port: _Port | None = None


class _RuntimeConfig(msgspec.Struct, frozen=True):
    total_kv_blocks: _Count | None = None  # per rank
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    data_parallel_size: _Ranks | None = None
    data_parallel_start_rank: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 4097)] | None = None
    disaggregated_endpoint: _DisaggregatedEndpoint | None = None  # only where the KV cache goes by bootstrap


class _ModelCard(msgspec.Struct, frozen=True):
    worker_type: Role
    kv_cache_block_size: _Count  # tokens
    display_name: str = ""
    runtime_config: _RuntimeConfig | None = None


def card_from_mdc(instance_id: int, card: dict[str, Any]) -> WorkerCard:
    """Read a worker's model deployment card, `card_json` of Dynamo's discovery.

    Args:     instance_id: the worker id, unsigned 64-bit.  card: parsed JSON.
    Raises:   WireError with reason `card`, naming the key at fault.
    Source:   host: model card of Dynamo 1.4.2; plugins' own cards leave the capacities null.
    """
    if not 0 <= instance_id <= MAX_U64:
        raise WireError("card", f"instance_id = {instance_id}: must be an unsigned 64-bit number")
    try:
        parsed = msgspec.convert(card, _ModelCard)
    except msgspec.ValidationError as error:
        raise WireError("card", str(error)) from error
    runtime = parsed.runtime_config or _RuntimeConfig()
    endpoint = runtime.disaggregated_endpoint or _DisaggregatedEndpoint()
    return WorkerCard(
        worker_id=instance_id,
        role=parsed.worker_type,
        kv_block_size=parsed.kv_cache_block_size,
        total_kv_blocks=runtime.total_kv_blocks,
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        data_parallel_size=runtime.data_parallel_size or 1,
        data_parallel_start_rank=runtime.data_parallel_start_rank or 0,
        bootstrap_host=endpoint.bootstrap_host,
        bootstrap_port=endpoint.bootstrap_port,
        model_name=parsed.display_name,
    )


def decode_cards(data: bytes) -> Cards:
    """Decode a message of the cards subject.

    Raises:   WireError and nothing else. Reasons: `not_msgpack`, `cards`, `version`, `impossible_value`.
    """
    try:
        message = _decode_cards(data)
    except msgspec.ValidationError as error:
        raise WireError("cards", str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("not_msgpack", str(error)) from error
    if message.version > VERSION:
        raise WireError("version", f"cards of version {message.version}: must be <= {VERSION}")
    for card in message.cards:
        if not 0 <= card.worker_id <= MAX_U64:
            raise WireError("impossible_value", f"worker_id = {card.worker_id}: must be in [0, {MAX_U64}]")
        if not 1 <= card.data_parallel_size <= MAX_RANKS or card.data_parallel_start_rank < 0:
            raise WireError("impossible_value", f"worker {card.worker_id}: no such data-parallel ranks")
        sizes = (card.kv_block_size, card.total_kv_blocks, card.max_num_seqs, card.max_num_batched_tokens)
        if any(size is not None and not 1 <= size <= MAX_SIZE for size in sizes):
            bound = f"must be in [1, {MAX_SIZE}]"
            raise WireError("impossible_value", f"worker {card.worker_id}: sizes {sizes} {bound}")
    return message


def decode_coefficients(data: bytes) -> Coefficients:
    """Decode a message of the coefficients subject.

    Raises:   WireError and nothing else. Reasons: `too_large`, `not_msgpack`, `coefficients`, `version`,
              `impossible_value`.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError("too_large", f"{len(data)} bytes: must be <= {MAX_MESSAGE_BYTES}")
    try:
        message = _decode_coefficients(data)
    except msgspec.ValidationError as error:
        raise WireError("coefficients", str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("not_msgpack", str(error)) from error
    if message.version > VERSION:
        raise WireError("version", f"coefficients of version {message.version}: must be <= {VERSION}")
    numbers = [("sent_at_s", message.sent_at_s)]
    for role, pool in message.pools.items():
        numbers += [(f"{role}.{key}", value) for key, value in msgspec.structs.asdict(pool.curve).items()]
        numbers.append((f"{role}.output_tokens_mean", pool.output_tokens_mean or 0.0))
    for worker in message.workers:
        if not 0 <= worker.worker_id <= MAX_U64 or not 0 <= worker.dp_rank < 2**32:
            raise WireError("impossible_value", f"worker {worker.worker_id} rank {worker.dp_rank}: no such")
        numbers.append((f"{worker.worker_id}.samples", worker.samples))
        numbers += [
            (f"{worker.worker_id}.{key}", value)
            for key, value in msgspec.structs.asdict(worker.curve).items()
        ]
    for key, value in numbers:
        if not 0 <= value <= MAX_FIGURE:  # NaN fails this too
            raise WireError("impossible_value", f"{key} = {value}: must be in [0, {MAX_FIGURE:g}]")
    return message
