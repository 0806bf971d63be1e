"""Which requests of a live run count, what they amount to, and when a run is void."""

import msgspec
import pytest
from records import RECORD
from suite_results import cell

from dynamo_poa.bench.load import Result as Answer
from dynamo_poa.bench.processes import MachineTime
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites.cells import Point
from dynamo_poa.bench.suites.live_client import Asked
from dynamo_poa.bench.suites.live_result import Reading, Span, picks_of, result_of
from dynamo_poa.coupling import CachingEstimate
from dynamo_poa.workloads.request import Request

CELL = cell(engine="live")


def reading(at_s: float, *, busy_s: float = 0.0, own_s: float = 0.0, tokens: int = 0) -> Reading:
    """Return an instant on a machine of 2 cores."""
    return Reading(at_s, MachineTime(busy_s, 2 * at_s), {"frontend": own_s}, 0.0, own_s / 2, tokens)


def span(first_s: float, last_s: float, name: str = "", busy_frac: float = 0.5, tokens: int = 0) -> Span:
    """Return a stretch in which the frontend took a quarter of a core and the client half of that."""
    seconds = last_s - first_s
    last = reading(last_s, busy_s=2 * seconds * busy_frac, own_s=seconds / 4, tokens=tokens)
    return Span(name, reading(first_s), last, None)


def asked(
    due_s: float,
    e2e_s: float = 1.0,
    *,
    open_loop: bool = True,
    late_s: float = 0.0,
    tokens: int = 11,
    error: str = "",
    workers: tuple[int, int] | None = None,
) -> Asked:
    """Return a request of 100 tokens whose first token took a tenth of its time."""
    request = Request(blocks=(1,), input_tokens=100, output_tokens=11)
    sent_s = due_s + late_s
    ttft_s = None if error else e2e_s / 10
    answer = Answer(sent_s, ttft_s, e2e_s, tokens, error, workers=workers)
    return Asked(request, due_s, sent_s, sent_s + e2e_s, open_loop, answer)


def test_an_open_loops_requests_count_by_when_they_were_due_and_its_throughput_by_when_they_ended() -> None:
    """A queue that grows must not hide its slowest: they are due in time and end later."""
    found = result_of(
        CELL,
        [asked(9.5, 1.0), asked(10.0, 1.0), asked(12.0, 2.0), asked(19.0, 30.0), asked(20.0, 1.0)],
        [span(10.0, 20.0, tokens=500)],
        computed_tokens=250,
    )
    figures = found.figures
    assert (figures["requests"], figures["failed"]) == (3, 0)
    assert figures["e2e_p50_s"] == 2.0
    assert figures["e2e_mean_s"] == pytest.approx(11.0)
    assert figures["ttft_mean_s"] == pytest.approx(1.1)
    assert figures["itl_mean_s"] == pytest.approx((0.09 + 0.18 + 2.7) / 3)
    assert figures["throughput_rps"] == 0.3  # 10.5, 11 and 14
    assert figures["output_tokens_per_s"] == 50.0
    assert figures["cached_frac"] == pytest.approx(1 - 250 / 400)  # the first one's token came before
    assert found.state == "done"


def test_a_closed_loops_requests_count_by_when_they_ended() -> None:
    """Those that end after the load has stopped had less company."""
    loop = [asked(at_s, 2.0, open_loop=False) for at_s in (7.0, 9.0, 11.0, 19.0)]
    figures = result_of(CELL, loop, [span(10.0, 20.0)], 0).figures
    assert (figures["requests"], figures["throughput_rps"]) == (2, 0.2)


def test_a_closed_loops_request_that_never_ended_is_a_failure_of_the_stretch_it_was_sent_in() -> None:
    """Who waits in vain is given up a minute later: a worker that hangs must not leave no trace."""
    loop = [asked(11.0, open_loop=False), asked(15.0, 65.0, open_loop=False, error="no end before the run's")]
    figures = result_of(CELL, loop, [span(10.0, 20.0)], 0).figures
    assert (figures["requests"], figures["failed"], figures["e2e_p99_s"]) == (1, 1, 1.0)


def test_lateness_counts_towards_an_open_loops_latency_and_voids_the_cell_beyond_the_bound() -> None:
    """Issue 5: without lag over 20 ms; the wait for a late client is not the server's, nor is it hidden."""
    on_time = result_of(CELL, [asked(11.0, late_s=0.02)], [span(10.0, 20.0)], 0)
    assert (on_time.state, on_time.reason) == ("done", "")
    late = result_of(CELL, [asked(11.0, late_s=0.025)], [span(10.0, 20.0)], 0)
    assert late.figures["ttft_mean_s"] == pytest.approx(0.125)
    assert late.figures["e2e_mean_s"] == pytest.approx(1.025)
    assert (late.state, late.reason) == ("void", "requests were sent 25 ms late at P99 (bound 20 ms)")
    closed = result_of(CELL, [asked(11.0, late_s=0.01, open_loop=False)], [span(10.0, 20.0)], 0)
    assert closed.figures["ttft_mean_s"] == pytest.approx(0.1)


