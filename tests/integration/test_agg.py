"""The aggregated graph on real Dynamo: one leg through the router, and what each mode may do."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live_graph import AGG_3, DATA_PATHS, FORCED, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.serve.mock_model import vocabulary_words
from dynamo_poa.values import Applied, Outcome, Regime, Role

pytestmark = [pytest.mark.dynamo, pytest.mark.asyncio(loop_scope="module")]

STATIC, TRANSITION = (0.0, 1.0), (0.7, 1.0)  # the router's own, and the paper's for the regime forced here


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DATA_PATHS)
async def graph(request: pytest.FixtureRequest) -> AsyncIterator[LiveGraph]:
    """3 aggregated workers whose controller may decide but not apply; a regime change is easily forced."""
    path = f"PoaRouter.data_path={request.param}"
    async with live_graph("agg", *AGG_3, *FORCED, path, "PoaController.mode=shadow") as running:
        yield running


async def test_a_request_is_routed_with_the_parameters_just_set(
    graph: LiveGraph, request: pytest.FixtureRequest
) -> None:
    """Issue: text comes back, and the next decisions carry the new revision within 1.2 s."""
    status, text = await graph.post("/v1/completions", prompt="Hello there", max_tokens=4)
    answer = json.loads(text)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert set(answer["choices"][0]["text"].split()) <= set(vocabulary_words())

    params = (await graph.pin(0.3, 0.6)).params
    results = await graph.many(12, 4)
    assert [result.error for result in results if not result.ok] == []
    samples = await graph.metrics_until(
        "router", lambda samples: samples["poa_router_params_revision"] == params.revision, within_s=1.2
    )
    assert (samples["poa_router_router_temperature"], samples["poa_router_overlap_weight"]) == (0.3, 0.6)
    await eventually(lambda: len(graph.ended()) == 13)
    late = [event for event in graph.chosen() if event.at_s > params.issued_at_s + 1.2]
    assert {event.revision for event in late} <= {params.revision}
    assert params.revision in {event.revision for event in graph.chosen()}
    assert {event.role for event in graph.chosen()} == {Role.AGGREGATED}
    assert {event.outcome for event in graph.ended()} == {Outcome.OK}
    assert graph.prefill_tokens("backend") >= 12 * 64  # its own workers do both
    assert await graph.data_path() == request.node.callspec.params["graph"]
    assert (await graph.control(op="release"))["ok"]
    await graph.until(lambda record: (record.router_temperature, record.overlap_weight) == STATIC)


@pytest.mark.parametrize("graph", ["relay"], indirect=True)
async def test_shadow_decides_and_never_applies(graph: LiveGraph) -> None:
    """Issue: shadow never changes parameters; telemetry shows what they would be."""
    await graph.until(lambda record: record.regime is Regime.BELOW and record.ttft_samples == 0, 10)
    seen, beats = len(graph.telemetry), len(graph.heartbeats)
    async with graph.load(6) as results:
        await graph.until(lambda record: record.regime is Regime.TRANSITION, 15)
        asked = len(results)
        await eventually(lambda: len(results) > asked + 20 and len(graph.heartbeats) > beats)
    records = graph.telemetry[seen:]
    assert {(record.router_temperature, record.overlap_weight) for record in records} == {STATIC}
    assert {record.swaps for record in records} == {records[0].swaps}
    wanted = {(record.wanted_router_temperature, record.wanted_overlap_weight) for record in records}
    assert wanted == {STATIC, TRANSITION}
    assert Applied.HELD_MODE in {record.applied for record in records}
    held = {(beat.params.router_temperature, beat.params.overlap_weight) for beat in graph.heartbeats[beats:]}
    assert held == {STATIC}
    samples = await graph.metrics("router")
    assert (samples["poa_router_router_temperature"], samples["poa_router_overlap_weight"]) == STATIC


@pytest.mark.parametrize(("mode", "values"), [("off", STATIC), ("active", TRANSITION)])
async def test_off_stays_static_and_active_applies(mode: str, values: tuple[float, float]) -> None:
    """Issue: under the load that makes `active` swap, `off` keeps the static parameters."""
    overrides = ("Worker.workers=2", "Worker.per_process=2", *FORCED, f"PoaController.mode={mode}")
    async with live_graph("agg", *overrides) as graph:
        async with graph.load(6) as results:
            await graph.until(lambda record: record.regime is Regime.TRANSITION, 15)
            asked = len(results)
            await eventually(lambda: len(results) > asked + 20)
            await graph.metrics_until(
                "router",
                lambda samples: (
                    (samples["poa_router_router_temperature"], samples["poa_router_overlap_weight"]) == values
                ),
            )
        swaps = {record.swaps for record in graph.telemetry}
        assert swaps == ({0} if mode == "off" else {0, 1})
        assert [result.error for result in results if not result.ok] == []
        if mode == "off":
            refused = await graph.control(op="set", router_temperature=0.5, overlap_weight=0.5)
            assert not refused["ok"]
