"""How many decode iterations a request takes: when it is known, what is forgotten."""

import math

import pytest

from dynamo_poa.output_tokens import MEMORY_S, OutputTokens
from dynamo_poa.values import Role, WorkerCard, WorkerKey
from dynamo_poa.wire import ForwardPass


def decode(output_tokens, role, requests, *, prefill_tokens=0, held=0):
    card = WorkerCard(worker_id=1, role=role, kv_block_size=16)
    done = ForwardPass(1, 0, 1, 0.01, int(prefill_tokens > 0), prefill_tokens, 0, requests, held, 0, 0, 0, 0)
    output_tokens.observe(WorkerKey(1, 0), card, done, 0.0)


def test_the_mean_is_what_was_decoded_over_the_requests_that_ended():
    """A decode pass gives each request in it one token; prompt tokens are none."""
    tokens = OutputTokens()
    decode(tokens, Role.DECODE, 600)
    decode(tokens, Role.DECODE, 40, prefill_tokens=5000)
    decode(tokens, Role.AGGREGATED, 100)
    tokens.update(10.0, {Role.DECODE: 10, Role.AGGREGATED: 20})
    assert tokens.mean == {Role.DECODE: 64.0, Role.AGGREGATED: 5.0}


def test_until_enough_requests_have_ended_it_is_unknown():
    """At a start the tokens are those of requests that have yet to end: the mean would be far too high."""
    tokens = OutputTokens()
    decode(tokens, Role.DECODE, 700)
    tokens.update(10.0, {Role.DECODE: 7})
    assert tokens.mean == {}
    decode(tokens, Role.DECODE, 100)
    tokens.update(10.0, {Role.DECODE: 8})
    assert tokens.mean == {Role.DECODE: 100.0}


def test_what_happened_a_memory_ago_counts_by_its_weight():
    """Exponential weights, the same for tokens and requests."""
    tokens = OutputTokens()
    decode(tokens, Role.DECODE, 1000)
    tokens.update(0.0, {Role.DECODE: 100})
    decode(tokens, Role.DECODE, 3000)
    tokens.update(MEMORY_S, {Role.DECODE: 200})
    assert tokens.mean[Role.DECODE] == pytest.approx((3000 + 1000 / math.e) / (100 + 100 / math.e))


def test_when_traffic_ceases_the_last_mean_stays():
    """Neither is decoded nor ended: no evidence of another length."""
    tokens = OutputTokens()
    decode(tokens, Role.DECODE, 500)
    tokens.update(0.0, {Role.DECODE: 10})
    tokens.update(3600.0, {Role.DECODE: 10})
    assert tokens.mean == {Role.DECODE: 50.0}


def test_what_a_request_holds_is_the_mean_over_iterations():
    """One of 100 tokens for 10 iterations and one of 1,000 for 90: 910, not 550."""
    tokens = OutputTokens()
    for _ in range(5):
        decode(tokens, Role.DECODE, 10, held=10 * 100)
        decode(tokens, Role.DECODE, 90, held=90 * 1000)
    tokens.update(0.0, {Role.DECODE: 10})
    assert tokens.contexts == {Role.DECODE: 910.0}
    decode(tokens, Role.DECODE, 500, held=500 * 100)
    tokens.update(MEMORY_S, {Role.DECODE: 20})
    assert tokens.contexts[Role.DECODE] == pytest.approx((100 + 910 / math.e) / (1 + 1 / math.e))


def test_an_engine_that_does_not_tell_what_it_holds_leaves_it_unknown():
    """Absent, not zero: no context of zero tokens decodes."""
    tokens = OutputTokens()
    decode(tokens, Role.DECODE, 500)
    tokens.update(0.0, {Role.DECODE: 10})
    assert (tokens.mean, tokens.contexts) == ({Role.DECODE: 50.0}, {})
