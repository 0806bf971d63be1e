"""What placements of prefixes cost and could cost: brute force, worked numbers, textbook selfish caches."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from dynamo_poa.errors import GameError
from dynamo_poa.games import caching, placing, placing_program
from dynamo_poa.games.caching import Placing, caching_game, optimum, placement_cost, shared_hits
from dynamo_poa.games.equilibria import best_response, find_equilibria
from dynamo_poa.games.placing import knapsack


def paid_s(game, holds):
    """Return the cost, request by request."""
    total = 0.0
    for group, worker in np.ndindex(*game.rate.shape):
        if holds[group][worker]:
            continue
        recompute_s = game.recompute_s[group]
        ways = [recompute_s if np.ndim(recompute_s) == 0 else recompute_s[worker]]
        holders = [other for other in range(len(game.node)) if holds[group][other]]
        if holders:
            ways.append(game.fetch_far_s[group])
        if any(game.node[other] == game.node[worker] for other in holders):
            ways.append(game.fetch_node_s[group])
        total += game.rate[group][worker] * min(ways)
    return total


def placements(game):
    """Yield every placement that fits."""
    groups, workers = game.rate.shape
    columns = [
        [held for held in itertools.product([False, True], repeat=groups) if game.size_blocks @ held <= room]
        for room in game.capacity_blocks
    ]
    assert len(columns) == workers
    for chosen in itertools.product(*columns):
        yield np.array(chosen).T


def random_game(random, groups, workers):
    """Draw a game: sizes that divide one another or not, ties, no demand, no way to fetch all come up."""
    size = 2 ** random.integers(0, 4, groups) if random.random() < 0.6 else random.integers(1, 9, groups)
    recompute_s = size * random.choice([0.25, 1.0])
    if random.random() < 0.5:
        recompute_s = recompute_s[:, None] * random.choice([1.0, 5.0], workers)
    return Placing(
        size_blocks=size,
        capacity_blocks=random.integers(0, 13, workers),
        rate=random.integers(0, 4, (groups, workers)) * random.choice([1.0, 0.37]),
        recompute_s=recompute_s,
        node=random.integers(0, 2, workers) * 7,
        fetch_node_s=size * random.choice([0.0, 0.01, 0.2, np.inf]),
        fetch_far_s=size * random.choice([0.05, 0.4, 2.0, np.inf]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_trying_every_placement_finds(seed):
    """Issue 7: n <= 3 workers, <= 6 groups; exact to HiGHS's 1e-6, and the greedy one's bound holds."""
    random = np.random.default_rng(seed)
    for _ in range(10):
        workers = int(random.integers(1, 4))
        game = random_game(random, int(random.integers(1, 7 if workers < 3 else 5)), workers)
        least_s = min(placement_cost(game, holds) for holds in placements(game))
        best, fast = optimum(game, exact_s=60.0), optimum(game, exact_s=0.0)
        assert best.method == "exact"
        assert best.cost_s == best.bound_s == pytest.approx(least_s, rel=1e-6, abs=1e-9)
        assert best.cost_s == placement_cost(game, best.holds)
        assert (game.size_blocks @ best.holds <= game.capacity_blocks).all()
        assert fast.method == "greedy"
        assert fast.bound_s <= least_s * (1 + 1e-9) + 1e-9
        assert least_s * (1 - 1e-9) - 1e-9 <= fast.cost_s == placement_cost(game, fast.holds)
        assert (game.size_blocks @ fast.holds <= game.capacity_blocks).all()


def nest(game, random):
    """Make groups begin with others before them; requests for one are for those, too."""
    groups = len(game.size_blocks)
    parent = np.array(
        [random.integers(-1, group) if random.random() < 0.8 else -1 for group in range(groups)]
    )
    rate = game.rate.copy()
    for child in reversed(range(groups)):
        if parent[child] >= 0:
            rate[parent[child]] += rate[child]
    return game._replace(rate=rate, parent=parent)


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_of_nested_prefixes_is_what_trying_every_placement_finds(seed):
    """A copy is of use only with what it begins with: of all placements those in which it lies there."""
    random = np.random.default_rng(1000 + seed)
    for _ in range(10):
        workers = int(random.integers(1, 4))
        game = nest(random_game(random, int(random.integers(2, 7 if workers < 3 else 5)), workers), random)
        useful = (
            holds
            for holds in placements(game)
            if (~holds | (game.parent < 0)[:, None] | holds[game.parent]).all()
        )
        least_s = min(paid_s(game, holds) for holds in useful)
        best, fast = optimum(game, exact_s=60.0), optimum(game, exact_s=0.0)
        assert best.method == "exact"
        assert best.cost_s == best.bound_s == pytest.approx(least_s, rel=1e-6, abs=1e-9)
        for found in (best, fast):
            assert found.bound_s <= least_s * (1 + 1e-9) + 1e-9
            assert found.cost_s == pytest.approx(paid_s(game, found.holds), rel=1e-12, abs=1e-12)
            assert (game.size_blocks @ found.holds <= game.capacity_blocks).all()
            assert np.array_equal(found.holds, placing_program.usable(found.holds, game.parent))


def test_what_is_held_without_its_beginning_costs_as_if_it_were_not():
    """Neither its worker nor another one has any use for it."""
    rate, free = [[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]], [0.0] * 3
    game = Placing([1, 2, 4], [8, 8], rate, [1.0, 2.0, 4.0], [0, 0], free, free, [-1, 0, 1])
    end = np.array([[True, False], [False, True], [True, False]])
    assert placement_cost(game, end) == 2 * (2 * 2.0) + 2 * (1 * 4.0)
    assert shared_hits(game, end) == 0.5
    assert optimum(game).cost_s == 0.0


@pytest.mark.parametrize("states", [placing._MOST_STATES, 40])
@pytest.mark.parametrize("seed", range(10))
def test_a_knapsack_of_nested_items_is_filled_best(seed, states, monkeypatch):
    """Against trying all subsets of 9; with few states it fits and takes no child without its parent."""
    monkeypatch.setattr(placing, "_MOST_STATES", states)
    random = np.random.default_rng(seed)
    size, gain = random.integers(1, 6, 9), random.integers(0, 10, 9) * 1.0
    parent = np.array([random.integers(-1, item) if item else -1 for item in range(9)])
    capacity = int(random.integers(1, 30))
    subsets = np.array(list(itertools.product([False, True], repeat=9)))
    right = (~subsets | (parent < 0) | subsets[:, parent]).all(axis=1) & (subsets @ size <= capacity)
    taken = placing.nested_knapsack(size, gain, capacity, placing._Forest(parent))
    chosen = np.isin(np.arange(9), taken)
    assert len(taken) == chosen.sum()
    assert right[(subsets == chosen).all(axis=1)].all()
    if states > 40:
        assert gain[taken].sum() == (subsets @ gain)[right].max()
    else:
        assert gain[taken].sum() >= (subsets @ gain)[right].max() / 2


@pytest.mark.parametrize("seed", range(2))
def test_three_workers_and_six_groups_are_tried_in_full(seed):
    """The largest case of issue 7, with capacities that leave a few thousand placements each."""
    random = np.random.default_rng(100 + seed)
    game = random_game(random, 6, 3)._replace(size_blocks=2 ** random.integers(1, 4, 6))
    game = game._replace(capacity_blocks=np.array([6, 8, 9]))
    least_s = min(placement_cost(game, holds) for holds in placements(game))
    assert optimum(game, exact_s=60.0).cost_s == pytest.approx(least_s, rel=1e-6, abs=1e-9)


@st.composite
def games(draw, most_groups=6, most_workers=3):
    """Games with a random placement, which need not fit."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    game = random_game(random, draw(st.integers(1, most_groups)), draw(st.integers(1, most_workers)))
    return game, random.random(game.rate.shape) < 0.4, random


