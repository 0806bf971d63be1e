"""The marginal cost of a request on a worker, on numbers worked by hand."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa import fitting, latency
from dynamo_poa.marginal import (
    COST,
    TTFT_WEIGHT,
    Ask,
    Loads,
    Room,
    aggregated_cost_s,
    choose,
    decode_cost_s,
    iteration_s,
    patience_s,
    prefill_cost_s,
    pressure,
    stalls_cost_s,
)
from dynamo_poa.values import Curve, Role
from dynamo_poa.wire import MAX_FIGURE

# 6 ms a pass and 0.25 ms more for each request; a prompt 2 ms and 0.1 ms a token.
CURVE = Curve(prefill_base_s=0.002, prefill_token_s=0.0001, decode_base_s=0.006, decode_request_s=0.00025)
SLOW = Curve(prefill_base_s=0.01, prefill_token_s=0.0005, decode_base_s=0.03, decode_request_s=0.00125)
ROOM = Room()
amounts = st.integers(0, 500)


def test_a_prefill_worker_costs_its_backlog_the_prompt_and_the_delay_of_those_behind() -> None:
    """T + lambda T a s: T = 2 + 30 ms of those computed, 2 + 20 ms of the own, two arrivals a second."""
    load = Loads(running=3, waiting=2, queued_tokens=300)
    cost_s = prefill_cost_s(CURVE, load, 200, Ask(1000, arrivals_per_s=2.0), ROOM)
    assert cost_s == pytest.approx(0.054 + 2.0 * 0.054 * 0.02)


def test_a_decode_worker_costs_the_own_passes_and_what_each_gains_for_those_there() -> None:
    """O l(y + 1) + y O (l(y + 1) - l(y)): ten there, 64 tokens; whether they decode yet does not matter."""
    expected = 64 * 0.00875 + 10 * 64 * 0.00025
    for load in (Loads(running=10), Loads(running=4, waiting=6)):
        assert decode_cost_s(CURVE, load, 0, Ask(0), ROOM) == pytest.approx(expected)


def test_kv_tokens_cost_the_own_and_everybodys() -> None:
    """A prompt of 100 and half of 20 output tokens lengthen the pass of two others by 110 c."""
    curve = Curve(decode_base_s=0.01, decode_kv_token_s=1e-5)
    cost_s = decode_cost_s(curve, Loads(running=2, kv_tokens=400), 0, Ask(100, 20), ROOM)
    assert cost_s == pytest.approx(20 * (0.01 + 510e-5) + 2 * 20 * 110e-5)


def test_an_aggregated_worker_costs_both_and_those_who_stand_still_meanwhile() -> None:
    """Prefill's cost with its weight, decode's, and x p for the four that decode already."""
    load, ask = Loads(running=4, waiting=1, queued_tokens=100, kv_tokens=900), Ask(300, 40, 1.5)
    both_s = TTFT_WEIGHT * prefill_cost_s(CURVE, load, 200, ask, ROOM) + decode_cost_s(
        CURVE, load, 200, ask, ROOM
    )
    assert aggregated_cost_s(CURVE, load, 200, ask, ROOM) == pytest.approx(both_s + 4 * 0.022)


def test_an_idle_slow_worker_is_dear_until_the_others_are_as_slow() -> None:
    """theory.md's example: four of l(k) = 6 + 0.25 k ms and one 5x slower: of 48 the slow one gets none."""
    loads = [0] * 5
    for _ in range(48):
        costs = [
            decode_cost_s(curve, Loads(running=k), 0, Ask(0), ROOM)
            for curve, k in zip([CURVE] * 4 + [SLOW], loads, strict=True)
        ]
        loads[costs.index(min(costs))] += 1
    assert loads == [12, 12, 12, 12, 0]


def test_beyond_its_slots_a_worker_makes_wait() -> None:
    """S = 8: the ninth waits an eighth of a request's time, and another in its stead; passes stay as long."""
    full = decode_cost_s(CURVE, Loads(running=8), 0, Ask(0), Room(requests=8))
    own_s = 64 * 0.008
    assert full == pytest.approx(own_s + 2 * own_s / 8)
    assert full > decode_cost_s(CURVE, Loads(running=7), 0, Ask(0), Room(requests=8))


