"""Who the workers are, and what Dynamo's event plane says of each.

Owns: which workers exist (their cards decide), finding the one a message speaks of, counting what is dropped.
Does not own: decoding (wire.py), a rank's load (load.py), its cache (residency.py), any judgement of either.
Invariant: bad input never raises; without a card nothing is kept of a worker beyond PENDING_S; memory is
           bounded by the number of cards.
Source: contract: architecture, Identity; measured: Dynamo 1.4.2, as the comments say.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from dynamo_poa.cache_state import CacheSnapshot
from dynamo_poa.errors import WireError
from dynamo_poa.load import Publisher, RankLoad, WorkerState
from dynamo_poa.ordering import Place
from dynamo_poa.residency import RELOAD_S, CacheMirror
from dynamo_poa.values import PoolLoad, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import (
    FORWARD_PASS_METRICS,
    KV_METRICS,
    DynamoMessage,
    ForwardPass,
    KvCleared,
    KvEvent,
    KvMetrics,
    decode_dynamo,
    parse_subject,
)

PENDING_S = 10.0  # a worker's first messages overtake its card by as much as discovery is slow
MAX_PENDING_BYTES = 8 * 2**20  # over all workers without a card
PENDING_OVERHEAD_BYTES = 512  # what holding one message costs beside its bytes
MAX_KV_USED_FRAC = 1.1  # of a card's blocks: engines count one or two beyond them
MAX_PUBLISHERS = 8192  # three topics for each worker and router; beyond this somebody makes up ids


class Notice(msgspec.Struct, frozen=True):
    """Something a person should read once: the first of a kind, or a cache mirror that lost events."""

    reason: str
    subject: str
    detail: str


class PublisherState(msgspec.Struct, frozen=True, kw_only=True):
    """One publisher that has spoken lately.

    skew_s:    its clock minus ours at its last message, which includes the time the message travelled
    missing:   messages its numbering says were sent and that have not come
    repeated:  envelopes that came again
    """

    publisher_id: int
    topic: str
    age_s: float
    skew_s: float
    missing: int
    repeated: int


class _Worker:
    def __init__(
        self, card: WorkerCard, at_s: float, reload_s: float, on_restart: Callable[[WorkerKey], None]
    ) -> None:
        self.card = card
        self.ranks = {
            dp_rank: RankLoad(
                card.total_kv_blocks, at_s, reload_s, partial(on_restart, WorkerKey(card.worker_id, dp_rank))
            )
            for dp_rank in card.ranks
        }


class _Pending:
    """What a worker without a card has said, in case its card is on its way."""

    def __init__(self, subject: str, since_s: float) -> None:
        self.subject = subject
        self.since_s = since_s
        self.bytes = PENDING_OVERHEAD_BYTES
        self.messages: list[tuple[str, bytes, float, float]] = []


class Fleet:
    """The workers of one namespace. Instants are on the monotonic clock, but for `wall_s` on the epoch's.

    received:           messages of our namespace that could be decoded, by topic
    dropped:            messages that changed nothing, by reason: those of WireError, and
                        `foreign`             another namespace's
                        `unused`              a topic of no use here
                        `unknown_worker`      has no card, or not yet: then it is held for PENDING_S
                        `unknown_rank`        one its worker does not own
                        `repeated`            the same envelope again
                        `outdated`            counted before, or older than what is known
                        `too_many_publishers` beyond MAX_PUBLISHERS
    last_message_at_s:  when the last message of our namespace came, None before the first
    """

    def __init__(
        self,
        namespace: str,
        stale_s: float,
        *,
        exposed: str | None = None,
        routers_synced: bool = False,
        on_pass: Callable[[WorkerKey, WorkerCard, ForwardPass, float], None] | None = None,
        on_restart: Callable[[WorkerKey], None] = lambda key: None,
        reload_s: float = RELOAD_S,
    ) -> None:
        """Watch a namespace, and a second one where workers stand that the frontend sees directly.

        Args:  routers_synced: each router's figures include the other routers' (`replica_sync`).
               on_pass: is told of each pass once, with its rank, its worker's card and when it was received.
               on_restart: is told of each rank that was restarted under its old id, before its next pass.
               reload_s: a block stored again so soon after its eviction counts as reloaded.
        """
        self.received: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.last_message_at_s: float | None = None
        self._namespaces = {namespace, exposed}
        self._stale_s = stale_s
        self._workers: dict[int, _Worker] = {}
        self._publishers: dict[tuple[int, str], Publisher] = {}
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._routers_synced = routers_synced
        self._on_pass = on_pass
        self._on_restart = on_restart
        self._reload_s = reload_s
        self._notices: list[Notice] = []
        self._noticed: set[str] = set()

    def observe(self, subject: str, data: bytes, at_s: float, wall_s: float) -> DynamoMessage | None:
        """Take one message off the wire; return it decoded, None when refused or of another namespace."""
        try:
            # The namespace first: what belongs to others is not even looked into.
            if parse_subject(subject).namespace not in self._namespaces:
                self.dropped["foreign"] += 1
                return None
            message = decode_dynamo(subject, data)
        except WireError as error:
            self.dropped[error.reason] += 1
            self._notice_first(error.reason, subject, error.detail)
            return None
        self.last_message_at_s = at_s
        self.received[message.topic] += 1
        unknown_id = self._apply(message, at_s, wall_s)
        if unknown_id is not None:
            self._hold(unknown_id, message.topic, subject, data, at_s, wall_s)
        return message

    def set_cards(self, cards: Iterable[WorkerCard], at_s: float) -> None:
        """Replace the known workers: absent ones vanish with all they said, new ones get what was held.

        A worker whose role, ranks, block size or capacity has changed begins anew.
        """
        now = {card.worker_id: card for card in cards}
        for worker_id, worker in list(self._workers.items()):
            card = now.get(worker_id)
            if card is None or _shape(card) != _shape(worker.card):
                self._remove(worker_id)
            else:
                worker.card = card
        for worker_id in now.keys() - self._workers.keys():
            self._workers[worker_id] = _Worker(now[worker_id], at_s, self._reload_s, self._on_restart)
            for subject, data, said_at_s, wall_s in self._release(worker_id):
                self._apply(decode_dynamo(subject, data), said_at_s, wall_s, held=True)

    def workers(self, at_s: float) -> list[WorkerState]:
        """Return each (worker_id, dp_rank) as known now, in order of their ids."""
        return [
            rank.state(WorkerKey(worker_id, dp_rank), worker.card, at_s, self._stale_s, self._routers_synced)
            for worker_id, worker in sorted(self._workers.items())
            for dp_rank, rank in worker.ranks.items()
        ]

    def pools(self, at_s: float) -> dict[Role, PoolLoad]:
        """Return the load of each role that has a worker."""
        return pools_of(self.workers(at_s))

    def publishers(self, at_s: float) -> list[PublisherState]:
        """Return every publisher heard within the last stale_s."""
        return [
            PublisherState(
                publisher_id=publisher_id,
                topic=topic,
                age_s=at_s - publisher.seen_at_s,
                skew_s=publisher.skew_s,
                missing=publisher.numbering.missing,
                repeated=publisher.numbering.repeated,
            )
            for (publisher_id, topic), publisher in self._publishers.items()
            if at_s - publisher.seen_at_s <= self._stale_s
        ]

    def resident_blocks(self, key: WorkerKey) -> frozenset[int]:
        """Return the hashes in the device tier of a rank's cache; empty for an unknown rank."""
        worker = self._workers.get(key.worker_id)
        rank = worker.ranks.get(key.dp_rank) if worker else None
        return rank.cache.blocks() if rank else frozenset()

    def caches(self) -> list[tuple[WorkerCard, CacheSnapshot]]:
        """Return each rank's cache as it is now, in order of their ids.

        Costs microseconds a rank however much it holds; the snapshots may be read in another thread. What
        changes next in a cache copies its latest changes first: this is for once in a few seconds.
        """
        return [
            (worker.card, rank.cache.snapshot(WorkerKey(worker_id, dp_rank)))
            for worker_id, worker in sorted(self._workers.items())
            for dp_rank, rank in worker.ranks.items()
        ]

    def mirrors(self) -> list[tuple[WorkerCard, WorkerKey, CacheMirror]]:
        """Return the mirror of each rank's cache."""
        return [
            (worker.card, WorkerKey(worker_id, dp_rank), rank.cache)
            for worker_id, worker in self._workers.items()
            for dp_rank, rank in worker.ranks.items()
        ]

    def stored_blocks(self) -> list[tuple[WorkerCard, int]]:
        """Return how many blocks each rank has stored in its device tier since it appeared."""
        return [
            (worker.card, rank.cache.stored_blocks)
            for worker in self._workers.values()
            for rank in worker.ranks.values()
        ]

    def take_notices(self, at_s: float) -> list[Notice]:
        """Forget what is too old, and return what a person should read; to be called once a tick."""
        self._sweep(at_s)
        notices, self._notices = self._notices, []
        return notices

    def _apply(self, message: DynamoMessage, at_s: float, wall_s: float, held: bool = False) -> int | None:
        """Let a message change what it speaks of; return its worker's id when that has no card."""
        body = message.body
        if not body:
            self.dropped["unused"] += 1
            return None
        # Measured: all events of one message come from one worker.
        worker_id = body[0].worker_id if isinstance(body, tuple) else body.worker_id
        worker = self._workers.get(worker_id)
        if worker is None:
            return worker_id
        publisher = self._publisher(message.publisher_id, message.topic, worker_id)
        if publisher is None:
            self.dropped["too_many_publishers"] += 1
            return None
        publisher.seen_at_s = max(publisher.seen_at_s, at_s)
        publisher.skew_s = message.published_at_s - wall_s
        # What was held is older than what its publisher has said of others since, and is no repeat for that.
        if publisher.numbering.place(message.sequence) is Place.REPEATED and not held:
            self.dropped["repeated"] += 1
        elif isinstance(body, tuple):
            for event in body:
                self._apply_event(message.publisher_id, event, at_s)
        elif (rank := worker.ranks.get(body.dp_rank)) is None:
            self.dropped["unknown_rank"] += 1
        elif isinstance(body, KvMetrics) and _overcommitted(body, worker.card):
            self.dropped["impossible_value"] += 1
            total = worker.card.total_kv_blocks
            detail = f"kv_used_blocks = {body.kv_used_blocks}: worker {worker_id} has {total}"
            self._notice_first("impossible_value", message.topic, detail)
        else:
            if isinstance(body, ForwardPass):
                taken = rank.take_pass(message.publisher_id, body, at_s)
                if taken and self._on_pass is not None:
                    self._on_pass(WorkerKey(worker_id, body.dp_rank), worker.card, body, at_s)
            else:
                taken = rank.take_metrics(message.publisher_id, publisher, message.sequence, body, at_s)
            if not taken:
                self.dropped["outdated"] += 1
        return None

    def _apply_event(self, publisher_id: int, event: KvEvent, at_s: float) -> None:
        worker = self._workers.get(event.worker_id)
        rank = worker.ranks.get(event.dp_rank) if worker else None
        if worker is None or rank is None:
            self.dropped["unknown_rank" if worker else "unknown_worker"] += 1
            return
        rank.seen_at_s = at_s
        if not rank.cache.apply(publisher_id, event, at_s):
            self.dropped["outdated"] += 1
        elif isinstance(event.data, KvCleared):
            # Measured: the event names one rank and one tier and means the whole worker.
            for other in worker.ranks.values():
                if other is not rank:
                    other.cache.empty()

    def _publisher(self, publisher_id: int, topic: str, worker_id: int) -> Publisher | None:
        publisher = self._publishers.get((publisher_id, topic))
        if publisher is None and len(self._publishers) < MAX_PUBLISHERS:
            publisher = self._publishers[publisher_id, topic] = Publisher(worker_id)
            publisher.is_worker = topic != KV_METRICS
        return publisher

    def _hold(
        self, worker_id: int, topic: str, subject: str, data: bytes, at_s: float, wall_s: float
    ) -> None:
        self.dropped["unknown_worker"] += 1
        cost_bytes = len(data) + PENDING_OVERHEAD_BYTES
        if self._pending_bytes + cost_bytes + PENDING_OVERHEAD_BYTES > MAX_PENDING_BYTES:
            return
        pending = self._pending.get(worker_id)
        if pending is None:
            pending = self._pending[worker_id] = _Pending(subject, at_s)
            self._pending_bytes += pending.bytes
        # Passes are reported at least once a second; the rest on change only, so it would be missed.
        if topic != FORWARD_PASS_METRICS:
            pending.messages.append((subject, data, at_s, wall_s))
            pending.bytes += cost_bytes
            self._pending_bytes += cost_bytes

    def _release(self, worker_id: int) -> list[tuple[str, bytes, float, float]]:
        pending = self._pending.pop(worker_id, None)
        if pending is None:
            return []
        self._pending_bytes -= pending.bytes
        return pending.messages

    def _remove(self, worker_id: int) -> None:
        del self._workers[worker_id]
        own = [of for of, p in self._publishers.items() if p.is_worker and p.worker_id == worker_id]
        for publisher in own:
            del self._publishers[publisher]

    def _sweep(self, at_s: float) -> None:
        live_after_s = at_s - self._stale_s
        for worker_id, worker in self._workers.items():
            for dp_rank, rank in worker.ranks.items():
                rank.forget_publishers(live_after_s)
                rank.cache.expire_gap(at_s)
                if rank.cache.take_loss():
                    detail = f"worker {worker_id} rank {dp_rank}: {rank.cache.state().missing} events missing"
                    self._notices.append(Notice("cache_events_lost", "", detail))
        self._publishers = {of: p for of, p in self._publishers.items() if p.seen_at_s >= live_after_s}
        for worker_id, pending in list(self._pending.items()):
            if at_s - pending.since_s > PENDING_S:
                self._release(worker_id)
                self._notice_first("unknown_worker", pending.subject, f"worker {worker_id} has no card")

    def _notice_first(self, reason: str, subject: str, detail: str) -> None:
        if reason not in self._noticed:
            self._noticed.add(reason)
            self._notices.append(Notice(reason, subject, detail))


