"""What the fleet knows after recorded traffic, against plain replays of the same messages."""

import pytest
from dynamo_messages import Recorded, Sender, bodies, card, fp, recorded_cards, recording
from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.fleet import Fleet
from dynamo_poa.load import WorkerState
from dynamo_poa.values import PoolLoad, Role, WorkerCard, WorkerKey

STALE_S = 30.0


def one(fleet: Fleet, at_s: float, worker_id: int, dp_rank: int = 0) -> WorkerState:
    return {state.key: state for state in fleet.workers(at_s)}[WorkerKey(worker_id, dp_rank)]


def replayed(messages: list[Recorded], namespace: str, cards: list[WorkerCard]) -> Fleet:
    fleet = Fleet(namespace, STALE_S)
    fleet.set_cards(cards, messages[0].at_s)
    for message in messages:
        fleet.observe(message.subject, message.data, message.at_s, message.at_s)
    return fleet


def plain_caches(messages: list[Recorded]) -> tuple[dict[WorkerKey, set[int]], dict[WorkerKey, int]]:
    """Replay the kv-events with nothing but sets: what is resident at the end, and at most."""
    resident: dict[WorkerKey, set[int]] = {}
    most: dict[WorkerKey, int] = {}
    for _, batch in bodies(messages, "kv-events"):
        for item in batch:
            key = WorkerKey(item["worker_id"], item["event"]["dp_rank"])
            held = resident.setdefault(key, set())
            data = item["event"]["data"]
            if "stored" in data:
                held |= {block["block_hash"] for block in data["stored"]["blocks"]}
            else:
                held -= set(data["removed"]["block_hashes"])
            most[key] = max(most.get(key, 0), len(held))
    return resident, most


def cards_from_traffic(messages: list[Recorded], total_kv_blocks: int, ranks: int = 1) -> list[WorkerCard]:
    ids = {int(body["worker_id"]) for _, body in bodies(messages, "forward-pass-metrics")}
    return [card(worker_id, total_kv_blocks=total_kv_blocks, ranks=ranks) for worker_id in sorted(ids)]


