"""The real controller on event streams gone wrong: what shows only in its loop, its log or its /metrics."""

import io
import json
import sys

import pytest
import structlog
from dynamo_messages import W1, W2, W3, W4, Sender, card, cl, fp, km, rm, st
from exposition import samples_of
from prometheus_client import generate_latest
from simulated_graph import Graph, ticking

from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.params import encode_params
from dynamo_poa.telemetry import LogSink, configure_logging
from dynamo_poa.values import Regime, Role
from dynamo_poa.wire import Chosen, DecisionBatch, FirstToken

STALE_S = 30.0
PERIOD_S = 0.25
SETTLE_S = 15 * 0.25


class Events:
    """A simulated graph whose workers say what a test sends, seen through /metrics."""

    def __init__(self, *worker_ids, ttft_s=lambda in_flight, params: 0.1, sinks=(), roles=None):
        self.metrics = ControllerMetrics(
            lambda: self.graph.fleet.workers(self.now_s),
            lambda: self.graph.fleet.publishers(self.now_s),
            lambda: self.graph.pricer.latencies.values(),
        )
        cards = [card(worker_id, (roles or {}).get(worker_id, Role.AGGREGATED)) for worker_id in worker_ids]
        self.graph = Graph(ttft_s, cards=cards, sinks=(self.metrics, *sinks))
        clock = self.graph.clock
        self.sender = Sender(self.graph.fleet, "poa-workers", clock.wall_s() - clock.monotonic_s())
        self.started_s = self.now_s
        self._batches = 0

    @property
    def now_s(self):
        return self.graph.clock.monotonic_s()

    @property
    def elapsed_s(self):
        return self.now_s - self.started_s

    def send(self, publisher, message, skew_s=0.0):
        self.sender.send(publisher, message, self.now_s, skew_s)

    async def wait(self, duration_s=PERIOD_S):
        await self.graph.clock.advance(duration_s)

    def scrape(self):
        """Return what /metrics shows now."""
        return samples_of(generate_latest(self.metrics.registry).decode())

    def hold(self, worker_id, count):
        """Let a router report so many requests on one worker, decoding; call again to keep them."""
        wall_s = self.graph.clock.wall_s()
        names = [] if self._batches else [f"held {number}" for number in range(count)]
        events = [Chosen(n, Role.AGGREGATED, wall_s, wall_s, worker_id, 0, 64, 1, 1, ()) for n in names]
        events += [FirstToken(name, Role.AGGREGATED, wall_s + 0.1) for name in names]
        self._batches += 1
        self.graph.decisions.apply(
            DecisionBatch(
                router_id="router-held",
                sequence=self._batches,
                sent_at_s=wall_s,
                events=tuple(events),
                in_flight={"aggregated": count},
            ),
            self.now_s,
        )


def of_worker(name, worker_id):
    return f'poa_worker_{name}{{dp_rank="0",role="aggregated",worker_id="{worker_id}"}}'


@pytest.mark.parametrize("silent_s", [0.0, 5.0])
async def test_every_scrape_shows_the_workers_own_occupancy_and_all_routers_bookings(silent_s):
    """S1: 4050/4096 at every scrape after the worker's first word, unknown before; 105 booked, then 60."""
    events = Events(W1)
    async with ticking(events.graph):
        await events.wait()  # workers are known from the first tick on
        while events.elapsed_s < 60.0:
            heard = events.elapsed_s >= silent_s
            if heard:
                events.send("worker", km(W1, None, None, 4050))
            events.send("router A", km(W1, 60, 0, None))
            if events.elapsed_s < 15.0:
                events.send("router B", km(W1, 45, 0, None))
                b_last_s = events.elapsed_s
            await events.wait()
            samples = events.scrape()
            occupancy = 4050 / 4096 if heard else None
            assert samples.get(of_worker("kv_used_frac", W1)) == occupancy
            booked = 105 if events.elapsed_s - b_last_s <= STALE_S else 60
            assert samples[of_worker("active_decode_blocks", W1)] == booked
    assert booked == 60


