"""What is in flight on each worker, and how it gets on."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.clock import ManualClock
from dynamo_poa.ledger import ARRIVALS_S, BURST_S, MANY, STALL_HALF_LIFE_S, Ledger, Ticket
from dynamo_poa.marginal import Loads
from dynamo_poa.values import Curve, Role, WorkerKey
from dynamo_poa.wire import WorkerSpeed

A, B = WorkerKey(1, 0), WorkerKey(2, 0)
CURVE = Curve(decode_base_s=0.01)


def ledger_of(role: Role = Role.AGGREGATED) -> tuple[Ledger, ManualClock]:
    clock = ManualClock()
    return Ledger(role, clock), clock


def enter(ledger: Ledger, key: WorkerKey = A, **given: Any) -> Ticket:
    asked = {"prompt_tokens": 100, "uncached_tokens": 60, "output_tokens": 20.0, "blocks": 6}
    return ledger.enter(key, **{**asked, **given})


async def test_a_request_is_counted_before_its_first_token_and_after_and_then_no_more() -> None:
    """Prompt tokens are queued until the first token; KV tokens, prompt and half the output, to the end."""
    ledger, _ = ledger_of()
    ticket, work = enter(ledger), ledger.work(A)
    assert work.all()[:4] == (0, 1, 60, 110)
    ticket.first_token()
    assert work.all()[:4] == (1, 0, 0, 110)
    ticket.end()
    assert work.all()[:4] == (0, 0, 0, 0)
    assert work.blocks == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "first_token", "end", "moved"]), st.integers(0, 9)),
        max_size=60,
    ),
    role=st.sampled_from(list(Role)),
)
def test_whatever_happens_to_requests_the_ledger_ends_empty(steps: list[tuple[str, int]], role: Role) -> None:
    """First tokens that come twice, late or never, ends that come twice: all is taken back once."""
    ledger, _ = ledger_of(role)
    tickets = [enter(ledger)]
    for what, number in steps:
        ticket = tickets[number % len(tickets)]
        if what == "enter":
            key = WorkerKey(number % 3, number % 2)
            tickets.append(
                enter(ledger, key, uncached_tokens=number * 7, output_tokens=number / 3, blocks=number)
            )
        elif what == "moved":
            ticket.work.moved()
        else:
            getattr(ticket, what)()
        assert min(ledger.in_flight()) >= 0
    for ticket in tickets:
        ticket.end()
    assert ledger.in_flight() == Loads(0, 0, 0, 0)
    assert all(ticket.work.blocks == 0 for ticket in tickets)


async def test_a_worker_that_comes_back_under_a_new_id_starts_without_load() -> None:
    """What the old one had is taken back from the old one."""
    ledger, _ = ledger_of()
    old = enter(ledger, A)
    new = enter(ledger, B)
    old.end()
    assert (ledger.work(A).waiting, ledger.work(B).waiting) == (0, 1)
    new.end()
    assert ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_what_comes_during_a_pass_waits_for_the_next_and_then_is_part_of_it() -> None:
    """The worker's chunks come together at a pass's end; a pause before one says that the pass has ended."""
    ledger, clock = ledger_of()
    enter(ledger).first_token()
    work, waiting = ledger.work(A), [enter(ledger, uncached_tokens=tokens) for tokens in (60, 30)]
    assert (work.joining, work.joining_tokens) == (2, 90)
    await clock.advance(BURST_S / 2)
    work.moved()  # another chunk of the pass before
    assert (work.joining, work.joining_tokens) == (2, 90)
    waiting[1].end()
    assert (work.joining, work.joining_tokens) == (1, 60)
    await clock.advance(0.02)
    work.moved()
    assert (work.joining, work.joining_tokens, work.waiting) == (0, 0, 1)
    late = enter(ledger)
    assert (work.joining, work.moved_at_s) == (1, clock.monotonic_s())
    waiting[0].first_token()
    assert (work.joining, work.waiting) == (1, 1)
    late.end()
    assert (work.joining, work.joining_tokens) == (0, 0)


async def test_on_an_idle_worker_a_prompt_begins_at_once_and_the_decode_leg_has_none() -> None:
    """Nothing to wait for."""
    for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE):
        ledger, _ = ledger_of(role)
        enter(ledger)
        assert ledger.work(A).joining == 0
    decode, _ = ledger_of(Role.DECODE)
    enter(decode).first_token()
    enter(decode)
    assert decode.work(A).joining == 0


async def test_workers_that_left_are_forgotten_and_one_with_requests_is_not() -> None:
    """Memory is bounded by who is there; a ticket's end still finds its worker."""
    ledger, _ = ledger_of()
    kept = enter(ledger, WorkerKey(0, 0))
    for number in range(1, 40):
        enter(ledger, WorkerKey(number, 0)).end()
    ledger.forget({B})
    assert ledger.in_flight() == Loads(0, 1, 60, 110)
    kept.end()
    assert ledger.in_flight() == Loads(0, 0, 0, 0)


