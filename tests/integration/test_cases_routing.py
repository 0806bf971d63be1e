"""Public trouble reports about routing, live on real Dynamo under the policies that are to be left on.

Herding on a hot prefix (R1), starved decode workers (R2), routers with one snapshot (R3), a worker that
stalls at the knee (R6), waves (R7). Scenarios are shortened: fewer requests, users and waves, seconds for
minutes; thresholds are the cases'. Workers are slowed, so that they and not the processors are the limit.
"""

import asyncio
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import nats
import pytest
from live_graph import CLOCK, LiveGraph, live_graph, plan_of
from waiting import eventually

from dynamo_poa.bench.load import FIRST_TOKEN_ID, Prompt, Result, prompts
from dynamo_poa.bench.story import quantile
from dynamo_poa.bench.suites.cells import Fleet, Policy, Stall
from dynamo_poa.bench.suites.live_graphs import worker_names
from dynamo_poa.bench.suites.stalls import stalling
from dynamo_poa.params import KEY, bucket
from dynamo_poa.serve.graph import Registered
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Regime, Role, Selection
from dynamo_poa.wire import Chosen

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

BASELINE = (0.0, 1.0)
SETTLE_S = 15 * 0.25  # the cases' own: 15 ticks


def fleet(prefill: int, decode: int, speed: float, *more: str) -> tuple[str, ...]:
    """The cases' workers: so small a batch that queues form at few users.

    Requests at once are the mock engine's own for prefill and 32 for 16 in decode: measured, it fails those
    beyond as they are handed over ("handoff session limit reached") rather than let them wait.
    """
    flags = f"speedup-ratio: {speed}, num-gpu-blocks-override: 4096, max-num-batched-tokens: 512"
    return (
        f"PrefillWorker.workers={prefill}",
        f"PrefillWorker.per_process={prefill}",
        f"PrefillWorker.args={{{flags}}}",
        f"DecodeWorker.workers={decode}",
        f"DecodeWorker.per_process={decode}",
        f"DecodeWorker.args={{{flags}, max-num-seqs: 32}}",
        f"PoaRouter.min_prefill_workers={prefill}",
        f"PoaRouter.min_decode_workers={decode}",
        "PoaController.estimate_s=0.25",
        "PoaController.estimate_window_s=10",
        *more,
    )


def under(policy: str) -> str:
    return f"PoaController.policy.name={policy}"


async def ask(graph: LiveGraph, source: Iterator[Prompt], count: int, users: int) -> list[Result]:
    """Send so many requests, so many at a time; all have to be answered."""
    left, results = itertools.islice(source, count), list[Result]()

    async def user() -> None:
        for prompt in left:
            results.append(await graph.complete(prompt))

    await asyncio.gather(*(user() for _ in range(users)))
    assert [result.error for result in results if not result.ok] == []
    return results


async def wave(graph: LiveGraph, source: Iterator[Prompt], count: int) -> list[Result]:
    """Send so many requests at one instant."""
    return await ask(graph, source, count, count)


async def in_force(graph: LiveGraph, selection: Selection) -> None:
    """Wait until this is who selects."""
    await graph.until(lambda record: record.selection is selection, 20)


async def release(graph: LiveGraph, policy: str) -> None:
    """Give the parameters back to the policy, and wait until it has them."""
    await graph.control(op="release")
    if policy == "marginal":
        await in_force(graph, Selection.MARGINAL)
    else:
        await graph.until(lambda record: record.kind != "pin")


def unique(tokens: int, max_tokens: int, seed: int) -> Iterator[Prompt]:
    return prompts(prompt_tokens=tokens, max_tokens=max_tokens, templates=0, shared_frac=0, seed=seed)


def picks(graph: LiveGraph, role: Role, since: int = 0) -> list[Chosen]:
    """Return a leg's decisions after the first so many of them, as they were made."""
    return sorted(graph.chosen(role)[since:], key=lambda event: event.at_s)


async def picked(graph: LiveGraph, role: Role, since: int, count: int) -> list[Chosen]:
    """Wait for the next so many decisions of a leg after the first `since`, and return them."""
    await eventually(lambda: len(graph.chosen(role)) >= since + count)
    return picks(graph, role, since)


def shares(events: Sequence[Chosen]) -> dict[int, float]:
    counts = Counter(event.worker_id for event in events)
    return {worker: count / len(events) for worker, count in counts.items()}


def p99(results: Sequence[Result], what: str = "ttft_s") -> float:
    return quantile([getattr(result, what) for result in results], 0.99)


