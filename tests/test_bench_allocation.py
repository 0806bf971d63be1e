"""The suite `allocation`: what predictions are made from, when one is right, what the document says."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from suite_results import stamp

from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import allocation, allocation_doc, allocation_inputs, baselines, replayed
from dynamo_poa.bench.suites.allocation import FLEETS, Asked, fleet
from dynamo_poa.bench.suites.allocation_doc import MIDDLE, Row, Simulated, markdown, rows_of
from dynamo_poa.bench.suites.allocation_inputs import Pass, decode_passes, fitted, mix_of, prefill_passes
from dynamo_poa.bench.suites.cells import Cell, Result
from dynamo_poa.bench.suites.figures import Served, attained_figures
from dynamo_poa.bench.suites.replayed import Record
from dynamo_poa.bench.suites.store import Contents
from dynamo_poa.closed_loop import users_of
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import AllocationEstimate, Attainment, Split
from dynamo_poa.errors import ConfigError
from dynamo_poa.values import Role
from dynamo_poa.workloads.arrivals import Closed, Poisson
from dynamo_poa.workloads.synthetic import LongTail, Paper, Trace

SLO = SloConfig(ttft_s=0.1, itl_s=0.02)


def record(**changes: object) -> Record:
    """Return a request of 1,000 tokens, 200 of them cached, and an answer of 100, changed."""
    usual = Record(
        terminal_status="completed",
        arrival_time_ms=0.0,
        terminal_time_ms=1040.0,
        ttft_ms=50.0,
        itl_ms=10.0,
        e2e_latency_ms=1040.0,
        input_length=1000,
        output_length=100,
        reused_input_tokens=200,
        prefill_worker_idx=0,
        decode_worker_idx=0,
        prefill_admit_ms=10.0,
        source_held_ms=40.0,
        decode_admit_ms=40.0,
    )
    return msgspec.structs.replace(usual, **changes)


def test_a_prompts_pass_is_the_time_from_its_worker_beginning_to_its_being_computed() -> None:
    """800 tokens in 30 ms; 20,000 take three passes of a batch of 8,192, a third of both each."""
    long = record(input_length=20_200, source_held_ms=460.0)
    assert list(prefill_passes([record(), long], 8192)) == [
        Pass(0.03, prefill_tokens=800.0),
        Pass(0.15, prefill_tokens=20_000 / 3),
    ]


def test_a_requests_iterations_are_beside_the_mean_of_what_decoded_on_its_worker() -> None:
    """One decodes from 40 to 1,040 ms, another there for the second half of it: 1 + 0.5 of 1,050 tokens."""
    half = record(decode_admit_ms=540.0, itl_ms=12.0)
    elsewhere = record(decode_worker_idx=1)
    alone = record(itl_ms=None)  # of a single token: says nothing
    assert list(decode_passes([record(), half, elsewhere, alone])) == [
        Pass(0.01, decode_requests=1.5, decode_kv_tokens=1.5 * 1050),
        Pass(0.012, decode_requests=2.0, decode_kv_tokens=2 * 1050.0),
        Pass(0.01, decode_requests=1.0, decode_kv_tokens=1050.0),
    ]


def test_the_curve_is_the_line_the_passes_lie_on() -> None:
    """16 ms and 20 us a token; more passes than LatencyBook keeps pending."""
    passes = [Pass(0.016 + 2e-5 * tokens, prefill_tokens=tokens) for tokens in range(100, 5100)]
    found = fitted(passes, Role.PREFILL, FLEETS[0])
    assert found.samples == pytest.approx(5000)
    assert found.curve.prefill_base_s == pytest.approx(0.016)
    assert found.curve.prefill_token_s == pytest.approx(2e-5)


def test_the_mix_is_that_of_the_requests_the_figures_are_of() -> None:
    """Of four the first is left out; what is held counts by the length of the answer."""
    records = [
        record(arrival_time_ms=0.0, input_length=9000),
        record(arrival_time_ms=1000.0),
        record(arrival_time_ms=2000.0, input_length=400, output_length=300),
        record(arrival_time_ms=3000.0),
    ]
    mix = mix_of(records, Poisson(rate_rps=1.0))
    assert mix.uncached_tokens == pytest.approx((800 + 200 + 800) / 3)
    assert mix.uncached_squared == pytest.approx((800**2 + 200**2 + 800**2) / 3)
    assert mix.output_tokens == pytest.approx(500 / 3)
    assert mix.context_tokens == pytest.approx((100 * 1050 + 300 * 550 + 100 * 1050) / 500)
    assert mix.context_squared == pytest.approx((200 * 1050**2 + 300 * 550**2) / 500)
    assert [mix.arrival_rps, mix.users, mix.horizon_s] == pytest.approx([3 / 2, 0, 3.0])
    closed = mix_of(records, Closed(users=7), think_s=1.5)
    assert [closed.users, closed.think_s, closed.arrival_rps] == [7, 1.5, 0.0]


def test_objectives_are_two_and_a_half_times_an_unloaded_request() -> None:
    """Means of 50 and 70 ms, and of 10 ms: a request of a single token has none."""
    found = allocation_inputs.objectives([record(), record(ttft_ms=70.0, itl_ms=None)])
    assert [found.ttft_s, found.itl_s] == pytest.approx([0.15, 0.025])


def served(ttft_s: float, itl_s: float | None, ok: bool = True) -> Served:
    """Return one request."""
    return Served(ttft_s=ttft_s, itl_s=itl_s, e2e_s=1.0, output_tokens=2, input_tokens=2, ok=ok)


def test_goodput_is_of_requests_within_both_objectives_after_the_warm_up() -> None:
    """Eight at one a second, the first two not counted: six in 5 s, two within both, a refused one not."""
    fared = [
        served(0.05, 0.01),
        served(0.05, 0.01),
        served(0.05, 0.01),  # counted from here
        served(0.2, 0.01),
        served(0.05, 0.03),
        served(0.05, None),
        served(0.05, 0.01, ok=False),
        served(0.2, 0.03),
    ]
    arrivals = [(float(at), one) for at, one in enumerate(fared)]
    assert attained_figures(arrivals[::-1], SLO) == {
        "goodput_rps": pytest.approx(2 / 5),
        "ttft_frac": pytest.approx(3 / 6),
        "itl_frac": pytest.approx(3 / 6),
    }
    with pytest.raises(MeasurementError, match="no rate"):
        attained_figures([(1.0, one) for _, one in arrivals], SLO)


def test_a_cell_with_objectives_has_their_figures_and_another_id() -> None:
    """The ids of cells without are those that kept results have."""
    cell = Cell(
        suite="test",
        engine="replay",
        fleet=fleet(2, 2),
        content=Paper(),
        load=Poisson(rate_rps=40.0),
        policy=baselines.DEFAULT,
        seed=1,
        requests=60,
        slo=SLO,
    )
    figures = replayed.run(cell).figures
    assert figures["ttft_frac"] == figures["itl_frac"] == 1.0
    assert figures["goodput_rps"] == pytest.approx(40, rel=0.5)
    ids = {
        cell.id,
        msgspec.structs.replace(cell, slo=None).id,
        msgspec.structs.replace(cell, fleet=msgspec.structs.replace(cell.fleet, prefill_at_once=0)).id,
    }
    assert len(ids) == 3
    before = Cell(
        suite="test",
        engine="replay",
        fleet=msgspec.structs.replace(fleet(2, 2), prefill_at_once=0),
        content=Paper(),
        load=Poisson(rate_rps=40.0),
        policy=baselines.DEFAULT,
        seed=1,
    )
    assert before.id == "a3783b67c36a43c1"


def test_the_simulator_hands_prompts_over_when_computed_only_if_it_takes_one_at_a_time() -> None:
    """ai-dynamo 1.4.2: with several at a time all are kept until none is left, the first for five passes.

    When this fails, the suite can have prefill workers as the engine has them.
    """
    cell = Cell(
        suite="test",
        engine="replay",
        fleet=fleet(1, 4),
        content=LongTail(input_sigma=0.0, output_sigma=0.0),  # 1,024 tokens and 128
        load=Poisson(rate_rps=1000.0),
        policy=baselines.DEFAULT,
        seed=1,
        requests=6,
    )
    ends_ms = sorted(one.source_held_ms or 0.0 for one in replayed.records(cell))
    assert all(later - earlier > 30 for earlier, later in pairwise(ends_ms))
    several = msgspec.structs.replace(cell, fleet=msgspec.structs.replace(cell.fleet, prefill_at_once=0))
    assert len({one.source_held_ms for one in replayed.records(several)}) == 1


def test_workloads_are_eight_the_traces_that_are_there_and_six_held_out(tmp_path: Path) -> None:
    """Each has its own name, whatever folder or half of a trace; the data file knows all of them."""
    assert len(allocation.workloads(None)) == len(allocation.workloads(tmp_path)) == 8 + 6
    (tmp_path / allocation.TRACES[1]).touch()
    assert len(allocation.workloads(tmp_path)) == 9 + 6
    (tmp_path / allocation.TRACES[0]).touch()
    every = allocation.workloads(tmp_path)
    assert [one.held_out for one in every] == [False] * 10 + [True] * 6
    assert {one.name for one in every} == set(allocation.inputs().workloads)
    trace = every[9].content
    assert isinstance(trace, Trace)
    other = msgspec.structs.replace(every[9], content=msgspec.structs.replace(trace, part="first", limit=3))
    assert other.name == every[9].name
    for known in allocation.inputs().workloads.values():
        assert set(known.at) == {one.name for one in FLEETS}


def test_cells_are_every_split_under_every_workload_with_its_objectives() -> None:
    """14 workloads, 7 splits, 2 seeds."""
    cells = list(allocation.cells("allocation", (1, 2), None))
    assert len(cells) == len({cell.id for cell in cells}) == 14 * 7 * 2
    for cell in cells:
        known = allocation.inputs().workloads[Asked(content=cell.content, load=cell.load).name]
        assert cell.slo == known.slo
        assert cell.fleet.prefill + cell.fleet.decode == 8


def attainments(*goodput_rps: float) -> tuple[Attainment, ...]:
    """Return splits of so much goodput."""
    return tuple(
        Attainment(split=Split(n, 8 - n), ttft_frac=1.0, itl_frac=1.0, goodput_rps=rate)
        for n, rate in enumerate(goodput_rps, 1)
    )


def row(simulated_rps: tuple[float, ...], predicted_rps: tuple[float, ...]) -> Row:
    """Return a workload; all predictions are alike but that from 5P/3D, which is what was simulated."""
    predicted, sure = attainments(*predicted_rps), attainments(*simulated_rps)
    at = {one.name: sure if one.name == "5P/3D" else predicted for one in FLEETS}
    simulated = tuple(Simulated(r, 1.0, 1.0) for r in simulated_rps)
    return Row("zipf | 240 requests/s", False, predicted, simulated, at, AllocationEstimate(reason="no"))


def test_a_prediction_is_right_when_its_split_gives_up_three_percent_at_most() -> None:
    """Of simulation's best goodput, 100."""
    right = row((0, 0, 0, 97.1, 90, 100, 0), (0, 0, 0, 50, 40, 30, 0))
    wrong = row((0, 0, 0, 96.9, 90, 100, 0), (0, 0, 0, 50, 40, 30, 0))
    assert right.lost_frac(right.predicted) == pytest.approx(0.029)
    assert wrong.lost_frac(wrong.predicted) == pytest.approx(0.031)
    assert (right.right, wrong.right) == (True, False)
    assert right.simulated_best == "6P/2D"


