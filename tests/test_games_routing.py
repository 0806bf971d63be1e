"""What a snapshot costs and could cost: worked numbers, brute force, properties, what is refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from dynamo_poa.errors import GameError, NotConvexError, PoaError
from dynamo_poa.games import slots
from dynamo_poa.games.routing import decode_cost, decode_optimum, prefill_cost, prefill_optimum
from dynamo_poa.games.slots import best_assignment

LEGS = ("prefill", "decode")
COST = {"prefill": prefill_cost, "decode": decode_cost}
OPTIMUM = {"prefill": prefill_optimum, "decode": decode_optimum}


def completion_times_s(processing_s, backlog_s, workers):
    """Return the sum of completion times in the best of all orders, by trying them all."""
    total = 0.0
    for worker in range(len(backlog_s)):
        own = [processing_s[r][worker] for r, w in enumerate(workers) if w == worker]
        total += min(
            sum(backlog_s[worker] + done for done in itertools.accumulate(order))
            for order in itertools.permutations(own)
        )
    return total


def iteration_times_s(iteration_s, extra_s, workers):
    """Return the decode cost, request by request."""
    return sum(iteration_s[w][workers.count(w)] + extra_s[r][w] for r, w in enumerate(workers))


BY_HAND = {"prefill": completion_times_s, "decode": iteration_times_s}


def brute_force_s(leg, game):
    """Return the least cost over every assignment."""
    n, m = (game[0] if leg == "prefill" else game[1]).shape
    lists = [array.tolist() for array in game]
    return min(BY_HAND[leg](*lists, list(workers)) for workers in itertools.product(range(m), repeat=n))


def all_slots_s(leg, game):
    """Return the least cost by matching to all n slots of every worker."""
    if leg == "prefill":
        processing_s, backlog_s = game
        n = len(processing_s)
        by_slot = np.stack([k * processing_s + backlog_s for k in range(1, n + 1)], axis=1)
    else:
        iteration_s, extra_s = game
        n = len(extra_s)
        added_s = np.diff(np.arange(n + 1) * iteration_s, axis=1)
        by_slot = np.stack([extra_s + added_s[:, k] for k in range(n)], axis=1)
    by_slot = by_slot.reshape(n, -1)
    return by_slot[linear_sum_assignment(by_slot)].sum()


def random_game(leg, random, n, m):
    """Draw a game: ties, zeros, slow workers, large backlogs and cache misses all come up."""
    draw = random.choice(["real", "tied", "zeros", "wide"])
    if leg == "prefill":
        size = {
            "real": lambda: random.lognormal(-1, 1, (n, 1)) * random.choice([1.0, 5.0], m),
            "tied": lambda: random.integers(0, 3, (n, m)).astype(float),
            "zeros": lambda: np.zeros((n, m)),
            "wide": lambda: 10.0 ** random.uniform(-4, 3, (n, m)),
        }[draw]()
        size = size * random.choice([1.0, 0.25], (n, m))
        return size, random.choice([0.0, 1.0, 500.0]) * random.integers(0, 4, m)
    speed = {"real": 5.0, "tied": 1.0, "zeros": 0.0, "wide": 100.0}[draw]
    steps = np.cumsum(random.integers(0, 3, (m, n)), axis=1) * random.choice([1.0, max(speed, 1.0)], (m, 1))
    together = np.hstack([np.zeros((m, 1)), np.cumsum(steps * min(speed, 1.0) * 0.01, axis=1)])
    extra_s = 0.05 * random.integers(0, 4, (n, m)) * random.choice([0.0, 1.0, 10.0])
    return together / np.maximum(np.arange(n + 1), 1), extra_s


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_what_trying_every_assignment_finds(leg, seed):
    """theory.md, Γ_R: exact to 1e-9, on 600 random windows a leg of up to 6 requests and 3 workers."""
    random, optimum, cost = np.random.default_rng(seed), OPTIMUM[leg], COST[leg]
    for _ in range(150):
        n, m = int(random.integers(1, 7)), int(random.integers(1, 4))
        game = random_game(leg, random, n, m)
        least_s, workers = optimum(*game)
        assert least_s == pytest.approx(brute_force_s(leg, game), rel=1e-9, abs=1e-12)
        assert cost(*game, workers) == least_s
        observed = random.integers(0, m, n)
        by_hand = BY_HAND[leg](*(array.tolist() for array in game), observed.tolist())
        assert cost(*game, observed) == pytest.approx(by_hand, rel=1e-12, abs=1e-12)
        assert cost(*game, observed) >= least_s * (1 - 1e-12)


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("seed", range(40))
def test_the_few_slots_that_are_tried_are_enough(leg, seed):
    """Against the matching to all n slots of every worker, up to 60 requests; some need a second round."""
    random = np.random.default_rng(seed)
    n, m = int(random.integers(2, 13 if seed % 2 else 61)), int(random.integers(1, 9))
    game = random_game(leg, random, n, m)
    assert OPTIMUM[leg](*game).cost_s == pytest.approx(all_slots_s(leg, game), rel=1e-9, abs=1e-12)


class BadlyStarted:
    """A prefill leg that starts with everybody on worker 0 and sees no gain in any move."""

    def __init__(self, processing_s, backlog_s):
        self.processing_s, self.backlog_s = processing_s, backlog_s
        self.shape = processing_s.shape
        self.rooms = []

    def start(self):
        return np.zeros(self.shape[0], dtype=np.intp)

    def positions(self, workers):
        assert not workers.any()
        return np.arange(1, len(workers) + 1)

    def slot_cost(self, worker, position):
        self.rooms.append(np.bincount(worker, minlength=self.shape[1]).tolist())
        return self.processing_s[:, worker] * position + self.backlog_s[worker]

    def joining(self, workers, changed, cost_s):
        cost_s[:] = 0.0


@pytest.mark.parametrize("seed", range(10))
def test_a_bad_start_takes_longer_and_finds_the_same(seed):
    """The start decides nothing else: full workers get more slots until nobody wants a further one."""
    game = random_game("prefill", np.random.default_rng(seed), 30, 4)
    leg = BadlyStarted(*game)
    assert prefill_cost(*game, best_assignment(leg)) == pytest.approx(all_slots_s("prefill", game), rel=1e-9)
    assert leg.rooms[0] == [30, 2, 2, 2]


def test_a_worker_whose_slots_are_all_taken_gets_more():
    """Six prompts started on a 10x slower worker want 3, 3: two slots a fast worker, then four."""
    leg = BadlyStarted(np.tile([10.0, 1.0, 1.0], (6, 1)), np.zeros(3))
    assert sorted(best_assignment(leg).tolist()) == [1, 1, 1, 2, 2, 2]
    # After the rooms: what the further slot of both full workers would cost.
    assert leg.rooms == [[6, 2, 2], [0, 1, 1], [6, 4, 4]]


def test_every_further_slot_is_tried_while_prices_do_not_settle():
    """Both would rather have the other's slot, so prices rise for ever and prove nothing."""
    cost = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert slots._wanting(cost, np.array([1, 0]), np.full((2, 3), 9.0)).tolist() == [True] * 3
    assert slots._wanting(cost, np.array([0, 1]), np.full((2, 3), 9.0)).tolist() == [False] * 3