async def test_clocks_apart_and_absurd_durations_leave_the_estimate_as_it_is():
    """S7: nobody stale, no negative age or latency, ten durations counted, PoA-hat within 5 % of the control.

    60 s at 2 Hz: W1's clock 30 s ahead, W2's 30 s behind, W4's set back 300 s after 20 s.
    """
    estimates = []
    for broken in (True, False):
        events = Events(W1, W2, W4)
        odd = {10 + n: 1795951683.6 for n in range(5)} | {40 + n: -0.01 for n in range(5)}
        odd |= {70 + n: 0.0 for n in range(5)}  # with eight requests running: odd, and not impossible
        async with ticking(events.graph):
            await events.wait()  # workers are known from the first tick on
            for step in range(120):
                if step % 4 == 0:
                    events.hold(W1, 8)
                for worker_id, skew_s in ((W1, 30.0), (W2, -30.0), (W4, 0.0 if step < 40 else -300.0)):
                    wall_time_s = odd.get(step, 0.05) if broken and worker_id == W4 else 0.05
                    done = fp(worker_id, step + 1, wall_time_s, nd=8)
                    events.send(str(worker_id), done, skew_s if broken else 0.0)
                await events.wait(0.5)
                samples = events.scrape()
                assert [samples[of_worker("stale", worker_id)] for worker_id in (W1, W2, W4)] == [0, 0, 0]
                times = {n: v for n, v in samples.items() if "seconds" in n and "skew" not in n}
                assert [name for name, value in times.items() if value < 0] == []
        skews = {value for name, value in samples.items() if name.startswith("poa_publisher_skew_seconds")}
        assert skews == ({30.0, -30.0, -300.0} if broken else {0.0})
        dropped = events.graph.last.messages_dropped
        assert dropped == ({"impossible_value": 10, "passes_unmeasured": 5} if broken else {})
        assert events.graph.last.failed_ticks == 0
        assert events.graph.last.tick == 2 + 60 * 4
        estimates.append(events.graph.last.poa_hat)
    broken_hat, control_hat = estimates
    assert control_hat > 1.2  # all eight on one of three
    assert broken_hat == pytest.approx(control_hat, rel=0.05)


async def test_a_storm_of_clears_is_quiet_and_a_worker_without_a_card_has_no_series():
    """E3: a joiner at event 812; 50 clears in a second are one change of cache, no line and no regime."""
    events = Events(W1, W2)
    with structlog.testing.capture_logs() as lines:
        async with ticking(events.graph):
            await events.wait()  # workers are known from the first tick on
            events.send("w2", st(W2, 1, None, range(40)))
            events.send("w1", st(W1, 812, 999999, [11, 12]))
            events.send("w1", st(W1, 813, 12, [13]))
            events.send("w1", rm(W1, 814, [77]))
            events.send("w1", rm(W1, 815, [11, 77, 12]))
            events.send("w9", st(9, 1, None, [5]))
            await events.wait()
            samples = events.scrape()
            assert samples[of_worker("resident_blocks", W1)] == 1
            assert samples[of_worker("resident_approximate", W1)] == 1
            assert samples[of_worker("resident_blocks", W2)] == 40
            for event_id in range(816, 866):
                events.send("w1", cl(W1, event_id))
                await events.wait(0.02)
                samples = events.scrape()
                assert samples[of_worker("resident_blocks", W1)] == 0
                assert samples[of_worker("resident_approximate", W1)] == 0
                assert samples[of_worker("resident_blocks", W2)] == 40
            events.send("w1", rm(W1, 866, [13]))
            await events.wait(11.0)
            samples = events.scrape()
            assert samples[of_worker("resident_blocks", W1)] == 0
            assert [name for name in samples if 'worker_id="9"' in name] == []
    assert events.graph.last.messages_dropped == {"unknown_worker": 1}
    assert events.graph.last.regime_changes == 0
    assert [line["event"] for line in lines] == [
        "poa.controller.started",
        "poa.params.applied",
        "poa.message.noticed",
    ]
    assert lines[-1]["detail"] == "worker 9 has no card"


