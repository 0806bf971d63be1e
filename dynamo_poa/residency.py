"""Which KV blocks lie in the cache of one worker rank, by its `kv-events`.

Owns: the mirror of one rank's cache, per tier, and how far it can be trusted; which prefix each block ends.
Does not own: which rank an event belongs to, or that a clear empties the worker's other ranks (fleet.py),
              how a tier's blocks are kept (block_store.py), how a worker is asked what it holds (resync.py),
              what its answer amounts to (cache_whole.py).
Invariant: a late event never overrules a newer one; `approximate` is false only when every event has been
           applied since the cache was empty or since the worker said what it holds (resync.py); nothing of a
           rank's life before a restart is mixed into the next.
Source: measured: replayed over recordings of the mock engine the mirror is exact; event ids start at 1.
"""

from dynamo_poa.block_store import BlockStore, Evictions
from dynamo_poa.cache_state import CacheSnapshot, CacheState
from dynamo_poa.cache_whole import CacheWhole
from dynamo_poa.ordering import Life, Numbering, Place, Speaker
from dynamo_poa.prefixes import UNKNOWN, roll, rolled
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import KvCleared, KvEvent, KvRemoved, KvStored, Tier

GAP_WAIT_S = 5.0  # measured: reordering is milliseconds, and after a NATS outage everything comes at once
MAX_TOUCHED = 65_536  # blocks remembered while a gap is open; a flood must not buy memory with one lost event
# A tier holding more than this many times the device's capacity has missed removals. Tiers below the device
# are larger than it, hence not 1.
CAPACITY_FACTOR = 4
UNKNOWN_CAPACITY_BLOCKS = 65_536  # where the card does not give it
# Events kept while a worker is asked what it holds, each counting as one and as many as its blocks: 20 MB,
# and a tick's time to apply. A flood of more costs the answer; the worker is asked again.
MAX_SINCE = 131_072
RELOAD_S = 30.0  # as PoaController.caching has it


