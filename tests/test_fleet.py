"""What the fleet knows after a stream of messages: the acceptance cases, scripted."""

from typing import Any

import msgspec
import pytest
from dynamo_messages import (
    W1,
    W2,
    W3,
    W4,
    Sender,
    card,
    cl,
    envelope,
    fp,
    km,
    rm,
    st,
    subject,
)

from dynamo_poa.fleet import MAX_PENDING_BYTES, MAX_PUBLISHERS, PENDING_S, Fleet, Notice
from dynamo_poa.load import WorkerState
from dynamo_poa.residency import GAP_WAIT_S
from dynamo_poa.values import PoolLoad, Role, WorkerCard, WorkerKey

STALE_S = 30.0
AT_S = 100.0


def fleet_of(*cards: WorkerCard) -> tuple[Fleet, Sender]:
    fleet = Fleet("ns", STALE_S)
    fleet.set_cards(cards, AT_S)
    return fleet, Sender(fleet)


def by_key(fleet: Fleet, at_s: float) -> dict[WorkerKey, WorkerState]:
    return {state.key: state for state in fleet.workers(at_s)}


def one(fleet: Fleet, at_s: float, worker_id: int = W1, dp_rank: int = 0) -> WorkerState:
    return by_key(fleet, at_s)[WorkerKey(worker_id, dp_rank)]


# S1: several publishers


def test_the_workers_own_figure_is_not_overwritten_by_routers_that_speak_last() -> None:
    """Case S1: occupancy 4050/4096 at every look; routers add up, one that stopped leaves after stale_s."""
    fleet, sender = fleet_of(card(W1))
    for step in range(4 * 30):
        at_s = AT_S + step / 4
        sender.send("worker", km(W1, None, None, 4050), at_s)
        sender.send("router A", km(W1, 60, 0, None), at_s)
        if at_s < AT_S + 15:
            sender.send("router B", km(W1, 45, 0, None), at_s)
        state = one(fleet, at_s)
        assert (state.kv_used_frac, state.active_decode_blocks) == (4050 / 4096, 105)
    b_last_s = AT_S + 14.75
    sender.send("router A", km(W1, 60, 0, None), b_last_s + STALE_S)
    assert one(fleet, b_last_s + STALE_S).active_decode_blocks == 105
    assert one(fleet, b_last_s + STALE_S + 0.01).active_decode_blocks == 60


def test_occupancy_before_the_first_worker_sample_is_unknown() -> None:
    """Case S1, repeat: routers alone give no occupancy, and are no sign of the worker's life."""
    fleet, sender = fleet_of(card(W1))
    sender.send("router A", km(W1, 60, 100, None), AT_S + 5)
    state = one(fleet, AT_S + 5)
    assert (state.kv_used_blocks, state.kv_used_frac, state.age_s) == (None, None, None)
    assert (state.active_decode_blocks, state.active_prefill_tokens) == (60, 100)
    assert one(fleet, AT_S + STALE_S + 0.1).stale
    pool = fleet.pools(AT_S + 5)[Role.AGGREGATED]
    assert (pool.kv_used_frac, pool.kv_used_frac_max, pool.queued_requests, pool.busy_frac) == (None,) * 4


def test_null_never_overwrites_a_figure() -> None:
    """Case S1: each publisher's fields are merged one by one."""
    fleet, sender = fleet_of(card(W1))
    sender.send("router A", km(W1, 60, 500, None), AT_S)
    sender.send("router A", km(W1, None, 400, None), AT_S)
    sender.send("worker", km(W1, None, None, 7), AT_S)
    sender.send("worker", km(W1, None, None, None), AT_S)
    state = one(fleet, AT_S)
    assert (state.active_decode_blocks, state.active_prefill_tokens, state.kv_used_blocks) == (60, 400, 7)