def levels(records: Sequence[TelemetryRecord]) -> list[int]:
    return [record.regime.level for record in records]


def rate_rps(results: Sequence[Result]) -> float:
    """Return how many were answered a second, from the first sent to the last answered."""
    ends_s = max(result.started_at_s + result.latency_s for result in results)
    return len(results) / (ends_s - min(result.started_at_s for result in results))


def hot(seed: int) -> Iterator[Prompt]:
    """Nine of ten: one prefix of 768 tokens and 64 of their own; the tenth is its own altogether."""
    rng = random.Random(seed)

    def own(tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TOKEN_ID, 30_000) for _ in range(tokens))

    prefix = own(768)
    while True:
        yield Prompt(prefix + own(64) if rng.random() < 0.9 else own(832), 32)


@pytest.mark.parametrize("policy", ["marginal"])
async def test_a_hot_prefix_does_not_make_one_worker_serve_all(policy: str) -> None:
    """Case R1: 15 requests one by one for 200, 240 with 48 users for 400.

    Affinity is fine while nobody waits. Its comparison with pinned parameters is void where those do not
    herd either.
    """
    async with live_graph("disagg", *fleet(2, 4, 0.5, under(policy))) as graph:
        source, seen = hot(1), len(graph.telemetry)
        await ask(graph, source, 15, 1)
        quiet = graph.telemetry[seen:]
        assert {record.regime for record in quiet} == {Regime.BELOW}
        assert {(record.router_temperature, record.overlap_weight) for record in quiet} == {BASELINE}
        assert {record.poa_hat for record in quiet} == {None}  # nobody beside the other: nothing to price
        at, seen = len(graph.chosen(Role.PREFILL)), len(graph.telemetry)
        ours = await ask(graph, source, 240, 48)
        judged = await picked(graph, Role.PREFILL, at, 240)
        busy = graph.telemetry[seen:]
        queued = [record.at_s for record in busy if record.pools["prefill"].queued_requests]
        settled_s = min(queued, default=0.0) + SETTLE_S
        late = [event for event in judged if event.at_s > settled_s] if queued else judged
        for first in range(max(len(late) - 99, 0)):
            assert max(shares(late[first : first + 100]).values()) <= 0.75
        assert len(shares(judged)) == 2
        poa = [record.poa_hat for record in busy if record.poa_hat is not None]
        assert poa
        assert min(poa) >= 1

        await graph.idle()
        await graph.pin(*BASELINE)
        pinned_source = hot(2)
        await ask(graph, pinned_source, 5, 1)
        at = len(graph.chosen(Role.PREFILL))
        pinned = await ask(graph, pinned_source, 240, 48)
        most = max(shares(await picked(graph, Role.PREFILL, at, 240)).values())
        print(f"R1 {policy}: P99 TTFT {p99(ours):.3f} s, pinned {p99(pinned):.3f} s, busiest {most:.0%}")
        if most <= 0.8:
            pytest.skip(
                f"void in part: pinned, the busiest prefill worker took {most:.0%} of the picks, not > 80 %"
            )
        assert p99(ours) <= 1.1 * p99(pinned)


@pytest.mark.parametrize("policy", ["marginal", "auto"])
async def test_no_decode_worker_starves(policy: str) -> None:
    """Case R2(a): 1P/5D, 300 requests for 512; each worker gets a tenth, and none is without for 3 s."""
    async with live_graph("disagg", *fleet(1, 5, 0.5, under(policy))) as graph:
        await ask(graph, unique(128, 32, seed=1), 300, 64)
        events = await picked(graph, Role.DECODE, 0, 300)
        given = shares(events)
        assert len(given) == 5
        assert min(given.values()) >= 0.1
        begin_s, end_s = events[0].at_s, events[-1].at_s
        for worker in given:
            at_s = [begin_s, *(event.at_s for event in events if event.worker_id == worker), end_s]
            assert max(later - earlier for earlier, later in itertools.pairwise(at_s)) < 3.0
        assert set(graph.latest.poa_legs) == {"prefill", "decode"}  # series of their own