class CacheMirror:
    """The cache of one (worker_id, dp_rank).

    Memory is bounded: a tier that outgrows its bound is forgotten and built up anew. Blocks stored from then
    on are certain, the old ones are not, and the engine's own eviction makes the mirror true again in time.
    """

    def __init__(self, total_kv_blocks: int | None, reload_s: float = RELOAD_S) -> None:
        """Begin knowing nothing.

        Args:  reload_s: a block stored again so soon after its eviction counts as reloaded.
        """
        capacity_blocks = total_kv_blocks or UNKNOWN_CAPACITY_BLOCKS
        self.limit_blocks = CAPACITY_FACTOR * capacity_blocks
        self.stored_blocks = 0  # in the device tier, since the rank appeared
        self._total_kv_blocks = total_kv_blocks
        self._tiers: dict[Tier, BlockStore] = {Tier.DEVICE: BlockStore()}
        self._evictions = Evictions(reload_s, capacity_blocks)
        self._numbering = Numbering()
        self._speaker = Speaker()
        self._complete = False  # every event since the cache was empty has been applied or is awaited
        self._gap_at_s: float | None = None
        # While a gap is open: the newest event that spoke of a block, so that a late one cannot undo it.
        self._touched: dict[tuple[Tier, int], int] = {}
        # Meanwhile: parent and tokens hash of blocks whose beginning is not known yet, for it may come late.
        self._parentless: dict[int, tuple[int, int]] = {}
        self._loss_untold = False
        # Events since the worker was asked what it holds, and the newest before; None while it is not asked.
        self._since: list[KvEvent] | None = None
        self._since_size = 0
        self._asked_at_id = 0
        self._orphans = 0
        self._unknown_removes = 0
        self._overflows = 0

    def blocks(self, tier: Tier = Tier.DEVICE) -> frozenset[int]:
        """Return the hashes resident in a tier."""
        return self._tiers[tier].blocks() if tier in self._tiers else frozenset()

    def snapshot(self, key: WorkerKey) -> CacheSnapshot:
        """Return what lies there now, at no cost: arrays are made by whoever looks at them."""
        return CacheSnapshot(
            key=key,
            chains=self._tiers[Tier.DEVICE].freeze(),
            lower={tier: held.freeze() for tier, held in self._tiers.items() if held and tier != Tier.DEVICE},
            total_blocks=self._total_kv_blocks,
            approximate=self._approximate,
            evicted=self._evictions.counted,
            reloaded=self._evictions.reloaded,
            resident_blocks=self._resident_blocks,
        )

    def state(self) -> CacheState:
        """Return what is known now."""
        numbering = self._numbering
        return CacheState(
            resident_blocks=self._resident_blocks,
            lower_blocks={
                tier.value: len(held) for tier, held in self._tiers.items() if held and tier != Tier.DEVICE
            },
            approximate=self._approximate,
            duplicates=numbering.repeated,
            gaps_opened=numbering.gaps_opened,
            gaps_closed=numbering.gaps_closed,
            missing=numbering.missing,
            orphans=self._orphans,
            unknown_removes=self._unknown_removes,
            overflows=self._overflows,
        )

    def apply(self, publisher_id: int, event: KvEvent, at_s: float) -> bool:
        """Apply one event; return whether it was taken, which a repeat is not, nor one from a past life.

        A `cleared` empties this rank only: the caller empties the worker's others.
        """
        if publisher_id != self._speaker.publisher_id:
            if self._speaker.hear(publisher_id, at_s) is Life.PAST:
                return False
            # A rank has one publisher, so another one means that the engine began anew, counting from 1.
            self._numbering.restart()
            self._begin(event.event_id)
        if self._since is not None:
            self._keep(self._since, event)
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
            self._store(event, event.data, late, at_s)
        elif isinstance(event.data, KvRemoved):
            self._remove(event, event.data, late, at_s)
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
        self._since = None  # an answer may be older than this
        self._evictions.clear()
        self._numbering.give_up()
        self._close_gap()
        self._complete = True
        self._loss_untold = False

    @property
    def asks(self) -> int | None:
        """Return the publisher to be asked what lies there, as events were missed for good; None else."""
        whole = self._complete or self._gap_at_s is not None or self._since is not None
        return None if whole else self._speaker.publisher_id

    def ask(self) -> None:
        """Keep the events to come: an answer is of the moment it is given at, which is later."""
        self._since, self._since_size, self._asked_at_id = [], 0, self._numbering.newest or 0

    def answer(self, publisher_id: int, held: CacheWhole | None, at_s: float) -> bool:
        """Take over what a worker says it holds and what it has said since; return whether it was of use.

        One that holds more than any cache of its size is not believed.

        Args:  held: None when it did not answer.
        """
        since, self._since = self._since, None
        if since is None or held is None or publisher_id != self._speaker.publisher_id:
            return False
        if held.last_event_id < self._asked_at_id:
            return False  # older than what was known when it was asked
        if any(len(blocks) > self.limit_blocks for blocks in held.tiers.values()):
            return False
        counts = self._evictions, self.stored_blocks  # what came since has been counted
        self._evictions = Evictions(0.0, 0)
        self._begin(1)
        self._numbering.restart()
        self._numbering.place(held.last_event_id)
        self._tiers = dict(held.tiers)
        for event in since:
            if event.event_id > held.last_event_id:
                self.apply(publisher_id, event, at_s)
        self._evictions, self.stored_blocks = counts
        return True

    def expire_gap(self, at_s: float) -> None:
        """Stop waiting for a gap that has been open for GAP_WAIT_S."""
        if self._gap_at_s is not None and at_s - self._gap_at_s >= GAP_WAIT_S:
            self._lose_gap()

    def take_loss(self) -> bool:
        """Tell once that events were lost; again only after the mirror was complete in between."""
        untold, self._loss_untold = self._loss_untold, False
        return untold

    @property
    def _approximate(self) -> bool:
        return not self._complete or bool(self._numbering.awaited)

    @property
    def _resident_blocks(self) -> int | None:
        known = self._complete or self._speaker.publisher_id is not None
        return len(self._tiers[Tier.DEVICE]) if known else None

    def _begin(self, first_event_id: int) -> None:
        self._tiers = {Tier.DEVICE: BlockStore()}
        self._evictions.clear()
        self._close_gap()
        self._complete = first_event_id == 1

    def _keep(self, since: list[KvEvent], event: KvEvent) -> None:
        """Keep an event for the answer that is awaited, or give that up: too much happens meanwhile."""
        since.append(event)
        data = event.data
        self._since_size += 1 if isinstance(data, KvCleared) else 1 + len(data.block_hashes)
        if self._since_size > MAX_SINCE:
            self._since = None

    def _close_gap(self) -> None:
        self._gap_at_s = None
        self._touched.clear()
        self._find_parents()

    def _lose_gap(self) -> None:
        self._numbering.give_up()
        self._close_gap()
        self._loss_untold = self._loss_untold or self._complete
        self._complete = False

    def _store(self, event: KvEvent, stored: KvStored, late: bool, at_s: float) -> None:
        blocks, parent = stored.block_hashes, stored.parent_hash
        chain = None if parent is None else self._chain(parent)
        self._orphans += parent is not None and chain is None
        chains = self._chains_of(stored, chain, wait=self._gap_at_s is not None)
        if self._gap_at_s is not None:
            chains_of = dict(zip(blocks, chains, strict=True))
            blocks = self._unsettled(event, blocks, late)
            chains = [chains_of[block] for block in blocks]
        held = self._tier(event.tier)
        held.put(blocks, chains)
        if event.tier is Tier.DEVICE:
            self.stored_blocks += len(blocks)
            self._evictions.stored(blocks, at_s)
        if len(held) > self.limit_blocks:
            held.clear()
            self._overflows += 1
            self._complete = False

    def _chains_of(self, stored: KvStored, chain: int | None, *, wait: bool) -> list[int]:
        """Return the chain hash of each block.

        Args:  chain: the parent's.  wait: where that is not known, it may come.
        """
        parent, blocks = stored.parent_hash, stored.block_hashes
        if parent is None or chain:
            return rolled(chain, stored.tokens_hashes)
        if wait:
            lineage = zip((parent, *blocks), stored.tokens_hashes, strict=False)
            self._parentless.update(zip(blocks, lineage, strict=True))
        return [UNKNOWN] * len(blocks)

    def _remove(self, event: KvEvent, removed: KvRemoved, late: bool, at_s: float) -> None:
        held = self._tier(event.tier)
        block_hashes = set(removed.block_hashes)
        if self._gap_at_s is not None:
            block_hashes = set(self._unsettled(event, removed.block_hashes, late))
        gone = held.discard(block_hashes)
        self._unknown_removes += len(block_hashes) - len(gone)
        if event.tier is Tier.DEVICE:
            self._evictions.evicted(gone, at_s)

    def _tier(self, tier: Tier) -> BlockStore:
        held = self._tiers.get(tier)
        if held is None:
            held = self._tiers[tier] = BlockStore()
        return held

    def _chain(self, block_hash: int) -> int | None:
        """Return a block's chain hash, whichever tier it is in; None where it is in none."""
        found = None
        for held in self._tiers.values():
            chain = held.chain(block_hash)
            if chain:
                return chain
            found = found if chain is None else chain
        return found

    def _find_parents(self) -> None:
        """Give blocks that came before their parent did its continuation, now that nothing is awaited."""
        while self._parentless:
            block_hash, (parent, tokens_hash) = self._parentless.popitem()
            line = [(block_hash, tokens_hash)]
            while (step := self._parentless.pop(parent, None)) is not None:
                line.append((parent, step[1]))
                parent = step[0]
            chain = self._chain(parent)
            if not chain:
                continue
            for block_hash, tokens_hash in reversed(line):
                chain = roll(chain, tokens_hash)
                for held in self._tiers.values():
                    if block_hash in held:
                        held.put((block_hash,), (chain,))

    def _unsettled(self, event: KvEvent, block_hashes: tuple[int, ...], late: bool) -> tuple[int, ...]:
        """Return the blocks no newer event has spoken of, and remember this one, as a gap is open."""
        if late:
            block_hashes = tuple(
                block_hash
                for block_hash in block_hashes
                if self._touched.get((event.tier, block_hash), -1) < event.event_id
            )
        for block_hash in block_hashes:
            self._touched[event.tier, block_hash] = event.event_id
        return block_hashes

    def _clear_late(self, event_id: int) -> None:
        for tier, held in self._tiers.items():
            held.retain(
                block_hash
                for (of, block_hash), newer in self._touched.items()
                if of is tier and newer > event_id
            )
        self._numbering.give_up(below=event_id)
