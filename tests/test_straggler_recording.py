"""A recorded graph with a slow worker, through the same estimator as live: golden figures, damaged files.

Recording: 2 prefill and 4 decode workers, one of them 5x slower, 28 users; `record` from before the load on.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dynamo_messages import FIXTURES
from shown import text

from dynamo_poa.recording import Reader, Writer
from dynamo_poa.serve.replay import encode, replay
from dynamo_poa.serve.report import Report, report_view

RECORDING = FIXTURES / "poa_2p4d_straggler.ndjson.gz"
SLOW = "12476343233715653261"


@pytest.fixture(scope="module")
def report() -> Report:
    return replay(RECORDING, window=256, block_size=16)


@pytest.fixture(scope="module")
def figures(report: Report) -> Any:
    return json.loads(encode(report))


def rounded(values: dict[str, Any], *names: str) -> tuple[float | None, ...]:
    return tuple(None if values[name] is None else round(values[name], 6) for name in names)


def test_poa_hat_of_the_whole_is_this(figures: Any) -> None:
    """Golden: nearly all of it is the decode leg, where the slow worker gets as many as the others."""
    poa = figures["overall"]["poa"]
    names = ("poa_hat", "low", "high", "observed_s", "optimal_s")
    assert poa["method"] == "marginal"
    assert rounded(poa, *names) == (1.906569, 1.123702, 2.633525, 89.876481, 47.140442)
    assert poa["shares"] == {"miss": 0.000459, "congestion": 0.68356, "capacity": 0.315981}
    legs = poa["legs"]
    assert rounded(legs["prefill"], *names) == (1.002321, 1.0, 1.025201, 12.39227, 12.363577)
    assert rounded(legs["decode"], *names) == (2.228039, 1.796796, 2.52766, 77.484211, 34.776864)
    assert {leg: legs[leg]["samples"] for leg in legs} == {"prefill": 17, "decode": 17}


def test_the_frozen_estimate_of_the_same_decisions_sees_none_of_it(figures: Any) -> None:
    """Golden. Dynamo's block costs know no speed: a series of its own."""
    frozen = figures["overall"]["frozen"]
    assert (frozen["method"], round(frozen["poa_hat"], 6), frozen["samples"]) == ("frozen", 1.048799, 165)


def test_poa_hat_of_each_period_is_this(figures: Any) -> None:
    """Golden: absent until there are eight snapshots, then over the last minute."""
    rows = [
        (
            period["from_s"],
            *rounded(period["poa"], "poa_hat"),
            *rounded(period["frozen"], "poa_hat"),
            period["ttft"]["samples"],
        )
        for period in figures["periods"]
    ]
    assert rows == [
        (0.0, None, 1.079939, 16),
        (5.0, 1.536085, 1.061392, 26),
        (10.0, 1.798379, 1.056367, 21),
        (15.0, 1.906569, 1.048799, 16),
    ]


def test_the_slow_worker_is_named_with_its_factor(report: Report) -> None:
    """The engine ran at a fifth of the others' speed; nobody else is off by a hundredth."""
    factors = {worker.worker_id: worker.factor for worker in report.workers}
    assert [worker.worker_id for worker in report.workers if worker.straggler] == [SLOW]
    assert factors.pop(SLOW) == pytest.approx(5.0, rel=0.03)
    assert [factor for factor in factors.values() if factor is None or abs(factor - 1) > 0.01] == []


def test_speeds_are_told_in_seconds(report: Report) -> None:
    """Passes as they were seen: 4.7 requests in 55 ms and on the slow one in 279 ms; prompts in 469 ms."""
    assert [
        (pool.role, pool.workers, pool.passes, round(pool.iteration_s or pool.prefill_s or 0, 3))
        for pool in report.pools
    ] == [("decode", 4, 909, 0.055), ("prefill", 2, 71, 0.469)]
    assert {worker.worker_id: round(worker.iteration_s or 0, 3) for worker in report.workers}[SLOW] == 0.279
    assert max(worker.residual_frac or 0 for worker in report.workers) < 0.02


def test_nothing_of_it_was_refused(report: Report) -> None:
    """Cards, decisions and metrics all were taken in."""
    assert (report.notes, report.skipped, report.unknown) == ({}, {}, {})
    assert report.messages["cards"] == 2
    assert report.legs == {"decode": {"ok": 55}, "prefill": {"ok": 78}}


