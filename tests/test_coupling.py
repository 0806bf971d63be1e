"""The three games side by side: where the cost is from, and what would help."""

import msgspec
import pytest
from exposition import samples_of
from prometheus_client import generate_latest
from records import RECORD
from shown import text

from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.coupling import (
    Advice,
    AllocationEstimate,
    Attainment,
    CacheSwap,
    CachingEstimate,
    Coupling,
    Split,
    couple,
    gained,
    in_words,
)
from dynamo_poa.report import explained
from dynamo_poa.serve.view import record_view
from dynamo_poa.values import Estimate, Regime, Shares

NOW = Attainment(split=Split(3, 5), ttft_frac=0.91, itl_frac=0.99, goodput_rps=90.0)
THEN = Attainment(split=Split(4, 4), ttft_frac=0.98, itl_frac=0.98, goodput_rps=96.0)
ADVICE = Advice(now=NOW, then=THEN, gain_frac=0.066, gain_low=0.02, gain_high=0.11, held_s=75.0)
ADVISED = "3P/5D → 4P/4D: TTFT attainment 91 → 98 %, ITL 99 → 98 %, goodput +7 % (+2 to +11)"
CACHING = CachingEstimate(
    poa_hat=1.5,
    observed_s=0.3,
    optimal_s=0.2,
    bound_s=0.2,
    method="exact",
    groups=40,
    workers=4,
    duplication=2.25,
    copies_frac=0.5,
    reload_frac=0.125,
)
SPLITS = AllocationEstimate(
    poa_hat=1.067,
    now=NOW,
    best=THEN,
    equilibrium=THEN,
    target=THEN,
    gain_frac=0.066,
    gain_low=0.02,
    gain_high=0.11,
    one_more_prefill=0.08,
    one_more_decode=0.01,
)


def routing(congestion: float, miss: float, capacity: float) -> Estimate:
    return Estimate(poa_hat=1.25, shares=Shares(miss=miss, congestion=congestion, capacity=capacity))


@pytest.mark.parametrize(
    ("shares", "dominant", "remedy"),
    [
        ((0.6, 0.3, 0.1), "routing", "another choice of workers: the policy's to find"),
        ((0.1, 0.6, 0.3), "caching", "more cache affinity, or more cache"),
        ((0.3, 0.1, 0.6), "capacity", f"no routing parameter can help; {ADVISED}"),
        ((0.5, 0.5, 0.0), "", ""),
    ],
)
def test_a_cause_dominates_with_more_than_half(
    shares: tuple[float, float, float], dominant: str, remedy: str
) -> None:
    """Issue 7: a reader sees where the inefficiency is."""
    coupling = couple(routing(*shares), CACHING, SPLITS, ADVICE)
    assert (coupling.dominant, coupling.remedy) == (dominant, remedy)
    assert (coupling.routing, coupling.caching, coupling.allocation) == (1.25, 1.5, 1.067)


def test_without_advice_the_pool_that_gains_most_by_one_more_worker_is_named() -> None:
    """Issue 7: that no routing parameter can help, and what would."""
    of_capacity = routing(0.2, 0.1, 0.7)
    assert couple(of_capacity, CACHING, SPLITS).remedy == (
        "no routing parameter can help; one more prefill worker would: goodput +8 %"
    )
    assert couple(of_capacity, CACHING, AllocationEstimate(reason="aggregated workers")).remedy == (
        "no routing parameter can help; more workers or fewer requests would"
    )
    enough = AllocationEstimate(poa_hat=1.0, now=THEN, best=THEN, one_more_prefill=0.0, one_more_decode=0.009)
    assert couple(of_capacity, CACHING, enough).remedy == (
        "no routing parameter can help; more workers would shorten waits that are within the objectives"
    )
    broken = msgspec.structs.replace(enough, now=NOW)
    assert couple(of_capacity, CACHING, broken).remedy == (
        "no routing parameter can help; more workers or fewer requests would"
    )


def test_a_leg_that_is_not_priced_may_hold_most_of_the_cost() -> None:
    """Seen live: forty prompts waited for the one prefill worker, and the decode leg's cost was routing's."""
    mostly = Shares(miss=0.0, congestion=0.79, capacity=0.21)
    one_prefill = Estimate(
        poa_hat=1.356,
        shares=mostly,
        legs={
            "prefill": Estimate(reason="1 worker, 2 needed"),
            "decode": Estimate(poa_hat=1.356, shares=mostly),
        },
    )
    said = couple(one_prefill, CACHING, SPLITS, driver="prefill", without_choice=["prefill"])
    assert (said.dominant, said.unpriced) == ("capacity", {"prefill": "1 worker, 2 needed"})
    assert in_words(said) == (
        "the cost beyond an unloaded system is 79% routing, 0% caching, 21% capacity (not in it: prefill: "
        "1 worker, 2 needed): no routing parameter can help; one more prefill worker would: goodput +8 %"
    )
    assert couple(one_prefill, CACHING, SPLITS, driver="prefill").dominant == ""
    assert couple(one_prefill, CACHING, SPLITS).dominant == ""
    assert couple(one_prefill, CACHING, SPLITS, driver="decode").dominant == "routing"


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ((0.066, 0.02, 0.11), "+7 % (+2 to +11)"),
        ((150.0, 120.0, 200.0), "more than a hundredfold"),
        ((59.9, 0.009, 100.0), "+5990 % (+1 to over 10000)"),
    ],
)
def test_gains_beyond_a_hundredfold_are_not_told_apart(gain: tuple[float, float, float], said: str) -> None:
    """The model's own bound: a split that gets next to nothing done makes any other infinitely better."""
    assert gained(*gain) == said


