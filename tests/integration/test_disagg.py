"""The disaggregated graph on real Dynamo: two legs through the router, both hand-over kinds, replicas."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live_graph import CLOCK, DATA_PATHS, DISAGG_2P3D, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.bench.load import prompts, take
from dynamo_poa.serve.mock_model import vocabulary_words
from dynamo_poa.values import Outcome, Role

pytestmark = [pytest.mark.dynamo, pytest.mark.asyncio(loop_scope="module")]

CANCEL_S = 0.05  # issue: from a client's hang-up to the end of its booking
SWAP_S = 1.2  # issue: from the controller's decision to the first request routed with it
BOTH_LEGS = {Role.PREFILL, Role.DECODE}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DATA_PATHS)
async def graph(request: pytest.FixtureRequest) -> AsyncIterator[LiveGraph]:
    """2 prefill and 3 decode workers, bootstrap hand-over; no test may disturb it."""
    overrides = (*DISAGG_2P3D, "PoaRouter.candidates_per_s=100000", f"PoaRouter.data_path={request.param}")
    async with live_graph("disagg", *overrides) as running:
        yield running
        await running.idle()
        assert await running.data_path() == request.param


async def test_chat_and_completions_answer_in_words(graph: LiveGraph) -> None:
    """Issue: `curl` to /v1/chat/completions streams text; the mock model's tokens decode to words."""
    messages = [{"role": "user", "content": "Hello there"}]
    status, text = await graph.post("/v1/chat/completions", messages=messages, max_tokens=6, stream=True)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    said = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    words = "".join(piece for piece in said if piece).split()
    assert (status, lines[-1], len(words)) == (200, "[DONE]", 6)
    assert set(words) <= set(vocabulary_words())

    status, text = await graph.post("/v1/completions", prompt="Hello there", max_tokens=4)
    answer = json.loads(text)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert set(answer["choices"][0]["text"].split()) <= set(vocabulary_words())


async def test_requests_are_routed_with_the_parameters_just_set(graph: LiveGraph) -> None:
    """Issue: both legs carry the new revision, and /metrics shows τ, ω and revision, within 1.2 s."""
    async with graph.load(4) as results:
        for wanted in ((0.25, 0.75), (1.5, 0.0), (0.0, 1.0)):
            params = (await graph.pin(*wanted)).params

            def shown(samples: dict[str, float], wanted: tuple[float, float] = wanted) -> bool:
                return (
                    samples["poa_router_router_temperature"],
                    samples["poa_router_overlap_weight"],
                ) == wanted

            samples = await graph.metrics_until("router", shown, within_s=SWAP_S)
            assert samples["poa_router_params_revision"] == params.revision
            await graph.decided(len(graph.chosen()) + 20)
            carrying = [event for event in graph.chosen() if event.revision == params.revision]
            assert {event.role for event in carrying} == BOTH_LEGS
            assert min(event.at_s for event in carrying) - params.issued_at_s < SWAP_S
            late = [event for event in graph.chosen() if event.at_s > params.issued_at_s + SWAP_S]
            assert {event.revision for event in late} <= {params.revision}
    assert [result.error for result in results if not result.ok] == []
    assert (await graph.control(op="release"))["ok"]


async def test_the_decode_worker_does_not_prefill_again(graph: LiveGraph) -> None:
    """Issue: with bootstrap the decode pool computes no prompt token, the prefill pool each one once."""
    await graph.idle()
    seen, before = len(graph.chosen()), graph.prefill_tokens("prefill")
    for prompt in take(prompts(prompt_tokens=200, max_tokens=4, templates=2, shared_frac=0.5, seed=7), 12):
        assert (await graph.complete(prompt)).ok
    await eventually(lambda: len(graph.chosen()) == seen + 24)
    uncached_tokens = 0
    for event in graph.chosen()[seen:]:
        if event.role is Role.PREFILL:
            chosen = [
                c for c in event.candidates if (c.worker_id, c.dp_rank) == (event.worker_id, event.dp_rank)
            ]
            uncached_tokens += chosen[0].uncached_tokens
    assert 12 * 100 < uncached_tokens < 12 * 200  # the shared halves were found in the caches
    await eventually(lambda: graph.prefill_tokens("prefill") == before + uncached_tokens)
    await graph.idle()
    assert graph.prefill_tokens("backend") == 0
    assert sum(done.decode_requests for component, done in graph.passes if component == "backend") >= 12 * 3


