"""The caching game on what caches hold and routers ask for: worked numbers, and when there is no figure."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa import placement
from dynamo_poa.cache_state import CacheSnapshot
from dynamo_poa.config import CachingConfig
from dynamo_poa.copies import Copies, copies_of
from dynamo_poa.demand_groups import PrefixDemand, PrefixGroup
from dynamo_poa.games.caching import optimum
from dynamo_poa.placement import Placements, instance, nodes_of
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import Chosen, Tier

W1, W2, W3 = (WorkerKey(2**64 - number, 0) for number in (1, 2, 3))
A, B, C = 2**64 - 11, 22, 33  # chains
TOKEN_S = 1e-4
BLOCKS = 16  # of a group: 256 tokens
RECOMPUTE_S, NEAR_S, FAR_S = (256 * token_s for token_s in (TOKEN_S, 0.7e-6, 6.5e-6))


def rank(key, *chains, total=BLOCKS, padded=True, role=Role.PREFILL, host="h", lower=(), **changed):
    """A rank whose cache is full of what nobody asks for, beside the given chains; each has its 16 blocks."""
    card = WorkerCard(worker_id=key.worker_id, role=role, kv_block_size=16, total_kv_blocks=total, host=host)
    own = range(1000 * (key.worker_id % 97), 1000 * (key.worker_id % 97) + total - len(chains))
    cache = CacheSnapshot(
        key=key,
        chains=np.array([*chains, *(own if padded else ())], dtype=np.uint64),
        lower={Tier.HOST_PINNED: np.array(lower, dtype=np.uint64)} if lower else {},
        total_blocks=total,
        resident_blocks=changed.pop("resident", total if padded else len(chains)),
        approximate=changed.pop("approximate", False),
        evicted=changed.pop("evicted", 0),
        reloaded=changed.pop("reloaded", 0),
    )
    assert not changed
    return card, cache


def group(chain, blocks=BLOCKS, parent=0, **by_number):
    """A group with its requests a second at workers, such as `w1=2.0`."""
    keys = {"w1": W1, "w2": W2, "w3": W3}
    return PrefixGroup(chain, blocks, {keys[name]: rate for name, rate in by_number.items()}, parent)


def speeds(*keys, token_s=TOKEN_S):
    curve = Curve(prefill_base_s=1.0, prefill_token_s=token_s)
    return {key: WorkerLatency(key=key, role=Role.PREFILL, curve=curve) for key in keys}


class World(SimpleNamespace):
    """What is looked through: two workers that both hold A, while B is asked for half as often."""

    def __init__(self, **changed):
        super().__init__(
            ranks=[rank(W1, A), rank(W2, A)],
            groups=[group(A, w1=2.0, w2=2.0), group(B, w1=1.0, w2=1.0)],
            speeds=speeds(W1, W2),
            asked=[],
        )
        self.__dict__.update(changed)

    def placements(self, **config):
        return Placements(
            CachingConfig(**config),
            caches=lambda: self.ranks,
            groups=lambda at_s, most: self.asked.append((at_s, most)) or self.groups,
            latencies=lambda: self.speeds,
        )

    def estimate(self, at_s=100.0, **config):
        return self.placements(**config).note_caches(at_s)()


@pytest.mark.parametrize(
    ("config", "best_s"),
    [
        ({}, 3 * NEAR_S),  # one holds A, the other B, and each fetches what the other has
        ({"topology": "one"}, 3 * NEAR_S),
        ({"topology": "each"}, 3 * FAR_S),
        ({"topology": "each", "transfer": "node"}, 2 * RECOMPUTE_S),
        ({"transfer": "none"}, 2 * RECOMPUTE_S),  # with nobody to fetch from, two copies are best
    ],
)
def test_the_observed_placement_is_priced_against_the_best_one(config, best_s):
    """Both hold A, so B is computed anew twice a second; theory.md: transfers within the node or beyond."""
    found = World().estimate(**config)
    assert found.observed_s == pytest.approx(2 * RECOMPUTE_S)
    assert found.optimal_s == found.bound_s == pytest.approx(best_s)
    assert found.poa_hat == pytest.approx(2 * RECOMPUTE_S / best_s)
    assert (found.method, found.reason, found.groups, found.workers) == ("exact", "", 2, 2)
    assert found.shared_hits_frac == 0.0
    assert found.uncertain is False


def test_workers_on_two_hosts_fetch_from_afar():
    """Where the configuration says `host`, the addresses decide who shares a node."""
    world = World(ranks=[rank(W1, A, host="a"), rank(W2, A, host="b")])
    assert world.estimate().optimal_s == pytest.approx(3 * FAR_S)


CHAIN = (101, 102, 104, 108)  # hashes of a chain's first 1, 2, 4 and 8 blocks


def nested(**rates):
    """Groups at every depth of a chain, the deepest with these rates, the others with a tenth of them."""
    tenth = {name: rate / 10 for name, rate in rates.items()}
    return [
        group(chain, 1 << index, CHAIN[index - 1] if index else 0, **(rates if index == 3 else tenth))
        for index, chain in enumerate(CHAIN)
    ]


def test_a_block_counts_once_however_many_groups_begin_with_it():
    """A chain of 8 blocks with groups at 4, 2 and 1 fills a cache of 8, not of 15."""
    ranks = [rank(W1, *CHAIN, total=8), rank(W2, A, total=8)]
    game, held = instance(
        ranks, [*nested(w1=10.0), group(A, 8, w2=1.0)], speeds(W1, W2), CachingConfig(transfer="none")
    )
    assert game.size_blocks.tolist() == [1, 1, 2, 4, 8]
    assert game.parent.tolist() == [-1, 0, 1, 2, -1]
    assert game.capacity_blocks.tolist() == [8, 8]
    assert game.rate[:, 0].tolist() == [13.0, 12.0, 11.0, 10.0, 0.0]
    assert game.recompute_s[:, 0] == pytest.approx(np.array([1, 1, 2, 4, 8]) * 16 * TOKEN_S)
    assert held.tolist() == [[True, False]] * 4 + [[False, True]]


def least_s(rates, rooms):
    """Return the least that is computed a second, by trying all depths to which caches can hold chains.

    Args:  rates: of each chain, by the depth of a group, by worker.
    """
    total = 0.0
    for worker, room in enumerate(rooms):
        depths = itertools.product(*((0, *groups) for groups in rates))
        total += min(
            sum(
                by_worker[worker] * max(blocks - held, 0) * 16 * TOKEN_S
                for groups, held in zip(rates, depth, strict=True)
                for blocks, by_worker in groups.items()
            )
            for depth in depths
            if sum(depth) <= room
        )
    return total


@pytest.mark.parametrize(
    ("deep", "shallow", "other", "poa_hat"),
    [
        (0.2, 1.0, 2.0, 16 / (1.6 + 7)),  # A instead of the chain; with room for 4, 2 and 1 beside it, 10
        (2.0, 0.2, 2.0, 1.0),  # 17.4 against 16: the chain is where it belongs
        (0.0, 4.0, 1.0, 1.0),  # 28 against 8
    ],
)
def test_the_best_placement_of_nested_prefixes_is_what_trying_all_depths_finds(deep, shallow, other, poa_hat):
    """A chain of 8 blocks with groups at 4, 2 and 1 fills a cache of 8, and A would, too; tried in full."""
    chain = [
        group(chain, 1 << index, CHAIN[index - 1] if index else 0, w1=deep if index == 3 else shallow)
        for index, chain in enumerate(CHAIN)
    ]
    groups = [*chain, group(A, 8, w1=other)]
    world = World(ranks=[rank(W1, *CHAIN, total=8), rank(W2, total=8)], groups=groups)
    found = world.estimate(transfer="none")
    rates = [{1: (shallow, 0), 2: (shallow, 0), 4: (shallow, 0), 8: (deep, 0)}, {8: (other, 0)}]
    assert found.observed_s == pytest.approx(8 * other * 16 * TOKEN_S)
    assert found.optimal_s == pytest.approx(least_s(rates, [8, 0]))
    assert (found.poa_hat, found.method) == (pytest.approx(poa_hat), "exact")


@pytest.mark.parametrize("seed", range(8))
def test_the_best_placement_of_two_chains_is_what_trying_all_depths_finds(seed):
    """Two chains, groups at all depths, caches full of their beginnings; nothing is fetched."""
    random = np.random.default_rng(seed)
    other = (201, 202, 204, 208)
    ranks, rooms, rates, groups = [], [], [], []
    for key in (W1, W2):
        depths = random.integers(0, 5, 2)
        chains = [*CHAIN[: depths[0]], *other[: depths[1]]]
        rooms.append(sum(1 << depth - 1 for depth in depths.tolist() if depth))
        ranks.append(rank(key, *chains, total=max(rooms[-1], 1)))
    for chains in (CHAIN, other):
        rates.append({1 << index: random.integers(0, 4, 2) * 1.0 for index in range(4)})
        groups += [
            group(chain, 1 << index, chains[index - 1] if index else 0, w1=rate[0], w2=rate[1])
            for index, (chain, rate) in enumerate(zip(chains, rates[-1].values(), strict=True))
        ]
    game, held = instance(ranks, groups, speeds(W1, W2), CachingConfig(transfer="none"))
    assert game.capacity_blocks.tolist() == rooms
    assert optimum(game).cost_s == pytest.approx(least_s(rates, rooms))
    assert (game.size_blocks @ held == rooms).all()


def test_a_chain_that_lies_where_it_is_asked_for_is_best():
    """The review's case: 15 blocks counted in a cache of 8 made room that was not there."""
    groups = [*nested(w1=2.0), group(A, 4, w1=1.0), group(B, 2, w1=1.0), group(C, 1, w1=1.0)]
    world = World(ranks=[rank(W1, *CHAIN, total=8), rank(W2, total=8)], groups=groups)
    found = world.estimate(transfer="none")
    assert found.observed_s == pytest.approx(7 * 16 * TOKEN_S)
    assert (found.poa_hat, found.method) == (pytest.approx(1.0), "exact")


