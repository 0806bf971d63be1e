"""When ticks happen, and what survives: failing ticks, sinks, NATS, the store, the machine's clock."""

import asyncio

import msgspec
import pytest
import structlog
from simulated_graph import STATIC, Graph, ticking

from dynamo_poa.coupling import AllocationEstimate, CachingEstimate
from dynamo_poa.errors import ActuationError, BusError
from dynamo_poa.fleet import Fleet
from dynamo_poa.policies import Answer
from dynamo_poa.ttft import FrontendScraper
from dynamo_poa.values import Applied, ParamsKind, Pin, Regime, RouterParams, Setting

HEALTHY = 20


def graph(**config):
    return Graph(lambda in_flight, _: 0.1 if in_flight <= 40 else 0.4, **config)


async def test_ticks_come_every_tick_s():
    """Default 0.25 s: 41 in the first 10 s, the one at the start included."""
    async with ticking(graph()) as g:
        await g.run(10, HEALTHY)
    assert g.last.tick == 41


async def test_a_late_tick_is_not_followed_by_a_burst():
    """A tick that took 2 s is followed by the next, not by eight at once."""
    slow = [2.0]

    class SlowSink:
        dropped = 0

        async def emit(self, record):
            if slow:
                await g.clock.sleep(slow.pop())

    g = graph(sinks=(SlowSink(),))
    async with ticking(g):
        await g.run(4, HEALTHY)
    assert g.last.tick == 1 + 2.0 / 0.25 + 1


async def test_what_comes_while_the_store_answers_is_not_of_the_future():
    """A tick is judged at the instant it observes: a request chosen meanwhile has not decoded for -0.4 s."""
    g = graph()

    async def slowly():
        await g.clock.sleep(0.4)
        return None

    g.channel.poll_store = slowly
    async with ticking(g):
        await g.run(5, HEALTHY)
    ages_s = [record.message_age_s for record in g.records]
    assert min(age_s for age_s in ages_s if age_s is not None) >= 0.0


async def test_the_machines_clock_may_be_set_back():
    """S7: ticks go by the monotonic clock; ages stay what they are."""
    async with ticking(graph()) as g:
        await g.run(5, HEALTHY)
        before = g.last
        g.clock.set_wall(g.clock.wall_s() - 60.0)
        await g.run(5, HEALTHY)
        assert g.last.tick == before.tick + 20
        assert g.last.at_s == pytest.approx(before.at_s - 55.0)
        assert g.last.message_age_s <= 0.5
        assert g.last.regime is Regime.BELOW


async def test_a_tick_that_fails_is_counted_and_parameters_and_leases_go_on():
    """The one broad except: whatever trips a tick, routers keep their last good parameters."""
    broken = []

    class BrokenFleet(Fleet):
        def workers(self, at_s):
            if broken:
                raise ZeroDivisionError("a bug")
            return super().workers(at_s)

    g = graph(fleet=BrokenFleet("poa-workers", 30.0))
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(5, HEALTHY)
            heartbeats, written = len(g.channel.heartbeats), g.written
            broken.append(True)
            await g.run(5, HEALTHY)
            assert len(g.channel.heartbeats) - heartbeats >= 4
            assert g.written == written
            broken.clear()
            await g.run(5, HEALTHY)
            assert g.last.failed_ticks == 20
    failures = [line for line in lines if line["event"] == "poa.tick.failed"]
    assert [line["failed_ticks"] for line in failures] == [1]  # twenty times the same is said once


async def test_an_outside_write_that_trips_a_tick_trips_only_that_one():
    """I3: what the checks of a record should ever miss is dropped, not tried again every tick."""
    slipped_through = RouterParams(revision=9, router_temperature=0.3, overlap_weight=0.4)
    msgspec.structs.force_setattr(slipped_through, "revision", "nine")
    g = graph()
    async with ticking(g):
        await g.run(2, HEALTHY)
        g.channel.foreign = slipped_through
        await g.run(5, HEALTHY)
    assert g.last.failed_ticks == 1
    assert g.last.tick == 28


