"""What a worker's answer to being asked for its cache amounts to: each tier's blocks, with their prefixes.

Owns: which prefix each block of an answer ends, whatever the order in which the answer names them.
Does not own: the answer's bytes (wire.py), whether it is of use, what has happened since (residency.py).
Invariant: pure, in any thread: of a large cache it takes seconds, which no tick may wait for. Nor does one
           wait long for Python's own lock: blocks are taken one by one or by the piece. Parents that never
           come, or go round in a circle, end no prefix.
Source: measured: Dynamo 1.4.2 tells a cache as `stored` events, a parent also after its children.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dynamo_poa.block_store import BlockStore
from dynamo_poa.prefixes import UNKNOWN, roll
from dynamo_poa.wire import CacheHeld, KvStored, Tier


class CacheWhole(NamedTuple):
    """A cache as it was after one of its events. The stores belong to whoever takes it."""

    tiers: Mapping[Tier, BlockStore]
    last_event_id: int


def whole_of(held: CacheHeld) -> CacheWhole:
    """Return the whole of a cache from what its worker said."""
    blocks: dict[Tier, dict[int, int]] = {Tier.DEVICE: {}}
    parents: dict[int, tuple[int | None, int]] = {}  # and the block's own tokens
    for event in held.events:
        if isinstance(event.data, KvStored):
            parent, of_tier = event.data.parent_hash, blocks.setdefault(event.tier, {})
            for block, tokens_hash in zip(event.data.block_hashes, event.data.tokens_hashes, strict=True):
                of_tier[block] = UNKNOWN
                parents[block] = parent, tokens_hash
                parent = block
    chains = _chains(parents)
    for of_tier in blocks.values():
        for block in of_tier:
            of_tier[block] = chains[block]
    return CacheWhole({tier: BlockStore.of(of_tier) for tier, of_tier in blocks.items()}, held.last_event_id)


def _chains(parents: dict[int, tuple[int | None, int]]) -> dict[int, int]:
    """Return each block's chain hash; `parents` is used up."""
    chains: dict[int, int] = {}
    while parents:
        block, (parent, tokens_hash) = parents.popitem()
        line = [(block, tokens_hash)]
        while parent is not None and (step := parents.pop(parent, None)) is not None:
            line.append((parent, step[1]))
            parent = step[0]
        chain = None if parent is None else chains.get(parent, UNKNOWN)
        for block, tokens_hash in reversed(line):
            chain = UNKNOWN if chain == UNKNOWN else roll(chain, tokens_hash)
            chains[block] = chain
    return chains
