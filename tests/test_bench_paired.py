"""Pairing and intervals: known answers, and coverage where the true answer is known."""

import math

import msgspec
import numpy as np
import pytest
from suite_results import FLEET, cell, done

from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.paired import compare, half_width, typical
from dynamo_poa.workloads.arrivals import Closed


def results(
    policy: str, values: dict[int, float], users: int = 8, figure: str = "ttft_mean_s"
) -> list[Result]:
    """One result a seed."""
    return [
        done(cell(policy, seed, Closed(users=users)), **{figure: value}) for seed, value in values.items()
    ]


def test_a_tenth_less_on_every_seed_is_better_by_exactly_that() -> None:
    """Seeds may differ a hundredfold: what counts is the ratio within a seed."""
    found = compare(
        results("new", {1: 0.9, 2: 9.0, 3: 90.0}), results("kv", {1: 1.0, 2: 10.0, 3: 100.0}), "ttft_mean_s"
    )
    assert found.ratio == pytest.approx(0.9)
    assert (found.low, found.high) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (found.verdict, found.pairs, found.seeds) == ("better", 3, 3)
    assert found.text == "-10.0 % (-10.0 to -10.0): better"


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        ("ttft_p99_s", "worse"),
        ("throughput_rps", "better"),
        ("saturated.throughput_rps", "better"),
        ("poa_hat", "worse"),
    ],
)
def test_more_is_better_of_throughput_and_worse_of_time(figure: str, verdict: str) -> None:
    """The direction belongs to the figure, in phases too."""
    high, low = {1: 2.0, 2: 2.2, 3: 2.1}, {1: 1.0, 2: 1.1, 3: 1.05}
    found = compare(results("new", high, figure=figure), results("kv", low, figure=figure), figure)
    assert found.verdict == verdict


def test_the_interval_of_three_seeds_is_the_formulas() -> None:
    """ln ratios -0.1, 0, 0.2: resampled medians are up to 0.2 off; times t_2 / z * sqrt(3 / 2) = 2.6887."""
    ratios = {1: math.exp(-0.1), 2: 1.0, 3: math.exp(0.2)}
    found = compare(results("new", ratios), results("kv", {1: 1.0, 2: 1.0, 3: 1.0}), "ttft_mean_s")
    half = 0.2 * 4.30265 / 1.959964 * math.sqrt(1.5)
    assert found.ratio == 1.0
    assert found.low == pytest.approx(math.exp(-half), rel=1e-5)
    assert found.high == pytest.approx(math.exp(half), rel=1e-5)
    assert found.verdict == "no difference"


def test_three_seeds_that_agree_in_sign_alone_are_no_difference() -> None:
    """Three times the same sign happens by chance once in four."""
    found = compare(
        results("new", {1: 0.9, 2: 0.99, 3: 0.8}), results("kv", {1: 1, 2: 1, 3: 1}), "ttft_mean_s"
    )
    assert (found.ratio, found.verdict) == (pytest.approx(0.9), "no difference")


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.9949, "better"), (0.9951, "no difference"), (1.0051, "worse")]
)
def test_less_than_half_a_percent_is_no_difference_however_sure(ratio: float, verdict: str) -> None:
    """In virtual time seeds agree to a thousandth; nobody has a use for that."""
    seeds = {1: 1.0, 2: 2.0, 3: 3.0}
    found = compare(
        results("new", {seed: ratio * value for seed, value in seeds.items()}),
        results("kv", seeds),
        "ttft_mean_s",
    )
    assert (found.ratio, found.verdict) == (pytest.approx(ratio), verdict)


def test_equal_results_are_no_difference() -> None:
    """A replay of the same seed gives the same figures: the interval is the point 1."""
    same = {1: 0.3, 2: 0.4, 3: 0.5}
    found = compare(results("new", same), results("kv", same), "ttft_mean_s")
    assert (found.ratio, found.low, found.high, found.verdict) == (1.0, 1.0, 1.0, "no difference")


def test_the_interval_holds_the_truth_in_nineteen_of_twenty_tries() -> None:
    """Coverage of >= 95 % for normal and Laplace noise; plain percentiles of 3 seeds have 75 %."""
    rng = np.random.default_rng(7)
    for n in (3, 5, 10):
        for draw in (rng.normal, rng.laplace):
            samples = [draw(size=n) for _ in range(400)]
            held = sum(abs(np.median(sample)) <= half_width(list(sample)) for sample in samples)
            assert held / 400 >= 0.95


