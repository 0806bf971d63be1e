"""The mirror of one rank's cache: what it holds, and when it is to be believed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.residency import CAPACITY_FACTOR, GAP_WAIT_S, CacheMirror, CacheState
from dynamo_poa.wire import KvCleared, KvEvent, KvRemoved, KvStored, Tier

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
