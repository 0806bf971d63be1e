"""Joining routers' events: in flight, TTFT, arrivals, loss, silence, bad input."""

import math

import msgspec
import pytest

from dynamo_poa.decisions import MAX_OUTCOMES, MAX_ROUTERS, DecisionLog, Traffic
from dynamo_poa.demand_groups import PrefixGroup
from dynamo_poa.prefixes import prefix_hashes
from dynamo_poa.values import Candidate, Outcome, RequestOutcome, Role, TtftSample, WorkerKey
from dynamo_poa.wire import Chosen, DecisionBatch, Ended, FirstToken

WALL = 1_800_000_000.0
P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


class Router:
    """A router's side of the subject: numbers its batches and counts what it serves."""

    def __init__(self, router_id="r1"):
        self.router_id = router_id
        self.sequence = -1
        self.running = set()

    def batch(self, *events, at_s=0.0, **fields):
        for event in events:
            if isinstance(event, Chosen):
                self.running.add((event.role, event.request_id))
            elif isinstance(event, Ended):
                self.running.discard((event.role, event.request_id))
        self.sequence += 1
        in_flight = {str(role): sum(leg == role for leg, _ in self.running) for role in Role}
        return DecisionBatch(
            router_id=self.router_id,
            sequence=self.sequence,
            sent_at_s=WALL + at_s,
            events=events,
            **({"in_flight": in_flight} | fields),
        )


def chosen(request_id, role=D, at_s=0.0, received_at_s=None, worker=1, candidates=()):
    received = WALL + (at_s if received_at_s is None else received_at_s)
    return Chosen(request_id, role, WALL + at_s, received, worker, 0, 64, 1, 1, candidates)


def first(request_id, at_s, role=D):
    return FirstToken(request_id, role, WALL + at_s)


def ended(request_id, at_s=0.0, role=D, outcome=Outcome.OK):
    return Ended(request_id, role, WALL + at_s, outcome)


@pytest.fixture
def decisions():
    return DecisionLog(window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16)


def test_ttft_runs_from_the_earliest_receipt_to_the_answering_legs_first_token(decisions):
    """Sequential hand-over: prefill received at 1.0, decode's first token at 1.5 (architecture, Decision)."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P, 1.0), first("a", 1.2, P), ended("a", 1.2, P)), 1.3)
    assert decisions.take_ttft() == TtftSample()  # the prefill leg's first token is not the caller's
    decisions.apply(router.batch(chosen("a", D, 1.21), first("a", 1.5)), 1.6)
    ttft = decisions.take_ttft()
    assert (ttft.samples, ttft.fresh, ttft.source) == (1, True, "decisions")
    assert ttft.p99_s == pytest.approx(0.5, abs=1e-6)
    assert decisions.take_ttft().fresh is False


def test_both_legs_at_once_are_one_request_and_one_arrival(decisions):
    """Bootstrap hand-over runs them side by side; two routers may serve one leg each."""
    one, two = Router("r1"), Router("r2")
    decisions.apply(one.batch(at_s=0.0), 0.0)
    decisions.apply(one.batch(chosen("a", P)), 2.0)
    decisions.apply(two.batch(chosen("a", D), first("a", 0.25)), 2.0)
    assert decisions.traffic(2.0) == Traffic(
        in_flight=1, arrival_rate=0.5, shed_frac=0.0, tokens_mean=64.0, tokens_effective=64.0, arrived=1
    )
    assert decisions.take_ttft().p50_s == pytest.approx(0.25, abs=1e-6)
    decisions.apply(one.batch(ended("a", role=P)), 2.1)
    decisions.apply(two.batch(ended("a")), 2.1)
    assert decisions.traffic(2.1).in_flight == 0


def test_between_its_legs_a_request_is_not_in_flight_but_remembered(decisions):
    """Sequential hand-over leaves a gap of about a millisecond; the receipt must survive it."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P, 0.0), ended("a", 0.4, P)), 0.5)
    assert decisions.traffic(0.5).in_flight == 0
    decisions.apply(router.batch(chosen("a", D, 0.401), first("a", 0.6)), 0.7)
    assert decisions.take_ttft().p50_s == pytest.approx(0.6, abs=1e-6)
    assert decisions.traffic(0.7).in_flight == 1


