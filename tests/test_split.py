"""The split of workers as a controller sees it: what it is read from, what is found, how sure it is."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamo_poa.advice import worth_it
from dynamo_poa.cache_state import CacheState
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import AllocationEstimate, Attainment, Split
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.games.allocation import (
    Mix,
    Pool,
    PoolLimits,
    Pools,
    attainment,
    best_split,
    equilibrium,
    every_split,
    price_of_anarchy,
)
from dynamo_poa.load import WorkerState
from dynamo_poa.split import Game, gain, nearest, note_split, price_split, read_game
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import Chosen, DecisionBatch

NEEDED = ", 50 in 10 s needed"
SLO = SloConfig(ttft_s=0.5, itl_s=0.03)
CURVES = {
    Role.PREFILL: Curve(prefill_base_s=0.01, prefill_token_s=5e-5),
    Role.DECODE: Curve(decode_base_s=0.006, decode_request_s=2.5e-4, decode_kv_token_s=1e-8),
}


def card(worker_id: int, role: Role, **more: object) -> WorkerCard:
    known = {"total_kv_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    return WorkerCard(worker_id=worker_id, role=role, kv_block_size=16, **(known | more))  # type: ignore[arg-type]


def cards(prefill: int, decode: int, **more: object) -> list[WorkerCard]:
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return [card(number, role, **more) for number, role in enumerate(roles)]


def seconds(
    per_s: float = 30, tokens: float = 1500, length: int = 60, seed: int | None = 0
) -> NDArray[np.float64]:
    """Return as many prompts of one length each second, or about as many, at random."""
    counts = np.full(length, per_s) if seed is None else np.random.default_rng(seed).poisson(per_s, length)
    return rows_of(counts, tokens)


def rows_of(counts: NDArray[np.float64], tokens: float) -> NDArray[np.float64]:
    """Return prompts of one length, 500 tokens of which are cached."""
    whole = tokens + 500
    columns = (counts, counts * tokens, counts * tokens**2, counts * whole, counts * whole**2)
    return np.stack(columns, axis=1)


def game(prefill: int = 2, decode: int = 6, rows: NDArray[np.float64] | None = None) -> Game:
    read = read_game(cards(prefill, decode), CURVES, seconds() if rows is None else rows, 100.0, SLO)
    assert isinstance(read, Game)
    return read


# What the game is read from


def test_the_game_is_workers_their_speed_and_the_prompts_of_late() -> None:
    """Every figure is somebody's measurement or card."""
    rows = seconds(seed=None)
    assert read_game(cards(2, 6), CURVES, rows, 100.0, SLO) == Game(
        split=Split(2, 6),
        pools=Pools(
            prefill=Pool(
                curve=CURVES[Role.PREFILL],
                limits=PoolLimits(max_num_seqs=64, kv_tokens=65_536, max_num_batched_tokens=4096),
            ),
            decode=Pool(
                curve=CURVES[Role.DECODE],
                limits=PoolLimits(max_num_seqs=64, kv_tokens=65_536, max_num_batched_tokens=4096),
            ),
        ),
        seconds=rows,
        output_tokens=100.0,
        slo=SLO,
        ranks=1,
    )


def test_what_no_card_tells_is_the_engines_usual_and_workers_that_differ_have_their_median() -> None:
    """Workers of a recording without cards have no limits; the median worker is the pool's."""
    bare = {"total_kv_blocks": None, "max_num_seqs": None, "max_num_batched_tokens": None}
    read = read_game(cards(2, 2, **bare), CURVES, seconds(), 100.0, SLO)
    assert isinstance(read, Game)
    assert read.pools.decode.limits == PoolLimits()
    mixed = [*cards(1, 2), card(7, Role.DECODE, max_num_seqs=8, total_kv_blocks=8192)]
    read = read_game(mixed, CURVES, seconds(), 100.0, SLO)
    assert isinstance(read, Game)
    assert read.pools.decode.limits == PoolLimits(
        max_num_seqs=64, kv_tokens=65_536, max_num_batched_tokens=4096
    )


