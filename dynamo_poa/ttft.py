"""What time to first token callers see now, from the frontend's histogram or from the routers' decisions.

Owns: reading the frontend's Prometheus text, histogram deltas over a sliding window, quantiles, which of the
      two sources is believed.
Does not own: how the text is fetched (a callable is given) or what a TTFT means for the regime (regime.py).
Invariant: a sample stands for requests that got their first token within the window; nothing new, no sample.
Source: measured on Dynamo 1.4.2's frontend; interpolation as Prometheus' histogram_quantile.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dynamo_poa.values import TtftSample

TTFT_HISTOGRAM = "dynamo_frontend_time_to_first_token_seconds"
QUEUED = "dynamo_frontend_queued_requests"
IN_FLIGHT = "dynamo_frontend_inflight_requests"
STARTED = "dynamo_frontend_requests_started_total"
_WANTED = tuple(
    prefix + name for name in (TTFT_HISTOGRAM, QUEUED, IN_FLIGHT, STARTED) for prefix in ("", "# TYPE ")
)


class FrontendSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The frontend's counters at one instant, summed over models and endpoints.

    bounds_s:    upper bounds of the TTFT buckets, ascending, the last infinite; empty without the histogram
    cumulative:  requests at or under each bound since the frontend started
    Gauges and `started` are None when the frontend does not export them, which is not zero.
    """

    bounds_s: tuple[float, ...] = ()
    cumulative: tuple[float, ...] = ()
    queued: int | None = None
    in_flight: int | None = None
    started: int | None = None


def parse_frontend(text: str) -> FrontendSnapshot:
    """Read the counters we use from the frontend's /metrics.

    Raises:  ValueError when the text is not Prometheus' exposition format.
    """
    # A frontend exports thousands of lines and parsing all of them costs more than the rest of a tick.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_WANTED))
    buckets: dict[float, float] = {}
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            if sample.name == f"{TTFT_HISTOGRAM}_bucket":
                bound_s = float(sample.labels["le"])
                buckets[bound_s] = buckets.get(bound_s, 0.0) + sample.value
            elif sample.name in (QUEUED, IN_FLIGHT, STARTED):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    bounds = tuple(sorted(buckets))
    return FrontendSnapshot(
        bounds_s=bounds,
        cumulative=tuple(buckets[bound] for bound in bounds),
        queued=_count(totals.get(QUEUED)),
        in_flight=_count(totals.get(IN_FLIGHT)),
        started=_count(totals.get(STARTED)),
    )


