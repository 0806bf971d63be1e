"""What a run's requests amount to, on worked numbers."""

import pytest

from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites.figures import Served, figures_of


def served(ttft_s: float, *, tokens: int = 11, cached: int | None = None, ok: bool = True) -> Served:
    """Return a request whose tokens come 0.1 s apart."""
    return Served(
        ttft_s=ttft_s,
        itl_s=0.1 if tokens > 1 else None,
        e2e_s=ttft_s + (tokens - 1) * 0.1,
        output_tokens=tokens,
        input_tokens=100,
        cached_tokens=cached,
        ok=ok,
    )


def test_figures_are_those_of_the_answered_requests():
    """Worked: TTFT 1, 2 and 3 s, a failed one, 10 s: P99 lies 0.98 of the way from 2 to 3."""
    figures = figures_of(
        [served(1.0, cached=50), served(2.0, cached=0), served(3.0), served(99.0, ok=False)], 10.0
    )
    assert figures == pytest.approx(
        {
            "ttft_mean_s": 2.0,
            "ttft_p50_s": 2.0,
            "ttft_p99_s": 2.98,
            "itl_mean_s": 0.1,
            "itl_p50_s": 0.1,
            "itl_p99_s": 0.1,
            "e2e_mean_s": 3.0,
            "e2e_p50_s": 3.0,
            "e2e_p99_s": 3.98,
            "throughput_rps": 0.3,
            "output_tokens_per_s": 3.3,
            "cached_frac": 0.25,
            "requests": 3.0,
            "failed": 1.0,
        }
    )


def test_what_is_not_known_is_absent():
    """Answers of one token have no time between tokens; nobody told what was cached."""
    assert {"itl_mean_s", "cached_frac"}.isdisjoint(figures_of([served(1.0, tokens=1)], 1.0))


def test_without_an_answer_there_are_no_figures():
    """Failing says more than zeros would."""
    with pytest.raises(MeasurementError, match="0 of 1 requests answered in 5 s"):
        figures_of([served(1.0, ok=False)], 5.0)