async def test_cancellation_ends_the_loop():
    """The broad except never catches it."""
    g = graph()
    task = asyncio.create_task(g.loop.run())
    await g.run(1, HEALTHY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def flaky(g):
    """Let publications fail while the returned list is not empty, though the bus looks connected."""
    publish, failing = g.channel.publish, []

    async def publish_or_fail(params):
        if failing:
            raise ActuationError("not connected")
        await publish(params)

    g.channel.publish = publish_or_fail
    return failing


async def test_a_publication_that_fails_is_asked_for_again_and_told_once():
    """ActuationError: outcome apply_failed while it fails; `applied` and the swap when it went out."""
    g = graph()
    failing = flaky(g)
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(2, HEALTHY)
            failing.append(True)
            g.loop.pin(Pin(router_temperature=0.3, overlap_weight=0.4))
            await g.run(1, HEALTHY)
            assert [record.applied for record in g.records[-4:]] == [Applied.APPLY_FAILED] * 4
            assert g.last.swaps == 0
            assert g.channel.current.revision == 1
            failing.clear()
            await g.run(1, HEALTHY)
    told = [
        (line["event"], line.get("outcome"), line.get("revision"))
        for line in lines
        if line["event"].startswith("poa.params.")
    ]
    assert told == [
        ("poa.params.applied", None, 1),
        ("poa.params.held", Applied.APPLY_FAILED, None),
        ("poa.params.applied", None, 2),
        ("poa.params.held", Applied.HELD_PIN, None),
    ]
    assert g.written == [(0.0, 1.0, "policy"), (0.3, 0.4, "pin")]
    assert g.last.swaps == 1


class Broken:
    """A policy that raises what it is given, after a first good answer."""

    name = "broken"

    def __init__(self, error):
        self.error = error

    def start(self):
        return False

    def decide(self, state, view):
        if state:
            raise self.error
        return True, Answer(Setting(0.5, 0.25), "good")


@pytest.mark.parametrize("error", [KeyError("τ"), RecursionError(), OverflowError(34), MemoryError()])
async def test_a_policy_that_raises_costs_no_tick_and_keeps_its_last_good_parameters(error):
    """Whatever it raises: it alone is disabled, for cooldown_s; ticks, heartbeats and operators go on."""
    g = graph(policy=Broken(error))
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(5, HEALTHY)
            assert (g.last.policy.reason, g.last.policy.errors, g.last.failed_ticks) == (
                "policy_failed",
                1,
                0,
            )
            g.loop.pin(Pin(router_temperature=0.3, overlap_weight=0.4))
            await g.run(1, HEALTHY)
            g.loop.release()
            await g.run(1, HEALTHY)
    assert g.written == [(0.5, 0.25, "policy"), (0.3, 0.4, "pin"), (0.5, 0.25, "policy")]
    told = [(line["event"], line["reason"]) for line in lines if line["event"].startswith("poa.policy.")]
    assert told == [("poa.policy.failed", repr(error))]


async def test_told_to_forget_the_policy_begins_anew():
    """`release --forget`: here it has a good answer again."""
    g = graph(policy=Broken(ValueError("no")))
    async with ticking(g):
        await g.run(2, HEALTHY)
        assert g.last.policy.disabled_left_s is not None
        g.loop.release(forget=True)
        await g.run(0.25, HEALTHY)
        assert (g.last.policy.reason, g.last.policy.disabled_left_s) == ("good", None)


async def test_an_outside_write_waits_until_it_can_be_adopted():
    """It is read from the store once; a publication that fails, or an outage, must not lose it."""
    g = graph()
    failing = flaky(g)
    async with ticking(g):
        await g.run(2, HEALTHY)
        failing.append(True)
        g.channel.foreign = RouterParams(revision=7, router_temperature=0.3, overlap_weight=0.4)
        await g.run(2, HEALTHY)
        g.bus.connected = False
        failing.clear()
        await g.run(2, HEALTHY)
        assert g.written == [(0.0, 1.0, "policy")]
        g.bus.connected = True
        await g.run(5, HEALTHY)
    assert g.written == [(0.0, 1.0, "policy"), (0.3, 0.4, "external")]
    assert g.channel.current.revision == 8


async def test_a_first_record_that_fails_is_published_for_a_predecessors_sake_too():
    """A successor says what it took over once it can: routers may hold what the store has lost."""
    stored = RouterParams(revision=9, router_temperature=0.0, overlap_weight=1.0, kind=ParamsKind.POLICY)
    g = graph(stored=stored)
    failing = flaky(g)
    failing.append(True)
    async with ticking(g):
        await g.run(1, HEALTHY)
        failing.clear()
        await g.run(1, HEALTHY)
    assert g.channel.current.revision == 10


async def test_a_store_that_does_not_answer_is_no_publication():
    """Neither heartbeat nor store within its time: the record before stays in force."""
    g = graph()

    async def hang(params):
        await asyncio.Event().wait()

    g.channel.publish = hang
    with structlog.testing.capture_logs() as lines:
        await g.loop.tick()
    held = [line for line in lines if line["event"] == "poa.params.held"]
    assert [line["error"] for line in held] == ["revision 1 not published: timeout"]
    assert g.last.applied is Applied.APPLY_FAILED


async def test_the_loop_waits_for_nats_and_then_takes_over():
    """I1, third run: started while NATS is down it waits, is not ready, and reads before it writes."""
    stored = RouterParams(revision=9, router_temperature=0.7, overlap_weight=1.0, regime=Regime.TRANSITION)
    g = graph(stored=stored)
    g.bus.connected = False
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(30, HEALTHY)
            assert not g.loop.ready
            assert g.records == []
            g.bus.connected = True
            await g.run(1, 60)
            assert g.loop.ready
    waiting = [line for line in lines if line["event"] == "poa.controller.waiting"]
    assert len(waiting) == 1
    assert g.channel.written[0][1].revision == 10
    assert g.last.regime is Regime.TRANSITION


async def test_a_store_that_cannot_be_read_does_not_keep_the_controller_for_ever():
    """A NATS server without JetStream: after 10 s it goes on, routers live off heartbeats."""
    g = graph()

    async def load():
        raise BusError("JetStream is not enabled")

    g.channel.load = load
    async with ticking(g):
        await g.run(9.5, HEALTHY)
        assert g.records == []
        await g.run(2, HEALTHY)
    assert g.written == [(0.0, 1.0, "policy")]


async def test_a_pin_set_before_the_take_over_is_kept():
    """An operator may be quicker than the store."""
    g = graph()
    g.bus.connected = False
    async with ticking(g):
        await g.run(1, HEALTHY)
        g.loop.pin(Pin(router_temperature=0.3, overlap_weight=0.4))
        g.bus.connected = True
        await g.run(1, HEALTHY)
    assert g.written == [(0.3, 0.4, "pin")]


async def test_the_frontends_ttft_and_requests_count_before_the_routers():
    """Read beside the ticks; what waits in the frontend is in flight as well."""
    counts = [0]

    async def fetch():
        counts[0] += 50
        return (
            "# TYPE dynamo_frontend_inflight_requests gauge\n"
            'dynamo_frontend_inflight_requests{model="m"} 99\n'
            "# TYPE dynamo_frontend_time_to_first_token_seconds histogram\n"
            f'dynamo_frontend_time_to_first_token_seconds_bucket{{le="0.1"}} {counts[0]}\n'
            f'dynamo_frontend_time_to_first_token_seconds_bucket{{le="+Inf"}} {counts[0]}\n'
        )

    g = graph(frontend=FrontendScraper(fetch, window_s=3.0, max_age_s=5.0))
    async with ticking(g):
        await g.run(6, HEALTHY)
    assert g.last.ttft_source == "frontend"
    assert g.last.ttft_samples == 300  # six scrapes within 3 s
    assert g.last.ttft_p50_s == pytest.approx(0.05, rel=0.02)
    assert g.last.in_flight == 99


async def test_a_frontend_that_hangs_holds_up_nothing():
    """One scrape at a time, as a task of its own; cancelled with the loop."""
    started, ended = [], []

    async def fetch():
        started.append(1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    g = graph(frontend=FrontendScraper(fetch, window_s=3.0, max_age_s=5.0))
    async with ticking(g):
        await g.run(10, HEALTHY)
        assert g.last.tick == 41
        assert (started, ended) == ([1], [])
        assert g.last.ttft_source == "decisions"
    assert ended == [1]


class Games:
    """The other two games, as the loop asks for them; what is wrong with them is told once."""

    def __init__(self):
        self.caching, self.allocation = CachingEstimate(poa_hat=1.5), AllocationEstimate(reason="one pool")
        self.looked_at_s, self.skipped = None, 2
        self.looks = []
        self.failure = None

    def look(self, at_s):
        self.looks.append(at_s)

    def take_failure(self):
        failure, self.failure = self.failure, None
        return failure

    async def aclose(self):
        self.looks.append("closed")


async def test_the_other_games_are_looked_at_every_games_s_and_closed_with_the_loop():
    """Issue 7: beside the ticks, which take what was priced last; what fails there is a failed tick."""
    games = Games()
    async with ticking(graph(games=games)) as g:
        await g.run(12, HEALTHY)
        assert len(games.looks) == 3
        assert (g.last.caching, g.last.allocation) == (games.caching, games.allocation)
        assert g.last.coupling.caching == 1.5
        assert g.last.messages_dropped["games_unpriced"] == 2
        games.failure = ValueError("no solution")
        await g.run(1, HEALTHY)
    assert g.last.failed_ticks == 1
    assert games.looks[-1] == "closed"


async def test_before_the_first_worker_no_game_is_looked_at():
    """A reason that names workers would be false: discovery has told of none yet."""
    games = Games()
    async with ticking(graph(games=games, cards=())) as g:
        await g.run(12, HEALTHY)
        assert (games.looks, g.last.failed_ticks, g.last.caching) == ([], 0, games.caching)


async def test_counters_of_every_source_are_in_the_record():
    """Messages by topic, drops by reason, ended legs by outcome, a smoothed message rate."""
    g = graph()
    async with ticking(g):
        g.decisions.receive(b"\xc1", g.clock.monotonic_s())
        g.fleet.observe("namespace.poa-workers.component.x.endpoint.y.kv_metrics", b"\xc1", 0.0, 0.0)
        g.bus.dropped = 3
        await g.run(20, HEALTHY)
    assert g.last.messages_received == {"decisions": 80}
    assert g.last.messages_dropped["decisions_not_msgpack"] == 1
    assert g.last.messages_dropped["slow_consumer"] == 3
    assert sum(g.last.messages_dropped.values()) == 5
    assert g.last.requests_ended == {"ok": 80 * 5}
    assert g.last.message_rate == pytest.approx(4.0, rel=0.01)
    assert g.last.pools["decode"].workers == 2
    assert [(r.router_id, r.source, r.revision) for r in g.last.routers] == [("router-0", "heartbeat", 1)]


async def test_what_the_controller_itself_lost_is_in_the_record():
    """Counted and shown: nothing is dropped in silence (O1)."""

    class DeafSink:
        dropped = 3

        async def emit(self, record):
            pass

    g = graph(sinks=(DeafSink(),))
    g.bus.handler_errors = 2
    g.channel.store_errors = 4
    g.decisions.unpriced = 5
    g.decisions.flight.forgotten = 6
    async with ticking(g):
        await g.run(1, HEALTHY)
    assert g.last.messages_dropped == {
        "decisions_unpriced": 5,
        "requests_forgotten": 6,
        "handler_failed": 2,
        "params_unstored": 4,
        "telemetry_unsent": 3,
    }


async def test_a_frontend_that_cannot_be_read_is_counted_and_said_when_it_changes():
    """Its counters then are the routers' alone, and a person should know why."""
    errors = ["awaited", "awaited", "", "refused", "refused", "timeout", "", "timeout", "timeout"]

    async def fetch():
        error = errors.pop(0) if errors else ""
        if error:
            raise OSError(error)
        return ""

    g = graph(frontend=FrontendScraper(fetch, window_s=3.0, max_age_s=5.0), scrape_s=1.0)
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(12, HEALTHY)
    said = [line for line in lines if line["event"] == "poa.frontend.unreachable"]
    assert [line["error"] for line in said] == ["refused", "timeout", "timeout"]
    assert g.last.messages_dropped == {"frontend_unread": 5}


async def test_a_frontend_that_never_answers_is_said_after_a_grace():
    """It starts after the controller, so at first it is only awaited."""

    async def fetch():
        raise OSError("refused")

    g = graph(frontend=FrontendScraper(fetch, window_s=3.0, max_age_s=5.0), scrape_s=1.0)
    with structlog.testing.capture_logs() as lines:
        async with ticking(g):
            await g.run(14, HEALTHY)
            before = [line["error"] for line in lines if line["event"] == "poa.frontend.unreachable"]
            await g.run(3, HEALTHY)
    said = [line["error"] for line in lines if line["event"] == "poa.frontend.unreachable"]
    assert (before, said) == ([], ["refused"])


async def test_static_parameters_are_reported_before_anything_is_published():
    """Not the policy's: nobody routes with those yet."""
    g = graph()
    g.bus.connected = False
    effects = await g.loop.tick()
    assert (effects.record.router_temperature, effects.record.overlap_weight) == STATIC
    assert effects.record.revision == 0
