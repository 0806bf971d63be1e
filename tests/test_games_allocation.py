"""The allocation game: what a split of workers gets done, by hand, by brute force and against theory."""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import Attainment, Split
from dynamo_poa.errors import GameError
from dynamo_poa.games import queues
from dynamo_poa.games.allocation import (
    Mix,
    Pool,
    PoolLimits,
    Pools,
    attainment,
    attainments,
    best_split,
    equilibrium,
    every_split,
    price_of_anarchy,
)
from dynamo_poa.values import Curve

PREFILL = Curve(prefill_base_s=0.016, prefill_token_s=1.6e-5)
DECODE = Curve(decode_base_s=0.006, decode_request_s=2e-5, decode_kv_token_s=1.7e-7)
LIMITS = PoolLimits(max_num_seqs=1, kv_tokens=262_144)
POOLS = Pools(
    prefill=Pool(curve=PREFILL, limits=LIMITS),
    decode=Pool(curve=DECODE, limits=PoolLimits(max_num_seqs=256, kv_tokens=262_144)),
)
SLO = SloConfig(ttft_s=0.2, itl_s=0.015)


def mix(**changes: Any) -> Mix:
    """Return 1,000 tokens of prompt and 100 of answer, 100 requests/s, changed."""
    usual: dict[str, Any] = {
        "uncached_tokens": 1000.0,
        "uncached_squared": 1000.0**2,
        "context_tokens": 1050.0,
        "output_tokens": 100.0,
        "arrival_rps": 100.0,
    }
    return Mix(**(usual | changes))


def closed(users: int, think_s: float = 0.0) -> Mix:
    """Return the same asked by so many users."""
    return mix(arrival_rps=0.0, users=users, think_s=think_s)


def constant(decode_s: float, prefill_s: float = 0.032) -> Pools:
    """Return workers whose passes always take as long."""
    return Pools(
        prefill=Pool(curve=Curve(prefill_base_s=prefill_s), limits=LIMITS),
        decode=Pool(curve=Curve(decode_base_s=decode_s), limits=PoolLimits(max_num_seqs=10_000)),
    )


@pytest.mark.parametrize("asked", [mix(), mix(arrival_rps=400.0), closed(64), closed(64, 2.0)])
def test_all_splits_at_once_are_each_split_by_itself_and_the_best_of_them_is_the_best(asked: Mix) -> None:
    """Brute force over the 7 splits of 8 workers."""
    every = every_split(asked, POOLS, SLO, 8)
    alone = [attainment(asked, POOLS, SLO, Split(prefill, 8 - prefill)) for prefill in range(1, 8)]
    assert [one.split for one in every] == [one.split for one in alone]
    for together, single in zip(every, alone, strict=True):
        assert msgspec.structs.astuple(together)[1:] == pytest.approx(msgspec.structs.astuple(single)[1:])
    assert best_split(every).goodput_rps == max(one.goodput_rps for one in every)


@pytest.mark.parametrize(("ttft_s", "share"), [(0.0409, 0.0), (0.0411, 1.0)])
def test_without_load_the_first_token_takes_the_prompts_pass_and_an_iteration_and_a_half(
    ttft_s: float, share: float
) -> None:
    """0.032 s + 1.5 * 0.006 s = 0.041 s."""
    found = attainment(
        mix(arrival_rps=1e-6), constant(0.006), SloConfig(ttft_s=ttft_s, itl_s=0.05), Split(4, 4)
    )
    assert found.ttft_frac == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(("itl_s", "share"), [(0.0059, 0.0), (0.0061, 1.0)])
def test_iterations_of_constant_length_are_within_the_objective_or_not(itl_s: float, share: float) -> None:
    """6 ms each, however many run."""
    found = attainment(mix(), constant(0.006), SloConfig(ttft_s=10.0, itl_s=itl_s), Split(4, 4))
    assert found.itl_frac == pytest.approx(share)
    assert found.goodput_rps == pytest.approx(100 * share, rel=1e-3)


def test_one_user_alone_gets_an_answer_after_another() -> None:
    """1 / (0.032 s + 100 * 0.006 s) requests/s, on any split."""
    for one in every_split(closed(1), constant(0.006), SLO, 4):
        assert one.goodput_rps == pytest.approx(1 / 0.632)


def test_users_who_think_ask_more_slowly() -> None:
    """1 / (0.032 s + 0.6 s + 2 s) requests/s."""
    found = attainment(closed(1, 2.0), constant(0.006), SLO, Split(1, 1))
    assert found.goodput_rps == pytest.approx(1 / 2.632, rel=0.03)  # thought counts as what its mean is