def _count(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else max(int(value), 0)


def quantile_rank(quantile: float, samples: int) -> int:
    """Return which of `samples` ascending values stands for the quantile, counted from 1.

        rank = floor(quantile * (samples - 1)) + 1

    Rounding down lets the share above the quantile be what its name says even of few samples: one slow
    request among fewer than a hundred is not their P99, or every outlier would read as overload (case D1c).
    """
    return math.floor(quantile * (samples - 1) + 1e-9) + 1


def exact_quantile(ascending_s: Sequence[float], quantile: float) -> float:
    """Return the value at `quantile_rank`; at least one value."""
    return ascending_s[quantile_rank(quantile, len(ascending_s)) - 1]


def histogram_quantile(bounds_s: Sequence[float], counts: Sequence[float], quantile: float) -> float | None:
    """Return the quantile of a histogram, interpolating linearly within a bucket.

        value = low + (high - low) * (rank - requests below the bucket) / requests in it

    Args:     bounds_s: ascending upper bounds, the last infinite.  counts: per bucket, not cumulative.
    Returns:  seconds; None without requests. In the infinite bucket the last finite bound, as Prometheus
              does: the truth is at least that.
    Source:   Prometheus' histogram_quantile, with `quantile_rank` for the rank.
    """
    total = sum(counts)
    if total < 1:
        return None
    rank = quantile_rank(quantile, int(total))
    below, low_s = 0.0, 0.0
    for high_s, count in zip(bounds_s, counts, strict=True):
        if below + count >= rank:
            if math.isinf(high_s):
                return low_s
            return min(low_s + (high_s - low_s) * (rank - below) / count, high_s)  # rounding
        below, low_s = below + count, high_s
    return low_s


class HistogramWindow:
    """TTFT of the last `window_s` seconds, from cumulative snapshots."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: FrontendSnapshot | None = None
        self._deltas: deque[tuple[float, tuple[float, ...]]] = deque()
        self._fresh = False

    def add(self, snapshot: FrontendSnapshot, at_s: float) -> None:
        """Take in a snapshot. The first one only says where counting starts.

        A counter that fell means a restarted frontend: all it counts since is new.
        """
        last, self._last = self._last, snapshot
        if last is None:
            return
        if last.bounds_s != snapshot.bounds_s:
            self._deltas.clear()  # other buckets cannot be added to these
        restarted = last.bounds_s != snapshot.bounds_s or any(
            now < before for now, before in zip(snapshot.cumulative, last.cumulative, strict=True)
        )
        before = (0.0,) * len(snapshot.cumulative) if restarted else last.cumulative
        new = [now - then for now, then in zip(snapshot.cumulative, before, strict=True)]
        per_bucket = tuple(max(high - low, 0.0) for high, low in zip(new, [0.0, *new], strict=False))
        if sum(per_bucket) > 0:
            self._deltas.append((at_s, per_bucket))
            self._fresh = True

    def take(self, at_s: float) -> TtftSample:
        """Return the window's sample; `fresh` tells whether anything came since the last call."""
        while self._deltas and at_s - self._deltas[0][0] > self._window_s:
            self._deltas.popleft()
        fresh, self._fresh = self._fresh, False
        if self._last is None or not self._deltas:
            return TtftSample()
        counts = [sum(column) for column in zip(*(delta for _, delta in self._deltas), strict=True)]
        return TtftSample(
            p50_s=histogram_quantile(self._last.bounds_s, counts, 0.50),
            p99_s=histogram_quantile(self._last.bounds_s, counts, 0.99),
            samples=int(sum(counts)),
            fresh=fresh,
            source="frontend",
        )


def sample_of(values_s: Iterable[float], *, fresh: bool, source: str) -> TtftSample:
    """Return the sample of single measurements, empty without any."""
    ascending_s = sorted(values_s)
    if not ascending_s:
        return TtftSample()
    return TtftSample(
        p50_s=exact_quantile(ascending_s, 0.50),
        p99_s=exact_quantile(ascending_s, 0.99),
        samples=len(ascending_s),
        fresh=fresh,
        source=source,
    )


def combine(frontend: TtftSample, decisions: TtftSample) -> TtftSample:
    """Believe the frontend, which measures what the caller sees, unless it has nothing within the window."""
    return frontend if frontend.samples else decisions


class FrontendScraper:
    """Reads a frontend's /metrics through `fetch` and keeps what it said last.

    answered:    it has answered at least once; before that it is awaited, which is no failure
    failures:    fetches that failed, were late or were not Prometheus text
    last_error:  why the latest fetch was one of them, in words; empty when it was not
    """

    def __init__(self, fetch: Callable[[], Awaitable[str]], *, window_s: float, max_age_s: float) -> None:
        self.answered = False
        self.failures = 0
        self.last_error = ""
        self._fetch = fetch
        self._window = HistogramWindow(window_s)
        self._max_age_s = max_age_s
        self._snapshot: tuple[float, FrontendSnapshot] | None = None

    async def scrape(self, now_s: Callable[[], float]) -> None:
        """Fetch once; a frontend that does not answer is counted, not raised."""
        try:
            snapshot = parse_frontend(await self._fetch())
        except (OSError, ValueError) as error:  # fetch maps its client's errors onto OSError
            self.failures += 1
            self.last_error = str(error) or type(error).__name__
            return
        if not self.answered:
            self.answered, self.failures = True, 0
        self.last_error = ""
        at_s = now_s()
        self._snapshot = (at_s, snapshot)
        self._window.add(snapshot, at_s)

    def take(self, at_s: float) -> tuple[TtftSample, FrontendSnapshot]:
        """Return the TTFT sample and the latest gauges; gauges older than `max_age_s` are unknown."""
        sample = self._window.take(at_s)
        if self._snapshot is None or at_s - self._snapshot[0] > self._max_age_s:
            return sample, FrontendSnapshot()
        return sample, self._snapshot[1]