def test_a_prefill_leg_that_outlives_its_request_is_not_in_flight(decisions):
    """Measured on bootstrap hand-over under load: 86 prefill legs behind 64 callers."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P), chosen("a", D), first("a", 0.2), ended("a", 0.3)), 0.5)
    assert decisions.traffic(0.5).in_flight == 0
    decisions.apply(router.batch(ended("a", 0.9, P)), 1.0)
    assert decisions.traffic(1.0).in_flight == 0


def test_with_the_prefill_leg_alone_its_first_token_answers():
    """router.legs = [prefill]: nothing else passes through the plugin."""
    decisions = DecisionLog(
        window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16, answering=frozenset({Role.PREFILL})
    )
    decisions.apply(Router().batch(chosen("a", P), first("a", 0.5, P), ended("a", 0.5, P)), 1.0)
    assert decisions.take_ttft().p50_s == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("at_s", [-0.25, 0.0, 4000.0, math.nan])
def test_an_impossible_ttft_is_counted_and_not_clamped(decisions, at_s):
    """A clock that jumped says nothing of the wait (S7)."""
    decisions.apply(Router().batch(chosen("a"), first("a", at_s)), 0.0)
    assert decisions.take_ttft() == TtftSample()
    assert decisions.refused == {"impossible_ttft": 1}


def test_refused_requests_count_as_arrivals_and_never_as_ttft(decisions):
    """S8: of four arrivals one is shed at the door; no sample of zero."""
    router = Router()
    decisions.apply(router.batch(), 0.0)
    events = [chosen(r) for r in "abc"] + [first(r, 0.5) for r in "abc"]
    decisions.apply(router.batch(*events, ended("d", outcome=Outcome.SHED)), 2.0)
    assert decisions.traffic(2.0) == Traffic(in_flight=3, arrival_rate=2.0, shed_frac=0.25, arrived=4)
    assert decisions.take_ttft().samples == 3
    assert decisions.outcomes == {(D, Outcome.SHED): 1}


@pytest.mark.parametrize("decode_first", [False, True])
def test_a_request_refused_on_its_prefill_leg_counts_once(decisions, decode_first):
    """S8, measured: the decode leg comes all the same, before or after, and ends as refused with it."""
    router = Router()
    decisions.apply(router.batch(), 0.0)
    refused, begun = ended("a", role=P, outcome=Outcome.SHED), chosen("a")
    decisions.apply(router.batch(*((begun, refused) if decode_first else (refused, begun))), 1.0)
    decisions.apply(router.batch(ended("a", outcome=Outcome.SHED), chosen("b")), 2.0)
    assert decisions.traffic(2.0) == Traffic(in_flight=1, arrival_rate=1.0, shed_frac=0.5, arrived=2)
    assert decisions.take_ttft().samples == 0
    assert decisions.outcomes == {(P, Outcome.SHED): 1, (D, Outcome.SHED): 1}


def test_a_request_shed_after_it_was_chosen_arrived_once(decisions):
    """Its decision already counted it."""
    router = Router()
    decisions.apply(router.batch(), 0.0)
    decisions.apply(router.batch(chosen("a"), ended("a", outcome=Outcome.SHED)), 1.0)
    assert decisions.traffic(1.0) == Traffic(in_flight=0, arrival_rate=1.0, shed_frac=1.0, arrived=1)


def test_a_prefill_leg_refused_on_its_second_attempt_counts_its_request_once(decisions):
    """S8: chosen, its worker unreachable, then refused; the decode leg that comes later is refused, too."""
    router = Router()
    decisions.apply(router.batch(), 0.0)
    decisions.apply(router.batch(chosen("a", P), ended("a", role=P, outcome=Outcome.SHED)), 1.0)
    decisions.apply(router.batch(ended("a", outcome=Outcome.SHED), chosen("b")), 2.0)
    assert decisions.traffic(2.0) == Traffic(
        in_flight=1, arrival_rate=1.0, shed_frac=0.5, arrived=2, tokens_mean=64.0, tokens_effective=64.0
    )


def test_what_is_in_flight_is_kept_second_by_second_as_before_the_first_batch_of_each(decisions):
    """Beside the prompts: one more of the decode legs each second, none ends."""
    router = Router()
    decisions.apply(router.batch(chosen("0", P)), 0.5)
    for second in range(1, 5):
        decisions.apply(router.batch(chosen(f"{second}", A)), second + 0.1)
        decisions.apply(router.batch(chosen(f"{second}b", A)), second + 0.2)
    assert decisions.prompts.in_flight(5.0).tolist() == [1, 3, 5, 7]
    assert decisions.prompts.seconds(5.0)[:, 0].tolist() == [2, 2, 2, 2]


def test_windows_hold_the_last_priced_decisions_of_each_leg(decisions):
    """Bounded at `window`; decisions without candidates, or impossible ones, are counted apart."""
    both = (Candidate(1, 0, 16, 0, 0, 0), Candidate(2, 0, 16, 0, 3, 0))
    events = [chosen(f"{n}", P, candidates=both, worker=1 + n % 2) for n in range(20)]
    elsewhere = chosen("y", D, candidates=both, worker=3)
    decisions.apply(Router().batch(*events, chosen("x", D), elsewhere), 0.0)
    windows = decisions.windows()
    assert [decision.chosen for decision in windows[P]] == [0, 1] * 8
    assert windows[P][0].workers == (WorkerKey(1, 0), WorkerKey(2, 0))
    assert len({id(decision.workers) for decision in windows[P]}) == 1
    assert windows[D] == []
    assert (decisions.unrecorded, decisions.unpriced) == (1, 1)


def test_an_idle_system_forgets_its_decisions_and_samples(decisions):
    """S4(a): while idle the estimate is absent with sample count 0."""
    router = Router()
    both = (Candidate(1, 0, 16, 0, 0, 0), Candidate(2, 0, 16, 0, 3, 0))
    decisions.apply(router.batch(chosen("a", candidates=both), first("a", 0.1), ended("a", 0.2)), 0.0)
    decisions.apply(router.batch(), 29.0)
    decisions.advance(3.1)
    assert decisions.take_ttft().samples == 0
    decisions.advance(30.0)
    assert len(decisions.windows()[D]) == 1
    decisions.advance(30.1)
    assert decisions.windows() == {D: []}
    assert decisions.traffic(30.1) == Traffic(in_flight=0, arrival_rate=0.0, shed_frac=0.0, arrived=1)


def test_a_silent_router_takes_its_requests_with_it(decisions):
    """Nobody is there to report their end; with no router heard, load is unknown and not zero."""
    decisions.apply(Router("r1").batch(chosen("a"), chosen("b")), 0.0)
    decisions.apply(Router("r2").batch(chosen("c")), 10.0)
    decisions.advance(30.0)
    assert decisions.traffic(30.0).in_flight == 3
    decisions.advance(30.1)
    assert decisions.traffic(30.1).in_flight == 1
    assert [router.router_id for router in decisions.routers] == ["r2"]
    decisions.advance(40.1)
    assert decisions.traffic(40.1) == Traffic(in_flight=None, arrival_rate=None, shed_frac=0.0)


def test_requests_in_flight_before_we_came_are_counted_by_the_router(decisions):
    """A restarted controller has not seen their decisions; it must not take the system for idle (I6)."""
    decisions.apply(Router().batch(in_flight={"prefill": 4, "decode": 31}), 0.0)
    assert decisions.traffic(0.0).in_flight == 31


def test_lost_batches_are_counted_and_their_requests_do_not_stay_for_ever(decisions):
    """The end of `a` was lost; an empty batch of a router that serves nothing closes it."""
    router = Router()
    decisions.apply(router.batch(chosen("a")), 0.0)
    router.batch(ended("a"))  # never arrives
    decisions.apply(router.batch(), 1.0)
    assert decisions.lost == 1
    assert decisions.traffic(1.0).in_flight == 0
    decisions.apply(router.batch(ended("a")), 2.0)
    assert decisions.traffic(2.0).in_flight == 0


def test_a_repeated_batch_changes_nothing(decisions):
    """At-most-once stream with repeats: same sequence, same send time."""
    batch = Router().batch(chosen("a"), ended("a"))
    decisions.apply(batch, 0.0)
    decisions.apply(batch, 0.1)
    assert decisions.outcomes == {(D, Outcome.OK): 1}
    assert decisions.refused == {"repeated": 1}
    assert decisions.batches == 1


def test_a_router_that_counts_from_the_start_again_was_restarted(decisions):
    """Its requests died with it; its drop counter starts over and ours goes on."""
    router = Router()
    decisions.apply(router.batch(chosen("a"), at_s=0.0, dropped=5), 0.0)
    decisions.apply(Router().batch(chosen("b"), at_s=9.0, dropped=2), 9.0)
    assert decisions.traffic(9.0).in_flight == 1
    assert decisions.dropped == 7
    assert decisions.lost == 0


def test_too_many_open_requests_push_out_the_oldest():
    """Bounded whatever routers send; what is given up is counted."""
    decisions = DecisionLog(window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16, max_requests=2)
    decisions.apply(
        Router().batch(chosen("a"), chosen("b"), chosen("c"), first("a", 0.5), first("b", 0.5)), 0.0
    )
    assert decisions.forgotten == 1
    assert decisions.refused == {"unknown_request": 1}
    assert decisions.take_ttft().samples == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", "not_msgpack"),
        (b"", "not_msgpack"),
        (msgspec.msgpack.encode({"router_id": "r1"}), "schema"),
        (msgspec.msgpack.encode(Router().batch(version=2)), "version"),
        (msgspec.msgpack.encode(Router().batch(params_revision=2**53)), "revision"),
        (msgspec.msgpack.encode(Router().batch(params_revision=-1)), "revision"),
    ],
)
def test_what_is_no_batch_is_counted_by_reason(decisions, payload, reason):
    """Undecodable or foreign messages: counted, dropped, never raised (issue, Bad input)."""
    decisions.receive(payload, 0.0)
    assert decisions.refused == {reason: 1}
    assert decisions.routers == ()


def test_a_batch_survives_the_wire_with_unknown_fields(decisions):
    """Wire messages are lenient; ids past 2^63 stay exact (E4)."""
    candidates = (Candidate(2**64 - 1, 3, 16, 0, 0, 0),)
    event = Chosen("a", D, WALL, WALL, 2**64 - 1, 3, 64, 7, 1, candidates)
    raw = msgspec.to_builtins(Router().batch(event, params_revision=7)) | {"added_later": 1}
    decisions.receive(msgspec.msgpack.encode(raw), 0.0)
    assert decisions.windows()[D][0].workers == (WorkerKey(2**64 - 1, 3),)
    assert decisions.routers[0].revision == 7


def test_absurd_batches_are_refused_whole_by_reason(decisions):
    """What a router may say has bounds; nesting without end and a crowd of routers included."""
    seen = decisions
    good = {"router_id": "r", "sequence": 0, "sent_at_s": 1.0}
    for absurd in (
        {"in_flight": {"decode": -(2**63)}},
        {"in_flight": {str(number): 1 for number in range(9)}},
        {"dropped": 2**63},
        {"router_id": "x" * 1000},
        {"params_source": "guess"},
    ):
        seen.receive(msgspec.msgpack.encode(good | absurd), 0.0)
    deep = msgspec.msgpack.encode(good | {"later": None})[:-1] + b"\x91" * 200_000
    seen.receive(deep, 0.0)
    for number in range(MAX_ROUTERS + 2):
        seen.receive(msgspec.msgpack.encode(good | {"router_id": f"r{number}"}), 0.0)
    assert seen.refused == {"schema": 5, "not_msgpack": 1, "too_many_routers": 2}
    assert len(seen.routers) == MAX_ROUTERS


def test_traffic_tells_the_size_of_the_prompts_that_have_to_be_computed(decisions):
    """E[u] and E[u^2]/E[u] over prefill and aggregated legs, without what was cached; 32 and 64 of 64."""
    router = Router()
    half = Chosen("a", P, WALL, WALL, 1, 0, 64, 1, 1, (), 32)
    whole = Chosen("b", P, WALL, WALL, 1, 0, 64, 1, 1, (), 0)
    decisions.apply(router.batch(half, whole, chosen("c", D)), 1.0)
    traffic = decisions.traffic(2.0)
    assert traffic.tokens_mean == 48.0
    assert traffic.tokens_effective == (32**2 + 64**2) / 96
    decisions.advance(40.0)
    assert decisions.traffic(40.0).tokens_mean is None


def test_a_request_that_ended_well_is_told_once_with_its_first_decision(decisions):
    """Receipt to first token and to the end over both legs; the first decision: revision, when heard of."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P, 1.0), first("a", 1.2, P), ended("a", 1.2, P)), 1.25)
    assert decisions.take_outcomes() == ()  # a prefill leg's end is not the request's
    decisions.apply(router.batch(chosen("a", D, 1.25), first("a", 1.5), ended("a", 3.0)), 3.25)
    (told,) = decisions.take_outcomes()
    assert (told.revision, told.decided_at_s, told.failed) == (1, 1.25, False)
    assert (told.ttft_s, told.e2e_s) == (0.5, 2.0)
    assert decisions.take_outcomes() == ()