def test_many_users_get_what_the_narrower_pool_gets_done() -> None:
    """Two prefill workers at 0.032 s a prompt: 62.5 requests/s, with 1,000 users."""
    seen = _closed(1000, workers=2.0, beside=6.0)
    assert seen.rate_rps[0] == pytest.approx(2 / 0.032)


def _closed(users: int, workers: float, beside: float) -> queues.Populations:
    prefill = queues.Prefill(tokens_s=0.0, base_s=0.032, passes=1.0, alone=1.0, spread=1.0)
    decode = queues.Decode(
        curve=Curve(decode_base_s=0.006),
        iterations=100.0,
        context_tokens=1.0,
        spread=1.0,
        kv_tokens=math.inf,
        most=10_000.0,
    )
    return queues.closed(users, 0.0, prefill, decode, np.array([[workers]]), np.array([[beside]]))


def _opened(rate_rps: float, workers: float, beside: float, decode_s: float = 1e-12) -> queues.Populations:
    prefill = queues.Prefill(tokens_s=0.0, base_s=0.032, passes=1.0, alone=1.0, spread=1.0)
    decode = queues.Decode(
        curve=Curve(decode_base_s=decode_s),
        iterations=100.0,
        context_tokens=1.0,
        spread=1.0,
        kv_tokens=math.inf,
        most=10_000.0,
    )
    return queues.opened(rate_rps, 1e4, prefill, decode, np.array([[workers]]), np.array([[beside]]))


def test_the_prefill_pool_is_erlangs_queue_where_the_router_sees_everything() -> None:
    """M/M/3 at 80 %: Erlang's C = 0.6472 of the arrivals wait. The router is blind for 1e-10 s here."""
    seen = _opened(75.0, 3.0, 1.0)
    load = 75.0 * 0.032
    sums = sum(load**n / math.factorial(n) for n in range(3))
    waits = load**3 / math.factorial(3) / (1 - load / 3)
    assert seen.arriving[0, seen.prefill[0] >= 3].sum() == pytest.approx(waits / (sums + waits), rel=1e-6)


def test_the_decode_pool_is_poisson_where_iterations_do_not_depend_on_load() -> None:
    """M/G/infinity: 20 requests/s of 100 iterations of 6 ms: 12 at a time, weighed with their tokens."""
    seen = _opened(20.0, 3.0, 2.0, decode_s=0.006)
    many = np.arange(1, 40)
    assert seen.running[0, 1:40] == pytest.approx(poisson.pmf(many - 1, 12.0), rel=1e-6)


def test_prompts_that_share_passes_get_more_done() -> None:
    """Eight of 1,000 tokens fit a batch of 8,000: one takes 16 / 8 + 16 ms then, not 32 ms."""
    shared = queues.Prefill(tokens_s=0.016, base_s=0.016, passes=1 / 8, alone=1.0, spread=0.5)
    assert shared.most_rps(np.array([2.0])).tolist() == pytest.approx([2 / 0.018])
    assert shared.prompt_s(np.array([1.0, 2.0, 8.0, 100.0])).tolist() == pytest.approx(
        [0.032, 0.024, 0.018, 0.018]
    )


def test_a_prompt_waits_for_those_before_it_on_its_worker() -> None:
    """Three on one worker, 10 ms each and alike: 20 to 30 ms, if nothing is left to chance."""
    prefill = queues.Prefill(tokens_s=0.0, base_s=0.01, passes=1.0, alone=1.0, spread=0.5)
    times_s = np.array([0.0, 0.02, 0.025, 0.03])
    within = queues.waited(prefill, 0.0, 1.0, np.array([3.0]), np.array([1.0]), times_s)
    assert within.tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0])
    alone = queues.waited(prefill, 1.0, 1.0, np.array([3.0]), np.array([1.0]), times_s)
    assert alone.tolist() == within.tolist()  # there is no other worker to be sent to
    many = 1e9
    at_random = queues.waited(prefill, 1.0, many, np.array([3.0 * many]), np.array([1.0]), times_s)
    assert at_random.tolist() == pytest.approx(
        [
            poisson.cdf(0, 3),
            poisson.cdf(2, 3),
            (poisson.cdf(2, 3) + poisson.cdf(3, 3)) / 2,
            poisson.cdf(3, 3),
        ]
    )


def test_the_prompt_that_runs_is_more_likely_a_long_one() -> None:
    """Of exponential times (spread 1) what is left is 10 ms on average, not 5: 0 to 20 ms."""
    prefill = queues.Prefill(tokens_s=0.0, base_s=0.01, passes=1.0, alone=1.0, spread=1.0)
    times_s = np.array([0.0, 0.01, 0.02])
    within = queues.waited(prefill, 0.0, 1.0, np.array([1.0]), np.array([1.0]), times_s)
    assert within.tolist() == pytest.approx([0.0, 0.5, 1.0])


