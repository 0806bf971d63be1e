"""Public trouble reports, live on real Dynamo.

Idleness (S4a), a connection on which nothing passes (S4b), poisoned parameters (I3), ranks (E7a).
"""

import asyncio
import math
from collections import Counter

import msgspec
import nats
import pytest
from live_graph import CLOCK, FORCED, MOCK_ARGS, LiveGraph, live_graph, plan_of
from nats.js.kv import KeyValue
from pausable_proxy import PausableProxy
from waiting import eventually

from dynamo_poa.bus import KV_VALUE_BYTES
from dynamo_poa.errors import ConfigError
from dynamo_poa.params import KEY, bucket
from dynamo_poa.values import Outcome, ParamsKind, Regime, Role

pytestmark = pytest.mark.dynamo

BASELINE = (0.0, 1.0)


def numbers(value: object) -> list[float]:
    """Return every number in a record, however deep."""
    if isinstance(value, bool) or not isinstance(value, int | float | dict | list | tuple):
        return []
    if isinstance(value, int | float):
        return [value]
    return [n for inner in (value.values() if isinstance(value, dict) else value) for n in numbers(inner)]


async def test_idleness_is_neither_saturation_nor_nan() -> None:
    """Case S4(a), seconds for minutes: idle means `below` and baseline parameters; nothing is NaN.

    `live_graph` refuses a scrape that has a number that is not finite.
    """
    overrides = (
        "PrefillWorker.workers=1",
        "DecodeWorker.workers=5",
        "DecodeWorker.per_process=5",
        "PoaRouter.min_decode_workers=5",
        *FORCED,
        "PoaController.regime.min_samples=8",  # a single request is no signal, as with the defaults
    )
    async with live_graph("disagg", *overrides) as graph:
        assert graph.latest.regime is Regime.BELOW
        async with graph.load(16, max_tokens=4):
            await graph.until(lambda record: record.regime is Regime.TRANSITION, 15)
            await graph.metrics_until(
                "router", lambda samples: samples["poa_router_router_temperature"] == 0.7
            )
            await graph.metrics("controller")
        took_s = await graph.until(
            lambda record: (
                record.regime is Regime.BELOW
                and (record.router_temperature, record.overlap_weight) == BASELINE
            ),
            10,
        )
        assert took_s < 6  # idle_s, then a step
        await graph.until(lambda record: record.ttft_samples == 0)
        samples = await graph.metrics("controller")
        assert (samples['poa_regime{regime="below"}'], samples["poa_ttft_samples"]) == (1, 0)
        assert "poa_ttft_p99_seconds" not in samples
        record = graph.latest
        assert (record.poa_hat is None) == (record.poa_samples == 0)

        seen = len(graph.telemetry)
        for result in [await graph.many(1, 1) for _ in range(5)]:
            assert result[0].ok
        await eventually(lambda: any(record.ttft_samples == 5 for record in graph.telemetry[seen:]))
        after = graph.telemetry[seen:]
        assert {record.regime for record in after} == {Regime.BELOW}
        assert {(record.router_temperature, record.overlap_weight) for record in after} == {BASELINE}
        for record in graph.telemetry:
            assert all(map(math.isfinite, numbers(msgspec.to_builtins(record))))


STALE_S, LEASE_S = 3.0, 2.0


