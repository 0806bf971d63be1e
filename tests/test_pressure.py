"""When a pool changes its regime, which resource drives it, which rank is hot and when it no longer is."""

import msgspec
import pytest

from dynamo_poa.config import RegimeConfig
from dynamo_poa.evidence import PoolReading, RankReading
from dynamo_poa.pressure import PressureState, next_pressure, unseen
from dynamo_poa.values import HotWorker, PoolRegime, Regime, Role, WorkerKey

BELOW, TRANSITION, SATURATED = Regime.BELOW, Regime.TRANSITION, Regime.SATURATED
LIMITS = RegimeConfig(queue_saturated=20.0)  # round numbers below
UNIT_S = 0.02  # 20 units saturate: 0.4 s; 5 on average are transition; a quarter of 20 is empty: 0.1 s


class Pools:
    """Feeds one pool tick by tick, four a second."""

    def __init__(self, role=Role.PREFILL, ranks=4):
        self.role, self.at_s = role, 1000.0
        self.ranks = [RankReading(key=WorkerKey(n, 0)) for n in range(ranks)]
        self.state = PressureState()
        self.pool = PoolRegime(role=role)
        self.regimes = []

    def tick(self, *, ranks=None, **figures):
        self.at_s += 0.25
        reading = PoolReading(
            role=self.role,
            ranks=tuple(self.ranks if ranks is None else ranks),
            unit_s=UNIT_S,
            service_s=UNIT_S * 4,
            **({"known": True} | figures),
        )
        pools = {self.role: reading}
        self.state, regimes = next_pressure(self.state, pools, self.at_s, LIMITS, expire_s=30.0)
        self.pool = regimes[self.role]
        self.regimes.append(self.pool.regime)
        return self.pool

    def run(self, seconds, **figures):
        for _ in range(round(seconds * 4)):
            self.tick(**figures)
        return self.pool

    def changed(self, seconds, rank):
        """Return (instant, what happened to a hot rank) while the others have nothing queued."""
        others = [RankReading(key=one.key, queue_s=0.0, queued=0, kv_frac=0.1) for one in self.ranks[1:]]
        found = []
        for _ in range(round(seconds * 4)):
            self.tick(ranks=[rank, *others], queue_s=0.0)
            found += [(self.at_s, change.overloaded, change.reason) for change in self.state.changes]
        return found


def test_a_queue_over_its_threshold_on_two_ticks_saturates_the_pool():
    """20 units of 0.02 s; resource, value and threshold are named."""
    pools = Pools()
    assert pools.tick(queue_s=0.5).regime is BELOW
    pool = pools.tick(queue_s=0.5)
    assert (pool.regime, pool.resource, pool.value, pool.threshold) == (SATURATED, "queue", 0.5, 0.4)
    assert pool.reason == "queue 0.50 s at or over 0.40 s"


def test_a_queue_of_one_tick_is_chance():
    """A burst of reports that cross."""
    pools = Pools()
    for _ in range(20):
        pools.tick(queue_s=0.5)
        pools.tick(queue_s=0.0)
    assert set(pools.regimes) == {BELOW}


def test_arrivals_that_outrun_capacity_prove_a_smaller_queue():
    """Each adds 0.01 s to a mean queue that loses 0.25 s a tick: of 45 a tick 20 are too many, of two 40."""
    pools = Pools()
    seen = [
        pools.tick(queue_s=0.07, request_s=0.01, arrived=45 * tick, rate=180.0).regime for tick in range(4)
    ]
    assert seen == [BELOW, BELOW, SATURATED, SATURATED]  # 24 prove it
    assert pools.pool.threshold == pytest.approx(0.04)
    pools = Pools()
    for tick in range(40):  # at 80 % they prove nothing
        pools.tick(queue_s=0.07, request_s=0.01, arrived=20 * tick, rate=80.0)
    assert set(pools.regimes) == {BELOW}


def test_a_queue_that_lasts_is_a_transition():
    """10 units, half of what saturates: the average passes 5 after a half life of 7 s."""
    pools = Pools()
    pools.run(6.75, queue_s=0.2)
    assert pools.pool.regime is BELOW
    pools.run(1.0, queue_s=0.2)
    assert (pools.pool.regime, pools.pool.resource) == (TRANSITION, "queue")


