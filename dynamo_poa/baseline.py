"""What a latency is like without load, learnt from what it is now.

Owns: the first value, how quickly it follows down and up, what it does not follow.
Does not own: when it may learn (regime.py, pressure.py: only below saturation, upwards only while calm).
Invariant: pure; load never raises a baseline, not even one that grows for hours: upwards it follows only
           where the caller vouches for calm, and never by more than drift.
Source: half lives from case D1 and from `detection`'s steady loads; survives restarts through RouterParams.
"""

import statistics

import msgspec

READINGS = 10  # fresh windows whose median is the first baseline
DOWN_HALF_LIFE_S = 10.0  # a start under load must not pass for normal for long, nor a lucky window for normal
UP_HALF_LIFE_S = 600.0  # longer than any ramp that should be noticed
UP_LIMIT = 1.5  # above this share of the baseline it is load, not drift


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline in seconds, None before the first; until then `readings_s` are collected.

    steady_s:  geometric moving average over DOWN_HALF_LIFE_S: what a baseline is never above
    """

    value_s: float | None = None
    steady_s: float | None = None
    readings_s: tuple[float, ...] = ()


def learned(
    before: Baseline, reading_s: float, average_s: float, elapsed_s: float, *, calm: bool
) -> Baseline:
    """Return the baseline learned a little further.

        first  the median of READINGS readings
        down   min(value, steady)
        up     value * (average / value) ** (1 - 0.5 ** (elapsed / UP_HALF_LIFE_S)), while calm

    Args:  average_s: the latency now, smoothed as little as its consumer does.  elapsed_s: since the reading
           before.  calm: nothing waits and workers are half idle; False also when that is not known.
    """
    if before.value_s is None:
        readings_s = (*before.readings_s, reading_s)
        if len(readings_s) < READINGS:
            return Baseline(readings_s=readings_s)
        return Baseline(value_s=statistics.median(readings_s))
    steady_s = before.steady_s or before.value_s
    steady_s *= (average_s / steady_s) ** (1 - 0.5 ** (elapsed_s / DOWN_HALF_LIFE_S))
    value_s, ratio = before.value_s, average_s / before.value_s
    if calm and 1 < ratio <= UP_LIMIT:
        value_s *= ratio ** (1 - 0.5 ** (elapsed_s / UP_HALF_LIFE_S))
    elif ratio <= 1:
        value_s = min(value_s, steady_s)
    return Baseline(value_s=value_s, steady_s=steady_s)