def test_no_more_decode_at_a_time_than_there_is_room_for() -> None:
    """A cache of 10,500 tokens holds ten requests of 1,050: two workers of 8 ms get 25/s done, not 30."""
    small = msgspec.structs.replace(
        POOLS, decode=Pool(curve=DECODE, limits=PoolLimits(max_num_seqs=256, kv_tokens=10_500))
    )
    decode = queues.Decode(
        curve=DECODE, iterations=100.0, context_tokens=1050.0, spread=1.0, kv_tokens=math.inf, most=10.0
    )
    step_s = 0.006 + 10 * 2e-5 + 10_500 * 1.7e-7
    assert decode.most_rps(np.array([2.0])).tolist() == pytest.approx([2 * 10 / (100 * step_s)])
    asked = mix(arrival_rps=30.0)
    roomy, tight = (attainment(asked, pools, SLO, Split(14, 2)) for pools in (POOLS, small))
    assert tight.ttft_frac < 0.1  # they wait for a place to decode
    assert roomy.ttft_frac == pytest.approx(1.0, abs=0.01)
    few = msgspec.structs.replace(
        POOLS, decode=Pool(curve=DECODE, limits=PoolLimits(max_num_seqs=10, kv_tokens=262_144))
    )
    assert attainment(asked, few, SLO, Split(14, 2)).ttft_frac < 0.1  # for as many places as the cache had


def test_over_its_capacity_a_pool_is_judged_by_the_time_given() -> None:
    """Two prefill workers get 62.5 of 100 requests/s done: the queue grows by 0.6 s a second."""
    shares = [
        attainment(mix(horizon_s=horizon_s), POOLS, SLO, Split(2, 6)).ttft_frac
        for horizon_s in (1.0, 10.0, 100.0)
    ]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[2] < shares[1] / 3 < shares[0]


@given(
    rate_rps=st.floats(1, 300),
    tokens=st.floats(50, 5000),
    variation=st.floats(0, 3),
    output=st.floats(2, 500),
    prefill=st.integers(1, 12),
    decode=st.integers(1, 12),
)
def test_a_worker_more_never_harms_its_own_pool(
    rate_rps: float, tokens: float, variation: float, output: float, prefill: int, decode: int
) -> None:
    """TTFT attainment does not fall with prefill workers, nor ITL attainment with decode workers."""
    asked = mix(
        arrival_rps=rate_rps,
        uncached_tokens=tokens,
        uncached_squared=tokens**2 * (1 + variation),
        context_tokens=tokens + output / 2,
        output_tokens=output,
    )
    splits = [Split(prefill, decode), Split(prefill + 1, decode), Split(prefill, decode + 1)]
    now, more_prefill, more_decode = attainments(asked, POOLS, SLO, splits)
    for one in (now, more_prefill, more_decode):
        assert 0 <= one.ttft_frac <= 1 + 1e-9
        assert 0 <= one.itl_frac <= 1 + 1e-9
        assert 0 <= one.goodput_rps <= rate_rps * (1 + 1e-9)
    assert more_prefill.ttft_frac >= now.ttft_frac - 0.01
    if rate_rps < queues_capacity(asked, prefill):  # else more prefill workers would send more to decode
        assert more_decode.itl_frac >= now.itl_frac - 0.01


@given(
    exponents=st.lists(st.floats(-1, 1), min_size=7, max_size=7),
    users=st.integers(0, 20_000),
    seqs=st.sampled_from((1, 256)),
)
def test_whatever_is_asked_the_answer_is_a_share(exponents: list[float], users: int, seqs: int) -> None:
    """Rates, lengths and speeds over several powers of ten: shares in [0, 1], and no warning."""
    rate, tokens, output, think, token, iteration, kv = (10.0**exponent for exponent in exponents)
    asked = mix(
        arrival_rps=0.0 if users else 1e3 * rate**3,
        users=users,
        think_s=think if users else 0.0,
        uncached_tokens=1e3 * tokens**2,
        uncached_squared=1e6 * tokens**4 * (1 + think),
        context_tokens=1e3 * tokens**2,
        context_squared=1e6 * tokens**4 * (1 + token),
        output_tokens=1 + 100 * output**2,
    )
    curve = Curve(
        prefill_token_s=1e-5 * token**2, decode_base_s=1e-3 * iteration**2, decode_kv_token_s=1e-7 * kv**2
    )
    pool = Pool(curve=curve, limits=PoolLimits(max_num_seqs=seqs, kv_tokens=1e5 * kv))
    for one in every_split(asked, Pools(prefill=pool, decode=pool), SLO, 6):
        assert 0 <= one.ttft_frac <= 1 + 1e-9
        assert 0 <= one.itl_frac <= 1 + 1e-9
        assert 0 <= one.goodput_rps < math.inf


