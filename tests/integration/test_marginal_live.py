"""Requests that go by marginal cost on real Dynamo: picked, known to Dynamo's router, and ended there."""

from collections import Counter

import pytest
from live_graph import AGG_3, DATA_PATHS, DISAGG_2P3D, MOCK_ARGS, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.values import Role

pytestmark = pytest.mark.dynamo

MARGINAL = ("PoaController.mode=active", "PoaController.policy.name=marginal")
PICKED = 'poa_router_marginal_total{outcome="picked"}'


async def picking(graph: LiveGraph) -> None:
    """Wait until requests are picked: the controller needs passes to learn speeds from."""
    await graph.metrics_until("router", lambda samples: samples.get(PICKED, 0) > 0, 20)


async def untold(graph: LiveGraph) -> float:
    return (await graph.metrics("router"))["poa_router_marginal_untold_total"]


@pytest.mark.parametrize("path", DATA_PATHS)
async def test_a_slow_worker_is_found_and_left_alone_and_dynamos_router_knows_every_load(path: str) -> None:
    """One of three aggregated workers is 6x slower: nobody said so. Bookings rise with the load, and end."""
    slow = "Worker.args_of={0: {speedup-ratio: 0.5}}"
    usual = tuple(
        text.replace(MOCK_ARGS, "{speedup-ratio: 3, num-gpu-blocks-override: 2048}") for text in AGG_3
    )
    async with live_graph("agg", *usual, slow, *MARGINAL, f"PoaRouter.data_path={path}") as graph:
        async with graph.load(12, max_tokens=32) as results:
            await picking(graph)
            await graph.until(lambda record: record.stragglers, 30)
            (straggler,) = graph.latest.stragglers
            assert straggler.role is Role.AGGREGATED
            before = len(graph.chosen())
            await graph.decided(before + 60)
            await eventually(lambda: sum(graph.booked.values()) > 0)
        assert [result.error for result in results if not result.ok] == []
        late = Counter(event.worker_id for event in graph.chosen()[before:])
        assert late[straggler.key.worker_id] < 0.5 * late.total() / 3
        assert await untold(graph) == 0
        assert await graph.data_path() == path
        await graph.idle()  # of which one part is that Dynamo's router has nothing booked


async def test_both_legs_are_picked_and_dynamos_routers_know_of_both() -> None:
    """Two prefill and three decode workers that are alike: all are used, nothing fails, all bookings end."""
    async with live_graph("disagg", *DISAGG_2P3D, *MARGINAL) as graph:
        async with graph.load(8, max_tokens=16) as results:
            await picking(graph)
            before = len(graph.chosen())
            await graph.decided(before + 120)
            await eventually(lambda: sum(graph.booked.values()) > 0)
        assert [result.error for result in results if not result.ok] == []
        for role, workers in ((Role.PREFILL, 2), (Role.DECODE, 3)):
            late = Counter(event.worker_id for event in graph.chosen(role)[20:])
            assert len(late) == workers
            assert min(late.values()) > 0.5 * late.total() / workers
        assert await untold(graph) == 0
        await graph.idle()