async def test_a_client_that_hangs_up_ends_its_booking(graph: LiveGraph) -> None:
    """Issue: bookings end on every way out; the decision's end says `cancelled`."""
    await graph.idle()
    prompt = list(range(1000, 1096))  # 6 blocks
    async with graph.streaming(prompt=prompt, max_tokens=5000, ignore_eos=True) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        await eventually(lambda: [count for count in graph.booked.values() if count] == [6])
    request_id = first["id"].removeprefix("cmpl-")
    await graph.idle()
    ends = {event.role: event.outcome for event in graph.ended() if event.request_id == request_id}
    assert ends == {Role.PREFILL: Outcome.OK, Role.DECODE: Outcome.CANCELLED}
    samples = await graph.metrics("router")
    assert samples['poa_router_requests_total{outcome="cancelled",role="decode"}'] == 1


async def test_a_client_that_hangs_up_is_heard_at_once(graph: LiveGraph) -> None:
    """Issue: within 50 ms at the router, and no connection stays. The best of five: the cores are shared."""
    await graph.idle()
    prompt = list(range(1000, 1096))
    waits_s = []
    for _ in range(5):
        async with graph.streaming(prompt=prompt, max_tokens=5000, ignore_eos=True) as response:
            first = json.loads((await response.content.readline()).removeprefix(b"data: "))
            left_at_s = CLOCK.wall_s()
        request_id = first["id"].removeprefix("cmpl-")
        await eventually(lambda wanted=request_id: ended_at_s(graph, wanted))  # type: ignore[misc]
        waits_s += [at_s - left_at_s for at_s in ended_at_s(graph, request_id)]
    assert min(waits_s) < CANCEL_S
    await graph.metrics_until(
        "router", lambda samples: samples.get('poa_router_relay_connections{of="answers"}', 0) == 0
    )


def ended_at_s(graph: LiveGraph, request_id: str) -> list[float]:
    """Return when a request's decode leg ended, once it has."""
    return [
        event.at_s for event in graph.ended() if (event.request_id, event.role) == (request_id, Role.DECODE)
    ]


async def test_a_client_that_hangs_up_before_the_first_token_casts_no_doubt_on_workers(
    graph: LiveGraph,
) -> None:
    """A cancelled stream ends like a dead worker's; neither a retry nor an avoided worker may follow."""
    await graph.idle()
    seen = len(graph.chosen())
    for number in range(3):
        prompt = [1000 + (number + step * 7) % 20_000 for step in range(24_000)]
        async with graph.streaming(prompt=prompt, max_tokens=4):
            await graph.decided(seen + 2 * (number + 1))
    await graph.idle()
    decided = graph.chosen()[seen:]
    assert [event.attempt for event in decided] == [1] * 6
    outcomes = [
        event.outcome
        for event in graph.ended()
        if event.role is Role.DECODE and event.request_id in {event.request_id for event in decided}
    ]
    assert outcomes == [Outcome.CANCELLED] * 3
    results = await graph.many(8, 4)
    assert [result.error for result in results if not result.ok] == []


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", "a"]])
async def test_an_empty_prompt_is_an_error_and_no_more(graph: LiveGraph, prompt: object) -> None:
    """Issue: KvRouter dies of an empty token list; the next request is served all the same."""
    status, text = await graph.post("/v1/completions", prompt=prompt, max_tokens=4)
    assert status == 400
    assert "cannot be empty" in text
    assert [result.error for result in await graph.many(2, 1)] == ["", ""]


@pytest.mark.parametrize("path", DATA_PATHS)
async def test_without_bootstrap_the_decode_worker_does_prefill_and_nobody_complains(path: str) -> None:
    """Shows that the test above can fail; and of a clean run no process's output has anything bad in it.

    `live_graph` asserts the latter after the last process has ended, for this graph and for every other that
    nothing is broken in: no traceback, no panic, no "Conflicting request tracker write".
    """
    overrides = ("Common.handover=sequential", "PrefillWorker.workers=1", "DecodeWorker.workers=1")
    async with live_graph("disagg", *overrides, f"PoaRouter.data_path={path}") as graph:
        results = await graph.many(4, 2, prompt_tokens=100)
        assert [result.error for result in results if not result.ok] == []
        await eventually(lambda: len(graph.ended()) == 8)
        await eventually(lambda: graph.prefill_tokens("prefill") == 400)
        await eventually(lambda: graph.prefill_tokens("backend") == 400)
        assert await graph.data_path() == path
        lines = graph.lines
    names = {name for name, _ in lines}
    assert {"nats", "router", "controller"} <= names
    assert [line for name, line in lines if "poa.request.failed" in line] == []


