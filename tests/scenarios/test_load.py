"""The real controller against simulated load: ramps, idle, its own effect, modes, operators, a dead bus."""

import itertools

import pytest
from simulated_graph import STATIC, Graph, ticking

from dynamo_poa.config import RegimeConfig
from dynamo_poa.snapshot import NO_PASS
from dynamo_poa.values import Applied, Mode, ParamsKind, Pin, Regime, RouterParams

BELOW, TRANSITION, SATURATED = Regime.BELOW, Regime.TRANSITION, Regime.SATURATED


def knee(in_flight, _params):
    """TTFT of a system that holds 40 requests: 0.1 s under it, 0.4 s over it, 1.5 s far over it."""
    return 0.1 if in_flight <= 40 else 0.4 if in_flight <= 80 else 1.5


async def ramp(graph):
    for in_flight in (20, 60, 120, 60, 20):
        await graph.run(20, in_flight)


async def test_a_ramp_over_the_knee_and_back_moves_regime_and_parameters_step_by_step():
    """The paper's table: (0, 1.0) below, (0.7, 1.0) in transition, (0.8, 0.1) saturated, and back again."""
    async with ticking(Graph(knee)) as graph:
        await ramp(graph)
    assert graph.regimes == [BELOW, TRANSITION, SATURATED, TRANSITION, BELOW]
    assert graph.written == [
        (0.0, 1.0, "policy"),
        (0.7, 1.0, "policy"),
        (0.8, 0.1, "policy"),
        (0.7, 1.0, "policy"),
        (0.0, 1.0, "policy"),
    ]
    assert [params.revision for _, params in graph.channel.written] == [1, 2, 3, 4, 5]
    assert graph.last.swaps == 4
    assert graph.last.failed_ticks == 0
    assert graph.last.regime_changes == 4


async def test_the_ramp_with_a_learned_baseline_takes_the_same_path():
    """Defaults: nothing is known of the model beforehand."""
    async with ticking(Graph(knee, regime=RegimeConfig())) as graph:
        await ramp(graph)
    assert graph.regimes == [BELOW, TRANSITION, SATURATED, TRANSITION, BELOW]
    assert graph.last.baseline_s == pytest.approx(0.1, rel=1e-3)


async def test_a_change_of_load_is_answered_within_the_documented_time():
    """Up: confirmation and moving average, 6 s here; P99 turns bad with its second slow sample."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(20, 20)
        before_s = graph.clock.monotonic_s()
        await graph.run(20, 60)
    at_s = next(at for at, params in graph.channel.written if params.regime is TRANSITION)
    assert at_s - before_s <= 6.0


async def test_idle_after_load_returns_to_below_without_an_estimate():
    """S4(a): estimate absent, sample count 0, baseline parameters, no NaN; single requests change nothing."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(30, 120)
        assert graph.last.regime is SATURATED
        assert graph.last.poa_frozen is not None
        await graph.run(35, 0)
        assert graph.last.regime is BELOW
        assert (graph.last.poa_hat, graph.last.poa_frozen, graph.last.poa_samples) == (None, None, 0)
        assert graph.last.poa_reason == f"decode: {NO_PASS}"
        assert (graph.last.router_temperature, graph.last.overlap_weight) == (0.0, 1.0)
        await graph.run(85, 0)
        changes = graph.last.regime_changes
        for _ in range(5):
            await graph.run(0.25, 4)  # one request
            await graph.run(2.0, 0)
        assert graph.last.regime_changes == changes
        assert graph.last.regime is BELOW
    assert all(r.poa_hat is None or r.poa_hat == r.poa_hat for r in graph.records)


async def test_the_controllers_own_effect_does_not_undo_itself():
    """D1b: constant load, 3 s at ω = 1 and 0.8 s at ω = 0.1, thresholds 1 and 2 between; 200 s."""
    plant = Graph(
        lambda _, params: 3.0 if params.overlap_weight > 0.5 else 0.8,
        regime=RegimeConfig(unit="seconds", theta1=1.0, theta2=2.0),
    )
    async with ticking(plant) as graph:
        await graph.run(200, 64)
    assert graph.regimes == [BELOW, TRANSITION, SATURATED]
    assert len(graph.written) == 3
    assert "but the load did not fall: 64 in flight, needed at 64" in graph.last.reason


async def test_shadow_never_publishes_what_it_would_do():
    """Heartbeat and store carry static parameters; telemetry the others."""
    async with ticking(Graph(knee, mode=Mode.SHADOW)) as graph:
        await ramp(graph)
    assert graph.regimes == [BELOW, TRANSITION, SATURATED, TRANSITION, BELOW]
    assert graph.written == [(*STATIC, "static")]
    assert {(p.router_temperature, p.overlap_weight) for _, p in graph.channel.heartbeats} == {STATIC}
    assert {r.wanted_router_temperature for r in graph.records} == {0.0, 0.7, 0.8}