@pytest.mark.parametrize("policy", ["marginal"])
async def test_workers_that_join_under_load_get_their_part(policy: str, tmp_path: Path) -> None:
    """Case R2(b): 1P/3D, and two more decode workers after 5 s for 20: the first pick within 10 s."""
    gate = tmp_path / "gate"
    plan = plan_of(
        "disagg",
        *fleet(1, 5, 0.5, under(policy)),
        "DecodeWorker.per_process=3",
        "PoaRouter.min_decode_workers=3",
    )
    wait = f'until [ -e {gate} ]; do sleep 0.1; done; exec "$0" "$@"'
    processes = tuple(
        msgspec.structs.replace(
            process,
            argv=("sh", "-c", wait, *process.argv) if process.name == "decode-1" else process.argv,
            ready=Registered(endpoint=process.ready.endpoint, instances=3)
            if isinstance(process.ready, Registered) and process.name.startswith("decode")
            else process.ready,
        )
        for process in plan.processes
    )
    plan = msgspec.structs.replace(plan, processes=processes)
    async with (
        live_graph("disagg", plan=plan) as graph,
        graph.load(64, prompt_tokens=128, max_tokens=32, templates=0),
    ):
        await eventually(lambda: graph.latest.pools["decode"].workers == 3 and len(graph.chosen()) > 100, 10)
        await asyncio.sleep(5)
        first, level = {event.worker_id for event in picks(graph, Role.DECODE)}, max(levels(graph.telemetry))
        assert len(first) == 3
        gate.touch()
        await graph.until(lambda record: record.pools["decode"].workers == 5, 15)
        seen_at_s, seen = graph.latest.at_s, len(graph.telemetry)
        await eventually(lambda: len({event.worker_id for event in picks(graph, Role.DECODE)}) == 5, 10)
        at = len(graph.chosen(Role.DECODE))
        await eventually(lambda: len(graph.chosen(Role.DECODE)) >= at + 200, 30)
        events = picks(graph, Role.DECODE)
        given = shares(events[at:])
        for worker in {event.worker_id for event in events} - first:
            first_pick_s = next(event.at_s for event in events if event.worker_id == worker)
            assert first_pick_s - seen_at_s <= 10
            assert given[worker] >= 0.1
        assert max(levels(graph.telemetry[seen:])) <= level


WAVES, WAVE = 8, 16


async def waves(graph: LiveGraph, seed: int) -> list[float]:
    """Send waves of requests with one prefix each; return the busiest prefill worker's share of each.

    One worker holds a wave's prefix when it comes: the same one is best in all routers' eyes.
    """
    found = []
    for number in range(WAVES):
        source = prompts(
            prompt_tokens=512, max_tokens=16, templates=1, shared_frac=0.9, seed=100 * seed + number
        )
        await ask(graph, source, 1, 1)
        await asyncio.sleep(0.3)
        at = len(graph.chosen(Role.PREFILL))
        await wave(graph, source, WAVE)
        found.append(max(shares(await picked(graph, Role.PREFILL, at, WAVE)).values()))
    return found


@pytest.mark.parametrize("policy", ["marginal"])
async def test_four_routers_with_one_snapshot_take_new_parameters_and_herd_less_at_random(
    policy: str,
) -> None:
    """Case R3: 8 waves for 50 of 16 requests with one prefix, 4 through each router, a second apart."""
    async with live_graph("disagg", *fleet(2, 4, 0.5, under(policy)), "PoaRouter.replicas=4") as graph:
        await graph.pin(*BASELINE)
        pinned = await waves(graph, seed=1)
        assert len({batch.router_id for batch in graph.batches}) == 4

        operator = await nats.connect(graph.running.nats_url)
        kv = await operator.jetstream().key_value(bucket(graph.namespace))
        await release(graph, policy)
        await kv.put(KEY, b'{"router_temperature": 0.7, "overlap_weight": 1}')
        await graph.until(lambda record: record.kind == "external", 3)
        revision = graph.latest.revision
        for number in range(4):
            samples = await graph.metrics_until(
                f"router-{number}",
                lambda samples: samples["poa_router_params_revision"] >= revision,
                within_s=1.25,  # a heartbeat and a tick
            )
            assert samples["poa_router_router_temperature"] == 0.7
        await graph.until(lambda record: {router.revision for router in record.routers} == {revision})
        spread = await waves(graph, seed=2)
        assert statistics.mean(spread) < statistics.mean(pinned)

        await operator.close()
        await release(graph, policy)
        ours = await waves(graph, seed=3)
        print(
            f"R3: busiest share {statistics.mean(pinned):.2f} pinned, {statistics.mean(spread):.2f} at 0.7, "
            f"{statistics.mean(ours):.2f} {policy}"
        )
        assert statistics.mean(ours) < statistics.mean(pinned)


FLEET_OF_R6 = Fleet(name="", prefill=2, decode=6)


