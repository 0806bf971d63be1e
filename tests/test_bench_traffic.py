"""Traffic of the benchmarks: nothing of it may be refused, or the figures would flatter."""

import random
from pathlib import Path

import msgspec

from dynamo_poa.bench.fleet_decode import cards, load
from dynamo_poa.bench.replay import Message, Replay, pub_lines
from dynamo_poa.bench.traffic import STORED_BLOCKS, Traffic
from dynamo_poa.config import CommonConfig
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.fleet import Fleet
from dynamo_poa.values import Role, WorkerCard, WorkerKey
from dynamo_poa.wire import KV_EVENTS, decode_dynamo

FIXTURES = Path(__file__).parent / "fixtures"
WORKERS = {Role.PREFILL: [2**63 + 1, 7], Role.DECODE: [9]}


def recording(name):
    return [(subject, data) for subject, data, _ in load(FIXTURES / f"{name}.ndjson.gz")]


def fleet_of(workers, blocks=4096):
    fleet = Fleet("poa-workers", stale_s=30.0)
    fleet.set_cards(
        [
            WorkerCard(worker_id=worker, role=role, kv_block_size=16, total_kv_blocks=blocks)
            for role, ids in workers.items()
            for worker in ids
        ],
        0.0,
    )
    return fleet


def traffic_of(workers, blocks=4096, **more):
    return Traffic(workers, CommonConfig(), blocks=blocks, rng=random.Random(1), **more)


def test_a_recording_carried_on_is_applied_whole_each_time():
    """Duplicates would be dropped before they cost anything: none may be among them."""
    recorded = load(FIXTURES / "agg_4w_smallcache.ndjson.gz")
    replay = Replay([(subject, data) for subject, data, _ in recorded], "poa-workers")
    fleet = Fleet("poa-workers", stale_s=30.0)
    fleet.set_cards(cards(recorded), 0.0)
    for _ in range(3):
        for subject, data in replay.next_pass(wall_s=1_800_000_000.0):
            fleet.observe(subject, data, 1.0, 1_800_000_000.0)
    assert fleet.received.total() == 3 * len(recorded)
    assert fleet.dropped == {}
    assert [publisher.repeated for publisher in fleet.publishers(1.0)] == [
        0
    ] * 13  # 3 topics of 4 workers, 1 router


def test_the_first_pass_says_what_was_recorded():
    """Only the namespace and the instant of publication differ."""
    recorded = recording("disagg_2p3d")
    first = Replay(recorded, "elsewhere").next_pass(wall_s=1_800_000_000.5)
    for (subject, data), message in zip(recorded, first, strict=True):
        before, after = decode_dynamo(subject, data), decode_dynamo(message.subject, message.data)
        assert (after.namespace, after.published_at_s) == ("elsewhere", 1_800_000_000.5)
        assert (after.publisher_id, after.sequence, after.body) == (
            before.publisher_id,
            before.sequence,
            before.body,
        )


def test_messages_become_lines_of_the_nats_protocol():
    """Source: NATS client protocol, PUB."""
    lines = pub_lines([Message("a.b", b"xyz"), Message("c", b"")])
    assert lines == b"PUB a.b 3\r\nxyz\r\nPUB c 0\r\n\r\n"


def test_nothing_of_made_up_traffic_is_refused():
    """Every topic, for every worker, in any order."""
    fleet, traffic = fleet_of(WORKERS), traffic_of(WORKERS)
    for _ in range(500):
        message = traffic.any_message(1_800_000_000.0)
        fleet.observe(message.subject, message.data, 1.0, 1_800_000_000.0)
    assert fleet.received.total() == 500
    assert set(fleet.received) == {"forward-pass-metrics", "kv_metrics", "kv-events"}
    assert fleet.dropped == {}
    assert [worker.cache.approximate for worker in fleet.workers(1.0)] == [False, False, False]


def test_a_cache_fills_and_then_evicts_what_came_first():
    """A mirror that only grew would make a memory figure of nothing."""
    fleet, traffic = fleet_of({Role.AGGREGATED: [7]}, 16), traffic_of({Role.AGGREGATED: [7]}, 16)
    resident = []
    for _ in range(6):
        message = traffic.kv_event(7, 1_800_000_000.0)
        fleet.observe(message.subject, message.data, 1.0, 1_800_000_000.0)
        resident.append(len(fleet.resident_blocks(WorkerKey(7, 0))))
    assert resident == [STORED_BLOCKS, 2 * STORED_BLOCKS, 3 * STORED_BLOCKS, 16, 16, 16]
    last = decode_dynamo(message.subject, message.data)
    assert last.topic == KV_EVENTS
    assert [type(event.data).__name__ for event in last.body] == ["KvRemoved", "KvStored"]


def test_prefill_workers_speak_under_their_own_component():
    """Source: measured, subjects of Dynamo 1.4.2."""
    traffic = traffic_of(WORKERS)
    assert traffic.forward_pass(7, 0.0).subject == (
        "namespace.poa-workers.component.prefill.endpoint.generate.forward-pass-metrics"
    )
    assert traffic.forward_pass(9, 0.0).subject == (
        "namespace.poa-workers.component.backend.endpoint.generate.forward-pass-metrics"
    )


def test_made_up_decisions_have_a_price_and_end():
    """A decision without a price would leave the estimate's window empty."""
    pools = {Role.PREFILL: [1, 2, 3], Role.DECODE: [4, 5]}
    log = DecisionLog(window=512, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    message = traffic_of(pools, open_requests=10).decision_batch(20, 1_800_000_000.0)
    assert message.subject == "poa.poa.decisions"
    log.receive(message.data, 1.0)
    assert {role: len(window) for role, window in log.windows().items()} == {
        Role.PREFILL: 20,
        Role.DECODE: 20,
    }
    assert (log.unrecorded, log.unpriced, log.refused, log.outcomes.total()) == (0, 0, {}, 20)
    assert [len(running) for running in log.running().values()] == [10, 10]
    assert log.take_ttft().samples == 10


def test_a_greedy_router_takes_the_cheapest_candidate():
    """Source: host, KvRouter's cost: prefill blocks plus decode blocks."""
    traffic = Traffic(
        {Role.AGGREGATED: list(range(1, 9))},
        CommonConfig(),
        blocks=64,
        rng=random.Random(1),
        random_frac=0.0,
    )
    batch = msgspec.msgpack.decode(traffic.decision_batch(50, 0.0).data)
    chosen = [event for event in batch["events"] if event[0] == "chosen"]
    assert len(chosen) == 50
    for event in chosen:
        costs = {row[0]: (row[2] + row[3]) / 16 + row[4] for row in event[10]}
        assert costs[event[5]] == min(costs.values())