async def test_off_is_static_and_still_watches():
    """Mode off: regime and estimate are reported, parameters never move."""
    async with ticking(Graph(knee, mode=Mode.OFF)) as graph:
        await graph.run(20, 60)
    assert graph.last.regime is TRANSITION
    assert graph.written == [(*STATIC, "static")]


async def test_a_pin_holds_through_a_ramp_and_expires():
    """`set --for 60s` during the ramp, then the policy's answer of then."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(5, 20)
        until_s = graph.clock.monotonic_s() + 60
        graph.loop.pin(Pin(router_temperature=0.3, overlap_weight=0.4, until_s=until_s))
        await graph.run(59, 60)
        assert graph.last.kind is ParamsKind.PIN
        assert graph.last.applied is Applied.HELD_PIN
        await graph.run(2, 60)
    assert graph.written == [(0.0, 1.0, "policy"), (0.3, 0.4, "pin"), (0.7, 1.0, "policy")]


async def test_a_released_pin_returns_to_the_policy():
    """`set`, then `release`."""
    async with ticking(Graph(knee)) as graph:
        graph.loop.pin(Pin(router_temperature=0.3, overlap_weight=0.4))
        await graph.run(5, 20)
        graph.loop.release()
        await graph.run(1, 20)
    assert graph.written[-2:] == [(0.3, 0.4, "pin"), (0.0, 1.0, "policy")]


async def test_an_outside_write_is_adopted_until_the_next_regime_change():
    """An operator writes the key-value entry; the controller re-issues it and keeps it until load changes."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(10, 20)
        graph.channel.foreign = RouterParams(
            revision=0, router_temperature=0.4, overlap_weight=0.5, kind=ParamsKind.EXTERNAL
        )
        await graph.run(20, 20)
        assert graph.last.kind is ParamsKind.EXTERNAL
        await graph.run(20, 60)
    assert graph.written == [(0.0, 1.0, "policy"), (0.4, 0.5, "external"), (0.7, 1.0, "policy")]


async def test_a_successor_takes_over_under_load_without_a_jump():
    """I6: the first records after a restart are the predecessor's values; the regime follows evidence."""
    stored = RouterParams(
        revision=9,
        router_temperature=0.8,
        overlap_weight=0.1,
        kind=ParamsKind.POLICY,
        regime=SATURATED,
        baseline_s=0.1,
    )
    async with ticking(Graph(knee, stored=stored, regime=RegimeConfig())) as graph:
        await graph.run(30, 120)
        assert graph.written == [(0.8, 0.1, "policy")]
        assert graph.channel.written[0][1].revision == 10
        assert graph.regimes == [SATURATED]
        await graph.run(30, 20)
    assert graph.regimes == [SATURATED, TRANSITION, BELOW]


async def test_a_dead_bus_holds_and_its_return_is_no_surprise():
    """NATS away for 150 s under load: nothing moves, nothing is taken for idle; afterwards as before."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(30, 120)
        graph.bus.connected = False
        await graph.run(150, 120)
        assert graph.last.applied is Applied.HELD_STALE
        assert graph.last.reason == "NATS is not connected"
        assert not graph.loop.ready
        graph.bus.connected = True
        await graph.run(30, 120)
        assert graph.loop.ready
    assert graph.regimes == [BELOW, TRANSITION, SATURATED]
    assert len(graph.written) == 3


async def test_a_bus_on_which_nothing_passes_is_stale_after_stale_s():
    """S4(b): connected and silent, requests in flight when last heard: held, and not idle afterwards."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(30, 120)
        await graph.run(60, 120, router_heard=False)
        assert graph.last.applied is Applied.HELD_STALE
        await graph.run(30, 120)
        assert graph.last.applied is Applied.UNCHANGED
    assert graph.regimes == [BELOW, TRANSITION, SATURATED]


async def test_heartbeats_go_on_once_a_second_whatever_happens_to_the_parameters():
    """Routers' leases: 30 s without one and they fall back."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(60, 20)
    times = [at_s for at_s, _ in graph.channel.heartbeats]
    assert 57 <= len(times) <= 60
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 1.25


async def test_the_papers_estimate_prices_the_herd():
    """All on worker 1, which holds twice the blocks: observed over best, of 256 decisions."""
    async with ticking(Graph(knee)) as graph:
        await graph.run(30, 60)
    # Blocks per decision: 4 uncached + 4 own + 60 on worker 1, + 30 on worker 2; the best puts half on each.
    assert graph.last.poa_frozen == pytest.approx(68 / ((68 + 38) / 2), rel=1e-9)