def test_a_router_is_alive_for_all_workers_while_it_speaks_of_any() -> None:
    """Measured: a router speaks of a worker only when its bookings there change."""
    fleet, sender = fleet_of(card(W1), card(W2))
    sender.send("router A", km(W1, 60, 0, None), AT_S)
    sender.send("router A", km(W2, 5, 0, None), AT_S + 40)
    assert one(fleet, AT_S + 40).active_decode_blocks == 60


def test_router_messages_for_two_workers_may_overtake_each_other() -> None:
    """Measured: 135, 137, 136; what is older for one rank may be the newest for another."""
    fleet, sender = fleet_of(card(W1), card(W2))
    sender.send("router A", km(W1, 1, 0, None), AT_S, sequence=135)
    sender.send("router A", km(W1, 3, 0, None), AT_S, sequence=137)
    sender.send("router A", km(W2, 9, 0, None), AT_S, sequence=136)
    sender.send("router A", km(W1, 2, 0, None), AT_S, sequence=134)
    assert one(fleet, AT_S, W1).active_decode_blocks == 3
    assert one(fleet, AT_S, W2).active_decode_blocks == 9


def test_a_restarted_router_is_a_new_publisher_and_its_old_share_expires() -> None:
    """Measured: a restart brings a new publisher_id and sequence 0; a killed router leaves its last value."""
    fleet, sender = fleet_of(card(W1))
    sender.send("router", km(W1, 60, 0, None), AT_S, sequence=500)
    sender.send("router, restarted", km(W1, 2, 0, None), AT_S + 1)
    assert one(fleet, AT_S + 1).active_decode_blocks == 62
    sender.send("router, restarted", km(W1, 3, 0, None), AT_S + STALE_S + 1)
    assert one(fleet, AT_S + STALE_S + 1).active_decode_blocks == 3


def test_an_occupancy_that_ceased_reads_unknown_while_a_confirmed_zero_stays() -> None:
    """Case S2, measured: workers send it on change only; zero is kept while passes show nothing runs."""
    fleet, sender = fleet_of(card(W1), card(W2))
    sender.send("w1", km(W1, None, None, 4000), AT_S)
    sender.send("w2", km(W2, None, None, 0), AT_S)
    later_s = AT_S + STALE_S + 1
    sender.send("w1", fp(W1, 1, 0.05, nd=1), later_s)
    sender.send("w2", fp(W2, 1, 0.0), later_s)
    assert (one(fleet, later_s, W1).kv_used_blocks, one(fleet, later_s, W2).kv_used_blocks) == (None, 0)
    sender.send("w2", fp(W2, 2, 0.05, nd=1), later_s)
    assert one(fleet, later_s, W2).kv_used_blocks is None


# S7: clocks


def test_skewed_clocks_and_absurd_durations_change_nothing_but_their_own_counts() -> None:
    """Case S7: age is from local receipt; ten impossible durations are counted and not clamped."""
    results = []
    for broken in (True, False):
        fleet, sender = fleet_of(card(W1), card(W2), card(W4))
        absurd = [1795951683.6] * 5 + [-0.01] * 5
        for step in range(120):
            at_s = AT_S + step / 2
            for worker_id, skew_s in ((W1, 30.0), (W2, -30.0), (W4, 0.0 if step < 40 else -300.0)):
                wall_time_s = 0.05
                if broken and worker_id == W4 and step % 6 == 5 and absurd:
                    wall_time_s = absurd.pop()
                message = fp(worker_id, step + 1, wall_time_s, nd=8)
                sender.send(str(worker_id), message, at_s, skew_s if broken else 0.0)
            assert not any(
                state.stale or state.age_s for state in fleet.workers(at_s) if state.key.worker_id != W4
            )
            assert not any(state.stale for state in fleet.workers(at_s))
        results.append((fleet, at_s))
    (fleet, at_s), (control, _) = results
    assert fleet.dropped == {"impossible_value": 10}
    assert fleet.pools(at_s)[Role.AGGREGATED] == control.pools(at_s)[Role.AGGREGATED]
    assert [p.skew_s for p in fleet.publishers(at_s)] == [30.0, -30.0, -300.0]
    assert [p.age_s for p in fleet.publishers(at_s)] == [0.0, 0.0, 0.0]


