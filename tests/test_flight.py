"""Which requests are in flight, on which worker and in which phase."""

import numpy as np
import pytest

from dynamo_poa.flight import Flight, Uncached
from dynamo_poa.values import Outcome, Role, WorkerKey
from dynamo_poa.wire import Chosen, Ended, FirstToken

ANSWERING = frozenset({Role.DECODE, Role.AGGREGATED})


@pytest.fixture
def flight():
    return Flight(ANSWERING, max_requests=3)


def choose(flight, name, role, worker, at_s, *, router="r", cached=0, uncached=None):
    event = Chosen(name, role, at_s + 1000.0, at_s + 1000.0, worker, 0, 64, 1, 1, (), cached)
    return flight.chosen(event, router, at_s, uncached)


def phases(flight, role):
    return {r.request_id: r.decoding_since_s for r in flight.running(role)}


def test_a_prompt_is_computed_from_the_choice_to_the_first_token_of_its_leg(flight):
    """Aggregated: one leg in both phases, one after the other; then it is gone."""
    choose(flight, "a", Role.AGGREGATED, 7, 1.0, cached=16)
    (request,) = flight.running(Role.AGGREGATED)
    assert (request.worker, request.prompt_tokens, request.cached_tokens) == (WorkerKey(7, 0), 64, 16)
    assert (request.since_s, request.decoding_since_s, request.uncached) == (1.0, None, None)
    flight.first_token(FirstToken("a", Role.AGGREGATED, 5.0), 2.0)
    assert phases(flight, Role.AGGREGATED) == {"a": 2.0}
    flight.ended(Ended("a", Role.AGGREGATED, 6.0, Outcome.OK), 3.0)
    assert phases(flight, Role.AGGREGATED) == {}
    assert flight.waiting == 0


def test_with_bootstrap_a_decode_leg_decodes_once_its_prefill_leg_is_done(flight):
    """Both legs are chosen at once; until the prompt is done the decode worker only waits."""
    choose(flight, "a", Role.PREFILL, 1, 1.0)
    choose(flight, "a", Role.DECODE, 2, 1.1)
    assert phases(flight, Role.DECODE) == {"a": None}
    flight.first_token(FirstToken("a", Role.PREFILL, 0.0), 1.5)
    assert phases(flight, Role.DECODE) == {"a": 1.5}
    flight.first_token(FirstToken("a", Role.DECODE, 0.0), 1.6)
    assert phases(flight, Role.DECODE) == {"a": 1.6}


def test_with_sequential_hand_over_a_decode_leg_decodes_from_its_choice(flight):
    """Its prompt was done before it was chosen; the prefill leg has ended."""
    choose(flight, "a", Role.PREFILL, 1, 1.0)
    flight.first_token(FirstToken("a", Role.PREFILL, 0.0), 1.5)
    flight.ended(Ended("a", Role.PREFILL, 0.0, Outcome.OK), 1.5)
    choose(flight, "a", Role.DECODE, 2, 1.7)
    assert phases(flight, Role.DECODE) == {"a": 1.7}


def test_a_decode_leg_without_a_known_prefill_leg_decodes_from_its_choice(flight):
    """`legs: [decode]`, or a batch that was lost."""
    choose(flight, "a", Role.DECODE, 2, 1.0)
    assert phases(flight, Role.DECODE) == {"a": 1.0}


def test_a_retry_is_on_its_second_worker_only(flight):
    """A refused connection: the second choice replaces the first."""
    assert choose(flight, "a", Role.DECODE, 2, 1.0) is True
    assert choose(flight, "a", Role.DECODE, 3, 1.2) is False
    assert [r.worker.worker_id for r in flight.running(Role.DECODE)] == [3]


def test_what_was_recorded_of_other_workers_is_kept_while_the_request_runs(flight):
    """The estimator prices moving it."""
    uncached = Uncached((WorkerKey(1, 0), WorkerKey(2, 0)), np.array([64.0, 0.0]))
    choose(flight, "a", Role.PREFILL, 1, 1.0, uncached=uncached)
    assert flight.running(Role.PREFILL)[0].uncached is uncached


def test_a_router_that_is_gone_takes_its_requests_with_it(flight):
    """Restarted or silent: what it served is over."""
    choose(flight, "a", Role.DECODE, 2, 1.0, router="gone")
    choose(flight, "b", Role.DECODE, 2, 1.0, router="here")
    flight.end_legs("gone", Role.DECODE)
    assert list(phases(flight, Role.DECODE)) == ["b"]


def test_the_oldest_is_given_up_when_too_many_are_open(flight):
    """Bounded whatever routers send."""
    for number in range(5):
        choose(flight, str(number), Role.DECODE, 2, float(number))
    assert list(phases(flight, Role.DECODE)) == ["2", "3", "4"]
    assert flight.forgotten == 2


def test_events_of_unknown_requests_change_nothing(flight):
    """They began before we came."""
    assert flight.first_token(FirstToken("x", Role.DECODE, 0.0), 1.0) is None
    flight.ended(Ended("x", Role.DECODE, 0.0, Outcome.OK), 1.0)
    assert flight.waiting == 0
