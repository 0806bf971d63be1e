"""The games that requests in flight play, and what they cost as played and at best."""

import numpy as np
import pytest

from dynamo_poa.flight import InFlight, Uncached
from dynamo_poa.snapshot import MAX_PRICED, NO_PASS, TOO_LONG, foreign_tokens, price, take_snapshot
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency

W = [WorkerKey(number, 0) for number in (1, 2, 3, 4, 5)]


def latencies(role, *curves):
    return {
        key: WorkerLatency(key=key, role=role, curve=curve) for key, curve in zip(W, curves, strict=False)
    }


def cards(count, **more):
    return {
        w: WorkerCard(worker_id=w, role=Role.DECODE, kv_block_size=16, **more) for w in range(1, count + 1)
    }


def waiting(name, worker, tokens, *, cached=0, uncached=None):
    return InFlight(name, worker, tokens, cached, uncached, 0.0, None)


def decoding(name, worker, tokens=0, since_s=0.0):
    return InFlight(name, worker, tokens, 0, None, since_s, since_s)


PREFILL = Curve(prefill_base_s=0.01, prefill_token_s=0.001)


def test_two_prompts_on_one_of_two_equal_workers_should_have_been_spread():
    """0.11 s each: one after the other 0.11 + 0.22, apart 2 x 0.11; alone the same: all is congestion."""
    snapshot = take_snapshot(
        Role.PREFILL,
        5.0,
        [waiting("a", W[0], 100), waiting("b", W[0], 100)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
    )
    priced = price(snapshot)
    assert (priced.at_s, priced.role, priced.requests) == (5.0, Role.PREFILL, 2)
    assert priced.observed_s == pytest.approx(0.33)
    assert priced.optimal_s == pytest.approx(0.22)
    assert priced.unloaded_s == pytest.approx(0.22)
    assert priced.miss_s == 0.0


def test_a_prompt_that_went_where_nothing_was_cached_is_a_miss():
    """Computed in full, 0.11 s, although the other idle worker holds 90 of its 100 tokens: 0.02 s."""
    known = Uncached((W[0], W[1]), np.array([100.0, 10.0]))
    snapshot = take_snapshot(
        Role.PREFILL,
        0.0,
        [waiting("a", W[0], 100, uncached=known)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
    )
    priced = price(snapshot)
    assert priced.observed_s == pytest.approx(0.11)
    assert priced.optimal_s == pytest.approx(0.02)
    assert priced.miss_s == pytest.approx(0.09)


def test_the_miss_that_makes_others_wait_counts_their_waiting():
    """Two on W1, the first a miss of 90 tokens: with the hit both would have been faster."""
    known = Uncached((W[0], W[1]), np.array([100.0, 10.0]))
    here = Uncached((W[0], W[1]), np.array([20.0, 100.0]))
    snapshot = take_snapshot(
        Role.PREFILL,
        0.0,
        [waiting("a", W[0], 100, uncached=known), waiting("b", W[0], 100, uncached=here)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
    )
    priced = price(snapshot)
    assert priced.observed_s == pytest.approx(0.03 + 0.14)  # shortest first
    assert priced.optimal_s == pytest.approx(0.02 + 0.03)
    assert priced.miss_s == pytest.approx(0.17 - (0.02 + 0.05))


def test_a_decision_without_candidates_is_cached_only_where_it_went():
    """Nothing is made up in favour of moving it: PoA-hat is at most the truth."""
    snapshot = take_snapshot(
        Role.PREFILL, 0.0, [waiting("a", W[0], 100, cached=64)], latencies(Role.PREFILL, PREFILL, PREFILL), {}
    )
    assert snapshot.prefill.tokens.tolist() == [[36.0, 100.0]]
    priced = price(snapshot)
    assert priced.observed_s == priced.optimal_s == pytest.approx(0.046)


def test_a_prompt_computes_no_more_tokens_than_it_has():
    """Seen live: 1024 uncached tokens of 512, as another prompt was booked while loads were asked for."""
    known = Uncached((W[0], W[1]), np.array([200.0, 10.0]))
    snapshot = take_snapshot(
        Role.PREFILL,
        0.0,
        [waiting("a", W[0], 100, uncached=known)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
    )
    assert snapshot.prefill.tokens.tolist() == [[100.0, 10.0]]


def test_a_fully_cached_prompt_still_computes_a_token():
    """Its time is never zero: a ratio of nothing is not an estimate."""
    snapshot = take_snapshot(
        Role.PREFILL, 0.0, [waiting("a", W[0], 64, cached=64)], latencies(Role.PREFILL, PREFILL, PREFILL), {}
    )
    assert snapshot.prefill.tokens[0, 0] == 1.0


def test_theory_check_four_workers_and_one_five_times_slower_spread_evenly():
    """theory.md: 48 requests, l(k) = 6 + 0.25k ms, one 5x slower: PoA-hat 1.62, the optimum leaves it empty.

    48 over 5 evenly is 10 on three workers and 9 on two, one of which is the slow one.
    """
    fast = Curve(decode_base_s=0.006, decode_request_s=0.00025)
    slow = Curve(decode_base_s=0.030, decode_request_s=0.00125)
    requests = [decoding(f"{i}", W[i % 5 if i < 45 else i - 45]) for i in range(48)]
    snapshot = take_snapshot(
        Role.DECODE, 0.0, requests, latencies(Role.DECODE, fast, fast, fast, fast, slow), {}
    )
    priced = price(snapshot)
    assert priced.observed_s / priced.optimal_s == pytest.approx(1.62, abs=0.005)


def test_decode_counts_the_iterations_still_to_come():
    """Two on one of two workers, l(1) = 10, l(2) = 12 ms, 1.2 s so far: 100 tokens made, 100 to come."""
    curve = Curve(decode_base_s=0.008, decode_request_s=0.002)
    requests = [decoding("a", W[0], since_s=0.0), decoding("b", W[0], since_s=0.0)]
    priced = price(take_snapshot(Role.DECODE, 1.2, requests, latencies(Role.DECODE, curve, curve), {}))
    assert priced.observed_s == pytest.approx(100 * 2 * 0.012)
    assert priced.optimal_s == pytest.approx(100 * 2 * 0.010)
    assert priced.unloaded_s == pytest.approx(100 * 2 * 0.010)


def test_a_long_context_slows_its_own_iteration_and_its_neighbours():
    """gamma = 1 us a token: own 1,000 tokens cost 1 ms, the neighbour's as much at the mean context."""
    curve = Curve(decode_base_s=0.01, decode_kv_token_s=1e-6)
    requests = [decoding("a", W[0], 1000, since_s=5.0), decoding("b", W[0], 1000, since_s=5.0)]
    game = take_snapshot(Role.DECODE, 5.0, requests, latencies(Role.DECODE, curve, curve), {}).decode
    assert game.extra_s.tolist() == [[0.001, 0.001], [0.001, 0.001]]
    assert game.iteration_s[0] == pytest.approx([0.0, 0.010, 0.011])


def test_beyond_its_slots_a_workers_requests_take_turns():
    """max_num_seqs = 2: four requests get half the iterations each; k * l(k) stays convex."""
    curve = Curve(decode_base_s=0.01, decode_request_s=0.001)
    requests = [decoding(f"{i}", W[0], since_s=1.0) for i in range(4)]
    pool = latencies(Role.DECODE, curve, curve)
    game = take_snapshot(Role.DECODE, 1.0, requests, pool, cards(2, max_num_seqs=2)).decode
    assert game.iteration_s[0] == pytest.approx([0.0, 0.011, 0.012, 0.018, 0.024])


def test_the_total_stays_convex_when_the_cache_runs_full():
    """The kink where a full cache begins to take turns is levelled out, or the optimum would be refused."""
    curve = Curve(decode_base_s=0.01, decode_request_s=0.001, pressure_s=0.01)
    requests = [decoding(f"{i}", W[0], 160, since_s=1.0) for i in range(20)]
    pool = latencies(Role.DECODE, curve, curve)
    game = take_snapshot(Role.DECODE, 1.0, requests, pool, cards(2, total_kv_blocks=100)).decode
    total = np.arange(21) * game.iteration_s[0]
    assert (np.diff(total, 2) >= -1e-12).all()
    assert price(take_snapshot(Role.DECODE, 1.0, requests, pool, cards(2, total_kv_blocks=100))).optimal_s > 0


def test_aggregated_workers_play_both_games():
    """Requests before their first token the one, after it the other; the costs are seconds and add up."""
    curve = Curve(prefill_token_s=0.001, decode_base_s=0.01)
    requests = [waiting("a", W[0], 100), decoding("b", W[0], since_s=1.0)]
    snapshot = take_snapshot(Role.AGGREGATED, 1.0, requests, latencies(Role.AGGREGATED, curve, curve), {})
    priced = price(snapshot)
    assert priced.observed_s == pytest.approx(0.1 + 0.01)
    assert priced.requests == 2


def test_backlog_that_is_not_ours_is_waited_for_on_both_sides():
    """100 foreign tokens on W1: 0.1 s of waiting there, observed; the optimum avoids it."""
    snapshot = take_snapshot(
        Role.PREFILL,
        0.0,
        [waiting("a", W[0], 100)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
        {W[0]: 100.0},
    )
    priced = price(snapshot)
    assert priced.observed_s == pytest.approx(0.21)
    assert priced.optimal_s == pytest.approx(0.11)


def test_more_requests_than_can_be_priced_are_sampled_and_stand_for_the_rest():
    """2,000 alike on two of four workers: the ratio is that of all, the cost theirs within 1 %."""
    pool = latencies(Role.PREFILL, *[PREFILL] * 4)
    requests = [waiting(f"{i}", W[i % 2], 100) for i in range(2000)]
    snapshot = take_snapshot(Role.PREFILL, 0.0, requests, pool, {})
    assert len(snapshot.prefill.requests) <= MAX_PRICED
    priced = price(snapshot)
    assert priced.requests == 2000
    per_worker = 1000
    assert priced.observed_s == pytest.approx(2 * 0.11 * per_worker * (per_worker + 1) / 2, rel=0.01)
    assert priced.observed_s / priced.optimal_s == pytest.approx(2.0, rel=0.01)


def test_requests_on_a_worker_that_is_gone_are_not_in_the_game():
    """I5: the estimate uses present workers only."""
    gone = WorkerKey(9, 0)
    snapshot = take_snapshot(
        Role.PREFILL,
        0.0,
        [waiting("a", gone, 100), waiting("b", W[0], 100)],
        latencies(Role.PREFILL, PREFILL, PREFILL),
        {},
    )
    assert [request.request_id for request in snapshot.prefill.requests] == ["b"]


@pytest.mark.parametrize(
    ("role", "curves", "request_", "lack"),
    [
        (Role.PREFILL, [PREFILL], waiting("a", W[0], 9), "1 worker, 2 needed"),
        (Role.PREFILL, [], waiting("a", W[0], 9), "0 workers, 2 needed"),
        (Role.PREFILL, [Curve()] * 2, waiting("a", W[0], 9), NO_PASS),
        (Role.DECODE, [Curve()] * 2, decoding("a", W[0]), NO_PASS),
    ],
)
def test_what_cannot_be_priced_says_what_it_lacks(role, curves, request_, lack):
    """Absent with a reason, never 1.0."""
    snapshot = take_snapshot(role, 0.0, [request_], latencies(role, *curves), {})
    assert snapshot.lack == lack
    assert price(snapshot).lack == lack


class Rank:
    def __init__(self, key, queued, tokens):
        self.key, self.queued_requests, self.queued_prefill_tokens = key, queued, tokens


def test_foreign_tokens_are_those_of_requests_we_do_not_know():
    """Five queue with 500 tokens, two of them ours; none while ours account for all, or unknown."""
    ranks = [Rank(W[0], 5, 500), Rank(W[1], 2, 200), Rank(W[2], None, None)]
    ours = [waiting("a", W[0], 9), waiting("b", W[0], 9), waiting("c", W[1], 9), waiting("d", W[1], 9)]
    assert foreign_tokens(ranks, ours) == {W[0]: 300.0}


@pytest.mark.parametrize(
    ("role", "running", "foreign"),
    [
        (Role.PREFILL, [waiting("a", W[0], 2**53)], {}),
        (Role.PREFILL, [waiting("a", W[0], 100)], {W[1]: 2.0**53}),
        (Role.DECODE, [decoding("a", W[0], 2**53)], {}),
    ],
    ids=["prompt", "queue", "context"],
)
def test_a_leg_with_a_count_that_cannot_be_true_has_no_price_and_says_why(role, running, foreign):
    """The wire takes counts up to 2**53, of which a game's seconds would be beyond its optimum's bound."""
    curve = Curve(prefill_token_s=0.001, decode_base_s=0.01, decode_kv_token_s=1e-6)
    snapshot = take_snapshot(role, 0.0, running, latencies(role, curve, curve), {}, foreign)
    assert (snapshot.prefill, snapshot.decode, snapshot.lack) == (None, None, TOO_LONG)
    assert price(snapshot).lack == TOO_LONG