async def test_workers_that_nobody_has_seen_do_not_pile_up() -> None:
    """Other routers name whom they like, and under Dynamo's own selection nobody says who is there."""
    ledger, _ = ledger_of()
    kept, there = enter(ledger, WorkerKey(0, 0)), ledger.work(B)
    ledger.forget({B})
    for number in range(10, 10 + 3 * MANY):
        enter(ledger, WorkerKey(number, 0)).end()
    assert ledger.kept <= MANY
    assert ledger.work(B) is there
    assert ledger.work(WorkerKey(0, 0)) is kept.work


async def test_arrivals_are_counted_over_the_last_while_and_fade() -> None:
    """50 a second for a minute; a minute later next to none."""
    ledger, clock = ledger_of()
    for _ in range(3000):
        await clock.advance(0.02)
        enter(ledger).end()
    assert ledger.arrivals_per_s() == pytest.approx(50, rel=0.01)
    await clock.advance(60.0)
    assert ledger.arrivals_per_s() == pytest.approx(50 * math.exp(-60 / ARRIVALS_S), rel=0.01)


async def stall(ledger: Ledger, clock: ManualClock, stall_s: float) -> None:
    """Let A be silent while B goes on."""
    ledger.work(A).moved()
    await goes_on(ledger, clock, stall_s)
    ledger.work(A).moved()


async def goes_on(ledger: Ledger, clock: ManualClock, seconds: float) -> None:
    """Let B show progress eight times a second."""
    for _ in range(int(seconds * 8)):
        await clock.advance(0.125)
        ledger.work(B).moved()


def decoding(role: Role = Role.DECODE) -> tuple[Ledger, ManualClock, list[Ticket]]:
    """Return a ledger with a request past its first token on A and on B."""
    ledger, clock = ledger_of(role)
    tickets = [enter(ledger, key) for key in (A, B)]
    for ticket in tickets:
        ticket.first_token()
        ticket.work.curve = CURVE
    return ledger, clock, tickets


async def test_a_stall_that_ended_is_remembered_and_fades() -> None:
    """R6: nu L = 2 s x ln 2 / half-life just after, and half of it a half-life later; the length stays."""
    ledger, clock, _ = decoding()
    await stall(ledger, clock, 2.0)
    rate = math.log(2) / STALL_HALF_LIFE_S
    assert ledger.stalls == 1
    assert ledger.work(A).stalls(clock.monotonic_s()) == (pytest.approx(2.0 * rate), 2.0)
    assert ledger.work(B).stalls(clock.monotonic_s()) == (0.0, 0.0)
    await goes_on(ledger, clock, STALL_HALF_LIFE_S)
    assert ledger.work(A).stalls(clock.monotonic_s()) == (pytest.approx(1.0 * rate), 2.0)


async def test_stalls_that_come_regularly_are_awaited_and_forgotten_when_they_stay_away() -> None:
    """2 s in every 6: a good third at any time between two; 9 s after the last it begins to fade."""
    ledger, clock, _ = decoding()
    seen = []
    for _ in range(20):
        await stall(ledger, clock, 2.0)
        for _ in range(40):
            seen.append(ledger.work(A).stalls(clock.monotonic_s())[0])
            await clock.advance(0.1)
            ledger.work(A).moved()
            ledger.work(B).moved()
    assert seen[-80:] == pytest.approx([0.427] * 80, abs=0.001)
    await goes_on(ledger, clock, 1.5 * 6.0 - 4.0 + 2 * STALL_HALF_LIFE_S)
    assert ledger.work(A).stalls(clock.monotonic_s())[0] == pytest.approx(0.427 / 4, abs=0.001)


