"""What a run's requests amount to: latencies, throughput, the share of the prompt that was cached.

Owns: the figures of a Result that come from its requests, of both engines by the same arithmetic.
Does not own: how a request was timed (replayed.py, live_client.py).
Invariant: a request that failed counts as failed and in nothing else; what is not known is absent, never NaN.
"""

import operator
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.config import SloConfig

WARM_UP_FRAC = 0.25  # of the requests, before attainment is counted


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request and how it fared.

    ttft_s, e2e_s:  from when it was sent, or in an open loop from when it was due
    itl_s:          mean time between its tokens, (e2e - ttft) / (output_tokens - 1); None of a single token.
                    The simulator tells no more, so this is what both engines report.
    cached_tokens:  of the prompt, not computed again; None where nobody told
    """

    ttft_s: float
    itl_s: float | None
    e2e_s: float
    output_tokens: int
    input_tokens: int
    cached_tokens: int | None = None
    ok: bool = True


def figures_of(requests: Sequence[Served], seconds: float) -> dict[str, float]:
    """Return the figures by name: means, medians and P99 in seconds, rates per second, counts.

        throughput_rps = answered / seconds        cached_frac = cached_tokens / their input_tokens

    Quantiles are over requests, interpolated between the two nearest.

    Args:     seconds: from the first request due to the last one ended.
    Raises:   MeasurementError when none was answered or no time passed: there is nothing to report.
    """
    answered = [request for request in requests if request.ok]
    if not answered or seconds <= 0:
        raise MeasurementError(f"{len(answered)} of {len(requests)} requests answered in {seconds:g} s")
    figures = _spread("ttft", (request.ttft_s for request in answered))
    figures |= _spread("itl", (request.itl_s for request in answered if request.itl_s is not None))
    figures |= _spread("e2e", (request.e2e_s for request in answered))
    figures["throughput_rps"] = len(answered) / seconds
    figures["output_tokens_per_s"] = sum(request.output_tokens for request in answered) / seconds
    told = [(r.cached_tokens, r.input_tokens) for r in answered if r.cached_tokens is not None]
    if told:
        figures["cached_frac"] = sum(cached for cached, _ in told) / sum(tokens for _, tokens in told)
    figures["requests"] = float(len(answered))
    figures["failed"] = float(len(requests) - len(answered))
    return figures


def attained_figures(requests: Sequence[tuple[float, Served]], slo: SloConfig) -> dict[str, float]:
    """Return the shares of requests within either objective, and goodput: requests a second within both.

    Of those that came after the first WARM_UP_FRAC of them: before, queues are still empty, or all users of
    a closed loop ask at once. One of a single token has no time between tokens and is within that objective.

    Args:     requests: when each came, in seconds, and how it fared.
    Raises:   MeasurementError when they all came at once: there is no rate.
    """
    ordered = sorted(requests, key=lambda one: one[0])
    measured = ordered[int(len(ordered) * WARM_UP_FRAC) :]
    seconds = measured[-1][0] - measured[0][0] if measured else 0.0
    if seconds <= 0:
        raise MeasurementError(f"{len(measured)} requests came in {seconds:g} s: no rate")
    ttft = [one.ok and one.ttft_s <= slo.ttft_s for _, one in measured]
    itl = [one.ok and (one.itl_s is None or one.itl_s <= slo.itl_s) for _, one in measured]
    return {
        "goodput_rps": sum(map(operator.and_, ttft, itl)) / seconds,
        "ttft_frac": sum(ttft) / len(measured),
        "itl_frac": sum(itl) / len(measured),
    }


def _spread(name: str, values_s: Iterable[float]) -> dict[str, float]:
    values = np.fromiter(values_s, dtype=np.float64)
    if not values.size:
        return {}
    p50_s, p99_s = np.percentile(values, (50, 99))
    return {
        f"{name}_mean_s": float(values.mean()),
        f"{name}_p50_s": float(p50_s),
        f"{name}_p99_s": float(p99_s),
    }