def test_beyond_its_cache_a_worker_makes_wait() -> None:
    """1000 tokens of room, 132 of a request too many."""
    room = Room(kv_tokens=1000)
    cost_s = decode_cost_s(CURVE, Loads(running=1, kv_tokens=1000), 0, Ask(100), room)
    own_s = 64 * 0.0065
    assert cost_s == pytest.approx(own_s + 64 * 0.00025 + 2 * 0.132 * own_s)


@given(requests=amounts, kv_tokens=amounts, capacity=st.integers(1, 500))
def test_passes_take_what_the_fitted_model_says(requests: int, kv_tokens: int, capacity: int) -> None:
    """The same formula as latency.iteration_s and fitting.pressure, without arrays."""
    curve = Curve(decode_base_s=0.01, decode_request_s=0.001, decode_kv_token_s=1e-5, pressure_s=0.02)
    kv_frac = kv_tokens / capacity
    assert pressure(kv_frac) == pytest.approx(float(fitting.pressure(kv_frac)))
    expected_s = float(latency.iteration_s(curve, float(requests), float(kv_tokens), kv_frac))
    assert iteration_s(curve, requests, kv_tokens, Room(kv_tokens=capacity)) == pytest.approx(expected_s)


@given(
    role=st.sampled_from([prefill_cost_s, decode_cost_s, aggregated_cost_s]),
    running=amounts,
    waiting=amounts,
    queued=amounts,
    kv_tokens=st.integers(0, 10_000),
    uncached=amounts,
    slots=st.integers(1, 300),
)
def test_a_cost_is_finite_above_zero_and_grows_with_what_is_there(
    role: object, running: int, waiting: int, queued: int, kv_tokens: int, uncached: int, slots: int
) -> None:
    """However loaded, one more request there never makes a worker cheaper."""
    cost, ask, room = role, Ask(500, 50, 3.0), Room(slots, 8000)
    queued = queued if waiting else 0
    less = cost(CURVE, Loads(running, waiting, queued, kv_tokens), uncached, ask, room)  # type: ignore[operator]
    more = cost(CURVE, Loads(running + 1, waiting, queued, kv_tokens), uncached, ask, room)  # type: ignore[operator]
    assert 0 < less <= more * (1 + 1e-9)
    assert more < 1e6


def test_a_silent_worker_is_given_the_time_its_work_takes() -> None:
    """max(0.3 s, 5 l + 2 B), of what the leg's workers have to show."""
    busy = Loads(running=100, waiting=1, queued_tokens=3000)
    assert patience_s(Role.AGGREGATED, CURVE, busy) == pytest.approx(5 * 0.031 + 2 * 0.302)
    assert patience_s(Role.PREFILL, CURVE, busy) == pytest.approx(2 * 0.302)
    assert patience_s(Role.DECODE, SLOW, busy) == pytest.approx(5 * 0.155)
    assert patience_s(Role.DECODE, CURVE, Loads(running=1)) == 0.3


def test_stalls_cost_what_begins_while_there_and_what_is_met() -> None:
    """3 nu L (busy + L/2): a third of the time in stalls of 2 s, half a second there."""
    assert stalls_cost_s(1 / 3, 2.0, 0.5) == pytest.approx(1.5)
    assert stalls_cost_s(0.0, 2.0, 0.5) == 0.0


def test_of_costs_within_a_percent_any_is_chosen() -> None:
    """Seeded, so that a run can be repeated."""
    rng = random.Random(1)
    chosen = [choose([1.0, 1.009, 1.02, 1.005], rng) for _ in range(300)]
    assert {place: chosen.count(place) > 50 for place in set(chosen)} == {0: True, 1: True, 3: True}
    assert choose([2.0, 1.0, 3.0], random.Random(1)) == 1
    assert choose([0.0, 0.0], random.Random(3)) in (0, 1)