def test_what_two_groups_share_counts_once_though_nobody_asks_for_it_alone():
    """Two pairs of 8 blocks share 4, as requests tell; a cache that holds both holds 12 blocks and not 16."""
    demand = PrefixDemand(60.0, 16)
    begins = [prefix_hashes([1, 2, 3, 4, *range(start, start + 4)]) for start in (10, 20)]
    for number, (prefix, key) in enumerate(itertools.product(begins, (W1, W2))):
        demand.add(Chosen("r", Role.PREFILL, 0.0, 0.0, *key, 128, 1, 1, (), 0, prefix), float(number))
    ranks = [rank(W1, *begins[0], begins[1][3], total=12), rank(W2, total=12)]
    game, _ = instance(ranks, demand.groups(8.0, 10), speeds(W1, W2), CachingConfig())
    assert game.size_blocks.tolist() == [4, 4, 4]
    assert game.capacity_blocks.tolist() == [12, 0]
    assert game.rate.tolist() == [[0.25, 0.25], [0.125, 0.125], [0.125, 0.125]]


def test_what_lies_without_its_beginning_is_of_no_use():
    """Events were missed: the 8 blocks' end is there, their first 2 are not."""
    ranks = [rank(W1, CHAIN[0], CHAIN[2], CHAIN[3], total=20), rank(W2, total=20)]
    game, held = instance(ranks, nested(w1=1.0), speeds(W1, W2), CachingConfig())
    assert held[:, 0].tolist() == [True, False, False, False]
    assert game.capacity_blocks.tolist() == [1, 0]