async def test_without_traffic_no_stall_is_forgotten() -> None:
    """An hour of nothing says nothing of the worker; it counts as the second after which nothing came."""
    ledger, clock, tickets = decoding()
    await stall(ledger, clock, 2.0)
    for ticket in tickets:
        ticket.end()
    await clock.advance(3600.0)
    rate, second = 2.0 * math.log(2) / STALL_HALF_LIFE_S, 0.5 ** (1 / STALL_HALF_LIFE_S)
    assert ledger.work(A).stalls(clock.monotonic_s())[0] == pytest.approx(rate * second)
    enter(ledger, B).first_token()
    assert ledger.work(A).stalls(clock.monotonic_s())[0] == pytest.approx(rate * second)
    await goes_on(ledger, clock, STALL_HALF_LIFE_S)
    assert ledger.work(A).stalls(clock.monotonic_s())[0] == pytest.approx(rate * second / 2)


async def test_stalls_far_apart_are_not_awaited() -> None:
    """The next of two that are 40 s apart would be awaited for a minute: a worker that is well is used."""
    ledger, clock, _ = decoding()
    await stall(ledger, clock, 2.0)
    for _ in range(400):
        await clock.advance(0.1)
        ledger.work(A).moved()
        ledger.work(B).moved()
    await stall(ledger, clock, 2.0)
    just_after = ledger.work(A).stalls(clock.monotonic_s())[0]
    await goes_on(ledger, clock, STALL_HALF_LIFE_S)
    assert ledger.work(A).stalls(clock.monotonic_s())[0] == pytest.approx(just_after / 2)


@pytest.mark.parametrize(
    ("role", "silent_s", "noticed"),
    [
        (Role.DECODE, 0.25, 0),  # shorter than any stall
        (Role.DECODE, 0.5, 1),
        (Role.AGGREGATED, 0.5, 1),
        (Role.PREFILL, 0.5, 0),  # its prompt is computed: it has nothing to show
    ],
)
async def test_silence_is_a_stall_when_there_is_something_to_show(
    role: Role, silent_s: float, noticed: int
) -> None:
    """A decode pass takes 10 ms here."""
    ledger, clock, _ = decoding(role)
    await stall(ledger, clock, silent_s)
    assert ledger.stalls == noticed


async def test_when_all_are_silent_it_is_this_process_that_has_not_looked() -> None:
    """Two seconds without the event loop, then what waited is read, one after the other: nobody's stall."""
    ledger, clock, _ = decoding()
    await goes_on(ledger, clock, 0.25)
    await clock.advance(2.0)
    ledger.work(A).moved()
    ledger.work(B).moved()
    assert ledger.stalls == 0
    assert ledger.latest_s() == clock.monotonic_s()


async def test_chunks_without_a_pause_between_them_are_no_pause_of_all() -> None:
    """B has so many requests that something comes every millisecond: A is silent meanwhile, and alone."""
    ledger, clock, _ = decoding()
    ledger.work(A).moved()
    for _ in range(1024):
        await clock.advance(1 / 1024)
        ledger.work(B).moved()
    ledger.work(A).moved()
    assert ledger.stalls == 1
    assert ledger.work(A).stalls(clock.monotonic_s())[1] == 1.0


async def test_a_stall_that_takes_all_requests_with_it_is_one_all_the_same() -> None:
    """B goes on for a second and has no more to do; when A wakes, nothing at all has come for another."""
    ledger, clock, tickets = decoding()
    ledger.work(A).moved()
    await goes_on(ledger, clock, 1.0)
    tickets[1].end()
    await clock.advance(1.0)
    ledger.work(A).moved()
    assert ledger.stalls == 1
    assert ledger.work(A).stalls(clock.monotonic_s())[1] == 1.0


