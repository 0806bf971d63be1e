"""Dynamo's router refuses what does not fit its queue, live: refusals hide no saturation (case S8)."""

import asyncio
from pathlib import Path

import pytest
from live_graph import CLOCK, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.bench.load import Result, prompts
from dynamo_poa.values import Outcome, Regime, Role

pytestmark = pytest.mark.dynamo

# One class for all: requests wait while the prefill worker has more than two prompts, eight of them at most.
POLICY = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: all, policy_family: all, cache_bucket: all, quantum: 1,
     prefill_busy_threshold: 512, request_queue_limit_per_worker: 8}
"""
PROMPT_TOKENS = 256
CAPACITY_PER_S = 30  # measured: of one prefill worker at half speed
OVERLOAD = 1.25
# However slow, TTFT is under both thresholds: only the refusals can tell.
REGIME = "{unit: seconds, theta1: 60, theta2: 120, confirm_s: 0.5, dwell_s: 1, window_s: 2, idle_s: 2}"


async def test_refused_requests_are_no_samples_and_no_sign_of_health(tmp_path: Path) -> None:
    """Case S8, seconds for minutes: counted apart, not `below` while over 1 %, flagged, and soon over.

    Arrivals at a fixed rate, so that the share of refusals is the overload's.
    """
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    overrides = (
        "PrefillWorker.workers=1",
        "PrefillWorker.args={speedup-ratio: 0.5, num-gpu-blocks-override: 4096, max-num-batched-tokens: 512}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        "DecodeWorker.args={speedup-ratio: 5, num-gpu-blocks-override: 4096}",
        f"PoaRouter.policy_config={policy}",
        "PoaController.tick_s=0.1",
        f"PoaController.regime={REGIME}",
    )
    async with live_graph("disagg", *overrides, clean=False) as graph:  # Dynamo prints what handlers raise
        results = await arrivals(graph, CAPACITY_PER_S / 3, 2.0)
        assert [result.error for result in results if not result.ok] == []
        assert {record.regime for record in graph.telemetry} == {Regime.BELOW}
        assert {record.censored for record in graph.telemetry} == {False}

        began = len(graph.telemetry)
        results += await arrivals(graph, CAPACITY_PER_S * OVERLOAD, 8.0)
        refused = sum(not result.ok for result in results)
        assert 0.05 < refused / (8.0 * CAPACITY_PER_S * OVERLOAD) < 0.3
        under = graph.telemetry[began:]
        assert max(record.shed_frac for record in under) > 0.1
        assert {record.censored for record in under if record.shed_frac > 0.01} == {True}
        in_transition = [record for record in under if record.regime is Regime.TRANSITION]
        assert any("of requests refused" in record.reason for record in in_transition)
        assert {record.regime for record in under[-10:]} == {Regime.TRANSITION}
        assert Regime.SATURATED not in {record.regime for record in under}

        await graph.until(lambda record: not record.censored, 5)
        results += await arrivals(graph, CAPACITY_PER_S / 3, 3.0)
        await graph.until(lambda record: record.regime is Regime.BELOW, 5)
        assert sum(not result.ok for result in results) == refused

        await eventually(lambda: len(graph.ended()) == 2 * len(results))
        ends = [(event.role, event.outcome) for event in graph.ended()]
        assert {outcome for _, outcome in ends} == {Outcome.OK, Outcome.SHED}
        assert ends.count((Role.PREFILL, Outcome.SHED)) == ends.count((Role.DECODE, Outcome.SHED)) == refused
        assert len(graph.first_tokens(Role.DECODE)) == len(results) - refused
        # A prompt takes at least its own prefill: no sample of zero.
        assert min(record.ttft_p50_s for record in graph.telemetry if record.ttft_p50_s is not None) > 0.01


async def arrivals(graph: LiveGraph, rate: float, duration_s: float) -> list[Result]:
    """Send so many requests a second, whatever becomes of them."""
    source = prompts(
        prompt_tokens=PROMPT_TOKENS, max_tokens=4, templates=0, shared_frac=0, seed=len(graph.telemetry)
    )
    started_s, sent = CLOCK.monotonic_s(), []
    for number in range(round(rate * duration_s)):
        await asyncio.sleep(max(started_s + number / rate - CLOCK.monotonic_s(), 0))
        sent.append(asyncio.create_task(graph.complete(next(source))))
    return await asyncio.gather(*sent)