def queues_capacity(asked: Mix, prefill: int) -> float:
    """Return what so many prefill workers get done a second."""
    return prefill / (PREFILL.prefill_base_s + PREFILL.prefill_token_s * asked.uncached_tokens)


def of(prefill: int, decode: int, ttft: float, itl: float) -> Attainment:
    """Return an attainment of 100 requests/s."""
    return Attainment(
        split=Split(prefill, decode), ttft_frac=ttft, itl_frac=itl, goodput_rps=100 * ttft * itl
    )


def test_in_equilibrium_a_worker_more_gains_either_pool_the_same() -> None:
    """Concave attainments 1 - 2**-P and 1 - 4**-D: moving one gains 2**-(P+1) and costs 3 * 4**-D.

    At 5P/3D that is 0.016 and 0.047, at 4P/4D 0.031 and 0.012.
    """
    every = [of(p, 8 - p, 1 - 2.0**-p, 1 - 4.0 ** -(8 - p)) for p in range(1, 8)]
    by_hand = next(
        here.split
        for here, there in itertools.pairwise(every)
        if there.ttft_frac - here.ttft_frac <= here.itl_frac - there.itl_frac
    )
    assert equilibrium(every).split == by_hand == Split(5, 3)


def test_where_neither_pool_is_short_the_equilibrium_is_the_split_with_most_goodput() -> None:
    """All attain everything; the second gets most done."""
    every = [
        msgspec.structs.replace(of(p, 4 - p, 1.0, 1.0), goodput_rps=rate)
        for p, rate in ((1, 90.0), (2, 95.0), (3, 80.0))
    ]
    assert equilibrium(every).split == Split(2, 2)


def test_a_pool_that_attains_nothing_gets_workers_also_where_one_more_would_not_do() -> None:
    """TTFT 0 up to 4P, then 1: beyond the flat stretch lies what is useful."""
    every = [of(p, 8 - p, float(p >= 5), 1.0) for p in range(1, 8)]
    assert equilibrium(every).split.prefill >= 5


def test_a_split_costs_the_seconds_that_a_request_within_objectives_takes() -> None:
    """50 requests/s where 80 are possible: 1.6; none where nothing is done, or next to nothing."""
    now, best = of(2, 6, 0.5, 1.0), of(3, 5, 0.8, 1.0)
    assert price_of_anarchy(now, best) == pytest.approx(1.6)
    assert price_of_anarchy(best, best) == 1.0
    assert price_of_anarchy(of(1, 7, 0.0, 1.0), best) is None
    assert price_of_anarchy(of(1, 7, 5e-324, 1.0), best) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"uncached_tokens": 0.0}, "uncached_tokens"),
        ({"output_tokens": math.nan}, "output_tokens"),
        ({"uncached_squared": 10.0}, "uncached_squared"),
        ({"context_squared": 10.0}, "context_squared"),
        ({"arrival_rps": 0.0}, "arrival_rps, users"),
        ({"users": 3}, "arrival_rps, users"),
        ({"arrival_rps": -1.0}, "arrival_rps, users, think_s"),
    ],
)
def test_what_is_no_demand_is_refused(changes: dict[str, float], key: str) -> None:
    """Each by its name."""
    with pytest.raises(GameError) as refused:
        mix(**changes)
    assert refused.value.key == key


def test_pools_without_workers_or_speed_are_refused() -> None:
    """A split needs one worker on either side; a curve of zeros is no curve."""
    with pytest.raises(GameError, match="in either pool"):
        attainment(mix(), POOLS, SLO, Split(0, 8))
    with pytest.raises(GameError, match=">= 2"):
        every_split(mix(), POOLS, SLO, 1)
    unknown = Pool(curve=Curve(), limits=LIMITS)
    with pytest.raises(GameError, match="prompts that take time"):
        attainment(mix(), msgspec.structs.replace(POOLS, prefill=unknown), SLO, Split(4, 4))
    with pytest.raises(GameError, match="iterations that take time"):
        attainment(mix(), msgspec.structs.replace(POOLS, decode=unknown), SLO, Split(4, 4))


def test_lengths_have_the_mean_and_about_the_second_moment() -> None:
    """A lognormal's quantiles: the tail beyond 1 in 32 is not in them."""
    lengths = mix(uncached_squared=2e6).prompts()
    assert lengths.mean() == pytest.approx(1000)
    assert 1.6e6 < (lengths**2).mean() < 2e6
    assert mix().prompts().tolist() == pytest.approx([1000.0] * len(lengths))