@pytest.mark.parametrize(
    ("workers", "curves", "rows", "output_tokens", "reason"),
    [
        ([card(1, Role.AGGREGATED)], CURVES, seconds(), 9.0, "workers are aggregated: there is no split"),
        (cards(2, 0), CURVES, seconds(), 9.0, "no decode workers"),
        (cards(0, 2), CURVES, seconds(), 9.0, "no prefill workers"),
        ([], CURVES, seconds(), 9.0, "no prefill workers"),
        (cards(1, 1), {}, seconds(), 9.0, "the speed of prefill workers is not known yet"),
        (
            cards(1, 1),
            CURVES | {Role.DECODE: Curve(prefill_token_s=1e-4)},
            seconds(),
            9.0,
            "the speed of decode workers is not known yet",
        ),
        (
            [card(1, Role.PREFILL, data_parallel_size=2), card(2, Role.DECODE)],
            CURVES,
            seconds(),
            9.0,
            "workers differ in data-parallel ranks: one cannot take another's place",
        ),
        (cards(1, 1), CURVES, seconds(1, length=49, seed=None), 9.0, "49 prompts in 49 s" + NEEDED),
        (
            cards(1, 1),
            CURVES,
            seconds(9, length=9, seed=None),
            9.0,
            "81 prompts in 9 s, 50 in 10 s needed",
        ),
        (
            cards(1, 1),
            CURVES,
            seconds(),
            None,
            "too few requests have ended to tell how long answers are",
        ),
    ],
)
def test_what_is_not_known_is_a_reason(
    workers: list[WorkerCard],
    curves: dict[Role, Curve],
    rows: NDArray[np.float64],
    output_tokens: float | None,
    reason: str,
) -> None:
    """Absent with a reason, never a guess."""
    assert read_game(workers, curves, rows, output_tokens, SLO) == reason
    assert price_split(reason) == AllocationEstimate(reason=reason)


def test_what_is_no_game_is_a_reason_too() -> None:
    """Mix and curves have bounds of their own; one that is broken must not end the other game's pricing."""
    broken = msgspec.structs.replace(game(), output_tokens=math.inf)
    assert price_split(broken) == AllocationEstimate(reason="context_tokens = inf: must be in (0, inf)")


# What is found


def test_the_estimate_is_the_games_on_the_measured_mix() -> None:
    """Steady arrivals, so that the mix is known exactly: 30 prompts/s of 1500 uncached tokens of 2000."""
    found = price_split(game(2, 6, seconds(seed=None)))
    mix = Mix(
        arrival_rps=30.0,
        uncached_tokens=1500.0,
        uncached_squared=1500.0**2,
        context_tokens=2050.0,
        output_tokens=100.0,
    )
    pools = game().pools
    every = every_split(mix, pools, SLO, 8)
    now, best = every[1], best_split(every)
    more = [attainment(mix, pools, SLO, one) for one in (Split(3, 6), Split(2, 7))]
    assert (found.now, found.best, found.equilibrium) == (now, best, equilibrium(every))
    assert found.poa_hat == price_of_anarchy(now, best)
    assert (found.one_more_prefill, found.one_more_decode) == tuple(gain(now, one) for one in more)
    assert found.target == nearest(every, now, best)
    assert found.target is not None
    assert found.gain_frac == gain(now, found.target)
    assert found.reason == ""


def test_contexts_vary_as_prompts_do() -> None:
    """As many of 1000 as of 3000 tokens, and 50 of output: mean 2050, variance 1000 squared."""
    rows = seconds(15, 500, seed=None) + seconds(15, 2500, seed=None)
    every = every_split(
        Mix(
            arrival_rps=30.0,
            uncached_tokens=1500.0,
            uncached_squared=(500.0**2 + 2500.0**2) / 2,
            context_tokens=2050.0,
            context_squared=2050.0**2 + 1000.0**2,
            output_tokens=100.0,
        ),
        game().pools,
        SLO,
        8,
    )
    found = price_split(game(5, 3, rows))
    assert (found.now, found.best) == (every[4], best_split(every))


def test_too_few_prefill_workers_are_told_to_be_more() -> None:
    """2P can do 23 prompts/s of 85 ms; 30 come, and six decode workers have room."""
    found = price_split(game(2, 6))
    assert found.now is not None
    assert found.target is not None
    assert found.now.ttft_frac < 0.2
    assert found.target.split == Split(3, 5)
    assert found.target.ttft_frac > 0.95
    advice = worth_it(found)
    assert advice is not None
    assert advice.gain_low > 0.5


def test_a_split_that_serves_everybody_is_left_alone() -> None:
    """At a tenth of the load most splits are as good: nothing is moved for a thousandth."""
    found = price_split(game(2, 6, seconds(3)))
    assert found.target is None
    assert (found.gain_frac, found.gain_low, found.gain_high) == (None, None, None)
    assert found.poa_hat == pytest.approx(1.0, abs=0.01)


