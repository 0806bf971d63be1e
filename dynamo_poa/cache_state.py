"""What is known of a rank's cache at one instant: in figures, and block by block.

Owns: the two records.
Does not own: how they come about (residency.py), what is made of them (placement.py, copies.py).
Invariant: a snapshot does not change: another thread may read it while events go on.
Source: contract: absent is not zero, and what is not certain says so.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import msgspec

from dynamo_poa.block_store import HashArray
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import Tier


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


class CacheSnapshot:
    """A rank's cache at one instant, to be read in any thread. The arrays are made when first asked for.

    chains:           chain hash of each block in the device tier (prefixes.py), unsorted; without the blocks
                      whose beginning is not known, which no prefix can be found in
    lower:            the same for each other tier that holds any
    resident_blocks:  in the device tier, those too; None while the rank has said nothing of its cache
    total_blocks:     capacity by the card
    approximate:      as CacheState has it
    evicted:          blocks evicted from the device tier since the rank appeared, as far as they were counted
    reloaded:         those stored again within reload_s
    """

    def __init__(
        self,
        key: WorkerKey,
        chains: HashArray | Callable[[], HashArray],
        lower: Mapping[Tier, HashArray | Callable[[], HashArray]],
        total_blocks: int | None,
        approximate: bool,
        evicted: int = 0,
        reloaded: int = 0,
        resident_blocks: int | None = None,
    ) -> None:
        """Take a snapshot; an array may be given as what makes it."""
        self.key = key
        self.total_blocks = total_blocks
        self.approximate = approximate
        self.evicted = evicted
        self.reloaded = reloaded
        self.resident_blocks = resident_blocks
        self._chains = chains
        self._lower = lower

    @cached_property
    def chains(self) -> HashArray:
        """Return the chain hashes of the device tier."""
        return self._chains() if callable(self._chains) else self._chains

    @cached_property
    def lower(self) -> dict[Tier, HashArray]:
        """Return those of the other tiers."""
        return {tier: held() if callable(held) else held for tier, held in self._lower.items()}