def test_cells_that_differ_in_more_than_their_policy_are_not_paired() -> None:
    """Same seed, other load or other fleet: nothing to compare."""
    other_load = compare(
        results("new", {1: 1, 2: 1, 3: 1}, users=16), results("kv", {1: 1, 2: 1, 3: 1}), "ttft_mean_s"
    )
    bigger = msgspec.structs.replace(FLEET, kv_blocks=9)
    other_fleet = compare(
        [done(cell("new", seed, fleet=bigger), ttft_mean_s=1.0) for seed in (1, 2, 3)],
        results("kv", {1: 1, 2: 1, 3: 1}),
        "ttft_mean_s",
    )
    for found in (other_load, other_fleet):
        assert (found.ratio, found.pairs, found.verdict) == (None, 0, "no verdict")
        assert found.reason == "0 of at least 3 paired seeds"


def test_void_and_failed_results_and_missing_figures_are_never_paired() -> None:
    """What the processors limited says nothing of routing; two seeds are left, which is too few."""
    ours = results("new", {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5})
    theirs = results("kv", {1: 1.0, 2: 1.0})
    theirs.append(msgspec.structs.replace(results("kv", {3: 1.0})[0], state="void"))
    theirs.append(done(cell("kv", 4), itl_mean_s=1.0))
    found = compare(ours, theirs, "ttft_mean_s")
    assert (found.pairs, found.seeds, found.verdict) == (2, 2, "no verdict")
    assert found.ratio == pytest.approx(0.5)
    assert found.text == "no verdict: 2 of at least 3 paired seeds"


def test_over_several_loads_the_seed_is_what_is_resampled() -> None:
    """Ratios 0.5 at one load and 2 at the other, on every seed alike: 1, and the loads are no noise."""
    ours = results("new", {1: 0.5, 2: 0.5, 3: 0.5}) + results("new", {1: 2, 2: 2, 3: 2}, users=16)
    theirs = results("kv", {1: 1, 2: 1, 3: 1}) + results("kv", {1: 1, 2: 1, 3: 1}, users=16)
    found = compare(ours, theirs, "ttft_mean_s")
    assert (found.pairs, found.seeds) == (6, 3)
    assert (found.ratio, found.low, found.high) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))


def test_a_load_that_lacks_a_seed_does_not_shift_that_seeds_value() -> None:
    """Without centring, seed 3 would be 0.5 and the others 1: a difference between loads taken for chance."""
    ours = results("new", {1: 0.5, 2: 0.5, 3: 0.5}) + results("new", {1: 2, 2: 2}, users=16)
    theirs = results("kv", {1: 1, 2: 1, 3: 1}) + results("kv", {1: 1, 2: 1}, users=16)
    found = compare(ours, theirs, "ttft_mean_s")
    assert (found.pairs, found.low, found.high) == (5, pytest.approx(1), pytest.approx(1))


def test_nothing_over_something_has_no_ratio() -> None:
    """0 failed against 3 is no ratio; 0 against 0 is 1."""
    none, some = {1: 0.0, 2: 0.0, 3: 0.0}, {1: 0.0, 2: 3.0, 3: 0.0}
    found = compare(results("new", some, figure="failed"), results("kv", none, figure="failed"), "failed")
    assert (found.verdict, found.reason) == ("no verdict", "failed is 0 on one side of 1 of 3 pairs")
    equal = compare(results("new", none, figure="failed"), results("kv", none, figure="failed"), "failed")
    assert (equal.ratio, equal.verdict) == (1.0, "no difference")


def test_a_figure_is_told_as_its_median_over_seeds() -> None:
    """Issue: medians with 95 % intervals; none from two seeds."""
    found = typical(results("kv", {1: 1.0, 2: 2.0, 3: 4.0}), "ttft_mean_s")
    assert found is not None
    assert (found.median, found.seeds) == (2.0, 3)
    assert found.high == pytest.approx(2.0 + 2.0 * 4.30265 / 1.959964 * math.sqrt(1.5), rel=1e-5)
    two = typical(results("kv", {1: 1.0, 2: 2.0}), "ttft_mean_s")
    assert two is not None
    assert (two.median, two.low, two.high) == (1.5, None, None)
    assert typical([], "ttft_mean_s") is None


def test_a_cell_has_the_same_id_when_it_was_read_back() -> None:
    """Resuming goes by ids, and JSON tells 1 from 1.0."""
    before = cell(seconds=1, warm_up_s=0.5)
    after = msgspec.json.decode(msgspec.json.encode(before), type=type(before))
    assert after.id == before.id
