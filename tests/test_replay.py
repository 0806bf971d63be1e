"""Replaying a recording: PoA-hat by worked numbers, TTFT, outcomes, and what was not understood."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo_messages import FIXTURES
from shown import text

from dynamo_poa.errors import RecordingError
from dynamo_poa.recording import Header, Writer
from dynamo_poa.serve.replay import encode, replay
from dynamo_poa.serve.report import Report, report_view
from dynamo_poa.values import Candidate, Estimate, Outcome, Role, TtftSample
from dynamo_poa.wire import Chosen, DecisionBatch, Ended, FirstToken

HEADER = Header(recording=1, namespace="poa", started_at_s=1_800_000_000.0, version="0.1.0")
WALL_S = 1_800_000_000.0


def batch(sequence: int, at_s: float, *, chosen: int, role: Role = Role.DECODE) -> bytes:
    """Eight requests; each pair finds one worker at 1 block and the other at 3. TTFT 0.1 to 0.8 s.

    Prompts are shorter than a block, so their own blocks cost nothing.
    """
    events: list[Any] = []
    for number in range(8):
        request_id = f"{sequence}-{number}"
        cheap = number % 2  # worker 0 is cheap for even numbers
        candidates = tuple(Candidate(worker, 0, 0, 16 if worker == cheap else 48, 0, 0) for worker in (0, 1))
        taken = cheap if chosen < 0 else chosen
        events.append(Chosen(request_id, role, WALL_S + at_s, WALL_S + at_s, taken, 0, 3, 1, 1, candidates))
        events.append(FirstToken(request_id, role, WALL_S + at_s + 0.1 * (number + 1)))
        outcome = Outcome.CANCELLED if number == 7 else Outcome.OK
        events.append(Ended(request_id, role, WALL_S + at_s + 1.0, outcome))
    message = DecisionBatch(router_id="r1", sequence=sequence, sent_at_s=WALL_S + at_s, events=tuple(events))
    return msgspec.msgpack.encode(message)


def recorded(path: Path, *messages: tuple[float, str, bytes]) -> Path:
    with Writer(path, HEADER) as writer:
        for at_s, subject, data in messages:
            writer.write(WALL_S + at_s, subject, data)
    return path


@pytest.fixture
def two_periods(tmp_path: Path) -> Path:
    """Eight decisions that all took worker 0, then eight that took the cheap one six seconds later."""
    return recorded(
        tmp_path / "r.ndjson",
        (0.0, "poa.poa.telemetry", b"-"),
        (1.0, "poa.poa.decisions", batch(0, 1.0, chosen=0)),
        (7.0, "poa.poa.decisions", batch(1, 7.0, chosen=-1)),
        (7.5, "poa.poa.params", b"-"),
    )


def test_a_replay_prices_each_period_and_the_whole(two_periods: Path) -> None:
    """Worked: all on worker 0 pays 4*1 + 4*3 = 16 against 8, so 2.0; then 8 against 8; the mean is 1.5."""
    report = replay(two_periods, window=8, block_size=16)
    assert [
        (period.from_s, period.to_s, period.frozen.by_role, period.frozen.legs["decode"].samples)
        for period in report.periods
    ] == [(0.0, 5.0, {"decode": 2.0}, 8), (5.0, 10.0, {"decode": 1.0}, 8)]
    frozen = report.overall.frozen
    assert (report.overall.to_s, frozen.poa_hat, frozen.samples) == (7.5, 1.5, 16)
    assert frozen.legs == {"decode": Estimate(poa_hat=1.5, samples=16, method="frozen")}


def test_the_frozen_estimate_and_the_calibrated_one_are_never_mixed(two_periods: Path) -> None:
    """Decisions alone have a frozen price; seconds need forward passes, and without them there is none."""
    report = replay(two_periods, window=8, block_size=16)
    for period in (*report.periods, report.overall):
        assert (period.poa.method, period.poa.poa_hat) == ("marginal", None)
        assert period.poa.reason == "decode: 0 workers, 2 needed"
        assert period.frozen.method == "frozen"


def test_a_window_over_both_periods_prices_them_together(two_periods: Path) -> None:
    """Worked: 16 + 8 paid against 16 at best is 1.5, in the second period as overall."""
    report = replay(two_periods, window=16, block_size=16)
    assert [period.frozen.poa_hat for period in report.periods] == [2.0, 1.5]
    assert report.overall.frozen.poa_hat == 1.5


def test_the_block_size_is_what_makes_tokens_blocks(tmp_path: Path) -> None:
    """Worked: 16 tokens queued on both, 2 blocks on worker 1: 1 against 3 at 16 tokens, 4 against 6 at 4."""
    candidates = (Candidate(0, 0, 0, 16, 0, 0), Candidate(1, 0, 0, 16, 2, 0))
    events = tuple(
        Chosen(f"{number}", Role.DECODE, WALL_S, WALL_S, 1, 0, 3, 1, 1, candidates) for number in range(8)
    )
    data = msgspec.msgpack.encode(DecisionBatch(router_id="r", sequence=0, sent_at_s=WALL_S, events=events))
    path = recorded(tmp_path / "r.ndjson", (0.0, "poa.poa.decisions", data))
    # All 8 on worker 1; at best 4 and 4.
    assert replay(path, window=16, block_size=16).overall.frozen.poa_hat == 8 * 3 / (4 * 1 + 4 * 3)
    assert replay(path, window=16, block_size=4).overall.frozen.poa_hat == 8 * 6 / (4 * 4 + 4 * 6)


def test_a_replay_reports_ttft_outcomes_and_messages(two_periods: Path) -> None:
    """TTFT by DecisionLog: 0.1 to 0.8 s twice; P50 is the 8th of 16 values, P99 the 15th."""
    report = replay(two_periods, window=16, block_size=16)
    assert [period.ttft.samples for period in report.periods] == [8, 8]
    assert report.overall.ttft.samples == 16
    assert report.overall.ttft.p50_s == pytest.approx(0.4, abs=1e-6)
    assert report.overall.ttft.p99_s == pytest.approx(0.8, abs=1e-6)
    assert report.legs == {"decode": {"cancelled": 2, "ok": 14}}
    assert report.messages == {"telemetry": 1, "decisions": 2, "params": 1}
    assert (report.unknown, report.skipped, report.notes) == ({}, {}, {})


def test_ttft_is_prefills_where_routers_see_no_other_leg(tmp_path: Path) -> None:
    """router.legs = [prefill], as in the controller."""
    path = recorded(
        tmp_path / "r.ndjson", (0.0, "poa.poa.decisions", batch(0, 0.0, chosen=0, role=Role.PREFILL))
    )
    assert replay(path, window=16, block_size=16).overall.ttft.samples == 8


def test_what_is_not_understood_is_counted_and_named(two_periods: Path) -> None:
    """Bad lines by reason, foreign subjects by name, refused and lost decisions as what they are."""
    with Writer(two_periods, HEADER) as writer:
        writer.write(WALL_S + 5.0, "poa.poa.decisions", batch(0, 5.0, chosen=0))
        writer.write(WALL_S + 4.0, "poa.poa.decisions", b"\xc1")
        writer.write(WALL_S + 6.0, "poa.poa.decisions", batch(3, 6.0, chosen=0))
        writer.write(WALL_S + 7.0, "other\x1b[2J", b"")
        writer.write(
            WALL_S + 8.0, "namespace.poa-workers.component.prefill.endpoint.generate.kv_metrics", b""
        )
    with two_periods.open("ab") as file:
        file.write(b'{"t":18000')
    report = replay(two_periods, window=16, block_size=16)
    assert report.unknown == {"'other\\x1b[2J'": 1}
    assert report.skipped == {"truncated": 1}
    assert report.notes == {
        "messages earlier than the one before": 1,
        "decisions refused: not_msgpack": 1,
        "decision batches lost": 2,
        "metrics not used: not_msgpack": 1,
    }
    assert report.messages == {"decisions": 3, "kv_metrics": 1}


def test_of_many_foreign_subjects_the_first_are_named(tmp_path: Path) -> None:
    """Bounded, whatever the file holds."""
    messages = [(0.0, f"foreign.{number}", b"") for number in range(50)]
    messages.append((0.0, "poa.poa.decisions", batch(0, 0.0, chosen=0)))
    report = replay(recorded(tmp_path / "r.ndjson", *messages), window=16, block_size=16)
    assert len(report.unknown) == 21
    assert report.unknown["others"] == 30


@pytest.mark.parametrize(
    ("messages", "holds"),
    [
        ((), "no messages"),
        (((0.0, "poa.poa.params", b"-"), (0.0, "other", b"")), "params 1, unknown subjects 1"),
        (((0.0, "poa.poa.decisions", b"-"),), "decisions 1, decisions refused: schema 1"),
    ],
)
def test_a_recording_of_nothing_usable_is_an_error(
    tmp_path: Path, messages: tuple[tuple[float, str, bytes], ...], holds: str
) -> None:
    """Exit 2 with the file and what it holds, not a report of nothing."""
    path = recorded(tmp_path / "r.ndjson", *messages)
    with pytest.raises(RecordingError) as caught:
        replay(path, window=16, block_size=16)
    assert str(caught.value) == f"{path}: holds nothing to estimate from: {holds}"


def test_a_recording_of_forward_passes_alone_tells_speeds_and_no_estimate() -> None:
    """disagg_2p3d was made before decisions were recorded. Absent with a reason: never NaN, never 1.0."""
    report = replay(FIXTURES / "disagg_2p3d.ndjson.gz", window=16, block_size=16)
    assert (report.overall.poa.poa_hat, report.overall.poa.reason) == (None, "no decisions")
    assert [(pool.role, pool.workers) for pool in report.pools] == [("decode", 3), ("prefill", 2)]
    assert report.notes == {"workers inferred from forward passes, no cards recorded": 5}
    shown = text(report_view(report))
    assert "PoA-hat    none: no decisions\n" in shown
    assert "inexact    workers inferred from forward passes, no cards recorded 5" in shown


def test_the_same_recording_gives_the_same_report(two_periods: Path) -> None:
    """Deterministic, to the byte; and the JSON reads back as the report."""
    first, second = (encode(replay(two_periods, window=16, block_size=16)) for _ in range(2))
    assert first == second
    assert encode(msgspec.json.decode(first, type=Report)) == first


def test_figures_are_written_to_nine_digits() -> None:
    """The last few of a double depend on the machine's arithmetic library."""
    ttft = TtftSample(p50_s=1 / 3, p99_s=1e-7 / 3, samples=2**60)
    assert encode(ttft).startswith(
        b'{"p50_s":0.333333333,"p99_s":3.33333333e-8,"samples":1152921504606846976,'
    )


def test_a_report_reads_as_a_table_of_periods(two_periods: Path) -> None:
    """PoA-hat, each leg's and the frozen one in columns of their own, TTFT with its samples."""
    lines = text(report_view(replay(two_periods, window=16, block_size=16))).splitlines()
    assert lines[:2] == [
        "recording  7.5 s (namespace poa, dynamo-poa 0.1.0)",
        "messages   telemetry 1, decisions 2, params 1",
    ]
    assert [line.split() for line in lines[3:5]] == [
        ["0", *["-"] * 6, "2.000", "0.400", "s", "0.700", "s", "8"],
        ["5", *["-"] * 6, "1.500", "0.400", "s", "0.700", "s", "8"],
    ]
    assert lines[5:] == [
        "PoA-hat    none: decode: 0 workers, 2 needed",
        "frozen     1.5000 of 16 decisions (decode 1.5000); window 16, block size 16",
        "TTFT       P50 0.400 s, P99 0.800 s of 16 requests",
        "decode     cancelled 2, ok 14",
    ]


def test_a_pipe_is_refused_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    """It would hang on the second reading."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match=r"pipe: must be a file: it is read twice"):
        replay(tmp_path / "pipe", window=16, block_size=16)
