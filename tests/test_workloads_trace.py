"""Trace files: Mooncake's lines read, bad ones named and counted, and what is written for the simulator."""

import gzip
import json
from itertools import islice

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import real_trace

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads import trace
from dynamo_poa.workloads.arrivals import Closed, Poisson
from dynamo_poa.workloads.request import Request
from dynamo_poa.workloads.statistics import prefix_frac
from dynamo_poa.workloads.stream import requests
from dynamo_poa.workloads.synthetic import Mixed, MultiTurn

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, -3]}
BAD = {
    b"{": "Input data was truncated",
    b"\xff\xfe": "JSON is malformed: invalid character (byte 0)",
    b"[]": "Expected `object`, got `array`",
    b'{"timestamp": 0}': "Object missing required field `input_length`",
    b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}': (
        "JSON is malformed: invalid character (byte 14)"
    ),
    json.dumps(GOOD | {"timestamp": "0"}).encode(): "Expected `int | float`, got `str` - at `$.timestamp`",
    json.dumps(GOOD | {"timestamp": -1}).encode(): "timestamp = -1: must be >= 0, the line before's",
    json.dumps(GOOD | {"input_length": 0}).encode(): "input_length = 0: must be in [1, 1000000]",
    json.dumps(GOOD | {"output_length": -4}).encode(): "output_length = -4: must be in [1, 1000000]",
    # The simulator allots what is asked for: its process died of 10**12.
    json.dumps(GOOD | {"output_length": 10**12}).encode(): (
        "output_length = 1000000000000: must be in [1, 1000000]"
    ),
    json.dumps(GOOD | {"timestamp": 10**320}).encode(): f"timestamp = {10**320}: must be <= 1e+14 ms",
    json.dumps(GOOD | {"timestamp": 1e300}).encode(): "timestamp = 1e+300: must be <= 1e+14 ms",
    json.dumps(GOOD | {"input_length": 1.5}).encode(): "Expected `int`, got `float` - at `$.input_length`",
    json.dumps(GOOD | {"input_length": 1025}).encode(): "hash_ids: 2 of them: must be 3 for 1025 tokens",
    json.dumps(GOOD | {"hash_ids": [1, "a"]}).encode(): "Expected `int`, got `str` - at `$.hash_ids[1]`",
}


def written(path, *lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def good(count, **changes):
    return [json.dumps(GOOD | changes).encode()] * count


def test_a_line_is_a_request_with_ids_numbered_as_they_appear(tmp_path):
    """Any integers will do as ids; a blank line is none; what else a line holds does not matter."""
    huge = {"timestamp": 1500.5, "input_length": 513, "output_length": 1, "hash_ids": [2**70, 7], "turn": 1}
    path = written(tmp_path / "t", json.dumps(GOOD).encode(), b"  ", json.dumps(huge).encode())
    assert list(trace.read(path, first_id=100)) == [
        Request(blocks=(100, 101), input_tokens=600, output_tokens=5, at_s=0),
        Request(blocks=(102, 100), input_tokens=513, output_tokens=1, at_s=1.5005),
    ]
    assert trace.survey(path) == trace.Survey(requests=2, bad=0)


@pytest.mark.parametrize(("line", "what"), BAD.items())
def test_a_bad_line_is_named_with_what_is_wrong_and_left_out(tmp_path, line, what):
    """One of 200: the others are taken, the bad one is named by file and line, and logged."""
    path = written(tmp_path / "t", *good(100), line, *good(99))
    with structlog.testing.capture_logs() as logs:
        found = trace.survey(path)
    assert found == trace.Survey(requests=199, bad=1, shown=(f"{path}:101: {what}",))
    assert found.text == f"1 of 200 lines are bad and left out: {path}:101: {what}"
    assert len(list(trace.read(path))) == 199
    assert logs == [
        {
            "event": "poa.trace.lines_dropped",
            "log_level": "warning",
            "path": str(path),
            "bad": 1,
            "requests": 199,
            "first": [f"{path}:101: {what}"],
        }
    ]


def test_time_that_goes_back_is_a_bad_line_and_what_follows_is_judged_by_the_last_good_one(tmp_path):
    """0, 5000, 3000, 5000: one bad line, not two."""
    times = (json.dumps(GOOD | {"timestamp": at}).encode() for at in (0, 5000, 3000, 5000))
    path = written(tmp_path / "t", *good(200), *times)
    found = trace.survey(path)
    assert found.shown == (f"{path}:203: timestamp = 3000: must be >= 5000, the line before's",)
    assert [one.at_s for one in trace.read(path)][-3:] == [0, 5, 5]


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path):
    """As some editors write it."""
    path = written(tmp_path / "t", *good(3))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert trace.survey(path) == trace.Survey(requests=3, bad=0)
    assert len(list(trace.read(path))) == 3


