"""What one worker rank carries now, merged from all who speak of it.

Owns: merging a rank's forward passes, its own `kv_metrics` and each router's into one state; when a figure
      has become too old to be believed.
Does not own: which ranks exist (fleet.py) or what lies in the cache (residency.py).
Invariant: absent is not zero: null never overwrites a figure, and one that nobody has given lately reads
           None; nothing a rank was before a restart is mixed into what it is now, but for totals.
Source: contract: architecture, Load; measured: Dynamo 1.4.2, as the comments say.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from dynamo_poa.cache_state import CacheState
from dynamo_poa.ordering import Life, Numbering, Place, Speaker
from dynamo_poa.residency import RELOAD_S, CacheMirror
from dynamo_poa.values import WorkerCard, WorkerKey
from dynamo_poa.wire import ForwardPass, KvMetrics

BUSY_WINDOW_S = 2.0  # an idle rank reports once a second, so this holds at least one report
MAX_PASSES = 4096  # per rank within the window; a pass takes a millisecond at the very least


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """One (worker_id, dp_rank) as known now; None means unknown, never zero.

    age_s:                 since the rank itself last spoke; a router speaking of it does not count
    stale:                 silent for longer than stale_s, counted from its card while it has never spoken
    kv_used_blocks:        what its running requests hold, as the worker said; cached blocks do not count
    active_decode_blocks, active_prefill_tokens:  what all routers have booked there
    queued_requests:       waiting for their prefill, or preempted
    busy_frac:             share of the last BUSY_WINDOW_S in which a forward pass ran
    iteration_s:           mean time of the passes in it that only decoded
    decoding_*:            as of its last pass but those that only prefilled, in which the others wait
    prefill_tokens_total:  computed since the rank appeared, each pass counted once
    """

    key: WorkerKey
    card: WorkerCard
    age_s: float | None
    stale: bool
    kv_used_blocks: int | None
    kv_used_frac: float | None
    active_decode_blocks: int | None
    active_prefill_tokens: int | None
    running_prefill_requests: int | None
    running_decode_requests: int | None
    queued_requests: int | None
    queued_prefill_tokens: int | None
    busy_frac: float | None
    prefill_tokens_total: int
    cache: CacheState
    iteration_s: float | None = None
    decoding_requests: int | None = None
    decoding_kv_tokens: int | None = None


class Publisher:
    """One publisher of one topic: its numbering, its clock, and whether it is a worker or a router."""

    __slots__ = ("is_worker", "numbering", "seen_at_s", "skew_s", "worker_id")

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id  # the first it spoke of; a router speaks of many
        self.is_worker = False  # for `kv_metrics` it is told by kv_used_blocks, which only workers fill
        self.numbering = Numbering()
        self.seen_at_s = 0.0
        self.skew_s = 0.0


class _Booked:
    """What one `kv_metrics` publisher last said of one rank."""

    __slots__ = ("active_decode_blocks", "active_prefill_tokens", "publisher", "sequence")

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.sequence = -1
        self.active_decode_blocks: int | None = None
        self.active_prefill_tokens: int | None = None


class RankLoad:
    """Everything kept of one (worker_id, dp_rank)."""

    def __init__(
        self,
        total_kv_blocks: int | None,
        at_s: float,
        reload_s: float = RELOAD_S,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin at an instant; `on_restart` is called before the first pass after a restart counts."""
        self.cache = CacheMirror(total_kv_blocks, reload_s)
        self._on_restart = on_restart
        self.seen_at_s: float | None = None
        self._created_at_s = at_s
        self._kv_used_blocks: int | None = None
        self._kv_used_at_s = at_s
        self._booked: dict[int, _Booked] = {}
        self._last_pass: ForwardPass | None = None
        self._last_pass_at_s = at_s
        self._decoding: ForwardPass | None = None
        self._first_pass_at_s = at_s
        # Receipt, wall time, whether it only decoded.
        self._passes: deque[tuple[float, float, bool]] = deque(maxlen=MAX_PASSES)
        self._pass_numbering = Numbering()
        self._pass_speaker = Speaker()
        self._metrics_speaker = Speaker()
        self._prefill_tokens_total = 0

    def take_pass(self, publisher_id: int, done: ForwardPass, at_s: float) -> bool:
        """Count a pass unless it was counted before; a late one adds to totals but is not the state now.

        One that belongs to the time before a restart is not even that.
        """
        if publisher_id != self._pass_speaker.publisher_id:
            if self._pass_speaker.hear(publisher_id, at_s) is Life.PAST:
                return False
            self._begin_passes()
        self.seen_at_s = at_s
        place = self._pass_numbering.place(done.counter_id)
        if place is Place.REPEATED:
            return False
        self._prefill_tokens_total += done.prefill_tokens
        passes = self._passes
        passes.append((at_s, done.wall_time_s, done.decode_requests > 0 and done.prefill_requests == 0))
        while passes[0][0] < at_s - BUSY_WINDOW_S:
            passes.popleft()
        if place is not Place.LATE:
            if self._last_pass is None:
                self._first_pass_at_s = at_s - done.wall_time_s
            self._last_pass = done
            if done.decode_requests or not done.prefill_requests:
                self._decoding = done
            self._last_pass_at_s = at_s
        return True

    def take_metrics(
        self, publisher_id: int, publisher: Publisher, sequence: int, said: KvMetrics, at_s: float
    ) -> bool:
        """Merge one message into its publisher's figures unless a newer one was taken.

        Source:  measured: a router's messages arrive reordered, e.g. 135, 137, 136, 138.
        """
        if (
            said.kv_used_blocks is not None
            and publisher_id != self._metrics_speaker.publisher_id
            and self._metrics_speaker.hear(publisher_id, at_s) is Life.PAST
        ):
            return False
        booked = self._booked.get(publisher_id)
        if booked is None:
            booked = self._booked[publisher_id] = _Booked(publisher)
        if sequence <= booked.sequence:
            return False
        booked.sequence = sequence
        if said.active_decode_blocks is not None:
            booked.active_decode_blocks = said.active_decode_blocks
        if said.active_prefill_tokens is not None:
            booked.active_prefill_tokens = said.active_prefill_tokens
        if said.kv_used_blocks is not None:
            publisher.is_worker = True
            self._kv_used_blocks = said.kv_used_blocks
            self._kv_used_at_s = at_s
        if publisher.is_worker:
            self.seen_at_s = at_s
        return True

    def forget_publishers(self, live_after_s: float) -> None:
        """Drop what publishers said that have been silent since before an instant."""
        silent = [of for of, booked in self._booked.items() if booked.publisher.seen_at_s < live_after_s]
        for publisher_id in silent:
            del self._booked[publisher_id]

    def state(
        self, key: WorkerKey, card: WorkerCard, at_s: float, stale_s: float, routers_synced: bool
    ) -> WorkerState:
        """Return what is known at an instant.

        Args:  routers_synced: each router's figures include the other routers'.
        """
        live_after_s = at_s - stale_s
        last = self._last_pass if self._last_pass_at_s >= live_after_s else None
        decoding = self._decoding if last else None
        kv_used_blocks = self._kv_used_now(live_after_s, last)
        routers = [
            booked
            for booked in self._booked.values()
            if not booked.publisher.is_worker and booked.publisher.seen_at_s >= live_after_s
        ]
        merge = max if routers_synced else sum
        decode_blocks = [b.active_decode_blocks for b in routers if b.active_decode_blocks is not None]
        prefill_tokens = [b.active_prefill_tokens for b in routers if b.active_prefill_tokens is not None]
        seen_at_s = self._created_at_s if self.seen_at_s is None else self.seen_at_s
        return WorkerState(
            key=key,
            card=card,
            age_s=None if self.seen_at_s is None else at_s - self.seen_at_s,
            stale=seen_at_s < live_after_s,
            kv_used_blocks=kv_used_blocks,
            kv_used_frac=(
                kv_used_blocks / card.total_kv_blocks
                if kv_used_blocks is not None and card.total_kv_blocks
                else None
            ),
            active_decode_blocks=merge(decode_blocks) if decode_blocks else None,
            active_prefill_tokens=merge(prefill_tokens) if prefill_tokens else None,
            running_prefill_requests=last.prefill_requests if last else None,
            running_decode_requests=last.decode_requests if last else None,
            queued_requests=last.queued_prefill_requests + last.queued_decode_requests if last else None,
            queued_prefill_tokens=last.queued_prefill_tokens if last else None,
            busy_frac=self._busy_frac(at_s),
            prefill_tokens_total=self._prefill_tokens_total,
            cache=self.cache.state(),
            iteration_s=self._iteration_s(at_s),
            decoding_requests=decoding.decode_requests if decoding else None,
            decoding_kv_tokens=decoding.decode_kv_tokens if decoding else None,
        )

    def _begin_passes(self) -> None:
        self._pass_numbering.restart()
        if self._last_pass is None:
            return
        self._on_restart()
        # Said before the restart; a new engine uses none, and says so only when that changes.
        if self._kv_used_blocks and self._kv_used_at_s <= self._last_pass_at_s:
            self._kv_used_blocks = None
        self._last_pass = self._decoding = None
        self._passes.clear()

    def _kv_used_now(self, live_after_s: float, last: ForwardPass | None) -> int | None:
        # Workers send it on change only, so an old figure is either still true or a signal that has ceased;
        # measured: with two ranks it hangs at an old value for ever. Zero stays while the passes confirm it.
        if self._kv_used_at_s >= live_after_s:
            return self._kv_used_blocks
        idle = last is not None and last.prefill_requests == 0 and last.decode_requests == 0
        return 0 if self._kv_used_blocks == 0 and idle else None

    def _busy_frac(self, at_s: float) -> float | None:
        since_s = at_s - BUSY_WINDOW_S
        window_s = at_s - max(since_s, self._first_pass_at_s)
        if not self._passes or self._passes[-1][0] < since_s or window_s <= 0:
            return None
        covered_s = 0.0
        for done_at_s, wall_time_s, _ in reversed(self._passes):
            if done_at_s < since_s:
                break
            covered_s += min(wall_time_s, done_at_s - since_s)
        return min(1.0, covered_s / window_s)  # receipt jitter can make passes overlap

    def _iteration_s(self, at_s: float) -> float | None:
        since_s = at_s - BUSY_WINDOW_S
        # Without a duration a pass says nothing of how long one takes.
        times_s = [time_s for at, time_s, decodes in self._passes if decodes and at >= since_s and time_s > 0]
        return sum(times_s) / len(times_s) if times_s else None
