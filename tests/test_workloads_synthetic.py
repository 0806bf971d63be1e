"""The made-up contents: lengths, shares and popularity as stated, sessions that grow, bounds."""

import random
from itertools import chain, islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.statistics import describe, popularity_exponent, prefix_counts, prefix_frac
from dynamo_poa.workloads.synthetic import (
    Blocks,
    Content,
    LongTail,
    Mixed,
    MultiTurn,
    Paper,
    Trace,
    Zipf,
    sessions,
)

NAMES = {
    "paper": Paper(),
    "zipf, exponent 1.2": Zipf(exponent=1.2),
    "longtail": LongTail(),
    "multiturn, mean_turns 2, think_s 0.5": MultiTurn(mean_turns=2, think_s=0.5),
    "mixed, first (paper, templates 2), second_frac 0.5": Mixed(first=Paper(templates=2), second_frac=0.5),
    "trace t1, second half, 10 requests": Trace(path="/a/t1.jsonl", part="second", limit=10),
}


def some(content, count, *, seed=1, block_tokens=16):
    source = sessions(content, random.Random(seed), Blocks(seed, 0), block_tokens)
    return list(islice(chain.from_iterable(source), count))


@pytest.mark.parametrize(("name", "content"), NAMES.items())
def test_a_content_is_named_by_what_differs_and_comes_back_from_json(name, content):
    """cells.py: two contents of one suite are never taken for the same; results are read back from JSON."""
    assert content.name == name
    assert msgspec.json.decode(msgspec.json.encode(content), type=Content) == content


def test_the_papers_prompts_share_half_with_one_of_five_templates():
    """128 tokens in blocks of 16, 64 of them shared; 20,000 prompts, 5 of which are the first of theirs."""
    found = some(Paper(), 20_000)
    assert {(one.input_tokens, one.output_tokens, len(one.blocks), one.session) for one in found} == {
        (128, 64, 8, -1)
    }
    assert prefix_frac(found, 16) == (20_000 - 5) * 64 / (20_000 * 128)
    counts = prefix_counts(found, depth=4)
    assert len(counts) == 5
    assert counts == [pytest.approx(4000, rel=0.06)] * 5  # within 4 sigma
    assert len(prefix_counts(found, depth=5)) == 20_000


def test_a_shared_prefix_takes_whole_blocks():
    """Half of 100 tokens in blocks of 16: 3 blocks, 48 tokens. In blocks of 64: none."""
    assert prefix_frac(some(Paper(templates=1, input_tokens=100), 2), 16) == 48 / 200
    assert prefix_frac(some(Paper(templates=1, input_tokens=100), 2, block_tokens=64), 64) == 0


def test_all_of_a_prompt_can_be_shared():
    """shared_frac 1: the very same prompt again."""
    first, second = some(Paper(templates=1, shared_frac=1), 2)
    assert first == second


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.2])
@pytest.mark.parametrize("seed", range(3))
def test_zipfs_prefixes_are_as_popular_as_their_exponent_says(exponent, seed):
    """20,000 prompts over 200 prefixes: the fitted exponent within 0.03."""
    found = some(Zipf(exponent=exponent), 20_000, seed=seed)
    assert popularity_exponent(prefix_counts(found)) == pytest.approx(exponent, abs=0.03)


def test_zipf_shares_three_quarters_once_every_prefix_is_known():
    """512 tokens, 384 shared; all 200 prefixes are met, each once for the first time."""
    assert prefix_frac(some(Zipf(), 20_000), 16) == (20_000 - 200) * 384 / (20_000 * 512)


@pytest.mark.parametrize("seed", range(3))
def test_the_long_tails_lengths_are_lognormal_below_their_maxima(seed):
    """Median, and P90 = median * exp(1.2816 sigma), within 5 %; never above the maximum, nothing shared."""
    content = LongTail(input_max_tokens=200_000, output_max_tokens=50_000)
    found = some(content, 20_000, seed=seed)
    lengths = describe(found, 16)
    assert (lengths.input_tokens.p50, lengths.input_tokens.p90) == pytest.approx((1024, 3688.6), rel=0.05)
    assert (lengths.output_tokens.p50, lengths.output_tokens.p90) == pytest.approx((128, 356.8), rel=0.05)
    assert lengths.prefix_frac == 0
    short = some(LongTail(input_max_tokens=1024, output_max_tokens=128), 2000, seed=seed)
    assert max(one.input_tokens for one in short) == pytest.approx(1024, abs=10)
    assert max(one.output_tokens for one in short) == 128
    assert max(one.input_tokens for one in short) <= 1024


