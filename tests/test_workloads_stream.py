"""Content, load and seed together: the same everywhere, apart where they must be, open or closed."""

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import islice, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import real_trace

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Closed, OnOff, Poisson, TraceTimes, Waves
from dynamo_poa.workloads.statistics import describe
from dynamo_poa.workloads.stream import block_tokens_of, requests, sessions
from dynamo_poa.workloads.synthetic import LongTail, Mixed, MultiTurn, Paper, Trace, Zipf

OPEN = Poisson(rate_rps=10)
CONTENTS = [Paper(), Zipf(), LongTail(), MultiTurn(), Mixed()]
LOADS = [
    Closed(users=4),
    OPEN,
    OnOff(on_rps=20, off_rps=0, on_s=1, off_s=3),
    Waves(mean_rps=10, swing_frac=0.5, period_s=30),
]
LINES = [
    {"timestamp": 3000 * (n // 4), "input_length": 1000 + n, "output_length": 10 + n, "hash_ids": [0, n + 1]}
    for n in range(11)
]
PRINT_DIGEST = """
from itertools import islice, pairwise
import hashlib, msgspec
from dynamo_poa.workloads.arrivals import OnOff
from dynamo_poa.workloads.stream import requests
from dynamo_poa.workloads.synthetic import Mixed
load = OnOff(on_rps=20, off_rps=0, on_s=1, off_s=3)
print(hashlib.sha256(msgspec.json.encode(list(islice(requests(Mixed(), load, 7, 16), 500)))).hexdigest())
"""


def some(content, load, count=500, *, seed=1, phase=0, block_tokens=16):
    return list(islice(requests(content, load, seed, block_tokens, phase), count))


def blocks_of(found):
    return {block for one in found for block in one.blocks}


@pytest.fixture
def small_trace(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_same_seed_asks_the_same_in_every_process(hash_seed):
    """Replay cells run in processes of their own; Python's hash() differs from one to the next."""
    here = some(Mixed(), LOADS[2], seed=7)
    digest = hashlib.sha256(msgspec.json.encode(here)).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    there = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == digest


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content.name)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.text)
def test_times_are_there_in_an_open_loop_only(content, load):
    """Issue: open and closed loop are never confused. In the open one thinking is in the times."""
    found = some(content, load)
    if isinstance(load, Closed):
        assert {one.at_s for one in found} == {None}
    else:
        times_s = [one.at_s for one in found]
        assert times_s == sorted(times_s)
        assert {one.think_s for one in found} == {0}


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content.name)
def test_another_seed_asks_nothing_that_this_one_asked(content):
    """A seed's live run must not find the last one's prompts in the caches."""
    first, second = some(content, OPEN, seed=1), some(content, OPEN, seed=2)
    assert not blocks_of(first) & blocks_of(second)
    assert [one.at_s for one in first] != [one.at_s for one in second]


def test_the_tenants_of_a_mix_share_nothing():
    """Both have prefixes of their own, though their content is the same."""
    found = some(Mixed(first=Paper(), second=Paper()), OPEN)
    by_tenant = {name: [one for one in found if one.tenant == name] for name in ("first", "second")}
    assert not blocks_of(by_tenant["first"]) & blocks_of(by_tenant["second"])
    assert sum(map(len, by_tenant.values())) == 500


@pytest.mark.parametrize("load", [OPEN, Closed(users=4)], ids=lambda load: load.text)
def test_two_tenants_sessions_are_never_taken_for_one(load):
    """Found in review: both counted from 0, so that one tenant's turns waited for the other's answers."""
    found = some(Mixed(first=MultiTurn(), second=MultiTurn(), second_frac=0.5), load)
    of = {name: {one.session for one in found if one.tenant == name} for name in ("first", "second")}
    assert {session % 2 for session in of["first"]} == {0}
    assert {session % 2 for session in of["second"]} == {1}


def test_a_phase_asks_new_things_under_the_same_prefixes():
    """A cell whose load changes: templates stay warm, no prompt comes again."""
    first, second = some(Paper(), OPEN), some(Paper(), OPEN, phase=1)
    assert blocks_of(first) & blocks_of(second) == {block for one in first for block in one.blocks[:4]}
    assert len(blocks_of(first) & blocks_of(second)) == 5 * 4
    assert [one.at_s for one in first] != [one.at_s for one in second]


