"""Which KV blocks lie in the cache of one worker rank, by its `kv-events`.

Owns: the mirror of one rank's cache, per tier, and how far it can be trusted.
Does not own: which rank an event belongs to, or that a clear empties the worker's other ranks (fleet.py).
Invariant: a late event never overrules a newer one; `approximate` is false only when every event since the
           cache was empty has been applied.
Source: measured: replayed over recordings of the mock engine the mirror is exact; event ids start at 1.
"""

import msgspec

from dynamo_poa.ordering import Numbering, Place
from dynamo_poa.wire import KvEvent, KvRemoved, KvStored, Tier

GAP_WAIT_S = 5.0  # measured: reordering is milliseconds, and after a NATS outage everything comes at once
MAX_TOUCHED = 65_536  # blocks remembered while a gap is open; a flood must not buy memory with one lost event
# A tier holding more than this many times the device's capacity has missed removals. Tiers below the device
# are larger than it, hence not 1.
CAPACITY_FACTOR = 4
UNKNOWN_CAPACITY_BLOCKS = 65_536  # where the card does not give it


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rank's cache. Counts are since the rank appeared.

    resident_blocks:  distinct blocks in the device tier; None before the first event or clear
    lower_blocks:     the same for each other tier that holds any
    approximate:      events were missed: from before our time, in a gap, or because a bound was hit
    duplicates:       events taken before
    missing:          events skipped that have not come
    orphans:          stored events whose parent block is not known here; their blocks count all the same
    unknown_removes:  removed blocks that were not known here
    overflows:        times a tier was forgotten because it outgrew its bound
    """

    resident_blocks: int | None = None
    lower_blocks: dict[str, int] = {}
    approximate: bool = True
    duplicates: int = 0
    gaps_opened: int = 0
    gaps_closed: int = 0
    missing: int = 0
    orphans: int = 0
    unknown_removes: int = 0
    overflows: int = 0


class CacheMirror:
    """The cache of one (worker_id, dp_rank).

    Memory is bounded: a tier that outgrows its bound is forgotten and built up anew. Blocks stored from then
    on are certain, the old ones are not, and the engine's own eviction makes the mirror true again in time.
    """

    def __init__(self, total_kv_blocks: int | None) -> None:
        self.limit_blocks = CAPACITY_FACTOR * (total_kv_blocks or UNKNOWN_CAPACITY_BLOCKS)
        self._tiers: dict[Tier, set[int]] = {Tier.DEVICE: set()}
        self._numbering = Numbering()
        self._publisher_id: int | None = None
        self._complete = False  # every event since the cache was empty has been applied or is awaited
        self._gap_at_s: float | None = None
        # While a gap is open: the newest event that spoke of a block, so that a late one cannot undo it.
        self._touched: dict[tuple[Tier, int], int] = {}
        self._loss_untold = False
        self._orphans = 0
        self._unknown_removes = 0
        self._overflows = 0

    def blocks(self, tier: Tier = Tier.DEVICE) -> frozenset[int]:
        """Return the hashes resident in a tier."""
        return frozenset(self._tiers.get(tier, ()))

    def state(self) -> CacheState:
        """Return what is known now."""
        numbering = self._numbering
        known = self._complete or self._publisher_id is not None
        return CacheState(
            resident_blocks=len(self._tiers[Tier.DEVICE]) if known else None,
            lower_blocks={
                tier.value: len(held) for tier, held in self._tiers.items() if held and tier != Tier.DEVICE
            },
            approximate=not self._complete or bool(numbering.awaited),
            duplicates=numbering.repeated,
            gaps_opened=numbering.gaps_opened,
            gaps_closed=numbering.gaps_closed,
            missing=numbering.missing,
            orphans=self._orphans,
            unknown_removes=self._unknown_removes,
            overflows=self._overflows,
        )

    def apply(self, publisher_id: int, event: KvEvent, at_s: float) -> bool:
        """Apply one event; return whether it was taken, which a repeat is not.

        A `cleared` empties this rank only: the caller empties the worker's others.
        """
        if publisher_id != self._publisher_id:
            # A rank has one publisher, so another one means that the engine began anew, counting from 1.
            self._publisher_id = publisher_id
            self._numbering.restart()
            self._begin(event.event_id)
        given_up = self._numbering.given_up
        place = self._numbering.place(event.event_id)
        if place is Place.REPEATED:
            return False
        if place is Place.RESTARTED:
            self._begin(event.event_id)
        elif self._numbering.given_up != given_up:
            self._lose_gap()
        if self._numbering.awaited and self._gap_at_s is None:
            self._gap_at_s = at_s
        late = place is Place.LATE
        if isinstance(event.data, KvStored):
            self._store(event, event.data, late)
        elif isinstance(event.data, KvRemoved):
            self._remove(event, event.data, late)
        elif late:
            self._clear_late(event.event_id)
        else:
            self.empty()
        if self._gap_at_s is not None:
            if not self._numbering.awaited:
                self._close_gap()
            elif len(self._touched) > MAX_TOUCHED:
                self._lose_gap()
        return True

    def empty(self) -> None:
        """Forget every block, because the worker's cache was cleared; what came before matters no more."""
        for held in self._tiers.values():
            held.clear()
        self._numbering.give_up()
        self._close_gap()
        self._complete = True
        self._loss_untold = False

    def expire_gap(self, at_s: float) -> None:
        """Stop waiting for a gap that has been open for GAP_WAIT_S."""
        if self._gap_at_s is not None and at_s - self._gap_at_s >= GAP_WAIT_S:
            self._lose_gap()

    def take_loss(self) -> bool:
        """Tell once that events were lost; again only after the mirror was complete in between."""
        untold, self._loss_untold = self._loss_untold, False
        return untold

    def _begin(self, first_event_id: int) -> None:
        self._tiers = {Tier.DEVICE: set()}
        self._close_gap()
        self._complete = first_event_id == 1

    def _close_gap(self) -> None:
        self._gap_at_s = None
        self._touched.clear()

    def _lose_gap(self) -> None:
        self._numbering.give_up()
        self._close_gap()
        self._loss_untold = self._loss_untold or self._complete
        self._complete = False

    def _store(self, event: KvEvent, stored: KvStored, late: bool) -> None:
        parent = stored.parent_hash
        if parent is not None and not any(parent in held for held in self._tiers.values()):
            self._orphans += 1
        held = self._tiers.setdefault(event.tier, set())
        held.update(self._unsettled(event, stored.block_hashes, late))
        if len(held) > self.limit_blocks:
            held.clear()
            self._overflows += 1
            self._complete = False

    def _remove(self, event: KvEvent, removed: KvRemoved, late: bool) -> None:
        held = self._tiers.setdefault(event.tier, set())
        block_hashes = set(self._unsettled(event, removed.block_hashes, late))
        self._unknown_removes += len(block_hashes - held)
        held -= block_hashes

    def _unsettled(self, event: KvEvent, block_hashes: tuple[int, ...], late: bool) -> tuple[int, ...]:
        """Return the blocks no newer event has spoken of, and remember this one while a gap is open."""
        if late:
            block_hashes = tuple(
                block_hash
                for block_hash in block_hashes
                if self._touched.get((event.tier, block_hash), -1) < event.event_id
            )
        if self._gap_at_s is not None:
            for block_hash in block_hashes:
                self._touched[event.tier, block_hash] = event.event_id
        return block_hashes

    def _clear_late(self, event_id: int) -> None:
        for tier, held in self._tiers.items():
            held &= {
                block_hash
                for (of, block_hash), newer in self._touched.items()
                if of is tier and newer > event_id
            }
        self._numbering.give_up(below=event_id)
