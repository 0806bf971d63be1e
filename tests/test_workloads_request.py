"""A prompt's token ids stand for its blocks: the same block the same tokens, another block others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.workloads.request import FIRST_TOKEN_ID, PAST_TOKEN_ID, Request, token_ids

BLOCKS = st.lists(st.integers(0, 2**62), min_size=1, max_size=6)


def prompt(blocks, tokens):
    return Request(blocks=tuple(blocks), input_tokens=tokens, output_tokens=1)


def test_a_prompts_tokens_are_the_same_in_every_version():
    """Recorded results must be repeatable; computed from the docstring's formula without numpy."""
    assert token_ids(prompt([0, 7], 6), 4) == [21055, 5495, 3140, 10210, 13221, 24257]


@settings(derandomize=True)
@given(BLOCKS, BLOCKS, st.integers(1, 24))
def test_prompts_share_tokens_exactly_as_far_as_their_leading_blocks(first, second, block_tokens):
    """request.py's invariant; blocks of 8 tokens or more cannot be the same by chance."""
    block_tokens += 7
    same = next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
    one, other = (
        token_ids(prompt(blocks, len(blocks) * block_tokens), block_tokens) for blocks in (first, second)
    )
    assert one[: same * block_tokens] == other[: same * block_tokens]
    further = slice(same * block_tokens, (same + 1) * block_tokens)
    assert one[further] != other[further] or not (one[further] and other[further])


@settings(derandomize=True)
@given(BLOCKS, st.integers(1, 64), st.data())
def test_a_prompt_has_as_many_tokens_as_it_says_all_of_them_words(blocks, block_tokens, data):
    """The last block may be partly filled; ids below 1000 mean something to the mock model."""
    tokens = data.draw(st.integers((len(blocks) - 1) * block_tokens + 1, len(blocks) * block_tokens))
    ids = token_ids(prompt(blocks, tokens), block_tokens)
    assert len(ids) == tokens
    assert all(FIRST_TOKEN_ID <= token < PAST_TOKEN_ID for token in ids)


def test_a_partly_filled_block_begins_as_the_whole_one():
    """A session's next turn goes on where the last prompt ended."""
    assert token_ids(prompt([1, 2], 6), 4) == token_ids(prompt([1, 2, 3], 12), 4)[:6]