def test_a_prompt_shares_the_next_pass_with_those_that_wait_for_it() -> None:
    """Two of 150 tokens wait for it, of 2 ms and 0.1 ms a token; one of 300 is being computed since 12 ms."""
    load = Loads(running=3, waiting=3, queued_tokens=450, joining=2, joining_tokens=150, moved_at_s=1000.0)
    ask = Ask(1000, arrivals_per_s=2.0, at_s=1000.012)
    wait_s = (0.032 - 0.012) + 0.002 + 0.035
    expected = wait_s + 2 * 0.02 + 2.0 * wait_s * 0.02
    assert prefill_cost_s(CURVE, load, 200, ask, ROOM) == pytest.approx(expected)
    alone = load._replace(waiting=1, queued_tokens=300, joining=0, joining_tokens=0)
    wait_s = (0.032 - 0.012) + 0.022
    assert prefill_cost_s(CURVE, alone, 200, ask, ROOM) == pytest.approx(wait_s + 2.0 * wait_s * 0.02)


def test_who_decodes_stands_still_for_the_base_only_where_no_pass_was_due() -> None:
    """With a prompt that waits already, this one makes the four wait for its tokens alone."""
    alone = Loads(running=4)
    joined = Loads(running=4, waiting=1, queued_tokens=100, joining=1, joining_tokens=100)
    decode_s = [decode_cost_s(CURVE, load, 0, Ask(300, 40), ROOM) for load in (alone, joined)]
    costs = [aggregated_cost_s(CURVE, load, 200, Ask(300, 40), ROOM) for load in (alone, joined)]
    assert costs[0] == pytest.approx(TTFT_WEIGHT * 0.022 + 4 * 0.022 + decode_s[0])
    assert costs[1] == pytest.approx(TTFT_WEIGHT * (0.032 + 0.02) + 4 * 0.02 + decode_s[1])


def test_a_pass_that_is_overdue_is_waited_for_as_long_again() -> None:
    """32 ms it should have taken; 50 ms have gone: no sign that it is about to end."""
    load = Loads(waiting=1, queued_tokens=300, moved_at_s=0.0)
    assert prefill_cost_s(CURVE, load, 0, Ask(0, at_s=0.05), ROOM) == pytest.approx(0.018 + 0.002)


def test_prompts_beyond_what_a_pass_takes_cost_another() -> None:
    """Of 100 tokens a pass: 120 wait already, in two passes; 200 more make it four, two of them for this."""
    room, load = Room(batch_tokens=100), Loads(waiting=1, queued_tokens=120, joining=1, joining_tokens=120)
    ask, wait_s = Ask(0, arrivals_per_s=5.0), 4 * 0.002 + 0.032
    expected = wait_s + 0.02 + 5.0 * wait_s * 0.02
    assert prefill_cost_s(CURVE, load, 200, ask, room) == pytest.approx(expected)
    decoding = load._replace(running=1)
    costs = [aggregated_cost_s(CURVE, at, 200, ask, room) for at in (load, decoding)]
    decode_s = [decode_cost_s(CURVE, at, 200, ask, room) for at in (load, decoding)]
    assert costs[1] - costs[0] == pytest.approx(2 * 0.002 + 0.02 + decode_s[1] - decode_s[0])
    computing = Loads(waiting=1, queued_tokens=120)
    assert prefill_cost_s(CURVE, computing, 0, Ask(0), room) == pytest.approx(2 * 0.002 + 0.012 + 0.002)


@pytest.mark.parametrize("role", list(Role))
def test_the_largest_figures_that_are_taken_have_a_finite_cost(role: Role) -> None:
    """Infinite less infinite is no number, and of costs that are none no least can be chosen."""
    most = Curve(**dict.fromkeys(Curve.__struct_fields__, MAX_FIGURE))
    load = Loads(
        running=1e5, waiting=1e5, queued_tokens=1e12, kv_tokens=1e12, joining=1e3, joining_tokens=1e9
    )
    cost_s = COST[role](most, load, 1e6, Ask(1e6, MAX_FIGURE, 1e6, 1e9), Room(1, 1, 1))
    assert 0 < cost_s < math.inf