def test_groups_that_begin_with_one_that_nobody_here_asks_for_keep_it():
    """Its own requests went to a worker that has left, theirs did not."""
    groups = [group(A, 4, w3=5.0), group(B, 8, A, w1=1.0), group(C, 8, A, w2=2.0), group(9, 8, A, w3=1.0)]
    game, _ = instance([rank(W1, A, B), rank(W2, A)], groups, speeds(W1, W2), CachingConfig())
    assert game.size_blocks.tolist() == [4, 4, 4]
    assert game.parent.tolist() == [-1, 0, 0]
    assert game.rate.tolist() == [[1.0, 2.0], [1.0, 0.0], [0.0, 2.0]]
    assert game.capacity_blocks.tolist() == [8, 4]


def test_a_look_at_which_nobody_holds_anything_counts_in_full():
    """All is computed anew, the dearest there is. Only where no look of the window found any, no figure."""
    world = World(ranks=[rank(W1), rank(W2)])
    placements = world.placements()
    assert placements.note_caches(95.0)().reason == placement.NONE_HELD
    world.ranks = [rank(W1, A), rank(W2, B)]
    found = placements.note_caches(100.0)()
    assert found.observed_s == pytest.approx((6 * RECOMPUTE_S + 3 * NEAR_S) / 2)
    assert found.optimal_s == pytest.approx((6 * RECOMPUTE_S + 3 * NEAR_S) / 2)  # full of what is given
    world.ranks = [rank(W1, padded=False, resident=1), rank(W2, padded=False, resident=1)]
    evicted = placements.note_caches(105.0)()
    assert (evicted.reason, evicted.groups) == ("", 2)
    assert evicted.observed_s == pytest.approx((12 * RECOMPUTE_S + 3 * NEAR_S) / 3)


