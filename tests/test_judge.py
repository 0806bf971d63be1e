"""When a change is kept, given up, or left undecided; how often chance is taken for a gain."""

import math
import random

import pytest

from dynamo_poa.policies.judge import Change, Tally, Verdict, change, is_far_worse, verdict
from dynamo_poa.values import RequestOutcome


def outcome(ttft_s, e2e_s=1.0):
    return RequestOutcome(revision=1, decided_at_s=0.0, ttft_s=ttft_s, e2e_s=e2e_s)


def tally(*ttfts_s, e2e_s=1.0):
    return Tally().with_requests([outcome(ttft_s, e2e_s) for ttft_s in ttfts_s])


def changes(*ttft, e2e=0.0, mean=None):
    """Return one change a pair, of the logarithms; the means move alike unless said."""
    return [Change(value, e2e, value if mean is None else mean, e2e) for value in ttft]


def test_a_change_is_that_of_mean_logarithms_and_of_means():
    """0.1, 0.4 against 0.1, 0.1: half a log 4, and 1.5 times as much."""
    found = change(tally(0.1, 0.1), tally(0.1, 0.4, e2e_s=2.0))
    assert found == pytest.approx((math.log(4) / 2, math.log(2), 1.5, 1.0))


@pytest.mark.parametrize("absurd", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_request_without_possible_times_does_not_count(absurd):
    """S7: no duration is made up, neither from a clock that jumped nor for want of a first token."""
    assert Tally().with_requests([outcome(absurd), outcome(0.1, absurd)]) == Tally()


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        (changes(-0.2), None),
        (changes(-0.2, -0.21), None),
        (changes(-0.2, -0.21, -0.19), None),  # an even number of pairs, from 4 on: a trend cancels
        (changes(-0.2, -0.21, -0.19, -0.2), Verdict.KEPT),
        (changes(-0.2, -0.21, -0.19, -0.2, e2e=0.0099), Verdict.KEPT),  # within the 1 % that are tolerated
        (changes(-0.2, -0.21, -0.19, -0.2, e2e=0.011), Verdict.WORSE),
        (changes(0.005, 0.0052), Verdict.WORSE),  # little, but nothing to show for it
        (changes(-0.2, -0.21, -0.19, -0.2, mean=0.02), None),  # a tail that the logarithm hides
        (changes(-0.4, 0.3, -0.5, 0.2), None),
        (changes(0.2, 0.21), Verdict.WORSE),
        (changes(0.2, -0.1, 0.3, -0.2), Verdict.UNDECIDED),  # nothing better after 4 pairs: hopeless
        (changes(-0.02, 0.01, -0.02, 0.01), Verdict.UNDECIDED),  # surely less than 3 %: not worth more turns
        (changes(-0.06, 0.03, -0.06, 0.03), None),
        (changes(-0.4, 0.3, -0.5, 0.2, -0.4, 0.3, -0.5), None),
        (changes(-0.4, 0.3, -0.5, 0.2, -0.4, 0.3, -0.5, 0.2), Verdict.UNDECIDED),
    ],
)
def test_pairs_are_judged_by_bounds_on_both_figures(pairs, found):
    """Issue 6: kept with confidence, given up when worse, dropped after max_pairs = 8."""
    assert verdict(pairs, 8) is found


def test_end_to_end_time_can_be_what_is_improved():
    """The other way round: end to end down by 10 %, TTFT as it was."""
    pairs = [Change(value, -0.1 + value, -0.001, -0.1) for value in (0.001, -0.001, 0.002, -0.002)]
    assert verdict(pairs, 8) is Verdict.KEPT


def test_one_slot_is_enough_when_it_is_far_worse():
    """More than 15 % and 3 standard errors; fewer than half the requests asked for say nothing."""
    base = tally(*[0.1, 0.11] * 10)
    assert is_far_worse(base, tally(*[0.13, 0.14] * 10), 20)
    assert not is_far_worse(base, tally(*[0.11, 0.12] * 10), 20)  # 9 %
    assert not is_far_worse(base, tally(*[0.02, 1.0] * 10), 20)  # more in the mean, within its noise
    assert not is_far_worse(base, tally(*[0.13, 0.14] * 4), 20)
    assert is_far_worse(base, tally(*[0.1, 0.11] * 10, e2e_s=1.2), 20)  # end to end counts alike


def trials(effect, *, seeds, sigma=0.1, shared=0.5):
    """Return the verdicts of trials whose pairs change by `effect` and noise that both figures share."""
    found = []
    for seed in range(seeds):
        rng, pairs, one = random.Random(seed), [], None
        while one is None:
            ttft = rng.gauss(0, 1)
            end = shared * ttft + math.sqrt(1 - shared**2) * rng.gauss(0, 1)
            pairs.append(Change(*(effect + sigma * value for value in (ttft, end, ttft, end))))
            one = verdict(pairs, 8)
        found.append(one)
    return found


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_two_equal_settings_are_taken_for_a_gain_in_less_than_5_percent(shared):
    """A/A over 1000 seeds, both figures, three looks, whatever the noise they share."""
    found = trials(0.0, seeds=1000, shared=shared)
    assert found.count(Verdict.KEPT) < 50
    assert Verdict.UNDECIDED in found


def test_a_gain_as_large_as_the_noise_is_found_and_a_loss_never_kept():
    """10 % with 10 % noise a pair: kept in most trials; as large a loss in none."""
    gains, losses = trials(-0.1, seeds=400), trials(0.1, seeds=400)
    assert gains.count(Verdict.KEPT) > 240
    assert losses.count(Verdict.KEPT) == 0
    assert losses.count(Verdict.WORSE) > 180
