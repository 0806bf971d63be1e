"""What a workload is like, in figures: what can be shared, how popular it is, lengths, rates, bursts.

Owns: the figures and their formulas.
Does not own: where the requests come from; what a router or a cache of finite size makes of them.
Invariant: only whole blocks count as shared, as in every engine's cache.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from scipy.optimize import brentq

from dynamo_poa.workloads.request import Request

MAX_EXPONENT = 10.0


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of prompts or of answers, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in figures.

    prefix_frac:  of all prompt tokens, what one cache without end would have had already
    rate_rps:     None in a closed loop
    dispersion:   of arrivals in windows of 1 s, see `dispersion`; None in a closed loop or within 2 s
    """

    requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    prefix_frac: float
    rate_rps: float | None
    dispersion: float | None


def describe(requests: Sequence[Request], block_tokens: int) -> Statistics:
    """Return the figures of one request or more."""
    times_s = [request.at_s for request in requests if request.at_s is not None]
    span_s = times_s[-1] if times_s else 0.0
    return Statistics(
        requests=len(requests),
        input_tokens=_lengths([request.input_tokens for request in requests]),
        output_tokens=_lengths([request.output_tokens for request in requests]),
        prefix_frac=prefix_frac(requests, block_tokens),
        rate_rps=len(times_s) / span_s if span_s else None,
        dispersion=dispersion(times_s, 1.0),
    )


def prefix_frac(requests: Iterable[Request], block_tokens: int) -> float:
    """Return the share of all prompt tokens that a perfect cache without end would serve; 0 of nothing.

    A block is served when it and all before it were whole blocks of earlier prompts.
    """
    seen: set[int] = set()
    served = total = 0
    for request in requests:
        whole = request.blocks[: request.input_tokens // block_tokens]
        known = next((place for place, block in enumerate(whole) if block not in seen), len(whole))
        served += known * block_tokens
        total += request.input_tokens
        seen.update(whole[known:])
    return served / total if total else 0.0


def prefix_counts(requests: Iterable[Request], depth: int = 1) -> list[int]:
    """Return how often each prefix of `depth` blocks was asked, the most popular first.

    Prompts shorter than that count for none.
    """
    counts = Counter(request.blocks[depth - 1] for request in requests if len(request.blocks) >= depth)
    return sorted(counts.values(), reverse=True)


def popularity_exponent(counts: Sequence[int]) -> float | None:
    """Fit Zipf's law to how often each was asked, by maximum likelihood.

        p(r) = r ** -s / sum over k of k ** -s;   s: where the mean of ln r under p is the observed one

    Ranks are those observed, which flatters the law where most were asked once or twice.

    Args:     counts: the most popular first, as `prefix_counts` gives them.
    Returns:  s in [0, 10]; None of fewer than two.
    """
    if len(counts) < 2:
        return None
    logs = np.log(np.arange(1, len(counts) + 1))
    observed = float(np.average(logs, weights=counts))

    def excess(exponent: float) -> float:
        return float(np.average(logs, weights=np.exp(-exponent * logs))) - observed

    if excess(0.0) <= 0:
        return 0.0
    if excess(MAX_EXPONENT) >= 0:
        return MAX_EXPONENT
    return float(brentq(excess, 0.0, MAX_EXPONENT))


def dispersion(times_s: Sequence[float], window_s: float) -> float | None:
    """Return how bursty arrivals are: variance over mean of their number in each window.

    1 for Poisson, 0 for a metronome, more for bursts longer than a window.

    Args:     times_s: from the start at 0, ascending.
    Returns:  None of fewer than two whole windows.
    """
    counts = counts_in_windows(times_s, window_s)
    if len(counts) < 2 or not counts.any():
        return None
    return float(counts.var() / counts.mean())


def counts_in_windows(times_s: Sequence[float], window_s: float) -> np.ndarray:
    """Return how many came in each whole window from 0 to the last arrival, `(windows,) int64`."""
    windows = int(times_s[-1] / window_s) if times_s else 0
    numbers = np.asarray(times_s, dtype=float) // window_s
    return np.bincount(numbers[numbers < windows].astype(np.int64), minlength=windows)


def _lengths(tokens: Sequence[int]) -> Lengths:
    p50, p90, p99 = (float(at) for at in np.quantile(tokens, (0.5, 0.9, 0.99)))
    return Lengths(mean=float(np.mean(tokens)), p50=p50, p90=p90, p99=p99)