def test_costs_are_averaged_over_the_looks_of_the_window():
    """As PoA-hat of routing: the sum observed over the sum at best; a look older than the window is gone."""
    world = World()
    placements = world.placements(demand_window_s=60.0)
    placements.note_caches(100.0)()
    world.ranks = [rank(W1, A), rank(W2, B)]
    both = placements.note_caches(105.0)()
    assert both.observed_s == pytest.approx((2 * RECOMPUTE_S + 3 * NEAR_S) / 2)
    assert both.poa_hat == pytest.approx((2 * RECOMPUTE_S + 3 * NEAR_S) / (6 * NEAR_S))
    assert both.shared_hits_frac == pytest.approx((0.0 + 3 / 6) / 2)
    later = placements.note_caches(161.0)()
    assert later.poa_hat == pytest.approx(1.0)
    assert later.shared_hits_frac == pytest.approx(3 / 6)
    assert world.asked == [(100.0, 200), (105.0, 200), (161.0, 200)]


def test_what_is_noted_is_of_its_instant():
    """Priced later and in a thread: what happens meanwhile is not in it."""
    world = World()
    price = world.placements().note_caches(100.0)
    world.ranks, world.groups, world.speeds = [], [], {}
    assert price().observed_s == pytest.approx(2 * RECOMPUTE_S)


def test_the_best_placement_may_use_what_groups_hold_and_what_is_empty():
    """What else lies there is given; of a cache that is known approximately nothing counts as empty.

    And never more than the cache has, whatever seems to lie there.
    """
    w4, w5 = WorkerKey(4, 0), WorkerKey(5, 0)
    ranks = [
        rank(W1, A, total=40),
        rank(W2, A, total=60, padded=False, resident=20),
        rank(W3, A, total=40, padded=False, approximate=True),
        rank(w4, total=40, padded=False, resident=10),  # of blocks whose beginning is not known
        rank(w5, A, B, total=20),
    ]
    groups = [group(A, w1=1.0), group(B, w2=1.0)]
    game, held = instance(ranks, groups, speeds(W1, W2, W3, w4, w5), CachingConfig())
    assert game.capacity_blocks.tolist() == [16, 16 + 40, 16, 30, 20]
    assert held.tolist() == [[True, True, True, False, True], [False, False, False, False, True]]


def test_a_worker_computes_at_its_own_speed_and_one_without_a_curve_as_the_others():
    """A straggler's misses cost more."""
    ranks = [rank(W1, A), rank(W2), rank(W3)]
    known = {**speeds(W1), **speeds(W2, token_s=3 * TOKEN_S)}
    game, _ = instance(ranks, [group(A, w1=1.0), group(B, w2=1.0)], known, CachingConfig())
    assert game.recompute_s == pytest.approx(np.array([[1.0, 3.0, 2.0]] * 2) * RECOMPUTE_S)


def test_a_copy_in_a_slower_tier_of_its_own_costs_a_worker_a_transfer():
    """It is neither at hand nor to be computed again."""
    ranks = [rank(W1, A), rank(W2, lower=[B])]
    game, held = instance(
        ranks, [group(A, w1=1.0), group(B, w2=1.0)], speeds(W1, W2), CachingConfig(transfer="none")
    )
    assert game.recompute_s == pytest.approx(np.array([[RECOMPUTE_S, RECOMPUTE_S], [RECOMPUTE_S, NEAR_S]]))
    assert held.tolist() == [[True, False], [False, False]]