def test_a_session_grows_by_its_answer_and_the_next_question():
    """System 20, question 30, answer 14 tokens in blocks of 16: 50, 94, 138 ... going on from the last."""
    content = MultiTurn(mean_turns=3, system_tokens=20, question_tokens=30, output_tokens=14)
    source = sessions(content, random.Random(3), Blocks(3, 0), 16)
    turns = next(session for session in source if len(session) == 5)
    assert [turn.input_tokens for turn in turns] == [50, 94, 138, 182, 226]
    assert [len(turn.blocks) for turn in turns] == [4, 6, 9, 12, 15]
    assert all(turn.blocks == turns[-1].blocks[: len(turn.blocks)] for turn in turns)
    assert len({turn.session for turn in turns}) == 1
    assert turns[0].think_s == 0
    assert all(turn.think_s > 0 for turn in turns[1:])


def test_sessions_share_the_system_prompt_and_nothing_else():
    """20 tokens of system prompt: one whole block."""
    content = MultiTurn(system_tokens=20)
    first, second = islice(sessions(content, random.Random(1), Blocks(1, 0), 16), 2)
    assert first[-1].session != second[-1].session
    assert set(first[-1].blocks) & set(second[-1].blocks) == {first[0].blocks[0]}


def test_sessions_have_their_mean_number_of_turns_and_pauses():
    """1 to 7 turns, 4 on average; pauses 2 s on average: 4000 sessions, within 4 sigma."""
    source = list(islice(sessions(MultiTurn(), random.Random(1), Blocks(1, 0), 16), 4000))
    assert {len(turns) for turns in source} == set(range(1, 8))
    assert sum(map(len, source)) / 4000 == pytest.approx(4, abs=0.13)
    pauses = [turn.think_s for turns in source for turn in turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2, rel=0.04)


CONTENTS = st.one_of(
    st.builds(
        Paper,
        templates=st.integers(1, 9),
        input_tokens=st.integers(1, 500),
        shared_frac=st.floats(0, 1),
    ),
    st.builds(
        Zipf,
        prefixes=st.integers(1, 50),
        exponent=st.floats(0, 10),
        input_tokens=st.integers(1, 500),
        shared_frac=st.floats(0, 1),
    ),
    st.builds(LongTail, input_median_tokens=st.floats(1, 500), input_sigma=st.floats(0, 4)),
    st.builds(
        MultiTurn,
        mean_turns=st.integers(1, 5),
        system_tokens=st.integers(0, 100),
        question_tokens=st.integers(1, 100),
        output_tokens=st.integers(1, 100),
        think_s=st.just(0.0) | st.floats(0.01, 10),
    ),
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CONTENTS, st.integers(0, 2**20 - 1), st.sampled_from([1, 16, 512]))
def test_every_prompt_has_the_blocks_its_tokens_need_and_comes_again_with_the_seed(
    content, seed, block_tokens
):
    """request.py: len(blocks) blocks hold input_tokens, the last one begun; nothing is drawn elsewhere."""
    found = some(content, 60, seed=seed, block_tokens=block_tokens)
    assert found == some(content, 60, seed=seed, block_tokens=block_tokens)
    for one in found:
        assert (len(one.blocks) - 1) * block_tokens < one.input_tokens <= len(one.blocks) * block_tokens
        assert one.output_tokens >= 1
        assert all(seed << 42 <= block < (seed + 1) << 42 for block in one.blocks)


def test_more_shared_blocks_than_a_seed_has_ids_for_are_refused():
    """Otherwise prefixes and unique blocks would meet: 128 prefixes of a million one-token blocks."""
    content = Zipf(prefixes=128, input_tokens=1_000_000, shared_frac=1)
    with pytest.raises(ConfigError, match=r"must be 2\*\*26 blocks or fewer together"):
        sessions(content, random.Random(1), Blocks(1, 0), 1)
    blocks = Blocks(1, 0)
    assert blocks.own(2**26)[-1] == Blocks(1, 1).own(1)[0] - 1
    with pytest.raises(ConfigError, match="of their own or fewer together"):
        blocks.own(1)


@pytest.mark.parametrize(
    ("build", "problems"),
    [
        (
            lambda: Paper(templates=0, shared_frac=1.5),
            [
                "Paper.templates = 0: must be in [1, 1e+06]",
                "Paper.shared_frac = 1.5: must be in [0, 1]",
            ],
        ),
        (lambda: Zipf(exponent=float("nan")), ["Zipf.exponent = nan: must be finite and in [0, 10]"]),
        (
            lambda: LongTail(input_median_tokens=20_000),
            ["LongTail.input_median_tokens = 20000: must be <= input_max_tokens (16384)"],
        ),
        (lambda: MultiTurn(mean_turns=0), ["MultiTurn.mean_turns = 0: must be in [1, 1000]"]),
        (lambda: Mixed(second_frac=-0.1), ["Mixed.second_frac = -0.1: must be in [0, 1]"]),
        (lambda: Trace(path="x", block_tokens=0), ["Trace.block_tokens = 0: must be in [1, 65536]"]),
    ],
)
def test_a_content_out_of_bounds_is_refused_with_every_problem(build, problems):
    """Key, value, bound."""
    with pytest.raises(ConfigError) as refused:
        build()
    assert list(refused.value.problems) == problems