def test_what_the_controller_said_last_of_a_stretch_is_among_its_figures() -> None:
    """Of the caches too, their copies as a mean over the stretch; what it did not know is absent."""
    known = CachingEstimate(poa_hat=1.5, observed_s=0.3, optimal_s=0.2, duplication=1.25)
    unknown = CachingEstimate(reason="no worker says that it caches anything")
    told = []
    for caching in (known, unknown):
        record = msgspec.structs.replace(RECORD, caching=caching, cache_hit_frac=0.5)
        stretch = span(10.0, 20.0)._replace(record=record)
        points = [Point(at_s=1.0, duplication=caching.duplication), Point(at_s=2.0, duplication=1.75)]
        told.append(result_of(CELL, [asked(11.0)], [stretch], 0, points).figures)
    names = ("poa_hat", "poa_caching", "caching_observed_s", "caching_optimal_s", "duplication", "hit_frac")
    assert [told[0].get(name) for name in names] == [1.5, 1.5, 0.3, 0.2, 1.5, 0.5]
    assert [told[1].get(name) for name in names] == [1.5, None, None, None, 1.75, 0.5]


def test_a_run_whose_processors_were_the_limit_is_void_and_says_so() -> None:
    """Issue 5: marked void. Of several stretches the busiest tells."""
    spans = [span(10.0, 20.0, "below"), span(20.0, 30.0, "above", busy_frac=0.9)]
    found = result_of(CELL, [asked(11.0), asked(21.0)], spans, 0)
    assert (found.state, found.reason) == ("void", "the processors were 90% busy (bound 85%)")
    found = result_of(CELL, [asked(11.0)], [span(10.0, 20.0, busy_frac=0.85)], 0)
    assert found.state == "done"
    assert found.health == pytest.approx(
        {
            "busy_frac": 0.85,
            "own_frac": 3.75 / 20,
            "client_frac": 0.125,
            "idle_graphs_frac": 0.0,
            "send_lag_p99_s": 0.0,
            "cpu.frontend": 0.25,
        }
    )


def test_phases_have_figures_of_their_own() -> None:
    """Contract: cells.Result: in phases the same with `<phase>.` before them."""
    spans = [span(10.0, 20.0, "below"), span(20.0, 30.0, "above")]
    loop = [asked(11.0, 1.0), asked(21.0, 3.0), asked(22.0, 5.0, error="HTTP 503")]
    figures = result_of(CELL, loop, spans, 0).figures
    assert (figures["below.e2e_mean_s"], figures["above.e2e_mean_s"]) == (1.0, 3.0)
    assert (figures["below.failed"], figures["above.failed"]) == (0, 1)
    assert "e2e_mean_s" not in figures


def test_a_stretch_without_an_answer_is_an_error_that_says_what_came_instead() -> None:
    """No figures are better than figures of nothing."""
    loop = [asked(11.0, error="HTTP 503"), asked(12.0, error="HTTP 503")]
    with pytest.raises(MeasurementError, match=r"0 of 2 requests answered in 10 s: 2 x HTTP 503"):
        result_of(CELL, loop, [span(10.0, 20.0)], 0)


def test_picks_are_what_the_frontend_told_or_what_our_router_decided() -> None:
    """A worker nobody chose is told with 0; an aggregated one that prefills and decodes is chosen once."""
    names = {71: "decode-1", 70: "decode-0", 7: "prefill-0", 9: "decode-2"}
    loop = [
        asked(11.0, workers=(7, 70)),
        asked(12.0, workers=(7, 71)),
        asked(21.0, workers=(7, 71)),
        asked(13.0),
    ]
    assert picks_of(loop, [span(10.0, 20.0)], None, names) == {
        "decode-0": 1,
        "decode-1": 1,
        "decode-2": 0,
        "prefill-0": 2,
    }
    aggregated = [asked(11.0, workers=(7, 7))]
    assert picks_of(aggregated, [span(10.0, 20.0)], None, {7: "aggregated-0"}) == {"aggregated-0": 1}
    assert picks_of([], [], {7: 5}, {7: "aggregated-0", 8: "aggregated-1"}) == {
        "aggregated-0": 5,
        "aggregated-1": 0,
    }