def test_demand_at_workers_that_have_left_is_left_out():
    """And with it a group that nobody else asks for."""
    groups = [group(A, w1=2.0, w3=7.0), group(B, w2=1.0), group(C, w3=5.0)]
    game, _ = instance([rank(W1, A), rank(W2)], groups, speeds(W1, W2), CachingConfig())
    assert game.rate.tolist() == [[2.0, 0.0], [0.0, 1.0]]


def test_decode_workers_take_no_part():
    """They compute no prompts and say nothing of their caches."""
    world = World()
    world.ranks = [*world.ranks, rank(W3, A, role=Role.DECODE)]
    found = world.estimate()
    assert (found.workers, found.duplication) == (2, pytest.approx(32 / 31))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ranks": [rank(W1, A), rank(W3, A, role=Role.DECODE)]}, placement.ONE_WORKER),
        ({"ranks": [rank(W1, padded=False), rank(W2, padded=False)]}, placement.NO_BLOCKS),
        ({"groups": [group(A, w1=2.0)]}, placement.NO_DEMAND),
        ({"groups": [group(A, w3=2.0), group(B, w3=1.0)]}, placement.NO_DEMAND),
        ({"speeds": {}}, placement.NO_CURVE),
        ({"speeds": speeds(W1, W2, token_s=0.0)}, placement.NO_CURVE),
        ({"ranks": [rank(W1), rank(W2)]}, placement.NONE_HELD),
    ],
)
def test_what_cannot_be_played_has_a_reason_and_no_figure(changed, reason):
    """Case E6: a cache that cannot help gives no confident number; absent is never 1."""
    found = World(**changed).estimate()
    assert found.reason == reason
    assert (found.poa_hat, found.observed_s, found.optimal_s, found.bound_s) == (None, None, None, None)
    assert (found.method, found.groups, found.shared_hits_frac) == ("", 0, None)


def test_a_figure_goes_with_what_it_was_made_of_and_comes_back():
    """A worker is restarted: while there is only one there is no figure, however good the looks before."""
    world = World()
    placements = world.placements()
    assert placements.note_caches(100.0)().poa_hat == pytest.approx(2 * RECOMPUTE_S / (3 * NEAR_S))
    world.ranks = world.ranks[:1]
    gone = placements.note_caches(105.0)()
    assert (gone.poa_hat, gone.reason) == (None, placement.ONE_WORKER)
    world.ranks = [rank(W1, A), rank(W3, A)]
    world.groups = [group(A, w1=2.0, w3=2.0), group(B, w1=1.0, w3=1.0)]
    back = placements.note_caches(110.0)()
    assert (back.poa_hat, back.reason) == (pytest.approx(2 * RECOMPUTE_S / (3 * NEAR_S)), "")


def test_where_the_best_costs_nothing_there_is_no_ratio():
    """What the observed placement costs is told all the same."""
    world = World(ranks=[rank(W1, A, padded=False, total=64), rank(W2, A, padded=False, total=64)])
    found = world.estimate()
    assert (found.poa_hat, found.reason, found.optimal_s) == (None, placement.FREE, 0.0)
    assert found.observed_s == pytest.approx(2 * RECOMPUTE_S)


def test_a_cache_whose_events_were_missed_makes_the_figure_uncertain():
    """Gaps: the interval is marked."""
    world = World(ranks=[rank(W1, A), rank(W2, A, approximate=True)])
    found = world.estimate()
    assert found.uncertain is True
    assert found.poa_hat == pytest.approx(2 * RECOMPUTE_S / (3 * NEAR_S))


def test_a_search_that_is_given_up_leaves_the_better_of_what_was_found_and_what_is(monkeypatch):
    """The observed placement fits, so PoA-hat is never under 1, and the bound stays a bound."""
    worse = SimpleNamespace(cost_s=1.0, bound_s=NEAR_S, method="greedy")
    monkeypatch.setattr(placement, "optimum", lambda game: worse)
    found = World().estimate()
    assert (found.poa_hat, found.method) == (1.0, "greedy")
    assert found.bound_s == pytest.approx(NEAR_S)