def test_advice_is_followed_until_it_leads_nowhere_new() -> None:
    """From 4P/4D to 5P/3D, measured there to 6P/2D, and from there it would lead back."""
    assert row((0, 0, 0, 50, 90, 100, 0), (0, 0, 0, 50, 70, 30, 0)).followed() == (MIDDLE, "5P/3D", "6P/2D")


def results(best: int) -> tuple[Result, ...]:
    """Return every split under the first workload, with most goodput at that many prefill workers."""
    cells = (
        cell
        for cell in allocation.cells("allocation", (1, 2), None)
        if isinstance(cell.content, Paper) and isinstance(cell.load, Closed)
    )
    return tuple(
        Result(
            cell=cell,
            state="done",
            figures={"goodput_rps": 100.0 - 10 * abs(cell.fleet.prefill - best) + cell.seed}
            | {"ttft_frac": 1.0, "itl_frac": 1.0},
        )
        for cell in cells
    )


def test_the_document_says_what_was_missed_and_why() -> None:
    """Paper: 3P/5D is predicted; where 1P/7D were best that would be a miss."""
    text = markdown(Contents(stamp=stamp("allocation"), results=results(best=3)))
    assert "**With the demand known** the predicted best split is simulation's" in text
    assert "in **1 of 1** workloads that the model was made on" in text
    assert "## What was missed, and why\n\nWith the demand known, nothing.\n\n" in text
    assert "Not given, so left out: mooncake_conversation_a.jsonl, mooncake_synthetic.jsonl." in text
    missed = markdown(Contents(stamp=stamp("allocation"), results=results(best=1)))
    assert "in **0 of 1** workloads" in missed
    assert "**paper | 32 users**: 3P/5D predicted, 1P/7D is best." in missed
    assert r"| paper \| 32 users | 3P/5D | 1P/7D | 102 | 19.7% | **missed** | **4P/4D (29.6%)** |" in missed


