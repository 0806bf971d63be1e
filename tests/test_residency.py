"""The mirror of one rank's cache: what it holds, and when it is to be believed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.cache_state import CacheState
from dynamo_poa.cache_whole import whole_of
from dynamo_poa.ordering import REPLACED_S
from dynamo_poa.prefixes import UNKNOWN, prefix_hashes, roll, rolled
from dynamo_poa.residency import CAPACITY_FACTOR, GAP_WAIT_S, MAX_SINCE, CacheMirror
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import CacheHeld, KvCleared, KvEvent, KvRemoved, KvStored, Tier

PUBLISHER = 5


def tokens_of(block_hash: int) -> int:
    """What the tests' blocks hold is told by their hash."""
    return block_hash * 7 + 1


def stored(event_id: int, *hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> KvEvent:
    return KvEvent(1, 0, event_id, tier, KvStored(parent, hashes, tuple(map(tokens_of, hashes))))


def removed(event_id: int, *hashes: int, tier: Tier = Tier.DEVICE) -> KvEvent:
    return KvEvent(1, 0, event_id, tier, KvRemoved(hashes))


def cleared(event_id: int) -> KvEvent:
    return KvEvent(1, 0, event_id, Tier.DEVICE, KvCleared())


def chains_of(mirror: CacheMirror, tier: Tier = Tier.DEVICE) -> dict[int, int | None]:
    return {block_hash: mirror._tiers[tier].chain(block_hash) for block_hash in mirror.blocks(tier)}


def mirror_of(*events: KvEvent, total_kv_blocks: int = 100) -> CacheMirror:
    mirror = CacheMirror(total_kv_blocks)
    for event in events:
        mirror.apply(PUBLISHER, event, 0.0)
    return mirror


def test_before_the_first_event_the_cache_is_unknown_and_not_empty() -> None:
    """Contract: absent is not zero."""
    assert CacheMirror(100).state() == CacheState(resident_blocks=None, approximate=True)


def test_a_mirror_that_saw_the_first_event_is_exact() -> None:
    """Measured: event ids start at 1."""
    assert mirror_of(stored(1, 11, 12), removed(2, 12)).state() == CacheState(
        resident_blocks=1, approximate=False
    )


def test_a_mirror_that_joined_late_is_approximate_until_the_cache_is_cleared() -> None:
    """Case E3: partial history; nothing is left unknown once the cache is empty."""
    mirror = mirror_of(stored(812, 11))
    assert mirror.state().approximate
    mirror.apply(PUBLISHER, cleared(813), 0.0)
    assert mirror.state() == CacheState(resident_blocks=0, approximate=False)


def test_each_tier_holds_its_own_blocks_and_a_parent_may_lie_in_any() -> None:
    """Measured: a block may lie in several tiers and leave them one by one; `cleared` means all."""
    mirror = mirror_of(
        stored(1, 11, 12),
        stored(2, 11, 12, tier=Tier.HOST_PINNED),
        removed(3, 12),
        stored(4, 13, parent=12, tier=Tier.DISK),
    )
    assert mirror.blocks() == {11}
    assert mirror.blocks(Tier.HOST_PINNED) == {11, 12}
    assert mirror.state() == CacheState(
        resident_blocks=1, lower_blocks={"host_pinned": 2, "disk": 1}, approximate=False
    )
    mirror.apply(PUBLISHER, cleared(5), 0.0)
    assert mirror.state() == CacheState(resident_blocks=0, approximate=False)


def test_a_late_event_does_not_undo_a_newer_one() -> None:
    """Case E1: late arrivals; event 2 stored what event 3 has removed, event 4 removed what 5 has stored."""
    mirror = mirror_of(stored(1, 7), removed(3, 8), stored(5, 7), removed(4, 7), stored(2, 8, 9))
    assert mirror.blocks() == {7, 9}
    assert not mirror.state().approximate


def test_a_late_clear_spares_what_came_after_it() -> None:
    """Case E1: events 1 to 3 are older than the clear, 5 is newer, and 3 must not come back."""
    mirror = mirror_of(stored(1, 1), stored(2, 2), stored(5, 5), cleared(4))
    assert mirror.blocks() == {5}
    mirror.apply(PUBLISHER, stored(3, 3), 0.0)
    assert mirror.blocks() == {5}
    assert mirror.state().missing == 1


def test_an_open_gap_makes_the_mirror_approximate_and_is_given_up_in_time() -> None:
    """Case E1: missing stays reported, with one warning however long it lasts."""
    mirror = mirror_of(stored(1, 1), stored(3, 3))
    mirror.expire_gap(GAP_WAIT_S - 0.1)
    assert (mirror.state().approximate, mirror.state().missing, mirror.take_loss()) == (True, 1, False)
    mirror.expire_gap(GAP_WAIT_S)
    assert (mirror.take_loss(), mirror.take_loss()) == (True, False)
    mirror.apply(PUBLISHER, stored(6, 6), 10.0)
    mirror.expire_gap(10.0 + GAP_WAIT_S)
    assert (mirror.take_loss(), mirror.state().missing, mirror.state().approximate) == (False, 3, True)
    assert mirror.apply(PUBLISHER, stored(2, 2), 20.0) is False
    assert mirror.blocks() == {1, 3, 6}


def test_a_gap_too_wide_to_wait_for_is_lost_at_once() -> None:
    """Case E8: after a drop, residency is approximate."""
    mirror = mirror_of(stored(1, 1), stored(5000, 2))
    assert (mirror.take_loss(), mirror.state().missing, mirror.state().approximate) == (True, 4998, True)


def test_another_publisher_means_another_engine() -> None:
    """Measured: a restart brings a new publisher_id and event_id 1; the old cache is gone with it."""
    mirror = mirror_of(stored(1, 1), stored(2, 2))
    mirror.apply(6, stored(1, 9), 0.0)
    assert mirror.blocks() == {9}
    assert mirror.state() == CacheState(resident_blocks=1, approximate=False)


def test_a_tier_that_outgrows_its_bound_is_forgotten_and_called_approximate() -> None:
    """Invariant: memory is bounded by the cache's capacity."""
    limit = CAPACITY_FACTOR * 10
    mirror = mirror_of(stored(1, *range(limit)), total_kv_blocks=10)
    assert mirror.state() == CacheState(resident_blocks=limit, approximate=False)
    mirror.apply(PUBLISHER, stored(2, limit), 0.0)
    assert mirror.state() == CacheState(resident_blocks=0, approximate=True, overflows=1)


def test_a_flood_during_a_gap_costs_no_memory() -> None:
    """Case E8: one lost event and then 200,000 blocks a second."""
    mirror = mirror_of(stored(1, 0), total_kv_blocks=100_000)
    for event_id in range(3, 3 + 1100):
        mirror.apply(PUBLISHER, stored(event_id, *range(event_id * 64, event_id * 64 + 64)), 0.0)
    assert len(mirror._touched) == 0
    assert (mirror.state().missing, mirror.take_loss()) == (1, True)


def test_a_block_ends_the_prefix_that_routers_call_by_the_same_hash() -> None:
    """Contract: whatever engines call their blocks; a decoded block goes on where the prompt ended."""
    mirror = mirror_of(stored(1, 901, 17), stored(2, 5, 400, parent=17), stored(3, 6, parent=400))
    prompt = [tokens_of(block_hash) for block_hash in (901, 17, 5, 400, 6)]
    chains = chains_of(mirror)
    assert (chains[901], chains[17], chains[400]) == prefix_hashes(prompt)
    assert chains[6] == roll(chains[400], prompt[4])
    snapshot = mirror.snapshot(WorkerKey(1, 0))
    assert sorted(snapshot.chains.tolist()) == sorted(rolled(None, prompt))
    assert (snapshot.resident_blocks, snapshot.total_blocks, snapshot.approximate) == (5, 100, False)


def test_a_prefix_may_go_on_in_another_tier() -> None:
    """Measured: tiers hold their own blocks; the prefix is the same."""
    mirror = mirror_of(stored(1, 1, 2), stored(2, 3, parent=2, tier=Tier.DISK))
    assert chains_of(mirror, Tier.DISK) == {3: rolled(None, [tokens_of(block) for block in (1, 2, 3)])[2]}
    lower = mirror.snapshot(WorkerKey(1, 0)).lower
    assert {tier: chains.tolist() for tier, chains in lower.items()} == {
        Tier.DISK: list(chains_of(mirror, Tier.DISK).values())
    }


def test_what_follows_an_unknown_block_matches_no_prefix_and_counts_as_resident() -> None:
    """Case E3: its beginning was stored before our time."""
    mirror = mirror_of(stored(812, 11, 12, parent=10), stored(813, 13, parent=12), stored(814, 7))
    snapshot = mirror.snapshot(WorkerKey(1, 0))
    assert (snapshot.chains.tolist(), snapshot.resident_blocks) == ([tokens_of(7)], 4)
    assert (snapshot.approximate, mirror.state().orphans) == (True, 1)


def test_a_parent_that_comes_late_gives_its_children_their_beginning() -> None:
    """Case E1: late arrivals; children of children, stored in another order than they continue each other."""
    mirror = mirror_of(
        stored(1, 1), stored(5, 5, 6, parent=4), stored(4, 4, parent=3), stored(3, 3, parent=2)
    )
    assert [chains_of(mirror)[block] for block in (3, 4, 5, 6)] == [0, 0, 0, 0]
    mirror.apply(PUBLISHER, stored(2, 2, parent=1), 0.0)
    known = rolled(None, [tokens_of(block) for block in range(1, 7)])
    assert chains_of(mirror) == dict(zip(range(1, 7), known, strict=True))
    assert len(mirror._parentless) == 0


def test_an_unknown_rank_has_said_nothing_of_its_cache() -> None:
    """Contract: absent is not zero."""
    snapshot = CacheMirror(100).snapshot(WorkerKey(1, 0))
    assert (snapshot.resident_blocks, snapshot.chains.tolist(), snapshot.approximate) == (None, [], True)


def test_a_block_that_came_back_in_time_counts_as_reloaded() -> None:
    """Definition: stored again within reload_s of its eviction; a cleared cache regrets nothing."""
    mirror = CacheMirror(100, reload_s=10.0)
    steps = [
        (0.0, stored(1, 1, 2, 3, 4)),
        (1.0, removed(2, 4, 3, 2)),
        (2.0, removed(3, 1, 99)),
        (11.0, stored(4, 1, 2)),
        (12.1, stored(5, 3, parent=2)),
        (13.0, removed(6, 3)),
        (13.0, cleared(7)),
        (14.0, stored(8, 3, 1)),
    ]
    for at_s, event in steps:
        mirror.apply(PUBLISHER, event, at_s)
    snapshot = mirror.snapshot(WorkerKey(1, 0))
    assert (snapshot.evicted, snapshot.reloaded, mirror.stored_blocks) == (5, 2, 9)


def test_what_the_old_engine_said_comes_too_late_after_a_restart() -> None:
    """Case E1: reordered across a restart; a publisher still heard later was not replaced after all."""
    mirror = mirror_of(stored(1, 1), stored(2, 2))
    assert mirror.apply(6, stored(1, 9), 10.0) is True
    assert mirror.apply(PUBLISHER, stored(3, 3), 11.0) is False
    assert mirror.apply(PUBLISHER, cleared(4), 10.0 + REPLACED_S) is False
    assert mirror.apply(6, stored(2, 8, parent=9), 12.0) is True
    assert mirror.blocks() == {9, 8}
    assert mirror.state() == CacheState(resident_blocks=2, approximate=False)
    assert mirror.apply(PUBLISHER, stored(5, 5), 11.0 + REPLACED_S) is True
    assert mirror.blocks() == {5}


@settings(derandomize=True, max_examples=200, deadline=None)
@given(seed=st_.integers(0, 10**6), repeats=st_.integers(0, 5))
def test_whatever_the_order_of_arrival_the_mirror_ends_where_the_cache_did(seed: int, repeats: int) -> None:
    """Property: any reordering and repetition of a whole history ends in the same blocks."""
    chance = random.Random(seed)
    events: list[KvEvent] = []
    truth: set[int] = set()
    for event_id in range(1, 13):
        hashes = tuple({chance.randrange(6) for _ in range(2)})
        kind = chance.random()
        if kind < 0.6:
            events.append(stored(event_id, *hashes))
            truth |= set(hashes)
        elif kind < 0.95:
            events.append(removed(event_id, *hashes))
            truth -= set(hashes)
        else:
            events.append(cleared(event_id))
            truth.clear()
    # The first event stays first: what was before the first one seen is not awaited.
    rest = events[1:] + chance.choices(events, k=repeats)
    chance.shuffle(rest)
    mirror = mirror_of(events[0], *rest)
    assert mirror.blocks() == truth
    assert not mirror.state().approximate


def test_a_mirror_asks_once_events_are_missed_for_good() -> None:
    """Contract: re-synchronise; a gap that may close by itself is waited for, and one question is enough."""
    mirror = CacheMirror(100)
    assert mirror.asks is None
    mirror.apply(PUBLISHER, stored(1, 1), 0.0)
    assert mirror.asks is None
    mirror.apply(PUBLISHER, stored(3, 3), 0.0)
    assert mirror.asks is None
    mirror.expire_gap(GAP_WAIT_S)
    assert mirror.asks == PUBLISHER
    mirror.ask()
    assert mirror.asks is None
    assert mirror.answer(PUBLISHER, None, 6.0) is False
    assert mirror.asks == PUBLISHER


def test_an_answer_and_the_events_since_make_the_mirror_whole() -> None:
    """The answer is of the moment it was given at: what came later follows, what came before is in it."""
    mirror = mirror_of(stored(50, 7, parent=6), stored(51, 8))
    mirror.ask()
    for event in (removed(52, 8), stored(53, 9, parent=7), removed(54, 2), stored(55, 4, parent=3)):
        mirror.apply(PUBLISHER, event, 1.0)
    counted = mirror.snapshot(WorkerKey(1, 0)).evicted, mirror.stored_blocks
    # As of event 53, children before parents.
    held = CacheHeld(
        (stored(0, 9, parent=7), stored(1, 7, parent=6), stored(2, 6), stored(3, 2), stored(4, 3)), 53
    )
    assert mirror.answer(PUBLISHER, whole_of(held), 2.0) is True
    known = rolled(None, map(tokens_of, (6, 7, 9)))
    beyond = rolled(None, map(tokens_of, (3, 4)))
    assert chains_of(mirror) == {6: known[0], 7: known[1], 9: known[2], 3: beyond[0], 4: beyond[1]}
    state = mirror.state()
    assert (state.approximate, state.missing, state.duplicates, mirror.asks) == (False, 0, 0, None)
    assert (mirror.snapshot(WorkerKey(1, 0)).evicted, mirror.stored_blocks) == counted
    mirror.apply(PUBLISHER, stored(56, 5, parent=4), 3.0)
    assert mirror.blocks() == {6, 7, 9, 3, 4, 5}
    assert not mirror.state().approximate


def test_an_empty_cache_is_an_answer() -> None:
    """A worker that has stored nothing yet: its next event is its first."""
    mirror = mirror_of(stored(3, 3))
    mirror.ask()
    assert mirror.answer(PUBLISHER, whole_of(CacheHeld((), 3)), 0.0) is True
    assert mirror.state() == CacheState(resident_blocks=0, approximate=False)


@pytest.mark.parametrize("why", ["older", "restarted", "cleared", "another", "unasked"])
def test_an_answer_that_does_not_fit_what_was_heard_is_refused(why: str) -> None:
    """Invariant: nothing certain is replaced by what may be older, or of another life."""
    mirror = mirror_of(stored(50, 7))
    if why != "unasked":
        mirror.ask()
    if why == "restarted":
        mirror.apply(6, stored(9, 1), 0.0)
    if why == "cleared":
        mirror.empty()
    before = mirror.blocks(), mirror.state()
    held = CacheHeld((stored(0, 99),), 49 if why == "older" else 50)
    assert mirror.answer(6 if why == "another" else PUBLISHER, whole_of(held), 1.0) is False
    assert (mirror.blocks(), mirror.state()) == before


def test_a_flood_while_a_worker_is_asked_costs_the_answer_and_not_the_memory() -> None:
    """Case E8: what is kept for the answer is bounded by blocks, of which an event may have any number."""
    mirror = mirror_of(stored(50, 7), total_kv_blocks=MAX_SINCE)
    mirror.ask()
    flood = KvRemoved(tuple(range(1000, 1000 + MAX_SINCE // 2)))
    for event_id in (51, 52):
        mirror.apply(PUBLISHER, KvEvent(1, 0, event_id, Tier.DEVICE, flood), 1.0)
    assert mirror.asks == PUBLISHER  # it is asked again
    assert mirror.answer(PUBLISHER, whole_of(CacheHeld((stored(0, 9),), 51)), 2.0) is False
    assert (mirror.blocks(), mirror.state().approximate) == ({7}, True)


def test_an_answer_larger_than_any_cache_is_not_believed() -> None:
    """A mirror is bounded by its worker's capacity, whatever that worker says."""
    mirror = mirror_of(stored(50, 7), total_kv_blocks=10)
    mirror.ask()
    dump = tuple(stored(number, 1000 + number) for number in range(CAPACITY_FACTOR * 10 + 1))
    assert mirror.answer(PUBLISHER, whole_of(CacheHeld(dump, 50)), 1.0) is False
    assert (mirror.blocks(), mirror.state().approximate) == ({7}, True)


def test_parents_that_never_come_or_go_in_a_circle_end_no_prefix() -> None:
    """Their blocks are held all the same; each tier has its own, and a parent in another tier counts."""
    host = KvEvent(1, 0, 0, Tier.HOST_PINNED, KvStored(3, (4,), (tokens_of(4),)))
    dump = (stored(0, 1, parent=2), stored(1, 2, parent=1), stored(2, 9, parent=9), stored(3, 8, parent=5))
    tiers = whole_of(CacheHeld((*dump, host, stored(4, 3)), 7)).tiers
    assert {tier: held.blocks() for tier, held in tiers.items()} == {
        Tier.DEVICE: {1, 2, 3, 8, 9},
        Tier.HOST_PINNED: {4},
    }
    assert [tiers[Tier.DEVICE].chain(block) for block in (1, 2, 8, 9)] == [UNKNOWN] * 4
    assert tiers[Tier.HOST_PINNED].chain(4) == rolled(None, map(tokens_of, (3, 4)))[1]


def test_a_gap_within_the_events_since_is_a_gap() -> None:
    """An answer makes up for what was missed before it, not after."""
    mirror = mirror_of(stored(50, 7))
    mirror.ask()
    mirror.apply(PUBLISHER, stored(53, 9), 1.0)
    assert mirror.answer(PUBLISHER, whole_of(CacheHeld((stored(0, 7),), 51)), 2.0) is True
    assert mirror.blocks() == {7, 9}
    assert (mirror.state().approximate, mirror.asks) == (True, None)
    mirror.apply(PUBLISHER, stored(52, 8), 2.5)
    assert mirror.blocks() == {7, 8, 9}
    assert not mirror.state().approximate


class Engine:
    """A prefix cache as engines keep it: prompts over a tree of blocks, evicted from the leaves."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.events: list[KvEvent] = []
        self.held: dict[int, tuple[int | None, int]] = {}  # parent, chain hash

    def prompt(self) -> None:
        """Store what a prompt lacks, as one event; block hashes are the engine's own."""
        path: list[int] = []
        parent, chain = None, None
        for _ in range(self.chance.randrange(1, 5)):
            block = (0 if path == [] else path[-1] * 3) + self.chance.randrange(1, 4)
            path.append(block)
        lacking = [block for block in path if block not in self.held]
        known = path[: len(path) - len(lacking)]
        if known:
            parent, chain = known[-1], self.held[known[-1]][1]
        if not lacking:
            return
        for before, block in zip([parent, *lacking], lacking, strict=False):
            chain = roll(chain, tokens_of(block))
            self.held[block] = (before, chain)
        self.events.append(stored(len(self.events) + 1, *lacking, parent=parent))

    def evict(self) -> None:
        """Remove a leaf."""
        parents = {parent for parent, _ in self.held.values()}
        if leaves := sorted(self.held.keys() - parents):
            leaf = self.chance.choice(leaves)
            del self.held[leaf]
            self.events.append(removed(len(self.events) + 1, leaf))

    def clear(self) -> None:
        """Empty it."""
        self.held.clear()
        self.events.append(cleared(len(self.events) + 1))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(seed=st_.integers(0, 10**6), repeats=st_.integers(0, 5), cleared_frac=st_.sampled_from([0.0, 0.05]))
def test_whatever_the_order_of_arrival_every_block_ends_the_prefix_it_does(
    seed: int, repeats: int, cleared_frac: float
) -> None:
    """Property: against an engine's own account, reordered and repeated at will."""
    engine = Engine(seed)
    while len(engine.events) < 20:
        kind = engine.chance.random()
        if kind < cleared_frac:
            engine.clear()
        elif kind < 0.35:
            engine.evict()
        else:
            engine.prompt()
    rest = engine.events[1:] + engine.chance.choices(engine.events, k=repeats)
    engine.chance.shuffle(rest)
    mirror = mirror_of(engine.events[0], *rest)
    assert chains_of(mirror) == {block: chain for block, (_, chain) in engine.held.items()}
    assert not mirror.state().approximate


@pytest.mark.parametrize("lost", range(1, 20))
def test_after_a_loss_no_block_claims_a_prefix_it_does_not_end(lost: int) -> None:
    """Invariant: a lost event makes blocks unknown or stale, never wrong; and the mirror says so."""
    engine = Engine(lost)
    while len(engine.events) < 20:
        if engine.chance.random() < 0.3:
            engine.evict()
        else:
            engine.prompt()
    mirror = mirror_of(*(event for event in engine.events if event.event_id != lost + 1))
    mirror.expire_gap(GAP_WAIT_S)
    truth: dict[int, int] = {}
    for event in engine.events:
        if isinstance(event.data, KvStored):
            chain = truth[event.data.parent_hash] if event.data.parent_hash is not None else None
            truth |= zip(event.data.block_hashes, rolled(chain, event.data.tokens_hashes), strict=True)
    assert {block: chain for block, chain in chains_of(mirror).items() if chain} == {
        block: truth[block] for block, chain in chains_of(mirror).items() if chain
    }
    assert mirror.state().approximate is (lost < 19)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(seed=st_.integers(0, 10**6))
def test_whatever_was_missed_an_answer_makes_the_mirror_exact(seed: int) -> None:
    """Property: joined late or with losses, asked at any time, answered as of any later event."""
    engine = Engine(seed)
    asked = engine.chance.randrange(5, 12)
    answered = engine.chance.randrange(asked, 20)
    held = CacheHeld((), 0)
    while len(engine.events) < 20:
        if engine.chance.random() < 0.35:
            engine.evict()
        else:
            engine.prompt()
        if len(engine.events) == answered:
            dump = [
                stored(number, block, parent=parent)
                for number, (block, (parent, _)) in enumerate(engine.held.items())
            ]
            engine.chance.shuffle(dump)
            held = CacheHeld(tuple(dump), answered)
    first = engine.chance.randrange(2, asked + 1)
    before = [event for event in engine.events[first - 1 : asked - 1] if engine.chance.random() < 0.8]
    mirror = mirror_of(*before, engine.events[asked - 1])
    mirror.expire_gap(GAP_WAIT_S)
    mirror.ask()
    for event in engine.events[asked:]:
        mirror.apply(PUBLISHER, event, 10.0)
    assert mirror.answer(PUBLISHER, whole_of(held), 11.0) is True
    assert chains_of(mirror) == {block: chain for block, (_, chain) in engine.held.items()}
    assert not mirror.state().approximate
