"""Whether PoA-hat rises, and whether latency bends upwards with load.

Owns: the slope of PoA-hat over the last seconds, the forgetting quadratic fit of TTFT P50 on load.
Does not own: what follows from them: they are soft evidence, told beside a rise of TTFT, and move nothing.
Invariant: pure and bounded; with too little to fit there is no figure, never 0.
Source: paper section 5.1: the transition shows in the second derivative of latency against load.
"""

import msgspec
import numpy as np

SLOPE_S = 30.0
MIN_POINTS = 5  # readings of PoA-hat, one a second
CURVATURE_HALF_LIFE_S = 120.0  # loads have to differ within it
MIN_SPREAD = 0.15  # standard deviation of the load over its mean; under it a curve cannot be told from a line
MIN_WEIGHT = 20.0  # readings behind the fit
RISING_PER_S = 0.01  # PoA-hat from 1 to 1.3 within the window
BENT_FRAC = 0.5  # most of the latency is what load adds to load

Moments = tuple[float, ...]  # decayed sums of x^0..x^4, then of y x^0..y x^2
_NONE: Moments = (0.0,) * 8


class TrendState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried: the last readings of PoA-hat, and the fit's sums."""

    points: tuple[tuple[float, float], ...] = ()
    moments: Moments = _NONE
    fitted_at_s: float | None = None


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """Soft evidence; None is too little to say.

    poa_slope:  of PoA-hat, per second
    curvature:  share of the latency at this load that the quadratic term makes, in [0, 1]
    """

    poa_slope: float | None = None
    curvature: float | None = None

    @property
    def rising(self) -> str:
        """Return what corroborates a rise of TTFT, in words; empty when nothing does."""
        found = []
        if self.poa_slope is not None and self.poa_slope >= RISING_PER_S:
            found.append(f"PoA-hat rises by {self.poa_slope:.3f} a second")
        if self.curvature is not None and self.curvature >= BENT_FRAC:
            found.append(f"latency bends upwards with load ({self.curvature:.0%} of it)")
        return ", ".join(found)


def next_trend(
    state: TrendState, at_s: float, *, poa_hat: float | None, p50_s: float | None, load: float | None
) -> tuple[TrendState, Trend]:
    """Take in a tick's readings.

    Args:  p50_s: of TTFT, None when it is not fresh.  load: arrivals per second, or requests in flight.
    """
    points = tuple(point for point in state.points if at_s - point[0] <= SLOPE_S)
    if poa_hat is not None and (not points or (at_s - points[-1][0] >= 1.0)):
        points = (*points, (at_s, poa_hat))
    moments, fitted_at_s = state.moments, state.fitted_at_s
    if p50_s is not None and load is not None:
        elapsed_s = 0.0 if fitted_at_s is None else at_s - fitted_at_s
        moments, fitted_at_s = _added(moments, load, p50_s, 0.5 ** (elapsed_s / CURVATURE_HALF_LIFE_S)), at_s
    state = TrendState(points=points, moments=moments, fitted_at_s=fitted_at_s)
    bend = None if load is None else curvature(moments, load)
    return state, Trend(poa_slope=slope(points), curvature=bend)


def slope(points: tuple[tuple[float, float], ...]) -> float | None:
    """Return the least-squares slope, per second; None for fewer than MIN_POINTS."""
    if len(points) < MIN_POINTS:
        return None
    mean_at = sum(at for at, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    return sum((at - mean_at) * (value - mean) for at, value in points) / spread if spread > 0 else None


def _added(moments: Moments, load: float, latency_s: float, keep: float) -> Moments:
    powers = (1.0, load, load**2, load**3, load**4)
    fresh = (*powers, latency_s, latency_s * load, latency_s * load**2)
    return tuple(keep * old + new for old, new in zip(moments, fresh, strict=True))


def curvature(moments: Moments, load: float) -> float | None:
    """Return how much of the latency at a load its quadratic term makes.

        latency = a + b x + c x^2 by weighted least squares
        kappa = c x^2 / (a + b x + c x^2), 0 for c <= 0

    Returns:  None for too few readings, loads too alike, or a fit that is not positive there.
    """
    weight, first, second = moments[:3]
    if weight < MIN_WEIGHT or first <= 0:
        return None
    mean = first / weight
    if second / weight - mean**2 < (MIN_SPREAD * mean) ** 2:
        return None
    # In multiples of the mean load the three terms are of one size, and the sums well conditioned.
    sums = [moment / mean**power for power, moment in enumerate(moments[:5])]
    right = [moment / mean**power for power, moment in enumerate(moments[5:])]
    normal = np.array([sums[row : row + 3] for row in range(3)])
    a, b, c = np.linalg.lstsq(normal, np.array(right), rcond=1e-10)[0]
    x = load / mean
    latency_s = a + b * x + c * x**2
    if latency_s <= 0:
        return None
    return float(min(max(c * x**2 / latency_s, 0.0), 1.0))