def test_identical_requests_on_identical_workers_spread_evenly():
    """Nothing but ties: 10 of 0.1 s on 4 workers are 3, 3, 2, 2; 2 x 0.6 + 2 x 0.3 s."""
    cost_s, workers = prefill_optimum(np.full((10, 4), 0.1), np.zeros(4))
    assert cost_s == pytest.approx(1.8, rel=1e-12)
    assert sorted(np.bincount(workers, minlength=4).tolist()) == [2, 2, 3, 3]


def test_the_shortest_goes_first_and_the_longest_to_the_slow_worker_never():
    """Prompts of 1, 2, 3 s and a 5x slower worker: all on the fast one, 1 + 3 + 6 s, not 1 + 3 + 15."""
    processing_s = np.array([[1.0, 5.0], [2.0, 10.0], [3.0, 15.0]])
    cost_s, workers = prefill_optimum(processing_s, np.zeros(2))
    assert (cost_s, workers.tolist()) == (10.0, [0, 0, 0])
    assert prefill_cost(processing_s, np.zeros(2), [0, 0, 1]) == 19.0


def test_a_backlog_is_waited_for_by_everyone_behind_it():
    """Two prompts of 1 s: behind 4 s of backlog 5 + 6 s, and on the free worker 1 + 2."""
    processing_s, backlog_s = np.ones((2, 2)), np.array([4.0, 0.0])
    assert prefill_cost(processing_s, backlog_s, [0, 0]) == 11.0
    assert prefill_optimum(processing_s, backlog_s).cost_s == 3.0


