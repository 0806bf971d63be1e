"""What a prompt's prefix is called, so that routers' requests and workers' caches can be compared.

Owns: the rolling hash over KV blocks, and the depths at which requests tell it.
Does not own: the hash of a block (Dynamo's, the same in its kv-events and in its routers), who holds what
              (residency.py), which prefixes are asked for (demand_groups.py).
Invariant: pure; hashes are unsigned 64-bit Python ints, never floats. Equal beginnings have equal hashes
           whoever computes them; different ones collide once in 2^64.
Source: dynamo-facts: `tokens_hash` of a stored block equals compute_block_hash_for_seq of its tokens. An
        engine's own `block_hash` is arbitrary, hence this one.
"""

from collections.abc import Iterable, Sequence

# Odd, so that no multiplication loses a bit, and 5 modulo 8, so that its powers take longest to come back.
ODD = 0x9E37_79B9_7F4A_7C15
UNKNOWN = 0  # the chain hash of a block whose beginning was not seen; matches no prefix

# Of longer beginnings only so much is told: in blocks of 16 it takes 0.5 ms of a router's event loop to hash.
PREFIX_TOKENS = 32_768

_MASK = 2**64 - 1


def roll(parent: int | None, tokens_hash: int) -> int:
    """Return the hash of a prefix that is one block longer.

        (parent * ODD + tokens_hash) mod 2^64, and 1 where that is UNKNOWN

    Args:     parent: hash of the prefix before the block, not UNKNOWN; None at the start of a prompt.
              tokens_hash: of the block's tokens alone, unsigned 64-bit.
    """
    chain = tokens_hash if parent is None else (parent * ODD + tokens_hash) & _MASK
    return chain or 1


def rolled(parent: int | None, tokens_hashes: Iterable[int]) -> list[int]:
    """Return the hash after each of several blocks, behind a prefix as in `roll`."""
    chains = []
    for tokens_hash in tokens_hashes:  # as `roll`, whose calls would take a third of the time
        parent = (tokens_hash if parent is None else (parent * ODD + tokens_hash) & _MASK) or 1
        chains.append(parent)
    return chains


def prefix_hashes(block_hashes: Sequence[int]) -> tuple[int, ...]:
    """Return the hashes of a prompt's first 1, 2, 4, 8, ... full blocks.

    Args:     block_hashes: of each full block's tokens alone, oldest first.
    """
    chains = rolled(None, block_hashes[: deepest_blocks(len(block_hashes))])
    return tuple(chains[depth_blocks(index) - 1] for index in range(len(chains).bit_length()))


def depth_blocks(index: int) -> int:
    """Return how many blocks the prefix at a place of `prefix_hashes` has."""
    return 1 << index


def told_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many blocks the longest prefix has that is told of a prompt; 0 for less than a block."""
    return deepest_blocks(min(prompt_tokens, PREFIX_TOKENS) // block_size)


def deepest_blocks(blocks: int) -> int:
    """Return the largest power of two that is no more than a number of blocks; 0 for none."""
    return 1 << blocks.bit_length() - 1 if blocks > 0 else 0