def test_the_wall_clock_set_back_makes_nobody_stale() -> None:
    """Case S7: the controller's own clock jumps; ages live on the monotonic one."""
    fleet, sender = fleet_of(card(W1))
    sender.send("w1", fp(W1, 1, 0.05, nd=1), AT_S)
    where, data = sender.encode("w1", fp(W1, 2, 0.05, nd=1), AT_S + 1)
    fleet.observe(where, data, AT_S + 1, sender.epoch_s + AT_S + 1 - 60)
    assert (one(fleet, AT_S + 2).age_s, one(fleet, AT_S + 2).stale) == (1.0, False)
    assert [p.skew_s for p in fleet.publishers(AT_S + 2)] == [60.0]


# S10: scope


def test_another_deployment_on_the_same_server_leaves_no_trace() -> None:
    """Case S10: the namespace matches exactly, also where one is a prefix; worker ids overlap."""
    fleet, _ = fleet_of(card(W1))
    control, control_sender = fleet_of(card(W1))
    ours = Sender(fleet)
    for namespace in ("n", "ns-workers", "nsb", "NS", "poa-b"):
        foreign = Sender(fleet, namespace)
        foreign.send("worker", km(W1, None, None, 4050), AT_S)
        foreign.send("worker", fp(W1, 1, 0.05, nd=16, qn=40, qt=999), AT_S)
        foreign.send("worker", st(W2, 1, None, [1, 2]), AT_S)
        fleet.observe(subject("kv_metrics", namespace), b"not even msgpack", AT_S, 0.0)
    assert (fleet.dropped, fleet.received, fleet.last_message_at_s) == ({"foreign": 20}, {}, None)
    for sender in (ours, control_sender):
        sender.send("worker", fp(W1, 1, 0.05, nd=2), AT_S)
    assert fleet.workers(AT_S) == control.workers(AT_S)
    assert fleet.take_notices(AT_S + PENDING_S + 1) == []


# E1: gaps, duplicates, order


def chained(event_id: int) -> tuple[str, Any]:
    return st(W1, event_id, 1000 + event_id - 1 if event_id > 1 else None, [1000 + event_id])


def test_reordered_events_close_their_gap_and_leave_nothing_out() -> None:
    """Case E1, run 1: 1,2,3,3,6,5,4,7: one duplicate, one gap opened and closed, 7 blocks, no warning."""
    fleet, sender = fleet_of(card(W1))
    for event_id in (1, 2, 3, 3, 6, 5, 4, 7):
        sender.send("w1", chained(event_id), AT_S)
    cache = one(fleet, AT_S).cache
    assert (cache.duplicates, cache.gaps_opened, cache.gaps_closed, cache.missing) == (1, 1, 1, 0)
    assert (cache.resident_blocks, cache.approximate) == (7, False)
    assert fleet.resident_blocks(WorkerKey(W1, 0)) == set(range(1001, 1008))
    assert fleet.take_notices(AT_S + GAP_WAIT_S + 1) == []


def test_an_event_that_never_comes_stays_reported_and_is_warned_of_once() -> None:
    """Case E1, run 2: without 5, missing is 1, one warning, 7 is applied, and no loop."""
    fleet, sender = fleet_of(card(W1))
    for event_id in (1, 2, 3, 3, 6, 4, 7):
        sender.send("w1", chained(event_id), AT_S)
    notices = []
    for step in range(100):
        sender.send("w1", chained(8 + step), AT_S + 1 + step)
        notices += fleet.take_notices(AT_S + 1 + step)
    assert notices == [Notice("cache_events_lost", "", f"worker {W1} rank 0: 1 events missing")]
    cache = one(fleet, AT_S + 100).cache
    assert (cache.missing, cache.gaps_opened, cache.gaps_closed, cache.approximate) == (1, 1, 0, True)
    assert fleet.resident_blocks(WorkerKey(W1, 0)) == set(range(1001, 1108)) - {1005}