def test_a_gain_that_a_few_busy_seconds_make_is_within_noise() -> None:
    """The same mean rate: steady is sure; a burst of a few seconds leaves it reaching to nothing."""
    steady = price_split(game(3, 5, seconds(36, seed=None)))
    burst = seconds(30, seed=None)
    burst[20:26] += seconds(60, length=6, seed=None)
    bursty = price_split(game(3, 5, burst))
    assert steady.gain_frac is not None
    assert steady.gain_low == steady.gain_high == steady.gain_frac  # every resample is the same
    assert bursty.gain_frac == pytest.approx(steady.gain_frac, rel=1e-9)
    assert bursty.gain_low is not None
    assert bursty.gain_high is not None
    assert 0.0 < bursty.gain_low < 0.002 < bursty.gain_frac < bursty.gain_high
    assert worth_it(steady) is not None
    assert worth_it(bursty) is None


def test_overload_is_told_though_the_rate_is_noisy() -> None:
    """Measured live: 8 prompts/s at 1P that can do 8 held its objective for half of them. The gain may be
    tenfold or a tenth, by the noise of the rate alone; that there is one is sure."""
    rng = np.random.default_rng(5)
    counts = rng.poisson(25, 60)  # of 23 that 2P can do
    found = price_split(game(2, 6, rows_of(counts, 1500.0)))
    assert found.gain_low is not None
    assert found.gain_high is not None
    assert found.gain_high > 10 * found.gain_low > 0.05
    assert worth_it(found) is not None


def test_the_same_minute_gives_the_same_interval() -> None:
    """Resampling has a seed of its own."""
    assert price_split(game()) == price_split(game())


@pytest.mark.parametrize(("itl_s", "per_s"), [(0.012, 20), (0.05, 40)])
def test_objectives_that_no_split_keeps_are_no_reason_to_move(itl_s: float, per_s: float) -> None:
    """Of splits that serve next to nobody one may be ahead a hundredfold, by the tail of the model alone."""
    slow = {
        Role.PREFILL: Curve(prefill_base_s=0.01, prefill_token_s=2e-4),
        Role.DECODE: Curve(decode_base_s=0.01, decode_request_s=1e-3, decode_kv_token_s=1e-7),
    }
    slo = SloConfig(ttft_s=0.3, itl_s=itl_s)
    found = price_split(read_game(cards(3, 5), slow, seconds(per_s), 200.0, slo))
    assert found.best is not None
    assert found.best.ttft_frac * found.best.itl_frac < 0.01
    assert (found.poa_hat, found.target, found.gain_frac) == (None, None, None)
    assert found.reason == "no split gets requests done within both objectives"
    assert (found.one_more_prefill, found.one_more_decode) == (0.0, 0.0)
    assert worth_it(found) is None


def test_an_instance_with_ranks_is_moved_whole() -> None:
    """Two ranks an instance: 1P/3D of instances are 2P/6D of queues, and splits are told in instances."""
    read = read_game(cards(1, 3, data_parallel_size=2), CURVES, seconds(), 100.0, SLO)
    assert isinstance(read, Game)
    assert (read.split, read.ranks) == (Split(1, 3), 2)
    found, of_ranks = price_split(read), price_split(game(2, 6))
    assert of_ranks.now is not None
    assert found.now == msgspec.structs.replace(of_ranks.now, split=Split(1, 3))
    assert found.target is not None
    assert found.target.split == Split(2, 2)
    other = price_split(game(4, 4)).now
    assert other is not None
    assert found.target == msgspec.structs.replace(other, split=Split(2, 2))
    assert found.gain_frac == gain(of_ranks.now, other)