def test_the_report_shows_both_series_and_the_straggler(report: Report) -> None:
    """The frozen estimate stands on a line and in a column of its own."""
    lines = [" ".join(line.split()) for line in text(report_view(report)).splitlines()]
    assert "5 1.536 1.000 to 3.835 1.003 2.021 0.1% 50.6% 49.3% 1.061 2.290 s 6.039 s 26" in lines
    assert (
        "PoA-hat 1.9066 (95 % 1.1237 to 2.6335) of 17 snapshots with 28.0 requests: "
        "89.876 s as it was, 47.140 s at best"
    ) in lines
    assert (
        "frozen 1.0488 of 165 decisions (prefill 1.0358, decode 1.0650); window 256, block size 16" in lines
    )
    (slow,) = [line for line in lines if line.endswith("5.08 straggler")]
    assert slow.startswith(f"{SLOW}/0 decode 50 - - 0.279 s")


@pytest.mark.parametrize("command", [("estimate",), ("explain", "--at", "12")])
def test_every_run_and_every_machine_give_the_same_figures(command: tuple[str, ...]) -> None:
    """To the byte, also where the arithmetic library takes other instructions."""
    program = "from dynamo_poa.serve.cli import main; main()"
    name, *options = command
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, name, str(RECORDING), *options, "--json"],
            env={**os.environ, "OPENBLAS_CORETYPE": kind},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for kind in ("Prescott", "Haswell")
    }
    assert len(outputs) == 1


# Damaged and older recordings


def rewritten(path: Path, *, without: tuple[str, ...] = (), header: bool = True) -> Path:
    """Copy the recording without some topics, or without its header."""
    reader = Reader(RECORDING)
    lines = list(reader)
    assert reader.header is not None
    with Writer(path, reader.header) as writer:
        for line in lines:
            if line.subject.rpartition(".")[2] not in without:
                writer.write(*line)
    if not header:
        path.write_bytes(path.read_bytes().partition(b"\n")[2])
    return path


def test_without_cards_and_header_workers_are_inferred_and_the_figures_are_the_same(
    tmp_path: Path, report: Report
) -> None:
    """Recordings made before cards were announced; with this cache its size makes no difference."""
    found = replay(
        rewritten(tmp_path / "r.ndjson", without=("cards",), header=False), window=256, block_size=16
    )
    assert found.header is None
    assert found.overall.poa == report.overall.poa
    assert found.notes == {"workers inferred from forward passes, no cards recorded": 6}


@pytest.mark.parametrize(
    ("without", "poa_reason", "frozen"),
    [
        (
            ("forward-pass-metrics",),
            "prefill: no forward pass of its kind heard of lately to learn its time from; "
            "decode: no forward pass of its kind heard of lately to learn its time from",
            True,
        ),
        (("decisions",), "no decisions", False),
    ],
)
def test_without_one_of_the_two_what_is_left_is_used(
    tmp_path: Path, without: tuple[str, ...], poa_reason: str, frozen: bool
) -> None:
    """Decisions alone have a frozen price, forward passes alone a speed; PoA-hat needs both."""
    found = replay(rewritten(tmp_path / "r.ndjson", without=without), window=256, block_size=16)
    assert (found.overall.poa.poa_hat, found.overall.poa.reason) == (None, poa_reason)
    assert (found.overall.frozen.poa_hat is not None) is frozen
    assert bool(found.workers) is not frozen


def test_of_a_recording_cut_off_anywhere_the_beginning_is_used(tmp_path: Path, report: Report) -> None:
    """A recorder that was killed: half a line at the end, which is counted."""
    whole = gzip.decompress(RECORDING.read_bytes())
    path = tmp_path / "r.ndjson"
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 40])
    found = replay(path, window=256, block_size=16)
    assert found.skipped == {"truncated": 1}
    assert found.overall.poa == report.overall.poa


def test_of_a_compressed_recording_cut_off_the_beginning_is_used(tmp_path: Path) -> None:
    """The same of an attachment that was cut."""
    path = tmp_path / "r.ndjson.gz"
    path.write_bytes(RECORDING.read_bytes()[:120_000])
    found = replay(path, window=256, block_size=16)
    assert found.skipped.keys() <= {"gzip_damaged", "truncated"}
    assert found.skipped["gzip_damaged"] == 1
    assert found.overall.poa.poa_hat is not None
