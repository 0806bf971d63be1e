"""Names of prefixes, on worked numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.prefixes import (
    ODD,
    PREFIX_TOKENS,
    UNKNOWN,
    deepest_blocks,
    depth_blocks,
    prefix_hashes,
    roll,
    rolled,
    told_blocks,
)

HASHES = st.integers(1, 2**64 - 1)


def test_the_first_block_s_hash_is_its_own() -> None:
    """A prompt's first prefix is told by the tokens_hash that a kv-event carries."""
    assert roll(None, 14370722098883561847) == 14370722098883561847


def test_a_block_behind_another_is_rolled_modulo_two_to_the_sixty_four() -> None:
    """(parent * ODD + tokens_hash) mod 2^64, on numbers small enough to check and one that wraps."""
    assert roll(1, 5) == ODD + 5
    assert roll(2, 0) == 2 * ODD - 2**64
    assert roll(2**64 - 1, 2**64 - 1) == 2**64 - ODD - 1


def test_no_prefix_is_called_unknown() -> None:
    """0 is kept for blocks whose beginning was not seen."""
    assert UNKNOWN == 0
    assert roll(None, 0) == 1
    assert roll(1, 2**64 - ODD) == 1
    assert rolled(None, [0, 2**64 - ODD, 5]) == [1, 1, ODD + 5]


def test_a_prompt_tells_its_prefixes_at_powers_of_two() -> None:
    """After blocks 1, 2, 4, ...; what is beyond the last power is not told."""
    chains = rolled(None, [11, 12, 13, 14, 15, 16, 17])
    assert prefix_hashes([11, 12, 13, 14, 15, 16, 17]) == (11, chains[1], chains[3])
    assert chains[1] == (11 * ODD + 12) % 2**64
    assert chains[3] == roll(roll(chains[1], 13), 14)


@pytest.mark.parametrize(
    ("blocks", "depths"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (255, 8), (256, 9), (257, 9)]
)
def test_so_many_depths_are_told(blocks: int, depths: int) -> None:
    """One per power of two that the prompt's full blocks reach."""
    assert len(prefix_hashes(range(1, blocks + 1))) == depths
    assert deepest_blocks(blocks) == (depth_blocks(depths - 1) if depths else 0)


@pytest.mark.parametrize(
    ("prompt_tokens", "block_size", "blocks"),
    [
        (15, 16, 0),
        (16, 16, 1),
        (87, 16, 4),
        (32_767, 16, 1024),
        (32_768, 16, 2048),
        (10**6, 16, 2048),
        (10**6, 64, 512),
        (10**6, 48, 512),
    ],
)
def test_beginnings_are_told_up_to_a_length(prompt_tokens: int, block_size: int, blocks: int) -> None:
    """Hashing is the router's event loop's time; the deepest power of two within 32,768 tokens."""
    assert PREFIX_TOKENS == 32_768
    assert told_blocks(prompt_tokens, block_size) == blocks


@given(st.lists(HASHES, max_size=20), st.lists(HASHES, max_size=20), st.lists(HASHES, max_size=20))
def test_prompts_agree_where_their_beginnings_do(
    common: list[int], tail: list[int], other: list[int]
) -> None:
    """Two prompts' hashes agree at a depth if and only if all blocks up to it do."""
    one, two = common + tail, common + other
    for index, (left, right) in enumerate(zip(prefix_hashes(one), prefix_hashes(two), strict=False)):
        blocks = depth_blocks(index)
        assert (left == right) == (one[:blocks] == two[:blocks])


@given(st.lists(HASHES, min_size=1, max_size=20), st.data())
def test_a_chain_may_be_continued_anywhere(hashes: list[int], data: st.DataObject) -> None:
    """Rolling on from a known parent, as a cache's events do, gives what the whole prompt gives."""
    cut = data.draw(st.integers(1, len(hashes)))
    whole = rolled(None, hashes)
    assert whole[cut:] == rolled(whole[cut - 1], hashes[cut:])
