"""A cache that cannot help, live: other block sizes, short prompts, no prefix caching (case E6)."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from live_graph import FORCED, MOCK_ARGS, LiveGraph, live_graph, plan_of
from nats_server import free_port
from waiting import eventually

from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import CacheSignal, Regime, Role

pytestmark = [pytest.mark.dynamo, pytest.mark.asyncio(loop_scope="module")]

# Any load at all changes the regime, and with it the policy's ω.
MOVING = (*FORCED, "PoaController.policy={transition: [0.8, 0.1]}")
SIZES = "its KV block size is {size}, Common.block_size = 16"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graph() -> AsyncIterator[LiveGraph]:
    """2 prefill and 2 decode workers; any load at all would move ω."""
    overrides = (
        "PrefillWorker.workers=2",
        "PrefillWorker.per_process=2",
        f"PrefillWorker.args={MOCK_ARGS}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        f"DecodeWorker.args={MOCK_ARGS}",
        "PoaRouter.min_prefill_workers=2",
        "PoaRouter.min_decode_workers=2",
        *MOVING,
    )
    async with live_graph("disagg", *overrides) as running:
        yield running


def omega_changes(records: list[TelemetryRecord]) -> int:
    """Return how often ω changed."""
    weights = [record.overlap_weight for record in records]
    return sum(before != after for before, after in itertools.pairwise(weights))


def refusals(lines: list[tuple[str, str]], process: str) -> list[tuple[int, str]]:
    """Return whom a process refused, and why."""
    said = (json.loads(line) for name, line in lines if name == process and '"poa.card.refused"' in line)
    return [(int(line["worker_id"]), line["error"]) for line in said]


async def test_prompts_under_a_block_are_no_cache_signal(graph: LiveGraph) -> None:
    """Case E6 (b): signal absent, hit share unknown rather than 0, and ω is not moved again and again."""
    began = len(graph.telemetry)
    async with graph.load(12, prompt_tokens=10, max_tokens=4) as results:
        await graph.until(
            lambda record: (
                record.regime is Regime.TRANSITION
                and record.router_temperature == 0.8
                and record.cache_signal is CacheSignal.ABSENT
            ),
            30,  # with the machine busy elsewhere waits are for a while taken for its, not the workers'
        )
        seen = len(graph.telemetry)
        await eventually(lambda: len(graph.telemetry) > seen + 10)
        samples = await graph.metrics("controller")
    assert [result.error for result in results if not result.ok] == []
    assert samples['poa_cache_signal{signal="absent"}'] == 1
    assert "poa_cache_hit_frac" not in samples
    await graph.until(lambda record: record.regime is Regime.BELOW and record.router_temperature == 0.0, 10)
    records = graph.telemetry[began:]
    assert {record.cache_hit_frac for record in records} == {None}
    assert omega_changes(records) <= 1


async def test_prefixes_that_one_worker_holds_are_a_signal(graph: LiveGraph) -> None:
    """Control: the same graph with prompts that share; the hit share is known then."""
    async with graph.load(12, prompt_tokens=96, max_tokens=4, templates=60, shared_frac=0.7):
        await graph.until(lambda record: record.cache_signal is CacheSignal.PRESENT, 15)
        await graph.until(lambda record: (record.cache_hit_frac or 0.0) > 0.1, 15)
        await graph.until(lambda record: record.overlap_weight == 0.1, 15)


async def test_a_worker_with_another_block_size_is_named_and_not_routed_to(graph: LiveGraph) -> None:
    """Case E6 (c): an error with both sizes within 10 s; it gets no request and is no part of the pool."""
    await graph.idle()
    began = len(graph.lines)
    prefill = next(process for process in graph.running.plan.processes if process.name == "prefill-0")
    argv = changed(prefill.argv, block_size=32, num_workers=1, bootstrap_ports=free_port())
    async with stranger(argv, graph.running.plan):
        await eventually(lambda: refusals(graph.lines[began:], "router"), 10)
        ((worker, why),) = refusals(graph.lines[began:], "router")
        assert why == SIZES.format(size=32)
        await eventually(lambda: refusals(graph.lines[began:], "controller") == [(worker, why)], 10)
        decided = len(graph.chosen())
        results = await graph.many(40, 8)
        assert [result.error for result in results if not result.ok] == []
        await graph.decided(decided + 80)
        assert worker not in {event.worker_id for event in graph.chosen(Role.PREFILL)}
        assert graph.latest.pools["prefill"].workers == 2


async def test_a_graph_of_other_block_sizes_names_them_and_is_not_ready() -> None:
    """Case E6 (a): mock workers at 64, the configuration at 16: an error within 10 s and no readiness."""
    plan = plan_of("disagg", "DecodeWorker.workers=2", "DecodeWorker.per_process=2")
    processes = tuple(
        msgspec.structs.replace(process, argv=changed(process.argv, block_size=64))
        for process in plan.processes
    )
    lines: list[tuple[str, str]] = []

    async def serve() -> None:
        async with serve_graph(
            msgspec.structs.replace(plan, processes=processes),
            emit=lambda name, line: lines.append((name, line)),
        ):
            pytest.fail("a graph that cannot work was called ready")

    task = asyncio.create_task(serve())
    try:
        await eventually(lambda: task.done() or len(refusals(lines, "router")) == 4, 15)
        assert {why for _, why in refusals(lines, "router")} == {SIZES.format(size=64)}
        health = plan.metrics_urls["router"].replace("/metrics", "/health")
        async with aiohttp.ClientSession() as client, client.get(health) as answer:
            assert answer.status == 503
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_without_prefix_caching_there_is_no_cache_signal() -> None:
    """Case E6 (d): the prompts share, the engines keep nothing."""
    overrides = (
        "Worker.workers=2",
        "Worker.per_process=2",
        "Worker.args={speedup-ratio: 5, num-gpu-blocks-override: 2048, no-enable-prefix-caching: true}",
        *MOVING,
    )
    async with live_graph("agg", *overrides) as graph:
        async with graph.load(8, prompt_tokens=96, max_tokens=4, templates=60, shared_frac=0.7):
            await graph.until(lambda record: record.cache_signal is CacheSignal.ABSENT, 15)
            await graph.until(lambda record: record.router_temperature == 0.8, 15)
            seen = len(graph.telemetry)
            await eventually(lambda: len(graph.telemetry) > seen + 20)
        assert {record.cache_hit_frac for record in graph.telemetry} == {None}
        assert {record.cache_signal for record in graph.telemetry[seen:]} == {CacheSignal.ABSENT}
        assert omega_changes(graph.telemetry) <= 1


def changed(argv: tuple[str, ...], **flags: int) -> tuple[str, ...]:
    """Return a command line with other values for flags it has; one without them stays as it is."""
    values = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}
    return (argv[0], *(values.get(flag, argument) for flag, argument in itertools.pairwise(argv)))


@asynccontextmanager
async def stranger(argv: tuple[str, ...], plan: Plan) -> AsyncIterator[None]:
    """Run a worker that is no part of the plan, in the graph's surroundings."""
    process = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **plan.env})
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
