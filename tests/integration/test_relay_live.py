"""The relay on real Dynamo: frames it does not understand, and the way back to the stream, under load."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_graph import AGG_3, MODEL, LiveGraph, live_graph
from relay_parts import FINAL, Asked, Requester
from waiting import eventually

from dynamo_poa.values import Address, Outcome

pytestmark = [pytest.mark.dynamo, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graph() -> AsyncIterator[LiveGraph]:
    """3 aggregated workers behind one router."""
    async with live_graph("agg", *AGG_3, "PoaController.mode=off") as running:
        yield running


def router_address(graph: LiveGraph) -> Address:
    """Return where discovery sends requests for the router."""
    folder = Path(graph.running.plan.env["DYN_FILE_KV"]) / "v1" / "instances"
    (record,) = [path for path in folder.iterdir() if path.name.startswith(f"{graph.namespace}%2Fbackend%2F")]
    return Address.parse(json.loads(record.read_bytes())["transport"]["tcp"])


def ask(requester: Requester, path: str, codec: str) -> Asked:
    """Send what a frontend sends for a completion of three tokens."""
    return requester.ask(
        path=path,
        codec=codec,
        model=MODEL,
        token_ids=list(range(1000, 1064)),
        stop_conditions={"max_tokens": 3, "ignore_eos": True},
        sampling_options={},
        output_options={},
        eos_token_ids=[],
        annotations=[],
    )


async def test_frames_not_understood_are_served_by_dynamo_and_three_of_them_lead_back_to_the_stream(
    graph: LiveGraph,
) -> None:
    """Issue: handed on byte for byte, counted, and no client notices; then the record is as it was."""
    relay = router_address(graph)
    async with graph.load(4) as results, Requester() as requester:
        await requester.connect(relay.port)
        understood = ask(requester, relay.path, "msgpack")
        await eventually(lambda: FINAL in understood.heard)
        understood.close()
        for count in (1, 2, 3):
            asked = ask(requester, relay.path, "json")
            await eventually(lambda asked=asked: b'{"complete_final":true}' in asked.heard)  # type: ignore[misc]
            asked.close()
            samples = await graph.metrics("router")
            assert samples['poa_router_relay_handed_on_total{reason="codec"}'] == count
        await eventually(lambda: router_address(graph).port != relay.port)
        samples = await graph.metrics("router")
        assert samples["poa_router_relay_in_force"] == 0
        relayed = samples["poa_router_relay_requests_total"]
        seen = len(results)
        await eventually(lambda: len(results) > seen + 20)
        kept = ask(requester, relay.path, "msgpack")  # its connection knows of no switch
        await eventually(lambda: FINAL in kept.heard)
        kept.close()
    assert [result.error for result in results if not result.ok] == []
    await graph.idle()
    assert {event.outcome for event in graph.ended()} == {Outcome.OK}
    samples = await graph.metrics("router")
    served = samples['poa_router_requests_total{outcome="ok",role="aggregated"}']
    assert relayed < samples["poa_router_relay_requests_total"] < served - 20
    assert samples["poa_router_relay_frames_lost_total"] == 0
