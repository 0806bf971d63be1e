"""What Dynamo's simulator makes of a written workload: who waits for whom, and what is found in the cache."""

from itertools import islice, pairwise

import msgspec
import pytest

from dynamo_poa.dynamo_host import replay_trace
from dynamo_poa.values import Role
from dynamo_poa.workloads.arrivals import Closed, Poisson
from dynamo_poa.workloads.request import Request
from dynamo_poa.workloads.statistics import prefix_frac
from dynamo_poa.workloads.stream import requests
from dynamo_poa.workloads.synthetic import Mixed, MultiTurn, Paper, Zipf
from dynamo_poa.workloads.trace import write_mooncake


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says of one request."""

    arrival_time_ms: float
    terminal_time_ms: float
    input_length: int
    reused_input_tokens: int


def replayed(tmp_path, asked, users=None):
    write_mooncake(asked, 16, tmp_path / "trace")
    replay_trace(
        tmp_path / "trace",
        tmp_path / "records",
        trace_block_tokens=16,
        workers={Role.AGGREGATED: 1},
        engine={"block_size": 16, "num_gpu_blocks": 200_000, "max_num_seqs": 64},
        router=None,
        users=users,
    )
    lines = (tmp_path / "records").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=Record) for line in lines]
    return sorted(records, key=lambda record: record.arrival_time_ms)


@pytest.mark.parametrize(
    "content",
    [Paper(), Zipf(prefixes=20), MultiTurn(think_s=60), Mixed()],
    ids=lambda content: content.name,
)
def test_one_worker_with_room_for_all_serves_the_share_that_was_stated(tmp_path, content):
    """Requests that follow each other slowly find exactly what `prefix_frac` says."""
    asked = list(islice(requests(content, Poisson(rate_rps=0.02), 1, 16), 200))
    records = replayed(tmp_path, asked)
    found = sum(record.reused_input_tokens for record in records)
    assert found / sum(record.input_length for record in records) == prefix_frac(asked, 16)
    assert [record.input_length for record in records] == [one.input_tokens for one in asked]
    since_first_s = [one.at_s - asked[0].at_s for one in asked]  # the simulator's time begins with the first
    assert [record.arrival_time_ms / 1000 for record in records] == pytest.approx(since_first_s, abs=1e-5)


def test_the_simulators_user_has_all_turns_of_a_session_and_thinks_between_them(tmp_path):
    """One user: the second session begins when the first has ended; 250 ms before its second turn."""
    turns = [
        Request(blocks=(1, 2), input_tokens=20, output_tokens=9, session=0),
        Request(blocks=(1, 2, 3), input_tokens=40, output_tokens=9, session=0, think_s=0.25),
        Request(blocks=(4,), input_tokens=16, output_tokens=9),
        Request(blocks=(5,), input_tokens=15, output_tokens=9),
    ]
    records = replayed(tmp_path, turns, users=1)
    assert [record.input_length for record in records] == [20, 40, 16, 15]
    assert [record.reused_input_tokens for record in records] == [0, 16, 0, 0]
    pauses_ms = [later.arrival_time_ms - earlier.terminal_time_ms for earlier, later in pairwise(records)]
    assert pauses_ms == pytest.approx([250, 0, 0])


def test_no_turn_of_a_closed_loop_begins_before_the_answer_it_goes_on_from(tmp_path):
    """Every turn after a session's first finds the whole blocks of the prompt before it."""
    asked = list(islice(requests(MultiTurn(system_tokens=0), Closed(users=8), 1, 16), 200))
    records = replayed(tmp_path, asked, users=8)
    assert sum(record.reused_input_tokens for record in records) == sum(
        earlier.input_tokens for earlier, later in pairwise(asked) if later.session == earlier.session
    )