def test_what_the_controller_reads_is_judged_beside_what_is_predicted_from_known_demand() -> None:
    """Paper: it keeps 4P/4D, which is as good by its own prediction; that gives up 9.9% were 3P/5D best."""
    (found,) = rows_of(results(best=3))
    assert (str(found.read_split), found.read_right, found.right) == ("4P/4D", False, True)
    assert found.read == allocation.as_read(allocation.inputs().workloads["paper | 32 users"])
    assert found.read_gain_rps == 0.0
    text = markdown(Contents(stamp=stamp("allocation"), results=results(best=3)))
    assert "the split that it would have is as good in **0 of 1** of the same" in text
    assert r"| paper \| 32 users | 3P/5D | 3P/5D | 102 | 0.0% | right | **4P/4D (9.9%)** |" in text
    assert (
        "**paper | 32 users**, as the controller reads it: 4P/4D. It reads 79.9 requests/s, 64 uncached "
        "tokens, 160 held and 64 of an answer, means, in its minute; in the run that the prediction is made "
        "from there are a closed loop, 64, 160 and 64. With the demand known 3P/5D is predicted to give 80.0 "
        "requests/s and 4P/4D 79.7."
    ) in text


def test_a_controller_that_cannot_tell_is_not_right() -> None:
    """Its reason stands in the table; a change that is advised is marked."""
    unknown = row((0, 0, 0, 100, 90, 80, 0), (0, 0, 0, 100, 90, 80, 0))
    assert (unknown.read_split, unknown.read_right, unknown.read_gain_rps) == (None, False, 0.0)
    assert allocation_doc._read_so(unknown) == "**none**: no"
    now, then = unknown.predicted[3], unknown.predicted[4]
    read = AllocationEstimate(
        poa_hat=1.2, now=now, best=then, target=then, gain_frac=0.2, gain_low=0.1, gain_high=0.3
    )
    assert allocation_doc._read_so(unknown._replace(read=read)) == "**5P/3D (10.0%)** advised"
    better = unknown._replace(read=read, simulated=unknown.simulated[::-1])
    assert better.read_gain_rps == -100.0
    assert allocation_doc._read_so(unknown._replace(read=msgspec.structs.replace(read, target=None))) == (
        "4P/4D (0.0%)"
    )