async def test_the_prefill_leg_alone_can_go_through_the_router() -> None:
    """Issue: `legs: [prefill]` with sequential hand-over; the decode leg is then none of our business."""
    overrides = ("PoaRouter.legs=[prefill]", "PrefillWorker.workers=2", "DecodeWorker.workers=1")
    async with live_graph("disagg", *overrides, "PrefillWorker.per_process=2") as graph:
        params = (await graph.pin(0.5, 0.5)).params
        results = await graph.many(12, 3)
        assert [result.error for result in results if not result.ok] == []
        await eventually(lambda: len(graph.ended()) == 12)
        assert {event.role for event in graph.chosen()} == {Role.PREFILL}
        assert {event.revision for event in graph.chosen()[-6:]} == {params.revision}
        assert {event.outcome for event in graph.ended()} == {Outcome.OK}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas() -> AsyncIterator[LiveGraph]:
    """Two router processes before 1 prefill and 2 decode workers, bootstrap hand-over."""
    overrides = (*DISAGG_2P3D, "PoaRouter.replicas=2", "PrefillWorker.workers=1", "DecodeWorker.workers=2")
    smaller = ("PoaRouter.min_prefill_workers=1", "PoaRouter.min_decode_workers=2")
    async with live_graph("disagg", *overrides, *smaller) as running:
        yield running


async def test_two_routers_share_the_legs_of_requests(replicas: LiveGraph) -> None:
    """Issue: the frontend spreads legs over replicas; they meet over the bus; both take new parameters."""
    graph = replicas
    results = await graph.many(40, 8)
    assert [result.error for result in results if not result.ok] == []
    await eventually(lambda: len(graph.ended()) == 80)
    legs: dict[str, set[str]] = {}
    for batch in graph.batches:
        for event in batch.events:
            legs.setdefault(event.request_id, set()).add(batch.router_id)
    assert len({router for routers in legs.values() for router in routers}) == 2
    assert sum(len(routers) == 2 for routers in legs.values()) > 0  # some had their legs at different routers
    params = (await graph.pin(0.75, 0.25)).params
    for router in ("router-0", "router-1"):
        await graph.metrics_until(
            router, lambda samples: samples["poa_router_params_revision"] == params.revision, within_s=SWAP_S
        )
    await graph.until(lambda record: [router.revision for router in record.routers] == [params.revision] * 2)


async def test_a_router_that_is_told_to_stop_finishes_what_it_has(replicas: LiveGraph) -> None:
    """Issue: SIGTERM drains; nothing is cut, and what comes afterwards goes to the other router.

    What the frontend has sent but not yet heard back of when the instance leaves discovery, it fails itself
    ("Worker disconnected before response stream was established", measured on 1.4.2): not asserted here.
    """
    graph = replicas
    pid = graph.running.process("router-0").pid
    streams = take(prompts(prompt_tokens=32, max_tokens=150, templates=0, shared_frac=0, seed=11), 8)
    tasks = [asyncio.create_task(graph.complete(prompt)) for prompt in streams]
    seen = len(graph.first_tokens(Role.DECODE))
    await eventually(lambda: len(graph.first_tokens(Role.DECODE)) == seen + 8)
    await graph.running.kill("router-0", signal.SIGTERM)
    whole = {(result.error, result.tokens >= 150) for result in await asyncio.gather(*tasks)}
    assert whole == {("", True)}
    assert [result.error for result in await graph.many(8, 4) if not result.ok] == []
    said = [json.loads(line) for name, line in graph.lines if name == "router-0" and '"poa.router.' in line]
    assert [(entry["event"], entry.get("cut_off")) for entry in said[1:3]] == [
        ("poa.router.draining", None),
        ("poa.router.stopped", 0),
    ]
    assert said[1]["in_flight"] > 0
    await eventually(lambda: graph.running.process("router-0").pid not in (None, pid))