def test_48_requests_spread_evenly_over_a_straggler_cost_162_percent():
    """theory.md: four workers of 6 + 0.25 k ms, one 5x slower; the optimum leaves the slow one empty."""
    k = np.arange(49)
    iteration_s = np.outer([1, 1, 1, 1, 5], 0.006 + 0.00025 * k)
    iteration_s[:, 0] = 0.0
    extra_s = np.zeros((48, 5))
    evenly = np.repeat(np.arange(5), [10, 10, 10, 9, 9])
    cost_s, workers = decode_optimum(iteration_s, extra_s)
    assert round(decode_cost(iteration_s, extra_s, evenly) / cost_s, 2) == 1.62
    assert np.bincount(workers, minlength=5).tolist() == [12, 12, 12, 12, 0]
    assert cost_s == pytest.approx(48 * 0.009, rel=1e-12)


def test_the_extra_of_a_request_decides_between_equal_workers():
    """One must share either way; the request whose cache must be moved stays where it is."""
    iteration_s = np.array([[0.0, 1.0, 2.0, 3.0]] * 2)
    extra_s = np.array([[0.0, 9.0], [0.5, 0.0], [0.0, 0.25]])
    cost_s, workers = decode_optimum(iteration_s, extra_s)
    assert workers.tolist() == [0, 1, 0]
    assert cost_s == 2.0 + 2.0 + 1.0


@pytest.mark.parametrize("workers", [0, 3])
def test_no_requests_cost_nothing(workers):
    """n = 0: (0.0, empty) on both legs, whatever the workers."""
    for optimum, game in (
        (prefill_optimum, (np.empty((0, workers)), np.ones(workers))),
        (decode_optimum, (np.zeros((workers, 1)), np.empty((0, workers)))),
    ):
        cost_s, chosen = optimum(*game)
        assert (cost_s, chosen.shape, chosen.dtype) == (0.0, (0,), np.dtype(np.intp))
    assert prefill_cost(np.empty((0, workers)), np.ones(workers), []) == 0.0
    assert decode_cost(np.zeros((workers, 1)), np.empty((0, workers)), []) == 0.0


NOT_CONVEX = np.array([[0.0, 1.0, 1.0, 1.0]] * 2 + [[0.0, 1.0, 1.5, 4 / 3]])


@pytest.mark.parametrize("call", [lambda *game: decode_cost(*game, [0, 0, 0]), decode_optimum])
def test_a_curve_that_is_not_convex_is_refused_by_name(call):
    """k * l(k) = 1, 3, 4: the third request adds 1 s after the second added 2."""
    with pytest.raises(NotConvexError) as refused:
        call(NOT_CONVEX, np.zeros((3, 3)))
    error = refused.value
    assert isinstance(error, PoaError)
    assert isinstance(error, ValueError)
    assert (error.key, error.value, error.bound) == ("iteration_s[2]", 1.0, ">= 2 s")
    assert (error.worker, error.k) == (2, 3)
    said = "iteration_s[2]: k * iteration_s[2, k] is not convex at k = 3: adds 1 s, must be >= 2 s"
    assert str(error) == said


def test_a_linear_curve_passes_however_it_rounds():
    """k * 0.1 adds now 0.1 and now a little less; tolerance 1e-9 of what a request adds, and no more."""
    added_s = np.diff(np.arange(65) * 0.1)
    assert (np.diff(added_s) < 0).any()
    iteration_s = np.full((1, 65), 0.1)
    iteration_s[0, 0] = 0.0
    assert decode_optimum(iteration_s, np.zeros((64, 1))).cost_s == pytest.approx(6.4, rel=1e-12)
    iteration_s[0, 64] -= 1e-10
    with pytest.raises(NotConvexError, match="not convex at k = 64"):
        decode_optimum(iteration_s, np.zeros((64, 1)))