async def test_a_controller_that_hears_nothing_holds_then_lets_go_and_costs_no_request() -> None:
    """Case S4(b), seconds for minutes: its NATS connection stays open and nothing passes for 2 x STALE.

    Parameters hold for the lease, then the configured ones apply; the controller calls every worker stale.
    """
    plan = plan_of(
        "disagg",
        "PrefillWorker.workers=1",
        f"PrefillWorker.args={MOCK_ARGS}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        f"DecodeWorker.args={MOCK_ARGS}",
        f"PoaController.stale_s={STALE_S}",
        f"PoaController.lease_s={LEASE_S}",
        "PoaController.heartbeat_s=0.5",
    )
    async with PausableProxy(int(plan.nats_url.rpartition(":")[2])) as proxy:
        processes = tuple(
            msgspec.structs.replace(process, env={**process.env, "NATS_SERVER": proxy.url})
            if process.name == "controller"
            else process
            for process in plan.processes
        )
        plan = msgspec.structs.replace(plan, processes=processes)
        async with live_graph("disagg", plan=plan) as graph, graph.load(8) as results:
            pinned = (await graph.pin(0.5, 0.75)).params
            await eventually(lambda: graph.batches[-1].params_revision == pinned.revision)
            seen = len(graph.batches)
            proxy.pause()
            paused_at_s = CLOCK.monotonic_s()
            await eventually(lambda: graph.batches[-1].params_source == "static", LEASE_S + 2)
            held_s = CLOCK.monotonic_s() - paused_at_s
            assert held_s > LEASE_S - 0.5 - 0.1  # the last heartbeat was at most one period old
            held = {
                batch.params_revision for batch in graph.batches[seen:] if batch.params_source != "static"
            }
            assert held == {pinned.revision}
            samples = await graph.metrics_until("controller", all_stale, within_s=STALE_S + 2)
            assert samples['poa_pool_stale_workers{role="prefill"}'] == 1
            assert samples['poa_pool_stale_workers{role="decode"}'] == 2
            assert samples['poa_params_applied_total{outcome="held_stale"}'] > 0
            assert samples["poa_message_age_seconds"] > STALE_S
            await eventually(lambda: CLOCK.monotonic_s() - paused_at_s > 2 * STALE_S, 2 * STALE_S)
            proxy.resume()
            resumed_at_s = CLOCK.monotonic_s()
            await eventually(lambda: graph.batches[-1].params_source == "heartbeat", 10)
            await graph.metrics_until("controller", none_stale, within_s=10)
            assert CLOCK.monotonic_s() - resumed_at_s < 10
            samples = await graph.metrics("router")
            values = (samples["poa_router_router_temperature"], samples["poa_router_overlap_weight"])
            assert values == (0.5, 0.75)
            asked = len(results)
            await eventually(lambda: len(results) > asked + 20)
        assert [result.error for result in results if not result.ok] == []
        assert {event.outcome for event in graph.ended()} == {Outcome.OK}


def stale_flags(samples: dict[str, float]) -> set[float]:
    """Return the flags of all workers shown."""
    return {value for name, value in samples.items() if name.startswith("poa_worker_stale")}


def all_stale(samples: dict[str, float]) -> bool:
    """Tell whether the controller calls every worker stale, and holds."""
    return stale_flags(samples) == {1} and 'poa_params_applied_total{outcome="held_stale"}' in samples


def none_stale(samples: dict[str, float]) -> bool:
    """Tell whether the controller hears every worker, and the bus."""
    return stale_flags(samples) == {0} and samples["poa_bus_connected"] == 1


POISON: list[tuple[str, bytes]] = [
    ("not_finite", b'{"router_temperature": NaN, "overlap_weight": 1}'),
    ("not_finite", b'{"router_temperature": Infinity, "overlap_weight": 1}'),
    ("out_of_range", b'{"router_temperature": 1e308, "overlap_weight": 1}'),
    ("out_of_range", b'{"router_temperature": 0.5, "overlap_weight": -0.5}'),
    ("missing", b'{"router_temperature": 0.5}'),
    ("type", b'{"router_temperature": "0.7", "overlap_weight": 1}'),
    ("not_json", b'{"router_temperature": 0.7, "overl'),
    ("empty", b""),
    ("out_of_range", b'{"router_temperature": 0.5, "overlap_weight": 17}'),
    ("out_of_range", b'{"router_temperature": 0.5, "overlap_weight": 1, "baseline_s": -3}'),
    ("too_large", b'{"router_temperature": 0.5, "overlap_weight": 1}'.ljust(KV_VALUE_BYTES - 1024)),
]


