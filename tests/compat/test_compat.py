"""The router, the controller and the frontend on a later Dynamo serve workers on the one we target.

Run by `make test-compat`, which makes the second environment. Not part of `make test`.
"""

import asyncio
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest

from dynamo_poa.bench.load import LoadClient, Prompt, prompts, take
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.serve.graph import Stage
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.wire import Chosen, DecisionBatch, subject

PYTHON = os.environ.get("DYN_POA_COMPAT_PYTHON", "")
pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.skipif(not PYTHON, reason="needs the second environment of `make test-compat`"),
]
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.args={speedup-ratio: 2}",
    "DecodeWorker.args={speedup-ratio: 2}",
    "PoaController.mode=shadow",
)


async def _first_answer(client: LoadClient, source: Iterator[Prompt]) -> None:
    """Wait for the frontend: 1.6 lists the model a moment before it has found both legs (503 until then)."""
    for _ in range(75):
        if (await client.complete(next(source))).ok:
            return
        await asyncio.sleep(0.2)
    pytest.fail("no answer within 15 s")


def mixed(plan: Plan) -> Plan:
    """Return the plan with everything after the workers run by the second environment's interpreter."""
    return msgspec.structs.replace(
        plan,
        processes=tuple(
            msgspec.structs.replace(process, argv=(PYTHON, *process.argv[1:]))
            if process.stage >= Stage.ROUTERS
            else process
            for process in plan.processes
        ),
    )


def relayed(lines: list[str]) -> bool:
    """Tell whether the router used the relay, and understood all that came."""
    assert not [line for line in lines if "poa.relay.frame_handed_on" in line]
    chosen = [line for line in lines if "poa.data_path.chosen" in line]
    return any('"data_path":"relay"' in line.replace(" ", "") for line in chosen)


@pytest.mark.parametrize("data_path", ["relay", "stream"])
@pytest.mark.parametrize("graph", ["disagg_poa", "agg_poa"], ids=["disaggregated", "aggregated"])
async def test_a_later_dynamo_routes_to_our_workers_and_swaps_parameters(graph: str, data_path: str) -> None:
    """Requests succeed, and those after a swap carry its revision on every leg. Source: issues 2 and 4."""
    overrides = [f"PoaRouter.data_path={data_path}", *OVERRIDES]
    overrides = [o for o in overrides if graph == "disagg_poa" or "Decode" not in o]
    overrides = [o.replace("Prefill", "") if graph == "agg_poa" else o for o in overrides]
    plan = mixed(make_plan(f"graphs.{graph}:Frontend", f"graphs/{graph}.yaml", overrides))
    lines: list[str] = []
    async with (
        serve_graph(plan, lambda name, line: lines.append(f"{name} | {line}")) as running,
        Bus(running.nats_url, name="test", clock=SystemClock()) as bus,
    ):
        chosen: list[Chosen] = []

        def on_batch(_: str, data: bytes) -> None:
            batch = msgspec.msgpack.decode(data, type=DecisionBatch)
            chosen.extend(event for event in batch.events if isinstance(event, Chosen))

        bus.subscribe(subject(plan.namespace, "decisions"), on_batch)
        await bus.wait_connected(10)
        url = urlsplit(running.http_url)
        client = LoadClient(url.hostname or "", url.port or 0, "mock-llama-3.1-70b", timeout_s=20)
        source = prompts(prompt_tokens=128, max_tokens=8, templates=2, shared_frac=0.5, seed=1)
        await _first_answer(client, source)
        before = await asyncio.gather(*(client.complete(prompt) for prompt in take(source, 8)))
        assert [result.error for result in before] == [""] * 8, "\n".join(lines[-40:])
        command = {"op": "set", "router_temperature": 0.5, "overlap_weight": 0.5, "for_s": None}
        answer = await bus.request(subject(plan.namespace, "control"), msgspec.json.encode(command), 5.0)
        assert msgspec.json.decode(answer)["ok"], answer
        await asyncio.sleep(1.0)
        seen = len(chosen)
        after = await asyncio.gather(*(client.complete(prompt) for prompt in take(source, 8)))
        assert [result.error for result in after] == [""] * 8, "\n".join(lines[-40:])
        await asyncio.sleep(0.3)
        revisions = {event.revision for event in chosen[:seen]}, {event.revision for event in chosen[seen:]}
        assert max(revisions[0]) < min(revisions[1])
        assert relayed(lines) is (data_path == "relay"), "\n".join(lines[-40:])
        legs = {event.role for event in chosen[seen:]}
        assert len(legs) == (2 if graph == "disagg_poa" else 1)
