"""Whether those who ask wait for each answer before they ask again, and how many they are.

Owns: what the requests in flight, second by second, tell of that.
Does not own: how they are counted (prompts.py), what a split gives under such a load (games/queues.py).
Invariant: pure. In doubt the loop is open. Users who think for longer than a fifth of their time look like an
           open loop; requests that a clock sends and that all take equally long look like users.
Source: of users who wait for an answer a share p of their time the number in flight is binomial, with a
        variance of 1 - p of its mean. Of arrivals that know nothing of one another it is Poisson's, with a
        variance of its mean, and grows over capacity; from one second to the next it changes by what came and
        what ended, with a variance of 2 * arrivals * E[min(time in flight, 1 s)] (M/G/infinity).
"""

import numpy as np

from dynamo_poa.prompts import Floats

MIN_SECONDS = 20  # of 10 one in 60 open loops looks as steady, of 20 one in 2,000: simulated, by length
MIN_KNOWN_FRAC = 0.9  # of the seconds: with fewer counts nothing is said
STEADY_FRAC = 0.2  # of what an open loop makes; a graph with at most 12 in flight: 0.11 (measured)


def users_of(in_flight: Floats, arrival_rps: float) -> int:
    """Return how many users make the load, 0 where it is an open loop or may be one.

    The count has to be steady over the window, which a count that drifts is not, and from one second to the
    next, which one of requests that take longer than the window is not.

    Args:  in_flight: at one instant of each second, NaN where it is not known.
    """
    known = in_flight[~np.isnan(in_flight)]
    changes = np.diff(in_flight)
    changes = changes[~np.isnan(changes)]
    if len(in_flight) < MIN_SECONDS or len(known) < MIN_KNOWN_FRAC * len(in_flight):
        return 0
    mean = float(known.mean())
    varies, changes_by = float(known.var(ddof=1)), float((changes**2).mean()) / 2
    steady = varies <= STEADY_FRAC * mean and changes_by <= STEADY_FRAC * min(mean, arrival_rps)
    return round(mean) if steady else 0