async def test_poisoned_parameters_are_refused_whole() -> None:
    """Case I3: last good stays, refusals are counted by reason, the valid ones apply, 0 failed requests."""
    overrides = (
        "PrefillWorker.workers=1",
        f"PrefillWorker.args={MOCK_ARGS}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        f"DecodeWorker.args={MOCK_ARGS}",
    )
    async with live_graph("disagg", *overrides) as graph:
        operator = await nats.connect(graph.running.nats_url)
        kv = await operator.jetstream().key_value(bucket(graph.namespace))
        async with graph.load(4) as results:
            await applied(graph, kv, b'{"router_temperature": 0.5, "overlap_weight": 0.25}', (0.5, 0.25))
            beats, counts = len(graph.heartbeats), Counter[str]()
            for reason, poison in POISON:
                await kv.put(KEY, poison)
                counts[reason] += 1
                await refused(graph, counts)
            for remove in (kv.delete, kv.purge):
                await remove(KEY)
                counts["deleted"] += 1
                await refused(graph, counts)
            with pytest.raises(nats.errors.MaxPayloadError):  # the server itself takes no 2 MiB
                await kv.put(KEY, bytes(2 * 2**20))
            held = {
                (beat.params.router_temperature, beat.params.overlap_weight)
                for beat in graph.heartbeats[beats:]
            }
            assert held == {(0.5, 0.25)}
            entry = await kv.get(KEY)
            assert msgspec.json.decode(entry.value or b"")["router_temperature"] == 0.5  # the store is healed
            odd = b'{"router_temperature": 0.7, "overlap_weight": 0.3, "note": "by hand"}'
            await applied(graph, kv, odd, (0.7, 0.3))
            await applied(graph, kv, b'{"router_temperature": 0.2, "overlap_weight": 0.9}', (0.2, 0.9))
        await operator.close()
        assert [result.error for result in results if not result.ok] == []
        said = [line for name, line in graph.lines if name == "controller" and '"poa.params.refused"' in line]
        assert len(said) <= len(POISON) + 2  # no loop that goes on about it


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("router_temperature", ".nan", "must be finite and in [0, 100]"),
        ("router_temperature", ".inf", "must be finite and in [0, 100]"),
        ("router_temperature", "1.0e+308", "must be in [0, 100]"),
        ("router_temperature", "'0.7'", "expected `float`, got `str`"),
        ("overlap_weight", "-0.5", "must be in [0, 2]"),
        ("overlap_weight", "null", "expected `float`, got `null`"),
    ],
)
def test_the_same_in_the_configuration_ends_the_start(key: str, value: str, bound: str) -> None:
    """Case I3, second run: refused before anything starts, naming the key and the bound."""
    with pytest.raises(ConfigError) as refusal:
        plan_of("disagg", f"PoaRouter.{key}={value}")
    (problem,) = refusal.value.problems
    assert problem.startswith(f"PoaRouter.{key} = ")
    assert problem.endswith(bound)


async def applied(graph: LiveGraph, kv: KeyValue, value: bytes, wanted: tuple[float, float]) -> None:
    """Write a valid record as an operator would and wait until it is in force."""
    await kv.put(KEY, value)
    samples = await graph.metrics_until(
        "router",
        lambda samples: (
            (samples["poa_router_router_temperature"], samples["poa_router_overlap_weight"]) == wanted
        ),
        within_s=2.0,  # the store is looked at once a second, and a tick follows
    )
    await eventually(lambda: graph.heartbeats[-1].params.revision == samples["poa_router_params_revision"])
    assert graph.heartbeats[-1].params.kind is ParamsKind.EXTERNAL
    # Routers are told first; what is put before the store is told would be lost.
    for _ in range(500):
        if stored_revision(await kv.get(KEY)) == graph.heartbeats[-1].params.revision:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the store never got the record in force")


def stored_revision(entry: KeyValue.Entry) -> int | None:
    """Return the revision of the record in the store, None of one that an operator wrote."""
    return msgspec.json.decode(entry.value or b"{}").get("revision")


async def refused(graph: LiveGraph, counts: Counter[str]) -> None:
    """Wait until /metrics counts exactly these refusals."""
    expected = {f'poa_params_refused_total{{reason="{reason}"}}': count for reason, count in counts.items()}
    await graph.metrics_until(
        "controller",
        lambda samples: (
            {n: v for n, v in samples.items() if n.startswith("poa_params_refused_total")} == expected
        ),
        within_s=3.0,
    )


async def test_each_data_parallel_rank_is_an_entity_of_its_own() -> None:
    """Case E7(a): 2 decode workers of 4 ranks are 8 entities; picks are spread over ranks they own."""
    overrides = (
        "PrefillWorker.workers=1",
        f"PrefillWorker.args={MOCK_ARGS}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        "DecodeWorker.args={speedup-ratio: 5, num-gpu-blocks-override: 2048, data-parallel-size: 4}",
        "PoaRouter.min_decode_workers=2",
    )
    async with live_graph("disagg", *overrides) as graph:
        results = await graph.many(64, 16)
        assert [result.error for result in results if not result.ok] == []
        await eventually(lambda: len(graph.ended()) == 128)
        picked = {(event.worker_id, event.dp_rank) for event in graph.chosen(Role.DECODE)}
        workers = {worker for worker, _ in picked}
        assert len(workers) == 2
        assert picked <= {(worker, rank) for worker in workers for rank in range(4)}
        assert len(picked) >= 6  # 16 at a time over 8 equal ranks
        await graph.until(lambda record: record.pools["decode"].workers == 8)
        samples = await graph.metrics_until(
            "controller", lambda samples: sum("poa_worker_stale{" in name for name in samples) == 9
        )
        shown = {
            (int(name.split('worker_id="')[1].split('"')[0]), int(name.split('dp_rank="')[1].split('"')[0]))
            for name in samples
            if name.startswith("poa_worker_stale") and 'role="decode"' in name
        }
        assert shown == {(worker, rank) for worker in workers for rank in range(4)}