def test_each_forward_pass_is_counted_once_whatever_the_order() -> None:
    """Case E1: counters 10,11,11,13,12,14 of 100 tokens each are 500 tokens; the newest is the state."""
    fleet, sender = fleet_of(card(W1))
    for counter_id in (10, 11, 11, 13, 12, 14):
        sender.send("w1", fp(W1, counter_id, 0.05, np=1, pt=100, qn=counter_id), AT_S)
    state = one(fleet, AT_S)
    assert (state.prefill_tokens_total, state.queued_requests) == (500, 14)
    sender.send("w1", fp(W1, 12, 0.05, np=1, pt=100, qn=12), AT_S)
    assert one(fleet, AT_S) == state
    assert fleet.dropped == {"outdated": 2}


def test_each_pass_is_passed_on_once_with_its_rank_and_card() -> None:
    """Contract: a late pass is one, a repeated one is not; strangers and unowned ranks are not heard."""
    heard: list[tuple[WorkerKey, WorkerCard, int, float]] = []
    fleet = Fleet("ns", STALE_S, on_pass=lambda *of: heard.append((*of[:2], of[2].counter_id, of[3])))
    fleet.set_cards([card(W1, ranks=2), card(W2)], AT_S)
    sender = Sender(fleet)
    for step, counter_id in enumerate((1, 3, 3, 2)):
        sender.send("w1", fp(W1, counter_id, 0.05, nd=1, dp=1), AT_S + step)
    for worker_id, dp_rank in ((W2, 0), (W3, 0), (W1, 2)):
        sender.send(f"{worker_id}", fp(worker_id, 1, 0.05, nd=1, dp=dp_rank), AT_S + 9)
    assert heard == [
        (WorkerKey(W1, 1), card(W1, ranks=2), 1, AT_S),
        (WorkerKey(W1, 1), card(W1, ranks=2), 3, AT_S + 1),
        (WorkerKey(W1, 1), card(W1, ranks=2), 2, AT_S + 3),
        (WorkerKey(W2, 0), card(W2), 1, AT_S + 9),
    ]


def test_a_late_pass_adds_its_tokens_and_does_not_become_the_state() -> None:
    """Case E1: 13 then 12."""
    fleet, sender = fleet_of(card(W1))
    for counter_id in (11, 13, 12):
        sender.send("w1", fp(W1, counter_id, 0.05, np=1, pt=100, qn=counter_id), AT_S)
    assert (one(fleet, AT_S).prefill_tokens_total, one(fleet, AT_S).queued_requests) == (300, 13)


@pytest.mark.parametrize(
    "message", [km(W1, 60, 0, None), fp(W1, 5, 0.05, np=1, pt=100), st(W1, 1, None, [1])]
)
def test_the_same_envelope_delivered_twice_is_ignored(message: tuple[str, Any]) -> None:
    """Case E1: same publisher and sequence."""
    fleet, sender = fleet_of(card(W1))
    data = sender.send("p", message, AT_S)
    before = fleet.workers(AT_S)
    fleet.observe(subject(message[0]), data, AT_S, sender.epoch_s + AT_S)
    assert fleet.workers(AT_S) == before
    assert fleet.dropped == {"repeated": 1}
    assert [p.repeated for p in fleet.publishers(AT_S)] == [1]


# E3: partial history