async def test_every_number_of_every_line_and_of_the_store_survives_a_reader_of_doubles(monkeypatch):
    """E4: what `JSON.parse` gives back, whose numbers are doubles, is what was said; ids are exact text."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info")
    unknown = 2**64 - 1
    try:
        events = Events(W2, W3, W4, sinks=(LogSink(structlog.get_logger()),))
        async with ticking(events.graph):
            for step in range(80):
                events.send("w2", km(W2, None, None, 4000))
                events.send("w3", km(W3, None, None, 10))
                events.send("w9", km(unknown, None, None, 1))
                for worker_id, wall_time_s in ((W2, 0.25), (W3, 0.05), (W4, 0.05)):
                    events.send(str(worker_id), fp(worker_id, step + 1, wall_time_s, nd=9))
                events.hold(W2, 4)
                await events.wait()
            samples = events.scrape()
    finally:
        structlog.reset_defaults()
    assert samples[of_worker("kv_used_frac", W2)] == 4000 / 4096
    assert samples[of_worker("kv_used_frac", W3)] == 10 / 4096
    lines = stream.getvalue().splitlines()
    for text in (*lines, encode_params(events.graph.channel.stored).decode()):
        assert json.loads(text, parse_int=lambda digits: int(float(digits))) == json.loads(text)
    said = [json.loads(line) for line in lines]
    (straggler,) = [line for line in said if line["event"] == "poa.tick"][-1]["stragglers"]
    assert straggler["key"] == [str(W2), 0]
    (noticed,) = [line for line in said if line["event"] == "poa.message.noticed"]
    assert noticed["detail"] == f"worker {unknown} has no card"
    assert events.graph.last.regime is Regime.BELOW


async def test_an_overload_whose_signal_ceases_is_cleared_when_it_expires():
    """S2: W1 full and queueing for 5 s, then its occupancy is never sent again; W2 and W4 are healthy."""
    events = Events(W1, W2, W4)
    overloaded, cleared = [], []
    with structlog.testing.capture_logs() as lines:
        async with ticking(events.graph):
            await events.wait()  # workers are known from the first tick on
            began_s = events.elapsed_s
            for step in range(90 * 4):
                if step < 5 * 4:
                    events.send("w1", km(W1, None, None, 4000))
                    events.send("w1", fp(W1, step + 1, 0.05, 4, 512, 16, 20, 2560))
                elif step % 4 == 0:
                    events.send("router", km(W1, 3, 0, None))
                    events.send("w1", fp(W1, step + 1, 0.05, nd=1))
                for worker_id in (W2, W4):
                    events.send(str(worker_id), km(worker_id, None, None, 100))
                    events.send(str(worker_id), fp(worker_id, step + 1, 0.05, nd=1))
                await events.wait()
                hot = {
                    (worker.worker_id, worker.resource)
                    for pool in events.graph.last.pool_regimes.values()
                    for worker in pool.hot
                }
                (overloaded if hot else cleared).append(events.elapsed_s - began_s)
                assert {worker_id for worker_id, _ in hot} <= {W1}
                assert events.graph.last.regime is Regime.BELOW  # one hot worker is no saturated fleet
    last_high_s = 4.75
    assert overloaded[0] <= 5.0
    assert overloaded[-1] - last_high_s <= STALE_S + 0.5
    assert overloaded[-1] < cleared[-1]
    assert len(overloaded) == round((overloaded[-1] - overloaded[0]) / PERIOD_S) + 1  # once, and not again
    (line,) = [line for line in lines if line["event"] == "poa.worker.cleared"]
    assert (line["worker_id"], line["value"]) == (str(W1), None)
    assert line["reason"] == "kv_blocks expired: no longer sent"


async def test_a_pool_saturated_by_a_signal_that_ceases_is_below_again():
    """S2 where W1 is the whole pool: saturated in time, released when the signal expires, `below` by 90 s."""
    events = Events(W1)
    path = []
    with structlog.testing.capture_logs() as lines:
        async with ticking(events.graph):
            await events.wait()  # workers are known from the first tick on
            began_s = events.elapsed_s
            for step in range(90 * 4):
                if step % 4 == 0:
                    events.hold(W1, 3)
                if step < 5 * 4:
                    events.send("w1", km(W1, None, None, 4000))
                    events.send("w1", fp(W1, step + 1, 0.05, 4, 512, 16, 20, 2560))
                elif step % 4 == 0:
                    events.send("router", km(W1, 3, 0, None))
                    events.send("w1", fp(W1, step + 1, 0.05, nd=1))
                await events.wait()
                path.append((events.elapsed_s - began_s, events.graph.last.regime))
    saturated = [at_s for at_s, regime in path if regime is Regime.SATURATED]
    assert saturated[0] <= 5.0 + SETTLE_S
    assert saturated[-1] - 4.75 <= STALE_S + 1.0
    assert path[-1][1] is Regime.BELOW
    changes = [line for line in lines if line["event"] == "poa.regime.changed"]
    assert [line["after"]["regime"] for line in changes] == ["transition", "saturated", "transition", "below"]
    assert all(line["reason"].startswith("aggregated") for line in changes)
    assert ["is released" in line["reason"] for line in changes] == [False, False, True, True]


async def test_slow_answers_of_idle_workers_are_upstream_of_them():
    """I8(c): workers scheduled under 30 % of the time and TTFT over 5 x its start: `upstream` of them."""
    ttft_s = [0.1]
    events = Events(
        W1,
        W2,
        ttft_s=lambda in_flight, params: ttft_s[0],
        roles={W1: Role.PREFILL, W2: Role.DECODE},
    )

    async def traffic(duration_s, in_flight):
        for _ in range(round(duration_s / PERIOD_S)):
            counter = round(events.now_s / PERIOD_S)
            events.send("w1", fp(W1, counter, 0.05, np=2, pt=512))
            events.send("w2", fp(W2, counter, 0.06, nd=4))
            await events.graph.run(PERIOD_S, in_flight)

    async with ticking(events.graph):
        await traffic(20, 20)
        assert events.graph.last.bottleneck == ""
        for slow_s in (0.6, 2.0):
            ttft_s[0] = slow_s
            await traffic(20, 60)
            assert events.graph.last.bottleneck == "upstream"
            assert events.scrape()["poa_bottleneck_upstream"] == 1
        assert events.graph.last.pools["prefill"].busy_frac < 0.3
        assert events.graph.last.pools["decode"].busy_frac < 0.3
        assert events.graph.last.ttft_p99_s > 5 * 0.1
        assert Regime.SATURATED not in {record.regime for record in events.graph.records}
        ttft_s[0] = 0.1
        await traffic(20, 20)
    assert (events.graph.last.bottleneck, events.graph.last.regime) == ("", Regime.BELOW)