@given(games())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_placement_costs_what_its_requests_pay(drawn):
    """theory.md, Γ_KV: nothing where it is held, else the cheapest of what can be done."""
    game, holds, _ = drawn
    assert placement_cost(game, holds) == pytest.approx(paid_s(game, holds), rel=1e-12, abs=1e-12)


@given(games())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_more_room_never_makes_the_optimum_dearer(drawn):
    """It can stay unused."""
    game, _, random = drawn
    larger = game._replace(capacity_blocks=game.capacity_blocks + random.integers(0, 5, game.rate.shape[1]))
    assert optimum(larger, exact_s=60.0).cost_s <= optimum(game, exact_s=60.0).cost_s * (1 + 2e-6) + 1e-9


@given(games(most_groups=12, most_workers=5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_placement_that_fits_undercuts_the_bound(drawn):
    """PoA-hat_KV >= 1 by construction, also where only a bound is known."""
    game, holds, _ = drawn
    for worker, room in enumerate(game.capacity_blocks):
        while game.size_blocks @ holds[:, worker] > room:
            holds[np.flatnonzero(holds[:, worker])[0], worker] = False
    for exact_s in (60.0, 0.0):
        found = optimum(game, exact_s=exact_s)
        assert found.bound_s <= found.cost_s
        assert placement_cost(game, holds) >= found.bound_s * (1 - 1e-6) - 1e-9


@given(games(most_groups=5), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_greedy_saves_at_least_half_of_what_the_best_does(drawn, divisible):
    """Fisher, Nemhauser and Wolsey 1978: 1/2 with the best knapsack each; 1/3 where sizes do not divide."""
    game, _, random = drawn
    if divisible:
        game = game._replace(size_blocks=2 ** random.integers(0, 4, len(game.size_blocks)))
    nothing_s = placement_cost(game, np.zeros(game.rate.shape, dtype=bool))
    savings = caching._Checked(game).savings()
    best_saved = nothing_s - optimum(game, exact_s=60.0).cost_s
    share = 1 / 2 if divisible else 1 / 3
    assert placing_program.saved(savings, placing.greedy(savings)) >= share * best_saved * (1 - 1e-6) - 1e-9


@given(games(most_groups=5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_greedy_saves_at_least_half_where_prefixes_lie_in_one_another(drawn):
    """Each choice is the best whatever the sizes, so 1/2 without conditions on them."""
    game, _, random = drawn
    game = nest(game, random)
    savings = caching._Checked(game).savings()
    most = placement_cost(game, np.zeros(game.rate.shape, dtype=bool)) - optimum(game, exact_s=60.0).cost_s
    assert placing_program.saved(savings, placing.greedy(savings)) >= most / 2 * (1 - 1e-6) - 1e-9


def test_a_search_that_found_little_is_no_worse_than_where_it_began(monkeypatch):
    """Given up at a poor placement: what the relaxation holds whole, improved, is there as well."""
    game = nest(drawn_game(1, 40, 8, 4, 0.1), np.random.default_rng(1))
    loose = optimum(game, exact_s=0.0)
    poor = placing_program.Searched(np.zeros(game.rate.shape, dtype=bool), loose.bound_s)
    monkeypatch.setattr(placing, "search", lambda *given: poor)
    found = optimum(game, exact_s=60.0)
    savings = caching._Checked(game).savings()
    assert (found.method, found.cost_s, found.bound_s) == ("greedy", loose.cost_s, loose.bound_s)
    assert savings.most - placing_program.saved(savings, placing.greedy(savings)) > found.cost_s * 1.001


def test_greedy_can_save_little_more_than_half():
    """1 - 1/e is for a limit on the number of choices, not for a capacity at every worker.

    Both groups are asked for at worker 0, and only the second can be fetched, for nothing. It saves a little
    more and worker 0 takes it; worker 1 has no use for the other, and together they would save both.
    """
    game = Placing([1, 1], [1, 1], [[1.0, 0.0], [1.01, 0.0]], [1.0, 1.0], [0, 0], [np.inf, 0], [np.inf, 0])
    savings = caching._Checked(game).savings()
    assert placing.greedy(savings).tolist() == [[False, False], [True, False]]
    best = optimum(game)
    assert (best.holds.tolist(), best.cost_s) == ([[True, False], [False, True]], 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_knapsack_of_sizes_that_divide_one_another_is_filled_best(seed):
    """Against trying all subsets of 8; with sizes that do not divide, at least half of it."""
    random = np.random.default_rng(seed)
    for base in ([1, 2, 4, 8], [3, 6, 24], [2, 3, 5, 7]):
        size, gain = random.choice(base, 8), random.integers(0, 10, 8) * 1.0
        capacity = int(random.integers(0, 30))
        subsets = np.array(list(itertools.product([0, 1], repeat=8)))
        most = (subsets @ gain)[subsets @ size <= capacity].max()
        taken = knapsack(size, gain, capacity)
        assert len(set(taken)) == len(taken)
        assert size[taken].sum() <= capacity
        assert gain[taken].sum() >= most / 2
        if base != [2, 3, 5, 7]:
            assert gain[taken].sum() == most


def drawn_game(seed, groups, workers, nodes, room_frac):
    """Draw a game of many groups: Zipf demand, sizes of powers of two, room for a part of all at each."""
    random = np.random.default_rng(seed)
    size = 2 ** random.integers(1, 8, groups)
    spread = random.dirichlet(np.full(workers, 0.5), groups)
    return Placing(
        size_blocks=size,
        capacity_blocks=np.full(workers, int(room_frac * size.sum())),
        rate=random.poisson(2000 / np.arange(1, groups + 1)[:, None] * spread) / 60.0,
        recompute_s=size * 1.6e-3,
        node=np.arange(workers) % nodes,
        fetch_node_s=size * 1.1e-5,
        fetch_far_s=size * 1.0e-4,
    )


def least_by_cells(game):
    """Return the bound of the program in which every cell is whole, without anything that makes it fast."""
    savings = caching._Checked(game).savings()
    groups, workers = savings.own.shape
    nodes = savings.same_node.shape[1]
    inside = placing_program.members(savings.node, nodes)
    rows = [
        [sparse.kron(savings.size[None, :], sparse.eye_array(workers)), None, None],
        [sparse.kron(sparse.eye_array(groups), -inside.T), sparse.eye_array(groups * nodes), None],
        [None, sparse.kron(sparse.eye_array(groups), -np.ones((1, nodes))), sparse.eye_array(groups)],
    ]
    limits = np.concatenate([savings.capacity, np.zeros(groups * (nodes + 1))])
    gains = np.concatenate([savings.own.ravel(), savings.same_node.ravel(), savings.anyone])
    found = milp(
        -gains,
        integrality=np.repeat([1, 0], [groups * workers, groups * (nodes + 1)]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(sparse.block_array(rows), -np.inf, limits),
        options={"mip_rel_gap": 1e-6, "time_limit": 20.0},
    )
    return savings.most + found.fun, savings.most + found.mip_dual_bound


@pytest.mark.parametrize(("nodes", "room_frac"), [(1, 0.08), (4, 0.08), (8, 0.08), (4, 0.5)])
def test_deciding_in_stages_finds_what_deciding_at_once_does(nodes, room_frac):
    """320 cells: within the 0.1 % that is claimed, on one node, on four, on one a worker."""
    game = drawn_game(nodes, 40, 8, nodes, room_frac)
    found, (best_s, bound_s) = optimum(game, exact_s=60.0), least_by_cells(game)
    assert found.method == "exact"
    assert bound_s * (1 - 1e-6) <= found.cost_s <= best_s * (1 + placing.GAP_FRAC)


@pytest.mark.parametrize(("look_s", "method"), [(10.0, "exact"), (40.0, "greedy"), (100.0, "greedy")])
def test_a_search_that_runs_out_of_time_returns_what_it_has_and_a_bound(look_s, method):
    """With 100 s and so long a look at the clock: all stages, two of them, none."""
    game = drawn_game(0, 40, 8, 4, 0.2)
    ticks = itertools.count()
    found = optimum(game, exact_s=100.0, now_s=lambda: next(ticks) * look_s)
    best_s = optimum(game, exact_s=60.0).cost_s
    assert found.method == method
    assert (found.bound_s == found.cost_s) is (method == "exact")
    assert found.bound_s * (1 - placing.GAP_FRAC) <= best_s <= found.cost_s * (1 + placing.GAP_FRAC)
    assert (game.size_blocks @ found.holds <= game.capacity_blocks).all()


def test_a_bound_that_takes_too_long_is_none():
    """No placement costs less than nothing: nothing is proven of the greedy one that is left."""
    game = random_game(np.random.default_rng(3), 4, 2)
    savings = caching._Checked(game).savings()
    whole, given_up = placing_program.relaxed(savings), placing_program.relaxed(savings, 0.0)
    assert whole.least > 0.0
    assert (given_up.holds.any(), given_up.least) == (False, 0.0)


def test_a_game_too_large_to_search_is_placed_greedily_with_a_bound():
    """160 groups on 130 workers are more cells than MOST_CELLS; the relaxation bounds them."""
    game = drawn_game(2, 160, 130, 10, 0.015)
    assert game.rate.size > placing.MOST_CELLS
    found = optimum(game)
    assert found.method == "greedy"
    assert 0 < found.bound_s < found.cost_s == placement_cost(game, found.holds)
    assert (game.size_blocks @ found.holds <= game.capacity_blocks).all()


FOUR = Placing(
    size_blocks=[2, 1],
    capacity_blocks=[2, 1, 1, 2],
    rate=[[1.0, 2.0, 4.0, 0.0], [0.5, 0.0, 0.0, 8.0]],
    recompute_s=[1.0, 0.5],
    node=[0, 0, 1, 1],
    fetch_node_s=[0.125, 0.25],
    fetch_far_s=[0.25, 1.0],
)


def test_a_request_fetches_from_its_node_from_anywhere_or_computes():
    """Group 0: 2 x 1/8 beside its holder, 4 x 1/4 far. Group 1: 1/2 x 1/4 beside, 8 x 1/2 computed."""
    holds = [[True, False, False, False], [False, True, False, False]]
    assert placement_cost(FOUR, holds) == 0.25 + 1.0 + 0.125 + 4.0
    nothing = np.zeros((2, 4), dtype=bool)
    assert placement_cost(FOUR, nothing) == 7.0 + 4.25


def test_the_optimum_of_four_workers_by_hand():
    """Worker 3 takes group 1, the worst to lose; group 0 then fits worker 0 only, whose 1 is beside it."""
    found = optimum(FOUR)
    assert found.holds[0].tolist() == [True, False, False, False]
    assert found.holds[1].tolist() in (
        [False, True, False, True],
        [False, True, True, True],
    )  # 2 asks for none
    assert (found.cost_s, found.method) == (0.25 + 1.0 + 0.125, "exact")


def test_hits_by_anothers_copy_count_only_where_fetching_is_cheaper():
    """Group 0, 2 blocks, on worker 0: 1 own hit, 6 fetched. Group 1, 1 block, on worker 1: 0.5 fetched.

    8 would rather compute.
    """
    holds = [[True, False, False, False], [False, True, False, False]]
    assert shared_hits(FOUR, holds) == (2 * 6 + 0.5) / (2 * 7 + 0.5)
    assert shared_hits(FOUR, np.ones((2, 4), dtype=bool)) == 0.0
    assert shared_hits(FOUR, np.zeros((2, 4), dtype=bool)) is None


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_asked_for_or_nobody_to_ask_costs_nothing(shape):
    """No groups or no workers: an empty placement that is the optimum."""
    groups, workers = shape
    ones, nodes = [1] * groups, [0] * workers
    game = Placing(ones, [1] * workers, np.ones(shape), ones, nodes, ones, ones)
    found = optimum(game)
    assert (found.cost_s, found.bound_s, found.holds.shape, found.method) == (0.0, 0.0, shape, "exact")


def test_what_nobody_wants_is_the_optimum_too():
    """Every rate zero: 0 / 0 must not make a scale."""
    assert optimum(FOUR._replace(rate=np.zeros((2, 4)))).cost_s == 0.0


def apart(count):
    """Return the distances of a complete graph."""
    return 1.0 - np.eye(count)


def in_line(count):
    """Return the distances on a line."""
    return np.abs(np.subtract.outer(np.arange(count), np.arange(count))).astype(float)


@pytest.mark.parametrize("price_s", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_selfish_caches_that_are_all_equally_far_apart_lose_nothing(count, price_s):
    """Chun et al. 2004: PoA 1 on a complete graph. Below the distance all hold, above it one does."""
    found = find_equilibria(caching_game(apart(count), [price_s] * count, [1.0] * count, math.inf))
    assert found.price_of_anarchy == found.price_of_stability == 1.0
    assert found.optimum.cost == pytest.approx(min(count * price_s, price_s + count - 1), rel=1e-12)
    assert found.pure == {0.5: 1, 1.0: 2**count - 1, 3.0: count}[price_s]


def test_on_a_complete_graph_nobody_holds_what_is_cheaper_to_compute_for_each_alone():
    """PoA 1 needs that somebody must hold: four who compute at 2 and hold at 3 pay 8; one copy costs 6."""
    found = find_equilibria(caching_game(apart(4), [3.0] * 4, [1.0] * 4, 2.0))
    assert (found.worst, found.pure) == ((8.0, (0, 0, 0, 0)), 1)
    assert found.optimum.cost == 6.0


def least_on_a_line(count, price_s):
    """Return the least cost of caches on a line: each holder serves a stretch, from its middle."""
    least = [0.0]
    for length in range(1, count + 1):
        least.append(min(least[length - own] + price_s + own**2 // 4 for own in range(1, length + 1)))
    return least[count]


@pytest.mark.parametrize(("count", "ratio"), [(2, 1.0), (4, 9 / 7), (9, 44 / 26), (12, 77 / 40)])
def test_selfish_caches_on_a_line_by_enumeration(count, ratio):
    """At a price of n - 1 one copy at an end is stable: n - 1 + n (n - 1) / 2, the worst there is."""
    price_s = count - 1.0
    found = find_equilibria(caching_game(in_line(count), [price_s] * count, [1.0] * count, math.inf))
    assert found.worst.cost == price_s + count * (count - 1) / 2
    assert found.optimum.cost == least_on_a_line(count, price_s)
    assert found.price_of_anarchy == pytest.approx(ratio, rel=1e-12)


def test_what_selfish_caches_lose_on_a_line_grows_with_the_root_of_its_length():
    """Chun et al. 2004; paper: O(sqrt n). Four times as long loses twice as much, sqrt(n) / 2 in the end."""
    ratios = []
    for count in (16, 64, 256, 1024):
        price_s = count - 1.0
        if count <= 256:
            game = caching_game(in_line(count), [price_s] * count, [1.0] * count, math.inf)
            end = (1,) + (0,) * (count - 1)
            assert best_response(game, end) == (price_s + count * (count - 1) / 2, end)
        ratios.append((price_s + count * (count - 1) / 2) / least_on_a_line(count, price_s))
    assert [round(after / before, 2) for before, after in itertools.pairwise(ratios)] == [1.88, 1.97, 1.99]
    assert ratios[-1] / math.sqrt(1024) == pytest.approx(0.5, abs=0.01)


def test_a_cache_more_makes_selfish_caches_pay_more():
    """Braess-like: once X holds, A drops its copy and relies on X, from which two others are further away."""
    distance_s = [[0, 2, 1, 1], [2, 0, 3, 3], [1, 3, 0, 2], [1, 3, 2, 0]]  # A, X and two more

    def outcome(price_of_x_s):
        prices_s = [3.0, price_of_x_s, 100.0, 100.0]
        return find_equilibria(caching_game(distance_s, prices_s, [1.0] * 4, 10.0))

    without, with_cache = outcome(100.0), outcome(1.0)
    assert (without.worst, without.pure, without.optimum.cost) == ((7.0, (1, 0, 0, 0)), 1, 7.0)
    assert (with_cache.worst, with_cache.pure) == ((9.0, (0, 1, 0, 0)), 1)
    assert with_cache.optimum == (6.0, (1, 1, 0, 0))


@pytest.mark.parametrize("profile", list(itertools.product([0, 1], repeat=3)))
def test_selfish_caches_pay_together_what_the_placement_costs_and_their_prices(profile):
    """One group, two nodes: both models price fetching and computing alike."""
    game = Placing([1], [1, 1, 1], [[1.0, 2.0, 4.0]], [2.0], [0, 0, 1], [0.25], [0.75])
    distance_s = [[0, 0.25, 0.75], [0.25, 0, 0.75], [0.75, 0.75, 0]]
    costs = caching_game(distance_s, [0.5] * 3, [1.0, 2.0, 4.0], 2.0).costs(profile)
    assert costs.sum() - 0.5 * sum(profile) == placement_cost(game, np.array([profile], dtype=bool))


def test_a_worker_that_asks_for_nothing_pays_nothing_even_if_nobody_holds():
    """0 requests at infinite cost are 0 and not NaN."""
    assert caching_game(apart(2), [1.0, 1.0], [0.0, 1.0], math.inf).costs((0, 0)).tolist() == [0.0, math.inf]


NAN = math.nan


@pytest.mark.parametrize(
    ("changed", "key", "value", "bound"),
    [
        ({"rate": [1.0, 2.0]}, "rate.ndim", 1, "2"),
        ({"rate": [[1.0, -1.0, 0, 0]] * 2}, "rate[0, 1]", -1.0, ">= 0 and finite"),
        ({"rate": [[1.0], [1.0, 2.0]]}, "rate", "ragged", "rows of one length"),
        ({"size_blocks": [0, 1]}, "size_blocks[0]", 0.0, ">= 1 and finite"),
        ({"size_blocks": [1.0, 1.5]}, "size_blocks.dtype", "float64", "of a kind in 'iu'"),
        ({"size_blocks": [1]}, "size_blocks.shape", (1,), "(2,), as rate has it"),
        ({"capacity_blocks": [1, 1, 1, -1]}, "capacity_blocks[3]", -1.0, ">= 0 and finite"),
        ({"recompute_s": [1.0, math.inf]}, "recompute_s[1]", math.inf, ">= 0 and finite"),
        ({"recompute_s": np.ones((4, 2))}, "recompute_s.shape", (4, 2), "(2, 4), as rate has it"),
        ({"node": [0, 0, 1]}, "node.shape", (3,), "(4,), as rate has it"),
        ({"fetch_node_s": [-1.0, 0.0]}, "fetch_node_s[0]", -1.0, ">= 0"),
        ({"parent": [-1, 1]}, "parent[1]", 1, "< 1, a row before"),
        ({"parent": [-1, -2]}, "parent[1]", -2.0, ">= -1 and finite"),
        ({"fetch_far_s": ["a", "b"]}, "fetch_far_s.dtype", "<U1", "of a kind in 'iuf'"),
    ],
)
def test_what_is_no_game_is_refused_with_the_place(changed, key, value, bound):
    """Bad input is refused, never repaired; the error has key, value and bound."""
    with pytest.raises(GameError) as refused:
        optimum(FOUR._replace(**changed))
    assert (refused.value.key, refused.value.value, refused.value.bound) == (key, value, bound)


def test_a_time_that_is_no_number_and_a_placement_of_another_shape_are_refused():
    """NaN compares false with everything; numbers are no placement."""
    with pytest.raises(GameError, match=r"fetch_far_s\[0\] = nan: must be >= 0"):
        placement_cost(FOUR._replace(fetch_far_s=[NAN, 1.0]), np.ones((2, 4), dtype=bool))
    with pytest.raises(GameError, match=r"holds.shape = \(2, 3\): must be \(2, 4\), as rate has it"):
        placement_cost(FOUR, np.ones((2, 3), dtype=bool))
    with pytest.raises(GameError, match=r"holds.dtype = 'int64': must be of a kind in 'b'"):
        shared_hits(FOUR, np.ones((2, 4), dtype=np.int64))