TWO = np.ones((2, 2))
CURVES = np.array([[0.0, 1.0, 1.0]] * 2)


@pytest.mark.parametrize(
    ("call", "key", "value", "bound"),
    [
        (lambda: prefill_optimum(np.ones(3), np.ones(2)), "processing_s.ndim", 1, "2"),
        (lambda: prefill_optimum(TWO, np.ones((2, 2))), "backlog_s.ndim", 2, "1"),
        (
            lambda: prefill_optimum(TWO, np.ones(3)),
            "backlog_s.shape",
            (3,),
            "(2,), as the other argument has it",
        ),
        (lambda: prefill_optimum([[1.0, -0.5]], [0, 0]), "processing_s[0, 1]", -0.5, "in [0, 1e+12] s"),
        (lambda: prefill_optimum([[1.0]], [math.inf]), "backlog_s[0]", math.inf, "in [0, 1e+12] s"),
        (
            lambda: prefill_optimum(np.ones((2, 0)), []),
            "processing_s.shape",
            (2, 0),
            "(n, m) with m >= 1 workers for n >= 1 requests",
        ),
        (
            lambda: prefill_optimum([[1.0, 2.0], [1.0]], [0, 0]),
            "processing_s",
            "ragged",
            "rows of one length",
        ),
        (lambda: prefill_optimum([["1"]], [0]), "processing_s.dtype", "<U1", "a type of real numbers"),
        (lambda: prefill_optimum([[1j]], [0]), "processing_s.dtype", "complex128", "a type of real numbers"),
        (lambda: prefill_optimum([[10**400]], [0]), "processing_s.dtype", "object", "a type of real numbers"),
        (lambda: decode_optimum(None, TWO), "iteration_s.dtype", "object", "a type of real numbers"),
        (lambda: prefill_cost(TWO, [0, 0], [[0], [0, 1]]), "workers", "ragged", "rows of one length"),
        (lambda: prefill_cost(TWO, [0, 0], None), "workers.dtype", "object", "a whole-number type"),
        (lambda: prefill_cost(TWO, [0, 0], [0]), "workers.shape", (1,), "(2,)"),
        (lambda: prefill_cost(TWO, [0, 0], [0, 2]), "workers[1]", 2, "in [0, 2)"),
        (lambda: prefill_cost(TWO, [0, 0], [-1, 0]), "workers[0]", -1, "in [0, 2)"),
        (lambda: decode_cost(CURVES, TWO, [0.0, 1.0]), "workers.dtype", "float64", "a whole-number type"),
        (
            lambda: decode_optimum(np.hstack([CURVES, CURVES[:, -1:]]), TWO),
            "iteration_s.shape",
            (2, 4),
            "(2, 3), as the other argument has it",
        ),
        (
            lambda: decode_optimum([[0.0, 1.0, 1.0], [0.5, 1.0, 1.0]], TWO),
            "iteration_s[1, 0]",
            0.5,
            "0: nobody bears it",
        ),
        (
            lambda: decode_optimum(np.zeros((0, 3)), np.ones((2, 0))),
            "extra_s.shape",
            (2, 0),
            "(n, m) with m >= 1 workers for n >= 1 requests",
        ),
    ],
)
def test_what_is_no_game_is_refused_with_the_place(call, key, value, bound):
    """Bad input is refused, never repaired; the error has key, value and bound."""
    with pytest.raises(GameError) as refused:
        call()
    assert (refused.value.key, refused.value.value, refused.value.bound) == (key, value, bound)
    assert str(refused.value) == f"{key} = {value!r}: must be {bound}"


def test_a_time_that_is_no_number_is_refused():
    """NaN compares false with everything, so it must not slip through a comparison."""
    with pytest.raises(GameError, match=r"extra_s\[1, 0\] = nan: must be in \[0, 1e\+12\] s"):
        decode_optimum(CURVES, [[1.0, 1.0], [math.nan, 1.0]])


@st.composite
def games(draw, leg):
    """Games of up to 8 requests and 4 workers, with a random assignment."""
    n, m = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random_game(leg, random, n, m), random.integers(0, m, n), random


