"""Pure equilibria of small games: the textbook's worked numbers, and both legs' own."""

import itertools
import math

import numpy as np
import pytest

from dynamo_poa.errors import GameError
from dynamo_poa.games.equilibria import (
    MOST_PROFILES,
    Game,
    best_response,
    congestion_game,
    decode_game,
    find_equilibria,
    prefill_game,
)
from dynamo_poa.games.routing import decode_cost, decode_optimum, prefill_cost, prefill_optimum


def pigou(players):
    """Return Pigou's two roads for so many drivers: one takes 1, the other the share that is on it."""
    share = np.arange(1, players + 1) / players
    return congestion_game([np.ones(players).tolist(), share.tolist()], [[(0,), (1,)]] * players)


@pytest.mark.parametrize("players", [2, 4, 8, 12])
def test_pigou_costs_four_thirds(players):
    """Pigou 1920: all on the road that fills, 1 each; half there, 3/4 each. Whole drivers attain it too."""
    found = find_equilibria(pigou(players))
    assert found.worst == (pytest.approx(players), (1,) * players)
    assert found.optimum.cost == pytest.approx(0.75 * players, rel=1e-12)
    assert found.price_of_anarchy == pytest.approx(4 / 3, rel=1e-12)


def test_pigous_best_equilibrium_tends_to_four_thirds_as_drivers_get_smaller():
    """One driver may stay on the constant road: 1 - 1/n + 1/n^2 each. In the limit equilibria are one."""
    ratios = [find_equilibria(pigou(n)).price_of_stability for n in (2, 4, 8, 12)]
    assert ratios == pytest.approx([(1 - 1 / n + 1 / n**2) * 4 / 3 for n in (2, 4, 8, 12)], rel=1e-12)
    for n in (64, 512):
        share = np.arange(n + 1) / n
        iteration_s, extra_s = np.array([np.sign(share), share]), np.zeros((n, 2))
        stays = best_response(decode_game(iteration_s, extra_s), (1,) * (n - 1) + (0,)).profile
        best_s, optimal_s = (
            decode_cost(iteration_s, extra_s, stays),
            decode_optimum(iteration_s, extra_s).cost_s,
        )
        assert stays.count(0) == 1
        assert best_s / optimal_s == pytest.approx((1 - 1 / n + 1 / n**2) * 4 / 3, rel=1e-12)


@pytest.mark.parametrize("players", [3, 4])
def test_affine_delays_can_cost_five_halves(players):
    """Christodoulou and Koutsoupias 2005: {h_i, g_i} pays 2, {g_i+1, h_i-1, h_i+1} pays 5 and is stable."""
    linear = [list(range(1, players + 1))] * (2 * players)

    def h(i):
        return i % players

    def g(i):
        return players + i % players

    strategies = [((h(i), g(i)), (g(i + 1), h(i - 1), h(i + 1))) for i in range(players)]
    found = find_equilibria(congestion_game(linear, strategies))
    assert found.optimum == (2.0 * players, (0,) * players)
    assert found.worst == (5.0 * players, (1,) * players)
    assert found.price_of_anarchy == 2.5
    assert found.price_of_stability == 1.0


@pytest.mark.parametrize("players", [2, 4, 6])
def test_a_road_more_makes_braess_network_slower(players):
    """Braess 1968: 3/2 each without the shortcut; with it all take it, 2 each, and the optimum stays."""
    share, constant, free = (np.arange(1, players + 1) / players), np.ones(players), np.zeros(players)
    delays = [array.tolist() for array in (share, constant, constant, share, free)]
    upper, lower, shortcut = (0, 1), (2, 3), (0, 4, 3)
    without = find_equilibria(congestion_game(delays, [(upper, lower)] * players))
    assert without.best.cost == without.worst.cost == without.optimum.cost == 1.5 * players
    with_shortcut = find_equilibria(congestion_game(delays, [(upper, lower, shortcut)] * players))
    assert with_shortcut.worst == (2.0 * players, (2,) * players)
    assert with_shortcut.price_of_anarchy == pytest.approx(2.0 * players / with_shortcut.optimum.cost)
    assert with_shortcut.optimum.cost == pytest.approx(1.5 * players, rel=1e-12)


def random_leg(leg, random):
    """Draw a leg's game small enough to enumerate: its arrays."""
    n, m = int(random.integers(1, 6)), int(random.integers(1, 4))
    if leg == "prefill":
        processing_s = random.integers(0, 6, (n, m)) * random.choice([1.0, 5.0], m)
        return processing_s, random.integers(0, 3, m) * 2.0
    k = np.arange(n + 1)
    iteration_s = random.choice([1.0, 5.0], (m, 1)) * (random.integers(0, 4, (m, 1)) + 0.5 * k)
    iteration_s[:, 0] = 0.0
    return iteration_s, random.integers(0, 3, (n, m)) * 1.0