def test_a_late_joiner_keeps_orphans_and_a_batch_survives_an_unknown_member() -> None:
    """Case E3: orphans and unknown removes are counted; a clear empties W1 alone; 49 repeats are quiet."""
    fleet, sender = fleet_of(card(W1), card(W2))
    sender.send("w2", st(W2, 1, None, range(40)), AT_S)
    sender.send("w1", st(W1, 812, 999999, [11, 12]), AT_S)
    sender.send("w1", st(W1, 813, 12, [13]), AT_S)
    sender.send("w1", rm(W1, 814, [77]), AT_S)
    sender.send("w1", rm(W1, 815, [11, 77, 12]), AT_S)
    sender.send("w9", st(9, 1, None, [5]), AT_S)
    cache = one(fleet, AT_S).cache
    assert (cache.orphans, cache.unknown_removes, cache.missing, cache.gaps_opened) == (1, 2, 0, 0)
    assert (fleet.resident_blocks(WorkerKey(W1, 0)), cache.approximate) == ({13}, True)
    assert fleet.dropped == {"unknown_worker": 1}
    for event_id in range(816, 866):
        sender.send("w1", cl(W1, event_id), AT_S + (event_id - 816) / 50)
        assert one(fleet, AT_S + 1).cache.resident_blocks == 0
    sender.send("w1", rm(W1, 866, [13]), AT_S + 1)
    cache = one(fleet, AT_S + 1).cache
    assert (cache.resident_blocks, cache.unknown_removes, cache.approximate) == (0, 3, False)
    assert one(fleet, AT_S + 1, W2).cache.resident_blocks == 40
    assert {state.key.worker_id for state in fleet.workers(AT_S + 1)} == {W1, W2}
    assert [n.reason for n in fleet.take_notices(AT_S + PENDING_S + 1)] == ["unknown_worker"]


def test_what_is_said_before_the_card_arrives_is_not_lost() -> None:
    """Measured: kv_used_blocks and cache events are sent on change only, so their first ones matter."""
    fleet, sender = fleet_of()
    sender.send("w1", km(W1, None, None, 700), AT_S)
    sender.send("w1", st(W1, 1, None, [1, 2]), AT_S)
    sender.send("w1", fp(W1, 1, 0.0), AT_S)
    assert fleet.workers(AT_S) == []
    fleet.set_cards([card(W1)], AT_S + 3)
    state = one(fleet, AT_S + 3)
    assert (state.kv_used_blocks, state.cache.resident_blocks, state.cache.approximate) == (700, 2, False)
    assert (state.age_s, fleet.dropped) == (3.0, {"unknown_worker": 3})
    assert fleet.take_notices(AT_S + PENDING_S + 1) == []


def test_a_router_that_spoke_of_others_meanwhile_is_heard_all_the_same() -> None:
    """Measured: one router publisher speaks of all workers, with or without a card."""
    fleet, sender = fleet_of(card(W2))
    sender.send("router", km(W1, 60, 500, None), AT_S)
    sender.send("router", km(W2, 5, 0, None), AT_S + 1)
    fleet.set_cards([card(W1), card(W2)], AT_S + 2)
    assert one(fleet, AT_S + 2, W1).active_decode_blocks == 60
    assert [p.age_s for p in fleet.publishers(AT_S + 2)] == [1.0]


def test_without_a_card_nothing_is_kept_for_long() -> None:
    """Case E3, W9: an unknown worker gets no lasting state, and a person is told once."""
    fleet, sender = fleet_of()
    sender.send("w9", km(9, None, None, 700), AT_S)
    sender.send("w10", km(10, None, None, 700), AT_S)
    assert fleet.take_notices(AT_S + PENDING_S) == []
    notices = fleet.take_notices(AT_S + PENDING_S + 0.1)
    assert notices == [Notice("unknown_worker", subject("kv_metrics"), "worker 9 has no card")]
    fleet.set_cards([card(9), card(10)], AT_S + PENDING_S + 1)
    assert [state.kv_used_blocks for state in fleet.workers(AT_S + PENDING_S + 1)] == [None, None]