def test_users_are_read_from_what_is_in_flight_and_those_who_think_are_not() -> None:
    """Every closed loop of the suite but that of `mixed`, whose users think; no open one."""
    read = {}
    for name, known in allocation.inputs().workloads.items():
        minute = known.minute
        seconds = np.array(minute.seconds)
        read[name] = users_of(np.array(minute.in_flight), seconds[:, 0].mean())
        asked = known.at[MIDDLE].mix
        assert read[name] == (asked.users if asked.think_s < 0.1 else 0), name
    assert sorted(read.values())[-5:] == [32, 32, 64, 128, 256]


def test_the_minute_is_what_the_controllers_windows_hold_three_quarters_into_a_run() -> None:
    """One a second for 9 s, the last at 8.5 s: looked at at 6 s, without the first second."""
    records = [
        record(arrival_time_ms=1000.0 * n + 500, terminal_time_ms=1000.0 * n + 2100, output_length=50 + n)
        for n in range(9)
    ]
    eighths = allocation_inputs.eighths_rps(records)
    assert eighths == pytest.approx((1.0,) * 7 + (2.0,))  # the last one counts, too
    minute = allocation_inputs.read_minute(records, (eighths, eighths))
    assert minute.seconds == ((1.0, 800.0, 800.0**2, 1000.0, 1000.0**2),) * 5
    assert minute.in_flight == (1.0, 2.0, 2.0, 2.0, 2.0)
    ended = [50 + n for n in range(4)]  # at 2.1, 3.1, 4.1 and 5.1 s
    assert minute.output_tokens == pytest.approx(sum(ended) / 4)
    held = sum(n * (1000 + n / 2) for n in ended) / sum(ended)
    assert minute.context_tokens == pytest.approx(held)
    assert minute.eighths_rps == (eighths, eighths)