LEGS = {
    "prefill": (prefill_game, prefill_cost, prefill_optimum),
    "decode": (decode_game, decode_cost, decode_optimum),
}


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_worst_equilibrium_costs_at_least_the_best_and_that_the_optimum(leg, seed):
    """PoA >= PoS >= 1 on 100 games a leg, and the optimum is the one routing.py finds."""
    random, (game, _, optimum) = np.random.default_rng(seed), LEGS[leg]
    for _ in range(25):
        arrays = random_leg(leg, random)
        found = find_equilibria(game(*arrays))
        assert found.optimum.cost == pytest.approx(optimum(*arrays).cost_s, rel=1e-9, abs=1e-12)
        assert found.price_of_anarchy >= found.price_of_stability >= 1.0
        assert found.pure >= 1


@pytest.mark.parametrize("leg", LEGS)
def test_players_of_a_leg_pay_together_what_the_assignment_costs(leg):
    """Observed, optimum and equilibria are priced by one model."""
    random, (game, cost, _) = np.random.default_rng(9), LEGS[leg]
    for _ in range(100):
        arrays = random_leg(leg, random)
        players = game(*arrays)
        profile = tuple(int(random.integers(count)) for count in players.strategies)
        assert players.costs(profile).sum() == pytest.approx(cost(*arrays, profile), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("leg", LEGS)
def test_best_responses_end_in_an_equilibrium(leg):
    """From every start of 20 games: nobody gains by changing alone, and the cost is within the extremes."""
    random, (game, _, _) = np.random.default_rng(4), LEGS[leg]
    for _ in range(20):
        players = game(*random_leg(leg, random))
        found = find_equilibria(players)
        for start in itertools.product(*map(range, players.strategies)):
            ended = best_response(players, start)
            paid = players.costs(ended.profile)
            for player, count in enumerate(players.strategies):
                for other in range(count):
                    changed = (*ended.profile[:player], other, *ended.profile[player + 1 :])
                    assert players.costs(changed)[player] >= paid[player] * (1 - 1e-9)
            assert found.best.cost - 1e-9 <= ended.cost <= found.worst.cost + 1e-9


def test_a_prompt_that_saves_a_second_costs_the_other_two():
    """The short one takes the fast worker, 2 s and not 3, and the long one is done there after 5, not 3."""
    found = find_equilibria(prefill_game(np.array([[2.0, 3.0], [3.0, 6.0]]), np.zeros(2)))
    assert found == ((6.0, (1, 0)), (7.0, (0, 0)), (7.0, (0, 0)), 1)


def test_requests_crowd_the_fast_worker_until_it_is_as_slow_as_the_other():
    """Both take 2 on the fast one, as the other costs 2.5; apart they would pay 1 + 2.5."""
    found = find_equilibria(decode_game([[0.0, 1.0, 2.0], [0.0, 2.5, 2.5]], np.zeros((2, 2))))
    assert (found.optimum.cost, found.best, found.pure) == (3.5, (4.0, (0, 0)), 1)


def test_a_game_without_a_pure_equilibrium_has_none():
    """Matching pennies: one wants to match and the other not to; best responses go round for ever."""
    pennies = Game((2, 2), lambda p: np.array([float(p[0] != p[1]), float(p[0] == p[1])]))
    assert find_equilibria(pennies) is None
    assert best_response(pennies, (0, 0), most_moves=50) is None


def test_best_response_spends_no_more_moves_than_given():
    """Two drivers on the same road of two: one move ends it."""
    game = congestion_game([[1, 2], [1, 2]], [[(0,), (1,)]] * 2)
    assert best_response(game, (0, 0), most_moves=0) is None
    assert best_response(game, (0, 0), most_moves=1) == (2.0, (1, 0))


def test_nothing_to_pay_is_no_anarchy():
    """0 / 0 is 1 and not NaN; anything over nothing is infinite."""
    free = find_equilibria(decode_game(np.zeros((2, 3)), np.zeros((2, 2))))
    assert (free.price_of_anarchy, free.price_of_stability, free.pure) == (1.0, 1.0, 4)
    stuck = find_equilibria(congestion_game([[0, 0], [0, 1]], [[(0,), (1,)], [(1,)]]))
    assert (stuck.price_of_anarchy, stuck.pure) == (1.0, 1)
    both_pay = Game((2, 2), lambda p: np.array([0.0 if p == (0, 0) else 1.0] * 2))
    assert find_equilibria(both_pay).price_of_anarchy == math.inf


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: congestion_game([[1.0]], [[(1,)]]), r"strategies\[0\]\[0\] = 1: must be in \[0, 1\)"),
        (
            lambda: congestion_game([[1.0]], [[(0,)], [(0,)]]),
            r"len\(delays\[0\]\) = 1: must be >= 2, the users it can get",
        ),
        (
            lambda: find_equilibria(Game((10,) * 6, lambda _: np.zeros(6))),
            rf"profiles = 1000000: must be in \[1, {MOST_PROFILES}\]",
        ),
        (
            lambda: find_equilibria(Game((2, 0), lambda _: np.zeros(2))),
            rf"profiles = 0: must be in \[1, {MOST_PROFILES}\]",
        ),
    ],
)
def test_what_cannot_be_enumerated_is_refused(build, said):
    """The error names what, the value and the bound."""
    with pytest.raises(GameError, match=said):
        build()