def test_reloads_are_counted_over_the_window():
    """Of what was evicted since the window began; who began anew counts from nothing, who left not at all."""
    world = World(ranks=[rank(W1, A, evicted=100, reloaded=90), rank(W2, A, evicted=50, reloaded=50)])
    placements = world.placements(demand_window_s=60.0)
    assert placements.note_caches(0.0)().reload_frac == pytest.approx(140 / 150)
    world.ranks = [rank(W1, A, evicted=140, reloaded=100), rank(W2, A, evicted=10, reloaded=0)]
    assert placements.note_caches(50.0)().reload_frac == pytest.approx((10 + 0) / (40 + 10))
    world.ranks = [rank(W1, A, evicted=150, reloaded=101), rank(W3, A, evicted=10, reloaded=4)]
    assert placements.note_caches(60.0)().reload_frac == pytest.approx((11 + 4) / (50 + 10))
    assert placements.note_caches(111.0)().reload_frac == pytest.approx((1 + 4) / (10 + 10))


def test_without_evictions_there_is_no_reload_share():
    """Absent, not 0."""
    assert World().estimate().reload_frac is None


def plain(key, *chains, total=4):
    return rank(key, *chains, total=total, padded=False)


def test_copies_are_counted_over_all_blocks_and_within_a_node():
    """Seven blocks, four of them distinct; blocks 2 and 3 are on both workers of the first node."""
    ranks = [plain(W1, 1, 2, 3), plain(W2, 2, 3, 4), plain(W3, 3)]
    assert copies_of(ranks, [0, 0, 1]) == Copies(7 / 4, 4 / 12, 1.0)


def test_without_blocks_there_are_no_copies():
    """Absent, not 1."""
    assert copies_of([plain(W1), plain(W2)], [0, 0]) == Copies()


def test_without_a_capacity_there_is_no_share_of_it():
    """A card may not say it."""
    unknown = plain(W2, 1)
    unknown = (unknown[0], SimpleNamespace(chains=unknown[1].chains, total_blocks=None))
    assert copies_of([plain(W1, 1), unknown], [0, 0]) == Copies(2.0, None, 1.0)


def test_of_many_blocks_the_same_share_is_counted_in_every_cache():
    """Chosen by hash, so that copies of one block are counted all or none."""
    chains = np.random.default_rng(1).integers(1, 2**64, 4000, dtype=np.uint64)
    ranks = [plain(W1, *chains, total=4000), plain(W2, *chains[:2000], total=4000)]
    found = copies_of(ranks, [0, 0], most=1500)
    assert found.sampled_frac == 0.25
    assert found.duplication == pytest.approx(6000 / 4000, abs=0.05)
    assert found.copies_frac == pytest.approx(4000 / 8000, abs=0.05)


def test_ranks_share_a_node_by_the_topology():
    """A worker of an unknown host is alone, its ranks together; `each` parts those too."""
    first, second = WorkerKey(7, 0), WorkerKey(7, 1)
    ranks = [rank(W1), rank(W2), rank(first, host=""), rank(second, host=""), rank(W3, host="")]
    assert nodes_of(ranks, "host") == [0, 0, 1, 1, 2]
    assert nodes_of(ranks, "one") == [0, 0, 0, 0, 0]
    assert nodes_of(ranks, "each") == [0, 1, 2, 3, 4]


@given(
    held=st.lists(st.sets(st.sampled_from((A, B, C))), min_size=3, max_size=3),
    rates=st.lists(st.lists(st.floats(0.0, 5.0), min_size=3, max_size=3), min_size=3, max_size=3),
    topology=st.sampled_from(("one", "each")),
    transfer=st.sampled_from(("none", "node", "all")),
)
def test_no_placement_beats_the_best_one(held, rates, topology, transfer):
    """PoA-hat is 1 or more, or absent with a reason, and never NaN."""
    world = World(
        ranks=[rank(key, *sorted(chains), total=20) for key, chains in zip((W1, W2, W3), held, strict=True)],
        groups=[
            group(chain, 4, w1=one, w2=two, w3=three)
            for chain, (one, two, three) in zip((A, B, C), rates, strict=True)
        ],
        speeds=speeds(W1, W2, W3),
    )
    found = world.estimate(topology=topology, transfer=transfer)
    if found.poa_hat is None:
        assert found.reason
    else:
        assert found.poa_hat >= 1 - 1e-9
        assert math.isfinite(found.poa_hat)
        assert found.bound_s <= found.optimal_s <= found.observed_s