def test_a_removed_worker_vanishes_at_once_and_late_messages_do_not_bring_it_back() -> None:
    """Case O1: state and publishers go with the card; a router's bookings elsewhere stay."""
    fleet, sender = fleet_of(card(W1), card(W2))
    for worker_id in (W1, W2):
        sender.send(f"w{worker_id}", fp(worker_id, 1, 0.05, nd=1), AT_S)
        sender.send(f"w{worker_id}", km(worker_id, None, None, 9), AT_S)
        sender.send(f"w{worker_id}", st(worker_id, 1, None, [1]), AT_S)
        sender.send("router", km(worker_id, 60, 0, None), AT_S)
    fleet.set_cards([card(W2)], AT_S + 1)
    assert [state.key for state in fleet.workers(AT_S + 1)] == [WorkerKey(W2, 0)]
    assert len(fleet.publishers(AT_S + 1)) == 4
    sender.send(f"w{W1}", km(W1, None, None, 9), AT_S + 2)
    sender.send(f"w{W1}", fp(W1, 2, 0.05, nd=1), AT_S + 2)
    assert len(fleet.publishers(AT_S + 2)) == 4
    assert [state.key for state in fleet.workers(AT_S + 2)] == [WorkerKey(W2, 0)]
    assert (one(fleet, AT_S + 2, W2).active_decode_blocks, fleet.dropped) == (60, {"unknown_worker": 2})
    assert fleet.resident_blocks(WorkerKey(W1, 0)) == set()


def test_a_card_that_comes_again_keeps_the_state_and_a_changed_one_begins_anew() -> None:
    """Cases I5(b), E6(c): discovery repeats itself; another block size is another cache."""
    fleet, sender = fleet_of(card(W1))
    sender.send("w1", st(W1, 1, None, [1, 2]), AT_S)
    fleet.set_cards([card(W1)], AT_S + 1)
    assert one(fleet, AT_S + 1).cache.resident_blocks == 2
    fleet.set_cards([msgspec.structs.replace(card(W1), kv_block_size=32)], AT_S + 2)
    assert one(fleet, AT_S + 2).cache.resident_blocks is None
    assert one(fleet, AT_S + 2).card.kv_block_size == 32


# E4: integer width


def test_ids_equal_as_doubles_are_two_workers_and_hashes_have_one_form() -> None:
    """Case E4: W2 at 98 %, W3 at 0.2 %; five distinct blocks, four after the signed remove."""
    fleet, sender = fleet_of(card(W2), card(W3))
    assert float(W2) == float(W3)
    sender.send("w2", km(W2, None, None, 4000), AT_S)
    sender.send("w3", km(W3, None, None, 10), AT_S)
    sender.send("w2", fp(W2, 1, 0.05, nd=9), AT_S)
    sender.send("w3", fp(W3, 1, 0.05, nd=1), AT_S)
    assert (one(fleet, AT_S, W2).kv_used_frac, one(fleet, AT_S, W3).kv_used_frac) == (4000 / 4096, 10 / 4096)
    assert (one(fleet, AT_S, W2).running_decode_requests, one(fleet, AT_S, W3).running_decode_requests) == (
        9,
        1,
    )
    hashes = [14840505966882773591, -3606238106826778025, 9223372036854775808, 18446744073709551615, 100, 0]
    for event_id, block_hash in enumerate(hashes, 1):
        sender.send("w2", st(W2, event_id, None, [block_hash]), AT_S)
    assert one(fleet, AT_S, W2).cache.resident_blocks == 5
    sender.send("w2", rm(W2, 7, [-3606238106826778025]), AT_S)
    assert fleet.resident_blocks(WorkerKey(W2, 0)) == {9223372036854775808, 18446744073709551615, 100, 0}
    assert one(fleet, AT_S, W2).cache.unknown_removes == 0


# E7: data-parallel ranks