RECORDINGS = {
    # name: namespace, ranks, blocks a rank has, and the most that were resident on any
    "disagg_2p3d": ("workers", 1, 512, 294),
    "agg_4w_smallcache": ("dynamo", 1, 96, 96),
    "agg_dp2": ("dynamo", 2, 128, 128),
    "agg_queue_preempt_2routers": ("dynamo", 1, 64, 64),
    "nats_outage_20s": ("dynamo", 1, 4096, 1230),
    "replica_sync": ("dynamo", 1, 4096, 48),
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recorded_cache_is_mirrored_exactly_and_without_gaps(name: str) -> None:
    """Measured: the mock engine's events form an exact history, also across a NATS outage."""
    namespace, ranks, total_kv_blocks, most_blocks = RECORDINGS[name]
    messages = recording(name)
    fleet = replayed(messages, namespace, cards_from_traffic(messages, total_kv_blocks, ranks))
    resident, most = plain_caches(messages)
    assert max(most.values()) == most_blocks
    for key, held in resident.items():
        assert fleet.resident_blocks(key) == held
        cache = one(fleet, messages[-1].at_s, *key).cache
        assert (cache.resident_blocks, cache.approximate) == (len(held), False)
        assert (cache.duplicates, cache.gaps_opened, cache.missing) == (0, 0, 0)
        assert (cache.orphans, cache.unknown_removes, cache.overflows) == (0, 0, 0)


@pytest.mark.parametrize("name", RECORDINGS)
def test_after_each_recorded_pass_the_rank_reads_what_the_pass_said(name: str) -> None:
    """Contract: forward-pass-metrics is the ground truth."""
    namespace, ranks, total_kv_blocks, _ = RECORDINGS[name]
    messages = recording(name)
    fleet = Fleet(namespace, STALE_S)
    fleet.set_cards(cards_from_traffic(messages, total_kv_blocks, ranks), messages[0].at_s)
    tokens: dict[WorkerKey, int] = {}
    for message in messages:
        fleet.observe(message.subject, message.data, message.at_s, message.at_s)
        for _, body in bodies([message], "forward-pass-metrics"):
            key = WorkerKey(int(body["worker_id"]), body["dp_rank"])
            scheduled, queued = body["scheduled_requests"], body["queued_requests"]
            tokens[key] = tokens.get(key, 0) + scheduled["sum_prefill_tokens"]
            state = one(fleet, message.at_s, *key)
            assert state.age_s == 0.0
            assert state.running_prefill_requests == scheduled["num_prefill_requests"]
            assert state.running_decode_requests == scheduled["num_decode_requests"]
            assert state.queued_requests == queued["num_prefill_requests"] + queued["num_decode_requests"]
            assert state.queued_prefill_tokens == queued["sum_prefill_tokens"]
            assert state.prefill_tokens_total == tokens[key]


def test_recorded_disaggregated_pools_are_told_apart_and_end_idle() -> None:
    """Measured: 2 prefill and 3 decode workers of 512 blocks; the last messages find them idle."""
    messages = recording("disagg_2p3d")
    fleet = replayed(messages, "workers", recorded_cards("disagg_2p3d", "workers"))
    idle = {
        "stale_workers": 0,
        "kv_used_frac": 0.0,
        "kv_used_frac_max": 0.0,
        "queued_requests": 0,
        "queued_prefill_tokens": 0,
        "running_requests": 0,
        "active_decode_blocks": 0,
        "active_prefill_tokens": 0,
        "busy_frac": 0.0,
    }
    assert fleet.pools(messages[-1].at_s) == {
        Role.PREFILL: PoolLoad(role=Role.PREFILL, workers=2, **idle),
        Role.DECODE: PoolLoad(role=Role.DECODE, workers=3, **idle),
    }
    assert fleet.received == {"kv-events": 53, "kv_metrics": 628, "forward-pass-metrics": 921}
    assert fleet.dropped == {}
    # Only cards say that decode workers never report their cache, so it stays unknown, not empty.
    decode = [state for state in fleet.workers(messages[-1].at_s) if state.card.role is Role.DECODE]
    assert [state.cache.resident_blocks for state in decode] == [None, None, None]


def test_reordered_router_messages_are_dropped_by_sequence_alone() -> None:
    """Measured: nats_outage_20s has two router messages that arrive after newer ones for the same rank."""
    messages = recording("nats_outage_20s")
    fleet = replayed(messages, "dynamo", cards_from_traffic(messages, 4096))
    assert fleet.dropped == {"outdated": 2}
    assert {(s.active_decode_blocks, s.active_prefill_tokens) for s in fleet.workers(messages[-1].at_s)} == {
        (0, 0)
    }
    assert [p.missing for p in fleet.publishers(messages[-1].at_s)] == [0] * len(
        fleet.publishers(messages[-1].at_s)
    )


def test_bookings_of_two_recorded_routers_add_up_at_every_message() -> None:
    """Case S1, measured: unsynchronised routers each report only their own share."""
    messages = recording("agg_queue_preempt_2routers")
    fleet = Fleet("dynamo", STALE_S)
    (the_card,) = cards_from_traffic(messages, 64)
    fleet.set_cards([the_card], messages[0].at_s)
    shares: dict[int, int] = {}
    kv_used = None
    most = 0
    for message in messages:
        fleet.observe(message.subject, message.data, message.at_s, message.at_s)
        for outer, body in bodies([message], "kv_metrics"):
            if body["kv_used_blocks"] is None:
                shares[outer["publisher_id"]] = body["active_decode_blocks"]
            else:
                kv_used = body["kv_used_blocks"]
            state = one(fleet, message.at_s, the_card.worker_id)
            assert state.active_decode_blocks == (sum(shares.values()) if shares else None)
            assert (state.kv_used_blocks, state.kv_used_frac) == (
                kv_used,
                None if kv_used is None else kv_used / 64,
            )
            most = max(most, state.active_decode_blocks or 0)
    assert (len(shares), most) == (2, 84)


def test_bookings_of_synchronised_recorded_routers_are_not_added_up() -> None:
    """Measured: with replica sync each router's figures include its peers'."""
    # The controller is told by the configuration: it does not subscribe to what routers tell each other.
    among_routers = "active_sequences_events"
    everything = recording("replica_sync")
    messages = [message for message in everything if not message.subject.endswith(among_routers)]
    fleet = Fleet("dynamo", STALE_S, routers_synced=True)
    fleet.set_cards(cards_from_traffic(messages, 4096), messages[0].at_s)
    shares: dict[int, dict[int, int]] = {}
    told_apart = 0
    for message in messages:
        fleet.observe(message.subject, message.data, message.at_s, message.at_s)
        for outer, body in bodies([message], "kv_metrics"):
            of_worker = shares.setdefault(body["worker_id"], {})
            if body["kv_used_blocks"] is None:
                of_worker[outer["publisher_id"]] = body["active_decode_blocks"]
            if of_worker:
                booked = one(fleet, message.at_s, body["worker_id"]).active_decode_blocks
                assert booked == max(of_worker.values())
                told_apart += max(of_worker.values()) != sum(of_worker.values())
    assert (told_apart, fleet.dropped) == (78, {})
    for message in everything:
        if message.subject.endswith(among_routers):
            fleet.observe(message.subject, message.data, message.at_s, message.at_s)
    assert fleet.dropped == {"unused": 36}


def test_a_rank_whose_recorded_kv_usage_hangs_reads_unknown_in_the_end() -> None:
    """Measured: with two ranks on one channel an idle rank stays at 27 blocks for ever."""
    messages = recording("agg_dp2")
    fleet = replayed(messages, "dynamo", cards_from_traffic(messages, 128, ranks=2))
    at_s = messages[-1].at_s
    worker_id = fleet.workers(at_s)[0].key.worker_id
    assert [state.kv_used_blocks for state in fleet.workers(at_s)] == [0, 27]
    sender = Sender(fleet, "dynamo")
    for dp_rank in (0, 1):
        sender.send("later", fp(worker_id, 1000, 0.0, dp=dp_rank), at_s + STALE_S + 1)
    assert [state.kv_used_blocks for state in fleet.workers(at_s + STALE_S + 1)] == [0, None]


def test_every_recorded_kind_of_cache_event_is_applied() -> None:
    """Measured: all tiers, `cleared`, signed hashes, multimodal blocks, two ranks; event 9 is the clear."""
    messages = recording("kv_event_variants")
    fleet = Fleet("zt", STALE_S)
    worker_id = 8514528330538574993
    fleet.set_cards([card(worker_id, ranks=2)], messages[0].at_s)
    sizes = []
    for message in messages:
        fleet.observe(message.subject, message.data, message.at_s, message.at_s)
        cache = one(fleet, message.at_s, worker_id).cache
        sizes.append((cache.resident_blocks, cache.lower_blocks))
    assert sizes[:9] == [
        (2, {}),
        (2, {"host_pinned": 2}),
        (2, {"host_pinned": 2, "disk": 1}),
        (2, {"host_pinned": 2, "disk": 1, "external": 1}),
        (3, {"host_pinned": 2, "disk": 1, "external": 1}),
        (2, {"disk": 1, "external": 1}),
        (3, {"disk": 1, "external": 1}),
        (0, {}),
        (1, {}),
    ]
    assert fleet.resident_blocks(WorkerKey(worker_id, 0)) == {21}
    assert fleet.resident_blocks(WorkerKey(worker_id, 1)) == {18446744073709551614, 6}
    state = one(fleet, messages[-1].at_s, worker_id)
    # This worker filled a router's field as well: it is still no router.
    assert (state.kv_used_blocks, state.active_decode_blocks) == (10, None)


SMALL_MESSAGES = recording("agg_4w_smallcache")
SMALL = (
    replayed(SMALL_MESSAGES, "dynamo", recorded_cards("agg_4w_smallcache", "dynamo")),
    SMALL_MESSAGES,
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    pick=st_.integers(0, 2238),
    flips=st_.lists(st_.tuples(st_.floats(0, 1), st_.integers(0, 7)), min_size=1, max_size=3),
)
def test_damaged_recorded_traffic_never_raises(pick: int, flips: list[tuple[float, int]]) -> None:
    """Issue: a flipped bit may change an id, a count or a hash; the fleet stays readable and finite."""
    fleet, messages = SMALL
    data = bytearray(messages[pick].data)
    for position, bit in flips:
        data[round(position * (len(data) - 1))] ^= 1 << bit
    fleet.observe(messages[pick].subject, bytes(data), messages[pick].at_s, messages[pick].at_s)
    load = fleet.pools(messages[-1].at_s)[Role.AGGREGATED]
    assert load.busy_frac is None or 0 <= load.busy_frac <= 1
    fleet.take_notices(messages[-1].at_s)