def test_a_pool_is_released_a_level_at_a_time_once_its_queue_is_gone_for_a_while():
    """3 s empty for each level; in between nothing is named below."""
    pools = Pools()
    pools.run(2, queue_s=0.5)
    pools.regimes.clear()
    pools.run(7, queue_s=0.0)
    assert pools.regimes.index(TRANSITION) == 12
    assert pools.regimes.index(BELOW) == 13  # the queue has been empty for as long as is asked for
    assert (pools.pool.resource, pools.pool.value) == ("", None)


def test_a_lull_under_much_demand_releases_nobody():
    """At 95 % of capacity a queue empties again and again."""
    pools = Pools()
    pools.run(2, queue_s=0.5, request_s=0.01, rate=95.0, arrived=0)
    pools.run(20, queue_s=0.0, request_s=0.01, rate=95.0, arrived=0)
    assert pools.pool.regime is SATURATED
    pools.run(10, queue_s=0.0, request_s=0.01, rate=50.0, arrived=0)
    assert pools.pool.regime is BELOW


def test_what_is_left_of_a_queue_under_little_demand_is_the_past():
    """Half of its peak gone, 50 % demand: no longer saturated, though over the threshold by far."""
    pools = Pools()
    pools.run(2, queue_s=2.0, request_s=0.01, rate=120.0, arrived=0)
    pools.tick(queue_s=1.2, request_s=0.01, rate=50.0, arrived=0)
    assert pools.pool.regime is SATURATED
    pools.tick(queue_s=0.9, request_s=0.01, rate=50.0, arrived=0)
    assert pools.pool.regime is TRANSITION


def test_a_figure_that_is_no_longer_known_holds_nobody():
    """S2: released at once, with the reason."""
    pools = Pools()
    pools.run(2, queue_s=0.5)
    pools.tick()
    assert pools.pool.regime is TRANSITION
    assert pools.pool.reason == "queue expired: no longer known"
    assert pools.tick().regime is BELOW


def test_full_kv_blocks_alone_are_a_transition_and_with_requests_waiting_saturation():
    """After confirm_s; under 0.81 for 3 s it is over."""
    pools = Pools(Role.DECODE)
    pools.run(4, kv_frac=0.95, queued=0)
    assert pools.pool.regime is BELOW
    pool = pools.tick(kv_frac=0.95, queued=0)
    assert (pool.regime, pool.resource, pool.value, pool.threshold) == (TRANSITION, "kv_blocks", 0.95, 0.9)
    assert pools.run(4.25, kv_frac=0.95, queued=2).regime is SATURATED
    assert pools.run(10, kv_frac=0.85, queued=0).regime is TRANSITION
    assert pools.run(3.5, kv_frac=0.8, queued=0).regime is BELOW


def test_full_slots_need_requests_waiting_everywhere():
    """20 requests, judged like units of a queue; all on one rank they are that rank's matter."""
    pools = Pools(Role.DECODE)
    assert pools.run(10, slots_frac=1.0, queued=0, queued_median=0).regime is BELOW
    assert pools.run(2, slots_frac=1.0, queued=25, queued_median=0).regime is BELOW
    pool = pools.run(4.25, slots_frac=1.0, queued=25, queued_median=6)
    assert (pool.regime, pool.resource, pool.value, pool.threshold) == (SATURATED, "slots", 1.0, 0.95)


def test_slow_iterations_are_never_more_than_a_transition():
    """Four times what they take unloaded, which is the median of the first readings."""
    pools = Pools(Role.DECODE)
    pools.run(5, iteration_s=0.01)
    assert pools.state.iteration.value_s == 0.01
    pool = pools.run(30, iteration_s=0.1)
    assert (pool.regime, pool.resource, pool.threshold) == (TRANSITION, "iteration", 4.0)
    assert pool.value == pytest.approx(10.0)
    assert pools.run(5, iteration_s=0.012).regime is BELOW


