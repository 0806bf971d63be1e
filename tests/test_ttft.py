"""TTFT from the frontend's histogram and from single measurements: worked numbers."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_poa.ttft import (
    FrontendScraper,
    FrontendSnapshot,
    HistogramWindow,
    combine,
    exact_quantile,
    histogram_quantile,
    parse_frontend,
    quantile_rank,
    sample_of,
)
from dynamo_poa.values import TtftSample

BOUNDS = (0.1, 1.0, math.inf)
TEXT = """\
# HELP dynamo_frontend_inflight_requests Number of inflight requests
# TYPE dynamo_frontend_inflight_requests gauge
dynamo_frontend_inflight_requests{model="a"} 3
dynamo_frontend_inflight_requests{model="b"} 4
# TYPE dynamo_frontend_output_tokens counter
dynamo_frontend_output_tokens_total{model="a"} 999
# TYPE dynamo_frontend_queued_requests gauge
dynamo_frontend_queued_requests{model="a"} 2
# TYPE dynamo_frontend_requests_started_total counter
dynamo_frontend_requests_started_total{endpoint="completions",request_type="stream"} 40
dynamo_frontend_requests_started_total{endpoint="chat",request_type="stream"} 2
# HELP dynamo_frontend_time_to_first_token_seconds Time to first token
# TYPE dynamo_frontend_time_to_first_token_seconds histogram
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="0.1"} 10
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="1"} 30
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="+Inf"} 31
dynamo_frontend_time_to_first_token_seconds_sum{model="a"} 12.5
dynamo_frontend_time_to_first_token_seconds_count{model="a"} 31
dynamo_frontend_time_to_first_token_seconds_bucket{model="b",le="0.1"} 1
dynamo_frontend_time_to_first_token_seconds_bucket{model="b",le="1"} 1
dynamo_frontend_time_to_first_token_seconds_bucket{model="b",le="+Inf"} 1
dynamo_frontend_time_to_first_token_seconds_sum{model="b"} 0.01
dynamo_frontend_time_to_first_token_seconds_count{model="b"} 1
"""


def snapshot(*cumulative, bounds=BOUNDS):
    return FrontendSnapshot(bounds_s=bounds, cumulative=tuple(float(c) for c in cumulative))


def test_the_frontends_counters_are_summed_over_models_and_endpoints():
    """dynamo-facts 4.1: label model on each of them."""
    assert parse_frontend(TEXT) == FrontendSnapshot(
        bounds_s=BOUNDS, cumulative=(11.0, 31.0, 32.0), queued=2, in_flight=7, started=42
    )


def test_what_the_frontend_does_not_export_is_unknown():
    """Absent is not zero."""
    assert parse_frontend("# TYPE x gauge\nx 1\n") == FrontendSnapshot()


def test_text_that_is_no_exposition_is_refused():
    """Counted as a failed scrape rather than read as an idle frontend."""
    with pytest.raises(ValueError, match="could not convert"):
        parse_frontend("dynamo_frontend_queued_requests{ oops\n")


def test_a_page_that_is_not_the_frontends_says_nothing():
    """A proxy's error page under /metrics: everything unknown, not an idle frontend."""
    assert parse_frontend("<html>\n<body>Bad gateway</body>\n</html>\n") == FrontendSnapshot()


@pytest.mark.parametrize(
    ("quantile", "samples", "rank"),
    [(0.99, 1, 1), (0.99, 60, 59), (0.99, 100, 99), (0.99, 101, 100), (0.5, 5, 3)],
)
def test_the_rank_is_rounded_down(quantile, samples, rank):
    """One slow request among fewer than a hundred and one is not their P99 (D1c)."""
    assert quantile_rank(quantile, samples) == rank


def test_quantiles_of_single_measurements_are_measurements():
    """59 of 60 at 1 s and one at 50 s: P99 is 1 s; two at 50 s: P99 is 50 s."""
    assert exact_quantile([1.0] * 59 + [50.0], 0.99) == 1.0
    assert exact_quantile([1.0] * 58 + [50.0] * 2, 0.99) == 50.0


