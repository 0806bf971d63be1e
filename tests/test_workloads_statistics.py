"""A workload's figures: known answers, and the real traces'."""

import numpy as np
import pytest
from traces import real_trace

from dynamo_poa.workloads import trace
from dynamo_poa.workloads.request import Request
from dynamo_poa.workloads.statistics import (
    Lengths,
    Statistics,
    counts_in_windows,
    describe,
    dispersion,
    popularity_exponent,
    prefix_counts,
    prefix_frac,
)


def asked(*blocks, tokens=None, at_s=None):
    return Request(blocks=blocks, input_tokens=tokens or 10 * len(blocks), output_tokens=5, at_s=at_s)


def test_the_shared_part_is_what_whole_blocks_of_earlier_prompts_hold():
    """10 tokens a block: 0 of 30, 20 of 30, and nothing after a first block that is new."""
    assert prefix_frac([asked(1, 2, 3), asked(1, 2, 4), asked(5, 2, 3)], 10) == 20 / 90


def test_a_partly_filled_block_is_neither_kept_nor_served():
    """Block 2 holds 5 of 10 tokens in the first prompt: no engine keeps it; the third asks half of it."""
    assert prefix_frac([asked(1, 2, tokens=15), asked(1, 2, 3), asked(1, 2, tokens=15)], 10) == 20 / 60
    assert prefix_frac([], 10) == 0


def test_prefixes_are_counted_by_their_last_block():
    """Depth 2 of four prompts, one of which has only one block."""
    assert prefix_counts([asked(1, 2), asked(1, 2, 9), asked(1, 3), asked(1)], depth=2) == [2, 1]
    assert prefix_counts([asked(1, 2), asked(1, 3)]) == [2]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 10.0])
def test_counts_that_follow_the_law_give_its_exponent(exponent):
    """Zipf's own weights over 50 ranks, as counts of a billion."""
    counts = 1e9 * np.arange(1, 51.0) ** -exponent
    assert popularity_exponent(counts) == pytest.approx(exponent, abs=1e-6)


def test_an_exponent_needs_two_prefixes_and_ends_at_ten():
    """One prefix fits every exponent; two of which one is never asked fit none."""
    assert popularity_exponent([7]) is None
    assert popularity_exponent([]) is None
    assert popularity_exponent([10**9, 0]) == 10


def test_dispersion_of_a_metronome_is_zero_and_of_bursts_is_their_size():
    """4 in every second: variance 0. 8 in every other: variance 16, mean 4."""
    assert dispersion([n / 4 for n in range(401)], 1.0) == 0
    assert dispersion([2 * n + k / 100 for n in range(50) for k in range(8)] + [100.0], 1.0) == 4
    assert dispersion([], 1.0) is None
    assert dispersion([0.1, 1.9], 1.0) is None


def test_only_whole_windows_count():
    """The last arrival's window is not over."""
    assert list(counts_in_windows([0.0, 0.5, 1.5, 2.0, 2.2], 1.0)) == [2, 1]


def test_a_description_has_every_figure():
    """Three requests in 4 s of an open loop, and the same in a closed one."""
    expected = Statistics(
        requests=3,
        input_tokens=Lengths(mean=20, p50=20, p90=28, p99=29.8),
        output_tokens=Lengths(mean=5, p50=5, p90=5, p99=5),
        prefix_frac=20 / 60,
        rate_rps=0.75,
        dispersion=0.25 / 0.5,
    )
    described = describe([asked(1, at_s=0.0), asked(1, 2, at_s=2.0), asked(1, 3, 4, at_s=4.0)], 10)
    assert described == expected
    closed = describe([asked(1), asked(1, 2), asked(1, 3, 4)], 10)
    assert (closed.rate_rps, closed.dispersion, closed.prefix_frac) == (None, None, 20 / 60)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "requests", "prefix", "rate_rps", "p50"),
    [
        ("mooncake_conversation_a.jsonl", 6015, 0.352, 3.2, 7590),
        ("mooncake_synthetic.jsonl", 3993, 0.650, 3.9, 11587),
    ],
)
def test_the_real_traces_are_what_they_were(name, requests, prefix, rate_rps, p50):
    """Counted apart from this library: requests and median exact, shares and rates rounded."""
    found = describe(list(trace.read(real_trace(name))), 512)
    assert (found.requests, found.input_tokens.p50) == (requests, p50)
    assert found.prefix_frac == pytest.approx(prefix, abs=0.001)
    assert found.rate_rps == pytest.approx(rate_rps, abs=0.05)