@pytest.mark.parametrize("policy", ["marginal"])
async def test_a_worker_that_stalls_at_the_knee_loses_its_share_and_gets_it_back(policy: str) -> None:
    """Case R6: 2P/6D, 32 users for 64 and 96, one seed of three; decode-5 stands still 2 s in every 6.

    The bench has it with three seeds (suite `hetero`).
    """
    own = "DecodeWorker.args_of={5: {speedup-ratio: 0.25}}"
    stall = Stall(role="decode", number=5, stall_s=2.0, period_s=6.0)
    async with live_graph("disagg", *fleet(2, 6, 0.25, under(policy), own)) as graph:
        source = unique(128, 32, seed=1)
        child = graph.running.process("decode-1")
        await graph.pin(*BASELINE)
        await ask(graph, source, 60, 32)
        control = await ask(graph, source, 150, 32)
        async with stalling(stall, lambda: child.pid, CLOCK):
            pinned = await ask(graph, source, 320, 32)
        await graph.idle()
        poa_control = graph.latest.poa_hat
        await release(graph, policy)
        async with stalling(stall, lambda: child.pid, CLOCK):
            first_stall_s = graph.latest.at_s + stall.period_s - stall.stall_s
            at = len(graph.chosen(Role.DECODE))
            ours = await ask(graph, source, 420, 32)
            poa = graph.latest.poa_hat
        await ask(graph, source, 120, 32)  # it may be on its way back
        after = await ask(graph, source, 150, 32)
        names = worker_names(graph.running, Policy(name="", plugin="active"), FLEET_OF_R6)
        (stalled,) = (worker for worker, name in names.items() if name == "decode-5")
        late = [e for e in picks(graph, Role.DECODE, at)[:420] if e.at_s > first_stall_s + SETTLE_S]
        share = shares(late).get(stalled, 0.0)
        told = {"control": control, "pinned": pinned, policy: ours, "after": after}
        print(
            "R6",
            {name: (round(p99(r, "latency_s"), 2), round(rate_rps(r), 1)) for name, r in told.items()},
            f"share {share:.3f}, PoA-hat {poa_control} then {poa}",
        )
        assert share < 0.7 / 6
        assert p99(ours, "latency_s") <= 1.1 * p99(pinned, "latency_s")
        assert rate_rps(ours) >= 0.85 * rate_rps(pinned)
        assert p99(after, "latency_s") <= 1.2 * p99(control, "latency_s")
        if p99(pinned, "latency_s") < 2 * p99(control, "latency_s"):
            pytest.skip("void: pinned, the stalls did not even double P99")


# Between changes: the regime's dwell; `auto` has slots of its own, shorter. Clocks round.
LEAST_GAP_S = {"marginal": 4.9, "auto": 3.9}


@pytest.mark.parametrize("policy", ["marginal", "auto"])
async def test_waves_are_spread_and_move_the_parameters_rarely(policy: str) -> None:
    """Case R7: 2P/6D, 6 waves of 80 requests for 20, every 3.5 s; then the same at random, 8 s.

    The regime goes with the waves, one step each way (CASES.md); what routers are told does not.
    """
    async with live_graph("disagg", *fleet(2, 6, 1.0, under(policy))) as graph:
        source = unique(512, 32, seed=1)
        seen = 0
        for number in range(6):
            due_s = CLOCK.monotonic_s() + 3.5
            at = len(graph.chosen(Role.DECODE))
            await wave(graph, source, 80)
            assert max(shares(await picked(graph, Role.DECODE, at, 80)).values()) <= 2 / 6
            if number == 2:
                seen = len(graph.heartbeats)
            await asyncio.sleep(max(due_s - CLOCK.monotonic_s(), 0))
        records = [beat.params for beat in graph.heartbeats]
        moved = [now for before, now in itertools.pairwise(records) if before.setting != now.setting]
        print(
            f"R7 {policy}:",
            [(record.issued_at_s - records[0].issued_at_s, record.reason) for record in moved],
        )
        assert sum(record.revision > records[seen].revision for record in moved) <= 2
        gaps_s = [later.issued_at_s - earlier.issued_at_s for earlier, later in itertools.pairwise(moved)]
        assert all(gap_s >= LEAST_GAP_S[policy] for gap_s in gaps_s)
        highest, steady = max(levels(graph.telemetry)), len(graph.telemetry)
        await graph.idle()
        rng, answers = random.Random(1), list[asyncio.Task[Result]]()
        until_s = CLOCK.monotonic_s() + 8
        while CLOCK.monotonic_s() < until_s:
            answers.append(asyncio.create_task(graph.complete(next(source))))
            await asyncio.sleep(rng.expovariate(20))
        results = await asyncio.gather(*answers)
        assert [result.error for result in results if not result.ok] == []
        assert max(levels(graph.telemetry[steady:])) <= highest
