"""Whether one setting served its requests better than another.

Owns: what is counted of a time slot's requests, the change from one slot to its partner, when a change is
      certain enough to be kept, or bad enough to be given up.
Does not own: which slots there are and which requests belong to them (trial.py), what follows (auto.py).
Invariant: a change is judged on differences between slots next to each other in time, never on requests side
           by side: those share queues, and each arm would feel the other's choices.
Source: issue 6; false keeps of two equal settings measured by tests/test_judge.py.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from scipy.special import stdtrit

from dynamo_poa.values import RequestOutcome

LOOKS_EVERY = 2  # pairs: an even number has as many slots before as after, so that a trend cancels
MIN_KEEP_PAIRS = 4
# One-sided, at each look: three looks at two figures keep equal settings in less than 5 % of trials.
KEEP_SURE = 0.9925
WORSE_SURE = 0.975  # giving up a good one costs its gain only, going on with a bad one costs users
TOLERATED_FRAC = 0.01  # of the figure that is not the one to be improved, and of a mean
WORTH_FRAC = 0.03  # a gain that is surely less is not waited for ...
WORTH_SURE = 0.95  # ... at each look
SLOT_WORSE = math.log(1.15)  # one slot is enough ...
SLOT_ERRORS = 3.0  # ... when it is so many standard errors
STARVED_FRAC = 0.5  # of the share of requests that ended under the other setting


class Verdict(StrEnum):
    """What became of a trial; the values are the reasons that are reported."""

    KEPT = "kept"
    WORSE = "worse"
    FAILED = "failed"
    UNDECIDED = "undecided"
    INTERRUPTED = "interrupted"
    TOO_LITTLE = "too_little_traffic"


class Tally(msgspec.Struct, frozen=True):
    """Requests that ended: how many, and sums of log TTFT and log end-to-end time, in log seconds."""

    count: int = 0
    ttft: float = 0.0
    ttft_squares: float = 0.0
    e2e: float = 0.0
    e2e_squares: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0

    def with_requests(self, outcomes: Sequence[RequestOutcome]) -> "Tally":
        """Return it with more requests; one without both times, or with an impossible one, is left out."""
        count, ttft, ttft_squares, e2e, e2e_squares, ttft_s, e2e_s = msgspec.structs.astuple(self)
        for outcome in outcomes:
            first_s, end_s = outcome.ttft_s, outcome.e2e_s
            if first_s is None or end_s is None or not (0 < first_s < math.inf and 0 < end_s < math.inf):
                continue
            log_first, log_end = math.log(first_s), math.log(end_s)
            count += 1
            ttft += log_first
            ttft_squares += log_first * log_first
            e2e += log_end
            e2e_squares += log_end * log_end
            ttft_s += first_s
            e2e_s += end_s
        return Tally(count, ttft, ttft_squares, e2e, e2e_squares, ttft_s, e2e_s)


class Change(NamedTuple):
    """From the setting in force to the candidate, over one pair of slots.

    ttft, e2e:      of the mean logarithm: -0.1 is about 10 % less
    ttft_mean_frac, e2e_mean_frac:  of the mean, as a share: the logarithm makes little of the tail
    """

    ttft: float
    e2e: float
    ttft_mean_frac: float
    e2e_mean_frac: float


def change(base: Tally, candidate: Tally) -> Change:
    """Return the change from one slot to its partner; both have requests."""
    n, m = base.count, candidate.count
    return Change(
        candidate.ttft / m - base.ttft / n,
        candidate.e2e / m - base.e2e / n,
        (candidate.ttft_s / m) / (base.ttft_s / n) - 1,
        (candidate.e2e_s / m) / (base.e2e_s / n) - 1,
    )


def is_far_worse(base: Tally, candidate: Tally, min_requests: int) -> bool:
    """Tell whether one slot alone shows that the candidate harms, in TTFT or end to end.

    change > log 1.15 and change > 3 * sqrt(var_base / n_base + var_candidate / n_candidate)
    """
    if min(base.count, candidate.count) < max(min_requests // 2, 2):
        return False
    moved = change(base, candidate)
    for value, name in ((moved.ttft, "ttft"), (moved.e2e, "e2e")):
        error = math.sqrt(_error_squared(base, name) + _error_squared(candidate, name))
        if value > SLOT_WORSE and value > SLOT_ERRORS * error:
            return True
    return False


def verdict(changes: Sequence[Change], max_pairs: int) -> Verdict | None:
    """Judge the pairs so far, with Student's t over pairs.

        kept:   upper bound of the TTFT change < 0, the other figure and either mean not up by more than 1 %;
                or the same of end-to-end time. At an even number of pairs, from 4 on
        worse:  lower bound of either change > 1 %, or > 0 with nothing better to show for it
        undecided:  after max_pairs; or from 4 pairs on when neither figure has improved at all, or can have
                    by 3 %

    Returns:  None while the trial should go on.
    """
    pairs = len(changes)
    if pairs < 2:
        return None
    ttft, e2e = [one.ttft for one in changes], [one.e2e for one in changes]
    mean_ttft, mean_e2e = sum(ttft) / pairs, sum(e2e) / pairs
    surely = max(_bound(ttft, -WORSE_SURE), _bound(e2e, -WORSE_SURE))
    if surely > TOLERATED_FRAC or (surely > 0 and min(mean_ttft, mean_e2e) >= 0):
        return Verdict.WORSE
    if pairs % LOOKS_EVERY or pairs < min(MIN_KEEP_PAIRS, max_pairs):
        return None
    tail_frac = max(
        sum(one.ttft_mean_frac for one in changes) / pairs, sum(one.e2e_mean_frac for one in changes) / pairs
    )
    better = min(_bound(ttft, KEEP_SURE), _bound(e2e, KEEP_SURE)) < 0
    if better and max(mean_ttft, mean_e2e, tail_frac) <= TOLERATED_FRAC:
        return Verdict.KEPT
    at_best = min(_bound(ttft, -WORTH_SURE), _bound(e2e, -WORTH_SURE))
    hopeless = min(mean_ttft, mean_e2e) >= 0 or at_best > -WORTH_FRAC
    return Verdict.UNDECIDED if pairs >= max_pairs or hopeless else None


def _bound(values: Sequence[float], sure: float) -> float:
    """Return the bound that the mean is under with probability `sure`, over with -`sure`."""
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    quantile = float(stdtrit(n - 1, abs(sure)))
    side: float = math.copysign(quantile, sure)
    return mean + side * deviation / math.sqrt(n)


def _error_squared(tally: Tally, name: str) -> float:
    total: float = getattr(tally, name)
    squares: float = getattr(tally, f"{name}_squares")
    return max(squares - total * total / tally.count, 0.0) / (tally.count - 1) / tally.count