def test_load_does_not_teach_the_unloaded_iteration_time():
    """An hour of slow growth under load leaves it; with next to no request it follows, slowly."""
    pools = Pools(Role.DECODE)
    pools.run(5, iteration_s=0.01)
    for minute in range(60):
        pools.run(60, iteration_s=0.01 + 0.0001 * minute)
    assert pools.state.iteration.value_s == 0.01
    pools.run(600, iteration_s=0.012, unloaded=True)
    assert pools.state.iteration.value_s == pytest.approx((0.01 * 0.012) ** 0.5, rel=1e-2)


def test_one_hot_rank_is_named_and_its_pool_stays_where_it_is():
    """2 s over 20 service times of its own, 1.6 s, while the others have nothing queued."""
    pools = Pools()
    hot = RankReading(key=WorkerKey(0, 0), queue_s=3.0, queued=9, kv_frac=0.1)
    changes = pools.changed(5, hot)
    reason = "queue 3.00 s at or over 1.60 s, its pool's median worker is not"
    assert changes == [(1002.25, True, reason)]
    expected = HotWorker(worker_id=0, dp_rank=0, resource="queue", value=3.0, threshold=1.6)
    assert pools.pool.hot == (expected,)
    assert pools.pool.regime is BELOW
    cleared = pools.changed(1, msgspec.structs.replace(hot, queue_s=0.2))
    assert cleared == [(1005.25, False, "queue down to 0.20 s")]
    assert pools.pool.hot == ()


def test_a_hot_rank_whose_figure_ceases_is_cleared_as_expired():
    """S2: None is neither high nor low."""
    pools = Pools()
    hot = RankReading(key=WorkerKey(0, 0), kv_frac=0.98, queued=20)
    pools.changed(5, hot)
    cleared = pools.changed(1, msgspec.structs.replace(hot, kv_frac=None, queued=0))
    assert cleared == [(1005.25, False, "kv_blocks expired: no longer sent")]


def test_a_hot_rank_that_nothing_confirms_is_cleared_within_the_horizon():
    """S2: occupancy hangs at its last value, nothing is queued any more: 30 s after it last was."""
    pools = Pools()
    hot = RankReading(key=WorkerKey(0, 0), kv_frac=0.98, queued=20)
    pools.changed(5, hot)
    cleared = pools.changed(60, msgspec.structs.replace(hot, queued=0))
    assert cleared == [(1035.0, False, "kv_blocks expired: not confirmed for 30 s")]


def test_a_rank_is_not_confirmed_hot_while_nothing_is_seen():
    """Over on one tick, ten blind seconds, over again: its confirmation begins anew."""
    pools = Pools()
    hot = RankReading(key=WorkerKey(0, 0), queue_s=3.0, queued=9)
    assert pools.changed(0.25, hot) == []
    pools.state, pools.at_s = unseen(pools.state), 1010.0
    (latched,) = pools.changed(5, hot)
    assert latched[:2] == (1012.25, True)


def test_ranks_that_are_hot_together_are_their_pools_matter():
    """More than half of the ranks over: none is said to be hot by itself."""
    pools = Pools()
    over = [RankReading(key=one.key, queue_s=3.0, queued=9) for one in pools.ranks]
    pools.run(5, ranks=over, queue_s=3.0)
    assert (pools.pool.regime, pools.pool.hot) == (SATURATED, ())


def test_a_hot_rank_that_leaves_is_cleared():
    """O1: no ghost of a worker that is gone."""
    pools = Pools()
    pools.changed(5, RankReading(key=WorkerKey(0, 0), queue_s=3.0, queued=9))
    pools.tick(ranks=pools.ranks[1:], queue_s=0.0)
    assert [(change.overloaded, change.reason) for change in pools.state.changes] == [
        (False, "the worker is gone")
    ]


def test_a_single_rank_is_its_pool():
    """There is no median to compare it with."""
    pools = Pools(ranks=1)
    pools.run(5, ranks=[RankReading(key=WorkerKey(0, 0), queue_s=3.0, queued=9)], queue_s=3.0)
    assert (pools.pool.regime, pools.pool.hot) == (SATURATED, ())


def test_a_time_without_eyes_confirms_nothing():
    """The tick after a dead bus is the first of its kind."""
    pools = Pools()
    pools.tick(queue_s=0.5)
    pools.state = unseen(pools.state)
    pools.at_s += 150.0
    assert pools.tick(queue_s=0.5).regime is BELOW
    assert pools.tick(queue_s=0.5).regime is SATURATED
