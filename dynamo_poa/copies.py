"""How often blocks are held: over all caches, and within a node.

Owns: duplication, the share of capacity that copies take, which blocks it is counted on where there are many.
Does not own: what a cache holds (residency.py), which workers share a node (placement.py).
Invariant: pure; absent is None, never 1 or 0.
Source: theory.md, Γ_KV.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamo_poa.block_store import HashArray
from dynamo_poa.cache_state import CacheSnapshot
from dynamo_poa.values import WorkerCard

MOST_COUNTED = 1_000_000  # blocks; measured: sorting those takes 0.1 s

Rank = tuple[WorkerCard, CacheSnapshot]


class Copies(NamedTuple):
    """As CachingEstimate has it; None where nobody holds a block, or the capacity is not known."""

    duplication: float | None = None
    copies_frac: float | None = None
    sampled_frac: float | None = None


def copies_of(ranks: Sequence[Rank], nodes: Sequence[int], most: int = MOST_COUNTED) -> Copies:
    """Return how often the blocks in device caches are held.

        duplication = resident blocks / distinct ones
        copies_frac = resident blocks that another rank of the node holds too / blocks of all caches

    Blocks whose beginning is not known are in no snapshot: nobody can tell whom they equal. Of more than
    `most` a share is counted, chosen by hash: the same blocks in every cache.
    """
    resident = sum(cache.chains.size for _, cache in ranks)
    bits = max(0, math.ceil(math.log2(resident / most))) if resident else 0
    by_node: dict[int, list[HashArray]] = {}
    for node, (_, cache) in zip(nodes, ranks, strict=True):
        by_node.setdefault(node, []).append(_sample(cache.chains, bits))
    counted = copied = 0
    distinct: list[HashArray] = []
    for chains in by_node.values():
        found, times = np.unique(np.concatenate(chains), return_counts=True)
        distinct.append(found)
        counted += int(times.sum())
        copied += int(times[times > 1].sum())
    if not counted:
        return Copies()
    different = np.unique(np.concatenate(distinct)).size
    sizes = [cache.total_blocks for _, cache in ranks]
    blocks = sum(size for size in sizes if size is not None)
    copies_frac = copied / counted * resident / blocks if blocks and None not in sizes else None
    return Copies(counted / different, copies_frac, 0.5**bits)


def _sample(chains: HashArray, bits: int) -> HashArray:
    """Return 1 in 2^bits of the blocks."""
    return chains[chains >> np.uint64(64 - bits) == 0] if bits else chains