def test_ranks_have_their_own_events_load_and_silence() -> None:
    """Case E7(b): no false gap, a hot rank shows, ranks go stale singly, a clear empties all of W1."""
    fleet, sender = fleet_of(card(W1, ranks=4), card(W2))
    sender.send("w2", st(W2, 1, None, [1]), AT_S)
    for dp_rank, event_id in ((0, 1), (1, 1), (0, 2), (3, 7), (1, 2), (0, 3)):
        sender.send(f"rank {dp_rank}", st(W1, event_id, None, [event_id], dp=dp_rank), AT_S)
    for dp_rank, kv_used_blocks in enumerate((1000, 1200, 0, 4000)):
        sender.send("w1", km(W1, None, None, kv_used_blocks, dp=dp_rank), AT_S)
    states = [state for state in fleet.workers(AT_S) if state.key.worker_id == W1]
    assert [state.cache.gaps_opened for state in states] == [0, 0, 0, 0]
    assert [state.cache.resident_blocks for state in states] == [3, 2, None, 1]
    assert [state.kv_used_blocks for state in states] == [1000, 1200, 0, 4000]
    pool = fleet.pools(AT_S)[Role.AGGREGATED]
    assert (pool.workers, pool.kv_used_frac, pool.kv_used_frac_max) == (5, 6200 / (4 * 4096), 4000 / 4096)

    for step in range(1, 32):
        sender.send("w1", km(W1, None, None, 4000, dp=3), AT_S + step)
    states = [state for state in fleet.workers(AT_S + 31) if state.key.worker_id == W1]
    assert [state.stale for state in states] == [True, True, True, False]
    assert [state.kv_used_blocks for state in states] == [None, None, None, 4000]
    assert fleet.pools(AT_S + 31)[Role.AGGREGATED].stale_workers == 4  # with W2

    sender.send("rank 0", cl(W1, 4, dp=0), AT_S + 31)
    states = fleet.workers(AT_S + 31)
    assert [s.cache.resident_blocks for s in states if s.key.worker_id == W1] == [0, 0, 0, 0]
    assert one(fleet, AT_S + 31, W2).cache.resident_blocks == 1


def test_a_rank_that_the_worker_does_not_own_is_no_rank() -> None:
    """Case E7: an instance owns data_parallel_size ranks from its start rank on."""
    fleet, sender = fleet_of(card(W1, ranks=2))
    for message in (km(W1, None, None, 1, dp=2), fp(W1, 1, 0.05, dp=2), st(W1, 1, None, [1], dp=2)):
        sender.send("w1", message, AT_S)
    assert fleet.dropped == {"unknown_rank": 3}
    assert [state.key.dp_rank for state in fleet.workers(AT_S)] == [0, 1]


# Load over time


def test_busy_is_the_share_of_the_last_two_seconds_in_which_passes_ran() -> None:
    """Measured: one message after each pass, with its real duration."""
    fleet, sender = fleet_of(card(W1))
    for step in range(1, 101):
        sender.send("w1", fp(W1, step, 0.025, nd=1), AT_S + step * 0.05)
    assert one(fleet, AT_S + 5.0).busy_frac == pytest.approx(0.5, abs=0.02)
    assert one(fleet, AT_S + 6.0).busy_frac == pytest.approx(0.25, abs=0.02)
    assert one(fleet, AT_S + 7.01).busy_frac is None


def test_a_pass_longer_than_the_window_fills_it_and_no_more() -> None:
    """Rule: a share stays within [0, 1]."""
    fleet, sender = fleet_of(card(W1))
    sender.send("w1", fp(W1, 1, 0.0), AT_S)
    sender.send("w1", fp(W1, 2, 5.0, np=1), AT_S + 5)
    assert one(fleet, AT_S + 5).busy_frac == 1.0
    assert one(fleet, AT_S + 6).busy_frac == 0.5


def test_a_pool_sums_what_is_known_and_averages_busy() -> None:
    """Contract: None is unknown; a rank that said nothing adds nothing, least of all zero."""
    fleet, sender = fleet_of(
        card(W1, Role.DECODE, 100),
        card(W2, Role.DECODE, 300),
        card(W3, Role.DECODE),
        card(W4, Role.PREFILL, None),
    )
    for worker_id, kv_used_blocks, wall_time_s in ((W1, 90, 1.0), (W2, 30, 0.5)):
        sender.send(f"{worker_id}", km(worker_id, None, None, kv_used_blocks), AT_S + 2)
        sender.send(f"{worker_id}", fp(worker_id, 1, 0.0), AT_S)
        sender.send(f"{worker_id}", fp(worker_id, 2, wall_time_s, 1, 64, 3, 2, 128), AT_S + 2)
    sender.send("4", km(W4, None, None, 12), AT_S + 2)
    assert fleet.pools(AT_S + 2) == {
        Role.DECODE: PoolLoad(
            role=Role.DECODE,
            workers=3,
            kv_used_frac=0.3,
            kv_used_frac_max=0.9,
            queued_requests=4,
            queued_prefill_tokens=256,
            running_requests=8,
            busy_frac=0.375,
        ),
        Role.PREFILL: PoolLoad(role=Role.PREFILL, workers=1),
    }