def test_a_failure_is_told_once_and_a_caller_who_went_away_is_none(decisions):
    """Failed on either leg, or refused; the second leg's end of a refused request says nothing new."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P), ended("a", role=P, outcome=Outcome.FAILED)), 1.0)
    decisions.apply(router.batch(chosen("b"), ended("b", outcome=Outcome.CANCELLED)), 2.0)
    decisions.apply(router.batch(ended("c", role=P, outcome=Outcome.SHED), params_revision=7), 3.0)
    decisions.apply(router.batch(chosen("c"), ended("c", outcome=Outcome.SHED)), 4.0)
    assert decisions.take_outcomes() == (
        RequestOutcome(revision=1, decided_at_s=1.0, failed=True),
        RequestOutcome(revision=7, decided_at_s=3.0, failed=True),
    )


def test_a_request_both_of_whose_legs_fail_is_one_failure(decisions):
    """A prefill worker that dies fails both legs of a handed-over request; a trial counts requests."""
    router = Router()
    decisions.apply(router.batch(chosen("a", P), chosen("a")), 1.0)
    decisions.apply(router.batch(ended("a", role=P, outcome=Outcome.FAILED)), 2.0)
    decisions.apply(router.batch(ended("a", outcome=Outcome.FAILED)), 3.0)
    decisions.apply(router.batch(ended("b", role=P, outcome=Outcome.SHED)), 4.0)
    decisions.apply(router.batch(chosen("b"), ended("b", outcome=Outcome.FAILED)), 5.0)
    assert decisions.take_outcomes() == (
        RequestOutcome(revision=1, decided_at_s=1.0, failed=True),
        RequestOutcome(revision=0, decided_at_s=4.0, failed=True),
    )


def test_an_impossible_duration_is_not_told(decisions):
    """S7: a clock that was set back makes no end-to-end time."""
    decisions.apply(Router().batch(chosen("a", at_s=5.0), first("a", 4.0), ended("a", 4.5)), 1.0)
    assert decisions.take_outcomes() == (RequestOutcome(revision=1, decided_at_s=1.0),)


def test_outcomes_between_two_ticks_are_bounded(decisions):
    """Of too many the oldest go, counted."""
    router = Router()
    for number in range(MAX_OUTCOMES + 2):
        decisions.apply(router.batch(chosen(str(number)), ended(str(number), 1.0)), float(number))
    told = decisions.take_outcomes()
    assert (len(told), told[0].decided_at_s, decisions.untold) == (MAX_OUTCOMES, 2.0, 2)


def test_prompts_and_what_was_found_cached_of_them_are_counted_on_the_legs_that_compute_them(decisions):
    """Hit shares are differences of these; no more than the prompt is cached, whatever a router says."""
    router = Router()
    for number, (role, cached_tokens) in enumerate([(P, 16), (A, 90), (D, 64), (P, 0)]):
        event = msgspec.structs.replace(chosen(str(number), role), cached_tokens=cached_tokens)
        decisions.apply(router.batch(event), float(number))
    seen = (decisions.prompts_seen, decisions.prompt_tokens_seen, decisions.cached_tokens_seen)
    assert seen == (3, 3 * 64, 16 + 64)


def test_the_demand_for_prefixes_is_kept_for_its_own_window():
    """`caching.demand_window_s`, not the window of TTFT; the tick lets go of what is older."""
    decisions = DecisionLog(window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16, demand_window_s=8.0)
    router, prefix = Router(), prefix_hashes([1, 2, 3, 4])
    for number, at_s in enumerate([0.0, 1.0, 4.0]):
        event = msgspec.structs.replace(chosen(str(number), P), prefix=prefix)
        decisions.apply(router.batch(event), at_s)
    decisions.advance(8.0)
    assert decisions.demand.groups(8.0, 10) == (PrefixGroup(prefix[2], 4, {WorkerKey(1, 0): 0.375}),)
    decisions.advance(8.5)
    assert decisions.demand.groups(8.5, 10) == (PrefixGroup(prefix[2], 4, {WorkerKey(1, 0): 0.25}),)
    decisions.advance(10.0)
    assert decisions.demand.groups(10.0, 10) == ()
