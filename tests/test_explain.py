"""Who should have been where: worked by hand, on a real recording, and how it reads."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from dynamo_messages import FIXTURES
from shown import text

from dynamo_poa.errors import ConfigError, RecordingError
from dynamo_poa.flight import InFlight
from dynamo_poa.recording import Header, Writer
from dynamo_poa.serve.explain import Explained, Explanation, explain, explain_snapshots
from dynamo_poa.serve.explained import explanation_view
from dynamo_poa.serve.replay import encode
from dynamo_poa.snapshot import DecodeGame, PrefillGame, Snapshot
from dynamo_poa.values import Role, WorkerKey

RECORDING = FIXTURES / "poa_2p4d_straggler.ndjson.gz"
SLOW, FAST = 12476343233715653261, {7317722543859696558, 7840050579317100393, 899879368101436949}
W = (WorkerKey(10, 0), WorkerKey(14370722098883561847, 1))  # the second above 2**63


def in_flight(name: str, worker: WorkerKey, since_s: float | None = None) -> InFlight:
    return InFlight(name, worker, 100, 0, None, 0.0, since_s)


def prefill(tokens: list[list[float]], chosen: list[int], stands_for: float = 1.0) -> Snapshot:
    """Prompts on two workers that take 1 s and 0.01 s a token; the second has half a second of backlog."""
    game = PrefillGame(
        requests=tuple(in_flight(f"r{row}", W[worker]) for row, worker in enumerate(chosen)),
        tokens=np.array(tokens),
        base_s=np.array([1.0, 1.0]),
        token_s=np.array([0.01, 0.01]),
        backlog_s=np.array([0.0, 0.5]),
        chosen=np.array(chosen),
        stands_for=stands_for,
    )
    return Snapshot(4.0, Role.PREFILL, W, prefill=game)


def decode(iteration_s: list[list[float]], chosen: list[int], rounds: float = 1.0) -> Snapshot:
    game = DecodeGame(
        requests=tuple(in_flight(f"r{row}", W[worker], 1.0) for row, worker in enumerate(chosen)),
        iteration_s=np.array(iteration_s),
        extra_s=np.zeros((len(chosen), 2)),
        chosen=np.array(chosen),
        rounds=rounds,
        stands_for=1.0,
    )
    return Snapshot(4.0, Role.DECODE, W, decode=game)


def rows(game: Explained) -> list[tuple[str, str, str, bool, float, float, float]]:
    return [
        (
            row.request_id,
            row.here.worker_id,
            row.there.worker_id,
            row.moved,
            row.here.latency_s,
            row.there.latency_s,
            row.saved_s,
        )
        for row in game.rows
    ]


def test_prompts_wait_for_the_shorter_ones_before_them() -> None:
    """Worked: 1, 2 and 3 s on one worker are done after 1, 3 and 6 s; the second goes where 0.5 s wait."""
    found = explain_snapshots(4.5, 4.0, [prefill([[0, 0], [100, 100], [200, 200]], [0, 0, 0])], {})
    (game,) = found.games
    assert (game.observed_s, game.optimal_s, game.after_s) == (10.0, 7.5, 7.5)
    assert [(request, moved, pytest.approx(saved)) for request, *_, moved, _, _, saved in rows(game)] == [
        ("r1", True, 0.5),
        ("r2", False, 2.0),
        ("r0", False, 0.0),
    ]
    assert rows(game)[0][1:3] == ("10", "14370722098883561847")
    assert (found.observed_s, found.optimal_s, found.saved_s) == (10.0, 7.5, 2.5)


def test_a_prompt_whose_cache_is_elsewhere_shows_what_it_computes_here_and_there() -> None:
    """A miss of 90 tokens: 2 s here, 1.1 s there behind the backlog."""
    ((game,), *_) = (explain_snapshots(4.0, 4.0, [prefill([[100, 10]], [0])], {}).games,)
    (row,) = game.rows
    assert (row.here.uncached_tokens, row.there.uncached_tokens, row.prompt_tokens) == (100, 10, 100)
    assert (row.here.latency_s, row.there.latency_s) == (2.0, pytest.approx(1.6))
    assert (row.there.dp_rank, row.moved) == (1, True)


def test_requests_on_a_slow_worker_go_and_those_elsewhere_pay_for_it() -> None:
    """Worked, 10 iterations to come: 2 x 1.2 s and 1 x 0.1 s; all three on the fast one 3 x 0.3 s."""
    fast, slow = [0.0, 0.1, 0.2, 0.3], [0.0, 0.6, 1.2, 1.8]
    found = explain_snapshots(4.0, 4.0, [decode([fast, slow], [1, 1, 0], rounds=10)], {})
    (game,) = found.games
    assert (game.observed_s, game.optimal_s) == (pytest.approx(25.0), pytest.approx(9.0))
    assert rows(game) == [
        ("r0", str(W[1].worker_id), "10", True, 12.0, pytest.approx(3.0), pytest.approx(9.0)),
        ("r1", str(W[1].worker_id), "10", True, 12.0, pytest.approx(3.0), pytest.approx(9.0)),
        ("r2", "10", "10", False, 1.0, pytest.approx(3.0), pytest.approx(-2.0)),
    ]
    assert [row.here.uncached_tokens for row in game.rows] == [None] * 3


def test_nobody_is_moved_for_next_to_nothing() -> None:
    """Equal but for a thousandth: the very best swaps workers, and a person would wonder why."""
    one, other = [0.0, 0.1, 0.2], [0.0, 0.0999, 0.1998]
    (game,) = explain_snapshots(4.0, 4.0, [decode([one, other], [0, 1])], {}).games
    assert [row.moved for row in game.rows] == [False, False]
    assert game.after_s == game.observed_s


def test_of_requests_that_are_alike_the_first_by_name_goes() -> None:
    """Which of them goes is a toss-up, and the same one on every machine."""
    found = explain_snapshots(4.0, 4.0, [prefill([[50, 50]] * 4, [1, 1, 1, 1])], {})
    assert [(row.request_id, row.moved) for row in found.games[0].rows if row.moved] == [
        ("r0", True),
        ("r1", True),
    ]


def test_rows_that_stand_for_many_are_counted_so() -> None:
    """A sample of a very large snapshot: each row is weighed, and the view says so."""
    found = explain_snapshots(4.0, 4.0, [prefill([[0, 0], [0, 0]], [0, 0], stands_for=2.0)], {})
    (game,) = found.games
    assert (game.observed_s, game.after_s) == (pytest.approx(12.0), pytest.approx(9.0))
    assert "a sample: each request stands for 2.0" in text(explanation_view(found))


def test_a_leg_that_cannot_be_priced_says_why() -> None:
    """Absent with its reason; the other leg is explained."""
    lacking = Snapshot(4.0, Role.PREFILL, lack="1 worker, 2 needed")
    found = explain_snapshots(4.0, 4.0, [lacking, decode([[0, 1], [0, 2]], [1])], {"a note": 1})
    assert (found.lacking, [game.role for game in found.games]) == (
        {"prefill": "1 worker, 2 needed"},
        [Role.DECODE],
    )
    shown = text(explanation_view(found))
    assert "prefill    not priced: 1 worker, 2 needed" in shown
    assert "inexact    a note 1" in shown


# A real recording


@pytest.fixture(scope="module")
def at_7s() -> Explanation:
    return explain(RECORDING, 7.9, block_size=16)


def test_the_snapshot_nearest_at_or_before_the_instant_is_explained(at_7s: Explanation) -> None:
    """Snapshots are a second apart."""
    assert (at_7s.asked_s, at_7s.at_s) == (7.9, 7.0)


def test_the_stragglers_requests_should_have_been_with_the_others(at_7s: Explanation) -> None:
    """All six, onto three workers five times as fast; the others lose less than they gain."""
    (decode,) = [game for game in at_7s.games if game.phase == "decode"]
    moved = [row for row in decode.rows if row.moved]
    assert {row.here.worker_id for row in moved} == {str(SLOW)}
    assert {int(row.there.worker_id) for row in moved} == FAST
    assert len(moved) == 6
    assert not [row for row in decode.rows if row.there.worker_id == str(SLOW)]
    assert all(row.here.latency_s > 4 * row.there.latency_s for row in moved)


def test_two_prompts_that_missed_each_others_caches_should_have_changed_places(at_7s: Explanation) -> None:
    """128 of 512 tokens were cached on the other worker, for both."""
    (prefill,) = [game for game in at_7s.games if game.phase == "prefill"]
    moved = [row for row in prefill.rows if row.moved]
    assert [(row.here.uncached_tokens, row.there.uncached_tokens) for row in moved] == [(512, 384)] * 2
    assert moved[0].here.worker_id == moved[1].there.worker_id
    assert moved[1].here.worker_id == moved[0].there.worker_id


def test_what_requests_save_adds_up(at_7s: Explanation) -> None:
    """To the moves shown, which are within a hundredth of the very best; shares add up to 1."""
    for game in at_7s.games:
        saved_s = sum(row.saved_s for row in game.rows)
        assert saved_s == pytest.approx(game.observed_s - game.after_s, rel=1e-9)
        assert game.optimal_s <= game.after_s <= game.optimal_s * 1.01
    assert at_7s.observed_s == pytest.approx(sum(game.observed_s for game in at_7s.games), rel=1e-12)
    assert at_7s.shares is not None
    assert sum(msgspec.structs.astuple(at_7s.shares)) == pytest.approx(1, abs=1e-12)


def test_an_explanation_reads_as_tables(at_7s: Explanation) -> None:
    """Moved ones first, those that stay summed up."""
    lines = [" ".join(line.split()) for line in text(explanation_view(at_7s)).splitlines()]
    start = lines.index("prefill: 5 requests, 3.963 s as it was, 3.841 s at best: 0.122 s saved")
    assert lines[start + 1 : start + 10] == [
        "worker requests at best",
        "7737348267188703448/0 3 3",
        "8940806945208387634/0 2 2",
        "",
        "request tokens uncached there is on better on latency there saves",
        "86f281b5-68a… 512 512 384 7737348267188703448/0 8940806945208387634/0 1.341 s 0.427 s 0.914 s",
        "521997e4-e95… 512 512 384 8940806945208387634/0 7737348267188703448/0 0.914 s 0.427 s 0.488 s",
        "3 requests where they are: 1.280 s more in all",
        "all of that: 0.122 s saved",
    ]


def test_the_end_says_in_words_where_the_cost_was_from(at_7s: Explanation) -> None:
    """Issue 7: routing, caching or capacity; the caches share no prefix here, so nothing is known of them."""
    lines = text(explanation_view(at_7s)).splitlines()
    start = lines.index(
        "the cost beyond an unloaded system is 72% routing, 0% caching, 27% capacity: "
        "another choice of workers: the policy's to find"
    )
    assert lines[start + 1].startswith("caching    PoA-hat none: fewer than 2 prefixes that requests share")
    assert lines[start + 2] == "split      PoA-hat none: 24 prompts in 6 s, 50 in 10 s needed"


def test_the_json_reads_back(at_7s: Explanation) -> None:
    """Worker ids are text: they pass 2**63."""
    encoded = encode(at_7s)
    assert encode(msgspec.json.decode(encoded, type=Explanation)) == encoded
    assert f'"worker_id":"{SLOW}"'.encode() in encoded


def test_at_the_start_nobody_is_in_flight() -> None:
    """Load came a second after the recorder."""
    found = explain(RECORDING, 0.0, block_size=16)
    assert (found.games, found.lacking, found.shares) == ((), {}, None)
    assert "no requests in flight" in text(explanation_view(found))


@pytest.mark.parametrize("at_s", [18.2, 1e9, float("inf"), float("nan")])
def test_an_instant_outside_the_recording_is_refused_with_its_bounds(at_s: float) -> None:
    """Key, value and bound."""
    with pytest.raises(ConfigError) as caught:
        explain(RECORDING, at_s, block_size=16)
    assert str(caught.value) == (
        f"--at = {at_s:g}: must be in [0, 18.136], seconds since the first message of {RECORDING}"
    )


def test_a_recording_without_decisions_cannot_be_explained() -> None:
    """Forward passes do not say whose they were."""
    path = FIXTURES / "disagg_2p3d.ndjson.gz"
    with pytest.raises(RecordingError, match="holds no decisions up to 3 s: nobody is known to be in flight"):
        explain(path, 3.0, block_size=16)


def test_an_empty_recording_cannot_be_explained(tmp_path: Path) -> None:
    """Exit 2, naming the file."""
    path = tmp_path / "r.ndjson"
    with Writer(path, Header(recording=1, namespace="poa", started_at_s=0.0, version="0.1.0")):
        pass
    with pytest.raises(RecordingError, match=r"r\.ndjson: holds nothing to estimate from: no messages"):
        explain(path, 0.0, block_size=16)