def test_no_worker_is_no_pool() -> None:
    """Issue: no worker, no figure."""
    assert Fleet("ns", STALE_S).pools(AT_S) == {}


# Bad input and bounds


def test_refused_messages_are_counted_by_reason_and_the_first_of_a_kind_is_told() -> None:
    """Issue: undecodable messages are counted, dropped, the first of a kind logged with its subject."""
    fleet, _ = fleet_of(card(W1))
    where = subject("kv_metrics")
    for _ in range(3):
        assert fleet.observe(where, b"\xc1", AT_S, 0.0) is None
        assert fleet.observe(where, envelope("kv_metrics", b"\xc0", 1, 0, 0.0), AT_S, 0.0) is None
        assert fleet.observe("other.subject", b"", AT_S, 0.0) is None
    assert fleet.dropped == {"not_msgpack": 3, "payload": 3, "subject": 3}
    notices = fleet.take_notices(AT_S)
    assert [(n.reason, n.subject) for n in notices] == [
        ("not_msgpack", where),
        ("payload", where),
        ("subject", "other.subject"),
    ]
    assert fleet.take_notices(AT_S) == []
    assert fleet.last_message_at_s is None


def test_made_up_workers_and_publishers_cost_bounded_memory() -> None:
    """Issue: memory is flat; invented ids are held within fixed bounds and then expire."""
    fleet, sender = fleet_of(card(W1))
    for number in range(MAX_PENDING_BYTES // 512):
        sender.send("w", km(number, None, None, 1), AT_S)
    assert fleet._pending_bytes <= MAX_PENDING_BYTES
    assert len(fleet._pending) < 8 * 2**20 // 1024
    topic, body = km(W1, 1, 1, None)
    payload = msgspec.msgpack.encode(body)
    for number in range(MAX_PUBLISHERS + 5):
        fleet.observe(subject(topic), envelope(topic, payload, number, 0, 0.0), AT_S, 0.0)
    assert len(fleet._publishers) == MAX_PUBLISHERS
    assert fleet.dropped["too_many_publishers"] == 5
    fleet.take_notices(AT_S + STALE_S + 1)
    assert (fleet._pending_bytes, len(fleet._pending), len(fleet._publishers)) == (0, 0, 0)
    assert one(fleet, AT_S + STALE_S + 1).active_decode_blocks is None


def test_workers_the_frontend_sees_directly_are_watched_beside_the_others() -> None:
    """With `legs: [prefill]` decode workers live in the frontend's own namespace; others stay foreign."""
    fleet = Fleet("poa-workers", 30.0, exposed="poa")
    for namespace in ("poa-workers", "poa", "po", "poa-b"):
        fleet.observe(
            f"namespace.{namespace}.component.backend.endpoint.generate.kv_metrics", b"\xc1", 0.0, 0.0
        )
    assert fleet.dropped["foreign"] == 2
    assert fleet.dropped["not_msgpack"] == 2


def test_a_worker_cannot_use_more_blocks_than_it_has() -> None:
    """What cannot be true is refused, counted and named; a block too many is an engine's rounding."""
    fleet, sender = fleet_of(card(W1))
    sender.send("w", km(W1, None, None, 4097), AT_S)
    assert one(fleet, AT_S).kv_used_blocks == 4097
    sender.send("w", km(W1, None, None, 2**63), AT_S)
    assert one(fleet, AT_S).kv_used_blocks == 4097
    assert fleet.dropped["impossible_value"] == 1
    (notice,) = fleet.take_notices(AT_S)
    assert notice.detail == f"kv_used_blocks = {2**63}: worker {W1} has 4096"