def test_the_file_has_lists_of_numbers_on_one_line_and_is_what_was_measured() -> None:
    """Thousands of lines of one number each say nothing to who compares two files."""
    text = allocation_inputs.file_of(allocation.inputs())
    assert text == allocation.INPUTS.read_text()
    assert msgspec.json.decode(text, type=allocation.Inputs) == allocation.inputs()
    assert "[\n" in text  # of lists


def test_a_right_split_with_another_goodput_than_predicted_is_told() -> None:
    """Paper: 80 requests/s predicted for 3P/5D; 102 simulated are within a quarter of that, 203 are not."""
    found = rows_of(results(best=3))
    assert "3P/5D" in str(found[0].predicted[2].split)
    assert list(allocation_doc._off(found)) == []
    doubled = [one._replace(goodput_rps=2 * one.goodput_rps) for one in found[0].simulated]
    (told,) = allocation_doc._off([found[0]._replace(simulated=tuple(doubled))])
    assert told == (
        "**paper | 32 users**: the split is right and its goodput is not, 80 requests/s predicted and 203 "
        "simulated."
    )
    nothing = [one._replace(goodput_rps=0.0) for one in found[0].simulated]
    (told,) = allocation_doc._off([found[0]._replace(simulated=tuple(nothing))])
    assert told.endswith("80 requests/s predicted and 0 simulated.")


def test_without_every_split_there_is_nothing_to_judge() -> None:
    """A run that was cut short."""
    with pytest.raises(ConfigError, match="no workload has results of every split"):
        rows_of(results(best=3)[:6])
    with pytest.raises(ConfigError, match="no workload has results"):
        rows_of([msgspec.structs.replace(one, state="failed") for one in results(best=3)])


def test_the_document_is_written_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and the reason when there are no results."""
    assert allocation_doc.main([str(tmp_path), "--out", str(tmp_path / "out.md")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    lines = [
        msgspec.json.encode(stamp("allocation")),
        *(msgspec.json.encode(one) for one in results(best=3)),
    ]
    (tmp_path / "allocation.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert allocation_doc.main([str(tmp_path), "--out", str(tmp_path / "docs" / "out.md")]) == 0
    assert (tmp_path / "docs" / "out.md").read_text().startswith("# Whether the predicted split is the best")