@pytest.mark.parametrize("phase", range(1, 6))
def test_a_tenants_prefixes_are_its_own_whoever_asks_first(phase):
    """Found in review: taken with the first request, they went to the tenant that chance let ask first."""
    content = Mixed(first=Paper(), second=Zipf(prefixes=3), second_frac=0.5)

    def prefixes(found, tenant):
        return {one.blocks[0] for one in found if one.tenant == tenant}

    for name, count in (("first", 5), ("second", 3)):
        known = prefixes(some(content, OPEN), name)
        assert len(known) == count
        assert prefixes(some(content, OPEN, phase=phase), name) == known
        assert prefixes(some(content, Closed(users=1), phase=phase), name) == known


@pytest.mark.parametrize("content", [Paper(), Zipf(), LongTail()], ids=lambda content: content.name)
def test_the_same_seed_asks_the_same_under_another_load(content):
    """Paired cells differ in what they are to differ in."""
    plain = [[msgspec.structs.replace(one, at_s=None) for one in some(content, load)] for load in LOADS]
    assert plain[1:] == plain[:1] * 3


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    rate_rps=st.floats(0.1, 100),
    mean_turns=st.integers(1, 6),
    think_s=st.floats(0, 10),
    second_frac=st.floats(0, 1),
    seed=st.integers(0, 2**20 - 1),
)
def test_turns_come_in_order_and_not_before_their_user_has_thought(
    rate_rps, mean_turns, think_s, second_frac, seed
):
    """Each turn goes on from the last one's prompt, and the user thinks as long as in a closed loop."""
    first = MultiTurn(mean_turns=mean_turns, think_s=think_s)
    mixed = Mixed(first=first, second=Paper(), second_frac=second_frac)
    alone = sessions(Mixed(first=first, second=Paper(), second_frac=0), seed, 16)
    thinks = [[turn.think_s for turn in turns] for turns in islice(alone, 200)]
    by_session = defaultdict(list)
    for one in some(mixed, Poisson(rate_rps=rate_rps), 200, seed=seed):
        if one.session >= 0:
            by_session[one.session].append(one)
    for session, turns in by_session.items():
        pauses_s = thinks[session // 2][1:]  # the first tenant's sessions have the even numbers
        for pause_s, (earlier, later) in zip(pauses_s, pairwise(turns), strict=False):
            assert later.blocks[: len(earlier.blocks)] == earlier.blocks
            assert later.input_tokens > earlier.input_tokens
            assert later.at_s >= earlier.at_s + pause_s
        assert len(turns) <= len(pauses_s) + 1


def test_a_waiting_session_goes_before_a_new_one():
    """One request a second, nobody thinks: the first session has all its turns before the second begins."""
    found = some(MultiTurn(think_s=0), Poisson(rate_rps=1), 100)
    assert [one.session for one in found] == sorted(one.session for one in found)
    assert {one.session for one in found} == set(range(found[-1].session + 1))


@pytest.mark.parametrize("load", [OPEN, Closed(users=4)], ids=lambda load: load.text)
@pytest.mark.parametrize("seed", range(3))
def test_each_tenant_has_its_share_of_the_requests(load, seed):
    """30 % are the second tenant's, though the first one's sessions have 4 turns: 20,000, within 0.02."""
    found = some(Mixed(), load, 20_000, seed=seed)
    assert sum(one.tenant == "second" for one in found) / 20_000 == pytest.approx(0.3, abs=0.02)
    assert {one.tenant for one in found if one.session >= 0} == {"first"}


def test_a_closed_loops_sessions_stand_together():
    """A user has all turns of one; `requests` and `sessions` are the same things in the same order."""
    together = list(islice(sessions(Mixed(), 1, 16), 100))
    flat = [turn for turns in together for turn in turns]
    assert some(Mixed(), Closed(users=4), len(flat)) == flat
    assert {turns[0].tenant for turns in together} == {"first", "second"}
    assert max(map(len, together)) > 1


def test_a_trace_is_asked_as_it_is(small_trace):
    """Lengths, shared first block, times from 0; the closed loop has no times."""
    found = some(Trace(path=small_trace), TraceTimes())
    assert [one.input_tokens for one in found] == [line["input_length"] for line in LINES]
    assert [one.output_tokens for one in found] == [line["output_length"] for line in LINES]
    assert [one.at_s for one in found] == [0, 0, 0, 0, 3, 3, 3, 3, 6, 6, 6]
    first = found[0].blocks[0]
    assert [one.blocks for one in found] == [(first, first + n + 1) for n in range(11)]
    closed = some(Trace(path=small_trace), Closed(users=2))
    assert closed == [msgspec.structs.replace(one, at_s=None) for one in found]


def test_a_trace_can_be_asked_at_another_rate(small_trace):
    """Twice as fast, spread out, or at random times; in the same order each time."""
    content = Trace(path=small_trace)
    assert [one.at_s for one in some(content, TraceTimes(speedup=2))][4] == 1.5
    spread = [one.at_s for one in some(content, TraceTimes(spread_s=3))]
    assert len(set(spread)) == 11
    assert [int(at_s // 3) for at_s in spread] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert spread != [one.at_s for one in some(content, TraceTimes(spread_s=3), seed=2)]
    at_random = some(content, OPEN)
    assert [one.at_s for one in at_random] == [one.at_s for one in some(Paper(), OPEN, 11)]
    assert [one.input_tokens for one in at_random] == [line["input_length"] for line in LINES]


@pytest.mark.parametrize(
    ("part", "limit", "lengths"),
    [
        ("first", 0, range(1000, 1005)),
        ("second", 0, range(1005, 1011)),
        ("all", 3, range(1000, 1003)),
        ("second", 2, range(1005, 1007)),
        ("first", 99, range(1000, 1005)),
    ],
)
def test_a_half_of_a_trace_begins_at_zero_and_keeps_its_ids(small_trace, part, limit, lengths):
    """What is tuned on the first half is verified on the second; 11 requests: 5 and 6."""
    found = some(Trace(path=small_trace, part=part, limit=limit), TraceTimes())
    assert [one.input_tokens for one in found] == list(lengths)
    assert found[0].at_s == 0
    whole = {one.input_tokens: one.blocks for one in some(Trace(path=small_trace), TraceTimes())}
    assert all(one.blocks == whole[one.input_tokens] for one in found)


def test_a_traces_seeds_ask_the_same_with_ids_of_their_own(small_trace):
    """On a live fleet the next seed must not find the last one's prompts in the caches."""
    first, second = (some(Trace(path=small_trace), TraceTimes(), seed=seed) for seed in (1, 2))
    assert [one.input_tokens for one in first] == [one.input_tokens for one in second]
    assert not blocks_of(first) & blocks_of(second)


def test_a_traces_blocks_are_the_files():
    """Replay wants that number as trace_block_size, token_ids as it is."""
    assert block_tokens_of(Trace(path="x"), 16) == 512
    assert block_tokens_of(Trace(path="x", block_tokens=64), 16) == 64
    assert block_tokens_of(Mixed(), 16) == 16


@pytest.mark.parametrize(
    ("ask", "problems"),
    [
        (
            lambda: requests(Paper(), TraceTimes(), 1, 16),
            ["load = 'trace x 1': must have a trace as content, not 'paper'"],
        ),
        (
            lambda: requests(Paper(), OPEN, -1, 16, 65535),
            ["seed = -1: must be in [0, 1048575]", "phase = 65535: must be in [0, 65534]"],
        ),
        (lambda: sessions(Paper(), 2**20, 16), ["seed = 1048576: must be in [0, 1048575]"]),
        (
            lambda: requests(Trace(path="nowhere.jsonl"), Closed(users=1), 1, 16),
            ["trace nowhere.jsonl: cannot be read: No such file or directory"],
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_first_request(ask, problems):
    """A cell that cannot run says so at once, not at its first request."""
    with pytest.raises(ConfigError) as refused:
        ask()
    assert list(refused.value.problems) == problems


def test_a_half_without_requests_is_refused(tmp_path):
    """A file of one request: its first half has none, its second has the one."""
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n")
    with pytest.raises(
        ConfigError, match=r"^trace one, first half: holds no request: must hold one at least$"
    ):
        requests(Trace(path=str(path), part="first"), TraceTimes(), 1, 16)
    assert len(some(Trace(path=str(path), part="second"), TraceTimes())) == 1


@pytest.mark.shared
def test_the_conversation_trace_without_its_rounding_is_no_burstier_than_chance():
    """Its times are rounded to 3 s: as they are, all of 3 s come at once."""
    content = Trace(path=str(real_trace("mooncake_conversation_a.jsonl")))
    rounded = describe(some(content, TraceTimes(), 10_000), 512)
    spread = describe(some(content, TraceTimes(spread_s=3), 10_000), 512)
    assert rounded.dispersion > 5
    assert spread.dispersion == pytest.approx(1, abs=0.15)
    assert spread.requests == 6015