@pytest.mark.parametrize(
    ("counts", "quantile", "expected"),
    [
        ((10, 0, 0), 0.5, 0.05),  # rank 5 of 10 in [0, 0.1]
        ((5, 10, 0), 0.99, 0.1 + 0.9 * 9 / 10),  # rank 14: 9th of ten in [0.1, 1]
        ((0, 1, 9), 0.99, 1.0),  # beyond the last finite bound
        ((0, 0, 0), 0.99, None),
    ],
)
def test_histogram_quantiles_interpolate_within_a_bucket(counts, quantile, expected):
    """As Prometheus' histogram_quantile, worked by hand."""
    result = histogram_quantile(BOUNDS, counts, quantile)
    assert result == (None if expected is None else pytest.approx(expected, rel=1e-12))


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3), st.floats(0.01, 0.99))
@example([0, 311, 42], 0.8828125)  # rounding
def test_histogram_quantiles_stay_within_the_finite_bounds(counts, quantile):
    """Every exported number is finite (cases, section 0.4)."""
    result = histogram_quantile(BOUNDS, counts, quantile)
    assert (result is None) if sum(counts) == 0 else 0 <= result <= 1.0


def test_what_was_counted_before_we_came_is_no_sample():
    """The first snapshot is where counting starts; nothing new, no sample."""
    window = HistogramWindow(3.0)
    window.add(snapshot(100, 200, 300), 10.0)
    assert window.take(10.0) == TtftSample()
    window.add(snapshot(100, 200, 300), 10.5)
    assert window.take(10.5) == TtftSample()


def test_a_frontend_without_its_histogram_yet_says_nothing_and_then_counts_from_zero():
    """Measured on Dynamo 1.4.2: the histogram appears with the first request."""
    window = HistogramWindow(3.0)
    window.add(FrontendSnapshot(in_flight=0), 1.0)
    window.add(FrontendSnapshot(in_flight=0), 1.5)
    assert window.take(1.5) == TtftSample()
    window.add(snapshot(2, 2, 2), 2.0)
    assert window.take(2.0).samples == 2


def test_the_window_holds_the_requests_between_snapshots_and_lets_them_go():
    """Ten requests in the first bucket at 10.5 s stay for three seconds; fresh only once."""
    window = HistogramWindow(3.0)
    window.add(snapshot(0, 5, 5), 10.0)
    window.add(snapshot(10, 15, 15), 10.5)
    assert window.take(10.5) == TtftSample(
        p50_s=0.05, p99_s=pytest.approx(0.09), samples=10, fresh=True, source="frontend"
    )
    assert window.take(13.5).fresh is False
    assert window.take(13.5).samples == 10
    assert window.take(13.51) == TtftSample()


def test_a_restarted_frontend_counts_from_zero():
    """Counters fell from 50 to 4: the four are new; never negative."""
    window = HistogramWindow(3.0)
    window.add(snapshot(50, 50, 50), 1.0)
    window.add(snapshot(0, 4, 4), 2.0)
    sample = window.take(2.0)
    assert sample.samples == 4
    assert sample.p50_s == pytest.approx(0.1 + 0.9 * 2 / 4)


def test_a_frontend_with_other_buckets_starts_the_window_anew():
    """An upgraded frontend may change its bounds under us."""
    window = HistogramWindow(3.0)
    window.add(snapshot(0, 0, 0), 1.0)
    window.add(snapshot(9, 9, 9), 1.5)
    window.add(snapshot(1, 2, bounds=(0.5, math.inf)), 2.0)
    sample = window.take(2.0)
    assert sample.samples == 2
    assert sample.p99_s == 0.5


def test_the_frontend_is_believed_before_the_routers():
    """It measures what the caller sees; the routers stand in when it has nothing."""
    routers = sample_of([0.3, 0.1, 0.2], fresh=True, source="decisions")
    frontend = TtftSample(p50_s=0.4, p99_s=0.5, samples=1, source="frontend")
    assert combine(frontend, routers) is frontend
    assert combine(TtftSample(), routers) == TtftSample(
        p50_s=0.2, p99_s=0.2, samples=3, fresh=True, source="decisions"
    )


async def test_a_frontend_that_fails_is_counted_and_its_gauges_become_unknown():
    """An old `no request in flight` is no evidence of anything."""
    answers = [TEXT, OSError("connection refused"), "dynamo_frontend_queued_requests{ oops\n"]

    async def fetch():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    scraper = FrontendScraper(fetch, window_s=3.0, max_age_s=2.0)
    await scraper.scrape(lambda: 10.0)
    assert scraper.take(12.0)[1].in_flight == 7
    await scraper.scrape(lambda: 12.5)
    assert (scraper.failures, scraper.last_error) == (1, "connection refused")
    await scraper.scrape(lambda: 12.6)
    assert scraper.failures == 2
    assert scraper.take(12.6)[1] == FrontendSnapshot()
    answers.append(TEXT)
    await scraper.scrape(lambda: 13.0)
    assert (scraper.failures, scraper.last_error) == (2, "")
