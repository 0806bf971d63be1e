"""Which blocks one tier of a cache holds, in little memory, and which evictions were regretted.

Owns: the set of blocks with the chain hash of each; recent evictions, and how many of them came back.
Does not own: which events change it, in which order they count (residency.py).
Invariant: a known chain hash is never replaced by UNKNOWN; what `freeze` has handed out does not change, so
           another thread may read it; an array is replaced, never written to.
Source: one level of a log-structured merge tree: a sorted array of 16 bytes a block, and dicts of what has
        changed since, which are merged in when they have grown to a share of it. A dict alone takes 150.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.prefixes import UNKNOWN

HashArray = NDArray[np.uint64]

MIN_CHANGES = 8192  # a tier of so few blocks never needs an array
MERGE_FRAC = 1 / 16  # merging costs about as much per change as a change itself, and changes 10 bytes a block
PIECE = 16_384  # blocks put into an array by one call, which takes 1 ms
MAX_EVICTIONS = 65_536  # remembered of a tier, at 100 bytes each
_NONE: HashArray = np.zeros(0, np.uint64)


class BlockStore:
    """A set of blocks, each with its chain hash."""

    __slots__ = (
        "_chain_at",
        "_chains",
        "_gone",
        "_key_at",
        "_keys",
        "_min_changes",
        "_most_changes",
        "_new",
        "_shared",
    )

    def __init__(self, min_changes: int = MIN_CHANGES) -> None:
        """Begin empty; changes are merged in when there are more than so many and than their share."""
        self._min_changes = min_changes
        self._new: dict[int, int] = {}  # blocks not in the array, or there and gone
        self._gone: set[int] = set()  # places in the array
        self._shared = False  # both have been handed out, and are copied before they change
        self._rest(_NONE, _NONE)

    @classmethod
    def of(cls, chains: Mapping[int, int]) -> Self:
        """Return a store of blocks with these chain hashes, made piece by piece: others have their turn."""
        store, count = cls(), len(chains)
        keys, values = np.empty(count, np.uint64), np.empty(count, np.uint64)
        of_keys, of_values = iter(chains), iter(chains.values())
        for start in range(0, count, PIECE):
            size = min(PIECE, count - start)
            keys[start : start + size] = np.fromiter(of_keys, np.uint64, size)
            values[start : start + size] = np.fromiter(of_values, np.uint64, size)
        order = np.argsort(keys)
        store._rest(keys[order], values[order])
        return store

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return len(self._keys) - len(self._gone) + len(self._new)

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is held."""
        return block in self._new or self._place(block) is not None

    def chain(self, block: int) -> int | None:
        """Return the chain hash of a block, which may be UNKNOWN; None where it is not held."""
        chain = self._new.get(block)
        if chain is None and (place := self._place(block)) is not None:
            chain = self._chain_at[place]
        return chain

    def put(self, blocks: Sequence[int], chains: Sequence[int]) -> None:
        """Hold some blocks, whether they were held or not."""
        if self._shared:
            self._own()
        new = self._new
        if not len(self._keys) and UNKNOWN not in chains:
            new.update(zip(blocks, chains, strict=True))
        else:
            for block, chain in zip(blocks, chains, strict=True):
                if block in new:
                    new[block] = chain or new[block]
                elif (place := self._place(block)) is None:
                    new[block] = chain
                elif chain != UNKNOWN and self._chain_at[place] == UNKNOWN:
                    self._gone.add(place)
                    new[block] = chain
        if len(new) + len(self._gone) > self._most_changes:
            self._merge()

    def discard(self, blocks: Iterable[int]) -> list[int]:
        """Let some blocks go; return those that were held."""
        if self._shared:
            self._own()
        new, held = self._new, []
        for block in blocks:
            if new.pop(block, None) is None:
                place = self._place(block)
                if place is None:
                    continue
                self._gone.add(place)
            held.append(block)
        if len(new) + len(self._gone) > self._most_changes:
            self._merge()
        return held

    def retain(self, blocks: Iterable[int]) -> None:
        """Let every block go but some."""
        kept = {block: chain for block in blocks if (chain := self.chain(block)) is not None}
        self.clear()
        self.put(list(kept), list(kept.values()))

    def clear(self) -> None:
        """Let every block go."""
        self._new, self._gone, self._shared = {}, set(), False
        self._rest(_NONE, _NONE)

    def blocks(self) -> frozenset[int]:
        """Return every block held: for tests, as it is large."""
        return frozenset(self._new).union(self._keys[_alive(self._keys, self._gone)].tolist())

    def freeze(self) -> Callable[[], HashArray]:
        """Return what gives the known chain hashes of this instant, unsorted; at no cost before it is called.

        It may be called in another thread, and later.
        """
        self._shared = True
        chains, gone, new = self._chains, self._gone, self._new
        return lambda: _known(chains, gone, new)

    def _place(self, block: int) -> int | None:
        """Return where in the array a block is held; None where it is not."""
        keys = self._key_at
        place = bisect_left(keys, block)
        return place if place < len(keys) and keys[place] == block and place not in self._gone else None

    def _own(self) -> None:
        self._new, self._gone, self._shared = self._new.copy(), self._gone.copy(), False

    def _merge(self) -> None:
        alive = _alive(self._keys, self._gone)
        keys, chains = self._keys[alive], self._chains[alive]
        new_keys = np.fromiter(self._new, np.uint64, len(self._new))
        order = np.argsort(new_keys)
        new_keys = new_keys[order]
        new_chains = np.fromiter(self._new.values(), np.uint64, len(self._new))[order]
        places = np.searchsorted(keys, new_keys)
        self._new, self._gone, self._shared = {}, set(), False
        self._rest(np.insert(keys, places, new_keys), np.insert(chains, places, new_chains))

    def _rest(self, keys: HashArray, chains: HashArray) -> None:
        """Rest on a sorted array of blocks and their chain hashes."""
        self._keys, self._chains = keys, chains
        # Views give Python's own integers, which a search compares several times faster than numpy's.
        self._key_at, self._chain_at = keys.data, chains.data
        self._most_changes = max(self._min_changes, int(len(keys) * MERGE_FRAC))