def test_the_nearest_of_nearly_equal_splits_is_the_one_to_move_to() -> None:
    """One in a hundred is not worth two workers; but a present split as good as that is kept."""

    def splits(*goodput: float) -> list[Attainment]:
        return [
            Attainment(split=Split(n, 6 - n), ttft_frac=1, itl_frac=1, goodput_rps=rps)
            for n, rps in enumerate(goodput, 1)
        ]

    every = splits(50, 80, 99.5, 100, 70)
    assert nearest(every, every[0], every[3]) is every[2]
    assert nearest(every, every[4], every[3]) is every[3]
    assert nearest(every, every[2], every[3]) is None
    assert nearest(every, every[3], every[3]) is None
    both_sides = splits(98, 100, 97, 100, 50)
    assert nearest(both_sides, both_sides[2], both_sides[1]) is both_sides[1]


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [(20, 25, 0.25), (25, 20, -0.2), (0, 0, 0.0), (0, 5, 100.0), (1e-9, 5, 100.0), (5, 0, 1 / 101 - 1)],
)
def test_a_gain_is_finite(now: float, then: float, expected: float) -> None:
    """A present split that gets nothing done is infinitely worse, which no JSON number says."""
    here, there = (
        Attainment(split=Split(1, 1), ttft_frac=1, itl_frac=1, goodput_rps=rps) for rps in (now, then)
    )
    assert gain(here, there) == pytest.approx(expected)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    per_s=st.floats(1, 80),
    tokens=st.floats(16, 4000),
    output_tokens=st.floats(1, 400),
    users=st.integers(0, 2000),
)
def test_an_estimate_is_finite_or_absent_whatever_comes(
    prefill: int, decode: int, per_s: float, tokens: float, output_tokens: float, users: int
) -> None:
    """PoA-hat at least 1, a target never worse than the present, its interval around its gain."""
    rows = seconds(per_s, tokens, length=64)
    in_flight = np.full(64, float(users))
    read = read_game(cards(prefill, decode), CURVES, rows, output_tokens, SLO, in_flight=in_flight)
    if isinstance(read, str):
        assert rows[:, 0].sum() < 50
        return
    found = price_split(read)
    figures = [found.poa_hat, found.gain_frac, found.gain_low, found.gain_high]
    assert all(figure is None or math.isfinite(figure) for figure in figures)
    assert found.poa_hat is None or found.poa_hat >= 1
    if found.target is not None:
        assert found.gain_frac is not None
        assert found.gain_frac > 0


# How it is noted


def test_a_note_is_of_its_instant() -> None:
    """Priced later in another thread, whatever has come meanwhile; silent workers are no part of a pool."""
    log = DecisionLog(window=64, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    curves, tokens = dict(CURVES), {Role.DECODE: 100.0}

    def take(second: int, count: int) -> None:
        chosen = tuple(
            Chosen(f"{second}-{n}", Role.PREFILL, 0.0, 0.0, 0, 0, 2000, 0, 1, (), 500) for n in range(count)
        )
        log.apply(
            DecisionBatch(router_id="r", sequence=second, sent_at_s=second, events=chosen), second + 0.5
        )

    for second in range(60):
        take(second, 30)
    present = [state(one) for one in cards(2, 6)]
    stale = state(card(99, Role.DECODE), stale=True)
    contexts = {Role.DECODE: 3000.0}
    note = note_split(60.0, [*present, stale], log, curves, tokens, SLO, contexts)
    take(60, 3000)
    for known in (curves, tokens, contexts):
        known.clear()
    # None ends, so 30 more are in flight each second: an open loop. The first second is not whole.
    held = msgspec.structs.replace(game(2, 6, seconds(length=59, seed=None)), context_tokens=3000.0)
    assert note() == price_split(held)
    assert note() != price_split(msgspec.structs.replace(held, context_tokens=None))


def test_users_who_wait_for_their_answers_are_priced_as_that() -> None:
    """40 of them, in flight all the time: the mix has no rate of its own, and resampling finds no other."""
    rows = seconds(seed=None)
    read = read_game(
        cards(2, 6), CURVES, rows, 100.0, SLO, context_tokens=2100.0, in_flight=np.full(60, 40.0)
    )
    assert isinstance(read, Game)
    assert (read.users, read.context_tokens) == (40, 2100.0)
    mix = Mix(
        users=40,
        uncached_tokens=1500.0,
        uncached_squared=1500.0**2,
        context_tokens=2100.0,
        output_tokens=100.0,
    )
    every = every_split(mix, read.pools, SLO, 8)
    found = price_split(read)
    assert (found.now, found.best) == (every[1], best_split(every))
    assert found.target is not None
    assert found.gain_low == found.gain_high == found.gain_frac


def test_unless_somebody_counted_the_loop_is_open() -> None:
    """A trace tells when its requests came, not when they ended."""
    assert game().users == 0
    unknown = read_game(cards(2, 6), CURVES, seconds(), 100.0, SLO, in_flight=np.full(60, np.nan))
    assert isinstance(unknown, Game)
    assert unknown.users == 0
    assert price_split(unknown) == price_split(game())


def state(one: WorkerCard, *, stale: bool = False) -> WorkerState:
    return WorkerState(
        key=WorkerKey(one.worker_id, 0),
        card=one,
        age_s=0.0,
        stale=stale,
        kv_used_blocks=None,
        kv_used_frac=None,
        active_decode_blocks=None,
        active_prefill_tokens=None,
        running_prefill_requests=None,
        running_decode_requests=None,
        queued_requests=None,
        queued_prefill_tokens=None,
        busy_frac=None,
        prefill_tokens_total=0,
        cache=CacheState(),
    )