def pools_of(states: Iterable[WorkerState]) -> dict[Role, PoolLoad]:
    """Sum the ranks of each role, each rank counting as one worker."""
    by_role: dict[Role, list[WorkerState]] = {}
    for state in states:
        by_role.setdefault(state.card.role, []).append(state)
    return {role: pool_load(role, of_role) for role, of_role in by_role.items()}


def pool_load(role: Role, states: list[WorkerState]) -> PoolLoad:
    """Sum the states of one role's ranks; a figure that no rank has stays None."""
    sized = [
        (state.kv_used_blocks, state.card.total_kv_blocks)
        for state in states
        if state.kv_used_blocks is not None and state.card.total_kv_blocks
    ]
    running = [
        state.running_prefill_requests + state.running_decode_requests
        for state in states
        if state.running_prefill_requests is not None and state.running_decode_requests is not None
    ]
    busy = [state.busy_frac for state in states if state.busy_frac is not None]
    return PoolLoad(
        role=role,
        workers=len(states),
        stale_workers=sum(state.stale for state in states),
        kv_used_frac=sum(used for used, _ in sized) / sum(total for _, total in sized) if sized else None,
        kv_used_frac_max=max(used / total for used, total in sized) if sized else None,
        queued_requests=_sum_known(state.queued_requests for state in states),
        queued_prefill_tokens=_sum_known(state.queued_prefill_tokens for state in states),
        running_requests=sum(running) if running else None,
        active_decode_blocks=_sum_known(state.active_decode_blocks for state in states),
        active_prefill_tokens=_sum_known(state.active_prefill_tokens for state in states),
        busy_frac=sum(busy) / len(busy) if busy else None,
    )


def _overcommitted(said: KvMetrics, card: WorkerCard) -> bool:
    """Tell whether a worker says it uses more blocks than it can have; a few more are rounding."""
    used, total = said.kv_used_blocks, card.total_kv_blocks
    return used is not None and total is not None and used > MAX_KV_USED_FRAC * total


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _shape(card: WorkerCard) -> tuple[Role, range, int, int | None]:
    return card.role, card.ranks, card.kv_block_size, card.total_kv_blocks