class Evictions:
    """Blocks that were evicted lately, and how many were stored again soon: whose eviction came too early.

    As many are remembered as the cache holds, at most MAX_EVICTIONS. Beyond that evictions are not counted
    at all, rather than as ones that nobody regretted.

    counted:   evictions remembered so far
    reloaded:  those stored again within reload_s
    """

    __slots__ = ("_at_s", "_blocks", "_instants", "_most", "_reload_s", "_sizes", "counted", "reloaded")

    def __init__(self, reload_s: float, capacity_blocks: int) -> None:
        self.counted = 0
        self.reloaded = 0
        self._reload_s = reload_s
        self._most = min(capacity_blocks, MAX_EVICTIONS)
        self._at_s: dict[int, float] = {}
        # Each eviction's instant, its size, and all blocks in a row, with those that have come back: numbers
        # only, as containers that live for long would make the garbage collector run.
        self._instants: deque[float] = deque()
        self._sizes: deque[int] = deque()
        self._blocks: deque[int] = deque()

    def evicted(self, blocks: list[int], at_s: float) -> None:
        """Remember an eviction."""
        self._forget(at_s - self._reload_s)
        if not blocks or len(self._blocks) + len(blocks) > self._most:
            return
        self.counted += len(blocks)
        self._instants.append(at_s)
        self._sizes.append(len(blocks))
        self._blocks.extend(blocks)
        self._at_s.update(dict.fromkeys(blocks, at_s))

    def stored(self, blocks: Sequence[int], at_s: float) -> None:
        """Count the blocks whose eviction this undoes."""
        if not self._at_s or self._at_s.keys().isdisjoint(blocks):
            return
        for block in blocks:
            evicted_at_s = self._at_s.pop(block, None)
            if evicted_at_s is not None and at_s - evicted_at_s <= self._reload_s:
                self.reloaded += 1

    def clear(self) -> None:
        """Forget what was evicted; the counts stay."""
        for kept in (self._at_s, self._instants, self._sizes, self._blocks):
            kept.clear()

    def _forget(self, before_s: float) -> None:
        while self._instants and self._instants[0] < before_s:
            at_s = self._instants.popleft()
            for _ in range(self._sizes.popleft()):
                block = self._blocks.popleft()
                if self._at_s.get(block) == at_s:
                    del self._at_s[block]


def _alive(keys: HashArray, gone: set[int]) -> NDArray[np.bool_]:
    alive = np.ones(len(keys), np.bool_)
    alive[np.fromiter(gone, np.intp, len(gone))] = False
    return alive


def _known(chains: HashArray, gone: set[int], new: dict[int, int]) -> HashArray:
    held: HashArray = np.concatenate(
        (chains[_alive(chains, gone)], np.fromiter(new.values(), np.uint64, len(new)))
    )
    known: HashArray = held[held != UNKNOWN]
    return known