async def test_an_idle_worker_does_not_stall_and_begins_afresh() -> None:
    """A minute of nothing is no silence."""
    ledger, clock, tickets = decoding()
    tickets[0].end()
    await clock.advance(60.0)
    ledger.work(B).moved()
    enter(ledger, A).first_token()
    assert ledger.stalls == 0
    assert ledger.work(A).moved_at_s == clock.monotonic_s()


async def test_the_last_request_to_give_up_in_silence_leaves_a_stall_behind() -> None:
    """A worker that hangs looks idle once its clients have gone; it is remembered, once, for what it is."""
    ledger, clock, tickets = decoding()
    tickets.append(enter(ledger, A))
    tickets[-1].first_token()
    await goes_on(ledger, clock, 30.0)
    tickets[0].end()
    tickets[-1].end()
    assert ledger.stalls == 1
    assert ledger.work(A).stalls(clock.monotonic_s())[1] == 30.0
    assert ledger.work(A).empty


async def test_before_a_worker_was_priced_no_silence_is_judged() -> None:
    """Its speed is not known: two seconds may be one prompt."""
    ledger, clock, _ = decoding()
    ledger.work(A).curve = None
    await stall(ledger, clock, 2.0)
    assert ledger.stalls == 0


async def test_the_wall_clock_may_jump_and_a_long_pause_of_all_harms_nothing() -> None:
    """Ages are monotonic; a machine that slept wakes to a ledger as it was."""
    ledger, clock, tickets = decoding()
    clock.set_wall(0.0)
    await clock.advance(1e7)
    assert ledger.arrivals_per_s() == 0.0
    for ticket in tickets:
        ticket.work.moved()
        ticket.end()
    assert ledger.in_flight() == Loads(0, 0, 0, 0)
    assert ledger.work(A).stalls(clock.monotonic_s()) == (0.0, 0.0)


def said(key: WorkerKey, running: int, kv: int, queued: int, tokens: int) -> WorkerSpeed:
    return WorkerSpeed(*key, CURVE, 100.0, running, kv, queued, tokens)


async def test_what_a_worker_carries_beyond_ours_is_other_routers() -> None:
    """4 routers: requests that forward passes count less those we have there at receipt, as large as ours."""
    ledger, _ = ledger_of()
    enter(ledger, A).first_token()
    enter(ledger, A)
    ledger.take_totals([said(A, 5, 1000, 3, 500), said(B, 2, 300, 0, 0)], routers=4)
    assert ledger.work(A).foreign == Loads(4, 2, 120, 660, moved_at_s=1000.0)
    assert ledger.work(A).all()[:4] == (5, 3, 180, 880)
    ledger.take_totals([said(A, 0, 0, 0, 0)], routers=4)
    assert ledger.work(A).all()[:4] == (1, 1, 60, 220)
    assert ledger.work(B).foreign is None


async def test_on_the_decode_leg_what_waits_here_may_run_there() -> None:
    """Of 5 in flight at the worker 3 are ours, in whichever phase."""
    ledger, _ = ledger_of(Role.DECODE)
    for _ in range(3):
        enter(ledger, A, uncached_tokens=0)
    ledger.take_totals([said(A, 4, 400, 1, 0)], routers=2)
    assert ledger.work(A).foreign == Loads(2, 0, 0, 220, moved_at_s=1000.0)


async def test_a_prompt_that_waits_to_be_handed_over_is_no_backlog() -> None:
    """Measured, case R3: a prefill worker told 7 queued requests of 0 tokens, and was left alone for them."""
    ledger, _ = ledger_of()
    ledger.take_totals([said(A, 0, 0, 7, 0)], routers=4)
    assert ledger.work(A).all()[:4] == (0, 0, 0, 0)


async def test_one_router_has_all_there_is() -> None:
    """Exactly 0, whatever forward passes say."""
    ledger, _ = ledger_of()
    enter(ledger, A)
    ledger.take_totals([said(A, 9, 9, 9, 9)], routers=1)
    assert ledger.work(A).foreign is None