def permuted(leg, game, requests, workers):
    """Return the same game with requests and workers in another order."""
    if leg == "prefill":
        return game[0][np.ix_(requests, workers)], game[1][workers]
    return game[0][workers], game[1][np.ix_(requests, workers)]


@pytest.mark.parametrize("leg", LEGS)
def test_the_order_of_requests_and_workers_changes_nothing(leg):
    """They are labels."""

    @given(games(leg))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def check(drawn):
        game, chosen, random = drawn
        shape = game[0].shape if leg == "prefill" else game[1].shape
        requests, workers = (random.permutation(size) for size in shape)
        other = permuted(leg, game, requests, workers)
        assert OPTIMUM[leg](*other).cost_s == pytest.approx(OPTIMUM[leg](*game).cost_s, rel=1e-9, abs=1e-12)
        moved = np.argsort(workers)[chosen[requests]]
        assert COST[leg](*other, moved) == pytest.approx(COST[leg](*game, chosen), rel=1e-9, abs=1e-12)

    check()


@pytest.mark.parametrize("leg", LEGS)
def test_another_worker_never_makes_the_optimum_dearer(leg):
    """It can stay unused; and an assignment that leaves it unused costs what it did."""

    @given(games(leg))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def check(drawn):
        game, chosen, random = drawn
        n = len(chosen)
        if leg == "prefill":
            larger = (
                np.hstack([game[0], random.uniform(0, 3, (n, 1))]),
                np.append(game[1], random.uniform(0, 3)),
            )
        else:
            curve = np.append(0.0, random.uniform(0, 0.1) + random.uniform(0, 0.1) * np.arange(1, n + 1))
            larger = (np.vstack([game[0], curve]), np.hstack([game[1], random.uniform(0, 0.2, (n, 1))]))
        assert OPTIMUM[leg](*larger).cost_s <= OPTIMUM[leg](*game).cost_s * (1 + 1e-12)
        assert COST[leg](*larger, chosen) == pytest.approx(COST[leg](*game, chosen), rel=1e-12)

    check()


@pytest.mark.parametrize("leg", LEGS)
def test_scaling_every_cost_scales_the_optimum_and_leaves_the_ratio(leg):
    """PoA-hat has no unit."""

    @given(games(leg), st.floats(1e-3, 1e3))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def check(drawn, factor):
        game, chosen, _ = drawn
        scaled = tuple(factor * array for array in game)
        assert OPTIMUM[leg](*scaled).cost_s == pytest.approx(factor * OPTIMUM[leg](*game).cost_s, rel=1e-9)
        assert COST[leg](*scaled, chosen) == pytest.approx(factor * COST[leg](*game, chosen), rel=1e-9)

    check()


@pytest.mark.parametrize("leg", LEGS)
def test_no_assignment_undercuts_the_optimum(leg):
    """PoA-hat >= 1 by construction; under 1 - 1e-9 is a bug (theory.md)."""

    @given(games(leg))
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(drawn):
        game, chosen, random = drawn
        least_s = OPTIMUM[leg](*game).cost_s
        for workers in (chosen, random.integers(0, chosen.max() + 1, len(chosen))):
            assert COST[leg](*game, workers) >= least_s * (1 - 1e-12)

    check()


@pytest.mark.parametrize("leg", LEGS)
def test_a_large_snapshot_is_matched_as_over_all_its_slots(leg):
    """256 requests, 16 workers, one 5x slower, cache misses: against 256 slots on every worker."""
    random = np.random.default_rng(11)
    n, m = 256, 16
    speed = np.where(np.arange(m) == 3, 5.0, 1.0)
    if leg == "prefill":
        tokens = random.lognormal(6.5, 1, (n, 1)) * random.choice([1.0, 0.2], (n, m), p=[0.8, 0.2])
        game = (tokens * 1e-4 * speed, random.exponential(0.5, m))
    else:
        iteration_s = np.outer(speed, 0.006 + 0.00025 * np.arange(n + 1))
        iteration_s[:, 0] = 0.0
        game = (iteration_s, 0.01 * random.choice([0.0, 1.0], (n, m), p=[0.2, 0.8]))
    assert OPTIMUM[leg](*game).cost_s == pytest.approx(all_slots_s(leg, game), rel=1e-9)
