"""Snapshots are priced beside the ticks: one job at a time, never waited for, failures told once."""

import asyncio

import pytest

from dynamo_poa.decisions import DecisionLog
from dynamo_poa.latency import LatencyBook
from dynamo_poa.pricing import Pricer, snapshots_at
from dynamo_poa.snapshot import NO_PASS
from dynamo_poa.values import Candidate, Role, Setting, WorkerCard, WorkerKey
from dynamo_poa.wire import Chosen, DecisionBatch, ForwardPass

CARDS = {w: WorkerCard(worker_id=w, role=Role.PREFILL, kv_block_size=16) for w in (1, 2)}


class Rank:
    """A worker's state as far as pricing looks at it."""

    queued_requests = queued_prefill_tokens = None

    def __init__(self, worker, running_prefill_requests=1):
        self.running_prefill_requests = running_prefill_requests
        self.key, self.card = WorkerKey(worker, 0), CARDS[worker]


RANKS = [Rank(1), Rank(2)]


@pytest.fixture
def book():
    """A pool whose prefill takes 0.1 ms a token on each worker."""
    book = LatencyBook()
    for number in range(50):
        for worker, card in CARDS.items():
            tokens = 100 + number % 10 * 50
            done = ForwardPass(worker, 0, number, tokens * 1e-4, 1, tokens, 0, 0, 0, 0, 0, 0, 0)
            book.observe(WorkerKey(worker, 0), card, done, number / 10)
    return book


@pytest.fixture
def decisions():
    """Ten prompts of 640 tokens, all of them sent to the first of two workers."""
    log = DecisionLog(window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16)
    candidates = (Candidate(1, 0, 640, 0, 0, 0, 40), Candidate(2, 0, 640, 0, 0, 0, 40))
    events = tuple(Chosen(f"{i}", Role.PREFILL, 1.0, 1.0, 1, 0, 640, 1, 1, candidates, 0) for i in range(10))
    batch = DecisionBatch(router_id="r", sequence=0, sent_at_s=1.0, events=events, in_flight={"prefill": 10})
    log.apply(batch, 5.0)
    return log


async def settled(pricer):
    await pricer.settled()
    assert pricer.take_failure() is None


async def test_a_look_becomes_an_estimate_in_a_thread(book, decisions):
    """Ten in a row on one worker against five on each: 55 against 30; the paper's estimate beside it."""
    pricer = Pricer(60.0, book)
    for second in range(8):
        pricer.look(5.0 + second, RANKS, decisions)
        await settled(pricer)
    assert pricer.marginal.poa_hat == pytest.approx(55 / 30, rel=1e-6)
    assert pricer.marginal.samples == 8
    assert pricer.marginal.method == "marginal"
    assert pricer.frozen.poa_hat == 1.0
    assert pricer.frozen.method == "frozen"
    assert set(pricer.latencies) == {WorkerKey(1, 0), WorkerKey(2, 0)}


def test_a_pool_that_has_ceased_to_report_passes_is_not_priced(book, decisions):
    """Its curves would fade into one, and PoA-hat into 1 for want of data; one that reports is enough."""
    latencies = book.fit(5.0, [(rank.key, Role.PREFILL) for rank in RANKS])
    one, other = Rank(1, None), Rank(2, None)
    (silent,) = snapshots_at(5.0, [one, other], latencies, decisions.running())
    assert (silent.prefill, silent.lack) == (None, NO_PASS)
    (half,) = snapshots_at(5.0, [one, Rank(2)], latencies, decisions.running())
    assert (half.size, half.lack) == (10, "")


async def test_a_job_that_is_late_costs_snapshots_and_no_tick(book, decisions):
    """`look` returns at once; what it could not begin is counted."""
    release = asyncio.Event()

    async def slow(job):
        await release.wait()
        return job()

    pricer = Pricer(60.0, book, run=slow)
    for second in range(3):
        pricer.look(5.0 + second, RANKS, decisions)
        await asyncio.sleep(0)
    assert pricer.skipped == 2
    release.set()
    await settled(pricer)
    assert pricer.marginal.reason == "prefill: 1 snapshots with 2 requests or more, 8 needed"


async def test_a_job_that_fails_is_told_once_and_the_next_goes_on(book, decisions):
    """The estimate before it does not pass for one of now: until the next there is none, and why is said."""
    failing = True

    async def run(job):
        if failing:
            raise ValueError("broken")
        return job()

    pricer = Pricer(60.0, book, run=run)
    pricer.look(5.0, RANKS, decisions)
    await pricer.settled()
    assert repr(pricer.take_failure()) == "ValueError('broken')"
    assert pricer.take_failure() is None
    assert (pricer.marginal.poa_hat, pricer.frozen.poa_hat) == (None, None)
    assert pricer.marginal.reason == pricer.frozen.reason == "pricing failed: ValueError('broken')"
    failing = False
    pricer.look(6.0, RANKS, decisions)
    await settled(pricer)
    assert pricer.marginal.legs["prefill"].reason == "1 snapshots with 2 requests or more, 8 needed"


async def test_closing_while_a_job_runs_does_not_wait_for_it(book, decisions):
    """The controller stops within its time."""

    async def never(job):
        await asyncio.Event().wait()

    pricer = Pricer(60.0, book, run=never)
    pricer.look(5.0, RANKS, decisions)
    await asyncio.wait_for(pricer.aclose(), 1.0)


async def test_the_latest_decisions_are_priced_under_the_settings_asked_about(book, decisions):
    """Two idle workers of one speed, 640 tokens at 0.1 ms: 64 ms whatever the draw."""
    pricer = Pricer(60.0, book, block_size=16)
    settings = (Setting(0.0, 1.0), Setting(0.7, 1.0))
    pricer.look(5.0, RANKS, decisions, settings)
    await settled(pricer)
    assert pricer.predicted == pytest.approx(dict.fromkeys(settings, 0.064), rel=0.01)
    pricer.look(6.0, RANKS, decisions)
    await settled(pricer)
    assert pricer.predicted == {}