def test_nothing_known_is_nothing_said() -> None:
    """Absent is None with a reason, never 1.0."""
    nothing = couple(
        Estimate(reason="no decisions"), CachingEstimate(reason="x"), AllocationEstimate(reason="y")
    )
    assert nothing == Coupling()
    assert in_words(nothing) == "no cost beyond that of an unloaded system is known"


def test_the_reason_says_what_no_routing_can_change_under_load_alone() -> None:
    """Below the knee waiting is next to nothing, and all of it is capacity's."""
    coupling = couple(routing(0.1, 0.1, 0.8), CACHING, SPLITS)
    added = "capacity dominates: no routing parameter can help; one more prefill worker would: goodput +8 %"
    assert explained("queue 30 units", Regime.SATURATED, coupling) == f"queue 30 units; {added}"
    assert explained("calm", Regime.BELOW, coupling) == "calm"
    assert explained("P99", Regime.TRANSITION, couple(routing(0.8, 0.1, 0.1), CACHING, SPLITS)) == "P99"


def test_watch_shows_the_three_games() -> None:
    """Issue 7: routing, caching or capacity, the placement, the split, the advice, what a swap did."""
    record = msgspec.structs.replace(
        RECORD,
        coupling=couple(routing(0.2, 0.1, 0.7), CACHING, SPLITS, ADVICE),
        caching=CACHING,
        allocation=SPLITS,
        poa_advice=ADVICE,
        cache_swap=CacheSwap(
            at_s=1.0,
            overlap_weight_before=1.0,
            overlap_weight_after=0.1,
            hit_frac_before=0.75,
            hit_frac_during=0.5,
            duplication_before=1.25,
        ),
    )
    shown = [line for line in text(record_view(record)).splitlines() if line[:10].strip() in _ROWS]
    assert shown == [
        f"dominant    capacity: no routing parameter can help; {ADVISED}",
        "caching     PoA-hat 1.500 (0.300 GPU s a second, 0.200 at best; exact, 40 prefix groups on 4 "
        "workers); 2.250 copies a block; 50.0% of capacity copies; 12.5% of evictions too early",
        "after swap  ω 1 → 0.1: found cached 75.0% → 50.0% → - (before, during, after), "
        "copies a block 1.250 → -",
        "split       PoA-hat 1.067; predicted within objectives now: 3P/5D TTFT 91.0%, ITL 99.0%, "
        "90.0 requests/s; better: 4P/4D TTFT 98.0%, ITL 98.0%, 96.0 requests/s, +7 % (+2 to +11)",
        f"advice      {ADVISED} (for 75 s)",
    ]


_ROWS = {"dominant", "caching", "after swap", "split", "advice"}


def test_a_swap_of_who_picks_is_not_shown_as_one_of_omega() -> None:
    """Seen by a newcomer: `ω 1 → 1` reads as if nothing had been changed."""
    swap = CacheSwap(at_s=1.0, overlap_weight_before=1.0, overlap_weight_after=1.0, hit_frac_before=0.25)
    shown = text(record_view(msgspec.structs.replace(RECORD, cache_swap=swap)))
    assert (
        "after swap  who picks the worker changed: found cached 25.0% → - → - (before, during, after)"
        in shown
    )


async def test_metrics_say_what_is_known_of_the_other_games_and_nothing_else() -> None:
    """Unknown is absent, never 0."""
    metrics = ControllerMetrics()
    await metrics.emit(RECORD)
    before = samples_of(generate_latest(metrics.registry).decode())
    assert "poa_caching_hat" not in before
    assert "poa_caching_uncertain" not in before
    assert "poa_allocation_hat" not in before
    await metrics.emit(
        msgspec.structs.replace(
            RECORD,
            caching=CACHING,
            allocation=SPLITS,
            poa_advice=ADVICE,
            coupling=couple(routing(0.2, 0.1, 0.7), CACHING, SPLITS),
        )
    )
    samples = samples_of(generate_latest(metrics.registry).decode())
    assert samples["poa_caching_hat"] == 1.5
    assert samples["poa_caching_duplication"] == 2.25
    assert samples["poa_caching_uncertain"] == 0
    assert "poa_caching_shared_hits_frac" not in samples
    assert samples['poa_allocation_workers{role="decode",split="best"}'] == 4
    assert samples['poa_allocation_goodput_rps{split="now"}'] == 90.0
    causes = [samples[f'poa_dominant{{cause="{cause}"}}'] for cause in ("routing", "caching", "capacity")]
    assert causes == [0, 0, 1]
    assert samples["poa_advice"] == 1