def test_a_compressed_file_is_refused_as_such(tmp_path):
    """Its lines are no lines: naming five of them would say nothing."""
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in good(3))))
    with pytest.raises(ConfigError, match=r"t\.gz: is compressed \(gzip\): must be plain text$"):
        trace.survey(path)


def test_one_bad_line_in_a_hundred_is_borne_and_more_are_not(tmp_path):
    """Issue: refused above 1 %. The message has file, count, share, bound and the first five."""
    assert trace.survey(written(tmp_path / "borne", *good(990), *[b"{"] * 10)).bad == 10
    path = written(tmp_path / "refused", *[b"{"] * 10, *good(989))
    with pytest.raises(ConfigError) as refused:
        trace.survey(path)
    assert list(refused.value.problems) == [
        f"trace {path}: 10 of 999 lines are bad (1.00%): must be <= 1%",
        *(f"{path}:{number}: Input data was truncated" for number in range(1, 6)),
    ]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: written(path), "holds no request: must hold one at least"),
        (lambda path: written(path, b"", b" "), "holds no request: must hold one at least"),
        (lambda path: path, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    ],
)
def test_a_file_without_requests_is_refused(tmp_path, make, what):
    """Nothing, blank lines, no file, a folder."""
    make(tmp_path / "t")
    with pytest.raises(ConfigError) as refused:
        trace.survey(tmp_path / "t")
    assert list(refused.value.problems) == [f"trace {tmp_path / 't'}: {what}"]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(0, 2**20 - 1), st.sampled_from([1, 16, 512]))
def test_what_is_written_is_read_back_the_same_but_for_its_ids(tmp_path_factory, seed, block_tokens):
    """Ids from 0 in order of appearance: what is shared stays shared. Times to a microsecond."""
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    asked = list(islice(requests(Mixed(), Poisson(rate_rps=5), seed, block_tokens), 100))
    assert trace.write_mooncake(asked, block_tokens, path) == 100
    back = list(trace.read(path, block_tokens))
    ids = dict(
        zip((b for one in asked for b in one.blocks), (b for one in back for b in one.blocks), strict=True)
    )
    assert sorted(ids.values()) == list(range(len(ids)))
    for one, other in zip(asked, back, strict=True):
        assert tuple(ids[block] for block in one.blocks) == other.blocks
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert other.at_s == pytest.approx(one.at_s, abs=1e-6)
    assert prefix_frac(asked, block_tokens) == prefix_frac(back, block_tokens)


def test_a_closed_loops_sessions_are_written_as_dynamo_takes_them(tmp_path):
    """Dynamo's session_id and delay in ms; no times; requests outside sessions have neither."""
    asked = [
        Request(blocks=(5, 6), input_tokens=20, output_tokens=3, session=4),
        Request(blocks=(5, 6, 9), input_tokens=40, output_tokens=3, session=4, think_s=0.25),
        Request(blocks=(8,), input_tokens=16, output_tokens=3),
    ]
    assert trace.write_mooncake(asked, 16, tmp_path / "t") == 3
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert lines == [
        {"input_length": 20, "output_length": 3, "hash_ids": [0, 1], "session_id": "4", "delay": 0},
        {"input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2], "session_id": "4", "delay": 250},
        {"input_length": 16, "output_length": 3, "hash_ids": [3]},
    ]


def test_requests_with_blocks_of_another_size_are_not_written(tmp_path):
    """A trace's 512-token ids under 16 tokens a block would be another workload."""
    with pytest.raises(ConfigError, match=r"^request 0: hash_ids: 1 of them: must be 25 for 400 tokens$"):
        trace.write_mooncake([Request(blocks=(1,), input_tokens=400, output_tokens=1)], 16, tmp_path / "t")


@pytest.mark.parametrize("load", [Poisson(rate_rps=5), Closed(users=2)], ids=lambda load: load.text)
def test_every_line_that_is_written_holds_a_request(tmp_path, load):
    """Open and closed."""
    asked = islice(requests(MultiTurn(), load, 1, 16), 50)
    trace.write_mooncake(asked, 16, tmp_path / "t")
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [("timestamp" in line, "session_id" in line) for line in lines] == [
        (not isinstance(load, Closed), isinstance(load, Closed))
    ] * 50


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "requests_in_it"),
    [("mooncake_conversation_a.jsonl", 6015), ("mooncake_synthetic.jsonl", 3993)],
)
def test_the_real_traces_have_no_bad_line(name, requests_in_it):
    """They are as their makers published them."""
    assert trace.survey(real_trace(name)) == trace.Survey(requests=requests_in_it, bad=0)
