"""Blocks in a sorted array with changes on top, and evictions that were regretted."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.block_store import MAX_EVICTIONS, PIECE, BlockStore, Evictions
from dynamo_poa.prefixes import UNKNOWN


def store_of(chains: dict[int, int], min_changes: int = 2) -> BlockStore:
    store = BlockStore(min_changes)
    store.put(list(chains), list(chains.values()))
    return store


def test_blocks_of_the_whole_unsigned_range_are_found_in_the_array() -> None:
    """Case E4: hashes above 2^63 are not negative, and none is rounded as a double would be."""
    chains = {0: 1, 2**53 + 1: 2, 2**63 - 1: 3, 2**63: 2**64 - 1, 2**64 - 1: 5}
    store = store_of(chains)
    assert len(store._keys) == 5
    assert {block: store.chain(block) for block in store.blocks()} == chains
    assert [store.chain(block) for block in (1, 2**53, 2**53 + 2, 2**64 - 2)] == [None] * 4


def test_a_known_beginning_is_not_forgotten_and_an_unknown_one_is_learnt() -> None:
    """Invariant: whether the block lies in the array or among the changes."""
    for min_changes in (0, 100):
        store = store_of({1: 11, 2: UNKNOWN}, min_changes)
        store.put([1, 2], [UNKNOWN, 22])
        assert (store.chain(1), store.chain(2), len(store)) == (11, 22, 2)


def test_a_store_made_of_many_blocks_at_once_holds_them_all() -> None:
    """More than a piece, and not in order; an unknown beginning is still learnt."""
    chance = random.Random(2)
    blocks = [chance.getrandbits(64) for _ in range(2 * PIECE + 1)]
    made = BlockStore.of({block: number for number, block in enumerate(blocks)})
    assert (len(made), made.blocks()) == (2 * PIECE + 1, frozenset(blocks))
    assert all(made.chain(block) == number for number, block in enumerate(blocks))
    assert (made.chain(blocks[0]), len(BlockStore.of({}))) == (UNKNOWN, 0)
    made.put((blocks[0],), (9,))
    assert (made.chain(blocks[0]), len(made)) == (9, 2 * PIECE + 1)
    assert made.discard(blocks[:2]) == blocks[:2]


def test_what_was_frozen_does_not_change_and_leaves_out_unknown_beginnings() -> None:
    """Contract: another thread reads it while events go on."""
    store = store_of({1: 11, 2: 12, 3: 13, 4: UNKNOWN})
    store.put([5], [15])
    chains = store.freeze()
    store.discard([1, 5])
    store.put([6], [16])
    later = store.freeze()
    store.clear()
    assert sorted(chains().tolist()) == [11, 12, 13, 15]
    assert sorted(later().tolist()) == [12, 13, 16]
    assert store.freeze()().tolist() == []


def test_letting_go_tells_what_was_held() -> None:
    """A block is let go once, from the array as from the changes."""
    store = store_of({1: 11, 2: 12, 3: 13})
    store.put([4], [14])
    assert store.discard([1, 4, 9, 1]) == [1, 4]
    store.retain([3, 9])
    assert store.blocks() == {3}
    assert (store.chain(3), len(store), 3 in store, 2 in store) == (13, 1, True, False)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(seed=st_.integers(0, 10**6), min_changes=st_.integers(0, 12))
def test_however_often_changes_are_merged_the_store_is_a_dict(seed: int, min_changes: int) -> None:
    """Property: against a dict under random changes, with frozen states checked at the end."""
    chance = random.Random(seed)
    store, model, frozen = BlockStore(min_changes), dict[int, int](), []
    for _ in range(60):
        blocks = chance.sample(range(25), chance.randrange(1, 6))
        kind = chance.random()
        if kind < 0.55:
            chains = [chance.choice((UNKNOWN, block + 100)) for block in blocks]
            store.put(blocks, chains)
            model |= {b: chain or model.get(b, UNKNOWN) for b, chain in zip(blocks, chains, strict=True)}
        elif kind < 0.9:
            assert store.discard(blocks) == [block for block in blocks if model.pop(block, None) is not None]
        elif kind < 0.95:
            store.retain(blocks)
            model = {block: chain for block, chain in model.items() if block in blocks}
        else:
            frozen.append((store.freeze(), sorted(chain for chain in model.values() if chain)))
        assert len(store) == len(model)
        assert {block: chain for block in range(25) if (chain := store.chain(block)) is not None} == model
    assert store.blocks() == set(model)
    assert [sorted(chains().tolist()) for chains, _ in frozen] == [known for _, known in frozen]


def test_a_block_stored_again_in_time_was_evicted_too_early() -> None:
    """Each eviction is regretted at most once, and only within reload_s."""
    evictions = Evictions(30.0, 100)
    evictions.evicted([1, 2, 3], 0.0)
    evictions.stored((1, 9), 10.0)
    evictions.stored((1,), 11.0)
    evictions.stored((2,), 30.0)
    evictions.stored((3,), 30.1)
    assert (evictions.counted, evictions.reloaded) == (3, 2)


def test_a_block_evicted_twice_is_remembered_by_its_last_eviction() -> None:
    """The first eviction's end of memory does not take the second one's with it."""
    evictions = Evictions(30.0, 100)
    evictions.evicted([1], 0.0)
    evictions.stored((1,), 1.0)
    evictions.evicted([1], 20.0)
    evictions.evicted([], 40.0)
    evictions.stored((1,), 45.0)
    assert (evictions.counted, evictions.reloaded) == (2, 2)


def test_evictions_beyond_what_is_remembered_are_not_counted_at_all() -> None:
    """The share of those regretted stays right; blocks that came back hold their place until it expires."""
    evictions = Evictions(30.0, 4)
    evictions.evicted([1, 2, 3], 0.0)
    evictions.evicted([4, 5], 1.0)
    evictions.stored((1, 2, 3, 4, 5), 2.0)
    evictions.evicted([1, 2], 3.0)
    assert (evictions.counted, evictions.reloaded, len(evictions._blocks)) == (3, 3, 3)
    evictions.evicted([6, 7], 31.0)
    assert (evictions.counted, len(evictions._blocks), len(evictions._at_s)) == (5, 2, 2)
    many = Evictions(30.0, 10**9)
    many.evicted(list(range(MAX_EVICTIONS + 1)), 0.0)
    assert many.counted == 0
